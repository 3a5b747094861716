//! Cross-crate tests: real processes, real sockets, real kills.
//!
//! The tests stand in `tests/`; here is what they share: [`Worker`], a child process that trains a toy problem for real
//! (see `bin/worker.rs`), and the lines that it prints about its commits; and slow [`links`] between network namespaces.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "test support: a failure here is a failed test"
)]

pub mod links;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Sender;

/// What a worker says about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Said {
    /// It runs and has asked for nothing yet.
    Started,
    /// It took its state over from a peer.
    Healed {
        /// The step of that state.
        step: i64,
    },
    /// It handed a reduction to the group.
    Reducing {
        /// The step.
        step: i64,
    },
    /// It committed a step.
    Committed {
        /// The step.
        step: i64,
        /// The epoch.
        epoch: i64,
        /// The hash of the parameters that every replica must share.
        hash: String,
        /// How many replicas counted.
        contributors: u32,
    },
    /// It is done.
    Finished {
        /// The hash of the shared parameters at the end.
        hash: String,
    },
    /// Something it could not go on from.
    Failed(String),
    /// Its output ended: it exited or was killed.
    Ended,
}

impl Said {
    /// Reads one line of a worker's standard output.
    pub fn parse(line: &str) -> Option<Self> {
        let words: Vec<&str> = line.split_whitespace().collect();
        Some(match words.as_slice() {
            ["started"] => Self::Started,
            ["healed", step] => Self::Healed {
                step: step.parse().ok()?,
            },
            ["reducing", step] => Self::Reducing {
                step: step.parse().ok()?,
            },
            ["committed", step, epoch, contributors, hash] => Self::Committed {
                step: step.parse().ok()?,
                epoch: epoch.parse().ok()?,
                contributors: contributors.parse().ok()?,
                hash: (*hash).to_string(),
            },
            ["finished", hash] => Self::Finished {
                hash: (*hash).to_string(),
            },
            ["failed", ..] => Self::Failed(line.to_string()),
            _ => return None,
        })
    }
}

/// One incarnation of a worker process; killed when dropped.
pub struct Worker {
    child: Child,
    /// Which replica it is.
    pub replica: usize,
    /// Which incarnation of that replica.
    pub incarnation: usize,
}

impl Worker {
    /// Starts `program` (the worker binary) with `args`; everything it says goes to `says` as (replica, incarnation, what).
    pub fn start(
        program: &str,
        replica: usize,
        incarnation: usize,
        args: &[String],
        says: Sender<(usize, usize, Said)>,
    ) -> Self {
        let mut child = Command::new(program)
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .expect("the worker starts");
        let stdout = child.stdout.take().expect("stdout is piped");
        std::thread::Builder::new()
            .name(format!("ox-test-{replica}.{incarnation}"))
            .spawn(move || {
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    if let Some(said) = Said::parse(&line) {
                        let _ = says.send((replica, incarnation, said));
                    }
                }
                let _ = says.send((replica, incarnation, Said::Ended));
            })
            .expect("a thread starts");
        Self {
            child,
            replica,
            incarnation,
        }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// SIGKILL, and reaps.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Waits for a voluntary exit; true if it was a success.
    pub fn succeeded(&mut self) -> bool {
        self.child.wait().is_ok_and(|s| s.success())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Nanoseconds of the clock that all processes of this machine share.
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
