//! L15: ranks that call different collectives, or the same one with other arguments, all get an error that names both
//! sides; no rank hangs, and the next epoch works.

use ftcore::{
    Capabilities, Collective, DType, ErrorKind, Feature, OpKind, ProcessGroup, ProcessGroupExt, ReduceOp,
    SubmitOptions, Tensor,
};

use crate::case::{Case, Worlds, other_reduction, other_sum};
use crate::expected;
use crate::messages::tag_of;
use crate::probe::{Probe, moved, summed};
use crate::{Failure, Needs, Outcome, Rank};

/// What one odd rank (`true`) or the others call, of what the group offers, and a word that every error must contain.
type Call = fn(&Capabilities, bool) -> (Collective, &'static str);

pub(crate) fn cases(worlds: Worlds) -> Vec<Case> {
    let reduce = Needs::Sum;
    let cast = Needs::Op(OpKind::Broadcast);
    let barrier = Needs::Op(OpKind::Barrier);
    let monitored = Needs::Op(OpKind::MonitoredBarrier);
    let variants: [(&str, Call, &[Needs]); 9] = [
        ("operation", operation, &[reduce, cast]),
        (
            "rooted_operation",
            rooted,
            &[Needs::Op(OpKind::Reduce), Needs::Reduce(ReduceOp::Sum), barrier],
        ),
        ("barrier_kinds", barriers, &[barrier, monitored]),
        ("dtype", dtype, &[reduce, Needs::OtherSum]),
        ("count", count, &[reduce]),
        ("reduction", reduction, &[reduce, Needs::OtherReduction]),
        ("root", root, &[cast]),
        ("coalesced_parts", parts, &[reduce]),
        ("large_count", large, &[reduce]),
    ];
    let mut all = Vec::new();
    for &world in worlds.or(&[2, 3, 4]) {
        for (name, call, more) in variants {
            for odd in [0, world - 1] {
                let side = if odd == 0 { "first" } else { "last" };
                let needs = [&[Needs::Feature(Feature::MismatchDetection)], more].concat();
                let name = format!("mismatch::l15_{name}_differs_on_the_{side}_rank");
                all.push(Case::new(&name, world, &needs, move |rank| {
                    differ(rank, odd, call, failure_of)
                }));
            }
        }
        // By as many bytes, in calls that block: a backend may have a shorter way for them.
        let needs = [
            Needs::Feature(Feature::MismatchDetection),
            reduce,
            Needs::OtherReduction,
        ];
        all.push(Case::new(
            "mismatch::l15_reduction_of_calls_that_block",
            world,
            &needs,
            |rank| differ(rank, 1, reduction, failure_of_blocking),
        ));
        let needs = [
            Needs::Feature(Feature::MismatchDetection),
            Needs::Op(OpKind::AllToAllInto),
            Needs::Moves(DType::F32),
        ];
        all.push(Case::new(
            "mismatch::l15_splits_that_do_not_fit",
            world,
            &needs,
            splits,
        ));
        // Each differs in what the others share: the type, the count, or both with as many bytes.
        for (name, dtype, count) in [
            ("types", DType::F64, 8),
            ("counts", DType::F32, 12),
            ("types_and_counts", DType::F64, 4),
        ] {
            let needs = [
                Needs::Feature(Feature::MismatchDetection),
                Needs::Op(OpKind::Recv),
                Needs::Moves(DType::F32),
                Needs::Moves(dtype),
            ];
            let name = format!("mismatch::l15_message_and_receive_of_other_{name}");
            all.push(Case::new(&name, world, &needs, move |rank| {
                message(rank, dtype, count)
            }));
        }
    }
    all
}

/// The dtype of the sums.
fn first(capabilities: &Capabilities) -> DType {
    summed(capabilities, DType::F32).unwrap_or(DType::F32)
}

fn operation(capabilities: &Capabilities, odd: bool) -> (Collective, &'static str) {
    let tensors = vec![Tensor::zeros(first(capabilities), 10)];
    if odd {
        (Collective::Broadcast { tensors, root: 0 }, "broadcast")
    } else {
        let op = ReduceOp::Sum;
        (Collective::AllReduce { tensors, op }, "all_reduce")
    }
}

fn rooted(capabilities: &Capabilities, odd: bool) -> (Collective, &'static str) {
    if odd {
        let sums = |d: &DType| capabilities.reduces(ReduceOp::Sum, *d);
        let dtype = DType::ALL.into_iter().find(sums).unwrap_or(DType::F32);
        let call = Collective::Reduce {
            tensor: Tensor::zeros(dtype, 10),
            op: ReduceOp::Sum,
            root: 0,
        };
        (call, "reduce")
    } else {
        (Collective::Barrier, "barrier")
    }
}

fn barriers(_: &Capabilities, odd: bool) -> (Collective, &'static str) {
    if odd {
        let call = Collective::MonitoredBarrier { wait_all: true };
        (call, "monitored_barrier")
    } else {
        (Collective::Barrier, "barrier")
    }
}

fn sum(dtype: DType, counts: &[usize], op: ReduceOp) -> Collective {
    let tensors = counts.iter().map(|&n| Tensor::zeros(dtype, n)).collect();
    Collective::AllReduce { tensors, op }
}

fn dtype(capabilities: &Capabilities, odd: bool) -> (Collective, &'static str) {
    let other = other_sum(capabilities).filter(|_| odd);
    let dtype = other.unwrap_or_else(|| first(capabilities));
    (sum(dtype, &[8], ReduceOp::Sum), dtype.name())
}

fn count(capabilities: &Capabilities, odd: bool) -> (Collective, &'static str) {
    let (count, word) = if odd {
        (101, "101 elements")
    } else {
        (100, "100 elements")
    };
    (sum(first(capabilities), &[count], ReduceOp::Sum), word)
}

fn reduction(capabilities: &Capabilities, odd: bool) -> (Collective, &'static str) {
    let other = other_reduction(capabilities).filter(|_| odd);
    let op = other.unwrap_or(ReduceOp::Sum);
    (sum(first(capabilities), &[8], op), ReduceOp::name_of(op.code()))
}

fn root(capabilities: &Capabilities, odd: bool) -> (Collective, &'static str) {
    let call = Collective::Broadcast {
        tensors: vec![Tensor::zeros(moved(capabilities), 8)],
        root: u32::from(odd),
    };
    (call, if odd { "root 1" } else { "root 0" })
}

fn parts(capabilities: &Capabilities, odd: bool) -> (Collective, &'static str) {
    let counts = if odd { [3, 1] } else { [1, 3] };
    (sum(first(capabilities), &counts, ReduceOp::Sum), "all_reduce")
}

fn large(capabilities: &Capabilities, odd: bool) -> (Collective, &'static str) {
    let (count, word) = if odd {
        (80_001, "80001 elements")
    } else {
        (80_000, "80000 elements")
    };
    (sum(first(capabilities), &[count], ReduceOp::Sum), word)
}

/// The error of `op`, or of the group if a peer's notice came before it was submitted.
fn failure_of(rank: &Rank, group: &dyn ProcessGroup, op: Collective) -> Outcome<ftcore::Error> {
    match group.run(op, SubmitOptions::by(rank.soon())) {
        Err(rejected) if rejected.error.kind() == ErrorKind::Poisoned => group
            .error()
            .ok_or_else(|| Failure::new("a poisoned group has no first cause")),
        Err(rejected) => Err(rejected.into()),
        Ok(work) => match work.wait(rank.soon()) {
            Err(e) => Ok(e),
            Ok(()) => Err(Failure::new(format!(
                "{} succeeded on rank {}",
                work.kind(),
                rank.rank
            ))),
        },
    }
}

/// As [`failure_of`], in a call that blocks.
fn failure_of_blocking(rank: &Rank, group: &dyn ProcessGroup, op: Collective) -> Outcome<ftcore::Error> {
    let kind = op.kind();
    match group.run_blocking(op, SubmitOptions::by(rank.soon())) {
        Err(failed) if failed.error.kind() == ErrorKind::Poisoned => group
            .error()
            .ok_or_else(|| Failure::new("a poisoned group has no first cause")),
        Err(failed) => Ok(failed.error),
        Ok(_) => Err(Failure::new(format!("{kind} succeeded on rank {}", rank.rank))),
    }
}

/// How a call's failure is had.
type Fails = fn(&Rank, &dyn ProcessGroup, Collective) -> Outcome<ftcore::Error>;

fn differ(rank: &Rank, odd: u32, call: Call, fails: Fails) -> Outcome {
    let group = rank.group()?;
    let capabilities = group.capabilities();
    let (mine, _) = call(capabilities, rank.rank == odd);
    let words = [false, true].map(|odd| call(capabilities, odd).1);
    let e = fails(rank, group.as_ref(), mine)?;
    let [one, other] = words;
    expected::DIFFERENT.check(&e, &[("ONE", one), ("OTHER", other)])?;
    next_epoch_works(rank, group.as_ref())
}

fn next_epoch_works(rank: &Rank, group: &dyn ProcessGroup) -> Outcome {
    if !group.capabilities().has(Feature::Reconfigure) {
        return Ok(());
    }
    group.configure(rank.configuration("main", 2))?;
    let values = (1, rank.world as i32);
    Probe::of(group, DType::I32).sum(group, "the next epoch's sum", values, 7)
}

/// Rank 0 sends one element more to rank 1 than rank 1 expects; nothing before the first frame could know.
fn splits(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    let n = rank.world as usize;
    let mut input_splits = vec![4usize; n];
    if rank.rank == 0
        && let Some(second) = input_splits.get_mut(1)
    {
        *second = 5;
    }
    let op = Collective::AllToAllInto {
        input: Tensor::zeros(DType::F32, input_splits.iter().sum()),
        output: Tensor::zeros(DType::F32, 4 * n),
        input_splits,
        output_splits: vec![4; n],
    };
    // Rank 1 finds out; ranks that had all their parts before the notice may have finished.
    match failure_of(rank, group.as_ref(), op) {
        Ok(e) => {
            expected::SIZES.check(&e, &[("A", "20"), ("B", "16")])?;
        }
        Err(failure) => ensure!(rank.rank != 1, "{failure}"),
    }
    let e = crate::case::eventually("the notice of the mismatch", || group.error())?;
    ensure!(e.kind() == ErrorKind::Mismatch, "rank {} hears {e}", rank.rank);
    next_epoch_works(rank, group.as_ref())
}

/// A message of eight numbers, and a receive of `count` of `dtype`.
fn message(rank: &Rank, dtype: DType, count: usize) -> Outcome {
    let group = rank.group()?;
    if rank.rank > 1 {
        let e = crate::case::eventually("the notice of the mismatch", || group.error())?;
        ensure!(e.kind() == ErrorKind::Mismatch, "rank {} hears {e}", rank.rank);
        return next_epoch_works(rank, group.as_ref());
    }
    let op = if rank.rank == 0 {
        Collective::Send {
            tensor: Tensor::zeros(DType::F32, 8),
            peer: 1,
            tag: tag_of(group.as_ref(), 2),
        }
    } else {
        Collective::Recv {
            tensor: Tensor::zeros(dtype, count),
            peer: Some(0),
            tag: tag_of(group.as_ref(), 2),
        }
    };
    let e = failure_of(rank, group.as_ref(), op)?;
    expected::MESSAGE.check(
        &e,
        &[
            ("ONE", "8 elements of f32"),
            ("OTHER", &format!("{count} elements of {dtype}")),
        ],
    )?;
    next_epoch_works(rank, group.as_ref())
}
