//! The groups in a child: their operations, calls and failures.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ftcore::engine::spawn;
use ftcore::{
    Checked, Completion, Configuration, Crossing, DType, Device, Epoch, Error, ErrorKind, ProcessGroup,
    Result, Status, Store, Stream, SubmitOptions, Tensor, deadline_in,
};

use crate::channel::send;
use crate::child::reading::BusyReader;
use crate::crossing::Arrival;
use crate::shm::{Mapping, foreign};
use crate::store::proxy::{Line, ProxyStore};
use crate::wire::frames::{Done, Order, Report, Settled, Submission};
use crate::wire::{odd, op};

/// How often failures that no operation has seen are looked for. INV-2 gives them 100 ms.
const WATCH: Duration = Duration::from_millis(20);
/// A parent that has not read a report for this long is stopped or stuck; this process then ends.
const TIME_LIMIT: Duration = Duration::from_secs(600);

/// The way back to the parent, for all threads.
pub(crate) struct Reporter {
    socket: Arc<OwnedFd>,
    sending: Mutex<()>,
    /// For operations that a caller waits for.
    express: Mutex<OwnedFd>,
}

impl Reporter {
    pub(crate) fn new(socket: Arc<OwnedFd>, express: OwnedFd) -> Self {
        Self {
            socket,
            sending: Mutex::new(()),
            express: Mutex::new(express),
        }
    }

    /// The end of an operation, on the socket on which it is waited for.
    fn done(&self, done: Done, express: bool) {
        let report = Report::Done { done };
        if !express {
            return self.send(&report);
        }
        let express = self.express.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = tell(&express, &report) {
            eprintln!("isolated child: the parent cannot be told: {error}");
        }
    }

    /// Sends a report. A parent that cannot be told is gone; then this process ends.
    pub(crate) fn send(&self, report: &Report) {
        let sending = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        let sent = tell(&self.socket, report);
        drop(sending);
        if let Err(error) = sent {
            eprintln!("isolated child: the parent cannot be told: {error}");
            // The reading thread sees the same and ends the process.
            let _ = rustix::net::shutdown(&*self.socket, rustix::net::Shutdown::Both);
        }
    }
}

fn tell(socket: &OwnedFd, report: &Report) -> Result<()> {
    send(socket, &report.encode()?, &[], deadline_in(TIME_LIMIT))
}

/// No epoch that a group has.
const NEVER: u64 = u64::MAX;

/// One group.
pub(crate) struct Member {
    group: Arc<dyn ProcessGroup>,
    /// The last epoch of which a failure was reported.
    reported: AtomicU64,
}

impl Member {
    fn new(group: Arc<dyn ProcessGroup>) -> Arc<Self> {
        Arc::new(Self {
            group,
            reported: AtomicU64::new(NEVER),
        })
    }
}

/// An operation that may begin.
pub(crate) struct Ready {
    on: Running,
    checked: Checked,
    options: SubmitOptions,
}

/// What is reported of an operation, and where.
struct Running {
    id: u64,
    group: u32,
    express: bool,
    member: Arc<Member>,
    /// Of its tensors.
    addresses: Vec<usize>,
}

impl Ready {
    /// True if it is to be run on the thread that read it: the parent waits for it, and the backend needs no other thread.
    pub(crate) fn is_express(&self) -> bool {
        self.on.express && self.on.member.group.capabilities().has(ftcore::Feature::Borrow)
    }

    fn begin(self) -> (Running, Checked, SubmitOptions) {
        (self.on, self.checked, self.options)
    }
}

/// A segment of the parent's.
enum Held {
    Host(Arc<Mapping>),
    Device(Arc<Tensor>),
}

/// All groups of this process.
pub(crate) struct Groups {
    reporter: Arc<Reporter>,
    line: Arc<Line>,
    members: Mutex<HashMap<u32, Arc<Member>>>,
    segments: Mutex<HashMap<u32, Held>>,
    /// With device memory: how it is opened, and which device.
    crossing: Option<(Arc<dyn Crossing>, Device)>,
    pub(crate) busy_reader: Mutex<BusyReader>,
}

