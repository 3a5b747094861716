//! Replicas, lighthouse and network under virtual time: the real state machines, and around them a machine that delays,
//! loses, kills, stops and cuts.
//!
//! Everything that happens is an event with a time and an owner, the process in which it happens. A stopped process's events
//! wait until it goes on; a dead one's are dropped. Messages over one connection stay in order, as TCP has them.

use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{Epoch, Error, ErrorKind, Step};
use oxccl_protocol::quorum::{Action, Event, LighthouseState, Order, QuorumRules, Record, Start, Ticket};
use oxccl_protocol::rank::RankVote;
use oxccl_protocol::replica::{ReplicaAction, ReplicaEvent, ReplicaRules, ReplicaState};
use oxccl_protocol::source::Choice;
use oxccl_protocol::{Member, Quorum, QuorumResult};

use crate::checks::Checks;
use crate::groups::{Groups, Who};
use crate::random::{Fault, Random, Scenario, mix};
use crate::trainer::{Done, Trainer};

mod deaths;
mod faults;
mod foreign;
mod formed;
mod lighthouse;
mod offers;
mod refusals;
mod stuck;

pub(crate) const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(5);
const JOIN_TIMEOUT: Duration = Duration::from_secs(4);
const PROGRESS_TIMEOUT: Duration = Duration::from_secs(15);
const GRACE: Duration = Duration::from_secs(3);
/// A replica that goes out says why before it ends its stream.
const TELL_FIRST: Duration = Duration::from_millis(100);
const BEAT: Duration = Duration::from_millis(900);
/// For one call of a rank, one connect, one reduction.
pub(crate) const CALL: Duration = Duration::from_secs(10);
/// After the last fault, every replica that is able to has committed again within this time.
const RECOVERY: Duration = Duration::from_secs(35);
/// As above, where connections go on breaking and messages go on coming late: each may cost another reduction its deadline.
const RECOVERY_UNDER_LOSS: Duration = Duration::from_secs(70);
/// No run needs so many events: something happens again and again.
const MANY: u64 = 1_000_000;
/// So many more commits count as going on.
const GOES_ON: u64 = 3;
const START_OF_DAY: i64 = 1_000_000;

/// Who does what happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    World,
    Lighthouse(u64),
    Process(Who),
}

/// What happens.
#[derive(Debug)]
pub(crate) enum Happening {
    Fault(usize),
    /// A replica asks for any quorum again.
    Grows(usize),
    /// By now the lighthouse knows of a death.
    IsKnown(deaths::Death),
    /// By now a replica is out whose training thread hangs since that time.
    IsOut(Who, Duration),
    /// By now a rank has heard the answer to this question, which was lost.
    HasHeard(Who, i64),
    /// All processes of a replica start.
    Start(usize),
    LighthouseStarts,
    LighthouseTick,
    /// An event for the lighthouse; a stream or call of the replica `from` in its incarnation.
    ToLighthouse(Event),
    /// What the lighthouse answers or pushes.
    Answered(u64, Result<Arc<Quorum>, Error>),
    Server(ReplicaEvent),
    ServerTick,
    Beat,
    Attach,
    /// The stream to the lighthouse broke.
    AttachBroke(u64),
    /// The training thread begins an attempt.
    Attempt,
    /// The program makes its next call, or the same again.
    Calls,
    AskAgain,
    Quorum(Ticket, Result<QuorumResult, Error>),
    Done(u64, Done),
    Decision(Ticket, Result<bool, Error>),
    Pushed(Epoch, String),
    /// What was in hand when its epoch ended has had its time.
    Settles(u64),
    InnerSteps,
    /// The rank's client tells of progress.
    ShowProgress,
    /// A replica's server tells the lighthouse that it leaves, for the first time or, until then, again.
    Leave {
        until: Duration,
    },
    /// A process exits by itself.
    Exit,
    Dies,
}

struct Queued {
    at: Duration,
    order: u64,
    owner: Owner,
    /// Apart, so that the heap moves little.
    what: Box<Happening>,
}

