//! A disk that is full, or files that may not grow: the checkpoint fails with a text that says what is missing, the older one
//! stays as it was, nothing half is left, and the next one that fits is written again.
//!
//! Each trial runs this program again as a child: under a limit on the size of files, and in a mount namespace with a small
//! tmpfs, which where it cannot be made is a reason to be ignored.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::path::Path;
use std::process::{Command, ExitCode, Output};
use std::sync::mpsc::channel;
use std::time::Duration;

use ftcore::{ErrorKind, Step, deadline_in};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use oxccl_checkpoint::{Outcome, Series, StateDict, Writer, newest, steps};

/// The first argument of the child; then come the folder and a word that its error must have.
const CHILD: &str = "write-until-full";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, what, folder, word] = arguments.as_slice()
        && what == CHILD
    {
        child(Path::new(folder), word);
        return ExitCode::SUCCESS;
    }
    let trials = vec![
        Trial::test(
            "a_limit_on_the_size_of_files_fails_one_checkpoint_and_no_more",
            || {
                // Blocks of 512 bytes; without the trap the kernel would end the process instead of the call.
                run(
                    "trap '' XFSZ; ulimit -f 1024; exec \"$0\" \"$@\"",
                    "files limited to 524288",
                )
            },
        ),
        Trial::ignorable_test("a_full_disk_fails_one_checkpoint_and_no_more", || {
            let mount = "mount -t tmpfs -o size=1m none";
            let probe = sh(&format!("{mount} /mnt"), &[]);
            if !probe.status.success() {
                let why = String::from_utf8_lossy(&probe.stderr).trim().to_owned();
                return Ok(Completion::ignored_with(format!(
                    "no tmpfs can be mounted here: {why}"
                )));
            }
            run(&format!("{mount} \"$2\" && exec \"$0\" \"$@\""), "No space left")?;
            Ok(Completion::Completed)
        }),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// Runs `script` in a mount namespace of its own (of a user namespace of its own, so that it needs no root).
fn sh(script: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "sh", "-c", script]);
    match command.args(arguments).output() {
        Ok(output) => output,
        Err(e) => {
            // No such program: the shell says so in its stead.
            let text = format!("echo 'unshare: {e}' >&2; exit 1");
            Command::new("sh").args(["-c", &text]).output().unwrap()
        }
    }
}

fn run(script: &str, word: &str) -> Result<(), Failed> {
    let dir = tempfile::tempdir().unwrap();
    let program = std::env::current_exe().unwrap();
    let program = program.to_str().unwrap();
    let folder = dir.path().to_str().unwrap();
    let needs_mount = script.contains("mount");
    let output = if needs_mount {
        sh(script, &[program, CHILD, folder, word])
    } else {
        let arguments = ["-c", script, program, CHILD, folder, word];
        Command::new("sh").args(arguments).output().unwrap()
    };
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr)).into())
}

/// A state of about this many bytes.
fn state(bytes: usize) -> StateDict {
    let mut s = StateDict::new();
    s.insert_f32("w", &[bytes / 4], &vec![0.25; bytes / 4]).unwrap();
    s
}

fn child(folder: &Path, word: &str) {
    let soon = || deadline_in(Duration::from_secs(20));
    let series = Series::open(folder, 0, 2, soon()).unwrap();
    let (says, hears) = channel::<Outcome>();
    let writer = Writer::start(series, move |outcome| says.send(outcome.clone()).unwrap()).unwrap();
    let write = |step: Step, bytes: usize| {
        assert!(writer.offer(step, "", state(bytes)));
        writer.flush(soon()).unwrap();
        hears.recv_timeout(Duration::from_secs(20)).unwrap()
    };
    write(Step(1), 100_000).unwrap();
    let e = write(Step(2), 2_000_000).unwrap_err();
    let text = e.to_string();
    assert_eq!(e.kind(), ErrorKind::Io, "{text}");
    for needed in [word, "replica-0/step-000000000002", " bytes needed", " free"] {
        assert!(text.contains(needed), "'{needed}' is missing in: {text}");
    }
    // Nothing half is left, and the older one is whole.
    let mut names: Vec<String> = std::fs::read_dir(folder.join("replica-0"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, [".lock", "step-000000000001.safetensors"]);
    let found = newest(folder, 0, [0]).unwrap().found.unwrap();
    assert_eq!((found.step.0, found.state), (1, state(100_000)));
    // Room again, or a smaller state: it goes on.
    write(Step(3), 150_000).unwrap();
    assert_eq!(steps(folder, 0).unwrap(), [1, 3].map(Step));
}
