//! The hook that binds a child process to its parent, run between fork and exec. With `shm` the only unsafe code here.

use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::io::Errno;
use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

/// Lets Linux kill the process that `command` starts when the *thread* that starts it ends.
pub(crate) fn die_with_parent(command: &mut Command) {
    let parent = getpid();
    let hook = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have died between fork and the line above; then that signal would not be sent.
        if getppid() == Some(parent) {
            Ok(())
        } else {
            Err(Errno::SRCH.into())
        }
    };
    // SAFETY: the hook runs in the forked child, where only async-signal-safe code is allowed: it makes two system
    // calls (prctl, getppid), takes no lock, allocates nothing (an error here is a bare code) and captures one integer.
    unsafe { command.pre_exec(hook) };
}
