//! The command line that both training programs share: the whole run, one replica of it, or its lighthouse.
//!
//! A program is a [`Training`]: its arguments and what a replica does with them. Everything else is here and in
//! [`drive`](crate::drive).

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use ftcore::Result;

use crate::drive::{NetArgs, Run, RunArgs, drive, lighthouse, main_with, note};
use crate::resume::CheckpointArgs;

/// What a program trains, as its command-line arguments say.
pub trait Training: Args + Clone {
    /// The program's name.
    const PROGRAM: &'static str;
    /// One sentence for `--help`.
    const ABOUT: &'static str;
    /// Examples for `--help`, a line each.
    const EXAMPLES: &'static str;

    /// The same arguments on a command line, for the replicas.
    fn to_args(&self) -> Vec<String>;
    /// The options that decide what is computed, each as one line: a run goes on only from checkpoints with the same ones.
    fn trajectory(&self) -> Result<Vec<String>>;
    /// The program, [`trajectory`](Self::trajectory), and what `net` and the ranks of a replica add to it, as it stands in a checkpoint.
    fn identity(&self, net: &NetArgs, ranks: u32) -> Result<String> {
        let mut lines = vec![Self::PROGRAM.to_owned()];
        lines.extend(self.trajectory()?);
        lines.extend(net.trajectory());
        if ranks > 1 {
            // The mean of a batch is added up in another order.
            lines.push(format!("--ranks-per-replica {ranks}"));
        }
        Ok(lines.join("\n"))
    }
    /// Checks everything that can be checked before processes are started, and returns the model's parameter count.
    fn check(&self, replicas: usize, ranks: usize) -> Result<usize>;
    /// Steps that the run commits.
    fn steps(&self) -> i64;
    /// Inner steps that an undisturbed replica makes.
    fn inner_steps(&self) -> u64;
    /// The seed.
    fn seed(&self) -> u64;
    /// Runs one rank of a replica to the end. Its place comes from the environment that `oxccl launch` sets.
    fn replica(&self, net: &NetArgs, checkpoints: &CheckpointArgs) -> Result<()>;
}

#[derive(Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
struct Cli<T: Training> {
    #[command(flatten)]
    whole: Whole<T>,
    #[command(subcommand)]
    part: Option<Part<T>>,
}

#[derive(Args)]
struct Whole<T: Training> {
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    train: T,
    #[command(flatten)]
    net: NetArgs,
    #[command(flatten)]
    checkpoints: CheckpointArgs,
}

#[derive(Subcommand)]
enum Part<T: Training> {
    /// One rank of a replica; its place comes from the environment that the launcher sets.
    Replica {
        #[command(flatten)]
        train: T,
        #[command(flatten)]
        net: NetArgs,
        #[command(flatten)]
        checkpoints: CheckpointArgs,
    },
    /// The lighthouse of a run on this machine (used by the program itself).
    #[command(hide = true)]
    Lighthouse {
        #[arg(long)]
        bind: String,
        #[arg(long)]
        state_file: PathBuf,
        #[arg(long)]
        replicas: usize,
        #[arg(long)]
        heartbeat_timeout_ms: u64,
    },
}

/// What a program can be called with.
pub fn grammar<T: Training>() -> clap::Command {
    Cli::<T>::command().name(T::PROGRAM).about(T::ABOUT).after_help(format!(
        "Examples:\n{}\n\nExit codes: 0 the report has no problem, 1 the run failed or the report has problems, 2 the call \
         was wrong.",
        T::EXAMPLES
    ))
}

/// The `main` of a program.
pub fn main<T: Training>() -> ExitCode {
    // A child of an isolated group is this program too.
    oxccl::backend::init();
    // A checkpoint beyond the limit on the size of files shall be an error of the write, not the end of the process.
    let beyond_limit = std::sync::Arc::default();
    if let Err(error) = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, beyond_limit) {
        note!("warning: SIGXFSZ cannot be caught: {error}");
    }
    let cli = match Cli::<T>::from_arg_matches(&grammar::<T>().get_matches()) {
        Ok(cli) => cli,
        Err(error) => error.exit(),
    };
    main_with(|| match cli.part {
        Some(Part::Replica {
            train,
            net,
            checkpoints,
        }) => {
            // The one that starts the replicas passes the signal on.
            oxccl::flight_recorder::dump_on_signal()?;
            train.replica(&net, &checkpoints)?;
            Ok(ExitCode::SUCCESS)
        }
        Some(Part::Lighthouse {
            bind,
            state_file,
            replicas,
            heartbeat_timeout_ms,
        }) => {
            lighthouse(&bind, &state_file, replicas, heartbeat_timeout_ms)?;
            Ok(ExitCode::SUCCESS)
        }
        None => {
            let Whole {
                run,
                train,
                net,
                checkpoints,
            } = cli.whole;
            net.check()?;
            let parameters = train.check(run.replicas as usize, run.ranks_per_replica as usize)?;
            if let Some(line) =
                checkpoints.check(&train.identity(&net, run.ranks_per_replica)?, run.replicas)?
            {
                note!("{line}");
            }
            let mut replica_args = train.to_args();
            replica_args.extend(net.to_args());
            replica_args.extend(checkpoints.to_args());
            let facts = Run {
                program: T::PROGRAM,
                replica_args,
                steps: train.steps(),
                inner_steps: train.inner_steps(),
                parameters,
                seed: train.seed(),
            };
            drive(&run, &facts)
        }
    })
}
