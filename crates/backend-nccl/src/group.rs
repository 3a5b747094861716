//! The process group: its lifecycle (configure, split, abort, shut down, drop) around one engine per configuration.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ftcore::{
    Accelerator, Capabilities, Checked, Collective, Configuration, DType, Device, DeviceKind, Epoch, Error,
    ErrorKind, GroupInfo, GroupOptions, ProcessGroup, ProcessGroupExt, Rejected, Result, SubmitOptions,
    Traffic, Work, deadline_in, time_left,
};

use crate::capability::capabilities;
use crate::control;
use crate::cuda::accelerator::CudaAccelerator;
use crate::cuda::gpu::Gpu;
use crate::engine::{Counters, Engine, Ingredients, Place};
use crate::options::Settings;
use crate::raw::{Comm, Nccl, nccl};

/// A group of ranks on CUDA devices, one device per rank, over NCCL.
///
/// Made unconfigured; [`configure`](ProcessGroup::configure) connects it. May be used from any thread, whatever device is current there.
///
/// Beyond the common contract of [`ProcessGroup`]:
/// - `submit` enqueues and returns; the host waits for nothing but NCCL's own set-up of the first calls. `Work::wait_on` orders a
///   stream after the operation without the host;
/// - messages run in lanes of their own, so that they neither wait for collectives nor hold them up; tags are not matched;
/// - the communicator is aborted on a thread that is given up if NCCL does not return; memory that the device may still touch is then
///   leaked and counted (`ftcore::leaked_bytes`), never freed;
/// - ranks as threads of one process share memory through NCCL: abort all of them together.
pub struct NcclGroup {
    device: Device,
    settings: Settings,
    capabilities: Capabilities,
    gpu: Arc<Gpu>,
    counters: Arc<Counters>,
    state: Mutex<State>,
    /// Raised by `abort` while `configure` runs.
    cancel: Arc<AtomicBool>,
}

#[derive(Default)]
struct State {
    name: String,
    engine: Option<Arc<Engine>>,
    configuration: Option<Configuration>,
    last_epoch: Option<Epoch>,
    /// Why the last `configure` failed.
    failure: Option<Error>,
    configuring: bool,
}

/// Where the communicator comes from.
enum Origin {
    /// A new one, by an id that rank 0 gives out.
    Id,
    /// Split off a parent.
    Parent(Box<Comm>),
}

