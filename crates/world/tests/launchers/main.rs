//! The launchers that people use, each the real one: their ranks find each other and reduce, and what happens to one rank is told to the others.
//!
//! `cargo xtask test` installs them and says where they are (`OXCCL_TEST_…`); what is not said is skipped there, with its reason.

use std::fs::{self, File};
use std::io::{Read as _, Seek as _, Write as _};
use std::net::TcpListener;
use std::process::{Command, ExitCode, Output, Stdio};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};

mod mpi;
mod rank;
mod slurm;
mod torchrun;

/// Says in a rank's environment what it does; see [`rank`].
const SCENE: &str = "OXCCL_TEST_LAUNCHED";
/// A launcher that takes longer than this hangs, on the slowest of machines.
const LIMIT: Duration = Duration::from_secs(120);

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

/// The options of the first command in docs/launchers.md that is `launcher` with this word, up to the program that it starts.
fn documented(launcher: &str, word: &str) -> Result<Vec<String>, Failed> {
    let page = fs::read_to_string(documents::root().join("docs/launchers.md"))?;
    let mut commands = documents::documented(&page).into_iter().filter(|c| c.is_whole);
    let is_it = |words: &[String]| words[0] == launcher && words.iter().any(|w| w == word);
    let command = commands.find(|c| is_it(&c.words));
    let words = command
        .ok_or_else(|| format!("docs/launchers.md has no {launcher} with {word}"))?
        .words;
    let options = words.into_iter().skip(1).take_while(|w| w != "./program");
    Ok(options.collect())
}

/// Runs `command` to its end. What it says goes to files: ranks that outlive a killed launcher would keep a pipe open.
fn finish(command: &mut Command) -> Result<Output, Failed> {
    let (out, err) = (tempfile::tempfile()?, tempfile::tempfile()?);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(out.try_clone()?)
        .stderr(err.try_clone()?)
        .spawn()?;
    let read = |mut file: File| {
        let mut text = Vec::new();
        file.rewind()?;
        file.read_to_end(&mut text).map(|_| text)
    };
    let begun = Instant::now();
    let (status, hangs) = loop {
        if let Some(status) = child.try_wait()? {
            break (status, false);
        }
        if begun.elapsed() > LIMIT {
            child.kill()?;
            break (child.wait()?, true);
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let output = Output {
        status,
        stdout: read(out)?,
        stderr: read(err)?,
    };
    if hangs {
        return Err(format!("{command:?} hangs; so far: {}", said(&output)).into());
    }
    Ok(output)
}

/// `count` ports in a row that are free, outside the range out of which the system takes ports for connections.
fn free_ports(count: u16) -> Result<u16, Failed> {
    let start = (std::process::id() % 1000) as u16;
    let first = (0..1000)
        .map(|n| 12_000 + (start + n) % 1000 * 20)
        .find(|&first| {
            let bound: Result<Vec<_>, _> = (first..first + count)
                .map(|port| TcpListener::bind(("0.0.0.0", port)))
                .collect();
            bound.is_ok()
        });
    first.ok_or_else(|| "there is no range of free ports".into())
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
