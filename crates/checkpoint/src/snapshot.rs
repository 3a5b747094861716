//! The immutable state of one step: what sources serve.
//!
//! Made by one copy of the state into safetensors bytes; whatever the trainer does to its tensors afterwards, readers
//! get the step that was asked for (lesson L10). The hashes are computed when the first reader asks, on the server's
//! threads, so that a healthy replica pays for the copy only.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use ftcore::{Error, ErrorKind, Result};

use crate::manifest::{FORMAT_VERSION, MAX_CHUNK_BYTES, Manifest};
use crate::{StateDict, codec};

/// The chunk size unless told otherwise: 1 MiB.
pub const DEFAULT_CHUNK_BYTES: u64 = 1 << 20;

const STEP: &str = "oxccl.step";
const EPOCH: &str = "oxccl.epoch";
const VERSION: &str = "oxccl.version";

/// An immutable, encoded state with its step and epoch.
#[derive(Debug)]
pub struct Snapshot {
    step: i64,
    epoch: i64,
    chunk_bytes: u64,
    bytes: Vec<u8>,
    manifest: OnceLock<(Manifest, Bytes)>,
}

impl Snapshot {
    /// A snapshot of `state` at `step` (0 or more), taken in `epoch` (the quorum's id), in chunks of 1 MiB.
    ///
    /// Copies the state once; errors as [`crate::encode`], and `InvalidArgument` for a negative step.
    pub fn new(step: i64, epoch: i64, state: &StateDict) -> Result<Arc<Self>> {
        Self::with_chunk_bytes(step, epoch, state, DEFAULT_CHUNK_BYTES)
    }

    /// [`Self::new`] with another chunk size, from 1 to [`MAX_CHUNK_BYTES`]. All sources of a job should use the
    /// same one: a receiver mixes chunks of sources only if their manifests are equal.
    pub fn with_chunk_bytes(step: i64, epoch: i64, state: &StateDict, chunk_bytes: u64) -> Result<Arc<Self>> {
        if step < 0 {
            return Err(Error::invalid(format!("a snapshot of step {step}")));
        }
        if chunk_bytes == 0 || chunk_bytes > MAX_CHUNK_BYTES {
            return Err(Error::invalid(format!(
                "chunks of {chunk_bytes} bytes (1 to {MAX_CHUNK_BYTES})"
            )));
        }
        let own = BTreeMap::from([
            (STEP.to_owned(), step.to_string()),
            (EPOCH.to_owned(), epoch.to_string()),
            (VERSION.to_owned(), FORMAT_VERSION.to_string()),
        ]);
        let bytes = codec::encode_with(state, &own)?;
        Ok(Arc::new(Self {
            step,
            epoch,
            chunk_bytes,
            bytes,
            manifest: OnceLock::new(),
        }))
    }

    /// The step whose state this is.
    pub fn step(&self) -> i64 {
        self.step
    }

    /// The epoch in which it was taken.
    pub fn epoch(&self) -> i64 {
        self.epoch
    }

    /// The encoded state: a safetensors file.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The manifest. The first call hashes the whole state (about a second for a few GB).
    pub fn manifest(&self) -> &Manifest {
        &self.hashed().0
    }

    /// The manifest as it is served; empty only if it cannot be written as JSON, which readers refuse.
    pub(crate) fn manifest_json(&self) -> Bytes {
        self.hashed().1.clone()
    }

    /// The manifest's digest if it was computed already; never blocks.
    pub(crate) fn known_digest(&self) -> Option<blake3::Hash> {
        self.manifest.get().map(|(m, _)| m.digest())
    }

    fn hashed(&self) -> &(Manifest, Bytes) {
        self.manifest.get_or_init(|| {
            let manifest = Manifest::of(self.step, self.epoch, &self.bytes, self.chunk_bytes);
            let json = manifest.to_json().unwrap_or_default();
            (manifest, json.into())
        })
    }

    /// Chunk `index`; `None` beyond the last.
    pub fn chunk(&self, index: usize) -> Option<&[u8]> {
        let size = usize::try_from(self.chunk_bytes).ok()?;
        let start = index.checked_mul(size).filter(|s| *s < self.bytes.len())?;
        self.bytes
            .get(start..start.saturating_add(size).min(self.bytes.len()))
    }

    /// The state again, from received chunks whose hashes were checked. `Corrupt` if what the state says about
    /// itself is not what `manifest` says.
    pub(crate) fn restore(manifest: &Manifest, chunks: Vec<Bytes>) -> Result<StateDict> {
        let (state, own) = codec::decode_parts(chunks)?;
        for (key, expected) in [
            (STEP, manifest.step().to_string()),
            (EPOCH, manifest.epoch().to_string()),
            (VERSION, FORMAT_VERSION.to_string()),
        ] {
            let found = own.get(key).map_or("missing", String::as_str);
            if found != expected {
                return Err(Error::new(
                    ErrorKind::Corrupt,
                    format!("the manifest says {key} {expected}, the state itself {found}"),
                ));
            }
        }
        Ok(state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> StateDict {
        let mut s = StateDict::new();
        s.insert_f32("w", &[100], &[1.5; 100]).unwrap();
        s
    }

    fn chunks(s: &Snapshot) -> Vec<Bytes> {
        (0..)
            .map_while(|i| s.chunk(i))
            .map(Bytes::copy_from_slice)
            .collect()
    }

    #[test]
    fn chunks_fit_the_manifest_and_make_up_the_state() {
        let s = Snapshot::with_chunk_bytes(5, 2, &state(), 64).unwrap();
        let m = s.manifest();
        let all = chunks(&s);
        assert_eq!(all.len(), m.chunk_count());
        for (i, c) in all.iter().enumerate() {
            assert_eq!(Some(blake3::hash(c)), m.chunk_hash(i));
            assert_eq!(Some(c.len()), m.chunk_len(i));
        }
        assert_eq!(s.chunk(all.len()), None);
        assert_eq!(s.chunk(usize::MAX), None);
        assert_eq!(Snapshot::restore(m, all).unwrap(), state());
    }

    #[test]
    fn l03_the_step_inside_the_state_must_be_the_step_of_the_manifest() {
        let s = Snapshot::new(5, 2, &state()).unwrap();
        let lie = Manifest::of(6, 2, s.bytes(), 1 << 20);
        let e = Snapshot::restore(&lie, chunks(&s)).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Corrupt);
        assert!(
            e.message().contains("oxccl.step 6") && e.message().contains('5'),
            "{e}"
        );
    }

    #[test]
    fn steps_and_chunk_sizes_out_of_range_are_refused() {
        assert!(Snapshot::new(-1, 0, &state()).is_err());
        assert!(Snapshot::with_chunk_bytes(0, 0, &state(), 0).is_err());
        assert!(Snapshot::with_chunk_bytes(0, 0, &state(), MAX_CHUNK_BYTES + 1).is_err());
    }
}
