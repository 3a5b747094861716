//! All-reduce, reduce and reduce-scatter against the oracle: every dtype and operation that is advertised, with its sizes ([`sizes`]).

use std::ops::Range;

use ftcore::float_mode::foreign;
use ftcore::{
    Capabilities, Collective, DType, Error, Feature, OpKind, ProcessGroup, ProcessGroupExt, ReduceOp,
    SubmitOptions, Tensor,
};

use crate::case::{Case, Worlds};
use crate::failure::came_back;
use crate::oracle::{self, Expected, Inputs, rounded_to};
use crate::probe::summed;
use crate::sizes::{LARGE, sizes};
use crate::{Needs, Outcome, Rank};

const OPS: [ReduceOp; 9] = [
    ReduceOp::Sum,
    ReduceOp::Avg,
    ReduceOp::Product,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Band,
    ReduceOp::Bor,
    ReduceOp::Bxor,
    ReduceOp::PremulSum(0.5),
];

/// The dtypes on which the large size is tried, too.
const LARGE_DTYPES: [DType; 4] = [DType::F32, DType::BF16, DType::I64, DType::U8];
/// Those whose sums depend on the order.
const BITWISE: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];
/// Those with which contributors are counted.
const COUNTED: [DType; 3] = [DType::F32, DType::I16, DType::BF16];

type Body = fn(&Rank, &dyn ProcessGroup, DType, ReduceOp, usize, Inputs) -> Outcome;

pub(crate) fn cases(worlds: Worlds) -> Vec<Case> {
    let mut all = Vec::new();
    for &world in worlds.or(&[1, 2, 3, 4]) {
        for op in OPS {
            let name = ReduceOp::name_of(op.code());
            let forms: [(&str, OpKind, Body); 5] = [
                ("all_reduce", OpKind::AllReduce, all_reduce),
                ("reduce", OpKind::Reduce, reduce),
                ("reduce_scatter", OpKind::ReduceScatter, reduce_scatter),
                (
                    "reduce_scatter_into",
                    OpKind::ReduceScatterInto,
                    reduce_scatter_into,
                ),
                (
                    "reduce_scatter_in_place",
                    OpKind::ReduceScatterInPlace,
                    reduce_scatter_in_place,
                ),
            ];
            for (turn, (form, kind, body)) in forms.into_iter().enumerate() {
                let needs = [Needs::Op(kind), Needs::Reduce(op)];
                all.push(Case::new(
                    &format!("{form}::{name}"),
                    world,
                    &needs,
                    move |rank| {
                        let group = rank.group()?;
                        every_input(rank, group.as_ref(), op, (turn, body))
                    },
                ));
            }
        }
        let sum = [Needs::Op(OpKind::AllReduce), Needs::Reduce(ReduceOp::Sum)];
        all.push(Case::new("all_reduce::coalesced", world, &sum, coalesced));
        let same = [
            sum[0],
            Needs::ReducesOneOf(ReduceOp::Sum, &BITWISE),
            Needs::Feature(Feature::BitwiseEqual),
        ];
        all.push(Case::new(
            "all_reduce::bitwise_equal_on_all_ranks",
            world,
            &same,
            bitwise_equal,
        ));
        let premul = [
            Needs::Op(OpKind::ReduceScatter),
            Needs::Reduce(ReduceOp::PremulSum(3.0)),
        ];
        all.push(Case::new(
            "reduce_scatter::l18_premul_leaves_the_input_alone",
            world,
            &premul,
            l18_premul,
        ));
        let sharded = [
            Needs::Sum,
            Needs::Op(OpKind::ReduceScatterInPlace),
            Needs::Op(OpKind::AllGatherInPlace),
        ];
        all.push(Case::new(
            "reduce_scatter_in_place::a_part_goes_on_by_itself_and_comes_home",
            world,
            &sharded,
            sharded_step,
        ));
        let special = [
            Needs::Op(OpKind::AllReduce),
            Needs::Reduce(ReduceOp::Max),
            Needs::Reduce(ReduceOp::Sum),
        ];
        all.push(Case::new(
            "all_reduce::l16_bool_is_canonical_and_nan_propagates",
            world,
            &special,
            l16_special_values,
        ));
        let counted = [
            Needs::Op(OpKind::AllReduce),
            Needs::ReducesOneOf(ReduceOp::Avg, &COUNTED),
            Needs::Feature(Feature::Contributors),
        ];
        all.push(Case::new(
            "all_reduce::contributors_are_counted_in_the_reduction",
            world,
            &counted,
            contributors,
        ));
        let counted = [
            Needs::ReducesOneOf(ReduceOp::Avg, &[DType::F32]),
            Needs::Feature(Feature::Contributors),
            Needs::Op(OpKind::ReduceScatter),
            Needs::Op(OpKind::Reduce),
        ];
        all.push(Case::new(
            "reduce::contributors_in_reduce_and_reduce_scatter",
            world,
            &counted,
            contributors_elsewhere,
        ));
    }
    all.into_iter().map(Case::sharing).collect()
}

