//! A group on a device behind host memory, in a child whose parent cannot pass device memory: tensors in shared memory are copied to
//! the device in stream order, and results back by a thread of its own once they are there.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use ftcore::engine::spawn;
use ftcore::{
    Accelerator, Capabilities, Checked, Collective, Completer, Completion, Device, Failed, Feature,
    ProcessGroup, Rejected, Result, Stream, SubmitOptions, Work, Wrapper, accelerator, deadline_in,
    execute_by_submit, names, work_pair,
};

/// See the module.
pub(crate) struct Landed {
    inner: Box<dyn ProcessGroup>,
    capabilities: Capabilities,
    device: Device,
    accelerator: Arc<dyn Accelerator>,
    stream: Arc<dyn Stream>,
    ended: Sender<Ended>,
}

/// An operation that the group on the device has ended.
struct Ended {
    work: Work,
    host: Collective,
    rank: u32,
    completer: Completer,
}

impl Landed {
    pub(crate) fn new(inner: Box<dyn ProcessGroup>, device: &Device) -> Result<Self> {
        let accelerator = accelerator(&device.kind)?;
        let stream = accelerator.new_stream(device.index, true)?;
        let back = accelerator.new_stream(device.index, true)?;
        let capabilities = Capabilities {
            devices: names(&["cpu"]),
            features: inner.capabilities().features.without(Feature::Borrow),
            ..inner.capabilities().clone()
        };
        let (ended, incoming) = channel();
        let copier = accelerator.clone();
        spawn("ox-iland", move || bring_back(&incoming, &*copier, &*back))?;
        Ok(Self {
            inner,
            capabilities,
            device: device.clone(),
            accelerator,
            stream,
            ended,
        })
    }

    fn start(&self, host: &Collective, options: SubmitOptions) -> Result<Work> {
        let info = self.inner.info();
        let there = host.with_tensors(info.rank, &mut |tensor, role| {
            let mut there = self
                .accelerator
                .alloc(self.device.index, tensor.dtype(), tensor.shape())?;
            if role.is_read() {
                self.accelerator
                    .copy_in(tensor.bytes(), &mut there, &*self.stream)?;
            }
            Ok(there)
        })?;
        let options = SubmitOptions {
            stream: Some(self.stream.clone()),
            ..options
        };
        let checked = Checked::new(there, &info, self.inner.capabilities(), &options)?;
        Ok(self.inner.submit(checked, options)?)
    }
}

/// The thread's life: it ends with the group and its last operation.
fn bring_back(incoming: &Receiver<Ended>, accelerator: &dyn Accelerator, stream: &dyn Stream) {
    for ended in incoming {
        let Ended {
            work,
            host,
            rank,
            completer,
        } = ended;
        let roles = host.roles(rank);
        let mut tensors = host.into_tensors();
        let read = work.take().and_then(|completion| {
            for ((to, from), role) in tensors.iter_mut().zip(&completion.tensors).zip(roles) {
                if role.is_written() {
                    accelerator.copy_out(from, to.bytes_mut(), stream)?;
                }
            }
            Ok((completion.source, completion.contributors))
        });
        match read {
            Ok((source, contributors)) => completer.succeed(Completion {
                tensors,
                source,
                contributors,
            }),
            // Only copies touch the host's memory, and those have ended.
            Err(error) => completer.fail(error, tensors),
        }
    }
}

impl Wrapper for Landed {
    fn inner(&self) -> &dyn ProcessGroup {
        &*self.inner
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        let op = op.into_inner();
        let deadline = options
            .deadline
            .unwrap_or_else(|| deadline_in(std::time::Duration::from_secs(60)));
        let rank = self.inner.info().rank;
        let inner = match self.start(&op, options) {
            Ok(work) => work,
            Err(error) => return Err(Box::new(Rejected { error, op })),
        };
        let aborted = inner.clone();
        let (outer, completer) = work_pair(op.kind(), deadline, move |reason| aborted.abort(reason));
        let (sender, work) = (self.ended.clone(), inner.clone());
        inner.on_complete(move |_| {
            let _ = sender.send(Ended {
                work,
                host: op,
                rank,
                completer,
            });
        });
        Ok(outer)
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
        let Some(child) = self.inner.split(color, key, deadline)? else {
            return Ok(None);
        };
        Ok(Some(Box::new(Self::new(child, &self.device)?)))
    }
}
