//! What an operation does with its tensors: oneCCL's own call where it has one, else a composition of such calls.
//!
//! Runs on an executor and may be left behind in any of its calls, so it owns its scratch memory and touches the
//! caller's only through [`Lent`]. Scratch is a `Tensor`, which is aligned for its dtype.

use std::cell::Cell;

use ftcore::{DType, Error, ErrorKind, ReduceOp, Result, Tensor};
use oneccl_sys::RedOp;

use crate::link::Link;
use crate::movement::{Memory, Moves};
use crate::raw::lent::Lent;
use crate::raw::sycl::{Queue, Span};
use crate::recipe::Recipe;
use crate::route::{self, Route};
use crate::tally::{Tally, Ticket};

/// Sums of at most so many bytes travel in a scratch buffer with the number of contributors behind them; larger ones in
/// place, with the number in a call of its own. Where copying twice costs what that call costs.
const CARRIED: usize = 256 << 10;

/// As [`CARRIED`] among ranks that write the contributors down: copying so little twice costs less than that.
const CARRIED_ANYWAY: usize = 4 << 10;

/// How much of a gathered reduction is in scratch at once, per rank.
const GATHERED: usize = 1 << 20;

/// How a reduction is to be counted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Count<'a> {
    /// Whether contributors are counted at all (an option of the group).
    pub(crate) counted: bool,
    /// Whether this rank is one.
    pub(crate) contribute: bool,
    /// Where ranks that share a host write that down.
    pub(crate) tally: Option<&'a Tally>,
}

impl Count<'_> {
    /// The number of contributors, in a call of its own.
    pub(crate) fn contributors(&self, link: &Link) -> Result<u32> {
        if !self.counted {
            return Ok(link.world());
        }
        let mut one = Tensor::from_vec(vec![u32::from(self.contribute)]);
        link.all_reduce(one.bytes_mut(), DType::U32, RedOp::SUM)?;
        Ok(route::count_of(DType::U32, one.bytes()))
    }
}

/// How the contributors of a reduction become known.
enum Counting<'a> {
    Known(u32),
    /// With the end of the reduction.
    Posted(&'a Tally, Ticket),
}

fn internal(text: &str) -> Error {
    Error::new(ErrorKind::Internal, text)
}

thread_local! {
    /// A buffer that an executor keeps between operations: a new one of this size costs page faults every time.
    static KEPT: Cell<Option<Tensor>> = const { Cell::new(None) };
}

/// Runs `f` on at least `bytes` bytes of kept scratch, aligned for every dtype, with undefined contents.
fn with_kept<R>(bytes: usize, f: impl FnOnce(&mut [u8]) -> Result<R>) -> Result<R> {
    let mut buffer = KEPT
        .take()
        .filter(|b| b.byte_len() >= bytes)
        .unwrap_or_else(|| Tensor::zeros(DType::U64, bytes.max(CARRIED + 8).div_ceil(8)));
    let part = buffer.bytes_mut().get_mut(..bytes);
    let result = f(part.ok_or_else(|| internal("scratch is too small"))?);
    KEPT.set(Some(buffer));
    result
}

fn scratch(dtype: DType, bytes: usize) -> Tensor {
    Tensor::zeros(dtype, bytes / dtype.size())
}

/// The scratch memory of a movement.
#[derive(Default)]
struct Scratch(Vec<Tensor>);

impl Memory for Scratch {
    fn queue(&self) -> Option<&Queue> {
        None
    }

    fn take(&mut self, dtype: DType, bytes: usize) -> Result<Span> {
        let mut tensor = scratch(dtype, bytes);
        let span = Span::writing(tensor.bytes_mut());
        self.0.push(tensor);
        Ok(span)
    }

    fn copy(&self, from: Span, to: Span) -> Result<()> {
        from.copy_to(to);
        Ok(())
    }
}

