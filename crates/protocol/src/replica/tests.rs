//! Ranks that ask, vote, hang, die and leave, seen from their server.

use super::*;
use crate::member::Member;
use ftcore::{Epoch, Step};

struct Rig {
    state: ReplicaState,
    now: Instant,
    tickets: Ticket,
}

const LIMIT: Duration = Duration::from_secs(60);

impl Rig {
    fn new(world_size: u32) -> Self {
        let rules = ReplicaRules {
            replica_id: "a:1".into(),
            world_size,
            progress_timeout: LIMIT,
            grace: Duration::from_secs(3),
        };
        Self {
            state: ReplicaState::new(rules),
            now: Instant::now(),
            tickets: 0,
        }
    }

    /// Two ranks that watch and stand in quorum 7.
    fn in_a_quorum() -> Self {
        let mut rig = Self::new(2);
        for rank in 0..2 {
            let watch = u64::from(rank) + 1;
            rig.event(ReplicaEvent::Watched { rank, watch });
        }
        rig.quorum(Epoch(7));
        rig
    }

    fn event(&mut self, event: ReplicaEvent) -> Vec<ReplicaAction> {
        self.state.apply(event, self.now)
    }

    fn ask(&mut self, rank: u32) -> Vec<ReplicaAction> {
        self.tickets += 1;
        let (ticket, deadline) = (self.tickets, self.now + LIMIT * 100);
        self.event(ReplicaEvent::Ask {
            rank,
            request: RankRequest::default(),
            metadata: format!("at {rank}"),
            deadline,
            ticket,
        })
    }

    fn vote(&mut self, rank: u32, vote: bool) -> Vec<ReplicaAction> {
        self.tickets += 1;
        let (ticket, key) = (
            self.tickets,
            VoteKey {
                quorum_id: Epoch(7),
                step: Step(0),
                attempt: 0,
            },
        );
        self.event(ReplicaEvent::Vote {
            rank,
            key,
            vote,
            ticket,
        })
    }

    fn quorum(&mut self, quorum_id: Epoch) -> Vec<ReplicaAction> {
        let mut asked = Vec::new();
        for rank in 0..self.state.rules.world_size {
            asked = self.ask(rank);
        }
        let Some(ReplicaAction::Ask { call, .. }) = asked.last() else {
            panic!("{asked:?}")
        };
        let participants = vec![Member {
            replica_id: "a:1".into(),
            ..Member::default()
        }];
        let answer = Ok(Arc::new(Quorum {
            quorum_id,
            participants,
            ..Quorum::default()
        }));
        let call = *call;
        self.event(ReplicaEvent::Answered { call, answer })
    }

    fn pass(&mut self, time: Duration) -> Vec<ReplicaAction> {
        self.now += time;
        self.event(ReplicaEvent::Tick)
    }
}

fn failures(actions: &[ReplicaAction]) -> Vec<&str> {
    let all = actions.iter().filter_map(|a| match a {
        ReplicaAction::Fail { reason } => Some(reason.as_str()),
        _ => None,
    });
    all.collect()
}

fn errors(actions: &[ReplicaAction]) -> Vec<ErrorKind> {
    let all = actions.iter().filter_map(|a| match a {
        ReplicaAction::Quorum { answer: Err(e), .. } | ReplicaAction::Decide { answer: Err(e), .. } => {
            Some(e.kind())
        }
        _ => None,
    });
    all.collect()
}

#[test]
fn a_rank_whose_process_ended_takes_its_replica_out_at_once() {
    let mut rig = Rig::in_a_quorum();
    rig.vote(0, true);
    rig.event(ReplicaEvent::Unwatched { rank: 1, watch: 2 });
    let actions = rig.event(ReplicaEvent::Ended { rank: 1, watch: 2 });
    assert_eq!(failures(&actions).len(), 1);
    assert!(failures(&actions)[0].contains("rank 1"), "{actions:?}");
    assert_eq!(
        errors(&actions),
        [ErrorKind::PeerLost],
        "who waits for it is told"
    );
    assert_eq!(errors(&rig.ask(0)), [ErrorKind::PeerLost], "and who asks later");
}

#[test]
fn a_connection_that_comes_back_in_time_is_no_death_and_one_that_does_not_is() {
    let mut rig = Rig::in_a_quorum();
    rig.event(ReplicaEvent::Unwatched { rank: 1, watch: 2 });
    assert_eq!(failures(&rig.pass(Duration::from_secs(2))), [""; 0]);
    rig.event(ReplicaEvent::Watched { rank: 1, watch: 3 });
    assert_eq!(
        failures(&rig.event(ReplicaEvent::Ended { rank: 1, watch: 2 })),
        [""; 0],
        "an older process"
    );
    assert_eq!(failures(&rig.pass(Duration::from_secs(5))), [""; 0]);
    rig.event(ReplicaEvent::Unwatched { rank: 1, watch: 3 });
    let due = rig.state.next_deadline().unwrap();
    assert_eq!(due, rig.now + Duration::from_secs(3));
    assert_eq!(failures(&rig.pass(Duration::from_secs(3))).len(), 1);
}

