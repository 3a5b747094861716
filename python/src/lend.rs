//! A Python object to a tensor over its memory, without a copy: by the buffer protocol, DLPack, or a quicker way for tensors of torch.

use std::ptr::NonNull;

use oxccl::core::{DType, Device, Error, Tensor};
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyList, PyTuple, PyType};

use crate::errors::{Raise, Refused};
use crate::process::Crossing;
use crate::raw::buffer::{self, View};
use crate::raw::dlpack::Managed;
use crate::raw::holder::{Holder, Lent};

/// What the operation does with the memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Reads,
    Writes,
}

/// One tensor. `what` names the argument in errors.
pub(crate) fn one(object: &Bound<'_, PyAny>, what: &str, access: Access) -> Result<Tensor, Refused> {
    named(object, &|| what.to_owned(), access)
}

/// The tensors of a list or tuple.
pub(crate) fn list(object: &Bound<'_, PyAny>, what: &str, access: Access) -> Result<Vec<Tensor>, Refused> {
    let Some(items) = items_of(object) else {
        return Err(Error::invalid(format!("{what} is no list or tuple of tensors")).into());
    };
    let tensors = items.iter().enumerate();
    tensors
        .map(|(n, item)| named(item, &|| format!("{what}[{n}]"), access))
        .collect()
}

/// One tensor, or those of a list or tuple. `what` names them in the plural or as a list of one.
pub(crate) fn one_or_list(
    object: &Bound<'_, PyAny>,
    what: &str,
    access: Access,
) -> Result<Vec<Tensor>, Refused> {
    if is_list(object) {
        list(object, what, access)
    } else {
        Ok(vec![one(object, what.strip_suffix('s').unwrap_or(what), access)?])
    }
}

/// True for a list or tuple.
pub(crate) fn is_list(object: &Bound<'_, PyAny>) -> bool {
    object.is_instance_of::<PyList>() || object.is_instance_of::<PyTuple>()
}

fn items_of<'py>(object: &Bound<'py, PyAny>) -> Option<Vec<Bound<'py, PyAny>>> {
    if let Ok(list) = object.cast::<PyList>() {
        return Some(list.iter().collect());
    }
    object.cast::<PyTuple>().ok().map(|tuple| tuple.iter().collect())
}

fn named(object: &Bound<'_, PyAny>, what: &dyn Fn() -> String, access: Access) -> Result<Tensor, Refused> {
    let _crossing = Crossing::begin()?;
    if let Some(torch) = TORCH.get(object.py())
        && object.is_instance(torch.class.bind(object.py()))?
    {
        return from_torch(object, torch, what, access);
    }
    if buffer::is_offered(object) {
        return from_buffer(object, what, access);
    }
    if object.hasattr(intern!(object.py(), "__dlpack__"))? {
        return from_dlpack(object, what, access);
    }
    let kind = object.get_type().name()?.to_string();
    let text = format!(
        "{} is of type {kind}, which lends no memory; pass a NumPy array, a tensor with DLPack, or a buffer",
        what()
    );
    Err(Error::invalid(text).into())
}

/// The tensors of torch, once `oxccl.torch` was imported: their `__dlpack__` is written in Python and costs more than a small operation.
struct Torch {
    class: Py<PyType>,
    /// Each element type that operations take.
    dtypes: Vec<(Py<PyAny>, DType)>,
}

static TORCH: PyOnceLock<Torch> = PyOnceLock::new();

/// Takes `torch.Tensor` and its element types by our names for them.
#[pyfunction]
#[pyo3(name = "_know_torch")]
pub(crate) fn know_torch(
    py: Python<'_>,
    class: Py<PyType>,
    dtypes: Vec<(Py<PyAny>, String)>,
) -> PyResult<()> {
    let named = |(dtype, name): (Py<PyAny>, String)| Ok((dtype, name.parse().or_raise(py)?));
    let dtypes = dtypes.into_iter().map(named).collect::<PyResult<_>>()?;
    // A second call says the same.
    let _ = TORCH.set(py, Torch { class, dtypes });
    Ok(())
}

