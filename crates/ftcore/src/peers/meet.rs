//! How the ranks of a configuration meet: rank 0 publishes its address and a token in the store; the others connect and greet; rank 0 lets all
//! go on at once, or tells all what is wrong.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use super::line::{Line, refused_here};
use super::record::{Published, hex, refusal, refused};
use super::wire::{Frame, Hello, Kind, Setup, TOKEN};
use crate::bounded::bounded;
use crate::engine::Place;
use crate::forked::Parents;
use crate::identity::hello::{Handshake, NO_RANK, Refused, Topic};
use crate::identity::strangers::{Caller as _, Greeted, Strangers};
use crate::identity::{INSECURE, is_insecure, may_listen};
use crate::lifecycle::nonce;
use crate::{
    Configuration, Credentials, Epoch, Error, ErrorKind, Result, deadline_in, descriptors, host_address,
    time_left, variable_prefix,
};

/// How long the store is asked when something has failed already.
const TELLING: Duration = Duration::from_millis(500);

/// How a backend's ranks meet.
#[derive(Debug, Clone)]
pub struct Terms {
    /// The backend's name, which is part of keys and of the names of threads.
    pub backend: &'static str,
    /// What all ranks must have in common, in words: the library and its version, options. 128 bytes of it count.
    pub setup: String,
    /// The library takes one rank per process.
    pub one_per_process: bool,
    /// What ranks prove to each other.
    pub credentials: Option<Arc<Credentials>>,
    /// Where rank 0 listens.
    pub door: Door,
}

/// What the environment says of rank 0's port. Read when a group is made, not when it meets: a vendor's library may write to the environment
/// on a thread of its own meanwhile, and no lock of ours holds C's `setenv` up.
#[derive(Debug, Clone, Default)]
pub struct Door {
    /// The address that the other hosts are told; without it the one of [`host_address::outward`].
    pub(super) host: Option<String>,
    /// Without credentials it is reached from other hosts all the same.
    pub(super) is_insecure: bool,
}

impl Door {
    /// Of the groups of `backend`.
    pub fn of(backend: &str) -> Self {
        Self {
            host: std::env::var(variable(backend)).ok(),
            is_insecure: is_insecure(false),
        }
    }
}

fn variable(backend: &str) -> String {
    format!("{}HOST", variable_prefix(backend))
}

impl Terms {
    /// The address under which other hosts reach this one.
    fn own_address(&self) -> Result<IpAddr> {
        match &self.door.host {
            Some(host) => host.parse().map_err(|_| {
                let variable = variable(self.backend);
                Error::invalid(format!("{variable}={host} is not an IP address"))
            }),
            None => Ok(host_address::outward(false).unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))),
        }
    }

    fn is_open(&self) -> bool {
        self.credentials.is_some() || self.door.is_insecure
    }

    fn key(&self, c: &Configuration) -> String {
        format!("{}/{}/{}", c.prefix, c.epoch, self.backend)
    }

    /// On rank 0: tells those that come later in the store why it cannot be met.
    fn refuse(&self, c: &Configuration, error: &Error) {
        // If that fails, too, they wait until their deadline.
        let _ = c
            .store
            .set(&self.key(c), refused(error).as_bytes(), deadline_in(TELLING));
    }
}

/// The other ranks, met: their connections, over which [`Peers`](super::Peers) listens.
#[derive(Debug)]
pub struct Meeting {
    pub(super) backend: &'static str,
    pub(super) place: Place,
    /// Shared with those that [watch](Self::watch) them.
    pub(super) lines: Arc<Mutex<Vec<(u32, Line)>>>,
    /// Before the keys of this meeting in the store.
    pub(super) key: String,
    /// The rank before this one in an order of ranks by their processes, which is the same in every group of these processes. `None` for the first.
    pub before: Option<u32>,
}

/// One for every process and life; forked children inherit it, as the duplicates that they are.
fn process() -> u64 {
    static ID: OnceLock<u64> = OnceLock::new();
    *ID.get_or_init(nonce)
}

/// A name that cannot be guessed. Without a file: there may be none to be had.
fn token() -> [u8; TOKEN] {
    let (a, b) = (nonce().to_ne_bytes(), nonce().to_ne_bytes());
    let mut token = [0; TOKEN];
    token
        .iter_mut()
        .zip(a.into_iter().chain(b))
        .for_each(|(to, from)| *to = from);
    token
}

