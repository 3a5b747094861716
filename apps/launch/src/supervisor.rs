//! The driver's handle on a supervised run: what to start, how to restart it, and how to end it.

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::Command;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ftcore::{Credentials, Error, ErrorKind, Result, deadline_in, time_left};
use oxccl::launch::now_us;
use rustix::process::{Pid, Signal};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::{Handle, Signals};

use super::child;
use super::control::{self, Control};
use super::environment::ReplicaLaunch;
use super::outcome::{Outcome, StopReason};
use super::output::OutputSink;
use super::queue::{SupervisorEvents, event_queue};
use super::slot::Who;

/// Where a lighthouse is to listen and keep its state; given to the closure of [`LighthouseSource::Spawn`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LighthouseLaunch {
    /// `host:port`; port 0 at the first start, the port that was chosen then after a restart.
    pub bind: String,
    /// A file for its record of the job, the same for every incarnation of it.
    pub state_file: PathBuf,
}

/// Builds the lighthouse's command line.
pub type LighthouseCommand = Box<dyn Fn(&LighthouseLaunch) -> Command + Send>;

/// Where the lighthouse of the run is.
pub enum LighthouseSource {
    /// It runs already, at this address (`http://host:port`).
    External(String),
    /// The supervisor starts it, first of all processes, and again at the same address if it dies. The program must call
    /// [`announce_lighthouse`](oxccl::launch::announce_lighthouse) once it listens, as `oxccl lighthouse` does.
    Spawn {
        /// `host:port` to listen at; port 0 lets the system choose.
        bind: String,
        /// Its command line.
        command: LighthouseCommand,
    },
}

impl std::fmt::Debug for LighthouseSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::External(url) => f.debug_tuple("External").field(url).finish(),
            Self::Spawn { bind, .. } => f
                .debug_struct("Spawn")
                .field("bind", bind)
                .finish_non_exhaustive(),
        }
    }
}

/// A signal for a process of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessSignal {
    /// SIGKILL: it ends at once.
    Kill,
    /// SIGSTOP: it stands still until `Continue`.
    Stop,
    /// SIGCONT: it goes on.
    Continue,
}

impl From<ProcessSignal> for Signal {
    fn from(signal: ProcessSignal) -> Self {
        match signal {
            ProcessSignal::Kill => Self::KILL,
            ProcessSignal::Stop => Self::STOP,
            ProcessSignal::Continue => Self::CONT,
        }
    }
}

/// When and how often a dead replica is started again: all its ranks, also if one alone died. One whose ranks all exit with 0 is
/// finished and never restarted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RestartPolicy {
    /// Restarts per replica (and of the lighthouse) in the whole run.
    pub max_restarts: u32,
    /// The pause before a restart; doubled for each further death in a row.
    pub backoff: Duration,
    /// The longest pause.
    pub backoff_max: Duration,
    /// An incarnation at least this long ends such a row.
    pub stable_after: Duration,
    /// Exit codes that no restart would cure. 2 by convention: the command line is wrong.
    pub fatal_codes: Vec<i32>,
}

impl Default for RestartPolicy {
    /// 3 restarts, after 0.5 s, 1 s, … at most 10 s; a row ends after 30 s; code 2 is fatal.
    fn default() -> Self {
        Self {
            max_restarts: 3,
            backoff: Duration::from_millis(500),
            backoff_max: Duration::from_secs(10),
            stable_after: Duration::from_secs(30),
            fatal_codes: vec![2],
        }
    }
}

impl RestartPolicy {
    /// The pause before the next incarnation, after `in_a_row` earlier short incarnations.
    pub(super) fn pause(&self, in_a_row: u32) -> Duration {
        self.backoff
            .saturating_mul(1 << in_a_row.min(20))
            .min(self.backoff_max)
    }
}

/// What happens when a replica may not be restarted again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GiveUp {
    /// The run is stopped: fewer replicas might wait for a quorum for ever.
    StopAll,
    /// The others go on. The outcome is a failure still.
    KeepOthers,
}

