//! The immutable state of one step: what sources serve.
//!
//! Made of a state whose tensors do not change any more (`StateTensor::data`): whatever the trainer goes on with, readers
//! get the step that was asked for (lesson L10). The hashes are computed when the first reader asks, on the server's
//! threads, so that a healthy replica pays for what its state copied, and for nothing if all of it is shared. What a snapshot shares with the one
//! published before it is not hashed again.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::{Arc, OnceLock, Weak};

use blake3::Hash;
use bytes::Bytes;
use ftcore::{Epoch, Error, ErrorKind, Result, Step};

use crate::manifest::{FORMAT_VERSION, MAX_CHUNK_BYTES, Manifest, SnapshotId};
use crate::{StateDict, codec};

/// The chunk size unless told otherwise: 1 MiB.
pub const DEFAULT_CHUNK_BYTES: u64 = 1 << 20;

const STEP: &str = "oxccl.step";
const EPOCH: &str = "oxccl.epoch";
const LINEAGE: &str = "oxccl.lineage";
const VERSION: &str = "oxccl.version";

/// What a state says about itself in its header.
fn own_metadata(id: &SnapshotId) -> BTreeMap<String, String> {
    BTreeMap::from([
        (STEP.to_owned(), id.step.to_string()),
        (EPOCH.to_owned(), id.epoch.to_string()),
        (LINEAGE.to_owned(), id.lineage.clone()),
        (VERSION.to_owned(), FORMAT_VERSION.to_string()),
    ])
}

/// An immutable, encoded state with its identity.
#[derive(Debug)]
pub struct Snapshot {
    id: SnapshotId,
    chunk_bytes: u64,
    /// The header of a safetensors file, then the data of each tensor in the order of the file.
    parts: Vec<Bytes>,
    manifest: OnceLock<(Manifest, Bytes)>,
    /// The one that was published before it: what both share is not hashed again.
    before: OnceLock<Weak<Self>>,
}

impl Snapshot {
    /// A snapshot of `state` at `step` (0 or more), taken in `epoch` (the quorum's id), in chunks of 1 MiB.
    ///
    /// Copies nothing: it shares the tensors of `state`. Errors as [`crate::encode`], and `InvalidArgument` for a negative step.
    pub fn new(step: Step, epoch: Epoch, state: &StateDict) -> Result<Arc<Self>> {
        Self::with_chunk_bytes(step, epoch, state, DEFAULT_CHUNK_BYTES)
    }

    /// [`Self::new`] with another chunk size, from 1 to [`MAX_CHUNK_BYTES`].
    pub fn with_chunk_bytes(
        step: Step,
        epoch: Epoch,
        state: &StateDict,
        chunk_bytes: u64,
    ) -> Result<Arc<Self>> {
        let id = SnapshotId {
            step,
            epoch,
            lineage: String::new(),
        };
        Self::of(id, state.clone(), chunk_bytes)
    }

    /// A snapshot of what `id` says, otherwise as [`Self::new`].
    ///
    /// All sources of a job use the same chunk size: to a receiver a state in other chunks is another state.
    pub fn of(id: SnapshotId, state: StateDict, chunk_bytes: u64) -> Result<Arc<Self>> {
        if id.step < Step(0) {
            return Err(Error::invalid(format!("a snapshot of step {}", id.step)));
        }
        if chunk_bytes == 0 || chunk_bytes > MAX_CHUNK_BYTES {
            return Err(Error::invalid(format!(
                "chunks of {chunk_bytes} bytes (1 to {MAX_CHUNK_BYTES})"
            )));
        }
        Ok(Arc::new(Self {
            parts: codec::encode_parts(state, &own_metadata(&id))?,
            id,
            chunk_bytes,
            manifest: OnceLock::new(),
            before: OnceLock::new(),
        }))
    }

    /// One whose parts may be anything: what a strange peer serves.
    #[cfg(test)]
    pub(crate) fn of_raw_parts(step: Step, parts: Vec<Bytes>) -> Arc<Self> {
        Arc::new(Self {
            id: SnapshotId {
                step,
                ..SnapshotId::default()
            },
            chunk_bytes: 64,
            parts,
            manifest: OnceLock::new(),
            before: OnceLock::new(),
        })
    }

    /// One whose part `part` is not what its manifest says, at that byte: what a source with bad memory serves.
    #[cfg(test)]
    pub(crate) fn with_a_wrong_byte(&self, part: usize, at: usize) -> Arc<Self> {
        let mut parts = self.parts.clone();
        let mut wrong = parts[part].to_vec();
        wrong[at] ^= 1;
        parts[part] = wrong.into();
        Arc::new(Self {
            id: self.id.clone(),
            chunk_bytes: self.chunk_bytes,
            parts,
            manifest: OnceLock::from(self.hashed().clone()),
            before: OnceLock::new(),
        })
    }

    /// This one is published after `before`.
    pub(crate) fn comes_after(&self, before: &Arc<Self>) {
        let _ = self.before.set(Arc::downgrade(before));
    }

    /// Which state this is.
    pub fn id(&self) -> &SnapshotId {
        &self.id
    }

