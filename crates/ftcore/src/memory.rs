//! Tensors that are given away: {owner, pointer, dtype, shape, device}, contiguous only.
//!
//! An asynchronous call takes its tensors by value and its `Work` gives them back, so whatever is in flight is owned
//! by the engine (INV-8): dropping a `Work`, a group or an input early is always safe. A strided tensor is refused
//! here (L14: elsewhere it silently overwrites its neighbours). Beside one call in `exit.rs`, this is the one module of ftcore with unsafe code.

use std::any::{Any, TypeId};
use std::fmt;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::{DType, Device, Element, Error, ErrorKind, Result};

mod complex;
mod copy;
mod views;

pub use complex::Real;
pub(crate) use complex::not_by_parts;
pub use copy::copy_bytes;

/// What keeps the memory alive.
enum Owner {
    /// The parts of a `Vec<T>`; `free` puts it together again.
    Vec {
        len: usize,
        capacity: usize,
        element: TypeId,
        free: unsafe fn(NonNull<u8>, usize, usize),
    },
    /// Someone else's memory: valid and not reused while this value lives.
    Foreign(#[allow(dead_code, reason = "held for its Drop")] Box<dyn Any + Send + Sync>),
    /// Memory that others read, too, and that does not change while this value lives.
    Shared(#[allow(dead_code, reason = "held for its Drop")] Arc<dyn Any + Send + Sync>),
    /// A range of another tensor's memory that is this one's alone; see `views`.
    Part(Arc<Tensor>),
}

/// A contiguous tensor that owns (or keeps alive) its memory. Not `Clone`: there is one writer.
///
/// ```
/// use ftcore::{DType, Tensor};
///
/// let mut tensor = Tensor::from_vec(vec![1.0_f32, 2.0, 3.0]); // takes the vector over, without a copy
/// tensor.as_mut_slice::<f32>()?[0] = 5.0;
/// assert_eq!((tensor.dtype(), tensor.shape()), (DType::F32, [3].as_slice()));
/// assert_eq!(tensor.as_slice::<f32>()?, [5.0, 2.0, 3.0]);
/// # Ok::<(), ftcore::Error>(())
/// ```
pub struct Tensor {
    ptr: NonNull<u8>,
    dtype: DType,
    shape: Vec<usize>,
    count: usize,
    device: Device,
    /// The elements are pairs of reals; see `complex`.
    is_complex: bool,
    owner: Owner,
}

// SAFETY: the tensor is the only way to its memory (from_vec), or its constructor promised so (from_raw), or it is
// a range of such a tensor that no other part of it has (`views`), and the owner is Send; moving it to another thread
// moves that exclusive access.
unsafe impl Send for Tensor {}
// SAFETY: shared access only reads.
unsafe impl Sync for Tensor {}

/// # Safety
/// `ptr`, `len` and `capacity` come from a `Vec<T>` that was taken apart and not freed since.
unsafe fn free_vec<T>(ptr: NonNull<u8>, len: usize, capacity: usize) {
    // SAFETY: by the contract above these are the parts of a live Vec<T>.
    drop(unsafe { Vec::from_raw_parts(ptr.as_ptr().cast::<T>(), len, capacity) });
}

fn count_of(dtype: DType, shape: &[usize]) -> Result<usize> {
    shape
        .iter()
        .try_fold(1usize, |a, &d| a.checked_mul(d))
        .filter(|count| isize::try_from(count.saturating_mul(dtype.size())).is_ok())
        .ok_or_else(|| {
            Error::invalid(format!(
                "shape {shape:?} has more elements of {dtype} than fit in memory"
            ))
        })
}

impl Tensor {
    /// How many bytes a tensor of `shape` has. `InvalidArgument` for one of more elements than fit in memory.
    pub fn bytes_of(dtype: DType, shape: &[usize]) -> Result<usize> {
        Ok(count_of(dtype, shape)? * dtype.size())
    }

    /// A one-dimensional host tensor of `data`, without a copy.
    pub fn from_vec<T: Element>(data: Vec<T>) -> Self {
        let mut data = ManuallyDrop::new(data);
        let (len, capacity) = (data.len(), data.capacity());
        let ptr = NonNull::new(data.as_mut_ptr()).map_or(NonNull::dangling(), NonNull::cast);
        Self {
            ptr,
            dtype: T::DTYPE,
            shape: vec![len],
            count: len,
            device: Device::CPU,
            is_complex: false,
            owner: Owner::Vec {
                len,
                capacity,
                element: TypeId::of::<T>(),
                free: free_vec::<T>,
            },
        }
    }

    /// A one-dimensional host tensor with a copy of `data`.
    pub fn from_slice<T: Element>(data: &[T]) -> Self {
        Self::from_vec(data.to_vec())
    }

    /// A one-dimensional host tensor of `count` zeros.
    pub fn zeros(dtype: DType, count: usize) -> Self {
        // All-zero bytes are the value zero (or false) in every dtype. The element type decides the alignment.
        let mut tensor = match dtype.size() {
            8 => Self::from_vec(vec![0u64; count]),
            4 => Self::from_vec(vec![0u32; count]),
            2 => Self::from_vec(vec![0u16; count]),
            _ => Self::from_vec(vec![0u8; count]),
        };
        tensor.dtype = dtype;
        tensor
    }

    /// A host tensor of zeros. `InvalidArgument` for a shape of more elements than fit in memory, for which [`zeros`](Self::zeros) panics.
    pub fn try_zeros(dtype: DType, shape: &[usize]) -> Result<Self> {
        Self::zeros(dtype, count_of(dtype, shape)?).reshape(shape)
    }

    /// A one-dimensional host tensor of u8 over bytes that others read as well, without a copy. `owner` is asked for its bytes once.
    ///
    /// It can be sent; every other operation is refused it. A write through the tensor itself goes to a copy that is made then.
    pub fn from_shared<B: AsRef<[u8]> + Send + Sync + 'static>(owner: B) -> Self {
        // In its final place first: the bytes may lie within it.
        let owner = Arc::new(owner);
        let bytes: &[u8] = (*owner).as_ref();
        let (ptr, len) = (NonNull::from(bytes).cast(), bytes.len());
        Self {
            ptr,
            dtype: DType::U8,
            shape: vec![len],
            count: len,
            device: Device::CPU,
            is_complex: false,
            owner: Owner::Shared(owner),
        }
    }

    /// True if others read this memory, too: nothing may be written to it.
    pub fn is_shared(&self) -> bool {
        match &self.owner {
            Owner::Shared(_) => true,
            Owner::Part(whole) => whole.is_shared(),
            _ => false,
        }
    }

    /// Before a write: memory of its own instead of what others read.
    fn make_own(&mut self) {
        if self.is_shared() {
            let mut own = Self::from_slice(self.bytes());
            own.shape = std::mem::take(&mut self.shape);
            *self = own;
        }
    }

    /// A host tensor of its own with the same values and shape, in huge pages where that pays: most of the time of a large copy goes into the first
    /// write to each page. `InvalidArgument` for one on another device.
    pub fn duplicate(&self) -> Result<Self> {
        if !self.device.is_cpu() {
            return Err(wrong_device(self, "host memory only where it is copied"));
        }
        let mut copy = match self.dtype.size() {
            8 => self.copy_as::<u64>(),
            4 => self.copy_as::<u32>(),
            2 => self.copy_as::<u16>(),
            _ => self.copy_as::<u8>(),
        };
        (copy.dtype, copy.shape) = (self.dtype, self.shape.clone());
        copy.is_complex = self.is_complex;
        Ok(copy)
    }

    /// For `T` of the dtype's size, in host memory.
    fn copy_as<T: Element>(&self) -> Self {
        // SAFETY: host memory of `count` elements of T's size, aligned for it, in which every bit pattern is a T; alive as long as self.
        let values = unsafe { std::slice::from_raw_parts(self.ptr.as_ptr().cast::<T>(), self.count) };
        let mut own = Vec::with_capacity(values.len());
        prefer_huge_pages(own.spare_capacity_mut());
        own.extend_from_slice(values);
        Self::from_vec(own)
    }

    /// A tensor over memory that `owner` keeps alive.
    ///
    /// `strides` (in elements, as frameworks give them) may be `None` for contiguous memory; anything that is not
    /// contiguous in row-major order is `InvalidArgument` with the offending strides.
    ///
    /// # Safety
    /// While `owner` lives, `ptr` points to `product(shape)` elements of `dtype` on `device` that are valid,
    /// aligned for `dtype`, and reachable for writing only through this tensor.
    pub unsafe fn from_raw(
        ptr: NonNull<u8>,
        dtype: DType,
        shape: &[usize],
        strides: Option<&[isize]>,
        device: Device,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        let count = count_of(dtype, shape)?;
        if ptr.as_ptr().align_offset(dtype.size()) != 0 {
            return Err(Error::invalid(format!("the memory is not aligned for {dtype}")));
        }
        if let Some(strides) = strides {
            let mut expected = 1isize;
            let fits = strides.len() == shape.len()
                && shape.iter().zip(strides).rev().all(|(&dim, &stride)| {
                    let ok = dim <= 1 || stride == expected;
                    expected = expected.saturating_mul(isize::try_from(dim).unwrap_or(isize::MAX));
                    ok
                });
            if !fits && count > 1 {
                return Err(Error::invalid(format!(
                    "tensor of shape {shape:?} with strides {strides:?} is not contiguous; make it contiguous first"
                )));
            }
        }
        Ok(Self {
            ptr,
            dtype,
            shape: shape.to_vec(),
            count,
            device,
            is_complex: false,
            owner: Owner::Foreign(owner),
        })
    }

    /// The same memory with another shape of as many elements.
    pub fn reshape(mut self, shape: &[usize]) -> Result<Self> {
        let count = count_of(self.dtype, shape)?;
        if count != self.count {
            return Err(Error::invalid(format!(
                "cannot view {:?} as {shape:?}: {} and {count} elements",
                self.shape, self.count
            )));
        }
        self.shape = shape.to_vec();
        Ok(self)
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The number of elements.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The size in bytes.
    pub fn byte_len(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// Where the memory is.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The address, for alias checks and for libraries that take device pointers.
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr.as_ptr()
    }

    /// The address for writing, for libraries that take device pointers.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.make_own();
        self.ptr.as_ptr()
    }

    fn host<T: Element>(&self) -> Result<()> {
        if !self.device.is_cpu() {
            return Err(Error::invalid(format!(
                "the tensor is on {}, not in host memory",
                self.device
            )));
        }
        if T::DTYPE != self.dtype {
            return Err(Error::invalid(format!(
                "the tensor holds {}, not {}",
                self.dtype,
                T::DTYPE
            )));
        }
        Ok(())
    }

    /// The elements; an error if `T` is not the dtype or the memory is not on the host.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        self.host::<T>()?;
        // SAFETY: host memory of `count` aligned elements of T (checked), alive as long as self.
        Ok(unsafe { std::slice::from_raw_parts(self.ptr.as_ptr().cast::<T>(), self.count) })
    }

