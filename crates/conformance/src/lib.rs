//! One behaviour suite that every oxccl process group must pass, against a scalar oracle.
//!
//! A [`Harness`] can make N ranks (threads, processes) of one backend; a [`Plan`] turns every [`Case`] that the backend's
//! capabilities call for into a `libtest_mimic::Trial`. What is advertised must work, what is not must be `Unsupported`
//! at once; a case that does not apply is reported as ignored, with the reason, never as passed.
//!
//! A backend's whole test binary is one call:
//!
//! ```no_run
//! use oxccl_conformance::{Mode, run};
//! # fn make(_: ftcore::GroupOptions) -> ftcore::Result<Box<dyn ftcore::ProcessGroup>> { unimplemented!() }
//! fn main() -> std::process::ExitCode {
//!     run(&[Mode::Threads, Mode::Processes], make)
//! }
//! ```
//!
//! A backend of another device kind calls [`run_on`]: the same cases, whose tensors are then allocated, filled and read through
//! that kind's [`ftcore::Accelerator`].
//!
//! Where ranks take long to start, [`Plan::lasting`] lets the cases that leave their group as they found it share one.
//!
//! A program that is no test binary, as `oxccl conformance`, gets the verdicts from [`Plan::tried`].
//!
//! Names are `mode::area::case::worldN`, so `threads::` or `processes::all_reduce` as a filter gives one row or one part.

#[macro_use]
mod failure;
mod arguments;
mod barriers;
mod cargo;
mod case;
mod complex;
mod credentials;
pub mod expected;
mod failures;
mod harness;
mod lasting;
mod lent;
mod lifetime;
mod living;
mod messages;
mod mismatch;
mod movement;
mod oracle;
mod probe;
mod reductions;
mod report;
mod running;
mod sizes;
mod staged;
mod streams;
mod suite;
#[cfg(test)]
mod wrong;

pub use cargo::{cargo, dylib, program};
pub use case::{Case, MakeOn, Needs, Rank, Worlds, device_of};
pub use failure::{Failure, Outcome};
pub use harness::{
    Harness, Limit, MakeGroup, Mode, Part, Plan, Processes, Threads, run, run_limited, run_on,
};
pub use report::{Tried, Verdict};
pub use sizes::{LARGE, SIZES};
pub use suite::{cases, cases_at};
