//! The `oxccl` command as its user meets it: exit codes, messages, and that nothing outlives it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use ftcore::Epoch;
use oxccl::coordination::{LighthouseConfig, LighthouseServer};
use oxccl::core::Step;
use oxccl::core::{Credentials, deadline_in};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

fn oxccl(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oxccl"));
    command
        .args(arguments)
        .env_remove("OXCCL_LIGHTHOUSE")
        .env_remove("OXCCL_CREDENTIALS")
        .env_remove("OXCCL_INSECURE")
        .env_remove("OXCCL_LOG");
    command
}

/// A port with a listener: all that `launch` asks of a given lighthouse before it starts anything.
fn listening() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    (listener, url)
}

fn text(output: &Output) -> (Option<i32>, String, String) {
    let lossy = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), lossy(&output.stdout), lossy(&output.stderr))
}

fn wait_for(path: &Path) -> String {
    let deadline = deadline_in(Duration::from_secs(60));
    loop {
        match std::fs::read_to_string(path) {
            Ok(content) if content.ends_with('\n') => return content.trim().to_owned(),
            _ => std::thread::sleep(Duration::from_millis(2)),
        }
        assert!(Instant::now() < deadline, "{} did not appear", path.display());
    }
}

fn open(pid: &str) -> OwnedFd {
    pidfd_open(Pid::from_raw(pid.parse().unwrap()).unwrap(), PidfdFlags::empty()).unwrap()
}

/// Sees a process end, even if it is not collected.
fn assert_ends(process: &OwnedFd) {
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    let timeout = Timespec {
        tv_sec: 60,
        tv_nsec: 0,
    };
    assert_eq!(
        poll(&mut fds, Some(&timeout)).unwrap(),
        1,
        "the process did not end"
    );
}

#[test]
fn help_has_examples_and_the_exit_codes() {
    let (code, out, _) = text(&oxccl(&["--help"]).output().unwrap());
    assert_eq!(code, Some(0));
    assert!(out.contains("Exit codes:") && out.contains("NO_COLOR"), "{out}");
    let (code, out, _) = text(&oxccl(&["launch", "--help"]).output().unwrap());
    assert_eq!(code, Some(0));
    assert!(
        out.contains("Examples:") && out.contains("--first-replica"),
        "{out}"
    );
}

#[test]
fn a_wrong_command_line_is_exit_code_2() {
    for arguments in [
        &["launch", "--replicas", "two", "--", "true"][..],
        &["launch", "--replicas", "0", "--", "true"],
        &["launch", "--lighthouse", "localhost", "--", "true"],
        &["launch"],
        &["no-such-command"],
        &[],
    ] {
        let (code, out, err) = text(&oxccl(arguments).output().unwrap());
        assert_eq!(code, Some(2), "{arguments:?}: {err}");
        assert!(out.is_empty() && !err.is_empty(), "{arguments:?}");
        assert!(!err.contains('\u{1b}'), "no colours without a terminal: {err}");
    }
}

#[test]
fn options_for_a_lighthouse_of_ones_own_are_not_dropped_without_a_word_beside_a_given_one() {
    let (_listener, url) = listening();
    for option in [["--min-replicas", "2"], ["--lighthouse-bind", "127.0.0.1:0"]] {
        let mut command = oxccl(&["launch", "--lighthouse", &url]);
        let (code, _, err) = text(&command.args(option).args(["--", "false"]).output().unwrap());
        assert_eq!(code, Some(2), "{err}");
        assert!(err.contains(option[0]) && err.contains(&url), "{err}");
        // The environment of many commands does not make one fail.
        let mut command = oxccl(&["launch"]);
        command.env("OXCCL_LIGHTHOUSE", &url).args(option);
        let (code, _, err) = text(&command.args(["--", "true"]).output().unwrap());
        assert_eq!(code, Some(0), "{err}");
        assert!(err.contains(option[0]) && err.contains("does nothing"), "{err}");
    }
}

