//! The operations as data: one variant each, tensors by value, and the fingerprint by which ranks compare notes.
//!
//! A new operation is one variant here, one bit in [`OpSet`](crate::OpSet) and one rule in `validate`: every wrapper
//! and the plugin ABI stay one method wide.

use std::fmt;

use crate::coded::coded;
use crate::fields::{Put, Take};
use crate::{DType, ReduceOp, Tensor};

coded! {
    /// The kind of an operation. The codes are stable.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    #[non_exhaustive]
    pub enum OpKind {
        /// See [`Collective::AllReduce`].
        AllReduce = 0 => "all_reduce",
        /// See [`Collective::Broadcast`].
        Broadcast = 1 => "broadcast",
        /// See [`Collective::Reduce`].
        Reduce = 2 => "reduce",
        /// See [`Collective::AllGather`].
        AllGather = 3 => "all_gather",
        /// See [`Collective::AllGatherInto`].
        AllGatherInto = 4 => "all_gather_into",
        /// See [`Collective::Gather`].
        Gather = 5 => "gather",
        /// See [`Collective::Scatter`].
        Scatter = 6 => "scatter",
        /// See [`Collective::ReduceScatter`].
        ReduceScatter = 7 => "reduce_scatter",
        /// See [`Collective::ReduceScatterInto`].
        ReduceScatterInto = 8 => "reduce_scatter_into",
        /// See [`Collective::AllToAll`].
        AllToAll = 9 => "all_to_all",
        /// See [`Collective::AllToAllInto`].
        AllToAllInto = 10 => "all_to_all_into",
        /// See [`Collective::Send`].
        Send = 11 => "send",
        /// See [`Collective::Recv`].
        Recv = 12 => "recv",
        /// See [`Collective::Barrier`].
        Barrier = 13 => "barrier",
        /// See [`Collective::MonitoredBarrier`].
        MonitoredBarrier = 14 => "monitored_barrier",
        /// See [`Collective::Batch`].
        Batch = 15 => "batch",
        /// See [`Collective::AllGatherInPlace`].
        AllGatherInPlace = 16 => "all_gather_in_place",
        /// See [`Collective::ReduceScatterInPlace`].
        ReduceScatterInPlace = 17 => "reduce_scatter_in_place",
    }
}

impl OpKind {
    /// The kind by which ranks recognise the operation: whether a rank's input is a part of its output is its own affair, so a
    /// rank that calls one in place and one that does not make the same collective.
    pub const fn agreed(self) -> Self {
        match self {
            Self::AllGatherInPlace => Self::AllGatherInto,
            Self::ReduceScatterInPlace => Self::ReduceScatterInto,
            other => other,
        }
    }

    /// The kind whose input and output are apart, if this is one in place.
    pub const fn apart(self) -> Option<Self> {
        match self {
            Self::AllGatherInPlace | Self::ReduceScatterInPlace => Some(self.agreed()),
            _ => None,
        }
    }

    /// True for operations that reduce.
    pub const fn is_reduction(self) -> bool {
        matches!(
            self,
            Self::AllReduce
                | Self::Reduce
                | Self::ReduceScatter
                | Self::ReduceScatterInto
                | Self::ReduceScatterInPlace
        )
    }

    /// True for send, recv and batches of them, which are ordered by (peer, direction, tag) only.
    pub const fn is_p2p(self) -> bool {
        matches!(self, Self::Send | Self::Recv | Self::Batch)
    }
}

