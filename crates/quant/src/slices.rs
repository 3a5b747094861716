//! Where an operation is cut into slices, and what its slices must agree on. Pure.
//!
//! Slice k of an operation is slice k of every rank's part. Parts may differ in length: behind the end of one its slices are empty, and travel
//! as a header only.

use std::ops::Range;

use ftcore::{Error, ErrorKind, Result};

use crate::kernels::Piece;

/// How many slices of `size` the longest part has; at least one, so that there is a header.
pub(crate) fn steps(lengths: impl IntoIterator<Item = usize>, size: usize) -> usize {
    let longest = lengths.into_iter().max().unwrap_or(0);
    longest.div_ceil(size.max(1)).max(1)
}

/// Slice `step` of a part; empty behind its end.
pub(crate) fn cut(part: &Range<usize>, size: usize, step: usize) -> Range<usize> {
    let at = |step: usize| part.start.saturating_add(size.saturating_mul(step)).min(part.end);
    at(step)..at(step + 1)
}

/// What of `pieces`, one after the other, lies in `slice`.
pub(crate) fn within(pieces: &[Piece], slice: &Range<usize>) -> Vec<Piece> {
    let mut begins = 0;
    let clipped = pieces.iter().map(|p| {
        let start = p.range.start;
        let at = |place: usize| start + place.clamp(begins, begins + p.range.len()) - begins;
        let range = at(slice.start)..at(slice.end);
        begins += p.range.len();
        Piece {
            tensor: p.tensor,
            range,
        }
    });
    clipped.filter(|p| !p.range.is_empty()).collect()
}

/// Who contributes to an operation: the same ranks in every slice.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    of_rank: Vec<u32>,
}

impl Tally {
    /// Errors: `Protocol` if the rank said something else in a slice before.
    pub(crate) fn count(&mut self, rank: u32, contributors: u32) -> Result<()> {
        let known = self.of_rank.get(rank as usize);
        if let Some(known) = known.filter(|k| **k != contributors) {
            let text = format!("sent {contributors} contributors in one slice and {known} in another");
            return Err(Error::new(ErrorKind::Protocol, text));
        }
        if known.is_none() {
            self.of_rank.push(contributors);
        }
        Ok(())
    }

    pub(crate) fn contributors(&self) -> u32 {
        self.of_rank.iter().sum()
    }

    /// What a result says: at least one, so that the zeros of a reduction of nothing are written like any values.
    pub(crate) fn shown(&self) -> u32 {
        self.contributors().max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(tensor: usize, range: Range<usize>) -> Piece {
        Piece { tensor, range }
    }

    #[test]
    fn slices_cover_every_part_once_and_are_empty_behind_its_end() {
        for (parts, expected) in [
            (vec![0..0, 0..0], 1),
            (vec![0..5, 5..5], 2),
            (vec![0..4, 4..8], 1),
            (vec![0..9, 9..10, 10..22], 3),
        ] {
            let steps = steps(parts.iter().map(Range::len), 4);
            assert_eq!(steps, expected);
            for part in parts {
                let slices = (0..steps).map(|step| cut(&part, 4, step));
                assert!(slices.clone().all(|s| s.len() <= 4));
                assert_eq!(slices.flatten().collect::<Vec<_>>(), part.collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn pieces_are_clipped_to_a_slice_in_their_order() {
        let pieces = [piece(2, 10..13), piece(0, 0..0), piece(1, 4..9)];
        assert_eq!(within(&pieces, &(0..3)), [piece(2, 10..13)]);
        assert_eq!(within(&pieces, &(2..5)), [piece(2, 12..13), piece(1, 4..6)]);
        assert_eq!(within(&pieces, &(3..8)), [piece(1, 4..9)]);
        assert_eq!(within(&pieces, &(8..8)), []);
        assert_eq!(within(&[], &(0..0)), []);
    }

    #[test]
    fn a_rank_that_contributes_to_one_slice_and_not_to_another_is_told_so() {
        let mut tally = Tally::default();
        assert_eq!((tally.contributors(), tally.shown()), (0, 1));
        for (rank, contributors) in [(0, 1), (1, 0), (2, 1), (0, 1), (1, 0)] {
            tally.count(rank, contributors).unwrap();
        }
        assert_eq!((tally.contributors(), tally.shown()), (2, 2));
        let e = tally.count(1, 1).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Protocol, "{e}");
        assert_eq!(tally.contributors(), 2);
    }
}
