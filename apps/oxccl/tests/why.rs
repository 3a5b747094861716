//! `oxccl why` of real lighthouses: what a job waits for, on whom, and what would free it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{Read as _, Write as _};
use std::process::Command;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use oxccl::coordination::{
    LighthouseClient, LighthouseConfig, LighthouseServer, LighthouseStatus, Member, Quorum,
};
use oxccl::core::Step;
use oxccl::core::{Credentials, Result, deadline_in};

/// Generous: only a hang reaches it.
const LONG: Duration = Duration::from_secs(60);

fn config(min_replicas: usize) -> LighthouseConfig {
    LighthouseConfig {
        bind: "127.0.0.1:0".into(),
        min_replicas,
        join_timeout: LONG,
        heartbeat_timeout: LONG,
        ..LighthouseConfig::default()
    }
}

fn lighthouse(config: LighthouseConfig) -> LighthouseServer {
    LighthouseServer::start(config).unwrap()
}

/// A replica of one rank.
struct Replica {
    id: &'static str,
    client: LighthouseClient,
}

impl Replica {
    fn new(id: &'static str, url: &str) -> Self {
        let client = LighthouseClient::connect_as(None, url, deadline_in(LONG)).unwrap();
        Self { id, client }
    }

    /// Asks for the quorum of a step, in a thread of its own.
    fn asks(&self, step: i64) -> JoinHandle<Result<Quorum>> {
        self.asks_of(step, "")
    }

    fn asks_of(&self, step: i64, lineage: &str) -> JoinHandle<Result<Quorum>> {
        let client = self.client.clone();
        let member = Member {
            replica_id: self.id.into(),
            address: format!("http://{}", self.id),
            store_address: "127.0.0.1:1".into(),
            step: Step(step),
            world_size: 1,
            lineage: lineage.into(),
            ..Member::default()
        };
        std::thread::spawn(move || client.quorum(&member, deadline_in(LONG)))
    }
}

fn together(replicas: &[&Replica], step: i64) {
    let calls: Vec<_> = replicas.iter().map(|r| r.asks(step)).collect();
    for call in calls {
        let quorum = call.join().unwrap().unwrap();
        assert_eq!(quorum.participants.len(), replicas.len());
    }
}

fn until(client: &LighthouseClient, what: &str, ready: impl Fn(&LighthouseStatus) -> bool) {
    let until = deadline_in(LONG);
    loop {
        let status = client.status(until).unwrap();
        if ready(&status) {
            return;
        }
        assert!(Instant::now() < until, "{what} did not happen: {status:#?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oxccl"));
    command.arg("why").args(arguments);
    for variable in ["LIGHTHOUSE", "CREDENTIALS", "INSECURE", "LOG"] {
        command.env_remove(format!("OXCCL_{variable}"));
    }
    command
}

/// What the command says, and its exit code.
fn why(arguments: &[&str]) -> (Option<i32>, String) {
    let output = command(arguments).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (
        output.status.code(),
        text + &String::from_utf8_lossy(&output.stderr),
    )
}

fn says(url: &str, code: i32, parts: &[&str]) {
    let (found, text) = why(&[url]);
    for part in parts {
        assert!(text.contains(part), "{part} in: {text}");
    }
    assert_eq!(found, Some(code), "{text}");
}

#[test]
fn a_job_that_waits_for_its_replicas_says_how_many_are_missing() {
    let lighthouse = lighthouse(config(3));
    let url = lighthouse.address();
    says(
        &url,
        1,
        &["no replica has asked for a quorum", "3 replicas at least"],
    );
    let a = Replica::new("a:1", &url);
    let call = a.asks(0);
    until(&a.client, "the call", |s| s.waiting.len() == 1);
    let parts = [
        "1 replica waits for a quorum since",
        "(a:1)",
        "min_replicas is 3",
        "start 2 replicas more",
    ];
    says(&url, 1, &parts);
    let (code, text) = why(&["--json", &url]);
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((code, &json["stuck"]), (Some(1), &true.into()), "{text}");
    assert!(
        json["frees"].as_str().unwrap().contains("start 2 replicas more"),
        "{text}"
    );
    lighthouse.shutdown(deadline_in(LONG)).unwrap();
    call.join().unwrap().unwrap_err();
}

#[test]
fn a_healthy_job_says_which_step_it_has_committed() {
    let lighthouse = lighthouse(config(2));
    let url = lighthouse.address();
    let (a, b) = (Replica::new("a:1", &url), Replica::new("b:1", &url));
    together(&[&a, &b], 500);
    together(&[&a, &b], 501);
    says(
        &url,
        0,
        &["nothing is stuck: step 501 committed", "ago by 2 replicas"],
    );
}

