//! From an operation to calls of the library: which ones, in which order, on which stream.
//!
//! Collectives go on one stream. Messages go on streams of their own, one per peer and direction, so that a receive that
//! waits for its sender holds up nothing else. Operations that HCCL lacks are composed of grouped sends and receives. A
//! group of one rank needs no communicator: its operations are copies.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::ftcore::engine::Counters;
use crate::ftcore::{Accelerator, Collective, DType, Error, ErrorKind, Event, ReduceOp, Result, Tensor};
use crate::raw::hccl::{CommHandle, Hccl, Span, Target};
use crate::raw::memory::{self, span};
use crate::raw::synapse::Direction;
use crate::runtime::{Once, Runtime};
use crate::stream::{HpuEvent, HpuStream};

/// Messages to or from one peer, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Channel {
    send: bool,
    peer: u32,
}

struct ChannelStream {
    stream: HpuStream,
    last: Option<Arc<HpuEvent>>,
}

/// What a group's own thread issues operations with.
pub(crate) struct Issuer {
    runtime: &'static Runtime,
    /// `None` for a group of one.
    comm: Option<CommHandle>,
    rank: u32,
    world: u32,
    stream: HpuStream,
    channels: HashMap<Channel, ChannelStream>,
    /// For batches.
    batches: Option<HpuStream>,
    /// For barriers.
    zero: &'static Tensor,
    /// Bytes of payload, as the usual algorithms move them; the library does not say what it really moved.
    counters: Arc<Counters>,
    /// The communicator is being aborted, or was: its handle leads nowhere.
    gone: Arc<AtomicBool>,
}

/// One send or receive of a composed operation.
struct Part {
    send: bool,
    peer: u32,
    data: Span,
}

impl Part {
    fn channel(&self) -> Channel {
        Channel {
            send: self.send,
            peer: self.peer,
        }
    }
}

