//! The store's client: a pool of connections, each used by one call at a time.
//!
//! A call takes an idle connection (or opens one), sends its request and reads the reply, all by its deadline, so a
//! blocked wait of one thread never delays another. Requests without a reply are followed by a PING in the same segment:
//! when the call returns, the server has done it. A wait that runs out is cancelled with CANCEL_WAIT, so its
//! connection stays usable.
//!
//! A view under tokens ([`Store::cancelled_by`]) shares the pool. Its calls look at the tokens while they wait, so that nothing is given up for a
//! look: neither an attempt to connect nor a request that is on its way.

use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::conn::{Backoff, Conn, EXPLAINED, Opening, Outcome, Reached, encode, parse_address};
use super::link::{TimeLimit, Watched, is_late, reason_of};
use super::wire::{self, Request};
use crate::forked::Born;
use crate::identity::hello::Refused;
use crate::lifecycle::nonce;
use crate::store::contract::Store;
use crate::store::keys::{self, MAX_KEY};
use crate::store::table::{Refusal, sum};
use crate::{Cancel, Credentials, Error, ErrorKind, Result, deadline_in, time_left};

/// Idle connections kept for later calls.
const MAX_IDLE: usize = 16;
/// Connections kept that the server has not greeted yet. Calls with short deadlines would otherwise begin anew each time, and never get
/// through to a server that takes longer.
const MAX_UNGREETED: usize = 4;

/// A client of [`TcpStoreServer`](super::TcpStoreServer), or of PyTorch's TCPStore server.
///
/// Keys get the prefix `/` on the wire, as PyTorch's client does it, and it counts: a key has at most 8191 bytes.
/// `list` shows the keys of clients (those with that prefix); `num_keys` is the server's own number, which counts keys
/// beside them as well (a PyTorch world's `init/`).
///
/// If the connection breaks during a call, the call is made again over a new one until its deadline; except `add`,
/// `append`, `compare_set`, `delete` and `barrier` once their request was sent, which fail with `Unavailable`, as it cannot
/// be known whether the server did them.
///
/// What a server of ours refuses, it says why, and the connection stays. PyTorch's has no way to: it closes the connection, lets a value grow
/// beyond 8 MiB (this client does not read such a one), and an `add` beyond 64 bits begins again at the other end.
///
/// With credentials each connection begins with the keyed hello: the server must have those of the same job. PyTorch's server has none.
///
/// A process that was forked off goes on with connections of its own.
///
/// `Unavailable` is a server that is known not to be there: it refused or closed a connection. One that has not answered, not even the
/// attempt to connect, is `Timeout`: a caller that looks in short slices may look again.
///
/// ```
/// use std::time::Duration;
///
/// use ftcore::store::{Store, TcpStore, TcpStoreServer};
/// use ftcore::deadline_in;
///
/// let server = TcpStoreServer::bind("127.0.0.1:0")?; // on rank 0
/// let soon = deadline_in(Duration::from_secs(5));
/// let store = TcpStore::connect(&server.local_addr().to_string(), soon)?; // on every rank
/// store.set("key", b"value", soon)?;
/// assert_eq!(store.get("key", soon)?, b"value");
/// # Ok::<(), ftcore::Error>(())
/// ```
pub struct TcpStore {
    server: Arc<Server>,
    watched: Watched,
}

/// What the views of a store share.
struct Server {
    host: String,
    port: u16,
    address: String,
    credentials: Option<Arc<Credentials>>,
    pools: Mutex<Pools>,
}

/// Connections between calls.
struct Pools {
    idle: Vec<Conn>,
    ungreeted: Vec<Opening>,
    /// Whose they are: two processes that used one connection would read each other's answers.
    born: Born,
}

impl Default for Pools {
    fn default() -> Self {
        Self {
            idle: Vec::new(),
            ungreeted: Vec::new(),
            born: Born::here(),
        }
    }
}

/// What may be done when the connection breaks after the request was sent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Repeat {
    Again,
    Never,
}

/// The frame of a call, for its errors.
#[derive(Clone, Copy)]
struct Call<'a> {
    op: &'static str,
    keys: &'a [&'a str],
    deadline: Instant,
    repeat: Repeat,
    since: Instant,
}

