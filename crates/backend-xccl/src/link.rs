//! The calls that operations are made of, over a communicator or, in a world of one, over nothing.
//!
//! A call with no bytes is not made: all ranks see the same zero, except in an uneven exchange, which makes it always.

use ftcore::{DType, Error, ErrorKind, Result};
use oneccl_sys::RedOp;

use crate::raw::comm::Comm;
use crate::xpu::comm::XpuComm;

/// Where calls go.
#[derive(Debug)]
pub(crate) enum Link {
    /// A world of one.
    Alone,
    /// oneCCL on host memory.
    Comm(Comm),
    /// oneCCL on a device; host memory goes through scratch memory there.
    Xpu(XpuComm),
}

impl Link {
    pub(crate) fn rank(&self) -> u32 {
        match self {
            Self::Alone => 0,
            Self::Comm(c) => c.rank(),
            Self::Xpu(c) => c.comm.rank(),
        }
    }

    pub(crate) fn world(&self) -> u32 {
        match self {
            Self::Alone => 1,
            Self::Comm(c) => c.world(),
            Self::Xpu(c) => c.comm.world(),
        }
    }

    /// True if parts of different lengths are exchanged in one call.
    pub(crate) fn has_all_to_all_v(&self) -> bool {
        match self {
            Self::Alone => true,
            Self::Comm(c) => c.has_all_to_all_v(),
            // Uneven exchanges on a device never come this way.
            Self::Xpu(_) => true,
        }
    }

    pub(crate) fn all_reduce(&self, data: &mut [u8], dtype: DType, op: RedOp) -> Result<()> {
        match self {
            Self::Comm(c) if !data.is_empty() => c.all_reduce(data, dtype, op),
            Self::Xpu(c) if !data.is_empty() => c.all_reduce(data, dtype, op),
            _ => Ok(()),
        }
    }

    pub(crate) fn reduce(
        &self,
        from: &[u8],
        into: &mut [u8],
        dtype: DType,
        op: RedOp,
        root: u32,
    ) -> Result<()> {
        match self {
            Self::Comm(c) if !from.is_empty() => c.reduce(from, into, dtype, op, root),
            Self::Xpu(c) if !from.is_empty() => c.reduce(from, into, dtype, op, root),
            _ => copy(from, into),
        }
    }

    pub(crate) fn broadcast(&self, data: &mut [u8], dtype: DType, root: u32) -> Result<()> {
        match self {
            Self::Comm(c) if !data.is_empty() => c.broadcast(data, dtype, root),
            Self::Xpu(c) if !data.is_empty() => c.broadcast(data, dtype, root),
            _ => Ok(()),
        }
    }

    pub(crate) fn all_gather(&self, from: &[u8], into: &mut [u8], dtype: DType) -> Result<()> {
        match self {
            Self::Comm(c) if !from.is_empty() => c.all_gather(from, into, dtype),
            Self::Xpu(c) if !from.is_empty() => c.all_gather(from, into, dtype),
            _ => copy(from, into),
        }
    }

    pub(crate) fn reduce_scatter(&self, from: &[u8], into: &mut [u8], dtype: DType, op: RedOp) -> Result<()> {
        match self {
            Self::Comm(c) if !from.is_empty() => c.reduce_scatter(from, into, dtype, op),
            Self::Xpu(c) if !from.is_empty() => c.reduce_scatter(from, into, dtype, op),
            _ => copy(from, into),
        }
    }

    pub(crate) fn all_to_all(&self, from: &[u8], into: &mut [u8], dtype: DType) -> Result<()> {
        match self {
            Self::Comm(c) if !from.is_empty() => c.all_to_all(from, into, dtype),
            Self::Xpu(c) if !from.is_empty() => c.all_to_all(from, into, dtype),
            _ => copy(from, into),
        }
    }

    pub(crate) fn all_to_all_v(
        &self,
        from: &[u8],
        sent: &[usize],
        into: &mut [u8],
        received: &[usize],
        dtype: DType,
    ) -> Result<()> {
        match self {
            Self::Comm(c) => c.all_to_all_v(from, sent, into, received, dtype),
            Self::Xpu(_) => Err(elsewhere("an uneven exchange")),
            Self::Alone => copy(from, into),
        }
    }

    pub(crate) fn send(&self, data: &[u8], dtype: DType, peer: u32) -> Result<()> {
        match self {
            Self::Comm(c) if !data.is_empty() => c.send(data, dtype, peer),
            Self::Xpu(_) => Err(elsewhere("a message")),
            _ => Ok(()),
        }
    }

    pub(crate) fn recv(&self, data: &mut [u8], dtype: DType, peer: u32) -> Result<()> {
        match self {
            Self::Comm(c) if !data.is_empty() => c.recv(data, dtype, peer),
            Self::Xpu(_) => Err(elsewhere("a message")),
            _ => Ok(()),
        }
    }
}

/// What `xpu::ops` does with device memory itself.
fn elsewhere(what: &str) -> Error {
    Error::new(
        ErrorKind::Internal,
        format!("{what} on a device goes through its own queue"),
    )
}

/// A world of one: what goes out comes in.
fn copy(from: &[u8], into: &mut [u8]) -> Result<()> {
    for (to, from) in into.iter_mut().zip(from) {
        *to = *from;
    }
    Ok(())
}
