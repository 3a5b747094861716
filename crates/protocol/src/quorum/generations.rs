//! The record: which states a job goes on from, over deaths of replicas and restarts of the lighthouse.

use std::time::Duration;

use ftcore::Epoch;

use super::tests::{CLOCK_MS, SEED, Sim, member, rules};
use super::*;
use crate::Lineage;
use crate::member::Member;

/// A member with a state.
fn at(id: &str, step: i64, lineage: &Lineage) -> Member {
    Member {
        step: Step(step),
        lineage: lineage.as_str().into(),
        ..member(id)
    }
}

/// The lineage after the commits of `epoch` at these steps.
fn chain(from: &Lineage, epoch: Epoch, steps: std::ops::Range<i64>) -> Lineage {
    steps.fold(from.clone(), |l, s| l.after(epoch, Step(s)))
}

fn saved(sim: &Sim) -> Option<Record> {
    sim.actions.iter().rev().find_map(|a| match a {
        Action::Save(record) => Some(record.clone()),
        _ => None,
    })
}

/// a and b (and others) at step 10 of an epoch that began with step 10; the lineage that they have.
fn at_step_10(ids: &[&str]) -> (Sim, Lineage) {
    let lineage = chain(&Lineage::default(), Epoch(7), 0..10);
    let mut sim = Sim::new(QuorumRules {
        initial_replicas: Some(ids.len()),
        ..rules(1)
    });
    for (stream, id) in (1..).zip(ids) {
        sim.attach(id, stream);
        sim.join_as(at(id, 10, &lineage));
    }
    assert_eq!(sim.ids().unwrap(), ids);
    (sim, lineage)
}

fn restart(sim: &Sim) -> Sim {
    Sim::started(rules(1), CLOCK_MS, sim.state.record(), sim.now)
}

fn text(sim: &Sim) -> String {
    format!("{:?}", sim.actions)
}

/// b did not get the answer with which the others went on: they would wait for it in the step until that took too long.
#[test]
fn a_member_that_asks_again_ends_the_epoch_in_which_others_may_wait_for_it() {
    let again = |sim: &mut Sim, id: &str| {
        let replica_id = id.to_string();
        sim.event(Event::Unanswered { replica_id });
    };
    let (mut sim, lineage) = at_step_10(&["a:1", "b:1"]);
    let epoch = SEED + 1;
    // Of the lighthouse that answered; and of its successor, which knows them from the record.
    let mut successor = restart(&sim);
    successor.attach("a:1", 8);
    for sim in [&mut sim, &mut successor] {
        again(sim, "c:1");
        assert_eq!(sim.pushes(), [], "a stranger has no say");
        again(sim, "b:1");
        let [(to, event)] = &sim.pushes()[..] else {
            panic!("{}", text(sim))
        };
        assert!(to.iter().any(|id| id == "a:1"), "{to:?}");
        assert_eq!((event.quorum_id, event.departed.len()), (epoch, 0));
        assert!(event.reason.contains("b:1 asks again"), "{event:?}");
        again(sim, "b:1");
        assert_eq!(sim.pushes(), [], "it is over already");
        // Who attaches later is told, too.
        sim.attach("a:1", 9);
        assert_eq!(sim.pushes().len(), 1);
        sim.join_as(at("b:1", 10, &lineage));
        assert_eq!(sim.delivered(), None);
        sim.join_as(at("a:1", 10, &lineage));
        assert!(sim.delivered().unwrap().quorum_id > epoch, "{}", text(sim));
    }
}

