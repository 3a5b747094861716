//! A run with deaths, in virtual time: the lighthouse's quorums, each replica's way through its steps and the rounds of the method are the
//! product's own state machines; what takes time around them (computing, reductions, calls, restarts, transfers) is played.
//!
//! A replica is one rank of the protocol here, since its ranks die together. Members compute alike and reduce together, so the run goes from
//! barrier to barrier: all members ask, in turn, one call of the lighthouse after the other; the quorum forms; they reduce; they vote. What happens
//! between (a death, its notice, a restart, a fetched state) is an event with its moment, taken in before whatever comes later.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{Epoch, Error, ErrorKind, Result, Step};
use protocol::assignment::Assignment;
use protocol::quorum::{Action, Event, LighthouseState, QuorumRules, Start, Ticket};
use protocol::rank::{Next, Rank, RankRules};
use protocol::training::{Due, RoundRules, Rounds, Sends, Share, Steps};
use protocol::{Lineage, Member, Quorum};
use serde::Serialize;

use crate::method::{Method, Workload};
use crate::units::Seconds;

/// A job to be played.
#[derive(Debug, Clone, PartialEq)]
pub struct Fleet {
    /// The replicas at the beginning.
    pub replicas: u32,
    /// What they do.
    pub method: Method,
    /// What they compute. Its `quorum` is not used: the lighthouse is played.
    pub work: Workload,
    /// The reduction of a round, by fragment.
    pub reductions: Vec<Seconds>,
    /// Of data parallel's reduction, what the backward pass hides.
    pub hidden: Seconds,
    /// From one death of a replica to the next, on average over the whole job; `None`: none dies.
    pub death_every: Option<Seconds>,
    /// From a death until the replica that takes its place asks.
    pub restart: Seconds,
    /// From a death until the lighthouse knows of it, and the members of the lighthouse's word.
    pub notice: Seconds,
    /// What it takes all members to connect for a new epoch.
    pub reconnect: Seconds,
    /// The transfer of a state to a replica that heals.
    pub heal: Seconds,
    /// The lighthouse's time for a call; `None`: what was measured ([`lighthouse_call`]).
    pub call: Option<Seconds>,
    /// The rounds to commit.
    pub rounds: u64,
    /// Of the deaths.
    pub seed: u64,
}

/// What became of it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Outcome {
    /// Rounds that were committed.
    pub committed: u64,
    /// Attempts at them.
    pub attempts: u64,
    /// Replicas that died.
    pub deaths: u64,
    /// States that were fetched, outside the group or in it.
    pub heals: u64,
    /// Epochs.
    pub epochs: u64,
    /// Virtual time.
    pub time: Seconds,
    /// The computing that counts, over all replicas of the beginning and all the time: what deaths, waits and reductions leave.
    pub efficiency: f64,
    /// The share of the inner steps computed that count: an attempt that is lost costs none, a replica that dies those it had not yet sent.
    pub useful: f64,
    /// Contributors of a round, on average.
    pub contributors: f64,
    /// The share of time in which the lighthouse answers calls.
    pub lighthouse: f64,
}

/// The lighthouse's time for a call in a step of so many replicas: `cargo xtask bench-lighthouse` on two cores (docs/benchmarks/tolerance.md), the time of
/// a step over its calls. Between the measured sizes, and beyond, by the logarithm of the size.
pub fn lighthouse_call(replicas: u32) -> Seconds {
    const MEASURED: [(f64, f64); 5] = [
        (64.0, 1.4e-3),
        (256.0, 6.6e-3),
        (1_024.0, 34.7e-3),
        (4_096.0, 203e-3),
        (16_384.0, 956e-3),
    ];
    let at = f64::from(replicas.max(64)).log2();
    let call = |(size, step): (f64, f64)| (size.log2(), step / size);
    let pairs = MEASURED
        .windows(2)
        .filter_map(|w| Some((call(*w.first()?), call(*w.last()?))));
    let mut time = 22e-6;
    for ((low, before), (high, after)) in pairs {
        if at >= low {
            time = before + (after - before) * (at - low) / (high - low);
        }
    }
    Seconds::new(time).unwrap_or_default()
}

