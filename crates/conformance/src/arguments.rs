//! What is not advertised is refused at once, wrong arguments are refused by name, and every refusal gives the tensors
//! back and leaves the group as it was.

use std::time::{Duration, Instant};

use ftcore::{
    Collective, DType, ErrorKind, Feature, OpKind, ProcessGroup, ProcessGroupExt, ReduceOp, SubmitOptions,
    Tensor,
};

use crate::case::{Case, Worlds};
use crate::probe::{Probe, moved, summed};
use crate::{Failure, Outcome, Rank};

/// Within which a call is refused that waits for nothing, on a machine that is busy.
const AT_ONCE: Duration = Duration::from_secs(5);

pub(crate) fn cases(worlds: Worlds) -> Vec<Case> {
    let mut all = Vec::new();
    for &world in worlds.or(&[1, 2, 3]) {
        let refused = "arguments::not_advertised_is_unsupported_at_once";
        all.push(Case::new(refused, world, &[], unsupported).sharing());
        let refused = "arguments::wrong_ones_give_the_tensors_back";
        all.push(Case::new(refused, world, &[], wrong).sharing());
        let refused = "arguments::unconfigured_is_refused";
        all.push(Case::new(refused, world, &[], unconfigured));
    }
    all
}

/// Submits what must be refused with `kind`; the tensors come back with their contents.
pub(crate) fn refused(group: &dyn ProcessGroup, what: &str, op: Collective, kind: ErrorKind) -> Outcome {
    let before: Vec<(DType, Vec<u8>)> = op
        .tensors()
        .iter()
        .map(|t| (t.dtype(), t.bytes().to_vec()))
        .collect();
    let Err(rejected) = group.run(op, SubmitOptions::default()) else {
        return Err(Failure::new(format!("{what} was accepted")));
    };
    ensure!(
        rejected.error.kind() == kind,
        "{what} was refused with {:?}: {}",
        rejected.error.kind(),
        rejected.error
    );
    let after: Vec<(DType, Vec<u8>)> = rejected
        .op
        .tensors()
        .iter()
        .map(|t| (t.dtype(), t.bytes().to_vec()))
        .collect();
    ensure!(
        before == after,
        "{what} did not give its tensors back as they were"
    );
    Ok(())
}

/// An operation of each kind that is right in every other respect.
fn sample(kind: OpKind, rank: &Rank, dtype: DType, op: ReduceOp) -> Option<Collective> {
    let world = rank.world as usize;
    let one = || Tensor::zeros(dtype, 3);
    let all = || (0..world).map(|_| Tensor::zeros(dtype, 3)).collect::<Vec<_>>();
    let wide = || Tensor::zeros(dtype, 3 * world);
    let on_root = || if rank.rank == 0 { all() } else { Vec::new() };
    let peer = (rank.rank + 1) % rank.world;
    Some(match kind {
        OpKind::AllReduce => Collective::AllReduce {
            tensors: vec![one()],
            op,
        },
        OpKind::Broadcast => Collective::Broadcast {
            tensors: vec![one()],
            root: 0,
        },
        OpKind::Reduce => Collective::Reduce {
            tensor: one(),
            op,
            root: 0,
        },
        OpKind::AllGather => Collective::AllGather {
            input: one(),
            outputs: all(),
        },
        OpKind::AllGatherInto => Collective::AllGatherInto {
            pairs: vec![(one(), wide())],
        },
        OpKind::Gather => Collective::Gather {
            input: one(),
            outputs: on_root(),
            root: 0,
        },
        OpKind::Scatter => Collective::Scatter {
            inputs: on_root(),
            output: one(),
            root: 0,
        },
        OpKind::ReduceScatter => Collective::ReduceScatter {
            inputs: all(),
            output: one(),
            op,
        },
        OpKind::ReduceScatterInto => Collective::ReduceScatterInto {
            pairs: vec![(wide(), one())],
            op,
        },
        OpKind::AllGatherInPlace => Collective::AllGatherInPlace {
            tensors: vec![wide()],
        },
        OpKind::ReduceScatterInPlace => Collective::ReduceScatterInPlace {
            tensors: vec![wide()],
            op,
        },
        OpKind::AllToAll => Collective::AllToAll {
            inputs: all(),
            outputs: all(),
        },
        OpKind::AllToAllInto => Collective::AllToAllInto {
            input: wide(),
            output: wide(),
            input_splits: Vec::new(),
            output_splits: Vec::new(),
        },
        OpKind::Send if rank.world > 1 => Collective::Send {
            tensor: one(),
            peer,
            tag: 0,
        },
        OpKind::Recv if rank.world > 1 => Collective::Recv {
            tensor: one(),
            peer: Some(peer),
            tag: 0,
        },
        OpKind::Barrier => Collective::Barrier,
        OpKind::MonitoredBarrier => Collective::MonitoredBarrier { wait_all: true },
        _ => return None,
    })
}

