//! How the ranks of a configuration meet: rank 0 publishes its address, a token and NCCL's unique id in the store; the others connect
//! and greet; rank 0 lets all go on at once, or tells all what is wrong.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::identity::hello::{Handshake, Refused};
use ftcore::identity::{INSECURE, is_insecure, may_listen};
use ftcore::lifecycle::nonce;
use ftcore::{Configuration, Credentials, Error, ErrorKind, Result, host_address, time_left};
use nccl_sys::UniqueId;

use super::FILES;
use super::line::Line;
use super::record::{ID, Published, refusal, refused};
use super::strangers::{Greeted, Strangers, topic};
use super::wire::{Frame, Hello, Kind, TOKEN};

/// The address that the other hosts are told; without it the one of `ftcore::host_address::outward`.
pub(crate) const ENV_HOST: &str = "OXCCL_NCCL_HOST";

// The records know no more of an id than its length.
const _: () = assert!(ID == UniqueId::BYTES);

/// What came of it: the unique id (if rank 0 had one to give) and the connections with whom they are.
pub(crate) struct Meeting {
    pub(crate) id: Option<UniqueId>,
    pub(crate) streams: Vec<(u32, Line)>,
}

/// What tells two hosts (and two network namespaces of one host) apart.
fn host_name() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let network = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    let network: String = network
        .to_string_lossy()
        .chars()
        .filter(char::is_ascii_digit)
        .collect();
    format!("{}-{network}", boot.trim())
}

/// The address under which other hosts reach this one.
fn own_address() -> Result<IpAddr> {
    if let Ok(host) = std::env::var(ENV_HOST) {
        return host
            .parse()
            .map_err(|_| Error::invalid(format!("{ENV_HOST}={host} is not an IP address")));
    }
    Ok(host_address::outward(true).unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)))
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

fn key_of(c: &Configuration) -> String {
    format!("{}/{}/nccl", c.prefix, c.epoch)
}

/// On rank 0, before it can be met: tells the others in the store why they need not wait for it.
pub(crate) fn refuse(c: &Configuration, error: &Error) {
    // If that fails, too, they wait until their deadline.
    let _ = c.store.set(&key_of(c), refused(error).as_bytes(), c.deadline);
}

/// Meets the other ranks. `credentials`: what they prove to each other; `id`: what rank 0 gives out.
pub(crate) fn meet(
    c: &Configuration,
    constants: u64,
    credentials: Option<&Arc<Credentials>>,
    id: Option<UniqueId>,
) -> Result<Meeting> {
    if c.world_size == 1 {
        return Ok(Meeting {
            id,
            streams: Vec::new(),
        });
    }
    let key = key_of(c);
    let hello = |token| Hello {
        token,
        rank: c.rank,
        world: c.world_size,
        epoch: c.epoch.0,
        constants,
    };
    if c.rank == 0 {
        let (listener, published) = open(credentials, id).inspect_err(|e| refuse(c, e))?;
        let token = published.token;
        c.store.set(&key, published.encode().as_bytes(), c.deadline)?;
        let guests = collect(c, credentials, &listener, &hello(token))?;
        return Ok(Meeting {
            id,
            streams: guests.into_iter().map(|g| (g.rank, g.stream)).collect(),
        });
    }
    let bytes = from_store(c, &key)?;
    if let Some(error) = refusal(&bytes) {
        return Err(error);
    }
    let published = Published::decode(&bytes).ok_or_else(|| {
        Error::new(
            ErrorKind::Protocol,
            format!("what stands at '{key}' is not rank 0's address"),
        )
    })?;
    let stream = connect(c, credentials, &published, &hello(published.token))?;
    Ok(Meeting {
        id: published.id.map(UniqueId),
        streams: vec![(0, stream)],
    })
}

/// Rank 0's port, and what the others are told of it.
fn open(credentials: Option<&Arc<Credentials>>, id: Option<UniqueId>) -> Result<(TcpListener, Published)> {
    let io = |e| {
        Error::io(
            format!("rank 0 cannot listen for control connections ({FILES})"),
            e,
        )
    };
    let is_open = credentials.is_some() || is_insecure(false);
    if !is_open && std::env::var_os(ENV_HOST).is_some() {
        may_listen("nccl", SocketAddr::new(own_address()?, 0), None, false)?;
    }
    let bind = match is_open {
        true => Ipv4Addr::UNSPECIFIED,
        false => Ipv4Addr::LOCALHOST,
    };
    let listener = TcpListener::bind((bind, 0)).map_err(io)?;
    listener.set_nonblocking(true).map_err(io)?;
    let port = listener.local_addr().map_err(io)?.port();
    let address = match is_open {
        true => own_address()?,
        false => bind.into(),
    };
    let published = Published {
        token: token(),
        port,
        host: host_name(),
        address,
        id: id.map(|id| id.0),
    };
    Ok((listener, published))
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
    rank: u32,
    stream: Line,
}

