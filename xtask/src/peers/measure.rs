//! Runs one program and reads its figures.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use clap::ValueEnum as _;
use serde_json::Value;

use super::operations::{Calls, Operation, Point, same_sizes};
use super::programs::Program;
use crate::process::{self, Output};
use crate::wheels;

/// A run takes seconds, PyTorch's half a minute; more than this is a hang.
const LIMIT: Duration = Duration::from_secs(5 * 60);
/// A peer makes fewer calls of one point where all would take longer. PyTorch takes so long for many points that its calls would be
/// half of the whole measurement.
const BUDGET: Duration = Duration::from_millis(500);
const BUDGET_TORCH: Duration = Duration::from_millis(250);

/// Microseconds of the slowest rank: over the calls of one run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Times {
    pub(super) median: f64,
    pub(super) min: f64,
}

/// What one program says in one run.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Said {
    pub(super) times: Vec<(Point, Times)>,
    /// Operations that it does not have, and why.
    pub(super) lacks: Vec<(Operation, String)>,
}

/// Runs `program` on `ranks` ranks for each point of `batches`, once or, where the program takes one list of sizes for all
/// operations, as often as it must.
pub(super) fn run(
    program: &Program,
    ranks: u32,
    batches: &[(Calls, Vec<Point>)],
    scratch: &Path,
) -> Result<Said> {
    let mut said = Said::default();
    match program {
        Program::Oxccl {
            path,
            transport,
            alloc,
        } => {
            for (calls, points) in batches {
                for (operations, sizes) in same_sizes(points) {
                    let mut command = ours(path, &operations, &sizes, ranks, *calls);
                    command
                        .args(alloc.then_some("--alloc"))
                        .env("OXCCL_GLOO_TRANSPORT", transport);
                    let of = |operation: &str| {
                        let submitted = operations.contains(&Operation::AllReduceAsync);
                        let name = if submitted { "all_reduce_async" } else { operation };
                        Operation::from_str(name, false).map_err(|e| anyhow!(e))
                    };
                    said.times
                        .extend(parse_json(&output(&mut command, scratch)?, of)?);
                }
            }
        }
        Program::Mpi { launch, binary } => {
            let (launcher, options) = launch.split_first().ok_or_else(|| anyhow!("no launcher"))?;
            let mut command = Command::new(launcher);
            command
                .args(options)
                .arg(ranks.to_string())
                .arg(binary)
                .args(theirs(BUDGET, batches))
                .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
                .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
            said = parse_lines(&output(&mut command, scratch)?)?;
        }
        Program::Torch { python, script } => {
            let mut command = Command::new(python);
            command
                .arg(script)
                .args(["--ranks", &ranks.to_string()])
                .args(theirs(BUDGET_TORCH, batches))
                .env("GLOO_SOCKET_IFNAME", "lo");
            said = parse_lines(&output(&mut command, scratch)?)?;
        }
    }
    let lacks = |operation| said.lacks.iter().any(|(lacking, _)| *lacking == operation);
    let mut asked: Vec<Point> = batches.iter().flat_map(|(_, points)| points.clone()).collect();
    asked.retain(|point| !lacks(point.operation));
    let mut measured: Vec<Point> = said.times.iter().map(|(point, _)| *point).collect();
    asked.sort_unstable();
    measured.sort_unstable();
    if measured != asked {
        bail!("it measured something else than it was asked for");
    }
    Ok(said)
}

/// `oxccl bench` of operations that have the same sizes.
fn ours(path: &Path, operations: &[Operation], sizes: &[u64], ranks: u32, calls: Calls) -> Command {
    let name = |operation: &Operation| match operation {
        Operation::AllReduceAsync => Operation::AllReduce.to_string(),
        other => other.to_string(),
    };
    let names: Vec<String> = operations.iter().map(name).collect();
    let sizes: Vec<String> = sizes.iter().map(|size| size.max(&4).to_string()).collect();
    let mut command = Command::new(path);
    command
        .args(["bench", "--backend", "gloo", "--dtype", "f32", "--bind", "--json"])
        .args(["--op", &names.join(","), "--sizes", &sizes.join(",")])
        .args(["--ranks", &ranks.to_string()])
        .args(["--warmup", &calls.warmup.to_string()])
        .args(["--iters", &calls.iters.to_string()])
        .args(
            operations
                .contains(&Operation::AllReduceAsync)
                .then_some("--submit"),
        );
    command
}

/// The arguments of our C and Python programs.
fn theirs(budget: Duration, batches: &[(Calls, Vec<Point>)]) -> Vec<String> {
    let mut words = vec!["--budget-ms".to_owned(), budget.as_millis().to_string()];
    for (calls, points) in batches {
        words.extend(["--warmup".to_owned(), calls.warmup.to_string()]);
        words.extend(["--iters".to_owned(), calls.iters.to_string()]);
        let mut last = None;
        for point in points {
            if last != Some(point.operation) {
                words.extend(["--op".to_owned(), point.operation.to_string()]);
                last = Some(point.operation);
            }
            words.push(point.bytes.to_string());
        }
    }
    words
}

