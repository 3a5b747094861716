//! oneCCL's calls as they are, over slices: for measurements and for the differential test, which must see the library itself
//! and not what this backend makes of it.
//!
//! Every call blocks its thread until all ranks have made it, for ever if one never does. Use [`XcclGroup`](crate::XcclGroup)
//! for anything else.

use ftcore::peers::Meeting;
use ftcore::{Configuration, DType, Device, DeviceKind, Error, Result};
use oneccl_sys::Flavour;
pub use oneccl_sys::RedOp;

use crate::comms::Comms;
use crate::link::Link;
use crate::options::Settings;
use crate::raw::comm::native;
use crate::{probe, rendezvous, xpu};

/// A communicator and nothing else. One rank per process.
#[derive(Debug)]
pub struct Plain(
    Link,
    /// Its end would tell the others, which may still be making the communicator, that this rank is gone.
    #[expect(dead_code, reason = "it stands as long as this does")]
    Meeting,
);

/// True if oneCCL has `dtype` itself.
pub fn is_native(dtype: DType) -> bool {
    native(dtype).is_some()
}

impl Plain {
    /// Meets the other ranks and makes the communicator. A world of at least two.
    pub fn join(configuration: &Configuration) -> Result<Self> {
        Self::join_on(configuration, &Device::CPU)
    }

    /// As [`join`](Self::join), for the library's calls on memory of `device`: slices go through device memory.
    pub fn join_on(configuration: &Configuration, device: &Device) -> Result<Self> {
        let (library, side) = match &device.kind {
            DeviceKind::Cpu => (probe::library(Flavour::Host)?, None),
            DeviceKind::Xpu => {
                let (library, side) = xpu::library_and_side(device.index)?;
                (library, Some(side))
            }
            other => return Err(Error::invalid(format!("oneCCL knows no {other}"))),
        };
        let terms = Settings::default().terms(library);
        let complete = move |made| Comms::complete(made, side.as_ref());
        let (comms, meeting) = rendezvous::connect(configuration, &terms, library, complete)?;
        match comms.collectives.comm() {
            None => Err(Error::invalid("a world of one has no communicator")),
            Some(_) => Ok(Self(comms.collectives, meeting)),
        }
    }

    /// `onecclAllReduce`, in place.
    pub fn all_reduce(&self, data: &mut [u8], dtype: DType, op: RedOp) -> Result<()> {
        self.0.all_reduce(data, dtype, op)
    }

    /// `onecclReduce`; `into` has the length of `from` on every rank.
    pub fn reduce(&self, from: &[u8], into: &mut [u8], dtype: DType, op: RedOp, root: u32) -> Result<()> {
        self.0.reduce(from, into, dtype, op, root)
    }

    /// `onecclReduceScatter`; `from` is world times as long as `into`.
    pub fn reduce_scatter(&self, from: &[u8], into: &mut [u8], dtype: DType, op: RedOp) -> Result<()> {
        self.0.reduce_scatter(from, into, dtype, op)
    }

    /// `onecclBroadcast`, in place.
    pub fn broadcast(&self, data: &mut [u8], dtype: DType, root: u32) -> Result<()> {
        self.0.broadcast(data, dtype, root)
    }
}
