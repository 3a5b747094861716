//! Test data that is the same everywhere: four distributions from one small generator.

use oxccl_quant::Codec;

/// Values per row of the data with outliers.
const ROW: usize = 2048;

/// splitmix64 with what the distributions need on top.
pub(crate) struct Random(u64);

impl Random {
    /// A generator that depends on `seed` alone.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// In (0, 1).
    fn uniform(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    fn gauss(&mut self) -> f64 {
        (-2.0 * self.uniform().ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos()
    }

    fn laplace(&mut self) -> f64 {
        let u = self.uniform() - 0.5;
        -u.signum() * (1.0 - 2.0 * u.abs()).ln()
    }

    fn student3(&mut self) -> f64 {
        let z = self.gauss();
        let chi2: f64 = (0..3).map(|_| self.gauss().powi(2)).sum();
        z / (chi2 / 3.0).sqrt()
    }
}

/// What gradients may look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Distribution {
    /// Normal.
    Gauss,
    /// Laplace.
    Laplace,
    /// Student's t with 3 degrees of freedom.
    Student3,
    /// Rows of 2048 with log-normal scales (sigma 1); every thousandth column is 20 times as large.
    Mixed,
}

impl Distribution {
    /// All four.
    pub(crate) const ALL: [Self; 4] = [Self::Gauss, Self::Laplace, Self::Student3, Self::Mixed];

    /// `count` values.
    pub(crate) fn values(self, count: usize, random: &mut Random) -> Vec<f32> {
        let mut scale = 1.0;
        (0..count)
            .map(|i| {
                let v = match self {
                    Self::Gauss => random.gauss(),
                    Self::Laplace => random.laplace(),
                    Self::Student3 => random.student3(),
                    Self::Mixed => {
                        if i % ROW == 0 {
                            scale = random.gauss().exp();
                        }
                        let outlier = if i % ROW % 1000 == 500 { 20.0 } else { 1.0 };
                        random.gauss() * scale * outlier
                    }
                };
                v as f32
            })
            .collect()
    }
}

/// The squared error relative to the squared values.
pub(crate) fn nmse(exact: impl IntoIterator<Item = f64>, got: &[f32]) -> f64 {
    let (mut error, mut power) = (0.0, 0.0);
    for (a, b) in exact.into_iter().zip(got) {
        error += (a - f64::from(*b)).powi(2);
        power += a * a;
    }
    error / power
}

/// What one rank's values become on the way to another.
pub(crate) fn through(codec: Codec, values: &[f32]) -> ftcore::Result<Vec<f32>> {
    let mut bytes = Vec::new();
    codec.encode(values, &mut bytes);
    let mut back = vec![0.0; values.len()];
    codec.decode(&bytes, &mut back)?;
    Ok(back)
}

/// The errors of (quantised once, two-phase) for the sum of `count` values over `ranks`.
pub(crate) fn reduced(
    codec: Codec,
    distribution: Distribution,
    count: usize,
    ranks: u64,
) -> ftcore::Result<(f64, f64)> {
    let (mut exact, mut sum) = (vec![0.0f64; count], vec![0.0f32; count]);
    for rank in 0..ranks {
        let values = distribution.values(count, &mut Random::new(1000 + rank));
        for (to, v) in exact.iter_mut().zip(&values) {
            *to += f64::from(*v);
        }
        for (to, v) in sum.iter_mut().zip(through(codec, &values)?) {
            *to += v;
        }
    }
    let two_phase = through(codec, &sum)?;
    Ok((
        nmse(exact.iter().copied(), &sum),
        nmse(exact.iter().copied(), &two_phase),
    ))
}
