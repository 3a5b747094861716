//! The state machine of one configured group: numbers, stages and instants in, what to do out. No IO, no threads, no clock.
//!
//! An operation is a number. It is queued, goes to the driver, comes back with an answer, and its caller is told once. Operations of
//! one channel start and are told in the order of submission. The first failure is kept and ends everything that is pending; the
//! driver is interrupted once, and the group has ended when the driver has answered that, every caller is told, and no call of the
//! driver's is under way.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};
use std::vec::Drain;

use crate::later;

/// What an operation is ordered with: those of one channel start and are told in the order of submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Channel {
    /// The collectives of the group.
    Collectives,
    /// Messages in one direction.
    Messages {
        /// Sent, not received.
        send: bool,
        /// With whom; none for receives from any rank.
        peer: Option<u32>,
        /// Their tag.
        tag: u32,
    },
    /// They start in the order of submission, and each is told when it has ended.
    Unordered,
}

/// How far an operation has come, for messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Behind earlier ones: the driver has not seen it.
    Queued,
    /// Inside the driver's `enqueue`.
    Entering,
    /// In flight: `enqueue` has returned.
    Running,
    /// The driver has answered; an earlier one of its channel is not through.
    Finished,
}

/// How many of what a driver takes at once, and how long it may take to let go.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    /// Operations of one channel that may be with the driver at once; at least 1.
    pub depth: usize,
    /// After a failure: how long an operation may take to come back with its memory. Then it fails without it.
    pub grace: Duration,
    /// Whether the grace bounds the end of the group, too. Then neither the driver's answer to the interruption nor a call that has
    /// not returned is waited for any longer: the driver [gives up](super::Driver::give_up) what it still has. For libraries that may
    /// hang in an abort and can be used anew beside that.
    pub gives_up: bool,
}

/// What the executor does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// Hand this operation to the driver, then say [`Machine::returned`].
    Start(u64),
    /// Call the driver's `release`, then say [`Machine::released`].
    Release,
    /// Nothing now.
    Wait,
    /// Nothing ever.
    Over,
}

/// What is to be done outside the machine, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// Tell the caller the driver's answer.
    Tell(u64),
    /// Tell the caller the group's failure. Its memory goes with it where it is here: if the driver never had it, or has answered.
    Fail(u64),
    /// Tell the driver to end everything.
    Interrupt,
    /// Tell the driver that the grace is over: what it still has is not waited for.
    GiveUp,
}

/// What the driver says of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer<E> {
    /// It has ended, well or not; the group is none the worse.
    Through,
    /// It has failed, and the group with it.
    Fatal(E),
}

/// Why nothing is accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Refusal<E> {
    /// The group has failed before.
    Failed(E),
    /// It leaves or drains.
    Closed,
}

/// How a group ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// The driver has let go of everything.
    Clean,
    /// That is not certain.
    Unclean,
}

struct Operation {
    channel: Channel,
    deadline: Instant,
    stage: Stage,
    /// The caller knows; the driver may still have it.
    told: bool,
}

/// The operations of one channel.
#[derive(Default)]
struct Lineup {
    /// Not told yet, in the order of submission.
    order: VecDeque<u64>,
    /// Of these, what the driver has not seen.
    queued: VecDeque<u64>,
    /// With the driver.
    out: usize,
}

/// A question to the driver.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Asked {
    No,
    Yes,
    Answered,
}

/// See the module. `E` is the failure.
pub(super) struct Machine<E> {
    rules: Rules,
    /// See [`Driver::OVERTIME`](super::Driver::OVERTIME).
    overtime: Duration,
    next: u64,
    operations: BTreeMap<u64, Operation>,
    channels: BTreeMap<Channel, Lineup>,
    /// In the driver's `enqueue`: one, or one for each executor.
    calling: BTreeSet<u64>,
    /// What callers carry out themselves, and the deadlines.
    carried: Vec<(u64, Instant)>,
    failure: Option<E>,
    closing: bool,
    release: Asked,
    interrupt: Asked,
    /// Until when interrupted operations may come back with their memory.
    grace: Option<Instant>,
    /// The grace is over, and with it all waiting for the driver: see [`Rules::gives_up`].
    given_up: bool,
    unclean: bool,
    ended: bool,
    actions: Vec<Action>,
}

