//! A collective without its tensors: what to do with which of them, by index (in the order of `Collective::tensors`).
//!
//! The tensors themselves go to the watcher's side (see `raw::lent`); the thread that runs the operation has this and the
//! addresses.

use ftcore::{Collective, DType, Error, ErrorKind, ReduceOp, Result, Tensor};

/// What an executor runs.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Recipe {
    /// All tensors, in place.
    AllReduce { op: ReduceOp },
    /// All tensors.
    Broadcast { root: u32 },
    /// Tensor 0.
    Reduce { op: ReduceOp, root: u32 },
    /// Tensor 0 into the others.
    AllGather,
    /// Pairs (2i, 2i + 1).
    AllGatherInto,
    /// All tensors, each rank's part of them.
    AllGatherInPlace,
    /// Tensor 0 of every rank into tensors 1… of the root.
    Gather { root: u32 },
    /// Tensors 0…n of the root into the last tensor of every rank.
    Scatter { root: u32 },
    /// Tensors 0…n into the last.
    ReduceScatter { op: ReduceOp },
    /// Pairs (2i, 2i + 1).
    ReduceScatterInto { op: ReduceOp },
    /// All tensors, into this rank's part of them.
    ReduceScatterInPlace { op: ReduceOp },
    /// The first half into the second.
    AllToAll,
    /// Tensor 0 into tensor 1; splits in elements, empty for even ones.
    AllToAllInto { sent: Vec<usize>, received: Vec<usize> },
    /// Tensor 0.
    Send { peer: u32 },
    /// Tensor 0.
    Recv { peer: u32 },
    /// Nothing to move.
    Barrier,
    /// Nothing to move; goes through the store.
    MonitoredBarrier,
}

impl Recipe {
    /// Takes a collective apart. Batches and receives from any rank never get here.
    pub(crate) fn of(op: Collective) -> Result<(Self, Option<DType>, Vec<Tensor>)> {
        let dtype = op.dtype();
        let recipe = match &op {
            Collective::AllReduce { op, .. } => Self::AllReduce { op: *op },
            Collective::Broadcast { root, .. } => Self::Broadcast { root: *root },
            Collective::Reduce { op, root, .. } => Self::Reduce { op: *op, root: *root },
            Collective::AllGather { .. } => Self::AllGather,
            Collective::AllGatherInto { .. } => Self::AllGatherInto,
            Collective::AllGatherInPlace { .. } => Self::AllGatherInPlace,
            Collective::Gather { root, .. } => Self::Gather { root: *root },
            Collective::Scatter { root, .. } => Self::Scatter { root: *root },
            Collective::ReduceScatter { op, .. } => Self::ReduceScatter { op: *op },
            Collective::ReduceScatterInto { op, .. } => Self::ReduceScatterInto { op: *op },
            Collective::ReduceScatterInPlace { op, .. } => Self::ReduceScatterInPlace { op: *op },
            Collective::AllToAll { .. } => Self::AllToAll,
            Collective::AllToAllInto {
                input_splits,
                output_splits,
                ..
            } => Self::AllToAllInto {
                sent: input_splits.clone(),
                received: output_splits.clone(),
            },
            Collective::Send { peer, .. } => Self::Send { peer: *peer },
            Collective::Recv { peer: Some(peer), .. } => Self::Recv { peer: *peer },
            Collective::Barrier => Self::Barrier,
            Collective::MonitoredBarrier { .. } => Self::MonitoredBarrier,
            other => {
                return Err(Error::new(
                    ErrorKind::Internal,
                    format!("{} has no recipe", other.kind()),
                ));
            }
        };
        Ok((recipe, dtype, op.into_tensors()))
    }

    /// The reduction, if it is one.
    pub(crate) fn reduction(&self) -> Option<ReduceOp> {
        match self {
            Self::AllReduce { op }
            | Self::Reduce { op, .. }
            | Self::ReduceScatter { op }
            | Self::ReduceScatterInto { op }
            | Self::ReduceScatterInPlace { op } => Some(*op),
            _ => None,
        }
    }
}
