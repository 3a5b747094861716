//! Work that fails: everything pending ends by its deadline with the cause, the group is poisoned, memory is not reused.

use std::any::Any;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use oxccl_hccl::HpuAccelerator;
use oxccl_hccl::ftcore::{
    Accelerator, Collective, Configuration, DType, Device, Error, ErrorKind, Event, ProcessGroup,
    ProcessGroupExt, ReduceOp, Stream, SubmitOptions, Work, leaked_bytes,
};

use crate::ranks::{Outcome, Rank, Scenario, ensure, scenario, text, within};

pub(crate) fn scenarios() -> Vec<Scenario> {
    vec![
        scenario(
            "l35_work_that_stalls_on_the_device_ends_at_its_deadline",
            2,
            stalls,
        )
        .faults(&[(0, "STALL", "2"), (1, "STALL", "2")]),
        scenario("l35_work_behind_a_stalled_one_keeps_its_own_deadline", 1, behind)
            .faults(&[(0, "DELAY_US", "3000000")]),
        scenario("a_call_that_never_returns_ends_at_the_deadline", 2, call_hangs).faults(&[(
            0,
            "HANG",
            "hcclAllReduce#2",
        )]),
        scenario("l32_a_call_that_fails_poisons_with_code_and_words", 2, call_fails).faults(&[(
            0,
            "FAIL",
            "hcclAllReduce#2=6",
        )]),
        scenario(
            "an_error_of_the_runtime_poisons_with_code_and_words",
            1,
            runtime_fails,
        )
        .faults(&[(0, "FAIL", "synEventQuery#40=17")]),
        scenario(
            "an_asynchronous_error_ends_work_long_before_its_deadline",
            2,
            reported,
        )
        .faults(&[(0, "ASYNC", "2=9")]),
        scenario("a_killed_peer_ends_work_long_before_its_deadline", 3, killed).killing(2),
        scenario(
            "a_killed_peer_that_the_library_does_not_report_ends_work_all_the_same",
            2,
            killed_silently,
        )
        .faults(&[(0, "SILENT", "1")])
        .killing(1),
        scenario("l36_abort_from_another_thread_ends_work_at_once", 2, aborted)
            .faults(&[(0, "STALL", "2"), (1, "STALL", "2")]),
        scenario(
            "a_call_that_comes_to_the_library_after_the_abort_stays_out_of_it",
            2,
            call_after_the_abort,
        )
        .faults(&[(0, "STALL", "1")]),
        scenario(
            "memory_that_a_copy_may_still_write_to_is_not_used_again",
            1,
            copy_given_up,
        )
        .faults(&[(0, "FAIL", "synStreamQuery#1=17"), (0, "DELAY_US", "200000")]),
        scenario(
            "copies_that_could_not_be_ordered_cost_no_staging_memory",
            1,
            copies_not_ordered,
        )
        .faults(&[(
            0,
            "FAIL",
            "synEventRecord#2=17,synStreamWaitEvent#2=17,synHostMalloc#2=17",
        )]),
        scenario(
            "memory_that_a_barrier_may_still_write_to_is_not_used_again",
            2,
            barrier_given_up,
        )
        .faults(&[
            (0, "FAIL", "hcclCommAbort#1=5"),
            (0, "STALL", "1"),
            (1, "FAIL", "hcclCommAbort#1=5"),
            (1, "STALL", "1"),
        ]),
        scenario("an_abort_that_hangs_blocks_nobody", 2, abort_hangs).faults(&[
            (0, "HANG", "hcclCommAbort#1"),
            (0, "STALL", "2"),
            (1, "HANG", "hcclCommAbort#1"),
            (1, "STALL", "2"),
        ]),
        scenario("memory_is_leaked_when_the_abort_fails", 2, abort_fails).faults(&[
            (0, "FAIL", "hcclCommAbort#1=6"),
            (0, "STALL", "2"),
            (1, "FAIL", "hcclCommAbort#1=6"),
            (1, "STALL", "2"),
        ]),
        scenario("a_dropped_group_does_not_block_and_fails_its_work", 2, dropped)
            .faults(&[(0, "STALL", "2"), (1, "STALL", "2")]),
        scenario("shutdown_ends_at_its_deadline", 2, shutdown)
            .faults(&[(0, "STALL", "2"), (1, "STALL", "2")]),
    ]
}

