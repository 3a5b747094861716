//! Between the meeting and the engine, while the communicator is made: a rank whose part fails tells the others, and so does the end of
//! its connection, so that no caller waits for it until the deadline.

use std::cell::{Cell, RefCell};
use std::io::Read;
use std::time::{Duration, Instant};

use crate::{Error, ErrorKind};

use super::line::Line;
use super::meet::Meeting;
use super::wire::{Frame, Kind};

/// More bytes than a rank says before it listens.
const MOST: usize = 16 << 10;
/// How often the connections are looked at.
const LOOK: Duration = Duration::from_millis(5);

impl Meeting {
    /// Asked again and again: why not to go on, because another rank's part has failed or it is gone.
    pub fn watch(&mut self) -> impl Fn() -> Option<Error> {
        let looked = Cell::new(Instant::now());
        let lines = RefCell::new(&mut self.lines);
        move || {
            if looked.get().elapsed() < LOOK {
                return None;
            }
            looked.set(Instant::now());
            let mut lines = lines.try_borrow_mut().ok()?;
            lines.iter_mut().find_map(|(peer, line)| failed(*peer, line))
        }
    }

    /// Tells the others that this rank's part has failed.
    pub fn fail(&mut self, error: &Error) {
        let frame = Frame::of_error(Kind::Failed, self.place.rank, error, error.context().peer);
        for (_, line) in &mut self.lines {
            // Who cannot be told finds its connection closed.
            let _ = frame.write(line);
            discard(line);
        }
    }
}

/// Reads what is there and forgets it: what stays unread makes a reset of the end of the connection, which may overtake what was said last.
fn discard(line: &mut Line) {
    let mut bytes = [0u8; MOST];
    let stream = &mut line.stream;
    if stream.set_nonblocking(true).is_ok() {
        let _ = stream.read(&mut bytes);
    }
}

fn failed(peer: u32, line: &mut Line) -> Option<Error> {
    let gone = || {
        let text = format!("rank {peer} went away while the communicator was being made");
        Some(Error::new(ErrorKind::PeerLost, text).with_peer(peer))
    };
    line.stream.set_nonblocking(true).ok()?;
    let mut kind = [0u8; 1];
    let got = line.peek(&mut kind);
    line.stream.set_nonblocking(false).ok()?;
    match got {
        Ok(0) => gone(),
        Ok(_) if kind == [Kind::Failed as u8] => {
            let limit = Some(Duration::from_secs(1));
            line.stream.set_read_timeout(limit).ok()?;
            match Frame::read(line) {
                Ok(Some(frame)) => Some(frame.error()),
                _ => gone(),
            }
        }
        // Of a rank whose engine stands already, for the engine of this one.
        Ok(_) => None,
        Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => None,
        Err(_) => gone(),
    }
}
