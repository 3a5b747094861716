//! A byte-level GPT on candle, small enough to train on one core: pre-norm blocks, learned positions, GELU.
//!
//! A batch of byte windows goes in, the mean next-byte cross entropy in nats comes out as a scalar tensor whose
//! backward pass gives a gradient for every parameter. The parameters are a [`ParamSet`] in layer order.
//!
//! Only operations with a backward pass are used: candle's fused layer norm and `softmax_last_dim` have none.

use candle_core::{D, Device, Tensor, Var};
use candle_nn::{loss::cross_entropy, ops};
use ftcore::{Error, Result};
use oxccl_candle::{ParamSet, Segments, candle_error};

use crate::text::Batch;
use crate::weights::Weights;

/// The number of byte values.
pub const VOCABULARY: usize = 256;
/// Windows per batch that fit the default model.
pub const DEFAULT_ROWS: usize = 8;
const NORM_EPS: f32 = 1e-5;

/// The shape of a model. The default has 1,065,600 parameters; a step on [`DEFAULT_ROWS`] windows takes about 0.13 s on one
/// core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GptConfig {
    /// Width of the residual stream; a multiple of `heads`.
    pub d_model: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Attention heads per block.
    pub heads: usize,
    /// Longest window in bytes.
    pub seq: usize,
}

impl Default for GptConfig {
    fn default() -> Self {
        Self {
            d_model: 128,
            layers: 5,
            heads: 4,
            seq: 64,
        }
    }
}

impl GptConfig {
    fn check(&self) -> Result<()> {
        let Self {
            d_model,
            layers,
            heads,
            seq,
        } = *self;
        if d_model == 0 || layers == 0 || heads == 0 || seq == 0 {
            return Err(Error::invalid(format!(
                "a model needs d_model, layers, heads and seq of at least 1, not {d_model}, {layers}, {heads}, {seq}"
            )));
        }
        if d_model % heads != 0 {
            return Err(Error::invalid(format!(
                "d_model {d_model} is not a multiple of {heads} heads"
            )));
        }
        Ok(())
    }
}

struct Linear {
    weight: Var,
    bias: Var,
}

impl Linear {
    /// `inputs` to `outputs`; the weight has shape `inputs` × `outputs`, so that no product needs a transposed copy.
    fn new(w: &mut Weights, name: &str, inputs: usize, outputs: usize, deviation: f32) -> Result<Self> {
        Ok(Self {
            weight: w.normal(&format!("{name}.weight"), inputs, outputs, deviation)?,
            bias: w.constant(&format!("{name}.bias"), outputs, 0.0)?,
        })
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        x.matmul(&self.weight)?.broadcast_add(&self.bias)
    }
}

struct Norm {
    weight: Var,
    bias: Var,
}

impl Norm {
    fn new(w: &mut Weights, name: &str, width: usize) -> Result<Self> {
        Ok(Self {
            weight: w.constant(&format!("{name}.weight"), width, 1.0)?,
            bias: w.constant(&format!("{name}.bias"), width, 0.0)?,
        })
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        ops::layer_norm_slow(x, &self.weight, &self.bias, NORM_EPS)
    }
}

struct Block {
    norm1: Norm,
    query: Linear,
    key: Linear,
    value: Linear,
    proj: Linear,
    norm2: Norm,
    up: Linear,
    down: Linear,
}

impl Block {
    fn new(w: &mut Weights, index: usize, config: &GptConfig) -> Result<Self> {
        let d = config.d_model;
        let h = format!("h.{index:02}");
        let inner = deviation(d);
        // What adds to the residual stream starts smaller, so that its variance does not grow with depth.
        let depth = (2.0 * config.layers as f32).sqrt();
        Ok(Self {
            norm1: Norm::new(w, &format!("{h}.ln1"), d)?,
            query: Linear::new(w, &format!("{h}.attn.query"), d, d, inner)?,
            key: Linear::new(w, &format!("{h}.attn.key"), d, d, inner)?,
            value: Linear::new(w, &format!("{h}.attn.value"), d, d, inner)?,
            proj: Linear::new(w, &format!("{h}.attn.proj"), d, d, inner / depth)?,
            norm2: Norm::new(w, &format!("{h}.ln2"), d)?,
            up: Linear::new(w, &format!("{h}.mlp.up"), d, 4 * d, inner)?,
            down: Linear::new(w, &format!("{h}.mlp.down"), 4 * d, d, deviation(4 * d) / depth)?,
        })
    }

