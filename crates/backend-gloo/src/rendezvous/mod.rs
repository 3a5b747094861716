//! How the ranks of a configuration find and connect each other.
//!
//! Every rank listens, publishes its addresses and a secret under `prefix/epoch` in the store, connects to every lower
//! rank and accepts from every higher one: over a Unix socket with the handles of shared memory where both are on one host, else
//! several times over TCP. All of it is one non-blocking loop, so a stranger or a half-open connection
//! holds no rank up. With credentials both ends of each connection prove the job's secret first, bound to the epoch and both ranks. When a rank has all its connections it says so to all; `configure` ends on a rank once all ranks have
//! said so, so a rank that fails right afterwards cannot break the configuration of a slower one. At the deadline the missing ranks are named (L33). A rank that gives up tells those that it has
//! reached, so that they need not wait for their own deadline (L27).

mod card;
mod connected;
mod incoming;
mod measure;
mod outgoing;
mod ready;

use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::forked::Parents;
use ftcore::identity::hello::{NO_RANK, Topic};
use ftcore::identity::may_listen;
use ftcore::identity::strangers::Strangers;
use ftcore::lifecycle::nonce;
use ftcore::{Configuration, Error, ErrorKind, Result, Store, deadline_in, descriptors, time_left};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use card::Card;
pub(crate) use connected::Connected;
use incoming::Incoming;
use outgoing::{Dial, Dialed};

use crate::options::{Links, Settings, Transport};
use crate::transport::interface::{self, Addresses};
use crate::transport::lines::{self, Line};
use crate::transport::shm::{Region, Shared};
use crate::transport::tcp::{self, Counters, Link};
use crate::wire::{Hello, Purpose, VERSION};

/// The longest uninterrupted wait for the store.
const STORE_SLICE: Duration = Duration::from_millis(50);

/// The line to the process of a rank with which memory is shared.
#[derive(Default)]
enum Common {
    /// It is this very process.
    #[default]
    Needless,
    /// One that both know.
    Known(Arc<Line>),
    /// The control connection, under this number, if all ranks share memory.
    New { process: u64, id: u64 },
}

impl Common {
    /// The number of the line, or 0.
    fn id(&self) -> u64 {
        match self {
            Self::Needless => 0,
            Self::Known(line) => line.id(),
            Self::New { id, .. } => *id,
        }
    }
}

#[derive(Default)]
struct Found {
    address: String,
    data: Option<Link>,
    /// The connections for large payloads, if there are several; by number.
    rails: Vec<Option<Link>>,
    control: Option<Link>,
    messages: Option<Link>,
    /// In place of `data` and `messages`.
    memory: Option<Shared>,
    /// What goes with it.
    line: Common,
    /// It has said that it is connected with all ranks.
    ready: bool,
    /// It shares memory with every rank.
    one_host: bool,
    /// The lowest rank with which it shares memory, itself included.
    lowest: u32,
    /// The core to which it is bound; see [`own_core`].
    core: u8,
}

impl Found {
    fn complete(&self) -> bool {
        let rails = self.rails.iter().all(Option::is_some);
        let data = self.data.is_some() && self.messages.is_some() && rails;
        (data || self.memory.is_some()) && self.control.is_some()
    }
}

impl Found {
    /// A connection of `purpose` is there.
    fn take(&mut self, purpose: Purpose, link: Link, memory: Option<(Shared, Common)>, address: String) {
        self.address = address;
        if let Some(replaced) = &mut self.memory {
            replaced.notices.writer.disarm();
        }
        if self.memory.is_some() && purpose != Purpose::Local {
            // The rank gave up on shared memory and comes over TCP.
            self.memory = None;
            self.line = Common::Needless;
            self.control = None;
        }
        match purpose {
            Purpose::Data => self.data = Some(link),
            Purpose::Rail(number) => {
                // Recognised only if there is a rail of that number.
                if let Some(rail) = self.rails.get_mut(number as usize) {
                    *rail = Some(link);
                }
            }
            Purpose::Control => self.control = Some(link),
            Purpose::Messages => self.messages = Some(link),
            Purpose::Local => {
                self.data = None;
                self.messages = None;
                self.rails.fill_with(|| None);
                self.control = Some(link);
                (self.memory, self.line) = match memory {
                    Some((shared, line)) => (Some(shared), line),
                    None => (None, Common::Needless),
                };
            }
        }
    }
}

