//! What a receiver knows about a snapshot before it takes the first chunk: sizes and hashes.
//!
//! The digest binds step, epoch, lineage, all sizes and the ordered list of chunk hashes. A manifest whose digest fits, together
//! with chunks that fit their hashes, therefore proves the whole state without hashing it twice; and two sources
//! with the same digest serve the same bytes.

use blake3::Hash;
use ftcore::{Epoch, Error, ErrorKind, Result, Step};
use serde::{Deserialize, Serialize};

use crate::hashing::hash_all;

/// The version of manifest and snapshot metadata that this build writes and reads.
pub const FORMAT_VERSION: u32 = 2;

/// The largest chunk that is served or accepted, in bytes. Bounds what one request costs both sides.
pub const MAX_CHUNK_BYTES: u64 = 64 << 20;

const DIGEST_CONTEXT: &str = "oxccl 2026-11-21 checkpoint manifest v2";

/// Which state this is. Two replicas that hold the same one have equal bytes (INV-6).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SnapshotId {
    /// The step whose state it is; 0 or more.
    pub step: Step,
    /// The epoch (quorum id) in which the snapshot was taken.
    pub epoch: Epoch,
    /// The commits that led to it; empty if not told.
    pub lineage: String,
}

impl std::fmt::Display for SnapshotId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "step {} of epoch {}", self.step, self.epoch)?;
        if !self.lineage.is_empty() {
            // It came from a peer and goes into logs: no control characters.
            write!(f, " with lineage {}", self.lineage.escape_debug())?;
        }
        Ok(())
    }
}

/// The manifest of one snapshot. Only made from a state and by [`Manifest::parse`], so its fields agree.
///
/// The state is a sequence of parts (the header, then one tensor each), and every part is cut into chunks of its own. So
/// a tensor that did not change between two steps has the same chunks in both, whatever became of the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    id: SnapshotId,
    chunk_bytes: u64,
    /// The bytes of each part.
    parts: Vec<u64>,
    /// The first chunk of each part.
    first_chunks: Vec<usize>,
    total_bytes: u64,
    chunks: Vec<Hash>,
    digest: Hash,
}

#[derive(Serialize, Deserialize)]
struct Json {
    version: u32,
    step: i64,
    epoch: i64,
    lineage: String,
    chunk_bytes: u64,
    parts: Vec<u64>,
    chunk_hashes: Vec<String>,
    hash: String,
}

impl Manifest {
    /// The manifest of `bytes` as one part, cut into chunks of `chunk_bytes` (the last one may be shorter; 0 counts as 1).
    pub fn of(step: Step, epoch: Epoch, bytes: &[u8], chunk_bytes: u64) -> Self {
        let id = SnapshotId {
            step,
            epoch,
            lineage: String::new(),
        };
        Self::of_parts(id, &[bytes], chunk_bytes)
    }

    /// The manifest of a state in `parts`; hashes all of it.
    pub(crate) fn of_parts(id: SnapshotId, parts: &[&[u8]], chunk_bytes: u64) -> Self {
        Self::of_known_parts(id, parts, chunk_bytes, |_| None)
    }