#[test]
fn a_lighthouse_that_is_not_there_is_named_before_anything_starts() {
    let (listener, url) = listening();
    drop(listener);
    let dir = tempfile::tempdir().unwrap();
    let proof = dir.path().join("started");
    let (code, _, err) = text(
        &oxccl(&[
            "launch",
            "--lighthouse",
            &url,
            "--",
            "touch",
            proof.to_str().unwrap(),
        ])
        .output()
        .unwrap(),
    );
    assert_eq!(code, Some(3), "{err}");
    assert!(
        err.contains("cannot reach the lighthouse") && err.contains(&url),
        "{err}"
    );
    assert!(!proof.exists());
}

#[test]
fn credentials_of_another_job_end_a_launch_before_anything_starts() {
    let dir = tempfile::tempdir().unwrap();
    let (ours, theirs) = (dir.path().join("ours"), dir.path().join("theirs"));
    for job in [&ours, &theirs] {
        oxccl::identity::create(job, Some("job1")).unwrap();
    }
    let lighthouse = LighthouseServer::start(LighthouseConfig {
        bind: "127.0.0.1:0".into(),
        credentials: vec![Credentials::load(&ours).unwrap()],
        ..LighthouseConfig::default()
    })
    .unwrap();
    let (url, proof) = (lighthouse.address(), dir.path().join("started"));
    let theirs = theirs.to_str().unwrap();
    let output = oxccl(&[
        "launch",
        "--lighthouse",
        &url,
        "--credentials",
        theirs,
        "--",
        "touch",
        proof.to_str().unwrap(),
    ])
    .output()
    .unwrap();
    let (code, _, err) = text(&output);
    assert_eq!(code, Some(3), "{err}");
    for part in [url.as_str(), theirs, "not of job job1"] {
        assert!(err.contains(part), "{part} in: {err}");
    }
    assert!(!err.contains("is the lighthouse running"), "{err}");
    // None at all: a connection alone would come up.
    let plain = url.replace("https://", "http://");
    let output = oxccl(&[
        "launch",
        "--lighthouse",
        &plain,
        "--",
        "touch",
        proof.to_str().unwrap(),
    ])
    .output()
    .unwrap();
    let (code, _, err) = text(&output);
    assert_eq!(code, Some(2), "{err}");
    assert!(
        err.contains("asks for credentials") && err.contains("https://"),
        "{err}"
    );
    assert!(!proof.exists());
}

#[test]
fn a_good_run_ends_with_0_and_a_failed_one_with_1_and_its_last_output() {
    let (_listener, url) = listening();
    let dir = tempfile::tempdir().unwrap();
    let run = |script: &str| {
        let (dir, url) = (dir.path().to_str().unwrap(), &url);
        let arguments = [
            "launch",
            "--lighthouse",
            url,
            "--replicas",
            "2",
            "--max-restarts",
            "1",
        ];
        let mut command = oxccl(&arguments);
        command.args([
            "--restart-delay-ms",
            "1",
            "--run-dir",
            dir,
            "--json",
            "--",
            "sh",
            "-c",
            script,
        ]);
        text(&command.output().unwrap())
    };
    let (code, out, err) = run("test \"$OXCCL_REPLICAS\" = 2");
    assert_eq!(code, Some(0), "{err}");
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json["stop"]["reason"], "completed");
    assert_eq!(json["replicas"][1]["exit"]["status"], 0);

    let (code, out, err) = run("if test $OXCCL_REPLICA = 1; then echo no luck; exit 4; fi; sleep 1000");
    assert_eq!(code, Some(1), "{err}");
    assert!(
        err.contains("no luck") && err.contains("restarting in 1 ms"),
        "{err}"
    );
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json["stop"]["replica"], 1);
    assert_eq!(json["replicas"][1]["incarnations"], 2);
}

#[test]
fn the_others_that_went_on_do_not_hide_a_replica_that_failed() {
    let (_listener, url) = listening();
    let dir = tempfile::tempdir().unwrap();
    let mut command = oxccl(&["launch", "--lighthouse", &url, "--replicas", "2", "--keep-others"]);
    command
        .args(["--max-restarts", "0", "--run-dir", dir.path().to_str().unwrap()])
        .args(["--", "sh", "-c", "test $OXCCL_REPLICA = 0"]);
    let (code, _, err) = text(&command.output().unwrap());
    assert_eq!(code, Some(1), "{err}");
    assert!(
        err.contains("1 of 2 replicas failed (1)") && !err.contains("all replicas came"),
        "{err}"
    );
}

