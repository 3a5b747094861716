//! Tries a plugin in a child process with a time limit, so that one that crashes, hangs or is garbage is never opened here.
//!
//! The child is this very program (or the `oxccl` command), started again with `OXCCL_PLUGIN_PROBE`: a constructor of this
//! crate sees the variable before `main`, opens the plugin, asks it everything, writes its verdict to a pipe and ends. So
//! a program needs no code of its own for it. Where this crate is not in the main executable (a Python extension), the
//! helper named by `OXCCL_HELPER`, or `oxccl` from the `PATH`, does the same.

use std::collections::BTreeSet;
use std::io::{Read, Write as _};
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ftcore::registry::Unavailable;
use ftcore::{Error, Result, deadline_in, time_left};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process_group};

use super::{library, verdict};

/// The executable that tries plugins where this program cannot do it itself: any that links this crate.
pub const ENV_HELPER: &str = "OXCCL_HELPER";
/// How many seconds a plugin has to answer in the child process (default 20).
pub const ENV_PROBE_SECONDS: &str = "OXCCL_PLUGIN_PROBE_SECONDS";
/// Set for the child: the plugin to try.
const ENV_PROBE: &str = "OXCCL_PLUGIN_PROBE";

const DEFAULT_SECONDS: u64 = 20;
/// First line of a verdict.
const GREETING: &str = "oxccl plugin probe 1";
/// As much of a child's verdict and of its last lines as is kept.
const LONGEST: usize = 16 * 1024;

/// The time limit that the environment names.
pub(super) fn limit() -> Result<Duration> {
    let Some(text) = std::env::var_os(ENV_PROBE_SECONDS) else {
        return Ok(Duration::from_secs(DEFAULT_SECONDS));
    };
    let seconds = text.to_str().and_then(|t| t.trim().parse::<f64>().ok());
    seconds
        .filter(|s| s.is_finite() && *s > 0.0 && *s <= 3600.0)
        .map(Duration::from_secs_f64)
        .ok_or_else(|| {
            Error::invalid(format!(
                "{ENV_PROBE_SECONDS}: {text:?} is not a number of seconds"
            ))
        })
}

// ---- the child ----

#[used]
#[unsafe(link_section = ".init_array")]
// SAFETY: glibc calls it once before `main`; without the variable it only reads the environment.
static CONSTRUCTOR: extern "C" fn() = {
    extern "C" fn before_main() {
        library::guarded((), || {
            if let Some(path) = std::env::var_os(ENV_PROBE) {
                // A plugin that has this constructor too must not start over, nor must what it starts.
                // SAFETY: before `main`: this is the only thread.
                unsafe { std::env::remove_var(ENV_PROBE) };
                std::process::exit(child(Path::new(&path)));
            }
        });
    }
    before_main
};

/// The child's whole life.
fn child(path: &Path) -> i32 {
    // It must not outlive the process that waits for it.
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    if is_alone() {
        return 3;
    }
    // The verdict has the pipe for itself: what the plugin prints goes to the standard error.
    let Ok(mut pipe) = rustix::io::dup(rustix::stdio::stdout()).map(std::fs::File::from) else {
        return 3;
    };
    if rustix::stdio::dup2_stdout(rustix::stdio::stderr()).is_err() {
        return 3;
    }
    let found = library::open(path).map(ask_everything);
    let answer = format!("{GREETING}\n{}\nend\n", verdict::write(&found));
    i32::from(
        pipe.write_all(answer.as_bytes())
            .and_then(|()| pipe.flush())
            .is_err(),
    )
}

/// True if no process reads what this one writes: the one that waited ended before its death would be signalled here.
fn is_alone() -> bool {
    let stdout = rustix::stdio::stdout();
    let mut pipe = [PollFd::new(&stdout, PollFlags::empty())];
    let _ = poll(&mut pipe, Some(&Timespec::default()));
    pipe.iter()
        .any(|stdout| stdout.revents().contains(PollFlags::ERR))
}

/// What a listing asks of a backend: it must not crash or hang there either. Whether it can be used is asked again in the
/// program itself, since that may change.
fn ask_everything(opened: &'static library::Library) {
    for backend in super::Loaded(opened).backends() {
        drop(backend.factory.probe());
        let _ = backend.factory.capabilities();
        let _ = backend.factory.library();
    }
    for (index, kind) in (0u32..).zip(&opened.devices) {
        drop(super::device::table(opened, index, kind));
    }
}

// ---- the parent ----

/// Tries the plugin at a canonical path. The verdict is kept as long as the file stays the same.
pub(super) fn try_in_child(path: &Path, limit: Duration) -> Result<(), Unavailable> {
    let file = verdict::State::of(path);
    if let Some(known) = verdict::known(&file) {
        return known;
    }
    // Only what is known of the file is kept: a trial that could not begin is made again.
    let (child, helper) = start(path)?;
    let verdict = watch(child, &helper, limit);
    verdict::keep(file, verdict.clone());
    verdict
}

