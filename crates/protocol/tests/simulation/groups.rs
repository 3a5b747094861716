//! The data plane: groups that connect once all members have come, reductions that each member finishes or not, and the
//! notice of a member that is gone. What the real groups promise, and no more: of a reduction that all ranks have begun, any
//! part of the members may still see it fail.

use std::collections::BTreeMap;

use ftcore::Epoch;

/// One process of one run of a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Who {
    pub(crate) slot: usize,
    pub(crate) incarnation: u64,
    pub(crate) rank: u32,
}

/// What a member brings to a reduction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Share {
    /// There is nothing to reduce: the members meet.
    pub(crate) is_barrier: bool,
    pub(crate) contributes: bool,
    /// It healed into the step.
    pub(crate) healed: bool,
    /// Names the work: copies of it have the same name.
    pub(crate) work: u64,
    /// The work is a copy.
    pub(crate) copied: bool,
    /// The pieces of work in it, by name.
    pub(crate) pieces: Vec<u64>,
    /// The state that the work was made of, and the one that this member holds.
    pub(crate) of: u64,
    pub(crate) state: u64,
}

#[derive(Debug, Default)]
struct Group {
    world: u32,
    /// By replica rank.
    members: BTreeMap<u32, Who>,
    shares: BTreeMap<u32, Share>,
    is_broken: bool,
}

/// All groups of all epochs, by epoch and group rank.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    all: BTreeMap<(Epoch, u32), Group>,
    /// An epoch may come again: what is left of the group that it had breaks the next one.
    pub(crate) epochs_come_again: bool,
}

/// What became of a call.
pub(crate) enum Progress {
    /// Others are still missing.
    Waits,
    /// All are there.
    Complete(Vec<Who>, Vec<Share>),
    /// A member is gone already.
    Broken,
}

impl Groups {
    /// A member begins to connect. Errors: two that claim one rank, or two sizes of one world.
    pub(crate) fn join(
        &mut self,
        epoch: Epoch,
        who: Who,
        place: u32,
        world: u32,
    ) -> Result<Progress, String> {
        let again = self.epochs_come_again;
        let group = self.all.entry((epoch, who.rank)).or_default();
        if group.members.is_empty() {
            group.world = world;
        }
        let is_taken = |m: &Who| *m != who;
        if again && (group.world != world || group.members.get(&place).is_some_and(is_taken)) {
            return Ok(Progress::Broken);
        }
        if group.world != world {
            return Err(format!(
                "epoch {epoch}: worlds of {} and {world} under one epoch",
                group.world
            ));
        }
        if let Some(other) = group.members.insert(place, who) {
            return Err(format!(
                "epoch {epoch}: {other:?} and {who:?} both are rank {place}"
            ));
        }
        if group.is_broken {
            return Ok(Progress::Broken);
        }
        Ok(if group.members.len() as u32 == world {
            Progress::Complete(group.members.values().copied().collect(), Vec::new())
        } else {
            Progress::Waits
        })
    }

    /// A member brings its share to the reduction of the attempt. There is one reduction an epoch and attempt, and a group whose
    /// reduction has ended begins the next.
    pub(crate) fn reduce(&mut self, epoch: Epoch, who: Who, place: u32, share: Share) -> Progress {
        let Some(group) = self.all.get_mut(&(epoch, who.rank)) else {
            return Progress::Broken;
        };
        if group.is_broken {
            return Progress::Broken;
        }
        group.shares.insert(place, share);
        if group.shares.len() as u32 == group.world {
            let shares = std::mem::take(&mut group.shares);
            return Progress::Complete(
                group.members.values().copied().collect(),
                shares.into_values().collect(),
            );
        }
        Progress::Waits
    }

    /// A member is gone, or gives the group up: the others that it has, who hear of it.
    pub(crate) fn leave(&mut self, epoch: Epoch, who: Who) -> Vec<Who> {
        let Some(group) = self.all.get_mut(&(epoch, who.rank)) else {
            return Vec::new();
        };
        if group.is_broken || !group.members.values().any(|m| *m == who) {
            return Vec::new();
        }
        group.is_broken = true;
        group.members.values().copied().filter(|m| *m != who).collect()
    }
}
