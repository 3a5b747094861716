//! What an incarnation of a replica is called, and its host.

use ftcore::{Error, Result};

/// 128 random bits: two lives of one name never share an id.
pub(crate) fn random_id() -> Result<String> {
    use std::fmt::Write as _;
    let mut bytes = [0u8; 16];
    rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty())
        .map_err(|e| Error::io("reading random bytes", e.into()))?;
    Ok(bytes.iter().fold(String::new(), |mut text, b| {
        let _ = write!(text, "{b:02x}");
        text
    }))
}

/// What other machines call this one when it listens on `host`.
pub(crate) fn reachable_host(host: &str) -> String {
    match host {
        "0.0.0.0" | "::" => {
            let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
            if name.is_empty() { "127.0.0.1".into() } else { name }
        }
        fixed => fixed.to_string(),
    }
}
