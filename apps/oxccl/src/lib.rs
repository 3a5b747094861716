//! The `oxccl` command as a library, for programs that embed it: `lighthouse` runs the one service that a job needs, `launch` starts and supervises the replicas
//! of one machine, `replica` drains, evicts or kills one of them, `why` says what a job waits for, `trace` where its ranks differ, `credentials` closes a job to strangers, `backends` lists what can carry data here,
//! `bench` measures it, `plan` foresees what a job would do over given links, `new-plugin` writes a backend of one's own and `conformance` holds it to the suite. Results go to standard output, everything else to standard error.

use std::ffi::OsString;
use std::io::IsTerminal;
use std::process;
use std::sync::OnceLock;

use clap::{ColorChoice, CommandFactory, FromArgMatches, Parser, Subcommand};
use oxccl::core::{Error, ErrorKind, Result};
use tracing_subscriber::EnvFilter;

/// A line on standard error; see `results::say`.
macro_rules! say {
    ($($text:tt)*) => { crate::results::say(format_args!($($text)*)) };
}

mod backends;
mod bench;
#[cfg(feature = "conformance")]
mod conformance;
mod credentials;
mod launch;
mod lighthouse;
#[cfg(feature = "conformance")]
mod new_plugin;
mod plan;
mod rendezvous;
mod replica;
mod results;
mod scratch;
mod svg;
mod trace;
mod why;

/// What the process ends with. The standard library's cannot be read, which a program that embeds the command has to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ExitCode(u8);

impl ExitCode {
    pub(crate) const SUCCESS: Self = Self(0);
}

impl From<u8> for ExitCode {
    fn from(code: u8) -> Self {
        Self(code)
    }
}

/// How this command is started again.
static AGAIN: OnceLock<Vec<OsString>> = OnceLock::new();

/// This command once more, for a process of its own. Errors: `Io` if its file is not known.
fn again() -> Result<process::Command> {
    if let Some((program, arguments)) = AGAIN.get().and_then(|again| again.split_first()) {
        let mut command = process::Command::new(program);
        command.args(arguments);
        return Ok(command);
    }
    let this = std::env::current_exe().map_err(|e| Error::io("find this program's own file", e))?;
    Ok(process::Command::new(this))
}

const EXIT_CODES: &str = "\
Exit codes:
  0    everything went well
  1    the run failed (a replica or a rank gave up, the deadline passed, wrong results, an error)
  2    the command line is wrong, or asks for what is not there or not offered (program, backend, device, element type)
  3    a service or an address is not available (lighthouse not reachable, port in use, an address of another machine)
  130  interrupted

Environment:
  OXCCL_CREDENTIALS   the folder of the job's credentials (`oxccl credentials`): all servers and calls ask for and show them
  OXCCL_ENCRYPT       1: with credentials, data connections are encrypted
  OXCCL_INSECURE      1: servers without credentials may listen beyond loopback
  OXCCL_LOG   what is logged to standard error, such as `debug` or `oxccl=trace` (default: info; conformance: error)
  NO_COLOR    no colours
  OXCCL_FLIGHT_RECORDER      how many operations of each group are kept (512); 0: none
  OXCCL_FLIGHT_RECORDER_DIR  where a process writes them when a group fails (`oxccl trace`)
  OXCCL_DEFAULT_BACKEND   the backend of a device kind when none is named, such as `cpu:gloo,hpu:hccl`";

/// Fault-tolerant collectives and low-communication training.
#[derive(Debug, Parser)]
#[command(name = "oxccl", version, after_help = EXIT_CODES, max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Lighthouse(lighthouse::Arguments),
    Replica(replica::Arguments),
    Why(why::Arguments),
    Launch(launch::Arguments),
    Trace(trace::Arguments),
    Credentials(credentials::Arguments),
    Backends(backends::Arguments),
    #[command(hide = true)]
    BackendsProbe(backends::ProbeArguments),
    Bench(bench::Arguments),
    #[command(hide = true)]
    BenchRank(bench::RankArguments),
    #[command(hide = true)]
    BenchLimit(bench::LimitArguments),
    Plan(plan::Arguments),
    #[cfg(feature = "conformance")]
    NewPlugin(new_plugin::Arguments),
    #[cfg(feature = "conformance")]
    Conformance(conformance::Arguments),
    #[cfg(feature = "conformance")]
    #[command(hide = true)]
    ConformanceRank(conformance::RankArguments),
}

