//! OCP MX v1.0: blocks of 32 values in an 8-bit float type with a power-of-two scale (E8M0). The rules are at [`Codec`](super::Codec).
//!
//! Scaling by a power of two and the way back are exact, so all error is in the one rounding to the element type.

use std::marker::PhantomData;

use super::scale::{self, INFINITE, put};
use super::tiles::Blocks;

const BLOCK: usize = 32;

/// An 8-bit float type.
pub(super) trait Float8 {
    /// Bits of mantissa.
    const MANTISSA: u32;
    /// The exponent of 1 is stored as this.
    const BIAS: u32;
    /// The exponent of the largest value.
    const EMAX: u32;
    /// The code of the largest finite value.
    const LARGEST: u8;
    /// The code for infinity.
    const INFINITY: u8;
    /// The value of a code without its sign from [`LARGEST`](Self::LARGEST) + 1 on.
    fn special(code: u8) -> f32;
}

/// 4 bits of exponent, 3 of mantissa, NaN but no infinity.
pub(super) struct E4M3;
/// 5 bits of exponent, 2 of mantissa.
pub(super) struct E5M2;

impl Float8 for E4M3 {
    const MANTISSA: u32 = 3;
    const BIAS: u32 = 7;
    const EMAX: u32 = 8;
    const LARGEST: u8 = 0x7e;
    const INFINITY: u8 = 0x7f;

    #[inline(always)]
    fn special(_: u8) -> f32 {
        f32::NAN
    }
}

impl Float8 for E5M2 {
    const MANTISSA: u32 = 2;
    const BIAS: u32 = 15;
    const EMAX: u32 = 15;
    const LARGEST: u8 = 0x7b;
    const INFINITY: u8 = 0x7c;

    #[inline(always)]
    fn special(code: u8) -> f32 {
        if code == Self::INFINITY {
            f32::INFINITY
        } else {
            f32::NAN
        }
    }
}

/// The code of NaN in both types.
const NAN: u8 = 0x7f;

/// The code of a finite value: to nearest even, saturating.
#[inline(always)]
pub(super) fn encode_finite<E: Float8>(v: f32) -> u8 {
    let shift = 23 - E::MANTISSA;
    let magnitude = v.to_bits() & 0x7fff_ffff;
    // Normal: cut the mantissa with rounding, and change the bias.
    let odd = magnitude >> shift & 1;
    let rounded = (magnitude + (1 << (shift - 1)) - 1 + odd) >> shift;
    let normal = rounded.wrapping_sub((127 - E::BIAS) << E::MANTISSA);
    // Subnormal: at this size the last bit of an f32 is the smallest code, so that an addition rounds.
    let unit = f32::from_bits((127 + 24 - E::BIAS - E::MANTISSA) << 23);
    let subnormal = (f32::from_bits(magnitude) + unit).to_bits() - unit.to_bits();
    let smallest_normal = (128 - E::BIAS) << 23;
    let code = if magnitude < smallest_normal {
        subnormal
    } else {
        normal
    };
    code.min(u32::from(E::LARGEST)) as u8 | (v.to_bits() >> 24) as u8 & 0x80
}

/// The code of any value.
fn encode_any<E: Float8>(v: f32) -> u8 {
    if v.is_finite() {
        return encode_finite::<E>(v);
    }
    let sign = (v.to_bits() >> 24) as u8 & 0x80;
    sign | if v.is_nan() { NAN } else { E::INFINITY }
}

/// The value of a code.
#[inline(always)]
pub(super) fn value<E: Float8>(code: u8) -> f32 {
    let magnitude = code & 0x7f;
    // As an f32 with the same fields the value is too small by a power of two; subnormals come out right too.
    let small = f32::from_bits(u32::from(magnitude) << (23 - E::MANTISSA));
    let finite = small * f32::from_bits((254 - E::BIAS) << 23);
    let v = if magnitude > E::LARGEST {
        E::special(magnitude)
    } else {
        finite
    };
    f32::from_bits(v.to_bits() | u32::from(code & 0x80) << 24)
}

/// The value of an E8M0 scale: `2^(code − 127)`; 255 is NaN.
#[inline(always)]
pub(super) fn scale_value(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(0x0040_0000),
        255 => f32::NAN,
        code => f32::from_bits(u32::from(code) << 23),
    }
}

/// See the module.
pub(super) struct Mx<E>(PhantomData<E>);

impl<E: Float8> Mx<E> {
    pub(super) fn new() -> Self {
        Self(PhantomData)
    }
}

#[inline(always)]
fn encode_block<E: Float8>(values: &[f32], codes: &mut [u8]) -> (u8, usize) {
    let peak = scale::peak(values);
    let finite = if peak < INFINITE {
        peak
    } else {
        scale::finite_peak(values).to_bits()
    };
    // The biased exponent of the peak is floor(log2) + 127, and so is the scale's code.
    let code = (finite >> 23).saturating_sub(E::EMAX);
    let inverse = f32::from_bits((254 - code) << 23);
    if peak < INFINITE {
        for (v, to) in values.iter().zip(codes) {
            *to = encode_finite::<E>(v * inverse);
        }
        return (code as u8, 0);
    }
    for (v, to) in values.iter().zip(codes) {
        *to = encode_any::<E>(v * inverse);
    }
    (code as u8, values.iter().filter(|v| !v.is_finite()).count())
}

#[inline(always)]
fn decode_block<E: Float8, const ADD: bool>(scale: f32, codes: &[u8], out: &mut [f32]) {
    for (code, to) in codes.iter().zip(out) {
        put::<ADD>(to, value::<E>(*code) * scale);
    }
}

impl<E: Float8> Blocks for Mx<E> {
    const BLOCK: usize = BLOCK;

    #[inline(always)]
    fn scales(_: usize) -> usize {
        1
    }

    #[inline(always)]
    fn codes(count: usize) -> usize {
        count
    }

    #[inline(always)]
    fn encode(&self, values: &[f32], scales: &mut [u8], codes: &mut [u8]) -> usize {
        let (scale, non_finite) = match (
            <&[f32; BLOCK]>::try_from(values),
            <&mut [u8; BLOCK]>::try_from(&mut *codes),
        ) {
            (Ok(values), Ok(codes)) => encode_block::<E>(values, codes),
            _ => encode_block::<E>(values, codes),
        };
        if let Some(to) = scales.first_mut() {
            *to = scale;
        }
        non_finite
    }

    #[inline(always)]
    fn decode<const ADD: bool>(&self, scales: &[u8], codes: &[u8], out: &mut [f32]) {
        let scale = scale_value(scales.first().copied().unwrap_or(0));
        match (
            <&[u8; BLOCK]>::try_from(codes),
            <&mut [f32; BLOCK]>::try_from(&mut *out),
        ) {
            (Ok(codes), Ok(out)) => decode_block::<E, ADD>(scale, codes, out),
            _ => decode_block::<E, ADD>(scale, codes, out),
        }
    }
}
