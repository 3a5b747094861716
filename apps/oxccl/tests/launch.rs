//! `oxccl launch` as a launcher: programs of several ranks that know nothing of it but their environment.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{BufRead as _, BufReader};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use oxccl::core::{Device, ProcessGroupExt as _, ReduceOp, Tensor, deadline_in};
use oxccl::world::{Place, World, WorldOptions};
use rustix::process::{Pid, Signal, getpid, kill_process};

/// What a rank does; set for the processes that the tests launch.
const SCENE: &str = "OXCCL_TEST_SCENE";

fn oxccl(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oxccl"));
    command.args(arguments);
    for variable in ["LIGHTHOUSE", "CREDENTIALS", "INSECURE", "LOG", "ENCRYPT"] {
        command.env_remove(format!("OXCCL_{variable}"));
    }
    command
}

/// `oxccl launch` of this file in `scene`.
fn launch(dir: &Path, arguments: &[&str], scene: &str) -> Command {
    let mut command = oxccl(&["launch", "--timeout-s", "100", "--run-dir"]);
    command.arg(dir).args(arguments).arg("--");
    command.arg(std::env::current_exe().unwrap());
    command
        .args(["--exact", "as_a_rank", "--nocapture"])
        .env(SCENE, scene);
    command
}

/// A port with a listener: all that `launch` asks of a given lighthouse before it starts anything.
fn listening() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    (listener, url)
}

fn said(output: &Output) -> String {
    format!(
        "{}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// All that the processes of replica `replica` have written, in the order of their names.
fn logs(dir: &Path, replica: u32) -> String {
    let mut files: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            path.file_name()
                .unwrap()
                .to_string_lossy()
                .starts_with(&format!("replica-{replica}."))
        })
        .collect();
    files.sort();
    files
        .iter()
        .map(|file| std::fs::read_to_string(file).unwrap())
        .collect()
}

/// Not a test of its own: what the launched ranks run.
#[test]
fn as_a_rank() {
    match std::env::var(SCENE).as_deref() {
        Ok("sum") => sum(false),
        Ok("die once") => sum(true),
        _ => {}
    }
}

/// The ranks meet and add. `dies`: rank 1 of the first incarnation is killed once they have met.
fn sum(dies: bool) {
    let place = Place::from_env().unwrap();
    let deadline = || deadline_in(Duration::from_secs(60));
    let options = WorldOptions {
        backends: "gloo".parse().unwrap(),
        device: Device::CPU,
        ..WorldOptions::default()
    };
    let world = World::init(&place, options, deadline()).unwrap();
    if dies && place.rank == 1 && std::env::var("OXCCL_INCARNATION").unwrap() == "0" {
        kill_process(getpid(), Signal::KILL).unwrap();
    }
    let mine = Tensor::from_vec(vec![place.rank + 1]);
    let work = world.group().all_reduce(mine, ReduceOp::Sum).unwrap();
    let sum = work.take_tensor().unwrap();
    let notes = &world.group().capabilities().notes;
    let transport = notes.iter().find(|(what, _)| what == "transport");
    println!(
        "rank {} of {} (local {}) has {:?}, over {}",
        place.rank,
        place.world_size,
        place.local_rank.unwrap(),
        sum.as_slice::<u32>().unwrap(),
        transport.unwrap().1
    );
    world.shutdown(deadline()).unwrap();
}

#[test]
fn a_program_for_any_launcher_finds_the_ranks_of_its_replica_and_their_devices() {
    let (_listener, url) = listening();
    let dir = tempfile::tempdir().unwrap();
    let arguments = [
        "--lighthouse",
        &url,
        "--replicas",
        "2",
        "--ranks-per-replica",
        "2",
    ];
    let output = launch(dir.path(), &arguments, "sum").output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    for replica in 0..2 {
        let log = logs(dir.path(), replica);
        for rank in 0..2 {
            let line = format!("rank {rank} of 2 (local {}) has [3]", replica * 2 + rank);
            assert_eq!(log.matches(&line).count(), 1, "{line}: {log}");
        }
    }
}

#[test]
fn l42_a_variable_of_the_launcher_reaches_the_backend_of_every_rank() {
    for (variable, says) in [
        (("OXCCL_GLOO_TRANSPORT", "tcp"), "has [3], over tcp"),
        (("OXCCL_GLOO_CONNECTION", "2"), "(do you mean hint:connections?)"),
    ] {
        let (_listener, url) = listening();
        let dir = tempfile::tempdir().unwrap();
        let arguments = [
            "--lighthouse",
            &url,
            "--ranks-per-replica",
            "2",
            "--max-restarts",
            "0",
        ];
        let mut command = launch(dir.path(), &arguments, "sum");
        let output = command.env(variable.0, variable.1).output().unwrap();
        let told = logs(dir.path(), 0);
        assert!(told.contains(says), "{}{told}", said(&output));
    }
}

