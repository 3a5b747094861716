//! Memory of a group for Python: what the other ranks of the host read in place, lent by DLPack.

use std::sync::Arc;

use oxccl::core::{DType, Error, ProcessGroup, Result};
use pyo3::prelude::*;

use crate::raw::dlpack::Kept;

/// A tensor's memory, which goes with its last view. Operations take it as it is; `torch.from_dlpack` and `numpy.from_dlpack` make views of it.
#[pyclass(frozen, module = "oxccl")]
pub(crate) struct Memory {
    kept: Arc<Kept>,
}

/// A number of elements, or several dimensions.
#[derive(FromPyObject)]
pub(crate) enum Shape {
    Count(usize),
    Dimensions(Vec<usize>),
}

impl Memory {
    pub(crate) fn of(group: &dyn ProcessGroup, shape: Shape, dtype: &str) -> Result<Self> {
        let shape = match shape {
            Shape::Count(count) => vec![count],
            Shape::Dimensions(shape) => shape,
        };
        let dtype: DType = dtype.parse()?;
        let too_large = || Error::invalid(format!("{shape:?} elements of {dtype} do not fit in memory"));
        let count = shape.iter().try_fold(1usize, |all, &d| all.checked_mul(d));
        let fits = |count: &usize| {
            count
                .checked_mul(dtype.size())
                .is_some_and(|b| isize::try_from(b).is_ok())
        };
        let count = count.filter(fits).ok_or_else(too_large)?;
        let kept = Kept::new(group.alloc(dtype, count)?, &shape).ok_or_else(too_large)?;
        Ok(Self { kept })
    }
}

#[pymethods]
impl Memory {
    /// The dimensions.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(pyo3::types::PyTuple::new(py, self.kept.shape())?.into_any())
    }

    /// The name of the element type.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.kept.dtype().name()
    }

    /// True while there is a view, or an operation has it.
    fn _is_lent(&self) -> bool {
        self.kept.is_lent()
    }

    /// A capsule with a view. `stream`, `dl_device` and `copy` are DLPack's; a view is of host memory and never a copy.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if stream.is_some() || dl_device.is_some_and(|device| device != CPU) || copy == Some(true) {
            let text =
                "this is host memory without a stream, and is lent without a copy: make the copy of the view";
            return Err(pyo3::exceptions::PyBufferError::new_err(text));
        }
        self.kept
            .lend(py, max_version.is_some_and(|(major, _)| major >= 1))
    }

    /// The device as DLPack has it: the CPU.
    fn __dlpack_device__(&self) -> (i32, i32) {
        CPU
    }

    fn __repr__(&self) -> String {
        format!("Memory({:?}, '{}')", self.kept.shape(), self.dtype())
    }
}

const CPU: (i32, i32) = (1, 0);
