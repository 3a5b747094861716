//! The parameters of a module, addressed by index and name.

use std::collections::HashSet;

use burn::module::Module;
use burn::tensor::Gradients;
use ddp::Slot;
use diloco::{Parameters, load_parameters, save_parameters};
use ftcore::{Error, Result};
use replica::{State, StateDict};

use crate::visit::{self, Found, no_such};

/// A module and its float parameters, each seen as one slice in row-major order. Their names are their paths in the module (`hidden.weight`), their
/// order is the module's, the same on every replica.
#[derive(Debug, Clone)]
pub struct ParamSet<M> {
    module: M,
    params: Vec<Found>,
}

impl<M: Module> ParamSet<M> {
    /// The parameters of `module`, which makes gradients if its device does (`device.autodiff()`). Errors (`InvalidArgument`): a parameter that is not
    /// f32; two of one name.
    pub fn new(module: M) -> Result<Self> {
        let params = visit::list(&module)?;
        let mut names = HashSet::new();
        if let Some(twice) = params.iter().find(|p| !names.insert(p.name.as_str())) {
            return Err(Error::invalid(format!(
                "two parameters are named '{}'",
                twice.name
            )));
        }
        Ok(Self { module, params })
    }

    /// The module, with the parameters as they are now.
    pub fn module(&self) -> &M {
        &self.module
    }

    /// The module, by value.
    pub fn into_module(self) -> M {
        self.module
    }

    /// The slots of the gradients, for `ddp::Ddp::new`: one for each parameter, in order.
    pub fn slots(&self) -> Vec<Slot> {
        (0..self.len()).map(|i| Slot::f32(self.count(i))).collect()
    }

    /// The gradients as `ddp::Ddp::step` takes them: one vector for each parameter, in order. Errors: a parameter without a gradient (`InvalidState`, all
    /// are named); burn's (`Backend`).
    pub fn gradients(&self, grads: &Gradients) -> Result<Vec<Vec<f32>>> {
        visit::gradients(&self.module, grads, &self.params)
    }
}

impl<M: Module> Parameters for ParamSet<M> {
    fn len(&self) -> usize {
        self.params.len()
    }

    fn name(&self, i: usize) -> &str {
        self.params.get(i).map_or("", |p| p.name.as_str())
    }

    fn count(&self, i: usize) -> usize {
        self.params.get(i).map_or(0, |p| p.shape.iter().product())
    }

    fn read(&self, i: usize, f: &mut dyn FnMut(&[f32])) -> Result<()> {
        f(&visit::read(&self.module, i, self.name(i))?);
        Ok(())
    }

    fn write(&mut self, i: usize, f: &mut dyn FnMut(&mut [f32])) -> Result<()> {
        if i >= self.len() {
            return Err(no_such(i));
        }
        let mut values = visit::read(&self.module, i, self.name(i))?;
        f(&mut values);
        // A clone of a module shares its tensors.
        self.module = visit::write(self.module.clone(), i, values);
        Ok(())
    }
}

/// For data parallel, whose state they are.
impl<M: Module> State for ParamSet<M> {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        save_parameters(self, out)
    }

    fn load(&mut self, from: &StateDict) -> Result<()> {
        load_parameters(self, from)
    }
}

#[cfg(test)]
mod tests {
    use burn::module::Param;
    use burn::tensor::{Device, Tensor};
    use ftcore::ErrorKind;

    use super::*;

    #[derive(Module, Debug)]
    struct Layer {
        weight: Param<Tensor<2>>,
        bias: Param<Tensor<1>>,
    }

    #[derive(Module, Debug)]
    struct Model {
        first: Layer,
        second: Layer,
    }

    fn layer(from: f32, device: &Device) -> Layer {
        Layer {
            weight: Param::from_data([[from, from + 1.0], [from + 2.0, from + 3.0]], device),
            bias: Param::from_data([from, from], device),
        }
    }

    fn model() -> ParamSet<Model> {
        let device = Device::flex().autodiff();
        ParamSet::new(Model {
            first: layer(1.0, &device),
            second: layer(5.0, &device),
        })
        .unwrap()
    }

    fn values(set: &ParamSet<Model>, i: usize) -> Vec<f32> {
        let mut values = Vec::new();
        set.read(i, &mut |s| values.extend_from_slice(s)).unwrap();
        values
    }

    #[test]
    fn parameters_have_their_paths_as_names_and_a_write_is_seen_by_the_module() {
        let mut set = model();
        let names: Vec<&str> = (0..set.len()).map(|i| set.name(i)).collect();
        assert_eq!(
            names,
            ["first.weight", "first.bias", "second.weight", "second.bias"]
        );
        assert_eq!(
            set.slots().iter().map(|s| s.count).collect::<Vec<_>>(),
            [4, 2, 4, 2]
        );
        assert_eq!(values(&set, 2), [5.0, 6.0, 7.0, 8.0]);
        set.write(2, &mut |s| s[3] = 80.0).unwrap();
        let data = set.module().second.weight.val().to_data();
        assert_eq!(data.try_to_vec::<f32>().unwrap(), [5.0, 6.0, 7.0, 80.0]);
        assert!(set.read(4, &mut |_| ()).is_err() && set.write(4, &mut |_| ()).is_err());
    }

    #[test]
    fn gradients_come_in_order_an_update_applies_them_and_the_next_pass_makes_new_ones() {
        let mut set = model();
        for _ in 0..2 {
            let before = values(&set, 0);
            let m = set.module();
            let sum =
                |layer: &Layer| (layer.weight.val() * layer.weight.val()).sum() + layer.bias.val().sum();
            let loss = sum(&m.first) + sum(&m.second);
            let grads = set.gradients(&loss.backward()).unwrap();
            let doubled: Vec<f32> = before.iter().map(|w| 2.0 * w).collect();
            assert_eq!(grads[0], doubled);
            assert_eq!(grads[1], [1.0, 1.0]);
            set.update(&grads, |_, w, g| {
                w.iter_mut().zip(g).for_each(|(w, g)| *w -= 0.25 * g)
            })
            .unwrap();
            let halved: Vec<f32> = before.iter().map(|w| 0.5 * w).collect();
            assert_eq!(values(&set, 0), halved);
        }
        let e = set.update(&[vec![0.0]], |_, _, _| ()).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidArgument);
    }

    #[test]
    fn a_parameter_without_a_gradient_is_named() {
        let set = model();
        let grads = set.module().first.weight.val().sum().backward();
        let e = set.gradients(&grads).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidState);
        assert!(
            e.to_string()
                .contains("'first.bias', 'second.weight', 'second.bias'"),
            "{e}"
        );
    }

    #[test]
    fn the_state_comes_back_bit_for_bit() {
        let mut set = model();
        let mut saved = StateDict::new();
        set.save(&mut saved).unwrap();
        set.write(1, &mut |s| s.fill(9.0)).unwrap();
        set.load(&saved).unwrap();
        assert_eq!(values(&set, 1), [1.0, 1.0]);
    }
}
