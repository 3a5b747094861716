//! DiLoCo against data parallel on the same text, tokens and replicas: held-out loss and bytes on the wire, as a table.
//!
//! Every run is `train_diloco` itself as processes of its own, so that losses and bytes are what a user gets. The rows go
//! into docs/diloco.md.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

/// Compares DiLoCo, quantised and not, with f32 data parallel at equal tokens and replicas.
#[derive(Debug, clap::Parser)]
#[command(version, about)]
pub struct CompareArgs {
    /// Inner steps of every run.
    #[arg(long, default_value_t = 2048)]
    pub steps: u64,
    /// Seeds; every method runs with each.
    #[arg(long, value_delimiter = ',', default_value = "1,2,3")]
    pub seeds: Vec<u64>,
    /// Formats of the outer gradients; "f32" is not quantised, "+feedback" carries the error over (`--error-feedback`).
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "f32,int8,fp8,int4,int4+feedback"
    )]
    pub formats: Vec<String>,
    /// Replicas of every run.
    #[arg(long, default_value_t = 2)]
    pub replicas: u32,
    /// H of the DiLoCo runs; `steps` must be a multiple of H / P.
    #[arg(long, default_value_t = 32)]
    pub sync_every: u64,
    /// P of the DiLoCo runs.
    #[arg(long, default_value_t = 2)]
    pub fragments: u64,
    /// Repeat the quantised runs of the first seed with a replica killed in the middle.
    #[arg(long)]
    pub kill: bool,
    /// Write all rows as JSON to this file.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// More arguments for every run, after `--`: model and optimizer.
    #[arg(last = true)]
    pub train: Vec<String>,
}

/// One run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// "data parallel", or the format of DiLoCo's outer gradients.
    pub method: String,
    /// True if a replica was killed and healed.
    pub killed: bool,
    /// The seed.
    pub seed: u64,
    /// Held-out loss at the end, in nats per byte.
    pub heldout_loss: f64,
    /// Bytes that all replicas sent to each other.
    pub sent: u64,
    /// Wall time in seconds.
    pub wall_s: f64,
    /// The hash that all replicas ended with.
    pub hash: String,
}

#[derive(Deserialize)]
struct Report {
    ok: bool,
    problems: Vec<String>,
    heldout_loss: Option<f64>,
    hash: Option<String>,
    wall_s: f64,
    wire: Wire,
}

#[derive(Deserialize)]
struct Wire {
    sent: u64,
}

/// How a run is told apart from the others.
struct Method<'a> {
    name: String,
    args: Vec<&'a str>,
    kill: Option<String>,
}

impl CompareArgs {
    fn rounds(&self) -> u64 {
        self.steps * self.fragments / self.sync_every.max(1)
    }

    fn methods(&self) -> Vec<Method<'_>> {
        let mut methods = vec![Method {
            name: "data parallel".to_string(),
            args: vec!["--data-parallel"],
            kill: None,
        }];
        for kill in [false, true] {
            for format in &self.formats {
                let is_plain = format == "f32";
                if kill && (!self.kill || is_plain) {
                    continue;
                }
                methods.push(Method {
                    name: format!("diloco {format}"),
                    args: match format.strip_suffix("+feedback") {
                        _ if is_plain => Vec::new(),
                        Some(format) => vec!["--quantize", format, "--error-feedback"],
                        None => vec!["--quantize", format],
                    },
                    kill: kill.then(|| format!("{}@{}", self.replicas.saturating_sub(1), self.rounds() / 2)),
                });
            }
        }
        methods
    }

    /// One run and what was wrong with it, if anything was: a row stands only on replicas that ended equal.
    fn run(&self, program: &Path, method: &Method<'_>, seed: u64) -> Result<(Row, Vec<String>)> {
        let out = tempfile::tempdir().context("a folder for the run")?;
        let json = out.path().join("result.json");
        let mut command = Command::new(program);
        command
            .args(["--replicas", &self.replicas.to_string()])
            .args(["--rounds", &self.rounds().to_string()])
            .args(["--sync-every", &self.sync_every.to_string()])
            .args(["--fragments", &self.fragments.to_string()])
            .args(["--seed", &seed.to_string(), "--time-limit-s", "7200", "--out"])
            .arg(out.path())
            .arg("--json")
            .arg(&json)
            .args(&method.args)
            .args(&self.train)
            .stdout(Stdio::null());
        match &method.kill {
            Some(kill) => command.args(["--kill", kill]),
            None => command.arg("--no-kill"),
        };
        let output = command
            .output()
            .with_context(|| format!("starting {}", program.display()))?;
        let said = String::from_utf8_lossy(&output.stderr);
        let text = std::fs::read(&json).with_context(|| format!("{} left no report: {said}", method.name))?;
        let report: Report = serde_json::from_slice(&text)?;
        ensure!(report.ok || !report.problems.is_empty(), "the run failed: {said}");
        let row = Row {
            method: method.name.clone(),
            killed: method.kill.is_some(),
            seed,
            heldout_loss: report.heldout_loss.context("the report has no held-out loss")?,
            sent: report.wire.sent,
            wall_s: report.wall_s,
            hash: report.hash.context("the replicas did not end equal")?,
        };
        Ok((row, report.problems))
    }
}

