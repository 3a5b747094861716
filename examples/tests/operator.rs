//! An operator drains, evicts and kills replicas of a running job: how their processes end, and that the others go on.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use coordination::{LighthouseClient, LighthouseConfig, LighthouseServer, Order, OrderKind};
use ftcore::deadline_in;
use serde_json::Value;

const DDP: &str = env!("CARGO_BIN_EXE_train_ddp");
const DILOCO: &str = env!("CARGO_BIN_EXE_train_diloco");
/// The reason is told to all replicas.
const WHY: &str = "the host is repaired";

fn soon() -> Instant {
    deadline_in(Duration::from_secs(100))
}

fn client(url: &str) -> LighthouseClient {
    LighthouseClient::connect(url, soon()).unwrap()
}

fn operate(tool: &LighthouseClient, kind: OrderKind, replica: &str) {
    let order = Order {
        kind,
        reason: WHY.into(),
    };
    assert_eq!(tool.operate(replica, order, soon()).unwrap().len(), 1);
}

/// Until so many replicas are in one quorum beyond `step`, each with an open stream.
fn until_at_work(tool: &LighthouseClient, replicas: usize, step: i64) {
    let end = soon();
    loop {
        let status = tool.status(soon()).unwrap();
        let members = &status.participants;
        if members.len() == replicas
            && members
                .iter()
                .all(|m| m.step > step && status.attached.contains(&m.replica_id))
        {
            return;
        }
        assert!(Instant::now() < end, "{status:?}");
        std::thread::park_timeout(Duration::from_millis(20));
    }
}

fn ended(child: Child) -> (Output, String) {
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (output, said)
}

#[test]
fn a_drained_replica_ends_well_is_not_started_again_and_the_others_finish_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let json = dir.path().join("result.json");
    let mut run = Command::new(DDP)
        .args(["--replicas", "2", "--no-kill", "--time-limit-s", "120", "--json"])
        .arg(&json)
        .arg("--out")
        .arg(dir.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (told, lines) = std::sync::mpsc::channel();
    for pipe in [
        Box::new(run.stderr.take().unwrap()) as Box<dyn std::io::Read + Send>,
        Box::new(run.stdout.take().unwrap()),
    ] {
        let told = told.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                let _ = told.send(line);
            }
        });
    }
    drop(told);
    let mut said = String::new();
    let url = lines.iter().find_map(|line| {
        said.push_str(&line);
        said.push('\n');
        let (_, url) = line.split_once("lighthouse at ")?;
        url.split_whitespace().next().map(str::to_owned)
    });
    let tool = client(&url.unwrap_or_else(|| panic!("no lighthouse: {said}")));
    until_at_work(&tool, 2, 20);
    operate(&tool, OrderKind::Drain, "replica1");
    said.extend(lines.iter().map(|line| line + "\n"));
    assert!(run.wait().unwrap().success(), "{said}");
    assert!(said.contains("replica 1 was drained"), "{said}");
    let report: Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    assert_eq!(report["ok"], true, "{report:#}");
    let replicas = report["figures"].as_array().unwrap();
    let last = |i: usize| replicas[i]["last_step"].as_i64().unwrap();
    assert_eq!(replicas[1]["incarnations"], 1, "{report:#}");
    assert!(last(1) > 20 && last(1) < last(0), "{report:#}");
}

/// As long as it is not ended.
fn replica(program: &str, arguments: &[&str], lighthouse: &LighthouseServer, index: u32) -> Child {
    Command::new(program)
        .arg("replica")
        .args(arguments)
        .env("OXCCL_LIGHTHOUSE", lighthouse.address())
        .env("OXCCL_REPLICA", index.to_string())
        .envs([("OXCCL_REPLICAS", "4"), ("RAYON_NUM_THREADS", "1")])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn ends_one_after_the_other(program: &str, arguments: &[&str]) {
    let lighthouse = LighthouseServer::start(LighthouseConfig {
        bind: "127.0.0.1:0".into(),
        min_replicas: 1,
        initial_replicas: Some(4),
        ..LighthouseConfig::default()
    })
    .unwrap();
    let tool = client(&lighthouse.address());
    let [first, drained, evicted, killed] = [0, 1, 2, 3].map(|i| replica(program, arguments, &lighthouse, i));
    until_at_work(&tool, 4, 2);
    operate(&tool, OrderKind::Kill, "replica3");
    assert_eq!(ended(killed).0.status.signal(), Some(9));
    until_at_work(&tool, 3, 2);
    operate(&tool, OrderKind::Evict, "replica2");
    let (output, said) = ended(evicted);
    assert!(output.status.code().is_some_and(|code| code != 0), "{said}");
    assert!(
        said.contains("evicted by the operator: the host is repaired"),
        "{said}"
    );
    until_at_work(&tool, 2, 2);
    for (child, name) in [(drained, "replica1"), (first, "replica0")] {
        operate(&tool, OrderKind::Drain, name);
        let (output, said) = ended(child);
        eprintln!("DRAINED {:?} {said}", Instant::now());
        assert!(output.status.success(), "{said}");
        assert!(said.contains("was drained: it left in good order"), "{said}");
    }
}

#[test]
fn replicas_of_a_data_parallel_job_are_killed_evicted_and_drained() {
    ends_one_after_the_other(DDP, &["--steps", "100000000"]);
}

#[test]
fn replicas_of_a_diloco_job_are_killed_evicted_and_drained() {
    let small = "--rounds 100000000 --sync-every 4 --d-model 16 --layers 1 --seq 16 --batch 1 --eager --delay 0 --mixing 0";
    ends_one_after_the_other(DILOCO, &small.split(' ').collect::<Vec<_>>());
}
