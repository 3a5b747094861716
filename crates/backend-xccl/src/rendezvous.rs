//! How ranks find each other ([`ftcore::peers`]) and start a communicator, with deadlines where oneCCL has none.
//!
//! Two ranks in one process would hang, and are refused. Starting communicators one beside the other in a process hangs too. So a process starts
//! one at a time, and the ranks of a group pass their gates one after the other, in an order that is the same for all
//! groups (by process), so that two groups can never wait for each other.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ftcore::peers::{self, Meeting, Terms};
use ftcore::printable::{LONGEST, one_line};
use ftcore::{Configuration, Error, ErrorKind, PrefixStore, Result, Store, bounded, deadline_in, time_left};
use oneccl_sys::{Flavour, Library, UniqueId};

use crate::comms::Comms;
use crate::raw::comm::{self, Comm};
use crate::raw::exit::{self, Stuck};

/// How often one that waits for its turn looks whether another rank has failed.
const LOOK: Duration = Duration::from_millis(100);

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

/// What the ranks of one configuration tell each other through its store.
pub(crate) fn store(c: &Configuration) -> Arc<dyn Store> {
    Arc::new(PrefixStore::new(
        c.store.clone(),
        format!("{}/xccl/{}", c.prefix, c.epoch),
    ))
}

/// Runs `call` on a thread that is given up at the deadline, or when `stop` says why; `what` it did not do by the deadline is for the message.
fn expendable<T: Send + 'static>(
    name: &str,
    what: &str,
    deadline: Instant,
    stop: &dyn Fn() -> Option<Error>,
    call: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let stuck: Arc<Mutex<Option<Stuck>>> = Arc::default();
    let theirs = stuck.clone();
    let back = move |_| drop(theirs.lock().unwrap_or_else(PoisonError::into_inner).take());
    let given_up = |error: Error| {
        *stuck.lock().unwrap_or_else(PoisonError::into_inner) = Some(Stuck::begin());
        error
    };
    let late = || {
        given_up(Error::timeout(format!(
            "phase {what} by the deadline. It cannot be cancelled: this process cannot use oneCCL again (an isolated \
             group can)"
        )))
    };
    // Communicators that come too late stay undestroyed.
    bounded(name, deadline, &|| stop().map(given_up), &late, call, back)?
}

/// Meets the other ranks and starts the communicators; `complete` makes what a group needs of its first one, on the same thread.
pub(crate) fn connect(
    c: &Configuration,
    terms: &Terms,
    library: &'static Library,
    complete: impl FnOnce(Comm) -> Result<Comms> + Send + 'static,
) -> Result<(Comms, Meeting)> {
    let mut meeting = peers::meet(c, terms, None)?;
    if c.world_size == 1 {
        return Ok((Comms::alone(), meeting));
    }
    let before = meeting.before;
    let made = {
        let elsewhere = meeting.watch();
        let stop = || c.cancel.reason().or_else(&elsewhere);
        communicators(c, library, before, &stop, complete)
    };
    match made {
        Ok(comms) => Ok((comms, meeting)),
        Err(error) => {
            meeting.fail(&error);
            Err(error)
        }
    }
}

/// `before`: the rank whose process passes its gate before this one.
fn communicators(
    c: &Configuration,
    library: &'static Library,
    before: Option<u32>,
    stop: &dyn Fn() -> Option<Error>,
    complete: impl FnOnce(Comm) -> Result<Comms> + Send + 'static,
) -> Result<Comms> {
    let (rank, world, deadline, store) = (c.rank, c.world_size, c.deadline, store(c));
    // A fifth of a second or more, which the ranks would otherwise spend one after the other.
    if library.flavour == Flavour::Host
        && let Some(gate) = first_to_load()
    {
        let what = "load: all ranks are here, but oneCCL did not load its transport";
        let load = move || {
            load(library, gate);
            Ok(())
        };
        expendable("ox-xccl-load", what, deadline, stop, load)?;
    }
    let gate = pass_in_order(c, &*store, before, stop)?;
    let start = move || {
        let made = start(&*store, library, rank, world, deadline).and_then(complete);
        drop(gate);
        made
    };
    let what = "init: all ranks are here, but oneCCL did not start its communicator";
    expendable("ox-xccl-init", what, deadline, stop, start)
}

fn start(
    store: &dyn Store,
    library: &'static Library,
    rank: u32,
    world: u32,
    deadline: Instant,
) -> Result<Comm> {
    let id = if rank == 0 {
        let made = comm::unique_id(library);
        // The others hear why there is none instead of waiting for it.
        let told = made.as_ref().map_or_else(why_not, UniqueId::to_bytes);
        store.set("id", &told, deadline)?;
        made?
    } else {
        let bytes = store.get("id", deadline).map_err(|e| phase(e, "id"))?;
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
        Some(why) => Error::new(ErrorKind::Backend, {
            let why = String::from_utf8_lossy(why);
            format!("rank 0 has no id: {}", one_line(&why, LONGEST))
        }),
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

/// Passes this process's gate when it is this rank's turn: all groups take their processes' gates in the same order.
fn pass_in_order(
    c: &Configuration,
    store: &dyn Store,
    before: Option<u32>,
    stop: &dyn Fn() -> Option<Error>,
) -> Result<Gate> {
    let key = |rank: u32| format!("gate/{rank}");
    while let Some(before) = before {
        match store.wait(&[&key(before)], c.deadline.min(deadline_in(LOOK))) {
            Ok(()) => break,
            Err(e) if e.kind() != ErrorKind::Timeout => return Err(e),
            Err(_) => {}
        }
        if let Some(error) = stop() {
            return Err(error);
        }
        if time_left(c.deadline).is_zero() {
            let text = format!(
                "phase gate: rank {before} of {} is still starting another group",
                c.world_size
            );
            return Err(Error::timeout(text).with_peer(before));
        }
    }
    let gate = Gate::pass(c.deadline)?;
    store.set(&key(c.rank), b"1", c.deadline)?;
    Ok(gate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_start_waits_for_the_first_until_its_deadline() {
        let first = Gate::pass(ftcore::deadline_in(std::time::Duration::from_secs(1))).unwrap();
        let e = Gate::pass(ftcore::deadline_in(std::time::Duration::from_millis(30)));
        assert_eq!(e.err().unwrap().kind(), ErrorKind::Timeout);
        drop(first);
        Gate::pass(ftcore::deadline_in(std::time::Duration::from_secs(1))).unwrap();
    }
}
