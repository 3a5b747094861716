//! Parameters in tensors of any device, as a framework or a program of one's own holds them.

use std::sync::Arc;

use ftcore::{DType, Device, Error, Result, Stream, Tensor};

use crate::Parameters;
use crate::ferry::Ferry;

/// Named f32 tensors of one device. Reading and writing them brings one at a time to the host and back.
pub struct TensorParameters {
    names: Vec<String>,
    tensors: Vec<Tensor>,
    ferry: Ferry,
}

impl TensorParameters {
    /// Named tensors, in this order. Copies are made in the order of `stream`: that of the inner steps, so that what they have
    /// written is seen. Tensors in host memory need none.
    ///
    /// Errors: `InvalidArgument` for tensors of another type or of several devices, by name; `Unsupported` if this program does not know
    /// the kind of device; what the accelerator says.
    pub fn new(tensors: Vec<(String, Tensor)>, stream: Option<Arc<dyn Stream>>) -> Result<Self> {
        let device = tensors
            .first()
            .map_or(Device::CPU, |(_, tensor)| tensor.device().clone());
        for (name, tensor) in &tensors {
            if tensor.dtype() != DType::F32 {
                let text = format!("parameter '{name}' holds {}, not f32", tensor.dtype());
                return Err(Error::invalid(text));
            }
            if *tensor.device() != device {
                let text = format!(
                    "parameter '{name}' is on {}, the first one on {device}: all must be on one device",
                    tensor.device()
                );
                return Err(Error::invalid(text));
            }
        }
        let largest = tensors.iter().map(|(_, t)| t.count()).max().unwrap_or(0);
        let (names, tensors) = tensors.into_iter().unzip();
        Ok(Self {
            names,
            tensors,
            ferry: Ferry::new(&device, stream, largest)?,
        })
    }

    /// Tensor `i`, for what computes on the device.
    pub fn get(&self, i: usize) -> Option<&Tensor> {
        self.tensors.get(i)
    }

    /// Tensor `i` for writing. It must keep its size.
    pub fn get_mut(&mut self, i: usize) -> Option<&mut Tensor> {
        self.tensors.get_mut(i)
    }
}

fn missing(i: usize) -> Error {
    Error::invalid(format!("there is no parameter {i}"))
}

impl Parameters for TensorParameters {
    fn len(&self) -> usize {
        self.tensors.len()
    }
    fn name(&self, i: usize) -> &str {
        self.names.get(i).map_or("", String::as_str)
    }
    fn count(&self, i: usize) -> usize {
        self.tensors.get(i).map_or(0, Tensor::count)
    }
    fn read(&self, i: usize, f: &mut dyn FnMut(&[f32])) -> Result<()> {
        let tensor = self.tensors.get(i).ok_or_else(|| missing(i))?;
        self.ferry.read(tensor, &mut |values| {
            f(values);
            Ok(())
        })
    }
    fn write(&mut self, i: usize, f: &mut dyn FnMut(&mut [f32])) -> Result<()> {
        let tensor = self.tensors.get_mut(i).ok_or_else(|| missing(i))?;
        self.ferry.update(tensor, &mut |values| {
            f(values);
            Ok(())
        })
    }
    fn device(&self) -> Device {
        self.ferry.device().clone()
    }
}
