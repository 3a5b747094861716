//! Who heals from whom, who contributes, and that a part is what the whole list gives.

use super::*;
use ftcore::Epoch;
use proptest::prelude::*;

fn quorum(members: &[(i64, &str)]) -> Quorum {
    let member = |(i, (step, lineage)): (usize, &(i64, &str))| Member {
        replica_id: format!("replica_{i}"),
        address: format!("addr_{i}"),
        store_address: format!("store_addr_{i}"),
        step: Step(*step),
        lineage: (*lineage).to_string(),
        world_size: 1,
        ..Member::default()
    };
    Quorum {
        quorum_id: Epoch(1),
        participants: members.iter().enumerate().map(member).collect(),
        ..Quorum::default()
    }
}

fn steps(steps: &[i64]) -> Quorum {
    quorum(&steps.iter().map(|s| (*s, "")).collect::<Vec<_>>())
}

fn at(quorum: &Quorum, replica: usize, group_rank: u32, init_sync: bool) -> QuorumResult {
    assign(&format!("replica_{replica}"), group_rank, quorum, init_sync).unwrap()
}

#[test]
fn replicas_behind_are_spread_over_those_up_to_date_as_torchft_does() {
    let q = steps(&[0, 1, 0, 1, 0]);
    let zero = at(&q, 0, 0, true);
    assert!(zero.heal);
    assert_eq!(zero.recover_src_manager_address, "addr_1");
    assert_eq!((zero.replica_rank, zero.recover_src_replica_rank), (0, Some(1)));
    assert_eq!(zero.recover_dst_replica_ranks, Vec::<u32>::new());
    assert_eq!(zero.max_replica_rank, None);
    let one = at(&q, 1, 0, true);
    assert!(!one.heal);
    assert_eq!(one.recover_src_manager_address, "");
    assert_eq!(one.recover_dst_replica_ranks, vec![0, 4]);
    assert_eq!(one.max_replica_rank, Some(0));
    assert_eq!(at(&q, 3, 0, true).recover_dst_replica_ranks, vec![2]);
    assert_eq!(at(&q, 1, 1, true).recover_dst_replica_ranks, vec![2]);
    assert_eq!(at(&q, 3, 1, true).recover_dst_replica_ranks, vec![0, 4]);
}

#[test]
fn a_replica_that_holds_nothing_any_more_gives_the_others_no_count_of_batches() {
    use crate::rank::{Next, Rank, RankRules};
    let mut rank = Rank::new(RankRules::default());
    rank.restore(Step(7), Lineage::from_peer("seven"), 40).unwrap();
    // It was to take over what another member holds at its own step, and did not.
    rank.start(false);
    let lost = QuorumResult {
        quorum_id: Epoch(5),
        max_step: Step(7),
        lineage: "seven".into(),
        heal: true,
        ..QuorumResult::default()
    };
    assert!(matches!(rank.answered(lost, None), Next::Offer { .. }));
    let asks = rank.start(true);
    let mut first = steps(&[0, 0, 0]);
    let last = &mut first.participants[2];
    (last.step, last.lineage, last.batches_committed) = (asks.step, asks.lineage, asks.batches_committed);
    let told = at(&first, 1, 0, true);
    assert_eq!((told.heal, told.max_step.0, told.batches_committed), (true, 0, 0));
}

#[test]
fn a_replica_heals_from_several_members_but_never_from_two_first_states() {
    let q = steps(&[0, 7, 7, 7, 7]);
    let ranks = |r: &QuorumResult| {
        r.recover_sources
            .iter()
            .map(|s| s.replica_rank)
            .collect::<Vec<_>>()
    };
    assert_eq!(ranks(&at(&q, 0, 0, true)), [1, 2, 3]);
    assert_eq!(at(&q, 0, 0, true).recover_sources[1].manager_address, "addr_2");
    let serving: Vec<_> = (1..5)
        .map(|i| at(&q, i, 0, true).serves_replica_ranks.len())
        .collect();
    assert_eq!(
        serving,
        [1, 1, 1, 0],
        "only those that are read from pay for a copy"
    );
    // At step 0 every replica has its own first state: one of them counts.
    let start = steps(&[0, 0, 0]);
    assert_eq!(ranks(&at(&start, 1, 0, true)), [0]);
    assert_eq!(at(&start, 2, 0, true).serves_replica_ranks, Vec::<u32>::new());
}

