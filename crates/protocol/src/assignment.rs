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
//!   into it. If none is, the copies are all that is left of the work: then all members that held the step before this quorum
//!   contributes.

use std::collections::BTreeMap;
use std::ops::Deref;

use ftcore::{Epoch, Error, ErrorKind, Result, Step};

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
    /// Its id; empty if it is not told here, but among [`QuorumResult::replica_ids`].
    pub replica_id: String,
}

/// A rank's answer to "what is my place in this quorum?": its own part. All of it but [`replica_ids`](Self::replica_ids) has the size of what concerns this
/// rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QuorumResult {
    /// The epoch.
    pub quorum_id: Epoch,
    /// The replica's place among all members, in order of their ids.
    pub replica_rank: u32,
    /// The number of members.
    pub replica_world_size: u32,
    /// The store through which the ranks with this group rank meet (`host:port`).
    pub store_address: String,
    /// The highest step of a member.
    pub max_step: Step,
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
    /// All sources of this replica, [`MAX_SOURCES`] at most; empty if it does not heal. The same for all its ranks, which follow one of them
    /// ([`source`](crate::source)); the one above is torchft's choice and differs from rank to rank.
    pub recover_sources: Vec<RecoverySource>,
    /// All replicas that may fetch from this one: it publishes its state if there is one.
    pub serves_replica_ranks: Vec<u32>,
    /// The highest number of commit failures of a member.
    pub commit_failures: i64,
    /// How many batches led to the state of the members that are up to date: the most that one of them tells.
    pub batches_committed: i64,
    /// The members' ids, in the order of their ranks; empty if the quorum is too large to tell them to every member.
    pub replica_ids: Vec<String>,
    /// Names the members where their ids are not told. See [`QuorumResult::digest_of_members`].
    pub members_digest: String,
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
    /// All that contribute say that the run ends with this step: nothing is reduced in it. Who healed into it may not know.
    pub closes: bool,
}

/// The lineage that counts at `max_step`: the one that most members hold, the lowest id's in a tie.
fn reference_lineage(members: &[&Member], max_step: Step) -> String {
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

/// A replica's place among all members, and in the lists that its own part is read from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Place {
    up_to_date: Option<usize>,
    behind: Option<usize>,
    source: Option<usize>,
    contributor: Option<usize>,
}

/// Who does what in a quorum, for all its replicas and ranks at once: made in one pass over the members, after which each
/// replica's own part costs as much as it holds.
///
/// The manager server of a small quorum makes it from the members that the lighthouse tells; of a large one the lighthouse
/// makes it and tells each replica its own part.
#[derive(Debug, Clone)]
pub struct Assignment<Q> {
    quorum: Q,
    /// The members in order of their ids, as places in the quorum's list.
    order: Vec<usize>,
    shape: Shape,
    shared: Shared,
}

/// Places in order of ids. What depends on the members' progress in no other way than by who is behind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Shape {
    initial: bool,
    spares: usize,
    fetching: bool,
    /// One of each member.
    places: Vec<Place>,
    up_to_date: Vec<usize>,
    behind: Vec<usize>,
    sources: Vec<usize>,
    contributors: usize,
    closes: bool,
}

/// What all members are told alike.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Shared {
    max_step: Step,
    commit_failures: i64,
    batches_committed: i64,
    lineage: String,
}

