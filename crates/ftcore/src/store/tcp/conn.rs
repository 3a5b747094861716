//! One client connection: finding and greeting the server, and the conversations that take more than one reply.
//!
//! Everything here ends by the link's time limit. An `io::Error` says what the call above must know: late (see
//! `link::is_late`), cancelled (`link::reason_of`), `InvalidData` (not the protocol), anything else (the connection broke).

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use super::link::{Link, TimeLimit, Watched, hello_topic, is_late, reason_of};
use super::wire::{self, Request};
use crate::identity::hello::{Handshake, Refused, may_be_hello};
use crate::lifecycle::nonce;
use crate::store::table::leading_number;
use crate::{Credentials, Error, ErrorKind, Result, deadline_in, split_address, time_left};

/// Pauses between attempts to connect: doubled from the first to the longest, with jitter.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// One attempt: name look-up, connect and greeting each at most this long, then another is made.
const ATTEMPT: Duration = Duration::from_secs(10);
/// How long after one address of the server the next is tried beside it.
const APART: Duration = Duration::from_millis(250);
/// How long after its deadline a call waits for the server to confirm that the wait is cancelled …
const CANCEL_GRACE: Duration = Duration::from_millis(100);
/// … and to say what was missing, for the error text.
const EXPLAIN_GRACE: Duration = Duration::from_millis(50);
/// For how many keys it is asked that: the first ones of the call.
pub(super) const EXPLAINED: usize = 64;

/// A connection that greeted the server.
pub(super) struct Conn {
    pub(super) link: Link,
    /// The whole request of this call was handed to the kernel.
    pub(super) sent: bool,
    /// The server is one of ours, and says why it refuses (`wire::OURS`).
    pub(super) ours: bool,
    /// A reply may still arrive that belongs to no call: not to be used again.
    pub(super) spoiled: bool,
}

/// A way to the server that is not open yet. Its addresses are tried one after the other, each beside those that do not answer; the first connection
/// that is made gets the greeting.
pub(super) struct Opening {
    credentials: Option<Arc<Credentials>>,
    /// Not tried yet.
    addresses: VecDeque<SocketAddr>,
    /// When the first of these is tried, at the latest.
    next: Instant,
    /// Being made, the oldest first.
    connecting: Vec<Greeting>,
    /// The one that gets the greeting.
    made: Option<Greeting>,
    /// What became of the last one that was given up.
    failed: io::Error,
}

/// A connection that is being made to one address, or on which the server has not answered the greeting yet.
struct Greeting {
    conn: Conn,
    /// It is made, and the greeting has begun.
    is_said: bool,
    /// With credentials, until both ends have proved the job's secret.
    hello: Option<Box<Handshake>>,
    nonce: u32,
    /// Of the present part: connecting, or greeting.
    since: Instant,
}

/// An attempt that gave no connection: what is known of the server, and what may still come of the attempt.
pub(super) struct Missed {
    /// Late (see `link::is_late`) if nothing says that the server is not there.
    pub(super) error: io::Error,
    pub(super) opening: Option<Box<Opening>>,
}

impl From<io::Error> for Missed {
    fn from(error: io::Error) -> Self {
        Self { error, opening: None }
    }
}

/// What became of a write: its result, or why the server refused it.
pub(super) type Outcome<T> = std::result::Result<T, (ErrorKind, String)>;

/// What became of a wait.
pub(super) enum Reached {
    Done,
    /// The deadline came first.
    Late,
    /// It will not end: why.
    Never(ErrorKind, String),
}

fn not_the_ping(nonce: u32, got: u32) -> io::Error {
    wire::bad(format!("PING {nonce:#010x} was answered with {got:#010x}"))
}

fn late(text: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, text.into())
}

impl Opening {
    /// To the server with these addresses.
    pub(super) fn to(addresses: Vec<SocketAddr>, credentials: Option<&Arc<Credentials>>) -> Self {
        Self {
            credentials: credentials.cloned(),
            addresses: addresses.into(),
            next: Instant::now(),
            connecting: Vec::new(),
            made: None,
            failed: io::Error::new(io::ErrorKind::NotFound, "the name has no address"),
        }
    }

    /// Something is there: it took a connection.
    pub(super) fn is_met(&self) -> bool {
        self.made.is_some()
    }

