//! Runs a program over oneCCL with a kill, and looks at its report and its logs.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::process::{Command, ExitCode};

use ftcore::Device;
use libtest_mimic::{Arguments, Completion, Trial};
use serde_json::Value;

/// One trial.
pub(crate) struct Row {
    pub(crate) name: &'static str,
    pub(crate) program: &'static str,
    pub(crate) arguments: &'static str,
    /// The step in which replica 1 is killed.
    pub(crate) killed_at: i64,
    /// What every replica's log must say, so that it is not gloo in disguise.
    pub(crate) log: &'static str,
    /// Runs with `OXCCL_LONG` only.
    pub(crate) is_long: bool,
}

/// Runs the rows if oneCCL can be used on `device`; otherwise they are ignored with the reason.
pub(crate) fn run(device: &Device, rows: &'static [Row]) -> ExitCode {
    oxccl::backend::init();
    let usable = oxccl::backend::find(Some("xccl"), device).and_then(|b| b.factory.probe());
    let reason = usable.err().map(|e| e.to_string());
    let long = std::env::var_os("OXCCL_LONG").is_some();
    let trials = rows.iter().map(|row| {
        let left_out = || (row.is_long && !long).then(|| "takes long: OXCCL_LONG=1 runs it".to_owned());
        let reason = reason.clone().or_else(left_out);
        Trial::ignorable_test(row.name, move || {
            if let Some(reason) = reason {
                return Ok(Completion::ignored_with(reason));
            }
            survives(row);
            Ok(Completion::Completed)
        })
    });
    let mut arguments = Arguments::from_args();
    // Four processes of oneCCL at once are enough for two cores.
    arguments.test_threads = Some(1);
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}

fn survives(row: &Row) {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("result.json");
    let output = Command::new(row.program)
        .args(["--time-limit-s", "200", "--out"])
        .arg(folder.path())
        .arg("--json")
        .arg(&json)
        .args(row.arguments.split_whitespace())
        .env(
            "OXCCL_LOG",
            "oxccl=info,oxccl_examples=info,oxccl_isolate=info,warn",
        )
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
    assert!(
        death["healed_step"].as_i64().unwrap() >= row.killed_at,
        "{report:#}"
    );
    // Not gloo in disguise: each replica's log says what runs where.
    for log in ["replica-0.incarnation-0.log", "replica-1.incarnation-0.log"] {
        let log = std::fs::read_to_string(folder.path().join(log)).unwrap();
        assert!(
            log.contains("runs in a child process") && log.contains(row.log) && log.contains("xccl"),
            "{log}"
        );
    }
    println!(
        "the survivor stood still for {} ms, the killed one committed again after {} ms",
        death["stall"]["stall_ms"], death["restart_to_commit_ms"]
    );
}