/// Meets the other ranks. A call of all ranks.
///
/// Errors: `Timeout` names the ranks that have not come (L33); `Mismatch` says how two ranks are set up; `Unsupported` names two ranks of one
/// process where [`one_per_process`](Terms::one_per_process) forbids it, on these two; `InvalidArgument` for the second one that comes as a rank;
/// `Protocol` if credentials differ, or another rank cannot take part for a fault of its own; the reason of the token.
pub fn meet(c: &Configuration, terms: &Terms) -> Result<Meeting> {
    let key = terms.key(c);
    let met = |token, before, lines| Meeting {
        backend: terms.backend,
        place: Place::of(c),
        lines: Arc::new(Mutex::new(lines)),
        key: format!("{key}/{}", hex(token)),
        before,
    };
    if c.world_size == 1 {
        return Ok(met(token(), None, Vec::new()));
    }
    let hello = |token| Hello {
        token,
        rank: c.rank,
        world: c.world_size,
        epoch: c.epoch.0,
        process: process(),
        setup: Setup::of(&terms.setup),
    };
    if c.rank == 0 {
        let (listener, published) = open(c, terms).inspect_err(|e| terms.refuse(c, e))?;
        let own = hello(published.token);
        c.store.set(&key, published.encode().as_bytes(), c.deadline)?;
        let (guests, before) = collect(c, terms, &listener, &own)?;
        let lines = guests.into_iter().map(|g| (g.hello.rank, g.stream));
        return Ok(met(published.token, before, lines.collect()));
    }
    let bytes = from_store(c, &key)?;
    if let Some(error) = refusal(&bytes, c.rank) {
        return Err(error);
    }
    let published = Published::decode(&bytes).ok_or_else(|| {
        Error::new(
            ErrorKind::Protocol,
            format!("what stands at '{key}' is not rank 0's address"),
        )
    })?;
    let connected = connect(c, terms, &published, &hello(published.token));
    let (stream, before) = connected.map_err(|error| match error.kind() {
        // The port may be closed because another rank came first and did not fit: that stands in the store then.
        ErrorKind::Io | ErrorKind::PeerLost => {
            let now = c.store.get(&key, deadline_in(TELLING));
            now.ok()
                .and_then(|record| refusal(&record, c.rank))
                .unwrap_or(error)
        }
        _ => error,
    })?;
    Ok(met(published.token, before, vec![(0, stream)]))
}

/// Rank 0's port, and what the others are told of it.
fn open(c: &Configuration, terms: &Terms) -> Result<(Parents<TcpListener>, Published)> {
    let io = |e| refused_here("rank 0 cannot listen for control connections", e);
    let is_open = terms.is_open();
    if !is_open && terms.door.host.is_some() {
        may_listen(
            terms.backend,
            SocketAddr::new(terms.own_address()?, 0),
            None,
            false,
        )?;
    }
    let loopback = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let (address, bind) = match is_open {
        true => match terms.own_address()? {
            v4 @ IpAddr::V4(_) => (v4, Ipv4Addr::UNSPECIFIED.into()),
            v6 @ IpAddr::V6(_) => (v6, Ipv6Addr::UNSPECIFIED.into()),
        },
        false => (loopback, loopback),
    };
    let listener = descriptors::with_room(|| TcpListener::bind((bind, 0))).map_err(io)?;
    listener.set_nonblocking(true).map_err(io)?;
    descriptors::make_room(&listener, c.world_size);
    let port = listener.local_addr().map_err(io)?.port();
    let published = Published {
        token: token(),
        port,
        host: host_address::identity(),
        address,
    };
    Ok((listener.into(), published))
}

/// Rank 0's record.
fn from_store(c: &Configuration, key: &str) -> Result<Vec<u8>> {
    c.store.get(key, c.deadline).map_err(|e| match e.kind() {
        ErrorKind::Timeout => Error::timeout(format!(
            "rank 0 of {} has not published its address (phase: rendezvous)",
            c.world_size
        ))
        .with_source(e),
        _ => e,
    })
}

