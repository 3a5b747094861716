//! The all-reduces of the current step: none may be forgotten when the vote is taken (INV-6, L06).

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use ftcore::{Completion, Error, ErrorKind, Result, Status, Tensor, Work};

#[derive(Default)]
struct Counts {
    outstanding: usize,
    least_contributors: Option<u32>,
    error: Option<Error>,
    /// Something was submitted.
    used: bool,
}

/// What was submitted in one step and how it ended. Each step has its own, so that a late completion of an earlier
/// step can never speak for a later one.
#[derive(Clone, Default)]
pub struct Pending(Arc<(Mutex<Counts>, Condvar)>);

impl Pending {
    fn lock(&self) -> std::sync::MutexGuard<'_, Counts> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records an error; the first one stays. True if it was the first.
    pub fn fail(&self, error: Error) -> bool {
        let mut counts = self.lock();
        if counts.error.is_some() {
            return false;
        }
        counts.error = Some(error);
        true
    }

    /// The first error.
    pub fn error(&self) -> Option<Error> {
        self.lock().error.clone()
    }

    /// True if there was a reduction, or one that could not be submitted.
    pub fn is_used(&self) -> bool {
        let counts = self.lock();
        counts.used || counts.error.is_some()
    }

    /// True while something tracked has not ended.
    pub fn is_running(&self) -> bool {
        self.lock().outstanding > 0
    }

    /// The smallest number of contributors over the reductions that finished; `None` if there were none.
    pub fn least_contributors(&self) -> Option<u32> {
        self.lock().least_contributors
    }

    /// Follows the reduction `work` to its end; `on_error` is called with the step's first error, on the engine's thread.
    pub fn track(&self, work: &Work, on_error: impl FnOnce(Error) + Send + 'static) {
        self.follow(work, true, on_error);
    }

    /// As [`track`](Self::track), for a barrier, to which no replica contributes.
    pub fn track_barrier(&self, work: &Work, on_error: impl FnOnce(Error) + Send + 'static) {
        self.follow(work, false, on_error);
    }

    fn follow(&self, work: &Work, reduces: bool, on_error: impl FnOnce(Error) + Send + 'static) {
        let mut counts = self.lock();
        (counts.outstanding, counts.used) = (counts.outstanding + 1, true);
        drop(counts);
        let this = self.clone();
        let tracked = work.clone();
        work.on_complete(move |status| {
            let mut first = None;
            let mut counts = this.lock();
            counts.outstanding = counts.outstanding.saturating_sub(1);
            match status {
                Status::Failed(e) => {
                    if counts.error.is_none() {
                        counts.error = Some(e.clone());
                        first = Some(e.clone());
                    }
                }
                _ if !reduces => {}
                _ => {
                    let n = tracked.contributors();
                    counts.least_contributors = Some(counts.least_contributors.map_or(n, |m| m.min(n)));
                }
            }
            drop(counts);
            this.0.1.notify_all();
            if let Some(e) = first {
                on_error(e);
            }
        });
    }

    /// Waits until everything tracked has ended, in whatever way.
    pub fn drain(&self, deadline: Instant) -> Result<()> {
        let mut counts = self.lock();
        while counts.outstanding > 0 {
            let left = ftcore::time_left(deadline);
            if left.is_zero() {
                let n = counts.outstanding;
                return Err(Error::timeout(format!(
                    "{n} all-reduces of this step are still running"
                )));
            }
            counts = self
                .0
                .1
                .wait_timeout(counts, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        Ok(())
    }
}

/// An all-reduce under management: it may be waited for, and even if it is not, its outcome counts in the vote.
pub struct ManagedWork(std::result::Result<Work, (Error, Vec<Tensor>)>);

impl ManagedWork {
    /// An all-reduce that was never submitted, because of `error`. The tensors can be recovered.
    pub fn failed(error: Error, tensors: Vec<Tensor>) -> Self {
        Self(Err((error, tensors)))
    }

    /// An all-reduce that was submitted.
    pub fn submitted(work: Work) -> Self {
        Self(Ok(work))
    }

    /// Waits for the result. The error has been recorded for the vote already.
    pub fn take(&self) -> Result<Completion> {
        match &self.0 {
            Ok(work) => work.take(),
            Err((e, _)) => Err(e.clone()),
        }
    }

    /// The reduction itself, for who waits in a way of his own. Errors: why it was never submitted.
    pub fn work(&self) -> Result<&Work> {
        self.0.as_ref().map_err(|(error, _)| error.clone())
    }

    /// True once it has ended.
    pub fn is_done(&self) -> bool {
        match &self.0 {
            Ok(work) => !matches!(work.status(), Status::Pending),
            Err(_) => true,
        }
    }

    /// After a failure, the tensors with undefined contents, as far as they are free again.
    pub fn recover(self) -> Vec<Tensor> {
        match self.0 {
            Ok(work) => work.recover(),
            Err((e, tensors)) if e.kind() != ErrorKind::Internal => tensors,
            Err(_) => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ftcore::{OpKind, deadline_in, work_pair};
    use std::time::Duration;

    #[test]
    fn l06_an_all_reduce_nobody_waits_for_still_decides_the_vote() {
        let pending = Pending::default();
        let (work, completer) = work_pair(OpKind::AllReduce, deadline_in(Duration::from_secs(5)), |_| {});
        pending.track(&work, |_| {});
        drop(work);
        assert!(pending.drain(deadline_in(Duration::from_millis(20))).is_err());
        completer.fail(Error::new(ErrorKind::PeerLost, "gone"), Vec::new());
        pending.drain(deadline_in(Duration::from_secs(5))).unwrap();
        assert_eq!(pending.error().unwrap().kind(), ErrorKind::PeerLost);
    }

    #[test]
    fn l07_the_divisor_is_the_count_of_the_reduction_itself() {
        let pending = Pending::default();
        for contributors in [3, 2] {
            let (work, completer) = work_pair(OpKind::AllReduce, deadline_in(Duration::from_secs(5)), |_| {});
            pending.track(&work, |_| {});
            completer.succeed(Completion {
                tensors: Vec::new(),
                source: None,
                contributors,
            });
        }
        assert_eq!(pending.least_contributors(), Some(2));
    }
}
