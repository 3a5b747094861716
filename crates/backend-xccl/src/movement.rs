//! Operations that move data without arithmetic: oneCCL's own call where it has one, else a composition of such calls. The same on host
//! memory and on a device's; what differs is where scratch memory is from and what copies ([`Memory`]).
//!
//! Which way an operation goes depends on what all ranks know alike, never on one rank's own state, so that all make the same calls.

use std::ops::Range;

use ftcore::{DType, Error, ErrorKind, Result, Tensor};
use oneccl_sys::RedOp;

use crate::link::Link;
use crate::raw::comm::Comm;
use crate::raw::lent::Lent;
use crate::raw::sycl::{Queue, Span};
use crate::recipe::Recipe;

/// The kind of memory that an operation is on.
pub(crate) trait Memory {
    /// What calls and copies are enqueued on; `None` on the host, where they are done when they return.
    fn queue(&self) -> Option<&Queue>;

    /// Scratch memory for elements of `dtype`, with undefined contents. It lives as long as self.
    fn take(&mut self, dtype: DType, bytes: usize) -> Result<Span>;

    /// Copies as many bytes as both have.
    fn copy(&self, from: Span, to: Span) -> Result<()>;
}

/// The movements of one rank.
pub(crate) struct Moves<'a> {
    pub(crate) link: &'a Link,
    pub(crate) memory: &'a mut dyn Memory,
}

/// What goes to each rank, or comes from it.
struct Parts {
    each: Vec<Span>,
    /// The memory in which they lie one behind the other, if they do.
    whole: Option<Span>,
}

impl Parts {
    /// `whole` for the rank `with`, and nothing for the others.
    fn only(whole: Span, with: u32, world: usize) -> Self {
        let mut parts = Self::apart(vec![Span::EMPTY; world]);
        if let Some(part) = parts.each.get_mut(with as usize) {
            *part = whole;
        }
        Self {
            whole: Some(whole),
            ..parts
        }
    }

    fn apart(each: Vec<Span>) -> Self {
        Self { each, whole: None }
    }
}

/// Where `parts` lie in `whole`: one behind the other, or each at a multiple of `stride`.
fn places(parts: &[Span], whole: Span, stride: Option<usize>) -> Result<Vec<Span>> {
    let mut at = 0;
    parts
        .iter()
        .map(|part| {
            let place = whole.part(at, part.bytes());
            at += stride.unwrap_or(part.bytes());
            place
        })
        .collect()
}

fn internal(text: &str) -> Error {
    Error::new(ErrorKind::Internal, text)
}

