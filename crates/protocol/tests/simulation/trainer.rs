//! The training thread of a rank: drives the real [`Rank`] through its attempts, as `manager::Manager` does, over groups and
//! transfers that are played.
//!
//! What is trained is a [`Program`]: two ranks that hold the same step of the same history hold the same numbers, or one has broken a
//! promise. Beside them a state has a part of the replica's own, as DiLoCo's local parameters: replicas of one step differ in it, and a state that
//! is fetched has both parts from one source.

use std::time::Duration;

use ftcore::{Epoch, Error, ErrorKind, Step};
use oxccl_protocol::ends::Ends;
use oxccl_protocol::gather::RankRequest;
use oxccl_protocol::quorum::Ticket;
use oxccl_protocol::rank::{Next, Rank, RankRules, RankVote, blame_peer};
use oxccl_protocol::replica::ReplicaEvent;
use oxccl_protocol::training::Share as Part;
use oxccl_protocol::{Lineage, QuorumResult};

use crate::ends::Leave;
use crate::groups::{Progress, Share, Who};
use crate::program::{Model, Program, Turn, Wrong};
use crate::random::{Scenario, mix};
use crate::world::{CALL, Happening, World};

mod votes;

/// How a call of the training thread went.
#[derive(Debug)]
pub(crate) enum Done {
    Connected,
    /// The reduction of this epoch is complete: a hash of what went in, and how many contributed; or it was a barrier.
    Reduced(Epoch, Option<(u64, u32)>),
    /// A member of this epoch's group is gone.
    Lost(Epoch, String),
    /// What this peer sent to the others of the group makes no sense.
    Senseless(String),
    /// The state that was fetched.
    Fetched(Box<Offer>),
    NotFetched(String),
    TimedOut,
}

/// What others may heal from.
#[derive(Debug, Clone)]
pub(crate) struct Offer {
    pub(crate) step: Step,
    pub(crate) epoch: Epoch,
    pub(crate) model: Model,
    pub(crate) lineage: Lineage,
    /// As a rank gets it: whose it is.
    pub(crate) taken: Option<Taken>,
}

/// Where a state was taken over from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Taken {
    pub(crate) epoch: Epoch,
    /// The source's manager server.
    pub(crate) source: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Doing {
    Nothing,
    Connecting,
    Fetching,
    /// As a spare.
    FetchingOutside,
    /// A reduction is under way, beside inner steps or not.
    Reducing,
}

pub(crate) struct Trainer {
    rank: Rank,
    pub(crate) program: Program,
    /// Whose state this one is; `None` once it has committed.
    taken: Option<Taken>,
    /// The epoch in which it committed last or took its state over.
    of: Epoch,
    /// It waits for the reduction, to vote.
    waits: bool,
    /// It leaves in good order.
    pub(crate) leaves: bool,
    /// It is killed right after its next commit.
    pub(crate) dies_at_commit: bool,
    /// The newest last; an earlier one is kept while spares fetch.
    pub(crate) offers: Vec<Offer>,
    /// The present call of the training thread; whatever answers another one is late.
    pub(crate) op: u64,
    pub(crate) doing: Doing,
    pub(crate) call: Option<Ticket>,
    request: RankRequest,
    vote: Option<RankVote>,
    /// The group's epoch, and why it cannot be used.
    pub(crate) group: Option<Epoch>,
    /// The newest epoch that it has connected for, or tried to.
    connected: Epoch,
    pub(crate) broken: Option<String>,
    pub(crate) ends: Ends,
    /// When the result of the reduction is here, which all members have brought their shares to.
    pub(crate) arrives: Option<Duration>,
    error: Option<Error>,
    least: Option<u32>,
    result: Option<u64>,
    retries: u32,
    pub(crate) moved: u64,
}

impl Trainer {
    fn rules(scenario: &Scenario) -> RankRules {
        RankRules {
            min_replicas: scenario.min_replicas,
            max_contributors: scenario.spares.then_some(scenario.min_replicas),
            init_sync: scenario.init_sync,
            max_retries: scenario.max_retries,
        }
    }

