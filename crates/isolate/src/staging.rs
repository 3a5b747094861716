//! Putting an operation's tensors where the child sees them: copied into shared memory, unless they lie there already.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{Collective, Error, Event, Result, Stream, Tensor, deadline_in};

use crate::crossing::{Mode, Shared, order_after};
use crate::pending::Slot;
use crate::pool::{Pool, Region, Segment};
use crate::wire::op::{Place, flows};

/// After an error in the middle: how long copies that were enqueued may take, until the memory counts as in use.
const DRAIN: Duration = Duration::from_secs(1);

/// Where the tensors of an operation lie, how they got there, and in which segments.
pub(crate) struct Staged {
    pub(crate) places: Vec<Place>,
    pub(crate) stagings: Vec<Staging>,
    pub(crate) segments: Vec<Arc<Segment>>,
    pub(crate) copied: Option<Copied>,
}

/// With device memory: how it crosses, the event that is reached when the inputs are copied, and its handle for the child.
pub(crate) type Copied = (Arc<Shared>, Arc<dyn Event>, Vec<u8>);

/// How one tensor gets to the child.
pub(crate) enum Staging {
    Nothing,
    Direct,
    Copy(Region, bool),
}

impl Staging {
    pub(crate) fn slot(self, tensor: Tensor) -> Slot {
        match self {
            Self::Direct => Slot::Direct(tensor),
            Self::Nothing => Slot::Staged {
                tensor,
                region: None,
                written: false,
            },
            Self::Copy(region, written) => Slot::Staged {
                tensor,
                region: Some(region),
                written,
            },
        }
    }
}

/// Why it did not work, and whether a copy may still be reading the tensors.
pub(crate) struct Unstaged {
    pub(crate) error: Error,
    pub(crate) touched: bool,
}

impl From<Error> for Unstaged {
    fn from(error: Error) -> Self {
        Self {
            error,
            touched: false,
        }
    }
}

/// Stages the tensors of `op`, after the present end of `stream`.
pub(crate) fn stage(
    pool: &Pool,
    op: &Collective,
    rank: u32,
    stream: Option<&Arc<dyn Stream>>,
    deadline: Instant,
) -> Result<Staged, Unstaged> {
    let mut staged = Staged {
        places: Vec::new(),
        stagings: Vec::new(),
        segments: Vec::new(),
        copied: None,
    };
    let Mode::Shared(shared) = pool.mode() else {
        if let Some(stream) = stream {
            order_after(&**stream, deadline)?;
        }
        staged.fill(pool, op, rank, |region, tensor| {
            region.segment.mapping()?.copy_in(region.offset, tensor.bytes())
        })?;
        return Ok(staged);
    };
    if let Some(tensor) = op.tensors().iter().find(|t| *t.device() != shared.device) {
        let text = format!(
            "a tensor is on {}; this group works on {}",
            tensor.device(),
            shared.device
        );
        return Err(Error::invalid(text).into());
    }
    let out = shared.stream()?;
    if let Some(stream) = stream {
        // On the device; only a stream of another kind is waited for here.
        out.wait(&*stream.record()?)?;
    }
    let filled = staged
        .fill(pool, op, rank, |region, tensor| {
            let mut view = shared.view(region, tensor)?;
            shared.crossing.copy(tensor, &mut view, &*out)
        })
        .and_then(|()| shared.crossing.mark(&*out));
    match filled {
        Ok((event, handle)) => {
            shared.give_back(out, event.clone());
            staged.copied = Some((shared.clone(), event, handle));
            Ok(staged)
        }
        Err(error) => {
            let touched = out.synchronize(deadline.min(deadline_in(DRAIN))).is_err();
            if touched {
                std::mem::forget(staged);
            }
            Err(Unstaged { error, touched })
        }
    }
}

impl Staged {
    /// For an operation that does not go to the child after all: true if nothing touches its tensors any more. What lies in
    /// regions that a copy may still touch is given up.
    pub(crate) fn settle(self, deadline: Instant) -> bool {
        let event = self.copied.as_ref().map(|(_, event, _)| event);
        let until = deadline.min(deadline_in(DRAIN));
        if event.is_none_or(|e| e.synchronize(until).is_ok()) {
            return true;
        }
        std::mem::forget(self);
        false
    }

    fn fill(
        &mut self,
        pool: &Pool,
        op: &Collective,
        rank: u32,
        copy: impl Fn(&Region, &Tensor) -> Result<()>,
    ) -> Result<()> {
        for (tensor, flow) in op.tensors().into_iter().zip(flows(op, rank)) {
            let mut place = Place {
                segment: 0,
                offset: 0,
                dtype: tensor.dtype(),
                count: tensor.count() as u64,
            };
            let bytes = tensor.byte_len();
            let mut staging = Staging::Nothing;
            if bytes > 0 {
                let (segment, offset) = match pool.locate(tensor) {
                    Some(at) => {
                        staging = Staging::Direct;
                        at
                    }
                    None => {
                        let region = pool.take(bytes)?;
                        let at = (region.segment.clone(), region.offset);
                        let copied = if flow.read { copy(&region, tensor) } else { Ok(()) };
                        staging = Staging::Copy(region, flow.written);
                        if let Err(error) = copied {
                            // Kept with the others: a copy may be under way.
                            self.stagings.push(staging);
                            return Err(error);
                        }
                        at
                    }
                };
                place.segment = segment.id;
                place.offset = offset as u64;
                if !self.segments.iter().any(|s| s.id == segment.id) {
                    self.segments.push(segment);
                }
            }
            self.places.push(place);
            self.stagings.push(staging);
        }
        Ok(())
    }
}
