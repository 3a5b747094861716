//! A [`ParamSet`] is what DiLoCo works on, and the state and the slots of data parallel: nothing else to write.

use candle_core::Tensor;
use candle_core::backprop::GradStore;
use ddp::Slot;
use diloco::{Parameters, load_parameters, save_parameters};
use ftcore::Result;
use replica::{State, StateDict};

use crate::{ParamSet, candle_error};

impl Parameters for ParamSet {
    fn len(&self) -> usize {
        ParamSet::len(self)
    }
    fn name(&self, i: usize) -> &str {
        ParamSet::name(self, i)
    }
    fn count(&self, i: usize) -> usize {
        self.numel(i)
    }
    fn read(&self, i: usize, f: &mut dyn FnMut(&[f32])) -> Result<()> {
        self.with_slice(i, f)
    }
    fn write(&mut self, i: usize, f: &mut dyn FnMut(&mut [f32])) -> Result<()> {
        self.with_slice_mut(i, f)
    }
}

/// For data parallel, whose state they are.
impl State for ParamSet {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        save_parameters(self, out)
    }

    fn load(&mut self, from: &StateDict) -> Result<()> {
        load_parameters(self, from)
    }
}

impl ParamSet {
    /// The slots of the gradients, for `ddp::Ddp::new`: one for each parameter, in order.
    pub fn slots(&self) -> Vec<Slot> {
        (0..self.len()).map(|i| Slot::f32(self.numel(i))).collect()
    }

    /// The gradients as `ddp::Ddp::step` takes them: one vector for each parameter, in order. Errors: as in [`ParamSet::with_grad`].
    pub fn gradients(&self, grads: &GradStore) -> Result<Vec<Vec<f32>>> {
        self.check_grads(grads)?;
        (0..self.len())
            .map(|i| self.with_grad(grads, i, <[f32]>::to_vec))
            .collect()
    }

    /// [`gradients`](Self::gradients) of a loss, backward pass included: `params.gradients_of(model.forward(&x).and_then(|out| mse(&out, &y)))`.
    /// Errors: candle's, of the loss or the backward pass (`Backend`); as in [`ParamSet::with_grad`].
    pub fn gradients_of(&self, loss: candle_core::Result<Tensor>) -> Result<Vec<Vec<f32>>> {
        let loss = loss.map_err(|e| candle_error("the loss", e))?;
        let grads = loss
            .backward()
            .map_err(|e| candle_error("the backward pass", e))?;
        self.gradients(&grads)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    #[test]
    fn data_parallel_gets_slots_gradients_and_updates_and_the_state_comes_back() {
        let v = Var::from_slice(&[1f32, -2.0], 2, &Device::Cpu).unwrap();
        let mut set = ParamSet::new(vec![("w".to_owned(), v.clone())]).unwrap();
        let mut saved = StateDict::new();
        set.save(&mut saved).unwrap();
        assert_eq!(set.slots(), [Slot::f32(2)]);
        let grads = set.gradients_of(v.sqr().and_then(|v| v.sum_all())).unwrap();
        assert_eq!(grads, [[2.0, -4.0]]);
        let e = set.gradients_of(v.narrow(0, 1, 5)).unwrap_err();
        assert_eq!(e.kind(), ftcore::ErrorKind::Backend, "{e}");
        assert!(e.to_string().contains("candle: the loss"), "{e}");
        let descend = |_, w: &mut [f32], g: &[f32]| w.iter_mut().zip(g).for_each(|(w, g)| *w -= 0.25 * g);
        set.update(&grads, descend).unwrap();
        assert_eq!(v.as_tensor().to_vec1::<f32>().unwrap(), [0.5, -1.0]);
        assert!(set.update(&[vec![1.0]], descend).is_err());
        set.load(&saved).unwrap();
        assert_eq!(v.as_tensor().to_vec1::<f32>().unwrap(), [1.0, -2.0]);
    }

    #[test]
    fn diloco_reads_and_writes_the_variables_themselves() {
        let v = Var::from_slice(&[1f32, 2.0], 2, &Device::Cpu).unwrap();
        let mut set = ParamSet::new(vec![("w".to_owned(), v.clone())]).unwrap();
        let params: &mut dyn Parameters = &mut set;
        assert_eq!(
            (params.len(), params.is_empty(), params.name(0), params.count(0)),
            (1, false, "w", 2)
        );
        params.write(0, &mut |s| s[1] = 5.0).unwrap();
        let mut seen = Vec::new();
        params.read(0, &mut |s| seen.extend_from_slice(s)).unwrap();
        assert_eq!(seen, [1.0, 5.0]);
        assert_eq!(v.as_tensor().to_vec1::<f32>().unwrap(), [1.0, 5.0]);
        assert!(params.read(1, &mut |_| ()).is_err() && params.write(1, &mut |_| ()).is_err());
        assert_eq!((params.name(1), params.count(1)), ("", 0));
    }
}
