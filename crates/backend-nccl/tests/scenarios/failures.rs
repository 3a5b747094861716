//! Calls, work and streams that fail or hang while a group is in use.

use std::sync::Arc;
use std::time::{Duration, Instant};

use backend_nccl::CudaAccelerator;
use ftcore::{
    Accelerator, Collective, DType, ErrorKind, GroupOptions, InMemoryStore, ProcessGroup, ProcessGroupExt,
    ReduceOp, Status, Store, SubmitOptions, deadline_in, leaked_bytes,
};
use libtest_mimic::Failed;

use super::kit::*;

pub(super) fn call_fails() -> Outcome {
    two(GroupOptions::default(), |rank, group, store| {
        let e = until_failure(rank, group)?;
        if rank == 1 {
            says(
                &e,
                ErrorKind::Backend,
                &["ncclAllReduce", "unhandled cuda error", "all_reduce #", "code 1"],
            )?;
        } else {
            says(&e, ErrorKind::Backend, &["rank 1", "ncclAllReduce"])?;
        }
        let again = group.error().ok_or("the first cause is lost")?;
        says(&again, ErrorKind::Backend, &["ncclAllReduce"])?;
        next_epoch(rank, group, store)
    })
}

pub(super) fn group_end_fails() -> Outcome {
    two(GroupOptions::default(), |rank, group, store| {
        let e = until_failure(rank, group)?;
        says(&e, ErrorKind::Backend, &["ncclGroupEnd", "internal error"])?;
        next_epoch(rank, group, store)
    })
}

pub(super) fn init_fails() -> Outcome {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let store = &store;
    std::thread::scope(|scope| {
        let other = scope.spawn(move || {
            let group = group(0, GroupOptions::default())?;
            group.configure(configuration(store, 0, 2, 1, TIME_LIMIT))
        });
        let group = group(1, GroupOptions::default())?;
        let e = group
            .configure(configuration(store, 1, 2, 1, TIME_LIMIT))
            .err()
            .ok_or("configure succeeded")?;
        says(
            &e,
            ErrorKind::Backend,
            &["ncclCommInitRankConfig", "configure", "rank 1"],
        )?;
        check(group.info().world_size == 0, || {
            "the group says that it is configured".into()
        })?;
        let e = other
            .join()
            .map_err(|_| "a panic")?
            .err()
            .ok_or("rank 0 was configured alone")?;
        // L27: told, not left to its own deadline.
        says(
            &e,
            ErrorKind::Backend,
            &["rank 1 reports", "ncclCommInitRankConfig"],
        )
    })
}

pub(super) fn init_hangs() -> Outcome {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let store = &store;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..2u32)
            .map(|rank| {
                scope.spawn(move || -> Outcome {
                    let group = group(rank, GroupOptions::default())?;
                    let began = Instant::now();
                    let e = group
                        .configure(configuration(store, rank, 2, 1, Duration::from_millis(600)))
                        .err()
                        .ok_or("configure succeeded")?;
                    says(&e, ErrorKind::Timeout, &["phase: communicator", "of 2"])?;
                    check(began.elapsed() < Duration::from_secs(10), || {
                        "it took too long".into()
                    })?;
                    // The thread that hangs was given up: the process and the group go on.
                    group.configure(configuration(store, rank, 2, 2, Duration::from_secs(20)))?;
                    sum_works(rank, &group)
                })
            })
            .collect();
        ranks
            .into_iter()
            .try_for_each(|t| t.join().map_err(|_| "a panic")?)
    })
}

pub(super) fn asynchronous() -> Outcome {
    two(GroupOptions::default(), |rank, group, store| {
        let e = until_failure(rank, group)?;
        says(&e, ErrorKind::PeerLost, &["remote process exited"])?;
        let rejected = submit(rank, group, TIME_LIMIT)
            .err()
            .ok_or("a poisoned group accepted work")?;
        says(&rejected, ErrorKind::Poisoned, &["remote process exited"])?;
        next_epoch(rank, group, store)
    })
}