    /// The step whose state this is.
    pub fn step(&self) -> Step {
        self.id.step
    }

    /// The epoch in which it was taken.
    pub fn epoch(&self) -> Epoch {
        self.id.epoch
    }

    /// The manifest. The first call hashes the whole state (see `docs/healing.md` for what that takes).
    pub fn manifest(&self) -> &Manifest {
        &self.hashed().0
    }

    /// The manifest as it is served; empty only if it cannot be written as JSON, which readers refuse.
    pub(crate) fn manifest_json(&self) -> Bytes {
        self.hashed().1.clone()
    }

    /// The header, then the data of each tensor, in the order of the manifest.
    pub(crate) fn parts(&self) -> &[Bytes] {
        &self.parts
    }

    /// The manifest's digest if it was computed already; never blocks.
    pub(crate) fn known_digest(&self) -> Option<blake3::Hash> {
        self.manifest.get().map(|(m, _)| m.digest())
    }

    fn hashed(&self) -> &(Manifest, Bytes) {
        self.manifest.get_or_init(|| {
            let parts: Vec<&[u8]> = self.parts.iter().map(AsRef::as_ref).collect();
            let before = self.before.get().and_then(Weak::upgrade);
            let before = before.as_deref().and_then(|b| Some((b, &b.manifest.get()?.0)));
            let before = before.filter(|(b, _)| b.chunk_bytes == self.chunk_bytes);
            // Memory that both hold has not changed since the other one was made: its owner cannot write to it meanwhile.
            let place = |part: &[u8]| (part.as_ptr() as usize, part.len());
            let known: HashMap<(usize, usize), &[Hash]> = before
                .iter()
                .flat_map(|(b, m)| {
                    b.parts
                        .iter()
                        .enumerate()
                        .map(|(i, p)| (place(p), m.hashes_of(i)))
                })
                .collect();
            let known = |i: usize| known.get(&place(parts.get(i)?)).copied();
            let manifest = Manifest::of_known_parts(self.id.clone(), &parts, self.chunk_bytes, known);
            let json = manifest.to_json().unwrap_or_default();
            (manifest, json.into())
        })
    }

    /// Chunk `index`; `None` beyond the last. Hashes the state if that was not done yet.
    pub fn chunk(&self, index: usize) -> Option<&[u8]> {
        let (part, range) = self.place(index)?;
        part.get(range)
    }

    /// The tensor that chunk `index` is of, and the bytes of the chunk there.
    pub(crate) fn place(&self, index: usize) -> Option<(&Bytes, Range<usize>)> {
        let manifest = self.manifest();
        let (part, start) = manifest.place(index)?;
        let start = usize::try_from(start).ok()?;
        let end = start.checked_add(manifest.chunk_len(index)?)?;
        Some((self.parts.get(part)?, start..end))
    }