impl PartialEq for Queued {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}
impl Eq for Queued {}
impl PartialOrd for Queued {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Queued {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        // The heap gives the largest: the earliest is that.
        (other.at, other.order).cmp(&(self.at, self.order))
    }
}

/// One run of a replica.
struct Replica {
    incarnation: u64,
    id: String,
    /// By rank; `None` once the process has ended.
    processes: Vec<Option<Process>>,
    server: ReplicaState,
    stream: Option<u64>,
    /// Quorum calls to the lighthouse that are open.
    calls: BTreeMap<u64, Ticket>,
    /// Messages to the lighthouse stay in order.
    last_arrival: Duration,
    restart: Duration,
    /// When the server looks at its time-outs next.
    tick: Option<Duration>,
}

struct Process {
    trainer: Trainer,
    stopped_until: Duration,
    hung_until: Duration,
    /// Since when something waits for a training thread that hangs.
    stuck_since: Option<Duration>,
    shown: u64,
}

struct Lighthouse {
    state: LighthouseState,
    incarnation: u64,
    stopped_until: Duration,
    awake: Duration,
    /// Until then the ends of streams tell it nothing, since it was away.
    discounts_until: Duration,
    heard: formed::Heard,
    calls: BTreeMap<Ticket, (Who, u64)>,
    streams: BTreeMap<String, (Who, u64)>,
}

pub(crate) struct World {
    pub(crate) scenario: Scenario,
    pub(crate) random: Random,
    pub(crate) now: Duration,
    start: Instant,
    queue: BinaryHeap<Queued>,
    order: u64,
    numbers: u64,
    lighthouse: Option<Lighthouse>,
    record: Option<Record>,
    lighthouse_incarnations: u64,
    replicas: Vec<Option<Replica>>,
    incarnations: Vec<u64>,
    /// Slots whose replica has come to the end of the run.
    ended: Vec<bool>,
    /// Slots whose replica an operator has told to go, and which has not started again.
    operated: Vec<bool>,
    cut_until: Vec<Duration>,
    split: (u64, Duration),
    /// Until then what a replica sends makes no sense.
    pub(crate) garbles_until: Vec<Duration>,
    pub(crate) groups: Groups,
    /// What the ranks of each incarnation of a replica follow.
    pub(crate) choices: BTreeMap<(usize, u64), Choice>,
    pub(crate) checks: Checks,
    quiet_from: Duration,
    /// When the first replica came to the end of the run.
    first_end: Option<Duration>,
    /// Commits of each slot since the last fault.
    since: Vec<u64>,
    trace: Option<VecDeque<String>>,
    violation: Option<String>,
    pub(crate) events: u64,
}

/// What a run came to.
pub(crate) struct Outcome {
    pub(crate) violation: Option<String>,
    pub(crate) trace: Vec<String>,
    pub(crate) events: u64,
    pub(crate) commits: u64,
    /// Quorums with spares beside them.
    pub(crate) spares: u64,
    /// Processes that were killed right after a commit.
    pub(crate) deaths_at_commits: u64,
}

pub(crate) fn run(scenario: &Scenario, traced: bool) -> Outcome {
    let mut world = World::new(scenario.clone(), traced);
    world.go();
    Outcome {
        violation: world.violation,
        trace: world.trace.unwrap_or_default().into(),
        events: world.events,
        commits: world.checks.commits,
        spares: world.checks.spares,
        deaths_at_commits: world.checks.deaths_at_commits,
    }
}

