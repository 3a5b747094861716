//! What a group offers, which depends on the device and the group's options.

use ftcore::{Capabilities, DType, DTypeSet, Feature, FeatureSet, OpKind, OpSet, ReduceOp, names, notes};

use crate::options::HONOURED;

const WHOLE: [DType; 6] = [
    DType::I64,
    DType::I32,
    DType::I8,
    DType::U64,
    DType::U32,
    DType::U8,
];
const FLOATS: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];
const EIGHTHS: [DType; 2] = [DType::F8E4M3, DType::F8E5M2];

/// The table for a chip that reduces 8-bit floats or not.
pub(crate) fn capabilities(fp8: bool, counts_contributors: bool, detects: bool) -> Capabilities {
    let numbers: Vec<DType> = WHOLE.into_iter().chain(FLOATS).collect();
    let with_bool: Vec<DType> = numbers.iter().copied().chain([DType::Bool]).collect();
    let and_fp8 = |list: &[DType]| {
        let eighths = if fp8 { EIGHTHS.as_slice() } else { &[] };
        DTypeSet::of(&list.iter().chain(eighths).copied().collect::<Vec<_>>())
    };
    let mut reduces = [DTypeSet::NONE; ReduceOp::COUNT];
    let table = [
        (ReduceOp::Sum, and_fp8(&with_bool)),
        (ReduceOp::Product, and_fp8(&with_bool)),
        (ReduceOp::Avg, DTypeSet::of(&numbers)),
        (ReduceOp::Min, DTypeSet::of(&with_bool)),
        (ReduceOp::Max, DTypeSet::of(&with_bool)),
        (ReduceOp::Band, DTypeSet::of(&[DType::Bool])),
        (ReduceOp::Bor, DTypeSet::of(&[DType::Bool])),
        (ReduceOp::Bxor, DTypeSet::of(&[DType::Bool])),
        (ReduceOp::PremulSum(1.0), DTypeSet::of(&FLOATS)),
    ];
    for (op, set) in table {
        if let Some(slot) = reduces.get_mut(usize::from(op.code())) {
            *slot = set;
        }
    }
    let mut features = vec![
        Feature::Abort,
        Feature::Reconfigure,
        Feature::ThreadRanks,
        Feature::Split,
    ];
    if counts_contributors {
        features.push(Feature::Contributors);
    }
    if detects {
        features.push(Feature::MismatchDetection);
    }
    Capabilities {
        ops: OpSet::of(&OpKind::ALL),
        moves: DTypeSet::of(&DType::ALL),
        reduces,
        features: FeatureSet::of(&features),
        options: names(&HONOURED),
        devices: names(&["cuda"]),
        notes: notes(&[
            (
                "all_reduce",
                "that all ranks hold equal bits is NCCL's habit, not its promise",
            ),
            (
                "all_gather, reduce_scatter",
                "lists are composed of grouped broadcasts and reductions",
            ),
            (
                "all_gather_in_place, reduce_scatter_in_place",
                "NCCL's own: the part's address says so",
            ),
            ("gather, scatter, all_to_all", "grouped sends and receives"),
            (
                "min, max",
                "floats are reduced as ordered integers, so that NaN wins (NCCL lets it lose)",
            ),
            (
                "bool",
                "reduced as bytes that are made 0 or 1 first; integers have no band, bor and bxor in NCCL",
            ),
            (
                "send, recv, batch",
                "a communicator per pair and direction; in order per peer: NCCL has no tags, and any but 0 is refused",
            ),
            (
                "recv from any",
                "not offered: NCCL receives from a named rank only",
            ),
            (
                "monitored_barrier",
                "runs over the control connections, not on the device",
            ),
            (
                "traffic",
                "computed from sizes and the ring algorithm, not measured",
            ),
        ]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_bit_floats_are_reduced_by_a_new_chip_and_moved_by_every_one() {
        let of = |chip| capabilities(chip, true, false);
        assert!(of(true).reduces(ReduceOp::Sum, DType::F8E4M3));
        assert!(!of(false).reduces(ReduceOp::Sum, DType::F8E4M3));
        assert!(of(false).moves.contains(DType::F8E5M2));
    }
}
