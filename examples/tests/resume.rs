//! The loss of everything: the whole job, lighthouse included, is ended with SIGKILL, and the same command goes on from the last
//! whole checkpoint; the end has the same bits as a run that was never stopped. Damaged checkpoints, those of another run, and
//! a disk without room.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

const DILOCO: &str = env!("CARGO_BIN_EXE_train_diloco");
const DDP: &str = env!("CARGO_BIN_EXE_train_ddp");

/// A small model on the real text, long enough to be killed in the middle.
const SMALL: &str =
    "--rounds 120 --sync-every 4 --d-model 32 --layers 2 --seq 32 --batch 2 --no-kill --checkpoint-every 5";

/// One job: a program, its options and its folder.
struct Job {
    program: &'static str,
    options: Vec<String>,
    folder: tempfile::TempDir,
}

impl Job {
    fn new(program: &'static str, options: &[&str]) -> Self {
        let words = options.iter().flat_map(|o| o.split_whitespace());
        Self {
            program,
            options: words.map(str::to_owned).collect(),
            folder: tempfile::tempdir().unwrap(),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The command, always the same one.
    fn command(&self) -> Command {
        let mut command = Command::new(self.program);
        command
            .args(&self.options)
            .args(["--time-limit-s", "120", "--out"]);
        command
            .arg(self.path("out"))
            .arg("--json")
            .arg(self.path("result.json"));
        command.arg("--checkpoint-dir").arg(self.path("checkpoints"));
        command
    }

    /// The steps of a replica's checkpoints.
    fn steps(&self, replica: u32) -> Vec<i64> {
        checkpoint::steps(&self.path("checkpoints"), replica)
            .unwrap()
            .into_iter()
            .map(|step| step.0)
            .collect()
    }

    fn file(&self, replica: u32, step: i64) -> PathBuf {
        self.path("checkpoints")
            .join(format!("replica-{replica}/step-{step:012}.safetensors"))
    }

    /// Starts it and ends all of it with SIGKILL once both replicas have a checkpoint of `step` or a later one.
    fn kill_at(&self, step: i64) {
        let mut driver: Child = self
            .command()
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let deadline = Instant::now() + Duration::from_secs(100);
        let is_there = |r: u32| self.steps(r).last().is_some_and(|s| *s >= step);
        while !(is_there(0) && is_there(1)) {
            assert!(Instant::now() < deadline, "no checkpoint of step {step}");
            assert!(driver.try_wait().unwrap().is_none(), "ended before step {step}");
            std::thread::park_timeout(Duration::from_millis(5));
        }
        // Its children, the lighthouse among them, die with it.
        driver.kill().unwrap();
        driver.wait().unwrap();
    }

    /// Runs it to its end; what it said and its report.
    fn finish(&self) -> (String, Value) {
        self.end(self.command().output().unwrap())
    }

    fn end(&self, output: Output) -> (String, Value) {
        let said = text(&output);
        assert!(output.status.success(), "{said}");
        let report: Value = serde_json::from_slice(&fs::read(self.path("result.json")).unwrap()).unwrap();
        assert_eq!(report["ok"], true, "{report:#}");
        (said, report)
    }
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout)
}

fn flip_a_bit(file: &Path) {
    let mut bytes = fs::read(file).unwrap();
    let middle = bytes.len() / 2;
    *bytes.get_mut(middle).unwrap() ^= 1;
    fs::write(file, bytes).unwrap();
}

fn truncate(file: &Path) {
    let bytes = fs::read(file).unwrap();
    fs::write(file, &bytes[..bytes.len() / 3]).unwrap();
}

/// What the two replicas computed: the hash of the parameters, the losses.
fn outcome(report: &Value) -> Vec<String> {
    let mut all = vec![report["hash"].to_string()];
    for figures in report["figures"].as_array().unwrap() {
        all.push(figures["train_loss"].to_string());
        all.push(figures["heldout_loss"].to_string());
    }
    assert_eq!(all.len(), 5, "{report:#}");
    all
}

/// Inner steps that replica 0 made in this run.
fn made(report: &Value) -> u64 {
    report["figures"][0]["inner_steps"].as_u64().unwrap()
}

#[test]
fn a_job_that_was_killed_as_a_whole_goes_on_and_ends_with_the_bits_of_one_never_stopped() {
    let whole = Job::new(DILOCO, &[SMALL]).finish().1;
    let job = Job::new(DILOCO, &[SMALL]);
    job.kill_at(30);
    job.kill_at(60);
    // The newest of each replica is damaged, in different ways: found, said, and the one before is used.
    let newest = [0, 1].map(|r| *job.steps(r).last().unwrap());
    flip_a_bit(&job.file(0, newest[0]));
    truncate(&job.file(1, newest[1]));
    let (said, report) = job.finish();
    for (replica, step) in [(0, newest[0]), (1, newest[1])] {
        let file = job.file(replica, step);
        let line = said
            .lines()
            .find(|l| l.contains("a damaged checkpoint is left out") && l.contains(file.to_str().unwrap()));
        assert!(line.is_some_and(|l| l.contains("is taken instead")), "{said}");
    }
    assert_eq!(outcome(&report), outcome(&whole));
    // It did go on: about half of the inner steps were left.
    assert!(made(&report) < made(&whole) * 7 / 10, "{report:#}");
    assert!(made(&report) > 0, "{report:#}");
    // The last one is the end; done again, the command only reports.
    assert_eq!(job.steps(0).last(), job.steps(1).last());
    assert_eq!(job.steps(0).len(), 3);
    let again = job.finish().1;
    assert_eq!((outcome(&again), made(&again)), (outcome(&whole), 0));
}

#[test]
fn rounds_in_flight_and_residuals_of_rounding_are_in_the_checkpoint() {
    let options = [SMALL, "--eager --delay 0 --mixing 0 --quantize int2"];
    let whole = Job::new(DILOCO, &options).finish().1;
    let job = Job::new(DILOCO, &options);
    job.kill_at(50);
    let report = job.finish().1;
    assert_eq!(outcome(&report), outcome(&whole));
    assert!(made(&report) < made(&whole), "{report:#}");
}

#[test]
fn replicas_that_all_die_under_a_living_lighthouse_go_on_from_their_checkpoints() {
    let job = Job::new(DILOCO, &[SMALL]);
    let log = job.path("driver.log");
    let mut driver = job
        .command()
        .stdout(Stdio::null())
        .stderr(fs::File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(100);
    while ![0, 1]
        .iter()
        .all(|r| job.steps(*r).last().is_some_and(|s| *s >= 30))
    {
        assert!(Instant::now() < deadline && driver.try_wait().unwrap().is_none());
        std::thread::park_timeout(Duration::from_millis(5));
    }
    let said = fs::read_to_string(&log).unwrap();
    let processes: Vec<&str> = said
        .lines()
        .filter_map(|l| Some(l.split_once(" started, process ")?.1.trim()))
        .collect();
    assert_eq!(processes.len(), 2, "{said}");
    let killed = Command::new("kill")
        .arg("-KILL")
        .args(processes)
        .status()
        .unwrap();
    assert!(killed.success());
    let end = driver.wait().unwrap();
    let said = fs::read_to_string(&log).unwrap();
    let report: Value = serde_json::from_slice(&fs::read(job.path("result.json")).unwrap()).unwrap();
    assert!(end.success() && report["ok"] == true, "{said}{report:#}");
    // Not the same bits as without the deaths: the replica that is back first goes on at once. But equal, and from the checkpoint.
    assert!(report["hash"].is_string(), "{report:#}");
    for figures in report["figures"].as_array().unwrap() {
        assert_eq!(figures["incarnations"], 2, "{report:#}");
        assert!(figures["commits"].as_u64().unwrap() < 121 + 30, "{report:#}");
    }
}

#[test]
fn data_parallel_goes_on_with_the_same_bits_too() {
    let options = ["--steps 400 --no-kill --checkpoint-every 25 --quantize int4 --error-feedback"];
    let whole = Job::new(DDP, &options).finish().1;
    let job = Job::new(DDP, &options);
    job.kill_at(175);
    let report = job.finish().1;
    assert_eq!(outcome(&report), outcome(&whole));
    assert!(made(&report) <= 225 && made(&report) > 0, "{report:#}");
}

#[test]
fn a_replica_without_a_whole_checkpoint_heals_and_without_any_the_run_is_refused() {
    let job = Job::new(DILOCO, &[SMALL]);
    job.kill_at(20);
    for step in job.steps(1) {
        truncate(&job.file(1, step));
    }
    // Started only to be killed again: replica 1 must have come in by healing.
    let before = job.steps(0);
    job.kill_at(before.last().unwrap() + 20);
    for replica in [0, 1] {
        for step in job.steps(replica) {
            flip_a_bit(&job.file(replica, step));
        }
    }
    let before = [job.steps(0), job.steps(1)];
    let output = job.command().output().unwrap();
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("none of the checkpoints here is whole"), "{said}");
    // Nothing was written over what may still be looked at.
    assert_eq!([job.steps(0), job.steps(1)], before);
}

#[test]
fn a_checkpoint_of_another_run_is_refused_by_what_differs() {
    let job = Job::new(DILOCO, &[SMALL]);
    job.kill_at(10);
    let refused = |options: &[&str], parts: &[&str]| {
        let mut command = job.command();
        let words = options.iter().flat_map(|o| o.split_whitespace());
        let output = command.args(words).output().unwrap();
        let said = text(&output);
        assert_eq!(output.status.code(), Some(2), "{said}");
        for part in parts {
            assert!(said.contains(part), "'{part}' is missing in: {said}");
        }
    };
    refused(
        &["--quantize int8"],
        &["replica 0", "of another run", "--quantize int8-b64 here"],
    );
    let data = job.path("book.txt");
    fs::write(&data, "another text, of which there is much. ".repeat(1000)).unwrap();
    refused(
        &["--data", data.to_str().unwrap()],
        &["nothing of that there", "--data "],
    );
    let mut smaller = Job::new(DILOCO, &[&SMALL.replace("--d-model 32", "--d-model 16")]);
    smaller.folder = job.folder;
    let said = text(&smaller.command().output().unwrap());
    assert!(said.contains("--d-model 32 there, --d-model 16 here"), "{said}");
}

#[test]
fn without_room_for_checkpoints_training_goes_on_and_says_so_each_time() {
    let job = Job::new(
        DILOCO,
        &[&SMALL.replace("--checkpoint-every 5", "--checkpoint-every 30")],
    );
    let command = job.command();
    let mut limited = Command::new("sh");
    // Blocks of 512 bytes. Shared memory has a size too, and is under the same limit.
    limited
        .args(["-c", "ulimit -f 600; exec \"$0\" \"$@\""])
        .arg(job.program);
    limited
        .args(command.get_args())
        .env("OXCCL_GLOO_TRANSPORT", "tcp");
    let (said, report) = job.end(limited.output().unwrap());
    assert_eq!(report["figures"][0]["incarnations"], 1, "{report:#}");
    let failures: Vec<&str> = said
        .lines()
        .filter(|l| l.contains("replica 0: a checkpoint could not be written; training goes on"))
        .collect();
    // Of steps 30, 60, 90, 120 and the end.
    assert_eq!(failures.len(), 5, "{said}");
    for line in failures {
        for part in [
            " bytes needed",
            " free",
            "files limited to 307200",
            "replica-0/step-",
        ] {
            assert!(line.contains(part), "{line}");
        }
    }
    for replica in 0..2 {
        let left = fs::read_dir(job.path("checkpoints").join(format!("replica-{replica}"))).unwrap();
        assert_eq!(left.count(), 1, "only the lock file is there");
    }
}
