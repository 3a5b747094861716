//! `cargo xtask`: what a developer and continuous integration run.
//!
//! `test` runs the matrix (rows in `matrix.rs`, execution in `runner.rs`), `tidy` checks the house rules, `deny` the
//! dependencies, `ci` all of it with formatting, lints and docs, `bench-peers` and `bench-lighthouse` compare our speed with others', `chaos` disturbs a training run, `faults` takes cures out, `book` builds the documentation, `deploy` checks the jobs ready to use. Every child
//! process has a time limit (`process.rs`).

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use clap::{Args, CommandFactory as _, Parser, Subcommand};

mod book;
mod chaos;
mod ci;
mod debian;
mod delays;
mod deny;
mod deploy;
mod etcd;
mod faults;
mod launchers;
mod libtest;
mod lighthouse;
mod locks;
mod matrix;
mod metadata;
mod nccl;
mod nvrtc;
mod observability;
mod oneccl;
mod oneccl_sycl;
mod peers;
mod process;
mod progress;
mod python;
mod runner;
mod tidy;
mod torchft;
mod venv;
mod wheel;
mod wheels;
mod workers;

/// Project tasks of oxccl.
#[derive(Parser)]
#[command(
    name = "cargo xtask",
    version,
    after_help = "Exit codes: 0 all checks passed, 1 a check failed, 2 bad usage or the task could not run.\n\n\
Examples:\n  cargo xtask test --list\n  cargo xtask test --row gloo-tcp-threads\n  cargo xtask test --require gloo\n  \
cargo xtask tidy --lessons\n  cargo xtask bench-peers --ranks 2 --only mpich\n  cargo xtask ci"
)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run the test matrix; the last line is `matrix: N passed, N failed, N skipped`.
    Test(TestArgs),
    /// Check the rules of the house: stairs, names, unsafe, threads, environment variables, lesson tests.
    Tidy(TidyArgs),
    /// Check licences, banned crates and sources of all dependencies (and advisories where the database is reachable).
    Deny,
    /// Check that the lock file of every workspace in the tree fits its manifests.
    Locks,
    /// Measure our collectives against MPICH, Open MPI and PyTorch's Gloo here and now, and print the ratios.
    BenchPeers(Box<peers::Arguments>),
    /// Measure the time of a step at our lighthouse and, with --peer, at torchft's, with many replicas from one process.
    BenchLighthouse(lighthouse::Arguments),
    /// Train under random kills and stops of ranks and of the lighthouse, and compare with the same training undisturbed.
    Chaos(chaos::Arguments),
    /// Take each cure out of a copy of the protocol, and tell which seed of a simulation finds the fault again.
    Faults(faults::Arguments),
    /// Fetch and build the CPU-only oneCCL that the xccl rows test against, and print how to use it.
    Oneccl {
        /// Instead, the SYCL build with the runtimes that let a CPU stand in for an Intel GPU (650 MB).
        #[arg(long)]
        sycl: bool,
    },
    /// Fetch the NCCL that the row `nccl-library` opens and asks for its version, and print how to use it.
    Nccl,
    /// Fetch the torchft that the row `torchft` tests the wire against, and print how to use it.
    Torchft,
    /// Build the documentation as a site (mdBook) and print where it is.
    Book,
    /// Check the jobs ready to use in deploy/: Kubernetes' schemas, the shell's reader.
    Deploy,
    /// Build the Python package's wheel for manylinux on x86-64, install it into a new environment and try it there.
    Wheel,
    /// Run everything that continuous integration runs, and print a table of the steps.
    Ci,
}

/// Options of `cargo xtask test`.
#[derive(Args, Clone, Default)]
pub(crate) struct TestArgs {
    /// Run only this row (repeatable).
    #[arg(long = "row", value_name = "NAME")]
    pub(crate) rows: Vec<String>,
    /// Backends that must be tested here: their skipped rows count as failed.
    #[arg(long, value_name = "BACKEND,…", value_delimiter = ',')]
    pub(crate) require: Vec<String>,
    /// Backends that must be tested where what they need can be installed: a skip for any other reason counts as failed.
    #[arg(long, value_name = "BACKEND,…", value_delimiter = ',')]
    pub(crate) require_installable: Vec<String>,
    /// Run the ignored (long) tests too, with four times the time limits.
    #[arg(long)]
    pub(crate) long: bool,
    /// Run so many rows at once: most wait more than they compute, those that do not count for two, and rows that measure run alone. Unless
    /// it is said, two per core and up to 8; one with `--long`, whose campaigns tell figures.
    #[arg(long, value_name = "N")]
    pub(crate) at_once: Option<u8>,
    /// Run the tests with random naps where threads and processes meet, with four times the time limits: finds orders of events that a test
    /// took for granted. The seed varies the naps; a harshness above 1 makes them longer. Needs a C compiler.
    #[arg(long, value_name = "SEED[,HARSHNESS]")]
    pub(crate) delays: Option<delays::Wish>,
    /// Print the rows and whether each can run here; run nothing.
    #[arg(long)]
    pub(crate) list: bool,
}

