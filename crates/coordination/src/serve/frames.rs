//! Follows the bytes that a peer sends: which protocol it speaks, when its greeting is whole, and how many frames cost the server work
//! without asking for any.
//!
//! It reads along and changes nothing; hyper reads the same bytes behind it. Of HTTP/2 it knows frame headers only.

use std::time::{Duration, Instant};

const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const HEADER: usize = 9;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const WINDOW_UPDATE: u8 = 8;
/// On SETTINGS and PING: an answer, of which there are as many as there were questions.
const ACK: u8 = 1;
/// On DATA: the last of its stream.
const END_STREAM: u8 = 1;

/// What the peer speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Speech {
    /// So many bytes of HTTP/2's preface have come, and nothing else.
    Undecided(usize),
    Http1,
    Http2,
}

/// Frames that are allowed: so many at once, and so many a second afterwards.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rate {
    pub(super) burst: u32,
    pub(super) per_second: u32,
}

/// A peer sent more frames than its [`Rate`] allows.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Flood;

/// The state of one connection.
#[derive(Debug)]
pub(super) struct Frames {
    speech: Speech,
    header: [u8; HEADER],
    /// How much of the header has come.
    read: usize,
    /// What is left of the frame behind the last whole header.
    left: usize,
    /// The first frame is whole: the peer has said what it must.
    greeted: bool,
    rate: Rate,
    /// What may still be spent, in frames, and when that was so.
    credit: f64,
    at: Instant,
}

impl Frames {
    pub(super) fn new(rate: Rate, now: Instant) -> Self {
        Self {
            speech: Speech::Undecided(0),
            header: [0; HEADER],
            read: 0,
            left: 0,
            greeted: false,
            rate,
            credit: f64::from(rate.burst),
            at: now,
        }
    }

    /// True once HTTP/2's preface and the first frame behind it are there. Over HTTP/1 never: there the first request tells.
    pub(super) fn greeted(&self) -> bool {
        self.greeted
    }

    /// Reads along.
    pub(super) fn read(&mut self, mut bytes: &[u8], now: Instant) -> Result<(), Flood> {
        while let Some((&byte, rest)) = bytes.split_first() {
            match self.speech {
                Speech::Http1 => return Ok(()),
                Speech::Undecided(n) => {
                    bytes = rest;
                    self.speech = match PREFACE.get(n) {
                        Some(expected) if *expected != byte => Speech::Http1,
                        _ if n + 1 == PREFACE.len() => Speech::Http2,
                        _ => Speech::Undecided(n + 1),
                    };
                }
                Speech::Http2 if self.left > 0 => {
                    let n = self.left.min(bytes.len());
                    self.left -= n;
                    bytes = bytes.get(n..).unwrap_or_default();
                    self.greeted |= self.left == 0;
                }
                Speech::Http2 => {
                    bytes = rest;
                    if let Some(slot) = self.header.get_mut(self.read) {
                        *slot = byte;
                    }
                    self.read += 1;
                    if self.read == HEADER {
                        self.read = 0;
                        self.frame(now)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// A whole header has come.
    fn frame(&mut self, now: Instant) -> Result<(), Flood> {
        let [a, b, c, kind, flags, ..] = self.header;
        self.left = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
        self.greeted |= self.left == 0;
        let cost = match kind {
            // What carries a request's bytes is counted with the request.
            DATA if self.left > 0 || flags & END_STREAM != 0 => return Ok(()),
            HEADERS => return Ok(()),
            SETTINGS | PING if flags & ACK != 0 => return Ok(()),
            // An honest reader sends them, too: some for each answer.
            WINDOW_UPDATE => 0.1,
            // RST_STREAM, PRIORITY, CONTINUATION, GOAWAY, empty DATA, and unknown ones.
            _ => 1.0,
        };
        let passed = now
            .saturating_duration_since(self.at)
            .min(Duration::from_secs(3600));
        self.at = now;
        let earned = passed.as_secs_f64() * f64::from(self.rate.per_second);
        self.credit = (self.credit + earned).min(f64::from(self.rate.burst));
        if self.credit < cost {
            return Err(Flood);
        }
        self.credit -= cost;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: Rate = Rate {
        burst: 10,
        per_second: 5,
    };

    fn frame(kind: u8, flags: u8, payload: usize) -> Vec<u8> {
        let [.., a, b, c] = (payload as u32).to_be_bytes();
        [&[a, b, c, kind, flags, 0, 0, 0, 0][..], &vec![0xff; payload]].concat()
    }

    fn greeting() -> Vec<u8> {
        [&PREFACE[..], &frame(SETTINGS, 0, 12)].concat()
    }

    #[test]
    fn a_greeting_is_whole_with_its_last_byte_however_it_is_cut() {
        let all = greeting();
        for step in [1, 2, 7, all.len()] {
            let mut frames = Frames::new(RATE, Instant::now());
            let mut seen = 0;
            for piece in all.chunks(step) {
                assert!(!frames.greeted(), "after {seen} of {} bytes", all.len());
                frames.read(piece, Instant::now()).unwrap();
                seen += piece.len();
            }
            assert!(frames.greeted());
        }
        let mut empty = Frames::new(RATE, Instant::now());
        empty.read(PREFACE, Instant::now()).unwrap();
        assert!(!empty.greeted());
        empty.read(&frame(SETTINGS, 0, 0), Instant::now()).unwrap();
        assert!(empty.greeted());
    }

    #[test]
    fn http1_is_not_looked_into() {
        let mut frames = Frames::new(RATE, Instant::now());
        for _ in 0..100 {
            frames
                .read(b"PRI * HTTP/2.1\r\n\r\n\0\0\0\x03\0\0\0\0\0", Instant::now())
                .unwrap();
        }
        assert!(!frames.greeted());
    }

    #[test]
    fn frames_that_only_cost_are_rationed_and_those_of_requests_are_not() {
        let now = Instant::now();
        for (kind, flags, payload) in [
            (SETTINGS, 0, 6),
            (PING, 0, 8),
            (3, 0, 4),
            (2, 0, 5),
            (9, 0, 1),
            (0x7f, 0, 0),
            (DATA, 0, 0),
        ] {
            let mut frames = Frames::new(RATE, now);
            frames.read(&greeting(), now).unwrap();
            let one = frame(kind, flags, payload);
            // The greeting's SETTINGS was the first.
            for _ in 0..9 {
                assert_eq!(frames.read(&one, now), Ok(()), "{kind}");
            }
            assert_eq!(frames.read(&one, now), Err(Flood), "{kind}");
            // Who waits a second earns more.
            let mut frames = Frames::new(RATE, now);
            frames.read(&greeting(), now).unwrap();
            let later = now + Duration::from_secs(1);
            for n in 0..14 {
                let at = if n < 9 { now } else { later };
                assert_eq!(frames.read(&one, at), Ok(()), "{kind}");
            }
            assert_eq!(frames.read(&one, later), Err(Flood), "{kind}");
        }
        let mut frames = Frames::new(RATE, now);
        frames.read(&greeting(), now).unwrap();
        for _ in 0..80 {
            frames.read(&frame(WINDOW_UPDATE, 0, 4), now).unwrap();
        }
        for _ in 0..1000 {
            for (kind, flags, payload) in [
                (HEADERS, 5, 40),
                (DATA, 0, 5),
                (DATA, END_STREAM, 0),
                (SETTINGS, ACK, 0),
                (PING, ACK, 8),
            ] {
                frames.read(&frame(kind, flags, payload), now).unwrap();
            }
        }
    }
}