impl World {
    fn new(scenario: Scenario, traced: bool) -> Self {
        let n = scenario.replicas;
        let mut world = Self {
            random: Random::new(mix(scenario.seed)),
            now: Duration::ZERO,
            start: Instant::now(),
            queue: BinaryHeap::new(),
            order: 0,
            numbers: 1,
            lighthouse: None,
            record: None,
            lighthouse_incarnations: 0,
            replicas: (0..n).map(|_| None).collect(),
            incarnations: vec![0; n],
            ended: vec![false; n],
            operated: vec![false; n],
            cut_until: vec![Duration::ZERO; n],
            split: (0, Duration::ZERO),
            garbles_until: vec![Duration::ZERO; n],
            groups: Groups::default(),
            choices: BTreeMap::new(),
            checks: Checks::default(),
            quiet_from: Duration::ZERO,
            first_end: None,
            since: vec![0; n],
            trace: traced.then(VecDeque::new),
            violation: None,
            events: 0,
            scenario,
        };
        world.checks.foreign = world.scenario.foreign;
        world.checks.counts_back = world.scenario.counts_back;
        world.groups.epochs_come_again = world.scenario.counts_back;
        world.start_lighthouse();
        for slot in 0..n {
            let at = world.random.millis(0, 500);
            world.at(at, Owner::World, Happening::Start(slot));
        }
        for (i, (at, fault)) in world.scenario.faults.clone().into_iter().enumerate() {
            world.quiet_from = world.quiet_from.max(at + faults::lasts(&fault));
            world.at(at, Owner::World, Happening::Fault(i));
        }
        world
    }

    pub(crate) fn instant(&self) -> Instant {
        self.start + self.now
    }

    pub(crate) fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    fn at(&mut self, at: Duration, owner: Owner, what: Happening) {
        self.order += 1;
        let (order, what) = (self.order, Box::new(what));
        self.queue.push(Queued {
            at,
            order,
            owner,
            what,
        });
    }

    /// Something for a process, `delay` from now.
    pub(crate) fn later(&mut self, delay: Duration, who: Who, what: Happening) {
        self.at(self.now + delay, Owner::Process(who), what);
    }

    pub(crate) fn note(&mut self, text: impl FnOnce() -> String) {
        // Who is stuck long after the last fault became so before: what the others do since tells nothing.
        let told = self.now < self.quiet_from + CALL * 3;
        if let Some(trace) = self.trace.as_mut().filter(|_| told) {
            trace.push_back(format!("{:>9.3} s  {}", self.now.as_secs_f64(), text()));
            if trace.len() > 400 {
                trace.pop_front();
            }
        }
    }

    pub(crate) fn violate(&mut self, text: String) {
        self.violation.get_or_insert(text);
    }

    pub(crate) fn check(&mut self, outcome: Result<(), String>) {
        if let Err(text) = outcome {
            self.violate(text);
        }
    }

    fn recovery(&self) -> Duration {
        match self.scenario.loss + self.scenario.disorder {
            0 => RECOVERY,
            _ => RECOVERY_UNDER_LOSS,
        }
    }

    fn go(&mut self) {
        let mut is_quiet = false;
        while let Some(next) = self.queue.pop() {
            if !is_quiet && next.at >= self.quiet_from {
                is_quiet = true;
                self.since.fill(0);
            }
            self.now = next.at.max(self.now);
            if self.now > self.quiet_from + self.recovery() {
                self.stuck();
                return;
            }
            if is_quiet && self.all_go_on() {
                return;
            }
            self.events += 1;
            if self.events > MANY {
                self.violate(format!("livelock: {MANY} events by {:?}", self.now));
                return;
            }
            self.take(next.order, next.owner, *next.what);
            if self.violation.is_some() {
                return;
            }
        }
        self.stuck();
    }

    /// True if every replica that is not hung has committed some steps since the last fault, or has come to the end of the run.
    fn all_go_on(&self) -> bool {
        (0..self.replicas.len()).all(|slot| self.is_hung(slot) || self.does_go_on(slot))
    }

    fn does_go_on(&self, slot: usize) -> bool {
        let Some(end) = self.scenario.last.map(|last| last + 1) else {
            return self.since[slot] >= GOES_ON;
        };
        let Some(replica) = &self.replicas[slot] else {
            return self.ended[slot] || self.first_end.is_some();
        };
        // One that was in no quorum before the end of the run is of the next one, and finds no other replica.
        self.step_of(slot) >= end || self.first_end.is_some() && replica.server.last_quorum().0 == Epoch(0)
    }

