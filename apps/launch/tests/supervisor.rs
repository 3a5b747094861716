//! The supervisor with real processes (`sh -c …`): restarts, limits, signals, and the order of what the driver sees.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use oxccl::core::{ErrorKind, deadline_in};
use oxccl::launch::{EventKind, EventSender};
use oxccl_launch::{
    ExitSummary, GiveUp, LighthouseSource, Outcome, ProcessSignal, ReplicaLaunch, RestartPolicy, StopReason,
    Supervisor, SupervisorConfig, SupervisorEvent, SupervisorEvents,
};

fn soon() -> Instant {
    deadline_in(Duration::from_secs(60))
}

fn external() -> LighthouseSource {
    LighthouseSource::External("http://127.0.0.1:9".into())
}

fn config(replicas: u32, dir: &Path) -> SupervisorConfig {
    SupervisorConfig {
        restart: RestartPolicy {
            backoff: Duration::from_millis(1),
            ..RestartPolicy::default()
        },
        deadline: Some(soon()),
        ..SupervisorConfig::new(replicas, external(), dir)
    }
}

fn sh(script: &'static str) -> impl Fn(&ReplicaLaunch) -> Command + Send + 'static {
    move |_| {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }
}

/// All events until the end, which must come.
fn all(events: SupervisorEvents) -> (Vec<SupervisorEvent>, Outcome) {
    let mut events: Vec<_> = events.collect();
    match events.pop() {
        Some(SupervisorEvent::Finished(outcome)) => (events, outcome),
        other => panic!("the stream must end with Finished, not {other:?}"),
    }
}

fn until(events: &mut SupervisorEvents, mut wanted: impl FnMut(&SupervisorEvent) -> bool) -> SupervisorEvent {
    let deadline = soon();
    loop {
        match events.next_until(deadline) {
            Some(event) if wanted(&event) => return event,
            Some(_) => {}
            None => panic!("the event did not come"),
        }
    }
}

fn wait_for_file(path: &Path) {
    let deadline = soon();
    while !path.exists() {
        assert!(Instant::now() < deadline, "{} did not appear", path.display());
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_replica_finds_its_place_in_its_environment() {
    let dir = tempfile::tempdir().unwrap();
    let config = SupervisorConfig {
        first_replica: 4,
        total_replicas: 9,
        ..config(2, dir.path())
    };
    let script = r#"test -S "$OXCCL_EVENTS" || exit 9
        echo "$OXCCL_LIGHTHOUSE $OXCCL_REPLICA/$OXCCL_REPLICAS incarnation $OXCCL_INCARNATION threads $RAYON_NUM_THREADS""#;
    let (_supervisor, events) = Supervisor::start(config, sh(script), soon()).unwrap();
    let (_, outcome) = all(events);
    assert!(outcome.is_success(), "{outcome}");
    for replica in [4, 5] {
        let log =
            std::fs::read_to_string(dir.path().join(format!("replica-{replica}.incarnation-0.log"))).unwrap();
        assert_eq!(
            log,
            format!("http://127.0.0.1:9 {replica}/9 incarnation 0 threads 1\n")
        );
    }
}

#[test]
fn a_relative_run_directory_is_found_from_any_folder() {
    let dir = tempfile::tempdir().unwrap();
    let here = std::env::current_dir().unwrap();
    let up: PathBuf = here.components().skip(1).map(|_| "..").collect();
    let relative = up.join(dir.path().strip_prefix("/").unwrap());
    assert!(relative.is_relative() && relative.is_dir());
    // So deep that the way up from here does not lead to the root from there.
    let deep = dir.path().join("d/".repeat(here.components().count()));
    std::fs::create_dir_all(&deep).unwrap();
    let command = move |_: &ReplicaLaunch| {
        let mut command = Command::new("sh");
        command
            .args(["-c", "test -S \"$OXCCL_EVENTS\""])
            .current_dir(&deep);
        command
    };
    let (_supervisor, events) = Supervisor::start(config(1, &relative), command, soon()).unwrap();
    let (_, outcome) = all(events);
    assert!(outcome.is_success(), "{outcome}");
}

#[test]
fn a_killed_replica_comes_back_in_a_new_incarnation_and_the_other_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let command = |launch: &ReplicaLaunch| {
        let mut command = Command::new("sh");
        // The second incarnation of replica 1 ends well; so does replica 0 when that has happened.
        let script = match (launch.replica, launch.incarnation) {
            (1, 0) => "sleep 1000",
            (1, _) => "touch \"$0/healed\"",
            _ => "while ! test -e \"$0/healed\"; do sleep 0.01; done",
        };
        let run_dir = launch.lighthouse.strip_prefix("dir:").unwrap();
        command.args(["-c", script, run_dir]);
        command
    };
    let mut config = config(2, dir.path());
    config.lighthouse = LighthouseSource::External(format!("dir:{}", dir.path().display()));
    let (supervisor, mut events) = Supervisor::start(config, command, soon()).unwrap();
    let spawned = until(&mut events, |e| {
        matches!(
            e,
            SupervisorEvent::Spawned {
                replica: 1,
                incarnation: 0,
                ..
            }
        )
    });
    let e = supervisor.signal(1, 0, Some(1), ProcessSignal::Kill).unwrap_err();
    assert_eq!(
        e.kind(),
        ErrorKind::NotFound,
        "the second incarnation does not run yet"
    );
    let killed_at = supervisor.signal(1, 0, Some(0), ProcessSignal::Kill).unwrap();
    let (seen, outcome) = all(events);
    assert!(outcome.is_success(), "{outcome}");
    assert_eq!(
        outcome
            .replicas
            .iter()
            .map(|r| r.incarnations)
            .collect::<Vec<_>>(),
        [1, 2]
    );
    let of_one: Vec<&SupervisorEvent> = seen.iter().filter(|e| e.replica() == Some(1)).collect();
    match of_one[..] {
        [
            SupervisorEvent::Exited {
                incarnation: 0,
                status: None,
                signal: Some(9),
                restart_in_ms: Some(1),
                t_us: died,
                ..
            },
            SupervisorEvent::Spawned {
                incarnation: 1,
                t_us: born,
                pid,
                ..
            },
            SupervisorEvent::Exited {
                incarnation: 1,
                status: Some(0),
                signal: None,
                restart_in_ms: None,
                ..
            },
        ] => {
            assert!(killed_at <= *died && died <= born);
            assert!(matches!(spawned, SupervisorEvent::Spawned { pid: first, .. } if first != *pid));
        }
        ref other => panic!("{other:?}"),
    }
    let e = supervisor.signal(1, 0, None, ProcessSignal::Kill).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::NotFound);
}

/// Two replicas of two ranks. Each incarnation tells its store in a file; the second incarnation of replica 1 ends the run. `stubborn`: what rank 0 does
/// about SIGTERM.
fn two_by_two(dir: &Path, stubborn: &'static str) -> (Supervisor, SupervisorEvents) {
    let config = SupervisorConfig {
        ranks_per_replica: 2,
        ..config(2, dir)
    };
    let command = move |launch: &ReplicaLaunch| {
        let script = format!(
            "{} d=$(dirname \"$OXCCL_EVENTS\"); me=$OXCCL_REPLICA-$OXCCL_RANK-$OXCCL_INCARNATION
            echo \"$OXCCL_REPLICA_STORE $OXCCL_RANKS\" > \"$d/$me.tmp\"; mv \"$d/$me.tmp\" \"$d/$me\"
            while ! test -e \"$d/1-0-1\" -a -e \"$d/1-1-1\"; do sleep 0.01; done",
            if launch.rank == 0 { stubborn } else { "" },
        );
        let mut command = Command::new("sh");
        command.args(["-c", &script]);
        command
    };
    let started = Supervisor::start(config, command, soon()).unwrap();
    for name in ["0-0-0", "0-1-0", "1-0-0", "1-1-0"] {
        wait_for_file(&dir.join(name));
    }
    started
}

#[test]
fn a_replica_of_which_a_rank_dies_is_started_again_as_a_whole_and_the_others_are_left_alone() {
    for stubborn in ["", "trap '' TERM;"] {
        let dir = tempfile::tempdir().unwrap();
        let (supervisor, events) = two_by_two(dir.path(), stubborn);
        let e = supervisor.signal(1, 2, None, ProcessSignal::Kill).unwrap_err();
        assert!(e.to_string().contains("rank 2 of replica 1"), "{e}");
        let ranks = [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)];
        assert_eq!(supervisor.running(), ranks);
        supervisor.signal(1, 1, Some(0), ProcessSignal::Kill).unwrap();
        let (seen, outcome) = all(events);
        assert!(outcome.is_success(), "{outcome}");
        let incarnations: Vec<u32> = outcome.replicas.iter().map(|r| r.incarnations).collect();
        assert_eq!(incarnations, [1, 2]);
        let ends: Vec<(u32, Option<u64>, Option<u32>)> = seen
            .iter()
            .filter_map(|e| match e {
                SupervisorEvent::Exited {
                    replica: 1,
                    rank,
                    incarnation: 0,
                    restart_in_ms,
                    cause,
                    ..
                } => Some((*rank, *restart_in_ms, *cause)),
                _ => None,
            })
            .collect();
        assert_eq!(
            ends,
            [(1, None, None), (0, Some(1), Some(1))],
            "the last rank to end tells the pause and who was the cause"
        );
        // The ranks of an incarnation meet in a store of their own.
        let store = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
        assert!(store("0-0-0").ends_with(" 2\n") && store("0-0-0") != " 2\n");
        assert_eq!(store("0-0-0"), store("0-1-0"));
        assert_eq!(store("1-0-1"), store("1-1-1"));
        assert_ne!(store("1-0-0"), store("0-0-0"));
    }
}

