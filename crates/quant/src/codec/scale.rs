//! What the integer formats have in common: the peak of a block and its bf16 scale, with a mark for blocks that hold values which
//! are not finite. The rules are written down at [`Codec`](super::Codec).

use half::bf16;

/// Set in the scale of a marked block.
const MARKED: u16 = 0x8000;

/// The bits of the largest magnitude. As integers these compare like the values, with NaN above everything.
#[inline(always)]
pub(super) fn peak(values: &[f32]) -> u32 {
    // A loop that is not unrolled by hand becomes one vector loop and one reduction across lanes, in every instruction set.
    values
        .iter()
        .fold(0, |peak, v| peak.max(v.to_bits() & 0x7fff_ffff))
}

/// The largest finite magnitude.
pub(super) fn finite_peak(values: &[f32]) -> f32 {
    values
        .iter()
        .filter(|v| v.is_finite())
        .fold(0.0, |peak, v| v.abs().max(peak))
}

/// How many values are not finite.
pub(super) fn non_finite(values: &[f32]) -> usize {
    values.iter().filter(|v| !v.is_finite()).count()
}

/// A block's scale, as stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Scale(u16);

impl Scale {
    /// Bytes of a stored scale.
    pub(super) const BYTES: usize = 2;

    /// The scale that maps `amax`, which is finite, to `levels`.
    #[inline(always)]
    pub(super) fn of(amax: f32, levels: f32) -> Self {
        // To bf16, to nearest even. The quotient is finite, so its rounding can carry at most into infinity.
        let q = (amax / levels).to_bits();
        let bits = (q + 0x7fff + (q >> 16 & 1)) >> 16;
        let s = f32::from_bits(bits << 16);
        let bits = if s < f32::MIN_POSITIVE {
            0
        } else if (s * levels).is_infinite() {
            bits - 1
        } else {
            bits
        };
        Self(bits as u16)
    }

    /// The scale of a marked block; `levels` of 0 leaves nothing but zero for finite values.
    pub(super) fn marked(amax: f32, levels: f32) -> Self {
        let scale = if levels == 0.0 {
            Self(bf16::ZERO.to_bits())
        } else {
            Self::of(amax, levels)
        };
        Self(scale.0 | MARKED)
    }

    #[inline(always)]
    pub(super) fn read(bytes: &[u8]) -> Self {
        Self(match bytes {
            [a, b, ..] => u16::from_le_bytes([*a, *b]),
            _ => 0,
        })
    }

    /// As stored.
    #[inline(always)]
    pub(super) fn bytes(self) -> [u8; Self::BYTES] {
        self.0.to_le_bytes()
    }

    #[inline(always)]
    pub(super) fn write(self, bytes: &mut [u8]) {
        if let Some(to) = bytes.first_chunk_mut() {
            *to = self.bytes();
        }
    }

    #[inline(always)]
    pub(super) fn is_marked(self) -> bool {
        self.0 & MARKED != 0
    }

    /// What a code is multiplied with.
    #[inline(always)]
    pub(super) fn value(self) -> f32 {
        f32::from_bits(u32::from(self.0 & !MARKED) << 16)
    }

    /// What a value is multiplied with; 0 for a scale of 0.
    #[inline(always)]
    pub(super) fn inverse(self) -> f32 {
        if self.value() == 0.0 {
            0.0
        } else {
            1.0 / self.value()
        }
    }
}

/// `*to` becomes `value`, or is increased by it.
#[inline(always)]
pub(super) fn put<const ADD: bool>(to: &mut f32, value: f32) {
    *to = if ADD { *to + value } else { value };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_is_the_quotient_rounded_to_bf16() {
        for high in 0..0x7f80u32 {
            for low in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let amax = f32::from_bits(high << 16 | low);
                for levels in [127.0f32, 7.0, 64.0, 2.0] {
                    let s = bf16::from_f32(amax / levels);
                    let expected = if s.to_f32() < f32::MIN_POSITIVE {
                        0
                    } else if (s.to_f32() * levels).is_infinite() {
                        s.to_bits() - 1
                    } else {
                        s.to_bits()
                    };
                    assert_eq!(Scale::of(amax, levels).0, expected, "{amax:e} {levels}");
                }
            }
        }
    }
}