    fn is_hung(&self, slot: usize) -> bool {
        let hung = |p: &Option<Process>| p.as_ref().is_some_and(|p| p.hung_until == Duration::MAX);
        self.replicas[slot]
            .as_ref()
            .is_some_and(|r| r.processes.iter().any(hung))
    }

    /// The smallest step of a replica's ranks.
    fn step_of(&self, slot: usize) -> Step {
        self.trainers(slot).map(Trainer::step).min().unwrap_or_default()
    }

    /// The step that a replica holds as a whole: none where its ranks took the state over from several sources, or at several times.
    fn whole_step_of(&self, slot: usize) -> Step {
        let mut trainers = self.trainers(slot);
        let Some(first) = trainers.next() else {
            return Step(0);
        };
        if trainers.all(|t| t.is_one_with(first)) {
            first.step()
        } else {
            Step(0)
        }
    }

    fn trainers(&self, slot: usize) -> impl Iterator<Item = &Trainer> {
        let replica = self.replicas[slot].iter();
        replica
            .flat_map(|r| r.processes.iter().flatten())
            .map(|p| &p.trainer)
    }

    fn stuck(&mut self) {
        let newest = |hung: bool| {
            let slots = (0..self.replicas.len()).filter(|&s| self.is_hung(s) == hung);
            slots.map(|s| self.whole_step_of(s)).max().unwrap_or_default()
        };
        let hangs = (0..self.replicas.len()).any(|s| self.is_hung(s));
        let recorded = self
            .lighthouse
            .as_ref()
            .and_then(|l| l.state.record())
            .map_or(Step(0), |r| r.step);
        let reason = self.lighthouse.as_ref().map(|l| l.state.reason(self.instant()));
        // Whose replicas tell nothing, and which has no record, waits for all of them, also while one of them is about to ask again.
        let knows_nothing = self.scenario.foreign && self.scenario.initial;
        let for_all = reason
            .as_ref()
            .is_some_and(|r| r.starts_with("the first quorum waits for"))
            || knows_nothing && self.lighthouse.as_ref().is_some_and(|l| l.heard.knows_nothing());
        if hangs && (newest(true) > newest(false) || recorded > newest(false) || for_all) {
            // The one that hangs for ever is the only one that holds the newest state, or is missing for the decision to go back; or it is
            // one of those that the first quorum waits for, however long that takes.
            return;
        }
        // The run has ended while the lighthouse was away, and it heard no leave. That may as well have been deaths: those that were not there wait
        // for the state that it ended with, or for the operator's word.
        let is_unheard = |end: Duration, l: &Lighthouse| {
            let nobody_left = |r: Record| r.closes && r.left.is_empty();
            l.heard.started > end && l.state.record().is_some_and(nobody_left)
        };
        let ended = self.first_end.zip(self.lighthouse.as_ref());
        if ended.is_some_and(|(end, lighthouse)| is_unheard(end, lighthouse)) {
            return;
        }
        let slots: Vec<String> = (0..self.replicas.len())
            .filter(|&s| !self.is_hung(s) && !self.does_go_on(s))
            .map(|s| format!("r{s} ({} commits)", self.since[s]))
            .collect();
        let waits = self.lighthouse.as_ref().map(|l| {
            let status = l.state.status(self.instant());
            format!("healthy {:?}, waiting {:?}", status.healthy, status.waiting)
        });
        self.violate(format!(
            "liveness: {:?} after the last fault {} do not go on; the lighthouse: {reason:?}; {waits:?}",
            self.recovery(),
            slots.join(", ")
        ));
    }

    fn replica(&mut self, who: Who) -> Option<&mut Replica> {
        self.replicas[who.slot]
            .as_mut()
            .filter(|r| r.incarnation == who.incarnation)
    }

    fn process(&mut self, who: Who) -> Option<&mut Process> {
        self.replica(who)?.processes[who.rank as usize].as_mut()
    }

    pub(crate) fn trainer(&mut self, who: Who) -> Option<&mut Trainer> {
        self.process(who).map(|p| &mut p.trainer)
    }

