//! The end of a run whose number of rounds only the training loops know, over a real lighthouse.

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
use oxccl_diloco::{Diloco, DilocoConfig, Parameters, SliceParameters};
use training_rig::Nothing;

use crate::scripted::params;

fn soon() -> Instant {
    deadline_in(Duration::from_secs(60))
}

fn made(name: &str, lighthouse: &str) -> Diloco<Manager, SliceParameters> {
    let group = GlooGroup::new(name, GroupOptions::default()).unwrap();
    let manager = Manager::new(Arc::new(group), ManagerConfig::new(name, lighthouse)).unwrap();
    let config = DilocoConfig {
        round_timeout: Duration::from_secs(20),
        ..DilocoConfig::local_sgd(2)
    };
    assert_eq!(config.rounds, None);
    Diloco::new(manager, params(&[3]), config).unwrap()
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
    a.begin(&mut Nothing).unwrap();
    for _ in 0..4 {
        a.params_mut()
            .write(0, &mut |w| w.iter_mut().for_each(|w| *w += 1.0))
            .unwrap();
        a.after_inner_step(&mut Nothing).unwrap();
    }
    std::thread::scope(|scope| {
        let c = scope.spawn(|| {
            let mut c = made("c", &url);
            let reports = c.begin(&mut Nothing).unwrap();
            assert_eq!(
                reports
                    .iter()
                    .map(|r| (r.step, r.contributors))
                    .collect::<Vec<_>>(),
                [(Step(3), 0)]
            );
            assert!(c.is_finished());
            let e = c.after_inner_step(&mut Nothing).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidState, "{e}");
            c.finish(&mut Nothing).unwrap();
            (c.step(), c.global_hash().unwrap())
        });
        let tool = LighthouseClient::connect(&url, soon()).unwrap();
        let end = soon();
        while tool.status(soon()).unwrap().waiting.is_empty() {
            assert!(Instant::now() < end && !c.is_finished(), "it does not ask");
            std::thread::yield_now();
        }
        assert!(!a.is_finished());
        a.finish(&mut Nothing).unwrap();
        assert_eq!(a.params().get(0).unwrap(), [4.0; 3]);
        assert_eq!(c.join().unwrap(), (Step(4), a.global_hash().unwrap()));
    });
}