#[test]
fn the_record_is_saved_before_a_new_epoch_is_delivered_and_not_for_every_step() {
    let (mut sim, lineage) = at_step_10(&["a:1", "b:1"]);
    let expected = Record {
        quorum_id: SEED + 1,
        step: Step(10),
        lineage: Some(lineage.as_str().into()),
        members: vec!["a:1".into(), "b:1".into()],
        ..Record::default()
    };
    assert_eq!(saved(&sim), Some(expected));
    assert!(
        matches!(sim.actions[..], [Action::Save(_), Action::Deliver { .. }]),
        "{}",
        text(&sim)
    );
    for step in 11..14 {
        let lineage = chain(&lineage, SEED + 1, 10..step);
        sim.join_as(at("a:1", step, &lineage));
        sim.join_as(at("b:1", step, &lineage));
        assert_eq!(sim.delivered().unwrap().quorum_id, SEED + 1);
        assert_eq!(saved(&sim), None, "the members did not change");
    }
    // Departures are saved together at the next tick, and with them the newest state.
    sim.detach("b:1", 2);
    assert_eq!(saved(&sim), None);
    sim.event(Event::Tick);
    let record = saved(&sim).unwrap();
    assert_eq!((record.step.0, record.departed), (13, vec!["b:1".to_string()]));
    sim.event(Event::Tick);
    assert_eq!(saved(&sim), None);
}

/// b lost its connections, not its life: it finished the step in the epoch that a had left, and no other replica has that commit.
#[test]
fn who_committed_in_an_epoch_that_the_others_had_left_heals() {
    let (mut sim, lineage) = at_step_10(&["a:1", "b:1"]);
    let epoch = SEED + 1;
    sim.detach("b:1", 2);
    sim.join_as(at("a:1", 10, &lineage));
    assert_eq!(sim.ids().unwrap(), ["a:1"]);
    let own = chain(&lineage, epoch, 10..11);
    let back = |last_quorum_id, step, lineage: &Lineage| Member {
        last_quorum_id,
        batches_committed: 11,
        ..at("b:1", step, lineage)
    };
    for (what, stranger) in [
        ("another epoch", back(epoch - 1, 11, &own)),
        (
            "another history",
            back(epoch, 11, &chain(&lineage, epoch + 5, 10..11)),
        ),
        ("two commits", back(epoch, 12, &chain(&lineage, epoch, 10..12))),
    ] {
        let ticket = sim.join_as(stranger);
        assert_eq!(sim.rejected(), [(ticket, ErrorKind::Conflict)], "{what}");
    }
    // A restarted lighthouse knows the last epoch only.
    let mut successor = restart(&sim);
    let ticket = successor.join_as(back(epoch, 11, &own));
    assert_eq!(successor.rejected(), [(ticket, ErrorKind::Conflict)]);
    sim.join_as(back(epoch, 11, &own));
    assert_eq!(sim.rejected(), [], "{}", text(&sim));
    sim.join_as(at("a:1", 11, &chain(&lineage, epoch + 1, 10..11)));
    let quorum = sim.delivered().unwrap();
    let b = quorum
        .participants
        .iter()
        .find(|m| m.replica_id == "b:1")
        .unwrap();
    // Nothing that counts, so that it heals.
    assert_eq!((b.step.0, b.lineage.as_str(), b.batches_committed), (0, "", 0));
    // c is such a one, too, and waits while a keeps newcomers out and goes on in another epoch.
    let gone = |id: &str| Event::Disconnected {
        replica_id: id.into(),
    };
    sim.event(gone("b:1"));
    let theirs = chain(&lineage, epoch + 1, 10..11);
    sim.join_as(Member {
        last_quorum_id: epoch + 2,
        ..at("c:1", 12, &chain(&theirs, epoch + 2, 11..12))
    });
    sim.join_as(Member {
        shrink_only: true,
        ..at("a:1", 11, &theirs)
    });
    assert_eq!(sim.ids().unwrap(), ["a:1"]);
    assert_eq!(sim.rejected(), []);
    sim.join_as(at("a:1", 11, &theirs));
    let steps: Vec<i64> = sim
        .delivered()
        .unwrap()
        .participants
        .iter()
        .map(|m| m.step.0)
        .collect();
    assert_eq!(steps, [11, 0]);
    sim.event(gone("c:1"));
    sim.join_as(at("a:1", 11, &theirs));
    assert_eq!(sim.ids().unwrap(), ["a:1"]);
    // Of a run that is over no state belongs to the next.
    sim.event(Event::Leave {
        replica_id: "a:1".into(),
        reason: String::new(),
    });
    sim.join("d:1");
    assert_eq!(sim.ids().unwrap(), ["d:1"]);
    let ticket = sim.join_as(back(epoch, 11, &own));
    assert_eq!(sim.rejected(), [(ticket, ErrorKind::Conflict)]);
}

