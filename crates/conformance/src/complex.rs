//! Complex numbers as pairs of reals: moved as they are, summed and averaged part by part, and reduced in no other way.

use ftcore::{
    Collective, DType, ErrorKind, OpKind, ProcessGroup, ProcessGroupExt, ReduceOp, SubmitOptions, Tensor,
};

use crate::arguments::{refused, still_works};
use crate::case::{Case, Worlds};
use crate::oracle::{self, Expected, Inputs, check_pattern, pattern, rounded_to};
use crate::{Failure, Needs, Outcome, Rank};

const REALS: [DType; 2] = [DType::F32, DType::F64];
/// What moves numbers here.
const MOVERS: [OpKind; 3] = [OpKind::Broadcast, OpKind::AllGatherInto, OpKind::AllToAllInto];
/// Numbers, of which each is two elements.
const NUMBERS: [usize; 4] = [0, 1, 17, 2050];

pub(crate) fn cases(worlds: Worlds) -> Vec<Case> {
    let mut all = Vec::new();
    for &world in worlds.or(&[1, 2, 3]) {
        let sums = [
            Needs::Op(OpKind::AllReduce),
            Needs::ReducesOneOf(ReduceOp::Sum, &REALS),
        ];
        let moves = [Needs::OneOf(&MOVERS), Needs::MovesOneOf(&REALS)];
        all.extend([
            Case::new(
                "complex::sums_and_averages_are_those_of_the_parts",
                world,
                &sums,
                sums_and_averages,
            ),
            Case::new("complex::numbers_are_moved_as_they_are", world, &moves, moved),
            Case::new(
                "complex::what_is_not_right_by_parts_is_refused",
                world,
                &[Needs::MovesOneOf(&REALS)],
                not_by_parts,
            ),
        ]);
    }
    all.into_iter().map(Case::sharing).collect()
}

fn complex(tensor: Tensor) -> Outcome<Tensor> {
    Ok(tensor.view_as_complex()?)
}

fn is_complex_still(what: &str, tensor: &Tensor, numbers: usize) -> Outcome {
    ensure!(
        tensor.is_complex() && tensor.count() == 2 * numbers,
        "{what}: {tensor:?} came back of {numbers} complex numbers"
    );
    Ok(())
}

fn sums_and_averages(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    let caps = group.capabilities();
    let contributes = vec![true; rank.world as usize];
    for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::PremulSum(0.5)] {
        for dtype in REALS.into_iter().filter(|d| caps.reduces(op, *d)) {
            for numbers in NUMBERS {
                let expected = |first| Expected {
                    kind: Inputs::Small,
                    dtype,
                    op,
                    contributes: &contributes,
                    rounded: rounded_to(caps),
                    first,
                };
                let input = |n: usize| complex(oracle::tensor(Inputs::Small, dtype, op, rank.rank, 2 * n));
                let sum = group.all_reduce(input(numbers)?, op)?.take_tensor()?;
                is_complex_still("all_reduce", &sum, numbers)?;
                expected(0).check(&sum)?;
                if caps.ops.contains(OpKind::ReduceScatterInto) {
                    let whole = input(numbers * rank.world as usize)?;
                    let own = complex(Tensor::zeros(dtype, 2 * numbers))?;
                    let own = group.reduce_scatter_into(whole, own, op)?.take_tensor()?;
                    is_complex_still("reduce_scatter_into", &own, numbers)?;
                    expected(2 * numbers * rank.rank as usize).check(&own)?;
                }
            }
        }
    }
    Ok(())
}

