//! A rank that asks, connects, heals, votes and repeats, step by step.

use super::*;
use ftcore::Epoch;

fn rank() -> Rank {
    Rank::new(RankRules {
        min_replicas: 1,
        max_contributors: None,
        init_sync: true,
        max_retries: None,
    })
}

/// A quorum of two in which this replica is at `step`, or heals to it.
fn answer(quorum_id: u64, step: i64, heal: bool) -> QuorumResult {
    QuorumResult {
        quorum_id: Epoch(quorum_id),
        replica_world_size: 2,
        max_step: Step(step),
        heal,
        replica_ids: vec!["a".into(), "b".into()],
        contributor_rank: Some(0).filter(|_| !heal),
        contributor_world_size: 2 - u32::from(heal),
        ..QuorumResult::default()
    }
}

/// Goes through a quorum in which everything comes up.
fn come_up(rank: &mut Rank, answer: QuorumResult) {
    let mut next = rank.answered(answer, None);
    loop {
        next = match next {
            Next::Offer { .. } => rank.offered(Ok(())),
            Next::Configure => rank.configured(Ok(()), None),
            Next::Heal => rank.healed(Ok(Lineage::from_peer("peer"))),
            Next::Ready => return,
            other => panic!("{other:?}"),
        };
    }
}

#[test]
fn l03_the_step_advances_with_the_state_and_not_before_it() {
    let mut r = rank();
    r.start(false);
    r.answered(answer(5, 9, true), None);
    r.offered(Ok(()));
    r.configured(Ok(()), None);
    let broken = Error::new(ErrorKind::PeerLost, "the source is gone");
    assert!(matches!(r.healed(Err(broken)), Next::Lost(_)));
    assert_eq!((r.step().0, r.contribution().0), (0, None));
    assert!(r.vote(None, None).unwrap().against.is_some());
    r.decided(Some(false)).unwrap();
    r.start(true);
    come_up(&mut r, answer(6, 9, true));
    assert_eq!((r.step().0, r.lineage().as_str()), (9, "peer"));
}

#[test]
fn a_rank_that_cannot_heal_votes_on_the_step_that_the_others_of_its_replica_healed_to() {
    let mut ranks = [rank(), rank()];
    let keys = ranks.each_mut().map(|r| {
        r.start(false);
        r.answered(answer(5, 9, true), None);
        r.offered(Ok(()));
        r.key()
    });
    come_up(&mut ranks[0], answer(5, 9, true));
    let e = Error::new(ErrorKind::PeerLost, "gone");
    ranks[1].configured(Err(e), None);
    assert_eq!(ranks.each_mut().map(|r| r.vote(None, None).unwrap().key), keys);
}

#[test]
fn a_rank_whose_state_is_in_use_connects_first_and_votes_only_after_its_snapshot_or_its_recovery() {
    let source = QuorumResult {
        serves_replica_ranks: vec![1],
        ..answer(5, 9, false)
    };
    let mut r = rank();
    r.restore(Step(9), Lineage::from_peer("peer"), 0).unwrap();
    r.start(false);
    assert!(matches!(
        r.answered(source, None),
        Next::Offer { publish: true, .. }
    ));
    assert!(matches!(r.connect_first(), Next::Configure));
    let publish = r.configured(Ok(()), None);
    assert!(matches!(publish, Next::Offer { publish: true, .. }));
    // Its gradients may be on their way by now.
    assert_eq!(r.contribution().0, Some(0));
    assert_eq!(r.vote(None, Some(1)).unwrap_err().kind(), ErrorKind::InvalidState);
    assert!(matches!(r.offered(Ok(())), Next::Ready));
    assert!(r.vote(None, Some(1)).unwrap().against.is_none());
    r.decided(Some(true)).unwrap();
    // In the same epoch there is nothing to connect.
    r.start(false);
    let again = QuorumResult {
        serves_spares: true,
        ..answer(5, 10, false)
    };
    r.answered(again, None);
    assert!(matches!(r.connect_first(), Next::Offer { publish: true, .. }));

    let mut behind = rank();
    behind.start(false);
    behind.answered(answer(5, 9, true), None);
    assert!(matches!(behind.connect_first(), Next::Configure));
    assert!(matches!(behind.configured(Ok(()), None), Next::Offer { .. }));
    assert!(matches!(behind.offered(Ok(())), Next::Heal));
    assert_eq!((behind.step().0, behind.contribution().0), (0, None));
    assert_eq!(
        behind.vote(None, Some(1)).unwrap_err().kind(),
        ErrorKind::InvalidState
    );
    behind.healed(Ok(Lineage::from_peer("peer")));
    assert_eq!(behind.vote(None, Some(1)).unwrap().key.step, Step(9));
}