fn dtypes(capabilities: &Capabilities, op: ReduceOp) -> Vec<DType> {
    DType::ALL
        .into_iter()
        .filter(|d| capabilities.reduces(op, *d))
        .collect()
}

/// Runs a numbered form of `op` for all dtypes and kinds of inputs that make sense for it, and [`sizes`].
fn every_input(rank: &Rank, group: &dyn ProcessGroup, op: ReduceOp, (form, body): (usize, Body)) -> Outcome {
    for dtype in dtypes(group.capabilities(), op) {
        for count in sizes(dtype, form, rank.world) {
            body(rank, group, dtype, op, count, Inputs::Small)?;
        }
        if LARGE_DTYPES.contains(&dtype) {
            body(rank, group, dtype, op, LARGE, Inputs::Small)?;
        }
        // An average of wrapped sums is not defined; everything else is.
        if op != ReduceOp::Avg || dtype.is_float() {
            body(rank, group, dtype, op, 17, Inputs::Special)?;
            body(rank, group, dtype, op, 1000, Inputs::Special)?;
        }
        if dtype.is_float() {
            body(rank, group, dtype, op, 1000, Inputs::Fractions)?;
        }
    }
    Ok(())
}

/// Fails unless `result` is the reduction of what all ranks have at `at`.
fn check_all(
    rank: &Rank,
    group: &dyn ProcessGroup,
    (kind, dtype, op): (Inputs, DType, ReduceOp),
    at: Range<usize>,
    result: &Tensor,
) -> Outcome {
    ensure!(
        result.count() == at.len(),
        "{} elements came back of {}",
        result.count(),
        at.len()
    );
    let expected = Expected {
        kind,
        dtype,
        op,
        contributes: &vec![true; rank.world as usize],
        rounded: rounded_to(group.capabilities()),
        first: at.start,
    };
    expected.check(result)
}

fn check_contributors(group: &dyn ProcessGroup, have: u32, want: u32) -> Outcome {
    if group.capabilities().has(Feature::Contributors) {
        ensure!(have == want, "{have} contributors, expected {want}");
    }
    Ok(())
}

fn all_reduce(
    rank: &Rank,
    group: &dyn ProcessGroup,
    dtype: DType,
    op: ReduceOp,
    count: usize,
    kind: Inputs,
) -> Outcome {
    let work = group.all_reduce(oracle::tensor(kind, dtype, op, rank.rank, count), op)?;
    let result = work.take_tensor()?;
    check_contributors(group, work.contributors(), rank.world)?;
    check_all(rank, group, (kind, dtype, op), 0..count, &result)
}

