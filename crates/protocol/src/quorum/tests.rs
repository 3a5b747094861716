//! The quorum rules as tables, and the known faults by name, under virtual time.

use std::time::Duration;

use ftcore::Epoch;

use super::*;
use crate::member::{MAX_ID_BYTES, Member, listed};

pub(super) const SEED: Epoch = Epoch(1000);
/// The clock that gives it.
pub(super) const CLOCK_MS: i64 = 1000;

/// A lighthouse under virtual time.
pub(super) struct Sim {
    pub(super) state: LighthouseState,
    pub(super) now: Instant,
    pub(super) tickets: Ticket,
    pub(super) actions: Vec<Action>,
}

pub(super) fn rules(min_replicas: usize) -> QuorumRules {
    QuorumRules {
        min_replicas,
        initial_replicas: None,
        join_timeout: Duration::from_secs(10),
        heartbeat_timeout: Duration::from_secs(5),
    }
}

pub(super) fn member(id: &str) -> Member {
    Member {
        replica_id: id.into(),
        address: format!(
            "http://host-of-{}:1",
            id.replace(|c: char| !c.is_ascii_alphanumeric(), "-")
        ),
        store_address: "store:1".into(),
        world_size: 1,
        ..Member::default()
    }
}

impl Sim {
    pub(super) fn new(rules: QuorumRules) -> Self {
        Self::restarted(rules, CLOCK_MS, &[])
    }

    fn restarted(rules: QuorumRules, clock_ms: i64, previous: &[&str]) -> Self {
        let now = Instant::now();
        let record = (!previous.is_empty()).then(|| Record {
            quorum_id: Epoch(clock_ms.cast_unsigned()),
            lineage: Some(String::new()),
            members: previous.iter().map(|s| (*s).to_string()).collect(),
            ..Record::default()
        });
        Self::started(rules, clock_ms, record, now)
    }

    /// A lighthouse with this record, if any, and the clock at `clock_ms`.
    pub(super) fn started(rules: QuorumRules, clock_ms: i64, record: Option<Record>, now: Instant) -> Self {
        let start = Start {
            clock_ms,
            record,
            accept_rollback: false,
        };
        Self {
            state: LighthouseState::new(rules, start, now),
            now,
            tickets: 0,
            actions: Vec::new(),
        }
    }

    pub(super) fn event(&mut self, event: Event) -> &mut Self {
        self.actions = self.state.apply(event, self.now);
        self
    }

    pub(super) fn join_as(&mut self, member: Member) -> Ticket {
        self.tickets += 1;
        let ticket = self.tickets;
        self.event(Event::Join { member, ticket });
        ticket
    }

    pub(super) fn join(&mut self, id: &str) -> Ticket {
        self.join_as(member(id))
    }

    pub(super) fn beat(&mut self, ids: &[&str]) {
        for id in ids {
            self.event(Event::Heartbeat {
                replica_id: (*id).into(),
            });
        }
    }

    /// Time passes; the ids given send heartbeats meanwhile.
    pub(super) fn pass(&mut self, time: Duration, alive: &[&str]) {
        let end = self.now + time;
        let mut all = Vec::new();
        while self.now < end {
            self.now = (self.now + Duration::from_millis(500)).min(end);
            for id in alive {
                all.extend(self.state.apply(
                    Event::Heartbeat {
                        replica_id: (*id).into(),
                    },
                    self.now,
                ));
            }
            all.extend(self.state.apply(Event::Tick, self.now));
        }
        self.actions = all;
    }

    pub(super) fn reason(&self) -> String {
        self.state.reason(self.now)
    }

    pub(super) fn healthy(&self) -> Vec<String> {
        let healthy = self.state.status(self.now).healthy;
        healthy.into_iter().map(|(id, _)| id).collect()
    }

    pub(super) fn is_healthy(&self, id: &str) -> bool {
        self.state.roster.get(id).is_some_and(|e| e.seen.is_some())
    }

    pub(super) fn delivered(&self) -> Option<Arc<Quorum>> {
        self.actions.iter().rev().find_map(|a| match a {
            Action::Deliver { quorum, .. } => Some(quorum.clone()),
            _ => None,
        })
    }

