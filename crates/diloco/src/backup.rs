//! The copies that rounds go on from: the outer parameters and, with eager updates, where the round in flight began.
//!
//! They lie in host memory, or on the device of the parameters. The arithmetic is the same (and on the host) either way, and so is every
//! bit: what a round needs of a copy crosses one tensor at a time ([`Ferry`]).

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use ftcore::{Device, Error, Result, Tensor};
use replica::writable;

use crate::Parameters;
use crate::ferry::Ferry;

/// Where the backup copies of the parameters lie: one of all parameters, and a second with eager updates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Backup {
    /// In host memory. Nothing more is needed on a device than the parameters.
    #[default]
    Host,
    /// In the memory of the parameters' device ([`Parameters::device`]), all of it taken when the run is made. For parameters in host
    /// memory that is the same as [`Host`](Self::Host).
    Device,
}

impl fmt::Display for Backup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Host => "host",
            Self::Device => "device",
        })
    }
}

impl FromStr for Backup {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        match s {
            "host" => Ok(Self::Host),
            "device" => Ok(Self::Device),
            _ => Err(Error::invalid(format!(
                "'{s}' is no place for backup copies; there are host and device"
            ))),
        }
    }
}

/// Makes copies of parameters in one place.
pub(crate) struct Keeper {
    ferry: Arc<Ferry>,
}

impl Keeper {
    /// Errors: why the parameters' device cannot have copies.
    pub(crate) fn new(backup: Backup, params: &dyn Parameters) -> Result<Self> {
        let device = match backup {
            Backup::Host => Device::CPU,
            Backup::Device => params.device(),
        };
        let largest = (0..params.len()).map(|i| params.count(i)).max().unwrap_or(0);
        let ferry = Ferry::new(&device, None, largest).map_err(|e| refused(&device, params, e))?;
        Ok(Self {
            ferry: Arc::new(ferry),
        })
    }

    /// Copies of these parameters, in this order. Errors: there is no room for them, or a parameter could not be read.
    pub(crate) fn copy(&self, params: &dyn Parameters, members: &[usize]) -> Result<Copies> {
        let mut tensors = Vec::with_capacity(members.len());
        for &i in members {
            let mut copied = Ok(());
            params.read(i, &mut |values| {
                copied = self
                    .ferry
                    .land(values)
                    .map(|tensor| tensors.push(Arc::new(tensor)));
            })?;
            copied.map_err(|e| refused(self.ferry.device(), params, e))?;
        }
        Ok(Copies {
            tensors,
            ferry: self.ferry.clone(),
        })
    }
}

fn refused(device: &Device, params: &dyn Parameters, why: Error) -> Error {
    let count: usize = (0..params.len()).map(|i| params.count(i)).sum();
    let text = format!(
        "backup copies of the parameters ({} bytes each) cannot lie on {device}: {}. Keep them on the host (Backup::Host)",
        count * size_of::<f32>(),
        why.message()
    );
    Error::new(why.kind(), text).with_source(why)
}

/// Copies of some parameters, one tensor each ("slots"), whose number and sizes never change.
#[derive(Clone)]
pub(crate) struct Copies {
    /// Those in host memory may be shared with a state that is being read.
    tensors: Vec<Arc<Tensor>>,
    ferry: Arc<Ferry>,
}

impl Copies {
    /// A slot to share, if it is in host memory: what is written later goes to another place.
    pub(crate) fn shared(&self, slot: usize) -> Option<&Arc<Tensor>> {
        self.tensors.get(slot).filter(|t| t.device().is_cpu())
    }

    /// The number of elements of each slot.
    pub(crate) fn counts(&self) -> impl ExactSizeIterator<Item = usize> {
        self.tensors.iter().map(|t| t.count())
    }

    /// Where they lie.
    pub(crate) fn device(&self) -> &Device {
        self.ferry.device()
    }

    /// Calls `f` with the elements of a slot. `f` must use no other copies.
    pub(crate) fn read(&self, slot: usize, f: &mut dyn FnMut(&[f32]) -> Result<()>) -> Result<()> {
        let tensor = self.tensors.get(slot).ok_or_else(|| no_slot(slot))?;
        self.ferry.read(tensor, f)
    }

    /// The elements of a slot.
    pub(crate) fn get(&self, slot: usize) -> Result<Vec<f32>> {
        let mut all = Vec::new();
        self.read(slot, &mut |values| {
            all.extend_from_slice(values);
            Ok(())
        })?;
        Ok(all)
    }

    /// Calls `f` with the elements of a slot for writing. `f` must use no other copies.
    pub(crate) fn update(&mut self, slot: usize, f: &mut dyn FnMut(&mut [f32]) -> Result<()>) -> Result<()> {
        let tensor = self.tensors.get_mut(slot).ok_or_else(|| no_slot(slot))?;
        self.ferry.update(writable(tensor)?, f)
    }

    /// Puts `tensor`, of as many elements, in the place of a slot in host memory. Gives the old one back, unless a state shares it.
    pub(crate) fn replace(&mut self, slot: usize, tensor: Tensor) -> Result<Option<Tensor>> {
        let old = self.tensors.get_mut(slot).ok_or_else(|| no_slot(slot))?;
        Ok(Arc::try_unwrap(std::mem::replace(old, Arc::new(tensor))).ok())
    }

    /// Writes the elements of a slot.
    pub(crate) fn store(&mut self, slot: usize, values: &[f32]) -> Result<()> {
        let tensor = self.tensors.get_mut(slot).ok_or_else(|| no_slot(slot))?;
        self.ferry.store(writable(tensor)?, values)
    }
}

fn no_slot(slot: usize) -> Error {
    Error::new(
        ftcore::ErrorKind::Internal,
        format!("there is no copy {slot} in the fragment"),
    )
}
