//! What is kept of an operation: a few numbers, computed without an allocation.

use crate::{Collective, DType, Fingerprint, OpKind, Tensor};

/// An operation without its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Summary {
    /// The operation, as ranks recognise it ([`OpKind::agreed`]).
    pub kind: OpKind,
    /// What the ranks of a collective must agree on.
    pub fingerprint: Fingerprint,
    /// Elements that this rank gives.
    pub input: u64,
    /// Elements that this rank gets; of operations in place, as many as it gives.
    pub output: u64,
    /// Of a message: its peer; `u32::MAX` for any, and for a batch.
    pub peer: u32,
    /// Of a message: its tag.
    pub tag: u32,
}

fn count(tensors: &[Tensor]) -> u64 {
    tensors.iter().map(|t| t.count() as u64).sum()
}

impl Summary {
    /// Of an operation.
    pub fn of(op: &Collective) -> Self {
        let one = |t: &Tensor| t.count() as u64;
        let (mut peer, mut tag) = (u32::MAX, 0);
        let (input, output) = match op {
            Collective::AllReduce { tensors, .. }
            | Collective::Broadcast { tensors, .. }
            | Collective::AllGatherInPlace { tensors }
            | Collective::ReduceScatterInPlace { tensors, .. } => {
                let n = count(tensors);
                (n, n)
            }
            Collective::Reduce { tensor, .. } => (one(tensor), one(tensor)),
            Collective::AllGather { input, outputs } | Collective::Gather { input, outputs, .. } => {
                (one(input), count(outputs))
            }
            Collective::AllGatherInto { pairs } | Collective::ReduceScatterInto { pairs, .. } => pairs
                .iter()
                .fold((0, 0), |(i, o), (a, b)| (i + one(a), o + one(b))),
            Collective::Scatter { inputs, output, .. } | Collective::ReduceScatter { inputs, output, .. } => {
                (count(inputs), one(output))
            }
            Collective::AllToAll { inputs, outputs } => (count(inputs), count(outputs)),
            Collective::AllToAllInto { input, output, .. } => (one(input), one(output)),
            Collective::Send {
                tensor,
                peer: to,
                tag: its,
            } => {
                (peer, tag) = (*to, *its);
                (one(tensor), 0)
            }
            Collective::Recv {
                tensor,
                peer: from,
                tag: its,
            } => {
                (peer, tag) = (from.unwrap_or(u32::MAX), *its);
                (0, one(tensor))
            }
            Collective::Barrier | Collective::MonitoredBarrier { .. } => (0, 0),
            Collective::Batch { ops } => ops.iter().fold((0, 0), |(i, o), op| match op {
                Collective::Send { tensor, .. } => (i + one(tensor), o),
                Collective::Recv { tensor, .. } => (i, o + one(tensor)),
                _ => (i, o),
            }),
        };
        Self {
            kind: op.kind().agreed(),
            fingerprint: op.fingerprint(),
            input,
            output,
            peer,
            tag,
        }
    }

    /// The type of its elements.
    pub fn dtype(&self) -> Option<DType> {
        DType::from_code(self.fingerprint.dtype)
    }

    /// The larger of what this rank gives and gets, in bytes.
    pub fn bytes(&self) -> u64 {
        let size = self.dtype().map_or(0, |d| d.size() as u64);
        self.input.max(self.output).saturating_mul(size)
    }

    pub(super) fn encode(&self) -> [u64; 6] {
        let f = &self.fingerprint;
        let codes = u64::from(f.kind) | u64::from(f.dtype) << 8 | u64::from(f.reduce) << 16;
        [
            codes | u64::from(f.tensors) << 24 | u64::from(f.root) << 32,
            u64::from(self.peer) | u64::from(self.tag) << 32,
            self.input,
            self.output,
            f.count,
            f.detail,
        ]
    }

    /// The inverse of [`encode`](Self::encode); `None` for a kind that does not exist.
    pub(super) fn decode([codes, message, input, output, count, detail]: [u64; 6]) -> Option<Self> {
        let byte = |shift: u32| (codes >> shift) as u8;
        let kind = byte(0);
        Some(Self {
            kind: OpKind::from_code(kind)?,
            fingerprint: Fingerprint {
                kind,
                dtype: byte(8),
                reduce: byte(16),
                tensors: byte(24),
                root: (codes >> 32) as u32,
                count,
                detail,
            },
            input,
            output,
            peer: message as u32,
            tag: (message >> 32) as u32,
        })
    }
}
