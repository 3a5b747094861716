//! The process group whose backend runs in a child process.
//!
//! A call is checked here, its tensors are put into shared memory (or lie there already), and the `link` carries it over; the
//! child's `keeper` ends it. The lifecycle (`lifecycle`): a child is started with the group; `configure` uses it, or the spare, or
//! a new one; `abort` ends it.

mod lifecycle;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use ftcore::{
    Cancel, Capabilities, Checked, Collective, Completion, Configuration, DType, Epoch, Error, ErrorKind,
    Failed, Feature, GroupInfo, ProcessGroup, Rejected, Result, SubmitOptions, Tensor, Traffic, Work,
    deadline_in, work_pair,
};

use crate::child;
use crate::child_pool;
use crate::crossing::Mode;
use crate::front::Front;
use crate::link::Link;
use crate::options::IsolateOptions;
use crate::peers::Peers;
use crate::pending::{Needs, Pending};
use crate::pool::Pool;
use crate::spare::Spare;
use crate::staging::stage;
use crate::wire::frames::{Order, Settled, submit};
use crate::wire::op::put;

/// Any registered backend in a child process, behind the same trait.
///
/// Beyond the common contract of [`ProcessGroup`]:
/// - `abort` ends the child; pending work fails with `Aborted` once a backend that can has told the other ranks why, after 60 ms at
///   most. SIGKILL comes then if a tensor of [`alloc`](Self::alloc) is pending, which comes back when the child is gone, else half a second after
///   the abort if the child has not ended by itself. The next `configure` uses the spare or a new child;
/// - a child that ends by itself fails all pending work with `Unavailable`: its exit status or signal (also as code:
///   the status, or minus the signal) and the last lines that it printed;
/// - an operation whose end the child does not report within 1.5 s after its deadline fails with `Timeout`, and the child is killed;
/// - tensors cross with one copy in and one out; those of [`alloc`](Self::alloc) with none;
/// - groups made by `split` live in the same child: what kills it ends them all. They have no spare of their own; after the
///   child's end, split again;
/// - ranks may be threads, whatever the backend: each has a child of its own.
pub struct IsolatedGroup(Arc<Handle>);

struct Handle {
    core: Arc<Core>,
    /// The group's number in its child; 0 for the first.
    number: u32,
    front: Arc<Front>,
    state: Mutex<State>,
}

/// What all groups of one child have in common.
struct Core {
    options: IsolateOptions,
    capabilities: Capabilities,
    /// Options that the child was told to drop and did.
    dropped_options: Vec<String>,
    library: Option<String>,
    /// The backend can be configured again in one process.
    reuses: bool,
    /// The backend tells the other ranks of an abort.
    tells: bool,
    pool: Arc<Pool>,
    spare: Arc<Spare>,
}

#[derive(Default)]
struct State {
    link: Option<Arc<Link>>,
    settled: Option<Settled>,
    name: String,
    last_epoch: Option<Epoch>,
    /// Why the last `configure` failed.
    failure: Option<Error>,
    /// Ends the `configure` that is under way.
    configuring: Option<Cancel>,
    shut: bool,
    /// Watches the other ranks, where the backend does not tell them.
    peers: Option<Peers>,
    /// Of earlier children.
    traffic: Traffic,
}

impl IsolatedGroup {
    /// Starts a child and opens the backend in it; with a spare, a second one in the background.
    ///
    /// Errors: the backend's own (`NotFound`, `InvalidArgument` for options that it does not honour, `Unsupported`, …);
    /// `Unsupported` for a device whose memory cannot cross; `Timeout` if the child's program does not serve; `Unavailable`
    /// if it cannot be started or ends.
    pub fn new(options: IsolateOptions) -> Result<Self> {
        let mode = Mode::direct(&options.device)?;
        Self::with(options, mode, None)
    }

    /// `why`: device memory does not cross, so that tensors are staged.
    pub(crate) fn with(options: IsolateOptions, mode: Mode, why: Option<&Error>) -> Result<Self> {
        if child::is_child() {
            return Err(Error::new(
                ErrorKind::InvalidState,
                "this process is itself the child of an isolated group; its program must call \
                 isolate::run_child_if_asked() before anything else",
            ));
        }
        let pool = Arc::new(Pool::new(mode));
        let started = child_pool::start(
            &options,
            &pool,
            deadline_in(options.start_timeout),
            &Cancel::default(),
        )?;
        let inner = started.capabilities;
        // The child settled them in the same way, with the same variables. What it has accepted is not refused here.
        let resolved = options.options.resolved(&options.backend, &inner.options);
        let dropped_options = resolved.map_or_else(|_| Vec::new(), |settled| settled.dropped);
        let core = Arc::new(Core {
            reuses: inner.has(Feature::Reconfigure),
            tells: inner.has(Feature::Abort),
            capabilities: isolated(inner, pool.mode(), why),
            dropped_options,
            library: started.library,
            pool,
            spare: Arc::default(),
            options,
        });
        let front = Arc::new(Front::default());
        started.link.attach_first(&front);
        if core.options.spare {
            core.spare.prepare(&core.options, &core.pool);
        }
        let state = State {
            link: Some(started.link),
            name: core.options.backend.clone(),
            ..State::default()
        };
        Ok(Self(Arc::new(Handle {
            core,
            number: 0,
            front,
            state: Mutex::new(state),
        })))
    }

