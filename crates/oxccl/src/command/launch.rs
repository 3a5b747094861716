//! `oxccl launch`: starts the replicas of this machine (and a lighthouse, unless there is one), restarts those that
//! die, and says how it went.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use oxccl::core::{Credentials, Error, ErrorKind, Result, deadline_in};
use oxccl::launch::{
    EventKind, ExitSummary, GiveUp, LighthouseSource, Outcome, RestartPolicy, StopReason, Supervisor,
    SupervisorConfig, SupervisorEvent, check_lighthouse,
};

use super::{ExitCode, again};

const EXAMPLES: &str = "\
Examples:
  One machine, two replicas, a lighthouse of its own:
    oxccl launch --replicas 2 -- ./train --steps 500

  One machine, two replicas of two processes each:
    oxccl launch --replicas 2 --ranks-per-replica 2 -- ./train --steps 500

  Two machines, one replica each:
    hostA$ oxccl credentials new job1     (and copy the folder to hostB)
    hostA$ oxccl lighthouse --credentials job1 --min-replicas 2
    hostA$ oxccl launch --credentials job1 --lighthouse https://hostA:29510 --total-replicas 2 -- ./train
    hostB$ oxccl launch --credentials job1 --lighthouse https://hostA:29510 --total-replicas 2 --first-replica 1 -- ./train

Each process finds OXCCL_LIGHTHOUSE, OXCCL_REPLICA, OXCCL_REPLICAS, OXCCL_LIFE, OXCCL_RANK, OXCCL_RANKS and OXCCL_EVENTS in its
environment, and where there are several ranks OXCCL_REPLICA_STORE: the store in which the ranks of its replica meet.
The exit codes are those of `oxccl --help`; a program that exits with 2 is not restarted.";

/// Start and supervise the replicas of a job on this machine.
///
/// A replica of which a process dies is restarted as a whole; its exit code 0 ends it for good. No replica outlives this command.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// The lighthouse, as https://host:port (http:// without credentials); of several that share the job all, separated by commas. Without it one
    /// is started here.
    #[arg(long, env = "OXCCL_LIGHTHOUSE", value_name = "URL")]
    lighthouse: Option<String>,
    /// The credentials of the job (`oxccl credentials`): all its processes ask for and show them.
    #[arg(long, env = "OXCCL_CREDENTIALS", value_name = "DIR")]
    credentials: Option<PathBuf>,
    /// Without credentials, let the processes listen where other machines reach them (OXCCL_INSECURE=1 for them).
    #[arg(long)]
    insecure: bool,
    /// Replicas to start on this machine.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    replicas: u32,
    /// Processes of each replica, all on the machine of the replica.
    #[arg(long, default_value_t = 1, value_name = "M", value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks_per_replica: u32,
    /// Index of the first replica of this machine.
    #[arg(long, default_value_t = 0, value_name = "I")]
    first_replica: u32,
    /// Replicas of the whole job, on all machines [default: up to the last one of this machine].
    #[arg(long, value_name = "N")]
    total_replicas: Option<u32>,
    /// Restarts of each replica.
    #[arg(long, default_value_t = 3, value_name = "M")]
    max_restarts: u32,
    /// Pause before a restart; doubled for each further death in a row.
    #[arg(long, default_value_t = 500, value_name = "MS")]
    restart_delay_ms: u64,
    /// When a replica may not be restarted again, let the others go on.
    #[arg(long)]
    keep_others: bool,
    /// End the run after this many seconds.
    #[arg(long, value_name = "S")]
    timeout_s: Option<u64>,
    /// Folder for logs [default: a new one in the system's temporary directory].
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// Where a lighthouse that is started here listens; 0.0.0.0 lets other machines in, port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:0", value_name = "HOST:PORT")]
    lighthouse_bind: String,
    /// The least number of replicas that may go on, for a lighthouse that is started here.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    min_replicas: u32,
    /// Write how the run ended to standard output, as JSON.
    #[arg(long)]
    json: bool,
    /// The program that each replica runs, with its arguments.
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<std::ffi::OsString>,
}

