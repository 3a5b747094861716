//! Background tasks, which no caller waits for: ending a communicator, freeing memory. They may take as long as the library likes, so each gets a
//! thread of its own.
//!
//! A background task whose thread does not start is not lost: the next thread that does runs it, or the next `configure`.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ftcore::engine::spawn;

type Task = Box<dyn FnOnce() + Send>;

/// Background tasks without a thread yet.
static WAITING: Mutex<VecDeque<Task>> = Mutex::new(VecDeque::new());

fn waiting() -> MutexGuard<'static, VecDeque<Task>> {
    WAITING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `work` on a thread called `name`, at once or when one starts.
pub(crate) fn in_background(name: &str, work: impl FnOnce() + Send + 'static) {
    waiting().push_back(Box::new(work));
    run_waiting(name);
}

/// Tries again to run what is waiting for a thread.
pub(crate) fn catch_up() {
    if !waiting().is_empty() {
        run_waiting("ox-nccl-late");
    }
}

fn run_waiting(name: &str) {
    let run = || {
        // One at a time, so that the others wait for none that hangs: each of them has brought a thread along.
        while let Some(work) = next() {
            work();
        }
    };
    if let Err(error) = spawn(name, run) {
        tracing::warn!(%error, "memory or a communicator is freed later, when a thread starts");
    }
}

fn next() -> Option<Task> {
    waiting().pop_front()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn a_background_task_that_waits_for_ever_holds_up_no_other() {
        let (_never, hangs) = channel::<()>();
        let (began, begun) = channel();
        in_background("ox-test", move || {
            began.send(()).unwrap();
            let _ = hangs.recv();
        });
        begun.recv_timeout(LONG).unwrap();
        let (told, done) = channel();
        in_background("ox-test", move || told.send(()).unwrap());
        done.recv_timeout(LONG).unwrap();
    }

    #[test]
    fn what_was_put_off_runs_with_the_next_chance() {
        let (told, done) = channel();
        waiting().push_back(Box::new(move || told.send(()).unwrap()));
        catch_up();
        done.recv_timeout(LONG).unwrap();
    }
}