#[test]
fn a_replica_whose_rank_is_killed_meets_anew() {
    let (_listener, url) = listening();
    let dir = tempfile::tempdir().unwrap();
    let arguments = [
        "--lighthouse",
        &url,
        "--ranks-per-replica",
        "3",
        "--restart-delay-ms",
        "1",
    ];
    let output = launch(dir.path(), &arguments, "die once").output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let log = logs(dir.path(), 0);
    assert_eq!(log.matches("of 3").count(), 3, "{log}");
}

#[test]
fn ranks_prove_the_credentials_that_were_given_as_an_option() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("job");
    let made = oxccl(&["credentials", "new"]).arg(&folder).output().unwrap();
    assert!(made.status.success(), "{}", said(&made));
    let arguments = ["--ranks-per-replica", "2", "--max-restarts", "0"];
    let given = ["--credentials", folder.to_str().unwrap()];
    let output = launch(dir.path(), &[&arguments[..], &given].concat(), "sum")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(logs(dir.path(), 0).matches("has [3]").count(), 2);
}

/// `oxccl launch` of a shell script.
fn launch_script(dir: &Path, arguments: &[&str], script: &str) -> Command {
    let mut command = oxccl(&["launch", "--timeout-s", "100", "--run-dir"]);
    command.arg(dir).args(arguments).args(["--", "sh", "-c", script]);
    command
}

fn lines(bytes: &[u8]) -> Vec<String> {
    String::from_utf8_lossy(bytes)
        .lines()
        .map(str::to_owned)
        .collect()
}

#[test]
fn what_the_processes_write_comes_out_with_their_names_unless_it_is_to_be_quiet() {
    let (_listener, url) = listening();
    let script = "echo out $OXCCL_REPLICA; echo err >&2; printf 'no end'";
    let run = |more: &[&str]| {
        let dir = tempfile::tempdir().unwrap();
        let arguments = [
            "--lighthouse",
            &url,
            "--replicas",
            "2",
            "--ranks-per-replica",
            "2",
        ];
        let output = launch_script(dir.path(), &[&arguments[..], more].concat(), script)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", said(&output));
        let log = logs(dir.path(), 1);
        assert!(
            log.contains("out 1\n") && log.contains("err\n") && log.contains("no end"),
            "{log}"
        );
        (lines(&output.stdout), lines(&output.stderr))
    };
    let (mut out, err) = run(&[]);
    out.sort_unstable();
    let wanted: Vec<String> = [(0, 0), (0, 1), (1, 0), (1, 1)]
        .iter()
        .flat_map(|(replica, rank)| {
            let of = format!("[replica {replica}, rank {rank}]");
            [format!("{of} no end"), format!("{of} out {replica}")]
        })
        .collect();
    assert_eq!(out, wanted);
    assert!(err.contains(&"[replica 1, rank 0] err".to_owned()), "{err:?}");

    let (out, err) = run(&["--json"]);
    serde_json::from_str::<serde_json::Value>(&out.concat()).unwrap();
    assert!(err.contains(&"[replica 0, rank 1] out 0".to_owned()), "{err:?}");

    let (out, err) = run(&["--quiet"]);
    assert!(
        out.is_empty() && !err.iter().any(|line| line.contains("out 0")),
        "{out:?} {err:?}"
    );
}

#[test]
fn the_last_output_of_a_killed_process_comes_before_the_notice_of_its_end() {
    let (_listener, url) = listening();
    let dir = tempfile::tempdir().unwrap();
    let arguments = ["--lighthouse", &url, "--max-restarts", "0"];
    let output = launch_script(dir.path(), &arguments, "printf words >&2; kill -KILL $$")
        .output()
        .unwrap();
    let err = lines(&output.stderr);
    let at = |text: &str| {
        err.iter()
            .position(|line| line.contains(text))
            .unwrap_or_else(|| panic!("{text}: {err:?}"))
    };
    assert!(at("[replica 0] words") < at("replica 0 ended"), "{err:?}");
    assert!(
        !err.iter().any(|line| line.starts_with("  |")),
        "said twice: {err:?}"
    );
}

