//! A group on a device, seen from the host: host tensors go in, are copied to the device, and come back.
//!
//! The cases make and read host tensors only. [`Rank::unconfigured`](crate::Rank::unconfigured) puts this around a group whose device
//! is not the CPU: each tensor is allocated and filled through the device kind's [`Accelerator`], on a stream that is never
//! waited for before the operation is submitted (so every case also checks that a group orders itself after the stream it is
//! given), and read back on a thread of its own once the operation has ended.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use ftcore::{
    Accelerator, Capabilities, Checked, Collective, Completer, Completion, Device, Error, Failed, Feature,
    ProcessGroup, Rejected, Result, Stream, SubmitOptions, Tensor, Work, Wrapper, accelerator, deadline_in,
    execute_by_submit, names, work_pair,
};

/// Two groups in one: `inner` serves device memory, this one host memory.
pub(crate) struct Staged {
    inner: Box<dyn ProcessGroup>,
    capabilities: Capabilities,
    device: Device,
    accelerator: Arc<dyn Accelerator>,
    stream: Arc<dyn Stream>,
    ended: Sender<Ended>,
}

/// An operation of the inner group that has ended, and the host tensors that its results go into.
struct Ended {
    work: Work,
    host: Vec<Tensor>,
    completer: Completer,
}

/// `group` as it is if `device` is the CPU, otherwise behind host memory.
pub(crate) fn staged(group: Box<dyn ProcessGroup>, device: &Device) -> Result<Box<dyn ProcessGroup>> {
    if device.is_cpu() {
        return Ok(group);
    }
    let accelerator = accelerator(&device.kind)?;
    let stream = accelerator.new_stream(device.index, false)?;
    let capabilities = Capabilities {
        devices: names(&["cpu"]),
        features: group.capabilities().features.without(Feature::Borrow),
        ..group.capabilities().clone()
    };
    let (ended, incoming) = channel();
    let reader = Reader {
        accelerator: accelerator.clone(),
        stream: accelerator.new_stream(device.index, false)?,
        incoming,
    };
    std::thread::Builder::new()
        .name("ox-staged".to_string())
        .spawn(move || reader.run())
        .map_err(|e| Error::io("cannot start a thread", e))?;
    Ok(Box::new(Staged {
        inner: group,
        capabilities,
        device: device.clone(),
        accelerator,
        stream,
        ended,
    }))
}

/// The thread that copies results to the host. It ends with the last sender: the group and its pending operations.
struct Reader {
    accelerator: Arc<dyn Accelerator>,
    stream: Arc<dyn Stream>,
    incoming: Receiver<Ended>,
}

impl Reader {
    fn run(self) {
        for ended in &self.incoming {
            let Ended {
                work,
                mut host,
                completer,
            } = ended;
            let read = work.take().and_then(|completion| {
                for (from, to) in completion.tensors.iter().zip(host.iter_mut()) {
                    self.accelerator.copy_out(from, to.bytes_mut(), &*self.stream)?;
                }
                Ok((completion.source, completion.contributors))
            });
            match read {
                Ok((source, contributors)) => completer.succeed(Completion {
                    tensors: host,
                    source,
                    contributors,
                }),
                Err(error) => {
                    // What the inner group cannot prove to be free does not come back here either.
                    let back = if work.recover().len() == host.len() {
                        host
                    } else {
                        Vec::new()
                    };
                    completer.fail(error, back);
                }
            }
        }
    }
}

impl Staged {
    fn device_tensor(&self, host: &Tensor) -> Result<Tensor> {
        let mut tensor = self
            .accelerator
            .alloc(self.device.index, host.dtype(), host.shape())?;
        self.accelerator
            .copy_in(host.bytes(), &mut tensor, &*self.stream)?;
        Ok(tensor)
    }

    /// The same operation on device memory. Outputs are carried over too: what an operation must leave alone is compared.
    fn on_device(&self, op: &Collective) -> Result<Collective> {
        op.with_tensors(self.inner.info().rank, &mut |tensor, _| {
            self.device_tensor(tensor)
        })
    }

    fn start(&self, op: &Collective, options: SubmitOptions) -> Result<Work> {
        let options = SubmitOptions {
            stream: options.stream.or_else(|| Some(self.stream.clone())),
            ..options
        };
        let checked = Checked::new(
            self.on_device(op)?,
            &self.inner.info(),
            self.inner.capabilities(),
            &options,
        )?;
        Ok(self.inner.submit(checked, options)?)
    }
}

impl Wrapper for Staged {
    fn inner(&self) -> &dyn ProcessGroup {
        &*self.inner
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        let op = op.into_inner();
        // A failing operation reports itself in the inner work; this one only must not give up before it.
        let deadline = options
            .deadline
            .unwrap_or_else(|| deadline_in(std::time::Duration::from_secs(60)));
        let inner = match self.start(&op, options) {
            Ok(work) => work,
            Err(error) => return Err(Box::new(Rejected { error, op })),
        };
        let aborted = inner.clone();
        let (outer, completer) = work_pair(op.kind(), deadline, move |reason| aborted.abort(reason));
        let host = op.into_tensors();
        let (sender, work) = (self.ended.clone(), inner.clone());
        inner.on_complete(move |_| {
            let _ = sender.send(Ended {
                work,
                host,
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
        self.inner
            .split(color, key, deadline)?
            .map(|child| staged(child, &self.device))
            .transpose()
    }
}
