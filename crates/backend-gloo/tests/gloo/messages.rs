//! Messages: blocking calls by their caller, short and long, met early and late, from several threads at once, and when something goes
//! wrong; between ranks that share memory, over `tcp`, and `mixed`.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use backend_gloo::GlooGroup;
use ftcore::{
    Collective, Completion, DType, Error, ErrorKind, Failed, ProcessGroup, ProcessGroupExt, ReduceOp,
    SubmitOptions, Tensor, deadline_in,
};

use crate::ranks::{configuration, group_over, soon, store, with_groups_over};

type Done = Result<Completion, Box<Failed>>;

fn send(group: &GlooGroup, tensor: Tensor, peer: u32, tag: u32, by: Instant) -> Done {
    group.run_blocking(Collective::Send { tensor, peer, tag }, SubmitOptions::by(by))
}

fn receive(group: &GlooGroup, n: usize, peer: Option<u32>, tag: u32, by: Instant) -> Done {
    let tensor = Tensor::zeros(DType::U8, n);
    group.run_blocking(Collective::Recv { tensor, peer, tag }, SubmitOptions::by(by))
}

fn content(rank: u32, n: usize) -> Vec<u8> {
    (0..n).map(|i| (i * 7 + i / 253 + rank as usize) as u8).collect()
}

fn bytes(done: Done) -> Vec<u8> {
    let completion = done.map_err(|f| f.error).unwrap();
    completion.into_tensor().unwrap().into_vec().unwrap()
}

/// Nothing, around the lengths that go with their offer, pieces, and more than a ring or a socket holds.
const LENGTHS: [usize; 19] = [
    0, 1, 63, 1024, 8191, 8192, 8193, 32_767, 32_768, 32_769, 65_535, 65_536, 65_537, 131_073, 262_144,
    262_145, 1_048_576, 1_048_577, 3_000_001,
];

/// Received with stores of its own.
const PAST_THE_CACHES: usize = (8 << 20) + 13;

#[test]
fn blocking_messages_of_any_length_go_to_and_fro_with_their_source() {
    for transport in ["shm", "tcp", "mixed"] {
        with_groups_over(transport, 2, |rank, group| {
            for round in 0..3u32 {
                for n in LENGTHS.into_iter().chain((round == 0).then_some(PAST_THE_CACHES)) {
                    let from = Some(0).filter(|_| round != 2);
                    if rank == 0 {
                        send(&group, Tensor::from_vec(content(0, n)), 1, round, soon()).unwrap();
                        assert_eq!(bytes(receive(&group, n, Some(1), round, soon())), content(1, n));
                    } else {
                        let got = receive(&group, n, from, round, soon()).unwrap();
                        assert_eq!(got.source, Some(0));
                        assert_eq!(bytes(Ok(got)), content(0, n));
                        send(&group, Tensor::from_vec(content(1, n)), 0, round, soon()).unwrap();
                    }
                }
            }
        });
    }
}

#[test]
fn pairs_of_a_send_and_a_receive_go_round_a_ring_of_ranks() {
    for world in [2u32, 3, 4] {
        with_groups_over("shm", world, |rank, group| {
            let (next, before) = ((rank + 1) % world, (rank + world - 1) % world);
            for n in LENGTHS.into_iter().chain([5; 200]) {
                let send = Collective::Send {
                    tensor: Tensor::from_vec(content(rank, n)),
                    peer: next,
                    tag: 4,
                };
                let recv = Collective::Recv {
                    tensor: Tensor::zeros(DType::U8, n),
                    peer: Some(before),
                    tag: 4,
                };
                let ops = if n % 2 == 0 {
                    vec![send, recv]
                } else {
                    vec![recv, send]
                };
                let at = n % 2;
                let done = group.run_blocking(Collective::Batch { ops }, SubmitOptions::by(soon()));
                let tensors = done.unwrap().tensors;
                assert_eq!(
                    tensors[1 - at].as_slice::<u8>().unwrap(),
                    content(before, n),
                    "{n}"
                );
                assert_eq!(tensors[at].as_slice::<u8>().unwrap(), content(rank, n), "{n}");
            }
        });
    }
}

