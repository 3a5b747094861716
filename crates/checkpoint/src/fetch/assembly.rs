//! The state as it grows: a slot of memory for every chunk, in its final place.
//!
//! Each part (the header, then one tensor each) is one allocation, split into the slots of its chunks; a slot goes to the request
//! that fills it and comes back. At the end the slots of a part are one piece of memory again, without a copy. A chunk that was asked
//! for twice arrives beside its place the second time, and is copied there only if the first one never came.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use ftcore::{Error, ErrorKind, Result};

use super::own;
use crate::manifest::Manifest;
use crate::{Snapshot, StateDict};
use replica::room_for;

/// Room for one chunk: empty, or filled to `length`.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) index: usize,
    pub(super) length: usize,
    pub(super) data: BytesMut,
}

/// Checked chunks by their hashes.
pub(super) type Chunks = HashMap<[u8; 32], BytesMut>;

#[derive(Debug, Default)]
struct Chunk {
    /// Its place; `None` while a request has it.
    slot: Option<BytesMut>,
    /// The chunk, received beside its place.
    beside: Option<BytesMut>,
    done: bool,
}

#[derive(Debug)]
pub(super) struct Assembly {
    manifest: Arc<Manifest>,
    chunks: Vec<Chunk>,
    /// Parts that were taken whole from the caller's own state.
    whole: Vec<Option<Bytes>>,
    /// Chunks neither here nor asked for.
    missing: BTreeSet<usize>,
    done: usize,
    reused_bytes: u64,
}

impl Assembly {
    /// Room for the state of `manifest`; the system gives the memory when data arrives. What `own` or `before` has of it already is
    /// taken from there. `Unavailable` if there is not enough memory.
    pub(super) fn new(manifest: Arc<Manifest>, own: Option<StateDict>, before: Chunks) -> Result<Self> {
        let none = || {
            let what = format!("no memory for a state of {} bytes", manifest.total_bytes());
            Error::new(ErrorKind::Unavailable, what)
        };
        let total = usize::try_from(manifest.total_bytes()).map_err(|_| none())?;
        // The size is a peer's word, and the allocations below cannot fail in an orderly way: asked for in vain first.
        Vec::<u8>::new().try_reserve_exact(total).map_err(|_| none())?;
        let found = own.map(|own| own::find(&manifest, own)).unwrap_or_default();
        let mut chunks: Vec<Chunk> = Vec::with_capacity(manifest.chunk_count());
        let mut whole: Vec<Option<Bytes>> = Vec::with_capacity(manifest.parts().len());
        let mut found_whole = found.whole;
        for (part, bytes) in manifest.parts().iter().enumerate() {
            let indices = manifest.chunks_of(part);
            if let Some(data) = found_whole.remove(&part) {
                chunks.extend(indices.map(|_| Chunk {
                    done: true,
                    ..Chunk::default()
                }));
                whole.push(Some(data));
                continue;
            }
            whole.push(None);
            let mut room = room_for(usize::try_from(*bytes).map_err(|_| none())?);
            for index in indices.clone() {
                let length = manifest.chunk_len(index).unwrap_or_default();
                // The last one keeps what the allocator gave beyond the part.
                let rest = if index.saturating_add(1) < indices.end {
                    room.split_off(length)
                } else {
                    BytesMut::new()
                };
                chunks.push(Chunk {
                    slot: Some(std::mem::replace(&mut room, rest)),
                    ..Chunk::default()
                });
            }
        }
        let mut assembly = Self {
            missing: (0..chunks.len())
                .filter(|i| chunks.get(*i).is_some_and(|c| !c.done))
                .collect(),
            done: chunks.iter().filter(|c| c.done).count(),
            reused_bytes: whole.iter().flatten().map(|w| w.len() as u64).sum(),
            chunks,
            whole,
            manifest,
        };
        for (index, data) in found.pieces {
            assembly.reuse(index, &data);
        }
        if !before.is_empty() {
            for index in assembly.missing.clone() {
                let hash = assembly.manifest.chunk_hash(index);
                if let Some(data) = hash.and_then(|hash| before.get(hash.as_bytes())) {
                    assembly.reuse(index, data);
                }
            }
        }
        Ok(assembly)
    }

    fn reuse(&mut self, index: usize, data: &[u8]) {
        if let Some(mut slot) = self.take(index) {
            slot.data.extend_from_slice(data);
            self.reused_bytes = self.reused_bytes.saturating_add(data.len() as u64);
            self.arrived(slot, true);
        }
    }