    /// True if neither side of a split lies between the two.
    pub(crate) fn reach(&self, a: Who, b: Who) -> bool {
        let side = |w: Who| (self.split.0 >> w.slot) & 1;
        self.now >= self.split.1 || side(a) == side(b)
    }

    /// Once more at `until`, before whatever is queued for that time but happened later.
    fn postpone(&mut self, until: Duration, order: u64, owner: Owner, what: Happening) {
        self.queue.push(Queued {
            at: until,
            order,
            owner,
            what: Box::new(what),
        });
    }

    fn take(&mut self, order: u64, owner: Owner, what: Happening) {
        match owner {
            Owner::World => self.world_event(what),
            Owner::Lighthouse(incarnation) => {
                let Some(lighthouse) = self.lighthouse.as_ref().filter(|l| l.incarnation == incarnation)
                else {
                    return;
                };
                let until = lighthouse.stopped_until;
                if until > self.now {
                    self.postpone(until, order, owner, what);
                    return;
                }
                match what {
                    Happening::ToLighthouse(event) => self.tell_lighthouse(event),
                    _ => {
                        self.at(
                            self.now + Duration::from_millis(500),
                            owner,
                            Happening::LighthouseTick,
                        );
                        self.tell_lighthouse(Event::Tick);
                    }
                }
            }
            Owner::Process(who) => {
                let Some(process) = self.process(who) else { return };
                let trains = matches!(
                    what,
                    Happening::Attempt
                        | Happening::Calls
                        | Happening::AskAgain
                        | Happening::Quorum(..)
                        | Happening::Done(..)
                        | Happening::Decision(..)
                        | Happening::InnerSteps
                );
                let hung = if trains {
                    process.hung_until
                } else {
                    Duration::ZERO
                };
                // While it is stopped, nothing of it shows that it hangs.
                let stopped = process.stopped_until;
                let until = if stopped > self.now { stopped } else { hung };
                if stopped <= self.now && hung > self.now {
                    self.waits_for_hung(who, &what);
                } else if let Some(process) = self.process(who).filter(|_| trains) {
                    process.stuck_since = None;
                }
                if until == Duration::MAX {
                    return;
                }
                if until > self.now {
                    self.postpone(until, order, owner, what);
                    return;
                }
                self.process_event(who, what);
            }
        }
    }

    fn process_event(&mut self, who: Who, what: Happening) {
        match what {
            Happening::Server(event) => self.tell_server(who, event),
            Happening::Answered(call, answer) => {
                if let Some(replica) = self.replica(who) {
                    replica.calls.remove(&call);
                }
                self.tell_server(who, ReplicaEvent::Answered { call, answer });
            }
            Happening::ServerTick => {
                if let Some(replica) = self.replica(who) {
                    replica.tick = None;
                }
                self.tell_server(who, ReplicaEvent::Tick);
            }
            Happening::Beat => {
                self.later(BEAT, who, Happening::Beat);
                let foreign = self.scenario.foreign;
                let Some(replica) = self.replica(who) else { return };
                let replica_id = replica.id.clone();
                let asks = foreign || replica.server.last_quorum().0 > Epoch(0) || !replica.calls.is_empty();
                if asks && !replica.server.is_out() {
                    self.send_lighthouse(who, Event::Heartbeat { replica_id });
                }
            }
            Happening::Attach => self.attach(who),
            Happening::AttachBroke(stream) => {
                if let Some(replica) = self.replica(who)
                    && replica.stream == Some(stream)
                {
                    replica.stream = None;
                }
                let delay = self.random.millis(50, 1_000);
                self.later(delay, who, Happening::Attach);
            }
            Happening::Attempt => self.attempt(who),
            Happening::Calls => self.calls(who),
            Happening::AskAgain => self.ask(who),
            Happening::Quorum(ticket, answer) => self.quorum_answered(who, ticket, answer),
            Happening::Done(op, done) => self.done(who, op, done),
            Happening::Decision(ticket, decision) => self.decided(who, ticket, decision),
            Happening::Pushed(epoch, reason) => self.pushed(who, epoch, reason),
            Happening::Settles(op) => self.time_is_over(who, op),
            Happening::InnerSteps => self.works(who),
            Happening::ShowProgress => {
                self.later(Duration::from_secs(1), who, Happening::ShowProgress);
                if let Some(process) = self.process(who)
                    && process.shown != process.trainer.moved
                {
                    process.shown = process.trainer.moved;
                    let rank = who.rank;
                    self.server_hears(who, ReplicaEvent::Progress { rank });
                }
            }
            Happening::Leave { until } => self.tells_that_it_leaves(who, until),
            Happening::Exit => self.ends(who, "it exits"),
            Happening::Dies => self.ends(who, "it is killed"),
            Happening::Fault(_)
            | Happening::Grows(_)
            | Happening::IsKnown(_)
            | Happening::IsOut(..)
            | Happening::HasHeard(..)
            | Happening::Start(_)
            | Happening::LighthouseStarts
            | Happening::LighthouseTick
            | Happening::ToLighthouse(_) => {}
        }
    }

