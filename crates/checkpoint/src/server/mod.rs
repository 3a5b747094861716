//! The serving side: [`HttpTransport`], a small HTTP server on its own thread.
//!
//! The trainer calls `publish` and `retire`, which only change a table (`serving.rs`) under a lock that is never held
//! across I/O; connections (`connection.rs`) look snapshots up there, and `pace.rs` cuts readers that do not read.
//!
//! Its threads want the processor less than the training does (`background.rs`): a replica that fetches outside the group costs what is left.
//!
//! Memory at a source is bounded: the newest two snapshots, at most two retired ones that still have readers, and
//! one piece of a chunk per connection.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ftcore::identity::may_listen;
use ftcore::{
    Error, ErrorKind, Result, Step, bracketed_host, raise_descriptor_limit, split_address, time_left,
};
use identity::{Acceptor, Party};
use tokio::sync::watch;

use crate::background::yield_to_training;
use crate::{LONGEST, Snapshot};

pub(crate) mod body;
mod connection;
mod guests;
mod pace;
mod serving;

use connection::Limits;
use serving::Serving;

/// Request header: how long the server may hold a request for a step not yet published, in milliseconds. Without it
/// the answer comes at once.
pub const WAIT_HEADER: &str = "x-oxccl-wait-ms";

/// Request header: the digest (hex) of the manifest that the chunk belongs to, so that a snapshot published anew
/// for the same step is not mixed up with the one being read.
pub const DIGEST_HEADER: &str = "x-oxccl-digest";

/// Request header: the epoch of the snapshot that is asked for. One of the same step and an earlier epoch is then waited out.
pub const EPOCH_HEADER: &str = "x-oxccl-epoch";

/// Request header: the lineage of the snapshot that is asked for. One with another is refused at once.
pub const LINEAGE_HEADER: &str = "x-oxccl-lineage";

/// The longest wait that [`WAIT_HEADER`] gets; a client that wants to wait longer asks again.
pub const MAX_WAIT: Duration = Duration::from_secs(60);

/// Limits of a server. The defaults suit a job of hundreds of replicas.
#[derive(Debug, Clone)]
pub struct TransportOptions {
    /// Chunks on their way at once; further requests wait for their turn. Eight times as many connections may be open; for one more, the
    /// one that has been without a request for longest is closed. Default 128.
    pub max_connections: usize,
    /// A new connection that sends no whole request for this long is closed. Default 10 s.
    pub greeting_timeout: Duration,
    /// A connection that sends no request for this long is closed. Default 60 s.
    pub idle_timeout: Duration,
    /// A reader that takes less than 64 KiB of a pending answer in this time is cut off. Default 30 s.
    pub stall_timeout: Duration,
    /// As whom it serves: only to members of the same job, over TLS. `None`: as the one whose credentials `OXCCL_CREDENTIALS` names, if it does.
    pub party: Option<Arc<Party>>,
    /// Without credentials, listen where other machines reach it (or `OXCCL_INSECURE=1`).
    pub insecure: bool,
}

impl Default for TransportOptions {
    fn default() -> Self {
        Self {
            max_connections: 128,
            greeting_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(60),
            stall_timeout: Duration::from_secs(30),
            party: None,
            insecure: false,
        }
    }
}

/// Serves snapshots to healing peers over HTTP, from its own thread `ox-ckpt`.
///
/// - `GET {prefix}/{step}/manifest` and `GET {prefix}/{step}/chunk/{list}` (`3`, `3-7`, `3-7,9`), nothing else; no request
///   changes anything.
/// - A step not yet published (newer than the newest, of a later epoch if [`EPOCH_HEADER`] names one, or retired and perhaps
///   to come again) waits as [`WAIT_HEADER`] says, then 404. An older or other step, epoch or lineage is 409 with
///   "serving step X, asked for Y". Any other path, including one of an earlier incarnation on the same port, is 400.
/// - `publish` and `retire` never wait for a reader (L29): readers of a retired snapshot go on with it while they stay
///   connected, and at most two such snapshots are kept for them.
/// - Dropping it stops the thread without waiting.
#[derive(Debug)]
pub struct HttpTransport {
    url: String,
    address: SocketAddr,
    serving: Arc<Serving>,
    stop: watch::Sender<Option<Instant>>,
    /// Says how many connections were cut off when the thread ended.
    ended: Mutex<Option<Receiver<usize>>>,
}

