//! A mapping of shared (or of private) zero-initialised memory, and the only ways in which it is touched.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use ftcore::{Error, ErrorKind, Result};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

/// The size of a page: sections of a region begin at multiples of it.
pub(super) const PAGE: usize = 4096;

/// Mapped memory, unmapped once no part of it is in use.
#[derive(Debug)]
struct Whole {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to this value and stays valid until it is dropped, on whichever thread. It touches no byte itself.
unsafe impl Send for Whole {}
// SAFETY: as above.
unsafe impl Sync for Whole {}

/// A section of mapped memory.
#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    whole: Arc<Whole>,
}

// SAFETY: the section stays valid until this value is dropped, on whichever thread: it keeps the whole.
unsafe impl Send for Mapping {}
// SAFETY: through a shared reference only atomics and `read` are reachable.
unsafe impl Sync for Mapping {}

fn made(result: rustix::io::Result<*mut std::ffi::c_void>, len: usize) -> Result<Mapping> {
    let base = result.map_err(|e| Error::io(format!("mapping {len} bytes of shared memory"), e.into()))?;
    let base = NonNull::new(base.cast::<u8>())
        .ok_or_else(|| Error::new(ErrorKind::Internal, "a mapping at address zero"))?;
    let whole = Arc::new(Whole { base, len });
    Ok(Mapping { base, len, whole })
}

impl Mapping {
    /// Maps `len` bytes of `fd` from `offset` (both multiples of [`PAGE`]) on. The caller has checked that `fd` is that
    /// long and sealed against shrinking: otherwise the peer could make every access a bus error.
    pub(super) fn of(fd: BorrowedFd<'_>, offset: usize, len: usize) -> Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
        let result = unsafe {
            mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                fd,
                offset as u64,
            )
        };
        made(result, len)
    }

    /// Maps the first `len` bytes of `fd` for reading; likewise.
    pub(super) fn to_read(fd: BorrowedFd<'_>, len: usize) -> Result<Self> {
        // SAFETY: as above.
        let result = unsafe {
            mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ,
                MapFlags::SHARED,
                fd,
                0,
            )
        };
        let map = made(result, len)?;
        // It belongs into the dumps of its owner.
        // SAFETY: the advice is about this mapping, and changes neither what is in it nor how it may be used.
        let _ = unsafe { madvise(map.base.as_ptr().cast(), map.len, Advice::LinuxDontDump) };
        Ok(map)
    }

    /// `len` bytes of this process only.
    pub(super) fn private(len: usize) -> Result<Self> {
        // SAFETY: as above.
        let result = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        };
        made(result, len)
    }

    /// The `len` bytes from `at` on (both multiples of [`PAGE`]), for a user of its own: no two of them write the same bytes.
    pub(super) fn part(&self, at: usize, len: usize) -> Result<Self> {
        let fits = at.checked_add(len).is_some_and(|end| end <= self.len);
        if !fits || len < PAGE || !at.is_multiple_of(PAGE) {
            let text = format!("a mapping of {} bytes has no {len} bytes at {at}", self.len);
            return Err(Error::new(ErrorKind::Internal, text));
        }
        // SAFETY: inside the mapping (checked), so neither null nor beyond its end.
        let base = unsafe { self.base.add(at) };
        let whole = self.whole.clone();
        Ok(Self { base, len, whole })
    }

    /// The address of byte `at`.
    pub(super) fn address(&self, at: usize) -> Option<NonNull<u8>> {
        // SAFETY: inside the mapping (checked).
        (at < self.len).then(|| unsafe { self.base.add(at) })
    }

    /// Asks for huge pages, where the system leaves that to programs. A refusal changes nothing.
    pub(super) fn prefer_huge_pages(&self) {
        // SAFETY: the advice is about this mapping, and changes neither what is in it nor how it may be used.
        let _ = unsafe { madvise(self.base.as_ptr().cast(), self.len, Advice::LinuxHugepage) };
    }

    /// Empties `len` bytes from `at` on (multiples of the page size), which nothing uses any more: their pages go back to the system, and they are zeros.
    /// False if it refused.
    pub(super) fn discard(&self, at: usize, len: usize) -> bool {
        let Some(start) = self.address(at).filter(|_| at.saturating_add(len) <= self.len) else {
            return false;
        };
        // SAFETY: inside the mapping (checked), and by the contract above nothing in this process reads or writes there.
        unsafe { madvise(start.as_ptr().cast(), len, Advice::LinuxRemove) }.is_ok()
    }

    /// The 32-bit word at `AT`, which lies in the first page of every mapping.
    pub(super) fn word32<const AT: usize>(&self) -> &AtomicU32 {
        const { assert!(AT.is_multiple_of(4) && AT + 4 <= PAGE) };
        // SAFETY: inside the mapping (a page at least), aligned, valid for every bit pattern, and only ever used as an
        // atomic by all who share it.
        unsafe { &*self.base.as_ptr().add(AT).cast::<AtomicU32>() }
    }

    /// The 64-bit word at `AT`, likewise.
    pub(super) fn word64<const AT: usize>(&self) -> &AtomicU64 {
        const { assert!(AT.is_multiple_of(8) && AT + 8 <= PAGE) };
        // SAFETY: as above.
        unsafe { &*self.base.as_ptr().add(AT).cast::<AtomicU64>() }
    }

    /// `N` 64-bit words from `at` on, likewise; `None` where they are not aligned or not all there.
    pub(super) fn words<const N: usize>(&self, at: usize) -> Option<&[AtomicU64; N]> {
        let end = at.checked_add(8 * N)?;
        // SAFETY: inside the mapping and aligned (checked; it begins with a page); otherwise as above.
        (at.is_multiple_of(8) && end <= self.len).then(|| unsafe { &*self.base.as_ptr().add(at).cast() })
    }

    /// Bytes to read. The caller's protocol says that their writer is done with them; a peer that breaks it changes
    /// numbers under the reader's feet and nothing else: no index, length or pointer is ever taken from here unchecked.
    pub(super) fn read(&self, at: usize, len: usize) -> &[u8] {
        let end = at.saturating_add(len);
        if end > self.len {
            return &[];
        }
        // SAFETY: inside the mapping (checked); plain bytes; see above for the other side.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(at), len) }
    }

    /// Bytes to write. The caller's protocol says that they are not being read.
    pub(super) fn write(&mut self, at: usize, len: usize) -> &mut [u8] {
        let end = at.saturating_add(len);
        if end > self.len {
            return &mut [];
        }
        // SAFETY: inside the mapping (checked); &mut self is the only writer of this section on this side (`part`).
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().add(at), len) }
    }
}

impl Drop for Whole {
    fn drop(&mut self) {
        // SAFETY: mapped by `made`, unmapped once; every reference into it borrowed a `Mapping` that kept this value.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}
