//! The healing side: [`Fetch`] brings the state of a step from one or several sources.
//!
//! `sources.rs` asks each source for its manifest and for chunks (over `http.rs`), `download.rs` decides which chunk comes from
//! where and what to do about failures, `choosing.rs` asks which source is followed, `assembly.rs` holds the state as it grows, `own.rs` finds what is here already.
//! All of it runs on a thread of its own (`ox-ckpt-fetch`), so that it may
//! be called from anywhere, an async runtime included; the caller waits on a channel with the deadline.

use std::fmt;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ftcore::{Epoch, Error, ErrorKind, Result, Step, time_left};
use identity::{Party, Role, name_of};

use crate::{LONGEST, SnapshotId, StateDict};

mod assembly;
mod choosing;
mod download;
mod http;
mod own;
mod sources;

/// Limits of a download.
#[derive(Debug, Clone)]
pub struct FetchOptions {
    /// The largest state to accept, in bytes; a source that announces more is refused before anything is allocated.
    /// Default: the memory of this machine, swap included.
    pub max_state_bytes: u64,
    /// The largest manifest to accept, in bytes. Default 64 MiB.
    pub max_manifest_bytes: usize,
    /// Connections to each source, 1 to 64. Default 2.
    pub connections_per_source: usize,
    /// A source that sends nothing for this long, or less than 16 KiB/s on top of it, is given up for the others.
    /// Default 10 s.
    pub stall_timeout: Duration,
    /// As whom to fetch, from members of the same job, over TLS. `None`: as the one whose credentials `OXCCL_CREDENTIALS` names, if it does.
    pub party: Option<Arc<Party>>,
}

impl Default for FetchOptions {
    fn default() -> Self {
        Self {
            max_state_bytes: memory(),
            max_manifest_bytes: 64 << 20,
            connections_per_source: 2,
            stall_timeout: Duration::from_secs(10),
            party: None,
        }
    }
}

/// The memory of this machine, swap included, in bytes.
fn memory() -> u64 {
    let system = rustix::system::sysinfo();
    let units = system.totalram.saturating_add(system.totalswap);
    units.saturating_mul(u64::from(system.mem_unit).max(1))
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

type Locate = Box<dyn FnOnce(Instant) -> Result<String> + Send>;

/// A peer whose state may be fetched.
pub struct CheckpointSource {
    name: String,
    expected: Option<Role>,
    locate: Locate,
}

impl fmt::Debug for CheckpointSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CheckpointSource").field(&self.name).finish()
    }
}

impl CheckpointSource {
    /// The source at `url` (what [`crate::HttpTransport::metadata`] says there).
    pub fn at(url: impl Into<String>) -> Self {
        let url = url.into();
        Self {
            name: url.clone(),
            expected: None,
            locate: Box::new(move |_| Ok(url)),
        }
    }

    /// The source that errors call `name`. `locate` finds its URL before the deadline that it is given; it runs on a thread of
    /// its own, so that a source that is hard to find holds up no other.
    pub fn found_by(
        name: impl Into<String>,
        locate: impl FnOnce(Instant) -> Result<String> + Send + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            expected: None,
            locate: Box::new(locate),
        }
    }

    /// With credentials: it must prove to be the replica of `replica_id`, and not only a member of the job.
    pub fn of_replica(mut self, replica_id: &str) -> Self {
        self.expected = Some(Role::Replica(name_of(replica_id).to_owned()));
        self
    }
}

/// What a fetch can get, by the places of the sources in [`Fetch::sources`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reach {
    /// Sources whose manifest is here.
    pub have: Vec<usize>,
    /// Sources that are given up.
    pub lost: Vec<usize>,
    /// Sources that may answer yet.
    pub pending: Vec<usize>,
}