    /// Waits for the server's answer.
    pub(super) fn end(mut self, deadline: Instant, watched: &Watched) -> std::result::Result<Conn, Missed> {
        loop {
            let made = match self.made.take() {
                Some(made) => Ok(made),
                None => self.first_made(deadline, watched),
            };
            let mut made = match made {
                Ok(made) => made,
                Err(error) => {
                    let goes_on = is_late(&error) && !self.connecting.is_empty();
                    let opening = goes_on.then(|| Box::new(self));
                    return Err(Missed { error, opening });
                }
            };
            made.conn.link.watched = watched.clone();
            match made.answer(deadline) {
                Ok(got) if got == made.nonce || got == !made.nonce => {
                    made.conn.ours = got != made.nonce;
                    return Ok(made.conn);
                }
                Ok(got) => self.failed = made.not_greeted(got),
                Err(e) if is_late(&e) => {
                    let error = late("no answer to the greeting; is the port another program's?");
                    if made.since.elapsed() < ATTEMPT {
                        self.made = Some(made);
                        let opening = Some(Box::new(self));
                        return Err(Missed { error, opening });
                    }
                    self.failed = error;
                }
                Err(e) if reason_of(&e).is_some() => return Err(e.into()),
                Err(e) => self.failed = e,
            }
        }
    }

    /// The first connection that is made. Errors: late if that may still come, or why it cannot.
    fn first_made(&mut self, deadline: Instant, watched: &Watched) -> io::Result<Greeting> {
        let mut watched = watched.clone();
        let silence = || late("no answer to the connection attempt");
        loop {
            self.begin_due();
            let Some(oldest) = self.connecting.first() else {
                return Err(std::mem::replace(&mut self.failed, silence()));
            };
            let mut turn = deadline.min(oldest.since + ATTEMPT);
            if !self.addresses.is_empty() {
                turn = turn.min(self.next);
            }
            let links = self.connecting.iter().map(|one| &one.conn.link);
            if let Some(first) = Link::first_known(links, turn, &mut watched)? {
                let one = self.connecting.remove(first);
                match one.conn.link.made() {
                    Ok(()) => return Ok(one),
                    Err(e) => self.failed = e,
                }
                self.next = Instant::now();
                continue;
            }
            let before = self.connecting.len();
            self.connecting.retain(|one| one.since.elapsed() < ATTEMPT);
            if self.connecting.len() < before {
                self.failed = silence();
            } else if time_left(deadline).is_zero() {
                return Err(silence());
            }
        }
    }

    /// Tries the next address if it is time for it, or if none is being tried.
    fn begin_due(&mut self) {
        while (self.connecting.is_empty() || time_left(self.next).is_zero())
            && let Some(address) = self.addresses.pop_front()
        {
            match Greeting::begin(&address, self.credentials.as_ref()) {
                Ok(one) => {
                    self.connecting.push(one);
                    self.next = deadline_in(APART);
                }
                Err(e) => self.failed = e,
            }
        }
    }
}

impl Greeting {
    /// Begins to connect.
    fn begin(address: &SocketAddr, credentials: Option<&Arc<Credentials>>) -> io::Result<Self> {
        let since = Instant::now();
        let conn = Conn {
            link: Link::begin(address, TimeLimit::Until(since))?,
            sent: false,
            ours: false,
            spoiled: false,
        };
        let hello = credentials
            .map(|credentials| Handshake::call(credentials.clone(), hello_topic()).map(Box::new))
            .transpose()
            .map_err(io::Error::other)?;
        Ok(Self {
            conn,
            is_said: false,
            hello,
            nonce: wire::our_ping(nonce() as u32),
            since,
        })
    }

    /// On a connection that is made: says VALIDATE and PING in one segment, with credentials after the hello; then the answer to the PING.
    fn answer(&mut self, deadline: Instant) -> io::Result<u32> {
        let is_new = !std::mem::replace(&mut self.is_said, true);
        if is_new {
            self.since = Instant::now();
        }
        self.conn.link.limit = TimeLimit::Until(deadline.min(self.since + ATTEMPT));
        if is_new && self.hello.is_none() {
            self.conn.write(&greeting(self.nonce))?;
        }
        if let Some(hello) = &mut self.hello {
            if !hello.advance(&mut self.conn.link).map_err(closed_at_hello)? {
                return Err(late("no answer to the hello"));
            }
            let records = self.hello.take().map(|hello| hello.into_records()).transpose()?;
            if let Some(records) = records.flatten() {
                self.conn.link.encrypt(records);
            }
            self.conn.write(&greeting(self.nonce))?;
        }
        wire::read_u32(&mut self.conn.link)
    }