/// What to run.
#[derive(Debug)]
pub struct SupervisorConfig {
    /// Index of the first replica of this machine.
    pub first_replica: u32,
    /// Replicas to start on this machine, at least 1.
    pub replicas: u32,
    /// Ranks of each replica, a process each, all on this machine; at least 1.
    pub ranks_per_replica: u32,
    /// Replicas of the whole job, on all machines.
    pub total_replicas: u32,
    /// The lighthouse.
    pub lighthouse: LighthouseSource,
    /// A lighthouse that is started here does not end with the replicas of this machine: others need it. See
    /// [`Supervisor::hold_lighthouse`].
    pub hold_lighthouse: bool,
    /// The job's credentials: every process is told their folder (`OXCCL_CREDENTIALS`), and the stores in which the ranks of a replica meet
    /// ask for them. `None`: those of this process's own environment, which the processes inherit.
    pub credentials: Option<Arc<Credentials>>,
    /// An existing folder for the logs (`replica-R.incarnation-L.log`, with several ranks `replica-R.rank-K.incarnation-L.log`; `lighthouse.log`), the event socket and the
    /// lighthouse's state. What an earlier run has left there of these is removed; not its state, where replicas may go on that are not started here. Supervisors of other
    /// replicas may share it.
    pub run_dir: PathBuf,
    /// Takes what the replicas' processes write, line by line, beside their logs.
    pub output: Option<OutputSink>,
    /// Restarts, of replicas and of the lighthouse alike.
    pub restart: RestartPolicy,
    /// What happens when a replica may not be restarted again.
    pub give_up: GiveUp,
    /// The run is ended at this moment, if one is given.
    pub deadline: Option<Instant>,
    /// How long processes get to end by themselves after SIGTERM, before SIGKILL.
    pub grace: Duration,
    /// SIGINT (Ctrl-C), SIGTERM and, if it is not ignored, SIGHUP end the run instead of this process, from before the first child is started
    /// until the supervisor is dropped: the processes get the same signal, and SIGKILL after the grace time or at a second one. SIGUSR1 and
    /// SIGUSR2 are passed on to all processes of the replicas.
    pub stop_on_signals: bool,
}

impl SupervisorConfig {
    /// `replicas` replicas of one rank on this machine alone, with the usual policies.
    pub fn new(replicas: u32, lighthouse: LighthouseSource, run_dir: impl Into<PathBuf>) -> Self {
        Self {
            first_replica: 0,
            replicas,
            ranks_per_replica: 1,
            total_replicas: replicas,
            lighthouse,
            hold_lighthouse: false,
            credentials: None,
            run_dir: run_dir.into(),
            output: None,
            restart: RestartPolicy::default(),
            give_up: GiveUp::StopAll,
            deadline: None,
            grace: Duration::from_secs(2),
            stop_on_signals: false,
        }
    }

    /// Some replicas of the job may be elsewhere, and outlive this supervisor and its lighthouse: they go on by the lighthouse's record. Where all are
    /// started here they are new ones, with or without checkpoints, and the first quorum waits for all of them: a record would only hold them up, and for
    /// ever where they are fewer than before.
    pub(super) fn may_have_others(&self) -> bool {
        self.hold_lighthouse || self.replicas < self.total_replicas
    }

    fn validate(&self) -> Result<()> {
        if self.replicas == 0 {
            return Err(Error::invalid("a run needs at least one replica on this machine"));
        }
        if self.ranks_per_replica == 0 {
            return Err(Error::invalid("a replica has at least one rank"));
        }
        match self.first_replica.checked_add(self.replicas) {
            Some(end) if end <= self.total_replicas => {}
            _ => {
                return Err(Error::invalid(format!(
                    "replicas {} to {} do not fit a job of {} replicas",
                    self.first_replica,
                    u64::from(self.first_replica) + u64::from(self.replicas) - 1,
                    self.total_replicas
                )));
            }
        }
        if !self.run_dir.is_dir() {
            return Err(Error::new(
                ErrorKind::NotFound,
                format!("run directory {} does not exist", self.run_dir.display()),
            ));
        }
        Ok(())
    }
}

/// The processes that run now: whose and which rank to (incarnation, process). An entry is removed before its process is collected, so that a
/// signal sent under the lock always hits the right one.
pub(super) type Running = Arc<Mutex<HashMap<(Who, u32), (u32, Pid)>>>;

/// A running set of processes. Dropping it asks for the end of the run (without waiting for it); the processes cannot
/// outlive this one in any case. What they have started themselves can, if this one is killed.
#[derive(Debug)]
pub struct Supervisor {
    lighthouse: String,
    control: Sender<Control>,
    running: Running,
    outcome: Receiver<Outcome>,
    signals: Option<Handle>,
}

