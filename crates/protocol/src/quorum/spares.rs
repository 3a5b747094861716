//! Spares: replicas far behind, which fetch the state outside the group while the members go on.
//!
//! A spare is listed beside the members and counts for nothing: not for `min_replicas`, not for a majority, not for the epoch. Its
//! call is answered with the next quorum, whose members publish for it; it fetches, and asks again. Within one step of the
//! last quorum it is a candidate as any other, and takes the last change as a member that heals. It is one at once
//! where the others could not go on without it, at the first quorum, in the last step of a run, with members that do not know spares,
//! and when it says that it was a spare long enough.

use std::time::Instant;

use ftcore::Step;

use super::LighthouseState;
use crate::member::{Id, Joining, Member, Quorum};

/// True if a replica that asks like this stays outside, as far as it alone is concerned. `frontier` is the step of the last quorum.
pub(super) fn is_far_behind(member: &Member, frontier: Option<Step>) -> bool {
    member.joining == Joining::Outside && frontier.is_some_and(|step| member.step < step)
}

impl LighthouseState {
    /// True if those who are not far behind can go on, and know what a spare is.
    fn can_do_without_spares(&self) -> bool {
        let tally = self.roster.tally();
        let members = (tally.busy + tally.members_asking).saturating_sub(tally.members_taken_in);
        let others = (tally.asking + tally.members_taken_in)
            .saturating_sub(tally.members_asking)
            .saturating_sub(tally.taken_in);
        let enough = members + others >= self.rules.min_replicas.max(1);
        let known = |q: &Quorum| q.participants.iter().all(|m| m.joining != Joining::Untold);
        members > 0 && enough && tally.ending == 0 && self.previous.as_ref().is_some_and(|q| known(q))
    }

    /// True if members wait for others of the last quorum since the join time-out, and are too few for a quorum until those come.
    fn waits_in_vain(&mut self, now: Instant) -> bool {
        let tally = self.roster.tally();
        let members = tally.members_asking.saturating_sub(tally.members_taken_in);
        let asking = tally.asking.saturating_sub(tally.taken_in);
        let healthy = tally.healthy.saturating_sub(tally.taken_in);
        let enough = asking >= self.rules.min_replicas && asking * 2 > healthy;
        // The word of a spare counts where a job would go back: it has a recorded name.
        let current = tally.current.saturating_sub(tally.current_taken_in);
        let named = tally.named.saturating_sub(tally.named_taken_in);
        let goes_back = self.binds() && current == 0 && named * 2 <= tally.members;
        if members == 0 || (enough && !goes_back) {
            self.spares_asked_for = None;
            return false;
        }
        if goes_back && tally.busy == 0 {
            return true;
        }
        let since = *self.spares_asked_for.get_or_insert(now);
        now.saturating_duration_since(since) >= self.rules.join_timeout
    }

