//! What the ranks tell each other while a communicator is used again or made anew, when one of them says nonsense, nothing, or why it
//! cannot go on. Somebody stands between rank 1 (or a newcomer) and rank 0 and changes their words.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ftcore::{ErrorKind, GroupOptions, InMemoryStore, ProcessGroup, Store, deadline_in};
use libtest_mimic::Failed;

use super::kit::*;
use super::reuse::{counts, options, sum_is};
use super::system::{PRELOAD, REFUSE, nothing_is_left, turn};
use super::{FAIL, HANG, Scenario, scenario};

const SOON: Duration = Duration::from_secs(20);
const LOG: (&str, &str) = ("OXCCL_STANDIN_NCCL_LOG", "@log");

/// What crosses the connection: a greeting, then frames of a head (kind, origin, number, length of the text) and a text.
const GREETING: usize = 77;
const HEAD: usize = 17;
const ENTER: u8 = 5;
const PLAN: u8 = 7;
const TRIED: u8 = 8;

/// What arrives instead of a frame.
enum Instead {
    Itself,
    Bytes(Vec<u8>),
    Nothing,
    TheEnd,
}

/// Of a frame: whether rank 0 said it, its kind and its text.
type Change = fn(bool, u8, &str) -> Instead;

fn frame(kind: u8, text: &str) -> Instead {
    let mut frame = vec![kind];
    frame.extend([0; 12]);
    frame.extend((text.len() as u32).to_le_bytes());
    frame.extend(text.as_bytes());
    Instead::Bytes(frame)
}

fn garbage() -> Instead {
    Instead::Bytes(vec![0xEE; 64])
}

/// `other` instead of a rank's answer whether its part worked.
fn answer(from_zero: bool, kind: u8, other: Instead) -> Instead {
    match !from_zero && kind == TRIED {
        true => other,
        false => Instead::Itself,
    }
}

/// `other` instead of rank 0's word that begins like this.
fn word(from_zero: bool, kind: u8, text: &str, start: &str, other: Instead) -> Instead {
    match from_zero && kind == PLAN && text.starts_with(start) {
        true => other,
        false => Instead::Itself,
    }
}

/// Passes one frame on; false at the end.
fn pass_one(
    from: &mut TcpStream,
    to: &mut TcpStream,
    change: &impl Fn(u8, &str) -> Instead,
) -> std::io::Result<bool> {
    let mut frame = vec![0; HEAD];
    from.read_exact(&mut frame)?;
    let (kind, length) = match frame.as_slice() {
        [kind, .., a, b, c, d] => (*kind, u32::from_le_bytes([*a, *b, *c, *d])),
        _ => return Ok(false),
    };
    let mut text = vec![0; length as usize];
    from.read_exact(&mut text)?;
    match change(kind, &String::from_utf8_lossy(&text)) {
        Instead::Itself => {
            frame.extend(text);
            to.write_all(&frame)?;
        }
        Instead::Bytes(bytes) => to.write_all(&bytes)?,
        Instead::Nothing => {}
        Instead::TheEnd => return Ok(false),
    }
    Ok(true)
}

/// Passes on what comes, until one side ends; then the other one sees the end, too.
fn carry(mut from: TcpStream, mut to: TcpStream, greeting: usize, change: impl Fn(u8, &str) -> Instead) {
    let mut bytes = vec![0; greeting];
    let greeted = from.read_exact(&mut bytes).and_then(|()| to.write_all(&bytes));
    let mut open = greeted.is_ok();
    while open {
        open = pass_one(&mut from, &mut to, &change).unwrap_or(false);
    }
    let _ = to.shutdown(Shutdown::Write);
}

/// Stands between whoever comes and rank 0 at `port`.
fn pass_on(listener: &TcpListener, port: u16, change: Change) -> std::io::Result<()> {
    let (one, _) = listener.accept()?;
    let zero = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    one.set_nodelay(true)?;
    zero.set_nodelay(true)?;
    let (from, to) = (zero.try_clone()?, one.try_clone()?);
    let back = std::thread::Builder::new().name("between".to_string());
    back.spawn(move || carry(from, to, 0, |kind, text| change(true, kind, text)))?;
    carry(one, zero, GREETING, |kind, text| change(false, kind, text));
    Ok(())
}

