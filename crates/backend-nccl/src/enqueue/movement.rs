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
                let total: usize = list.iter().map(|(i, _)| i.bytes() * (world - 1)).sum();
                self.traffic(total, total);
                let outputs: Vec<Span> = list.iter().map(|(_, o)| *o).collect();
                let d = dtype_of(pairs.first().map(|p| &p.0));
                self.moved(arrived(d, &outputs), |calls| {
                    list.iter()
                        .filter(|(i, _)| i.bytes() > 0)
                        .try_for_each(|(i, o)| calls.all_gather(*i, *o, i.bytes(), dtype::UINT8, self.stream))
                })
            }
            Collective::AllGatherInPlace { tensors } => {
                let list = own_parts(tensors, rank, world)?;
                let total: usize = list.iter().map(|(own, _)| own.bytes() * (world - 1)).sum();
                self.traffic(total, total);
                let wholes: Vec<Span> = list.iter().map(|(_, whole)| *whole).collect();
                // NCCL knows the call as in place by the address of the part.
                self.moved(arrived(dtype_of(tensors.first()), &wholes), |calls| {
                    list.iter()
                        .filter(|(own, _)| own.bytes() > 0)
                        .try_for_each(|(own, whole)| {
                            calls.all_gather(*own, *whole, own.bytes(), dtype::UINT8, self.stream)
                        })
                })
            }
            Collective::Gather { input, outputs, root } => {
                let (own, list) = (Span::of(input), spans(outputs));
                if place.rank == *root {
                    self.traffic(0, list.iter().map(|s| s.bytes()).sum::<usize>() - own.bytes());
                    self.own_part(own, list.get(rank))?;
                } else {
                    self.traffic(own.bytes(), 0);
                }
                self.moved(arrived(input.dtype(), &list), |calls| {
                    if place.rank != *root {
                        return self.send(calls, own, *root);
                    }
                    self.each_other(&list, |r, to| self.receive(calls, to, r))
                })
            }
            Collective::Scatter { inputs, output, root } => {
                let (own, list) = (Span::of(output), spans(inputs));
                if place.rank == *root {
                    self.traffic(list.iter().map(|s| s.bytes()).sum::<usize>() - own.bytes(), 0);
                    if let Some(from) = list.get(rank) {
                        self.own_part(*from, Some(&own))?;
                    }
                } else {
                    self.traffic(0, own.bytes());
                }
                self.moved(arrived(output.dtype(), &[own]), |calls| {
                    if place.rank != *root {
                        return self.receive(calls, own, *root);
                    }
                    self.each_other(&list, |r, from| self.send(calls, from, r))
                })
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

    fn traffic(&self, sent: usize, received: usize) {
        self.shared.counters.add(sent as u64, received as u64);
    }

    /// One group of `calls` and the finishing touches.
    fn moved(&self, finish: Finish, calls: impl FnOnce(&Calls<'_>) -> Result<()>) -> Result<()> {
        self.counted(true, |c, _| calls(c), finish, false)
    }

    fn own_part(&self, from: Span, to: Option<&Span>) -> Result<()> {
        match to {
            Some(to) => self.shared.gpu.driver.copy(from, *to, self.stream),
            None => Ok(()),
        }
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
        if let Some(from) = from.get(rank) {
            self.own_part(*from, to.get(rank))?;
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