fn unsupported(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    let caps = group.capabilities().clone();
    for kind in OpKind::ALL {
        for dtype in DType::ALL {
            for op in [
                ReduceOp::Sum,
                ReduceOp::Avg,
                ReduceOp::Product,
                ReduceOp::Min,
                ReduceOp::Max,
                ReduceOp::Band,
                ReduceOp::Bor,
                ReduceOp::Bxor,
                ReduceOp::PremulSum(2.0),
            ] {
                let Some(sample) = sample(kind, rank, dtype, op) else {
                    continue;
                };
                let has_data = sample.dtype().is_some();
                let offered = caps.ops.contains(kind)
                    && (!has_data || caps.moves.contains(dtype))
                    && (!kind.is_reduction() || caps.reduces(op, dtype));
                if !offered {
                    let what = format!("{kind} of {dtype} with {op}");
                    refused(group.as_ref(), &what, sample, ErrorKind::Unsupported)?;
                }
            }
        }
    }
    if !caps.has(Feature::RecvAny) && caps.ops.contains(OpKind::Recv) && rank.world > 1 {
        let op = Collective::Recv {
            tensor: Tensor::zeros(moved(&caps), 1),
            peer: None,
            tag: 0,
        };
        refused(group.as_ref(), "receive from any", op, ErrorKind::Unsupported)?;
    }
    if !caps.has(Feature::Tags) && caps.ops.contains(OpKind::Send) && rank.world > 1 {
        without_tags(rank, group.as_ref(), moved(&caps))?;
    }
    if !caps.has(Feature::Split) {
        let began = Instant::now();
        let Err(e) = group.split(Some(0), rank.rank, rank.soon()) else {
            return Err(Failure::new("a group that does not advertise Split was split"));
        };
        ensure!(
            e.kind() == ErrorKind::Unsupported && began.elapsed() < AT_ONCE,
            "split, which is not advertised, failed after {:?} with {:?}: {e}",
            began.elapsed(),
            e.kind()
        );
    }
    still_works(rank, group.as_ref())
}

/// A group that matches messages by their order takes no tag that says otherwise, in a batch neither, and says what to do.
fn without_tags(rank: &Rank, group: &dyn ProcessGroup, dtype: DType) -> Outcome {
    let peer = (rank.rank + 1) % rank.world;
    let send = |tag| Collective::Send {
        tensor: Tensor::zeros(dtype, 1),
        peer,
        tag,
    };
    let receive = |tag| Collective::Recv {
        tensor: Tensor::zeros(dtype, 1),
        peer: Some(peer),
        tag,
    };
    let batch = Collective::Batch {
        ops: vec![receive(0), send(3)],
    };
    for op in [send(1), receive(u32::MAX), batch] {
        if group.capabilities().ops.contains(op.kind()) {
            refused(group, "a tag that is not matched", op, ErrorKind::Unsupported)?;
        }
    }
    let Err(rejected) = group.run(send(7), SubmitOptions::default()) else {
        return Err(Failure::new("tag 7 was accepted"));
    };
    let text = rejected.error.to_string();
    ensure!(
        text.contains("tag 7") && text.contains("tag 0") && text.contains(&*group.info().backend),
        "the refusal does not name the tag, the backend and what to do: {text}"
    );
    ensure!(
        text.contains("messages:gloo"),
        "the refusal does not name the backend that matches tags: {text}"
    );
    Ok(())
}

/// Nothing was sent: the group is in step on all ranks.
pub(crate) fn still_works(rank: &Rank, group: &dyn ProcessGroup) -> Outcome {
    ensure!(
        group.error().is_none(),
        "a refusal poisoned the group: {:?}",
        group.error()
    );
    if !group.capabilities().ops.contains(OpKind::AllReduce)
        || summed(group.capabilities(), DType::I32).is_none()
    {
        return Ok(());
    }
    let values = (1, rank.world as i32);
    Probe::of(group, DType::I32).sum(group, "the sum after refusals", values, 5)
}

/// Bytes that are told apart.
fn filled(dtype: DType, n: usize) -> Tensor {
    let mut tensor = Tensor::zeros(dtype, n);
    for (byte, i) in tensor.bytes_mut().iter_mut().zip((0..=1).cycle()) {
        // 0 and 1 are values of every type.
        *byte = i;
    }
    tensor
}

