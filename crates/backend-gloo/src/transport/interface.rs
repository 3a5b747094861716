//! Which address this rank listens on and which one it tells the others.
//!
//! - `net_name` is an IP address, or an interface whose first address is taken: listened on and told to all ranks.
//! - else `OXCCL_GLOO_HOST` (a name or an IP address) is told to all ranks, and all interfaces are listened on.
//! - else all interfaces are listened on; ranks of the same host and network namespace come over loopback, the others to
//!   the address that the default route uses. Without credentials and without `OXCCL_INSECURE=1` loopback only.

use std::net::{IpAddr, Ipv4Addr, ToSocketAddrs, UdpSocket};
use std::sync::OnceLock;

use ftcore::{Error, Result};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

/// The environment variable with the address to advertise.
pub(crate) const HOST_VARIABLE: &str = "OXCCL_GLOO_HOST";

/// What is listened on and advertised.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Addresses {
    /// The address to bind.
    pub(crate) bind: IpAddr,
    /// The address for ranks elsewhere.
    pub(crate) advertise: IpAddr,
    /// True if ranks of this host should come over loopback instead.
    pub(crate) loopback_here: bool,
}

/// Decides by the rules above. `open`: the ranks prove themselves to each other, or need not.
pub(crate) fn addresses(net_name: Option<&str>, host: Option<&str>, open: bool) -> Result<Addresses> {
    if let Some(name) = net_name {
        let ip = match name.parse::<IpAddr>() {
            Ok(ip) => ip,
            Err(_) => interface_address(name)?,
        };
        return Ok(Addresses {
            bind: ip,
            advertise: ip,
            loopback_here: false,
        });
    }
    let any = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    if let Some(host) = host {
        let ip = (host, 0u16)
            .to_socket_addrs()
            .map_err(|e| Error::io(format!("resolving {HOST_VARIABLE}={host}"), e))?
            .map(|a| a.ip())
            .min_by_key(IpAddr::is_ipv6)
            .ok_or_else(|| Error::invalid(format!("{HOST_VARIABLE}={host} has no address")))?;
        let bind = if ip.is_loopback() {
            ip
        } else if ip.is_ipv6() {
            IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED)
        } else {
            any
        };
        return Ok(Addresses {
            bind,
            advertise: ip,
            loopback_here: false,
        });
    }
    if !open {
        return Ok(Addresses {
            bind: Ipv4Addr::LOCALHOST.into(),
            advertise: Ipv4Addr::LOCALHOST.into(),
            loopback_here: true,
        });
    }
    Ok(Addresses {
        bind: any,
        advertise: route_address().unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        loopback_here: true,
    })
}

/// The source address of the default route. Connecting a datagram socket sends nothing.
fn route_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    // TEST-NET-1: never a real host, but routed like one.
    socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9)).ok()?;
    Some(socket.local_addr().ok()?.ip()).filter(|ip| !ip.is_unspecified())
}

/// Names the host and its network namespace: equal for two ranks exactly if loopback joins them.
pub(crate) fn host_identity() -> String {
    static KNOWN: OnceLock<String> = OnceLock::new();
    if let Some(known) = KNOWN.get() {
        return known.clone();
    }
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = std::fs::read_link("/proc/self/ns/net")
        .map(|p| p.to_string_lossy().into_owned())
        .unwrap_or_default();
    if boot.trim().is_empty() || namespace.is_empty() {
        return "unknown".to_string();
    }
    KNOWN
        .get_or_init(|| format!("{}+{namespace}", boot.trim()))
        .clone()
}

