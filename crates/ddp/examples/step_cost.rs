//! What a step of data parallel takes beside the backward pass: two replicas of one or several ranks as threads over gloo with a lighthouse of their
//! own; the backward pass is a pause for each layer, as where a device computes, and its gradients are pushed as they are made.
//!
//! `cargo run --release -p oxccl-ddp --example step_cost [MILLION_PARAMETERS] [COMPUTE_MS] [STEPS] [RANKS]`

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a measurement ends with its first error"
)]

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use coordination::{LighthouseConfig, LighthouseServer};
use ftcore::{DType, Error, GroupOptions, InMemoryStore, ReduceOp, Result, Step, Tensor, Traffic};
use manager::{Manager, ManagerConfig};
use oxccl_ddp::{Ddp, DdpConfig, Sink, Slot};
use replica::{ManagedWork, Participation, Replica, State, StateDict};

const REPLICAS: u8 = 2;
const LAYERS: u32 = 16;

/// The number of steps; the model itself is never read.
struct Steps(i64);

impl State for Steps {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        out.insert_i64s("steps", &[self.0])
    }
    fn load(&mut self, from: &StateDict) -> Result<()> {
        self.0 = from.get_i64s("steps")?[0];
        Ok(())
    }
}

/// A manager that notes how long the training thread is in calls for the quorum and for the vote.
struct Timed {
    manager: Manager,
    quorum: Rc<Cell<Duration>>,
    vote: Rc<Cell<Duration>>,
}

fn noted<T>(total: &Cell<Duration>, call: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let found = call();
    total.set(total.get() + begun.elapsed());
    found
}

impl Replica for Timed {
    fn start_quorum(&mut self, state: &mut dyn State, deadline: Instant) -> Result<Participation> {
        noted(&self.quorum, || self.manager.start_quorum(state, deadline))
    }
    fn begin_quorum(&mut self, deadline: Instant) -> Result<bool> {
        noted(&self.quorum, || self.manager.begin_quorum(deadline))
    }
    fn await_quorum(&mut self) -> Result<Participation> {
        noted(&self.quorum, || self.manager.await_quorum())
    }
    fn abandon_quorum(&mut self) {
        self.manager.abandon_quorum();
    }
    fn all_reduce(&mut self, tensors: Vec<Tensor>, op: ReduceOp) -> ManagedWork {
        self.manager.all_reduce(tensors, op)
    }
    fn alloc(&self, dtype: DType, count: usize) -> Tensor {
        self.manager.alloc(dtype, count)
    }
    fn should_commit(&mut self, deadline: Instant) -> Result<bool> {
        noted(&self.vote, || self.manager.should_commit(deadline))
    }
    fn current_step(&self) -> Step {
        self.manager.current_step()
    }
    fn batches_committed(&self) -> i64 {
        self.manager.batches_committed()
    }
    fn draining(&self) -> bool {
        self.manager.draining()
    }
    fn set_last(&mut self, is_last: bool) {
        self.manager.set_last(is_last);
    }
    fn progress(&self) {
        self.manager.progress();
    }
    fn report_error(&mut self, error: Error) {
        self.manager.report_error(error);
    }
    fn error(&self) -> Option<Error> {
        Replica::error(&self.manager)
    }
    fn traffic(&self) -> Traffic {
        self.manager.traffic()
    }
    fn leave(&mut self, deadline: Instant) -> Result<()> {
        self.manager.leave(deadline)
    }
}

/// Of each step but the first ones: its time beside the pauses, and what of it the gradients took to be pushed, the quorum, the reductions that were
/// waited for, and the vote.
fn train(config: ManagerConfig, layer: usize, compute: Duration, steps: usize) -> Vec<[Duration; 5]> {
    let group = backend_gloo::GlooGroup::new(&config.name, GroupOptions::default()).unwrap();
    let (quorum, vote) = (Rc::new(Cell::default()), Rc::new(Cell::default()));
    let manager = Timed {
        manager: Manager::new(Arc::new(group), config).unwrap(),
        quorum: quorum.clone(),
        vote: vote.clone(),
    };
    let slots = vec![Slot::f32(layer); LAYERS as usize];
    let mut ddp = Ddp::new(manager, &slots, DdpConfig::default()).unwrap();
    let gradient = vec![1.0f32; layer];
    let mut state = Steps(0);
    let mut times = Vec::new();
    for _ in 0..steps + 3 {
        let begun = Instant::now();
        let (mut pausing, mut pushing) = (Duration::ZERO, Duration::ZERO);
        let backward = |_: &mut Steps, _: u32, sink: &mut Sink<'_>| {
            (0..slots.len()).rev().try_for_each(|slot| {
                let begun = Instant::now();
                std::thread::sleep(compute / LAYERS);
                pausing += begun.elapsed();
                let begun = Instant::now();
                sink.push(slot, &gradient)?;
                pushing += begun.elapsed();
                Ok(())
            })
        };
        let apply = |steps: &mut Steps, averages: &[Tensor]| {
            assert!(
                averages
                    .iter()
                    .all(|a| a.as_slice::<f32>().is_ok_and(|a| a[0] == 1.0))
            );
            steps.0 += 1;
            Ok(())
        };
        let report = ddp.step_with(&mut state, backward, apply).unwrap();
        let whole = begun.elapsed() - pausing;
        times.push([whole, pushing, quorum.take(), report.waited, vote.take()]);
    }
    ddp.finish(&mut state).unwrap();
    times.split_off(3)
}

fn thread<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    std::thread::Builder::new()
        .name("ox-replica".into())
        .spawn(body)
        .unwrap()
}

fn main() {
    let mut numbers = std::env::args().skip(1).map(|a| a.parse::<u64>().unwrap());
    let mut next = |or| numbers.next().unwrap_or(or);
    let (millions, compute) = (next(25), Duration::from_millis(next(200)));
    let steps = usize::try_from(next(20)).unwrap().max(1);
    let ranks = u32::try_from(next(1)).unwrap().max(1);
    let layer = usize::try_from(millions * 1_000_000 / u64::from(LAYERS))
        .unwrap()
        .max(1);
    let lighthouse = LighthouseServer::start(LighthouseConfig {
        bind: "127.0.0.1:0".into(),
        min_replicas: REPLICAS.into(),
        ..LighthouseConfig::default()
    })
    .unwrap();
    let mut threads: Vec<(String, JoinHandle<_>)> = Vec::new();
    for replica in 0..REPLICAS {
        let meet = Arc::new(InMemoryStore::new());
        for rank in 0..ranks {
            let mut config = ManagerConfig::new(format!("r{replica}"), lighthouse.address());
            (config.group_rank, config.group_world_size) = (rank, ranks);
            config.replica_store = Some(meet.clone());
            let body = move || train(config, layer, compute, steps);
            threads.push((format!("replica {replica}, rank {rank}"), thread(body)));
        }
    }
    println!(
        "{millions} million parameters in {LAYERS} layers, {compute:?} of computing, {steps} steps, {ranks} ranks to a replica"
    );
    for (name, thread) in threads {
        let times = thread.join().unwrap();
        let median = |part: usize| {
            let mut found: Vec<Duration> = times.iter().map(|t| t[part]).collect();
            found.sort();
            found[steps / 2]
        };
        let [whole, pushing, quorum, waited, vote] = std::array::from_fn(median);
        println!(
            "{name}: the median step takes {whole:.2?} beside computing; pushes {pushing:.2?}, quorum {quorum:.2?}, reductions waited for {waited:.2?}, vote {vote:.2?}"
        );
    }
}
