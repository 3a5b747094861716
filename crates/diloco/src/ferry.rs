//! Between tensors of a device and the host, one at a time: DiLoCo's arithmetic is on the host, wherever its values lie.
//!
//! One piece of host memory as large as the largest tensor (pinned, where the device has that) serves them all, so that a device holds
//! nothing but the tensors themselves. What is in host memory already is used where it is.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ftcore::{Accelerator, DType, Device, Error, ErrorKind, Result, Stream, Tensor, accelerator};

/// See the module.
pub(crate) struct Ferry {
    accelerator: Arc<dyn Accelerator>,
    device: Device,
    stream: Arc<dyn Stream>,
    host: Mutex<Tensor>,
}

impl Ferry {
    /// For f32 tensors of at most `largest` elements on `device`, in the order of `stream` (of one of its own, if there is none).
    ///
    /// Errors: `Unsupported` if this program does not know the kind of device; what the accelerator says.
    pub(crate) fn new(device: &Device, stream: Option<Arc<dyn Stream>>, largest: usize) -> Result<Self> {
        let accelerator = accelerator(&device.kind)?;
        let stream = match stream {
            Some(stream) => stream,
            None => accelerator.new_stream(device.index, false)?,
        };
        let host = if device.is_cpu() {
            Tensor::zeros(DType::F32, 0)
        } else {
            accelerator.alloc_host(device.index, DType::F32, &[largest.max(1)])?
        };
        Ok(Self {
            accelerator,
            device: device.clone(),
            stream,
            host: Mutex::new(host),
        })
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// A tensor of these values on the device.
    pub(crate) fn land(&self, values: &[f32]) -> Result<Tensor> {
        // A driver may refuse to allocate nothing.
        if self.device.is_cpu() || values.is_empty() {
            return Ok(Tensor::from_slice(values));
        }
        let mut tensor = self
            .accelerator
            .alloc(self.device.index, DType::F32, &[values.len()])?;
        self.store(&mut tensor, values)?;
        Ok(tensor)
    }

    /// Calls `f` with the elements. `f` must not use the same ferry.
    pub(crate) fn read(&self, tensor: &Tensor, f: &mut dyn FnMut(&[f32]) -> Result<()>) -> Result<()> {
        if tensor.device().is_cpu() {
            return f(tensor.as_slice()?);
        }
        let mut host = self.lock();
        self.bring(tensor, &mut host)?;
        f(part(host.as_slice()?, tensor.count())?)
    }

    /// Calls `f` with the elements for writing; an error of `f` leaves a tensor of a device as it was. `f` must not use the same ferry.
    pub(crate) fn update(
        &self,
        tensor: &mut Tensor,
        f: &mut dyn FnMut(&mut [f32]) -> Result<()>,
    ) -> Result<()> {
        if tensor.device().is_cpu() {
            return f(tensor.as_mut_slice()?);
        }
        let mut host = self.lock();
        self.bring(tensor, &mut host)?;
        let count = tensor.count();
        f(host
            .as_mut_slice()?
            .get_mut(..count)
            .ok_or_else(|| too_small(count))?)?;
        self.take(&host, tensor)
    }

    /// Writes these values, which are as many as the tensor has elements.
    pub(crate) fn store(&self, tensor: &mut Tensor, values: &[f32]) -> Result<()> {
        if tensor.count() != values.len() {
            let text = format!(
                "{} values for a tensor of {} elements",
                values.len(),
                tensor.count()
            );
            return Err(Error::invalid(text));
        }
        if tensor.device().is_cpu() {
            tensor.as_mut_slice()?.copy_from_slice(values);
            return Ok(());
        }
        let mut host = self.lock();
        host.as_mut_slice()?
            .get_mut(..values.len())
            .ok_or_else(|| too_small(values.len()))?
            .copy_from_slice(values);
        self.take(&host, tensor)
    }

    fn lock(&self) -> MutexGuard<'_, Tensor> {
        self.host.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn bring(&self, tensor: &Tensor, host: &mut Tensor) -> Result<()> {
        let bytes = host.bytes_mut().get_mut(..tensor.byte_len());
        let bytes = bytes.ok_or_else(|| too_small(tensor.count()))?;
        if bytes.is_empty() {
            return Ok(());
        }
        self.accelerator.copy_out(tensor, bytes, &*self.stream)
    }

    fn take(&self, host: &Tensor, tensor: &mut Tensor) -> Result<()> {
        let bytes = part(host.bytes(), tensor.byte_len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        self.accelerator.copy_in(bytes, tensor, &*self.stream)
    }
}

fn part<T>(all: &[T], count: usize) -> Result<&[T]> {
    all.get(..count).ok_or_else(|| too_small(count))
}

fn too_small(count: usize) -> Error {
    let text = format!("the host memory beside the device is smaller than a tensor ({count})");
    Error::new(ErrorKind::Internal, text)
}
