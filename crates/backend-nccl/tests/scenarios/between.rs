//! What a rank hears of another one whose part of `configure` fails: at once, also where that rank's last word is cut off, or where nothing
//! ends the connection on the other side. A party stands between rank 1 and rank 0 and changes what crosses.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ftcore::{ErrorKind, GroupOptions, InMemoryStore, ProcessGroup, Store, deadline_in};

use super::kit::*;
use super::system::{PRELOAD, REFUSE, nothing_is_left, turn};
use super::{FAIL, HANG, Scenario, scenario};

const SOON: Duration = Duration::from_secs(20);
const LOG: (&str, &str) = ("OXCCL_STANDIN_NCCL_LOG", "@log");

/// What crosses the connection: a greeting, then frames of a head (kind, origin, number, length of the text) and a text.
const GREETING: usize = 180;
const FAILED: u8 = 3;

/// Stands between rank 1 and rank 0 at `port`: passes everything on, but of rank 1's word that it has failed only the beginning.
fn pass_on(listener: &TcpListener, port: u16) -> std::io::Result<()> {
    let (mut one, _) = listener.accept()?;
    let mut zero = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    one.set_nodelay(true)?;
    zero.set_nodelay(true)?;
    let (mut from, mut to) = (zero.try_clone()?, one.try_clone()?);
    let back = std::thread::Builder::new().name("between".to_string());
    back.spawn(move || {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Write);
    })?;
    let mut greeting = [0; GREETING];
    one.read_exact(&mut greeting)?;
    zero.write_all(&greeting)?;
    let mut kind = [0];
    while one.read(&mut kind)? == 1 && kind != [FAILED] {
        let mut rest = [0; 16];
        one.read_exact(&mut rest)?;
        zero.write_all(&[kind.as_slice(), &rest].concat())?;
    }
    zero.write_all(&[FAILED; 5])?;
    zero.shutdown(Shutdown::Write)
}

/// From now on rank 0's record of the first epoch leads to `between`, who is told rank 0's own port.
fn detour(
    store: &Arc<dyn Store>,
    between: impl FnOnce(&TcpListener, u16) -> std::io::Result<()> + Send + 'static,
) -> Outcome {
    let key = "errors/1/nccl";
    store.wait(&[key], deadline_in(SOON))?;
    let record = String::from_utf8(store.get(key, deadline_in(SOON))?)?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let own = listener.local_addr()?.port().to_string();
    let mut words: Vec<&str> = record.split(' ').collect();
    let place = words.get_mut(2).ok_or("a record without a port")?;
    let port: u16 = std::mem::replace(place, &own).parse()?;
    let there = words.join(" ");
    let thread = std::thread::Builder::new().name("between".to_string());
    thread.spawn(move || between(&listener, port))?;
    Ok(store.set(key, there.as_bytes(), deadline_in(SOON))?)
}

/// Rank 1 cannot join, and rank 0 is stuck in the library: it is told why at once.
fn told_while_stuck() -> Outcome {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    ranks(2, |rank| {
        let group = group(rank, GroupOptions::default())?;
        let began = Instant::now();
        let e = group
            .configure(configuration(&store, rank, 2, 1, TIME_LIMIT))
            .err();
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
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    ranks(2, |rank| {
        let group = group(rank, GroupOptions::default())?;
        if rank == 1 {
            detour(&store, pass_on)?;
        }
        let e = group
            .configure(configuration(&store, rank, 2, 1, TIME_LIMIT))
            .err();
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
        // The one that is gone need not hear it.
        let _ = one.write_all(words.get(..n).unwrap_or_default());
    }
    let _ = ended.send(());
    Ok(())
}

/// Rank 0's engine does not come up, and the connection to rank 1 is one that is not ended on the other side: it is ended on this side, at
/// once.
fn silence() -> Outcome {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let (told, ended) = channel();
    let ended = Mutex::new(ended);
    ranks(2, |rank| {
        let group = group(rank, GroupOptions::default())?;
        if rank == 1 {
            let told = told.clone();
            detour(&store, move |listener, port| say_nothing(listener, port, &told))?;
        }
        let heard = turn(rank, &group, configuration(&store, rank, 2, 1, SOON))?;
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
    vec![
        scenario(
            "meet_a_rank_whose_part_fails_is_heard_by_one_that_is_stuck",
            &[
                (FAIL, "ncclCommInitRankConfig@1:1:2"),
                (HANG, "call:ncclCommInitRankConfig@0:1"),
            ],
            told_while_stuck,
        ),
        scenario(
            "meet_a_rank_whose_last_word_is_cut_off_is_gone",
            &[(FAIL, "ncclCommInitRankConfig@1:1:2"), LOG],
            cut_off,
        ),
        // The third thread of rank 0 is the watchdog's.
        scenario(
            "system_without_a_thread_ends_the_connection_to_a_silent_rank",
            &[PRELOAD, LOG, (REFUSE, "pthread_create/rank-0:3:11")],
            silence,
        ),
    ]
}
