//! How memory and events of a device kind get into another process of this host: what a group in a child process needs.
//!
//! Memory is made to be shared ([`Crossing::create`]) and opened by the other side; what lies elsewhere is copied into it on the
//! device, in stream order. An event crosses so that the other process can wait for a point of a stream here. Nothing ever crosses
//! the other way that a stream here would wait for: a process that is killed never reaches its events, and that stream would hang
//! for ever.

use std::any::Any;
use std::sync::Arc;

use crate::{DType, DeviceKind, Event, Result, Stream, Tensor};

/// What a device kind needs to cross. Implemented by the crate that knows the driver.
///
/// Contract: an opened tensor is the other process's memory, not a copy; an opened event is reached when, and only when, the
/// marked point is (L09: elsewhere an event that does not really cross is silently empty, and the order is lost). What cannot
/// cross is `Unsupported` or `Backend` with the reason, never an empty handle. Handles come from another process: a wrong
/// one is an error (INV-10).
pub trait Crossing: Send + Sync {
    /// The device kind.
    fn kind(&self) -> DeviceKind;
    /// New memory of `bytes` (not 0) on device `index`, as `U8`, and the handle by which another process opens it. Dropping
    /// it does not block.
    fn create(&self, index: u32, bytes: usize) -> Result<(Tensor, Vec<u8>)>;
    /// In the other process: the memory of a handle, `bytes` long, as `U8` on device `index`.
    fn open(&self, index: u32, handle: &[u8], bytes: usize) -> Result<Tensor>;
    /// `shape` elements of `dtype` that lie in `whole` at byte `offset`; `owner` is dropped with the tensor. The caller has this
    /// part for itself. `InvalidArgument` if it does not lie within or is not aligned.
    fn part(
        &self,
        whole: &Arc<Tensor>,
        offset: usize,
        dtype: DType,
        shape: &[usize],
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Tensor>;
    /// Copies on the device, in the order of `stream`; both tensors stay until then. `InvalidArgument` if the lengths differ.
    fn copy(&self, from: &Tensor, to: &mut Tensor, stream: &dyn Stream) -> Result<()>;
    /// Marks the present end of `stream`: the event, and a handle by which another process waits for it. The handle is good
    /// for as long as the event is kept.
    fn mark(&self, stream: &dyn Stream) -> Result<(Arc<dyn Event>, Vec<u8>)>;
    /// In the other process: the event of a handle, for streams of device `index`.
    fn open_mark(&self, index: u32, handle: &[u8]) -> Result<Arc<dyn Event>>;
}

/// A crossing that is linked in. Submit one with `ftcore::inventory::submit!`.
pub struct StaticCrossing {
    /// The device kind's name.
    pub kind: &'static str,
    /// Makes it.
    pub make: fn() -> Arc<dyn Crossing>,
}

inventory::collect!(StaticCrossing);

/// The crossing of `kind`, if a crate in this program brings one.
pub fn crossing(kind: &DeviceKind) -> Option<Arc<dyn Crossing>> {
    let found = inventory::iter::<StaticCrossing>
        .into_iter()
        .find(|c| c.kind == kind.name())?;
    Some((found.make)())
}
