//! Integers of 4 bits after a rotation over two blocks of 64. The rules are at [`Codec`](super::Codec).

use super::grid::{Int4, decode_block, encode_block, encode_part};
use super::hadamard::{GROUP, Signs, TOO_LARGE};
use super::isa::Isa;
use super::pack;
use super::rounding::Round;
use super::scale::{self, Scale, put};
use super::simd::Reference;
use super::tiles::{Blocks, PART};

const BLOCK: usize = 64;
const BITS: u32 = 4;

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

/// Decodes blocks that were not rotated.
#[cold]
fn decode_short<const ADD: bool>(scales: &[u8], codes: &[u8], out: &mut [f32]) {
    let planes = scales.chunks(Scale::BYTES).zip(codes.chunks(BLOCK / 2));
    for (block, (scale, codes)) in out.chunks_mut(BLOCK).zip(planes) {
        decode_block::<Int4, ADD, BLOCK>(Scale::read(scale), codes, block);
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
            let mut group = [0.0; GROUP];
            Reference::rotate(&self.signs, whole, &mut group, &mut [0; 2]);
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
        let whole = (
            <&[u8; GROUP / 2]>::try_from(codes),
            scales.as_chunks::<{ Scale::BYTES }>().0,
        );
        let (Ok(codes), [first, second]) = whole else {
            return decode_short::<ADD>(scales, codes, out);
        };
        let (first, second) = (Scale::read(first), Scale::read(second));
        if out.len() < GROUP || first.is_marked() || second.is_marked() {
            return decode_short::<ADD>(scales, codes, out);
        }
        let mut group = [0.0; GROUP];
        let (low, high) = group.split_at_mut(BLOCK);
        decode_block::<Int4, false, BLOCK>(first, &codes[..BLOCK / 2], low);
        decode_block::<Int4, false, BLOCK>(second, &codes[BLOCK / 2..], high);
        match <&mut [f32; GROUP]>::try_from(&mut *out) {
            Ok(out) if !ADD => I::rotate_back(&self.signs, &group, out),
            _ => {
                let mut values = [0.0; GROUP];
                I::rotate_back(&self.signs, &group, &mut values);
                for i in 0..out.len() {
                    put::<ADD>(&mut out[i], values[i]);
                }
            }
        }
    }

    #[inline(always)]
    fn encode_part<R: Round, I: Isa>(
        &self,
        part: &[f32; PART],
        at: (R, u64),
        scales: &mut [u8],
        codes: &mut [u8],
    ) -> bool {
        let mut rotated = [0.0; PART];
        let mut peaks = [0; PART / BLOCK];
        let (from, to) = (part.as_chunks::<GROUP>().0, rotated.as_chunks_mut::<GROUP>().0);
        let of_halves = peaks.as_chunks_mut::<2>().0;
        let mut fits = true;
        for k in 0..PART / GROUP {
            fits &= I::rotate(&self.signs, &from[k], &mut to[k], &mut of_halves[k]);
        }
        fits && encode_part::<Int4, R, I, BLOCK>(&rotated, &peaks, at, scales, codes)
    }
}