#[test]
fn what_a_rank_is_told_while_its_copy_goes_through_a_quorum_is_not_lost() {
    let mut r = rank();
    let mut copy = r.clone();
    r.set_last(true);
    r.set_shrink_only(true);
    copy.keep_wishes(&r);
    let asked = copy.start(false);
    assert!(asked.is_last && asked.shrink_only);
}

#[test]
fn a_rank_that_did_not_take_over_what_its_replica_was_to_at_its_own_step_holds_nothing_until_it_heals() {
    let mut r = rank();
    r.start(false);
    let first = QuorumResult {
        batches_committed: 40,
        ..answer(5, 9, true)
    };
    come_up(&mut r, first);
    r.vote(None, None).unwrap();
    r.decided(Some(false)).unwrap();
    // Another rank did not get the state, so both heal again, and now it is this one that does not.
    assert_eq!(
        (r.start(false).step.0, r.start(false).lineage.as_str()),
        (9, "peer")
    );
    let again = |id| QuorumResult {
        lineage: "peer".into(),
        batches_committed: 40,
        ..answer(id, 9, true)
    };
    assert_eq!(r.start(false).batches_committed, 40);
    r.answered(again(6), None);
    r.offered(Ok(()));
    r.configured(Err(Error::new(ErrorKind::PeerLost, "gone")), None);
    r.vote(None, None).unwrap();
    r.decided(Some(false)).unwrap();
    for _ in 0..2 {
        let request = r.start(true);
        assert_eq!(
            (request.step.0, request.lineage.as_str(), request.healed),
            (0, "", false)
        );
        assert_eq!(
            request.batches_committed, 0,
            "the count is the state's, which it does not hold"
        );
    }
    come_up(&mut r, again(7));
    let request = r.start(false);
    assert_eq!((request.step.0, request.batches_committed), (9, 40));
}

#[test]
fn a_rank_whose_history_is_not_its_replicas_ends_where_nobody_is_left_to_heal_from() {
    let mut r = rank();
    r.start(false);
    let sync = QuorumResult {
        lineage: "a".into(),
        ..answer(5, 0, true)
    };
    r.answered(sync, None);
    r.offered(Ok(()));
    r.configured(Ok(()), None);
    r.healed(Ok(Lineage::from_peer("a")));
    r.vote(None, None).unwrap();
    r.decided(Some(false)).unwrap();
    r.start(false);
    let alone = QuorumResult {
        lineage: "b".into(),
        ..answer(6, 0, false)
    };
    assert!(matches!(r.answered(alone, None), Next::End(e) if e.kind() == ErrorKind::InvalidState));
}

#[test]
fn who_healed_says_so_until_it_commits() {
    let mut r = rank();
    assert!(!r.start(false).healed);
    come_up(&mut r, answer(5, 9, true));
    assert_eq!(r.contribution().0, None);
    r.vote(None, Some(1)).unwrap();
    r.decided(Some(false)).unwrap();
    assert!(r.start(false).healed);
    come_up(&mut r, answer(6, 9, false));
    r.vote(None, Some(1)).unwrap();
    r.decided(Some(true)).unwrap();
    assert!(!r.start(false).healed);
}

#[test]
fn the_source_of_an_initial_sync_has_the_history_of_those_that_heal_from_it() {
    let initial = |heal| QuorumResult {
        lineage: "initial".into(),
        ..answer(5, 0, heal)
    };
    let mut source = rank();
    source.start(false);
    come_up(&mut source, initial(false));
    let mut other = rank();
    other.start(false);
    other.answered(initial(true), None);
    other.offered(Ok(()));
    other.configured(Ok(()), None);
    other.healed(Ok(source.lineage().clone()));
    // Also if the step has to be done again: the state is the initial one, whichever members the next quorum has.
    for r in [&mut source, &mut other] {
        r.vote(None, Some(1)).unwrap();
        r.decided(Some(false)).unwrap();
        assert_eq!(r.start(false).lineage, "initial");
        come_up(
            r,
            QuorumResult {
                quorum_id: Epoch(6),
                ..initial(false)
            },
        );
        r.vote(None, Some(2)).unwrap();
        r.decided(Some(true)).unwrap();
    }
    assert_eq!(source.lineage(), other.lineage());
    assert_eq!(
        source.lineage(),
        &Lineage::from_peer("initial").after(Epoch(6), Step(0))
    );
}

