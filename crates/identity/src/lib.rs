//! Who a peer of a job is: certificates, and TLS both ways for the control plane's servers and callers.
//!
//! `folder` makes the folder of a job's credentials and folders for single replicas. [`Party`] is this process in one role, made from
//! [`ftcore::Credentials`]; it connects to others. An [`Acceptor`] takes connections for one or several jobs and says which [`Peer`] is at
//! the other end, before anything else is read.
//!
//! A certificate names its owner by a URI, `oxccl://JOB/ROLE`, and is signed by the job's own CA. All certificates of a job share one DNS
//! name ([`server_name`]), which callers send (SNI), so that one listener serves several jobs.

use std::fmt;
use std::sync::Arc;

use ftcore::{Credentials, Error, Result};

mod accept;
mod folder;
mod party;
mod revoked;
mod trust;

pub use accept::Acceptor;
pub use folder::{Summary, create, issue, issue_for_lighthouse, show};
pub use party::{Party, Refusal};
pub use revoked::revoke;
/// A connection with TLS, this process being the caller.
pub use tokio_rustls::client::TlsStream as ClientStream;
/// A connection with TLS, this process being the server.
pub use tokio_rustls::server::TlsStream as ServerStream;

/// The longest replica name in a certificate, in bytes.
const MAX_NAME: usize = 128;

/// What a process is in its job.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Role {
    /// The lighthouse.
    Lighthouse,
    /// The replica of this name, whichever incarnation and rank.
    Replica(String),
    /// The one that may end and drain replicas.
    Operator,
}

impl Role {
    /// The URI in the role's certificate.
    fn uri(&self, job: &str) -> String {
        match self {
            Self::Lighthouse => format!("oxccl://{job}/lighthouse"),
            Self::Replica(name) => format!("oxccl://{job}/replica/{name}"),
            Self::Operator => format!("oxccl://{job}/operator"),
        }
    }

    fn of_uri(uri: &str, job: &str) -> Option<Self> {
        let path = uri
            .strip_prefix("oxccl://")?
            .strip_prefix(job)?
            .strip_prefix('/')?;
        match path {
            "lighthouse" => Some(Self::Lighthouse),
            "operator" => Some(Self::Operator),
            _ => {
                let name = path.strip_prefix("replica/")?;
                check_name(name).ok()?;
                Some(Self::Replica(name.to_owned()))
            }
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lighthouse => f.write_str("the lighthouse"),
            Self::Replica(name) => write!(f, "replica '{name}'"),
            Self::Operator => f.write_str("the operator"),
        }
    }
}

/// Who is at the other end of a connection, as its certificate proves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// The job's id.
    pub job: String,
    /// What it is in that job.
    pub role: Role,
}

impl Peer {
    /// True if it is an incarnation of the replica that `replica_id` (`name:random`) belongs to.
    pub fn speaks_for(&self, replica_id: &str) -> bool {
        matches!(&self.role, Role::Replica(name) if name == name_of(replica_id))
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of job {}", self.role, self.job)
    }
}

/// The name in a replica id `name:random`: what a certificate is bound to.
pub fn name_of(replica_id: &str) -> &str {
    replica_id.split_once(':').map_or(replica_id, |(name, _)| name)
}

/// The DNS name in all certificates of a job. It resolves nowhere; callers send it so that the listener knows which job is meant.
pub fn server_name(job: &str) -> String {
    format!("{job}.oxccl.invalid")
}

/// The credentials of this process: those that the caller named, else those of [`Credentials::VARIABLE`]; `None` without either.
///
/// Errors: those of [`Credentials::load`].
pub fn credentials(named: Option<&Arc<Credentials>>) -> Result<Option<Arc<Credentials>>> {
    match named {
        Some(named) => Ok(Some(Arc::clone(named))),
        None => Credentials::from_env(),
    }
}

/// Checks that a certificate can be made out to the replica `name`. Errors: `InvalidArgument` that shows it.
pub fn check_name(name: &str) -> Result<()> {
    let known = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    if name.is_empty() || name.len() > MAX_NAME || !name.bytes().all(known) {
        return Err(Error::invalid(format!(
            "replica name {name:?} cannot stand in a certificate: 1 to {MAX_NAME} letters, digits, '.', '_' and '-'"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_comes_back_from_its_uri_and_only_in_its_own_job() {
        for role in [Role::Lighthouse, Role::Operator, Role::Replica("a-1_b.c".into())] {
            let uri = role.uri("job-7");
            assert_eq!(Role::of_uri(&uri, "job-7"), Some(role), "{uri}");
            assert_eq!(Role::of_uri(&uri, "job"), None);
            assert_eq!(Role::of_uri(&uri, "job-71"), None);
        }
        for bad in [
            "",
            "oxccl://job-7",
            "oxccl://job-7/",
            "oxccl://job-7/replica/",
            "oxccl://job-7/replica/a/b",
            "oxccl://job-7/replica/a:1",
            "oxccl://job-7/king",
            "http://job-7/operator",
        ] {
            assert_eq!(Role::of_uri(bad, "job-7"), None, "{bad}");
        }
    }

    #[test]
    fn a_replica_speaks_for_its_own_incarnations_only() {
        let peer = |role| Peer {
            job: "j".into(),
            role,
        };
        let a = peer(Role::Replica("a".into()));
        assert!(a.speaks_for("a:1") && a.speaks_for("a:2:3") && a.speaks_for("a"));
        for other in ["b:1", "aa:1", ":a", "", "A:1", " a:1"] {
            assert!(!a.speaks_for(other), "{other}");
        }
        assert!(!peer(Role::Operator).speaks_for("a:1"));
        assert!(!peer(Role::Lighthouse).speaks_for("lighthouse:1"));
    }
}
