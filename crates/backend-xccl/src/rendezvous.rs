//! How ranks find each other ([`ftcore::peers`]) and start a communicator, with deadlines where oneCCL has none.
//!
//! Two ranks in one process would hang, and are refused. Starting communicators one beside the other in a process hangs too. So a process starts
//! one at a time, and the ranks of a group pass their gates one after the other, in an order that is the same for all
//! groups (by process), so that two groups can never wait for each other.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use ftcore::peers::{self, Meeting, Terms, give_id, hear_id};
use ftcore::{Cancel, Configuration, Error, ErrorKind, Result, Store, bounded, time_left};
use oneccl_sys::{Flavour, Library, UniqueId};

use crate::comms::Comms;
use crate::raw::comm::{self, Comm};
use crate::raw::exit::{self, Stuck};

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

/// Destroys `comms` until the deadline: a call of all ranks, whose thread counts as stuck from then on.
pub(crate) fn destroy(comms: Comms, deadline: Instant) -> Result<()> {
    let what = "destroy: all ranks have left, but oneCCL did not destroy its communicators";
    let call = move || {
        comms.destroy();
        Ok(())
    };
    expendable("ox-xccl-destroy", what, deadline, &|| None, call)
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
    let meeting = peers::meet(c, terms)?;
    if c.world_size == 1 {
        return Ok((Comms::alone(), meeting));
    }
    match communicators(c, library, &meeting, complete) {
        Ok(comms) => Ok((comms, meeting)),
        Err(error) => {
            meeting.fail(&error);
            Err(error)
        }
    }
}

fn communicators(
    c: &Configuration,
    library: &'static Library,
    meeting: &Meeting,
    complete: impl FnOnce(Comm) -> Result<Comms> + Send + 'static,
) -> Result<Comms> {
    let (rank, world, deadline) = (c.rank, c.world_size, c.deadline);
    let (store, cancel) = (meeting.store(c), meeting.cancel(c));
    let heeding = cancel.over(&store);
    let stop = &|| cancel.reason();
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
    let gate = pass_in_order(c, &*heeding, meeting.before, &cancel)?;
    // On this thread: one of the library's would count as stuck there as long as it waits.
    let heard = match rank {
        0 => None,
        _ => Some(id_of(&hear_id(&*heeding, deadline)?)?),
    };
    let make = move || {
        let id = comm::unique_id(library)?;
        give_id(&*store, &id.to_bytes(), deadline)?;
        Ok(id)
    };
    let start = move || {
        let id = heard.map_or_else(make, Ok);
        let made = id.and_then(|id| {
            tracing::debug!(?id, rank, world, "starting a oneCCL communicator");
            Comm::init(library, id, rank, world)
        });
        let made = made.and_then(complete);
        drop(gate);
        made
    };
    let what = "init: all ranks are here, but oneCCL did not start its communicator";
    expendable("ox-xccl-init", what, deadline, stop, start)
}

/// Out of the store, which is not trusted.
fn id_of(bytes: &[u8]) -> Result<UniqueId> {
    UniqueId::from_bytes(bytes).ok_or_else(|| {
        let text = format!("rank 0's id has {} bytes, not {}", bytes.len(), UniqueId::BYTES);
        Error::new(ErrorKind::Protocol, text).with_peer(0)
    })
}

/// Passes this process's gate when it is this rank's turn: all groups take their processes' gates in the same order. `before`: the rank whose
/// process passes its gate before this one.
fn pass_in_order(c: &Configuration, store: &dyn Store, before: Option<u32>, cancel: &Cancel) -> Result<Gate> {
    let key = |rank: u32| format!("gate/{rank}");
    if let Some(before) = before {
        let passed = store.wait(&[&key(before)], c.deadline);
        passed.map_err(|e| match e.kind() {
            ErrorKind::Timeout if time_left(c.deadline).is_zero() => Error::timeout(format!(
                "phase gate: rank {before} of {} is still starting another group",
                c.world_size
            ))
            .with_peer(before),
            _ => e,
        })?;
    }
    let gate = cancel.in_turns(c.deadline, Gate::pass)?;
    store.set(&key(c.rank), b"1", c.deadline)?;
    Ok(gate)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use ftcore::{Epoch, InMemoryStore, deadline_in};

    use super::*;

    fn soon() -> Instant {
        deadline_in(Duration::from_secs(20))
    }

    fn gone() -> Option<Error> {
        Some(Error::new(ErrorKind::PeerLost, "a rank has gone"))
    }

    /// In one test: there is one gate.
    #[test]
    fn a_second_start_waits_for_the_first_until_its_deadline_or_a_failure() {
        let first = Gate::pass(soon()).unwrap();
        let e = Gate::pass(deadline_in(Duration::from_millis(30)));
        assert_eq!(e.err().unwrap().kind(), ErrorKind::Timeout);
        let c = Configuration {
            store: Arc::new(InMemoryStore::new()),
            prefix: "p".into(),
            name: "n".into(),
            epoch: Epoch(1),
            rank: 1,
            world_size: 2,
            deadline: soon(),
            cancel: Default::default(),
        };
        let e = pass_in_order(&c, &*c.store, None, &Cancel::watching(gone));
        assert_eq!(e.err().unwrap().kind(), ErrorKind::PeerLost);
        drop(first);
        pass_in_order(&c, &*c.store, None, &Cancel::default()).unwrap();
        c.store.get("gate/1", soon()).unwrap();
    }

    #[test]
    fn a_call_that_is_given_up_counts_as_stuck_until_it_comes_back() {
        let (go, wait) = channel::<()>();
        let before = exit::stuck();
        let call = move || {
            let _ = wait.recv();
            Ok(())
        };
        let late = deadline_in(Duration::from_millis(30));
        let e = expendable("ox-test", "test: it did not come back", late, &|| None, call).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Timeout, "{e}");
        assert!(exit::stuck() > before);
        drop(go);
        let until = soon();
        while exit::stuck() > before {
            assert!(Instant::now() < until, "it still counts");
            std::thread::yield_now();
        }
    }
}