impl<Q: Deref<Target = Quorum>> Assignment<Q> {
    /// `init_sync`: at step 0, all members take the state of the first one. Errors: `Protocol` for more members than ranks, `Internal` for none.
    pub fn new(quorum: Q, init_sync: bool) -> Result<Self> {
        let all = &quorum.participants;
        let mut order: Vec<usize> = (0..all.len()).collect();
        // The lighthouse's list is in order already.
        if !all.is_sorted_by(|a, b| a.replica_id <= b.replica_id) {
            order.sort_by(|&a, &b| {
                all.get(a)
                    .map(|m| &m.replica_id)
                    .cmp(&all.get(b).map(|m| &m.replica_id))
            });
        }
        let members: Vec<&Member> = order.iter().filter_map(|&i| all.get(i)).collect();
        rank(members.len())?;
        let max_step = members.iter().map(|m| m.step).max().unwrap_or_default();
        let lineage = reference_lineage(&members, max_step);
        let initial = init_sync && max_step == Step(0);
        // After the first commit an old peer that tells no history counts as current; before it, it may hold anything.
        let is_current = |m: &Member| {
            let untold = m.lineage.is_empty() && !initial;
            m.step == max_step && (untold || lineage.is_empty() || m.lineage == lineage)
        };
        let force = initial && lineage.is_empty();
        let (mut places, mut up_to_date) = (vec![Place::default(); members.len()], Vec::new());
        let (mut behind, mut sources) = (Vec::new(), Vec::new());
        for (i, (m, place)) in members.iter().zip(&mut places).enumerate() {
            let current = is_current(m);
            // The source of an initial sync is the first member.
            if current && (!force || up_to_date.is_empty()) {
                place.source = Some(sources.len());
                sources.push(i);
            } else {
                place.behind = Some(behind.len());
                behind.push(i);
            }
            if current {
                place.up_to_date = Some(up_to_date.len());
                up_to_date.push(i);
            }
        }
        let own_work = |i: usize| members.get(i).is_some_and(|m| !m.healed);
        let any = sources.iter().any(|&i| own_work(i));
        let (mut contributors, mut closes) = (0, true);
        for &i in &sources {
            if let Some(place) = places.get_mut(i).filter(|_| !any || own_work(i)) {
                place.contributor = Some(contributors);
                contributors += 1;
                closes &= members.get(i).is_some_and(|m| m.is_last);
            }
        }
        let first = up_to_date.first().and_then(|&i| members.get(i));
        let first =
            first.ok_or_else(|| Error::new(ErrorKind::Internal, "no member is at the highest step"))?;
        let shared = Shared {
            max_step,
            commit_failures: members.iter().map(|m| m.commit_failures).max().unwrap_or(0),
            batches_committed: up_to_date
                .iter()
                .filter_map(|&i| members.get(i))
                .map(|m| m.batches_committed)
                .max()
                .unwrap_or(0),
            lineage: if force {
                Lineage::initial(&first.replica_id).as_str().to_string()
            } else {
                lineage
            },
        };
        let shape = Shape {
            initial,
            spares: quorum.spares.len(),
            fetching: quorum.fetching > 0,
            places,
            up_to_date,
            behind,
            sources,
            contributors,
            closes,
        };
        Ok(Self {
            quorum,
            order,
            shape,
            shared,
        })
    }

    fn member(&self, place: usize) -> Option<&Member> {
        self.order
            .get(place)
            .and_then(|&i| self.quorum.participants.get(i))
    }

    /// The members' ids, in the order of their ranks.
    fn ids(&self) -> impl Iterator<Item = &str> {
        let members = (0..self.order.len()).filter_map(|i| self.member(i));
        members.map(|m| m.replica_id.as_str())
    }

    /// Names the members: what [`QuorumResult::digest_of_members`] makes of their ids.
    pub fn digest_of_members(&self) -> String {
        digest_of(self.ids())
    }

    /// The part of the replica of that id. Errors: `NotFound` if it is neither a member nor a spare.
    fn find(&self, replica_id: &str) -> Result<Position> {
        let id = |&i: &usize| {
            self.quorum
                .participants
                .get(i)
                .map_or("", |m| m.replica_id.as_str())
        };
        if let Ok(place) = self.order.binary_search_by(|i| id(i).cmp(replica_id)) {
            return Ok(Position::Member(place));
        }
        let spare = self.quorum.spares.iter().position(|m| m.replica_id == replica_id);
        spare.map(Position::Spare).ok_or_else(|| {
            let text = format!(
                "replica {replica_id} is not in quorum {} of {}",
                self.quorum.quorum_id,
                listed(self.ids())
            );
            Error::new(ErrorKind::NotFound, text)
        })
    }

