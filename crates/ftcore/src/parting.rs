//! What a thread that has ended a group still waits for when it ends itself.
//!
//! An engine says its good-byes on threads of its own, and a process that ends at once would cut them short: its peers would take the end
//! for a death. So the end of the thread that told an engine to end, which for the main thread is that of the process, waits for it a little.

use std::cell::RefCell;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::lifecycle::Engine;
use crate::{Result, deadline_in};

/// What all engines together may take for that.
const PATIENCE: Duration = Duration::from_millis(200);

thread_local! {
    static PARTING: RefCell<Parting> = const { RefCell::new(Parting(Vec::new())) };
}

/// The engines that this thread has told to end and that may not have ended yet.
struct Parting(Vec<Box<dyn Ending>>);

impl Drop for Parting {
    fn drop(&mut self) {
        let until = deadline_in(PATIENCE);
        for engine in &self.0 {
            // Late or not: there is nobody to tell.
            let _ = engine.wait_ended(until);
        }
    }
}

trait Ending {
    fn wait_ended(&self, deadline: Instant) -> Result<()>;
}

impl<E: Engine> Ending for Weak<E> {
    fn wait_ended(&self, deadline: Instant) -> Result<()> {
        self.upgrade()
            .map_or(Ok(()), |engine| engine.wait_ended(deadline))
    }
}

/// Notes that this thread has told `engine` to end.
pub(crate) fn part_from<E: Engine>(engine: &Arc<E>) {
    // A thread that is already ending has nothing to note it in; then the engine is on its own.
    let _ = PARTING.try_with(|parting| {
        if let Ok(mut parting) = parting.try_borrow_mut() {
            let now = Instant::now();
            parting.0.retain(|engine| engine.wait_ended(now).is_err());
            parting.0.push(Box::new(Arc::downgrade(engine)));
        }
    });
}

#[cfg(test)]
mod tests {
    use std::sync::{Condvar, Mutex};

    use super::*;
    use crate::lifecycle::Lifecycle;
    use crate::{Configuration, Epoch, Error, InMemoryStore};

    const SOON: Duration = Duration::from_secs(20);

    /// Ends only once somebody waits for it.
    #[derive(Default)]
    struct Slow {
        state: Mutex<State>,
        moved: Condvar,
    }

    #[derive(Default)]
    struct State {
        awaited: bool,
        ended: bool,
    }

    impl Slow {
        fn end_when_awaited(&self, patience: Duration) {
            let state = self.state.lock().unwrap();
            let (mut state, _) = self
                .moved
                .wait_timeout_while(state, patience, |s| !s.awaited)
                .unwrap();
            state.ended = state.awaited;
            self.moved.notify_all();
        }
    }

    impl Engine for Slow {
        fn abort(self: &Arc<Self>, _: &str) {}
        fn leave(self: &Arc<Self>, _: &str) {}
        fn wait_ended(self: &Arc<Self>, deadline: Instant) -> Result<()> {
            let mut state = self.state.lock().unwrap();
            state.awaited |= deadline > Instant::now();
            self.moved.notify_all();
            let left = deadline.saturating_duration_since(Instant::now());
            let (state, _) = self.moved.wait_timeout_while(state, left, |s| !s.ended).unwrap();
            if state.ended {
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

    fn configured(engine: &Arc<Slow>) -> Lifecycle<Slow> {
        let group = Lifecycle::new("g");
        let configuration = Configuration {
            store: Arc::new(InMemoryStore::new()),
            prefix: "p".to_string(),
            name: "n".to_string(),
            epoch: Epoch(1),
            rank: 0,
            world_size: 1,
            deadline: deadline_in(SOON),
        };
        group.configure(configuration, |_| Ok(engine.clone())).unwrap();
        group
    }

    #[test]
    fn the_end_of_a_thread_waits_for_the_engines_that_it_told_to_end() {
        for abort in [true, false] {
            let engine = Arc::new(Slow::default());
            let ours = engine.clone();
            let quitter = std::thread::spawn(move || {
                let group = configured(&ours);
                if abort {
                    group.abort("it ends");
                    // It is the abort that counts here: the group outlives the thread.
                    std::mem::forget(group);
                }
            });
            engine.end_when_awaited(SOON);
            quitter.join().unwrap();
            assert!(engine.state.lock().unwrap().ended, "aborted: {abort}");
        }
    }

    #[test]
    fn an_engine_that_never_ends_holds_its_thread_up_for_a_moment_only() {
        let engine = Arc::new(Slow::default());
        let ours = engine.clone();
        std::thread::spawn(move || drop(configured(&ours)))
            .join()
            .unwrap();
        let state = engine.state.lock().unwrap();
        assert!(state.awaited && !state.ended);
    }
}
