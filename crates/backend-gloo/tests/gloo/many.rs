//! Many threads with a group each, many operations in flight in each, and messages beside them: none is starved.

use std::collections::VecDeque;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use ftcore::{DType, ProcessGroup, ProcessGroupExt, ReduceOp, Tensor, Work, deadline_in};

use crate::ranks::{configuration, group, soon, store};

const GROUPS: usize = 8;
const IN_FLIGHT: usize = 32;
const LENGTHS: [usize; 4] = [1, 300, 5000, 40_000];

/// Keeps 32 all-reduces in flight and sends a tagged message to and fro, until `end` says so on both ranks. Operations done.
fn busy(rank: u32, group: &dyn ProcessGroup, until: Instant) -> u64 {
    let mut done = 0u64;
    let mut works: VecDeque<(u64, Work)> = VecDeque::new();
    let mut number = 0u64;
    loop {
        // Rank 0 decides when it is over; the message that says so is the load beside the collectives.
        let more = u8::from(Instant::now() < until);
        let tag = (number % 1000) as u32;
        let go_on = if rank == 0 {
            group
                .send(Tensor::from_vec(vec![more]), 1, tag)
                .unwrap()
                .wait(soon())
                .unwrap();
            more
        } else {
            let work = group.recv(Tensor::zeros(DType::U8, 1), 0, tag).unwrap();
            work.take_tensor().unwrap().bytes()[0]
        };
        for _ in 0..IN_FLIGHT / 4 {
            let n = LENGTHS[(number % 4) as usize];
            let data = Tensor::from_vec(vec![number as i64 + i64::from(rank); n]);
            works.push_back((number, group.all_reduce(data, ReduceOp::Sum).unwrap()));
            number += 1;
            while works.len() > if go_on == 1 { IN_FLIGHT } else { 0 } {
                let (number, work) = works.pop_front().unwrap();
                let sums = work.take_tensor().unwrap().into_vec::<i64>().unwrap();
                assert!(sums.iter().all(|x| *x == 2 * number as i64 + 1));
                done += 1;
            }
        }
        if go_on == 0 {
            group.barrier().unwrap();
            return done;
        }
    }
}

/// Binds this thread, and those that it starts, to the core of its rank.
fn bind(rank: u32) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut set = rustix::thread::CpuSet::new();
    set.set(rank as usize % cores);
    // Where that core is not ours, it stays where it is.
    let _ = rustix::thread::sched_setaffinity(None, &set);
}

/// Operations done by each thread within `time`; `bound`: each rank has a core, as programs that start ranks usually see to.
fn run(time: Duration, bound: bool) -> Vec<u64> {
    let stores: Vec<_> = (0..GROUPS).map(|_| store()).collect();
    let ready = Barrier::new(2 * GROUPS);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2 * GROUPS)
            .map(|i| {
                let (store, ready) = (&stores[i / 2], &ready);
                scope.spawn(move || {
                    let rank = (i % 2) as u32;
                    if bound {
                        bind(rank);
                    }
                    let group = group();
                    group.configure(configuration(store, 1, rank, 2)).unwrap();
                    ready.wait();
                    busy(rank, &group, deadline_in(time))
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// Prints how much the slowest of 8 groups did of what the fastest did; panics if that is less than half, again and again.
fn fair(bound: bool) {
    let mut seen = Vec::new();
    // The aim is 80 %. A machine that is busy with other things is unfair by itself, but not to the same group every time.
    for seconds in [1, 2, 4, 8] {
        let done = run(Duration::from_secs(seconds), bound);
        let (least, most) = (done.iter().min().unwrap(), done.iter().max().unwrap());
        println!(
            "the slowest did {} % of the fastest: {done:?}",
            least * 100 / most
        );
        if least * 2 >= *most {
            return;
        }
        seen.push(done);
    }
    panic!("one group is starved: {seen:?}");
}

#[test]
fn eight_groups_with_many_operations_in_flight_all_make_progress() {
    fair(false);
}

#[test]
fn eight_groups_whose_ranks_have_a_core_each_all_make_progress() {
    fair(true);
}
