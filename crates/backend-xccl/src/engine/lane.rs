//! The threads of the lanes: they take jobs, run them, and at the end destroy the communicators.
//!
//! A job's tensors are lent to its thread only for the time of oneCCL's calls; a thread that finds its job gone ends.

use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use ftcore::{Error, ErrorKind, Result, Tensor, time_left};

use super::spin;
use super::watch::Stage;
use super::{Comms, Engine, FAREWELL, LAST_ONES, LaneId};
use crate::job::{Active, Job, Label, Memory, Task};
use crate::link::Link;
use crate::news::Message;
use crate::ops;
use crate::raw::comm::Comm;
use crate::raw::lent::{Lent, lend};
use crate::recipe::Recipe;
use crate::xpu;
use crate::xpu::comm::{Side, XpuComm};

/// A lane's turn.
struct Turn {
    number: u64,
    what: What,
    label: Label,
}

enum What {
    Run {
        recipe: Recipe,
        contribute: bool,
        bytes: usize,
    },
    Split {
        color: Option<u32>,
        rank: u32,
        world: u32,
        reply: Sender<Result<Option<Comms>>>,
    },
}

impl Engine {
    /// The next job of lane `id`, registered as active; `None` when the lane's thread is to end.
    fn next(&self, id: LaneId) -> Option<Turn> {
        let mut state = self.lock();
        // Messages are rare, and each has a thread of its own.
        let mut tired = id != LaneId::Collectives;
        loop {
            let stopping = state.stopping || state.error.is_some();
            let lane = state.lanes.get_mut(&id)?;
            if let Some(Job { label, task }) = lane.queue.pop_front() {
                let number = lane.turn;
                lane.turn += 1;
                let (what, memory, sink) = match task {
                    Task::Run {
                        recipe,
                        tensors,
                        contribute,
                        sink,
                    } => {
                        let bytes = tensors.iter().map(Tensor::byte_len).sum();
                        let what = What::Run {
                            recipe,
                            contribute,
                            bytes,
                        };
                        (what, Memory::Idle(tensors), Some(sink))
                    }
                    Task::Split {
                        color,
                        rank,
                        world,
                        reply,
                    } => {
                        let what = What::Split {
                            color,
                            rank,
                            world,
                            reply,
                        };
                        // A loan of nothing: its thread counts as stuck if it is given up.
                        let (held, lent) = lend(Vec::new());
                        lane.split = Some(lent);
                        (what, Memory::Lent(held), None)
                    }
                };
                lane.active = Some(Active {
                    label: label.clone(),
                    memory,
                    sink,
                });
                return Some(Turn { number, what, label });
            }
            if stopping {
                return None;
            }
            if !std::mem::replace(&mut tired, true) {
                let seen = self.arrivals.load(Ordering::Acquire);
                drop(state);
                spin::between_jobs(|| self.arrivals.load(Ordering::Acquire) != seen);
                state = self.lock();
                continue;
            }
            lane.asleep = true;
            let wake = lane.wake.clone();
            state = wake.wait(state).unwrap_or_else(PoisonError::into_inner);
            if let Some(lane) = state.lanes.get_mut(&id) {
                lane.asleep = false;
            }
        }
    }

    /// Gives the addresses of the active job's tensors to its thread; `None` if the job was ended meanwhile.
    fn borrow(&self, id: LaneId) -> Option<Lent> {
        let mut state = self.lock();
        let active = state.lanes.get_mut(&id)?.active.as_mut()?;
        let tensors = std::mem::replace(&mut active.memory, Memory::Idle(Vec::new())).take();
        let (held, lent) = lend(tensors);
        active.memory = Memory::Lent(held);
        Some(lent)
    }

    /// Takes the active job out of its lane; `None` if it was ended meanwhile, and then its thread must end too.
    fn finished(&self, id: LaneId) -> Option<Active> {
        let mut state = self.lock();
        let stopping = state.stopping;
        let lane = state.lanes.get_mut(&id)?;
        lane.split = None;
        let active = lane.active.take();
        if active.is_none() {
            lane.stuck = None;
        }
        drop(state);
        if stopping {
            self.changed.notify_all();
            self.watch.notify_one();
        }
        active
    }

