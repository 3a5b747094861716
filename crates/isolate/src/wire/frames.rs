//! The messages: what the parent orders ([`Order`]) and what the child says ([`Report`]).

use std::time::Instant;

use ftcore::{Capabilities, Device, Epoch, Error, ErrorKind, GroupInfo, GroupOptions, Result, Traffic};

use super::{Reader, Wire, Writer, messages, odd, record};

/// In the first frame, so that a program that is no child of ours is recognised.
const MAGIC: u32 = 0x4953_4F31;
/// Parent and child are usually one executable; a helper may be another build.
pub(crate) const VERSION: u32 = 5;

/// That both sides speak this protocol.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Greeting;

impl Wire for Greeting {
    fn put(&self, w: &mut Writer) {
        MAGIC.put(w);
        VERSION.put(w);
    }
    fn get(r: &mut Reader<'_>) -> Result<Self> {
        if u32::get(r)? != MAGIC {
            return Err(odd("another beginning than an isolated group's"));
        }
        match u32::get(r)? {
            VERSION => Ok(Self),
            version => Err(odd(format_args!(
                "version {version}; this program speaks {VERSION}: parent and helper must be of one build"
            ))),
        }
    }
}

/// What a group in the child was configured as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Settled {
    pub(crate) name: String,
    pub(crate) rank: u32,
    pub(crate) world: u32,
    pub(crate) epoch: Epoch,
    pub(crate) sent: u64,
    pub(crate) received: u64,
}

record!(Settled {
    name,
    rank,
    world,
    epoch,
    sent,
    received,
});

impl Settled {
    pub(crate) fn of(info: &GroupInfo, traffic: Traffic) -> Self {
        Self {
            name: info.name.to_string(),
            rank: info.rank,
            world: info.world_size,
            epoch: info.epoch,
            sent: traffic.sent,
            received: traffic.received,
        }
    }
}

/// How tensors come to the child.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Carry {
    /// In host memory, on which the group works.
    Host,
    /// In device memory; what this handle names is opened first, to find out whether that works.
    Device(Vec<u8>),
    /// In host memory, to be copied to the group's device and back.
    Land,
}

impl Wire for Carry {
    fn put(&self, w: &mut Writer) {
        match self {
            Self::Host => w.u8(0),
            Self::Device(probe) => {
                w.u8(1);
                probe.put(w);
            }
            Self::Land => w.u8(2),
        }
    }
    fn get(r: &mut Reader<'_>) -> Result<Self> {
        match r.u8()? {
            0 => Ok(Self::Host),
            1 => Vec::get(r).map(Self::Device),
            2 => Ok(Self::Land),
            other => Err(odd(format_args!("the unknown way {other} for tensors"))),
        }
    }
}

messages! {
    /// Parent to child. `Submit` is not here: it is read in place, see [`submit`].
    Order, "order" {
        /// The first frame; the sockets for store calls and for express reports come with it.
        1 Hello {
            greeting: Greeting,
            backend: String,
            device: Device,
            options: GroupOptions,
            carry: Carry,
        },
        /// A segment of shared memory; its memfd comes with it.
        2 Segment {
            id: u32,
            bytes: u64,
        },
        3 Configure {
            call: u32,
            group: u32,
            store: u32,
            prefix: String,
            name: String,
            epoch: Epoch,
            rank: u32,
            world: u32,
            deadline: Instant,
        },
        5 Split {
            call: u32,
            group: u32,
            /// The new group's number.
            new: u32,
            color: Option<u32>,
            key: u32,
            deadline: Instant,
        },
        /// Aborts this group alone.
        6 Abort {
            group: u32,
            reason: String,
        },
        7 Shutdown {
            call: u32,
            group: u32,
            deadline: Instant,
        },
        /// The group's handle was dropped.
        8 Release {
            group: u32,
        },
        /// The segment is not used any more.
        9 Forget {
            id: u32,
        },
        /// The child is not needed any more: tell the other ranks of the leave and exit.
        10 Leave,
        /// A segment of device memory, which the child opens by its handle.
        11 DeviceSegment {
            id: u32,
            bytes: u64,
            handle: Vec<u8>,
        },
        /// The parent's process ends: exit once the groups that were released or aborted have said so. Those that were not are cut off with it.
        12 Quit,
        /// Abort all groups, which tells the other ranks why, and exit.
        13 End {
            reason: String,
        },
    }
}