/// A store in which rank 0's record of `epoch` leads to `between`, who is told rank 0's own port.
fn detour(
    store: &Arc<dyn Store>,
    epoch: u64,
    between: impl FnOnce(&TcpListener, u16) -> std::io::Result<()> + Send + 'static,
) -> Result<Arc<dyn Store>, Failed> {
    let key = format!("errors/{epoch}/nccl");
    store.wait(&[&key], deadline_in(SOON))?;
    let record = String::from_utf8(store.get(&key, deadline_in(SOON))?)?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let own = listener.local_addr()?.port().to_string();
    let mut words: Vec<&str> = record.split(' ').collect();
    let place = words.get_mut(2).ok_or("a record without a port")?;
    let port: u16 = std::mem::replace(place, &own).parse()?;
    let there = words.join(" ");
    let thread = std::thread::Builder::new().name("between".to_string());
    thread.spawn(move || between(&listener, port))?;
    let other: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    other.set(&key, there.as_bytes(), deadline_in(SOON))?;
    Ok(other)
}

/// Words between rank 1 and rank 0 of three that are changed, and what each rank says then.
struct Case {
    change: Change,
    patience: Duration,
    kinds: [ErrorKind; 3],
    words: [&'static [&'static str]; 3],
    /// Who is to blame.
    peer: u32,
}

const TOLD: &[&str] = &["rank 0 reports", "rank 1 said something else"];
const MISFIT: &str = "rank 0 said something that does not fit";

static CASES: [Case; 10] = [
    // Rank 1 says nonsense.
    Case {
        change: |zero, kind, _| answer(zero, kind, frame(ENTER, "")),
        patience: SOON,
        kinds: [ErrorKind::Protocol; 3],
        words: [
            &["rank 1 said something else", "phase: reuse", "configure"],
            TOLD,
            TOLD,
        ],
        peer: 1,
    },
    Case {
        change: |zero, kind, _| answer(zero, kind, garbage()),
        patience: SOON,
        kinds: [ErrorKind::Protocol; 3],
        words: [
            &["kind 238", "configure"],
            &["rank 0 reports", "kind 238"],
            &["rank 0 reports", "kind 238"],
        ],
        peer: 1,
    },
    Case {
        change: |zero, kind, _| answer(zero, kind, Instead::TheEnd),
        patience: SOON,
        kinds: [ErrorKind::PeerLost; 3],
        words: [
            &["rank 1 closed", "configure"],
            &["rank 0 reports", "rank 1 closed"],
            &["rank 0 reports", "rank 1 closed"],
        ],
        peer: 1,
    },
    // A part of a frame, and no more.
    Case {
        change: |zero, kind, _| answer(zero, kind, Instead::Bytes(vec![TRIED; 5])),
        patience: SOON,
        kinds: [ErrorKind::Io, ErrorKind::Backend, ErrorKind::Backend],
        words: [
            &["reading a control frame", "configure"],
            &["rank 0 reports", "reading a control frame"],
            &["rank 0 reports", "reading a control frame"],
        ],
        peer: 1,
    },
    Case {
        change: |zero, kind, _| answer(zero, kind, Instead::Nothing),
        patience: Duration::from_secs(4),
        kinds: [ErrorKind::Timeout; 3],
        words: [
            &["rank 1 did not say whether", "configure"],
            &["rank 0 reports", "rank 1 did not say whether"],
            &["rank 0 reports", "rank 1 did not say whether"],
        ],
        peer: 1,
    },
    // Rank 0 says nonsense to rank 1, and is right with rank 2.
    Case {
        change: |zero, kind, text| word(zero, kind, text, "reuse", frame(PLAN, "nonsense")),
        patience: SOON,
        kinds: [ErrorKind::Protocol; 3],
        words: [
            &["rank 1 reports", MISFIT, "configure"],
            &[MISFIT, "phase: reuse", "configure"],
            &["rank 0 reports", "rank 1 reports", MISFIT],
        ],
        peer: 0,
    },
    Case {
        change: |zero, kind, text| word(zero, kind, text, "reuse", frame(PLAN, "stands")),
        patience: SOON,
        kinds: [ErrorKind::Protocol; 3],
        words: [
            &["rank 1 reports", "rank 0 said no plan"],
            &["rank 0 said no plan", "phase: reuse"],
            &["rank 0 reports", "rank 0 said no plan"],
        ],
        peer: 0,
    },
    Case {
        change: |zero, kind, text| word(zero, kind, text, "reuse", frame(ENTER, "")),
        patience: SOON,
        kinds: [ErrorKind::Protocol; 3],
        words: [
            &["rank 1 reports", "rank 0 said something else"],
            &["rank 0 said something else", "phase: reuse"],
            &["rank 0 reports", "rank 0 said something else"],
        ],
        peer: 0,
    },
    // The others go on, and hear of it in their new configuration at the latest.
    Case {
        change: |zero, kind, text| word(zero, kind, text, "stands", frame(PLAN, "reuse 3 split")),
        patience: SOON,
        kinds: [ErrorKind::Protocol; 3],
        words: [
            &["rank 1 reports", "out of place"],
            &["rank 0 said something out of place", "phase: reuse"],
            &["rank 1 reports", "out of place"],
        ],
        peer: 0,
    },
    Case {
        change: |zero, kind, text| word(zero, kind, text, "stands", garbage()),
        patience: SOON,
        kinds: [ErrorKind::Protocol; 3],
        words: [
            &["rank 1 reports", "kind 238"],
            &["kind 238", "configure"],
            &["rank 1 reports", "kind 238"],
        ],
        peer: 0,
    },
];