#[test]
fn all_ranks_of_a_replica_have_the_same_sources_and_those_publish_for_each() {
    let q = steps(&[0, 7, 7, 7, 7, 7, 3]);
    for replica in [0, 6] {
        let of = |group_rank| at(&q, replica, group_rank, true).recover_sources;
        assert!((1..6).all(|group_rank| of(group_rank) == of(0)), "{replica}");
    }
    for group_rank in 0..6 {
        let healing: Vec<_> = [0, 6].map(|i| at(&q, i, group_rank, true)).into();
        for source in 1..6 {
            let serves = at(&q, source, group_rank, true).serves_replica_ranks;
            let wanted: Vec<u32> = healing
                .iter()
                .filter(|r| {
                    r.recover_sources
                        .iter()
                        .any(|s| s.replica_rank as usize == source)
                })
                .map(|r| r.replica_rank)
                .collect();
            assert_eq!(serves, wanted, "source {source}, rank {group_rank}");
        }
    }
}

#[test]
fn a_spare_gets_sources_and_no_place_and_its_sources_publish() {
    let mut q = steps(&[7, 7, 7, 7]);
    q.spares = vec![
        Member {
            replica_id: "x".into(),
            ..Member::default()
        },
        Member {
            replica_id: "y".into(),
            ..Member::default()
        },
    ];
    let y = assign("y", 0, &q, true).unwrap();
    assert!(y.spare && y.heal && y.contributor_rank.is_none());
    assert_eq!((y.replica_world_size, y.max_step.0), (4, 7));
    let ranks: Vec<u32> = y.recover_sources.iter().map(|s| s.replica_rank).collect();
    assert_eq!(
        (ranks, y.recover_src_manager_address.as_str()),
        (vec![1, 2, 3], "addr_1")
    );
    q.spares.truncate(1);
    let serves: Vec<bool> = (0..4).map(|i| at(&q, i, 0, true).serves_spares).collect();
    assert_eq!(serves, [true, true, true, false]);
    assert!((0..4).all(|i| !at(&q, i, 0, true).spare && at(&q, i, 0, true).contributor_world_size == 4));
    q.spares.clear();
    q.fetching = 1;
    assert!(at(&q, 0, 0, true).keeps_snapshot && !at(&q, 0, 0, true).serves_spares);
}

#[test]
fn the_meeting_store_is_spread_by_group_rank() {
    let q = steps(&[2, 2]);
    assert_eq!(at(&q, 0, 0, true).store_address, "store_addr_0");
    assert_eq!(at(&q, 0, 1, true).store_address, "store_addr_1");
    assert_eq!(at(&q, 1, 2, true).store_address, "store_addr_0");
}

#[test]
fn without_init_sync_nobody_heals_at_step_0() {
    let q = steps(&[0, 0]);
    for (replica, group_rank) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let r = at(&q, replica, group_rank, false);
        assert!(!r.heal && r.recover_dst_replica_ranks.is_empty());
        assert_eq!(r.max_world_size, 2);
    }
}

#[test]
fn l11_every_group_rank_takes_its_initial_state_from_the_same_replica() {
    let q = steps(&[0, 0, 0]);
    for group_rank in 0..4 {
        assert_eq!(at(&q, 0, group_rank, true).recover_dst_replica_ranks, vec![1, 2]);
        assert_eq!(at(&q, 1, group_rank, true).recover_src_replica_rank, Some(0));
        assert_eq!(at(&q, 2, group_rank, true).recover_src_replica_rank, Some(0));
        assert_eq!(at(&q, 2, group_rank, true).store_address, "store_addr_0");
    }
}

