//! How the launchers of several machines (nodes) come together: node 0 has a store at an address that all are given, and the lighthouse at the next port.
//!
//! Every node claims its number, says what it starts, and waits until all nodes have. From then on it counts a beat once a second. Node 0 keeps
//! the lighthouse for as long as another node runs; a node whose beat stands still is taken for lost, and one that comes back for it may have
//! its number.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use oxccl::core::{
    Credentials, Error, ErrorKind, PrefixStore, Result, Store, TcpStore, TcpStoreServer, deadline_in,
    join_address, split_address, time_left,
};

/// How often a node shows that it is there.
const BEAT: Duration = Duration::from_secs(1);
/// A number whose beat stands still for this long is free for another process.
const IS_FREE: Duration = Duration::from_secs(15);
/// A node whose beat stands still for this long holds up the end of the job no longer.
const IS_LOST: Duration = Duration::from_secs(30);
/// A node whose beat stands still for this long is not waited with, but for.
const IS_STILL: Duration = Duration::from_secs(5);
/// Set by the first node that has seen all others.
const BEGUN: &str = "begun";
/// How long one call of the store may take.
const CALL: Duration = Duration::from_secs(3);
/// How often a node says whom it waits for.
const SAY: Duration = Duration::from_secs(10);

/// A machine of the job, and what it starts. All nodes start the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) node: u32,
    pub(crate) nodes: u32,
    pub(crate) replicas: u32,
    pub(crate) ranks: u32,
}

impl Node {
    fn job(&self) -> String {
        format!(
            "{} nodes of {} replicas of {} ranks",
            self.nodes, self.replicas, self.ranks
        )
    }

    fn others(self) -> impl Iterator<Item = u32> {
        (0..self.nodes).filter(move |other| *other != self.node)
    }
}

/// Where the parts of a job of several nodes listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Address {
    host: String,
    port: u16,
}

impl Address {
    /// Errors: `InvalidArgument` for what is not `host:port`.
    pub(crate) fn new(text: &str) -> Result<Self> {
        let (host, port) = split_address(text)
            .map_err(|e| Error::invalid(format!("--rendezvous {text}: {}; give HOST:PORT", e.message())))?;
        if port == 0 || port == u16::MAX {
            return Err(Error::invalid(format!(
                "--rendezvous {text}: port {port}; choose one from 1 to 65534, the lighthouse takes the next"
            )));
        }
        Ok(Self {
            host: host.to_owned(),
            port,
        })
    }

    fn store(&self) -> String {
        join_address(&self.host, self.port)
    }

    /// What node 0 listens on for the others. A name of this machine may mean loopback to itself alone, so it is not looked up.
    fn bind(&self, port: u16) -> String {
        let ip = self.host.parse::<std::net::IpAddr>().ok();
        let all = match ip {
            Some(std::net::IpAddr::V6(_)) => "::",
            _ => "0.0.0.0",
        };
        match self.host == "localhost" || ip.is_some_and(|ip| ip.is_loopback()) {
            true => join_address(&self.host, port),
            false => join_address(all, port),
        }
    }

    /// Where the lighthouse listens, and the host that it is reached by.
    pub(crate) fn lighthouse(&self) -> (String, &str) {
        (self.bind(self.port + 1), &self.host)
    }

    /// The lighthouse as the other nodes call it.
    pub(crate) fn lighthouse_url(&self, has_credentials: bool) -> String {
        let scheme = if has_credentials { "https" } else { "http" };
        format!("{scheme}://{}", join_address(&self.host, self.port + 1))
    }
}

/// A node that has come together with the others. Dropped, it says that this node has ended.
pub(crate) struct Rendezvous {
    /// Dropped to end the thread.
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
    others: Receiver<bool>,
    // After the thread, which uses it.
    _server: Option<TcpStoreServer>,
}