impl Supervisor {
    /// Starts the lighthouse (unless it is external), waits until it listens, then starts every rank of every replica with the
    /// command that `command` makes. The environment of each is completed with `OXCCL_LIGHTHOUSE`, `OXCCL_REPLICA`, `OXCCL_REPLICAS`,
    /// `OXCCL_INCARNATION`, `OXCCL_RANK`, `OXCCL_RANKS`, `OXCCL_REPLICA_STORE`, `OXCCL_EVENTS`, and `RAYON_NUM_THREADS=1` unless the command sets that itself
    /// (one compute thread per process makes runs repeatable). The ranks of a replica also find what torchrun would tell them (`RANK`, `WORLD_SIZE`,
    /// `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT`, `TORCHELASTIC_…`), so that a program written for it runs unchanged, with the replica as its world.
    ///
    /// Everything must have been started by `deadline`. On an error all that was started has been ended again; a
    /// lighthouse that failed is `Unavailable` with the end of its output, a program that does not exist is `NotFound`.
    pub fn start(
        mut config: SupervisorConfig,
        command: impl Fn(&ReplicaLaunch) -> Command + Send + 'static,
        deadline: Instant,
    ) -> Result<(Self, SupervisorEvents)> {
        config.validate()?;
        keep_the_ended()?;
        // The processes, which are told of it, may run in another folder.
        config.run_dir = std::path::absolute(&config.run_dir)
            .map_err(|e| Error::io(format!("run directory {}", config.run_dir.display()), e))?;
        let (queue, events) = event_queue();
        let (control, inbox) = channel();
        let (started, start_result) = channel();
        let (outcome_to, outcome) = channel();
        let running = Running::default();
        let signals = if config.stop_on_signals {
            Some(take_signals(control.clone())?)
        } else {
            None
        };
        let run = control::Run {
            config,
            command: Box::new(command),
            events: queue,
            to_self: control.clone(),
            inbox,
            running: Arc::clone(&running),
        };
        // Made before the start, so that its drop tidies up after a failed one.
        let mut this = Self {
            lighthouse: String::new(),
            control,
            running,
            outcome,
            signals,
        };
        std::thread::Builder::new()
            .name("ox-launch".into())
            .spawn(move || control::run(run, deadline, &started, &outcome_to))
            .map_err(|e| Error::io("start thread ox-launch", e))?;
        // The thread keeps the deadline itself; a lost answer means that it is gone.
        this.lighthouse = start_result
            .recv()
            .map_err(|_| Error::new(ErrorKind::Internal, "thread ox-launch ended without an answer"))??;
        Ok((this, events))
    }

    /// The lighthouse's address, `http://host:port`.
    pub fn lighthouse(&self) -> &str {
        &self.lighthouse
    }

    /// Sends a signal to a rank of a replica (with all processes that it started), if the replica is in the incarnation `incarnation`; `None` takes
    /// any. Returns the moment, in microseconds of the real-time clock. `NotFound` if that incarnation does not run. A replica of which a rank dies is
    /// restarted as after any other death.
    pub fn signal(
        &self,
        replica: u32,
        rank: u32,
        incarnation: Option<u32>,
        signal: ProcessSignal,
    ) -> Result<u64> {
        self.signal_process((Who::Replica(replica), rank), incarnation, signal)
    }

    /// Sends a signal to the lighthouse that this supervisor started, as [`signal`](Self::signal) does to a rank.
    pub fn signal_lighthouse(&self, signal: ProcessSignal) -> Result<u64> {
        self.signal_process((Who::Lighthouse, 0), None, signal)
    }

    fn signal_process(
        &self,
        whose: (Who, u32),
        incarnation: Option<u32>,
        signal: ProcessSignal,
    ) -> Result<u64> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let (who, rank) = whose;
        match running.get(&whose) {
            Some((current, pid)) if incarnation.is_none_or(|incarnation| incarnation == *current) => {
                let t_us = now_us();
                child::signal_group(*pid, signal.into())?;
                Ok(t_us)
            }
            Some((current, _)) => Err(Error::new(
                ErrorKind::NotFound,
                format!(
                    "{who} is in incarnation {current}, not in {}",
                    incarnation.unwrap_or_default()
                ),
            )),
            None => Err(Error::new(
                ErrorKind::NotFound,
                format!("rank {rank} of {who} does not run"),
            )),
        }
    }

    /// The ranks that run now, as (replica, rank, incarnation), in that order.
    pub fn running(&self) -> Vec<(u32, u32, u32)> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let mut ranks: Vec<(u32, u32, u32)> = running
            .iter()
            .filter_map(|((who, rank), (incarnation, _))| match who {
                Who::Replica(replica) => Some((*replica, *rank, *incarnation)),
                Who::Lighthouse => None,
            })
            .collect();
        ranks.sort_unstable();
        ranks
    }

    /// Asks for the end of the run: SIGTERM to all, SIGKILL after the grace time (at once when called again).
    pub fn stop(&self, why: impl Into<String>) {
        let _ = self.control.send(Control::Stop {
            reason: StopReason::Stopped { why: why.into() },
            signal: Signal::TERM,
        });
    }

    /// Whether the lighthouse that this supervisor started goes on without replicas of this machine, until the run is stopped.
    pub fn hold_lighthouse(&self, held: bool) {
        let _ = self.control.send(Control::Hold(held));
    }

    /// Waits until all processes are gone. `Timeout` if some still run at `deadline`; the run goes on then.
    pub fn wait(&self, deadline: Instant) -> Result<Outcome> {
        self.outcome
            .recv_timeout(time_left(deadline))
            .map_err(|e| match e {
                RecvTimeoutError::Timeout => {
                    let mut replicas: Vec<u32> =
                        self.running().iter().map(|(replica, ..)| *replica).collect();
                    replicas.dedup();
                    Error::timeout(format!(
                        "the run goes on: replicas {replicas:?} are still running"
                    ))
                }
                RecvTimeoutError::Disconnected => Error::new(
                    ErrorKind::InvalidState,
                    "the outcome of this run was taken already",
                ),
            })
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.stop("its supervisor was dropped");
        if let Some(signals) = &self.signals {
            signals.close();
        }
    }
}

