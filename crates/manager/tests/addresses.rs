//! Replicas that meet over IPv6, and on a port that was chosen for them: lighthouse, manager servers, stores, and a state that is healed.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use checkpoint::StateDict;
use coordination::{LighthouseClient, LighthouseConfig, LighthouseServer};
use ftcore::{ErrorKind, GroupOptions, ReduceOp, Result, Tensor, deadline_in};
use oxccl_manager::{Manager, ManagerConfig, Replica, State};

fn soon() -> Instant {
    deadline_in(Duration::from_secs(30))
}

fn lighthouse(bind: &str) -> LighthouseServer {
    LighthouseServer::start(LighthouseConfig {
        bind: bind.into(),
        initial_replicas: Some(2),
        join_timeout: Duration::from_secs(20),
        heartbeat_timeout: Duration::from_secs(60),
        ..LighthouseConfig::default()
    })
    .unwrap()
}

struct Number(f32);

impl State for Number {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        out.insert_f32("value", &[1], &[self.0])
    }
    fn load(&mut self, from: &StateDict) -> Result<()> {
        self.0 = from.get_f32("value")?[0];
        Ok(())
    }
}

fn manager(name: &str, lighthouse: &str, bind: &str) -> Result<Manager> {
    let group = backend_gloo::GlooGroup::new(name, GroupOptions::default())?;
    let mut config = ManagerConfig::new(name, lighthouse);
    config.bind = bind.into();
    config.timeout = Duration::from_secs(20);
    Manager::new(Arc::new(group), config)
}

/// Two replicas take two steps together, the second of which begins with another state and heals. `binds` is where each listens.
fn two_replicas_meet(lighthouse: &str, binds: [&str; 2]) {
    let mut ends: Vec<(f32, bool)> = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..2u8)
            .zip(binds)
            .map(|(i, bind)| {
                scope.spawn(move || {
                    let mut m = manager(&format!("r{i}"), lighthouse, bind).unwrap();
                    let mut state = Number(f32::from(i) + 1.0);
                    let mut healed = false;
                    for _ in 0..2 {
                        healed |= m.start_quorum(&mut state, soon()).unwrap().healed.is_some();
                        let work = m.all_reduce(vec![Tensor::from_vec(vec![1.0f32; 10])], ReduceOp::Avg);
                        assert!(m.should_commit(soon()).unwrap());
                        state.0 += work
                            .take()
                            .unwrap()
                            .into_tensor()
                            .unwrap()
                            .as_slice::<f32>()
                            .unwrap()[0];
                    }
                    m.leave(soon()).unwrap();
                    (state.0, healed)
                })
            })
            .collect();
        handles.into_iter().map(|h| h.join().unwrap()).collect()
    });
    ends.sort_by_key(|(_, healed)| *healed);
    let [(first, false), (second, true)] = ends[..] else {
        panic!("one heals from the other: {ends:?}")
    };
    assert_eq!(first, second);
}

#[test]
fn replicas_meet_and_heal_over_ipv6() {
    if let Err(e) = TcpListener::bind("[::1]:0") {
        println!("skipped: this machine has no ::1 ({e})");
        return;
    }
    let lighthouse = lighthouse("[::1]:0");
    let url = lighthouse.address();
    assert!(url.starts_with("http://[::1]:"), "{url}");
    two_replicas_meet(&url, ["[::1]:0", "[::1]:0"]);
    let status = LighthouseClient::connect(&url, soon())
        .unwrap()
        .status(soon())
        .unwrap();
    assert!(
        status
            .participants
            .iter()
            .all(|p| p.address.starts_with("http://[::1]:"))
    );
}

#[test]
fn a_fixed_port_is_the_manager_servers_and_the_other_servers_take_free_ones() {
    let lighthouse = lighthouse("127.0.0.1:0");
    let url = lighthouse.address();
    let chosen = TcpListener::bind("127.0.0.1:0").unwrap();
    let bind = chosen.local_addr().unwrap().to_string();
    drop(chosen);
    two_replicas_meet(&url, [&bind, "127.0.0.1:0"]);
    let status = LighthouseClient::connect(&url, soon())
        .unwrap()
        .status(soon())
        .unwrap();
    assert!(
        status
            .participants
            .iter()
            .any(|p| p.address == format!("http://{bind}")),
        "{status:?}"
    );
    for bad in ["127.0.0.1", "::1:0", "127.0.0.1:http"] {
        let e = manager("r", &url, bad).map(drop).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{bad}: {e}");
        assert!(e.message().contains(bad), "{e}");
    }
}
