//! A job seen from outside: its dashboard in a real browser, and its metrics in a real Prometheus.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a failure here is a failed test"
)]

mod browser;
mod dashboard;
mod http;
mod job;
mod prometheus;
