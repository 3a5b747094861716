//! `oxccl lighthouse`: runs the service through which replicas find each other, until it is interrupted.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use oxccl::coordination::{EtcdConfig, LighthouseConfig, LighthouseServer};
use oxccl::core::{Credentials, Error, Result, deadline_in};
use signal_hook::consts::{SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

use super::ExitCode;

const EXAMPLES: &str = "\
Examples:
  For a job of two machines, closed to all that do not have its credentials:
    oxccl credentials new job1
    oxccl lighthouse --credentials job1 --min-replicas 1 --initial-replicas 2

  For several jobs, each apart from the others:
    oxccl lighthouse --credentials job1,job2 --min-replicas 1

  Without credentials, for torchft's clients and networks that you trust:
    oxccl lighthouse --insecure --bind 0.0.0.0:29510 --min-replicas 1 --initial-replicas 2

  The job's record is on disk, so that a lighthouse that is killed and started again goes on with the same step.
  A new job at the same port, under other replica names, begins with a new file:
    oxccl lighthouse --min-replicas 1 --state-file /var/lib/oxccl/second-job.json

  All replicas that are left stand at an earlier step than the recorded one (they come from checkpoints), and most of
  the recorded ones are lost for good:
    oxccl lighthouse --min-replicas 1 --accept-rollback

  Three lighthouses on three machines, with the record in etcd: one leads, and if it dies another one goes on with the
  same step. The replicas are given all three (http://hostA:29510,http://hostB:29510,http://hostC:29510):
    oxccl lighthouse --min-replicas 1 --initial-replicas 2 --etcd hostA:2379,hostB:2379,hostC:2379 --job mine

  Its page with the members and the reason why a quorum waits: http://host:29510/
  As JSON: http://host:29510/status   For Prometheus: http://host:29510/metrics
  With credentials, at https:// and for callers with a certificate of the job (docs/credentials.md).

SIGINT, SIGTERM and SIGHUP (but not below nohup) end it in order, with 0. The other exit codes are those of `oxccl --help`.";

/// Run the lighthouse of a job: it forms quorums and tells replicas about each other's deaths.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Where to listen; port 0 takes a free one [default: 0.0.0.0:29510 with credentials, 127.0.0.1:29510 without].
    #[arg(long, value_name = "HOST:PORT")]
    bind: Option<String>,
    /// The credentials of the job (`oxccl credentials new`), or of several jobs: only their processes are served, each job apart from the others.
    #[arg(long, env = "OXCCL_CREDENTIALS", value_name = "DIR", value_delimiter = ',')]
    credentials: Vec<PathBuf>,
    /// Without credentials, listen where other machines reach it: all that do can take part in the job.
    #[arg(long)]
    insecure: bool,
    /// The host name or address under which others reach this machine [default: the address in --bind, or its address towards the outside].
    #[arg(long, value_name = "HOST")]
    advertise_host: Option<String>,
    /// The least number of replicas in a quorum; with fewer the job waits. To go on after a death it has to be below the number of replicas.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    min_replicas: u32,
    /// The first quorum since the lighthouse started waits for this many, however long it takes: a repeatable start. Restart it before the next run.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    initial_replicas: Option<u32>,
    /// How long a quorum waits for healthy replicas that have not asked yet.
    #[arg(long, default_value_t = 60_000, value_name = "MS")]
    join_timeout_ms: u64,
    /// A replica that sent no heartbeat for this long is dead.
    #[arg(long, default_value_t = 5_000, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..))]
    heartbeat_timeout_ms: u64,
    /// Keeps the job's record over restarts; with credentials, the job's id is put behind the name [default: oxccl/lighthouse-<port>.json in $XDG_STATE_HOME or ~/.local/state; none with port 0].
    #[arg(long, value_name = "FILE")]
    state_file: Option<PathBuf>,
    /// Keep no record: a restarted lighthouse believes what the replicas tell.
    #[arg(long, conflicts_with = "state_file")]
    no_state_file: bool,
    /// Keep the record in this etcd cluster (the client ports of its members) and share the job with the other lighthouses that do.
    #[arg(long, value_name = "HOST:PORT,…", value_delimiter = ',', conflicts_with_all = ["state_file", "no_state_file"])]
    etcd: Vec<String>,
    /// The job's name in etcd: its keys begin with /oxccl/NAME/.
    #[arg(long, value_name = "NAME", default_value = "job", requires = "etcd")]
    job: String,
    /// The first quorum may go back to an earlier step than the recorded one, without a majority of the recorded members. Holds once (of
    /// several lighthouses, give it to one).
    #[arg(long)]
    accept_rollback: bool,
}

impl Arguments {
    fn bind(&self) -> &str {
        match &self.bind {
            Some(bind) => bind,
            None if self.folders().next().is_none() => "127.0.0.1:29510",
            None => "0.0.0.0:29510",
        }
    }

    /// The folders of credentials. A variable that is set and empty names none.
    fn folders(&self) -> impl Iterator<Item = &PathBuf> {
        self.credentials.iter().filter(|dir| !dir.as_os_str().is_empty())
    }

    /// Where the record is kept, if it is. Errors: `InvalidArgument` if there is no default place.
    fn record(&self, state_home: Option<OsString>, home: Option<OsString>) -> Result<Option<PathBuf>> {
        if self.no_state_file || !self.etcd.is_empty() || self.state_file.is_some() {
            return Ok(self.state_file.clone());
        }
        // A free port is another one each time: a file named for it would be another job's.
        let port = self.bind().rsplit_once(':').map_or("", |(_, port)| port);
        if port.parse() == Ok(0_u16) {
            return Ok(None);
        }
        let state_home = state_home.map(PathBuf::from).filter(|p| p.is_absolute());
        let home = home.map(PathBuf::from).filter(|p| p.is_absolute());
        let folder = state_home.or_else(|| home.map(|h| h.join(".local/state"))).ok_or_else(|| {
            Error::invalid(
                "there is no place for the job's record: neither XDG_STATE_HOME nor HOME is set; name a file with --state-file, or go \
                 without with --no-state-file",
            )
        })?;
        Ok(Some(folder.join("oxccl").join(format!("lighthouse-{port}.json"))))
    }
}

pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    // Caught before anything listens, so that an early interrupt ends it in order too.
    let mut signals =
        Signals::new(oxccl_launch::ending_signals()).map_err(|e| Error::io("catch signals", e))?;
    // Meant for the replicas, where a scheduler sends them to all processes of a job.
    for signal in [SIGUSR1, SIGUSR2] {
        signal_hook::flag::register(signal, Arc::default()).map_err(|e| Error::io("catch signals", e))?;
    }
    let count = |n: u32| usize::try_from(n).unwrap_or(usize::MAX);
    let state_file = arguments.record(std::env::var_os("XDG_STATE_HOME"), std::env::var_os("HOME"))?;
    let named = arguments.state_file.as_deref().and_then(Path::parent);
    if let Some(folder) = named.filter(|f| !f.as_os_str().is_empty() && !f.exists()) {
        say!(
            "oxccl: the folder {} was not there and is made; the job's record begins anew",
            folder.display()
        );
    }
    let etcd = (!arguments.etcd.is_empty()).then(|| EtcdConfig {
        members: arguments.etcd.clone(),
        job: arguments.job.clone(),
    });
    match (&state_file, &etcd) {
        (_, Some(etcd)) => {
            tracing::info!(etcd = etcd.members.join(","), job = etcd.job, "the job's record");
        }
        (Some(path), None) => tracing::info!(path = %path.display(), "the job's record"),
        (None, None) => tracing::info!("no record of the job is kept"),
    }
    let server = LighthouseServer::start(LighthouseConfig {
        bind: arguments.bind().to_owned(),
        credentials: arguments
            .folders()
            .map(|dir| Credentials::load(dir))
            .collect::<Result<_>>()?,
        insecure: arguments.insecure,
        advertise_host: arguments.advertise_host,
        min_replicas: count(arguments.min_replicas),
        initial_replicas: arguments.initial_replicas.map(count),
        join_timeout: Duration::from_millis(arguments.join_timeout_ms),
        heartbeat_timeout: Duration::from_millis(arguments.heartbeat_timeout_ms),
        state_file,
        etcd,
        accept_rollback: arguments.accept_rollback,
        ..LighthouseConfig::default()
    })?;
    let url = server.address();
    let page = match url.starts_with("https://") {
        true => "for the members of its jobs",
        false => "dashboard: the same address in a browser",
    };
    say!("oxccl: lighthouse at {url} ({page})");
    oxccl::launch::announce_lighthouse(&url, deadline_in(Duration::from_secs(5)))?;
    let signal = signals.forever().next();
    tracing::info!("lighthouse ends (signal {})", signal.unwrap_or_default());
    server.shutdown(deadline_in(Duration::from_secs(2)))?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, Command, FromArgMatches as _};

    use super::*;

    fn parse(arguments: &[&str]) -> Arguments {
        let command = Arguments::augment_args(Command::new("lighthouse").no_binary_name(true));
        Arguments::from_arg_matches(&command.get_matches_from(arguments)).unwrap()
    }

    #[test]
    fn the_record_is_kept_by_default_under_the_port() {
        let record = |arguments: &[&str], state: Option<&str>, home: Option<&str>| {
            let found = parse(arguments).record(state.map(Into::into), home.map(Into::into));
            found.map(|path| path.map(|p| p.display().to_string()))
        };
        let cases: [(&[&str], Option<&str>, &str); 7] = [
            (&[], None, "/home/me/.local/state/oxccl/lighthouse-29510.json"),
            (
                &[],
                Some("relative"),
                "/home/me/.local/state/oxccl/lighthouse-29510.json",
            ),
            (
                &["--bind", "[::]:29511"],
                Some("/state"),
                "/state/oxccl/lighthouse-29511.json",
            ),
            (&["--state-file", "here"], Some("/state"), "here"),
            (&["--no-state-file"], Some("/state"), ""),
            (&["--etcd", "a:2379,b:2379"], Some("/state"), ""),
            (&["--bind", "127.0.0.1:0"], Some("/state"), ""),
        ];
        for (arguments, state, expected) in cases {
            let found = record(arguments, state, Some("/home/me")).unwrap();
            assert_eq!(found.unwrap_or_default(), expected, "{arguments:?}");
        }
        let both = ["--etcd", "a:2379", "--state-file", "here"];
        let command = Arguments::augment_args(Command::new("lighthouse").no_binary_name(true));
        let error = command.try_get_matches_from(both).unwrap_err();
        assert!(error.to_string().contains("cannot be used with"), "{error}");
        let error = record(&[], None, None).unwrap_err();
        assert!(error.to_string().contains("--no-state-file"), "{error}");
    }
}
