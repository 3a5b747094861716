//! One incarnation of a rank that makes one call after the other until its group fails, then waits to be put into the next one.
//!
//! usage: `gloo_worker STORE SEED`. Standard input: `join EPOCH RANK WORLD MILLISECONDS` (the deadline of each call), `abort`, or `garble`
//! (noise on all its connections to other ranks). Standard output (`Incarnation` in
//! `tests/gloo_kills.rs` reads it): `joined EPOCH MICROSECONDS`, `right EPOCH` after the first calls, `failed EPOCH
//! NANOSECONDS CALLED WAITED KIND TEXT` with the monotonic clock that all processes share (when the error was here, when the call that it
//! ended had been made, and how long of that the calling thread was ready but had no core), `clean EPOCH` once no thread, socket or ring of the failed group is left, `wrong TEXT`. It ends with its input.

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
    Collective, Configuration, DType, Epoch, Error, GroupOptions, ProcessGroup, ProcessGroupExt, ReduceOp,
    Result, Store, SubmitOptions, TcpStore, Tensor, deadline_in,
};
use oxccl_tests::monotonic_ns;

/// How long anything else than a call may take.
const TIME_LIMIT: Duration = Duration::from_secs(30);

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // A closed pipe means that the test is gone.
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

/// What call `call` of an epoch is, the same on every rank, and its root.
fn kind(seed: u64, epoch: u64, call: u64, world: u32) -> (u64, u32) {
    let mut x = seed ^ epoch.wrapping_mul(0xC2B2_AE3D_27D4_EB4F) ^ call.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    x ^= x >> 29;
    x = x.wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x ^= x >> 32;
    (x % 9, (x >> 8) as u32 % world)
}

/// Element `i` of `rank`'s data.
fn value(i: usize, rank: u32) -> f32 {
    (i % 257) as f32 + rank as f32
}

fn of(count: usize, rank: u32) -> Tensor {
    Tensor::from_vec((0..count).map(|i| value(i, rank)).collect())
}

fn zeros(count: usize) -> Tensor {
    Tensor::zeros(DType::F32, count)
}

/// The call, and what element `i` of its result must be; a barrier has none. Its larger tensor has about `count` elements.
fn call_of(
    (kind, root): (u64, u32),
    count: usize,
    rank: u32,
    world: u32,
) -> (Collective, impl Fn(usize) -> f32) {
    let count = match kind {
        2..=4 => count.div_ceil(world as usize),
        _ => count,
    };
    let all = count * world as usize;
    let sum = ReduceOp::Sum;
    let op = match kind {
        0 => Collective::Broadcast {
            tensors: vec![of(count, rank)],
            root,
        },
        1 => Collective::Reduce {
            tensor: of(count, rank),
            op: sum,
            root,
        },
        2 => Collective::AllGatherInto {
            pairs: vec![(of(count, rank), zeros(all))],
        },
        3 => Collective::ReduceScatterInto {
            pairs: vec![(of(all, rank), zeros(count))],
            op: sum,
        },
        4 => Collective::AllToAllInto {
            input: of(all, rank),
            output: zeros(all),
            input_splits: Vec::new(),
            output_splits: Vec::new(),
        },
        5 => Collective::Barrier,
        6 => Collective::Batch {
            ops: vec![
                Collective::Send {
                    tensor: of(count, rank),
                    peer: (rank + 1) % world,
                    tag: root,
                },
                Collective::Recv {
                    tensor: zeros(count),
                    peer: Some((rank + world - 1) % world),
                    tag: root,
                },
            ],
        },
        _ => Collective::AllReduce {
            tensors: vec![of(count, rank)],
            op: sum,
        },
    };
    let sum = move |i: usize| world as f32 * value(i, 0) + (world * (world - 1) / 2) as f32;
    let expected = move |i: usize| match kind {
        0 => value(i, root),
        1 if rank != root => value(i, rank),
        2 => value(i % count, (i / count) as u32),
        3 => sum(rank as usize * count + i),
        4 => value(rank as usize * count + i % count, (i / count) as u32),
        6 => value(i, (rank + world - 1) % world),
        _ => sum(i),
    };
    (op, expected)
}