#[derive(Args)]
struct TidyArgs {
    /// Print which lessons have a regression test, and where; check nothing else.
    #[arg(long)]
    lessons: bool,
    /// Print how many lines of source each crate has (no tests, fixtures and examples); check nothing else.
    #[arg(long, conflicts_with = "lessons")]
    lines: bool,
    /// Check only the words of sources and documentation for which there is a term of the field.
    #[arg(long, conflicts_with_all = ["lessons", "lines"])]
    words: bool,
}

/// What `cargo xtask` can be called with.
pub(crate) fn grammar() -> clap::Command {
    Cli::command().bin_name("cargo xtask")
}

fn run(cli: Cli) -> Result<bool> {
    match cli.task {
        Task::Test(args) => runner::test(&args),
        Task::Tidy(args) if args.lessons => tidy::print_lessons(),
        Task::Tidy(args) if args.lines => tidy::print_lines(),
        Task::Tidy(args) if args.words => tidy::check_words(),
        Task::Tidy(_) => tidy::check(),
        Task::Deny => deny::check(),
        Task::Locks => locks::check(),
        Task::BenchPeers(args) => peers::run(*args),
        Task::BenchLighthouse(args) => lighthouse::run(&args),
        Task::Chaos(args) => chaos::run(&args),
        Task::Faults(args) => faults::run(&args),
        Task::Oneccl { sycl: false } => ready(
            &format!("oneCCL {} (CPU only)", oneccl::VERSION),
            matrix::oneccl(),
        ),
        Task::Oneccl { sycl: true } => {
            let what = format!("oneCCL {} on SYCL's CPU device", oneccl_sycl::VERSION);
            ready(&what, matrix::oneccl_sycl())
        }
        Task::Nccl => ready(&format!("NCCL {}", nccl::VERSION), matrix::nccl_library()),
        Task::Torchft => ready(&format!("torchft {}", torchft::VERSION), matrix::torchft()),
        Task::Book => book::build(),
        Task::Deploy => deploy::check(),
        Task::Wheel => wheel::run(),
        Task::Ci => ci::run(),
    }
}

/// Says how to use what a row of the matrix needs, once it is there.
fn ready(what: &str, needs: Result<matrix::Environment, matrix::Skip>) -> Result<bool> {
    let environment = needs?;
    println!("{what} is ready. To use it:");
    for (name, value) in environment {
        println!("export {name}={value}");
    }
    Ok(true)
}

/// What a shell shows of a program that a broken pipe has ended.
const BROKEN_PIPE: u8 = 128 + 13;

/// `println!` panics once the reader is gone: as in `cargo xtask test | head`. The panic unwinds, which ends the processes that were started, and is not
/// shown, nor is any that comes of it.
fn end_quietly_without_a_reader() -> Arc<AtomicBool> {
    let unread = Arc::new(AtomicBool::new(false));
    let (seen, show) = (unread.clone(), std::panic::take_hook());
    std::panic::set_hook(Box::new(move |panic| {
        let text = panic.payload_as_str().unwrap_or_default();
        if text.starts_with("failed printing to") && text.contains("os error 32") {
            seen.store(true, Ordering::Relaxed);
        }
        if !seen.load(Ordering::Relaxed) {
            show(panic);
        }
    }));
    unread
}

fn main() -> ExitCode {
    let unread = end_quietly_without_a_reader();
    match std::panic::catch_unwind(|| run(Cli::parse())) {
        Ok(Ok(true)) => ExitCode::SUCCESS,
        Ok(Ok(false)) => ExitCode::FAILURE,
        Ok(Err(e)) => {
            eprintln!("xtask: {e:#}");
            ExitCode::from(2)
        }
        Err(_) if unread.load(Ordering::Relaxed) => ExitCode::from(BROKEN_PIPE),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}
