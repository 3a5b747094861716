//! Gradients of a [`ParamSet`] as slices, in its order.
//!
//! candle leaves a variable out of the `GradStore` silently when an operation on its path has no backward (its fused
//! `LayerNorm` is one); training would go on with that weight frozen. Here a missing gradient is always an error.

use std::borrow::Cow;

use candle_core::Tensor;
use candle_core::backprop::GradStore;
use ftcore::{Error, ErrorKind, Result};

use crate::param_set::Param;
use crate::{ParamSet, candle_error, slices};

impl ParamSet {
    /// Fails with `ErrorKind::InvalidState`, naming every parameter that got no gradient, unless all have one.
    pub fn check_grads(&self, grads: &GradStore) -> Result<()> {
        let missing: Vec<&str> = self
            .params()
            .iter()
            .filter(|p| grads.get(&p.var).is_none())
            .map(|p| p.name.as_str())
            .collect();
        none_missing(&missing)
    }

    /// Calls `f` with the gradient of parameter `i`, in the parameter's element order. No copy, unless the backward
    /// pass left it strided. Errors, naming the parameter: no gradient (`InvalidState`), another shape or dtype.
    pub fn with_grad<R>(&self, grads: &GradStore, i: usize, f: impl FnOnce(&[f32]) -> R) -> Result<R> {
        let p = self.param(i)?;
        let (label, grad) = grad_of(p, grads)?;
        slices::read(&label, &grad, f)
    }

    /// Calls `f` with the elements of parameter `i` for writing and its gradient, both of the same length: what an
    /// optimizer step needs. Errors as in [`ParamSet::with_grad`].
    pub fn with_slice_mut_and_grad<R>(
        &mut self,
        grads: &GradStore,
        i: usize,
        f: impl FnOnce(&mut [f32], &[f32]) -> R,
    ) -> Result<R> {
        let p = self.param(i)?;
        let (label, grad) = grad_of(p, grads)?;
        slices::read(&label, &grad, |g| {
            slices::write(&p.label, p.var.as_tensor(), |w| f(w, g))
        })?
    }
}

/// Fails with `ErrorKind::InvalidState` if there are parameters without a gradient: `names`.
pub(crate) fn none_missing(names: &[&str]) -> Result<()> {
    if names.is_empty() {
        Ok(())
    } else {
        Err(missing_error(names))
    }
}

fn missing_error(names: &[&str]) -> Error {
    Error::new(
        ErrorKind::InvalidState,
        format!(
            "no gradient for {}: the loss does not depend on it, or an operation on the way has no backward pass",
            names
                .iter()
                .map(|n| format!("'{n}'"))
                .collect::<Vec<_>>()
                .join(", ")
        ),
    )
}

fn grad_of<'a>(p: &Param, grads: &'a GradStore) -> Result<(String, Cow<'a, Tensor>)> {
    let grad = grads.get(&p.var).ok_or_else(|| missing_error(&[&p.name]))?;
    let label = format!("the gradient of '{}'", p.name);
    if grad.dims() != p.var.dims() {
        return Err(Error::invalid(format!(
            "{label} has shape {:?}, its variable {:?}",
            grad.dims(),
            p.var.dims()
        )));
    }
    if grad.is_contiguous() {
        return Ok((label, Cow::Borrowed(grad)));
    }
    let packed = grad
        .contiguous()
        .map_err(|e| candle_error(format_args!("packing {label}"), e))?;
    Ok((label, Cow::Owned(packed)))
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Module, Var};

    use super::*;

    fn set_of(vars: &[(&str, &Var)]) -> ParamSet {
        ParamSet::new(
            vars.iter()
                .map(|(n, v)| ((*n).to_owned(), (*v).clone()))
                .collect(),
        )
        .unwrap()
    }

    #[test]
    fn an_operation_without_backward_is_an_error_that_names_the_frozen_parameters() {
        let device = &Device::Cpu;
        let x = Var::from_slice(&[1f32, 2.0, 4.0], (1, 3), device).unwrap();
        let gain = Var::from_slice(&[1f32, 1.0, 1.0], 3, device).unwrap();
        let shift = Var::from_slice(&[0f32, 0.0, 0.0], 3, device).unwrap();
        let set = set_of(&[("x", &x), ("norm.gain", &gain), ("norm.shift", &shift)]);
        let norm = candle_nn::LayerNorm::new(gain.as_tensor().clone(), shift.as_tensor().clone(), 1e-5);
        let grads = (norm.forward(&x).unwrap() + x.as_tensor())
            .unwrap()
            .sqr()
            .unwrap()
            .sum_all()
            .unwrap();
        let grads = grads.backward().unwrap();
        let e = set.check_grads(&grads).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidState);
        assert!(
            e.to_string()
                .contains("no gradient for 'norm.gain', 'norm.shift'"),
            "{e}"
        );
        assert!(set.with_grad(&grads, 1, |_| ()).is_err());
        assert!(set.gradients(&grads).is_err());
    }

    #[test]
    fn gradients_come_in_the_parameters_order_also_when_backward_left_them_strided() {
        let device = &Device::Cpu;
        let a = Var::from_slice(&[1f32, 2.0, 3.0, 4.0, 5.0, 6.0], (2, 3), device).unwrap();
        let b = Var::from_slice(&[1f32, 1.0], 2, device).unwrap();
        let set = set_of(&[("a", &a), ("b", &b)]);
        let mut grads = (a.sum_all().unwrap() + b.sum_all().unwrap())
            .unwrap()
            .backward()
            .unwrap();
        let columns = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0, 5.0, 6.0], (3, 2), device).unwrap();
        grads.insert(&a, columns.t().unwrap());
        assert!(!grads.get(&a).unwrap().is_contiguous());
        let values = set.gradients(&grads).unwrap();
        assert_eq!(values, [vec![1.0, 3.0, 5.0, 2.0, 4.0, 6.0], vec![1.0, 1.0]]);
    }

    #[test]
    fn an_optimizer_step_sees_weight_and_gradient_together_and_changes_the_variable() {
        let v = Var::from_slice(&[1f32, -2.0], 2, &Device::Cpu).unwrap();
        let mut set = set_of(&[("v", &v)]);
        let grads = v.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        set.with_slice_mut_and_grad(&grads, 0, |w, g| {
            for (w, g) in w.iter_mut().zip(g) {
                *w -= 0.25 * g;
            }
        })
        .unwrap();
        assert_eq!(v.as_tensor().to_vec1::<f32>().unwrap(), [0.5, -1.0]);
    }

    #[test]
    fn a_gradient_of_another_shape_is_refused_by_name() {
        let v = Var::from_slice(&[1f32, -2.0], 2, &Device::Cpu).unwrap();
        let set = set_of(&[("v", &v)]);
        let mut grads = v.sum_all().unwrap().backward().unwrap();
        grads.insert(
            &v,
            Tensor::zeros(3, candle_core::DType::F32, &Device::Cpu).unwrap(),
        );
        let e = set.with_grad(&grads, 0, |_| ()).unwrap_err();
        assert!(
            e.to_string()
                .contains("gradient of 'v' has shape [3], its variable [2]"),
            "{e}"
        );
    }
}