impl<'a> Moves<'a> {
    fn comm(&self) -> Option<&'a Comm> {
        self.link.comm()
    }

    fn world(&self) -> usize {
        self.link.world() as usize
    }

    /// Runs `recipe`. Returns which tensors were written.
    pub(crate) fn run(&mut self, recipe: &Recipe, dtype: DType, lent: &Lent) -> Result<Range<usize>> {
        let (rank, world, all) = (self.link.rank(), self.world(), lent.len());
        let at = |i: usize| lent.span(i);
        let list = |first: usize| Parts::apart((first..first + world).map(at).collect());
        let nothing = || Parts::apart(vec![Span::EMPTY; world]);
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
                    let own = self.memory.take(dtype, mine.bytes())?;
                    self.copy(mine, own)?;
                    self.all_gather(own, whole, dtype)?;
                }
                0..all
            }
            Recipe::AllGather => {
                self.all_gather_list(at(0), &list(1).each, dtype)?;
                1..all
            }
            // Exchanges in which every rank sends to the root only, or receives from it only.
            Recipe::Gather { root } => {
                let received = if rank == *root { list(1) } else { nothing() };
                self.exchange(dtype, &Parts::only(at(0), *root, world), &received)?;
                1..all
            }
            Recipe::Scatter { root } => {
                let last = all.saturating_sub(1);
                let sent = if rank == *root { list(0) } else { nothing() };
                self.exchange(dtype, &sent, &Parts::only(at(last), *root, world))?;
                last..all
            }
            Recipe::AllToAll => {
                self.exchange(dtype, &list(0), &list(world))?;
                world..all
            }
            Recipe::AllToAllInto { sent, received } if sent.is_empty() && received.is_empty() => {
                self.all_to_all(at(0), at(1), dtype)?;
                1..2
            }
            Recipe::AllToAllInto { sent, received } => {
                let sent = self.cut(at(0), sent, dtype)?;
                let received = self.cut(at(1), received, dtype)?;
                self.exchange(dtype, &sent, &received)?;
                1..2
            }
            Recipe::Send { peer } => {
                if let Some(comm) = self.comm().filter(|_| at(0).bytes() > 0) {
                    comm.send(self.memory.queue(), at(0), dtype, *peer)?;
                }
                0..0
            }
            Recipe::Recv { peer } => {
                if let Some(comm) = self.comm().filter(|_| at(0).bytes() > 0) {
                    comm.recv(self.memory.queue(), at(0), dtype, *peer)?;
                }
                0..1
            }
            other => return Err(internal(&format!("{other:?} is no movement"))),
        })
    }

    pub(crate) fn copy(&self, from: Span, to: Span) -> Result<()> {
        if from.bytes() == 0 || from == to {
            return Ok(());
        }
        self.memory.copy(from, to)
    }

    fn copy_each(&self, from: &[Span], to: &[Span]) -> Result<()> {
        from.iter()
            .zip(to)
            .try_for_each(|(from, to)| self.copy(*from, *to))
    }

    /// `parts` in one piece of scratch memory, one behind the other.
    pub(crate) fn pack(&mut self, parts: &[Span], dtype: DType) -> Result<Span> {
        let packed = self
            .memory
            .take(dtype, parts.iter().map(|part| part.bytes()).sum())?;
        self.copy_each(parts, &places(parts, packed, None)?)?;
        Ok(packed)
    }

    /// This rank's part of what has one for each rank.
    pub(crate) fn own_part(&self, whole: Span) -> Result<Span> {
        let bytes = whole.bytes() / self.world();
        whole.part(self.link.rank() as usize * bytes, bytes)
    }

    /// The parts of one tensor, by their numbers of elements; even ones if there are none.
    fn cut(&self, whole: Span, splits: &[usize], dtype: DType) -> Result<Parts> {
        let even = vec![whole.bytes() / dtype.size() / self.world(); self.world()];
        let splits = if splits.is_empty() { &even } else { splits };
        let mut at = 0;
        let cut = splits.iter().map(|n| {
            let part = whole.part(at, n * dtype.size())?;
            at += part.bytes();
            Ok(part)
        });
        Ok(Parts {
            each: cut.collect::<Result<_>>()?,
            whole: Some(whole),
        })
    }

    fn broadcast(&self, data: Span, dtype: DType, root: u32) -> Result<()> {
        match self.comm() {
            Some(c) if data.bytes() > 0 => c.broadcast(self.memory.queue(), data, dtype, root),
            _ => Ok(()),
        }
    }

    fn all_gather(&self, from: Span, into: Span, dtype: DType) -> Result<()> {
        match self.comm() {
            Some(c) if from.bytes() > 0 => c.all_gather(self.memory.queue(), from, into, dtype),
            _ => self.copy(from, into),
        }
    }

    fn all_to_all(&self, from: Span, into: Span, dtype: DType) -> Result<()> {
        match self.comm() {
            Some(c) if from.bytes() > 0 => c.all_to_all(self.memory.queue(), from, into, dtype),
            _ => self.copy(from, into),
        }
    }

    fn all_gather_list(&mut self, own: Span, outputs: &[Span], dtype: DType) -> Result<()> {
        if outputs.iter().all(|o| o.bytes() == own.bytes()) {
            let whole = self.memory.take(dtype, own.bytes() * self.world())?;
            self.all_gather(own, whole, dtype)?;
            return self.copy_each(&places(outputs, whole, None)?, outputs);
        }
        if let Some(mine) = outputs.get(self.link.rank() as usize) {
            self.copy(own, *mine)?;
        }
        for (r, output) in (0u32..).zip(outputs) {
            self.broadcast(*output, dtype, r)?;
        }
        Ok(())
    }

    /// Parts of any length from all ranks to all ranks: in the call for that, which is there on the host and only in newer libraries, else as
    /// even parts of the longest, whose length is agreed first.
    fn exchange(&mut self, dtype: DType, sent: &Parts, received: &Parts) -> Result<()> {
        let Some(comm) = self.comm() else {
            return self.copy_each(&sent.each, &received.each);
        };
        if self.memory.queue().is_none() && comm.has_all_to_all_v() {
            let lengths = |parts: &Parts| parts.each.iter().map(|p| p.bytes()).collect::<Vec<_>>();
            let (going, coming) = (lengths(sent), lengths(received));
            let out = match sent.whole {
                Some(whole) => whole,
                None => self.pack(&sent.each, dtype)?,
            };
            let back = match received.whole {
                Some(whole) => whole,
                None => self.memory.take(dtype, coming.iter().sum())?,
            };
            comm.all_to_all_v(out, &going, back, &coming, dtype)?;
            return self.copy_each(&places(&received.each, back, None)?, &received.each);
        }
        let longest = sent.each.iter().chain(&received.each).map(|s| s.bytes()).max();
        let mut agreed = Tensor::from_vec(vec![longest.unwrap_or(0) as u64]);
        self.link.all_reduce(agreed.bytes_mut(), DType::U64, RedOp::MAX)?;
        let part = agreed.as_slice::<u64>()?.first().copied().unwrap_or(0);
        let part = usize::try_from(part).map_err(|_| internal("a part that does not fit in memory"))?;
        if part == 0 {
            return Ok(());
        }
        let out = self.memory.take(dtype, part * self.world())?;
        let back = self.memory.take(dtype, part * self.world())?;
        self.copy_each(&sent.each, &places(&sent.each, out, Some(part))?)?;
        self.all_to_all(out, back, dtype)?;
        self.copy_each(&places(&received.each, back, Some(part))?, &received.each)
    }
}