    /// `x` is (rows · seq) × d_model.
    fn forward(&self, x: &Tensor, shape: Heads, mask: &Tensor) -> candle_core::Result<Tensor> {
        let n = self.norm1.forward(x)?;
        let q = shape.split(&self.query.forward(&n)?)?;
        let k = shape.split(&self.key.forward(&n)?)?;
        let v = shape.split(&self.value.forward(&n)?)?;
        let scale = 1.0 / (shape.head_width as f64).sqrt();
        let scores = (q * scale)?.matmul(&k.t()?)?.broadcast_add(mask)?;
        let mixed = shape.join(&ops::softmax(&scores, D::Minus1)?.matmul(&v)?)?;
        let x = (x + self.proj.forward(&mixed)?)?;
        let n = self.norm2.forward(&x)?;
        &x + self.down.forward(&self.up.forward(&n)?.gelu()?)?
    }
}

fn deviation(inputs: usize) -> f32 {
    0.5 / (inputs as f32).sqrt()
}

#[derive(Clone, Copy)]
struct Heads {
    rows: usize,
    seq: usize,
    heads: usize,
    head_width: usize,
}

impl Heads {
    /// (rows · seq) × d_model to rows × heads × seq × head_width.
    fn split(self, x: &Tensor) -> candle_core::Result<Tensor> {
        x.reshape((self.rows, self.seq, self.heads, self.head_width))?
            .transpose(1, 2)?
            .contiguous()
    }

    /// The inverse of `split`.
    fn join(self, x: &Tensor) -> candle_core::Result<Tensor> {
        x.transpose(1, 2)?
            .reshape((self.rows * self.seq, self.heads * self.head_width))
    }
}

/// The model: its variables, and the forward pass over them.
pub struct Gpt {
    config: GptConfig,
    params: ParamSet,
    token: Var,
    position: Var,
    blocks: Vec<Block>,
    norm: Norm,
    head: Linear,
    mask: Tensor,
}

impl Gpt {
    /// A model with weights drawn from `seed`: equal configuration and seed give equal bits. Errors: a configuration
    /// with a zero, or a `d_model` that the heads do not divide.
    pub fn new(config: GptConfig, seed: u64) -> Result<Self> {
        config.check()?;
        let (d, seq) = (config.d_model, config.seq);
        let mut w = Weights::new(seed);
        let token = w.normal("token.weight", VOCABULARY, d, 0.1)?;
        let position = w.normal("position.weight", seq, d, 0.1)?;
        let blocks = (0..config.layers)
            .map(|i| Block::new(&mut w, i, &config))
            .collect::<Result<_>>()?;
        let norm = Norm::new(&mut w, "ln_f", d)?;
        let head = Linear::new(&mut w, "head", d, VOCABULARY, 0.5 * deviation(d))?;
        let mask = (0..seq * seq)
            .map(|i| if i % seq > i / seq { f32::NEG_INFINITY } else { 0.0 })
            .collect();
        let mask = Tensor::from_vec(mask, (seq, seq), &Device::Cpu)
            .map_err(|e| candle_error("making the mask", e))?;
        Ok(Self {
            config,
            params: w.finish()?,
            token,
            position,
            blocks,
            norm,
            head,
            mask,
        })
    }

    /// The shape it was made with.
    pub fn config(&self) -> &GptConfig {
        &self.config
    }

    /// Its parameters in layer order: embeddings, blocks, head. Shared with the model.
    pub fn params(&self) -> &ParamSet {
        &self.params
    }

    /// The same for writing: what is written is what the next forward pass uses.
    pub fn params_mut(&mut self) -> &mut ParamSet {
        &mut self.params
    }

    /// The mean cross entropy per byte of `batch`, in nats, as a scalar tensor to call `backward` on. Errors: a window
    /// longer than the model's, an empty batch.
    pub fn loss(&self, batch: &Batch) -> Result<Tensor> {
        self.loss_with(batch, Ok)
    }

    /// [`loss`](Self::loss) with a cut before each block and behind the last, for `ParamSet::backward`. Errors: as there.
    pub fn loss_in(&self, segments: &mut Segments, batch: &Batch) -> Result<Tensor> {
        self.loss_with(batch, |x| segments.cut(&x))
    }

    fn loss_with(
        &self,
        batch: &Batch,
        cut: impl FnMut(Tensor) -> candle_core::Result<Tensor>,
    ) -> Result<Tensor> {
        if batch.seq() > self.config.seq || batch.rows() == 0 {
            return Err(Error::invalid(format!(
                "a batch of {} windows of {} bytes does not fit a model for windows of up to {} bytes",
                batch.rows(),
                batch.seq(),
                self.config.seq
            )));
        }
        self.forward(batch, cut)
            .map_err(|e| candle_error("the model's forward pass", e))
    }