/// The record is saved once for each epoch: a lighthouse that starts again does not know how far that has come.
#[test]
fn who_committed_once_more_than_the_others_heals_also_after_a_restart() {
    let (before, lineage) = at_step_10(&["a:1", "b:1", "c:1"]);
    let epoch = SEED + 1;
    let mut sim = restart(&before);
    // b finishes step 500, in which a and c see the reduction fail.
    sim.pass(Duration::from_secs(6), &["a:1", "c:1"]);
    let theirs = chain(&lineage, epoch, 10..500);
    let step_again = |sim: &mut Sim| {
        sim.join_as(at("a:1", 500, &theirs));
        sim.join_as(at("c:1", 500, &theirs));
        sim.delivered().unwrap()
    };
    assert_eq!(step_again(&mut sim).ids().collect::<Vec<_>>(), ["a:1", "c:1"]);
    let mut last_quorum_id = epoch;
    // The second time it could not heal in the first one.
    for commit_failures in 0..2 {
        sim.join_as(Member {
            last_quorum_id,
            commit_failures,
            ..at("b:1", 501, &chain(&lineage, epoch, 10..501))
        });
        assert_eq!(sim.rejected(), [], "{}", text(&sim));
        let quorum = step_again(&mut sim);
        let steps: Vec<i64> = quorum.participants.iter().map(|m| m.step.0).collect();
        assert_eq!(steps, [500, 0, 500]);
        assert!(crate::assignment::assign("b:1", 0, &quorum, false).unwrap().heal);
        last_quorum_id = quorum.quorum_id;
    }
}

/// All begin with the same state, without a history, and there is a step below the first one to be at all the same.
#[test]
fn who_committed_the_first_step_that_the_others_do_again_heals() {
    let mut sim = Sim::quorum_of(rules(1), &["a:1", "b:1"]);
    sim.detach("b:1", 2);
    sim.join("a:1");
    assert_eq!(sim.ids().unwrap(), ["a:1"]);
    sim.join_as(Member {
        last_quorum_id: SEED + 1,
        ..at("b:1", 1, &Lineage::default().after(SEED + 1, Step(0)))
    });
    assert_eq!(sim.rejected(), [], "{}", text(&sim));
    sim.join("a:1");
    let quorum = sim.delivered().unwrap();
    assert_eq!(quorum.ids().collect::<Vec<_>>(), ["a:1", "b:1"]);
    assert!(crate::assignment::assign("b:1", 0, &quorum, false).unwrap().heal);
    assert!(!crate::assignment::assign("a:1", 0, &quorum, false).unwrap().heal);
}

#[test]
fn a_restarted_lighthouse_hears_of_failures_in_the_epoch_that_members_are_in() {
    let (before, _) = at_step_10(&["a:1", "b:1"]);
    // Its own ids begin with its clock.
    let mut sim = Sim::started(rules(1), CLOCK_MS + 60_000, before.state.record(), before.now);
    for id in ["x", "y", "z"] {
        sim.join(id);
    }
    let newcomers = sim.reason();
    assert!(
        newcomers.contains("a member of quorum 1001: a:1, b:1"),
        "{newcomers}"
    );
    sim.attach("b:1", 2);
    let report = |quorum_id| Event::Report {
        replica_id: "a:1".into(),
        quorum_id,
        reason: "boom".into(),
    };
    let own = sim.state.quorum_id();
    sim.event(report(own));
    assert_eq!(sim.pushes(), [], "no replica is in that one");
    sim.event(report(SEED + 1));
    let [(to, event)] = &sim.pushes()[..] else {
        panic!("{}", text(&sim))
    };
    assert_eq!((&to[..], event.quorum_id), (&["b:1".to_string()][..], SEED + 1));
}