    /// Runs jobs of one lane until it is to end. False if this thread was given up.
    fn serve(&self, id: LaneId, comms: &Comms) -> bool {
        while let Some(turn) = self.next(id) {
            let label = turn.label.clone();
            let error = match turn.what {
                What::Run {
                    recipe,
                    contribute,
                    bytes,
                } => {
                    let result = self.run(id, comms, &recipe, contribute, turn.number, &label);
                    let Some(active) = self.finished(id) else {
                        return false;
                    };
                    let Some(sink) = active.sink else { return false };
                    match result {
                        Ok(contributors) => {
                            self.counters.add(&recipe, bytes, self.place);
                            let source = match recipe {
                                Recipe::Recv { peer } => Some(peer),
                                _ => None,
                            };
                            sink.succeed(active.memory.take(), source, contributors);
                            if let (Recipe::Send { peer }, Some(channel)) = (recipe, &self.channel) {
                                channel.forget(self.message_to(peer, turn.number));
                            }
                            None
                        }
                        Err(error) => Some((label.on(self.named(error)), active.memory, sink)),
                    }
                }
                What::Split {
                    color,
                    rank,
                    world,
                    reply,
                } => {
                    let result = split_comms(comms, color, rank, world);
                    let failed = result.as_ref().err().cloned();
                    let _ = reply.send(result);
                    if self.finished(id).is_none() {
                        return false;
                    }
                    if let Some(error) = failed {
                        self.tell_and_fail(&self.named(error).with_op("split"));
                    }
                    None
                }
            };
            if let Some((error, memory, sink)) = error {
                self.tell_and_fail(&error);
                let mut tensors = memory.take();
                if error.kind() == ErrorKind::Backend {
                    // oneCCL's own threads may be half-way through it.
                    for tensor in tensors.drain(..) {
                        tensor.leak("oneCCL failed half-way");
                    }
                }
                sink.fail(error, tensors);
            }
        }
        true
    }

    /// Runs one operation. Its tensors are lent for the time of oneCCL's calls only.
    fn run(
        &self,
        id: LaneId,
        comms: &Comms,
        recipe: &Recipe,
        contribute: bool,
        number: u64,
        label: &Label,
    ) -> Result<u32> {
        let ended = || Error::new(ErrorKind::Aborted, "the group ended");
        let count = self.count(contribute);
        let (link, message) = match *recipe {
            Recipe::MonitoredBarrier { wait_all } => return self.monitored(wait_all, label),
            Recipe::Send { peer } => (
                comms.messages.as_ref().unwrap_or(&comms.collectives),
                Some(self.message_to(peer, number)),
            ),
            Recipe::Recv { peer } => (
                comms.messages.as_ref().unwrap_or(&comms.collectives),
                Some(Message {
                    from: peer,
                    to: self.place.rank,
                    number,
                }),
            ),
            _ => (&comms.collectives, None),
        };
        // oneCCL stalls everything between two ranks, collectives too, behind a message that nobody receives yet. So both
        // ends agree first; until then neither is in a call, and can be ended.
        if let (Some(message), Some(channel)) = (message, &self.channel) {
            let content = match label.dtype {
                Some(dtype) => format!("{} elements of {dtype}", label.count),
                None => String::new(),
            };
            let over = || self.error().is_some();
            let met = match recipe {
                Recipe::Send { .. } => channel.offer(message, &content, label.deadline, over),
                _ => channel.accept(message, &content, label.deadline, over),
            };
            met.map_err(|e| match e.kind() {
                // This thread and the watcher see the deadline pass at the same moment: one text, whoever is first.
                ErrorKind::Timeout => self.overdue(label, Stage::Meeting),
                _ => e,
            })?;
        }
        let Some(side) = &self.side else {
            let mut lent = self.borrow(id).ok_or_else(ended)?;
            return ops::run(link, recipe, label.dtype, &mut lent, count);
        };
        side.begin(recipe, label)?;
        let lent = self.borrow(id).ok_or_else(ended)?;
        xpu::ops::run(side, link, recipe, label, &lent, count)
    }

    fn message_to(&self, peer: u32, number: u64) -> Message {
        Message {
            from: self.place.rank,
            to: peer,
            number,
        }
    }

