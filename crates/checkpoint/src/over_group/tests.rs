//! Over real gloo groups, through shared memory and TCP: ranks are threads, the last one receives.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use backend_gloo::GlooGroup;
use ftcore::{
    Configuration, Epoch, ErrorKind, GroupOptions, InMemoryStore, ProcessGroupExt, ReduceOp, Step, Store,
    Tensor, deadline_in,
};

use super::messages::{Head, Named, room};
use super::*;
use crate::{FetchOptions, Fetched, Reach, Snapshot, SnapshotId, SourceChoice, StateDict};

const TRANSPORTS: [&str; 2] = ["shm", "tcp"];

fn soon() -> Instant {
    deadline_in(Duration::from_secs(60))
}

fn configure(group: &dyn ProcessGroup, epoch: u64, store: &Arc<dyn Store>, (rank, world): (u32, u32)) {
    let configuration = Configuration {
        store: store.clone(),
        prefix: "t".into(),
        name: "t".into(),
        epoch: Epoch(epoch),
        rank,
        world_size: world,
        deadline: soon(),
        cancel: Default::default(),
    };
    group.configure(configuration).unwrap();
}

/// Runs `body` on each of `world` ranks, with a group at epoch 9; what comes back, in rank order.
fn ranks<T: Send>(
    transport: &str,
    world: u32,
    body: impl Fn(u32, &Arc<GlooGroup>, &Arc<dyn Store>) -> T + Sync,
) -> Vec<T> {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::default());
    std::thread::scope(|scope| {
        let (body, store) = (&body, &store);
        let run = move |rank: u32| {
            let mut options = GroupOptions::default();
            options.hints.insert("transport".into(), transport.into());
            let group = Arc::new(GlooGroup::new("t", options).unwrap());
            configure(&*group, 9, store, (rank, world));
            body(rank, &group, store)
        };
        let threads: Vec<_> = (0..world).map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// Large and small tensors, one of several chunks, and some without values; `own` tells two states apart.
fn state(own: f32) -> StateDict {
    let mut state = StateDict::new();
    let large: Vec<f32> = (0..700_000).map(|e| e as f32).collect();
    state
        .insert_shared("large", &Arc::new(Tensor::from_vec(large)))
        .unwrap();
    for i in 0..40 {
        state
            .insert_f32(format!("small{i}"), &[i], &vec![own; i])
            .unwrap();
    }
    state.insert_i64s("none", &[]).unwrap();
    state.set_metadata("optimiser", "sgd");
    state
}

fn id(epoch: Epoch) -> SnapshotId {
    SnapshotId {
        step: Step(5),
        epoch,
        lineage: "ab".into(),
    }
}

fn snapshot(own: f32) -> Arc<Snapshot> {
    Snapshot::of(id(Epoch(9)), state(own), 1 << 20).unwrap()
}

fn fetch<'a>(group: &'a GlooGroup, sources: u32) -> GroupFetch<'a> {
    let source = |rank| GroupSource {
        rank,
        name: format!("replica 'r{rank}'"),
    };
    GroupFetch {
        group,
        sources: (0..sources).map(source).collect(),
        step: Step(5),
        epoch: Epoch(9),
        lineage: Some("ab".into()),
        choice: None,
        distrusted: Distrusted::default(),
        watch: &|| Ok(()),
    }
}

fn run(fetch: &GroupFetch<'_>) -> Result<Fetched> {
    fetch.run(soon(), &FetchOptions::default())
}

fn serve(group: &Arc<GlooGroup>, snapshot: Arc<Snapshot>, to: Vec<u32>) {
    serve_over_group(group.clone(), snapshot, to, soon()).unwrap();
}

/// A step of all ranks after the transfer.
fn reduce(group: &GlooGroup) -> f32 {
    let sum = group
        .all_reduce(Tensor::from_vec(vec![1.0f32]), ReduceOp::Sum)
        .unwrap();
    sum.take_tensor().unwrap().as_slice::<f32>().unwrap()[0]
}

#[test]
fn a_state_comes_bit_for_bit_from_the_first_source_while_the_sources_are_in_a_collective_already() {
    for transport in TRANSPORTS {
        ranks(transport, 3, |rank, group, _| {
            if rank < 2 {
                serve(group, snapshot(rank as f32), vec![2]);
            } else {
                let fetched = run(&fetch(group, 2)).unwrap();
                assert!(fetched.state == state(0.0), "{transport}");
                assert_eq!((&fetched.id, &fetched.followed[..]), (&id(Epoch(9)), &[0][..]));
                assert!(fetched.received[0].1 > 2_800_000, "{:?}", fetched.received);
            }
            assert_eq!(reduce(group), 3.0);
        });
    }
}

#[test]
fn several_replicas_heal_from_one_source_at_once() {
    ranks("shm", 4, |rank, group, _| {
        if rank == 0 {
            serve(group, snapshot(3.0), vec![1, 2, 3]);
        } else {
            assert!(run(&fetch(group, 1)).unwrap().state == state(3.0));
        }
        assert_eq!(reduce(group), 4.0);
    });
}

