//! What NCCL gives the engine to work with: how an operation gets onto the device, how everything is aborted, how it ends.
//!
//! Operations are enqueued on the thread that submits them: collectives on the group's stream (`enqueue`), messages in channels of
//! their own (`channels`), monitored barriers over the control connections. Where ranks compare what they call, a thread enqueues
//! collectives once they have (`compared`). `ox-nccl-watch` sees them end and asks for asynchronous
//! errors. After a failure the other ranks are told, and `ox-nccl-abort` aborts the communicators, which may take as long as the
//! library likes: the engine waits no longer than [`GRACE`]. Until the library has let go, events prove nothing, and memory stays
//! here (INV-8).

use std::collections::BTreeMap;
use std::sync::mpsc::{SendError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use ftcore::agreement::Agreement;
use ftcore::engine::{
    Counters, Driver, Ended, Engine, Held, InFlight, Job, Label, Place, Rules, Stage, Ticket,
};
use ftcore::peers::{Meeting, Peers, ranks};
use ftcore::{
    Collective, Completion, Configuration, Error, ErrorKind, Event, OpKind, Result, deadline_in, time_left,
};

use crate::channels::{self, Channels};
use crate::compared::{self, Waiting};
use crate::cuda::gpu::Gpu;
use crate::cuda::stream::CudaStream;
use crate::options::Settings;
use crate::raw::Comm;
use crate::{enqueue, threads};

/// After a failure: how long the abort may take until callers are told without their memory and the group counts as ended. That of the
/// real library takes 0.52 s, idle or not (2.30.7 on an H200).
const GRACE: Duration = Duration::from_secs(2);
/// How long the abort waits for threads that are on their way into the library or out of it.
const ON_THE_WAY: Duration = Duration::from_millis(80);
/// How long after the abort the device may take to leave the memory alone.
const RELEASE: Duration = Duration::from_secs(10);
/// How long an idle communicator gets to flush before it is aborted.
const FLUSH: Duration = Duration::from_secs(10);
/// How much of that the end of the group waits for: the other ranks may hold it up, and what the library still has to hand over to
/// them would be lost with the process.
const FLUSH_SEEN: Duration = Duration::from_millis(200);
const SUSPECT: &str = "the device may still work on it after a failed operation";

/// What is submitted.
pub struct Call {
    pub(crate) op: Collective,
    pub(crate) contribute: bool,
    /// The point of the caller's stream after which it begins.
    pub(crate) after: Option<Arc<dyn Event>>,
}

impl Job for Call {
    fn into_op(self) -> Collective {
        self.op
    }
}

/// What the threads of one configuration work with.
pub(crate) struct Shared {
    pub(crate) place: Place,
    pub(crate) gpu: Arc<Gpu>,
    pub(crate) comm: Arc<Comm>,
    pub(crate) stream: CudaStream,
    pub(crate) settings: Settings,
    pub(crate) configuration: Configuration,
    pub(crate) counters: Arc<Counters>,
    pub(crate) channels: Arc<Channels>,
    pub(crate) in_flight: InFlight<NcclDriver>,
    /// Where the ranks compare what they call, and where collectives wait for that.
    pub(crate) agreement: Option<Agreement>,
    waiting: Option<Sender<Waiting>>,
    peers: Arc<Peers>,
    /// Held while an operation is enqueued or the communicator is split: NCCL takes one such call at a time.
    order: Mutex<()>,
    barriers: Mutex<Barriers>,
    failure: OnceLock<Error>,
}

/// Monitored barriers that this rank has entered.
#[derive(Default)]
struct Barriers {
    entered: u64,
    waiting: BTreeMap<u64, Ticket<NcclDriver>>,
}

/// Everything a configuration starts with.
pub(crate) struct Ingredients {
    pub(crate) configuration: Configuration,
    pub(crate) gpu: Arc<Gpu>,
    pub(crate) comm: Arc<Comm>,
    pub(crate) settings: Settings,
    pub(crate) counters: Arc<Counters>,
    pub(crate) meeting: Meeting,
}

/// See the module.
pub struct NcclDriver(Arc<Shared>);

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts the control connections, the watch and the engine. If one of them does not start, the other ranks are told.
pub(crate) fn start(i: Ingredients) -> Result<Arc<Engine<NcclDriver>>> {
    let place = Place::of(&i.configuration);
    let peers = Peers::start(i.meeting)?;
    let channels = Arc::new(Channels::default());
    let asked = (i.comm.clone(), channels.clone());
    let ask = move || asked.0.state().and_then(|_| asked.1.check()).err();
    let begin = || {
        let (sender, waiting) = compared::queue();
        let agreement =
            (i.settings.detects && place.world > 1).then(|| compared::agreement(&i.configuration));
        let shared = Arc::new(Shared {
            waiting: agreement.is_some().then_some(sender),
            agreement,
            place,
            stream: CudaStream::new(&i.gpu, i.settings.high_priority)?,
            in_flight: InFlight::start("ox-nccl-watch", ask)?,
            gpu: i.gpu,
            comm: i.comm,
            settings: i.settings,
            configuration: i.configuration,
            counters: i.counters,
            channels,
            peers: peers.clone(),
            order: Mutex::default(),
            barriers: Mutex::default(),
            failure: OnceLock::new(),
        });
        if shared.waiting.is_some() {
            compared::start(&shared, waiting)?;
        }
        let rules = Rules {
            depth: usize::MAX,
            grace: GRACE,
            gives_up: true,
        };
        Engine::start("ox-nccl-end", place, rules, NcclDriver(shared))
    };
    let engine = begin().inspect_err(|error| peers.fail(error))?;
    peers.listen(&engine, |engine, number| engine.driver().open(number))?;
    Ok(engine)
}

impl Shared {
    /// Why the group has failed.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.failure.get().cloned()
    }

    /// For the thread that enqueues.
    pub(crate) fn order(&self) -> MutexGuard<'_, ()> {
        lock(&self.order)
    }

    /// After a failure: ends the communicators and finds out what is free. May block for ever.
    fn abort(&self) {
        let _inside = self.gpu.enter();
        // All at the same time: one takes half a second, and one that hangs leaves no kernel of another running.
        let (returned, all) = channel::<()>();
        for comm in self.channels.comms() {
            let returned = returned.clone();
            threads::in_background("ox-nccl-abort", move || {
                comm.abort();
                drop(returned);
            });
        }
        drop(returned);
        self.comm.abort();
        // Fails when the last of them has dropped its sender.
        let _ = all.recv();
        let by = deadline_in(ON_THE_WAY);
        self.channels.close(self, by);
        // Behind everything that was enqueued, even by calls that failed half way; unless one of them is not back.
        let last = self.is_quiet(by).then(|| self.stream.mark().ok()).flatten();
        let last = last.map(|event| event as Arc<dyn Event>);
        if let Err(error) = self.in_flight.settle(Ok(()), last, deadline_in(RELEASE)) {
            tracing::warn!(%error, rank = self.place.rank, "an aborted group leaves memory behind");
        }
        self.hang_up();
    }

    /// Waits until no thread enqueues anything; later ones find the failure. False if one still does at `until`.
    fn is_quiet(&self, until: Instant) -> bool {
        while let Err(TryLockError::WouldBlock) = self.order.try_lock() {
            if time_left(until).is_zero() {
                return false;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        true
    }

    fn hang_up(&self) {
        self.peers.close();
    }

    /// Whom a monitored barrier waits for.
    fn missing(&self) -> String {
        let number = lock(&self.barriers).waiting.keys().next().copied();
        number.map_or_else(|| "the barrier".to_string(), |number| self.peers.awaited(number))
    }
}

impl NcclDriver {
    /// Over what its threads work with.
    pub(crate) fn of(shared: Arc<Shared>) -> Self {
        Self(shared)
    }

    /// What its threads work with.
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.0
    }

    /// Enqueues an operation that is no message.
    pub(crate) fn begin(
        &self,
        held: Held,
        contribute: bool,
        after: Option<&dyn Event>,
        ticket: Ticket<Self>,
    ) {
        match held.op().map(Collective::kind) {
            Some(OpKind::MonitoredBarrier) => self.enter_barrier(ticket),
            _ => self.collective(held, contribute, after, ticket),
        }
    }

    fn collective(&self, mut held: Held, contribute: bool, after: Option<&dyn Event>, ticket: Ticket<Self>) {
        let shared = &self.0;
        let mut scratch = enqueue::Scratch::new(&shared.gpu);
        let enqueued = {
            let _order = shared.order();
            let by = ticket.deadline();
            let made = held.op().map_or(Ok(()), |op| {
                enqueue::collective(shared, op, contribute, after, by, &mut scratch)
            });
            // Of a call that failed half way nothing marks the end.
            made.and_then(|()| shared.stream.mark())
        };
        held.keep(scratch);
        match enqueued {
            Ok(done) => {
                ticket.recorded(done.clone());
                shared.in_flight.add(held, done, ticket);
            }
            // The other ranks have enqueued theirs: without this rank's part the group cannot go on.
            Err(error) => {
                let (engine, number) = (ticket.engine().clone(), ticket.number());
                shared.in_flight.add_unfinished(held, ticket);
                engine.fail_by(number, error);
            }
        }
    }

    fn enter_barrier(&self, ticket: Ticket<Self>) {
        let number = {
            let mut barriers = lock(&self.0.barriers);
            barriers.entered += 1;
            let number = barriers.entered;
            barriers.waiting.insert(number, ticket);
            number
        };
        if self.0.peers.enter(number) {
            self.open(number);
        }
        // The interruption may have looked before it was there.
        if self.0.failure().is_some() {
            self.close_barriers();
        }
    }

    /// Monitored barrier `number` opens.
    fn open(&self, number: u64) {
        let ticket = lock(&self.0.barriers).waiting.remove(&number);
        if let Some(ticket) = ticket {
            ticket.succeed(Completion {
                tensors: Vec::new(),
                source: None,
                contributors: 0,
            });
        }
    }

    fn close_barriers(&self) {
        let waiting = std::mem::take(&mut lock(&self.0.barriers).waiting);
        for ticket in waiting.into_values() {
            let error = self
                .0
                .failure()
                .unwrap_or_else(|| Error::timeout("it did not open"));
            ticket.fail(error, Vec::new());
        }
    }
}

