//! What an incarnation of a replica is called, and its host.

use std::net::{IpAddr, Ipv4Addr};

use ftcore::{Error, Result, host_address, split_url};

/// 128 random bits: two incarnations of one name never share an id.
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

/// What other machines are told to call this one when it listens on `host`: what is `given`, else `host`; if that is a wildcard, the address from
/// which it reaches one of the servers in `urls` (separated by commas), else the one towards the outside.
pub(crate) fn told_host(given: Option<&str>, host: &str, urls: &str) -> String {
    match given {
        Some(given) => return given.to_owned(),
        None if !matches!(host, "0.0.0.0" | "::") => return host.to_owned(),
        None => {}
    }
    let servers = urls.split(',').filter_map(|url| split_url(url.trim()).ok());
    let towards = |(server, port): (&str, u16)| {
        let own = host_address::towards(server, port)?;
        // The name of this machine may mean its loopback here, and something else elsewhere.
        (!own.is_loopback() || is_loopback(server)).then_some(own)
    };
    let mut found = servers.filter_map(towards);
    let outward = || host_address::outward(host == "0.0.0.0");
    let own = found.next().or_else(outward);
    own.unwrap_or(Ipv4Addr::LOCALHOST.into()).to_string()
}

fn is_loopback(host: &str) -> bool {
    let host = host.trim_matches(['[', ']']);
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
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

    #[test]
    fn a_replica_that_listens_everywhere_is_reached_where_it_reaches_its_lighthouse() {
        let outward = host_address::outward(true).unwrap_or(Ipv4Addr::LOCALHOST.into());
        for (bind, lighthouse, told) in [
            ("10.1.2.3", "http://127.0.0.1:29510", "10.1.2.3"),
            ("0.0.0.0", "http://127.0.0.1:29510", "127.0.0.1"),
            ("0.0.0.0", "http://a..b:1, http://127.0.0.1:29510", "127.0.0.1"),
            ("0.0.0.0", "http://a..b:1", &outward.to_string()),
        ] {
            assert_eq!(told_host(None, bind, lighthouse), told, "{bind} {lighthouse}");
            assert_eq!(told_host(Some("hostB"), bind, lighthouse), "hostB");
        }
    }
}
