//! What HCCL gives the engine to work with: how an operation gets onto the device, how everything is aborted, how it ends.
//!
//! Any call into the library may block, so each is on a thread of its own: `ox-hccl-issue` (the engine's executor) puts operations
//! on streams and ends the communicator in good order, `ox-hccl-watch` sees them end and asks for asynchronous errors, and after a
//! failure the other ranks are told ([`peers`](crate::ftcore::peers)), and `ox-hccl-abort`, which may be given up, aborts the communicator. Tensors that the device may still touch stay here: they
//! are freed if the library gave the communicator back and every event was reached, and leaked otherwise (INV-8).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::time::Duration;

use crate::ftcore::engine::{
    Counters, Driver, Ended, Engine, Held, InFlight, Job, Label, Place, Rules, Stage, Ticket,
};
use crate::ftcore::peers::{Door, Peers, Terms};
use crate::ftcore::{
    Collective, Configuration, Credentials, Error, ErrorKind, Event, Result, deadline_in, time_left,
};
use crate::issue::Issuer;
use crate::raw::hccl::{CommHandle, Hccl};
use crate::rendezvous;
use crate::runtime::Runtime;

/// How long after an abort the device may take to leave the tensors alone.
const RELEASE_TIME: Duration = Duration::from_secs(10);
/// How long an abort waits for the thread that is on its way into the library or out of it.
const ON_THE_WAY: Duration = Duration::from_millis(80);
const SUSPECT: &str = "a Gaudi may still use it: its operation failed and HCCL did not give it back";

/// What is submitted.
pub struct Call {
    pub(crate) op: Collective,
    /// The point of the caller's stream after which it begins.
    pub(crate) after: Option<Arc<dyn Event>>,
}

impl Job for Call {
    fn into_op(self) -> Collective {
        self.op
    }
}

