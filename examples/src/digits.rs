//! Handwritten digits and a small classifier: the quick example, seconds instead of minutes.
//!
//! 1,797 images of 8 × 8 pixels are built in. A seed splits them into training and test rows; each replica trains on
//! its own part of the training rows, in batches that are a pure function of (seed, replica, step).

use std::io::Read;

use candle_core::{D, Device, Tensor, Var};
use candle_nn::loss::cross_entropy;
use ftcore::{Error, ErrorKind, Result};
use oxccl_candle::{ParamSet, Segments, candle_error};

use crate::rng::Rng;
use crate::text::even_part;
use crate::weights::Weights;

const DIGITS: &[u8] = include_bytes!("../data/digits.csv.gz");
/// Pixels per image.
pub const FEATURES: usize = 64;
/// Digits 0 to 9.
pub const CLASSES: usize = 10;
const BRIGHTEST: u32 = 16;
/// One image in this many is for testing.
const TEST_PART: usize = 5;

/// Images with their labels.
#[derive(Debug, Clone, PartialEq)]
pub struct Images {
    /// 64 per image, row-major, scaled from 0..=16 to 0..=1.
    pixels: Vec<f32>,
    labels: Vec<u32>,
}

impl Images {
    /// The number of images.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// 64 pixels per image in 0..=1, one image after the other.
    pub fn pixels(&self) -> &[f32] {
        &self.pixels
    }

    /// The digits 0..=9.
    pub fn labels(&self) -> &[u32] {
        &self.labels
    }

    fn select(&self, rows: impl Iterator<Item = usize>) -> Self {
        let mut out = Self {
            pixels: Vec::new(),
            labels: Vec::new(),
        };
        for row in rows {
            let pixels = self.pixels.get(row * FEATURES..(row + 1) * FEATURES);
            if let (Some(pixels), Some(&label)) = (pixels, self.labels.get(row)) {
                out.pixels.extend_from_slice(pixels);
                out.labels.push(label);
            }
        }
        out
    }
}

impl Images {
    /// The images of rank `rank` of `ranks` that share these evenly. Errors: they cannot.
    pub fn part(&self, rank: usize, ranks: usize) -> Result<Self> {
        Ok(self.select(even_part(self.len(), rank, ranks, "images")?))
    }
}

/// The data set, split by a seed.
#[derive(Debug, Clone)]
pub struct Digits {
    seed: u64,
    train: Images,
    test: Images,
}

impl Digits {
    /// The built-in 1,797 images: 1,438 for training, 359 for testing, chosen by `seed`.
    pub fn embedded(seed: u64) -> Result<Self> {
        let mut csv = String::new();
        flate2::read::GzDecoder::new(DIGITS)
            .read_to_string(&mut csv)
            .map_err(|e| {
                Error::new(ErrorKind::Corrupt, format!("the built-in digits: {e}")).with_source(e)
            })?;
        Self::from_csv("the built-in digits", &csv, seed)
    }

    /// Lines of 64 pixels 0..=16 and a label 0..=9, separated by commas. Errors (`Corrupt`) name the line; fewer than
    /// 5 lines are `InvalidArgument`.
    pub fn from_csv(name: &str, csv: &str, seed: u64) -> Result<Self> {
        let mut all = Images {
            pixels: Vec::new(),
            labels: Vec::new(),
        };
        for (number, line) in csv.lines().enumerate() {
            let bad =
                |why: String| Error::new(ErrorKind::Corrupt, format!("{name}, line {}: {why}", number + 1));
            let mut values = line.split(',').map(|v| {
                v.trim()
                    .parse::<u32>()
                    .map_err(|_| bad(format!("'{v}' is no number")))
            });
            let mut row = [0f32; FEATURES];
            for (i, pixel) in row.iter_mut().enumerate() {
                let value = values
                    .next()
                    .ok_or_else(|| bad(format!("{i} values, {} expected", FEATURES + 1)))??;
                if value > BRIGHTEST {
                    return Err(bad(format!("pixel {value} is above {BRIGHTEST}")));
                }
                *pixel = value as f32 / BRIGHTEST as f32;
            }
            let label = values
                .next()
                .ok_or_else(|| bad("there is no label".to_owned()))??;
            if label as usize >= CLASSES || values.next().is_some() {
                return Err(bad(format!(
                    "label {label} is not 0..=9, or more values follow it"
                )));
            }
            all.pixels.extend_from_slice(&row);
            all.labels.push(label);
        }
        if all.len() < TEST_PART {
            return Err(Error::invalid(format!(
                "{name} has {} images; at least {TEST_PART} are needed",
                all.len()
            )));
        }
        let mut order: Vec<usize> = (0..all.len()).collect();
        Rng::named(seed, "digits.split").shuffle(&mut order);
        let (test, train) = order.split_at(all.len() / TEST_PART);
        Ok(Self {
            seed,
            train: all.select(train.iter().copied()),
            test: all.select(test.iter().copied()),
        })
    }