#[test]
fn a_state_that_descends_from_the_record_goes_on_and_another_one_does_not_win_by_its_step() {
    let (mut sim, lineage) = at_step_10(&["a:1", "b:1"]);
    let ours = chain(&lineage, SEED + 1, 10..11);
    let others = [
        ("another epoch", 11, chain(&lineage, SEED, 10..11)),
        ("another history", 11, chain(&Lineage::default(), SEED + 1, 0..11)),
        ("a step too many", 12, ours.clone()),
        ("far ahead", 1_000_000_000_000, Lineage::from_peer("ff")),
        ("as far as can be said", i64::MAX, Lineage::from_peer("ff")),
        ("no lineage", 11, Lineage::default()),
    ];
    for (what, step, other) in others {
        let ticket = sim.join_as(at("rumour", step, &other));
        assert_eq!(sim.rejected(), [(ticket, ErrorKind::Conflict)], "{what}");
        assert!(
            text(&sim).contains("recorded state of this job (epoch 1001, step 10)"),
            "{}",
            text(&sim)
        );
        assert!(!sim.healthy().contains(&"rumour".to_string()));
    }
    sim.join_as(at("a:1", 11, &ours));
    sim.join_as(at("behind", 9, &Lineage::from_peer("ff")));
    sim.join_as(at("b:1", 11, &ours));
    assert_eq!(
        sim.ids().unwrap(),
        ["a:1", "b:1", "behind"],
        "who is behind heals"
    );
}

#[test]
fn a_member_that_tells_no_lineage_may_be_ahead_and_a_stranger_may_not() {
    let mut sim = Sim::quorum_of(rules(1), &["a:1", "b:1"]);
    let none = Lineage::default();
    let stranger = sim.join_as(at("c:1", 3, &none));
    assert_eq!(sim.rejected(), [(stranger, ErrorKind::Conflict)]);
    sim.join_as(at("a:1", 3, &none));
    sim.join_as(at("b:2", 4, &none));
    assert_eq!(sim.ids().unwrap(), ["a:1", "b:2"], "the name is recorded");
}

#[test]
fn at_the_recorded_step_the_recorded_history_wins_and_not_the_lowest_id() {
    let (mut sim, lineage) = at_step_10(&["b:1"]);
    sim.join_as(at("a:1", 10, &Lineage::from_peer("ff")));
    sim.join_as(at("b:1", 10, &lineage));
    let quorum = sim.delivered().unwrap();
    let place = crate::assignment::assign("a:1", 0, &quorum, false).unwrap();
    assert!(place.heal, "{quorum:?}");
    assert_eq!(place.lineage, lineage.as_str());
    assert_eq!(
        sim.state.record().unwrap().lineage.as_deref(),
        Some(lineage.as_str())
    );
}

#[test]
fn a_replica_that_waits_with_a_state_that_no_longer_descends_is_turned_away() {
    let (mut sim, lineage) = at_step_10(&["a:1", "b:1", "c:1"]);
    let waiting = sim.join_as(at("n:1", 11, &chain(&lineage, SEED + 1, 10..11)));
    let shrink = |m: Member| Member {
        shrink_only: true,
        ..m
    };
    sim.join_as(shrink(at("a:1", 10, &lineage)));
    sim.join_as(at("c:1", 10, &lineage));
    sim.detach("b:1", 2);
    assert_eq!(sim.ids().unwrap(), ["a:1", "c:1"], "a new epoch at step 10");
    assert!(
        sim.rejected().contains(&(waiting, ErrorKind::Conflict)),
        "{}",
        text(&sim)
    );
}