#[test]
fn a_rank_without_progress_takes_its_replica_out_by_name_until_it_moves() {
    let mut rig = Rig::in_a_quorum();
    rig.vote(0, true);
    rig.now += LIMIT / 2;
    rig.event(ReplicaEvent::Progress { rank: 1 });
    assert_eq!(failures(&rig.pass(LIMIT / 2)), [""; 0], "it moved meanwhile");
    let actions = rig.pass(LIMIT / 2);
    assert!(
        failures(&actions)[0].contains("rank 1 made no progress"),
        "{actions:?}"
    );
    assert_eq!(
        failures(&rig.pass(LIMIT)),
        [""; 0],
        "said once; rank 0 waits and is not blamed"
    );
    // It moves again: the replica goes on where it was.
    let actions = rig.vote(1, true);
    assert_eq!(actions.len(), 2, "{actions:?}");
    assert!(matches!(
        rig.quorum(Epoch(8))[..],
        [ReplicaAction::Quorum { answer: Ok(_), .. }, ..]
    ));
}

#[test]
fn nothing_is_expected_of_a_rank_that_loads_waits_or_has_left() {
    let mut rig = Rig::new(2);
    rig.event(ReplicaEvent::Watched { rank: 1, watch: 2 });
    assert_eq!(failures(&rig.pass(LIMIT * 10)), [""; 0], "it loads");
    rig.ask(0);
    assert_eq!(
        failures(&rig.pass(LIMIT * 10)),
        [""; 0],
        "rank 0 waits, rank 1 loads"
    );
    let mut rig = Rig::in_a_quorum();
    rig.event(ReplicaEvent::Left { rank: 1 });
    rig.event(ReplicaEvent::Unwatched { rank: 1, watch: 2 });
    rig.event(ReplicaEvent::Ended { rank: 1, watch: 2 });
    rig.vote(0, true);
    assert_eq!(failures(&rig.pass(LIMIT * 10)), [""; 0]);
}

#[test]
fn a_vote_that_another_rank_will_not_join_ends_at_once() {
    let mut rig = Rig::in_a_quorum();
    rig.vote(0, true);
    assert_eq!(errors(&rig.ask(1)), [ErrorKind::Aborted]);
    let mut rig = Rig::in_a_quorum();
    rig.ask(1);
    assert_eq!(errors(&rig.vote(0, true)), [ErrorKind::Aborted]);
}

#[test]
fn who_gives_up_or_closes_ends_the_calls_of_all_ranks() {
    let mut rig = Rig::in_a_quorum();
    rig.ask(0);
    let why = "no such dtype".to_string();
    let actions = rig.event(ReplicaEvent::GiveUp {
        rank: 1,
        why,
        ticket: 99,
    });
    assert_eq!(errors(&actions), [ErrorKind::Unsupported]);
    assert!(failures(&actions)[0].contains("no such dtype"));
    let mut rig = Rig::in_a_quorum();
    rig.ask(0);
    let why = Error::new(ErrorKind::Mismatch, "left");
    let actions = rig.event(ReplicaEvent::Close { why });
    assert_eq!(
        (errors(&actions), failures(&actions)),
        (vec![ErrorKind::Mismatch], vec![])
    );
    assert!(matches!(actions.last(), Some(ReplicaAction::EndWatches)));
}

#[test]
fn an_abort_is_passed_on_once_and_again_when_it_names_more_who_are_gone() {
    let mut rig = Rig::in_a_quorum();
    let abort = |quorum_id, departed: &[&str]| {
        let departed = departed.iter().map(ToString::to_string).collect();
        ReplicaEvent::Aborted(AbortEpoch {
            quorum_id,
            reason: "why".into(),
            departed,
        })
    };
    for (event, pushed) in [
        (abort(Epoch(7), &[]), true),
        (abort(Epoch(7), &[]), false),
        (abort(Epoch(7), &["b"]), true),
        (abort(Epoch(6), &["c"]), false),
        (abort(Epoch(8), &[]), true),
    ] {
        let actions = rig.event(event.clone());
        assert_eq!(
            matches!(actions[..], [ReplicaAction::Push(_)]),
            pushed,
            "{event:?}"
        );
    }
    let report = |quorum_id| ReplicaEvent::Reported {
        rank: 1,
        quorum_id,
        reason: "broke".into(),
    };
    assert!(rig.event(report(Epoch(6))).is_empty(), "of another epoch");
}

fn ordered(rig: &mut Rig, kind: OrderKind) -> Vec<ReplicaAction> {
    rig.event(ReplicaEvent::Ordered(Order {
        kind,
        reason: "the host is repaired".into(),
    }))
}

