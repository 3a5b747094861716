//! What an operation does with its tensors: oneCCL's own call where it has one, else a composition of such calls.
//!
//! Runs on an executor and may be left behind in any of its calls, so it owns its scratch memory and touches the
//! caller's only through [`Lent`]. Scratch is a `Tensor`, which is aligned for its dtype.

use std::cell::Cell;

use ftcore::{DType, Error, ErrorKind, ReduceOp, Result, Tensor};
use oneccl_sys::RedOp;

use crate::link::Link;
use crate::raw::lent::Lent;
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
    let written = movement(link, recipe, dtype, lent)?;
    if dtype == DType::Bool {
        for index in written {
            for b in lent.bytes_mut(index) {
                *b = u8::from(*b != 0);
            }
        }
    }
    Ok(0)
}

/// Operations without arithmetic. Returns which tensors were written.
fn movement(link: &Link, recipe: &Recipe, dtype: DType, lent: &mut Lent) -> Result<std::ops::Range<usize>> {
    let (rank, world) = (link.rank() as usize, link.world() as usize);
    let all = lent.len();
    Ok(match recipe {
        Recipe::Broadcast { root } => {
            for i in 0..all {
                link.broadcast(lent.bytes_mut(i), dtype, *root)?;
            }
            0..all
        }
        Recipe::AllGatherInto => {
            for i in (0..all).step_by(2) {
                let (from, into) = lent.pair(i, i + 1);
                link.all_gather(from, into, dtype)?;
            }
            0..all
        }
        Recipe::AllGatherInPlace => {
            for i in 0..all {
                let whole = lent.bytes_mut(i);
                // oneCCL's documentation of these calls knows no input within the output.
                let mut own = scratch(dtype, whole.len() / world);
                own.bytes_mut().copy_from_slice(own_part(whole, rank, world));
                link.all_gather(own.bytes(), whole, dtype)?;
            }
            0..all
        }
        Recipe::AllGather => {
            all_gather(link, dtype, lent, rank, world)?;
            1..all
        }
        Recipe::Gather { root } => {
            gather(link, dtype, lent, *root as usize)?;
            1..all
        }
        Recipe::Scatter { root } => {
            scatter(link, dtype, lent, *root as usize)?;
            all.saturating_sub(1)..all
        }
        Recipe::AllToAll => {
            all_to_all_lists(link, dtype, lent, world)?;
            world..all
        }
        Recipe::AllToAllInto { sent, received } => {
            let (from, into) = lent.pair(0, 1);
            if sent.is_empty() && received.is_empty() {
                link.all_to_all(from, into, dtype)?;
            } else {
                let bytes = |splits: &[usize], len: usize| {
                    if splits.is_empty() {
                        vec![len / world; world]
                    } else {
                        splits.iter().map(|n| n * dtype.size()).collect()
                    }
                };
                let (sent, received) = (bytes(sent, from.len()), bytes(received, into.len()));
                exchange(link, dtype, from, &sent, into, &received)?;
            }
            1..2
        }
        Recipe::Send { peer } => {
            link.send(lent.bytes(0), dtype, *peer)?;
            0..0
        }
        Recipe::Recv { peer } => {
            link.recv(lent.bytes_mut(0), dtype, *peer)?;
            0..1
        }
        other => return Err(internal(&format!("{other:?} is no movement"))),
    })
}

/// This rank's part of what has one for each rank.
fn own_part(whole: &mut [u8], rank: usize, world: usize) -> &mut [u8] {
    let bytes = whole.len() / world;
    whole
        .get_mut(rank * bytes..(rank + 1) * bytes)
        .unwrap_or_default()
}

fn all_gather(link: &Link, dtype: DType, lent: &mut Lent, rank: usize, world: usize) -> Result<()> {
    let part = lent.bytes(0).len();
    let even = (1..=world).all(|i| lent.bytes(i).len() == part);
    if even {
        let mut whole = scratch(dtype, part * world);
        link.all_gather(lent.bytes(0), whole.bytes_mut(), dtype)?;
        for (r, from) in whole.bytes().chunks(part.max(1)).enumerate() {
            lent.bytes_mut(1 + r).copy_from_slice(from);
        }
        return Ok(());
    }
    let (from, into) = lent.pair(0, 1 + rank);
    into.copy_from_slice(from);
    for r in 0..world {
        link.broadcast(lent.bytes_mut(1 + r), dtype, r as u32)?;
    }
    Ok(())
}

/// An exchange in which every rank sends to the root only.
fn gather(link: &Link, dtype: DType, lent: &mut Lent, root: usize) -> Result<()> {
    let (rank, world) = (link.rank() as usize, link.world() as usize);
    let mut sent = vec![0; world];
    if let Some(to_root) = sent.get_mut(root) {
        *to_root = lent.bytes(0).len();
    }
    let received = match rank == root {
        true => (1..=world).map(|i| lent.bytes(i).len()).collect(),
        false => vec![0; world],
    };
    let mut whole = scratch(dtype, received.iter().sum());
    exchange(link, dtype, lent.bytes(0), &sent, whole.bytes_mut(), &received)?;
    let mut rest = whole.bytes();
    for (i, n) in received.iter().enumerate().filter(|_| rank == root) {
        let (part, tail) = rest.split_at(*n);
        lent.bytes_mut(1 + i).copy_from_slice(part);
        rest = tail;
    }
    Ok(())
}

