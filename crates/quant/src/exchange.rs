//! The quantised collectives as sequences of byte collectives of the group below.
//!
//! All-reduce, two ranks: every rank encodes once, the bytes are all-gathered, and every rank sums in rank order. From three on, two
//! shots: the parts go to their owners (all-to-all), which sum in f32 in rank order, encode the result and all-gather it. Reduce-scatter
//! is the first shot alone. Whoever makes bytes decodes them like everybody else, so that all ranks hold the same bits (INV-3).

use std::ops::Range;

use ftcore::{Collective, DType, Device, Error, ErrorKind, ReduceOp, Result, Tensor};

use crate::chunk::{Frame, Shot};
use crate::codec::Codec;
use crate::feedback::{Debts, ErrorFeedback, Slot};
use crate::kernels::Piece;
use crate::options::Accuracy;
use crate::plan::{Plan, Shape};

/// Where the rank stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) rank: u32,
    pub(crate) world: u32,
}

/// What an operation found out besides the values.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) contributors: u32,
    pub(crate) non_finite: usize,
}

/// Runs one collective of the group below; gives back its tensors.
pub(crate) type Run<'a> = dyn FnMut(Collective) -> Result<Vec<Tensor>> + 'a;

/// One quantised operation.
pub(crate) struct Exchange<'a> {
    pub(crate) frame: Frame<'a>,
    pub(crate) place: Place,
    pub(crate) accuracy: Accuracy,
    pub(crate) contribute: bool,
    pub(crate) feedback: Option<(&'a ErrorFeedback, &'a Slot)>,
}

/// Values per part, so that only the last one has a short block or row.
const fn unit(codec: Codec) -> usize {
    match codec {
        Codec::RowE4M3 { row } | Codec::RowInt8 { row } => row.get() as usize,
        _ => 128,
    }
}

/// The elements of all pieces.
fn total(pieces: &[Piece]) -> usize {
    pieces.iter().map(|p| p.range.len()).sum()
}

fn last(tensors: Vec<Tensor>) -> Result<Tensor> {
    tensors
        .into_iter()
        .next_back()
        .ok_or_else(|| Error::new(ErrorKind::Internal, "the group below gave no tensors back"))
}

/// The one f32 tensor that `pieces` are all of, if so: it needs no copy.
fn single(tensors: &[Tensor], pieces: &[Piece]) -> Option<usize> {
    match pieces {
        [Piece { tensor, range }] => tensors
            .get(*tensor)
            .is_some_and(|t| t.dtype() == DType::F32 && *range == (0..t.count()))
            .then_some(*tensor),
        _ => None,
    }
}

