//! The child's side: a [`Store`] whose calls are carried out by the parent.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind, Result, Store, time_left};

use super::{Request, Value, decode_answer, encode};
use crate::channel::{Filled, Receiver, send};
use crate::clock;

/// The parent answers at the call's deadline at the latest; after this much more it is not going to.
const MARGIN: Duration = Duration::from_secs(2);

#[derive(Default)]
struct Calls {
    waiting: HashMap<u64, SyncSender<Result<Value>>>,
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
        std::thread::Builder::new()
            .name("ox-istore".to_string())
            .spawn(move || {
                if let Err(error) = this.run(Receiver::new(socket, false)) {
                    tracing::warn!(%error, "the parent's answers cannot be read");
                }
                let mut calls = this.calls.lock().unwrap_or_else(PoisonError::into_inner);
                calls.closed = true;
                // A caller that waits learns it by the closed channel.
                calls.waiting.clear();
            })
            .map_err(|e| Error::io("start the thread for store calls", e))?;
        Ok(line)
    }

    fn run(&self, mut receiver: Receiver) -> Result<()> {
        loop {
            while let Some(body) = receiver.next()? {
                let (number, answer) = decode_answer(body)?;
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

    fn call(&self, store: u32, request: &Request, deadline: Instant) -> Result<Value> {
        let gone = || {
            Error::new(
                ErrorKind::Unavailable,
                "the parent process does not serve its store any more",
            )
        };
        let (answer, answered) = sync_channel(1);
        let number = {
            let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
            if calls.closed {
                return Err(gone());
            }
            let number = calls.next;
            calls.next += 1;
            calls.waiting.insert(number, answer);
            number
        };
        let until = clock::later(deadline, MARGIN);
        let sent = encode(number, store, deadline, request).and_then(|frame| {
            let _sending = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
            send(&self.socket, &frame, &[], until)
        });
        let result = sent.and_then(|()| match answered.recv_timeout(time_left(until)) {
            Ok(answer) => answer,
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => Err(gone()),
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {
                Err(Error::timeout("the parent process did not answer a store call"))
            }
        });
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        calls.waiting.remove(&number);
        result
    }
}

/// One of the parent's stores.
pub(crate) struct ProxyStore {
    line: Arc<Line>,
    number: u32,
}

impl ProxyStore {
    pub(crate) fn new(line: Arc<Line>, number: u32) -> Self {
        Self { line, number }
    }

    fn call(&self, request: &Request, deadline: Instant) -> Result<Value> {
        self.line.call(self.number, request, deadline)
    }
}

impl Drop for ProxyStore {
    fn drop(&mut self) {
        // Best effort and without waiting: a parent that does not read keeps an entry in a map.
        let now = Instant::now();
        if let Ok(frame) = encode(u64::MAX, self.number, now, &Request::Release)
            && let Ok(_sending) = self.line.sending.try_lock()
        {
            drop(send(
                &self.line.socket,
                &frame,
                &[],
                clock::later(now, Duration::from_millis(1)),
            ));
        }
    }
}

fn other(value: &Value) -> Error {
    crate::wire::odd(format_args!("another store answer than was asked for: {value:?}"))
}

fn nothing(value: Value) -> Result<()> {
    match value {
        Value::Nothing => Ok(()),
        v => Err(other(&v)),
    }
}

fn bytes(value: Value) -> Result<Vec<u8>> {
    match value {
        Value::Bytes(b) => Ok(b),
        v => Err(other(&v)),
    }
}

fn number(value: Value) -> Result<i64> {
    match value {
        Value::Number(n) => Ok(n),
        v => Err(other(&v)),
    }
}

fn truth(value: Value) -> Result<bool> {
    match value {
        Value::Truth(t) => Ok(t),
        v => Err(other(&v)),
    }
}

fn owned(keys: &[&str]) -> Vec<String> {
    keys.iter().map(ToString::to_string).collect()
}

impl Store for ProxyStore {
    fn set(&self, key: &str, value: &[u8], deadline: Instant) -> Result<()> {
        nothing(self.call(&Request::Set(key.into(), value.into()), deadline)?)
    }

    fn get(&self, key: &str, deadline: Instant) -> Result<Vec<u8>> {
        bytes(self.call(&Request::Get(key.into()), deadline)?)
    }

    fn add(&self, key: &str, amount: i64, deadline: Instant) -> Result<i64> {
        number(self.call(&Request::Add(key.into(), amount), deadline)?)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8], deadline: Instant) -> Result<Vec<u8>> {
        bytes(self.call(
            &Request::CompareSet(key.into(), expected.into(), desired.into()),
            deadline,
        )?)
    }

    fn check(&self, keys: &[&str], deadline: Instant) -> Result<bool> {
        truth(self.call(&Request::Check(owned(keys)), deadline)?)
    }

    fn wait(&self, keys: &[&str], deadline: Instant) -> Result<()> {
        nothing(self.call(&Request::Wait(owned(keys)), deadline)?)
    }

    fn delete(&self, key: &str, deadline: Instant) -> Result<bool> {
        truth(self.call(&Request::Delete(key.into()), deadline)?)
    }

    fn append(&self, key: &str, value: &[u8], deadline: Instant) -> Result<()> {
        nothing(self.call(&Request::Append(key.into(), value.into()), deadline)?)
    }

    fn multi_get(&self, keys: &[&str], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        match self.call(&Request::MultiGet(owned(keys)), deadline)? {
            Value::Many(all) => Ok(all),
            v => Err(other(&v)),
        }
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])], deadline: Instant) -> Result<()> {
        let pairs = pairs
            .iter()
            .map(|(k, v)| ((*k).to_string(), v.to_vec()))
            .collect();
        nothing(self.call(&Request::MultiSet(pairs), deadline)?)
    }

    fn num_keys(&self, deadline: Instant) -> Result<i64> {
        number(self.call(&Request::NumKeys, deadline)?)
    }

    fn list(&self, deadline: Instant) -> Result<Vec<String>> {
        match self.call(&Request::List, deadline)? {
            Value::Names(all) => Ok(all),
            v => Err(other(&v)),
        }
    }

    fn barrier(&self, key: &str, world_size: u32, deadline: Instant) -> Result<()> {
        nothing(self.call(&Request::Barrier(key.into(), world_size), deadline)?)
    }
}