/// The group refuses new work, with the first cause, and gives the tensors back.
fn is_poisoned(rank: &Rank, group: &dyn ProcessGroup, cause: &str) -> Outcome {
    let op = Collective::AllReduce {
        tensors: vec![rank.tensor(&[7.0f32, 8.0])?],
        op: ReduceOp::Sum,
    };
    let Err(rejected) = group.run(op, SubmitOptions::default()) else {
        return Err("a poisoned group accepted work".to_string());
    };
    ensure!(rejected.error.kind() == ErrorKind::Poisoned, "{}", rejected.error);
    ensure!(
        rejected.error.to_string().contains(cause),
        "the first cause '{cause}' is not in: {}",
        rejected.error
    );
    let back = rejected.op.into_tensors();
    let first = back.first().ok_or("the tensor did not come back")?;
    let contents = rank.read::<f32>(first)?;
    ensure!(contents == [7.0, 8.0], "the tensor came back as {contents:?}");
    let error = group.error().ok_or("a poisoned group has no error")?;
    ensure!(error.to_string().contains(cause), "error() says {error}");
    Ok(())
}

/// Rank 0 has the library's code, the other one is told by it.
fn sees(rank: &Rank, e: &Error, code: i64) -> bool {
    match rank.rank {
        0 => e.code() == Some(code),
        _ => e.code().is_none() && e.to_string().contains("rank 0 reports"),
    }
}

/// Over the stand-in, which gives a communicator back when it is aborted, the group can be configured again.
fn next_epoch_works(rank: &Rank, group: &dyn ProcessGroup) -> Outcome {
    group.configure(rank.configuration(2)).map_err(text)?;
    rank.sum_of_ones(group)
}

/// Waits until the operation is on the device, where the ordered fault finds it.
fn on_the_device(work: &Work) -> Outcome {
    let stream = HpuAccelerator.new_stream(0, false).map_err(text)?;
    work.wait_on(&*stream).map_err(text)
}

fn stalls(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    rank.sum_of_ones(&group)?;
    rank.meet("summed")?;
    let began = Instant::now();
    // Rank 0 has the deadline, and tells the other one.
    let by = [within(800), rank.soon()];
    let work = rank.submit(&group, by[rank.rank as usize])?;
    let later = rank.submit(&group, rank.soon())?;
    let e = rank.failure(&work)?;
    ensure!(e.kind() == ErrorKind::Timeout, "{:?}: {e}", e.kind());
    let said = e.to_string();
    for word in [
        "all_reduce #2",
        "3000 elements",
        "epoch 1",
        "on the device",
        "2 ranks",
    ] {
        ensure!(said.contains(word), "'{word}' is not in: {said}");
    }
    ensure!(
        rank.rank == 1 || began.elapsed() >= Duration::from_millis(800),
        "too early: {:?}",
        began.elapsed()
    );
    ensure!(
        began.elapsed() < Duration::from_secs(10),
        "too late: {:?}",
        began.elapsed()
    );
    // The one behind it fails with it; the device may still hold both.
    let e = rank.failure(&later)?;
    ensure!(e.kind() == ErrorKind::Timeout, "the later one: {e}");
    ensure!(
        work.recover().is_empty() && later.recover().is_empty(),
        "memory was given back that the device may touch"
    );
    is_poisoned(rank, &group, "on the device")?;
    rank.meet("failed")?;
    next_epoch_works(rank, &group)?;
    ensure!(
        leaked_bytes() == 0,
        "{} bytes leaked, the stand-in gave all back",
        leaked_bytes()
    );
    Ok(())
}

