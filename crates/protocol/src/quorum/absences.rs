//! A lighthouse that did not run for a while: whom it may not blame for that, and whom it still finds gone. And a replica that did
//! not: what becomes of it if the run ended meanwhile.

use std::time::Duration;

use super::tests::{CLOCK_MS, SEED, Sim, member, rules};
use super::*;
use crate::member::Member;

/// Three attached members, and a minute in which the lighthouse was stopped.
fn after_a_minute_away() -> Sim {
    let mut sim = Sim::quorum_of(rules(1), &["a", "b", "c"]);
    let time = Duration::from_secs(60);
    sim.now += time;
    sim.event(Event::Away { time });
    sim
}

fn gone(sim: &Sim) -> Vec<String> {
    sim.pushes().into_iter().flat_map(|(_, e)| e.departed).collect()
}

#[test]
fn nobody_is_blamed_for_what_the_lighthouse_did_not_hear() {
    let mut sim = after_a_minute_away();
    assert_eq!(gone(&sim), [""; 0]);
    // Their calls and streams timed out meanwhile; heartbeats come at once, streams are opened again.
    for (stream, id) in (1..).zip(["a", "b", "c"]) {
        sim.detach(id, stream);
        assert_eq!(gone(&sim), [""; 0], "{id}");
    }
    sim.beat(&["a", "b", "c"]);
    for (stream, id) in (11..).zip(["a", "b", "c"]) {
        sim.attach(id, stream);
    }
    // One that asks first does not go on alone, and the epoch is still good.
    sim.join("b");
    assert_eq!(sim.ids(), None);
    sim.join("a");
    sim.join("c");
    let quorum = sim.delivered().unwrap();
    assert_eq!(quorum.ids().collect::<Vec<_>>(), ["a", "b", "c"]);
    assert_eq!(quorum.quorum_id, SEED + 1);
}