/// A rank that has greeted rank 0.
struct Guest {
    hello: Hello,
    stream: Line,
}

/// Rank 0's side: every rank's connection and the rank before this one, or the same verdict for all ranks.
fn collect(
    c: &Configuration,
    terms: &Terms,
    listener: &TcpListener,
    own: &Hello,
) -> Result<(Vec<Guest>, Option<u32>)> {
    let io = |e| refused_here("rank 0 cannot accept control connections", e);
    let mut guests: Vec<Guest> = Vec::new();
    let about = topic(terms.backend, c.epoch, NO_RANK);
    let mut strangers = Strangers::new(
        terms.backend,
        terms.credentials.clone(),
        about,
        c.world_size as usize,
    );
    let next = || {
        let (stream, from) = descriptors::with_room(|| listener.accept())?;
        Ok((open_line(stream), from.to_string()))
    };
    let mut verdict = Ok(());
    while verdict.is_ok() && !are_all_here(&mut guests, c.world_size) {
        if let Some(reason) = c.cancel.reason() {
            verdict = Err(reason);
        } else if time_left(c.deadline).is_zero() {
            let missing: Vec<u32> = (1..c.world_size)
                .filter(|r| guests.iter().all(|g| g.hello.rank != *r))
                .collect();
            let (missing, world, turned_away) = (ranks(&missing), c.world_size, strangers.hint());
            let text = format!("{missing} of {world} did not come (phase: control connections){turned_away}");
            verdict = Err(Error::timeout(text));
        } else {
            match strangers.accept(next).and_then(|()| strangers.greeted()) {
                Err(e) => verdict = Err(io(e)),
                Ok(None) => std::thread::sleep(Duration::from_micros(300)),
                Ok(Some(mut greeted)) => match judge(&mut greeted, own) {
                    Ok(hello) if is_taken(&mut guests, hello.rank) => {
                        let e = taken(hello.rank);
                        let told = Frame::of_error(Kind::Refused, 0, &e, Some(hello.rank));
                        let _ = told.write(&mut greeted.caller);
                        strangers.drop(&greeted.from, &e.message());
                    }
                    Ok(hello) => guests.push(Guest {
                        hello,
                        stream: greeted.caller,
                    }),
                    Err(e) if e.kind() == ErrorKind::Mismatch => verdict = Err(e),
                    Err(e) => strangers.drop(&greeted.from, &e.message()),
                },
            }
        }
    }
    let mut order: Vec<(u64, u32)> = guests.iter().map(|g| (g.hello.process, g.hello.rank)).collect();
    order.push((own.process, 0));
    order.sort_unstable();
    let is_asked = terms.one_per_process && verdict.is_ok();
    let alone = |rank| match is_asked {
        true => one_per_process(&order, rank, terms.backend),
        false => Ok(()),
    };
    verdict = verdict.and_then(|()| alone(0));
    let before = |rank: u32| {
        let place = order.iter().position(|(_, r)| *r == rank)?;
        order.get(place.checked_sub(1)?).map(|(_, r)| *r)
    };
    for guest in &mut guests {
        let rank = guest.hello.rank;
        let frame = match (&verdict, alone(rank)) {
            (_, Err(own)) => Frame::of_error(Kind::Refused, 0, &own, Some(rank)),
            (Err(e), _) => Frame::of_error(Kind::Refused, 0, e, None),
            _ => {
                let before = before(rank).map_or(0, |r| u64::from(r) + 1);
                Frame::new(Kind::Ready, 0, before, "")
            }
        };
        if frame.write(&mut guest.stream).is_err() && verdict.is_ok() {
            let peer = guest.hello.rank;
            let text = format!("rank {peer} could not be told to go on");
            verdict = Err(Error::new(ErrorKind::PeerLost, text).with_peer(peer));
        }
    }
    if let Err(error) = &verdict {
        // The ranks that were told to go on need not wait for one that was not. One that cannot be told finds its connection closed.
        let frame = Frame::of_error(Kind::Failed, 0, error, error.context().peer);
        guests.iter_mut().for_each(|g| drop(frame.write(&mut g.stream)));
        // Before the port is closed: who finds it so looks there. And after those that are here were told, who need no store for it.
        terms.refuse(c, error);
    }
    verdict.map(|()| (guests, before(0)))
}