impl<'a> Call<'a> {
    fn new(op: &'static str, keys: &'a [&'a str], deadline: Instant, repeat: Repeat) -> Self {
        Self {
            op,
            keys,
            deadline,
            repeat,
            since: Instant::now(),
        }
    }

    fn waited(&self) -> f64 {
        self.since.elapsed().as_secs_f64()
    }

    fn subject(&self) -> String {
        match self.keys {
            [] => String::new(),
            [key] => format!(" about key {}", keys::name(key)),
            many => format!(" about keys {}", keys::names(many)),
        }
    }
}

/// What a wait came to.
enum Waited<T> {
    Done(T),
    /// The deadline came first; the keys then known to be missing.
    Late(Vec<usize>),
    /// It will not end: why.
    Never(ErrorKind, String),
}

impl TcpStore {
    /// Connects to the server at `addr` (`host:port`, `[v6]:port`), trying again until `deadline` if it is not there yet; with the credentials
    /// of the environment ([`Credentials::from_env`]), if there are any.
    ///
    /// # Errors
    /// `Unavailable`, naming the address, the time and the last cause, if by the deadline the server was not there, or closed the
    /// connection; `Timeout` if it did not answer; `Protocol` if what answers is not a TCPStore server, or one end refuses the other's credentials,
    /// which says which side lacks which; `InvalidArgument` for a malformed address. Those of [`Credentials::load`].
    pub fn connect(addr: &str, deadline: Instant) -> Result<Self> {
        let credentials = Credentials::from_env().map_err(|e| e.with_op("store.connect"))?;
        Self::connect_with(addr, credentials, deadline)
    }

    /// As [`connect`](Self::connect), with these credentials, or none.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub fn connect_with(
        addr: &str,
        credentials: Option<Arc<Credentials>>,
        deadline: Instant,
    ) -> Result<Self> {
        let (host, port) = parse_address(addr)?;
        let server = Server {
            host,
            port,
            address: addr.to_owned(),
            credentials,
            pools: Mutex::default(),
        };
        let store = Self {
            server: Arc::new(server),
            watched: Watched::default(),
        };
        let conn = store.open(
            &Call::new("store.connect", &[], deadline, Repeat::Again),
            &mut Backoff::new(),
        )?;
        store.give_back(conn);
        Ok(store)
    }

    /// The address of the server, as it was given.
    pub fn address(&self) -> &str {
        &self.server.address
    }

    fn error(&self, kind: ErrorKind, call: &Call<'_>, text: String) -> Error {
        Error::new(kind, text)
            .with_op(call.op)
            .with_peer_address(&self.server.address)
    }

