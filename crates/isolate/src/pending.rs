//! An operation that is in the child: its tensors, where they go when it ends, and who hears of it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{Collective, Completer, Completion, Error, Event, OpKind, Tensor};

use crate::clock;
use crate::crossing::Shared;
use crate::pool::Region;

/// What the copy of an operation's inputs takes at most, unless work of the caller's stream stands before it.
const COPY: Duration = Duration::from_millis(200);

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

/// Without whose part an operation cannot end.
pub(crate) enum Needs {
    All,
    /// Of messages; no rank in particular if they may come from any.
    Ranks(Vec<u32>),
}

impl Needs {
    pub(crate) fn of(op: &Collective) -> Self {
        let peer = |op: &Collective| match op {
            Collective::Send { peer, .. } => Some(*peer),
            Collective::Recv { peer, .. } => *peer,
            _ => None,
        };
        match op {
            Collective::Send { .. } | Collective::Recv { .. } => Self::Ranks(peer(op).into_iter().collect()),
            Collective::Batch { ops } => Self::Ranks(ops.iter().filter_map(peer).collect()),
            _ => Self::All,
        }
    }
}

/// An operation in the child.
pub(crate) struct Pending {
    pub(crate) group: u32,
    pub(crate) kind: OpKind,
    pub(crate) needs: Needs,
    pub(crate) seq: Option<u64>,
    pub(crate) rank: u32,
    pub(crate) epoch: u64,
    pub(crate) submitted: Instant,
    pub(crate) deadline: Instant,
    pub(crate) slots: Vec<Slot>,
    /// With device memory: reached when the inputs are copied; kept until the child has waited for it.
    pub(crate) copied: Option<(Arc<Shared>, Arc<dyn Event>)>,
    pub(crate) completer: Completer,
}

impl Pending {
    /// False if a copy of the inputs may still be waiting for the caller's stream: then the caller's memory and the regions are
    /// in use, whatever becomes of the child. A failure may be faster than a copy that was just begun, so that one gets a moment.
    fn is_copied(&self) -> bool {
        // From the submission on, so that however many fail together wait no longer than one of them.
        let until = clock::later(self.submitted, COPY);
        self.copied
            .as_ref()
            .is_none_or(|(_, event)| event.synchronize(until).is_ok())
    }

    /// True if the child works on memory that the caller would get back.
    pub(crate) fn is_direct(&self) -> bool {
        self.slots.iter().any(|s| matches!(s, Slot::Direct(_)))
    }

    /// True if it has been waiting for `rank`, which left at `at`, for `patience`. Of a split group, whose ranks have other numbers, only if it
    /// was pending when that rank left.
    pub(crate) fn misses(&self, rank: u32, at: Instant, patience: Duration) -> bool {
        let waiting = self.submitted.max(at).elapsed() > patience;
        let needed = match &self.needs {
            _ if self.group != 0 => self.submitted <= at,
            Needs::All => true,
            Needs::Ranks(ranks) => ranks.contains(&rank),
        };
        waiting && needed
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
        if !self.is_copied() {
            let (tensors, regions) = Self::dissolve(self.slots);
            leak(tensors, regions);
            self.completer.fail(error, Vec::new());
            return Vec::new();
        }
        let (tensors, regions) = Self::dissolve(self.slots);
        self.completer.fail(error, tensors);
        regions
    }

    /// The child has finished it and does not touch its memory any more.
    pub(crate) fn succeed(mut self, source: Option<u32>, contributors: u32) {
        if let Some((shared, _)) = self.copied.take() {
            return self.succeed_on(&shared, source, contributors);
        }
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
                        && let Err(e) = region
                            .segment
                            .mapping()
                            .and_then(|m| m.copy_out(region.offset, tensor.bytes_mut()))
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

    /// As above with device memory: the results are copied back on the device.
    fn succeed_on(mut self, shared: &Shared, source: Option<u32>, contributors: u32) {
        let mut results: Vec<(&Region, &mut Tensor)> = self
            .slots
            .iter_mut()
            .filter_map(|slot| match slot {
                Slot::Staged {
                    tensor,
                    region: Some(region),
                    written: true,
                } => Some((&*region, tensor)),
                _ => None,
            })
            .collect();
        let copied = match results.is_empty() {
            true => Ok(()),
            false => shared.bring_back(&mut results),
        };
        let (tensors, regions) = Self::dissolve(self.slots);
        match copied {
            Ok(()) => self.completer.succeed(Completion {
                tensors,
                source,
                contributors,
            }),
            Err(error) => {
                leak(tensors, regions);
                self.completer.fail(error.with_op(self.kind.name()), Vec::new());
            }
        }
    }
}

/// Gives up memory that a copy on the device may still touch (INV-8).
fn leak(tensors: Vec<Tensor>, regions: Vec<Region>) {
    for tensor in tensors {
        tensor.leak("a copy between it and memory that a child process sees did not end");
    }
    std::mem::forget(regions);
}
