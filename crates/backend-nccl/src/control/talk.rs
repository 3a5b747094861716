//! What the ranks say to each other while a communicator is made out of an older one: rank 0's word to all, and everybody's answer.
//!
//! Over the connections of the meeting, before the engine takes them. What does not fit is `Protocol`, and fails the configuration.

use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind, Result};

use super::meanwhile::watching;
use super::rendezvous::hear;
use super::wire::{Frame, Kind};
use super::word::Word;
use crate::plan::Holding;
use crate::reuse::not_as_planned;

/// The connections, and who this rank is.
pub(crate) struct Talk<'a> {
    pub(crate) rank: u32,
    pub(crate) world: u32,
    pub(crate) streams: &'a mut [(u32, TcpStream)],
    pub(crate) cancel: &'a AtomicBool,
}

impl Talk<'_> {
    /// On rank 0: tells everybody.
    pub(crate) fn tell(&mut self, word: &Word) {
        self.tell_from(0, word);
    }

    /// On rank 0: tells the ranks from `first` on.
    pub(crate) fn tell_from(&mut self, first: u32, word: &Word) {
        self.send(first, &Frame::new(Kind::Plan, 0, 0, word.encode()));
    }

    /// On rank 0: the configuration has failed for everybody.
    pub(crate) fn refuse(&mut self, error: &Error) {
        self.send(0, &Frame::of_error(Kind::Refused, 0, error, error.context().peer));
    }

    fn send(&mut self, first: u32, frame: &Frame) {
        for (_, stream) in self.streams.iter_mut().filter(|(peer, _)| *peer >= first) {
            // Whoever cannot be told finds its connection closed, or does not answer.
            let _ = frame.write(stream);
        }
    }

    /// On the others: rank 0's next word to a rank that holds `own`.
    pub(crate) fn hear(&mut self, own: Option<&Holding>, until: Instant) -> Result<Word> {
        let late = || Error::timeout("rank 0 did not say how to go on (phase: reuse of the communicator)");
        let Some((_, stream)) = self.streams.first_mut() else {
            return Err(not_as_planned("there is no connection to rank 0"));
        };
        let frame = hear(stream, 0, until, self.cancel, &late)?;
        match frame.kind {
            Kind::Refused | Kind::Failed => Err(frame.error()),
            Kind::Plan => Word::decode(&frame.text, own, self.rank, self.world)
                .ok_or_else(|| not_said_by(0, "something that does not fit")),
            _ => Err(not_said_by(0, "something else")),
        }
    }

    /// On the others: that this rank's part worked, or why not.
    pub(crate) fn answer(&mut self, failure: Option<&Error>) {
        let (number, text) = match failure {
            None => (1, String::new()),
            Some(error) => (0, error.to_string()),
        };
        self.send(0, &Frame::new(Kind::Tried, self.rank, number, text));
    }

    /// While this rank tries: why it need not go on, because it has not worked elsewhere. Reads nothing.
    pub(crate) fn interrupted(&self) -> Option<Error> {
        let elsewhere = |(peer, stream): &(u32, TcpStream)| {
            let mut head = [0u8; 13];
            stream.set_nonblocking(true).ok()?;
            let got = stream.peek(&mut head);
            stream.set_nonblocking(false).ok()?;
            let failed = match (got, self.rank) {
                (Ok(0), _) => true,
                // Whole, or not there yet.
                (Ok(n), 0) => n == head.len() && !is_good(&head),
                // To a rank that tries rank 0 says nothing else.
                (Ok(_), _) => true,
                (Err(e), _) => e.kind() != std::io::ErrorKind::WouldBlock,
            };
            failed.then(|| Error::new(ErrorKind::Aborted, "it failed elsewhere").with_peer(*peer))
        };
        self.streams.iter().find_map(elsewhere)
    }

    /// While a new communicator is made instead: as [`Meeting::watch`](super::Meeting::watch).
    pub(crate) fn watch(&self) -> impl Fn() -> Option<Error> {
        watching(self.streams)
    }

    /// On rank 0: waits until everybody has answered; as soon as one part has failed, the others are told to stop.
    fn await_answers(&mut self, until: Instant) {
        let mut told = false;
        while Instant::now() < until && !self.cancel.load(Ordering::Acquire) {
            if !told && self.interrupted().is_some() {
                told = true;
                self.tell(&Word::Stop);
            }
            let answered = self.streams.iter().all(|(_, stream)| {
                let _ = stream.set_nonblocking(true);
                let got = stream.peek(&mut [0u8; 1]);
                let _ = stream.set_nonblocking(false);
                !matches!(got, Err(e) if e.kind() == std::io::ErrorKind::WouldBlock)
            });
            if answered {
                return;
            }
            std::thread::sleep(Duration::from_micros(300));
        }
    }

    /// On rank 0: everybody's answer; `None` if all parts worked, otherwise the first reason.
    pub(crate) fn answers(&mut self, until: Instant) -> Result<Option<String>> {
        self.await_answers(until);
        let mut reason = None;
        for (peer, stream) in self.streams.iter_mut() {
            let late = || {
                let text = format!("rank {peer} did not say whether the communicator stands");
                Error::timeout(text).with_peer(*peer)
            };
            let frame = hear(stream, *peer, until, self.cancel, &late)?;
            match (frame.kind, frame.number) {
                (Kind::Tried, 1) => {}
                (Kind::Tried, _) => reason = reason.or(Some(format!("rank {peer}: {}", frame.text))),
                // It does not go on with this `configure`.
                (Kind::Failed, _) => return Err(frame.error()),
                _ => return Err(not_said_by(*peer, "something else")),
            }
        }
        Ok(reason)
    }
}

/// What `peer` said is not what it may say now.
pub(crate) fn not_said_by(peer: u32, what: &str) -> Error {
    not_as_planned(&format!("rank {peer} said {what}")).with_peer(peer)
}

/// The beginning of an answer that says that all is well: kind, origin, number.
fn is_good(head: &[u8; 13]) -> bool {
    let [kind, _, _, _, _, number @ ..] = *head;
    kind == Kind::Tried as u8 && u64::from_le_bytes(number) == 1
}
