//! What oneCCL gives the engine to work with: blocking calls, each on a thread that can be given up.
//!
//! Collectives have one executor of the engine; messages have one per peer and direction, on a communicator of their own, so that no
//! message waits for another. A call cannot be cancelled. So the operations that are with an executor stand in a `Desk`: after a failure
//! `interrupt` takes them out and gives back what no call uses yet; the memory of the others is leaked and counted (INV-8), their threads
//! count as stuck until they come back. The other ranks hear of a failure through the store (`notices`), and what they fail with is heard there.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ftcore::agreement::{Agreement, Message, Record};
use ftcore::engine::{self, Channel, Driver, Ended, Label, Place, Rules, SpinBudget, Stage, Ticket, spawn};
use ftcore::lifecycle::{Engine as _, leave_at_exit};
use ftcore::{Completion, Error, ErrorKind, Result, Tensor, deadline_in, time_left};

use crate::call::{Call, Split, Task};
use crate::comms::Comms;
use crate::notices;
use crate::ops::{self, Count};
use crate::raw::exit::{Leaving, Stuck};
use crate::raw::lent::{Held, Lent, lend};
use crate::recipe::Recipe;
use crate::tally::Tally;
use crate::traffic::Counters;
use crate::xpu;
use crate::xpu::comm::Side;

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
/// A rank keeps so many cores busy: oneCCL's worker, the executor in its call, and the caller that looks. Callers look only where the
/// ranks, which may all be on this host, have cores to spare: every look slows those down that share its core.
const BUSY: usize = 3;
/// How long a rank that leaves waits for the others, so that communicators can be destroyed (a call of all ranks).
const LEAVING: Duration = Duration::from_secs(60);
/// How long it then waits until they all have.
const LAST_ONES: Duration = Duration::from_secs(4);
/// The part of that for which `shutdown` waits.
const COURTESY: Duration = Duration::from_secs(2);

/// What a driver is made of.
pub(crate) struct Parts {
    pub(crate) comms: Comms,
    /// `None` in a world of one.
    pub(crate) channel: Option<notices::Channel>,
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

#[derive(Default)]
struct Desk {
    current: BTreeMap<Channel, Current>,
    /// Counts the operations of each channel: both ends of a message have the same number for it.
    turns: BTreeMap<Channel, u64>,
    /// Of threads that were given up.
    stuck: BTreeMap<Channel, Stuck>,
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
    /// The group has failed or left: nothing is listened for.
    over: Arc<AtomicBool>,
    channel: Option<notices::Channel>,
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
    /// Starts an engine over communicators that are there already.
    pub(crate) fn start(place: Place, parts: Parts) -> Result<Arc<Engine>> {
        let Parts {
            comms,
            channel,
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
            over: Arc::default(),
            agreement: channel.as_ref().map(|channel| channel.agreement(place)),
            channel,
            counters,
            counted,
            detects,
            tally,
            side,
            spins: match (place.world, spare) {
                (1, _) => SpinBudget::default(),
                (_, true) => SPINS,
                (_, false) => SpinBudget {
                    caller: Duration::ZERO,
                    ..SPINS
                },
            },
        };
        let engine = Engine::start("ox-xccl", place, RULES, driver)?;
        let listening = engine.driver().listen(&engine);
        listening.inspect_err(|_| engine.abort("it cannot hear of failures"))?;
        Ok(engine)
    }

    /// Hears what other ranks report.
    fn listen(&self, engine: &Arc<Engine>) -> Result<()> {
        let Some(channel) = self.channel.clone() else {
            return Ok(());
        };
        let (engine, over) = (Arc::downgrade(engine), self.over.clone());
        spawn("ox-xccl-notices", move || {
            while !over.load(Ordering::Acquire) {
                if let Some(error) = channel.notice() {
                    return engine.upgrade().into_iter().for_each(|e| e.fail(error.clone()));
                }
            }
        })
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
        desk.current.insert(id, current);
        let turn = desk.turns.entry(id).or_default();
        let number = *turn;
        *turn += 1;
        Some((number, comms))
    }

    /// Gives the addresses of the current operation's tensors to its executor. An error if it was taken away meanwhile.
    fn borrow(&self, id: Channel) -> Result<Lent> {
        let mut desk = self.desk();
        let current = desk.current.get_mut(&id).ok_or_else(ended)?;
        let tensors = std::mem::replace(&mut current.memory, Memory::Idle(Vec::new())).take();
        let (held, lent) = lend(tensors);
        current.memory = Memory::Lent(held);
        Ok(lent)
    }

