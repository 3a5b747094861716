//! Float types of few bits: one description per type, one encoder and one decoder for all of them.
//!
//! Everything is integer and plain f32 arithmetic without branches, so that loops over it become vector code.

use super::rounding::Round;

/// A float type: a sign, an exponent and a mantissa, with subnormals.
pub(super) trait Small {
    /// Bits of mantissa.
    const MANTISSA: u32;
    /// The exponent of 1 is stored as this.
    const BIAS: u32;
    /// The position of the sign bit.
    const SIGN: u32;
    /// The code of the largest finite value.
    const LARGEST: u32;
    /// The code that finite values too large for the type get: `LARGEST` if it saturates.
    const TOO_LARGE: u32;
    /// The code for infinity.
    const INFINITY: u32;
    /// False if `INFINITY` is in truth a NaN.
    const HAS_INFINITY: bool;
    /// The code for NaN.
    const NAN: u32;
}

/// OCP FP8 E4M3: 4 bits of exponent, 3 of mantissa, NaN but no infinity; saturating.
pub(super) struct E4M3;
/// IEEE binary16; what is too large becomes infinite.
pub(super) struct F16;
/// bfloat16; what is too large becomes infinite.
pub(super) struct Bf16;

impl Small for E4M3 {
    const MANTISSA: u32 = 3;
    const BIAS: u32 = 7;
    const SIGN: u32 = 7;
    const LARGEST: u32 = 0x7e;
    const TOO_LARGE: u32 = 0x7e;
    const INFINITY: u32 = 0x7f;
    const HAS_INFINITY: bool = false;
    const NAN: u32 = 0x7f;
}

impl Small for F16 {
    const MANTISSA: u32 = 10;
    const BIAS: u32 = 15;
    const SIGN: u32 = 15;
    const LARGEST: u32 = 0x7bff;
    const TOO_LARGE: u32 = 0x7c00;
    const INFINITY: u32 = 0x7c00;
    const HAS_INFINITY: bool = true;
    const NAN: u32 = 0x7e00;
}

impl Small for Bf16 {
    const MANTISSA: u32 = 7;
    const BIAS: u32 = 127;
    const SIGN: u32 = 15;
    const LARGEST: u32 = 0x7f7f;
    const TOO_LARGE: u32 = 0x7f80;
    const INFINITY: u32 = 0x7f80;
    const HAS_INFINITY: bool = true;
    const NAN: u32 = 0x7fc0;
}

/// The bits of infinity: magnitudes from here on are not finite.
pub(super) const INFINITE: u32 = 0x7f80_0000;

/// Bits of an f32's mantissa that the type does not have.
const fn cut<S: Small>() -> u32 {
    23 - S::MANTISSA
}

/// The bits of the smallest normal magnitude.
const fn smallest_normal<S: Small>() -> u32 {
    (128 - S::BIAS) << 23
}

/// The code of a finite magnitude by its bits: to nearest even, not limited.
#[inline(always)]
pub(super) fn nearest<S: Small>(magnitude: u32) -> u32 {
    // Normal: cut the mantissa with rounding, and change the bias.
    let odd = magnitude >> cut::<S>() & 1;
    let rounded = (magnitude + (1 << (cut::<S>() - 1)) - 1 + odd) >> cut::<S>();
    let normal = rounded.wrapping_sub((127 - S::BIAS) << S::MANTISSA);
    // Subnormal: at this size the last bit of an f32 is the smallest code, so that an addition rounds.
    let unit = f32::from_bits((127 + 24 - S::BIAS - S::MANTISSA) << 23);
    let subnormal = (f32::from_bits(magnitude) + unit)
        .to_bits()
        .wrapping_sub(unit.to_bits());
    if magnitude < smallest_normal::<S>() {
        subnormal
    } else {
        normal
    }
}

/// The code at or below a finite magnitude, and how far it is from there to the next one, in [0, 1).
#[inline(always)]
pub(super) fn below<S: Small>(magnitude: u32) -> (u32, f32) {
    // bfloat16 has the subnormals of f32, where this is right too.
    if magnitude >= smallest_normal::<S>() || S::BIAS == 127 {
        let code = (magnitude >> cut::<S>()).wrapping_sub((127 - S::BIAS) << S::MANTISSA);
        let rest = magnitude & ((1 << cut::<S>()) - 1);
        return (code, rest as f32 / (1u32 << cut::<S>()) as f32);
    }
    let steps = f32::from_bits(magnitude) * f32::from_bits((126 + S::BIAS + S::MANTISSA) << 23);
    (steps as u32, steps - steps.floor())
}

/// The code of a finite value.
#[inline(always)]
pub(super) fn encode_finite<S: Small, R: Round>(v: f32, round: R, index: u64) -> u32 {
    let code = round.float::<S>(v.to_bits() & 0x7fff_ffff, index);
    code.min(S::TOO_LARGE) | (v.to_bits() >> 31) << S::SIGN
}

/// The code of any value.
#[inline(always)]
pub(super) fn encode<S: Small, R: Round>(v: f32, round: R, index: u64) -> u32 {
    let magnitude = v.to_bits() & 0x7fff_ffff;
    let special = if magnitude == INFINITE {
        S::INFINITY
    } else {
        S::NAN
    };
    if magnitude < INFINITE {
        encode_finite::<S, R>(v, round, index)
    } else {
        special | (v.to_bits() >> 31) << S::SIGN
    }
}

/// The value of a code, exactly.
#[inline(always)]
pub(super) fn value<S: Small>(code: u32) -> f32 {
    let magnitude = code & ((1 << S::SIGN) - 1);
    // As an f32 with the same fields the value is too small by a power of two; subnormals come out right too.
    let finite = f32::from_bits(magnitude << cut::<S>()) * f32::from_bits((254 - S::BIAS) << 23);
    let special = if S::HAS_INFINITY && magnitude == S::INFINITY {
        f32::INFINITY
    } else {
        f32::NAN
    };
    let v = if magnitude > S::LARGEST { special } else { finite };
    f32::from_bits(v.to_bits() | (code >> S::SIGN & 1) << 31)
}
