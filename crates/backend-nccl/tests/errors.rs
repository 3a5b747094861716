//! Every way to fail, on the stand-in: each scenario is this program started again with faults injected by environment variables (see
//! `fixtures/nccl-standin`), with ranks as threads. The parent checks how the process ended; the child checks everything else.

#![allow(clippy::expect_used, reason = "a test binary that cannot start ends")]

#[path = "scenarios/mod.rs"]
mod scenarios;
#[path = "standin/mod.rs"]
mod standin;

use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use backend_nccl::CudaAccelerator;
use ftcore::{Accelerator, deadline_in};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use scenarios::{Scenario, scenarios};

const SCENARIO: &str = "OXCCL_STANDIN_SCENARIO";
const TIME_LIMIT: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    isolate::run_child_if_asked();
    if let Ok(name) = std::env::var(SCENARIO) {
        let found = scenarios().into_iter().find(|s| s.name == name);
        return match found.map(|s| (s.body)()) {
            Some(Ok(())) => ExitCode::SUCCESS,
            Some(Err(failed)) => {
                eprintln!("{}", failed.message().unwrap_or("failed"));
                ExitCode::FAILURE
            }
            None => ExitCode::from(3),
        };
    }
    let arguments = Arguments::from_args();
    if standin::is_real() {
        return on_a_gpu(&arguments);
    }
    let library = standin::library();
    let folder = std::env::temp_dir().join(format!("oxccl-nccl-errors-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a temporary folder");
    let trials = scenarios()
        .into_iter()
        .map(|s| {
            let (library, folder) = (library.clone(), folder.clone());
            Trial::ignorable_test(s.name, move || {
                // Only these need a C compiler.
                if s.is_refused()
                    && let Err(why) = standin::refusing()
                {
                    return Ok(Completion::ignored_with(why));
                }
                run(&s, &library, &folder)?;
                Ok(Completion::Completed)
            })
        })
        .collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    let _ = std::fs::remove_dir_all(&folder);
    conclusion.exit_code()
}

/// What needs no injected fault, on a GPU with the real NCCL; its ranks share what devices there are.
fn on_a_gpu(arguments: &Arguments) -> ExitCode {
    let devices = CudaAccelerator.count();
    let trials = scenarios()
        .into_iter()
        .map(|s| {
            Trial::ignorable_test(s.name, move || {
                if let Some(why) = s.takes_a_stand_in() {
                    return Ok(Completion::ignored_with(why));
                }
                if s.devices > devices {
                    return Ok(Completion::ignored_with(format!(
                        "it takes {} devices",
                        s.devices
                    )));
                }
                let this = std::env::current_exe()?;
                ended_well(Command::new(this).env(SCENARIO, s.name))?;
                Ok(Completion::Completed)
            })
        })
        .collect();
    libtest_mimic::run(arguments, trials).exit_code()
}

fn run(s: &Scenario, library: &Path, folder: &Path) -> Result<(), Failed> {
    let path = |name: &str| folder.join(format!("{}-{name}", s.name));
    let values: Vec<(&str, String)> = s
        .environment
        .iter()
        .map(|(name, value)| {
            let value = match *value {
                "@log" => path("log").display().to_string(),
                "@refuse" => standin::refusing().map_or_else(|why| why, |p| p.display().to_string()),
                "@old" => {
                    let old = standin::without(library, path("old.so"), &standin::NEWER);
                    old.display().to_string()
                }
                "@broken" => standin::without(library, path("broken.so"), &["ncclReduceScatter"])
                    .display()
                    .to_string(),
                "@driver" => standin::without(library, path("driver.so"), &["cuMemAllocAsync"])
                    .display()
                    .to_string(),
                value => value.to_string(),
            };
            (*name, value)
        })
        .collect();
    let environment: Vec<(&str, &str)> = values.iter().map(|(n, v)| (*n, v.as_str())).collect();
    let mut command = standin::command(library, &environment);
    // Of all of them, for what the stand-in has to say of its use.
    command.env("OXCCL_STANDIN_NCCL_LOG", path("log"));
    ended_well(command.env(SCENARIO, s.name))?;
    let log = std::fs::read(path("log")).unwrap_or_default();
    let log = String::from_utf8_lossy(&log);
    if let Some(line) = log.lines().find(|l| l.starts_with("misuse: ")) {
        return Err(line.into());
    }
    match s.left {
        Some(line) if !log.lines().any(|l| l == line) => {
            Err(format!("the process ended without '{line}'").into())
        }
        _ => Ok(()),
    }
}

/// Runs a scenario's process to its end.
fn ended_well(command: &mut Command) -> Result<(), Failed> {
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    let until = deadline_in(TIME_LIMIT);
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if Instant::now() > until {
            child.kill()?;
            return Err("the process did not end".into());
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let mut text = String::new();
    if let Some(mut stderr) = child.stderr.take() {
        std::io::Read::read_to_string(&mut stderr, &mut text)?;
    }
    if !status.success() {
        return Err(format!("{status}: {text}").into());
    }
    Ok(())
}
