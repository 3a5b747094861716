//! Fresh weights of a model: named candle variables, filled from a seed.
//!
//! Each variable draws from a generator keyed by (seed, its name), so all replicas of a run start bitwise equal.

use candle_core::{Device, Var};
use ftcore::Result;
use oxccl_candle::{ParamSet, candle_error};

use crate::rng::Rng;

/// Collects the variables of a model in the order in which they are asked for.
pub(crate) struct Weights {
    seed: u64,
    vars: Vec<(String, Var)>,
}

impl Weights {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            seed,
            vars: Vec::new(),
        }
    }

    /// A matrix of normal numbers of this deviation, `rows` × `columns`.
    pub(crate) fn normal(&mut self, name: &str, rows: usize, columns: usize, deviation: f32) -> Result<Var> {
        let mut rng = Rng::named(self.seed, name);
        let values = (0..rows * columns).map(|_| deviation * rng.normal()).collect();
        self.add(name, values, &[rows, columns])
    }

    /// A vector of `n` times `value`.
    pub(crate) fn constant(&mut self, name: &str, n: usize, value: f32) -> Result<Var> {
        self.add(name, vec![value; n], &[n])
    }

    fn add(&mut self, name: &str, values: Vec<f32>, shape: &[usize]) -> Result<Var> {
        let var = Var::from_vec(values, shape, &Device::Cpu)
            .map_err(|e| candle_error(format_args!("making parameter '{name}' of shape {shape:?}"), e))?;
        self.vars.push((name.to_owned(), var.clone()));
        Ok(var)
    }

    pub(crate) fn finish(self) -> Result<ParamSet> {
        ParamSet::new(self.vars)
    }
}