#[test]
fn a_job_goes_back_only_with_a_majority_of_its_recorded_members() {
    let (mut sim, lineage) = at_step_10(&["a:1", "b:1", "c:1"]);
    for (stream, id) in (1..).zip(["a:1", "b:1", "c:1"]) {
        sim.detach(id, stream);
    }
    let old = chain(&Lineage::default(), Epoch(7), 0..5);
    sim.join_as(at("d:1", 0, &Lineage::default()));
    sim.join_as(at("a:2", 5, &old));
    sim.pass(Duration::from_secs(60), &["a:2", "d:1"]);
    assert_eq!(sim.ids(), None, "1 of 3");
    let reason = sim.reason();
    for part in ["recorded step 10", "a:1, b:1, c:1", "--accept-rollback"] {
        assert!(reason.contains(part), "{reason}");
    }
    sim.join_as(at("b:2", 5, &old));
    assert_eq!(sim.ids().unwrap(), ["a:2", "b:2", "d:1"]);
    assert_eq!(saved(&sim).unwrap().step, Step(5));
    // The other way: one comes that has the state.
    let mut sim = restart(&at_step_10(&["a:1"]).0);
    sim.pass(Duration::from_secs(6), &[]);
    sim.join_as(at("d:1", 0, &Lineage::default()));
    sim.pass(Duration::from_secs(60), &["d:1"]);
    assert_eq!(sim.ids(), None);
    sim.join_as(at("e:1", 10, &lineage));
    assert_eq!(sim.ids().unwrap(), ["d:1", "e:1"]);
}

#[test]
fn the_operators_word_lets_a_job_go_back_once() {
    let (sim, _) = at_step_10(&["a:1", "b:1", "c:1"]);
    let start = Start {
        clock_ms: CLOCK_MS,
        record: sim.state.record(),
        accept_rollback: true,
    };
    let mut sim = Sim::new(rules(1));
    sim.state = LighthouseState::new(rules(1), start, sim.now);
    sim.pass(Duration::from_secs(6), &[]);
    let old = chain(&Lineage::default(), Epoch(7), 0..5);
    sim.join_as(at("d:1", 5, &old));
    assert_eq!(sim.ids().unwrap(), ["d:1"]);
    sim.event(Event::Failed {
        replica_id: "d:1".into(),
        reason: String::new(),
    });
    sim.join("e:1");
    assert_eq!(sim.ids(), None, "the word was for once");
    sim.pass(Duration::from_secs(60), &["e:1"]);
    assert_eq!(sim.ids(), None);
}

#[test]
fn once_all_have_left_the_record_binds_nobody() {
    let (mut sim, _) = at_step_10(&["a:1", "b:1"]);
    for id in ["a:1", "b:1"] {
        sim.event(Event::Leave {
            replica_id: id.into(),
            reason: "done".into(),
        });
    }
    let record = saved(&sim).expect("the end of the run is saved at once");
    assert_eq!(record.left, ["a:1", "b:1"]);
    for mut sim in [restart(&sim), sim] {
        sim.join_as(at("x:1", 3, &Lineage::from_peer("ff")));
        assert_eq!(sim.ids().unwrap(), ["x:1"], "another run");
        assert_eq!(sim.state.record().unwrap().members, ["x:1"]);
    }
}

#[test]
fn after_a_restart_the_same_step_goes_on_and_a_minority_waits_for_the_majority() {
    let (mut before, lineage) = at_step_10(&["a:1", "b:1", "c:1"]);
    let record = before.state.record();
    for step in 11..2000 {
        let now = chain(&lineage, SEED + 1, 10..step);
        for id in ["a:1", "b:1", "c:1"] {
            before.join_as(at(id, step, &now));
        }
    }
    // The record is that of the first step of the epoch; the members are 1990 commits ahead of it.
    let mut sim = Sim::started(rules(1), CLOCK_MS, record, before.now);
    let now = chain(&lineage, SEED + 1, 10..2000);
    sim.pass(Duration::from_secs(6), &[]);
    sim.join_as(at("a:1", 2000, &now));
    sim.pass(Duration::from_secs(8), &["a:1"]);
    assert_eq!(sim.ids(), None, "1 of 3, and the others may be alive");
    assert!(sim.reason().contains("1 of the 3 members"), "{}", sim.reason());
    sim.join_as(at("b:1", 2000, &now));
    assert_eq!(sim.ids().unwrap(), ["a:1", "b:1"]);
    assert!(sim.delivered().unwrap().quorum_id > SEED + 1);
    assert_eq!(saved(&sim).unwrap().step, Step(2000));
}

