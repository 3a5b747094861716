//! How fast a state heals over loopback from a source in another process, beside a plain `TcpStream` that brings the same bytes from
//! that process in the same run, in turns: into new memory, and into memory that was used before. It also tells what publishing costs a
//! source.
//!
//! `cargo run --release -p oxccl-checkpoint --example heal_rate [MIB] [ROUNDS]` (1024 MiB and 3 rounds unless told otherwise)
//!
//! Between two machines, or network namespaces: `heal_rate serve ADDRESS:PORT MIB` prints a URL and serves until it is ended;
//! `heal_rate fetch URL...` fetches from there, once.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::indexing_slicing,
    reason = "a measuring program: a failure is the end of it"
)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{Epoch, Step};
use oxccl_checkpoint::{CheckpointSource, Fetch, FetchOptions, HttpTransport, Snapshot, StateDict};

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

/// Writes the state to every peer that connects, from the process of the source.
fn plain_source(state: Arc<StateDict>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let serve = move || {
        // One reader after the other: each takes its turn.
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            for (_, tensor) in state.iter() {
                // The reader may be gone: its turn is over.
                let _ = stream.write_all(&tensor.data);
            }
        }
    };
    std::thread::Builder::new()
        .name("ox-plain".into())
        .spawn(serve)
        .unwrap();
    address
}

/// Reads the state into new memory, as a healing replica does, or into `touched`. `hashed`: hashes it besides.
fn plain_copy(address: &str, bytes: usize, touched: Option<&mut [Vec<u8>]>, hashed: bool) -> Duration {
    let mut new = Vec::new();
    let begun = Instant::now();
    let mut stream = TcpStream::connect(address).unwrap();
    let each = bytes / TENSORS;
    let mut read = |data: &mut [u8]| {
        for chunk in data.chunks_mut(1 << 20) {
            stream.read_exact(chunk).unwrap();
            if hashed {
                std::hint::black_box(blake3::hash(chunk));
            }
        }
    };
    match touched {
        Some(all) => all.iter_mut().for_each(|data| read(data)),
        None => {
            for _ in 0..TENSORS {
                let mut data = vec![0; each];
                read(&mut data);
                new.push(data);
            }
        }
    }
    begun.elapsed()
}

fn heal(urls: &[String], bytes: usize, own: Option<StateDict>, connections: usize) -> Duration {
    let sources = urls.iter().map(CheckpointSource::at);
    let mut fetch = Fetch::step(Step(5), sources.collect());
    fetch.own = own;
    let options = FetchOptions {
        connections_per_source: connections,
        ..FetchOptions::default()
    };
    let begun = Instant::now();
    let got = fetch.run(begun + Duration::from_secs(600), &options).unwrap();
    let took = begun.elapsed();
    assert_eq!(got.state.total_bytes(), bytes);
    took
}

/// The process of the sources; it ends with this one.
struct Sources {
    process: Child,
    urls: Vec<String>,
    plain: String,
}

impl Sources {
    fn start(mib: usize) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["sources", &mib.to_string()])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let mut line = || lines.next().unwrap().unwrap();
        let plain = line();
        let urls = (0..3).map(|_| line()).collect();
        Self { process, urls, plain }
    }
}

impl Drop for Sources {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Three sources of one state, and the plain one, in this process.
fn be_sources(mib: usize) {
    let state = Arc::new(state(mib));
    println!("{}", plain_source(Arc::clone(&state)));
    let snapshot = Snapshot::new(Step(5), Epoch(1), &state).unwrap();
    snapshot.manifest();
    let servers = [(); 3].map(|()| HttpTransport::start("127.0.0.1:0", None).unwrap());
    for server in &servers {
        server.publish(Arc::clone(&snapshot));
        println!("{}", server.metadata());
    }
    loop {
        std::thread::park();
    }
}

fn serve(bind: &str, mib: usize) {
    let server = HttpTransport::start(bind, None).unwrap();
    let snapshot = Snapshot::new(Step(5), Epoch(1), &state(mib)).unwrap();
    snapshot.manifest();
    server.publish(snapshot);
    println!("{}", server.metadata());
    loop {
        std::thread::park();
    }
}

fn fetch_from(urls: &[&str]) {
    let begun = Instant::now();
    let got = Fetch::step(Step(5), urls.iter().map(|u| CheckpointSource::at(*u)).collect())
        .run(begun + Duration::from_secs(600), &FetchOptions::default())
        .unwrap();
    let seconds = begun.elapsed().as_secs_f64();
    let bits = got.state.total_bytes() as f64 * 8.0;
    println!("{:.3} Gbit/s of state in {seconds:.2} s", bits / seconds / 1e9);
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["sources", mib] => return be_sources(mib.parse().unwrap()),
        ["serve", bind, mib] => return serve(bind, mib.parse().unwrap()),
        ["fetch", ref urls @ ..] if !urls.is_empty() => return fetch_from(urls),
        _ => {}
    }
    let mut arguments = words.iter().map(|a| a.parse::<usize>().unwrap());
    let mib = arguments.next().unwrap_or(1024);
    let rounds = arguments.next().unwrap_or(3);
    let state = state(mib);
    let bytes = state.total_bytes();
    let sources = Sources::start(mib);
    let one = &sources.urls[..1];
    println!("{mib} MiB in {TENSORS} tensors from another process, {rounds} rounds in turns, best of each");
    let mut touched: Vec<Vec<u8>> = (0..TENSORS).map(|_| vec![1; bytes / TENSORS]).collect();
    let mut times: [Vec<Duration>; 9] = Default::default();
    for _ in 0..rounds {
        let plain = |touched, hashed| plain_copy(&sources.plain, bytes, touched, hashed);
        let begun = Instant::now();
        let snapshot = Snapshot::new(Step(5), Epoch(1), &state).unwrap();
        let copy = begun.elapsed();
        let begun = Instant::now();
        snapshot.manifest();
        let hashes = begun.elapsed();
        drop(snapshot);
        let round = [
            plain(None, false),
            plain(Some(&mut touched), false),
            plain(None, true),
            heal(one, bytes, None, 2),
            heal(one, bytes, None, 4),
            heal(&sources.urls, bytes, None, 2),
            heal(one, bytes, Some(state.clone()), 2),
            copy,
            hashes,
        ];
        for (all, took) in times.iter_mut().zip(round) {
            all.push(took);
        }
    }
    let plain_rate = rate(bytes, &times[0]);
    let whats = [
        "plain copy into new memory",
        "plain copy into used memory",
        "plain copy into new memory + blake3",
        "heal, 1 source",
        "heal, 1 source, 4 connections",
        "heal, 3 sources",
        "heal, nothing changed since",
        "publish: the copy",
        "publish: the hashes (lazily)",
    ];
    for (what, times) in whats.iter().zip(&times) {
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
