//! Communicators split off another one.
//!
//! The library writes the child's handle on a thread of its own when the child stands (seen in its source and in 2.30's behaviour; the
//! caller's place holds null until then), and the parent is in progress that long. So a split has three steps: the call, the wait
//! for the parent, [`Comm::take_child`]. The place belongs to the parent and outlives whatever may still write there.

use std::ffi::c_int;
use std::ptr;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use ftcore::{Error, ErrorKind, Result};

use super::{Comm, Place, Wish};

const CALL: &str = "ncclCommSplit";

/// Where a rank goes in a split, as NCCL takes it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    color: c_int,
    key: c_int,
}

impl Part {
    /// `InvalidArgument` for what NCCL has no number for. Without a colour the rank gets no communicator.
    pub(crate) fn new(color: Option<u32>, key: u32) -> Result<Self> {
        let number = |what: &str, n: u32| {
            c_int::try_from(n).map_err(|_| Error::invalid(format!("{what} {n} is too large for NCCL")))
        };
        Ok(Self {
            color: color.map_or(Ok(nccl_sys::SPLIT_NOCOLOR), |c| number("colour", c))?,
            key: number("key", key)?,
        })
    }

    /// False for a rank that gets no communicator.
    pub(crate) fn is_wanted(&self) -> bool {
        self.color >= 0
    }
}

impl Comm {
    /// Begins to divide this communicator; a collective call of all ranks. May block for as long as the library likes.
    pub(crate) fn split(&self, Part { color, key }: Part, wish: &Wish) -> Result<()> {
        let _inside = self.enter()?;
        let place = Place::new(wish)?;
        // Neither moves with the place.
        let (handle, name) = (place.handle.as_ptr(), place.name.as_ptr());
        {
            // Not held over the call: an abort, which the call may be waiting for, takes the place out.
            let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
            if child.is_some() {
                let text = format!("{CALL}: a child of this communicator was never finished");
                return Err(Error::new(ErrorKind::InvalidState, text));
            }
            *child = Some(place);
        }
        let call = self.nccl.api().comm_split;
        let result = self.nccl.with_config(wish, name, |config| {
            // SAFETY: the gate keeps the parent; the place outlives the library's use of it; the configuration lives over the
            // call, which copies it.
            Ok(unsafe { call(self.handle, color, key, handle, config) })
        })?;
        self.nccl.check(CALL, result)
    }

    /// The child of a split, once nothing is in progress any more.
    pub(crate) fn take_child(&self) -> Result<Self> {
        let place = self.child.lock().unwrap_or_else(PoisonError::into_inner).take();
        let none = || Error::new(ErrorKind::InvalidState, format!("{CALL}: no child is being made"));
        Self::of(
            self.nccl,
            &self.gpu,
            place.ok_or_else(none)?,
            CALL,
            nccl_sys::code::SUCCESS,
        )
    }

    /// The split made none, as was to be expected.
    pub(crate) fn has_no_child(&self) {
        self.child.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// After this communicator was freed, when the library's own threads write to the place no more: ends the child that no caller has
    /// taken. The place stays: a call that is stuck may come back and write there, and keeps this communicator until then.
    pub(super) fn end_child(&self) {
        let handle = {
            let child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
            let taken = child
                .as_ref()
                .map(|p| p.handle.swap(ptr::null_mut(), Ordering::AcqRel));
            taken.unwrap_or(ptr::null_mut())
        };
        if handle.is_null() {
            return;
        }
        // SAFETY: nothing else has seen this handle.
        let result = unsafe { (self.nccl.api().comm_abort)(handle) };
        if let Err(error) = self.nccl.check("ncclCommAbort", result) {
            tracing::warn!(%error, "an unfinished communicator could not be aborted");
        }
    }
}