    pub(crate) fn new(group_rank: u32, scenario: &Scenario, value: u64) -> Self {
        let rules = Self::rules(scenario);
        // Without an initial sync all replicas begin with the same state.
        let first = if rules.init_sync {
            value
        } else {
            u64::from(group_rank)
        };
        Self {
            rank: Rank::new(rules),
            program: Program::new(scenario, first, mix(value)),
            taken: None,
            of: Epoch(0),
            waits: false,
            leaves: false,
            dies_at_commit: false,
            offers: Vec::new(),
            op: 0,
            doing: Doing::Nothing,
            call: None,
            request: RankRequest::default(),
            vote: None,
            group: None,
            connected: Epoch(0),
            broken: None,
            ends: Ends::default(),
            arrives: None,
            error: None,
            least: None,
            result: None,
            retries: 0,
            moved: 1,
        }
    }

    /// The number of its present question.
    pub(crate) fn question(&self) -> i64 {
        self.request.question
    }

    /// It waits for the answer to this question.
    pub(crate) fn still_asks(&self, question: i64) -> bool {
        self.call.is_some() && self.request.question == question && self.rank.answer().is_none()
    }

    /// It has the quorum of this epoch, and has not voted.
    pub(crate) fn is_in_step(&self, epoch: Epoch) -> bool {
        self.rank.in_step() && self.rank.epoch() == Some(epoch)
    }

    pub(crate) fn step(&self) -> Step {
        self.rank.step()
    }

    /// True if both hold parts of one state: of the same step and history, which they made, or took over together.
    pub(crate) fn is_one_with(&self, other: &Self) -> bool {
        let of = |t: &Self| (t.rank.step(), t.rank.lineage().clone(), t.taken.clone());
        of(self) == of(other)
    }

    /// The epochs that it says that it comes from: in the lineage of its state, and as its last one.
    pub(crate) fn comes_from(&self) -> [Epoch; 2] {
        [self.of, self.rank.epoch().unwrap_or(Epoch(0))]
    }

    /// The epochs in whose groups it is.
    pub(crate) fn epochs(&self) -> Vec<Epoch> {
        self.group.into_iter().collect()
    }

    pub(crate) fn set_shrink_only(&mut self, on: bool) {
        self.rank.set_shrink_only(on);
    }

    /// Why the group cannot be used for another step, as the manager finds it.
    fn why_broken(&self) -> Option<String> {
        let over = || self.ends.why_over(self.rank.epoch()?).map(str::to_string);
        self.broken.clone().or_else(over)
    }
}

impl World {
    /// The program's next call, or the same again.
    pub(crate) fn calls(&mut self, who: Who) {
        let Some(t) = self.trainer(who) else { return };
        let turn = t.program.calls(t.rank.step());
        self.goes_on(who, turn);
    }

    /// The training thread has computed.
    pub(crate) fn works(&mut self, who: Who) {
        let Some(t) = self.trainer(who) else { return };
        t.moved += 1;
        let turn = t.program.works(t.rank.step());
        self.goes_on(who, turn);
    }

    fn goes_on(&mut self, who: Who, turn: Result<Turn, Error>) {
        match turn {
            Ok(Turn::Attempt) => self.attempt(who),
            Ok(Turn::Vote) => {
                let Some(t) = self.trainer(who) else { return };
                t.waits = t.doing == Doing::Reducing;
                if !t.waits {
                    self.vote(who);
                }
            }
            Ok(Turn::Work) => {
                let parts = self.scenario.training.round_steps();
                let delay = self.random.millis(20 / parts, 400 / parts);
                self.later(delay, who, Happening::InnerSteps);
            }
            Ok(Turn::Leave) => {
                self.run_ends(who);
                self.leaves(who);
            }
            Err(e) => {
                self.note(|| format!("the program of {who:?} ends: {e}"));
                self.later(Duration::ZERO, who, Happening::Exit);
            }
        }
    }