#[test]
fn who_died_meanwhile_is_missed_by_its_heartbeats() {
    let mut sim = after_a_minute_away();
    sim.detach("c", 3);
    assert_eq!(gone(&sim), [""; 0]);
    sim.join("a");
    sim.join("b");
    assert_eq!(sim.ids(), None, "c may still be there");
    sim.pass(Duration::from_millis(4500), &["a", "b"]);
    assert_eq!((gone(&sim), sim.ids()), (Vec::new(), None));
    sim.pass(Duration::from_millis(1000), &["a", "b"]);
    assert_eq!(gone(&sim), ["c"]);
    let quorum = sim.delivered().unwrap();
    assert_eq!(quorum.ids().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(quorum.quorum_id, SEED + 2);
}

#[test]
fn a_stream_of_afterwards_is_evidence_at_once_and_an_old_one_again_later() {
    let mut sim = after_a_minute_away();
    sim.detach("a", 1);
    sim.attach("a", 11);
    sim.detach("a", 11);
    assert_eq!(gone(&sim), ["a"]);
    sim.pass(Duration::from_secs(6), &["b", "c"]);
    sim.detach("b", 2);
    assert_eq!(gone(&sim), ["b"]);
}

#[test]
fn the_time_away_is_no_time_that_a_quorum_waited_for_late_replicas() {
    let mut sim = Sim::quorum_of(rules(1), &["a", "b", "c"]);
    sim.join("a");
    sim.join("b");
    let time = Duration::from_secs(60);
    sim.now += time;
    sim.event(Event::Away { time });
    assert_eq!(sim.ids(), None, "c had no chance to ask");
    sim.pass(Duration::from_secs(11), &["a", "b", "c"]);
    assert_eq!(sim.ids().unwrap(), ["a", "b"]);
}

/// a and b went on without c, in quorum SEED + 2.
fn without_c() -> Sim {
    let mut sim = Sim::unattached(rules(1), &["a", "b", "c"]);
    sim.pass(Duration::from_secs(6), &["a", "b"]);
    sim.join("a");
    sim.join("b");
    assert_eq!(sim.delivered().unwrap().quorum_id, SEED + 2);
    sim
}

fn leave(sim: &mut Sim, id: &str) {
    sim.event(Event::Leave {
        replica_id: id.into(),
        reason: "done".into(),
    });
}

/// c asks, with the quorum that it was in last.
fn come_back(sim: &mut Sim) -> Ticket {
    sim.join_as(Member {
        last_quorum_id: SEED + 1,
        ..member("c")
    })
}

#[test]
fn a_replica_that_comes_back_after_the_end_of_the_run_does_not_go_on_alone() {
    let mut sim = without_c();
    leave(&mut sim, "a");
    leave(&mut sim, "b");
    let ticket = come_back(&mut sim);
    assert_eq!(sim.ids(), None);
    assert_eq!(sim.rejected(), [(ticket, ErrorKind::Conflict)]);
    // A new run at the same lighthouse is none of its business.
    sim.join("a:2");
    assert_eq!(sim.ids().unwrap(), ["a:2"]);
}

#[test]
fn one_that_has_left_is_not_back_because_it_opens_its_stream_again() {
    let mut sim = Sim::quorum_of(rules(1), &["a", "b", "c"]);
    leave(&mut sim, "c");
    sim.attach("c", 9);
    sim.join("a");
    sim.join("b");
    assert_eq!(sim.ids().unwrap(), ["a", "b"], "no member waits for it");
    sim.join("c");
    assert!(sim.state.is_known("c"), "its next question says that it is back");
}

#[test]
fn a_replica_that_waits_to_be_taken_in_learns_that_the_run_has_ended() {
    let mut sim = without_c();
    let ticket = come_back(&mut sim);
    leave(&mut sim, "a");
    assert_eq!(
        (sim.ids(), sim.rejected()),
        (None, Vec::new()),
        "b may still take it in"
    );
    leave(&mut sim, "b");
    assert_eq!(sim.ids(), None);
    assert_eq!(sim.rejected(), [(ticket, ErrorKind::Conflict)]);
}

#[test]
fn a_replica_whose_successors_died_goes_on_with_what_it_has() {
    let mut sim = without_c();
    sim.pass(Duration::from_secs(6), &["b"]);
    leave(&mut sim, "b");
    come_back(&mut sim);
    assert_eq!(sim.ids().unwrap(), ["c"]);
}

/// a and b without c in their last quorum, that of the run's last step if `closes`. a has left; b is gone, and its leave is lost.
fn with_a_lost_leave(closes: bool) -> Sim {
    let mut sim = Sim::unattached(rules(1), &["a", "b", "c"]);
    sim.pass(Duration::from_secs(6), &["a", "b"]);
    for id in ["a", "b"] {
        sim.join_as(Member {
            is_last: closes,
            ..member(id)
        });
    }
    assert_eq!(sim.delivered().unwrap().quorum_id, SEED + 2);
    for (stream, id) in (1..).zip(["a", "b"]) {
        sim.attach(id, stream);
    }
    leave(&mut sim, "a");
    sim
}

#[test]
fn a_lost_leave_hides_the_end_of_the_run_from_no_replica() {
    // One that asks afterwards, and one that waits already.
    for waits in [false, true] {
        let mut sim = with_a_lost_leave(true);
        let early = waits.then(|| come_back(&mut sim));
        assert_eq!(sim.rejected(), [], "b may still take it in");
        sim.detach("b", 2);
        let ticket = early.unwrap_or_else(|| come_back(&mut sim));
        assert_eq!(sim.rejected().last(), Some(&(ticket, ErrorKind::Conflict)));
        assert_eq!(sim.ids(), None);
        assert!(format!("{:?}", sim.actions).contains("the run is over"));
    }
    // b may have died in any other step, and come back.
    let mut sim = with_a_lost_leave(false);
    sim.detach("b", 2);
    come_back(&mut sim);
    assert_eq!((sim.rejected(), sim.ids().unwrap()), (vec![], vec!["c".into()]));
}

#[test]
fn one_that_lost_the_last_step_does_it_again_although_others_have_left() {
    let mut sim = with_a_lost_leave(true);
    sim.detach("b", 2);
    sim.join_as(Member {
        is_last: true,
        last_quorum_id: SEED + 2,
        commit_failures: 1,
        ..member("b")
    });
    assert_eq!(sim.ids().unwrap(), ["b"]);
}

#[test]
fn those_that_lost_the_last_step_and_are_too_few_to_do_it_again_are_told_so() {
    for (min_replicas, others_left) in [(2, true), (1, true), (2, false)] {
        let mut sim = with_a_lost_leave(true);
        sim.state.rules.min_replicas = min_replicas;
        let again = |sim: &mut Sim| {
            sim.join_as(Member {
                is_last: true,
                last_quorum_id: SEED + 2,
                commit_failures: 1,
                ..member("b")
            })
        };
        if !others_left {
            // a has lost it as well, and its process has died.
            let (a, last_quorum_id) = (member("a"), SEED + 2);
            sim.join_as(Member { last_quorum_id, ..a });
            sim.attach("a", 3);
            sim.detach("a", 3);
        }
        let ticket = again(&mut sim);
        assert_eq!(sim.ids().is_some(), min_replicas == 1);
        sim.pass(Duration::from_secs(9), &["b"]);
        assert_eq!(sim.rejected(), [], "another member may start again");
        sim.pass(Duration::from_secs(2), &["b"]);
        let told = min_replicas == 2 && others_left;
        let expected = told.then_some((ticket, ErrorKind::Conflict));
        assert_eq!(
            sim.rejected(),
            Vec::from_iter(expected),
            "{min_replicas} {others_left}"
        );
    }
}

#[test]
fn a_restarted_lighthouse_knows_that_the_run_is_over_once_the_silent_may_be_gone() {
    let before = with_a_lost_leave(true);
    let mut sim = Sim::started(rules(1), CLOCK_MS, before.state.record(), before.now);
    come_back(&mut sim);
    sim.pass(Duration::from_secs(4), &["c"]);
    assert_eq!(sim.rejected(), [], "b has not left");
    let ticket = come_back(&mut sim);
    sim.pass(Duration::from_secs(2), &["c"]);
    assert_eq!(sim.rejected(), [(ticket, ErrorKind::Conflict)]);
}

#[test]
fn the_quorum_of_the_last_step_is_saved_although_its_epoch_is_not_new() {
    let mut sim = Sim::quorum_of(rules(1), &["a", "b"]);
    for id in ["a", "b"] {
        sim.join_as(Member {
            step: Step(1),
            is_last: true,
            ..member(id)
        });
    }
    assert_eq!(sim.delivered().unwrap().quorum_id, SEED + 1);
    let saved = |a: &Action| matches!(a, Action::Save(record) if record.closes);
    assert!(sim.actions.iter().any(saved), "{:?}", sim.actions);
}

/// Two members without streams whose connections can be read, of which only a's heartbeats were taken in for a time-out.
fn silent_and_connected() -> Sim {
    let mut sim = Sim::unattached(rules(1), &["a", "b"]);
    sim.state.set_connected("b", true);
    sim.pass(Duration::from_secs(6), &["a"]);
    sim
}

fn unread(sim: &mut Sim) -> Vec<String> {
    sim.state.take_unread().iter().map(|id| id.to_string()).collect()
}

fn read(sim: &mut Sim, id: &str) {
    sim.event(Event::Read {
        replica_id: id.into(),
    });
}

#[test]
fn the_silence_of_a_connected_replica_is_judged_once_its_connections_are_read() {
    let mut sim = silent_and_connected();
    assert_eq!((gone(&sim), sim.healthy().len()), (Vec::new(), 2));
    assert_eq!(unread(&mut sim), ["b"], "once, however often time is looked at");
    // A heartbeat had waited in its socket.
    sim.beat(&["b"]);
    read(&mut sim, "b");
    sim.pass(Duration::from_secs(4), &["a"]);
    assert_eq!((gone(&sim), sim.healthy().len()), (Vec::new(), 2));
    assert_eq!(unread(&mut sim), [""; 0]);
    // The next time there is none.
    sim.pass(Duration::from_secs(2), &["a"]);
    assert_eq!(unread(&mut sim), ["b"]);
    read(&mut sim, "b");
    assert_eq!(gone(&sim), ["b"]);
    assert_eq!(sim.healthy(), ["a"]);
}

#[test]
fn a_silent_replica_whose_connections_have_ended_is_judged_at_once() {
    let mut sim = silent_and_connected();
    assert_eq!(unread(&mut sim), ["b"]);
    sim.state.set_connected("b", false);
    read(&mut sim, "b");
    assert_eq!(gone(&sim), ["b"]);
    // One that never called over a connection that can be read is as before, and so is one whose connections ended before its time-out.
    for was_connected in [false, true] {
        let mut sim = Sim::unattached(rules(1), &["a", "b"]);
        sim.state.set_connected("b", was_connected);
        sim.state.set_connected("b", false);
        sim.pass(Duration::from_secs(6), &["a"]);
        assert_eq!((gone(&sim), unread(&mut sim)), (vec!["b".to_string()], vec![]));
    }
}
