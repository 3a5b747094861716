//! Communicators made out of others: split, shrink, grow; and what makes one fit to be a parent when its group is configured anew.
//!
//! The library writes the child's handle on a thread of its own when the child stands (seen in its source and in 2.30's behaviour; the
//! caller's place holds null until then), and the parent is in progress that long. So a child is made in three steps: the call, the wait
//! for the parent, [`Comm::take_child`]. The place belongs to the parent and outlives whatever may still write there.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::PoisonError;
use std::sync::RwLockReadGuard;
use std::sync::atomic::Ordering;
use std::time::Instant;

use ftcore::{Error, ErrorKind, Result};
use nccl_sys::{Config, ResultCode, UniqueId};

use super::{COURTESY, Comm, Nccl, Part, Wish, new_place};

/// A way to make a communicator of one that was spared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Make {
    /// All its ranks again, in the order of the key.
    Split { key: u32 },
    /// Without these ranks.
    Shrink { without: Vec<u32> },
    /// With more ranks, so many in all. The id is the coordinator's, who is told it by [`Comm::grow_id`].
    Grow { world: u32, id: Option<UniqueId> },
}

impl Make {
    /// The call.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Split { .. } => "ncclCommSplit",
            Self::Shrink { .. } => "ncclCommShrink",
            Self::Grow { .. } => "ncclCommGrow",
        }
    }
}

fn missing(function: &str) -> Error {
    Error::unsupported(format!("this NCCL has no {function}"))
}

fn number(n: u32) -> Result<c_int> {
    c_int::try_from(n).map_err(|_| Error::invalid(format!("{n} is too large for NCCL")))
}

impl Nccl {
    /// The function without which no communicator can be used again; `None` if all are there.
    pub(crate) fn lacks_for_reuse(&self) -> Option<&'static str> {
        let api = self.api();
        [
            ("ncclCommRevoke", api.comm_revoke.is_some()),
            ("ncclCommShrink", api.comm_shrink.is_some()),
        ]
        .into_iter()
        .find_map(|(name, has)| (!has).then_some(name))
    }

    /// True if communicators can take in newcomers.
    pub(crate) fn can_grow(&self) -> bool {
        self.api().comm_grow.is_some() && self.api().comm_get_unique_id.is_some()
    }
}

impl Comm {
    /// Begins to divide this communicator; a collective call of all ranks. May block for as long as the library likes.
    pub(crate) fn split(&self, part: Part, wish: &Wish) -> Result<()> {
        let _inside = self.enter()?;
        self.divide(part, wish)
    }

    fn divide(&self, Part { color, key }: Part, wish: &Wish) -> Result<()> {
        let call = self.nccl.api().comm_split;
        self.bear("ncclCommSplit", wish, |place, config| {
            // SAFETY: INV-12 the caller holds the gate, which keeps the parent; the place outlives the library's use of it; the
            // configuration lives over the call, which copies it.
            unsafe { call(self.handle, color, key, place, config) }
        })
    }

    /// Calls for a child whose handle comes into a place that this communicator keeps.
    fn bear(
        &self,
        name: &str,
        wish: &Wish,
        call: impl FnOnce(*mut *mut c_void, &mut Config) -> ResultCode,
    ) -> Result<()> {
        let to = {
            // Not held over the call: an abort, which the call may be waiting for, takes the place out.
            let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
            if child.is_some() {
                let text = format!("{name}: a child of this communicator was never finished");
                return Err(Error::new(ErrorKind::InvalidState, text));
            }
            child.insert(new_place()).as_ptr()
        };
        let result = self.nccl.with_config(wish, |config| Ok(call(to, config)))?;
        self.nccl.check(name, result)
    }

    /// The child that a call has made, once nothing is in progress any more.
    pub(crate) fn take_child(&self, name: &str) -> Result<Self> {
        let place = self.child.lock().unwrap_or_else(PoisonError::into_inner).take();
        let place = place.unwrap_or_else(new_place);
        Self::of(self.nccl, place, name, nccl_sys::code::SUCCESS)
    }

    /// The call made none, as was to be expected.
    pub(crate) fn has_no_child(&self) {
        self.child.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// After this communicator was freed, when the library's own threads write to the place no more: ends the child that nobody has
    /// taken. The place stays: a call that is stuck may come back and write there, and keeps this communicator until then.
    pub(super) fn end_child(&self) {
        let handle = {
            let child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
            let taken = child.as_ref().map(|p| p.swap(ptr::null_mut(), Ordering::AcqRel));
            taken.unwrap_or(ptr::null_mut())
        };
        if handle.is_null() {
            return;
        }
        // SAFETY: INV-8 nobody else has seen this handle.
        let result = unsafe { (self.nccl.api().comm_abort)(handle) };
        if let Err(error) = self.nccl.check("ncclCommAbort", result) {
            tracing::warn!(%error, "an unfinished communicator could not be aborted");
        }
    }

    /// Nobody may call any more, but the communicator stays: the first half of being spared. False if it was closed before. Not beside
    /// an abort.
    pub(crate) fn withdraw(&self) -> bool {
        let first = !self.closed.swap(true, Ordering::AcqRel);
        if first {
            self.spared.store(true, Ordering::Release);
        }
        first
    }

    /// Ends everything that runs on a withdrawn communicator, which then can be a parent. The call may never return; an abort ends it.
    pub(crate) fn revoke(&self, deadline: Instant) -> Result<()> {
        // Whoever is stuck inside is let out by the call itself.
        self.is_left(COURTESY / 3);
        let revoke = self.nccl.api().comm_revoke;
        let revoke = revoke.ok_or_else(|| missing("ncclCommRevoke"))?;
        if self.ended.load(Ordering::Acquire) {
            return Err(gone());
        }
        // SAFETY: INV-12 without the gate, because an abort must not wait for it: it is freed under this call only if the call is stuck.
        let result = unsafe { revoke(self.handle, nccl_sys::REVOKE_DEFAULT) };
        self.nccl.check("ncclCommRevoke", result)?;
        self.settle_spared(deadline, &|| None)?;
        if self.is_left(COURTESY / 3) {
            return Ok(());
        }
        Err(Error::timeout("a call did not return after ncclCommRevoke"))
    }

    /// Holds a communicator open that is not ended, whether or not it was withdrawn.
    fn enter_spared(&self) -> Result<RwLockReadGuard<'_, ()>> {
        match self.gate.try_read() {
            Ok(gate) if !self.ended.load(Ordering::Acquire) => Ok(gate),
            _ => Err(gone()),
        }
    }

