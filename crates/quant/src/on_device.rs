//! The quantised reductions over a group that moves only a device's memory: the steps of `exchange`, with chunks that stay on the
//! device. The host sees their headers, which say who contributed, and nothing else.
//!
//! The values of an operation go as one slice. Where slices are cut does not change a bit, so the results are those of the host's way.

use std::ops::Range;

use ftcore::{Collective, Error, ErrorKind, ReduceOp, Result, Tensor};

use crate::chunk::{HEADER, Phase};
use crate::codec::Encoding;
use crate::driver::Below;
use crate::exchange::{Exchange, Outcome, total};
use crate::kernels::{DeviceBytes, Piece};
use crate::options::Accuracy;
use crate::plan::{Plan, Shape};
use crate::slices::Tally;

impl Exchange<'_> {
    /// As [`carry_out`](Self::carry_out), for reductions.
    pub(crate) fn carry_out_on_device(
        &self,
        plan: &Plan,
        tensors: &mut [Tensor],
        below: &Below<'_>,
        bytes: &dyn DeviceBytes,
    ) -> Result<Outcome> {
        let steps = Steps {
            exchange: self,
            bytes,
            below,
        };
        let none = Vec::new();
        match plan.shape {
            Shape::AllReduce(op) => {
                let source = plan.sources.first().unwrap_or(&none);
                let alone = self.place.world == 2 || self.accuracy == Accuracy::Best;
                self.with_values(tensors, source, true, |_, values| match alone {
                    true => steps.one_phase(op, values),
                    false => steps.two_shots(op, values),
                })
            }
            Shape::ReduceScatter(op) => steps.reduce_scatter(op, plan, tensors),
            Shape::AllGather | Shape::Broadcast(_) => Err(Error::new(
                ErrorKind::Internal,
                "what is only moved is not quantised on a device",
            )),
        }
    }
}

/// One operation under way.
struct Steps<'a> {
    exchange: &'a Exchange<'a>,
    bytes: &'a dyn DeviceBytes,
    below: &'a Below<'a>,
}

