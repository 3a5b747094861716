//! The state of a replica as plain data: named tensors and string metadata.
//!
//! Providers (model, optimiser, DiLoCo fragments, data loader) each fill a [`StateDict`]; [`StateDict::merge`] puts
//! them side by side under prefixes and [`StateDict::split`] takes them apart again after healing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use ftcore::{DType, Element, Error, ErrorKind, Result, Tensor, wrong_device};

use crate::room::room_for;

/// One tensor: contiguous, row-major, little-endian elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateTensor {
    /// The element type.
    pub dtype: DType,
    /// The dimensions, outermost first; empty for a scalar.
    pub shape: Vec<usize>,
    /// `product(shape) * dtype.size()` bytes. A clone shares them: they do not change any more.
    pub data: Bytes,
}

impl StateTensor {
    /// A tensor, checked: `ErrorKind::InvalidArgument` if `data` is not exactly as long as `dtype` and `shape` say.
    pub fn new(dtype: DType, shape: Vec<usize>, data: impl Into<Bytes>) -> Result<Self> {
        let data = data.into();
        let tensor = Self { dtype, shape, data };
        tensor.check("the tensor")?;
        Ok(tensor)
    }

    /// The number of elements; `None` if the product of the shape does not fit a `usize`.
    pub fn elements(&self) -> Option<usize> {
        self.shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d))
    }

    /// The public fields may have been changed, so every way out of the process checks again.
    pub fn check(&self, name: &str) -> Result<()> {
        let expected = self.elements().and_then(|n| n.checked_mul(self.dtype.size()));
        if expected == Some(self.data.len()) {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "{name}: {} of shape {:?} takes {} bytes, but {} are given",
            self.dtype,
            self.shape,
            expected.map_or_else(|| "more than memory has".into(), |n| n.to_string()),
            self.data.len()
        )))
    }
}

/// Elements that are converted before they are written.
const COPIED_AT_ONCE: usize = 2048;

/// `tensor` for writing. If a state shares it ([`StateDict::insert_shared`]), the caller goes on with a copy, and the state keeps what it has.
/// `InvalidArgument` for one that is shared and not in host memory.
pub fn writable(tensor: &mut Arc<Tensor>) -> Result<&mut Tensor> {
    if Arc::get_mut(tensor).is_none() {
        if !tensor.device().is_cpu() {
            return Err(wrong_device(
                tensor,
                "host memory: only that is copied when it is shared",
            ));
        }
        *tensor = Arc::new(tensor.duplicate()?);
    }
    Arc::get_mut(tensor)
        .ok_or_else(|| Error::new(ErrorKind::Internal, "a tensor is shared that was just made"))
}

/// A tensor that a state and its owner share.
struct Shared(Arc<Tensor>);

impl AsRef<[u8]> for Shared {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}

/// An ordered map from names to tensors, with string metadata beside it.
///
/// Names are any non-empty text except `__metadata__` (the file format keeps that one); by convention
/// `provider/module.weight`. Metadata keys that start with `checkpoint::RESERVED_METADATA_PREFIX` are refused on encoding.
///
/// ```
/// use oxccl_replica::StateDict;
///
/// let mut state = StateDict::new();
/// state.insert_f32("layer.weight", &[2, 2], &[1.0, 2.0, 3.0, 4.0])?;
/// state.insert_i64s("next sample", &[128])?;
/// assert_eq!(state.get_f32_shaped("layer.weight", &[2, 2])?, [1.0, 2.0, 3.0, 4.0]);
/// assert!(state.get_f32_shaped("layer.weight", &[4, 4]).is_err()); // another model
/// # Ok::<(), ftcore::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StateDict {
    tensors: BTreeMap<String, StateTensor>,
    metadata: BTreeMap<String, String>,
}

impl StateDict {
    /// An empty state.
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts `tensor` under `name`, replacing what is there. `InvalidArgument` if the name is empty or reserved, or
    /// the data does not fit dtype and shape.
    pub fn insert(&mut self, name: impl Into<String>, tensor: StateTensor) -> Result<()> {
        let name = name.into();
        check_name(&name)?;
        tensor.check(&format!("tensor '{name}'"))?;
        self.tensors.insert(name, tensor);
        Ok(())
    }