    /// The images to train on.
    pub fn train(&self) -> &Images {
        &self.train
    }

    /// The images never trained on.
    pub fn test(&self) -> &Images {
        &self.test
    }

    /// `size` training images for `replica` of `replicas` at `step`, drawn from that replica's own part (every
    /// `replicas`-th image). Errors: no such replica, or a part without images.
    pub fn batch(&self, replica: usize, replicas: usize, step: u64, size: usize) -> Result<Images> {
        if replica >= replicas || replica >= self.train.len() {
            return Err(Error::invalid(format!(
                "replica {replica} of {replicas} has no part of {} training images",
                self.train.len()
            )));
        }
        let part = (self.train.len() - replica).div_ceil(replicas);
        let mut rng = Rng::keyed(&[self.seed, replica as u64, step]);
        Ok(self
            .train
            .select((0..size).map(|_| replica + replicas * rng.below(part))))
    }
}

/// The shape of a classifier. The default has 4,810 parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::Args)]
pub struct MlpConfig {
    /// Units of a hidden layer.
    #[arg(long, default_value_t = 64)]
    pub hidden: usize,
    /// Hidden layers.
    #[arg(long, default_value_t = 1)]
    pub layers: usize,
}

impl Default for MlpConfig {
    fn default() -> Self {
        Self {
            hidden: 64,
            layers: 1,
        }
    }
}

/// A classifier: 64 pixels, hidden layers with ReLU, 10 digits.
pub struct Mlp {
    params: ParamSet,
    hidden: Vec<(Var, Var)>,
    output: (Var, Var),
}

impl Mlp {
    /// A model with weights drawn from `seed`: equal shapes and seeds give equal bits. Errors: a shape with a zero.
    pub fn new(config: MlpConfig, seed: u64) -> Result<Self> {
        let MlpConfig { hidden, layers } = config;
        if hidden == 0 || layers == 0 {
            return Err(Error::invalid(format!(
                "a classifier needs hidden and layers of at least 1, not {hidden}, {layers}"
            )));
        }
        let mut w = Weights::new(seed);
        let mut layer = |name: &str, inputs: usize, outputs: usize| -> Result<(Var, Var)> {
            let deviation = (2.0 / inputs as f32).sqrt();
            let weight = w.normal(&format!("{name}.weight"), inputs, outputs, deviation)?;
            Ok((weight, w.constant(&format!("{name}.bias"), outputs, 0.0)?))
        };
        let hidden_layers = (0..layers).map(|i| match i {
            0 => layer("hidden", FEATURES, hidden),
            _ => layer(&format!("hidden.{i}"), hidden, hidden),
        });
        let hidden_layers = hidden_layers.collect::<Result<_>>()?;
        let output = layer("output", hidden, CLASSES)?;
        Ok(Self {
            params: w.finish()?,
            hidden: hidden_layers,
            output,
        })
    }

    /// Its parameters. Shared with the model.
    pub fn params(&self) -> &ParamSet {
        &self.params
    }

    /// The same for writing: what is written is what the next forward pass uses.
    pub fn params_mut(&mut self) -> &mut ParamSet {
        &mut self.params
    }

    /// The mean cross entropy of `images`, in nats, as a scalar tensor to call `backward` on. Errors: no images.
    pub fn loss(&self, images: &Images) -> Result<Tensor> {
        self.loss_with(images, Ok)
    }

    /// [`loss`](Self::loss) with a cut behind each hidden layer, for `ParamSet::backward`. Errors: no images.
    pub fn loss_in(&self, segments: &mut Segments, images: &Images) -> Result<Tensor> {
        self.loss_with(images, |x| segments.cut(&x))
    }

