//! `oxccl lighthouse`: runs the service through which replicas find each other, until it is interrupted.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use oxccl::coordination::{LighthouseConfig, LighthouseServer};
use oxccl::core::{Error, Result, deadline_in};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

const EXAMPLES: &str = "\
Examples:
  For a job of two machines, restart-safe:
    oxccl lighthouse --bind 0.0.0.0:29510 --min-replicas 2 --state-file /var/lib/oxccl/lighthouse

  Its page with the members and the reason why a quorum waits: http://host:29510/
  As JSON: http://host:29510/status   For Prometheus: http://host:29510/metrics

Anyone who reaches the port can take part: bind it to a network that you trust.
The exit codes are those of `oxccl --help`.";

/// Run the lighthouse of a job: it forms quorums and tells replicas about each other's deaths.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Where to listen; port 0 takes a free one.
    #[arg(long, default_value = "0.0.0.0:29510", value_name = "HOST:PORT")]
    bind: String,
    /// The host name under which others reach this machine [default: its own name, or the address in --bind].
    #[arg(long, value_name = "HOST")]
    advertise_host: Option<String>,
    /// The least number of replicas in a quorum.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    min_replicas: u32,
    /// The first quorum waits for this many, however long it takes: a repeatable start.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    initial_replicas: Option<u32>,
    /// How long a quorum waits for healthy replicas that have not asked yet.
    #[arg(long, default_value_t = 60_000, value_name = "MS")]
    join_timeout_ms: u64,
    /// A replica that sent no heartbeat for this long is dead.
    #[arg(long, default_value_t = 5_000, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..))]
    heartbeat_timeout_ms: u64,
    /// A file that keeps the quorum id over restarts.
    #[arg(long, value_name = "FILE")]
    state_file: Option<PathBuf>,
}

pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    // Caught before anything listens, so that an early interrupt ends it in order too.
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).map_err(|e| Error::io("catch signals", e))?;
    let count = |n: u32| usize::try_from(n).unwrap_or(usize::MAX);
    let server = LighthouseServer::start(LighthouseConfig {
        bind: arguments.bind,
        advertise_host: arguments.advertise_host,
        min_replicas: count(arguments.min_replicas),
        initial_replicas: arguments.initial_replicas.map(count),
        join_timeout: Duration::from_millis(arguments.join_timeout_ms),
        heartbeat_timeout: Duration::from_millis(arguments.heartbeat_timeout_ms),
        state_file: arguments.state_file,
        ..LighthouseConfig::default()
    })?;
    let url = server.address();
    say!("oxccl: lighthouse at {url} (dashboard: the same address in a browser)");
    oxccl::launch::announce_lighthouse(&url, deadline_in(Duration::from_secs(5)))?;
    let signal = signals.forever().next();
    tracing::info!("lighthouse ends (signal {})", signal.unwrap_or_default());
    server.shutdown(deadline_in(Duration::from_secs(2)))?;
    Ok(ExitCode::SUCCESS)
}
