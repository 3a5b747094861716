//! An operation that is in the child: its tensors, where they go when it ends, and who hears of it.

use std::time::Instant;

use ftcore::{Completer, Completion, Error, OpKind, Tensor};

use crate::pool::Region;

/// One tensor of a pending operation.
pub(crate) enum Slot {
    /// The caller's own memory; the child works on a copy in `region`, which is copied back if `written`.
    Staged {
        tensor: Tensor,
        region: Option<Region>,
        written: bool,
    },
    /// In shared memory already.
    Direct(Tensor),
}

/// An operation in the child.
pub(crate) struct Pending {
    pub(crate) group: u32,
    pub(crate) kind: OpKind,
    pub(crate) seq: Option<u64>,
    pub(crate) rank: u32,
    pub(crate) epoch: u64,
    pub(crate) submitted: Instant,
    pub(crate) deadline: Instant,
    pub(crate) slots: Vec<Slot>,
    pub(crate) completer: Completer,
}

impl Pending {
    /// True if the child works on memory that the caller would get back.
    pub(crate) fn is_direct(&self) -> bool {
        self.slots.iter().any(|s| matches!(s, Slot::Direct(_)))
    }

    pub(crate) fn dissolve(slots: Vec<Slot>) -> (Vec<Tensor>, Vec<Region>) {
        let mut regions = Vec::new();
        let tensors = slots.into_iter().map(|slot| match slot {
            Slot::Direct(tensor) => tensor,
            Slot::Staged { tensor, region, .. } => {
                regions.extend(region);
                tensor
            }
        });
        (tensors.collect(), regions)
    }

    /// It never reached the child.
    pub(crate) fn refuse(self, error: Error) {
        drop(self.fail(error));
    }

    /// Fails it; what the child may still touch is returned, to be kept.
    pub(crate) fn fail(self, error: Error) -> Vec<Region> {
        let (tensors, regions) = Self::dissolve(self.slots);
        self.completer.fail(error, tensors);
        regions
    }

    /// The child has finished it and does not touch its memory any more.
    pub(crate) fn succeed(self, source: Option<u32>, contributors: u32) {
        let mut tensors = Vec::with_capacity(self.slots.len());
        let mut bad = None;
        for slot in self.slots {
            tensors.push(match slot {
                Slot::Direct(tensor) => tensor,
                Slot::Staged {
                    mut tensor,
                    region,
                    written,
                } => {
                    if let Some(region) = region.filter(|_| written)
                        && let Err(e) = region.segment.mapping.copy_out(region.offset, tensor.bytes_mut())
                    {
                        bad = Some(e);
                    }
                    tensor
                }
            });
        }
        match bad {
            Some(e) => self.completer.fail(e, tensors),
            None => self.completer.succeed(Completion {
                tensors,
                source,
                contributors,
            }),
        }
    }
}