    fn loss_with(
        &self,
        images: &Images,
        cut: impl FnMut(Tensor) -> candle_core::Result<Tensor>,
    ) -> Result<Tensor> {
        let run = || {
            cross_entropy(
                &self.logits(images, cut)?,
                &Tensor::from_slice(images.labels(), images.len(), &Device::Cpu)?,
            )
        };
        not_empty(images)?;
        run().map_err(|e| candle_error("the classifier's forward pass", e))
    }

    /// The part of `images` whose digit is recognised, 0..=1. Errors: no images.
    pub fn accuracy(&self, images: &Images) -> Result<f32> {
        not_empty(images)?;
        let run = || self.logits(images, Ok)?.argmax(D::Minus1)?.to_vec1::<u32>();
        let seen = run().map_err(|e| candle_error("the classifier's forward pass", e))?;
        let right = seen.iter().zip(images.labels()).filter(|(a, b)| a == b).count();
        Ok(right as f32 / images.len() as f32)
    }

    fn logits(
        &self,
        images: &Images,
        mut cut: impl FnMut(Tensor) -> candle_core::Result<Tensor>,
    ) -> candle_core::Result<Tensor> {
        let mut x = Tensor::from_slice(images.pixels(), (images.len(), FEATURES), &Device::Cpu)?;
        for (weight, bias) in &self.hidden {
            x = cut(x.matmul(weight)?.broadcast_add(bias)?.relu()?)?;
        }
        let (weight, bias) = &self.output;
        x.matmul(weight)?.broadcast_add(bias)
    }
}

