//! Memory that the driver or the library does not free, or that a communicator keeps which cannot be ended: it is never freed, it is counted
//! (`ftcore::leaked_bytes`), and everything else goes on.

use std::time::{Duration, Instant};

use backend_nccl::CudaAccelerator;
use ftcore::{Accelerator, DType, DeviceKind, GroupOptions, ProcessGroup, Tensor, deadline_in, leaked_bytes};

use super::buffers::{lines_with, options, sums, until};
use super::kit::*;
use super::system::{PRELOAD, REFUSE, nothing_is_left};
use super::{FAIL, HANG, Scenario, scenario};

const SOON: Duration = Duration::from_secs(20);
const LOG: (&str, &str) = ("OXCCL_STANDIN_NCCL_LOG", "@log");
const OWN_IPC: (&str, &str) = ("OXCCL_STANDIN_CUDA_OWN_IPC", "1");

/// Waits until so many bytes more than `before` are counted, and not one more.
fn counted(before: u64, bytes: u64) -> Outcome {
    let by = deadline_in(SOON);
    while leaked_bytes() < before + bytes && Instant::now() < by {
        std::thread::sleep(Duration::from_millis(2));
    }
    let lost = leaked_bytes() - before;
    check(lost == bytes, || {
        format!("{lost} bytes are counted as leaked, not {bytes}")
    })
}

/// Of what ends the first is refused, the next is not.
fn on_the_device() -> Outcome {
    let before = leaked_bytes();
    drop(filled(0, 1.0, 100)?);
    drop(filled(0, 1.0, 100)?);
    check(read(&filled(0, 3.0, 2)?)? == [3.0; 2], || {
        "the device is lost".into()
    })?;
    counted(before, 400)
}

/// Of three blocks two are too much to keep.
fn page_locked() -> Outcome {
    const BYTES: usize = 200 << 20;
    let before = leaked_bytes();
    let large = || CudaAccelerator.alloc_host(0, DType::U8, &[BYTES]);
    let (a, b, c) = (large()?, large()?, large()?);
    drop((a, b, c));
    until("pinned free bytes=209715200", 1)?;
    counted(before, BYTES as u64)?;
    let mut again = large()?;
    again.as_mut_slice::<u8>()?.fill(1);
    Ok(())
}

/// Memory that crosses is let go of on both sides, and refused once on each.
fn crossing() -> Outcome {
    let crossing = ftcore::crossing(&DeviceKind::Cuda).ok_or("nothing of CUDA crosses")?;
    let before = leaked_bytes();
    for _ in 0..2 {
        let (mine, handle) = crossing.create(0, 4096)?;
        let theirs = crossing.open(0, &handle, 4096)?;
        check(theirs.byte_len() == mine.byte_len(), || format!("{theirs:?}"))?;
        drop((mine, theirs));
    }
    until("shared free", 1)?;
    until("shared close", 1)?;
    counted(before, 2 * 4096)
}

fn of_the_library() -> Outcome {
    let group = group(0, options("registered"))?;
    let before = leaked_bytes();
    drop(group.alloc(DType::F32, &[1000], deadline_in(SOON))?);
    drop(group.alloc(DType::F32, &[1000], deadline_in(SOON))?);
    until("memory free bytes=4000", 1)?;
    counted(before, 4000)
}

/// No thread starts to free the first on; on the second's the driver refuses it.
fn late(first: Tensor, second: Tensor, freed: &str) -> Outcome {
    let (before, bytes) = (leaked_bytes(), first.byte_len() as u64);
    drop(first);
    drop(second);
    until(freed, 1)?;
    counted(before, bytes)
}

fn crossing_late() -> Outcome {
    let crossing = ftcore::crossing(&DeviceKind::Cuda).ok_or("nothing of CUDA crosses")?;
    let (first, _) = crossing.create(0, 4096)?;
    let (second, _) = crossing.create(0, 8192)?;
    late(first, second, "shared free")
}

fn of_the_library_late() -> Outcome {
    let group = group(0, options("registered"))?;
    let first = group.alloc(DType::F32, &[1000], deadline_in(SOON))?;
    let second = group.alloc(DType::F32, &[500], deadline_in(SOON))?;
    late(first, second, "memory free bytes=2000")
}

