//! The asking end of HTTP/1.1, as much of it as a fetch needs: requests without a body, answers whose length is told.
//!
//! The body of an answer is read from the socket straight into the memory where it stays. A general client reads into memory of its own
//! first, and for a whole state that copy costs as much as hashing the same bytes. Heads are bounded here, bodies by the caller, who says
//! how much of one it reads.

use std::fmt::{self, Write as _};
use std::io;

use bytes::{BufMut, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// The longest head of an answer.
const MAX_HEAD_BYTES: usize = 16 << 10;

/// The most headers of an answer.
const MAX_HEADERS: usize = 64;

/// What is read at once while a head is awaited: bytes of the body that come along are copied.
const HEAD_READ_BYTES: usize = 1 << 10;

trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

/// Why a request got no answer.
#[derive(Debug)]
pub(super) enum Broken {
    /// What came is not HTTP, or not of the kind that is read here.
    Strange(String),
    /// The connection ended or failed.
    Lost(io::Error),
}

impl From<io::Error> for Broken {
    fn from(e: io::Error) -> Self {
        Self::Lost(e)
    }
}

/// The head of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) status: u16,
    /// The bytes of the body; `None` if the answer does not tell.
    pub(super) length: Option<u64>,
    /// Another request may follow over the same connection.
    keeps_open: bool,
}

/// A connection, between two requests or in the middle of an answer. Dropping it closes it.
pub(super) struct Wire {
    stream: Box<dyn Stream>,
    /// What came with the last head and was not read yet.
    ahead: BytesMut,
    /// Bytes of the body that were not read yet.
    left: u64,
    reusable: bool,
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wire")
            .field("left", &self.left)
            .finish_non_exhaustive()
    }
}