    /// Something else than the answer to the greeting came: perhaps the refusal of a server that asks for credentials.
    fn not_greeted(&mut self, got: u32) -> io::Error {
        let mut header = [0; 16];
        let (first, rest) = header.split_at_mut(4);
        first.copy_from_slice(&got.to_le_bytes());
        if may_be_hello(first)
            && self.conn.link.read_exact(rest).is_ok()
            && let Some(refused) = Refused::seen_without_credentials(&header)
        {
            return refused.into();
        }
        not_the_ping(self.nonce, got)
    }
}

/// A server that knows no hello closes the connection: PyTorch's does.
fn closed_at_hello(e: io::Error) -> io::Error {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    match e.kind() {
        kind @ (BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof) => {
            let text = "it closed the connection at the hello of the job's credentials: is it PyTorch's server, or one that stops?";
            io::Error::new(kind, text)
        }
        _ => e,
    }
}

fn greeting(nonce: u32) -> Vec<u8> {
    encode(&[Request::Validate(wire::MAGIC), Request::Ping(nonce)])
}

impl Conn {
    /// One attempt: look-up, connect, greeting.
    pub(super) fn open(
        host: &str,
        port: u16,
        credentials: Option<&Arc<Credentials>>,
        deadline: Instant,
        watched: &Watched,
    ) -> std::result::Result<Self, Missed> {
        let addresses = resolve(host, port, deadline, watched.clone())?;
        Opening::to(addresses, credentials).end(deadline, watched)
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.link.write_all(bytes)?;
        self.sent = true;
        Ok(())
    }

    /// The answer to a PING behind a write: whether that was done.
    pub(super) fn confirmed(&mut self, nonce: u32) -> io::Result<Outcome<()>> {
        match wire::read_u32(&mut self.link)? {
            got if got == nonce => Ok(Ok(())),
            got if self.ours && got == !nonce => Ok(Err(wire::read_refusal(&mut self.link)?)),
            got => Err(not_the_ping(nonce, got)),
        }
    }

    /// The answer to a write that has one.
    pub(super) fn outcome<T>(
        &mut self,
        read: impl FnOnce(&mut Link) -> io::Result<T>,
    ) -> io::Result<Outcome<T>> {
        if self.ours {
            match wire::read_u8(&mut self.link)? {
                wire::DONE => {}
                wire::REFUSED => return Ok(Err(wire::read_refusal(&mut self.link)?)),
                other => return Err(wire::bad(format!("a write was answered with {other}"))),
            }
        }
        read(&mut self.link).map(Ok)
    }

    /// True if all keys exist now.
    pub(super) fn exist(&mut self, keys: &[Vec<u8>]) -> io::Result<bool> {
        self.write(&encode(&[Request::Check(keys.to_vec())]))?;
        self.checked()
    }

    pub(super) fn checked(&mut self) -> io::Result<bool> {
        match wire::read_u8(&mut self.link)? {
            wire::READY => Ok(true),
            wire::NOT_READY => Ok(false),
            other => Err(wire::bad(format!("CHECK was answered with {other}"))),
        }
    }

    /// The end of a WAIT or BARRIER just sent; at the deadline it is cancelled.
    pub(super) fn reached(&mut self) -> io::Result<Reached> {
        match wire::read_u8(&mut self.link) {
            Ok(code) => return self.ended(code),
            Err(e) if is_late(&e) => {}
            Err(e) => return Err(e),
        }
        self.link.limit = TimeLimit::Until(deadline_in(CANCEL_GRACE));
        self.write(&encode(&[Request::CancelWait]))?;
        match wire::read_u8(&mut self.link)? {
            wire::WAIT_CANCELED => Ok(Reached::Late),
            // The end of the wait and the cancellation crossed.
            code => {
                let ended = self.ended(code)?;
                match wire::read_u8(&mut self.link)? {
                    wire::WAIT_CANCELED => Ok(ended),
                    other => Err(wire::bad(format!("CANCEL_WAIT was answered with {other}"))),
                }
            }
        }
    }

    fn ended(&mut self, code: u8) -> io::Result<Reached> {
        match code {
            wire::STOP_WAITING => Ok(Reached::Done),
            wire::NEVER if self.ours => {
                let (kind, why) = wire::read_refusal(&mut self.link)?;
                Ok(Reached::Never(kind, why))
            }
            other => Err(wire::bad(format!("a wait was answered with {other}"))),
        }
    }