    /// Takes the operation off the desk. `None` if it was taken away meanwhile, and its caller told.
    fn finish(&self, id: Channel) -> Option<Current> {
        let mut desk = self.desk();
        desk.stuck.remove(&id);
        desk.current.remove(&id)
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
        let content = dtype.map_or(String::new(), |dtype| format!("{count} elements of {dtype}"));
        let message = self.message(&recipe, number);
        let result = self
            .meet(&recipe, message, number, record.as_ref(), &content, deadline)
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
                    _ if matches!(recipe, Recipe::MonitoredBarrier { .. }) => Ok(0),
                    None => ops::run(link, &recipe, dtype, &mut self.borrow(id)?, count),
                    Some(side) => {
                        side.begin(&recipe, &order, deadline)?;
                        xpu::ops::run(side, link, &recipe, dtype, &order, &self.borrow(id)?, count)
                    }
                }
            });
        drop(comms);
        let Some(Current { ticket, memory }) = self.finish(id) else {
            return;
        };
        match result {
            Ok(contributors) => {
                self.counters.add(&recipe, bytes, self.place);
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
        content: &str,
        deadline: Instant,
    ) -> Result<()> {
        let (Some(channel), Some(agreement)) = (&self.channel, &self.agreement) else {
            return Ok(());
        };
        let over = || self.over.load(Ordering::Acquire);
        // The deadline is the engine's, which says what was waited for.
        let late = deadline.checked_add(LAST_ONES).unwrap_or(deadline);
        let record = record.filter(|_| message.is_none());
        record.map_or(Ok(()), |record| agreement.post(record, number, late))?;
        if let Recipe::MonitoredBarrier { wait_all } = *recipe {
            // It waits for all by itself, and names who is missing; ranks that call something else compare.
            return channel.monitored_barrier(number, wait_all, deadline);
        }
        match message {
            Some(message) => agreement.meet(message, content, late, over),
            None if record.is_some() => agreement.compare(number, late, over),
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
        self.over.store(true, Ordering::Release);
        let current = {
            let mut desk = self.desk();
            desk.closed = true;
            let current = std::mem::take(&mut desk.current);
            for (id, one) in &current {
                if matches!(one.memory, Memory::Lent(_)) {
                    desk.stuck.insert(*id, Stuck::begin());
                }
            }
            current
        };
        for one in current.into_values() {
            // Its memory is leaked and counted here, if a call has it.
            let tensors = one.memory.take();
            one.ticket.refuse(failure.clone(), tensors);
        }
        let Some(channel) = self.channel.clone() else {
            return ended.clean();
        };
        let (telling, told) = mpsc::channel::<()>();
        // This process may end at once: not before that is told.
        leave_at_exit(told);
        let failure = failure.clone();
        let tell = move || {
            channel.tell(&failure, || ended.clean());
            drop(telling);
        };
        if let Err(error) = spawn("ox-xccl-tell", tell) {
            tracing::warn!(%error, "the other ranks are not told of a failure");
        }
    }

    /// Destroys the communicators once all ranks have left: it is a call of all of them, on a thread of its own.
    fn release(&self) -> Result<()> {
        self.over.store(true, Ordering::Release);
        let comms = {
            let mut desk = self.desk();
            desk.closed = true;
            desk.comms.take()
        };
        // No call is under way: this is the last reference.
        let comms = comms.and_then(|comms| Arc::try_unwrap(comms).ok());
        let (Some(comms), Some(channel)) = (comms, self.channel.clone()) else {
            return Ok(());
        };
        let leaving = Leaving::begin();
        let (holding, left) = mpsc::channel::<()>();
        self.desk().left = Some(left);
        spawn("ox-xccl-leave", move || {
            leave(comms, &channel);
            drop((holding, leaving));
        })
    }

    fn waits_for(&self, label: &Label, stage: Stage) -> String {
        let id = Call::channel_of(label.kind, label.message.and_then(|(peer, _)| peer));
        let in_call =
            matches!(self.desk().current.get(&id), Some(one) if matches!(one.memory, Memory::Lent(_)));
        match (stage, label.message) {
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

fn leave(comms: Comms, channel: &notices::Channel) {
    if let Err(error) = channel.all_have_left(deadline_in(LEAVING)) {
        tracing::debug!(%error, "the other ranks still use a communicator: it is not destroyed");
        return;
    }
    comms.destroy();
    // Rank 0's process has the key-value server that the others still talk to while they do the same.
    if let Err(error) = channel.all_have_destroyed(deadline_in(LAST_ONES)) {
        tracing::debug!(%error, "another rank did not get to destroy its communicator");
    }
}

#[cfg(test)]
mod tests {
    use ftcore::{InMemoryStore, Store};

    use super::*;

    fn engine(channel: Option<notices::Channel>, world: u32) -> Arc<Engine> {
        let parts = Parts {
            comms: Comms::alone(),
            channel,
            counters: Arc::default(),
            counted: false,
            detects: false,
            tally: None,
            side: None,
        };
        let place = Place {
            rank: 0,
            world,
            epoch: 1,
        };
        XcclDriver::start(place, parts).unwrap()
    }

    #[test]
    fn a_process_that_ends_right_after_an_abort_has_told_the_others() {
        let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
        let channels = [0, 1].map(|rank| notices::Channel::new(store.clone(), "x".into(), rank, 2));
        let engine = engine(Some(channels[0].clone()), 2);
        engine.abort("enough");
        // As the end of the process does.
        ftcore::lifecycle::wait_for_leaves();
        let told = store.check(&[&channels[0].key("notices")], deadline_in(Duration::ZERO));
        assert!(told.unwrap(), "nothing was told");
        let heard = channels[1].notice().unwrap();
        assert!(heard.to_string().contains("enough"), "{heard}");
    }
}
