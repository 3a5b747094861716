//! How a value between two codes picks one: the nearest, or at random from a counter, so that a replay gives the same bytes.

use super::small::{self, Small};

/// How a value that lies between two codes is rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Rounding {
    /// To the nearest code, ties to the even one.
    #[default]
    Nearest,
    /// Up with the probability of the distance from the code below, so that the error is zero on average; its mean square is twice
    /// that of [`Nearest`](Self::Nearest).
    ///
    /// Value i of a call compares the upper 24 bits of output `first + i` of splitmix64(`key`), over 2²⁴, with the distance: nothing
    /// else decides, so the same key and values give the same bytes.
    Stochastic {
        /// Chooses the sequence.
        key: u64,
    },
}

/// The `index`-th output of splitmix64.
#[inline(always)]
pub(crate) fn splitmix64(seed: u64, index: u64) -> u64 {
    let z = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The two ways as types, so that the choice is made once per call and not per value.
pub(super) trait Round: Copy {
    /// True if it is to nearest even, whatever the index.
    const NEAREST: bool;

    /// The integer for `v`, of magnitude at most 127.
    fn integer(self, v: f32, index: u64) -> i8;
    /// The code of the finite magnitude with these bits, without limiting it.
    fn float<S: Small>(self, magnitude: u32, index: u64) -> u32;
}

#[derive(Clone, Copy)]
pub(super) struct Nearest;

#[derive(Clone, Copy)]
pub(super) struct Stochastic {
    pub(super) key: u64,
}

/// 1.5 · 2²³: adding it rounds to an integer, to nearest even, and leaves that integer in the lowest bits.
const ROUND: f32 = 12_582_912.0;

impl Round for Nearest {
    const NEAREST: bool = true;

    #[inline(always)]
    fn integer(self, v: f32, _: u64) -> i8 {
        (v + ROUND).to_bits() as i8
    }

    #[inline(always)]
    fn float<S: Small>(self, magnitude: u32, _: u64) -> u32 {
        small::nearest::<S>(magnitude)
    }
}

impl Stochastic {
    /// In [0, 1), a multiple of 2⁻²⁴.
    fn uniform(self, index: u64) -> f32 {
        (splitmix64(self.key, index) >> 40) as f32 * (1.0 / 16_777_216.0)
    }
}

impl Round for Stochastic {
    const NEAREST: bool = false;

    #[inline(always)]
    fn integer(self, v: f32, index: u64) -> i8 {
        let down = v.floor();
        down as i8 + i8::from(self.uniform(index) < v - down)
    }

    #[inline(always)]
    fn float<S: Small>(self, magnitude: u32, index: u64) -> u32 {
        let (down, rest) = small::below::<S>(magnitude);
        down + u32::from(self.uniform(index) < rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_those_of_splitmix64() {
        // The first two outputs for seed 0, as published with the generator.
        assert_eq!(splitmix64(0, 0), 0xE220_A839_7B1D_CDAF);
        assert_eq!(splitmix64(0, 1), 0x6E78_9E6A_A1B9_65F4);
        assert_eq!(
            Stochastic { key: 0 }.uniform(0),
            (0xE2_20A8 as f32) / 16_777_216.0
        );
    }

    #[test]
    fn stochastic_integers_are_right_on_average_and_whole_ones_stay() {
        let round = Stochastic { key: 7 };
        for v in [-126.75f32, -3.5, -0.25, 0.125, 2.875, 126.5] {
            let sum: f64 = (0..100_000).map(|i| f64::from(round.integer(v, i))).sum();
            assert!((sum / 1e5 - f64::from(v)).abs() < 0.01, "{v}: {}", sum / 1e5);
        }
        for v in -127i8..=127 {
            assert_eq!(round.integer(f32::from(v), 5), v);
        }
    }
}
