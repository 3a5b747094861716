//! Fault-tolerant Streaming DiLoCo on real text: trains, kills a replica, heals it, reports.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use oxccl_examples::diloco_replica::{DilocoArgs, run};
use oxccl_examples::drive::{NetArgs, Run, RunArgs, drive, lighthouse, main_with};

/// Fault-tolerant Streaming DiLoCo on real text: trains, kills a replica, heals it, reports.
#[derive(Parser)]
#[command(
    version,
    args_conflicts_with_subcommands = true,
    after_help = "Examples:
  train_diloco                      the whole show in about two minutes
  train_diloco --replicas 3 --kill 0@10
  train_diloco --no-kill --data book.txt --rounds 80
  oxccl launch --lighthouse http://HOST:29510 --total-replicas 2 --first-replica 0 -- train_diloco replica

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
    train: DilocoArgs,
    #[command(flatten)]
    net: NetArgs,
}

#[derive(Subcommand)]
enum Part {
    /// One replica; its place comes from the environment that the launcher sets.
    Replica {
        #[command(flatten)]
        train: DilocoArgs,
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
                program: "train_diloco",
                replica_args: args.train.to_args(),
                steps: args.train.rounds,
                inner_steps: args.train.inner_steps(),
                parameters,
                seed: args.train.seed,
            };
            drive(&args.run, &args.net, &run)
        }
    })
}