fn reduce(
    rank: &Rank,
    group: &dyn ProcessGroup,
    dtype: DType,
    op: ReduceOp,
    count: usize,
    kind: Inputs,
) -> Outcome {
    // Every rank is the root once, for the small sizes; one is, for the others.
    let roots = if count <= 17 {
        0..rank.world
    } else {
        rank.world - 1..rank.world
    };
    for root in roots {
        let input = oracle::tensor(kind, dtype, op, rank.rank, count);
        let work = group.reduce(input, op, root)?;
        let result = work.take_tensor()?;
        if rank.rank == root {
            check_contributors(group, work.contributors(), rank.world)?;
            check_all(rank, group, (kind, dtype, op), 0..count, &result)?;
        } else {
            let own = oracle::tensor(kind, dtype, op, rank.rank, count);
            ensure!(
                result.bytes() == own.bytes(),
                "reduce to {root} changed the tensor of rank {}",
                rank.rank
            );
        }
    }
    Ok(())
}

/// Part lengths that differ between ranks, about `count` in all.
fn uneven(world: u32, count: usize) -> Vec<usize> {
    (0..world as usize)
        .map(|r| (count / world as usize + r * 3) % (count + 1))
        .collect()
}

fn reduce_scatter(
    rank: &Rank,
    group: &dyn ProcessGroup,
    dtype: DType,
    op: ReduceOp,
    count: usize,
    kind: Inputs,
) -> Outcome {
    let lengths = uneven(rank.world, count);
    let mut first = 0;
    let mut own_first = 0;
    let mut inputs = Vec::new();
    for (length, owner) in lengths.iter().zip(0u32..) {
        if owner == rank.rank {
            own_first = first;
        }
        inputs.push(oracle::part(kind, dtype, op, rank.rank, first..first + length));
        first += length;
    }
    let before: Vec<Vec<u8>> = inputs.iter().map(|t| t.bytes().to_vec()).collect();
    let own = lengths.get(rank.rank as usize).copied().unwrap_or(0);
    let work = group.reduce_scatter(inputs, Tensor::zeros(dtype, own), op)?;
    let mut tensors = work.take()?.tensors;
    came_back(&tensors, before.len() + 1)?;
    let result = tensors.pop().unwrap_or_else(|| Tensor::zeros(dtype, 0));
    for (after, before) in tensors.iter().zip(before) {
        ensure!(
            after.bytes() == before,
            "reduce_scatter with {op} of {dtype} changed its input"
        );
    }
    check_contributors(group, work.contributors(), rank.world)?;
    check_all(
        rank,
        group,
        (kind, dtype, op),
        own_first..own_first + own,
        &result,
    )
}

fn reduce_scatter_into(
    rank: &Rank,
    group: &dyn ProcessGroup,
    dtype: DType,
    op: ReduceOp,
    count: usize,
    kind: Inputs,
) -> Outcome {
    // Two pairs as one operation; the second begins where the first one's inputs end.
    let world = rank.world as usize;
    let (a, b) = (count / world, 3);
    let pairs = [(0, a), (a * world, b)]
        .map(|(first, n)| {
            let input = oracle::part(kind, dtype, op, rank.rank, first..first + n * world);
            (input, Tensor::zeros(dtype, n))
        })
        .into_iter()
        .collect();
    let work = group.reduce_scatter_into_coalesced(pairs, op)?;
    let tensors = work.take()?.tensors;
    came_back(&tensors, 4)?;
    check_contributors(group, work.contributors(), rank.world)?;
    for (pair, (first, n)) in tensors.chunks_exact(2).zip([(0, a), (a * world, b)]) {
        let [input, output] = pair else { continue };
        let unchanged = oracle::part(kind, dtype, op, rank.rank, first..first + n * world);
        ensure!(
            input.bytes() == unchanged.bytes(),
            "reduce_scatter_into changed its input"
        );
        let own = first + rank.rank as usize * n;
        check_all(rank, group, (kind, dtype, op), own..own + n, output)?;
    }
    Ok(())
}

