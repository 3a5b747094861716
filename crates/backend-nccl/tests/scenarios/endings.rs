//! The ends of communicators: calls that are never through, leaves, aborts and shut-downs on which the library gives errors or does not return.

use std::sync::Arc;
use std::time::{Duration, Instant};

use backend_nccl::CudaAccelerator;
use ftcore::{
    Accelerator, DType, Error, ErrorKind, GroupOptions, InMemoryStore, ProcessGroup, ProcessGroupExt,
    ReduceOp, Store, deadline_in,
};

use super::kit::*;
use super::parts::message;
use super::set_up::log_lines;
use super::{FAIL, HANG, Scenario, scenario};

const SOON: Duration = Duration::from_secs(20);

const LOG: (&str, &str) = ("OXCCL_STANDIN_NCCL_LOG", "@log");
const LATE: Duration = Duration::from_millis(800);

/// A non-blocking call that is never through.
fn never_enqueued() -> Outcome {
    two(GroupOptions::default(), |rank, group, store| {
        let error = loop {
            match submit(rank, group, LATE) {
                Ok(work) => match work.wait(deadline_in(SOON)) {
                    Ok(()) => {}
                    Err(e) => break e,
                },
                Err(e) => break e,
            }
        };
        says(&error, error.kind(), &["all_reduce"])?;
        says(&group_error(group)?, ErrorKind::Timeout, &["all_reduce"])?;
        next_epoch(rank, group, store)
    })
}

/// The library itself says that something took too long.
fn own_time_out() -> Outcome {
    two(GroupOptions::default(), |rank, group, store| {
        let e = until_failure(rank, group)?;
        says(&e, ErrorKind::Timeout, &["ncclAllReduce", "timeout"])?;
        next_epoch(rank, group, store)
    })
}