    pub(crate) fn attempt(&mut self, who: Who) {
        let Some(t) = self.trainer(who) else { return };
        t.moved += 1;
        if t.program.is_torn() {
            return self.violate(format!(
                "INV-5: {who:?} asks for a quorum with a state that was written in part"
            ));
        }
        t.rank.set_last(t.program.is_last(t.rank.step()));
        t.rank.set_joins_at_once(t.program.joins_at_once());
        (t.waits, t.result) = (false, None);
        t.error = None;
        t.least = None;
        t.doing = Doing::Nothing;
        let broken = t.why_broken().is_some();
        t.request = t.rank.start(broken);
        self.ask(who);
    }

    /// Asks, for the first time or again.
    pub(crate) fn ask(&mut self, who: Who) {
        let ticket = self.number();
        let now = self.instant();
        let Some(t) = self.trainer(who) else { return };
        t.call = Some(ticket);
        let request = t.request.clone();
        // A program that wants no newcomers thinks it over earlier: the members that are left may be too few.
        let time = if request.shrink_only { CALL } else { CALL * 6 };
        let deadline = now + time;
        let rank = who.rank;
        let metadata = String::new();
        self.server_hears(
            who,
            ReplicaEvent::Ask {
                rank,
                request,
                metadata,
                deadline,
                ticket,
            },
        );
        let error = Error::timeout("no quorum");
        self.later(time, who, Happening::Quorum(ticket, Err(error)));
        // The server ends the call by itself: the thread that made it may hang by then.
        let withdraws = Happening::Server(ReplicaEvent::Withdraw { ticket });
        self.later(time, World::server_of(who), withdraws);
    }

    pub(crate) fn quorum_answered(&mut self, who: Who, ticket: Ticket, answer: Result<QuorumResult, Error>) {
        let Some(t) = self.trainer(who).filter(|t| t.call == Some(ticket)) else {
            return;
        };
        t.call = None;
        t.moved += 1;
        match answer {
            Ok(answer) => {
                t.retries = 0;
                let broken = t.why_broken();
                let next = t.rank.answered(answer, broken);
                self.next(who, next);
            }
            Err(e) => {
                self.server_hears(who, ReplicaEvent::Withdraw { ticket });
                self.fails_or_asks_again(who, e);
            }
        }
    }

    fn fails_or_asks_again(&mut self, who: Who, error: Error) {
        self.note(|| format!("{who:?} gets no quorum: {error}"));
        let gave_up = self.scenario.max_retries.is_some() && error.message().contains("max_retries");
        if error.kind() == ErrorKind::Conflict && !self.may_be_refused(who) {
            return self.violate(format!("{who:?} is refused although it would heal: {error}"));
        }
        if gave_up || error.kind() == ErrorKind::PeerLost || error.kind() == ErrorKind::Conflict {
            self.later(Duration::ZERO, who, Happening::Exit);
            return;
        }
        if !error.is_retryable() {
            self.violate(format!("{who:?} ends for good: {error}"));
            return;
        }
        let Some(t) = self.trainer(who) else { return };
        t.retries += 1;
        let pause = Duration::from_millis(20 << t.retries.min(6));
        // The time of its program's call is over, which asks anew; otherwise the manager asks the same again.
        let again = if error.kind() == ErrorKind::Timeout {
            Happening::Calls
        } else {
            Happening::AskAgain
        };
        self.later(pause.min(Duration::from_secs(1)), who, again);
    }

