//! What the lighthouse knows of a replica, and what a quorum is: plain data, shared by the logic, the servers and the
//! clients.

use std::sync::Arc;

use ftcore::{Epoch, Step};

/// A replica id, shared by those that keep it.
pub(crate) type Id = Arc<str>;

/// The longest replica id that is accepted, in bytes.
pub const MAX_ID_BYTES: usize = 256;

/// A replica that asks for a quorum.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Member {
    /// Unique per incarnation: `name:uuid`, or any other text that differs between replicas.
    pub replica_id: String,
    /// The URL of its manager server.
    pub address: String,
    /// Where its key-value store listens (`host:port`), through which a group may meet.
    pub store_address: String,
    /// The step of its state.
    pub step: Step,
    /// The number of ranks in the replica.
    pub world_size: u64,
    /// As a member of the last quorum, asks for one without newcomers.
    pub shrink_only: bool,
    /// JSON of the caller's choice; carried, never read.
    pub data: String,
    /// Steps in a row that it did not commit.
    pub commit_failures: i64,
    /// Names the history that led to its state; empty if not told.
    pub lineage: String,
    /// The quorum that it is configured for; 0 if none or not told.
    pub last_quorum_id: Epoch,
    /// It fetched its state from a peer at this very step, and has not committed since.
    pub healed: bool,
    /// The number of members of that quorum; 0 if not told.
    pub last_world_size: u64,
    /// How many batches led to its state, over all replicas that contributed; 0 if not told.
    pub batches_committed: i64,
    /// Tells two processes apart that come under the same `replica_id`; empty if not told.
    pub incarnation: String,
    /// What it does if it is far behind.
    pub joining: Joining,
    /// Its run ends with the step of this quorum: a replica that is behind has no later one to join.
    pub is_last: bool,
}

/// How a replica that is far behind comes into the quorum.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Joining {
    /// As a member, which heals while the others wait; and it gives its state to members only. torchft's managers.
    #[default]
    Untold,
    /// As a spare: it fetches the state while the others go on, until it is within one step of them.
    Outside,
    /// As a member now: it was a spare long enough.
    Now,
}

/// The replicas that take part in an epoch. Made by the lighthouse, the same for all of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Quorum {
    /// The epoch. Never goes down, not even over restarts of the lighthouse; equal ids mean equal members.
    pub quorum_id: Epoch,
    /// The members in order of `replica_id` (byte order).
    pub participants: Vec<Member>,
    /// Replicas far behind that fetch the state of this quorum's step and are no members, in order of `replica_id`.
    pub spares: Vec<Member>,
    /// The number of spares of earlier quorums that fetch still: what they were offered stays.
    pub fetching: u64,
}

impl Quorum {
    /// True if `replica_id` is a member.
    pub fn contains(&self, replica_id: &str) -> bool {
        self.participants.iter().any(|m| m.replica_id == replica_id)
    }

    /// True if `replica_id` is a spare of this quorum.
    pub fn has_spare(&self, replica_id: &str) -> bool {
        self.spares.iter().any(|m| m.replica_id == replica_id)
    }

    /// The members' ids in order.
    pub fn ids(&self) -> impl Iterator<Item = &str> {
        self.participants.iter().map(|m| m.replica_id.as_str())
    }
}

/// The part of an id up to its first ':', which all incarnations of one replica share; `None` if the id has no such part.
pub(crate) fn prefix_of(replica_id: &str) -> Option<&str> {
    let end = replica_id.find(':').filter(|end| *end > 0)?;
    replica_id.get(..=end)
}

/// The most ids that a text lists, and the most bytes that they take in it: a longer text does not fit into the headers of a gRPC error.
const MAX_LISTED: usize = 16;
const MAX_LISTED_BYTES: usize = 1024;

/// The ids as a text: the first ones, and how many more there are.
pub(crate) fn listed<'a>(ids: impl IntoIterator<Item = &'a str>) -> String {
    let mut ids = ids.into_iter();
    let mut text = String::new();
    for n in 0.. {
        let Some(id) = ids.next() else { break };
        if n == MAX_LISTED || text.len() + id.len() > MAX_LISTED_BYTES {
            let more = 1 + ids.count();
            text.push_str(&format!(", and {more} more"));
            break;
        }
        if n > 0 {
            text.push_str(", ");
        }
        text.push_str(id);
    }
    text
}

/// The notice that an epoch is over. Every rank in it aborts what is pending and asks for the next quorum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AbortEpoch {
    /// The epoch that is over; a receiver in another one ignores the notice.
    pub quorum_id: Epoch,
    /// Why, naming who reported it or who is gone.
    pub reason: String,
    /// Replica ids that are gone; empty after a mere report.
    pub departed: Vec<String>,
}
