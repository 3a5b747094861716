//! The doors of a store's server: who is connected, how many may be, and who goes when there are too many.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, Ipv6Addr, Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use crate::forked::Parents;

/// What all connections together may make the server hold besides: unfinished requests, waits, replies that are not taken.
const MAX_HELD: usize = 512 << 20;

/// What a connection may do to the others; smaller in tests.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Connections at once.
    pub(super) connections: usize,
    /// The same from one address; of IPv6, from one /64 network.
    pub(super) per_address: usize,
    /// Connections that have not greeted, or not proved themselves. One more, and the oldest is closed: those of the job greet at once.
    pub(super) ungreeted: usize,
    /// A connection must validate itself within this time, so that silent strangers do not use the places up.
    pub(super) handshake: Duration,
    /// A request that stops half way, or a peer that takes no replies, is given up after this time.
    pub(super) stall: Duration,
    /// Bytes that all connections together may make the server hold.
    pub(super) held: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 4096,
            per_address: 4096 / 8 * 7,
            ungreeted: 4096 / 4,
            handshake: Duration::from_secs(30),
            stall: Duration::from_secs(60),
            held: MAX_HELD,
        }
    }
}

/// Who is connected, and whether new ones may be.
#[derive(Default)]
pub(super) struct Doors {
    pub(super) stopped: bool,
    pub(super) accepting: bool,
    pub(super) open: HashMap<u64, Arc<Parents<TcpStream>>>,
    /// Those that have not greeted: the numbers grow, so the oldest is the first.
    pub(super) ungreeted: BTreeSet<u64>,
    pub(super) addresses: HashMap<IpAddr, usize>,
    pub(super) next: u64,
}

impl Doors {
    /// Closes the connection that has been silent for longest, if there is one.
    pub(super) fn close_oldest_ungreeted(&mut self) {
        if let Some(id) = self.ungreeted.pop_first()
            && let Some(socket) = self.open.get(&id)
        {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

/// What counts as one address.
pub(super) fn network(peer: SocketAddr) -> IpAddr {
    match peer.ip().to_canonical() {
        IpAddr::V6(v6) => {
            let [a, b, c, d, ..] = v6.segments();
            IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
        }
        v4 => v4,
    }
}
