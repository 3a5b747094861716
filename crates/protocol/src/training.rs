//! What a training loop does around the attempts of its rank: what an attempt sends, what becomes of it when it is lost, and when a state is
//! of no step any more. No tensors, group or clock: `ddp` and `diloco` carry it out.
//!
//! - [`Steps`]: data parallel. Gradients belong to the state that they were computed on.
//! - [`Rounds`]: DiLoCo. What is due when, and the outer gradient that lasts until its round commits.
//! - [`Integrity`]: a state that was written in part is one that no rank may go on from (INV-5).

mod integrity;
mod rounds;
mod schedule;
mod steps;

pub use integrity::Integrity;
pub use rounds::Rounds;
use schedule::Schedule;
pub use schedule::{Due, RoundRules};
pub use steps::{Share, Steps};

/// What a replica sends in an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sends {
    /// The round has no data: it is the initial synchronisation of DiLoCo, or closes the run.
    Nothing,
    /// It does not contribute, so it computes nothing.
    Zeros,
    /// What was kept of an earlier attempt.
    Again,
    /// What is computed now, and then kept.
    Fresh,
}
