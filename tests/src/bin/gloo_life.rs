//! One life of a rank that reduces as fast as it can until its group fails, then waits to be put into the next one.
//!
//! usage: `gloo_life STORE SEED`. Standard input: `join EPOCH RANK WORLD`, `abort`, or `garble`
//! (noise on all its connections to other ranks). Standard output (`Life` in
//! `tests/gloo_kills.rs` reads it): `joined EPOCH MICROSECONDS`, `right EPOCH` after the first reductions, `failed EPOCH
//! NANOSECONDS CALLED KIND TEXT` with the monotonic clock that all processes share (when the error was here, and when the call that it
//! ended had been made), `wrong TEXT`. It ends with its input.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "test support: a failure here is a failed test"
)]

use std::io::{BufRead, Write};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use backend_gloo::GlooGroup;
use ftcore::{
    Collective, Configuration, Epoch, Error, GroupOptions, ProcessGroup, ProcessGroupExt, ReduceOp, Result,
    Store, SubmitOptions, TcpStore, Tensor, deadline_in,
};
use oxccl_tests::monotonic_ns;

/// Longer than any failure may take to be noticed: it must be evidence that ends a call, not its deadline.
const PATIENCE: Duration = Duration::from_secs(30);

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // A closed pipe means that nobody listens any more.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// The size of call `call` of an epoch, the same on every rank: mostly small, now and then megabytes.
fn elements(seed: u64, epoch: u64, call: u64) -> usize {
    let mut x = seed ^ epoch.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ call.wrapping_mul(0xD1B5_4A32_D192_ED03);
    x ^= x >> 31;
    x = x.wrapping_mul(0x2545_F491_4F6C_DD1D);
    x ^= x >> 29;
    let top = [1, 64, 4096, 65_536, 1 << 20][(x % 5) as usize];
    1 + (x >> 8) as usize % top
}

fn reduce(group: &GlooGroup, count: usize, rank: u32, world: u32, called: &mut u64) -> Result<bool> {
    let data: Vec<f32> = (0..count).map(|i| (i % 257) as f32 + rank as f32).collect();
    let op = Collective::AllReduce {
        tensors: vec![Tensor::from_vec(data)],
        op: ReduceOp::Sum,
    };
    *called = monotonic_ns();
    let work = group
        .run(op, SubmitOptions::by(deadline_in(PATIENCE)))
        .map_err(Error::from)?;
    let tensor = work.take()?.into_tensor()?;
    let (n, others) = (world as f32, (world * (world - 1) / 2) as f32);
    let right = |(i, x): (usize, &f32)| *x == n * (i % 257) as f32 + others;
    Ok(tensor.as_slice::<f32>()?.iter().enumerate().all(right))
}

fn live(
    group: &GlooGroup,
    store: &Arc<dyn Store>,
    seed: u64,
    epoch: u64,
    rank: u32,
    world: u32,
    called: &mut u64,
) -> Result<()> {
    let start = Instant::now();
    group.configure(Configuration {
        store: store.clone(),
        prefix: "kills".to_string(),
        name: "kills".to_string(),
        epoch: Epoch(epoch),
        rank,
        world_size: world,
        deadline: deadline_in(PATIENCE),
    })?;
    say(&format!("joined {epoch} {}", start.elapsed().as_micros()));
    for call in 0.. {
        let count = elements(seed, epoch, call);
        if !reduce(group, count, rank, world, called)? {
            say(&format!(
                "wrong sum in call {call} of epoch {epoch}, {count} elements"
            ));
        }
        if call == 2 {
            say(&format!("right {epoch}"));
        }
    }
    Ok(())
}

/// Writes noise into every connection of this process but the one to the store, past the group's back.
fn garble(store: &str) {
    let own = rustix::process::getpid();
    let pidfd = rustix::process::pidfd_open(own, rustix::process::PidfdFlags::empty()).unwrap();
    let noise: Vec<u8> = (0..512u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        let is_socket =
            std::fs::read_link(entry.path()).is_ok_and(|l| l.to_string_lossy().starts_with("socket:"));
        let Some(number) = entry.file_name().to_str().and_then(|n| n.parse().ok()) else {
            continue;
        };
        if !is_socket {
            continue;
        }
        let flags = rustix::process::PidfdGetfdFlags::empty();
        let Ok(socket) = rustix::process::pidfd_getfd(&pidfd, number, flags) else {
            continue;
        };
        // Listeners have no peer.
        let Ok(peer) = rustix::net::getpeername(&socket) else {
            continue;
        };
        let peer = peer.and_then(|peer| std::net::SocketAddr::try_from(peer).ok());
        let is_store = peer.is_some_and(|peer| peer.to_string() == store);
        if !is_store {
            let _ = rustix::net::send(
                &socket,
                &noise,
                rustix::net::SendFlags::DONTWAIT | rustix::net::SendFlags::NOSIGNAL,
            );
        }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, seed] = arguments.as_slice() else {
        eprintln!("usage: gloo_life STORE SEED");
        std::process::exit(2);
    };
    let seed: u64 = seed.parse().unwrap();
    let store: Arc<dyn Store> = Arc::new(TcpStore::connect(address, deadline_in(PATIENCE)).unwrap());
    let group = Arc::new(GlooGroup::new("life", GroupOptions::default()).unwrap());
    let (tell, orders) = channel();
    let store_address = address.clone();
    let hears = group.clone();
    std::thread::Builder::new()
        .name("ox-orders".to_string())
        .spawn(move || {
            for line in std::io::stdin().lock().lines().map_while(std::io::Result::ok) {
                let words: Vec<&str> = line.split_whitespace().collect();
                match words.as_slice() {
                    ["join", numbers @ ..] => {
                        let numbers: Vec<u64> = numbers.iter().map(|n| n.parse().unwrap()).collect();
                        let _ = tell.send(numbers);
                    }
                    ["abort"] => hears.abort("told to"),
                    ["garble"] => garble(&store_address),
                    _ => eprintln!("gloo_life: '{line}'?"),
                }
            }
            // Whoever gave the orders is gone.
            std::process::exit(0);
        })
        .unwrap();
    while let Ok(order) = orders.recv() {
        let [epoch, rank, world] = order.as_slice() else {
            eprintln!("gloo_life: join needs three numbers");
            continue;
        };
        let mut called = 0;
        let (rank, world) = (*rank as u32, *world as u32);
        if let Err(e) = live(&group, &store, seed, *epoch, rank, world, &mut called) {
            say(&format!(
                "failed {epoch} {} {called} {:?} {e}",
                monotonic_ns(),
                e.kind()
            ));
        }
    }
}
