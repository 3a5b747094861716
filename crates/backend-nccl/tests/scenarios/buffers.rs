//! Registered buffers and windows: that the library hears of them, that collectives work on them, and that nothing is freed while a
//! communicator knows it.

use std::time::{Duration, Instant};

use backend_nccl::NcclGroup;
use ftcore::{DType, ErrorKind, GroupOptions, ProcessGroup, ProcessGroupExt, ReduceOp, deadline_in};

use super::kit::*;
use super::set_up::log_lines;
use super::{FAIL, HANG, Scenario, scenario};

const SOON: Duration = Duration::from_secs(20);
const LOG: (&str, &str) = ("OXCCL_STANDIN_NCCL_LOG", "@log");

pub(super) fn options(kind: &str) -> GroupOptions {
    let mut options = GroupOptions::default();
    options.hints.insert("buffers".into(), kind.into());
    options
}

pub(super) fn lines_with(words: &str) -> Result<usize, libtest_mimic::Failed> {
    Ok(log_lines()?.iter().filter(|l| l.contains(words)).count())
}

/// Waits until the log has `count` lines with `words`.
pub(super) fn until(words: &str, count: usize) -> Outcome {
    let by = deadline_in(SOON);
    while lines_with(words)? < count {
        check(Instant::now() < by, || {
            format!("'{words}' is not there {count} times")
        })?;
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

fn note_of(group: &NcclGroup) -> String {
    let notes = &group.capabilities().notes;
    notes
        .iter()
        .find(|(key, _)| key == "buffers")
        .map(|(_, note)| note.to_string())
        .unwrap_or_default()
}

pub(super) fn sums(
    rank: u32,
    group: &NcclGroup,
    tensor: ftcore::Tensor,
) -> Result<ftcore::Tensor, libtest_mimic::Failed> {
    use ftcore::Accelerator;
    let mut tensor = tensor;
    let stream = backend_nccl::CudaAccelerator.new_stream(rank, false)?;
    let bytes = 1f32.to_ne_bytes().repeat(tensor.count());
    backend_nccl::CudaAccelerator.copy_in(&bytes, &mut tensor, &*stream)?;
    stream.synchronize(deadline_in(SOON))?;
    let tensor = group.allreduce(tensor, ReduceOp::Sum)?.take_tensor()?;
    let values = read(&tensor)?;
    check(values.iter().all(|v| *v == 2.0), || {
        format!("the sum is {:?}", values.first())
    })?;
    Ok(tensor)
}

fn registered() -> Outcome {
    two(options("registered"), |rank, group, store| {
        check(note_of(group).contains("window"), || note_of(group))?;
        let tensor = group.alloc(DType::F32, &[25, 40], deadline_in(SOON))?;
        check(
            tensor.shape() == [25, 40] && *tensor.device() == cuda(rank),
            || format!("{tensor:?}"),
        )?;
        let tensor = sums(rank, group, tensor)?;
        // The next communicator is told of it, too.
        group.configure(configuration(store, rank, 2, 2, SOON))?;
        let tensor = sums(rank, group, tensor)?;
        drop(tensor);
        let empty = group.alloc(DType::F32, &[0], deadline_in(SOON))?;
        check(empty.byte_len() == 0, || format!("{empty:?}"))?;
        Ok(group.shutdown(deadline_in(SOON))?)
    })?;
    // Two ranks, two epochs; the second registration ends with the tensor, the first with its communicator.
    until("memory free bytes=4000", 2)?;
    check(lines_with("memory free of a registered")? == 0, || {
        "memory was freed that a communicator knew".into()
    })?;
    let counts = ["memory alloc", "register rank=", "registered ncclAllReduce"].map(lines_with);
    // "register" is also the beginning of "deregister"; both ranks reduce twice, each time with a count beside it.
    let [made, ends, used] = counts;
    let (made, both, used) = (made?, ends?, used?);
    check(made == 2 && both == 8 && used == 4, || {
        format!("{made} made, {both} registered and ended, {used} used")
    })
}

fn windows() -> Outcome {
    two(options("window"), |rank, group, store| {
        let tensor = group.alloc(DType::F32, &[1000], deadline_in(SOON))?;
        let tensor = sums(rank, group, tensor)?;
        // Dropped early: it stays until its communicator goes.
        drop(group.alloc(DType::F32, &[500], deadline_in(SOON))?);
        store.barrier("both have two", 2, deadline_in(SOON))?;
        check(lines_with("memory free")? == 0, || "a window was freed".into())?;
        store.barrier("both have looked", 2, deadline_in(SOON))?;
        group.configure(configuration(store, rank, 2, 2, SOON))?;
        // Ordinary memory now.
        drop(sums(rank, group, tensor)?);
        Ok(group.shutdown(deadline_in(SOON))?)
    })?;
    until("memory free bytes", 4)?;
    check(lines_with("memory free of a registered")? == 0, || {
        "memory was freed that a communicator knew".into()
    })?;
    let (made, ended) = (lines_with("window rank=")?, lines_with("window end rank=")?);
    check(made == 4 && ended == 4, || {
        format!("{made} windows made, {ended} ended")
    })?;
    let used = lines_with("registered ncclAllReduce")?;
    check(used == 2, || format!("used {used} times"))
}

/// A window that cannot be ended stays with its communicator, and goes with it.
fn window_stays() -> Outcome {
    two(options("window"), |rank, group, store| {
        drop(group.alloc(DType::F32, &[1000], deadline_in(SOON))?);
        store.barrier("both have one", 2, deadline_in(SOON))?;
        group.configure(configuration(store, rank, 2, 2, SOON))?;
        sum_works(rank, group)
    })?;
    until("memory free bytes", 2)?;
    check(lines_with("memory free of a registered")? == 0, || {
        "memory was freed that a communicator knew".into()
    })?;
    let ended = lines_with("window end rank=")?;
    check(ended == 1, || format!("{ended} windows were ended"))
}

/// An abort frees them with the communicator.
fn aborted() -> Outcome {
    two(options("window"), |rank, group, store| {
        // Dropped before the abort: only the communicator holds it.
        drop(group.alloc(DType::F32, &[1000], deadline_in(SOON))?);
        store.barrier("both had it", 2, deadline_in(SOON))?;
        if rank == 0 {
            group.abort("enough");
        }
        group_error(group)?;
        group.configure(configuration(store, rank, 2, 2, SOON))?;
        sum_works(rank, group)
    })?;
    until("memory free bytes=4000", 2)?;
    check(lines_with("memory free of a registered")? == 0, || {
        "memory was freed that a communicator knew".into()
    })
}

/// An abort that hangs keeps what its communicator knows.
fn abort_hangs() -> Outcome {
    two(options("registered"), |rank, group, store| {
        let tensor = group.alloc(DType::F32, &[1000], deadline_in(SOON))?;
        store.barrier("both have it", 2, deadline_in(SOON))?;
        if rank == 0 {
            group.abort("enough");
        }
        group_error(group)?;
        group.configure(configuration(store, rank, 2, 2, SOON))?;
        drop(tensor);
        sum_works(rank, group)
    })?;
    // Rank 1's is freed once its last registration ended; rank 0's never.
    until("memory free bytes=4000", 1)?;
    check(lines_with("memory free of a registered")? == 0, || {
        "memory was freed that a communicator knew".into()
    })?;
    check(lines_with("memory free bytes=4000")? == 1, || {
        "memory of a communicator that hangs was freed".into()
    })
}

fn missing() -> Outcome {
    for (kind, function) in [
        ("window", "ncclCommWindowRegister"),
        ("registered", "ncclCommRegister"),
    ] {
        let e = group(0, options(kind)).err().ok_or("a group was made")?;
        says(
            &e,
            ErrorKind::InvalidArgument,
            &["hint:buffers", function, "2.30.7"],
        )?;
        let lenient = GroupOptions {
            lenient: true,
            ..options(kind)
        };
        let group = group(0, lenient)?;
        check(note_of(&group).contains("plain only"), || note_of(&group))?;
        let tensor = group.alloc(DType::F32, &[10], deadline_in(SOON))?;
        check(tensor.count() == 10, || format!("{tensor:?}"))?;
    }
    let plain = group(0, options("plain"))?;
    drop(plain.alloc(DType::F32, &[10], deadline_in(SOON))?);
    check(lines_with("memory alloc")? == 0, || "NCCL made memory".into())
}

fn not_configured() -> Outcome {
    let windows = group(0, options("window"))?;
    let e = windows.alloc(DType::F32, &[10], deadline_in(SOON)).err();
    says(
        &e.ok_or("a window of nobody")?,
        ErrorKind::InvalidState,
        &["configured"],
    )?;
    let huge = [usize::MAX / 2, 9];
    let e = windows.alloc(DType::F32, &huge, deadline_in(SOON)).err();
    says(
        &e.ok_or("so much memory")?,
        ErrorKind::InvalidArgument,
        &["fit in memory"],
    )?;
    // The other kind waits for its first communicator.
    let group = group(0, options("registered"))?;
    let tensor = group.alloc(DType::F32, &[10], deadline_in(SOON))?;
    check(lines_with("register rank=0")? == 0, || {
        "registered with nobody".into()
    })?;
    group.configure(by_itself(1, SOON))?;
    check(lines_with("register rank=0")? == 1, || "not registered".into())?;
    drop(tensor);
    until("deregister rank=0", 1)
}

/// One rank's call fails; the group fails, and goes on in the next epoch.
fn window_fails(kind: ErrorKind, words: &[&str], by: Duration) -> Outcome {
    two(options("window"), |rank, group, store| {
        let by = if rank == 0 { by } else { PATIENCE };
        let e = group.alloc(DType::F32, &[10], deadline_in(by)).err();
        let e = e.ok_or("there is a window")?;
        says(&e, if rank == 0 { kind } else { e.kind() }, words)?;
        says(&group_error(group)?, kind, words)?;
        group.configure(configuration(store, rank, 2, 2, SOON))?;
        let tensor = group.alloc(DType::F32, &[1000], deadline_in(SOON))?;
        sums(rank, group, tensor).map(drop)
    })
}

fn window_call_fails() -> Outcome {
    window_fails(
        ErrorKind::Backend,
        &["ncclCommWindowRegister", "code 1"],
        PATIENCE,
    )
}

fn window_hangs() -> Outcome {
    let late = Duration::from_millis(800);
    window_fails(ErrorKind::Timeout, &["window", "deadline"], late)
}

fn window_sizes_differ() -> Outcome {
    two(options("window"), |rank, group, store| {
        let e = group
            .alloc(DType::F32, &[10 + rank as usize], deadline_in(SOON))
            .err();
        let e = e.ok_or("there is a window")?;
        says(&e, e.kind(), &["invalid argument"])?;
        next_epoch(rank, group, store)
    })
}

/// A rank's own calls fail: its allocation is an error, nobody else's.
fn own_call_fails<const CALL: usize>() -> Outcome {
    let call = ["ncclMemAlloc", "ncclCommRegister", "ncclMemAlloc gave no memory"][CALL];
    two(options("registered"), |rank, group, store| {
        if rank == 0 {
            let e = group.alloc(DType::F32, &[10], deadline_in(SOON)).err();
            says(&e.ok_or("it was allocated")?, ErrorKind::Backend, &[call])?;
        }
        store.barrier("rank 0 has failed", 2, deadline_in(SOON))?;
        let tensor = group.alloc(DType::F32, &[1000], deadline_in(SOON))?;
        sums(rank, group, tensor).map(drop)
    })
}

fn alloc_hangs() -> Outcome {
    let group = group(0, options("registered"))?;
    let late = Duration::from_millis(200);
    let e = group.alloc(DType::F32, &[10], deadline_in(late)).err();
    says(
        &e.ok_or("it was allocated")?,
        ErrorKind::Timeout,
        &["ncclMemAlloc", "deadline"],
    )
}

fn registering_again_fails() -> Outcome {
    let group = group(0, options("registered"))?;
    group.configure(by_itself(1, SOON))?;
    let tensor = group.alloc(DType::F32, &[1000], deadline_in(SOON))?;
    let e = group.configure(by_itself(2, SOON)).err();
    says(
        &e.ok_or("configure succeeded")?,
        ErrorKind::Backend,
        &["ncclCommRegister", "configure"],
    )?;
    group.configure(by_itself(3, SOON))?;
    drop(tensor);
    until("memory free bytes=4000", 1)
}

/// Ending a registration, or freeing, gives an error: a warning, and the memory stays as long as the communicator.
fn ending_fails() -> Outcome {
    let group = group(0, options("registered"))?;
    group.configure(by_itself(1, SOON))?;
    drop(group.alloc(DType::F32, &[1000], deadline_in(SOON))?);
    let sum = read(&submit(0, &group, SOON)?.take_tensor()?)?;
    check(sum == [1.0; 1000], || format!("{:?}", sum.first()))?;
    group.shutdown(deadline_in(SOON))?;
    drop(group);
    until("memory free bytes=4000", 1)?;
    check(lines_with("memory free of a registered")? == 0, || {
        "memory was freed that a communicator knew".into()
    })
}

/// The library has no use for the buffer and gives no handle: there is nothing to be ended.
fn no_handle() -> Outcome {
    let group = group(0, options("registered"))?;
    group.configure(by_itself(1, SOON))?;
    drop(group.alloc(DType::F32, &[1000], deadline_in(SOON))?);
    until("memory free bytes=4000", 1)?;
    check(lines_with("deregister")? == 0, || "null was deregistered".into())
}

pub(super) fn scenarios() -> Vec<Scenario> {
    let logged = |name, variable, value, body| scenario(name, &[(variable, value), LOG], body);
    vec![
        scenario(
            "buffers_are_registered_with_every_communicator",
            &[LOG],
            registered,
        ),
        scenario(
            "buffers_in_windows_are_made_together_and_end_with_the_communicator",
            &[LOG],
            windows,
        ),
        scenario("buffers_in_windows_end_with_an_abort", &[LOG], aborted),
        logged(
            "buffers_in_a_window_that_cannot_be_ended_go_with_the_communicator",
            FAIL,
            "ncclCommWindowDeregister@0:1:1",
            window_stays,
        ),
        logged(
            "buffers_of_a_communicator_that_hangs_are_kept",
            HANG,
            "call:ncclCommAbort@0:1",
            abort_hangs,
        ),
        scenario(
            "buffers_without_the_functions_are_refused_by_name",
            &[("OXCCL_NCCL_PATH", "@plain"), LOG],
            missing,
        ),
        scenario("buffers_wait_for_a_configuration", &[LOG], not_configured),
        scenario(
            "buffers_window_that_fails_fails_the_group",
            &[(FAIL, "ncclCommWindowRegister@0:1:1")],
            window_call_fails,
        ),
        scenario(
            "buffers_window_that_hangs_ends_at_its_deadline",
            &[(HANG, "call:ncclCommWindowRegister@0:1")],
            window_hangs,
        ),
        scenario(
            "buffers_windows_of_different_sizes_are_refused",
            &[],
            window_sizes_differ,
        ),
        scenario(
            "buffers_without_memory_are_an_error",
            &[(FAIL, "ncclMemAlloc:1:1")],
            own_call_fails::<0>,
        ),
        scenario(
            "buffers_that_cannot_be_registered_are_an_error",
            &[(FAIL, "ncclCommRegister@0:1:1")],
            own_call_fails::<1>,
        ),
        scenario(
            "buffers_without_a_block_are_an_error",
            &[(FAIL, "ncclMemAlloc:1:0")],
            own_call_fails::<2>,
        ),
        scenario(
            "buffers_allocation_that_hangs_ends_at_its_deadline",
            &[(HANG, "call:ncclMemAlloc:1")],
            alloc_hangs,
        ),
        logged(
            "buffers_that_cannot_be_registered_again_fail_configure",
            FAIL,
            "ncclCommRegister@0:2:1",
            registering_again_fails,
        ),
        logged(
            "buffers_that_the_library_has_no_use_for_are_freed",
            FAIL,
            "ncclCommRegister@0:1:0",
            no_handle,
        ),
        logged(
            "buffers_whose_registration_does_not_end_stay",
            FAIL,
            "ncclCommDeregister@0:1:1",
            ending_fails,
        ),
    ]
}