/// All three ranks have a communicator; the words about the next one are changed. Everybody is told who said what, and the configuration
/// after that works.
fn nonsense<const CASE: usize>() -> Outcome {
    let case = &CASES[CASE];
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    ranks(3, |rank| {
        let group = group(rank, options())?;
        group.configure(configuration(&store, rank, 3, 1, SOON))?;
        sum_is(rank, &group, 3.0)?;
        store.barrier("all work", 3, deadline_in(SOON))?;
        let way = match rank {
            1 => detour(&store, 2, move |listener, port| {
                pass_on(listener, port, case.change)
            })?,
            _ => store.clone(),
        };
        let heard = turn(rank, &group, configuration(&way, rank, 3, 2, case.patience))?;
        let e = heard.ok_or("nothing was wrong")?;
        says(&e, case.kinds[rank as usize], case.words[rank as usize])?;
        let blamed = e.context().peer;
        check(blamed == Some(case.peer), || {
            format!("rank {blamed:?} is to blame: {e}")
        })?;
        store.barrier("all have failed", 3, deadline_in(SOON))?;
        group.configure(configuration(&store, rank, 3, 3, SOON))?;
        sum_is(rank, &group, 3.0)?;
        store.barrier("all go on", 3, deadline_in(SOON))?;
        Ok(())
    })?;
    nothing_is_left()
}

/// A newcomer is told something instead of the id to join with: all go on with a new communicator.
fn newcomer() -> Outcome {
    let change: Change = |zero, kind, text| word(zero, kind, text, "grow ", frame(PLAN, "stands"));
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    ranks(3, |rank| {
        let group = group(rank, options())?;
        if rank < 2 {
            group.configure(configuration(&store, rank, 2, 1, SOON))?;
            sum_is(rank, &group, 2.0)?;
            store.barrier("both work", 2, deadline_in(SOON))?;
        }
        let way = match rank {
            2 => detour(&store, 2, move |listener, port| pass_on(listener, port, change))?,
            _ => store.clone(),
        };
        group.configure(configuration(&way, rank, 3, 2, SOON))?;
        sum_is(rank, &group, 3.0)?;
        store.barrier("all work", 3, deadline_in(SOON))?;
        Ok(())
    })?;
    counts(&[("init ", 5), ("grow rank=2", 0)])?;
    nothing_is_left()
}

/// Rank 1 cannot join, and rank 0 is stuck in the library: it is told why at once, also where communicators are used again.
fn told_while_stuck() -> Outcome {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    ranks(2, |rank| {
        let group = group(rank, options())?;
        let began = Instant::now();
        let e = group.configure(configuration(&store, rank, 2, 1, PATIENCE)).err();
        let e = e.ok_or("they met")?;
        let words: &[&str] = match rank {
            0 => &["rank 1 reports", "ncclCommInitRankConfig"],
            _ => &["ncclCommInitRankConfig", "configure"],
        };
        says(&e, ErrorKind::Backend, words)?;
        check(began.elapsed() < SOON, || {
            format!("it took {:?}", began.elapsed())
        })?;
        store.barrier("both have failed", 2, deadline_in(SOON))?;
        next_epoch(rank, &group, &store)?;
        store.barrier("both go on", 2, deadline_in(SOON))?;
        Ok(())
    })
}

