//! Operations that move data without arithmetic: bytes, whatever the dtype. Bools are made 0 or 1 where they arrive (L16).

use ftcore::{Collective, DType, Error, Result, Tensor};
use nccl_sys::dtype;

use super::{Finish, Job, dtype_of};
use crate::cuda::kernels::Kernel;
use crate::cuda::raw::Span;
use crate::raw::Calls;

fn spans(tensors: &[Tensor]) -> Vec<Span> {
    tensors.iter().map(Span::of).collect()
}

/// This rank's part of each tensor, and all of it.
pub(super) fn own_parts(tensors: &[Tensor], rank: usize, world: usize) -> Result<Vec<(Span, Span)>> {
    let of_one = |tensor: &Tensor| {
        let whole = Span::of(tensor);
        let bytes = whole.bytes() / world.max(1);
        let own = whole.part(rank * bytes, bytes);
        let own = own.ok_or_else(|| Error::invalid("this rank's part lies outside its tensor"))?;
        Ok((own, whole))
    };
    tensors.iter().map(of_one).collect()
}

/// `whole` for the rank `with`, and nothing for the others.
fn only(whole: Span, with: u32, world: usize) -> Vec<Span> {
    let mut parts = vec![Span::EMPTY; world];
    if let Some(part) = parts.get_mut(with as usize) {
        *part = whole;
    }
    parts
}

/// The parts of `whole` as `splits` (in elements; empty: even) cut it.
fn cut(whole: &Tensor, splits: &[usize], world: usize) -> Result<Vec<Span>> {
    let size = whole.dtype().size();
    let even = vec![whole.count() / world.max(1); world];
    let splits = if splits.is_empty() { &even } else { splits };
    let mut at = 0;
    splits
        .iter()
        .map(|n| {
            let part = Span::of(whole).part(at, n * size);
            at += n * size;
            part.ok_or_else(|| Error::invalid("a split lies outside its tensor"))
        })
        .collect()
}