impl HttpTransport {
    /// Listens on `bind` (`host:port`, port 0 for any) and serves nothing yet.
    ///
    /// Peers are told `advertise_host` (a name or address without port); without it the bound address or, when that
    /// is unspecified (`0.0.0.0`, `[::]`), the address this machine uses towards others. Errors: `Conflict` if the
    /// address is in use, `InvalidArgument` for one that is malformed, `Io` otherwise.
    pub fn start(bind: &str, advertise_host: Option<&str>) -> Result<Self> {
        Self::start_with(bind, advertise_host, TransportOptions::default())
    }

    /// [`Self::start`] with other limits; `InvalidArgument` if one of them is zero.
    pub fn start_with(
        bind: &str,
        advertise_host: Option<&str>,
        mut options: TransportOptions,
    ) -> Result<Self> {
        if options.max_connections == 0
            || options.greeting_timeout.is_zero()
            || options.idle_timeout.is_zero()
            || options.stall_timeout.is_zero()
        {
            return Err(Error::invalid(format!("a limit of zero in {options:?}")));
        }
        for limit in [
            &mut options.greeting_timeout,
            &mut options.idle_timeout,
            &mut options.stall_timeout,
        ] {
            *limit = LONGEST.min(*limit);
        }
        split_address(bind).map_err(|e| Error::invalid(format!("checkpoint server: {}", e.message())))?;
        let party = match &options.party {
            Some(party) => Some(Arc::clone(party)),
            None => identity::credentials(None)?
                .map(|c| Party::tool(&c))
                .transpose()?,
        };
        if party.is_none() {
            // A name that does not resolve is the bind's to report.
            for address in bind.to_socket_addrs().into_iter().flatten() {
                may_listen("the checkpoint server", address, None, options.insecure)?;
            }
        }
        raise_descriptor_limit();
        let listener = TcpListener::bind(bind).map_err(|e| {
            let kind = if e.kind() == std::io::ErrorKind::AddrInUse {
                ErrorKind::Conflict
            } else {
                ErrorKind::Io
            };
            Error::new(kind, format!("checkpoint server on {bind}: {e}")).with_source(e)
        })?;
        let failed = |e| Error::io(format!("checkpoint server on {bind}"), e);
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let host = advertise_host.map_or_else(|| advertised(address.ip()), bracketed_host);
        let prefix = format!("/ckpt/{:016x}", life_id());
        let scheme = if party.is_some() { "https" } else { "http" };
        let url = format!("{scheme}://{host}:{}{prefix}", address.port());

        let serving = Arc::new(Serving::default());
        let (stop, stopped) = watch::channel(None);
        let (ended_tx, ended) = sync_channel(1);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            // The blocking pool hashes snapshots, one at a time for a snapshot however many ask.
            .thread_name("ox-ckpt-hash")
            .max_blocking_threads(8)
            .on_thread_start(yield_to_training)
            .build()
            .map_err(failed)?;
        let for_thread = Arc::clone(&serving);
        let limits = Limits::new(prefix, options, |handshakes| {
            party.map(|party| Acceptor::new(&[party], handshakes))
        });
        std::thread::Builder::new()
            .name("ox-ckpt".into())
            .spawn(move || {
                yield_to_training();
                let cut = runtime.block_on(connection::serve(listener, for_thread, limits, stopped));
                runtime.shutdown_background();
                // The receiver may be gone.
                let _ = ended_tx.send(cut);
            })
            .map_err(failed)?;
        Ok(Self {
            url,
            address,
            serving,
            stop,
            ended: Mutex::new(Some(ended)),
        })
    }