#[test]
fn short_messages_that_came_before_their_receives_keep_their_order_within_a_tag() {
    for transport in ["shm", "tcp"] {
        with_groups_over(transport, 2, |rank, group| {
            if rank == 0 {
                let works: Vec<_> = (0..40u8)
                    .map(|i| {
                        group
                            .send(Tensor::from_vec(vec![i; 9]), 1, u32::from(i % 2))
                            .unwrap()
                    })
                    .collect();
                group.barrier().unwrap();
                works.into_iter().for_each(|w| w.wait(soon()).unwrap());
                // One of the other tag stands in front of what is received.
                let late = group.send(Tensor::from_vec(vec![77u8]), 1, 7).unwrap();
                send(&group, Tensor::from_vec(vec![88u8]), 1, 8, soon()).unwrap();
                let later = group.send(Tensor::from_vec(vec![99u8]), 1, 7).unwrap();
                group.barrier().unwrap();
                late.wait(soon()).unwrap();
                later.wait(soon()).unwrap();
            } else {
                group.barrier().unwrap();
                for i in (1..40u8).step_by(2).chain((0..40).step_by(2)) {
                    let peer = Some(0).filter(|_| i % 4 < 2);
                    assert_eq!(bytes(receive(&group, 9, peer, u32::from(i % 2), soon())), [i; 9]);
                }
                assert_eq!(bytes(receive(&group, 1, Some(0), 8, soon())), [88]);
                group.barrier().unwrap();
                assert_eq!(bytes(receive(&group, 1, Some(0), 7, soon())), [77]);
                assert_eq!(bytes(receive(&group, 1, Some(0), 7, soon())), [99]);
            }
        });
    }
}

#[test]
fn bytes_that_came_before_anybody_wanted_them_come_again() {
    for transport in ["shm", "tcp", "mixed"] {
        with_groups_over(transport, 3, |rank, group| {
            let lengths = [0, 9, 8000, 60_000, 1_048_576, 1_100_000];
            if rank == 0 {
                return group.barrier().unwrap();
            }
            let peer = 3 - rank;
            let sent: Vec<_> = lengths
                .iter()
                .zip(10..)
                .map(|(n, tag)| {
                    group
                        .send(Tensor::from_vec(content(rank, *n)), peer, tag)
                        .unwrap()
                })
                .collect();
            let last = group.send(Tensor::from_vec(vec![88u8; 30_000]), peer, 9).unwrap();
            // It stands behind all others on the way, and its receive is the first one posted.
            assert_eq!(
                bytes(receive(&group, 30_000, Some(peer), 9, soon())),
                [88; 30_000]
            );
            last.wait(soon()).unwrap();
            for (n, tag) in lengths.iter().zip(10..16).rev() {
                assert_eq!(
                    bytes(receive(&group, *n, Some(peer), tag, soon())),
                    content(peer, *n)
                );
            }
            sent.into_iter().for_each(|w| w.wait(soon()).unwrap());
            group.barrier().unwrap();
        });
    }
}

#[test]
fn more_messages_than_a_ring_holds_wait_their_turn() {
    for transport in ["shm", "tcp"] {
        with_groups_over(transport, 2, |rank, group| {
            let count = 600u32;
            if rank == 0 {
                let works: Vec<_> = (0..count)
                    .map(|i| group.send(Tensor::from_vec(content(i, 1024)), 1, 0).unwrap())
                    .collect();
                group.barrier().unwrap();
                works.into_iter().for_each(|w| w.wait(soon()).unwrap());
            } else {
                group.barrier().unwrap();
                for i in 0..count {
                    assert_eq!(bytes(receive(&group, 1024, Some(0), 0, soon())), content(i, 1024));
                }
            }
            group.barrier().unwrap();
        });
    }
}

#[test]
fn what_is_submitted_while_another_thread_waits_in_the_channels_goes_out() {
    for transport in ["shm", "tcp"] {
        with_groups_over(transport, 2, |rank, group| {
            let group = &group;
            if rank == 1 {
                assert_eq!(bytes(receive(group, 3, Some(0), 2, soon())), [5; 3]);
                send(group, Tensor::from_vec(vec![6u8; 3]), 0, 1, soon()).unwrap();
                return group.barrier().unwrap();
            }
            std::thread::scope(|scope| {
                let answer = scope.spawn(|| bytes(receive(group, 3, Some(1), 1, soon())));
                // Long enough that it sleeps; whether it does only decides what is tested.
                std::thread::sleep(Duration::from_millis(30));
                let work = group.send(Tensor::from_vec(vec![5u8; 3]), 1, 2).unwrap();
                work.wait(soon()).unwrap();
                assert_eq!(answer.join().unwrap(), [6; 3]);
            });
            group.barrier().unwrap();
        });
    }
}