/// Plays the job.
///
/// Errors: `InvalidArgument` for a job that makes no sense, `Unavailable` if the lighthouse turns replicas away or no quorum comes about.
pub fn simulate(fleet: &Fleet) -> Result<Outcome> {
    fleet.method.check(fleet.work.layers)?;
    if fleet.replicas == 0 || fleet.rounds == 0 {
        return Err(Error::invalid("a job has at least one replica and one round"));
    }
    if fleet.death_every.is_some_and(|every| every.get() <= 0.0) {
        return Err(Error::invalid("deaths without any time between them"));
    }
    let fragments = match fleet.method {
        Method::Ddp { .. } => 1,
        Method::Diloco { fragments, .. } => fragments,
    };
    if fleet.reductions.len() as u64 != fragments {
        let text = format!("{} reductions for {fragments} fragments", fleet.reductions.len());
        return Err(Error::invalid(text));
    }
    let mut run = Run::new(fleet);
    for i in 0..run.replicas.len() {
        run.attach(i)?;
    }
    match fleet.method {
        Method::Ddp { overlap } => run.data_parallel(overlap)?,
        Method::Diloco {
            sync_every,
            fragments,
            delay,
        } => run.diloco(sync_every / fragments, delay)?,
    }
    Ok(run.outcome())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Doing {
    /// A member between two rounds.
    Idle,
    /// Its call is open.
    Asks,
    /// A member of the present attempt.
    InStep,
    /// Outside the group.
    Fetches,
    Dead,
}

struct Replica {
    id: String,
    incarnation: u32,
    rank: Rank,
    doing: Doing,
}

/// What happens beside the rounds. The number is the replica's, and its incarnation: what concerns an earlier one is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Beside {
    Death,
    Noticed(usize, u32),
    Back(usize),
    Fetched(usize, u32),
}

/// A moment in nanoseconds, so that moments have an order.
type Moment = u64;

struct Run<'a> {
    fleet: &'a Fleet,
    base: Instant,
    now: f64,
    /// Until then the lighthouse answers calls that came before.
    busy: f64,
    served: f64,
    call: f64,
    lighthouse: LighthouseState,
    replicas: Vec<Replica>,
    events: BinaryHeap<Reverse<(Moment, u64, Beside)>>,
    order: u64,
    random: u64,
    /// The quorum that was delivered last, until it is taken up.
    delivered: Option<(Vec<Ticket>, Arc<Quorum>)>,
    epoch: Epoch,
    /// The present epoch was aborted.
    broken: bool,
    /// An attempt is under way, and when its members heard that it is lost.
    in_flight: bool,
    lost: Option<f64>,
    /// When its reduction has ended; deaths after that cost it nothing.
    ends: f64,
    /// Members that died before that: without them it does not end.
    missing: u32,
    /// Contributors of the attempt.
    contributors: u32,
    committed: u64,
    attempts: u64,
    deaths: u64,
    heals: u64,
    epochs: u64,
    worked: f64,
    computed: f64,
    contributed: f64,
}

impl<'a> Run<'a> {
    fn new(fleet: &'a Fleet) -> Self {
        let rules = QuorumRules {
            min_replicas: 1,
            initial_replicas: Some(fleet.replicas as usize),
            join_timeout: Duration::from_secs(60),
            heartbeat_timeout: Duration::from_secs(5),
        };
        // A point to count virtual time from; no clock is read again.
        let base = Instant::now();
        let start = Start {
            clock_ms: 1_000,
            ..Start::default()
        };
        let replicas = (0..fleet.replicas as usize).map(|i| replica(i, 0, Doing::Idle));
        let mut run = Self {
            fleet,
            base,
            now: 0.0,
            busy: 0.0,
            served: 0.0,
            call: fleet
                .call
                .unwrap_or_else(|| lighthouse_call(fleet.replicas))
                .get(),
            lighthouse: LighthouseState::new(rules, start, base),
            replicas: replicas.collect(),
            events: BinaryHeap::new(),
            order: 0,
            random: fleet.seed ^ 0x9e37_79b9_7f4a_7c15,
            delivered: None,
            epoch: Epoch(0),
            broken: false,
            in_flight: false,
            lost: None,
            ends: 0.0,
            missing: 0,
            contributors: 0,
            committed: 0,
            attempts: 0,
            deaths: 0,
            heals: 0,
            epochs: 0,
            worked: 0.0,
            computed: 0.0,
            contributed: 0.0,
        };
        run.next_death();
        run
    }

