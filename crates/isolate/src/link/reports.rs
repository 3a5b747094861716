//! What the child reports, what its silence means, and what becomes of everything at its end. The keeper's thread, except where a
//! caller waits on the express socket itself.

use std::sync::{Arc, MutexGuard, Weak};
use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind, Result, Status, Work};

use super::{Call, Ending, Greeting, Link, State};
use crate::channel::{Filled, Receiver};
use crate::clock;
use crate::front::Front;
use crate::pending::Pending;
use crate::wire::frames::{Done, Report, Settled};

/// An operation that is not reported this long after its deadline will not be: the child is killed. More than what a
/// backend takes to name the missing ranks, less than what `Work::wait_done` adds.
const MARGIN: Duration = Duration::from_millis(1500);

impl Link {
    /// The express socket, if no thread waits on it.
    pub(crate) fn express(&self) -> Option<MutexGuard<'_, Receiver>> {
        self.express.try_lock().ok()
    }

    /// Takes reports from the express socket until `work` has ended. Returns too when the child has closed it, or when the report is held
    /// back: then the keeper, or the thread that asks whether it is true, ends the work.
    pub(crate) fn await_express(&self, receiver: &mut Receiver, work: &Work) {
        loop {
            let taken = self.take_express(receiver);
            if let Err(error) = &taken {
                self.end(error.clone(), None, Duration::ZERO);
            }
            if !matches!(taken, Ok(true)) || !matches!(work.status(), Status::Pending) {
                return;
            }
            match receiver.fill(true) {
                // Nothing: the socket's time-out; the keeper may have ended the work meanwhile.
                Ok(Filled::Some | Filled::Nothing) => {}
                Ok(Filled::Closed) | Err(_) => return,
            }
        }
    }

    /// False if a report is held back.
    fn take_express(&self, receiver: &mut Receiver) -> Result<bool> {
        let mut taken = true;
        while let Some(body) = receiver.next()? {
            match Report::decode(body)? {
                report @ Report::Done(_) => taken &= self.take(report)?,
                _ => {
                    return Err(crate::wire::odd(
                        "another report than an operation's end on the express socket",
                    ));
                }
            }
        }
        Ok(taken)
    }

    pub(super) fn greeted(&self, result: Greeting) {
        if let Some(greeting) = self.lock().greeting.take() {
            drop(greeting.send(result));
        }
    }

    pub(super) fn answered(&self, number: u32, result: Result<Settled>) {
        let Some(call) = self.lock().calls.remove(&number) else {
            return;
        };
        if let (Ok(settled), Some(front)) = (&result, &call.front) {
            front.reset();
            front.count(settled.sent, settled.received);
        }
        drop(call.answer.send(result));
    }

    pub(super) fn poisoned(&self, group: u32, error: &Error) {
        if let Some(front) = self.front(group) {
            front.poison(error);
        }
    }

    fn front(&self, group: u32) -> Option<Arc<Front>> {
        self.lock().fronts.get(&group).and_then(Weak::upgrade)
    }

    /// `Protocol` if the child reports what was never asked.
    pub(super) fn done(&self, done: Done) -> Result<()> {
        let (pending, front) = {
            let mut state = self.lock();
            if done.id >= state.next_id {
                return Err(crate::wire::odd(format_args!(
                    "the end of operation {}, which was never begun",
                    done.id
                )));
            }
            state.tainted |= !done.released;
            let front = state.fronts.get(&done.group).and_then(Weak::upgrade);
            (state.pending.remove(&done.id), front)
        };
        if let Some(front) = front {
            front.count(done.sent, done.received);
            if let Some(first) = &done.poison {
                front.poison(first);
            }
        }
        // What fails while the child is being ended fails for that reason, whatever its backend saw of it.
        let mut done = done;
        if done.result.is_err()
            && let Some(ending) = self.ending()
        {
            done.result = Err(ending.error);
        }
        // Failed already, if the child is being ended.
        let Some(pending) = pending else { return Ok(()) };
        if !done.released && pending.is_direct() {
            // Only the child's end gives the caller's memory back.
            let error = done
                .result
                .err()
                .unwrap_or_else(|| Error::new(ErrorKind::Internal, "a finished operation kept its memory"));
            self.lock().doomed.push((pending, error.clone()));
            self.end(error, None, Duration::ZERO);
            return Ok(());
        }
        match done.result {
            Ok((source, contributors)) => pending.succeed(source, contributors),
            Err(error) => {
                let regions = pending.fail(error);
                if !done.released {
                    self.lock().quarantine.extend(regions);
                }
            }
        }
        Ok(())
    }

    // ---- time and the end (the keeper's thread)

    pub(crate) fn ending(&self) -> Option<Ending> {
        self.lock().ending.clone()
    }

    /// Operations and aborts that took too long; orders the end if there is one. When to look again.
    pub(crate) fn check_deadlines(&self) -> Option<Instant> {
        let now = Instant::now();
        let mut state = self.lock();
        if state.ending.is_some() {
            return None;
        }
        let late = state
            .pending
            .values()
            .filter(|p| clock::later(p.deadline, MARGIN) <= now)
            .min_by_key(|p| p.deadline);
        if let Some(p) = late {
            let mut error = Error::timeout(format!(
                "the child process (pid {}) did not report the end of the operation by {:.1} s after its deadline; it is killed",
                self.pid,
                MARGIN.as_secs_f64()
            ))
            .with_op(p.kind.name())
            .with_rank(p.rank)
            .with_epoch(p.epoch);
            if let Some(seq) = p.seq {
                error = error.with_seq(seq);
            }
            drop(state);
            self.end(error, None, Duration::ZERO);
            return None;
        }
        let mut hard = None;
        let State { soft, pending, .. } = &mut *state;
        soft.retain(|(group, until, error)| {
            if !pending.values().any(|p| p.group == *group) {
                return false;
            }
            if *until <= now {
                hard = Some(error.clone());
            }
            true
        });
        let next = state.soft.iter().map(|s| s.1).min();
        let due = state
            .pending
            .values()
            .map(|p| clock::later(p.deadline, MARGIN))
            .min();
        drop(state);
        if let Some(error) = hard {
            self.end(error, None, Duration::ZERO);
            return None;
        }
        [next, due].into_iter().flatten().min()
    }

    /// Fails everything with `error`; what the child may still touch is kept until it is gone.
    pub(crate) fn fail_all(&self, error: &Error) {
        let (now, calls, fronts, greeting) = {
            let mut state = self.lock();
            let all: Vec<Pending> = std::mem::take(&mut state.pending).into_values().collect();
            let (later, now): (Vec<_>, Vec<_>) = all.into_iter().partition(Pending::is_direct);
            state.doomed.extend(later.into_iter().map(|p| (p, error.clone())));
            let calls: Vec<Call> = std::mem::take(&mut state.calls).into_values().collect();
            let fronts: Vec<_> = state.fronts.values().filter_map(Weak::upgrade).collect();
            (now, calls, fronts, state.greeting.take())
        };
        fronts.iter().for_each(|f| f.poison(error));
        let mut regions = Vec::new();
        for pending in now {
            regions.extend(pending.fail(error.clone()));
        }
        self.lock().quarantine.extend(regions);
        calls.iter().for_each(|c| drop(c.answer.send(Err(error.clone()))));
        if let Some(greeting) = greeting {
            drop(greeting.send(Err(error.clone())));
        }
    }

    /// The child was collected: nothing touches its memory any more.
    pub(crate) fn collected(&self, error: &Error) {
        self.lock().gone.get_or_insert_with(|| error.clone());
        // What it said of another rank before it ended tells more than its end.
        self.settle(None);
        self.fail_all(error);
        let (doomed, quarantine) = {
            let mut state = self.lock();
            (
                std::mem::take(&mut state.doomed),
                std::mem::take(&mut state.quarantine),
            )
        };
        drop(quarantine);
        for (pending, error) in doomed {
            drop(pending.fail(error));
        }
        self.changed.notify_all();
    }

    /// The child was killed long ago and does not go away: what it may touch is given up for ever.
    pub(crate) fn give_up(&self) {
        let (doomed, quarantine) = {
            let mut state = self.lock();
            (
                std::mem::take(&mut state.doomed),
                std::mem::take(&mut state.quarantine),
            )
        };
        for (pending, error) in doomed {
            let (tensors, regions) = Pending::dissolve(pending.slots);
            tensors
                .into_iter()
                .for_each(|t| t.leak("a killed child process that does not end may still write to it"));
            std::mem::forget(regions);
            pending.completer.fail(error, Vec::new());
        }
        std::mem::forget(quarantine);
    }
}