struct Rendezvous<'a> {
    configuration: &'a Configuration,
    settings: &'a Settings,
    counters: Arc<Counters>,
    began: Instant,
    listener: Parents<TcpListener>,
    /// How connections to other hosts are controlled, if that could be asked.
    control: Option<String>,
    /// Where ranks of this host come in, and what they are given; `None` without shared memory.
    local: Option<(Parents<UnixListener>, Region)>,
    card: Card,
    /// By rank; `None` where not known yet.
    cards: Vec<Option<Card>>,
    dialed: Vec<Dialed>,
    strangers: Strangers<Incoming, { Hello::BYTES }>,
    found: Vec<Found>,
    /// By rank: the line to its process that this rank says it knows.
    lines: Vec<Option<Arc<Line>>>,
    /// By rank: how often the way through shared memory failed.
    refused: Vec<u32>,
    /// This rank has said that it is connected with all ranks.
    said_ready: bool,
    /// The core to which this rank is bound.
    core: u8,
}

/// Connects all ranks of `configuration`.
pub(crate) fn connect(
    configuration: &Configuration,
    settings: &Settings,
    counters: Arc<Counters>,
) -> Result<Connected> {
    let rendezvous = Rendezvous::new(configuration, settings, counters);
    let mut rendezvous = rendezvous.map_err(descriptors::named)?;
    let hosts = rendezvous.run().and_then(|()| {
        let mut hosts = rendezvous.hosts();
        hosts.share(match settings.shares.is_empty() {
            true => rendezvous.measure(&hosts)?.unwrap_or_default(),
            false => settings.shares.clone(),
        });
        Ok(hosts)
    });
    match hosts {
        Ok(hosts) => rendezvous.into_connected(hosts).map_err(descriptors::named),
        Err(error) => {
            rendezvous.give_up(&error);
            Err(error)
        }
    }
}

/// Shared memory and the socket at which it is handed out, under a name of its own.
fn open_local(world: u32) -> Result<(Parents<UnixListener>, Region, String)> {
    let region = Region::new(world)?;
    let name = format!("oxccl-gloo-{}-{:016x}", std::process::id(), nonce());
    let listener = std::os::unix::net::SocketAddr::from_abstract_name(&name)
        .and_then(|address| descriptors::with_room(|| UnixListener::bind_addr(&address)))
        .and_then(|l| l.set_nonblocking(true).map(|()| l))
        .map_err(|e| Error::io("listening on a Unix socket", e))?;
    Ok((listener.into(), region, name))
}

/// One more than the number of the core to which this thread is bound; 0 if it may run on several, or that number is too large.
fn own_core() -> u8 {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else {
        return 0;
    };
    match set.count() {
        1 => (1..=u8::MAX)
            .find(|n| set.is_set(usize::from(*n) - 1))
            .unwrap_or(0),
        _ => 0,
    }
}

/// What the hello of a connection is for.
fn topic(configuration: &Configuration, from: u32, to: u32) -> Topic {
    Topic::new("gloo", configuration.epoch, from, to)
}

fn key(configuration: &Configuration, rank: u32) -> String {
    format!("{}/{}/gloo/{rank}", configuration.prefix, configuration.epoch)
}

