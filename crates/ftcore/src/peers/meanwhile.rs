//! Between the meeting and the engine, while the communicator is made: what the ranks tell each other through the store. A rank whose part fails
//! tells the others, and so does the end of its connection, so that no caller waits for it until the deadline.

use std::io::Read;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::{Cancel, Configuration, Error, ErrorKind, PrefixStore, Result, Store, time_left};

use super::line::{Line, lock};
use super::meet::Meeting;
use super::wire::{Frame, Kind};

/// More bytes than a rank says before it listens.
const MOST: usize = 16 << 10;
/// How often the connections are looked at.
const LOOK: Duration = Duration::from_millis(5);
/// Where rank 0's id stands.
const ID: &str = "id";

impl Meeting {
    /// Asked again and again: why not to go on, because another rank's part has failed or it is gone.
    pub fn watch(&self) -> impl Fn() -> Option<Error> + Send + Sync + use<> {
        let (lines, own) = (Arc::downgrade(&self.lines), self.place.rank);
        let looked = Mutex::new(Instant::now());
        move || {
            let lines = lines.upgrade()?;
            let mut looked = looked.try_lock().ok()?;
            if looked.elapsed() < LOOK {
                return None;
            }
            *looked = Instant::now();
            let mut lines = lock(&lines);
            lines.iter_mut().find_map(|(peer, line)| failed(own, *peer, line))
        }
    }

    /// A token below that of `c` that is also cancelled once [`watch`](Self::watch) says why.
    pub fn cancel(&self, c: &Configuration) -> Cancel {
        c.cancel.or(self.watch())
    }

    /// What the ranks that have met tell each other, and none that came before or comes later.
    pub fn store(&self, c: &Configuration) -> Arc<dyn Store> {
        Arc::new(PrefixStore::new(c.store.clone(), self.key.clone()))
    }

    /// The id that rank 0 makes and gives to the others: not before all are here, since the library may keep what it has opened for it until they
    /// have come.
    ///
    /// Errors: those of `make`; on the others `Timeout`, or what [`watch`](Self::watch) says.
    pub fn id(&self, c: &Configuration, make: impl FnOnce() -> Result<Vec<u8>>) -> Result<Vec<u8>> {
        let store = self.store(c);
        if c.rank > 0 {
            return hear_id(&*self.cancel(c).over(&store), c.deadline);
        }
        let id = make()?;
        if c.world_size > 1 {
            give_id(&*store, &id, c.deadline)?;
        }
        Ok(id)
    }

    /// Tells the others that this rank's part has failed.
    pub fn fail(&self, error: &Error) {
        let frame = Frame::of_error(Kind::Failed, self.place.rank, error, error.context().peer);
        for (_, line) in lock(&self.lines).iter_mut() {
            // Who cannot be told finds its connection closed.
            let _ = frame.write(line);
            discard(line);
        }
    }
}

/// On rank 0: tells the others its id. Why there is none they hear of [`Meeting::fail`].
pub fn give_id(store: &dyn Store, id: &[u8], deadline: Instant) -> Result<()> {
    store.set(ID, id, deadline)
}

/// On the others: rank 0's id, as it stands in the store.
pub fn hear_id(store: &dyn Store, deadline: Instant) -> Result<Vec<u8>> {
    store.get(ID, deadline).map_err(|e| match e.kind() {
        ErrorKind::Timeout if time_left(deadline).is_zero() => {
            Error::timeout("rank 0 has not given its id (phase: id)").with_peer(0)
        }
        _ => e,
    })
}

/// Reads what is there and forgets it: what stays unread makes a reset of the end of the connection, which may overtake what was said last.
fn discard(line: &mut Line) {
    let mut bytes = [0u8; MOST];
    let stream = &mut line.stream;
    if stream.set_nonblocking(true).is_ok() {
        let _ = stream.read(&mut bytes);
    }
}

/// Takes nothing from the connection and waits for nothing.
fn failed(own: u32, peer: u32, line: &mut Line) -> Option<Error> {
    let gone = || {
        let text = format!("rank {peer} went away while the communicator was being made");
        Some(Error::new(ErrorKind::PeerLost, text).with_peer(peer))
    };
    let mut bytes = [0u8; Frame::MOST];
    let is_over = line.is_over();
    match line.peek(&mut bytes) {
        Ok(0) => gone(),
        Ok(n) if bytes.first() == Some(&(Kind::Failed as u8)) => match Frame::seen(bytes.get(..n)?) {
            Ok(Some(frame)) => Some(frame.error(own)),
            // What is not whole yet is looked at again.
            Ok(None) if !is_over => None,
            Ok(None) | Err(_) => gone(),
        },
        // Of a rank whose engine stands already, for the engine of this one.
        Ok(_) => None,
        Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => None,
        Err(_) => gone(),
    }
}
