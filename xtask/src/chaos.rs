//! `cargo xtask chaos`: training under random kills and stops, against the same training undisturbed.
//!
//! Three runs of `train_diloco`: an undisturbed one, the disturbed one, and an undisturbed one again, so that a machine that gets
//! slower or faster meanwhile shows. The program draws the disturbances from the seed and reports what they cost; here the runs are chosen, compared
//! and told as Markdown. The folder of each run is kept: logs of every incarnation, events as a report.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::Deserialize;

use crate::metadata::Metadata;
use crate::process::{self, Output};

/// A model so small that a step is short beside what a disturbance costs, on the real text all the same.
const MODEL: &str = "--sync-every 16 --fragments 2 --d-model 32 --layers 2 --seq 32 --batch 8";
/// Steps of the run that says how fast this machine is.
const PROBE: u64 = 60;
/// Beyond its expected time, so often as long, a run hangs.
const HANGS_AFTER: u32 = 4;
/// What starting and ending a run may take besides.
const AROUND: Duration = Duration::from_secs(60);

/// Options of `cargo xtask chaos`.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Replicas.
    #[arg(long, value_name = "R", default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=64))]
    replicas: u32,
    /// Ranks of each replica, a process each.
    #[arg(long, value_name = "M", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=16))]
    ranks_per_replica: u32,
    /// How long the disturbed run is to take.
    #[arg(long, value_name = "S", default_value_t = 1200, value_parser = clap::value_parser!(u64).range(10..))]
    seconds: u64,
    /// How long each of the two undisturbed runs, before and after it, is to take [default: half as long].
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(5..))]
    undisturbed_seconds: Option<u64>,
    /// What is killed and stopped when is drawn from this.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Milliseconds between two kills or stops of a rank.
    #[arg(long, value_name = "MS", default_value_t = 5000, value_parser = clap::value_parser!(u64).range(1..))]
    every_ms: u64,
    /// Milliseconds between two kills of the lighthouse; 0: never.
    #[arg(long, value_name = "MS", default_value_t = 60_000)]
    lighthouse_ms: u64,
    /// The longest that a rank is stopped.
    #[arg(long, value_name = "MS", default_value_t = 4000, value_parser = clap::value_parser!(u64).range(1..))]
    stop_ms: u64,
    /// The time-outs of a reduction, of progress and of a silent replica: what a stopped rank costs the others.
    #[arg(
        long,
        value_name = "MS,MS,MS",
        value_delimiter = ',',
        num_args = 1,
        default_value = "800,1000,1000"
    )]
    timeouts_ms: Vec<u64>,
    /// The share of the undisturbed steps that the disturbed run must commit.
    #[arg(long, value_name = "PERCENT", default_value_t = 85.0)]
    at_least: f64,
    /// Credentials for all processes of the runs (given to them as `OXCCL_CREDENTIALS`).
    #[arg(long, value_name = "DIR")]
    credentials: Option<PathBuf>,
    /// Build optimised.
    #[arg(long)]
    release: bool,
    /// Write the report to this file.
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,
    /// More arguments for the program, after `--`: another model.
    #[arg(last = true)]
    train: Vec<String>,
}

#[derive(Debug, Clone, Deserialize)]
struct Report {
    ok: bool,
    problems: Vec<String>,
    hash: Option<String>,
    cost: Cost,
}

#[derive(Debug, Clone, Deserialize)]
struct Cost {
    kills: u64,
    stops: u64,
    lighthouse_kills: u64,
    restarts: u64,
    heals: u64,
    retried: u64,
    steps: u64,
    seconds: f64,
    between_commits: Times,
    kill_to_commit: Times,
    stop_to_commit: Times,
    lighthouse_to_commit: Times,
    death_to_own_commit: Times,
    longest: Vec<Gap>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
struct Times {
    count: u64,
    p50_ms: f64,
    p99_ms: f64,
    max_ms: f64,
}

#[derive(Debug, Clone, Deserialize)]
struct Gap {
    step: u64,
    at_s: f64,
    ms: f64,
    after: Vec<String>,
}

impl Cost {
    fn rate(&self) -> f64 {
        self.steps as f64 / self.seconds.max(1e-9)
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<bool> {
    let [timeout, progress, heartbeat] = arguments.timeouts_ms[..] else {
        bail!("--timeouts-ms takes three numbers: of a reduction, of progress, of a silent replica");
    };
    let metadata = Metadata::read()?;
    let profile = if arguments.release { "release" } else { "dev" };
    let built = metadata.build(&["--package", "oxccl-examples", "--bin", "train_diloco"], profile)?;
    let campaign = Campaign {
        arguments,
        program: built.join("train_diloco"),
        timeouts: [timeout, progress, heartbeat].map(|ms| ms.to_string()),
        folder: metadata.target_directory.join("xtask/chaos"),
    };
    let undisturbed = Duration::from_secs(arguments.undisturbed_seconds.unwrap_or(arguments.seconds / 2));
    let probe = campaign.train("probe", PROBE, undisturbed.max(AROUND), false)?;
    let before = campaign.for_time("before", &probe.cost, undisturbed, false)?;
    let disturbed = campaign.for_time(
        "disturbed",
        &before.cost,
        Duration::from_secs(arguments.seconds),
        true,
    )?;
    let after = campaign.for_time("after", &before.cost, undisturbed, false)?;
    let outcome = Outcome {
        before: before.cost,
        disturbed,
        after: after.cost,
    };
    let text = outcome.markdown(arguments);
    println!("{text}");
    if let Some(file) = &arguments.write {
        fs::write(file, &text).with_context(|| format!("cannot write {}", file.display()))?;
    }
    let held = outcome.percent() >= arguments.at_least;
    if !held {
        eprintln!(
            "xtask: {:.1} % of the undisturbed steps; {} % are wanted (seed {}, logs in {})",
            outcome.percent(),
            arguments.at_least,
            arguments.seed,
            campaign.folder.display()
        );
    }
    Ok(held)
}

struct Campaign<'a> {
    arguments: &'a Arguments,
    program: PathBuf,
    timeouts: [String; 3],
    folder: PathBuf,
}

impl Campaign<'_> {
    /// A run that takes about `time` at the speed of an earlier one.
    fn for_time(&self, name: &str, earlier: &Cost, time: Duration, is_disturbed: bool) -> Result<Report> {
        let rounds = (earlier.rate() * time.as_secs_f64()).ceil().max(10.0) as u64;
        self.train(name, rounds, time, is_disturbed)
    }

