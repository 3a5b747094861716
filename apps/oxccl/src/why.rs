//! `oxccl why`: what a job waits for, on whom, since when, and what would free it; as
//! `LighthouseStatus::explain` says it of the lighthouse's status.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use oxccl::coordination::{LighthouseClient, Why};
use oxccl::core::{Credentials, Error, ErrorKind, Result, deadline_in};
use oxccl::identity::Party;

use super::ExitCode;

const EXAMPLES: &str = "\
Examples:
  oxccl why http://host:29510

  With the job's credentials, and three lighthouses of which one leads:
    oxccl why --credentials job1 https://hostA:29510,https://hostB:29510,https://hostC:29510

  For a script:
    oxccl why --json http://host:29510 | jq -r .frees

What goes on inside a step the lighthouse does not see: `oxccl trace` names the rank that the others wait for (docs/observability.md).

Exit codes:
  0    nothing is stuck
  1    the job waits
  3    no lighthouse answers
The others are those of `oxccl --help`.";

/// Say what a job waits for: what is stuck, on which replica, since when, and what would free it.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// The lighthouse of the job, as http://host:port; several, separated by commas.
    #[arg(
        env = "OXCCL_LIGHTHOUSE",
        value_name = "URL",
        default_value = "http://127.0.0.1:29510"
    )]
    lighthouse: String,
    /// The credentials of the job (`oxccl credentials new`).
    #[arg(long, env = "OXCCL_CREDENTIALS", value_name = "DIR")]
    credentials: Option<PathBuf>,
    /// As JSON.
    #[arg(long)]
    json: bool,
    /// How long the lighthouse may take.
    #[arg(long, default_value_t = 10, value_name = "S", value_parser = clap::value_parser!(u64).range(1..))]
    timeout_s: u64,
}

pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    let deadline = deadline_in(Duration::from_secs(arguments.timeout_s));
    let folder = arguments.credentials.filter(|dir| !dir.as_os_str().is_empty());
    let party = folder
        .map(|dir| Credentials::load(&dir).and_then(|c| Party::tool(&c)))
        .transpose()?;
    let status = LighthouseClient::connect_as(party, &arguments.lighthouse, deadline)
        .and_then(|client| client.status(deadline))
        .map_err(|e| no_answer(&arguments.lighthouse, e))?;
    let why = status.explain();
    match arguments.json {
        true => crate::results::json(&why, "the answer")?,
        false => crate::results::write(&format!("{}\n", screen(&why).trim_end()))?,
    }
    Ok(ExitCode::from(u8::from(why.stuck)))
}

/// What is there and does not answer, or not as a lighthouse does, is as little a word of the job as what is not there: the exit code for that a job
/// waits would be a lie.
fn no_answer(url: &str, e: Error) -> Error {
    match e.kind() {
        // Told apart by their exit codes already: wrong arguments, and no lighthouse.
        ErrorKind::InvalidArgument
        | ErrorKind::NotFound
        | ErrorKind::Unsupported
        | ErrorKind::Unavailable
        | ErrorKind::Conflict => e,
        _ => {
            let text = format!("no lighthouse answers at {url}: {}", e.message());
            Error::new(ErrorKind::Unavailable, text).with_source(e)
        }
    }
}

fn screen(why: &Why) -> String {
    let mut text = format!("{}\n", why.text);
    if !why.frees.is_empty() {
        let _ = writeln!(text, "  what would free it: {}", why.frees);
    }
    for note in &why.notes {
        let _ = writeln!(text, "  {note}");
    }
    text
}
