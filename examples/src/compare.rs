//! DiLoCo against data parallel on the same text, tokens and replicas: held-out loss and bytes on the wire, as a table.
//!
//! Every run is `train_diloco` itself as processes of its own, so that losses and bytes are what a user gets. The rows go
//! into docs/diloco.md.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::drive::{note, print};

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
    /// What was wrong with the run all the same, such as replicas that differed on the way. Empty for a sound one.
    pub problems: Vec<String>,
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

    /// One run. A row stands only on replicas that ended equal.
    fn run(&self, program: &Path, method: &Method<'_>, seed: u64) -> Result<Row> {
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
        let mut problems = report.problems;
        if problems.is_empty() && !(report.ok && output.status.success()) {
            problems.push(format!("the run failed ({}): {}", output.status, said.trim()));
        }
        let all = problems.join(", ");
        Ok(Row {
            method: method.name.clone(),
            killed: method.kill.is_some(),
            seed,
            heldout_loss: report
                .heldout_loss
                .with_context(|| format!("the report has no held-out loss: {all}"))?,
            sent: report.wire.sent,
            wall_s: report.wall_s,
            hash: report
                .hash
                .with_context(|| format!("the replicas did not end equal: {all}"))?,
            problems,
        })
    }
}

/// The rows as a table in Markdown, each beside the data-parallel run of its seed. A run that had problems is neither compared nor
/// compared with.
pub fn table(rows: &[Row]) -> String {
    let mut text = String::from(
        "| method | seed | held-out loss | against data parallel | MB sent | fewer bytes | s | replicas |\n\
         |---|---|---|---|---|---|---|---|\n",
    );
    for row in rows {
        let base = rows
            .iter()
            .find(|r| r.method == "data parallel" && r.seed == row.seed && r.problems.is_empty())
            .filter(|_| row.problems.is_empty());
        let (loss, bytes) = base.map_or(("none".into(), "none".into()), |b| {
            (
                format!("{:+.2} %", (row.heldout_loss / b.heldout_loss - 1.0) * 100.0),
                format!("{:.1}x", b.sent as f64 / row.sent.max(1) as f64),
            )
        });
        text.push_str(&format!(
            "| {}{} | {} | {:.4} | {loss} | {:.2} | {bytes} | {:.0} | {} |\n",
            row.method,
            if row.killed { ", one killed" } else { "" },
            row.seed,
            row.heldout_loss,
            row.sent as f64 / 1e6,
            row.wall_s,
            if row.problems.is_empty() {
                "equal"
            } else {
                "RUN FAILED"
            }
        ));
    }
    text
}