#[test]
fn a_rank_that_is_stopped_does_not_keep_its_replica_from_coming_back() {
    let dir = tempfile::tempdir().unwrap();
    let (supervisor, events) = two_by_two(dir.path(), "");
    supervisor.signal(1, 0, Some(0), ProcessSignal::Stop).unwrap();
    supervisor.signal(1, 1, Some(0), ProcessSignal::Kill).unwrap();
    let (seen, outcome) = all(events);
    assert!(outcome.is_success(), "{outcome}");
    let of_stopped = seen.iter().find(|e| {
        matches!(
            e,
            SupervisorEvent::Exited {
                replica: 1,
                rank: 0,
                incarnation: 0,
                ..
            }
        )
    });
    assert!(
        matches!(of_stopped, Some(SupervisorEvent::Exited { signal: Some(9), .. })),
        "{of_stopped:?}"
    );
}

#[test]
fn restarts_end_at_their_limit_and_the_last_output_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(1, dir.path());
    config.restart.max_restarts = 2;
    let script = "echo to-out; echo \"incarnation $OXCCL_INCARNATION: out of luck\" >&2; exit 7";
    let (supervisor, events) = Supervisor::start(config, sh(script), soon()).unwrap();
    let (seen, outcome) = all(events);
    assert_eq!(outcome.stop, StopReason::ReplicaFailed { replica: 0 });
    assert!(!outcome.is_success());
    assert_eq!(outcome.replicas[0].incarnations, 3);
    assert_eq!(
        outcome.replicas[0].exit,
        Some(ExitSummary {
            status: Some(7),
            signal: None
        })
    );
    assert_eq!(outcome.replicas[0].tail, "to-out\nincarnation 2: out of luck");
    let pauses: Vec<Option<u64>> = seen
        .iter()
        .filter_map(|e| match e {
            SupervisorEvent::Exited { restart_in_ms, .. } => Some(*restart_in_ms),
            _ => None,
        })
        .collect();
    assert_eq!(pauses, [Some(1), Some(2), None]);
    assert_eq!(supervisor.wait(soon()).unwrap(), outcome);
}

