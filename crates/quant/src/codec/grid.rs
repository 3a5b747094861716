//! Formats by blocks with a bf16 scale: what one scaled value becomes (a [`Grid`]), and how a block is encoded with it.
//! The rules are at [`Codec`](super::Codec).

use std::marker::PhantomData;

use super::isa::Isa;
use super::pack;
use super::rounding::Round;
use super::scale::{self, Scale, put};
use super::small::INFINITE;
use super::tiles::{Blocks, PART};

/// The codes of a format and their values.
pub(super) trait Grid {
    /// Bits of a code.
    const BITS: u32;
    /// The scale is the largest magnitude over this.
    const LEVELS: f32;
    /// The same in a marked block; 0 if finite values become 0 there.
    const MARKED_LEVELS: f32;
    /// In a marked block: +Inf, −Inf and NaN.
    const SPECIAL: [i8; 3];
    /// True if the codes are those of [`Int4`], which instruction sets may have a shorter way to ([`Isa::nibbles`]).
    const NIBBLES: bool = false;

    /// The code of a scaled value.
    fn code<R: Round>(scaled: f32, round: R, index: u64) -> i8;
    /// The code of a scaled finite value in a marked block.
    fn marked_code<R: Round>(scaled: f32, round: R, index: u64) -> i8;
    /// The value of a code, to be multiplied with the scale.
    fn value(code: i8) -> f32;
}

/// Integers of `BITS` bits up to ±`LIMIT`; the scale maps the largest magnitude to `LEVELS`.
pub(super) struct Int<const BITS: u32, const LIMIT: i8, const LEVELS: i8>;

/// 8 bits.
pub(super) type Int8 = Int<8, 127, 127>;
/// 4 bits.
pub(super) type Int4 = Int<4, 7, 7>;
/// 2 bits: the largest magnitudes are cut to half of the peak, which is better than to keep them and lose all others.
pub(super) type Int2 = Int<2, 1, 2>;

impl<const BITS: u32, const LIMIT: i8, const LEVELS: i8> Grid for Int<BITS, LIMIT, LEVELS> {
    const BITS: u32 = BITS;
    const LEVELS: f32 = LEVELS as f32;
    const MARKED_LEVELS: f32 = (LIMIT - 1) as f32;
    const SPECIAL: [i8; 3] = [LIMIT, -LIMIT, -LIMIT - 1];
    const NIBBLES: bool = BITS == 4 && LIMIT == 7 && LEVELS == 7;

    #[inline(always)]
    fn code<R: Round>(scaled: f32, round: R, index: u64) -> i8 {
        let limit = LIMIT as f32;
        round.integer(scaled.clamp(-limit, limit), index)
    }

    #[inline(always)]
    fn marked_code<R: Round>(scaled: f32, round: R, index: u64) -> i8 {
        round.integer(scaled.clamp(-Self::MARKED_LEVELS, Self::MARKED_LEVELS), index)
    }

    #[inline(always)]
    fn value(code: i8) -> f32 {
        f32::from(code)
    }
}

/// Encodes a block of at most `B` values. Marked if `mark`, or if a value is not finite. Returns how many are not.
#[inline(always)]
pub(super) fn encode_block<G: Grid, R: Round, const B: usize>(
    values: &[f32],
    mark: bool,
    (round, first): (R, u64),
    scale: &mut [u8],
    codes: &mut [u8],
) -> usize {
    let mut all = [0i8; B];
    let Some(all) = all.get_mut(..values.len()) else {
        return 0;
    };
    let peak = scale::peak(values);
    let (s, non_finite) = if mark || peak >= INFINITE {
        encode_marked::<G, R>(values, (round, first), all)
    } else {
        let s = Scale::of(f32::from_bits(peak), G::LEVELS);
        let inverse = s.inverse();
        for i in 0..all.len() {
            all[i] = G::code(values[i] * inverse, round, first + i as u64);
        }
        (s, 0)
    };
    s.write(scale);
    write_codes::<G>(all, codes);
    non_finite
}

/// The most blocks in a part: those of 32 values.
const MOST: usize = PART / 32;

/// Encodes a part of blocks of `B` values whose peaks are known and finite: all scales first, which divides in vectors, then all codes. The
/// same bytes as block by block. False, with nothing written, if the slices are not as long as they are to be.
#[inline(always)]
pub(super) fn encode_part<G: Grid, R: Round, I: Isa, const B: usize>(
    part: &[f32; PART],
    peaks: &[u32],
    (round, first): (R, u64),
    scales: &mut [u8],
    codes: &mut [u8],
) -> bool {
    let mut inverses = [0f32; MOST];
    let blocks = part.as_chunks::<B>().0;
    let scales = scales.as_chunks_mut::<{ Scale::BYTES }>().0;
    let bytes = pack::bytes(G::BITS, B);
    let count = PART / B;
    if peaks.len() != count || scales.len() != count || codes.len() != count * bytes {
        return false;
    }
    let inverses = &mut inverses[..count];
    for k in 0..count {
        let s = Scale::of(f32::from_bits(peaks[k]), G::LEVELS);
        scales[k] = s.bytes();
        inverses[k] = s.inverse();
    }
    for k in 0..count {
        let (block, inverse, begins) = (&blocks[k], inverses[k], first + (k * B) as u64);
        let to = &mut codes[k * bytes..(k + 1) * bytes];
        if G::NIBBLES
            && R::NEAREST
            && let (Ok(block), Ok(to)) = (block.as_slice().try_into(), (&mut *to).try_into())
        {
            I::nibbles(block, inverse, to);
            continue;
        }
        let mut all = [0i8; B];
        for i in 0..B {
            all[i] = G::code(block[i] * inverse, round, begins + i as u64);
        }
        write_codes::<G>(&all, to);
    }
    true
}

