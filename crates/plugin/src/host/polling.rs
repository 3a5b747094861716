//! Drives operations of plugins that have no thread of their own (`OXCCL_WORK_POLLED`): one thread for all of them.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SendError, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use ftcore::{Error, Result};

/// Lets a plugin make progress with an operation. False once that has ended.
type Poll = Box<dyn Fn() -> bool + Send>;

/// From spinning to sleeping: what is fast stays fast, what is slow costs little.
const SHORTEST: Duration = Duration::from_micros(10);
const LONGEST: Duration = Duration::from_millis(1);

static POLLER: Mutex<Option<Sender<Poll>>> = Mutex::new(None);

/// From now on `poll` is called until it says false.
///
/// Errors: `Io` if the thread cannot be started.
pub(super) fn drive(poll: impl Fn() -> bool + Send + 'static) -> Result<()> {
    let mut poller = POLLER.lock().unwrap_or_else(PoisonError::into_inner);
    let poll: Poll = Box::new(poll);
    let poll = match poller.as_ref() {
        Some(poller) => match poller.send(poll) {
            Ok(()) => return Ok(()),
            Err(SendError(poll)) => poll,
        },
        None => poll,
    };
    let (send, receive) = channel();
    std::thread::Builder::new()
        .name("ox-plugin-poll".to_string())
        .spawn(move || run(&receive))
        .map_err(|e| Error::io("start the thread that polls plugins", e))?;
    drop(send.send(poll));
    *poller = Some(send);
    Ok(())
}

fn run(receive: &Receiver<Poll>) {
    let mut all: Vec<Poll> = Vec::new();
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
        all.retain(|poll| poll());
    }
}
