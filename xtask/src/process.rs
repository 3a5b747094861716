//! Child processes with a time limit, that leave nothing behind.
//!
//! Each child carries a mark in its environment (`OXCCL_XTASK_RUN`), which its own children inherit. On expiry every
//! process that carries the mark or descends from the child is killed; after a normal end, what still carries it is a
//! leak and is reported. A process group would not do: Ctrl-C would no longer reach the children, and a test that
//! makes its own groups would escape.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::IsTerminal;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

const MARK: &str = "OXCCL_XTASK_RUN";
/// How often a caller hears that a long child still runs, on a terminal.
const BEAT: Duration = Duration::from_secs(30);
/// And where the output is kept: often enough that no run is taken for a stuck one, and rarely enough that what failed is not lost among it.
const BEAT_IN_A_LOG: Duration = Duration::from_secs(5 * 60);
/// How long killing a family may take; only a process stuck in the kernel needs more.
const KILL: Duration = Duration::from_secs(5);

/// Where the child's output goes.
pub(crate) enum Output<'a> {
    /// To our own.
    Inherit,
    /// Both streams, in order, to this file.
    Log(&'a Path),
}

/// How the child ended.
pub(crate) enum Ended {
    Exited(ExitStatus),
    /// It ran past its limit and was killed, with so many processes in all.
    Expired {
        killed: usize,
    },
}

/// What became of the child.
pub(crate) struct Finished {
    pub(crate) ended: Ended,
    pub(crate) took: Duration,
    /// Processor time of it and of its descendants, but for those that no parent waited for.
    pub(crate) used: Duration,
    mark: String,
}

impl Finished {
    /// True if it ended by itself with status 0.
    pub(crate) fn is_success(&self) -> bool {
        matches!(&self.ended, Ended::Exited(status) if status.success())
    }

    /// Why it is not a success, in a few words.
    pub(crate) fn describe(&self) -> String {
        match &self.ended {
            Ended::Exited(status) => status.to_string(),
            Ended::Expired { killed } => {
                format!(
                    "time limit: still running after {}; {killed} processes killed",
                    seconds(self.took)
                )
            }
        }
    }

