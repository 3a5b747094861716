//! The process group whose backend runs in a child process.
//!
//! A call is checked here, its tensors are put into shared memory (or lie there already), and the engine of the present configuration hands it
//! to the child (`driver`). A child is started with the group; `configure` uses it, or the spare, or a new one; a failure that is not the child's
//! own ends it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ftcore::engine::{Label, Place};
use ftcore::lifecycle::{Engine as _, Lifecycle};
use ftcore::{
    Cancel, Capabilities, Checked, Collective, Completion, Configuration, DType, Error, ErrorKind, Failed,
    Feature, GroupInfo, ProcessGroup, Rejected, Result, SubmitOptions, Tensor, Traffic, Work, deadline_in,
    forked, later, time_left, work_pair,
};

use crate::child;
use crate::child_pool;
use crate::crossing::Mode;
use crate::driver::{Call, ChildDriver, Engine, RULES, give_up};
use crate::link::{Claim, LEAVE, Link, TELLING};
use crate::notices::{self, Notices};
use crate::options::IsolateOptions;
use crate::pool::Pool;
use crate::spare::Spare;
use crate::staging::{Staged, stage};
use crate::watch::Watch;
use crate::wire::frames::{Order, Settled, submit};
use crate::wire::op;

/// A backend reports the end of a call by its deadline; after this much more it is not going to.
const MARGIN: Duration = Duration::from_secs(2);

/// Any registered backend in a child process, behind the same trait.
///
/// Beyond the common contract of [`ProcessGroup`]:
/// - `abort` ends the child; pending work fails with `Aborted` once a backend that can has told the other ranks why, after 60 ms at
///   most. SIGKILL comes then if a tensor of [`alloc`](Self::alloc) is pending, which comes back when the child is gone, else half a second after
///   the abort if the child has not ended by itself. The next `configure` uses the spare or a new child. So it is for every failure that the child
///   has not reported, and for `configure` while work is pending;
/// - a child that ends by itself fails all pending work with `Unavailable`: its exit status or signal (also as code:
///   the status, or minus the signal) and the last lines that it printed;
/// - an operation whose end the child does not report within 1.5 s after its deadline fails with `Timeout`;
/// - tensors cross with one copy in and one out; those of [`alloc`](Self::alloc) with none;
/// - groups made by `split` live in the same child: what kills it ends them all. They have no spare of their own; after the
///   child's end, split again;
/// - ranks may be threads, whatever the backend: each has a child of its own.
///
/// ```no_run
/// use ftcore::{Device, ProcessGroup as _};
/// use oxccl_isolate::{IsolateOptions, IsolatedGroup};
///
/// let group = IsolatedGroup::new(IsolateOptions::new("xccl", Device::CPU))?;
/// // Configured and used as any other. This kills the library's process, and the next epoch has another one.
/// group.abort("a peer is gone");
/// # Ok::<(), ftcore::Error>(())
/// ```
pub struct IsolatedGroup {
    /// The first field: whatever is pending ends before the child is let go of.
    lifecycle: Lifecycle<Engine>,
    core: Arc<Core>,
    /// It was split from another group, and lives in that one's child.
    is_part: bool,
    state: Mutex<State>,
}

/// What all groups of one child have in common.
struct Core {
    options: IsolateOptions,
    capabilities: Capabilities,
    /// Options that the child was told to drop and did.
    dropped_options: Vec<String>,
    /// The backend can be configured again in one process.
    reuses: bool,
    /// The backend tells the other ranks of an abort.
    tells: bool,
    pool: Arc<Pool>,
    spare: Arc<Spare>,
}

#[derive(Default)]
struct State {
    /// In the present child.
    claim: Option<Claim>,
    /// That child's group was never configured: a first time is always possible.
    is_new: bool,
    /// Of earlier children.
    traffic: Traffic,
}

/// A call on its way to the engine.
struct Admitted {
    engine: Arc<Engine>,
    label: Label,
    call: Call,
    deadline: Instant,
}

/// A call that does not get there.
struct Unadmitted {
    error: Error,
    op: Collective,
    /// A copy that was begun may still be reading its tensors.
    is_touched: bool,
}