/// Nothing was freed that a communicator knows; of the two ranks' memory rank 1's was.
fn one_is_freed() -> Outcome {
    until("memory free bytes=4000", 1)?;
    let (freed, wrongly) = (
        lines_with("memory free bytes=")?,
        lines_with("memory free of a registered")?,
    );
    check((freed, wrongly) == (1, 0), || {
        format!("{freed} buffers were freed, and {wrongly} were to be that a communicator knows")
    })
}

/// Rank 0's communicator cannot be aborted: whoever has the buffer uses it on, in the next configuration, too.
fn known(options: &GroupOptions) -> Outcome {
    let before = leaked_bytes();
    two(options.clone(), |rank, group, store| {
        let tensor = group.alloc(DType::F32, &[1000], deadline_in(SOON))?;
        store.barrier("both have it", 2, deadline_in(SOON))?;
        if rank == 0 {
            group.abort("enough");
        }
        group_error(group)?;
        group.configure(configuration(store, rank, 2, 2, SOON))?;
        drop(sums(rank, group, tensor)?);
        sum_works(rank, group)
    })?;
    counted(before, 4000)?;
    one_is_freed()
}

fn known_to_what_failed() -> Outcome {
    known(&options("registered"))
}

/// Rank 0's window does not end, and its communicator neither.
fn known_as_a_window() -> Outcome {
    let before = leaked_bytes();
    two(options("window"), |rank, group, store| {
        drop(group.alloc(DType::F32, &[1000], deadline_in(SOON))?);
        store.barrier("both have one", 2, deadline_in(SOON))?;
        group.configure(configuration(store, rank, 2, 2, SOON))?;
        sum_works(rank, group)
    })?;
    counted(before, 4000)?;
    one_is_freed()
}

/// Its tensor is gone, and its registration is about to end when its communicator is to be, which fails; then the registration does not end
/// either.
fn known_to_the_last() -> Outcome {
    let before = leaked_bytes();
    let group = group(0, options("registered"))?;
    group.configure(by_itself(1, SOON))?;
    drop(group.alloc(DType::F32, &[1000], deadline_in(SOON))?);
    until("held ncclCommDeregister", 1)?;
    group.abort("enough");
    until("end abort rank=0", 1)?;
    let_go()?;
    nothing_is_left()?;
    group.configure(by_itself(2, SOON))?;
    counted(before, 4000)?;
    check(lines_with("memory free")? == 0, || {
        "memory was to be freed that a communicator knows".into()
    })
}

pub(super) fn scenarios() -> Vec<Scenario> {
    let refused = |name, what, body| scenario(name, &[(FAIL, what), LOG, OWN_IPC], body);
    let late = |name, thread, what, body| {
        let environment = [PRELOAD, LOG, OWN_IPC, (REFUSE, thread), (FAIL, what)];
        scenario(name, &environment, body)
    };
    vec![
        refused(
            "lost_memory_of_the_device_is_counted",
            "cuMemFreeAsync:1:700",
            on_the_device,
        ),
        refused(
            "lost_page_locked_memory_is_counted",
            "cuMemFreeHost:1:700",
            page_locked,
        ),
        refused(
            "lost_memory_that_crosses_is_counted_on_both_sides",
            "cuMemFree:1:700,cuIpcCloseMemHandle:1:700",
            crossing,
        ),
        refused(
            "lost_memory_of_the_library_is_counted",
            "ncclMemFree:1:1",
            of_the_library,
        ),
        late(
            "system_without_a_thread_to_free_shared_memory_on_and_the_driver_refuses_later",
            "pthread_create:1:11",
            "cuMemFree:1:700",
            crossing_late,
        ),
        // Two to make, the first to free.
        late(
            "system_without_a_thread_to_free_a_buffer_on_and_the_library_refuses_later",
            "pthread_create:3:11",
            "ncclMemFree:1:1",
            of_the_library_late,
        ),
        refused(
            "lost_buffers_of_a_communicator_that_cannot_be_aborted_are_counted",
            "ncclCommAbort@0:1:3",
            known_to_what_failed,
        ),
        refused(
            "lost_windows_of_a_communicator_that_cannot_be_freed_are_counted",
            "ncclCommWindowDeregister@0:1:1,ncclCommDestroy@0:1:3",
            known_as_a_window,
        ),
        scenario(
            "lost_a_buffer_that_comes_back_to_a_communicator_that_cannot_be_ended_is_counted",
            &[
                (HANG, "held:ncclCommDeregister@0:1"),
                (FAIL, "ncclCommDeregister@0:1:1,ncclCommAbort@0:1:3"),
                LOG,
            ],
            known_to_the_last,
        ),
    ]
}
