//! This host's addresses: the one under which other machines reach it, the one towards a server, and that of an interface. Nothing is sent.
//!
//! The kernel is asked over netlink (a dump of the links and of the addresses): it answers in a network namespace, too, where `/sys` may still show
//! another one's interfaces.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::OnceLock;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use crate::{Error, Result};

/// Of every host that does not tell its name.
const UNKNOWN: &str = "unknown";

/// Names the host and its network namespace, for [`is_here`] on another rank; `unknown` if the system does not tell.
pub fn identity() -> String {
    static KNOWN: OnceLock<String> = OnceLock::new();
    let find = || {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        let network = std::fs::read_link("/proc/self/ns/net").ok()?;
        Some(format!("{}+{}", boot.trim(), network.display()))
    };
    KNOWN
        .get_or_init(|| find().unwrap_or_else(|| UNKNOWN.to_string()))
        .clone()
}

/// True if loopback joins this rank and one whose [`identity`] is `host`. Two that do not know theirs may be anywhere.
pub fn is_here(host: &str) -> bool {
    is_same(host, &identity())
}

fn is_same(one: &str, other: &str) -> bool {
    one == other && one != UNKNOWN
}

/// The address under which other machines reach this one: the one that the routing table chooses towards the outside, else (there is no default
/// route: two machines joined by a cable) the first address of an interface that is up and not loopback. `None` without such an interface.
/// `only_v4`: no IPv6 address.
pub fn outward(only_v4: bool) -> Option<IpAddr> {
    // Addresses that are reserved for documentation: never a real host, but routed like one.
    let v4: IpAddr = Ipv4Addr::new(192, 0, 2, 1).into();
    let v6: IpAddr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into();
    let tries: &[_] = if only_v4 { &[v4] } else { &[v4, v6] };
    let routed = tries.iter().find_map(|&outside| {
        let ip = routed(SocketAddr::new(outside, 9))?;
        Some(ip).filter(|ip| !ip.is_loopback())
    });
    routed.or_else(|| {
        first_up(only_v4)
            .inspect_err(|error| tracing::debug!(%error, "the interfaces of this host are not known"))
            .ok()
            .flatten()
    })
}

/// The address from which this machine reaches `server`, a name or an address. `None` if it has no address, or no route leads there.
pub fn towards(server: &str, port: u16) -> Option<IpAddr> {
    (server, port).to_socket_addrs().ok()?.find_map(routed)
}

fn routed(to: SocketAddr) -> Option<IpAddr> {
    let from: IpAddr = match to {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind(SocketAddr::new(from, 0)).ok()?;
    // Connecting a datagram socket only chooses the route.
    socket.connect(to).ok()?;
    let ip = socket.local_addr().ok()?.ip();
    Some(ip).filter(|ip| !ip.is_unspecified())
}

/// The first address of interface `name`, IPv4 before IPv6; no link-local one of IPv6.
///
/// Errors: `InvalidArgument` if there is no such interface, or it has no address; `Io`.
pub fn of_interface(name: &str) -> Result<IpAddr> {
    let fail = |e: rustix::io::Errno| Error::io(format!("asking for the addresses of '{name}'"), e.into());
    let any = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None).map_err(fail)?;
    let index = rustix::net::netdevice::name_to_index(&any, name).map_err(|e| {
        Error::invalid(format!(
            "net_name '{name}' is neither an IP address nor an interface of this host ({e})"
        ))
    })?;
    let found = dump(GET_ADDRESSES).map_err(fail)?;
    let addresses = found.iter().filter_map(|body| address_of(body));
    addresses
        .filter(|(of, ip)| *of == index && !is_link_local_v6(ip))
        .map(|(_, ip)| ip)
        .min_by_key(IpAddr::is_ipv6)
        .ok_or_else(|| Error::invalid(format!("interface '{name}' has no address")))
}

/// Of the interfaces that are up and not loopback: those with a carrier first, IPv4 before IPv6, then in the kernel's order.
fn first_up(only_v4: bool) -> Result<Option<IpAddr>> {
    let fail = |e: rustix::io::Errno| Error::io("asking for the interfaces of this host", e.into());
    let links: Vec<(u32, u32)> = dump(GET_LINKS)
        .map_err(fail)?
        .iter()
        .filter_map(|body| Some((u32_at(body, 4)?, u32_at(body, 8)?)))
        .filter(|(_, flags)| flags & UP != 0 && flags & LOOPBACK == 0)
        .collect();
    let found = dump(GET_ADDRESSES).map_err(fail)?;
    let addresses = found.iter().filter_map(|body| address_of(body));
    let usable = addresses
        .filter(|(_, ip)| !(is_link_local_v6(ip) || ip.is_loopback() || only_v4 && ip.is_ipv6()))
        .filter_map(|(of, ip)| {
            let (index, flags) = links.iter().find(|(index, _)| *index == of)?;
            Some(((flags & RUNNING == 0, ip.is_ipv6(), *index), ip))
        });
    Ok(usable.min_by_key(|(order, _)| *order).map(|(_, ip)| ip))
}