impl<'a> Rendezvous<'a> {
    fn new(
        configuration: &'a Configuration,
        settings: &'a Settings,
        counters: Arc<Counters>,
    ) -> Result<Self> {
        let named = settings.host.as_deref().filter(|_| settings.net_name.is_none());
        let resolve = |host| interface::resolve(host, configuration.deadline, &configuration.cancel);
        let host = named.map(resolve).transpose()?;
        let Addresses {
            bind,
            advertise,
            loopback_here,
        } = interface::addresses(settings.net_name.as_deref(), host, settings.is_open())?;
        may_listen(
            "gloo",
            SocketAddr::new(bind, 0),
            settings.credentials.as_deref(),
            settings.insecure,
        )?;
        let listener = descriptors::with_room(|| TcpListener::bind((bind, 0)));
        let listener = listener
            .and_then(|l| l.set_nonblocking(true).map(|()| l))
            .map_err(|e| Error::io(format!("listening on {bind}"), e))?;
        descriptors::make_room(&listener, configuration.world_size);
        let port = listener
            .local_addr()
            .map_err(|e| Error::io("asking for the listener's port", e))?
            .port();
        let control = tcp::listen_unpaced(&listener);
        let local = match settings.transport {
            Transport::Tcp => None,
            Transport::Shm => Some(open_local(configuration.world_size)?),
            Transport::Auto | Transport::Mixed => match open_local(configuration.world_size) {
                Err(error) if descriptors::is_limit_of(&error) => return Err(error),
                Err(error) => {
                    tracing::warn!(%error, "no shared memory here; using TCP");
                    None
                }
                Ok(local) => Some(local),
            },
        };
        let (local, name) = match local {
            Some((listener, region, name)) => (Some((listener, region)), Some(name)),
            None => (None, None),
        };
        let card = Card {
            nonce: nonce(),
            host: ftcore::host_address::identity(),
            remote: SocketAddr::new(advertise, port),
            local: loopback_here.then_some(SocketAddr::from(([127, 0, 0, 1], port))),
            memory: name,
            process: lines::own_process(),
        };
        let now = Instant::now();
        let dialed = (0..configuration.rank)
            .flat_map(|rank| {
                let purposes =
                    [Purpose::Local, Purpose::Data, Purpose::Control, Purpose::Messages].into_iter();
                let rails = (0..settings.rails()).map(Purpose::Rail);
                purposes.chain(rails).map(move |purpose| (rank, purpose))
            })
            .map(|(rank, purpose)| Dialed {
                rank,
                purpose,
                state: Dial::Waiting { retry_at: now },
            })
            .collect();
        Ok(Self {
            configuration,
            settings,
            counters,
            began: now,
            listener: listener.into(),
            control,
            local,
            card,
            cards: (0..configuration.world_size).map(|_| None).collect(),
            dialed,
            strangers: Strangers::new(
                "gloo",
                settings.credentials.clone(),
                topic(configuration, NO_RANK, configuration.rank),
                // Every other rank may come at once, with all its connections.
                (3 + settings.rails() as usize).saturating_mul(configuration.world_size as usize),
            ),
            found: (0..configuration.world_size)
                .map(|_| Found {
                    rails: (0..settings.rails()).map(|_| None).collect(),
                    ..Found::default()
                })
                .collect(),
            lines: vec![None; configuration.world_size as usize],
            refused: vec![0; configuration.world_size as usize],
            said_ready: false,
            core: own_core(),
        })
    }

    fn run(&mut self) -> Result<()> {
        let c = self.configuration;
        c.store
            .set(&key(c, c.rank), self.card.encode().as_bytes(), c.deadline)
            .map_err(|e| self.named(e))?;
        loop {
            c.cancel.check().map_err(|e| self.named(e))?;
            let searching = self.look_up()?;
            self.greet()?;
            self.dial()?;
            self.say_ready()?;
            self.look_at_found()?;
            if self.said_ready && self.not_ready().is_empty() {
                return Ok(());
            }
            if time_left(c.deadline).is_zero() {
                return Err(self.timeout());
            }
            self.sleep(searching)?;
        }
    }

    fn named(&self, error: Error) -> Error {
        error
            .with_op("configure")
            .with_rank(self.configuration.rank)
            .with_epoch(self.configuration.epoch)
    }

