//! The identity of a state: which commits, in which epochs, led to it.
//!
//! Two replicas at the same step are equal only if they committed the same steps in the same epochs. A member that
//! finished the last reduction while another saw it fail may have gone one way and the rest, after retrying, another;
//! the step alone cannot tell. The lineage can, and the odd one heals (INV-6).

use std::fmt::Write as _;

use ftcore::{Epoch, Step};

/// A hash chain over (epoch, step) of every commit; empty before the first one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Lineage(String);

impl Lineage {
    /// The lineage as it came from a peer.
    pub fn from_peer(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The lineage of the state that an initial sync takes from `replica_id`, before the first commit.
    pub fn initial(replica_id: &str) -> Self {
        Self(short(
            blake3::Hasher::new()
                .update(b"initial")
                .update(replica_id.as_bytes()),
        ))
    }

    /// The text that goes to the lighthouse.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The lineage after committing `step` in `epoch`.
    #[must_use]
    pub fn after(&self, epoch: Epoch, step: Step) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(self.0.as_bytes());
        hasher.update(&epoch.0.to_le_bytes());
        hasher.update(&step.0.to_le_bytes());
        Self(short(&hasher))
    }
}

/// 128 bits of the hash in hexadecimal.
fn short(hasher: &blake3::Hasher) -> String {
    let mut text = String::with_capacity(32);
    for byte in hasher.finalize().as_bytes().iter().take(16) {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_commits_give_the_same_lineage_and_another_epoch_another() {
        let start = Lineage::default();
        let a = start.after(Epoch(5), Step(0)).after(Epoch(5), Step(1));
        assert_eq!(a, start.after(Epoch(5), Step(0)).after(Epoch(5), Step(1)));
        assert_ne!(a, start.after(Epoch(5), Step(0)).after(Epoch(6), Step(1)));
        assert_eq!(a.as_str().len(), 32);
    }
}
