//! What a group can do: a flat table that drives validation and the conformance suite.
//!
//! Every capability advertised must pass the suite; what is not advertised returns `Unsupported` at once.

use std::borrow::Cow;

use crate::coded::coded;
use crate::{DType, OpKind, ReduceOp};

macro_rules! bit_set {
    ($(#[$m:meta])* $name:ident($int:ty) of $item:ty, $bit:expr, $all:expr) => {
        $(#[$m])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub struct $name($int);

        impl $name {
            /// Nothing.
            pub const NONE: Self = Self(0);
            /// Exactly these.
            pub fn of(items: &[$item]) -> Self {
                items.iter().fold(Self::NONE, |s, &i| s.with(i))
            }
            /// These and `item`.
            #[must_use]
            pub fn with(self, item: $item) -> Self {
                Self(self.0 | (1 << $bit(item)))
            }
            /// These without `item`.
            #[must_use]
            pub fn without(self, item: $item) -> Self {
                Self(self.0 & !(1 << $bit(item)))
            }
            /// True if `item` is in it.
            pub fn contains(self, item: $item) -> bool {
                self.0 & (1 << $bit(item)) != 0
            }
            /// The raw bits, with stable positions.
            pub fn bits(self) -> $int {
                self.0
            }
            /// The set with these raw bits; bits that stand for nothing known here are dropped.
            pub fn from_bits_truncate(bits: $int) -> Self {
                Self(bits & Self::of(&$all).0)
            }
        }
    };
}

bit_set!(
    /// A set of operations.
    OpSet(u32) of OpKind, |k: OpKind| k.code(), OpKind::ALL
);
bit_set!(
    /// A set of element types.
    DTypeSet(u32) of DType, |d: DType| d.code(), DType::ALL
);
bit_set!(
    /// A set of features.
    FeatureSet(u32) of Feature, |f: Feature| f.code(), Feature::ALL
);

coded! {
    /// Properties beyond single operations.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    #[non_exhaustive]
    pub enum Feature {
        /// `abort` from any thread ends all pending work within 100 ms (INV-2).
        Abort = 0 => "abort",
        /// `configure` works again after a failure, in the same process (INV-2).
        Reconfigure = 1 => "reconfigure",
        /// Ranks that call different collectives get a typed error naming both sides (L15).
        MismatchDetection = 2 => "mismatch_detection",
        /// All ranks of a finished all-reduce hold bitwise equal results (INV-3).
        BitwiseEqual = 3 => "bitwise_equal",
        /// `SubmitOptions::contribute` is honoured, and averages divide by the contributors (INV-4).
        Contributors = 4 => "contributors",
        /// Point-to-point messages are matched by tag. Without it they match in the order in which they are sent, and any tag but 0 is
        /// `Unsupported`; another group can match them (`messages:gloo` in a backend specification).
        Tags = 5 => "tags",
        /// A receive may name no sender.
        RecvAny = 6 => "recv_any",
        /// Ranks may be threads of one process.
        ThreadRanks = 7 => "thread_ranks",
        /// `split` works.
        Split = 8 => "split",
        /// When [`ProcessGroup::execute`](crate::ProcessGroup::execute) returns, with success or failure, nothing touches the
        /// tensors' memory any more and all of them are given back, so that borrowed memory may be passed.
        Borrow = 9 => "borrow",
    }
}

/// The capability table of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// Operations that are served, natively or composed.
    pub ops: OpSet,
    /// Element types that can be moved.
    pub moves: DTypeSet,
    /// Element types per reduction, indexed by `ReduceOp::code`.
    pub reduces: [DTypeSet; ReduceOp::COUNT],
    /// Features.
    pub features: FeatureSet,
    /// Names of the options that are honoured: typed ones, hints as `hint:<name>`, and as `variable:<REST>` the variables
    /// `OXCCL_<BACKEND>_<REST>` that are no options and that the backend reads by itself (see [`GroupOptions::resolved`](crate::GroupOptions::resolved)).
    pub options: Vec<Cow<'static, str>>,
    /// Device kinds whose memory is served.
    pub devices: Vec<Cow<'static, str>>,
    /// What is composed rather than native, or limited: (operation, in words).
    pub notes: Vec<(Cow<'static, str>, Cow<'static, str>)>,
}

/// Names for the lists of [`Capabilities`].
pub fn names(names: &[&'static str]) -> Vec<Cow<'static, str>> {
    names.iter().map(|&n| n.into()).collect()
}

/// Notes for [`Capabilities`]: (operation, in words).
pub fn notes(notes: &[(&'static str, &'static str)]) -> Vec<(Cow<'static, str>, Cow<'static, str>)> {
    notes.iter().map(|&(op, text)| (op.into(), text.into())).collect()
}

impl Capabilities {
    /// True if `op` on `dtype` is served.
    pub fn reduces(&self, op: ReduceOp, dtype: DType) -> bool {
        self.reduces
            .get(usize::from(op.code()))
            .is_some_and(|s| s.contains(dtype))
    }

    /// True if memory on `kind` is served.
    pub fn serves(&self, kind: &crate::DeviceKind) -> bool {
        self.devices.iter().any(|d| d == kind.name())
    }

    /// True if the feature is advertised.
    pub fn has(&self, feature: Feature) -> bool {
        self.features.contains(feature)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn raw_bits_that_stand_for_nothing_are_dropped() {
        let set = FeatureSet::of(&[Feature::Abort, Feature::Borrow]);
        assert_eq!(FeatureSet::from_bits_truncate(set.bits() | 1 << 31), set);
        assert_eq!(OpSet::from_bits_truncate(u32::MAX), OpSet::of(&OpKind::ALL));
        let codes: Vec<u8> = Feature::ALL.iter().map(|f| *f as u8).collect();
        assert_eq!(codes, (0..10).collect::<Vec<u8>>());
    }
}
