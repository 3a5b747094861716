//! Nothing is left behind. One test, alone on its resources: counting threads and descriptors tolerates no neighbours.

use std::process::Command;

use ftcore::{DType, ProcessGroup, ProcessGroupExt, ReduceOp, Tensor};

use crate::ranks::{eventually, soon, with_groups};

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task")
        .unwrap()
        .filter_map(|t| std::fs::read_to_string(t.ok()?.path().join("comm")).ok())
        .filter(|name| name.starts_with("ox-"))
        .count()
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Runs in a process of its own, see below.
#[test]
#[ignore = "run by no_thread_and_no_socket_is_left_after_any_kind_of_end in a process of its own"]
fn alone() {
    with_groups(1, |_, group| group.barrier().unwrap());
    let before = descriptors();
    for end in ["shutdown", "drop", "abort", "peer abort"] {
        let finished = std::sync::Barrier::new(3);
        with_groups(3, |rank, group| {
            let work = group
                .allreduce(Tensor::zeros(DType::F32, 10_000), ReduceOp::Sum)
                .unwrap();
            work.wait(soon()).unwrap();
            if end.ends_with("abort") {
                finished.wait(); // else the abort may rightly hit a rank that is still in the all-reduce
            }
            match end {
                "shutdown" => group.shutdown(soon()).unwrap(),
                "drop" => drop(group),
                "abort" => {
                    group.abort("the end");
                    eventually("the end of the threads", || threads() == 0);
                }
                _ if rank == 1 => group.abort("the end"),
                _ => eventually("the news", || group.error().is_some()),
            }
        });
        eventually("the end of the threads", || threads() == 0);
        eventually("the end of the sockets", || descriptors() <= before);
    }
}

#[test]
fn no_thread_and_no_socket_is_left_after_any_kind_of_end() {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "resources::alone", "--ignored", "--test-threads=1"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}