/// The rows of all runs, telling each as it comes, and what was wrong with any.
fn rows(args: &CompareArgs, program: &Path) -> (Vec<Row>, Vec<String>) {
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
            let problems = match args.run(program, &method, seed) {
                Ok(row) => {
                    note!(
                        "{run}: held-out loss {:.4}, {:.2} MB sent, {:.0} s",
                        row.heldout_loss,
                        row.sent as f64 / 1e6,
                        row.wall_s
                    );
                    let problems = row.problems.clone();
                    rows.push(row);
                    problems
                }
                Err(error) => vec![format!("{error:#}")],
            };
            for problem in problems {
                note!("{run}: {problem}");
                wrong.push(format!("{run}: {problem}"));
            }
        }
    }
    (rows, wrong)
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
    let (rows, wrong) = rows(args, &program);
    print(&table(&rows))?;
    if let Some(path) = &args.json {
        std::fs::write(path, serde_json::to_vec_pretty(&rows)?)
            .with_context(|| format!("writing {}", path.display()))?;
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("; "));
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    fn row(method: &str, seed: u64, heldout_loss: f64, sent: u64) -> Row {
        Row {
            method: method.into(),
            killed: false,
            seed,
            heldout_loss,
            sent,
            wall_s: 1.0,
            hash: "h".into(),
            problems: Vec::new(),
        }
    }

    #[test]
    fn each_row_stands_beside_the_data_parallel_run_of_its_seed() {
        let rows = [
            row("data parallel", 1, 2.0, 1_000_000),
            row("data parallel", 2, 4.0, 1_000_000),
            row("diloco int8", 2, 4.04, 8_000),
        ];
        let text = table(&rows);
        let last = text.lines().last().unwrap();
        assert!(last.contains("+1.00 %") && last.contains("125.0x"), "{text}");
        assert!(last.ends_with("| equal |"), "{text}");
    }

    #[test]
    fn a_run_with_problems_is_neither_compared_nor_compared_with_nor_called_equal() {
        let mut rows = [
            row("data parallel", 1, 2.0, 1_000_000),
            row("diloco int8", 1, 2.0, 8_000),
            row("diloco int8", 3, 2.0, 8_000),
        ];
        for failed in [0, 1] {
            rows[failed].problems = vec!["parameters differ after step 3".into()];
            let text = table(&rows);
            let lines: Vec<&str> = text.lines().skip(2).collect();
            assert!(lines[failed].ends_with("| RUN FAILED |"), "{text}");
            assert!(
                lines[1].contains("| none |") && lines[2].contains("| none |"),
                "{text}"
            );
            rows[failed].problems.clear();
        }
    }

    /// A program in the place of `train_diloco`: what it leaves for each kind of run is in `reports`, by an argument that only this kind has.
    fn stand_in(folder: &Path, reports: &[(&str, &str)]) -> PathBuf {
        let mut script = String::from(
            "#!/bin/sh\nall=\"$*\"\nwhile [ \"$1\" != --json ]; do shift; done\ncase \"$all\" in\n",
        );
        for (n, (argument, report)) in reports.iter().enumerate() {
            let file = folder.join(format!("{n}.json"));
            std::fs::write(&file, report).unwrap();
            let leaves = match *report {
                "" => "echo 'no room for it' >&2; exit 3".to_string(),
                _ if report.contains("\"exits\"") => format!("cp {} \"$2\"; exit 7", file.display()),
                _ => format!("cp {} \"$2\"", file.display()),
            };
            script.push_str(&format!("*{argument}*) {leaves};;\n"));
        }
        script.push_str("esac\n");
        let (text, path) = (folder.join("stand-in.sh"), folder.join("stand-in"));
        std::fs::write(&text, script).unwrap();
        // Written by another process: a file that this one had open could not be executed while another test forks.
        let copied = Command::new("install")
            .args(["-m", "755"])
            .args([&text, &path])
            .status();
        assert!(copied.unwrap().success());
        path
    }

    #[test]
    fn a_failed_run_is_told_and_never_counted_as_equal_and_the_others_go_on() {
        let sound =
            r#"{"ok":true,"problems":[],"heldout_loss":2.0,"hash":"a","wall_s":1,"wire":{"sent":100}}"#;
        let apart = r#"{"ok":false,"problems":["replicas 0 and 1 ended apart"],"heldout_loss":2.0,"hash":null,"wall_s":1,"wire":{"sent":1}}"#;
        let differed = r#"{"ok":false,"problems":["parameters differ after step 3"],"heldout_loss":2.0,"hash":"a","wall_s":1,"wire":{"sent":1}}"#;
        let unfinished = r#"{"ok":false,"problems":["replica 1 never finished"],"heldout_loss":null,"hash":"a","wall_s":1,"wire":{"sent":1}}"#;
        let mute = r#"{"ok":false,"problems":[],"heldout_loss":2.0,"hash":"a","wall_s":1,"wire":{"sent":1}}"#;
        let exits = r#"{"exits":7,"ok":true,"problems":[],"heldout_loss":2.0,"hash":"a","wall_s":1,"wire":{"sent":1}}"#;
        let folder = tempfile::tempdir().unwrap();
        let reports = [
            ("--data-parallel", sound),
            ("int8", apart),
            ("fp8", differed),
            ("int6", unfinished),
            ("e3m0", mute),
            ("bf16", ""),
            ("f16", exits),
            ("int4", sound),
        ];
        let program = stand_in(folder.path(), &reports);
        let formats = "int8,fp8,int6,e3m0,bf16,f16,int4";
        let args = CompareArgs::parse_from(["compare", "--seeds", "5", "--formats", formats]);
        let (rows, wrong) = rows(&args, &program);
        let sound: Vec<&str> = rows
            .iter()
            .filter(|r| r.problems.is_empty())
            .map(|r| r.method.as_str())
            .collect();
        assert_eq!(sound, ["data parallel", "diloco int4"]);
        let expected = [
            (
                "int8",
                "the replicas did not end equal: replicas 0 and 1 ended apart",
            ),
            ("fp8", "parameters differ after step 3"),
            ("int6", "no held-out loss: replica 1 never finished"),
            ("e3m0", "the run failed"),
            ("bf16", "left no report: no room for it"),
            ("f16", "the run failed (exit status: 7)"),
        ];
        assert_eq!(wrong.len(), expected.len(), "{wrong:?}");
        for ((format, says), told) in expected.iter().zip(&wrong) {
            let run = format!("diloco {format} seed 5: ");
            assert!(told.starts_with(&run) && told.contains(says), "{told}");
        }
        let text = table(&rows);
        assert_eq!(text.matches("| equal |").count(), 2, "{text}");
        assert_eq!(text.matches("| RUN FAILED |").count(), 3, "{text}");
    }
}
