//! What both training programs do as the driver: start the processes, watch, kill one, report.
//!
//! The program starts itself again as `lighthouse` and as `replica` processes under a supervisor. Events go to the
//! progress display and into a list; at the end the list becomes the report and the picture.

use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use coordination::{LighthouseConfig, LighthouseServer};
use ftcore::{
    Device, DeviceKind, Error, ErrorKind, GroupOptions, Registry, deadline_in, option_text, variable_prefix,
};
use manager::HealOver;
use oxccl::launch::{EventKind, announce_lighthouse};
use oxccl::world::BackendSpec;
use oxccl_launch::{
    LighthouseLaunch, LighthouseSource, ProcessSignal, ReplicaLaunch, Supervisor, SupervisorConfig,
    SupervisorEvent,
};
use quant::{Codec, QuantizeOptions};

use crate::campaign::{Campaign, ChaosArgs};
use crate::chaos::ENV_HOLD;
use crate::plot::Picture;
use crate::progress::Progress;
use crate::report::{Cost, Report, RunFacts};

/// A line on standard error, where there is room for it.
macro_rules! note {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($text)*);
    }};
}
pub(crate) use note;

/// Writes to standard output. Errors: it is full, or closed.
pub(crate) fn print(text: &str) -> ftcore::Result<()> {
    let mut out = std::io::stdout();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|e| Error::io("write to standard output", e))
}

/// Which rank of which replica to kill, and in which step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kill {
    /// The replica's index.
    pub replica: u32,
    /// The rank inside the replica.
    pub rank: u32,
    /// The step whose reduction it dies in.
    pub step: i64,
}

impl std::str::FromStr for Kill {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (whose, step) = text
            .split_once('@')
            .ok_or("write it as REPLICA@STEP or REPLICA/RANK@STEP, for example 1@20 or 1/0@20")?;
        let (replica, rank) = whose.split_once('/').unwrap_or((whose, "0"));
        let replica = replica
            .parse()
            .map_err(|_| format!("'{replica}' is not a replica number"))?;
        let rank = rank
            .parse()
            .map_err(|_| format!("'{rank}' is not a rank of a replica"))?;
        let step = step.parse().map_err(|_| format!("'{step}' is not a step"))?;
        if step < 1 {
            Err("the first step that can be killed in is 1".into())
        } else {
            Ok(Self { replica, rank, step })
        }
    }
}

/// Options of the run as a whole, the same for both programs.
#[derive(Debug, Clone, clap::Args)]
pub struct RunArgs {
    /// Replica groups to start on this machine.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub replicas: u32,
    /// Processes of each replica: its ranks share each batch. The batch is a multiple of it.
    #[arg(long, value_name = "M", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub ranks_per_replica: u32,
    /// Kill this rank inside the reduction of this step, as REPLICA@STEP or REPLICA/RANK@STEP; default: the last one, in the middle.
    #[arg(long, conflicts_with = "no_kill")]
    pub kill: Option<Kill>,
    /// Kill no replica.
    #[arg(long)]
    pub no_kill: bool,
    /// Write the report as JSON to this file, or to standard output for '-'.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Folder for logs, the loss curve (SVG, PNG) and the report; default: target/PROGRAM.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Give up after so many seconds.
    #[arg(long, default_value_t = 900)]
    pub time_limit_s: u64,
    /// A replica whose process stands still, or whose machine is gone, is taken for dead by the lighthouse after so many milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 5000, value_parser = clap::value_parser!(u64).range(1..))]
    pub heartbeat_timeout_ms: u64,
    /// The run fails if the others stand still for more milliseconds than these when the planned kill comes.
    #[arg(long, value_name = "MS", env = "OXCCL_STALL_LIMIT_MS", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..))]
    pub stall_limit_ms: u64,
    /// Tell in the report how fast steps were committed, as a run with --chaos does.
    #[arg(long)]
    pub cost: bool,
    /// Random kills and stops.
    #[command(flatten)]
    pub chaos: ChaosArgs,
}

