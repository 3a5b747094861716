//! What isolation costs: gloo directly, gloo in child processes, and the same on tensors of the shared pool, beside two controls: gloo
//! directly once more on another tensor (again), and gloo directly on a copy that is made before and brought back after (copied).
//!
//! `cargo run --release -p oxccl-isolate --example isolate_overhead [-- BLOCKS [BYTES,…]]`
//!
//! Two ranks as threads. A block has two turns of each side, there and back again (A B C … C B A, another side first in every
//! block), so that a machine that gets slower or faster falls on all alike. A turn is a row of blocking all-reduces (f32, sum) on one
//! tensor, long enough that what the turn before left in the caches does not count. Printed: medians of the times and of the
//! blocks' ratios, these with their 95 % intervals (of a median, by order). What the interval of `again` misses of 1 is the error
//! of the comparison itself; what `copied` misses is the price of one copy in and one out on this machine.

use std::sync::Arc;
use std::time::{Duration, Instant};

use backend_gloo::GlooGroup;
use ftcore::{
    Collective, Configuration, DType, Device, Epoch, Error, GroupOptions, InMemoryStore, ProcessGroup,
    ProcessGroupExt, ReduceOp, Result, SubmitOptions, Tensor, deadline_in,
};
use oxccl_isolate::{IsolateOptions, IsolatedGroup};

const SIZES: [usize; 6] = [4, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 32 << 20];
/// What a turn moves: a row of several even of the largest tensors.
const TURN: usize = 64 << 20;
/// Direct, isolated, pool, direct again, direct on a copy.
const SIDES: usize = 5;

fn configure(group: &dyn ProcessGroup, store: &Arc<InMemoryStore>, prefix: &str, rank: u32) -> Result<()> {
    group.configure(Configuration {
        store: store.clone(),
        prefix: prefix.to_string(),
        name: prefix.to_string(),
        epoch: Epoch(1),
        rank,
        world_size: 2,
        deadline: deadline_in(Duration::from_secs(60)),
        cancel: Default::default(),
    })
}

/// A group with the tensor that it reduces again and again.
struct Side<'a> {
    group: &'a dyn ProcessGroup,
    tensor: Option<Tensor>,
    /// Where the tensor's contents come from and go to, where that is not the tensor itself.
    home: Option<Tensor>,
}

impl Side<'_> {
    /// Microseconds per operation of `count` in a row.
    fn turn(&mut self, count: usize) -> Result<f64> {
        let began = Instant::now();
        for _ in 0..count {
            let Some(mut t) = self.tensor.take() else {
                return Err(Error::invalid("the tensor is lost"));
            };
            if let Some(home) = &self.home {
                t.bytes_mut().copy_from_slice(home.bytes());
            }
            let op = Collective::AllReduce {
                tensors: vec![t],
                op: ReduceOp::Sum,
            };
            self.tensor = self
                .group
                .run_blocking(op, SubmitOptions::default())?
                .tensors
                .pop();
            if let (Some(home), Some(t)) = (&mut self.home, &self.tensor) {
                home.bytes_mut().copy_from_slice(t.bytes());
            }
        }
        Ok(began.elapsed().as_secs_f64() / count as f64 * 1e6)
    }
}

/// The times of all sides in one block.
fn block(sides: &mut [Side<'_>; SIDES], number: usize, count: usize) -> Result<[f64; SIDES]> {
    let mut order = [0, 1, 2, 3, 4];
    order.rotate_left(number % SIDES);
    let mut times = [0.0; SIDES];
    for at in order.into_iter().chain(order.into_iter().rev()) {
        if let (Some(side), Some(sum)) = (sides.get_mut(at), times.get_mut(at)) {
            *sum += side.turn(count)? / 2.0;
        }
    }
    Ok(times)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The median, and between which two values by their places in order that of all blocks lies 19 times of 20.
fn spread(mut values: Vec<f64>) -> String {
    values.sort_by(f64::total_cmp);
    let n = values.len() as f64;
    let at = |place: f64| {
        let place = place.clamp(0.0, n - 1.0) as usize;
        values.get(place).copied().unwrap_or(f64::NAN)
    };
    let reach = 0.98 * n.sqrt();
    format!(
        "{:.2} ({:.2} … {:.2})",
        at(n / 2.0),
        at((n / 2.0 - reach).floor()),
        at((n / 2.0 + reach).ceil())
    )
}

fn rank(rank: u32, store: &Arc<InMemoryStore>, blocks: usize, sizes: &[usize]) -> Result<()> {
    let direct = GlooGroup::new("direct", GroupOptions::default())?;
    let isolated = IsolatedGroup::new(IsolateOptions::new("gloo", Device::CPU))?;
    configure(&direct, store, "direct", rank)?;
    configure(&isolated, store, "isolated", rank)?;
    if rank == 0 {
        println!("{blocks} blocks; microseconds per all-reduce, 2 ranks");
        println!(
            "{:>10} {:>9} {:>9} {:>9} {:>9}   {:<20} {:<20} {:<20} {:<20}",
            "bytes",
            "direct",
            "isolated",
            "pool",
            "extra",
            "direct/isolated",
            "direct/pool",
            "direct/copied",
            "direct/again"
        );
    }
    for &bytes in sizes {
        let n = bytes / 4;
        let side = |group, tensor| Side {
            group,
            tensor: Some(tensor),
            home: None,
        };
        let own = || Tensor::zeros(DType::F32, n);
        let mut sides = [
            side(&direct as &dyn ProcessGroup, own()),
            side(&isolated, own()),
            side(&isolated, isolated.alloc(DType::F32, &[n])?),
            side(&direct, own()),
            Side {
                home: Some(own()),
                ..side(&direct, own())
            },
        ];
        let count = (TURN / bytes.max(4096)).clamp(2, 200);
        let mut all = Vec::new();
        for number in 0..=blocks {
            let times = block(&mut sides, number, count)?;
            // The first block warms up.
            if number > 0 {
                all.push(times);
            }
        }
        let each = |f: fn(&[f64; SIDES]) -> f64| all.iter().map(f).collect::<Vec<f64>>();
        let (d, i) = (median(each(|t| t[0])), median(each(|t| t[1])));
        if rank == 0 {
            println!(
                "{bytes:>10} {d:>9.1} {i:>9.1} {:>9.1} {:>9.1}   {:<20} {:<20} {:<20} {:<20}",
                median(each(|t| t[2])),
                i - d,
                spread(each(|t| t[0] / t[1])),
                spread(each(|t| t[0] / t[2])),
                spread(each(|t| t[0] / t[4])),
                spread(each(|t| t[0] / t[3])),
            );
        }
    }
    isolated.shutdown(deadline_in(Duration::from_secs(5)))?;
    direct.shutdown(deadline_in(Duration::from_secs(5)))
}

fn main() -> Result<()> {
    oxccl_isolate::run_child_if_asked();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let blocks = arguments.first().and_then(|a| a.parse().ok()).unwrap_or(20);
    let named = arguments.get(1).map(|list| list.split(','));
    let named: Vec<usize> = named
        .into_iter()
        .flatten()
        .filter_map(|s| s.parse().ok())
        .collect();
    let sizes = if named.is_empty() { SIZES.to_vec() } else { named };
    let store = Arc::new(InMemoryStore::new());
    std::thread::scope(|scope| {
        let other = scope.spawn(|| rank(1, &store, blocks, &sizes));
        let own = rank(0, &store, blocks, &sizes);
        let other = other
            .join()
            .unwrap_or_else(|_| Err(Error::invalid("a rank panicked")));
        own.and(other)
    })
}