    fn missing(&self) -> Vec<u32> {
        (0..self.configuration.world_size)
            .filter(|&r| r != self.configuration.rank)
            .filter(|&r| self.found.get(r as usize).is_none_or(|f| !f.complete()))
            .collect()
    }

    fn not_ready(&self) -> Vec<u32> {
        (0..self.configuration.world_size)
            .filter(|&r| r != self.configuration.rank)
            .filter(|&r| self.found.get(r as usize).is_none_or(|f| !f.ready))
            .collect()
    }

    fn shares_memory_with_all(&self) -> bool {
        let own = self.configuration.rank as usize;
        let others = self.found.iter().enumerate().filter(|(rank, _)| *rank != own);
        others.into_iter().all(|(_, found)| found.memory.is_some())
    }

    /// The lowest rank with which this one shares memory, itself included.
    fn lowest_neighbour(&self) -> u32 {
        let own = self.configuration.rank;
        let mut below = self.found.iter().zip(0..own);
        below
            .find(|(found, _)| found.memory.is_some())
            .map_or(own, |(_, rank)| rank)
    }

    fn timeout(&self) -> Error {
        let c = self.configuration;
        let (missing, phase) = match self.missing() {
            none if none.is_empty() => (self.not_ready(), "ready"),
            some => (some, "connect"),
        };
        let missing: Vec<String> = missing.iter().map(u32::to_string).collect();
        let total = c.deadline.saturating_duration_since(self.began).as_secs_f64();
        let turned_away = self.strangers.hint();
        self.named(Error::timeout(format!(
            "waiting for {} {} of {} in phase {phase}, {:.1} s of {total:.1} s{turned_away}",
            if missing.len() == 1 { "rank" } else { "ranks" },
            missing.join(", "),
            c.world_size,
            self.began.elapsed().as_secs_f64(),
        )))
    }

    /// Asks the store for addresses that are needed. True if some are still unknown.
    fn look_up(&mut self) -> Result<bool> {
        let c = self.configuration;
        let unknown: Vec<u32> = (0..c.rank)
            .filter(|&r| self.cards.get(r as usize).is_some_and(Option::is_none))
            .collect();
        if unknown.is_empty() {
            return Ok(false);
        }
        let keys: Vec<String> = unknown.iter().map(|&r| key(c, r)).collect();
        let names: Vec<&str> = keys.iter().map(String::as_str).collect();
        let slice = deadline_in(STORE_SLICE).min(c.deadline);
        let all = match c.store.wait(&names, slice) {
            Ok(()) => true,
            Err(e) if e.kind() == ErrorKind::Timeout => false,
            Err(e) => return Err(self.named(e)),
        };
        for (rank, name) in unknown.into_iter().zip(names) {
            let there = all || self.present(c.store.as_ref(), name)?;
            if !there {
                continue;
            }
            let value = c.store.get(name, c.deadline).map_err(|e| self.named(e))?;
            let card = Card::decode(&value).ok_or_else(|| {
                self.named(Error::new(
                    ErrorKind::Protocol,
                    format!("what the store has under '{name}' is not the address of a rank"),
                ))
            })?;
            if let Some(slot) = self.cards.get_mut(rank as usize) {
                *slot = Some(card);
            }
        }
        Ok(self.cards.iter().take(c.rank as usize).any(Option::is_none))
    }

    fn present(&self, store: &dyn Store, name: &str) -> Result<bool> {
        match store.check(&[name], deadline_in(STORE_SLICE).max(self.configuration.deadline)) {
            Ok(there) => Ok(there),
            Err(e) if e.kind() == ErrorKind::Timeout => Ok(false),
            Err(e) => Err(self.named(e)),
        }
    }

    fn hello(&self, purpose: Purpose, nonce: u64, line: u64) -> Hello {
        Hello {
            version: VERSION,
            purpose,
            rank: self.configuration.rank,
            world: self.configuration.world_size,
            connections: self.settings.connections,
            links: self.settings.links.code(),
            epoch: self.configuration.epoch,
            constants: self.settings.constants,
            nonce,
            process: self.card.process,
            line,
        }
    }

