//! As much of an HTTP/2 client as one replica needs, and no more: the process that plays thousands of them must not take the cores that the lighthouse
//! needs. It says what a client of tonic says: the same settings and windows, headers in the connection's table, an answer to each ping.
//!
//! It does not decode headers. A stream that ends with a message is answered, one that ends without is refused.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RESET: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GO_AWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const ACK: u8 = 1;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const PADDED: u8 = 8;
/// hyper's windows for a stream and for a connection.
const STREAM_WINDOW: u32 = 2 << 20;
const CONNECTION_WINDOW: u32 = 5 << 20;
/// The window of a connection before it is widened.
const FIRST_WINDOW: u32 = 65_535;

/// What a connection runs over.
pub(crate) trait Line: AsyncRead + AsyncWrite + Unpin + Send {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send> Line for S {}

/// What came.
#[derive(Debug)]
pub(crate) enum Heard {
    /// The server has taken the call of this stream, and its answer begins.
    Begun(u32),
    /// A part of the answer of a stream whose parts are told as they come.
    Part(u32),
    /// The answer of this stream is whole: its length and its beginning, both without gRPC's head.
    Answer(u32, usize, Vec<u8>),
    /// The stream ended without an answer.
    Refused(u32),
}

/// A stream that has not ended.
struct Open {
    id: u32,
    /// Bytes of its answer so far, with gRPC's head, and as many of the first as are wanted.
    length: usize,
    beginning: Vec<u8>,
    wanted: usize,
    tells_parts: bool,
    /// Received and not given back to its window.
    owed: u32,
}

/// One connection. Nothing is lost when a call of [`heard`](Self::heard) is dropped.
pub(crate) struct Connection {
    line: Box<dyn Line>,
    authority: String,
    out: Vec<u8>,
    written: usize,
    /// The headers that the server remembers, oldest first.
    table: Vec<(&'static str, String)>,
    next: u32,
    open: Vec<Open>,
    heard: VecDeque<Heard>,
    /// The header of the frame that comes, as far as it is here; its payload that is still to come; and what of it is kept.
    header: [u8; 9],
    filled: usize,
    left: usize,
    kept: Vec<u8>,
    owed: u32,
    /// Bytes received so far.
    pub(crate) received: u64,
}

thread_local! {
    /// All connections of this thread read into it, one at a time.
    static BUFFER: RefCell<Box<[u8]>> = RefCell::new(vec![0; 256 << 10].into());
}

fn frame(out: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    let length = u32::try_from(payload.len()).unwrap_or(u32::MAX).to_be_bytes();
    out.extend_from_slice(&length[1..]);
    out.extend_from_slice(&[kind, flags]);
    out.extend_from_slice(&stream.to_be_bytes());
    out.extend_from_slice(payload);
}

impl Connection {
    pub(crate) fn new(line: Box<dyn Line>, authority: &str) -> Self {
        let mut out = PREFACE.to_vec();
        let mut settings = Vec::new();
        for (name, value) in [(2u16, 0u32), (4, STREAM_WINDOW), (5, 16_384), (6, 16_384)] {
            settings.extend_from_slice(&name.to_be_bytes());
            settings.extend_from_slice(&value.to_be_bytes());
        }
        frame(&mut out, SETTINGS, 0, 0, &settings);
        let more = CONNECTION_WINDOW - FIRST_WINDOW;
        frame(&mut out, WINDOW_UPDATE, 0, 0, &more.to_be_bytes());
        Self {
            line,
            authority: authority.to_string(),
            out,
            written: 0,
            table: Vec::new(),
            next: 1,
            open: Vec::new(),
            heard: VecDeque::new(),
            header: [0; 9],
            filled: 0,
            left: 0,
            kept: Vec::new(),
            owed: 0,
            received: 0,
        }
    }

    fn header(table: &mut Vec<(&'static str, String)>, block: &mut Vec<u8>, name: &'static str, value: &str) {
        if let Some(at) = table.iter().position(|(n, v)| *n == name && v == value) {
            // The newest has number 62; a table of so few never outgrows the first byte.
            block.push(0x80 | u8::try_from(62 + table.len() - 1 - at).unwrap_or(0));
            return;
        }
        block.push(0x40);
        for text in [name, value] {
            block.push(u8::try_from(text.len()).unwrap_or(0).min(126));
            block.extend_from_slice(text.as_bytes());
        }
        table.push((name, value.to_string()));
    }

    /// Calls `path` with one message, and gives the stream's number. `wanted` bytes of the answer are kept.
    pub(crate) fn call(
        &mut self,
        path: &str,
        seconds: Option<u64>,
        message: &impl prost::Message,
        wanted: usize,
        tells_parts: bool,
    ) -> u32 {
        let id = self.next;
        self.next += 2;
        // POST and http, of the table that all connections have.
        let mut block = vec![0x83, 0x86];
        let mut header = |name, value: &str| Self::header(&mut self.table, &mut block, name, value);
        header(":path", path);
        header(":authority", &self.authority);
        header("te", "trailers");
        header("content-type", "application/grpc");
        header("user-agent", "oxccl-load");
        if let Some(seconds) = seconds {
            header("grpc-timeout", &format!("{seconds}S"));
        }
        frame(&mut self.out, HEADERS, END_HEADERS, id, &block);
        let length = message.encoded_len();
        let mut body = Vec::with_capacity(5 + length);
        body.push(0);
        body.extend_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes());
        message.encode_raw(&mut body);
        frame(&mut self.out, DATA, END_STREAM, id, &body);
        self.open.push(Open {
            id,
            length: 0,
            beginning: Vec::new(),
            wanted: wanted.saturating_add(5),
            tells_parts,
            owed: 0,
        });
        id
    }