    /// [`Self::of_parts`], where `known` has the hashes of all chunks of a part already, by its number.
    pub(crate) fn of_known_parts<'a>(
        id: SnapshotId,
        parts: &[&[u8]],
        chunk_bytes: u64,
        known: impl Fn(usize) -> Option<&'a [Hash]>,
    ) -> Self {
        let chunk_bytes = chunk_bytes.max(1);
        let size = usize::try_from(chunk_bytes).unwrap_or(usize::MAX);
        let known: Vec<Option<&[Hash]>> = parts
            .iter()
            .enumerate()
            .map(|(i, part)| known(i).filter(|hashes| hashes.len() == part.len().div_ceil(size)))
            .collect();
        let unknown = parts.iter().zip(&known).filter(|(_, known)| known.is_none());
        let pieces: Vec<&[u8]> = unknown.flat_map(|(part, _)| part.chunks(size)).collect();
        let mut hashed = hash_all(&pieces).into_iter();
        let mut chunks = Vec::new();
        for (part, known) in parts.iter().zip(known) {
            match known {
                Some(hashes) => chunks.extend_from_slice(hashes),
                None => chunks.extend(hashed.by_ref().take(part.len().div_ceil(size))),
            }
        }
        let lengths: Vec<u64> = parts.iter().map(|p| p.len() as u64).collect();
        let (first_chunks, total_bytes, _) = layout(&lengths, chunk_bytes).unwrap_or_default();
        let mut manifest = Self {
            id,
            chunk_bytes,
            parts: lengths,
            first_chunks,
            total_bytes,
            chunks,
            digest: Hash::from_bytes([0; 32]),
        };
        manifest.digest = manifest.compute_digest();
        manifest
    }

    /// Reads a manifest that came from a peer. `Protocol` if it is not one or of another version, `Corrupt` if its
    /// fields disagree or the digest does not fit. A state above `max_state_bytes` is `Protocol` naming both sizes.
    pub fn parse(json: &[u8], max_state_bytes: u64) -> Result<Self> {
        let refused = |what: String| Error::new(ErrorKind::Protocol, what);
        /// Read first: what else a manifest has depends on it.
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        let not_one = |e: serde_json::Error| {
            Error::new(ErrorKind::Protocol, format!("not a checkpoint manifest: {e}")).with_source(e)
        };
        let Version { version } = serde_json::from_slice(json).map_err(not_one)?;
        if version != FORMAT_VERSION {
            return Err(refused(format!(
                "a manifest of version {version}, this build reads {FORMAT_VERSION}"
            )));
        }
        let json: Json = serde_json::from_slice(json).map_err(not_one)?;
        if json.chunk_bytes == 0 || json.chunk_bytes > MAX_CHUNK_BYTES {
            return Err(corrupt(format!(
                "chunks of {} bytes (1 to {MAX_CHUNK_BYTES})",
                json.chunk_bytes
            )));
        }
        let (first_chunks, total_bytes, count) = layout(&json.parts, json.chunk_bytes)
            .ok_or_else(|| refused("a state of more bytes than there are numbers for".into()))?;
        if total_bytes > max_state_bytes {
            return Err(refused(format!(
                "a state of {total_bytes} bytes is larger than the limit of {max_state_bytes} (max_state_bytes)"
            )));
        }
        if json.chunk_hashes.len() != count {
            return Err(corrupt(format!(
                "{} chunk hashes, but {total_bytes} bytes in {} parts in chunks of {} are {count} chunks",
                json.chunk_hashes.len(),
                json.parts.len(),
                json.chunk_bytes
            )));
        }
        let hash = |hex: &String| Hash::from_hex(hex).map_err(|e| corrupt(format!("a hash: {e}")));
        let manifest = Self {
            id: SnapshotId {
                step: Step(json.step),
                epoch: Epoch::of_signed(json.epoch),
                lineage: json.lineage,
            },
            chunk_bytes: json.chunk_bytes,
            parts: json.parts,
            first_chunks,
            total_bytes,
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

    /// The JSON form: {version, step, epoch, lineage, chunk_bytes, parts, chunk_hashes, hash}; `parts` are sizes in bytes,
    /// hashes are in hex.
    pub fn to_json(&self) -> Result<Vec<u8>> {
        let json = Json {
            version: FORMAT_VERSION,
            step: self.id.step.0,
            epoch: self.id.epoch.signed(),
            lineage: self.id.lineage.clone(),
            chunk_bytes: self.chunk_bytes,
            parts: self.parts.clone(),
            chunk_hashes: self.chunks.iter().map(|h| h.to_hex().to_string()).collect(),
            hash: self.digest.to_hex().to_string(),
        };
        serde_json::to_vec(&json)
            .map_err(|e| Error::new(ErrorKind::Internal, format!("a manifest: {e}")).with_source(e))
    }

    fn compute_digest(&self) -> Hash {
        let mut hasher = blake3::Hasher::new_derive_key(DIGEST_CONTEXT);
        hasher.update(&FORMAT_VERSION.to_le_bytes());
        hasher.update(&self.id.step.0.to_le_bytes());
        hasher.update(&self.id.epoch.0.to_le_bytes());
        // Each list with its length before it, so that nothing can pass from one field into the next.
        hasher.update(&(self.id.lineage.len() as u64).to_le_bytes());
        hasher.update(self.id.lineage.as_bytes());
        hasher.update(&self.chunk_bytes.to_le_bytes());
        hasher.update(&(self.parts.len() as u64).to_le_bytes());
        for part in &self.parts {
            hasher.update(&part.to_le_bytes());
        }
        for chunk in &self.chunks {
            hasher.update(chunk.as_bytes());
        }
        hasher.finalize()
    }

    /// Which state this is.
    pub fn id(&self) -> &SnapshotId {
        &self.id
    }

    /// The step whose state this is.
    pub fn step(&self) -> Step {
        self.id.step
    }

    /// The epoch (quorum id) in which the snapshot was taken.
    pub fn epoch(&self) -> Epoch {
        self.id.epoch
    }

    /// The encoded state, in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// The size of every chunk but perhaps the last of a part, in bytes.
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
        let (part, start) = self.place(index)?;
        let left = self.parts.get(part)?.checked_sub(start)?;
        usize::try_from(left.min(self.chunk_bytes)).ok()
    }

    /// The bytes of each part: the header, then one tensor each.
    pub(crate) fn parts(&self) -> &[u64] {
        &self.parts
    }

    /// The chunks of part `part`.
    pub(crate) fn chunks_of(&self, part: usize) -> std::ops::Range<usize> {
        let start = self.first_chunks.get(part).copied().unwrap_or(self.chunks.len());
        let next = part.saturating_add(1);
        let end = self.first_chunks.get(next).copied().unwrap_or(self.chunks.len());
        start..end
    }

    /// The hashes of the chunks of part `part`.
    pub(crate) fn hashes_of(&self, part: usize) -> &[Hash] {
        self.chunks.get(self.chunks_of(part)).unwrap_or_default()
    }

    /// The part in which chunk `index` lies, and its first byte there; `None` beyond the last chunk.
    pub(crate) fn place(&self, index: usize) -> Option<(usize, u64)> {
        if index >= self.chunks.len() {
            return None;
        }
        // Parts without bytes have no chunk: of those that begin at the same one the last has it.
        let part = self
            .first_chunks
            .partition_point(|f| *f <= index)
            .checked_sub(1)?;
        let within = index.checked_sub(*self.first_chunks.get(part)?)?;
        Some((part, (within as u64).checked_mul(self.chunk_bytes)?))
    }

    /// The hash over identity, sizes and all chunk hashes: equal digests mean equal bytes.
    pub fn digest(&self) -> Hash {
        self.digest
    }
}

