//! The two programs over the real oneCCL: two replica groups, one of them killed inside a reduction and started again; all end
//! bitwise equal. oneCCL has no abort, so each replica's group runs in a child process by itself, without a flag.
//!
//! Where oneCCL is not there the tests are ignored with the probe's reason. `cargo xtask oneccl` prepares it.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::process::{Command, ExitCode};

use libtest_mimic::{Arguments, Completion, Trial};
use serde_json::Value;

const DILOCO: &str = env!("CARGO_BIN_EXE_train_diloco");
const DDP: &str = env!("CARGO_BIN_EXE_train_ddp");

/// Small, on the real data all the same.
const DILOCO_ARGUMENTS: &str =
    "--rounds 200 --sync-every 8 --d-model 32 --layers 2 --seq 32 --batch 2 --kill 1@60";
const DDP_ARGUMENTS: &str = "--replicas 2 --kill 1@300";

fn main() -> ExitCode {
    oxccl::backend::init();
    let usable = oxccl::backend::find(Some("xccl"), &ftcore::Device::CPU).and_then(|b| b.factory.probe());
    let reason = usable.err().map(|e| e.to_string());
    let rows: [(&str, &str, &str, i64); 2] = [
        (
            "train_diloco::survives_a_kill_and_ends_equal",
            DILOCO,
            DILOCO_ARGUMENTS,
            60,
        ),
        (
            "train_ddp::survives_a_kill_and_ends_equal",
            DDP,
            DDP_ARGUMENTS,
            300,
        ),
    ];
    let trials = rows.map(|(name, program, arguments, killed_at)| {
        let reason = reason.clone();
        Trial::ignorable_test(name, move || {
            if let Some(reason) = reason {
                return Ok(Completion::ignored_with(reason));
            }
            survives(program, arguments, killed_at);
            Ok(Completion::Completed)
        })
    });
    let mut arguments = Arguments::from_args();
    // Four processes of oneCCL at once are enough for two cores.
    arguments.test_threads = Some(1);
    libtest_mimic::run(&arguments, trials.into()).exit_code()
}

fn survives(program: &str, arguments: &str, killed_at: i64) {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("result.json");
    let output = Command::new(program)
        .args(["--backend", "xccl", "--time-limit-s", "200", "--out"])
        .arg(folder.path())
        .arg("--json")
        .arg(&json)
        .args(arguments.split_whitespace())
        .env("OXCCL_LOG", "oxccl=info,isolate=info,warn")
        .output()
        .unwrap();
    let said =
        String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}: {said}", output.status);
    let report: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    // `ok` is: every replica finished, and all with the same hash of the parameters.
    assert_eq!(report["ok"], true, "{report:#}");
    assert!(report["hash"].is_string(), "{report:#}");
    let deaths = report["deaths"].as_array().unwrap();
    assert_eq!(deaths.len(), 1, "only the one that was killed died: {report:#}");
    let death = deaths.first().unwrap();
    assert_eq!(
        (&death["replica"], &death["exit"]),
        (&Value::from(1), &Value::from("SIGKILL")),
        "{report:#}"
    );
    assert!(death["healed_step"].as_i64().unwrap() >= killed_at, "{report:#}");
    // Not gloo in disguise: each replica's log says what runs where.
    for log in ["replica-0.life-0.log", "replica-1.life-0.log"] {
        let log = std::fs::read_to_string(folder.path().join(log)).unwrap();
        assert!(
            log.contains("runs in a child process") && log.contains("xccl"),
            "{log}"
        );
    }
    println!(
        "the survivor stood still for {} ms, the killed one committed again after {} ms",
        death["stall"]["stall_ms"], death["restart_to_commit_ms"]
    );
}