    /// Kills what the child left running, and names it. Processes that are about to end get `grace` to do so.
    pub(crate) fn sweep(&self, grace: Duration) -> Vec<String> {
        let deadline = Instant::now() + grace;
        loop {
            let left = family(None, &self.mark);
            if left.is_empty() {
                return Vec::new();
            }
            if Instant::now() >= deadline {
                let names = left
                    .iter()
                    .map(|pid| format!("{pid} ({})", name_of(*pid)))
                    .collect();
                kill_family(None, &self.mark);
                return names;
            }
            thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Runs `command` for at most `limit`, without standard input. `beat` is called now and then while it runs.
///
/// # Errors
/// Only if it cannot be started or waited for; how it ended is in the result.
pub(crate) fn run(
    command: &mut Command,
    limit: Duration,
    output: Output<'_>,
    mut beat: impl FnMut(Duration),
) -> Result<Finished> {
    let what = command.get_program().to_string_lossy().into_owned();
    let mark = new_mark();
    command.env(MARK, &mark).stdin(Stdio::null());
    if let Output::Log(path) = output {
        let log = File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
        let same = log.try_clone().context("cannot share the log file")?;
        command.stdout(log).stderr(same);
    }
    let started = Instant::now();
    let mut child = command
        .spawn()
        .with_context(|| format!("{what} could not be started"))?;
    let pid = i32::try_from(child.id()).context("a process id out of range")?;
    let (tell, ended) = mpsc::channel();
    thread::Builder::new()
        .name("ox-wait".to_owned())
        .spawn(move || {
            let used = used_when_it_ends(pid).unwrap_or_default();
            tell.send(child.wait().map(|status| (status, used)))
        })
        .context("no thread to wait for the child")?;
    let deadline = started + limit;
    let mut killed = None;
    let pause = match std::io::stdout().is_terminal() {
        true => BEAT,
        false => BEAT_IN_A_LOG,
    };
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        // After a kill the end is near; the beat bounds that wait too.
        let wait = if killed.is_some() { BEAT } else { left.min(pause) };
        match ended.recv_timeout(wait) {
            Ok(status) => {
                let (status, used) = status.with_context(|| format!("waiting for {what}"))?;
                let ended = killed.map_or(Ended::Exited(status), |killed| Ended::Expired { killed });
                return Ok(Finished {
                    ended,
                    took: started.elapsed(),
                    used,
                    mark,
                });
            }
            Err(RecvTimeoutError::Timeout) if killed.is_some() => {
                return Err(anyhow!("{what} (pid {pid}) does not end although it was killed"));
            }
            Err(RecvTimeoutError::Timeout) if Instant::now() >= deadline => {
                killed = Some(kill_family(Some(pid), &mark));
            }
            Err(RecvTimeoutError::Timeout) => beat(started.elapsed()),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(anyhow!("the thread waiting for {what} ended"));
            }
        }
    }
}

/// Runs `command` with our own outputs. True if it ends well; if not, it is said how `what` ended.
pub(crate) fn ends_well(what: &str, command: &mut Command, limit: Duration) -> Result<bool> {
    let finished = run(command, limit, Output::Inherit, |_| {})?;
    if !finished.is_success() {
        println!("{what}: {}", finished.describe());
    }
    Ok(finished.is_success())
}

/// Waits until the child has ended, and leaves it to be waited for; what it used by then.
fn used_when_it_ends(pid: i32) -> Option<Duration> {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    while let Err(rustix::io::Errno::INTR) = waitid(WaitId::Pid(Pid::from_raw(pid)?), options) {}
    parse_used(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// `1.2 s`, `75 s`, `12 min 5 s`.
pub(crate) fn seconds(time: Duration) -> String {
    let whole = time.as_secs();
    match whole {
        0..10 => format!("{:.1} s", time.as_secs_f64()),
        10..120 => format!("{whole} s"),
        _ => format!("{} min {} s", whole / 60, whole % 60),
    }
}

/// A mark that no other process has. Inside another xtask it extends the outer mark, so that the outer one finds us as well.
fn new_mark() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let own = format!("{}.{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    match std::env::var(MARK) {
        Ok(outer) => format!("{outer}/{own}"),
        Err(_) => own,
    }
}

/// True if the environment block `environ` (NUL-separated) carries `mark` or one that extends it.
fn carries(environ: &[u8], mark: &str) -> bool {
    environ.split(|b| *b == 0).any(|entry| {
        entry
            .strip_prefix(MARK.as_bytes())
            .and_then(|rest| rest.strip_prefix(b"="))
            .and_then(|value| value.strip_prefix(mark.as_bytes()))
            .is_some_and(|rest| rest.is_empty() || rest.first() == Some(&b'/'))
    })
}

/// Kills the family until none is left (a process may fork while we look). Returns how many were killed.
fn kill_family(root: Option<i32>, mark: &str) -> usize {
    let mut killed = BTreeSet::new();
    let deadline = Instant::now() + KILL;
    while Instant::now() < deadline {
        let found = family(root, mark);
        if found.is_empty() {
            break;
        }
        for pid in &found {
            killed.insert(*pid);
            if let Some(pid) = Pid::from_raw(*pid) {
                // It may have ended by itself in between.
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        thread::sleep(Duration::from_millis(10));
    }
    killed.len()
}

/// The processes that carry `mark`, and `root` with all that descend from it. Zombies are not among them.
///
/// Looks twice before it says that there are none: in the middle of `exec` a process has no environment.
fn family(root: Option<i32>, mark: &str) -> BTreeSet<i32> {
    let found = look(root, mark);
    if !found.is_empty() {
        return found;
    }
    thread::sleep(Duration::from_millis(20));
    look(root, mark)
}

fn look(root: Option<i32>, mark: &str) -> BTreeSet<i32> {
    let mut parents = BTreeMap::new();
    let mut found = BTreeSet::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<i32>().ok()) else {
            continue;
        };
        let Some((state, parent)) = fs::read_to_string(entry.path().join("stat"))
            .ok()
            .and_then(|s| parse_stat(&s))
        else {
            continue;
        };
        if state == 'Z' || state == 'X' {
            continue;
        }
        parents.insert(pid, parent);
        if root == Some(pid) || fs::read(entry.path().join("environ")).is_ok_and(|e| carries(&e, mark)) {
            found.insert(pid);
        }
    }
    loop {
        let children: Vec<i32> = parents
            .iter()
            .filter(|(pid, parent)| !found.contains(pid) && found.contains(parent))
            .map(|(pid, _)| *pid)
            .collect();
        if children.is_empty() {
            return found;
        }
        found.extend(children);
    }
}

/// State and parent from `/proc/PID/stat`; the name in brackets before them may hold anything.
fn parse_stat(stat: &str) -> Option<(char, i32)> {
    let mut fields = stat.get(stat.rfind(')')? + 1..)?.split_whitespace();
    let state = fields.next()?.chars().next()?;
    Some((state, fields.next()?.parse().ok()?))
}

/// The processor time in `/proc/PID/stat`, that of the children waited for included.
fn parse_used(stat: &str) -> Option<Duration> {
    /// Hundredths of a second, on every Linux that Rust runs on.
    const TICK: Duration = Duration::from_millis(10);
    let fields = stat.get(stat.rfind(')')? + 1..)?.split_whitespace();
    let ticks: Vec<u32> = fields.skip(11).take(4).map_while(|f| f.parse().ok()).collect();
    (ticks.len() == 4).then(|| TICK * ticks.iter().sum())
}

fn name_of(pid: i32) -> String {
    fs::read_to_string(format!("/proc/{pid}/comm"))
        .map_or_else(|_| "?".to_owned(), |n| n.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command
            .args(["-c", script])
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command
    }

    #[test]
    fn an_expired_child_is_killed_with_its_children() {
        let mut command = shell("sleep 600 & sleep 601");
        let done = run(&mut command, Duration::from_millis(300), Output::Inherit, |_| {}).unwrap();
        assert!(
            matches!(done.ended, Ended::Expired { killed } if killed >= 3),
            "{}",
            done.describe()
        );
        assert!(!done.is_success());
        assert!(family(None, &done.mark).is_empty());
    }

    #[test]
    fn a_process_left_behind_is_named_and_killed() {
        // Orphaned at once: only the mark still tells that it is ours.
        let script = "sleep 602 & until [ \"$(cat /proc/$!/comm)\" = sleep ]; do :; done; exit 0";
        let mut command = shell(script);
        let done = run(&mut command, Duration::from_secs(60), Output::Inherit, |_| {}).unwrap();
        assert!(done.is_success());
        let left = done.sweep(Duration::from_millis(200));
        assert!(
            matches!(left.as_slice(), [one] if one.ends_with("(sleep)")),
            "{left:?}"
        );
        assert!(family(None, &done.mark).is_empty());
    }

    #[test]
    fn a_clean_end_has_its_status_and_leaves_nothing() {
        let done = run(
            &mut shell("exit 3"),
            Duration::from_secs(60),
            Output::Inherit,
            |_| {},
        )
        .unwrap();
        assert_eq!(done.describe(), "exit status: 3");
        assert!(done.sweep(Duration::from_secs(60)).is_empty());
    }

    #[test]
    fn both_streams_land_in_the_log() {
        let path = std::env::temp_dir().join(format!("xtask-log-{}", std::process::id()));
        let mut command = Command::new("sh");
        command.args(["-c", "echo one; echo two >&2"]);
        run(&mut command, Duration::from_secs(60), Output::Log(&path), |_| {}).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert_eq!(text, "one\ntwo\n");
    }

    #[test]
    fn marks_match_whole_parts_only() {
        assert!(carries(b"A=1\0OXCCL_XTASK_RUN=7.1\0", "7.1"));
        assert!(carries(b"OXCCL_XTASK_RUN=7.1/9.0", "7.1"));
        assert!(!carries(b"OXCCL_XTASK_RUN=7.10", "7.1"));
        assert!(!carries(b"X=OXCCL_XTASK_RUN=7.1", "7.1"));
        assert!(!carries(b"", "7.1"));
    }

    #[test]
    fn stat_is_read_behind_the_last_bracket() {
        assert_eq!(parse_stat("12 (a) b) S 4 12 12 0"), Some(('S', 4)));
        assert_eq!(parse_stat("12 (sleep) Z 1 0"), Some(('Z', 1)));
        assert_eq!(parse_stat("nonsense"), None);
    }

    #[test]
    fn what_a_child_and_its_children_used_is_known() {
        let stat = "12 (a) b) S 4 12 12 0 -1 4194304 100 0 0 0 150 50 30 20 20 0 1 0 5";
        assert_eq!(parse_used(stat), Some(Duration::from_millis(2500)));
        assert_eq!(parse_used("12 (sleep) Z 1 0"), None);
        // A quarter of a second of computing, in a child of the child.
        let mut command = shell("i=0; (while [ $i -lt 300000 ]; do i=$((i+1)); done); true");
        let done = run(&mut command, Duration::from_secs(60), Output::Inherit, |_| {}).unwrap();
        assert!(
            done.used > Duration::from_millis(20),
            "{:?} of {:?}",
            done.used,
            done.took
        );
    }

    #[test]
    fn times_are_short() {
        assert_eq!(seconds(Duration::from_millis(1234)), "1.2 s");
        assert_eq!(seconds(Duration::from_secs(75)), "75 s");
        assert_eq!(seconds(Duration::from_secs(725)), "12 min 5 s");
    }
}
