//! What the lighthouse told a replica of its quorum: the members, or the replica's own part.

use std::sync::Arc;

use ftcore::{Epoch, Error, ErrorKind, Result};

use crate::assignment::{QuorumResult, assign};
use crate::member::Quorum;

/// An answer of the lighthouse, from which each rank of the replica reads its place.
#[derive(Debug, Clone)]
pub enum Told {
    /// All members.
    Members(Arc<Quorum>),
    /// The places of this replica's ranks, for the wish for an initial sync that the replica had: of a quorum too large to tell its members to all.
    Parts(Arc<[QuorumResult]>),
}

impl Told {
    /// The quorum's id and its number of members; `None` for a replica that is no member of it.
    pub fn membership(&self, replica_id: &str) -> Option<(Epoch, u64)> {
        match self {
            Self::Members(quorum) => quorum
                .contains(replica_id)
                .then(|| (quorum.quorum_id, quorum.participants.len() as u64)),
            Self::Parts(parts) => {
                let first = parts.first().filter(|part| !part.spare)?;
                Some((first.quorum_id, u64::from(first.replica_world_size)))
            }
        }
    }

    /// The place of `replica_id`'s rank `group_rank`. Errors: `NotFound` if the replica is not in the quorum, `Protocol` if the lighthouse told nothing
    /// for that rank.
    pub fn place(&self, replica_id: &str, group_rank: u32, init_sync: bool) -> Result<QuorumResult> {
        match self {
            Self::Members(quorum) => assign(replica_id, group_rank, quorum, init_sync),
            Self::Parts(parts) => {
                let part = usize::try_from(group_rank).ok().and_then(|rank| parts.get(rank));
                part.cloned().ok_or_else(|| {
                    let text = format!(
                        "the lighthouse told {} places for replica {replica_id}, and none for its rank {group_rank}",
                        parts.len()
                    );
                    Error::new(ErrorKind::Protocol, text)
                })
            }
        }
    }
}