    /// A run of so many rounds, which is expected to take `time`.
    fn train(&self, name: &str, rounds: u64, time: Duration, is_disturbed: bool) -> Result<Report> {
        let out = self.folder.join(name);
        // Logs of an earlier campaign would be taken for this one's.
        drop(fs::remove_dir_all(&out));
        fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;
        let limit = time * HANGS_AFTER + AROUND;
        let result = out.join("result.json");
        let mut command = self.command(rounds, limit, is_disturbed);
        command.arg("--out").arg(&out).arg("--json").arg(&result);
        eprintln!(
            "xtask: {name}: {rounds} steps, about {} (seed {})",
            process::seconds(time),
            self.arguments.seed
        );
        let log = out.join("output.log");
        let finished = process::run(&mut command, limit + AROUND, Output::Log(&log), |_| {})?;
        let left = finished.sweep(Duration::from_secs(5));
        let failed = |why: &str| {
            format!(
                "the run '{name}' of seed {} failed: {why}; its logs are in {}",
                self.arguments.seed,
                out.display()
            )
        };
        if !left.is_empty() {
            bail!(
                "{}",
                failed(&format!("it left processes behind: {}", left.join(", ")))
            );
        }
        let report = read(&result).with_context(|| failed(&finished.describe()))?;
        if !report.ok || !finished.is_success() {
            let problems = report.problems.join("; ");
            bail!("{}", failed(&format!("{}: {problems}", finished.describe())));
        }
        Ok(report)
    }

    fn command(&self, rounds: u64, limit: Duration, is_disturbed: bool) -> Command {
        let a = self.arguments;
        let mut command = Command::new(&self.program);
        let [timeout, progress, heartbeat] = &self.timeouts;
        command
            .args(MODEL.split_whitespace())
            .args(["--rounds", &rounds.to_string()])
            .args(["--replicas", &a.replicas.to_string()])
            .args(["--ranks-per-replica", &a.ranks_per_replica.to_string()])
            .args(["--time-limit-s", &limit.as_secs().to_string()])
            .args(["--timeout-ms", timeout])
            .args(["--progress-timeout-ms", progress])
            .args(["--heartbeat-timeout-ms", heartbeat]);
        if is_disturbed {
            command
                .args(["--chaos", &a.seed.to_string()])
                .args(["--chaos-every-ms", &a.every_ms.to_string()])
                .args(["--chaos-lighthouse-ms", &a.lighthouse_ms.to_string()])
                .args(["--chaos-stop-ms", &a.stop_ms.to_string()]);
        } else {
            command.args(["--no-kill", "--cost"]);
        }
        if let Some(credentials) = &a.credentials {
            command.env("OXCCL_CREDENTIALS", credentials);
        }
        command.args(&a.train);
        command
    }
}

fn read(file: &Path) -> Result<Report> {
    let text = fs::read(file).with_context(|| format!("there is no report {}", file.display()))?;
    serde_json::from_slice(&text).with_context(|| format!("{} is no report", file.display()))
}

struct Outcome {
    before: Cost,
    disturbed: Report,
    after: Cost,
}

impl Outcome {
    /// Steps of the undisturbed runs each second.
    fn undisturbed(&self) -> f64 {
        let steps = self.before.steps + self.after.steps;
        steps as f64 / (self.before.seconds + self.after.seconds).max(1e-9)
    }