#[test]
fn batches_are_counted_where_something_was_reduced_and_go_with_the_state_that_heals() {
    let mut r = rank();
    let commit = |r: &mut Rank, answer: QuorumResult, reduced: Option<u32>, yes| {
        r.start(false);
        come_up(r, answer);
        r.vote(None, reduced).unwrap();
        r.decided(Some(yes)).unwrap();
        r.batches_committed()
    };
    assert_eq!(commit(&mut r, answer(5, 0, false), Some(2), true), 2);
    assert_eq!(
        commit(&mut r, answer(5, 1, false), Some(2), false),
        2,
        "a lost attempt"
    );
    assert_eq!(
        commit(&mut r, answer(6, 1, false), None, true),
        2,
        "a closing round"
    );
    let ahead = QuorumResult {
        batches_committed: 40,
        ..answer(7, 9, true)
    };
    assert_eq!(commit(&mut r, ahead, Some(1), true), 41);
    assert_eq!(r.start(false).batches_committed, 41);
    let mut saved = rank();
    saved.restore(Step(3), Lineage::default(), 17).unwrap();
    assert_eq!(saved.start(false).batches_committed, 17);
    // It may be looked for beside the caller's call by now, which would not hear of it.
    let late = saved.restore(Step(4), Lineage::default(), 18).unwrap_err();
    assert_eq!(late.kind(), ErrorKind::InvalidState, "{late}");
    assert_eq!((saved.step(), saved.batches_committed()), (Step(3), 17));
}

#[test]
fn inv4_a_copy_that_was_saved_and_restored_is_one_still() {
    let mut r = rank();
    r.restore(Step(3), Lineage::from_peer("three"), 6).unwrap();
    r.set_healed();
    assert!(r.start(false).healed);
    come_up(&mut r, answer(5, 3, false));
    r.vote(None, Some(2)).unwrap();
    r.decided(Some(true)).unwrap();
    assert!(!r.start(false).healed);
}

#[test]
fn more_lost_attempts_in_a_row_than_max_retries_end_the_run_and_a_commit_begins_anew() {
    let mut r = Rank::new(RankRules {
        max_retries: Some(2),
        ..RankRules::default()
    });
    let mut attempt = |n: u64, decision| {
        r.start(false);
        let quorum = answer(n, r.step().0, false);
        come_up(&mut r, quorum);
        r.vote(None, Some(1)).unwrap();
        r.decided(decision)
    };
    for (n, decision) in (5..).zip([Some(false), None, Some(true), Some(false), None]) {
        attempt(n, decision).unwrap();
    }
    let e = attempt(20, Some(false)).unwrap_err();
    assert!(!e.is_retryable(), "{e}");
    assert!(
        e.message().contains("step 1") && e.message().contains("max_retries is 2"),
        "{e}"
    );
}

#[test]
fn an_epoch_that_goes_back_or_has_broken_is_a_lost_attempt_and_never_configured_again() {
    let mut r = rank();
    r.start(false);
    come_up(&mut r, answer(7, 0, false));
    r.vote(None, None).unwrap();
    r.decided(Some(true)).unwrap();
    for (id, broken) in [(6, None), (7, Some("gone".to_string()))] {
        r.start(false);
        assert!(matches!(r.answered(answer(id, 1, false), broken), Next::Lost(e) if e.is_retryable()));
        assert!(r.vote(None, None).unwrap().against.is_some());
        r.decided(Some(false)).unwrap();
    }
    assert_eq!(r.epoch(), Some(Epoch(7)));
    assert_eq!(r.start(false).commit_failures, 2);
}

#[test]
fn only_what_is_wrong_here_ends_the_run() {
    for (kind, ends) in [
        (ErrorKind::InvalidArgument, true),
        (ErrorKind::Unsupported, true),
        (ErrorKind::Protocol, false),
        (ErrorKind::Corrupt, false),
    ] {
        let mut r = rank();
        r.start(false);
        r.answered(answer(5, 0, false), None);
        r.offered(Ok(()));
        let next = r.configured(Err(Error::new(kind, "why")), None);
        assert_eq!(matches!(next, Next::End(_)), ends, "{kind:?}");
    }
    let theirs = blame_peer(Error::invalid("no port in 'x'"), "b:1");
    assert_eq!(theirs.kind(), ErrorKind::Protocol);
    assert!(
        theirs.message().contains("b:1") && theirs.message().contains("no port"),
        "{theirs}"
    );
}