#[test]
fn a_source_that_holds_another_step_epoch_or_lineage_is_named_and_the_next_one_asked() {
    let others = [
        SnapshotId {
            step: Step(4),
            ..id(Epoch(9))
        },
        id(Epoch(8)),
        SnapshotId {
            lineage: "cd".into(),
            ..id(Epoch(9))
        },
    ];
    for other in others {
        ranks("shm", 3, |rank, group, _| {
            if rank < 2 {
                let held = if rank == 0 { other.clone() } else { id(Epoch(9)) };
                let snapshot = Snapshot::of(held, state(rank as f32), 1 << 20).unwrap();
                serve(group, snapshot, vec![2]);
            } else {
                let fetched = run(&fetch(group, 2)).unwrap();
                assert!(fetched.state == state(1.0), "{other}");
            }
            reduce(group);
        });
        let errors = ranks("shm", 2, |rank, group, _| {
            if rank == 0 {
                serve(
                    group,
                    Snapshot::of(other.clone(), state(0.0), 1 << 20).unwrap(),
                    vec![1],
                );
                reduce(group);
                return None;
            }
            let e = run(&fetch(group, 1)).unwrap_err();
            reduce(group);
            Some(e)
        });
        let e = errors.into_iter().flatten().next().unwrap();
        let holds = format!("it holds step {} of epoch {}", other.step, other.epoch);
        assert_eq!(e.kind(), ErrorKind::NotFound, "{e}");
        assert!(
            e.message().contains("replica 'r0'") && e.message().contains(&holds),
            "{e}"
        );
    }
}

#[test]
fn wrong_bytes_are_named_with_source_and_chunk_and_the_next_fetch_asks_another_source() {
    for transport in TRANSPORTS {
        let distrusted = Distrusted::default();
        ranks(transport, 3, |rank, group, store| {
            if rank < 2 {
                let snapshot = if rank == 0 {
                    snapshot(0.0).with_a_wrong_byte(2, 1_500_000)
                } else {
                    snapshot(1.0)
                };
                // The abort may come before a source has heard that it is done.
                drop(serve_over_group(group.clone(), snapshot, vec![2], soon()));
            } else {
                let mut fetch = fetch(group, 2);
                fetch.distrusted = distrusted.clone();
                let e = run(&fetch).unwrap_err();
                assert_eq!(e.kind(), ErrorKind::Corrupt, "{e}");
                for part in ["replica 'r0'", "step 5 of epoch 9", "chunk 2 of"] {
                    assert!(e.message().contains(part), "{e}");
                }
                group.abort("the state is wrong");
            }
            let until = soon();
            while group.error().is_none() {
                assert!(Instant::now() < until, "rank {rank} did not hear of the end");
                std::thread::yield_now();
            }
            configure(&**group, 10, store, (rank, 3));
            let snapshot = || Snapshot::of(id(Epoch(10)), state(rank as f32), 1 << 20).unwrap();
            if rank < 2 {
                serve(group, snapshot(), vec![2]);
            } else {
                let mut fetch = fetch(group, 2);
                (fetch.distrusted, fetch.epoch) = (distrusted.clone(), Epoch(10));
                assert!(run(&fetch).unwrap().state == state(1.0));
            }
            reduce(group);
        });
    }
}

#[test]
fn a_source_whose_manifest_cannot_be_used_is_asked_last_in_the_next_fetch() {
    let distrusted = Distrusted::default();
    ranks("shm", 3, |rank, group, store| {
        match rank {
            0 => {
                // Answers by hand.
                group.recv(room(), 2, TAG_ASK).unwrap().wait_done().unwrap();
                let head = Head {
                    holds: Named::of_snapshot(&id(Epoch(9))),
                    manifest_bytes: u64::MAX,
                };
                drop(group.send(head.write(), 2, TAG_HEAD));
            }
            // The abort may come before it has heard that it is done.
            1 => drop(serve_over_group(group.clone(), snapshot(1.0), vec![2], soon())),
            _ => {
                let mut fetch = fetch(group, 2);
                fetch.distrusted = distrusted.clone();
                let e = run(&fetch).unwrap_err();
                assert_eq!(e.kind(), ErrorKind::Protocol, "{e}");
                assert!(e.message().contains("replica 'r0'"), "{e}");
                group.abort("the manifest cannot be used");
            }
        }
        let until = soon();
        while group.error().is_none() {
            assert!(Instant::now() < until, "rank {rank} did not hear of the end");
            std::thread::yield_now();
        }
        configure(&**group, 10, store, (rank, 3));
        if rank < 2 {
            let snapshot = Snapshot::of(id(Epoch(10)), state(rank as f32), 1 << 20).unwrap();
            serve(group, snapshot, vec![2]);
        } else {
            let mut fetch = fetch(group, 2);
            (fetch.distrusted, fetch.epoch) = (distrusted.clone(), Epoch(10));
            assert!(run(&fetch).unwrap().state == state(1.0));
        }
        reduce(group);
    });
}

