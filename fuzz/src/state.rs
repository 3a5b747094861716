//! Checkpoints: the manifest of a snapshot, and the state itself.

use checkpoint::{Manifest, StateDict, decode, encode};
use ftcore::{Epoch, Step};

/// Reads `data` as a manifest of at most a terabyte.
pub fn manifest(data: &[u8]) {
    let Ok(manifest) = Manifest::parse(data, 1 << 40) else {
        return;
    };
    let lengths = (0..manifest.chunk_count()).map(|i| manifest.chunk_len(i).map_or(0, |n| n as u64));
    assert_eq!(lengths.sum::<u64>(), manifest.total_bytes());
    assert!(manifest.chunk_len(manifest.chunk_count()).is_none());
    let json = manifest.to_json().expect("what was read can be written");
    assert_eq!(Manifest::parse(&json, 1 << 40).expect("and read again"), manifest);
}

/// Reads `data` as an encoded state.
pub fn encoded(data: &[u8]) {
    let Ok(state) = decode(data) else { return };
    let bytes = encode(&state).expect("what was read can be written");
    let again = decode(&bytes).expect("and read again");
    assert_eq!(encode(&again).expect("twice"), bytes);
}

fn state() -> StateDict {
    let mut state = StateDict::new();
    let inserted = state
        .insert_f32(
            "layer0.w",
            &[2, 3],
            &[1.0, -2.0, 3.5, f32::NAN, 0.0, f32::INFINITY],
        )
        .and_then(|()| state.insert_i64s("position/step", &[41]))
        .and_then(|()| state.insert_f32("empty", &[0], &[]));
    inserted.expect("valid names");
    state.set_metadata("run", "seed");
    state
}

/// Valid manifests.
pub fn manifest_seeds() -> Vec<Vec<u8>> {
    let data = vec![7u8; 1000];
    [(data.as_slice(), 64), (&data, 1000), (&[], 1), (&data, 1 << 20)]
        .into_iter()
        .map(|(bytes, chunk)| {
            Manifest::of(Step(5), Epoch(3), bytes, chunk)
                .to_json()
                .expect("a manifest of ours")
        })
        .collect()
}

/// Valid states.
pub fn encoded_seeds() -> Vec<Vec<u8>> {
    [state(), StateDict::new()]
        .iter()
        .map(|state| encode(state).expect("a state of ours"))
        .collect()
}