    /// The value of [`Gpt::loss`], averaged over `batches`; nothing is trained. Errors: as there, or no batch.
    pub fn mean_loss(&self, batches: &[Batch]) -> Result<f32> {
        let mut sum = 0f64;
        for b in batches {
            let loss = self
                .loss(b)?
                .to_scalar::<f32>()
                .map_err(|e| candle_error("reading the loss", e))?;
            sum += f64::from(loss);
        }
        if batches.is_empty() {
            return Err(Error::invalid("the mean loss of no batch is not defined"));
        }
        Ok((sum / batches.len() as f64) as f32)
    }

    fn forward(
        &self,
        batch: &Batch,
        mut cut: impl FnMut(Tensor) -> candle_core::Result<Tensor>,
    ) -> candle_core::Result<Tensor> {
        let (rows, seq, d) = (batch.rows(), batch.seq(), self.config.d_model);
        let shape = Heads {
            rows,
            seq,
            heads: self.config.heads,
            head_width: d / self.config.heads,
        };
        let tokens = Tensor::from_slice(batch.tokens(), rows * seq, &Device::Cpu)?;
        let targets = Tensor::from_slice(batch.targets(), rows * seq, &Device::Cpu)?;
        let mask = self.mask.narrow(0, 0, seq)?.narrow(1, 0, seq)?;
        let x = self.token.index_select(&tokens, 0)?.reshape((rows, seq, d))?;
        let mut x = cut(x
            .broadcast_add(&self.position.narrow(0, 0, seq)?)?
            .reshape((rows * seq, d))?)?;
        for block in &self.blocks {
            x = cut(block.forward(&x, shape, &mask)?)?;
        }
        cross_entropy(&self.head.forward(&self.norm.forward(&x)?)?, &targets)
    }
}

#[cfg(test)]
mod tests {
    use diloco::{FragmentPlan, Pattern};

    use super::*;

    const TINY: GptConfig = GptConfig {
        d_model: 8,
        layers: 2,
        heads: 2,
        seq: 6,
    };

    fn tiny_batch() -> Batch {
        let text = b"in the beginning ";
        Batch::from_windows(&[&text[0..7], &text[4..11], &text[9..16]]).unwrap()
    }

    fn value(loss: &Tensor) -> f32 {
        loss.to_scalar::<f32>().unwrap()
    }

    fn sgd_step(model: &mut Gpt, batch: &Batch, rate: f32) -> f32 {
        let loss = model.loss(batch).unwrap();
        let grads = loss.backward().unwrap();
        for i in 0..model.params().len() {
            let step = |w: &mut [f32], g: &[f32]| w.iter_mut().zip(g).for_each(|(w, g)| *w -= rate * g);
            model
                .params_mut()
                .with_slice_mut_and_grad(&grads, i, step)
                .unwrap();
        }
        value(&loss)
    }

    #[test]
    fn every_parameter_of_the_model_gets_a_gradient_that_is_not_all_zero() {
        let model = Gpt::new(TINY, 1).unwrap();
        let grads = model.loss(&tiny_batch()).unwrap().backward().unwrap();
        model.params().check_grads(&grads).unwrap();
        for (i, name) in model.params().names().enumerate() {
            let largest = model
                .params()
                .with_grad(&grads, i, |g| g.iter().fold(0f32, |m, x| m.max(x.abs())))
                .unwrap();
            // A constant added to every key cancels in the softmax, so that gradient is zero but for rounding.
            assert!(
                largest > 1e-6 || name.ends_with("attn.key.bias"),
                "{name}: {largest}"
            );
            assert!(largest.is_finite(), "{name}");
        }
    }

    #[test]
    fn a_backward_pass_in_segments_has_the_bits_of_one_pass() {
        let (model, batch) = (Gpt::new(TINY, 1).unwrap(), tiny_batch());
        let whole = model.params().gradients_of(Ok(model.loss(&batch).unwrap()));
        let mut segments = Segments::new();
        let loss = model.loss_in(&mut segments, &batch).unwrap();
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
        assert!(
            order.is_sorted_by(|a, b| a > b),
            "the last layer first: {order:?}"
        );
        for (i, (whole, part)) in whole.unwrap().iter().zip(&parts).enumerate() {
            let whole: Vec<u32> = whole.iter().map(|v| v.to_bits()).collect();
            assert_eq!(whole, *part, "{}", model.params().name(i));
        }
    }

