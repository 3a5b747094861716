//! The programs in `examples/`, each run as its first lines say.

#![allow(clippy::unwrap_used)]

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};

/// Beside the folder of this test's program; `cargo test` builds them.
fn example(name: &str) -> PathBuf {
    let here = std::env::current_exe().unwrap();
    here.ancestors().nth(2).unwrap().join("examples").join(name)
}

fn said(output: &Output) -> String {
    let (out, err) = (&output.stdout, &output.stderr);
    format!("{}{}", String::from_utf8_lossy(out), String::from_utf8_lossy(err))
}

/// What the ranks of a world said, each with its exit code checked. They find each other as those of an MPI launcher on one host do.
fn world(name: &str, ranks: u32) -> Vec<String> {
    world_with(name, ranks, "OXCCL_SPLIT_GROUPS", "")
}

/// [`world`], with a variable of the environment set.
fn world_with(name: &str, ranks: u32, variable: &str, value: &str) -> Vec<String> {
    let start = |rank: u32| {
        Command::new(example(name))
            .env(variable, value)
            .env("OMPI_COMM_WORLD_RANK", rank.to_string())
            .env("OMPI_COMM_WORLD_SIZE", ranks.to_string())
            .env("OMPI_COMM_WORLD_LOCAL_RANK", rank.to_string())
            .env("OMPI_COMM_WORLD_LOCAL_SIZE", ranks.to_string())
            .env_remove("MASTER_ADDR")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let children: Vec<_> = (0..ranks).map(start).collect();
    let ended = children
        .into_iter()
        .map(|child| child.wait_with_output().unwrap());
    ended
        .map(|output| {
            assert!(output.status.success(), "{}", said(&output));
            said(&output)
        })
        .collect()
}

/// What two replicas of so many ranks said under `oxccl launch`.
fn replicas(name: &str, ranks: &str) -> String {
    let logs = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_oxccl"))
        .args([
            "launch",
            "--quiet",
            "--replicas",
            "2",
            "--ranks-per-replica",
            ranks,
        ])
        .args(["--timeout-s", "120", "--run-dir"])
        .arg(logs.path())
        .arg("--")
        .arg(example(name))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let files = std::fs::read_dir(logs.path()).unwrap();
    let texts = files.filter_map(|file| std::fs::read_to_string(file.unwrap().path()).ok());
    texts.fold(said(&output), |all, text| all + &text)
}

fn count(text: &str, line: &str) -> usize {
    text.lines().filter(|l| l.contains(line)).count()
}

#[test]
fn all_reduce_sums_over_the_processes() {
    for (rank, text) in world("all_reduce", 2).iter().enumerate() {
        assert_eq!(text.trim(), format!("rank {rank} of 2 has [3.0, 3.0, 3.0, 3.0]"));
    }
}

#[test]
fn overlapped_reductions_all_arrive() {
    for (rank, text) in world("overlap", 2).iter().enumerate() {
        for layer in 0..4 {
            let line = format!("rank {rank}: layer {layer} has Some({}.5)", layer);
            assert_eq!(count(text, &line), 1, "{text}");
        }
    }
}

#[test]
fn even_and_odd_ranks_have_sums_of_their_own() {
    // Groups of their own, and parts of the world's.
    for splits in ["0", "1"] {
        let texts = world_with("sub_groups", 4, "OXCCL_SPLIT_GROUPS", splits);
        for (rank, text) in texts.iter().enumerate() {
            let sum = if rank % 2 == 0 { 2 } else { 4 };
            let line = format!(
                "rank {rank} is rank {} of its group, whose ranks add up to {sum}",
                rank / 2
            );
            assert_eq!(text.trim(), line, "OXCCL_SPLIT_GROUPS={splits}");
        }
    }
}

#[test]
fn quantized_sums_send_less_and_are_close() {
    for text in world("quantized", 2) {
        let words: Vec<&str> = text.split_whitespace().collect();
        let sent: f64 = words[2].parse().unwrap();
        let worst: f64 = words[words.len() - 1].parse().unwrap();
        assert!(sent > 0.0 && sent < 0.4 * 400_000.0, "{text}");
        assert!(worst < 0.05, "{text}");
    }
}

#[test]
fn data_parallel_replicas_end_with_the_same_line() {
    let text = replicas("ddp", "1");
    assert_eq!(count(&text, "after 500 steps y = 2.000 x + 1.000"), 2, "{text}");
}

#[test]
fn sharded_replicas_end_with_the_same_parts() {
    let text = replicas("hsdp", "2");
    for line in [
        "rank 0 has [0.00, 1.00, 2.00, 3.00]",
        "rank 1 has [4.00, 5.00, 6.00, 7.00]",
    ] {
        assert_eq!(count(&text, line), 2, "{text}");
    }
}

#[test]
fn diloco_averages_the_parts_of_sharded_replicas_rank_by_rank() {
    let text = replicas("hsdp_diloco", "2");
    let of = |rank: u32| -> Vec<&str> {
        let line = format!("rank {rank} has ");
        text.lines().filter_map(|l| l.split(&line).nth(1)).collect()
    };
    // Equal across the replicas; the parts of a replica differ.
    for rank in [0, 1] {
        assert!(of(rank).len() == 2 && of(rank)[0] == of(rank)[1], "{text}");
    }
    assert_ne!(of(0), of(1), "{text}");
    assert!(count(&text, " by 2 replicas") > 0, "{text}");
}

#[test]
fn a_sharded_replica_whose_rank_is_killed_heals_rank_by_rank_and_ends_with_the_same_parts() {
    let logs = tempfile::tempdir().unwrap();
    let mut launcher = Command::new(env!("CARGO_BIN_EXE_oxccl"))
        .args(["launch", "--replicas", "2", "--ranks-per-replica", "2"])
        .args(["--timeout-s", "120", "--run-dir"])
        .arg(logs.path())
        .arg("--")
        .arg(example("hsdp"))
        .arg("1000")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // What the launcher says of its processes, and the replicas' own lines: two streams, of which the first has the process to kill.
    let messages = BufReader::new(launcher.stderr.take().unwrap());
    let (send, processes) = std::sync::mpsc::channel();
    let told = std::thread::spawn(move || {
        let lines = messages.lines().map_while(Result::ok);
        lines.fold(String::new(), |all, line| {
            if let Some((_, number)) = line
                .strip_prefix("oxccl: replica 1, rank 1, started")
                .and_then(|rest| rest.split_once("process "))
            {
                let _ = send.send(number.trim_end_matches(')').parse::<i32>().unwrap());
            }
            all + &line + "\n"
        })
    });
    let mut text = String::new();
    for line in BufReader::new(launcher.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        // Both replicas take part: now one loses a rank.
        if line.contains("[replica 0, rank 0] step 100 by 2 replicas") {
            let process = processes.recv().unwrap();
            kill_process(Pid::from_raw(process).unwrap(), Signal::KILL).unwrap();
        }
        text += &line;
        text += "\n";
    }
    let status = launcher.wait().unwrap();
    text += &told.join().unwrap();
    assert!(status.success(), "{text}");
    for (rank, part) in ["0.00, 1.00, 2.00, 3.00", "4.00, 5.00, 6.00, 7.00"]
        .iter()
        .enumerate()
    {
        assert_eq!(count(&text, &format!("rank {rank} has [{part}]")), 2, "{text}");
        // At the start one of the replicas takes the other's state over; the second time it is the one that came back.
        let again = text
            .lines()
            .filter(|l| l.starts_with(&format!("[replica 1, rank {rank}]")) && l.contains("healed"))
            .filter(|l| !l.contains("step 0 "));
        assert!(again.count() >= 1, "{text}");
    }
    assert_eq!(
        count(&text, "rank 1, ended (incarnation 0, SIGKILL)"),
        1,
        "{text}"
    );
}

#[test]
fn data_parallel_replicas_with_ndarray_end_bitwise_equal() {
    let text = replicas("ndarray_ddp", "1");
    let ends: Vec<&str> = text
        .lines()
        .filter_map(|l| l.split("parameters ").nth(1))
        .collect();
    assert!(ends.len() == 2 && ends[0] == ends[1], "{text}");
}

#[test]
fn diloco_replicas_end_with_the_same_parameters() {
    let text = replicas("diloco", "1");
    let hashes: Vec<&str> = text
        .lines()
        .filter_map(|l| l.split("global parameters ").nth(1))
        .collect();
    assert!(hashes.len() == 2 && hashes[0] == hashes[1], "{text}");
    assert!(count(&text, " by 2 replicas") > 0, "{text}");
}