    fn next(&mut self, who: Who, mut next: Next) {
        loop {
            let Some(t) = self.trainer(who) else { return };
            let Some(answer) = t.rank.answer().cloned() else {
                return;
            };
            next = match next {
                // In every second epoch the state is in use until the group is connected, as with a quorum that was begun ahead.
                Next::Offer { publish: true, .. }
                    if answer.quorum_id.0 % 2 == 0 && t.group != Some(answer.quorum_id) =>
                {
                    t.rank.connect_first()
                }
                Next::Offer { publish, keep } => {
                    if publish {
                        let model = match t.program.offer() {
                            Ok(model) => model,
                            Err(e) => {
                                next = t.rank.offered(Err(e));
                                continue;
                            }
                        };
                        let offer = Offer {
                            step: answer.max_step,
                            epoch: answer.quorum_id,
                            model,
                            lineage: t.rank.lineage().clone(),
                            taken: None,
                        };
                        if t.offers.len() == 2 {
                            t.offers.remove(0);
                        }
                        t.offers.push(offer.clone());
                        let next = t.rank.offered(Ok(()));
                        self.checks.offered(who, &offer);
                        next
                    } else {
                        if !keep {
                            t.offers.clear();
                        }
                        t.rank.offered(Ok(()))
                    }
                }
                Next::Fetch => {
                    self.note(|| format!("{who:?} is a spare at step {}", answer.max_step));
                    return self.fetch(who, &answer);
                }
                Next::Ask => return self.attempt(who),
                Next::Configure => return self.connect(who, &answer),
                Next::Heal => return self.fetch(who, &answer),
                Next::Ready => return self.joined(who, &answer),
                Next::Lost(e) => {
                    t.error.get_or_insert(e);
                    self.give_up_group(who);
                    return self.joined(who, &answer);
                }
                // Torn, and none is left to heal from: it starts again.
                Next::End(e) if e.kind() == ErrorKind::InvalidState && self.has_none(who) => {
                    return self.later(Duration::ZERO, who, Happening::Exit);
                }
                Next::End(e) => return self.violate(format!("{who:?} ends its run for good: {e}")),
            };
        }
    }

    /// A new call of the training thread, with its time limit.
    fn begin(&mut self, who: Who, doing: Doing) -> u64 {
        let op = self.number();
        if let Some(t) = self.trainer(who) {
            t.op = op;
            t.doing = doing;
            t.arrives = None;
        }
        self.later(CALL, who, Happening::Done(op, Done::TimedOut));
        op
    }

    fn give_up_group(&mut self, who: Who) {
        let Some(t) = self.trainer(who) else { return };
        t.broken.get_or_insert_with(|| "this rank gave it up".into());
        if let Some(epoch) = t.group {
            self.leave_group(epoch, who, Leave::Aborts);
        }
    }

    fn connect(&mut self, who: Who, answer: &QuorumResult) {
        if let Some(old) = self.trainer(who).and_then(|t| t.group.take()) {
            self.leave_group(old, who, Leave::Closes { after: 0 });
        }
        let epoch = answer.quorum_id;
        let op = self.begin(who, Doing::Connecting);
        let Some(t) = self.trainer(who) else { return };
        t.group = Some(epoch);
        t.broken = None;
        let before = std::mem::replace(&mut t.connected, epoch);
        if before >= epoch {
            return self.violate(format!(
                "INV-1: {who:?} connects for epoch {epoch} after epoch {before}"
            ));
        }
        if let Some(peer) = self.garbled(answer) {
            let delay = self.random.millis(0, 20);
            return self.later(delay, who, Happening::Done(op, Done::Senseless(peer)));
        }
        let Some(t) = self.trainer(who) else { return };
        if let Some(why) = t.ends.why_over(epoch).map(str::to_string) {
            return self.later(Duration::ZERO, who, Happening::Done(op, Done::Lost(epoch, why)));
        }
        match self
            .groups
            .join(epoch, who, answer.replica_rank, answer.replica_world_size)
        {
            Err(text) => self.violate(text),
            Ok(Progress::Waits) => {}
            Ok(Progress::Broken) => {
                let delay = self.random.millis(0, 20);
                self.later(
                    delay,
                    who,
                    Happening::Done(op, Done::Lost(epoch, "a member is gone".into())),
                );
            }
            Ok(Progress::Complete(members, _)) => {
                if members.iter().all(|m| members.iter().all(|o| self.reach(*m, *o))) {
                    for member in members {
                        let op = self.trainer(member).map_or(0, |t| t.op);
                        let delay = self.random.millis(1, 20);
                        self.later(delay, member, Happening::Done(op, Done::Connected));
                    }
                }
            }
        }
    }

