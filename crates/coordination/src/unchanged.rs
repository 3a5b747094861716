//! The quorum that is the last one, a step on: what its members say about their progress is the same for all, and stands for the whole list.
//!
//! The lighthouse decides by trial whether the short form says everything: it applies the progress to the earlier list, and compares whole members. A
//! field that is not progress is as in the list, so one that is added later and forgotten here costs the short form, never its truth. A replica that was
//! told its own part holds that instead; it advances with the list if no member's place has changed (`Assignment::is_advance_of`).

use std::sync::Arc;

use ftcore::{Epoch, Error, ErrorKind, Result};

use crate::wire::torchft;
use protocol::{Member, Quorum, QuorumResult, Told};

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

/// The lighthouse's last answer, as its receiver keeps it: what need not be told again.
#[derive(Debug, Default)]
pub(crate) struct Held {
    list: u64,
    /// The wish for an initial sync that it answered.
    init_sync: bool,
    told: Option<Told>,
}

impl Held {
    /// What the lighthouse calls that which is held, for one who asks with that wish; 0 if there is nothing.
    pub(crate) fn list(&self, init_sync: bool) -> u64 {
        if self.init_sync == init_sync { self.list } else { 0 }
    }

    /// The next answer, whole. Errors: `Protocol` for one without a quorum; the one after that is asked for in full.
    pub(crate) fn take_in(
        &mut self,
        response: torchft::LighthouseQuorumResponse,
        init_sync: bool,
    ) -> Result<Told> {
        let before = std::mem::take(self);
        let torchft::LighthouseQuorumResponse {
            quorum,
            unchanged,
            list,
            parts,
        } = response;
        let told = match (quorum, unchanged) {
            (Some(quorum), _) => Told::Members(Arc::new(quorum.into())),
            (None, Some(unchanged)) => {
                let held = (before.list, before.init_sync) == (list, init_sync) && list != 0;
                before.advanced(unchanged).filter(|_| held).ok_or_else(|| {
                    Error::new(
                        ErrorKind::Protocol,
                        "the lighthouse answered that the members of the quorum are unchanged; those of another one are held here",
                    )
                })?
            }
            (None, None) if !parts.is_empty() => {
                let parts: Result<Vec<QuorumResult>> = parts.into_iter().map(TryInto::try_into).collect();
                Told::Parts(parts?.into())
            }
            (None, None) => {
                return Err(Error::new(
                    ErrorKind::Protocol,
                    "the lighthouse answered without a quorum",
                ));
            }
        };
        *self = Self {
            list,
            init_sync,
            told: Some(told.clone()),
        };
        Ok(told)
    }

    /// What was told, a step on; `None` if that was another quorum.
    fn advanced(self, unchanged: torchft::Unchanged) -> Option<Told> {
        let (id, progress) = (Epoch::of_signed(unchanged.quorum_id), unchanged.progress?.into());
        match self.told? {
            Told::Members(mut quorum) => {
                let same = quorum.quorum_id == id;
                apply(Arc::make_mut(&mut quorum), &progress);
                same.then_some(Told::Members(quorum))
            }
            Told::Parts(parts) => {
                let mut parts = parts.to_vec();
                parts.iter_mut().for_each(|part| part.advance(&progress));
                let same = parts.iter().all(|part| part.quorum_id == id);
                same.then(|| Told::Parts(parts.into()))
            }
        }
    }
}
