//! burn adapter: the float parameters of a module as named f32 slices, for oxccl's data parallel and DiLoCo.
//!
//! A [`ParamSet`] holds the module. Data parallel takes its [`slots`](ParamSet::slots), [`gradients`](ParamSet::gradients) and
//! [`update`](ParamSet::update); DiLoCo takes it as [`diloco::Parameters`]; both save and load it as a [`replica::State`].
//!
//! burn's tensors cannot be written in place, and may lie on any device: each read copies a parameter to the host, each write makes a new tensor on the
//! parameter's device. The module that [`ParamSet::module`] gives always has the present ones.

mod param_set;
mod visit;

pub use param_set::ParamSet;