    /// The connections of this process.
    fn pools(&self) -> MutexGuard<'_, Pools> {
        let mut pools = self.server.pools.lock().unwrap_or_else(PoisonError::into_inner);
        if pools.born.is_elsewhere() {
            *pools = Pools::default();
        }
        pools
    }

    /// As in a process that was forked off this one.
    #[cfg(test)]
    pub(super) fn fork(&self) {
        self.pools().born = Born::in_parent();
    }

    /// An idle connection that is still open.
    fn take_idle(&self) -> Option<Conn> {
        loop {
            let conn = self.pools().idle.pop()?;
            if conn.link.is_quiet() {
                return Some(conn);
            }
            tracing::debug!(server = %self.server.address, "an idle store connection broke");
        }
    }

    fn give_back(&self, mut conn: Conn) {
        conn.link.watched = Watched::default();
        let mut pools = self.pools();
        if !conn.spoiled && pools.idle.len() < MAX_IDLE {
            pools.idle.push(conn);
        }
    }

    /// Opens a connection, trying until the deadline.
    fn open(&self, call: &Call<'_>, backoff: &mut Backoff) -> Result<Conn> {
        if time_left(call.deadline).is_zero() {
            return Err(self.error(
                ErrorKind::Timeout,
                call,
                "no time was left to connect to the server".into(),
            ));
        }
        let mut tries = 0u32;
        let mut away: Option<io::Error> = None;
        loop {
            let earlier = self.pools().ungreeted.pop();
            let is_first = earlier.is_none();
            let missed = match earlier {
                Some(opening) => opening.end(call.deadline, &self.watched),
                None => {
                    let Server { host, port, .. } = &*self.server;
                    let credentials = self.server.credentials.as_ref();
                    Conn::open(host, *port, credentials, call.deadline, &self.watched)
                }
            };
            if let Err(missed) = &missed
                && let Some(reason) = reason_of(&missed.error)
            {
                return Err(reason.clone());
            }
            let missed = match missed {
                Ok(conn) => return Ok(conn),
                // It broke, whenever that was.
                Err(missed) if !is_first && missed.opening.is_none() => continue,
                Err(missed) => missed,
            };
            tries += 1;
            let is_there = missed.opening.as_ref().is_some_and(|opening| opening.is_met());
            self.keep_ungreeted(missed.opening.map(|opening| *opening));
            let mut last = missed.error;
            if let Some(refused) = Refused::of(&last) {
                let text =
                    format!("the store server there and this process do not trust each other: {refused}");
                return Err(self.error(ErrorKind::Protocol, call, text).with_source(last));
            }
            if last.kind() == io::ErrorKind::InvalidData {
                return Err(self.error(
                    ErrorKind::Protocol,
                    call,
                    format!("what answers there is not a TCPStore server: {last}"),
                ));
            }
            tracing::debug!(server = %self.server.address, error = %last, tries, "store server not reached yet");
            // An attempt that ran out of time before it met a server takes nothing back.
            if is_late(&last) && !is_there {
                last = away.take().unwrap_or(last);
            }
            if !self.pause(backoff, call)? {
                let kind = match is_late(&last) {
                    true => ErrorKind::Timeout,
                    false => ErrorKind::Unavailable,
                };
                let tries = if tries == 1 {
                    "1 try".to_owned()
                } else {
                    format!("{tries} tries")
                };
                let text = format!(
                    "no TCPStore server was reached there in {:.1} s ({tries}); the last one failed with: {last}",
                    call.waited()
                );
                return Err(self.error(kind, call, text).with_source(last));
            }
            away = Some(last).filter(|last| !is_late(last));
        }
    }

    /// Before the next attempt; false if there is no time for one. Errors: the reason of a token.
    fn pause(&self, backoff: &mut Backoff, call: &Call<'_>) -> Result<bool> {
        backoff
            .pause(call.deadline, self.watched.clone())
            .map_err(|e| match reason_of(&e) {
                Some(reason) => reason.clone(),
                None => self.error(ErrorKind::Unavailable, call, e.to_string()),
            })
    }

    fn keep_ungreeted(&self, opening: Option<Opening>) {
        let mut pools = self.pools();
        if pools.ungreeted.len() < MAX_UNGREETED {
            pools.ungreeted.extend(opening);
        }
    }

    /// Makes a call over an idle or a new connection, again if that is allowed after the connection broke.
    fn call<T>(&self, call: &Call<'_>, mut f: impl FnMut(&mut Conn) -> io::Result<T>) -> Result<T> {
        let mut backoff = Backoff::new();
        loop {
            let (mut conn, pooled) = match self.take_idle() {
                Some(conn) => (conn, true),
                None => (self.open(call, &mut backoff)?, false),
            };
            conn.sent = false;
            conn.link.limit = TimeLimit::Until(call.deadline);
            conn.link.watched = self.watched.clone();
            let lost = match f(&mut conn) {
                Ok(out) => {
                    self.give_back(conn);
                    return Ok(out);
                }
                Err(e) if is_late(&e) => {
                    let carried_out = if conn.sent && call.repeat == Repeat::Never {
                        "; it may have been done or not"
                    } else {
                        ""
                    };
                    let text = format!(
                        "the server did not answer{} within {:.1} s{carried_out}",
                        call.subject(),
                        call.waited()
                    );
                    return Err(self.error(ErrorKind::Timeout, call, text));
                }
                Err(e) if e.kind() == io::ErrorKind::InvalidData => {
                    let text = format!("the server's answer{} is not the protocol: {e}", call.subject());
                    return Err(self.error(ErrorKind::Protocol, call, text));
                }
                Err(e) => match reason_of(&e) {
                    // The connection is closed, and with it what the server still does for this call.
                    Some(reason) => return Err(reason.clone()),
                    None => e,
                },
            };
            if conn.sent && call.repeat == Repeat::Never {
                let text = format!(
                    "the connection was lost during the call{}; it may have been done or not: {lost}",
                    call.subject()
                );
                return Err(self.error(ErrorKind::Unavailable, call, text).with_source(lost));
            }
            // A pooled connection may have been stale; a new one that breaks is a server in trouble.
            if !pooled && !self.pause(&mut backoff, call)? {
                let text = format!(
                    "the connection was lost{} again and again for {:.1} s: {lost}",
                    call.subject(),
                    call.waited()
                );
                return Err(self.error(ErrorKind::Unavailable, call, text).with_source(lost));
            }
        }
    }

    /// A call that reads nothing but the confirmation.
    fn confirmed(&self, call: &Call<'_>, request: Request) -> Result<()> {
        let nonce = nonce() as u32;
        let bytes = sized(call.op, encode(&[request, Request::Ping(nonce)]))?;
        let outcome = self.call(call, |conn| {
            conn.write(&bytes)?;
            conn.confirmed(nonce)
        })?;
        self.done(call, outcome)
    }

    /// A server of ours says why it refuses; the connection stays.
    fn done<T>(&self, call: &Call<'_>, outcome: Outcome<T>) -> Result<T> {
        outcome.map_err(|(kind, why)| self.error(kind, call, why))
    }

    fn values(&self, op: &'static str, keys: &[&str], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        keys::check_keys(op, keys)?;
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let on_wire = wire_keys(op, keys)?;
        let wait = sized(op, encode(&[Request::Wait(on_wire.clone())]))?;
        let fetch = match on_wire.as_slice() {
            [key] => encode(&[Request::Get(key.clone())]),
            many => encode(&[Request::MultiGet(many.to_vec())]),
        };
        let call = Call::new(op, keys, deadline, Repeat::Again);
        let out = self.call(&call, |conn| {
            loop {
                conn.link.limit = TimeLimit::Until(deadline);
                conn.write(&wait)?;
                match conn.reached()? {
                    Reached::Done => {}
                    Reached::Late => return Ok(Waited::Late(conn.missing(&on_wire))),
                    Reached::Never(kind, why) => return Ok(Waited::Never(kind, why)),
                }
                conn.write(&fetch)?;
                let values = keys
                    .iter()
                    .map(|_| wire::read_value(&mut conn.link))
                    .collect::<io::Result<Vec<_>>>()?;
                // An absent key reads as empty. Empty ones are asked for, as they may have been deleted in between.
                if values.iter().all(|v| !v.is_empty()) || conn.exist(&on_wire)? {
                    return Ok(Waited::Done(values));
                }
            }
        })?;
        self.waited(&call, out)
    }

    fn waited<T>(&self, call: &Call<'_>, out: Waited<T>) -> Result<T> {
        match out {
            Waited::Done(out) => Ok(out),
            Waited::Never(kind, why) => Err(self.error(kind, call, why)),
            Waited::Late(missing) => {
                let missing: Vec<&str> = missing
                    .iter()
                    .filter_map(|i| call.keys.get(*i).copied())
                    .collect();
                let asked = call.keys.len().min(EXPLAINED);
                Err(
                    keys::wait_timed_out(call.op, call.keys, asked, &missing, call.since)
                        .with_peer_address(&self.server.address),
                )
            }
        }
    }

    /// PyTorch's protocol has no error replies: its server closes the connection if it refuses a write. If that is what happened (`lost`),
    /// looks at the value to say why.
    fn explain(&self, lost: Error, call: &Call<'_>, why: impl FnOnce(&[u8]) -> Option<Refusal>) -> Error {
        let [key] = call.keys else { return lost };
        if lost.kind() != ErrorKind::Unavailable || time_left(call.deadline).is_zero() {
            return lost;
        }
        let Ok(on_wire) = wire_key(call.op, key) else {
            return lost;
        };
        let look = Call {
            deadline: call.deadline.min(deadline_in(Duration::from_secs(1))),
            repeat: Repeat::Again,
            ..*call
        };
        let value = self.call(&look, |conn| {
            if !conn.exist(std::slice::from_ref(&on_wire))? {
                return Ok(None);
            }
            conn.write(&encode(&[Request::Get(on_wire.clone())]))?;
            wire::read_value(&mut conn.link).map(Some)
        });
        match value.ok().flatten().and_then(|value| why(&value)) {
            Some(refusal) => refusal
                .into_error(call.op, key)
                .with_peer_address(&self.server.address),
            None => lost,
        }
    }
}

