//! One other rank as the engine's thread sees it: the way of control frames, and the frames that go in and out on it.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::time::Duration;

use ftcore::{Error, ErrorKind, Result};

use crate::transport::lines::{Hold, Listener};
use crate::transport::shm::{NOTICE_BYTES, Notices};
use crate::transport::tcp::{Link, Moved};
use crate::wire::{Control, ControlKind, MAX_TEXT};

/// A data connection that breaks gets this long until the control connection has said why.
pub(crate) const GRACE: Duration = Duration::from_millis(50);
/// A rank that has left gets this long, from the last that came of it, until its connection has ended.
pub(crate) const LAST_GRACE: Duration = Duration::from_secs(1);
/// How long the failure notice of a failed engine may take.
pub(crate) const NOTICE_TIME: Duration = Duration::from_millis(200);

/// What became of a peer.
#[derive(Debug, Clone)]
pub(crate) struct Fate {
    /// It has left; otherwise it is lost.
    pub(crate) left: bool,
    /// Why, or how that showed.
    pub(crate) text: String,
}

/// Another rank.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) rank: u32,
    pub(crate) address: String,
    pub(crate) control: Way,
    /// It has left, and why.
    pub(crate) left: Option<String>,
    /// The way of its control frames ended without a leave, and how: it is lost.
    pub(crate) gone: Option<String>,
    /// Why it ended, in its own words, and whom it blames.
    pub(crate) words: Option<Error>,
}

impl Peer {
    /// An error about this peer.
    pub(crate) fn error(&self, kind: ErrorKind, text: impl Into<String>) -> Error {
        Error::new(kind, text)
            .with_peer(self.rank)
            .with_peer_address(self.address.clone())
    }
}

/// How control frames come from a rank and go to it.
#[derive(Debug)]
pub(crate) enum Way {
    /// A connection of the pair.
    Connection(Box<ControlLink>),
    /// Shared memory, in a group whose ranks all share it.
    Memory(ControlNotices),
}

impl Way {
    /// The next frame that is complete, with its text; `None` if more is needed first.
    pub(crate) fn next(&mut self) -> Result<Option<(Control, Vec<u8>)>> {
        match self {
            Self::Connection(link) => link.next(),
            Self::Memory(notices) => notices.next(),
        }
    }

    /// How it showed that nothing more comes, if it did.
    pub(crate) fn closed(&self) -> Option<&str> {
        match self {
            Self::Connection(link) => link.link.read_closed.as_deref(),
            Self::Memory(notices) => notices.closed.as_deref(),
        }
    }

    /// Sends a frame as soon as it goes.
    pub(crate) fn push(&mut self, header: Control, text: Vec<u8>) {
        match self {
            Self::Connection(link) => link.push(header, text),
            Self::Memory(notices) => notices.push(&header, &text),
        }
    }

    /// Writes as much of the waiting frames as goes. True if anything moved.
    pub(crate) fn flush(&mut self) -> bool {
        match self {
            Self::Connection(link) => link.flush(),
            Self::Memory(_) => false,
        }
    }

    /// The connection, if it is one.
    pub(crate) fn connection(&self) -> Option<&ControlLink> {
        match self {
            Self::Connection(link) => Some(link),
            Self::Memory(_) => None,
        }
    }

    /// Likewise.
    pub(crate) fn connection_mut(&mut self) -> Option<&mut ControlLink> {
        match self {
            Self::Connection(link) => Some(link),
            Self::Memory(_) => None,
        }
    }

    /// `listener` is called when the rank's process is gone, where no connection tells.
    pub(crate) fn listen(&mut self, listener: &Listener) {
        if let Self::Memory(ControlNotices { line: Some(line), .. }) = self {
            line.listen(listener.clone());
        }
    }
}

/// Control frames through shared memory: a rank says one, its last.
#[derive(Debug)]
pub(crate) struct ControlNotices {
    notices: Notices,
    /// The line to the rank's process, unless that is this one.
    line: Option<Hold>,
    /// The rank has ended, and how.
    closed: Option<String>,
}

impl ControlNotices {
    pub(crate) fn new(notices: Notices, line: Option<Hold>) -> Self {
        Self {
            notices,
            line,
            closed: None,
        }
    }

    fn push(&mut self, header: &Control, text: &[u8]) {
        const { assert!(Control::BYTES + MAX_TEXT <= NOTICE_BYTES) };
        let said = [header.encode().as_slice(), text].concat();
        self.notices.writer.say(&said);
    }

