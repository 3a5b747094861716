//! `oxccl launch`: starts the replicas of this machine (and a lighthouse, unless there is one), restarts those that
//! die, and says how it went.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::Write as _;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use oxccl::coordination::LighthouseClient;
use oxccl::core::{Credentials, Error, ErrorKind, Result, deadline_in};
use oxccl::identity::Party;
use oxccl::launch::{EventKind, ReplicaEvent};
use oxccl_launch::{
    ExitSummary, GiveUp, LighthouseSource, Outcome, OutputSink, RestartPolicy, StopReason, Supervisor,
    SupervisorConfig, SupervisorEvent,
};

use self::waits::Waits;
use super::ExitCode;
use super::again;
use super::rendezvous::{Address, Node, Rendezvous};

mod waits;

const EXAMPLES: &str = "\
Examples:
  One machine, two replicas, a lighthouse of its own:
    oxccl launch --replicas 2 -- ./train --steps 500

  One machine, two replicas of two processes each:
    oxccl launch --replicas 2 --ranks-per-replica 2 -- ./train --steps 500

  Two machines, four replicas each:
    hostA$ oxccl credentials new job1     (and copy the folder to hostB)
    hostA$ oxccl launch --credentials job1 --nnodes 2 --node-rank 0 --rendezvous hostA:29500 --replicas 4 -- ./train
    hostB$ oxccl launch --credentials job1 --nnodes 2 --node-rank 1 --rendezvous hostA:29500 --replicas 4 -- ./train

  The same with a lighthouse that outlives every launcher, and machines that come and go:
    hostA$ oxccl lighthouse --credentials job1 --min-replicas 1 --initial-replicas 2
    hostA$ oxccl launch --credentials job1 --lighthouse https://hostA:29510 --total-replicas 2 -- ./train
    hostB$ oxccl launch --credentials job1 --lighthouse https://hostA:29510 --total-replicas 2 --first-replica 1 -- ./train

Each process finds OXCCL_LIGHTHOUSE, OXCCL_REPLICA, OXCCL_REPLICAS, OXCCL_INCARNATION, OXCCL_RANK, OXCCL_RANKS, OXCCL_EVENTS and
OXCCL_REPLICA_STORE (the store in which the ranks of its replica meet) in its environment, and torchrun's variables (RANK,
WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...) with its replica as the world: a program written for torchrun runs unchanged.
RAYON_NUM_THREADS is 1 in them, unless it is set here: processes share the machine, and candle's results then repeat bit for bit.
SIGINT, SIGTERM and SIGHUP (but not below nohup) end the run: the processes get the same signal, and SIGKILL after --grace-s or at a
second one.
SIGUSR1 and SIGUSR2 are passed on to all processes.
The exit codes are those of `oxccl --help`; a program that exits with 2 is not restarted.";

