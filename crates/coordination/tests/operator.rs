//! What an operator asks of a replica over the lighthouse: drain, evict, kill.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use ftcore::{ErrorKind, Result};
use oxccl_coordination::{
    LighthouseClient, LighthouseConfig, LighthouseServer, Member, Order, OrderKind, OrderedReplica, PushEvent,
};

use crate::rig::{Replica, TIME_LIMIT, client, config, lighthouse, member, quorum, quorum_of, soon, until};

fn order(tool: &LighthouseClient, kind: OrderKind, replica: &str) -> Result<Vec<String>> {
    let order = Order {
        kind,
        reason: "the host is repaired".into(),
    };
    tool.operate(replica, order, soon())
}

fn ordered(replica: &str) -> OrderedReplica {
    OrderedReplica {
        replica_id: replica.into(),
        reason: "the host is repaired".into(),
    }
}

#[test]
fn a_drained_replica_learns_it_with_a_quorum_and_the_others_do_not() {
    let lighthouse = lighthouse(2);
    let tool = client(&lighthouse);
    let (mut a, mut b) = (
        Replica::start("a:1", &lighthouse.address()),
        Replica::start("b:1", &lighthouse.address()),
    );
    let first = quorum_of(&mut [&mut a, &mut b], 0);
    assert!(first.iter().all(|r| !r.draining));
    until(&tool, "both streams are open", |s| s.attached.len() == 2);
    assert_eq!(order(&tool, OrderKind::Drain, "b").unwrap(), ["b:1"]);
    let draining = tool.status(soon()).unwrap().draining;
    assert_eq!(draining, [ordered("b:1")], "the page shows it");
    let end = soon();
    loop {
        let results = quorum_of(&mut [&mut a, &mut b], 1);
        assert!(!results[0].draining);
        if results[1].draining {
            break;
        }
        assert!(std::time::Instant::now() < end, "b never learns it");
    }
}

#[test]
fn an_evicted_replica_is_told_why_and_takes_part_again_once_it_is_started_again() {
    let lighthouse = LighthouseServer::start(LighthouseConfig {
        initial_replicas: Some(2),
        ..config(1)
    })
    .unwrap();
    let tool = client(&lighthouse);
    let (mut a, mut b) = (
        Replica::start("a:1", &lighthouse.address()),
        Replica::start("b:1", &lighthouse.address()),
    );
    let first = quorum_of(&mut [&mut a, &mut b], 0);
    let e = order(&tool, OrderKind::Evict, "c").unwrap_err();
    assert_eq!(e.kind(), ErrorKind::NotFound);
    assert!(e.message().contains("a:1, b:1"), "{e}");
    order(&tool, OrderKind::Evict, "b:1").unwrap();
    assert_eq!(tool.status(soon()).unwrap().evicted, [ordered("b:1")]);
    let (reason, departed) = a.abort_of(first[0].quorum_id);
    assert_eq!(departed, ["b:1"]);
    assert!(
        reason.contains("evicted by the operator: the host is repaired"),
        "{reason}"
    );
    let e = b.client.quorum(&b.request(1), soon()).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Conflict, "{e}");
    assert!(
        !e.is_retryable() && e.message().contains("the host is repaired"),
        "{e}"
    );
    assert_eq!(quorum_of(&mut [&mut a], 1)[0].replica_ids, ["a:1"]);
    let mut again = Replica::start("b:2", &lighthouse.address());
    std::thread::scope(|scope| {
        scope.spawn(|| quorum(&mut [&mut again], 0));
        until(&tool, "b asks again", |s| {
            s.waiting.iter().any(|w| w.replica_id == "b:2")
        });
        assert_eq!(tool.status(soon()).unwrap().evicted, [], "it was started again");
        let request = a.request(2);
        assert_eq!(
            a.client.quorum(&request, soon()).unwrap().replica_ids,
            ["a:1", "b:2"]
        );
    });
}

#[test]
fn a_kill_reaches_the_ranks_that_watch() {
    let lighthouse = lighthouse(1);
    let tool = client(&lighthouse);
    let mut a = Replica::start("a:1", &lighthouse.address());
    quorum_of(&mut [&mut a], 0);
    until(&tool, "its stream is open", |s| s.attached == ["a:1"]);
    order(&tool, OrderKind::Kill, "a").unwrap();
    let event = a.events.recv_timeout(TIME_LIMIT).unwrap();
    let PushEvent::Kill { reason } = event else {
        panic!("{event:?}")
    };
    assert!(
        reason.contains("killed by the operator: the host is repaired"),
        "{reason}"
    );
}

#[test]
fn an_evicted_replica_is_refused_by_a_restarted_lighthouse_too() {
    let folder = tempfile::tempdir().unwrap();
    let start = || {
        LighthouseServer::start(LighthouseConfig {
            state_file: Some(folder.path().join("state")),
            ..config(1)
        })
        .unwrap()
    };
    let of = |incarnation: &str| Member {
        incarnation: incarnation.into(),
        ..member("b:1")
    };
    let first = start();
    let tool = client(&first);
    tool.quorum(&of("a process"), soon()).unwrap();
    assert_eq!(order(&tool, OrderKind::Evict, "b").unwrap(), ["b:1"]);
    first.shutdown(soon()).unwrap();
    let second = start();
    let e = client(&second).quorum(&of("a process"), soon()).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Conflict, "{e}");
    assert!(e.to_string().contains("the host is repaired"), "{e}");
}
