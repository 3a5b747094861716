//! What a listener does about strangers: where it may listen without credentials, and how it logs those that it turns away.

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

use super::Credentials;
use crate::{Error, Result};

/// The variable that, set to `1`, lets the servers of a process without credentials be reached from other machines.
pub const INSECURE: &str = "OXCCL_INSECURE";

/// True if the caller said so, or [`INSECURE`] is `1`.
pub fn is_insecure(said: bool) -> bool {
    said || std::env::var_os(INSECURE).is_some_and(|value| value == "1")
}

/// Says whether `what` may listen at `address`: with credentials anywhere, without on loopback only, or if [`is_insecure`] allows it, which is
/// warned about once in a process.
///
/// Errors: `InvalidArgument` that says what to do.
pub fn may_listen(
    what: &str,
    address: SocketAddr,
    credentials: Option<&Credentials>,
    insecure: bool,
) -> Result<()> {
    static WARNED: Once = Once::new();
    if credentials.is_some() || address.ip().to_canonical().is_loopback() {
        return Ok(());
    }
    let variable = Credentials::VARIABLE;
    if !is_insecure(insecure) {
        return Err(Error::invalid(format!(
            "{what}: {address} can be reached from other machines, and without credentials they can all take part in the job; set {variable} to \
             the folder that `oxccl credentials new` makes, on all machines of the job; or listen on loopback; or allow it on a network that only \
             the job can reach ({INSECURE}=1, --insecure)"
        )));
    }
    WARNED.call_once(|| {
        tracing::warn!(
            %address,
            "{what} listens without credentials: all that reach it can take part in the job ({variable} closes it to them)"
        );
    });
    Ok(())
}

/// A line of a log that a flood of its causes does not become a flood of: one a second, with the number of those that were not written.
#[derive(Debug, Default)]
pub struct Rarely(Mutex<(Option<Instant>, u64)>);

impl Rarely {
    const EVERY: Duration = Duration::from_secs(1);

    /// A log of its own.
    pub const fn new() -> Self {
        Self(Mutex::new((None, 0)))
    }

    /// How many lines were held back since the last one that was not; `None` if this one is to be held back.
    pub fn pass(&self) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if state
            .0
            .is_some_and(|at| now.saturating_duration_since(at) < Self::EVERY)
        {
            state.1 += 1;
            return None;
        }
        state.0 = Some(now);
        Some(std::mem::take(&mut state.1))
    }
}

/// Logs connections that were turned away.
#[derive(Debug, Default)]
pub struct TurnedAway(Rarely);

impl TurnedAway {
    /// A log of its own.
    pub const fn new() -> Self {
        Self(Rarely::new())
    }

    /// Says that `what` turned the connection from `peer` away, and why.
    pub fn say(&self, what: &str, peer: &dyn fmt::Display, why: &dyn fmt::Display) {
        if let Some(not_logged) = self.0.pass() {
            tracing::warn!(%peer, not_logged, "{what}: a connection is turned away: {why}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    #[test]
    fn without_credentials_only_loopback_is_listened_at_unless_it_is_asked_for() {
        let at = |text: &str, insecure| may_listen("store server", text.parse().unwrap(), None, insecure);
        for loopback in ["127.0.0.1:1", "127.1.2.3:1", "[::1]:1", "[::ffff:127.0.0.1]:1"] {
            at(loopback, false).unwrap();
        }
        for elsewhere in [
            "0.0.0.0:1",
            "10.0.0.4:1",
            "[::]:1",
            "[2001:db8::1]:1",
            "[::ffff:10.0.0.1]:1",
        ] {
            at(elsewhere, true).unwrap();
            if is_insecure(false) {
                continue;
            }
            let e = at(elsewhere, false).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidArgument);
            for part in [
                elsewhere,
                "store server",
                "--insecure",
                "OXCCL_INSECURE=1",
                Credentials::VARIABLE,
            ] {
                assert!(e.to_string().contains(part), "{e}");
            }
        }
    }
}
