//! The parent's side: carries out what the child asks of the stores of its configurations.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ftcore::engine::spawn;
use ftcore::{Cancel, Error, ErrorKind, Result, Store, deadline_in};

use super::{Answer, Call, Request, decode, encode, perform};
use crate::channel::{Filled, Receiver, send};

/// Calls of one child that may wait at the same time.
const WAITING: u32 = 64;
/// Sending an answer to a child that reads takes microseconds.
const SEND: Duration = Duration::from_secs(10);

#[derive(Default)]
struct Offered {
    /// Each with the token that ends its waits.
    open: HashMap<u32, (Arc<dyn Store>, Cancel)>,
    next: u32,
}

/// The stores that a child may use, by number.
pub(crate) struct Stores {
    socket: Arc<OwnedFd>,
    sending: Mutex<()>,
    stores: Mutex<Offered>,
    waiting: AtomicU32,
    /// Cancelled once the child is gone, so that no thread outlives it by the whole deadline of a call.
    closed: Cancel,
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
            closed: Cancel::default(),
        });
        let this = stores.clone();
        spawn(&format!("ox-istore-{pid}"), move || {
            if let Err(error) = this.run(Receiver::new(socket, false)) {
                tracing::warn!(%error, "a child's store calls are not served any more");
            }
            this.close();
        })?;
        Ok(stores)
    }

    /// The number under which the child may use `store` from now on.
    pub(crate) fn offer(&self, store: Arc<dyn Store>) -> u32 {
        let mut stores = self.stores.lock().unwrap_or_else(PoisonError::into_inner);
        let number = stores.next;
        stores.next = number.wrapping_add(1);
        let ended = self.closed.child();
        stores.open.insert(number, (ended.over(&store), ended));
        number
    }

    /// False once no call of the child is served any more.
    pub(crate) fn is_open(&self) -> bool {
        self.closed.reason().is_none()
    }

    fn find(&self, number: u32) -> Result<Arc<dyn Store>> {
        let stores = self.stores.lock().unwrap_or_else(PoisonError::into_inner);
        let found = stores.open.get(&number).map(|(store, _)| store.clone());
        found.ok_or_else(|| {
            Error::new(
                ErrorKind::InvalidState,
                "the store of an earlier configuration is not open any more",
            )
        })
    }

    fn close(&self) {
        self.closed
            .cancel(Error::new(ErrorKind::Aborted, "the child is gone"));
        let _ = rustix::net::shutdown(&*self.socket, rustix::net::Shutdown::Both);
        let stores = std::mem::take(&mut self.stores.lock().unwrap_or_else(PoisonError::into_inner).open);
        drop(stores);
    }

    /// Reads requests; short ones are done here, those that may wait on threads of their own.
    fn run(self: &Arc<Self>, mut receiver: Receiver) -> Result<()> {
        loop {
            while let Some(body) = receiver.next()? {
                let request: Request = decode(body)?;
                match request.call {
                    Call::Release => {
                        let mut stores = self.stores.lock().unwrap_or_else(PoisonError::into_inner);
                        let released = stores.open.remove(&request.store);
                        drop(stores);
                        if let Some((_, ended)) = released {
                            let text = "the child does not use this store any more";
                            ended.cancel(Error::new(ErrorKind::Aborted, text));
                        }
                    }
                    Call::Get | Call::Wait | Call::MultiGet | Call::Barrier => self.wait_aside(request)?,
                    _ => {
                        let answer = self
                            .find(request.store)
                            .and_then(|store| perform(&*store, &request, request.deadline));
                        self.answer(request.number, answer)?;
                    }
                }
            }
            if receiver.fill(true)? == Filled::Closed {
                return Ok(());
            }
        }
    }

    fn wait_aside(self: &Arc<Self>, request: Request) -> Result<()> {
        if self.waiting.fetch_add(1, Ordering::AcqRel) >= WAITING {
            self.waiting.fetch_sub(1, Ordering::AcqRel);
            let text = format!("more than {WAITING} store calls of one child wait already");
            return self.answer(request.number, Err(Error::new(ErrorKind::Unavailable, text)));
        }
        let this = self.clone();
        spawn("ox-istore-wait", move || {
            let answer = this
                .find(request.store)
                .and_then(|store| perform(&*store, &request, request.deadline));
            this.waiting.fetch_sub(1, Ordering::AcqRel);
            if let Err(error) = this.answer(request.number, answer) {
                tracing::debug!(%error, "a child's store call was answered after the child was gone");
            }
        })
    }

    fn answer(&self, number: u64, answer: Result<Answer>) -> Result<()> {
        let frame = match encode(&(number, answer)) {
            Ok(frame) => frame,
            Err(too_long) => encode(&(number, Err::<Answer, _>(too_long)))?,
        };
        let _sending = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        send(&self.socket, &frame, &[], deadline_in(SEND))
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