    pub(crate) fn ping(&mut self) {
        frame(&mut self.out, PING, 0, 0, b"ox-load.");
    }

    /// What comes next. Sends what is to be sent meanwhile.
    pub(crate) async fn heard(&mut self) -> io::Result<Heard> {
        std::future::poll_fn(|context| self.poll_heard(context)).await
    }

    fn poll_heard(&mut self, context: &mut Context<'_>) -> Poll<io::Result<Heard>> {
        loop {
            self.poll_write(context)?;
            if let Some(heard) = self.heard.pop_front() {
                return Poll::Ready(Ok(heard));
            }
            ready!(self.poll_read(context))?;
        }
    }

    /// Writes as much as there is room for.
    fn poll_write(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        while let Some(rest) = self.out.get(self.written..).filter(|rest| !rest.is_empty()) {
            match Pin::new(&mut self.line).poll_write(context, rest) {
                Poll::Ready(n) => self.written += n?,
                Poll::Pending => return Ok(()),
            }
        }
        if self.written > 0 {
            self.out.clear();
            self.written = 0;
            let _ = Pin::new(&mut self.line).poll_flush(context)?;
        }
        Ok(())
    }

    fn poll_read(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        BUFFER.with_borrow_mut(|buffer| {
            let mut buffer = ReadBuf::new(buffer);
            ready!(Pin::new(&mut self.line).poll_read(context, &mut buffer))?;
            if buffer.filled().is_empty() {
                return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
            }
            self.received += buffer.filled().len() as u64;
            Poll::Ready(self.take(buffer.filled()))
        })
    }

    fn take(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            if self.filled < self.header.len() {
                let n = bytes.len().min(self.header.len() - self.filled);
                self.header[self.filled..self.filled + n].copy_from_slice(&bytes[..n]);
                self.filled += n;
                bytes = &bytes[n..];
                if self.filled < self.header.len() {
                    return Ok(());
                }
                let [a, b, c, ..] = self.header;
                self.left = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
            }
            let n = bytes.len().min(self.left);
            let (part, rest) = bytes.split_at(n);
            (bytes, self.left) = (rest, self.left - n);
            self.payload(part)?;
            if self.left == 0 {
                self.frame()?;
                self.filled = 0;
                self.kept.clear();
            }
        }
        Ok(())
    }

    /// Kind, flags and stream of the frame that comes.
    fn head(&self) -> (u8, u8, u32) {
        let [_, _, _, kind, flags, a, b, c, d] = self.header;
        (kind, flags, u32::from_be_bytes([a & 0x7f, b, c, d]))
    }

    fn payload(&mut self, part: &[u8]) -> io::Result<()> {
        let (kind, flags, id) = self.head();
        match kind {
            DATA if flags & PADDED != 0 => Err(io::Error::other("the server pads its answers")),
            DATA => {
                if let Some(open) = self.open.iter_mut().find(|open| open.id == id) {
                    let missing = open.wanted.saturating_sub(open.beginning.len()).min(part.len());
                    open.beginning.extend_from_slice(&part[..missing]);
                    open.length += part.len();
                }
                Ok(())
            }
            PING | GO_AWAY => {
                self.kept.extend_from_slice(part);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Takes in a frame that is whole.
    fn frame(&mut self) -> io::Result<()> {
        let (kind, flags, id) = self.head();
        let [a, b, c, ..] = self.header;
        match kind {
            SETTINGS if flags & ACK == 0 => frame(&mut self.out, SETTINGS, ACK, 0, &[]),
            PING if flags & ACK == 0 => frame(&mut self.out, PING, ACK, 0, &self.kept),
            GO_AWAY => return Err(io::Error::other("the server closes the connection")),
            DATA => {
                self.owe(id, u32::from_be_bytes([0, a, b, c]), flags & END_STREAM == 0);
                self.ends(id, flags);
            }
            HEADERS => {
                let begins = self.open.iter().any(|open| open.id == id && open.length == 0);
                if begins && flags & END_STREAM == 0 {
                    self.heard.push_back(Heard::Begun(id));
                }
                self.ends(id, flags);
            }
            RESET => {
                self.open.retain(|open| open.id != id);
                self.heard.push_back(Heard::Refused(id));
            }
            _ => {}
        }
        Ok(())
    }

    /// Gives the windows back what was taken from them, in large pieces.
    fn owe(&mut self, id: u32, n: u32, goes_on: bool) {
        self.owed += n;
        if self.owed >= CONNECTION_WINDOW / 2 {
            let owed = std::mem::take(&mut self.owed);
            frame(&mut self.out, WINDOW_UPDATE, 0, 0, &owed.to_be_bytes());
        }
        let Some(open) = self.open.iter_mut().find(|open| open.id == id) else {
            return;
        };
        open.owed += n;
        if goes_on && open.owed >= STREAM_WINDOW / 2 {
            let owed = std::mem::take(&mut open.owed);
            frame(&mut self.out, WINDOW_UPDATE, 0, id, &owed.to_be_bytes());
        }
        if open.tells_parts {
            self.heard.push_back(Heard::Part(id));
        }
    }

    fn ends(&mut self, id: u32, flags: u8) {
        if flags & END_STREAM == 0 {
            return;
        }
        let Some(at) = self.open.iter().position(|open| open.id == id) else {
            return;
        };
        let mut open = self.open.swap_remove(at);
        let said = open
            .beginning
            .first_chunk::<5>()
            .map(|[_, rest @ ..]| u32::from_be_bytes(*rest));
        let whole = said.is_some_and(|n| n as usize + 5 == open.length);
        self.heard.push_back(if whole {
            Heard::Answer(id, open.length - 5, open.beginning.split_off(5))
        } else {
            Heard::Refused(id)
        });
    }
}
