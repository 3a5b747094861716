//! How the ranks of an epoch get one communicator: they meet ([`peers`]), rank 0 makes a unique id that goes round, and the library connects them.
//!
//! The library's own calls have no deadline, so they run on a thread that may be given up; what it makes too late, it
//! aborts itself.

use crate::ftcore::peers::{self, Meeting, Terms};
use crate::ftcore::{Configuration, Error, Result, bounded};
use crate::raw::hccl::{CommHandle, UniqueId};
use crate::runtime::{Runtime, runtime};

/// Runs a call of the library on a thread that is given up at the deadline, or when `elsewhere` says why.
pub(crate) fn call<T: Send + 'static>(
    c: &Configuration,
    what: &str,
    phase: &str,
    elsewhere: &dyn Fn() -> Option<Error>,
    call: impl FnOnce() -> Result<T> + Send + 'static,
    late: impl FnOnce(Result<T>) + Send + 'static,
) -> Result<T> {
    let stop = || c.cancel.reason().or_else(elsewhere);
    let hangs = || {
        Error::timeout(format!(
            "waiting for {what}, which has not returned by the deadline (phase: {phase}; every rank it needs was there)"
        ))
    };
    bounded("ox-hccl-init", c.deadline, &stop, &hangs, call, late)?
}

fn join(c: &Configuration, runtime: &'static Runtime, meeting: &Meeting) -> Result<CommHandle> {
    let hccl = &runtime.libraries.hccl;
    let make = || {
        let id = call(
            c,
            "hcclGetUniqueId",
            "identify",
            &meeting.watch(),
            || hccl.unique_id(),
            drop,
        );
        Ok(id?.to_bytes())
    };
    let id = UniqueId::from_bytes(&meeting.id(c, make)?)?;
    let (world, rank) = (c.world_size, c.rank);
    let init = move || hccl.init_rank(id, world, rank);
    let late = move |comm| {
        if let Ok(comm) = comm
            && let Err(error) = hccl.abort(comm)
        {
            tracing::warn!(%error, "a communicator that came too late was not aborted");
        }
    };
    call(c, "hcclCommInitRank", "connect", &meeting.watch(), init, late)
}

/// Meets the other ranks and makes the communicator of `c`; none for a world of one.
///
/// Errors: those of [`peers::meet`]; `Timeout` names the call that hangs and the phase; the reason of the token; `Backend` with the library's
/// code.
pub(crate) fn connect(
    c: &Configuration,
    terms: impl FnOnce(&Runtime) -> Terms,
) -> Result<(&'static Runtime, Option<CommHandle>, Meeting)> {
    let runtime = call(c, "the device", "acquire", &|| None, runtime, drop)?;
    let terms = terms(runtime);
    let meeting = peers::meet(c, &terms)?;
    if c.world_size == 1 {
        return Ok((runtime, None, meeting));
    }
    match join(c, runtime, &meeting) {
        Ok(comm) => Ok((runtime, Some(comm), meeting)),
        Err(error) => {
            meeting.fail(&error);
            Err(error)
        }
    }
}