#[test]
fn a_job_that_is_started_again_as_a_whole_waits_for_its_initial_replicas() {
    let (before, lineage) = at_step_10(&["a:1", "b:1", "c:1"]);
    let rules = QuorumRules {
        initial_replicas: Some(3),
        ..rules(1)
    };
    let again = || Sim::started(rules.clone(), CLOCK_MS, before.state.record(), before.now);
    let mut sim = again();
    sim.join_as(at("a:2", 10, &lineage));
    sim.join_as(at("b:2", 10, &lineage));
    sim.pass(Duration::from_secs(60), &["a:2", "b:2"]);
    assert_eq!(sim.ids(), None);
    sim.join_as(at("c:2", 10, &lineage));
    assert_eq!(sim.ids().unwrap(), ["a:2", "b:2", "c:2"]);
    // Those that have been in a quorum go on with it.
    let mut sim = again();
    sim.pass(Duration::from_secs(6), &[]);
    let last_quorum_id = SEED + 1;
    for id in ["a:1", "b:1"] {
        sim.join_as(Member {
            last_quorum_id,
            ..at(id, 10, &lineage)
        });
    }
    assert_eq!(sim.ids().unwrap(), ["a:1", "b:1"]);
    // torchft's managers do not tell that they have; the id of this very incarnation is in the record.
    let mut sim = again();
    sim.pass(Duration::from_secs(6), &[]);
    sim.join_as(at("a:1", 10, &Lineage::default()));
    sim.join_as(at("b:1", 10, &Lineage::default()));
    assert_eq!(sim.ids().unwrap(), ["a:1", "b:1"]);
}

#[test]
fn a_job_whose_other_machines_died_with_the_lighthouse_goes_on_after_both_timeouts() {
    let (before, lineage) = at_step_10(&["a:1", "b:1", "c:1"]);
    let mut sim = restart(&before);
    sim.pass(Duration::from_secs(60), &[]);
    sim.join_as(at("a:1", 10, &lineage));
    // The call is made again and again, as a rank does whose time is up: that does not begin the wait anew.
    for _ in 0..14 {
        sim.pass(Duration::from_secs(1), &["a:1"]);
        assert_eq!(sim.ids(), None);
        sim.join_as(at("a:1", 10, &lineage));
        assert_eq!(sim.ids(), None);
    }
    sim.pass(Duration::from_secs(2), &["a:1"]);
    assert_eq!(sim.ids().unwrap(), ["a:1"], "15 s after it asked first");
    // Who committed meanwhile, in the old epoch, has lost that commit.
    let ticket = sim.join_as(at("b:1", 11, &chain(&lineage, SEED + 1, 10..11)));
    assert_eq!(sim.rejected(), [(ticket, ErrorKind::Conflict)]);
}

#[test]
fn members_that_are_known_to_be_gone_are_not_needed_after_a_restart() {
    let (mut before, lineage) = at_step_10(&["a:1", "b:1", "c:1", "d:1"]);
    before.detach("b:1", 2);
    before.event(Event::Leave {
        replica_id: "c:1".into(),
        reason: "done".into(),
    });
    before.event(Event::Tick);
    let mut sim = Sim::started(rules(1), CLOCK_MS, saved(&before), before.now);
    assert_eq!(sim.healthy(), ["a:1", "d:1"]);
    sim.pass(Duration::from_secs(6), &[]);
    sim.join_as(at("a:1", 10, &lineage));
    assert_eq!(sim.ids(), None, "1 of 2");
    sim.join_as(at("d:1", 10, &lineage));
    assert_eq!(sim.ids().unwrap(), ["a:1", "d:1"]);
}

#[test]
fn a_member_that_was_started_again_is_there_and_so_is_not_counted_as_gone_after_a_restart() {
    let (before, lineage) = at_step_10(&["a:1", "b:1", "c:1", "d:1"]);
    let mut sim = Sim::started(rules(1), CLOCK_MS, before.state.record(), before.now);
    sim.pass(Duration::from_secs(6), &[]);
    sim.join_as(at("a:1", 10, &lineage));
    sim.join("b:2");
    assert_eq!(sim.ids(), None, "2 of 4, and the others may be alive");
    assert!(sim.reason().contains("2 of the 4 members"), "{}", sim.reason());
    sim.join_as(at("c:1", 10, &lineage));
    assert_eq!(sim.ids().unwrap(), ["a:1", "b:2", "c:1"]);
}