    /// The place of the replica's rank `group_rank`, without the ids of all members.
    ///
    /// Errors: `NotFound` if the replica is neither a member nor a spare.
    pub fn part(&self, replica_id: &str, group_rank: u32) -> Result<QuorumResult> {
        self.part_of(self.find(replica_id)?, group_rank)
    }

    /// The same for the replica whose call was the `nth` of [`Action::Deliver`](crate::quorum::Action::Deliver): members first, in order, then spares.
    pub fn part_of_call(&self, nth: usize, group_rank: u32) -> Result<QuorumResult> {
        let position = match nth.checked_sub(self.order.len()) {
            None => Position::Member(nth),
            Some(spare) => Position::Spare(spare),
        };
        self.part_of(position, group_rank)
    }

    fn part_of(&self, position: Position, group_rank: u32) -> Result<QuorumResult> {
        let (shape, shared) = (&self.shape, &self.shared);
        let spread = usize::try_from(group_rank).unwrap_or(0);
        // Ranks of one replica must agree at the start: a rank-dependent source could mix two initialisations (L11).
        let offset = if shape.initial { 0 } else { spread };
        let primary = shape.up_to_date.get(offset % shape.up_to_date.len().max(1));
        let primary = primary.and_then(|&i| self.member(i));
        let (own, place) = match position {
            Position::Member(own) => (own, shape.places.get(own).copied().unwrap_or_default()),
            Position::Spare(_) => (0, Place::default()),
        };
        let mut result = QuorumResult {
            quorum_id: self.quorum.quorum_id,
            replica_rank: rank(own)?,
            spare: matches!(position, Position::Spare(_)),
            keeps_snapshot: shape.fetching,
            replica_world_size: rank(self.order.len())?,
            store_address: primary.map(|m| m.store_address.clone()).unwrap_or_default(),
            max_step: shared.max_step,
            max_replica_rank: place.up_to_date.map(rank).transpose()?,
            max_world_size: rank(shape.up_to_date.len())?,
            commit_failures: shared.commit_failures,
            batches_committed: shared.batches_committed,
            lineage: shared.lineage.clone(),
            contributor_rank: place.contributor.map(rank).transpose()?,
            contributor_world_size: rank(shape.contributors)?,
            closes: shape.closes,
            ..QuorumResult::default()
        };
        let (number, count) = (shape.sources.len().min(MAX_SOURCES), shape.sources.len().max(1));
        let fetches = match position {
            Position::Member(_) => place.behind,
            Position::Spare(nth) => Some(shape.behind.len() + nth),
        };
        if let Some(k) = fetches {
            for (place, m) in self.sources(k) {
                result.recover_sources.push(RecoverySource {
                    replica_rank: rank(place)?,
                    manager_address: m.address.clone(),
                    replica_id: m.replica_id.clone(),
                });
            }
            // torchft's rule: its clients heal each rank from another replica. It knows no spares.
            let offset = if result.spare { 0 } else { offset % count };
            if let Some((place, m)) = self.source(k + offset) {
                result.heal = true;
                result.recover_src_replica_rank = Some(rank(place)?);
                result.recover_src_manager_address.clone_from(&m.address);
            }
        }
        if let Some(j) = place.source {
            let all = shape.behind.len() + shape.spares;
            // Those k with k % count == j - back, in order.
            let served = |back: usize, end: usize| ((j + count - back % count) % count..end).step_by(count);
            let mut serves: Vec<usize> = (0..number).flat_map(|nth| served(nth, all)).collect();
            serves.sort_unstable();
            for k in serves {
                match shape.behind.get(k) {
                    Some(&destination) => result.serves_replica_ranks.push(rank(destination)?),
                    None => result.serves_spares = true,
                }
            }
            for k in served(offset, shape.behind.len()) {
                let destination = shape.behind.get(k).copied().unwrap_or_default();
                result.recover_dst_replica_ranks.push(rank(destination)?);
            }
        }
        Ok(result)
    }

