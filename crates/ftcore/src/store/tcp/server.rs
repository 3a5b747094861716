//! The store's server: an accepting thread, and a thread per connection that reads requests and answers in order.
//!
//! A pending WAIT or BARRIER blocks only its own connection: that thread watches its socket (for CANCEL_WAIT or the
//! end of the connection) and its bell (rung by the engine) at once. Whatever a peer sends, the worst it gets is a closed
//! connection and a line in the log.

use std::fmt;
use std::io::{self, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::doors::{Doors, Limits, network};
use super::engine::{Engine, Entry, Progress, Ticket};
use super::link::{Bell, Link, TimeLimit, hello_topic, is_late, watch_listener};
use super::wire::{self, Budget, Held, Request};
use crate::forked::{Born, Parents};
use crate::identity::hello::{self, Handshake, Reason, Refused};
use crate::identity::{TurnedAway, may_listen};
use crate::store::keys::MAX_VALUE;
use crate::store::table::Refusal;
use crate::{
    Credentials, Epoch, Error, ErrorKind, Result, accept_failure, deadline_in, raise_descriptor_limit,
    split_address, time_left,
};

/// Keys, values and queues together.
const MAX_STORED: usize = 1 << 30;
/// Values of a reply that are taken from the store at once, in bytes. A longer one is taken alone.
const BATCH: usize = 64 * 1024;
/// How long a value may become by appending to it, for clients that know no limit: PyTorch's server has none.
const MAX_APPENDED: usize = 64 << 20;
/// A reply is gathered up to this size before it is sent.
const REPLY: usize = 64 * 1024;
/// The work of a connection is shallow; thousands of them should be cheap.
const STACK: usize = 256 * 1024;
/// How long a server that ends goes on with the requests that it has, so that a rank whose key another one has seen gets its answer: often the
/// program of that other rank has the server and ends next.
pub(super) const ANSWERS: Duration = Duration::from_secs(1);
/// How long `shutdown` waits for the connections' threads.
const SHUTDOWN: Duration = Duration::from_secs(5);

/// Where the keys of epochs lie on the wire; clients put the first `/` there.
const NAMESPACE: &str = "/torchft/";

/// Under which prefix the ranks `group_rank` of all replicas meet for `epoch` (torchft's layout). [`TcpStoreServer::begin_epoch`] removes what
/// lies there once the epoch is over.
pub fn epoch_prefix(epoch: Epoch, group_rank: u32) -> String {
    format!("torchft/{epoch}/{group_rank}")
}

/// A server of PyTorch's TCPStore protocol; see [`TcpStore`](super::TcpStore) for the client.
///
/// With credentials a connection proves the job's secret before anything else of it is read, so PyTorch's clients cannot use it: see
/// `docs/credentials-data-plane.md`. Without them, all that reach the port can read and write the store.
///
/// Limits: 4096 connections, 3584 of them from one address and 1024 that have not greeted (then the oldest of those is closed), 8192 bytes per key, 8 MiB per value, 131072 keys and 64 MiB for what one connection makes it hold,
/// 512 MiB for all of them, 1 GiB of keys and values.
/// Dropping it answers the requests that have come, for 1 s at most, and ends all connections. In a process that was forked off the one that
/// serves, dropping it and [`shutdown`](Self::shutdown) do nothing: the sockets are the parent's, too, and the threads are not there.
pub struct TcpStoreServer {
    address: SocketAddr,
    shared: Arc<Shared>,
    pub(super) born: Born,
}

struct Shared {
    engine: Engine,
    limits: Limits,
    credentials: Option<Arc<Credentials>>,
    turned_away: TurnedAway,
    budget: Budget,
    /// The last two epochs that [`TcpStoreServer::begin_epoch`] was told.
    epochs: Mutex<Option<(Epoch, Epoch)>>,
    stop: Bell,
    doors: Mutex<Doors>,
    changed: Condvar,
}

impl TcpStoreServer {
    /// Listens on `addr` (`host:port`, `[v6]:port`; port 0 takes a free one) and serves until it is dropped: with the credentials of
    /// the environment ([`Credentials::from_env`]); without any, on loopback only, or with `OXCCL_INSECURE=1`.
    ///
    /// # Errors
    /// `Conflict` if the address is in use, `InvalidArgument` if it is not an address of this machine, malformed, or one that other machines reach
    /// without credentials, `Io` if the system refuses otherwise. Those of [`Credentials::load`].
    pub fn bind(addr: &str) -> Result<Self> {
        let credentials = Credentials::from_env().map_err(|e| e.with_op("store.serve"))?;
        let (listener, address) = listen(addr)?;
        may_listen("store server", address, credentials.as_deref(), false)
            .map_err(|e| e.with_op("store.serve"))?;
        Self::start(addr, (listener, address), credentials, Limits::default())
    }

    /// As [`bind`](Self::bind), with these credentials; `None` serves every process that reaches `addr`.
    ///
    /// # Errors
    /// As [`bind`](Self::bind), except for an address that other machines reach.
    pub fn bind_with(addr: &str, credentials: Option<Arc<Credentials>>) -> Result<Self> {
        Self::start(addr, listen(addr)?, credentials, Limits::default())
    }

    pub(super) fn start(
        addr: &str,
        (listener, address): (Parents<TcpListener>, SocketAddr),
        credentials: Option<Arc<Credentials>>,
        limits: Limits,
    ) -> Result<Self> {
        let fail = |e: io::Error| bind_error(addr, e);
        let shared = Arc::new(Shared {
            engine: Engine::new(MAX_STORED),
            limits,
            credentials,
            turned_away: TurnedAway::new(),
            budget: Budget::new(limits.held),
            epochs: Mutex::default(),
            stop: Bell::new().map_err(fail)?,
            doors: Mutex::new(Doors {
                accepting: true,
                ..Doors::default()
            }),
            changed: Condvar::new(),
        });
        let for_thread = shared.clone();
        thread::Builder::new()
            .name("ox-store-accept".into())
            .spawn(move || accept(listener, &for_thread))
            .map_err(fail)?;
        tracing::debug!(%address, "store server listens");
        Ok(Self {
            address,
            shared,
            born: Born::here(),
        })
    }

    /// The address listened on, with the real port.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// The port listened on.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Says that this process, which owns the store, goes on to `epoch`: the keys under [`epoch_prefix`] of every epoch before the previous one
    /// are removed and refused from now on, and a client that waits for one of them gets `Aborted`. Those of the present and the previous epoch
    /// stay, as a slow rank may still read them, and so do those of epochs to come. Returns how many keys were removed.
    pub fn begin_epoch(&self, epoch: Epoch) -> usize {
        let mut epochs = self.shared.epochs.lock().unwrap_or_else(PoisonError::into_inner);
        let previous = match *epochs {
            Some((previous, now)) if now == epoch => previous,
            Some((_, now)) => now,
            None => epoch,
        };
        *epochs = Some((previous, epoch));
        // Numbers may go back, after a restart of a lighthouse that counts from 1.
        self.shared
            .engine
            .retire(NAMESPACE.as_bytes(), previous.min(epoch).0)
    }

    /// The number of keys.
    pub fn num_keys(&self) -> usize {
        self.shared.engine.num_keys()
    }

    /// Stops accepting, ends all connections and waits (a few seconds at most) until the port is free again. A second
    /// call does nothing.
    pub fn shutdown(&self) {
        if self.stop() && !self.has_ended_by(deadline_in(SHUTDOWN)) {
            tracing::warn!(
                connections = self.shared.doors().open.len(),
                "store server: connections did not end in time"
            );
        }
    }

    /// Takes no more requests, answers those that have come, and closes what is left after [`ANSWERS`]. False where nothing of that is this
    /// process's to do.
    fn stop(&self) -> bool {
        if self.born.is_elsewhere() {
            return false;
        }
        let mut doors = self.shared.doors();
        doors.stopped = true;
        // What has arrived can still be read, then comes an end; a wait sees that end at once.
        for socket in doors.open.values() {
            let _ = socket.shutdown(Shutdown::Read);
        }
        drop(doors);
        self.shared.stop.ring();
        if !self.has_ended_by(deadline_in(ANSWERS)) {
            for socket in self.shared.doors().open.values() {
                let _ = socket.shutdown(Shutdown::Both);
            }
        }
        true
    }

    /// Waits until all threads have ended; false at the deadline.
    fn has_ended_by(&self, deadline: Instant) -> bool {
        let mut doors = self.shared.doors();
        while doors.accepting || !doors.open.is_empty() {
            let left = time_left(deadline);
            if left.is_zero() {
                return false;
            }
            doors = self
                .shared
                .changed
                .wait_timeout(doors, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        true
    }

    /// How many waits and barriers are pending.
    #[cfg(test)]
    pub(crate) fn waiting(&self) -> usize {
        self.shared.engine.waiting()
    }

    /// What the connections make the server hold, in bytes.
    #[cfg(test)]
    pub(crate) fn held(&self) -> usize {
        self.shared.budget.used()
    }

    /// How many connections there have been.
    #[cfg(test)]
    pub(crate) fn opened(&self) -> u64 {
        self.shared.doors().next
    }

    /// How many connections are open.
    #[cfg(test)]
    pub(crate) fn connections(&self) -> usize {
        self.shared.doors().open.len()
    }
}

impl Drop for TcpStoreServer {
    fn drop(&mut self) {
        self.stop();
    }
}

impl fmt::Debug for TcpStoreServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpStoreServer")
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

/// Listens on `addr`; with the real port.
pub(super) fn listen(addr: &str) -> Result<(Parents<TcpListener>, SocketAddr)> {
    let fail = |e: io::Error| bind_error(addr, e);
    split_address(addr).map_err(|e| e.with_op("store.serve"))?;
    raise_descriptor_limit();
    let listener = TcpListener::bind(addr).map_err(fail)?;
    listener.set_nonblocking(true).map_err(fail)?;
    let address = listener.local_addr().map_err(fail)?;
    Ok((listener.into(), address))
}

fn bind_error(addr: &str, e: io::Error) -> Error {
    let (kind, text) = match e.kind() {
        io::ErrorKind::AddrInUse => (
            ErrorKind::Conflict,
            format!(
                "cannot listen on {addr}: the address is in use; stop the process that uses it, choose another port, \
                 or give port 0 to take a free one"
            ),
        ),
        io::ErrorKind::AddrNotAvailable => (
            ErrorKind::InvalidArgument,
            format!("cannot listen on {addr}: it is not an address of this machine"),
        ),
        io::ErrorKind::InvalidInput => (
            ErrorKind::InvalidArgument,
            format!("cannot listen on {addr}: it is not of the form host:port ({e})"),
        ),
        _ => return Error::io(format_args!("cannot listen on {addr}"), e).with_op("store.serve"),
    };
    Error::new(kind, text).with_op("store.serve").with_source(e)
}

impl Shared {
    fn doors(&self) -> MutexGuard<'_, Doors> {
        self.doors.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn accept(listener: Parents<TcpListener>, shared: &Arc<Shared>) {
    let mut pause = None;
    loop {
        if let Err(error) = watch_listener(&listener, &shared.stop, pause.take()) {
            tracing::error!(%error, "store server: cannot wait for connections; it stops accepting");
            break;
        }
        if shared.doors().stopped {
            break;
        }
        match listener.accept() {
            Ok((stream, peer)) => admit(stream, peer, shared),
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(error) => {
                // Most likely no file descriptors are left: connections that end will free some.
                tracing::warn!(
                    "store server: cannot accept a connection: {}",
                    accept_failure(&error)
                );
                pause = Some(deadline_in(Duration::from_millis(50)));
            }
        }
    }
    // Closed before `shutdown` is told so: the port is free when it returns.
    drop(listener);
    shared.doors().accepting = false;
    shared.changed.notify_all();
}

fn admit(stream: TcpStream, peer: SocketAddr, shared: &Arc<Shared>) {
    let link = match Link::new(stream, TimeLimit::Until(deadline_in(shared.limits.handshake))) {
        Ok(link) => link,
        Err(error) => {
            tracing::debug!(%peer, %error, "store server: connection lost at once");
            return;
        }
    };
    let address = network(peer);
    let id = {
        let mut doors = shared.doors();
        if doors.stopped {
            return;
        }
        let limits = &shared.limits;
        let from_there = doors.addresses.get(&address).copied().unwrap_or(0);
        let full = doors.open.len() >= limits.connections;
        if full || doors.ungreeted.len() >= limits.ungreeted {
            doors.close_oldest_ungreeted();
        }
        if full || from_there >= limits.per_address {
            drop(doors);
            let why = match full {
                true => format!("{} connections are open, the most", limits.connections),
                false => {
                    format!("{from_there} connections from {address} are open, the most for one address")
                }
            };
            shared.turned_away.say("store server", &peer, &why);
            return;
        }
        let id = doors.next;
        doors.next += 1;
        doors.open.insert(id, link.socket().clone());
        doors.ungreeted.insert(id);
        *doors.addresses.entry(address).or_default() += 1;
        id
    };
    let place = Place {
        shared: shared.clone(),
        id,
        address,
    };
    let spawned = thread::Builder::new()
        .name("ox-store-conn".into())
        .stack_size(STACK)
        .spawn(move || {
            Session {
                link,
                shared: &place.shared,
                id,
                out: Vec::new(),
                bell: None,
                ours: false,
                refused: None,
            }
            .run(peer);
        });
    if let Err(error) = spawned {
        tracing::warn!(%peer, %error, "store server: no thread for a connection; closing it");
    }
}

/// A connection's place among the open ones, given up however its thread ends.
struct Place {
    shared: Arc<Shared>,
    id: u64,
    address: IpAddr,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut doors = self.shared.doors();
        doors.open.remove(&self.id);
        doors.ungreeted.remove(&self.id);
        if let Some(count) = doors.addresses.get_mut(&self.address) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                doors.addresses.remove(&self.address);
            }
        }
        drop(doors);
        self.shared.changed.notify_all();
    }
}

/// Why a connection ended.
enum End {
    /// The peer closed it between two requests.
    Closed,
    /// The connection broke or stalled, or the bytes were not the protocol.
    Io(io::Error),
    /// A write that the protocol has no reply for refusing.
    Refused(Vec<u8>, Refusal),
}

impl From<io::Error> for End {
    fn from(e: io::Error) -> Self {
        Self::Io(e)
    }
}

/// One connection.
struct Session<'a> {
    link: Link,
    shared: &'a Shared,
    id: u64,
    /// Replies not sent yet.
    out: Vec<u8>,
    /// Made by the first wait that blocks.
    bell: Option<Arc<Bell>>,
    /// The client is one of ours (`wire::OURS`), and is told what is refused.
    ours: bool,
    /// What was refused since the last PING.
    refused: Option<(ErrorKind, String)>,
}

