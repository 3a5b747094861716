//! Memory that is reduced in, kept from step to step.

use ftcore::{DType, Tensor};

use crate::Replica;

/// What buckets were reduced in, for the next step. Once made it is used again and again, so it is of [`Replica::alloc`]: ranks of one host read
/// each other's gradients there, and no step pays for new pages.
#[derive(Debug, Default)]
pub struct Spare(Vec<Tensor>);

impl Spare {
    /// A host tensor of `count` elements, whose values are those of an earlier step.
    pub fn take(&mut self, replica: &(impl Replica + ?Sized), dtype: DType, count: usize) -> Tensor {
        let fits = |t: &Tensor| (t.dtype(), t.count()) == (dtype, count);
        match self.0.iter().position(fits) {
            Some(at) => self.0.swap_remove(at),
            None => replica.alloc(dtype, count),
        }
    }

    /// The step is over, and these have been read. They take the place of what is left of earlier ones.
    pub fn keep(&mut self, reduced: Vec<Tensor>) {
        self.0 = reduced;
    }
}
