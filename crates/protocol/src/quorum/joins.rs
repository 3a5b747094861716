//! Who may ask, who is waited for, and who counts: malformed members, replicas that are on their way, strangers, and
//! replicas whose own servers give them up.

use std::time::Duration;

use super::arrivals::MAX_ANNOUNCED;
use super::tests::{SEED, Sim, member, rules};
use super::*;
use crate::member::Member;

const DAY_MS: u64 = 24 * 60 * 60 * 1000;

fn refusal(sim: &Sim) -> String {
    let refused = sim.actions.iter().find_map(|a| match a {
        Action::Reject { error, .. } => Some(error.to_string()),
        _ => None,
    });
    refused.unwrap_or_default()
}

#[test]
fn a_malformed_member_is_refused_alone_naming_the_field_and_never_reaches_a_quorum() {
    type Edit = fn(&mut Member);
    let edits: [(&str, Edit); 24] = [
        ("replica_id", |m| m.replica_id = "bad\nid".into()),
        ("address", |m| m.address.clear()),
        ("address", |m| m.address = "host:1".into()),
        ("address", |m| m.address = "ftp://host:1".into()),
        ("address", |m| m.address = "http://host".into()),
        ("address", |m| m.address = "http://:1".into()),
        ("address", |m| m.address = "http://host:0".into()),
        ("address", |m| m.address = "http://host:65536".into()),
        ("address", |m| m.address = "http://host:+1".into()),
        ("address", |m| m.address = "http://a b:1".into()),
        ("address", |m| m.address = "http://host:1/path".into()),
        ("address", |m| m.address = "http://fe80::1:1".into()),
        ("address", |m| m.address = "http://[fe80::zz]:1".into()),
        ("store_address", |m| m.store_address.clear()),
        ("store_address", |m| m.store_address = "store".into()),
        ("store_address", |m| m.store_address = "http://store:1".into()),
        ("store_address", |m| {
            m.store_address = format!("{}:1", "x".repeat(300))
        }),
        ("step", |m| m.step = Step(-1)),
        ("commit_failures", |m| m.commit_failures = -1),
        ("batches_committed", |m| m.batches_committed = -1),
        ("world_size", |m| m.world_size = 0),
        ("world_size", |m| m.world_size = u64::MAX),
        ("lineage", |m| m.lineage = "x".repeat(300)),
        ("data", |m| m.data = "x".repeat(20_000)),
    ];
    for (field, edit) in edits {
        let mut sim = Sim::new(rules(1));
        let mut bad = member("bad");
        bad.step = Step(1_000_000);
        edit(&mut bad);
        let ticket = sim.join_as(bad.clone());
        assert_eq!(sim.rejected(), [(ticket, ErrorKind::InvalidArgument)], "{bad:?}");
        let text = refusal(&sim);
        assert!(
            text.contains(&format!("{field} is '")) && text.len() < 400,
            "{text}"
        );
        sim.join("good");
        assert_eq!(sim.ids().unwrap(), ["good"], "{bad:?}");
    }
    let mut sim = Sim::new(rules(1));
    sim.join_as(Member {
        address: "https://[fe80::1%eth0]:65535".into(),
        store_address: "[::1]:1".into(),
        ..member("good")
    });
    assert_eq!(sim.ids().unwrap(), ["good"]);
}

#[test]
fn a_quorum_id_that_this_job_cannot_have_seen_is_not_believed_and_blocks_nobody() {
    // Without a record, ids up to the clock and a day are possible.
    let mut sim = Sim::new(rules(1));
    sim.now += Duration::from_secs(2);
    let possible = SEED + 2000 + DAY_MS;
    let reports = |id: &str, last_quorum_id| Member {
        last_quorum_id,
        ..member(id)
    };
    let ticket = sim.join_as(reports("absurd", possible + 1));
    assert_eq!(sim.rejected(), [(ticket, ErrorKind::InvalidArgument)]);
    sim.join_as(reports("a", possible));
    assert_eq!(sim.delivered().unwrap().quorum_id, possible + 1);
    // With one, nothing beyond the newest is.
    let mut sim = Sim::quorum_of(rules(1), &["a"]);
    let ticket = sim.join_as(reports("absurd", SEED + 2));
    assert_eq!(sim.rejected(), [(ticket, ErrorKind::Conflict)]);
    sim.event(Event::Attached {
        replica_id: "absurd".into(),
        stream: 9,
        last_quorum_id: SEED + 2,
    });
    assert!(
        matches!(sim.actions[..], [Action::Refuse { stream: 9, .. }]),
        "{:?}",
        sim.actions
    );
    sim.join_as(reports("a", SEED + 1));
    let quorum = sim.delivered().unwrap();
    assert_eq!((quorum.quorum_id, quorum.participants.len()), (SEED + 1, 1));
}

#[test]
fn replicas_that_send_heartbeats_before_they_ask_get_one_first_quorum() {
    let mut sim = Sim::new(rules(1));
    sim.beat(&["a", "b", "c"]);
    sim.join("a");
    sim.pass(Duration::from_secs(1), &["a", "b", "c"]);
    assert_eq!(sim.ids(), None, "a would run alone");
    assert!(sim.reason().ends_with("for b, c"), "{}", sim.reason());
    sim.join("b");
    sim.pass(Duration::from_secs(1), &["a", "b", "c"]);
    assert_eq!(sim.ids(), None);
    sim.join("c");
    assert_eq!(sim.ids().unwrap(), ["a", "b", "c"]);
}