    /// A member of which what it sends makes no sense at present.
    fn garbled(&self, answer: &QuorumResult) -> Option<String> {
        let until = |id: &str| -> Option<Duration> {
            let slot = id.strip_prefix('r')?.split(':').next()?.parse::<usize>().ok()?;
            self.garbles_until.get(slot).copied()
        };
        let garbles = |id: &&String| until(id).is_some_and(|until| self.now < until);
        answer.replica_ids.iter().find(garbles).cloned()
    }

    fn fetch(&mut self, who: Who, answer: &QuorumResult) {
        if !self.scenario.foreign {
            let checked = self.checks.sources(who, answer);
            self.check(checked);
        }
        let doing = if answer.spare {
            Doing::FetchingOutside
        } else {
            Doing::Fetching
        };
        let op = self.begin(who, doing);
        self.look_for_offer(who, op, answer, 0);
    }

    fn look_for_offer(&mut self, who: Who, op: u64, answer: &QuorumResult, tries: u64) {
        // Outside of the group a transfer may take several steps of the others.
        let delay = self.random.millis(5, if answer.spare { 4_000 } else { 200 });
        let done = match self.offered_to(who, answer, tries) {
            Some(offer) => Done::Fetched(Box::new(offer)),
            None => Done::NotFetched(tries.to_string()),
        };
        self.later(delay, who, Happening::Done(op, done));
    }

    /// Loads a state, and tells the rank so or that it could not.
    fn takes_over(
        &mut self,
        who: Who,
        offer: &Offer,
        told: impl FnOnce(&mut Rank, Result<Lineage, Error>) -> Next,
    ) -> Option<Next> {
        let is_alone = self.scenario.ranks == 1 && !self.scenario.foreign;
        let t = self.trainer(who)?;
        let held = (t.rank.step(), t.program.common(), t.rank.lineage().clone());
        let written = t.program.loads(&offer.model);
        let is_whole = written.is_ok();
        t.taken.clone_from(&offer.taken);
        t.of = offer.epoch;
        let next = told(&mut t.rank, written.map(|()| offer.lineage.clone()));
        if is_whole {
            let (rank, value, local) = (t.rank.clone(), t.program.common(), t.program.own());
            let step = rank.step();
            if self.trainer(who).is_some_and(|t| t.program.keeps()) {
                self.violate(format!(
                    "INV-4: {who:?} keeps what it computed on the state that it took this one for"
                ));
            }
            if is_alone && held == (step, value, offer.lineage.clone()) {
                self.violate(format!(
                    "{who:?} heals to the state of step {step}, which it held"
                ));
            }
            let checked = self.checks.state(who, &rank, value);
            self.check(checked);
            let whole = self.checks.taken_over(who, step, value, local);
            self.check(whole);
            self.note(|| format!("{who:?} healed to step {step}"));
        }
        Some(next)
    }

    /// There is a quorum, whether or not it came up: the program's share of it goes out.
    fn joined(&mut self, who: Who, answer: &QuorumResult) {
        let Some(t) = self.trainer(who) else { return };
        if t.error.is_none() {
            let taken = t.taken.clone();
            if !self.scenario.foreign {
                let together = self
                    .checks
                    .together(who, answer.quorum_id, answer.max_step, taken);
                self.check(together);
            }
        }
        let Some(t) = self.trainer(who) else { return };
        let (contributor_rank, contributors) = t.rank.contribution();
        let part = Part {
            step: t.rank.step(),
            contributor_rank,
            contributors,
        };
        if answer.closes && part.step == answer.max_step {
            t.program.closes_with(part.step);
        }
        let brings = match t.program.joined(part) {
            Ok(brings) => brings,
            Err(e) => return self.goes_on(who, Err(e)),
        };
        let attempt = (answer.quorum_id, answer.max_step, t.rank.key().attempt);
        let computes = t.program.has_computed;
        let alike = self.checks.computed(who, attempt, computes);
        self.check(alike);
        let Some(t) = self.trainer(who) else { return };
        if t.error.is_none() && (brings.is_some() || t.rank.needs_barrier(false)) {
            let state = t.program.present(part.step);
            let (is_barrier, own) = (brings.is_none(), brings.flatten());
            let share = Share {
                is_barrier,
                contributes: own.is_some(),
                healed: t.taken.is_some(),
                work: own.as_ref().map_or(0, |g| g.work),
                copied: t.program.is_copy(),
                of: own.as_ref().map_or(0, |g| g.of),
                pieces: own.map_or(Vec::new(), |g| g.pieces),
                state,
            };
            self.reduce(who, answer, share);
        }
        let Some(t) = self.trainer(who) else { return };
        // Data parallel has nothing else to do.
        let turn = match t.program.turn(t.rank.step()) {
            Ok(Turn::Attempt) => Ok(Turn::Vote),
            turn => turn,
        };
        self.goes_on(who, turn);
    }

