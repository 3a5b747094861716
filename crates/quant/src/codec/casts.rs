//! The two 16-bit float types, little-endian, without scales.

use super::scale::put;

/// A 16-bit float type.
pub(super) trait Half {
    /// To nearest even.
    fn bits(v: f32) -> u16;
    /// Exact.
    fn value(bits: u16) -> f32;
}

impl Half for half::f16 {
    #[inline(always)]
    fn bits(v: f32) -> u16 {
        Self::from_f32(v).to_bits()
    }

    #[inline(always)]
    fn value(bits: u16) -> f32 {
        Self::from_bits(bits).to_f32()
    }
}

impl Half for half::bf16 {
    #[inline(always)]
    fn bits(v: f32) -> u16 {
        Self::from_f32(v).to_bits()
    }

    #[inline(always)]
    fn value(bits: u16) -> f32 {
        Self::from_bits(bits).to_f32()
    }
}

/// Appends `values`; returns how many are not finite in the narrow type.
pub(super) fn encode<T: Half>(values: &[f32], out: &mut Vec<u8>) -> usize {
    let mut non_finite = 0;
    out.reserve(2 * values.len());
    out.extend(values.iter().flat_map(|&v| {
        let bits = T::bits(v);
        non_finite += usize::from(!T::value(bits).is_finite());
        bits.to_le_bytes()
    }));
    non_finite
}

/// Decodes as many values as `out` has.
pub(super) fn decode<T: Half, const ADD: bool>(bytes: &[u8], out: &mut [f32]) {
    for (&bits, to) in bytes.as_chunks::<2>().0.iter().zip(out) {
        put::<ADD>(to, T::value(u16::from_le_bytes(bits)));
    }
}
