//! What continuous integration runs, in order, each step with a time limit; at the end a table of the times.
//!
//! A failed step does not stop the next ones: one run shows all that is wrong.

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::metadata::{Metadata, cargo_command};
use crate::process::{self, Output, seconds};
use crate::{TestArgs, book, deny, deploy, locks, runner, tidy};

/// The whole run should take less than this on two cores, from nothing.
const GOAL: Duration = Duration::from_secs(25 * 60);

/// One step.
struct Step {
    name: &'static str,
    /// For cargo steps; the others bound their own parts.
    limit: Duration,
    run: Kind,
}

enum Kind {
    /// A cargo call, with extra environment variables.
    Cargo(&'static [&'static str], &'static [(&'static str, &'static str)]),
    /// A task of xtask itself; true if it passed.
    Task(fn() -> Result<bool>),
}

const fn cargo(name: &'static str, minutes: u64, arguments: &'static [&'static str]) -> Step {
    Step {
        name,
        limit: Duration::from_secs(60 * minutes),
        run: Kind::Cargo(arguments, &[]),
    }
}

const fn task(name: &'static str, run: fn() -> Result<bool>) -> Step {
    Step {
        name,
        limit: Duration::MAX,
        run: Kind::Task(run),
    }
}

/// The steps, cheap ones first.
const STEPS: &[Step] = &[
    cargo("fmt", 2, &["fmt", "--all", "--check"]),
    task("tidy", tidy::check),
    task("locks", locks::check),
    task("deny", deny::check),
    task("book", book::build),
    task("deploy", deploy::check),
    task("package", package),
    cargo(
        "clippy",
        20,
        &[
            "clippy",
            "--workspace",
            "--all-targets",
            "--quiet",
            "--",
            "-D",
            "warnings",
        ],
    ),
    Step {
        name: "doc",
        limit: Duration::from_secs(10 * 60),
        run: Kind::Cargo(
            &["doc", "--workspace", "--no-deps", "--quiet"],
            &[("RUSTDOCFLAGS", "-D warnings")],
        ),
    },
    // README command one, with its own exit code: equal parameters, no stall above the limit. What it builds the tests stand on.
    cargo("job", 20, &["run", "--bin", "train_diloco"]),
    // README command two; last, so that its matrix line is the last of the run but for the times.
    task("test", test),
];

/// What a registry would get: every file and README that a manifest names is there, and nothing stands on a crate that is not published. For that it asks
/// no registry, which may well have a stranger's crate of such a name; the steps before have fetched what is to be known of the others. It is built by
/// the steps after it.
fn package() -> Result<bool> {
    let metadata = Metadata::read()?;
    let mut cargo = cargo_command(&metadata.workspace_root);
    cargo.args(["package", "--no-verify", "--allow-dirty", "--quiet", "--offline"]);
    for package in metadata.packages.iter().filter(|p| p.is_published()) {
        cargo.args(["--package", &package.name]);
    }
    process::ends_well("cargo package", &mut cargo, Duration::from_secs(5 * 60))
}

fn test() -> Result<bool> {
    runner::test(&TestArgs {
        require: [
            "etcd",
            "gloo",
            "isolate",
            "launchers",
            "observability",
            "plugin",
            "xccl",
            "protocol",
            "python",
        ]
        .map(str::to_owned)
        .to_vec(),
        require_installable: vec!["xccl-sycl".to_owned()],
        ..TestArgs::default()
    })
}

/// Runs all steps. True if all passed.
pub(crate) fn run() -> Result<bool> {
    let root = Metadata::read()?.workspace_root;
    let mut rows = Vec::new();
    let begin = Instant::now();
    for step in STEPS {
        println!("==== {} ====", step.name);
        let started = Instant::now();
        let failure = match &step.run {
            Kind::Cargo(arguments, variables) => {
                let mut command = cargo_command(&root);
                command.args(*arguments).envs(variables.iter().copied());
                match process::run(&mut command, step.limit, Output::Inherit, |t| beat(step, t)) {
                    Ok(finished) if finished.is_success() => None,
                    Ok(finished) => Some(finished.describe()),
                    Err(e) => Some(format!("{e:#}")),
                }
            }
            Kind::Task(task) => match task() {
                Ok(true) => None,
                Ok(false) => Some("see above".to_owned()),
                Err(e) => Some(format!("{e:#}")),
            },
        };
        if let Some(why) = &failure {
            println!("{} failed: {why}", step.name);
        }
        rows.push((step.name, failure, started.elapsed()));
    }
    print!("{}", table(&rows, begin.elapsed()));
    Ok(rows.iter().all(|(_, failure, _)| failure.is_none()))
}

fn beat(step: &Step, time: Duration) {
    println!("  …   {} runs since {}", step.name, seconds(time));
}

fn table(rows: &[(&str, Option<String>, Duration)], total: Duration) -> String {
    let mut text = "==== steps ====\n".to_owned();
    for (name, failure, time) in rows {
        let (word, why) = match failure {
            None => ("pass", ""),
            Some(why) => ("FAIL", why.as_str()),
        };
        text += format!("{word}  {name:<8} {:>12}  {why}", seconds(*time)).trim_end();
        text += "\n";
    }
    text += &format!("      {:<8} {:>12}", "total", seconds(total));
    if total > GOAL {
        text += &format!("  over the goal of {}", seconds(GOAL));
    }
    text + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_shows_each_step_and_the_total() {
        let second = Duration::from_secs(1);
        let rows = [
            ("fmt", None, second),
            ("test", Some("see above".to_owned()), second * 100),
        ];
        let text = table(&rows, second * 101);
        assert!(text.contains("pass  fmt             1.0 s\n"), "{text}");
        assert!(
            text.contains("FAIL  test            100 s  see above\n"),
            "{text}"
        );
        assert!(text.ends_with("101 s\n"), "{text}");
        assert!(table(&rows, GOAL + second).contains("over the goal"));
    }
}
