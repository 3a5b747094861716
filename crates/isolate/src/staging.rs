//! Putting an operation's tensors where the child sees them: copied into shared memory, unless they lie there already.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{Collective, Error, Event, Result, Stream, Tensor, deadline_in, later};

use crate::crossing::{Mode, Shared, order_after};
use crate::pool::{Pool, Region, Segment};
use crate::wire::op::Place;

/// After an error in the middle: how long copies that were enqueued may take, until the memory counts as in use.
const DRAIN: Duration = Duration::from_secs(1);
/// What the copy of an operation's inputs takes at most, unless work of the caller's stream stands before it.
const COPY: Duration = Duration::from_millis(200);

/// Where the tensors of an operation lie, how they got there, and in which segments.
pub(crate) struct Staged {
    pub(crate) places: Vec<Place>,
    stagings: Vec<Staging>,
    /// Those that the child must know.
    pub(crate) segments: Vec<Arc<Segment>>,
    copied: Option<Copied>,
    begun: Instant,
}

/// With device memory: how it crosses, the event that is reached when the inputs are copied, kept until the child has waited for it, and its
/// handle for the child.
type Copied = (Arc<Shared>, Arc<dyn Event>, Vec<u8>);

/// How one tensor gets to the child.
enum Staging {
    /// It has no elements.
    Nothing,
    /// It lies in shared memory already.
    Direct,
    /// The child works on a copy, which is copied back if this is true.
    Copy(Region, bool),
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
        begun: Instant::now(),
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
    /// The handle of the event that is reached when the inputs are there.
    pub(crate) fn arrival(&self) -> Option<Vec<u8>> {
        self.copied.as_ref().map(|(_, _, handle)| handle.clone())
    }

    /// True if the child works on memory that the caller would get back.
    pub(crate) fn is_direct(&self) -> bool {
        self.stagings.iter().any(|s| matches!(s, Staging::Direct))
    }

    pub(crate) fn is_on_device(&self) -> bool {
        self.copied.is_some()
    }

    /// False if a copy of the inputs may still be waiting for the caller's stream: then the caller's memory and the regions are
    /// in use, whatever becomes of the child. A failure may be faster than a copy that was just begun, so that one gets a moment: from the
    /// submission on, so that however many fail together wait no longer than one of them.
    pub(crate) fn is_copied(&self) -> bool {
        let event = self.copied.as_ref().map(|(_, event, _)| event);
        event.is_none_or(|event| event.synchronize(later(self.begun, COPY)).is_ok())
    }

    /// Copies the results into `tensors`, those that it was made of. With device memory an error leaves it open whether copies are still under
    /// way.
    pub(crate) fn bring_back(&self, tensors: &mut [Tensor]) -> Result<()> {
        let results = tensors.iter_mut().zip(&self.stagings);
        let mut results = results.filter_map(|(tensor, staging)| match staging {
            Staging::Copy(region, true) => Some((region, tensor)),
            _ => None,
        });
        match &self.copied {
            Some((shared, ..)) => shared.bring_back(&mut results.collect::<Vec<_>>()),
            None => results.try_for_each(|(region, tensor)| {
                let mapping = region.segment.mapping()?;
                mapping.copy_out(region.offset, tensor.bytes_mut())
            }),
        }
    }

    fn fill(
        &mut self,
        pool: &Pool,
        op: &Collective,
        rank: u32,
        copy: impl Fn(&Region, &Tensor) -> Result<()>,
    ) -> Result<()> {
        for (tensor, role) in op.tensors().into_iter().zip(op.roles(rank)) {
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
                        let copied = if role.is_read() {
                            copy(&region, tensor)
                        } else {
                            Ok(())
                        };
                        staging = Staging::Copy(region, role.is_written());
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
