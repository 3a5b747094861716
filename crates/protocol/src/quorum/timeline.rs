//! What happened to the job, for people who look at it later: quorums, deaths and heals. It decides nothing.
//!
//! Written when an epoch begins or a replica heals or goes, never in a step that goes on as the last one did; bounded in length and in each text.

use std::collections::{HashSet, VecDeque};
use std::time::{Duration, Instant};

use ftcore::{Epoch, Step};

use super::fields::cut;
use crate::assignment::Assignment;
use crate::member::{Member, Quorum};

/// Moments that are remembered; the oldest go first.
const MOST: usize = 64;
/// Ids that a moment lists; the others are counted.
const MOST_LISTED: usize = 8;
/// Heals of one quorum that become moments of their own.
const MOST_HEALS: usize = 16;
/// Of a reason, in bytes.
const MAX_TEXT: usize = 256;

/// Some replicas, by id.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Listed {
    /// The first of them, 8 at most.
    pub first: Vec<String>,
    /// All.
    pub count: usize,
}

impl<'a> FromIterator<&'a str> for Listed {
    fn from_iter<I: IntoIterator<Item = &'a str>>(ids: I) -> Self {
        let mut ids = ids.into_iter();
        let first: Vec<String> = ids.by_ref().take(MOST_LISTED).map(str::to_string).collect();
        let count = first.len() + ids.count();
        Self { first, count }
    }
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Happening {
    /// A quorum began a new epoch.
    Quorum {
        /// The epoch.
        quorum_id: Epoch,
        /// The highest step of a member.
        step: Step,
        /// The number of members.
        size: usize,
        /// Those that the quorum before did not have.
        joined: Listed,
        /// Those of the quorum before that this one does not have.
        without: Listed,
    },
    /// A replica is told to fetch its state.
    Heal {
        /// Which.
        replica_id: String,
        /// The step of the state that it fetches.
        step: Step,
        /// The step of its own.
        behind: Step,
        /// From whom.
        from: Vec<String>,
        /// As a spare, outside the group.
        outside: bool,
    },
    /// A replica is out: its connections broke, it was silent, its servers gave up, or an operator ended it.
    Gone {
        /// Which.
        replica_id: String,
        /// Why.
        reason: String,
    },
    /// A replica left in order.
    Left {
        /// Which.
        replica_id: String,
        /// What it said.
        reason: String,
    },
    /// A replica's call for a quorum was answered with an error.
    Refused {
        /// Which.
        replica_id: String,
        /// The error.
        reason: String,
    },
    /// An epoch ended early because a member reported a failure.
    Aborted {
        /// The epoch.
        quorum_id: Epoch,
        /// Why, naming who reported it.
        reason: String,
    },
}

/// Something that happened, and when.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Moment {
    /// Counts them, from 1, since the lighthouse began to lead.
    pub number: u64,
    /// How long ago.
    pub ago: Duration,
    /// What.
    pub what: Happening,
}

/// How much happened since the lighthouse began to lead.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Replicas that were told to fetch their state.
    pub heals: u64,
    /// Replicas that were out without having left.
    pub deaths: u64,
    /// Replicas that left in order.
    pub leaves: u64,
    /// Epochs that ended early because a member reported a failure.
    pub aborts: u64,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Timeline {
    /// The time is none until the event that caused it has been taken in.
    moments: VecDeque<(u64, Option<Instant>, Happening)>,
    last: u64,
    totals: Totals,
}

fn short(text: &str) -> String {
    let text = cut(text);
    let mut end = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.get(..end).unwrap_or_default().to_string()
}

impl Timeline {
    fn note(&mut self, what: Happening) {
        if self.moments.len() == MOST {
            self.moments.pop_front();
        }
        self.last += 1;
        self.moments.push_back((self.last, None, what));
    }

    /// It is out, and did not say that it leaves.
    pub(super) fn gone(&mut self, id: &str, reason: &str) {
        self.totals.deaths += 1;
        let (replica_id, reason) = (id.to_string(), short(reason));
        self.note(Happening::Gone { replica_id, reason });
    }

