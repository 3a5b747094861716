//! Large payloads over several connections (the hint `connections`): the same results, and ranks that disagree find out.

use ftcore::{
    Collective, DType, ErrorKind, GroupOptions, ProcessGroup, ProcessGroupExt, ReduceOp, SubmitOptions,
    Tensor,
};

use crate::ranks::{configuration, group_over, soon, store, with_groups_over};

/// Bytes of a piece, and of the shortest payload that goes in pieces.
const STRIPE: usize = 256 * 1024;
const FROM: usize = 2 * STRIPE;

/// Whole numbers that differ from place to place and from rank to rank: sums are exact, and a piece in the wrong place shows.
fn values(rank: u32, n: usize) -> Vec<f32> {
    (0..n)
        .map(|i| ((i * 7 + i / 4099) % 8191 + rank as usize) as f32)
        .collect()
}

fn sums(world: u32, n: usize) -> Vec<f32> {
    let more = (world * (world - 1) / 2) as f32;
    values(0, n).iter().map(|x| x * world as f32 + more).collect()
}

/// f32 elements of payloads around every border, for parts of `world` ranks.
fn lengths(world: usize) -> Vec<usize> {
    let part = [
        FROM - 4,
        FROM,
        FROM + 4,
        FROM + STRIPE - 4,
        9 * STRIPE,
        11 * STRIPE + 1236,
    ];
    part.map(|bytes| bytes / 4 * world).to_vec()
}

#[test]
fn every_landing_is_right_over_several_connections() {
    for (transport, world) in [("tcp*2", 2u32), ("tcp*4", 2), ("tcp*3", 3), ("tcp*4", 4)] {
        with_groups_over(transport, world, |rank, group| {
            // Two ranks swap whole vectors, more send parts round a ring.
            for n in lengths(if world == 2 { 1 } else { world as usize }) {
                let sum = group
                    .all_reduce(Tensor::from_vec(values(rank, n)), ReduceOp::Sum)
                    .unwrap()
                    .take_tensor()
                    .unwrap();
                assert!(
                    sum.as_slice::<f32>().unwrap() == sums(world, n),
                    "{transport} {n}: all_reduce"
                );
            }
            for n in lengths(1) {
                let pairs = vec![(
                    Tensor::from_vec(values(rank, n)),
                    Tensor::zeros(DType::F32, n * world as usize),
                )];
                let gathered = group
                    .run_blocking(Collective::AllGatherInto { pairs }, SubmitOptions::by(soon()))
                    .unwrap();
                let gathered = gathered.tensors.last().unwrap().as_slice::<f32>().unwrap();
                for (from, part) in gathered.chunks(n).enumerate() {
                    assert!(
                        part == values(from as u32, n),
                        "{transport} {n}: all_gather, part {from}"
                    );
                }
                let own: Vec<f32> = values(rank, n * world as usize);
                let pairs = vec![(Tensor::from_vec(own.clone()), Tensor::zeros(DType::F32, n))];
                let op = ReduceOp::Sum;
                let scattered = group
                    .run_blocking(
                        Collective::ReduceScatterInto { pairs, op },
                        SubmitOptions::by(soon()),
                    )
                    .unwrap();
                let all = sums(world, n * world as usize);
                let part = &all[rank as usize * n..][..n];
                let [input, output] = scattered.tensors.as_slice() else {
                    panic!("two tensors were given");
                };
                assert!(
                    output.as_slice::<f32>().unwrap() == part,
                    "{transport} {n}: reduce_scatter"
                );
                assert!(
                    input.as_slice::<f32>().unwrap() == own,
                    "{transport} {n}: the input was changed"
                );
            }
        });
    }
}

#[test]
fn operations_in_flight_one_behind_the_other_never_mix_their_pieces() {
    with_groups_over("tcp*3", 2, |rank, group| {
        // Pieces of the next operation arrive while one of these is still open on another connection.
        // One is more than the sockets hold: connections stop within a piece.
        let sizes = [
            FROM,
            5 * STRIPE,
            64,
            3 * STRIPE + 4,
            64 * STRIPE,
            FROM + 8,
            7 * STRIPE,
        ];
        let works: Vec<_> = sizes
            .iter()
            .cycle()
            .take(60)
            .enumerate()
            .map(|(i, bytes)| {
                let tensor = Tensor::from_vec(vec![rank as f32 + i as f32; bytes / 4]);
                group.all_reduce(tensor, ReduceOp::Sum).unwrap()
            })
            .collect();
        for (i, work) in works.into_iter().enumerate() {
            let sum = work.take_tensor().unwrap();
            assert!(
                sum.as_slice::<f32>()
                    .unwrap()
                    .iter()
                    .all(|x| *x == 1.0 + 2.0 * i as f32),
                "operation {i}"
            );
        }
    });
}

#[test]
fn ranks_with_different_numbers_of_connections_find_out_when_they_connect() {
    let store = store();
    std::thread::scope(|scope| {
        for (rank, transport) in [(0u32, "tcp*4"), (1, "tcp*2")] {
            let store = &store;
            scope.spawn(move || {
                let e = group_over(transport)
                    .configure(configuration(store, 1, rank, 2))
                    .unwrap_err();
                assert_eq!(e.kind(), ErrorKind::Mismatch, "{e}");
                let text = e.to_string();
                assert!(
                    text.contains("connections=4") && text.contains("connections=2"),
                    "{e}"
                );
            });
        }
    });
}

#[test]
fn a_split_group_has_as_many_connections_as_its_parent() {
    with_groups_over("tcp*2", 2, |rank, group| {
        let child = group.split(Some(0), rank, soon()).unwrap().unwrap();
        let before = child.traffic().sent;
        let n = 4 * STRIPE / 4;
        let sum = child
            .all_reduce(Tensor::from_vec(values(rank, n)), ReduceOp::Sum)
            .unwrap()
            .take_tensor()
            .unwrap();
        assert!(sum.as_slice::<f32>().unwrap() == sums(2, n));
        // A header of the frame, and one of each piece.
        assert_eq!(child.traffic().sent - before, (4 * STRIPE + 64 + 4 * 36) as u64);
    });
}

#[test]
fn a_number_of_connections_out_of_range_is_refused() {
    let mut options = GroupOptions::default();
    options.hints.insert("connections".into(), "0".into());
    let e = backend_gloo::GlooGroup::new("test", options)
        .map(drop)
        .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}");
}
