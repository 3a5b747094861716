//! Ranks counted through several dimensions, the fastest first: the arithmetic under meshes, rank orders and layouts.

use ftcore::{Error, Result};

/// The number of ranks.
///
/// Errors: `InvalidArgument` for more than a `u32` counts.
pub(crate) fn size(lengths: impl IntoIterator<Item = u32>) -> Result<u32> {
    lengths
        .into_iter()
        .try_fold(1u32, u32::checked_mul)
        .ok_or_else(|| Error::invalid("more ranks than a u32 can count"))
}

/// The position of `rank` in each dimension.
pub(crate) fn coordinates(lengths: impl Iterator<Item = u32>, rank: u32) -> impl Iterator<Item = u32> {
    lengths.scan(rank, |rest, length| {
        let at = *rest % length;
        *rest /= length;
        Some(at)
    })
}

/// The groups along some dimensions taken together: ranks that differ in nothing else. `dimensions` has the length of each, and whether the groups
/// are along it. Each group is ascending; the groups are ordered by their first rank; every rank is in exactly one.
pub(crate) fn groups(dimensions: &[(u32, bool)]) -> Vec<Vec<u32>> {
    let within = sums(dimensions, true);
    let starts = sums(dimensions, false);
    let group = |start: &u32| within.iter().map(|offset| start + offset).collect();
    starts.iter().map(group).collect()
}

/// What the dimensions with this mark add to a rank, over all positions in them: ascending, because a slower dimension adds more than all faster ones.
fn sums(dimensions: &[(u32, bool)], marked: bool) -> Vec<u32> {
    let mut sums = vec![0];
    let mut stride = 1;
    for (length, mark) in dimensions {
        if *mark == marked {
            sums = (0..*length)
                .flat_map(|at| sums.iter().map(move |sum| sum + at * stride))
                .collect();
        }
        stride *= length;
    }
    sums
}