/// Runs `recipe`; the result is the number of contributors of a reduction, else 0.
pub(crate) fn run(
    link: &Link,
    recipe: &Recipe,
    dtype: Option<DType>,
    lent: &mut Lent,
    count: Count<'_>,
) -> Result<u32> {
    if let Recipe::Barrier = recipe {
        let mut token = scratch(DType::I32, 4);
        link.all_reduce(token.bytes_mut(), DType::I32, RedOp::SUM)?;
        return Ok(0);
    }
    let dtype = dtype.ok_or_else(|| internal("an operation without tensors has no dtype"))?;
    if let Some(op) = recipe.reduction() {
        return Reduction::new(link, dtype, op, count)?.run(recipe, lent);
    }
    let mut scratch = Scratch::default();
    let mut moves = Moves {
        link,
        memory: &mut scratch,
    };
    let written = moves.run(recipe, dtype, lent)?;
    if dtype == DType::Bool {
        for index in written {
            for b in lent.bytes_mut(index) {
                *b = u8::from(*b != 0);
            }
        }
    }
    Ok(0)
}

/// This rank's part of what has one for each rank.
fn own_part(whole: &mut [u8], rank: usize, world: usize) -> &mut [u8] {
    let bytes = whole.len() / world;
    whole
        .get_mut(rank * bytes..(rank + 1) * bytes)
        .unwrap_or_default()
}

/// One reduction, in whatever form.
struct Reduction<'a> {
    link: &'a Link,
    dtype: DType,
    op: ReduceOp,
    /// `None`: gathered and folded here.
    route: Option<Route>,
    count: Count<'a>,
}

impl<'a> Reduction<'a> {
    fn new(link: &'a Link, dtype: DType, op: ReduceOp, count: Count<'a>) -> Result<Self> {
        let route = Route::of(dtype, op);
        if route.is_none() && !route::is_gathered(dtype, op) {
            return Err(internal(&format!(
                "no way to reduce {dtype} with {op} although it is advertised"
            )));
        }
        Ok(Self {
            link,
            dtype,
            op,
            route,
            count,
        })
    }

    fn run(&self, recipe: &Recipe, lent: &mut Lent) -> Result<u32> {
        match recipe {
            Recipe::AllReduce { .. } => self.all_reduce(lent),
            Recipe::Reduce { root, .. } => self.reduce(lent, *root),
            Recipe::ReduceScatter { .. } => self.reduce_scatter(lent),
            Recipe::ReduceScatterInto { .. } => self.reduce_scatter_into(lent),
            Recipe::ReduceScatterInPlace { .. } => self.reduce_scatter_in_place(lent),
            other => Err(internal(&format!("{other:?} is no reduction"))),
        }
    }

