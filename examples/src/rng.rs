//! The random numbers of the examples: a small generator of our own, the same on every machine for a seed.
//!
//! candle's CPU generator is global and cannot be seeded. Here a generator is made from a key (seed, what for, step …),
//! so that a number depends on nothing that happened before; a replayed step draws what it drew the first time.

/// SplitMix64 (Steele, Lea, Flood 2014): 64 bits of state, passes the usual batteries, needs no warm-up.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// The generator for this key; every part counts, as does their order.
    pub fn keyed(key: &[u64]) -> Self {
        let mut state = 0;
        for part in key {
            state = Self(state ^ part).next_u64();
        }
        Self(state)
    }

    /// The generator for a seed and a name.
    pub fn named(seed: u64, name: &str) -> Self {
        let mut key = vec![seed, name.len() as u64];
        key.extend(name.bytes().map(u64::from));
        Self::keyed(&key)
    }

    /// The next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number in `0..n`, each as likely as another to within n / 2⁶⁴; 0 if `n` is 0.
    pub fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next_u64()) * n as u128) >> 64) as usize
    }

    /// A normally distributed number of mean 0 and deviation 1: twelve uniform 16-bit numbers, summed. The sum is an
    /// integer, so the result has the same bits everywhere (a logarithm would depend on the C library); |x| < 6.
    pub fn normal(&mut self) -> f32 {
        let mut sum = 0i32;
        for _ in 0..3 {
            let bits = self.next_u64();
            for shift in [0, 16, 32, 48] {
                sum += i32::from((bits >> shift) as u16);
            }
        }
        (sum - 6 * 65_535) as f32 / 65_536.0
    }

    /// Puts `items` into a random order (Fisher–Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let other = self.below(last + 1);
            items.swap(last, other);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splitmix_gives_its_published_sequence() {
        let mut r = Rng(1_234_567);
        assert_eq!(r.next_u64(), 6_457_827_717_110_365_317);
        assert_eq!(r.next_u64(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn every_part_of_a_key_and_their_order_count() {
        let first = |key: &[u64]| Rng::keyed(key).next_u64();
        let all = [
            first(&[1, 2]),
            first(&[2, 1]),
            first(&[1, 3]),
            first(&[1, 2, 0]),
            first(&[0, 1, 2]),
        ];
        for (i, a) in all.iter().enumerate() {
            assert!(!all[i + 1..].contains(a), "key {i} repeats");
        }
        assert_ne!(Rng::named(1, "ab").next_u64(), Rng::named(1, "ba").next_u64());
        assert_eq!(first(&[1, 2]), first(&[1, 2]));
    }

    #[test]
    fn normal_numbers_have_mean_zero_and_deviation_one() {
        let mut r = Rng::keyed(&[7]);
        let n = 40_000;
        let (mut sum, mut squares) = (0f64, 0f64);
        for _ in 0..n {
            let x = f64::from(r.normal());
            sum += x;
            squares += x * x;
        }
        let (mean, variance) = (sum / f64::from(n), squares / f64::from(n));
        assert!(
            mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05,
            "mean {mean}, variance {variance}"
        );
    }

    #[test]
    fn below_reaches_every_number_and_never_the_bound() {
        let mut r = Rng::keyed(&[3]);
        let mut seen = [0u32; 7];
        for _ in 0..700 {
            seen[r.below(7)] += 1;
        }
        assert!(seen.iter().all(|&c| c > 50), "{seen:?}");
        assert_eq!(r.below(0), 0);
        let mut order: Vec<u32> = (0..50).collect();
        r.shuffle(&mut order);
        assert_ne!(order, (0..50).collect::<Vec<_>>());
        order.sort_unstable();
        assert_eq!(order, (0..50).collect::<Vec<_>>());
    }
}
