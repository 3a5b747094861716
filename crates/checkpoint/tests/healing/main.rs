//! Healing over real sockets: the server, the download, and everything in between that can go wrong.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod choice;
mod credentials;
mod fake_source;
mod hostile_sources;
mod killed_source;
mod own_state;
mod transport;
