//! A state over the process group of the epoch, in the place of HTTP: for hosts that reach each other over the group's network only, or faster there.
//!
//! Point-to-point messages with tags of their own ([`FIRST_TAG`]). The receiver asks each of its sources (`messages.rs`): one for the state, the
//! others for nothing. The source that is asked (`serve.rs`, on the thread `ox-ckpt-group`) tells which state it holds, sends the manifest, and then each part of the
//! state as one message out of the snapshot's own memory. The receiver (`receive.rs`) checks sizes before it takes memory for them, and each chunk against
//! the manifest, as over HTTP.
//!
//! What breaks here breaks with its group: a source that dies fails the receive as any operation of the group, and a receiver or a source that gives up
//! aborts the group.

mod messages;
mod receive;
mod serve;

use ftcore::{DType, DeviceKind, Error, Feature, OpKind, ProcessGroup, Result};

pub use receive::{Distrusted, GroupFetch, GroupSource};
pub use serve::serve_over_group;

/// The first of the tags that states travel with; the last one is three above. Other messages of the group use others.
pub const FIRST_TAG: u32 = 0x6f78_6300;

const TAG_ASK: u32 = FIRST_TAG;
const TAG_HEAD: u32 = FIRST_TAG + 1;
const TAG_MANIFEST: u32 = FIRST_TAG + 2;
const TAG_PART: u32 = FIRST_TAG + 3;

/// Parts on their way at once, between one source and one receiver.
const WINDOW: usize = 16;
/// Once so many bytes are on their way, a further part waits unless it is the only other one.
const WINDOW_BYTES: usize = 64 << 20;

/// Whether so many parts, of so many bytes in all, leave room for one more.
fn has_room(parts: usize, bytes: usize) -> bool {
    // Two: one is hashed while the other is on its way.
    parts < 2 || (parts < WINDOW && bytes < WINDOW_BYTES)
}

/// Whether states can travel over `group`. `Unsupported` names what it lacks.
pub fn check_group(group: &dyn ProcessGroup) -> Result<()> {
    let offered = group.capabilities();
    let lacks = if !offered.ops.contains(OpKind::Send) || !offered.ops.contains(OpKind::Recv) {
        "has no point-to-point messages (send, recv)"
    } else if !offered.has(Feature::Tags) {
        "does not tell messages apart by their tags"
    } else if !offered.serves(&DeviceKind::Cpu) || !offered.moves.contains(DType::U8) {
        "does not move bytes of host memory"
    } else {
        return Ok(());
    };
    Err(Error::unsupported(format!(
        "states cannot travel over a group of {}: it {lacks} here; let them travel over HTTP, or use another backend (gloo)",
        group.info().backend
    )))
}

#[cfg(test)]
mod tests;