#[test]
fn a_member_with_another_history_at_the_same_step_heals_and_ties_go_to_the_lowest_id() {
    let q = quorum(&[(5, "b"), (5, "a"), (5, "a"), (5, ""), (4, "b")]);
    assert_eq!(at(&q, 1, 0, true).lineage, "a");
    assert!(at(&q, 0, 0, true).heal, "the other history");
    assert!(!at(&q, 3, 0, true).heal, "an old peer that tells no history");
    assert!(at(&q, 4, 0, true).heal, "behind");
    assert_eq!(at(&q, 1, 0, true).max_world_size, 3);
    let tie = quorum(&[(5, "z"), (5, "a")]);
    assert_eq!(at(&tie, 0, 0, true).lineage, "z");
    assert!(at(&tie, 1, 0, true).heal);
}

/// Which replicas contribute, as each of them computes it.
fn contributors(q: &Quorum) -> Vec<usize> {
    let all: Vec<_> = (0..q.participants.len()).map(|i| at(q, i, 0, true)).collect();
    let those: Vec<_> = (0..all.len())
        .filter(|&i| all[i].contributor_rank.is_some())
        .collect();
    for (place, &i) in those.iter().enumerate() {
        assert_eq!(all[i].contributor_rank, Some(u32::try_from(place).unwrap()));
    }
    let number = u32::try_from(those.len()).unwrap();
    assert!(all.iter().all(|r| r.contributor_world_size == number));
    those
}

fn with_healed(mut q: Quorum, healed: &[usize]) -> Quorum {
    for &i in healed {
        q.participants[i].healed = true;
    }
    q
}

#[test]
fn who_healed_into_a_step_stands_aside_in_every_attempt_at_it() {
    assert_eq!(contributors(&steps(&[7, 7, 6])), [0, 1], "it heals now");
    assert_eq!(
        contributors(&with_healed(steps(&[7, 7, 7]), &[2])),
        [0, 1],
        "it healed in an attempt before"
    );
    assert_eq!(
        contributors(&with_healed(steps(&[7, 7]), &[0, 1])),
        [0, 1],
        "copies are all that is left"
    );
    assert_eq!(
        contributors(&with_healed(steps(&[7, 6]), &[0])),
        [0],
        "a copy of the copy does not count twice"
    );
}

#[test]
fn those_that_contribute_close_the_run_and_who_healed_into_the_step_has_no_say() {
    let closes = |steps_of: &[i64], healed: &[usize], last: &[usize]| {
        let mut q = with_healed(steps(steps_of), healed);
        for &i in last {
            q.participants[i].is_last = true;
        }
        let told: Vec<bool> = (0..steps_of.len()).map(|i| at(&q, i, 0, true).closes).collect();
        assert!(told.iter().all(|t| *t == told[0]), "{told:?}");
        told[0]
    };
    // One that comes back, and one that was a spare just before.
    assert!(closes(&[7, 7, 0], &[], &[0, 1]));
    assert!(closes(&[7, 7, 7], &[2], &[0, 1]));
    assert!(!closes(&[7, 7, 7], &[], &[0, 1]));
    assert!(!closes(&[7, 7, 0], &[], &[0, 2]));
    // All that is left are copies.
    assert!(!closes(&[7, 7], &[0, 1], &[0]));
    assert!(closes(&[7, 7], &[0, 1], &[0, 1]));
}

#[test]
fn the_initial_sync_happens_once_also_if_its_step_is_done_again() {
    let first = steps(&[0, 0, 0]);
    assert_eq!(contributors(&first), [0]);
    let lineage = at(&first, 1, 0, true).lineage;
    assert_eq!(lineage, at(&first, 0, 0, true).lineage);
    assert!(!lineage.is_empty());
    // The step did not commit. All three hold the initial state now, a fourth comes and heals from them.
    let l = lineage.as_str();
    let mut again = with_healed(quorum(&[(0, l), (0, l), (0, l), (0, "")]), &[1, 2]);
    assert_eq!(
        (0..4).map(|i| at(&again, i, 0, true).heal).collect::<Vec<_>>(),
        [false, false, false, true]
    );
    assert_eq!(contributors(&again), [0]);
    // The source is gone: the others go on with what they have.
    again.participants.remove(0);
    assert!(!at(&again, 1, 0, true).heal && !at(&again, 2, 0, true).heal && at(&again, 3, 0, true).heal);
}

