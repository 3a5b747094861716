//! The quorum that is the last one, a step on: what its members say about their progress is the same for all, and stands for the whole list.
//!
//! The lighthouse decides by trial whether the short form says everything: it applies the progress to the list of before, and compares whole members. A
//! field that is not progress is as in the list, so one that is added later and forgotten here costs the short form, never its truth.

use ftcore::{Error, ErrorKind, Result};

use crate::wire::torchft;
use protocol::{Member, Quorum};

/// Takes over what changes from step to step.
fn advance(member: &mut Member, progress: &Member) {
    member.step = progress.step;
    member.commit_failures = progress.commit_failures;
    member.lineage.clone_from(&progress.lineage);
    member.last_quorum_id = progress.last_quorum_id;
    member.last_world_size = progress.last_world_size;
    member.batches_committed = progress.batches_committed;
}

/// What `member` says about its progress, and nothing else.
fn progress_of(member: &Member) -> Member {
    let mut progress = Member::default();
    advance(&mut progress, member);
    progress
}

/// The progress that makes `next` out of `list`, if there is one. The list is changed, and is `next`'s only if there is.
pub(crate) fn progress(list: &mut Quorum, next: &Quorum) -> Option<Member> {
    if list.quorum_id != next.quorum_id || list.participants.len() != next.participants.len() {
        return None;
    }
    let progress = progress_of(next.participants.first()?);
    apply(list, &progress);
    (list == next).then_some(progress)
}

/// All members of `list` stand where `progress` says.
pub(crate) fn apply(list: &mut Quorum, progress: &Member) {
    for member in &mut list.participants {
        advance(member, progress);
    }
}

/// The lighthouse's last answer, as its receiver keeps it: a quorum whose members need not be told again.
#[derive(Debug, Default)]
pub(crate) struct Held {
    list: u64,
    quorum: Quorum,
}

impl Held {
    /// What the lighthouse calls the member list; 0 if there is none.
    pub(crate) fn list(&self) -> u64 {
        self.list
    }

    /// The quorum of the next answer, whole. Errors: `Protocol` for an answer without one; the one after that is asked for in full.
    pub(crate) fn take_in(&mut self, response: torchft::LighthouseQuorumResponse) -> Result<Quorum> {
        let torchft::LighthouseQuorumResponse {
            quorum,
            unchanged,
            list,
        } = response;
        match (quorum, unchanged) {
            (Some(quorum), _) => self.quorum = quorum.into(),
            (None, Some(unchanged)) => {
                let same = list != 0 && (self.list, self.quorum.quorum_id) == (list, unchanged.quorum_id);
                let Some(progress) = unchanged.progress.filter(|_| same) else {
                    let text = format!(
                        "the lighthouse answered that the members of quorum {} are unchanged; those held here are of quorum {}",
                        unchanged.quorum_id, self.quorum.quorum_id
                    );
                    *self = Self::default();
                    return Err(Error::new(ErrorKind::Protocol, text));
                };
                apply(&mut self.quorum, &progress.into());
            }
            (None, None) => {
                return Err(Error::new(
                    ErrorKind::Protocol,
                    "the lighthouse answered without a quorum",
                ));
            }
        }
        self.list = list;
        Ok(self.quorum.clone())
    }
}
