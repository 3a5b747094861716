//! L15: ranks that call different collectives, or the same one with other arguments, all get an error that names both
//! sides; nobody hangs, and the next epoch works.

use ftcore::{
    Collective, DType, ErrorKind, Feature, OpKind, ProcessGroup, ProcessGroupExt, ReduceOp, SubmitOptions,
    Tensor,
};

use crate::case::Case;
use crate::{Failure, Needs, Outcome, Rank};

/// What one odd rank calls and what the others call, and a word of each that every error must contain.
type Variant = (&'static str, fn(&Rank, bool) -> Collective, [&'static str; 2]);

pub(crate) fn cases() -> Vec<Case> {
    let variants: [Variant; 9] = [
        ("operation", operation, ["all_reduce", "broadcast"]),
        ("rooted_operation", rooted, ["reduce(", "barrier"]),
        ("barrier_kinds", barriers, ["monitored_barrier", "barrier("]),
        ("dtype", dtype, ["f32", "f64"]),
        ("count", count, ["100 elements", "101 elements"]),
        ("reduction", reduction, ["sum", "max"]),
        ("root", root, ["root 0", "root 1"]),
        ("coalesced_parts", parts, ["all_reduce", "all_reduce"]),
        ("large_count", large, ["80000 elements", "80001 elements"]),
    ];
    let mut all = Vec::new();
    for world in [2, 3, 4] {
        for (name, make, words) in variants {
            for odd in [0, world - 1] {
                let side = if odd == 0 { "first" } else { "last" };
                let needs = [Needs::Feature(Feature::MismatchDetection)];
                let name = format!("mismatch::l15_{name}_differs_on_the_{side}_rank");
                all.push(Case::new(&name, world, &needs, move |rank| {
                    differ(rank, odd, make, words)
                }));
            }
        }
        let needs = [
            Needs::Feature(Feature::MismatchDetection),
            Needs::Op(OpKind::AllToAllInto),
        ];
        all.push(Case::new(
            "mismatch::l15_splits_that_do_not_fit",
            world,
            &needs,
            splits,
        ));
        let needs = [
            Needs::Feature(Feature::MismatchDetection),
            Needs::Op(OpKind::Recv),
        ];
        all.push(Case::new(
            "mismatch::l15_message_and_receive_of_other_sizes",
            world,
            &needs,
            message,
        ));
    }
    all
}

fn operation(_: &Rank, odd: bool) -> Collective {
    let tensors = vec![Tensor::zeros(DType::F32, 10)];
    if odd {
        Collective::Broadcast { tensors, root: 0 }
    } else {
        Collective::AllReduce {
            tensors,
            op: ReduceOp::Sum,
        }
    }
}

fn rooted(_: &Rank, odd: bool) -> Collective {
    if odd {
        Collective::Reduce {
            tensor: Tensor::zeros(DType::F32, 10),
            op: ReduceOp::Sum,
            root: 0,
        }
    } else {
        Collective::Barrier
    }
}

fn barriers(_: &Rank, odd: bool) -> Collective {
    if odd {
        Collective::MonitoredBarrier { wait_all: true }
    } else {
        Collective::Barrier
    }
}

fn sum(dtype: DType, counts: &[usize], op: ReduceOp) -> Collective {
    let tensors = counts.iter().map(|&n| Tensor::zeros(dtype, n)).collect();
    Collective::AllReduce { tensors, op }
}

fn dtype(_: &Rank, odd: bool) -> Collective {
    sum(if odd { DType::F64 } else { DType::F32 }, &[8], ReduceOp::Sum)
}

fn count(_: &Rank, odd: bool) -> Collective {
    sum(DType::F32, &[100 + usize::from(odd)], ReduceOp::Sum)
}

fn reduction(_: &Rank, odd: bool) -> Collective {
    sum(DType::F32, &[8], if odd { ReduceOp::Max } else { ReduceOp::Sum })
}

fn root(_: &Rank, odd: bool) -> Collective {
    Collective::Broadcast {
        tensors: vec![Tensor::zeros(DType::F32, 8)],
        root: u32::from(odd),
    }
}

fn parts(_: &Rank, odd: bool) -> Collective {
    sum(DType::F32, if odd { &[3, 1] } else { &[1, 3] }, ReduceOp::Sum)
}

fn large(_: &Rank, odd: bool) -> Collective {
    sum(DType::F32, &[80_000 + usize::from(odd)], ReduceOp::Sum)
}

/// The error of `op`, or of the group if a peer's news came before it was submitted.
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

fn differ(rank: &Rank, odd: u32, make: fn(&Rank, bool) -> Collective, words: [&str; 2]) -> Outcome {
    let group = rank.group()?;
    for kind in [make(rank, true).kind(), make(rank, false).kind()] {
        if !group.capabilities().ops.contains(kind) {
            return Ok(());
        }
    }
    let e = failure_of(rank, group.as_ref(), make(rank, rank.rank == odd))?;
    ensure!(
        e.kind() == ErrorKind::Mismatch,
        "rank {}: {:?}: {e}",
        rank.rank,
        e.kind()
    );
    for word in words {
        ensure!(
            e.to_string().contains(word),
            "rank {} does not name '{word}': {e}",
            rank.rank
        );
    }
    next_epoch_works(rank, group.as_ref())
}

fn next_epoch_works(rank: &Rank, group: &dyn ProcessGroup) -> Outcome {
    if !group.capabilities().has(Feature::Reconfigure) {
        return Ok(());
    }
    group.configure(rank.configuration("main", 2))?;
    let sum = group
        .allreduce(Tensor::from_vec(vec![1i32; 7]), ReduceOp::Sum)?
        .take_tensor()?
        .into_vec::<i32>()?;
    ensure!(sum == [rank.world as i32; 7], "the next epoch sums {sum:?}");
    Ok(())
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
    // Rank 1 finds out; ranks that had all their parts before the news may have finished.
    match failure_of(rank, group.as_ref(), op) {
        Ok(e) => {
            ensure!(e.kind() == ErrorKind::Mismatch, "rank {}: {e}", rank.rank);
            ensure!(
                e.to_string().contains("20 bytes") && e.to_string().contains("16 bytes"),
                "rank {} does not name both sizes: {e}",
                rank.rank
            );
        }
        Err(failure) => ensure!(rank.rank != 1, "{failure}"),
    }
    let e = crate::case::eventually("the news of the mismatch", || group.error())?;
    ensure!(e.kind() == ErrorKind::Mismatch, "rank {} hears {e}", rank.rank);
    next_epoch_works(rank, group.as_ref())
}

fn message(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    if rank.rank > 1 {
        let e = crate::case::eventually("the news of the mismatch", || group.error())?;
        ensure!(e.kind() == ErrorKind::Mismatch, "rank {} hears {e}", rank.rank);
        return next_epoch_works(rank, group.as_ref());
    }
    let op = if rank.rank == 0 {
        Collective::Send {
            tensor: Tensor::zeros(DType::F32, 8),
            peer: 1,
            tag: 2,
        }
    } else {
        Collective::Recv {
            tensor: Tensor::zeros(DType::F64, 4),
            peer: Some(0),
            tag: 2,
        }
    };
    let e = failure_of(rank, group.as_ref(), op)?;
    ensure!(e.kind() == ErrorKind::Mismatch, "rank {}: {e}", rank.rank);
    for word in ["8 elements of f32", "4 elements of f64"] {
        ensure!(
            e.to_string().contains(word),
            "rank {} does not name '{word}': {e}",
            rank.rank
        );
    }
    next_epoch_works(rank, group.as_ref())
}
