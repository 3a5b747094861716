//! Memory of this process that the other ranks of its host read in place: tensors from `ProcessGroup::alloc` lie here.
//!
//! Every process has one, of a fixed size that costs nothing until it is written; its sealed memfd is handed out with the memory of each group.
//! A send of what lies here says where it is instead of carrying the bytes (`transfer`), and ends once the reader has given back that frame's
//! room in the ring: so the bytes are read once, by the rank that reduces them. The other side maps the memory for reading only, once per process,
//! and checks every place that it is told (INV-10).
//!
//! The tensors of an operation that failed go back to their owner while a peer may still be reading. No memory is at stake, but what it read
//! would be neither old nor new, and it may have heard from all others that they are done. So a rank that gives up a send says so in its page
//! *before* it lets go of the memory ([`Lent`]), and a reader looks there *after* the last byte ([`Neighbour::gave_up`]): then it has read nothing
//! that was written later, or it sees the word and fails.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use ftcore::{DType, Device, Error, ErrorKind, Result, Tensor, descriptors};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::process::{Resource, getrlimit};

use super::map::Mapping;

/// The largest arena. What does not fit is ordinary memory. Small enough that hundreds of neighbours can be mapped.
const MOST: usize = 64 << 30;
/// Blocks are multiples of it: whole pages of every system, so that what is freed can go back to it.
const GRAIN: usize = 64 << 10;
/// Blocks from this size on begin at multiples of it, for huge pages.
const HUGE: usize = 2 << 20;
/// The word of a page in which its rank says that it gave up a send.
const GAVE_UP: usize = 768;

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// This process's memory.
struct Arena {
    memory: OwnedFd,
    len: usize,
    /// Made with the first block; `None` if the system refused.
    map: OnceLock<Option<Mapping>>,
    /// Where free ranges begin, and their lengths.
    free: Mutex<BTreeMap<usize, usize>>,
}

fn arena() -> Option<&'static Arena> {
    static ARENA: OnceLock<Option<Arena>> = OnceLock::new();
    let made = ARENA.get_or_init(|| match create() {
        Ok(arena) => Some(arena),
        Err(error) => {
            tracing::debug!(%error, "no memory that other processes could read");
            None
        }
    });
    made.as_ref()
}

fn create() -> std::io::Result<Arena> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Asked for once in a process: a limit that could be raised must not decide.
    let memory = descriptors::with_room(|| Ok(rustix::fs::memfd_create("oxccl-tensors", flags)?))?;
    let len = size_within(largest_file());
    rustix::fs::ftruncate(&memory, len as u64)?;
    rustix::fs::fcntl_add_seals(&memory, SEALS)?;
    Ok(Arena {
        memory,
        len,
        map: OnceLock::new(),
        free: Mutex::new(BTreeMap::from([(0, len)])),
    })
}

/// The limit on the size of files (`ulimit -f`): the system would end a process that asks for more, also of memory.
pub(super) fn largest_file() -> Option<u64> {
    getrlimit(Resource::Fsize).current
}

/// The arena under such a limit. One of nothing lends nothing.
fn size_within(limit: Option<u64>) -> usize {
    let most = limit.map_or(MOST, |limit| usize::try_from(limit).unwrap_or(MOST).min(MOST));
    most - most % GRAIN
}

/// What neighbours are given.
pub(super) fn handle() -> Result<BorrowedFd<'static>> {
    let arena = arena().ok_or_else(|| Error::new(ErrorKind::Unavailable, "no memory to share tensors in"))?;
    Ok(arena.memory.as_fd())
}

/// A range of the arena, given back when it is dropped.
struct Block {
    at: usize,
    len: usize,
}

impl Drop for Block {
    fn drop(&mut self) {
        let Some(arena) = arena().filter(|_| !ftcore::forked::is_child()) else {
            // The memory of a process that forked is its parent's.
            return;
        };
        // What could not be emptied is not used again: a new block is all zeros.
        if let Some(Some(map)) = arena.map.get()
            && map.discard(self.at, self.len)
        {
            arena.put_back(self.at, self.len);
        }
    }
}

impl Arena {
    fn free(&self) -> std::sync::MutexGuard<'_, BTreeMap<usize, usize>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first free range of `len` bytes that begins at a multiple of `align`.
    fn take(&self, len: usize, align: usize) -> Option<Block> {
        let mut free = self.free();
        let (start, size, at) = free.iter().find_map(|(start, size)| {
            let at = start.next_multiple_of(align);
            (at.checked_add(len)? <= start + size).then_some((*start, *size, at))
        })?;
        free.remove(&start);
        for (from, to) in [(start, at), (at + len, start + size)] {
            if from < to {
                free.insert(from, to - from);
            }
        }
        Some(Block { at, len })
    }

    fn put_back(&self, mut at: usize, mut len: usize) {
        let mut free = self.free();
        if let Some(after) = free.remove(&(at + len)) {
            len += after;
        }
        if let Some((&before, &size)) = free.range(..at).next_back()
            && before + size == at
        {
            free.remove(&before);
            (at, len) = (before, size + len);
        }
        free.insert(at, len);
    }
}

