//! What oneCCL gives the engine to work with: blocking calls, each on a thread that can be given up.
//!
//! Collectives have one executor of the engine; messages have one per peer and direction, on a communicator of their own, so that no
//! message waits for another. A call cannot be cancelled. So the operations that are with an executor stand in a `Desk`: after a failure
//! `interrupt` takes them out and gives back what no call uses yet; the memory of the others is leaked and counted (INV-8), their threads
//! count as stuck until they come back. The other ranks hear of a failure over the control connections
//! ([`ftcore::peers`]), and what they fail with is heard there.

use std::collections::BTreeMap;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ftcore::agreement::{Agreement, Message, Record};
use ftcore::engine::{
    self, Channel, Counters, Driver, Ended, Label, Place, Rules, SpinBudget, Stage, Ticket, spawn,
};
use ftcore::peers::{Meeting, Peers};
use ftcore::{Completion, Error, ErrorKind, OpKind, Result, Tensor, deadline_in, time_left};

use crate::call::{Call, Split, Task};
use crate::comms::Comms;
use crate::ops::{self, Count};
use crate::raw::exit::{Leaving, Stuck};
use crate::raw::lent::{Held, Lent, lend};
use crate::recipe::Recipe;
use crate::rendezvous;
use crate::tally::Tally;
use crate::traffic;
use crate::xpu::comm::Side;
use crate::xpu::ops as device_ops;

/// One configuration of a group at work.
pub(crate) type Engine = engine::Engine<XcclDriver>;

/// A failure ends what is with an executor at once, by `interrupt`; the grace is for one that is on its way there. Calls that do not
/// return are not waited for: `require_unstuck` keeps this process from going on beside them.
const RULES: Rules = Rules {
    depth: 1,
    grace: Duration::from_millis(50),
    gives_up: true,
};
/// How long an executor looks for its next operation, and a caller for the end of its own.
const SPINS: SpinBudget = SpinBudget {
    executor: Duration::from_micros(100),
    caller: Duration::from_micros(300),
};
/// A rank keeps so many cores busy: oneCCL's worker, the executor in its call, and the caller that looks. Both look only where the
/// ranks, which may all be on this host, have cores to spare: every look slows those down that share its core, the library's worker first
/// (two ranks on two cores, 64 KiB: 264 to 381 us with an executor that looks, 185 to 201 without).
const BUSY: usize = 3;
/// How long a rank that leaves waits for the others, so that communicators can be destroyed (a call of all ranks).
const LEAVING: Duration = Duration::from_secs(60);
/// How long it then waits until they all have.
const LAST_ONES: Duration = Duration::from_secs(4);
/// The barriers in which they wait; operations count from 0.
const LEFT: u64 = u64::MAX;
const DESTROYED: u64 = u64::MAX - 1;
/// The part of that for which `shutdown` waits.
const COURTESY: Duration = Duration::from_secs(2);

/// What a driver is made of.
pub(crate) struct Parts {
    pub(crate) comms: Comms,
    /// What ranks compare before they call the library. `None` in a world of one.
    pub(crate) agreement: Option<Agreement>,
    pub(crate) counters: Arc<Counters>,
    /// Whether contributors are counted.
    pub(crate) counted: bool,
    /// Whether ranks compare their collectives first.
    pub(crate) detects: bool,
    /// Where ranks of one host write down who contributes.
    pub(crate) tally: Option<Tally>,
    /// Of a group on a device.
    pub(crate) side: Option<Arc<Side>>,
}

/// Where the tensors of an operation are.
enum Memory {
    /// No call has them yet.
    Idle(Vec<Tensor>),
    /// The executor is in a call, and has their addresses.
    Lent(Held),
}

impl Memory {
    /// The tensors; those that a call may touch are leaked instead.
    fn take(self) -> Vec<Tensor> {
        match self {
            Self::Idle(tensors) => tensors,
            Self::Lent(held) => held.take(),
        }
    }
}

/// An operation that is with its executor.
struct Current {
    ticket: Ticket<XcclDriver>,
    memory: Memory,
}

/// A channel's place at the desk.
#[derive(Default)]
struct Slot {
    current: Option<Current>,
    /// Counts its operations: both ends of a message have the same number for it.
    turns: u64,
    /// Of its thread, if that was given up.
    stuck: Option<Stuck>,
}