    /// What the disturbed run committed of what an undisturbed one would have in the same time.
    fn percent(&self) -> f64 {
        100.0 * self.disturbed.cost.rate() / self.undisturbed().max(1e-9)
    }

    fn markdown(&self, a: &Arguments) -> String {
        let d = &self.disturbed.cost;
        let row = |name: &str, c: &Cost| {
            format!(
                "| {name} | {} | {:.0} | {:.2} | {:.0} | {:.0} | {:.0} |\n",
                c.steps,
                c.seconds,
                c.rate(),
                c.between_commits.p50_ms,
                c.between_commits.p99_ms,
                c.between_commits.max_ms
            )
        };
        let times = |name: &str, t: &Times| {
            format!(
                "| {name} | {} | {:.0} | {:.0} | {:.0} |\n",
                t.count, t.p50_ms, t.p99_ms, t.max_ms
            )
        };
        let hash: String = self
            .disturbed
            .hash
            .iter()
            .flat_map(|h| h.chars().take(16))
            .collect();
        let mut text = format!(
            "{} replicas of {} ranks, seed {}; a kill or stop of a rank each {:.1} s (stops up to {:.1} s), a kill of the lighthouse each {:.0} s; \
             time-outs of {} ms; credentials {}.\n\n",
            a.replicas,
            a.ranks_per_replica,
            a.seed,
            a.every_ms as f64 / 1e3,
            a.stop_ms as f64 / 1e3,
            a.lighthouse_ms as f64 / 1e3,
            self.timeouts(a),
            if a.credentials.is_some() { "on" } else { "off" }
        );
        text += "| run | steps | s | steps/s | between commits p50 ms | p99 ms | longest ms |\n|---|---:|---:|---:|---:|---:|---:|\n";
        text += &row("undisturbed, before", &self.before);
        text += &row("disturbed", d);
        text += &row("undisturbed, after", &self.after);
        text += &format!(
            "\nThe disturbed run committed **{:.1} %** of the undisturbed steps in its time. {} kills and {} stops of ranks, {} kills of the \
             lighthouse: {} restarts of replicas, {} heals, {} attempts repeated. It ended by itself, with the parameters `{hash}` on all {} ranks.\n\n",
            self.percent(),
            d.kills,
            d.stops,
            d.lighthouse_kills,
            d.restarts,
            d.heals,
            d.retried,
            a.replicas * a.ranks_per_replica
        );
        text +=
            "| from … to the next commit | n | p50 ms | p99 ms | longest ms |\n|---|---:|---:|---:|---:|\n";
        text += &times("a kill of a rank … of another replica", &d.kill_to_commit);
        text += &times("a stop of a rank … of another replica", &d.stop_to_commit);
        text += &times(
            "a kill of the lighthouse … of any replica",
            &d.lighthouse_to_commit,
        );
        text += &times("a replica's death … of its own", &d.death_to_own_commit);
        text += "\nThe longest times without a commit:\n\n| ms | before step | at s | after |\n|---:|---:|---:|---|\n";
        for gap in &d.longest {
            text += &format!(
                "| {:.0} | {} | {:.1} | {} |\n",
                gap.ms,
                gap.step,
                gap.at_s,
                gap.after.join(", ")
            );
        }
        text
    }

    fn timeouts(&self, a: &Arguments) -> String {
        let words: Vec<String> = a.timeouts_ms.iter().map(u64::to_string).collect();
        format!("{} (reduction, progress, silence)", words.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(steps: u64, seconds: f64) -> Cost {
        let times = Times {
            count: 1,
            p50_ms: 1.0,
            p99_ms: 2.0,
            max_ms: 3.0,
        };
        Cost {
            kills: 4,
            stops: 5,
            lighthouse_kills: 6,
            restarts: 7,
            heals: 8,
            retried: 9,
            steps,
            seconds,
            between_commits: times,
            kill_to_commit: times,
            stop_to_commit: times,
            lighthouse_to_commit: times,
            death_to_own_commit: times,
            longest: vec![Gap {
                step: 77,
                at_s: 12.5,
                ms: 1234.0,
                after: vec!["kill of 1/0 900 ms before".into()],
            }],
        }
    }

    #[test]
    fn the_share_is_of_the_mean_speed_before_and_after() {
        let outcome = Outcome {
            before: cost(100, 10.0),
            disturbed: Report {
                ok: true,
                problems: Vec::new(),
                hash: Some("0123456789abcdef0".into()),
                cost: cost(140, 20.0),
            },
            after: cost(60, 10.0),
        };
        assert!((outcome.percent() - 87.5).abs() < 1e-9, "{}", outcome.percent());
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            arguments: Arguments,
        }
        let line = <Line as clap::Parser>::parse_from(["chaos"]);
        let text = outcome.markdown(&line.arguments);
        for part in [
            "4 replicas of 2 ranks",
            "**87.5 %**",
            "`0123456789abcdef` on all 8 ranks",
            "| 1234 | 77 | 12.5 | kill of 1/0 900 ms before |",
        ] {
            assert!(text.contains(part), "{text}");
        }
    }
}