fn drains(actions: &[ReplicaAction]) -> Vec<bool> {
    let answers = actions.iter().filter_map(|a| match a {
        ReplicaAction::Quorum { answer, .. } => Some(answer.as_ref().unwrap().draining),
        _ => None,
    });
    answers.collect()
}

#[test]
fn all_ranks_learn_of_a_drain_with_the_same_quorum_also_if_an_answer_is_lost() {
    let mut rig = Rig::new(2);
    let ask = |rig: &mut Rig, rank: u32, question: i64| {
        rig.tickets += 1;
        let (ticket, deadline) = (rig.tickets, rig.now + LIMIT);
        rig.event(ReplicaEvent::Ask {
            rank,
            request: RankRequest {
                question,
                ..RankRequest::default()
            },
            metadata: String::new(),
            deadline,
            ticket,
        })
    };
    let answer = |rig: &mut Rig, actions: &[ReplicaAction]| {
        let Some(ReplicaAction::Ask { call, .. }) = actions.last() else {
            panic!("{actions:?}")
        };
        let quorum = Quorum {
            quorum_id: Epoch(7),
            participants: vec![Member {
                replica_id: "a:1".into(),
                ..Member::default()
            }],
            ..Quorum::default()
        };
        let answer = Ok(Arc::new(quorum));
        rig.event(ReplicaEvent::Answered { call: *call, answer })
    };
    ask(&mut rig, 0, 1);
    let asked = ask(&mut rig, 1, 1);
    let told = answer(&mut rig, &asked);
    assert_eq!(drains(&told), [false, false]);
    ordered(&mut rig, OrderKind::Drain);
    assert_eq!(
        drains(&ask(&mut rig, 1, 1)),
        [false],
        "the same question, as rank 0 was answered"
    );
    ask(&mut rig, 0, 2);
    let asked = ask(&mut rig, 1, 2);
    let told = answer(&mut rig, &asked);
    assert_eq!(drains(&told), [true, true]);
    assert_eq!(drains(&ask(&mut rig, 0, 2)), [true]);
}

#[test]
fn an_evicted_replica_ends_for_all_its_ranks_with_the_operators_words_and_a_killed_one_by_force() {
    let mut rig = Rig::in_a_quorum();
    rig.ask(0);
    let told = ordered(&mut rig, OrderKind::Evict);
    let [ReplicaAction::Cancel { .. } | ReplicaAction::Quorum { .. }, ..] = &told[..] else {
        panic!("{told:?}")
    };
    let over = told
        .iter()
        .any(|a| matches!(a, ReplicaAction::Push(event) if event.quorum_id == Epoch(7)));
    assert!(
        over,
        "a rank that connects or reduces waits for no other: {told:?}"
    );
    for actions in [told, rig.ask(1)] {
        let error = actions.iter().find_map(|a| match a {
            ReplicaAction::Quorum { answer: Err(e), .. } => Some(e.clone()),
            _ => None,
        });
        let error = error.unwrap();
        assert_eq!(error.kind(), ErrorKind::Conflict);
        assert!(error.message().contains("the host is repaired"), "{error}");
    }
    assert!(rig.state.is_out());
    let told = ordered(&mut Rig::in_a_quorum(), OrderKind::Kill);
    assert!(
        matches!(&told[..], [ReplicaAction::Kill(why)] if why.contains("killed by the operator")),
        "{told:?}"
    );
}

#[test]
fn the_ranks_of_a_large_quorum_get_their_own_parts_and_a_rank_without_one_learns_who_is_at_fault() {
    let mut rig = Rig::new(2);
    let mut asked = Vec::new();
    for rank in 0..rig.state.rules.world_size {
        asked = rig.ask(rank);
    }
    let Some(ReplicaAction::Ask { call, request, .. }) = asked.last() else {
        panic!("{asked:?}")
    };
    assert!(!request.own_part, "a rank that says nothing needs the list");
    let part = |store: &str| QuorumResult {
        quorum_id: Epoch(5),
        replica_rank: 7000,
        replica_world_size: 16_384,
        store_address: store.into(),
        ..QuorumResult::default()
    };
    let call = *call;
    let parts = [part("store-of-rank-0")].into();
    let answers = rig.event(ReplicaEvent::Placed { call, parts });
    assert_eq!(rig.state.last_quorum(), (Epoch(5), 16_384));
    let mut answers = answers.into_iter().filter_map(|a| match a {
        ReplicaAction::Quorum { answer, .. } => Some(answer),
        _ => None,
    });
    assert_eq!(answers.next().unwrap().unwrap(), part("store-of-rank-0"));
    let missing = answers.next().unwrap().unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::Protocol);
    assert!(missing.to_string().contains("none for its rank 1"), "{missing}");
}
