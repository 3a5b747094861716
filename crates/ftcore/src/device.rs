//! Devices, streams and events, and the small table that answers for whatever device kinds are registered.
//!
//! Nothing above the backends names a vendor: a crate that brings a device kind registers an [`Accelerator`]. On the
//! CPU everything is trivially in order, which is what [`CpuStream`] says.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Instant;

use crate::{Error, ErrorKind, Result};

/// The kind of a device. Open: an out-of-tree device brings its own name.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DeviceKind {
    /// Host memory.
    Cpu,
    /// NVIDIA CUDA.
    Cuda,
    /// Intel GPUs through SYCL.
    Xpu,
    /// Intel Gaudi.
    Hpu,
    /// Any other, by its lower-case name.
    Named(Arc<str>),
}

impl DeviceKind {
    /// The lower-case name.
    pub fn name(&self) -> &str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
            Self::Xpu => "xpu",
            Self::Hpu => "hpu",
            Self::Named(n) => n,
        }
    }
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for DeviceKind {
    type Err = Error;

    /// Accepts letters, digits, '-' and '_', in any case.
    fn from_str(s: &str) -> Result<Self> {
        let name = s.trim().to_ascii_lowercase();
        Ok(match name.as_str() {
            "cpu" => Self::Cpu,
            "cuda" => Self::Cuda,
            "xpu" => Self::Xpu,
            "hpu" => Self::Hpu,
            n if !n.is_empty()
                && n.bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_') =>
            {
                Self::Named(n.into())
            }
            _ => {
                return Err(Error::invalid(format!(
                    "'{s}' is not a device kind (letters, digits, '-' and '_' only)"
                )));
            }
        })
    }
}

/// One device: its kind and its index among those of that kind.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Device {
    /// The kind.
    pub kind: DeviceKind,
    /// The index; 0 for the CPU.
    pub index: u32,
}

impl Device {
    /// Host memory.
    pub const CPU: Self = Self {
        kind: DeviceKind::Cpu,
        index: 0,
    };

    /// A device of `kind` with `index`.
    pub const fn new(kind: DeviceKind, index: u32) -> Self {
        Self { kind, index }
    }

    /// True for host memory.
    pub fn is_cpu(&self) -> bool {
        self.kind == DeviceKind::Cpu
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_cpu() {
            f.write_str("cpu")
        } else {
            write!(f, "{}:{}", self.kind, self.index)
        }
    }
}

/// A point in a stream. Once reached it stays reached.
pub trait Event: Send + Sync {
    /// True once all work recorded before it is done. Errors of that work show here.
    fn query(&self) -> Result<bool>;
    /// Blocks the host until it is reached; `Timeout` at the deadline.
    fn synchronize(&self, deadline: Instant) -> Result<()>;
}

/// A queue of work on one device, executed in order.
///
/// Events, never streams, are handed to other threads (a stream handle may mean "this thread's stream").
pub trait Stream: Send + Sync {
    /// The device it belongs to.
    fn device(&self) -> Device;
    /// Marks the present end of the queue.
    fn record(&self) -> Result<Arc<dyn Event>>;
    /// Lets later work of this stream start only after `event`; does not block the host on a device stream.
    fn wait(&self, event: &dyn Event) -> Result<()>;
    /// True if nothing is left to do.
    fn query(&self) -> Result<bool>;
    /// Blocks the host until the queue is empty; `Timeout` at the deadline.
    fn synchronize(&self, deadline: Instant) -> Result<()>;
}

/// The CPU's stream: work is done when the call returns, so there is nothing to wait for but foreign events.
#[derive(Debug, Clone, Copy, Default)]
pub struct CpuStream;

/// An event that has been reached already.
#[derive(Debug, Clone, Copy, Default)]
pub struct ReachedEvent;

impl Event for ReachedEvent {
    fn query(&self) -> Result<bool> {
        Ok(true)
    }
    fn synchronize(&self, _deadline: Instant) -> Result<()> {
        Ok(())
    }
}