    fn reduce(&mut self, who: Who, answer: &QuorumResult, share: Share) {
        let op = self.begin(who, Doing::Reducing);
        let epoch = answer.quorum_id;
        let Some(t) = self.trainer(who) else { return };
        t.moved += 1;
        if t.broken.is_some() {
            return self.later(
                Duration::ZERO,
                who,
                Happening::Done(op, Done::Lost(epoch, "it is broken".into())),
            );
        }
        let progress = self.groups.reduce(epoch, who, answer.replica_rank, share);
        self.settle(who);
        match progress {
            Progress::Waits => {}
            Progress::Broken => {
                let delay = self.random.millis(0, 5);
                self.later(
                    delay,
                    who,
                    Happening::Done(op, Done::Lost(epoch, "a member is gone".into())),
                );
            }
            Progress::Complete(members, shares)
                if shares.iter().any(|s| s.is_barrier != shares[0].is_barrier) =>
            {
                for member in members {
                    let Some(op) = self.trainer(member).map(|t| t.op) else {
                        continue;
                    };
                    let lost = Done::Lost(epoch, "the members do not call the same".into());
                    self.later(Duration::ZERO, member, Happening::Done(op, lost));
                }
            }
            Progress::Complete(members, shares) => {
                // torchft's managers do not tell what they copied.
                if !self.scenario.foreign {
                    let weights = self.checks.weights(epoch, &shares, !self.scenario.spares);
                    self.check(weights);
                }
                let mut works: Vec<u64> = shares.iter().filter(|s| s.contributes).map(|s| s.work).collect();
                works.sort_unstable();
                let number = works.len() as u32;
                let result = works.iter().fold(7, |h, w| mix(h ^ w));
                let is_barrier = shares.iter().any(|s| s.is_barrier);
                let outcome = (!is_barrier).then_some((result, number));
                if !members.iter().all(|m| members.iter().all(|o| self.reach(*m, *o))) {
                    return;
                }
                for member in members {
                    let delay = self
                        .random
                        .millis(0, if self.scenario.keeps_work { 100 } else { 8 });
                    let at = self.now + delay;
                    let Some(t) = self.trainer(member) else { continue };
                    t.arrives = Some(at);
                    let op = t.op;
                    self.later(delay, member, Happening::Done(op, Done::Reduced(epoch, outcome)));
                }
            }
        }
    }

