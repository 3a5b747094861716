//! The two programs as a user runs them: small, with a kill, twice with the same seed, and with the mistakes people make.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use coordination::{LighthouseConfig, LighthouseServer};
use serde_json::Value;

const DILOCO: &str = env!("CARGO_BIN_EXE_train_diloco");
const DDP: &str = env!("CARGO_BIN_EXE_train_ddp");

/// A model and a run small enough for a test; the real text and the real digits all the same.
const SMALL: &[&str] = &[
    "--rounds",
    "200",
    "--sync-every",
    "4",
    "--d-model",
    "32",
    "--layers",
    "2",
    "--seq",
    "32",
    "--batch",
    "2",
];

fn run(program: &str, out: &Path, args: &[&str]) -> (Output, Option<Value>) {
    let json = out.join("result.json");
    let output = Command::new(program)
        .args(args)
        .args(["--time-limit-s", "120", "--out"])
        .arg(out)
        .arg("--json")
        .arg(&json)
        .output()
        .unwrap();
    let value = std::fs::read(&json)
        .ok()
        .map(|b| serde_json::from_slice(&b).unwrap());
    (output, value)
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout)
}

#[test]
fn train_diloco_survives_a_kill_inside_a_reduction_and_all_end_equal() {
    let dir = tempfile::tempdir().unwrap();
    let (output, report) = run(DILOCO, dir.path(), &[SMALL, &["--kill", "1@20"]].concat());
    assert!(output.status.success(), "{}", text(&output));
    let report = report.unwrap();
    assert_eq!(report["ok"], true, "{report:#}");
    assert!(report["hash"].is_string(), "{report:#}");
    let death = &report["deaths"][0];
    assert_eq!(
        (&death["replica"], &death["exit"]),
        (&Value::from(1), &Value::from("SIGKILL")),
        "{report:#}"
    );
    assert!(death["healed_step"].as_i64().unwrap() >= 20, "{report:#}");
    assert!(
        death["restart_to_commit_ms"].is_number() && death["stall"]["stall_ms"].is_number(),
        "{report:#}"
    );
    assert!(report["wire"]["sent"].as_u64().unwrap() > 0);
    for name in ["loss.svg", "loss.png", "report.json"] {
        assert!(dir.path().join(name).metadata().unwrap().len() > 1000, "{name}");
    }
}

#[test]
fn train_ddp_survives_a_kill_inside_a_reduction_and_all_end_equal() {
    let dir = tempfile::tempdir().unwrap();
    let three = ["--replicas", "3", "--steps", "500", "--kill", "0@100"];
    let (output, report) = run(DDP, dir.path(), &three);
    assert!(output.status.success(), "{}", text(&output));
    let report = report.unwrap();
    assert_eq!(report["ok"], true, "{report:#}");
    assert!(
        report["deaths"][0]["healed_step"].as_i64().unwrap() >= 100,
        "{report:#}"
    );
    assert!(report["heldout_accuracy"].as_f64().unwrap() > 0.9, "{report:#}");
}

fn contains(bytes: &[u8], text: &[u8]) -> bool {
    bytes.windows(text.len()).any(|window| window == text)
}

/// What stands in the files of a folder and of those in it.
fn files(folder: &Path) -> Vec<Vec<u8>> {
    let entries = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    entries
        .flat_map(|path| match path.is_dir() {
            true => files(&path),
            // A socket cannot be read.
            false => std::fs::read(path).into_iter().collect(),
        })
        .collect()
}