/// Rank 1 cannot join, and its word on that is cut off: rank 0 knows no reason, but that it is gone.
fn cut_off() -> Outcome {
    const FAILED: u8 = 3;
    let change: Change = |zero, kind, _| match !zero && kind == FAILED {
        true => Instead::Bytes(vec![FAILED; 5]),
        false => Instead::Itself,
    };
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    ranks(2, |rank| {
        let group = group(rank, GroupOptions::default())?;
        let way = match rank {
            1 => detour(&store, 1, move |listener, port| pass_on(listener, port, change))?,
            _ => store.clone(),
        };
        let e = group.configure(configuration(&way, rank, 2, 1, PATIENCE)).err();
        let e = e.ok_or("they met")?;
        match rank {
            0 => says(&e, ErrorKind::PeerLost, &["rank 1 went away", "configure"])?,
            _ => says(&e, ErrorKind::Backend, &["ncclCommInitRankConfig"])?,
        }
        store.barrier("both have failed", 2, deadline_in(SOON))?;
        next_epoch(rank, &group, &store)?;
        store.barrier("both go on", 2, deadline_in(SOON))?;
        Ok(())
    })?;
    nothing_is_left()
}

/// Lets through what rank 0 says, and of what comes the other way the greeting; says when rank 0 has ended the connection.
fn say_nothing(listener: &TcpListener, port: u16, ended: &Sender<()>) -> std::io::Result<()> {
    let (mut one, _) = listener.accept()?;
    let mut zero = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    let mut greeting = [0; GREETING];
    one.read_exact(&mut greeting)?;
    zero.write_all(&greeting)?;
    let mut words = [0; 1024];
    while let Ok(n) = zero.read(&mut words)
        && n > 0
    {
        // Whoever is gone need not hear it.
        let _ = one.write_all(words.get(..n).unwrap_or_default());
    }
    let _ = ended.send(());
    Ok(())
}

/// Rank 0's engine does not come up, and the connection to rank 1 is one that nobody ends on the other side: it is ended on this side, at
/// once, and whoever listened to it is gone.
fn silence() -> Outcome {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let (told, ended) = channel();
    let ended = Mutex::new(ended);
    ranks(2, |rank| {
        let group = group(rank, GroupOptions::default())?;
        let way = match rank {
            1 => {
                let told = told.clone();
                detour(&store, 1, move |listener, port| {
                    say_nothing(listener, port, &told)
                })?
            }
            _ => store.clone(),
        };
        let heard = turn(rank, &group, configuration(&way, rank, 2, 1, SOON))?;
        let e = heard.ok_or("nothing was wrong")?;
        if rank == 0 {
            says(&e, ErrorKind::Io, &["ox-nccl-watch", "does not start"])?;
            let ended = ended.lock().map_err(|_| "a panic")?;
            let in_time = ended.recv_timeout(Duration::from_secs(10));
            check(in_time.is_ok(), || "the connection stays open".into())?;
        } else {
            says(&e, e.kind(), &["rank 0 reports", "does not start"])?;
        }
        store.barrier("both have failed", 2, deadline_in(SOON))?;
        next_epoch(rank, &group, &store)?;
        store.barrier("both go on", 2, deadline_in(SOON))?;
        Ok(())
    })?;
    nothing_is_left()
}

pub(super) fn scenarios() -> Vec<Scenario> {
    let plain = |name, body| scenario(name, &[LOG], body);
    vec![
        plain("talk_a_rank_that_says_something_else", nonsense::<0>),
        plain("talk_a_rank_that_says_garbage", nonsense::<1>),
        plain("talk_a_rank_that_hangs_up", nonsense::<2>),
        plain("talk_a_rank_that_says_half_of_it", nonsense::<3>),
        plain("talk_a_rank_that_says_nothing", nonsense::<4>),
        plain("talk_a_rank_0_whose_plan_does_not_fit", nonsense::<5>),
        plain("talk_a_rank_0_that_says_no_plan", nonsense::<6>),
        plain("talk_a_rank_0_that_says_something_else", nonsense::<7>),
        plain("talk_a_rank_0_that_says_another_plan_at_the_end", nonsense::<8>),
        plain("talk_a_rank_0_that_says_garbage_at_the_end", nonsense::<9>),
        plain(
            "talk_a_newcomer_that_is_told_no_id_is_joined_by_a_new_communicator",
            newcomer,
        ),
        scenario(
            "talk_a_rank_whose_part_fails_is_heard_by_one_that_is_stuck",
            &[
                (FAIL, "ncclCommInitRankConfig@1:1:2"),
                (HANG, "call:ncclCommInitRankConfig@0:1"),
            ],
            told_while_stuck,
        ),
        scenario(
            "talk_a_rank_whose_last_word_is_cut_off_is_gone",
            &[(FAIL, "ncclCommInitRankConfig@1:1:2"), LOG],
            cut_off,
        ),
        // The fourth thread of rank 0 is the watchdog's.
        scenario(
            "system_without_a_thread_ends_the_connection_to_a_silent_rank",
            &[PRELOAD, LOG, (REFUSE, "pthread_create/rank-0:4:11")],
            silence,
        ),
    ]
}
