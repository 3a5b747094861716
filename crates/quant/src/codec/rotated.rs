//! Integers of 4 bits after a rotation over two blocks of 64. The rules are at [`Codec`](super::Codec).

use super::grid::{Int4, decode_block, encode_block, encode_tile};
use super::hadamard::{GROUP, Signs};
use super::pack;
use super::rounding::Round;
use super::scale::{self, Scale, put};
use super::simd::{Isa, Reference};
use super::tiles::{Blocks, TILE};

const BLOCK: usize = 64;
const BITS: u32 = 4;
/// The bits of 2¹²⁰. Groups with larger values are not rotated, so that sums cannot overflow.
const TOO_LARGE: u32 = (120 + 127) << 23;

/// See the module.
pub(super) struct Rotated {
    signs: Signs,
}

impl Rotated {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            signs: Signs::new(seed),
        }
    }
}

impl Blocks for Rotated {
    const BLOCK: usize = GROUP;

    #[inline(always)]
    fn scales(count: usize) -> usize {
        Scale::BYTES * count.div_ceil(BLOCK)
    }

    #[inline(always)]
    fn codes(count: usize) -> usize {
        // A full first block and the rest take as much as both at once, as 64 is even.
        pack::bytes(BITS, count)
    }

    #[inline(always)]
    fn encode<R: Round>(
        &self,
        values: &[f32],
        (round, first): (R, u64),
        scales: &mut [u8],
        codes: &mut [u8],
    ) -> usize {
        let planes = scales.chunks_mut(Scale::BYTES).zip(codes.chunks_mut(BLOCK / 2));
        let planes = planes.zip((first..).step_by(BLOCK));
        let mut non_finite = 0;
        if let Ok(whole) = <&[f32; GROUP]>::try_from(values)
            && scale::peak(whole) < TOO_LARGE
        {
            let mut group = *whole;
            self.signs.rotate::<Reference>(&mut group);
            for (block, ((scale, codes), at)) in group.as_chunks::<BLOCK>().0.iter().zip(planes) {
                encode_block::<Int4, R, BLOCK>(block, false, (round, at), scale, codes);
            }
            return 0;
        }
        let mark = values.len() == GROUP;
        for (block, ((scale, codes), at)) in values.chunks(BLOCK).zip(planes) {
            non_finite += encode_block::<Int4, R, BLOCK>(block, mark, (round, at), scale, codes);
        }
        non_finite
    }

    #[inline(always)]
    fn decode<const ADD: bool, I: Isa>(&self, scales: &[u8], codes: &[u8], out: &mut [f32]) {
        let marked = scales.chunks(Scale::BYTES).any(|s| Scale::read(s).is_marked());
        let planes = scales
            .chunks(Scale::BYTES)
            .map(Scale::read)
            .zip(codes.chunks(BLOCK / 2));
        if out.len() < GROUP || marked {
            for (block, (scale, codes)) in out.chunks_mut(BLOCK).zip(planes) {
                decode_block::<Int4, ADD, BLOCK>(scale, codes, block);
            }
            return;
        }
        let mut group = [0.0; GROUP];
        for (block, (scale, codes)) in group.as_chunks_mut::<BLOCK>().0.iter_mut().zip(planes) {
            decode_block::<Int4, false, BLOCK>(scale, codes, block);
        }
        self.signs.rotate_back::<I>(&mut group);
        for i in 0..out.len() {
            put::<ADD>(&mut out[i], group[i]);
        }
    }
    #[inline(always)]
    fn encode_tile<R: Round, I: Isa>(
        &self,
        tile: &[f32; TILE],
        at: (R, u64),
        scales: &mut [u8],
        codes: &mut [u8],
    ) -> bool {
        if scale::peak(tile) >= TOO_LARGE {
            return false;
        }
        let mut rotated = *tile;
        for group in rotated.as_chunks_mut::<GROUP>().0 {
            self.signs.rotate::<I>(group);
        }
        encode_tile::<Int4, R, I, BLOCK>(&rotated, at, scales, codes)
    }
}
