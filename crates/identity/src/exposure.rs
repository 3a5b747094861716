//! Where a server without credentials may listen: on loopback, unless the user says otherwise.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};

use ftcore::{Credentials, Error, Result};

/// The variable that lets servers without credentials listen beyond loopback, for programs under launchers: `1`.
pub const INSECURE: &str = "OXCCL_INSECURE";

static WARNED: AtomicBool = AtomicBool::new(false);

/// True if the caller, or [`INSECURE`], allows servers without credentials beyond loopback.
pub fn is_insecure(said: bool) -> bool {
    said || std::env::var_os(INSECURE).is_some_and(|value| value == "1")
}

/// Checks that `what` may listen on `bind`, which stands for `address`, without credentials: on loopback it may, elsewhere only if `insecure`,
/// which is warned of once in a process.
///
/// Errors: `InvalidArgument` with the ways out.
pub fn allow_exposure(what: &str, bind: &str, address: IpAddr, insecure: bool) -> Result<()> {
    if address.to_canonical().is_loopback() {
        return Ok(());
    }
    let variable = Credentials::VARIABLE;
    if !insecure {
        return Err(Error::invalid(format!(
            "{what}: {bind} can be reached from other machines, and without credentials they can all take part in the job; make credentials \
             with `oxccl credentials new DIR` and set {variable}=DIR, or listen on 127.0.0.1, or allow it with --insecure ({INSECURE}=1)"
        )));
    }
    if !WARNED.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            bind,
            "{what} listens without credentials: all that reach it can take part in the job ({variable} closes it to them)"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_is_open_without_a_word_from_the_user() {
        let allow = |text: &str, insecure| allow_exposure("the store", text, text.parse().unwrap(), insecure);
        for own in ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"] {
            allow(own, false).unwrap();
        }
        for open in ["0.0.0.0", "::", "10.0.0.1", "2001:db8::1", "::ffff:10.0.0.1"] {
            let e = allow(open, false).unwrap_err();
            assert_eq!(e.kind(), ftcore::ErrorKind::InvalidArgument);
            for part in [
                open,
                "the store",
                "--insecure",
                "OXCCL_INSECURE=1",
                "OXCCL_CREDENTIALS",
            ] {
                assert!(e.message().contains(part), "{e}");
            }
            allow(open, true).unwrap();
        }
    }
}