impl Unadmitted {
    /// The tensors that nothing touches: all or none (INV-8).
    fn into_tensors(self) -> Vec<Tensor> {
        let mut tensors = self.op.into_tensors();
        if self.is_touched {
            for tensor in tensors.drain(..) {
                tensor.leak("a copy from it did not end");
            }
        }
        tensors
    }
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
        // The thread that starts children is the parent's, too.
        forked::check()?;
        let pool = Arc::new(Pool::new(mode));
        let until = deadline_in(options.start_timeout);
        let started = child_pool::start(&options, &pool, until, &Cancel::default())?;
        let inner = started.capabilities;
        // The child settled them in the same way, with the same variables. What it has accepted is not refused here.
        let resolved = options.options.resolved(&options.backend, &inner.options);
        let dropped_options = resolved.map_or_else(|_| Vec::new(), |settled| settled.dropped);
        let core = Arc::new(Core {
            reuses: inner.has(Feature::Reconfigure),
            tells: inner.has(Feature::Abort),
            capabilities: isolated(inner, pool.mode(), why),
            dropped_options,
            pool,
            spare: Arc::default(),
            options,
        });
        core.prepare_spare();
        Ok(Self::of(core, Claim::first(started.link), false))
    }

    fn of(core: Arc<Core>, claim: Claim, is_part: bool) -> Self {
        Self {
            lifecycle: Lifecycle::new(&*core.options.backend, &*core.options.backend),
            core,
            is_part,
            state: Mutex::new(State {
                claim: Some(claim),
                is_new: true,
                ..State::default()
            }),
        }
    }

    /// A zeroed tensor of `shape` in the memory that the child sees: operations on it copy nothing. Errors: `Io` if there is no
    /// memory, `InvalidArgument` if the shape is too large.
    pub fn alloc(&self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        self.core.pool.tensor(dtype, shape)
    }

    /// The child's process id, while there is one.
    pub fn child_pid(&self) -> Option<u32> {
        let state = self.lock();
        let link = state.claim.as_ref().map(|claim| &claim.link);
        let link = link.filter(|link| link.unusable().is_none())?;
        Some(link.pid.as_raw_nonzero().get().cast_unsigned())
    }

    /// The spare child's process id, once it is ready.
    pub fn spare_pid(&self) -> Option<u32> {
        self.core.spare.pid()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // ---- configurations

    /// The child to configure.
    fn child_for(&self, configuration: &Configuration) -> Result<Arc<Link>> {
        let Configuration { deadline, cancel, .. } = configuration;
        let old = {
            let mut state = self.lock();
            let is_new = std::mem::take(&mut state.is_new);
            match &state.claim {
                Some(claim) if (self.core.reuses || is_new) && claim.link.is_fresh() => {
                    return Ok(claim.link.clone());
                }
                _ => state.claim.take(),
            }
        };
        if self.is_part {
            return Err(Error::new(
                ErrorKind::InvalidState,
                "this group was split from one whose child process has ended; configure that one and split again",
            ));
        }
        self.spend(old);
        let link = match self.core.spare.take(*deadline, cancel) {
            Some(link) => link,
            None => child_pool::start(&self.core.options, &self.core.pool, *deadline, cancel)?.link,
        };
        self.lock().claim = Some(Claim::first(link.clone()));
        cancel.check()?;
        Ok(link)
    }

    /// Lets go of a child, whose counters end with it.
    fn spend(&self, claim: Option<Claim>) {
        if let Some(claim) = claim {
            let spent = claim.moved.traffic();
            let mut state = self.lock();
            state.traffic.sent += spent.sent;
            state.traffic.received += spent.received;
        }
    }

    fn connect(&self, configuration: &Configuration) -> Result<Arc<Engine>> {
        let link = self.child_for(configuration)?;
        let connected = self.configure_child(configuration, &link);
        if let Err(error) = &connected {
            let is_late = time_left(later(configuration.deadline, MARGIN)).is_zero();
            if let Some(reason) = configuration.cancel.reason() {
                // The child does not know of it.
                link.part();
                let order = self.core.tells.then(|| Order::End {
                    reason: reason.message().to_string(),
                });
                link.end_after(reason, order, TELLING, LEAVE);
            } else if is_late || !self.core.reuses {
                link.end(error.clone(), None, Duration::ZERO);
            }
        } else {
            self.core.prepare_spare();
        }
        connected
    }

    fn configure_child(&self, configuration: &Configuration, link: &Arc<Link>) -> Result<Arc<Engine>> {
        let is_watched = !self.core.tells && configuration.world_size > 1 && !self.is_part;
        if is_watched {
            notices::publish(configuration, link)?;
        }
        let store = link.stores()?.offer(configuration.store.clone());
        let number = self.lock().claim.as_ref().map_or(0, |claim| claim.number);
        let settled = link.call(
            |call| Order::Configure {
                call,
                group: number,
                store,
                prefix: configuration.prefix.clone(),
                name: configuration.name.clone(),
                epoch: configuration.epoch,
                rank: configuration.rank,
                world: configuration.world_size,
                deadline: configuration.deadline,
            },
            later(configuration.deadline, MARGIN),
            &configuration.cancel,
        )?;
        let settled =
            settled.ok_or_else(|| Error::new(ErrorKind::Protocol, "the child says nothing of its group"))?;
        let notices = is_watched
            .then(|| Notices::new(configuration, link))
            .transpose()?;
        let watch = notices.clone().map(|notices| notices as Arc<dyn Watch>);
        let engine = self.start(Place::of(configuration), settled, watch.as_ref())?;
        if let Some(notices) = notices {
            let watched = notices.watch(configuration);
            watched.inspect_err(|_| engine.abort("it cannot watch the other ranks"))?;
        }
        Ok(engine)
    }

    /// The engine over a group in the child that is configured.
    fn start(&self, place: Place, settled: Settled, notices: Option<&Arc<dyn Watch>>) -> Result<Arc<Engine>> {
        let state = self.lock();
        let ended = || Error::new(ErrorKind::InvalidState, "the group was shut down meanwhile");
        let claim = state.claim.as_ref().ok_or_else(ended)?;
        claim.moved.count(settled.sent, settled.received);
        let driver = ChildDriver::new(
            claim,
            place,
            settled.name.into(),
            self.core.tells,
            notices.cloned(),
        );
        let engine = Engine::start("ox-isolated", place, RULES, driver)?;
        let (link, number) = (claim.link.clone(), claim.number);
        drop(state);
        link.serve(number, &engine, notices);
        Ok(engine)
    }

    // ---- operations

    fn admit(&self, op: Checked, options: &SubmitOptions) -> Result<Admitted, Box<Unadmitted>> {
        let op = op.into_inner();
        let kind = op.kind().name();
        let deadline = options.deadline;
        let deadline = deadline.unwrap_or_else(|| deadline_in(self.core.options.options.timeout));
        let refuse = |error: Error, op: Collective, is_touched: bool| {
            let error = error.with_op(kind);
            Err(Box::new(Unadmitted {
                error,
                op,
                is_touched,
            }))
        };
        let engine = match self.lifecycle.engine() {
            Ok(engine) => engine,
            Err(error) => return refuse(error, op, false),
        };
        let place = engine.place();
        let staged = match stage(
            &self.core.pool,
            &op,
            place.rank,
            options.stream.as_ref(),
            deadline,
        ) {
            Ok(staged) => staged,
            Err(unstaged) => return refuse(place.name(unstaged.error), op, unstaged.touched),
        };
        let number = engine.driver().number();
        match frame(number, &op, &staged, options.contribute, deadline) {
            Ok(frame) => Ok(Admitted {
                label: Label::of(&op),
                engine,
                call: Call { op, staged, frame },
                deadline,
            }),
            Err(error) => {
                let is_touched = !staged.is_copied();
                if is_touched {
                    give_up(Vec::new(), staged);
                }
                refuse(error, op, is_touched)
            }
        }
    }
}

