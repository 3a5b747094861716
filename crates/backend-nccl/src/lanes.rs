//! Messages between two ranks: a lane per peer and direction, with a communicator, a stream and a thread of its own.
//!
//! NCCL runs everything of one communicator one after the other, so a receive that waits would hold up the send that its peer waits
//! for, and every collective behind it. With lanes, messages are ordered per peer and direction and by nothing else. A lane's
//! communicator is made when its first message is submitted on both sides; that takes time, which is why a thread does it.

use std::collections::HashMap;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use ftcore::{Collective, DType, Error, ErrorKind, Event, Result, Stream, time_left};
use nccl_sys::{UniqueId, dtype};

use crate::cuda::event::CudaEvent;
use crate::cuda::kernels::Kernel;
use crate::cuda::raw::Span;
use crate::cuda::stream::CudaStream;
use crate::engine::{Engine, Place};
use crate::flight::Flight;
use crate::raw::{Comm, nccl};
use crate::threads;

/// One message on its way into a lane.
struct Message {
    span: Span,
    dtype: DType,
    flight: Arc<Flight>,
    ready: Option<Arc<dyn Event>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    peer: u32,
    outgoing: bool,
}

struct Lane {
    messages: Sender<Message>,
    comm: Arc<OnceLock<Comm>>,
}

/// The lanes of one configuration.
#[derive(Default)]
pub(crate) struct Lanes {
    map: Mutex<HashMap<Key, Lane>>,
}

/// In words: what an operation waits for.
pub(crate) fn awaited(op: &Collective, place: Place) -> String {
    match op {
        Collective::Send { peer, tag, .. } => format!("rank {peer} to receive a message with tag {tag}"),
        Collective::Recv {
            peer: Some(peer),
            tag,
            ..
        } => format!("a message from rank {peer} with tag {tag}"),
        Collective::Batch { ops } => {
            let all: Vec<String> = ops.iter().map(|op| awaited(op, place)).collect();
            all.join(", ")
        }
        _ => format!(
            "some of the {} ranks have not entered it, or the device is not done",
            place.world
        ),
    }
}

/// Hands the messages of `op` to their lanes, in order. The flight owns the tensors.
pub(crate) fn send_off(
    engine: &Arc<Engine>,
    op: Collective,
    flight: &Arc<Flight>,
    ready: Option<Arc<dyn Event>>,
) {
    let ops: Vec<&Collective> = match &op {
        Collective::Batch { ops } => ops.iter().collect(),
        one => vec![one],
    };
    let mut messages = Vec::new();
    let mut source = None;
    for op in ops {
        let (tensor, key) = match op {
            Collective::Send { tensor, peer, .. } => (
                tensor,
                Key {
                    peer: *peer,
                    outgoing: true,
                },
            ),
            Collective::Recv {
                tensor,
                peer: Some(peer),
                ..
            } => {
                source = Some(*peer);
                (
                    tensor,
                    Key {
                        peer: *peer,
                        outgoing: false,
                    },
                )
            }
            _ => continue,
        };
        let bytes = tensor.byte_len();
        engine.counters.add(
            bytes * usize::from(key.outgoing),
            bytes * usize::from(!key.outgoing),
        );
        messages.push((
            key,
            Message {
                span: Span::of(tensor),
                dtype: tensor.dtype(),
                flight: flight.clone(),
                ready: ready.clone(),
            },
        ));
    }
    let source = source.filter(|_| matches!(op, Collective::Recv { .. }));
    flight.own(op.into_tensors(), source);
    for (key, message) in messages {
        if let Err(error) = engine.lanes.push(engine, key, message) {
            engine.fail(flight.label.name(error));
        }
    }
}

impl Lanes {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Lane>> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, engine: &Arc<Engine>, key: Key, message: Message) -> Result<()> {
        let mut map = self.lock();
        let lane = match map.entry(key) {
            std::collections::hash_map::Entry::Occupied(lane) => lane.into_mut(),
            std::collections::hash_map::Entry::Vacant(place) => place.insert(start(engine, key)?),
        };
        lane.messages
            .send(message)
            .map_err(|_| Error::new(ErrorKind::Internal, "a lane's thread has ended"))
    }

    fn comms(&self) -> Vec<Arc<OnceLock<Comm>>> {
        self.lock().values().map(|lane| lane.comm.clone()).collect()
    }

    /// Asks every lane's communicator how it is.
    pub(crate) fn check(&self) -> Result<()> {
        self.comms()
            .iter()
            .filter_map(|c| c.get())
            .try_for_each(|comm| comm.state().map(drop))
    }

    /// Ends all lanes; may block as long as the library likes.
    pub(crate) fn abort(&self) {
        self.comms().iter().filter_map(|c| c.get()).for_each(Comm::abort);
    }

    /// Flushes and frees all lanes' communicators.
    pub(crate) fn retire(&self, patience: Duration) {
        self.comms()
            .iter()
            .filter_map(|c| c.get())
            .for_each(|comm| comm.retire(patience));
    }
}

