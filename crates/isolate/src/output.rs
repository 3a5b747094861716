//! What a child prints: into the log line by line, and its last lines into the text of errors.

use std::collections::VecDeque;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, PoisonError};

use ftcore::{Error, Result};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

/// How many lines are kept, and how long each may be.
const LINES: usize = 20;
const LINE: usize = 1000;

/// The last lines of both outputs.
#[derive(Default)]
pub(crate) struct Tail(Mutex<VecDeque<String>>);

impl Tail {
    fn push(&self, line: String) {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() >= LINES {
            lines.pop_front();
        }
        lines.push_back(line);
    }

    /// As the end of a message; empty if nothing was printed.
    pub(crate) fn text(&self) -> String {
        let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.is_empty() {
            return String::new();
        }
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        format!("; its last output:\n{}", lines.join("\n"))
    }
}

/// One of the child's outputs.
pub(crate) struct Output<R> {
    pipe: Option<R>,
    name: &'static str,
    partial: Vec<u8>,
}

impl<R: Read + AsFd> Output<R> {
    pub(crate) fn new(pipe: Option<R>, name: &'static str) -> Result<Self> {
        if let Some(pipe) = &pipe {
            let flags = fcntl_getfl(pipe).map_err(|e| Error::io("set up a pipe", e.into()))?;
            fcntl_setfl(pipe, flags | OFlags::NONBLOCK).map_err(|e| Error::io("set up a pipe", e.into()))?;
        }
        Ok(Self {
            pipe,
            name,
            partial: Vec::new(),
        })
    }

    /// The pipe, while it is open.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.pipe.as_ref().map(AsFd::as_fd)
    }

    /// Takes what is there; at most `limit` bytes, so that a child that prints without end does not keep its keeper busy.
    pub(crate) fn drain(&mut self, pid: impl std::fmt::Display + Copy, tail: &Tail, limit: usize) {
        let mut taken = 0;
        while let Some(pipe) = self.pipe.as_mut().filter(|_| taken < limit) {
            let mut buffer = [0u8; 8192];
            match pipe.read(&mut buffer) {
                Ok(0) => self.pipe = None,
                Ok(n) => {
                    taken += n;
                    self.take(buffer.get(..n).unwrap_or_default(), pid, tail);
                }
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return,
                Err(_) => self.pipe = None,
            }
        }
        if self.pipe.is_none() && !self.partial.is_empty() {
            let rest = std::mem::take(&mut self.partial);
            self.line(&rest, pid, tail);
        }
    }

    fn take(&mut self, mut bytes: &[u8], pid: impl std::fmt::Display + Copy, tail: &Tail) {
        while let Some(end) = bytes.iter().position(|&b| b == b'\n') {
            let (head, rest) = bytes.split_at(end);
            let mut line = std::mem::take(&mut self.partial);
            line.extend_from_slice(head);
            self.line(&line, pid, tail);
            bytes = rest.get(1..).unwrap_or_default();
        }
        self.partial.extend_from_slice(bytes);
        if self.partial.len() > LINE {
            let line = std::mem::take(&mut self.partial);
            self.line(&line, pid, tail);
        }
    }

    fn line(&self, bytes: &[u8], pid: impl std::fmt::Display, tail: &Tail) {
        let text: String = String::from_utf8_lossy(bytes)
            .chars()
            .take(LINE)
            .map(|c| if c.is_control() { ' ' } else { c })
            .collect();
        if text.trim().is_empty() {
            return;
        }
        tracing::info!(%pid, output = self.name, "{text}");
        tail.push(text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_cut_cleaned_and_only_the_last_are_kept() {
        let (read, write) = std::io::pipe().unwrap();
        let tail = Tail::default();
        let mut out = Output::new(Some(read), "stdout").unwrap();
        out.drain(1, &tail, usize::MAX);
        assert_eq!(tail.text(), "");
        let mut text = String::new();
        for i in 0..100 {
            text.push_str(&format!("line {i}\u{1b}[31m\n\n"));
        }
        text.push_str("no end");
        std::io::Write::write_all(&mut &write, text.as_bytes()).unwrap();
        out.drain(1, &tail, usize::MAX);
        assert!(tail.text().ends_with("line 99 [31m"), "{}", tail.text());
        assert!(out.fd().is_some());
        drop(write);
        out.drain(1, &tail, usize::MAX);
        assert!(out.fd().is_none());
        assert!(tail.text().ends_with("\nno end"));
        assert_eq!(tail.text().lines().count(), LINES + 1);
    }

    #[test]
    fn a_line_without_end_is_cut_into_pieces() {
        let tail = Tail::default();
        let mut out = Output::new(None::<std::io::PipeReader>, "stderr").unwrap();
        for _ in 0..1000 {
            out.take(&[b'x'; 777], 1, &tail);
            assert!(out.partial.len() <= LINE);
        }
        assert!(tail.text().lines().all(|l| l.len() <= LINE));
    }
}