#[derive(Default)]
struct Desk {
    /// They stay: a channel has one operation after the other.
    slots: BTreeMap<Channel, Slot>,
    /// Nothing begins any more.
    closed: bool,
    comms: Option<Arc<Comms>>,
    /// Ends when this rank and the others have left.
    left: Option<Receiver<()>>,
}

/// See the module.
pub(crate) struct XcclDriver {
    place: Place,
    desk: Mutex<Desk>,
    peers: Arc<Peers>,
    agreement: Option<Agreement>,
    counters: Arc<Counters>,
    counted: bool,
    detects: bool,
    tally: Option<Tally>,
    pub(crate) side: Option<Arc<Side>>,
    spins: SpinBudget,
}

/// What an operation fails with that comes when the group has ended.
fn ended() -> Error {
    Error::new(ErrorKind::Aborted, "the group ended")
}

impl XcclDriver {
    /// Starts an engine over communicators that are there already. If it does not come up, the other ranks are told.
    pub(crate) fn start(place: Place, parts: Parts, meeting: Meeting) -> Result<Arc<Engine>> {
        let peers = Peers::start(meeting)?;
        let Parts {
            comms,
            agreement,
            counters,
            counted,
            detects,
            tally,
            side,
        } = parts;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let spare = place.world as usize * BUSY <= cores;
        let driver = Self {
            place,
            desk: Mutex::new(Desk {
                comms: Some(Arc::new(comms)),
                ..Desk::default()
            }),
            peers: peers.clone(),
            agreement,
            counters,
            counted,
            detects,
            tally,
            side,
            spins: match place.world > 1 && spare {
                true => SPINS,
                false => SpinBudget::default(),
            },
        };
        let engine = Engine::start("ox-xccl", place, RULES, driver).inspect_err(|error| peers.fail(error))?;
        peers.listen(&engine, |_, _| {})?;
        Ok(engine)
    }

    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts an operation on the desk: its number in its channel and the communicators. `None` if the group has ended: then it has its answer.
    fn begin(&self, id: Channel, current: Current) -> Option<(u64, Arc<Comms>)> {
        let mut desk = self.desk();
        let comms = desk.comms.clone().filter(|_| !desk.closed);
        let Some(comms) = comms else {
            drop(desk);
            current.ticket.refuse(ended(), current.memory.take());
            return None;
        };
        let slot = desk.slots.entry(id).or_default();
        slot.current = Some(current);
        let number = slot.turns;
        slot.turns += 1;
        Some((number, comms))
    }

    /// Gives the addresses of the current operation's tensors to its executor. An error if it was taken away meanwhile.
    fn borrow(&self, id: Channel) -> Result<Lent> {
        let mut desk = self.desk();
        let slot = desk.slots.get_mut(&id);
        let current = slot.and_then(|slot| slot.current.as_mut()).ok_or_else(ended)?;
        let tensors = std::mem::replace(&mut current.memory, Memory::Idle(Vec::new())).take();
        let (held, lent) = lend(tensors);
        current.memory = Memory::Lent(held);
        Ok(lent)
    }

    /// Takes the operation off the desk. `None` if it was taken away meanwhile, and its caller told.
    fn finish(&self, id: Channel) -> Option<Current> {
        let mut desk = self.desk();
        let slot = desk.slots.get_mut(&id)?;
        slot.stuck = None;
        slot.current.take()
    }

