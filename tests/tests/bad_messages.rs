//! Bad messages to every listening port of a running job change nothing but a log line (INV-10).

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::collections::BTreeSet;
use std::io::Write;
use std::net::TcpStream;
use std::sync::mpsc::channel;
use std::time::Duration;

use coordination::{LighthouseConfig, LighthouseServer};
use ftcore::deadline_in;
use oxccl_tests::{Said, Worker};

/// The loopback ports on which a process listens, from /proc.
fn listening_ports(pid: u32) -> BTreeSet<u16> {
    let inodes: BTreeSet<String> = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|fd| std::fs::read_link(fd.path()).ok())
        .filter_map(|l| {
            Some(
                l.to_str()?
                    .strip_prefix("socket:[")?
                    .strip_suffix(']')?
                    .to_string(),
            )
        })
        .collect();
    let mut ports = BTreeSet::new();
    for table in ["tcp", "tcp6"] {
        let text = std::fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap_or_default();
        for line in text.lines().skip(1) {
            let f: Vec<&str> = line.split_whitespace().collect();
            if f.get(3) == Some(&"0A") && f.get(9).is_some_and(|i| inodes.contains(*i)) {
                let port = f[1].rsplit(':').next().unwrap();
                ports.insert(u16::from_str_radix(port, 16).unwrap());
            }
        }
    }
    ports
}

/// Messages that no listener of ours should like.
fn garbage() -> Vec<Vec<u8>> {
    let mut seed = 0x2545_F491_4F6C_DD1Du64;
    let mut random = |n: usize| -> Vec<u8> {
        (0..n)
            .map(|_| {
                seed ^= seed << 13;
                seed ^= seed >> 7;
                seed ^= seed << 17;
                seed as u8
            })
            .collect()
    };
    let mut http2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    http2.extend(random(300));
    vec![
        Vec::new(),
        vec![0],
        random(7),
        random(5000),
        vec![0xFF; 4096],
        vec![0; 4096],
        http2,
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999\r\n\r\n".to_vec(),
        // PyTorch's store: a valid greeting, then a key of 2^63 bytes.
        [&[0u8, 0xCE, 0xF7, 0x85, 0x3C, 1][..], &(1u64 << 63).to_le_bytes()].concat(),
    ]
}

#[test]
fn garbage_on_every_port_of_a_running_job_changes_nothing() {
    let lighthouse = LighthouseServer::start(LighthouseConfig {
        bind: "127.0.0.1:0".into(),
        min_replicas: 1,
        initial_replicas: Some(2),
        heartbeat_timeout: Duration::from_secs(60),
        ..LighthouseConfig::default()
    })
    .unwrap();
    let (says, hears) = channel();
    let mut workers: Vec<Worker> = (0..2)
        .map(|r| {
            let args = [
                "streaming",
                &lighthouse.address(),
                &format!("r{r}"),
                &r.to_string(),
                "1500",
            ]
            .map(String::from);
            Worker::start(env!("CARGO_BIN_EXE_worker"), r, 0, &args, says.clone())
        })
        .collect();
    let lighthouse_port: u16 = lighthouse.address().rsplit(':').next().unwrap().parse().unwrap();
    let (mut attacked, mut half_open, mut finals, mut epochs) =
        (BTreeSet::new(), Vec::new(), Vec::new(), BTreeSet::new());
    let deadline = deadline_in(Duration::from_secs(120));
    while finals.len() < 2 {
        let left = deadline.saturating_duration_since(std::time::Instant::now());
        let (replica, _, said) = hears.recv_timeout(left).expect("the job goes on to its end");
        match said {
            Said::Failed(text) => panic!("replica {replica}: {text}"),
            Said::Finished { hash } => finals.push(hash),
            Said::Committed { step, epoch, .. } => {
                if step > 0 {
                    epochs.insert(epoch);
                }
                if step % 100 != 50 {
                    continue;
                }
                let mut ports: BTreeSet<u16> =
                    workers.iter().flat_map(|w| listening_ports(w.pid())).collect();
                ports.insert(lighthouse_port);
                for &port in &ports {
                    for message in garbage() {
                        // A refused or cut connection is a fine answer.
                        if let Ok(mut c) = TcpStream::connect(("127.0.0.1", port)) {
                            let _ = c.write_all(&message);
                            attacked.insert(port);
                            if half_open.len() < 200 {
                                half_open.push(c);
                            }
                        }
                    }
                }
            }
            _ => {}
        }
    }
    // Per replica at least: manager server, rendezvous store, checkpoint transport.
    assert!(attacked.len() >= 7, "only {attacked:?} were found listening");
    assert_eq!(finals[0], finals[1]);
    assert!(epochs.len() <= 2, "the members were disturbed: epochs {epochs:?}");
    assert!(workers.iter_mut().all(Worker::succeeded));
}