/// The order of an operation, but for its number.
fn frame(
    number: u32,
    op: &Collective,
    staged: &Staged,
    contribute: bool,
    deadline: Instant,
) -> Result<Vec<u8>> {
    let mut frame = submit(number, contribute, deadline, staged.arrival());
    op::put(&mut frame, op, &mut staged.places.iter().copied())?;
    frame.finish()
}

impl Core {
    /// Has a spare child started, if there is to be one.
    fn prepare_spare(&self) {
        if self.options.spare {
            self.spare.prepare(&self.options, &self.pool);
        }
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

#[deny(clippy::missing_trait_methods)]
impl ProcessGroup for IsolatedGroup {
    fn info(&self) -> GroupInfo {
        let options = &self.core.options;
        let mut info = self.lifecycle.info(options.device.clone());
        if let Ok(engine) = self.lifecycle.engine() {
            info.name = engine.driver().name();
        }
        info.dropped_options.clone_from(&self.core.dropped_options);
        info
    }

    fn capabilities(&self) -> &Capabilities {
        &self.core.capabilities
    }

    fn configure(&self, configuration: Configuration) -> Result<()> {
        self.lifecycle.configure(configuration, |c| self.connect(c))
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        let admitted = match self.admit(op, &options) {
            Ok(admitted) => admitted,
            Err(unadmitted) if unadmitted.is_touched => {
                // There is nothing to give back.
                let (work, completer) = work_pair(unadmitted.op.kind(), Instant::now(), |_| {});
                let error = unadmitted.error.clone();
                completer.fail(error, unadmitted.into_tensors());
                return Ok(work);
            }
            Err(unadmitted) => {
                let Unadmitted { error, op, .. } = *unadmitted;
                return Err(Box::new(Rejected { error, op }));
            }
        };
        (admitted.engine).submit_here(admitted.call, admitted.label, admitted.deadline)
    }

    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        let Admitted {
            engine,
            label,
            call,
            deadline,
        } = self.admit(op, &options).map_err(|unadmitted| {
            let error = unadmitted.error.clone();
            let tensors = unadmitted.into_tensors();
            Box::new(Failed { error, tensors })
        })?;
        engine.carry_out(call, label, deadline, |call| {
            engine.driver().execute(call, deadline)
        })
    }

    fn alloc(&self, dtype: DType, count: usize) -> Result<Tensor> {
        Tensor::try_zeros(dtype, &[count])
    }

    fn split(
        &self,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    ) -> Result<Option<Box<dyn ProcessGroup>>> {
        let named = |e: Error| e.with_op("split");
        let (engine, parent) = self.lifecycle.configured().map_err(named)?;
        if let Some(first) = engine.error() {
            let text = format!("the group failed before: {first}");
            let error = Error::new(ErrorKind::Poisoned, text).with_source(first);
            return Err(named(engine.place().name(error)));
        }
        if !self.core.capabilities.has(Feature::Split) {
            let text = format!("backend '{}' cannot split", self.core.options.backend);
            return Err(named(Error::unsupported(text)));
        }
        let number = engine.driver().number();
        let link = engine.driver().link().clone();
        // Let go of again if there is no group for this rank.
        let claim = Claim::another(link.clone());
        let new = claim.number;
        let settled = link.call(
            |call| Order::Split {
                call,
                group: number,
                new,
                color,
                key,
                deadline,
            },
            later(deadline, MARGIN),
            &parent.cancel,
        )?;
        let Some(settled) = settled else { return Ok(None) };
        let configuration = Configuration {
            name: settled.name.clone(),
            epoch: settled.epoch,
            rank: settled.rank,
            world_size: settled.world,
            deadline,
            ..parent
        };
        let notices = engine.driver().notices();
        notices.into_iter().for_each(|notices| notices.join());
        let part = Self::of(self.core.clone(), claim, true);
        // It is connected.
        part.lock().is_new = false;
        let started =
            (part.lifecycle).configure(configuration, |c| part.start(Place::of(c), settled, notices));
        started.inspect_err(|_| notices.into_iter().for_each(|notices| notices.leave()))?;
        Ok(Some(Box::new(part)))
    }

    fn abort(&self, reason: &str) {
        if forked::is_child() {
            // The child process and the way to it are the parent's.
            return;
        }
        self.lifecycle.abort(reason);
        if let Ok(engine) = self.lifecycle.engine() {
            engine.driver().abort(reason);
        }
    }

    fn error(&self) -> Option<Error> {
        self.lifecycle.error()
    }

    fn shutdown(&self, deadline: Instant) -> Result<()> {
        if forked::is_child() {
            return Ok(());
        }
        let Ok(engine) = self.lifecycle.engine() else {
            return Ok(());
        };
        let drained = self.lifecycle.shutdown(deadline);
        let claim = self.lock().claim.take();
        let Some(claim) = claim else { return drained };
        let (link, number) = (claim.link.clone(), claim.number);
        let ended = match engine.error() {
            // Its child has ended too, or does.
            Some(_) => Ok(None),
            None => link.call(
                |call| Order::Shutdown {
                    call,
                    group: number,
                    deadline,
                },
                later(deadline, MARGIN),
                &Cancel::default(),
            ),
        };
        let is_last = link.is_alone();
        self.spend(Some(claim));
        if is_last {
            // Its end is on its way; a program that counts processes may want to see it.
            link.wait_gone(deadline_in(LEAVE * 2));
        }
        match ended {
            // It ended meanwhile: nothing is left to shut down.
            Err(error) if error.kind() != ErrorKind::Aborted => drained.and(Err(error)),
            _ => drained,
        }
    }

    fn traffic(&self) -> Traffic {
        let state = self.lock();
        let now = state.claim.as_ref().map(|claim| claim.moved.traffic());
        let now = now.unwrap_or_default();
        Traffic {
            sent: state.traffic.sent + now.sent,
            received: state.traffic.received + now.received,
        }
    }
}

impl Drop for IsolatedGroup {
    fn drop(&mut self) {
        if forked::is_child() {
            return;
        }
        if let Ok(engine) = self.lifecycle.engine() {
            engine.driver().note_drop();
        }
        if !self.is_part {
            self.core.spare.close();
        }
    }
}