    pub(crate) fn done(&mut self, who: Who, op: u64, done: Done) {
        let Some(t) = self.trainer(who) else { return };
        // That a group is broken stays true, whatever the training thread does meanwhile.
        if let Done::Lost(epoch, why) = &done
            && t.group == Some(*epoch)
        {
            t.broken.get_or_insert_with(|| why.clone());
        }
        if t.op != op || t.doing == Doing::Nothing {
            return;
        }
        let doing = t.doing;
        let lost = |why: String| Error::new(ErrorKind::PeerLost, why);
        match (doing, done) {
            (Doing::Connecting, Done::Connected) => {
                t.doing = Doing::Nothing;
                let broken = t.why_broken();
                let next = t.rank.configured(Ok(()), broken);
                self.next(who, next);
            }
            (Doing::Connecting, Done::Lost(_, why)) => {
                t.doing = Doing::Nothing;
                let next = t.rank.configured(Err(lost(why)), None);
                self.next(who, next);
            }
            (Doing::Connecting, Done::Senseless(peer)) => {
                t.doing = Doing::Nothing;
                let error = blame_peer(Error::invalid("its address is none"), &peer);
                let next = t.rank.configured(Err(error), None);
                self.next(who, next);
            }
            (Doing::Connecting, Done::TimedOut) => {
                t.doing = Doing::Nothing;
                let next = t
                    .rank
                    .configured(Err(Error::timeout("the others did not come")), None);
                self.next(who, next);
            }
            (Doing::FetchingOutside, Done::Fetched(offer)) => {
                t.doing = Doing::Nothing;
                let Some(answer) = t.rank.answer().cloned() else {
                    return;
                };
                // The transfer took a while: a replica must be left that has it, and the other ranks still want it.
                let left = self.offered_to(who, &answer, u64::MAX).is_some();
                if !left || !self.settles(who, &answer, &offer) {
                    let Some(t) = self.trainer(who) else { return };
                    let gone = Error::new(ErrorKind::PeerLost, "all sources are gone");
                    let next = t.rank.fetched(Err(gone));
                    return self.next(who, next);
                }
                let next = self.takes_over(who, &offer, Rank::fetched);
                if let Some(next) = next {
                    self.next(who, next);
                }
            }
            (Doing::Fetching, Done::Fetched(offer)) => {
                let Some(answer) = t.rank.answer().cloned() else {
                    return;
                };
                if !self.settles(who, &answer, &offer) {
                    return self.look_for_offer(who, op, &answer, 1);
                }
                let Some(t) = self.trainer(who) else { return };
                t.doing = Doing::Nothing;
                if let Some(next) = self.takes_over(who, &offer, Rank::healed) {
                    self.next(who, next);
                }
            }
            (doing @ (Doing::Fetching | Doing::FetchingOutside), Done::NotFetched(tries)) => {
                let Some(answer) = t.rank.answer().cloned() else {
                    return;
                };
                let tries: u64 = tries.parse().unwrap_or(0);
                if tries > 40 {
                    t.doing = Doing::Nothing;
                    let error = Error::new(ErrorKind::Unavailable, "the source does not offer it");
                    let next = match doing {
                        Doing::FetchingOutside => t.rank.fetched(Err(error)),
                        _ => t.rank.healed(Err(error)),
                    };
                    self.next(who, next);
                } else {
                    self.look_for_offer(who, op, &answer, tries + 1);
                }
            }
            (Doing::FetchingOutside, Done::TimedOut) => {
                t.doing = Doing::Nothing;
                let next = t.rank.fetched(Err(Error::timeout("the state did not come")));
                self.next(who, next);
            }
            (Doing::Fetching, Done::TimedOut) => {
                t.doing = Doing::Nothing;
                let next = t.rank.healed(Err(Error::timeout("the state did not come")));
                self.next(who, next);
            }
            (Doing::Reducing, Done::Reduced(epoch, outcome))
                if t.group == Some(epoch) && t.broken.is_none() =>
            {
                (t.result, t.least) = outcome.unzip();
                self.reduced(who);
            }
            (Doing::Reducing, Done::Lost(_, why)) => {
                t.error.get_or_insert(lost(why.clone()));
                self.reports(who, why);
                self.reduced(who);
            }
            (Doing::Reducing, Done::TimedOut) => {
                t.error.get_or_insert(Error::timeout("the reduction"));
                self.reports(who, "the reduction timed out".into());
                self.give_up_group(who);
                self.reduced(who);
            }
            _ => {}
        }
    }

    /// The reduction has ended, well or not.
    fn reduced(&mut self, who: Who) {
        let Some(t) = self.trainer(who) else { return };
        t.doing = Doing::Nothing;
        if std::mem::take(&mut t.waits) {
            self.vote(who);
        }
    }
}