impl Exchange<'_> {
    /// Carries `plan` out on `tensors`.
    pub(crate) fn carry_out(
        &self,
        plan: &Plan,
        tensors: &mut [Tensor],
        run: &mut Run<'_>,
    ) -> Result<Outcome> {
        let none = Vec::new();
        let source = plan.sources.first().unwrap_or(&none);
        match plan.shape {
            Shape::AllReduce(op) => {
                self.with_values(tensors, source, true, |x, values| x.all_reduce(op, values, run))
            }
            Shape::ReduceScatter(op) => self.reduce_scatter(op, plan, tensors, run),
            Shape::AllGather => self.all_gather(plan, tensors, run),
            Shape::Broadcast(root) => {
                let read = self.place.rank == root;
                self.with_values(tensors, source, read, |x, values| x.broadcast(root, values, run))
            }
        }
    }

    /// Calls `f` with the values of `pieces` as one f32 tensor, which becomes theirs. Without `read` the values are not looked at before.
    fn with_values<T>(
        &self,
        tensors: &mut [Tensor],
        pieces: &[Piece],
        read: bool,
        f: impl FnOnce(&Self, &mut Tensor) -> Result<T>,
    ) -> Result<T> {
        if let Some(index) = single(tensors, pieces)
            && let Some(values) = tensors.get_mut(index)
        {
            return f(self, values);
        }
        let mut values = if read {
            self.frame.kernels.gather(tensors, pieces)?
        } else {
            self.zeros(tensors, total(pieces))?
        };
        let result = f(self, &mut values)?;
        self.frame.kernels.scatter(&values, tensors, pieces)?;
        Ok(result)
    }

    fn zeros(&self, tensors: &[Tensor], count: usize) -> Result<Tensor> {
        let device = tensors.first().map_or(&Device::CPU, Tensor::device);
        self.frame.kernels.zeros(device, count)
    }

    /// The ranks' parts of `count` values.
    fn parts(&self, count: usize) -> Vec<Range<usize>> {
        let world = self.place.world.max(1) as usize;
        let size = count.div_ceil(world).next_multiple_of(unit(self.frame.codec));
        (0..world)
            .map(|rank| (size * rank).min(count)..(size * (rank + 1)).min(count))
            .collect()
    }

    /// Encodes `parts` of this rank's `values`, one chunk each. With `owed`, those debts are paid first, and what rounding takes is owed then.
    fn encode(
        &self,
        shot: Shot,
        contributors: u32,
        values: &Tensor,
        parts: &[Range<usize>],
        owed: Option<&mut Vec<f32>>,
    ) -> Result<(Vec<u8>, usize)> {
        let frame = &self.frame;
        let mut bytes = Vec::with_capacity(parts.iter().map(|p| frame.len(p.len())).sum());
        let mut non_finite = 0;
        // Whoever contributes nothing pays nothing.
        let Some(owed) = owed.filter(|_| contributors > 0) else {
            for part in parts {
                non_finite += frame.write(shot, contributors, values, part.clone(), &mut bytes)?;
            }
            return Ok((bytes, non_finite));
        };
        let mut whole = std::mem::take(owed);
        for (debt, value) in whole.iter_mut().zip(values.as_slice::<f32>()?) {
            *debt += value;
        }
        let whole = Tensor::from_vec(whole);
        for part in parts {
            non_finite += frame.write(shot, contributors, &whole, part.clone(), &mut bytes)?;
        }
        let mut received = Tensor::zeros(DType::F32, whole.count());
        let mut rest = bytes.as_slice();
        for part in parts {
            let (chunk, behind) = rest
                .split_at_checked(frame.len(part.len()))
                .unwrap_or((rest, &[]));
            rest = behind;
            let opened = frame.open(chunk, shot, part.len(), contributors)?;
            frame.read(opened, false, &mut received, part.clone())?;
        }
        *owed = whole.into_vec::<f32>()?;
        for (sent, received) in owed.iter_mut().zip(received.as_slice::<f32>()?) {
            *sent -= received;
        }
        Ok((bytes, non_finite))
    }

    /// What this rank owes of `count` values if it sums `part` of them; `None` without error feedback.
    fn debts(&self, count: usize, part: &Range<usize>) -> Option<Debts> {
        self.feedback.map(|(f, slot)| f.debts(slot, count, part))
    }

    /// What this rank owes after an operation that worked.
    fn owe(&self, debts: Option<Debts>) {
        if let Some(((feedback, slot), debts)) = self.feedback.zip(debts) {
            feedback.put(slot, debts);
        }
    }

    /// Sums the contributed `chunks` in rank order into `out`; an average is divided.
    fn sum(&self, chunks: &mut dyn Iterator<Item = &[u8]>, op: ReduceOp, out: &mut Tensor) -> Result<u32> {
        let count = out.count();
        let mut contributors = 0;
        for (rank, chunk) in (0u32..).zip(chunks) {
            let named = |e: Error| e.with_peer(rank);
            let opened = self.frame.open(chunk, Shot::Inputs, count, 1).map_err(named)?;
            let contributes = opened.contributors == 1;
            self.frame
                .read(opened, contributors > 0, out, 0..count)
                .map_err(named)?;
            contributors += u32::from(contributes);
        }
        if contributors == 0 {
            // A reduction of nothing is zero, as in the group below.
            *out = self.frame.kernels.zeros(out.device(), count)?;
        } else if op == ReduceOp::Avg {
            self.frame.kernels.divide(out, contributors as f32)?;
        }
        Ok(contributors)
    }

    /// Sends chunk r of `bytes` to rank r; the chunks that come in, `length` bytes each.
    fn exchange(
        &self,
        bytes: Vec<u8>,
        lengths: Vec<usize>,
        length: usize,
        run: &mut Run<'_>,
    ) -> Result<Tensor> {
        let world = self.place.world as usize;
        last(run(Collective::AllToAllInto {
            input: Tensor::from_vec(bytes),
            output: Tensor::zeros(DType::U8, length * world),
            input_splits: lengths,
            output_splits: vec![length; world],
        })?)
    }

    /// Gathers everybody's chunk; rank r's has `lengths[r]` bytes.
    fn gather(&self, bytes: Vec<u8>, lengths: &[usize], run: &mut Run<'_>) -> Result<Vec<Tensor>> {
        let mut tensors = run(Collective::AllGather {
            input: Tensor::from_vec(bytes),
            outputs: lengths.iter().map(|&n| Tensor::zeros(DType::U8, n)).collect(),
        })?;
        let outputs = tensors.split_off(1.min(tensors.len()));
        if outputs.len() == lengths.len() {
            return Ok(outputs);
        }
        Err(Error::new(
            ErrorKind::Internal,
            "the group below lost tensors of an all_gather",
        ))
    }

    fn all_reduce(&self, op: ReduceOp, values: &mut Tensor, run: &mut Run<'_>) -> Result<Outcome> {
        let frame = &self.frame;
        let own = u32::from(self.contribute);
        let count = values.count();
        let world = self.place.world as usize;
        if world == 2 || self.accuracy == Accuracy::Best {
            let length = frame.len(count);
            let mut debts = self.debts(count, &(0..0));
            let owed = debts.as_mut().map(|d| &mut d.contributed);
            let whole = 0..count;
            let (bytes, non_finite) =
                self.encode(Shot::Inputs, own, values, std::slice::from_ref(&whole), owed)?;
            let output = Tensor::zeros(DType::U8, length * world);
            let pairs = vec![(Tensor::from_vec(bytes), output)];
            let gathered = last(run(Collective::AllGatherInto { pairs })?)?;
            let contributors = self.sum(&mut gathered.bytes().chunks(length), op, values)?;
            self.owe(debts);
            return Ok(Outcome {
                contributors,
                non_finite,
            });
        }

        let parts = self.parts(count);
        let lengths: Vec<usize> = parts.iter().map(|p| frame.len(p.len())).collect();
        let mine = parts.get(self.place.rank as usize).cloned().unwrap_or_default();
        let length = frame.len(mine.len());
        let mut debts = self.debts(count, &mine);
        let owed = debts.as_mut().map(|d| &mut d.contributed);
        let (bytes, non_finite) = self.encode(Shot::Inputs, own, values, &parts, owed)?;
        let exchanged = self.exchange(bytes, lengths.clone(), length, run)?;
        let mut sum = frame.kernels.zeros(values.device(), mine.len())?;
        let contributors = self.sum(&mut exchanged.bytes().chunks(length), op, &mut sum)?;
        drop(exchanged);

        // At least one, so that the zeros of a reduction of nothing are written like any values.
        let counted = contributors.max(1);
        // Debts are in units of a contribution, of which an average is only a part.
        let share = if op == ReduceOp::Avg { counted as f32 } else { 1.0 };
        let mut owed = debts.as_mut().map(|d| &mut d.summed);
        if let Some(owed) = &mut owed {
            owed.iter_mut().for_each(|d| *d /= share);
        }
        let whole = 0..mine.len();
        let (bytes, _) = self.encode(Shot::Results, counted, &sum, std::slice::from_ref(&whole), owed)?;
        let outputs = self.gather(bytes, &lengths, run)?;
        for (rank, (chunk, part)) in (0u32..).zip(outputs.iter().zip(parts)) {
            let named = |e: Error| e.with_peer(rank);
            let opened = frame
                .open(chunk.bytes(), Shot::Results, part.len(), self.place.world)
                .map_err(named)?;
            if opened.contributors != counted {
                let text = format!(
                    "counted {} contributors, this rank {counted}",
                    opened.contributors
                );
                return Err(named(Error::new(ErrorKind::Protocol, text)));
            }
            frame.read(opened, false, values, part).map_err(named)?;
        }
        if let Some(debts) = &mut debts {
            debts.summed.iter_mut().for_each(|d| *d *= share);
        }
        self.owe(debts);
        Ok(Outcome {
            contributors,
            non_finite,
        })
    }

    fn reduce_scatter(
        &self,
        op: ReduceOp,
        plan: &Plan,
        tensors: &mut [Tensor],
        run: &mut Run<'_>,
    ) -> Result<Outcome> {
        let frame = &self.frame;
        let own = u32::from(self.contribute);
        let counts: Vec<usize> = plan.sources.iter().map(|pieces| total(pieces)).collect();
        let lengths: Vec<usize> = counts.iter().map(|&n| frame.len(n)).collect();
        let all = plan.sources.concat();
        // One tensor whose parts are in order needs no copy; anything else is gathered first.
        let whole = match all.as_slice() {
            [first, ..]
                if in_order(&all) && tensors.get(first.tensor).is_some_and(|t| t.dtype() == DType::F32) =>
            {
                None
            }
            _ => Some(frame.kernels.gather(tensors, &all)?),
        };
        let values = match (&whole, all.first()) {
            (Some(whole), _) => Some(whole),
            (None, Some(first)) => tensors.get(first.tensor),
            (None, None) => None,
        };
        let Some(values) = values else {
            return Err(Error::new(
                ErrorKind::Internal,
                "a reduce_scatter without tensors",
            ));
        };
        let mut from = 0;
        let parts: Vec<_> = counts
            .iter()
            .map(|n| {
                from += n;
                from - n..from
            })
            .collect();
        let mut debts = self.debts(values.count(), &(0..0));
        let owed = debts.as_mut().map(|d| &mut d.contributed);
        let (bytes, non_finite) = self.encode(Shot::Inputs, own, values, &parts, owed)?;
        drop(whole);
        let mine = counts.get(self.place.rank as usize).copied().unwrap_or(0);
        let length = frame.len(mine);
        let exchanged = self.exchange(bytes, lengths, length, run)?;
        let none = Vec::new();
        let target = plan.targets.first().unwrap_or(&none);
        let outcome = self.with_values(tensors, target, false, |x, sum| {
            let contributors = x.sum(&mut exchanged.bytes().chunks(length), op, sum)?;
            Ok(Outcome {
                contributors,
                non_finite,
            })
        })?;
        self.owe(debts);
        Ok(outcome)
    }

    fn all_gather(&self, plan: &Plan, tensors: &mut [Tensor], run: &mut Run<'_>) -> Result<Outcome> {
        let frame = &self.frame;
        let none = Vec::new();
        let source = plan.sources.first().unwrap_or(&none);
        let count = total(source);
        let mut bytes = Vec::with_capacity(frame.len(count));
        let gathered;
        let values = match single(tensors, source).and_then(|i| tensors.get(i)) {
            Some(tensor) => tensor,
            None => {
                gathered = frame.kernels.gather(tensors, source)?;
                &gathered
            }
        };
        let non_finite = frame.write(Shot::Inputs, 1, values, 0..count, &mut bytes)?;
        let lengths: Vec<_> = plan.targets.iter().map(|t| frame.len(total(t))).collect();
        let outputs = self.gather(bytes, &lengths, run)?;
        for (rank, (chunk, target)) in (0u32..).zip(outputs.iter().zip(&plan.targets)) {
            self.with_values(tensors, target, false, |x, values| {
                x.unpack(chunk.bytes(), values).map_err(|e| e.with_peer(rank))
            })?;
        }
        Ok(Outcome {
            contributors: 0,
            non_finite,
        })
    }

    fn broadcast(&self, root: u32, values: &mut Tensor, run: &mut Run<'_>) -> Result<Outcome> {
        let count = values.count();
        let mut outcome = Outcome::default();
        let tensor = if self.place.rank == root {
            let mut bytes = Vec::with_capacity(self.frame.len(count));
            outcome.non_finite = self.frame.write(Shot::Inputs, 1, values, 0..count, &mut bytes)?;
            Tensor::from_vec(bytes)
        } else {
            Tensor::zeros(DType::U8, self.frame.len(count))
        };
        let tensors = vec![tensor];
        let received = last(run(Collective::Broadcast { tensors, root })?)?;
        self.unpack(received.bytes(), values)
            .map_err(|e| e.with_peer(root))?;
        Ok(outcome)
    }

    /// Writes the values of one rank's chunk.
    fn unpack(&self, chunk: &[u8], values: &mut Tensor) -> Result<()> {
        let count = values.count();
        let opened = self.frame.open(chunk, Shot::Inputs, count, 1)?;
        if opened.contributors != 1 {
            return Err(Error::new(ErrorKind::Protocol, "sent a chunk without values"));
        }
        self.frame.read(opened, false, values, 0..count)
    }
}

/// True if the pieces are one tensor from its beginning, without gaps.
fn in_order(pieces: &[Piece]) -> bool {
    let mut end = 0;
    pieces.iter().all(|p| {
        let fits = p.tensor == pieces.first().map_or(0, |f| f.tensor) && p.range.start == end;
        end = p.range.end;
        fits
    })
}