    /// The server of the rank's replica, as `who` reaches it.
    pub(crate) fn server_of(who: Who) -> Who {
        Who { rank: 0, ..who }
    }

    pub(crate) fn server_hears(&mut self, who: Who, event: ReplicaEvent) {
        let again = matches!(
            event,
            ReplicaEvent::Progress { .. } | ReplicaEvent::Reported { .. }
        );
        if again && self.random.chance(self.scenario.disorder) {
            let delay = self.random.millis(0, 2_000);
            self.later(delay, Self::server_of(who), Happening::Server(event.clone()));
        }
        let delay = self.random.millis(0, 1);
        self.later(delay, Self::server_of(who), Happening::Server(event));
    }

    fn tell_server(&mut self, server: Who, event: ReplicaEvent) {
        let instant = self.instant();
        let Some(replica) = self.replica(server) else {
            return;
        };
        let actions = replica.server.apply(event, instant);
        let due = replica.server.next_deadline();
        for action in actions {
            self.server_acts(server, action);
        }
        let start = self.start;
        let Some(replica) = self.replica(server) else {
            return;
        };
        let at = due.map(|due| due.saturating_duration_since(start));
        if let Some(at) = at.filter(|at| replica.tick.is_none_or(|t| *at < t)) {
            replica.tick = Some(at);
            self.at(at.max(self.now), Owner::Process(server), Happening::ServerTick);
        }
    }