#[test]
fn what_an_earlier_run_said_is_not_a_cause_of_this_run_s_failure() {
    let (_listener, url) = listening();
    let dir = tempfile::tempdir().unwrap();
    let run = |script: &str| {
        let mut command = oxccl(&["launch", "--quiet", "--lighthouse", &url, "--max-restarts", "0"]);
        command.args([
            "--run-dir",
            dir.path().to_str().unwrap(),
            "--",
            "sh",
            "-c",
            script,
        ]);
        text(&command.output().unwrap())
    };
    let other = dir.path().join("replica-1.incarnation-0.log");
    std::fs::write(&other, "of another machine").unwrap();
    let (code, _, err) = run("echo an old misfortune; exit 4");
    assert!(code == Some(1) && err.contains("an old misfortune"), "{err}");
    let (code, _, err) = run("exit 4");
    assert!(code == Some(1) && !err.contains("an old misfortune"), "{err}");
    assert!(
        other.exists(),
        "a log of a replica that is not of this machine is gone"
    );
}

#[test]
fn a_program_that_is_not_there_is_exit_code_2_before_anything_starts() {
    let dir = tempfile::tempdir().unwrap();
    for program in ["no-such-program", "/nowhere/program", "./no-such-program"] {
        let run_dir = dir.path().join("run");
        let arguments = ["launch", "--run-dir", run_dir.to_str().unwrap(), "--", program];
        let (code, _, err) = text(&oxccl(&arguments).output().unwrap());
        assert_eq!(code, Some(2), "{err}");
        assert!(err.contains(program) && !run_dir.exists(), "{err}");
    }
}

/// Starts two replicas that write their process ids and sleep; returns the command and handles on them.
fn two_sleepers(dir: &Path, url: &str) -> (std::process::Child, Vec<OwnedFd>) {
    let script = format!("echo $$ > {0}/pid.$OXCCL_REPLICA; exec sleep 1000", dir.display());
    let arguments = [
        "launch",
        "--lighthouse",
        url,
        "--replicas",
        "2",
        "--run-dir",
        dir.to_str().unwrap(),
    ];
    let child = oxccl(&arguments)
        .args(["--", "sh", "-c", &script])
        .stderr(std::process::Stdio::null())
        .spawn();
    let replicas = (0..2)
        .map(|r| open(&wait_for(&dir.join(format!("pid.{r}")))))
        .collect();
    (child.unwrap(), replicas)
}

#[test]
fn no_replica_outlives_a_supervisor_that_was_killed() {
    let (_listener, url) = listening();
    let dir = tempfile::tempdir().unwrap();
    let (mut supervisor, replicas) = two_sleepers(dir.path(), &url);
    supervisor.kill().unwrap();
    supervisor.wait().unwrap();
    replicas.iter().for_each(assert_ends);
}

#[test]
fn an_interrupt_ends_all_and_is_exit_code_130() {
    let (_listener, url) = listening();
    let dir = tempfile::tempdir().unwrap();
    let (mut supervisor, replicas) = two_sleepers(dir.path(), &url);
    kill_process(Pid::from_raw(supervisor.id().cast_signed()).unwrap(), Signal::INT).unwrap();
    replicas.iter().for_each(assert_ends);
    assert_eq!(supervisor.wait().unwrap().code(), Some(130));
}

mod lighthouse {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::TcpStream;
    use std::process::{Child, Stdio};

    use super::*;

    /// A lighthouse at a free port; killed if a test fails.
    struct Lighthouse {
        child: Child,
        url: String,
    }

    impl Lighthouse {
        fn start() -> Self {
            Self::start_with(&[])
        }

        fn start_with(arguments: &[&str]) -> Self {
            Self::start_at("127.0.0.1:0", arguments)
        }