    /// The URL prefix that peers need for [`crate::Fetch`]; it differs in every incarnation of a server.
    pub fn metadata(&self) -> String {
        self.url.clone()
    }

    /// The address that is bound.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Offers `snapshot` and wakes the requests that wait for its step. Only the newest two published snapshots are
    /// kept; one of the same step is replaced. Never blocks. After a shutdown it does nothing (and says so in the log).
    pub fn publish(&self, snapshot: Arc<Snapshot>) {
        let step = snapshot.step();
        if !self.serving.publish(snapshot) {
            tracing::warn!(%step, "snapshot not served: the checkpoint server was shut down");
        }
    }

    /// Takes no new readers for what was published so far. Readers that are in the middle go on (L31). Never blocks.
    pub fn retire(&self) {
        self.serving.retire();
    }

    /// The steps on offer to new readers, oldest publication first.
    pub fn published_steps(&self) -> Vec<Step> {
        self.serving.published_steps()
    }

    /// Stops taking connections, lets answers in progress end until `deadline`, and ends the thread. `Timeout` names how
    /// many connections were cut off. A second call does nothing.
    pub fn shutdown(&self, deadline: Instant) -> Result<()> {
        self.serving.close();
        self.stop.send_replace(Some(deadline));
        let Some(ended) = self.ended.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            return Ok(());
        };
        // The thread itself acts on the deadline; it needs a moment afterwards, and a core, to say so.
        match ended.recv_timeout(time_left(deadline) + Duration::from_secs(1)) {
            Ok(0) => Ok(()),
            Ok(n) => Err(Error::timeout(format!(
                "shutting down the checkpoint server: {n} connections still had answers in progress and were cut off"
            ))),
            Err(RecvTimeoutError::Timeout) => Err(Error::timeout(
                "the checkpoint server's thread did not end before the deadline",
            )),
            Err(RecvTimeoutError::Disconnected) => Err(Error::new(
                ErrorKind::Internal,
                "the checkpoint server's thread ended by itself",
            )),
        }
    }
}

impl Drop for HttpTransport {
    fn drop(&mut self) {
        self.serving.close();
        self.stop.send_replace(Some(Instant::now()));
    }
}

/// Tells this life of the server from an earlier one on the same port. Not a secret.
fn life_id() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one((std::process::id(), std::time::SystemTime::now()))
}

fn advertised(bound: IpAddr) -> String {
    let address = if bound.is_unspecified() {
        ftcore::host_address::outward(bound.is_ipv4())
    } else {
        Some(bound)
    };
    let address = address.unwrap_or_else(|| {
        tracing::warn!("no interface besides loopback is up; peers are told the loopback address");
        IpAddr::V4(Ipv4Addr::LOCALHOST)
    });
    bracketed_host(&address.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advertised_hosts_make_valid_urls() {
        let url = |bind, host| {
            let options = TransportOptions {
                insecure: true,
                ..TransportOptions::default()
            };
            HttpTransport::start_with(bind, host, options).unwrap().metadata()
        };
        assert!(url("127.0.0.1:0", None).starts_with("http://127.0.0.1:"));
        assert!(url("127.0.0.1:0", Some("node7")).starts_with("http://node7:"));
        assert!(url("127.0.0.1:0", Some("fe80::1")).starts_with("http://[fe80::1]:"));
        assert!(!url("0.0.0.0:0", None).contains("0.0.0.0"));
    }

    #[test]
    fn an_address_in_use_is_a_conflict_that_names_it() {
        let first = HttpTransport::start("127.0.0.1:0", None).unwrap();
        let bind = first.local_addr().to_string();
        let e = HttpTransport::start(&bind, None).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Conflict);
        assert!(e.message().contains(&bind), "{e}");
    }

    #[test]
    fn an_idle_server_shuts_down_at_once_and_twice() {
        let server = HttpTransport::start("127.0.0.1:0", None).unwrap();
        server.shutdown(Instant::now() + Duration::from_secs(20)).unwrap();
        server.shutdown(Instant::now()).unwrap();
    }
}
