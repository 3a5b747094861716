//! Operations that move data without arithmetic: every dtype that is advertised, its sizes ([`sizes`]), every root, byte for byte.

use ftcore::{DType, OpKind, ProcessGroup, ProcessGroupExt, Tensor};

use crate::case::{Case, Worlds};
use crate::failure::came_back;
use crate::oracle::{check_pattern, pattern};
use crate::probe::moved;
use crate::sizes::{LARGE, sizes};
use crate::{Failure, Needs, Outcome, Rank};

type Body = fn(&Rank, &dyn ProcessGroup, DType, usize) -> Outcome;

pub(crate) fn cases(worlds: Worlds) -> Vec<Case> {
    let forms: [(&str, OpKind, Body); 9] = [
        ("broadcast", OpKind::Broadcast, broadcast),
        ("all_gather::uneven", OpKind::AllGather, all_gather),
        ("all_gather_into", OpKind::AllGatherInto, all_gather_into),
        (
            "all_gather_in_place",
            OpKind::AllGatherInPlace,
            all_gather_in_place,
        ),
        ("gather", OpKind::Gather, gather),
        ("scatter", OpKind::Scatter, scatter),
        ("all_to_all::uneven", OpKind::AllToAll, all_to_all),
        ("all_to_all_into::splits", OpKind::AllToAllInto, all_to_all_splits),
        ("all_to_all_into::even", OpKind::AllToAllInto, all_to_all_even),
    ];
    let mut all = Vec::new();
    for &world in worlds.or(&[1, 2, 3, 4]) {
        for (form, (name, kind, body)) in forms.into_iter().enumerate() {
            all.push(Case::new(name, world, &[Needs::Op(kind)], move |rank| {
                let group = rank.group()?;
                for dtype in DType::ALL {
                    if !group.capabilities().moves.contains(dtype) {
                        continue;
                    }
                    for count in sizes(dtype, form, rank.world) {
                        body(rank, group.as_ref(), dtype, count)?;
                    }
                }
                body(rank, group.as_ref(), moved(group.capabilities()), LARGE)
            }));
        }
        all.push(Case::new(
            "broadcast::coalesced",
            world,
            &[Needs::Op(OpKind::Broadcast)],
            broadcast_coalesced,
        ));
        all.push(Case::new(
            "all_gather::coalesced",
            world,
            &[Needs::Op(OpKind::AllGather)],
            all_gather_coalesced,
        ));
        let both = [
            Needs::Op(OpKind::AllGatherInPlace),
            Needs::Op(OpKind::AllGatherInto),
            Needs::Moves(DType::F32),
        ];
        all.push(Case::new(
            "all_gather_in_place::beside_ranks_that_are_not",
            world,
            &both,
            some_in_place,
        ));
        all.push(Case::new(
            "broadcast::l16_moved_bools_are_canonical",
            world,
            &[Needs::Op(OpKind::Broadcast), Needs::Moves(DType::Bool)],
            canonical_bools,
        ));
    }
    all.into_iter().map(Case::sharing).collect()
}

/// Part lengths that differ between ranks, some of them zero.
fn uneven(world: u32, count: usize) -> Vec<usize> {
    (0..world as usize)
        .map(|r| {
            if r == 1 {
                0
            } else {
                (count + r * 5) % (count * 2 + 1)
            }
        })
        .collect()
}

fn of(lengths: &[usize], rank: u32) -> usize {
    lengths.get(rank as usize).copied().unwrap_or(0)
}

fn zeros(dtype: DType, lengths: &[usize]) -> Vec<Tensor> {
    lengths.iter().map(|&n| Tensor::zeros(dtype, n)).collect()
}

fn roots(rank: &Rank, count: usize) -> std::ops::Range<u32> {
    if count <= 17 {
        0..rank.world
    } else {
        rank.world - 1..rank.world
    }
}

fn broadcast(rank: &Rank, group: &dyn ProcessGroup, dtype: DType, count: usize) -> Outcome {
    for root in roots(rank, count) {
        let work = group.broadcast(pattern(dtype, rank.rank, count), root)?;
        let result = work.take_tensor()?;
        ensure!(
            result.count() == count,
            "{} elements came back of {count}",
            result.count()
        );
        check_pattern("broadcast", dtype, result.bytes(), root, 0)?;
    }
    Ok(())
}