/// The lighthouse of a, b and c at step 10 has started again; it knows from its record that these are gone.
fn restarted_without(gone: &[&str]) -> (Sim, Lineage) {
    let (mut before, lineage) = at_step_10(&["a:1", "b:1", "c:1"]);
    for id in gone {
        before.event(Event::Failed {
            replica_id: (*id).into(),
            reason: String::new(),
        });
    }
    before.event(Event::Tick);
    let sim = Sim::started(rules(1), CLOCK_MS, saved(&before), before.now);
    assert!(gone.iter().all(|id| !sim.is_healthy(id)));
    (sim, lineage)
}

#[test]
fn those_that_were_started_again_wait_a_while_for_a_member_recorded_as_gone_whose_heartbeats_come() {
    let replica_id = || "a:1".to_string();
    let beat = || Event::Heartbeat {
        replica_id: replica_id(),
    };
    let again = |before: Vec<Event>| {
        let (mut sim, lineage) = restarted_without(&["a:1"]);
        for event in before {
            sim.event(event);
        }
        sim.join_as(at("b:2", 10, &lineage));
        sim.join_as(at("c:2", 10, &lineage));
        (sim, lineage)
    };
    let without = |before| again(before).0.ids();
    assert_eq!(without(vec![]).unwrap(), ["b:2", "c:2"]);
    let (mut sim, lineage) = again(vec![beat()]);
    assert_eq!(sim.ids(), None);
    assert!(sim.reason().contains("for a:1"), "{}", sim.reason());
    assert!(!sim.is_healthy("a:1"), "it counts for no majority");
    sim.join_as(at("a:1", 10, &lineage));
    assert_eq!(sim.ids().unwrap(), ["a:1", "b:2", "c:2"]);
    // Not for ever: it may hang. And what is known since this lighthouse started counts.
    let (mut hangs, _) = again(vec![beat()]);
    hangs.pass(Duration::from_secs(11), &["a:1", "b:2", "c:2"]);
    assert_eq!(hangs.ids().unwrap(), ["b:2", "c:2"]);
    let gone = Event::Disconnected {
        replica_id: replica_id(),
    };
    let leaves = Event::Leave {
        replica_id: replica_id(),
        reason: String::new(),
    };
    for evidence in [gone, leaves] {
        assert_eq!(without(vec![beat(), evidence, beat()]).unwrap(), ["b:2", "c:2"]);
    }
}

#[test]
fn a_member_recorded_as_gone_whose_heartbeats_come_counts_for_the_majority_after_a_restart() {
    let (mut sim, lineage) = restarted_without(&["b:1", "c:1"]);
    sim.beat(&["b:1", "c:1"]);
    sim.join_as(at("a:1", 10, &lineage));
    assert_eq!(sim.ids(), None, "1 of 3, and the others are alive");
    assert!(sim.reason().contains("1 of the 3 members"), "{}", sim.reason());
    sim.join_as(at("b:1", 10, &lineage));
    assert_eq!(sim.ids().unwrap(), ["a:1", "b:1"]);
    let (mut silent, lineage) = restarted_without(&["b:1", "c:1"]);
    silent.join_as(at("a:1", 10, &lineage));
    assert_eq!(silent.ids().unwrap(), ["a:1"]);
}

