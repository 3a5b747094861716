//! What isolation costs: gloo directly, gloo in child processes, and the same on tensors of the shared pool.
//!
//! Two ranks as threads; the three take turns in one run, so that they share whatever else the machine does. Times are medians
//! per blocking all-reduce (f32, sum); ratios are medians of the ratios of neighbouring turns.
//!
//! `cargo run --release -p isolate --example overhead [turns]`

use std::sync::Arc;
use std::time::{Duration, Instant};

use backend_gloo::GlooGroup;
use ftcore::{
    Collective, Configuration, DType, Device, Epoch, Error, GroupOptions, InMemoryStore, ProcessGroup,
    ProcessGroupExt, ReduceOp, Result, SubmitOptions, Tensor, deadline_in,
};
use isolate::{IsolateOptions, IsolatedGroup};

const SIZES: [usize; 6] = [4, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 32 << 20];

fn configure(group: &dyn ProcessGroup, store: &Arc<InMemoryStore>, prefix: &str, rank: u32) -> Result<()> {
    group.configure(Configuration {
        store: store.clone(),
        prefix: prefix.to_string(),
        name: prefix.to_string(),
        epoch: Epoch(1),
        rank,
        world_size: 2,
        deadline: deadline_in(Duration::from_secs(60)),
    })
}

/// Seconds per operation of `count` in a row on one tensor.
fn turn(group: &dyn ProcessGroup, tensor: &mut Option<Tensor>, count: u32) -> Result<f64> {
    let began = Instant::now();
    for _ in 0..count {
        let Some(t) = tensor.take() else {
            return Err(Error::invalid("the tensor is lost"));
        };
        let op = Collective::AllReduce {
            tensors: vec![t],
            op: ReduceOp::Sum,
        };
        *tensor = group.run_blocking(op, SubmitOptions::default())?.tensors.pop();
    }
    Ok(began.elapsed().as_secs_f64() / f64::from(count))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn rank(rank: u32, store: &Arc<InMemoryStore>, turns: u32) -> Result<()> {
    let direct = GlooGroup::new("direct", GroupOptions::default())?;
    let isolated = IsolatedGroup::new(IsolateOptions::new("gloo", Device::CPU))?;
    configure(&direct, store, "direct", rank)?;
    configure(&isolated, store, "isolated", rank)?;
    if rank == 0 {
        println!("{turns} interleaved turns; microseconds per all-reduce, 2 ranks");
        println!(
            "{:>10} {:>10} {:>10} {:>10} {:>10} {:>14} {:>10}",
            "bytes", "direct", "isolated", "pool", "extra us", "isolated/direct", "pool/direct"
        );
    }
    for bytes in SIZES {
        let n = bytes / 4;
        let mut plain = Some(Tensor::zeros(DType::F32, n));
        let mut staged = Some(Tensor::zeros(DType::F32, n));
        let mut shared = Some(isolated.alloc(DType::F32, &[n])?);
        let count = (4_000_000 / bytes.max(4096)).clamp(2, 200) as u32;
        let (mut d, mut i, mut p) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..=turns {
            let (a, b, c) = (
                turn(&direct, &mut plain, count)?,
                turn(&isolated, &mut staged, count)?,
                turn(&isolated, &mut shared, count)?,
            );
            if round > 0 {
                d.push(a);
                i.push(b);
                p.push(c);
            }
        }
        let ratio = |of: &[f64]| median(d.iter().zip(of).map(|(d, x)| d / x).collect());
        let (ri, rp) = (ratio(&i), ratio(&p));
        let (d, i, p) = (median(d) * 1e6, median(i) * 1e6, median(p) * 1e6);
        if rank == 0 {
            println!(
                "{bytes:>10} {d:>10.1} {i:>10.1} {p:>10.1} {:>10.1} {ri:>14.2}x {rp:>9.2}x",
                i - d
            );
        }
    }
    isolated.shutdown(deadline_in(Duration::from_secs(5)))?;
    direct.shutdown(deadline_in(Duration::from_secs(5)))
}

fn main() -> Result<()> {
    isolate::run_child_if_asked();
    let turns = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(21);
    let store = Arc::new(InMemoryStore::new());
    std::thread::scope(|scope| {
        let other = scope.spawn(|| rank(1, &store, turns));
        let own = rank(0, &store, turns);
        let other = other
            .join()
            .unwrap_or_else(|_| Err(Error::invalid("a rank panicked")));
        own.and(other)
    })
}