/// Rank 0's side: every rank's connection, or the same verdict for all ranks.
fn collect(
    c: &Configuration,
    credentials: Option<&Arc<Credentials>>,
    listener: &TcpListener,
    own: &Hello,
) -> Result<Vec<Guest>> {
    let io = |e| Error::io(format!("rank 0 cannot accept control connections ({FILES})"), e);
    let mut guests: Vec<Guest> = Vec::new();
    let mut strangers = Strangers::new(credentials.cloned(), c.epoch.0, c.world_size);
    let mut verdict = Ok(());
    while verdict.is_ok() && guests.len() + 1 < c.world_size as usize {
        if let Some(reason) = c.cancel.reason() {
            verdict = Err(reason);
        } else if time_left(c.deadline).is_zero() {
            let missing: Vec<String> = (1..c.world_size)
                .filter(|r| guests.iter().all(|g| g.rank != *r))
                .map(|r| format!("rank {r} of {}", c.world_size))
                .collect();
            let turned_away = match &strangers.turned_away {
                Some(text) => format!("; a connection was turned away, {text}"),
                None => String::new(),
            };
            let missing = missing.join(", ");
            let text = format!("{missing} did not come (phase: control connections){turned_away}");
            verdict = Err(Error::timeout(text));
        } else if let Err(e) = strangers.accept(listener) {
            verdict = Err(io(e));
        } else if let Some(greeted) = strangers.next_greeted() {
            match judge(greeted, own) {
                Ok(Some(guest)) if guests.iter().all(|g| g.rank != guest.rank) => guests.push(guest),
                // A stranger, or a rank that is there already.
                Ok(_) => {}
                Err(e) if e.kind() == ErrorKind::Mismatch => verdict = Err(e),
                Err(error) => tracing::debug!(%error, "a stranger at the control port was turned away"),
            }
        } else {
            std::thread::sleep(Duration::from_micros(300));
        }
    }
    let frame = match &verdict {
        Ok(()) => Frame::new(Kind::Ready, 0, 0, ""),
        Err(e) => Frame::of_error(Kind::Refused, 0, e, None),
    };
    for guest in &mut guests {
        if frame.write(&mut guest.stream).is_err() && verdict.is_ok() {
            let text = format!("rank {} could not be told to go on", guest.rank);
            verdict = Err(Error::new(ErrorKind::PeerLost, text).with_peer(guest.rank));
        }
    }
    if let Err(error) = &verdict {
        // The ranks that were told to go on need not wait for one that was not. One that cannot be told finds its connection closed.
        let frame = Frame::of_error(Kind::Failed, 0, error, error.context().peer);
        guests.iter_mut().for_each(|g| drop(frame.write(&mut g.stream)));
    }
    verdict.map(|()| guests)
}

/// A connection that has greeted. `None` for a stranger; `Mismatch` for a rank of this job that is set up in another way.
fn judge(greeted: Greeted, own: &Hello) -> Result<Option<Guest>> {
    let io = |e| Error::io("a control connection", e);
    let Greeted {
        mut stream,
        from,
        hello,
    } = greeted;
    if hello.token != own.token || hello.rank == 0 || hello.rank >= own.world.max(hello.world) {
        tracing::debug!(%from, "a stranger at the control port was turned away");
        return Ok(None);
    }
    stream.stream.set_nonblocking(false).map_err(io)?;
    stream
        .stream
        .set_write_timeout(Some(Duration::from_secs(1)))
        .map_err(io)?;
    if hello.world != own.world || hello.epoch != own.epoch || hello.constants != own.constants {
        let e = Error::new(
            ErrorKind::Mismatch,
            format!(
                "rank {} is set up for a world of {}, epoch {} and constants {:016x}; rank 0 for {}, {} and {:016x} (NCCL \
                 versions and options must be the same on all ranks)",
                hello.rank, hello.world, hello.epoch, hello.constants, own.world, own.epoch, own.constants
            ),
        );
        let _ = Frame::of_error(Kind::Refused, 0, &e, None).write(&mut stream);
        return Err(e);
    }
    Ok(Some(Guest {
        rank: hello.rank,
        stream,
    }))
}

