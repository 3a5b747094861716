//! What the engine of an isolated group works with: a group in a child process.
//!
//! The group in the child keeps an order and deadlines of its own, so operations are handed over at once, blocking ones by their callers. Here are
//! those that are in the child, with their memory (INV-8), until it reports their end or has ended itself; and what becomes of the child when the
//! group fails. What fails in the child alone leaves it alive. Any other failure ends it: the other ranks hear of that first, from the group in the child
//! if its backend tells them, else through the [`Watch`].

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ftcore::engine::{self, Driver, Ended, Held, Job, Label, Outcome, Place, Rules, Stage, Ticket, spawn};
use ftcore::{Collective, Completion, Error, ErrorKind, Result, Tensor};

use crate::link::{Claim, LEAVE, Link, Moved, TELLING};
use crate::staging::Staged;
use crate::watch::Watch;
use crate::wire::frames::{Done, Order, address};

/// One configuration of a group at work.
pub(crate) type Engine = engine::Engine<ChildDriver>;

/// A killed child ends at once. One that does not is given up with its memory.
pub(crate) const RULES: Rules = Rules {
    depth: usize::MAX,
    grace: Duration::from_secs(10),
    gives_up: true,
};

/// What is submitted.
pub(crate) struct Call {
    pub(crate) op: Collective,
    pub(crate) staged: Staged,
    /// The order to the child, but for its number.
    pub(crate) frame: Vec<u8>,
}

impl Job for Call {
    fn into_op(self) -> Collective {
        if self.staged.is_copied() {
            return self.op;
        }
        give_up(self.op.into_tensors(), self.staged);
        // Without the tensors, which are given up.
        Collective::Barrier
    }
}

/// Leaks memory that a copy on the device may still touch (INV-8).
pub(crate) fn give_up(tensors: Vec<Tensor>, staged: Staged) {
    for tensor in tensors {
        tensor.leak("a copy between it and memory that a child process sees did not end");
    }
    std::mem::forget(staged);
}

/// Who hears of the end of an operation.
enum Caller {
    /// The engine.
    Engine(Ticket<ChildDriver>),
    /// A thread that waits in [`ChildDriver::execute`].
    Waits(SyncSender<Outcome>),
}

impl Caller {
    fn answer(self, outcome: Outcome) {
        match self {
            Self::Engine(ticket) => ticket.answer(outcome),
            // There is room for one, and no second comes.
            Self::Waits(tell) => drop(tell.send(outcome)),
        }
    }
}

/// Without whose part an operation cannot end.
enum Needs {
    All,
    /// Of messages; no rank in particular if they may come from any.
    Ranks(Vec<u32>),
}

impl Needs {
    fn of(op: &Collective) -> Self {
        let peer = |op: &Collective| match op {
            Collective::Send { peer, .. } => Some(*peer),
            Collective::Recv { peer, .. } => *peer,
            _ => None,
        };
        match op {
            Collective::Send { .. } | Collective::Recv { .. } => Self::Ranks(peer(op).into_iter().collect()),
            Collective::Batch { ops } => Self::Ranks(ops.iter().filter_map(peer).collect()),
            _ => Self::All,
        }
    }
}

/// An operation that is in the child.
struct Operation {
    held: Held,
    staged: Staged,
    needs: Needs,
    submitted: Instant,
    /// None: told without its memory.
    caller: Option<Caller>,
}

impl Operation {
    /// The child has finished it and does not touch its memory any more.
    fn succeed(self, source: Option<u32>, contributors: u32) {
        let mut tensors = self.held.free();
        let Some(caller) = self.caller else { return };
        let outcome = match self.staged.bring_back(&mut tensors) {
            Ok(()) => Outcome::Succeeded(Completion {
                tensors,
                source,
                contributors,
            }),
            Err(error) if self.staged.is_on_device() => {
                give_up(tensors, self.staged);
                return caller.answer(Outcome::Fatal(error, Vec::new()));
            }
            Err(error) => Outcome::Fatal(error, tensors),
        };
        // First: the caller's next operation finds the same memory free, which is warm.
        drop(self.staged);
        caller.answer(outcome);
    }

