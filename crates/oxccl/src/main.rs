//! The `oxccl` command: `lighthouse` runs the one service that a job needs, `launch` starts and supervises the replicas
//! of one machine, `replica` drains, evicts or kills one of them, `credentials` closes a job to strangers, `backends` lists what can carry data here,
//! `bench` measures it. Results go to standard output, everything else to standard error.

use std::io::IsTerminal;
use std::process::ExitCode;

// Linked for its registration: `backends` and `bench` find it in the registry.
#[cfg(feature = "gloo")]
use backend_gloo as _;
#[cfg(feature = "nccl")]
use backend_nccl as _;
#[cfg(feature = "xccl")]
use backend_xccl as _;
use clap::{ColorChoice, CommandFactory, FromArgMatches, Parser, Subcommand};
use oxccl::core::{Error, ErrorKind};
use tracing_subscriber::EnvFilter;

/// A line on standard error. Unlike `eprintln!` it does not panic when nobody reads there any more: a lighthouse must not
/// die with the terminal or the pipe that it was started from.
macro_rules! say {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        drop(writeln!(std::io::stderr(), $($text)*));
    }};
}

mod results;

mod command {
    pub(crate) mod backends;
    pub(crate) mod bench;
    pub(crate) mod credentials;
    pub(crate) mod launch;
    #[cfg(feature = "lighthouse")]
    pub(crate) mod lighthouse;
    #[cfg(feature = "lighthouse")]
    pub(crate) mod replica;
    mod scratch;
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
  OXCCL_LOG   what is logged to standard error, such as `debug` or `oxccl=trace` (default: info)
  NO_COLOR    no colours
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
    #[cfg(feature = "lighthouse")]
    Lighthouse(command::lighthouse::Arguments),
    #[cfg(feature = "lighthouse")]
    Replica(command::replica::Arguments),
    Launch(command::launch::Arguments),
    Credentials(command::credentials::Arguments),
    Backends(command::backends::Arguments),
    #[command(hide = true)]
    BackendsProbe(command::backends::ProbeArguments),
    Bench(command::bench::Arguments),
    #[command(hide = true)]
    BenchRank(command::bench::RankArguments),
}

fn main() -> ExitCode {
    // A child of an isolated group is this program too.
    oxccl::backend::init();
    let colour = std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
    let choice = if colour {
        ColorChoice::Auto
    } else {
        ColorChoice::Never
    };
    let matches = Arguments::command().color(choice).get_matches();
    let arguments = match Arguments::from_arg_matches(&matches) {
        Ok(arguments) => arguments,
        Err(e) => e.exit(),
    };
    let filter = EnvFilter::try_from_env("OXCCL_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .log_internal_errors(false)
        .with_ansi(colour && std::io::stderr().is_terminal())
        .init();
    // Before any plugin is opened.
    if let Err(e) = results::claim() {
        say!("error: {e}");
        return ExitCode::from(1);
    }
    let result = match arguments.command {
        #[cfg(feature = "lighthouse")]
        Command::Lighthouse(arguments) => command::lighthouse::run(arguments),
        #[cfg(feature = "lighthouse")]
        Command::Replica(arguments) => command::replica::run(arguments),
        Command::Launch(arguments) => command::launch::run(arguments),
        Command::Credentials(arguments) => command::credentials::run(arguments),
        Command::Backends(arguments) => command::backends::run(arguments),
        Command::BackendsProbe(arguments) => command::backends::probe(arguments),
        Command::Bench(arguments) => command::bench::run(arguments),
        Command::BenchRank(arguments) => command::bench::rank(arguments),
    };
    match result {
        Ok(code) => code,
        Err(e) => {
            say!("error: {e}\n  hint: {}", e.kind().advice());
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
