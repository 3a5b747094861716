//! A process rank while it runs: what it prints is read as it comes, so that its pipe never fills, and how it ends is waited for.

use std::io::Read;
use std::process::{Child, Command, ExitStatus};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::{Failure, Outcome};

/// As much of what a rank prints is kept for messages.
const NOISE: usize = 16 << 10;
/// How long the last of it is waited for once the process has ended: one that it started may hold its pipe.
const LAST: Duration = Duration::from_secs(1);

/// A running process rank; killed if the harness gives up on it.
pub(crate) struct Running {
    pub(crate) rank: u32,
    pub(crate) child: Child,
    noise: Arc<Mutex<Vec<u8>>>,
    /// Ends with the thread that reads.
    read: Receiver<()>,
}

impl Running {
    /// Starts a rank. Its standard error is read if `command` pipes it.
    pub(crate) fn start(rank: u32, mut command: Command) -> Outcome<Self> {
        let child = command
            .spawn()
            .map_err(|e| Failure::new(format!("cannot start rank {rank}: {e}")))?;
        let noise = Arc::default();
        let (reads, read) = channel::<()>();
        let mut this = Self {
            rank,
            child,
            noise: Arc::clone(&noise),
            read,
        };
        if let Some(stderr) = this.child.stderr.take() {
            // Ends with the process.
            std::thread::Builder::new()
                .name(format!("ox-noise-{rank}"))
                .spawn(move || {
                    collect(stderr, &noise);
                    drop(reads);
                })
                .map_err(|e| Failure::new(format!("cannot start a thread: {e}")))?;
        }
        Ok(this)
    }

    /// How it ended, or why that is not known.
    pub(crate) fn wait(&mut self, until: Instant) -> Result<ExitStatus, String> {
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Ok(status),
                Ok(None) if Instant::now() >= until => return Err("did not end in time".to_string()),
                Ok(None) => std::thread::sleep(Duration::from_millis(3)),
                Err(e) => return Err(format!("cannot be waited for: {e}")),
            }
        }
    }

    /// The end of what it printed: all of it, if it has ended.
    pub(crate) fn noise(&mut self) -> String {
        if let Ok(Some(_)) = self.child.try_wait() {
            let _ = self.read.recv_timeout(LAST);
        }
        let noise = self.noise.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&noise).trim().to_string()
    }

    /// `what` happened, and what it printed.
    pub(crate) fn said(&mut self, what: impl std::fmt::Display) -> String {
        match self.noise() {
            noise if noise.is_empty() => what.to_string(),
            noise => format!("{what}: {noise}"),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Takes what the process prints, so that its pipe never fills.
fn collect(mut from: impl Read, into: &Mutex<Vec<u8>>) {
    let mut piece = [0u8; 4096];
    while let Ok(n @ 1..) = from.read(&mut piece) {
        let mut kept = into.lock().unwrap_or_else(PoisonError::into_inner);
        kept.extend(piece.iter().take(n));
        let surplus = kept.len().saturating_sub(NOISE);
        kept.drain(..surplus);
    }
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use ftcore::deadline_in;

    use super::*;

    fn start(script: &str) -> Running {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stderr(Stdio::piped());
        Running::start(0, command).unwrap()
    }

    fn soon() -> Instant {
        deadline_in(Duration::from_secs(60))
    }

    #[test]
    fn a_rank_that_prints_more_than_a_pipe_holds_ends_and_its_last_words_are_kept() {
        let mut rank = start("head -c 300000 /dev/zero | tr '\\0' x >&2; echo the end >&2; exit 3");
        assert_eq!(rank.wait(soon()).unwrap().code(), Some(3));
        let said = rank.said("it failed");
        assert!(
            said.starts_with("it failed: x") && said.ends_with("xthe end"),
            "{said}"
        );
        assert!(said.len() <= NOISE + 20, "{}", said.len());
    }

    #[test]
    fn what_a_rank_printed_is_told_of_one_that_does_not_end() {
        let mut rank = start("echo stuck in the mud >&2; exec sleep 1000");
        let until = soon();
        while rank.noise().is_empty() {
            assert!(Instant::now() < until, "nothing was printed");
            std::thread::yield_now();
        }
        let why = rank.wait(Instant::now()).unwrap_err();
        assert_eq!(rank.said(why), "did not end in time: stuck in the mud");
    }
}