/// An exchange in which every rank receives from the root only.
fn scatter(link: &Link, dtype: DType, lent: &mut Lent, root: usize) -> Result<()> {
    let (rank, world) = (link.rank() as usize, link.world() as usize);
    let last = lent.len().saturating_sub(1);
    let sent: Vec<usize> = match rank == root {
        true => (0..world).map(|i| lent.bytes(i).len()).collect(),
        false => vec![0; world],
    };
    let mut received = vec![0; world];
    if let Some(from_root) = received.get_mut(root) {
        *from_root = lent.bytes(last).len();
    }
    let mut whole = scratch(dtype, sent.iter().sum());
    let mut rest = whole.bytes_mut();
    for (i, n) in sent.iter().enumerate().filter(|_| rank == root) {
        let (part, tail) = std::mem::take(&mut rest).split_at_mut(*n);
        part.copy_from_slice(lent.bytes(i));
        rest = tail;
    }
    exchange(link, dtype, whole.bytes(), &sent, lent.bytes_mut(last), &received)
}

/// Lists travel as one buffer each way.
fn all_to_all_lists(link: &Link, dtype: DType, lent: &mut Lent, world: usize) -> Result<()> {
    let lengths = |lent: &Lent, first: usize| {
        (first..first + world)
            .map(|i| lent.bytes(i).len())
            .collect::<Vec<_>>()
    };
    let (sent, received) = (lengths(lent, 0), lengths(lent, world));
    let mut out = scratch(dtype, sent.iter().sum());
    let mut back = scratch(dtype, received.iter().sum());
    let mut rest = out.bytes_mut();
    for (i, n) in sent.iter().enumerate() {
        let (part, tail) = std::mem::take(&mut rest).split_at_mut(*n);
        part.copy_from_slice(lent.bytes(i));
        rest = tail;
    }
    exchange(link, dtype, out.bytes(), &sent, back.bytes_mut(), &received)?;
    let mut rest = back.bytes();
    for (i, n) in received.iter().enumerate() {
        let (part, tail) = rest.split_at(*n);
        lent.bytes_mut(world + i).copy_from_slice(part);
        rest = tail;
    }
    Ok(())
}

/// Parts of any length, in bytes.
fn exchange(
    link: &Link,
    dtype: DType,
    from: &[u8],
    sent: &[usize],
    into: &mut [u8],
    received: &[usize],
) -> Result<()> {
    if link.has_all_to_all_v() {
        return link.all_to_all_v(from, sent, into, received, dtype);
    }
    // Older libraries: pair by pair, all ranks in the same order of pairs, the lower rank sends first.
    let (rank, world) = (link.rank() as usize, link.world() as usize);
    let offset = |lengths: &[usize], r: usize| lengths.iter().take(r).sum::<usize>();
    let part = |lengths: &[usize], r: usize| {
        let at = offset(lengths, r);
        at..at + lengths.get(r).copied().unwrap_or(0)
    };
    let missing = || internal("the splits do not fit the tensors");
    let own = into.get_mut(part(received, rank)).ok_or_else(missing)?;
    own.copy_from_slice(from.get(part(sent, rank)).ok_or_else(missing)?);
    for low in 0..world {
        for high in low + 1..world {
            if rank != low && rank != high {
                continue;
            }
            let peer = if rank == low { high } else { low };
            for turn in [low, high] {
                if turn == rank {
                    link.send(
                        from.get(part(sent, peer)).ok_or_else(missing)?,
                        dtype,
                        peer as u32,
                    )?;
                } else {
                    let into = into.get_mut(part(received, peer)).ok_or_else(missing)?;
                    link.recv(into, dtype, peer as u32)?;
                }
            }
        }
    }
    Ok(())
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

    /// The number of contributors, in a call of its own.
    fn contributors(&self) -> Result<u32> {
        if !self.count.counted {
            return Ok(self.link.world());
        }
        let mut one = Tensor::from_vec(vec![u32::from(self.count.contribute)]);
        self.link.all_reduce(one.bytes_mut(), DType::U32, RedOp::SUM)?;
        Ok(route::count_of(DType::U32, one.bytes()))
    }

    /// Before the data moves. `bytes`: the least that a rank gets of the result; a call that gives a rank nothing proves nothing.
    fn begin_count(&self, bytes: usize) -> Result<Counting<'a>> {
        match self.count.tally.filter(|_| self.count.counted && bytes > 0) {
            Some(tally) => Ok(Counting::Posted(tally, tally.post(self.count.contribute)?)),
            None => self.contributors().map(Counting::Known),
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
        let contributors = self.contributors()?;
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