/// Its storage keeps the memory alive, and not the tensor: that has another one after `tensor.data = …`, as `module.to` does it.
fn from_torch(
    object: &Bound<'_, PyAny>,
    torch: &Torch,
    what: &dyn Fn() -> String,
    access: Access,
) -> Result<Tensor, Refused> {
    let py = object.py();
    if !object.getattr(intern!(py, "is_cpu"))?.is_truthy()? {
        let device = object.getattr(intern!(py, "device"))?.to_string();
        let text = format!("{} is on {device}; this package takes host memory", what());
        return Err(Error::unsupported(text).into());
    }
    let dtype = object.getattr(intern!(py, "dtype"))?;
    let known = torch.dtypes.iter().find(|(known, _)| known.is(&dtype));
    let dtype = known
        .map(|(_, dtype)| *dtype)
        .ok_or_else(|| unknown(what, &dtype.to_string()))?;
    let is_contiguous = object.call_method0(intern!(py, "is_contiguous"))?.is_truthy()?;
    let address: usize = object.call_method0(intern!(py, "data_ptr"))?.extract()?;
    let mut memory = Memory {
        address: std::ptr::with_exposed_provenance_mut(address),
        dtype,
        count: object.call_method0(intern!(py, "numel"))?.extract()?,
        shape: Vec::new(),
        strides: Vec::new(),
        read_only: false,
    };
    if !is_contiguous {
        memory.shape = object.getattr(intern!(py, "shape"))?.extract()?;
        memory.strides = object.call_method0(intern!(py, "stride"))?.extract()?;
    }
    let storage = object.call_method0(intern!(py, "untyped_storage"))?;
    tensor(&memory, Lent::Owner(storage.unbind()), what, access)
}

/// Memory as both protocols describe it; strides in elements, empty for contiguous memory.
struct Memory {
    address: *mut u8,
    dtype: DType,
    count: usize,
    shape: Vec<isize>,
    strides: Vec<isize>,
    read_only: bool,
}

fn tensor(memory: &Memory, lent: Lent, what: &dyn Fn() -> String, access: Access) -> Result<Tensor, Refused> {
    // Gives it back if the memory is refused.
    let holder = Holder::new(lent);
    if access == Access::Writes && memory.read_only {
        let text = format!("{} is read-only, and the operation writes to it", what());
        return Err(Error::invalid(text).into());
    }
    if !is_contiguous(&memory.shape, &memory.strides) {
        let text = format!(
            "{} of shape {:?} with strides {:?} is not contiguous; make it contiguous first",
            what(),
            memory.shape,
            memory.strides
        );
        return Err(Error::invalid(text).into());
    }
    // Empty memory may have no address; any that is aligned will do.
    let address = if memory.count == 0 {
        std::ptr::without_provenance_mut(memory.dtype.size())
    } else {
        memory.address
    };
    let address = NonNull::new(address)
        .ok_or_else(|| Error::invalid(format!("{} has elements but no memory", what())))?;
    let refused = |e: Error| Error::invalid(format!("{}: {}", what(), e.message()));
    crate::raw::foreign_tensor(address, memory.dtype, memory.count, Device::CPU, holder)
        .map_err(|e| refused(e).into())
}

fn is_contiguous(shape: &[isize], strides: &[isize]) -> bool {
    if strides.is_empty() || shape.contains(&0) {
        return true;
    }
    let mut expected = 1isize;
    shape.iter().zip(strides).rev().all(|(&dim, &stride)| {
        let fits = dim == 1 || stride == expected;
        expected = expected.saturating_mul(dim);
        fits
    })
}

