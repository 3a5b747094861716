//! Nothing is left behind, nothing spins. Each test has a process of its own: counting threads, descriptors and processor
//! time tolerates no neighbours.

use std::process::Command;

use ftcore::{Collective, DType, ProcessGroup, ProcessGroupExt, ReduceOp, SubmitOptions, Tensor};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::ranks::{configuration, eventually, group_over, soon, store, with_groups, with_groups_over};

pub(crate) fn threads() -> usize {
    std::fs::read_dir("/proc/self/task")
        .unwrap()
        .filter_map(|t| std::fs::read_to_string(t.ok()?.path().join("comm")).ok())
        .filter(|name| name.starts_with("ox-"))
        .count()
}

pub(crate) fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Mappings of shared memory in this process, and their resident kilobytes.
pub(crate) fn shared_memory() -> (usize, u64) {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut count, mut resident, mut ours) = (0, 0, false);
    for line in smaps.lines() {
        if let Some(rss) = line.strip_prefix("Rss:") {
            let kilobytes: u64 = rss.trim().trim_end_matches(" kB").parse().unwrap();
            resident += if ours { kilobytes } else { 0 };
        } else if line.contains('-') && line.contains(' ') && !line.starts_with("VmFlags") {
            let is_range = line
                .split('-')
                .next()
                .is_some_and(|a| u64::from_str_radix(a, 16).is_ok());
            if is_range {
                ours = line.contains("memfd:oxccl-gloo");
                count += usize::from(ours);
            }
        }
    }
    (count, resident)
}

/// Processor time of all engine threads so far, in clock ticks (10 ms).
fn ticks() -> u64 {
    let of = |task: std::path::PathBuf| {
        let stat = std::fs::read_to_string(task.join("stat")).ok()?;
        let (name, rest) = stat.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        let user: u64 = fields.get(11)?.parse().ok()?;
        let system: u64 = fields.get(12)?.parse().ok()?;
        name.contains("ox-gloo").then_some(user + system)
    };
    std::fs::read_dir("/proc/self/task")
        .unwrap()
        .filter_map(|t| of(t.ok()?.path()))
        .sum()
}

/// Runs in a process of its own, see below.
#[test]
#[ignore = "run by an_engine_that_waits_does_not_spin in a process of its own"]
fn waiting() {
    let meet = std::sync::Barrier::new(3);
    with_groups(3, |rank, group| {
        let mut pending = Vec::new();
        for state in ["idle", "a receive waits", "a peer runs ahead"] {
            meet.wait();
            match state {
                "a receive waits" => pending.push(
                    group
                        .recv(Tensor::zeros(DType::F32, 9), (rank + 1) % 3, 1)
                        .unwrap(),
                ),
                // Two of three: headers and payload wait on the sockets of the third.
                "a peer runs ahead" if rank != 2 => {
                    let tensor = Tensor::zeros(DType::F32, 300_000);
                    pending.push(group.all_reduce(tensor, ReduceOp::Sum).unwrap());
                }
                _ => {}
            }
            meet.wait();
            // What follows from that settles first; then nothing may move.
            std::thread::sleep(std::time::Duration::from_millis(100));
            let before = ticks();
            std::thread::sleep(std::time::Duration::from_millis(500));
            let used = ticks() - before;
            // One spinning thread alone would use 50.
            assert!(
                used <= 15,
                "while {state} the engines used {used} ticks in 500 ms"
            );
            meet.wait();
            if state == "a peer runs ahead" {
                group.abort("on to the next state");
                eventually("the notices", || group.error().is_some());
                return;
            }
        }
    });
    with_groups(3, |rank, group| {
        if rank == 2 {
            group.shutdown(soon()).unwrap();
        }
        meet.wait();
        let before = ticks();
        std::thread::sleep(std::time::Duration::from_millis(500));
        let used = ticks() - before;
        assert!(
            used <= 15,
            "after a leave the engines used {used} ticks in 500 ms"
        );
        meet.wait();
    });
}

#[test]
fn an_engine_that_waits_does_not_spin() {
    in_a_process_of_its_own("resources::waiting");
}

