//! Several network namespaces at one exchange, each with a line of its own to it: a rate, a delay and a loss in both directions.
//!
//! A packet leaves its host at the host's rate, is under way for the delays of both hosts, and then waits for the rate of the host that it
//! goes to. What waits longer than [`WAITS`] is lost, as in a router with that much memory.

use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{Read, Write};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::{PACKET, end_in};

/// The queue before a line.
const WAITS: Duration = Duration::from_millis(60);
/// Behind the header of 10 bytes: the last byte of the address that a packet goes to.
const TO: usize = 10 + 19;

/// A host's line, as `PID:MBIT_S:DELAY_MS:LOSS`, the last one as one of so many packets, or 0.
#[derive(Clone, Copy)]
struct Line {
    rate: f64,
    delay: Duration,
    loss: u64,
}

impl Line {
    fn time(&self, bytes: usize) -> Duration {
        Duration::from_secs_f64(bytes as f64 * 8.0 / self.rate)
    }
}

/// A packet before a host's line, since when.
#[derive(PartialEq, Eq)]
struct Packet {
    since: Instant,
    bytes: Vec<u8>,
}

impl Ord for Packet {
    /// The earliest is the greatest: a heap gives that first.
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        other.since.cmp(&self.since)
    }
}

impl PartialOrd for Packet {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

struct Host {
    line: Line,
    tun: Arc<File>,
    coming: Mutex<BinaryHeap<Packet>>,
    more: Condvar,
}

/// One of so many, by the numbers of a generator that is always the same.
fn is_lost(state: &mut u64, one_of: u64) -> bool {
    *state = state
        .wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(1_442_695_040_888_963_407);
    one_of > 0 && (*state >> 33).is_multiple_of(one_of)
}

fn take_in(from: usize, hosts: &[Host]) {
    let host = &hosts[from];
    let mut buffer = vec![0; PACKET];
    let mut free = Instant::now();
    let mut random = from as u64 + 1;
    loop {
        let Ok(len) = (&mut &*host.tun).read(&mut buffer) else {
            // The interface is down until its address is set.
            std::thread::sleep(Duration::from_millis(1));
            continue;
        };
        let now = Instant::now();
        let to = usize::from(*buffer.get(TO).unwrap_or(&0));
        let Some(other) = to.checked_sub(1).and_then(|to| hosts.get(to)) else {
            continue;
        };
        if free.saturating_duration_since(now) > WAITS || is_lost(&mut random, host.line.loss) {
            continue;
        }
        free = free.max(now) + host.line.time(len);
        other.coming.lock().unwrap().push(Packet {
            since: free + host.line.delay + other.line.delay,
            bytes: buffer[..len].to_vec(),
        });
        other.more.notify_one();
    }
}

fn put_out(to: usize, hosts: &[Host]) {
    let host = &hosts[to];
    let mut free = Instant::now();
    let mut random = to as u64 + 1001;
    loop {
        let mut coming = host.coming.lock().unwrap();
        let packet = loop {
            let now = Instant::now();
            match coming.peek().map(|p| p.since) {
                Some(since) if since <= now => break coming.pop().unwrap(),
                // An earlier one may come in between.
                Some(since) => coming = host.more.wait_timeout(coming, since - now).unwrap().0,
                None => coming = host.more.wait(coming).unwrap(),
            }
        };
        drop(coming);
        if free.saturating_duration_since(packet.since) > WAITS || is_lost(&mut random, host.line.loss) {
            continue;
        }
        free = free.max(packet.since) + host.line.time(packet.bytes.len());
        std::thread::sleep(free.saturating_duration_since(Instant::now()));
        // An interface that is down loses it, as it should.
        let _ = (&mut &*host.tun).write(&packet.bytes);
    }
}

/// Makes the ends, and starts two threads for each host.
pub(crate) fn start(lines: &[String], whole: bool) -> std::io::Result<()> {
    let mut hosts = Vec::new();
    for line in lines {
        let words: Vec<&str> = line.split(':').collect();
        let [pid, rate, delay, loss] = words.as_slice() else {
            return Err(std::io::Error::other(format!(
                "'{line}' is not PID:MBIT_S:DELAY_MS:LOSS"
            )));
        };
        hosts.push(Host {
            line: Line {
                rate: rate.parse::<f64>().unwrap() * 1e6,
                delay: Duration::from_secs_f64(delay.parse::<f64>().unwrap() / 1e3),
                loss: loss.parse().unwrap(),
            },
            tun: end_in(pid, whole)?,
            coming: Mutex::default(),
            more: Condvar::new(),
        });
    }
    let hosts: Arc<[Host]> = hosts.into();
    for index in 0..hosts.len() {
        let (a, b) = (hosts.clone(), hosts.clone());
        let start = |name: &str, work: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new()
                .name(name.to_string())
                .spawn(work)
                .unwrap();
        };
        start("ox-star-in", Box::new(move || take_in(index, &a)));
        start("ox-star-out", Box::new(move || put_out(index, &b)));
    }
    Ok(())
}
