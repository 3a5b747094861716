//! How long a blocking all-reduce takes between ranks of one process, over TCP. Quicker to build than `oxccl bench`, for work on
//! the transport; the figures of the documentation come from there.

use std::sync::Barrier;
use std::time::Instant;

use ftcore::{Collective, ProcessGroupExt, ReduceOp, SubmitOptions, Tensor};

use crate::ranks::{soon, with_groups_over};

/// A list of numbers in a variable of the environment.
fn numbers(name: &str, otherwise: &[usize]) -> Vec<usize> {
    let text = std::env::var(name).unwrap_or_default();
    let given: Vec<usize> = text.split(',').filter_map(|n| n.parse().ok()).collect();
    if given.is_empty() {
        otherwise.to_vec()
    } else {
        given
    }
}

#[test]
#[ignore = "measures: prints the time of an all-reduce over TCP; OXCCL_RATES_BYTES and OXCCL_RATES_RANKS are lists of numbers"]
fn all_reduce_over_tcp() {
    let sizes = numbers(
        "OXCCL_RATES_BYTES",
        &[4, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26],
    );
    for ranks in numbers("OXCCL_RATES_RANKS", &[2, 4]) {
        let meet = Barrier::new(ranks);
        for &bytes in &sizes {
            let calls = (400_000_000 / (bytes + 20_000)).clamp(12, 20_000);
            let times = with_groups_over("tcp", ranks as u32, |_, group| {
                let mut tensor = Tensor::from_vec(vec![1f32; bytes / 4]);
                let mut times = Vec::with_capacity(calls);
                meet.wait();
                for _ in 0..calls {
                    let start = SubmitOptions::by(soon());
                    group.run_blocking(Collective::Barrier, start).unwrap();
                    let began = Instant::now();
                    let op = Collective::AllReduce {
                        tensors: vec![tensor],
                        op: ReduceOp::Max,
                    };
                    let done = group.run_blocking(op, SubmitOptions::by(soon())).unwrap();
                    times.push(began.elapsed());
                    tensor = done.into_tensor().unwrap();
                }
                meet.wait();
                times
            });
            let mut slowest: Vec<_> = (0..calls)
                .filter_map(|call| times.iter().map(|t| t[call]).max())
                .collect();
            slowest.sort_unstable();
            println!(
                "{ranks} ranks, {bytes} bytes: median {:.1} us, tenth {:.1} us",
                slowest[calls / 2].as_secs_f64() * 1e6,
                slowest[calls / 10].as_secs_f64() * 1e6
            );
        }
    }
}
