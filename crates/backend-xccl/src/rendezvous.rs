//! How ranks find each other and start a communicator, with deadlines where oneCCL has none.
//!
//! Every rank says who it is and waits for the others, so that a missing one is named (L33) and two ranks in one process,
//! which would hang, are refused. Starting communicators one beside the other in a process hangs too. So a process starts
//! one at a time, and the ranks of a group pass their gates one after the other, in an order that is the same for all
//! groups (by process), so that two groups can never wait for each other.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use ftcore::lifecycle::nonce;
use ftcore::{Configuration, Error, ErrorKind, Result, time_left};
use oneccl_sys::{Flavour, Library, UniqueId};

use crate::comms::Comms;
use crate::notices::{Channel, clean, ranks};
use crate::raw::comm::{self, Comm};
use crate::raw::exit::{self, Stuck};

/// One for every process and life; forked children inherit it, and are refused as the duplicates that they are.
fn process_id() -> u64 {
    static ID: OnceLock<u64> = OnceLock::new();
    *ID.get_or_init(nonce)
}

/// What a rank says about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Hello {
    world: u32,
    process: u64,
    library: String,
}

impl Hello {
    fn encode(&self) -> Vec<u8> {
        format!(
            "oxccl-xccl-1 {} {:016x} {}",
            self.world, self.process, self.library
        )
        .into_bytes()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(bytes.get(..bytes.len().min(256))?).ok()?;
        let mut parts = text.splitn(4, ' ');
        if parts.next()? != "oxccl-xccl-1" {
            return None;
        }
        Some(Self {
            world: parts.next()?.parse().ok()?,
            process: u64::from_str_radix(parts.next()?, 16).ok()?,
            library: parts.next()?.to_string(),
        })
    }
}

/// The gate of this process: one start at a time.
static GATE: Mutex<bool> = Mutex::new(false);
static OPENED: Condvar = Condvar::new();

/// Held while a communicator is being started.
struct Gate;