impl Rendezvous {
    /// Claims this node's number and waits until all nodes have claimed theirs.
    ///
    /// Errors: `Timeout` that names the nodes which are missing at `deadline`; `Conflict` if another process has this number, or the other
    /// nodes start something else; those of the store.
    pub(crate) fn join(
        node: Node,
        address: &Address,
        credentials: Option<Arc<Credentials>>,
        insecure: bool,
        deadline: Instant,
    ) -> Result<Self> {
        let server = match node.node {
            0 => {
                let at = address.bind(address.port);
                Some(match (&credentials, insecure) {
                    (None, false) => TcpStoreServer::bind(&at)?,
                    _ => TcpStoreServer::bind_with(&at, credentials.clone())?,
                })
            }
            _ => None,
        };
        let credentials = match credentials {
            Some(credentials) => Some(credentials),
            None => Credentials::from_env()?,
        };
        let store = TcpStore::connect_with(&address.store(), credentials, deadline).map_err(|e| {
            let text = format!(
                "node {} does not reach the rendezvous: {}",
                node.node,
                e.message()
            );
            Error::new(e.kind(), text).with_source(e)
        })?;
        let member = Member {
            node,
            me: me(),
            store: PrefixStore::new(Arc::new(store), "nodes".to_owned()),
            seen: BTreeMap::new(),
        };
        member.agree(deadline)?;
        member.claim(deadline)?;
        // From the claim on, so that no other process takes the number while this node waits for the others.
        let member = Arc::new(Mutex::new(member));
        let (end, ends) = channel();
        let (others_to, others) = channel();
        let beats = member.clone();
        let thread = std::thread::Builder::new()
            .name("ox-rendezvous".into())
            .spawn(move || beat(&beats, &ends, &others_to))
            .map_err(|e| Error::io("start thread ox-rendezvous", e))?;
        let this = Self {
            end: Some(end),
            thread: Some(thread),
            others,
            _server: server,
        };
        let waits = lock(&member).store.clone();
        all_there(node, &waits, deadline)?;
        Ok(this)
    }

    /// What changed since the last call: true while another node runs.
    pub(crate) fn others_run(&self) -> Option<bool> {
        self.others.try_iter().last()
    }
}

impl Drop for Rendezvous {
    fn drop(&mut self) {
        drop(self.end.take());
        // It ends after one call at most, which has a deadline.
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

fn lock(member: &Mutex<Member>) -> std::sync::MutexGuard<'_, Member> {
    member.lock().unwrap_or_else(PoisonError::into_inner)
}

/// This process, unlike any other.
fn me() -> String {
    let system = rustix::system::uname();
    format!(
        "process {} on {} ({:016x})",
        std::process::id(),
        system.nodename().to_string_lossy(),
        oxccl::core::lifecycle::nonce()
    )
}

/// Without what only tells it from others.
fn named(who: &[u8]) -> String {
    let text = String::from_utf8_lossy(who);
    text.split_once(" (")
        .map_or(text.to_string(), |(name, _)| name.to_owned())
}

struct Member {
    node: Node,
    me: String,
    store: PrefixStore,
    /// The beat of each other node, and when it last changed.
    seen: BTreeMap<u32, (i64, Instant)>,
}

impl Member {
    /// All nodes start the same.
    fn agree(&self, deadline: Instant) -> Result<()> {
        let mine = self.node.job();
        let first = self.store.compare_set("job", b"", mine.as_bytes(), deadline)?;
        if first == mine.as_bytes() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Conflict,
            format!(
                "node {} was started for {mine}, and the others for {}; give all nodes the same --nnodes, --replicas and --ranks-per-replica",
                self.node.node,
                String::from_utf8_lossy(&first)
            ),
        ))
    }

    /// Takes this node's number, if no process whose beat goes on has it.
    fn claim(&self, deadline: Instant) -> Result<()> {
        let node = self.node.node;
        let (who, beat, ended) = (
            format!("{node}/who"),
            format!("{node}/beat"),
            format!("{node}/ended"),
        );
        let mut expected = Vec::new();
        loop {
            let stands = self
                .store
                .compare_set(&who, &expected, self.me.as_bytes(), deadline)?;
            if stands == self.me.as_bytes() {
                self.store.set(&ended, b"0", deadline)?;
                self.store.add(&beat, 1, deadline)?;
                return Ok(());
            }
            let has_ended =
                self.store.check(&[&ended], deadline)? && self.store.get(&ended, deadline)? == b"1";
            let before = self.store.add(&beat, 0, deadline)?;
            let until = Instant::now() + IS_FREE;
            while !has_ended && Instant::now() < until {
                std::thread::sleep(BEAT / 4);
                if self.store.add(&beat, 0, deadline)? != before {
                    return Err(Error::new(
                        ErrorKind::Conflict,
                        format!(
                            "node {node} is claimed twice: by {}, and now by {}; give each node a --node-rank of its own",
                            named(&stands),
                            named(self.me.as_bytes())
                        ),
                    ));
                }
            }
            tracing::info!(
                "node {node} of {} is gone; this process takes its place",
                named(&stands)
            );
            expected = stands;
        }
    }

    /// One beat, and whether another node runs. A store that was started anew gets this node's claim again.
    fn beat(&mut self) -> Result<bool> {
        let deadline = deadline_in(CALL);
        let node = self.node.node;
        self.store.add(&format!("{node}/beat"), 1, deadline)?;
        if !self.store.check(&[&format!("{node}/who")], deadline)? {
            self.agree(deadline)?;
            self.claim(deadline)?;
        }
        let stands = self.store.get(&format!("{node}/who"), deadline)?;
        if stands != self.me.as_bytes() {
            return Err(Error::new(
                ErrorKind::Conflict,
                format!(
                    "node {node} is now {}, which heard nothing of this process for {IS_FREE:?}",
                    named(&stands)
                ),
            ));
        }
        let mut others_run = false;
        for other in self.node.others() {
            let (beat, ended) = (format!("{other}/beat"), format!("{other}/ended"));
            let counted = self.store.add(&beat, 0, deadline)?;
            let now = Instant::now();
            let (last, since) = self.seen.entry(other).or_insert((counted, now));
            if *last != counted {
                (*last, *since) = (counted, now);
            }
            let stands_still = since.elapsed();
            let has_ended =
                self.store.check(&[&ended], deadline)? && self.store.get(&ended, deadline)? == b"1";
            others_run |= !has_ended && stands_still < IS_LOST;
        }
        Ok(others_run)
    }

    /// Says that this node has ended, if its number is still this process's: another one may have taken its place.
    fn tell_end(&self) -> Result<()> {
        let (node, deadline) = (self.node.node, deadline_in(BEAT));
        if self.store.get(&format!("{node}/who"), deadline)? != self.me.as_bytes() {
            return Ok(());
        }
        self.store.set(&format!("{node}/ended"), b"1", deadline)
    }
}