    /// As [`settle`](Self::settle), of a communicator that may be withdrawn.
    pub(crate) fn settle_spared(&self, deadline: Instant, stop: &dyn Fn() -> Option<Error>) -> Result<()> {
        Self::settle_by(deadline, stop, &|| {
            let _inside = self.enter_spared()?;
            self.ask()
        })
    }

    /// Begins to make a child as `make` says: a collective call of all ranks that go on. May block for as long as the library likes.
    pub(crate) fn make(&self, make: &Make, wish: &Wish) -> Result<()> {
        let _inside = self.enter_spared()?;
        let api = self.nccl.api();
        match make {
            Make::Split { key } => self.divide(Part::new(Some(0), *key)?, wish),
            Make::Shrink { without } => {
                let call = api.comm_shrink.ok_or_else(|| missing("ncclCommShrink"))?;
                // The library sorts them in place.
                let mut gone = without.iter().map(|r| number(*r)).collect::<Result<Vec<_>>>()?;
                let count = number(u32::try_from(gone.len()).unwrap_or(u32::MAX))?;
                self.bear(make.name(), wish, |place, config| {
                    // SAFETY: INV-12 as in `divide`; the list has `count` elements and is copied by the call.
                    unsafe {
                        call(
                            self.handle,
                            gone.as_mut_ptr(),
                            count,
                            place,
                            config,
                            nccl_sys::SHRINK_DEFAULT,
                        )
                    }
                })
            }
            Make::Grow { world, id } => {
                let call = api.comm_grow.ok_or_else(|| missing("ncclCommGrow"))?;
                let world = number(*world)?;
                let id = id.as_ref().map_or(ptr::null(), ptr::from_ref);
                self.bear(make.name(), wish, |place, config| {
                    // SAFETY: INV-12 as in `divide`; the id is null or lives over the call, which copies it.
                    unsafe { call(self.handle, world, id, nccl_sys::GROW_STAYS, place, config) }
                })
            }
        }
    }

    /// The id for newcomers, of the one rank that coordinates them. May block for as long as the library likes.
    pub(crate) fn grow_id(&self) -> Result<UniqueId> {
        let _inside = self.enter_spared()?;
        let call = self.nccl.api().comm_get_unique_id;
        let call = call.ok_or_else(|| missing("ncclCommGetUniqueId"))?;
        let mut id = UniqueId([0; UniqueId::BYTES]);
        // SAFETY: INV-12 the gate keeps the communicator; writes one id.
        let result = unsafe { call(self.handle, &raw mut id) };
        self.nccl.check("ncclCommGetUniqueId", result)?;
        Ok(id)
    }

    /// Joins a communicator that grows.
    pub(crate) fn join_grown(
        nccl: &'static Nccl,
        id: UniqueId,
        rank: u32,
        world: u32,
        wish: &Wish,
    ) -> Result<Self> {
        let call = nccl.api().comm_grow.ok_or_else(|| missing("ncclCommGrow"))?;
        let (rank, world) = (number(rank)?, number(world)?);
        let place = new_place();
        let result = nccl.with_config(wish, |config| {
            // SAFETY: INV-12 no parent; the id lives over the call; the place is kept by the communicator.
            Ok(unsafe {
                call(
                    ptr::null_mut(),
                    world,
                    &raw const id,
                    rank,
                    place.as_ptr(),
                    config,
                )
            })
        })?;
        Self::of(nccl, place, "ncclCommGrow", result)
    }

    /// This rank's number as NCCL sees it; `None` if the library does not tell.
    pub(crate) fn rank(&self) -> Result<Option<u32>> {
        let _inside = self.enter()?;
        let Some(call) = self.nccl.api().comm_user_rank else {
            return Ok(None);
        };
        let mut rank = 0;
        // SAFETY: INV-12 the gate keeps the communicator; writes one int.
        let result = unsafe { call(self.handle, &raw mut rank) };
        self.nccl.check("ncclCommUserRank", result)?;
        Ok(u32::try_from(rank).ok())
    }
}

fn gone() -> Error {
    Error::new(ErrorKind::Aborted, "the communicator was aborted")
}