#[test]
fn a_wrong_command_line_is_not_tried_again() {
    let dir = tempfile::tempdir().unwrap();
    let (_supervisor, events) = Supervisor::start(config(1, dir.path()), sh("exit 2"), soon()).unwrap();
    let (_, outcome) = all(events);
    assert_eq!(outcome.replicas[0].incarnations, 1);
    assert_eq!(outcome.stop, StopReason::ReplicaFailed { replica: 0 });
}

#[test]
fn the_others_go_on_after_a_failure_only_if_that_is_asked_for() {
    let script = "if test $OXCCL_REPLICA = 0; then exit 2; fi
        while ! test -e \"$(dirname \"$OXCCL_EVENTS\")/go\"; do sleep 0.01; done";
    for give_up in [GiveUp::StopAll, GiveUp::KeepOthers] {
        let dir = tempfile::tempdir().unwrap();
        let config = SupervisorConfig {
            give_up,
            ..config(2, dir.path())
        };
        let (_supervisor, mut events) = Supervisor::start(config, sh(script), soon()).unwrap();
        until(&mut events, |e| {
            matches!(e, SupervisorEvent::Exited { replica: 0, .. })
        });
        if give_up == GiveUp::KeepOthers {
            std::fs::write(dir.path().join("go"), "").unwrap();
        }
        let (_, outcome) = all(events);
        assert!(!outcome.is_success());
        let other = outcome.replicas[1].exit.unwrap();
        match give_up {
            GiveUp::StopAll => assert_eq!(other.signal, Some(15), "{outcome}"),
            GiveUp::KeepOthers => assert!(other.success(), "{outcome}"),
        }
    }
}