        fn start_at(bind: &str, arguments: &[&str]) -> Self {
            let mut child = oxccl(&["lighthouse", "--bind", bind])
                .args(arguments)
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
            let url = loop {
                let line = lines.next().unwrap().unwrap();
                if let Some(rest) = line.strip_prefix("oxccl: lighthouse at ") {
                    break rest.split(' ').next().unwrap().to_owned();
                }
            };
            // Its log is not read any more (the pipe is closed here); it must not mind.
            Self { child, url }
        }

        fn address(&self) -> &str {
            self.url.strip_prefix("http://").unwrap()
        }
    }

    impl Drop for Lighthouse {
        fn drop(&mut self) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }

    #[test]
    fn it_answers_and_ends_in_order_when_interrupted() {
        let mut lighthouse = Lighthouse::start();
        let mut stream = TcpStream::connect(lighthouse.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
            .write_all(b"GET /status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(
            answer.starts_with("HTTP/1.1 200") && answer.contains("quorum_id"),
            "{answer}"
        );
        let pid = Pid::from_raw(lighthouse.child.id().cast_signed()).unwrap();
        kill_process(pid, Signal::TERM).unwrap();
        assert_eq!(lighthouse.child.wait().unwrap().code(), Some(0));
    }

    #[test]
    fn one_that_was_stopped_for_longer_than_a_heartbeat_may_take_blames_nobody() {
        use oxccl::coordination::{ManagerClient, ManagerServer, ManagerServerConfig, QuorumRequest};

        let lighthouse = Lighthouse::start_with(&["--min-replicas", "2", "--heartbeat-timeout-ms", "4000"]);
        let soon = || deadline_in(Duration::from_secs(60));
        let replicas = ["a:1", "b:1"].map(|id| {
            let config = ManagerServerConfig {
                replica_id: id.into(),
                lighthouse: lighthouse.url.clone(),
                store_address: "127.0.0.1:1".into(),
                ..ManagerServerConfig::default()
            };
            let server = ManagerServer::start(config).unwrap();
            let client = ManagerClient::connect(&server.address(), soon()).unwrap();
            (server, client)
        });
        let quorum = |last_quorum_id| {
            std::thread::scope(|scope| {
                let calls = replicas.each_ref().map(|(_, client)| {
                    scope.spawn(move || {
                        let request = QuorumRequest {
                            last_quorum_id,
                            ..QuorumRequest::default()
                        };
                        loop {
                            match client.quorum(&request, soon()) {
                                Ok(answer) => return (answer.quorum_id, answer.replica_ids),
                                // The connection may have been given up while there was no answer.
                                Err(e) if e.is_retryable() => std::thread::sleep(Duration::from_millis(20)),
                                Err(e) => panic!("{e}"),
                            }
                        }
                    })
                });
                calls.map(|call| call.join().unwrap())
            })
        };
        let [before, _] = quorum(Epoch(0));
        let pid = Pid::from_raw(lighthouse.child.id().cast_signed()).unwrap();
        kill_process(pid, Signal::STOP).unwrap();
        std::thread::sleep(Duration::from_secs(6));
        kill_process(pid, Signal::CONT).unwrap();
        assert_eq!(before.1, ["a:1", "b:1"]);
        assert_eq!(
            quorum(before.0),
            [before.clone(), before],
            "the same epoch, with both"
        );
    }

    #[test]
    fn after_a_sigkill_the_same_step_goes_on_and_a_second_lighthouse_on_its_file_is_refused() {
        use oxccl::coordination::{ManagerClient, ManagerServer, ManagerServerConfig, QuorumRequest};

        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("made/for/it.json");
        let arguments = ["--min-replicas", "2", "--state-file", file.to_str().unwrap()];
        let first = Lighthouse::start_with(&arguments);
        let (address, soon) = (first.address().to_owned(), || {
            deadline_in(Duration::from_secs(60))
        });
        let replicas = ["a:1", "b:1"].map(|id| {
            let config = ManagerServerConfig {
                replica_id: id.into(),
                lighthouse: first.url.clone(),
                store_address: "127.0.0.1:1".into(),
                quorum_retries: 1000,
                ..ManagerServerConfig::default()
            };
            let server = ManagerServer::start(config).unwrap();
            let client = ManagerClient::connect(&server.address(), soon()).unwrap();
            (server, client)
        });
        let quorum = |step, last_quorum_id| {
            let request = &QuorumRequest {
                step: Step(step),
                last_quorum_id,
                ..QuorumRequest::default()
            };
            std::thread::scope(|scope| {
                let asked = replicas
                    .each_ref()
                    .map(|(_, client)| scope.spawn(move || client.quorum(request, soon()).unwrap()));
                let [a, b] = asked.map(|call| call.join().unwrap());
                assert_eq!((a.quorum_id, a.max_step.0), (b.quorum_id, step));
                assert_eq!(a.replica_ids, ["a:1", "b:1"]);
                a.quorum_id
            })
        };
        let before = quorum(0, Epoch(0));
        assert_eq!(quorum(1, before), before);
        let (code, _, err) = text(
            &oxccl(&["lighthouse", "--bind", "127.0.0.1:0"])
                .args(arguments)
                .output()
                .unwrap(),
        );
        assert_eq!(code, Some(3), "{err}");
        assert!(err.contains("belongs to another lighthouse"), "{err}");
        // Killed and collected.
        drop(first);
        let _second = Lighthouse::start_at(&address, &arguments);
        let after = quorum(2, before);
        assert!(after > before, "{after} after {before}");
        assert_eq!(quorum(3, after), after);
    }

    #[test]
    fn a_record_that_cannot_be_kept_and_replicas_that_cannot_be_first_are_errors_at_the_start() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        let below = file.join("state.json");
        let cases: [(&[&str], &str); 2] = [
            (&["--state-file", below.to_str().unwrap()], "cannot be written"),
            (
                &["--min-replicas", "3", "--initial-replicas", "2"],
                "initial_replicas is 2",
            ),
        ];
        for (arguments, expected) in cases {
            let mut command = oxccl(&["lighthouse", "--bind", "127.0.0.1:0"]);
            let (code, _, err) = text(&command.args(arguments).output().unwrap());
            assert!(
                code.is_some_and(|c| c != 0) && err.contains(expected),
                "{code:?}: {err}"
            );
        }
    }

