//! Plain values as a [`State`]: a step counter, a cursor in the data, a vector of weights.

use crate::state_dict::StateDict;
use ftcore::{Error, Result};

use crate::replica::State;

/// Under this name a plain value stands in what is saved.
const VALUE: &str = "value";

/// Nothing to take over.
impl State for () {
    fn save(&self, _: &mut StateDict) -> Result<()> {
        Ok(())
    }

    fn load(&mut self, _: &StateDict) -> Result<()> {
        Ok(())
    }
}

impl State for i64 {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        out.insert_i64s(VALUE, &[*self])
    }

    fn load(&mut self, from: &StateDict) -> Result<()> {
        match from.get_i64s(VALUE)?[..] {
            [value] => *self = value,
            ref several => return Err(other_length(1, several.len())),
        }
        Ok(())
    }
}

/// The length is the model's: a vector of another length is refused, and nothing of it is taken over.
impl State for Vec<f32> {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        out.insert_f32(VALUE, &[self.len()], self)
    }

    fn load(&mut self, from: &StateDict) -> Result<()> {
        let values = from.get_f32(VALUE)?;
        if values.len() != self.len() {
            return Err(other_length(self.len(), values.len()));
        }
        *self = values;
        Ok(())
    }
}

fn other_length(here: usize, there: usize) -> Error {
    Error::invalid(format!(
        "{there} values came where this replica has {here}: the models differ"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::States;

    #[test]
    fn plain_values_come_back_alone_and_as_parts_of_a_state() {
        fn all<'a>(step: &'a mut i64, weights: &'a mut Vec<f32>, nothing: &'a mut ()) -> States<'a> {
            let parts = States::new().with("step", step).unwrap();
            parts
                .with("weights", weights)
                .unwrap()
                .with("none", nothing)
                .unwrap()
        }
        let mut out = StateDict::new();
        all(&mut 7, &mut vec![1.5, -2.0], &mut ()).save(&mut out).unwrap();
        let (mut step, mut weights) = (0_i64, vec![0.0_f32; 2]);
        all(&mut step, &mut weights, &mut ()).load(&out).unwrap();
        assert_eq!((step, weights), (7, vec![1.5, -2.0]));
    }

    #[test]
    fn a_vector_of_another_length_is_refused_and_changes_nothing() {
        let mut out = StateDict::new();
        vec![1.0_f32; 3].save(&mut out).unwrap();
        let mut weights = vec![9.0_f32; 2];
        let e = weights.load(&out).unwrap_err();
        assert!(
            e.message().contains("3 values came where this replica has 2"),
            "{e}"
        );
        assert_eq!(weights, [9.0, 9.0]);
    }
}