/// The thread `ox-rendezvous`: beats until it is told to end, and says when the answer to "does another node run" changes.
fn beat(member: &Mutex<Member>, ends: &Receiver<()>, others: &Sender<bool>) {
    let mut told = None;
    let mut is_well = true;
    loop {
        let beaten = lock(member).beat();
        match beaten {
            Ok(run) => {
                is_well = true;
                if told.replace(run) != Some(run) {
                    // It is not waited for any more: then the end comes too.
                    let _ = others.send(run);
                }
            }
            Err(e) => {
                if std::mem::take(&mut is_well) {
                    tracing::warn!("this node has lost the rendezvous; its processes go on: {e}");
                }
            }
        }
        if ends.recv_timeout(BEAT) != Err(RecvTimeoutError::Timeout) {
            break;
        }
    }
    // Node 0's own store ends with it.
    if let Err(e) = lock(member).tell_end() {
        tracing::debug!("the rendezvous was not told that this node has ended: {e}");
    }
}

/// Waits until all other nodes are there, and says from time to time for which. One that has ended since, or whose beat stands still, has gone again: a
/// start without it would wait for its replicas for ever. Once one node has seen all, the job has begun: some may end at once, and one may come back.
fn all_there(node: Node, store: &PrefixStore, deadline: Instant) -> Result<()> {
    let others: Vec<u32> = node.others().collect();
    let keys = |what: &str| -> Vec<String> { others.iter().map(|other| format!("{other}/{what}")).collect() };
    let (who, beats, ended) = (keys("who"), keys("beat"), keys("ended"));
    let mut seen: BTreeMap<u32, (Vec<u8>, Option<Instant>)> = BTreeMap::new();
    let mut says_at = deadline_in(SAY);
    loop {
        if store.check(&[BEGUN], deadline_in(CALL))? {
            return Ok(());
        }
        let mut missing = Vec::new();
        for (other, key) in others.iter().zip(&who) {
            if !store.check(&[key], deadline_in(CALL))? {
                missing.push(*other);
            }
        }
        if missing.is_empty() {
            let all: Vec<&str> = beats.iter().chain(&ended).map(String::as_str).collect();
            let values = store.multi_get(&all, deadline_in(CALL))?;
            let (counts, ends) = values.split_at(others.len().min(values.len()));
            for ((other, count), end) in others.iter().zip(counts).zip(ends) {
                let (last, moved) = seen.entry(*other).or_insert_with(|| (count.clone(), None));
                if last != count {
                    (*last, *moved) = (count.clone(), Some(Instant::now()));
                }
                if end == b"1" || moved.is_none_or(|moved| moved.elapsed() > IS_STILL) {
                    missing.push(*other);
                }
            }
        }
        let Some(first) = missing.first() else {
            return store.set(BEGUN, b"1", deadline_in(CALL));
        };
        if time_left(deadline).is_zero() {
            return Err(Error::timeout(format!(
                "nodes {missing:?} of {} have not come to the rendezvous, or have left it again; start `oxccl launch` there too",
                node.nodes
            )));
        }
        if time_left(says_at).is_zero() {
            says_at = deadline_in(SAY);
            say!(
                "oxccl: node {} waits for nodes {missing:?} of {}",
                node.node,
                node.nodes
            );
        }
        let until = deadline.min(says_at);
        if seen.contains_key(first) {
            std::thread::sleep((BEAT / 2).min(time_left(until)));
            continue;
        }
        match store.wait(&[&format!("{first}/who")], until) {
            Err(e) if e.kind() == ErrorKind::Timeout => {}
            other => other?,
        }
    }
}