/// The standard output of `command`, which must end well.
pub(super) fn output(command: &mut Command, scratch: &Path) -> Result<String> {
    let (out, errors) = (scratch.join("out.txt"), scratch.join("errors.txt"));
    let create = |path: &Path| File::create(path).with_context(|| format!("cannot write {}", path.display()));
    command.stdout(create(&out)?).stderr(create(&errors)?);
    let finished = process::run(command, LIMIT, Output::Inherit, |_| {})?;
    let left = finished.sweep(Duration::from_secs(2));
    let text = fs::read_to_string(&out).context("the program's output")?;
    if !finished.is_success() {
        let said = fs::read_to_string(&errors).unwrap_or_default();
        // What clap refuses stands first, and below it how to get help.
        let refused = said.lines().find(|line| line.starts_with("error: "));
        let why = refused.map(str::to_owned).or_else(|| wheels::reason(&said));
        bail!("{}: {}", finished.describe(), why.unwrap_or_default());
    }
    if !left.is_empty() {
        bail!("it left processes behind: {}", left.join(", "));
    }
    Ok(text)
}

/// The lines of our C and Python programs: operation, bytes, median, min, max; or an operation that is skipped, and why.
fn parse_lines(text: &str) -> Result<Said> {
    let mut said = Said::default();
    for line in text.lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let operation = |name| Operation::from_str(name, false).map_err(|e| anyhow!("'{line}': {e}"));
        match fields.as_slice() {
            [name, "skipped", ..] => {
                let why = line.split_once("skipped").map_or("", |(_, why)| why.trim());
                said.lacks.push((operation(name)?, why.to_owned()));
            }
            [name, bytes, median, min, _] => {
                let operation = operation(name)?;
                let bytes = bytes.parse()?;
                let times = Times {
                    median: median.parse()?,
                    min: min.parse()?,
                };
                said.times.push((Point { operation, bytes }, times));
            }
            _ => bail!("'{line}' is not a line of figures"),
        }
    }
    Ok(said)
}

/// The report of `oxccl bench --json`; `of` says which operation a name stands for.
fn parse_json(text: &str, of: impl Fn(&str) -> Result<Operation>) -> Result<Vec<(Point, Times)>> {
    let report: Value = serde_json::from_str(text).context("the report of oxccl bench")?;
    let lines = report.get("results").and_then(Value::as_array);
    lines
        .ok_or_else(|| anyhow!("the report of oxccl bench has no results"))?
        .iter()
        .map(|line| {
            let number = |key: &str| {
                let value = line.get(key).and_then(Value::as_f64);
                value.ok_or_else(|| anyhow!("a result of oxccl bench has no {key}"))
            };
            let operation = line.get("op").and_then(Value::as_str);
            let operation = of(operation.ok_or_else(|| anyhow!("a result of oxccl bench has no op"))?)?;
            let bytes = line.get("bytes").and_then(Value::as_u64);
            let bytes = bytes.ok_or_else(|| anyhow!("a result of oxccl bench has no bytes"))?;
            let times = Times {
                median: number("time_us")?,
                min: number("min_us")?,
            };
            Ok((Point { operation, bytes }, times))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::operations::{batches, points};
    use super::*;

    #[test]
    fn both_formats_are_read_and_nonsense_is_refused() {
        let point = Point {
            operation: Operation::AllReduce,
            bytes: 4,
        };
        let times = Times {
            median: 1.5,
            min: 1.25,
        };
        let said = parse_lines("all_reduce 4 1.5 1.25 9.0\nbroadcast skipped no such thing\n").unwrap();
        assert_eq!(said.times, [(point, times)]);
        assert_eq!(said.lacks, [(Operation::Broadcast, "no such thing".to_owned())]);
        let of = |name: &str| Operation::from_str(name, false).map_err(|e| anyhow!(e));
        let json = r#"{"results":[{"op":"all_reduce","bytes":4,"time_us":1.5,"min_us":1.25}]}"#;
        assert_eq!(parse_json(json, of).unwrap(), [(point, times)]);
        for wrong in [
            "wrong result",
            "4 1.5 1.5 1.5 1.5",
            "all_reduce 4 x 1 1",
            "all_reduce 4 1.5",
        ] {
            assert!(parse_lines(wrong).is_err(), "{wrong}");
        }
        for wrong in [
            "",
            "{}",
            r#"{"results":[{"op":"all_reduce","bytes":4}]}"#,
            r#"{"results":[{"op":"scan","bytes":4,"time_us":1.5,"min_us":1.25}]}"#,
        ] {
            assert!(parse_json(wrong, of).is_err(), "{wrong}");
        }
    }

    #[test]
    fn peers_are_told_the_calls_before_the_operations_and_the_operations_before_their_sizes() {
        let points = points(
            &[Operation::AllReduce, Operation::Barrier],
            Some(&[4, 1 << 20]),
            2,
        );
        let words = theirs(BUDGET, &batches(&points)).join(" ");
        assert_eq!(
            words,
            "--budget-ms 500 --warmup 1000 --iters 400 --op all_reduce 4 --op barrier 0 \
             --warmup 10 --iters 40 --op all_reduce 1048576"
        );
    }
}