#[test]
fn an_ask_that_cannot_be_read_ends_the_group_for_the_other_receivers_too() {
    let sent = Barrier::new(2);
    ranks("shm", 3, |rank, group, _| {
        match rank {
            0 => serve(group, snapshot(0.0), vec![1, 2]),
            1 => {
                sent.wait();
                // Its deadline is far.
                if let Err(e) = run(&fetch(group, 1)) {
                    assert_ne!(e.kind(), ErrorKind::Timeout, "{e}");
                }
            }
            _ => {
                let ask = Tensor::from_vec(vec![9u8; 64]);
                drop(group.send(ask, 0, TAG_ASK).map(|work| work.wait_done()));
                sent.wait();
            }
        }
        let until = soon();
        while group.error().is_none() {
            assert!(Instant::now() < until, "rank {rank} did not hear of the end");
            std::thread::yield_now();
        }
        let text = group.error().unwrap().to_string();
        assert!(text.contains("the state for rank 2"), "{text}");
    });
}

#[test]
fn what_is_beyond_the_limits_is_refused_before_memory_is_taken_for_it() {
    let small = FetchOptions::default();
    for (options, text) in [
        (
            FetchOptions {
                max_manifest_bytes: 100,
                ..small.clone()
            },
            "max_manifest_bytes",
        ),
        (
            FetchOptions {
                max_state_bytes: 1_000_000,
                ..small
            },
            "max_state_bytes",
        ),
    ] {
        ranks("shm", 2, |rank, group, _| {
            if rank == 0 {
                serve(group, snapshot(0.0), vec![1]);
                return;
            }
            let e = fetch(group, 1).run(soon(), &options).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Protocol, "{e}");
            assert!(
                e.message().contains(text) && e.message().contains("replica 'r0'"),
                "{e}"
            );
            group.abort("refused");
        });
    }
}

#[test]
fn a_source_that_goes_in_the_middle_fails_the_fetch_at_once_and_is_named() {
    for transport in TRANSPORTS {
        let asked = AtomicBool::new(false);
        ranks(transport, 2, |rank, group, _| {
            if rank == 0 {
                // It never answers what it is asked for.
                let until = soon();
                while !asked.load(Ordering::SeqCst) && Instant::now() < until {
                    std::thread::yield_now();
                }
                group.abort("the source ends");
                return;
            }
            let watch = || {
                asked.store(true, Ordering::SeqCst);
                Ok(())
            };
            let mut fetch = fetch(group, 1);
            fetch.watch = &watch;
            let e = run(&fetch).unwrap_err();
            assert!(e.message().contains("replica 'r0' (rank 0 of the group)"), "{e}");
            assert_ne!(e.kind(), ErrorKind::Timeout, "{e}");
        });
    }
}

#[test]
fn a_fetch_that_is_not_wanted_any_more_ends_although_its_source_is_silent() {
    ranks("shm", 2, |rank, group, _| {
        if rank == 1 {
            let mut fetch = fetch(group, 1);
            fetch.watch = &|| Err(Error::new(ErrorKind::Aborted, "the epoch is over"));
            let e = run(&fetch).unwrap_err();
            assert_eq!((e.kind(), e.message()), (ErrorKind::Aborted, "the epoch is over"));
            group.abort("over");
        } else {
            let until = soon();
            while group.error().is_none() && Instant::now() < until {
                std::thread::yield_now();
            }
        }
    });
}

/// Follows this source, and says whether what came is taken.
#[derive(Debug)]
struct Chosen(usize, bool);

impl SourceChoice for Chosen {
    fn follow(&self, reach: &Reach, _: Instant) -> Result<Option<usize>> {
        assert_eq!(reach.have, [0, 1]);
        Ok(Some(self.0))
    }
    fn settle(&self, followed: &[usize], _: Instant) -> Result<bool> {
        assert_eq!(followed, [self.0]);
        Ok(self.1)
    }
}

#[test]
fn the_source_that_the_other_ranks_follow_is_asked_and_a_choice_that_moved_takes_no_state() {
    for settles in [true, false] {
        // A group with receives that were given up is aborted when it is dropped: not before the others are done.
        let done = Barrier::new(3);
        ranks("shm", 3, |rank, group, _| {
            if rank < 2 {
                serve(group, snapshot(rank as f32), vec![2]);
            } else {
                let mut fetch = fetch(group, 2);
                fetch.choice = Some(Arc::new(Chosen(1, settles)));
                match run(&fetch) {
                    Ok(fetched) => assert!(settles && fetched.state == state(1.0)),
                    Err(e) => assert_eq!((settles, e.kind()), (false, ErrorKind::Aborted), "{e}"),
                }
            }
            reduce(group);
            done.wait();
        });
    }
}

#[test]
fn memory_that_a_snapshot_shares_is_sent_and_never_given_to_an_operation_that_writes_to_it() {
    ranks("shm", 2, |_, group, _| {
        let refused = group.all_reduce(Tensor::from_shared(vec![1u8, 2]), ReduceOp::Sum);
        let rejected = refused.err().unwrap();
        assert_eq!(rejected.error.kind(), ErrorKind::InvalidArgument);
        assert!(
            rejected.error.message().contains("it can be sent only"),
            "{}",
            rejected.error
        );
        assert!(group.recv(Tensor::from_shared(vec![1u8, 2]), 0, 7).is_err());
    });
}