/// One operation with its tensors. Sizes are in elements; "the same on all ranks" is checked at run time where the
/// group advertises `MismatchDetection`.
#[derive(Debug)]
#[non_exhaustive]
pub enum Collective {
    /// Every tensor becomes the reduction over all ranks, in place. Several tensors (coalesced) of one dtype count as
    /// one operation. Same counts, dtype and op on all ranks.
    AllReduce {
        /// The tensors, reduced in place.
        tensors: Vec<Tensor>,
        /// The reduction.
        op: ReduceOp,
    },
    /// Every rank's tensors become the root's.
    Broadcast {
        /// Read on the root, written elsewhere.
        tensors: Vec<Tensor>,
        /// The rank that has the data.
        root: u32,
    },
    /// The root's tensor becomes the reduction; the others get theirs back unchanged.
    Reduce {
        /// Read everywhere, written on the root.
        tensor: Tensor,
        /// The reduction.
        op: ReduceOp,
        /// The rank that gets the result.
        root: u32,
    },
    /// `outputs[r]` becomes rank r's `input`; counts may differ between ranks (`outputs[r].count()` says rank r's).
    AllGather {
        /// This rank's part.
        input: Tensor,
        /// One per rank.
        outputs: Vec<Tensor>,
    },
    /// Each `output` becomes the inputs of all ranks one after the other. Several pairs count as one operation.
    AllGatherInto {
        /// (input of n elements, output of world × n).
        pairs: Vec<(Tensor, Tensor)>,
    },
    /// Part r of each tensor, which has one of the same length for every rank, becomes rank r's: what this rank gives is its own
    /// part. Several tensors count as one operation, the same as [`AllGatherInto`](Self::AllGatherInto) on other ranks.
    AllGatherInPlace {
        /// (world × n elements each; the other ranks' parts are written).
        tensors: Vec<Tensor>,
    },
    /// On the root `outputs[r]` becomes rank r's `input`.
    Gather {
        /// This rank's part.
        input: Tensor,
        /// One per rank on the root, empty elsewhere.
        outputs: Vec<Tensor>,
        /// The rank that gets the parts.
        root: u32,
    },
    /// `output` becomes the root's `inputs[own rank]`.
    Scatter {
        /// One per rank on the root, empty elsewhere.
        inputs: Vec<Tensor>,
        /// This rank's part.
        output: Tensor,
        /// The rank that has the parts.
        root: u32,
    },
    /// `output` becomes the reduction over all ranks of their `inputs[own rank]`; counts may differ between parts.
    ReduceScatter {
        /// One per rank.
        inputs: Vec<Tensor>,
        /// This rank's part.
        output: Tensor,
        /// The reduction.
        op: ReduceOp,
    },
    /// Each `output` becomes this rank's n elements of the reduction of `input`.
    ReduceScatterInto {
        /// (input of world × n elements, output of n).
        pairs: Vec<(Tensor, Tensor)>,
        /// The reduction.
        op: ReduceOp,
    },
    /// This rank's part of each tensor, which has one of the same length for every rank, becomes the reduction of it over all ranks.
    /// What is in the other parts afterwards is undefined. Several tensors count as one operation, the same as
    /// [`ReduceScatterInto`](Self::ReduceScatterInto) on other ranks.
    ReduceScatterInPlace {
        /// (world × n elements each).
        tensors: Vec<Tensor>,
        /// The reduction.
        op: ReduceOp,
    },
    /// `outputs[r]` becomes rank r's `inputs[own rank]`; counts may differ.
    AllToAll {
        /// One per rank.
        inputs: Vec<Tensor>,
        /// One per rank.
        outputs: Vec<Tensor>,
    },
    /// As `AllToAll` on one tensor each. Splits are in elements, one per rank, and sum to the count; empty means even.
    AllToAllInto {
        /// What goes out, rank by rank.
        input: Tensor,
        /// What comes in, rank by rank.
        output: Tensor,
        /// How `input` is split.
        input_splits: Vec<usize>,
        /// How `output` is split.
        output_splits: Vec<usize>,
    },
    /// Sends to `peer`; finished when the memory may be reused.
    Send {
        /// The data.
        tensor: Tensor,
        /// The receiver.
        peer: u32,
        /// Matched with the receive's tag; 0 where the group does not advertise [`Tags`](crate::Feature::Tags).
        tag: u32,
    },
    /// Receives from `peer`, or from the first rank that sends with that tag.
    Recv {
        /// Written; dtype and count must be the sender's.
        tensor: Tensor,
        /// The sender, or `None` for any.
        peer: Option<u32>,
        /// Matched with the send's tag; 0 where the group does not advertise [`Tags`](crate::Feature::Tags).
        tag: u32,
    },
    /// Returns once every rank has entered.
    Barrier,
    /// As `Barrier`, and at the deadline rank 0 (and then every rank) is told which ranks are missing.
    MonitoredBarrier {
        /// Name all missing ranks rather than the first one found.
        wait_all: bool,
    },
    /// Sends and receives that progress together, in any order.
    Batch {
        /// Only `Send` and `Recv`.
        ops: Vec<Collective>,
    },
}