pub(super) fn blocked_stream() -> Outcome {
    two(GroupOptions::default(), |rank, group, _| {
        if rank == 1 {
            let e = group_error(group)?;
            return says(&e, ErrorKind::Timeout, &["rank 0", "all_reduce"]);
        }
        // A stream that waits for the work of another group, which never ends.
        let alone = self::group(0, GroupOptions::default())?;
        let own: Arc<dyn Store> = Arc::new(InMemoryStore::new());
        alone.configure(configuration(&own, 0, 1, 1, TIME_LIMIT))?;
        let never = submit(0, &alone, TIME_LIMIT)?;
        let blocked = CudaAccelerator.new_stream(0, false)?;
        never.wait_on(&*blocked)?;
        let began = Instant::now();
        let op = Collective::AllReduce {
            tensors: vec![filled(0, 1.0, 10)?],
            op: ReduceOp::Sum,
        };
        let options = SubmitOptions {
            stream: Some(blocked),
            ..SubmitOptions::by(deadline_in(Duration::from_millis(300)))
        };
        let work = group.run(op, options)?;
        let e = work
            .wait(deadline_in(Duration::from_secs(20)))
            .err()
            .ok_or("it succeeded")?;
        says(&e, ErrorKind::Timeout, &["all_reduce", "deadline"])?;
        check(began.elapsed() < Duration::from_secs(10), || {
            format!("it took {:?}", began.elapsed())
        })?;
        // It is still queued behind the stream, so its memory is in use.
        check(work.recover().is_empty(), || {
            "memory that is queued for use came back".into()
        })?;
        check(matches!(never.status(), Status::Pending), || {
            "the other group was disturbed".into()
        })
    })
}

pub(super) fn device_hangs() -> Outcome {
    two(GroupOptions::default(), |rank, group, store| {
        let work = submit(rank, group, Duration::from_millis(400))?;
        let e = work
            .wait(deadline_in(Duration::from_secs(20)))
            .err()
            .ok_or("it succeeded")?;
        says(&e, ErrorKind::Timeout, &["all_reduce", "f32, 1000 elements"])?;
        check(work.recover().len() == 1, || {
            "the tensor did not come back after the abort".into()
        })?;
        next_epoch(rank, group, store)
    })
}

pub(super) fn abort_hangs() -> Outcome {
    two(GroupOptions::default(), |rank, group, _| {
        let before = leaked_bytes();
        let work = submit(rank, group, Duration::from_millis(300))?;
        let began = Instant::now();
        let e = work
            .wait(deadline_in(Duration::from_secs(20)))
            .err()
            .ok_or("it succeeded")?;
        says(&e, ErrorKind::Timeout, &["all_reduce"])?;
        check(began.elapsed() < Duration::from_secs(10), || {
            "a hanging abort held the caller up".into()
        })?;
        if rank == 0 {
            check(work.recover().is_empty(), || {
                "memory that is in use came back".into()
            })?;
            check(leaked_bytes() >= before + 4000, || {
                "nothing was counted as leaked".into()
            })?;
        }
        Ok(())
    })
}

pub(super) fn call_hangs() -> Outcome {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let ranks: Vec<_> = (0..2u32)
        .map(|rank| {
            let store = store.clone();
            std::thread::spawn(move || -> Result<(), String> {
                let words = |e: Failed| e.message().unwrap_or("failed").to_string();
                let group = Arc::new(group(rank, GroupOptions::default()).map_err(|e| e.to_string())?);
                group
                    .configure(configuration(&store, rank, 2, 1, TIME_LIMIT))
                    .map_err(|e| e.to_string())?;
                let busy = group.clone();
                // On rank 0 this thread is lost in its third call; the group is not.
                std::thread::spawn(move || {
                    while let Ok(work) = submit(rank, &busy, Duration::from_millis(700)) {
                        if work.wait_done().is_err() {
                            break;
                        }
                    }
                });
                let e = group_error(&group).map_err(words)?;
                says(&e, ErrorKind::Timeout, &["all_reduce"]).map_err(words)?;
                next_epoch(rank, &group, &store).map_err(words)
            })
        })
        .collect();
    ranks
        .into_iter()
        .try_for_each(|t| t.join().map_err(|_| "a panic".to_string())?)
        .map_err(Into::into)
}