#[test]
fn stopping_kills_a_process_that_ignores_the_polite_signal_and_all_that_it_started() {
    let dir = tempfile::tempdir().unwrap();
    let config = SupervisorConfig {
        grace: Duration::from_millis(20),
        ..config(1, dir.path())
    };
    let script = "trap '' TERM; sleep 1000 & echo $! > \"$(dirname \"$OXCCL_EVENTS\")/grandchild.tmp\"
        mv \"$(dirname \"$OXCCL_EVENTS\")/grandchild.tmp\" \"$(dirname \"$OXCCL_EVENTS\")/grandchild\"; wait; wait; sleep 1000";
    let (supervisor, events) = Supervisor::start(config, sh(script), soon()).unwrap();
    let file = dir.path().join("grandchild");
    wait_for_file(&file);
    let grandchild: i32 = std::fs::read_to_string(&file).unwrap().trim().parse().unwrap();
    let ends = Ends::of(grandchild);
    supervisor.stop("enough");
    let (_, outcome) = all(events);
    assert_eq!(outcome.stop, StopReason::Stopped { why: "enough".into() });
    assert_eq!(outcome.replicas[0].exit.unwrap().signal, Some(9));
    ends.wait();
}

#[test]
fn the_deadline_ends_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(2, dir.path());
    config.deadline = Some(deadline_in(Duration::from_millis(50)));
    let (_supervisor, events) = Supervisor::start(config, sh("sleep 1000"), soon()).unwrap();
    let (_, outcome) = all(events);
    assert_eq!(outcome.stop, StopReason::Deadline);
}

#[test]
fn dropping_the_supervisor_ends_the_run_without_waiting() {
    let dir = tempfile::tempdir().unwrap();
    let (supervisor, events) = Supervisor::start(config(1, dir.path()), sh("sleep 1000"), soon()).unwrap();
    drop(supervisor);
    let (_, outcome) = all(events);
    assert!(matches!(outcome.stop, StopReason::Stopped { .. }), "{outcome}");
}

