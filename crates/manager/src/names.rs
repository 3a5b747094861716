//! What an incarnation of a replica is called, and its host.

use std::net::IpAddr;

use ftcore::{Error, Result, split_url};

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

/// What to say to a replica that tells others a loopback address although its lighthouse is elsewhere: what runs then stops as soon as a replica of
/// another machine needs it.
pub(crate) fn only_here(own: &str, lighthouses: &str) -> Option<String> {
    let is_loopback = |host: &str| {
        let host = host.trim_matches(['[', ']']);
        host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
    };
    let urls = lighthouses
        .split(',')
        .filter_map(|url| split_url(url.trim()).ok());
    let elsewhere = urls.map(|(host, _)| host).find(|host| !is_loopback(host))?;
    is_loopback(own).then(|| {
        format!(
            "this replica tells the others to reach it at {own}, and its lighthouse is at {elsewhere}: replicas of other machines cannot reach it; \
             let it listen elsewhere (--bind 0.0.0.0:0) and name this machine (--advertise HOST; ManagerConfig::bind, advertise_host)"
        )
    })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loopback_address_is_told_to_none_of_another_machine() {
        for (own, lighthouse, is_told) in [
            ("127.0.0.1", "https://10.73.0.1:29510", true),
            ("::1", "http://127.0.0.1:1,http://hostA:29510", true),
            ("127.0.0.1", "http://127.0.0.1:29510", false),
            ("127.0.0.1", "http://localhost:29510", false),
            ("hostB", "https://hostA:29510", false),
        ] {
            assert_eq!(
                only_here(own, lighthouse).is_some(),
                is_told,
                "{own} {lighthouse}"
            );
        }
    }
}