    /// Replicas far behind that wait are spares, or candidates where the others cannot go on without them.
    pub(super) fn sort_spares(&mut self, now: Instant) {
        let tally = self.roster.tally();
        if tally.spares_asking == 0 && tally.taken_in == 0 {
            self.spares_asked_for = None;
            return;
        }
        let spare = self.can_do_without_spares() && !self.waits_in_vain(now);
        let tally = self.roster.tally();
        let others = if spare {
            tally.taken_in
        } else {
            tally.spares_asking
        };
        if others == 0 {
            return;
        }
        let waits = self.roster.iter().filter(|(_, e)| e.far && e.waiting.is_some());
        for id in waits.map(|(id, _)| id.clone()).collect::<Vec<Id>>() {
            self.roster.update(&id, |entry| entry.spare = spare);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Sim, member, rules};
    use super::super::{Action, Event};
    use super::*;
    use ftcore::ErrorKind;

    fn at(id: &str, step: i64) -> Member {
        Member {
            step: Step(step),
            joining: Joining::Outside,
            ..member(id)
        }
    }

    fn spares(sim: &Sim) -> Vec<String> {
        let quorum = sim.delivered().unwrap();
        quorum.spares.iter().map(|m| m.replica_id.clone()).collect()
    }

    /// a and b at step 5, in a quorum of their own.
    fn running(min_replicas: usize) -> Sim {
        let mut sim = Sim::new(rules(min_replicas));
        sim.join_as(at("a", 5));
        sim.join_as(at("b", 5));
        if min_replicas < 2 {
            sim.join_as(at("a", 5));
        }
        assert_eq!(sim.ids().unwrap(), ["a", "b"]);
        sim.attach("a", 1);
        sim.attach("b", 2);
        sim
    }

    #[test]
    fn a_replica_far_behind_is_listed_beside_the_members_and_costs_them_no_epoch() {
        let mut sim = running(1);
        let epoch = sim.state.quorum_id();
        let ticket = sim.join_as(at("c", 0));
        assert_eq!(sim.ids(), None);
        let shown = |sim: &Sim| sim.state.status(sim.now).spares;
        assert_eq!(shown(&sim), [("c".to_string(), false)]);
        sim.join_as(at("a", 6));
        sim.join_as(at("b", 6));
        let quorum = sim.delivered().unwrap();
        assert_eq!(
            (sim.ids().unwrap(), spares(&sim)),
            (vec!["a".into(), "b".into()], vec!["c".to_string()])
        );
        assert_eq!((quorum.quorum_id, quorum.fetching), (epoch, 0));
        let answered = sim
            .actions
            .iter()
            .any(|a| matches!(a, Action::Deliver { tickets, .. } if tickets.contains(&ticket)));
        assert!(answered, "it learns where to fetch from");
        assert_eq!(shown(&sim), [("c".to_string(), true)]);
        // While it fetches it counts for no majority, and what it fetches is kept.
        sim.join_as(at("a", 7));
        sim.join_as(at("b", 7));
        assert_eq!(
            (sim.ids().unwrap().len(), sim.delivered().unwrap().fetching),
            (2, 1)
        );
        // Still far behind: the changed chunks of a newer state.
        sim.join_as(at("c", 6));
        sim.join_as(at("a", 8));
        sim.join_as(at("b", 8));
        assert_eq!(spares(&sim), ["c"]);
        // Within one step: a member of the next quorum.
        sim.join_as(at("c", 8));
        sim.join_as(at("a", 9));
        sim.join_as(at("b", 9));
        let quorum = sim.delivered().unwrap();
        assert_eq!(sim.ids().unwrap(), ["a", "b", "c"]);
        assert!(quorum.quorum_id > epoch && quorum.spares.is_empty());
        assert_eq!(shown(&sim), []);
    }

    #[test]
    fn a_replica_far_behind_is_a_member_at_once_where_no_spares_are_known_and_when_it_was_one_long_enough() {
        for (members, joiner) in [
            (Joining::Untold, Joining::Outside),
            (Joining::Outside, Joining::Now),
            (Joining::Outside, Joining::Untold),
        ] {
            let mut sim = running(1);
            let as_told = |id: &str, step| Member {
                joining: members,
                ..at(id, step)
            };
            for step in [6, 7] {
                sim.join_as(as_told("a", step));
                sim.join_as(as_told("b", step));
            }
            sim.join_as(Member {
                joining: joiner,
                ..at("c", 0)
            });
            sim.join_as(as_told("a", 8));
            sim.join_as(as_told("b", 8));
            assert_eq!(sim.ids().unwrap(), ["a", "b", "c"], "{members:?} {joiner:?}");
        }
    }

    #[test]
    fn a_spare_is_taken_in_when_the_others_are_too_few_without_it_and_left_out_again_when_they_are_not() {
        let mut sim = running(2);
        sim.join_as(at("c", 0));
        sim.join_as(at("a", 6));
        sim.detach("b", 2);
        assert_eq!(sim.ids().unwrap(), ["a", "c"]);
        // One whose death was none.
        let mut sim = running(2);
        sim.join_as(at("c", 0));
        sim.detach("b", 2);
        sim.join_as(at("b", 6));
        sim.join_as(at("a", 6));
        assert_eq!(
            (sim.ids().unwrap(), spares(&sim)),
            (vec!["a".into(), "b".into()], vec!["c".to_string()])
        );
    }

    #[test]
    fn members_that_wait_in_vain_for_another_one_take_a_spare_in_after_the_join_time_out() {
        let mut sim = running(2);
        sim.join_as(at("c", 0));
        sim.join_as(at("a", 6));
        sim.pass(std::time::Duration::from_secs(9), &["a", "b", "c"]);
        assert_eq!(sim.ids(), None, "b may come yet");
        sim.pass(std::time::Duration::from_secs(2), &["a", "b", "c"]);
        assert_eq!(
            sim.ids(),
            None,
            "it may be as long as the join time-out for b itself, from now"
        );
        sim.pass(std::time::Duration::from_secs(10), &["a", "b", "c"]);
        assert_eq!(sim.ids().unwrap(), ["a", "c"]);
    }

    #[test]
    fn in_the_last_step_of_a_run_spares_are_members_and_those_that_fetch_are_waited_for() {
        let last = |id: &str| Member {
            is_last: true,
            ..at(id, 7)
        };
        let mut sim = running(1);
        sim.join_as(at("c", 0));
        sim.join_as(at("a", 6));
        sim.join_as(at("b", 6));
        assert_eq!(spares(&sim), ["c"]);
        sim.join_as(last("a"));
        sim.join_as(last("b"));
        assert_eq!(sim.ids(), None, "c fetches");
        sim.join_as(at("c", 6));
        assert_eq!(sim.ids().unwrap(), ["a", "b", "c"]);
    }

    #[test]
    fn a_spare_that_the_run_did_not_wait_for_does_not_go_on_alone() {
        let mut sim = running(1);
        sim.join_as(at("c", 0));
        sim.join_as(at("a", 6));
        sim.join_as(at("b", 6));
        for id in ["a", "b"] {
            sim.event(Event::Leave {
                replica_id: id.into(),
                reason: "done".into(),
            });
        }
        let ticket = sim.join_as(at("c", 6));
        assert_eq!(sim.rejected(), [(ticket, ErrorKind::Conflict)]);
    }

    #[test]
    fn a_spare_that_was_cut_off_while_the_run_ended_does_not_wait_for_members_that_never_come() {
        let mut sim = running(2);
        sim.attach("c", 3);
        sim.join_as(at("c", 0));
        sim.join_as(at("a", 6));
        sim.join_as(at("b", 6));
        sim.event(Event::Detached {
            replica_id: "c".into(),
            stream: 3,
        });
        for id in ["a", "b"] {
            sim.event(Event::Leave {
                replica_id: id.into(),
                reason: "done".into(),
            });
        }
        let ticket = sim.join_as(Member {
            healed: true,
            ..at("c", 6)
        });
        assert_eq!(sim.rejected(), [(ticket, ErrorKind::Conflict)]);
    }
}
