//! What the integer formats have in common: the peak of a block, the scale, rounding, and blocks with values that are not finite.
//!
//! The rules are written down at [`Codec`](super::Codec).

use half::bf16;

/// The bits of infinity: magnitudes from here on are not finite.
pub(super) const INFINITE: u32 = 0x7f80_0000;

/// Set in the scale of a block that uses codes for values that are not finite.
const ESCAPED: u16 = 0x8000;

/// 1.5 · 2²³: adding it rounds to an integer, to nearest even, and leaves that integer in the lowest bits.
const ROUND: f32 = 12_582_912.0;

/// The bits of the largest magnitude. As integers these compare like the values, with NaN above everything.
#[inline(always)]
pub(super) fn peak(values: &[f32]) -> u32 {
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

/// A block's scale, as stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Scale(u16);

impl Scale {
    /// The scale that maps `amax` to `levels`.
    #[inline(always)]
    pub(super) fn of(amax: f32, levels: f32) -> Self {
        let s = bf16::from_f32(amax / levels);
        let bits = if s.to_f32() < f32::MIN_POSITIVE {
            0
        } else if (s.to_f32() * levels).is_infinite() {
            s.to_bits() - 1
        } else {
            s.to_bits()
        };
        Self(bits)
    }

    fn escaped(amax: f32, levels: f32) -> Self {
        Self(Self::of(amax, levels).0 | ESCAPED)
    }

    #[inline(always)]
    pub(super) fn read(bytes: &[u8]) -> Self {
        Self(match bytes {
            [a, b, ..] => u16::from_le_bytes([*a, *b]),
            _ => 0,
        })
    }

    #[inline(always)]
    pub(super) fn write(self, bytes: &mut [u8]) {
        for (to, from) in bytes.iter_mut().zip(self.0.to_le_bytes()) {
            *to = from;
        }
    }

    #[inline(always)]
    pub(super) fn is_escaped(self) -> bool {
        self.0 & ESCAPED != 0
    }

    /// What a code is multiplied with.
    #[inline(always)]
    pub(super) fn value(self) -> f32 {
        f32::from_bits(u32::from(self.0 & !ESCAPED) << 16)
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

/// The code of a scaled value; its lowest bits are the stored ones.
#[inline(always)]
pub(super) fn code(scaled: f32, levels: f32) -> i8 {
    (scaled.clamp(-levels, levels) + ROUND).to_bits() as i8
}

/// Encodes a block with values that are not finite: calls `put` with each code. Returns the scale and how many there are.
#[cold]
pub(super) fn encode_escaped(values: &[f32], levels: i8, mut put: impl FnMut(usize, i8)) -> (Scale, usize) {
    let finite = f32::from(levels - 1);
    let scale = Scale::escaped(finite_peak(values), finite);
    let mut non_finite = 0;
    for (i, &v) in values.iter().enumerate() {
        non_finite += usize::from(!v.is_finite());
        put(
            i,
            if v.is_nan() {
                -levels - 1
            } else if v.is_infinite() {
                if v > 0.0 { levels } else { -levels }
            } else {
                code(v * scale.inverse(), finite)
            },
        );
    }
    (scale, non_finite)
}

/// The value of a code in such a block.
#[inline]
pub(super) fn escaped_value(code: i8, scale: Scale, levels: i8) -> f32 {
    if code == levels {
        f32::INFINITY
    } else if code == -levels {
        f32::NEG_INFINITY
    } else if code == -levels - 1 {
        f32::NAN
    } else {
        f32::from(code) * scale.value()
    }
}

/// `*to` becomes `value`, or is increased by it.
#[inline(always)]
pub(super) fn put<const ADD: bool>(to: &mut f32, value: f32) {
    *to = if ADD { *to + value } else { value };
}
