//! A backward pass in segments, so that the gradients of the last layers travel while those of the first ones are still computed.
//!
//! candle's `backward` gives all gradients at its end. A forward pass that is cut between its layers is a chain of graphs instead: behind
//! a cut begins a new one, with a copy of what came in as its variable. The backward pass goes through them from the last to the first, and
//! what the variable of one gets is fed into the output of the one before. The bits are those of the pass in one go: the same operations on the
//! same values, and what is fed in is not computed with.

use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor, Var};
use ftcore::{Error, ErrorKind, Result};

use crate::gradients::none_missing;
use crate::{ParamSet, candle_error};

/// The cuts of one forward pass.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, VarBuilder, VarMap, linear, loss::mse};
/// use oxccl_candle::{ParamSet, Segments};
///
/// let (map, cpu) = (VarMap::new(), &Device::Cpu);
/// let vars = VarBuilder::from_varmap(&map, DType::F32, cpu);
/// let (first, last) = (linear(2, 3, vars.pp("first"))?, linear(3, 1, vars.pp("last"))?);
/// let params = ParamSet::from_var_map(&map)?;
/// let (x, y) = (Tensor::new(&[[1.0_f32, 2.0]], cpu)?, Tensor::new(&[[3.0_f32]], cpu)?);
///
/// let mut segments = Segments::new();
/// let hidden = segments.cut(&first.forward(&x)?.relu()?)?;
/// let loss = mse(&last.forward(&hidden)?, &y)?;
/// let mut came = Vec::new();
/// params.backward(&loss, segments, |i, gradient| {
///     came.push((params.name(i).to_string(), gradient.len())); // in a training loop: sink.push(i, gradient)
///     Ok(())
/// })?;
/// let came: Vec<(&str, usize)> = came.iter().map(|(name, n)| (name.as_str(), *n)).collect();
/// assert_eq!(came, [("last.weight", 3), ("last.bias", 1), ("first.weight", 6), ("first.bias", 3)]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Default)]
pub struct Segments {
    cuts: Vec<Cut>,
}

/// What one segment gives, and the variable that the next one begins with.
#[derive(Debug)]
struct Cut {
    output: Tensor,
    input: Var,
}

impl Segments {
    /// A forward pass that begins.
    pub fn new() -> Self {
        Self::default()
    }

    /// Ends a segment with `output`; the next one goes on with what this gives, and with nothing else of the segments before: a
    /// value that goes around a cut takes its part of the gradient around it, too, which is an error in [`ParamSet::backward`].
    ///
    /// Errors: candle's.
    pub fn cut(&mut self, output: &Tensor) -> candle_core::Result<Tensor> {
        // A variable's own copy; `detach` alone would not be followed back.
        let input = Var::from_tensor(&output.detach())?;
        let next = input.as_tensor().clone();
        self.cuts.push(Cut {
            output: output.clone(),
            input,
        });
        Ok(next)
    }
}

impl ParamSet {
    /// The backward pass of `loss` through all segments, the last first. `push(i, gradient)` gets the gradient of parameter `i`, in its element
    /// order, as soon as its segment is through; of one segment the last parameter's first.
    ///
    /// Errors: candle's (`Backend`); those of `push`; as in [`ParamSet::with_grad`]. `InvalidState`, naming the parameter, if one got no gradient, or
    /// one in two segments: it is used in both, or a value went around a cut.
    pub fn backward(
        &self,
        loss: &Tensor,
        segments: Segments,
        mut push: impl FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let mut came = vec![false; self.len()];
        let mut segment = |from: &Tensor| -> Result<GradStore> {
            let grads = from
                .backward()
                .map_err(|e| candle_error("the backward pass", e))?;
            for (i, came) in came.iter_mut().enumerate().rev() {
                if self.var(i).is_none_or(|var| grads.get(var).is_none()) {
                    continue;
                }
                if std::mem::replace(came, true) {
                    let text = format!(
                        "parameter '{}' got a gradient in two segments: it is used in both, or a value went around a cut. Cut in another place",
                        self.name(i)
                    );
                    return Err(Error::new(ErrorKind::InvalidState, text));
                }
                self.with_grad(&grads, i, |gradient| push(i, gradient))??;
            }
            Ok(grads)
        };
        let mut grads = segment(loss)?;
        for Cut { output, input } in segments.cuts.into_iter().rev() {
            // Nothing behind the cut depends on it: then nothing before it is to be learnt either.
            let Some(gradient) = grads.remove(&input) else {
                break;
            };
            let fed = output
                .apply_op1(Feed(gradient))
                .map_err(|e| candle_error("a segment's output", e))?;
            grads = segment(&fed)?;
        }
        let missing: Vec<&str> = self
            .names()
            .zip(came)
            .filter(|(_, came)| !came)
            .map(|(name, _)| name)
            .collect();
        none_missing(&missing)
    }
}

