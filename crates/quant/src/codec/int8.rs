//! Integers of 8 bits in blocks of `B` values with a bf16 scale. The rules are at [`Codec`](super::Codec).

use super::scale::{self, INFINITE, Scale, put};
use super::tiles::Blocks;

const LEVELS: i8 = 127;

/// See the module.
pub(super) struct Int8<const B: usize>;

#[inline(always)]
fn encode_block(values: &[f32], codes: &mut [u8]) -> (Scale, usize) {
    let peak = scale::peak(values);
    if peak >= INFINITE {
        return scale::encode_escaped(values, LEVELS, |i, code| {
            if let Some(to) = codes.get_mut(i) {
                *to = code as u8;
            }
        });
    }
    let levels = f32::from(LEVELS);
    let scale = Scale::of(f32::from_bits(peak), levels);
    let inverse = scale.inverse();
    for (v, to) in values.iter().zip(codes) {
        *to = scale::code(v * inverse, levels) as u8;
    }
    (scale, 0)
}

#[inline(always)]
fn decode_block<const ADD: bool>(scale: Scale, codes: &[u8], out: &mut [f32]) {
    if scale.is_escaped() {
        for (code, to) in codes.iter().zip(out) {
            put::<ADD>(to, scale::escaped_value(*code as i8, scale, LEVELS));
        }
        return;
    }
    let s = scale.value();
    for (code, to) in codes.iter().zip(out) {
        put::<ADD>(to, f32::from(*code as i8) * s);
    }
}

impl<const B: usize> Blocks for Int8<B> {
    const BLOCK: usize = B;

    #[inline(always)]
    fn scales(_: usize) -> usize {
        2
    }

    #[inline(always)]
    fn codes(count: usize) -> usize {
        count
    }

    #[inline(always)]
    fn encode(&self, values: &[f32], scales: &mut [u8], codes: &mut [u8]) -> usize {
        // Arrays tell the compiler the length, which makes the loops straight vector code.
        let (scale, non_finite) = match (
            <&[f32; B]>::try_from(values),
            <&mut [u8; B]>::try_from(&mut *codes),
        ) {
            (Ok(values), Ok(codes)) => encode_block(values, codes),
            _ => encode_block(values, codes),
        };
        scale.write(scales);
        non_finite
    }

    #[inline(always)]
    fn decode<const ADD: bool>(&self, scales: &[u8], codes: &[u8], out: &mut [f32]) {
        let scale = Scale::read(scales);
        match (<&[u8; B]>::try_from(codes), <&mut [f32; B]>::try_from(&mut *out)) {
            (Ok(codes), Ok(out)) => decode_block::<ADD>(scale, codes, out),
            _ => decode_block::<ADD>(scale, codes, out),
        }
    }
}
