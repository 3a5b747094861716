//! The process group around another one: agreement on the format, then every collective in order through the queue.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ftcore::{
    Capabilities, Checked, Collective, Completion, Configuration, DType, Error, ErrorKind, Failed, GroupInfo,
    OpKind, ProcessGroup, Rejected, Result, SubmitOptions, Traffic, Work, deadline_in, execute_by_submit,
    work_pair,
};

use crate::Codec;
use crate::queue::{Job, Shared, quantised};
use crate::reduce::Place;

/// How long one look at the store takes before abort and lost peers are looked for.
const LOOK: Duration = Duration::from_millis(50);

/// A group whose all-reduces of f32 with `Sum` and `Avg` travel in a [`Codec`]; everything else is forwarded as it is.
///
/// - All ranks hold bitwise equal results, and the ranks' values are summed in f32 in rank order (INV-3).
/// - Averages divide by the contributors counted in the same exchange (INV-4).
/// - `configure` compares the format with every other rank's through the store: `Mismatch` names both (L12).
/// - A world of one exchanges nothing, so nothing is quantised.
/// - The memory of quantised tensors must be on the host, and streams of devices are `Unsupported` for them.
pub struct QuantizedGroup {
    shared: Arc<Shared>,
    timeout: Duration,
}

impl QuantizedGroup {
    /// Wraps `inner`, which must not be used directly any more. `timeout` is that of calls that name no deadline.
    ///
    /// Errors: `Unsupported` if `inner` lacks what this needs (u8, all_gather, all_gather_into, all_to_all_into on cpu).
    pub fn new(inner: Arc<dyn ProcessGroup>, codec: Codec, timeout: Duration) -> Result<Self> {
        let capabilities = inner.capabilities();
        let needed = [OpKind::AllGather, OpKind::AllGatherInto, OpKind::AllToAllInto];
        let missing = needed.iter().find(|k| !capabilities.ops.contains(**k));
        let lacks = match missing {
            Some(kind) => Some(kind.name()),
            None if !capabilities.moves.contains(DType::U8) => Some("u8"),
            None if !capabilities.serves(&ftcore::DeviceKind::Cpu) => Some("cpu"),
            None => None,
        };
        if let Some(lacks) = lacks {
            let backend = inner.info().backend;
            return Err(Error::unsupported(format!(
                "quantised collectives need {lacks}, which backend '{backend}' does not offer"
            )));
        }
        let shared = Arc::new(Shared::new(inner, codec));
        let served = shared.clone();
        std::thread::Builder::new()
            .name("ox-quant".to_string())
            .spawn(move || served.serve())
            .map_err(|e| Error::io("cannot start the thread ox-quant", e))?;
        Ok(Self { shared, timeout })
    }

    /// The format.
    pub fn codec(&self) -> Codec {
        self.shared.codec
    }

    /// How many values that are not finite this rank has put into quantised reductions so far (INV-11).
    pub fn non_finite(&self) -> u64 {
        self.shared.non_finite.load(Ordering::Relaxed)
    }

    /// Compares the format with every other rank's.
    fn agree(&self, c: &Configuration) -> Result<()> {
        let key = |rank: u32| format!("{}/quant/{}/{rank}", c.prefix, c.epoch);
        let mine = self.shared.codec.to_string();
        c.store.set(&key(c.rank), mine.as_bytes(), c.deadline)?;
        for peer in (0..c.world_size).filter(|r| *r != c.rank) {
            let theirs = loop {
                if let Some(e) = self.shared.inner.error() {
                    return Err(e);
                }
                match c.store.get(&key(peer), deadline_in(LOOK).min(c.deadline)) {
                    Ok(value) => break value,
                    Err(e) if e.kind() == ErrorKind::Timeout && Instant::now() < c.deadline => {}
                    Err(e) => return Err(e.with_peer(peer)),
                }
            };
            if theirs != mine.as_bytes() {
                let theirs: String = String::from_utf8_lossy(&theirs).chars().take(64).collect();
                return Err(Error::new(
                    ErrorKind::Mismatch,
                    format!("rank {peer} quantises as {theirs}, rank {} as {mine}", c.rank),
                )
                .with_peer(peer));
            }
        }
        Ok(())
    }

    fn connect(&self, c: &Configuration) -> Result<()> {
        if !self.shared.idle() {
            self.shared
                .abort(&format!("configured again at epoch {}", c.epoch));
        }
        self.shared.wait_idle(c.deadline)?;
        self.shared.interrupt.store(false, Ordering::Release);
        self.shared.inner.configure(c.clone())?;
        self.agree(c)
            .inspect_err(|e| self.shared.inner.abort(&e.to_string()))
    }
}