#[test]
fn a_replica_whose_rank_hangs_is_named_while_the_others_wait_and_after_its_servers_gave_up() {
    let lighthouse = lighthouse(LighthouseConfig {
        initial_replicas: Some(2),
        ..config(1)
    });
    let url = lighthouse.address();
    let (a, b) = (Replica::new("a:1", &url), Replica::new("b:1", &url));
    together(&[&a, &b], 7);
    // b is in its step still.
    let call = a.asks(8);
    until(&a.client, "the call", |s| s.waiting.len() == 1);
    // For a while that is how steps end.
    says(
        &url,
        0,
        &["nothing is stuck: 1 replica asked", "no strict majority"],
    );
    let mut later = a.client.status(deadline_in(LONG)).unwrap();
    later.waiting[0].waiting_ms += 60_000;
    let later = later.explain();
    assert!(later.stuck, "{later:?}");
    let parts = [
        "1 replica waits for a quorum since 60 s",
        "no strict majority",
        "b:1 must finish the step and ask",
        "evict",
    ];
    for part in parts {
        assert!(
            format!("{} {}", later.text, later.frees).contains(part),
            "{part} in: {later:?}"
        );
    }
    b.client
        .failed("b:1", "rank 1 shows no progress", deadline_in(LONG))
        .unwrap();
    let alone = call.join().unwrap().unwrap();
    assert_eq!(alone.participants.len(), 1);
    says(
        &url,
        0,
        &[
            "nothing is stuck: step 8 committed",
            "b:1 is out since",
            "rank 1 shows no progress",
        ],
    );
}

#[test]
fn a_dead_replica_is_named_with_what_it_died_of() {
    let lighthouse = lighthouse(config(2));
    let url = lighthouse.address();
    let (a, b) = (Replica::new("a:1", &url), Replica::new("b:1", &url));
    together(&[&a, &b], 7);
    // Its connections end, as those of a process that was killed do.
    drop(b);
    until(&a.client, "the death", |s| s.healthy.len() == 1);
    says(
        &url,
        1,
        &["was ended (b:1 is gone", "a:1 must come out of the step"],
    );
    let call = a.asks(7);
    until(&a.client, "the call", |s| s.waiting.len() == 1);
    let parts = [
        "min_replicas is 2",
        "start 1 replica more",
        "b:1 is out since",
        "its connections broke",
    ];
    says(&url, 1, &parts);
    drop(lighthouse);
    call.join().unwrap().unwrap_err();
}

#[test]
fn a_record_that_no_replica_descends_from_says_which_state_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let kept = || LighthouseConfig {
        state_file: Some(folder.path().join("record.json")),
        // The recorded members count as healthy for that long.
        heartbeat_timeout: Duration::from_secs(3),
        ..config(2)
    };
    let first = lighthouse(kept());
    let (a, b) = (
        Replica::new("a:1", &first.address()),
        Replica::new("b:1", &first.address()),
    );
    together(&[&a, &b], 10);
    drop((a, b));
    drop(first);
    // Others come, with checkpoints of an earlier step.
    let second = lighthouse(kept());
    let url = second.address();
    let (c, d) = (Replica::new("c:1", &url), Replica::new("d:1", &url));
    let calls = [c.asks(3), d.asks(3)];
    until(&c.client, "the calls", |s| {
        s.waiting.len() == 2 && s.verdict == "goes_back"
    });
    says(
        &url,
        1,
        &[
            "behind the recorded step 10",
            "--accept-rollback",
            "start a replica that has the recorded state",
        ],
    );
    // One that is ahead, with a history of its own.
    let e = Replica::new("e:1", &url);
    e.asks_of(12, "0123456789abcdef").join().unwrap().unwrap_err();
    says(&url, 1, &["e:1 was refused"]);
    drop(second);
    for call in calls {
        call.join().unwrap().unwrap_err();
    }
}

#[test]
fn a_job_with_credentials_answers_its_own_people_only() {
    let folder = tempfile::tempdir().unwrap();
    let (ours, theirs) = (folder.path().join("ours"), folder.path().join("theirs"));
    for job in [&ours, &theirs] {
        oxccl::identity::create(job, None).unwrap();
    }
    let lighthouse = lighthouse(LighthouseConfig {
        credentials: vec![Credentials::load(&ours).unwrap()],
        ..config(1)
    });
    let url = lighthouse.address();
    let with =
        |dir: &std::path::Path| why(&["--credentials", dir.to_str().unwrap(), "--timeout-s", "20", &url]);
    let (code, text) = with(&ours);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("no replica has asked for a quorum"), "{text}");
    let (code, text) = with(&theirs);
    assert_ne!(code, Some(0), "{text}");
    assert!(!text.contains("no replica has asked"), "{text}");
}

#[test]
fn of_several_lighthouses_one_that_is_gone_is_passed_over_and_none_at_all_is_exit_code_3() {
    let lighthouse = lighthouse(config(1));
    let gone = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        format!("http://{}", listener.local_addr().unwrap())
    };
    let (code, text) = why(&[&format!("{gone},{}", lighthouse.address())]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("no replica has asked for a quorum"), "{text}");
    let (code, text) = why(&["--timeout-s", "1", &gone]);
    assert_eq!(code, Some(3), "{text}");
}

#[test]
fn what_listens_and_is_silent_or_is_no_lighthouse_is_no_job_that_waits() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", silent.local_addr().unwrap());
    let (code, text) = why(&["--timeout-s", "1", &url]);
    assert_eq!(code, Some(3), "{text}");
    assert!(text.contains(&url), "{text}");
    // A page that is not a lighthouse's.
    let foreign = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", foreign.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in foreign.incoming().map_while(Result::ok) {
            let mut stream: std::net::TcpStream = stream;
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
        }
    });
    let (code, text) = why(&["--timeout-s", "2", &url]);
    assert_eq!(code, Some(3), "{text}");
}