impl Wire {
    pub(super) fn over(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> Self {
        Self {
            stream: Box::new(stream),
            ahead: BytesMut::new(),
            left: 0,
            reusable: true,
        }
    }

    /// True if the last answer was read to its end and another request may follow.
    pub(super) fn is_reusable(&self) -> bool {
        self.reusable && self.left == 0
    }

    /// Sends `GET path` and reads the head of the answer. `path` and `authority` are parts of a parsed URL.
    pub(super) async fn get(
        &mut self,
        authority: &str,
        path: &str,
        headers: &[(&str, String)],
    ) -> Result<Head, Broken> {
        let mut request = format!("GET {path} HTTP/1.1\r\nhost: {authority}\r\n");
        for (name, value) in headers {
            // A lineage is a peer's word: it must not end its line.
            if value.bytes().any(|b| (b < b' ' && b != b'\t') || b == 0x7f) {
                return Err(Broken::Strange(format!(
                    "the value of {name} cannot be sent: {}",
                    value.escape_debug()
                )));
            }
            // Writing to a String cannot fail.
            let _ = write!(request, "{name}: {value}\r\n");
        }
        request.push_str("\r\n");
        // Until the answer is read to its end, nothing else can follow.
        self.reusable = false;
        self.stream.write_all(request.as_bytes()).await?;
        self.stream.flush().await?;
        let head = self.head().await?;
        self.left = head.length.unwrap_or(0);
        self.reusable = head.keeps_open;
        Ok(head)
    }

    async fn head(&mut self) -> Result<Head, Broken> {
        loop {
            if let Some((head, bytes)) = parse(&self.ahead)? {
                let _ = self.ahead.split_to(bytes);
                return Ok(head);
            }
            if self.ahead.len() >= MAX_HEAD_BYTES {
                let text = format!("a head of more than {MAX_HEAD_BYTES} bytes");
                return Err(Broken::Strange(text));
            }
            self.ahead.reserve(HEAD_READ_BYTES);
            let mut room = (&mut self.ahead).limit(HEAD_READ_BYTES);
            if self.stream.read_buf(&mut room).await? == 0 {
                return Err(ended().into());
            }
        }
    }

    /// Reads what has come of the body, at most `limit` bytes, to the end of `into`. 0 at the end of the body, or for a limit of 0.
    pub(super) async fn read(&mut self, into: &mut BytesMut, limit: usize) -> io::Result<usize> {
        let limit = limit.min(usize::try_from(self.left).unwrap_or(usize::MAX));
        if limit == 0 {
            return Ok(0);
        }
        let read = if self.ahead.is_empty() {
            into.reserve(limit);
            self.stream.read_buf(&mut into.limit(limit)).await?
        } else {
            let early = self.ahead.split_to(limit.min(self.ahead.len()));
            into.extend_from_slice(&early);
            early.len()
        };
        if read == 0 {
            return Err(ended());
        }
        self.left = self.left.saturating_sub(read as u64);
        Ok(read)
    }
}

fn ended() -> io::Error {
    io::Error::new(
        io::ErrorKind::UnexpectedEof,
        "it was closed in the middle of an answer",
    )
}

/// The head at the beginning of `bytes` and its length; `None` if it is not whole yet.
fn parse(bytes: &[u8]) -> Result<Option<(Head, usize)>, Broken> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut answer = httparse::Response::new(&mut headers);
    let length_of_head = match answer.parse(bytes) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(e) => return Err(Broken::Strange(e.to_string())),
    };
    let mut length = None;
    // Of HTTP/1.0 each connection brings one answer.
    let mut keeps_open = answer.version == Some(1);
    for header in answer.headers.iter() {
        let value = String::from_utf8_lossy(header.value);
        let value = value.trim();
        if header.name.eq_ignore_ascii_case("transfer-encoding") {
            let text = format!(
                "an answer that does not tell its length (transfer-encoding: {})",
                value.escape_debug()
            );
            return Err(Broken::Strange(text));
        }
        if header.name.eq_ignore_ascii_case("connection") && value.eq_ignore_ascii_case("close") {
            keeps_open = false;
        }
        if header.name.eq_ignore_ascii_case("content-length") {
            let told = value
                .parse::<u64>()
                .ok()
                .filter(|n| length.is_none_or(|l| l == *n));
            let Some(told) = told else {
                return Err(Broken::Strange(format!(
                    "a content-length of {}",
                    value.escape_debug()
                )));
            };
            length = Some(told);
        }
    }
    let head = Head {
        status: answer.code.unwrap_or(0),
        length,
        // Without a length the body ends with the connection.
        keeps_open: keeps_open && length.is_some(),
    };
    Ok(Some((head, length_of_head)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(text: &str) -> Result<Option<(Head, usize)>, Broken> {
        parse(text.as_bytes())
    }

    #[test]
    fn heads_are_read_once_they_are_whole() {
        let text = "HTTP/1.1 200 OK\r\nContent-Length: 12\r\nx: y\r\n\r\n";
        let whole = Head {
            status: 200,
            length: Some(12),
            keeps_open: true,
        };
        for end in 0..text.len() {
            assert_eq!(head(&text[..end]).unwrap(), None, "{end}");
        }
        assert_eq!(head(&format!("{text}body")).unwrap(), Some((whole, text.len())));
    }

    #[test]
    fn a_connection_is_used_again_only_if_the_answer_says_where_it_ends_and_does_not_close_it() {
        for (text, reusable) in [
            ("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", true),
            (
                "HTTP/1.1 200 OK\r\ncontent-length: 0\r\nConnection: Close\r\n\r\n",
                false,
            ),
            ("HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n", false),
            ("HTTP/1.1 500 no\r\n\r\n", false),
        ] {
            let (head, _) = head(text).unwrap().unwrap();
            assert_eq!(head.keeps_open, reusable, "{text}");
        }
    }

    #[test]
    fn what_is_not_http_or_does_not_tell_one_length_is_refused() {
        for text in [
            "SSH-2.0-OpenSSH\r\n\r\n",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999\r\n\r\n",
        ] {
            assert!(matches!(head(text), Err(Broken::Strange(_))), "{text}");
        }
        let many = format!("HTTP/1.1 200 OK\r\n{}\r\n", "a: b\r\n".repeat(MAX_HEADERS + 1));
        assert!(matches!(head(&many), Err(Broken::Strange(_))));
    }

    fn run<T>(work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap()
            .block_on(work)
    }

    #[test]
    fn a_body_goes_where_it_stays_and_the_next_answer_is_left_for_the_next_request() {
        run(async {
            let (near, mut far) = tokio::io::duplex(1 << 10);
            let mut wire = Wire::over(near);
            let answers = "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello";
            far.write_all(answers.as_bytes()).await.unwrap();
            let asked = wire.get("h:1", "/p", &[("a", "b".into())]).await.unwrap();
            assert_eq!((asked.status, asked.length), (200, Some(5)));
            let mut body = BytesMut::with_capacity(8);
            let at = body.as_ptr();
            assert_eq!(wire.read(&mut body, 2).await.unwrap(), 2);
            assert!(!wire.is_reusable());
            assert_eq!(wire.read(&mut body, 8).await.unwrap(), 3);
            assert_eq!((&body[..], body.as_ptr()), (&b"hello"[..], at));
            assert_eq!(wire.read(&mut body, 8).await.unwrap(), 0);
            assert!(wire.is_reusable());
            let mut request = vec![0; 64];
            let n = far.read(&mut request).await.unwrap();
            assert_eq!(&request[..n], b"GET /p HTTP/1.1\r\nhost: h:1\r\na: b\r\n\r\n");
            // The second answer breaks off.
            far.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhe")
                .await
                .unwrap();
            drop(far);
            let e = wire.get("h:1", "/p", &[]).await;
            assert!(
                matches!(e, Err(Broken::Lost(_))),
                "the request is not answered: {e:?}"
            );
        });
    }

    #[test]
    fn a_body_that_breaks_off_is_an_error_and_a_value_with_a_line_break_is_not_sent() {
        run(async {
            let (near, mut far) = tokio::io::duplex(1 << 10);
            let mut wire = Wire::over(near);
            let e = wire.get("h:1", "/p", &[("a", "b\r\nc: d".into())]).await;
            assert!(matches!(e, Err(Broken::Strange(_))));
            far.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhe")
                .await
                .unwrap();
            wire.get("h:1", "/p", &[]).await.unwrap();
            drop(far);
            let mut body = BytesMut::new();
            assert_eq!(wire.read(&mut body, 9).await.unwrap(), 2);
            assert_eq!(
                wire.read(&mut body, 9).await.unwrap_err().kind(),
                io::ErrorKind::UnexpectedEof
            );
            assert!(!wire.is_reusable());
        });
    }
}