#[deny(clippy::missing_trait_methods)]
impl ProcessGroup for QuantizedGroup {
    fn info(&self) -> GroupInfo {
        let mut info = self.shared.inner.info();
        if self.shared.lock().place.is_none() {
            (info.rank, info.world_size) = (0, 0);
        }
        info
    }

    fn capabilities(&self) -> &Capabilities {
        self.shared.inner.capabilities()
    }

    fn configure(&self, configuration: Configuration) -> Result<()> {
        let named = |e: Error| {
            e.with_op("configure")
                .with_rank(configuration.rank)
                .with_epoch(configuration.epoch.0)
        };
        {
            let mut state = self.shared.lock();
            if state.configuring {
                let text = "another thread is configuring this group right now";
                return Err(named(Error::new(ErrorKind::InvalidState, text)));
            }
            state.configuring = true;
            state.place = None;
            state.failure = None;
            state.closing = false;
        }
        let connected = self.connect(&configuration).map_err(named);
        let mut state = self.shared.lock();
        state.configuring = false;
        state.failure = connected.clone().err();
        if connected.is_ok() {
            state.place = Some(Place {
                rank: configuration.rank,
                world: configuration.world_size,
            });
        }
        connected
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        let kind = op.get().kind();
        let refuse = |error: Error, op: Collective| {
            let error = error.with_op(kind.name());
            Err(Box::new(Rejected { error, op }))
        };
        let first = self.shared.error();
        let mut state = self.shared.lock();
        let Some(place) = state.place else {
            let text = match &state.failure {
                Some(e) => format!("the group is not configured; the last attempt failed: {e}"),
                None => "the group is not configured".to_string(),
            };
            return refuse(Error::new(ErrorKind::InvalidState, text), op.into_inner());
        };
        if let Some(first) = first {
            let text = format!("the group failed earlier and was not configured again: {first}");
            let error = Error::new(ErrorKind::Poisoned, text).with_source(first);
            return refuse(error, op.into_inner());
        }
        if state.closing {
            let error = Error::new(ErrorKind::InvalidState, "the group is shut down");
            return refuse(error, op.into_inner());
        }
        if kind.is_p2p() || place.world == 1 {
            drop(state);
            return self.shared.inner.submit(op, options);
        }
        if quantised(op.get()).is_some() {
            if op.get().tensors().iter().any(|t| !t.device().is_cpu()) {
                let error = Error::unsupported("only values in host memory can be quantised");
                return refuse(error, op.into_inner());
            }
            if let Some(stream) = options.stream.as_ref().filter(|s| !s.device().is_cpu()) {
                let text = format!(
                    "quantising cannot order itself after a stream on {}",
                    stream.device()
                );
                return refuse(Error::unsupported(text), op.into_inner());
            }
        }
        let deadline = options.deadline.unwrap_or_else(|| deadline_in(self.timeout));
        let weak = Arc::downgrade(&self.shared);
        let (work, completer) = work_pair(kind, deadline, move |reason| {
            if let Some(shared) = weak.upgrade() {
                shared.abort(reason);
            }
        });
        state.jobs.push_back(Job {
            op,
            options,
            deadline,
            completer,
        });
        drop(state);
        self.shared.wake();
        Ok(work)
    }

    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        execute_by_submit(self, op, options)
    }

    fn split(
        &self,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    ) -> Result<Option<Box<dyn ProcessGroup>>> {
        // Behind everything queued, as on the other ranks.
        self.shared.wait_idle(deadline)?;
        let Some(child) = self.shared.inner.split(color, key, deadline)? else {
            return Ok(None);
        };
        let child = Self::new(Arc::from(child), self.shared.codec, self.timeout)?;
        let info = child.shared.inner.info();
        child.shared.lock().place = Some(Place {
            rank: info.rank,
            world: info.world_size,
        });
        Ok(Some(Box::new(child)))
    }

    fn abort(&self, reason: &str) {
        self.shared.abort(reason);
    }

    fn error(&self) -> Option<Error> {
        self.shared.error()
    }

    fn shutdown(&self, deadline: Instant) -> Result<()> {
        self.shared.lock().closing = true;
        let drained = self.shared.wait_idle(deadline);
        if drained.is_err() {
            self.shared
                .abort("pending work did not end before the group was shut down");
        }
        let inner = self.shared.inner.shutdown(deadline);
        drained.map_err(|e| e.with_op("shutdown")).and(inner)
    }

    fn traffic(&self) -> Traffic {
        self.shared.inner.traffic()
    }
}

impl Drop for QuantizedGroup {
    fn drop(&mut self) {
        self.shared.end();
    }
}
