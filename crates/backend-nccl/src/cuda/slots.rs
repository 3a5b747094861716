//! The slots in which reductions leave their contributors.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind, Result, deadline_in, poll};

use super::raw::{Driver, Pinned, Span, StreamHandle};

const SLOTS: usize = 4096;

/// Words on the device and their page-locked copies on the host, and the constants 0 and 1.
pub(crate) struct Slots {
    driver: &'static Driver,
    device: Span,
    constants: Span,
    host: Pinned,
    free: Mutex<Vec<usize>>,
}

/// One slot. Not freed by itself: the one that knows that the device is done gives it back.
#[derive(Debug)]
pub(crate) struct Slot(usize);

impl Slots {
    /// Of the device that is current, whose allocations are enqueued on `stream`.
    pub(crate) fn new(driver: &'static Driver, stream: StreamHandle) -> Result<Self> {
        let word = size_of::<i32>();
        // Never freed: they live as long as the device.
        let device = driver.alloc(SLOTS * word, stream)?;
        let constants = driver.alloc(2 * word, stream)?;
        driver.fill(constants, 8, 1 << 32, stream)?;
        let host = driver.pinned(SLOTS)?;
        let until: Instant = deadline_in(Duration::from_secs(60));
        poll(until, "the set-up of the device", || driver.stream_query(stream))?;
        Ok(Self {
            driver,
            device,
            constants,
            host,
            free: Mutex::new((0..SLOTS).rev().collect()),
        })
    }

    /// A free slot.
    pub(crate) fn take(&self) -> Result<Slot> {
        self.free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop()
            .map(Slot)
            .ok_or_else(|| {
                Error::new(
                    ErrorKind::Unavailable,
                    format!("{SLOTS} reductions are in flight on this device; wait for some of them first"),
                )
            })
    }

    /// The slot's device memory.
    pub(crate) fn span(&self, slot: &Slot) -> Result<Span> {
        self.device
            .part(slot.0 * size_of::<i32>(), size_of::<i32>())
            .ok_or_else(|| Error::invalid("a slot outside its page"))
    }

    /// Device memory that holds 1 (`true`) or 0.
    pub(crate) fn constant(&self, one: bool) -> Result<Span> {
        self.constants
            .part(usize::from(one) * size_of::<i32>(), size_of::<i32>())
            .ok_or_else(|| Error::invalid("a constant outside its page"))
    }

    /// Enqueues the copy to the host.
    pub(crate) fn fetch(&self, slot: &Slot, stream: StreamHandle) -> Result<()> {
        self.driver
            .copy_word(self.span(slot)?, &self.host, slot.0, stream)
    }

    /// The value that was fetched, once the copy is done.
    pub(crate) fn read(&self, slot: &Slot) -> u32 {
        u32::try_from(self.host.read(slot.0)).unwrap_or(0)
    }

    /// The device is done with it.
    pub(crate) fn give_back(&self, slot: Slot) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.push(slot.0);
    }
}