    /// It leaves. That it is out since this very event is no death.
    pub(super) fn left(&mut self, id: &str, reason: &str) {
        let out = |what: &Happening| matches!(what, Happening::Gone { replica_id, .. } if replica_id == id);
        if self
            .moments
            .back()
            .is_some_and(|(_, at, what)| at.is_none() && out(what))
        {
            self.moments.pop_back();
            self.totals.deaths = self.totals.deaths.saturating_sub(1);
        }
        self.totals.leaves += 1;
        let (replica_id, reason) = (id.to_string(), short(reason));
        self.note(Happening::Left { replica_id, reason });
    }

    pub(super) fn refused(&mut self, id: &str, reason: &str) {
        let (replica_id, reason) = (id.to_string(), short(reason));
        // One that asks again and again says nothing new.
        let last = self.moments.back().map(|(_, _, what)| what);
        if !matches!(last, Some(Happening::Refused { replica_id: r, .. }) if *r == replica_id) {
            self.note(Happening::Refused { replica_id, reason });
        }
    }

    pub(super) fn aborted(&mut self, quorum_id: Epoch, reason: &str) {
        self.totals.aborts += 1;
        let reason = short(reason);
        self.note(Happening::Aborted { quorum_id, reason });
    }

    /// A quorum forms, after `previous`. One that goes on with the earlier members and epoch adds nothing.
    pub(super) fn formed(&mut self, quorum: &Quorum, previous: Option<&Quorum>) {
        if previous.is_none_or(|p| p.quorum_id != quorum.quorum_id) {
            let before: HashSet<&str> = previous.into_iter().flat_map(Quorum::ids).collect();
            let now: HashSet<&str> = quorum.ids().collect();
            self.note(Happening::Quorum {
                quorum_id: quorum.quorum_id,
                step: quorum
                    .participants
                    .iter()
                    .map(|m| m.step)
                    .max()
                    .unwrap_or_default(),
                size: quorum.participants.len(),
                joined: quorum.ids().filter(|id| !before.contains(id)).collect(),
                without: previous
                    .into_iter()
                    .flat_map(Quorum::ids)
                    .filter(|id| !now.contains(id))
                    .collect(),
            });
        }
        let differs = |m: &Member, first: &Member| m.step != first.step || m.lineage != first.lineage;
        let mut members = quorum.participants.iter();
        let Some(first) = members.next() else { return };
        if !quorum.spares.is_empty() || members.any(|m| differs(m, first)) {
            self.heals(quorum);
        }
    }

    fn heals(&mut self, quorum: &Quorum) {
        // Only the ranks know whether there is an initial sync; what they take in it is no trained state.
        let Ok(assignment) = Assignment::new(quorum, false) else {
            return;
        };
        let step = quorum
            .participants
            .iter()
            .map(|m| m.step)
            .max()
            .unwrap_or_default();
        for (nth, (who, from)) in assignment.heals().enumerate() {
            self.totals.heals += 1;
            if nth < MOST_HEALS {
                self.note(Happening::Heal {
                    replica_id: who.replica_id.clone(),
                    step,
                    behind: who.step,
                    from: from.map(|m| m.replica_id.clone()).collect(),
                    outside: quorum.has_spare(&who.replica_id),
                });
            }
        }
    }

    /// All that was noted since the last call happened now.
    pub(super) fn stamp(&mut self, now: Instant) {
        for (_, at, _) in self
            .moments
            .iter_mut()
            .rev()
            .take_while(|(_, at, _)| at.is_none())
        {
            *at = Some(now);
        }
    }

