//! Orders to the child: operations, calls with an answer, and what others left to the keeper to send.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use ftcore::{Cancel, Error, ErrorKind, Result};

use super::{Call, Link};
use crate::front::Front;
use crate::pending::Pending;
use crate::pool::{Known, Memory, Segment};
use crate::wire::frames::{Order, Settled};
use crate::{channel, clock};

/// Sending an order to a child that reads takes microseconds.
const SEND: Duration = Duration::from_secs(5);

impl Link {
    /// Sends an order with descriptors.
    pub(crate) fn send_with(&self, order: &Order, fds: &[OwnedFd], deadline: Instant) -> Result<()> {
        let frame = order.encode()?;
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        let _sending = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        channel::send(&self.socket, &frame, &fds, deadline)
    }

    /// Asks the child for something that it does on a thread of its own, and waits for the answer until `deadline`, or until it is cancelled.
    ///
    /// Errors: the child's own; what it ended with, if it did; the reason of `cancel`, or `Timeout` if there is no answer, which leave it running.
    pub(crate) fn call(
        &self,
        make: impl FnOnce(u32) -> Order,
        front: Option<Arc<Front>>,
        deadline: Instant,
        cancel: &Cancel,
    ) -> Result<Settled> {
        let (answer, answered) = std::sync::mpsc::sync_channel(1);
        let number = {
            let mut state = self.lock();
            if let Some(e) = state
                .gone
                .clone()
                .or_else(|| state.ending.as_ref().map(|e| e.error.clone()))
            {
                return Err(e);
            }
            let number = state.next_call;
            state.next_call = state.next_call.wrapping_add(1);
            state.calls.insert(number, Call { answer, front });
            number
        };
        let frame = make(number).encode()?;
        {
            let _sending = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
            if let Err(e) = channel::send(&self.socket, &frame, &[], clock::later(Instant::now(), SEND)) {
                // The keeper learns the true reason; see below.
                tracing::debug!(pid = %self.pid, error = %e, "an order was not delivered");
            }
        }
        let answer = cancel.receive(&answered, deadline);
        if let Ok(Some(answer)) = answer {
            return answer;
        }
        self.lock().calls.remove(&number);
        answer.and(Err(Error::timeout(format!(
            "the child process (pid {}) that runs '{}' did not answer",
            self.pid, self.backend
        ))))
    }

    /// Puts an operation into the child. `frame` makes the message from the operation's number.
    ///
    /// Errors give the pending operation back.
    pub(crate) fn submit(
        &self,
        pending: Pending,
        segments: &[Arc<Segment>],
        frame: impl FnOnce(u64) -> Result<Vec<u8>>,
    ) -> Result<(), Box<(Error, Pending)>> {
        let mut known = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        let until = pending.deadline.min(clock::later(Instant::now(), SEND));
        let id = {
            let mut state = self.lock();
            if let Some(e) = state
                .gone
                .clone()
                .or_else(|| state.ending.as_ref().map(|e| e.error.clone()))
            {
                return Err(Box::new((e, pending)));
            }
            let id = state.next_id;
            state.next_id += 1;
            state.pending.insert(id, pending);
            id
        };
        let sent = self
            .introduce(&mut known, segments, until)
            .and_then(|()| channel::send(&self.socket, &frame(id)?, &[], until));
        drop(known);
        let Err(error) = sent else { return Ok(()) };
        // A child that is gone is the keeper's to explain. Otherwise half a frame may be out, and this child cannot be talked to
        // any more. Either way it is not known whether it has seen the operation, which fails like all others at its end.
        if error.kind() == ErrorKind::Unavailable {
            return Ok(());
        }
        let error = Error::new(
            ErrorKind::Unavailable,
            format!("the child process (pid {}) takes no orders: {error}", self.pid),
        );
        self.end(error, None, Duration::ZERO);
        Ok(())
    }

    /// Tells the child of segments that it does not know yet, and of those that are gone.
    fn introduce(&self, known: &mut Known, segments: &[Arc<Segment>], until: Instant) -> Result<()> {
        for segment in segments {
            if known.is_new(segment) {
                let (id, bytes) = (segment.id, segment.bytes() as u64);
                let (order, fd) = match &segment.memory {
                    Memory::Host(mapping) => (Order::Segment { id, bytes }, mapping.fd()),
                    Memory::Device(_, handle) => {
                        let handle = handle.clone();
                        (Order::DeviceSegment { id, bytes, handle }, None)
                    }
                };
                let fds: Vec<_> = fd.into_iter().collect();
                channel::send(&self.socket, &order.encode()?, &fds, until)?;
            }
        }
        Ok(())
    }

    /// The keeper's part of sending: what others left to it, and segments that are gone.
    pub(crate) fn flush(&self, idle: bool) -> Result<()> {
        let orders = std::mem::take(&mut self.lock().outbox);
        if orders.is_empty() && !idle {
            return Ok(());
        }
        let mut known = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        let until = clock::later(Instant::now(), Duration::from_millis(50));
        for order in orders {
            channel::send(&self.socket, &order.encode()?, &[], until)?;
        }
        if idle {
            drop(self.pool.trim());
            for id in known.gone() {
                channel::send(&self.socket, &Order::Forget { id }.encode()?, &[], until)?;
            }
        }
        Ok(())
    }

    /// The last order, after what others left to the keeper. False, and nothing is done, while another thread is sending: it may be to a child
    /// that does not read.
    pub(crate) fn send_leave(&self, order: &Order, until: Instant) -> bool {
        let _sending = match self.sending.try_lock() {
            Ok(sending) => sending,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        let before = std::mem::take(&mut self.lock().outbox);
        for order in before.iter().chain([order]) {
            let sent = order
                .encode()
                .and_then(|frame| channel::send(&self.socket, &frame, &[], until));
            if let Err(error) = sent {
                tracing::debug!(pid = %self.pid, %error, "the child was not told of its end");
                break;
            }
        }
        true
    }
}
