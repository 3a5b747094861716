//! OCP MX v1.0: blocks of 32 values in FP8 E4M3 with a power-of-two scale (E8M0). The rules are at [`Codec`](super::Codec).
//!
//! Scaling by a power of two and the way back are exact, so all error is in the one rounding to the element type.

use super::isa::Isa;
use super::rounding::Round;
use super::scale::{self, put};
use super::small::{self, E4M3, INFINITE, Small};
use super::tiles::{Blocks, PART};

const BLOCK: usize = 32;

/// See the module.
pub(super) struct Mx;

/// The exponent of the largest value of the type.
const EMAX: u32 = (E4M3::LARGEST >> E4M3::MANTISSA) - E4M3::BIAS;

/// The value of an E8M0 scale: `2^(code − 127)`; 255 is NaN.
#[inline(always)]
pub(super) fn scale_value(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(0x0040_0000),
        255 => f32::NAN,
        code => f32::from_bits(u32::from(code) << 23),
    }
}

#[inline(always)]
fn encode_block<R: Round>(values: &[f32], (round, first): (R, u64), codes: &mut [u8]) -> (u8, usize) {
    let peak = scale::peak(values);
    let finite = if peak < INFINITE {
        peak
    } else {
        scale::finite_peak(values).to_bits()
    };
    // The biased exponent of the peak is floor(log2) + 127, and so is the scale's code.
    let code = (finite >> 23).saturating_sub(EMAX);
    let inverse = f32::from_bits((254 - code) << 23);
    let n = values.len().min(codes.len());
    let (values, codes) = (&values[..n], &mut codes[..n]);
    if peak < INFINITE {
        for i in 0..n {
            codes[i] = small::encode_finite::<E4M3, R>(values[i] * inverse, round, first + i as u64) as u8;
        }
        return (code as u8, 0);
    }
    for i in 0..n {
        codes[i] = small::encode::<E4M3, R>(values[i] * inverse, round, first + i as u64) as u8;
    }
    (code as u8, scale::non_finite(values))
}

#[inline(always)]
fn decode_block<const ADD: bool>(scale: f32, codes: &[u8], out: &mut [f32]) {
    let n = codes.len().min(out.len());
    let (codes, out) = (&codes[..n], &mut out[..n]);
    for i in 0..n {
        put::<ADD>(&mut out[i], small::value::<E4M3>(u32::from(codes[i])) * scale);
    }
}

impl Blocks for Mx {
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
    fn encode<R: Round>(&self, values: &[f32], at: (R, u64), scales: &mut [u8], codes: &mut [u8]) -> usize {
        let (scale, non_finite) = match (
            <&[f32; BLOCK]>::try_from(values),
            <&mut [u8; BLOCK]>::try_from(&mut *codes),
        ) {
            (Ok(values), Ok(codes)) => encode_block::<R>(values, at, codes),
            _ => encode_block::<R>(values, at, codes),
        };
        if let Some(to) = scales.first_mut() {
            *to = scale;
        }
        non_finite
    }

    #[inline(always)]
    fn decode<const ADD: bool, I: Isa>(&self, scales: &[u8], codes: &[u8], out: &mut [f32]) {
        let scale = scale_value(scales.first().copied().unwrap_or(0));
        match (
            <&[u8; BLOCK]>::try_from(codes),
            <&mut [f32; BLOCK]>::try_from(&mut *out),
        ) {
            (Ok(codes), Ok(out)) => decode_block::<ADD>(scale, codes, out),
            _ => decode_block::<ADD>(scale, codes, out),
        }
    }

    #[inline(always)]
    fn encode_part<R: Round, I: Isa>(
        &self,
        part: &[f32; PART],
        (round, first): (R, u64),
        scales: &mut [u8],
        codes: &mut [u8],
    ) -> bool {
        let (mut peaks, mut inverses) = ([0u32; PART / BLOCK], [0f32; PART / BLOCK]);
        let blocks = part.as_chunks::<BLOCK>().0;
        let highest = I::peaks(blocks, &mut peaks);
        let codes = codes.as_chunks_mut::<BLOCK>().0;
        if highest >= INFINITE || scales.len() != PART / BLOCK || codes.len() != PART / BLOCK {
            return false;
        }
        for k in 0..PART / BLOCK {
            let code = (peaks[k] >> 23).saturating_sub(EMAX);
            scales[k] = code as u8;
            inverses[k] = f32::from_bits((254 - code) << 23);
        }
        for k in 0..PART / BLOCK {
            let (block, inverse, begins) = (&blocks[k], inverses[k], first + (k * BLOCK) as u64);
            for i in 0..BLOCK {
                codes[k][i] =
                    small::encode_finite::<E4M3, R>(block[i] * inverse, round, begins + i as u64) as u8;
            }
        }
        true
    }
}
