//! The crate from outside: costs over links, a published table, whole runs with deaths, and plans.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod costs;
mod plans;
mod published;
mod runs;
