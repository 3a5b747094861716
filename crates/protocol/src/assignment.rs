//! What one rank of one replica does in a quorum: its place, who heals from whom, and where the group meets.
//!
//! A pure function of the quorum, the rank and its wish for an initial sync, computed alike in every manager server.
//! The rules are torchft's, with three corrections:
//!
//! - Members at the highest step whose history (lineage) differs are behind as well.
//! - The initial sync has one source for all ranks of a replica (L11), and happens once: who took part in it holds the
//!   source's [initial lineage](Lineage::initial) from then on, also if the step itself has to be done again.
//! - **Who contributes.** A replica contributes to a step only work that it did itself. One that healed into the step holds
//!   copies of its source's work, so it stands aside in every attempt at that step while a member is there that did not heal
//!   into it. If none is, the copies are all that is left of the work: then everybody who held the step before this quorum
//!   contributes.

use std::collections::BTreeMap;

use ftcore::{Error, ErrorKind, Result};

use crate::lineage::Lineage;
use crate::member::{Member, Quorum, listed};

/// The most members that one replica heals from at once. Each of them copies its state for it, all at the same time, and keeps
/// the copy for that step; with three, one may die and another stall, and two still vouch for each other's state.
pub const MAX_SOURCES: usize = 3;

/// A member that has the state of the highest step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RecoverySource {
    /// Its `replica_rank`.
    pub replica_rank: u32,
    /// Its manager server, which knows where each of its ranks serves snapshots.
    pub manager_address: String,
}

/// A rank's answer to "what is my place in this quorum?".
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QuorumResult {
    /// The epoch.
    pub quorum_id: i64,
    /// The replica's place among all members, in order of their ids.
    pub replica_rank: u32,
    /// The number of members.
    pub replica_world_size: u32,
    /// The store through which the ranks with this group rank meet (`host:port`).
    pub store_address: String,
    /// The highest step of a member.
    pub max_step: i64,
    /// The replica's place among the members that are up to date; `None` if it is behind.
    pub max_replica_rank: Option<u32>,
    /// The number of members that are up to date.
    pub max_world_size: u32,
    /// True if this replica fetches its state from another one.
    pub heal: bool,
    /// The manager server of the source; empty if there is none.
    pub recover_src_manager_address: String,
    /// The source's `replica_rank`.
    pub recover_src_replica_rank: Option<u32>,
    /// The replicas whose first source this one is.
    pub recover_dst_replica_ranks: Vec<u32>,
    /// All sources of this replica, [`MAX_SOURCES`] at most, the one above first; empty if it does not heal.
    pub recover_sources: Vec<RecoverySource>,
    /// All replicas that may fetch from this one: it publishes its state if there is one.
    pub serves_replica_ranks: Vec<u32>,
    /// The highest number of commit failures of a member.
    pub commit_failures: i64,
    /// How many batches led to the state of the members that are up to date: the most that one of them tells.
    pub batches_committed: i64,
    /// The members' ids, in the order of their ranks.
    pub replica_ids: Vec<String>,
    /// The history of the members that are up to date, or that the initial sync begins; empty if they tell none.
    pub lineage: String,
    /// The replica is to leave after this step. The manager server says so to all its ranks.
    pub draining: bool,
    /// The replica's place among those that contribute to the step; `None` if it does not.
    pub contributor_rank: Option<u32>,
    /// The number of replicas that contribute to the step.
    pub contributor_world_size: u32,
    /// This replica is no member, but a spare: it fetches the state of the step from `recover_sources`, outside the group, and asks again. What
    /// concerns members only is empty or 0.
    pub spare: bool,
    /// Spares fetch from this replica: it publishes its state.
    pub serves_spares: bool,
    /// Spares of earlier quorums fetch still: what was published for them stays.
    pub keeps_snapshot: bool,
}

