//! The assignment as it is defined, for one rank after the other: what [`Assignment`](super::Assignment) must give for all of them together.

use super::{MAX_SOURCES, QuorumResult, RecoverySource, rank, reference_lineage};
use crate::lineage::Lineage;
use crate::member::{Member, Quorum};
use ftcore::{Error, ErrorKind, Result, Step};

pub(super) fn assign(
    replica_id: &str,
    group_rank: u32,
    quorum: &Quorum,
    init_sync: bool,
) -> Result<QuorumResult> {
    let mut members: Vec<&Member> = quorum.participants.iter().collect();
    members.sort_by(|a, b| a.replica_id.cmp(&b.replica_id));
    let place = members.iter().position(|m| m.replica_id == replica_id);
    let spare = quorum.spares.iter().position(|m| m.replica_id == replica_id);
    // A spare is no member: no place is its own.
    let own = place
        .or(spare.map(|_| usize::MAX))
        .ok_or_else(|| Error::new(ErrorKind::NotFound, "not in the quorum"))?;
    let max_step = members.iter().map(|m| m.step).max().unwrap_or(Step(0));
    let lineage = reference_lineage(&members, max_step);
    let initial = init_sync && max_step == Step(0);
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
        closes: contributors
            .iter()
            .all(|&i| members.get(i).is_some_and(|m| m.is_last)),
        ..QuorumResult::default()
    };
    let count = sources.len().max(1);
    // The same for all ranks of the replica that heals: they follow one source.
    let sources_of = |k: usize| {
        let number = sources.len().min(MAX_SOURCES);
        sources.iter().cycle().skip(k % count).take(number)
    };
    // torchft's rule: its clients heal each rank from another replica.
    let torchft_source_of = |k: usize| sources.get((k + offset) % count).copied();
    let address = |i: usize| members.get(i).map(|m| m.address.clone()).unwrap_or_default();
    for nth in 0..quorum.spares.len() {
        for &source in sources_of(behind.len() + nth) {
            result.serves_spares |= source == own;
            if place.is_none() && spare == Some(nth) {
                result.heal = true;
                result.recover_src_replica_rank.get_or_insert(rank(source)?);
                result.recover_sources.push(RecoverySource {
                    replica_rank: rank(source)?,
                    manager_address: address(source),
                    replica_id: members
                        .get(source)
                        .map(|m| m.replica_id.clone())
                        .unwrap_or_default(),
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
        if let Some(source) = torchft_source_of(k) {
            if destination == own {
                result.heal = true;
                result.recover_src_replica_rank = Some(rank(source)?);
                result.recover_src_manager_address = address(source);
            }
            if source == own {
                result.recover_dst_replica_ranks.push(rank(destination)?);
            }
        }
        for &source in sources_of(k) {
            if destination == own {
                result.recover_sources.push(RecoverySource {
                    replica_rank: rank(source)?,
                    manager_address: address(source),
                    replica_id: members
                        .get(source)
                        .map(|m| m.replica_id.clone())
                        .unwrap_or_default(),
                });
            }
            if source == own {
                result.serves_replica_ranks.push(rank(destination)?);
            }
        }
    }
    Ok(result)
}