/// This rank's part of what has one for each rank, and what is on both sides of it.
fn own_part(rank: &Rank, whole: Tensor) -> Outcome<(Tensor, Tensor, Tensor)> {
    let n = whole.count() / rank.world as usize;
    let (before, rest) = whole.split_at(rank.rank as usize * n).map_err(Error::from)?;
    let (own, after) = rest.split_at(n).map_err(Error::from)?;
    Ok((before, own, after))
}

fn reduce_scatter_in_place(
    rank: &Rank,
    group: &dyn ProcessGroup,
    dtype: DType,
    op: ReduceOp,
    count: usize,
    kind: Inputs,
) -> Outcome {
    // Two tensors as one operation; the second begins where the first one ends.
    let world = rank.world as usize;
    let (a, b) = (count / world, 3);
    let places = [(0, a), (a * world, b)];
    let tensors = places.map(|(first, n)| oracle::part(kind, dtype, op, rank.rank, first..first + n * world));
    let work = group.reduce_scatter_in_place_coalesced(tensors.into(), op)?;
    let tensors = work.take()?.tensors;
    came_back(&tensors, 2)?;
    check_contributors(group, work.contributors(), rank.world)?;
    for (tensor, (first, n)) in tensors.into_iter().zip(places) {
        let (_, own, _) = own_part(rank, tensor)?;
        let first = first + rank.rank as usize * n;
        check_all(rank, group, (kind, dtype, op), first..first + n, &own)?;
    }
    Ok(())
}

/// As sharded training does within replicas and across them: gradients are reduced in place, this rank's part goes on by itself, and
/// the whole is gathered where it was.
fn sharded_step(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    let dtype = summed(group.capabilities(), DType::F32).unwrap_or(DType::F32);
    let (op, kind, world) = (ReduceOp::Sum, Inputs::Small, rank.world as usize);
    for n in [1usize, 1000, LARGE / world] {
        let whole = oracle::tensor(kind, dtype, op, rank.rank, n * world);
        let address = whole.as_ptr();
        let whole = group.reduce_scatter_in_place(whole, op)?.take_tensor()?;
        let (before, own, after) = own_part(rank, whole)?;
        let own = group.all_reduce(own, op)?.take_tensor()?;
        let whole = before.join(own).map_err(Error::from)?;
        let whole = whole.join(after).map_err(Error::from)?;
        let whole = group.all_gather_in_place(whole)?.take_tensor()?;
        ensure!(
            (whole.count(), whole.as_ptr()) == (n * world, address),
            "other memory came back than was given"
        );
        let all_of = |values: &mut dyn Iterator<Item = oracle::Value>| {
            oracle::reduce(dtype, op, &values.collect::<Vec<_>>(), rank.world)
        };
        let sum = |j: usize| all_of(&mut (0..rank.world).map(|r| oracle::input(kind, dtype, op, r, j)));
        // Every rank's part holds the same.
        let part: Vec<_> = (0..n)
            .map(|i| all_of(&mut (0..world).map(|r| sum(r * n + i))))
            .collect();
        let wanted = part.iter().cycle();
        for ((i, slot), want) in whole.bytes().chunks_exact(dtype.size()).enumerate().zip(wanted) {
            let have = oracle::load(dtype, slot);
            ensure!(have == *want, "element {i} is {have:?}, expected {want:?}");
        }
    }
    Ok(())
}

fn coalesced(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    let offered = OPS.map(|op| {
        dtypes(group.capabilities(), op)
            .into_iter()
            .map(move |dtype| (op, dtype))
    });
    for (op, dtype) in offered.into_iter().flatten() {
        let counts = [3usize, 0, 1000, 1, 20_001];
        let tensors = counts
            .iter()
            .map(|&n| oracle::tensor(Inputs::Small, dtype, op, rank.rank, n))
            .collect();
        let work = group.all_reduce_coalesced(tensors, op)?;
        let results = work.take()?.tensors;
        came_back(&results, counts.len())?;
        for (result, count) in results.iter().zip(counts) {
            check_all(rank, group.as_ref(), (Inputs::Small, dtype, op), 0..count, result)?;
        }
    }
    Ok(())
}

