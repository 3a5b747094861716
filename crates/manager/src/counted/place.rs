//! Where the tensors of a call lie, and how they are written there: on the host directly, on a device through its copies.

use std::sync::Arc;
use std::time::Duration;

use ftcore::{Accelerator, Device, Result, Stream, Tensor, accelerator, deadline_in};

/// How long the copies of one tensor's result may take, from when it is there: it was in time.
const COPY_LIMIT: Duration = Duration::from_secs(60);

/// See the module.
pub(super) enum Place {
    Host,
    Device {
        device: Device,
        accelerator: Arc<dyn Accelerator>,
        /// The call comes after everything in it.
        stream: Arc<dyn Stream>,
    },
}

impl Place {
    /// The place of `tensors`, whose contents are there once `stream` has come so far; without a stream they are there now.
    ///
    /// Errors: `Unsupported` for a device kind that this program does not know; what the device says.
    pub(super) fn of(tensors: &[Tensor], stream: Option<&Arc<dyn Stream>>) -> Result<Self> {
        let Some(device) = tensors.first().map(Tensor::device).filter(|d| !d.is_cpu()) else {
            return Ok(Self::Host);
        };
        let accelerator = accelerator(&device.kind)?;
        let stream = match stream.filter(|s| !s.device().is_cpu()) {
            Some(stream) => stream.clone(),
            None => accelerator.new_stream(device.index, false)?,
        };
        Ok(Self::Device {
            device: device.clone(),
            accelerator,
            stream,
        })
    }

    pub(super) fn is_device(&self) -> bool {
        matches!(self, Self::Device { .. })
    }

    /// What the inner group waits for before it reads; `given` is the caller's.
    pub(super) fn stream(&self, given: Option<&Arc<dyn Stream>>) -> Option<Arc<dyn Stream>> {
        match self {
            Self::Host => given.cloned(),
            Self::Device { stream, .. } => Some(stream.clone()),
        }
    }

    /// Fills `tensor` with zeros.
    pub(super) fn zero(&self, tensor: &mut Tensor) -> Result<()> {
        match self {
            Self::Host => tensor.bytes_mut().fill(0),
            Self::Device { .. } if tensor.byte_len() == 0 => {}
            Self::Device {
                accelerator, stream, ..
            } => accelerator.copy_in(&vec![0; tensor.byte_len()], tensor, &**stream)?,
        }
        Ok(())
    }

    /// A tensor of the host, brought here.
    pub(super) fn bring(&self, tensor: Tensor) -> Result<Tensor> {
        match self {
            Self::Host => Ok(tensor),
            Self::Device {
                device,
                accelerator,
                stream,
            } => {
                let mut there = accelerator.alloc(device.index, tensor.dtype(), &[tensor.count()])?;
                accelerator.copy_in(tensor.bytes(), &mut there, &**stream)?;
                Ok(there)
            }
        }
    }

    /// A tensor that lies here, on the host. Blocks for a device.
    pub(super) fn fetch(&self, tensor: Tensor) -> Result<Tensor> {
        match self {
            Self::Host => Ok(tensor),
            Self::Device {
                accelerator, stream, ..
            } => {
                let mut here = Tensor::zeros(tensor.dtype(), tensor.count());
                accelerator.copy_out(&tensor, here.bytes_mut(), &**stream)?;
                Ok(here)
            }
        }
    }

    /// Runs `change` over the bytes of `tensor`. Blocks for a device. Errors: what the device says; a copy may then still write into `tensor`.
    pub(super) fn rewrite(&self, tensor: &mut Tensor, change: impl FnOnce(&mut [u8])) -> Result<()> {
        match self {
            Self::Host => change(tensor.bytes_mut()),
            Self::Device { .. } if tensor.byte_len() == 0 => {}
            Self::Device {
                accelerator, stream, ..
            } => {
                let mut bytes = vec![0; tensor.byte_len()];
                accelerator.copy_out(tensor, &mut bytes, &**stream)?;
                change(&mut bytes);
                accelerator.copy_in(&bytes, tensor, &**stream)?;
                // The copy may still be on its way when the call returns; the result must not be.
                stream.synchronize(deadline_in(COPY_LIMIT))?;
            }
        }
        Ok(())
    }
}