/// How many children try plugins at once: they mostly load, and those that hang only wait.
const SIDE_BY_SIDE: usize = 16;

/// Tries the plugins at canonical paths side by side, so that several which hang cost one time limit. The verdicts are kept for
/// [`try_in_child`].
pub(super) fn try_side_by_side(paths: &BTreeSet<PathBuf>, limit: Duration) {
    let next = Mutex::new(paths.iter());
    let work = || {
        loop {
            let path = next.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(path) = path else { return };
            // A caller that asks for it gets the verdict, with its reason.
            drop(try_in_child(path, limit));
        }
    };
    std::thread::scope(|scope| {
        for n in 1..paths.len().min(SIDE_BY_SIDE) {
            let name = format!("ox-plugin-try-{n}");
            if let Err(error) = std::thread::Builder::new().name(name).spawn_scoped(scope, work) {
                tracing::debug!(%error, "no thread to try plugins with: fewer are tried at once");
            }
        }
        work();
    });
}

/// The child and the program that it runs.
fn start(path: &Path) -> Result<(Child, PathBuf), Unavailable> {
    let helper = helper()?;
    let mut command = Command::new(&helper);
    command
        .env(ENV_PROBE, path)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // Of its own, so that whatever the plugin starts can be ended with it.
        .process_group(0);
    match command.spawn() {
        Ok(child) => Ok((child, helper)),
        Err(e) => Err(Unavailable::ProbeFailed {
            text: format!("cannot start {}: {e}", helper.display()),
        }),
    }
}

fn watch(child: Child, helper: &Path, limit: Duration) -> Result<(), Unavailable> {
    let mut watched = Watched {
        child,
        deadline: deadline_in(limit),
        verdict: Vec::new(),
        words: Vec::new(),
    };
    let status = match watched.finish() {
        Some(status) => status,
        None => {
            return Err(Unavailable::ProbeTimedOut {
                milliseconds: u64::try_from(limit.as_millis()).unwrap_or(u64::MAX),
            });
        }
    };
    let words = watched.last_output();
    if let Some(signal) = status.signal() {
        return Err(Unavailable::ProbeCrashed {
            signal,
            output: words,
        });
    }
    let answer = String::from_utf8_lossy(&watched.verdict).into_owned();
    match read_verdict(&answer) {
        Some(verdict) if status.success() => verdict,
        _ => Err(Unavailable::ProbeFailed {
            text: format!("{} ended with {status}; {words}", helper.display()),
        }),
    }
}

/// `None` if it is not a whole verdict.
fn read_verdict(answer: &str) -> Option<Result<(), Unavailable>> {
    let mut lines = answer.lines();
    let (greeting, verdict, end) = (lines.next()?, lines.next()?, lines.next()?);
    if greeting != GREETING || end != "end" {
        return None;
    }
    verdict::read(verdict)
}

/// A child with its two pipes; killed with everything it started when this is dropped.
struct Watched {
    child: Child,
    deadline: Instant,
    verdict: Vec<u8>,
    words: Vec<u8>,
}

impl Watched {
    /// Reads both pipes until the child has ended; `None` at the deadline.
    fn finish(&mut self) -> Option<ExitStatus> {
        let mut open = [self.child.stdout.is_some(), self.child.stderr.is_some()];
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                self.drain(&mut open);
                return Some(status);
            }
            let left = time_left(self.deadline);
            if left.is_zero() {
                return None;
            }
            // A child that closes its pipes, or whose children keep them, is still looked at often.
            let pause = if open == [false; 2] {
                Duration::from_millis(2)
            } else {
                Duration::from_millis(20)
            };
            self.wait(pause.min(left), &mut open);
        }
    }

    fn wait(&mut self, pause: Duration, open: &mut [bool; 2]) {
        let timeout = Timespec::try_from(pause).ok();
        let ready = {
            let fds = [
                self.child.stdout.as_ref().map(|p| p.as_fd()),
                self.child.stderr.as_ref().map(|p| p.as_fd()),
            ];
            let mut polled: Vec<PollFd<'_>> = fds
                .iter()
                .zip(*open)
                .filter_map(|(fd, open)| fd.filter(|_| open))
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
                .collect();
            poll(&mut polled, timeout.as_ref()).unwrap_or(0)
        };
        if ready > 0 {
            self.read_ready(open);
        }
    }

    fn read_ready(&mut self, open: &mut [bool; 2]) {
        if let (true, Some(pipe)) = (open[0], self.child.stdout.as_mut()) {
            open[0] = take(pipe, &mut self.verdict);
        }
        if let (true, Some(pipe)) = (open[1], self.child.stderr.as_mut()) {
            open[1] = take(pipe, &mut self.words);
        }
    }

    /// What is still in the pipes. A grandchild may keep them open: what is not there now is not waited for.
    fn drain(&mut self, open: &mut [bool; 2]) {
        for _ in 0..LONGEST {
            if *open == [false; 2] {
                return;
            }
            let before = (self.verdict.len(), self.words.len());
            self.wait(Duration::ZERO, open);
            if before == (self.verdict.len(), self.words.len()) {
                return;
            }
        }
    }

    /// The last lines of its standard error, without control characters.
    fn last_output(&self) -> String {
        let text = String::from_utf8_lossy(&self.words);
        let lines: Vec<String> = text
            .lines()
            .map(|l| l.chars().filter(|c| !c.is_control()).collect::<String>())
            .filter(|l| !l.trim().is_empty())
            .collect();
        let from = lines.len().saturating_sub(3);
        lines.get(from..).unwrap_or_default().join(" | ")
    }
}