/// INV-3: with values whose sum depends on the order, every rank has the same bits.
/// A program may have set how its threads flush and round (`ftcore::float_mode`), here on each rank in another way, also while it makes its
/// group.
fn bitwise_equal(rank: &Rank) -> Outcome {
    let [flush, toward_zero] = foreign::MODES;
    let mode = match rank.rank % 3 {
        0 => 0,
        1 => toward_zero,
        _ => flush,
    };
    foreign::with(mode, || bitwise_equal_in_its_mode(rank))
}

fn bitwise_equal_in_its_mode(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    for dtype in BITWISE {
        for (op, count) in [
            (ReduceOp::Sum, 5usize),
            (ReduceOp::Sum, 1000),
            (ReduceOp::Avg, 1000),
            (ReduceOp::Sum, 70_001),
        ] {
            if !group.capabilities().reduces(op, dtype) {
                continue;
            }
            let tensor = oracle::tensor(Inputs::Fractions, dtype, op, rank.rank, count);
            let result = group.all_reduce(tensor, op)?.take_tensor()?;
            ensure!(
                result.count() == count,
                "{} elements came back of {count}",
                result.count()
            );
            let key = |r: u32| format!("bits/{dtype}/{op}/{count}/{r}");
            rank.store.set(&key(rank.rank), result.bytes(), rank.soon())?;
            let first = rank.store.get(&key(0), rank.soon())?;
            ensure!(
                first == result.bytes(),
                "rank {} and rank 0 differ in the {op} of {dtype} × {count}",
                rank.rank
            );
        }
    }
    Ok(())
}

fn l18_premul(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    let op = ReduceOp::PremulSum(3.0);
    for dtype in dtypes(group.capabilities(), op) {
        reduce_scatter(rank, group.as_ref(), dtype, op, 100, Inputs::Small)?;
        if group.capabilities().ops.contains(OpKind::Reduce) {
            reduce(rank, group.as_ref(), dtype, op, 16, Inputs::Small)?;
        }
    }
    Ok(())
}

fn l16_special_values(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    for op in OPS {
        for dtype in dtypes(group.capabilities(), op) {
            if op == ReduceOp::Avg && !dtype.is_float() {
                continue;
            }
            // 26 elements: every rank has the NaN at every place once.
            all_reduce(rank, group.as_ref(), dtype, op, 26, Inputs::Special)?;
            if dtype == DType::Bool {
                let tensor = oracle::tensor(Inputs::Special, dtype, op, rank.rank, 5000);
                let result = group.all_reduce(tensor, op)?.take_tensor()?;
                ensure!(
                    result.bytes().iter().all(|b| *b <= 1),
                    "{op} leaves a bool that is neither 0 nor 1"
                );
            }
        }
    }
    Ok(())
}

/// Who contributes, as bits: everything that can be in a small world, of a large one what is different in kind.
fn subsets(world: u32) -> Vec<u32> {
    let all = (1u32 << world) - 1;
    match world {
        ..=4 => (0..=all).collect(),
        _ => vec![0, all, 1, all ^ 1, 1 << (world - 1), all >> 1, all & 0b0101_0101],
    }
}

