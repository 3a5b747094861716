//! Runs one program once and reads its figures.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use serde_json::Value;

use super::programs::Program;
use crate::deny;
use crate::process::{self, Output};

/// A batch of calls takes seconds; more than this is a hang.
const LIMIT: Duration = Duration::from_secs(3 * 60);

/// Microseconds of the slowest rank: over the calls of one run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Times {
    pub(super) median: f64,
    pub(super) min: f64,
}

/// Runs `program` on `ranks` ranks with (warm-up, measured) `calls` for each of `sizes`.
pub(super) fn run(
    program: &Program,
    ranks: u32,
    (warmup, iters): (u32, u32),
    sizes: &[u64],
    scratch: &Path,
) -> Result<Vec<(u64, Times)>> {
    let numbers = |items: &[u64]| items.iter().map(u64::to_string).collect::<Vec<_>>();
    let mut command;
    match program {
        Program::Oxccl {
            path,
            transport,
            alloc,
        } => {
            command = Command::new(path);
            command
                .args([
                    "bench",
                    "--backend",
                    "gloo",
                    "--op",
                    "all_reduce",
                    "--dtype",
                    "f32",
                    "--bind",
                    "--json",
                ])
                .args(["--sizes", &numbers(sizes).join(",")])
                .args(["--ranks", &ranks.to_string(), "--warmup", &warmup.to_string()])
                .args(["--iters", &iters.to_string()])
                .args(alloc.then_some("--alloc"))
                .env("OXCCL_GLOO_TRANSPORT", transport);
        }
        Program::Mpi { launch, binary } => {
            let (launcher, options) = launch.split_first().ok_or_else(|| anyhow!("no launcher"))?;
            command = Command::new(launcher);
            command
                .args(options)
                .arg(ranks.to_string())
                .arg(binary)
                .args([warmup.to_string(), iters.to_string()])
                .args(numbers(sizes))
                .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
                .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        }
        Program::Torch { python, script } => {
            command = Command::new(python);
            command
                .arg(script)
                .args([ranks.to_string(), warmup.to_string(), iters.to_string()])
                .args(numbers(sizes))
                .env("GLOO_SOCKET_IFNAME", "lo");
        }
    }
    let (out, errors) = (scratch.join("out.txt"), scratch.join("errors.txt"));
    let create = |path: &Path| File::create(path).with_context(|| format!("cannot write {}", path.display()));
    command.stdout(create(&out)?).stderr(create(&errors)?);
    let finished = process::run(&mut command, LIMIT, Output::Inherit, |_| {})?;
    let left = finished.sweep(Duration::from_secs(2));
    let text = fs::read_to_string(&out).context("the program's output")?;
    if !finished.is_success() {
        let said = fs::read_to_string(&errors).unwrap_or_default();
        bail!(
            "{}: {}",
            finished.describe(),
            deny::reason(&said).unwrap_or_default()
        );
    }
    if !left.is_empty() {
        bail!("it left processes behind: {}", left.join(", "));
    }
    let times = match program {
        Program::Oxccl { .. } => parse_json(&text)?,
        _ => parse_lines(&text)?,
    };
    if !times.iter().map(|(size, _)| size).eq(sizes) {
        bail!("it measured other sizes than asked for");
    }
    Ok(times)
}

/// The lines of our C and Python programs: bytes, median, min, max.
fn parse_lines(text: &str) -> Result<Vec<(u64, Times)>> {
    text.lines()
        .map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let [bytes, median, min, _] = fields.as_slice() else {
                bail!("'{line}' is not a line of figures");
            };
            let times = Times {
                median: median.parse()?,
                min: min.parse()?,
            };
            Ok((bytes.parse()?, times))
        })
        .collect()
}

/// The report of `oxccl bench --json`.
fn parse_json(text: &str) -> Result<Vec<(u64, Times)>> {
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
            let bytes = line.get("bytes").and_then(Value::as_u64);
            let times = Times {
                median: number("time_us")?,
                min: number("min_us")?,
            };
            Ok((
                bytes.ok_or_else(|| anyhow!("a result of oxccl bench has no bytes"))?,
                times,
            ))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_formats_are_read_and_nonsense_is_refused() {
        let expected = vec![(
            4,
            Times {
                median: 1.5,
                min: 1.25,
            },
        )];
        assert_eq!(parse_lines("4 1.5 1.25 9.0\n").unwrap(), expected);
        let json = r#"{"results":[{"op":"all_reduce","bytes":4,"time_us":1.5,"min_us":1.25}]}"#;
        assert_eq!(parse_json(json).unwrap(), expected);
        for wrong in ["wrong result", "4 1.5", "4 x 1 1"] {
            assert!(parse_lines(wrong).is_err(), "{wrong}");
        }
        for wrong in ["", "{}", r#"{"results":[{"bytes":4}]}"#] {
            assert!(parse_json(wrong).is_err(), "{wrong}");
        }
    }
}