    /// It has failed, and the child does not touch the caller's memory any more. What it may touch all the same is given back.
    fn fail(self, outcome: impl FnOnce(Vec<Tensor>) -> Outcome) -> Option<Staged> {
        let is_copied = self.staged.is_copied();
        let (mut tensors, mut staged) = (self.held.free(), Some(self.staged));
        if let Some(staged) = staged.take_if(|_| !is_copied) {
            give_up(std::mem::take(&mut tensors), staged);
        }
        if let Some(caller) = self.caller {
            caller.answer(outcome(tensors));
        }
        staged
    }
}

#[derive(Default)]
struct Table {
    operations: HashMap<u64, Operation>,
    /// Why nothing begins any more.
    failure: Option<Error>,
    /// The child said that its group has failed: it ends by itself what is in flight, and has told the other ranks if it can.
    failed_there: bool,
    /// The group has failed with that, and its child goes on.
    is_left_alive: bool,
    /// The group was aborted: its child ends, whatever it failed with.
    is_aborted: bool,
    /// To be answered when nothing is in flight.
    ended: Option<Ended<ChildDriver>>,
}

/// See the module.
pub(crate) struct ChildDriver {
    link: Arc<Link>,
    /// The group's number in its child; 0 for the first.
    number: u32,
    moved: Arc<Moved>,
    place: Place,
    /// What the group in the child calls itself.
    name: Arc<str>,
    /// Its backend tells the other ranks of an abort.
    tells: bool,
    /// Where the backend does not tell the other ranks; one for all groups of the child.
    notices: Option<Arc<dyn Watch>>,
    /// The group is being dropped: the others in the child stay.
    dropped: AtomicBool,
    table: Mutex<Table>,
}

