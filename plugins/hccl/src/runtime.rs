//! The process's one Gaudi: libraries opened once, the device acquired once, its memory kept.
//!
//! Synapse gives a process one device and HCCL one device per process, so both live as long as the process. What fails is
//! tried again at the next call: the reason may have gone away.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::ftcore::registry::Unavailable;
use crate::ftcore::{Error, Result};
use crate::raw::hccl::Hccl;
use crate::raw::library;
use crate::raw::synapse::{StreamHandle, Synapse};

/// Which module to take; Intel's own variable of that meaning is looked at next.
const ENV_MODULE: &str = "OXCCL_HCCL_MODULE_ID";
const ENV_MODULE_VENDOR: &str = "HLS_MODULE_ID";

/// Freed device memory kept for the next allocation, at most.
const KEPT_BYTES: u64 = 256 << 20;
/// The alignment of allocations that Synapse documents.
const ALIGNMENT: u64 = 128;

/// Both vendor libraries.
pub(crate) struct Libraries {
    pub(crate) synapse: Synapse,
    pub(crate) hccl: Hccl,
}

/// The acquired device.
pub(crate) struct Runtime {
    pub(crate) libraries: &'static Libraries,
    /// Synapse's id of it.
    pub(crate) device: u32,
    /// Memory whose tensors are gone: (address, bytes).
    retired: Mutex<Vec<(u64, u64)>>,
    /// Ranges that a copy may still touch of which it is not known whether it has ended.
    suspect: Mutex<Vec<(u64, u64)>>,
    /// All streams that are alive.
    streams: Mutex<Vec<StreamHandle>>,
}

impl Libraries {
    fn open() -> Result<Self> {
        let failed = |e: Error| match Unavailable::of(&e) {
            Some(_) => e,
            None => Unavailable::InitFailed {
                code: e.code(),
                text: e.message().to_string(),
            }
            .into(),
        };
        let synapse = Synapse::new(&library::open(&["libSynapse.so"])?).map_err(failed)?;
        // Intel's own programs link the HCCL functions from libSynapse.so.
        let hccl = Hccl::new(&library::open(&["libhccl.so", "libSynapse.so"])?).map_err(failed)?;
        Ok(Self { synapse, hccl })
    }

    /// Versions and paths in words.
    pub(crate) fn describe(&self) -> String {
        let driver = self
            .synapse
            .driver_version()
            .unwrap_or_else(|| "unknown".to_string());
        format!(
            "{}, Synapse driver {driver} from {}",
            self.hccl.describe(),
            self.synapse.path
        )
    }
}

/// A value that is made once and then stays; a failure is not kept.
pub(crate) struct Once<T: 'static>(Mutex<Option<&'static T>>);

impl<T> Once<T> {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(None))
    }

    pub(crate) fn get(&self, make: impl FnOnce() -> Result<T>) -> Result<&'static T> {
        let mut slot = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(made) = *slot {
            return Ok(made);
        }
        let made: &'static T = Box::leak(Box::new(make()?));
        *slot = Some(made);
        Ok(made)
    }
}

/// The opened libraries.
///
/// Errors: see [`Unavailable`]: a library that is not there or lacks a function, a version too old, a failed start.
pub(crate) fn libraries() -> Result<&'static Libraries> {
    static LIBRARIES: Once<Libraries> = Once::new();
    LIBRARIES.get(Libraries::open)
}

/// The acquired device. May block as long as the driver does.
///
/// Errors: those of [`libraries`]; `InvalidArgument` for a module number that is none; `Backend` if the driver refuses.
pub(crate) fn runtime() -> Result<&'static Runtime> {
    static RUNTIME: Once<Runtime> = Once::new();
    let libraries = libraries()?;
    RUNTIME.get(|| {
        let device = libraries.synapse.acquire(module()?)?;
        tracing::info!(device, library = %libraries.describe(), "acquired a Gaudi");
        Ok(Runtime {
            libraries,
            device,
            retired: Mutex::default(),
            suspect: Mutex::default(),
            streams: Mutex::default(),
        })
    })
}

