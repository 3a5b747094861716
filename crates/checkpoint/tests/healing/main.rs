//! Healing over real sockets: the server, the download, and everything in between that can go wrong.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod choice;
mod credentials;
mod fake_source;
mod hostile_sources;
mod killed_source;
mod own_state;
mod transport;

use std::time::Instant;

use ftcore::{Epoch, Result, Step};
use oxccl_checkpoint::{CheckpointSource, Fetch, FetchOptions, StateDict};

/// The state of `step` from these addresses, and the epoch in which it was taken.
fn fetch(sources: &[String], step: Step, deadline: Instant) -> Result<(Epoch, StateDict)> {
    fetch_with(sources, step, deadline, &FetchOptions::default())
}

/// The same under other limits.
fn fetch_with(
    sources: &[String],
    step: Step,
    deadline: Instant,
    options: &FetchOptions,
) -> Result<(Epoch, StateDict)> {
    let sources = sources.iter().map(CheckpointSource::at).collect();
    let fetched = Fetch::step(step, sources).run(deadline, options)?;
    Ok((fetched.id.epoch, fetched.state))
}
