//! Bytes moved, computed from what each operation must move at least: oneCCL does not tell what it really sends.

use ftcore::engine::Place;

use crate::recipe::Recipe;

/// What one operation sends and receives whose tensors have `bytes` in all on this rank.
pub(crate) fn moved(recipe: &Recipe, bytes: usize, place: Place) -> (u64, u64) {
    let (bytes, world) = (bytes as u64, u64::from(place.world.max(1)));
    let others = |n: u64| n * (world - 1) / world;
    let root = |r: u32| r == place.rank;
    match recipe {
        Recipe::AllReduce { .. } => (2 * others(bytes), 2 * others(bytes)),
        Recipe::Broadcast { root: r } if root(*r) => (bytes, 0),
        Recipe::Broadcast { .. } => (0, bytes),
        Recipe::Reduce { root: r, .. } if root(*r) => (0, bytes),
        Recipe::Reduce { .. } => (bytes, 0),
        // One part in, world parts out, or the other way round.
        Recipe::AllGather
        | Recipe::AllGatherInto
        | Recipe::ReduceScatter { .. }
        | Recipe::ReduceScatterInto { .. } => {
            let n = bytes * world / (world + 1);
            (others(n), others(n))
        }
        Recipe::AllGatherInPlace | Recipe::ReduceScatterInPlace { .. } => (others(bytes), others(bytes)),
        Recipe::Gather { root: r } => {
            if root(*r) {
                (0, others(bytes * world / (world + 1)))
            } else {
                (bytes, 0)
            }
        }
        Recipe::Scatter { root: r } => {
            if root(*r) {
                (others(bytes * world / (world + 1)), 0)
            } else {
                (0, bytes)
            }
        }
        Recipe::AllToAll | Recipe::AllToAllInto { .. } => (others(bytes / 2), others(bytes / 2)),
        Recipe::Send { .. } => (bytes, 0),
        Recipe::Recv { .. } => (0, bytes),
        Recipe::Barrier | Recipe::MonitoredBarrier => (4, 4),
    }
}
