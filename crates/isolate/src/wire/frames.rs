//! The messages: what the parent orders ([`Order`]) and what the child says ([`Report`]).

use std::time::Instant;

use ftcore::{Capabilities, Device, Epoch, Error, GroupInfo, GroupOptions, Result, Traffic};

use super::{Reader, Writer, error, odd, settings};
use crate::clock;

/// In the first frame, so that a program that is no child of ours is recognised.
const MAGIC: u32 = 0x4953_4F31;
/// Parent and child are usually one executable; a helper may be another build.
pub(crate) const VERSION: u32 = 3;

/// What a group in the child was configured as.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Settled {
    pub(crate) name: String,
    pub(crate) rank: u32,
    pub(crate) world: u32,
    pub(crate) epoch: u64,
    pub(crate) sent: u64,
    pub(crate) received: u64,
    /// False from a `split` that left this rank out.
    pub(crate) exists: bool,
}

impl Settled {
    pub(crate) fn of(info: &GroupInfo, traffic: Traffic) -> Self {
        Self {
            name: info.name.clone(),
            rank: info.rank,
            world: info.world_size,
            epoch: info.epoch.0,
            sent: traffic.sent,
            received: traffic.received,
            exists: true,
        }
    }

    pub(crate) fn info(&self, backend: &str, device: &Device) -> GroupInfo {
        GroupInfo {
            backend: backend.to_string(),
            name: self.name.clone(),
            rank: self.rank,
            world_size: self.world,
            epoch: Epoch(self.epoch),
            device: device.clone(),
            dropped_options: Vec::new(),
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

/// Parent to child. `Submit` is not here: it is read in place, see [`submit`].
#[derive(Debug)]
pub(crate) enum Order {
    /// The first frame; the sockets for store calls and for express reports come with it.
    Hello {
        backend: String,
        device: Device,
        options: GroupOptions,
        carry: Carry,
    },
    /// A segment of shared memory; its memfd comes with it.
    Segment {
        id: u32,
        bytes: u64,
    },
    /// A segment of device memory, which the child opens by its handle.
    DeviceSegment {
        id: u32,
        bytes: u64,
        handle: Vec<u8>,
    },
    /// The segment is not used any more.
    Forget {
        id: u32,
    },
    Configure {
        call: u32,
        group: u32,
        store: u32,
        prefix: String,
        name: String,
        epoch: u64,
        rank: u32,
        world: u32,
        deadline: Instant,
    },
    Split {
        call: u32,
        group: u32,
        /// The new group's number.
        new: u32,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    },
    Abort {
        group: u32,
        reason: String,
    },
    Shutdown {
        call: u32,
        group: u32,
        deadline: Instant,
    },
    /// The group's handle was dropped.
    Release {
        group: u32,
    },
    /// The child is not needed any more: tell the other ranks of the leave and exit.
    Leave,
    /// The parent's process ends: exit once the groups that were released or aborted have said so. Those that were not are cut off with it.
    Quit,
}

const SUBMIT: u8 = 4;

impl Order {
    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        let mut w;
        match self {
            Self::Hello {
                backend,
                device,
                options,
                carry,
            } => {
                w = Writer::new(1);
                w.u32(MAGIC);
                w.u32(VERSION);
                w.text(backend);
                settings::put_device(&mut w, device);
                settings::put_options(&mut w, options);
                match carry {
                    Carry::Host => w.u8(0),
                    Carry::Device(probe) => {
                        w.u8(1);
                        w.bytes(probe);
                    }
                    Carry::Land => w.u8(2),
                }
            }
            Self::DeviceSegment { id, bytes, handle } => {
                w = Writer::new(11);
                w.u32(*id);
                w.u64(*bytes);
                w.bytes(handle);
            }
            Self::Segment { id, bytes } => {
                w = Writer::new(2);
                w.u32(*id);
                w.u64(*bytes);
            }
            Self::Configure {
                call,
                group,
                store,
                prefix,
                name,
                epoch,
                rank,
                world,
                deadline,
            } => {
                w = Writer::new(3);
                w.u32(*call);
                w.u32(*group);
                w.u32(*store);
                w.text(prefix);
                w.text(name);
                w.u64(*epoch);
                w.u32(*rank);
                w.u32(*world);
                w.u64(clock::to_wire(*deadline));
            }
            Self::Split {
                call,
                group,
                new,
                color,
                key,
                deadline,
            } => {
                w = Writer::new(5);
                w.u32(*call);
                w.u32(*group);
                w.u32(*new);
                w.option(*color, Writer::u32);
                w.u32(*key);
                w.u64(clock::to_wire(*deadline));
            }
            Self::Abort { group, reason } => {
                w = Writer::new(6);
                w.u32(*group);
                w.text(reason);
            }
            Self::Shutdown {
                call,
                group,
                deadline,
            } => {
                w = Writer::new(7);
                w.u32(*call);
                w.u32(*group);
                w.u64(clock::to_wire(*deadline));
            }
            Self::Release { group } => {
                w = Writer::new(8);
                w.u32(*group);
            }
            Self::Forget { id } => {
                w = Writer::new(9);
                w.u32(*id);
            }
            Self::Leave => w = Writer::new(10),
            Self::Quit => w = Writer::new(12),
        }
        w.finish()
    }

    /// The order in `body`, or the fields of a submission.
    pub(crate) fn decode(body: &[u8]) -> Result<Either<'_>> {
        let mut r = Reader::new(body);
        let order = match r.u8()? {
            1 => {
                if r.u32()? != MAGIC {
                    return Err(odd("another beginning than an isolated group's"));
                }
                let version = r.u32()?;
                if version != VERSION {
                    return Err(odd(format_args!(
                        "version {version}; this program speaks {VERSION}: parent and helper must be of one build"
                    )));
                }
                Self::Hello {
                    backend: r.text()?,
                    device: settings::get_device(&mut r)?,
                    options: settings::get_options(&mut r)?,
                    carry: match r.u8()? {
                        0 => Carry::Host,
                        1 => Carry::Device(r.bytes()?.to_vec()),
                        2 => Carry::Land,
                        other => return Err(odd(format_args!("the unknown way {other} for tensors"))),
                    },
                }
            }
            2 => Self::Segment {
                id: r.u32()?,
                bytes: r.u64()?,
            },
            3 => Self::Configure {
                call: r.u32()?,
                group: r.u32()?,
                store: r.u32()?,
                prefix: r.text()?,
                name: r.text()?,
                epoch: r.u64()?,
                rank: r.u32()?,
                world: r.u32()?,
                deadline: clock::from_wire(r.u64()?),
            },
            SUBMIT => {
                return Ok(Either::Submission(Submission {
                    id: r.u64()?,
                    group: r.u32()?,
                    contribute: r.bool()?,
                    express: r.bool()?,
                    deadline: clock::from_wire(r.u64()?),
                    arrival: r.option(|r| r.bytes().map(<[u8]>::to_vec))?,
                    op: r,
                }));
            }
            5 => Self::Split {
                call: r.u32()?,
                group: r.u32()?,
                new: r.u32()?,
                color: r.option(Reader::u32)?,
                key: r.u32()?,
                deadline: clock::from_wire(r.u64()?),
            },
            6 => Self::Abort {
                group: r.u32()?,
                reason: r.text()?,
            },
            7 => Self::Shutdown {
                call: r.u32()?,
                group: r.u32()?,
                deadline: clock::from_wire(r.u64()?),
            },
            8 => Self::Release { group: r.u32()? },
            9 => Self::Forget { id: r.u32()? },
            10 => Self::Leave,
            11 => Self::DeviceSegment {
                id: r.u32()?,
                bytes: r.u64()?,
                handle: r.bytes()?.to_vec(),
            },
            12 => Self::Quit,
            other => return Err(odd(format_args!("the unknown order {other}"))),
        };
        r.end()?;
        Ok(Either::Order(order))
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

/// Begins the frame of a submission; the operation follows.
pub(crate) fn submit(
    group: u32,
    contribute: bool,
    express: bool,
    deadline: Instant,
    arrival: Option<&[u8]>,
) -> Writer {
    let mut w = Writer::new(SUBMIT);
    // Its number is not known yet; see `Writer::numbered`.
    w.u64(0);
    w.u32(group);
    w.bool(contribute);
    w.bool(express);
    w.u64(clock::to_wire(deadline));
    w.option(arrival, Writer::bytes);
    w
}

/// How an operation ended in the child.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) id: u64,
    pub(crate) group: u32,
    /// Nothing in the child touches the memory any more.
    pub(crate) released: bool,
    /// (sender of a receive, contributors of a reduction).
    pub(crate) result: Result<(Option<u32>, u32)>,
    /// The group's first failure, if it has failed.
    pub(crate) poison: Option<Error>,
    pub(crate) sent: u64,
    pub(crate) received: u64,
}

/// Child to parent.
#[derive(Debug)]
pub(crate) enum Report {
    /// The backend is there; what it offers.
    Ready {
        capabilities: Capabilities,
        library: Option<String>,
    },
    /// The backend is not there, or refused the options.
    Refused(Error),
    /// To a call.
    Answer {
        call: u32,
        result: Result<Settled>,
    },
    Done(Done),
    /// A group failed without an operation of this rank.
    Poison {
        group: u32,
        error: Error,
    },
}

fn put_result<T>(w: &mut Writer, result: &Result<T>, put: impl FnOnce(&mut Writer, &T)) {
    w.bool(result.is_ok());
    match result {
        Ok(v) => put(w, v),
        Err(e) => error::put(w, e),
    }
}

fn get_result<T>(r: &mut Reader<'_>, get: impl FnOnce(&mut Reader<'_>) -> Result<T>) -> Result<Result<T>> {
    Ok(if r.bool()? {
        Ok(get(r)?)
    } else {
        Err(error::get(r)?)
    })
}

impl Report {
    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        let mut w;
        match self {
            Self::Ready {
                capabilities,
                library,
            } => {
                w = Writer::new(1);
                settings::put_capabilities(&mut w, capabilities);
                w.option(library.as_deref(), |w, l| w.text(l));
            }
            Self::Refused(e) => {
                w = Writer::new(2);
                error::put(&mut w, e);
            }
            Self::Answer { call, result } => {
                w = Writer::new(3);
                w.u32(*call);
                put_result(&mut w, result, |w, s| {
                    w.text(&s.name);
                    w.u32(s.rank);
                    w.u32(s.world);
                    w.u64(s.epoch);
                    w.u64(s.sent);
                    w.u64(s.received);
                    w.bool(s.exists);
                });
            }
            Self::Done(d) => {
                w = Writer::new(4);
                w.u64(d.id);
                w.u32(d.group);
                w.bool(d.released);
                put_result(&mut w, &d.result, |w, (source, contributors)| {
                    w.option(*source, Writer::u32);
                    w.u32(*contributors);
                });
                w.option(d.poison.as_ref(), error::put);
                w.u64(d.sent);
                w.u64(d.received);
            }
            Self::Poison { group, error } => {
                w = Writer::new(5);
                w.u32(*group);
                error::put(&mut w, error);
            }
        }
        w.finish()
    }

    pub(crate) fn decode(body: &[u8]) -> Result<Self> {
        let mut r = Reader::new(body);
        let report = match r.u8()? {
            1 => Self::Ready {
                capabilities: settings::get_capabilities(&mut r)?,
                library: r.option(Reader::text)?,
            },
            2 => Self::Refused(error::get(&mut r)?),
            3 => Self::Answer {
                call: r.u32()?,
                result: get_result(&mut r, |r| {
                    Ok(Settled {
                        name: r.text()?,
                        rank: r.u32()?,
                        world: r.u32()?,
                        epoch: r.u64()?,
                        sent: r.u64()?,
                        received: r.u64()?,
                        exists: r.bool()?,
                    })
                })?,
            },
            4 => Self::Done(Done {
                id: r.u64()?,
                group: r.u32()?,
                released: r.bool()?,
                result: get_result(&mut r, |r| Ok((r.option(Reader::u32)?, r.u32()?)))?,
                poison: r.option(error::get)?,
                sent: r.u64()?,
                received: r.u64()?,
            }),
            5 => Self::Poison {
                group: r.u32()?,
                error: error::get(&mut r)?,
            },
            other => return Err(odd(format_args!("the unknown report {other}"))),
        };
        r.end()?;
        Ok(report)
    }
}