/// Every subset of ranks contributes once, and none at all.
fn contributors(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    let rounded = rounded_to(group.capabilities());
    for subset in subsets(rank.world) {
        let contributes: Vec<bool> = (0..rank.world).map(|r| subset & (1 << r) != 0).collect();
        let options = SubmitOptions {
            contribute: subset & (1 << rank.rank) != 0,
            ..SubmitOptions::by(rank.soon())
        };
        for op in [
            ReduceOp::Avg,
            ReduceOp::Sum,
            ReduceOp::Min,
            ReduceOp::Product,
            ReduceOp::Band,
        ] {
            for dtype in COUNTED {
                if !group.capabilities().reduces(op, dtype) {
                    continue;
                }
                // A blocking call may take a way of its own, and meet a peer that submitted: abstaining or not.
                for (count, blocks) in [1usize, 100, 40_000]
                    .into_iter()
                    .flat_map(|count| [(count, false), (count, true)])
                {
                    let tensors = vec![oracle::tensor(Inputs::Small, dtype, op, rank.rank, count)];
                    let all_reduce = Collective::AllReduce { tensors, op };
                    let (result, contributors) = if blocks {
                        let done = group
                            .run_blocking(all_reduce, options.clone())
                            .map_err(Error::from)?;
                        let contributors = done.contributors;
                        (done.into_tensor()?, contributors)
                    } else {
                        let work = group.run(all_reduce, options.clone())?;
                        (work.take_tensor()?, work.contributors())
                    };
                    ensure!(
                        contributors == subset.count_ones(),
                        "{contributors} contributors of subset {subset:b}, blocking: {blocks}"
                    );
                    let expected = Expected {
                        kind: Inputs::Small,
                        dtype,
                        op,
                        contributes: &contributes,
                        rounded,
                        first: 0,
                    };
                    expected.check(&result)?;
                }
            }
        }
    }
    Ok(())
}

fn contributors_elsewhere(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    let (op, dtype, kind) = (ReduceOp::Avg, DType::F32, Inputs::Small);
    let rounded = rounded_to(group.capabilities());
    for subset in subsets(rank.world) {
        let contributes: Vec<bool> = (0..rank.world).map(|r| subset & (1 << r) != 0).collect();
        let options = || SubmitOptions {
            contribute: subset & (1 << rank.rank) != 0,
            ..SubmitOptions::by(rank.soon())
        };
        let tensor = oracle::tensor(kind, dtype, op, rank.rank, 33);
        let work = group.run(Collective::Reduce { tensor, op, root: 0 }, options())?;
        let result = work.take_tensor()?;
        let expected = |first| Expected {
            kind,
            dtype,
            op,
            contributes: &contributes,
            rounded,
            first,
        };
        if rank.rank == 0 {
            ensure!(
                work.contributors() == subset.count_ones(),
                "reduce: {} contributors",
                work.contributors()
            );
            expected(0).check(&result)?;
        }
        let inputs: Vec<Tensor> = (0..rank.world as usize)
            .map(|r| oracle::part(kind, dtype, op, rank.rank, r * 50..(r + 1) * 50))
            .collect();
        let output = Tensor::zeros(dtype, 50);
        let work = group.run(Collective::ReduceScatter { inputs, output, op }, options())?;
        let result = work.take_tensor()?;
        ensure!(
            work.contributors() == subset.count_ones(),
            "reduce_scatter: {} contributors",
            work.contributors()
        );
        expected(rank.rank as usize * 50).check(&result)?;
        let all = || oracle::tensor(kind, dtype, op, rank.rank, 50 * rank.world as usize);
        if group.capabilities().ops.contains(OpKind::ReduceScatterInto) {
            let pairs = vec![(all(), Tensor::zeros(dtype, 50))];
            let work = group.run(Collective::ReduceScatterInto { pairs, op }, options())?;
            let tensors = work.take()?.tensors;
            came_back(&tensors, 2)?;
            ensure!(
                work.contributors() == subset.count_ones(),
                "reduce_scatter_into: {} contributors",
                work.contributors()
            );
            // Behind its input.
            let mut outputs = tensors.iter().skip(1);
            outputs.try_for_each(|output| expected(rank.rank as usize * 50).check(output))?;
        }
        if !group.capabilities().ops.contains(OpKind::ReduceScatterInPlace) {
            continue;
        }
        let tensors = vec![all()];
        let work = group.run(Collective::ReduceScatterInPlace { tensors, op }, options())?;
        let (_, own, _) = own_part(rank, work.take_tensor()?)?;
        ensure!(
            work.contributors() == subset.count_ones(),
            "reduce_scatter_in_place: {} contributors",
            work.contributors()
        );
        expected(rank.rank as usize * 50).check(&own)?;
    }
    Ok(())
}