    pub(super) fn ids(&self) -> Option<Vec<String>> {
        self.delivered().map(|q| q.ids().map(str::to_string).collect())
    }

    pub(super) fn rejected(&self) -> Vec<(Ticket, ErrorKind)> {
        let rejections = self.actions.iter().filter_map(|a| match a {
            Action::Reject { ticket, error } => Some((*ticket, error.kind())),
            _ => None,
        });
        rejections.collect()
    }

    pub(super) fn pushes(&self) -> Vec<(Vec<String>, AbortEpoch)> {
        let pushes = self.actions.iter().filter_map(|a| match a {
            Action::Push { to, event } => Some((to.clone(), event.clone())),
            _ => None,
        });
        pushes.collect()
    }

    /// As a member of the last quorum attaches, or one that has been in none.
    pub(super) fn attach(&mut self, id: &str, stream: u64) {
        let epoch = self.state.present_epoch().filter(|_| self.state.is_previous(id));
        self.event(Event::Attached {
            replica_id: id.into(),
            stream,
            last_quorum_id: epoch.unwrap_or_default(),
        });
    }

    pub(super) fn detach(&mut self, id: &str, stream: u64) {
        self.event(Event::Detached {
            replica_id: id.into(),
            stream,
        });
    }

    /// A first quorum of these ids, all attached (streams 1, 2, …).
    pub(super) fn quorum_of(rules: QuorumRules, ids: &[&str]) -> Self {
        Self::quorum_with(rules, ids, true)
    }

    /// A quorum of replicas that have no streams, as torchft's: their heartbeats are the signs of life.
    pub(super) fn unattached(rules: QuorumRules, ids: &[&str]) -> Self {
        Self::quorum_with(rules, ids, false)
    }

    fn quorum_with(rules: QuorumRules, ids: &[&str], attached: bool) -> Self {
        let mut sim = Self::new(QuorumRules {
            initial_replicas: Some(ids.len()),
            ..rules.clone()
        });
        for (stream, id) in (1..).zip(ids) {
            if attached {
                sim.attach(id, stream);
            }
            sim.join(id);
        }
        assert_eq!(sim.ids().unwrap(), ids);
        sim.state.rules = rules;
        sim
    }
}

