//! The event log of real managers: what a replica went through, and a disk that is full.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a failure here is a failed test"
)]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use checkpoint::StateDict;
use coordination::{LighthouseConfig, LighthouseServer};
use ftcore::{GroupOptions, ReduceOp, Result, Tensor, deadline_in};
use oxccl_manager::{Manager, ManagerConfig, Replica, State};
use serde_json::Value;

fn soon() -> Instant {
    deadline_in(Duration::from_secs(60))
}

struct Sum(f32);

impl State for Sum {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        out.insert_f32("sum", &[1], &[self.0])
    }
    fn load(&mut self, from: &StateDict) -> Result<()> {
        self.0 = from.get_f32_shaped("sum", &[1])?[0];
        Ok(())
    }
}

fn lighthouse() -> LighthouseServer {
    LighthouseServer::start(LighthouseConfig {
        bind: "127.0.0.1:0".into(),
        min_replicas: 1,
        join_timeout: Duration::from_secs(20),
        heartbeat_timeout: Duration::from_secs(60),
        ..LighthouseConfig::default()
    })
    .unwrap()
}

fn manager(name: &str, lighthouse: &str, log: &Path) -> Manager {
    let group = backend_gloo::GlooGroup::new(name, GroupOptions::default()).unwrap();
    let mut config = ManagerConfig::new(name, lighthouse);
    config.timeout = Duration::from_secs(20);
    config.init_sync = false;
    config.event_log = Some(log.to_path_buf());
    Manager::new(Arc::new(group), config).unwrap()
}

/// One attempt at a step that adds 1. The number of members, if it committed.
fn step(m: &mut Manager, state: &mut Sum) -> Option<u32> {
    let quorum = m.start_quorum(state, soon()).unwrap();
    let sum = m
        .all_reduce(vec![Tensor::from_vec(vec![1.0f32])], ReduceOp::Avg)
        .take();
    m.should_commit(soon()).unwrap().then(|| {
        state.0 += sum.unwrap().into_tensor().unwrap().as_slice::<f32>().unwrap()[0];
        quorum.replica_world_size
    })
}

fn lines(folder: &Path, name: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(folder.join(format!("events-{name}.jsonl"))).unwrap();
    text.lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

#[test]
fn a_replica_writes_what_it_went_through_and_another_incarnation_goes_on_in_its_file() {
    let (lighthouse, folder) = (lighthouse(), tempfile::tempdir().unwrap());
    let (url, log) = (lighthouse.address(), folder.path());
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let a = scope.spawn(|| {
            let (mut m, mut state) = (manager("a", &url, log), Sum(0.0));
            while !over.load(Ordering::Relaxed) {
                step(&mut m, &mut state);
            }
            m.leave(soon()).unwrap();
            m.replica_id().to_string()
        });
        // It comes later, takes a's state, and dies without a word.
        let (mut m, mut state) = (manager("b", &url, log), Sum(0.0));
        while step(&mut m, &mut state) != Some(2) {
            assert!(!a.is_finished());
        }
        let first = m.replica_id().to_string();
        drop(m);
        let (mut m, mut state) = (manager("b", &url, log), Sum(0.0));
        while step(&mut m, &mut state) != Some(2) {
            assert!(!a.is_finished());
        }
        let second = m.replica_id().to_string();
        over.store(true, Ordering::Relaxed);
        m.leave(soon()).unwrap();
        let a_id = a.join().unwrap();

        let of_b = lines(log, "b");
        let events = |id: &str| -> Vec<&str> {
            let own = of_b.iter().filter(|l| l["replica_id"] == id);
            own.map(|l| l["event"].as_str().unwrap()).collect()
        };
        for id in [&first, &second] {
            assert_eq!(events(id).first(), Some(&"start"), "{of_b:?}");
            for needed in ["quorum", "configure", "commit"] {
                assert!(events(id).contains(&needed), "{needed} of {id}: {of_b:?}");
            }
        }
        assert!(!events(&first).contains(&"end"), "it died: {of_b:?}");
        assert_eq!(events(&second).last(), Some(&"end"), "{of_b:?}");
        let heal = of_b
            .iter()
            .find(|l| l["event"] == "heal" && l["replica_id"] == *second)
            .unwrap();
        assert_eq!(heal["from"], serde_json::json!([a_id]), "{heal}");
        assert!(
            heal["bytes"].as_u64().unwrap() >= 4 && heal["took_s"].as_f64().unwrap() > 0.0,
            "{heal}"
        );
        let of_a = lines(log, "a");
        let lost = of_a.iter().find(|l| l["event"] == "member_lost").unwrap();
        assert_eq!(lost["member"], *first, "{of_a:?}");
        let abort = of_a
            .iter()
            .find(|l| l["event"] == "abort" && l["epoch"] == lost["epoch"])
            .unwrap();
        // Of the lighthouse, which names it, or of the group, which may have noticed before.
        let reason = abort["reason"].as_str().unwrap();
        assert!(reason.contains(&first) || reason.contains("peer 1: "), "{abort}");
        // What committed counts up without a gap, and the times do not go back.
        let steps: Vec<i64> = of_a
            .iter()
            .filter(|l| l["event"] == "commit")
            .map(|l| l["step"].as_i64().unwrap())
            .collect();
        assert!(
            steps.windows(2).all(|w| w[1] == w[0] + 1) && steps.len() > 2,
            "{steps:?}"
        );
        let times: Vec<f64> = of_a.iter().map(|l| l["time"].as_f64().unwrap()).collect();
        assert!(times.iter().all(|t| *t > 1.7e9), "seconds since 1970: {times:?}");
    });
}

#[test]
fn a_disk_that_is_full_from_the_start_costs_no_step() {
    let (lighthouse, folder) = (lighthouse(), tempfile::tempdir().unwrap());
    std::os::unix::fs::symlink("/dev/full", folder.path().join("events-a.jsonl")).unwrap();
    let (mut m, mut state) = (manager("a", &lighthouse.address(), folder.path()), Sum(0.0));
    for done in 1..=20 {
        assert_eq!(step(&mut m, &mut state), Some(1), "step {done}");
    }
    m.leave(soon()).unwrap();
    assert_eq!(state.0, 20.0);
}