    /// The elements for writing; an error if `T` is not the dtype or the memory is not on the host.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        self.host::<T>()?;
        self.make_own();
        // SAFETY: as above; &mut self is the only access.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr().cast::<T>(), self.count) })
    }

    /// The bytes; empty if the memory is not on the host (backends check the device first).
    pub fn bytes(&self) -> &[u8] {
        if !self.device.is_cpu() {
            return &[];
        }
        // SAFETY: every element has no padding, so its bytes are initialised; alive as long as self.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.byte_len()) }
    }

    /// The bytes for writing; empty if the memory is not on the host.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        if !self.device.is_cpu() {
            return &mut [];
        }
        self.make_own();
        // SAFETY: every bit pattern is valid for every element; &mut self is the only access.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.byte_len()) }
    }

    /// The vector it was made of, without a copy; a copy if it was made of something else. The tensor comes back
    /// with the error if it does not hold `T` in host memory.
    pub fn into_vec<T: Element>(self) -> Result<Vec<T>, Box<(Error, Self)>> {
        if let Err(e) = self.host::<T>() {
            return Err(Box::new((e, self)));
        }
        match self.owner {
            Owner::Vec {
                len,
                capacity,
                element,
                ..
            } if element == TypeId::of::<T>() => {
                let this = ManuallyDrop::new(self);
                // SAFETY: these are the parts of the Vec<T> taken apart in from_vec; ManuallyDrop gives them up once.
                let vec = unsafe { Vec::from_raw_parts(this.ptr.as_ptr().cast::<T>(), len, capacity) };
                // Only the plain fields are left behind: free the shape, the device kind stays shared.
                let mut this = this;
                drop(std::mem::take(&mut this.shape));
                drop(std::mem::replace(&mut this.device, Device::CPU));
                Ok(vec)
            }
            _ => match self.as_slice::<T>() {
                Ok(s) => Ok(s.to_vec()),
                Err(e) => Err(Box::new((e, self))),
            },
        }
    }

    /// Gives up on the memory for ever: used when it cannot be proven that nothing touches it any more (INV-8).
    pub fn leak(self, why: &str) {
        LEAKED.fetch_add(self.byte_len() as u64, std::sync::atomic::Ordering::Relaxed);
        tracing::warn!(
            bytes = self.byte_len(),
            why,
            "a buffer is leaked on purpose: it may still be in use"
        );
        std::mem::forget(self);
    }
}

