//! The thread beside each child: takes its reports and its output, and sees to its end.
//!
//! It sleeps in `poll` on the socket, the pidfd, both outputs and a waker. It ends when the child is collected, so that no
//! zombie is left; whatever was pending has failed by then.

use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, ChildStderr, ChildStdout, ExitStatus};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::engine::spawn;
use ftcore::{Error, ErrorKind, Result, deadline_in, time_left};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use crate::channel::{Filled, Receiver};
use crate::link::Link;
use crate::litter;
use crate::output::Output;
use crate::wire::frames::Report;

/// How often an idle keeper looks at unused memory.
const IDLE: Duration = Duration::from_millis(500);
/// A child that closed its socket is about to end; it is helped after this.
const LAST_BREATH: Duration = Duration::from_millis(200);
/// A child that could not be told something, because another thread was sending to it, is told after this.
const AGAIN: Duration = Duration::from_millis(1);
/// Output that is taken in one turn.
const OUTPUT: usize = 256 << 10;

/// The state of the thread.
pub(crate) struct Keeper {
    link: Arc<Link>,
    child: Child,
    receiver: Receiver,
    stdout: Output<ChildStdout>,
    stderr: Output<ChildStderr>,
    /// The child closed its end of the socket.
    closed: bool,
    /// The end was ordered, and this is when the child is killed.
    kill_at: Option<Instant>,
    /// What is pending fails then.
    fail_at: Option<Instant>,
    /// It has still to be told of its end.
    untold: bool,
    is_killed: bool,
}

impl Keeper {
    /// Starts the thread. On an error the child is killed and collected.
    pub(crate) fn start(link: Arc<Link>, child: Child, socket: Arc<OwnedFd>) -> Result<()> {
        let keeper = Self::new(link, child, socket)?;
        // With an error the closure is dropped, and the keeper with it.
        spawn(&format!("ox-isolate-{}", keeper.link.pid), move || keeper.run())
    }

    fn new(link: Arc<Link>, mut child: Child, socket: Arc<OwnedFd>) -> Result<Self> {
        let outputs = Output::new(child.stdout.take(), "stdout")
            .and_then(|out| Ok((out, Output::new(child.stderr.take(), "stderr")?)));
        let (stdout, stderr) = match outputs {
            Ok(outputs) => outputs,
            Err(e) => {
                drop(child.kill());
                drop(child.wait());
                return Err(e);
            }
        };
        Ok(Self {
            receiver: Receiver::new(socket, false),
            stdout,
            stderr,
            closed: false,
            kill_at: None,
            fail_at: None,
            untold: false,
            is_killed: false,
            link,
            child,
        })
    }

    fn run(mut self) {
        loop {
            let exited = self.sleep();
            if let Err(error) = self.turn() {
                tracing::warn!(pid = %self.link.pid, %error, "a child process is ended");
                self.link.end(error, None, Duration::ZERO);
                self.ordered();
            }
            if exited {
                break;
            }
        }
        self.collect();
    }