/// Reads what is there now, if it is: false at the end. Keeps the last [`LONGEST`] bytes.
fn take(pipe: &mut (impl Read + AsFd), into: &mut Vec<u8>) -> bool {
    let ready = poll(
        &mut [PollFd::new(pipe, PollFlags::IN)],
        Some(&Timespec::default()),
    );
    if ready != Ok(1) {
        return true;
    }
    let mut room = [0u8; 4096];
    match pipe.read(&mut room) {
        Ok(0) | Err(_) => false,
        Ok(n) => {
            into.extend(room.iter().take(n));
            if into.len() > 2 * LONGEST {
                into.drain(..into.len() - LONGEST);
            }
            true
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        // The group, whether its leader lives or not: a plugin may have started something.
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process_group(pid, Signal::KILL);
        }
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// The executable to try with: this one if this crate is linked into it, so that the constructor is there for sure.
fn helper() -> Result<PathBuf, Unavailable> {
    if let Some(helper) = std::env::var_os(ENV_HELPER).filter(|h| !h.is_empty()) {
        return Ok(helper.into());
    }
    if in_main_executable() {
        return Ok("/proc/self/exe".into());
    }
    let name = "oxccl";
    let on_path = std::env::var_os("PATH")
        .into_iter()
        .flat_map(|p| std::env::split_paths(&p).collect::<Vec<_>>())
        .map(|folder| folder.join(name))
        .find(|file| file.is_file());
    on_path.ok_or_else(|| Unavailable::NoProbe {
        text: format!(
            "this crate is not part of the main executable, and there is no '{name}' on the PATH; set {ENV_HELPER} to the \
             oxccl command"
        ),
    })
}

/// True if the code of this function belongs to the file that this process was started from.
fn in_main_executable() -> bool {
    let here = helper as fn() -> Result<PathBuf, Unavailable> as usize;
    let (Ok(executable), Ok(maps)) = (
        std::fs::read_link("/proc/self/exe"),
        std::fs::read_to_string("/proc/self/maps"),
    ) else {
        return false;
    };
    // start-end perms offset dev inode path
    maps.lines().any(|line| {
        let mut fields = line.splitn(6, ' ');
        let range = fields.next().and_then(|r| r.split_once('-'));
        let Some((start, end)) = range.and_then(|(a, b)| {
            Some((
                usize::from_str_radix(a, 16).ok()?,
                usize::from_str_radix(b, 16).ok()?,
            ))
        }) else {
            return false;
        };
        let path = fields.nth(4).map(str::trim_start);
        (start..end).contains(&here) && path.is_some_and(|p| Path::new(p) == executable)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_binary_can_try_plugins_itself_and_a_part_of_a_verdict_is_none() {
        assert!(in_main_executable());
        assert_eq!(read_verdict(&format!("{GREETING}\ngood\nend\n")), Some(Ok(())));
        assert_eq!(read_verdict(&format!("{GREETING}\ngood\n")), None);
        assert_eq!(read_verdict(&format!("{GREETING}\nfine\nend\n")), None);
        assert_eq!(read_verdict("hello\ngood\nend\n"), None);
    }

    #[test]
    fn what_is_no_library_is_refused_by_the_child_with_the_loader_s_words() {
        let file = std::env::temp_dir().join(format!("oxccl-not-a-library-{}.so", std::process::id()));
        std::fs::write(&file, "plain text").unwrap();
        let path = library::canonical(&file).unwrap();
        let verdict = try_in_child(&path, Duration::from_secs(60));
        std::fs::remove_file(&file).unwrap();
        assert!(
            matches!(&verdict, Err(Unavailable::LibraryNotLoadable { text, .. }) if !text.is_empty()),
            "{verdict:?}"
        );
    }
}
