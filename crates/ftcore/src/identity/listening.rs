//! What a listener does about strangers: where it may listen without credentials, and how it logs those that it turns away.

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

use super::Credentials;
use crate::{Error, Result};

/// The variable that, set to `1`, lets the servers of a process without credentials be reached from other machines.
pub const INSECURE: &str = "OXCCL_INSECURE";
/// A line of a log is written at most this often, with the number of those that were not.
const SAY_EVERY: Duration = Duration::from_secs(1);

/// True if [`INSECURE`] is `1`.
pub fn is_insecure_allowed() -> bool {
    std::env::var_os(INSECURE).is_some_and(|value| value == "1")
}

/// Says whether `what` may listen at `address`: with credentials anywhere, without on loopback only, or with [`INSECURE`], which is warned about
/// once.
///
/// Errors: `InvalidArgument` that says what to do.
pub fn may_listen(what: &str, address: SocketAddr, credentials: Option<&Credentials>) -> Result<()> {
    static WARNED: Once = Once::new();
    if credentials.is_some() || address.ip().to_canonical().is_loopback() {
        return Ok(());
    }
    if !is_insecure_allowed() {
        return Err(Error::invalid(format!(
            "{what} at {address} could be used from other machines by anybody, as there are no credentials: set {} to the folder that \
             `oxccl credentials new` makes, on all machines of the job; or {INSECURE}=1 on a network that only the job can reach",
            Credentials::VARIABLE
        )));
    }
    WARNED.call_once(|| {
        tracing::warn!(
            %address,
            "{what} listens without credentials ({INSECURE}=1): anybody who reaches this machine can take part in the job"
        );
    });
    Ok(())
}

/// Logs connections that were turned away; a flood of them does not become a flood of lines.
#[derive(Debug, Default)]
pub struct TurnedAway(Mutex<(Option<Instant>, u64)>);

impl TurnedAway {
    /// A log of its own.
    pub const fn new() -> Self {
        Self(Mutex::new((None, 0)))
    }

    /// Says that `what` turned the connection from `peer` away, and why.
    pub fn say(&self, what: &str, peer: &dyn fmt::Display, why: &dyn fmt::Display) {
        let mut said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if said
            .0
            .is_some_and(|at| now.saturating_duration_since(at) < SAY_EVERY)
        {
            said.1 += 1;
            return;
        }
        let unsaid = std::mem::take(&mut said.1);
        said.0 = Some(now);
        drop(said);
        tracing::warn!(%peer, not_logged = unsaid, "{what}: a connection is turned away: {why}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    #[test]
    fn without_credentials_only_loopback_is_listened_at_unless_it_is_asked_for() {
        let at = |text: &str| may_listen("store server", text.parse().unwrap(), None);
        for loopback in ["127.0.0.1:1", "127.1.2.3:1", "[::1]:1", "[::ffff:127.0.0.1]:1"] {
            at(loopback).unwrap();
        }
        if !is_insecure_allowed() {
            for elsewhere in ["0.0.0.0:1", "10.0.0.4:1", "[::]:1", "[2001:db8::1]:1"] {
                let e = at(elsewhere).unwrap_err();
                assert_eq!(e.kind(), ErrorKind::InvalidArgument);
                assert!(e.to_string().contains(Credentials::VARIABLE), "{e}");
                assert!(e.to_string().contains(INSECURE), "{e}");
            }
        }
    }
}