    #[test]
    fn gradients_agree_with_finite_differences() {
        let mut model = Gpt::new(TINY, 2).unwrap();
        let batch = tiny_batch();
        let grads = model.loss(&batch).unwrap().backward().unwrap();
        for name in [
            "token.weight",
            "position.weight",
            "h.00.attn.query.weight",
            "h.01.ln1.weight",
            "h.01.mlp.down.weight",
            "head.bias",
        ] {
            let i = model.params().index_of(name).unwrap();
            let (at, grad) = model
                .params()
                .with_grad(&grads, i, |g| {
                    let at = (0..g.len())
                        .max_by(|&a, &b| g[a].abs().total_cmp(&g[b].abs()))
                        .unwrap();
                    (at, g[at])
                })
                .unwrap();
            let eps = 5e-3f32;
            let mut loss_at = |shift: f32| {
                model.params_mut().with_slice_mut(i, |w| w[at] += shift).unwrap();
                let loss = value(&model.loss(&batch).unwrap());
                model.params_mut().with_slice_mut(i, |w| w[at] -= shift).unwrap();
                loss
            };
            let difference = (loss_at(eps) - loss_at(-eps)) / (2.0 * eps);
            let allowed = 1e-3 + 0.02 * grad.abs();
            assert!(
                (difference - grad).abs() < allowed,
                "{name}[{at}]: {difference} by difference, {grad} by backward"
            );
        }
    }

    #[test]
    fn the_first_loss_is_that_of_guessing_and_twenty_steps_lower_it() {
        let mut model = Gpt::new(TINY, 3).unwrap();
        let batch = tiny_batch();
        let losses: Vec<f32> = (0..20).map(|_| sgd_step(&mut model, &batch, 0.3)).collect();
        assert!((losses[0] - (VOCABULARY as f32).ln()).abs() < 0.3, "{losses:?}");
        assert!(losses[19] < losses[0] - 1.0, "{losses:?}");
    }

    #[test]
    fn the_same_seed_gives_bit_for_bit_the_same_losses_and_another_seed_does_not() {
        let run = |seed| {
            let mut model = Gpt::new(TINY, seed).unwrap();
            (0..5)
                .map(|_| sgd_step(&mut model, &tiny_batch(), 0.1).to_bits())
                .collect::<Vec<_>>()
        };
        assert_eq!(run(5), run(5));
        assert_ne!(run(5), run(6));
    }

    #[test]
    fn a_later_byte_does_not_influence_the_loss_of_an_earlier_one() {
        let model = Gpt::new(TINY, 4).unwrap();
        let loss = |window: &[u8]| value(&model.loss(&Batch::from_windows(&[window]).unwrap()).unwrap());
        // Of 6 positions, 5 are those of the prefix; what is left over is how unlikely the last byte is. If a position
        // saw bytes after it, the first 5 would change with the length and the probabilities would not sum to 1.
        let prefix = loss(b"abcdef");
        let last = |byte: u8| 6.0 * loss(&[b'a', b'b', b'c', b'd', b'e', b'f', byte]) - 5.0 * prefix;
        let sum: f64 = (0..=255).map(|byte| f64::from(-last(byte)).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-4, "{sum}");
    }

    #[test]
    fn the_default_model_has_the_stated_size_and_gets_all_its_gradients() {
        let config = GptConfig::default();
        let model = Gpt::new(config, 0).unwrap();
        assert_eq!(model.params().total(), 1_065_600);
        let window = vec![b'a'; config.seq + 1];
        let grads = model
            .loss(&Batch::from_windows(&[&window]).unwrap())
            .unwrap()
            .backward()
            .unwrap();
        model.params().check_grads(&grads).unwrap();
    }

    #[test]
    fn layers_follow_the_names_and_the_forward_pass() {
        let model = Gpt::new(TINY, 0).unwrap();
        let layers = 2 + TINY.layers;
        let plan = |count| FragmentPlan::by_name(model.params(), count, Pattern::Sequential);
        let sorted: Vec<usize> = {
            let plan = plan(layers).unwrap();
            (0..layers).flat_map(|f| plan.members(f).to_vec()).collect()
        };
        assert!(sorted.is_sorted());
        assert!(plan(layers + 1).is_err());
    }

    #[test]
    fn impossible_shapes_and_batches_are_refused_with_the_numbers() {
        let e = Gpt::new(
            GptConfig {
                d_model: 10,
                heads: 4,
                ..TINY
            },
            0,
        )
        .err()
        .unwrap();
        assert!(
            e.to_string().contains("d_model 10 is not a multiple of 4 heads"),
            "{e}"
        );
        assert!(Gpt::new(GptConfig { layers: 0, ..TINY }, 0).is_err());
        let model = Gpt::new(TINY, 0).unwrap();
        let e = model
            .loss(&Batch::from_windows(&[b"12345678"]).unwrap())
            .unwrap_err();
        assert!(e.to_string().contains("windows of 7 bytes"), "{e}");
        assert!(model.mean_loss(&[]).is_err());
    }
}