impl Gate {
    fn pass(deadline: Instant) -> Result<Self> {
        let mut taken = GATE.lock().unwrap_or_else(PoisonError::into_inner);
        while *taken {
            let left = time_left(deadline);
            if left.is_zero() {
                return Err(Error::timeout(
                    "phase gate: another group of this process was still being started",
                ));
            }
            taken = OPENED
                .wait_timeout(taken, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        *taken = true;
        Ok(Self)
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        *GATE.lock().unwrap_or_else(PoisonError::into_inner) = false;
        OPENED.notify_all();
    }
}

/// What an isolated group sets in its child: its own process id.
const ENV_CHILD: &str = "OXCCL_ISOLATE_CHILD";

/// The gate, for the thread that is to load oneCCL's transport: the first who asks. No other thread needs to: it is loaded then, or the one that
/// holds the gate is about to.
fn first_to_load() -> Option<Gate> {
    static ASKED: AtomicBool = AtomicBool::new(false);
    let gate = Gate::pass(Instant::now()).ok()?;
    (!ASKED.swap(true, Ordering::SeqCst)).then_some(gate)
}

/// Loads the transport: oneCCL does it with its first id, which is thrown away. A failure is left to the start of the first
/// communicator to meet and report.
fn load(library: &'static Library, gate: Gate) {
    if let Err(error) = comm::unique_id(library) {
        tracing::debug!(%error, "oneCCL could not load its transport in advance");
    }
    drop(gate);
}

/// In the child of an isolated group: loads the transport in the background as soon as there is a group, so that a spare
/// child has it when it is needed. Elsewhere the first `configure` does it, and nothing runs in the background of a user's program.
pub(crate) fn warm_up(library: &'static Library) {
    let parent = std::os::unix::process::parent_id().to_string();
    if std::env::var(ENV_CHILD).is_ok_and(|of| of == parent)
        && let Some(gate) = first_to_load()
    {
        let bringing = exit::Bringing::begin();
        exit::end_after_bringing();
        let load = move || {
            load(library, gate);
            drop(bringing);
        };
        let started = std::thread::Builder::new()
            .name("ox-xccl-warm".to_string())
            .spawn(load);
        if let Err(error) = started {
            tracing::debug!(%error, "no thread for loading oneCCL's transport in advance");
        }
    }
}

/// The prefix of everything that belongs to one configuration.
pub(crate) fn channel(configuration: &Configuration) -> Channel {
    Channel::new(
        configuration.store.clone(),
        format!("{}/xccl/{}", configuration.prefix, configuration.epoch),
        configuration.rank,
        configuration.world_size,
    )
}

/// What is known about a thread that may be given up.
#[derive(Debug, Default)]
struct GivenUp {
    back: bool,
    stuck: Option<Stuck>,
}

/// Runs `call` on a thread that is given up at the deadline; `what` it did not do then is for the message.
fn expendable<T: Send + 'static>(
    name: &str,
    what: &str,
    deadline: Instant,
    call: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let (reply, answer) = std::sync::mpsc::channel();
    let given_up: Arc<Mutex<GivenUp>> = Arc::default();
    let shared = given_up.clone();
    let body = move || {
        let result = call();
        let mut shared = shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.back = true;
        shared.stuck = None;
        // Nothing listens any more after the deadline; then communicators stay undestroyed.
        let _ = reply.send(result);
    };
    std::thread::Builder::new()
        .name(name.to_string())
        .spawn(body)
        .map_err(|e| Error::io(format!("cannot start thread {name}"), e))?;
    answer.recv_timeout(time_left(deadline)).unwrap_or_else(|_| {
        let mut shared = given_up.lock().unwrap_or_else(PoisonError::into_inner);
        if !shared.back {
            shared.stuck = Some(Stuck::begin());
        }
        Err(Error::timeout(format!(
            "phase {what} by the deadline. It cannot be cancelled: this process cannot use oneCCL again (an isolated \
             group can)"
        )))
    })
}

/// Meets the other ranks and starts the communicators.
pub(crate) fn connect(configuration: &Configuration, library: &'static Library) -> Result<Comms> {
    connect_with(configuration, library, |made| Comms::complete(made, None))
}

/// As [`connect`]; `complete` makes what a group needs of its first communicator, on the same thread.
pub(crate) fn connect_with(
    configuration: &Configuration,
    library: &'static Library,
    complete: impl FnOnce(Comm) -> Result<Comms> + Send + 'static,
) -> Result<Comms> {
    let channel = channel(configuration);
    let (rank, world, deadline) = (
        configuration.rank,
        configuration.world_size,
        configuration.deadline,
    );
    let hellos = meet(configuration, &channel, library)?;
    // A fifth of a second or more, which the ranks would otherwise spend one after the other.
    if library.flavour == Flavour::Host
        && let Some(gate) = first_to_load()
    {
        let what = "load: all ranks are here, but oneCCL did not load its transport";
        let load = move || {
            load(library, gate);
            Ok(())
        };
        expendable("ox-xccl-load", what, deadline, load)?;
    }
    let gate = pass_in_order(configuration, &channel, &hellos)?;
    let start = move || {
        let made = start(&channel, library, rank, world, deadline).and_then(complete);
        drop(gate);
        made
    };
    let what = "init: all ranks are here, but oneCCL did not start its communicator";
    expendable("ox-xccl-init", what, deadline, start)
}

fn start(
    channel: &Channel,
    library: &'static Library,
    rank: u32,
    world: u32,
    deadline: Instant,
) -> Result<Comm> {
    let key = channel.key("id");
    let id = if rank == 0 {
        let made = comm::unique_id(library);
        // The others hear why there is none instead of waiting for it.
        let told = made.as_ref().map_or_else(why_not, UniqueId::to_bytes);
        channel.store().set(&key, &told, deadline)?;
        made?
    } else {
        let bytes = channel.store().get(&key, deadline).map_err(|e| phase(e, "id"))?;
        UniqueId::from_bytes(&bytes).ok_or_else(|| no_id(&bytes))?
    };
    tracing::debug!(?id, rank, world, "starting a oneCCL communicator");
    Comm::init(library, id, rank, world)
}

/// What rank 0 says in place of an id.
const NO_ID: &[u8] = b"none: ";

fn why_not(error: &Error) -> Vec<u8> {
    let text: String = error.to_string().chars().take(UniqueId::BYTES / 8).collect();
    [NO_ID, text.as_bytes()].concat()
}

fn no_id(bytes: &[u8]) -> Error {
    match bytes.strip_prefix(NO_ID) {
        Some(why) => Error::new(ErrorKind::Backend, format!("rank 0 has no id: {}", clean(why))),
        None => {
            let text = format!("rank 0's id has {} bytes, not {}", bytes.len(), UniqueId::BYTES);
            Error::new(ErrorKind::Protocol, text)
        }
    }
    .with_peer(0)
}

fn phase(error: Error, name: &str) -> Error {
    match error.kind() {
        ErrorKind::Timeout => Error::timeout(format!("phase {name}: {}", error.message())),
        _ => error,
    }
}

/// Every rank's hello, by rank.
fn meet(configuration: &Configuration, channel: &Channel, library: &Library) -> Result<Vec<Hello>> {
    let Configuration {
        rank,
        world_size: world,
        deadline,
        ..
    } = *configuration;
    let began = Instant::now();
    let key = |rank: u32| channel.key(&format!("hello/{rank}"));
    let own = Hello {
        world,
        process: process_id(),
        library: library.version.to_string(),
    };
    let store = channel.store();
    store.set(&key(rank), &own.encode(), deadline)?;
    let mut hellos = Vec::new();
    for peer in 0..world {
        let bytes = match store.get(&key(peer), deadline) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == ErrorKind::Timeout => {
                let soon = ftcore::deadline_in(std::time::Duration::from_millis(500));
                let missing: Vec<u32> = (peer..world)
                    .filter(|&r| r == peer || !store.check(&[&key(r)], soon).unwrap_or(false))
                    .collect();
                return Err(Error::timeout(format!(
                    "phase hello: {} of {world} did not come within {:.1} s",
                    ranks(&missing),
                    began.elapsed().as_secs_f64()
                )));
            }
            Err(e) => return Err(e),
        };
        let hello = Hello::decode(&bytes).ok_or_else(|| {
            Error::new(
                ErrorKind::Protocol,
                "what it says about itself is not a hello of this backend",
            )
            .with_peer(peer)
        })?;
        if hello.world != world || hello.library != own.library {
            let text = format!(
                "this rank has a world of {world} and oneCCL {}, rank {peer} has {} and {}",
                own.library, hello.world, hello.library
            );
            return Err(Error::new(ErrorKind::Mismatch, text).with_peer(peer));
        }
        hellos.push(hello);
    }
    refuse_shared_processes(&hellos)?;
    Ok(hellos)
}