fn moved(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    let caps = group.capabilities();
    let world = rank.world as usize;
    for dtype in REALS.into_iter().filter(|d| caps.moves.contains(*d)) {
        for numbers in NUMBERS {
            let mine = || complex(pattern(dtype, rank.rank, 2 * numbers));
            if caps.ops.contains(OpKind::Broadcast) {
                let root = rank.world - 1;
                let result = group.broadcast(mine()?, root)?.take_tensor()?;
                is_complex_still("broadcast", &result, numbers)?;
                check_pattern("broadcast", dtype, result.bytes(), root, 0)?;
            }
            let parts = |what: &str, whole: &Tensor| -> Outcome {
                is_complex_still(what, whole, numbers * world)?;
                let part = (2 * numbers * dtype.size()).max(1);
                let mut parts = (0u32..).zip(whole.bytes().chunks(part));
                parts.try_for_each(|(r, bytes)| check_pattern(what, dtype, bytes, r, 0))
            };
            let whole = || complex(Tensor::zeros(dtype, 2 * numbers * world));
            if caps.ops.contains(OpKind::AllGatherInto) {
                let work = group.all_gather_into(mine()?, whole()?)?;
                parts("all_gather_into", &work.take_tensor()?)?;
            }
            if caps.ops.contains(OpKind::AllToAllInto) {
                let bytes = mine()?.bytes().repeat(world);
                let mut sent = whole()?;
                sent.bytes_mut().copy_from_slice(&bytes);
                let splits = vec![2 * numbers; world];
                let work = group.all_to_all_into(sent, whole()?, splits, Vec::new())?;
                parts("all_to_all_into", &work.take_tensor()?)?;
            }
        }
    }
    Ok(())
}

fn not_by_parts(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    let caps = group.capabilities().clone();
    let n = rank.world as usize;
    for dtype in REALS.into_iter().filter(|d| caps.moves.contains(*d)) {
        let zeros = |n: usize| complex(Tensor::zeros(dtype, n));
        for op in [ReduceOp::Product, ReduceOp::Min, ReduceOp::Max, ReduceOp::Bxor] {
            let reductions = [
                Collective::AllReduce {
                    tensors: vec![zeros(4)?],
                    op,
                },
                Collective::Reduce {
                    tensor: zeros(4)?,
                    op,
                    root: 0,
                },
                Collective::ReduceScatterInto {
                    pairs: vec![(zeros(4 * n)?, zeros(4)?)],
                    op,
                },
                Collective::ReduceScatterInPlace {
                    tensors: vec![zeros(4 * n)?],
                    op,
                },
            ];
            for reduction in reductions {
                let what = format!("{} of complex numbers with {op}", reduction.kind());
                by_name(group.as_ref(), &caps, &reduction, dtype)?;
                refused(group.as_ref(), &what, reduction, ErrorKind::Unsupported)?;
            }
        }
        let wrong = [
            (
                "an input of reals and an output of complex numbers",
                Collective::AllGatherInto {
                    pairs: vec![(Tensor::zeros(dtype, 2), zeros(2 * n)?)],
                },
            ),
            (
                "splits in the middle of a number",
                Collective::AllToAllInto {
                    input: zeros(2 * n)?,
                    output: zeros(2 * n)?,
                    input_splits: (0..n)
                        .map(|i| 2 + usize::from(i == 0) - usize::from(i == 1))
                        .collect(),
                    output_splits: Vec::new(),
                },
            ),
        ];
        for (what, op) in wrong {
            if caps.ops.contains(op.kind()) && (n > 1 || op.kind() != OpKind::AllToAllInto) {
                refused(group.as_ref(), what, op, ErrorKind::InvalidArgument)?;
            }
        }
        if n == 2 && caps.ops.contains(OpKind::AllGatherInPlace) {
            let op = Collective::AllGatherInPlace {
                tensors: vec![zeros(6)?],
            };
            let what = "three complex numbers in place for two ranks";
            refused(group.as_ref(), what, op, ErrorKind::InvalidArgument)?;
        }
    }
    still_works(rank, group.as_ref())
}

/// The refusal of an operation that is offered for reals says that it is about complex numbers, and what to do.
fn by_name(
    group: &dyn ProcessGroup,
    caps: &ftcore::Capabilities,
    reduction: &Collective,
    dtype: DType,
) -> Outcome {
    let Collective::AllReduce { op, .. } = reduction else {
        return Ok(());
    };
    if !caps.ops.contains(OpKind::AllReduce) || !caps.reduces(*op, dtype) {
        return Ok(());
    }
    let tensors = vec![complex(Tensor::zeros(dtype, 2))?];
    let again = Collective::AllReduce { tensors, op: *op };
    let Err(rejected) = group.run(again, SubmitOptions::default()) else {
        return Err(Failure::new(format!("{op} of complex numbers was accepted")));
    };
    let name = if dtype == DType::F32 {
        "complex64"
    } else {
        "complex128"
    };
    let text = rejected.error.to_string();
    ensure!(
        text.contains(name) && text.contains("view_as_real"),
        "the refusal does not name {name} and what to do: {text}"
    );
    Ok(())
}
