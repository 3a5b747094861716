//! Parameters as named f32 slices, whatever framework holds them.

use ftcore::{Device, Error, Result};
use replica::{State, StateDict};

/// A fixed, ordered list of named f32 tensors that live somewhere else.
///
/// Order, names and counts must be the same on every replica and never change.
///
/// ```
/// use ftcore::{Error, Result};
/// use oxccl_diloco::Parameters;
///
/// /// One matrix of a model of one's own.
/// struct Mine(Vec<f32>);
///
/// impl Parameters for Mine {
///     fn len(&self) -> usize {
///         1
///     }
///     fn name(&self, i: usize) -> &str {
///         if i == 0 { "layer.0.weight" } else { "" }
///     }
///     fn count(&self, i: usize) -> usize {
///         if i == 0 { self.0.len() } else { 0 }
///     }
///     fn read(&self, i: usize, f: &mut dyn FnMut(&[f32])) -> Result<()> {
///         (i == 0).then(|| f(&self.0)).ok_or_else(|| Error::invalid("one parameter"))
///     }
///     fn write(&mut self, i: usize, f: &mut dyn FnMut(&mut [f32])) -> Result<()> {
///         (i == 0).then(|| f(&mut self.0)).ok_or_else(|| Error::invalid("one parameter"))
///     }
/// }
/// ```
pub trait Parameters {
    /// The number of tensors.
    fn len(&self) -> usize;
    /// True if there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// The name of tensor `i`; `""` if there is none.
    fn name(&self, i: usize) -> &str;
    /// The number of elements of tensor `i`; 0 if there is none.
    fn count(&self, i: usize) -> usize;
    /// Calls `f` with the elements of tensor `i`.
    fn read(&self, i: usize, f: &mut dyn FnMut(&[f32])) -> Result<()>;
    /// Calls `f` with the elements of tensor `i` for writing.
    fn write(&mut self, i: usize, f: &mut dyn FnMut(&mut [f32])) -> Result<()>;
    /// Where the tensors lie, whatever [`read`](Self::read) and [`write`](Self::write) do to bring them to the host: backup copies may be
    /// kept there ([`Backup::Device`](crate::Backup::Device)). Provided: host memory.
    fn device(&self) -> Device {
        Device::CPU
    }

    /// Calls `f` with each tensor's number and its elements, in order. Errors: those of [`write`](Self::write).
    fn for_each_mut(&mut self, mut f: impl FnMut(usize, &mut [f32])) -> Result<()>
    where
        Self: Sized,
    {
        (0..self.len()).try_for_each(|i| self.write(i, &mut |values| f(i, values)))
    }

    /// Calls `f` with each tensor's number, its elements, and the vector for it in `gradients` (or their averages): an optimizer's step.
    /// Errors (`InvalidArgument`): not one vector of its length for each tensor; nothing is changed then. Those of [`write`](Self::write).
    ///
    /// ```
    /// use oxccl_diloco::{Parameters as _, SliceParameters};
    ///
    /// let mut params = SliceParameters::new(vec![("weight".to_owned(), vec![1.0, 2.0])]);
    /// let mut momentum = vec![vec![0.5, 0.5]];
    /// params.update(&[vec![1.5, 3.5]], |i, weights, gradient| {
    ///     for ((w, g), m) in weights.iter_mut().zip(gradient).zip(&mut momentum[i]) {
    ///         *m = 0.5 * *m + g;
    ///         *w -= *m;
    ///     }
    /// })?;
    /// assert_eq!(params.get(0), Some([-0.75, -1.75].as_slice()));
    /// # Ok::<(), ftcore::Error>(())
    /// ```
    fn update(&mut self, gradients: &[Vec<f32>], mut f: impl FnMut(usize, &mut [f32], &[f32])) -> Result<()>
    where
        Self: Sized,
    {
        let lengths = gradients.iter().map(Vec::len);
        if !lengths.eq((0..self.len()).map(|i| self.count(i))) {
            return Err(Error::invalid(format!(
                "{} vectors do not fit {} parameters: one of its length for each, in order",
                gradients.len(),
                self.len()
            )));
        }
        for (i, gradient) in gradients.iter().enumerate() {
            self.write(i, &mut |values| f(i, values, gradient))?;
        }
        Ok(())
    }