    /// [`Self::insert`] for f32 values.
    pub fn insert_f32(&mut self, name: impl Into<String>, shape: &[usize], values: &[f32]) -> Result<()> {
        self.insert_values(name, shape, values, |v| v.to_le_bytes())
    }

    /// [`Self::insert`] for one-dimensional f32 tensors, each as `prefix/name`.
    pub fn insert_f32s(&mut self, prefix: &str, tensors: &[(String, Vec<f32>)]) -> Result<()> {
        let mut all = tensors.iter();
        all.try_for_each(|(name, values)| {
            self.insert_f32(format!("{prefix}/{name}"), &[values.len()], values)
        })
    }

    /// [`Self::insert`] for a one-dimensional i64 tensor (counters, seeds, positions).
    pub fn insert_i64s(&mut self, name: impl Into<String>, values: &[i64]) -> Result<()> {
        self.insert_values(name, &[values.len()], values, |v| v.to_le_bytes())
    }

    fn insert_values<T: Element, const N: usize>(
        &mut self,
        name: impl Into<String>,
        shape: &[usize],
        values: &[T],
        bytes: impl Fn(T) -> [u8; N],
    ) -> Result<()> {
        let mut data = room_for(size_of_val(values));
        // By way of the core's cache, so that each byte of the large memory is written once.
        let mut some = vec![0; values.len().min(COPIED_AT_ONCE).saturating_mul(N)];
        for piece in values.chunks(COPIED_AT_ONCE) {
            for (to, from) in some.as_chunks_mut::<N>().0.iter_mut().zip(piece) {
                *to = bytes(*from);
            }
            data.extend_from_slice(some.get(..size_of_val(piece)).unwrap_or_default());
        }
        self.insert(
            name,
            StateTensor {
                dtype: T::DTYPE,
                shape: shape.to_vec(),
                data: data.freeze(),
            },
        )
    }

    /// [`Self::insert`] of a host tensor that the caller shares, without a copy. Its last owner frees it. The caller cannot write to it as long as a
    /// state shares it ([`Arc::get_mut`]); it then goes on with a copy of its own. `InvalidArgument` also for a tensor on another device.
    pub fn insert_shared(&mut self, name: impl Into<String>, tensor: &Arc<Tensor>) -> Result<()> {
        if !tensor.device().is_cpu() {
            return Err(wrong_device(tensor, "host memory: copy it there first"));
        }
        let shared = StateTensor {
            dtype: tensor.dtype(),
            shape: tensor.shape().to_vec(),
            data: Bytes::from_owner(Shared(Arc::clone(tensor))),
        };
        self.insert(name, shared)
    }

    /// The tensor `name`, if there is one.
    pub fn get(&self, name: &str) -> Option<&StateTensor> {
        self.tensors.get(name)
    }

    /// The elements of the f32 tensor `name`, row-major. `ErrorKind::NotFound` if there is none (near names are
    /// listed), `InvalidArgument` naming expected and found dtype if it is not f32.
    pub fn get_f32(&self, name: &str) -> Result<Vec<f32>> {
        self.get_values(name, f32::from_le_bytes)
    }

    /// The f32 tensors whose names are `prefix/name`, by `name`. Errors: as in [`Self::get_f32`], for one of another dtype.
    pub fn f32s_under(&self, prefix: &str) -> Result<Vec<(String, Vec<f32>)>> {
        let under = self.tensors.keys().filter_map(|key| {
            let name = key.strip_prefix(prefix)?.strip_prefix('/')?;
            Some(self.get_f32(key).map(|values| (name.to_owned(), values)))
        });
        under.collect()
    }

