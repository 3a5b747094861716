//! `oxccl credentials`: makes and shows the folders by which the processes of a job prove that they belong to it.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Subcommand;
use oxccl::core::{Error, Result};
use oxccl::identity;

const EXAMPLES: &str = "\
Examples:
  A new job, and a lighthouse that only its processes can talk to:
    oxccl credentials new job1
    oxccl lighthouse --credentials job1 --min-replicas 2

  Each replica with a folder of its own, which can be that replica and nothing else; copy it to the replica's machine,
  and set it for its processes:
    oxccl credentials issue job1 replica0 job1-replica0
    oxccl launch --credentials job1-replica0 --lighthouse https://HOST:29510 --total-replicas 2 -- train_diloco replica

  Whom a folder lets a process be, and until when:
    oxccl credentials show job1-replica0

The folder of `new` holds the key that makes certificates: keep it where the lighthouse runs. All that read it can take
part in the job as anyone. There is no way to take a certificate back: make new credentials instead.
The exit codes are those of `oxccl --help`.";

/// Make, issue or show the credentials of a job: certificates for the control plane, a secret for the data plane.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Make the folder DIR for a new job.
    New {
        /// The folder; it must not exist, or be empty.
        dir: PathBuf,
        /// The job's id: 1 to 63 lower-case letters, digits and hyphens [default: a random one].
        #[arg(long, value_name = "ID")]
        job: Option<String>,
    },
    /// Make the folder OUT with which a process can be the replica NAME of the job in DIR, and nothing else.
    Issue {
        /// The folder that `new` made.
        dir: PathBuf,
        /// The replica's name: letters, digits, '.', '_' and '-'.
        name: String,
        /// The replica's folder; it must not exist, or be empty.
        out: PathBuf,
    },
    /// Show whom DIR lets a process be, and until when. Nothing secret is shown.
    Show {
        /// The folder.
        dir: PathBuf,
    },
}

pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    match arguments.action {
        Action::New { dir, job } => {
            let job = identity::create(&dir, job.as_deref())?;
            say!("oxccl: credentials of job {job} in {}", dir.display());
        }
        Action::Issue { dir, name, out } => {
            identity::issue(&dir, &name, &out)?;
            say!("oxccl: credentials of replica '{name}' in {}", out.display());
        }
        Action::Show { dir } => {
            let summary = identity::show(&dir)?;
            writeln!(std::io::stdout(), "{summary}").map_err(|e| Error::io("write to standard output", e))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
