//! Healing over real sockets: the server, the download, and everything in between that can go wrong.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod fake_source;
mod hostile_sources;
mod transport;