/// True once all others have come and are still there: one that has gone is waited for again.
fn are_all_here(guests: &mut Vec<Guest>, world: u32) -> bool {
    let is_full = |guests: &[Guest]| guests.len() + 1 >= world as usize;
    if is_full(guests) {
        guests.retain_mut(|g| !g.stream.has_ended());
    }
    is_full(guests)
}

/// True if a guest came as `rank` and is still there. One that has gone leaves its place to its successor.
fn is_taken(guests: &mut Vec<Guest>, rank: u32) -> bool {
    guests.retain_mut(|g| g.hello.rank != rank || !g.stream.has_ended());
    guests.iter().any(|g| g.hello.rank == rank)
}

/// What a second one that comes as `rank` is told; the first one's place is not touched.
fn taken(rank: u32) -> Error {
    let text =
        format!("rank {rank} is here already: another process, or another group of this one, came as it");
    Error::invalid(text).with_peer(rank)
}

/// An error for `rank` if two of the ranks, in the order of their processes, are in one: `Unsupported` if it is one of two such, else `Protocol`.
fn one_per_process(order: &[(u64, u32)], rank: u32, backend: &str) -> Result<()> {
    let pairs = order.iter().zip(order.iter().skip(1));
    let pairs = pairs.filter(|(a, b)| a.0 == b.0).map(|(a, b)| (a.1, b.1));
    let own = pairs.clone().find(|(a, b)| [*a, *b].contains(&rank));
    let kind = match own {
        Some(_) => ErrorKind::Unsupported,
        None => ErrorKind::Protocol,
    };
    match own.or_else(|| pairs.into_iter().next()) {
        Some((a, b)) => Err(Error::new(
            kind,
            format!(
                "ranks {a} and {b} are in one process, and {backend} takes one rank per process. Run them as processes, or isolated (each in a \
                 child process)"
            ),
        )),
        None => Ok(()),
    }
}

/// "rank 2" or "ranks 2, 3".
pub fn ranks(list: &[u32]) -> String {
    let names: Vec<String> = list.iter().map(ToString::to_string).collect();
    match list {
        [one] => format!("rank {one}"),
        _ => format!("ranks {}", names.join(", ")),
    }
}

/// What the hello of a control connection is for.
fn topic(backend: &str, epoch: Epoch, from: u32) -> Topic {
    Topic::new(backend, epoch, from, 0)
}

/// A connection that came in, as strangers have it.
fn open_line(stream: TcpStream) -> Result<Line> {
    let set = stream
        .set_nonblocking(true)
        .and_then(|()| stream.set_nodelay(true));
    set.map_err(|e| Error::io("a control connection", e))?;
    Ok(stream.into())
}

/// Who a connection is that has greeted. `Mismatch` for a rank of this job that is set up in another way, which is told so.
fn judge(greeted: &mut Greeted<Line, { Hello::BYTES }>, own: &Hello) -> Result<Hello> {
    let io = |e| Error::io("a control connection", e);
    let hello = Hello::decode(&greeted.said)?;
    let stranger = |text| Err(Error::new(ErrorKind::Protocol, text));
    if greeted.proved.is_some_and(|rank| rank != hello.rank) {
        return stranger("it proved itself as another rank");
    }
    if hello.token != own.token || hello.rank == 0 || hello.rank >= own.world.max(hello.world) {
        return stranger("it is not of this job, or of another configuration");
    }
    let stream = &greeted.caller.stream;
    stream.set_nonblocking(false).map_err(io)?;
    stream
        .set_write_timeout(Some(Duration::from_secs(1)))
        .map_err(io)?;
    if hello.world == own.world && hello.epoch == own.epoch && hello.setup == own.setup {
        return Ok(hello);
    }
    let e = Error::new(
        ErrorKind::Mismatch,
        format!(
            "rank {} is set up for a world of {}, epoch {} and {}; rank 0 for a world of {}, epoch {} and {} (library versions and options must be the \
             same on all ranks)",
            hello.rank, hello.world, hello.epoch, hello.setup, own.world, own.epoch, own.setup
        ),
    )
    .with_peer(hello.rank);
    let _ = Frame::of_error(Kind::Refused, 0, &e, None).write(&mut greeted.caller);
    Err(e)
}

