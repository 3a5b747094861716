//! Deadlines and failures: the watcher ends what is overdue, the listener hears what other ranks report.

use std::sync::{Arc, PoisonError};
use std::time::Instant;

use ftcore::{Error, time_left};

use super::{Engine, State};
use crate::job::{Label, Memory};

/// How far a job has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    /// In one of oneCCL's calls.
    Called,
    /// Waiting for the other ranks, outside oneCCL.
    Meeting,
    /// In its lane's queue.
    Queued,
}

impl Engine {
    /// Ends every job at its deadline.
    pub(super) fn watch(self: Arc<Self>) {
        let mut state = self.lock();
        loop {
            let busy = state
                .lanes
                .values()
                .any(|l| l.active.is_some() || !l.queue.is_empty());
            if state.error.is_some() || (state.stopping && !busy) {
                return;
            }
            let due = earliest(&state).map(|(when, stage, label)| (when, stage, label.clone()));
            match due {
                Some((when, stage, label)) if when <= Instant::now() => {
                    let error = self.overdue(&label, stage);
                    drop(state);
                    self.tell_and_fail(&error);
                    return;
                }
                Some((when, ..)) => {
                    state.watch_until = Some(when);
                    state = self
                        .watch
                        .wait_timeout(state, time_left(when))
                        .unwrap_or_else(PoisonError::into_inner)
                        .0;
                }
                None => {
                    state.watch_until = None;
                    state = self.watch.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }

    pub(super) fn overdue(&self, label: &Label, stage: Stage) -> Error {
        let took = label.submitted.elapsed().as_secs_f64();
        let text = match stage {
            Stage::Called => format!(
                "did not end within {took:.3} s: another rank has not called it, or is gone. oneCCL cannot cancel a call: its \
                 thread and its memory are given up, and this process cannot use oneCCL again (an isolated group can)"
            ),
            Stage::Meeting => match label.message {
                Some((peer, tag)) => {
                    format!("rank {peer} did not come to the message (tag {tag}) within {took:.3} s")
                }
                None => format!("the other ranks did not come within {took:.3} s"),
            },
            Stage::Queued => {
                let which = label.message.map_or(String::new(), |(peer, tag)| {
                    format!(" (the message with rank {peer}, tag {tag})")
                });
                format!(
                    "had not begun after {took:.3} s{which}: earlier operations of this group are not done, or this machine is \
                     too busy"
                )
            }
        };
        label.on(self.named(Error::timeout(text)))
    }

    /// Hears what other ranks report, and reports what was not told yet.
    pub(super) fn listen(self: Arc<Self>) {
        let Some(channel) = &self.channel else { return };
        loop {
            if let Some(error) = channel.news() {
                self.fail(&error);
                return;
            }
            let state = self.lock();
            if let Some(error) = state.error.clone() {
                drop(state);
                channel.tell(&error);
                return;
            }
            if state.ended {
                return;
            }
        }
    }

    /// Tells the other ranks, then ends everything here.
    pub(super) fn tell_and_fail(&self, error: &Error) {
        if let Some(channel) = &self.channel {
            channel.tell(error);
        }
        self.fail(error);
    }
}

/// The first deadline among all jobs.
fn earliest(state: &State) -> Option<(Instant, Stage, &Label)> {
    let jobs = state.lanes.values().flat_map(|lane| {
        let active = lane.active.iter().map(|a| {
            let stage = match a.memory {
                Memory::Lent(_) => Stage::Called,
                Memory::Idle(_) => Stage::Meeting,
            };
            (a.label.watched_until(), stage, &a.label)
        });
        let queued = lane.queue.iter();
        active.chain(queued.map(|j| (j.label.watched_until(), Stage::Queued, &j.label)))
    });
    jobs.min_by_key(|(when, stage, _)| (*when, *stage))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ftcore::{InMemoryStore, Store, deadline_in};

    use super::*;
    use crate::engine::{Comms, Parts, Place};
    use crate::news::Channel;

    #[test]
    fn a_process_that_ends_right_after_an_abort_has_told_the_others() {
        let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
        let channels = [0, 1].map(|rank| Channel::new(store.clone(), "x".into(), rank, 2));
        let parts = Parts {
            comms: Comms::alone(),
            channel: Some(channels[0].clone()),
            counters: Arc::default(),
            counted: false,
            tally: None,
            side: None,
        };
        let place = Place {
            rank: 0,
            world: 2,
            epoch: 1,
        };
        let engine = Engine::start(place, parts).unwrap();
        engine.abort("enough");
        // As the end of the process does.
        ftcore::lifecycle::wait_for_partings();
        let told = store.check(&[&channels[0].key("news")], deadline_in(Duration::ZERO));
        assert!(told.unwrap(), "nothing was told");
        let heard = channels[1].news().unwrap();
        assert!(heard.to_string().contains("enough"), "{heard}");
    }
}