#[test]
fn a_quorum_forms_as_soon_as_no_healthy_replica_is_missing() {
    let mut sim = Sim::new(rules(2));
    sim.join("a");
    assert_eq!(sim.ids(), None);
    assert!(sim.reason().contains("min_replicas is 2"), "{}", sim.reason());
    sim.join("b");
    let quorum = sim.delivered().unwrap();
    assert_eq!(quorum.ids().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(quorum.quorum_id, SEED + 1);
}

#[test]
fn unchanged_members_keep_their_id_and_every_reason_for_a_new_group_changes_it() {
    type Edit = fn(&mut Member);
    let edits: [(&str, Edit, bool); 8] = [
        ("nothing", |_| {}, false),
        ("a step", |m| m.step += 1, false),
        ("the id it was given", |m| m.last_quorum_id = SEED + 1, false),
        ("a failed commit", |m| m.commit_failures = 1, true),
        (
            "another address",
            |m| m.address = "http://elsewhere:1".into(),
            true,
        ),
        ("another store", |m| m.store_address = "elsewhere:1".into(), true),
        ("another incarnation", |m| m.incarnation = "2".into(), true),
        ("another epoch", |m| m.last_quorum_id = SEED - 7, true),
    ];
    for (what, edit, new) in edits {
        let mut sim = Sim::quorum_of(rules(1), &["a", "b"]);
        sim.join("a");
        let mut b = member("b");
        edit(&mut b);
        sim.join_as(b);
        assert_eq!(
            sim.delivered().unwrap().quorum_id,
            SEED + 1 + u64::from(new),
            "{what}"
        );
    }
}

#[test]
fn a_newcomer_enters_with_the_next_quorum_of_the_previous_members() {
    let mut sim = Sim::quorum_of(rules(1), &["a", "b"]);
    sim.join("c");
    assert_eq!(sim.ids(), None, "a and b are at work");
    sim.join("a");
    sim.join("b");
    assert_eq!(sim.ids().unwrap(), ["a", "b", "c"]);
    assert_eq!(sim.delivered().unwrap().quorum_id, SEED + 2);
}

#[test]
fn a_slow_healthy_replica_is_waited_for_until_the_join_timeout_and_told_when_left_out() {
    let mut sim = Sim::quorum_of(rules(1), &["a", "b", "c"]);
    sim.join("a");
    sim.join("b");
    assert_eq!(sim.ids(), None);
    assert!(sim.reason().contains("for c"), "{}", sim.reason());
    sim.pass(Duration::from_millis(9_900), &["a", "b", "c"]);
    assert_eq!(sim.ids(), None);
    sim.pass(Duration::from_millis(200), &["a", "b", "c"]);
    assert_eq!(sim.ids().unwrap(), ["a", "b"]);
    let pushes = sim.pushes();
    assert_eq!(
        (pushes[0].0.clone(), pushes[0].1.quorum_id),
        (vec!["c".to_string()], SEED + 1)
    );
    assert!(pushes[0].1.reason.contains("without c"), "{pushes:?}");
}

#[test]
fn when_the_missing_member_is_known_dead_nobody_waits() {
    for (how, leave) in [("stream", false), ("leave", true)] {
        let mut sim = Sim::quorum_of(rules(1), &["a", "b", "c"]);
        sim.join("a");
        sim.join("b");
        if leave {
            sim.event(Event::Leave {
                replica_id: "c".into(),
                reason: "done".into(),
            });
        } else {
            sim.detach("c", 3);
        }
        assert_eq!(sim.ids().unwrap(), ["a", "b"], "{how}");
    }
    let mut sim = Sim::unattached(rules(1), &["a", "b", "c"]);
    sim.join("a");
    sim.join("b");
    sim.pass(Duration::from_millis(5_500), &["a", "b"]);
    assert_eq!(sim.ids().unwrap(), ["a", "b"], "missed heartbeats");
}

#[test]
fn the_first_quorum_waits_for_the_initial_replicas_without_a_timeout() {
    let mut sim = Sim::new(QuorumRules {
        initial_replicas: Some(3),
        ..rules(1)
    });
    sim.join("a");
    sim.join("b");
    sim.pass(Duration::from_secs(100), &["a", "b"]);
    assert_eq!(sim.ids(), None);
    assert_eq!(sim.reason(), "the first quorum waits for 3 replicas, 2 ask: a, b");
    sim.join("c");
    assert_eq!(sim.ids().unwrap(), ["a", "b", "c"]);
    sim.detach("c", 0);
    sim.event(Event::Leave {
        replica_id: "c".into(),
        reason: String::new(),
    });
    sim.join("a");
    sim.join("b");
    assert_eq!(sim.ids().unwrap(), ["a", "b"], "only the first one waits");
}

#[test]
fn a_job_that_goes_on_after_a_restart_does_not_wait_for_the_initial_replicas() {
    let mut sim = Sim::new(QuorumRules {
        initial_replicas: Some(3),
        ..rules(1)
    });
    sim.join_as(Member {
        last_quorum_id: Epoch(7),
        ..member("a")
    });
    assert_eq!(sim.ids().unwrap(), ["a"]);
}

#[test]
fn l01_ids_stay_above_everything_that_was_ever_given_out() {
    let mut sim = Sim::restarted(rules(1), 50, &[]);
    sim.join_as(Member {
        last_quorum_id: Epoch(70),
        ..member("a")
    });
    assert_eq!(
        sim.delivered().unwrap().quorum_id,
        Epoch(71),
        "a member knows a higher id than the clock and the file"
    );
    // The survivors' id and the new one can never be the same, even with the same members.
    let mut sim = Sim::restarted(rules(1), 71, &["a"]);
    sim.join_as(Member {
        last_quorum_id: Epoch(71),
        ..member("a")
    });
    assert_eq!(sim.delivered().unwrap().quorum_id, Epoch(72));
}

#[test]
fn l01_after_a_restart_the_first_to_come_back_waits_for_the_other_members() {
    let mut sim = Sim::restarted(rules(1), CLOCK_MS, &["a", "b", "c"]);
    sim.join("a");
    assert_eq!(sim.ids(), None, "a alone is no majority of the saved members");
    sim.join("b");
    assert_eq!(sim.ids(), None, "c may still come");
    sim.pass(Duration::from_millis(5_500), &["a", "b"]);
    assert_eq!(sim.ids().unwrap(), ["a", "b"]);
    // The same without a state file: members that attach say that they are in a quorum.
    let mut sim = Sim::new(rules(1));
    for (stream, id) in (1..).zip(["b", "c"]) {
        sim.event(Event::Attached {
            replica_id: id.into(),
            stream,
            last_quorum_id: Epoch(7),
        });
    }
    sim.join("a");
    assert_eq!(sim.ids(), None);
}

#[test]
fn an_impossible_id_or_quorum_id_is_refused() {
    let mut sim = Sim::new(rules(1));
    let huge = "x".repeat(MAX_ID_BYTES + 1);
    for bad in [
        member(""),
        member(&huge),
        Member {
            last_quorum_id: Epoch((-1i64).cast_unsigned()),
            ..member("a")
        },
        Member {
            last_quorum_id: Epoch(i64::MAX.cast_unsigned()),
            ..member("a")
        },
    ] {
        let ticket = sim.join_as(bad);
        assert_eq!(sim.rejected(), [(ticket, ErrorKind::InvalidArgument)]);
    }
    assert_eq!(sim.healthy().len(), 0);
}

#[test]
fn l23_the_fast_path_keeps_to_min_replicas_and_the_majority() {
    let mut sim = Sim::quorum_of(rules(1), &["a"]);
    // Ten newcomers ask and go away again; they stay healthy.
    let newcomers: Vec<String> = (0..10).map(|i| format!("n{i}")).collect();
    for n in &newcomers {
        let ticket = sim.join(n);
        sim.event(Event::Withdraw { ticket });
    }
    sim.join("a");
    assert_eq!(sim.ids(), None, "1 of 11 healthy");
    assert!(sim.reason().contains("no strict majority"), "{}", sim.reason());

    let mut sim = Sim::quorum_of(rules(1), &["a"]);
    sim.state.rules.min_replicas = 2;
    sim.join("a");
    assert_eq!(sim.ids(), None, "the previous quorum is below min_replicas now");
}

#[test]
fn l23_shrink_only_keeps_to_min_replicas_after_its_filter_and_never_gives_an_empty_quorum() {
    let mut sim = Sim::quorum_of(rules(2), &["a", "b"]);
    sim.detach("b", 2);
    sim.join("n");
    sim.join_as(Member {
        shrink_only: true,
        ..member("a")
    });
    assert_eq!(sim.ids(), None, "a alone, with min_replicas = 2");
    sim.detach("a", 1);
    assert_eq!(sim.ids(), None);
    // Once all members are gone, none is left to shrink to.
    let mut sim = Sim::quorum_of(rules(1), &["a"]);
    sim.detach("a", 1);
    sim.join_as(Member {
        shrink_only: true,
        ..member("n")
    });
    assert_eq!(sim.ids().unwrap(), ["n"]);
}

#[test]
fn shrink_only_is_the_wish_of_a_member_and_a_newcomer_cannot_keep_others_out_with_it() {
    let mut sim = Sim::quorum_of(rules(1), &["a", "b"]);
    sim.join_as(Member {
        shrink_only: true,
        ..member("n")
    });
    sim.join("m");
    sim.join("a");
    sim.join("b");
    assert_eq!(sim.ids().unwrap(), ["a", "b", "m", "n"]);
    // It is a member now.
    sim.join("o");
    sim.join("a");
    sim.join("b");
    sim.join("m");
    sim.join_as(Member {
        shrink_only: true,
        ..member("n")
    });
    assert_eq!(sim.ids().unwrap(), ["a", "b", "m", "n"]);
}

#[test]
fn newcomers_that_wait_under_shrink_only_do_not_take_the_majority_from_the_members() {
    let mut sim = Sim::quorum_of(rules(1), &["a", "b", "c"]);
    for newcomer in ["n1", "n2", "n3", "n4"] {
        sim.join(newcomer);
    }
    sim.detach("c", 3);
    let shrinking = |id: &str| Member {
        shrink_only: true,
        ..member(id)
    };
    sim.join_as(shrinking("a"));
    assert_eq!(sim.ids(), None, "b is healthy: one of two is no majority");
    sim.join_as(shrinking("b"));
    assert_eq!(sim.ids().unwrap(), ["a", "b"]);
}

#[test]
fn l23_a_lone_newcomer_gets_no_quorum_below_min_replicas() {
    let mut sim = Sim::quorum_of(rules(1), &["a"]);
    sim.state.rules.min_replicas = 5;
    sim.detach("a", 1);
    sim.join("n");
    sim.pass(Duration::from_secs(60), &["n"]);
    assert_eq!(sim.ids(), None);
}

#[test]
fn shrink_only_leaves_newcomers_waiting() {
    let mut sim = Sim::quorum_of(rules(1), &["a", "b", "c"]);
    let waiting = sim.join("n");
    sim.detach("c", 3);
    sim.join("a");
    sim.join_as(Member {
        shrink_only: true,
        ..member("b")
    });
    assert_eq!(sim.ids().unwrap(), ["a", "b"]);
    assert_eq!(sim.rejected(), []);
    assert!(sim.state.roster.caller(waiting).is_some());
}

#[test]
fn l24_a_caller_that_went_away_is_in_nobodys_quorum() {
    let mut sim = Sim::new(rules(2));
    let ghost = sim.join("ghost");
    sim.event(Event::Withdraw { ticket: ghost });
    sim.join("a");
    assert_eq!(sim.ids(), None);
    sim.join("b");
    assert_eq!(sim.ids(), None, "the ghost is healthy for a while, but no member");
    sim.pass(Duration::from_secs(6), &["a", "b"]);
    assert_eq!(sim.ids().unwrap(), ["a", "b"]);
}

#[test]
fn l25_heartbeats_and_streams_of_strangers_hold_up_no_running_job() {
    let mut sim = Sim::quorum_of(rules(1), &["a"]);
    let strangers: Vec<String> = (0..100).map(|i| format!("s{i}")).collect();
    sim.beat(&strangers.iter().map(String::as_str).collect::<Vec<_>>());
    sim.attach("loading", 1);
    assert_eq!(sim.healthy(), ["a"]);
    sim.join("a");
    assert_eq!(sim.ids().unwrap(), ["a"]);
}

#[test]
fn a_leave_does_not_abort_what_the_others_are_still_finishing() {
    let mut sim = Sim::quorum_of(rules(1), &["a", "b"]);
    let actions = sim.state.apply(
        Event::Leave {
            replica_id: "b".into(),
            reason: "done".into(),
        },
        sim.now,
    );
    assert!(
        !actions.iter().any(|a| matches!(a, Action::Push { .. })),
        "{actions:?}"
    );
    sim.join("a");
    assert_eq!(sim.ids().unwrap(), ["a"], "and no member waits for it");
}

#[test]
fn l25_who_is_silent_is_forgotten_and_who_leaves_is_out_at_once() {
    let mut sim = Sim::unattached(rules(1), &["a", "b", "c"]);
    sim.event(Event::Leave {
        replica_id: "c".into(),
        reason: "done".into(),
    });
    sim.beat(&["c"]);
    assert!(!sim.is_healthy("c"), "a late heartbeat does not revive it");
    sim.pass(Duration::from_secs(6), &["a"]);
    assert_eq!(sim.healthy(), ["a"]);
    sim.beat(&["b"]);
    assert!(
        sim.is_healthy("b"),
        "a member that was only silent comes back by itself"
    );
}

#[test]
fn a_replica_needs_no_heartbeats_while_its_stream_stands_and_its_time_begins_when_it_ends() {
    let mut sim = Sim::quorum_of(rules(1), &["a", "b"]);
    sim.pass(Duration::from_secs(600), &[]);
    assert_eq!((sim.healthy().len(), sim.pushes().len()), (2, 0));
    // A stream that the lighthouse's own absence broke is no evidence, and its end is the last sign of life.
    let time = Duration::from_secs(60);
    sim.now += time;
    sim.event(Event::Away { time });
    sim.detach("a", 1);
    sim.pass(Duration::from_millis(4_800), &[]);
    assert_eq!(sim.healthy(), ["a", "b"]);
    sim.pass(Duration::from_millis(400), &[]);
    assert_eq!(sim.healthy(), ["b"]);
}

#[test]
fn l26_newcomers_cannot_form_a_quorum_beside_a_working_one() {
    let mut sim = Sim::quorum_of(rules(1), &["a", "b"]);
    for n in ["x", "y", "z"] {
        sim.join(n);
    }
    sim.pass(Duration::from_secs(60), &["a", "b", "x", "y", "z"]);
    assert_eq!(sim.ids(), None);
    assert!(
        sim.reason().contains("waiting for a member of quorum"),
        "{}",
        sim.reason()
    );
    sim.join("a");
    assert_eq!(sim.ids(), None, "b may ask at any moment");
    sim.join("b");
    assert_eq!(sim.ids().unwrap(), ["a", "b", "x", "y", "z"]);
}

#[test]
fn who_is_a_little_late_is_not_left_out_because_others_waited_long() {
    let mut sim = Sim::quorum_of(rules(1), &["a", "b", "c"]);
    sim.join("n");
    sim.pass(Duration::from_secs(60), &["a", "b", "c", "n"]);
    sim.join("a");
    assert_eq!(sim.ids(), None, "2 of 4 are no majority");
    sim.pass(Duration::from_secs(60), &["a", "b", "c", "n"]);
    // Now those who ask can form a quorum, for the first time: the time of c begins.
    sim.join("b");
    assert_eq!(sim.ids(), None);
    sim.pass(Duration::from_millis(9_900), &["a", "b", "c", "n"]);
    assert_eq!(sim.ids(), None);
    sim.pass(Duration::from_millis(200), &["a", "b", "c", "n"]);
    assert_eq!(sim.ids().unwrap(), ["a", "b", "n"]);
}

#[test]
fn a_reason_lists_a_few_ids_and_counts_the_rest() {
    let many: Vec<String> = (0..300).map(|i| format!("replica-{i:03}")).collect();
    let ids: Vec<&str> = many.iter().map(String::as_str).collect();
    let mut sim = Sim::quorum_of(rules(1), &ids);
    sim.join("replica-007");
    let reason = sim.reason();
    assert!(reason.ends_with("replica-016, and 283 more"), "{reason}");
    let long: Vec<String> = (0..12).map(|i| format!("{i:02}{}", "x".repeat(254))).collect();
    let text = listed(long.iter().map(String::as_str));
    assert!(text.len() < 1200 && text.ends_with(", and 9 more"), "{text}");
}

#[test]
fn l27_a_death_is_pushed_to_the_members_at_once_and_the_epoch_is_over() {
    let mut sim = Sim::quorum_of(rules(1), &["a", "b", "c"]);
    sim.detach("b", 2);
    let [(to, event)] = &sim.pushes()[..] else {
        panic!("{:?}", sim.actions)
    };
    assert_eq!(to, &["a", "c"]);
    assert_eq!(
        (event.quorum_id, &event.departed[..]),
        (SEED + 1, &["b".to_string()][..])
    );
    assert!(event.reason.contains("b is gone: its stream broke"), "{event:?}");
}

#[test]
fn l27_a_report_aborts_the_epoch_for_all_and_removes_nobody() {
    let mut sim = Sim::quorum_of(rules(1), &["a", "b"]);
    let report = |id: &str, quorum_id| Event::Report {
        replica_id: id.into(),
        quorum_id,
        reason: "boom".into(),
    };
    sim.event(report("stranger", SEED + 1));
    assert_eq!(sim.pushes(), []);
    sim.event(report("a", SEED));
    assert_eq!(sim.pushes(), [], "an older epoch");
    sim.event(report("a", SEED + 1));
    let [(to, event)] = &sim.pushes()[..] else {
        panic!("{:?}", sim.actions)
    };
    assert_eq!((to.len(), event.departed.len()), (2, 0));
    assert_eq!(event.reason, "a reported: boom");
    sim.event(report("b", SEED + 1));
    assert_eq!(sim.pushes(), [], "said already");
    sim.join("a");
    sim.join("b");
    let quorum = sim.delivered().unwrap();
    assert_eq!(
        (quorum.participants.len(), quorum.quorum_id),
        (2, SEED + 2),
        "the old groups are dead"
    );
}

#[test]
fn a_member_that_reattaches_learns_of_the_abort_it_missed() {
    let mut sim = Sim::quorum_of(rules(1), &["a", "b"]);
    sim.event(Event::Report {
        replica_id: "a".into(),
        quorum_id: SEED + 1,
        reason: "boom".into(),
    });
    sim.attach("b", 9);
    assert_eq!(sim.pushes().len(), 1);
    sim.detach("b", 2);
    assert!(sim.is_healthy("b"), "the break of a replaced stream says nothing");
    sim.detach("b", 9);
    assert!(!sim.is_healthy("b"));
}

#[test]
fn a_waiting_replica_whose_stream_breaks_is_out_of_the_waiting_too() {
    let mut sim = Sim::new(rules(3));
    sim.attach("a", 1);
    let ticket = sim.join("a");
    sim.detach("a", 1);
    assert_eq!(sim.rejected(), [(ticket, ErrorKind::Unavailable)]);
    sim.join("b");
    sim.join("c");
    assert_eq!(sim.ids(), None);
}

#[test]
fn a_newer_life_of_a_name_replaces_the_older_one_and_the_dead_one_cannot_come_back() {
    let mut sim = Sim::quorum_of(rules(1), &["a:1", "b:1"]);
    let old = sim.join("a:1");
    sim.join("a:2");
    assert!(
        sim.rejected().contains(&(old, ErrorKind::Unavailable)),
        "{:?}",
        sim.actions
    );
    assert_eq!(sim.pushes()[0].0, ["b:1"]);
    assert_eq!(sim.pushes()[0].1.departed, ["a:1"]);
    let late = sim.join("a:1");
    assert_eq!(sim.rejected(), [(late, ErrorKind::Conflict)]);
    sim.beat(&["a:1"]);
    sim.join("b:1");
    assert_eq!(sim.ids().unwrap(), ["a:2", "b:1"]);
    // Ids without a name are never incarnations of each other.
    let mut sim = Sim::new(rules(2));
    sim.join(":x");
    sim.join(":y");
    assert_eq!(sim.ids().unwrap(), [":x", ":y"]);
}

#[test]
fn a_newer_call_of_the_same_replica_replaces_its_older_one() {
    let mut sim = Sim::new(rules(2));
    let old = sim.join("a");
    let new = sim.join("a");
    assert_eq!(sim.rejected(), [(old, ErrorKind::Aborted)]);
    sim.event(Event::Withdraw { ticket: old });
    sim.join("b");
    let Some(Action::Deliver { tickets, .. }) = sim.actions.last() else {
        panic!("{:?}", sim.actions)
    };
    assert_eq!(tickets, &[new, new + 1]);
}

#[test]
fn a_replica_whose_heartbeats_stop_while_it_waits_counts_again_when_they_resume() {
    let mut sim = Sim::new(rules(2));
    sim.join("a");
    sim.pass(Duration::from_secs(6), &[]);
    assert_eq!(sim.healthy().len(), 0);
    sim.join("b");
    assert_eq!(sim.ids(), None);
    sim.beat(&["a"]);
    assert_eq!(sim.ids().unwrap(), ["a", "b"]);
}