/// Start and supervise the replicas of a job on this machine.
///
/// A replica of which a process dies is restarted as a whole; its exit code 0 ends it for good. No process that this command starts outlives it. What
/// such a process has started itself does if this command is killed (SIGKILL): in a shell, begin the last command with `exec`.
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
    /// Machines (nodes) of the job, each of which starts as many replicas. They come together at --rendezvous.
    #[arg(long, default_value_t = 1, value_name = "N", requires = "rendezvous", value_parser = clap::value_parser!(u32).range(1..=4096))]
    nnodes: u32,
    /// The number of this node, from 0. Node 0 has the rendezvous and the lighthouse.
    #[arg(long, env = "OXCCL_NODE_RANK", value_name = "I", requires = "rendezvous")]
    node_rank: Option<u32>,
    /// Where the nodes come together: an address of node 0 that all reach. The lighthouse takes the next port.
    #[arg(long, value_name = "HOST:PORT", requires = "node_rank", conflicts_with_all = ["lighthouse", "first_replica", "total_replicas", "lighthouse_bind"])]
    rendezvous: Option<String>,
    /// How long a node waits for the others.
    #[arg(long, default_value_t = 600, value_name = "S", value_parser = clap::value_parser!(u64).range(1..))]
    rendezvous_timeout_s: u64,
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
    /// How long the processes get to end by themselves when the run ends early, before SIGKILL.
    #[arg(long, default_value_t = 2, value_name = "S")]
    grace_s: u64,
    /// When a replica may not be restarted again, let the others go on.
    #[arg(long)]
    keep_others: bool,
    /// End the run after this many seconds.
    #[arg(long, value_name = "S")]
    timeout_s: Option<u64>,
    /// Folder for logs and the record of a lighthouse that is started here [default: a new one in the system's temporary directory]. Launchers of
    /// different replicas may share it. A record of an earlier run is removed if all replicas of the job are started here.
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// Where a lighthouse that is started here listens; 0.0.0.0 lets other machines in, port 0 takes a free one [default: 127.0.0.1:0].
    #[arg(long, value_name = "HOST:PORT")]
    lighthouse_bind: Option<String>,
    /// The least number of replicas that may go on, for a lighthouse that is started here; with fewer the job waits [default: 1]. With --rendezvous
    /// that of node 0 counts.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    min_replicas: Option<u32>,
    /// Keep what the processes write in their logs only. Without it their lines come out here too, each with its replica and rank.
    #[arg(long)]
    quiet: bool,
    /// Write how the run ended to standard output, as JSON; what the processes write there goes to standard error then.
    #[arg(long)]
    json: bool,
    /// The program that each replica runs, with its arguments.
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<std::ffi::OsString>,
}

/// How long the lighthouse and the processes get to start.
const START: Duration = Duration::from_secs(30);
/// How long a given lighthouse may take to answer: it may be starting beside this command.
const REACH: Duration = Duration::from_secs(5);
/// How long that answer itself is waited for.
const ANSWER: Duration = Duration::from_secs(1);
/// How often the other nodes are looked after.
const LOOK: Duration = Duration::from_secs(1);
/// A commit is told at most so often.
const COMMITS: Duration = Duration::from_secs(10);

pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    let replicas = arguments.replicas;
    let place = place(&arguments)?;
    without_effect(&arguments)?;
    let (program, program_arguments) = arguments
        .program
        .split_first()
        .ok_or_else(|| Error::invalid("no program is given"))?;
    let (program, program_arguments) = (program.clone(), program_arguments.to_vec());
    is_there(&program)?;
    let credentials = credentials(arguments.credentials)?;
    let party = credentials.as_deref().map(Party::tool).transpose()?;
    let insecure = arguments
        .insecure
        .then_some((oxccl::core::identity::INSECURE, "1"));
    let met = match &place.node {
        None => None,
        Some((node, address)) => {
            let deadline = deadline_in(Duration::from_secs(arguments.rendezvous_timeout_s));
            Some(Rendezvous::join(
                *node,
                address,
                credentials.clone(),
                arguments.insecure,
                deadline,
            )?)
        }
    };
    let own = |bind: String, host: Option<&str>| {
        let (least, first) = (arguments.min_replicas.unwrap_or(1), place.total_replicas);
        let mut options = vec![
            format!("--min-replicas={least}"),
            format!("--initial-replicas={first}"),
        ];
        options.extend(host.map(|host| format!("--advertise-host={host}")));
        own_lighthouse(bind, options, insecure)
    };
    let mut client = None;
    let source = match (&place.node, arguments.lighthouse) {
        (Some((node, address)), _) if node.node == 0 => {
            let (bind, host) = address.lighthouse();
            own(bind, Some(host))?
        }
        // It comes up once all nodes have come together.
        (Some((_, address)), _) => {
            let has_credentials = credentials.is_some() || Credentials::from_env()?.is_some();
            LighthouseSource::External(address.lighthouse_url(has_credentials))
        }
        (None, Some(url)) => {
            // Before anything is started: a wrong address, or credentials of another job.
            let reached = LighthouseClient::connect_as(party.clone(), &url, deadline_in(REACH))?;
            // Without credentials a connection comes up all the same, and the first request is refused. Another lighthouse than ours may have no answer.
            match reached.status(deadline_in(ANSWER)) {
                Err(e) if e.kind() == ErrorKind::InvalidArgument => return Err(e),
                _ => client = Some(reached),
            }
            LighthouseSource::External(url)
        }
        (None, None) => own(
            arguments
                .lighthouse_bind
                .unwrap_or_else(|| "127.0.0.1:0".to_owned()),
            None,
        )?,
    };
    let run_dir = match arguments.run_dir {
        Some(dir) => dir,
        None => std::env::temp_dir().join(format!("oxccl-run-{}", unique())),
    };
    std::fs::create_dir_all(&run_dir)
        .map_err(|e| Error::io(format!("create the run directory {}", run_dir.display()), e))?;
    let config = SupervisorConfig {
        first_replica: place.first_replica,
        hold_lighthouse: met.is_some(),
        credentials,
        ranks_per_replica: arguments.ranks_per_replica,
        total_replicas: place.total_replicas,
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
        grace: Duration::from_secs(arguments.grace_s),
        stop_on_signals: true,
        output: (!arguments.quiet).then(|| output(arguments.ranks_per_replica, arguments.json)),
        ..SupervisorConfig::new(replicas, source, &run_dir)
    };
    let verdicts = oxccl::plugin::verdicts_for_job();
    let command = move |_: &_| {
        let mut command = Command::new(&program);
        command
            .args(&program_arguments)
            .envs(verdicts.clone())
            .envs(insecure);
        command
    };
    let (supervisor, mut events) = match Supervisor::start(config, command, deadline_in(START)) {
        // A signal ended it before everything ran.
        Err(e) if e.kind() == ErrorKind::Aborted => {
            say!("oxccl: {e}");
            return Ok(ExitCode::from(130));
        }
        started => started?,
    };
    say!(
        "oxccl: lighthouse {}, logs in {}",
        supervisor.lighthouse(),
        run_dir.display()
    );
    let mut shown = Shown {
        ranks: arguments.ranks_per_replica,
        tells: arguments.quiet,
        sizes: BTreeMap::new(),
        due: Instant::now(),
    };
    let mut waits = Waits::new(party, client);
    let mut end = None;
    while !events.is_over() {
        match events.next_until(deadline_in(LOOK)) {
            Some(SupervisorEvent::Finished(outcome)) => end = Some(outcome),
            Some(other) => {
                waits.heard();
                shown.show(&other);
            }
            None => {}
        }
        if let Some(text) = waits.ask(supervisor.lighthouse()) {
            say!("oxccl: {text}");
        }
        if let Some(others_run) = met.as_ref().and_then(Rendezvous::others_run) {
            supervisor.hold_lighthouse(others_run);
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

/// What this machine starts of the job.
struct Place {
    first_replica: u32,
    total_replicas: u32,
    node: Option<(Node, Address)>,
}

fn place(arguments: &Arguments) -> Result<Place> {
    let (replicas, nodes) = (arguments.replicas, arguments.nnodes);
    if let (Some(address), Some(node)) = (&arguments.rendezvous, arguments.node_rank) {
        if node >= nodes {
            return Err(Error::invalid(format!(
                "--node-rank {node} must be less than --nnodes {nodes}"
            )));
        }
        return Ok(Place {
            first_replica: node * replicas,
            total_replicas: nodes * replicas,
            node: Some((
                Node {
                    node,
                    nodes,
                    replicas,
                    ranks: arguments.ranks_per_replica,
                },
                Address::new(address)?,
            )),
        });
    }
    let first = arguments.first_replica;
    Ok(Place {
        first_replica: first,
        total_replicas: match arguments.total_replicas {
            Some(total) => total,
            None => first
                .checked_add(replicas)
                .ok_or_else(|| Error::invalid(format!("--first-replica {first} is out of range")))?,
        },
        node: None,
    })
}

/// Options for a lighthouse that is started here do nothing beside one that is given.
///
/// Errors: `InvalidArgument` if that one is given on the command line. A variable of the environment is not meant for one command, so of that it is only
/// said.
fn without_effect(arguments: &Arguments) -> Result<()> {
    let Some(url) = &arguments.lighthouse else {
        return Ok(());
    };
    let given = [
        ("--lighthouse-bind", arguments.lighthouse_bind.is_some()),
        ("--min-replicas", arguments.min_replicas.is_some()),
    ];
    let Some((option, _)) = given.into_iter().find(|(_, given)| *given) else {
        return Ok(());
    };
    let text = format!("{option} is for a lighthouse that is started here, and the job has one at {url}");
    if std::env::var("OXCCL_LIGHTHOUSE").is_ok_and(|said| said == *url) {
        say!("oxccl: {text} (OXCCL_LIGHTHOUSE): it does nothing");
        return Ok(());
    }
    Err(Error::invalid(format!("{text}; give it to that one")))
}

/// A lighthouse with these options, kept by the supervisor.
fn own_lighthouse(
    bind: String,
    options: Vec<String>,
    insecure: Option<(&'static str, &'static str)>,
) -> Result<LighthouseSource> {
    let this = again()?;
    let command = move |launch: &oxccl_launch::LighthouseLaunch| {
        let mut command = Command::new(this.get_program());
        command
            .args(this.get_args())
            .args(["lighthouse", "--bind", &launch.bind]);
        command.arg("--state-file").arg(&launch.state_file);
        command.args(&options).envs(insecure);
        command
    };
    Ok(LighthouseSource::Spawn {
        bind,
        command: Box::new(command),
    })
}

/// The job's credentials. Errors: `InvalidArgument` if they are not usable, before anything is started.
fn credentials(folder: Option<PathBuf>) -> Result<Option<Arc<Credentials>>> {
    let Some(folder) = folder.filter(|folder| !folder.as_os_str().is_empty()) else {
        return Ok(None);
    };
    // The processes may run in another folder.
    let folder = std::path::absolute(&folder)
        .map_err(|e| Error::io(format!("credentials: {}", folder.display()), e))?;
    Credentials::load(&folder).map(Some)
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

/// Lines of the processes come out here, each with its replica and rank.
fn output(ranks: u32, is_json: bool) -> OutputSink {
    OutputSink::new(move |line| {
        let of = match ranks {
            1 => format!("[replica {}] ", line.replica),
            _ => format!("[replica {}, rank {}] ", line.replica, line.rank),
        };
        // One write for each line: they come from several threads. It need not be read; the log has it.
        let text = [of.as_bytes(), line.text, b"\n"].concat();
        if line.is_error || is_json {
            drop(std::io::stderr().write_all(&text));
        } else {
            drop(crate::results::raw(&text));
        }
    })
}

/// What of the events is told as they come.
struct Shown {
    ranks: u32,
    /// The end of a process's output is told, since the rest is not.
    tells: bool,
    /// Of the last quorum of each rank.
    sizes: BTreeMap<(u32, u32), u32>,
    /// When a commit is told again.
    due: Instant,
}

impl Shown {
    fn show(&mut self, event: &SupervisorEvent) {
        let ranks = self.ranks;
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
                incarnation,
                pid,
                ..
            } => {
                let of = rank_of(*replica, *rank, ranks);
                say!("oxccl: {of} started (incarnation {incarnation}, process {pid})");
            }
            SupervisorEvent::Exited {
                replica,
                rank,
                incarnation,
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
                say!(
                    "oxccl: {of} ended (incarnation {incarnation}, {exit}){}",
                    next(restart_in_ms)
                );
                if self.tells {
                    show_tail(tail);
                }
            }
            SupervisorEvent::Replica(event) => {
                tracing::trace!("{event:?}");
                if let Some(text) = self.told(event) {
                    say!("oxccl: {}: {text}", rank_of(event.replica, event.rank, ranks));
                }
            }
            SupervisorEvent::Finished(_) => {}
        }
    }

    /// What a replica reports, as far as it is told: a change of its quorum, a heal, an attempt that was lost, a commit now and then, its end.
    fn told(&mut self, event: &ReplicaEvent) -> Option<String> {
        match &event.kind {
            EventKind::Quorum { epoch, step, size } => {
                let before = self.sizes.insert((event.replica, event.rank), *size);
                let replicas = if *size == 1 { "replica" } else { "replicas" };
                (before != Some(*size))
                    .then(|| format!("a quorum of {size} {replicas} (epoch {epoch}) at step {step}"))
            }
            EventKind::Healed { step, bytes, ms } => Some(format!(
                "healed to step {step}: {:.1} MB in {ms:.0} ms",
                *bytes as f64 / 1e6
            )),
            EventKind::Commit(commit) if commit.failed_attempts > 0 => Some(format!(
                "step {} committed in epoch {}, failed attempts before: {}",
                commit.step, commit.epoch, commit.failed_attempts
            )),
            // In the first step of a run replicas only take over one state.
            EventKind::Commit(commit) if commit.contributors > 0 && Instant::now() >= self.due => {
                self.due = deadline_in(COMMITS);
                Some(format!(
                    "step {} committed, {} contributed",
                    commit.step, commit.contributors
                ))
            }
            EventKind::Final(end) => Some(format!(
                "{} at step {}: parameters {}, held-out loss {:.4}",
                end.state.as_str(),
                end.step,
                end.hash,
                end.heldout_loss
            )),
            EventKind::Error { text } => Some(text.clone()),
            _ => None,
        }
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
        crate::results::json(outcome, "the outcome")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use oxccl::launch::{Commit, Final, ReplicaState};

    use super::*;

    #[test]
    fn of_a_replicas_events_those_are_told_that_change_something() {
        let mut shown = Shown {
            ranks: 1,
            tells: false,
            sizes: BTreeMap::new(),
            due: Instant::now(),
        };
        let mut told = |kind| {
            shown.told(&ReplicaEvent {
                replica: 1,
                incarnation: 0,
                rank: 0,
                t_us: 0,
                kind,
            })
        };
        let quorum = |epoch, size| EventKind::Quorum { epoch, step: 4, size };
        let commit_of = |step, failed_attempts, contributors| {
            EventKind::Commit(Commit {
                step,
                epoch: 9,
                failed_attempts,
                participants: 2,
                contributors,
                hash: None,
                inner_ms: 0.0,
                sync_ms: 0.0,
                bytes_sent: 0,
                bytes_recv: 0,
            })
        };
        let commit = |step, failed_attempts| commit_of(step, failed_attempts, 2);
        let is = |told: Option<String>, wanted: &str| assert_eq!(told.as_deref(), Some(wanted));
        is(told(quorum(7, 2)), "a quorum of 2 replicas (epoch 7) at step 4");
        assert_eq!(told(quorum(8, 2)), None);
        is(told(quorum(9, 1)), "a quorum of 1 replica (epoch 9) at step 4");
        assert_eq!(told(commit_of(4, 0, 0)), None);
        is(told(commit(5, 0)), "step 5 committed, 2 contributed");
        assert_eq!(told(commit(6, 0)), None);
        is(
            told(commit(7, 2)),
            "step 7 committed in epoch 9, failed attempts before: 2",
        );
        let end = Final {
            step: 8,
            hash: "604799be0654af59".into(),
            heldout_loss: 2.5,
            heldout_accuracy: None,
            train_loss: 2.0,
            inner_steps: 80,
            bytes_sent: 1,
            bytes_recv: 1,
            state: ReplicaState::Done,
        };
        is(
            told(EventKind::Final(end)),
            "done at step 8: parameters 604799be0654af59, held-out loss 2.5000",
        );
    }
}
