//! Which operations are quantised, and which pieces of their tensors go to and come from which rank. Pure.

use ftcore::{Collective, DType, OpKind, ReduceOp};

use crate::kernels::Piece;
use crate::options::Moves;

/// What is done with the pieces.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Shape {
    /// `sources[0]` is reduced in place.
    AllReduce(ReduceOp),
    /// `sources[r]` goes to rank r; the reduction comes to `targets[0]`.
    ReduceScatter(ReduceOp),
    /// `sources[0]` goes to all; rank r's comes to `targets[r]`.
    AllGather,
    /// `sources[0]` becomes the root's.
    Broadcast(u32),
}

/// A quantised operation.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Plan {
    pub(crate) shape: Shape,
    pub(crate) sources: Vec<Vec<Piece>>,
    pub(crate) targets: Vec<Vec<Piece>>,
}

/// The types that are quantised.
pub(crate) const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// The reductions that are quantised.
pub(crate) const REDUCTIONS: [ReduceOp; 2] = [ReduceOp::Sum, ReduceOp::Avg];

/// True if `kind` reduces: such operations are quantised or refused, never forwarded.
pub(crate) fn is_reduction(kind: OpKind) -> bool {
    kind.is_reduction()
}

/// The operation's reduction.
fn reduction(op: &Collective) -> Option<ReduceOp> {
    match op {
        Collective::AllReduce { op, .. }
        | Collective::Reduce { op, .. }
        | Collective::ReduceScatter { op, .. }
        | Collective::ReduceScatterInto { op, .. } => Some(*op),
        _ => None,
    }
}

/// Why a reduction cannot be quantised; `None` if it can.
pub(crate) fn unsupported(op: &Collective) -> Option<String> {
    let reduce = reduction(op)?;
    let only =
        "a quantised group offers sums and averages of f32, f16 and bf16 in all_reduce and reduce_scatter";
    if op.kind() == OpKind::Reduce {
        return Some(format!(
            "{only}; use all_reduce, or an unquantised group for reduce"
        ));
    }
    if !REDUCTIONS.contains(&reduce) {
        return Some(format!(
            "{only}; '{reduce}' of rounded values would not be the '{reduce}' of the values"
        ));
    }
    let odd = op.dtype().filter(|d| !FLOATS.contains(d))?;
    Some(format!("{only}; {odd} would not come back exactly"))
}

/// Elements `range` of tensor `tensor`.
fn piece(tensor: usize, from: usize, count: usize) -> Piece {
    Piece {
        tensor,
        range: from..from + count,
    }
}

