//! What a receiver knows about a snapshot before it takes the first chunk: sizes and hashes.
//!
//! The digest binds step, epoch, all sizes and the ordered list of chunk hashes. A manifest whose digest fits, together
//! with chunks that fit their hashes, therefore proves the whole state without hashing it twice; and two sources
//! with the same digest serve the same bytes.

use blake3::Hash;
use ftcore::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

/// The version of manifest and snapshot metadata that this build writes and reads.
pub const FORMAT_VERSION: u32 = 1;

/// The largest chunk that is served or accepted, in bytes. Bounds what one request costs both sides.
pub const MAX_CHUNK_BYTES: u64 = 64 << 20;

const DIGEST_CONTEXT: &str = "oxccl 2026-11-21 checkpoint manifest v1";

/// The manifest of one snapshot. Only made by [`Manifest::of`] and [`Manifest::parse`], so its fields agree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    step: i64,
    epoch: i64,
    total_bytes: u64,
    chunk_bytes: u64,
    chunks: Vec<Hash>,
    digest: Hash,
}

#[derive(Serialize, Deserialize)]
struct Json {
    version: u32,
    step: i64,
    epoch: i64,
    total_bytes: u64,
    chunk_bytes: u64,
    chunk_hashes: Vec<String>,
    hash: String,
}

impl Manifest {
    /// The manifest of `bytes`, cut into chunks of `chunk_bytes` (the last one may be shorter; 0 counts as 1).
    pub fn of(step: i64, epoch: i64, bytes: &[u8], chunk_bytes: u64) -> Self {
        let size = usize::try_from(chunk_bytes.max(1)).unwrap_or(usize::MAX);
        let chunks: Vec<Hash> = bytes.chunks(size).map(blake3::hash).collect();
        let mut manifest = Self {
            step,
            epoch,
            total_bytes: bytes.len() as u64,
            chunk_bytes: chunk_bytes.max(1),
            chunks,
            digest: Hash::from_bytes([0; 32]),
        };
        manifest.digest = manifest.compute_digest();
        manifest
    }

    /// Reads a manifest that came from a peer. `Protocol` if it is not one or of another version, `Corrupt` if its
    /// fields disagree or the digest does not fit. A state above `max_state_bytes` is `Protocol` naming both sizes.
    pub fn parse(json: &[u8], max_state_bytes: u64) -> Result<Self> {
        let json: Json = serde_json::from_slice(json).map_err(|e| {
            Error::new(ErrorKind::Protocol, format!("not a checkpoint manifest: {e}")).with_source(e)
        })?;
        if json.version != FORMAT_VERSION {
            return Err(Error::new(
                ErrorKind::Protocol,
                format!(
                    "a manifest of version {}, this build reads {FORMAT_VERSION}",
                    json.version
                ),
            ));
        }
        if json.total_bytes > max_state_bytes {
            return Err(Error::new(
                ErrorKind::Protocol,
                format!(
                    "a state of {} bytes is larger than the limit of {max_state_bytes} (max_state_bytes)",
                    json.total_bytes
                ),
            ));
        }
        if json.chunk_bytes == 0 || json.chunk_bytes > MAX_CHUNK_BYTES {
            return Err(corrupt(format!(
                "chunks of {} bytes (1 to {MAX_CHUNK_BYTES})",
                json.chunk_bytes
            )));
        }
        let count = json.total_bytes.div_ceil(json.chunk_bytes);
        if json.chunk_hashes.len() as u64 != count {
            return Err(corrupt(format!(
                "{} chunk hashes, but {} bytes in chunks of {} are {count} chunks",
                json.chunk_hashes.len(),
                json.total_bytes,
                json.chunk_bytes
            )));
        }
        let hash = |hex: &String| Hash::from_hex(hex).map_err(|e| corrupt(format!("a hash: {e}")));
        let manifest = Self {
            step: json.step,
            epoch: json.epoch,
            total_bytes: json.total_bytes,
            chunk_bytes: json.chunk_bytes,
            chunks: json.chunk_hashes.iter().map(hash).collect::<Result<_>>()?,
            digest: hash(&json.hash)?,
        };
        let computed = manifest.compute_digest();
        if computed != manifest.digest {
            return Err(corrupt(format!(
                "the manifest's hash is {}, its content's {computed}",
                manifest.digest
            )));
        }
        Ok(manifest)
    }

