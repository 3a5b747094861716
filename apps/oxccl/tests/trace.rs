//! `oxccl trace` over records of real processes: what went wrong among them is named.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use oxccl::core::{
    Collective, Configuration, Epoch, FileStore, GroupOptions, ProcessGroup as _, ProcessGroupExt as _,
    ReduceOp, SubmitOptions, Tensor, deadline_in,
};
use oxccl::gloo::GlooGroup;
use rustix::process::{Signal, getpid, kill_process};

/// What a rank does, and which it is; set for the processes that the tests start.
const SCENE: &str = "OXCCL_TEST_SCENE";
const RANK: &str = "OXCCL_TEST_RANK";
const FOLDER: &str = "OXCCL_TEST_FOLDER";
const WORLD: u32 = 3;
/// The rank that does something else, and at which operation.
const ODD: u32 = 1;
const AT: u64 = 12;

/// Not a test of its own: what the ranks run.
#[test]
fn as_a_rank() {
    let Ok(scene) = std::env::var(SCENE) else { return };
    let rank: u32 = std::env::var(RANK).unwrap().parse().unwrap();
    let folder = PathBuf::from(std::env::var(FOLDER).unwrap());
    oxccl::flight_recorder::dump_on_signal().unwrap();
    let group = GlooGroup::new("dp", GroupOptions::default()).unwrap();
    group
        .configure(Configuration {
            store: Arc::new(FileStore::open(folder.join("store")).unwrap()),
            prefix: "trace".into(),
            name: "dp".into(),
            epoch: Epoch(1),
            rank,
            world_size: WORLD,
            deadline: deadline_in(Duration::from_secs(60)),
            cancel: Default::default(),
        })
        .unwrap();
    for seq in 0..20 {
        let odd = rank == ODD && seq == AT;
        let all_reduce = |n: usize| Collective::AllReduce {
            tensors: vec![Tensor::from_vec(vec![1f32; n])],
            op: ReduceOp::Sum,
        };
        let broadcast = |root| Collective::Broadcast {
            tensors: vec![Tensor::from_vec(vec![1f32; 8])],
            root,
        };
        // A rank writes its record once the group fails, so the others are inside before one does something else.
        let meets = seq == AT && matches!(scene.as_str(), "count" | "operation" | "root" | "skip" | "killed");
        if meets && odd {
            let inside = |rank| folder.join(format!("inside-{rank}")).exists();
            let until = deadline_in(Duration::from_secs(60));
            while !(0..WORLD).all(|rank| rank == ODD || inside(rank)) {
                assert!(Instant::now() < until, "the others do not come");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        let op = match (scene.as_str(), odd) {
            ("count", true) => all_reduce(9),
            ("operation", true) => Collective::Barrier,
            ("root", _) => broadcast(if odd { 2 } else { 0 }),
            ("skip", _) if rank == ODD && seq >= AT => broadcast(0),
            ("killed", true) => {
                kill_process(getpid(), Signal::KILL).unwrap();
                return;
            }
            ("hangs", true) => loop {
                std::thread::park();
            },
            ("late", true) => {
                // Until the others have given up.
                let until = deadline_in(Duration::from_secs(60));
                while group.error().is_none() {
                    assert!(Instant::now() < until, "the others wait still");
                    std::thread::sleep(Duration::from_millis(5));
                }
                all_reduce(8)
            }
            _ => all_reduce(8),
        };
        let limit = match scene.as_str() {
            "hangs" | "late" => Duration::from_secs(3),
            _ => Duration::from_secs(60),
        };
        let options = SubmitOptions::by(deadline_in(limit));
        let is_done = if meets && !odd {
            let work = group.run(op, options);
            std::fs::write(folder.join(format!("inside-{rank}")), "").unwrap();
            work.is_ok_and(|work| work.wait_done().is_ok())
        } else {
            group.run_blocking(op, options).is_ok()
        };
        if !is_done {
            return;
        }
    }
    if scene == "well" {
        oxccl::core::flight_recorder::dump("the end").unwrap();
    }
    group.shutdown(deadline_in(Duration::from_secs(30))).unwrap();
}

fn start(scene: &str, rank: u32, folder: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "as_a_rank", "--nocapture"])
        .env(SCENE, scene)
        .env(RANK, rank.to_string())
        .env(FOLDER, folder)
        .env("OXCCL_FLIGHT_RECORDER_DIR", folder.join("records"))
        .env_remove("OXCCL_FLIGHT_RECORDER")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

fn records(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder.join("records")) else {
        return Vec::new();
    };
    let paths = entries.map(|entry| entry.unwrap().path());
    paths
        .filter(|path| path.extension().is_some_and(|e| e == "json"))
        .collect()
}

/// Runs the ranks of a scene to their end; the one that hangs is asked for its record, and ended.
fn run(scene: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut ranks: Vec<Child> = (0..WORLD).map(|rank| start(scene, rank, folder.path())).collect();
    for (rank, child) in (0..WORLD).zip(&mut ranks) {
        if (scene, rank) != ("hangs", ODD) {
            child.wait().unwrap();
        }
    }
    if scene == "hangs" {
        let child = &mut ranks[ODD as usize];
        // The second one replaces the first.
        for _ in 0..2 {
            let (code, text) = dumped(child.id());
            assert_eq!(code, Some(0), "{text}");
            assert!(Path::new(text.trim()).exists(), "{text}");
        }
        assert_eq!(records(folder.path()).len(), WORLD as usize);
        child.kill().unwrap();
        child.wait().unwrap();
    }
    folder
}