/// One zero, to which the barriers of all groups add zeros. It stays for good: a barrier that was given up may write it at any time.
fn zero(runtime: &'static Runtime, stream: &HpuStream) -> Result<&'static Tensor> {
    static ZERO: Once<Tensor> = Once::new();
    ZERO.get(|| {
        let mut zero = memory::tensor(runtime, DType::I32, &[1])?;
        crate::HpuAccelerator.copy_in(&[0; 4], &mut zero, stream)?;
        Ok(zero)
    })
}

impl Issuer {
    /// Makes the stream, and the memory of barriers if there is none yet.
    pub(crate) fn new(
        runtime: &'static Runtime,
        comm: Option<CommHandle>,
        rank: u32,
        world: u32,
        counters: Arc<Counters>,
    ) -> Result<Self> {
        let stream = HpuStream::new(runtime)?;
        let zero = zero(runtime, &stream)?;
        Ok(Self {
            runtime,
            comm,
            rank,
            world,
            stream,
            channels: HashMap::new(),
            batches: None,
            zero,
            counters,
            gone: Arc::default(),
        })
    }

    /// Set when the communicator is aborted, so that what comes to the library later stays out of it.
    pub(crate) fn gone(&self) -> Arc<AtomicBool> {
        self.gone.clone()
    }

    /// The library, for one call on the communicator: an error once that is being aborted, since its handle leads nowhere then.
    fn hccl(&self) -> Result<&'static Hccl> {
        match self.gone.load(Ordering::Acquire) {
            true => Err(Error::new(ErrorKind::Aborted, "the communicator was aborted")),
            false => Ok(&self.runtime.libraries.hccl),
        }
    }

    /// Enqueues `op` after `after`; the event is reached when the device has finished it. The caller keeps `op` until then,
    /// and for ever if this fails, since a part of it may be running.
    pub(crate) fn issue(
        &mut self,
        op: &Collective,
        after: Option<&dyn Event>,
        deadline: Instant,
    ) -> Result<Arc<HpuEvent>> {
        match op {
            Collective::Send { tensor, peer, .. } => self.message(true, *peer, tensor, after, deadline),
            Collective::Recv {
                tensor,
                peer: Some(peer),
                ..
            } => self.message(false, *peer, tensor, after, deadline),
            Collective::Batch { ops } => self.batch(ops, after, deadline),
            _ => {
                if let Some(after) = after {
                    self.stream.wait_for(after, deadline)?;
                }
                match self.comm {
                    Some(comm) => {
                        let to = Target {
                            comm,
                            stream: self.stream.handle(),
                        };
                        self.collective(to, op)?;
                    }
                    None => self.alone(op)?,
                }
                self.stream.mark()
            }
        }
    }

    /// A collective of several ranks. Pieces of no elements are left out, on all ranks alike.
    fn collective(&self, to: Target, op: &Collective) -> Result<()> {
        let others = u64::from(self.world) - 1;
        let world = u64::from(self.world);
        let some = |t: &&Tensor| t.count() > 0;
        match op {
            Collective::AllReduce { tensors, op } => {
                for t in tensors.iter().filter(some) {
                    let bytes = span(t).bytes() * 2 * others / world;
                    self.counters.add(bytes, bytes);
                    self.hccl()?.all_reduce(to, span(t), *op)?;
                }
                Ok(())
            }
            Collective::Broadcast { tensors, root } => {
                for t in tensors.iter().filter(some) {
                    self.count_rooted(*root, span(t).bytes(), true);
                    self.hccl()?.broadcast(to, span(t), *root)?;
                }
                Ok(())
            }
            Collective::Reduce { tensor, op, root } => self.reduce(to, tensor, tensor, *op, *root),
            Collective::AllGatherInto { pairs } => {
                for (input, output) in pairs.iter().filter(|(i, _)| i.count() > 0) {
                    let bytes = span(input).bytes() * others;
                    self.counters.add(bytes, bytes);
                    self.hccl()?.all_gather(to, span(input), span(output))?;
                }
                Ok(())
            }
            Collective::ReduceScatterInto { pairs, op } => {
                for (input, output) in pairs.iter().filter(|(_, o)| o.count() > 0) {
                    let bytes = span(output).bytes() * others;
                    self.counters.add(bytes, bytes);
                    self.hccl()?.reduce_scatter(to, span(input), span(output), *op)?;
                }
                Ok(())
            }
            Collective::ReduceScatter { inputs, output, op } => {
                for (input, root) in inputs.iter().zip(0u32..) {
                    self.reduce(to, input, output, *op, root)?;
                }
                Ok(())
            }
            Collective::AllToAllInto {
                input,
                output,
                input_splits,
                output_splits,
            } => {
                if input_splits.is_empty() && output_splits.is_empty() {
                    if input.count() == 0 {
                        return Ok(());
                    }
                    let bytes = span(input).bytes() * others / world;
                    self.counters.add(bytes, bytes);
                    return self.hccl()?.all_to_all(to, span(input), span(output));
                }
                self.exchange(
                    to,
                    &split(input, input_splits, self.world),
                    &split(output, output_splits, self.world),
                )
            }
            Collective::AllGather { input, outputs } => {
                let own = vec![span(input); self.world as usize];
                self.exchange(to, &own, &spans(outputs))
            }
            Collective::AllToAll { inputs, outputs } => self.exchange(to, &spans(inputs), &spans(outputs)),
            Collective::Gather { input, outputs, root } => {
                let sends = self.only(*root, span(input));
                self.exchange(to, &sends, &spans(outputs))
            }
            Collective::Scatter { inputs, output, root } => {
                let receives = self.only(*root, span(output));
                self.exchange(to, &spans(inputs), &receives)
            }
            Collective::Barrier => self.hccl()?.all_reduce(to, span(self.zero), ReduceOp::Sum),
            other => Err(Error::unsupported(format!(
                "hccl does not offer {}",
                other.kind()
            ))),
        }
    }

    fn count_rooted(&self, root: u32, bytes: u64, from_root: bool) {
        if (self.rank == root) == from_root {
            self.counters.add(bytes, 0);
        } else {
            self.counters.add(0, bytes);
        }
    }

    fn reduce(&self, to: Target, input: &Tensor, output: &Tensor, op: ReduceOp, root: u32) -> Result<()> {
        if input.count() == 0 {
            return Ok(());
        }
        self.count_rooted(root, span(input).bytes(), false);
        let result = (self.rank == root).then(|| span(output));
        self.hccl()?.reduce(to, span(input), result, op, root)
    }

    /// A list with `data` at `place` and nothing elsewhere.
    fn only(&self, place: u32, data: Span) -> Vec<Span> {
        (0..self.world)
            .map(|r| Span {
                count: if r == place { data.count } else { 0 },
                ..data
            })
            .collect()
    }

    /// `sends[r]` goes to rank r, `receives[r]` comes from rank r, the own part is copied. Empty lists stand for nothing.
    fn exchange(&self, to: Target, sends: &[Span], receives: &[Span]) -> Result<()> {
        let own = self.rank as usize;
        if let (Some(from), Some(into)) = (sends.get(own), receives.get(own)) {
            self.copy(*from, *into)?;
        }
        let parts = |list: &[Span], send| {
            list.iter()
                .zip(0u32..)
                .filter(|(data, peer)| data.count > 0 && *peer != self.rank)
                .map(|(data, peer)| Part {
                    send,
                    peer,
                    data: *data,
                })
                .collect::<Vec<_>>()
        };
        let mut all = parts(sends, true);
        all.extend(parts(receives, false));
        self.group(to, &all)
    }

    fn copy(&self, from: Span, into: Span) -> Result<()> {
        if from.count == 0 || from.address == into.address {
            return Ok(());
        }
        let synapse = &self.runtime.libraries.synapse;
        synapse.copy(
            self.stream.handle(),
            from.address,
            into.address,
            from.bytes().min(into.bytes()),
            Direction::DeviceToDevice,
        )
    }

    fn group(&self, to: Target, parts: &[Part]) -> Result<()> {
        if parts.is_empty() {
            return Ok(());
        }
        self.hccl()?
            .group(|| parts.iter().try_for_each(|part| self.part(to, part)))
    }

    fn part(&self, to: Target, part: &Part) -> Result<()> {
        if part.send {
            self.counters.add(part.data.bytes(), 0);
            self.hccl()?.send(to, part.data, part.peer)
        } else {
            self.counters.add(0, part.data.bytes());
            self.hccl()?.receive(to, part.data, part.peer)
        }
    }

    /// A collective of one rank: the inputs are the results.
    fn alone(&self, op: &Collective) -> Result<()> {
        let copy = |from: &Tensor, into: &Tensor| self.copy(span(from), span(into));
        let lists =
            |from: &[Tensor], into: &[Tensor]| from.iter().zip(into).try_for_each(|(f, i)| copy(f, i));
        match op {
            Collective::AllReduce { .. }
            | Collective::Broadcast { .. }
            | Collective::Reduce { .. }
            | Collective::Barrier => Ok(()),
            Collective::AllGather { input, outputs } | Collective::Gather { input, outputs, .. } => {
                outputs.iter().try_for_each(|o| copy(input, o))
            }
            Collective::Scatter { inputs, output, .. } | Collective::ReduceScatter { inputs, output, .. } => {
                inputs.iter().try_for_each(|i| copy(i, output))
            }
            Collective::AllGatherInto { pairs } | Collective::ReduceScatterInto { pairs, .. } => {
                pairs.iter().try_for_each(|(i, o)| copy(i, o))
            }
            Collective::AllToAll { inputs, outputs } => lists(inputs, outputs),
            Collective::AllToAllInto { input, output, .. } => copy(input, output),
            other => Err(Error::unsupported(format!(
                "hccl does not offer {}",
                other.kind()
            ))),
        }
    }

    fn channel(&mut self, channel: Channel) -> Result<&mut ChannelStream> {
        use std::collections::hash_map::Entry;
        Ok(match self.channels.entry(channel) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(ChannelStream {
                stream: HpuStream::new(self.runtime)?,
                last: None,
            }),
        })
    }

    /// There is no message to oneself, so a group of one has none.
    fn comm_of_messages(&self) -> Result<CommHandle> {
        self.comm
            .ok_or_else(|| Error::invalid("a group of one rank has no peer to exchange messages with"))
    }

    fn message(
        &mut self,
        send: bool,
        peer: u32,
        tensor: &Tensor,
        after: Option<&dyn Event>,
        deadline: Instant,
    ) -> Result<Arc<HpuEvent>> {
        let comm = self.comm_of_messages()?;
        let data = span(tensor);
        let channel = self.channel(Channel { send, peer })?;
        if let Some(after) = after {
            channel.stream.wait_for(after, deadline)?;
        }
        let to = Target {
            comm,
            stream: channel.stream.handle(),
        };
        if data.count > 0 {
            self.part(to, &Part { send, peer, data })?;
        }
        let channel = self.channel(Channel { send, peer })?;
        let done = channel.stream.mark()?;
        channel.last = Some(done.clone());
        Ok(done)
    }

    /// One group on a stream of its own, after the messages that were called before with the same peers and before those
    /// that come later.
    fn batch(
        &mut self,
        ops: &[Collective],
        after: Option<&dyn Event>,
        deadline: Instant,
    ) -> Result<Arc<HpuEvent>> {
        let comm = self.comm_of_messages()?;
        let parts: Vec<Part> = ops
            .iter()
            .filter_map(|op| match op {
                Collective::Send { tensor, peer, .. } => Some((true, *peer, tensor)),
                Collective::Recv {
                    tensor,
                    peer: Some(peer),
                    ..
                } => Some((false, *peer, tensor)),
                _ => None,
            })
            .filter(|(_, _, tensor)| tensor.count() > 0)
            .map(|(send, peer, tensor)| Part {
                send,
                peer,
                data: span(tensor),
            })
            .collect();
        let stream = match self.batches.take() {
            Some(stream) => stream,
            None => HpuStream::new(self.runtime)?,
        };
        if let Some(after) = after {
            stream.wait_for(after, deadline)?;
        }
        for part in &parts {
            if let Some(last) = self.channel(part.channel())?.last.take() {
                stream.wait_for(&*last, deadline)?;
            }
        }
        let to = Target {
            comm,
            stream: stream.handle(),
        };
        self.group(to, &parts)?;
        let done = stream.mark()?;
        for part in &parts {
            let channel = self.channel(part.channel())?;
            channel.stream.wait_for(&*done, deadline)?;
            channel.last = Some(done.clone());
        }
        self.batches = Some(stream);
        Ok(done)
    }
}

fn spans(tensors: &[Tensor]) -> Vec<Span> {
    tensors.iter().map(span).collect()
}

/// The parts of a tensor, rank by rank. Empty splits mean even ones.
fn split(tensor: &Tensor, splits: &[usize], world: u32) -> Vec<Span> {
    let whole = span(tensor);
    let even = vec![whole.count / world.max(1) as usize; world as usize];
    let counts = if splits.is_empty() { &even } else { splits };
    let mut begin = 0u64;
    counts
        .iter()
        .map(|&count| {
            let part = Span {
                address: whole.address + begin,
                count,
                ..whole
            };
            begin += part.bytes();
            part
        })
        .collect()
}
