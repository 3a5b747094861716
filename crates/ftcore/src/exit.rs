//! What a process that ends still waits for: the leave messages of groups that it has ended.
//!
//! An engine sends its leave messages on threads of its own, and a process that ended at once would cut them short: its peers would take the end
//! for a death. The thread that tells one to end notes it here, and `exit` (after `main`, or called) waits a little.

use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

use crate::{deadline_in, time_left};

/// What all of them together may take: a leave takes far less, but its thread may have to wait for a core.
const TIME_LIMIT: Duration = Duration::from_secs(1);

/// What was told to end and may not have ended yet.
static LEAVING: Mutex<Vec<Box<dyn Leaving>>> = Mutex::new(Vec::new());

/// Something that was told to end and takes its time.
pub trait Leaving: Send + 'static {
    /// True once there is nothing to wait for. Neither blocks nor frees anything.
    fn is_over(&self) -> bool;
    /// Waits for that, until `deadline` at most. Whatever else has to be said by then may be noted meanwhile, and is waited for, too.
    fn wait_over(&self, deadline: Instant);
}

/// Threads that hold the other end until they have let go of what they work on. Nothing is ever sent.
impl Leaving for Receiver<()> {
    fn is_over(&self) -> bool {
        matches!(self.try_recv(), Err(TryRecvError::Disconnected))
    }

    fn wait_over(&self, deadline: Instant) {
        let _ = self.recv_timeout(time_left(deadline));
    }
}

/// Notes that `leaving` was told to end: the end of the process waits for it, 1 s at most for all together. Does not block.
///
/// For what is not behind a [`Lifecycle`](crate::lifecycle::Lifecycle), which does so by itself. A process that is killed, or leaves by
/// `_exit` or `abort`, waits for nothing.
pub fn leave_at_exit(leaving: impl Leaving) {
    static AT_EXIT: Once = Once::new();
    AT_EXIT.call_once(|| {
        // SAFETY: the handler is a function that lives as long as this library; in one that is unloaded it runs before that.
        if unsafe { libc::atexit(at_exit) } != 0 {
            tracing::warn!("a process that ends right after it has left a group may be taken for dead: no room for an exit handler");
        }
    });
    let mut all = LEAVING.lock().unwrap_or_else(PoisonError::into_inner);
    all.retain(|earlier| !earlier.is_over());
    all.push(Box::new(leaving));
}

extern "C" fn at_exit() {
    wait_for_leaves();
}