/// Where a replica's servers listen, and the collectives' backend; the same for both programs.
#[derive(Debug, Clone, clap::Args)]
pub struct NetArgs {
    /// Backend of the collectives, by its registered name or a plugin's; default: the device's (gloo on cpu, xccl on xpu). One
    /// that cannot be aborted (xccl) runs in a child process of each replica. Also one for each device kind (cpu:gloo,cuda:nccl), and
    /// messages:gloo behind either, where tags are wanted that the library does not have.
    #[arg(long, value_name = "NAME")]
    pub backend: Option<String>,
    /// An option of the backend's groups, such as min_ctas=4 or connections=2; may be repeated. It comes before the variable
    /// `OXCCL_<BACKEND>_<OPTION>`; `oxccl backends` lists what a backend honours, lenient=1 drops the rest.
    #[arg(long = "option", value_name = "NAME=VALUE", value_parser = option_text)]
    pub options: Vec<(String, String)>,
    /// Device kind that the all-reduces run on: cpu, xpu, cuda or a plugin's. Replicas take turns on the devices of their
    /// machine. The model itself is computed on the host.
    #[arg(long, value_name = "KIND", default_value = "cpu")]
    pub device: DeviceKind,
    /// All-reduce in this format instead of f32: int8, int4, fp8, or another one of docs/quantisation.md.
    #[arg(long, value_name = "FORMAT")]
    pub quantize: Option<Codec>,
    /// Keep what the format rounds away and add it in the next round. Always so with int2, which needs it.
    #[arg(long, requires = "quantize")]
    pub error_feedback: bool,
    /// Address for this replica's servers; port 0 picks free ones. Use 0.0.0.0:0 across machines, with OXCCL_CREDENTIALS (or OXCCL_INSECURE=1).
    #[arg(long, default_value = "127.0.0.1:0")]
    pub bind: String,
    /// Name or address by which the other machines reach this one; default: the address in --bind, or with 0.0.0.0 the one from which it reaches the lighthouse.
    #[arg(long)]
    pub advertise: Option<String>,
    /// How long a reduction, connecting to the others or taking a state over may take, in milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 60_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub timeout_ms: u64,
    /// How a replica that heals as a member gets its state: http, or group (over the collectives' own connections). One that is far behind fetches it
    /// over HTTP before it is a member. The same on all machines.
    #[arg(long, value_name = "WAY", default_value_t = HealOver::Http)]
    pub heal_over: HealOver,
    /// A rank that makes no progress for so many milliseconds takes its replica out, so that the others go on. Longer than --timeout-ms.
    #[arg(long, value_name = "MS", default_value_t = 120_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub progress_timeout_ms: u64,
}

