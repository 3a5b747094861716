//! The programs in `examples/`: two replicas of each, as processes, end with the same line.
#![allow(clippy::unwrap_used)]

use std::process::{Command, Stdio};

use oxccl::coordination::{LighthouseConfig, LighthouseServer};
use oxccl::launch::{ENV_LIGHTHOUSE, ENV_REPLICA, ENV_REPLICAS};

/// What each of two replicas said last.
fn ends(name: &str) -> Vec<String> {
    let here = std::env::current_exe().unwrap();
    let example = here.ancestors().nth(2).unwrap().join("examples").join(name);
    let lighthouse = LighthouseServer::start(LighthouseConfig {
        bind: "127.0.0.1:0".into(),
        min_replicas: 2,
        ..LighthouseConfig::default()
    })
    .unwrap();
    let start = |replica: u32| {
        Command::new(&example)
            .env(ENV_LIGHTHOUSE, lighthouse.address())
            .env(ENV_REPLICA, replica.to_string())
            .env(ENV_REPLICAS, "2")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let children = [start(0), start(1)];
    let outputs = children.map(|child| child.wait_with_output().unwrap());
    outputs
        .iter()
        .map(|output| {
            assert!(
                output.status.success(),
                "{}",
                String::from_utf8_lossy(&output.stderr)
            );
            String::from_utf8_lossy(&output.stdout)
                .lines()
                .last()
                .unwrap()
                .to_owned()
        })
        .collect()
}

#[test]
fn replicas_of_a_candle_model_end_bitwise_equal() {
    for name in ["candle_ddp", "candle_momentum", "candle_overlap", "candle_diloco"] {
        let ends = ends(name);
        assert!(ends[0].contains("parameters"), "{ends:?}");
        assert_eq!(ends[0], ends[1], "{name}");
    }
}
