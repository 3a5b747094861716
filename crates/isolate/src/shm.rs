//! Shared memory: sealed memfds, mapped in parent and child, and tensors over them.
//!
//! With `raw` the only unsafe code of this crate. A mapping lives as long as anything that points into it: regions and
//! tensors hold an `Arc` of it (INV-8).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use ftcore::{DType, Device, Error, Result, Tensor, copy_bytes};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::wire::odd;

/// Size and seals never change, so that neither side can cut the memory under the other's feet (a SIGBUS).
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// One mapped memfd.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
    /// Kept by the parent, to be passed to further children.
    fd: Option<OwnedFd>,
}

// SAFETY: the mapping is plain memory; who may touch which part of it is decided by regions and tensors.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

fn map(fd: BorrowedFd<'_>, bytes: usize) -> Result<NonNull<u8>> {
    // SAFETY: a new mapping at an address of the kernel's choice touches no memory that exists; the size is sealed.
    let base = unsafe {
        mmap(
            std::ptr::null_mut(),
            bytes,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
            fd,
            0,
        )
    };
    let base = base.map_err(|e| Error::io(format!("map {bytes} bytes of shared memory"), e.into()))?;
    NonNull::new(base.cast::<u8>()).ok_or_else(|| Error::invalid("shared memory was mapped at address 0"))
}

impl Mapping {
    /// New memory of `bytes` (not 0), zeroed. The kernel provides a page when it is touched first.
    pub(crate) fn create(bytes: usize) -> Result<Self> {
        let io = |what: &str, e: rustix::io::Errno| {
            Error::io(format!("{what} {bytes} bytes of shared memory"), e.into())
        };
        let fd = memfd_create("oxccl-isolate", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(|e| io("create", e))?;
        ftruncate(&fd, bytes as u64).map_err(|e| io("size", e))?;
        fcntl_add_seals(&fd, SEALS).map_err(|e| io("seal", e))?;
        let base = map(fd.as_fd(), bytes)?;
        Ok(Self {
            base,
            bytes,
            fd: Some(fd),
        })
    }

    /// Memory of the other process. Refused if it is not sealed or not of that size (INV-10).
    pub(crate) fn open(fd: OwnedFd, bytes: u64) -> Result<Self> {
        let seals = fcntl_get_seals(&fd).map_err(|e| Error::io("ask for seals", e.into()))?;
        let size = fstat(&fd)
            .map_err(|e| Error::io("ask for a size", e.into()))?
            .st_size;
        let fits = seals.contains(SEALS) && bytes > 0 && u64::try_from(size).is_ok_and(|s| s == bytes);
        let bytes = usize::try_from(bytes).ok().filter(|_| fits);
        let bytes = bytes.ok_or_else(|| odd("shared memory of another size, or without seals"))?;
        let base = map(fd.as_fd(), bytes)?;
        Ok(Self {
            base,
            bytes,
            fd: None,
        })
    }

    /// The memfd, in the process that made it.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    /// Where `ptr` lies in here, if all `length` bytes from it do.
    pub(crate) fn offset_of(&self, ptr: *const u8, length: usize) -> Option<usize> {
        let offset = (ptr as usize).checked_sub(self.base.as_ptr() as usize)?;
        (offset.checked_add(length)? <= self.bytes).then_some(offset)
    }

    fn at(&self, offset: usize, length: usize) -> Result<NonNull<u8>> {
        match offset.checked_add(length) {
            Some(end) if end <= self.bytes => {
                // SAFETY: within the mapping (checked), which is one allocation.
                Ok(unsafe { self.base.add(offset) })
            }
            _ => Err(odd(format_args!(
                "{length} bytes at {offset} of {} bytes of shared memory",
                self.bytes
            ))),
        }
    }

    /// Copies into the region at `offset`, which the caller has for itself.
    pub(crate) fn copy_in(&self, offset: usize, from: &[u8]) -> Result<()> {
        let to = self.at(offset, from.len())?;
        // SAFETY: `to` has room (checked); the region is the caller's, so nothing else touches it, and `from` is other
        // memory: a tensor in shared memory is not copied.
        copy_bytes(
            unsafe { std::slice::from_raw_parts_mut(to.as_ptr(), from.len()) },
            from,
        );
        Ok(())
    }

    /// Copies out of the region at `offset`, which the caller has for itself.
    pub(crate) fn copy_out(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        let from = self.at(offset, to.len())?;
        // SAFETY: as above.
        copy_bytes(to, unsafe { std::slice::from_raw_parts(from.as_ptr(), to.len()) });
        Ok(())
    }

    /// A tensor over the region at `offset`. `owner` keeps the mapping and the region.
    ///
    /// The caller sees to it that the region is reachable for writing through this tensor only: the parent by giving each
    /// region out once, the child by trusting the parent, whose memory it is.
    pub(crate) fn tensor(
        &self,
        offset: usize,
        dtype: DType,
        shape: &[usize],
        owner: Box<dyn std::any::Any + Send + Sync>,
    ) -> Result<Tensor> {
        let ptr = self.at(offset, Tensor::bytes_of(dtype, shape)?)?;
        // SAFETY: as many bytes within the mapping (checked), which `owner` keeps; alignment is checked by `from_raw`; one
        // writer as said above.
        unsafe { Tensor::from_raw(ptr, dtype, shape, None, Device::CPU, owner) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nothing points into it any more: whatever does holds an `Arc` of it.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// A tensor of the other process's memory, with `mapping` kept by it.
pub(crate) fn foreign(mapping: &Arc<Mapping>, offset: u64, dtype: DType, count: u64) -> Result<Tensor> {
    let size = |n: u64| usize::try_from(n).map_err(|_| odd("a size beyond this machine's memory"));
    mapping.tensor(size(offset)?, dtype, &[size(count)?], Box::new(mapping.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_mappings_see_the_same_bytes_and_nothing_outside() {
        let a = Mapping::create(1 << 16).unwrap();
        let fd = a.fd().unwrap().try_clone_to_owned().unwrap();
        let b = Arc::new(Mapping::open(fd, 1 << 16).unwrap());
        a.copy_in(128, &[1, 2, 3, 4]).unwrap();
        let t = foreign(&b, 128, DType::U8, 4).unwrap();
        assert_eq!(t.bytes(), [1, 2, 3, 4]);
        assert_eq!(b.offset_of(t.as_ptr(), 4), Some(128));
        assert_eq!(b.offset_of(t.as_ptr(), 1 << 16), None);
        drop(b);
        assert_eq!(t.bytes(), [1, 2, 3, 4], "the tensor keeps the mapping");
        let b = Arc::new(Mapping::open(a.fd().unwrap().try_clone_to_owned().unwrap(), 1 << 16).unwrap());
        for (offset, count) in [(0, 1 << 17), (65_529, 1), (u64::MAX, 1), (0, u64::MAX), (4, 1)] {
            assert!(
                foreign(&b, offset, DType::F64, count).is_err(),
                "{offset} {count}"
            );
        }
        assert!(a.copy_in(65_535, &[0, 0]).is_err());
    }

    #[test]
    fn memory_that_is_not_sealed_or_of_another_size_is_refused() {
        let open = memfd_create("oxccl-test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&open, 4096).unwrap();
        assert!(Mapping::open(open.try_clone().unwrap(), 4096).is_err());
        fcntl_add_seals(&open, SEALS).unwrap();
        for bytes in [0, 4095, 8192, u64::MAX] {
            assert!(
                Mapping::open(open.try_clone().unwrap(), bytes).is_err(),
                "{bytes}"
            );
        }
        Mapping::open(open, 4096).unwrap();
    }
}
