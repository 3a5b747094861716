//! Memory that the driver does not free: it is never used again, it is counted (`ftcore::leaked_bytes`), and everything else goes on.

use std::time::{Duration, Instant};

use ftcore::{DeviceKind, deadline_in, leaked_bytes};

use super::kit::*;
use super::set_up::log_lines;
use super::{FAIL, Scenario, scenario};

const SOON: Duration = Duration::from_secs(20);
const LOG: (&str, &str) = ("OXCCL_STANDIN_NCCL_LOG", "@log");
const OWN_IPC: (&str, &str) = ("OXCCL_STANDIN_CUDA_OWN_IPC", "1");

/// Waits until the log has `line`.
fn until(line: &str) -> Outcome {
    let by = deadline_in(SOON);
    while !log_lines()?.iter().any(|l| l.contains(line)) {
        check(Instant::now() < by, || format!("'{line}' is not there"))?;
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

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
    until("shared free")?;
    until("shared close")?;
    counted(before, 2 * 4096)
}

pub(super) fn scenarios() -> Vec<Scenario> {
    let refused = |name, what, body| scenario(name, &[(FAIL, what), LOG, OWN_IPC], body);
    vec![
        refused(
            "lost_memory_of_the_device_is_counted",
            "cuMemFreeAsync:1:700",
            on_the_device,
        ),
        refused(
            "lost_memory_that_crosses_is_counted_on_both_sides",
            "cuMemFree:1:700,cuIpcCloseMemHandle:1:700",
            crossing,
        ),
    ]
}
