//! The rotation that spreads outliers over a group of 128 values: signs from a seed, then a Hadamard transform.
//!
//! Forward it divides by 128, backward by nothing: no intermediate of a group below 2¹²⁰ overflows, and both factors are exact.

use super::rounding::splitmix64;
use super::scale;

/// Values per group.
pub(super) const GROUP: usize = 128;

const _: () = assert!(GROUP == 128, "the strides and the factor below are for 128");

/// The bits of 2¹²⁰. Groups with larger values are not rotated, so that sums cannot overflow.
pub(super) const TOO_LARGE: u32 = (120 + 127) << 23;

/// The bits of 2¹¹². Rotated, a group with a value from 2¹²⁰ on has one of at least 2¹¹³ but for rounding, or something not finite: the values are
/// sums of all 128 rotated ones, with signs. So peaks below this say that a group fits, and the values need not be looked at.
const SURELY_FITS: u32 = (112 + 127) << 23;

/// True if no value of the group `from`, with these peaks after the rotation, is [`TOO_LARGE`].
#[inline(always)]
pub(super) fn fits(from: &[f32; GROUP], peaks: &[u32; 2]) -> bool {
    peaks[0].max(peaks[1]) < SURELY_FITS || fits_exactly(from)
}

#[cold]
fn fits_exactly(from: &[f32; GROUP]) -> bool {
    scale::peak(from) < TOO_LARGE
}

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

    /// The factors themselves.
    pub(super) fn factors(&self) -> &[f32; GROUP] {
        &self.0
    }
}

/// `to = H · (sign · from / 128)` and the peaks of its halves; false if a value is [`TOO_LARGE`] for that.
#[inline(always)]
pub(super) fn rotate(
    signs: &Signs,
    from: &[f32; GROUP],
    to: &mut [f32; GROUP],
    peaks: &mut [u32; 2],
) -> bool {
    for i in 0..GROUP {
        to[i] = from[i] * signs.factors()[i];
    }
    transform(to);
    let (first, second) = to.split_at(GROUP / 2);
    *peaks = [scale::peak(first), scale::peak(second)];
    fits_exactly(from)
}

/// The inverse of [`rotate`], up to rounding.
#[inline(always)]
#[expect(
    clippy::needless_range_loop,
    reason = "plain indices become vector code in every instruction set"
)]
pub(super) fn rotate_back(signs: &Signs, from: &[f32; GROUP], to: &mut [f32; GROUP]) {
    *to = *from;
    transform(to);
    for i in 0..GROUP {
        to[i] = f32::from_bits(to[i].to_bits() ^ (signs.factors()[i].to_bits() & 0x8000_0000));
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
fn transform(values: &mut [f32; GROUP]) {
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
    use super::super::isa::Isa;
    use super::super::simd::{self, Simd};
    use super::*;

    #[test]
    fn the_rotation_is_its_definition_and_its_own_inverse() {
        let signs = Signs::new(7);
        let x: [f32; GROUP] = std::array::from_fn(|i| (i as f32 - 50.0) * 0.25);
        let (mut y, mut peaks) = ([0.0; GROUP], [0; 2]);
        assert!(rotate(&signs, &x, &mut y, &mut peaks));
        let most = |half: &[f32]| half.iter().fold(0f32, |most, v| most.max(v.abs()));
        assert_eq!(peaks.map(f32::from_bits), [most(&y[..64]), most(&y[64..])]);
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
        let mut back = [0.0; GROUP];
        rotate_back(&signs, &y, &mut back);
        for (a, b) in x.iter().zip(back) {
            assert!((a - b).abs() < 1e-4, "{a} {b}");
        }
    }

    #[test]
    fn a_group_with_a_value_that_is_too_large_is_told_from_others_in_every_instruction_set() {
        let fits = |x: f32| {
            let answers = Simd::available().into_iter().map(|simd| simd::run(simd, Fits(x)));
            let answers: Vec<bool> = answers.collect();
            assert!(answers.iter().all(|a| *a == answers[0]), "{x:e}: {answers:?}");
            answers[0]
        };
        let limit = f32::from_bits(TOO_LARGE);
        assert!(fits(limit.next_down()) && fits(-limit.next_down()) && fits(0.0));
        assert!(
            !fits(limit) && !fits(-limit) && !fits(f32::NEG_INFINITY) && !fits(f32::NAN) && !fits(-f32::NAN)
        );
        // Between what surely fits and what does not: looked at value by value.
        assert!(fits(limit / 8.0) && !fits(limit * 8.0) && !fits(f32::MAX));
    }

    #[test]
    fn a_value_that_is_too_large_shows_in_the_peaks_wherever_it_is_and_whatever_is_beside_it() {
        let limit = f32::from_bits(TOO_LARGE);
        for seed in 0..20 {
            let signs = Signs::new(seed);
            for at in 0..GROUP {
                // Alone, among small values, and among as large ones that cancel what they can.
                let patterns: [fn(usize) -> f32; 4] = [
                    |_| 0.0,
                    |i| (i as f32).sin() * 1e30,
                    |_| 0.999,
                    |i| if i.count_ones() % 2 == 0 { 0.999 } else { -0.999 },
                ];
                for (k, beside) in patterns.into_iter().enumerate() {
                    let size = if k < 2 { 1.0 } else { limit };
                    let mut from: [f32; GROUP] = std::array::from_fn(|i| beside(i) * size);
                    from[at] = limit;
                    let mut peaks = [0; 2];
                    rotate(&signs, &from, &mut [0.0; GROUP], &mut peaks);
                    assert!(
                        peaks[0].max(peaks[1]) >= SURELY_FITS + (1 << 22),
                        "seed {seed}, place {at}, pattern {k}: {peaks:x?}"
                    );
                }
            }
        }
    }

    /// A group of ones with this value in it.
    struct Fits(f32);

    impl simd::Pass for Fits {
        type Output = bool;

        #[inline(always)]
        fn run<I: Isa>(self) -> bool {
            let mut from = [1.0; GROUP];
            from[77] = self.0;
            I::rotate(&Signs::new(7), &from, &mut [0.0; GROUP], &mut [0; 2])
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