    /// The JSON form: {version, step, epoch, total_bytes, chunk_bytes, chunk_hashes, hash}, hashes in hex.
    pub fn to_json(&self) -> Result<Vec<u8>> {
        let json = Json {
            version: FORMAT_VERSION,
            step: self.step,
            epoch: self.epoch,
            total_bytes: self.total_bytes,
            chunk_bytes: self.chunk_bytes,
            chunk_hashes: self.chunks.iter().map(|h| h.to_hex().to_string()).collect(),
            hash: self.digest.to_hex().to_string(),
        };
        serde_json::to_vec(&json)
            .map_err(|e| Error::new(ErrorKind::Internal, format!("a manifest: {e}")).with_source(e))
    }

    fn compute_digest(&self) -> Hash {
        let mut hasher = blake3::Hasher::new_derive_key(DIGEST_CONTEXT);
        hasher.update(&FORMAT_VERSION.to_le_bytes());
        hasher.update(&self.step.to_le_bytes());
        hasher.update(&self.epoch.to_le_bytes());
        hasher.update(&self.total_bytes.to_le_bytes());
        hasher.update(&self.chunk_bytes.to_le_bytes());
        for chunk in &self.chunks {
            hasher.update(chunk.as_bytes());
        }
        hasher.finalize()
    }

    /// The step whose state this is.
    pub fn step(&self) -> i64 {
        self.step
    }

    /// The epoch (quorum id) in which the snapshot was taken.
    pub fn epoch(&self) -> i64 {
        self.epoch
    }

    /// The encoded state, in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// The size of every chunk but perhaps the last, in bytes.
    pub fn chunk_bytes(&self) -> u64 {
        self.chunk_bytes
    }

    /// The number of chunks.
    pub fn chunk_count(&self) -> usize {
        self.chunks.len()
    }

    /// The hash of chunk `index`; `None` beyond the last.
    pub fn chunk_hash(&self, index: usize) -> Option<Hash> {
        self.chunks.get(index).copied()
    }

    /// The bytes of chunk `index`; `None` beyond the last.
    pub fn chunk_len(&self, index: usize) -> Option<usize> {
        if index >= self.chunks.len() {
            return None;
        }
        let start = self.chunk_bytes.checked_mul(index as u64)?;
        usize::try_from(self.total_bytes.checked_sub(start)?.min(self.chunk_bytes)).ok()
    }

    /// The hash over step, epoch, sizes and all chunk hashes: equal digests mean equal bytes.
    pub fn digest(&self) -> Hash {
        self.digest
    }
}

fn corrupt(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::Corrupt, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_survives_json_and_knows_its_last_chunk() {
        let m = Manifest::of(7, 3, &[9; 2500], 1000);
        assert_eq!(
            (m.chunk_count(), m.chunk_len(2), m.chunk_len(3)),
            (3, Some(500), None)
        );
        assert_eq!(Manifest::parse(&m.to_json().unwrap(), 2500).unwrap(), m);
        let empty = Manifest::of(0, 0, &[], 1000);
        assert_eq!(Manifest::parse(&empty.to_json().unwrap(), 0).unwrap(), empty);
    }

    #[test]
    fn a_manifest_whose_fields_disagree_is_refused() {
        let json = String::from_utf8(Manifest::of(7, 3, &[9; 2500], 1000).to_json().unwrap()).unwrap();
        let good_hash = blake3::hash(&[9; 1000]).to_hex().to_string();
        for (from, to, kind) in [
            ("\"step\":7", "\"step\":8", ErrorKind::Corrupt),
            ("\"epoch\":3", "\"epoch\":4", ErrorKind::Corrupt),
            ("\"version\":1", "\"version\":2", ErrorKind::Protocol),
            ("2500", "2400", ErrorKind::Corrupt),
            ("2500", "3500", ErrorKind::Corrupt),
            ("2500", "2501", ErrorKind::Protocol),
            ("\"chunk_bytes\":1000", "\"chunk_bytes\":0", ErrorKind::Corrupt),
            (
                "\"chunk_bytes\":1000",
                "\"chunk_bytes\":18446744073709551615",
                ErrorKind::Corrupt,
            ),
            (good_hash.as_str(), "zz", ErrorKind::Corrupt),
            ("{", "<", ErrorKind::Protocol),
        ] {
            let limit = if to == "3500" { 4000 } else { 2500 };
            let changed = json.replacen(from, to, 1);
            assert_ne!(changed, json);
            let e = Manifest::parse(changed.as_bytes(), limit).unwrap_err();
            assert_eq!(e.kind(), kind, "{to}: {e}");
        }
    }
}
