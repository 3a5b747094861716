//! A group on host memory that serves tensors of a device, through copies in the device's stream order.
//!
//! [`Staged`] is itself a `ProcessGroup`. One thread copies what an operation reads to the host, after the point that the
//! caller's stream had reached at `submit`, and hands the operation to the inner group; another copies the results back
//! and completes the work. They are two so that results never wait behind a stream that waits for something else. The
//! host side is the accelerator's own kind of host memory (pinned where it has that) and is used again.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::{
    Accelerator, Capabilities, Checked, Collective, Completer, Completion, Configuration, DType, Device,
    Error, ErrorKind, Event, Failed, Feature, GroupInfo, ProcessGroup, Rejected, Result, Role, Stream,
    SubmitOptions, Tensor, Traffic, Work, accelerator, deadline_in, execute_by_submit, work_pair,
};

/// Host memory that is kept for later operations, in bytes for each group.
const KEPT_BYTES: usize = 256 << 20;

/// A host group behind tensors of a device. See the module.
///
/// - It advertises what the inner group does, except `Borrow`, for memory on its device only.
/// - `Work::wait_on` waits on the host for the whole operation: nothing is enqueued on the device before it has ended.
/// - After a failure the tensors come back if the inner group gave its own back and no copy is under way.
pub struct Staged {
    sides: Arc<Sides>,
    capabilities: Capabilities,
    timeout: Duration,
    outgoing: Sender<Submitted>,
}

/// An operation on its way to the host.
struct Submitted {
    op: Collective,
    contribute: bool,
    /// Reached when the caller's stream has made the inputs.
    ready: Option<Arc<dyn Event>>,
    deadline: Instant,
    generation: u64,
    completer: Completer,
}

/// An operation that the inner group has ended.
struct Ended {
    work: Work,
    op: Collective,
    rank: u32,
    completer: Completer,
}

/// Host buffers that are used again.
#[derive(Default)]
struct Pool(Mutex<Kept>);

#[derive(Default)]
struct Kept {
    buffers: BTreeMap<(DType, usize), Vec<Tensor>>,
    bytes: usize,
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, accelerator: &dyn Accelerator, device: &Device, like: &Tensor) -> Result<Tensor> {
        let found = {
            let mut kept = self.lock();
            let key = (like.dtype(), like.count());
            let found = kept.buffers.get_mut(&key).and_then(Vec::pop);
            kept.bytes -= found.as_ref().map_or(0, Tensor::byte_len);
            found
        };
        match found {
            Some(tensor) => tensor.reshape(like.shape()),
            None => accelerator.alloc_host(device.index, like.dtype(), like.shape()),
        }
    }

    fn put(&self, tensor: Tensor) {
        let mut kept = self.lock();
        if kept.bytes + tensor.byte_len() <= KEPT_BYTES {
            kept.bytes += tensor.byte_len();
            let key = (tensor.dtype(), tensor.count());
            kept.buffers.entry(key).or_default().push(tensor);
        }
    }
}

/// What the group and its two threads share.
struct Sides {
    inner: Arc<dyn ProcessGroup>,
    accelerator: Arc<dyn Accelerator>,
    device: Device,
    pool: Pool,
    /// How often the group was configured. Held while an operation goes to the inner group, so that one of an earlier
    /// configuration cannot slip into a later one (INV-1).
    generation: Mutex<u64>,
    /// Operations that have not ended.
    pending: AtomicUsize,
}

