//! Replicas as torchft's managers are: they send heartbeats from their construction on and ask later, tell no lineage and no quorum that
//! they were in, and have no event stream. What is gone of them, the lighthouse finds by their connections and heartbeats.

use super::*;
use ftcore::Epoch;

/// After so long without a connection a replica without a stream is gone.
const DISCONNECTED: Duration = Duration::from_millis(600);

impl World {
    /// What such a replica says of itself when it asks.
    pub(super) fn as_foreign(member: Member) -> Member {
        Member {
            lineage: String::new(),
            incarnation: String::new(),
            last_quorum_id: Epoch(0),
            last_world_size: 0,
            batches_committed: 0,
            healed: false,
            joining: oxccl_protocol::Joining::default(),
            is_last: false,
            ..member
        }
    }

    /// True for what such a replica cannot say.
    pub(super) fn is_beyond_foreign(event: &Event) -> bool {
        !matches!(
            event,
            Event::Heartbeat { .. } | Event::Join { .. } | Event::Withdraw { .. }
        )
    }

    /// Its process has ended, and its connections with it.
    pub(super) fn foreign_ends(&mut self, replica_id: String) {
        let delay = DISCONNECTED + self.random.millis(0, 100);
        self.lighthouse_later(delay, Event::Disconnected { replica_id });
    }
}
