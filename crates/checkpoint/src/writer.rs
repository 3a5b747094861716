//! Writes a replica's checkpoints beside its training, on a thread of its own.
//!
//! The training thread makes the copy of its state (a [`StateDict`]) and goes on; encoding, hashing, writing and flushing happen
//! here. It never waits for the disk: a checkpoint that falls due while the one before is still being written is left out. A
//! failure is told to the owner, once each, and training goes on.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use ftcore::{Error, Result, Step, time_left};

use crate::{Series, StateDict, Written};

/// How a checkpoint ended.
pub type Outcome = Result<Written>;

struct Job {
    step: Step,
    lineage: String,
    state: StateDict,
}

#[derive(Default)]
struct Slot {
    job: Option<Job>,
    busy: bool,
    closed: bool,
}

#[derive(Default)]
struct Shared {
    slot: Mutex<Slot>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// See the module. When it is dropped, what is being written is finished by the thread if the process lives that long;
/// [`flush`](Self::flush) waits for it.
pub struct Writer(Arc<Shared>);

impl Writer {
    /// Starts the thread `ox-ckpt-disk`; `told` hears there how each checkpoint ended. Errors: `Io`.
    pub fn start(series: Series, told: impl Fn(&Outcome) + Send + 'static) -> Result<Self> {
        let shared = Arc::<Shared>::default();
        let theirs = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("ox-ckpt-disk".into())
            .spawn(move || {
                while let Some(job) = next(&theirs) {
                    told(&series.save(job.step, &job.lineage, &job.state));
                    drop(job);
                    theirs.lock().busy = false;
                    theirs.changed.notify_all();
                }
            })
            .map_err(|e| Error::io("starting the checkpoint thread", e))?;
        Ok(Self(shared))
    }

    /// Hands over the state in which `step` begins. False, without waiting, if the one before is still being written: this one is
    /// left out then.
    #[must_use]
    pub fn offer(&self, step: Step, lineage: &str, state: StateDict) -> bool {
        let mut slot = self.0.lock();
        if slot.busy {
            return false;
        }
        slot.busy = true;
        slot.job = Some(Job {
            step,
            lineage: lineage.to_owned(),
            state,
        });
        drop(slot);
        self.0.changed.notify_all();
        true
    }

    /// True while a checkpoint is being written.
    pub fn is_busy(&self) -> bool {
        self.0.lock().busy
    }

    /// Waits until nothing is being written. `Timeout` at `deadline`.
    pub fn flush(&self, deadline: Instant) -> Result<()> {
        let mut slot = self.0.lock();
        while slot.busy {
            let left = time_left(deadline);
            if left.is_zero() {
                return Err(Error::timeout("a checkpoint is still being written"));
            }
            let waited = self.0.changed.wait_timeout(slot, left);
            slot = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }
}

/// The next state to write; `None` once the owner is gone.
fn next(shared: &Shared) -> Option<Job> {
    let mut slot = shared.lock();
    loop {
        if let Some(job) = slot.job.take() {
            return Some(job);
        }
        if slot.closed {
            return None;
        }
        // Woken by the next offer or by the owner's drop; there is nothing else to wait for.
        slot = shared.changed.wait(slot).unwrap_or_else(PoisonError::into_inner);
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{newest, steps};
    use ftcore::{ErrorKind, deadline_in};
    use std::sync::mpsc::channel;
    use std::time::Duration;

    fn soon() -> Instant {
        deadline_in(Duration::from_secs(20))
    }

    fn state() -> StateDict {
        let mut s = StateDict::new();
        s.insert_f32("w", &[1000], &[0.5; 1000]).unwrap();
        s
    }

    #[test]
    fn what_is_offered_is_written_beside_and_a_busy_writer_leaves_one_out() {
        let dir = tempfile::tempdir().unwrap();
        let (says, hears) = channel();
        let (go, wait) = channel::<()>();
        let series = Series::open(dir.path(), 0, 2, soon()).unwrap();
        let writer = Writer::start(series, move |outcome| {
            says.send(outcome.clone().unwrap().step).unwrap();
            // Holds the thread until the test lets it go, as a slow disk would.
            let _ = wait.recv();
        })
        .unwrap();
        assert!(writer.offer(Step(5), "x", state()));
        assert_eq!(hears.recv_timeout(Duration::from_secs(20)).unwrap(), Step(5));
        assert!(writer.is_busy() && !writer.offer(Step(6), "x", state()));
        assert_eq!(
            writer.flush(Instant::now()).unwrap_err().kind(),
            ErrorKind::Timeout
        );
        go.send(()).unwrap();
        writer.flush(soon()).unwrap();
        assert!(writer.offer(Step(7), "x", state()));
        go.send(()).unwrap();
        writer.flush(soon()).unwrap();
        assert_eq!(steps(dir.path(), 0).unwrap(), [5, 7].map(Step));
        let found = newest(dir.path(), 0, [0]).unwrap().found.unwrap();
        assert_eq!((found.step.0, found.lineage.as_str()), (7, "x"));
        assert_eq!(found.state, state());
    }

    #[test]
    fn the_series_is_free_again_once_the_writer_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let series = Series::open(dir.path(), 0, 2, soon()).unwrap();
        drop(Writer::start(series, |_| {}).unwrap());
        Series::open(dir.path(), 0, 2, soon()).unwrap();
    }
}
