//! The shared memory of a group: segments that are mapped in parent and child, cut into regions.
//!
//! Memory of the host, or of a device where that crosses. A region goes back when it is dropped; who holds it while a child may still touch it is the link's business (INV-8).
//! Segments are large and lazily provided by the kernel, so that there are few; those that stay unused are given up.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use ftcore::{DType, Error, ErrorKind, Result, Tensor};

use crate::crossing::Mode;
use crate::shm::Mapping;

/// The least size of a segment. Pages that are not touched cost nothing.
const SEGMENT: usize = 64 << 20;
/// Regions begin at multiples of this: no two share a cache line, and every dtype is aligned.
const ALIGN: usize = 128;
/// A segment that was not used for this long is given up, except the first.
const IDLE: Duration = Duration::from_secs(10);

/// One segment: its memory and its free parts (offset to length), kept merged.
pub(crate) struct Segment {
    pub(crate) id: u32,
    pub(crate) memory: Memory,
    bytes: usize,
    free: Mutex<Free>,
}

/// What a segment is made of.
pub(crate) enum Memory {
    Host(Arc<Mapping>),
    /// Device memory that both processes open, and the handle by which the child does.
    Device(Arc<Tensor>, Vec<u8>),
}

struct Free {
    parts: BTreeMap<usize, usize>,
    last_used: Instant,
}

/// A part of a segment that belongs to the holder.
pub(crate) struct Region {
    pub(crate) segment: Arc<Segment>,
    pub(crate) offset: usize,
    /// Rounded up to the alignment.
    length: usize,
}

/// All segments of a group.
#[derive(Default)]
pub(crate) struct Pool {
    mode: Mode,
    segments: Mutex<Segments>,
}

#[derive(Default)]
struct Segments {
    list: Vec<Arc<Segment>>,
    next: u32,
}

impl Segment {
    fn lock(&self) -> MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first part that is large enough: low addresses are warm.
    fn cut(self: &Arc<Self>, length: usize) -> Option<Region> {
        let mut free = self.lock();
        let (offset, have) = free
            .parts
            .iter()
            .map(|(o, n)| (*o, *n))
            .find(|&(_, n)| n >= length)?;
        free.parts.remove(&offset);
        if have > length {
            free.parts.insert(offset + length, have - length);
        }
        Some(Region {
            segment: self.clone(),
            offset,
            length,
        })
    }

    fn is_unused(&self) -> bool {
        self.lock().parts.get(&0) == Some(&self.bytes)
    }

    /// The memory of the host.
    pub(crate) fn mapping(&self) -> Result<&Arc<Mapping>> {
        match &self.memory {
            Memory::Host(mapping) => Ok(mapping),
            Memory::Device(..) => Err(Error::new(
                ErrorKind::Internal,
                "device memory where the host's belongs",
            )),
        }
    }

    /// The memory of the device.
    pub(crate) fn device_memory(&self) -> Result<&Arc<Tensor>> {
        match &self.memory {
            Memory::Device(whole, _) => Ok(whole),
            Memory::Host(_) => Err(Error::new(
                ErrorKind::Internal,
                "host memory where the device's belongs",
            )),
        }
    }

    /// How long it is.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    fn offset_of(&self, ptr: *const u8, length: usize) -> Option<usize> {
        match &self.memory {
            Memory::Host(mapping) => mapping.offset_of(ptr, length),
            Memory::Device(whole, _) => {
                let offset = (ptr as usize).checked_sub(whole.as_ptr() as usize)?;
                (offset.checked_add(length)? <= self.bytes).then_some(offset)
            }
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let mut free = self.segment.lock();
        let (mut offset, mut length) = (self.offset, self.length);
        let before = free.parts.range(..offset).next_back().map(|(o, n)| (*o, *n));
        if let Some((o, n)) = before.filter(|(o, n)| o + n == offset) {
            free.parts.remove(&o);
            (offset, length) = (o, n + length);
        }
        if let Some(n) = free.parts.remove(&(offset + length)) {
            length += n;
        }
        free.parts.insert(offset, length);
        free.last_used = Instant::now();
    }
}

impl Pool {
    pub(crate) fn new(mode: Mode) -> Self {
        Self {
            mode,
            segments: Mutex::default(),
        }
    }

    /// How tensors get to the child.
    pub(crate) fn mode(&self) -> &Mode {
        &self.mode
    }

    fn lock(&self) -> MutexGuard<'_, Segments> {
        self.segments.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn memory(&self, bytes: usize) -> Result<Memory> {
        Ok(match &self.mode {
            Mode::Host | Mode::Landed => Memory::Host(Arc::new(Mapping::create(bytes)?)),
            Mode::Shared(shared) => {
                let (whole, handle) = shared.crossing.create(shared.device.index, bytes)?;
                Memory::Device(Arc::new(whole), handle)
            }
        })
    }