/// What `oxccl trace dump` says of a process, and its exit code.
fn dumped(pid: u32) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_oxccl"))
        .args(["trace", "dump", "--wait-s", "60", &pid.to_string()])
        .output()
        .unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&text).into_owned())
}

#[test]
fn a_process_that_the_signal_would_end_is_left_alone() {
    let mut child = Command::new("sleep").arg("600").spawn().unwrap();
    let (code, text) = dumped(child.id());
    assert!(code.is_some_and(|c| c != 0), "{text}");
    assert!(text.contains("no handler for SIGUSR2"), "{text}");
    assert!(child.try_wait().unwrap().is_none(), "it was ended");
    child.kill().unwrap();
    child.wait().unwrap();
    let (_, text) = dumped(u32::MAX / 4);
    assert!(text.contains("there is no process"), "{text}");
}

/// What `oxccl trace merge` says of a scene, and its exit code.
fn merged(folder: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_oxccl"))
        .args(["trace", "merge"])
        .args(records(folder))
        .args(arguments)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (
        output.status.code(),
        text + &String::from_utf8_lossy(&output.stderr),
    )
}

fn names(scene: &str, expected: &[&str]) {
    let folder = run(scene);
    let (code, text) = merged(folder.path(), &[]);
    let first = text.lines().next().unwrap_or_default();
    for part in expected {
        assert!(first.contains(part), "{scene}: {part} in {text}");
    }
    assert_eq!(code, Some(1), "{scene}: {text}");
}

#[test]
fn a_rank_with_another_count_is_named() {
    names(
        "count",
        &[
            "rank 1 entered all_reduce #12 of group dp (epoch 1) with 9 elements",
            "the others with 8",
        ],
    );
}

#[test]
fn a_rank_with_another_operation_is_named() {
    names(
        "operation",
        &[
            "rank 1 entered barrier as #12 of group dp",
            "the others entered all_reduce(f32, 8 elements, sum)",
        ],
    );
}

#[test]
fn a_rank_with_another_root_is_named() {
    names(
        "root",
        &["rank 1 entered broadcast #12 of group dp (epoch 1) with root 2, the others with root 0"],
    );
}

#[test]
fn a_rank_that_skips_an_operation_is_named() {
    names(
        "skip",
        &["rank 1 entered broadcast(f32, 8 elements, root 0) as #12 of group dp"],
    );
}

#[test]
fn a_rank_that_was_killed_has_no_record_and_is_named() {
    names(
        "killed",
        &["there is no record of rank 1", "all_reduce #12 of group dp"],
    );
}

#[test]
fn a_rank_that_hangs_gives_its_record_on_a_signal_and_is_named() {
    names(
        "hangs",
        &["rank 1 never entered all_reduce #12 of group dp (epoch 1); its last was all_reduce #11"],
    );
}

#[test]
fn a_rank_that_comes_too_late_is_named() {
    names(
        "late",
        &["rank 1 came to all_reduce #12 of group dp", "when it had failed"],
    );
}

#[test]
fn a_run_that_went_well_agrees_and_is_written_for_other_tools() {
    let folder = run("well");
    let (chrome, torch) = (folder.path().join("chrome.json"), folder.path().join("torch"));
    let arguments = [
        "--chrome",
        chrome.to_str().unwrap(),
        "--torch",
        torch.to_str().unwrap(),
    ];
    let (code, text) = merged(folder.path(), &arguments);
    assert_eq!(code, Some(0), "{text}");
    assert!(
        text.contains("the records agree") && text.contains("records of ranks 0, 1, 2 of 3"),
        "{text}"
    );
    let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(chrome).unwrap()).unwrap();
    let slices = trace["traceEvents"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|e| e["ph"] == "X");
    assert_eq!(slices.count(), 20 * WORLD as usize);
    for rank in 0..WORLD {
        assert!(torch.join(format!("rank_{rank}")).is_file());
    }
    let shown = Command::new(env!("CARGO_BIN_EXE_oxccl"))
        .args(["trace", "show", "--last", "3"])
        .args(records(folder.path()).first())
        .output()
        .unwrap();
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(
        shown.contains("group dp (epoch 1)") && shown.contains("#19"),
        "{shown}"
    );
    assert_eq!(
        shown.matches("all_reduce(f32, 8 elements, sum)").count(),
        3,
        "{shown}"
    );
}

#[test]
fn what_cannot_be_written_is_no_divergence() {
    let folder = run("well");
    for what in ["--chrome", "--torch"] {
        let (code, text) = merged(folder.path(), &[what, "/proc/nowhere/x"]);
        assert_eq!(code, Some(2), "{text}");
        assert!(text.contains("/proc/nowhere/x"), "{text}");
    }
}

#[test]
fn what_is_no_record_is_named_with_exit_code_2() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("other.json");
    std::fs::write(&file, "{}").unwrap();
    for arguments in [
        vec!["show", file.to_str().unwrap()],
        vec!["merge", "/nowhere/at/all.json"],
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_oxccl"))
            .arg("trace")
            .args(&arguments)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(arguments[1]), "{text}");
    }
}