    fn server_acts(&mut self, server: Who, action: ReplicaAction) {
        match action {
            ReplicaAction::Ask { call, request, .. } => {
                let ticket = self.number();
                let refused = self.lighthouse.is_none() || self.is_cut(server.slot);
                let Some(replica) = self.replica(server) else {
                    return;
                };
                let slot = server.slot;
                let member = Member {
                    replica_id: replica.id.clone(),
                    address: format!("http://10.0.0.{slot}:{}", 1000 + server.incarnation),
                    store_address: format!("10.0.0.{slot}:{}", 20_000 + server.incarnation),
                    step: request.step,
                    world_size: replica.processes.len() as u64,
                    shrink_only: request.shrink_only,
                    commit_failures: request.commit_failures,
                    lineage: request.lineage,
                    last_quorum_id: request.last_quorum_id,
                    last_world_size: replica.server.last_quorum().1,
                    healed: request.healed,
                    batches_committed: request.batches_committed,
                    joining: request.joining,
                    is_last: request.is_last,
                    incarnation: server.incarnation.to_string(),
                    ..Member::default()
                };
                replica.calls.insert(call, ticket);
                let member = if self.scenario.foreign {
                    Self::as_foreign(member)
                } else {
                    member
                };
                let now = self.now;
                self.checks.asks(&member.replica_id, member.step, now);
                let replica_id = member.replica_id.clone();
                if refused {
                    self.connection_breaks(server);
                    return;
                }
                if let Some(lighthouse) = &mut self.lighthouse {
                    lighthouse.calls.insert(ticket, (server, call));
                }
                if request.unanswered && !self.scenario.foreign {
                    self.send_lighthouse(server, Event::Unanswered { replica_id });
                }
                self.send_lighthouse(server, Event::Join { member, ticket });
            }
            ReplicaAction::Cancel { call } => {
                if let Some(ticket) = self.replica(server).and_then(|r| r.calls.remove(&call)) {
                    self.send_lighthouse(server, Event::Withdraw { ticket });
                }
            }
            ReplicaAction::Quorum { ticket, answer } => {
                self.answer_rank(server, ticket, |t| Happening::Quorum(t, answer));
            }
            ReplicaAction::Decide { ticket, answer } => {
                self.answer_rank(server, ticket, |t| Happening::Decision(t, answer));
            }
            ReplicaAction::Push(event) => {
                for rank in 0..self.scenario.ranks {
                    let delay = self.random.millis(0, 2);
                    let what = Happening::Pushed(event.quorum_id, event.reason.clone());
                    self.later(delay, Who { rank, ..server }, what);
                }
            }
            ReplicaAction::Fail { reason } => {
                self.note(|| format!("{server:?} cannot go on: {reason}"));
                let Some(replica_id) = self.replica(server).map(|r| r.id.clone()) else {
                    return;
                };
                self.send_lighthouse(server, Event::Failed { replica_id, reason });
                // Its stream ends with that.
                if let Some(stream) = self.replica(server).and_then(|r| r.stream.take()) {
                    self.later(Duration::ZERO, server, Happening::AttachBroke(stream));
                    let replica_id = format!("r{}:{}", server.slot, server.incarnation);
                    self.lighthouse_later(TELL_FIRST, Event::Detached { replica_id, stream });
                }
            }
            ReplicaAction::Kill(_) => {
                for rank in 0..self.scenario.ranks {
                    let delay = self.random.millis(0, 2);
                    self.later(delay, Who { rank, ..server }, Happening::Exit);
                }
            }
            ReplicaAction::EndWatches => {}
        }
    }

    /// An answer to the rank that waits under `ticket`: over loopback, where connections break too.
    fn answer_rank(&mut self, server: Who, ticket: Ticket, what: impl FnOnce(Ticket) -> Happening) {
        let rank = (0..self.scenario.ranks).find(|&rank| {
            let trainer = self.trainer(Who { rank, ..server });
            trainer.is_some_and(|t| t.call == Some(ticket))
        });
        let Some(rank) = rank else { return };
        let who = Who { rank, ..server };
        let delay = self.random.millis(0, 1);
        let what = what(ticket);
        let lost = self.random.chance(self.scenario.loss / 4);
        if lost && matches!(what, Happening::Quorum(_, Ok(_))) {
            self.will_hear_again(who);
        }
        let what = match what {
            Happening::Decision(ticket, _) if lost => Happening::Decision(
                ticket,
                Err(Error::new(ErrorKind::Unavailable, "the connection broke")),
            ),
            Happening::Quorum(ticket, _) if lost => Happening::Quorum(
                ticket,
                Err(Error::new(ErrorKind::Unavailable, "the connection broke")),
            ),
            what => what,
        };
        self.later(delay, who, what);
    }

    pub(crate) fn vote_event(vote: &RankVote, rank: u32, ticket: Ticket) -> ReplicaEvent {
        ReplicaEvent::Vote {
            rank,
            key: vote.key,
            vote: vote.against.is_none(),
            ticket,
        }
    }

    /// A rank has come to the end of the run.
    pub(crate) fn run_ends(&mut self, who: Who) {
        let now = self.now;
        self.first_end.get_or_insert(now);
        self.ended[who.slot] = true;
    }

    /// A rank has committed.
    pub(crate) fn committed(&mut self, who: Who) {
        if self.trainer(who).is_some_and(|t| t.dies_at_commit) {
            self.checks.deaths_at_commits += 1;
            self.later(Duration::ZERO, who, Happening::Dies);
        }
        if who.rank == 0 {
            self.since[who.slot] += 1;
            self.checks.commits += 1;
        }
    }
}