/// A host tensor of `count` zeros that neighbours can read in place; `None` where there is no such memory (any more).
pub(crate) fn alloc(dtype: DType, count: usize) -> Option<Tensor> {
    let bytes = count.checked_mul(dtype.size()).filter(|bytes| *bytes > 0)?;
    // From here on a child that is forked off knows that it is one.
    ftcore::forked::check().ok()?;
    let arena = arena()?;
    let map = arena.map.get_or_init(|| {
        let map = Mapping::of(arena.memory.as_fd(), 0, arena.len);
        map.inspect(|map| map.prefer_huge_pages())
            .inspect_err(|error| tracing::debug!(%error, "tensors lie in ordinary memory"))
            .ok()
    });
    let map = map.as_ref()?;
    let len = bytes.checked_next_multiple_of(GRAIN)?;
    let block = arena.take(len, if bytes >= HUGE { HUGE } else { GRAIN })?;
    let start = map.address(block.at)?;
    // SAFETY: the block is a range of the mapping that nothing else in this process has until it is dropped, zeroed by the system and aligned for
    // every element; the mapping is never unmapped. Other processes only read it.
    unsafe { Tensor::from_raw(start, dtype, &[count], None, Device::CPU, Box::new(block)) }.ok()
}

/// Where in this process's arena `bytes` lie, if they do.
pub(crate) fn place_of(bytes: &[u8]) -> Option<u64> {
    let arena = arena()?;
    let map = arena.map.get()?.as_ref()?;
    let start = NonNull::from(bytes).cast::<u8>().addr().get();
    let at = start.checked_sub(map.address(0)?.addr().get())?;
    (at.checked_add(bytes.len())? <= arena.len).then_some(at as u64)
}

/// The arena of a neighbour's process.
#[derive(Debug)]
struct Theirs {
    memory: OwnedFd,
    len: usize,
    /// Made with the first read; `None` if the system refused (`ulimit -v`).
    map: OnceLock<Option<Mapping>>,
}

type Known = BTreeMap<(u64, u64), Weak<Theirs>>;

/// The one of `process`: the same for all groups with ranks there. Errors: `Protocol` if `memory` is not one.
fn theirs(process: u64, memory: OwnedFd) -> Result<Arc<Theirs>> {
    static KNOWN: Mutex<Known> = Mutex::new(BTreeMap::new());
    let wrong = |text: &str| Error::new(ErrorKind::Protocol, text.to_string());
    let seals = rustix::fs::fcntl_get_seals(&memory);
    if !seals.is_ok_and(|seals| seals.contains(SEALS)) {
        return Err(wrong("handed over memory for tensors that it could still shrink"));
    }
    let stat =
        rustix::fs::fstat(&memory).map_err(|e| Error::io("looking at a neighbour's memory", e.into()))?;
    let len = usize::try_from(stat.st_size).ok().filter(|len| *len <= MOST);
    let len = len.ok_or_else(|| wrong("handed over memory for tensors that is too large"))?;
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    known.retain(|_, theirs| theirs.strong_count() > 0);
    let key = (process, stat.st_ino);
    if let Some(theirs) = known.get(&key).and_then(Weak::upgrade) {
        return Ok(theirs);
    }
    let theirs = Arc::new(Theirs {
        memory,
        len,
        map: OnceLock::new(),
    });
    known.insert(key, Arc::downgrade(&theirs));
    Ok(theirs)
}

/// What a rank reads of a neighbour's tensors, and the pages in which both say that they gave up.
#[derive(Debug)]
pub(crate) struct Neighbour {
    own: Arc<Mapping>,
    page: Arc<Mapping>,
    theirs: Arc<Theirs>,
}

impl Neighbour {
    pub(super) fn new(own: Arc<Mapping>, page: Arc<Mapping>, process: u64, memory: OwnedFd) -> Result<Self> {
        let theirs = theirs(process, memory)?;
        Ok(Self { own, page, theirs })
    }

    /// `len` bytes at `at` of its arena. They are its tensor's until their frame is given back. Where its memory cannot be mapped they are a copy in `piece`.
    ///
    /// Errors: `Protocol` for a place that is not there; `Io` if the memory cannot be read.
    pub(crate) fn read<'a>(&'a self, at: u64, len: usize, piece: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        let theirs = &self.theirs;
        let place = usize::try_from(at)
            .ok()
            .filter(|at| at.saturating_add(len) <= theirs.len);
        let place = place.ok_or_else(|| {
            Error::new(
                ErrorKind::Protocol,
                format!("says that {len} bytes lie at {at} of its memory, which ends before"),
            )
        })?;
        let map = theirs.map.get_or_init(|| {
            let map = Mapping::to_read(theirs.memory.as_fd(), theirs.len);
            map.inspect_err(|error| tracing::debug!(%error, "a neighbour's tensors are copied"))
                .ok()
        });
        if let Some(map) = map {
            return Ok(map.read(place, len));
        }
        piece.resize(len, 0);
        let mut done = 0;
        while let Some(rest) = piece.get_mut(done..).filter(|rest| !rest.is_empty()) {
            let from = (place + done) as u64;
            match rustix::io::retry_on_intr(|| rustix::io::pread(&theirs.memory, &mut *rest, from)) {
                Ok(0) => {
                    return Err(Error::new(
                        ErrorKind::Internal,
                        "a neighbour's sealed memory ends early",
                    ));
                }
                Ok(n) => done += n,
                Err(e) => return Err(Error::io("reading a neighbour's memory", e.into())),
            }
        }
        Ok(piece)
    }

    /// Whether it has let go of memory that it had lent: asked after the last byte was read.
    pub(crate) fn gave_up(&self) -> bool {
        // The reads before stay before: the other half is in `Lent`.
        fence(Ordering::SeqCst);
        self.page.word32::<GAVE_UP>().load(Ordering::SeqCst) != 0
    }

    /// Lends memory until the neighbour has given back the ring up to `until`.
    pub(crate) fn lend(&self, until: u64) -> Lent {
        let page = Some(self.own.clone());
        Lent { until, page }
    }
}