const SUBMIT: u8 = 4;

impl Order {
    /// The order in `body`, or the fields of a submission.
    pub(crate) fn decode(body: &[u8]) -> Result<Either<'_>> {
        let mut r = Reader::new(body);
        match r.u8()? {
            SUBMIT => Ok(Either::Submission(Submission {
                id: Wire::get(&mut r)?,
                group: Wire::get(&mut r)?,
                contribute: Wire::get(&mut r)?,
                express: Wire::get(&mut r)?,
                deadline: Wire::get(&mut r)?,
                arrival: Wire::get(&mut r)?,
                op: r,
            })),
            tag => Self::read(tag, &mut r).map(Either::Order),
        }
    }
}

/// What a frame to the child can be.
pub(crate) enum Either<'a> {
    Order(Order),
    Submission(Submission<'a>),
}

/// The fields of a submission; the operation is read by who knows the segments.
pub(crate) struct Submission<'a> {
    pub(crate) id: u64,
    pub(crate) group: u32,
    pub(crate) contribute: bool,
    /// A caller waits for this one alone: run it at once where possible, and report on the express socket.
    pub(crate) express: bool,
    pub(crate) deadline: Instant,
    /// The event after which inputs in device memory are there.
    pub(crate) arrival: Option<Vec<u8>>,
    pub(crate) op: Reader<'a>,
}

/// Begins the frame of a submission; the operation follows. Its number, and whether it is express, are known when it is sent: see
/// [`address`].
pub(crate) fn submit(group: u32, contribute: bool, deadline: Instant, arrival: Option<Vec<u8>>) -> Writer {
    let mut w = Writer::new(SUBMIT);
    0u64.put(&mut w);
    group.put(&mut w);
    contribute.put(&mut w);
    false.put(&mut w);
    deadline.put(&mut w);
    arrival.put(&mut w);
    w
}

/// Writes number and way into the finished frame of a submission: behind length and tag.
pub(crate) fn address(frame: &mut [u8], id: u64, express: bool) {
    if let Some(field) = frame.get_mut(5..13) {
        field.copy_from_slice(&id.to_le_bytes());
    }
    if let Some(field) = frame.get_mut(18) {
        *field = u8::from(express);
    }
}

/// How an operation ended in the child.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) id: u64,
    pub(crate) group: u32,
    /// Nothing in the child touches the memory any more.
    pub(crate) released: bool,
    /// It has failed, and its group with it.
    pub(crate) fatal: bool,
    /// (sender of a receive, contributors of a reduction).
    pub(crate) result: Result<(Option<u32>, u32)>,
    pub(crate) sent: u64,
    pub(crate) received: u64,
}

record!(Done {
    id,
    group,
    released,
    fatal,
    result,
    sent,
    received,
});

messages! {
    /// Child to parent.
    Report, "report" {
        /// The backend is there; what it offers.
        1 Ready {
            capabilities: Capabilities,
        },
        /// The backend is not there, or refused the options.
        2 Refused {
            error: Error,
        },
        /// To a call. Nothing from a `split` that left this rank out.
        3 Answer {
            call: u32,
            result: Result<Option<Settled>>,
        },
        4 Done {
            done: Done,
        },
        /// A group has failed in the configuration of this epoch, whether an operation of this rank has seen it or not.
        5 Failed {
            group: u32,
            epoch: Epoch,
            error: Error,
        },
    }
}

impl Report {
    /// True if it says that another rank is lost.
    pub(crate) fn is_loss(&self) -> bool {
        let error = match self {
            Self::Done { done } => done.result.as_ref().err(),
            Self::Answer { result, .. } => result.as_ref().err(),
            Self::Failed { error, .. } => Some(error),
            Self::Ready { .. } | Self::Refused { .. } => None,
        };
        error.is_some_and(|error| error.kind() == ErrorKind::PeerLost)
    }

    pub(crate) fn decode(body: &[u8]) -> Result<Self> {
        let mut r = Reader::new(body);
        let tag = r.u8()?;
        Self::read(tag, &mut r)
    }
}
