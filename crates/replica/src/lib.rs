//! What a training loop sees of fault tolerance, without a server: the steps of a [`Replica`], the [`State`] that heals, and [`ManagedWork`].
//!
//! A training loop calls, per step: [`Replica::start_quorum`] (agree on the members, connect the group, heal if behind),
//! [`Replica::all_reduce`] any number of times, [`Replica::should_commit`]. Whatever fails in between is collected and turns the vote into a no;
//! the caller then does the same step again. `manager::Manager` is the implementation over a lighthouse; `ddp` and `diloco` know only this crate,
//! so that they bring no network stack of the control plane.

mod pending;
mod replica;
mod room;
mod spare;
mod state_dict;
mod states;
mod values;

pub use pending::{ManagedWork, Pending};
pub use replica::{Healed, Members, Participation, Replica, State, write_commit};
pub use room::room_for;
pub use spare::Spare;
pub use state_dict::{StateDict, StateTensor, check_name, writable};
pub use states::{States, save_beside};