fn not_empty(images: &Images) -> Result<()> {
    if images.is_empty() {
        Err(Error::invalid("the classifier was given no images"))
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sgd_step(model: &mut Mlp, images: &Images, rate: f32) -> f32 {
        let loss = model.loss(images).unwrap();
        let grads = loss.backward().unwrap();
        for i in 0..model.params().len() {
            let step = |w: &mut [f32], g: &[f32]| w.iter_mut().zip(g).for_each(|(w, g)| *w -= rate * g);
            model
                .params_mut()
                .with_slice_mut_and_grad(&grads, i, step)
                .unwrap();
        }
        loss.to_scalar().unwrap()
    }

    #[test]
    fn the_built_in_set_has_1797_images_and_a_seed_splits_them_without_loss() {
        let digits = Digits::embedded(1).unwrap();
        assert_eq!((digits.train().len(), digits.test().len()), (1438, 359));
        assert!(digits.train().pixels().iter().all(|p| (0.0..=1.0).contains(p)));
        let mut per_class = [0; CLASSES];
        for &l in digits.train().labels().iter().chain(digits.test().labels()) {
            per_class[l as usize] += 1;
        }
        assert_eq!(per_class, [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]);
        assert_eq!(Digits::embedded(1).unwrap().test(), digits.test());
        assert_ne!(Digits::embedded(2).unwrap().test(), digits.test());
    }

    #[test]
    fn replicas_draw_from_disjoint_parts_that_together_are_all_training_images() {
        // The first pixel and the label together number 60 images.
        let csv: String = (0..60)
            .map(|i| format!("{}{},{}\n", i / 10, ",0".repeat(63), i % 10))
            .collect();
        let digits = Digits::from_csv("numbered", &csv, 3).unwrap();
        let ids = |images: &Images| -> std::collections::BTreeSet<u32> {
            let firsts = images
                .pixels()
                .chunks(FEATURES)
                .map(|row| (row[0] * BRIGHTEST as f32) as u32);
            firsts
                .zip(images.labels())
                .map(|(tens, ones)| 10 * tens + ones)
                .collect()
        };
        let mut seen = std::collections::BTreeSet::new();
        for r in 0..3 {
            let mine = ids(&digits.batch(r, 3, 0, 2000).unwrap());
            assert!(mine.is_disjoint(&seen), "replica {r}");
            seen.extend(mine);
        }
        assert_eq!(seen, ids(digits.train()));
        assert_eq!(seen.len(), 48);
        assert!(digits.batch(3, 3, 0, 8).is_err());
    }

    #[test]
    fn a_batch_depends_on_seed_replica_and_step_only() {
        let digits = Digits::embedded(4).unwrap();
        let first = digits.batch(0, 2, 5, 16).unwrap();
        digits.batch(1, 2, 9, 16).unwrap();
        assert_eq!(digits.batch(0, 2, 5, 16).unwrap(), first);
        assert_ne!(digits.batch(0, 2, 6, 16).unwrap(), first);
        assert_ne!(digits.batch(1, 2, 5, 16).unwrap(), first);
    }

    #[test]
    fn the_classifier_has_all_gradients_and_learns_to_read_most_digits_in_a_few_hundred_steps() {
        let digits = Digits::embedded(5).unwrap();
        let mut model = Mlp::new(MlpConfig::default(), 5).unwrap();
        assert_eq!(model.params().total(), 4810);
        let grads = model
            .loss(&digits.batch(0, 1, 0, 32).unwrap())
            .unwrap()
            .backward()
            .unwrap();
        model.params().check_grads(&grads).unwrap();
        let before = model.accuracy(digits.test()).unwrap();
        for step in 0..300 {
            sgd_step(&mut model, &digits.batch(0, 1, step, 32).unwrap(), 0.3);
        }
        let after = model.accuracy(digits.test()).unwrap();
        assert!(
            before < 0.4 && after > 0.9,
            "accuracy {before} before, {after} after"
        );
    }

    #[test]
    fn the_same_seed_gives_bit_for_bit_the_same_losses() {
        let digits = Digits::embedded(6).unwrap();
        let run = || {
            let mut model = Mlp::new(MlpConfig::default(), 6).unwrap();
            (0..10)
                .map(|s| sgd_step(&mut model, &digits.batch(0, 1, s, 16).unwrap(), 0.1).to_bits())
                .collect::<Vec<_>>()
        };
        assert_eq!(run(), run());
    }

    #[test]
    fn a_backward_pass_in_segments_has_the_bits_of_one_pass() {
        let images = Digits::embedded(7).unwrap().batch(0, 1, 0, 16).unwrap();
        let config = MlpConfig {
            hidden: 24,
            layers: 3,
        };
        let model = Mlp::new(config, 7).unwrap();
        let whole = model.params().gradients_of(Ok(model.loss(&images).unwrap()));
        let mut segments = Segments::new();
        let loss = model.loss_in(&mut segments, &images).unwrap();
        let mut order = Vec::new();
        let mut parts = vec![Vec::new(); model.params().len()];
        model
            .params()
            .backward(&loss, segments, |i, gradient| {
                order.push(i);
                parts[i] = gradient.iter().map(|v| v.to_bits()).collect();
                Ok(())
            })
            .unwrap();
        assert_eq!(order, [7, 6, 5, 4, 3, 2, 1, 0]);
        let bits = |gradients: Vec<Vec<f32>>| -> Vec<Vec<u32>> {
            gradients
                .iter()
                .map(|g| g.iter().map(|v| v.to_bits()).collect())
                .collect()
        };
        assert_eq!(bits(whole.unwrap()), parts);
        assert!(Mlp::new(MlpConfig { layers: 0, ..config }, 7).is_err());
    }

    #[test]
    fn a_damaged_table_is_refused_with_the_line() {
        let good = format!("{}3\n", "1,".repeat(64)).repeat(5);
        assert!(Digits::from_csv("t", &good, 0).is_ok());
        for (line, why) in [
            (format!("{}3", "1,".repeat(63)), "there is no label"),
            ("1,2".to_owned(), "2 values, 65 expected"),
            (format!("{}3", "17,".repeat(64)), "pixel 17 is above 16"),
            (format!("{}10", "1,".repeat(64)), "label 10"),
            (format!("{}x", "1,".repeat(64)), "'x' is no number"),
            (format!("{}3,4", "1,".repeat(64)), "more values follow"),
        ] {
            let e = Digits::from_csv("t", &format!("{good}{line}\n"), 0).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Corrupt);
            assert!(
                e.to_string().contains("t, line 6") && e.to_string().contains(why),
                "{e}"
            );
        }
        assert_eq!(
            Digits::from_csv("t", "", 0).unwrap_err().kind(),
            ErrorKind::InvalidArgument
        );
    }
}
