//! The ordered list of a model's variables, addressed by index and name.

use std::collections::HashSet;

use candle_core::Var;
use candle_nn::VarMap;
use ftcore::{Error, ErrorKind, Result};

use crate::slices;

/// Named, ordered f32 variables on the CPU, each seen as one slice in row-major order.
///
/// - The order is fixed at construction and must be the same on every replica: indices travel between them.
/// - Cloning is cheap and shares the variables: a write through one clone is seen by all and by the model.
/// - Do not write between a forward pass and its backward pass: the graph refers to the same storage.
/// - A closure given to a method holds that variable's lock; it must not compute with the same variable.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, VarBuilder, VarMap, linear, loss::mse};
/// use oxccl::diloco::Parameters as _;
/// use oxccl_candle::ParamSet;
///
/// let (map, cpu) = (VarMap::new(), &Device::Cpu);
/// let model = linear(2, 1, VarBuilder::from_varmap(&map, DType::F32, cpu))?;
/// let mut params = ParamSet::from_var_map(&map)?;
/// let (x, y) = (Tensor::new(&[[1.0_f32, 2.0]], cpu)?, Tensor::new(&[[3.0_f32]], cpu)?);
/// let loss = |model: &candle_nn::Linear| model.forward(&x).and_then(|out| mse(&out, &y));
/// let before = loss(&model)?.to_scalar::<f32>()?;
/// let gradients = params.gradients_of(loss(&model))?;
/// params.descend(&gradients, 0.01)?; // the model's own variables change
/// assert!(loss(&model)?.to_scalar::<f32>()? < before);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct ParamSet {
    params: Vec<Param>,
}

#[derive(Debug, Clone)]
pub(crate) struct Param {
    pub(crate) name: String,
    /// `parameter 'name'`, as errors say it.
    pub(crate) label: String,
    pub(crate) var: Var,
}

impl ParamSet {
    /// The variables in this order. Errors (`InvalidArgument`, naming the parameter): an empty or repeated name, the
    /// same variable twice (tied weights are listed once), not f32, not on the CPU, not contiguous.
    pub fn new(vars: Vec<(String, Var)>) -> Result<Self> {
        let mut names = HashSet::new();
        let mut ids = HashSet::new();
        let mut params: Vec<Param> = Vec::with_capacity(vars.len());
        for (name, var) in vars {
            if name.is_empty() {
                return Err(Error::invalid(format!(
                    "parameter {} has an empty name",
                    params.len()
                )));
            }
            let label = format!("parameter '{name}'");
            slices::check(&label, var.as_tensor())?;
            if !names.insert(name.clone()) {
                return Err(Error::invalid(format!("two parameters are named '{name}'")));
            }
            if !ids.insert(var.id()) {
                let first = params
                    .iter()
                    .find(|p| p.var.id() == var.id())
                    .map_or("", |p| p.name.as_str());
                return Err(Error::invalid(format!(
                    "{label} is the same variable as '{first}'; list it once"
                )));
            }
            params.push(Param { name, label, var });
        }
        Ok(Self { params })
    }

    /// All variables of `map`, sorted by name (its own order is random per process). Errors as in [`ParamSet::new`].
    pub fn from_var_map(map: &VarMap) -> Result<Self> {
        let held = map.data().lock().map_err(|_| {
            Error::new(
                ErrorKind::InvalidState,
                "a thread panicked while it held the VarMap's lock",
            )
        })?;
        let mut vars: Vec<(String, Var)> = held.iter().map(|(n, v)| (n.clone(), v.clone())).collect();
        drop(held);
        vars.sort_by(|a, b| a.0.cmp(&b.0));
        Self::new(vars)
    }

    /// The number of parameters (tensors).
    pub fn len(&self) -> usize {
        self.params.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.params.is_empty()
    }