impl Collective {
    /// The kind.
    pub fn kind(&self) -> OpKind {
        match self {
            Self::AllReduce { .. } => OpKind::AllReduce,
            Self::Broadcast { .. } => OpKind::Broadcast,
            Self::Reduce { .. } => OpKind::Reduce,
            Self::AllGather { .. } => OpKind::AllGather,
            Self::AllGatherInto { .. } => OpKind::AllGatherInto,
            Self::Gather { .. } => OpKind::Gather,
            Self::Scatter { .. } => OpKind::Scatter,
            Self::ReduceScatter { .. } => OpKind::ReduceScatter,
            Self::ReduceScatterInto { .. } => OpKind::ReduceScatterInto,
            Self::AllToAll { .. } => OpKind::AllToAll,
            Self::AllToAllInto { .. } => OpKind::AllToAllInto,
            Self::Send { .. } => OpKind::Send,
            Self::Recv { .. } => OpKind::Recv,
            Self::Barrier => OpKind::Barrier,
            Self::MonitoredBarrier { .. } => OpKind::MonitoredBarrier,
            Self::Batch { .. } => OpKind::Batch,
            Self::AllGatherInPlace { .. } => OpKind::AllGatherInPlace,
            Self::ReduceScatterInPlace { .. } => OpKind::ReduceScatterInPlace,
        }
    }

    /// Shows the tensors one by one, in the order of [`tensors`](Self::tensors): without a list, for it is on the path of every call.
    fn each<'a>(&'a self, see: &mut dyn FnMut(&'a Tensor)) {
        match self {
            Self::AllReduce { tensors, .. }
            | Self::Broadcast { tensors, .. }
            | Self::AllGatherInPlace { tensors }
            | Self::ReduceScatterInPlace { tensors, .. } => tensors.iter().for_each(see),
            Self::Reduce { tensor, .. } | Self::Send { tensor, .. } | Self::Recv { tensor, .. } => {
                see(tensor)
            }
            Self::AllGather { input, outputs } | Self::Gather { input, outputs, .. } => {
                std::iter::once(input).chain(outputs).for_each(see);
            }
            Self::AllGatherInto { pairs } | Self::ReduceScatterInto { pairs, .. } => {
                pairs.iter().flat_map(|(a, b)| [a, b]).for_each(see);
            }
            Self::Scatter { inputs, output, .. } | Self::ReduceScatter { inputs, output, .. } => {
                inputs.iter().chain(std::iter::once(output)).for_each(see);
            }
            Self::AllToAll { inputs, outputs } => inputs.iter().chain(outputs).for_each(see),
            Self::AllToAllInto { input, output, .. } => [input, output].into_iter().for_each(see),
            Self::Barrier | Self::MonitoredBarrier { .. } => {}
            Self::Batch { ops } => ops.iter().for_each(|op| op.each(see)),
        }
    }

    /// The tensors in the order in which the variant names them (inputs before outputs, pairs in turn).
    pub fn tensors(&self) -> Vec<&Tensor> {
        let mut all = Vec::new();
        self.each(&mut |tensor| all.push(tensor));
        all
    }

    /// Gives the tensors back, in the order of [`tensors`](Self::tensors).
    pub fn into_tensors(self) -> Vec<Tensor> {
        match self {
            Self::AllReduce { tensors, .. }
            | Self::Broadcast { tensors, .. }
            | Self::AllGatherInPlace { tensors }
            | Self::ReduceScatterInPlace { tensors, .. } => tensors,
            Self::Reduce { tensor, .. } | Self::Send { tensor, .. } | Self::Recv { tensor, .. } => {
                vec![tensor]
            }
            Self::AllGather { input, outputs } | Self::Gather { input, outputs, .. } => {
                std::iter::once(input).chain(outputs).collect()
            }
            Self::AllGatherInto { pairs } | Self::ReduceScatterInto { pairs, .. } => {
                pairs.into_iter().flat_map(|(a, b)| [a, b]).collect()
            }
            Self::Scatter {
                mut inputs, output, ..
            }
            | Self::ReduceScatter {
                mut inputs, output, ..
            } => {
                inputs.push(output);
                inputs
            }
            Self::AllToAll { mut inputs, outputs } => {
                inputs.extend(outputs);
                inputs
            }
            Self::AllToAllInto { input, output, .. } => vec![input, output],
            Self::Barrier | Self::MonitoredBarrier { .. } => Vec::new(),
            Self::Batch { ops } => ops.into_iter().flat_map(Self::into_tensors).collect(),
        }
    }