    /// Before the data moves. `bytes`: the least that a rank gets of the result; a call that gives a rank nothing proves nothing.
    fn begin_count(&self, bytes: usize) -> Result<Counting<'a>> {
        match self.count.tally.filter(|_| self.count.counted && bytes > 0) {
            Some(tally) => Ok(Counting::Posted(tally, tally.post(self.count.contribute)?)),
            None => self.count.contributors(self.link).map(Counting::Known),
        }
    }

    /// After the data has moved.
    fn end_count(&self, counting: &Counting<'a>) -> Result<u32> {
        match counting {
            Counting::Known(contributors) => Ok(*contributors),
            Counting::Posted(tally, ticket) => tally.count(ticket),
        }
    }

    fn finish(&self, data: &mut [u8], contributors: u32) {
        if self.op == ReduceOp::Avg {
            route::divide(self.dtype, data, contributors);
        }
    }

    /// Values in the form in which they travel; the identity if this rank does not contribute.
    fn encode(&self, route: Route, from: &[u8], to: &mut [u8]) {
        if self.count.contribute {
            route.encode(from, to);
        } else {
            let mut neutral = vec![0u8; from.len()];
            route::fill_identity(self.dtype, self.op, &mut neutral);
            match self.op {
                // The factor times zero is zero; times the identity of a scaled sum as well.
                ReduceOp::PremulSum(_) => to.fill(0),
                _ => route.encode(&neutral, to),
            }
        }
    }

    fn all_reduce(&self, lent: &mut Lent) -> Result<u32> {
        let Some(route) = self.route else {
            let bytes = (0..lent.len()).map(|i| lent.bytes(i).len()).sum();
            let counting = self.begin_count(bytes)?;
            for i in 0..lent.len() {
                self.fold_gathered(lent.bytes_mut(i))?;
            }
            return self.end_count(&counting);
        };
        let total: usize = (0..lent.len())
            .map(|i| route.wire_bytes(lent.bytes(i).len()))
            .sum();
        let most = match self.count.tally {
            None => CARRIED,
            Some(_) => CARRIED_ANYWAY,
        };
        // All ranks come to the same here.
        let tail = match route.op {
            RedOp::SUM if self.count.counted && total <= most => {
                route::counted(route.wire, self.link.world(), self.count.contribute)
            }
            _ => None,
        };
        if tail.is_some() || (lent.len() > 1 && total <= CARRIED) {
            return self.all_reduce_packed(route, lent, total, tail);
        }
        let counting = self.begin_count(total)?;
        for i in 0..lent.len() {
            let data = lent.bytes_mut(i);
            if route.is_direct() {
                if !self.count.contribute {
                    route::fill_identity(self.dtype, self.op, data);
                }
                self.link.all_reduce(data, route.wire, route.op)?;
            } else {
                let mut wire = scratch(route.wire, route.wire_bytes(data.len()));
                self.encode(route, data, wire.bytes_mut());
                self.link.all_reduce(wire.bytes_mut(), route.wire, route.op)?;
                route.decode(wire.bytes(), data);
            }
        }
        let contributors = self.end_count(&counting)?;
        for i in 0..lent.len() {
            self.finish(lent.bytes_mut(i), contributors);
        }
        Ok(contributors)
    }

    /// All tensors in one buffer, with the count behind them if there is a `tail`.
    fn all_reduce_packed(
        &self,
        route: Route,
        lent: &mut Lent,
        total: usize,
        tail: Option<[u8; 8]>,
    ) -> Result<u32> {
        let unit = if tail.is_some() { route.wire.size() } else { 0 };
        with_kept(total + unit, |wire| {
            let mut rest = &mut *wire;
            for i in 0..lent.len() {
                let from = lent.bytes(i);
                let (part, after) = std::mem::take(&mut rest).split_at_mut(route.wire_bytes(from.len()));
                self.encode(route, from, part);
                rest = after;
            }
            let contributors = match &tail {
                Some(tail) => {
                    for (to, from) in rest.iter_mut().zip(tail) {
                        *to = *from;
                    }
                    self.link.all_reduce(wire, route.wire, route.op)?;
                    route::count_of(route.wire, wire.split_at(total).1)
                }
                None => {
                    let counting = self.begin_count(total)?;
                    self.link.all_reduce(wire, route.wire, route.op)?;
                    self.end_count(&counting)?
                }
            };
            let mut rest = wire.split_at(total).0;
            for i in 0..lent.len() {
                let into = lent.bytes_mut(i);
                let (part, after) = rest.split_at(route.wire_bytes(into.len()));
                route.decode(part, into);
                self.finish(into, contributors);
                rest = after;
            }
            Ok(contributors)
        })
    }

    fn reduce(&self, lent: &mut Lent, root: u32) -> Result<u32> {
        let contributors = self.count.contributors(self.link)?;
        let is_root = self.link.rank() == root;
        let Some(route) = self.route else {
            let mut copy = lent.bytes(0).to_vec();
            self.fold_gathered(&mut copy)?;
            if is_root {
                lent.bytes_mut(0).copy_from_slice(&copy);
            }
            return Ok(contributors);
        };
        let data = lent.bytes_mut(0);
        let bytes = route.wire_bytes(data.len());
        let mut result = scratch(route.wire, bytes);
        if route.is_direct() && self.count.contribute {
            self.link
                .reduce(data, result.bytes_mut(), route.wire, route.op, root)?;
        } else {
            let mut wire = scratch(route.wire, bytes);
            self.encode(route, data, wire.bytes_mut());
            self.link
                .reduce(wire.bytes(), result.bytes_mut(), route.wire, route.op, root)?;
        }
        if is_root {
            route.decode(result.bytes(), data);
            self.finish(data, contributors);
        }
        Ok(contributors)
    }

    fn reduce_scatter(&self, lent: &mut Lent) -> Result<u32> {
        let world = self.link.world() as usize;
        let lengths: Vec<usize> = (0..world).map(|i| lent.bytes(i).len()).collect();
        let counting = self.begin_count(lengths.iter().copied().min().unwrap_or(0))?;
        let mut packed = scratch(self.dtype, lengths.iter().sum());
        let mut rest = packed.bytes_mut();
        for (i, n) in lengths.iter().enumerate() {
            let (part, after) = std::mem::take(&mut rest).split_at_mut(*n);
            part.copy_from_slice(lent.bytes(i));
            rest = after;
        }
        let into = lent.bytes_mut(world);
        self.scatter_reduced(packed.bytes(), &lengths, into)?;
        let contributors = self.end_count(&counting)?;
        self.finish(into, contributors);
        Ok(contributors)
    }

    fn reduce_scatter_into(&self, lent: &mut Lent) -> Result<u32> {
        let world = self.link.world() as usize;
        let outputs = || (1..lent.len()).step_by(2);
        let counting = self.begin_count(outputs().map(|i| lent.bytes(i).len()).sum())?;
        for i in (0..lent.len()).step_by(2) {
            let (from, into) = lent.pair(i, i + 1);
            self.scatter_reduced(from, &vec![into.len(); world], into)?;
        }
        let contributors = self.end_count(&counting)?;
        for i in (1..lent.len()).step_by(2) {
            self.finish(lent.bytes_mut(i), contributors);
        }
        Ok(contributors)
    }

    fn reduce_scatter_in_place(&self, lent: &mut Lent) -> Result<u32> {
        let (rank, world) = (self.link.rank() as usize, self.link.world() as usize);
        let counting = self.begin_count((0..lent.len()).map(|i| lent.bytes(i).len() / world).sum())?;
        for i in 0..lent.len() {
            let whole = lent.bytes_mut(i);
            let part = whole.len() / world;
            // oneCCL's documentation of this call knows no output within the input.
            let mut own = scratch(self.dtype, part);
            self.scatter_reduced(whole, &vec![part; world], own.bytes_mut())?;
            own_part(whole, rank, world).copy_from_slice(own.bytes());
        }
        let contributors = self.end_count(&counting)?;
        for i in 0..lent.len() {
            self.finish(own_part(lent.bytes_mut(i), rank, world), contributors);
        }
        Ok(contributors)
    }

    /// `into` becomes this rank's part of the reduction of `from`, whose parts have these lengths in bytes.
    fn scatter_reduced(&self, from: &[u8], lengths: &[usize], into: &mut [u8]) -> Result<()> {
        let rank = self.link.rank() as usize;
        let Some(route) = self.route else {
            let mut copy = from.to_vec();
            self.fold_gathered(&mut copy)?;
            let first: usize = lengths.iter().take(rank).sum();
            let part = copy.get(first..first + into.len()).unwrap_or(&[]);
            into.copy_from_slice(part);
            return Ok(());
        };
        let even = lengths.iter().all(|n| *n == into.len());
        if route.is_direct() && self.count.contribute && even {
            return self.link.reduce_scatter(from, into, route.wire, route.op);
        }
        let mut wire = scratch(route.wire, route.wire_bytes(from.len()));
        self.encode(route, from, wire.bytes_mut());
        let mut result = scratch(route.wire, route.wire_bytes(into.len()));
        if even {
            self.link
                .reduce_scatter(wire.bytes(), result.bytes_mut(), route.wire, route.op)?;
        } else {
            // One reduction per part, to its owner.
            let mut rest = wire.bytes();
            for (owner, n) in (0u32..).zip(lengths) {
                let (part, after) = rest.split_at(route.wire_bytes(*n));
                if owner == self.link.rank() {
                    self.link
                        .reduce(part, result.bytes_mut(), route.wire, route.op, owner)?;
                } else {
                    let mut unused = scratch(route.wire, part.len());
                    self.link
                        .reduce(part, unused.bytes_mut(), route.wire, route.op, owner)?;
                }
                rest = after;
            }
        }
        route.decode(result.bytes(), into);
        Ok(())
    }

    /// Gathers `data` of all ranks piece by piece and folds it in rank order.
    fn fold_gathered(&self, data: &mut [u8]) -> Result<()> {
        if !self.count.contribute {
            route::fill_identity(self.dtype, self.op, data);
        }
        for piece in data.chunks_mut(GATHERED) {
            let mut all = scratch(DType::U8, piece.len() * self.link.world() as usize);
            self.link.all_gather(piece, all.bytes_mut(), DType::U8)?;
            let (first, others) = all.bytes().split_at(piece.len());
            piece.copy_from_slice(first);
            for other in others.chunks(piece.len().max(1)) {
                route::fold_bits(self.op, piece, other);
            }
        }
        Ok(())
    }
}