impl Driver for NcclDriver {
    type Job = Call;

    fn enqueue(&self, call: Call, ticket: Ticket<Self>) {
        let Call {
            op,
            contribute,
            after,
        } = call;
        let (kind, held) = (op.kind(), Held::new(op, SUSPECT));
        if let Some(error) = self.0.failure() {
            return ticket.fail(error, held.free());
        }
        if kind.is_p2p() {
            return channels::send_off(&self.0, held, after, ticket);
        }
        let Some(waiting) = &self.0.waiting else {
            return self.begin(held, contribute, after.as_deref(), ticket);
        };
        let one = Waiting {
            held,
            contribute,
            after,
            ticket,
        };
        if let Err(SendError(one)) = waiting.send(one) {
            let error = Error::new(
                ErrorKind::Internal,
                "the thread that compares collectives has ended",
            );
            one.ticket.fail(error, one.held.free());
        }
    }

    fn interrupt(&self, failure: &Error, ended: Ended<Self>) {
        let shared = self.0.clone();
        tracing::warn!(rank = shared.place.rank, epoch = %shared.place.epoch, %failure, "a group has failed");
        let _ = shared.failure.set(failure.clone());
        if let Some(agreement) = &shared.agreement {
            agreement.end(failure.clone());
        }
        shared.in_flight.stop();
        shared.peers.report(failure);
        self.close_barriers();
        threads::in_background("ox-nccl-abort", move || {
            shared.abort();
            // What could not be proven to be free was leaked: a new communicator meets nothing of this one.
            ended.clean();
        });
    }

