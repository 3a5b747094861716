//! Who reads the parent's orders. An operation that the parent waits for runs on the reading thread itself where the backend
//! can; if that takes long, the watch thread puts another reader in its place, so that orders (an abort above all) are heard.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use ftcore::engine::spawn;
use ftcore::{Result, deadline_in};

use super::groups::Groups;
use crate::channel::{Filled, Receiver};
use crate::wire::frames::{Either, Order};

/// How long the other ranks may take to hear of a leave.
const LEAVE_TIME: Duration = Duration::from_millis(40);
/// A reader that runs an operation for longer than this is replaced.
const BUSY: Duration = Duration::from_millis(5);

/// Where a reader leaves the socket while it runs an operation.
#[derive(Default)]
pub(crate) struct BusyReader(Option<(Receiver, Instant)>);

/// Reads until the parent lets go; then the process may end. A reader that was replaced does not return.
pub(crate) fn follow(receiver: Receiver, groups: &Arc<Groups>) -> Result<()> {
    if read(receiver, groups)? {
        return Ok(());
    }
    // The reader that took over ends the process.
    loop {
        std::thread::park();
    }
}

/// True when the parent let go, false when another thread reads.
fn read(mut receiver: Receiver, groups: &Arc<Groups>) -> Result<bool> {
    let busy_reader = || groups.busy_reader.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        while let Some(body) = receiver.next()? {
            match Order::decode(body)? {
                Either::Submission(submission) => {
                    let Some(ready) = groups.check(submission)? else {
                        continue;
                    };
                    if !ready.is_express() || receiver.has_more() {
                        groups.submit(ready);
                        continue;
                    }
                    busy_reader().0 = Some((receiver, Instant::now()));
                    groups.execute(ready);
                    let back = busy_reader().0.take();
                    match back {
                        Some((back, _)) => receiver = back,
                        None => return Ok(false),
                    }
                }
                Either::Order(Order::Segment { id, bytes }) => {
                    let fd = receiver.next_fd()?;
                    groups.add_segment(id, fd, bytes)?;
                }
                Either::Order(Order::DeviceSegment { id, bytes, handle }) => {
                    groups.add_device_segment(id, bytes, &handle)?;
                }
                Either::Order(Order::Leave) => {
                    groups.leave(deadline_in(LEAVE_TIME));
                    return Ok(true);
                }
                // What was released or aborted is waited for by the end of this process itself.
                Either::Order(Order::Quit) => {
                    groups.keep();
                    return Ok(true);
                }
                Either::Order(Order::End { reason }) => {
                    groups.abort_all(&reason, deadline_in(LEAVE_TIME));
                    return Ok(true);
                }
                Either::Order(order) => groups.obey(order)?,
            }
        }
        // The parent is gone, and this process with it: SIGKILL is on its way anyway. To the other ranks this is a death, as it is of a
        // rank that has no child.
        if receiver.fill(true)? == Filled::Closed {
            groups.keep();
            return Ok(true);
        }
    }
}

/// Replaces a reader that is busy. Called by the watch thread.
pub(crate) fn take_over(groups: &Arc<Groups>) {
    let mut busy_reader = groups.busy_reader.lock().unwrap_or_else(PoisonError::into_inner);
    if busy_reader
        .0
        .as_ref()
        .is_none_or(|(_, since)| since.elapsed() <= BUSY)
    {
        return;
    }
    let Some((receiver, _)) = busy_reader.0.take() else {
        return;
    };
    drop(busy_reader);
    let groups = groups.clone();
    let started = spawn("ox-iread", move || {
        let code = match read(receiver, &groups) {
            Ok(false) => return,
            Ok(true) => 0,
            Err(error) => {
                eprintln!("isolated child: {error}");
                1
            }
        };
        std::process::exit(code);
    });
    if let Err(error) = started {
        // Without a reader this process is of no use; its parent sees it end.
        eprintln!("isolated child: no thread to read orders: {error}");
        std::process::exit(1);
    }
}