#[test]
fn a_spare_fetches_and_asks_again_and_after_three_times_it_wants_to_be_a_member() {
    let mut r = rank();
    for step in [4, 9, 14] {
        assert_eq!(r.start(false).joining, Joining::Outside);
        let spare = QuorumResult {
            spare: true,
            ..answer(5, step, true)
        };
        assert!(matches!(r.answered(spare, None), Next::Fetch));
        assert_eq!((r.in_step(), r.epoch()), (false, None), "it is in no epoch");
        let lineage = Lineage::default().after(Epoch(5), Step(step));
        assert!(matches!(r.fetched(Ok(lineage)), Next::Ask));
        assert_eq!(r.step().0, step);
    }
    assert_eq!(r.start(false).joining, Joining::Now);
    // A member that lost the step is not sent out again; one that committed is.
    come_up(&mut r, answer(6, 16, true));
    r.vote(None, Some(1)).unwrap();
    r.decided(Some(false)).unwrap();
    assert_eq!(r.start(false).joining, Joining::Now);
    come_up(&mut r, answer(7, 16, false));
    r.vote(None, Some(1)).unwrap();
    r.decided(Some(true)).unwrap();
    assert_eq!(r.start(false).joining, Joining::Outside);
}

#[test]
fn one_that_joins_at_once_never_asks_to_be_a_spare() {
    let mut r = rank();
    r.set_joins_at_once(true);
    assert_eq!(r.start(false).joining, Joining::Now);
    r.set_joins_at_once(false);
    assert_eq!(r.start(false).joining, Joining::Outside);
}

#[test]
fn a_spare_that_gets_no_state_loses_no_vote() {
    let mut r = rank();
    r.start(false);
    let spare = QuorumResult {
        spare: true,
        ..answer(5, 4, true)
    };
    r.answered(spare, None);
    let gone = Error::new(ErrorKind::PeerLost, "all sources are gone");
    assert!(matches!(r.fetched(Err(gone)), Next::Ask));
    assert_eq!((r.step().0, r.commit_failures()), (0, 0));
}

#[test]
fn inv5_a_spare_whose_state_was_written_in_part_asks_for_no_quorum_with_it() {
    use crate::training::{RoundRules, Rounds, Steps};
    let rules = RoundRules {
        round_steps: 2,
        delay: 0,
        eager: false,
        last: None,
    };
    let broken = || Err(Error::new(ErrorKind::Io, "the device is gone"));
    let loads = [
        Steps::<u64>::new(None, false).loaded(broken()),
        Rounds::<u64>::new(rules).loaded(0, broken()),
    ];
    for load in loads {
        let mut r = rank();
        r.start(false);
        let spare = QuorumResult {
            spare: true,
            ..answer(5, 4, true)
        };
        r.answered(spare, None);
        let Next::End(e) = r.fetched(load.map(|()| Lineage::default())) else {
            panic!("it asks again");
        };
        assert_eq!(e.kind(), ErrorKind::InvalidState);
        assert!(e.message().contains("the device is gone"), "{e}");
    }
}

#[test]
fn min_replicas_counts_members_and_a_step_without_contributors_does_not_commit() {
    let mut r = Rank::new(RankRules {
        min_replicas: 2,
        ..RankRules::default()
    });
    r.start(false);
    come_up(&mut r, answer(5, 3, true));
    assert!(
        r.vote(None, Some(1)).unwrap().against.is_none(),
        "the healed one counts as a member"
    );
    r.decided(Some(false)).unwrap();
    r.start(false);
    come_up(&mut r, answer(6, 3, false));
    assert!(r.vote(None, Some(0)).unwrap().against.is_some());
    r.decided(Some(false)).unwrap();
    r.start(false);
    let alone = QuorumResult {
        replica_world_size: 1,
        ..answer(7, 3, false)
    };
    come_up(&mut r, alone);
    let against = r.vote(None, Some(1)).unwrap().against.unwrap();
    assert!(against.message().contains("min_replicas is 2"), "{against}");
}

#[test]
fn a_step_that_reduces_nothing_meets_at_a_barrier_unless_its_epoch_did_not_come_up() {
    let mut r = rank();
    assert!(!r.needs_barrier(false));
    r.start(false);
    come_up(&mut r, answer(5, 0, false));
    assert!(r.needs_barrier(false) && !r.needs_barrier(true));
    r.vote(None, None).unwrap();
    assert!(!r.needs_barrier(false));
    r.decided(Some(true)).unwrap();
    r.start(false);
    assert!(matches!(r.answered(answer(4, 1, false), None), Next::Lost(_)));
    assert!(!r.needs_barrier(false));
}

#[test]
fn without_a_quorum_there_is_nothing_to_vote_on() {
    let mut r = rank();
    assert_eq!(r.vote(None, None).unwrap_err().kind(), ErrorKind::InvalidState);
    r.start(false);
    assert_eq!(r.vote(None, None).unwrap_err().kind(), ErrorKind::InvalidState);
}
