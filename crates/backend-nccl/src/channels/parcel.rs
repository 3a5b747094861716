//! A message, or a batch of them, until every part is enqueued on the stream of its channel. Then the table of operations in flight has it.

use std::any::Any;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use ftcore::engine::{Held, Ticket};
use ftcore::{Error, ErrorKind, Event, Result, Stream};

use crate::cuda::event::CudaEvent;
use crate::cuda::stream::CudaStream;
use crate::driver::{NcclDriver, Shared, lock};

struct State {
    /// Until everything is enqueued, or the group has failed.
    cargo: Option<(Held, Ticket<NcclDriver>)>,
    /// The ends of the parts that are enqueued.
    events: Vec<Arc<CudaEvent>>,
    /// Parts that are being enqueued.
    entering: usize,
    /// A part failed half way: nothing proves that its memory is free.
    broken: bool,
}

/// See the module.
pub(super) struct Parcel {
    parts: usize,
    state: Mutex<State>,
}

/// A part that is being enqueued; dropped before [`enqueued`](Self::enqueued), it has failed.
pub(super) struct Part<'a> {
    parcel: &'a Parcel,
    through: bool,
}

impl Parcel {
    pub(super) fn new(parts: usize, held: Held, ticket: Ticket<NcclDriver>) -> Self {
        Self {
            parts,
            state: Mutex::new(State {
                cargo: Some((held, ticket)),
                events: Vec::new(),
                entering: 0,
                broken: false,
            }),
        }
    }

    /// Announces that a part is about to be enqueued. None if the operation is over.
    pub(super) fn begin(&self) -> Option<Part<'_>> {
        let mut state = lock(&self.state);
        state.cargo.as_ref()?;
        state.entering += 1;
        Some(Part {
            parcel: self,
            through: false,
        })
    }

    /// True while a part is on its way to the device.
    pub(super) fn is_entering(&self) -> bool {
        lock(&self.state).entering > 0
    }

    /// The group fails because of this operation.
    pub(super) fn fail(&self, error: Error) {
        let named = |ticket: &Ticket<NcclDriver>| (ticket.engine().clone(), ticket.number());
        let of = lock(&self.state).cargo.as_ref().map(|(_, ticket)| named(ticket));
        if let Some((engine, number)) = of {
            engine.fail_by(number, error);
        }
    }

    pub(super) fn give_up(&self) {
        if let Some((held, _)) = &mut lock(&self.state).cargo {
            held.suspect();
        }
    }

    /// The group has failed: what is enqueued is waited for, what never was is free, what failed half way is leaked.
    pub(super) fn close(&self, shared: &Shared) {
        let (cargo, events, lost) = {
            let mut state = lock(&self.state);
            let lost = state.broken || state.entering > 0;
            (state.cargo.take(), std::mem::take(&mut state.events), lost)
        };
        let Some((held, ticket)) = cargo else { return };
        lock(&shared.channels.open).remove(&ticket.number());
        let error = shared
            .failure()
            .unwrap_or_else(|| Error::new(ErrorKind::Aborted, "the group has ended"));
        match events.is_empty() {
            _ if lost => ticket.fail(error, Vec::new()),
            true => ticket.fail(error, held.free()),
            false => shared.in_flight.add(held, Arc::new(All(events)), ticket),
        }
    }
}

impl Part<'_> {
    /// It is enqueued up to `event`. With the last part the caller is told of an event that stands for all.
    pub(super) fn enqueued(mut self, shared: &Shared, event: Arc<CudaEvent>) {
        self.through = true;
        let (cargo, events) = {
            let mut state = lock(&self.parcel.state);
            state.events.push(event);
            if state.events.len() < self.parcel.parts {
                return;
            }
            (state.cargo.take(), std::mem::take(&mut state.events))
        };
        let Some((held, ticket)) = cargo else { return };
        lock(&shared.channels.open).remove(&ticket.number());
        let (engine, number) = (ticket.engine().clone(), ticket.number());
        let joined = joined(shared, &events);
        if let Ok(done) = &joined {
            ticket.recorded(done.clone());
        }
        shared.in_flight.add(held, Arc::new(All(events)), ticket);
        if let Err(error) = joined {
            engine.fail_by(number, error);
        }
    }
}

impl Drop for Part<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.parcel.state);
        state.entering -= 1;
        state.broken |= !self.through;
    }
}

/// One event of the device for those of several streams.
fn joined(shared: &Shared, events: &[Arc<CudaEvent>]) -> Result<Arc<dyn Event>> {
    if let [one] = events {
        return Ok(one.clone());
    }
    let meeting = CudaStream::new(&shared.gpu, false)?;
    events.iter().try_for_each(|e| meeting.wait(&**e))?;
    meeting.record()
}

/// All events, for the host.
struct All(Vec<Arc<CudaEvent>>);

impl Event for All {
    fn query(&self) -> Result<bool> {
        let mut reached = true;
        for event in &self.0 {
            reached &= event.query()?;
        }
        Ok(reached)
    }

    fn synchronize(&self, deadline: Instant) -> Result<()> {
        self.0.iter().try_for_each(|event| event.synchronize(deadline))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
