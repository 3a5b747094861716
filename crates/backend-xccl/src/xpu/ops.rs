//! What an operation does with device memory: oneCCL's own calls on the group's queue where it has them, compositions of those on
//! the device for the rest of the movements, and the host path's compositions, by way of the host, for reductions in which values
//! must be looked at.
//!
//! Which way an operation goes depends on what all ranks know alike, never on one rank's own state, so that all make the same
//! calls. Runs on an executor; when it returns, the queue is done with all memory.

use ftcore::{DType, Error, ErrorKind, ReduceOp, Result, Tensor};
use oneccl_sys::RedOp;

use super::comm::{Scratch, Side};
use super::event::Order;
use crate::link::Link;
use crate::ops::{self, Count};
use crate::raw::comm::Comm;
use crate::raw::lent::{Lent, lend};
use crate::raw::sycl::{Queue, Span};
use crate::recipe::Recipe;
use crate::route::{self, Route};

fn internal(text: &str) -> Error {
    Error::new(ErrorKind::Internal, text)
}

/// Runs `recipe` after the point that its order names; the result is the number of contributors of a reduction, else 0.
pub(crate) fn run(
    side: &Side,
    link: &Link,
    recipe: &Recipe,
    dtype: Option<DType>,
    order: &Order,
    lent: &Lent,
    count: Count<'_>,
) -> Result<u32> {
    let queue = side.queue_of(recipe)?;
    let mut run = Run {
        link,
        comm: link.comm(),
        queue: &queue,
        scratch: Scratch::new(side, &queue),
        rank: link.rank() as usize,
        world: link.world() as usize,
    };
    let contributors = run.recipe(recipe, dtype, lent, count)?;
    let end = std::sync::Arc::new(queue.barrier()?);
    if let Some(promise) = &order.promise {
        promise.keep(end.clone());
    }
    end.finish()?;
    run.scratch.is_idle = true;
    Ok(contributors)
}

struct Run<'a> {
    link: &'a Link,
    /// `None` in a world of one.
    comm: Option<&'a Comm>,
    queue: &'a Queue,
    scratch: Scratch<'a>,
    rank: usize,
    world: usize,
}

