//! The quantised collectives as sequences of byte collectives of the group below.
//!
//! All-reduce, two ranks: every rank encodes once, the bytes are all-gathered, and every rank sums in rank order. From three on, two
//! phases: the parts go to their owners (all-to-all), which sum in f32 in rank order, encode the result and all-gather it. Reduce-scatter
//! is the first phase alone. The rank that makes bytes decodes them like all others, so that all ranks hold the same bits (INV-3).
//!
//! Reductions go slice by slice of every part, several in flight: while slices are on the wire, those behind them are encoded and those before
//! them summed. A rank that has all in one phase waits for none before its window is full ([`at_once`]); in two phases, whose steps
//! must come in the same order on all ranks, two slices of each are under way. The order of the steps and where slices are cut follow
//! from the call alone, and no block lies in two of them: the bits are those of one slice.

use std::collections::VecDeque;
use std::ops::Range;

use ftcore::engine::Place;
use ftcore::float_mode::DefaultMode;
use ftcore::{Collective, DType, Device, Error, ErrorKind, ReduceOp, Result, Status, Tensor, Work};

use crate::chunk::{Frame, Phase, slice};
use crate::driver::Below;
use crate::feedback::{ErrorFeedback, Residuals, Slot};
use crate::kernels::Piece;
use crate::options::Accuracy;
use crate::plan::{Plan, Shape};
use crate::slices::{Tally, at_once, cut, steps, within};

/// What an operation found out besides the values.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) contributors: u32,
    pub(crate) non_finite: usize,
}

/// One quantised operation.
pub(crate) struct Exchange<'a> {
    pub(crate) frame: Frame<'a>,
    pub(crate) place: Place,
    pub(crate) accuracy: Accuracy,
    pub(crate) contribute: bool,
    pub(crate) feedback: Option<(&'a ErrorFeedback, &'a Slot)>,
}

/// Values per part are a multiple of this, so that only the last one has a short block.
const UNIT: usize = 128;

/// The elements of all pieces.
pub(crate) fn total(pieces: &[Piece]) -> usize {
    pieces.iter().map(|p| p.range.len()).sum()
}

fn last(tensors: Vec<Tensor>) -> Result<Tensor> {
    tensors
        .into_iter()
        .next_back()
        .ok_or_else(|| Error::new(ErrorKind::Internal, "the group below gave no tensors back"))
}

fn next(begun: &mut VecDeque<Work>) -> Result<Work> {
    begun
        .pop_front()
        .ok_or_else(|| Error::new(ErrorKind::Internal, "waits for a step that was not begun"))
}

/// Steps under way, the oldest first.
struct Window {
    begun: VecDeque<Work>,
    most: usize,
}

impl Window {
    /// For steps of so many bytes.
    fn of(bytes: usize) -> Self {
        Self {
            begun: VecDeque::new(),
            most: at_once(bytes),
        }
    }