/// The communicator. Taken out by the one that ends it; locked while the library is asked about it. `None` for a group of one.
#[derive(Clone)]
struct Comm(Arc<Mutex<Option<CommHandle>>>, &'static Hccl);

impl Comm {
    fn take(&self) -> Option<CommHandle> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn async_error(&self) -> Option<Error> {
        // Not while it is being ended: the handle would be stale.
        let comm = match self.0.try_lock() {
            Ok(comm) => comm,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        comm.and_then(|comm| self.1.async_error(comm))
    }

    fn abort(&self) -> Result<()> {
        self.take().map_or(Ok(()), |comm| self.1.abort(comm))
    }
}

/// See the module.
pub struct HcclDriver {
    world: u32,
    comm: Comm,
    /// Its streams end after the communicator, on a thread that may call the library. Taken out by the one that ends both.
    issuer: Arc<Mutex<Option<Issuer>>>,
    /// Keeps a call out of the library that comes to it when the communicator is being aborted.
    gone: Arc<AtomicBool>,
    in_flight: Arc<InFlight<Self>>,
    peers: Arc<Peers>,
}

impl HcclDriver {
    /// Makes the communicator of `configuration` and the engine over it.
    pub(crate) fn connect(
        configuration: &Configuration,
        credentials: Option<&Arc<Credentials>>,
        door: Door,
        counters: Arc<Counters>,
    ) -> Result<Arc<Engine<Self>>> {
        let terms = |runtime: &Runtime| Terms {
            backend: "hccl",
            setup: format!("HCCL version {}", runtime.libraries.hccl.version),
            one_per_process: true,
            credentials: credentials.cloned(),
            door,
        };
        let (runtime, handle, meeting) = rendezvous::connect(configuration, terms)?;
        let place = Place::of(configuration);
        let comm = Comm(Arc::new(Mutex::new(handle)), &runtime.libraries.hccl);
        let asked = comm.clone();
        let make = move || Issuer::new(runtime, handle, place.rank, place.world, counters);
        let what = "the group's own stream and memory";
        let issuer = rendezvous::call(configuration, what, "streams", &meeting.watch(), make, drop);
        let issuer = issuer.inspect_err(|error| meeting.fail(error));
        let start = |issuer: Issuer, peers: Arc<Peers>| {
            let driver = Self {
                world: place.world,
                comm: comm.clone(),
                gone: issuer.gone(),
                issuer: Arc::new(Mutex::new(Some(issuer))),
                in_flight: Arc::new(InFlight::start("ox-hccl-watch", move || asked.async_error())?),
                peers,
            };
            // What is pending fails at once: the library may take for ever.
            let rules = Rules {
                depth: usize::MAX,
                grace: Duration::ZERO,
                // It may not be told to make another communicator beside one that it has not given back.
                gives_up: false,
            };
            Engine::start("ox-hccl-issue", place, rules, driver)
        };
        let started = issuer.and_then(|issuer| {
            let peers = Peers::start(meeting)?;
            let engine = start(issuer, peers.clone()).inspect_err(|error| peers.fail(error))?;
            peers.listen(&engine, |_, _| {})?;
            Ok(engine)
        });
        started.inspect_err(|_| {
            let spawned = std::thread::Builder::new()
                .name("ox-hccl-abort".to_string())
                .spawn(move || comm.abort());
            if let Err(error) = spawned {
                tracing::warn!(%error, "a communicator is left behind");
            }
        })
    }
}

/// Takes the issuer out, once no call is on its way with it; `None` if one still is after so long.
fn take(issuer: &Mutex<Option<Issuer>>, within: Duration) -> Option<Issuer> {
    let until = deadline_in(within);
    loop {
        match issuer.try_lock() {
            Ok(mut issuer) => return issuer.take(),
            Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner().take(),
            Err(TryLockError::WouldBlock) if time_left(until).is_zero() => return None,
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_micros(200)),
        }
    }
}

impl Driver for HcclDriver {
    type Job = Call;

    fn enqueue(&self, call: Call, ticket: Ticket<Self>) {
        let held = Held::new(call.op, SUSPECT);
        let mut issuer = self.issuer.lock().unwrap_or_else(PoisonError::into_inner);
        let (Some(issuer), Some(op)) = (issuer.as_mut(), held.op()) else {
            // The engine has its own reason.
            let error = Error::new(ErrorKind::Aborted, "the group has ended");
            return ticket.fail(error, held.free());
        };
        match issuer.issue(op, call.after.as_deref(), ticket.deadline()) {
            Ok(done) => {
                ticket.recorded(done.clone());
                self.in_flight.add(held, done, ticket);
            }
            // Some of its calls may be on the device already: its memory is leaked.
            Err(error) => ticket.fail(error, Vec::new()),
        }
    }

    fn interrupt(&self, failure: &Error, ended: Ended<Self>) {
        self.in_flight.stop();
        self.peers.report(failure);
        self.peers.close();
        self.gone.store(true, Ordering::Release);
        let (comm, in_flight, issuer) = (self.comm.clone(), self.in_flight.clone(), self.issuer.clone());
        let abort = move || {
            // No call has the communicator then, unless one is stuck in the library, which is what an abort is for.
            let own = take(&issuer, ON_THE_WAY);
            let settled = in_flight.settle(comm.abort(), None, deadline_in(RELEASE_TIME));
            drop(own.or_else(|| take(&issuer, Duration::ZERO)));
            match settled {
                Ok(()) => ended.clean(),
                Err(error) => ended.unclean(error.to_string()),
            }
        };
        let spawned = std::thread::Builder::new()
            .name("ox-hccl-abort".to_string())
            .spawn(abort);
        if let Err(error) = spawned {
            tracing::warn!(%error, "a failed communicator is left behind");
        }
    }

    fn release(&self) -> Result<()> {
        self.peers.leave();
        self.peers.close();
        let destroyed = self.comm.take().map_or(Ok(()), |comm| self.comm.1.destroy(comm));
        drop(self.issuer.lock().unwrap_or_else(PoisonError::into_inner).take());
        destroyed
    }

    fn waits_for(&self, _: &Label, stage: Stage) -> String {
        let stands = match stage {
            Stage::Queued => "waiting for earlier ones",
            Stage::Entering => "inside a call of the library, which has not returned",
            Stage::Running | Stage::Finished => "on the device",
        };
        format!(
            "{stands}. HCCL does not say which of the {} ranks is missing",
            self.world
        )
    }
}