#[test]
fn signals_are_passed_on_as_they_came() {
    let (_listener, url) = listening();
    for (sent, name) in [(Signal::INT, "INT"), (Signal::HUP, "HUP"), (Signal::TERM, "TERM")] {
        let dir = tempfile::tempdir().unwrap();
        let arguments = ["--lighthouse", &url, "--replicas", "2", "--max-restarts", "0"];
        let script = "for s in INT HUP TERM USR1; do trap \"echo got $s; test $s = USR1 || exit 0\" $s; done
            echo ready; while :; do sleep 0.02; done";
        // The outer shell passes its text on as it is.
        let mut child = launch_script(dir.path(), &arguments, script)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut two = |text: &str| {
            let mut seen = [out.next().unwrap().unwrap(), out.next().unwrap().unwrap()];
            seen.sort_unstable();
            assert_eq!(seen, [0, 1].map(|replica| format!("[replica {replica}] {text}")));
        };
        let pid = Pid::from_raw(child.id().cast_signed()).unwrap();
        two("ready");
        kill_process(pid, Signal::USR1).unwrap();
        two("got USR1");
        kill_process(pid, sent).unwrap();
        two(&format!("got {name}"));
        assert_eq!(child.wait().unwrap().code(), Some(130));
    }
}

/// `oxccl` with `arguments`, started by a shell that ignores `signal`.
fn below_one_that_ignores(signal: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new("sh");
    let script = format!("trap '' {signal}; exec \"$0\" \"$@\"");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_oxccl")]);
    command.args(arguments);
    command
}

