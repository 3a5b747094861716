//! Where an operation is cut into slices, how many of them are under way, and what they must agree on. Pure.
//!
//! Slice k of an operation is slice k of every rank's part. Parts may differ in length: behind the end of one its slices are empty, and travel
//! as a header only.

use std::ops::Range;

use ftcore::{Error, ErrorKind, Result};

use crate::chunk::{HEADER, slice};
use crate::codec::Codec;
use crate::kernels::Piece;

/// Encoded bytes of one operation that are under way at the same time, at most: what goes out and what comes in.
const WINDOW: usize = 24 << 20;
/// Slices, at most: the one that a group carries out, and the 16 behind it of which gloo sends the first round ahead.
const MOST: usize = 17;

/// How many slices of so many bytes may be under way; at least two, so that one is encoded while another is on the wire.
pub(crate) fn at_once(bytes: usize) -> usize {
    (WINDOW / bytes.max(1)).clamp(2, MOST)
}

/// How an all-reduce travels, for a program that foresees how long it takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slices {
    /// Values of a slice of every rank's part.
    pub values: usize,
    /// How many slices are under way at the same time.
    pub at_once: usize,
}

impl Slices {
    /// Of an all-reduce of `count` values between `world` ranks.
    pub fn of(codec: Codec, count: usize, world: usize) -> Self {
        if world > 2 {
            let values = slice(codec, count.div_ceil(world));
            return Self { values, at_once: 2 };
        }
        let values = slice(codec, count);
        let bytes = HEADER + codec.encoded_len(values);
        Self {
            values,
            at_once: at_once(bytes * (world + 1)),
        }
    }
}

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
    fn an_operation_has_64_slices_at_most_and_as_many_under_way_as_fit_in_the_window() {
        for codec in Codec::ALL {
            for count in [0, 1, 1 << 16, (1 << 22) + 1, 26_200_000, 1_000_000_000] {
                for world in [2, 3, 8] {
                    let Slices { values, at_once } = Slices::of(codec, count, world);
                    assert!(values >= 1 << 16 && values.is_multiple_of(codec.grain()));
                    let part = if world == 2 { count } else { count.div_ceil(world) };
                    assert!(part.div_ceil(values) <= 64, "{count} values of {world}");
                    let bytes = at_once * 3 * codec.encoded_len(values);
                    assert!(at_once == 2 || bytes <= WINDOW, "{bytes} bytes of {codec}");
                }
            }
        }
        let of = |count, world| {
            let Slices { values, at_once } = Slices::of(Codec::Int8B64, count, world);
            (values, at_once)
        };
        assert_eq!(of(1 << 22, 2), (1 << 16, MOST));
        assert_eq!(of(1 << 24, 2), (1 << 18, MOST));
        assert_eq!(of(1 << 26, 2), (1 << 20, 7));
        assert_eq!(of(1 << 24, 4), (1 << 16, 2));
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
