//! Messages between two ranks: a channel per peer and direction, with a communicator, a stream and a thread of its own.
//!
//! NCCL runs everything of one communicator one after the other, so a receive that waits would hold up the send that its peer waits
//! for, and every collective behind it. With communicators of their own, messages are ordered per peer and direction and by nothing
//! else. One is made when its first message is submitted on both sides; that takes time, which is why a thread does it.

use std::any::Any;
use std::collections::HashMap;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use ftcore::engine::{Held, Ticket, spawn};
use ftcore::{Collective, Completion, DType, Error, ErrorKind, Event, Result, Stream, agreement, time_left};
use nccl_sys::dtype;

use crate::cuda::event::CudaEvent;
use crate::cuda::kernels::Kernel;
use crate::cuda::raw::Span;
use crate::cuda::stream::CudaStream;
use crate::driver::{NcclDriver, Shared, lock};
use crate::raw::{Comm, give_up, id_of, nccl};

/// One message on its way into a channel.
struct Message {
    span: Span,
    dtype: DType,
    parcel: Arc<Parcel>,
    after: Option<Arc<dyn Event>>,
    deadline: Instant,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    peer: u32,
    outgoing: bool,
}

impl Key {
    /// The ranks of sender and receiver.
    fn ends(self, own: u32) -> (u32, u32) {
        match self.outgoing {
            true => (own, self.peer),
            false => (self.peer, own),
        }
    }
}

struct Channel {
    messages: Sender<Message>,
    comm: Arc<OnceLock<Arc<Comm>>>,
}

/// The channels of one configuration.
#[derive(Default)]
pub(crate) struct Channels {
    map: Mutex<HashMap<Key, Channel>>,
    /// What is not wholly enqueued, by the number of the operation.
    open: Mutex<HashMap<u64, Arc<Parcel>>>,
}

/// The messages of `op`: where they go, and their memory.
fn messages(op: &Collective) -> Vec<(Key, Span, DType)> {
    let one = |op: &Collective| {
        let (tensor, peer, outgoing) = match op {
            Collective::Send { tensor, peer, .. } => (tensor, *peer, true),
            Collective::Recv {
                tensor,
                peer: Some(peer),
                ..
            } => (tensor, *peer, false),
            _ => return None,
        };
        Some((Key { peer, outgoing }, Span::of(tensor), tensor.dtype()))
    };
    match op {
        Collective::Batch { ops } => ops.iter().filter_map(one).collect(),
        op => one(op).into_iter().collect(),
    }
}

/// Hands the messages of an operation to their channels, in order.
pub(crate) fn send_off(
    shared: &Arc<Shared>,
    held: Held,
    after: Option<Arc<dyn Event>>,
    ticket: Ticket<NcclDriver>,
) {
    let list = held.op().map(messages).unwrap_or_default();
    if list.is_empty() {
        return ticket.succeed(Completion {
            tensors: held.free(),
            source: None,
            contributors: 0,
        });
    }
    let (number, deadline, engine) = (ticket.number(), ticket.deadline(), ticket.engine().clone());
    let parcel = Arc::new(Parcel::new(list.len(), held, ticket));
    lock(&shared.channels.open).insert(number, parcel.clone());
    for (key, span, dtype) in list {
        let bytes = span.bytes() as u64;
        shared
            .counters
            .add(bytes * u64::from(key.outgoing), bytes * u64::from(!key.outgoing));
        let message = Message {
            span,
            dtype,
            parcel: parcel.clone(),
            after: after.clone(),
            deadline,
        };
        if let Err(error) = shared.channels.push(shared, key, message) {
            engine.fail_by(number, error);
            break;
        }
    }
    // The interruption may have looked before it was there.
    if shared.failure().is_some() {
        parcel.close(shared);
    }
}

impl Channels {
    fn push(&self, shared: &Arc<Shared>, key: Key, message: Message) -> Result<()> {
        let mut map = lock(&self.map);
        let channel = match map.entry(key) {
            std::collections::hash_map::Entry::Occupied(channel) => channel.into_mut(),
            std::collections::hash_map::Entry::Vacant(place) => place.insert(start(shared, key)?),
        };
        channel
            .messages
            .send(message)
            .map_err(|_| Error::new(ErrorKind::Internal, "a channel's thread has ended"))
    }

    /// The communicators that there are.
    pub(crate) fn comms(&self) -> Vec<Arc<Comm>> {
        lock(&self.map)
            .values()
            .filter_map(|channel| channel.comm.get().cloned())
            .collect()
    }

    /// Asks every communicator how it is.
    pub(crate) fn check(&self) -> Result<()> {
        self.comms().iter().try_for_each(|comm| comm.state().map(drop))
    }

