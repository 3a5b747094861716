//! The quantised all-reduce as a sequence of byte collectives of the group below.
//!
//! Two ranks: every rank encodes once, the bytes are all-gathered, and every rank sums in rank order. From three on, two
//! shots: the parts go to their owners (all-to-all), which sum in f32 in rank order, encode the result and all-gather it; the owner
//! decodes its own bytes like everybody else, so that all ranks hold the same bits (INV-3).

use std::ops::Range;

use ftcore::{Collective, DType, Error, ErrorKind, ReduceOp, Result, Tensor};

use crate::chunk::Frame;

/// Parts begin at multiples of this, so that only the last one has a short block.
const UNIT: usize = 128;

/// Where the rank stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) rank: u32,
    pub(crate) world: u32,
}

impl Place {
    /// The part of `count` values that `rank` owns.
    fn part(self, rank: u32, count: usize) -> Range<usize> {
        let size = count.div_ceil(self.world.max(1) as usize).next_multiple_of(UNIT);
        let from = (size * rank as usize).min(count);
        from..(from + size).min(count)
    }
}

/// What a reduction found out besides the values.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) contributors: u32,
    pub(crate) non_finite: usize,
}

/// Runs one collective of the group below; gives back its tensors.
pub(crate) type Run<'a> = dyn FnMut(Collective) -> Result<Vec<Tensor>> + 'a;

/// Sums the contributed `chunks` in rank order into `out`; an average is divided.
fn sum(
    frame: &Frame<'_>,
    chunks: &mut dyn Iterator<Item = &[u8]>,
    op: ReduceOp,
    out: &mut [f32],
) -> Result<u32> {
    let mut contributors = 0;
    for (rank, chunk) in (0u32..).zip(chunks) {
        let named = |e: Error| e.with_peer(rank);
        let (count, bytes) = frame.open(chunk, 1).map_err(named)?;
        if count == 1 {
            frame.read(bytes, contributors > 0, out).map_err(named)?;
            contributors += 1;
        }
    }
    if contributors == 0 {
        // A reduction of nothing is zero, as in the group below.
        out.fill(0.0);
    } else if op == ReduceOp::Avg {
        let divisor = contributors as f32;
        out.iter_mut().for_each(|v| *v /= divisor);
    }
    Ok(contributors)
}

fn last(tensors: Vec<Tensor>) -> Result<Tensor> {
    tensors
        .into_iter()
        .next_back()
        .ok_or_else(|| Error::new(ErrorKind::Internal, "the group below gave no tensors back"))
}

/// Reduces `values` in place over at least two ranks.
pub(crate) fn all_reduce(
    frame: &Frame<'_>,
    place: Place,
    op: ReduceOp,
    contribute: bool,
    values: &mut [f32],
    run: &mut Run<'_>,
) -> Result<Outcome> {
    let own = u32::from(contribute);
    let mut outcome = Outcome::default();
    if place.world == 2 {
        let length = frame.len(values.len());
        let mut bytes = Vec::with_capacity(length);
        outcome.non_finite = frame.write(own, values, &mut bytes)?;
        let output = Tensor::zeros(DType::U8, length * 2);
        let pairs = vec![(Tensor::from_vec(bytes), output)];
        let gathered = last(run(Collective::AllGatherInto { pairs })?)?;
        outcome.contributors = sum(frame, &mut gathered.bytes().chunks(length), op, values)?;
        return Ok(outcome);
    }

    let ranks = 0..place.world;
    let lengths: Vec<usize> = ranks
        .clone()
        .map(|r| frame.len(place.part(r, values.len()).len()))
        .collect();
    let mine = place.part(place.rank, values.len());
    let length = frame.len(mine.len());
    let mut bytes = Vec::with_capacity(lengths.iter().sum());
    for rank in ranks.clone() {
        let part = values.get(place.part(rank, values.len())).unwrap_or_default();
        outcome.non_finite += frame.write(own, part, &mut bytes)?;
    }
    let exchanged = last(run(Collective::AllToAllInto {
        input: Tensor::from_vec(bytes),
        output: Tensor::zeros(DType::U8, length * place.world as usize),
        input_splits: lengths.clone(),
        output_splits: vec![length; place.world as usize],
    })?)?;
    let mut part = vec![0.0; mine.len()];
    outcome.contributors = sum(frame, &mut exchanged.bytes().chunks(length), op, &mut part)?;
    drop(exchanged);

    let mut bytes = Vec::with_capacity(length);
    // At least one, so that the zeros of a reduction of nothing are written like any values.
    frame.write(outcome.contributors.max(1), &part, &mut bytes)?;
    let mut tensors = run(Collective::AllGather {
        input: Tensor::from_vec(bytes),
        outputs: lengths.iter().map(|&n| Tensor::zeros(DType::U8, n)).collect(),
    })?;
    let outputs = tensors.split_off(1.min(tensors.len()));
    for (rank, chunk) in ranks.zip(&outputs) {
        let named = |e: Error| e.with_peer(rank);
        let (count, bytes) = frame.open(chunk.bytes(), place.world).map_err(named)?;
        if count != outcome.contributors.max(1) {
            let text = format!("counted {count} contributors, this rank {}", outcome.contributors);
            return Err(named(Error::new(ErrorKind::Protocol, text)));
        }
        if let Some(to) = values.get_mut(place.part(rank, values.len())) {
            frame.read(bytes, false, to).map_err(named)?;
        }
    }
    Ok(outcome)
}