impl Stream for CpuStream {
    fn device(&self) -> Device {
        Device::CPU
    }
    fn record(&self) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(ReachedEvent))
    }
    fn wait(&self, event: &dyn Event) -> Result<()> {
        // The host is the stream: an hour is beyond any collective's own deadline, which fires first.
        event.synchronize(crate::deadline_in(std::time::Duration::from_secs(3600)))
    }
    fn query(&self) -> Result<bool> {
        Ok(true)
    }
    fn synchronize(&self, _deadline: Instant) -> Result<()> {
        Ok(())
    }
}

/// What a device kind can be asked, whoever brings it.
pub trait Accelerator: Send + Sync {
    /// The kind it answers for.
    fn kind(&self) -> DeviceKind;
    /// How many devices there are now; 0 if the driver is missing.
    fn count(&self) -> u32;
    /// The calling thread's current device index.
    fn current(&self) -> Result<u32>;
    /// Makes `index` current on the calling thread.
    fn set(&self, index: u32) -> Result<()>;
    /// The calling thread's current stream on `index`.
    fn current_stream(&self, index: u32) -> Result<Arc<dyn Stream>>;
    /// Waits for all work of device `index`.
    fn synchronize(&self, index: u32, deadline: Instant) -> Result<()>;
}

struct CpuAccelerator;

impl Accelerator for CpuAccelerator {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Cpu
    }
    fn count(&self) -> u32 {
        1
    }
    fn current(&self) -> Result<u32> {
        Ok(0)
    }
    fn set(&self, index: u32) -> Result<()> {
        if index == 0 {
            Ok(())
        } else {
            Err(Error::invalid(format!(
                "there is no cpu:{index}; the CPU is cpu:0"
            )))
        }
    }
    fn current_stream(&self, _index: u32) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(CpuStream))
    }
    fn synchronize(&self, _index: u32, _deadline: Instant) -> Result<()> {
        Ok(())
    }
}

static ACCELERATORS: RwLock<BTreeMap<DeviceKind, Arc<dyn Accelerator>>> = RwLock::new(BTreeMap::new());

/// Makes a device kind known. The first registration of a kind stays; a second one is `Conflict`.
pub fn register_accelerator(accelerator: Arc<dyn Accelerator>) -> Result<()> {
    let kind = accelerator.kind();
    let mut map = ACCELERATORS.write().unwrap_or_else(PoisonError::into_inner);
    if kind == DeviceKind::Cpu || map.contains_key(&kind) {
        return Err(Error::new(
            ErrorKind::Conflict,
            format!("device kind '{kind}' is registered already"),
        ));
    }
    map.insert(kind, accelerator);
    Ok(())
}

/// The accelerator of `kind`; `Unsupported` names the kinds that are known.
pub fn accelerator(kind: &DeviceKind) -> Result<Arc<dyn Accelerator>> {
    if *kind == DeviceKind::Cpu {
        return Ok(Arc::new(CpuAccelerator));
    }
    let map = ACCELERATORS.read().unwrap_or_else(PoisonError::into_inner);
    map.get(kind).cloned().ok_or_else(|| {
        let mut known = vec!["cpu".to_string()];
        known.extend(map.keys().map(ToString::to_string));
        Error::unsupported(format!(
            "no device kind '{kind}' in this program; known: {}",
            known.join(", ")
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_kinds_parse_in_any_case_and_refuse_separators() {
        assert_eq!(" CUDA ".parse::<DeviceKind>().unwrap(), DeviceKind::Cuda);
        assert_eq!(
            "npu".parse::<DeviceKind>().unwrap(),
            DeviceKind::Named("npu".into())
        );
        assert!("cpu:0".parse::<DeviceKind>().is_err());
        assert!("".parse::<DeviceKind>().is_err());
    }

    #[test]
    fn an_unknown_device_kind_is_refused_naming_the_known_ones() {
        let e = accelerator(&DeviceKind::Named("tpu".into())).err().unwrap();
        assert_eq!(e.kind(), ErrorKind::Unsupported);
        assert!(e.to_string().contains("known: cpu"), "{e}");
    }
}