fn broadcast_coalesced(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    let dtype = moved(group.capabilities());
    let counts = [5usize, 0, 3000, 1];
    for root in 0..rank.world {
        let tensors = counts.iter().map(|&n| pattern(dtype, rank.rank, n)).collect();
        let op = ftcore::Collective::Broadcast { tensors, root };
        let results = group.run(op, Default::default())?.take()?.tensors;
        came_back(&results, counts.len())?;
        for (result, count) in results.iter().zip(counts) {
            ensure!(result.count() == count, "the tensors came back in another order");
            check_pattern("broadcast", dtype, result.bytes(), root, 0)?;
        }
    }
    Ok(())
}

/// A peer could send any byte as a bool; what arrives is 0 or 1.
fn canonical_bools(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    let mut tensor = Tensor::zeros(DType::Bool, 600);
    for (i, b) in tensor.bytes_mut().iter_mut().enumerate() {
        *b = (i % 7) as u8;
    }
    let result = group.broadcast(tensor, 0)?.take_tensor()?;
    ensure!(result.count() == 600, "{} bools came back of 600", result.count());
    for (i, b) in result.bytes().iter().enumerate() {
        let want = u8::from(i % 7 != 0);
        ensure!(*b == want, "bool {i} arrived as {b}, expected {want}");
    }
    Ok(())
}

fn all_gather(rank: &Rank, group: &dyn ProcessGroup, dtype: DType, count: usize) -> Outcome {
    let lengths = uneven(rank.world, count);
    let input = pattern(dtype, rank.rank, of(&lengths, rank.rank));
    let tensors = group.all_gather(input, zeros(dtype, &lengths))?.take()?.tensors;
    came_back(&tensors, 1 + lengths.len())?;
    let (input, outputs) = tensors
        .split_first()
        .ok_or_else(|| Failure::new("nothing came back"))?;
    check_pattern("all_gather's input", dtype, input.bytes(), rank.rank, 0)?;
    for (output, r) in outputs.iter().zip(0..) {
        ensure!(output.count() == of(&lengths, r), "output {r} has another length");
        check_pattern("all_gather", dtype, output.bytes(), r, 0)?;
    }
    Ok(())
}

/// Three lists of uneven parts as one work; a wrong one among them sends nothing.
fn all_gather_coalesced(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    let lengths: Vec<Vec<usize>> = [5usize, 3000, 1].map(|n| uneven(rank.world, n)).into();
    let dtype = moved(group.capabilities());
    let inputs = || -> Vec<Tensor> {
        let mine = lengths.iter().map(|list| of(list, rank.rank));
        mine.map(|n| pattern(dtype, rank.rank, n)).collect()
    };
    let outputs = || -> Vec<Vec<Tensor>> {
        let of_rank = |r| {
            lengths
                .iter()
                .map(|list| Tensor::zeros(dtype, of(list, r)))
                .collect()
        };
        (0..rank.world).map(of_rank).collect()
    };
    let mut wrong = outputs();
    if let Some(last) = wrong.get_mut(rank.rank as usize).and_then(|list| list.last_mut()) {
        *last = Tensor::zeros(dtype, 7777);
    }
    let refused = group.all_gather_coalesced(inputs(), wrong, Default::default());
    let Err(refused) = refused else {
        return Err(Failure::new("an output of another size was accepted"));
    };
    let given = lengths.len() * (1 + rank.world as usize);
    ensure!(
        refused.error.kind() == ftcore::ErrorKind::InvalidArgument && refused.tensors.len() == given,
        "{} tensors of {given} came back with {}",
        refused.tensors.len(),
        refused.error
    );
    let work = group
        .all_gather_coalesced(inputs(), outputs(), Default::default())
        .map_err(|failed| failed.error)?;
    let tensors = work.take()?.tensors;
    came_back(&tensors, given)?;
    for (list, lengths) in tensors.chunks_exact(1 + rank.world as usize).zip(&lengths) {
        for (output, r) in list.iter().skip(1).zip(0..) {
            ensure!(output.count() == of(lengths, r), "output {r} has another length");
            check_pattern("all_gather", dtype, output.bytes(), r, 0)?;
        }
    }
    Ok(())
}