impl Steps<'_> {
    /// A chunk of `range` of `values`, whose first value has number `first` for rounding, and how many of them are not finite.
    fn pack(
        &self,
        (phase, contributors): (Phase, u32),
        values: &Tensor,
        (range, first): (Range<usize>, usize),
    ) -> Result<(Tensor, usize)> {
        let frame = &self.exchange.frame;
        frame.go_on()?;
        let header = frame.header_on_device(phase, contributors, range.len());
        // A rank that contributes nothing sends zeros.
        let how = (contributors > 0).then(|| Encoding {
            rounding: frame.rounding(phase),
            first: first as u64,
            ..Encoding::default()
        });
        self.bytes.pack(&header, frame.codec, how, values, range)
    }

    /// Rooms for chunks of so many values each.
    fn rooms(&self, like: &Tensor, counts: impl Iterator<Item = usize>) -> Result<Vec<Tensor>> {
        let frame = &self.exchange.frame;
        counts
            .map(|n| self.bytes.room(like.device(), frame.len(n)))
            .collect()
    }

    fn gather(&self, input: Tensor, outputs: Vec<Tensor>) -> Result<Vec<Tensor>> {
        let begun = self.below.begin(Collective::AllGather { input, outputs })?;
        self.exchange.gathered(&begun, self.below)
    }

    /// Sends chunk r to rank r; the chunks of all ranks, of `count` values each, come back.
    fn exchange(&self, inputs: Vec<Tensor>, like: &Tensor, count: usize) -> Result<Vec<Tensor>> {
        let world = inputs.len();
        let outputs = self.rooms(like, std::iter::repeat_n(count, world))?;
        let mut tensors = self.below.run(Collective::AllToAll { inputs, outputs })?;
        let outputs = tensors.split_off(world.min(tensors.len()));
        if outputs.len() == world {
            return Ok(outputs);
        }
        Err(Error::new(
            ErrorKind::Internal,
            "the group below lost tensors of an all_to_all",
        ))
    }

    /// Sums the contributed `chunks` in rank order into `out`, the whole of it; an average is divided.
    fn sum(&self, chunks: &[Tensor], op: ReduceOp, out: &mut Tensor) -> Result<Tally> {
        let frame = &self.exchange.frame;
        let count = out.count();
        let mut tally = Tally::default();
        let mut contributors = 0;
        let headers = self.bytes.headers(chunks, HEADER)?;
        for (rank, (chunk, header)) in (0u32..).zip(chunks.iter().zip(&headers)) {
            let named = |e: Error| e.with_peer(rank);
            frame.go_on()?;
            let counted = frame
                .open_on_device(header, chunk.byte_len(), Phase::Inputs, count, 1)
                .map_err(named)?;
            tally.count(rank, counted)?;
            if counted == 1 {
                let from = (chunk, HEADER);
                self.bytes
                    .unpack(frame.codec, from, contributors > 0, out, 0..count)
                    .map_err(named)?;
                contributors += 1;
            }
        }
        if contributors == 0 {
            let zeros = frame.kernels.zeros(out.device(), count)?;
            let whole = [Piece {
                tensor: 0,
                range: 0..count,
            }];
            frame.kernels.scatter(&zeros, std::slice::from_mut(out), &whole)?;
        } else if op == ReduceOp::Avg {
            frame.kernels.divide(out, 0..count, contributors as f32)?;
        }
        Ok(tally)
    }

    /// Every rank sums all ranks' values.
    fn one_phase(&self, op: ReduceOp, values: &mut Tensor) -> Result<Outcome> {
        let count = values.count();
        let own = u32::from(self.exchange.contribute);
        let (chunk, non_finite) = self.pack((Phase::Inputs, own), values, (0..count, 0))?;
        let world = self.exchange.place.world as usize;
        let outputs = self.rooms(values, std::iter::repeat_n(count, world))?;
        let chunks = self.gather(chunk, outputs)?;
        let tally = self.sum(&chunks, op, values)?;
        Ok(Outcome {
            contributors: tally.contributors(),
            non_finite,
        })
    }

    /// Packs every rank's part; the chunks for them, and how many values are not finite.
    fn pack_parts(&self, values: &Tensor, parts: &[Range<usize>]) -> Result<(Vec<Tensor>, usize)> {
        let own = u32::from(self.exchange.contribute);
        let mut non_finite = 0;
        let mut chunks = Vec::with_capacity(parts.len());
        for part in parts {
            let (chunk, odd) = self.pack((Phase::Inputs, own), values, (part.clone(), part.start))?;
            non_finite += odd;
            chunks.push(chunk);
        }
        Ok((chunks, non_finite))
    }

    /// Every rank sums its part of all ranks' values.
    fn two_shots(&self, op: ReduceOp, values: &mut Tensor) -> Result<Outcome> {
        let (exchange, frame) = (self.exchange, &self.exchange.frame);
        let parts = exchange.parts(values.count());
        let mine = parts.get(exchange.place.rank as usize).map_or(0, Range::len);
        let (inputs, non_finite) = self.pack_parts(values, &parts)?;
        let exchanged = self.exchange(inputs, values, mine)?;
        let mut sum = frame.kernels.zeros(values.device(), mine)?;
        let tally = self.sum(&exchanged, op, &mut sum)?;
        drop(exchanged);
        let counted = tally.shown();
        let (result, _) = self.pack((Phase::Results, counted), &sum, (0..mine, 0))?;
        let outputs = self.rooms(values, parts.iter().map(Range::len))?;
        let results = self.gather(result, outputs)?;
        let headers = self.bytes.headers(&results, HEADER)?;
        for (rank, ((chunk, header), part)) in (0u32..).zip(results.iter().zip(&headers).zip(&parts)) {
            let named = |e: Error| e.with_peer(rank);
            let world = exchange.place.world;
            let said = frame
                .open_on_device(header, chunk.byte_len(), Phase::Results, part.len(), world)
                .map_err(named)?;
            if said != counted {
                let text = format!("counted {said} contributors, this rank {counted}");
                return Err(named(Error::new(ErrorKind::Protocol, text)));
            }
            self.bytes
                .unpack(frame.codec, (chunk, HEADER), false, values, part.clone())
                .map_err(named)?;
        }
        Ok(Outcome {
            contributors: tally.contributors(),
            non_finite,
        })
    }

    fn reduce_scatter(&self, op: ReduceOp, plan: &Plan, tensors: &mut [Tensor]) -> Result<Outcome> {
        let exchange = self.exchange;
        let whole = exchange.frame.kernels.gather(tensors, &plan.sources.concat())?;
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
        let mine = parts.get(exchange.place.rank as usize).map_or(0, Range::len);
        let (inputs, non_finite) = self.pack_parts(&whole, &parts)?;
        let chunks = self.exchange(inputs, &whole, mine)?;
        let none = Vec::new();
        let target = plan.targets.first().unwrap_or(&none);
        let tally = exchange.with_values(tensors, target, false, |_, sum| self.sum(&chunks, op, sum))?;
        Ok(Outcome {
            contributors: tally.contributors(),
            non_finite,
        })
    }
}
