//! What the peers of a port may take: connections in all and for one address, time, and memory; and who has how many.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ftcore::identity::Rarely;
use ftcore::{Error, Result, raise_descriptor_limit};

use super::frames::Rate;

/// Descriptors that a lighthouse needs besides its connections.
const RESERVED: usize = 512;
/// What the bodies of all requests of a port that are not whole yet may hold, in bytes.
pub(super) const MAX_UNFINISHED: usize = 256 << 20;
/// The same for one connection.
pub(super) const MAX_UNFINISHED_EACH: usize = 4 << 20;
/// Frames that ask for nothing. An honest client cancels calls, pings and changes settings a few times a second.
pub(super) const COSTLY_FRAMES: Rate = Rate {
    burst: 4000,
    per_second: 1000,
};
/// What connections to a server may take. A client that takes more is disconnected, and the log says why.
///
/// A connection with an open request, as the event streams are, may stay for as long as it answers pings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Connections at once.
    pub connections: usize,
    /// Connections at once from one address; of IPv6, from one /64 network. By default seven eighths of all, so that a whole job behind one
    /// address finds room, and the other addresses still do when it is full.
    pub per_address: usize,
    /// Time for the greeting (the preface and settings of HTTP/2, the first head of HTTP/1), and for a request once it has begun. Default
    /// 10 s.
    pub greeting: Duration,
    /// A connection without an open request is closed after this time. Default 60 s.
    pub idle: Duration,
    /// A connection over HTTP/2 is pinged, and closed when nothing has come over it for this time. A lighthouse takes its heartbeat time-out. Default
    /// 20 s on a manager server: a rank that is stopped for less does not end its replica; who waits for it goes by its progress.
    pub silence: Duration,
    /// An answer of which the peer takes nothing for this time is given up, and the connection with it. Default 30 s.
    pub unread: Duration,
}

impl ConnectionLimits {
    fn with(connections: usize) -> Self {
        Self {
            connections: connections.max(16),
            per_address: (connections - connections / 8).max(16),
            greeting: Duration::from_secs(10),
            idle: Duration::from_secs(60),
            silence: Duration::from_secs(20),
            unread: Duration::from_secs(30),
        }
    }

    /// For a process that does little else: 32,768 connections, or what the limit of open files allows.
    pub fn lighthouse() -> Self {
        Self::with(raise_descriptor_limit().saturating_sub(RESERVED).min(32_768))
    }

    /// For a server inside of a training process, which needs descriptors itself: 8,192 connections, or a quarter of the limit of open files.
    pub fn manager() -> Self {
        Self::with((raise_descriptor_limit() / 4).min(8192))
    }

    /// The most connections at once that have not proved yet whose they are, where that is asked for. The others are for members.
    pub(crate) fn handshakes(&self) -> usize {
        (self.connections / 2).max(1)
    }

    pub(crate) fn validate(&self) -> Result<()> {
        if self.connections == 0
            || self.per_address == 0
            || self.greeting.is_zero()
            || self.idle.is_zero()
            || self.silence.is_zero()
            || self.unread.is_zero()
        {
            return Err(Error::invalid(format!("a limit of zero in {self:?}")));
        }
        Ok(())
    }
}

/// What counts as one address.
fn network(peer: SocketAddr) -> IpAddr {
    match peer.ip().to_canonical() {
        IpAddr::V6(v6) => {
            let [a, b, c, d, ..] = v6.segments();
            IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
        }
        v4 => v4,
    }
}

/// Everything that the connections of one port share.
#[derive(Debug)]
pub(super) struct Port {
    pub(super) limits: ConnectionLimits,
    /// Bytes of unfinished requests.
    pub(super) unfinished: AtomicUsize,
    addresses: Mutex<HashMap<IpAddr, usize>>,
    said: Rarely,
}

/// One connection in the count, until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    port: Arc<Port>,
    address: IpAddr,
}

impl Port {
    pub(super) fn new(limits: ConnectionLimits) -> Arc<Self> {
        Arc::new(Self {
            limits,
            unfinished: AtomicUsize::new(0),
            addresses: Mutex::default(),
            said: Rarely::default(),
        })
    }

    /// A place for `peer` beside `open` others, or why there is none.
    pub(super) fn admit(self: &Arc<Self>, peer: SocketAddr, open: usize) -> Result<Place, String> {
        if open >= self.limits.connections {
            return Err(format!(
                "{} connections are open, the most that this server takes (it follows RLIMIT_NOFILE)",
                self.limits.connections
            ));
        }
        let address = network(peer);
        let mut addresses = self.addresses.lock().unwrap_or_else(PoisonError::into_inner);
        let count = addresses.entry(address).or_default();
        if *count >= self.limits.per_address {
            return Err(format!(
                "{} connections from {address} are open, the most for one address",
                self.limits.per_address
            ));
        }
        *count += 1;
        drop(addresses);
        Ok(Place {
            port: Arc::clone(self),
            address,
        })
    }

    /// Counts `n` more bytes of requests that are not whole; false if they are too many.
    pub(super) fn hold(&self, n: usize) -> bool {
        let before = self.unfinished.fetch_add(n, Ordering::Relaxed);
        before.saturating_add(n) <= MAX_UNFINISHED
    }

    pub(super) fn give_back(&self, n: usize) {
        self.unfinished.fetch_sub(n, Ordering::Relaxed);
    }

    /// Logs what happened to a connection; a flood of them does not become a flood of lines.
    pub(super) fn say(&self, peer: SocketAddr, why: &str) {
        let Some(not_logged) = self.said.pass() else {
            return;
        };
        tracing::warn!(%peer, not_logged, "a connection is closed: {why}");
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut addresses = self.port.addresses.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = addresses.get_mut(&self.address) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                addresses.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_its_own_limit_and_gets_its_places_back() {
        let port = Port::new(ConnectionLimits {
            connections: 5,
            per_address: 2,
            ..ConnectionLimits::manager()
        });
        let from = |text: &str| text.parse::<SocketAddr>().unwrap();
        let a = port.admit(from("10.0.0.1:1"), 0).unwrap();
        let _b = port.admit(from("[::ffff:10.0.0.1]:2"), 1).unwrap();
        let e = port.admit(from("10.0.0.1:3"), 2).unwrap_err();
        assert!(e.contains("10.0.0.1"), "{e}");
        let _c = port.admit(from("10.0.0.2:1"), 2).unwrap();
        drop(a);
        let _d = port.admit(from("10.0.0.1:4"), 2).unwrap();
        // A client that has one address of IPv6 has all of its network.
        let _e = port.admit(from("[2001:db8::1]:1"), 3).unwrap();
        let f = port.admit(from("[2001:db8::2]:1"), 4).unwrap();
        assert!(port.admit(from("[2001:db8::3]:1"), 4).is_err());
        assert!(
            port.admit(from("10.0.0.3:1"), 5)
                .unwrap_err()
                .contains("RLIMIT_NOFILE")
        );
        drop(f);
        assert_eq!(port.addresses.lock().unwrap().len(), 3);
    }
}