impl<E: Clone> Machine<E> {
    pub(super) fn new(rules: Rules, overtime: Duration) -> Self {
        Self {
            rules,
            overtime,
            next: 0,
            operations: BTreeMap::new(),
            channels: BTreeMap::new(),
            calling: BTreeSet::new(),
            carried: Vec::new(),
            failure: None,
            closing: false,
            release: Asked::No,
            interrupt: Asked::No,
            grace: None,
            given_up: false,
            unclean: false,
            ended: false,
            actions: Vec::new(),
        }
    }

    /// The first failure.
    pub(super) fn failure(&self) -> Option<&E> {
        self.failure.as_ref()
    }

    /// How it ended, once it has.
    pub(super) fn ended(&self) -> Option<End> {
        self.ended
            .then_some(if self.unclean { End::Unclean } else { End::Clean })
    }

    /// True if some caller is not told yet.
    pub(super) fn is_pending(&self) -> bool {
        !self.all_told() || !self.carried.is_empty()
    }

    fn all_told(&self) -> bool {
        self.channels.values().all(|c| c.order.is_empty())
    }

    /// What is to be done, in order.
    pub(super) fn take_actions(&mut self) -> Drain<'_, Action> {
        self.actions.drain(..)
    }

    fn admit(&self) -> Result<(), Refusal<E>> {
        match &self.failure {
            Some(first) => Err(Refusal::Failed(first.clone())),
            None if self.closing || self.ended => Err(Refusal::Closed),
            None => Ok(()),
        }
    }

    /// Accepts an operation that its caller carries out itself, until [`left`](Self::left): beside those that the driver has, and ordered
    /// with none of them. `None`: the driver does not have all earlier ones yet.
    pub(super) fn enter(&mut self, deadline: Instant) -> Result<Option<u64>, Refusal<E>> {
        self.admit()?;
        if !self.calling.is_empty() || self.channels.values().any(|c| !c.queued.is_empty()) {
            return Ok(None);
        }
        self.next += 1;
        self.carried.push((self.next, deadline));
        Ok(Some(self.next))
    }

    /// The caller of `number` has carried it out. The failure that it is told instead of that answer, if the group has failed meanwhile.
    pub(super) fn left(&mut self, number: u64, answer: Answer<E>, now: Instant) -> Option<E> {
        self.carried.retain(|(carried, _)| *carried != number);
        let first = self.failure.clone();
        if let Answer::Fatal(failure) = answer {
            self.fail(failure, now);
        }
        self.see_end();
        first
    }

    /// Accepts an operation; its number counts from 1.
    pub(super) fn submit(&mut self, channel: Channel, deadline: Instant) -> Result<u64, Refusal<E>> {
        self.admit()?;
        self.next += 1;
        let number = self.next;
        let operation = Operation {
            channel,
            deadline,
            stage: Stage::Queued,
            told: false,
        };
        self.operations.insert(number, operation);
        let lineup = self.channels.entry(channel).or_default();
        lineup.order.push_back(number);
        lineup.queued.push_back(number);
        Ok(number)
    }

    /// What the executor does next. One thread at a time: while a call is under way there is nothing for another one.
    pub(super) fn turn(&mut self) -> Turn {
        let turn = self.coming();
        match turn {
            Turn::Start(number) => self.start(number),
            Turn::Release => self.release = Asked::Yes,
            Turn::Wait | Turn::Over => {}
        }
        turn
    }

    fn coming(&self) -> Turn {
        if self.ended || self.failure.is_some() {
            return Turn::Over;
        }
        if !self.calling.is_empty() || self.release == Asked::Yes {
            return Turn::Wait;
        }
        match self.next() {
            Some(number) => Turn::Start(number),
            None if self.closing && self.operations.is_empty() && self.carried.is_empty() => Turn::Release,
            None => Turn::Wait,
        }
    }

    /// Whether an executor would do anything but wait. `each`: every channel has one, and it is asked of those of `messages` or of that of the
    /// collectives.
    pub(super) fn has_turn(&self, each: bool, messages: bool) -> bool {
        match self.coming() {
            Turn::Over => true,
            coming if !each => coming != Turn::Wait,
            // The end is one executor's.
            Turn::Release => !messages,
            Turn::Start(_) | Turn::Wait => {
                let asked = |id: &Channel| (*id != Channel::Collectives) == messages;
                self.next_of(asked).is_some()
            }
        }
    }

    /// As [`turn`](Self::turn), for the thread that has submitted `number`: it takes no other's turn.
    pub(super) fn turn_of(&mut self, number: u64) -> Turn {
        match self.next() {
            Some(next) if next == number => self.turn(),
            _ => Turn::Wait,
        }
    }

    /// As [`turn`](Self::turn), for the executor of one channel, where each has one: a call of another's is not waited for.
    pub(super) fn turn_in(&mut self, id: Channel) -> Turn {
        if self.ended || self.failure.is_some() {
            return Turn::Over;
        }
        let depth = self.rules.depth.max(1);
        let first = self.channels.get(&id).filter(|c| c.out < depth);
        match first.and_then(|c| c.queued.front().copied()) {
            Some(number) => {
                self.start(number);
                Turn::Start(number)
            }
            // The end is one executor's.
            None if id == Channel::Collectives && self.next().is_none() => self.turn(),
            None => Turn::Wait,
        }
    }

    /// The driver gets `number`, the first that is queued in its channel.
    fn start(&mut self, number: u64) {
        if let Some(operation) = self.operations.get_mut(&number)
            && let Some(channel) = self.channels.get_mut(&operation.channel)
        {
            channel.queued.pop_front();
            operation.stage = Stage::Entering;
            channel.out += 1;
            self.calling.insert(number);
        }
    }

    /// The first operation that the driver has not seen and may have.
    fn next(&self) -> Option<u64> {
        self.next_of(|_| true)
    }

    /// As [`next`](Self::next), in the channels of which `is` is true.
    fn next_of(&self, is: impl Fn(&Channel) -> bool) -> Option<u64> {
        let depth = self.rules.depth.max(1);
        let free = self.channels.iter().filter(|(id, c)| c.out < depth && is(id));
        // A number is higher than those of all operations that were submitted before.
        free.filter_map(|(_, c)| c.queued.front().copied()).min()
    }

    /// The driver's `enqueue` has returned.
    pub(super) fn returned(&mut self, number: u64) {
        self.calling.remove(&number);
        if let Some(operation) = self.operations.get_mut(&number)
            && operation.stage == Stage::Entering
        {
            operation.stage = Stage::Running;
        }
        self.see_end();
    }

    /// The driver gives an operation back, from inside `enqueue` or later, with its answer. True if its caller is yet to be told:
    /// the answer is to be kept for that.
    pub(super) fn answered(&mut self, number: u64, answer: Answer<E>, now: Instant) -> bool {
        let Some(operation) = self.operations.get_mut(&number) else {
            return false;
        };
        if !matches!(operation.stage, Stage::Entering | Stage::Running) {
            return false;
        }
        operation.stage = Stage::Finished;
        let (told, id) = (operation.told, operation.channel);
        if let Some(channel) = self.channels.get_mut(&id) {
            channel.out = channel.out.saturating_sub(1);
        }
        if told {
            self.operations.remove(&number);
        } else if self.failure.is_some() {
            self.tell(number, Action::Fail(number));
        } else if let Answer::Fatal(failure) = answer {
            // The group first: a caller who learns of the failure finds it poisoned.
            self.failure = Some(failure);
            self.end_all(now, Some(number));
        } else if id == Channel::Unordered {
            self.tell(number, Action::Tell(number));
        } else {
            self.flush(id);
        }
        self.see_end();
        !told
    }

    /// Tells the finished operations at the head of a channel.
    fn flush(&mut self, id: Channel) {
        while let Some(&first) = self.channels.get(&id).and_then(|c| c.order.front())
            && self
                .operations
                .get(&first)
                .is_some_and(|o| o.stage == Stage::Finished)
        {
            self.tell(first, Action::Tell(first));
        }
    }

    /// One caller is told, once. The operation stays known while the driver has it.
    fn tell(&mut self, number: u64, action: Action) {
        let Some(operation) = self.operations.get_mut(&number) else {
            return;
        };
        operation.told = true;
        let (id, out) = (
            operation.channel,
            matches!(operation.stage, Stage::Entering | Stage::Running),
        );
        if !out {
            self.operations.remove(&number);
        }
        if let Some(channel) = self.channels.get_mut(&id) {
            if channel.order.front() == Some(&number) {
                channel.order.pop_front();
            } else {
                channel.order.retain(|n| *n != number);
            }
            // That of the collectives stays: the next one is not to allocate it again.
            if channel.order.is_empty() && id != Channel::Collectives {
                self.channels.remove(&id);
            }
        }
        self.actions.push(action);
    }

    /// The group has failed. Only the first failure counts, and none after the end. True if it was this one.
    pub(super) fn fail(&mut self, failure: E, now: Instant) -> bool {
        if self.failure.is_some() || self.ended {
            return false;
        }
        self.failure = Some(failure);
        self.end_all(now, None);
        true
    }

    /// After the first failure: the driver is interrupted; what it does not have fails at once, the rest when it comes back or the
    /// grace is over. `own` failed by itself, with an answer of its own.
    fn end_all(&mut self, now: Instant, own: Option<u64>) {
        self.interrupt = Asked::Yes;
        self.actions.push(Action::Interrupt);
        if let Some(number) = own {
            self.tell(number, Action::Tell(number));
        }
        let here = |o: &Operation| matches!(o.stage, Stage::Queued | Stage::Finished);
        let (now_here, out): (Vec<_>, Vec<_>) = self.operations.iter().partition(|(_, o)| here(o));
        let now_here: Vec<u64> = now_here.into_iter().map(|(n, _)| *n).collect();
        let none_out = out.is_empty();
        for number in now_here {
            self.tell(number, Action::Fail(number));
        }
        if !none_out || self.rules.gives_up {
            self.grace = now.checked_add(self.rules.grace);
            self.expire(now);
        }
    }

    /// Once the grace is over: fails what is still with the driver.
    fn expire(&mut self, now: Instant) {
        if self.grace.is_some_and(|until| now < until) {
            return;
        }
        self.grace = None;
        if self.rules.gives_up {
            self.given_up = true;
            self.actions.push(Action::GiveUp);
        }
        let rest: Vec<u64> = self.operations.keys().copied().collect();
        for number in rest {
            self.tell(number, Action::Fail(number));
        }
        self.see_end();
    }

    /// Nothing more is accepted. When nothing is pending the driver is released.
    pub(super) fn close(&mut self) {
        self.closing = true;
    }

    /// `release` has returned.
    pub(super) fn released(&mut self, clean: bool) {
        if self.release == Asked::Yes {
            self.release = Asked::Answered;
            self.unclean |= !clean && !self.ended;
            self.see_end();
        }
    }

    /// The driver has ended everything, as it was told to.
    pub(super) fn interrupted(&mut self, clean: bool) {
        if self.interrupt == Asked::Yes {
            self.interrupt = Asked::Answered;
            self.unclean |= !clean && !self.ended;
            self.see_end();
        }
    }

    fn see_end(&mut self) {
        let through = match (self.release, self.interrupt) {
            (Asked::Yes, _) | (_, Asked::Yes) | (Asked::No, Asked::No) => false,
            (Asked::Answered, _) | (_, Asked::Answered) => self.calling.is_empty() && self.carried.is_empty(),
        };
        self.ended |= (through || self.given_up) && self.all_told();
        if self.ended {
            self.grace = None;
        }
    }

    /// When those fail that have not ended. That of an operation never moves to an earlier instant.
    fn due(&self) -> impl Iterator<Item = (Instant, u64, Stage)> {
        let pending = self.operations.iter().filter(|(_, o)| !o.told);
        let pending = pending.map(|(number, o)| (o.deadline, *number, o.stage));
        let carried = self
            .carried
            .iter()
            .map(|(number, deadline)| (*deadline, *number, Stage::Entering));
        pending.chain(carried).map(|(deadline, number, stage)| {
            let overtime = match stage {
                Stage::Queued => Duration::ZERO,
                Stage::Entering | Stage::Running | Stage::Finished => self.overtime,
            };
            (deadline.checked_add(overtime).unwrap_or(deadline), number, stage)
        })
    }

    /// The operation whose deadline has passed first, if one has: a reason to [`fail`](Self::fail).
    pub(super) fn overdue(&self, now: Instant) -> Option<(u64, Stage)> {
        if self.failure.is_some() {
            return None;
        }
        let late = self.due().filter(|(due, ..)| *due <= now);
        late.min_by_key(|(due, number, _)| (*due, *number))
            .map(|(_, number, stage)| (number, stage))
    }

    /// Time has passed: see [`Rules::grace`].
    pub(super) fn tick(&mut self, now: Instant) {
        if self.grace.is_some() {
            self.expire(now);
        }
    }

    /// When the caller of an operation that fails at `due` is told at the latest: once the grace of the failure is over.
    pub(super) fn told_by(&self, due: Instant) -> Instant {
        later(later(due, self.overtime), self.rules.grace)
    }

    /// When to look at [`overdue`](Self::overdue) and [`tick`](Self::tick) again.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        if self.failure.is_some() {
            return self.grace;
        }
        self.due().map(|(due, ..)| due).min()
    }
}