fn wrong(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    let caps = group.capabilities().clone();
    let world = rank.world;
    let n = world as usize;
    let dtype = moved(&caps);
    let other = if dtype == DType::I64 {
        DType::I32
    } else {
        DType::I64
    };
    let filled = |n| filled(dtype, n);
    let many = |lengths: &[usize]| lengths.iter().map(|&n| filled(n)).collect::<Vec<_>>();
    let op = ReduceOp::Sum;
    let peers_own = rank.rank;
    let mut tries = vec![
        (
            "an empty list",
            Collective::AllReduce {
                tensors: Vec::new(),
                op,
            },
        ),
        (
            "two dtypes in one call",
            Collective::AllReduce {
                tensors: vec![filled(2), Tensor::zeros(other, 1)],
                op,
            },
        ),
        (
            "a root that does not exist",
            Collective::Broadcast {
                tensors: vec![filled(2)],
                root: world,
            },
        ),
        (
            "a reduce root that does not exist",
            Collective::Reduce {
                tensor: filled(2),
                op,
                root: world + 7,
            },
        ),
        (
            "too few outputs",
            Collective::AllGather {
                input: filled(2),
                outputs: many(&vec![2; n - 1]),
            },
        ),
        (
            "an output of another size than the own input",
            Collective::AllGather {
                input: filled(2),
                outputs: many(&vec![3; n]),
            },
        ),
        (
            "an output that is not world times the input",
            Collective::AllGatherInto {
                pairs: vec![(filled(2), filled(2 * n + 1))],
            },
        ),
        (
            "an input that is not world times the output",
            Collective::ReduceScatterInto {
                pairs: vec![(filled(2 * n + 1), filled(2))],
                op,
            },
        ),
        (
            "too many inputs",
            Collective::ReduceScatter {
                inputs: many(&vec![2; n + 1]),
                output: filled(2),
                op,
            },
        ),
        (
            "splits that do not sum up",
            Collective::AllToAllInto {
                input: filled(2 * n),
                output: filled(2 * n),
                input_splits: vec![1; n],
                output_splits: vec![2; n],
            },
        ),
        (
            "too many splits",
            Collective::AllToAllInto {
                input: filled(n + 1),
                output: filled(2 * n),
                input_splits: vec![1; n + 1],
                output_splits: vec![2; n],
            },
        ),
        (
            "an own part of two lengths",
            Collective::AllToAllInto {
                input: filled(4 * n),
                output: filled(2 * n),
                input_splits: Vec::new(),
                output_splits: Vec::new(),
            },
        ),
        (
            "a peer that does not exist",
            Collective::Send {
                tensor: filled(2),
                peer: world,
                tag: 0,
            },
        ),
        (
            "a send to oneself",
            Collective::Send {
                tensor: filled(2),
                peer: peers_own,
                tag: 0,
            },
        ),
        (
            "a receive from oneself",
            Collective::Recv {
                tensor: filled(2),
                peer: Some(peers_own),
                tag: 0,
            },
        ),
        (
            "no tensor in place",
            Collective::AllGatherInPlace { tensors: Vec::new() },
        ),
        ("an empty batch", Collective::Batch { ops: Vec::new() }),
        (
            "a collective in a batch",
            Collective::Batch {
                ops: vec![Collective::Barrier],
            },
        ),
        (
            "a list off the root",
            if rank.rank == 0 {
                Collective::Gather {
                    input: filled(2),
                    outputs: Vec::new(),
                    root: 0,
                }
            } else {
                Collective::Gather {
                    input: filled(2),
                    outputs: many(&vec![2; n]),
                    root: 0,
                }
            },
        ),
    ];
    if n > 1 {
        tries.push((
            "a tensor to gather in place without a part for every rank",
            Collective::AllGatherInPlace {
                tensors: vec![filled(2 * n), filled(n + 1)],
            },
        ));
        tries.push((
            "a tensor to reduce in place without a part for every rank",
            Collective::ReduceScatterInPlace {
                tensors: vec![filled(2 * n - 1)],
                op,
            },
        ));
        tries.push((
            "an uneven count without splits",
            Collective::AllToAllInto {
                input: filled(n + 1),
                output: filled(n + 1),
                input_splits: Vec::new(),
                output_splits: Vec::new(),
            },
        ));
    }
    for (what, op) in tries {
        if caps.ops.contains(op.kind()) {
            refused(group.as_ref(), what, op, ErrorKind::InvalidArgument)?;
        }
    }
    still_works(rank, group.as_ref())
}

fn unconfigured(rank: &Rank) -> Outcome {
    let group = rank.unconfigured()?;
    ensure!(
        group.info().world_size == 0,
        "an unconfigured group says {:?}",
        group.info()
    );
    let op = Collective::AllReduce {
        tensors: vec![filled(DType::F32, 3)],
        op: ReduceOp::Sum,
    };
    refused(
        group.as_ref(),
        "an all-reduce before configure",
        op,
        ErrorKind::InvalidState,
    )?;
    // Nothing to end, and not an error.
    group.shutdown(rank.soon())?;
    group.abort("nothing to abort");
    group.configure(rank.configuration("late", 1))?;
    still_works(rank, group.as_ref())
}