    /// A step of gradient descent: subtracts `rate` times its gradient from each element. Errors: as of [`update`](Self::update).
    fn descend(&mut self, gradients: &[Vec<f32>], rate: f32) -> Result<()>
    where
        Self: Sized,
    {
        self.update(gradients, |_, values, gradient| {
            values
                .iter_mut()
                .zip(gradient)
                .for_each(|(value, g)| *value -= rate * g)
        })
    }

    /// A hash over names and bits: equal on two replicas exactly if every bit is equal. Errors: those of [`read`](Self::read).
    fn hash(&self) -> Result<String> {
        let mut hash = ParametersHash::default();
        for i in 0..self.len() {
            self.read(i, &mut |values| hash.add(self.name(i), values))?;
        }
        Ok(hash.finish())
    }
}

/// Parameters in plain vectors.
///
/// ```
/// use oxccl_diloco::{Parameters as _, SliceParameters};
///
/// let mut params = SliceParameters::new(vec![("bias".to_owned(), vec![0.0, 1.0])]);
/// params.descend(&[vec![1.0, 1.0]], 0.5)?;
/// assert_eq!(params.get(0), Some([-0.5, 0.5].as_slice()));
/// # Ok::<(), ftcore::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SliceParameters {
    tensors: Vec<(String, Vec<f32>)>,
}

impl SliceParameters {
    /// Named vectors, in this order.
    pub fn new(tensors: Vec<(String, Vec<f32>)>) -> Self {
        Self { tensors }
    }

    /// The elements of tensor `i`.
    pub fn get(&self, i: usize) -> Option<&[f32]> {
        self.tensors.get(i).map(|(_, v)| v.as_slice())
    }

    /// The elements of tensor `i` for writing.
    pub fn get_mut(&mut self, i: usize) -> Option<&mut Vec<f32>> {
        self.tensors.get_mut(i).map(|(_, v)| v)
    }
}

fn missing(i: usize) -> Error {
    Error::invalid(format!("there is no parameter {i}"))
}

impl Parameters for SliceParameters {
    fn len(&self) -> usize {
        self.tensors.len()
    }
    fn name(&self, i: usize) -> &str {
        self.tensors.get(i).map_or("", |(n, _)| n)
    }
    fn count(&self, i: usize) -> usize {
        self.tensors.get(i).map_or(0, |(_, v)| v.len())
    }
    fn read(&self, i: usize, f: &mut dyn FnMut(&[f32])) -> Result<()> {
        f(self.get(i).ok_or_else(|| missing(i))?);
        Ok(())
    }
    fn write(&mut self, i: usize, f: &mut dyn FnMut(&mut [f32])) -> Result<()> {
        f(self.get_mut(i).ok_or_else(|| missing(i))?);
        Ok(())
    }
}

/// For a [`State`] that is these parameters: puts each into `out` under its name. Errors: names that are not usable there, or twice there.
pub fn save_parameters(params: &dyn Parameters, out: &mut StateDict) -> Result<()> {
    for i in 0..params.len() {
        let mut result = Ok(());
        params.read(i, &mut |values| {
            result = out.insert_f32(params.name(i), &[values.len()], values)
        })?;
        result?;
    }
    Ok(())
}

/// Takes over what [`save_parameters`] gave. Errors (`InvalidArgument`, nothing is taken over): a parameter is missing or has another length: the models
/// differ. Those of the parameters.
pub fn load_parameters(params: &mut dyn Parameters, from: &StateDict) -> Result<()> {
    let all: Vec<Vec<f32>> = (0..params.len())
        .map(|i| from.get_f32_shaped(params.name(i), &[params.count(i)]))
        .collect::<Result<_>>()?;
    for (i, values) in all.iter().enumerate() {
        params.write(i, &mut |own| {
            own.iter_mut().zip(values).for_each(|(to, from)| *to = *from)
        })?;
    }
    Ok(())
}

/// For data parallel, whose state they are; DiLoCo takes them as [`Parameters`].
impl State for SliceParameters {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        save_parameters(self, out)
    }

    fn load(&mut self, from: &StateDict) -> Result<()> {
        load_parameters(self, from)
    }
}

/// A hash over names and bits of `tensors`: equal on two replicas exactly if every bit is equal.
pub fn parameters_hash<'a>(tensors: impl Iterator<Item = (&'a str, &'a [f32])>) -> String {
    let mut hash = ParametersHash::default();
    tensors.for_each(|(name, values)| hash.add(name, values));
    hash.finish()
}

