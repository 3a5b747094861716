//! Drives operations of plugins that have no thread of their own (`OXCCL_WORK_POLLED`): one thread for all of them.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ftcore::{Error, Result};

use super::operation::Pending;

/// From spinning to sleeping: what is fast stays fast, what is slow costs little.
const SHORTEST: Duration = Duration::from_micros(10);
const LONGEST: Duration = Duration::from_millis(1);

static POLLER: Mutex<Option<Sender<Arc<Pending>>>> = Mutex::new(None);

/// From now on `pending` is polled until it has ended.
///
/// Errors: `Io` if the thread cannot be started.
pub(super) fn drive(pending: Arc<Pending>) -> Result<()> {
    let mut poller = POLLER.lock().unwrap_or_else(PoisonError::into_inner);
    let pending = match poller.as_ref().map(|p| p.send(pending.clone())) {
        Some(Ok(())) => return Ok(()),
        _ => pending,
    };
    let (send, receive) = channel();
    std::thread::Builder::new()
        .name("ox-plugin-poll".to_string())
        .spawn(move || run(&receive))
        .map_err(|e| Error::io("start the thread that polls plugins", e))?;
    drop(send.send(pending));
    *poller = Some(send);
    Ok(())
}

fn run(receive: &Receiver<Arc<Pending>>) {
    let mut all: Vec<Arc<Pending>> = Vec::new();
    let mut pause = SHORTEST;
    loop {
        let wait = if all.is_empty() {
            Duration::from_secs(3600)
        } else {
            pause
        };
        match receive.recv_timeout(wait) {
            Ok(one) => {
                all.push(one);
                pause = SHORTEST;
            }
            Err(RecvTimeoutError::Timeout) => pause = (pause * 2).min(LONGEST),
            Err(RecvTimeoutError::Disconnected) => return,
        }
        all.retain(|p| p.poll());
    }
}
