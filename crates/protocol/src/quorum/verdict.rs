//! May a quorum form now? The rules, over the roster's counters; and the answer as a text, made only when a replica asks.

use std::time::Instant;

use ftcore::{Epoch, Step};

use super::{Entry, LighthouseState};
use crate::member::listed;

/// What the rules say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// No replica asks.
    Idle,
    /// Fewer than `min_replicas` ask.
    TooFew,
    /// The healthy that do not ask are as many.
    NoMajority,
    /// The first quorum waits for `initial_replicas`.
    Initial,
    /// Only newcomers ask, and members of the last quorum are at work: it could go on beside the new one (L26).
    Newcomers,
    /// All that ask are behind the recorded step, and not enough of the recorded members are there to decide so.
    GoesBack,
    /// The first quorum after a restart waits for a majority of the last one's members.
    Recovers,
    /// It could form, and waits for healthy replicas that have not asked.
    Wait,
    /// It forms.
    Form,
}

impl Verdict {
    /// In one word, for programs.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::TooFew => "too_few",
            Self::NoMajority => "no_majority",
            Self::Initial => "initial",
            Self::Newcomers => "newcomers",
            Self::GoesBack => "goes_back",
            Self::Recovers => "recovers",
            Self::Wait => "wait",
            Self::Form => "form",
        }
    }
}

impl LighthouseState {
    /// The run is over: all members of the last quorum have left, or all are gone, one of them in order, and it was the quorum of the run's last
    /// step. Who leaves after that has committed it; the leaves of others may have been lost.
    pub(super) fn is_over(&self) -> bool {
        let tally = self.roster.tally();
        let closed =
            || tally.left > 0 && tally.present == 0 && self.job.as_ref().is_some_and(|job| job.closes);
        tally.members > 0 && (tally.left == tally.members || closed())
    }

    /// True if a member of the last quorum asks for one without newcomers. What a newcomer asks keeps none out: it would be out itself.
    fn shrinks(&self) -> bool {
        self.roster.tally().shrinking > 0 && self.job.is_some()
    }

    /// How many of the healthy a quorum needs a majority of. Newcomers that wait because it shrinks are at work in no other.
    fn electorate(&self) -> usize {
        let tally = self.roster.tally();
        let kept_out = if self.shrinks() {
            tally.asking.saturating_sub(tally.members_asking)
        } else {
            0
        };
        tally.healthy.saturating_sub(kept_out)
    }

    /// How many would be in a quorum that forms now.
    pub(super) fn candidates(&self) -> usize {
        let tally = self.roster.tally();
        if self.shrinks() {
            tally.members_asking
        } else {
            tally.asking
        }
    }

    /// True for an entry that would be in a quorum that forms now.
    pub(super) fn is_candidate(&self, entry: &Entry) -> bool {
        entry.is_asking() && (entry.member || !self.shrinks())
    }

    /// The record binds those who ask.
    pub(super) fn binds(&self) -> bool {
        self.job.is_some() && !self.is_over() && !self.accept_rollback
    }

    /// True if the job would go back from the recorded step without those who could say so.
    fn goes_back(&self) -> bool {
        let tally = self.roster.tally();
        let (current, named) = if self.shrinks() {
            (tally.members_current, tally.members_asking)
        } else {
            (tally.current, tally.named)
        };
        self.binds() && current == 0 && named * 2 <= tally.members
    }

    /// How many of the last quorum's members ask, and how many it had, if they are not enough for the first quorum after a restart.
    fn lacks_of_last(&self, now: Instant) -> Option<(usize, usize)> {
        if self.previous.is_some() || self.accept_rollback || self.is_over() {
            return None;
        }
        let time = self
            .rules
            .heartbeat_timeout
            .saturating_add(self.rules.join_timeout);
        let waited = self.first_asked.map(|first| now.saturating_duration_since(first));
        if waited.is_some_and(|waited| waited >= time) {
            return None;
        }
        let tally = self.roster.tally();
        let (present, of) = match (&self.job, self.told) {
            (Some(_), _) => {
                // One that was started again under a recorded name is there, and so not among those that are gone.
                let back = tally.named.saturating_sub(tally.members_asking);
                let gone = tally.departed.saturating_sub(back);
                (tally.named, tally.members.saturating_sub(gone))
            }
            (None, Some((_, size))) => (tally.newest, usize::try_from(size).unwrap_or(usize::MAX)),
            (None, None) => return None,
        };
        (of > 0 && present <= of / 2).then_some((present, of))
    }

