//! Complex numbers as pairs of reals: a tensor of f32 or f64 that is marked, so that only what is right part by part is done with it.
//!
//! The mark stays with the tensor on its way through a group, and `validate` looks at it: values are moved as they are, sums and averages of
//! them are those of their parts, and any other reduction is refused. On the wire there are only reals.

use super::Tensor;
use crate::{DType, Element, Error, ReduceOp, Result};

/// The parts of complex numbers: f32 for complex64, f64 for complex128.
pub trait Real: Element {}

impl Real for f32 {}
impl Real for f64 {}

impl Tensor {
    /// A host tensor of complex numbers, each a real and an imaginary part, without a copy: of shape [numbers, 2], and its
    /// [`count`](Self::count) is of reals. (`num_complex::Complex` and C's complex types have this layout.)
    pub fn from_complex<T: Real>(numbers: Vec<[T; 2]>) -> Self {
        let count = numbers.len();
        let mut tensor = Self::from_vec(numbers.into_flattened());
        tensor.shape = vec![count, 2];
        tensor.is_complex = true;
        tensor
    }

    /// The same memory, of f32 or f64, as complex numbers: two reals that follow each other are one.
    ///
    /// `InvalidArgument` with the tensor if it has another type, or an odd number of elements.
    pub fn view_as_complex(mut self) -> Result<Self, Box<(Error, Self)>> {
        let text = match self.dtype {
            DType::F32 | DType::F64 if self.count.is_multiple_of(2) => {
                self.is_complex = true;
                return Ok(self);
            }
            DType::F32 | DType::F64 => format!(
                "{} elements are no pairs of a real and an imaginary part",
                self.count
            ),
            other => format!("complex numbers are pairs of f32 or f64, not of {other}"),
        };
        Err(Box::new((Error::invalid(text), self)))
    }

    /// The same memory as reals, which every reduction is offered for that the backend has.
    #[must_use]
    pub fn view_as_real(mut self) -> Self {
        self.is_complex = false;
        self
    }

    /// True if its elements are the parts of complex numbers.
    pub fn is_complex(&self) -> bool {
        self.is_complex
    }

    /// The complex numbers; an error if it holds none of this type, or the memory is not on the host.
    pub fn as_complex<T: Real>(&self) -> Result<&[[T; 2]]> {
        self.holds_complex()?;
        Ok(self.as_slice::<T>()?.as_chunks().0)
    }

    /// The complex numbers for writing; an error if it holds none of this type, or the memory is not on the host.
    pub fn as_complex_mut<T: Real>(&mut self) -> Result<&mut [[T; 2]]> {
        self.holds_complex()?;
        Ok(self.as_mut_slice::<T>()?.as_chunks_mut().0)
    }

    fn holds_complex(&self) -> Result<()> {
        match self.is_complex {
            true => Ok(()),
            false => Err(Error::invalid(format!(
                "the tensor holds {}, not complex numbers (view_as_complex)",
                self.dtype
            ))),
        }
    }

    /// The name of its values in messages: of the complex type, or of the dtype.
    pub fn value_name(&self) -> &'static str {
        match (self.is_complex, self.dtype) {
            (false, dtype) => dtype.name(),
            (true, DType::F32) => "complex64",
            (true, _) => "complex128",
        }
    }
}

/// Why complex numbers are not reduced with `op`; `None` if they are.
pub(crate) fn not_by_parts(op: ReduceOp, name: &str) -> Option<Error> {
    match op {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) => None,
        op => Some(Error::unsupported(format!(
            "{name} is not reduced with {op}: real and imaginary parts are reduced apart, which is right for sum, avg and premul_sum \
             only; all_gather the values and reduce them yourself, or pass view_as_real() if the parts are meant"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    #[test]
    fn pairs_go_in_without_a_copy_and_are_read_and_written_as_pairs() {
        let numbers = vec![[1f32, 2.0], [3.0, 4.0], [5.0, 6.0]];
        let at = numbers.as_ptr().cast::<u8>();
        let mut t = Tensor::from_complex(numbers);
        assert_eq!(
            (t.as_ptr(), t.shape(), t.count(), t.dtype()),
            (at, &[3, 2][..], 6, DType::F32)
        );
        assert_eq!((t.is_complex(), t.value_name()), (true, "complex64"));
        t.as_complex_mut::<f32>().unwrap()[1] = [7.0, 8.0];
        assert_eq!(
            t.as_complex::<f32>().unwrap(),
            [[1.0, 2.0], [7.0, 8.0], [5.0, 6.0]]
        );
        assert!(t.as_complex::<f64>().is_err());
        assert_eq!(format!("{t:?}"), "Tensor(complex64 [3, 2] on cpu)");
        let copy = t.duplicate().unwrap();
        assert!(copy.is_complex());
        let t = t.view_as_real();
        assert!(!t.is_complex() && t.as_complex::<f32>().is_err());
        assert_eq!(t.into_vec::<f32>().unwrap(), [1.0, 2.0, 7.0, 8.0, 5.0, 6.0]);
    }

    #[test]
    fn what_is_no_pairs_of_f32_or_f64_is_refused_and_comes_back() {
        let (e, t) = *Tensor::from_vec(vec![1f32; 3]).view_as_complex().unwrap_err();
        assert_eq!((e.kind(), t.count()), (ErrorKind::InvalidArgument, 3));
        assert!(e.to_string().contains("3 elements"), "{e}");
        let (e, _) = *Tensor::from_vec(vec![1i32; 2]).view_as_complex().unwrap_err();
        assert!(e.to_string().contains("i32"), "{e}");
        let t = Tensor::zeros(DType::F64, 4).view_as_complex().unwrap();
        assert_eq!(
            (t.value_name(), t.as_complex::<f64>().unwrap()),
            ("complex128", &[[0.0; 2]; 2][..])
        );
    }

    #[test]
    fn a_number_is_not_cut_in_two_and_parts_keep_what_they_are() {
        let t = Tensor::from_complex(vec![[1f64, 2.0], [3.0, 4.0]]);
        let (e, t) = *t.split_at(1).unwrap_err();
        assert!(
            e.to_string().contains("element 1") && e.to_string().contains("complex128"),
            "{e}"
        );
        let (a, b) = t.split_at(2).unwrap();
        assert!(a.is_complex() && b.is_complex());
        let (e, a, b) = *a.view_as_real().join(b).unwrap_err();
        assert!(e.to_string().contains("complex128"), "{e}");
        let t = a.view_as_complex().unwrap().join(b).unwrap();
        assert_eq!((t.is_complex(), t.shape()), (true, &[2, 2][..]));
        // All of it again as what its parts have become.
        let (a, b) = t.split_at(2).unwrap();
        let t = a.view_as_real().join(b.view_as_real()).unwrap();
        assert!(!t.is_complex());
    }
}