/// Packs a block's codes.
#[inline(always)]
fn write_codes<G: Grid>(all: &[i8], codes: &mut [u8]) {
    match G::BITS {
        8 => pack::pack::<8>(all, codes),
        4 => pack::pack::<4>(all, codes),
        _ => pack::pack::<2>(all, codes),
    }
}

#[cold]
fn encode_marked<G: Grid, R: Round>(
    values: &[f32],
    (round, first): (R, u64),
    codes: &mut [i8],
) -> (Scale, usize) {
    let [infinity, negative, nan] = G::SPECIAL;
    let s = Scale::marked(scale::finite_peak(values), G::MARKED_LEVELS);
    let inverse = s.inverse();
    for ((v, to), index) in values.iter().zip(codes).zip(first..) {
        *to = if v.is_nan() {
            nan
        } else if *v == f32::INFINITY {
            infinity
        } else if *v == f32::NEG_INFINITY {
            negative
        } else {
            G::marked_code(v * inverse, round, index)
        };
    }
    (s, scale::non_finite(values))
}

/// Decodes a block of at most `B` values.
#[inline(always)]
pub(super) fn decode_block<G: Grid, const ADD: bool, const B: usize>(
    scale: Scale,
    codes: &[u8],
    out: &mut [f32],
) {
    let mut all = [0i8; B];
    let Some(all) = all.get_mut(..out.len()) else {
        return;
    };
    match G::BITS {
        8 => pack::unpack::<8>(codes, all),
        4 => pack::unpack::<4>(codes, all),
        _ => pack::unpack::<2>(codes, all),
    }
    if scale.is_marked() {
        decode_marked::<G, ADD>(scale, all, out);
        return;
    }
    let s = scale.value();
    for i in 0..all.len() {
        put::<ADD>(&mut out[i], G::value(all[i]) * s);
    }
}

#[cold]
fn decode_marked<G: Grid, const ADD: bool>(scale: Scale, codes: &[i8], out: &mut [f32]) {
    let [infinity, negative, nan] = G::SPECIAL;
    for (&code, to) in codes.iter().zip(out) {
        let value = if code == infinity {
            f32::INFINITY
        } else if code == negative {
            f32::NEG_INFINITY
        } else if code == nan {
            f32::NAN
        } else {
            G::value(code) * scale.value()
        };
        put::<ADD>(to, value);
    }
}

/// Blocks of `B` values on the grid `G`.
pub(super) struct Scaled<G, const B: usize>(PhantomData<G>);

impl<G, const B: usize> Scaled<G, B> {
    pub(super) fn new() -> Self {
        Self(PhantomData)
    }
}

impl<G: Grid, const B: usize> Blocks for Scaled<G, B> {
    const BLOCK: usize = B;

    #[inline(always)]
    fn scales(_: usize) -> usize {
        Scale::BYTES
    }

    #[inline(always)]
    fn codes(count: usize) -> usize {
        pack::bytes(G::BITS, count)
    }

    #[inline(always)]
    fn encode<R: Round>(&self, values: &[f32], at: (R, u64), scales: &mut [u8], codes: &mut [u8]) -> usize {
        // An array tells the compiler the length, which makes the loops straight vector code.
        match <&[f32; B]>::try_from(values) {
            Ok(values) => encode_block::<G, R, B>(values, false, at, scales, codes),
            Err(_) => encode_block::<G, R, B>(values, false, at, scales, codes),
        }
    }

    #[inline(always)]
    fn decode<const ADD: bool, I: Isa>(&self, scales: &[u8], codes: &[u8], out: &mut [f32]) {
        let scale = Scale::read(scales);
        match <&mut [f32; B]>::try_from(&mut *out) {
            Ok(out) => decode_block::<G, ADD, B>(scale, codes, out),
            Err(_) => decode_block::<G, ADD, B>(scale, codes, out),
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
        let mut peaks = [0; MOST];
        let peaks = &mut peaks[..PART / B];
        let highest = I::peaks(part.as_chunks::<B>().0, peaks);
        highest < INFINITE && encode_part::<G, R, I, B>(part, peaks, at, scales, codes)
    }
}
