//! What a replica has already of the state that it fetches: chunks of its own older state with the hashes that the manifest names.
//!
//! Chunks begin with the tensor that they are of, so that one that did not change is found whatever became of the others.

use std::collections::{BTreeMap, HashMap};

use bytes::Bytes;

use crate::StateDict;
use crate::hashing::hash_all;
use crate::manifest::Manifest;

/// What need not be fetched.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// Parts of the manifest that a tensor is, from the first byte to the last.
    pub(super) whole: BTreeMap<usize, Bytes>,
    /// Single chunks.
    pub(super) pieces: Vec<(usize, Vec<u8>)>,
}

/// Hashes all of `own`, on a few threads, and looks up the chunks of `manifest`.
pub(super) fn find(manifest: &Manifest, mut own: StateDict) -> Found {
    let size = usize::try_from(manifest.chunk_bytes()).unwrap_or(usize::MAX);
    let (mut pieces, mut places) = (Vec::new(), Vec::new());
    for (name, tensor) in own.iter() {
        for piece in tensor.data.chunks(size) {
            pieces.push(piece);
            places.push((name, tensor.data.len()));
        }
    }
    let hashes = hash_all(&pieces);
    // Of equal chunks (zeros, say) any will do.
    let at: HashMap<&[u8; 32], usize> = hashes
        .iter()
        .enumerate()
        .map(|(i, h)| (h.as_bytes(), i))
        .collect();
    // The first piece of every tensor, for those that are the same from end to end.
    let mut starts: HashMap<&str, usize> = HashMap::new();
    for (i, (name, _)) in places.iter().enumerate() {
        starts.entry(name).or_insert(i);
    }
    let mut found = Found::default();
    let mut moved: BTreeMap<String, usize> = BTreeMap::new();
    for (part, bytes) in manifest.parts().iter().enumerate() {
        let indices = manifest.chunks_of(part);
        let mine = |index: usize| at.get(manifest.chunk_hash(index)?.as_bytes()).copied();
        let whole = mine(indices.start).and_then(|i| {
            let (name, length) = places.get(i)?;
            let start = *starts.get(name)?;
            let same = (start..).zip(indices.clone());
            (*length as u64 == *bytes
                && !moved.contains_key(*name)
                && same
                    .map(|(i, index)| (hashes.get(i).copied(), manifest.chunk_hash(index)))
                    .all(|(own, theirs)| own.is_some() && own == theirs))
            .then(|| (*name).to_owned())
        });
        match whole {
            Some(name) if !indices.is_empty() => {
                moved.insert(name, part);
            }
            _ => {
                let copies = indices.filter_map(|index| Some((index, pieces.get(mine(index)?)?.to_vec())));
                found.pieces.extend(copies);
            }
        }
    }
    // Moved at last: until then their pieces are wanted for copies.
    for (name, part) in moved {
        if let Some(tensor) = own.remove(&name) {
            found.whole.insert(part, tensor.data);
        }
    }
    found
}