impl Run<'_> {
    fn recipe(
        &mut self,
        recipe: &Recipe,
        dtype: Option<DType>,
        lent: &Lent,
        count: Count<'_>,
    ) -> Result<u32> {
        if let Recipe::Barrier = recipe {
            let mut token = Tensor::from_vec(vec![0i32]);
            self.link.all_reduce(token.bytes_mut(), DType::I32, RedOp::SUM)?;
            return Ok(0);
        }
        let dtype = dtype.ok_or_else(|| internal("an operation without tensors has no dtype"))?;
        if let Some(op) = recipe.reduction() {
            return self.reduction(recipe, dtype, op, lent, count);
        }
        let written = self.movement(recipe, dtype, lent)?;
        if dtype == DType::Bool {
            for index in written {
                self.on_host(lent.device_span(index), |bytes| {
                    bytes.iter_mut().for_each(|b| *b = u8::from(*b != 0));
                })?;
            }
        }
        Ok(0)
    }

    fn copy(&self, from: Span, to: Span) -> Result<()> {
        if from.bytes() == 0 || from == to {
            return Ok(());
        }
        self.queue.copy(from, to).map(drop)
    }

    /// Lets the host look at device memory: when this returns, the queue is done.
    fn on_host(&self, span: Span, f: impl FnOnce(&mut [u8])) -> Result<()> {
        let mut bytes = vec![0u8; span.bytes()];
        self.queue.copy_out(span, &mut bytes)?;
        f(&mut bytes);
        self.queue.copy_in(&bytes, span)
    }

    /// Operations without arithmetic. Returns which tensors were written.
    fn movement(&mut self, recipe: &Recipe, dtype: DType, lent: &Lent) -> Result<std::ops::Range<usize>> {
        let all = lent.len();
        let at = |i: usize| lent.device_span(i);
        Ok(match recipe {
            Recipe::Broadcast { root } => {
                for i in 0..all {
                    self.broadcast(at(i), dtype, *root)?;
                }
                0..all
            }
            Recipe::AllGatherInto => {
                for i in (0..all).step_by(2) {
                    self.all_gather(at(i), at(i + 1), dtype)?;
                }
                0..all
            }
            Recipe::AllGatherInPlace => {
                for i in 0..all {
                    let whole = at(i);
                    let mine = self.own_part(whole)?;
                    // oneCCL's documentation of these calls knows no input within the output.
                    let own = self.scratch.take(mine.bytes())?;
                    self.copy(mine, own)?;
                    self.all_gather(own, whole, dtype)?;
                }
                0..all
            }
            Recipe::AllGather => {
                self.all_gather_lists(dtype, lent)?;
                1..all
            }
            Recipe::Gather { root } => {
                let root = *root as usize;
                let mut sent = vec![None; self.world];
                if let Some(to_root) = sent.get_mut(root) {
                    *to_root = Some(at(0));
                }
                let received = match self.rank == root {
                    true => (1..=self.world).map(|i| Some(at(i))).collect(),
                    false => vec![None; self.world],
                };
                self.exchange(dtype, &sent, &received)?;
                1..all
            }
            Recipe::Scatter { root } => {
                let root = *root as usize;
                let sent = match self.rank == root {
                    true => (0..self.world).map(|i| Some(at(i))).collect(),
                    false => vec![None; self.world],
                };
                let last = all.saturating_sub(1);
                let mut received = vec![None; self.world];
                if let Some(from_root) = received.get_mut(root) {
                    *from_root = Some(at(last));
                }
                self.exchange(dtype, &sent, &received)?;
                last..all
            }
            Recipe::AllToAll => {
                let part = |first: usize| (first..first + self.world).map(|i| Some(at(i))).collect();
                let (sent, received): (Vec<_>, Vec<_>) = (part(0), part(self.world));
                self.exchange(dtype, &sent, &received)?;
                self.world..all
            }
            Recipe::AllToAllInto { sent, received } if sent.is_empty() && received.is_empty() => {
                self.all_to_all(at(0), at(1), dtype)?;
                1..2
            }
            Recipe::AllToAllInto { sent, received } => {
                let sent = self.parts(at(0), sent, dtype)?;
                let received = self.parts(at(1), received, dtype)?;
                self.exchange(dtype, &sent, &received)?;
                1..2
            }
            Recipe::Send { peer } => {
                match self.comm {
                    Some(c) if at(0).bytes() > 0 => c.send(Some(self.queue), at(0), dtype, *peer)?,
                    _ => {}
                }
                0..0
            }
            Recipe::Recv { peer } => {
                match self.comm {
                    Some(c) if at(0).bytes() > 0 => c.recv(Some(self.queue), at(0), dtype, *peer)?,
                    _ => {}
                }
                0..1
            }
            other => return Err(internal(&format!("{other:?} is no movement"))),
        })
    }

    /// The parts of one tensor, by their numbers of elements; even ones if there are none.
    fn parts(&self, whole: Span, splits: &[usize], dtype: DType) -> Result<Vec<Option<Span>>> {
        let even = vec![whole.bytes() / dtype.size() / self.world; self.world];
        let splits = if splits.is_empty() { &even } else { splits };
        let mut at = 0;
        splits
            .iter()
            .map(|n| {
                let part = whole.part(at, n * dtype.size())?;
                at += part.bytes();
                Ok(Some(part))
            })
            .collect()
    }

    /// This rank's part of what has one for each rank.
    fn own_part(&self, whole: Span) -> Result<Span> {
        let bytes = whole.bytes() / self.world;
        whole.part(self.rank * bytes, bytes)
    }

    fn broadcast(&self, data: Span, dtype: DType, root: u32) -> Result<()> {
        match self.comm {
            Some(c) if data.bytes() > 0 => c.broadcast(Some(self.queue), data, dtype, root),
            _ => Ok(()),
        }
    }

    fn all_gather(&self, from: Span, into: Span, dtype: DType) -> Result<()> {
        match self.comm {
            Some(c) if from.bytes() > 0 => c.all_gather(Some(self.queue), from, into, dtype),
            _ => self.copy(from, into),
        }
    }

    fn all_to_all(&self, from: Span, into: Span, dtype: DType) -> Result<()> {
        match self.comm {
            Some(c) if from.bytes() > 0 => c.all_to_all(Some(self.queue), from, into, dtype),
            _ => self.copy(from, into),
        }
    }

    fn all_gather_lists(&mut self, dtype: DType, lent: &Lent) -> Result<()> {
        let own = lent.device_span(0);
        let outputs: Vec<Span> = (1..=self.world).map(|i| lent.device_span(i)).collect();
        if outputs.iter().all(|o| o.bytes() == own.bytes()) {
            let whole = self.scratch.take(own.bytes() * self.world)?;
            self.all_gather(own, whole, dtype)?;
            for (r, output) in outputs.iter().enumerate() {
                self.copy(whole.part(r * own.bytes(), own.bytes())?, *output)?;
            }
            return Ok(());
        }
        if let Some(mine) = outputs.get(self.rank) {
            self.copy(own, *mine)?;
        }
        for (r, output) in (0u32..).zip(&outputs) {
            self.broadcast(*output, dtype, r)?;
        }
        Ok(())
    }

    /// Parts of any length from all ranks to all ranks: as even parts of the longest, whose length is agreed first.
    fn exchange(&mut self, dtype: DType, sent: &[Option<Span>], received: &[Option<Span>]) -> Result<()> {
        let longest = |list: &[Option<Span>]| list.iter().flatten().map(|s| s.bytes()).max().unwrap_or(0);
        let own = longest(sent).max(longest(received));
        let mut agreed = Tensor::from_vec(vec![own as u64]);
        self.link.all_reduce(agreed.bytes_mut(), DType::U64, RedOp::MAX)?;
        let part = agreed.as_slice::<u64>()?.first().copied().unwrap_or(0);
        let part = usize::try_from(part).map_err(|_| internal("a part that does not fit in memory"))?;
        if part == 0 {
            return Ok(());
        }
        let (out, back) = (
            self.scratch.take(part * self.world)?,
            self.scratch.take(part * self.world)?,
        );
        for (r, from) in sent.iter().enumerate() {
            if let Some(from) = from {
                self.copy(*from, out.part(r * part, from.bytes())?)?;
            }
        }
        self.all_to_all(out, back, dtype)?;
        for (r, into) in received.iter().enumerate() {
            if let Some(into) = into {
                self.copy(back.part(r * part, into.bytes())?, *into)?;
            }
        }
        Ok(())
    }

    fn reduction(
        &mut self,
        recipe: &Recipe,
        dtype: DType,
        op: ReduceOp,
        lent: &Lent,
        count: Count<'_>,
    ) -> Result<u32> {
        let route = Route::of(dtype, op).filter(Route::is_direct);
        let (Some(route), false) = (route, is_uneven(recipe, lent, self.world)) else {
            return self.by_way_of_the_host(recipe, dtype, lent, count);
        };
        let contributors = self.contributors(count)?;
        let neutral = |this: &Self, span: Span| this.neutral(span, dtype, op, count);
        match recipe {
            Recipe::AllReduce { .. } => {
                for i in 0..lent.len() {
                    let data = lent.device_span(i);
                    neutral(self, data)?;
                    if let Some(c) = self.comm.filter(|_| data.bytes() > 0) {
                        c.all_reduce(Some(self.queue), data, route.wire, route.op)?;
                    }
                    self.finish(data, dtype, op, contributors)?;
                }
            }
            Recipe::Reduce { root, .. } => {
                let data = lent.device_span(0);
                let is_root = self.rank == *root as usize;
                // Elsewhere than on the root the caller's tensor keeps its values.
                let from = match count.contribute {
                    true => data,
                    false => self.scratch.take(data.bytes())?,
                };
                neutral(self, from)?;
                let Some(c) = self.comm.filter(|_| data.bytes() > 0) else {
                    self.copy(from, data)?;
                    self.finish(data, dtype, op, contributors)?;
                    return Ok(contributors);
                };
                let result = self.scratch.take(data.bytes())?;
                c.reduce(Some(self.queue), from, result, route.wire, route.op, *root)?;
                if is_root {
                    self.copy(result, data)?;
                    self.finish(data, dtype, op, contributors)?;
                }
            }
            Recipe::ReduceScatter { .. } => {
                let into = lent.device_span(self.world);
                let packed = self.scratch.take(into.bytes() * self.world)?;
                for r in 0..self.world {
                    self.copy(lent.device_span(r), packed.part(r * into.bytes(), into.bytes())?)?;
                }
                neutral(self, packed)?;
                self.scatter(packed, into, route)?;
                self.finish(into, dtype, op, contributors)?;
            }
            Recipe::ReduceScatterInto { .. } => {
                for i in (0..lent.len()).step_by(2) {
                    let (mut from, into) = (lent.device_span(i), lent.device_span(i + 1));
                    if !count.contribute {
                        from = self.scratch.take(from.bytes())?;
                        neutral(self, from)?;
                    }
                    self.scatter(from, into, route)?;
                    self.finish(into, dtype, op, contributors)?;
                }
            }
            Recipe::ReduceScatterInPlace { .. } => {
                for i in 0..lent.len() {
                    let whole = lent.device_span(i);
                    let mine = self.own_part(whole)?;
                    // What is in the other parts afterwards is undefined.
                    neutral(self, whole)?;
                    let own = self.scratch.take(mine.bytes())?;
                    self.scatter(whole, own, route)?;
                    self.finish(own, dtype, op, contributors)?;
                    self.copy(own, mine)?;
                }
            }
            other => return Err(internal(&format!("{other:?} is no reduction"))),
        }
        Ok(contributors)
    }

    fn scatter(&self, from: Span, into: Span, route: Route) -> Result<()> {
        match self.comm {
            Some(c) if into.bytes() > 0 => {
                c.reduce_scatter(Some(self.queue), from, into, route.wire, route.op)
            }
            _ => self.copy(from, into),
        }
    }

    /// The number of contributors, in a call of its own.
    fn contributors(&self, count: Count<'_>) -> Result<u32> {
        if !count.counted {
            return Ok(self.link.world());
        }
        let mut one = Tensor::from_vec(vec![u32::from(count.contribute)]);
        self.link.all_reduce(one.bytes_mut(), DType::U32, RedOp::SUM)?;
        Ok(route::count_of(DType::U32, one.bytes()))
    }

    /// Puts the neutral value in the place of what a rank has that does not contribute.
    fn neutral(&self, span: Span, dtype: DType, op: ReduceOp, count: Count<'_>) -> Result<()> {
        if count.contribute || span.bytes() == 0 {
            return Ok(());
        }
        if matches!(op, ReduceOp::Sum | ReduceOp::Avg) {
            return self.queue.zero(span).map(drop);
        }
        let mut values = vec![0u8; span.bytes()];
        route::fill_identity(dtype, op, &mut values);
        self.queue.copy_in(&values, span)
    }

    /// An average is divided on the host: there is no compiler here to make a kernel with.
    fn finish(&self, data: Span, dtype: DType, op: ReduceOp, contributors: u32) -> Result<()> {
        if op != ReduceOp::Avg || contributors <= 1 || data.bytes() == 0 {
            return Ok(());
        }
        self.on_host(data, |bytes| route::divide(dtype, bytes, contributors))
    }

    /// The host path's composition over copies of all tensors.
    fn by_way_of_the_host(
        &self,
        recipe: &Recipe,
        dtype: DType,
        lent: &Lent,
        count: Count<'_>,
    ) -> Result<u32> {
        let mut copies = Vec::with_capacity(lent.len());
        for i in 0..lent.len() {
            let span = lent.device_span(i);
            let mut copy = Tensor::zeros(dtype, span.bytes() / dtype.size());
            self.queue.copy_out(span, copy.bytes_mut())?;
            copies.push(copy);
        }
        let (held, mut on_host) = lend(copies);
        let contributors = ops::run(self.link, recipe, Some(dtype), &mut on_host, count)?;
        drop(on_host);
        let inputs = match recipe {
            Recipe::ReduceScatter { .. } => self.world,
            _ => 0,
        };
        for (i, copy) in held.take().iter().enumerate() {
            let is_input = i < inputs || (matches!(recipe, Recipe::ReduceScatterInto { .. }) && i % 2 == 0);
            if !is_input {
                self.queue.copy_in(copy.bytes(), lent.device_span(i))?;
            }
        }
        Ok(contributors)
    }
}

/// True for a reduce-scatter of parts of different lengths, which all ranks know alike.
fn is_uneven(recipe: &Recipe, lent: &Lent, world: usize) -> bool {
    let Recipe::ReduceScatter { .. } = recipe else {
        return false;
    };
    let mut lengths = (0..world).map(|i| lent.device_span(i).bytes());
    let first = lengths.next();
    lengths.any(|n| Some(n) != first)
}