impl Groups {
    pub(crate) fn new(
        reporter: Arc<Reporter>,
        line: Arc<Line>,
        first: Box<dyn ProcessGroup>,
        crossing: Option<(Arc<dyn Crossing>, Device)>,
    ) -> Result<Arc<Self>> {
        let groups = Arc::new(Self {
            reporter,
            line,
            members: Mutex::new([(0, Member::new(first.into()))].into()),
            segments: Mutex::default(),
            crossing,
            busy_reader: Mutex::default(),
        });
        let weak = Arc::downgrade(&groups);
        spawn("ox-iwatch", move || {
            while let Some(groups) = weak.upgrade() {
                groups.look();
                crate::child::reading::take_over(&groups);
                drop(groups);
                // A group's failure is not signalled; this is the one poll of this crate.
                std::thread::sleep(WATCH);
            }
        })?;
        Ok(groups)
    }

    fn members(&self) -> MutexGuard<'_, HashMap<u32, Arc<Member>>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn member(&self, group: u32) -> Option<Arc<Member>> {
        self.members().get(&group).cloned()
    }

    /// Reports failures, each once.
    fn look(&self) {
        let all: Vec<(u32, Arc<Member>)> = self.members().iter().map(|(n, m)| (*n, m.clone())).collect();
        for (group, member) in all {
            // Asked first: what is found then is not the failure of a later configuration.
            let info = member.group.info();
            let epoch = info.epoch.0;
            if info.world_size == 0 || member.reported.load(Ordering::Relaxed) == epoch {
                continue;
            }
            if let Some(error) = member.group.error() {
                member.reported.store(epoch, Ordering::Relaxed);
                self.reporter.send(&Report::Failed {
                    group,
                    epoch: Epoch(epoch),
                    error,
                });
            }
        }
    }

    pub(crate) fn add_segment(&self, id: u32, fd: OwnedFd, bytes: u64) -> Result<()> {
        let mapping = Arc::new(Mapping::open(fd, bytes)?);
        let mut segments = self.segments.lock().unwrap_or_else(PoisonError::into_inner);
        segments.insert(id, Held::Host(mapping));
        Ok(())
    }

    pub(crate) fn add_device_segment(&self, id: u32, bytes: u64, handle: &[u8]) -> Result<()> {
        let (crossing, device) = self.crossing()?;
        let bytes = usize::try_from(bytes).map_err(|_| odd("a size beyond this machine's memory"))?;
        let whole = Arc::new(crossing.open(device.index, handle, bytes)?);
        let mut segments = self.segments.lock().unwrap_or_else(PoisonError::into_inner);
        segments.insert(id, Held::Device(whole));
        Ok(())
    }

    fn crossing(&self) -> Result<&(Arc<dyn Crossing>, Device)> {
        self.crossing
            .as_ref()
            .ok_or_else(|| odd("device memory, which was not agreed on"))
    }

    // ---- operations

    /// Finds the operation's memory and checks it; an operation that is refused is reported here.
    pub(crate) fn check(&self, submission: Submission<'_>) -> Result<Option<Ready>> {
        let Submission {
            id,
            group,
            contribute,
            express,
            deadline,
            arrival,
            op: mut reader,
        } = submission;
        let stream = arrival.map(|handle| self.arrival(&handle)).transpose()?;
        let collective = {
            let segments = self.segments.lock().unwrap_or_else(PoisonError::into_inner);
            op::get(&mut reader, &mut |place| {
                if place.count == 0 {
                    return self.nothing(place.dtype);
                }
                match segments.get(&place.segment) {
                    Some(Held::Host(mapping)) => foreign(mapping, place.offset, place.dtype, place.count),
                    Some(Held::Device(whole)) => {
                        let size = |n: u64| {
                            usize::try_from(n).map_err(|_| odd("a size beyond this machine's memory"))
                        };
                        let (offset, shape) = (size(place.offset)?, [size(place.count)?]);
                        let (crossing, _) = self.crossing()?;
                        crossing.part(whole, offset, place.dtype, &shape, Box::new(()))
                    }
                    None => Err(odd(format_args!("the unknown segment {}", place.segment))),
                }
            })?
        };
        reader.end()?;
        let Some(member) = self.member(group) else {
            let error = Error::new(ErrorKind::InvalidState, "the group is gone");
            self.refused(id, group, express, error, true);
            return Ok(None);
        };
        let options = SubmitOptions {
            deadline: Some(deadline),
            contribute,
            stream,
        };
        let addresses: Vec<usize> = collective.tensors().iter().map(|t| t.as_ptr() as usize).collect();
        let info = member.group.info();
        match Checked::new(collective, &info, member.group.capabilities(), &options) {
            Ok(checked) => Ok(Some(Ready {
                on: Running {
                    id,
                    group,
                    express,
                    member,
                    addresses,
                },
                checked,
                options,
            })),
            Err(rejected) => {
                self.refused(id, group, express, rejected.error, true);
                Ok(None)
            }
        }
    }

    /// A tensor without elements, of which there is nothing in any segment.
    fn nothing(&self, dtype: DType) -> Result<Tensor> {
        match &self.crossing {
            None => Ok(Tensor::zeros(dtype, 0)),
            Some((_, device)) => ftcore::accelerator(&device.kind)?.alloc(device.index, dtype, &[0]),
        }
    }

    /// The point of the parent's stream after which the inputs are there.
    fn arrival(&self, handle: &[u8]) -> Result<Arc<dyn Stream>> {
        let (crossing, device) = self.crossing()?;
        Ok(Arc::new(Arrival {
            device: device.clone(),
            event: crossing.open_mark(device.index, handle)?,
        }))
    }

    /// Submits an operation; its end is reported from wherever the backend ends it.
    pub(crate) fn submit(self: &Arc<Self>, ready: Ready) {
        let (on, checked, options) = ready.begin();
        let work = match on.member.group.submit(checked, options) {
            Ok(work) => work,
            Err(rejected) => return self.refused(on.id, on.group, on.express, rejected.error, true),
        };
        let (this, done) = (self.clone(), work.clone());
        work.on_complete(move |status| match status {
            Status::Failed(error) => this.failed(&on, error.clone(), done.recover().len()),
            _ => this.ended(&on, done.take()),
        });
    }

    /// Runs an operation on this thread, for backends that do so without a hand-over to one of their own.
    pub(crate) fn execute(&self, ready: Ready) {
        let (on, checked, options) = ready.begin();
        match on.member.group.execute(checked, options) {
            Ok(completion) => self.ended(&on, Ok(completion)),
            Err(failed) if is_refusal(&failed.error, &*on.member.group) => {
                let is_free = failed.tensors.len() == on.addresses.len();
                self.refused(on.id, on.group, on.express, failed.error, is_free);
            }
            Err(failed) => self.failed(&on, failed.error, failed.tensors.len()),
        }
    }

    /// The operation never began. `released`: its memory came back all the same.
    fn refused(&self, id: u64, group: u32, express: bool, error: Error, released: bool) {
        // A group that failed before says so with every refusal. The parent did not know yet, so for its caller the operation
        // was under way when the group failed: it fails with the first cause, as all others do.
        let first = self.member(group).and_then(|m| m.group.error());
        let done = Done {
            id,
            group,
            released,
            fatal: first.is_some(),
            result: Err(match first {
                Some(first) if error.kind() == ErrorKind::Poisoned => first,
                _ => error,
            }),
            sent: 0,
            received: 0,
        };
        self.reporter.done(done, express);
    }

    /// It has failed, and gave back so many tensors.
    fn failed(&self, on: &Running, error: Error, tensors: usize) {
        self.report(on, Err(error), tensors == on.addresses.len());
    }

    fn ended(&self, on: &Running, completion: Result<Completion>) {
        let result = completion.and_then(|c| in_place(c, &on.addresses));
        let is_free = result.is_ok();
        self.report(on, result, is_free);
    }

    fn report(&self, on: &Running, result: Result<(Option<u32>, u32)>, released: bool) {
        let traffic = on.member.group.traffic();
        let done = Done {
            id: on.id,
            group: on.group,
            released,
            // Libraries that do not say that a group has failed go on with none of what comes after.
            fatal: result.is_err(),
            result,
            sent: traffic.sent,
            received: traffic.received,
        };
        self.reporter.done(done, on.express);
    }

    // ---- calls

    /// Everything that is not an operation.
    pub(crate) fn obey(self: &Arc<Self>, order: Order) -> Result<()> {
        match order {
            Order::Configure {
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
                let store: Arc<dyn Store> = Arc::new(ProxyStore::new(self.line.clone(), store));
                let configuration = Configuration {
                    store,
                    prefix,
                    name,
                    epoch,
                    rank,
                    world_size: world,
                    deadline,
                    cancel: Default::default(),
                };
                self.aside(call, group, move |_, member| {
                    member.group.configure(configuration)?;
                    Ok(Some(Settled::of(&member.group.info(), member.group.traffic())))
                })
            }
            Order::Split {
                call,
                group,
                new,
                color,
                key,
                deadline,
            } => self.aside(call, group, move |groups, member| {
                let Some(part) = member.group.split(color, key, deadline)? else {
                    return Ok(None);
                };
                let settled = Settled::of(&part.info(), part.traffic());
                groups.members().insert(new, Member::new(part.into()));
                Ok(Some(settled))
            }),
            Order::Shutdown {
                call,
                group,
                deadline,
            } => self.aside(call, group, move |_, member| {
                member.group.shutdown(deadline).map(|()| None)
            }),
            Order::Abort { group, reason } => {
                if let Some(member) = self.member(group) {
                    member.group.abort(&reason);
                }
                Ok(())
            }
            Order::Release { group } => {
                // Nothing of it is in flight: an abort comes before, if something was.
                let gone = self.members().remove(&group);
                drop(gone);
                Ok(())
            }
            Order::Forget { id } => {
                let mut segments = self.segments.lock().unwrap_or_else(PoisonError::into_inner);
                segments.remove(&id);
                Ok(())
            }
            Order::Hello { .. }
            | Order::Segment { .. }
            | Order::DeviceSegment { .. }
            | Order::Leave
            | Order::Quit
            | Order::End { .. } => Err(odd("an order where it cannot be")),
        }
    }

    /// Runs a call on a thread of its own and reports its answer.
    fn aside(
        self: &Arc<Self>,
        call: u32,
        group: u32,
        run: impl FnOnce(&Self, &Member) -> Result<Option<Settled>> + Send + 'static,
    ) -> Result<()> {
        let this = self.clone();
        let answer = move || {
            let result = match this.member(group) {
                Some(member) => run(&this, &member),
                None => Err(Error::new(ErrorKind::InvalidState, "the group is gone")),
            };
            this.reporter.send(&Report::Answer { call, result });
        };
        spawn("ox-icall", answer)
    }

    // ---- the end

    fn all(&self) -> Vec<Arc<Member>> {
        std::mem::take(&mut *self.members()).into_values().collect()
    }

    /// Tells the other ranks of the leave, or that this one left with work pending.
    pub(crate) fn leave(&self, deadline: Instant) {
        for member in self.all() {
            if let Err(error) = member.group.shutdown(deadline) {
                tracing::debug!(%error, "left with work pending");
            }
        }
    }

    /// For a process that is cut off with its parent: groups that were not left tell the other ranks of no leave, not even when they would be dropped.
    pub(crate) fn keep(self: &Arc<Self>) {
        std::mem::forget(self.clone());
    }

    /// Tells the other ranks why, where the backend can.
    pub(crate) fn abort_all(&self, reason: &str, deadline: Instant) {
        let members = self.all();
        members.iter().for_each(|m| m.group.abort(reason));
        for member in members {
            drop(member.group.shutdown(deadline));
        }
    }
}

/// True if a blocking call never began: the group had failed before, or the call cannot be.
fn is_refusal(error: &Error, group: &dyn ProcessGroup) -> bool {
    match error.kind() {
        ErrorKind::Poisoned => true,
        ErrorKind::InvalidArgument | ErrorKind::Unsupported | ErrorKind::InvalidState => {
            group.error().is_none()
        }
        _ => false,
    }
}

/// The results lie where the parent looks for them, or else the operation has failed.
fn in_place(completion: Completion, addresses: &[usize]) -> Result<(Option<u32>, u32)> {
    let same = completion.tensors.len() == addresses.len()
        && completion
            .tensors
            .iter()
            .zip(addresses)
            .all(|(t, &a)| t.byte_len() == 0 || t.as_ptr() as usize == a);
    if same {
        return Ok((completion.source, completion.contributors));
    }
    Err(Error::new(
        ErrorKind::Internal,
        "the backend gave back other tensors than it was given",
    ))
}
