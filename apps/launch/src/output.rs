//! What the processes of a run write: into their logs, and line by line to the driver where it asked for that.
//!
//! Without a driver that reads, a process writes into its log by itself. With one it writes into two pipes, and one thread for each copies
//! whole lines into the log and hands them on.

use std::fs::File;
use std::io::{ErrorKind, PipeReader, PipeWriter, Read, Write};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Instant;

use ftcore::{Error, Result, time_left};

/// A longer line is handed on in pieces.
const MAX_LINE: usize = 16 * 1024;
const CHUNK: usize = 8 * 1024;

/// A line that a process of a replica has written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutputLine<'a> {
    /// The replica.
    pub replica: u32,
    /// The rank inside it.
    pub rank: u32,
    /// True for standard error, false for standard output.
    pub is_error: bool,
    /// The line without its end; not always UTF-8.
    pub text: &'a [u8],
}

/// Takes the lines that the processes write, on a thread of each stream: two lines may come at the same time, those of one stream in order. A
/// call that blocks holds up the process that writes.
#[derive(Clone)]
pub struct OutputSink(Arc<dyn Fn(OutputLine<'_>) + Send + Sync>);

impl OutputSink {
    /// Calls `take` for every line.
    pub fn new(take: impl Fn(OutputLine<'_>) + Send + Sync + 'static) -> Self {
        Self(Arc::new(take))
    }
}

impl std::fmt::Debug for OutputSink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("OutputSink")
    }
}

/// Where the lines of one process go.
#[derive(Debug, Clone)]
pub(super) struct Reader {
    pub(super) sink: OutputSink,
    pub(super) replica: u32,
    pub(super) rank: u32,
}

/// Ends when everything that a process wrote has been handed on.
#[derive(Debug)]
pub(super) struct Rest(Receiver<()>);

impl Rest {
    /// Waits for it until `deadline`: something that the process left behind may hold its output open.
    pub(super) fn wait(&self, deadline: Instant) {
        if self.0.recv_timeout(time_left(deadline)) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("the last lines of a process may come late: its output is still open");
        }
    }
}

impl Reader {
    /// The ends that the process writes to, standard output first. Their contents are appended to `log` too.
    pub(super) fn pipes(self, log: &File) -> Result<(PipeWriter, PipeWriter, Rest)> {
        let (open, rest) = channel();
        let out = self.pipe(false, log, open.clone())?;
        let err = self.pipe(true, log, open)?;
        Ok((out, err, Rest(rest)))
    }

    fn pipe(&self, is_error: bool, log: &File, open: Sender<()>) -> Result<PipeWriter> {
        let failed = |e| Error::io("read the output of a process", e);
        let (mut from, to) = std::io::pipe().map_err(failed)?;
        let mut log = log.try_clone().map_err(failed)?;
        let this = self.clone();
        std::thread::Builder::new()
            .name(format!("ox-output-{}", self.replica))
            .spawn(move || {
                this.copy(is_error, &mut from, &mut log);
                drop(open);
            })
            .map_err(failed)?;
        Ok(to)
    }

    fn copy(&self, is_error: bool, from: &mut PipeReader, log: &mut File) {
        let hand = |text: &[u8]| {
            let text = text.strip_suffix(b"\r").unwrap_or(text);
            (self.sink.0)(OutputLine {
                replica: self.replica,
                rank: self.rank,
                is_error,
                text,
            });
        };
        let mut chunk = [0; CHUNK];
        // Of a line whose end has not come.
        let mut begun: Vec<u8> = Vec::new();
        let mut is_logged = true;
        loop {
            let new = match from.read(&mut chunk) {
                Ok(0) => break,
                Ok(n) => chunk.get(..n).unwrap_or_default(),
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(_) => break,
            };
            begun.extend_from_slice(new);
            let whole = match begun.iter().rposition(|&b| b == b'\n') {
                Some(at) => at + 1,
                None if begun.len() >= MAX_LINE => begun.len(),
                None => continue,
            };
            let rest = begun.split_off(whole);
            // One write: lines of the two streams are not mixed.
            if let Err(e) = log.write_all(&begun)
                && std::mem::take(&mut is_logged)
            {
                tracing::warn!(
                    "replica {}, rank {}: its log cannot be written: {e}",
                    self.replica,
                    self.rank
                );
            }
            begun
                .strip_suffix(b"\n")
                .unwrap_or(&begun)
                .split(|&b| b == b'\n')
                .for_each(hand);
            begun = rest;
        }
        if !begun.is_empty() {
            // The last line has no end; what is wrong with the log was told.
            drop(log.write_all(&begun));
            hand(&begun);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::sync::Mutex;
    use std::time::Duration;

    use ftcore::deadline_in;

    use super::*;

    #[test]
    fn lines_arrive_whole_and_in_order_and_the_log_has_the_same_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let log = OpenOptions::new().create(true).append(true).open(&path).unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let to = seen.clone();
        let sink = OutputSink::new(move |line| to.lock().unwrap().push((line.is_error, line.text.to_vec())));
        let reader = Reader {
            sink,
            replica: 0,
            rank: 0,
        };
        let (mut out, err, rest) = reader.pipes(&log).unwrap();
        let long = "x".repeat(MAX_LINE + 1);
        let parts = ["one\ntw", "o\r\n\n", &long, "\nlast"];
        for part in parts {
            out.write_all(part.as_bytes()).unwrap();
        }
        drop((out, err));
        rest.wait(deadline_in(Duration::from_secs(60)));
        let seen = std::mem::take(&mut *seen.lock().unwrap());
        let lines: Vec<String> = seen
            .iter()
            .map(|(_, text)| String::from_utf8_lossy(text).into_owned())
            .collect();
        assert_eq!(lines[..3], ["one", "two", ""]);
        assert_eq!(lines[3..lines.len() - 1].concat(), long);
        assert!(lines.last().unwrap() == "last" && seen.iter().all(|(is_error, _)| !is_error));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), parts.concat());
    }
}