/// The first address of interface `name`, IPv4 before IPv6.
fn interface_address(name: &str) -> Result<IpAddr> {
    let fail = |e: rustix::io::Errno| Error::io(format!("asking for the addresses of '{name}'"), e.into());
    let socket = rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        None, // protocol 0 is NETLINK_ROUTE
    )
    .map_err(fail)?;
    let any = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None).map_err(fail)?;
    let index = rustix::net::netdevice::name_to_index(&any, name).map_err(|e| {
        Error::invalid(format!(
            "net_name '{name}' is neither an IP address nor an interface of this host ({e})"
        ))
    })?;
    rustix::net::sockopt::set_socket_timeout(
        &socket,
        rustix::net::sockopt::Timeout::Recv,
        Some(std::time::Duration::from_secs(2)),
    )
    .map_err(fail)?;
    // A dump request: nlmsghdr {len, RTM_GETADDR, REQUEST | DUMP, seq, pid}, then ifaddrmsg {family 0, …}.
    let mut request = [0u8; 24];
    let words: [(usize, &[u8]); 3] = [
        (0, &24u32.to_ne_bytes()),
        (4, &22u16.to_ne_bytes()),
        (6, &0x301u16.to_ne_bytes()),
    ];
    for (at, bytes) in words {
        if let Some(slot) = request.get_mut(at..at + bytes.len()) {
            slot.copy_from_slice(bytes);
        }
    }
    rustix::net::send(&socket, &request, SendFlags::empty()).map_err(fail)?;
    let mut found: Vec<IpAddr> = Vec::new();
    let mut buffer = vec![0u8; 32 * 1024];
    loop {
        let (n, _) = rustix::net::recv(&socket, buffer.as_mut_slice(), RecvFlags::empty()).map_err(fail)?;
        let mut rest = buffer.get(..n).unwrap_or(&[]);
        if rest.is_empty() {
            break;
        }
        let mut done = false;
        while let Some((message, tail)) = split_message(rest) {
            rest = tail;
            match message.kind {
                3 | 2 => done = true, // NLMSG_DONE, NLMSG_ERROR
                20 => found.extend(address_of(message.body, index)),
                _ => {}
            }
        }
        if done {
            break;
        }
    }
    found
        .into_iter()
        .filter(|ip| !matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local()))
        .min_by_key(IpAddr::is_ipv6)
        .ok_or_else(|| Error::invalid(format!("interface '{name}' has no address")))
}

struct Message<'a> {
    kind: u16,
    body: &'a [u8],
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn split_message(bytes: &[u8]) -> Option<(Message<'_>, &[u8])> {
    let len = u32_at(bytes, 0)? as usize;
    let kind = u16_at(bytes, 4)?;
    let body = bytes.get(16..len)?;
    let next = len.next_multiple_of(4).min(bytes.len());
    Some((Message { kind, body }, bytes.get(next..)?))
}

/// The local address in an `ifaddrmsg` with attributes, if it is of interface `index`.
fn address_of(body: &[u8], index: u32) -> Option<IpAddr> {
    if u32_at(body, 4)? != index {
        return None;
    }
    let mut rest = body.get(8..)?;
    let mut address = None;
    while let (Some(len), Some(kind)) = (u16_at(rest, 0), u16_at(rest, 2)) {
        let Some(value) = rest.get(4..usize::from(len)) else {
            break;
        };
        let ip = match value.len() {
            4 => value.first_chunk::<4>().map(|b| IpAddr::from(*b)),
            16 => value.first_chunk::<16>().map(|b| IpAddr::from(*b)),
            _ => None,
        };
        match kind {
            2 => return ip,                // IFA_LOCAL: this end of a point-to-point link
            1 => address = address.or(ip), // IFA_ADDRESS
            _ => {}
        }
        let next = usize::from(len).next_multiple_of(4);
        match rest.get(next..) {
            Some(tail) if next > 0 => rest = tail,
            _ => break,
        }
    }
    address
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_name_and_an_ip_address_both_decide_the_address() {
        let localhost = IpAddr::V4(Ipv4Addr::LOCALHOST);
        for name in ["127.0.0.1", "lo"] {
            let a = addresses(Some(name), None, false).unwrap();
            assert_eq!(
                (a.bind, a.advertise, a.loopback_here),
                (localhost, localhost, false)
            );
        }
        let e = addresses(Some("no-such-if"), None, false).unwrap_err();
        assert!(e.to_string().contains("no-such-if"), "{e}");
    }

    #[test]
    fn the_variable_is_advertised_and_without_it_local_ranks_use_loopback() {
        let a = addresses(None, Some("10.1.2.3"), true).unwrap();
        assert_eq!(a.advertise.to_string(), "10.1.2.3");
        assert!(a.bind.is_unspecified());
        let a = addresses(None, None, true).unwrap();
        assert!(a.loopback_here && a.bind.is_unspecified());
        assert_eq!(host_identity(), host_identity());
    }

    #[test]
    fn ranks_that_need_not_prove_themselves_are_reached_over_loopback_only() {
        let a = addresses(None, None, false).unwrap();
        assert!(a.loopback_here && a.bind.is_loopback() && a.advertise.is_loopback());
        // A loopback address is not listened for on all interfaces.
        let a = addresses(None, Some("127.0.0.2"), false).unwrap();
        assert_eq!(a.bind.to_string(), "127.0.0.2");
    }
}
