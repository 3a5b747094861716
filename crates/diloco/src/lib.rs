//! LocalSGD, DiLoCo and Streaming DiLoCo over plain slices.
//!
//! Sources: DiLoCo (arXiv 2311.08105), Streaming DiLoCo (arXiv 2501.18512). A training loop owns its model behind
//! [`Parameters`], makes its inner steps itself, and calls [`Diloco::after_inner_step`] after each. Communication goes
//! through a [`replica::Replica`], so that members may die and come back between and during rounds.
//!
//! With one fragment, `delay` 0 and `mixing` 0 this is DiLoCo; with an outer optimizer of plain SGD at rate 1 as well it
//! is LocalSGD ([`DilocoConfig::local_sgd`]). Eager updates (arXiv 2502.12996) are [`DilocoConfig::eager`].

mod backup;
mod config;
mod ferry;
mod fragment;
pub mod optim;
mod params;
mod state;
mod streaming;
mod tensors;

pub use backup::Backup;
pub use config::{DilocoConfig, OuterOptimizer, Pattern};
pub use fragment::FragmentPlan;
pub use params::{Parameters, SliceParameters, load_parameters, parameters_hash, save_parameters};
pub use streaming::{Diloco, RoundReport};
pub use tensors::TensorParameters;