    fn next(&mut self) -> Result<Option<(Control, Vec<u8>)>> {
        // Asked first: what the rank said before it went is found below.
        let gone = self.line.as_ref().and_then(Hold::down);
        let ended = self.notices.reader.has_ended().then_some("closed the connection");
        let ended = gone.or(ended).map(str::to_string);
        let Some(said) = self.notices.reader.take()? else {
            self.closed = self.closed.take().or(ended);
            return Ok(None);
        };
        let garbage = || Error::new(ErrorKind::Protocol, "sent something that is not a control frame");
        let (header, text) = said.split_first_chunk().ok_or_else(garbage)?;
        // decode has checked the length against the limits of the kind (INV-10).
        let header = Control::decode(header).ok_or_else(garbage)?;
        match header.kind {
            ControlKind::Abort | ControlKind::Leave if header.length == text.len() as u64 => {
                Ok(Some((header, text.to_vec())))
            }
            ControlKind::Abort | ControlKind::Leave | ControlKind::Ready => Err(garbage()),
            _ => Err(misplaced()),
        }
    }
}

/// A message came where none goes.
fn misplaced() -> Error {
    Error::new(
        ErrorKind::Protocol,
        "sent a message where only aborts and leaves go",
    )
}

/// A frame on its way out.
#[derive(Debug)]
struct Outgoing {
    header: [u8; Control::BYTES],
    text: Vec<u8>,
    /// Bytes of header and text already written.
    done: usize,
}

/// The control connection.
#[derive(Debug)]
pub(crate) struct ControlLink {
    pub(crate) link: Link,
    /// Frames that wait, or are being written.
    queue: VecDeque<Outgoing>,
    buffer: [u8; Control::BYTES],
    have: usize,
    text: Option<(Control, Vec<u8>, usize)>,
}

impl ControlLink {
    pub(crate) fn new(link: Link) -> Self {
        Self {
            link,
            queue: VecDeque::new(),
            buffer: [0; Control::BYTES],
            have: 0,
            text: None,
        }
    }

    /// True if something waits to be written.
    pub(crate) fn wants_write(&self) -> bool {
        self.link.write_closed.is_none() && !self.queue.is_empty()
    }

    /// Queues a frame.
    pub(crate) fn push(&mut self, header: Control, text: Vec<u8>) {
        self.queue.push_back(Outgoing {
            header: header.encode(),
            text,
            done: 0,
        });
    }

    /// The next frame that is complete, with its text; `None` if more bytes are needed first.
    pub(crate) fn next(&mut self) -> Result<Option<(Control, Vec<u8>)>> {
        let next = self.read();
        if let Ok(None) = next {
            self.link.authentic()?;
        }
        next
    }

    fn read(&mut self) -> Result<Option<(Control, Vec<u8>)>> {
        while self.link.readable && self.link.read_closed.is_none() {
            if let Some((_, text, have)) = &mut self.text {
                let Some(rest) = text.get_mut(*have..).filter(|r| !r.is_empty()) else {
                    return Ok(self.text.take().map(|(header, text, _)| (header, text)));
                };
                match self.link.read(rest) {
                    Moved::Bytes(n) => *have += n,
                    Moved::Nothing | Moved::Closed => return Ok(None),
                }
                continue;
            }
            let Some(rest) = self.buffer.get_mut(self.have..) else {
                return Ok(None);
            };
            match self.link.read(rest) {
                Moved::Bytes(n) => self.have += n,
                Moved::Nothing | Moved::Closed => return Ok(None),
            }
            if self.have < Control::BYTES {
                continue;
            }
            self.have = 0;
            // decode has checked the length against the limits of the kind (INV-10).
            let header = Control::decode(&self.buffer).ok_or_else(|| {
                Error::new(ErrorKind::Protocol, "sent something that is not a control frame")
            })?;
            match header.kind {
                ControlKind::Ready => return Ok(Some((header, Vec::new()))),
                ControlKind::Offer
                | ControlKind::Accept
                | ControlKind::Data
                | ControlKind::Inline
                | ControlKind::Taken => {
                    return Err(misplaced());
                }
                ControlKind::Abort | ControlKind::Leave => {
                    let length = usize::try_from(header.length).unwrap_or(0);
                    if length == 0 {
                        return Ok(Some((header, Vec::new())));
                    }
                    self.text = Some((header, vec![0; length], 0));
                }
            }
        }
        // A text may have been completed by the read that emptied the socket.
        match &self.text {
            Some((_, text, have)) if *have == text.len() => {
                Ok(self.text.take().map(|(header, text, _)| (header, text)))
            }
            _ => Ok(None),
        }
    }

    /// Writes as much of the waiting frames as the socket takes. True if anything moved.
    pub(crate) fn flush(&mut self) -> bool {
        let mut moved = false;
        while self.link.writable && self.link.write_closed.is_none() {
            let Some(frame) = self.queue.front_mut() else {
                break;
            };
            let header = frame.header.get(frame.done..).unwrap_or(&[]);
            let text = frame.done.saturating_sub(Control::BYTES);
            let text = frame.text.get(text..).unwrap_or(&[]);
            let left = header.len() + text.len();
            match self.link.write(&[IoSlice::new(header), IoSlice::new(text)]) {
                Moved::Bytes(n) => {
                    moved = true;
                    frame.done += n;
                    if n >= left {
                        self.queue.pop_front();
                    }
                }
                Moved::Nothing | Moved::Closed => break,
            }
        }
        moved
    }
}
