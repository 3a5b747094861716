//! Links that are measured (the hint `links`), and sums that ranks share unevenly.

use std::time::Duration;

use backend_gloo::GlooGroup;
use ftcore::{
    Collective, ErrorKind, GroupOptions, ProcessGroup, ProcessGroupExt, ReduceOp, SubmitOptions, Tensor,
    deadline_in,
};

use crate::ranks::{configuration, soon, store};

/// More than one segment, and more than goes in one piece: 5 MiB and a little.
const COUNT: usize = (5 << 18) + 77;

fn options(hints: &[(&str, &str)]) -> GroupOptions {
    let mut options = GroupOptions::default();
    options.set("transport", "tcp").unwrap();
    for (name, value) in hints {
        options.hints.insert((*name).into(), (*value).into());
    }
    options
}

/// Runs `body` on threads with the groups that `make` makes, configured; results by rank.
fn with<T: Send>(
    world: u32,
    make: impl Fn() -> GlooGroup + Sync,
    body: impl Fn(u32, &GlooGroup) -> T + Sync,
) -> Vec<T> {
    let store = store();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..world)
            .map(|rank| {
                let (store, body, make) = (&store, &body, &make);
                scope.spawn(move || {
                    let group = make();
                    group.configure(configuration(store, 1, rank, world)).unwrap();
                    body(rank, &group)
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// Fractions of many magnitudes: another order of reduction gives other bits.
fn values(rank: u32) -> Vec<f32> {
    let scale = 10f32.powi(rank as i32 % 4 * 2);
    (0..COUNT)
        .map(|i| ((i * 31 + rank as usize * 17) % 1009) as f32 / 7.0 * scale)
        .collect()
}

/// What every rank has in the end of sums, averages and scaled sums, one of which a rank does not take part in; and how many bytes it sent for the first.
fn results(rank: u32, group: &GlooGroup) -> (Vec<Vec<u32>>, u64) {
    let mut sent = 0;
    let ops = [
        (ReduceOp::Sum, true),
        (ReduceOp::Avg, true),
        (ReduceOp::Avg, rank != 1),
        (ReduceOp::PremulSum(0.3), true),
        (ReduceOp::Max, true),
    ];
    let results = ops.into_iter().enumerate().map(|(i, (op, contribute))| {
        let before = group.traffic().sent;
        let op = Collective::AllReduce {
            tensors: vec![Tensor::from_vec(values(rank))],
            op,
        };
        let options = SubmitOptions {
            contribute,
            ..SubmitOptions::by(soon())
        };
        let work = group.run(op, options).unwrap();
        let tensor = work.take_tensor().unwrap();
        assert_eq!(work.contributors(), group.info().world_size - u32::from(i == 2));
        if i == 0 {
            sent = group.traffic().sent - before;
        }
        tensor
            .as_slice::<f32>()
            .unwrap()
            .iter()
            .map(|x| x.to_bits())
            .collect()
    });
    (results.collect(), sent)
}

#[test]
fn uneven_shares_give_the_bits_of_even_ones_and_a_rank_without_a_share_sends_its_values_once() {
    let shares = [0u32, 9_000, 30_000, 26_536];
    let bytes = (COUNT * 4) as f64;
    for hints in [&[][..], &[("connections", "3")]] {
        let even = with(4, || GlooGroup::new("even", options(hints)).unwrap(), results);
        let uneven = with(
            4,
            || GlooGroup::uneven("uneven", options(hints), shares.to_vec()).unwrap(),
            results,
        );
        for rank in 0..4 {
            assert!(
                even[rank].0 == uneven[rank].0,
                "rank {rank}, {hints:?}: other bits"
            );
            assert!(
                uneven[rank].0 == uneven[0].0,
                "rank {rank}, {hints:?}: unequal results"
            );
            let expected = 1.0 + 2.0 * f64::from(shares[rank]) / 65_536.0;
            let sent = uneven[rank].1 as f64 / bytes;
            assert!(
                (sent - expected).abs() < 0.01,
                "rank {rank}, {hints:?}: {sent} of {expected}"
            );
            assert!((even[rank].1 as f64 / bytes - 1.5).abs() < 0.01);
        }
    }
}

#[test]
fn operations_are_right_behind_measured_links_however_these_were_found() {
    let even = with(4, || GlooGroup::new("even", options(&[])).unwrap(), results);
    for hints in [
        &[("links", "measured")][..],
        &[("links", "measured"), ("connections", "2")],
    ] {
        let measured = with(4, || GlooGroup::new("measured", options(hints)).unwrap(), results);
        for (even, measured) in even.iter().zip(&measured) {
            assert!(even.0 == measured.0, "{hints:?}: other bits");
        }
    }
    // Nothing is measured between two ranks, or where ranks share memory.
    for (world, transport) in [(2, "tcp"), (3, "auto")] {
        let hints = [("links", "measured"), ("transport", transport)];
        let sent = with(
            world,
            || GlooGroup::new("few", options(&hints)).unwrap(),
            |_, group| {
                group.barrier().unwrap();
                group.traffic().sent
            },
        );
        assert!(sent.iter().all(|sent| *sent < 10_000), "{sent:?}");
    }
}

#[test]
fn ranks_that_take_links_for_different_things_find_out_when_they_connect() {
    let store = store();
    std::thread::scope(|scope| {
        for (rank, links) in [(0u32, "even"), (1, "measured")] {
            let store = &store;
            scope.spawn(move || {
                let group = GlooGroup::new("links", options(&[("links", links)])).unwrap();
                let e = group.configure(configuration(store, 1, rank, 2)).unwrap_err();
                assert_eq!(e.kind(), ErrorKind::Mismatch, "{e}");
                let text = e.to_string();
                assert!(
                    text.contains("links=even") && text.contains("links=measured"),
                    "{e}"
                );
            });
        }
    });
}

#[test]
fn a_rank_that_has_no_time_to_measure_ends_the_configuration_of_all_and_is_named() {
    let store = store();
    std::thread::scope(|scope| {
        for rank in 0..3u32 {
            let store = &store;
            scope.spawn(move || {
                let group = GlooGroup::new("links", options(&[("links", "measured")])).unwrap();
                let mut configuration = configuration(store, 1, rank, 3);
                if rank == 1 {
                    // Three turns take longer than that.
                    configuration.deadline = deadline_in(Duration::from_millis(250));
                }
                let e = group.configure(configuration).unwrap_err();
                assert_eq!(e.kind(), ErrorKind::Timeout, "{e}");
                assert!(
                    rank == 1 || e.to_string().contains("rank 1 reports"),
                    "rank {rank}: {e}"
                );
            });
        }
    });
}