    /// A region of at least `bytes` (not 0) bytes with undefined contents.
    pub(crate) fn take(&self, bytes: usize) -> Result<Region> {
        let too_much = || Error::invalid(format!("{bytes} bytes do not fit in memory"));
        let length = bytes
            .max(1)
            .checked_next_multiple_of(ALIGN)
            .ok_or_else(too_much)?;
        let mut segments = self.lock();
        if let Some(region) = segments.list.iter().find_map(|s| s.cut(length)) {
            return Ok(region);
        }
        let size = length
            .checked_next_multiple_of(2 << 20)
            .ok_or_else(too_much)?
            .max(SEGMENT);
        let segment = Arc::new(Segment {
            id: segments.next,
            memory: self.memory(size)?,
            bytes: size,
            free: Mutex::new(Free {
                parts: [(0, size)].into(),
                last_used: Instant::now(),
            }),
        });
        segments.next = segments.next.wrapping_add(1);
        segments.list.push(segment.clone());
        segment.cut(length).ok_or_else(too_much)
    }

    /// Where the memory of `tensor` lies, if it is in here.
    pub(crate) fn locate(&self, tensor: &Tensor) -> Option<(Arc<Segment>, usize)> {
        let (ptr, length) = (tensor.as_ptr(), tensor.byte_len());
        self.lock()
            .list
            .iter()
            .find_map(|s| s.offset_of(ptr, length).map(|o| (s.clone(), o)))
    }

    /// A tensor of `shape` in shared memory: zeroed on the host, with undefined contents on a device.
    pub(crate) fn tensor(&self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        let region = self.take(Tensor::bytes_of(dtype, shape)?)?;
        let offset = region.offset;
        if let (Mode::Shared(shared), Ok(whole)) = (&self.mode, region.segment.device_memory()) {
            let whole = whole.clone();
            return shared
                .crossing
                .part(&whole, offset, dtype, shape, Box::new(region));
        }
        let mapping = region.segment.mapping()?.clone();
        let mut tensor = mapping.tensor(offset, dtype, shape, Box::new(region))?;
        tensor.bytes_mut().fill(0);
        Ok(tensor)
    }

    /// Gives up segments that have been unused for a while; their numbers.
    pub(crate) fn trim(&self) -> Vec<u32> {
        let mut gone = Vec::new();
        let mut first = true;
        self.lock().list.retain(|s| {
            // A device's memory must not be freed while the child has it open.
            let keep = std::mem::take(&mut first)
                || matches!(s.memory, Memory::Device(..))
                || !s.is_unused()
                || s.lock().last_used.elapsed() < IDLE;
            if !keep {
                gone.push(s.id);
            }
            keep
        });
        gone
    }
}

/// Segments that a child knows, so that each is passed once. Weak: a segment that is given up must not stay for this.
#[derive(Default)]
pub(crate) struct Known(BTreeMap<u32, Weak<Segment>>);

impl Known {
    /// True if the child has not seen it yet.
    pub(crate) fn is_new(&mut self, segment: &Arc<Segment>) -> bool {
        self.0.insert(segment.id, Arc::downgrade(segment)).is_none()
    }

    /// Numbers of segments that are gone since.
    pub(crate) fn gone(&mut self) -> Vec<u32> {
        let gone: Vec<u32> = self
            .0
            .iter()
            .filter(|(_, s)| s.strong_count() == 0)
            .map(|(id, _)| *id)
            .collect();
        gone.iter().for_each(|id| drop(self.0.remove(id)));
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_never_overlap_and_everything_comes_back_merged() {
        let pool = Pool::default();
        let mut held: Vec<Region> = Vec::new();
        let mut seed = 1u64;
        for _ in 0..2000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let pick = (seed >> 33) as usize;
            if pick.is_multiple_of(3) && !held.is_empty() {
                held.swap_remove(pick % held.len());
            } else if held.len() < 50 {
                held.push(pool.take(1 + pick % 3_000_000).unwrap());
            }
            let mut spans: Vec<_> = held.iter().map(|r| (r.segment.id, r.offset, r.length)).collect();
            spans.sort_unstable();
            assert!(
                spans
                    .windows(2)
                    .all(|w| w[0].0 != w[1].0 || w[0].1 + w[0].2 <= w[1].1),
                "{spans:?}"
            );
            assert!(held.iter().all(|r| r.offset.is_multiple_of(ALIGN)));
        }
        held.clear();
        assert!(pool.lock().list.iter().all(|s| s.is_unused()));
    }

    #[test]
    fn a_tensor_of_the_pool_is_recognised_and_gives_its_region_back() {
        let pool = Pool::default();
        let t = pool.tensor(DType::F32, &[3, 5]).unwrap();
        assert_eq!(
            (t.shape(), t.as_slice::<f32>().unwrap()),
            (&[3usize, 5][..], &[0f32; 15][..])
        );
        let (segment, offset) = pool.locate(&t).unwrap();
        assert!(pool.locate(&Tensor::zeros(DType::F32, 15)).is_none());
        drop(t);
        let again = pool.take(60).unwrap();
        assert_eq!((again.segment.id, again.offset), (segment.id, offset));
        let large = pool.tensor(DType::U8, &[SEGMENT + 1]).unwrap();
        assert_eq!(pool.lock().list.len(), 2);
        drop(large);
        assert!(pool.trim().is_empty(), "not idle for long enough");
        for s in &pool.lock().list {
            s.lock().last_used = Instant::now().checked_sub(IDLE * 2).unwrap();
        }
        assert_eq!(pool.trim(), [1], "the first segment stays");
        assert!(pool.tensor(DType::F64, &[usize::MAX / 2]).is_err());
    }
}