    fn outcome(&self) -> Outcome {
        let all = f64::from(self.fleet.replicas) * self.now;
        let part = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
        Outcome {
            committed: self.committed,
            attempts: self.attempts,
            deaths: self.deaths,
            heals: self.heals,
            epochs: self.epochs,
            time: Seconds::new(self.now).unwrap_or_default(),
            efficiency: part(self.worked, all),
            useful: part(self.worked, self.computed).min(1.0),
            contributors: part(self.contributed, self.committed as f64),
            lighthouse: part(self.served, self.now).min(1.0),
        }
    }

    /// Data parallel: the quorum is asked for while the gradients are computed; a repeated attempt sends the same ones.
    fn data_parallel(&mut self, overlap: bool) -> Result<()> {
        let mut steps = Steps::<()>::new(None, false);
        let reduction = self.reduction(0);
        while self.committed < self.fleet.rounds {
            steps.begin(false)?;
            self.computes();
            let computed = self.now + self.fleet.work.step.get();
            loop {
                let ready = self.quorum()?;
                let share = Share {
                    step: Step(i64::try_from(self.committed).unwrap_or(i64::MAX)),
                    contributor_rank: Some(0),
                    contributors: self.contributors,
                };
                let ends = match steps.joined(&share)? {
                    Sends::Fresh if overlap => {
                        let left = (reduction - self.fleet.hidden.get()).max(0.0);
                        (computed + left).max(ready + reduction)
                    }
                    _ => ready.max(computed) + reduction,
                };
                steps.keep(&share, ());
                self.ends = ends;
                self.until(ends)?;
                if self.vote()? {
                    self.commits(1)?;
                    steps.applied(Ok(()))?;
                    break;
                }
                // The gradients are computed to the end, and kept.
                self.now = self.now.max(computed);
            }
        }
        Ok(())
    }

    fn diloco(&mut self, round_steps: u64, delay: u64) -> Result<()> {
        let mut rounds = Rounds::<()>::new(RoundRules {
            round_steps,
            delay,
            eager: false,
            last: None,
        });
        rounds.begin()?;
        let (mut arrives, mut step, mut has_begun) = (0.0, 0i64, false);
        while self.committed < self.fleet.rounds {
            while let Some(due) = rounds.due() {
                match due {
                    Due::Send => {
                        let ready = self.quorum()?;
                        self.until(ready)?;
                        arrives = self.now;
                        if rounds.joined(Step(step))? != Sends::Nothing {
                            rounds.keep(Step(step), ());
                            let fragment = step as usize % self.fleet.reductions.len().max(1);
                            arrives += self.reduction(fragment);
                        }
                        self.ends = arrives;
                        rounds.sent();
                    }
                    Due::Finish => {
                        if self.lost.is_none() {
                            self.until(arrives)?;
                        }
                        if self.vote()? {
                            // The first round synchronises what replicas begin with.
                            self.commits(if step == 0 { 0 } else { round_steps })?;
                            rounds.applied(Ok(()))?;
                            step += 1;
                        } else {
                            rounds.lost();
                        }
                    }
                }
            }
            if !has_begun {
                rounds.begun();
                has_begun = true;
            }
            rounds.inner_step()?;
            self.computes();
            let ends = self.now + self.fleet.work.step.get();
            self.pass(ends)?;
        }
        Ok(())
    }

    /// All members compute an inner step.
    fn computes(&mut self) {
        let members = self.replicas.iter();
        let members = members.filter(|r| matches!(r.doing, Doing::Idle | Doing::InStep));
        self.computed += members.count() as f64 * self.fleet.work.step.get();
    }

    fn reduction(&self, fragment: usize) -> f64 {
        self.fleet.reductions.get(fragment).map_or(0.0, |r| r.get())
    }

