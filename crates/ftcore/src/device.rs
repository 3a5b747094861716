//! Devices, streams and events, and the small table that answers for whatever device kinds are registered.
//!
//! Nothing above the backends names a vendor: a crate that brings a device kind registers an [`Accelerator`]. On the
//! CPU everything is trivially in order, which is what [`CpuStream`] says.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Once, PoisonError, RwLock};
use std::time::Instant;

use crate::{DType, Error, ErrorKind, Result, Tensor, copy_bytes};

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
    /// Itself, so that a stream can recognise the events of its own device kind.
    fn as_any(&self) -> &dyn Any;
}

/// A queue of work on one device, executed in order.
///
/// Events, never streams, are handed to other threads (a stream handle may mean "this thread's stream").
pub trait Stream: Send + Sync {
    /// The device it belongs to.
    fn device(&self) -> Device;
    /// Marks the present end of the queue.
    fn record(&self) -> Result<Arc<dyn Event>>;
    /// Lets later work of this stream start only after `event`; does not block the host on a device stream, unless the
    /// event is of another device kind.
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
    fn as_any(&self) -> &dyn Any {
        self
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

/// What a device kind can be asked, whichever crate brings it.
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
    /// What device `index` is called.
    fn name(&self, index: u32) -> Result<String>;
    /// A new stream on device `index`.
    fn new_stream(&self, index: u32, high_priority: bool) -> Result<Arc<dyn Stream>>;
    /// Memory on device `index` with undefined contents. What the driver refuses is `Backend` with its code.
    fn alloc(&self, index: u32, dtype: DType, shape: &[usize]) -> Result<Tensor>;
    /// Host memory that is quick to copy to and from device `index` (pinned, where the driver has that), with undefined
    /// contents. Provided: plain host memory.
    fn alloc_host(&self, _index: u32, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        CpuAccelerator.alloc(0, dtype, shape)
    }
    /// Copies host bytes into a tensor of the device in the stream's order; returns once `from` may be reused.
    /// `InvalidArgument` if the lengths differ.
    fn copy_in(&self, from: &[u8], to: &mut Tensor, stream: &dyn Stream) -> Result<()>;
    /// Copies a tensor of the device to the host in the stream's order; returns once the bytes are there.
    /// `InvalidArgument` if the lengths differ.
    fn copy_out(&self, from: &Tensor, to: &mut [u8], stream: &dyn Stream) -> Result<()>;
    /// True if device `index` computes in FP8 by itself.
    fn native_fp8(&self, _index: u32) -> bool {
        false
    }
}

/// A device kind that is linked in. Submit one with `ftcore::inventory::submit!`.
pub struct StaticAccelerator {
    /// The kind's name.
    pub kind: &'static str,
    /// Makes it; called once, when a device kind is first asked for. It must not ask for one itself.
    pub make: fn() -> Arc<dyn Accelerator>,
}

inventory::collect!(StaticAccelerator);

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
    fn name(&self, _index: u32) -> Result<String> {
        Ok("host memory".to_string())
    }
    fn new_stream(&self, _index: u32, _high_priority: bool) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(CpuStream))
    }
    fn alloc(&self, _index: u32, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        Tensor::try_zeros(dtype, shape)
    }
    fn copy_in(&self, from: &[u8], to: &mut Tensor, _stream: &dyn Stream) -> Result<()> {
        same_length(from.len(), to.byte_len())?;
        copy_bytes(to.bytes_mut(), from);
        Ok(())
    }
    fn copy_out(&self, from: &Tensor, to: &mut [u8], _stream: &dyn Stream) -> Result<()> {
        same_length(from.byte_len(), to.len())?;
        copy_bytes(to, from.bytes());
        Ok(())
    }
}

/// For [`Accelerator::copy_in`] and [`Accelerator::copy_out`]: both sides must have the same number of bytes.
pub fn same_length(from: usize, to: usize) -> Result<()> {
    if from == to {
        Ok(())
    } else {
        Err(Error::invalid(format!("{from} bytes cannot be copied into {to}")))
    }
}

static ACCELERATORS: RwLock<BTreeMap<DeviceKind, Arc<dyn Accelerator>>> = RwLock::new(BTreeMap::new());

/// Makes a device kind known. The first registration of a kind stays; a second one is `Conflict`.
pub fn register_accelerator(accelerator: Arc<dyn Accelerator>) -> Result<()> {
    register_linked();
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

/// Makes the linked-in device kinds known, once. Sorted by name, so that the order of linking has no influence.
fn register_linked() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let mut linked: Vec<&StaticAccelerator> = inventory::iter::<StaticAccelerator>.into_iter().collect();
        linked.sort_by_key(|a| a.kind);
        for a in linked {
            let accelerator = (a.make)();
            let kind = accelerator.kind();
            let mut map = ACCELERATORS.write().unwrap_or_else(PoisonError::into_inner);
            if kind == DeviceKind::Cpu || map.contains_key(&kind) {
                tracing::warn!(
                    kind = a.kind,
                    "a linked-in device kind is known already; the first one is kept"
                );
            } else {
                map.insert(kind, accelerator);
            }
        }
    });
}

/// The accelerator of `kind`; `Unsupported` names the kinds that are known.
pub fn accelerator(kind: &DeviceKind) -> Result<Arc<dyn Accelerator>> {
    if *kind == DeviceKind::Cpu {
        return Ok(Arc::new(CpuAccelerator));
    }
    register_linked();
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
    fn host_memory_is_allocated_and_copied_like_a_device_s() {
        let cpu = accelerator(&DeviceKind::Cpu).unwrap();
        let stream = cpu.new_stream(0, false).unwrap();
        let mut t = cpu.alloc(0, DType::I16, &[2, 2]).unwrap();
        assert_eq!((t.shape(), t.byte_len()), (&[2usize, 2][..], 8));
        cpu.copy_in(&[1, 0, 2, 0, 3, 0, 4, 0], &mut t, &*stream).unwrap();
        assert_eq!(t.as_slice::<i16>().unwrap(), [1, 2, 3, 4]);
        let e = cpu.copy_out(&t, &mut [0; 7], &*stream).unwrap_err();
        assert!(e.to_string().contains("8 bytes cannot be copied into 7"), "{e}");
        assert!(cpu.alloc(0, DType::F64, &[usize::MAX, 2]).is_err());
        assert!(cpu.alloc(0, DType::F64, &[usize::MAX / 4]).is_err());
    }

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