    /// The names, in order.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.params.iter().map(|p| p.name.as_str())
    }

    /// The name of parameter `i`; `""` if there is none.
    pub fn name(&self, i: usize) -> &str {
        self.params.get(i).map_or("", |p| p.name.as_str())
    }

    /// The number of elements of parameter `i`; 0 if there is none.
    pub fn numel(&self, i: usize) -> usize {
        self.params.get(i).map_or(0, |p| p.var.elem_count())
    }

    /// The number of elements of all parameters together.
    pub fn total(&self) -> usize {
        self.params.iter().map(|p| p.var.elem_count()).sum()
    }

    /// The variable of parameter `i`.
    pub fn var(&self, i: usize) -> Option<&Var> {
        self.params.get(i).map(|p| &p.var)
    }

    /// The index of the parameter named `name`.
    pub fn index_of(&self, name: &str) -> Option<usize> {
        self.params.iter().position(|p| p.name == name)
    }

    pub(crate) fn param(&self, i: usize) -> Result<&Param> {
        self.params
            .get(i)
            .ok_or_else(|| Error::invalid(format!("there is no parameter {i} among {}", self.params.len())))
    }

    pub(crate) fn params(&self) -> &[Param] {
        &self.params
    }

    /// Calls `f` with the elements of parameter `i`, no copy. Errors: no such parameter.
    pub fn with_slice<R>(&self, i: usize, f: impl FnOnce(&[f32]) -> R) -> Result<R> {
        let p = self.param(i)?;
        slices::read(&p.label, p.var.as_tensor(), f)
    }

    /// Calls `f` with the elements of parameter `i` for writing, no copy: the variable itself changes. Errors: no
    /// such parameter.
    pub fn with_slice_mut<R>(&mut self, i: usize, f: impl FnOnce(&mut [f32]) -> R) -> Result<R> {
        let p = self.param(i)?;
        slices::write(&p.label, p.var.as_tensor(), f)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    fn var(values: &[f32]) -> Var {
        Var::from_slice(values, values.len(), &Device::Cpu).unwrap()
    }

    #[test]
    fn a_write_through_the_slice_is_seen_by_the_variable_and_moves_no_storage() {
        let v = Var::from_slice(&[1f32, 2.0, 3.0, 4.0, 5.0, 6.0], (2, 3), &Device::Cpu).unwrap();
        let mut set = ParamSet::new(vec![("w".to_owned(), v.clone())]).unwrap();
        let read_at = set.with_slice(0, |s| s.as_ptr() as usize).unwrap();
        let write_at = set
            .with_slice_mut(0, |s| {
                s[4] = 50.0;
                s.as_ptr() as usize
            })
            .unwrap();
        assert_eq!(read_at, write_at);
        assert_eq!(
            v.as_tensor().to_vec2::<f32>().unwrap(),
            [[1.0, 2.0, 3.0], [4.0, 50.0, 6.0]]
        );
        // A computation built after the write uses the new value.
        assert_eq!(v.sum_all().unwrap().to_scalar::<f32>().unwrap(), 66.0);
        assert_eq!((set.len(), set.numel(0), set.total()), (1, 6, 6));
    }

    #[test]
    fn a_var_map_is_listed_by_name_whatever_the_order_of_its_map() {
        let map = VarMap::new();
        for n in ["b", "a.2", "c", "a.10"] {
            map.data().lock().unwrap().insert(n.to_owned(), var(&[0.0]));
        }
        let set = ParamSet::from_var_map(&map).unwrap();
        assert_eq!(set.names().collect::<Vec<_>>(), ["a.10", "a.2", "b", "c"]);
        assert_eq!(set.index_of("b"), Some(2));
    }

    #[test]
    fn another_dtype_is_refused_by_name() {
        let half = Var::zeros(4, DType::F16, &Device::Cpu).unwrap();
        let e = ParamSet::new(vec![("half".to_owned(), half)]).unwrap_err();
        assert!(
            e.to_string().contains("parameter 'half' has dtype F16, not f32"),
            "{e}"
        );
        assert_eq!(e.kind(), ErrorKind::InvalidArgument);
    }

    #[test]
    fn repeated_names_and_tied_variables_are_refused_by_name() {
        let v = var(&[1.0]);
        let e = ParamSet::new(vec![("a".to_owned(), v.clone()), ("a".to_owned(), var(&[2.0]))]).unwrap_err();
        assert!(e.to_string().contains("two parameters are named 'a'"), "{e}");
        let e = ParamSet::new(vec![("a".to_owned(), v.clone()), ("b".to_owned(), v)]).unwrap_err();
        assert!(
            e.to_string()
                .contains("parameter 'b' is the same variable as 'a'"),
            "{e}"
        );
    }

    #[test]
    fn an_index_out_of_range_is_an_error_or_an_empty_answer() {
        let mut set = ParamSet::new(vec![("a".to_owned(), var(&[1.0]))]).unwrap();
        assert!(
            set.with_slice(1, |_| ())
                .unwrap_err()
                .to_string()
                .contains("no parameter 1 among 1")
        );
        assert!(set.with_slice_mut(7, |_| ()).is_err());
        assert_eq!((set.name(1), set.numel(1)), ("", 0));
        assert!(set.var(1).is_none());
    }
}