    /// Time goes on to `at`; an attempt that is lost meanwhile is so for good, and nothing waits for it.
    fn until(&mut self, at: f64) -> Result<()> {
        while self.lost.is_none() && (self.next_is_by(at) || self.missing > 0 && !self.events.is_empty()) {
            self.take_next()?;
        }
        self.now = match self.lost {
            Some(heard) => self.now.max(heard),
            None => self.now.max(at),
        };
        Ok(())
    }

    /// Time goes on to `at`, whatever happens.
    fn pass(&mut self, at: f64) -> Result<()> {
        while self.next_is_by(at) {
            self.take_next()?;
        }
        self.now = self.now.max(at);
        Ok(())
    }

    fn next_is_by(&self, at: f64) -> bool {
        self.events
            .peek()
            .is_some_and(|Reverse((moment, ..))| *moment <= moment_of(at))
    }

    /// All members ask. Gives the moment when the last of them is ready to reduce.
    fn quorum(&mut self) -> Result<f64> {
        self.attempts += 1;
        self.busy = self.busy.max(self.now);
        for i in 0..self.replicas.len() {
            let is_idle = |r: &Replica| r.doing == Doing::Idle;
            if !self.replicas.get(i).is_some_and(is_idle) {
                continue;
            }
            let at = self.busy.max(self.now);
            while self.next_is_by(at) {
                self.take_next()?;
            }
            // It may have died while others were served.
            if self.replicas.get(i).is_some_and(is_idle) {
                self.asks(i)?;
            }
        }
        let mut waits = 0;
        while self.delivered.is_none() {
            // Late ones are waited for; a replica may die, or come back, until the quorum forms.
            waits += 1;
            if waits > 10_000 {
                let why = self.lighthouse.reason(self.instant(self.now));
                return Err(Error::new(
                    ErrorKind::Unavailable,
                    format!("no quorum comes about: {why}"),
                ));
            }
            let at = self.now.max(self.busy) + 0.1;
            self.pass(at)?;
            self.tell(Event::Tick)?;
        }
        self.now = self.now.max(self.busy);
        self.take_up()
    }

    /// A replica's call, which the lighthouse answers behind those that came before.
    fn asks(&mut self, i: usize) -> Result<()> {
        let broken = self.broken;
        let is_diloco = matches!(self.fleet.method, Method::Diloco { .. });
        let count = self.replicas.len() as u64;
        self.order += 1;
        let ticket = self.order * count + i as u64;
        let Some(replica) = self.replicas.get_mut(i) else {
            return Ok(());
        };
        // As `Diloco` does: its rounds are long beside a transfer.
        replica.rank.set_joins_at_once(is_diloco);
        let asked = replica.rank.start(broken && replica.doing == Doing::Idle);
        replica.doing = Doing::Asks;
        let member = Member {
            replica_id: replica.id.clone(),
            address: "http://h:1".into(),
            store_address: "h:2".to_string(),
            step: asked.step,
            world_size: 1,
            shrink_only: asked.shrink_only,
            commit_failures: asked.commit_failures,
            lineage: asked.lineage,
            last_quorum_id: asked.last_quorum_id,
            healed: asked.healed,
            batches_committed: asked.batches_committed,
            joining: asked.joining,
            is_last: asked.is_last,
            ..Member::default()
        };
        self.busy = self.busy.max(self.now) + self.call;
        self.served += self.call;
        self.tell(Event::Join { member, ticket })
    }

    /// The lighthouse takes in an event, and what it does about it follows.
    fn tell(&mut self, event: Event) -> Result<()> {
        let at = self.instant(self.now.max(self.busy));
        for action in self.lighthouse.apply(event, at) {
            match action {
                Action::Deliver { tickets, quorum } => self.delivered = Some((tickets, quorum)),
                Action::Push { event, .. } if event.quorum_id == self.epoch => {
                    self.broken = true;
                    if self.in_flight && self.missing > 0 && self.lost.is_none() {
                        self.lost = Some(self.now);
                    }
                }
                // The call of one that is dead by now.
                Action::Reject { ticket, .. } if self.is_dead(ticket) => {}
                Action::Reject { error, .. } | Action::Refuse { error, .. } => {
                    let text = format!("the lighthouse turns a replica away: {}", error.message());
                    return Err(Error::new(ErrorKind::Unavailable, text));
                }
                Action::Push { .. } | Action::Save(_) | Action::Order { .. } | Action::Operated { .. } => {}
            }
        }
        Ok(())
    }

