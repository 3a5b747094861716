//! NCCL behind safe methods: the opened library, communicators, and the calls that enqueue work.
//!
//! A communicator is used by many threads and may be aborted by one more at any moment. One call at a time is inside the library
//! with it (`gate`): there even a question is no mere question, since `ncclCommGetAsyncError` and most others join the thread of the last
//! launch and free what belongs to it. Abort and destroy close the communicator first and then wait a little for the caller to leave, so
//! that a freed communicator is never touched.

use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use ftcore::{DType, Error, ErrorKind, Result, deadline_in, time_left};
use nccl_sys::{Api, Config, DataType, Library, RedOp, ResultCode, UniqueId, Version, code, dtype};

use crate::cuda::gpu::Gpu;
use crate::threads::in_background;

mod calls;
mod split;

pub(crate) use calls::Calls;
pub(crate) use split::Part;

/// How long an abort waits for a thread that is inside a call before it goes ahead without it.
const COURTESY: Duration = Duration::from_millis(30);

/// The opened library.
pub(crate) struct Nccl {
    library: Library,
}

/// NCCL, opened at the first question. The first failure is kept.
pub(crate) fn nccl() -> Result<&'static Nccl> {
    static NCCL: OnceLock<Result<Nccl>> = OnceLock::new();
    NCCL.get_or_init(|| {
        Ok(Nccl {
            library: Library::open()?,
        })
    })
    .as_ref()
    .map_err(Clone::clone)
}

/// What rank `maker` has put into the store, which is not trusted (INV-10).
pub(crate) fn id_of(bytes: &[u8], maker: u32) -> Result<UniqueId> {
    bytes.try_into().map(UniqueId).map_err(|_| {
        let text = format!(
            "rank {maker}'s unique id has {} bytes, not {}",
            bytes.len(),
            UniqueId::BYTES
        );
        Error::new(ErrorKind::Protocol, text).with_peer(maker)
    })
}

/// What a communicator is made with, in C's terms.
#[derive(Debug, Clone, Default)]
pub(crate) struct Wish {
    pub(crate) blocking: bool,
    pub(crate) cga_cluster_size: Option<u32>,
    pub(crate) min_ctas: Option<u32>,
    pub(crate) max_ctas: Option<u32>,
    pub(crate) net_name: Option<String>,
    pub(crate) split_share: Option<bool>,
    pub(crate) traffic_class: Option<u32>,
    pub(crate) name: String,
}

impl Nccl {
    pub(crate) fn version(&self) -> Version {
        self.library.version()
    }

    /// The library in words.
    pub(crate) fn describe(&self) -> String {
        let text = format!("NCCL {} ({})", self.version(), self.library.path().display());
        match self.library.stand_in() {
            Some(what) => format!("{what}, as {text}"),
            None => text,
        }
    }

    /// The functions beyond those that every version has.
    pub(crate) fn api(&self) -> &Api {
        self.library.api()
    }

    fn error(&self, call: &str, result: ResultCode) -> Error {
        let kind = match result {
            code::REMOTE_ERROR => ErrorKind::PeerLost,
            code::TIMEOUT => ErrorKind::Timeout,
            _ => ErrorKind::Backend,
        };
        let last = self.library.last_error();
        let last = if last.is_empty() {
            String::new()
        } else {
            format!(" ({})", last.trim())
        };
        let text = format!(
            "NCCL {}: {call}: {}{last}",
            self.version(),
            self.library.describe(result)
        );
        Error::new(kind, text).with_code(i64::from(result))
    }

    fn check(&self, call: &str, result: ResultCode) -> Result<()> {
        if result == code::SUCCESS || result == code::IN_PROGRESS {
            return Ok(());
        }
        Err(self.error(call, result))
    }

    /// A new unique id.
    pub(crate) fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId([0; UniqueId::BYTES]);
        // SAFETY: writes one id into the variable that this call borrows.
        self.check("ncclGetUniqueId", unsafe {
            (self.api().get_unique_id)(&raw mut id)
        })?;
        Ok(id)
    }

    /// Calls `f` with the configuration, whose strings the library copies in the call, but for `name`, which is that of a place.
    fn with_config<T>(
        &self,
        wish: &Wish,
        name: *const c_char,
        f: impl FnOnce(&mut Config) -> Result<T>,
    ) -> Result<T> {
        let int =
            |v: Option<u32>| v.map_or(nccl_sys::UNDEFINED, |v| c_int::try_from(v).unwrap_or(c_int::MAX));
        let net = wish.net_name.as_deref().map(c_string).transpose()?;
        let mut config = Config::new(self.version());
        config.blocking = c_int::from(wish.blocking);
        config.cga_cluster_size = int(wish.cga_cluster_size);
        config.min_ctas = int(wish.min_ctas);
        config.max_ctas = int(wish.max_ctas);
        config.net_name = net.as_ref().map_or(ptr::null(), |n| n.as_ptr());
        config.split_share = int(wish.split_share.map(u32::from));
        config.traffic_class = int(wish.traffic_class);
        config.comm_name = name;
        f(&mut config)
    }
}