/// The rows as a table in Markdown, each beside the data-parallel run of its seed.
pub fn table(rows: &[Row]) -> String {
    let mut text = String::from(
        "| method | seed | held-out loss | against data parallel | MB sent | fewer bytes | s | replicas |\n\
         |---|---|---|---|---|---|---|---|\n",
    );
    for row in rows {
        let base = rows
            .iter()
            .find(|r| r.method == "data parallel" && r.seed == row.seed);
        let (loss, bytes) = base.map_or((f64::NAN, f64::NAN), |b| {
            (
                (row.heldout_loss / b.heldout_loss - 1.0) * 100.0,
                b.sent as f64 / row.sent.max(1) as f64,
            )
        });
        text.push_str(&format!(
            "| {}{} | {} | {:.4} | {loss:+.2} % | {:.2} | {bytes:.1}x | {:.0} | equal |\n",
            row.method,
            if row.killed { ", one killed" } else { "" },
            row.seed,
            row.heldout_loss,
            row.sent as f64 / 1e6,
            row.wall_s
        ));
    }
    text
}

/// Runs everything, printing each row as it comes and the table at the end.
pub fn compare(args: &CompareArgs) -> Result<()> {
    ensure!(
        args.fragments > 0 && args.sync_every.is_multiple_of(args.fragments),
        "--sync-every must be a multiple of --fragments"
    );
    ensure!(
        args.steps.is_multiple_of(args.sync_every / args.fragments),
        "--steps must be a multiple of {}, the inner steps of a round",
        args.sync_every / args.fragments
    );
    let program = std::env::current_exe()?.with_file_name("train_diloco");
    let mut rows = Vec::new();
    let mut wrong = Vec::new();
    for (n, &seed) in args.seeds.iter().enumerate() {
        for method in args.methods() {
            if n > 0 && method.kill.is_some() {
                continue;
            }
            let run = format!(
                "{}{} seed {seed}",
                method.name,
                if method.kill.is_some() {
                    ", one killed,"
                } else {
                    ""
                }
            );
            // Hours of other runs are not lost to one that failed: it is told now and at the end.
            let problems = match args.run(&program, &method, seed) {
                Ok((row, problems)) => {
                    eprintln!(
                        "{run}: held-out loss {:.4}, {:.2} MB sent, {:.0} s",
                        row.heldout_loss,
                        row.sent as f64 / 1e6,
                        row.wall_s
                    );
                    rows.push(row);
                    problems
                }
                Err(error) => vec![format!("{error:#}")],
            };
            for problem in problems {
                eprintln!("{run}: {problem}");
                wrong.push(format!("{run}: {problem}"));
            }
        }
    }
    print!("{}", table(&rows));
    if let Some(path) = &args.json {
        std::fs::write(path, serde_json::to_vec_pretty(&rows)?)
            .with_context(|| format!("writing {}", path.display()))?;
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("; "));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_stands_beside_the_data_parallel_run_of_its_seed() {
        let row = |method: &str, seed, heldout_loss, sent| Row {
            method: method.into(),
            killed: false,
            seed,
            heldout_loss,
            sent,
            wall_s: 1.0,
            hash: "h".into(),
        };
        let rows = [
            row("data parallel", 1, 2.0, 1_000_000),
            row("data parallel", 2, 4.0, 1_000_000),
            row("diloco int8", 2, 4.04, 8_000),
        ];
        let text = table(&rows);
        let last = text.lines().last().unwrap();
        assert!(last.contains("+1.00 %") && last.contains("125.0x"), "{text}");
    }
}