#[test]
fn a_replica_that_only_sends_heartbeats_is_waited_for_no_longer_than_the_join_timeout() {
    let mut sim = Sim::new(rules(1));
    sim.beat(&["x", "y", "z"]);
    sim.pass(Duration::from_secs(6), &["x", "y"]);
    sim.join("a");
    assert_eq!(sim.ids(), None);
    sim.pass(Duration::from_millis(3_500), &["a", "x", "y"]);
    assert_eq!(sim.ids(), None);
    sim.pass(Duration::from_millis(1_000), &["a", "x", "y"]);
    assert_eq!(sim.ids().unwrap(), ["a"], "10 s after their first heartbeat");
    // Nor does it begin anew with the next one, and it counts for no majority.
    sim.detach("a", 1);
    sim.beat(&["x", "y"]);
    sim.join("b");
    sim.pass(Duration::from_secs(6), &["b", "x", "y"]);
    assert_eq!(sim.ids().unwrap(), ["b"], "once a is silent for 5 s");
}

#[test]
fn a_stranger_that_stops_its_heartbeats_is_not_waited_for_and_leaves_nothing_behind() {
    let mut sim = Sim::new(rules(1));
    let strangers: Vec<String> = (0..MAX_ANNOUNCED + 10).map(|i| format!("s{i}")).collect();
    sim.beat(&strangers.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(sim.state.roster.len(), MAX_ANNOUNCED);
    sim.join("a");
    sim.pass(Duration::from_millis(5_500), &["a"]);
    assert_eq!(sim.ids().unwrap(), ["a"]);
    assert_eq!(sim.state.roster.len(), 1);
}

#[test]
fn who_waits_beside_a_running_quorum_is_taken_in_with_its_next_one() {
    let mut sim = Sim::new(rules(1));
    sim.join("a");
    assert_eq!(sim.ids().unwrap(), ["a"]);
    sim.join("b");
    sim.join("c");
    sim.pass(Duration::from_secs(60), &["a", "b", "c", "stranger"]);
    assert_eq!(sim.ids(), None, "a is at work");
    sim.join("a");
    assert_eq!(sim.ids().unwrap(), ["a", "b", "c"]);
}

#[test]
fn strangers_that_attach_with_an_old_quorum_id_are_not_in_the_majority() {
    let mut sim = Sim::unattached(rules(1), &["a", "b"]);
    for stream in 10..20 {
        sim.event(Event::Attached {
            replica_id: format!("stranger-{stream}"),
            stream,
            last_quorum_id: SEED - 5,
        });
    }
    assert_eq!(sim.healthy(), ["a", "b"]);
    sim.join("a");
    sim.join("b");
    assert_eq!(sim.ids().unwrap(), ["a", "b"]);
    // A member that attaches again is.
    sim.pass(Duration::from_secs(6), &["a"]);
    assert_eq!(sim.healthy(), ["a"]);
    sim.event(Event::Attached {
        replica_id: "b".into(),
        stream: 20,
        last_quorum_id: SEED + 1,
    });
    assert_eq!(sim.healthy(), ["a", "b"]);
}

#[test]
fn a_member_that_was_started_again_under_its_id_holds_no_member_up_while_it_loads() {
    let mut sim = Sim::quorum_of(rules(1), &["a", "b"]);
    sim.detach("b", 2);
    sim.event(Event::Attached {
        replica_id: "b".into(),
        stream: 12,
        last_quorum_id: Epoch(0),
    });
    sim.beat(&["b"]);
    sim.join("a");
    assert_eq!(sim.ids().unwrap(), ["a"]);
    sim.join("b");
    sim.join("a");
    assert_eq!(sim.ids().unwrap(), ["a", "b"]);
}

#[test]
fn a_replica_that_its_own_servers_give_up_is_out_at_once_and_its_members_are_told_why() {
    let mut sim = Sim::quorum_of(rules(1), &["a", "b", "c"]);
    sim.join("a");
    sim.join("b");
    sim.event(Event::Failed {
        replica_id: "c".into(),
        reason: "rank 1 died".into(),
    });
    assert_eq!(sim.ids().unwrap(), ["a", "b"]);
    let (to, event) = sim.pushes()[0].clone();
    assert_eq!(to, ["a", "b", "c"], "its other ranks are in the epoch as well");
    assert_eq!(event.departed, ["c"]);
    assert!(
        event.reason.contains("c is gone") && event.reason.contains("rank 1 died"),
        "{event:?}"
    );
    // Its servers send heartbeats on and may attach again, which says nothing about its ranks.
    let mut early = Sim::quorum_of(rules(1), &["a", "b"]);
    early.event(Event::Failed {
        replica_id: "b".into(),
        reason: "rank 1 died".into(),
    });
    early.attach("b", 12);
    early.beat(&["b"]);
    assert_eq!(early.healthy(), ["a"]);
    sim.pass(Duration::from_secs(11), &["a", "b", "c"]);
    assert_eq!(sim.healthy(), ["a", "b"]);
    // It may ask again, and the stream that it has is good.
    sim.join("c");
    sim.join("a");
    sim.join("b");
    assert_eq!(sim.ids().unwrap(), ["a", "b", "c"]);
    sim.detach("c", 3);
    assert_eq!(sim.pushes()[0].1.departed, ["c"]);
}

#[test]
fn a_call_of_a_replica_that_its_servers_give_up_is_ended() {
    let mut sim = Sim::new(rules(2));
    let ticket = sim.join("a");
    sim.event(Event::Failed {
        replica_id: "a".into(),
        reason: "no progress for 60 s".into(),
    });
    assert_eq!(sim.rejected(), [(ticket, ErrorKind::Unavailable)]);
    assert!(
        refusal(&sim).contains("no progress for 60 s"),
        "{}",
        refusal(&sim)
    );
    sim.join("b");
    assert_eq!(sim.ids(), None);
    sim.join("a");
    assert_eq!(sim.ids().unwrap(), ["a", "b"]);
}
