//! Fault-tolerant data parallel on the 8x8 digits: trains, kills a replica, heals it, reports.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use oxccl_examples::ddp_replica::{DdpArgs, run};
use oxccl_examples::drive::{NetArgs, Run, RunArgs, drive, lighthouse, main_with};

/// Fault-tolerant data parallel on the 8x8 digits: trains, kills a replica, heals it, reports.
#[derive(Parser)]
#[command(
    version,
    args_conflicts_with_subcommands = true,
    after_help = "Examples:
  train_ddp
  train_ddp --replicas 3 --kill 0@100
  oxccl launch --lighthouse http://HOST:29510 --total-replicas 2 --first-replica 0 -- train_ddp replica

Exit codes: 0 the report has no problem, 1 the run failed or the report has problems, 2 the call was wrong."
)]
struct Cli {
    #[command(flatten)]
    whole: Whole,
    #[command(subcommand)]
    part: Option<Part>,
}

#[derive(Args)]
struct Whole {
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    train: DdpArgs,
    #[command(flatten)]
    net: NetArgs,
}

#[derive(Subcommand)]
enum Part {
    /// One replica; its place comes from the environment that the launcher sets.
    Replica {
        #[command(flatten)]
        train: DdpArgs,
        #[command(flatten)]
        net: NetArgs,
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
    },
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    main_with(|| match cli.part {
        Some(Part::Replica { train, net }) => {
            run(&train, &net.backend, &net.bind, net.advertise.as_deref())?;
            Ok(ExitCode::SUCCESS)
        }
        Some(Part::Lighthouse {
            bind,
            state_file,
            replicas,
        }) => {
            lighthouse(&bind, &state_file, replicas)?;
            Ok(ExitCode::SUCCESS)
        }
        None => {
            let args = cli.whole;
            let parameters = args.train.check(args.run.replicas as usize)?;
            let run = Run {
                program: "train_ddp",
                replica_args: args.train.to_args(),
                steps: args.train.steps,
                inner_steps: args.train.steps.unsigned_abs(),
                parameters,
                seed: args.train.seed,
            };
            drive(&args.run, &args.net, &run)
        }
    })
}