impl NetArgs {
    /// For one collective, one connect, one transfer of state.
    pub fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms)
    }

    /// How long a rank may make no progress.
    pub fn progress_timeout(&self) -> Duration {
        Duration::from_millis(self.progress_timeout_ms)
    }

    /// The options of the backend's groups. A backend that tells other hosts an address (hint `host`) tells them that of `--advertise`, unless its
    /// own variable or option says another.
    ///
    /// Errors: a value that the option of that name does not have.
    pub fn group_options(&self) -> ftcore::Result<GroupOptions> {
        let mut options = GroupOptions::from_texts(&self.options)?;
        if let Some(host) = self.advertise.as_ref().filter(|_| self.tells_a_host()) {
            options.hints.entry("host".into()).or_insert_with(|| host.clone());
        }
        Ok(options)
    }

    /// True if all backends know the hint `host`, and none has it from its environment.
    fn tells_a_host(&self) -> bool {
        let home = Device::new(self.device.clone(), 0);
        let spec = self.backend.as_deref().unwrap_or_default().parse::<BackendSpec>();
        let Ok(backends) = spec.and_then(|spec| spec.backends(&home)) else {
            return false;
        };
        backends.into_iter().all(|(device, name)| {
            let set = |variable: String| std::env::var_os(variable).is_some_and(|v| !v.is_empty());
            oxccl::backend::find(Some(&name), &device).is_ok_and(|backend| {
                backend
                    .factory
                    .capabilities()
                    .options
                    .iter()
                    .any(|o| o == "hint:host")
                    && !set(format!("{}HOST", variable_prefix(&backend.name)))
            })
        })
    }

    /// Before anything is started: that the backends exist and honour the options.
    ///
    /// Errors: those of [`oxccl::backend::find`] for a name that no backend has on any device, and of
    /// [`Backend::resolve`](ftcore::registry::Backend::resolve).
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        let home = Device::new(self.device.clone(), 0);
        let spec: BackendSpec = self.backend.as_deref().unwrap_or_default().parse()?;
        let options = self.group_options()?;
        if let Some(name) = spec.messages() {
            oxccl::backend::find(Some(name), &Device::CPU)?;
        }
        for (device, name) in spec.backends(&home)? {
            let found = oxccl::backend::find(Some(&name), &device);
            // One of another device may serve this one through the host.
            let elsewhere = Registry::global().get(&name, Some(&DeviceKind::Cpu));
            let backend = found.or_else(|e| elsewhere.map_err(|_| e))?;
            if self.options.is_empty() {
                continue;
            }
            let dropped = backend.resolve(&options)?.dropped;
            if !dropped.is_empty() {
                note!(
                    "backend {} does not honour these options, which are dropped: {}",
                    backend.name,
                    dropped.join(", ")
                );
            }
        }
        Ok(())
    }

    /// How the group quantises, if it does.
    pub fn quantisation(&self, timeout: Duration) -> Option<QuantizeOptions> {
        self.quantize.map(|codec| QuantizeOptions {
            codec: codec.into(),
            error_feedback: self.error_feedback || codec == Codec::Int2B64,
            timeout,
            ..QuantizeOptions::default()
        })
    }

    /// What of this decides what is computed, for checkpoints.
    pub(crate) fn trajectory(&self) -> Vec<String> {
        let format = self.quantize.map(|codec| format!("--quantize {codec}"));
        let feedback = self.error_feedback.then(|| "--error-feedback".to_owned());
        format.into_iter().chain(feedback).collect()
    }

    pub(crate) fn to_args(&self) -> Vec<String> {
        let mut args = vec![
            "--device".into(),
            self.device.name().to_owned(),
            "--bind".into(),
            self.bind.clone(),
            "--timeout-ms".into(),
            self.timeout_ms.to_string(),
            "--progress-timeout-ms".into(),
            self.progress_timeout_ms.to_string(),
            "--heal-over".into(),
            self.heal_over.to_string(),
        ];
        if let Some(name) = &self.backend {
            args.extend(["--backend".into(), name.clone()]);
        }
        for (name, text) in &self.options {
            args.extend(["--option".into(), format!("{name}={text}")]);
        }
        if let Some(codec) = self.quantize {
            args.extend(["--quantize".into(), codec.to_string()]);
        }
        if self.error_feedback {
            args.push("--error-feedback".into());
        }
        if let Some(host) = &self.advertise {
            args.extend(["--advertise".into(), host.clone()]);
        }
        args
    }
}

/// A run of one program.
pub struct Run {
    /// The program's name.
    pub program: &'static str,
    /// All arguments after `replica` for each replica.
    pub replica_args: Vec<String>,
    /// Steps that the run commits.
    pub steps: i64,
    /// Inner steps that an undisturbed replica makes.
    pub inner_steps: u64,
    /// Parameters of the model.
    pub parameters: usize,
    /// The seed.
    pub seed: u64,
}

/// Runs the lighthouse of a driver's run until it is killed with its parent.
pub fn lighthouse(
    bind: &str,
    state_file: &Path,
    replicas: usize,
    heartbeat_timeout_ms: u64,
) -> anyhow::Result<()> {
    let server = LighthouseServer::start(LighthouseConfig {
        bind: bind.to_string(),
        min_replicas: 1,
        initial_replicas: Some(replicas),
        join_timeout: Duration::from_secs(60),
        heartbeat_timeout: Duration::from_millis(heartbeat_timeout_ms),
        state_file: Some(state_file.to_path_buf()),
        ..LighthouseConfig::default()
    })?;
    announce_lighthouse(&server.address(), deadline_in(Duration::from_secs(5)))?;
    loop {
        std::thread::park();
    }
}

fn out_folder(args: &RunArgs, program: &str) -> anyhow::Result<PathBuf> {
    let out = args
        .out
        .clone()
        .unwrap_or_else(|| Path::new("target").join(program));
    std::fs::create_dir_all(&out).with_context(|| format!("cannot make the folder {}", out.display()))?;
    out.canonicalize()
        .with_context(|| format!("cannot open the folder {}", out.display()))
}

