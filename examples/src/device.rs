//! Host tensors over a group on a device: candle computes on the host here, so that what each operation reads is copied to the
//! replica's device, and what it wrote is copied back.
//!
//! It is the other way round from `ftcore::Staged`, which serves a device's tensors by a group on the host. A program whose
//! parameters live on the device needs neither.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{
    Accelerator, Capabilities, Checked, Collective, Completer, Completion, Device, DeviceKind, Error, Failed,
    Feature, GroupOptions, OpKind, ProcessGroup, ProcessGroupExt, Rejected, Result, Stream, SubmitOptions,
    Tensor, Work, Wrapper, accelerator, deadline_in, execute_by_submit, work_pair,
};

/// The device of `kind` that replica number `replica` takes: they take turns on the devices of this machine.
///
/// Errors: `Unsupported` for a kind that this program does not know; why there is no device.
pub fn of_replica(kind: &DeviceKind, replica: u32) -> Result<Device> {
    if *kind == DeviceKind::Xpu {
        return oxccl::xccl::xpu::device_for_replica(replica);
    }
    let accelerator = accelerator(kind)?;
    match replica.checked_rem(accelerator.count()) {
        Some(index) => Ok(Device::new(kind.clone(), index)),
        // The reason is the driver's to give.
        None => accelerator.name(0).map(|_| Device::new(kind.clone(), 0)),
    }
}

/// A group for a manager whose tensors are on the host, of `backend` (or the device kind's default) on `device`.
///
/// Errors: those of [`oxccl::backend::fault_tolerant_group`]; what the accelerator says.
pub fn group(
    backend: Option<&str>,
    device: &Device,
    options: &GroupOptions,
) -> Result<Arc<dyn ProcessGroup>> {
    let group = oxccl::backend::fault_tolerant_group(backend, device, options)?;
    if device.is_cpu() {
        return Ok(group);
    }
    tracing::info!(%device, "gradients are reduced on this device; the model is computed on the host");
    Ok(Arc::new(OnDevice::new(group, device, options.timeout)?))
}

/// See the module.
struct OnDevice {
    inner: Arc<dyn ProcessGroup>,
    device: Device,
    accelerator: Arc<dyn Accelerator>,
    stream: Arc<dyn Stream>,
    timeout: Duration,
    capabilities: Capabilities,
}

impl OnDevice {
    fn new(inner: Arc<dyn ProcessGroup>, device: &Device, timeout: Duration) -> Result<Self> {
        let accelerator = accelerator(&device.kind)?;
        let stream = accelerator.new_stream(device.index, false)?;
        let mut capabilities = inner.capabilities().clone();
        capabilities.features = capabilities.features.without(Feature::Borrow);
        capabilities.devices = vec![DeviceKind::Cpu.name().to_string().into()];
        Ok(Self {
            inner,
            device: device.clone(),
            accelerator,
            stream,
            timeout,
            capabilities,
        })
    }

    /// The operation over tensors of the device, with which of them it writes.
    fn there(&self, op: &Collective) -> Result<(Collective, Vec<bool>)> {
        let mut written = Vec::new();
        let there = op.with_tensors(self.inner.info().rank, &mut |host, role| {
            // The root's own bools come back as 0 or 1 too.
            written.push(role.is_written() || op.kind() == OpKind::Broadcast);
            let index = self.device.index;
            let mut there = self.accelerator.alloc(index, host.dtype(), host.shape())?;
            if role.is_read() {
                self.accelerator
                    .copy_in(host.bytes(), &mut there, &*self.stream)?;
            }
            Ok(there)
        });
        there.map(|there| (there, written))
    }
}

/// Completes the work of the host's tensors from that of the device's, which has ended.
fn back(
    accelerator: &dyn Accelerator,
    stream: &dyn Stream,
    done: Result<Completion>,
    written: &[bool],
    mut host: Vec<Tensor>,
    completer: Completer,
) {
    // Only copies touch the host's memory, and those to the device have ended.
    let done = match done {
        Ok(done) => done,
        Err(error) => return completer.fail(error, host),
    };
    let parts = host.iter_mut().zip(&done.tensors).zip(written);
    let copied = parts
        .filter(|(_, written)| **written)
        .try_for_each(|((to, from), _)| accelerator.copy_out(from, to.bytes_mut(), stream));
    match copied {
        Ok(()) => completer.succeed(Completion {
            tensors: host,
            source: done.source,
            contributors: done.contributors,
        }),
        Err(error) => {
            // The device may still be writing into them (INV-8).
            for tensor in host {
                tensor.leak("a copy from the device did not end");
            }
            completer.fail(error, Vec::new());
        }
    }
}

impl Wrapper for OnDevice {
    fn inner(&self) -> &dyn ProcessGroup {
        &*self.inner
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        let op = op.into_inner();
        let deadline = options.deadline.unwrap_or_else(|| deadline_in(self.timeout));
        let (there, written) = match self.there(&op) {
            Ok(both) => both,
            Err(error) => return Err(Box::new(Rejected { error, op })),
        };
        let inner = SubmitOptions {
            stream: Some(self.stream.clone()),
            contribute: options.contribute,
            ..SubmitOptions::by(deadline)
        };
        let done = match self.inner.run(there, inner) {
            Ok(work) => work,
            Err(rejected) => {
                let error = rejected.error;
                return Err(Box::new(Rejected { error, op }));
            }
        };
        let group = self.inner.clone();
        let (work, completer) = work_pair(op.kind(), deadline, move |reason| group.abort(reason));
        let (accelerator, stream, ended) = (self.accelerator.clone(), self.stream.clone(), done.clone());
        let host = op.into_tensors();
        done.on_complete(move |_| back(&*accelerator, &*stream, ended.take(), &written, host, completer));
        Ok(work)
    }

    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        execute_by_submit(self, op, options)
    }

    fn split(&self, _: Option<u32>, _: u32, _: Instant) -> Result<Option<Box<dyn ProcessGroup>>> {
        let text = format!("a split of host memory over a group on {}", self.device);
        Err(Error::unsupported(text))
    }
}