/// The module that the environment names.
fn module() -> Result<Option<u32>> {
    for name in [ENV_MODULE, ENV_MODULE_VENDOR] {
        if let Ok(text) = std::env::var(name) {
            return text.trim().parse().map(Some).map_err(|_| {
                Error::invalid(format!("{name} is '{text}', which is not the number of a module"))
            });
        }
    }
    Ok(None)
}

impl Runtime {
    fn retired(&self) -> MutexGuard<'_, Vec<(u64, u64)>> {
        self.retired.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// At least `bytes` of device memory with undefined contents: (address, bytes).
    pub(crate) fn allocate(&self, bytes: u64) -> Result<(u64, u64)> {
        let bytes = bytes.max(1).next_multiple_of(ALIGNMENT);
        let surplus = {
            let mut retired = self.retired();
            if let Some(i) = retired.iter().position(|(_, size)| *size == bytes) {
                return Ok(retired.swap_remove(i));
            }
            let kept: u64 = retired.iter().map(|(_, size)| size).sum();
            if kept > KEPT_BYTES {
                std::mem::take(&mut *retired)
            } else {
                Vec::new()
            }
        };
        self.release(surplus);
        let synapse = &self.libraries.synapse;
        let address = synapse.allocate(self.device, bytes).or_else(|e| {
            let kept = std::mem::take(&mut *self.retired());
            if kept.is_empty() {
                return Err(e);
            }
            self.release(kept);
            synapse.allocate(self.device, bytes)
        })?;
        Ok((address, bytes))
    }

    fn release(&self, memory: Vec<(u64, u64)>) {
        for (address, bytes) in memory {
            if let Err(error) = self.libraries.synapse.free(self.device, address) {
                tracing::warn!(%error, bytes, "device memory was not given back");
            }
        }
    }

    /// Memory whose tensor is gone. Only remembered: a drop never calls the driver, the next allocation reuses or frees it.
    pub(crate) fn retire(&self, address: u64, bytes: u64) {
        self.retired().push((address, bytes));
    }

    /// A copy from or to that range has failed or was given up, and may still run.
    pub(crate) fn suspect(&self, address: u64, bytes: u64) {
        let mut suspect = self.suspect.lock().unwrap_or_else(PoisonError::into_inner);
        suspect.push((address, bytes));
    }

    /// Whether a copy may still touch a part of that range.
    pub(crate) fn is_suspect(&self, address: u64, bytes: u64) -> bool {
        let suspect = self.suspect.lock().unwrap_or_else(PoisonError::into_inner);
        let mut suspect = suspect.iter();
        suspect.any(|(at, long)| *at < address + bytes && address < at + long)
    }

    fn streams(&self) -> MutexGuard<'_, Vec<StreamHandle>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new stream, remembered until [`end_stream`](Self::end_stream).
    pub(crate) fn create_stream(&self) -> Result<StreamHandle> {
        let stream = self.libraries.synapse.create_stream(self.device)?;
        self.streams().push(stream);
        Ok(stream)
    }

    /// Ends a stream if it is idle; otherwise the driver keeps it.
    pub(crate) fn end_stream(&self, stream: StreamHandle) {
        self.streams().retain(|s| *s != stream);
        match self.libraries.synapse.destroy_stream(stream) {
            Ok(true) => {}
            Ok(false) => tracing::debug!("a busy stream is left to the driver"),
            Err(error) => tracing::debug!(%error, "a stream was not ended"),
        }
    }

    /// True if no stream has anything left to do.
    pub(crate) fn idle(&self) -> Result<bool> {
        // Held while asking, so that none of them ends meanwhile.
        let streams = self.streams();
        for stream in streams.iter() {
            if !self.libraries.synapse.stream_idle(*stream)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