/// The lineage that counts at `max_step`: the one that most members hold, the lowest id's in a tie.
fn reference_lineage(members: &[&Member], max_step: i64) -> String {
    // In order of ids, so that the first to reach a count is the one with the lowest id.
    let mut count: BTreeMap<&str, usize> = BTreeMap::new();
    let told = || {
        members
            .iter()
            .filter(|m| m.step == max_step && !m.lineage.is_empty())
    };
    for m in told() {
        *count.entry(m.lineage.as_str()).or_default() += 1;
    }
    let most = count.values().copied().max().unwrap_or(0);
    told()
        .map(|m| m.lineage.as_str())
        .find(|l| count.get(l) == Some(&most))
        .unwrap_or_default()
        .to_string()
}

fn rank(index: usize) -> Result<u32> {
    u32::try_from(index).map_err(|_| Error::new(ErrorKind::Protocol, "a quorum has more members than ranks"))
}

/// The place of `replica_id`'s rank `group_rank` in `quorum`.
///
/// `init_sync`: at step 0, all members take the state of the first one. Errors: `NotFound` if the replica is not a
/// member.
pub fn assign(replica_id: &str, group_rank: u32, quorum: &Quorum, init_sync: bool) -> Result<QuorumResult> {
    let mut members: Vec<&Member> = quorum.participants.iter().collect();
    members.sort_by(|a, b| a.replica_id.cmp(&b.replica_id));
    let place = members.iter().position(|m| m.replica_id == replica_id);
    let spare = quorum.spares.iter().position(|m| m.replica_id == replica_id);
    // A spare is no member: no place is its own.
    let own = place.or(spare.map(|_| usize::MAX)).ok_or_else(|| {
        let ids = listed(members.iter().map(|m| m.replica_id.as_str()));
        Error::new(
            ErrorKind::NotFound,
            format!(
                "replica {replica_id} is not in quorum {} of {ids}",
                quorum.quorum_id
            ),
        )
    })?;
    let max_step = members.iter().map(|m| m.step).max().unwrap_or(0);
    let lineage = reference_lineage(&members, max_step);
    let initial = init_sync && max_step == 0;
    // After the first commit an old peer that tells no history counts as current; before it, it may hold anything.
    let current = |m: &Member| {
        let untold = m.lineage.is_empty() && !initial;
        m.step == max_step && (untold || lineage.is_empty() || m.lineage == lineage)
    };
    let is_current: Vec<bool> = members.iter().map(|m| current(m)).collect();
    let up_to_date: Vec<usize> = (0..members.len())
        .filter(|&i| is_current.get(i) == Some(&true))
        .collect();
    let spread = usize::try_from(group_rank).unwrap_or(0);
    let force = initial && lineage.is_empty();
    // Ranks of one replica must agree at the start: a rank-dependent source could mix two initialisations (L11).
    let offset = if initial { 0 } else { spread };
    let primary = up_to_date
        .get(offset % up_to_date.len().max(1))
        .copied()
        .ok_or_else(|| Error::new(ErrorKind::Internal, "no member is at the highest step"))?;
    let (behind, sources): (Vec<usize>, Vec<usize>) =
        (0..members.len()).partition(|&i| is_current.get(i) != Some(&true) || (force && i != primary));
    let fresh: Vec<usize> = sources
        .iter()
        .copied()
        .filter(|&i| members.get(i).is_some_and(|m| !m.healed))
        .collect();
    let contributors = if fresh.is_empty() { &sources } else { &fresh };
    let lineage = match members.get(primary) {
        Some(m) if force => Lineage::initial(&m.replica_id).as_str().to_string(),
        _ => lineage,
    };

    let mut result = QuorumResult {
        quorum_id: quorum.quorum_id,
        replica_rank: place.map_or(Ok(0), rank)?,
        spare: place.is_none(),
        keeps_snapshot: quorum.fetching > 0,
        replica_world_size: rank(members.len())?,
        store_address: members
            .get(primary)
            .map(|m| m.store_address.clone())
            .unwrap_or_default(),
        max_step,
        max_replica_rank: up_to_date.iter().position(|&i| i == own).map(rank).transpose()?,
        max_world_size: rank(up_to_date.len())?,
        commit_failures: members.iter().map(|m| m.commit_failures).max().unwrap_or(0),
        batches_committed: up_to_date
            .iter()
            .filter_map(|&i| members.get(i))
            .map(|m| m.batches_committed)
            .max()
            .unwrap_or(0),
        replica_ids: members.iter().map(|m| m.replica_id.clone()).collect(),
        lineage,
        contributor_rank: contributors
            .iter()
            .position(|&i| i == own)
            .map(rank)
            .transpose()?,
        contributor_world_size: rank(contributors.len())?,
        ..QuorumResult::default()
    };
    let sources_of = |k: usize| {
        let start = (k + offset) % sources.len().max(1);
        let number = sources.len().min(MAX_SOURCES);
        sources.iter().cycle().skip(start).take(number)
    };
    for nth in 0..quorum.spares.len() {
        for &source in sources_of(behind.len() + nth) {
            result.serves_spares |= source == own;
            if place.is_none() && spare == Some(nth) {
                result.heal = true;
                result.recover_src_replica_rank.get_or_insert(rank(source)?);
                result.recover_sources.push(RecoverySource {
                    replica_rank: rank(source)?,
                    manager_address: members.get(source).map(|m| m.address.clone()).unwrap_or_default(),
                });
            }
        }
    }
    if let Some(first) = result.recover_sources.first().filter(|_| result.spare) {
        result
            .recover_src_manager_address
            .clone_from(&first.manager_address);
    }
    for (k, &destination) in behind.iter().enumerate() {
        for (nth, &source) in sources_of(k).enumerate() {
            if destination == own {
                let address = members.get(source).map(|m| m.address.clone()).unwrap_or_default();
                if nth == 0 {
                    result.heal = true;
                    result.recover_src_replica_rank = Some(rank(source)?);
                    result.recover_src_manager_address.clone_from(&address);
                }
                result.recover_sources.push(RecoverySource {
                    replica_rank: rank(source)?,
                    manager_address: address,
                });
            }
            if source == own {
                result.serves_replica_ranks.push(rank(destination)?);
                if nth == 0 {
                    result.recover_dst_replica_ranks.push(rank(destination)?);
                }
            }
        }
    }
    Ok(result)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn quorum(members: &[(i64, &str)]) -> Quorum {
        let member = |(i, (step, lineage)): (usize, &(i64, &str))| Member {
            replica_id: format!("replica_{i}"),
            address: format!("addr_{i}"),
            store_address: format!("store_addr_{i}"),
            step: *step,
            lineage: (*lineage).to_string(),
            world_size: 1,
            ..Member::default()
        };
        Quorum {
            quorum_id: 1,
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
    fn a_replica_heals_from_several_members_but_never_from_two_first_states() {
        let q = steps(&[0, 7, 7, 7, 7]);
        let ranks = |r: &QuorumResult| {
            r.recover_sources
                .iter()
                .map(|s| s.replica_rank)
                .collect::<Vec<_>>()
        };
        assert_eq!(ranks(&at(&q, 0, 0, true)), [1, 2, 3]);
        assert_eq!(ranks(&at(&q, 0, 3, true)), [4, 1, 2]);
        assert_eq!(at(&q, 0, 3, true).recover_sources[1].manager_address, "addr_1");
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
        assert_eq!((y.replica_world_size, y.max_step), (4, 7));
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
            prop_assert!(all.iter().any(|r| !r.heal), "somebody has the state");
            for (i, r) in all.iter().enumerate() {
                prop_assert_eq!(r.replica_rank as usize, i);
                prop_assert_eq!(&r.store_address, &all[0].store_address);
                prop_assert_eq!(r.heal, r.recover_src_replica_rank.is_some());
                prop_assert_eq!(r.recover_src_replica_rank, r.recover_sources.first().map(|s| s.replica_rank));
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
    }
}
