//! The calls that operations are made of, over slices of host memory: on a communicator or, in a world of one, on nothing. Every call is
//! done when it returns.
//!
//! A call with no bytes is not made: all ranks see the same zero. On a communicator of a device slices go through scratch memory there.

use std::sync::Arc;

use ftcore::{DType, Result};
use oneccl_sys::RedOp;

use crate::raw::comm::Comm;
use crate::raw::sycl::{Queue, Span};
use crate::xpu::comm::Side;

/// Where calls go.
pub(crate) struct Link {
    /// `None` in a world of one.
    comm: Option<Comm>,
    /// Of a communicator on a device.
    side: Option<Arc<Side>>,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let device = self.side.as_ref().map(|side| side.xpu.device());
        f.debug_struct("Link")
            .field("comm", &self.comm)
            .field("device", &device)
            .finish()
    }
}

impl Link {
    /// A world of one.
    pub(crate) const ALONE: Self = Self {
        comm: None,
        side: None,
    };

    /// Over `comm`, which is on the device of `side` if there is one.
    pub(crate) fn over(comm: Comm, side: Option<Arc<Side>>) -> Self {
        let comm = Some(comm);
        Self { comm, side }
    }

    /// The communicator.
    pub(crate) fn comm(&self) -> Option<&Comm> {
        self.comm.as_ref()
    }

    /// The communicator, to end it.
    pub(crate) fn into_comm(self) -> Option<Comm> {
        self.comm
    }

    /// Of a communicator on a device.
    pub(crate) fn side(&self) -> Option<&Arc<Side>> {
        self.side.as_ref()
    }

    pub(crate) fn rank(&self) -> u32 {
        self.comm.as_ref().map_or(0, Comm::rank)
    }

    pub(crate) fn world(&self) -> u32 {
        self.comm.as_ref().map_or(1, Comm::world)
    }

    /// Makes a call on `data` in place.
    fn in_place(
        &self,
        data: &mut [u8],
        call: impl FnOnce(&Comm, Option<&Queue>, Span) -> Result<()>,
    ) -> Result<()> {
        match (&self.comm, &self.side) {
            (Some(comm), None) if !data.is_empty() => call(comm, None, Span::writing(data)),
            (Some(comm), Some(side)) if !data.is_empty() => {
                side.in_place(data, |queue, span| call(comm, Some(queue), span))
            }
            _ => Ok(()),
        }
    }

    /// Makes a call that reads `from` and writes `into`. Alone, what goes out comes in.
    fn through(
        &self,
        from: &[u8],
        into: &mut [u8],
        call: impl FnOnce(&Comm, Option<&Queue>, Span, Span) -> Result<()>,
    ) -> Result<()> {
        match (&self.comm, &self.side) {
            (Some(comm), None) if !from.is_empty() => {
                call(comm, None, Span::reading(from), Span::writing(into))
            }
            (Some(comm), Some(side)) if !from.is_empty() => side.through(from, into, |queue, from, into| {
                call(comm, Some(queue), from, into)
            }),
            _ => {
                into.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
                Ok(())
            }
        }
    }

    pub(crate) fn all_reduce(&self, data: &mut [u8], dtype: DType, op: RedOp) -> Result<()> {
        self.in_place(data, |c, on, data| c.all_reduce(on, data, dtype, op))
    }

    pub(crate) fn reduce(
        &self,
        from: &[u8],
        into: &mut [u8],
        dtype: DType,
        op: RedOp,
        root: u32,
    ) -> Result<()> {
        self.through(from, into, |c, on, from, into| {
            c.reduce(on, from, into, dtype, op, root)
        })
    }

    pub(crate) fn broadcast(&self, data: &mut [u8], dtype: DType, root: u32) -> Result<()> {
        self.in_place(data, |c, on, data| c.broadcast(on, data, dtype, root))
    }

    pub(crate) fn all_gather(&self, from: &[u8], into: &mut [u8], dtype: DType) -> Result<()> {
        self.through(from, into, |c, on, from, into| {
            c.all_gather(on, from, into, dtype)
        })
    }

    pub(crate) fn reduce_scatter(&self, from: &[u8], into: &mut [u8], dtype: DType, op: RedOp) -> Result<()> {
        self.through(from, into, |c, on, from, into| {
            c.reduce_scatter(on, from, into, dtype, op)
        })
    }
}