fn planned_kill(args: &RunArgs, run: &Run) -> anyhow::Result<Option<Kill>> {
    if args.no_kill || args.chaos.chaos.is_some() {
        return Ok(None);
    }
    if args.replicas < 2 {
        ensure!(
            args.kill.is_none(),
            "--kill needs a second replica that survives; use --replicas 2 or more"
        );
        note!("one replica only: none could heal it, so none is killed");
        return Ok(None);
    }
    if run.steps < 2 {
        ensure!(
            args.kill.is_none(),
            "--kill needs a step after it in which the replica comes back; let the run have 2 steps or more"
        );
        note!("one step only: a replica could not come back, so none is killed");
        return Ok(None);
    }
    let kill = args.kill.unwrap_or(Kill {
        replica: args.replicas - 1,
        rank: args.ranks_per_replica - 1,
        step: run.steps / 2 + 1,
    });
    if kill.replica >= args.replicas {
        bail!(
            "--kill names replica {}; there are replicas 0 to {}",
            kill.replica,
            args.replicas - 1
        );
    }
    if kill.rank >= args.ranks_per_replica {
        bail!(
            "--kill names rank {} of replica {}; it has ranks 0 to {}",
            kill.rank,
            kill.replica,
            args.ranks_per_replica - 1
        );
    }
    // A replica that dies in the last step could come back when all others have left.
    if kill.step >= run.steps {
        bail!(
            "--kill names step {}; choose one from 1 to {}",
            kill.step,
            run.steps - 1
        );
    }
    Ok(Some(kill))
}