    /// One operation, from its turn to its answer.
    fn run(&self, id: Channel, call: Call, ticket: Ticket<Self>) {
        let Call {
            op,
            contribute,
            deadline,
            order,
            ..
        } = call;
        let count = op.count();
        let record = self.detects.then(|| Record::of(&op, self.place));
        let (recipe, dtype, tensors) = match Recipe::of(op) {
            Ok(parts) => parts,
            Err(error) => return ticket.refuse(error, Vec::new()),
        };
        let bytes = tensors.iter().map(Tensor::byte_len).sum();
        let current = Current {
            ticket,
            memory: Memory::Idle(tensors),
        };
        let Some((number, comms)) = self.begin(id, current) else {
            return;
        };
        let content = || dtype.map_or(String::new(), |dtype| format!("{count} elements of {dtype}"));
        let message = self.message(&recipe, number);
        let result = self
            .meet(&recipe, message, number, record.as_ref(), content, deadline)
            .and_then(|()| {
                let link = match message {
                    Some(_) => comms.messages(),
                    None => &comms.collectives,
                };
                let count = Count {
                    counted: self.counted,
                    contribute,
                    tally: self.tally.as_ref(),
                };
                match &self.side {
                    _ if matches!(recipe, Recipe::MonitoredBarrier) => Ok(0),
                    None => ops::run(link, &recipe, dtype, &mut self.borrow(id)?, count),
                    Some(side) => {
                        side.begin(&recipe, &order, deadline)?;
                        device_ops::run(side, link, &recipe, dtype, &order, &self.borrow(id)?, count)
                    }
                }
            });
        drop(comms);
        let Some(Current { ticket, memory }) = self.finish(id) else {
            return;
        };
        match result {
            Ok(contributors) => {
                let (sent, received) = traffic::moved(&recipe, bytes, self.place);
                self.counters.add(sent, received);
                ticket.succeed(Completion {
                    tensors: memory.take(),
                    source: match recipe {
                        Recipe::Recv { peer } => Some(peer),
                        _ => None,
                    },
                    contributors,
                });
            }
            Err(error) => {
                let mut tensors = memory.take();
                if error.kind() == ErrorKind::Backend {
                    // oneCCL's own threads may be half-way through it.
                    for tensor in tensors.drain(..) {
                        tensor.leak("oneCCL failed half-way");
                    }
                }
                ticket.fail(error, tensors);
            }
        }
    }

    /// Which message `recipe` is, if it is one.
    fn message(&self, recipe: &Recipe, number: u64) -> Option<Message> {
        let own = self.place.rank;
        let (from, to) = match *recipe {
            Recipe::Send { peer } => (own, peer),
            Recipe::Recv { peer } => (peer, own),
            _ => return None,
        };
        Some(Message { from, to, number })
    }

    /// What happens before any call of the library: oneCCL stalls everything between two ranks, collectives too, behind a message that
    /// is not received yet. So both ends of one agree first; until then neither is in a call, and can be ended. So do all ranks of a
    /// collective that has a `record`.
    fn meet(
        &self,
        recipe: &Recipe,
        message: Option<Message>,
        number: u64,
        record: Option<&Record>,
        content: impl Fn() -> String,
        deadline: Instant,
    ) -> Result<()> {
        let Some(agreement) = &self.agreement else {
            return Ok(());
        };
        // The deadline is the engine's, which says what was waited for.
        let late = deadline.checked_add(LAST_ONES).unwrap_or(deadline);
        let record = record.filter(|_| message.is_none());
        record.map_or(Ok(()), |record| agreement.post(record, number, late))?;
        if matches!(recipe, Recipe::MonitoredBarrier) {
            // It waits for all by itself; ranks that call something else compare.
            return self.peers.barrier(number, late);
        }
        match message {
            Some(message) => agreement.meet(message, &content(), late),
            None if record.is_some() => agreement.compare(number, late),
            None => Ok(()),
        }
    }

    /// Splits the communicators: colours are small and dense, ranks our own.
    fn split(&self, id: Channel, task: &Split, ticket: Ticket<Self>) {
        // A loan of nothing: its thread counts as stuck if it is given up.
        let memory = Memory::Lent(lend(Vec::new()).0);
        let current = Current { ticket, memory };
        let Some((_, comms)) = self.begin(id, current) else {
            return;
        };
        let made = comms.split(task.color, task.rank, task.world);
        drop(comms);
        let failed = made.as_ref().err().cloned();
        let _ = task.reply.send(made.ok().flatten());
        let Some(Current { ticket, .. }) = self.finish(id) else {
            return;
        };
        match failed {
            Some(error) => ticket.fail(error, Vec::new()),
            None => ticket.succeed(Completion {
                tensors: Vec::new(),
                source: None,
                contributors: 0,
            }),
        }
    }

    /// Waits a little until the other ranks have left too, so that communicators are destroyed.
    pub(crate) fn wait_left(&self, deadline: Instant) {
        let left = self.desk().left.take();
        if let Some(left) = left {
            let _ = left.recv_timeout(time_left(deadline.min(deadline_in(COURTESY))));
        }
    }
}