#[test]
fn a_program_that_does_not_exist_fails_the_start_and_leaves_nothing_running() {
    let dir = tempfile::tempdir().unwrap();
    let command = |launch: &ReplicaLaunch| match launch.replica {
        0 => {
            let mut command = Command::new("sh");
            command.args(["-c", "sleep 1000"]);
            command
        }
        _ => Command::new("oxccl-no-such-program"),
    };
    let e = Supervisor::start(config(2, dir.path()), command, soon()).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::NotFound);
    assert!(e.to_string().contains("oxccl-no-such-program"), "{e}");
    let left = std::fs::read_dir(dir.path()).unwrap();
    let left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
    assert!(
        !left.iter().any(|name| name.to_string_lossy().ends_with(".sock")),
        "everything was to be taken down before the error came back: {left:?}"
    );
}

/// Whether the lighthouse of a run finds the record of an earlier one in the same folder.
fn finds_a_record(change: impl FnOnce(&mut SupervisorConfig)) -> bool {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("lighthouse.state"), "{}").unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    let mut config = config(2, dir.path());
    config.lighthouse = LighthouseSource::Spawn {
        bind: "127.0.0.1:0".into(),
        command: Box::new(move |launch| {
            tell.send(launch.state_file.exists()).unwrap();
            Command::new("false")
        }),
    };
    change(&mut config);
    Supervisor::start(config, sh("true"), soon()).unwrap_err();
    told.recv().unwrap()
}

#[test]
fn a_lighthouse_does_not_go_by_the_record_of_a_job_of_which_nothing_is_left() {
    assert!(!finds_a_record(|_| {}));
    // Here some may go on: on other nodes, or started by other launchers.
    assert!(finds_a_record(|config| config.hold_lighthouse = true));
    assert!(finds_a_record(|config| config.total_replicas = 4));
}

#[test]
fn a_lighthouse_that_fails_is_shown_with_its_own_words() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(1, dir.path());
    config.lighthouse = LighthouseSource::Spawn {
        bind: "127.0.0.1:0".into(),
        command: Box::new(|_| {
            let mut command = Command::new("sh");
            command.args(["-c", "echo 'error: 127.0.0.1:80 is in use' >&2; exit 3"]);
            command
        }),
    };
    let e = Supervisor::start(config, sh("true"), soon()).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unavailable);
    assert!(
        e.to_string().contains("127.0.0.1:80 is in use") && e.to_string().contains("exit code 3"),
        "{e}"
    );
}

/// The test program as a child: a lighthouse or a replica, by what the environment says. As a test of its own (without
/// that environment) it checks that nothing of it leaks into a normal run.
#[test]
fn as_a_child() {
    let Ok(role) = std::env::var("OXCCL_TEST_ROLE") else {
        assert!(
            std::env::var_os("OXCCL_EVENTS").is_none(),
            "a supervised test run makes no sense"
        );
        return;
    };
    if role == "lighthouse" {
        let bind = std::env::var("OXCCL_TEST_BIND").unwrap();
        let listener = std::net::TcpListener::bind(bind).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        oxccl::launch::announce_lighthouse(&url, soon()).unwrap();
        loop {
            let _ = listener.accept();
        }
    }
    let sender = EventSender::from_env();
    assert!(sender.is_enabled());
    for inner_step in 0..500 {
        sender.send(EventKind::Step {
            inner_step,
            loss: 0.5,
            tokens_per_s: 1.0,
        });
    }
    sender.send(EventKind::Error {
        text: format!(
            "error of incarnation {}",
            std::env::var("OXCCL_INCARNATION").unwrap()
        ),
    });
    sender.flush(soon()).unwrap();
    std::process::exit(if std::env::var("OXCCL_INCARNATION").unwrap() == "0" {
        5
    } else {
        0
    });
}

fn this_test_as(role: &'static str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "as_a_child", "--nocapture"])
        .env("OXCCL_TEST_ROLE", role);
    command
}