/// Runs in a process of its own, see below.
#[test]
#[ignore = "run by no_thread_and_no_socket_is_left_after_any_kind_of_end in a process of its own"]
fn alone() {
    // The memory of tensors that neighbours read is the process's, and stays.
    with_groups(1, |_, group| drop(group.alloc(DType::F32, 1).unwrap()));
    let before = descriptors();
    let ends = ["shutdown", "drop", "abort", "peer abort"];
    for (transport, end) in ["auto", "tcp*4"].iter().flat_map(|t| ends.map(|end| (t, end))) {
        let finished = std::sync::Barrier::new(3);
        with_groups_over(transport, 3, |rank, group| {
            let work = group
                .all_reduce(Tensor::zeros(DType::F32, 10_000), ReduceOp::Sum)
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
                _ => eventually("the notices", || group.error().is_some()),
            }
        });
        eventually("the end of the threads", || threads() == 0);
        eventually("the end of the sockets", || descriptors() <= before);
        eventually("the end of the mappings", || shared_memory() == (0, 0));
    }
}

/// Runs in a process of its own, see below.
#[test]
#[ignore = "run by a_group_costs_little_memory in a process of its own"]
fn at_rest() {
    const WORLD: u32 = 4;
    let meet = std::sync::Barrier::new(WORLD as usize);
    with_groups(WORLD, |rank, group| {
        assert_eq!(group.transport(), "shm");
        // Every ring has been used over its whole length.
        let mut data = vec![1f32; 3_000_000];
        group
            .all_reduce_slice_with(&mut data, ReduceOp::Sum, SubmitOptions::by(soon()))
            .unwrap();
        drop(data);
        meet.wait();
        if rank == 0 {
            let (mappings, resident) = shared_memory();
            let per_rank = resident / u64::from(WORLD);
            let most = 4096 + 1024 * u64::from(WORLD - 1);
            println!("{mappings} mappings, {per_rank} kB per rank of {WORLD}, allowed {most}");
            // A panic here would leave the others waiting.
            if mappings == 0 || per_rank < 512 || per_rank > most {
                eprintln!("too much memory, or none found");
                std::process::exit(1);
            }
        }
        meet.wait();
    });
}

#[test]
fn a_group_costs_little_memory() {
    in_a_process_of_its_own("resources::at_rest");
}

/// Kilobytes of this process in memory: now, or at most since the last look at that.
pub(crate) fn memory(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// Runs in a process of its own, see below.
#[test]
#[ignore = "run by large_operations_need_no_memory_beside_their_tensors in a process of its own"]
fn growth() {
    const COUNT: usize = 8 << 20;
    let whole = || Tensor::from_vec(vec![1f32; COUNT]);
    let half = || Tensor::from_vec(vec![1f32; COUNT / 2]);
    let meet = std::sync::Barrier::new(2);
    for transport in ["shm", "tcp"] {
        with_groups_over(transport, 2, |rank, group| {
            let operations: [(&str, &dyn Fn() -> Collective); 6] = [
                ("all_reduce", &|| Collective::AllReduce {
                    tensors: vec![whole()],
                    op: ReduceOp::Sum,
                }),
                ("broadcast", &|| Collective::Broadcast {
                    tensors: vec![whole()],
                    root: 0,
                }),
                ("all_gather_into", &|| Collective::AllGatherInto {
                    pairs: vec![(half(), whole())],
                }),
                ("reduce_scatter_into", &|| Collective::ReduceScatterInto {
                    pairs: vec![(whole(), half())],
                    op: ReduceOp::Sum,
                }),
                ("all_to_all_into", &|| Collective::AllToAllInto {
                    input: whole(),
                    output: whole(),
                    input_splits: Vec::new(),
                    output_splits: Vec::new(),
                }),
                ("a message each way", &|| Collective::Batch {
                    ops: vec![
                        Collective::Send {
                            tensor: whole(),
                            peer: 1 - rank,
                            tag: 0,
                        },
                        Collective::Recv {
                            tensor: whole(),
                            peer: Some(1 - rank),
                            tag: 0,
                        },
                    ],
                }),
            ];
            for (what, operation) in operations {
                let op = operation();
                meet.wait();
                let before = memory("VmRSS:");
                if rank == 0 {
                    // From here on the greatest counts.
                    std::fs::write("/proc/self/clear_refs", "5").unwrap();
                }
                meet.wait();
                let done = group.run_blocking(op, SubmitOptions::by(soon())).unwrap();
                meet.wait();
                let grown = memory("VmHWM:").saturating_sub(before);
                drop(done);
                // Of both ranks together; a tensor has 32 MiB, a ring 256 KiB, a piece off a socket as much.
                if grown > 6 << 10 {
                    eprintln!("{what} over {transport} needs {grown} kB beside its tensors");
                    std::process::exit(1);
                }
                meet.wait();
            }
        });
    }
}

#[test]
fn large_operations_need_no_memory_beside_their_tensors() {
    in_a_process_of_its_own("resources::growth");
}

/// Runs in a process of its own, see below.
#[test]
#[ignore = "run by a_pair_has_as_many_sockets_as_it_was_told in a process of its own"]
fn sockets() {
    let open = || {
        std::fs::read_dir("/proc/self/fd")
            .unwrap()
            .filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok())
            .filter(|to| to.to_string_lossy().starts_with("socket:"))
            .count()
    };
    let of = |transport: &str| {
        eventually("the end of the sockets", || open() == 0);
        let counts = with_groups_over(transport, 2, |_, group| {
            // Both have closed what they only needed to meet.
            group.barrier().unwrap();
            let count = open();
            group.barrier().unwrap();
            count
        });
        counts[0].min(counts[1])
    };
    // Both ends are in this process: the connections of frames, of control and of messages, and the rails.
    assert_eq!(of("tcp"), 2 * 3);
    assert_eq!(of("tcp*2"), 2 * (3 + 2));
    assert_eq!(of("tcp*4"), 2 * (3 + 4));
}

