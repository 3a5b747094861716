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