/// Memory that a neighbour may be reading. Dropped before it was given back, it tells.
#[derive(Debug)]
pub(crate) struct Lent {
    pub(crate) until: u64,
    page: Option<Arc<Mapping>>,
}

impl Lent {
    /// The neighbour is done.
    pub(crate) fn returned(mut self) {
        self.page = None;
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(page) = &self.page {
            page.word32::<GAVE_UP>().store(1, Ordering::SeqCst);
            // Whatever its owner writes there from now on comes after.
            fence(Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_zeros_apart_from_each_other_and_their_room_is_used_again() {
        let mut first = alloc(DType::F32, 3 << 20).unwrap();
        let mut second = alloc(DType::U8, 5).unwrap();
        assert!(first.bytes().iter().chain(second.bytes()).all(|b| *b == 0));
        first.bytes_mut().fill(1);
        second.bytes_mut().fill(2);
        assert!(first.bytes().iter().all(|b| *b == 1) && second.bytes() == [2; 5]);
        let (a, b) = (
            place_of(first.bytes()).unwrap(),
            place_of(second.bytes()).unwrap(),
        );
        assert!(a.is_multiple_of(HUGE as u64) && b.is_multiple_of(GRAIN as u64));
        assert_eq!(place_of(first.bytes().get(8..16).unwrap()), Some(a + 8));
        assert_eq!(place_of(&[0; 4]), None);
        drop(first);
        let again = alloc(DType::F32, 3 << 20).unwrap();
        assert!(again.bytes().iter().all(|b| *b == 0));
        assert!(alloc(DType::F64, 0).is_none() && alloc(DType::F64, MOST).is_none());
    }

    #[test]
    fn what_is_given_back_joins_its_neighbours() {
        let arena = create().unwrap();
        let blocks: Vec<Block> = (1..6).map(|n| arena.take(n * GRAIN, GRAIN).unwrap()).collect();
        let huge = arena.take(HUGE, HUGE).unwrap();
        assert_eq!(huge.at, HUGE);
        let mut places: Vec<(usize, usize)> = blocks.iter().chain([&huge]).map(|b| (b.at, b.len)).collect();
        blocks.into_iter().chain([huge]).for_each(std::mem::forget);
        places.swap(0, 3);
        places.swap(2, 5);
        for (at, len) in places {
            arena.put_back(at, len);
        }
        assert_eq!(*arena.free(), BTreeMap::from([(0, arena.len)]));
    }

    #[test]
    fn a_limit_on_files_is_one_on_the_arena() {
        assert_eq!(size_within(None), MOST);
        assert_eq!(size_within(Some(u64::MAX)), MOST);
        assert_eq!(size_within(Some(3 * GRAIN as u64 + 5)), 3 * GRAIN);
        assert_eq!(size_within(Some(100)), 0);
    }

    #[test]
    fn memory_that_cannot_be_mapped_is_copied() {
        let mut tensor = alloc(DType::U8, 3000).unwrap();
        tensor
            .bytes_mut()
            .iter_mut()
            .zip((0u8..251).cycle())
            .for_each(|(b, n)| *b = n);
        let page = Arc::new(Mapping::private(super::super::map::PAGE).unwrap());
        let of = |map: OnceLock<Option<Mapping>>| {
            let arena = arena().unwrap();
            let theirs = Theirs {
                memory: arena.memory.try_clone().unwrap(),
                len: arena.len,
                map,
            };
            Neighbour {
                own: page.clone(),
                page: page.clone(),
                theirs: Arc::new(theirs),
            }
        };
        let at = place_of(tensor.bytes()).unwrap();
        for neighbour in [of(OnceLock::new()), of(OnceLock::from(None))] {
            let mut piece = vec![7; 9];
            assert_eq!(
                neighbour.read(at + 100, 2000, &mut piece).unwrap(),
                &tensor.bytes()[100..2100]
            );
            let end = arena().unwrap().len as u64;
            let e = neighbour.read(end - 10, 11, &mut piece).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Protocol);
        }
    }
}