#[test]
fn with_credentials_a_run_with_a_kill_ends_equal_and_nothing_secret_is_in_a_log_or_a_list_of_processes() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, out) = (dir.path().join("job"), dir.path().join("out"));
    oxccl::identity::create(&folder, Some("demo")).unwrap();
    std::fs::create_dir(&out).unwrap();
    let secrets = ["secret", "ca.key", "operator.key"].map(|name| {
        let text = std::fs::read_to_string(folder.join(name)).unwrap();
        // Of a key the longest line: its head is no secret.
        text.lines().max_by_key(|line| line.len()).unwrap().to_owned()
    });
    let tells = |bytes: &[u8]| secrets.iter().any(|secret| contains(bytes, secret.as_bytes()));
    let written = |name: &str| std::fs::File::create(out.join(name)).unwrap();
    let mut run = Command::new(DILOCO)
        .args(SMALL)
        .args(["--kill", "1@20", "--time-limit-s", "120", "--out"])
        .arg(&out)
        .arg("--json")
        .arg(out.join("result.json"))
        .env("OXCCL_CREDENTIALS", &folder)
        .env("OXCCL_LOG", "debug,rustls=trace")
        .stdout(written("stdout"))
        .stderr(written("stderr"))
        .spawn()
        .unwrap();
    let mut seen = 0;
    let status = loop {
        if let Some(status) = run.try_wait().unwrap() {
            break status;
        }
        for process in std::fs::read_dir("/proc").unwrap().flatten() {
            for what in ["cmdline", "environ"] {
                let Ok(bytes) = std::fs::read(process.path().join(what)) else {
                    continue;
                };
                assert!(!tells(&bytes), "{what} of {:?}", process.file_name());
                seen += usize::from(contains(&bytes, folder.as_os_str().as_encoded_bytes()));
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    assert!(seen > 0, "the processes were not looked at");
    let written = files(&out);
    let said = String::from_utf8_lossy(&written.concat()).into_owned();
    assert!(status.success(), "{status}: {said}");
    let report: Value = serde_json::from_slice(&std::fs::read(out.join("result.json")).unwrap()).unwrap();
    assert_eq!(report["ok"], true, "{report:#}");
    assert!(
        report["deaths"][0]["healed_step"].as_i64().unwrap() >= 20,
        "{report:#}"
    );
    assert!(said.contains("https://127.0.0.1:"), "it ran without credentials");
    assert!(
        !written.iter().any(|bytes| tells(bytes)),
        "a file of the run tells a secret"
    );
}

#[test]
fn a_quantised_run_ends_equal_too_with_a_kill_and_far_fewer_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let (output, report) = run(
        DILOCO,
        dir.path(),
        &[SMALL, &["--kill", "1@20", "--quantize", "int4"]].concat(),
    );
    assert!(output.status.success(), "{}", text(&output));
    let report = report.unwrap();
    assert_eq!(report["ok"], true, "{report:#}");
    assert!(
        report["deaths"][0]["healed_step"].as_i64().unwrap() >= 20,
        "{report:#}"
    );
    // Synchronised once in 4 inner steps and 7 times smaller; with everything else on the wire still more than 15 times.
    assert!(report["wire"]["ratio"].as_f64().unwrap() > 15.0, "{report:#}");
}

#[test]
fn two_bits_with_error_feedback_end_equal_too_with_a_kill() {
    let dir = tempfile::tempdir().unwrap();
    let three = ["--replicas", "3", "--kill", "1@20", "--quantize", "int2"];
    let (output, report) = run(DILOCO, dir.path(), &[SMALL, &three].concat());
    assert!(output.status.success(), "{}", text(&output));
    let report = report.unwrap();
    assert_eq!(report["ok"], true, "{report:#}");
    assert!(
        report["deaths"][0]["healed_step"].as_i64().unwrap() >= 20,
        "{report:#}"
    );
    let first = report["figures"][0]["heldout_loss"].as_f64().unwrap();
    // A byte is 5.5 nats before training.
    assert!(first < 4.0, "{report:#}");
    let two = ["--steps", "500", "--kill", "1@100", "--quantize", "int4"];
    let (output, report) = run(DDP, dir.path(), &[&two[..], &["--error-feedback"]].concat());
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(report.unwrap()["ok"], true);
    // Without it the buckets follow the order of the gradients, which goes through the quantised group as well.
    let short = ["--steps", "100", "--no-kill", "--quantize", "int4"];
    let (output, report) = run(DDP, dir.path(), &short);
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(report.unwrap()["ok"], true);
}

#[test]
fn the_same_seed_gives_the_same_bits_and_another_seed_others() {
    let curve = |seed: &str| {
        let dir = tempfile::tempdir().unwrap();
        let (output, report) = run(
            DILOCO,
            dir.path(),
            &[&SMALL[2..], &["--rounds", "40", "--no-kill", "--seed", seed]].concat(),
        );
        assert!(output.status.success(), "{}", text(&output));
        let report = report.unwrap();
        // The losses themselves, in full precision, as they stand in the picture's data.
        let losses: Vec<String> = report["figures"]
            .as_array()
            .unwrap()
            .iter()
            .flat_map(|f| {
                [
                    f["train_loss"].to_string(),
                    f["heldout_loss"].to_string(),
                    f["hash"].to_string(),
                ]
            })
            .collect();
        assert_eq!(losses.len(), 6);
        losses
    };
    let first = curve("5");
    assert_eq!(first, curve("5"));
    assert_ne!(first, curve("6"));
}

/// Runs `program` with `args` and expects exit code `code` and all of `texts` in what it says.
fn refused(program: &str, args: &[&str], env: &[(&str, &str)], code: i32, texts: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new(program)
        .args(args)
        .envs(env.iter().copied())
        .current_dir(dir.path())
        .output()
        .unwrap();
    let said = text(&output);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {said}");
    for t in texts {
        assert!(said.contains(t), "{args:?} should say '{t}': {said}");
    }
    assert!(!said.contains("panicked"), "{said}");
    // A wrong call starts nothing, so that there are no logs.
    assert!(code != 2 || !dir.path().join("target").exists(), "{args:?}");
}

#[test]
fn mistakes_are_named_with_what_to_change_and_end_with_code_2() {
    let dir = tempfile::tempdir().unwrap();
    let small = dir.path().join("small.txt");
    std::fs::write(&small, b"too small").unwrap();
    let small = small.to_str().unwrap();
    refused(
        DILOCO,
        &["--data", "/nonexistent/book.txt"],
        &[],
        2,
        &["/nonexistent/book.txt"],
    );
    refused(DILOCO, &["--data", small], &[], 2, &["9 bytes", "need at least"]);
    refused(
        DILOCO,
        &["--fragments", "3"],
        &[],
        2,
        &["not a multiple of fragments 3", "15 and 18"],
    );
    refused(DILOCO, &["--delay", "8"], &[], 2, &["delay 8 must be smaller"]);
    refused(
        DILOCO,
        &["--replicas", "1", "--kill", "0@3"],
        &[],
        2,
        &["second replica"],
    );
    refused(DILOCO, &["--kill", "7@3"], &[], 2, &["replica 7", "0 to 1"]);
    refused(DILOCO, &["--kill", "1@40"], &[], 2, &["step 40", "1 to 39"]);
    refused(DILOCO, &["--kill", "x"], &[], 2, &["REPLICA@STEP"]);
    refused(DILOCO, &["--quantize", "int9"], &[], 2, &["int9", "known: int8"]);
    refused(DILOCO, &["--error-feedback"], &[], 2, &["--quantize"]);
    refused(
        DILOCO,
        &["--backend", "nope"],
        &[],
        2,
        &["no backend 'nope'", "cpu:gloo"],
    );
    refused(
        DDP,
        &["--option", "transprot=tcp"],
        &[],
        2,
        &["hint:transprot (do you mean hint:transport?)", "hint:connections"],
    );
    refused(
        DILOCO,
        &["--option", "min_ctas=4"],
        &[],
        2,
        &["'gloo' does not honour min_ctas"],
    );
    refused(DDP, &["--steps", "0"], &[], 2, &["--steps"]);
    refused(
        DILOCO,
        &["replica"],
        &[],
        2,
        &["OXCCL_LIGHTHOUSE", "oxccl launch"],
    );
}

#[test]
fn an_operation_that_is_not_offered_ends_the_run_at_once_with_its_own_text_and_not_the_last_runs() {
    let dir = tempfile::tempdir().unwrap();
    let begun = Instant::now();
    // The second run in the same folder: what it says is its own cause, not that of the first.
    for step in [40, 20] {
        let output = Command::new(DDP)
            .args(["--no-kill", "--time-limit-s", "120", "--out"])
            .arg(dir.path())
            .env("OXCCL_CHAOS_REFUSE", format!("1@{step}"))
            .output()
            .unwrap();
        let said = text(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("error: "), "{said}");
        let causes: Vec<bool> = [40, 20]
            .iter()
            .map(|at| said.contains(&format!("no all-reduce at step {at}")))
            .collect();
        assert_eq!(causes, [step == 40, step == 20], "{said}");
        assert!(said.contains("replica 1: exit code 2"), "{said}");
    }
    // Far below the time limit of a step (300 s) and of the run.
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
}

#[test]
fn a_replica_that_cannot_go_on_leaves_and_the_other_one_finishes_without_it() {
    let lighthouse = LighthouseServer::start(LighthouseConfig {
        bind: "127.0.0.1:0".into(),
        min_replicas: 1,
        initial_replicas: Some(2),
        join_timeout: Duration::from_secs(60),
        ..LighthouseConfig::default()
    })
    .unwrap();
    let begun = Instant::now();
    let replicas = [0, 1].map(|replica: u32| {
        Command::new(DDP)
            .args(["replica", "--steps", "300"])
            .env("OXCCL_LIGHTHOUSE", lighthouse.address())
            .env("OXCCL_REPLICA", replica.to_string())
            .envs([("OXCCL_REPLICAS", "2"), ("RAYON_NUM_THREADS", "1")])
            .env("OXCCL_CHAOS_REFUSE", "1@40")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    });
    let [other, refused] = replicas.map(|r| r.wait_with_output().unwrap());
    let said = text(&refused);
    assert_eq!(refused.status.code(), Some(2), "{said}");
    assert!(said.contains("no all-reduce at step 40"), "{said}");
    assert!(other.status.success(), "{}", text(&other));
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
}

#[test]
fn a_lighthouse_that_cannot_be_reached_is_an_error_that_says_so() {
    let env = [
        ("OXCCL_LIGHTHOUSE", "http://127.0.0.1:9"),
        ("OXCCL_REPLICA", "0"),
        ("OXCCL_REPLICAS", "2"),
        ("RAYON_NUM_THREADS", "1"),
    ];
    refused(
        DDP,
        &["replica"],
        &env,
        1,
        &["127.0.0.1:9", "is the lighthouse running"],
    );
}

#[test]
fn one_replica_alone_trains_and_says_that_none_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let alone = ["--rounds", "40", "--replicas", "1"];
    let (output, report) = run(DILOCO, dir.path(), &[&SMALL[2..], &alone].concat());
    assert!(output.status.success(), "{}", text(&output));
    assert!(text(&output).contains("none is killed"));
    assert_eq!(report.unwrap()["ok"], true);
}