impl Staged {
    /// Puts `inner`, which serves host memory, behind `device`. `timeout` is that of calls that name no deadline.
    ///
    /// Errors: `Unsupported` if the device kind is not known in this program; what the accelerator says.
    pub fn new(inner: Arc<dyn ProcessGroup>, device: &Device, timeout: Duration) -> Result<Self> {
        let accelerator = accelerator(&device.kind)?;
        let mut capabilities = inner.capabilities().clone();
        capabilities.features = capabilities.features.without(Feature::Borrow);
        capabilities.devices = vec![device.kind.name().to_string().into()];
        capabilities.notes.push((
            "staging".into(),
            format!("tensors on {} are copied to the host and back", device.kind).into(),
        ));
        let sides = Arc::new(Sides {
            inner,
            accelerator: accelerator.clone(),
            device: device.clone(),
            pool: Pool::default(),
            generation: Mutex::new(0),
            pending: AtomicUsize::new(0),
        });
        let (to_host, from_host) = (
            accelerator.new_stream(device.index, true)?,
            accelerator.new_stream(device.index, true)?,
        );
        let (outgoing, submitted) = channel();
        let (ended, incoming) = channel();
        let (reader, writer) = (sides.clone(), sides.clone());
        spawn("ox-stage-out", move || {
            reader.copy_out(&submitted, &ended, &*to_host)
        })?;
        spawn("ox-stage-in", move || writer.copy_in(&incoming, &*from_host))?;
        Ok(Self {
            sides,
            capabilities,
            timeout,
            outgoing,
        })
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
    std::thread::Builder::new()
        .name(name.to_string())
        .spawn(body)
        .map(drop)
        .map_err(|e| Error::io(format!("cannot start the thread {name}"), e))
}

impl Sides {
    fn generation(&self) -> MutexGuard<'_, u64> {
        self.generation.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, completer: Completer, error: Error, tensors: Vec<Tensor>) {
        self.pending.fetch_sub(1, Ordering::AcqRel);
        completer.fail(error, tensors);
    }

    /// Ends with the group.
    fn copy_out(&self, submitted: &Receiver<Submitted>, ended: &Sender<Ended>, stream: &dyn Stream) {
        for job in submitted {
            let rank = self.inner.info().rank;
            match self.start(&job, rank, stream) {
                Err(error) => {
                    // The other ranks wait for this one's part.
                    if *self.generation() == job.generation {
                        self.inner.abort(&error.to_string());
                    }
                    self.fail(job.completer, error, job.op.into_tensors());
                }
                Ok(work) => {
                    let (ended, inner) = (ended.clone(), work.clone());
                    work.on_complete(move |_| {
                        let _ = ended.send(Ended {
                            work: inner,
                            op: job.op,
                            rank,
                            completer: job.completer,
                        });
                    });
                }
            }
        }
    }

    fn start(&self, job: &Submitted, rank: u32, stream: &dyn Stream) -> Result<Work> {
        if let Some(ready) = &job.ready {
            // On the host: the stream of the copies would wait for ever if that point were never reached.
            ready.synchronize(job.deadline)?;
        }
        let host = job.op.with_tensors(rank, &mut |tensor, role| {
            let mut host = self.pool.take(&*self.accelerator, &self.device, tensor)?;
            if role.is_read() {
                self.accelerator.copy_out(tensor, host.bytes_mut(), stream)?;
            }
            Ok(host)
        })?;
        let options = SubmitOptions {
            stream: None,
            deadline: Some(job.deadline),
            contribute: job.contribute,
        };
        let generation = self.generation();
        if *generation != job.generation {
            return Err(Error::new(
                ErrorKind::Aborted,
                "the group was configured again before the operation began",
            ));
        }
        let checked = Checked::new(host, &self.inner.info(), self.inner.capabilities(), &options)?;
        Ok(self.inner.submit(checked, options)?)
    }

