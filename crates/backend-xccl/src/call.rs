//! What a group submits to its engine: operations with what they need beside their tensors, batches as several of them, and splits.

use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::time::{Duration, Instant};

use ftcore::engine::{Channel, Job, Label, joined};
use ftcore::{Collective, Error, Event, OpKind, Rejected, Result, Work};

use crate::comms::Comms;
use crate::driver::Engine;
use crate::xpu::event::{Order, Promise, XpuEvent};

/// How long after its deadline an operation on a device has been reported, so that no caller waits for its event any more.
const PROMISED: Duration = Duration::from_secs(5);

/// What an executor carries out.
pub(crate) struct Call {
    pub(crate) op: Collective,
    pub(crate) contribute: bool,
    /// Its caller's.
    pub(crate) deadline: Instant,
    pub(crate) order: Order,
    pub(crate) channel: Channel,
    pub(crate) task: Task,
}

/// What there is to do.
pub(crate) enum Task {
    /// The operation.
    Run,
    /// A split of the communicators, in the order of the collectives.
    Split(Split),
}

/// Colours are small and dense, ranks our own.
pub(crate) struct Split {
    pub(crate) color: Option<u32>,
    pub(crate) rank: u32,
    pub(crate) world: u32,
    pub(crate) reply: Sender<Option<Comms>>,
}

impl Call {
    /// oneCCL matches no tags: messages have one order per peer and direction.
    pub(crate) fn channel_of(kind: OpKind, peer: Option<u32>) -> Channel {
        match kind {
            OpKind::Send | OpKind::Recv => Channel::Messages {
                send: kind == OpKind::Send,
                peer,
                tag: 0,
            },
            _ => Channel::Collectives,
        }
    }
}

impl Job for Call {
    fn into_op(self) -> Collective {
        self.op
    }

    fn channel(&self, _: &Label) -> Channel {
        self.channel
    }

    fn promised(&self) -> Option<Arc<dyn Event>> {
        let promise = self.order.promise.clone()?;
        Some(Arc::new(XpuEvent::promised(promise)))
    }
}

/// How an operation is submitted.
#[derive(Clone)]
pub(crate) struct Terms {
    pub(crate) contribute: bool,
    pub(crate) deadline: Instant,
    /// On a device it begins after this point.
    pub(crate) after: Option<Arc<dyn Event>>,
}

/// Queues an operation, or gives it back.
pub(crate) fn submit(engine: &Arc<Engine>, op: Collective, terms: Terms) -> Result<Work, Box<Rejected>> {
    match op {
        Collective::Batch { ops } => batch(engine, ops, terms),
        op => one(engine, op, terms),
    }
}

fn one(engine: &Arc<Engine>, op: Collective, terms: Terms) -> Result<Work, Box<Rejected>> {
    let label = Label::of(&op);
    let Terms {
        contribute,
        deadline,
        after,
    } = terms;
    // On a device the event of a collective is promised at once, so that streams can wait for what is not enqueued yet. Messages, and what
    // needs no device, are waited for on the host.
    let promised =
        engine.driver().side.is_some() && !label.kind.is_p2p() && label.kind != OpKind::MonitoredBarrier;
    let promise = promised.then(|| Promise::new(deadline.checked_add(PROMISED).unwrap_or(deadline)));
    let call = Call {
        op,
        contribute,
        deadline,
        order: Order {
            after,
            promise: promise.clone(),
        },
        channel: Call::channel_of(label.kind, label.message.and_then(|(peer, _)| peer)),
        task: Task::Run,
    };
    // Alone, no call waits for another rank.
    let work = match engine.place().world {
        1 => engine.submit_here(call, label, deadline),
        _ => engine.submit(call, label, deadline),
    }?;
    if let Some(promise) = promise {
        work.on_complete(move |status| promise.ended(status));
    }
    Ok(work)
}

/// Messages that count as one operation: each goes to its own channel, and all of them have ended before that is told.
fn batch(engine: &Arc<Engine>, ops: Vec<Collective>, terms: Terms) -> Result<Work, Box<Rejected>> {
    let deadline = terms.deadline;
    let mut parts = Vec::with_capacity(ops.len());
    let mut refused = None;
    let mut rest = ops.into_iter();
    while let Some(op) = rest.next() {
        match one(engine, op, terms.clone()) {
            Ok(work) => parts.push(work),
            Err(rejected) => {
                let ops: Vec<Collective> = std::iter::once(rejected.op).chain(rest.by_ref()).collect();
                if parts.is_empty() {
                    let error = rejected.error.with_op(OpKind::Batch.name());
                    let op = Collective::Batch { ops };
                    return Err(Box::new(Rejected { error, op }));
                }
                // The group has failed since.
                let tensors = ops.into_iter().flat_map(Collective::into_tensors).collect();
                refused = Some((rejected.error, tensors));
            }
        }
    }
    Ok(joined(OpKind::Batch, deadline, parts, refused))
}

/// Splits the communicators, in the order of collectives: those of the part in which this rank is `rank` of `world`.
pub(crate) fn split(
    engine: &Arc<Engine>,
    color: Option<u32>,
    rank: u32,
    world: u32,
    deadline: Instant,
) -> Result<Option<Comms>> {
    let named = |error: Error| error.with_op("split");
    let (reply, answer) = mpsc::channel();
    let call = Call {
        op: Collective::Barrier,
        contribute: true,
        deadline,
        order: Order::default(),
        channel: Channel::Collectives,
        task: Task::Split(Split {
            color,
            rank,
            world,
            reply,
        }),
    };
    let label = Label::of(&call.op);
    let work = engine
        .submit(call, label, deadline)
        .map_err(|refused| named(refused.error))?;
    work.wait_done().map_err(named)?;
    // It is there before the work has ended.
    Ok(answer.try_recv().ok().flatten())
}
