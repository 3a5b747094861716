//! Which address this rank listens on and which one it tells the others.
//!
//! - `net_name` is an IP address, or an interface whose first address is taken: listened on and told to all ranks.
//! - else the hint `host`, or `OXCCL_GLOO_HOST` (a name or an IP address), is told to all ranks, and all interfaces are listened on.
//! - else all interfaces are listened on; ranks of the same host and network namespace come over loopback, the others to
//!   the address of `ftcore::host_address::outward`. Without credentials and without `OXCCL_INSECURE=1` loopback only.

use std::net::{IpAddr, Ipv4Addr, ToSocketAddrs};
use std::time::Instant;

use ftcore::{Cancel, Error, Result, bounded, host_address};

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

/// The address that the option `host` stands for. The system's look-up has no deadline and hears nothing, so it runs on a thread that is left behind.
pub(crate) fn resolve(host: &str, deadline: Instant, cancel: &Cancel) -> Result<IpAddr> {
    resolve_by(host, deadline, cancel, |host| {
        let found = (host, 0u16).to_socket_addrs()?;
        Ok(found.map(|a| a.ip()).collect())
    })
}

fn resolve_by(
    host: &str,
    deadline: Instant,
    cancel: &Cancel,
    look_up: impl FnOnce(&str) -> std::io::Result<Vec<IpAddr>> + Send + 'static,
) -> Result<IpAddr> {
    if let Ok(ip) = host.parse() {
        return Ok(ip);
    }
    let name = host.to_owned();
    let late = || {
        Error::timeout(format!(
            "looking up the option host, '{host}', took until the deadline"
        ))
    };
    bounded(
        "ox-gloo-name",
        deadline,
        &|| cancel.reason(),
        &late,
        move || look_up(&name),
        drop,
    )?
    .map_err(|e| Error::io(format!("resolving the option host, '{host}'"), e))?
    .into_iter()
    .min_by_key(IpAddr::is_ipv6)
    .ok_or_else(|| Error::invalid(format!("option host is '{host}', which has no address")))
}

/// Decides by the rules above. `open`: the ranks prove themselves to each other, or need not.
pub(crate) fn addresses(net_name: Option<&str>, host: Option<IpAddr>, open: bool) -> Result<Addresses> {
    if let Some(name) = net_name {
        let ip = match name.parse::<IpAddr>() {
            Ok(ip) => ip,
            Err(_) => host_address::of_interface(name)?,
        };
        return Ok(Addresses {
            bind: ip,
            advertise: ip,
            loopback_here: false,
        });
    }
    let any = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    if let Some(ip) = host {
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
        advertise: host_address::outward(true).unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        loopback_here: true,
    })
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
        let a = addresses(None, Some(IpAddr::from([10, 1, 2, 3])), true).unwrap();
        assert_eq!(a.advertise.to_string(), "10.1.2.3");
        assert!(a.bind.is_unspecified());
        let a = addresses(None, None, true).unwrap();
        assert!(a.loopback_here && a.bind.is_unspecified());
    }

    #[test]
    fn ranks_that_need_not_prove_themselves_are_reached_over_loopback_only() {
        let a = addresses(None, None, false).unwrap();
        assert!(a.loopback_here && a.bind.is_loopback() && a.advertise.is_loopback());
        // A loopback address is not listened for on all interfaces.
        let a = addresses(None, Some(IpAddr::from([127, 0, 0, 2])), false).unwrap();
        assert_eq!(a.bind.to_string(), "127.0.0.2");
    }

    #[test]
    fn a_look_up_that_does_not_end_hears_an_abort_and_ends_at_the_deadline() {
        use std::sync::mpsc::channel;
        use std::time::Duration;

        use ftcore::{ErrorKind, deadline_in};

        let (answer, asked) = channel::<()>();
        let asked = std::sync::Arc::new(std::sync::Mutex::new(asked));
        let never = || {
            let asked = asked.clone();
            move |_: &str| {
                let _ = asked.lock().map(|asked| asked.recv());
                Ok(Vec::new())
            }
        };
        let cancel = Cancel::default();
        cancel.cancel(Error::new(ErrorKind::Aborted, "not wanted any more"));
        let long = deadline_in(Duration::from_secs(60));
        let e = resolve_by("a-name", long, &cancel, never()).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Aborted, "{e}");
        let short = deadline_in(Duration::from_millis(50));
        let e = resolve_by("a-name", short, &Cancel::default(), never()).unwrap_err();
        assert!(
            e.kind() == ErrorKind::Timeout && e.to_string().contains("a-name"),
            "{e}"
        );
        // What is an address needs no look-up.
        let here = resolve_by("::1", long, &cancel, never()).unwrap();
        assert!(here.is_loopback());
        drop(answer);
    }
}