#[test]
fn a_stranger_is_told_who_the_members_are() {
    let e = assign("replica_9", 0, &steps(&[1, 1]), true).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::NotFound);
    assert!(e.to_string().contains("replica_0, replica_1"), "{e}");
}

proptest! {
    #[test]
    fn sources_and_destinations_agree_from_both_sides(
        members in prop::collection::vec((0i64..3, 0usize..3), 1..8), group_rank in 0u32..5, init_sync: bool,
    ) {
        let lineages = ["", "a", "b"];
        let q = quorum(&members.iter().map(|(s, l)| (*s, lineages[*l])).collect::<Vec<_>>());
        let all: Vec<_> = (0..members.len()).map(|i| at(&q, i, group_rank, init_sync)).collect();
        prop_assert!(all.iter().any(|r| !r.heal), "a member has the state");
        for (i, r) in all.iter().enumerate() {
            prop_assert_eq!(r.replica_rank as usize, i);
            prop_assert_eq!(&r.store_address, &all[0].store_address);
            prop_assert_eq!(r.heal, r.recover_src_replica_rank.is_some());
            prop_assert_eq!(r.heal, !r.recover_sources.is_empty());
            for s in &r.recover_sources {
                let of = &all[s.replica_rank as usize];
                prop_assert!(!of.heal && of.serves_replica_ranks.contains(&r.replica_rank));
                prop_assert_eq!(&s.manager_address, &format!("addr_{}", s.replica_rank));
            }
            let mut ranks: Vec<u32> = r.recover_sources.iter().map(|s| s.replica_rank).collect();
            ranks.sort_unstable();
            ranks.dedup();
            prop_assert_eq!(ranks.len(), r.recover_sources.len(), "a source twice");
            if let Some(source) = r.recover_src_replica_rank {
                let source = &all[source as usize];
                prop_assert!(!source.heal && source.max_replica_rank.is_some());
                prop_assert!(source.recover_dst_replica_ranks.contains(&r.replica_rank));
            } else {
                prop_assert!(r.max_replica_rank.is_some());
            }
        }
        let destinations: usize = all.iter().map(|r| r.recover_dst_replica_ranks.len()).sum();
        prop_assert_eq!(destinations, all.iter().filter(|r| r.heal).count());
    }

    #[test]
    fn every_part_is_what_the_written_out_rules_give_for_the_whole_list(
        members in prop::collection::vec((0i64..3, 0usize..3, any::<bool>(), 0i64..3), 1..9), last: u8,
        spares in 0usize..4, fetching in 0u64..2, group_rank in 0u32..9, init_sync: bool,
    ) {
        let lineages = ["", "a", "b"];
        let mut q = quorum(&members.iter().map(|(s, l, ..)| (*s, lineages[*l])).collect::<Vec<_>>());
        for (m, (_, _, healed, count)) in q.participants.iter_mut().zip(&members) {
            (m.healed, m.commit_failures, m.batches_committed) = (*healed, *count, count * 2);
        }
        for (i, m) in q.participants.iter_mut().enumerate() {
            m.is_last = last >> (i % 8) & 1 == 1;
        }
        q.spares = (0..spares).map(|i| Member { replica_id: format!("spare_{i}"), ..Member::default() }).collect();
        q.fetching = fetching;
        let assignment = Assignment::new(&q, init_sync).unwrap();
        for (nth, m) in q.participants.iter().chain(&q.spares).enumerate() {
            let whole = oracle::assign(&m.replica_id, group_rank, &q, init_sync).unwrap();
            prop_assert_eq!(&assign(&m.replica_id, group_rank, &q, init_sync).unwrap(), &whole);
            let digest = whole.digest_of_members();
            let expected = QuorumResult { replica_ids: Vec::new(), ..whole };
            prop_assert_eq!(&assignment.part(&m.replica_id, group_rank).unwrap(), &expected);
            prop_assert_eq!(&assignment.part_of_call(nth, group_rank).unwrap(), &expected);
            prop_assert_eq!(digest, assignment.digest_of_members());
        }
    }

    #[test]
    fn where_only_the_progress_of_all_changed_the_parts_of_before_advance_to_those_of_now(
        // By quorum: the step of all, and who differs from the others in it (none, as a rule).
        quorums in prop::collection::vec((0i64..3, prop_oneof![3 => Just(9usize), 1 => 0usize..4], any::<bool>()), 2..20), closing: bool,
        init_sync: bool,
    ) {
        let mut last: Option<(Quorum, Vec<QuorumResult>)> = None;
        for (step, odd, healed) in quorums {
            let lineage = ["", "l1", "l2"][usize::try_from(step).unwrap()];
            let mut q = quorum(&[(step, lineage); 4]);
            if let Some(m) = q.participants.get_mut(odd) {
                (m.step, m.healed) = (m.step - i64::from(!healed), healed);
            }
            // Not all at the same steps.
            q.participants.iter_mut().for_each(|m| m.is_last = closing && step > 1);
            let now = Assignment::new(&q, init_sync).unwrap();
            let parts = |a: &Assignment<&Quorum>| -> Vec<QuorumResult> {
                (0..4).flat_map(|i| (0..3).map(move |rank| (i, rank))).map(|(i, rank)| a.part_of_call(i, rank).unwrap()).collect()
            };
            if let Some((before, mut before_parts)) = last.take() {
                let progress = Member { step: Step(step), lineage: lineage.into(), ..Member::default() };
                let advanced = now.is_advance_of(&Assignment::new(&before, init_sync).unwrap(), &progress);
                let uniform = |q: &Quorum| q.participants.iter().all(|m| m.step > Step(0) && (m.step, m.healed) == (q.participants[0].step, false));
                let ends = before.participants[0].is_last != q.participants[0].is_last;
                prop_assert!(advanced || ends || !uniform(&before) || !uniform(&q), "a step like the one before it needs no new parts");
                if advanced {
                    before_parts.iter_mut().for_each(|part| part.advance(&progress));
                    prop_assert_eq!(before_parts, parts(&now));
                }
            }
            let told = parts(&now);
            last = Some((q, told));
        }
    }
}

