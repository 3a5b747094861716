//! Hashes of many pieces at once, on a few threads: what a source does for its manifest and a healing replica for the state
//! that it has already.

use std::sync::atomic::{AtomicUsize, Ordering};

use blake3::Hash;

/// More threads than these gain little beside a training that wants the cores itself.
const MAX_THREADS: usize = 4;

/// Below this one thread is faster than several.
const ALONE_BYTES: usize = 4 << 20;

/// The hash of each piece, in order.
pub(crate) fn hash_all(pieces: &[&[u8]]) -> Vec<Hash> {
    let bytes = pieces.iter().fold(0usize, |n, p| n.saturating_add(p.len()));
    let threads = std::thread::available_parallelism()
        .map_or(1, usize::from)
        .min(MAX_THREADS);
    if bytes < ALONE_BYTES || threads == 1 {
        return pieces.iter().map(|p| blake3::hash(p)).collect();
    }
    let next = AtomicUsize::new(0);
    // Each thread takes the next piece that is free: pieces differ in size.
    let work = || {
        let mut done = Vec::new();
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            match pieces.get(i) {
                Some(piece) => done.push((i, blake3::hash(piece))),
                None => return done,
            }
        }
    };
    let mut hashes = vec![Hash::from_bytes([0; 32]); pieces.len()];
    let mut taken = vec![false; pieces.len()];
    std::thread::scope(|scope| {
        let helpers: Vec<_> = (1..threads)
            .filter_map(|_| {
                let named = std::thread::Builder::new().name("ox-ckpt-hash".into());
                // Without a helper this thread does its part as well.
                named.spawn_scoped(scope, work).ok()
            })
            .collect();
        let mut all = work();
        for helper in helpers {
            all.extend(helper.join().unwrap_or_default());
        }
        for (i, hash) in all {
            if let (Some(to), Some(mark)) = (hashes.get_mut(i), taken.get_mut(i)) {
                (*to, *mark) = (hash, true);
            }
        }
    });
    // A helper that ended early leaves gaps; a hash that was not computed must never pass for one.
    for (i, piece) in pieces.iter().enumerate() {
        if let (Some(to), Some(false)) = (hashes.get_mut(i), taken.get(i)) {
            *to = blake3::hash(piece);
        }
    }
    hashes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_pieces_hash_as_each_does_alone() {
        let bytes: Vec<u8> = (0..9 << 20).map(|i| (i >> 7) as u8).collect();
        for size in [1 << 20, 300_000, 9 << 20] {
            let pieces: Vec<&[u8]> = bytes.chunks(size).collect();
            let alone: Vec<Hash> = pieces.iter().map(|p| blake3::hash(p)).collect();
            assert_eq!(hash_all(&pieces), alone, "{size}");
        }
        assert_eq!(hash_all(&[]), Vec::<Hash>::new());
    }
}