#[test]
fn without_a_record_the_size_of_the_last_quorum_that_replicas_tell_is_what_counts() {
    let told = |id: &str, last_quorum_id, last_world_size| Member {
        last_quorum_id,
        last_world_size,
        ..member(id)
    };
    let mut sim = Sim::new(rules(1));
    sim.join_as(told("a:1", Epoch(900), 5));
    sim.join_as(told("b:1", Epoch(900), 5));
    sim.join_as(told("c:1", Epoch(800), 9));
    assert_eq!(sim.ids(), None, "2 of 5 from quorum 900");
    assert!(sim.reason().contains("2 of the 5 members"), "{}", sim.reason());
    sim.join_as(told("d:1", Epoch(900), 4));
    assert_eq!(sim.ids().unwrap(), ["a:1", "b:1", "c:1", "d:1"]);
    // An older quorum's size does not count once a newer one is told of.
    let mut sim = Sim::new(rules(1));
    sim.join_as(told("c:1", Epoch(800), 9));
    assert_eq!(sim.ids(), None);
    sim.join_as(told("a:1", Epoch(900), 1));
    assert_eq!(sim.ids().unwrap(), ["a:1", "c:1"]);
    // And a lie costs time, not the job.
    let mut sim = Sim::new(rules(1));
    sim.join_as(told("liar", SEED + 50, u64::MAX));
    sim.join_as(told("a:1", Epoch(900), 1));
    sim.pass(Duration::from_secs(16), &["a:1"]);
    assert_eq!(sim.ids().unwrap(), ["a:1"]);
}

#[test]
fn a_record_of_an_older_version_knows_no_state_and_its_members_may_be_ahead() {
    let record = Record {
        quorum_id: SEED,
        members: vec!["a:1".into(), "b:1".into()],
        ..Record::default()
    };
    let mut sim = Sim::started(rules(1), CLOCK_MS, Some(record), Instant::now());
    let lineage = chain(&Lineage::default(), Epoch(7), 0..500);
    let stranger = sim.join_as(at("c:1", 500, &lineage));
    assert_eq!(sim.rejected(), [(stranger, ErrorKind::Conflict)]);
    sim.join_as(at("a:1", 500, &lineage));
    sim.join_as(at("b:1", 500, &lineage));
    assert_eq!(sim.ids().unwrap(), ["a:1", "b:1"]);
}

#[test]
fn a_state_far_ahead_is_checked_with_bounded_work_and_checked_again_for_little() {
    let job = Record {
        quorum_id: Epoch(5),
        lineage: Some(String::new()),
        ..Record::default()
    };
    let mut job = Job::of(&job);
    let far = chain(&Lineage::default(), Epoch(5), 0..5000);
    assert!(job.refuses(&at("a", 5000, &far)).is_none());
    assert!(job.refuses(&at("a", 4999, &far)).is_some());
    assert!(job.refuses(&at("a", 5000, &far)).is_none());
    assert_eq!(job.kept(), [Some(4), None], "every 1024th lineage");
    assert!(job.refuses(&at("a", 1_000_001, &far)).is_some());
    assert_eq!(
        job.kept(),
        [Some(4), None],
        "beyond what is checked, nothing is computed"
    );
}

/// Before the first commit the job may have begun in either of two ways, and a state is checked against both.
#[test]
fn who_is_refused_before_the_first_commit_costs_as_little_again_and_after_it_one_chain_is_checked() {
    let members = ["a:1", "b:1"].map(|id| at(id, 0, &Lineage::default()));
    let mut job = Job::next(None, Epoch(5), &members);
    let stranger = at("c:1", 5000, &Lineage::from_peer("ff"));
    for _ in 0..2 {
        assert!(job.refuses(&stranger).is_some());
        assert_eq!(job.kept(), [Some(4); 2], "of both chains");
    }
    // Either is still the job's.
    let synced = chain(&Lineage::initial("a:1"), Epoch(5), 0..5000);
    let mut began_with_a_sync = job.clone();
    assert!(began_with_a_sync.refuses(&at("a:1", 5000, &synced)).is_none());
    assert_eq!(began_with_a_sync.kept(), [Some(4), None], "it is known now");
    let plain = chain(&Lineage::default(), Epoch(5), 0..5000);
    assert!(job.refuses(&at("a:1", 5000, &plain)).is_none());
    // All begin the first step again.
    let mut job = Job::next(Some(job), Epoch(5), &members);
    assert_eq!(job.kept(), [Some(4); 2]);
    let once = chain(&Lineage::default(), Epoch(5), 0..1);
    job = Job::next(Some(job), Epoch(5), &members.map(|m| at(&m.replica_id, 1, &once)));
    assert_eq!(job.kept(), [Some(4), None], "they have told how they began");
    assert!(job.refuses(&at("a:1", 5000, &synced)).is_some());
}