    /// What the rules say. O(1).
    pub(super) fn judge(&self, now: Instant) -> Verdict {
        let (rules, tally, n) = (&self.rules, self.roster.tally(), self.candidates());
        let overlaps = tally.members_asking > 0;
        // A record alone does not go on: a job of which no replica remembers a quorum starts again as a whole. Who asks under a recorded
        // id was in it, also if it tells none, as torchft's managers.
        let goes_on = self.previous.is_some() || tally.reporting > 0 || overlaps;
        if tally.asking == 0 {
            Verdict::Idle
        } else if n < rules.min_replicas.max(1) {
            Verdict::TooFew
        } else if n * 2 <= self.electorate() {
            Verdict::NoMajority
        } else if !goes_on && rules.initial_replicas.is_some_and(|initial| n < initial) {
            Verdict::Initial
        } else if !overlaps && tally.busy > 0 {
            Verdict::Newcomers
        } else if self.goes_back() {
            Verdict::GoesBack
        } else if self.lacks_of_last(now).is_some() {
            Verdict::Recovers
        } else if ((tally.healthy == tally.asking && (overlaps || tally.coming == 0))
            || (overlaps && tally.busy == 0))
            && (tally.ending == 0 || tally.fetching == 0)
        {
            Verdict::Form
        } else {
            let waited = self.able_since.map(|since| now.saturating_duration_since(since));
            match waited.filter(|waited| *waited >= rules.join_timeout) {
                Some(_) => Verdict::Form,
                None => Verdict::Wait,
            }
        }
    }

    /// The first ids of such entries.
    pub(super) fn listed(&self, which: impl Fn(&Entry) -> bool) -> String {
        listed(
            self.roster
                .iter()
                .filter(|(_, e)| which(e))
                .map(|(id, _)| id.as_ref()),
        )
    }

    /// Why there is no new quorum.
    pub fn reason(&self, now: Instant) -> String {
        let (rules, healthy, n) = (&self.rules, self.roster.tally().healthy, self.candidates());
        let note = if self.shrinks() {
            ", without newcomers (shrink_only)"
        } else {
            ""
        };
        let missing = self.listed(|e| e.seen.is_some() && e.waiting.is_none());
        let lacking = if missing.is_empty() {
            String::new()
        } else {
            format!("; not asking: {missing}")
        };
        let verdict = self.judge(now);
        let why = match verdict {
            Verdict::Idle | Verdict::Form => "no replica is asking for a quorum".into(),
            Verdict::TooFew => format!(
                "{n} of {healthy} healthy replicas ask{note}, min_replicas is {}{lacking}",
                rules.min_replicas
            ),
            Verdict::NoMajority => {
                format!("{n} of {healthy} healthy replicas ask{note}, no strict majority{lacking}")
            }
            Verdict::Initial => format!(
                "the first quorum waits for {} replicas, {n} ask: {}",
                rules.initial_replicas.unwrap_or_default(),
                self.listed(Entry::is_asking)
            ),
            Verdict::Newcomers => format!(
                "{n} newcomers ask; waiting for a member of quorum {}: {}",
                self.present_epoch().unwrap_or_default(),
                self.listed(Entry::is_busy)
            ),
            Verdict::GoesBack => {
                let (epoch, step) = self
                    .job
                    .as_ref()
                    .map_or((Epoch(0), Step(0)), |job| (job.epoch, job.step));
                format!(
                    "the {n} replicas that ask are all behind the recorded step {step} (epoch {epoch}): waiting for a replica with that state, \
                     or for a majority of {}; `oxccl lighthouse --accept-rollback` goes on without them",
                    self.listed(|e| e.member)
                )
            }
            Verdict::Recovers => {
                let (present, of) = self.lacks_of_last(now).unwrap_or_default();
                format!(
                    "this lighthouse restarted, and {present} of the {of} members of the last quorum ask; waiting up to {:?} for a majority",
                    rules.heartbeat_timeout.saturating_add(rules.join_timeout)
                )
            }
            Verdict::Wait => {
                let coming = self.listed(|e| e.coming.is_some_and(|c| c.counts));
                let both = if missing.is_empty() || coming.is_empty() {
                    ""
                } else {
                    ", "
                };
                format!(
                    "{n} of {healthy} healthy replicas ask; waiting up to {:?} for {missing}{both}{coming}",
                    rules.join_timeout
                )
            }
        };
        why + &self.who_left(verdict)
    }

    /// That members of the last quorum left in order, for one that waits: the run may be over for it.
    fn who_left(&self, verdict: Verdict) -> String {
        let (tally, epoch) = (self.roster.tally(), self.present_epoch().unwrap_or_default());
        if tally.left == 0 || matches!(verdict, Verdict::Idle | Verdict::Form | Verdict::Wait) {
            return String::new();
        }
        format!(
            "; {} of the {} members of quorum {epoch} have left in order: {}",
            tally.left,
            tally.members,
            self.listed(|e| e.left)
        )
    }
}
