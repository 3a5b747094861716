//! The child's side: a [`Store`] whose calls are carried out by the parent.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ftcore::engine::spawn;
use ftcore::{Cancel, Error, ErrorKind, Result, Store, later};

use super::{Answer, Call, Request, decode, encode};
use crate::channel::{Filled, Receiver, send};
use crate::wire::odd;

/// The parent answers at the call's deadline at the latest; after this much more it is not going to.
const MARGIN: Duration = Duration::from_secs(2);

#[derive(Default)]
struct Calls {
    waiting: HashMap<u64, SyncSender<Result<Answer>>>,
    next: u64,
    closed: bool,
}

/// The socket to the parent's stores, shared by all stores of this process.
pub(crate) struct Line {
    socket: Arc<OwnedFd>,
    sending: Mutex<()>,
    calls: Mutex<Calls>,
}

impl Line {
    /// Starts the thread that takes the answers.
    pub(crate) fn open(socket: OwnedFd) -> Result<Arc<Self>> {
        let socket = Arc::new(socket);
        let line = Arc::new(Self {
            socket: socket.clone(),
            sending: Mutex::new(()),
            calls: Mutex::default(),
        });
        let this = line.clone();
        spawn("ox-istore", move || {
            if let Err(error) = this.run(Receiver::new(socket, false)) {
                tracing::warn!(%error, "the parent's answers cannot be read");
            }
            let mut calls = this.calls.lock().unwrap_or_else(PoisonError::into_inner);
            calls.closed = true;
            // A caller that waits learns it by the closed channel.
            calls.waiting.clear();
        })?;
        Ok(line)
    }

    fn run(&self, mut receiver: Receiver) -> Result<()> {
        loop {
            while let Some(body) = receiver.next()? {
                let (number, answer): (u64, Result<Answer>) = decode(body)?;
                let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(caller) = calls.waiting.remove(&number) {
                    drop(caller.send(answer));
                }
            }
            if receiver.fill(true)? == Filled::Closed {
                return Ok(());
            }
        }
    }

    fn call(&self, mut request: Request, cancel: &Cancel) -> Result<Answer> {
        let gone = || {
            Error::new(
                ErrorKind::Unavailable,
                "the parent process does not serve its store any more",
            )
        };
        let (answer, answered) = sync_channel(1);
        {
            let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
            if calls.closed {
                return Err(gone());
            }
            request.number = calls.next;
            calls.next += 1;
            calls.waiting.insert(request.number, answer);
        }
        let until = later(request.deadline, MARGIN);
        let sent = encode(&request).and_then(|frame| {
            let _sending = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
            send(&self.socket, &frame, &[], until)
        });
        let answer = sent.and_then(|()| cancel.receive(&answered, until));
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        calls.waiting.remove(&request.number);
        match answer? {
            Some(answer) => answer,
            None if calls.closed => Err(gone()),
            None => Err(Error::timeout("the parent process did not answer a store call")),
        }
    }
}

/// One of the parent's stores, which is told when no view of it is left.
struct Remote {
    line: Arc<Line>,
    number: u32,
}

/// A view of one of the parent's stores.
pub(crate) struct ProxyStore {
    remote: Arc<Remote>,
    /// Ends its calls. The parent goes on with what it was asked until then, or until the store is released.
    cancel: Cancel,
}

impl ProxyStore {
    pub(crate) fn new(line: Arc<Line>, number: u32) -> Self {
        Self {
            remote: Arc::new(Remote { line, number }),
            cancel: Cancel::default(),
        }
    }

    fn request(&self, call: Call, keys: &[&str], values: &[&[u8]], deadline: Instant) -> Request {
        Request {
            keys: keys.iter().map(ToString::to_string).collect(),
            values: values.iter().map(|value| value.to_vec()).collect(),
            ..self.remote.request(call, deadline)
        }
    }

    fn call(&self, request: Request) -> Result<Answer> {
        self.remote.line.call(request, &self.cancel)
    }

    fn ask(&self, call: Call, keys: &[&str], values: &[&[u8]], deadline: Instant) -> Result<Answer> {
        self.call(self.request(call, keys, values, deadline))
    }

