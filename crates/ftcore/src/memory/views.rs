//! Views: parts of one tensor that are tensors themselves, and the tensor whole again. Without a copy, and without a way to overlap: a cut makes
//! two tensors of one, and what is joined was cut.
//!
//! The tensor that was cut first is kept, out of reach, by all parts of it: it frees the memory once the last part is gone.

use std::ptr::NonNull;
use std::sync::Arc;

use super::{Owner, Tensor};
use crate::{Error, ErrorKind, Result};

impl Tensor {
    /// The first `at` elements and the rest, as one-dimensional tensors over the same memory. Each is the only way to its part, and can be given
    /// away, cut again and dropped by itself; [`join`](Self::join) undoes the cut.
    ///
    /// `InvalidArgument` with the tensor if it has fewer elements.
    pub fn split_at(self, at: usize) -> Result<(Self, Self), Box<(Error, Self)>> {
        let Some(rest) = self.count.checked_sub(at) else {
            let text = format!("a cut behind element {at} of a tensor of {}", self.count);
            return Err(Box::new((Error::invalid(text), self)));
        };
        if self.is_complex && !at.is_multiple_of(2) {
            let text = format!("a cut behind element {at} parts a {} in two", self.value_name());
            return Err(Box::new((Error::invalid(text), self)));
        }
        // Within the memory, or at its end.
        let behind = self.ptr.as_ptr().wrapping_add(at * self.dtype.size());
        let Some(behind) = NonNull::new(behind) else {
            let error = Error::new(ErrorKind::Internal, "a tensor's memory wraps around");
            return Err(Box::new((error, self)));
        };
        let (first, dtype, device) = (self.ptr, self.dtype, self.device.clone());
        let is_complex = self.is_complex;
        let whole = match &self.owner {
            Owner::Part(whole) => Some(whole.clone()),
            _ => None,
        };
        let whole = whole.unwrap_or_else(|| Arc::new(self));
        // INV-8: the two ranges are apart and were this tensor's alone. Nothing reaches `whole` before it is alone again.
        let part = |ptr, count| Self {
            ptr,
            dtype,
            shape: vec![count],
            count,
            device: device.clone(),
            is_complex,
            owner: Owner::Part(whole.clone()),
        };
        Ok((part(first, at), part(behind, rest)))
    }

    /// This part and `next`, which follows it in the tensor that both were cut from, as one. What has no other parts beside it is that
    /// tensor again: with its shape, and with the vector that it was made of.
    ///
    /// `InvalidArgument` with both if they are not such parts.
    pub fn join(mut self, next: Self) -> Result<Self, Box<(Error, Self, Self)>> {
        let refused = |text: String, parts: (Self, Self)| {
            let text = format!("{text}; parts of one tensor are joined in their order");
            Err(Box::new((Error::invalid(text), parts.0, parts.1)))
        };
        let (Owner::Part(whole), Owner::Part(other)) = (&self.owner, &next.owner) else {
            let text = "at least one of the two is no part that was split off";
            return refused(text.to_string(), (self, next));
        };
        if !Arc::ptr_eq(whole, other) {
            let text = "the two are parts of different tensors";
            return refused(text.to_string(), (self, next));
        }
        let (a, b) = (self.first_of(whole), next.first_of(whole));
        if a + self.count != b {
            let text = format!(
                "elements {b}..{} do not follow {a}..{}",
                b + next.count,
                a + self.count
            );
            return refused(text, (self, next));
        }
        if self.is_complex != next.is_complex {
            let text = format!("one holds {}, the other {}", self.value_name(), next.value_name());
            return refused(text, (self, next));
        }
        // INV-8: two ranges side by side, each of which was one tensor's alone.
        self.count += next.count;
        self.shape = vec![self.count];
        drop(next);
        Ok(self.whole_again())
    }

    /// The index of its first element in `whole`.
    fn first_of(&self, whole: &Self) -> usize {
        (self.as_ptr() as usize).wrapping_sub(whole.as_ptr() as usize) / self.dtype.size()
    }

