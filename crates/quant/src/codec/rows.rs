//! Rows with one f32 scale each, as torchft lays them out: scale, codes, zeros up to a multiple of 4 bytes. The rules are at
//! [`Codec`](super::Codec).

use std::marker::PhantomData;

use super::rounding::Round;
use super::scale::{self, put};
use super::simd::Isa;
use super::small::{self, E4M3, INFINITE};
use super::tiles::{Layout, TILE};

/// Bytes of a scale.
const SCALE: usize = 4;

/// What a row's codes are.
pub(super) trait Element {
    /// The largest magnitude is scaled to this.
    const MAX: f32;
    /// True if there is a code for what is not finite.
    const HAS_NAN: bool;
    /// The code of a scaled finite value.
    fn code<R: Round>(scaled: f32, round: R, index: u64) -> u8;
    /// The code of a value that may not be finite, where there is one.
    fn any_code<R: Round>(scaled: f32, round: R, index: u64) -> u8;
    /// The value of a code, to be divided by the scale.
    fn value(code: u8) -> f32;
}

/// E4M3 codes.
pub(super) struct Float;
/// 8-bit integers.
pub(super) struct Integer;

impl Element for Float {
    const MAX: f32 = 448.0;
    const HAS_NAN: bool = true;

    #[inline(always)]
    fn code<R: Round>(scaled: f32, round: R, index: u64) -> u8 {
        small::encode_finite::<E4M3, R>(scaled, round, index) as u8
    }

    #[inline(always)]
    fn any_code<R: Round>(scaled: f32, round: R, index: u64) -> u8 {
        small::encode::<E4M3, R>(scaled, round, index) as u8
    }

    #[inline(always)]
    fn value(code: u8) -> f32 {
        small::value::<E4M3>(u32::from(code))
    }
}

impl Element for Integer {
    const MAX: f32 = 127.0;
    const HAS_NAN: bool = false;

    #[inline(always)]
    fn code<R: Round>(scaled: f32, round: R, index: u64) -> u8 {
        round.integer(scaled.clamp(-127.0, 127.0), index) as u8
    }

    #[inline(always)]
    fn any_code<R: Round>(_: f32, _: R, _: u64) -> u8 {
        0
    }

    #[inline(always)]
    fn value(code: u8) -> f32 {
        f32::from(code as i8)
    }
}

/// Rows of a fixed number of values; the last one may be shorter.
pub(super) struct Rows<E> {
    row: usize,
    element: PhantomData<E>,
}

impl<E> Rows<E> {
    pub(super) fn new(row: u32) -> Self {
        Self {
            row: (row as usize).max(1),
            element: PhantomData,
        }
    }
}

const fn bytes_of_row(count: usize) -> usize {
    SCALE + count.next_multiple_of(4)
}

#[inline(always)]
fn encode_row<E: Element, R: Round>(values: &[f32], (round, first): (R, u64), out: &mut [u8]) -> usize {
    let Some((to_scale, codes)) = out.split_first_chunk_mut::<SCALE>() else {
        return 0;
    };
    let (codes, padding) = codes.split_at_mut(values.len().min(codes.len()));
    padding.fill(0);
    let peak = scale::peak(values);
    let finite = peak < INFINITE;
    let amax = if finite {
        f32::from_bits(peak)
    } else {
        scale::finite_peak(values)
    };
    let scale = match E::MAX / amax {
        scale if scale.is_infinite() => 1.0,
        scale => scale,
    };
    let n = values.len().min(codes.len());
    let (values, codes) = (&values[..n], &mut codes[..n]);
    if finite {
        *to_scale = scale.to_le_bytes();
        for i in 0..n {
            codes[i] = E::code(values[i] * scale, round, first + i as u64);
        }
        return 0;
    }
    *to_scale = if E::HAS_NAN { scale } else { f32::NAN }.to_le_bytes();
    for i in 0..n {
        codes[i] = E::any_code(values[i] * scale, round, first + i as u64);
    }
    scale::non_finite(values)
}

impl<E: Element> Layout for Rows<E> {
    fn grain(&self) -> usize {
        (TILE / self.row).max(1) * self.row
    }

    fn encoded_len(&self, count: usize) -> usize {
        let tail = count % self.row;
        let last = if tail == 0 { 0 } else { bytes_of_row(tail) };
        count / self.row * bytes_of_row(self.row) + last
    }

    #[inline(always)]
    fn encode<R: Round, I: Isa>(&self, values: &[f32], (round, first): (R, u64), out: &mut [u8]) -> usize {
        let mut non_finite = 0;
        let rows = values
            .chunks(self.row)
            .zip(out.chunks_mut(bytes_of_row(self.row)));
        for ((values, out), begins) in rows.zip((first..).step_by(self.row)) {
            non_finite += encode_row::<E, R>(values, (round, begins), out);
        }
        non_finite
    }

    #[inline(always)]
    fn decode<const ADD: bool, I: Isa>(&self, bytes: &[u8], out: &mut [f32]) {
        let rows = out.chunks_mut(self.row).zip(bytes.chunks(bytes_of_row(self.row)));
        for (out, bytes) in rows {
            let Some((scale, codes)) = bytes.split_first_chunk::<SCALE>() else {
                return;
            };
            let scale = match f32::from_le_bytes(*scale) {
                0.0 => 1.0,
                scale => scale,
            };
            let n = codes.len().min(out.len());
            let (codes, out) = (&codes[..n], &mut out[..n]);
            for i in 0..n {
                put::<ADD>(&mut out[i], E::value(codes[i]) / scale);
            }
        }
    }
}