    /// Flushes and frees all communicators.
    pub(crate) fn retire(&self, limit: Duration) {
        self.comms().iter().for_each(|comm| comm.retire(limit));
    }

    fn parcels(&self) -> Vec<Arc<Parcel>> {
        lock(&self.open).values().cloned().collect()
    }

    /// After the abort: gives back what was never enqueued, and hands over what was. Waits until `until` for threads that are just
    /// enqueuing.
    pub(crate) fn close(&self, shared: &Shared, until: Instant) {
        let parcels = self.parcels();
        while parcels.iter().any(|p| p.is_entering()) && !time_left(until).is_zero() {
            std::thread::sleep(Duration::from_micros(200));
        }
        parcels.iter().for_each(|parcel| parcel.close(shared));
    }

    /// What is here counts as leaked.
    pub(crate) fn give_up(&self) {
        self.parcels().iter().for_each(|parcel| parcel.give_up());
    }
}

fn start(shared: &Arc<Shared>, key: Key) -> Result<Channel> {
    let (sender, incoming) = channel::<Message>();
    let comm: Arc<OnceLock<Arc<Comm>>> = Arc::default();
    let (weak, cell) = (Arc::downgrade(shared), comm.clone());
    let stream = CudaStream::new(&shared.gpu, shared.settings.high_priority)?;
    let way = if key.outgoing { "to" } else { "from" };
    spawn(&format!("ox-nccl-{way}-{}", key.peer), move || {
        // Ends with the last sender, which goes with the driver.
        for (number, message) in (0..).zip(incoming) {
            let Some(shared) = Weak::upgrade(&weak) else {
                return;
            };
            if let Err(error) = carry(&shared, key, &cell, &stream, &message, number) {
                // At its deadline the engine says what it waited for.
                if error.kind() != ErrorKind::Timeout || !time_left(message.deadline).is_zero() {
                    message.parcel.fail(error);
                }
            }
        }
    })?;
    Ok(Channel {
        messages: sender,
        comm,
    })
}

/// Enqueues one message.
fn carry(
    shared: &Arc<Shared>,
    key: Key,
    cell: &OnceLock<Arc<Comm>>,
    stream: &CudaStream,
    message: &Message,
    number: u64,
) -> Result<()> {
    let stop = || shared.failure();
    if let Some(agreement) = &shared.agreement {
        let (from, to) = key.ends(shared.place.rank);
        let count = message.span.bytes() / message.dtype.size();
        let content = format!("{count} elements of {}", message.dtype);
        let place = agreement::Message { from, to, number };
        agreement.meet(place, &content, message.deadline)?;
    }
    let _inside = shared.gpu.enter()?;
    let comm = match cell.get() {
        Some(comm) => comm,
        None => {
            let comm = Arc::new(connect(shared, key, message.deadline)?);
            let comm = cell.get_or_init(|| comm);
            // The abort of a group that has failed meanwhile has not seen it.
            if let Some(error) = shared.failure() {
                give_up(comm.clone());
                return Err(error);
            }
            comm
        }
    };
    comm.settle(message.deadline, &stop)?;
    if let Some(event) = &message.after {
        stream.wait(&**event)?;
    }
    // From here on the device may touch the memory. An operation that has failed takes no more parts.
    let Some(part) = message.parcel.begin() else {
        return Ok(());
    };
    let (span, bytes) = (message.span, message.span.bytes());
    if bytes > 0 {
        comm.group(message.deadline, &stop, |calls| match key.outgoing {
            true => calls.send(span, bytes, dtype::UINT8, 1, stream.handle()),
            false => calls.recv(span, bytes, dtype::UINT8, 0, stream.handle()),
        })?;
        if !key.outgoing && message.dtype == DType::Bool {
            shared
                .gpu
                .launch(Kernel::Bool, span, span, bytes, stream.handle())?;
        }
    }
    let done = CudaEvent::record(&shared.gpu, stream.handle())?;
    part.enqueued(shared, done);
    Ok(())
}