    /// The dtype of the first tensor, if there is one.
    pub fn dtype(&self) -> Option<DType> {
        let mut first = None;
        self.each(&mut |tensor| {
            first.get_or_insert(tensor.dtype());
        });
        first
    }

    /// The total number of elements.
    pub fn count(&self) -> usize {
        let mut count = 0;
        self.each(&mut |tensor| count += tensor.count());
        count
    }

    /// What every rank must agree on. Counts that may rightly differ between ranks are left out.
    pub fn fingerprint(&self) -> Fingerprint {
        let mut fp = Fingerprint {
            kind: self.kind().agreed().code(),
            dtype: self.dtype().map_or(u8::MAX, DType::code),
            reduce: u8::MAX,
            tensors: u8::MAX,
            root: u32::MAX,
            count: 0,
            detail: 0,
        };
        let list = |fp: &mut Fingerprint, tensors: &mut dyn Iterator<Item = &Tensor>| {
            let mut n = 0usize;
            for t in tensors {
                n += 1;
                fp.count += t.count() as u64;
                fp.mix(t.count() as u64);
            }
            fp.tensors = u8::try_from(n).unwrap_or(u8::MAX - 1);
        };
        match self {
            Self::AllReduce { tensors, op } => {
                list(&mut fp, &mut tensors.iter());
                fp.reduce = op.code();
            }
            Self::Broadcast { tensors, root } => {
                list(&mut fp, &mut tensors.iter());
                fp.root = *root;
            }
            Self::Reduce { tensor, op, root } => {
                fp.count = tensor.count() as u64;
                fp.reduce = op.code();
                fp.root = *root;
            }
            Self::AllGather { outputs, .. } => list(&mut fp, &mut outputs.iter()),
            // By the longer ones, which a rank in place has as well.
            Self::AllGatherInto { pairs } => list(&mut fp, &mut pairs.iter().map(|(_, o)| o)),
            Self::AllGatherInPlace { tensors } => list(&mut fp, &mut tensors.iter()),
            Self::ReduceScatter { inputs, op, .. } => {
                list(&mut fp, &mut inputs.iter());
                fp.reduce = op.code();
            }
            Self::ReduceScatterInto { pairs, op } => {
                list(&mut fp, &mut pairs.iter().map(|(i, _)| i));
                fp.reduce = op.code();
            }
            Self::ReduceScatterInPlace { tensors, op } => {
                list(&mut fp, &mut tensors.iter());
                fp.reduce = op.code();
            }
            Self::Gather { root, .. } | Self::Scatter { root, .. } => fp.root = *root,
            Self::Send { tensor, .. } | Self::Recv { tensor, .. } => fp.count = tensor.count() as u64,
            Self::AllToAll { .. }
            | Self::AllToAllInto { .. }
            | Self::Barrier
            | Self::MonitoredBarrier { .. }
            | Self::Batch { .. } => {}
        }
        fp
    }
}

/// What ranks compare before they exchange data: 24 bytes, so that a mismatch can name both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint {
    /// `OpKind::code`.
    pub kind: u8,
    /// `DType::code`, or 255 for none.
    pub dtype: u8,
    /// `ReduceOp::code`, or 255 for none. The factor of a [`PremulSum`](ReduceOp::PremulSum) may rightly differ between ranks, and is not here.
    pub reduce: u8,
    /// The number of tensors where all ranks must have the same, else 255.
    pub tensors: u8,
    /// The root, or `u32::MAX`.
    pub root: u32,
    /// The total number of elements where all ranks must have the same, else 0.
    pub count: u64,
    /// A hash of the counts tensor by tensor.
    pub detail: u64,
}

impl Fingerprint {
    /// The length of the encoded form.
    pub const BYTES: usize = 24;

    fn mix(&mut self, value: u64) {
        // FNV-1a over 64-bit words: order matters, and 24 bytes stay 24 bytes.
        self.detail =
            (self.detail ^ value.wrapping_add(0x9E37_79B9_7F4A_7C15)).wrapping_mul(0x0000_0100_0000_01B3);
    }

