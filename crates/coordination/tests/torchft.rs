//! The wire, against the real torchft from PyPI: its clients on our servers, our clients on its lighthouse, and replicas of both
//! kinds in one quorum.
//!
//! `OXCCL_TORCHFT_PATH` names the folder with torchft's extension module (`cargo xtask torchft` fetches it and says which); without it every
//! case is skipped. The module runs in a Python process, see `torchft/serve.py`; it needs no torch.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a case that panics has failed, and says where"
)]

mod rig;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ftcore::Step;
use libtest_mimic::{Arguments, Trial};
use oxccl_coordination::{
    CommitVote, LighthouseClient, LighthouseConfig, LighthouseServer, ManagerClient, ManagerServer,
    QuorumRequest,
};
use serde_json::{Value, json};

use rig::{Replica, TIME_LIMIT, client, config, lighthouse, manager_config, quorum, soon, until};

const FOLDER: &str = "OXCCL_TORCHFT_PATH";
/// What torchft's calls get, in seconds.
const SECONDS: f64 = 30.0;

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let folder = std::env::var_os(FOLDER)
        .filter(|f| !f.is_empty())
        .map(PathBuf::from);
    let cases: [Case; 10] = [
        (
            "its_lighthouse_clients_share_a_quorum_of_ours",
            its_lighthouse_clients,
        ),
        (
            "its_client_is_told_why_no_quorum_came_as_a_time_out",
            its_client_times_out,
        ),
        (
            "its_managers_step_commit_and_heal_on_our_lighthouse",
            its_managers,
        ),
        (
            "its_killed_manager_is_gone_long_before_its_heartbeat_is_missed",
            its_killed_manager,
        ),
        (
            "its_managers_that_ask_one_after_the_other_get_one_quorum_of_ours",
            its_managers_in_turn,
        ),
        (
            "its_managers_that_want_no_newcomers_get_none_and_the_newcomer_waits",
            its_shrinking_managers,
        ),
        ("its_manager_clients_vote_on_our_manager", its_manager_clients),
        (
            "our_managers_step_on_its_lighthouse",
            our_managers_on_its_lighthouse,
        ),
        (
            "replicas_of_both_kinds_share_a_quorum_on_our_lighthouse",
            both_on_ours,
        ),
        (
            "replicas_of_both_kinds_share_a_quorum_on_its_lighthouse",
            both_on_its,
        ),
    ];
    if folder.is_none() {
        println!(
            "skipped: {FOLDER} is not set; `cargo xtask torchft` fetches torchft and says how to set it"
        );
    }
    let trials = cases
        .into_iter()
        .map(|(name, case)| {
            let folder = folder.clone();
            Trial::test(name, move || {
                case(&Torchft::start(&folder.unwrap_or_default()));
                Ok(())
            })
            .with_ignored_flag(std::env::var_os(FOLDER).is_none())
        })
        .collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// A name, and what is tried.
