//! Replicas of two ranks, as a user runs them: a rank that is killed or stopped, and what all ranks end with.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde_json::Value;

const DILOCO: &str = env!("CARGO_BIN_EXE_train_diloco");
const DDP: &str = env!("CARGO_BIN_EXE_train_ddp");

const SMALL: &str = "--sync-every 8 --d-model 32 --layers 2 --seq 32 --batch 2";
const TWO_BY_TWO: &str = "--replicas 2 --ranks-per-replica 2 --time-limit-s 240";

fn command(program: &str, out: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    for words in args {
        command.args(words.split_whitespace());
    }
    command.arg("--out").arg(out);
    command.arg("--json").arg(out.join("result.json"));
    command
}

fn report(out: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(out.join("result.json")).unwrap()).unwrap()
}

fn run(program: &str, args: &[&str]) -> Value {
    let out = tempfile::tempdir().unwrap();
    let output = command(program, out.path(), args).output().unwrap();
    let said =
        String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
    report(out.path())
}

/// Of each rank: replica, rank, incarnations, hash.
fn figures(report: &Value) -> Vec<(u64, u64, u64, String)> {
    let figures = report["figures"].as_array().unwrap().iter();
    let number = |f: &Value, name: &str| f[name].as_u64().unwrap();
    figures
        .map(|f| {
            let hash = f["hash"].as_str().unwrap().to_owned();
            (
                number(f, "replica"),
                number(f, "rank"),
                number(f, "incarnations"),
                hash,
            )
        })
        .collect()
}

/// Every rank ended with the same parameters; those of replica 1 in its second incarnation, if it was killed.
fn all_ranks_are_equal(report: &Value, incarnations_of_one: u64) {
    assert_eq!(report["ok"], true, "{report:#}");
    let hash = report["hash"].as_str().unwrap().to_owned();
    let of = |replica, rank, incarnations| (replica, rank, incarnations, hash.clone());
    let expected = [
        of(0, 0, 1),
        of(0, 1, 1),
        of(1, 0, incarnations_of_one),
        of(1, 1, incarnations_of_one),
    ];
    assert_eq!(figures(report), expected, "{report:#}");
}

fn killed_rank_1_of_replica_1(report: &Value, step: i64) {
    all_ranks_are_equal(report, 2);
    let deaths = report["deaths"].as_array().unwrap();
    let [death] = &deaths[..] else {
        panic!("one replica died: {report:#}")
    };
    let of = ["replica", "rank", "exit"].map(|name| death[name].clone());
    assert_eq!(
        of,
        [Value::from(1), Value::from(1), Value::from("SIGKILL")],
        "{report:#}"
    );
    assert!(death["healed_step"].as_i64().unwrap() >= step, "{report:#}");
    // The other one went on meanwhile.
    assert!(death["stall"]["step"].as_i64().unwrap() <= step + 2, "{report:#}");
}

#[test]
fn train_diloco_with_a_rank_killed_goes_on_and_the_whole_replica_comes_back_equal() {
    let report = run(DILOCO, &[SMALL, TWO_BY_TWO, "--rounds 200 --kill 1/1@20"]);
    killed_rank_1_of_replica_1(&report, 20);
}

#[test]
fn train_ddp_with_a_rank_killed_goes_on_and_the_whole_replica_comes_back_equal() {
    let report = run(DDP, &[TWO_BY_TWO, "--steps 900 --kill 1/1@100"]);
    killed_rank_1_of_replica_1(&report, 100);
    assert!(report["heldout_accuracy"].as_f64().unwrap() > 0.9, "{report:#}");
}

#[test]
fn the_ranks_of_a_replica_train_what_one_rank_would() {
    let loss = |ranks: &str| {
        let report = run(
            DILOCO,
            &[SMALL, "--rounds 60 --no-kill --time-limit-s 120", ranks],
        );
        assert_eq!(report["ok"], true, "{report:#}");
        report["heldout_loss"].as_f64().unwrap()
    };
    let (one, two) = (loss("--ranks-per-replica 1"), loss("--ranks-per-replica 2"));
    // The same batches and steps; only the order of additions differs.
    assert!(
        (one - two).abs() < 0.01 * one,
        "{one} with one rank, {two} with two"
    );
}

