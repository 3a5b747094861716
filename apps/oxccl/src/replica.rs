//! `oxccl replica`: an operator's orders to a replica of a running job.

use std::time::Duration;

use oxccl::coordination::{LighthouseClient, Order, OrderKind};
use oxccl::core::{Result, deadline_in};

use super::ExitCode;

const EXAMPLES: &str = "\
Examples:
  Take a replica out of a job without costing the others a step:
    oxccl replica drain replica1 --reason 'its host is repaired'

  One that does not answer is out now; it takes part again once it is started again:
    oxccl replica evict replica1

The lighthouse's page names the replicas (http://host:29510/). A supervisor restarts a replica that was evicted or killed, and not
one that was drained. torchft's managers can be evicted only.
The exit codes are those of `oxccl --help`.";

/// Drain, evict or kill a replica of a running job.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    order: Orders,
}

#[derive(Debug, clap::Subcommand)]
enum Orders {
    /// It finishes its step and leaves in good order: its process ends with 0.
    Drain(Whom),
    /// It is out of the job now and refused until it is started again: its process ends with an error.
    Evict(Whom),
    /// The processes of all its ranks are killed.
    Kill(Whom),
}

#[derive(Debug, clap::Args)]
struct Whom {
    /// The name of the replica, or its id.
    #[arg(value_name = "REPLICA")]
    replica: String,
    /// The lighthouse of the job, as http://host:port.
    #[arg(
        long,
        env = "OXCCL_LIGHTHOUSE",
        default_value = "http://127.0.0.1:29510",
        value_name = "URL"
    )]
    lighthouse: String,
    /// Why; the replica and the others are told.
    #[arg(long, default_value = "", value_name = "TEXT", hide_default_value = true)]
    reason: String,
    /// How long the lighthouse may take.
    #[arg(long, default_value_t = 10, value_name = "S", value_parser = clap::value_parser!(u64).range(1..))]
    timeout_s: u64,
}

pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    let (kind, whom, told) = match arguments.order {
        Orders::Drain(whom) => (OrderKind::Drain, whom, "leaves after its step"),
        Orders::Evict(whom) => (OrderKind::Evict, whom, "is evicted"),
        Orders::Kill(whom) => (OrderKind::Kill, whom, "is told to end"),
    };
    let deadline = deadline_in(Duration::from_secs(whom.timeout_s));
    let client = LighthouseClient::connect(&whom.lighthouse, deadline)?;
    let order = Order {
        kind,
        reason: whom.reason,
    };
    for id in client.operate(&whom.replica, order, deadline)? {
        crate::results::write(&format!("{id} {told}\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}