/// Makes a call; false if its result is wrong.
fn make(
    group: &GlooGroup,
    (kind, root): (u64, u32),
    count: usize,
    (rank, world): (u32, u32),
    limit: Duration,
    called: &mut Called,
) -> Result<bool> {
    let (op, expected) = call_of((kind, root), count, rank, world);
    *called = Called {
        waited: without_a_core(),
        at: monotonic_ns(),
    };
    let work = group
        .run(op, SubmitOptions::by(deadline_in(limit)))
        .map_err(Error::from)?;
    let Some(result) = work.take()?.tensors.pop() else {
        return Ok(kind == 5);
    };
    let result = result.as_slice::<f32>()?;
    Ok(result.iter().enumerate().all(|(i, x)| *x == expected(i)))
}

/// How long this thread has been ready to run without a core, in nanoseconds; 0 where the kernel does not say.
fn without_a_core() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let second = text.split_whitespace().nth(1);
    second.and_then(|n| n.parse().ok()).unwrap_or(0)
}

/// When a call was made, and how long its thread had waited for a core by then.
#[derive(Default)]
struct Called {
    at: u64,
    waited: u64,
}

/// The threads of a group, its mappings of shared memory, and this process's sockets.
fn left() -> [usize; 3] {
    let threads = std::fs::read_dir("/proc/self/task")
        .unwrap()
        .filter_map(|t| std::fs::read_to_string(t.ok()?.path().join("comm")).ok())
        .filter(|name| name.starts_with("ox-gloo"))
        .count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let sockets = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok())
        .filter(|to| to.to_string_lossy().starts_with("socket:"))
        .count();
    [threads, maps.matches("memfd:oxccl-gloo").count(), sockets]
}

/// Waits until a group that failed has let go of everything: no thread, no socket, and of the shared memory only the page with its
/// own bells, which goes with the next configuration.
fn clean(epoch: u64, beginning: [usize; 3]) {
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        let now = left();
        let [threads, _, sockets] = beginning;
        if now[0] <= threads && now[1] <= 1 && now[2] <= sockets {
            return say(&format!("clean {epoch}"));
        }
        if Instant::now() > until {
            return say(&format!(
                "wrong threads, mappings and sockets after epoch {epoch}: {now:?}; before the first: {beginning:?}"
            ));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn live(
    group: &GlooGroup,
    store: &Arc<dyn Store>,
    seed: u64,
    epoch: u64,
    (rank, world): (u32, u32),
    limit: Duration,
    called: &mut Called,
) -> Result<()> {
    let start = Instant::now();
    group.configure(Configuration {
        store: store.clone(),
        prefix: "kills".to_string(),
        name: "kills".to_string(),
        epoch: Epoch(epoch),
        rank,
        world_size: world,
        deadline: deadline_in(TIME_LIMIT),
        cancel: Default::default(),
    })?;
    say(&format!("joined {epoch} {}", start.elapsed().as_micros()));
    for call in 0.. {
        let count = elements(seed, epoch, call);
        let kind = kind(seed, epoch, call, world);
        if !make(group, kind, count, (rank, world), limit, called)? {
            say(&format!(
                "wrong result of call {call} of epoch {epoch}, kind {kind:?}, {count} elements"
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
    // More than the few bytes that a line may still get of a group that gave up: those harm nothing.
    let noise: Vec<u8> = (0..32 * 1024u32)
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
        eprintln!("usage: gloo_worker STORE SEED");
        std::process::exit(2);
    };
    let seed: u64 = seed.parse().unwrap();
    let store: Arc<dyn Store> = Arc::new(TcpStore::connect(address, deadline_in(TIME_LIMIT)).unwrap());
    let group = Arc::new(GlooGroup::new("incarnation", GroupOptions::default()).unwrap());
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
                    _ => eprintln!("gloo_worker: '{line}'?"),
                }
            }
            // The process that gave the orders is gone.
            std::process::exit(0);
        })
        .unwrap();
    let beginning = left();
    while let Ok(order) = orders.recv() {
        let [epoch, rank, world, limit] = order.as_slice() else {
            eprintln!("gloo_worker: join needs four numbers");
            continue;
        };
        let mut called = Called::default();
        let place = (*rank as u32, *world as u32);
        let limit = Duration::from_millis(*limit);
        if let Err(e) = live(&group, &store, seed, *epoch, place, limit, &mut called) {
            say(&format!(
                "failed {epoch} {} {} {} {:?} {e}",
                monotonic_ns(),
                called.at,
                without_a_core().saturating_sub(called.waited),
                e.kind()
            ));
            clean(*epoch, beginning);
        }
    }
}