fn all_gather_into(rank: &Rank, group: &dyn ProcessGroup, dtype: DType, count: usize) -> Outcome {
    let world = rank.world as usize;
    // Two pairs as one operation.
    let counts = [count, count / 2 + 1];
    let pairs = counts
        .iter()
        .map(|&n| (pattern(dtype, rank.rank, n), Tensor::zeros(dtype, n * world)))
        .collect();
    let tensors = group.all_gather_into_coalesced(pairs)?.take()?.tensors;
    came_back(&tensors, 4)?;
    for (pair, n) in tensors.chunks_exact(2).zip(counts) {
        let [_, output] = pair else { continue };
        check_gathered("all_gather_into", rank, dtype, n, output)?;
    }
    Ok(())
}

/// Zeros with a part for each rank, of which this rank's holds its pattern.
fn own_part_filled(rank: &Rank, dtype: DType, n: usize) -> Tensor {
    let mut tensor = Tensor::zeros(dtype, n * rank.world as usize);
    let own = pattern(dtype, rank.rank, n);
    let mut parts = tensor.bytes_mut().chunks_mut(own.byte_len().max(1));
    if let Some(part) = parts.nth(rank.rank as usize) {
        part.copy_from_slice(own.bytes());
    }
    tensor
}

fn check_gathered(what: &str, rank: &Rank, dtype: DType, n: usize, tensor: &Tensor) -> Outcome {
    ensure!(
        tensor.count() == n * rank.world as usize,
        "{what}: {} elements came back",
        tensor.count()
    );
    for (r, bytes) in (0u32..).zip(tensor.bytes().chunks((n * dtype.size()).max(1))) {
        check_pattern(what, dtype, bytes, r, 0)?;
    }
    Ok(())
}

fn all_gather_in_place(rank: &Rank, group: &dyn ProcessGroup, dtype: DType, count: usize) -> Outcome {
    // Two tensors as one operation.
    let counts = [count, count / 2 + 1];
    let tensors = counts.map(|n| own_part_filled(rank, dtype, n)).into();
    let tensors = group.all_gather_in_place_coalesced(tensors)?.take()?.tensors;
    came_back(&tensors, 2)?;
    for (tensor, n) in tensors.iter().zip(counts) {
        check_gathered("all_gather_in_place", rank, dtype, n, tensor)?;
    }
    Ok(())
}

/// Whether a call is in place is each rank's own affair.
fn some_in_place(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    let dtype = DType::F32;
    for turn in 0..2 {
        for n in [1usize, 1000, LARGE] {
            let work = match (rank.rank + turn).is_multiple_of(2) {
                true => group.all_gather_in_place(own_part_filled(rank, dtype, n))?,
                false => {
                    let whole = Tensor::zeros(dtype, n * rank.world as usize);
                    group.all_gather_into(pattern(dtype, rank.rank, n), whole)?
                }
            };
            let mut tensors = work.take()?.tensors;
            let whole = tensors.pop().ok_or_else(|| Failure::new("nothing came back"))?;
            check_gathered("all_gather", rank, dtype, n, &whole)?;
        }
    }
    Ok(())
}

fn gather(rank: &Rank, group: &dyn ProcessGroup, dtype: DType, count: usize) -> Outcome {
    let lengths = uneven(rank.world, count);
    for root in roots(rank, count) {
        let input = pattern(dtype, rank.rank, of(&lengths, rank.rank));
        let outputs = if rank.rank == root {
            zeros(dtype, &lengths)
        } else {
            Vec::new()
        };
        let tensors = group.gather(input, outputs, root)?.take()?.tensors;
        let want = if rank.rank == root {
            1 + rank.world as usize
        } else {
            1
        };
        came_back(&tensors, want)?;
        for (output, r) in tensors.iter().skip(1).zip(0..) {
            ensure!(output.count() == of(&lengths, r), "output {r} has another length");
            check_pattern("gather", dtype, output.bytes(), r, 0)?;
        }
    }
    Ok(())
}