    /// Like [`Self::get_f32`], and the shape must be `shape` too: `InvalidArgument` names both otherwise.
    pub fn get_f32_shaped(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let tensor = self.find(name)?;
        if tensor.shape != shape {
            return Err(Error::invalid(format!(
                "tensor '{name}': expected shape {shape:?}, found {:?} ({})",
                tensor.shape, tensor.dtype
            )));
        }
        self.get_f32(name)
    }

    /// The elements of the i64 tensor `name`; errors as in [`Self::get_f32`].
    pub fn get_i64s(&self, name: &str) -> Result<Vec<i64>> {
        self.get_values(name, i64::from_le_bytes)
    }

    fn get_values<T: Element, const N: usize>(
        &self,
        name: &str,
        value: impl Fn([u8; N]) -> T,
    ) -> Result<Vec<T>> {
        let tensor = self.find(name)?;
        if tensor.dtype != T::DTYPE {
            return Err(Error::invalid(format!(
                "tensor '{name}': expected {}, found {} of shape {:?}",
                T::DTYPE,
                tensor.dtype,
                tensor.shape
            )));
        }
        Ok(tensor.data.as_chunks::<N>().0.iter().map(|b| value(*b)).collect())
    }

    fn find(&self, name: &str) -> Result<&StateTensor> {
        self.tensors.get(name).ok_or_else(|| {
            let some: Vec<_> = self.tensors.keys().take(8).map(String::as_str).collect();
            let more = if self.tensors.len() > some.len() {
                ", …"
            } else {
                ""
            };
            Error::new(
                ErrorKind::NotFound,
                format!(
                    "no tensor '{name}' among the {} of this state: {}{more}",
                    self.tensors.len(),
                    some.join(", ")
                ),
            )
        })
    }

    /// Takes the tensor `name` out.
    pub fn remove(&mut self, name: &str) -> Option<StateTensor> {
        self.tensors.remove(name)
    }

    /// Names and tensors, in the order of the names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &StateTensor)> {
        self.tensors.iter().map(|(n, t)| (n.as_str(), t))
    }

    /// The number of tensors.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// True without tensors (there may be metadata).
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// The bytes of all tensors together.
    pub fn total_bytes(&self) -> usize {
        self.tensors
            .values()
            .fold(0, |n, t| n.saturating_add(t.data.len()))
    }

    /// Sets a metadata entry, replacing what is there.
    pub fn set_metadata(&mut self, key: impl Into<String>, value: impl Into<String>) {
        self.metadata.insert(key.into(), value.into());
    }

    /// All metadata.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// The first tensor, in the order of names, that the two do not have alike in dtype and shape, and how it is on either side;
    /// `None` if there is none. Values are not compared.
    pub fn first_difference(&self, other: &Self) -> Option<String> {
        let names: BTreeSet<&String> = self.tensors.keys().chain(other.tensors.keys()).collect();
        let kind = |t: Option<&StateTensor>| {
            t.map_or_else(
                || "absent".to_owned(),
                |t| format!("{} of shape {:?}", t.dtype, t.shape),
            )
        };
        names.into_iter().find_map(|name| {
            let (here, there) = (kind(self.tensors.get(name)), kind(other.tensors.get(name)));
            (here != there).then(|| format!("tensor '{name}': {here} here, {there} there"))
        })
    }

    /// Takes over all of `other` as `prefix/name`, metadata too. On an error (`InvalidArgument` for an empty prefix
    /// or one that ends in '/', `Conflict` naming the first name that exists already) nothing has changed.
    pub fn merge(&mut self, prefix: &str, other: Self) -> Result<()> {
        check_prefix(prefix)?;
        let under = |name: String| format!("{prefix}/{name}");
        self.add(Self {
            tensors: other.tensors.into_iter().map(|(n, t)| (under(n), t)).collect(),
            metadata: other.metadata.into_iter().map(|(k, v)| (under(k), v)).collect(),
        })
    }

    /// Puts all of `other` beside what is here. `Conflict` for a name that is taken, with nothing changed.
    pub fn add(&mut self, other: Self) -> Result<()> {
        let tensor = other.tensors.keys().find(|n| self.tensors.contains_key(*n));
        let metadata = || other.metadata.keys().find(|k| self.metadata.contains_key(*k));
        if let Some(name) = tensor.or_else(metadata) {
            return Err(Error::new(
                ErrorKind::Conflict,
                format!("'{name}' is in the state already"),
            ));
        }
        self.tensors.extend(other.tensors);
        self.metadata.extend(other.metadata);
        Ok(())
    }

    /// The reverse of [`Self::merge`]: moves everything under `prefix/` into a state of its own, without the prefix.
    /// Empty if nothing is there. `InvalidArgument` for an empty prefix or one that ends in '/'.
    pub fn split(&mut self, prefix: &str) -> Result<Self> {
        check_prefix(prefix)?;
        let prefix = format!("{prefix}/");
        Ok(Self {
            tensors: split_map(&mut self.tensors, &prefix),
            metadata: split_map(&mut self.metadata, &prefix),
        })
    }
}

