//! The launchers that people use, each the real one: their ranks find each other and reduce, and what happens to one rank is told to the others.
//!
//! `cargo xtask test` installs them and says where they are (`OXCCL_TEST_…`); what is not said is skipped there, with its reason.

use std::io::Write as _;
use std::process::{Command, ExitCode, Output, Stdio};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};

mod mpi;
mod rank;
mod slurm;
mod torchrun;

/// Says in a rank's environment what it does; see [`rank`].
const SCENE: &str = "OXCCL_TEST_LAUNCHED";
/// A launcher that takes longer than this hangs.
const LIMIT: Duration = Duration::from_secs(60);

type Outcome = Result<(), Failed>;

fn main() -> ExitCode {
    if let Ok(scene) = std::env::var(SCENE) {
        return rank::play(&scene);
    }
    let trials = [mpi::trials(), slurm::trials(), torchrun::trials()];
    let trials: Vec<Trial> = trials.into_iter().flatten().collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// The file that is started as a rank: this one.
fn program() -> String {
    let path = std::env::current_exe().unwrap_or_default();
    path.display().to_string()
}

/// Runs `command` to its end.
fn finish(command: &mut Command) -> Result<Output, Failed> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let begun = Instant::now();
    while child.try_wait()?.is_none() {
        if begun.elapsed() > LIMIT {
            child.kill()?;
            let output = child.wait_with_output()?;
            return Err(format!("{command:?} hangs; so far: {}", said(&output)).into());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(child.wait_with_output()?)
}

/// All that a launcher and its ranks have said.
fn said(output: &Output) -> String {
    let (out, err) = (&output.stdout, &output.stderr);
    format!("{}{}", String::from_utf8_lossy(out), String::from_utf8_lossy(err))
}

/// Fails unless every rank of `world` has said that it is there and has the sum.
fn all_reduced(output: &Output, world: u32) -> Outcome {
    let text = said(output);
    let sum = world * (world + 1) / 2;
    for rank in 0..world {
        let line = format!("rank {rank} of {world} has {sum}");
        if text.lines().filter(|l| l.contains(&line)).count() != 1 {
            return Err(format!("'{line}' was not said once:\n{text}").into());
        }
    }
    if !output.status.success() {
        return Err(format!("{}: {text}", output.status).into());
    }
    Ok(())
}

/// A line as one write: ranks share a pipe.
fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(format!("{line}\n").as_bytes());
    let _ = out.flush();
}
