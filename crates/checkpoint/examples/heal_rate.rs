//! How fast a state heals over loopback: from one source and from three, beside a plain `TcpStream` that copies and hashes
//! the same bytes in the same run, in turns. It also tells what publishing costs a source.
//!
//! `cargo run --release -p checkpoint --example heal_rate [MIB] [ROUNDS]` (1024 MiB and 3 rounds unless told otherwise)
//!
//! Between two machines, or network namespaces: `heal_rate serve ADDRESS:PORT MIB` prints a URL and serves until it is ended;
//! `heal_rate fetch URL...` fetches from there, once.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::indexing_slicing,
    reason = "a measuring program: a failure is the end of it"
)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use checkpoint::{CheckpointSource, Fetch, FetchOptions, HttpTransport, Snapshot, StateDict};

/// The tensors of the state that is measured.
const TENSORS: usize = 64;

fn state(mib: usize) -> StateDict {
    let mut state = StateDict::new();
    let elements = (mib << 20) / 4 / TENSORS;
    for i in 0..TENSORS {
        let values: Vec<f32> = (0..elements).map(|e| (e * (i + 1)) as f32).collect();
        state
            .insert_f32(format!("layer{i:02}.weight"), &[elements], &values)
            .unwrap();
    }
    state
}

/// GB/s of `bytes` in the best of the measured times.
fn rate(bytes: usize, times: &[Duration]) -> f64 {
    let best = times.iter().min().copied().unwrap_or_default();
    bytes as f64 / best.as_secs_f64() / 1e9
}

/// One thread writes what is there; this one reads it into new memory, as a healing replica does, and hashes it.
fn plain_copy(state: &StateDict) -> Duration {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            for (_, tensor) in state.iter() {
                stream.write_all(&tensor.data).unwrap();
            }
        });
        let begun = Instant::now();
        let mut stream = TcpStream::connect(address).unwrap();
        let mut kept = Vec::new();
        for (_, tensor) in state.iter() {
            let mut data = vec![0; tensor.data.len()];
            for chunk in data.chunks_mut(1 << 20) {
                stream.read_exact(chunk).unwrap();
                std::hint::black_box(blake3::hash(chunk));
            }
            kept.push(data);
        }
        let took = begun.elapsed();
        drop(kept);
        took
    })
}

fn heal(sources: usize, state: &StateDict, hashed: bool, own: Option<StateDict>) -> Duration {
    let servers: Vec<HttpTransport> = (0..sources)
        .map(|_| HttpTransport::start("127.0.0.1:0", None).unwrap())
        .collect();
    for server in &servers {
        let snapshot = Snapshot::new(5, 1, state).unwrap();
        if hashed {
            snapshot.manifest();
        }
        server.publish(snapshot);
    }
    let urls = servers.iter().map(|s| CheckpointSource::at(s.metadata()));
    let mut fetch = Fetch::step(5, urls.collect());
    fetch.own = own;
    let begun = Instant::now();
    let got = fetch
        .run(begun + Duration::from_secs(600), &FetchOptions::default())
        .unwrap();
    let took = begun.elapsed();
    assert!(got.state == *state, "what arrived is not what was sent");
    took
}

fn serve(bind: &str, mib: usize) {
    let server = HttpTransport::start(bind, None).unwrap();
    let snapshot = Snapshot::new(5, 1, &state(mib)).unwrap();
    snapshot.manifest();
    server.publish(snapshot);
    println!("{}", server.metadata());
    loop {
        std::thread::park();
    }
}

fn fetch_from(urls: &[&str]) {
    let begun = Instant::now();
    let got = Fetch::step(5, urls.iter().map(|u| CheckpointSource::at(*u)).collect())
        .run(begun + Duration::from_secs(600), &FetchOptions::default())
        .unwrap();
    let seconds = begun.elapsed().as_secs_f64();
    let bits = got.state.total_bytes() as f64 * 8.0;
    println!("{:.3} Gbit/s of state in {seconds:.2} s", bits / seconds / 1e9);
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", bind, mib] => return serve(bind, mib.parse().unwrap()),
        ["fetch", ref urls @ ..] if !urls.is_empty() => return fetch_from(urls),
        _ => {}
    }
    let mut arguments = words.iter().map(|a| a.parse::<usize>().unwrap());
    let mib = arguments.next().unwrap_or(1024);
    let rounds = arguments.next().unwrap_or(3);
    let state = state(mib);
    let bytes = state.total_bytes();
    println!("{mib} MiB in {TENSORS} tensors, {rounds} rounds in turns, best of each");
    let [
        mut plain,
        mut one,
        mut cold,
        mut three,
        mut own,
        mut copy,
        mut hash,
    ] = [const { Vec::new() }; 7];
    for _ in 0..rounds {
        plain.push(plain_copy(&state));
        one.push(heal(1, &state, true, None));
        cold.push(heal(1, &state, false, None));
        three.push(heal(3, &state, true, None));
        own.push(heal(1, &state, true, Some(state.clone())));
        let begun = Instant::now();
        let snapshot = Snapshot::new(5, 1, &state).unwrap();
        copy.push(begun.elapsed());
        let begun = Instant::now();
        snapshot.manifest();
        hash.push(begun.elapsed());
    }
    let plain_rate = rate(bytes, &plain);
    for (what, times) in [
        ("plain TcpStream copy + blake3", &plain),
        ("heal, 1 source, already hashed", &one),
        ("heal, 1 source, hashes on request", &cold),
        ("heal, 3 sources, already hashed", &three),
        ("heal, nothing changed since", &own),
        ("publish: the copy", &copy),
        ("publish: the hashes (lazily)", &hash),
    ] {
        let (r, worst) = (
            rate(bytes, times),
            times.iter().max().copied().unwrap_or_default(),
        );
        let worst = bytes as f64 / worst.as_secs_f64() / 1e9;
        println!(
            "{what:36} {r:6.2} GB/s (worst {worst:5.2})   {:5.2} of the plain copy",
            r / plain_rate
        );
    }
}