    /// The state again, from the received parts, whose hashes were checked. `Corrupt` if what the state says about
    /// itself is not what `manifest` says.
    pub(crate) fn restore(manifest: &Manifest, parts: Vec<Bytes>) -> Result<StateDict> {
        let (state, own) = codec::decode_whole_parts(parts)?;
        for (key, expected) in own_metadata(manifest.id()) {
            let found = own.get(&key).map_or("missing", String::as_str);
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

    #[test]
    fn chunks_fit_the_manifest_and_make_up_the_state() {
        let s = Snapshot::with_chunk_bytes(Step(5), Epoch(2), &state(), 64).unwrap();
        let m = s.manifest();
        let all: Vec<&[u8]> = (0..).map_while(|i| s.chunk(i)).collect();
        assert_eq!(all.len(), m.chunk_count());
        for (i, c) in all.iter().enumerate() {
            assert_eq!(Some(blake3::hash(c)), m.chunk_hash(i));
            assert_eq!(Some(c.len()), m.chunk_len(i));
        }
        assert_eq!(s.chunk(usize::MAX), None);
        assert_eq!(crate::decode(&all.concat()).unwrap(), state());
        assert_eq!(Snapshot::restore(m, s.parts.clone()).unwrap(), state());
    }

    #[test]
    fn l03_what_the_state_says_of_itself_must_be_what_the_manifest_says() {
        let s = Snapshot::new(Step(5), Epoch(2), &state()).unwrap();
        let parts: Vec<&[u8]> = s.parts.iter().map(AsRef::as_ref).collect();
        for (step, epoch, lineage, text) in [
            (6, 2, "", "oxccl.step 6"),
            (5, 3, "", "oxccl.epoch 3"),
            (5, 2, "x", "oxccl.lineage x"),
        ] {
            let lineage = lineage.to_owned();
            let id = SnapshotId {
                step: Step(step),
                epoch: Epoch(epoch),
                lineage,
            };
            let lie = Manifest::of_parts(id, &parts, 1 << 20);
            let e = Snapshot::restore(&lie, s.parts.clone()).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Corrupt);
            assert!(e.message().contains(text), "{e}");
        }
    }

    #[test]
    fn bitwise_equal_states_make_equal_manifests_however_they_came_about() {
        let id = || SnapshotId {
            step: Step(5),
            epoch: Epoch(2),
            lineage: "ab".into(),
        };
        let names = ["w", "a/b", "z", "m"];
        let build = |order: &[usize]| {
            let mut s = StateDict::new();
            for &i in order {
                // NaNs with different payloads and both zeros: bits count, not values.
                let bits = [f32::from_bits(0x7fc0_0001 + i as u32), -0.0, 0.0, i as f32];
                s.insert_f32(names[i], &[2, 2], &bits).unwrap();
                s.set_metadata(names[i], "x");
            }
            s
        };
        let one = Snapshot::of(id(), build(&[0, 1, 2, 3]), 8).unwrap();
        // Another order, tensors replaced and taken out meanwhile, and a copy instead of the state itself.
        let mut other = build(&[3, 1]);
        other.insert_i64s("gone", &[1]).unwrap();
        other.remove("gone");
        other.insert_f32("w", &[1], &[9.0]).unwrap();
        let rest = build(&[0, 2]);
        for name in ["w", "z"] {
            other.insert(name, rest.get(name).unwrap().clone()).unwrap();
            other.set_metadata(name, "x");
        }
        let two = Snapshot::of(id(), other.clone(), 8).unwrap();
        assert_eq!(one.manifest(), two.manifest());
        // One bit of difference in a value that compares equal is another manifest.
        other
            .insert_f32("w", &[2, 2], &[f32::from_bits(0x7fc0_0001), 0.0, 0.0, 0.0])
            .unwrap();
        let changed = Snapshot::of(id(), other, 8).unwrap();
        assert_ne!(one.manifest().digest(), changed.manifest().digest());
    }

    #[test]
    fn a_tensor_that_did_not_change_has_the_same_chunks_in_the_next_step_whatever_happens_around_it() {
        let frozen = |s: &Snapshot| {
            let m = s.manifest();
            let hashes: Vec<_> = (0..m.chunk_count()).filter_map(|i| m.chunk_hash(i)).collect();
            hashes
        };
        let mut state = state();
        let before = Snapshot::with_chunk_bytes(Step(9), Epoch(2), &state, 64).unwrap();
        // More digits in the header, and a tensor before it in the file.
        state.insert_f32("a", &[3], &[1.0; 3]).unwrap();
        let after = Snapshot::with_chunk_bytes(Step(10_000), Epoch(77), &state, 64).unwrap();
        let after = frozen(&after);
        let kept: Vec<_> = before.parts[1].chunks(64).map(blake3::hash).collect();
        assert!(kept.len() > 5 && kept.iter().all(|h| after.contains(h)));
    }

    #[test]
    fn what_is_shared_with_the_snapshot_before_is_not_hashed_again_and_what_changed_is() {
        let mut frozen = StateDict::new();
        frozen.insert_f32("w", &[1000], &[1.5; 1000]).unwrap();
        let with = |value: f32| {
            let mut state = frozen.clone();
            state.insert_f32("a", &[100], &[value; 100]).unwrap();
            state
        };
        let before = Snapshot::with_chunk_bytes(Step(5), Epoch(2), &with(1.0), 64).unwrap();
        // One whose hashes say that they were not computed here.
        let known = [Hash::from_bytes([7; 32]); 63];
        let marked = |i: usize| (i == 2).then_some(&known[..]);
        let parts: Vec<&[u8]> = before.parts.iter().map(AsRef::as_ref).collect();
        let manifest = Manifest::of_known_parts(before.id.clone(), &parts, 64, marked);
        before.manifest.set((manifest, Bytes::new())).unwrap();
        let after = |before: &Arc<Snapshot>, chunk_bytes| {
            let after = Snapshot::with_chunk_bytes(Step(6), Epoch(2), &with(2.0), chunk_bytes).unwrap();
            after.comes_after(before);
            after
        };
        let shares = after(&before, 64);
        assert_eq!(shares.manifest().hashes_of(2), known);
        let alone = Snapshot::with_chunk_bytes(Step(6), Epoch(2), &with(2.0), 64).unwrap();
        for part in [0, 1] {
            assert_eq!(
                shares.manifest().hashes_of(part),
                alone.manifest().hashes_of(part)
            );
        }
        assert_eq!(
            after(&before, 128).manifest(),
            Snapshot::with_chunk_bytes(Step(6), Epoch(2), &with(2.0), 128)
                .unwrap()
                .manifest()
        );
        let late = after(&before, 64);
        drop(before);
        assert_eq!(
            late.manifest(),
            alone.manifest(),
            "it is gone, and its memory may be used again"
        );
    }

    #[test]
    fn steps_and_chunk_sizes_out_of_range_are_refused() {
        assert!(Snapshot::new(Step(-1), Epoch(0), &state()).is_err());
        assert!(Snapshot::with_chunk_bytes(Step(0), Epoch(0), &state(), 0).is_err());
        assert!(Snapshot::with_chunk_bytes(Step(0), Epoch(0), &state(), MAX_CHUNK_BYTES + 1).is_err());
    }
}
