//! A network of hosts with names. Bytes come late and in order; a path may be cut and a host held, and what was sent meanwhile comes afterwards,
//! as TCP has it; a connection may be lost; a host may be killed, which its peers hear from its kernel, or go silent, which they do not.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::mpsc;
use tokio::time::Sleep;

use super::random::Random;
use crate::clock;

/// What one direction of a connection holds before its writer waits, in bytes.
const WINDOW: usize = 256 * 1024;
/// How often a connecting host tries again while it hears nothing.
const AGAIN: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(super) struct Net(Mutex<State>);

#[derive(Debug)]
struct State {
    random: Random,
    hosts: BTreeMap<String, At>,
    /// Paths over which nothing comes, each way.
    cuts: BTreeSet<(String, String)>,
    held: BTreeSet<String>,
    /// Both directions of each connection.
    connections: Vec<[Weak<Pipe>; 2]>,
    /// Of a hundred writes so many are much later than the rest.
    late: u64,
}

impl Default for State {
    fn default() -> Self {
        Self {
            random: Random::new(0),
            hosts: BTreeMap::new(),
            cuts: BTreeSet::new(),
            held: BTreeSet::new(),
            connections: Vec::new(),
            late: 0,
        }
    }
}

/// What is there under a name.
#[derive(Debug, Default)]
struct At {
    incarnation: u64,
    up: bool,
    /// Its kernel answers.
    answers: bool,
    listener: Option<mpsc::UnboundedSender<(End, SocketAddr)>>,
}

/// One incarnation of a host, for what runs on it.
#[derive(Debug, Clone)]
pub(crate) struct Host {
    net: Arc<Net>,
    name: Arc<str>,
    incarnation: u64,
}

