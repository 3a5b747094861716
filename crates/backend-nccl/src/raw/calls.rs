//! The calls that enqueue work, as they stand in a group of a communicator.

use std::ffi::c_int;

use ftcore::Result;
use nccl_sys::{DataType, RedOp};

use super::Comm;
use crate::cuda::raw::{Span, StreamHandle};

/// The calls that may stand in a group.
pub(crate) struct Calls<'a>(pub(super) &'a Comm);

fn rank(r: u32) -> c_int {
    c_int::try_from(r).unwrap_or(c_int::MAX)
}

macro_rules! calls {
    ($($(#[$m:meta])* $f:ident($($a:ident: $t:ty),*) = $api:ident, $name:literal, ($($c:expr),*);)*) => {
        impl Calls<'_> {
            $(
                $(#[$m])*
                #[allow(clippy::too_many_arguments, reason = "as many as the C function")]
                pub(crate) fn $f(&self, $($a: $t,)* stream: StreamHandle) -> Result<()> {
                    let comm = self.0;
                    // SAFETY: the gate keeps the communicator over the group; the spans' owners live until the operation's
                    // event is reached (see Span), and their lengths were computed from the same counts.
                    let result = unsafe { (comm.nccl.api().$api)($($c,)* comm.handle, stream.pointer()) };
                    comm.nccl.check($name, result)
                }
            )*
        }
    };
}

calls! {
    /// `count` elements of every rank become one.
    all_reduce(from: Span, to: Span, count: usize, d: DataType, op: RedOp) = all_reduce, "ncclAllReduce",
        (from.pointer(), to.pointer(), count, d, op);
    /// As above on `root` only.
    reduce(from: Span, to: Span, count: usize, d: DataType, op: RedOp, root: u32) = reduce, "ncclReduce",
        (from.pointer(), to.pointer(), count, d, op, rank(root));
    /// The root's elements everywhere.
    broadcast(from: Span, to: Span, count: usize, d: DataType, root: u32) = broadcast, "ncclBroadcast",
        (from.pointer(), to.pointer(), count, d, rank(root));
    /// Every rank's elements everywhere.
    all_gather(from: Span, to: Span, count: usize, d: DataType) = all_gather, "ncclAllGather",
        (from.pointer(), to.pointer(), count, d);
    /// Every rank's share of the reduction.
    reduce_scatter(from: Span, to: Span, count: usize, d: DataType, op: RedOp) = reduce_scatter, "ncclReduceScatter",
        (from.pointer(), to.pointer(), count, d, op);
    /// To one rank.
    send(from: Span, count: usize, d: DataType, peer: u32) = send, "ncclSend",
        (from.pointer(), count, d, rank(peer));
    /// From one rank.
    recv(to: Span, count: usize, d: DataType, peer: u32) = recv, "ncclRecv",
        (to.pointer(), count, d, rank(peer));
}