/// How `op` is quantised over `world` ranks; `None` if it is forwarded (or [`unsupported`]).
pub(crate) fn plan(op: &Collective, world: u32, moves: Moves) -> Option<Plan> {
    let float = op.dtype().is_some_and(|d| FLOATS.contains(&d));
    if !float || (moves == Moves::Exact && reduction(op).is_none()) || unsupported(op).is_some() {
        return None;
    }
    let world = world as usize;
    // One tensor of the list after the other, as a whole.
    let whole = |first: usize, counts: &[usize]| -> Vec<Vec<Piece>> {
        (first..)
            .zip(counts)
            .map(|(tensor, &n)| vec![piece(tensor, 0, n)])
            .collect()
    };
    let counts = |tensors: &[ftcore::Tensor]| tensors.iter().map(|t| t.count()).collect::<Vec<_>>();
    // Pairs of (small, large), of which the large one has a part for each rank: pair i is tensors 2i and 2i + 1.
    let parts = |large: usize, sizes: &[usize]| -> Vec<Vec<Piece>> {
        (0..world)
            .map(|rank| {
                let each = (0..).zip(sizes);
                each.map(|(i, &n)| piece(2 * i + large, rank * n, n)).collect()
            })
            .collect()
    };
    let small = |small: usize, sizes: &[usize]| -> Vec<Piece> {
        (0..)
            .zip(sizes)
            .map(|(i, &n)| piece(2 * i + small, 0, n))
            .collect()
    };
    let (shape, sources, targets) = match op {
        Collective::AllReduce { tensors, op } => (
            Shape::AllReduce(*op),
            vec![whole(0, &counts(tensors)).concat()],
            Vec::new(),
        ),
        Collective::Broadcast { tensors, root } => (
            Shape::Broadcast(*root),
            vec![whole(0, &counts(tensors)).concat()],
            Vec::new(),
        ),
        Collective::ReduceScatter { inputs, output, op } => (
            Shape::ReduceScatter(*op),
            whole(0, &counts(inputs)),
            whole(inputs.len(), &[output.count()]),
        ),
        Collective::ReduceScatterInto { pairs, op } => {
            let sizes: Vec<_> = pairs.iter().map(|(_, o)| o.count()).collect();
            (
                Shape::ReduceScatter(*op),
                parts(0, &sizes),
                vec![small(1, &sizes)],
            )
        }
        Collective::AllGather { input, outputs } => (
            Shape::AllGather,
            whole(0, &[input.count()]),
            whole(1, &counts(outputs)),
        ),
        Collective::AllGatherInto { pairs } => {
            let sizes: Vec<_> = pairs.iter().map(|(i, _)| i.count()).collect();
            (Shape::AllGather, vec![small(0, &sizes)], parts(1, &sizes))
        }
        _ => return None,
    };
    Some(Plan {
        shape,
        sources,
        targets,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ftcore::Tensor;

    fn f32s(n: usize) -> Tensor {
        Tensor::zeros(DType::F32, n)
    }

    #[test]
    fn pieces_follow_the_order_in_which_tensors_are_named() {
        let op = Collective::ReduceScatterInto {
            pairs: vec![(f32s(6), f32s(2)), (f32s(9), f32s(3))],
            op: ReduceOp::Sum,
        };
        let plan = plan(&op, 3, Moves::Exact).unwrap();
        assert_eq!(plan.sources[2], [piece(0, 4, 2), piece(2, 6, 3)]);
        assert_eq!(plan.targets, [[piece(1, 0, 2), piece(3, 0, 3)]]);
        let op = Collective::AllGatherInto {
            pairs: vec![(f32s(2), f32s(4)), (f32s(1), f32s(2))],
        };
        let plan = super::plan(&op, 2, Moves::Quantized).unwrap();
        assert_eq!(plan.sources, [[piece(0, 0, 2), piece(2, 0, 1)]]);
        assert_eq!(plan.targets[1], [piece(1, 2, 2), piece(3, 1, 1)]);
        assert_eq!(super::plan(&op, 2, Moves::Exact), None);
        let op = Collective::ReduceScatter {
            inputs: vec![f32s(4), f32s(0)],
            output: f32s(4),
            op: ReduceOp::Avg,
        };
        let plan = super::plan(&op, 2, Moves::Exact).unwrap();
        assert_eq!(plan.sources, [[piece(0, 0, 4)], [piece(1, 0, 0)]]);
        assert_eq!(plan.targets, [[piece(2, 0, 4)]]);
    }

    #[test]
    fn what_would_not_survive_rounding_is_unsupported_with_the_reason() {
        let all_reduce = |dtype, op| Collective::AllReduce {
            tensors: vec![Tensor::zeros(dtype, 3)],
            op,
        };
        for (op, word) in [
            (all_reduce(DType::I32, ReduceOp::Sum), "i32"),
            (all_reduce(DType::F64, ReduceOp::Avg), "f64"),
            (all_reduce(DType::F32, ReduceOp::Max), "max"),
            (all_reduce(DType::F32, ReduceOp::PremulSum(2.0)), "premul_sum"),
            (
                Collective::Reduce {
                    tensor: f32s(1),
                    op: ReduceOp::Sum,
                    root: 0,
                },
                "reduce",
            ),
        ] {
            assert_eq!(plan(&op, 2, Moves::Quantized), None);
            let reason = unsupported(&op).unwrap();
            assert!(
                reason.contains(word) && reason.contains("f32, f16 and bf16"),
                "{reason}"
            );
        }
        assert_eq!(unsupported(&all_reduce(DType::BF16, ReduceOp::Avg)), None);
        assert_eq!(unsupported(&Collective::Barrier), None);
    }
}
