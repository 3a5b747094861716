//! What another process says of memory and events that cross, when it cannot be true (INV-10), and parts and copies that do not fit.

use std::sync::Arc;
use std::time::Duration;

use backend_nccl::CudaAccelerator;
use ftcore::{Accelerator, Crossing, DType, DeviceKind, ErrorKind, accelerator, deadline_in, leaked_bytes};
use libtest_mimic::Failed;

use super::kit::*;
use super::{FAIL, Scenario, scenario};

const SOON: Duration = Duration::from_secs(20);
const OWN_IPC: (&str, &str) = ("OXCCL_STANDIN_CUDA_OWN_IPC", "1");

fn of_cuda() -> Result<Arc<dyn Crossing>, Failed> {
    Ok(ftcore::crossing(&DeviceKind::Cuda).ok_or("nothing of CUDA crosses")?)
}

/// As many different events of other processes as are kept, and one more.
fn too_many_events() -> Outcome {
    let crossing = of_cuda()?;
    let stream = CudaAccelerator.new_stream(0, false)?;
    let (event, handle) = crossing.mark(&*stream)?;
    event.synchronize(deadline_in(SOON))?;
    // The stand-in reads the first half of a handle; another second half makes another one of it.
    let named = |n: u32| -> Vec<u8> {
        let first = handle.iter().take(60).copied();
        first.chain(n.to_ne_bytes()).collect()
    };
    for n in 0..4096 {
        crossing.open_mark(n % 2, &named(n))?;
    }
    for device in 0..2 {
        let e = crossing.open_mark(device, &named(4096)).err();
        says(
            &e.ok_or("there is no end of them")?,
            ErrorKind::InvalidArgument,
            &["4096 different events of other processes", "use its own again"],
        )?;
    }
    // Those that are known serve as before.
    Ok(crossing.open_mark(1, &named(7))?.synchronize(deadline_in(SOON))?)
}

/// Handles that are none, and memory that is shorter than is said; the second time the driver does not let go of it.
fn wrong_lengths() -> Outcome {
    let crossing = of_cuda()?;
    let (mine, handle) = crossing.create(0, 4096)?;
    let short: Vec<u8> = handle.iter().take(63).copied().collect();
    let e = crossing.open(0, &short, 4096).err();
    says(
        &e.ok_or("63 bytes are a handle")?,
        ErrorKind::InvalidArgument,
        &["63 bytes are no handle"],
    )?;
    let e = crossing.open_mark(0, &[1; 65]).err();
    says(
        &e.ok_or("65 bytes are a handle")?,
        ErrorKind::InvalidArgument,
        &["65 bytes are no handle"],
    )?;
    let e = crossing.open(0, &handle, 8192).err();
    says(
        &e.ok_or("the memory grew")?,
        ErrorKind::InvalidArgument,
        &["8192 bytes", "it has 4096"],
    )?;
    let before = leaked_bytes();
    let e = crossing.open(0, &handle, 8192).err();
    says(
        &e.ok_or("the memory grew")?,
        ErrorKind::Backend,
        &["cuIpcCloseMemHandle", "code 700"],
    )?;
    check(leaked_bytes() == before, || "nothing of ours is lost".into())?;
    let theirs = crossing.open(0, &handle, 4096)?;
    check(theirs.byte_len() == mine.byte_len(), || format!("{theirs:?}"))
}

fn parts_and_copies() -> Outcome {
    let crossing = of_cuda()?;
    let whole = Arc::new(crossing.create(0, 4096)?.0);
    let part = |offset: usize, dtype: DType, shape: &[usize]| {
        crossing.part(&whole, offset, dtype, shape, Box::new(()))
    };
    let inside = part(4000, DType::F32, &[4, 6])?;
    check(inside.shape() == [4, 6] && inside.byte_len() == 96, || {
        format!("{inside:?}")
    })?;
    let outside: [(usize, &[usize]); 4] = [
        (4000, &[25]),
        (2, &[1]),
        (usize::MAX - 3, &[1]),
        (0, &[usize::MAX, 2]),
    ];
    for (offset, shape) in outside {
        let e = part(offset, DType::F32, shape).err();
        says(
            &e.ok_or("a part lies outside its whole")?,
            ErrorKind::InvalidArgument,
            &["do not lie in 4096 shared bytes"],
        )?;
    }
    let stream = CudaAccelerator.new_stream(0, false)?;
    let mut shorter = part(0, DType::U8, &[8])?;
    let e = crossing.copy(&inside, &mut shorter, &*stream).err();
    says(
        &e.ok_or("96 bytes went into 8")?,
        ErrorKind::InvalidArgument,
        &["96 bytes cannot be copied into 8"],
    )?;
    let mut elsewhere = CudaAccelerator.alloc(1, DType::U8, &[8])?;
    let e = crossing.copy(&shorter, &mut elsewhere, &*stream).err();
    says(
        &e.ok_or("another device was written to")?,
        ErrorKind::InvalidArgument,
        &["cuda:0", "cuda:1"],
    )?;
    let host = accelerator(&DeviceKind::Cpu)?.new_stream(0, false)?;
    let e = crossing.mark(&*host).err();
    says(
        &e.ok_or("an event of the host crosses")?,
        ErrorKind::InvalidArgument,
        &["cpu", "not on a CUDA device"],
    )
}

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        scenario(
            "crossing_too_many_events_are_refused",
            &[OWN_IPC],
            too_many_events,
        ),
        scenario(
            "crossing_lengths_that_are_not_true_are_refused",
            &[OWN_IPC, (FAIL, "cuIpcCloseMemHandle:2:700")],
            wrong_lengths,
        ),
        scenario(
            "crossing_parts_and_copies_that_do_not_fit_are_refused",
            &[OWN_IPC],
            parts_and_copies,
        ),
    ]
}