    /// After a wait ran out: the indices of the first keys that are missing, for the error text only.
    pub(super) fn missing(&mut self, keys: &[Vec<u8>]) -> Vec<usize> {
        if keys.len() < 2 {
            return Vec::new();
        }
        self.link.limit = TimeLimit::Until(deadline_in(EXPLAIN_GRACE));
        let asked = keys.len().min(EXPLAINED);
        let questions: Vec<_> = keys
            .iter()
            .take(asked)
            .map(|key| Request::Check(vec![key.clone()]))
            .collect();
        let answers = self.write(&encode(&questions)).and_then(|()| {
            (0..asked)
                .map(|_| self.checked())
                .collect::<io::Result<Vec<bool>>>()
        });
        self.explained(answers)
            .map(|there| {
                there
                    .iter()
                    .enumerate()
                    .filter(|(_, there)| !**there)
                    .map(|(i, _)| i)
                    .collect()
            })
            .unwrap_or_default()
    }

    /// After a barrier ran out: how many had arrived, for the error text only.
    pub(super) fn arrived(&mut self, key: &[u8]) -> Option<i64> {
        self.link.limit = TimeLimit::Until(deadline_in(EXPLAIN_GRACE));
        let answer = self
            .write(&encode(&[Request::Get(key.to_vec())]))
            .and_then(|()| wire::read_value(&mut self.link));
        self.explained(answer).and_then(|value| leading_number(&value))
    }

    fn explained<T>(&mut self, answer: io::Result<T>) -> Option<T> {
        self.spoiled |= answer.is_err();
        answer.ok()
    }
}

/// The requests one after the other.
pub(super) fn encode(requests: &[Request]) -> Vec<u8> {
    let mut out = Vec::new();
    requests.iter().for_each(|request| request.encode(&mut out));
    out
}

/// Host and port of the server.
pub(super) fn parse_address(addr: &str) -> Result<(String, u16)> {
    match split_address(addr).map_err(|e| e.with_op("store.connect"))? {
        (_, 0) => Err(
            Error::invalid(format!("'{addr}' has port 0, on which nothing listens")).with_op("store.connect"),
        ),
        (host, port) => Ok((host.to_owned(), port)),
    }
}

/// The addresses of `host`. The system's look-up has no deadline, so it runs on a thread that is left behind if it is late.
fn resolve(host: &str, port: u16, deadline: Instant, mut watched: Watched) -> io::Result<Vec<SocketAddr>> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(ip, port)]);
    }
    let (sender, receiver) = mpsc::channel();
    let name = host.to_owned();
    thread::Builder::new()
        .name("ox-store-dns".into())
        .spawn(move || {
            let found = (name.as_str(), port)
                .to_socket_addrs()
                .map(|found| found.collect::<Vec<_>>());
            // The caller may have gone; then it is not wanted.
            let _ = sender.send(found);
        })?;
    let deadline = deadline.min(deadline_in(ATTEMPT));
    loop {
        let turn = watched.turn(Some(deadline)).unwrap_or(deadline);
        let over = match receiver.recv_timeout(time_left(turn)) {
            Ok(found) => return found,
            Err(mpsc::RecvTimeoutError::Timeout) => turn == deadline,
            Err(mpsc::RecvTimeoutError::Disconnected) => true,
        };
        watched.look()?;
        if over {
            return Err(late(format!("looking up the name '{host}' took too long")));
        }
    }
}

/// Pauses between attempts, growing.
pub(super) struct Backoff {
    step: Duration,
}

impl Backoff {
    pub(super) fn new() -> Self {
        Self { step: FIRST_PAUSE }
    }

    /// Sleeps between half and all of the step, so that thousands of ranks do not come at the same moment; false if the
    /// deadline has then passed. Errors: a token was cancelled.
    pub(super) fn pause(&mut self, deadline: Instant, mut watched: Watched) -> io::Result<bool> {
        let jitter = (nonce() % 512) as u32;
        let end = deadline_in(self.step * (512 + jitter) / 1024).min(deadline);
        self.step = (self.step * 2).min(LONGEST_PAUSE);
        loop {
            let turn = watched.turn(Some(end)).unwrap_or(end);
            thread::sleep(time_left(turn));
            watched.look()?;
            if turn == end {
                return Ok(!time_left(deadline).is_zero());
            }
        }
    }
}