type Case = (&'static str, fn(&Torchft));
type Answer = Result<Value, String>;

/// A Python process with torchft in it.
struct Torchft {
    child: Child,
    requests: Mutex<(ChildStdin, u64)>,
    waiting: Arc<Mutex<HashMap<u64, Sender<Answer>>>>,
}

impl Torchft {
    fn start(folder: &std::path::Path) -> Self {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/torchft/serve.py");
        let mut child = Command::new("python3")
            .arg(script)
            .arg(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 starts");
        let requests = Mutex::new((child.stdin.take().unwrap(), 0));
        let waiting: Arc<Mutex<HashMap<u64, Sender<Answer>>>> = Arc::default();
        let (lines, answers) = (BufReader::new(child.stdout.take().unwrap()), waiting.clone());
        std::thread::spawn(move || {
            for line in lines.lines().map_while(Result::ok) {
                let Ok(Value::Object(mut answer)) = serde_json::from_str(&line) else {
                    continue;
                };
                let id = answer.get("id").and_then(Value::as_u64).expect("an id");
                let told = match answer.remove("error") {
                    Some(error) => Err(error.as_str().unwrap_or_default().to_string()),
                    None => Ok(answer.remove("ok").unwrap_or_default()),
                };
                if let Some(caller) = answers.lock().unwrap().remove(&id) {
                    let _ = caller.send(told);
                }
            }
            // The process ended: no rank waits in vain.
            answers.lock().unwrap().clear();
        });
        Self {
            child,
            requests,
            waiting,
        }
    }

    fn ask(&self, mut request: Value) -> Receiver<Answer> {
        let (sender, answer) = channel();
        let mut requests = self.requests.lock().unwrap();
        requests.1 += 1;
        let id = requests.1;
        request["id"] = json!(id);
        self.waiting.lock().unwrap().insert(id, sender);
        writeln!(requests.0, "{request}").expect("python3 reads");
        answer
    }

    fn make(&self, class: &str, name: &str, with: &Value) {
        let made = self.ask(json!({"new": class, "as": name, "with": with}));
        made.recv_timeout(TIME_LIMIT)
            .expect("an answer")
            .unwrap_or_else(|e| panic!("{class}: {e}"));
    }

    fn begin(&self, on: &str, method: &str, with: &Value) -> Receiver<Answer> {
        self.ask(json!({"on": on, "call": method, "with": with}))
    }

    fn call(&self, on: &str, method: &str, with: &Value) -> Value {
        ended(&self.begin(on, method, with))
    }

    fn lighthouse_client(&self, name: &str, address: &str) {
        self.make(
            "LighthouseClient",
            name,
            &json!({"addr": address, "connect_timeout": SECONDS}),
        );
    }

    /// A replica of torchft's: its manager server `id` and a client of it, `client-of-<id>`.
    fn replica(&self, id: &str, lighthouse: &str) -> String {
        self.make(
            "ManagerServer",
            id,
            &json!({"replica_id": id, "lighthouse_addr": lighthouse, "hostname": "127.0.0.1", "bind": "127.0.0.1:0",
                "store_addr": format!("store-of-{id}:1"), "world_size": 1, "heartbeat_interval": 0.1,
                "connect_timeout": SECONDS, "quorum_retries": 0}),
        );
        let address = text(&self.call(id, "address", &json!({})));
        self.manager_client(&format!("client-of-{id}"), &address);
        address
    }

    fn manager_client(&self, name: &str, address: &str) {
        self.make(
            "ManagerClient",
            name,
            &json!({"addr": address, "connect_timeout": SECONDS}),
        );
    }

    /// Asks for a quorum as `client`'s group rank `rank`.
    fn quorum(&self, client: &str, rank: u32, step: i64) -> Receiver<Answer> {
        self.quorum_of(client, rank, step, false)
    }

    /// The same; `shrink_only`: without newcomers.
    fn quorum_of(&self, client: &str, rank: u32, step: i64, shrink_only: bool) -> Receiver<Answer> {
        self.begin(
            client,
            "_quorum",
            &json!({"group_rank": rank, "step": step, "checkpoint_metadata": format!("state-of-{client}"),
                "shrink_only": shrink_only, "timeout": SECONDS, "commit_failures": 0, "init_sync": true}),
        )
    }

    fn vote(&self, client: &str, rank: u32, step: i64, vote: bool) -> Receiver<Answer> {
        self.begin(
            client,
            "should_commit",
            &json!({"group_rank": rank, "step": step, "should_commit": vote, "timeout": SECONDS}),
        )
    }
}

impl Drop for Torchft {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ended(answer: &Receiver<Answer>) -> Value {
    answer
        .recv_timeout(TIME_LIMIT)
        .expect("an answer")
        .unwrap_or_else(|e| panic!("torchft says {e}"))
}

fn text(value: &Value) -> String {
    value
        .as_str()
        .unwrap_or_else(|| panic!("{value} is not a text"))
        .to_string()
}

/// A lighthouse of torchft's, in `torchft`, that waits for two replicas.
fn its_lighthouse(torchft: &Torchft) -> String {
    torchft.make(
        "LighthouseServer",
        "lighthouse",
        &json!({"bind": "127.0.0.1:0", "min_replicas": 2, "join_timeout_ms": 10_000, "quorum_tick_ms": 20}),
    );
    text(&torchft.call("lighthouse", "address", &json!({})))
}

fn its_lighthouse_clients(torchft: &Torchft) {
    let server = lighthouse(2);
    let calls: Vec<_> = (0..2i64)
        .map(|i| {
            let (client, id) = (format!("client-{i}"), format!("replica-{i}"));
            torchft.lighthouse_client(&client, &server.address());
            torchft.call(&client, "heartbeat", &json!({"replica_id": id}));
            torchft.begin(
                &client,
                "quorum",
                &json!({"replica_id": id, "timeout": SECONDS, "address": format!("http://host-{i}:1"),
                    "store_address": format!("store-{i}:1"), "step": i, "world_size": i + 1, "shrink_only": false,
                    "data": {"loss": [0.5, i], "name": "ü"}}),
            )
        })
        .collect();
    let quorums: Vec<Value> = calls.iter().map(ended).collect();
    assert_eq!(quorums[0]["quorum_id"], quorums[1]["quorum_id"]);
    for quorum in &quorums {
        let members = quorum["participants"].as_array().unwrap();
        assert_eq!(members.len(), 2);
        for (i, member) in members.iter().enumerate() {
            let expected = json!({"replica_id": format!("replica-{i}"), "address": format!("http://host-{i}:1"),
                "store_address": format!("store-{i}:1"), "step": i, "world_size": i + 1, "shrink_only": false,
                "data": {"loss": [0.5, i], "name": "ü"}});
            for (field, value) in expected.as_object().unwrap() {
                assert_eq!(&member[field], value, "{field} of {member}");
            }
        }
        assert!(quorum["created"]["seconds"].as_i64().unwrap() > 1_600_000_000);
    }
}

fn its_client_times_out(torchft: &Torchft) {
    let server = lighthouse(2);
    torchft.lighthouse_client("client", &server.address());
    let end = Instant::now() + TIME_LIMIT;
    loop {
        let alone = torchft.begin(
            "client",
            "quorum",
            &json!({"replica_id": "lonely", "timeout": 2.0, "address": "http://host:1", "store_address": "store:1",
                "world_size": 1}),
        );
        let error = alone.recv_timeout(TIME_LIMIT).unwrap().unwrap_err();
        assert!(error.starts_with("TimeoutError"), "{error}");
        if error.contains("lonely") && error.contains("min_replicas is 2") {
            break;
        }
        // The answer left 400 ms before the client gave up, and found no core in time.
        assert!(Instant::now() < end, "{error}");
    }
}

fn its_managers(torchft: &Torchft) {
    let server = lighthouse(2);
    let source = torchft.replica("a", &server.address());
    torchft.replica("b", &server.address());
    let step = |steps: [i64; 2], votes: [bool; 2]| {
        let calls = ["a", "b"].map(|id| format!("client-of-{id}"));
        let asked: Vec<_> = calls
            .iter()
            .zip(steps)
            .map(|(c, s)| torchft.quorum(c, 0, s))
            .collect();
        let quorums: Vec<Value> = asked.iter().map(ended).collect();
        let voted: Vec<_> = calls
            .iter()
            .zip(steps)
            .zip(votes)
            .map(|((c, s), v)| torchft.vote(c, 0, s, v))
            .collect();
        for (vote, answer) in votes.into_iter().zip(&voted) {
            // A vote is a replica's own matter: the other's does not count.
            assert_eq!(ended(answer), json!(vote));
        }
        quorums
    };
    let first = step([0, 0], [true, true]);
    assert_eq!(
        (&first[0]["heal"], &first[1]["heal"]),
        (&json!(false), &json!(true))
    );
    assert_eq!(first[1]["recover_src_manager_address"], json!(source));
    assert_eq!(first[0]["recover_dst_replica_ranks"], json!([1]));
    assert_eq!(first[0]["replica_ids"], json!(["a", "b"]));
    assert_eq!(first[0]["store_address"], "store-of-a:1");
    let state = torchft.call(
        "client-of-a",
        "_checkpoint_metadata",
        &json!({"rank": 0, "timeout": SECONDS}),
    );
    assert_eq!(state, "state-of-client-of-a");
    // No replica came or went: the same epoch, and no replica heals.
    let second = step([1, 1], [true, false]);
    assert_eq!(second[0]["quorum_id"], first[0]["quorum_id"]);
    assert_eq!(
        (&second[0]["heal"], &second[1]["heal"]),
        (&json!(false), &json!(false))
    );
    // The one whose step did not commit is behind now.
    let third = step([2, 1], [true, true]);
    assert_eq!(third[1]["heal"], json!(true));
    assert_eq!(third[1]["recover_src_replica_rank"], json!(0));
    assert_eq!(
        (&third[1]["max_step"], &third[1]["max_replica_rank"]),
        (&json!(2), &json!(null))
    );
}

fn its_killed_manager(torchft: &Torchft) {
    let server = LighthouseServer::start(LighthouseConfig {
        initial_replicas: Some(2),
        ..config(1)
    })
    .unwrap();
    let other = Torchft::start(&PathBuf::from(std::env::var_os(FOLDER).unwrap_or_default()));
    torchft.replica("a", &server.address());
    other.replica("b", &server.address());
    let asked = [
        torchft.quorum("client-of-a", 0, 0),
        other.quorum("client-of-b", 0, 0),
    ];
    for answer in &asked {
        assert_eq!(ended(answer)["replica_ids"], json!(["a", "b"]));
    }
    let tool = LighthouseClient::connect(&server.address(), soon()).unwrap();
    let killed = Instant::now();
    // SIGKILL.
    drop(other);
    let status = until(&tool, "b is gone", |s| {
        s.healthy.iter().all(|h| h.replica_id != "b")
    });
    // The heartbeat time-out is 30 s.
    assert!(
        killed.elapsed() < Duration::from_secs(15),
        "{:?}",
        killed.elapsed()
    );
    assert!(
        status
            .aborted
            .is_some_and(|why| why.contains("its connections broke"))
    );
    assert_eq!(
        ended(&torchft.quorum("client-of-a", 0, 1))["replica_ids"],
        json!(["a"])
    );
    assert!(status.healthy.iter().any(|h| h.replica_id == "a"));
}

/// Its managers send heartbeats from their construction on, long before they ask.
fn its_managers_in_turn(torchft: &Torchft) {
    let server = lighthouse(1);
    let tool = client(&server);
    let ids = ["a", "b", "c"];
    for id in ids {
        torchft.replica(id, &server.address());
        // Its own first heartbeat may still be on its way.
        tool.heartbeat(id, soon()).unwrap();
    }
    let mut asked = Vec::new();
    for (waits, id) in ids.into_iter().enumerate() {
        until(&tool, "those before wait", |s| s.waiting.len() == waits);
        asked.push(torchft.quorum(&format!("client-of-{id}"), 0, 0));
    }
    for answer in &asked {
        let quorum = ended(answer);
        assert_eq!(quorum["replica_ids"], json!(ids), "{quorum}");
    }
}

fn its_shrinking_managers(torchft: &Torchft) {
    let server = LighthouseServer::start(LighthouseConfig {
        initial_replicas: Some(2),
        ..config(1)
    })
    .unwrap();
    let tool = client(&server);
    for id in ["a", "b"] {
        torchft.replica(id, &server.address());
    }
    let members = |step: i64, shrink_only: bool| {
        let a = torchft.quorum_of("client-of-a", 0, step, shrink_only);
        let b = torchft.quorum("client-of-b", 0, step);
        let (a, b) = (ended(&a), ended(&b));
        assert_eq!(a["replica_ids"], b["replica_ids"]);
        a["replica_ids"].clone()
    };
    assert_eq!(members(0, false), json!(["a", "b"]));
    let newcomers = ["c", "d", "e"];
    let waiting = newcomers.map(|id| {
        torchft.replica(id, &server.address());
        torchft.quorum(&format!("client-of-{id}"), 0, 0)
    });
    until(&tool, "the newcomers wait", |s| {
        s.waiting.len() == newcomers.len()
    });
    // They are more than the members, and do not take the majority from them.
    assert_eq!(members(1, true), json!(["a", "b"]));
    assert_eq!(members(2, false), json!(["a", "b", "c", "d", "e"]));
    for newcomer in &waiting {
        assert_eq!(ended(newcomer)["max_step"], json!(2));
    }
}

fn its_manager_clients(torchft: &Torchft) {
    let lighthouse = lighthouse(1);
    let server = ManagerServer::start(manager_config("ours", &lighthouse.address(), 2)).unwrap();
    for rank in 0..2 {
        torchft.manager_client(&format!("rank-{rank}"), &server.address());
    }
    for (step, votes) in [(0, [true, true]), (1, [true, false]), (1, [true, true])] {
        let asked = [0, 1].map(|rank| torchft.quorum(&format!("rank-{rank}"), rank, step));
        for (rank, asked) in asked.iter().enumerate() {
            let quorum = ended(asked);
            assert_eq!(quorum["replica_world_size"], 1);
            assert_eq!(quorum["max_step"], step);
            assert_eq!(quorum["replica_ids"], json!(["ours"]));
            let state = torchft.call(
                "rank-0",
                "_checkpoint_metadata",
                &json!({"rank": rank, "timeout": SECONDS}),
            );
            assert_eq!(text(&state), format!("state-of-rank-{rank}"));
        }
        let voted =
            [0u32, 1].map(|rank| torchft.vote(&format!("rank-{rank}"), rank, step, votes[rank as usize]));
        // One rank that says no is enough, and all ranks are told the same.
        for answer in &voted {
            assert_eq!(ended(answer), json!(votes == [true, true]), "step {step}");
        }
    }
}

fn our_managers_on_its_lighthouse(torchft: &Torchft) {
    let address = its_lighthouse(torchft);
    let (mut a, mut b) = (Replica::start("a", &address), Replica::start("b", &address));
    let first = quorum(&mut [&mut a, &mut b], 0);
    assert_eq!((first[0].heal, first[1].heal), (false, true));
    assert_eq!(first[1].recover_src_manager_address, a.server.address());
    for (replica, result) in [(&a, &first[0]), (&b, &first[1])] {
        let vote = CommitVote {
            step: Step(0),
            quorum_id: result.quorum_id,
            vote: true,
            ..CommitVote::default()
        };
        assert!(replica.client.should_commit(&vote, soon()).unwrap());
    }
    let second = quorum(&mut [&mut a, &mut b], 1);
    assert_eq!(second[0].replica_ids, ["a", "b"]);
    assert_eq!((second[0].heal, second[1].heal), (false, false));
}

/// One replica of each kind on the lighthouse at `address`; the healing one gets the other's address and state.
fn both(torchft: &Torchft, address: &str) {
    let theirs = torchft.replica("a-theirs", address);
    let server = ManagerServer::start(manager_config("b-ours", address, 1)).unwrap();
    let client = ManagerClient::connect(&server.address(), soon()).unwrap();
    let step = |its: i64, our: i64| {
        let asked = torchft.quorum("client-of-a-theirs", 0, its);
        let request = QuorumRequest {
            step: Step(our),
            init_sync: true,
            checkpoint_metadata: "state-of-ours".into(),
            ..QuorumRequest::default()
        };
        let got = client.quorum(&request, soon()).unwrap();
        (ended(&asked), got)
    };
    let (its, our) = step(0, 0);
    assert_eq!(its["quorum_id"], our.quorum_id.signed());
    assert_eq!(its["replica_ids"], json!(our.replica_ids));
    assert_eq!((its["heal"].as_bool(), our.heal), (Some(false), true));
    assert_eq!(our.recover_src_manager_address, theirs);
    let source = ManagerClient::connect(&our.recover_src_manager_address, soon()).unwrap();
    assert_eq!(
        source.checkpoint_metadata(0, soon()).unwrap(),
        "state-of-client-of-a-theirs"
    );
    // Now theirs is behind, and heals from ours.
    let (its, our) = step(3, 5);
    assert_eq!((its["heal"].as_bool(), our.heal), (Some(true), false));
    assert_eq!(our.recover_dst_replica_ranks, [0]);
    assert_eq!(its["recover_src_manager_address"], json!(server.address()));
    torchft.manager_client("source", &server.address());
    let state = torchft.call(
        "source",
        "_checkpoint_metadata",
        &json!({"rank": 0, "timeout": SECONDS}),
    );
    assert_eq!(state, "state-of-ours");
}

fn both_on_ours(torchft: &Torchft) {
    let server = LighthouseServer::start(LighthouseConfig {
        join_timeout: Duration::from_secs(10),
        ..config(2)
    })
    .unwrap();
    both(torchft, &server.address());
}

fn both_on_its(torchft: &Torchft) {
    let address = its_lighthouse(torchft);
    both(torchft, &address);
}