impl NcclGroup {
    /// A new, unconfigured group on `device`. `name` is for messages until `configure` gives another.
    ///
    /// Errors: `Unsupported` (no library, no driver, no such device), `InvalidArgument` (an option that is not honoured).
    pub fn new(name: impl Into<String>, device: &Device, options: GroupOptions) -> Result<Self> {
        if device.kind != DeviceKind::Cuda {
            return Err(Error::invalid(format!("nccl serves cuda, not {device}")));
        }
        let nccl = nccl()?;
        let settings = Settings::new(options, nccl.version())?;
        let gpu = Gpu::open(device.index)?;
        gpu.enter()?;
        gpu.prepare()?;
        let capabilities = capabilities(nccl.version(), gpu.reduces_fp8(), settings.count_contributors);
        Ok(Self {
            device: device.clone(),
            settings,
            capabilities,
            gpu,
            counters: Arc::default(),
            state: Mutex::new(State {
                name: name.into(),
                ..State::default()
            }),
            cancel: Arc::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn engine(&self) -> Result<Arc<Engine>> {
        let state = self.lock();
        match (&state.engine, &state.failure) {
            (Some(engine), _) => Ok(engine.clone()),
            (None, Some(failure)) => {
                let text = format!("the group is not configured; the last attempt failed: {failure}");
                Err(Error::new(ErrorKind::InvalidState, text).with_source(failure.clone()))
            }
            (None, None) => Err(Error::new(ErrorKind::InvalidState, "the group is not configured")),
        }
    }

    /// Ends the old engine and makes the new one. Runs outside the lock, so that abort and submit stay responsive.
    fn connect(&self, c: &Configuration, old: Option<Arc<Engine>>, origin: Origin) -> Result<Arc<Engine>> {
        let nccl = nccl()?;
        if let Some(old) = old {
            old.leave(&format!("configured again at epoch {}", c.epoch));
            old.wait_ended(c.deadline)?;
        }
        self.gpu.enter()?;
        let id = match &origin {
            Origin::Id if c.rank == 0 => Some(nccl.unique_id()?),
            _ => None,
        };
        let meeting = control::meet(c, self.settings.constants(), id, &self.cancel);
        let comm = match (origin, meeting.as_ref().ok().and_then(|m| m.id)) {
            (Origin::Parent(comm), _) => Ok(*comm),
            (Origin::Id, Some(id)) if meeting.is_ok() => self.initialise(nccl, c, id),
            _ => Err(Error::new(ErrorKind::Protocol, "rank 0 gave no unique id")),
        };
        let (meeting, comm) = match (meeting, comm) {
            (Ok(meeting), Ok(comm)) => (meeting, comm),
            (Err(error), comm) => {
                comm.into_iter().for_each(give_up);
                return Err(error);
            }
            (Ok(_), Err(error)) => return Err(error),
        };
        let settled = self.settle(&comm, c);
        if let Err(error) = settled {
            give_up(comm);
            return Err(error);
        }
        Engine::start(Ingredients {
            place: Place {
                rank: c.rank,
                world: c.world_size,
                epoch: c.epoch.0,
            },
            gpu: self.gpu.clone(),
            comm,
            settings: self.settings.clone(),
            configuration: c.clone(),
            counters: self.counters.clone(),
            streams: meeting.streams,
        })
    }

    /// Joins NCCL's communicator on a thread that can be given up: even a non-blocking library may block in its first call.
    fn initialise(&self, nccl: &'static Nccl, c: &Configuration, id: nccl_sys::UniqueId) -> Result<Comm> {
        let (sender, receiver) = channel();
        let (rank, world, wish) = (c.rank, c.world_size, self.settings.wish(&c.name));
        let gpu = self.gpu.clone();
        std::thread::Builder::new()
            .name("ox-nccl-init".to_string())
            .spawn(move || {
                let comm = gpu
                    .enter()
                    .and_then(|()| Comm::init(nccl, id, rank, world, &wish));
                if let Err(returned) = sender.send(comm) {
                    // Nobody waits any more.
                    returned.0.iter().for_each(Comm::abort);
                }
            })
            .map_err(|e| Error::io("starting a thread", e))?;
        loop {
            match receiver.recv_timeout(Duration::from_millis(20).min(time_left(c.deadline))) {
                Ok(comm) => return comm,
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => {
                    return Err(Error::new(
                        ErrorKind::Internal,
                        "the thread that joins the communicator ended",
                    ));
                }
                Err(_) if self.cancel.load(Ordering::Acquire) => {
                    return Err(Error::new(
                        ErrorKind::Aborted,
                        "aborted while it was being configured",
                    ));
                }
                Err(_) if time_left(c.deadline).is_zero() => return Err(self.too_late(c)),
                Err(_) => {}
            }
        }
    }

    fn too_late(&self, c: &Configuration) -> Error {
        Error::timeout(format!(
            "NCCL did not connect rank {} of {} by the deadline (phase: communicator)",
            c.rank, c.world_size
        ))
    }

    fn settle(&self, comm: &Comm, c: &Configuration) -> Result<()> {
        let stop = || {
            self.cancel
                .load(Ordering::Acquire)
                .then(|| Error::new(ErrorKind::Aborted, "aborted while it was being configured"))
        };
        match comm.settle(c.deadline, &stop) {
            Err(e) if e.kind() == ErrorKind::Timeout => return Err(self.too_late(c)),
            other => other?,
        }
        let count = comm.count()?;
        if count != c.world_size {
            return Err(Error::new(
                ErrorKind::Mismatch,
                format!("NCCL sees {count} ranks, the configuration {}", c.world_size),
            ));
        }
        Ok(())
    }

    /// The whole of `configure`, for a communicator from either origin.
    fn configure_from(&self, configuration: Configuration, origin: Origin) -> Result<()> {
        let named = |e: Error| {
            if e.context().op.is_some() {
                return e;
            }
            e.with_op("configure")
                .with_rank(configuration.rank)
                .with_epoch(configuration.epoch.0)
        };
        if configuration.world_size == 0 || configuration.rank >= configuration.world_size {
            return Err(named(Error::invalid(format!(
                "rank {} does not exist in a world of {}",
                configuration.rank, configuration.world_size
            ))));
        }
        let old = {
            let mut state = self.lock();
            if state.configuring {
                return Err(named(Error::new(
                    ErrorKind::InvalidState,
                    "another thread is configuring this group right now",
                )));
            }
            if let Some(last) = state.last_epoch.filter(|&last| configuration.epoch <= last) {
                return Err(named(Error::invalid(format!(
                    "epoch {} is not larger than {last}, which this group had already",
                    configuration.epoch
                ))));
            }
            state.configuring = true;
            state.last_epoch = Some(configuration.epoch);
            state.name.clone_from(&configuration.name);
            state.failure = None;
            state.configuration = None;
            self.cancel.store(false, Ordering::Release);
            state.engine.take()
        };
        let connected = self.connect(&configuration, old, origin).map_err(named);
        let mut state = self.lock();
        state.configuring = false;
        match connected {
            Ok(engine) => {
                if self.cancel.load(Ordering::Acquire) {
                    engine.abort("aborted while it was being configured");
                }
                state.engine = Some(engine);
                state.configuration = Some(configuration);
                Ok(())
            }
            Err(error) => {
                state.failure = Some(error.clone());
                Err(error)
            }
        }
    }

    /// What every rank passes to `split`, and rank 0's number for this call: names that depend on nobody's counters (L34).
    fn exchange(&self, color: Option<u32>, key: u32, deadline: Instant) -> Result<Vec<[u32; 5]>> {
        let world = self.info().world_size as usize;
        let mut random = [0u8; 8];
        std::fs::File::open("/dev/urandom")
            .and_then(|mut f| std::io::Read::read_exact(&mut f, &mut random))
            .map_err(|e| Error::io("asking for random bytes", e))?;
        let [a, b, c, d, e, f, g, h] = random;
        let (high, low) = (u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h]));
        let mine = [u32::from(color.is_some()), color.unwrap_or(0), key, high, low];
        let bytes: Vec<u8> = mine.iter().flat_map(|w| w.to_ne_bytes()).collect();
        let cuda = CudaAccelerator;
        let stream = cuda.new_stream(self.device.index, false)?;
        let mut input = cuda.alloc(self.device.index, DType::U32, &[mine.len()])?;
        cuda.copy_in(&bytes, &mut input, &*stream)?;
        let output = cuda.alloc(self.device.index, DType::U32, &[mine.len() * world])?;
        let options = SubmitOptions {
            stream: Some(stream.clone()),
            ..SubmitOptions::by(deadline)
        };
        let pairs = vec![(input, output)];
        let work = self
            .run(Collective::AllGatherInto { pairs }, options)
            .map_err(Error::from)?;
        let all = work.take_tensor()?;
        let mut bytes = vec![0u8; all.byte_len()];
        cuda.copy_out(&all, &mut bytes, &*stream)?;
        let words: Vec<u32> = bytes
            .as_chunks::<4>()
            .0
            .iter()
            .map(|w| u32::from_ne_bytes(*w))
            .collect();
        Ok(words.as_chunks::<5>().0.to_vec())
    }
}

/// Ends a communicator on a thread of its own.
fn give_up(comm: Comm) {
    let started = std::thread::Builder::new()
        .name("ox-nccl-abort".to_string())
        .spawn(move || comm.abort());
    if let Err(error) = started {
        tracing::warn!(%error, "a communicator was left behind");
    }
}

impl ProcessGroup for NcclGroup {
    fn info(&self) -> GroupInfo {
        let state = self.lock();
        let place = state.engine.as_ref().map(|e| e.place);
        GroupInfo {
            backend: "nccl".to_string(),
            name: state.name.clone(),
            rank: place.map_or(0, |p| p.rank),
            world_size: place.map_or(0, |p| p.world),
            epoch: place.map_or(Epoch(0), |p| Epoch(p.epoch)),
            device: self.device.clone(),
        }
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn configure(&self, configuration: Configuration) -> Result<()> {
        self.configure_from(configuration, Origin::Id)
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        let op = op.into_inner();
        let engine = match self.engine() {
            Ok(engine) => engine,
            Err(error) => {
                let error = error.with_op(op.kind().name());
                return Err(Box::new(Rejected { error, op }));
            }
        };
        let deadline = options
            .deadline
            .unwrap_or_else(|| deadline_in(self.settings.timeout));
        engine.submit(op, &options, deadline)
    }

    fn split(
        &self,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    ) -> Result<Option<Box<dyn ProcessGroup>>> {
        let named = |e: Error| {
            if e.context().op.is_some() {
                e
            } else {
                e.with_op("split")
            }
        };
        let engine = self.engine().map_err(named)?;
        let parent = engine.configuration.clone();
        let all = self.exchange(color, key, deadline)?;
        let wish = self
            .settings
            .wish(&format!("{}/{}", parent.name, color.unwrap_or(0)));
        self.gpu.enter()?;
        let comm = engine.split(color, key, &wish, deadline).map_err(named)?;
        let (Some(color), Some(comm)) = (color, comm) else {
            return Ok(None);
        };
        let mut members: Vec<(u32, u32)> = all
            .iter()
            .zip(0u32..)
            .filter(|([has, c, ..], _)| *has == 1 && *c == color)
            .map(|([_, _, key, ..], rank)| (*key, rank))
            .collect();
        members.sort_unstable();
        let rank = members.iter().position(|(_, r)| *r == parent.rank).unwrap_or(0);
        let [_, _, _, high, low] = all.first().copied().unwrap_or_default();
        let child = Self::new(parent.name.clone(), &self.device, self.settings.options.clone())?;
        let configuration = Configuration {
            store: parent.store,
            prefix: format!("{}/split-{high:08x}{low:08x}/{color}", parent.prefix),
            name: format!("{}/{color}", parent.name),
            epoch: parent.epoch,
            rank: u32::try_from(rank).unwrap_or(0),
            world_size: u32::try_from(members.len()).unwrap_or(1),
            deadline,
        };
        child.configure_from(configuration, Origin::Parent(Box::new(comm)))?;
        Ok(Some(Box::new(child)))
    }

    fn abort(&self, reason: &str) {
        let engine = {
            let state = self.lock();
            if state.configuring {
                self.cancel.store(true, Ordering::Release);
            }
            state.engine.clone()
        };
        if let Some(engine) = engine {
            engine.abort(reason);
        }
    }

    fn error(&self) -> Option<Error> {
        let state = self.lock();
        match &state.engine {
            Some(engine) => engine.failure(),
            None => state.failure.clone(),
        }
    }

    fn shutdown(&self, deadline: Instant) -> Result<()> {
        let engine = self.lock().engine.clone();
        match engine {
            Some(engine) => engine.drain(deadline),
            None => Ok(()),
        }
    }

    fn traffic(&self) -> Traffic {
        self.counters.traffic()
    }
}

impl Drop for NcclGroup {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(engine) = state.engine.take() {
            engine.leave("the group was dropped");
        }
    }
}
