//! A long line between two network namespaces: whatever goes in at one end comes out at the other, later.
//!
//! usage: `wan_link PID_A PID_B DELAY_MS MBIT_S`. Makes an interface `wan0` in the namespace of either process, prints `up`, and
//! runs until its standard input ends. In each direction one thread takes packets in and says when each must come
//! out (the line's rate, then its delay), another puts them out at that time.
//!
//! `wan_link star PID:MBIT_S:DELAY_MS:LOSS...` joins several namespaces instead ([`star`]); with `star-mtu` no packet is larger than the MTU, so that a
//! loss is that of one packet.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "test support: a failure here is a failed test"
)]

mod raw;
mod star;

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// What may be under way in one direction; what comes on top is lost, as on a real line.
const CAPACITY: usize = 32 << 20;
/// The header of 10 bytes, and the largest packet.
const PACKET: usize = 10 + 65_536;

/// What is under way in one direction: packets, and when each comes out.
#[derive(Default)]
struct UnderWay {
    packets: VecDeque<(Instant, Vec<u8>)>,
    bytes: usize,
    lost: u64,
}

struct Direction {
    under_way: Mutex<UnderWay>,
    more: Condvar,
}

fn take_in(from: &File, direction: &Direction, delay: Duration, rate: f64) {
    let mut buffer = vec![0; PACKET];
    let mut free = Instant::now();
    loop {
        let Ok(len) = (&mut &*from).read(&mut buffer) else {
            // The interface is down until its address is set.
            std::thread::sleep(Duration::from_millis(1));
            continue;
        };
        // The line takes one packet after the other.
        free = free.max(Instant::now()) + Duration::from_secs_f64(len as f64 * 8.0 / rate);
        let mut under_way = direction.under_way.lock().unwrap();
        if under_way.bytes + len > CAPACITY {
            under_way.lost += 1;
            continue;
        }
        under_way.bytes += len;
        under_way
            .packets
            .push_back((free + delay, buffer[..len].to_vec()));
        direction.more.notify_one();
    }
}

fn put_out(to: &File, direction: &Direction) {
    loop {
        let mut under_way = direction.under_way.lock().unwrap();
        while under_way.packets.is_empty() {
            under_way = direction.more.wait(under_way).unwrap();
        }
        let (when, packet) = under_way.packets.pop_front().unwrap();
        under_way.bytes -= packet.len();
        drop(under_way);
        std::thread::sleep(when.saturating_duration_since(Instant::now()));
        // An interface that is down loses it, as it should.
        let _ = (&mut &*to).write(&packet);
    }
}

/// An interface `wan0` in the namespace of process `pid`. `whole`: its packets may be larger than the MTU.
fn end_in(pid: &str, whole: bool) -> std::io::Result<Arc<File>> {
    let namespace = File::open(format!("/proc/{pid}/ns/net"))?;
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
    let tun = OpenOptions::new().read(true).write(true).open("/dev/net/tun")?;
    raw::attach(&tun, "wan0", whole)?;
    Ok(Arc::new(tun))
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [how, lines @ ..] = arguments.as_slice()
        && how.starts_with("star")
    {
        // Before there are other threads: a namespace belongs to a thread.
        if let Err(e) = star::start(lines, how == "star") {
            println!("{e}");
            return ExitCode::FAILURE;
        }
        println!("up");
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        return ExitCode::SUCCESS;
    }
    let [one, other, delay, rate] = arguments.as_slice() else {
        eprintln!("usage: wan_link PID_A PID_B DELAY_MS MBIT_S");
        return ExitCode::from(2);
    };
    let delay = Duration::from_secs_f64(delay.parse::<f64>().unwrap() / 1e3);
    let rate = rate.parse::<f64>().unwrap() * 1e6;
    // Before there are other threads: a namespace belongs to a thread.
    let ends = match end_in(one, true).and_then(|a| Ok((a, end_in(other, true)?))) {
        Ok(ends) => ends,
        Err(e) => {
            println!("{e}");
            return ExitCode::FAILURE;
        }
    };
    let mut directions = Vec::new();
    for (from, to) in [(&ends.0, &ends.1), (&ends.1, &ends.0)] {
        let direction = Arc::new(Direction {
            under_way: Mutex::default(),
            more: Condvar::new(),
        });
        directions.push(direction.clone());
        let (from, into) = (from.clone(), direction.clone());
        let start = |name: &str, work: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new()
                .name(name.to_string())
                .spawn(work)
                .unwrap();
        };
        start("ox-line-in", Box::new(move || take_in(&from, &into, delay, rate)));
        let to = to.clone();
        start("ox-line-out", Box::new(move || put_out(&to, &direction)));
    }
    println!("up");
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    let lost: Vec<u64> = directions
        .iter()
        .map(|d| d.under_way.lock().unwrap().lost)
        .collect();
    if lost.iter().any(|n| *n > 0) {
        eprintln!("wan_link: packets lost because the line was full: {lost:?}");
    }
    ExitCode::SUCCESS
}