    /// The chunks that are here, by their hashes, for another state.
    pub(super) fn into_chunks(self) -> Chunks {
        let mut chunks = Chunks::new();
        for (index, chunk) in self.chunks.into_iter().enumerate() {
            let data = chunk.beside.or(chunk.slot).filter(|_| chunk.done);
            if let (Some(hash), Some(data)) = (self.manifest.chunk_hash(index), data) {
                chunks.insert(*hash.as_bytes(), data);
            }
        }
        let parts = self.whole.into_iter().enumerate();
        for (part, data) in parts.filter_map(|(part, data)| Some((part, data?))) {
            let mut rest = BytesMut::from(&data[..]);
            for index in self.manifest.chunks_of(part) {
                let length = self.manifest.chunk_len(index).unwrap_or_default();
                if let Some(hash) = self.manifest.chunk_hash(index).filter(|_| length <= rest.len()) {
                    chunks.insert(*hash.as_bytes(), rest.split_to(length));
                }
            }
        }
        chunks
    }

    pub(super) fn manifest(&self) -> &Arc<Manifest> {
        &self.manifest
    }

    pub(super) fn reused_bytes(&self) -> u64 {
        self.reused_bytes
    }

    pub(super) fn is_complete(&self) -> bool {
        self.done == self.chunks.len()
    }

    pub(super) fn done(&self) -> usize {
        self.done
    }

    pub(super) fn is_done(&self, index: usize) -> bool {
        self.chunks.get(index).is_none_or(|c| c.done)
    }

    pub(super) fn has_missing(&self) -> bool {
        !self.missing.is_empty()
    }

    /// The first missing chunk, for a request that will fill it.
    pub(super) fn next_missing(&mut self) -> Option<Slot> {
        let index = *self.missing.first()?;
        self.take(index)
    }

    fn take(&mut self, index: usize) -> Option<Slot> {
        if !self.missing.remove(&index) {
            return None;
        }
        let length = self.manifest.chunk_len(index)?;
        let place = self.chunks.get_mut(index)?.slot.take();
        Some(Slot {
            index,
            length,
            data: place.unwrap_or_else(|| BytesMut::with_capacity(length)),
        })
    }

    /// Room beside its place for a chunk that was asked for already.
    pub(super) fn again(&self, index: usize) -> Option<Slot> {
        let length = self.manifest.chunk_len(index)?;
        Some(Slot {
            index,
            length,
            data: BytesMut::with_capacity(length),
        })
    }

    /// A chunk that was checked; `in_place` if the slot is its place. True if it was not here yet.
    pub(super) fn arrived(&mut self, slot: Slot, in_place: bool) -> bool {
        let Some(chunk) = self.chunks.get_mut(slot.index) else {
            return false;
        };
        let new = !std::mem::replace(&mut chunk.done, true);
        if in_place {
            (chunk.slot, chunk.beside) = (Some(slot.data), None);
        } else if new {
            chunk.beside = Some(slot.data);
        }
        if new {
            self.done = self.done.saturating_add(1);
            self.missing.remove(&slot.index);
        }
        new
    }

    /// A slot that its request did not fill. `missed`: no other source brings the chunk.
    pub(super) fn give_back(&mut self, slot: Slot, in_place: bool, missed: bool) {
        if let Some(chunk) = self.chunks.get_mut(slot.index) {
            if in_place {
                chunk.slot = Some(slot.data);
            }
            if missed && !chunk.done {
                self.missing.insert(slot.index);
            }
        }
    }

    /// The state. `Corrupt` if the chunks, all of which fit their hashes, are not one.
    pub(super) fn finish(self) -> Result<StateDict> {
        let Self {
            manifest,
            chunks,
            whole,
            ..
        } = self;
        let mut chunks = chunks.into_iter();
        let mut parts = Vec::with_capacity(whole.len());
        for (part, whole) in whole.into_iter().enumerate() {
            let of_part = chunks.by_ref().take(manifest.chunks_of(part).len());
            if let Some(data) = whole {
                of_part.for_each(drop);
                parts.push(data);
                continue;
            }
            let mut all = BytesMut::new();
            for chunk in of_part {
                let data = match (chunk.slot, chunk.beside) {
                    (Some(mut place), Some(beside)) => {
                        place.clear();
                        place.extend_from_slice(&beside);
                        place
                    }
                    (Some(data), None) | (None, Some(data)) => data,
                    (None, None) => BytesMut::new(),
                };
                // Neighbours in memory become one; others are copied.
                all.unsplit(data);
            }
            parts.push(all.freeze());
        }
        Snapshot::restore(&manifest, parts)
    }
}