/// Every job of the device takes three seconds: what matters is when the call was made.
fn behind(rank: &Rank) -> Outcome {
    let group = rank.unconfigured()?;
    group.configure(rank.configuration(1)).map_err(text)?;
    let (input, output) = (rank.any(DType::F32)?, rank.any(DType::F32)?);
    // A copy keeps the stream busy; the barrier behind it has only 300 ms.
    let first = group.all_gather_into(input, output).map_err(text)?;
    let began = Instant::now();
    let second = group
        .run(Collective::Barrier, SubmitOptions::by(within(300)))
        .map_err(text)?;
    let e = rank.failure(&second)?;
    ensure!(
        e.kind() == ErrorKind::Timeout && e.to_string().contains("barrier #2"),
        "{e}"
    );
    ensure!(
        began.elapsed() < Duration::from_millis(2500),
        "it took {:?}",
        began.elapsed()
    );
    ensure!(
        rank.failure(&first)?.kind() == ErrorKind::Timeout,
        "the first one is still there"
    );
    Ok(())
}

fn call_hangs(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    rank.sum_of_ones(&group)?;
    rank.meet("summed")?;
    // The rank whose call hangs has the deadline, and tells the other one.
    let by = [within(800), rank.soon()];
    let work = rank.submit(&group, by[rank.rank as usize])?;
    let queued = rank.submit(&group, rank.soon())?;
    let e = rank.failure(&work)?;
    if rank.rank == 1 && e.kind() == ErrorKind::PeerLost {
        // The library saw the end of rank 0's communicator before its word was heard.
        return rank.failure(&queued).map(drop);
    }
    ensure!(e.kind() == ErrorKind::Timeout, "{:?}: {e}", e.kind());
    let stands = "inside a call of the library";
    ensure!(e.to_string().contains(stands), "'{stands}' is not in: {e}");
    ensure!(
        e.to_string().contains("rank 0 reports") == (rank.rank == 1),
        "{e}"
    );
    rank.failure(&queued)?;
    if rank.rank == 0 {
        // What is inside the library stays there; what never got there comes back.
        ensure!(
            work.recover().is_empty(),
            "memory inside the library was given back"
        );
        ensure!(
            queued.recover().len() == 1,
            "memory that the library never saw was kept"
        );
    }
    is_poisoned(rank, &group, stands)
}

fn call_fails(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    rank.sum_of_ones(&group)?;
    // Else the failure might overtake the other rank's sum.
    rank.meet("summed")?;
    let e = rank.fails(&group)?;
    ensure!(
        e.kind() == ErrorKind::Backend && sees(rank, &e, 6),
        "{:?} {:?}: {e}",
        e.kind(),
        e.code()
    );
    for word in ["hcclAllReduce failed", "ordered to fail", "all_reduce #2"] {
        ensure!(e.to_string().contains(word), "'{word}' is not in: {e}");
    }
    is_poisoned(rank, &group, "hcclAllReduce failed")?;
    rank.meet("failed")?;
    next_epoch_works(rank, &group)
}

fn runtime_fails(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    // Many small ones: one of their events is the one that fails.
    for _ in 0..200 {
        let work = match group.run(Collective::Barrier, SubmitOptions::by(rank.soon())) {
            Ok(work) => work,
            Err(rejected) => return Err(format!("refused before it failed: {}", rejected.error)),
        };
        if let Err(e) = work.wait(rank.soon()) {
            ensure!(
                e.kind() == ErrorKind::Backend && e.code() == Some(17),
                "{:?}: {e}",
                e.code()
            );
            ensure!(e.to_string().contains("synEventQuery failed"), "{e}");
            return is_poisoned(rank, &group, "synEventQuery");
        }
    }
    Err("no event failed".to_string())
}