impl Command {
    /// What is logged by default.
    fn log(&self) -> &'static str {
        match self {
            // Groups are aborted and time out by the hundred there, as they should.
            #[cfg(feature = "conformance")]
            Self::Conformance(_) | Self::ConformanceRank(_) => "error",
            _ => "info",
        }
    }
}

/// What the command can be called with, for programs that complete or check command lines.
pub fn grammar() -> clap::Command {
    Arguments::command()
}

/// Runs the command with these arguments, the first of which is its name, and gives its exit code. `again` is the program and its first arguments that
/// start the command once more, for processes of its own; if it is empty, this program's file does. A process calls it once.
pub fn run(arguments: impl IntoIterator<Item = OsString>, again: Vec<OsString>) -> u8 {
    if !again.is_empty() {
        let _ = AGAIN.set(again);
    }
    let colour = std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
    let choice = if colour {
        ColorChoice::Auto
    } else {
        ColorChoice::Never
    };
    let parsed = Arguments::command()
        .color(choice)
        .try_get_matches_from(arguments)
        .and_then(|matches| Arguments::from_arg_matches(&matches));
    match parsed {
        Ok(arguments) => carry_out(arguments, colour).0,
        Err(e) => {
            // With no reader there is nothing to say.
            drop(e.print());
            u8::try_from(e.exit_code()).unwrap_or(2)
        }
    }
}

fn carry_out(arguments: Arguments, colour: bool) -> ExitCode {
    let filter =
        EnvFilter::try_from_env("OXCCL_LOG").unwrap_or_else(|_| EnvFilter::new(arguments.command.log()));
    // A program that embeds the command may log elsewhere.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .log_internal_errors(false)
        .with_ansi(colour && std::io::stderr().is_terminal())
        .try_init();
    // Before any plugin is opened.
    if let Err(e) = results::claim() {
        say!("error: {e}");
        return ExitCode::from(1);
    }
    let result = match arguments.command {
        Command::Lighthouse(arguments) => lighthouse::run(arguments),
        Command::Replica(arguments) => replica::run(arguments),
        Command::Why(arguments) => why::run(arguments),
        Command::Launch(arguments) => launch::run(arguments),
        Command::Trace(arguments) => trace::run(arguments),
        Command::Credentials(arguments) => credentials::run(arguments),
        Command::Backends(arguments) => backends::run(arguments),
        Command::BackendsProbe(arguments) => backends::probe(arguments),
        Command::Bench(arguments) => bench::run(arguments),
        Command::BenchRank(arguments) => bench::rank(arguments),
        Command::BenchLimit(arguments) => bench::limit(arguments),
        Command::Plan(arguments) => plan::run(arguments),
        #[cfg(feature = "conformance")]
        Command::NewPlugin(arguments) => new_plugin::run(arguments),
        #[cfg(feature = "conformance")]
        Command::Conformance(arguments) => conformance::run(arguments),
        #[cfg(feature = "conformance")]
        Command::ConformanceRank(arguments) => conformance::rank(arguments),
    };
    match result {
        Ok(code) => code,
        Err(e) => {
            say!("error: {e}\n  hint: {}", e.advice());
            exit_code(&e)
        }
    }
}

fn exit_code(e: &Error) -> ExitCode {
    ExitCode::from(match e.kind() {
        ErrorKind::InvalidArgument | ErrorKind::NotFound | ErrorKind::Unsupported => 2,
        ErrorKind::Unavailable | ErrorKind::Conflict => 3,
        _ => 1,
    })
}