/// Values that are turned into bytes at a time.
const HASHED_AT_ONCE: usize = 1 << 14;

/// [`parameters_hash`] of tensors that come one after the other.
#[derive(Default)]
pub(crate) struct ParametersHash(blake3::Hasher);

impl ParametersHash {
    pub(crate) fn add(&mut self, name: &str, values: &[f32]) {
        self.0.update(&(name.len() as u64).to_le_bytes());
        self.0.update(name.as_bytes());
        self.0.update(&(values.len() as u64).to_le_bytes());
        // Many values at a time: the hash works on chunks side by side.
        let mut bytes = Vec::with_capacity(4 * values.len().min(HASHED_AT_ONCE));
        for part in values.chunks(HASHED_AT_ONCE) {
            bytes.clear();
            bytes.extend(part.iter().flat_map(|v| v.to_bits().to_le_bytes()));
            self.0.update(&bytes);
        }
    }

    pub(crate) fn finish(&self) -> String {
        self.0.finalize().to_hex().to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_a_state_that_another_model_refuses_without_a_change() {
        let model = |a: &[f32], b: &[f32]| {
            SliceParameters::new(vec![("a".into(), a.to_vec()), ("b".into(), b.to_vec())])
        };
        let mut out = StateDict::new();
        model(&[1.0, 2.0], &[3.0]).save(&mut out).unwrap();
        let mut other = model(&[0.0; 2], &[0.0]);
        other.load(&out).unwrap();
        assert_eq!(other, model(&[1.0, 2.0], &[3.0]));
        assert_eq!(other.hash().unwrap(), model(&[1.0, 2.0], &[3.0]).hash().unwrap());
        let mut larger = model(&[0.0; 2], &[0.0; 2]);
        let e = larger.load(&out).unwrap_err();
        assert!(e.to_string().contains('b'), "{e}");
        assert_eq!(larger, model(&[0.0; 2], &[0.0; 2]));
    }

    #[test]
    fn a_hash_is_of_names_counts_and_bits_however_many_are_hashed_at_once() {
        let values: Vec<f32> = (0..2 * HASHED_AT_ONCE + 3).map(|i| i as f32).collect();
        let mut bytes = Vec::new();
        for (name, values) in [("a", &values[..]), ("bc", &values[..HASHED_AT_ONCE]), ("d", &[])] {
            bytes.extend((name.len() as u64).to_le_bytes());
            bytes.extend(name.as_bytes());
            bytes.extend((values.len() as u64).to_le_bytes());
            values.iter().for_each(|v| bytes.extend(v.to_le_bytes()));
        }
        let tensors = [("a", &values[..]), ("bc", &values[..HASHED_AT_ONCE]), ("d", &[])];
        assert_eq!(
            parameters_hash(tensors.into_iter()),
            blake3::hash(&bytes).to_hex().to_string()
        );
    }

    #[test]
    fn an_update_gives_each_tensor_its_own_gradient_and_changes_nothing_if_one_does_not_fit() {
        let mut params = SliceParameters::new(vec![("a".into(), vec![1.0, 2.0]), ("b".into(), vec![3.0])]);
        let add = |i: usize, w: &mut [f32], g: &[f32]| {
            w.iter_mut().zip(g).for_each(|(w, g)| *w += g + 100.0 * i as f32)
        };
        params.update(&[vec![10.0, 20.0], vec![30.0]], add).unwrap();
        assert_eq!(
            (params.get(0).unwrap(), params.get(1).unwrap()),
            ([11.0, 22.0].as_slice(), [133.0].as_slice())
        );
        params.descend(&[vec![22.0, 44.0], vec![0.0]], 0.5).unwrap();
        assert_eq!(params.get(0), Some([0.0, 0.0].as_slice()));
        let before = params.clone();
        for wrong in [vec![vec![1.0, 1.0]], vec![vec![1.0, 1.0], vec![1.0, 1.0]]] {
            let e = params.update(&wrong, add).unwrap_err();
            assert!(e.to_string().contains("do not fit 2 parameters"), "{e}");
        }
        assert_eq!(params, before);
        params.for_each_mut(|i, w| w.fill(i as f32)).unwrap();
        assert_eq!(params.get(1), Some([1.0].as_slice()));
    }
}
