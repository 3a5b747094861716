//! One child process: started in a process group of its own, its output in a file, bound to die with its supervisor.
//!
//! The only `unsafe` of this crate is here: the hook that runs in the new process before the program starts.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use ftcore::{Error, ErrorKind, Result};
use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, getpid, getppid, kill_process_group, set_parent_process_death_signal,
    waitid,
};

use super::output::{Reader, Rest};

/// How much of a log is shown with an error.
const TAIL_BYTES: u64 = 4096;
const TAIL_LINES: usize = 20;

/// Starts `command` with no input and both outputs appended to `log`, by way of `reader` if there is one. Linux kills the child (SIGKILL) when the *thread*
/// that calls this ends, so the caller must be a thread that outlives the child.
///
/// Fails with `NotFound` if there is no such program, else with `Io`; the text names the program.
pub(super) fn spawn(
    mut command: Command,
    log: &Path,
    reader: Option<Reader>,
) -> Result<(Child, Option<Rest>)> {
    let io = |e| Error::io(format!("open the log {}", log.display()), e);
    let file = OpenOptions::new()
        .create(true)
        .append(true)
        .open(log)
        .map_err(io)?;
    command.stdin(Stdio::null());
    let rest = match reader {
        Some(reader) => {
            let (out, err, rest) = reader.pipes(&file)?;
            command.stdout(out).stderr(err);
            Some(rest)
        }
        None => {
            command.stdout(file.try_clone().map_err(io)?).stderr(file);
            None
        }
    };
    // A group of its own: an interrupt typed at the terminal reaches the supervisor alone, which then ends the children
    // in order; and a child's own children are ended with it.
    command.process_group(0);
    let supervisor = getpid();
    let hook = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The supervisor may have died between fork and the line above; then that signal would not come.
        if getppid() == Some(supervisor) {
            Ok(())
        } else {
            Err(Errno::SRCH.into())
        }
    };
    // SAFETY: The hook runs in the forked child, where only async-signal-safe code is allowed: it makes two system
    // calls (prctl, getppid), takes no lock, allocates nothing (an error here is a bare code) and captures one integer.
    unsafe { command.pre_exec(hook) };
    let started = command.spawn().map_err(|e| {
        let program = command.get_program().to_string_lossy().into_owned();
        match e.kind() {
            std::io::ErrorKind::NotFound => {
                Error::new(ErrorKind::NotFound, format!("program \"{program}\" not found")).with_source(e)
            }
            _ => Error::io(format!("start program \"{program}\""), e),
        }
    });
    // The command holds the pipes' writing ends: with it they are the child's alone.
    drop(command);
    started.map(|child| (child, rest))
}

/// The child's process id, as the system calls take it.
pub(super) fn pid(child: &Child) -> Result<Pid> {
    i32::try_from(child.id())
        .ok()
        .and_then(Pid::from_raw)
        .ok_or_else(|| {
            Error::new(
                ErrorKind::Internal,
                format!("process id {} is out of range", child.id()),
            )
        })
}

/// Blocks until the process has ended, without collecting it: until `Child::wait` its id stays taken, so that a signal
/// sent meanwhile cannot hit a stranger.
pub(super) fn wait_for_end(pid: Pid) {
    loop {
        match waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT) {
            Err(Errno::INTR) => {}
            // Any other error (no such child) means that there is nothing to wait for.
            Ok(_) | Err(_) => return,
        }
    }
}

/// Signals the child's whole process group. The child must not have been collected yet.
pub(super) fn signal_group(pid: Pid, signal: Signal) -> Result<()> {
    match kill_process_group(pid, signal) {
        // All its processes have ended already.
        Ok(()) | Err(Errno::SRCH) => Ok(()),
        Err(e) => Err(Error::io(format!("signal process group {pid}"), e.into())),
    }
}

/// The last lines of a log; empty if it cannot be read. Control characters become spaces.
pub(super) fn tail(log: &Path) -> String {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = File::open(log)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
        let mut bytes = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<String> = text
        .lines()
        .map(|line| {
            line.chars()
                .map(|c| if c.is_control() { ' ' } else { c })
                .collect::<String>()
        })
        .collect();
    let from = lines.len().saturating_sub(TAIL_LINES);
    lines.get(from..).unwrap_or_default().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_is_the_last_lines_without_control_characters() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let text: String = (0..1000).map(|i| format!("line {i} \u{1b}[31mred\n")).collect();
        std::fs::write(&log, text).unwrap();
        let tail = tail(&log);
        assert_eq!(tail.lines().count(), TAIL_LINES);
        assert!(
            tail.starts_with("line 980  [31mred\n") && tail.ends_with("line 999  [31mred"),
            "{tail}"
        );
        assert_eq!(super::tail(&dir.path().join("absent")), "");
    }

    #[test]
    fn a_program_that_does_not_exist_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let e = spawn(
            Command::new("oxccl-no-such-program"),
            &dir.path().join("log"),
            None,
        )
        .unwrap_err();
        assert_eq!(e.kind(), ErrorKind::NotFound);
        assert!(e.to_string().contains("oxccl-no-such-program"), "{e}");
    }
}
