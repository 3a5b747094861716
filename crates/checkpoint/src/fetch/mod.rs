//! The healing side: [`fetch`] brings the state of a step from one or several sources.
//!
//! `sources.rs` asks each source for its manifest and for chunks over HTTP, `download.rs` decides which chunk comes from
//! where and what to do about failures. All of it runs on a thread of its own (`ox-ckpt-fetch`), so that `fetch` may
//! be called from anywhere, an async runtime included; the caller waits on a channel with the deadline.

use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind, Result, time_left};

use crate::StateDict;

mod download;
mod sources;

/// Limits of a download.
#[derive(Debug, Clone)]
pub struct FetchOptions {
    /// The largest state to accept, in bytes; a source that announces more is refused before anything is allocated.
    /// Default 64 GiB.
    pub max_state_bytes: u64,
    /// The largest manifest to accept, in bytes. Default 64 MiB.
    pub max_manifest_bytes: usize,
    /// Connections to each source, 1 to 64. Default 2.
    pub connections_per_source: usize,
    /// A source that sends nothing for this long, or less than 16 KiB/s on top of it, is given up for the others.
    /// Default 10 s.
    pub stall_timeout: Duration,
}

impl Default for FetchOptions {
    fn default() -> Self {
        Self {
            max_state_bytes: 64 << 30,
            max_manifest_bytes: 64 << 20,
            connections_per_source: 2,
            stall_timeout: Duration::from_secs(10),
        }
    }
}

impl FetchOptions {
    fn check(&self) -> Result<()> {
        if !(1..=64).contains(&self.connections_per_source) || self.stall_timeout.is_zero() {
            return Err(Error::invalid(format!(
                "connections_per_source (1 to 64) or stall_timeout in {self:?}"
            )));
        }
        Ok(())
    }
}

/// Downloads the state of `step` from `sources` (the [`crate::HttpTransport::metadata`] of peers) and returns the epoch
/// in which it was taken, and the state.
///
/// - Waits until a source publishes that step, up to the deadline.
/// - Every chunk is checked against its hash. A bad or failed one comes from another source, or once more from the
///   same; chunks that were good are kept. Sources whose states differ are never mixed.
/// - The memory used grows with verified chunks only.
///
/// Errors: `Timeout` when the deadline passes, saying how far it got. If no source is left before: `Corrupt` naming
/// source and chunk if one sent wrong data, else `PeerLost` (the connection broke), `Unavailable` (nobody answers),
/// `NotFound` (other steps are served) or `Protocol` (not a checkpoint server, or beyond the limits).
/// `InvalidArgument` for no sources or a negative step.
///
/// Nothing of the caller's is changed: its step advances when it has applied the state (INV-5).
pub fn fetch(sources: &[String], step: i64, deadline: Instant) -> Result<(i64, StateDict)> {
    fetch_with(sources, step, deadline, &FetchOptions::default())
}

/// [`fetch`] with other limits.
pub fn fetch_with(
    sources: &[String],
    step: i64,
    deadline: Instant,
    options: &FetchOptions,
) -> Result<(i64, StateDict)> {
    options.check()?;
    if sources.is_empty() || step < 0 {
        return Err(Error::invalid(format!(
            "fetching step {step} from {} sources",
            sources.len()
        )));
    }
    let failed = |e| Error::io("starting the download of a checkpoint", e);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        // Two threads: one hashes while the other receives.
        .worker_threads(2)
        .thread_name("ox-ckpt-fetch")
        .enable_io()
        .enable_time()
        .build()
        .map_err(failed)?;
    let (sender, receiver) = sync_channel(1);
    let download = download::Download::new(sources, step, deadline, options.clone());
    std::thread::Builder::new()
        .name("ox-ckpt-fetch".into())
        .spawn(move || {
            let result = runtime.block_on(download.run());
            // The caller may have given up; a name look-up may still hang in the runtime's pool.
            let _ = sender.send(result);
            runtime.shutdown_background();
        })
        .map_err(failed)?;
    // The download watches the deadline itself and says more about it; the margin lets its answer through, also where its threads wait for a core.
    let result = match receiver.recv_timeout(time_left(deadline) + Duration::from_secs(1)) {
        Ok(result) => result,
        Err(RecvTimeoutError::Timeout) => Err(Error::timeout(format!(
            "step {step}: the state was still being decoded a second after the deadline"
        ))),
        Err(RecvTimeoutError::Disconnected) => Err(Error::new(
            ErrorKind::Internal,
            format!("step {step}: the download ended without a result"),
        )),
    };
    result.map_err(|e| e.with_op("checkpoint.fetch"))
}