#[test]
fn a_run_below_nohup_outlives_its_terminal() {
    let (_listener, url) = listening();
    let dir = tempfile::tempdir().unwrap();
    let run_dir = dir.path().to_str().unwrap();
    let arguments = [
        "launch",
        "--lighthouse",
        &url,
        "--replicas",
        "1",
        "--run-dir",
        run_dir,
        "--",
    ];
    let go = dir.path().join("go");
    let script = format!(
        "echo ready; until test -e {}; do sleep 0.02; done; echo done",
        go.display()
    );
    let mut child = below_one_that_ignores("HUP", &[&arguments[..], &["sh", "-c", &script]].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(out.next().unwrap().unwrap(), "[replica 0] ready");
    kill_process(Pid::from_raw(child.id().cast_signed()).unwrap(), Signal::HUP).unwrap();
    std::fs::write(go, "").unwrap();
    assert_eq!(out.next().unwrap().unwrap(), "[replica 0] done");
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_run_where_sigchld_is_ignored_knows_how_its_processes_ended() {
    let (_listener, url) = listening();
    let dir = tempfile::tempdir().unwrap();
    let run_dir = dir.path().to_str().unwrap();
    let arguments = [
        "launch",
        "--lighthouse",
        &url,
        "--replicas",
        "1",
        "--max-restarts",
        "0",
        "--run-dir",
        run_dir,
        "--",
        "true",
    ];
    let output = below_one_that_ignores("CHLD", &arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
}

#[test]
fn a_second_signal_ends_what_does_not_end_by_itself_without_waiting_for_the_grace() {
    let (_listener, url) = listening();
    let dir = tempfile::tempdir().unwrap();
    let arguments = [
        "--lighthouse",
        &url,
        "--replicas",
        "1",
        "--max-restarts",
        "0",
        "--grace-s",
        "90",
    ];
    let script = "trap 'echo got TERM' TERM; echo ready; while :; do sleep 0.02; done";
    let begun = Instant::now();
    let mut child = launch_script(dir.path(), &arguments, script)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap()).lines();
    let pid = Pid::from_raw(child.id().cast_signed()).unwrap();
    // The process hears of the first one and stays.
    for text in ["ready", "got TERM"] {
        assert_eq!(out.next().unwrap().unwrap(), format!("[replica 0] {text}"));
        kill_process(pid, Signal::TERM).unwrap();
    }
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
}

mod nodes {
    use std::net::TcpStream;
    use std::process::Child;

    use super::*;

    /// A port that is free together with the next one.
    fn free_pair() -> u16 {
        let start = (std::process::id() % 1000) as u16;
        (0..1000)
            .map(|n| 12_000 + (start + n) % 1000 * 20)
            .find(|&port| {
                let bound: Vec<_> = (port..port + 2)
                    .map(|port| TcpListener::bind(("127.0.0.1", port)))
                    .collect();
                bound.iter().all(Result::is_ok)
            })
            .unwrap()
    }

    fn node(dir: &Path, port: u16, of: (u32, u32), more: &[&str], script: &str) -> Command {
        let run_dir = dir.join(format!("node-{}-{}", of.0, more.join("-")));
        let (rank, nodes, at) = (of.0.to_string(), of.1.to_string(), format!("127.0.0.1:{port}"));
        let arguments = ["--nnodes", &nodes, "--node-rank", &rank, "--rendezvous", &at];
        let mut command = launch_script(&run_dir, &[&arguments[..], more].concat(), script);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn started(mut command: Command) -> Child {
        command.spawn().unwrap()
    }

    /// Reads the lines of a process until one has `text`.
    fn until(out: &mut impl Iterator<Item = std::io::Result<String>>, text: &str) -> String {
        out.map(Result::unwrap)
            .find(|line| line.contains(text))
            .unwrap_or_else(|| panic!("no line with {text}"))
    }

    #[test]
    fn the_nodes_come_together_number_the_replicas_through_and_share_the_lighthouse_until_the_last_ends() {
        let dir = tempfile::tempdir().unwrap();
        let port = free_pair();
        let go = dir.path().join("go");
        let script = format!(
            "echo $OXCCL_REPLICA of $OXCCL_REPLICAS at $OXCCL_LIGHTHOUSE
            test $OXCCL_REPLICA -lt 2 || until test -e {}; do sleep 0.02; done",
            go.display()
        );
        let more = ["--replicas", "2"];
        // The one that has the rendezvous comes last.
        let mut second = started(node(dir.path(), port, (1, 2), &more, &script));
        let mut first = started(node(dir.path(), port, (0, 2), &more, &script));
        let mut of_second = BufReader::new(second.stdout.take().unwrap()).lines();
        let mut of_first = BufReader::new(first.stderr.take().unwrap()).lines();
        let url = format!("http://127.0.0.1:{}", port + 1);
        let mut seen = [
            of_second.next().unwrap().unwrap(),
            of_second.next().unwrap().unwrap(),
        ];
        seen.sort_unstable();
        assert_eq!(seen, [2, 3].map(|r| format!("[replica {r}] {r} of 4 at {url}")));
        until(&mut of_first, "the lighthouse stays for the others");
        TcpStream::connect(("127.0.0.1", port + 1)).unwrap();
        assert_eq!(first.try_wait().unwrap(), None);
        std::fs::write(&go, "").unwrap();
        assert_eq!(second.wait().unwrap().code(), Some(0));
        assert_eq!(first.wait().unwrap().code(), Some(0));
    }

    #[test]
    fn a_node_number_that_two_claim_and_a_job_of_another_shape_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let port = free_pair();
        let script = "echo up; exec sleep 1000";
        let mut nodes: Vec<Child> = (0..2)
            .map(|rank| started(node(dir.path(), port, (rank, 2), &[], script)))
            .collect();
        for node in &mut nodes {
            until(&mut BufReader::new(node.stdout.take().unwrap()).lines(), "up");
        }
        let cases: [(&[&str], &str); 2] = [
            (&["--max-restarts", "0"], "node 1 is claimed twice: by process"),
            (
                &["--ranks-per-replica", "2"],
                "2 nodes of 1 replicas of 2 ranks, and the others for 2 nodes of 1 replicas of 1 ranks",
            ),
        ];
        for (more, says) in cases {
            let output = node(dir.path(), port, (1, 2), more, script).output().unwrap();
            assert_eq!(output.status.code(), Some(3), "{}", said(&output));
            assert!(said(&output).contains(says), "{}", said(&output));
        }
        for node in &mut nodes {
            assert_eq!(node.try_wait().unwrap(), None);
            kill_process(Pid::from_raw(node.id().cast_signed()).unwrap(), Signal::TERM).unwrap();
        }
        for node in &mut nodes {
            assert_eq!(node.wait().unwrap().code(), Some(130));
        }
    }

    #[test]
    fn nodes_that_do_not_come_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let more = ["--rendezvous-timeout-s", "1"];
        let output = node(dir.path(), free_pair(), (0, 3), &more, "true")
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        assert!(
            said(&output).contains("nodes [1, 2] of 3 have not come"),
            "{}",
            said(&output)
        );
    }

    #[test]
    fn a_node_rank_that_does_not_exist_or_has_no_rendezvous_is_a_wrong_command_line() {
        for arguments in [
            &[
                "--nnodes",
                "2",
                "--node-rank",
                "2",
                "--rendezvous",
                "127.0.0.1:4000",
            ][..],
            &["--nnodes", "2", "--node-rank", "1"],
            &["--nnodes", "2", "--rendezvous", "127.0.0.1:4000"],
            &[
                "--node-rank",
                "0",
                "--rendezvous",
                "127.0.0.1:4000",
                "--first-replica",
                "1",
            ],
            &["--node-rank", "0", "--rendezvous", "nowhere"],
        ] {
            let output = oxccl(&["launch"])
                .args(arguments)
                .args(["--", "true"])
                .output()
                .unwrap();
            assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", said(&output));
        }
    }
}