/// The channel's communicator of two: the sender is rank 0 and makes the id.
fn connect(shared: &Shared, key: Key, deadline: Instant) -> Result<Comm> {
    let nccl = nccl()?;
    let (from, to) = key.ends(shared.place.rank);
    let c = &shared.configuration;
    let name = format!("{}/{}/channel-{from}-{to}", c.prefix, c.epoch);
    let id = if key.outgoing {
        let id = nccl.unique_id()?;
        c.store.set(&name, &id.0, deadline)?;
        id
    } else {
        let mut pause = Duration::from_micros(200);
        while !c.store.check(&[&name], deadline)? {
            if let Some(error) = shared.failure() {
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
        id_of(&c.store.get(&name, deadline)?, from)?
    };
    Comm::init(
        nccl,
        &shared.gpu,
        id,
        u32::from(!key.outgoing),
        2,
        &shared.settings.wish(&name),
    )
}

/// How far an operation is.
struct State {
    /// Until everything is enqueued, or the group has failed.
    cargo: Option<(Held, Ticket<NcclDriver>)>,
    /// The ends of the parts that are enqueued.
    events: Vec<Arc<CudaEvent>>,
    /// Parts that are being enqueued.
    entering: usize,
    /// A part failed half way: nothing proves that its memory is free.
    broken: bool,
}

/// A message, or a batch of them, until every part is enqueued on the stream of its channel. Then the table of operations in flight has it.
struct Parcel {
    parts: usize,
    state: Mutex<State>,
}

/// A part that is being enqueued; dropped before [`enqueued`](Self::enqueued), it has failed.
struct Part<'a> {
    parcel: &'a Parcel,
    through: bool,
}

impl Parcel {
    fn new(parts: usize, held: Held, ticket: Ticket<NcclDriver>) -> Self {
        Self {
            parts,
            state: Mutex::new(State {
                cargo: Some((held, ticket)),
                events: Vec::new(),
                entering: 0,
                broken: false,
            }),
        }
    }

    /// Announces that a part is about to be enqueued. None if the operation is over.
    fn begin(&self) -> Option<Part<'_>> {
        let mut state = lock(&self.state);
        state.cargo.as_ref()?;
        state.entering += 1;
        Some(Part {
            parcel: self,
            through: false,
        })
    }

    /// True while a part is on its way to the device.
    fn is_entering(&self) -> bool {
        lock(&self.state).entering > 0
    }

    /// The group fails because of this operation.
    fn fail(&self, error: Error) {
        let named = |ticket: &Ticket<NcclDriver>| (ticket.engine().clone(), ticket.number());
        let of = lock(&self.state).cargo.as_ref().map(|(_, ticket)| named(ticket));
        if let Some((engine, number)) = of {
            engine.fail_by(number, error);
        }
    }

    fn give_up(&self) {
        if let Some((held, _)) = &mut lock(&self.state).cargo {
            held.suspect();
        }
    }

    /// The group has failed: what is enqueued is waited for, what never was is free, what failed half way is leaked.
    fn close(&self, shared: &Shared) {
        let (cargo, events, lost) = {
            let mut state = lock(&self.state);
            let lost = state.broken || state.entering > 0;
            (state.cargo.take(), std::mem::take(&mut state.events), lost)
        };
        let Some((held, ticket)) = cargo else { return };
        lock(&shared.channels.open).remove(&ticket.number());
        let error = shared
            .failure()
            .unwrap_or_else(|| Error::new(ErrorKind::Aborted, "the group has ended"));
        match events.is_empty() {
            _ if lost => ticket.fail(error, Vec::new()),
            true => ticket.fail(error, held.free()),
            false => shared.in_flight.add(held, Arc::new(All(events)), ticket),
        }
    }
}

impl Part<'_> {
    /// It is enqueued up to `event`. With the last part the caller is told of an event that stands for all.
    fn enqueued(mut self, shared: &Shared, event: Arc<CudaEvent>) {
        self.through = true;
        let (cargo, events) = {
            let mut state = lock(&self.parcel.state);
            state.events.push(event);
            if state.events.len() < self.parcel.parts {
                return;
            }
            (state.cargo.take(), std::mem::take(&mut state.events))
        };
        let Some((held, ticket)) = cargo else { return };
        lock(&shared.channels.open).remove(&ticket.number());
        let (engine, number) = (ticket.engine().clone(), ticket.number());
        let joined = joined(shared, &events);
        if let Ok(done) = &joined {
            ticket.recorded(done.clone());
        }
        shared.in_flight.add(held, Arc::new(All(events)), ticket);
        if let Err(error) = joined {
            engine.fail_by(number, error);
        }
    }
}

impl Drop for Part<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.parcel.state);
        state.entering -= 1;
        state.broken |= !self.through;
    }
}

/// One event of the device for those of several streams.
fn joined(shared: &Shared, events: &[Arc<CudaEvent>]) -> Result<Arc<dyn Event>> {
    if let [one] = events {
        return Ok(one.clone());
    }
    let meeting = CudaStream::new(&shared.gpu, false)?;
    events.iter().try_for_each(|e| meeting.wait(&**e))?;
    meeting.record()
}

/// All events, for the host.
struct All(Vec<Arc<CudaEvent>>);

impl Event for All {
    fn query(&self) -> Result<bool> {
        let mut reached = true;
        for event in &self.0 {
            reached &= event.query()?;
        }
        Ok(reached)
    }

    fn synchronize(&self, deadline: Instant) -> Result<()> {
        self.0.iter().try_for_each(|event| event.synchronize(deadline))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