pub(super) fn event_fails() -> Outcome {
    two(GroupOptions::default(), |rank, group, store| {
        let Ok(e) = until_failure(rank, group) else {
            // The one call that failed was the test's own.
            return Ok(());
        };
        if e.kind() == ErrorKind::Timeout && e.to_string().contains("has left") {
            // It was the other rank's own, which is done with that.
            return Ok(());
        }
        says(&e, ErrorKind::Backend, &["cuEventQuery", "illegal memory access"])?;
        next_epoch(rank, group, store)
    })
    .or_else(|e| {
        let text = e.message().unwrap_or("").to_string();
        check(text.contains("illegal memory access"), || text.clone())
    })
}

pub(super) fn split_fails() -> Outcome {
    two(GroupOptions::default(), |rank, group, store| {
        let began = Instant::now();
        let Err(e) = group.split(Some(1), rank, deadline_in(TIME_LIMIT)).map(drop) else {
            return Err("the split succeeded".into());
        };
        // Refused if the notice was quicker than this rank's own call.
        says(&e, e.kind(), &["ncclCommSplit", "invalid usage", "split"])?;
        check(
            matches!(e.kind(), ErrorKind::Backend | ErrorKind::Poisoned),
            || format!("{e}"),
        )?;
        // L27: the other rank is told, and does not wait for its own deadline.
        check(began.elapsed() < Duration::from_secs(20), || {
            format!("it took {:?}", began.elapsed())
        })?;
        says(&group_error(group)?, ErrorKind::Backend, &["ncclCommSplit"])?;
        next_epoch(rank, group, store)
    })
}

pub(super) fn early_drop() -> Outcome {
    // Copies of 3 ms each; every tensor is gone long before its copy.
    let stream = CudaAccelerator.new_stream(0, false)?;
    for i in 0..20u8 {
        let mut tensor = CudaAccelerator.alloc(0, DType::U8, &[100_000])?;
        CudaAccelerator.copy_in(&vec![i; 100_000], &mut tensor, &*stream)?;
    }
    stream.synchronize(deadline_in(Duration::from_secs(20)))?;
    Ok(())
}

/// What each launch leaves behind is joined by the next question, of this thread or of the watch.
pub(super) fn back_to_back() -> Outcome {
    two(GroupOptions::default(), |rank, group, _| {
        let works = (0..200).map(|_| submit(rank, group, TIME_LIMIT));
        let works = works.collect::<Result<Vec<_>, _>>()?;
        Ok(works.iter().try_for_each(|work| work.wait_done())?)
    })
}

pub(super) fn slow_streams() -> Outcome {
    two(GroupOptions::default(), |rank, group, _| {
        let (writer, reader) = (
            CudaAccelerator.new_stream(on(rank), false)?,
            CudaAccelerator.new_stream(on(rank), false)?,
        );
        for round in 0..6u32 {
            let mut tensor = CudaAccelerator.alloc(on(rank), DType::F32, &[500])?;
            let value = (round * 10 + rank) as f32;
            CudaAccelerator.copy_in(&value.to_ne_bytes().repeat(500), &mut tensor, &*writer)?;
            let op = Collective::AllReduce {
                tensors: vec![tensor],
                op: ReduceOp::Max,
            };
            let options = SubmitOptions {
                stream: Some(writer.clone()),
                ..SubmitOptions::default()
            };
            let submitted = Instant::now();
            let work = group.run(op, options)?;
            work.wait_on(&*reader)?;
            // At 1.5 ms per piece of work, a submission that waited for the stream would take ten times as long.
            check(submitted.elapsed() < Duration::from_millis(500), || {
                "the host waited".into()
            })?;
            let result = read(&work.take_tensor()?)?;
            let want = (round * 10 + 1) as f32;
            check(result.iter().all(|&x| x == want), || {
                format!("round {round}: {:?}, expected {want}", result.first())
            })?;
        }
        Ok(())
    })
}
