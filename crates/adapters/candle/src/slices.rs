//! A tensor's own storage as a slice: borrowed for reading, and in place for writing. No copies, no unsafe.
//!
//! candle guards each storage with a lock that is held while the closure runs, so a closure must not use the same
//! tensor again (a write would wait for itself).

use std::cell::{Cell, RefCell};

use candle_core::{CpuStorage, InplaceOp1, Layout, Storage, Tensor};
use ftcore::{Error, Result};

use crate::candle_error;

/// Why the elements of a tensor cannot be one f32 slice; `None` if they can.
fn obstacle(storage_is_cpu: bool, dtype: candle_core::DType, layout: &Layout) -> Option<String> {
    if !storage_is_cpu {
        return Some("is not on the CPU".to_owned());
    }
    if dtype != candle_core::DType::F32 {
        return Some(format!("has dtype {dtype:?}, not f32"));
    }
    if !layout.is_contiguous() {
        return Some(format!(
            "is not contiguous (shape {:?}, stride {:?})",
            layout.dims(),
            layout.stride()
        ));
    }
    None
}

/// Fails, naming the tensor, unless it is a contiguous f32 tensor on the CPU.
pub(crate) fn check(what: &str, tensor: &Tensor) -> Result<()> {
    match obstacle(tensor.device().is_cpu(), tensor.dtype(), tensor.layout()) {
        None => Ok(()),
        Some(why) => Err(Error::invalid(format!("{what} {why}"))),
    }
}

/// Calls `f` with the elements of `tensor`.
pub(crate) fn read<R>(what: &str, tensor: &Tensor, f: impl FnOnce(&[f32]) -> R) -> Result<R> {
    check(what, tensor)?;
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(CpuStorage::F32(all)) = &*storage else {
        return Err(Error::invalid(format!("{what} is not held as f32 on the CPU")));
    };
    let slice = all
        .get(layout.start_offset()..)
        .and_then(|s| s.get(..layout.shape().elem_count()))
        .ok_or_else(|| {
            Error::invalid(format!(
                "{what} reaches past its storage of {} elements",
                all.len()
            ))
        })?;
    Ok(f(slice))
}

/// Calls `f` with the elements of `tensor` for writing; every view of the same storage sees the change.
pub(crate) fn write<R>(what: &str, tensor: &Tensor, f: impl FnOnce(&mut [f32]) -> R) -> Result<R> {
    check(what, tensor)?;
    let op = WriteInPlace {
        f: RefCell::new(Some(f)),
        result: Cell::new(None),
    };
    tensor
        .inplace_op1(&op)
        .map_err(|e| candle_error(format_args!("writing {what}"), e))?;
    op.result
        .into_inner()
        .ok_or_else(|| Error::invalid(format!("{what} is not held as f32 on the CPU")))
}

/// candle lends `&mut` storage only to an in-place operation; this one runs a closure on it, once.
struct WriteInPlace<F, R> {
    f: RefCell<Option<F>>,
    result: Cell<Option<R>>,
}

impl<R, F: FnOnce(&mut [f32]) -> R> InplaceOp1 for WriteInPlace<F, R> {
    fn name(&self) -> &'static str {
        "oxccl-write-in-place"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let CpuStorage::F32(all) = storage else {
            candle_core::bail!("the storage is not f32");
        };
        let held = all.len();
        let slice = all
            .get_mut(layout.start_offset()..)
            .and_then(|s| s.get_mut(..layout.shape().elem_count()))
            .ok_or_else(|| {
                candle_core::Error::Msg(format!("it reaches past its storage of {held} elements"))
            })?;
        if let Some(f) = self.f.borrow_mut().take() {
            self.result.set(Some(f(slice)));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    #[test]
    fn l14_a_strided_tensor_is_refused_by_name_and_its_neighbours_stay_untouched() {
        let base = Var::from_slice(&[1f32, 2.0, 3.0, 4.0, 5.0, 6.0], (2, 3), &Device::Cpu).unwrap();
        let column = base.narrow(1, 1, 1).unwrap();
        let e = write("'column'", &column, |s| s.fill(0.0)).unwrap_err();
        assert!(
            e.to_string()
                .contains("'column' is not contiguous (shape [2, 1], stride [3, 1])"),
            "{e}"
        );
        assert!(read("'column'", &column, |_| ()).is_err());
        assert_eq!(
            base.as_tensor().to_vec2::<f32>().unwrap(),
            [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
        );
    }

    #[test]
    fn a_contiguous_view_is_read_and_written_at_its_own_place() {
        let base = Var::from_slice(&[1f32, 2.0, 3.0, 4.0, 5.0, 6.0], (2, 3), &Device::Cpu).unwrap();
        let row = base.narrow(0, 1, 1).unwrap();
        assert_eq!(read("'row'", &row, <[f32]>::to_vec).unwrap(), [4.0, 5.0, 6.0]);
        write("'row'", &row, |s| s.fill(9.0)).unwrap();
        assert_eq!(
            base.as_tensor().to_vec2::<f32>().unwrap(),
            [[1.0, 2.0, 3.0], [9.0, 9.0, 9.0]]
        );
    }
}