/// Has the gradient of its argument at once. Its own value is never used.
struct Feed(Tensor);

impl CustomOp1 for Feed {
    fn name(&self) -> &'static str {
        "oxccl-feed-gradient"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(())))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(Some(self.0.clone()))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};
    use candle_nn::{Linear, Module, VarBuilder, VarMap, linear, loss::mse};

    use super::*;

    /// Three layers, with names that do not sort in their order.
    struct Net {
        layers: [Linear; 3],
        params: ParamSet,
        x: Tensor,
        y: Tensor,
    }

    fn net() -> Net {
        let (map, cpu) = (VarMap::new(), &Device::Cpu);
        let vars = VarBuilder::from_varmap(&map, DType::F32, cpu);
        let layer = |name: &str, n, m| linear(n, m, vars.pp(name)).unwrap();
        let layers = [layer("c", 5, 7), layer("a", 7, 7), layer("b", 7, 2)];
        Net {
            layers,
            params: ParamSet::from_var_map(&map).unwrap(),
            x: Tensor::randn(0f32, 1.0, (4, 5), cpu).unwrap(),
            y: Tensor::randn(0f32, 1.0, (4, 2), cpu).unwrap(),
        }
    }

    impl Net {
        /// The middle layer has a residual around it.
        fn loss(&self, mut cut: impl FnMut(Tensor) -> Tensor) -> Tensor {
            let [c, a, b] = &self.layers;
            let h = cut(c.forward(&self.x).unwrap().gelu().unwrap());
            let h = cut((&h + a.forward(&h).unwrap().tanh().unwrap()).unwrap());
            mse(&b.forward(&h).unwrap(), &self.y).unwrap()
        }
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|v| v.to_bits()).collect()
    }

    #[test]
    fn gradients_come_from_the_last_segment_to_the_first_with_the_bits_of_one_pass() {
        let net = net();
        let whole = net.params.gradients_of(Ok(net.loss(|h| h))).unwrap();
        let mut segments = Segments::new();
        let loss = net.loss(|h| segments.cut(&h).unwrap());
        let (mut order, mut parts) = (String::new(), vec![Vec::new(); net.params.len()]);
        net.params
            .backward(&loss, segments, |i, gradient| {
                order.extend(net.params.name(i).chars().next());
                parts[i] = gradient.to_vec();
                Ok(())
            })
            .unwrap();
        assert_eq!(order, "bbaacc");
        for (i, (whole, part)) in whole.iter().zip(&parts).enumerate() {
            assert!(whole.iter().any(|v| *v != 0.0));
            assert_eq!(bits(whole), bits(part), "{}", net.params.name(i));
        }
    }

    #[test]
    fn a_value_that_goes_around_a_cut_is_an_error_that_names_a_parameter() {
        let net = net();
        let [c, a, b] = &net.layers;
        let mut segments = Segments::new();
        let h = c.forward(&net.x).unwrap();
        let cut = segments.cut(&h).unwrap();
        let h = (&h + a.forward(&cut).unwrap()).unwrap();
        let loss = mse(&b.forward(&h).unwrap(), &net.y).unwrap();
        let e = net.params.backward(&loss, segments, |_, _| Ok(())).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidState);
        assert!(
            e.to_string()
                .contains("parameter 'c.weight' got a gradient in two segments"),
            "{e}"
        );
    }

    #[test]
    fn a_parameter_without_a_gradient_is_an_error_that_names_it_and_so_is_what_push_says() {
        let net = net();
        let [c, _, _] = &net.layers;
        let mut segments = Segments::new();
        let h = segments.cut(&c.forward(&net.x).unwrap()).unwrap();
        let loss = h.sum_all().unwrap();
        let e = net.params.backward(&loss, segments, |_, _| Ok(())).unwrap_err();
        assert!(
            e.to_string()
                .contains("no gradient for 'a.bias', 'a.weight', 'b.bias', 'b.weight'"),
            "{e}"
        );
        let mine = || Error::new(ErrorKind::Io, "not sent");
        let e = net
            .params
            .backward(&net.loss(|h| h), Segments::new(), |_, _| Err(mine()));
        assert_eq!(e.unwrap_err().kind(), ErrorKind::Io);
    }
}
