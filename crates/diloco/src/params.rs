//! Parameters as named f32 slices, whatever framework holds them.

use ftcore::{Device, Error, Result};
use replica::{State, StateDict};

/// A fixed, ordered list of named f32 tensors that live somewhere else.
///
/// Order, names and counts must be the same on every replica and never change.
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
}

/// Parameters in plain vectors.
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

/// [`parameters_hash`] of tensors that come one after the other.
#[derive(Default)]
pub(crate) struct ParametersHash(blake3::Hasher);

impl ParametersHash {
    pub(crate) fn add(&mut self, name: &str, values: &[f32]) {
        self.0.update(&(name.len() as u64).to_le_bytes());
        self.0.update(name.as_bytes());
        self.0.update(&(values.len() as u64).to_le_bytes());
        for v in values {
            self.0.update(&v.to_bits().to_le_bytes());
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
        let mut larger = model(&[0.0; 2], &[0.0; 2]);
        let e = larger.load(&out).unwrap_err();
        assert!(e.to_string().contains('b'), "{e}");
        assert_eq!(larger, model(&[0.0; 2], &[0.0; 2]));
    }
}