/// Ends the process if a lent tensor is still somewhere: its holder could write to memory that is not lent any more.
struct LentGuard(Arc<()>);

impl Drop for LentGuard {
    fn drop(&mut self) {
        if Arc::strong_count(&self.0) != 1 {
            tracing::error!(
                "a backend that advertises Borrow kept a borrowed tensor after its call; the process is ended \
                 before memory is corrupted"
            );
            std::process::abort();
        }
    }
}

/// Lends `data` as a tensor to `run`, which must have dropped it (and so must all that it was given to) when it returns.
pub(crate) fn lend<T: Element, R>(data: &mut [T], run: impl FnOnce(Tensor) -> R) -> R {
    let guard = LentGuard(Arc::new(()));
    let tensor = Tensor {
        ptr: NonNull::from(&mut *data).cast(),
        dtype: T::DTYPE,
        shape: vec![data.len()],
        count: data.len(),
        device: Device::CPU,
        is_complex: false,
        owner: Owner::Foreign(Box::new(guard.0.clone())),
    };
    // INV-8: the tensor has the exclusive access that `data` gives until it is dropped, and the guard makes sure that this
    // was before the borrow ends, unwinding included.
    run(tensor)
}

static LEAKED: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

/// Bytes that cannot be used: leaked on purpose so far in this process, or held until it is proven that nothing touches them (INV-8).
pub fn leaked_bytes() -> u64 {
    LEAKED.load(std::sync::atomic::Ordering::Relaxed)
}