fn c_string(s: &str) -> Result<CString> {
    CString::new(s).map_err(|_| Error::invalid(format!("'{s}' holds a zero byte")))
}

/// The bits of a factor in `d`.
pub(crate) fn factor_bits(factor: f64, d: DType) -> Result<u64> {
    Ok(match d {
        DType::F64 => factor.to_bits(),
        DType::F32 => u64::from((factor as f32).to_bits()),
        DType::F16 => u64::from(half::f16::from_f64(factor).to_bits()),
        DType::BF16 => u64::from(half::bf16::from_f64(factor).to_bits()),
        other => return Err(Error::unsupported(format!("NCCL does not scale {other}"))),
    })
}

/// A factor as `d` holds it.
pub(crate) fn factor_in(factor: f64, d: DType) -> f64 {
    match d {
        DType::F32 => f64::from(factor as f32),
        DType::F16 => half::f16::from_f64(factor).to_f64(),
        DType::BF16 => half::bf16::from_f64(factor).to_f64(),
        _ => factor,
    }
}

/// NCCL's type for arithmetic; `None` if it has none.
pub(crate) fn native(d: DType) -> Option<DataType> {
    Some(match d {
        DType::F64 => dtype::FLOAT64,
        DType::F32 => dtype::FLOAT32,
        DType::F16 => dtype::FLOAT16,
        DType::BF16 => dtype::BFLOAT16,
        DType::F8E4M3 => dtype::FLOAT8_E4M3,
        DType::F8E5M2 => dtype::FLOAT8_E5M2,
        DType::I64 => dtype::INT64,
        DType::I32 => dtype::INT32,
        DType::I8 => dtype::INT8,
        DType::U64 => dtype::UINT64,
        DType::U32 => dtype::UINT32,
        DType::U8 => dtype::UINT8,
        _ => return None,
    })
}

/// What the library keeps pointers to for as long as it has the communicator. It does not move.
struct Place {
    /// The handle as the library writes it, on a thread of its own: at once, or when it is through, or both.
    handle: Box<AtomicPtr<c_void>>,
    /// The communicator's name, which a profiler is told at any time.
    name: CString,
}

impl Place {
    fn new(wish: &Wish) -> Result<Self> {
        Ok(Self {
            handle: Box::new(AtomicPtr::new(ptr::null_mut())),
            name: c_string(&wish.name)?,
        })
    }
}

/// A communicator.
pub(crate) struct Comm {
    nccl: &'static Nccl,
    gpu: Arc<Gpu>,
    handle: *mut c_void,
    place: Option<Place>,
    /// That of a child that is being split off. It is kept until nothing is in progress or this communicator is gone.
    child: Mutex<Option<Place>>,
    /// No call may begin any more.
    closed: AtomicBool,
    /// The library says that it is gone.
    freed: AtomicBool,
    /// Held in every call but an abort and what makes way for it.
    gate: Mutex<()>,
}

// SAFETY: NCCL allows calls from any thread, one at a time per communicator (the gate), and an abort beside them.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

impl Comm {
    /// Joins. Non-blocking communicators are usually still in progress: see [`settle`](Self::settle).
    pub(crate) fn init(
        nccl: &'static Nccl,
        gpu: &Arc<Gpu>,
        id: UniqueId,
        rank: u32,
        world: u32,
        wish: &Wish,
    ) -> Result<Self> {
        let (rank, world) = (c_int::try_from(rank), c_int::try_from(world));
        let (Ok(rank), Ok(world)) = (rank, world) else {
            return Err(Error::invalid("the world is too large for NCCL"));
        };
        let place = Place::new(wish)?;
        let result = nccl.with_config(wish, place.name.as_ptr(), |config| {
            let call = nccl.api().comm_init_rank_config;
            // SAFETY: writes one handle into a place that is kept, as is the name; the configuration and its other strings live over
            // the call, which copies them.
            Ok(unsafe { call(place.handle.as_ptr(), world, id, rank, config) })
        })?;
        Self::of(nccl, gpu, place, "ncclCommInitRankConfig", result)
    }