#[test]
fn a_part_is_as_small_for_ten_thousand_members_as_for_ten() {
    let size = |n: usize| {
        let mut q = steps(&vec![7; n]);
        q.participants[3].step = Step(6);
        let assignment = Assignment::new(&q, true).unwrap();
        let parts: Vec<_> = (0..n).map(|i| assignment.part_of_call(i, 0).unwrap()).collect();
        let serving = parts
            .iter()
            .filter(|p| !p.serves_replica_ranks.is_empty())
            .count();
        assert_eq!(
            (parts.iter().filter(|p| p.heal).count(), serving),
            (1, MAX_SOURCES)
        );
        parts
            .iter()
            .map(|p| p.recover_sources.len() + p.serves_replica_ranks.len() + p.replica_ids.len())
            .sum::<usize>()
    };
    assert_eq!(size(10), size(10_000));
}

#[test]
fn other_members_have_another_digest() {
    let digest = |ids: &[&str]| {
        QuorumResult {
            replica_ids: ids.iter().map(|i| (*i).to_string()).collect(),
            ..QuorumResult::default()
        }
        .digest_of_members()
    };
    assert_eq!(digest(&["a", "b"]), digest(&["a", "b"]));
    let others: [&[&str]; 4] = [&["ab"], &["a"], &["a", "c"], &["a", "b", ""]];
    assert!(others.iter().all(|ids| digest(ids) != digest(&["a", "b"])));
}