/// How long the lighthouse and the processes get to start, and how long a given lighthouse may take to answer.
const START: Duration = Duration::from_secs(30);
const REACH: Duration = Duration::from_secs(10);

pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    let Arguments {
        replicas,
        first_replica,
        ..
    } = arguments;
    let total_replicas = match arguments.total_replicas {
        Some(total) => total,
        None => first_replica
            .checked_add(replicas)
            .ok_or_else(|| Error::invalid(format!("--first-replica {first_replica} is out of range")))?,
    };
    let (program, program_arguments) = arguments
        .program
        .split_first()
        .ok_or_else(|| Error::invalid("no program is given"))?;
    let (program, program_arguments) = (program.clone(), program_arguments.to_vec());
    is_there(&program)?;
    let closure = closure(arguments.credentials, arguments.insecure)?;
    let source = match arguments.lighthouse {
        Some(url) => {
            check_lighthouse(&url, deadline_in(REACH))?;
            LighthouseSource::External(url)
        }
        None => own_lighthouse(
            arguments.lighthouse_bind,
            arguments.min_replicas,
            total_replicas,
            closure.clone(),
        )?,
    };
    let run_dir = match arguments.run_dir {
        Some(dir) => dir,
        None => std::env::temp_dir().join(format!("oxccl-run-{}", unique())),
    };
    std::fs::create_dir_all(&run_dir)
        .map_err(|e| Error::io(format!("create the run directory {}", run_dir.display()), e))?;
    let config = SupervisorConfig {
        first_replica,
        ranks_per_replica: arguments.ranks_per_replica,
        total_replicas,
        restart: RestartPolicy {
            max_restarts: arguments.max_restarts,
            backoff: Duration::from_millis(arguments.restart_delay_ms),
            ..RestartPolicy::default()
        },
        give_up: if arguments.keep_others {
            GiveUp::KeepOthers
        } else {
            GiveUp::StopAll
        },
        deadline: arguments.timeout_s.map(|s| deadline_in(Duration::from_secs(s))),
        stop_on_signals: true,
        ..SupervisorConfig::new(replicas, source, &run_dir)
    };
    let verdicts = oxccl::plugin::verdicts_for_job();
    let command = move |_: &_| {
        let mut command = Command::new(&program);
        command
            .args(&program_arguments)
            .envs(verdicts.clone())
            .envs(closure.clone());
        command
    };
    let (supervisor, events) = Supervisor::start(config, command, deadline_in(START))?;
    say!(
        "oxccl: lighthouse {}, logs in {}",
        supervisor.lighthouse(),
        run_dir.display()
    );
    let mut end = None;
    for event in events {
        match event {
            SupervisorEvent::Finished(outcome) => end = Some(outcome),
            other => show(&other, arguments.ranks_per_replica),
        }
    }
    let outcome = end.ok_or_else(|| Error::new(ErrorKind::Internal, "the run ended without an outcome"))?;
    report(&outcome, arguments.json)?;
    Ok(match (&outcome.stop, outcome.is_success()) {
        (_, true) => ExitCode::SUCCESS,
        (StopReason::Stopped { .. }, _) => ExitCode::from(130),
        _ => ExitCode::from(1),
    })
}