fn split_map<V>(map: &mut BTreeMap<String, V>, prefix: &str) -> BTreeMap<String, V> {
    let mut from_prefix = map.split_off(prefix);
    let below = from_prefix.keys().find(|k| !k.starts_with(prefix)).cloned();
    if let Some(first_after) = below {
        map.append(&mut from_prefix.split_off(&first_after));
    }
    let strip = |(k, v): (String, V)| (k.strip_prefix(prefix).map_or(k.clone(), str::to_owned), v);
    from_prefix.into_iter().map(strip).collect()
}

/// Whether `name` can be the name of a tensor: `ErrorKind::InvalidArgument` if it is empty or the one that the file format keeps.
pub fn check_name(name: &str) -> Result<()> {
    if name.is_empty() || name == "__metadata__" {
        return Err(Error::invalid(format!("'{name}' cannot be the name of a tensor")));
    }
    Ok(())
}

fn check_prefix(prefix: &str) -> Result<()> {
    if prefix.is_empty() || prefix.ends_with('/') {
        return Err(Error::invalid(format!(
            "a prefix is not empty and does not end in '/' (it is added); got '{prefix}'"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_dtype_shape_or_name_is_an_error_that_names_both_sides() {
        let mut s = StateDict::new();
        s.insert_f32("w", &[2, 3], &[1.0; 6]).unwrap();
        s.insert_i64s("n", &[7, -1]).unwrap();
        assert_eq!(s.get_i64s("n").unwrap(), [7, -1]);
        let e = s.get_i64s("w").unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidArgument);
        assert_eq!(e.message(), "tensor 'w': expected i64, found f32 of shape [2, 3]");
        let e = s.get_f32_shaped("w", &[3, 2]).unwrap_err();
        assert_eq!(
            e.message(),
            "tensor 'w': expected shape [3, 2], found [2, 3] (f32)"
        );
        let e = s.get_f32("v").unwrap_err();
        assert_eq!(e.kind(), ErrorKind::NotFound);
        assert!(e.message().contains("'v'") && e.message().contains("n, w"), "{e}");
    }

    #[test]
    fn tensors_put_under_a_prefix_come_back_by_their_names_and_no_others() {
        let mut s = StateDict::new();
        s.insert_f32("owed", &[1], &[9.0]).unwrap();
        s.insert_i64s("owed-2/c", &[9]).unwrap();
        let all = [("a/b".to_owned(), vec![1.0, 2.0]), ("c".to_owned(), Vec::new())];
        s.insert_f32s("owed", &all).unwrap();
        assert_eq!(s.get_f32_shaped("owed/a/b", &[2]).unwrap(), [1.0, 2.0]);
        assert_eq!(s.f32s_under("owed").unwrap(), all);
        let e = s.f32s_under("owed-2").unwrap_err();
        assert!(e.message().contains("'owed-2/c': expected f32"), "{e}");
    }

    #[test]
    fn two_states_of_different_models_are_told_apart_by_their_first_tensor() {
        let state = |shapes: &[(&str, usize)]| {
            let mut s = StateDict::new();
            for (name, n) in shapes {
                s.insert_f32(*name, &[*n], &vec![0.5; *n]).unwrap();
            }
            s
        };
        let one = state(&[("a", 1), ("b", 2)]);
        assert_eq!(one.first_difference(&one), None);
        let text = one
            .first_difference(&state(&[("a", 1), ("b", 3), ("c", 1)]))
            .unwrap();
        assert_eq!(text, "tensor 'b': f32 of shape [2] here, f32 of shape [3] there");
        let text = state(&[]).first_difference(&one).unwrap();
        assert_eq!(text, "tensor 'a': absent here, f32 of shape [1] there");
    }

    #[test]
    fn a_shared_tensor_stays_as_it_was_for_those_who_read_while_its_owner_goes_on_with_a_copy() {
        let mut own = Arc::new(Tensor::from_vec(vec![1.0f32, 2.0]));
        let mut state = StateDict::new();
        state.insert_shared("w", &own).unwrap();
        let reader = state.clone();
        assert_eq!(
            reader.get("w").unwrap().data.as_ptr(),
            own.as_ptr(),
            "nothing was copied"
        );
        let write = |own: &mut Arc<Tensor>, value| {
            let own = writable(own).unwrap();
            own.as_mut_slice::<f32>().unwrap().fill(value);
            own.as_ptr()
        };
        let moved = write(&mut own, 9.0);
        assert_eq!(reader.get_f32("w").unwrap(), [1.0, 2.0]);
        assert_eq!(own.as_slice::<f32>().unwrap(), [9.0, 9.0]);
        assert_eq!(write(&mut own, 8.0), moved, "the copy is not shared");
        assert_eq!(own.shape(), [2]);
    }

    #[test]
    fn values_are_copied_whole_however_many_they_are() {
        for count in [0, 1, COPIED_AT_ONCE, COPIED_AT_ONCE + 1, 3 * COPIED_AT_ONCE - 1] {
            let values: Vec<f32> = (0..count).map(|i| i as f32).collect();
            let mut s = StateDict::new();
            s.insert_f32("w", &[count], &values).unwrap();
            assert_eq!(s.get_f32("w").unwrap(), values);
        }
    }

    #[test]
    fn data_that_does_not_fill_the_shape_is_refused() {
        let mut s = StateDict::new();
        let e = s.insert_f32("w", &[2, 2], &[1.0; 3]).unwrap_err();
        assert_eq!(
            e.message(),
            "tensor 'w': f32 of shape [2, 2] takes 16 bytes, but 12 are given"
        );
        assert!(StateTensor::new(DType::F64, vec![usize::MAX, 2], vec![]).is_err());
        assert!(s.insert_f32("", &[0], &[]).is_err());
        assert!(s.insert_f32("__metadata__", &[0], &[]).is_err());
        assert!(s.is_empty());
    }

    #[test]
    fn providers_merged_under_prefixes_come_apart_unchanged() {
        let part = |x: f32| {
            let mut s = StateDict::new();
            s.insert_f32("w", &[], &[x]).unwrap();
            s.set_metadata("lr", x.to_string());
            s
        };
        let mut all = StateDict::new();
        for (prefix, x) in [
            ("diloco", 1.0),
            ("diloco-2", 2.0),
            ("dilocoz", 3.0),
            ("diloco/0", 4.0),
        ] {
            all.merge(prefix, part(x)).unwrap();
        }
        let e = all.merge("dilocoz", part(9.0)).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Conflict);
        assert!(e.message().contains("dilocoz/w"), "{e}");
        assert!(all.merge("a/", part(0.0)).is_err() && all.merge("", part(0.0)).is_err());

        assert_eq!(all.split("diloco/0").unwrap(), part(4.0));
        assert_eq!(all.split("diloco").unwrap(), part(1.0));
        assert_eq!(all.split("absent").unwrap(), StateDict::new());
        assert_eq!(all.split("dilocoz").unwrap(), part(3.0));
        assert_eq!(all.split("diloco-2").unwrap(), part(2.0));
        assert_eq!(all, StateDict::new());
    }
}
