//! With which element counts an operation is tried.

use ftcore::DType;

/// Element counts that every operation is tried with: empty, odd, around vector widths, beyond one piece.
pub const SIZES: [usize; 10] = [0, 1, 2, 3, 7, 16, 17, 64, 1000, 4099];
/// The count that is large enough for every algorithm of a backend to be chosen; tried with fewer dtypes.
pub const LARGE: usize = 70_001;
/// So many forms of an operation meet all of [`SIZES`] on every dtype.
const FORMS: usize = 5;

/// The counts for one form of an operation, by its number: all of [`SIZES`] with `OXCCL_LONG`, else two of them, and others for the next form, dtype
/// and number of ranks. What goes wrong for one count on one dtype goes wrong in some form then, and a reduction is done for about a third of its inputs.
pub(crate) fn sizes(dtype: DType, form: usize, world: u32) -> impl Iterator<Item = usize> {
    let all = std::env::var_os("OXCCL_LONG").is_some();
    let turn = (usize::from(dtype.code()) + form + world as usize) % FORMS;
    let chosen = SIZES.into_iter().enumerate();
    chosen
        .filter(move |(i, _)| all || i % FORMS == turn)
        .map(|(_, count)| count)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn all_counts_are_met_by_each_dtype_in_each_world() {
        for dtype in DType::ALL {
            for world in 1..=8 {
                let met: BTreeSet<usize> = (0..FORMS).flat_map(|form| sizes(dtype, form, world)).collect();
                assert_eq!(met, BTreeSet::from(SIZES), "{dtype:?} on {world} ranks");
            }
        }
    }
}