    /// What differs between this rank and one that is otherwise recognised.
    fn compare(&self, theirs: &Hello, address: &str) -> Result<()> {
        let c = self.configuration;
        let text = if theirs.version != VERSION {
            format!(
                "speaks version {} of the protocol, this rank {VERSION}",
                theirs.version
            )
        } else if theirs.world != c.world_size {
            format!(
                "rank {} says the world has {} ranks, rank {} says {}",
                theirs.rank, theirs.world, c.rank, c.world_size
            )
        } else if theirs.connections != self.settings.connections {
            format!(
                "rank {} was told to use connections={}, rank {} connections={}",
                theirs.rank, theirs.connections, c.rank, self.settings.connections
            )
        } else if theirs.links != self.settings.links.code() {
            let name = |code| Links::name(code).unwrap_or("something unknown");
            format!(
                "rank {} was told to use links={}, rank {} links={}",
                theirs.rank,
                name(theirs.links),
                c.rank,
                name(self.settings.links.code())
            )
        } else if theirs.constants != self.settings.constants {
            format!(
                "rank {} and rank {} have different algorithm constants ({:016x} and {:016x}): different builds?",
                theirs.rank, c.rank, theirs.constants, self.settings.constants
            )
        } else {
            return Ok(());
        };
        Err(self.named(
            Error::new(ErrorKind::Mismatch, text)
                .with_peer(theirs.rank)
                .with_peer_address(address),
        ))
    }

    fn sleep(&self, searching: bool) -> Result<()> {
        let now = Instant::now();
        let mut wake_at = self.configuration.deadline.min(now + Duration::from_millis(50));
        if searching {
            wake_at = now; // the store is where this rank waits
        }
        let mut fds = vec![PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN)];
        if let Some((listener, _)) = &self.local {
            fds.push(PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN));
        }
        for (stranger, until) in self.strangers.waiting() {
            fds.push(PollFd::from_borrowed_fd(stranger.as_fd(), PollFlags::IN));
            wake_at = wake_at.min(until);
        }
        for dialed in self.dialed.iter().filter(|d| self.is_wanted(d)) {
            match &dialed.state {
                Dial::Done => {}
                Dial::Waiting { retry_at } => wake_at = wake_at.min(*retry_at),
                Dial::Connecting(fd) => {
                    fds.push(PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::OUT));
                }
                Dial::Greeting { link, .. } | Dial::Proving { link, .. } => {
                    fds.push(PollFd::from_borrowed_fd(link.as_fd(), PollFlags::IN));
                }
            }
        }
        for found in self.found.iter().filter(|f| !f.ready) {
            if let Some(link) = &found.control {
                fds.push(PollFd::from_borrowed_fd(link.as_fd(), PollFlags::IN));
            }
        }
        wait_for(&mut fds, wake_at).map_err(|e| self.named(e))
    }
}

fn wait_for(fds: &mut [PollFd<'_>], until: Instant) -> Result<()> {
    let left = time_left(until);
    let timeout = Timespec {
        tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: left.subsec_nanos().into(),
    };
    match poll(fds, Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(e) => Err(Error::io("waiting for connections", e.into())),
    }
}

#[cfg(test)]
mod tests {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    use super::own_core;

    #[test]
    fn a_rank_that_is_bound_to_one_core_says_which() {
        let may = sched_getaffinity(None).unwrap();
        let cores: Vec<usize> = (0..200).filter(|core| may.is_set(*core)).collect();
        if cores.len() > 1 {
            assert_eq!(own_core(), 0);
        }
        for core in cores {
            let bound = std::thread::spawn(move || {
                let mut one = CpuSet::new();
                one.set(core);
                sched_setaffinity(None, &one).unwrap();
                own_core()
            });
            assert_eq!(usize::from(bound.join().unwrap()), core + 1);
        }
    }
}