/// Memory that is held until a proof counts as leaked until then.
pub(crate) fn suspect(tensors: &[&Tensor]) -> u64 {
    let bytes = tensors.iter().map(|t| t.byte_len() as u64).sum();
    LEAKED.fetch_add(bytes, std::sync::atomic::Ordering::Relaxed);
    bytes
}

/// The proof came, or the memory is leaked for good.
pub(crate) fn end_suspicion(bytes: u64) {
    LEAKED.fetch_sub(bytes, std::sync::atomic::Ordering::Relaxed);
}

impl Drop for Tensor {
    fn drop(&mut self) {
        if let Owner::Vec {
            len, capacity, free, ..
        } = self.owner
        {
            // SAFETY: the parts come from from_vec and are given back exactly once, here.
            unsafe { free(self.ptr, len, capacity) };
        }
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Tensor({} {:?} on {})",
            self.value_name(),
            self.shape,
            self.device
        )
    }
}

impl From<Box<(Error, Tensor)>> for Error {
    fn from(refused: Box<(Error, Tensor)>) -> Self {
        refused.0
    }
}

impl From<Box<(Error, Tensor, Tensor)>> for Error {
    fn from(refused: Box<(Error, Tensor, Tensor)>) -> Self {
        refused.0
    }
}

/// Two tensors that share bytes, as indices; `None` if all are apart. Zero-sized tensors never overlap.
pub(crate) fn find_overlap(tensors: &[&Tensor]) -> Option<(usize, usize)> {
    // On the path of every call: without the list that follows.
    if tensors.len() < 2 {
        return None;
    }
    let mut spans: Vec<_> = tensors
        .iter()
        .enumerate()
        .filter(|(_, t)| t.byte_len() > 0)
        .map(|(i, t)| (&t.device, t.as_ptr() as usize, t.byte_len(), i))
        .collect();
    spans.sort();
    spans.windows(2).find_map(|w| match w {
        [a, b] if a.0 == b.0 && a.1 + a.2 > b.1 => Some((a.3.min(b.3), a.3.max(b.3))),
        _ => None,
    })
}