/// Decides which source is followed where sources hold different states, together with the fetches of other parts of the same state
/// (the other ranks of a replica), which must all follow one source. Called on threads that may block.
pub trait SourceChoice: fmt::Debug + Send + Sync {
    /// The source to follow; `None`: none yet. It may be one that is still awaited, which is then waited for; one that is lost ends the
    /// fetch. Errors end the fetch, too.
    fn follow(&self, reach: &Reach, deadline: Instant) -> Result<Option<usize>>;

    /// The state is here, and all of `followed` hold it bit for bit. False: another source was chosen meanwhile, and the state must not be
    /// taken.
    fn settle(&self, followed: &[usize], deadline: Instant) -> Result<bool>;
}

/// The chunks that came in a fetch that failed, for the next one that is given a clone of this. Each was checked, and is found by its
/// hash. At most the memory of one state; the next fetch that follows a manifest takes them out.
#[derive(Clone, Default)]
pub struct Kept(Arc<Mutex<assembly::Chunks>>);

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Kept").finish_non_exhaustive()
    }
}

impl Kept {
    fn take(&self) -> assembly::Chunks {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn put(&self, chunks: assembly::Chunks) {
        // A fetch that got nothing leaves what was there.
        if !chunks.is_empty() {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = chunks;
        }
    }
}

/// What is to be fetched, and from whom.
#[derive(Debug)]
pub struct Fetch {
    /// The peers that have it, the preferred one first.
    pub sources: Vec<CheckpointSource>,
    /// The step.
    pub step: Step,
    /// The epoch in which the snapshot is taken; `None`: any.
    pub epoch: Option<Epoch>,
    /// The history that led to it; `None`: any.
    pub lineage: Option<String>,
    /// An older state of the caller's: what did not change since is taken from there.
    pub own: Option<StateDict>,
    /// What came in an earlier fetch that failed; what comes in this one goes there if it fails.
    pub kept: Kept,
    /// Who decides which manifest is followed, if not the first to arrive. Sources with another one are not used: parts of a state may be a
    /// source's own (local parameters between outer steps, residuals).
    pub choice: Option<Arc<dyn SourceChoice>>,
}

/// A state that was fetched, every byte of it checked against the manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fetched {
    /// Which state it is.
    pub id: SnapshotId,
    /// The state.
    pub state: StateDict,
    /// The sources whose manifest was this one, by their places in [`Fetch::sources`], without those caught with wrong bytes.
    pub followed: Vec<usize>,
    /// What came from each source that sent anything, by name, in bytes.
    pub received: Vec<(String, u64)>,
    /// What was taken from the caller's older state, in bytes.
    pub reused_bytes: u64,
}

impl Fetch {
    /// `step` from `sources`, whatever its epoch and history.
    pub fn step(step: Step, sources: Vec<CheckpointSource>) -> Self {
        Self {
            sources,
            step,
            epoch: None,
            lineage: None,
            own: None,
            kept: Kept::default(),
            choice: None,
        }
    }

