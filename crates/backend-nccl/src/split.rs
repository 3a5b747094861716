//! Dividing a communicator: a collective call of all ranks, in the order of submission.

use std::sync::Arc;
use std::time::Instant;

use ftcore::engine::Engine;
use ftcore::{Error, ErrorKind, Result, bounded};

use crate::driver::{NcclDriver, Shared};
use crate::raw::{Comm, Part, Wish};

/// Splits the group's communicator. The child is connected. What goes wrong on the way leaves the communicator in a state that cannot be
/// known, so it fails the group, and the other ranks hear of it at once.
pub(crate) fn split(
    engine: &Arc<Engine<NcclDriver>>,
    part: Part,
    wish: Wish,
    deadline: Instant,
) -> Result<Option<Comm>> {
    let shared = engine.driver().shared();
    let order = shared.order();
    if let Some(first) = shared.failure() {
        let text = format!("the group failed before: {first}");
        return Err(Error::new(ErrorKind::Poisoned, text).with_source(first));
    }
    let divided = divide(shared, part, wish, deadline);
    drop(order);
    divided.map_err(|error| match shared.failure() {
        // The group's own failure came first, and only closed the communicator under the call.
        Some(first) if error.kind() == ErrorKind::Aborted => first,
        Some(_) => error,
        None => {
            engine.fail(shared.place.name(error.clone().with_op("split")));
            error
        }
    })
}

fn divide(shared: &Arc<Shared>, part: Part, wish: Wish, deadline: Instant) -> Result<Option<Comm>> {
    let stop = || shared.failure();
    let late = || Error::timeout("NCCL did not return from ncclCommSplit by the deadline");
    shared.comm.settle(deadline, &stop)?;
    let this = shared.clone();
    let wanted = part.is_wanted();
    let call = move || {
        let _inside = this.gpu.enter()?;
        this.comm.split(part, &wish)
    };
    bounded("ox-nccl-split", deadline, &stop, &late, call, drop)??;
    let child = match shared.comm.settle(deadline, &stop) {
        Ok(()) if !wanted => {
            shared.comm.has_no_child();
            return Ok(None);
        }
        Ok(()) => shared.comm.take_child()?,
        // The child stays with this communicator, whose abort ends both.
        Err(error) => return Err(apart(shared, error)),
    };
    match child.settle(deadline, &stop) {
        Ok(()) => Ok(Some(child)),
        Err(error) => {
            child.give_up();
            Err(apart(shared, error))
        }
    }
}

fn apart(shared: &Shared, error: Error) -> Error {
    match (error.kind(), shared.failure()) {
        (ErrorKind::Timeout, None) => {
            Error::timeout("the ranks of a part did not come together by the deadline of the split")
        }
        _ => error,
    }
}