fn refuse_shared_processes(hellos: &[Hello]) -> Result<()> {
    for (a, first) in hellos.iter().enumerate() {
        if let Some(b) = hellos.iter().skip(a + 1).position(|h| h.process == first.process) {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "ranks {a} and {} are in one process: oneCCL takes one rank per process and would hang. Run them as \
                     processes, or isolated (each in a child process)",
                    a + 1 + b
                ),
            ));
        }
    }
    Ok(())
}

/// Passes this process's gate when it is this rank's turn: all groups take their processes' gates in the same order.
fn pass_in_order(configuration: &Configuration, channel: &Channel, hellos: &[Hello]) -> Result<Gate> {
    let Configuration { rank, deadline, .. } = *configuration;
    let mut order: Vec<(u64, u32)> = hellos.iter().map(|h| h.process).zip(0u32..).collect();
    order.sort_unstable();
    let place = order.iter().position(|(_, r)| *r == rank).unwrap_or(0);
    let key = |place: usize| channel.key(&format!("gate/{place}"));
    if place > 0 {
        let before = channel.store().wait(&[&key(place - 1)], deadline);
        before.map_err(|e| match e.kind() {
            ErrorKind::Timeout => {
                let waiting_for = order.get(place - 1).map_or(0, |(_, r)| *r);
                Error::timeout(format!(
                    "phase gate: rank {waiting_for} of {} is still starting another group",
                    order.len()
                ))
                .with_peer(waiting_for)
            }
            _ => e,
        })?;
    }
    let gate = Gate::pass(deadline)?;
    channel.store().set(&key(place), b"1", deadline)?;
    Ok(gate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hello_round_trips_and_anything_else_is_refused() {
        let hello = Hello {
            world: 4,
            process: 7,
            library: "2022.2.0".into(),
        };
        assert_eq!(Hello::decode(&hello.encode()), Some(hello));
        for bytes in [
            &b""[..],
            b"oxccl-xccl-1",
            b"oxccl-xccl-2 4 7 x",
            b"\xff\xff",
            &[b' '; 9999],
        ] {
            assert_eq!(Hello::decode(bytes), None);
        }
    }

    #[test]
    fn two_ranks_in_one_process_are_refused_by_name() {
        let hello = |process| Hello {
            world: 3,
            process,
            library: String::new(),
        };
        refuse_shared_processes(&[hello(1), hello(2), hello(3)]).unwrap();
        let e = refuse_shared_processes(&[hello(1), hello(2), hello(1)]).unwrap_err();
        assert!(
            e.to_string().contains("ranks 0 and 2") && e.to_string().contains("isolated"),
            "{e}"
        );
    }

    #[test]
    fn a_second_start_waits_for_the_first_until_its_deadline() {
        let first = Gate::pass(ftcore::deadline_in(std::time::Duration::from_secs(1))).unwrap();
        let e = Gate::pass(ftcore::deadline_in(std::time::Duration::from_millis(30)));
        assert_eq!(e.err().unwrap().kind(), ErrorKind::Timeout);
        drop(first);
        Gate::pass(ftcore::deadline_in(std::time::Duration::from_secs(1))).unwrap();
    }
}
