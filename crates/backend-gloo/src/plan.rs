//! From a validated collective to what the executor runs: which tensors are `In` and `Out`, which schedule, and how this
//! rank's values are prepared (identity for a rank that does not contribute, the premul factor).

use std::ops::Range;

use ftcore::{Collective, DType, Error, ErrorKind, Fingerprint, ReduceOp, Result, Tensor};

use crate::buffers::{Map, Memory};
use crate::execution::Place;
use crate::schedule::{self, BLOCK_BYTES, Buffer, DIRECT_MAX_WORLD, Hosts, Schedule, layered, shared};

/// What is done to this rank's values before anything is sent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Prepare {
    /// They stand as they are.
    Nothing,
    /// They are replaced by the identity of the reduction: this rank does not contribute (INV-4).
    Identity,
    /// They are multiplied.
    Scale(f64),
}

/// One operation, ready to run.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) fingerprint: Fingerprint,
    pub(crate) dtype: DType,
    pub(crate) op: Option<ReduceOp>,
    pub(crate) contribute: bool,
    pub(crate) schedule: Schedule,
    pub(crate) memory: Memory,
    pub(crate) prepare: Prepare,
    /// The buffer that is prepared; `In` is a private copy then.
    pub(crate) prepared: Buffer,
    /// True if results must be made canonical at the end (bool, L16).
    pub(crate) canonical: bool,
}

/// The whole of tensors `range` one after the other.
fn whole(tensors: &[Tensor], range: Range<usize>) -> Map {
    let mut map = Map::default();
    for (i, t) in tensors.iter().enumerate().skip(range.start).take(range.len()) {
        map.push(i, 0..t.byte_len());
    }
    map
}

/// Tensors with a part for each rank, as one part of all of them for each; and those parts.
fn rank_by_rank(tensors: &[Tensor], ranks: usize) -> (Map, Vec<Range<usize>>) {
    let of_one = |t: &Tensor| t.byte_len() / ranks.max(1);
    let mut map = Map::default();
    for r in 0..ranks {
        for (i, n) in tensors.iter().map(of_one).enumerate() {
            map.push(i, r * n..(r + 1) * n);
        }
    }
    let part = tensors.iter().map(of_one).sum();
    (map, schedule::parts_of(&vec![part; ranks]))
}

fn bytes_of(tensors: &[Tensor]) -> Vec<usize> {
    tensors.iter().map(Tensor::byte_len).collect()
}

/// Splits in elements as lengths in bytes; even ones where none are given.
fn split_bytes(splits: &[usize], tensor: &Tensor, world: u32) -> Vec<usize> {
    let element = tensor.dtype().size();
    if splits.is_empty() {
        vec![tensor.byte_len() / world.max(1) as usize; world as usize]
    } else {
        splits.iter().map(|n| n * element).collect()
    }
}