    /// The oldest step, if it is to be ended before another one begins: it is there, or the window is full, or the step that was begun last `was_last`.
    fn due(&mut self, was_last: bool) -> Option<Work> {
        let is_there = |work: &Work| !matches!(work.status(), Status::Pending);
        let due = was_last || self.begun.len() >= self.most || self.begun.front().is_some_and(is_there);
        if due { self.begun.pop_front() } else { None }
    }
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
        below: &Below<'_>,
    ) -> Result<Outcome> {
        let none = Vec::new();
        let source = plan.sources.first().unwrap_or(&none);
        match plan.shape {
            Shape::AllReduce(op) => {
                self.with_values(tensors, source, true, |x, values| x.all_reduce(op, values, below))
            }
            Shape::ReduceScatter(op) => self.reduce_scatter(op, plan, tensors, below),
            Shape::AllGather => self.all_gather(plan, tensors, below),
            Shape::Broadcast(root) => {
                let read = self.place.rank == root;
                self.with_values(tensors, source, read, |x, values| {
                    x.broadcast(root, values, below)
                })
            }
        }
    }

    /// Calls `f` with the values of `pieces` as one f32 tensor, which becomes theirs. Without `read` the values are not looked at before.
    pub(crate) fn with_values<T>(
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
    pub(crate) fn parts(&self, count: usize) -> Vec<Range<usize>> {
        let world = self.place.world.max(1) as usize;
        let size = count.div_ceil(world).next_multiple_of(UNIT);
        (0..world)
            .map(|rank| (size * rank).min(count)..(size * (rank + 1)).min(count))
            .collect()
    }

    /// Appends a chunk of `slice` of `values`, whose first value has number `first` for rounding; how many are not finite. With `owed`, those
    /// residuals, one per value, are paid first, and what rounding takes is owed then; each is so many times as large as the value that pays it.
    fn encode(
        &self,
        (phase, contributors): (Phase, u32),
        values: &Tensor,
        (slice, first): (Range<usize>, usize),
        owed: Option<(&mut [f32], f32)>,
        bytes: &mut Vec<u8>,
    ) -> Result<usize> {
        // A rank that contributes nothing pays nothing.
        let Some(owed) = owed.filter(|_| contributors > 0) else {
            return self
                .frame
                .write((phase, contributors), values, slice, first, bytes);
        };
        let _mode = DefaultMode::set();
        self.encode_owed((phase, contributors), values, (slice, first), owed, bytes)
    }

    /// In the thread's own mode for floats, so not inlined: see [`DefaultMode`].
    #[inline(never)]
    fn encode_owed(
        &self,
        (phase, contributors): (Phase, u32),
        values: &Tensor,
        (slice, first): (Range<usize>, usize),
        (owed, times): (&mut [f32], f32),
        bytes: &mut Vec<u8>,
    ) -> Result<usize> {
        let frame = &self.frame;
        let values = values.as_slice::<f32>()?.get(slice).unwrap_or_default();
        for (residual, value) in owed.iter_mut().zip(values) {
            *residual = *residual / times + value;
        }
        let whole = Tensor::from_vec(owed.to_vec());
        let all = 0..whole.count();
        let begins = bytes.len();
        let non_finite = frame.write((phase, contributors), &whole, all.clone(), first, bytes)?;
        let chunk = bytes.get(begins..).unwrap_or_default();
        let opened = frame.open(chunk, phase, whole.count(), contributors)?;
        let mut received = whole;
        frame.read(opened, false, &mut received, all)?;
        for (sent, received) in owed.iter_mut().zip(received.as_slice::<f32>()?) {
            *sent = (*sent - received) * times;
        }
        Ok(non_finite)
    }

    /// What this rank owes of `count` values if it sums `part` of them; `None` without error feedback.
    fn residuals(&self, count: usize, part: &Range<usize>) -> Option<Residuals> {
        self.feedback.map(|(f, slot)| f.residuals(slot, count, part))
    }

    /// What this rank owes after an operation that worked.
    fn owe(&self, residuals: Option<Residuals>) {
        if let Some(((feedback, slot), residuals)) = self.feedback.zip(residuals) {
            feedback.put(slot, residuals);
        }
    }

    /// Sums the contributed `chunks` in rank order into `range` of `out`; an average is divided.
    fn sum(
        &self,
        chunks: &mut dyn Iterator<Item = &[u8]>,
        op: ReduceOp,
        (out, range): (&mut Tensor, Range<usize>),
        tally: &mut Tally,
    ) -> Result<()> {
        let kernels = self.frame.kernels;
        let mut contributors = 0;
        for (rank, chunk) in (0u32..).zip(chunks) {
            let named = |e: Error| e.with_peer(rank);
            let opened = self
                .frame
                .open(chunk, Phase::Inputs, range.len(), 1)
                .map_err(named)?;
            tally.count(rank, opened.contributors).map_err(named)?;
            let contributes = opened.contributors == 1;
            self.frame
                .read(opened, contributors > 0, out, range.clone())
                .map_err(named)?;
            contributors += u32::from(contributes);
        }
        if contributors == 0 {
            // A reduction of nothing is zero, as in the group below.
            let zeros = kernels.zeros(out.device(), range.len())?;
            let whole = [Piece { tensor: 0, range }];
            kernels.scatter(&zeros, std::slice::from_mut(out), &whole)
        } else if op == ReduceOp::Avg {
            kernels.divide(out, range, contributors as f32)
        } else {
            Ok(())
        }
    }

    /// Begins to send chunk r of `bytes` to rank r, and to take in the chunks of the others, `length` bytes each.
    fn begin_exchange(
        &self,
        bytes: Vec<u8>,
        lengths: Vec<usize>,
        length: usize,
        below: &Below<'_>,
    ) -> Result<Work> {
        let world = self.place.world as usize;
        below.begin(Collective::AllToAllInto {
            input: Tensor::from_vec(bytes),
            output: Tensor::zeros(DType::U8, length * world),
            input_splits: lengths,
            output_splits: vec![length; world],
        })
    }

    /// Begins to gather every rank's chunk; rank r's has `lengths[r]` bytes.
    fn begin_gather(&self, bytes: Vec<u8>, lengths: &[usize], below: &Below<'_>) -> Result<Work> {
        below.begin(Collective::AllGather {
            input: Tensor::from_vec(bytes),
            outputs: lengths.iter().map(|&n| Tensor::zeros(DType::U8, n)).collect(),
        })
    }

    /// The chunks of `world` ranks that were gathered.
    pub(crate) fn gathered(&self, begun: &Work, below: &Below<'_>) -> Result<Vec<Tensor>> {
        let mut tensors = below.finish(begun)?;
        let outputs = tensors.split_off(1.min(tensors.len()));
        if outputs.len() == self.place.world as usize {
            return Ok(outputs);
        }
        Err(Error::new(
            ErrorKind::Internal,
            "the group below lost tensors of an all_gather",
        ))
    }

    fn all_reduce(&self, op: ReduceOp, values: &mut Tensor, below: &Below<'_>) -> Result<Outcome> {
        if self.place.world == 2 || self.accuracy == Accuracy::Best {
            self.one_phase(op, values, below)
        } else {
            self.two_shots(op, values, below)
        }
    }

    /// Every rank sums all ranks' values.
    fn one_phase(&self, op: ReduceOp, values: &mut Tensor, below: &Below<'_>) -> Result<Outcome> {
        let frame = &self.frame;
        let own = u32::from(self.contribute);
        let count = values.count();
        let world = self.place.world as usize;
        let size = slice(frame.codec, count);
        let mut residuals = self.residuals(count, &(0..0));
        let mut non_finite = 0;
        let mut tally = Tally::default();
        let mut window = Window::of(frame.len(size) * (1 + world));
        let mut summed = 0;
        let steps = steps([count], size);
        for step in 0..steps {
            let slice = cut(&(0..count), size, step);
            let length = frame.len(slice.len());
            let owed = contributed(&mut residuals, &slice);
            let mut bytes = Vec::with_capacity(length);
            let at = (slice.clone(), slice.start);
            non_finite += self.encode((Phase::Inputs, own), values, at, owed, &mut bytes)?;
            let output = Tensor::zeros(DType::U8, length * world);
            let pairs = vec![(Tensor::from_vec(bytes), output)];
            window
                .begun
                .push_back(below.begin(Collective::AllGatherInto { pairs })?);
            while let Some(begun) = window.due(step + 1 == steps) {
                let slice = cut(&(0..count), size, summed);
                summed += 1;
                let gathered = last(below.finish(&begun)?)?;
                let mut chunks = gathered.bytes().chunks(frame.len(slice.len()));
                self.sum(&mut chunks, op, (values, slice), &mut tally)?;
            }
        }
        self.owe(residuals);
        Ok(Outcome {
            contributors: tally.contributors(),
            non_finite,
        })
    }

    /// Every rank sums its part of all ranks' values.
    fn two_shots(&self, op: ReduceOp, values: &mut Tensor, below: &Below<'_>) -> Result<Outcome> {
        let frame = &self.frame;
        let own = u32::from(self.contribute);
        let count = values.count();
        let parts = self.parts(count);
        let size = slice(frame.codec, parts.first().map_or(0, Range::len));
        let mine = parts.get(self.place.rank as usize).cloned().unwrap_or_default();
        let lengths = |step: usize| -> Vec<usize> {
            let slices = parts.iter().map(|p| cut(p, size, step));
            slices.map(|s| frame.len(s.len())).collect()
        };
        let mut residuals = self.residuals(count, &mine);
        let mut non_finite = 0;
        let mut tally = Tally::default();
        let (mut inputs, mut results) = (VecDeque::new(), VecDeque::new());
        let steps = steps(parts.iter().map(Range::len), size);
        for step in 0..steps + 2 {
            if step < steps {
                let lengths = lengths(step);
                let mut bytes = Vec::with_capacity(lengths.iter().sum());
                for part in &parts {
                    let slice = cut(part, size, step);
                    let owed = contributed(&mut residuals, &slice);
                    let at = (slice.clone(), slice.start);
                    non_finite += self.encode((Phase::Inputs, own), values, at, owed, &mut bytes)?;
                }
                let length = frame.len(cut(&mine, size, step).len());
                inputs.push_back(self.begin_exchange(bytes, lengths, length, below)?);
            }
            // The sum of the slice before, while this one is on its way.
            if let Some(before) = step.checked_sub(1).filter(|s| *s < steps) {
                let slice = cut(&mine, size, before);
                let length = frame.len(slice.len());
                let exchanged = last(below.finish(&next(&mut inputs)?)?)?;
                let mut sum = frame.kernels.zeros(values.device(), slice.len())?;
                let all = 0..slice.len();
                let mut chunks = exchanged.bytes().chunks(length);
                self.sum(&mut chunks, op, (&mut sum, all.clone()), &mut tally)?;
                drop(exchanged);
                let counted = tally.shown();
                // Residuals are in units of a contribution, of which an average is only a part.
                let share = if op == ReduceOp::Avg { counted as f32 } else { 1.0 };
                let within = slice.start - mine.start..slice.end - mine.start;
                let first = within.start;
                let owed = residuals.as_mut().and_then(|d| d.summed.get_mut(within));
                let owed = owed.map(|owed| (owed, share));
                let mut bytes = Vec::with_capacity(length);
                let phase = (Phase::Results, counted);
                self.encode(phase, &sum, (all, first), owed, &mut bytes)?;
                results.push_back(self.begin_gather(bytes, &lengths(before), below)?);
            }
            // And what became of the one before that.
            if let Some(before) = step.checked_sub(2) {
                let outputs = self.gathered(&next(&mut results)?, below)?;
                for (rank, (chunk, part)) in (0u32..).zip(outputs.iter().zip(&parts)) {
                    self.take_result(chunk.bytes(), values, cut(part, size, before), tally.shown())
                        .map_err(|e| e.with_peer(rank))?;
                }
            }
        }
        self.owe(residuals);
        Ok(Outcome {
            contributors: tally.contributors(),
            non_finite,
        })
    }

    /// Decodes a slice of a sum of `counted` contributions.
    fn take_result(
        &self,
        chunk: &[u8],
        values: &mut Tensor,
        slice: Range<usize>,
        counted: u32,
    ) -> Result<()> {
        let frame = &self.frame;
        let opened = frame.open(chunk, Phase::Results, slice.len(), self.place.world)?;
        if opened.contributors != counted {
            let text = format!(
                "counted {} contributors, this rank {counted}",
                opened.contributors
            );
            return Err(Error::new(ErrorKind::Protocol, text));
        }
        frame.read(opened, false, values, slice)
    }

    fn reduce_scatter(
        &self,
        op: ReduceOp,
        plan: &Plan,
        tensors: &mut [Tensor],
        below: &Below<'_>,
    ) -> Result<Outcome> {
        let frame = &self.frame;
        let own = u32::from(self.contribute);
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
        let mut from = 0;
        let parts: Vec<_> = plan
            .sources
            .iter()
            .map(|pieces| {
                let n = total(pieces);
                from += n;
                from - n..from
            })
            .collect();
        let none = Vec::new();
        let target = plan.targets.first().unwrap_or(&none);
        let mine = parts.get(self.place.rank as usize).map_or(0, Range::len);
        let mut residuals = self.residuals(from, &(0..0));
        let mut non_finite = 0;
        let mut tally = Tally::default();
        let size = slice(frame.codec, parts.iter().map(Range::len).max().unwrap_or(0));
        let mut window = Window::of(frame.len(size) * 2 * parts.len());
        let mut summed = 0;
        let steps = steps(parts.iter().map(Range::len), size);
        for step in 0..steps {
            let values = match (&whole, all.first()) {
                (Some(whole), _) => Some(whole),
                (None, Some(first)) => tensors.get(first.tensor),
                (None, None) => None,
            };
            let values =
                values.ok_or_else(|| Error::new(ErrorKind::Internal, "a reduce_scatter without tensors"))?;
            let slices = parts.iter().map(|p| cut(p, size, step));
            let lengths: Vec<_> = slices.clone().map(|s| frame.len(s.len())).collect();
            let mut bytes = Vec::with_capacity(lengths.iter().sum());
            for slice in slices {
                let owed = contributed(&mut residuals, &slice);
                let at = (slice.clone(), slice.start);
                non_finite += self.encode((Phase::Inputs, own), values, at, owed, &mut bytes)?;
            }
            let length = frame.len(cut(&(0..mine), size, step).len());
            let begun = self.begin_exchange(bytes, lengths, length, below)?;
            window.begun.push_back(begun);
            while let Some(begun) = window.due(step + 1 == steps) {
                let slice = cut(&(0..mine), size, summed);
                summed += 1;
                let exchanged = last(below.finish(&begun)?)?;
                let into = within(target, &slice);
                self.with_values(tensors, &into, false, |x, sum| {
                    let all = 0..sum.count();
                    let mut chunks = exchanged.bytes().chunks(frame.len(slice.len()));
                    x.sum(&mut chunks, op, (sum, all), &mut tally)
                })?;
            }
        }
        self.owe(residuals);
        Ok(Outcome {
            contributors: tally.contributors(),
            non_finite,
        })
    }

    fn all_gather(&self, plan: &Plan, tensors: &mut [Tensor], below: &Below<'_>) -> Result<Outcome> {
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
        let non_finite = frame.write((Phase::Inputs, 1), values, 0..count, 0, &mut bytes)?;
        let lengths: Vec<_> = plan.targets.iter().map(|t| frame.len(total(t))).collect();
        let outputs = self.gathered(&self.begin_gather(bytes, &lengths, below)?, below)?;
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

    fn broadcast(&self, root: u32, values: &mut Tensor, below: &Below<'_>) -> Result<Outcome> {
        let count = values.count();
        let mut outcome = Outcome::default();
        let tensor = if self.place.rank == root {
            let mut bytes = Vec::with_capacity(self.frame.len(count));
            outcome.non_finite = self
                .frame
                .write((Phase::Inputs, 1), values, 0..count, 0, &mut bytes)?;
            Tensor::from_vec(bytes)
        } else {
            Tensor::zeros(DType::U8, self.frame.len(count))
        };
        let tensors = vec![tensor];
        let received = last(below.run(Collective::Broadcast { tensors, root })?)?;
        self.unpack(received.bytes(), values)
            .map_err(|e| e.with_peer(root))?;
        Ok(outcome)
    }

    /// Writes the values of one rank's chunk.
    fn unpack(&self, chunk: &[u8], values: &mut Tensor) -> Result<()> {
        let count = values.count();
        let opened = self.frame.open(chunk, Phase::Inputs, count, 1)?;
        if opened.contributors != 1 {
            return Err(Error::new(ErrorKind::Protocol, "sent a chunk without values"));
        }
        self.frame.read(opened, false, values, 0..count)
    }
}

/// What is owed of a contribution's `slice`.
fn contributed<'a>(
    residuals: &'a mut Option<Residuals>,
    slice: &Range<usize>,
) -> Option<(&'a mut [f32], f32)> {
    let owed = residuals.as_mut()?.contributed.get_mut(slice.clone())?;
    Some((owed, 1.0))
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use ftcore::Epoch;

    use super::*;
    use crate::codec::Codec;
    use crate::codec::Rounding;
    use crate::kernels::block_kernels;

    #[test]
    fn inv4_a_result_of_other_contributors_than_this_rank_counted_is_refused() {
        static GO: AtomicBool = AtomicBool::new(false);
        let op = Collective::AllReduce {
            tensors: vec![Tensor::zeros(DType::F32, 3)],
            op: ReduceOp::Avg,
        };
        let exchange = Exchange {
            frame: Frame {
                codec: Codec::Int8B64,
                rounding: Rounding::Nearest,
                rank: 0,
                fingerprint: op.fingerprint(),
                interrupt: &GO,
                kernels: &*block_kernels(&ftcore::DeviceKind::Cpu).unwrap(),
            },
            place: Place {
                rank: 0,
                world: 3,
                epoch: Epoch(1),
            },
            accuracy: Accuracy::Economic,
            contribute: true,
            feedback: None,
        };
        let result = Tensor::from_vec(vec![1.0f32, -127.0, 0.0]);
        for (counted, here) in [(2u32, 2u32), (1, 2), (3, 2)] {
            let mut chunk = Vec::new();
            let phase = (Phase::Results, counted);
            exchange
                .encode(phase, &result, (0..3, 0), None, &mut chunk)
                .unwrap();
            let mut values = Tensor::zeros(DType::F32, 3);
            let taken = exchange.take_result(&chunk, &mut values, 0..3, here);
            if counted == here {
                taken.unwrap();
                assert_eq!(values.as_slice::<f32>().unwrap(), [1.0, -127.0, 0.0]);
            } else {
                let e = taken.unwrap_err();
                assert_eq!(e.kind(), ErrorKind::Protocol);
                let says = format!("counted {counted} contributors, this rank {here}");
                assert!(e.to_string().contains(&says), "{e}");
                assert_eq!(values.as_slice::<f32>().unwrap(), [0.0; 3]);
            }
        }
    }
}