    /// A zeroed tensor of `shape` in the memory that the child sees: operations on it copy nothing. Errors: `Io` if there is no
    /// memory, `InvalidArgument` if the shape is too large.
    pub fn alloc(&self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        self.0.core.pool.tensor(dtype, shape)
    }

    /// The child's process id, while there is one.
    pub fn child_pid(&self) -> Option<u32> {
        let state = self.0.lock();
        let link = state.link.as_ref().filter(|l| l.unusable().is_none())?;
        Some(link.pid.as_raw_nonzero().get().cast_unsigned())
    }

    /// The spare child's process id, once it is ready.
    pub fn spare_pid(&self) -> Option<u32> {
        self.0.core.spare.pid()
    }

    /// The vendor library behind the backend, as the child found it.
    pub fn library(&self) -> Option<&str> {
        self.0.core.library.as_deref()
    }
}

/// What a backend offers when it is isolated: abort and reconfigure whatever it can by itself.
pub(crate) fn isolated(inner: Capabilities, mode: &Mode, why: Option<&Error>) -> Capabilities {
    let mut capabilities = inner;
    capabilities.features = capabilities
        .features
        .with(Feature::Abort)
        .with(Feature::Reconfigure)
        .with(Feature::ThreadRanks)
        .with(Feature::Borrow);
    if let Mode::Host = mode {
        capabilities.devices.retain(|d| d == "cpu");
    }
    if let Mode::Shared(shared) = mode {
        capabilities.features = capabilities.features.without(Feature::Borrow);
        capabilities.devices = vec![shared.device.kind.name().to_string().into()];
        let note = "inputs and results are copied on the device, to and from memory that the child has open";
        capabilities.notes.push(("crossing".into(), note.into()));
        let note = "waits on the host for the whole operation: a stream must not wait for a process that may be killed";
        capabilities.notes.push(("wait_on".into(), note.into()));
    } else if let Some(why) = why {
        let note = format!("staged through host memory on both sides, because memory cannot cross: {why}");
        capabilities.notes.push(("crossing".into(), note.into()));
    }
    capabilities
        .notes
        .push(("*".into(), "runs in a child process; abort ends it".into()));
    capabilities
}

impl Handle {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn info(&self) -> GroupInfo {
        let state = self.lock();
        let mut info = state
            .settled
            .clone()
            .unwrap_or_default()
            .info(&self.core.options.backend, &self.core.options.device);
        if state.settled.is_none() {
            info.name.clone_from(&state.name);
        }
        info.dropped_options.clone_from(&self.core.dropped_options);
        info
    }

    // ---- operations

    /// The child and the place in the group, or why nothing can be submitted.
    fn ready(&self) -> Result<(Arc<Link>, u32, u64)> {
        let state = self.lock();
        let invalid = |text: &str| Error::new(ErrorKind::InvalidState, text);
        if state.shut {
            return Err(invalid("the group is shut down"));
        }
        match (&state.settled, &state.link, &state.failure) {
            (Some(settled), Some(link), _) => {
                if let Some(first) = self.front.error() {
                    let text = format!("the group failed earlier and was not configured again: {first}");
                    return Err(Error::new(ErrorKind::Poisoned, text).with_source(first));
                }
                Ok((link.clone(), settled.rank, settled.epoch))
            }
            (_, _, Some(failure)) => {
                let text = format!("the group is not configured; the last attempt failed: {failure}");
                Err(Error::new(ErrorKind::InvalidState, text).with_source(failure.clone()))
            }
            _ => Err(invalid("the group is not configured")),
        }
    }

    /// Blocking: the caller itself takes the child's report, if no other caller does so already.
    fn execute(self: &Arc<Self>, op: Checked, options: &SubmitOptions) -> Result<Completion, Box<Failed>> {
        let link = self.lock().link.clone();
        let mut express = link.as_ref().and_then(|link| Some((link, link.express()?)));
        let work = self.submit(op, options, express.as_ref().map(|(link, _)| *link))?;
        if let Some((link, receiver)) = &mut express {
            link.await_express(receiver, &work);
        }
        drop(express);
        work.take().map_err(|error| {
            Box::new(Failed {
                error,
                tensors: work.recover(),
            })
        })
    }

