//! The memory that one rank shares with its neighbours: made, sealed, and opened on the other side after checks.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ftcore::{Error, ErrorKind, Result, descriptors};
use rustix::fs::{MemfdFlags, SealFlags};

use super::arena::{self, Neighbour};
use super::bell::{Bells, COLLECTIVES, MESSAGES, Ringer, ThreadBell, descriptor, ringers};
use super::map::{Mapping, PAGE};
use super::notice::{NOTICE, NoticeReader, NoticeWriter, Notices};
use super::passing::HANDLES;
use super::ring::{RING, Reader, Writer};

/// The seals without which a region is refused: its size cannot change any more, so no access can fault.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Bytes for one neighbour: the ring for collectives, the one for messages, and the notices.
const SECTION: usize = 2 * RING + NOTICE;

fn size(world: u32) -> usize {
    PAGE + world as usize * SECTION
}

/// Where the section for `rank` begins.
fn offset(rank: u32) -> usize {
    PAGE + rank as usize * SECTION
}

/// This rank's memory before it is connected: what is handed to the neighbours.
#[derive(Debug)]
pub(crate) struct Region {
    memory: OwnedFd,
    tensors: BorrowedFd<'static>,
    /// All of it.
    map: Mapping,
    /// Of the bell for collectives, and of that for messages.
    descriptors: [OwnedFd; 2],
    world: u32,
}

/// Both directions to one neighbour, and the bell that goes with them. `AT`: for collectives or for messages.
#[derive(Debug)]
pub(crate) struct Rings<const AT: usize> {
    pub(crate) writer: Writer,
    pub(crate) reader: Reader,
    pub(crate) bell: Ringer<AT>,
}

/// What is shared with one neighbour.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) collectives: Rings<COLLECTIVES>,
    pub(crate) tensors: Neighbour,
    pub(crate) messages: Rings<MESSAGES>,
    pub(crate) notices: Notices,
}

impl Shared {
    /// No rank of the group watches a socket: what wakes one that does is not needed.
    pub(crate) fn close_descriptors(&mut self) {
        self.collectives.bell.close();
        self.messages.bell.close();
    }
}

fn failed(what: &str) -> impl Fn(rustix::io::Errno) -> Error + '_ {
    move |e| Error::io(what, e.into())
}

impl Region {
    /// Makes and seals the memory for a world of `world` ranks. Only pages that are touched cost anything.
    pub(crate) fn new(world: u32) -> Result<Self> {
        let len = size(world);
        if let Some(limit) = arena::largest_file().filter(|limit| *limit < len as u64) {
            let text = format!(
                "no shared memory of {len} bytes: this process may make files of {limit} (RLIMIT_FSIZE, ulimit -f)"
            );
            return Err(Error::new(ErrorKind::Io, text));
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = descriptors::with_room(|| Ok(rustix::fs::memfd_create("oxccl-gloo", flags)?))
            .map_err(|e| Error::io("creating shared memory", e))?;
        rustix::fs::ftruncate(&memory, len as u64).map_err(failed("sizing shared memory"))?;
        rustix::fs::fcntl_add_seals(&memory, SEALS).map_err(failed("sealing shared memory"))?;
        Ok(Self {
            map: Mapping::of(memory.as_fd(), 0, len)?,
            memory,
            tensors: arena::handle()?,
            descriptors: [descriptor()?, descriptor()?],
            world,
        })
    }

    /// What a neighbour is given: the memory, that of this process's tensors, and the bells' descriptors.
    pub(crate) fn handles(&self) -> [BorrowedFd<'_>; HANDLES] {
        let [collectives, messages] = &self.descriptors;
        [
            self.memory.as_fd(),
            self.tensors,
            collectives.as_fd(),
            messages.as_fd(),
        ]
    }

    /// The bells of this rank. `sockets`: who waits for them watches sockets, too.
    pub(crate) fn bells(&self, sockets: bool) -> Result<Bells> {
        let copy = |of: &OwnedFd| {
            let copy = descriptors::with_room(|| of.try_clone());
            copy.map_err(|e| Error::io("duplicating an eventfd", e))
        };
        let [collectives, messages] = &self.descriptors;
        let descriptors = match sockets {
            true => Some([copy(collectives)?, copy(messages)?]),
            false => None,
        };
        Ok(Bells::new(Arc::new(self.map.part(0, PAGE)?), descriptors))
    }

    /// The rings between this rank (`own`) and `peer` in `process`, whose handles came over the socket.
    ///
    /// Errors: `Protocol`, with the peer, if they are not a sealed region of the right size, a sealed arena and two eventfds; `Io` if this process
    /// cannot map them, which is no fault of the peer's.
    pub(crate) fn open(&self, own: u32, peer: u32, process: u64, handles: Vec<OwnedFd>) -> Result<Shared> {
        let opened = self.opened(own, peer, process, handles);
        opened.map_err(|error| match error.kind() {
            ErrorKind::Protocol => error.with_peer(peer),
            _ => error,
        })
    }

    fn opened(&self, own: u32, peer: u32, process: u64, handles: Vec<OwnedFd>) -> Result<Shared> {
        let wrong = |text: &str| Error::new(ErrorKind::Protocol, text.to_string());
        let Ok([memory, tensors, collectives, messages]) = <[OwnedFd; HANDLES]>::try_from(handles) else {
            return Err(wrong("did not hand over its shared memory"));
        };
        let seals = rustix::fs::fcntl_get_seals(&memory)
            .map_err(|_| wrong("handed over something that is not shared memory"))?;
        if !seals.contains(SEALS) {
            return Err(wrong("handed over shared memory that it could still shrink"));
        }
        let stat = rustix::fs::fstat(&memory).map_err(failed("looking at shared memory"))?;
        if u64::try_from(stat.st_size).ok() != Some(size(self.world) as u64) {
            return Err(wrong("handed over shared memory of another size"));
        }
        // A descriptor on which a write would block must never hold up a ring.
        for bell in [&collectives, &messages] {
            let flags = rustix::fs::fcntl_getfl(bell).map_err(failed("looking at an eventfd"))?;
            if !flags.contains(rustix::fs::OFlags::NONBLOCK) {
                return Err(wrong("handed over a bell that blocks"));
            }
        }
        let page = Arc::new(Mapping::of(memory.as_fd(), 0, PAGE)?);
        let tensors = Neighbour::new(Arc::new(self.map.part(0, PAGE)?), page.clone(), process, tensors)?;
        let thread = ThreadBell::new(page.clone());
        let (collectives, messages) = ringers(page, Some([collectives, messages]));
        let out = self.map.part(offset(peer), SECTION)?;
        let back = Mapping::of(memory.as_fd(), offset(own), SECTION)?;
        Ok(Shared {
            collectives: Rings {
                writer: Writer::new(out.part(0, RING)?),
                reader: Reader::new(back.part(0, RING)?),
                bell: collectives,
            },
            tensors,
            messages: Rings {
                writer: Writer::new(out.part(RING, RING)?),
                reader: Reader::new(back.part(RING, RING)?),
                bell: messages,
            },
            notices: Notices {
                writer: NoticeWriter::new(out.part(2 * RING, NOTICE)?, thread),
                reader: NoticeReader::new(back.part(2 * RING, NOTICE)?),
            },
        })
    }
}
