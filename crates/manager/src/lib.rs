//! Per-rank manager: who takes part in this step, who heals from whom, did it commit.
//!
//! A training loop calls, per step: [`Replica::start_quorum`] (agree on the members, connect the group, heal if
//! behind), [`Replica::all_reduce`] any number of times, [`Replica::should_commit`]. Whatever fails in between is
//! collected here and turns the vote into a no; the caller then does the same step again. [`Manager`] is the real
//! thing over a lighthouse; training crates see only the [`Replica`] trait.

mod config;
mod counted;
mod ends;
mod event_log;
mod heal;
mod heal_choice;
mod killed;
mod manager;
mod meeting;
mod names;
mod observed;
mod quorum;
mod reporter;
mod spans;

pub use config::{HealOver, ManagerConfig, WorldSizeMode};
pub use manager::Manager;
pub use protocol::Lineage;
pub use quorum::Interrupter;
pub use replica::{Healed, ManagedWork, Members, Participation, Pending, Replica, State, States};