impl Driver for XcclDriver {
    type Job = Call;
    const BLOCKS: bool = true;

    fn spin_budget(&self) -> SpinBudget {
        self.spins
    }

    fn enqueue(&self, call: Call, ticket: Ticket<Self>) {
        let id = call.channel;
        match &call.task {
            Task::Run => self.run(id, call, ticket),
            Task::Split(split) => self.split(id, split, ticket),
        }
    }

    fn interrupt(&self, failure: &Error, ended: Ended<Self>) {
        if let Some(agreement) = &self.agreement {
            agreement.end(failure.clone());
        }
        let current = {
            let mut desk = self.desk();
            desk.closed = true;
            let mut taken = Vec::new();
            for slot in desk.slots.values_mut() {
                let current = slot.current.take();
                if matches!(&current, Some(one) if matches!(one.memory, Memory::Lent(_))) {
                    slot.stuck = Some(Stuck::begin());
                }
                taken.extend(current);
            }
            taken
        };
        for one in current {
            // Its memory is leaked and counted here, if a call has it.
            let tensors = one.memory.take();
            one.ticket.refuse(failure.clone(), tensors);
        }
        self.peers.report(failure);
        self.peers.close();
        ended.clean();
    }

    /// Destroys the communicators once all ranks have left: it is a call of all of them, on a thread of its own.
    fn release(&self) -> Result<()> {
        let comms = {
            let mut desk = self.desk();
            desk.closed = true;
            desk.comms.take()
        };
        // No call is under way: this is the last reference.
        let comms = comms.and_then(|comms| Arc::try_unwrap(comms).ok());
        self.peers.leave();
        let (Some(comms), Some(_)) = (comms, &self.agreement) else {
            self.peers.close();
            return Ok(());
        };
        let peers = self.peers.clone();
        let leaving = Leaving::begin();
        let (holding, left) = mpsc::channel::<()>();
        self.desk().left = Some(left);
        spawn("ox-xccl-leave", move || {
            leave(comms, &peers);
            peers.close();
            drop((holding, leaving));
        })
    }

    fn waits_for(&self, label: &Label, stage: Stage) -> String {
        let id = Call::channel_of(label.kind, label.message.and_then(|(peer, _)| peer));
        let (in_call, begun) = {
            let desk = self.desk();
            let slot = desk.slots.get(&id);
            let current = slot.and_then(|slot| slot.current.as_ref());
            let in_call = current.is_some_and(|one| matches!(one.memory, Memory::Lent(_)));
            (in_call, slot.map_or(0, |slot| slot.turns))
        };
        match (stage, label.message) {
            (Stage::Entering | Stage::Running, None) if label.kind == OpKind::MonitoredBarrier => {
                // The last one that has begun.
                format!("waiting for {}", self.peers.awaited(begun.saturating_sub(1)))
            }
            (Stage::Queued, message) => {
                let which = message.map_or(String::new(), |(peer, tag)| {
                    format!(" (the message with rank {}, tag {tag})", peer.unwrap_or_default())
                });
                format!(
                    "not begun{which}: earlier operations of this group are not done, or this machine is too busy"
                )
            }
            _ if in_call => "in a oneCCL call: another rank has not called it, or is gone. oneCCL cannot cancel a call: its thread \
                             and its memory are given up, and this process cannot use oneCCL again (an isolated group can)"
                .to_string(),
            (_, Some((peer, tag))) => {
                format!("waiting for rank {} to come to the message (tag {tag})", peer.unwrap_or_default())
            }
            _ => "waiting for the other ranks".to_string(),
        }
    }
}

fn leave(comms: Comms, peers: &Peers) {
    if let Err(error) = peers.barrier(LEFT, deadline_in(LEAVING)) {
        tracing::debug!(%error, "the other ranks still use a communicator: it is not destroyed");
        return;
    }
    if let Err(error) = rendezvous::destroy(comms, deadline_in(LAST_ONES)) {
        tracing::warn!(%error, "the communicators of a group that was left are not destroyed");
        return;
    }
    // Rank 0's process has the key-value server that the others still talk to while they do the same.
    if let Err(error) = peers.barrier(DESTROYED, deadline_in(LAST_ONES)) {
        tracing::debug!(%error, "another rank did not get to destroy its communicator");
    }
}
