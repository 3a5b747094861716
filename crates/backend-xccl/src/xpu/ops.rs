//! What an operation does with device memory: oneCCL's own calls on the group's queue where it has them, the same movements as on host
//! memory, and the host path's compositions, by way of the host, for reductions in which values must be looked at.
//!
//! Which way an operation goes depends on what all ranks know alike, never on one rank's own state, so that all make the same
//! calls. Runs on an executor; when it returns, the queue is done with all memory.

use ftcore::{DType, Error, ErrorKind, ReduceOp, Result, Tensor};
use oneccl_sys::RedOp;

use super::comm::{Scratch, Side};
use super::event::Order;
use crate::link::Link;
use crate::movement::{Memory, Moves};
use crate::ops::{self, Count};
use crate::raw::comm::Comm;
use crate::raw::lent::{Lent, lend};
use crate::raw::sycl::{Queue, Span};
use crate::recipe::Recipe;
use crate::route::{self, Route};

fn internal(text: &str) -> Error {
    Error::new(ErrorKind::Internal, text)
}

impl Memory for Scratch<'_> {
    fn queue(&self) -> Option<&Queue> {
        Some(self.queue)
    }

    fn take(&mut self, _: DType, bytes: usize) -> Result<Span> {
        Scratch::take(self, bytes)
    }

    fn copy(&self, from: Span, to: Span) -> Result<()> {
        self.queue.copy(from, to).map(drop)
    }
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
    let mut scratch = Scratch::new(side, &queue);
    let mut run = Run {
        comm: link.comm(),
        queue: &queue,
        moves: Moves {
            link,
            memory: &mut scratch,
        },
        world: link.world() as usize,
    };
    let contributors = run.recipe(recipe, dtype, lent, count)?;
    let end = std::sync::Arc::new(queue.barrier()?);
    if let Some(promise) = &order.promise {
        promise.keep(end.clone());
    }
    end.finish()?;
    scratch.is_idle = true;
    Ok(contributors)
}

struct Run<'a> {
    /// `None` in a world of one.
    comm: Option<&'a Comm>,
    queue: &'a Queue,
    moves: Moves<'a>,
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
            self.moves
                .link
                .all_reduce(token.bytes_mut(), DType::I32, RedOp::SUM)?;
            return Ok(0);
        }
        let dtype = dtype.ok_or_else(|| internal("an operation without tensors has no dtype"))?;
        if let Some(op) = recipe.reduction() {
            return self.reduction(recipe, dtype, op, lent, count);
        }
        let written = self.moves.run(recipe, dtype, lent)?;
        if dtype == DType::Bool {
            for index in written {
                self.on_host(lent.span(index), |bytes| {
                    bytes.iter_mut().for_each(|b| *b = u8::from(*b != 0));
                })?;
            }
        }
        Ok(0)
    }

    /// Lets the host look at device memory: when this returns, the queue is done.
    fn on_host(&self, span: Span, f: impl FnOnce(&mut [u8])) -> Result<()> {
        let mut bytes = vec![0u8; span.bytes()];
        self.queue.copy_out(span, &mut bytes)?;
        f(&mut bytes);
        self.queue.copy_in(&bytes, span)
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
        let contributors = count.contributors(self.moves.link)?;
        let neutral = |this: &Self, span: Span| this.neutral(span, dtype, op, count);
        match recipe {
            Recipe::AllReduce { .. } => {
                for i in 0..lent.len() {
                    let data = lent.span(i);
                    neutral(self, data)?;
                    if let Some(c) = self.comm.filter(|_| data.bytes() > 0) {
                        c.all_reduce(Some(self.queue), data, route.wire, route.op)?;
                    }
                    self.finish(data, dtype, op, contributors)?;
                }
            }
            Recipe::Reduce { root, .. } => {
                let data = lent.span(0);
                let is_root = self.moves.link.rank() == *root;
                // Elsewhere than on the root the caller's tensor keeps its values.
                let from = match count.contribute {
                    true => data,
                    false => self.moves.memory.take(dtype, data.bytes())?,
                };
                neutral(self, from)?;
                let Some(c) = self.comm.filter(|_| data.bytes() > 0) else {
                    self.moves.copy(from, data)?;
                    self.finish(data, dtype, op, contributors)?;
                    return Ok(contributors);
                };
                let result = self.moves.memory.take(dtype, data.bytes())?;
                c.reduce(Some(self.queue), from, result, route.wire, route.op, *root)?;
                if is_root {
                    self.moves.copy(result, data)?;
                    self.finish(data, dtype, op, contributors)?;
                }
            }
            Recipe::ReduceScatter { .. } => {
                let into = lent.span(self.world);
                let inputs: Vec<Span> = (0..self.world).map(|r| lent.span(r)).collect();
                let packed = self.moves.pack(&inputs, dtype)?;
                neutral(self, packed)?;
                self.scatter(packed, into, route)?;
                self.finish(into, dtype, op, contributors)?;
            }
            Recipe::ReduceScatterInto { .. } => {
                for i in (0..lent.len()).step_by(2) {
                    let (mut from, into) = (lent.span(i), lent.span(i + 1));
                    if !count.contribute {
                        from = self.moves.memory.take(dtype, from.bytes())?;
                        neutral(self, from)?;
                    }
                    self.scatter(from, into, route)?;
                    self.finish(into, dtype, op, contributors)?;
                }
            }
            Recipe::ReduceScatterInPlace { .. } => {
                for i in 0..lent.len() {
                    let whole = lent.span(i);
                    let mine = self.moves.own_part(whole)?;
                    // What is in the other parts afterwards is undefined.
                    neutral(self, whole)?;
                    let own = self.moves.memory.take(dtype, mine.bytes())?;
                    self.scatter(whole, own, route)?;
                    self.finish(own, dtype, op, contributors)?;
                    self.moves.copy(own, mine)?;
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
            _ => self.moves.copy(from, into),
        }
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
            let span = lent.span(i);
            let mut copy = Tensor::zeros(dtype, span.bytes() / dtype.size());
            self.queue.copy_out(span, copy.bytes_mut())?;
            copies.push(copy);
        }
        let (held, mut on_host) = lend(copies);
        let contributors = ops::run(self.moves.link, recipe, Some(dtype), &mut on_host, count)?;
        drop(on_host);
        let inputs = match recipe {
            Recipe::ReduceScatter { .. } => self.world,
            _ => 0,
        };
        for (i, copy) in held.take().iter().enumerate() {
            let is_input = i < inputs || (matches!(recipe, Recipe::ReduceScatterInto { .. }) && i % 2 == 0);
            if !is_input {
                self.queue.copy_in(copy.bytes(), lent.span(i))?;
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
    let mut lengths = (0..world).map(|i| lent.span(i).bytes());
    let first = lengths.next();
    lengths.any(|n| Some(n) != first)
}