#[test]
fn a_receive_from_a_rank_that_leaves_is_a_loss_that_names_it() {
    for transport in ["shm", "tcp"] {
        for blocking in [false, true] {
            with_groups_over(transport, 3, |rank, group| {
                if rank == 1 {
                    group.shutdown(soon()).unwrap();
                    return;
                }
                let e = if blocking {
                    receive(&group, 3, Some(1), 0, soon()).unwrap_err().error
                } else {
                    let work = group.recv(Tensor::zeros(DType::U8, 3), 1, 0);
                    match work {
                        Ok(work) => work.wait(soon()).unwrap_err(),
                        Err(refused) => refused.error,
                    }
                };
                assert!(
                    matches!(e.kind(), ErrorKind::PeerLost | ErrorKind::Poisoned),
                    "{e}"
                );
                assert!(e.to_string().contains("left the group"), "{e}");
            });
        }
    }
}

#[test]
fn a_receive_from_any_rank_ends_when_all_others_have_left_and_not_before() {
    for transport in ["shm", "tcp"] {
        let left = std::sync::Barrier::new(2);
        with_groups_over(transport, 3, |rank, group| match rank {
            0 => {
                let none = receive(&group, 3, None, 7, soon());
                let e = none.unwrap_err().error;
                assert!(
                    matches!(e.kind(), ErrorKind::PeerLost | ErrorKind::Poisoned),
                    "{e}"
                );
                assert!(e.to_string().contains("left the group"), "{e}");
            }
            1 => {
                group.shutdown(soon()).unwrap();
                left.wait();
            }
            // One that is still there may send; this one does not.
            _ => {
                left.wait();
                group.shutdown(soon()).unwrap();
            }
        });
    }
}

#[test]
fn a_message_of_the_last_rank_there_reaches_a_receive_from_any() {
    for transport in ["shm", "tcp"] {
        let left = std::sync::Barrier::new(2);
        with_groups_over(transport, 3, |rank, group| match rank {
            0 => assert_eq!(bytes(receive(&group, 3, None, 7, soon())), content(2, 3)),
            1 => {
                group.shutdown(soon()).unwrap();
                left.wait();
            }
            _ => {
                left.wait();
                send(&group, Tensor::from_vec(content(2, 3)), 0, 7, soon()).unwrap();
            }
        });
    }
}

#[test]
fn several_threads_send_and_receive_in_one_group_beside_collectives() {
    for transport in ["shm", "tcp"] {
        with_groups_over(transport, 2, |rank, group| {
            let group = &group;
            std::thread::scope(|scope| {
                for tag in 0..4u32 {
                    scope.spawn(move || {
                        for i in 0..150u32 {
                            let n = [3, 5000, 40_000][(i % 3) as usize];
                            let mine = Tensor::from_vec(content(rank + i, n));
                            if (rank + tag) % 2 == 0 {
                                send(group, mine, 1 - rank, tag, soon()).unwrap();
                            } else {
                                let got = bytes(receive(group, n, Some(1 - rank), tag, soon()));
                                assert!(got == content(1 - rank + i, n), "tag {tag}, message {i}");
                            }
                        }
                    });
                }
                for i in 0..150i64 {
                    let mut data = vec![i + i64::from(rank); 700];
                    group
                        .all_reduce_slice_with(&mut data, ReduceOp::Sum, SubmitOptions::by(soon()))
                        .unwrap();
                    assert!(data.iter().all(|x| *x == 2 * i + 1));
                }
            });
            group.barrier().unwrap();
        });
    }
}

#[test]
fn a_blocking_message_that_nobody_meets_ends_at_its_deadline_and_names_rank_and_tag() {
    for transport in ["shm", "tcp"] {
        for sends in [false, true] {
            with_groups_over(transport, 2, |rank, group| {
                if rank == 1 {
                    let e = failure(&group);
                    assert_eq!(e.kind(), ErrorKind::Timeout, "{e}");
                    return;
                }
                let began = Instant::now();
                let by = deadline_in(Duration::from_millis(200));
                let failed = if sends {
                    send(&group, Tensor::from_vec(vec![1u8; 5]), 1, 17, by).unwrap_err()
                } else {
                    receive(&group, 5, Some(1), 17, by).unwrap_err()
                };
                assert!(began.elapsed() >= Duration::from_millis(200));
                assert!(began.elapsed() < Duration::from_secs(10));
                assert_eq!(failed.tensors.len(), 1, "the tensor did not come back");
                let text = failed.error.to_string();
                assert_eq!(failed.error.kind(), ErrorKind::Timeout, "{text}");
                assert!(text.contains("rank 1") && text.contains("17"), "{text}");
            });
        }
    }
}