/// A multiple of the page size of each system that this is built for.
const PAGE_BYTES: usize = 64 << 10;

/// Less than this is not worth a system call.
const HUGE_FROM_BYTES: usize = 4 << 20;

/// Asks the system to back `memory`, which is not written yet, with huge pages where it leaves that to programs: the first write to
/// each page of 4 KiB costs about as much as copying into it. What is too small for that, or a refusal, changes nothing.
pub fn prefer_huge_pages<T>(memory: &mut [MaybeUninit<T>]) {
    let begin = memory.as_mut_ptr().cast::<u8>();
    let start = begin.align_offset(PAGE_BYTES);
    let bytes = size_of_val(memory).saturating_sub(start);
    let bytes = bytes - bytes % PAGE_BYTES;
    if bytes < HUGE_FROM_BYTES {
        return;
    }
    let advice = rustix::mm::Advice::LinuxHugepage;
    // SAFETY: these are whole pages within memory that is lent to this call alone, and the advice changes neither what is in them
    // nor how they may be used.
    let _ = unsafe { rustix::mm::madvise(begin.wrapping_add(start).cast(), bytes, advice) };
}

/// A typed error for memory on a device that a backend does not serve.
pub fn wrong_device(tensor: &Tensor, serves: &str) -> Error {
    Error::new(
        ErrorKind::InvalidArgument,
        format!("the tensor is on {}; this group serves {serves}", tensor.device),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Capabilities, Checked, Collective, DTypeSet, Epoch, FeatureSet, GroupInfo, OpKind, OpSet, ReduceOp,
        SubmitOptions, names,
    };

    /// A tensor over memory that the caller keeps alive and that nothing else touches meanwhile.
    pub(super) fn foreign(
        ptr: NonNull<u8>,
        dtype: DType,
        count: usize,
        device: Device,
        owner: Arc<()>,
    ) -> Tensor {
        // SAFETY: the tests keep the memory for longer than the tensor, and look at it through tensors only.
        unsafe { Tensor::from_raw(ptr, dtype, &[count], None, device, Box::new(owner)) }.unwrap()
    }

    #[test]
    fn an_input_that_is_a_part_of_its_output_is_refused_with_what_to_call_instead() {
        let mut v = vec![0f32; 6];
        let ptr = NonNull::new(v.as_mut_ptr()).unwrap();
        let at = |first: usize, count| {
            let ptr = NonNull::new(ptr.as_ptr().wrapping_add(first)).unwrap().cast();
            foreign(ptr, DType::F32, count, Device::CPU, Arc::default())
        };
        let info = GroupInfo {
            backend: "mock".into(),
            name: "overlap".into(),
            rank: 1,
            world_size: 3,
            epoch: Epoch(1),
            device: Device::CPU,
            dropped_options: Vec::new(),
        };
        let offers = |ops: &[OpKind]| Capabilities {
            ops: OpSet::of(ops),
            moves: DTypeSet::of(&DType::ALL),
            reduces: [DTypeSet::of(&DType::ALL); ReduceOp::COUNT],
            features: FeatureSet::NONE,
            options: Vec::new(),
            devices: names(&["cpu"]),
            notes: Vec::new(),
        };
        let refused = |op, offers: &Capabilities| {
            let rejected = Checked::new(op, &info, offers, &SubmitOptions::default()).unwrap_err();
            assert!(!rejected.op.tensors().is_empty(), "nothing is lost");
            (rejected.error.kind(), rejected.error.to_string())
        };
        let all = offers(&OpKind::ALL);
        // Exactly its own part, and half of two parts.
        for first in [2, 1] {
            let gather = Collective::AllGatherInto {
                pairs: vec![(at(first, 2), at(0, 6))],
            };
            let (kind, text) = refused(gather, &all);
            assert_eq!(kind, ErrorKind::InvalidArgument, "{text}");
            assert!(text.contains("all_gather_in_place"), "{text}");
            let scatter = Collective::ReduceScatterInto {
                pairs: vec![(at(0, 6), at(first, 2))],
                op: ReduceOp::Sum,
            };
            let (kind, text) = refused(scatter, &all);
            assert_eq!(kind, ErrorKind::InvalidArgument, "{text}");
            assert!(text.contains("reduce_scatter_in_place"), "{text}");
        }
        let twice = Collective::AllGatherInPlace {
            tensors: vec![at(0, 6), at(3, 3)],
        };
        let (kind, text) = refused(twice, &all);
        assert_eq!(kind, ErrorKind::InvalidArgument, "{text}");
        assert!(text.contains("tensors 0 and 1 share memory"), "{text}");
        let odd = Collective::AllGatherInPlace {
            tensors: vec![at(0, 5)],
        };
        let (_, text) = refused(odd, &all);
        assert!(
            text.contains("tensor 0 has 5 ") && text.contains("3 ranks"),
            "{text}"
        );
        let scatter = Collective::ReduceScatterInPlace {
            tensors: vec![at(0, 6)],
            op: ReduceOp::Sum,
        };
        let (kind, text) = refused(scatter, &offers(&[OpKind::ReduceScatterInto]));
        assert_eq!(kind, ErrorKind::Unsupported, "{text}");
        assert!(text.contains("apart (reduce_scatter_into)"), "{text}");
    }

    #[test]
    fn a_vector_goes_in_and_comes_out_without_a_copy() {
        let v = vec![1.0f32, 2.0, 3.0];
        let p = v.as_ptr();
        let t = Tensor::from_vec(v);
        assert_eq!(t.shape(), [3]);
        let v = t.into_vec::<f32>().unwrap();
        assert_eq!(v.as_ptr(), p);
        assert_eq!(v, [1.0, 2.0, 3.0]);
    }

    #[test]
    fn the_wrong_type_is_refused_and_loses_nothing() {
        let t = Tensor::from_vec(vec![1i32, 2]);
        assert!(t.as_slice::<f32>().is_err());
        let (e, t) = *t.into_vec::<f32>().unwrap_err();
        assert!(e.to_string().contains("holds i32, not f32"), "{e}");
        assert_eq!(t.into_vec::<i32>().unwrap(), [1, 2]);
    }

    #[test]
    fn zeros_and_empty_tensors_work_for_every_dtype() {
        for d in DType::ALL {
            let t = Tensor::zeros(d, 5);
            assert_eq!((t.dtype(), t.byte_len()), (d, 5 * d.size()));
            assert!(t.bytes().iter().all(|&b| b == 0));
            assert_eq!(Tensor::zeros(d, 0).bytes(), [0u8; 0]);
        }
        assert_eq!(
            Tensor::zeros(DType::F32, 2).into_vec::<f32>().unwrap(),
            [0.0, 0.0]
        );
        let t = Tensor::try_zeros(DType::I16, &[2, 3]).unwrap();
        assert_eq!((t.shape(), t.bytes()), (&[2, 3][..], &[0; 12][..]));
        for shape in [&[usize::MAX / 4][..], &[usize::MAX, 2]] {
            let e = Tensor::try_zeros(DType::F64, shape).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}");
        }
    }

    #[test]
    fn a_duplicate_has_the_values_dtype_and_shape_and_memory_of_its_own() {
        for d in DType::ALL {
            let mut t = Tensor::zeros(d, 6).reshape(&[2, 3]).unwrap();
            t.bytes_mut().fill(1);
            let copy = t.duplicate().unwrap();
            assert_eq!(
                (copy.dtype(), copy.shape(), copy.bytes()),
                (d, &[2usize, 3][..], t.bytes())
            );
            assert_ne!(copy.as_ptr(), t.as_ptr());
        }
        let large = Tensor::from_vec((0..3 << 20).collect::<Vec<u64>>());
        assert_eq!(large.duplicate().unwrap().bytes(), large.bytes());
    }

    #[test]
    fn advice_about_pages_keeps_what_is_in_them_whatever_their_size_and_place() {
        for (bytes, skip) in [(0, 0), (100, 3), (9 << 20, 0), (9 << 20, 4097)] {
            let mut data = vec![7u8; bytes];
            data.reserve_exact(bytes);
            prefer_huge_pages(data.spare_capacity_mut().get_mut(skip..).unwrap_or_default());
            data.resize(2 * bytes, 9);
            assert!(
                data.iter()
                    .zip(0..)
                    .all(|(b, i)| *b == if i < bytes { 7 } else { 9 })
            );
        }
    }

    #[test]
    fn shared_bytes_are_not_copied_and_a_write_does_not_reach_those_who_read_them() {
        struct Readers(Arc<Vec<u8>>);
        impl AsRef<[u8]> for Readers {
            fn as_ref(&self) -> &[u8] {
                &self.0
            }
        }
        let bytes = Arc::new(vec![1u8, 2, 3, 4]);
        let mut t = Tensor::from_shared(Readers(bytes.clone()));
        assert_eq!(
            (t.as_ptr(), t.is_shared(), t.dtype()),
            (bytes.as_ptr(), true, DType::U8)
        );
        t.bytes_mut().fill(9);
        assert_eq!((t.bytes(), t.is_shared()), (&[9u8; 4][..], false));
        assert_eq!((&bytes[..], Arc::strong_count(&bytes)), (&[1u8, 2, 3, 4][..], 1));
        let mut t = Tensor::from_shared(Readers(bytes.clone()))
            .reshape(&[2, 2])
            .unwrap();
        t.as_mut_slice::<u8>().unwrap()[0] = 7;
        assert_eq!((t.shape(), bytes[0]), (&[2usize, 2][..], 1));
        // Bytes within the owner itself, and none at all.
        let within = Tensor::from_shared([5u8, 6]);
        assert_eq!(within.bytes(), [5, 6]);
        assert_eq!(Tensor::from_shared(Vec::new()).byte_len(), 0);
    }

    #[test]
    fn l14_a_strided_tensor_is_refused_with_its_strides() {
        let mut v = vec![0f32; 8];
        let ptr = NonNull::new(v.as_mut_ptr()).unwrap().cast();
        // SAFETY: `v` outlives the tensor and is not touched while it lives.
        let r = unsafe { Tensor::from_raw(ptr, DType::F32, &[4], Some(&[2]), Device::CPU, Box::new(())) };
        let e = r.err().unwrap();
        assert_eq!(e.kind(), ErrorKind::InvalidArgument);
        assert!(e.to_string().contains("[2]"), "{e}");
        // SAFETY: as above.
        let ok =
            unsafe { Tensor::from_raw(ptr, DType::F32, &[2, 4], Some(&[4, 1]), Device::CPU, Box::new(())) };
        assert_eq!(ok.unwrap().count(), 8);
    }

    #[test]
    fn lent_memory_is_written_in_place() {
        let mut v = vec![1u32, 2, 3];
        let p = v.as_ptr() as usize;
        let same = lend(&mut v, |mut t| {
            t.bytes_mut().fill(1);
            t.as_ptr() as usize == p
        });
        assert!(same);
        assert_eq!(v, [0x0101_0101; 3]);
        let mut none: [f64; 0] = [];
        assert_eq!(lend(&mut none, |t| t.byte_len()), 0);
    }

    #[test]
    fn overlapping_memory_is_found() {
        let mut v = vec![0f32; 8];
        let ptr = NonNull::new(v.as_mut_ptr()).unwrap();
        let make = |off: usize, n: usize| {
            let p = NonNull::new(ptr.as_ptr().wrapping_add(off)).unwrap().cast();
            // SAFETY: only addresses are looked at; nothing is written.
            unsafe { Tensor::from_raw(p, DType::F32, &[n], None, Device::CPU, Box::new(())) }.unwrap()
        };
        let (a, b, c) = (make(0, 4), make(4, 4), make(3, 2));
        assert_eq!(find_overlap(&[&a, &b]), None);
        assert_eq!(find_overlap(&[&a, &b, &c]), Some((0, 2)));
    }
}