impl Net {
    pub(super) fn new(random: Random, late: u64) -> Arc<Self> {
        Arc::new(Self(Mutex::new(State {
            random,
            late,
            ..State::default()
        })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a host. Connections of an earlier incarnation are unknown to it.
    pub(super) fn start(self: &Arc<Self>, name: &str) -> Host {
        let mut state = self.state();
        let at = state.hosts.entry(name.to_string()).or_default();
        at.incarnation += 1;
        (at.up, at.answers) = (true, true);
        let host = Host {
            net: self.clone(),
            name: name.into(),
            incarnation: at.incarnation,
        };
        for pipe in state.pipes().filter(|pipe| pipe.is_of(name)) {
            pipe.lose();
        }
        host
    }

    /// Ends a host: its peers hear that its connections end, or nothing at all.
    pub(super) fn end(&self, name: &str, silently: bool) {
        let mut state = self.state();
        let Some(at) = state.hosts.get_mut(name).filter(|at| at.up) else {
            return;
        };
        (at.up, at.answers, at.listener) = (false, !silently, None);
        for pipe in state.pipes().filter(|pipe| pipe.is_of(name)) {
            pipe.end(name, silently);
        }
    }

    /// Cuts the path between two hosts, or heals it.
    pub(super) fn set_cut(&self, a: &str, b: &str, cut: bool) {
        let mut state = self.state();
        for (a, b) in [(a, b), (b, a)] {
            let path = (a.to_string(), b.to_string());
            if cut {
                state.cuts.insert(path);
            } else {
                state.cuts.remove(&path);
            }
        }
        state.wake();
    }

    /// Nothing comes to this host and nothing from it, or again.
    pub(super) fn set_held(&self, name: &str, held: bool) {
        let mut state = self.state();
        if held {
            state.held.insert(name.to_string());
        } else {
            state.held.remove(name);
        }
        state.wake();
    }

    /// Loses the connection that `pick` chooses.
    pub(super) fn lose_one(&self, pick: u64) {
        let mut state = self.state();
        state.forget_closed();
        let count = state.connections.len() as u64;
        if count > 0 {
            for pipe in state.connections[(pick % count) as usize]
                .iter()
                .filter_map(Weak::upgrade)
            {
                pipe.lose();
            }
        }
    }

    /// Whether bytes pass between two hosts.
    pub(super) fn passes(&self, a: &str, b: &str) -> bool {
        self.state().passes(a, b)
    }
}

impl State {
    fn passes(&self, a: &str, b: &str) -> bool {
        let cut = !self.cuts.is_empty() && self.cuts.contains(&(a.to_string(), b.to_string()));
        !cut && !self.held.contains(a) && !self.held.contains(b)
    }

    fn pipes(&self) -> impl Iterator<Item = Arc<Pipe>> {
        self.connections.iter().flatten().filter_map(Weak::upgrade)
    }

    fn forget_closed(&mut self) {
        self.connections
            .retain(|pipes| pipes.iter().any(|p| p.strong_count() > 0));
    }

    fn wake(&self) {
        self.pipes().for_each(|pipe| pipe.wake());
    }
}

impl Host {
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// It runs still.
    pub(super) fn is_up(&self) -> bool {
        let state = self.net.state();
        state
            .hosts
            .get(self.name())
            .is_some_and(|at| at.up && at.incarnation == self.incarnation)
    }

    pub(super) fn listen(&self) -> Listener {
        let (sender, incoming) = mpsc::unbounded_channel();
        if let Some(at) = self.net.state().hosts.get_mut(self.name()) {
            at.listener = Some(sender);
        }
        Listener(incoming)
    }

    /// A connection to what listens on the host `name`. Errors: refused; without an answer it goes on trying.
    pub(crate) async fn connect(&self, name: &str) -> io::Result<End> {
        loop {
            tokio::time::sleep(Duration::from_millis(1)).await;
            if !self.is_up() {
                return Err(io::ErrorKind::NetworkDown.into());
            }
            if let Some(end) = self.try_connect(name)? {
                return Ok(end);
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// `None` while nothing answers.
    fn try_connect(&self, name: &str) -> io::Result<Option<End>> {
        let mut state = self.net.state();
        let passes = state.passes(self.name(), name);
        let Some(at) = state.hosts.get(name).filter(|at| passes && at.answers) else {
            return Ok(None);
        };
        let refused = || io::Error::from(io::ErrorKind::ConnectionRefused);
        let listener = at.listener.clone().ok_or_else(refused)?;
        let to = Self {
            net: self.net.clone(),
            name: name.into(),
            incarnation: at.incarnation,
        };
        state.forget_closed();
        let number = state.connections.len() as u16;
        let late = state.late;
        let [there, back] = [(self.clone(), to.clone()), (to, self.clone())].map(|(from, to)| {
            Arc::new(Pipe {
                from,
                to,
                late,
                flow: Mutex::new(Flow::new(state.random.split())),
            })
        });
        state
            .connections
            .push([Arc::downgrade(&there), Arc::downgrade(&back)]);
        let (near, far) = (End::new(back.clone(), there.clone()), End::new(there, back));
        drop(state);
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, number));
        listener.send((far, address)).map_err(|_| refused())?;
        Ok(Some(near))
    }
}

/// What comes to a host.
#[derive(Debug)]
pub(crate) struct Listener(mpsc::UnboundedReceiver<(End, SocketAddr)>);

impl Listener {
    pub(crate) async fn accept(&mut self) -> io::Result<(End, SocketAddr)> {
        match self.0.recv().await {
            Some(accepted) => Ok(accepted),
            None => std::future::pending().await,
        }
    }
}

/// One direction of a connection.
#[derive(Debug)]
struct Pipe {
    from: Host,
    to: Host,
    late: u64,
    flow: Mutex<Flow>,
}

#[derive(Debug)]
struct Flow {
    random: Random,
    /// What is under way, with the time at which it comes; without bytes, the end.
    queue: VecDeque<(Instant, Vec<u8>)>,
    held: usize,
    is_ended: bool,
    /// Nothing reads any more.
    is_unread: bool,
    is_lost: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

impl Flow {
    fn new(random: Random) -> Self {
        Self {
            random,
            queue: VecDeque::new(),
            held: 0,
            is_ended: false,
            is_unread: false,
            is_lost: false,
            reader: None,
            writer: None,
        }
    }

    fn push(&mut self, bytes: &[u8], late: u64) {
        let delay = match self.random.percent(late) {
            true => self.random.millis(20..400),
            false => self.random.millis(0..4),
        };
        let due = clock::now() + delay;
        let due = self.queue.back().map_or(due, |(last, _)| due.max(*last));
        self.held += bytes.len();
        self.queue.push_back((due, bytes.to_vec()));
        self.wake();
    }

    fn end(&mut self, late: u64) {
        if !std::mem::replace(&mut self.is_ended, true) {
            self.push(&[], late);
        }
    }

    fn wake(&mut self) {
        for waker in [self.reader.take(), self.writer.take()].into_iter().flatten() {
            waker.wake();
        }
    }
}

impl Pipe {
    fn flow(&self) -> MutexGuard<'_, Flow> {
        self.flow.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_of(&self, host: &str) -> bool {
        self.from.name() == host || self.to.name() == host
    }

    fn wake(&self) {
        self.flow().wake();
    }

    fn lose(&self) {
        let mut flow = self.flow();
        flow.is_lost = true;
        flow.wake();
    }

    /// The host at one of its ends has ended.
    fn end(&self, host: &str, silently: bool) {
        let mut flow = self.flow();
        if !silently && self.from.name() == host {
            flow.end(self.late);
        }
        if !silently && self.to.name() == host {
            flow.is_unread = true;
        }
        flow.wake();
    }
}

/// One end of a connection.
#[derive(Debug)]
pub(crate) struct End {
    comes: Arc<Pipe>,
    goes: Arc<Pipe>,
    /// Until the next bytes are due.
    due: Option<Pin<Box<Sleep>>>,
}

impl End {
    fn new(comes: Arc<Pipe>, goes: Arc<Pipe>) -> Self {
        Self {
            comes,
            goes,
            due: None,
        }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        // A host that has ended has closed it, or says nothing.
        if self.goes.from.is_up() {
            self.goes.flow().end(self.goes.late);
            let mut flow = self.comes.flow();
            flow.is_unread = true;
            flow.wake();
        }
    }
}

impl AsyncRead for End {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let pipe = self.comes.clone();
        if !pipe.to.is_up() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        let passes = pipe.to.net.passes(pipe.from.name(), pipe.to.name());
        loop {
            let mut flow = pipe.flow();
            if flow.is_lost && passes {
                return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
            }
            flow.reader = Some(context.waker().clone());
            let Some(due) = flow.queue.front().map(|(due, _)| *due).filter(|_| passes) else {
                return Poll::Pending;
            };
            if due > clock::now() {
                drop(flow);
                let mut sleep = Box::pin(tokio::time::sleep_until(due.into()));
                if sleep.as_mut().poll(context).is_pending() {
                    self.due = Some(sleep);
                    return Poll::Pending;
                }
                continue;
            }
            let Some((_, bytes)) = flow.queue.front_mut() else {
                return Poll::Pending;
            };
            let taken = bytes.len().min(into.remaining());
            into.put_slice(&bytes[..taken]);
            bytes.drain(..taken);
            // The end stays.
            if bytes.is_empty() && taken > 0 {
                flow.queue.pop_front();
            }
            flow.held -= taken;
            if let Some(writer) = flow.writer.take() {
                writer.wake();
            }
            return Poll::Ready(Ok(()));
        }
    }
}

impl AsyncWrite for End {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let broken = || Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        if !self.goes.from.is_up() {
            return broken();
        }
        let passes = self
            .goes
            .to
            .net
            .passes(self.goes.from.name(), self.goes.to.name());
        let mut flow = self.goes.flow();
        if (passes && (flow.is_lost || flow.is_unread)) || flow.is_ended {
            return broken();
        }
        if flow.held >= WINDOW {
            flow.writer = Some(context.waker().clone());
            return Poll::Pending;
        }
        if !bytes.is_empty() {
            flow.push(bytes, self.goes.late);
        }
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.goes.from.is_up() {
            self.goes.flow().end(self.goes.late);
        }
        Poll::Ready(Ok(()))
    }
}