    /// Until something happens; true if the child has ended.
    fn sleep(&mut self) -> bool {
        let untold = self.untold || self.link.has_orders();
        let again = untold && !self.is_killed && !self.closed;
        let mut wake_at = deadline_in(if again { AGAIN } else { IDLE });
        let kill_at = self.kill_at.filter(|_| !self.is_killed);
        for at in [self.link.look_at_bounds(), kill_at, self.fail_at]
            .into_iter()
            .flatten()
        {
            wake_at = wake_at.min(at);
        }
        let mut fds = vec![
            PollFd::new(&self.link.pidfd, PollFlags::IN),
            PollFd::from_borrowed_fd(self.link.waker(), PollFlags::IN),
        ];
        if !self.closed {
            fds.push(PollFd::from_borrowed_fd(self.receiver.fd(), PollFlags::IN));
        }
        let outputs = [self.stdout.fd(), self.stderr.fd()].into_iter().flatten();
        fds.extend(outputs.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        match poll(&mut fds, Timespec::try_from(time_left(wake_at)).ok().as_ref()) {
            Ok(_) => fds.first().is_some_and(|pidfd| !pidfd.revents().is_empty()),
            Err(Errno::INTR) => false,
            Err(e) => {
                let error = Error::io("watch a child process", e.into());
                self.link.end(error, None, Duration::ZERO);
                // Out of kernel memory: not in a tight loop.
                std::thread::sleep(Duration::from_millis(10));
                // Without collecting it: that is for the end.
                let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
                !matches!(waitid(WaitId::PidFd(self.link.pidfd.as_fd()), look), Ok(None))
            }
        }
    }

    fn turn(&mut self) -> Result<()> {
        let mut count = [0u8; 8];
        let _ = rustix::io::read(self.link.waker(), &mut count);
        let told = self.link.flush(false);
        let reports = self.reports();
        self.stdout.drain(self.link.pid, &self.link.tail, OUTPUT);
        self.stderr.drain(self.link.pid, &self.link.tail, OUTPUT);
        self.ordered();
        if self.kill_at.is_none() {
            told?;
            self.link.flush(true)?;
        }
        reports
    }

    fn reports(&mut self) -> Result<()> {
        while !self.closed {
            match self.receiver.fill(false)? {
                Filled::Nothing => return Ok(()),
                Filled::Closed => {
                    self.closed = true;
                    // Nothing is pending for long: its end brings the true reason.
                    self.kill_at.get_or_insert_with(|| deadline_in(LAST_BREATH));
                }
                Filled::Some => {
                    while let Some(body) = self.receiver.next()? {
                        self.link.take(Report::decode(body)?)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Carries out the order to end the child, and kills it when its time is up.
    fn ordered(&mut self) {
        if let Some(ending) = self.link.ending() {
            let first = self.kill_at.is_none_or(|at| at > ending.kill_at) || self.closed;
            self.untold |= self.kill_at.is_none();
            if self.untold {
                let order = ending.order.as_ref();
                self.untold = !order.is_none_or(|order| self.link.send_last(order, ending.kill_at));
            }
            if first {
                self.kill_at = Some(ending.kill_at);
            }
            if ending.fail_at.min(ending.kill_at) <= Instant::now() {
                self.fail_at = None;
                self.link.let_go(&ending.error);
            } else {
                self.fail_at = Some(ending.fail_at);
            }
        }
        if !self.is_killed && self.kill_at.is_some_and(|at| time_left(at).is_zero()) {
            self.is_killed = true;
            self.kill();
        }
    }

    fn kill(&mut self) {
        // With whatever it started. It is not collected yet, so the number is still its own.
        if let Err(e) = kill_process_group(self.link.pid, Signal::KILL) {
            tracing::debug!(pid = %self.link.pid, error = %e, "the child's process group cannot be killed");
        }
        drop(self.child.kill());
    }

    /// The child has ended: its failure notice, then everything that is pending fails.
    fn collect(mut self) {
        drop(self.reports());
        let by_us = self.is_killed;
        self.kill();
        litter::sweep(self.link.pid);
        let status = self.child.wait();
        self.stdout.drain(self.link.pid, &self.link.tail, OUTPUT);
        self.stderr.drain(self.link.pid, &self.link.tail, OUTPUT);
        let error = match self.link.ending() {
            Some(ending) => ending.error,
            None => self.died(status),
        };
        tracing::debug!(pid = %self.link.pid, by_us, reason = %error, "a child process has ended");
        self.link.collected(&error);
    }

    fn died(&self, status: std::io::Result<ExitStatus>) -> Error {
        use std::os::unix::process::ExitStatusExt;
        let (how, code) = match &status {
            Ok(s) => match (s.code(), s.signal()) {
                (Some(code), _) => (format!("exited with status {code}"), Some(i64::from(code))),
                (None, Some(signal)) => (
                    format!("was killed by signal {signal}{}", name_of(signal)),
                    Some(-i64::from(signal)),
                ),
                _ => (s.to_string(), None),
            },
            Err(e) => (format!("ended ({e})"), None),
        };
        let text = format!(
            "the child process (pid {}) that runs '{}' {how}{}",
            self.link.pid,
            self.link.backend,
            self.link.tail.text()
        );
        let error = Error::new(ErrorKind::Unavailable, text);
        match code {
            Some(code) => error.with_code(code),
            None => error,
        }
    }
}

fn name_of(signal: i32) -> &'static str {
    match signal {
        4 => " (SIGILL)",
        6 => " (SIGABRT)",
        7 => " (SIGBUS)",
        8 => " (SIGFPE)",
        9 => " (SIGKILL)",
        11 => " (SIGSEGV)",
        15 => " (SIGTERM)",
        _ => "",
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // Only if the thread could not be started, or after the end. Waits for a process that was just killed, so that it is collected.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::tests::linked;
    use crate::wire::frames::Order;

    #[test]
    fn a_child_whose_keeper_cannot_run_is_ended_and_collected() {
        let (child, link, socket, _far) = linked();
        drop(Keeper::new(link.clone(), child, socket).unwrap());
        let process = format!("/proc/{}", link.pid);
        assert!(!std::fs::exists(process).unwrap(), "it is left, or a zombie");
    }

    #[test]
    fn a_child_is_ended_in_time_while_another_thread_is_sending_to_it() {
        let (child, link, socket, _far) = linked();
        let sending = link.sending();
        link.order(Order::Release { group: 1 });
        let error = Error::new(ErrorKind::Aborted, "enough");
        link.end(error, Some(Order::Leave), Duration::ZERO);
        Keeper::start(link.clone(), child, socket).unwrap();
        link.wait_gone(deadline_in(Duration::from_secs(20)));
        let process = format!("/proc/{}", link.pid);
        assert!(!std::fs::exists(process).unwrap(), "its keeper waits");
        drop(sending);
    }
}
