//! How an encoding lies in the bytes ([`Layout`]), and the layout of formats by blocks: per tile of 8192 values first all scales, then
//! all codes.
//!
//! Two planes keep the codes aligned and contiguous; tiles keep both in the cache, and let whole tiles be encoded or decoded
//! one after the other, with the same bytes as all at once.

use super::isa::Isa;
use super::rounding::Round;

/// Values per tile; a multiple of every block, so that slices may be cut there without a change of the bytes.
pub(super) const TILE: usize = 8192;

/// Values that are encoded together: few enough that they and what is made of them on the way stay in the smallest cache.
pub(super) const PART: usize = 2048;

const _: () = assert!(TILE.is_multiple_of(PART), "a tile is made of whole parts");

/// A format of flat slices. They may be cut at multiples of [`TILE`] without a change of the bytes.
pub(super) trait Layout {
    /// Bytes of `count` values.
    fn encoded_len(&self, count: usize) -> usize;
    /// Encodes `values`, of which the first is number `at.1`, into `out`, which has their encoded length. Returns how many are not
    /// finite in it.
    fn encode<R: Round, I: Isa>(&self, values: &[f32], at: (R, u64), out: &mut [u8]) -> usize;
    /// Decodes `bytes`, which has the length of `out`'s encoding; with `ADD`, adds to `out`.
    fn decode<const ADD: bool, I: Isa>(&self, bytes: &[u8], out: &mut [f32]);
}

/// A format by blocks.
pub(super) trait Blocks {
    /// Values per block.
    const BLOCK: usize;

    /// Bytes of scales of a block of `count` values, 1 to `BLOCK`.
    fn scales(count: usize) -> usize;
    /// Bytes of codes of a block of `count` values, 1 to `BLOCK`.
    fn codes(count: usize) -> usize;
    /// Encodes one block, of which the first value is number `at.1`. The slices have the lengths above. Returns the number of values
    /// that are not finite.
    fn encode<R: Round>(&self, values: &[f32], at: (R, u64), scales: &mut [u8], codes: &mut [u8]) -> usize;
    /// Decodes one block; with `ADD`, adds to `out`.
    fn decode<const ADD: bool, I: Isa>(&self, scales: &[u8], codes: &[u8], out: &mut [f32]);

    /// Encodes a whole part of a tile; gives up by `false` where block by block is the way, whatever was written by then. A format may have
    /// a faster way for ordinary values.
    #[inline(always)]
    fn encode_part<R: Round, I: Isa>(
        &self,
        part: &[f32; PART],
        at: (R, u64),
        scales: &mut [u8],
        codes: &mut [u8],
    ) -> bool {
        let _ = (part, at, scales, codes);
        false
    }
}

/// Bytes of (scales, codes) of a slice of `count` values.
#[inline(always)]
fn planes<F: Blocks>(count: usize) -> (usize, usize) {
    let (full, tail) = (count / F::BLOCK, count % F::BLOCK);
    let of = |part: fn(usize) -> usize| full * part(F::BLOCK) + if tail == 0 { 0 } else { part(tail) };
    (of(F::scales), of(F::codes))
}

impl<F: Blocks> Layout for F {
    fn encoded_len(&self, count: usize) -> usize {
        let (scales, codes) = planes::<F>(count);
        scales + codes
    }

    #[inline(always)]
    fn encode<R: Round, I: Isa>(&self, values: &[f32], (round, first): (R, u64), out: &mut [u8]) -> usize {
        let mut non_finite = 0;
        let mut rest = out;
        for (tile, begins) in values.chunks(TILE).zip((first..).step_by(TILE)) {
            let (scales, codes) = planes::<F>(tile.len());
            let Some((bytes, behind)) = rest.split_at_mut_checked(scales + codes) else {
                return non_finite;
            };
            rest = behind;
            let (scales, codes) = bytes.split_at_mut(scales);
            let (of_scales, of_codes) = planes::<F>(PART);
            let planes = scales.chunks_mut(of_scales).zip(codes.chunks_mut(of_codes));
            let parts = tile.chunks(PART).zip((begins..).step_by(PART));
            for ((part, begins), (scales, codes)) in parts.zip(planes) {
                if let Ok(part) = <&[f32; PART]>::try_from(part)
                    && self.encode_part::<R, I>(part, (round, begins), scales, codes)
                {
                    continue;
                }
                non_finite += blocks(self, part, (round, begins), scales, codes);
            }
        }
        non_finite
    }

    #[inline(always)]
    fn decode<const ADD: bool, I: Isa>(&self, bytes: &[u8], out: &mut [f32]) {
        let mut rest = bytes;
        for tile in out.chunks_mut(TILE) {
            let count = tile.len();
            let (scales, codes) = planes::<F>(count);
            let Some((bytes, behind)) = rest.split_at_checked(scales + codes) else {
                return;
            };
            rest = behind;
            let (scales, codes) = bytes.split_at(scales);
            let (size, of_scales, of_codes) = (F::BLOCK, F::scales(F::BLOCK), F::codes(F::BLOCK));
            // Exact chunks have a constant length, which makes the loop over a block straight vector code.
            let mut whole = tile.chunks_exact_mut(size);
            let (mut whole_scales, mut whole_codes) =
                (scales.chunks_exact(of_scales), codes.chunks_exact(of_codes));
            for block in whole.by_ref() {
                let (Some(scales), Some(codes)) = (whole_scales.next(), whole_codes.next()) else {
                    return;
                };
                Blocks::decode::<ADD, I>(self, scales, codes, block);
            }
            let full = count / size;
            let tail = whole.into_remainder();
            if !tail.is_empty() {
                let scales = scales.get(full * of_scales..).unwrap_or_default();
                let codes = codes.get(full * of_codes..).unwrap_or_default();
                Blocks::decode::<ADD, I>(self, scales, codes, tail);
            }
        }
    }
}

/// Encodes a part of a tile block by block.
#[inline(always)]
fn blocks<F: Blocks, R: Round>(
    format: &F,
    part: &[f32],
    (round, first): (R, u64),
    scales: &mut [u8],
    codes: &mut [u8],
) -> usize {
    let planes = scales
        .chunks_mut(F::scales(F::BLOCK))
        .zip(codes.chunks_mut(F::codes(F::BLOCK)));
    let numbered = part.chunks(F::BLOCK).zip((first..).step_by(F::BLOCK));
    let mut non_finite = 0;
    for ((block, begins), (scales, codes)) in numbered.zip(planes) {
        non_finite += Blocks::encode(format, block, (round, begins), scales, codes);
    }
    non_finite
}
