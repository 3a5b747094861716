//! One child that a command runs beside itself: bound to die with it, its output in a file, every wait with a deadline.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Instant;

use ftcore::{Error, Result, time_left};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};

use super::{ExitSummary, child};

/// A child process in a process group of its own. Dropping it kills the whole group, without waiting for its end.
#[derive(Debug)]
pub struct BoundChild {
    child: Child,
    pid: Pid,
    /// Readable once the process has ended.
    lifeline: OwnedFd,
    log: PathBuf,
    exit: Option<ExitSummary>,
}

impl BoundChild {
    /// Starts `command` with no input and both outputs appended to the file `log`. Linux kills the child (SIGKILL) when
    /// the *thread* that calls this ends, so call it from one that outlives the child.
    ///
    /// Errors: `NotFound` if there is no such program, else `Io`; the text names the program.
    pub fn spawn(command: Command, log: &Path) -> Result<Self> {
        let (mut started, _) = child::spawn(command, log, None)?;
        let opened = child::pid(&started).and_then(|pid| {
            let lifeline = pidfd_open(pid, PidfdFlags::empty());
            lifeline
                .map(|fd| (pid, fd))
                .map_err(|e| Error::io(format!("watch process {pid}"), e.into()))
        });
        match opened {
            Ok((pid, lifeline)) => Ok(Self {
                child: started,
                pid,
                lifeline,
                log: log.to_owned(),
                exit: None,
            }),
            Err(e) => {
                // It could not be watched over.
                drop(started.kill());
                drop(started.wait());
                Err(e)
            }
        }
    }

    /// How it ended, if it has.
    pub fn poll(&mut self) -> Result<Option<ExitSummary>> {
        if self.exit.is_none() {
            let status = self.child.try_wait();
            let status = status.map_err(|e| Error::io(format!("wait for process {}", self.pid), e))?;
            self.exit = status.map(ExitSummary::from);
        }
        Ok(self.exit)
    }

    /// Waits for its end; `Timeout` at the deadline, which leaves it running.
    pub fn wait(&mut self, deadline: Instant) -> Result<ExitSummary> {
        loop {
            if let Some(exit) = self.poll()? {
                return Ok(exit);
            }
            let left = time_left(deadline);
            if left.is_zero() {
                return Err(Error::timeout(format!("process {} did not end", self.pid)));
            }
            let timeout = Timespec::try_from(left).ok();
            match poll(
                &mut [PollFd::new(&self.lifeline, PollFlags::IN)],
                timeout.as_ref(),
            ) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => return Err(Error::io(format!("wait for process {}", self.pid), e.into())),
            }
        }
    }

    /// Sends SIGKILL to it and to whatever it started; no effect once it has been seen to end.
    pub fn kill(&mut self) -> Result<()> {
        match self.exit {
            Some(_) => Ok(()),
            None => child::signal_group(self.pid, Signal::KILL),
        }
    }

    /// The last lines of its output, without control characters; empty if there are none.
    pub fn tail(&self) -> String {
        child::tail(&self.log)
    }
}

impl Drop for BoundChild {
    fn drop(&mut self) {
        drop(self.kill());
        drop(self.child.try_wait());
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ftcore::{ErrorKind, deadline_in};

    use super::*;

    #[test]
    fn its_end_and_last_output_are_seen_and_a_wait_ends_at_its_deadline() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let shell = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            BoundChild::spawn(command, &log).unwrap()
        };
        let soon = || deadline_in(Duration::from_secs(60));
        let mut good = shell("echo words; exit 3");
        assert_eq!(good.wait(soon()).unwrap().status, Some(3));
        assert_eq!(good.tail(), "words");
        good.kill().unwrap();

        let mut sleeper = shell("sleep 1000");
        let e = sleeper.wait(deadline_in(Duration::from_millis(5))).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Timeout);
        assert_eq!(sleeper.poll().unwrap(), None);
        sleeper.kill().unwrap();
        assert_eq!(sleeper.wait(soon()).unwrap().signal, Some(9));
    }
}
