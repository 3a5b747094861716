//! Tensors lent to a thread that sits in a library call which cannot be cancelled.
//!
//! [`lend`] splits tensors in two: [`Held`] keeps them, [`Lent`] has their addresses and is the only way to the bytes. As long
//! as the `Lent` lives, the tensors cannot be taken out again; a `Held` that is given up meanwhile leaks them, counted
//! (INV-8). So the bytes behind a `Lent` are always valid, however late its thread returns.

use std::sync::Arc;

use ftcore::Tensor;

use super::sycl;

/// The tensors, out of reach until the [`Lent`] is gone.
pub(crate) struct Held {
    tensors: Vec<Tensor>,
    out: Arc<()>,
}

/// Access to the bytes of the tensors that another owner holds.
pub(crate) struct Lent {
    spans: Vec<Span>,
    _out: Arc<()>,
}

#[derive(Clone, Copy)]
struct Span {
    at: *mut u8,
    bytes: usize,
    is_host: bool,
}

// SAFETY: the memory is reachable through this one value only, and is kept alive by `Held` or leaked by it.
unsafe impl Send for Lent {}

/// Lends tensors. Those on a device have no bytes here, only a [`span`](Lent::span).
pub(crate) fn lend(mut tensors: Vec<Tensor>) -> (Held, Lent) {
    let out = Arc::new(());
    let spans = tensors
        .iter_mut()
        .map(|t| Span {
            at: t.as_mut_ptr(),
            bytes: t.byte_len(),
            is_host: t.device().is_cpu(),
        })
        .collect();
    let lent = Lent {
        spans,
        _out: out.clone(),
    };
    (Held { tensors, out }, lent)
}

impl Held {
    /// The tensors, once the `Lent` is gone; otherwise they are leaked and counted.
    pub(crate) fn take(mut self) -> Vec<Tensor> {
        if Arc::strong_count(&self.out) == 1 {
            std::mem::take(&mut self.tensors)
        } else {
            Vec::new()
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if Arc::strong_count(&self.out) > 1 {
            for tensor in self.tensors.drain(..) {
                tensor.leak("a oneCCL call that cannot be cancelled may still use it");
            }
        }
    }
}

impl Lent {
    /// How many tensors.
    pub(crate) fn len(&self) -> usize {
        self.spans.len()
    }

    fn host(&self, index: usize) -> Span {
        let host = self.spans.get(index).copied().filter(|s| s.is_host);
        host.unwrap_or(Span {
            at: std::ptr::NonNull::dangling().as_ptr(),
            bytes: 0,
            is_host: true,
        })
    }

    /// The memory of tensor `index` for calls, and for commands of a device; empty for one that is not there. Valid for as long as self.
    pub(crate) fn span(&self, index: usize) -> sycl::Span {
        match self.spans.get(index) {
            Some(span) => sycl::Span::new(span.at, span.bytes),
            None => sycl::Span::EMPTY,
        }
    }

    /// The bytes of tensor `index`; empty for one that is not there.
    pub(crate) fn bytes(&self, index: usize) -> &[u8] {
        let span = self.host(index);
        // SAFETY: see the type: valid for as long as self, and nothing else writes.
        unsafe { std::slice::from_raw_parts(span.at, span.bytes) }
    }

    /// The bytes of tensor `index` for writing.
    pub(crate) fn bytes_mut(&mut self, index: usize) -> &mut [u8] {
        let span = self.host(index);
        // SAFETY: as above; &mut self is the only access.
        unsafe { std::slice::from_raw_parts_mut(span.at, span.bytes) }
    }

    /// The bytes of one tensor, and those of another for writing. Two tensors of one call never overlap (validated); the
    /// same index twice gives an empty first part.
    pub(crate) fn pair(&mut self, from: usize, into: usize) -> (&[u8], &mut [u8]) {
        let (a, b) = (self.host(from), self.host(into));
        let a = if from == into { Span { bytes: 0, ..a } } else { a };
        // SAFETY: different tensors of one call do not overlap (`ftcore::validate`), and &mut self is the only access.
        unsafe {
            (
                std::slice::from_raw_parts(a.at, a.bytes),
                std::slice::from_raw_parts_mut(b.at, b.bytes),
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_come_back_with_what_was_written_once_the_loan_has_ended() {
        let (held, mut lent) = lend(vec![
            Tensor::from_vec(vec![1u8, 2]),
            Tensor::from_vec(vec![0u8; 2]),
        ]);
        let (from, into) = lent.pair(0, 1);
        into.copy_from_slice(from);
        assert_eq!((lent.len(), lent.bytes(1)), (2, &[1u8, 2][..]));
        assert_eq!(lent.bytes(7), &[0u8; 0]);
        drop(lent);
        let tensors = held.take();
        assert_eq!(tensors[1].as_slice::<u8>().unwrap(), [1, 2]);
    }

    #[test]
    fn tensors_given_up_while_they_are_lent_are_leaked_and_stay_valid() {
        let before = ftcore::leaked_bytes();
        let (held, mut lent) = lend(vec![Tensor::from_vec(vec![5u64; 100])]);
        assert!(held.take().is_empty());
        assert_eq!(ftcore::leaked_bytes() - before, 800);
        lent.bytes_mut(0).fill(7);
        assert_eq!(lent.bytes(0), [7u8; 800]);
    }
}
