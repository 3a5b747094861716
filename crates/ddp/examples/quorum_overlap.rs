//! What a quorum adds to a step of data parallel, with `DdpConfig::overlap_quorum` and without: two replicas as threads, a lighthouse whose
//! answers take 5 ms longer, and a forward and backward pass of 20 ms.
//!
//! `cargo run --release -p oxccl-ddp --example quorum_overlap [STEPS] [LATENCY_MS] [COMPUTE_MS]`

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a measurement ends with its first error"
)]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Barrier};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use coordination::{LighthouseConfig, LighthouseServer};
use ftcore::{GroupOptions, Result, Tensor};
use manager::{Manager, ManagerConfig};
use oxccl_ddp::{Ddp, DdpConfig, Sink, Slot};
use replica::{State, StateDict};

const REPLICAS: usize = 2;
const ROUNDS: usize = 3;
const ELEMENTS: usize = 1000;

struct Weights(Vec<f32>);

impl State for Weights {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        out.insert_f32("w", &[ELEMENTS], &self.0)
    }
    fn load(&mut self, from: &StateDict) -> Result<()> {
        self.0 = from.get_f32("w")?;
        Ok(())
    }
}

fn thread<T: Send + 'static>(name: &str, body: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    std::thread::Builder::new().name(name.into()).spawn(body).unwrap()
}

/// Passes bytes on, each read after `delay`.
fn pump(mut from: TcpStream, mut to: TcpStream, delay: Duration) {
    let mut bytes = vec![0; 64 * 1024];
    while let Ok(n @ 1..) = from.read(&mut bytes) {
        std::thread::sleep(delay);
        if to.write_all(&bytes[..n]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

/// A URL under which `lighthouse` answers that much later.
fn far_away(lighthouse: &LighthouseServer, latency: Duration) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let address = lighthouse.address().replace("http://", "");
    thread("ox-proxy", move || {
        for near in listener.incoming() {
            let (near, far) = (near.unwrap(), TcpStream::connect(&address).unwrap());
            near.set_nodelay(true).unwrap();
            far.set_nodelay(true).unwrap();
            let (near_too, far_too) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            thread("ox-to", move || pump(near, far, Duration::ZERO));
            thread("ox-from", move || pump(far_too, near_too, latency));
        }
    });
    url
}

/// The median time of a step on replica 0.
fn run(overlap_quorum: bool, steps: usize, latency: Duration, compute: Duration) -> Duration {
    let lighthouse = LighthouseServer::start(LighthouseConfig {
        bind: "127.0.0.1:0".into(),
        min_replicas: REPLICAS,
        ..LighthouseConfig::default()
    })
    .unwrap();
    let url = far_away(&lighthouse, latency);
    let ready = Arc::new(Barrier::new(REPLICAS));
    let replicas: Vec<_> = (0..REPLICAS)
        .map(|r| {
            let (url, ready) = (url.clone(), ready.clone());
            thread("ox-replica", move || {
                let name = format!("r{r}");
                let group = backend_gloo::GlooGroup::new(&name, GroupOptions::default()).unwrap();
                let manager = Manager::new(Arc::new(group), ManagerConfig::new(name, url)).unwrap();
                let config = DdpConfig {
                    overlap_quorum,
                    ..DdpConfig::default()
                };
                let mut ddp = Ddp::new(manager, &[Slot::f32(ELEMENTS)], config).unwrap();
                let mut weights = Weights(vec![0.0; ELEMENTS]);
                let mut step = || {
                    let gradient = vec![1.0f32; ELEMENTS];
                    let make = |_: &mut Weights, _: u32, sink: &mut Sink<'_>| {
                        std::thread::sleep(compute);
                        sink.push(0, &gradient)
                    };
                    let apply = |w: &mut Weights, a: &[Tensor]| {
                        let average = a[0].as_slice::<f32>()?;
                        w.0.iter_mut().zip(average).for_each(|(w, a)| *w -= a);
                        Ok(())
                    };
                    ddp.step_with(&mut weights, make, apply).unwrap()
                };
                // Connecting and the first synchronisation.
                for _ in 0..3 {
                    step();
                }
                ready.wait();
                let mut times: Vec<Duration> = (0..steps)
                    .map(|_| {
                        let begun = Instant::now();
                        step();
                        begun.elapsed()
                    })
                    .collect();
                ddp.finish(&mut weights).unwrap();
                assert!(weights.0.iter().all(|w| *w == -(3.0 + steps as f32)));
                times.sort();
                times[steps / 2]
            })
        })
        .collect();
    let times: Vec<Duration> = replicas.into_iter().map(|r| r.join().unwrap()).collect();
    times[0]
}

fn main() {
    let mut numbers = std::env::args().skip(1).map(|a| a.parse::<u64>().unwrap());
    let mut next = |or| numbers.next().unwrap_or(or);
    let steps = usize::try_from(next(50)).unwrap().max(1);
    let (latency, compute) = (Duration::from_millis(next(5)), Duration::from_millis(next(20)));
    println!(
        "{steps} steps, answers of the lighthouse {latency:?} late, {compute:?} of computing; median step"
    );
    for round in 1..=ROUNDS {
        let first = run(false, steps, latency, compute);
        let overlapped = run(true, steps, latency, compute);
        println!("round {round}: quorum first {first:.2?}, overlapped {overlapped:.2?}");
    }
}