    /// The `k`-th of those that fetch, members first, does so from the sources `k`, `k + 1`, …: the same for all its ranks, which follow one source.
    fn source(&self, k: usize) -> Option<(usize, &Member)> {
        let sources = &self.shape.sources;
        let place = *sources.get(k % sources.len().max(1))?;
        self.member(place).map(|m| (place, m))
    }

    /// All that it may fetch from, by their places.
    fn sources(&self, k: usize) -> impl Iterator<Item = (usize, &Member)> {
        let number = self.shape.sources.len().min(MAX_SOURCES);
        (k..k + number).filter_map(|k| self.source(k))
    }

    /// Who fetches a state, and from whom it may: members in order of their ids, then spares.
    pub fn heals(&self) -> impl Iterator<Item = (&Member, impl Iterator<Item = &Member>)> {
        let behind = self.shape.behind.iter().filter_map(|&i| self.member(i));
        let all = behind.chain(&self.quorum.spares).enumerate();
        all.map(|(k, member)| (member, self.sources(k).map(|(_, source)| source)))
    }

    /// What every member says about its progress, if that is all that changed since `last`: then every part is that of `last`,
    /// [advanced](QuorumResult::advance). To be called for lists of members that differ in nothing but that progress.
    pub fn is_advance_of(&self, last: &Self, progress: &Member) -> bool {
        let told = Shared {
            max_step: progress.step,
            commit_failures: progress.commit_failures,
            batches_committed: progress.batches_committed,
            lineage: progress.lineage.clone(),
        };
        self.quorum.quorum_id == last.quorum.quorum_id && self.shared == told && self.shape == last.shape
    }
}

/// A replica of a quorum.
#[derive(Debug, Clone, Copy)]
enum Position {
    /// In order of the ids.
    Member(usize),
    /// In order of the quorum's list.
    Spare(usize),
}

/// Another one for other ids.
fn digest_of<'a>(ids: impl Iterator<Item = &'a str>) -> String {
    let mut hasher = blake3::Hasher::new();
    for id in ids {
        hasher.update(&(id.len() as u64).to_le_bytes());
        hasher.update(id.as_bytes());
    }
    hasher.finalize().to_hex().to_string()
}

impl QuorumResult {
    /// Names the members: equal for two answers only if those have the same ones.
    pub fn digest_of_members(&self) -> String {
        if self.members_digest.is_empty() {
            digest_of(self.replica_ids.iter().map(String::as_str))
        } else {
            self.members_digest.clone()
        }
    }

    /// The id of the member of that rank, if it is told: all are, or those that this replica heals from.
    pub fn id_of(&self, replica_rank: u32) -> Option<&str> {
        let listed = usize::try_from(replica_rank)
            .ok()
            .and_then(|rank| self.replica_ids.get(rank));
        let source = || {
            self.recover_sources
                .iter()
                .find(|s| s.replica_rank == replica_rank)
        };
        let id = listed.or_else(|| source().map(|s| &s.replica_id));
        id.map(String::as_str).filter(|id| !id.is_empty())
    }

    /// Takes over the progress that all members made, the only thing that changed.
    pub fn advance(&mut self, progress: &Member) {
        self.max_step = progress.step;
        self.commit_failures = progress.commit_failures;
        self.batches_committed = progress.batches_committed;
        self.lineage.clone_from(&progress.lineage);
    }
}

/// The place of `replica_id`'s rank `group_rank` in `quorum`, with the ids of all members.
///
/// `init_sync`: at step 0, all members take the state of the first one. Errors: `NotFound` if the replica is not a
/// member.
pub fn assign(replica_id: &str, group_rank: u32, quorum: &Quorum, init_sync: bool) -> Result<QuorumResult> {
    let assignment = Assignment::new(quorum, init_sync)?;
    let mut result = assignment.part(replica_id, group_rank)?;
    result.replica_ids = assignment.ids().map(str::to_string).collect();
    Ok(result)
}

#[cfg(test)]
mod oracle;

#[cfg(test)]
mod tests;
