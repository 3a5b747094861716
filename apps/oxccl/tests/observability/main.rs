//! A job seen from outside: its dashboard in a real browser, its metrics in a real Prometheus, and
//! its spans in a real OpenTelemetry collector.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a failure here is a failed test"
)]

mod browser;
mod curl;
mod dashboard;
mod events;
mod http;
mod job;
mod prometheus;
mod spans;