    /// Little-endian bytes.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut b = [0u8; Self::BYTES];
        let mut put = Put(&mut b);
        put.bytes(&[self.kind, self.dtype, self.reduce, self.tensors]);
        put.u32(self.root);
        put.u64(self.count);
        put.u64(self.detail);
        b
    }

    /// The inverse of [`encode`](Self::encode). Any bytes decode; unknown codes show as such in `Display`.
    pub fn decode(b: &[u8; Self::BYTES]) -> Self {
        let mut take = Take(b);
        let [kind, dtype, reduce, tensors] = take.bytes();
        Self {
            kind,
            dtype,
            reduce,
            tensors,
            root: take.u32(),
            count: take.u64(),
            detail: take.u64(),
        }
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match OpKind::from_code(self.kind) {
            Some(k) => write!(f, "{k}(")?,
            None => write!(f, "operation {}(", self.kind)?,
        }
        let mut parts = Vec::new();
        if self.dtype != u8::MAX {
            parts.push(DType::from_code(self.dtype).map_or("unknown dtype".to_string(), |d| d.to_string()));
        }
        if self.count > 0 {
            parts.push(format!("{} elements", self.count));
        }
        if self.tensors != u8::MAX && self.tensors != 1 {
            parts.push(format!("{} tensors", self.tensors));
        }
        if self.reduce != u8::MAX {
            parts.push(ReduceOp::name_of(self.reduce).to_string());
        }
        if self.root != u32::MAX {
            parts.push(format!("root {}", self.root));
        }
        write!(f, "{})", parts.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fingerprints_differ_where_ranks_must_agree_and_round_trip() {
        let make = |n: usize, op| Collective::AllReduce {
            tensors: vec![Tensor::zeros(DType::F32, n)],
            op,
        };
        let a = make(4, ReduceOp::Sum).fingerprint();
        assert_eq!(a, make(4, ReduceOp::Sum).fingerprint());
        assert_ne!(a, make(5, ReduceOp::Sum).fingerprint());
        assert_ne!(a, make(4, ReduceOp::Max).fingerprint());
        // Each rank may have a factor of its own.
        let scaled = |factor| make(4, ReduceOp::PremulSum(factor)).fingerprint();
        assert_eq!(scaled(0.5), scaled(2.0));
        assert_eq!(Fingerprint::decode(&a.encode()), a);
        assert_eq!(a.to_string(), "all_reduce(f32, 4 elements, sum)");
    }

    #[test]
    fn a_rank_in_place_makes_the_same_collective_as_one_that_is_not() {
        let f = |n: usize| Tensor::zeros(DType::F32, n);
        let op = ReduceOp::Avg;
        let apart = Collective::AllGatherInto {
            pairs: vec![(f(2), f(6)), (f(1), f(3))],
        };
        let in_place = Collective::AllGatherInPlace {
            tensors: vec![f(6), f(3)],
        };
        assert_eq!(in_place.fingerprint(), apart.fingerprint());
        assert_ne!(
            Collective::AllGatherInPlace { tensors: vec![f(9)] }.fingerprint(),
            apart.fingerprint()
        );
        let apart = Collective::ReduceScatterInto {
            pairs: vec![(f(6), f(2))],
            op,
        };
        let in_place = Collective::ReduceScatterInPlace {
            tensors: vec![f(6)],
            op,
        };
        assert_eq!(in_place.fingerprint(), apart.fingerprint());
        assert_eq!(
            in_place.fingerprint().to_string(),
            "reduce_scatter_into(f32, 6 elements, avg)"
        );
        for kind in OpKind::ALL {
            assert_eq!(kind.apart().is_some(), kind.agreed() != kind, "{kind}");
            assert_eq!(kind.agreed().is_reduction(), kind.is_reduction(), "{kind}");
        }
    }

    #[test]
    fn coalesced_lists_with_equal_totals_but_other_parts_differ() {
        let make = |a: usize, b: usize| Collective::AllReduce {
            tensors: vec![Tensor::zeros(DType::F32, a), Tensor::zeros(DType::F32, b)],
            op: ReduceOp::Sum,
        };
        assert_ne!(make(1, 3).fingerprint(), make(3, 1).fingerprint());
    }
}
