//! The rotation that spreads outliers over a group of 128 values: signs from a seed, then a Hadamard transform.
//!
//! Forward it divides by 128, backward by nothing: no intermediate of a group below 2¹²⁰ overflows, and both factors are exact.

use super::rounding::splitmix64;
use super::simd::Isa;

/// Values per group.
pub(super) const GROUP: usize = 128;

const _: () = assert!(GROUP == 128, "the strides and the factor below are for 128");

/// The signs of one group, as what values are multiplied with on the way there: ±1/128.
pub(super) struct Signs([f32; GROUP]);

impl Signs {
    pub(super) fn new(seed: u64) -> Self {
        let words = u128::from(splitmix64(seed, 0)) | u128::from(splitmix64(seed, 1)) << 64;
        Self(std::array::from_fn(|i| {
            if words >> i & 1 == 1 {
                -1.0 / 128.0
            } else {
                1.0 / 128.0
            }
        }))
    }

    /// `H · (sign · x / 128)`.
    #[inline(always)]
    #[expect(
        clippy::needless_range_loop,
        reason = "plain indices become vector code in every instruction set"
    )]
    pub(super) fn rotate<I: Isa>(&self, values: &mut [f32; GROUP]) {
        for i in 0..GROUP {
            values[i] *= self.0[i];
        }
        I::transform(values);
    }

    /// The inverse of [`rotate`](Self::rotate), up to rounding.
    #[inline(always)]
    #[expect(clippy::needless_range_loop, reason = "as above")]
    pub(super) fn rotate_back<I: Isa>(&self, values: &mut [f32; GROUP]) {
        I::transform(values);
        for i in 0..GROUP {
            values[i] = f32::from_bits(values[i].to_bits() ^ (self.0[i].to_bits() & 0x8000_0000));
        }
    }
}

/// Sums of neighbours go to the first half, differences to the second.
#[inline(always)]
fn stage(from: &[f32; GROUP], to: &mut [f32; GROUP]) {
    for i in 0..GROUP / 2 {
        let (a, b) = (from[2 * i], from[2 * i + 1]);
        to[i] = a + b;
        to[i + GROUP / 2] = a - b;
    }
}

/// Strides 1, 2, … 64. Every stage takes neighbours and thereby moves the lowest bit of all places to the top: after seven of them each
/// value is where it belongs, and none needed to be shuffled within a register.
#[inline(always)]
pub(super) fn transform(values: &mut [f32; GROUP]) {
    let mut other = [0.0; GROUP];
    stage(values, &mut other);
    stage(&other, values);
    stage(values, &mut other);
    stage(&other, values);
    stage(values, &mut other);
    stage(&other, values);
    stage(values, &mut other);
    *values = other;
}

#[cfg(test)]
mod tests {
    use super::super::simd::Reference;
    use super::*;

    #[test]
    fn the_rotation_is_its_definition_and_its_own_inverse() {
        let signs = Signs::new(7);
        let x: [f32; GROUP] = std::array::from_fn(|i| (i as f32 - 50.0) * 0.25);
        let mut y = x;
        signs.rotate::<Reference>(&mut y);
        for (row, y) in y.iter().enumerate() {
            let sum: f64 = (0..GROUP)
                .map(|i| {
                    let h = if (row & i).count_ones() % 2 == 0 {
                        1.0
                    } else {
                        -1.0
                    };
                    let sign = f64::from(signs.0[i].signum());
                    h * sign * f64::from(x[i]) / 128.0
                })
                .sum();
            assert!((sum - f64::from(*y)).abs() < 1e-5, "row {row}: {sum} {y}");
        }
        signs.rotate_back::<Reference>(&mut y);
        for (a, b) in x.iter().zip(y) {
            assert!((a - b).abs() < 1e-4, "{a} {b}");
        }
    }

    #[test]
    fn the_signs_are_those_of_splitmix64() {
        let signs = Signs::new(0).0;
        assert_eq!(
            [signs[0], signs[4], signs[127]].map(f32::signum),
            [-1.0, 1.0, 1.0]
        );
    }
}