fn reported(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    rank.sum_of_ones(&group)?;
    // Else the failure might overtake the other rank's sum.
    rank.meet("summed")?;
    let began = Instant::now();
    let e = rank.fails(&group)?;
    ensure!(
        e.kind() == ErrorKind::PeerLost && sees(rank, &e, 9),
        "{:?}: {e}",
        e.kind()
    );
    ensure!(e.to_string().contains("asynchronous error"), "{e}");
    ensure!(
        began.elapsed() < Duration::from_secs(10),
        "it took {:?}",
        began.elapsed()
    );
    is_poisoned(rank, &group, "asynchronous error")?;
    rank.meet("failed")?;
    next_epoch_works(rank, &group)
}

fn killed(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    rank.sum_of_ones(&group)?;
    if rank.rank == 2 {
        rank.meet("submitted")?;
        return rank.die();
    }
    let began = Instant::now();
    let work = rank.submit(&group, rank.soon())?;
    rank.meet("submitted")?;
    let e = rank.failure(&work)?;
    ensure!(e.kind() == ErrorKind::PeerLost, "{:?}: {e}", e.kind());
    ensure!(
        began.elapsed() < Duration::from_secs(10),
        "it took {:?}",
        began.elapsed()
    );
    // The survivors go on, over the stand-in.
    let mut smaller = rank.configuration(2);
    smaller.world_size = 2;
    group.configure(smaller).map_err(text)?;
    rank.sum_of_ones(&group)
}

fn killed_silently(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    rank.sum_of_ones(&group)?;
    if rank.rank == 1 {
        rank.meet("submitted")?;
        return rank.die();
    }
    let work = rank.submit(&group, rank.soon())?;
    rank.meet("submitted")?;
    let e = rank.failure(&work)?;
    ensure!(e.kind() == ErrorKind::PeerLost, "{:?}: {e}", e.kind());
    ensure!(e.context().peer == Some(1), "{e}");
    Ok(())
}

fn aborted(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    rank.sum_of_ones(&group)?;
    let work = rank.submit(&group, rank.soon())?;
    on_the_device(&work)?;
    rank.meet("submitted")?;
    let began = Instant::now();
    if rank.rank == 0 {
        std::thread::scope(|scope| {
            scope.spawn(|| group.abort("enough"));
        });
    }
    let e = rank.failure(&work)?;
    ensure!(e.kind() == ErrorKind::Aborted, "{:?}: {e}", e.kind());
    ensure!(e.to_string().contains("aborted by rank 0: enough"), "{e}");
    // Meant are 100 ms; the margin is for a machine that is busy with other tests.
    ensure!(
        began.elapsed() < Duration::from_secs(5),
        "it took {:?}",
        began.elapsed()
    );
    is_poisoned(rank, &group, "enough")?;
    // A second abort changes nothing.
    group.abort("more than enough");
    is_poisoned(rank, &group, ": enough")?;
    rank.meet("aborted")?;
    next_epoch_works(rank, &group)
}

/// A point on another device: it is waited for on the host.
struct Elsewhere {
    came: Sender<()>,
    go: Mutex<Receiver<()>>,
}

