//! `oxccl credentials`: makes and shows the folders by which the processes of a job prove that they belong to it.

use std::path::{Path, PathBuf};

use clap::Subcommand;
use oxccl::core::{Error, Result};
use oxccl::identity;

use super::ExitCode;

const EXAMPLES: &str = "\
Examples:
  A new job, and a lighthouse that only its processes can talk to:
    oxccl credentials new job1
    oxccl lighthouse --credentials job1 --min-replicas 1 --initial-replicas 2

  Each replica with a folder of its own, which can be that replica and nothing else; copy it to the replica's machine,
  and set it for its processes:
    oxccl credentials issue job1 replica0 job1-replica0
    oxccl launch --credentials job1-replica0 --lighthouse https://HOST:29510 --total-replicas 2 -- train_diloco replica --bind 0.0.0.0:0

  A lighthouse on a machine that cannot make certificates:
    oxccl credentials issue --for lighthouse job1 job1-lighthouse

  Take the certificates of a replica back, in each folder that a lighthouse or a replica uses (or copy the file `revoked`
  there); they look at it by themselves. What is connected stays so until it is evicted:
    oxccl credentials revoke job1 replica0
    OXCCL_CREDENTIALS=job1 oxccl replica evict replica0 --lighthouse https://HOST:29510

  Whom a folder lets a process be, and until when:
    oxccl credentials show job1-replica0

The folder of `new` holds the key that makes certificates: keep it where you make them and give orders (evict, drain).
All that read it can take part in the job as anyone, and what it signs cannot be taken back for good: make new
credentials instead.
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
    /// Make the folder OUT with which a process can be the replica NAME of the job in DIR (or its lighthouse), and nothing else.
    #[command(
        override_usage = "oxccl credentials issue DIR NAME OUT\n       oxccl credentials issue --for lighthouse DIR OUT"
    )]
    Issue {
        /// Whom the folder is for.
        #[arg(long = "for", value_enum, default_value_t = Whom::Replica, value_name = "ROLE")]
        whom: Whom,
        /// The folder that `new` made.
        dir: PathBuf,
        /// The replica's name (letters, digits, '.', '_' and '-'; none for the lighthouse), and the new folder, which must not exist or be empty.
        #[arg(required = true, num_args = 1..=2, value_name = "NAME> <OUT")]
        name_and_out: Vec<String>,
    },
    /// Take back the certificates of the replica NAME that were made until now, for the processes that use the folder DIR.
    Revoke {
        /// The folder.
        dir: PathBuf,
        /// The replica's name.
        name: String,
    },
    /// Show whom DIR lets a process be, and until when. Nothing secret is shown.
    Show {
        /// The folder.
        dir: PathBuf,
    },
}

/// Whom a folder is issued for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Whom {
    Replica,
    Lighthouse,
}

pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    match arguments.action {
        Action::New { dir, job } => {
            let job = identity::create(&dir, job.as_deref())?;
            say!("oxccl: credentials of job {job} in {}", dir.display());
        }
        Action::Issue {
            whom,
            dir,
            name_and_out,
        } => match (whom, name_and_out.as_slice()) {
            (Whom::Replica, [name, out]) => {
                identity::issue(&dir, name, Path::new(out))?;
                say!("oxccl: credentials of replica '{name}' in {out}");
            }
            (Whom::Lighthouse, [out]) => {
                identity::issue_for_lighthouse(&dir, Path::new(out))?;
                say!("oxccl: credentials of the lighthouse in {out}");
            }
            _ => {
                return Err(Error::invalid(
                    "issue takes DIR NAME OUT for a replica, and --for lighthouse DIR OUT for the lighthouse",
                ));
            }
        },
        Action::Revoke { dir, name } => {
            identity::revoke(&dir, &name)?;
            say!(
                "oxccl: the certificates of replica '{name}' made until now are taken back in {}",
                dir.display()
            );
        }
        Action::Show { dir } => {
            let summary = identity::show(&dir)?;
            crate::results::write(&format!("{summary}\n"))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