    #[test]
    fn an_address_of_another_machine_is_named_and_exit_code_3() {
        // TEST-NET-1: never this machine's.
        let bind = [
            "lighthouse",
            "--no-state-file",
            "--insecure",
            "--bind",
            "192.0.2.1:0",
        ];
        let (code, _, err) = text(&oxccl(&bind).output().unwrap());
        assert_eq!(code, Some(3), "{err}");
        assert!(
            err.contains("192.0.2.1:0 is not an address of this machine"),
            "{err}"
        );
    }

    #[test]
    fn signals_for_the_replicas_do_not_end_the_lighthouse() {
        let mut lighthouse = Lighthouse::start();
        let pid = Pid::from_raw(lighthouse.child.id().cast_signed()).unwrap();
        for signal in [Signal::USR1, Signal::USR2, Signal::TERM] {
            kill_process(pid, signal).unwrap();
        }
        assert_eq!(lighthouse.child.wait().unwrap().code(), Some(0));
    }

    #[test]
    fn a_folder_that_is_made_for_the_record_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("missing/state.json");
        // The address ends it; the record's place is looked at before.
        let bind = [
            "lighthouse",
            "--insecure",
            "--bind",
            "192.0.2.1:0",
            "--state-file",
        ];
        let (_, _, err) = text(&oxccl(&bind).arg(&file).output().unwrap());
        assert!(err.contains("missing was not there and is made"), "{err}");
    }

    #[test]
    fn a_port_in_use_is_named_and_exit_code_3() {
        let lighthouse = Lighthouse::start();
        let (code, _, err) = text(
            &oxccl(&["lighthouse", "--no-state-file", "--bind", lighthouse.address()])
                .output()
                .unwrap(),
        );
        assert_eq!(code, Some(3), "{err}");
        assert!(err.contains(lighthouse.address()), "{err}");
        // The same through `launch`, which shows what its lighthouse said.
        let arguments = ["launch", "--lighthouse-bind", lighthouse.address(), "--", "true"];
        let (code, _, err) = text(&oxccl(&arguments).output().unwrap());
        assert_eq!(code, Some(3), "{err}");
        assert!(
            err.contains("the lighthouse ended before it was ready") && err.contains(lighthouse.address()),
            "{err}"
        );
    }

    #[test]
    fn launch_starts_one_tells_the_replicas_and_takes_it_down_again() {
        let dir = tempfile::tempdir().unwrap();
        let script = "echo $OXCCL_LIGHTHOUSE > $0/url.$OXCCL_REPLICA";
        let arguments = [
            "launch",
            "--replicas",
            "2",
            "--run-dir",
            dir.path().to_str().unwrap(),
            "--",
            "sh",
            "-c",
            script,
        ];
        let (code, _, err) = text(&oxccl(&arguments).arg(dir.path()).output().unwrap());
        assert_eq!(code, Some(0), "{err}");
        let url = wait_for(&dir.path().join("url.0"));
        assert_eq!(url, wait_for(&dir.path().join("url.1")));
        assert!(
            TcpStream::connect(url.strip_prefix("http://").unwrap()).is_err(),
            "the lighthouse is gone"
        );
    }
}