impl Job<'_> {
    pub(super) fn movement(&self, op: &Collective) -> Result<()> {
        let place = self.shared.place;
        let (rank, world) = (place.rank as usize, place.world as usize);
        match op {
            Collective::Broadcast { tensors, root } => {
                let list = spans(tensors);
                let total: usize = list.iter().map(|s| s.bytes()).sum();
                self.traffic(
                    if place.rank == *root { total } else { 0 },
                    if place.rank == *root { 0 } else { total },
                );
                let finish = arrived(dtype_of(tensors.first()), &list);
                self.moved(finish, |calls| {
                    filled(&list).try_for_each(|s| {
                        calls.broadcast(*s, *s, s.bytes(), dtype::UINT8, *root, self.stream)
                    })
                })
            }
            Collective::AllGather { input, outputs } => {
                let (own, list) = (Span::of(input), spans(outputs));
                let total: usize = list.iter().map(|s| s.bytes()).sum();
                self.traffic(own.bytes() * (world - 1), total - own.bytes());
                self.moved(arrived(input.dtype(), &list), |calls| {
                    (0u32..)
                        .zip(&list)
                        .filter(|(_, s)| s.bytes() > 0)
                        .try_for_each(|(r, to)| {
                            let from = if r == place.rank { own } else { *to };
                            calls.broadcast(from, *to, to.bytes(), dtype::UINT8, r, self.stream)
                        })
                })
            }
            Collective::AllGatherInto { pairs } => {
                let list: Vec<(Span, Span)> = pairs.iter().map(|(i, o)| (Span::of(i), Span::of(o))).collect();
                self.all_gather(dtype_of(pairs.first().map(|p| &p.0)), &list)
            }
            // NCCL knows the call as in place by the address of the part.
            Collective::AllGatherInPlace { tensors } => {
                self.all_gather(dtype_of(tensors.first()), &own_parts(tensors, rank, world)?)
            }
            // Exchanges in which every rank sends to the root only, or receives from it only. The others' list is empty.
            Collective::Gather { input, outputs, root } => {
                let from = only(Span::of(input), *root, world);
                self.exchange(input.dtype(), &from, &spans(outputs))
            }
            Collective::Scatter { inputs, output, root } => {
                let to = only(Span::of(output), *root, world);
                self.exchange(output.dtype(), &spans(inputs), &to)
            }
            Collective::AllToAll { inputs, outputs } => self.exchange(
                inputs.first().map_or(DType::U8, Tensor::dtype),
                &spans(inputs),
                &spans(outputs),
            ),
            Collective::AllToAllInto {
                input,
                output,
                input_splits,
                output_splits,
            } => {
                let from = cut(input, input_splits, world)?;
                let to = cut(output, output_splits, world)?;
                self.exchange(input.dtype(), &from, &to)
            }
            other => Err(Error::unsupported(format!(
                "{} is not a movement of data",
                other.kind()
            ))),
        }
    }

    pub(super) fn traffic(&self, sent: usize, received: usize) {
        self.shared.counters.add(sent as u64, received as u64);
    }

    /// One group of `calls` and the finishing touches.
    fn moved(&self, finish: Finish, calls: impl FnOnce(&Calls<'_>) -> Result<()>) -> Result<()> {
        self.counted(true, |c, _| calls(c), finish, false)
    }

    /// Gathers the first of each pair into the second.
    fn all_gather(&self, d: DType, list: &[(Span, Span)]) -> Result<()> {
        let others = self.shared.place.world as usize - 1;
        let total: usize = list.iter().map(|(from, _)| from.bytes() * others).sum();
        self.traffic(total, total);
        let outputs: Vec<Span> = list.iter().map(|(_, into)| *into).collect();
        self.moved(arrived(d, &outputs), |calls| {
            list.iter()
                .filter(|(from, _)| from.bytes() > 0)
                .try_for_each(|(from, into)| {
                    calls.all_gather(*from, *into, from.bytes(), dtype::UINT8, self.stream)
                })
        })
    }

    fn send(&self, calls: &Calls<'_>, from: Span, peer: u32) -> Result<()> {
        if from.bytes() == 0 {
            return Ok(());
        }
        calls.send(from, from.bytes(), dtype::UINT8, peer, self.stream)
    }

    fn receive(&self, calls: &Calls<'_>, to: Span, peer: u32) -> Result<()> {
        if to.bytes() == 0 {
            return Ok(());
        }
        calls.recv(to, to.bytes(), dtype::UINT8, peer, self.stream)
    }

    fn each_other(&self, list: &[Span], f: impl Fn(u32, Span) -> Result<()>) -> Result<()> {
        (0u32..)
            .zip(list)
            .filter(|(r, _)| *r != self.shared.place.rank)
            .try_for_each(|(r, span)| f(r, *span))
    }

    fn exchange(&self, d: DType, from: &[Span], to: &[Span]) -> Result<()> {
        let rank = self.shared.place.rank as usize;
        let bytes = |list: &[Span]| -> usize { list.iter().map(|s| s.bytes()).sum() };
        let own = from.get(rank).map_or(0, |s| s.bytes());
        self.traffic(bytes(from) - own, bytes(to) - own);
        if let (Some(from), Some(to)) = (from.get(rank), to.get(rank)) {
            self.shared.gpu.driver.copy(*from, *to, self.stream)?;
        }
        self.moved(arrived(d, to), |calls| {
            self.each_other(from, |r, span| self.send(calls, span, r))?;
            self.each_other(to, |r, span| self.receive(calls, span, r))
        })
    }
}

fn filled(list: &[Span]) -> impl Iterator<Item = &Span> {
    list.iter().filter(|s| s.bytes() > 0)
}

/// What is done to data of type `d` when it has arrived.
fn arrived(d: DType, outputs: &[Span]) -> Finish {
    if d != DType::Bool {
        return Vec::new();
    }
    filled(outputs)
        .map(|s| (Kernel::Bool, *s, *s, s.bytes()))
        .collect()
}
