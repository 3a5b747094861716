//! May a quorum form now? The rules, over the roster's counters; and the answer as a text, made only when somebody asks.

use std::time::Instant;

use super::{Entry, LighthouseState};
use crate::member::listed;

/// What the rules say. Those from [`Verdict::Wait`] on are of a quorum that could form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Nobody asks.
    Idle,
    /// Fewer than `min_replicas` ask.
    TooFew,
    /// The healthy that do not ask are as many.
    NoMajority,
    /// The first quorum waits for `initial_replicas`.
    Initial,
    /// Only newcomers ask, and members of the last quorum are at work: it could go on beside the new one (L26).
    Newcomers,
    /// It could form, and waits for healthy replicas that have not asked.
    Wait,
    /// It forms.
    Form,
}

impl LighthouseState {
    fn shrinks(&self) -> bool {
        self.roster.tally().shrinking > 0 && self.previous.is_some()
    }

    /// How many would be in a quorum that forms now.
    fn candidates(&self) -> usize {
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

    /// What the rules say. O(1).
    pub(super) fn judge(&self, now: Instant) -> Verdict {
        let (rules, tally, n) = (&self.rules, self.roster.tally(), self.candidates());
        let goes_on = self.previous.is_some() || tally.reporting > 0;
        let overlaps = tally.members_asking > 0;
        if tally.asking == 0 {
            Verdict::Idle
        } else if n < rules.min_replicas.max(1) {
            Verdict::TooFew
        } else if n * 2 <= tally.healthy {
            // Under shrink_only the newcomers that ask are no candidates, but they are healthy.
            Verdict::NoMajority
        } else if !goes_on && rules.initial_replicas.is_some_and(|initial| n < initial) {
            Verdict::Initial
        } else if !overlaps && tally.busy > 0 {
            Verdict::Newcomers
        } else if tally.healthy == tally.asking || (overlaps && tally.busy == 0) {
            Verdict::Form
        } else {
            let waited = self.able_since.map(|since| now.saturating_duration_since(since));
            match waited.filter(|waited| *waited >= rules.join_timeout) {
                Some(_) => Verdict::Form,
                None => Verdict::Wait,
            }
        }
    }

    fn listed(&self, which: impl Fn(&Entry) -> bool) -> String {
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
        match self.judge(now) {
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
                self.quorum_id,
                self.listed(Entry::is_busy)
            ),
            Verdict::Wait => format!(
                "{n} of {healthy} healthy replicas ask; waiting up to {:?} for {missing}",
                rules.join_timeout
            ),
        }
    }
}