/// The plan of `collective` on `rank` of `world`. Point-to-point operations have none.
pub(crate) fn plan(collective: Collective, contribute: bool, place: Place, hosts: &Hosts) -> Result<Plan> {
    let Place {
        rank,
        world,
        one_host,
        ..
    } = place;
    let fingerprint = collective.fingerprint();
    let dtype = collective.dtype().unwrap_or(DType::U8);
    let element = dtype.size();
    let ranks = world as usize;
    // The others send every byte over the network once as they are, or send none.
    let layers = hosts.is_layered();
    let shares_memory = one_host && world > 1;
    let all_gather = |parts: &[Range<usize>]| match (layers, shares_memory) {
        (true, _) => layered::all_gather(rank, hosts, parts),
        (_, true) => shared::all_gather(rank, world, parts),
        _ => schedule::all_gather(rank, world, parts),
    };
    // A part goes to its owner at once: what a ring or a tree passes on needs memory for partial sums, as large as the part.
    let directly = world > 1 && (one_host || world <= DIRECT_MAX_WORLD);
    let block = if one_host { BLOCK_BYTES } else { usize::MAX };
    let reduce_scatter = |parts: &[Range<usize>]| match layers {
        true => layered::reduce_scatter(rank, hosts, parts),
        _ if directly => shared::reduce_scatter(rank, world, parts, block),
        _ => schedule::reduce_scatter(rank, world, parts),
    };
    let all_to_all = |sent: &[Range<usize>], received: &[Range<usize>]| match shares_memory {
        true => shared::all_to_all(rank, world, sent, received),
        false => schedule::all_to_all(rank, world, sent, received),
    };
    let mut op = None;
    // (schedule, input, output, is the reduction in place)
    let (schedule, input, output, in_place) = match &collective {
        Collective::AllReduce { tensors, op: reduce } => {
            op = Some(*reduce);
            let out = whole(tensors, 0..tensors.len());
            let s = match layers {
                true => layered::all_reduce(rank, hosts, out.len(), element),
                false => schedule::all_reduce(rank, world, out.len(), element, one_host, hosts.shares()),
            };
            (s, Map::default(), out, true)
        }
        Collective::Broadcast { tensors, root } => {
            let out = whole(tensors, 0..tensors.len());
            let s = match layers {
                true => layered::broadcast(rank, hosts, *root, out.len()),
                false => schedule::broadcast(rank, world, *root, out.len()),
            };
            (s, Map::default(), out, true)
        }
        Collective::Reduce {
            tensor,
            op: reduce,
            root,
        } => {
            op = Some(*reduce);
            let bytes = tensor.byte_len();
            let s = match layers {
                true => layered::reduce(rank, hosts, *root, bytes),
                // Less than that goes down a tree over sockets: fewer messages.
                _ if directly && (one_host || bytes > BLOCK_BYTES) => {
                    shared::reduce(rank, world, *root, bytes, element, block)
                }
                _ => schedule::reduce(rank, world, *root, bytes),
            };
            let mut own = Map::default();
            own.push(0, 0..tensor.byte_len());
            if rank == *root {
                (s, Map::default(), own, true)
            } else {
                (s, own, Map::default(), false)
            }
        }
        Collective::AllGather { input, outputs } => {
            let parts = schedule::parts_of(&bytes_of(outputs));
            let s = all_gather(&parts);
            let mut own = Map::default();
            own.push(0, 0..input.byte_len());
            let mut out = Map::default();
            for (i, t) in outputs.iter().enumerate() {
                out.push(1 + i, 0..t.byte_len());
            }
            (s, own, out, false)
        }
        Collective::AllGatherInto { pairs } => {
            // Rank by rank, so that one part is everything of one rank; the pairs' tensors are 2i and 2i + 1.
            let (mut own, mut out) = (Map::default(), Map::default());
            for (i, (input, _)) in pairs.iter().enumerate() {
                own.push(2 * i, 0..input.byte_len());
            }
            for r in 0..ranks {
                for (i, (input, _)) in pairs.iter().enumerate() {
                    let n = input.byte_len();
                    out.push(2 * i + 1, r * n..(r + 1) * n);
                }
            }
            let parts = schedule::parts_of(&vec![own.len(); ranks]);
            (all_gather(&parts), own, out, false)
        }
        Collective::AllGatherInPlace { tensors } => {
            let (out, parts) = rank_by_rank(tensors, ranks);
            let s = schedule::in_place(all_gather(&parts), Buffer::In, &schedule::part(&parts, rank));
            (s, Map::default(), out, true)
        }
        Collective::Gather { input, outputs, root } => {
            let parts = schedule::parts_of(&bytes_of(outputs));
            let s = schedule::gather(rank, world, *root, &parts, input.byte_len());
            let mut own = Map::default();
            own.push(0, 0..input.byte_len());
            let mut out = Map::default();
            for (i, t) in outputs.iter().enumerate() {
                out.push(1 + i, 0..t.byte_len());
            }
            (s, own, out, false)
        }
        Collective::Scatter { inputs, output, root } => {
            let parts = schedule::parts_of(&bytes_of(inputs));
            let s = schedule::scatter(rank, world, *root, &parts, output.byte_len());
            let mut out = Map::default();
            out.push(inputs.len(), 0..output.byte_len());
            (s, whole(inputs, 0..inputs.len()), out, false)
        }
        Collective::ReduceScatter {
            inputs,
            output,
            op: reduce,
        } => {
            op = Some(*reduce);
            let parts = schedule::parts_of(&bytes_of(inputs));
            let s = reduce_scatter(&parts);
            let mut out = Map::default();
            out.push(inputs.len(), 0..output.byte_len());
            (s, whole(inputs, 0..inputs.len()), out, false)
        }
        Collective::ReduceScatterInto { pairs, op: reduce } => {
            op = Some(*reduce);
            let (mut own, mut out) = (Map::default(), Map::default());
            for (i, (_, output)) in pairs.iter().enumerate() {
                out.push(2 * i + 1, 0..output.byte_len());
            }
            for r in 0..ranks {
                for (i, (_, output)) in pairs.iter().enumerate() {
                    let n = output.byte_len();
                    own.push(2 * i, r * n..(r + 1) * n);
                }
            }
            let parts = schedule::parts_of(&vec![out.len(); ranks]);
            (reduce_scatter(&parts), own, out, false)
        }
        Collective::ReduceScatterInPlace { tensors, op: reduce } => {
            op = Some(*reduce);
            let (out, parts) = rank_by_rank(tensors, ranks);
            let s = schedule::in_place(reduce_scatter(&parts), Buffer::Out, &schedule::part(&parts, rank));
            (s, Map::default(), out, true)
        }
        Collective::AllToAll { inputs, outputs } => {
            let sent = schedule::parts_of(&bytes_of(inputs));
            let received = schedule::parts_of(&bytes_of(outputs));
            let s = all_to_all(&sent, &received);
            let mut out = Map::default();
            for (i, t) in outputs.iter().enumerate() {
                out.push(inputs.len() + i, 0..t.byte_len());
            }
            (s, whole(inputs, 0..inputs.len()), out, false)
        }
        Collective::AllToAllInto {
            input,
            output,
            input_splits,
            output_splits,
        } => {
            let sent = schedule::parts_of(&split_bytes(input_splits, input, world));
            let received = schedule::parts_of(&split_bytes(output_splits, output, world));
            let s = all_to_all(&sent, &received);
            let (mut own, mut out) = (Map::default(), Map::default());
            own.push(0, 0..input.byte_len());
            out.push(1, 0..output.byte_len());
            (s, own, out, false)
        }
        Collective::Barrier => (
            schedule::barrier(rank, world),
            Map::default(),
            Map::default(),
            false,
        ),
        Collective::MonitoredBarrier { .. } => (
            schedule::monitored_barrier(rank, world),
            Map::default(),
            Map::default(),
            false,
        ),
        other => {
            return Err(Error::new(
                ErrorKind::Internal,
                format!("{} has no schedule", other.kind()),
            ));
        }
    };
    let prepare = match op {
        Some(_) if !contribute => Prepare::Identity,
        Some(ReduceOp::PremulSum(factor)) => Prepare::Scale(factor),
        _ => Prepare::Nothing,
    };
    let mut memory = Memory::new(collective.into_tensors(), input, output);
    if schedule.scratch > 0 {
        memory.add_scratch(schedule.scratch);
    }
    if prepare != Prepare::Nothing && !in_place {
        memory.stage_input();
    }
    Ok(Plan {
        fingerprint,
        dtype,
        op,
        contribute,
        schedule,
        memory,
        prepare,
        prepared: if in_place { Buffer::Out } else { Buffer::In },
        canonical: dtype == DType::Bool,
    })
}
