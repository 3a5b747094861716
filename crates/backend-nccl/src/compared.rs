//! Collectives of groups whose ranks compare what they call: each waits here until all ranks have come to it with the same, then it is enqueued, in
//! order. A thread of its own does that, so that neither callers nor messages wait.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::Duration;

use ftcore::agreement::{Agreement, Record};
use ftcore::engine::{Held, Place, Ticket, spawn};
use ftcore::{Configuration, Error, ErrorKind, Event, OpKind, Result, later};

use crate::driver::{NcclDriver, Shared};

/// At a deadline the engine says what was waited for; this long it may take.
const VERDICT: Duration = Duration::from_secs(2);

/// A collective that waits.
pub(crate) struct Waiting {
    pub(crate) held: Held,
    pub(crate) contribute: bool,
    pub(crate) after: Option<Arc<dyn Event>>,
    pub(crate) ticket: Ticket<NcclDriver>,
}

/// What the ranks of `c` compare.
pub(crate) fn agreement(c: &Configuration) -> Agreement {
    let prefix = format!("{}/nccl/{}", c.prefix, c.epoch);
    Agreement::new(c.store.clone(), prefix, Place::of(c))
}

/// Where collectives wait, and the other end for [`start`].
pub(crate) fn queue() -> (Sender<Waiting>, Receiver<Waiting>) {
    channel()
}

/// Starts the thread; it ends with the last sender, which goes with the driver.
pub(crate) fn start(shared: &Arc<Shared>, waiting: Receiver<Waiting>) -> Result<()> {
    let weak = Arc::downgrade(shared);
    spawn("ox-nccl-compare", move || {
        for (number, one) in (0..).zip(waiting) {
            match Weak::upgrade(&weak) {
                Some(shared) => enqueue(&shared, one, number),
                None => return,
            }
        }
    })
}

fn enqueue(shared: &Arc<Shared>, one: Waiting, number: u64) {
    // Of a group that has failed none looks at the store: what is queued has its memory back before the grace is over.
    let agreed = shared
        .failure()
        .map_or_else(|| compare(shared, &one, number), Err);
    let Waiting {
        held,
        contribute,
        after,
        ticket,
    } = one;
    match shared.failure().map_or(agreed, Err) {
        Err(error) => ticket.fail(error, held.free()),
        Ok(()) => NcclDriver::of(shared.clone()).begin(held, contribute, after.as_deref(), ticket),
    }
}

fn compare(shared: &Shared, one: &Waiting, number: u64) -> Result<()> {
    let (Some(agreement), Some(op)) = (&shared.agreement, one.held.op()) else {
        let text = "a collective waits that none compares";
        return Err(Error::new(ErrorKind::Internal, text));
    };
    let until = later(one.ticket.deadline(), VERDICT);
    agreement.post(&Record::of(op, shared.place), number, until)?;
    match op.kind() {
        // It waits for all by itself, and names who is missing; ranks that call something else compare.
        OpKind::MonitoredBarrier => Ok(()),
        _ => agreement.compare(number, until),
    }
}