/// Starts, watches, kills, reports. The exit code is 0 only if the report has no problem.
pub fn drive(args: &RunArgs, run: &Run) -> anyhow::Result<ExitCode> {
    let kill = planned_kill(args, run)?;
    let out = out_folder(args, run.program)?;
    let program = std::env::current_exe().context("cannot find this program's own path")?;
    let (replicas, ranks) = (args.replicas, args.ranks_per_replica);
    let heartbeat_timeout_ms = args.heartbeat_timeout_ms.to_string();
    let lighthouse = {
        let program = program.clone();
        LighthouseSource::Spawn {
            bind: "127.0.0.1:0".into(),
            command: Box::new(move |launch: &LighthouseLaunch| {
                let mut command = Command::new(&program);
                command
                    .arg("lighthouse")
                    .arg("--bind")
                    .arg(&launch.bind)
                    .arg("--state-file")
                    .arg(&launch.state_file);
                command.arg("--replicas").arg(replicas.to_string());
                command.args(["--heartbeat-timeout-ms", &heartbeat_timeout_ms]);
                command
            }),
        }
    };
    let mut config = SupervisorConfig::new(replicas, lighthouse, &out);
    config.stop_on_signals = true;
    config.ranks_per_replica = ranks;
    config.restart.backoff = Duration::from_millis(100);
    let mut campaign = Campaign::new(&args.chaos, run.steps);
    if campaign.is_some() {
        // Who is killed on purpose is not at fault, however often.
        config.restart.max_restarts = u32::MAX;
        config.restart.backoff = Duration::from_millis(20);
        config.restart.backoff_max = Duration::from_millis(200);
    }
    config.deadline = Some(deadline_in(Duration::from_secs(args.time_limit_s)));
    let replica_args = run.replica_args.clone();
    let verdicts = oxccl::plugin::verdicts_for_job();
    let command = move |launch: &ReplicaLaunch| {
        let mut command = Command::new(&program);
        command.arg("replica").args(&replica_args).envs(verdicts.clone());
        if let Some(k) =
            kill.filter(|k| (k.replica, k.rank) == (launch.replica, launch.rank) && launch.incarnation == 0)
        {
            command.env(ENV_HOLD, k.step.to_string());
        }
        command
    };
    let of_ranks = match ranks {
        1 => String::new(),
        _ => format!(" of {ranks} ranks"),
    };
    note!(
        "{}: {replicas} replicas{of_ranks}, {} parameters, {} steps; logs in {}",
        run.program,
        run.parameters,
        run.steps,
        out.display()
    );
    let (supervisor, mut stream) = Supervisor::start(config, command, deadline_in(Duration::from_secs(30)))?;
    let mut progress = Progress::new(run.inner_steps).with_ranks(ranks);
    let mut events = Vec::new();
    let end = Instant::now() + Duration::from_secs(args.time_limit_s + 30);
    while !stream.is_over() && Instant::now() < end {
        if let Some(campaign) = &mut campaign {
            campaign.act(&supervisor);
        }
        let due = campaign.as_ref().and_then(Campaign::next_due);
        let Some(event) = stream.next_until(due.map_or(end, |due| due.min(end))) else {
            continue;
        };
        if let (Some(kill), SupervisorEvent::Replica(e)) = (kill, &event) {
            let inside =
                matches!(e.kind, EventKind::ReduceBegin { step, .. } if i64::try_from(step) == Ok(kill.step));
            if inside && (e.replica, e.rank, e.incarnation) == (kill.replica, kill.rank, 0) {
                // It may have died by itself in this very moment; the report will say so.
                if let Err(error) = supervisor.signal(kill.replica, kill.rank, Some(0), ProcessSignal::Kill) {
                    tracing::warn!(%error, "the planned kill came too late");
                }
            }
        }
        if let Some(campaign) = &mut campaign {
            campaign.on_event(&event, Instant::now());
        }
        progress.on_event(&event);
        // Nothing is made of these, and a long run has many.
        let is_kept =
            !matches!(&event, SupervisorEvent::Replica(e) if matches!(e.kind, EventKind::ReduceBegin { .. }));
        if is_kept {
            events.push(event);
        }
    }
    progress.finish();
    let facts = RunFacts {
        program: run.program.to_string(),
        replicas,
        ranks,
        parameters: run.parameters as u64,
        gradient_bytes: 4 * run.parameters as u64,
        seed: run.seed,
        stall_limit_ms: kill.map(|_| args.stall_limit_ms as f64),
    };
    let mut report = Report::new(&facts, &events);
    if args.cost || campaign.is_some() {
        let (seed, done) = match campaign.map(Campaign::finish) {
            Some((seed, done)) => (Some(seed), done),
            None => (None, Vec::new()),
        };
        report.cost = Some(Cost::new(seed, done, &events));
    }
    let pictures = Picture::from_run(&events, &report).write(&out, "loss")?;
    let json = serde_json::to_string_pretty(&report)?;
    std::fs::write(out.join("report.json"), &json).context("cannot write report.json")?;
    match args.json.as_deref() {
        Some(path) if path == Path::new("-") => print(&format!("{json}\n"))?,
        Some(path) => {
            std::fs::write(path, &json).with_context(|| format!("cannot write {}", path.display()))?;
            print(&format!("{report}\n"))?;
        }
        None => print(&format!("{report}\n"))?,
    }
    for picture in &pictures {
        note!("loss curve: {}", picture.display());
    }
    Ok(if report.ok {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Errors for people on standard error, log lines as `OXCCL_LOG` asks for; 1 for a failed run, 2 for a bad call.
pub fn main_with(result: impl FnOnce() -> anyhow::Result<ExitCode>) -> ExitCode {
    let filter = tracing_subscriber::EnvFilter::try_from_env("OXCCL_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    let is_plain = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        // A replica's standard error is a file.
        .with_ansi(!is_plain && std::io::stderr().is_terminal())
        .with_env_filter(filter)
        .init();
    match result() {
        Ok(code) => code,
        Err(error) => {
            note!("error: {error:#}");
            let wrong = error.downcast_ref::<ftcore::Error>().is_none_or(|e| {
                matches!(
                    e.kind(),
                    ErrorKind::InvalidArgument | ErrorKind::NotFound | ErrorKind::Unsupported
                )
            });
            ExitCode::from(if wrong { 2 } else { 1 })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kills_are_written_as_replica_at_step() {
        for (text, rank) in [("1@20", 0), ("1/0@20", 0), ("1/3@20", 3)] {
            let kill = Kill {
                replica: 1,
                rank,
                step: 20,
            };
            assert_eq!(text.parse::<Kill>(), Ok(kill));
        }
        for bad in ["1", "a@2", "1@x", "1@0", "1/@2", "1/x@2"] {
            assert!(bad.parse::<Kill>().is_err(), "{bad}");
        }
    }
}
