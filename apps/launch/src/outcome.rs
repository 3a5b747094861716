//! How a run ended, and how its processes did.

use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use serde::Serialize;

/// How a process ended: with an exit code, or by a signal. Neither: it was never started, or that is lost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct ExitSummary {
    /// The exit code, if it ended by itself.
    pub status: Option<i32>,
    /// The signal that ended it, if one did.
    pub signal: Option<i32>,
}

impl ExitSummary {
    /// True for exit code 0.
    pub fn success(&self) -> bool {
        self.status == Some(0)
    }
}

impl From<ExitStatus> for ExitSummary {
    fn from(status: ExitStatus) -> Self {
        Self {
            status: status.code(),
            signal: status.signal(),
        }
    }
}

impl fmt::Display for ExitSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.status, self.signal) {
            (Some(code), _) => write!(f, "exit code {code}"),
            (None, Some(signal)) => match signal_name(signal) {
                Some(name) => write!(f, "{name}"),
                None => write!(f, "signal {signal}"),
            },
            (None, None) => f.write_str("unknown end"),
        }
    }
}

/// The names one meets; the rest is shown as a number. These numbers are the same on every Linux architecture that
/// Rust supports, MIPS and SPARC apart for SIGBUS.
fn signal_name(signal: i32) -> Option<&'static str> {
    Some(match signal {
        1 => "SIGHUP",
        2 => "SIGINT",
        3 => "SIGQUIT",
        4 => "SIGILL",
        6 => "SIGABRT",
        7 => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL",
        11 => "SIGSEGV",
        13 => "SIGPIPE",
        15 => "SIGTERM",
        _ => return None,
    })
}

/// Why a run ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
pub enum StopReason {
    /// Every replica came to its end (see their outcomes for whether it was a good one).
    Completed,
    /// A replica failed and may not be restarted.
    ReplicaFailed {
        /// Which one.
        replica: u32,
    },
    /// The lighthouse failed and may not be restarted.
    LighthouseFailed,
    /// The run's deadline passed.
    Deadline,
    /// `stop` was called (an interrupt, or the driver's own reason).
    Stopped {
        /// Why, as given to `stop`.
        why: String,
    },
}

impl fmt::Display for StopReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Completed => f.write_str("all replicas came to their end"),
            Self::ReplicaFailed { replica } => {
                write!(f, "replica {replica} failed and may not be restarted again")
            }
            Self::LighthouseFailed => f.write_str("the lighthouse failed and may not be restarted again"),
            Self::Deadline => f.write_str("the deadline of the run passed"),
            Self::Stopped { why } => write!(f, "stopped: {why}"),
        }
    }
}

/// How one replica fared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ReplicaOutcome {
    /// Its index in the job.
    pub replica: u32,
    /// How often it was started.
    pub incarnations: u32,
    /// How the last incarnation ended: the rank's end that caused it. `None` if it was never started.
    pub exit: Option<ExitSummary>,
    /// The end of that process's output, unless it exited with 0.
    pub tail: String,
}

/// How the run ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Outcome {
    /// Why it ended.
    pub stop: StopReason,
    /// The replicas of this machine, by index.
    pub replicas: Vec<ReplicaOutcome>,
}

impl Outcome {
    /// True if every replica of this machine exited with 0 and nothing else ended the run.
    pub fn is_success(&self) -> bool {
        self.stop == StopReason::Completed
            && self
                .replicas
                .iter()
                .all(|r| r.exit.is_some_and(|exit| exit.success()))
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let failed: Vec<String> = self
            .replicas
            .iter()
            .filter(|r| !r.exit.is_some_and(|exit| exit.success()))
            .map(|r| r.replica.to_string())
            .collect();
        match (&self.stop, failed.len()) {
            (StopReason::Completed, 1..) => write!(
                f,
                "{} of {} replicas failed ({}); the others came to their end",
                failed.len(),
                self.replicas.len(),
                failed.join(", ")
            )?,
            (stop, _) => write!(f, "{stop}")?,
        }
        for r in &self.replicas {
            let incarnations = if r.incarnations == 1 {
                "1 incarnation".to_owned()
            } else {
                format!("{} incarnations", r.incarnations)
            };
            match r.exit {
                None => write!(f, "\n  replica {}: never started", r.replica)?,
                Some(exit) => write!(f, "\n  replica {}: {exit} ({incarnations})", r.replica)?,
            }
            for line in r.tail.lines() {
                write!(f, "\n    | {line}")?;
            }
        }
        Ok(())
    }
}
