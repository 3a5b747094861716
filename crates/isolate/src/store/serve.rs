//! The parent's side: carries out what the child asks of the stores of its configurations.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind, Result, Store};

use super::{Request, Value, decode, encode_answer, perform};
use crate::channel::{Filled, Receiver, send};
use crate::clock;

/// Calls of one child that may wait at the same time.
const WAITING: u32 = 64;
/// A call that waits looks this often whether its child is still there.
const SLICE: Duration = Duration::from_millis(200);
/// Sending an answer to a child that reads takes microseconds.
const SEND: Duration = Duration::from_secs(10);

#[derive(Default)]
struct Offered {
    open: HashMap<u32, Arc<dyn Store>>,
    next: u32,
}

/// The stores that a child may use, by number.
pub(crate) struct Stores {
    socket: Arc<OwnedFd>,
    sending: Mutex<()>,
    stores: Mutex<Offered>,
    waiting: AtomicU32,
    /// The child is gone.
    closed: AtomicBool,
}

impl Stores {
    /// Serves the child until it closes its end of the socket.
    pub(crate) fn serve(socket: OwnedFd, pid: impl std::fmt::Display) -> Result<Arc<Self>> {
        let socket = Arc::new(socket);
        let stores = Arc::new(Self {
            socket: socket.clone(),
            sending: Mutex::new(()),
            stores: Mutex::default(),
            waiting: AtomicU32::new(0),
            closed: AtomicBool::new(false),
        });
        let this = stores.clone();
        std::thread::Builder::new()
            .name(format!("ox-istore-{pid}"))
            .spawn(move || {
                if let Err(error) = this.run(Receiver::new(socket, false)) {
                    tracing::warn!(%error, "a child's store calls are not served any more");
                }
                this.close();
            })
            .map_err(|e| Error::io("start the thread that serves a child's store calls", e))?;
        Ok(stores)
    }

    /// The number under which the child may use `store` from now on.
    pub(crate) fn offer(&self, store: Arc<dyn Store>) -> u32 {
        let mut stores = self.stores.lock().unwrap_or_else(PoisonError::into_inner);
        let number = stores.next;
        stores.next = number.wrapping_add(1);
        stores.open.insert(number, store);
        number
    }

    fn find(&self, number: u32) -> Result<Arc<dyn Store>> {
        let stores = self.stores.lock().unwrap_or_else(PoisonError::into_inner);
        stores.open.get(&number).cloned().ok_or_else(|| {
            Error::new(
                ErrorKind::InvalidState,
                "the store of an earlier configuration is not open any more",
            )
        })
    }

    fn close(&self) {
        self.closed.store(true, Ordering::Release);
        let _ = rustix::net::shutdown(&*self.socket, rustix::net::Shutdown::Both);
        let stores = std::mem::take(&mut self.stores.lock().unwrap_or_else(PoisonError::into_inner).open);
        drop(stores);
    }

    /// Reads requests; short ones are done here, those that may wait on threads of their own.
    fn run(self: &Arc<Self>, mut receiver: Receiver) -> Result<()> {
        loop {
            while let Some(body) = receiver.next()? {
                let (number, store, deadline, request) = decode(body)?;
                if request == Request::Release {
                    let mut stores = self.stores.lock().unwrap_or_else(PoisonError::into_inner);
                    let released = stores.open.remove(&store);
                    drop(stores);
                    drop(released);
                    continue;
                }
                let waits = matches!(
                    request,
                    Request::Get(_) | Request::Wait(_) | Request::MultiGet(_) | Request::Barrier(..)
                );
                if !waits {
                    self.answer(
                        number,
                        self.find(store).and_then(|s| perform(&*s, &request, deadline)),
                    )?;
                } else if self.waiting.fetch_add(1, Ordering::AcqRel) >= WAITING {
                    self.waiting.fetch_sub(1, Ordering::AcqRel);
                    self.answer(
                        number,
                        Err(Error::new(
                            ErrorKind::Unavailable,
                            format!("more than {WAITING} store calls of one child wait already"),
                        )),
                    )?;
                } else {
                    self.wait_aside(number, store, deadline, request)?;
                }
            }
            if receiver.fill(true)? == Filled::Closed {
                return Ok(());
            }
        }
    }

    fn wait_aside(
        self: &Arc<Self>,
        number: u64,
        store: u32,
        deadline: Instant,
        request: Request,
    ) -> Result<()> {
        let this = self.clone();
        std::thread::Builder::new()
            .name("ox-istore-wait".to_string())
            .spawn(move || {
                let answer = this
                    .find(store)
                    .and_then(|s| this.patiently(&*s, &request, deadline));
                this.waiting.fetch_sub(1, Ordering::AcqRel);
                if let Err(error) = this.answer(number, answer) {
                    tracing::debug!(%error, "a child's store call was answered after the child was gone");
                }
            })
            .map(drop)
            .map_err(|e| Error::io("start a thread for a store call", e))
    }

    /// Waits in slices, so that the thread does not outlive its child by the call's whole deadline.
    fn patiently(&self, store: &dyn Store, request: &Request, deadline: Instant) -> Result<Value> {
        let keys = match request {
            Request::Get(k) => std::slice::from_ref(k),
            Request::Wait(ks) | Request::MultiGet(ks) => ks.as_slice(),
            // Entering a barrier twice would count twice.
            _ => return perform(store, request, deadline),
        };
        let keys = super::refs(keys);
        loop {
            let slice = clock::later(Instant::now(), SLICE);
            if slice >= deadline {
                return perform(store, request, deadline);
            }
            match store.wait(&keys, slice) {
                Ok(()) => return perform(store, request, deadline),
                Err(e) if e.kind() == ErrorKind::Timeout => {}
                Err(e) => return Err(e),
            }
            if self.closed.load(Ordering::Acquire) {
                return Err(Error::new(ErrorKind::Aborted, "the child is gone"));
            }
        }
    }

    fn answer(&self, number: u64, answer: Result<Value>) -> Result<()> {
        let frame = match encode_answer(number, &answer) {
            Ok(frame) => frame,
            Err(too_long) => encode_answer(number, &Err(too_long))?,
        };
        let _sending = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        send(&self.socket, &frame, &[], clock::later(Instant::now(), SEND))
    }
}

#[cfg(test)]
impl Stores {
    pub(crate) fn waiting(&self) -> u32 {
        self.waiting.load(Ordering::Acquire)
    }

    pub(crate) fn hang_up(&self) {
        self.close();
    }
}
