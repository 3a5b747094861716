//! A socket that gives up on readers who do not read.
//!
//! Wraps the stream under hyper. Writing is watched only while an answer is pending: if less than a minimum goes out
//! within the window, the write fails and the connection ends, which frees its slot and its chunk.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use ftcore::forked::Parents;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep};

/// What must go out per window while an answer is pending.
const MIN_BYTES: usize = 64 << 10;

#[derive(Debug)]
pub(super) struct Paced {
    stream: Pin<Parents<TcpStream>>,
    window: Duration,
    end_of_window: Pin<Box<Sleep>>,
    /// True while a window runs.
    watching: bool,
    written: usize,
}

impl Paced {
    pub(super) fn new(stream: TcpStream, window: Duration) -> Self {
        Self {
            stream: Pin::new(Parents::new(stream)),
            window,
            end_of_window: Box::pin(sleep(window)),
            watching: false,
            written: 0,
        }
    }

    fn watch(&mut self, cx: &mut Context<'_>, result: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        match result {
            Poll::Ready(Ok(n)) => {
                self.written = self.written.saturating_add(n);
                if self.written >= MIN_BYTES {
                    self.rest();
                }
                Poll::Ready(Ok(n))
            }
            Poll::Ready(Err(e)) => Poll::Ready(Err(e)),
            Poll::Pending => {
                if !self.watching {
                    self.watching = true;
                    self.written = 0;
                    let end = Instant::now() + self.window;
                    self.end_of_window.as_mut().reset(end);
                }
                if self.end_of_window.as_mut().poll(cx).is_ready() {
                    let text = format!(
                        "the reader took {} bytes in {:?} (at least {MIN_BYTES} are expected)",
                        self.written, self.window
                    );
                    return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, text)));
                }
                Poll::Pending
            }
        }
    }

    fn rest(&mut self) {
        self.watching = false;
        self.written = 0;
    }
}

impl AsyncRead for Paced {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Paced {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.watch(cx, result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.watch(cx, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    /// hyper flushes once nothing of an answer is left to write, so the window ends here.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.rest();
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
