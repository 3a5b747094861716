//! What a training job would do over given links, before it has machines.
//!
//! Data flows down: [`Links`] (`links`, in the units of `units`) say what hosts there are and what connects them; `cost` walks the rounds of
//! the product's own schedules over them and gives the time of an all-reduce; `method` lays such times into the steps of data parallel and the
//! rounds of DiLoCo; `simulate` lets replicas die, drop out and heal under the real quorum and step logic in virtual time; `plan` compares
//! methods and recommends one, with what it assumed.
//!
//! Nothing here opens a socket, reads a clock or starts a thread. Arithmetic is in f64; every input is checked where it comes in.

mod cost;
mod links;
mod method;
mod plan;
mod simulate;
mod units;

pub use cost::{Cost, Costs, Group, Operation};
pub use links::{Host, Link, Links};
pub use method::{Format, Method, Round, Workload, rounds};
pub use plan::{Estimate, Failures, Job, Plan, plan};
pub use simulate::{Fleet, Outcome, lighthouse_call, simulate};
pub use units::{Bytes, Rate, Seconds};
