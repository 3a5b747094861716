//! One rank of the comparison in `against_rust.py`: `all_reduce MEETING RANK`. Prints nanoseconds for each call, size by size.

use std::time::Instant;

use oxccl::core::{ProcessGroupExt, ReduceOp, Result, deadline_in};
use oxccl::gloo as _;
use oxccl::world::{Place, World, WorldOptions};

/// Elements of f32, and calls for each round.
const SIZES: [(usize, u32); 2] = [(1, 20_000), (1 << 18, 200)];

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().collect();
    let [_, meeting, rank] = words.as_slice() else {
        return Err(oxccl::core::Error::invalid("usage: all_reduce MEETING RANK"));
    };
    let place = Place::from_url(&format!("{meeting}?rank={rank}&world_size=2"))?;
    let limit = std::time::Duration::from_secs(60);
    let world = World::init(&place, WorldOptions::default(), deadline_in(limit))?;
    for (count, calls) in SIZES {
        let mut data = vec![0f32; count];
        let mut run = |calls: u32| -> Result<u128> {
            let begin = Instant::now();
            for _ in 0..calls {
                world.group().all_reduce_slice(&mut data, ReduceOp::Sum)?;
            }
            Ok(begin.elapsed().as_nanos() / u128::from(calls))
        };
        run(calls / 10)?;
        println!("{}", run(calls)?);
    }
    world.shutdown(deadline_in(limit))
}