impl Session<'_> {
    fn run(mut self, peer: SocketAddr) {
        match self.serve() {
            Ok(never) => match never {},
            Err(End::Closed) => tracing::debug!(%peer, "store server: connection closed"),
            Err(End::Refused(key, refusal)) => {
                tracing::warn!(%peer, "store server: closing a connection: {}", refusal.describe(&key));
            }
            Err(End::Io(e)) if is_late(&e) => {
                self.shared
                    .turned_away
                    .say("store server", &peer, &"it stalled half way");
            }
            Err(End::Io(e))
                if matches!(
                    e.kind(),
                    io::ErrorKind::InvalidData | io::ErrorKind::OutOfMemory | io::ErrorKind::PermissionDenied
                ) =>
            {
                self.shared.turned_away.say("store server", &peer, &e);
            }
            Err(End::Io(e)) => tracing::debug!(%peer, "store server: connection lost: {e}"),
        }
        self.link.shut();
    }

    /// Both ends prove the job's secret, if this one has it.
    fn prove(&mut self) -> std::result::Result<(), End> {
        let Some(credentials) = &self.shared.credentials else {
            return Ok(());
        };
        let mut handshake = Handshake::listen(credentials.clone(), hello_topic())
            .map_err(|e| End::Io(io::Error::other(e)))?;
        match handshake.advance(&mut self.link)? {
            true => {
                if let Some(records) = handshake.into_records().map_err(io::Error::from)? {
                    self.link.encrypt(records);
                }
                Ok(())
            }
            // Reads and writes of a link end by its deadline.
            false => Err(io::Error::from(io::ErrorKind::TimedOut).into()),
        }
    }

    fn serve(&mut self) -> std::result::Result<std::convert::Infallible, End> {
        self.prove()?;
        // All five bytes of the greeting, however they are cut into segments.
        if !self.link.fill()? {
            return Err(End::Closed);
        }
        if hello::may_be_hello(self.link.buffered()) {
            self.link.write_all(&hello::refusal(Reason::NoCredentials))?;
            return Err(io::Error::from(Refused::no_credentials()).into());
        }
        if self.link.buffered().first() != Some(&0) {
            return Err(
                wire::bad("it did not begin with VALIDATE; is it a client of another service?").into(),
            );
        }
        match Request::read(&mut self.link, &self.shared.budget)?.0 {
            Request::Validate(wire::MAGIC) => {}
            other => return Err(wire::bad(format!("wrong greeting {other:?}")).into()),
        }
        self.shared.doors().ungreeted.remove(&self.id);
        loop {
            self.send()?;
            if self.link.buffered().is_empty() {
                self.link.limit = TimeLimit::Forever;
                if !self.link.fill()? {
                    return Err(End::Closed);
                }
            }
            self.link.pace(self.shared.limits.stall);
            let (request, mut held) = Request::read(&mut self.link, &self.shared.budget)?;
            self.execute(request, &mut held)?;
        }
    }

    /// `held` is what the request takes of the budget: given back by the caller, once it is done.
    fn execute(&mut self, request: Request, held: &mut Held<'_>) -> std::result::Result<(), End> {
        let engine = &self.shared.engine;
        match request {
            Request::Validate(_) => return Err(wire::bad("a second VALIDATE").into()),
            Request::Ping(nonce) => self.pong(nonce)?,
            Request::Set(key, value) => {
                let set = engine.set(&key, value);
                self.silent(&key, set)?;
            }
            Request::MultiSet(pairs) => {
                if let Err((key, refusal)) = engine.multi_set(pairs) {
                    self.silent(&key, Err(refusal))?;
                }
            }
            Request::Append(key, more) => {
                let most = if self.ours { MAX_VALUE } else { MAX_APPENDED };
                let appended = engine.append(&key, &more, most);
                self.silent(&key, appended)?;
            }
            Request::Add(key, amount) => {
                let sum = match self.ours {
                    true => engine.add(&key, amount),
                    false => engine.add_wrapping(&key, amount),
                };
                if let Some(sum) = self.outcome(&key, sum)? {
                    self.reply(&sum.to_le_bytes())?;
                }
            }
            Request::CompareSet {
                key,
                expected,
                desired,
            } => {
                let value = engine.compare_set(&key, &expected, &desired);
                if let Some(value) = self.outcome(&key, value)? {
                    held.take(value.len())?;
                    self.reply_bytes(&value)?;
                }
            }
            Request::Get(key) => self.reply_values(&[key])?,
            Request::MultiGet(keys) => self.reply_values(&keys)?,
            Request::Check(keys) => {
                let code = if engine.check(&keys) {
                    wire::READY
                } else {
                    wire::NOT_READY
                };
                self.reply(&[code])?;
            }
            Request::NumKeys => self.reply_count(engine.num_keys())?,
            Request::Delete(key) => self.reply_count(usize::from(engine.delete(&key)))?,
            Request::ListKeys => {
                let keys = engine.list(|bytes| held.take(bytes))?;
                self.reply_count(keys.len())?;
                for key in keys {
                    self.reply_bytes(&key)?;
                }
            }
            Request::QueuePush(key, item) => {
                let pushed = engine.push(key.clone(), item);
                pushed.map_err(|refusal| End::Refused(key, refusal))?;
            }
            Request::QueuePop(key) => {
                let (len, item) = engine.pop(&key);
                self.reply_count(len)?;
                if let Some(item) = item {
                    self.reply_bytes(&item)?;
                }
            }
            Request::QueueLen(key) => self.reply_count(engine.queue_len(&key))?,
            Request::Wait(keys) => {
                let bell = self.bell()?;
                let entry = self.shared.engine.wait(keys, &bell);
                self.block(entry, held, &bell)?;
            }
            Request::Barrier { key, world_size } => {
                let bell = self.bell()?;
                match self.shared.engine.barrier(key.clone(), world_size, &bell) {
                    Ok(entry) => self.block(entry, held, &bell)?,
                    Err(refusal) if self.ours || matches!(refusal, Refusal::Retired(_)) => {
                        self.never(&key, &refusal)?;
                    }
                    Err(refusal) => return Err(End::Refused(key, refusal)),
                }
            }
            // Its wait ended just before: the client reads STOP_WAITING first, then this.
            Request::CancelWait => self.reply(&[wire::WAIT_CANCELED])?,
        }
        Ok(())
    }

    fn bell(&mut self) -> io::Result<Arc<Bell>> {
        if let Some(bell) = &self.bell {
            return Ok(bell.clone());
        }
        let bell = Arc::new(Bell::new()?);
        self.bell = Some(bell.clone());
        Ok(bell)
    }

    fn pong(&mut self, nonce: u32) -> io::Result<()> {
        if !self.ours && wire::is_ours(nonce) {
            self.ours = true;
            return self.reply(&(!nonce).to_le_bytes());
        }
        let Some((kind, why)) = self.refused.take() else {
            return self.reply(&nonce.to_le_bytes());
        };
        let mut reply = (!nonce).to_le_bytes().to_vec();
        wire::put_refusal(&mut reply, kind, &why);
        self.reply(&reply)
    }

    /// The end of a write without a reply. A client of ours hears of a refusal at its next PING; any other only by the end of the connection.
    fn silent(
        &mut self,
        key: &[u8],
        written: std::result::Result<(), Refusal>,
    ) -> std::result::Result<(), End> {
        match written {
            Err(refusal) if self.ours => {
                self.refused
                    .get_or_insert((refusal.kind(), refusal.describe(key)));
                Ok(())
            }
            Err(refusal) => Err(End::Refused(key.to_vec(), refusal)),
            Ok(()) => Ok(()),
        }
    }

    /// The end of a write whose reply follows, if it was done.
    fn outcome<T>(
        &mut self,
        key: &[u8],
        written: std::result::Result<T, Refusal>,
    ) -> std::result::Result<Option<T>, End> {
        match written {
            Ok(out) => {
                if self.ours {
                    self.reply(&[wire::DONE])?;
                }
                Ok(Some(out))
            }
            Err(refusal) if self.ours => {
                let mut reply = vec![wire::REFUSED];
                wire::put_refusal(&mut reply, refusal.kind(), &refusal.describe(key));
                self.reply(&reply)?;
                Ok(None)
            }
            Err(refusal) => Err(End::Refused(key.to_vec(), refusal)),
        }
    }

    /// The end of a wait that will never have what it waits for.
    fn never(&mut self, key: &[u8], refusal: &Refusal) -> io::Result<()> {
        let mut reply = vec![wire::NEVER];
        if self.ours {
            wire::put_refusal(&mut reply, refusal.kind(), &refusal.describe(key));
        }
        self.reply(&reply)
    }

    /// The end of a wait.
    fn reached(&mut self, progress: Progress) -> io::Result<()> {
        match progress {
            Progress::Retired(key, number) => self.never(&key, &Refusal::Retired(number)),
            _ => self.reply(&[wire::STOP_WAITING]),
        }
    }

    /// Waits for the engine, CANCEL_WAIT or the end of the connection, and replies.
    fn block(&mut self, entry: Entry, held: &mut Held<'_>, bell: &Bell) -> std::result::Result<(), End> {
        let (ticket, bytes) = match entry {
            Entry::Pending(ticket, bytes) => (ticket, bytes),
            Entry::Ready => return Ok(self.reply(&[wire::STOP_WAITING])?),
            Entry::Retired(key, number) => return Ok(self.never(&key, &Refusal::Retired(number))?),
        };
        let out = held
            .set(bytes)
            .and_then(|()| self.send())
            .map_err(End::Io)
            .and_then(|()| self.pend(ticket, bell));
        // Whatever happened, the engine must not keep a waiter that is not served.
        self.shared.engine.cancel(ticket);
        bell.silence();
        out
    }

    fn pend(&mut self, ticket: Ticket, bell: &Bell) -> std::result::Result<(), End> {
        loop {
            let next = self.link.buffered().first().copied();
            if next == Some(wire::CANCEL_WAIT) {
                self.link.skip(1);
                let progress = self.shared.engine.cancel(ticket);
                if progress != Progress::Pending {
                    self.reached(progress)?;
                }
                return Ok(self.reply(&[wire::WAIT_CANCELED])?);
            }
            match self.shared.engine.progress(ticket) {
                Progress::Pending => {}
                ended => return Ok(self.reached(ended)?),
            }
            // Another request behind the wait stays where it is: replies go out in order.
            let seen = self.link.watch(bell, next.is_none())?;
            if seen.input && next.is_none() {
                if !self.link.fill()? {
                    return Err(End::Closed);
                }
            } else if seen.gone {
                return Err(End::Closed);
            }
        }
    }

    fn reply(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.extend_from_slice(bytes);
        if self.out.len() >= REPLY {
            self.send()
        } else {
            Ok(())
        }
    }

    fn reply_count(&mut self, n: usize) -> io::Result<()> {
        self.reply(&(n as u64).to_le_bytes())
    }

    fn reply_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.reply_count(bytes.len())?;
        self.reply(bytes)
    }

    /// An absent key gives empty bytes, as PyTorch's server does; clients wait for their keys first.
    ///
    /// Values are taken from the store as they are sent: a slow reader must not keep what others have replaced meanwhile.
    fn reply_values(&mut self, keys: &[Vec<u8>]) -> io::Result<()> {
        let shared = self.shared;
        let mut rest = keys;
        while !rest.is_empty() {
            let values = shared.engine.get(rest, BATCH);
            let mut held = shared.budget.held();
            let bytes: usize = values.iter().flatten().map(|value| value.len()).sum();
            if bytes > BATCH {
                held.take(2 * bytes)?;
            }
            rest = rest.get(values.len().max(1)..).unwrap_or_default();
            for value in values {
                match value {
                    Some(value) => self.reply_bytes(&value)?,
                    None => self.reply_count(0)?,
                }
            }
        }
        Ok(())
    }

    fn send(&mut self) -> io::Result<()> {
        if !self.out.is_empty() {
            self.link.pace(self.shared.limits.stall);
            self.link.write_all(&self.out)?;
            self.out.clear();
            // A large reply is no reason to keep its memory for the life of the connection.
            self.out.shrink_to(REPLY);
        }
        Ok(())
    }
}