/// What the group says, once it says something.
fn failure(group: &GlooGroup) -> Error {
    let until = soon();
    loop {
        if let Some(error) = group.error() {
            return error;
        }
        assert!(Instant::now() < until, "the group does not fail");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_message_of_another_length_or_dtype_is_a_mismatch_on_both_sides() {
    for transport in ["shm", "tcp"] {
        for early in [false, true] {
            with_groups_over(transport, 2, |rank, group| {
                let e = if rank == 0 {
                    let work = group.send(Tensor::from_vec(vec![1.0f32; 3]), 1, 2).unwrap();
                    // Where the receive is early, the mismatch may come before the barrier has begun.
                    let _ = group.barrier();
                    work.wait(soon()).unwrap_err()
                } else if early {
                    let work = group.recv(Tensor::zeros(DType::I32, 3), 0, 2).unwrap();
                    let _ = group.barrier();
                    work.wait(soon()).unwrap_err()
                } else {
                    group.barrier().unwrap();
                    receive(&group, 3, Some(0), 2, soon()).unwrap_err().error
                };
                assert_eq!(e.kind(), ErrorKind::Mismatch, "{e}");
                assert!(e.to_string().contains("f32"), "{e}");
            });
        }
    }
}

#[test]
fn an_abort_ends_a_blocking_receive_and_gives_the_tensor_back() {
    for transport in ["shm", "tcp"] {
        let entered = Barrier::new(2);
        with_groups_over(transport, 2, |rank, group| {
            if rank == 0 {
                entered.wait();
                let failed = receive(&group, 5, Some(1), 0, soon()).unwrap_err();
                // It may have had no core until the abort was known.
                assert!(
                    matches!(failed.error.kind(), ErrorKind::Aborted | ErrorKind::Poisoned),
                    "{}",
                    failed.error
                );
                assert!(failed.error.to_string().contains("enough"), "{}", failed.error);
                assert_eq!(failed.tensors.len(), 1);
            } else {
                entered.wait();
                // Long enough that it waits; whether it does only decides what is tested.
                std::thread::sleep(Duration::from_millis(20));
                group.abort("enough");
            }
        });
    }
}

#[test]
fn what_a_rank_took_before_it_left_counts_as_taken() {
    for transport in ["shm", "tcp"] {
        for n in [10usize, 100_000] {
            let (store, both) = (store(), Barrier::new(2));
            std::thread::scope(|scope| {
                for rank in 0..2u32 {
                    let (store, both) = (&store, &both);
                    scope.spawn(move || {
                        for epoch in 1..=20 {
                            let group = group_over(transport);
                            group.configure(configuration(store, epoch, rank, 2)).unwrap();
                            if rank == 0 {
                                // The answer may come together with the leave.
                                let work = group.send(Tensor::from_vec(content(0, n)), 1, 3).unwrap();
                                work.wait(soon()).unwrap();
                            } else {
                                assert_eq!(bytes(receive(&group, n, Some(0), 3, soon())), content(0, n));
                            }
                            group.shutdown(soon()).unwrap();
                            both.wait();
                        }
                    });
                }
            });
        }
    }
}

#[test]
#[ignore = "measures: prints the time of a message to and fro between two ranks that share memory"]
fn ping() {
    for n in [4usize, 1024, 8192, 65_536, 1 << 20] {
        let times = with_groups_over("shm", 2, |rank, group| {
            let mut times = Vec::new();
            let mut tensor = Tensor::from_vec(vec![0u8; n]);
            for _ in 0..5000 {
                let began = Instant::now();
                for turn in 0..2 {
                    let (peer, tag) = (1 - rank, 0);
                    let op = if turn == rank {
                        Collective::Send { tensor, peer, tag }
                    } else {
                        Collective::Recv {
                            tensor,
                            peer: Some(peer),
                            tag,
                        }
                    };
                    let done = group.run_blocking(op, SubmitOptions::by(soon())).unwrap();
                    tensor = done.into_tensor().unwrap();
                }
                times.push(began.elapsed());
            }
            times.sort_unstable();
            times[times.len() / 2]
        });
        println!("{n} bytes to and fro: {:?}", times[0]);
    }
}