    /// The tensor that was cut, if this is all of it and no other part is left.
    fn whole_again(mut self) -> Self {
        let Owner::Part(whole) = &self.owner else {
            return self;
        };
        if self.count != whole.count {
            return self;
        }
        let nothing = Owner::Foreign(Box::new(()));
        let Owner::Part(whole) = std::mem::replace(&mut self.owner, nothing) else {
            return self;
        };
        match Arc::try_unwrap(whole) {
            Ok(mut whole) => {
                whole.is_complex = self.is_complex;
                whole
            }
            // An empty part is left somewhere.
            Err(whole) => {
                self.owner = Owner::Part(whole);
                self
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::find_overlap;
    use super::*;
    use crate::{DType, Device};

    /// The parts between `cuts` (each in what is left behind the one before).
    fn cut(tensor: Tensor, cuts: &[usize]) -> Vec<Tensor> {
        let (mut parts, mut rest) = (Vec::new(), tensor);
        for at in cuts {
            let at = at % (rest.count() + 1);
            let (part, behind) = rest.split_at(at).unwrap();
            parts.push(part);
            rest = behind;
        }
        parts.push(rest);
        parts
    }

    /// Joins the neighbours of whom `order` says which come next.
    fn joined(mut parts: Vec<Tensor>, order: &[usize]) -> Tensor {
        let mut order = order.iter().cycle();
        while parts.len() > 1 {
            let i = order.next().unwrap() % (parts.len() - 1);
            let next = parts.remove(i + 1);
            let part = parts.remove(i);
            parts.insert(i, part.join(next).unwrap());
        }
        parts.remove(0)
    }

    proptest! {
        #[test]
        fn parts_cover_the_tensor_without_overlap_and_joined_in_any_order_they_are_it_again(
            count in 0usize..60,
            cuts in proptest::collection::vec(0usize..60, 1..8),
            order in proptest::collection::vec(0usize..8, 1..8),
        ) {
            let values: Vec<u32> = (0..count as u32).collect();
            let at = values.as_ptr();
            let tensor = Tensor::from_vec(values).reshape(&[1, count]).unwrap();
            let mut parts = cut(tensor, &cuts);
            prop_assert_eq!(find_overlap(&parts.iter().collect::<Vec<_>>()), None);
            let mut next = 0u32;
            for part in &mut parts {
                prop_assert_eq!(part.shape(), [part.count()]);
                for value in part.as_mut_slice::<u32>().unwrap() {
                    prop_assert_eq!(*value, next);
                    next += 1;
                    *value += 1000;
                }
            }
            prop_assert_eq!(next as usize, count);
            let whole = joined(parts, &order);
            prop_assert_eq!(whole.shape(), [1, count]);
            let values = whole.into_vec::<u32>().unwrap();
            prop_assert_eq!(values.as_ptr(), at, "the same vector");
            prop_assert_eq!(values, (1000..1000 + count as u32).collect::<Vec<_>>());
        }

        #[test]
        fn only_neighbours_in_their_order_are_joined_and_what_is_refused_comes_back(
            count in 1usize..40,
            cuts in proptest::collection::vec(0usize..40, 2..6),
            (a, b) in (0usize..6, 0usize..6),
        ) {
            let mut parts = cut(Tensor::from_vec((0..count as u16).collect()), &cuts);
            let (a, b) = (a % parts.len(), b % parts.len());
            prop_assume!(a != b);
            let first = |i: usize| parts.iter().take(i).map(Tensor::count).sum::<usize>();
            let fits = first(a) + parts[a].count() == first(b);
            let content = |t: &Tensor| t.as_slice::<u16>().unwrap().to_vec();
            let expected = [content(&parts[a]), content(&parts[b])];
            let second = parts.remove(b);
            let first = parts.remove(if a > b { a - 1 } else { a });
            match first.join(second) {
                Ok(one) => {
                    prop_assert!(fits);
                    prop_assert_eq!(content(&one), expected.concat());
                }
                Err(refused) => {
                    prop_assert!(!fits, "{}", refused.0);
                    let (error, first, second) = *refused;
                    prop_assert_eq!(error.kind(), ErrorKind::InvalidArgument);
                    prop_assert_eq!([content(&first), content(&second)], expected);
                }
            }
        }
    }

    #[test]
    fn a_cut_behind_the_end_and_parts_of_two_tensors_are_refused_by_name() {
        let (e, t) = *Tensor::from_vec(vec![1u8, 2]).split_at(3).unwrap_err();
        assert!(e.to_string().contains("element 3 of a tensor of 2"), "{e}");
        let (a, b) = t.split_at(1).unwrap();
        let (c, d) = Tensor::from_vec(vec![3u8, 4]).split_at(1).unwrap();
        let (e, a, d) = *a.join(d).unwrap_err();
        assert!(e.to_string().contains("different tensors"), "{e}");
        let (e, c, b) = *c.join(b).unwrap_err();
        assert!(e.to_string().contains("different tensors"), "{e}");
        let (e, b, a) = *b.join(a).unwrap_err();
        assert!(e.to_string().contains("elements 0..1 do not follow 1..2"), "{e}");
        let (e, a, _) = *a.join(Tensor::from_vec(vec![9u8])).unwrap_err();
        assert!(e.to_string().contains("split off"), "{e}");
        assert_eq!(a.join(b).unwrap().into_vec::<u8>().unwrap(), [1, 2]);
        assert_eq!(c.join(d).unwrap().into_vec::<u8>().unwrap(), [3, 4]);
    }

    #[test]
    fn the_memory_lives_until_the_last_part_is_gone_and_no_longer() {
        let alive = Arc::new(());
        let mut memory = vec![7u64; 6];
        let ptr = NonNull::new(memory.as_mut_ptr()).unwrap().cast();
        let whole = super::super::tests::foreign(ptr, DType::U64, 6, Device::CPU, alive.clone());
        let (first, rest) = whole.split_at(2).unwrap();
        let (second, third) = rest.split_at(2).unwrap();
        drop(first);
        drop(third);
        assert_eq!(Arc::strong_count(&alive), 2);
        assert_eq!(second.as_slice::<u64>().unwrap(), [7, 7]);
        drop(second);
        assert_eq!(Arc::strong_count(&alive), 1);
    }

    #[test]
    fn a_part_of_memory_that_others_read_is_never_written() {
        let bytes = Arc::new(vec![1u8, 2, 3, 4]);
        struct Readers(Arc<Vec<u8>>);
        impl AsRef<[u8]> for Readers {
            fn as_ref(&self) -> &[u8] {
                &self.0
            }
        }
        let (a, mut b) = Tensor::from_shared(Readers(bytes.clone())).split_at(2).unwrap();
        assert!(a.is_shared() && b.is_shared());
        b.bytes_mut().fill(9);
        assert_eq!((b.bytes(), b.is_shared()), (&[9u8, 9][..], false));
        assert_eq!(&bytes[..], [1, 2, 3, 4]);
        assert!(a.join(b).is_err(), "it has memory of its own now");
    }
}