/// Where SIGCHLD is ignored, as some daemons leave it to what they start, the kernel collects children itself: how they ended would never be known, and
/// their numbers would be free while they are still signalled.
fn keep_the_ended() -> Result<()> {
    if is_ignored(SIGCHLD) {
        signal_hook::flag::register(SIGCHLD, Arc::default()).map_err(|e| Error::io("catch SIGCHLD", e))?;
    }
    Ok(())
}

/// True if this process was started with the signal ignored.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// The signals that end a run in order. Not SIGHUP where it is ignored: what was started below `nohup` outlives its terminal.
pub fn ending_signals() -> Vec<i32> {
    let all = [SIGINT, SIGTERM, SIGHUP].into_iter();
    all.filter(|signal| *signal != SIGHUP || !is_ignored(SIGHUP))
        .collect()
}

fn take_signals(control: Sender<Control>) -> Result<Handle> {
    let mut taken = ending_signals();
    taken.extend([SIGUSR1, SIGUSR2]);
    let mut signals = Signals::new(taken).map_err(|e| Error::io("catch signals", e))?;
    let handle = signals.handle();
    std::thread::Builder::new()
        .name("ox-signals".into())
        .spawn(move || {
            for signal in signals.forever() {
                let stop = |why: &str, signal| Control::Stop {
                    reason: StopReason::Stopped { why: why.into() },
                    signal,
                };
                let _ = control.send(match signal {
                    SIGUSR1 => Control::PassOn(Signal::USR1),
                    SIGUSR2 => Control::PassOn(Signal::USR2),
                    SIGINT => stop("interrupted (SIGINT)", Signal::INT),
                    SIGHUP => stop("hung up (SIGHUP)", Signal::HUP),
                    _ => stop("terminated (SIGTERM)", Signal::TERM),
                });
            }
        })
        .map_err(|e| Error::io("start thread ox-signals", e))?;
    Ok(handle)
}

/// How long one retry of a lighthouse's start may take when it is restarted in the middle of a run.
pub(super) fn restart_deadline() -> Instant {
    deadline_in(Duration::from_secs(30))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_doubles_up_to_its_limit() {
        let policy = RestartPolicy::default();
        let pauses: Vec<u128> = (0..7).map(|n| policy.pause(n).as_millis()).collect();
        assert_eq!(pauses, [500, 1000, 2000, 4000, 8000, 10_000, 10_000]);
        assert_eq!(policy.pause(u32::MAX), policy.backoff_max);
    }

    #[test]
    fn what_does_not_fit_the_job_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let config = || SupervisorConfig::new(2, LighthouseSource::External("http://h:1".into()), dir.path());
        for (config, named) in [
            (
                SupervisorConfig {
                    replicas: 0,
                    ..config()
                },
                "at least one",
            ),
            (
                SupervisorConfig {
                    first_replica: 1,
                    ..config()
                },
                "replicas 1 to 2 do not fit a job of 2",
            ),
            (
                SupervisorConfig {
                    first_replica: u32::MAX,
                    ..config()
                },
                "do not fit",
            ),
            (
                SupervisorConfig {
                    run_dir: dir.path().join("absent"),
                    ..config()
                },
                "does not exist",
            ),
        ] {
            let e = Supervisor::start(config, |_| Command::new("true"), restart_deadline()).unwrap_err();
            assert!(e.to_string().contains(named), "{e}");
        }
    }
}