    /// Oldest first.
    pub(super) fn moments(&self, now: Instant) -> Vec<Moment> {
        let told = |(number, at, what): &(u64, Option<Instant>, Happening)| Moment {
            number: *number,
            ago: at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at)),
            what: what.clone(),
        };
        self.moments.iter().map(told).collect()
    }

    pub(super) fn totals(&self) -> Totals {
        self.totals
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(id: &str, step: Step) -> Member {
        Member {
            replica_id: id.into(),
            step,
            lineage: format!("of {step}"),
            ..Member::default()
        }
    }

    fn quorum(quorum_id: Epoch, participants: Vec<Member>, spares: Vec<Member>) -> Quorum {
        Quorum {
            quorum_id,
            participants,
            spares,
            fetching: 0,
        }
    }

    fn happenings(timeline: &Timeline) -> Vec<Happening> {
        let moments = timeline.moments(Instant::now());
        moments.into_iter().map(|m| m.what).collect()
    }

    #[test]
    fn a_new_epoch_says_who_joined_and_who_is_missing_and_the_same_one_says_nothing() {
        let mut timeline = Timeline::default();
        let first = quorum(
            Epoch(7),
            vec![member("a:1", Step(3)), member("b:1", Step(3))],
            vec![],
        );
        timeline.formed(&first, None);
        timeline.formed(
            &quorum(
                Epoch(7),
                vec![member("a:1", Step(4)), member("b:1", Step(4))],
                vec![],
            ),
            Some(&first),
        );
        let second = quorum(
            Epoch(8),
            vec![member("a:1", Step(5)), member("c:1", Step(5))],
            vec![],
        );
        timeline.formed(&second, Some(&first));
        let told = happenings(&timeline);
        assert_eq!(told.len(), 2, "{told:?}");
        let listed = |ids: &[&str]| ids.iter().copied().collect::<Listed>();
        assert_eq!(
            told.last(),
            Some(&Happening::Quorum {
                quorum_id: Epoch(8),
                step: Step(5),
                size: 2,
                joined: listed(&["c:1"]),
                without: listed(&["b:1"]),
            })
        );
    }

    #[test]
    fn members_that_are_behind_and_spares_heal_from_members_that_are_not() {
        let mut timeline = Timeline::default();
        let members = vec![
            member("a:1", Step(9)),
            member("b:1", Step(8)),
            member("c:1", Step(9)),
        ];
        timeline.formed(&quorum(Epoch(7), members, vec![member("d:1", Step(0))]), None);
        let heals: Vec<_> = happenings(&timeline)
            .into_iter()
            .filter_map(|what| match what {
                Happening::Heal {
                    replica_id,
                    behind,
                    step,
                    from,
                    outside,
                } => Some((replica_id, behind, step, from, outside)),
                _ => None,
            })
            .collect();
        let ids = |ids: [&str; 2]| ids.map(str::to_string).to_vec();
        assert_eq!(
            heals,
            [
                ("b:1".to_string(), Step(8), Step(9), ids(["a:1", "c:1"]), false),
                ("d:1".to_string(), Step(0), Step(9), ids(["c:1", "a:1"]), true)
            ]
        );
        assert_eq!(timeline.totals().heals, 2);
    }

    #[test]
    fn one_that_leaves_is_no_death_and_one_that_died_before_stays_one() {
        let mut timeline = Timeline::default();
        timeline.gone("a:1", "it left: done");
        timeline.left("a:1", "done");
        timeline.stamp(Instant::now());
        timeline.gone("b:1", "its stream broke");
        timeline.stamp(Instant::now());
        timeline.left("b:1", "late");
        let totals = timeline.totals();
        assert_eq!(
            (totals.deaths, totals.leaves),
            (1, 2),
            "{:?}",
            happenings(&timeline)
        );
    }

    #[test]
    fn a_long_run_and_a_large_job_do_not_grow_it() {
        let mut timeline = Timeline::default();
        for id in 0..1000 {
            let members = (0..100)
                .map(|i| member(&format!("r{i:03}:{id}"), Step(i)))
                .collect();
            timeline.formed(&quorum(Epoch(id), members, vec![]), None);
            timeline.gone("a:1", &"é".repeat(4096));
        }
        let moments = timeline.moments(Instant::now());
        assert_eq!(moments.len(), MOST);
        assert_eq!(timeline.totals().heals, 99_000);
        for moment in moments {
            match moment.what {
                Happening::Quorum { joined, .. } => {
                    assert_eq!((joined.first.len(), joined.count), (MOST_LISTED, 100));
                }
                Happening::Gone { reason, .. } => assert_eq!(reason.len(), MAX_TEXT),
                _ => {}
            }
        }
    }
}
