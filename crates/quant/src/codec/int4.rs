//! Integers of 4 bits in blocks of 64 values, after a rotation over two blocks. The rules are at [`Codec`](super::Codec).

use super::hadamard::{GROUP, Signs};
use super::scale::{self, INFINITE, Scale, put};
use super::tiles::Blocks;

const LEVELS: i8 = 7;
const BLOCK: usize = 64;
/// The bits of 2¹²⁰. Groups with larger values are not rotated, so that sums cannot overflow.
const TOO_LARGE: u32 = (120 + 127) << 23;

/// See the module.
pub(super) struct Int4 {
    signs: Signs,
}

impl Int4 {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            signs: Signs::new(seed),
        }
    }
}

#[inline(always)]
fn pack(low: i8, high: i8) -> u8 {
    (low as u8 & 15) | (high as u8) << 4
}

#[inline(always)]
fn unpack(byte: u8) -> (i8, i8) {
    ((byte << 4) as i8 >> 4, byte as i8 >> 4)
}

/// Encodes one block of at most 64 values. Marked if `mark`, or if a value is not finite.
#[inline(always)]
fn encode_block(values: &[f32], mark: bool, scale: &mut [u8], codes: &mut [u8]) -> usize {
    let half = values.len().div_ceil(2);
    let peak = scale::peak(values);
    if mark || peak >= INFINITE {
        let mut all = [0i8; BLOCK];
        let (marked, non_finite) = scale::encode_escaped(values, LEVELS, |i, code| {
            if let Some(to) = all.get_mut(i) {
                *to = code;
            }
        });
        let (low, high) = all.split_at(half);
        for ((low, high), to) in low.iter().zip(high.iter().chain([&0])).zip(codes) {
            *to = pack(*low, *high);
        }
        marked.write(scale);
        return non_finite;
    }
    let levels = f32::from(LEVELS);
    let s = Scale::of(f32::from_bits(peak), levels);
    let inverse = s.inverse();
    let (low, high) = values.split_at(half);
    let code = |v: &f32| scale::code(v * inverse, levels);
    for ((l, h), to) in low.iter().zip(high).zip(codes.iter_mut()) {
        *to = pack(code(l), code(h));
    }
    if let (Some(l), Some(to), true) = (low.last(), codes.last_mut(), high.len() < half) {
        *to = pack(code(l), 0);
    }
    s.write(scale);
    0
}

/// Decodes one block of at most 64 values.
#[inline(always)]
fn decode_block<const ADD: bool>(scale: Scale, codes: &[u8], out: &mut [f32]) {
    let half = out.len().div_ceil(2);
    let (low, high) = out.split_at_mut(half);
    if scale.is_escaped() {
        let value = |code| scale::escaped_value(code, scale, LEVELS);
        for (byte, to) in codes.iter().zip(low) {
            put::<ADD>(to, value(unpack(*byte).0));
        }
        for (byte, to) in codes.iter().zip(high) {
            put::<ADD>(to, value(unpack(*byte).1));
        }
        return;
    }
    let s = scale.value();
    for (byte, to) in codes.iter().zip(low) {
        put::<ADD>(to, f32::from(unpack(*byte).0) * s);
    }
    for (byte, to) in codes.iter().zip(high) {
        put::<ADD>(to, f32::from(unpack(*byte).1) * s);
    }
}

impl Blocks for Int4 {
    const BLOCK: usize = GROUP;

    #[inline(always)]
    fn scales(count: usize) -> usize {
        2 * count.div_ceil(BLOCK)
    }

    #[inline(always)]
    fn codes(count: usize) -> usize {
        count.div_ceil(2)
    }

    fn encode(&self, values: &[f32], scales: &mut [u8], codes: &mut [u8]) -> usize {
        let mut group = [0.0; GROUP];
        let mark = values.len() == GROUP && scale::peak(values) >= TOO_LARGE;
        let source = if values.len() == GROUP && !mark {
            group.copy_from_slice(values);
            self.signs.rotate(&mut group);
            &group
        } else {
            values
        };
        let planes = scales.chunks_mut(2).zip(codes.chunks_mut(BLOCK / 2));
        let mut non_finite = 0;
        for (block, (scale, codes)) in source.chunks(BLOCK).zip(planes) {
            non_finite += match (
                <&[f32; BLOCK]>::try_from(block),
                <&mut [u8; BLOCK / 2]>::try_from(&mut *codes),
            ) {
                (Ok(block), Ok(codes)) => encode_block(block, mark, scale, codes),
                _ => encode_block(block, mark, scale, codes),
            };
        }
        non_finite
    }

    fn decode<const ADD: bool>(&self, scales: &[u8], codes: &[u8], out: &mut [f32]) {
        let marked = scales.chunks(2).any(|s| Scale::read(s).is_escaped());
        let planes = || scales.chunks(2).map(Scale::read).zip(codes.chunks(BLOCK / 2));
        if out.len() < GROUP || marked {
            for (block, (scale, codes)) in out.chunks_mut(BLOCK).zip(planes()) {
                decode_block::<ADD>(scale, codes, block);
            }
            return;
        }
        let mut group = [0.0; GROUP];
        for (block, (scale, codes)) in group.as_chunks_mut::<BLOCK>().0.iter_mut().zip(planes()) {
            match <&[u8; BLOCK / 2]>::try_from(codes) {
                Ok(codes) => decode_block::<false>(scale, codes, block),
                Err(_) => decode_block::<false>(scale, codes, block),
            }
        }
        self.signs.rotate_back(&mut group);
        for (to, v) in out.iter_mut().zip(group) {
            put::<ADD>(to, v);
        }
    }
}
