//! candle adapter: the variables of a model as named f32 slices, and their gradients, without copies.
//!
//! A model keeps its candle [`Var`](candle_core::Var)s and builds its graph from them; a [`ParamSet`] holds the same
//! variables in a fixed order. Backward gives a `GradStore`; an optimizer or a reduction then reads gradients and
//! writes weights through slices that are the variables' own storage, so the next forward sees them at once.
//!
//! One compute thread per rank: candle's matrix products read `RAYON_NUM_THREADS` at every call and its other
//! kernels use rayon's global pool, so the launcher sets `RAYON_NUM_THREADS=1` in a rank's environment before it
//! starts ([`require_one_compute_thread`] checks it). Then a run is bit for bit repeatable.

mod gradients;
mod param_set;
mod parameters;
mod segments;
mod slices;
mod threads;

pub use param_set::ParamSet;
pub use segments::Segments;
pub use threads::require_one_compute_thread;

/// A candle error as ours: `ErrorKind::Backend` with `what` was being done, and candle's own text and error kept.
pub fn candle_error(what: impl std::fmt::Display, source: candle_core::Error) -> ftcore::Error {
    ftcore::Error::new(ftcore::ErrorKind::Backend, format!("candle: {what}: {source}")).with_source(source)
}
