//! Structs that grow: how much of one both sides know, and copies of just that. Nothing that the other side says is believed unchecked (INV-10).

use std::mem::size_of;

use super::{
    BackendEntry, Buffer, Capabilities, Completion, Configuration, DeviceTable, Fault, Group, GroupOptions,
    Host, Info, Operation, Outcome, Plugin, QueryReply, Store, Traffic, WorkHandle,
};

/// A struct that begins with `size: u64`, may be copied in part, and is valid when all its bytes are zero.
///
/// # Safety
/// `#[repr(C)]`, first field `size: u64`, every field a number, a pointer, an optional function or a struct of such.
pub unsafe trait Growing: Copy {
    /// The size of its first form: less is not this struct.
    const MINIMUM: usize = size_of::<Self>();

    /// All zero but `size`.
    fn empty() -> Self {
        // SAFETY: the trait promises that all-zero bytes are a value.
        let mut zero: Self = unsafe { std::mem::zeroed() };
        // SAFETY: the trait promises a first field of type u64.
        unsafe { (&raw mut zero).cast::<u64>().write(size_of::<Self>() as u64) };
        zero
    }
}

macro_rules! growing {
    ($($name:ident,)+) => {$(
        // SAFETY: declared in `abi.rs` with `size: u64` first and only fields that may be zero.
        unsafe impl Growing for $name {}
    )+};
}

growing! {
    Fault,
    BackendEntry,
    QueryReply,
    Host,
    Capabilities,
    GroupOptions,
    Info,
    Store,
    Configuration,
    Buffer,
    Operation,
    Outcome,
    Completion,
    WorkHandle,
    Traffic,
    Group,
    DeviceTable,
    Plugin,
}

/// No struct of the ABI will ever be larger; a `size` above it is garbage.
pub const LARGEST: u64 = 64 * 1024;

/// Copies what both sides know out of a struct of the other side; the rest is zero.
///
/// Errors: in words, if the pointer is null or misaligned or the size is not believable.
///
/// # Safety
/// If not null and aligned, `from` points to at least 8 readable bytes, and to as many as they say if that is at most
/// [`LARGEST`].
pub unsafe fn read<T: Growing>(from: *const T) -> Result<T, String> {
    if from.is_null() {
        return Err(format!("{} is missing", short_name::<T>()));
    }
    if !from.is_aligned() {
        return Err(format!("{} is not aligned", short_name::<T>()));
    }
    // SAFETY: 8 readable bytes by the contract.
    let said = unsafe { from.cast::<u64>().read() };
    if said < T::MINIMUM as u64 || said > LARGEST {
        return Err(format!(
            "{} says it has {said} bytes; at least {} are needed",
            short_name::<T>(),
            T::MINIMUM
        ));
    }
    let mut into = T::empty();
    let both = size_of::<T>().min(usize::try_from(said).unwrap_or(usize::MAX));
    // SAFETY: both sides have `both` bytes; T may hold any prefix, the rest stays zero.
    unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), (&raw mut into).cast::<u8>(), both) };
    Ok(into)
}

/// Writes what both sides know into a struct of the other side, whose `size` says how much it can take, and sets `size` to
/// what was written.
///
/// Errors: as [`read`].
///
/// # Safety
/// As [`read`], and writable.
pub unsafe fn write<T: Growing>(to: *mut T, value: &T) -> Result<(), String> {
    // SAFETY: same contract; the copy is thrown away, the checks are what is wanted.
    unsafe { read(to.cast_const()) }?;
    // SAFETY: readable by the contract.
    let can = unsafe { to.cast::<u64>().read() };
    let both = size_of::<T>().min(usize::try_from(can).unwrap_or(usize::MAX));
    // SAFETY: both sides have `both` bytes.
    unsafe { std::ptr::copy_nonoverlapping((&raw const *value).cast::<u8>(), to.cast::<u8>(), both) };
    // SAFETY: the first field is the u64 size.
    unsafe { to.cast::<u64>().write(both as u64) };
    Ok(())
}

fn short_name<T>() -> &'static str {
    std::any::type_name::<T>()
        .rsplit("::")
        .next()
        .unwrap_or("a struct")
}