fn start(engine: &Arc<Engine>, key: Key) -> Result<Lane> {
    let (sender, incoming) = channel::<Message>();
    let comm: Arc<OnceLock<Comm>> = Arc::default();
    let (weak, cell) = (Arc::downgrade(engine), comm.clone());
    let stream = CudaStream::new(&engine.gpu, engine.settings.high_priority)?;
    let way = if key.outgoing { "to" } else { "from" };
    threads::start(&format!("ox-nccl-{way}-{}", key.peer), move || {
        // Ends with the last sender, which goes with the engine.
        for message in incoming {
            let Some(engine) = Weak::upgrade(&weak) else {
                return;
            };
            if let Err(error) = carry(&engine, key, &cell, &stream, &message) {
                let flight = &message.flight;
                let error = match error.kind() {
                    ErrorKind::Timeout => engine.overdue(flight).unwrap_or(error),
                    _ => error,
                };
                engine.fail(flight.label.name(error));
            }
        }
    })?;
    Ok(Lane {
        messages: sender,
        comm,
    })
}

/// Enqueues one message.
fn carry(
    engine: &Arc<Engine>,
    key: Key,
    cell: &Arc<OnceLock<Comm>>,
    stream: &CudaStream,
    message: &Message,
) -> Result<()> {
    let flight = &message.flight;
    let stop = || engine.failure();
    let _inside = engine.gpu.enter()?;
    let comm = match cell.get() {
        Some(comm) => comm,
        None => {
            let comm = connect(engine, key, flight.deadline)?;
            let comm = cell.get_or_init(|| comm);
            // The abort of a group that has failed meanwhile has not seen it.
            if let Some(error) = engine.failure() {
                let late = cell.clone();
                threads::errand("ox-nccl-abort", move || {
                    late.get().iter().for_each(|comm| comm.abort());
                });
                return Err(error);
            }
            comm
        }
    };
    comm.settle(flight.deadline, &stop)?;
    if let Some(event) = &message.ready {
        stream.wait(&**event)?;
    }
    // From here on the device may touch the memory. A flight that has failed takes no more parts.
    if !flight.begin() {
        return Ok(());
    }
    let (span, bytes) = (message.span, message.span.bytes());
    if bytes > 0 {
        comm.group(flight.deadline, &stop, |calls| match key.outgoing {
            true => calls.send(span, bytes, dtype::UINT8, 1, stream.handle()),
            false => calls.recv(span, bytes, dtype::UINT8, 0, stream.handle()),
        })?;
        if !key.outgoing && message.dtype == DType::Bool {
            engine
                .gpu
                .launch(Kernel::Bool, span, span, bytes, stream.handle())?;
        }
    }
    let done = CudaEvent::record(&engine.gpu, stream.handle())?;
    flight.enqueued(done, |events| joined(engine, events))
}

/// One event for several streams.
fn joined(engine: &Arc<Engine>, events: &[Arc<CudaEvent>]) -> Result<Arc<dyn Event>> {
    if let [one] = events {
        return Ok(one.clone());
    }
    let meeting = CudaStream::new(&engine.gpu, false)?;
    events.iter().try_for_each(|e| meeting.wait(&**e))?;
    meeting.record()
}

/// The lane's communicator of two: the sender is rank 0 and makes the id.
fn connect(engine: &Arc<Engine>, key: Key, deadline: Instant) -> Result<Comm> {
    let nccl = nccl()?;
    let own = engine.place.rank;
    let (from, to) = if key.outgoing {
        (own, key.peer)
    } else {
        (key.peer, own)
    };
    let c = &engine.configuration;
    let name = format!("{}/{}/lane-{from}-{to}", c.prefix, c.epoch);
    let id = if key.outgoing {
        let id = nccl.unique_id()?;
        c.store.set(&name, &id.0, deadline)?;
        id
    } else {
        let mut pause = Duration::from_micros(200);
        while !c.store.check(&[&name], deadline)? {
            if let Some(error) = engine.failure() {
                return Err(error);
            }
            if time_left(deadline).is_zero() {
                return Err(Error::timeout(format!(
                    "rank {from} has not sent anything to rank {to} yet"
                )));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(5));
        }
        let bytes = c.store.get(&name, deadline)?;
        let id = <[u8; UniqueId::BYTES]>::try_from(bytes.as_slice());
        UniqueId(id.map_err(|_| {
            Error::new(
                ErrorKind::Protocol,
                format!("what stands at '{name}' is not an id"),
            )
        })?)
    };
    Comm::init(
        nccl,
        id,
        u32::from(!key.outgoing),
        2,
        &engine.settings.wish(&name),
    )
}