/// Waits for what [`leave_at_exit`] noted, as the end of the process does: for an exit handler that may leave by `_exit` before that has its turn.
pub fn wait_for_leaves() {
    if crate::forked::is_child() {
        // The threads that would end them are the parent's, and so are their connections.
        return;
    }
    let until = deadline_in(TIME_LIMIT);
    // One at a time and outside the lock: the end of one may bring others.
    loop {
        let next = LEAVING.lock().unwrap_or_else(PoisonError::into_inner).pop();
        match next {
            Some(leaving) => leaving.wait_over(until),
            None => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::io::Write;
    use std::process::Command;
    use std::sync::mpsc::{Sender, channel};
    use std::sync::{Arc, Condvar, MutexGuard};

    use super::*;
    use crate::lifecycle::{Engine, Lifecycle};
    use crate::{Configuration, Epoch, Error, InMemoryStore, Result};

    /// What a process of its own does before it ends.
    const SCENE: &str = "OXCCL_TEST_EXIT";
    const SOON: Duration = Duration::from_secs(20);

    /// Ends only once a caller waits for it, after this time or never, and says so.
    struct Slow {
        ends: Option<Duration>,
        ended: Mutex<bool>,
        moved: Condvar,
    }

    impl Slow {
        fn lock(&self) -> MutexGuard<'_, bool> {
            self.ended.lock().unwrap()
        }
    }

    impl Engine for Slow {
        fn abort(self: &Arc<Self>, _: &str) {}
        fn leave(self: &Arc<Self>, _: &str) {}
        fn wait_ended(self: &Arc<Self>, deadline: Instant) -> Result<()> {
            let ours = self.clone();
            std::thread::spawn(move || {
                if let Some(after) = ours.ends {
                    std::thread::sleep(after);
                    *ours.lock() = true;
                }
                ours.moved.notify_all();
            });
            let (ended, _) = self
                .moved
                .wait_timeout_while(self.lock(), time_left(deadline), |ended| !*ended)
                .unwrap();
            // Not through the harness, which would keep it to itself.
            let _ = std::io::stdout().write_all(if *ended { b"leave\n" } else { b"late\n" });
            if *ended {
                Ok(())
            } else {
                Err(Error::timeout("it has not ended"))
            }
        }
        fn drain(self: &Arc<Self>, _: Instant) -> Result<()> {
            Ok(())
        }
        fn error(&self) -> Option<Error> {
            None
        }
    }

    fn configured(ends: Option<Duration>) -> Lifecycle<Slow> {
        let group = Lifecycle::new("x", "g");
        let configuration = Configuration {
            store: Arc::new(InMemoryStore::new()),
            prefix: "p".to_string(),
            name: "n".to_string(),
            epoch: Epoch(1),
            rank: 0,
            world_size: 1,
            deadline: deadline_in(SOON),
            cancel: Default::default(),
        };
        let engine = Arc::new(Slow {
            ends,
            ended: Mutex::default(),
            moved: Condvar::new(),
        });
        // It outlives its group, as one does whose thread is still at it.
        std::mem::forget(engine.clone());
        group.configure(configuration, |_| Ok(engine)).unwrap();
        group
    }

    /// Threads that begin to end only when a caller waits for it.
    struct Bidden(Cell<Option<Sender<()>>>, Receiver<()>);

    impl Leaving for Bidden {
        fn is_over(&self) -> bool {
            self.1.is_over()
        }
        fn wait_over(&self, deadline: Instant) {
            drop(self.0.take());
            self.1.wait_over(deadline);
        }
    }

    /// Ends this process right after it has ended a group.
    fn play(scene: &str) -> ! {
        let at_once = Some(Duration::ZERO);
        match scene {
            "dropped" => drop(configured(at_once)),
            // Its thread gets no core for long.
            "dropped on a busy machine" => drop(configured(Some(Duration::from_millis(400)))),
            "aborted by a thread" => {
                let group = configured(at_once);
                std::thread::scope(|scope| {
                    scope.spawn(|| group.abort("it ends"));
                });
                std::mem::forget(group);
            }
            "dropped by a thread" => {
                let (holding, thread) = channel();
                let (go, gone) = channel::<()>();
                std::thread::spawn(move || {
                    // Only once the process is ending, and waits.
                    let _ = gone.recv();
                    drop(configured(at_once));
                    drop(holding);
                });
                leave_at_exit(Bidden(Cell::new(Some(go)), thread));
            }
            "endless" => drop(configured(None)),
            other => panic!("{other}"),
        }
        std::process::exit(0)
    }

    #[test]
    fn the_end_of_a_process_waits_for_what_it_told_to_end_but_not_for_ever() {
        if let Ok(scene) = std::env::var(SCENE) {
            play(&scene);
        }
        let scenes = [
            ("dropped", "leave"),
            ("dropped on a busy machine", "leave"),
            ("aborted by a thread", "leave"),
            ("dropped by a thread", "leave"),
            ("endless", "late"),
        ];
        for (scene, said) in scenes {
            let output = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "--nocapture"])
                .arg("exit::tests::the_end_of_a_process_waits_for_what_it_told_to_end_but_not_for_ever")
                .env(SCENE, scene)
                .output()
                .unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success(), "{scene}: {}", output.status);
            // On one core the harness begins the line with the test's name.
            assert!(text.lines().any(|line| line.ends_with(said)), "{scene}: {text}");
        }
    }
}