#[test]
fn a_pair_has_as_many_sockets_as_it_was_told() {
    in_a_process_of_its_own("resources::sockets");
}

/// Runs in a process of its own, see below.
#[test]
#[ignore = "run by ranks_that_may_make_no_large_files_meet_over_tcp in a process of its own"]
fn small_files() {
    let maximum = getrlimit(Resource::Fsize).maximum;
    let limit = Rlimit {
        current: Some(1 << 16),
        maximum,
    };
    setrlimit(Resource::Fsize, limit).unwrap();
    with_groups(2, |_, group| {
        assert_eq!(group.transport(), "tcp");
        group.barrier().unwrap();
    });
    let group = group_over("shm");
    let error = group.configure(configuration(&store(), 1, 0, 2)).unwrap_err();
    assert!(error.to_string().contains("RLIMIT_FSIZE"), "{error}");
}

#[test]
fn ranks_that_may_make_no_large_files_meet_over_tcp() {
    in_a_process_of_its_own("resources::small_files");
}

/// Runs in a process of its own, see below.
#[test]
#[ignore = "run by a_limit_on_descriptors_that_is_met_at_any_point_of_a_configuration_is_raised in a process of its own"]
fn few_descriptors() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // Everything that stays with the process is there.
    with_groups(3, |_, group| group.barrier().unwrap());
    for transport in ["shm", "tcp", "mixed"] {
        let mut met = 0;
        for room in 0..60 {
            eventually("the end of the threads", || threads() == 0);
            let limit = Rlimit {
                current: Some(1024),
                maximum,
            };
            setrlimit(Resource::Nofile, limit).unwrap();
            // All are taken but a few of the lowest, so that nothing shows that the limit is near.
            let mut taken: Vec<_> = std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect();
            taken.drain(..room);
            with_groups_over(transport, 3, |_, group| group.barrier().unwrap());
            met += u32::from(getrlimit(Resource::Nofile).current == maximum);
            drop(taken);
        }
        assert!(met > 10, "over {transport} the limit was met {met} times only");
    }
}

#[test]
fn a_limit_on_descriptors_that_is_met_at_any_point_of_a_configuration_is_raised() {
    in_a_process_of_its_own("resources::few_descriptors");
}

#[test]
fn no_thread_and_no_socket_is_left_after_any_kind_of_end() {
    in_a_process_of_its_own("resources::alone");
}

fn in_a_process_of_its_own(test: &str) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--test-threads=1"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}