impl ChildDriver {
    pub(crate) fn new(
        claim: &Claim,
        place: Place,
        name: Arc<str>,
        tells: bool,
        notices: Option<Arc<dyn Watch>>,
    ) -> Self {
        Self {
            link: claim.link.clone(),
            number: claim.number,
            moved: claim.moved.clone(),
            place,
            name,
            tells,
            notices,
            dropped: AtomicBool::new(false),
            table: Mutex::default(),
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the group in the child calls itself.
    pub(crate) fn name(&self) -> Arc<str> {
        self.name.clone()
    }

    /// The child.
    pub(crate) fn link(&self) -> &Arc<Link> {
        &self.link
    }

    /// The watch over the other ranks, if there is one.
    pub(crate) fn notices(&self) -> Option<&Arc<dyn Watch>> {
        self.notices.as_ref()
    }

    /// The group's number in it.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Its handle is being dropped.
    pub(crate) fn note_drop(&self) {
        self.dropped.store(true, Ordering::Release);
    }

    /// Puts an operation into the child.
    fn begin(&self, call: Call, caller: Caller, is_express: bool, deadline: Instant) {
        let Call {
            op,
            mut staged,
            mut frame,
        } = call;
        let id = self.link.next_id();
        address(&mut frame, id, is_express);
        let segments = std::mem::take(&mut staged.segments);
        let operation = Operation {
            needs: Needs::of(&op),
            held: Held::new(
                op,
                "a killed child process that does not end may still write to it",
            ),
            staged,
            submitted: Instant::now(),
            caller: Some(caller),
        };
        let refused = {
            let mut table = self.table();
            match table.failure.clone() {
                Some(failure) => Some((operation, failure)),
                None => {
                    table.operations.insert(id, operation);
                    None
                }
            }
        };
        let refused = refused.or_else(|| {
            let failure = self.link.send_operation(&frame, &segments, deadline).err()?;
            // The end of the child may have taken it meanwhile.
            Some((self.table().operations.remove(&id)?, failure))
        });
        if let Some((operation, failure)) = refused {
            drop(operation.fail(|tensors| Outcome::Fatal(failure, tensors)));
            self.settle();
        }
    }

    /// Has the child carry out `call` and waits for its report on this thread, which takes it off the express socket itself if no other does: no
    /// thread has to be woken for it.
    pub(crate) fn execute(&self, call: Call, deadline: Instant) -> Outcome {
        let (tell, told) = sync_channel(1);
        let mut express = self.link.express();
        self.begin(call, Caller::Waits(tell), express.is_some(), deadline);
        // Without a limit of its own: the child's report, its end or the engine answers every caller. The engine counts its grace from when its clock
        // sees the deadline, which may be long ago by then: this process may have been stopped.
        while let Some(receiver) = express.as_mut() {
            match told.try_recv() {
                Ok(outcome) => return outcome,
                Err(TryRecvError::Disconnected) => break,
                // False: another thread has it, or will.
                Err(TryRecvError::Empty) if self.link.hear(receiver) => {}
                Err(TryRecvError::Empty) => express = None,
            }
        }
        drop(express);
        told.recv().unwrap_or_else(|_| {
            let text = "the end of an operation in a child process was never told";
            Outcome::Fatal(Error::new(ErrorKind::Internal, text), Vec::new())
        })
    }

    /// The child reports the end of an operation.
    pub(crate) fn done(&self, done: Done) {
        self.moved.count(done.sent, done.received);
        let operation = {
            let mut table = self.table();
            // Before its caller is told, so that the interruption finds it.
            table.failed_there |= done.fatal;
            let kept = |operation: &Operation| !done.released && operation.staged.is_direct();
            match table.operations.remove(&done.id) {
                Some(operation) if kept(&operation) => {
                    table.operations.insert(done.id, operation);
                    drop(table);
                    // Only the child's end gives the caller's memory back.
                    let text = "a finished operation kept its memory";
                    let error = done.result.err();
                    let error = error.unwrap_or_else(|| Error::new(ErrorKind::Internal, text));
                    return self.link.end(error, None, Duration::ZERO);
                }
                operation => operation,
            }
        };
        let Some(operation) = operation else { return };
        match done.result {
            Ok((source, contributors)) => operation.succeed(source, contributors),
            Err(error) => {
                let staged = operation.fail(|tensors| match done.fatal {
                    true => Outcome::Fatal(error, tensors),
                    false => Outcome::Refused(error, tensors),
                });
                self.link.quarantine(staged.filter(|_| !done.released));
            }
        }
        self.settle();
    }

    /// The group in the child has failed.
    pub(crate) fn failed_there(&self) {
        self.table().failed_there = true;
    }

    /// The child is being ended for `error`: what it may touch is kept until it is gone, the caller's own memory is not.
    pub(crate) fn let_go(&self, error: &Error) {
        let taken: Vec<Operation> = {
            let mut table = self.table();
            let theirs = |_: &u64, operation: &mut Operation| !operation.staged.is_direct();
            table
                .operations
                .extract_if(theirs)
                .map(|(_, operation)| operation)
                .collect()
        };
        for operation in taken {
            let staged = operation.fail(|tensors| Outcome::Fatal(error.clone(), tensors));
            self.link.quarantine(staged);
        }
        self.settle();
    }

    /// The child is gone: nothing touches its memory any more.
    pub(crate) fn collected(&self, error: &Error) {
        let taken = std::mem::take(&mut self.table().operations);
        for operation in taken.into_values() {
            drop(operation.fail(|tensors| Outcome::Fatal(error.clone(), tensors)));
        }
        self.settle();
    }

    /// Answers the interruption, once nothing is in flight.
    fn settle(&self) {
        let mut table = self.table();
        let ended = match table.operations.is_empty() {
            true => table.ended.take(),
            false => None,
        };
        drop(table);
        ended.into_iter().for_each(Ended::clean);
    }

    /// True if operations are in flight: any, or such that the child's end must give memory back.
    pub(crate) fn is_busy(&self, with_direct: bool) -> bool {
        let table = self.table();
        let mut operations = table.operations.values();
        operations.any(|operation| !with_direct || operation.staged.is_direct())
    }

    /// True if an operation has been waiting for `rank`, which left at `at`, for `limit`. Of a split group, whose ranks have other numbers,
    /// only if it was pending when that rank left.
    pub(crate) fn misses(&self, rank: u32, at: Instant, limit: Duration) -> bool {
        self.table().operations.values().any(|operation| {
            let needed = match &operation.needs {
                _ if self.number != 0 => operation.submitted <= at,
                Needs::All => true,
                Needs::Ranks(ranks) => ranks.contains(&rank),
            };
            needed && operation.submitted.max(at).elapsed() > limit
        })
    }

    /// The group is aborted. One that has failed in the child alone has left that alive, and the other ranks may not know: an operation may have
    /// failed of which its backend told them nothing.
    pub(crate) fn abort(&self, reason: &str) {
        self.table().is_aborted = true;
        self.end_left(Some(reason));
    }

    /// Ends the child, if the group's failure has left it alive, for `reason` or that failure. False if it has not.
    pub(crate) fn end_left(&self, reason: Option<&str>) -> bool {
        let left = {
            let mut table = self.table();
            let is_left = std::mem::take(&mut table.is_left_alive);
            table.failure.clone().filter(|_| is_left)
        };
        if let Some(failure) = &left {
            self.end(failure, reason.unwrap_or(self.place.reason(failure)));
        }
        left.is_some()
    }

    /// Ends the child because of `failure`, or this group alone where the others in it need not end. The other ranks hear of it first.
    fn end(&self, failure: &Error, reason: &str) {
        let (link, reason) = (&self.link, reason.to_string());
        if let Some(notices) = &self.notices {
            notices.clone().tell(failure);
        } else if !self.tells {
            link.end(failure.clone(), None, Duration::ZERO);
        } else if self.number == 0 && (link.is_alone() || !self.dropped.load(Ordering::Acquire)) {
            link.end_after(failure.clone(), Some(Order::End { reason }), TELLING, LEAVE);
        } else {
            let group = self.number;
            link.order(Order::Abort { group, reason });
            link.bound(self.number, TELLING, failure);
        }
    }
}

impl Driver for ChildDriver {
    type Job = Call;
    /// The backend keeps the deadline, too, and names the missing ranks. Less than what [`ftcore::Work::wait_done`] adds.
    const OVERTIME: Duration = Duration::from_millis(1500);

    fn enqueue(&self, call: Call, ticket: Ticket<Self>) {
        let deadline = ticket.deadline();
        self.begin(call, Caller::Engine(ticket), false, deadline);
    }

    fn interrupt(&self, failure: &Error, ended: Ended<Self>) {
        let is_left_alive = {
            let mut table = self.table();
            table.failure = Some(failure.clone());
            table.ended = Some(ended);
            let ends_with_it = self.notices.is_some() && self.number == 0;
            table.is_left_alive = table.failed_there && !table.is_aborted && !ends_with_it;
            table.is_left_alive
        };
        self.link.part();
        if is_left_alive {
            // It may be configured again, unless it does not come to an end with what it has.
            self.link.bound(self.number, LEAVE, failure);
            // The others in the child go on without this one.
            if let Some(notices) = self.notices.clone() {
                let left = spawn("ox-ileave", move || notices.leave());
                left.unwrap_or_else(
                    |error| tracing::debug!(%error, "the leave of a group that failed is not counted"),
                );
            }
        } else {
            self.end(failure, self.place.reason(failure));
        }
        self.settle();
    }

    fn give_up(&self) {
        let mut waiting = Vec::new();
        let mut table = self.table();
        for operation in table.operations.values_mut() {
            operation.held.suspect();
            // The engine tells the others by itself.
            match operation.caller.take() {
                Some(Caller::Waits(tell)) => waiting.push(tell),
                caller => operation.caller = caller,
            }
        }
        let failure = table.failure.clone();
        drop(table);
        let failure = failure.unwrap_or_else(|| Error::new(ErrorKind::Aborted, "the group has failed"));
        for tell in waiting {
            drop(tell.send(Outcome::Fatal(failure.clone(), Vec::new())));
        }
    }

    /// The child goes on: it is configured again, or let go of by the group's handle.
    fn release(&self) -> Result<()> {
        self.notices.iter().for_each(|notices| notices.leave());
        Ok(())
    }

    fn waits_for(&self, _: &Label, stage: Stage) -> String {
        match stage {
            Stage::Queued => "waiting for earlier ones".to_string(),
            Stage::Finished => "done, but an earlier one is not".to_string(),
            Stage::Entering | Stage::Running => format!(
                "with the child process (pid {}), which should have ended it and has not; that is killed",
                self.link.pid
            ),
        }
    }
}