fn scatter(rank: &Rank, group: &dyn ProcessGroup, dtype: DType, count: usize) -> Outcome {
    let lengths = uneven(rank.world, count);
    for root in roots(rank, count) {
        // Part r is the beginning of pattern r + 10, so parts cannot be confused.
        let inputs = if rank.rank == root {
            (0..rank.world)
                .map(|r| pattern(dtype, r + 10, of(&lengths, r)))
                .collect()
        } else {
            Vec::new()
        };
        let output = Tensor::zeros(dtype, of(&lengths, rank.rank));
        let result = group.scatter(inputs, output, root)?.take_tensor()?;
        ensure!(
            result.count() == of(&lengths, rank.rank),
            "the output has another length"
        );
        check_pattern("scatter", dtype, result.bytes(), rank.rank + 10, 0)?;
    }
    Ok(())
}

/// Elements that `from` sends to `to`.
fn amount(count: usize, from: u32, to: u32) -> usize {
    (count + from as usize * 3 + to as usize) % (count + 2)
}

/// Names a pair of ranks in a pattern.
fn pair_id(from: u32, to: u32) -> u32 {
    from * 16 + to
}

fn all_to_all(rank: &Rank, group: &dyn ProcessGroup, dtype: DType, count: usize) -> Outcome {
    let me = rank.rank;
    let inputs = (0..rank.world)
        .map(|to| pattern(dtype, pair_id(me, to), amount(count, me, to)))
        .collect();
    let outputs = (0..rank.world)
        .map(|from| Tensor::zeros(dtype, amount(count, from, me)))
        .collect();
    let tensors = group.all_to_all(inputs, outputs)?.take()?.tensors;
    came_back(&tensors, 2 * rank.world as usize)?;
    for (output, from) in tensors.iter().skip(rank.world as usize).zip(0..) {
        ensure!(
            output.count() == amount(count, from, me),
            "output {from} has another length"
        );
        check_pattern("all_to_all", dtype, output.bytes(), pair_id(from, me), 0)?;
    }
    Ok(())
}

/// One tensor with the patterns for all receivers one after the other.
fn joined(dtype: DType, parts: &[(u32, usize)]) -> Tensor {
    let mut out = Tensor::zeros(dtype, parts.iter().map(|p| p.1).sum());
    let bytes: Vec<u8> = parts
        .iter()
        .flat_map(|&(id, n)| pattern(dtype, id, n).bytes().to_vec())
        .collect();
    out.bytes_mut().copy_from_slice(&bytes);
    out
}

fn exchange(rank: &Rank, group: &dyn ProcessGroup, dtype: DType, count: usize, even: bool) -> Outcome {
    let me = rank.rank;
    let n = |from, to| if even { count } else { amount(count, from, to) };
    let sent: Vec<(u32, usize)> = (0..rank.world).map(|to| (pair_id(me, to), n(me, to))).collect();
    let received: Vec<usize> = (0..rank.world).map(|from| n(from, me)).collect();
    let output = Tensor::zeros(dtype, received.iter().sum());
    let (input_splits, output_splits) = if even {
        (Vec::new(), Vec::new())
    } else {
        (sent.iter().map(|s| s.1).collect(), received.clone())
    };
    let work = group.all_to_all_into(joined(dtype, &sent), output, input_splits, output_splits)?;
    let result = work.take_tensor()?;
    let mut at = 0;
    for (n, from) in received.iter().zip(0..) {
        let len = n * dtype.size();
        let bytes = result.bytes().get(at..at + len).unwrap_or(&[]);
        ensure!(bytes.len() == len, "the output is too short");
        check_pattern("all_to_all_into", dtype, bytes, pair_id(from, me), 0)?;
        at += len;
    }
    Ok(())
}

fn all_to_all_splits(rank: &Rank, group: &dyn ProcessGroup, dtype: DType, count: usize) -> Outcome {
    exchange(rank, group, dtype, count, false)
}

fn all_to_all_even(rank: &Rank, group: &dyn ProcessGroup, dtype: DType, count: usize) -> Outcome {
    exchange(rank, group, dtype, count, true)
}