    /// `express`: the child on whose express socket the caller will wait.
    fn submit(
        self: &Arc<Self>,
        op: Checked,
        options: &SubmitOptions,
        express: Option<&Arc<Link>>,
    ) -> Result<Work, Box<Rejected>> {
        let op = op.into_inner();
        let kind = op.kind();
        let deadline = options
            .deadline
            .unwrap_or_else(|| deadline_in(self.core.options.options.timeout));
        let refuse = |error: Error, op: Collective| {
            let error = error.with_op(kind.name());
            Err(Box::new(Rejected { error, op }))
        };
        let (link, rank, epoch) = match self.ready() {
            Ok(ready) => ready,
            Err(error) => return refuse(error, op),
        };
        let staged = match stage(&self.core.pool, &op, rank, options.stream.as_ref(), deadline) {
            Ok(staged) => staged,
            Err(unstaged) if unstaged.touched => {
                return Ok(failed(
                    op,
                    deadline,
                    unstaged.error.with_rank(rank).with_epoch(epoch),
                ));
            }
            Err(unstaged) => return refuse(unstaged.error.with_rank(rank).with_epoch(epoch), op),
        };
        let express = express.is_some_and(|e| Arc::ptr_eq(e, &link));
        let arrival = staged.copied.as_ref().map(|(_, _, handle)| handle.as_slice());
        let mut frame = submit(self.number, options.contribute, express, deadline, arrival);
        if let Err(error) = put(&mut frame, &op, &mut staged.places.iter().copied()) {
            return match staged.settle(deadline) {
                true => refuse(error, op),
                false => Ok(failed(op, deadline, error)),
            };
        }
        let weak: Weak<Self> = Arc::downgrade(self);
        let (work, completer) = work_pair(kind, deadline, move |reason| {
            if let Some(this) = weak.upgrade() {
                this.abort(reason);
            }
        });
        let seq = (!kind.is_p2p()).then(|| self.front.seq.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
        let needs = Needs::of(&op);
        let slots = op.into_tensors().into_iter().zip(staged.stagings);
        let pending = Pending {
            group: self.number,
            kind,
            needs,
            seq,
            rank,
            epoch,
            submitted: Instant::now(),
            deadline,
            slots: slots.map(|(tensor, staging)| staging.slot(tensor)).collect(),
            copied: staged.copied.map(|(shared, event, _)| (shared, event)),
            completer,
        };
        match link.submit(pending, &staged.segments, |id| frame.numbered(id).finish()) {
            Ok(()) => Ok(work),
            Err(refused) => {
                // The child ended between the check above and here: the operation fails as all others did.
                let (error, pending) = *refused;
                pending.refuse(error);
                Ok(work)
            }
        }
    }

    /// The first failure.
    fn error(&self) -> Option<Error> {
        let state = self.lock();
        match (&state.settled, &state.failure) {
            (Some(_), _) => self.front.error(),
            (None, failure) => failure.clone(),
        }
    }

    fn traffic(&self) -> Traffic {
        let state = self.lock();
        let now = self.front.traffic();
        Traffic {
            sent: state.traffic.sent + now.sent,
            received: state.traffic.received + now.received,
        }
    }
}

/// An operation that failed before it reached the child, with copies under way that cannot be taken back (INV-8).
fn failed(op: Collective, deadline: Instant, error: Error) -> Work {
    let kind = op.kind();
    for tensor in op.into_tensors() {
        tensor.leak("a copy from it did not end");
    }
    let (work, completer) = work_pair(kind, deadline, |_| {});
    completer.fail(error.with_op(kind.name()), Vec::new());
    work
}

impl ProcessGroup for IsolatedGroup {
    fn info(&self) -> GroupInfo {
        self.0.info()
    }

    fn capabilities(&self) -> &Capabilities {
        &self.0.core.capabilities
    }

    fn configure(&self, configuration: Configuration) -> Result<()> {
        self.0.configure(configuration)
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        self.0.submit(op, &options, None)
    }

    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        self.0.execute(op, &options)
    }

    fn split(
        &self,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    ) -> Result<Option<Box<dyn ProcessGroup>>> {
        let part = self.0.split(color, key, deadline)?;
        Ok(part.map(|g| Box::new(g) as Box<dyn ProcessGroup>))
    }

    fn abort(&self, reason: &str) {
        self.0.abort(reason);
    }

    fn error(&self) -> Option<Error> {
        self.0.error()
    }

    fn shutdown(&self, deadline: Instant) -> Result<()> {
        self.0.shutdown(deadline)
    }

    fn traffic(&self) -> Traffic {
        self.0.traffic()
    }
}

impl Drop for IsolatedGroup {
    fn drop(&mut self) {
        let (link, peers) = {
            let mut state = self.0.lock();
            (state.link.take(), state.peers.take())
        };
        let mut leave_order = Some(Order::Leave);
        if let (Some(link), Some(peers)) = (&link, &peers)
            && (link.is_busy() || (link.is_alone() && self.0.front.error().is_some()))
        {
            // The watch ends the child, after it has told the others why.
            leave_order = None;
            let info = self.0.info();
            let text = format!("rank {} dropped the group while work was pending", info.rank);
            peers.tell(Error::new(ErrorKind::Aborted, text).with_epoch(info.epoch.0));
        }
        drop(peers);
        if let Some(link) = link {
            link.detach(
                self.0.number,
                Error::new(ErrorKind::Aborted, "the group was dropped"),
                leave_order,
            );
        }
        if self.0.number == 0 {
            self.0.core.spare.close();
        }
    }
}