/// Refuses what our server would: it has no way to say so but to close the connection.
fn sized(op: &'static str, bytes: Vec<u8>) -> Result<Vec<u8>> {
    let limit = wire::MAX_REQUEST;
    if bytes.len() > limit {
        let text = format!(
            "a request of {} bytes; at most {limit} are allowed, so split it",
            bytes.len()
        );
        return Err(Error::invalid(text).with_op(op));
    }
    Ok(bytes)
}

fn wire_key(op: &'static str, key: &str) -> Result<Vec<u8>> {
    keys::check_key(op, key)?;
    if key.len() >= MAX_KEY {
        let text = format!(
            "key {} has {} bytes; at most {} are allowed",
            keys::name(key),
            key.len(),
            MAX_KEY - 1
        );
        return Err(Error::invalid(text).with_op(op));
    }
    Ok([b"/", key.as_bytes()].concat())
}

fn wire_keys(op: &'static str, keys: &[&str]) -> Result<Vec<Vec<u8>>> {
    keys.iter().map(|key| wire_key(op, key)).collect()
}

impl Store for TcpStore {
    fn set(&self, key: &str, value: &[u8], deadline: Instant) -> Result<()> {
        let op = "store.set";
        keys::check_pair(op, key, value)?;
        let request = Request::Set(wire_key(op, key)?, value.to_vec());
        self.confirmed(&Call::new(op, &[key], deadline, Repeat::Again), request)
    }