    /// What a call has written into `place`.
    fn of(nccl: &'static Nccl, gpu: &Arc<Gpu>, place: Place, call: &str, result: ResultCode) -> Result<Self> {
        let handle = place.handle.load(Ordering::Acquire);
        let comm = Self {
            nccl,
            gpu: gpu.clone(),
            handle,
            place: Some(place),
            child: Mutex::default(),
            closed: AtomicBool::new(handle.is_null()),
            freed: AtomicBool::new(false),
            gate: Mutex::default(),
        };
        if let Err(error) = nccl.check(call, result) {
            comm.abort();
            return Err(error);
        }
        if handle.is_null() {
            return Err(Error::new(
                ErrorKind::Backend,
                format!("{call} gave no communicator"),
            ));
        }
        Ok(comm)
    }

    /// Holds the communicator open for one call, alone. Waits for the call that is inside; an abort ends the wait.
    fn enter(&self) -> Result<MutexGuard<'_, ()>> {
        let mut round = 0;
        loop {
            if let Some(inside) = self.try_enter()? {
                return Ok(inside);
            }
            pause(&mut round);
        }
    }

    /// As [`enter`](Self::enter); `None` if another call is inside.
    fn try_enter(&self) -> Result<Option<MutexGuard<'_, ()>>> {
        let gate = self.gate();
        // Asked behind the gate: the one that closes waits for it afterwards.
        match self.closed.load(Ordering::Acquire) {
            false => Ok(gate),
            true => Err(Error::new(ErrorKind::Aborted, "the communicator was aborted")),
        }
    }

    fn gate(&self) -> Option<MutexGuard<'_, ()>> {
        match self.gate.try_lock() {
            Ok(gate) => Some(gate),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// `Ok(true)` if nothing is in progress, also no call of another thread; the communicator's error otherwise.
    pub(crate) fn state(&self) -> Result<bool> {
        let Some(_inside) = self.try_enter()? else {
            return Ok(false);
        };
        let mut state = code::SUCCESS;
        // SAFETY: the gate keeps the communicator; writes one code.
        let result = unsafe { (self.nccl.api().comm_get_async_error)(self.handle, &raw mut state) };
        self.nccl.check("ncclCommGetAsyncError", result)?;
        match state {
            code::IN_PROGRESS => Ok(false),
            state => self.nccl.check("the communicator", state).map(|()| true),
        }
    }

    /// Waits until nothing is in progress, `stop` says why not to go on, or the deadline passes.
    pub(crate) fn settle(&self, deadline: Instant, stop: &dyn Fn() -> Option<Error>) -> Result<()> {
        let mut round = 0;
        // An abort closes the communicator under the caller that waits; the reason is the group's.
        let is_through = || {
            self.state().map_err(|error| match error.kind() {
                ErrorKind::Aborted => stop().unwrap_or(error),
                _ => error,
            })
        };
        while !is_through()? {
            if let Some(error) = stop() {
                return Err(error);
            }
            if time_left(deadline).is_zero() {
                return Err(Error::timeout(
                    "NCCL was still busy with the call at the deadline",
                ));
            }
            pause(&mut round);
        }
        Ok(())
    }

    /// The number of ranks as NCCL sees it.
    pub(crate) fn count(&self) -> Result<u32> {
        let _inside = self.enter()?;
        let mut count = 0;
        // SAFETY: the gate keeps the communicator; writes one int.
        let result = unsafe { (self.nccl.api().comm_count)(self.handle, &raw mut count) };
        self.nccl.check("ncclCommCount", result)?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// Runs `calls` as one group and waits until they are enqueued, so that an event recorded afterwards lies behind them.
    pub(crate) fn group(
        &self,
        deadline: Instant,
        stop: &dyn Fn() -> Option<Error>,
        calls: impl FnOnce(&Calls<'_>) -> Result<()>,
    ) -> Result<()> {
        {
            let _inside = self.enter()?;
            // SAFETY: a group belongs to the calling thread; it is always ended below.
            let started = unsafe { (self.nccl.api().group_start)() };
            self.nccl.check("ncclGroupStart", started)?;
            let made = calls(&Calls(self));
            // SAFETY: ends the group begun above.
            let ended = self
                .nccl
                .check("ncclGroupEnd", unsafe { (self.nccl.api().group_end)() });
            made.and(ended)?;
        }
        self.settle(deadline, stop)
    }

    /// A sum whose inputs are multiplied by `factor` first; freed by [`drop_op`](Self::drop_op).
    pub(crate) fn premul_sum(&self, factor: f64, d: DType) -> Result<RedOp> {
        let _inside = self.enter()?;
        // As large as any element, whatever NCCL reads; the bits come first on every machine that has a GPU.
        let mut bytes = factor_bits(factor, d)?.to_le_bytes();
        let mut op = 0;
        let element = native(d).unwrap_or(dtype::FLOAT32);
        // SAFETY: the gate keeps the communicator; the scalar is read before the call returns; writes one handle.
        let result = unsafe {
            (self.nccl.api().red_op_create_pre_mul_sum)(
                &raw mut op,
                bytes.as_mut_ptr().cast(),
                element,
                nccl_sys::SCALAR_HOST_IMMEDIATE,
                self.handle,
            )
        };
        self.nccl.check("ncclRedOpCreatePreMulSum", result)?;
        Ok(op)
    }

    /// Frees it; operations that were enqueued with it keep what they need.
    pub(crate) fn drop_op(&self, op: RedOp) {
        if let Ok(_inside) = self.enter() {
            // SAFETY: the gate keeps the communicator; made by `premul_sum` and freed once.
            let result = unsafe { (self.nccl.api().red_op_destroy)(op, self.handle) };
            if let Err(error) = self.nccl.check("ncclRedOpDestroy", result) {
                // Costs the library a few bytes until the communicator goes.
                tracing::debug!(%error, "an operation was not freed");
            }
        }
    }

    /// Waits a little until no call is inside any more. False if one still is.
    fn is_left(&self, within: Duration) -> bool {
        let until = deadline_in(within);
        loop {
            if self.gate().is_some() {
                return true;
            }
            if time_left(until).is_zero() {
                return false;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Ends everything that runs and frees the communicator. May block for as long as the library likes: call it on a thread
    /// that can be given up. Idempotent.
    pub(crate) fn abort(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        // The library goes back to the device that it found, and makes a context on device 0 if it found none.
        let _inside = self.gpu.enter();
        if !self.is_left(COURTESY)
            && let Some(revoke) = self.nccl.api().comm_revoke
        {
            // A call is stuck inside. Revoking lets it out without freeing anything under it.
            // SAFETY: the handle is freed only below.
            let revoked = unsafe { revoke(self.handle, nccl_sys::REVOKE_DEFAULT) };
            if let Err(error) = self.nccl.check("ncclCommRevoke", revoked) {
                tracing::warn!(%error, "a communicator could not be revoked; it is aborted under its callers");
            }
            self.is_left(COURTESY);
        }
        // SAFETY: freed once (`closed`). Callers have left, or are stuck in a call, which is what abort exists for.
        let result = unsafe { (self.nccl.api().comm_abort)(self.handle) };
        match self.nccl.check("ncclCommAbort", result) {
            Ok(()) => {
                self.freed.store(true, Ordering::Release);
                self.end_child();
            }
            Err(error) => tracing::warn!(%error, "a communicator could not be aborted"),
        }
    }

    /// Flushes and frees an idle communicator; aborts it if that takes longer than `limit`. Call it on a thread of its own.
    pub(crate) fn retire(&self, limit: Duration) {
        let until = deadline_in(limit);
        let free = match self.is_left(limit) {
            true => self.enter(),
            false => Err(Error::timeout("a call of NCCL does not return")),
        };
        let flushed = free.and_then(|_inside| {
            // SAFETY: the gate keeps the communicator.
            self.nccl.check("ncclCommFinalize", unsafe {
                (self.nccl.api().comm_finalize)(self.handle)
            })
        });
        let flushed = flushed.and_then(|()| self.settle(until, &|| None));
        if flushed.is_err() {
            return self.abort();
        }
        if !self.closed.swap(true, Ordering::AcqRel) && self.is_left(COURTESY) {
            // SAFETY: freed once (`closed`), no call is inside.
            let result = unsafe { (self.nccl.api().comm_destroy)(self.handle) };
            match self.nccl.check("ncclCommDestroy", result) {
                Ok(()) => self.freed.store(true, Ordering::Release),
                Err(error) => tracing::warn!(%error, "a communicator was not freed"),
            }
        }
    }

    /// Ends it on a thread of its own, because that may take as long as the library likes.
    pub(crate) fn give_up(self) {
        give_up(Arc::new(self));
    }
}

/// As [`Comm::give_up`].
pub(crate) fn give_up(comm: Arc<Comm>) {
    in_background("ox-nccl-abort", move || comm.abort());
}

/// Gives way, and after a while sleeps.
fn pause(round: &mut u32) {
    *round += 1;
    if *round < 50 {
        std::hint::spin_loop();
        std::thread::yield_now();
    } else {
        std::thread::sleep(Duration::from_micros(50));
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        // Freed by abort or retire; a communicator that neither reached is left to the process (dropping must not block).
        if !*self.closed.get_mut() {
            tracing::debug!("a communicator was dropped without being freed");
        }
        if !*self.freed.get_mut() {
            // The library may still write there, also if it said that it was through and had written nothing.
            std::mem::forget(self.place.take());
            std::mem::forget(
                self.child
                    .get_mut()
                    .unwrap_or_else(PoisonError::into_inner)
                    .take(),
            );
        }
    }
}