/// What may be wrong if rank 0 cannot be reached at `ip`. `is_open`: this rank has credentials, or needs none.
fn hint(is_here: bool, ip: IpAddr, is_open: bool, variable: &str) -> String {
    match (is_here, ip.is_loopback()) {
        (true, _) => String::new(),
        (false, true) if is_open => format!(
            "; rank 0 is on another host and has published its loopback address: no other interface of its host is up, or it has no credentials \
             and listens on loopback only. Look at rank 0's host, or set {variable} there to the address that this host reaches it by"
        ),
        (false, true) => format!(
            "; rank 0 is on another host and has published its loopback address: without credentials it listens there only. Set {} or, on a \
             network that only the job can reach, {INSECURE}=1 on all hosts",
            Credentials::VARIABLE
        ),
        (false, false) => format!(
            "; rank 0 is on another host and has published this address of it: if this host reaches it by another one, set {variable} on rank 0's host"
        ),
    }
}

/// The other ranks' side.
fn connect(
    c: &Configuration,
    terms: &Terms,
    published: &Published,
    hello: &Hello,
) -> Result<(Line, Option<u32>)> {
    let is_here = host_address::is_here(&published.host);
    let ip = match published.address {
        IpAddr::V4(_) if is_here => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(_) if is_here => Ipv6Addr::LOCALHOST.into(),
        elsewhere => elsewhere,
    };
    let hint = hint(is_here, ip, terms.is_open(), &variable(terms.backend));
    let address = SocketAddr::new(ip, published.port);
    let unreached = |e| match descriptors::is_limit(&e) {
        true => descriptors::reached("connecting to rank 0"),
        false => Error::io(
            format!(
                "rank 0 of {} cannot be reached at {address} (phase: control connections){hint}",
                c.world_size
            ),
            e,
        ),
    };
    let left = time_left(c.deadline).max(Duration::from_millis(1));
    // On a thread, as the token has to be looked at meanwhile, and a second attempt would give up what the first has reached.
    let stream = bounded(
        "ox-meet",
        deadline_in(left),
        &|| c.cancel.reason(),
        &|| unreached(std::io::ErrorKind::TimedOut.into()),
        move || descriptors::with_room(|| TcpStream::connect_timeout(&address, left)),
        drop,
    )?
    .map_err(unreached)?;
    let mut stream = Line::from(stream);
    let io = |e| Error::io("greeting rank 0", e);
    if let Some(credentials) = &terms.credentials {
        let topic = topic(terms.backend, c.epoch, c.rank);
        prove(c, Handshake::call(credentials.clone(), topic)?, &mut stream)?;
    }
    hello.write(&mut stream).map_err(io)?;
    // Rank 0 gives its verdict at its own deadline, which may be a little later; only it knows who is missing.
    let until = c.deadline + Duration::from_secs(1);
    let late = || {
        Error::timeout(format!(
            "rank 0 of {} has not let any rank go on (phase: control connections)",
            c.world_size
        ))
    };
    match hear(c, &mut stream, 0, until, &late)? {
        frame if frame.kind == Kind::Ready => Ok((
            stream,
            frame.number.checked_sub(1).and_then(|r| u32::try_from(r).ok()),
        )),
        frame if matches!(frame.kind, Kind::Refused | Kind::Failed) => Err(frame.error(c.rank)),
        _ => Err(Error::new(
            ErrorKind::Protocol,
            "rank 0 answered with something else",
        )),
    }
}

/// Both ends prove the job's secret.
fn prove(c: &Configuration, mut proof: Handshake, stream: &mut Line) -> Result<()> {
    let io = |e| Error::io("greeting rank 0", e);
    stream.stream.set_nonblocking(true).map_err(io)?;
    stream.stream.set_nodelay(true).map_err(io)?;
    loop {
        match proof.advance(stream) {
            Ok(true) => {
                let records = proof.into_records().map_err(|e| io(e.into()))?;
                records.into_iter().for_each(|r| stream.encrypt(r));
                return stream.stream.set_nonblocking(false).map_err(io);
            }
            Ok(false) if time_left(c.deadline).is_zero() => {
                return Err(Error::timeout(format!(
                    "rank 0 of {} has not answered the hello (phase: control connections)",
                    c.world_size
                )));
            }
            Ok(false) => {
                c.cancel.check()?;
                std::thread::sleep(Duration::from_micros(100));
            }
            Err(e) => {
                return Err(match Refused::of(&e) {
                    Some(refused) => distrusts(refused),
                    None => {
                        let text =
                            "rank 0 closed the connection during the hello (phase: control connections)";
                        Error::new(ErrorKind::PeerLost, text).with_peer(0).with_source(e)
                    }
                });
            }
        }
    }
}