    /// Ends with the group and the last pending operation.
    fn copy_in(&self, incoming: &Receiver<Ended>, stream: &dyn Stream) {
        for ended in incoming {
            let Ended {
                work,
                op,
                rank,
                completer,
            } = ended;
            let completion = match work.take() {
                Ok(completion) => completion,
                Err(error) => {
                    let host = work.recover();
                    let is_free = host.len() == op.tensors().len();
                    host.into_iter().for_each(|t| self.pool.put(t));
                    let tensors = if is_free { op.into_tensors() } else { Vec::new() };
                    self.fail(completer, error, tensors);
                    continue;
                }
            };
            let mut roles = Vec::new();
            // Only asks for the roles: nothing is made.
            let _ = op.with_tensors(rank, &mut |_, role| {
                roles.push(role);
                Ok(Tensor::zeros(DType::U8, 0))
            });
            let mut tensors = op.into_tensors();
            let parts = tensors.iter_mut().zip(&completion.tensors).zip(roles);
            let copied = parts
                .filter(|(_, role): &(_, Role)| role.is_written())
                .try_for_each(|((to, from), _)| self.accelerator.copy_in(from.bytes(), to, stream))
                .and_then(|()| stream.synchronize(deadline_in(COPY_LIMIT)));
            completion.tensors.into_iter().for_each(|t| self.pool.put(t));
            match copied {
                Ok(()) => {
                    self.pending.fetch_sub(1, Ordering::AcqRel);
                    completer.succeed(Completion {
                        tensors,
                        source: completion.source,
                        contributors: completion.contributors,
                    });
                }
                Err(error) => {
                    // A copy may still be writing into them (INV-8).
                    for tensor in tensors {
                        tensor.leak("a copy to the device did not end");
                    }
                    self.inner.abort(&error.to_string());
                    self.fail(completer, error, Vec::new());
                }
            }
        }
    }
}

/// How long the copies of one operation's results may take.
const COPY_LIMIT: Duration = Duration::from_secs(60);

#[deny(clippy::missing_trait_methods)]
impl ProcessGroup for Staged {
    fn info(&self) -> GroupInfo {
        GroupInfo {
            device: self.sides.device.clone(),
            ..self.sides.inner.info()
        }
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn configure(&self, configuration: Configuration) -> Result<()> {
        *self.sides.generation() += 1;
        self.sides.inner.configure(configuration)
    }

    fn submit(&self, op: Checked, mut options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        let op = op.into_inner();
        let ready = match options.stream.take().map(|s| s.record()).transpose() {
            Ok(ready) => ready,
            Err(error) => return Err(Box::new(Rejected { error, op })),
        };
        if let Some(first) = self.sides.inner.error() {
            let text = format!("the group failed earlier: {first}");
            let error = Error::new(ErrorKind::Poisoned, text)
                .with_op(op.kind().name())
                .with_source(first);
            return Err(Box::new(Rejected { error, op }));
        }
        let deadline = options.deadline.unwrap_or_else(|| deadline_in(self.timeout));
        let inner = self.sides.inner.clone();
        let (work, completer) = work_pair(op.kind(), deadline, move |reason| inner.abort(reason));
        let job = Submitted {
            op,
            contribute: options.contribute,
            ready,
            deadline,
            generation: *self.sides.generation(),
            completer,
        };
        self.sides.pending.fetch_add(1, Ordering::AcqRel);
        self.outgoing.send(job).map(|()| work).map_err(|refused| {
            self.sides.pending.fetch_sub(1, Ordering::AcqRel);
            let error = Error::new(ErrorKind::Internal, "the staging thread is gone");
            Box::new(Rejected {
                error,
                op: refused.0.op,
            })
        })
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
        let Some(child) = self.sides.inner.split(color, key, deadline)? else {
            return Ok(None);
        };
        Ok(Some(Box::new(Self::new(
            Arc::from(child),
            &self.sides.device,
            self.timeout,
        )?)))
    }

    fn abort(&self, reason: &str) {
        self.sides.inner.abort(reason);
    }

    fn error(&self) -> Option<Error> {
        self.sides.inner.error()
    }

    fn shutdown(&self, deadline: Instant) -> Result<()> {
        self.sides.inner.shutdown(deadline)
    }

    fn traffic(&self) -> Traffic {
        self.sides.inner.traffic()
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // The threads hold the inner group until every operation has ended. An idle one is left to its own good-bye.
        if self.sides.pending.load(Ordering::Acquire) > 0 {
            self.sides.inner.abort("the group was dropped");
        }
    }
}