    fn is_dead(&self, ticket: Ticket) -> bool {
        let i = ticket % self.replicas.len().max(1) as u64;
        self.replicas
            .get(i as usize)
            .is_some_and(|r| r.doing == Doing::Dead)
    }

    /// Each replica learns its part of the quorum, and does what that asks for.
    fn take_up(&mut self) -> Result<f64> {
        let Some((tickets, quorum)) = self.delivered.take() else {
            return Ok(self.now);
        };
        let is_new = quorum.quorum_id != self.epoch;
        self.epochs += u64::from(is_new);
        let is_first = self.epoch == Epoch(0);
        (self.epoch, self.broken) = (quorum.quorum_id, false);
        (self.in_flight, self.lost) = (true, None);
        (self.ends, self.missing) = (f64::INFINITY, 0);
        let assignment = Assignment::new(quorum, false)?;
        let count = self.replicas.len() as u64;
        let mut ready = self.now;
        if is_new && !is_first {
            ready += self.fleet.reconnect.get();
        }
        let connected = ready;
        for (nth, ticket) in tickets.iter().enumerate() {
            let i = usize::try_from(ticket % count).unwrap_or(usize::MAX);
            let Some(replica) = self.replicas.get_mut(i) else {
                continue;
            };
            if replica.doing != Doing::Asks {
                // It died, and the lighthouse does not know yet.
                self.missing += 1;
                continue;
            }
            let part = assignment.part_of_call(nth, 0)?;
            let lineage = Lineage::from_peer(part.lineage.clone());
            if !part.spare {
                self.contributors = part.contributor_world_size;
            }
            let mut next = replica.rank.answered(part, None);
            replica.doing = Doing::InStep;
            loop {
                next = match next {
                    Next::Offer { .. } => replica.rank.offered(Ok(())),
                    Next::Configure => replica.rank.configured(Ok(()), None),
                    Next::Heal => {
                        self.heals += 1;
                        ready = ready.max(connected + self.fleet.heal.get());
                        replica.rank.healed(Ok(lineage.clone()))
                    }
                    Next::Fetch => {
                        replica.doing = Doing::Fetches;
                        break;
                    }
                    Next::Ready | Next::Ask => break,
                    Next::Lost(error) | Next::End(error) => {
                        return Err(Error::new(
                            ErrorKind::Internal,
                            format!("replica {} cannot go on: {}", replica.id, error.message()),
                        ));
                    }
                };
            }
            if replica.doing == Doing::Fetches {
                let fetched = Beside::Fetched(i, replica.incarnation);
                self.at(self.now + self.fleet.heal.get(), fetched);
            }
        }
        Ok(ready)
    }

    /// All members vote. True if the round is committed.
    fn vote(&mut self) -> Result<bool> {
        let commits = self.lost.is_none();
        self.in_flight = false;
        for replica in self.replicas.iter_mut().filter(|r| r.doing == Doing::InStep) {
            let error = (!commits).then(|| Error::new(ErrorKind::PeerLost, "a member is gone"));
            replica.rank.vote(error, commits.then_some(self.contributors))?;
            replica.rank.decided(Some(commits))?;
            replica.doing = Doing::Idle;
        }
        self.lost = None;
        Ok(commits)
    }

    /// A round of so many inner steps is committed.
    fn commits(&mut self, inner_steps: u64) -> Result<()> {
        let handled = self
            .fleet
            .work
            .handling(self.fleet.work.parameters / self.fleet.reductions.len().max(1) as u64);
        let vote = self.now + self.fleet.work.vote.get() + handled.get();
        self.pass(vote)?;
        if inner_steps == 0 {
            // What comes before the first round is not part of the figures.
            (self.attempts, self.now, self.busy, self.served) = (0, self.now, self.busy, 0.0);
            return Ok(());
        }
        self.committed += 1;
        let contributors = f64::from(self.contributors);
        self.contributed += contributors;
        self.worked += contributors * inner_steps as f64 * self.fleet.work.step.get();
        Ok(())
    }

