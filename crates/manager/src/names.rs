//! What an incarnation of a replica is called, and its host.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};

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
/// which it reaches one of the servers in `urls` (separated by commas), else its name.
pub(crate) fn told_host(given: Option<&str>, host: &str, urls: &str) -> String {
    match given {
        Some(given) => return given.to_owned(),
        None if !matches!(host, "0.0.0.0" | "::") => return host.to_owned(),
        None => {}
    }
    let servers = urls.split(',').filter_map(|url| split_url(url.trim()).ok());
    let towards = |(server, port): (&str, u16)| {
        let own = address_towards(server, port).ok()?;
        // The name of this machine may mean its loopback here, and something else elsewhere.
        (!own.is_loopback() || is_loopback(server)).then(|| own.to_string())
    };
    let name = || rustix::system::uname().nodename().to_string_lossy().into_owned();
    let mut found = servers.filter_map(towards);
    let found = found.next().unwrap_or_else(name);
    if found.is_empty() {
        "127.0.0.1".into()
    } else {
        found
    }
}

/// The address of this machine on the route to `server`. Nothing is sent.
fn address_towards(server: &str, port: u16) -> io::Result<IpAddr> {
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for address in (server, port).to_socket_addrs()? {
        let any: IpAddr = match address {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let socket = UdpSocket::bind((any, 0));
        match socket.and_then(|socket| socket.connect(address).and_then(|()| socket.local_addr())) {
            Ok(own) => return Ok(own.ip()),
            Err(e) => last = e,
        }
    }
    Err(last)
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
        let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
        for (bind, lighthouse, told) in [
            ("10.1.2.3", "http://127.0.0.1:29510", "10.1.2.3"),
            ("0.0.0.0", "http://127.0.0.1:29510", "127.0.0.1"),
            (
                "0.0.0.0",
                "http://host.invalid:1, http://127.0.0.1:29510",
                "127.0.0.1",
            ),
            ("0.0.0.0", "http://host.invalid:1", name.as_str()),
        ] {
            assert_eq!(told_host(None, bind, lighthouse), told, "{bind} {lighthouse}");
            assert_eq!(told_host(Some("hostB"), bind, lighthouse), "hostB");
        }
    }
}
