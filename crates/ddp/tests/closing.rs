//! The end of a run whose number of steps only the training loops know, over a real lighthouse.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use backend_gloo::GlooGroup;
use coordination::{LighthouseClient, LighthouseConfig, LighthouseServer};
use ftcore::{ErrorKind, GroupOptions, Step, deadline_in};
use manager::{Manager, ManagerConfig};
use oxccl_ddp::{Ddp, DdpConfig, Slot};

fn soon() -> Instant {
    deadline_in(Duration::from_secs(60))
}

fn made(name: &str, lighthouse: &str) -> Ddp<Manager> {
    let group = GlooGroup::new(name, GroupOptions::default()).unwrap();
    let manager = Manager::new(Arc::new(group), ManagerConfig::new(name, lighthouse)).unwrap();
    let config = DdpConfig {
        steps: None,
        step_timeout: Duration::from_secs(20),
        ..DdpConfig::default()
    };
    Ddp::new(manager, &[Slot::f32(1)], config).unwrap()
}

#[test]
fn a_replica_that_comes_back_in_the_closing_round_is_told_that_it_is_one() {
    let lighthouse = LighthouseServer::start(LighthouseConfig {
        bind: "127.0.0.1:0".into(),
        initial_replicas: Some(1),
        join_timeout: Duration::from_secs(60),
        heartbeat_timeout: Duration::from_secs(60),
        ..LighthouseConfig::default()
    })
    .unwrap();
    let url = lighthouse.address();
    let mut a = made("a", &url);
    let mut weight = vec![0.0f32];
    for _ in 0..3 {
        let add = |w: &mut Vec<f32>, mean: &[Vec<f32>]| {
            w[0] += mean[0][0];
            Ok(())
        };
        a.step(&mut weight, |_, _| Ok(vec![vec![2.0]]), add).unwrap();
    }
    std::thread::scope(|scope| {
        let c = scope.spawn(|| {
            let mut c = made("c", &url);
            let mut weight = vec![-1.0f32];
            // Its training loop does not know how far the others are.
            let report = c.step(
                &mut weight,
                |_, _| panic!("it computes"),
                |_, _| panic!("it applies"),
            );
            assert_eq!(report.unwrap().step, Step(3));
            assert!(c.is_finished());
            let e = c.step(&mut weight, |_, _| panic!("a step after the end"), |_, _| Ok(()));
            assert_eq!(e.unwrap_err().kind(), ErrorKind::InvalidState);
            c.finish(&mut weight).unwrap();
            (c.current_step(), weight)
        });
        let tool = LighthouseClient::connect(&url, soon()).unwrap();
        let end = soon();
        while tool.status(soon()).unwrap().waiting.is_empty() {
            assert!(Instant::now() < end && !c.is_finished(), "it does not ask");
            std::thread::yield_now();
        }
        assert!(!a.is_finished());
        a.finish(&mut weight).unwrap();
        assert_eq!((a.current_step(), weight[0]), (Step(4), 6.0));
        assert_eq!(c.join().unwrap(), (Step(4), weight.clone()));
    });
}
