//! Sums that show whether a group works: of integers where it reduces them, of floats where it does not, as quantised groups.
//!
//! All ranks see the same capabilities and so come to the same type.

use ftcore::{Capabilities, DType, ProcessGroup, ProcessGroupExt, ReduceOp, Tensor, Work};

use crate::{Failure, Outcome};

/// A group that sums no integers rounds: so far, in relation to the sum, is it right.
const ROUNDED: f32 = 1.0 / 64.0;

/// The types that probes can have.
pub(crate) const DTYPES: [DType; 4] = [DType::I64, DType::I32, DType::F32, DType::F64];

/// `preferred` if it is summed, else the first of [`DTYPES`] that is.
pub(crate) fn summed(capabilities: &Capabilities, preferred: DType) -> Option<DType> {
    let mut candidates = std::iter::once(preferred).chain(DTYPES);
    candidates.find(|dtype| capabilities.reduces(ReduceOp::Sum, *dtype))
}

/// A type that the group moves: f32 if possible.
pub(crate) fn moved(capabilities: &Capabilities) -> DType {
    let candidates = std::iter::once(DType::F32).chain(DType::ALL);
    let mut moved = candidates.filter(|dtype| capabilities.moves.contains(*dtype));
    moved.next().unwrap_or(DType::F32)
}

/// The type of a group's probes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Probe(DType);

impl Probe {
    /// `preferred`, one of [`DTYPES`], if `group` sums it, else another one. For cases that need [`crate::Needs::Sum`].
    pub(crate) fn of(group: &dyn ProcessGroup, preferred: DType) -> Self {
        Self(summed(group.capabilities(), preferred).unwrap_or(preferred))
    }

    /// `count` times `value`.
    pub(crate) fn tensor(self, value: i32, count: usize) -> Tensor {
        match self.0 {
            DType::I64 => Tensor::from_vec(vec![i64::from(value); count]),
            DType::I32 => Tensor::from_vec(vec![value; count]),
            DType::F64 => Tensor::from_vec(vec![f64::from(value); count]),
            _ => Tensor::from_vec(vec![value as f32; count]),
        }
    }

    /// Fails unless `sum` is `count` times `want`.
    pub(crate) fn check(self, what: &str, sum: &Tensor, want: i32, count: usize) -> Outcome {
        ensure!(
            sum.count() == count,
            "{what}: {} elements came back of {count}",
            sum.count()
        );
        let odd = match self.0 {
            DType::I64 => odd(sum.as_slice::<i64>()?, |v| *v == i64::from(want)),
            DType::I32 => odd(sum.as_slice::<i32>()?, |v| *v == want),
            DType::F64 => {
                let want = f64::from(want);
                odd(sum.as_slice::<f64>()?, |v| {
                    (v - want).abs() <= want.abs() * f64::from(ROUNDED)
                })
            }
            _ => {
                let want = want as f32;
                odd(sum.as_slice::<f32>()?, |v| {
                    (v - want).abs() <= want.abs() * ROUNDED
                })
            }
        };
        match odd {
            Some(odd) => Err(Failure::new(format!("{what}: {odd}, expected {want}"))),
            None => Ok(()),
        }
    }

    /// Begins the sum of every rank's `value`, `count` times.
    pub(crate) fn begin(self, group: &dyn ProcessGroup, value: i32, count: usize) -> Outcome<Work> {
        Ok(group.all_reduce(self.tensor(value, count), ReduceOp::Sum)?)
    }

    /// Fails unless the sum of every rank's `value` is `want`, `count` times.
    pub(crate) fn sum(
        self,
        group: &dyn ProcessGroup,
        what: &str,
        (value, want): (i32, i32),
        count: usize,
    ) -> Outcome {
        let sum = self.begin(group, value, count)?.take_tensor()?;
        self.check(what, &sum, want, count)
    }
}

/// The first value that is not right, in words.
fn odd<T: std::fmt::Debug>(values: &[T], right: impl Fn(&T) -> bool) -> Option<String> {
    let (at, value) = values.iter().enumerate().find(|(_, v)| !right(v))?;
    Some(format!("element {at} is {value:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_sum_is_found_in_every_type_and_a_rounded_float_is_not() {
        for dtype in DTYPES {
            let probe = Probe(dtype);
            let right = |value, want| probe.check("the sum", &probe.tensor(value, 9), want, 9).is_ok();
            assert!(right(640, 640) && right(0, 0) && right(-3, -3), "{dtype}");
            assert!(!right(640, 651) && !right(0, 1) && !right(-3, 3), "{dtype}");
            assert_eq!(right(645, 640), [DType::F32, DType::F64].contains(&dtype));
            assert!(probe.check("the sum", &probe.tensor(1, 8), 1, 9).is_err());
        }
        let mut sum = Tensor::from_vec(vec![3i32; 9]);
        if let Ok(values) = sum.as_mut_slice::<i32>()
            && let Some(last) = values.last_mut()
        {
            *last = 4;
        }
        let e = Probe(DType::I32).check("the sum", &sum, 3, 9).unwrap_err();
        assert!(e.to_string().contains("element 8 is 4"), "{e}");
        let nan = Tensor::from_vec(vec![f32::NAN]);
        assert!(Probe(DType::F32).check("the sum", &nan, 3, 1).is_err());
    }
}