/// The first chunk of each part, the bytes and the chunks of all parts together; `None` if a sum does not fit.
fn layout(parts: &[u64], chunk_bytes: u64) -> Option<(Vec<usize>, u64, usize)> {
    let (mut first, mut bytes, mut chunks) = (Vec::with_capacity(parts.len()), 0u64, 0usize);
    for part in parts {
        first.push(chunks);
        bytes = bytes.checked_add(*part)?;
        chunks = chunks.checked_add(usize::try_from(part.div_ceil(chunk_bytes)).ok()?)?;
    }
    Some((first, bytes, chunks))
}

fn corrupt(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::Corrupt, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_survives_json_and_knows_its_last_chunk() {
        let m = Manifest::of(Step(7), Epoch(3), &[9; 2500], 1000);
        assert_eq!(
            (m.chunk_count(), m.chunk_len(2), m.chunk_len(3)),
            (3, Some(500), None)
        );
        assert_eq!(Manifest::parse(&m.to_json().unwrap(), 2500).unwrap(), m);
        let empty = Manifest::of(Step(0), Epoch(0), &[], 1000);
        assert_eq!(Manifest::parse(&empty.to_json().unwrap(), 0).unwrap(), empty);
    }

    #[test]
    fn every_part_has_chunks_of_its_own_and_an_empty_one_has_none() {
        let parts: [&[u8]; 5] = [&[1; 10], &[], &[2; 25], &[], &[3; 5]];
        let m = Manifest::of_parts(SnapshotId::default(), &parts, 10);
        let places: Vec<_> = (0..m.chunk_count()).map(|i| m.place(i).unwrap()).collect();
        assert_eq!(places, [(0, 0), (2, 0), (2, 10), (2, 20), (4, 0)]);
        let lengths: Vec<_> = (0..5).map(|i| m.chunk_len(i).unwrap()).collect();
        assert_eq!(lengths, [10, 10, 10, 5, 5]);
        assert_eq!(
            (m.chunks_of(1), m.chunks_of(2), m.chunks_of(9)),
            (1..1, 1..4, 5..5)
        );
        assert_eq!((m.place(5), m.total_bytes()), (None, 40));
        assert_eq!(Manifest::parse(&m.to_json().unwrap(), 40).unwrap(), m);
    }

    #[test]
    fn a_manifest_whose_fields_disagree_is_refused() {
        let json = String::from_utf8(
            Manifest::of(Step(7), Epoch(3), &[9; 2500], 1000)
                .to_json()
                .unwrap(),
        )
        .unwrap();
        let good_hash = blake3::hash(&[9; 1000]).to_hex().to_string();
        for (from, to, kind) in [
            ("\"step\":7", "\"step\":8", ErrorKind::Corrupt),
            ("\"epoch\":3", "\"epoch\":4", ErrorKind::Corrupt),
            ("\"lineage\":\"\"", "\"lineage\":\"x\"", ErrorKind::Corrupt),
            ("[2500]", "[1500,1000]", ErrorKind::Corrupt),
            ("[2500]", "[18446744073709551615,1]", ErrorKind::Protocol),
            ("\"version\":2", "\"version\":1", ErrorKind::Protocol),
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
