//! The engine under a backend: what every configured group does around its transport or library.
//!
//! A backend supplies a [`Driver`]: how an operation is begun, how everything is interrupted, how it ends in good order. The rest is
//! here once, for all: order of submission, the in-flight table, deadlines from submission, the first failure and poisoning, drain,
//! leave, abort, memory that may still be touched, completion. Data flows down: a group puts a job and its [`Label`] into
//! [`Engine::submit`]; the `machine` (pure, walked by a model test) says what is next; the executor (one thread per group, or a
//! caller of [`Engine::submit_here`] on an idle one) hands the job and a [`Ticket`] to the driver; the ticket brings the answer back,
//! and the caller's [`Work`](crate::Work) ends. Deadlines are kept by one thread of the process, which calls no library.
//!
//! [`Group`] is a whole process group around that: a backend without children of its own needs to write no other.
//!
//! A driver's calls may block, signal events, or be run by callers:
//! - **blocking**: `enqueue` runs the operation and answers its ticket before it returns (`Rules::depth` is 1). Where no message may
//!   wait for another ([`Driver::BLOCKS`]), each channel of messages has an executor of its own;
//! - **events**: `enqueue` puts it on a device and gives event, memory and ticket to an [`InFlight`] table, which watches;
//! - **callbacks**: `enqueue` passes it on, and the callback that ends it answers the ticket;
//! - **callers**: where the library keeps the order and the deadlines of blocking calls itself, [`Engine::carry_out`] counts them, and no more.

mod clock;
mod counters;
mod group;
mod in_flight;
mod label;
mod machine;
#[cfg(test)]
mod model;
mod shell;
mod sync;
#[cfg(not(feature = "shuttle"))]
#[cfg(test)]
mod tests;
mod ticket;

pub use clock::{Timed, arm};
pub use counters::Counters;
pub use group::{Backend, Group, OnCallers};
pub use in_flight::{Held, InFlight, Scratch};
pub use label::{Label, Place};
pub use machine::{Channel, Rules, Stage};
pub use shell::{Driver, Engine, Job, Outcome, SpinBudget};
pub use sync::spawn;
pub use ticket::{Ended, Ticket};

pub use crate::joined::joined;
