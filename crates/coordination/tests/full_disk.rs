//! A lighthouse whose disk takes no more: it delivers nothing that it could not record, says so, and goes on once there is room.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

mod rig;

use std::process::Command;

use ftcore::{Epoch, ErrorKind, Result};
use oxccl_coordination::{LighthouseConfig, LighthouseServer, Order, OrderKind, Quorum};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use rig::{client, config, member, soon};

const NAME: &str =
    "what_the_disk_does_not_take_is_not_delivered_and_the_lighthouse_goes_on_once_there_is_room";
/// Set in the process that plays it: a limit is that of a whole process.
const CHILD: &str = "OXCCL_TEST_FULL_DISK";

/// From now on this process can write files of `bytes` only; `None`: of any length.
fn room(bytes: Option<u64>) {
    let maximum = getrlimit(Resource::Fsize).maximum;
    let limit = Rlimit {
        current: bytes.or(maximum),
        maximum,
    };
    setrlimit(Resource::Fsize, limit).unwrap();
}

#[test]
fn what_the_disk_does_not_take_is_not_delivered_and_the_lighthouse_goes_on_once_there_is_room() {
    if std::env::var_os(CHILD).is_none() {
        // A write beyond the limit is an error instead of a signal.
        let played = Command::new("sh")
            .args(["-c", "trap '' XFSZ; exec \"$0\" --exact \"$1\" --nocapture"])
            .arg(std::env::current_exe().unwrap())
            .arg(NAME)
            .env(CHILD, "1")
            .output()
            .unwrap();
        let told = String::from_utf8_lossy(&played.stderr);
        assert!(played.status.success(), "{told}");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("state");
    let recorded = || std::fs::read_to_string(&file).unwrap();
    let lighthouse = LighthouseServer::start(LighthouseConfig {
        state_file: Some(file.clone()),
        ..config(2)
    })
    .unwrap();
    let ask = |ids: [&str; 2]| -> Vec<Result<Quorum>> {
        std::thread::scope(|scope| {
            let calls = ids.map(|id| {
                let lighthouse = &lighthouse;
                scope.spawn(move || client(lighthouse).quorum(&member(id), soon()))
            });
            calls.map(|call| call.join().unwrap()).into()
        })
    };
    let epoch = |told: Vec<Result<Quorum>>| {
        let ids: Vec<Epoch> = told.into_iter().map(|quorum| quorum.unwrap().quorum_id).collect();
        assert_eq!(ids[0], ids[1]);
        ids[0]
    };
    let first = epoch(ask(["a:1", "b:1"]));
    assert!(recorded().contains(&first.to_string()));

    room(Some(0));
    // Both are started again, which makes an epoch of its own.
    let tool = client(&lighthouse);
    for id in ["a:1", "b:1"] {
        tool.leave(id, "", soon()).unwrap();
    }
    for _ in 0..2 {
        for told in ask(["a:2", "b:2"]) {
            let e = told.unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Unavailable, "{e}");
            assert!(e.to_string().contains("cannot save the job's record"), "{e}");
            assert!(e.to_string().contains(&file.display().to_string()), "{e}");
        }
    }
    // An eviction holds now, and the operator hears that it may not for long.
    let evict = Order {
        kind: OrderKind::Evict,
        reason: String::new(),
    };
    let e = tool.operate("b", evict, soon()).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unavailable, "{e}");
    assert!(e.to_string().contains("b:2 is out now"), "{e}");
    assert!(e.to_string().contains(&file.display().to_string()), "{e}");
    // It is there all the same, and what stands in the file is whole.
    tool.status(soon()).unwrap();
    assert!(recorded().contains(&first.to_string()));

    room(None);
    let next = epoch(ask(["a:2", "b:3"]));
    assert!(next > first);
    assert!(recorded().contains(&next.to_string()), "{}", recorded());
}