#[cfg(test)]
mod tests {
    use oxccl::core::InMemoryStore;

    use super::*;

    fn soon() -> Instant {
        deadline_in(Duration::from_secs(60))
    }

    fn member(store: &Arc<InMemoryStore>, node: u32, nodes: u32, me: &str) -> Member {
        Member {
            node: Node {
                node,
                nodes,
                replicas: 1,
                ranks: 1,
            },
            me: me.to_owned(),
            store: PrefixStore::new(store.clone(), "nodes".to_owned()),
            seen: BTreeMap::new(),
        }
    }

    #[test]
    fn nodes_that_have_gone_again_are_waited_for_and_named() {
        for has_said_so in [true, false] {
            let store = Arc::new(InMemoryStore::new());
            let [zero, one, mut two] = [0, 1, 2].map(|node| member(&store, node, 3, "a process"));
            for node in [&zero, &one, &two] {
                node.claim(soon()).unwrap();
            }
            if has_said_so {
                one.tell_end().unwrap();
            }
            std::thread::scope(|scope| {
                let waits = scope.spawn(|| {
                    let short = deadline_in(Duration::from_secs(2));
                    all_there(zero.node, &zero.store, short).unwrap_err()
                });
                while !waits.is_finished() {
                    two.beat().unwrap();
                    std::thread::sleep(BEAT / 10);
                }
                let e = waits.join().unwrap();
                assert!(
                    e.kind() == ErrorKind::Timeout && e.to_string().contains("[1]"),
                    "{e}"
                );
            });
            // It comes back, and the job begins, for one that looks later, too.
            one.claim(soon()).unwrap();
            std::thread::scope(|scope| {
                let waits = scope.spawn(|| all_there(zero.node, &zero.store, soon()));
                while !waits.is_finished() {
                    two.beat().unwrap();
                    store.add("nodes/1/beat", 1, soon()).unwrap();
                    std::thread::sleep(BEAT / 10);
                }
                waits.join().unwrap().unwrap();
            });
            one.tell_end().unwrap();
            all_there(two.node, &two.store, soon()).unwrap();
        }
    }

    #[test]
    fn a_node_whose_claim_failed_claims_again_with_its_next_beat() {
        let store = Arc::new(InMemoryStore::new());
        let mut one = member(&store, 1, 2, "process 7");
        // A store that was started anew counted a beat, and then a call failed.
        store.add("nodes/1/beat", 1, soon()).unwrap();
        one.beat().unwrap();
        assert_eq!(store.get("nodes/1/who", soon()).unwrap(), b"process 7");
    }

    #[test]
    fn a_node_that_another_process_has_displaced_does_not_report_its_successor_as_ended() {
        let store = Arc::new(InMemoryStore::new());
        let member = |me: &str| member(&store, 1, 2, me);
        let (first, second) = (member("the first"), member("the second"));
        let has_ended = || first.store.get("1/ended", soon()).unwrap() == b"1";
        first.claim(soon()).unwrap();
        first.tell_end().unwrap();
        assert!(has_ended());
        second.claim(soon()).unwrap();
        assert!(!has_ended());
        first.tell_end().unwrap();
        assert!(!has_ended());
        second.tell_end().unwrap();
        assert!(has_ended());
    }

    #[test]
    fn loopback_stays_loopback_and_anything_else_is_reached_by_others() {
        for (given, bind, url) in [
            ("127.0.0.1:4000", "127.0.0.1:4001", "http://127.0.0.1:4001"),
            ("[::1]:4000", "[::1]:4001", "http://[::1]:4001"),
            ("localhost:4000", "localhost:4001", "http://localhost:4001"),
            ("node0:4000", "0.0.0.0:4001", "http://node0:4001"),
            ("[fd00::7]:4000", "[::]:4001", "http://[fd00::7]:4001"),
        ] {
            let address = Address::new(given).unwrap();
            assert_eq!(address.lighthouse().0, bind);
            assert_eq!(address.lighthouse_url(false), url);
        }
        assert!(
            Address::new("a:4000")
                .unwrap()
                .lighthouse_url(true)
                .starts_with("https://a:4001")
        );
        for wrong in ["node0", "node0:0", "node0:65535", ":1"] {
            let e = Address::new(wrong).unwrap_err();
            assert!(e.to_string().contains("--rendezvous"), "{e}");
        }
    }
}
