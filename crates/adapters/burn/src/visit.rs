//! Walks through a module: what parameters there are, the elements or the gradient of one, and another value for one.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{DType, Gradients, Tensor, TensorData};
use ftcore::{Error, ErrorKind, Result};

/// A parameter: its path inside the module, such as `hidden.weight`, and its shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
}

/// All float parameters, in the module's order. Errors (`InvalidArgument`): one that is not f32.
pub(crate) fn list<M: Module>(module: &M) -> Result<Vec<Found>> {
    struct List {
        path: Vec<String>,
        found: Vec<Found>,
        wrong: Option<Error>,
    }
    impl ModuleVisitor for List {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let name = self.path.join(".");
            let tensor = param.val();
            if tensor.dtype() != DType::F32 {
                let text = format!("parameter '{name}' has dtype {:?}, not f32", tensor.dtype());
                self.wrong.get_or_insert(Error::invalid(text));
            }
            self.found.push(Found {
                name,
                shape: tensor.dims().to_vec(),
            });
        }

        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.to_owned());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }
    }
    let mut list = List {
        path: Vec::new(),
        found: Vec::new(),
        wrong: None,
    };
    module.visit(&mut list);
    match list.wrong {
        Some(error) => Err(error),
        None => Ok(list.found),
    }
}

/// The elements of a tensor on the host. `what` is for messages.
fn elements<const D: usize>(what: &str, tensor: Tensor<D>) -> Result<Vec<f32>> {
    let failed = |text: String| Error::new(ErrorKind::Backend, format!("burn: reading {what}: {text}"));
    let data = tensor.try_into_data().map_err(|e| failed(format!("{e:?}")))?;
    data.try_to_vec::<f32>().map_err(|e| failed(format!("{e:?}")))
}

/// The elements of parameter `wanted`.
pub(crate) fn read<M: Module>(module: &M, wanted: usize, name: &str) -> Result<Vec<f32>> {
    struct Read<'a> {
        at: usize,
        wanted: usize,
        name: &'a str,
        result: Option<Result<Vec<f32>>>,
    }
    impl ModuleVisitor for Read<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if self.at == self.wanted {
                self.result = Some(elements(self.name, param.val()));
            }
            self.at += 1;
        }
    }
    let mut read = Read {
        at: 0,
        wanted,
        name,
        result: None,
    };
    module.visit(&mut read);
    read.result.unwrap_or_else(|| Err(no_such(wanted)))
}

/// The gradients of all parameters, in order. Errors: those that have none are named (`InvalidState`).
pub(crate) fn gradients<M: Module>(module: &M, grads: &Gradients, names: &[Found]) -> Result<Vec<Vec<f32>>> {
    struct Collect<'a> {
        grads: &'a Gradients,
        names: &'a [Found],
        found: Vec<Result<Vec<f32>>>,
        missing: Vec<String>,
    }
    impl ModuleVisitor for Collect<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let name = self
                .names
                .get(self.found.len())
                .map_or("?", |found| found.name.as_str());
            self.found.push(match param.val().grad(self.grads) {
                Some(grad) => elements(&format!("the gradient of '{name}'"), grad),
                None => {
                    self.missing.push(format!("'{name}'"));
                    Ok(Vec::new())
                }
            });
        }
    }
    let mut collect = Collect {
        grads,
        names,
        found: Vec::new(),
        missing: Vec::new(),
    };
    module.visit(&mut collect);
    if !collect.missing.is_empty() {
        let text = format!(
            "no gradient for {}: the loss does not depend on it, or the parameter requires none",
            collect.missing.join(", ")
        );
        return Err(Error::new(ErrorKind::InvalidState, text));
    }
    collect.found.into_iter().collect()
}

/// The module with other elements for parameter `wanted`, of which there are as many as before.
pub(crate) fn write<M: Module>(module: M, wanted: usize, values: Vec<f32>) -> M {
    struct Write {
        at: usize,
        wanted: usize,
        values: Option<Vec<f32>>,
    }
    impl ModuleMapper for Write {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let here = self.at == self.wanted;
            self.at += 1;
            match self.values.take_if(|_| here) {
                None => param,
                Some(values) => param.map(|tensor| {
                    let requires = tensor.is_require_grad();
                    let data = TensorData::new(values, tensor.dims());
                    Tensor::from_data(data, &tensor.device()).set_require_grad(requires)
                }),
            }
        }
    }
    module.map(&mut Write {
        at: 0,
        wanted,
        values: Some(values),
    })
}

pub(crate) fn no_such(i: usize) -> Error {
    Error::invalid(format!("there is no parameter {i}"))
}