fn is_link_local_v6(ip: &IpAddr) -> bool {
    matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

// Requests and the kinds of their answers, from linux/rtnetlink.h: RTM_GETLINK and RTM_NEWLINK, RTM_GETADDR and RTM_NEWADDR.
const GET_LINKS: (u16, u16) = (18, 16);
const GET_ADDRESSES: (u16, u16) = (22, 20);
// Flags of an interface, from linux/if.h.
const UP: u32 = 0x1;
const LOOPBACK: u32 = 0x8;
const RUNNING: u32 = 0x40;

/// The bodies of all answers of a kind.
fn dump((request, answer): (u16, u16)) -> rustix::io::Result<Vec<Vec<u8>>> {
    let socket = rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        None, // protocol 0 is NETLINK_ROUTE
    )?;
    rustix::net::sockopt::set_socket_timeout(
        &socket,
        rustix::net::sockopt::Timeout::Recv,
        Some(std::time::Duration::from_secs(2)),
    )?;
    // nlmsghdr {len, kind, REQUEST | DUMP, seq, pid}, then ifinfomsg or ifaddrmsg of family 0.
    let mut message = [0u8; 32];
    let words: [(usize, &[u8]); 3] = [
        (0, &32u32.to_ne_bytes()),
        (4, &request.to_ne_bytes()),
        (6, &0x301u16.to_ne_bytes()),
    ];
    for (at, bytes) in words {
        if let Some(slot) = message.get_mut(at..at + bytes.len()) {
            slot.copy_from_slice(bytes);
        }
    }
    rustix::net::send(&socket, &message, SendFlags::empty())?;
    let mut found = Vec::new();
    let mut buffer = vec![0u8; 64 * 1024];
    loop {
        let (n, _) = rustix::net::recv(&socket, buffer.as_mut_slice(), RecvFlags::empty())?;
        let mut rest = buffer.get(..n).unwrap_or(&[]);
        if rest.is_empty() {
            return Ok(found);
        }
        while let Some((message, tail)) = split_message(rest) {
            rest = tail;
            match message.kind {
                2 | 3 => return Ok(found), // NLMSG_ERROR, NLMSG_DONE
                kind if kind == answer => found.push(message.body.to_vec()),
                _ => {}
            }
        }
    }
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

/// The interface and the local address in an `ifaddrmsg` with attributes.
fn address_of(body: &[u8]) -> Option<(u32, IpAddr)> {
    let index = u32_at(body, 4)?;
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
            2 => return Some((index, ip?)), // IFA_LOCAL: this end of a point-to-point link
            1 => address = address.or(ip),  // IFA_ADDRESS
            _ => {}
        }
        let next = usize::from(len).next_multiple_of(4);
        match rest.get(next..) {
            Some(tail) if next > 0 => rest = tail,
            _ => break,
        }
    }
    Some((index, address?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_hosts_are_the_same_only_if_both_are_known() {
        assert!(is_same("boot+net:[1]", "boot+net:[1]"));
        assert!(!is_same("boot+net:[1]", "boot+net:[2]"));
        assert!(!is_same(UNKNOWN, UNKNOWN));
        assert_eq!(is_here(&identity()), identity() != UNKNOWN);
    }

    #[test]
    fn an_interface_has_its_address_and_one_that_is_not_here_is_named() {
        assert_eq!(of_interface("lo").unwrap(), IpAddr::V4(Ipv4Addr::LOCALHOST));
        let e = of_interface("no-such-if").unwrap_err();
        assert!(e.to_string().contains("no-such-if"), "{e}");
    }

    #[test]
    fn what_other_machines_are_told_is_no_address_of_this_machine_alone() {
        for only_v4 in [true, false] {
            let found = outward(only_v4);
            let bad = |ip: &IpAddr| ip.is_loopback() || ip.is_unspecified() || (only_v4 && ip.is_ipv6());
            assert!(!found.as_ref().is_some_and(bad), "{found:?}");
        }
    }

    #[test]
    fn a_server_is_reached_from_an_address_of_the_same_kind() {
        for server in ["127.0.0.1", "localhost"] {
            assert!(towards(server, 1).unwrap().is_loopback(), "{server}");
        }
        assert_eq!(towards("a..b", 1), None);
    }
}