/// A run that is watched line by line.
struct Watched {
    process: Child,
    lines: Receiver<String>,
}

impl Drop for Watched {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Watched {
    fn start(mut command: Command) -> Self {
        let mut process = command
            .stderr(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let output = BufReader::new(process.stderr.take().unwrap());
        let (tell, lines) = channel();
        std::thread::spawn(move || {
            let lines = output.lines().map_while(Result::ok);
            let _ = lines.map(|line| tell.send(line)).find(|sent| sent.is_err());
        });
        Self { process, lines }
    }

    /// The rest of the first line from here on that has `text`.
    fn until(&self, text: &str) -> String {
        let deadline = Instant::now() + Duration::from_secs(90);
        let mut said = Vec::new();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => match line.split_once(text) {
                    Some((_, rest)) => return rest.to_owned(),
                    None => said.push(line),
                },
                Err(e) => panic!("not '{text}': {e}; {}", said.join("\n")),
            }
        }
    }
}

fn signal(name: &str, process: &str) {
    let status = Command::new("kill").args([name, process]).status().unwrap();
    assert!(status.success(), "kill {name} {process}");
}

#[test]
fn a_rank_that_is_stopped_takes_its_replica_out_for_a_while_and_costs_no_incarnation() {
    let out = tempfile::tempdir().unwrap();
    let times = "--timeout-ms 3000 --progress-timeout-ms 4000 --heartbeat-timeout-ms 4000";
    let args = [SMALL, TWO_BY_TWO, "--rounds 700 --no-kill", times];
    let mut run = Watched::start(command(DILOCO, out.path(), &args));
    let processes = [0, 1].map(|rank| run.until(&format!("replica 1, rank {rank}, started, process ")));
    run.until("replica 0: quorum of 2 replicas");
    // First the one with the replica's servers, then the other.
    for process in processes {
        let stopped = Instant::now();
        signal("-STOP", &process);
        run.until("replica 0: quorum of 1 replica");
        // Both times are 4 s.
        assert!(
            stopped.elapsed() < Duration::from_secs(12),
            "{:?}",
            stopped.elapsed()
        );
        signal("-CONT", &process);
        run.until("replica 0: quorum of 2 replicas");
    }
    let status = run.process.wait().unwrap();
    assert!(status.success(), "{status}");
    let report = report(out.path());
    all_ranks_are_equal(&report, 1);
    assert_eq!(report["deaths"], Value::Array(Vec::new()), "{report:#}");
}

#[test]
fn a_run_under_random_kills_and_stops_and_without_its_lighthouse_now_and_then_ends_equal() {
    // Fewer of them on a fast machine, more on a slow one: as many as fall into so many steps.
    let disturbed =
        "--rounds 300 --chaos 3 --chaos-every-ms 1500 --chaos-stop-ms 2000 --chaos-lighthouse-ms 2500";
    let times = "--timeout-ms 3000 --progress-timeout-ms 4000 --heartbeat-timeout-ms 4000";
    let report = run(DILOCO, &[SMALL, TWO_BY_TWO, disturbed, times]);
    assert_eq!(report["ok"], true, "{report:#}");
    let hash = report["hash"].as_str().unwrap();
    assert!(figures(&report).iter().all(|(.., own)| own == hash), "{report:#}");
    let cost = &report["cost"];
    for name in ["kills", "stops", "lighthouse_kills", "restarts", "heals"] {
        assert!(cost[name].as_u64().unwrap() >= 1, "{name}: {report:#}");
    }
    assert_eq!(cost["steps"], 299, "{report:#}");
}

#[test]
fn what_the_ranks_cannot_share_is_refused_before_anything_starts() {
    let out = tempfile::tempdir().unwrap();
    for (args, texts) in [
        ("--ranks-per-replica 3 --batch 8", ["3 ranks", "multiple of 3"]),
        (
            "--ranks-per-replica 2 --kill 1/2@3",
            ["rank 2 of replica 1", "0 to 1"],
        ),
    ] {
        let output = command(DILOCO, out.path(), &[args]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(texts.iter().all(|t| said.contains(t)), "{said}");
    }
}