mod credentials {
    use super::*;

    #[test]
    fn folders_are_made_issued_and_shown_and_never_written_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        let run = |arguments: &[&str]| {
            text(
                &oxccl(&[&["credentials"][..], arguments].concat())
                    .output()
                    .unwrap(),
            )
        };
        let (code, _, err) = run(&["new", &path("job"), "--job", "demo"]);
        assert_eq!(code, Some(0), "{err}");
        assert!(err.contains("job demo"), "{err}");
        let (code, _, err) = run(&["new", &path("job")]);
        assert_eq!(code, Some(3), "{err}");
        assert!(err.contains("not empty"), "{err}");
        assert_eq!(run(&["issue", &path("job"), "replica0", &path("one")]).0, Some(0));
        let (code, out, _) = run(&["show", &path("one")]);
        assert_eq!(code, Some(0));
        assert!(
            out.contains("demo") && out.contains("replica 'replica0', and nothing else"),
            "{out}"
        );
        let secret = std::fs::read_to_string(dir.path().join("job/secret")).unwrap();
        assert!(!out.contains(secret.trim()));
        let (code, _, err) = run(&["issue", "--for", "lighthouse", &path("job"), &path("lighthouse")]);
        assert_eq!(code, Some(0), "{err}");
        let (_, out, _) = run(&["show", &path("lighthouse")]);
        assert!(out.contains("the lighthouse, and nothing else"), "{out}");
        let (code, _, err) = run(&["issue", &path("job"), &path("nameless")]);
        assert_eq!(code, Some(2), "{err}");
        assert!(err.contains("NAME OUT"), "{err}");
        let (code, _, err) = run(&["revoke", &path("lighthouse"), "replica0"]);
        assert_eq!(code, Some(0), "{err}");
        let list = std::fs::read_to_string(dir.path().join("lighthouse/revoked")).unwrap();
        assert!(list.starts_with("replica0 "), "{list}");
        assert_eq!(run(&["revoke", &path("nowhere"), "replica0"]).0, Some(2));
        let (code, out, _) = run(&["--help"]);
        assert_eq!(code, Some(0));
        assert!(out.contains("Examples:") && out.contains("issue"), "{out}");
        let (code, _, err) = run(&["show", &path("nowhere")]);
        assert_eq!(code, Some(2), "{err}");
        assert!(err.contains("nowhere/job"), "{err}");
    }

    #[test]
    fn a_lighthouse_without_credentials_listens_beyond_loopback_only_if_it_is_told_to() {
        let (code, _, err) = text(
            &oxccl(&["lighthouse", "--bind", "0.0.0.0:0", "--no-state-file"])
                .output()
                .unwrap(),
        );
        assert_eq!(code, Some(2), "{err}");
        assert!(
            err.contains("--insecure") && err.contains("oxccl credentials new"),
            "{err}"
        );
    }
}
