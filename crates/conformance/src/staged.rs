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
    Accelerator, Capabilities, Checked, Collective, Completer, Completion, Configuration, Device, Error,
    Feature, GroupInfo, ProcessGroup, Rejected, Result, Stream, SubmitOptions, Tensor, Traffic, Work,
    accelerator, deadline_in, names, work_pair,
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

    /// The same operation on device memory.
    fn on_device(&self, op: &Collective) -> Result<Collective> {
        let one = |t: &Tensor| self.device_tensor(t);
        let all = |list: &[Tensor]| list.iter().map(one).collect::<Result<Vec<_>>>();
        let pairs = |list: &[(Tensor, Tensor)]| {
            list.iter()
                .map(|(a, b)| Ok((one(a)?, one(b)?)))
                .collect::<Result<Vec<_>>>()
        };
        Ok(match op {
            Collective::AllReduce { tensors, op } => Collective::AllReduce {
                tensors: all(tensors)?,
                op: *op,
            },
            Collective::Broadcast { tensors, root } => Collective::Broadcast {
                tensors: all(tensors)?,
                root: *root,
            },
            Collective::Reduce { tensor, op, root } => Collective::Reduce {
                tensor: one(tensor)?,
                op: *op,
                root: *root,
            },
            Collective::AllGather { input, outputs } => Collective::AllGather {
                input: one(input)?,
                outputs: all(outputs)?,
            },
            Collective::AllGatherInto { pairs: list } => Collective::AllGatherInto { pairs: pairs(list)? },
            Collective::Gather { input, outputs, root } => Collective::Gather {
                input: one(input)?,
                outputs: all(outputs)?,
                root: *root,
            },
            Collective::Scatter { inputs, output, root } => Collective::Scatter {
                inputs: all(inputs)?,
                output: one(output)?,
                root: *root,
            },
            Collective::ReduceScatter { inputs, output, op } => Collective::ReduceScatter {
                inputs: all(inputs)?,
                output: one(output)?,
                op: *op,
            },
            Collective::ReduceScatterInto { pairs: list, op } => Collective::ReduceScatterInto {
                pairs: pairs(list)?,
                op: *op,
            },
            Collective::AllToAll { inputs, outputs } => Collective::AllToAll {
                inputs: all(inputs)?,
                outputs: all(outputs)?,
            },
            Collective::AllToAllInto {
                input,
                output,
                input_splits,
                output_splits,
            } => Collective::AllToAllInto {
                input: one(input)?,
                output: one(output)?,
                input_splits: input_splits.clone(),
                output_splits: output_splits.clone(),
            },
            Collective::Send { tensor, peer, tag } => Collective::Send {
                tensor: one(tensor)?,
                peer: *peer,
                tag: *tag,
            },
            Collective::Recv { tensor, peer, tag } => Collective::Recv {
                tensor: one(tensor)?,
                peer: *peer,
                tag: *tag,
            },
            Collective::Barrier => Collective::Barrier,
            Collective::MonitoredBarrier { wait_all } => Collective::MonitoredBarrier { wait_all: *wait_all },
            Collective::Batch { ops } => Collective::Batch {
                ops: ops.iter().map(|op| self.on_device(op)).collect::<Result<_>>()?,
            },
            other => {
                return Err(Error::unsupported(format!(
                    "the suite does not know how to stage {}",
                    other.kind()
                )));
            }
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

impl ProcessGroup for Staged {
    fn info(&self) -> GroupInfo {
        self.inner.info()
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn configure(&self, configuration: Configuration) -> Result<()> {
        self.inner.configure(configuration)
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

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn error(&self) -> Option<Error> {
        self.inner.error()
    }

    fn shutdown(&self, deadline: Instant) -> Result<()> {
        self.inner.shutdown(deadline)
    }

    fn traffic(&self) -> Traffic {
        self.inner.traffic()
    }
}