    fn give_up(&self) {
        self.0.in_flight.give_up();
        self.0.channels.give_up();
        self.0.hang_up();
    }

    fn release(&self) -> Result<()> {
        let shared = self.0.clone();
        shared.peers.leave();
        shared.peers.close();
        let (told, flushed) = channel();
        threads::in_background("ox-nccl-flush", move || {
            let _inside = shared.gpu.enter();
            // No caller waits for an idle communicator longer than for work on it.
            let limit = FLUSH.min(shared.settings.timeout);
            shared.comm.retire(limit);
            shared.channels.retire(limit);
            let _ = told.send(());
        });
        // A flush that takes longer goes on by itself.
        let _ = flushed.recv_timeout(FLUSH_SEEN);
        Ok(())
    }

    fn waits_for(&self, label: &Label, stage: Stage) -> String {
        let whom = match (label.kind, label.message) {
            (OpKind::MonitoredBarrier, _) => self.0.missing(),
            (OpKind::Send, Some((Some(peer), tag))) => {
                format!("rank {peer} to receive a message with tag {tag}")
            }
            (_, Some((Some(peer), tag))) => format!("a message from rank {peer} with tag {tag}"),
            (OpKind::Batch, _) => "one of its messages".to_string(),
            _ if stage == Stage::Entering => "a call of NCCL to return".to_string(),
            _ => format!(
                "the device, or for some of the {} ranks to enter it",
                self.0.place.world
            ),
        };
        let left = self.0.peers.left();
        let note = match left.as_slice() {
            [] => String::new(),
            [_] => format!("; {} has left", ranks(&left)),
            _ => format!("; {} have left", ranks(&left)),
        };
        format!("waiting for {whom}{note}")
    }
}
