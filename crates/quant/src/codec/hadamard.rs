//! The rotation that spreads outliers over a group of 128 values: signs from a seed, then a Hadamard transform.
//!
//! Forward it divides by 128, backward by nothing: no intermediate of a group below 2¹²⁰ overflows, and both factors are exact.

/// Values per group.
pub(super) const GROUP: usize = 128;

const _: () = assert!(GROUP == 128, "the strides and the factor below are for 128");

/// The sign bits of one group.
pub(super) struct Signs([u32; GROUP]);

/// The `index`-th output of splitmix64.
fn splitmix64(seed: u64, index: u64) -> u64 {
    let z = seed.wrapping_add((index + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

impl Signs {
    pub(super) fn new(seed: u64) -> Self {
        let words = u128::from(splitmix64(seed, 0)) | u128::from(splitmix64(seed, 1)) << 64;
        let mut signs = [0; GROUP];
        for (i, sign) in signs.iter_mut().enumerate() {
            *sign = u32::from(words >> i & 1 == 1) << 31;
        }
        Self(signs)
    }

    fn flip(&self, values: &mut [f32; GROUP]) {
        for (v, sign) in values.iter_mut().zip(&self.0) {
            *v = f32::from_bits(v.to_bits() ^ sign);
        }
    }

    /// `H · (sign · x / 128)`.
    pub(super) fn rotate(&self, values: &mut [f32; GROUP]) {
        for v in values.iter_mut() {
            *v *= 1.0 / 128.0;
        }
        self.flip(values);
        transform(values);
    }

    /// The inverse of [`rotate`](Self::rotate), up to rounding.
    pub(super) fn rotate_back(&self, values: &mut [f32; GROUP]) {
        transform(values);
        self.flip(values);
    }
}

#[inline(always)]
fn stage<const STRIDE: usize, const PAIR: usize>(values: &mut [f32; GROUP]) {
    for pair in values.as_chunks_mut::<PAIR>().0 {
        let (low, high) = pair.split_at_mut(STRIDE);
        for (a, b) in low.iter_mut().zip(high) {
            (*a, *b) = (*a + *b, *a - *b);
        }
    }
}

fn transform(values: &mut [f32; GROUP]) {
    stage::<1, 2>(values);
    stage::<2, 4>(values);
    stage::<4, 8>(values);
    stage::<8, 16>(values);
    stage::<16, 32>(values);
    stage::<32, 64>(values);
    stage::<64, 128>(values);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rotation_is_its_definition_and_its_own_inverse() {
        let signs = Signs::new(7);
        let x: [f32; GROUP] = std::array::from_fn(|i| (i as f32 - 50.0) * 0.25);
        let mut y = x;
        signs.rotate(&mut y);
        for (row, y) in y.iter().enumerate() {
            let sum: f64 = (0..GROUP)
                .map(|i| {
                    let h = if (row & i).count_ones() % 2 == 0 {
                        1.0
                    } else {
                        -1.0
                    };
                    let sign = if signs.0[i] == 0 { 1.0 } else { -1.0 };
                    h * sign * f64::from(x[i]) / 128.0
                })
                .sum();
            assert!((sum - f64::from(*y)).abs() < 1e-5, "row {row}: {sum} {y}");
        }
        signs.rotate_back(&mut y);
        for (a, b) in x.iter().zip(y) {
            assert!((a - b).abs() < 1e-4, "{a} {b}");
        }
    }

    #[test]
    fn the_signs_are_those_of_splitmix64() {
        // The first two outputs for seed 0, as published with the generator.
        assert_eq!(splitmix64(0, 0), 0xE220_A839_7B1D_CDAF);
        assert_eq!(splitmix64(0, 1), 0x6E78_9E6A_A1B9_65F4);
        let signs = Signs::new(0).0;
        assert_eq!([signs[0] >> 31, signs[4] >> 31, signs[127] >> 31], [1, 0, 0]);
    }
}