pub(super) fn until_logged(words: &str) -> Outcome {
    let until = deadline_in(SOON);
    while !log_lines()?.iter().any(|l| l == words) {
        check(Instant::now() < until, || format!("'{words}' was not logged"))?;
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// The old communicator's flush takes too long on rank 0, and it is aborted instead.
fn leave_becomes_an_abort() -> Outcome {
    let options = GroupOptions {
        timeout: Duration::from_millis(300),
        ..Default::default()
    };
    two(options, |rank, group, store| {
        sum_works(rank, group)?;
        next_epoch(rank, group, store)?;
        if rank == 0 {
            until_logged("end abort rank=0")?;
        }
        store.barrier("both saw it", 2, deadline_in(SOON))?;
        sum_works(rank, group)
    })
}

/// A call is stuck in the library: a revocation lets it out before the communicator is freed under it.
fn let_out_first() -> Outcome {
    super::failures::call_hangs()?;
    until_logged("end abort rank=0")?;
    let lines = log_lines()?;
    let at = |line: &str| lines.iter().position(|l| l == line);
    let (revoked, aborted) = (at("end revoke rank=0"), at("end abort rank=0"));
    check(revoked.is_some() && revoked < aborted, || {
        format!("revoked at {revoked:?}, aborted at {aborted:?}")
    })
}

/// Some hundreds of events are needed and a few dozen are made: one that would be made later fails.
fn events_come_from_the_cache() -> Outcome {
    two(GroupOptions::default(), |rank, group, _| {
        (0..60).try_for_each(|_| sum_works(rank, group))
    })
}

/// Rank 1 calls nothing, so everything that rank 0 has called waits to be compared when it aborts.
fn abort_before_anything_was_compared() -> Outcome {
    const QUEUED: usize = 30;
    let mut options = GroupOptions::default();
    let hint = ("mismatch_detection".to_string(), "on".to_string());
    options.hints.extend([hint]);
    two(options, |rank, group, store| {
        if rank == 0 {
            let queued = (0..QUEUED).map(|_| submit(0, group, TIME_LIMIT));
            let works = queued.collect::<Result<Vec<_>, _>>()?;
            group.abort("enough");
            let mut back = 0;
            for work in &works {
                let e = work.wait(deadline_in(SOON)).err().ok_or("it succeeded")?;
                says(&e, ErrorKind::Aborted, &["enough"])?;
                back += work.recover().len();
            }
            check(back == QUEUED, || format!("{back} of {QUEUED} tensors came back"))?;
        }
        Ok(store.barrier("rank 0 has them", 2, deadline_in(SOON))?)
    })
}

fn shutdown_with_work() -> Outcome {
    two(GroupOptions::default(), |rank, group, store| {
        let work = submit(rank, group, TIME_LIMIT)?;
        if rank == 1 {
            let e = work.wait(deadline_in(SOON)).err().ok_or("it succeeded")?;
            says(&e, e.kind(), &["shut-down"])?;
        } else {
            let e = group.shutdown(deadline_in(Duration::from_millis(200))).err();
            says(
                &e.ok_or("it was shut down")?,
                ErrorKind::Timeout,
                &["shutdown", "has not ended yet"],
            )?;
            let e = work.wait(deadline_in(SOON)).err().ok_or("it succeeded")?;
            says(&e, ErrorKind::Aborted, &["shut-down"])?;
        }
        next_epoch(rank, group, store)
    })
}

/// The driver does not return to the watch: what is in flight ends at its deadline or with the group, and the next epoch has a watch of
/// its own.
fn watchdog_is_lost() -> Outcome {
    let group = group(0, GroupOptions::default())?;
    std::thread::scope(|s| {
        let configuring = s.spawn(|| group.configure(by_itself(1, SOON)));
        configuring.join().map_err(|_| "a panic")
    })??;
    let until = deadline_in(SOON);
    // Each on a thread of its own: the fault waits for one that has asked the communicator how it is and then asks an event.
    let goes_on = || -> Result<bool, Error> {
        let work = submit(0, &group, TIME_LIMIT)?;
        Ok(work.wait(deadline_in(Duration::from_millis(300))).is_ok())
    };
    while std::thread::scope(|s| s.spawn(goes_on).join().map_err(|_| "a panic"))?? {
        check(Instant::now() < until, || "the watchdog goes on".into())?;
    }
    group.configure(by_itself(2, SOON))?;
    Ok(submit(0, &group, SOON)?.wait_done()?)
}

/// The work has left its stream, but the library still writes: the tensor comes back only when that is over, and what the caller then puts
/// into it stays.
fn late_writes() -> Outcome {
    two(GroupOptions::default(), |rank, group, store| {
        // Long enough for a busy machine to come to it: the abort ends it, not its deadline.
        let work = submit(rank, group, SOON)?;
        until_logged("late work begins rank=0")?;
        store.barrier("both are at it", 2, deadline_in(SOON))?;
        group.abort("enough");
        check(work.wait(deadline_in(SOON)).is_err(), || "it succeeded".into())?;
        let mut back = work.recover();
        // What came back must be the caller's alone; nothing at all came back if the machine was too busy to end the work in time.
        let Some(mut tensor) = back.pop() else {
            return check(rank == 1 || ftcore::leaked_bytes() >= 4000, || {
                "the tensor is neither here nor counted as leaked".into()
            });
        };
        let stream = CudaAccelerator.new_stream(on(rank), false)?;
        CudaAccelerator.copy_in(&7.0f32.to_ne_bytes().repeat(1000), &mut tensor, &*stream)?;
        stream.synchronize(deadline_in(SOON))?;
        until_logged("late writes end rank=0")?;
        let values = read(&tensor)?;
        check(values == [7.0; 1000], || {
            format!("the library wrote into it: {:?}", values.first())
        })
    })
}

/// Three ranks with all the channels that there can be: five communicators each, whose aborts take half a second.
fn many_slow_aborts() -> Outcome {
    groups(
        3,
        |rank| group(rank, GroupOptions::default()),
        |rank, group, store| {
            let mut messages = Vec::new();
            for peer in (0..3).filter(|peer| *peer != rank) {
                messages.push(group.send(filled(rank, 1.0, 10)?, peer, 0)?);
                messages.push(group.recv(filled(rank, 0.0, 10)?, peer, 0)?);
            }
            messages.iter().try_for_each(|work| work.wait_done())?;
            store.barrier("all channels are open", 3, deadline_in(SOON))?;
            let work = submit(rank, group, Duration::from_millis(400))?;
            check(work.wait(deadline_in(SOON)).is_err(), || "it succeeded".into())?;
            check(work.recover().len() == 1, || {
                "the tensor did not come back after the aborts".into()
            })
        },
    )
}

/// One of rank 1's two aborts hangs, whichever is first: the other communicator is ended all the same.
fn one_abort_of_two_hangs() -> Outcome {
    two(GroupOptions::default(), |rank, group, store| {
        message(rank, group, SOON)?.wait_done()?;
        store.barrier("both have it", 2, deadline_in(SOON))?;
        if rank == 1 {
            let _open = message(rank, group, TIME_LIMIT)?;
            group.abort("enough");
            let until = deadline_in(SOON);
            while log_lines()?.iter().filter(|l| *l == "end abort rank=1").count() < 2 {
                check(Instant::now() < until, || "a communicator is left running".into())?;
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        Ok(store.barrier("rank 1 has seen it", 2, deadline_in(SOON))?)
    })
}

/// The streams are through, and the abort does not return: it is unknown what the library still does.
fn abort_keeps_the_library_busy() -> Outcome {
    two(GroupOptions::default(), |rank, group, _| {
        let before = ftcore::leaked_bytes();
        let work = submit(rank, group, Duration::from_millis(300))?;
        check(work.wait(deadline_in(SOON)).is_err(), || "it succeeded".into())?;
        if rank == 1 {
            return Ok(());
        }
        check(work.recover().is_empty(), || {
            "memory came back that the library may still write to".into()
        })?;
        check(ftcore::leaked_bytes() >= before + 4000, || {
            "nothing was counted as leaked".into()
        })
    })
}

/// As many reductions as a device can count, and one more.
fn too_many() -> Outcome {
    let group = group(0, GroupOptions::default())?;
    group.configure(by_itself(1, SOON))?;
    let mut pending = Vec::new();
    let refused = loop {
        match group.all_reduce(CudaAccelerator.alloc(0, DType::F32, &[1])?, ReduceOp::Sum) {
            Ok(work) => pending.push(work),
            Err(e) => break Error::from(e),
        }
        if let Some(e) = group.error() {
            break e;
        }
        check(pending.len() < 5000, || "there is no end of them".into())?;
    };
    says(&refused, refused.kind(), &["4096 reductions are in flight"])?;
    group.configure(by_itself(2, SOON))?;
    // Those of the lost operations are lost with them, if the device may still write there; here it may not.
    Ok(submit(0, &group, SOON)?.wait_done()?)
}

/// The library still has something to hand over to the other rank when the thread ends that has ended its group: the thread's end (the
/// main thread's is the process's) waits for it.
/// Two ranks that end like this.
fn ended(end: fn(backend_nccl::NcclGroup) -> Outcome) -> Outcome {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    ranks(2, |rank| {
        let group = group(rank, GroupOptions::default())?;
        group.configure(configuration(&store, rank, 2, 1, SOON))?;
        sum_works(rank, &group)?;
        end(group)
    })
}

fn dropped_at_the_end() -> Outcome {
    ended(|group| {
        drop(group);
        Ok(())
    })
}

fn flushed_by_a_shutdown() -> Outcome {
    ended(|group| {
        group.shutdown(deadline_in(SOON))?;
        // Nothing is left to be waited for at the end of the process.
        let flushed = group.info().rank != 0 || log_lines()?.iter().any(|l| l == FLUSHED);
        check(flushed, || "it was shut down without a flush".into())
    })
}

/// What the stand-in logs once rank 0's communicator was flushed and is gone.
const FLUSHED: &str = "end destroy rank=0";

pub(super) fn scenarios() -> Vec<Scenario> {
    let one = |name, variable, value, body| scenario(name, &[(variable, value)], body);
    vec![
        one(
            "call_that_stays_in_progress_ends_at_the_deadline",
            HANG,
            "progress:ncclAllReduce@0:2",
            never_enqueued,
        ),
        one(
            "call_library_s_own_time_out_is_a_time_out",
            FAIL,
            "ncclAllReduce@1:3:8",
            own_time_out,
        ),
        scenario(
            "end_of_a_group_that_compares_gives_back_what_is_queued",
            &[],
            abort_before_anything_was_compared,
        ),
        scenario(
            "end_leave_that_takes_too_long_becomes_an_abort",
            &[(HANG, "progress:ncclCommFinalize@0:1"), LOG],
            leave_becomes_an_abort,
        ),
        scenario(
            "end_of_a_process_waits_for_the_flush_of_what_it_dropped",
            &[(HANG, "slow:ncclCommFinalize@0:1"), LOG],
            dropped_at_the_end,
        )
        .leaving(FLUSHED),
        scenario(
            "end_shutdown_waits_for_the_flush",
            &[(HANG, "slow:ncclCommFinalize@0:1"), LOG],
            flushed_by_a_shutdown,
        ),
        scenario(
            "end_revoke_lets_out_who_is_stuck_before_the_abort",
            &[(HANG, "call:ncclAllReduce@0:3"), LOG],
            let_out_first,
        ),
        one(
            "call_events_come_from_the_cache",
            FAIL,
            "cuEventCreate:150:2",
            events_come_from_the_cache,
        ),
        one(
            "end_shutdown_does_not_wait_for_ever",
            HANG,
            "device:ncclAllReduce@0:1",
            shutdown_with_work,
        ),
        one(
            "end_driver_that_hangs_in_the_watch_costs_no_later_epoch",
            HANG,
            "call:cuEventQuery/ncclCommGetAsyncError:1",
            watchdog_is_lost,
        ),
        scenario(
            "l27_many_communicators_are_aborted_in_the_time_of_one",
            &[
                (HANG, "device:ncclAllReduce@0:1"),
                ("OXCCL_STANDIN_NCCL_ABORT_MS", "520"),
            ],
            many_slow_aborts,
        ),
        scenario(
            "end_abort_that_hangs_leaves_no_other_communicator_running",
            &[(HANG, "call:ncclCommAbort@1:1"), LOG],
            one_abort_of_two_hangs,
        ),
        scenario(
            "l27_memory_comes_back_only_when_the_abort_is_over",
            &[(HANG, "late:ncclAllReduce@0:1"), LOG],
            late_writes,
        ),
        one(
            "l27_memory_of_an_abort_that_does_not_come_back_is_leaked_although_its_streams_are_through",
            HANG,
            "device:ncclAllReduce@0:1,call:ncclCommAbort.end@0:1",
            abort_keeps_the_library_busy,
        ),
        one(
            "call_with_too_many_in_flight_says_so",
            HANG,
            "device:ncclAllReduce@0:1",
            too_many,
        ),
    ]
}