#[cfg(feature = "lighthouse")]
fn own_lighthouse(
    bind: String,
    min_replicas: u32,
    total_replicas: u32,
    closure: Vec<(&'static str, OsString)>,
) -> Result<LighthouseSource> {
    let this = again()?;
    let command = move |launch: &oxccl::launch::LighthouseLaunch| {
        let mut command = Command::new(this.get_program());
        command.args(this.get_args());
        command
            .args(["lighthouse", "--bind", &launch.bind])
            .arg("--state-file")
            .arg(&launch.state_file);
        command.args(["--min-replicas", &min_replicas.to_string()]);
        command.args(["--initial-replicas", &total_replicas.to_string()]);
        command.envs(closure.clone());
        command
    };
    Ok(LighthouseSource::Spawn {
        bind,
        command: Box::new(command),
    })
}

#[cfg(not(feature = "lighthouse"))]
fn own_lighthouse(_: String, _: u32, _: u32, _: Vec<(&'static str, OsString)>) -> Result<LighthouseSource> {
    Err(Error::invalid(
        "this build has no lighthouse of its own (feature `lighthouse`); give one with --lighthouse URL",
    ))
}

/// What tells the processes of the job whom to talk to. Errors: `InvalidArgument` if the credentials are not usable, before anything is started.
fn closure(credentials: Option<PathBuf>, insecure: bool) -> Result<Vec<(&'static str, OsString)>> {
    let mut variables = Vec::new();
    if let Some(folder) = credentials.filter(|folder| !folder.as_os_str().is_empty()) {
        // The processes may run in another folder.
        let folder = std::path::absolute(&folder)
            .map_err(|e| Error::io(format!("credentials: {}", folder.display()), e))?;
        Credentials::load(&folder)?;
        variables.push((Credentials::VARIABLE, folder.into()));
    }
    if insecure {
        variables.push((ftcore::identity::INSECURE, "1".into()));
    }
    Ok(variables)
}

/// `NotFound` if there is no such program, as the system would look for it: before a lighthouse is started for it.
fn is_there(program: &OsStr) -> Result<()> {
    let named = Path::new(program);
    let found = match named.components().count() {
        1 if !program.as_bytes().contains(&b'/') => std::env::var_os("PATH")
            .is_none_or(|path| std::env::split_paths(&path).any(|folder| folder.join(named).is_file())),
        _ => named.is_file(),
    };
    if found {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::NotFound,
        format!("program \"{}\" not found", named.display()),
    ))
}

/// Unlike any other run's of this machine.
fn unique() -> String {
    let ms = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_millis());
    format!("{ms}-{}", std::process::id())
}

/// A process of the run, for people.
fn rank_of(replica: u32, rank: u32, ranks: u32) -> String {
    match ranks {
        1 => format!("replica {replica}"),
        _ => format!("replica {replica}, rank {rank},"),
    }
}

fn show(event: &SupervisorEvent, ranks: u32) {
    let next = |ms: &Option<u64>| match ms {
        Some(ms) => format!("; restarting in {ms} ms"),
        None => String::new(),
    };
    match event {
        SupervisorEvent::LighthouseUp { url, .. } => tracing::debug!("lighthouse at {url}"),
        SupervisorEvent::LighthouseExited {
            exit,
            tail,
            restart_in_ms,
            ..
        } => {
            say!("oxccl: the lighthouse ended ({exit}){}", next(restart_in_ms));
            show_tail(tail);
        }
        SupervisorEvent::Spawned {
            replica,
            rank,
            life,
            pid,
            ..
        } => {
            let of = rank_of(*replica, *rank, ranks);
            say!("oxccl: {of} started (life {life}, process {pid})");
        }
        SupervisorEvent::Exited {
            replica,
            rank,
            life,
            status,
            signal,
            tail,
            restart_in_ms,
            ..
        } => {
            let exit = ExitSummary {
                status: *status,
                signal: *signal,
            };
            let of = rank_of(*replica, *rank, ranks);
            say!("oxccl: {of} ended (life {life}, {exit}){}", next(restart_in_ms));
            show_tail(tail);
        }
        SupervisorEvent::Replica(event) => match &event.kind {
            EventKind::Error { text } => {
                say!("oxccl: {}: {text}", rank_of(event.replica, event.rank, ranks));
            }
            EventKind::Step { .. } => tracing::trace!("{event:?}"),
            _ => tracing::debug!("{event:?}"),
        },
        SupervisorEvent::Finished(_) => {}
    }
}

fn show_tail(tail: &str) {
    for line in tail.lines() {
        say!("  | {line}");
    }
}

fn report(outcome: &Outcome, json: bool) -> Result<()> {
    say!(
        "oxccl: {}",
        outcome.to_string().lines().next().unwrap_or_default()
    );
    if json {
        let text = serde_json::to_string_pretty(outcome)
            .map_err(|e| Error::invalid(format!("write the outcome as JSON: {e}")))?;
        crate::results::write(&format!("{text}\n"))?;
    }
    Ok(())
}
