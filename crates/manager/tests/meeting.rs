//! The ranks of a replica find each other through a store that outlives them, as an elastic launcher's does.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use coordination::{LighthouseConfig, LighthouseServer};
use ftcore::{GroupOptions, InMemoryStore, ReduceOp, Store, Tensor, deadline_in};
use oxccl_manager::{Manager, ManagerConfig, Replica};
use training_rig::Nothing;

const KEY: &str = "oxccl/manager";

fn soon() -> Instant {
    deadline_in(Duration::from_secs(60))
}

fn lighthouse() -> LighthouseServer {
    LighthouseServer::start(LighthouseConfig {
        bind: "127.0.0.1:0".into(),
        initial_replicas: Some(1),
        ..LighthouseConfig::default()
    })
    .unwrap()
}

fn rank(group_rank: u32, lighthouse: &LighthouseServer, meet: &Arc<dyn Store>) -> Manager {
    let group = backend_gloo::GlooGroup::new("r0", GroupOptions::default()).unwrap();
    let mut config = ManagerConfig::new("r0", lighthouse.address());
    (config.group_rank, config.group_world_size) = (group_rank, 2);
    config.replica_store = Some(meet.clone());
    Manager::new(Arc::new(group), config).unwrap()
}

/// A step of both, and their end.
fn lives(mut ranks: [Manager; 2]) {
    assert_eq!(ranks[0].replica_id(), ranks[1].replica_id());
    std::thread::scope(|scope| {
        for m in &mut ranks {
            scope.spawn(|| {
                m.start_quorum(&mut Nothing, soon()).unwrap();
                m.all_reduce(vec![Tensor::from_vec(vec![1.0f32])], ReduceOp::Sum)
                    .take()
                    .unwrap();
                assert!(m.should_commit(soon()).unwrap());
            });
        }
    });
    let [mut first, mut second] = ranks;
    second.leave(soon()).unwrap();
    first.leave(soon()).unwrap();
}

/// Both ranks, of which rank 1 is there first and has met with the address of the incarnation before.
fn comes_again(lighthouse: &LighthouseServer, meet: &Arc<dyn Store>) -> [Manager; 2] {
    let told = String::from_utf8(meet.get(KEY, soon()).unwrap()).unwrap();
    let (address, _) = told.split_once('\n').unwrap();
    // In the place of the server that was there, so as to see when the rank comes.
    let gone = TcpListener::bind(address.strip_prefix("http://").unwrap()).unwrap();
    std::thread::scope(|scope| {
        let second = scope.spawn(|| rank(1, lighthouse, meet));
        drop(gone.accept().unwrap());
        drop(gone);
        let first = rank(0, lighthouse, meet);
        [first, second.join().unwrap()]
    })
}

#[test]
fn a_rank_that_comes_back_first_does_not_take_the_servers_of_the_incarnation_before() {
    let lighthouse = lighthouse();
    let meet: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let first = rank(0, &lighthouse, &meet);
    let second = rank(1, &lighthouse, &meet);
    lives([first, second]);
    lives(comes_again(&lighthouse, &meet));
    lives(comes_again(&lighthouse, &meet));
}

#[test]
fn a_rank_that_had_not_come_in_the_incarnation_before_finds_the_present_one() {
    let lighthouse = lighthouse();
    let meet: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    rank(0, &lighthouse, &meet).leave(soon()).unwrap();
    lives(comes_again(&lighthouse, &meet));
}