    /// As [`ask`](Self::ask), for a call with a number.
    fn count(&self, call: Call, key: &str, amount: i64, deadline: Instant) -> Result<i64> {
        let request = self.request(call, &[key], &[], deadline);
        Ok(self.call(Request { amount, ..request })?.number)
    }

    /// As [`ask`](Self::ask), for a call that gives one value.
    fn value(&self, call: Call, key: &str, values: &[&[u8]], deadline: Instant) -> Result<Vec<u8>> {
        let value = self.ask(call, &[key], values, deadline)?.values.pop();
        value.ok_or_else(|| odd("a store answer without its value"))
    }
}

impl Remote {
    fn request(&self, call: Call, deadline: Instant) -> Request {
        Request {
            number: u64::MAX,
            store: self.number,
            deadline,
            call,
            keys: Vec::new(),
            values: Vec::new(),
            amount: 0,
        }
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        // Best effort and without waiting: a parent that does not read keeps an entry in a map.
        let now = Instant::now();
        if let Ok(frame) = encode(&self.request(Call::Release, now))
            && let Ok(_sending) = self.line.sending.try_lock()
        {
            let until = later(now, Duration::from_millis(1));
            drop(send(&self.line.socket, &frame, &[], until));
        }
    }
}

impl Store for ProxyStore {
    fn set(&self, key: &str, value: &[u8], deadline: Instant) -> Result<()> {
        self.ask(Call::Set, &[key], &[value], deadline).map(drop)
    }

    fn get(&self, key: &str, deadline: Instant) -> Result<Vec<u8>> {
        self.value(Call::Get, key, &[], deadline)
    }

    fn add(&self, key: &str, amount: i64, deadline: Instant) -> Result<i64> {
        self.count(Call::Add, key, amount, deadline)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8], deadline: Instant) -> Result<Vec<u8>> {
        self.value(Call::CompareSet, key, &[expected, desired], deadline)
    }

    fn check(&self, keys: &[&str], deadline: Instant) -> Result<bool> {
        Ok(self.ask(Call::Check, keys, &[], deadline)?.number != 0)
    }

    fn wait(&self, keys: &[&str], deadline: Instant) -> Result<()> {
        self.ask(Call::Wait, keys, &[], deadline).map(drop)
    }

    fn delete(&self, key: &str, deadline: Instant) -> Result<bool> {
        Ok(self.ask(Call::Delete, &[key], &[], deadline)?.number != 0)
    }

    fn append(&self, key: &str, value: &[u8], deadline: Instant) -> Result<()> {
        self.ask(Call::Append, &[key], &[value], deadline).map(drop)
    }

    fn multi_get(&self, keys: &[&str], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        Ok(self.ask(Call::MultiGet, keys, &[], deadline)?.values)
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])], deadline: Instant) -> Result<()> {
        let (keys, values): (Vec<&str>, Vec<&[u8]>) = pairs.iter().copied().unzip();
        self.ask(Call::MultiSet, &keys, &values, deadline).map(drop)
    }

    fn num_keys(&self, deadline: Instant) -> Result<i64> {
        Ok(self.ask(Call::NumKeys, &[], &[], deadline)?.number)
    }

    fn list(&self, deadline: Instant) -> Result<Vec<String>> {
        let names = self.ask(Call::List, &[], &[], deadline)?.values.into_iter();
        names
            .map(|name| String::from_utf8(name).map_err(|_| odd("a key that is not UTF-8")))
            .collect()
    }

    fn barrier(&self, key: &str, world_size: u32, deadline: Instant) -> Result<()> {
        self.count(Call::Barrier, key, world_size.into(), deadline)
            .map(drop)
    }

    /// The parent's store may take longer to answer than a turn lasts: it is asked once, and the token is looked at here.
    fn cancelled_by(&self, cancel: &Cancel) -> Option<Arc<dyn Store>> {
        let token = cancel.clone();
        Some(Arc::new(Self {
            remote: self.remote.clone(),
            cancel: self.cancel.or(move || token.reason()),
        }))
    }
}