    fn monitored(&self, wait_all: bool, label: &Label) -> Result<u32> {
        let (Some(channel), Some(seq)) = (&self.channel, label.seq) else {
            return Ok(0);
        };
        channel
            .monitored_barrier(seq, wait_all, label.deadline)
            .map(|()| 0)
    }

    /// The thread of the collectives: their lane, then the end of the communicators.
    pub(super) fn collectives(self: Arc<Self>) {
        let Some(comms) = self.lock().comms.clone() else {
            return;
        };
        let alive = self.serve(LaneId::Collectives, &comms);
        drop(comms);
        if alive && self.error().is_none() {
            self.farewell();
        }
        {
            let mut state = self.lock();
            state.ended = true;
            state.leaving = None;
        }
        self.changed.notify_all();
        self.watch.notify_one();
    }

    pub(super) fn messages(self: Arc<Self>, id: LaneId) {
        let comms = self.lock().comms.clone();
        let Some(comms) = comms else { return };
        let alive = self.serve(id, &comms);
        drop(comms);
        if alive {
            self.lock().lanes.remove(&id);
            self.changed.notify_all();
        }
    }

    /// Destroys the communicators once all ranks have left: it is a call of all of them.
    fn farewell(&self) {
        let until = ftcore::deadline_in(FAREWELL);
        let mut state = self.lock();
        while state.lanes.len() > 1 {
            if state.error.is_some() || Instant::now() >= until {
                return;
            }
            state = self
                .changed
                .wait_timeout(state, time_left(until))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        let comms = state.comms.take().and_then(|c| Arc::try_unwrap(c).ok());
        drop(state);
        let (Some(comms), Some(channel)) = (comms, &self.channel) else {
            return;
        };
        if let Err(error) = channel.all_have_left(until) {
            tracing::debug!(%error, "the other ranks still use a communicator: it is not destroyed");
            return;
        }
        let links = [comms.messages, Some(comms.collectives)];
        let comms = links.into_iter().flatten().filter_map(|link| match link {
            Link::Comm(comm) => Some(comm),
            Link::Xpu(on_device) => Some(on_device.comm),
            Link::Alone => None,
        });
        for comm in comms {
            if let Err(error) = comm.destroy() {
                tracing::warn!(%error, "a communicator was not destroyed");
            }
        }
        // Rank 0's process has the key-value server that the others still talk to while they do the same.
        if let Err(error) = channel.all_have_destroyed(ftcore::deadline_in(LAST_ONES)) {
            tracing::debug!(%error, "another rank did not get to destroy its communicator");
        }
    }
}

/// The communicators of a split group, and those of its messages.
fn split_comms(comms: &Comms, color: Option<u32>, rank: u32, world: u32) -> Result<Option<Comms>> {
    match &comms.collectives {
        Link::Alone => Ok(color.map(|_| Comms::alone())),
        Link::Comm(parent) => {
            let made = parent.split(color, rank, rank, world)?;
            made.map(with_messages).transpose()
        }
        Link::Xpu(parent) => {
            let made = parent.comm.split(color, rank, rank, world)?;
            made.map(|made| on_device(made, &parent.side)).transpose()
        }
    }
}

/// As [`with_messages`] for a group on a device: the communicator for messages is made where messages work.
pub(crate) fn on_device(made: Comm, side: &Arc<Side>) -> Result<Comms> {
    let side = side.sibling()?;
    let link = |comm| {
        Link::Xpu(XpuComm {
            comm,
            side: side.clone(),
        })
    };
    if made.world() == 1 || side.has_messages() {
        let Comms {
            collectives,
            messages,
        } = with_messages(made)?;
        let moved = |l| match l {
            Link::Comm(comm) => link(comm),
            other => other,
        };
        return Ok(Comms {
            collectives: moved(collectives),
            messages: messages.map(moved),
        });
    }
    Ok(Comms {
        collectives: link(made),
        messages: None,
    })
}

/// Adds the communicator for messages to one that is for collectives from now on. A call of all its ranks.
pub(crate) fn with_messages(made: Comm) -> Result<Comms> {
    if made.world() == 1 {
        made.destroy()?;
        return Ok(Comms::alone());
    }
    let messages = made.split(Some(0), made.rank(), made.rank(), made.world())?;
    Ok(Comms {
        collectives: Link::Comm(made),
        messages: messages.map(Link::Comm),
    })
}
