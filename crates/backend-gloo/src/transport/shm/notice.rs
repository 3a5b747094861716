//! The one thing that a rank says to a neighbour about the group itself: why it leaves, or why the group has failed. It stands in memory for as long
//! as the neighbour wants to read it, also when its writer has gone.

use std::sync::atomic::Ordering;

use ftcore::{Error, ErrorKind, Result};

use super::bell::ThreadBell;
use super::map::{Mapping, PAGE};

/// Where the length of what is said stands; 0 before that.
const SAID: usize = 0;
/// Where it stands that nothing more comes.
const ENDED: usize = 256;
/// Where the bytes begin.
const BYTES: usize = 512;
/// Bytes of one direction: the words that say what is there, and what is said.
pub(super) const NOTICE: usize = 2 * PAGE;
/// Bytes that can be said.
pub(crate) const NOTICE_BYTES: usize = NOTICE - BYTES;

/// Both directions to one neighbour.
#[derive(Debug)]
pub(crate) struct Notices {
    pub(crate) writer: NoticeWriter,
    pub(crate) reader: NoticeReader,
}

/// The end that speaks.
#[derive(Debug)]
pub(crate) struct NoticeWriter {
    notices: Mapping,
    bell: ThreadBell,
    said: bool,
    armed: bool,
}

impl NoticeWriter {
    pub(super) fn new(notices: Mapping, bell: ThreadBell) -> Self {
        Self {
            notices,
            bell,
            said: false,
            armed: false,
        }
    }

    /// Says `bytes`, no more than [`NOTICE_BYTES`], and wakes the neighbour. Only the first words count.
    pub(crate) fn say(&mut self, bytes: &[u8]) {
        let room = self.notices.write(BYTES, bytes.len());
        if std::mem::replace(&mut self.said, true) || room.len() != bytes.len() {
            return;
        }
        room.copy_from_slice(bytes);
        // Checked above to fit into two pages.
        let length = u32::try_from(bytes.len()).unwrap_or(0);
        self.notices.word32::<SAID>().store(length, Ordering::Release);
        self.bell.ring();
    }

    /// Claims to have said so many bytes, as only a damaged writer does.
    #[cfg(test)]
    pub(crate) fn claim(&self, length: u32) {
        self.notices.word32::<SAID>().store(length, Ordering::Release);
        self.bell.ring();
    }

    /// The neighbour may listen from now on, so it is told when this end goes.
    pub(crate) fn arm(&mut self) {
        self.armed = true;
    }

    /// The neighbour has another one by now.
    pub(crate) fn disarm(&mut self) {
        self.armed = false;
    }
}

impl Drop for NoticeWriter {
    fn drop(&mut self) {
        if self.armed {
            self.notices.word32::<ENDED>().store(1, Ordering::Release);
            self.bell.ring();
        }
    }
}

/// The end that listens.
#[derive(Debug)]
pub(crate) struct NoticeReader {
    notices: Mapping,
    taken: bool,
}

impl NoticeReader {
    pub(super) fn new(notices: Mapping) -> Self {
        Self {
            notices,
            taken: false,
        }
    }

    /// True if the writer has gone. What it said before is there to be taken.
    pub(crate) fn has_ended(&self) -> bool {
        self.notices.word32::<ENDED>().load(Ordering::Acquire) != 0
    }

    /// What the neighbour said, once.
    ///
    /// Errors: `Protocol` if it says that it has said more than there is room for.
    pub(crate) fn take(&mut self) -> Result<Option<Vec<u8>>> {
        if self.taken {
            return Ok(None);
        }
        let length = self.notices.word32::<SAID>().load(Ordering::Acquire) as usize;
        if length == 0 {
            return Ok(None);
        }
        self.taken = true;
        let said = self.notices.read(BYTES, length);
        if said.len() != length {
            let text = "its words in shared memory are longer than there is room for";
            return Err(Error::new(ErrorKind::Protocol, text));
        }
        Ok(Some(said.to_vec()))
    }
}