/// A variable that no backend can take is not looked at where the command line says otherwise, in the replicas too.
#[test]
fn options_reach_the_backend_of_every_rank_before_the_variables() {
    let run = |args: &[&str]| {
        let dir = tempfile::tempdir().unwrap();
        let small = ["--replicas", "1", "--ranks-per-replica", "2", "--rounds", "2"];
        let output = Command::new(DILOCO)
            .args([&small, &SMALL[2..], args].concat())
            .args(["--time-limit-s", "120", "--out"])
            .arg(dir.path())
            .env("OXCCL_GLOO_TRANSPORT", "pigeons")
            .output()
            .unwrap();
        (output.status.code(), text(&output))
    };
    let (code, said) = run(&[
        "--option",
        "Transport=tcp",
        "--option",
        "minCtas=1",
        "--option",
        "lenient=1",
    ]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("which are dropped: min_ctas"), "{said}");
    let (code, said) = run(&[]);
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.contains("option transport is 'pigeons'; it can be auto, tcp or shm"),
        "{said}"
    );
}

#[test]
fn one_step_is_a_run_and_says_that_none_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let (output, report) = run(DILOCO, dir.path(), &[&["--rounds", "1"], &SMALL[2..]].concat());
    assert!(output.status.success(), "{}", text(&output));
    assert!(text(&output).contains("one step only"), "{}", text(&output));
    assert_eq!(report.unwrap()["ok"], true);
    refused(
        DILOCO,
        &["--rounds", "1", "--kill", "1@1"],
        &[],
        2,
        &["2 steps or more"],
    );
}

/// The report is in its file; what cannot be printed is an error, not a panic.
#[test]
fn a_full_standard_output_is_an_error_that_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let full = || std::fs::File::options().write(true).open("/dev/full").unwrap();
    let start = |both: bool| {
        let mut command = Command::new(DILOCO);
        command
            .args(&SMALL[2..])
            .args(["--rounds", "20", "--replicas", "1", "--out"])
            .arg(dir.path());
        if both {
            command.stderr(full());
        }
        command.stdout(full()).output().unwrap()
    };
    let output = start(false);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("write to standard output") && !said.contains("panicked"),
        "{said}"
    );
    assert!(dir.path().join("report.json").exists());
    assert_eq!(start(true).status.code(), Some(1));
}