fn from_buffer(
    object: &Bound<'_, PyAny>,
    what: &dyn Fn() -> String,
    access: Access,
) -> Result<Tensor, Refused> {
    let (view, dtype) = match View::of(object) {
        Ok(view) => {
            let dtype = view.dtype();
            (view, dtype)
        }
        // NumPy has no format for the types of ml_dtypes and refuses.
        Err(refusal) => match small_float(object)? {
            Some((dtype, bits)) => (View::of(&bits)?, Ok(dtype)),
            None => return Err(refusal.into()),
        },
    };
    let item = isize::try_from(view.item_size()).unwrap_or(1).max(1);
    let strides = view.strides();
    let dtype = dtype.map_err(|format| unknown(what, &format));
    let memory = dtype.map(|dtype| Memory {
        address: view.address(),
        dtype,
        count: view.count(),
        shape: view.shape(),
        // A stride that is no multiple of the size fits no contiguous memory, and neither does -1.
        strides: strides
            .iter()
            .map(|s| if s % item == 0 { s / item } else { -1 })
            .collect(),
        read_only: view.is_read_only(),
    });
    match memory {
        Ok(memory) => tensor(&memory, Lent::Buffer(view), what, access),
        Err(error) => {
            view.release();
            Err(error.into())
        }
    }
}

fn unknown(what: &dyn Fn() -> String, format: &str) -> Error {
    let is_complex =
        format.contains("complex") || format.trim_start_matches(['<', '>', '=', '@']).starts_with('Z');
    let instead = match is_complex {
        true => {
            "; pass its real and imaginary parts as pairs: torch.view_as_real(x), or x.view('f4') and 'f8' of a NumPy array"
        }
        false => "",
    };
    Error::unsupported(format!(
        "{} holds '{format}', which no operation takes{instead}",
        what()
    ))
}

/// For an array of bf16 or fp8 (as ml_dtypes defines them for NumPy): the type, and the same memory as integers.
fn small_float<'py>(object: &Bound<'py, PyAny>) -> PyResult<Option<(DType, Bound<'py, PyAny>)>> {
    let py = object.py();
    let Some(dtype) = object.getattr_opt(intern!(py, "dtype"))? else {
        return Ok(None);
    };
    let Some(name) = dtype.getattr_opt(intern!(py, "name"))? else {
        return Ok(None);
    };
    let (dtype, same_size) = match name.extract::<String>()?.as_str() {
        "bfloat16" => (DType::BF16, "u2"),
        "float8_e4m3fn" => (DType::F8E4M3, "u1"),
        "float8_e5m2" => (DType::F8E5M2, "u1"),
        _ => return Ok(None),
    };
    Ok(Some((
        dtype,
        object.call_method1(intern!(py, "view"), (same_size,))?,
    )))
}

fn from_dlpack(
    object: &Bound<'_, PyAny>,
    what: &dyn Fn() -> String,
    access: Access,
) -> Result<Tensor, Refused> {
    let managed =
        Managed::of(&capsule(object)?).map_err(|text| Error::invalid(format!("{}: {text}", what())))?;
    let refusal = if managed.is_on_host() {
        managed.dtype().map_err(|name| unknown(what, &name))
    } else {
        let (kind, index) = managed.device();
        Err(Error::unsupported(format!(
            "{} is on a device (DLPack {kind}:{index}); this package takes host memory",
            what()
        )))
    };
    let dtype = match refusal {
        Ok(dtype) => dtype,
        Err(error) => {
            managed.release();
            return Err(error.into());
        }
    };
    let shape = managed.shape();
    let count = shape.iter().map(|&d| usize::try_from(d).unwrap_or(0)).product();
    let memory = Memory {
        address: managed.address(),
        dtype,
        count,
        strides: managed.strides(),
        read_only: managed.is_read_only(),
        shape,
    };
    tensor(&memory, Lent::DlPack(managed), what, access)
}

/// What `__dlpack__` gives: of the version that knows read-only memory, if the object has it.
fn capsule<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    let wish = PyDict::new(py);
    wish.set_item(intern!(py, "max_version"), (1, 0))?;
    match object.call_method(intern!(py, "__dlpack__"), (), Some(&wish)) {
        Err(e) if e.is_instance_of::<PyTypeError>(py) => object.call_method0(intern!(py, "__dlpack__")),
        capsule => capsule,
    }
}