    fn take_next(&mut self) -> Result<()> {
        let Some(Reverse((moment, _, what))) = self.events.pop() else {
            return Ok(());
        };
        self.now = self.now.max(moment as f64 / 1e9);
        match what {
            Beside::Death => {
                self.next_death();
                let alive: Vec<usize> = (0..self.replicas.len())
                    .filter(|i| self.replicas.get(*i).is_some_and(|r| r.doing != Doing::Dead))
                    .collect();
                // The last one is spared: without any the run is over.
                if alive.len() > 1 {
                    let pick = (self.uniform() * alive.len() as f64) as usize;
                    if let Some(&i) = alive.get(pick.min(alive.len() - 1)) {
                        self.dies(i);
                    }
                }
            }
            Beside::Noticed(i, incarnation) => {
                let id = self
                    .replicas
                    .get(i)
                    .filter(|r| r.incarnation == incarnation)
                    .map(|r| r.id.clone());
                if let Some(replica_id) = id {
                    self.tell(Event::Detached {
                        replica_id,
                        stream: stream(i, incarnation),
                    })?;
                }
            }
            Beside::Back(i) => {
                let incarnation = self.replicas.get(i).map_or(0, |r| r.incarnation) + 1;
                if let Some(slot) = self.replicas.get_mut(i) {
                    *slot = replica(i, incarnation, Doing::Fetches);
                }
                self.attach(i)?;
                self.asks(i)?;
            }
            Beside::Fetched(i, incarnation) => {
                let Some(replica) = self.replicas.get_mut(i) else {
                    return Ok(());
                };
                if replica.incarnation != incarnation || replica.doing != Doing::Fetches {
                    return Ok(());
                }
                self.heals += 1;
                let lineage = replica
                    .rank
                    .answer()
                    .map(|a| a.lineage.clone())
                    .unwrap_or_default();
                if let Next::End(error) = replica.rank.fetched(Ok(Lineage::from_peer(lineage))) {
                    return Err(error);
                }
                self.asks(i)?;
            }
        }
        Ok(())
    }

    fn dies(&mut self, i: usize) {
        self.deaths += 1;
        let Some(replica) = self.replicas.get_mut(i) else {
            return;
        };
        let was = std::mem::replace(&mut replica.doing, Doing::Dead);
        let incarnation = replica.incarnation;
        self.missing += u32::from(was == Doing::InStep && self.in_flight && self.now < self.ends);
        self.at(
            self.now + self.fleet.notice.get(),
            Beside::Noticed(i, incarnation),
        );
        self.at(
            self.now + self.fleet.restart.get().max(self.fleet.notice.get()),
            Beside::Back(i),
        );
    }

    fn attach(&mut self, i: usize) -> Result<()> {
        let Some(replica) = self.replicas.get(i) else {
            return Ok(());
        };
        let (replica_id, stream) = (replica.id.clone(), stream(i, replica.incarnation));
        self.tell(Event::Attached {
            replica_id,
            stream,
            last_quorum_id: Epoch(0),
        })
    }

    fn next_death(&mut self) {
        if let Some(every) = self.fleet.death_every {
            let wait = -(1.0 - self.uniform()).ln() * every.get();
            self.at(self.now + wait, Beside::Death);
        }
    }

    fn at(&mut self, at: f64, what: Beside) {
        self.order += 1;
        self.events.push(Reverse((moment_of(at), self.order, what)));
    }

    /// From 0 to 1, splitmix64.
    fn uniform(&mut self) -> f64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn instant(&self, at: f64) -> Instant {
        self.base + Duration::from_secs_f64(at.clamp(0.0, 1e10))
    }
}

fn moment_of(at: f64) -> Moment {
    (at.max(0.0) * 1e9) as Moment
}

fn stream(i: usize, incarnation: u32) -> u64 {
    (u64::from(incarnation) << 32) | i as u64
}

fn replica(i: usize, incarnation: u32, doing: Doing) -> Replica {
    let rules = RankRules {
        min_replicas: 1,
        max_contributors: None,
        init_sync: false,
        max_retries: None,
    };
    Replica {
        // Short: the lighthouse compares ids all the time.
        id: format!("{i:05x}:{incarnation}"),
        incarnation,
        rank: Rank::new(rules),
        doing,
    }
}
