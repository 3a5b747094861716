//! The process group on host memory: how it is made, and what it offers.

use ftcore::{
    Capabilities, DType, DTypeSet, Feature, FeatureSet, GroupOptions, OpKind, OpSet, Result, names, notes,
};
use oneccl_sys::Flavour;

use crate::member::{Member, is_a_member};
use crate::options::{HONOURED, Settings};
use crate::{probe, rendezvous, route};

/// A group of ranks over oneCCL, on host memory. One rank per process.
///
/// Beyond the common contract of [`ProcessGroup`](ftcore::ProcessGroup):
/// - oneCCL cannot cancel anything. An operation that passes its deadline fails with `Timeout`, its memory is leaked and
///   counted, its thread given up, and no group of this process can be configured again. Neither `Abort` nor `Reconfigure`
///   is advertised; an isolated group, which kills a child process instead, has both;
/// - a failure on one rank is told to the others through the store, within about a quarter of a second;
/// - ranks that call different collectives hang until their deadlines, or worse, unless the hint `mismatch_detection` is `on`: then each of them
///   gets `Mismatch` before any is in oneCCL;
/// - `shutdown` waits up to two seconds for the other ranks to leave too, so that communicators can be destroyed.
pub struct XcclGroup(Member);

/// What groups on host memory offer.
pub(crate) fn capabilities(settings: &Settings) -> Capabilities {
    let mut features = FeatureSet::of(&[Feature::Split]);
    if settings.counted {
        features = features.with(Feature::Contributors);
    }
    if settings.detects {
        features = features.with(Feature::MismatchDetection);
    }
    Capabilities {
        ops: OpSet::of(&OpKind::ALL),
        moves: DTypeSet::of(&DType::ALL),
        reduces: route::table(),
        features,
        options: names(HONOURED),
        devices: names(&["cpu"]),
        notes: notes(&[
            ("abort", "oneCCL cannot cancel; isolated groups can"),
            ("avg", "composed: sum, then division by the contributors"),
            ("premul_sum", "composed: scaled in scratch, then sum"),
            (
                "min, max of floats",
                "composed: as ordered integers, so that NaN propagates",
            ),
            ("bool", "composed: min, max or sum of u8"),
            ("i16, u16", "moved as bytes, reduced as i32 and u32"),
            ("f8", "moved as bytes, not reduced"),
            ("band, bor, bxor", "composed: all-gather, folded on every rank"),
            (
                "contributors",
                "ranks of one host write them down beside the data, sums up to 4 KiB have them behind it; else in the \
                 same call up to 256 KiB, or a second all-reduce of one u32",
            ),
            (
                "all_reduce of several",
                "one call up to 256 KiB together, else one each",
            ),
            ("broadcast of several", "composed: one call each"),
            ("all_gather of uneven parts", "composed: one broadcast per rank"),
            (
                "gather, scatter",
                "composed: onecclAllToAllV to or from the root; before 2022.2 an even exchange of the longest part",
            ),
            ("reduce_scatter of uneven parts", "composed: one reduce per rank"),
            (
                "all_gather_in_place, reduce_scatter_in_place",
                "this rank's part goes through scratch memory",
            ),
            (
                "all_to_all",
                "lists are packed; uneven: onecclAllToAllV, before 2022.2 an even exchange of the longest part",
            ),
            ("barrier", "composed: all-reduce of one element"),
            ("monitored_barrier", "runs over the control connections"),
            (
                "send, recv",
                "a communicator of their own, a thread per peer and direction, in order: oneCCL has no tags, and any but 0 is refused",
            ),
            (
                "recv from any",
                "not offered: oneCCL receives from a named rank only",
            ),
            ("batch", "composed: the same threads side by side"),
            ("traffic", "computed, not measured"),
        ]),
    }
}

impl XcclGroup {
    /// A new, unconfigured group. `name` is for messages until `configure` gives another.
    ///
    /// Errors: `InvalidArgument` names the options that are not honoured (INV-9); `Unsupported` says why oneCCL cannot be
    /// used.
    pub fn new(name: impl Into<String>, options: GroupOptions) -> Result<Self> {
        let settings = Settings::new(options)?;
        let library = probe::library(Flavour::Host)?;
        let capabilities = capabilities(&settings);
        let member = Member::new(name.into(), library, settings, capabilities, None);
        // Last: what is read from the environment has been read.
        rendezvous::warm_up(library);
        Ok(Self(member))
    }
}

is_a_member!(XcclGroup);