/// What may be wrong if rank 0 cannot be reached at `ip`. `is_open`: this rank has credentials, or needs none.
fn hint(is_here: bool, ip: IpAddr, is_open: bool) -> String {
    match (is_here, ip.is_loopback()) {
        (true, _) => String::new(),
        (false, true) if is_open => format!(
            "; rank 0 is on another host and has published its loopback address: no other interface of its host is up, or it has no credentials \
             and listens on loopback only. Look at rank 0's host, or set {ENV_HOST} there to the address that this host reaches it by"
        ),
        (false, true) => format!(
            "; rank 0 is on another host and has published its loopback address: without credentials it listens there only. Set {} or, on a \
             network that only the job can reach, {INSECURE}=1 on all hosts",
            Credentials::VARIABLE
        ),
        (false, false) => format!(
            "; rank 0 is on another host and has published this address of it: if this host reaches it by another one, set {ENV_HOST} on rank 0's host"
        ),
    }
}

/// The other ranks' side.
fn connect(
    c: &Configuration,
    credentials: Option<&Arc<Credentials>>,
    published: &Published,
    hello: &Hello,
) -> Result<Line> {
    let is_here = published.host == host_name();
    let ip = match is_here {
        true => IpAddr::V4(Ipv4Addr::LOCALHOST),
        false => published.address,
    };
    let hint = hint(is_here, ip, credentials.is_some() || is_insecure(false));
    let address = SocketAddr::new(ip, published.port);
    let left = time_left(c.deadline).max(Duration::from_millis(1));
    let stream = TcpStream::connect_timeout(&address, left).map_err(|e| {
        Error::io(
            format!(
                "rank 0 of {} cannot be reached at {address} (phase: control connections; {FILES}){hint}",
                c.world_size
            ),
            e,
        )
    })?;
    let mut stream = Line::from(stream);
    let io = |e| Error::io("greeting rank 0", e);
    if let Some(credentials) = credentials {
        prove(c, credentials, &mut stream)?;
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
        frame if frame.kind == Kind::Ready => Ok(stream),
        frame if matches!(frame.kind, Kind::Refused | Kind::Failed) => Err(frame.error()),
        _ => Err(Error::new(
            ErrorKind::Protocol,
            "rank 0 answered with something else",
        )),
    }
}

/// Both ends prove the job's secret.
fn prove(c: &Configuration, credentials: &Arc<Credentials>, stream: &mut Line) -> Result<()> {
    let io = |e| Error::io("greeting rank 0", e);
    stream.stream.set_nonblocking(true).map_err(io)?;
    stream.stream.set_nodelay(true).map_err(io)?;
    let mut proof = Handshake::call(credentials.clone(), topic(c.epoch.0, c.rank))?;
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
    stream.stream.set_nonblocking(true).map_err(io)?;
    // Perhaps rank 0 asks for credentials.
    let mut seen = [0u8; 16];
    loop {
        match stream.peek(&mut seen) {
            Ok(0) => return Err(closed()),
            Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => return Err(closed()),
            Ok(n) => match Refused::seen_without_credentials(seen.get(..n).unwrap_or_default()) {
                Some(refused) => return Err(distrusts(&refused)),
                None => break,
            },
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                c.cancel.check()?;
                if Instant::now() >= until {
                    return Err(late());
                }
                std::thread::sleep(Duration::from_micros(300));
            }
            Err(e) => return Err(io(e)),
        }
    }
    stream.stream.set_nonblocking(false).map_err(io)?;
    stream
        .stream
        .set_read_timeout(Some(Duration::from_secs(1)))
        .map_err(io)?;
    let frame = Frame::read(stream).map_err(|e| e.with_peer(peer))?;
    frame.ok_or_else(closed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_is_not_reached_is_blamed_on_credentials_only_where_they_are_missing() {
        let (loopback, other) = ([127, 0, 0, 1].into(), [10, 0, 0, 4].into());
        assert_eq!(hint(true, loopback, false), "");
        assert!(hint(false, loopback, false).contains(Credentials::VARIABLE));
        let text = hint(false, loopback, true);
        assert!(
            text.contains("interface") && text.contains(ENV_HOST) && !text.contains(Credentials::VARIABLE)
        );
        let text = hint(false, other, true);
        assert!(text.contains(ENV_HOST) && !text.contains("credentials"), "{text}");
    }

    #[test]
    fn no_two_tokens_are_alike() {
        let (a, b) = (token(), token());
        assert_ne!(a, b);
        assert_ne!(a.first_chunk::<8>(), a.last_chunk::<8>());
    }
}