/// One of the two has no credentials, or those of another job.
fn distrusts(refused: &Refused) -> Error {
    let text = format!("rank 0 and this rank do not trust each other: {refused}");
    Error::new(ErrorKind::Protocol, text).with_peer(0)
}

/// The next frame of `peer` until `until` (`late`).
fn hear(
    c: &Configuration,
    stream: &mut Line,
    peer: u32,
    until: Instant,
    late: &dyn Fn() -> Error,
) -> Result<Frame> {
    let io = |e| Error::io("waiting for a control frame", e);
    let closed = || {
        let text = format!("rank {peer} closed the connection (phase: control connections)");
        Error::new(ErrorKind::PeerLost, text).with_peer(peer)
    };
    let mut bytes = [0u8; Frame::MOST];
    loop {
        let is_over = stream.is_over();
        let there = match stream.peek(&mut bytes) {
            Ok(0) => return Err(closed()),
            Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => return Err(closed()),
            Ok(n) => bytes.get(..n).unwrap_or_default(),
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => &[],
            Err(e) => return Err(io(e)),
        };
        // Perhaps rank 0 asks for credentials.
        if let Some(refused) = Refused::seen_without_credentials(there) {
            return Err(distrusts(&refused));
        }
        if Frame::seen(there).map_err(|e| e.with_peer(peer))?.is_some() {
            // All of it is there, so that nothing is waited for.
            return Frame::read(stream)
                .map_err(|e| e.with_peer(peer))?
                .ok_or_else(closed);
        }
        if is_over {
            return Err(closed());
        }
        c.cancel.check()?;
        if Instant::now() >= until {
            return Err(late());
        }
        std::thread::sleep(Duration::from_micros(300));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_is_not_reached_is_blamed_on_credentials_only_where_they_are_missing() {
        const VARIABLE: &str = "OXCCL_X_HOST";
        let hint = |is_here, ip, is_open| hint(is_here, ip, is_open, VARIABLE);
        let (loopback, other) = ([127, 0, 0, 1].into(), [10, 0, 0, 4].into());
        assert_eq!(hint(true, loopback, false), "");
        assert!(hint(false, loopback, false).contains(Credentials::VARIABLE));
        let text = hint(false, loopback, true);
        assert!(
            text.contains("interface") && text.contains(VARIABLE) && !text.contains(Credentials::VARIABLE)
        );
        let text = hint(false, other, true);
        assert!(text.contains(VARIABLE) && !text.contains("credentials"), "{text}");
    }

    #[test]
    fn two_ranks_of_one_process_are_refused_by_name() {
        let told = |order: &[(u64, u32)], rank| one_per_process(order, rank, "x").err();
        assert!(told(&[(1, 0), (2, 2), (3, 1)], 0).is_none());
        let order = [(1, 0), (1, 2), (2, 1), (3, 3), (3, 4)];
        let (own, other) = (ErrorKind::Unsupported, ErrorKind::Protocol);
        for (rank, kind, ranks) in [
            (0, own, "ranks 0 and 2"),
            (1, other, "ranks 0 and 2"),
            (2, own, "ranks 0 and 2"),
            (4, own, "ranks 3 and 4"),
        ] {
            let e = told(&order, rank).unwrap();
            assert_eq!(e.kind(), kind, "{rank}: {e}");
            for part in [ranks, "isolated", "x takes one"] {
                assert!(e.to_string().contains(part), "{e}");
            }
        }
    }

    #[test]
    fn no_two_tokens_are_alike() {
        let (a, b) = (token(), token());
        assert_ne!(a, b);
        assert_ne!(a.first_chunk::<8>(), a.last_chunk::<8>());
    }
}
