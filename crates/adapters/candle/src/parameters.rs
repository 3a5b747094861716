//! A [`ParamSet`] is what DiLoCo works on: nothing else to write.

use diloco::Parameters;
use ftcore::Result;

use crate::ParamSet;

impl Parameters for ParamSet {
    fn len(&self) -> usize {
        ParamSet::len(self)
    }
    fn name(&self, i: usize) -> &str {
        ParamSet::name(self, i)
    }
    fn count(&self, i: usize) -> usize {
        self.numel(i)
    }
    fn read(&self, i: usize, f: &mut dyn FnMut(&[f32])) -> Result<()> {
        self.with_slice(i, f)
    }
    fn write(&mut self, i: usize, f: &mut dyn FnMut(&mut [f32])) -> Result<()> {
        self.with_slice_mut(i, f)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    #[test]
    fn diloco_reads_and_writes_the_variables_themselves() {
        let v = Var::from_slice(&[1f32, 2.0], 2, &Device::Cpu).unwrap();
        let mut set = ParamSet::new(vec![("w".to_owned(), v.clone())]).unwrap();
        let params: &mut dyn Parameters = &mut set;
        assert_eq!(
            (params.len(), params.is_empty(), params.name(0), params.count(0)),
            (1, false, "w", 2)
        );
        params.write(0, &mut |s| s[1] = 5.0).unwrap();
        let mut seen = Vec::new();
        params.read(0, &mut |s| seen.extend_from_slice(s)).unwrap();
        assert_eq!(seen, [1.0, 5.0]);
        assert_eq!(v.as_tensor().to_vec1::<f32>().unwrap(), [1.0, 5.0]);
        assert!(params.read(1, &mut |_| ()).is_err() && params.write(1, &mut |_| ()).is_err());
        assert_eq!((params.name(1), params.count(1)), ("", 0));
    }
}