    /// Downloads the state.
    ///
    /// - The manifest comes first: a snapshot of another step, epoch or history costs one small answer. An earlier one is
    ///   waited out, up to the deadline.
    /// - Chunks come from all sources at once, from faster ones more. Each is checked against its hash. What a source that
    ///   died or stalled did not send comes from the others, or from itself over a new connection; chunks that are here stay.
    /// - A source that sent wrong bytes is named and not asked again.
    /// - The memory used grows with received chunks only.
    ///
    /// Errors: `Timeout` when the deadline passes, saying what was waited for and how far it got. `Corrupt` naming source and chunk
    /// if no source is left and one sent wrong data. Else `PeerLost` (the connection broke),
    /// `Unavailable` (no answer), `NotFound` (other states are served) or `Protocol` (not a checkpoint server, a malformed
    /// address, or beyond the limits). `InvalidArgument` only for what the caller said: no sources, a negative step, options.
    ///
    /// What came before a failure goes to `kept`. Nothing else of the caller's is changed: its step advances when it has applied the state (INV-5).
    pub fn run(self, deadline: Instant, options: &FetchOptions) -> Result<Fetched> {
        options.check()?;
        if self.sources.is_empty() || self.step < Step(0) {
            return Err(Error::invalid(format!(
                "fetching step {} from {} sources",
                self.step,
                self.sources.len()
            )));
        }
        let mut options = options.clone();
        options.stall_timeout = options.stall_timeout.min(LONGEST);
        if options.party.is_none() {
            options.party = identity::credentials(None)?
                .map(|c| Party::tool(&c))
                .transpose()?;
        }
        let (step, failed) = (self.step, |e| {
            Error::io("starting the download of a checkpoint", e)
        });
        let runtime = tokio::runtime::Builder::new_multi_thread()
            // Two threads: one hashes while the other receives.
            .worker_threads(2)
            .thread_name("ox-ckpt-fetch")
            .enable_io()
            .enable_time()
            .build()
            .map_err(failed)?;
        let (sender, receiver) = sync_channel(1);
        let download = download::Download::new(self, deadline, options);
        std::thread::Builder::new()
            .name("ox-ckpt-fetch".into())
            .spawn(move || {
                let result = runtime.block_on(download.run());
                // The caller may have given up; a look-up of a name or a source may still hang in the runtime's pool.
                let _ = sender.send(result);
                runtime.shutdown_background();
            })
            .map_err(failed)?;
        // The download watches the deadline itself and says more about it; the margin lets its answer through, also where its threads wait for a core.
        let result = match receiver.recv_timeout(time_left(deadline) + Duration::from_secs(1)) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => Err(Error::timeout(format!(
                "step {step}: the state was still being put together a second after the deadline"
            ))),
            Err(RecvTimeoutError::Disconnected) => Err(Error::new(
                ErrorKind::Internal,
                format!("step {step}: the download ended without a result"),
            )),
        };
        result.map_err(|e| e.with_op("checkpoint.fetch"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HttpTransport, Snapshot, TransportOptions};

    #[test]
    fn without_time_limits_a_state_is_served_and_fetched() {
        let options = TransportOptions {
            greeting_timeout: Duration::MAX,
            idle_timeout: Duration::MAX,
            stall_timeout: Duration::MAX,
            ..TransportOptions::default()
        };
        let server = HttpTransport::start_with("127.0.0.1:0", None, options).unwrap();
        let mut state = StateDict::new();
        // More than a socket takes at once: the server waits for its reader.
        let values = vec![1.0; 16 << 20];
        state.insert_f32("w", &[values.len()], &values).unwrap();
        server.publish(Snapshot::new(Step(5), Epoch(1), &state).unwrap());
        let options = FetchOptions {
            stall_timeout: Duration::MAX,
            ..FetchOptions::default()
        };
        let deadline = Instant::now() + Duration::from_secs(60);
        let fetched = Fetch::step(Step(5), vec![CheckpointSource::at(server.metadata())])
            .run(deadline, &options)
            .unwrap();
        assert_eq!(fetched.state, state);
    }

    #[test]
    fn a_dtype_that_only_the_source_knows_is_its_fault_and_no_unsupported_call_of_ours() {
        let header = br#"{"a":{"dtype":"C64","shape":[1],"data_offsets":[0,8]}}"#;
        let head = [&(header.len() as u64).to_le_bytes()[..], header].concat();
        let server = HttpTransport::start("127.0.0.1:0", None).unwrap();
        server.publish(Snapshot::of_raw_parts(
            Step(5),
            vec![head.into(), vec![0; 8].into()],
        ));
        let deadline = Instant::now() + Duration::from_secs(60);
        let e = Fetch::step(Step(5), vec![CheckpointSource::at(server.metadata())])
            .run(deadline, &FetchOptions::default())
            .unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Protocol, "{e}");
        assert!(
            e.message().contains("'a'") && e.message().contains(&server.metadata()),
            "{e}"
        );
    }
}