#[test]
fn all_that_a_incarnation_reported_comes_before_its_end() {
    for _ in 0..5 {
        let dir = tempfile::tempdir().unwrap();
        let (_supervisor, events) =
            Supervisor::start(config(2, dir.path()), |_| this_test_as("replica"), soon()).unwrap();
        let (seen, outcome) = all(events);
        assert!(outcome.is_success(), "{outcome}");
        for replica in [0, 1] {
            for incarnation in [0, 1] {
                let position =
                    |wanted: &dyn Fn(&SupervisorEvent) -> bool| seen.iter().position(wanted).unwrap();
                let last_output = position(&|e| match e {
                    SupervisorEvent::Replica(e) => {
                        e.replica == replica
                            && e.incarnation == incarnation
                            && e.kind
                                == EventKind::Error {
                                    text: format!("error of incarnation {incarnation}"),
                                }
                    }
                    _ => false,
                });
                let exited = position(
                    &|e| matches!(e, SupervisorEvent::Exited { replica: r, incarnation: l, .. } if (*r, *l) == (replica, incarnation)),
                );
                assert!(last_output < exited, "{seen:?}");
            }
        }
    }
}

#[test]
fn l37_a_lighthouse_that_dies_comes_back_at_the_same_address_and_the_run_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(1, dir.path());
    config.lighthouse = LighthouseSource::Spawn {
        bind: "127.0.0.1:0".into(),
        command: Box::new(|launch| {
            let mut command = this_test_as("lighthouse");
            command.env("OXCCL_TEST_BIND", &launch.bind);
            command
        }),
    };
    let script = "while ! test -e \"$(dirname \"$OXCCL_EVENTS\")/go\"; do sleep 0.01; done";
    let (supervisor, mut events) = Supervisor::start(config, sh(script), soon()).unwrap();
    let url = supervisor.lighthouse().to_owned();
    let lighthouse = child_that_listens(&url);
    rustix::process::kill_process(lighthouse, rustix::process::Signal::KILL).unwrap();
    let exited = until(&mut events, |e| {
        matches!(e, SupervisorEvent::LighthouseExited { .. })
    });
    assert!(matches!(
        exited,
        SupervisorEvent::LighthouseExited {
            restart_in_ms: Some(_),
            ..
        }
    ));
    let up = until(&mut events, |e| matches!(e, SupervisorEvent::LighthouseUp { .. }));
    assert!(
        matches!(&up, SupervisorEvent::LighthouseUp { url: again, .. } if *again == url),
        "{up:?}"
    );
    std::fs::write(dir.path().join("go"), "").unwrap();
    let (_, outcome) = all(events);
    assert!(outcome.is_success(), "{outcome}");
}

/// The process of ours that listens at `url`: the only child of this process whose command line has the role.
fn child_that_listens(url: &str) -> rustix::process::Pid {
    assert!(url.starts_with("http://127.0.0.1:"), "{url}");
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let environment = std::fs::read(entry.path().join("environ")).unwrap_or_default();
        let parent = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        // "pid (name) state parent …"; the name of this program has no ')' in it.
        let parent = parent
            .rsplit_once(") ")
            .and_then(|(_, rest)| rest.split(' ').nth(1).map(str::to_owned));
        let ours = parent == Some(std::process::id().to_string());
        if ours
            && environment
                .split(|b| *b == 0)
                .any(|v| v == b"OXCCL_TEST_ROLE=lighthouse")
        {
            let pid = entry.file_name().to_string_lossy().parse().unwrap();
            return rustix::process::Pid::from_raw(pid).unwrap();
        }
    }
    panic!("no child of this process is a lighthouse");
}

/// Sees a process end, even if it is not collected.
struct Ends(rustix::fd::OwnedFd);

impl Ends {
    fn of(pid: i32) -> Self {
        let pid = rustix::process::Pid::from_raw(pid).unwrap();
        Self(rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap())
    }

    fn wait(&self) {
        let mut fds = [rustix::event::PollFd::new(&self.0, rustix::event::PollFlags::IN)];
        let timeout = rustix::event::Timespec {
            tv_sec: 60,
            tv_nsec: 0,
        };
        assert_eq!(
            rustix::event::poll(&mut fds, Some(&timeout)).unwrap(),
            1,
            "the process did not end"
        );
    }
}