impl Event for Elsewhere {
    fn query(&self) -> Result<bool, Error> {
        Ok(false)
    }
    fn synchronize(&self, deadline: Instant) -> Result<(), Error> {
        let _ = self.came.send(());
        let go = self.go.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = go.recv_timeout(deadline.saturating_duration_since(Instant::now()));
        Ok(())
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct OtherStream(Mutex<Option<Arc<Elsewhere>>>);

impl Stream for OtherStream {
    fn device(&self) -> Device {
        Device::CPU
    }
    fn record(&self) -> Result<Arc<dyn Event>, Error> {
        let event = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        match event {
            Some(event) => Ok(event),
            None => Err(Error::invalid("it has one point")),
        }
    }
    fn wait(&self, _: &dyn Event) -> Result<(), Error> {
        Ok(())
    }
    fn query(&self) -> Result<bool, Error> {
        Ok(true)
    }
    fn synchronize(&self, _: Instant) -> Result<(), Error> {
        Ok(())
    }
}

/// The stand-in ends a process that uses a communicator which it has freed. Rank 0's second operation waits on the host for another device
/// while the abort, of which the stream behind the first one tells, is done; then it goes on.
fn call_after_the_abort(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    if rank.rank == 0 {
        let stream = HpuAccelerator.new_stream(0, false).map_err(text)?;
        let stalled = rank.submit(&group, rank.soon())?;
        stalled.wait_on(&*stream).map_err(text)?;
        let ((came, begun), (go, wait)) = (channel(), channel());
        let event = Arc::new(Elsewhere {
            came,
            go: Mutex::new(wait),
        });
        let op = Collective::AllReduce {
            tensors: vec![rank.tensor(&[1.0f32; 4])?],
            op: ReduceOp::Sum,
        };
        let options = SubmitOptions {
            stream: Some(Arc::new(OtherStream(Mutex::new(Some(event))))),
            ..SubmitOptions::by(rank.soon())
        };
        let late = group.run(op, options).map_err(text)?;
        begun
            .recv_timeout(Duration::from_secs(30))
            .map_err(|e| e.to_string())?;
        group.abort("enough");
        stream.synchronize(rank.soon()).map_err(text)?;
        go.send(()).map_err(|e| e.to_string())?;
        ensure!(rank.failure(&late)?.kind() == ErrorKind::Aborted, "it ran");
        // Its end waits for the call.
        let alone = Configuration {
            rank: 0,
            world_size: 1,
            ..rank.configuration(2)
        };
        group.configure(alone).map_err(text)?;
    }
    rank.meet("aborted")
}

/// The copy's stream does not say whether it has ended, and it has not: each takes a fifth of a second here.
fn copy_given_up(_: &Rank) -> Outcome {
    let bytes = [7u8; 512];
    let make = || HpuAccelerator.alloc(0, DType::F32, &[128]).map_err(text);
    let stream = HpuAccelerator.new_stream(0, false).map_err(text)?;
    let mut target = make()?;
    let address = target.as_ptr();
    let before = leaked_bytes();
    let Err(e) = HpuAccelerator.copy_in(&bytes, &mut target, &*stream) else {
        return Err("the copy succeeded".to_string());
    };
    ensure!(e.code() == Some(17), "{e}");
    drop(target);
    ensure!(leaked_bytes() - before == 512, "it is not counted as leaked");
    let other = make()?;
    ensure!(other.as_ptr() != address, "memory under a copy was used again");
    // What was copied in good order serves again.
    let (mut third, before) = (make()?, leaked_bytes());
    let address = third.as_ptr();
    HpuAccelerator
        .copy_in(&bytes, &mut third, &*stream)
        .map_err(text)?;
    drop(third);
    let again = make()?;
    ensure!(
        again.as_ptr() == address && leaked_bytes() == before,
        "memory without a copy does not serve again"
    );
    Ok(())
}

/// Neither behind a stream whose end cannot be marked nor when the copies' own cannot wait for it.
fn copies_not_ordered(_: &Rank) -> Outcome {
    let mut target = HpuAccelerator.alloc(0, DType::U8, &[512]).map_err(text)?;
    let stream = HpuAccelerator.new_stream(0, false).map_err(text)?;
    let mut copy = || HpuAccelerator.copy_in(&[7; 512], &mut target, &*stream);
    copy().map_err(text)?;
    for call in ["synEventRecord", "synStreamWaitEvent"] {
        let Err(e) = copy() else {
            return Err(format!("a copy succeeded without {call}"));
        };
        ensure!(e.to_string().contains(call), "'{call}' is not in: {e}");
    }
    copy().map_err(text)
}

/// The barrier is still on the device when its group is gone, since the library did not end it.
fn barrier_given_up(rank: &Rank) -> Outcome {
    let make = || HpuAccelerator.alloc(0, DType::I32, &[1]).map_err(text);
    // What the group takes next, and must not leave for others.
    let address = make()?.as_ptr();
    let group = rank.group()?;
    let work = group
        .run(Collective::Barrier, SubmitOptions::by(within(300)))
        .map_err(text)?;
    rank.failure(&work)?;
    let Err(e) = group.configure(rank.configuration(2)) else {
        return Err("configured again although the library kept the old communicator".to_string());
    };
    ensure!(e.to_string().contains("did not end cleanly"), "{e}");
    drop(group);
    ensure!(
        make()?.as_ptr() != address,
        "memory under a barrier was used again"
    );
    Ok(())
}

fn abort_hangs(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    rank.sum_of_ones(&group)?;
    let work = rank.submit(&group, rank.soon())?;
    rank.meet("submitted")?;
    let began = Instant::now();
    if rank.rank == 0 {
        group.abort("and the library hangs in it");
    }
    ensure!(
        rank.failure(&work)?.kind() == ErrorKind::Aborted,
        "the work was not aborted"
    );
    let mut configuration = rank.configuration(2);
    configuration.deadline = within(300);
    let Err(e) = group.configure(configuration) else {
        return Err("configured again although the abort has not returned".to_string());
    };
    ensure!(e.kind() == ErrorKind::Timeout, "{:?}: {e}", e.kind());
    ensure!(e.to_string().contains("epoch 1"), "{e}");
    drop(group);
    ensure!(
        began.elapsed() < Duration::from_secs(10),
        "it took {:?}",
        began.elapsed()
    );
    Ok(())
}

fn abort_fails(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    rank.sum_of_ones(&group)?;
    let before = leaked_bytes();
    let work = rank.submit(&group, within(300))?;
    let e = rank.failure(&work)?;
    ensure!(e.kind() == ErrorKind::Timeout, "{e}");
    let Err(e) = group.configure(rank.configuration(2)) else {
        return Err("configured again although the library kept the old communicator".to_string());
    };
    ensure!(e.kind() == ErrorKind::InvalidState, "{:?}: {e}", e.kind());
    for word in ["did not end cleanly", "hcclCommAbort failed", "isolated"] {
        ensure!(e.to_string().contains(word), "'{word}' is not in: {e}");
    }
    let leaked = leaked_bytes() - before;
    ensure!(leaked == 12_000, "{leaked} bytes leaked, 12000 are suspect");
    Ok(())
}

fn dropped(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    rank.sum_of_ones(&group)?;
    let work = rank.submit(&group, rank.soon())?;
    on_the_device(&work)?;
    rank.meet("submitted")?;
    let began = Instant::now();
    if rank.rank == 1 {
        // It keeps its group, and hears of the other's end.
        let e = rank.failure(&work)?;
        ensure!(
            e.kind() == ErrorKind::Aborted && e.context().peer == Some(0),
            "{e}"
        );
        return Ok(());
    }
    drop(group);
    ensure!(
        began.elapsed() < Duration::from_secs(2),
        "the drop took {:?}",
        began.elapsed()
    );
    let e = rank.failure(&work)?;
    ensure!(
        e.kind() == ErrorKind::Aborted && e.to_string().contains("dropped"),
        "{e}"
    );
    Ok(())
}

fn shutdown(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    rank.sum_of_ones(&group)?;
    let work = rank.submit(&group, rank.soon())?;
    rank.meet("submitted")?;
    if rank.rank == 1 {
        let e = rank.failure(&work)?;
        ensure!(e.context().peer == Some(0), "{e}");
        return Ok(());
    }
    let Err(e) = group.shutdown(within(300)) else {
        return Err("shut down although work is stuck".to_string());
    };
    ensure!(e.kind() == ErrorKind::Timeout, "{e}");
    ensure!(
        rank.failure(&work)?.kind() == ErrorKind::Aborted,
        "the stuck work was not aborted"
    );
    Ok(())
}