    fn get(&self, key: &str, deadline: Instant) -> Result<Vec<u8>> {
        Ok(self
            .values("store.get", &[key], deadline)?
            .pop()
            .unwrap_or_default())
    }

    fn add(&self, key: &str, amount: i64, deadline: Instant) -> Result<i64> {
        let op = "store.add";
        let bytes = encode(&[Request::Add(wire_key(op, key)?, amount)]);
        let keys = [key];
        let call = Call::new(op, &keys, deadline, Repeat::Never);
        let outcome = self
            .call(&call, |conn| {
                conn.write(&bytes)?;
                conn.outcome(wire::read_i64)
            })
            .map_err(|lost| self.explain(lost, &call, |value| sum(Some(value), amount).err()))?;
        self.done(&call, outcome)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8], deadline: Instant) -> Result<Vec<u8>> {
        let op = "store.compare_set";
        keys::check_pair(op, key, desired)?;
        keys::check_pair(op, key, expected)?;
        let (expected, desired) = (expected.to_vec(), desired.to_vec());
        let bytes = encode(&[Request::CompareSet {
            key: wire_key(op, key)?,
            expected,
            desired,
        }]);
        let keys = [key];
        let call = Call::new(op, &keys, deadline, Repeat::Never);
        let outcome = self.call(&call, |conn| {
            conn.write(&bytes)?;
            conn.outcome(wire::read_value)
        })?;
        self.done(&call, outcome)
    }

    fn check(&self, keys: &[&str], deadline: Instant) -> Result<bool> {
        let op = "store.check";
        keys::check_keys(op, keys)?;
        if keys.is_empty() {
            return Ok(true);
        }
        let bytes = sized(op, encode(&[Request::Check(wire_keys(op, keys)?)]))?;
        self.call(&Call::new(op, keys, deadline, Repeat::Again), |conn| {
            conn.write(&bytes)?;
            conn.checked()
        })
    }

    fn wait(&self, keys: &[&str], deadline: Instant) -> Result<()> {
        let op = "store.wait";
        keys::check_keys(op, keys)?;
        if keys.is_empty() {
            return Ok(());
        }
        let on_wire = wire_keys(op, keys)?;
        let bytes = sized(op, encode(&[Request::Wait(on_wire.clone())]))?;
        let call = Call::new(op, keys, deadline, Repeat::Again);
        let out = self.call(&call, |conn| {
            conn.write(&bytes)?;
            Ok(match conn.reached()? {
                Reached::Done => Waited::Done(()),
                Reached::Late => Waited::Late(conn.missing(&on_wire)),
                Reached::Never(kind, why) => Waited::Never(kind, why),
            })
        })?;
        self.waited(&call, out)
    }

    fn delete(&self, key: &str, deadline: Instant) -> Result<bool> {
        let op = "store.delete";
        let bytes = encode(&[Request::Delete(wire_key(op, key)?)]);
        self.call(&Call::new(op, &[key], deadline, Repeat::Never), |conn| {
            conn.write(&bytes)?;
            Ok(wire::read_i64(&mut conn.link)? != 0)
        })
    }

    fn append(&self, key: &str, value: &[u8], deadline: Instant) -> Result<()> {
        let op = "store.append";
        keys::check_pair(op, key, value)?;
        let keys = [key];
        let call = Call::new(op, &keys, deadline, Repeat::Never);
        self.confirmed(&call, Request::Append(wire_key(op, key)?, value.to_vec()))
    }

    fn multi_get(&self, keys: &[&str], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        self.values("store.multi_get", keys, deadline)
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])], deadline: Instant) -> Result<()> {
        let op = "store.multi_set";
        keys::check_pairs(op, pairs)?;
        if pairs.is_empty() {
            return Ok(());
        }
        let on_wire = pairs
            .iter()
            .map(|(key, value)| Ok((wire_key(op, key)?, value.to_vec())))
            .collect::<Result<Vec<_>>>()?;
        let keys: Vec<&str> = pairs.iter().map(|(key, _)| *key).collect();
        self.confirmed(
            &Call::new(op, &keys, deadline, Repeat::Again),
            Request::MultiSet(on_wire),
        )
    }

    fn num_keys(&self, deadline: Instant) -> Result<i64> {
        let bytes = encode(&[Request::NumKeys]);
        self.call(
            &Call::new("store.num_keys", &[], deadline, Repeat::Again),
            |conn| {
                conn.write(&bytes)?;
                wire::read_i64(&mut conn.link)
            },
        )
    }

    fn list(&self, deadline: Instant) -> Result<Vec<String>> {
        let bytes = encode(&[Request::ListKeys]);
        let found = self.call(&Call::new("store.list", &[], deadline, Repeat::Again), |conn| {
            conn.write(&bytes)?;
            wire::read_listing(&mut conn.link)
        })?;
        let mut keys: Vec<String> = found
            .iter()
            .filter_map(|key| key.strip_prefix(b"/"))
            .map(|key| String::from_utf8_lossy(key).into_owned())
            .collect();
        keys.sort_unstable();
        Ok(keys)
    }

    fn barrier(&self, key: &str, world_size: u32, deadline: Instant) -> Result<()> {
        keys::check_barrier(key, world_size)?;
        let op = "store.barrier";
        let on_wire = wire_key(op, key)?;
        let bytes = encode(&[Request::Barrier {
            key: on_wire.clone(),
            world_size: i64::from(world_size),
        }]);
        let keys = [key];
        let call = Call::new(op, &keys, deadline, Repeat::Never);
        // `Some`: the deadline came first, with the number of callers that had arrived if that is known.
        let late = self.call(&call, |conn| {
            conn.write(&bytes)?;
            Ok(match conn.reached()? {
                Reached::Done => Ok(None),
                Reached::Late => Ok(Some(conn.arrived(&on_wire))),
                Reached::Never(kind, why) => Err((kind, why)),
            })
        })?;
        match self.done(&call, late)? {
            None => Ok(()),
            Some(arrived) => Err(keys::barrier_timed_out(key, arrived, world_size, call.since)
                .with_peer_address(&self.server.address)),
        }
    }

    fn cancelled_by(&self, cancel: &Cancel) -> Option<Arc<dyn Store>> {
        Some(Arc::new(Self {
            server: self.server.clone(),
            watched: self.watched.and(cancel),
        }))
    }
}

impl fmt::Debug for TcpStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpStore")
            .field("address", &self.server.address)
            .finish_non_exhaustive()
    }
}
