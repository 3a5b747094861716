//! What this rank has done, for those who look at it from outside: counted for the manager server's metrics, and written to the event log and, with
//! the feature `otel`, as spans.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use coordination::{PushEvent, QuorumResult, RankCounts};
use ftcore::{Epoch, Error, Result, Step, Traffic};
use replica::Healed;

use crate::event_log::{Event, EventLog, listed, text};
use crate::spans::Spans;

/// Shared by all that see something of a step.
pub(crate) struct Observed {
    log: EventLog,
    spans: Spans,
    counts: Mutex<RankCounts>,
}

/// The epoch and the step that an attempt voted on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attempt {
    pub(crate) epoch: Epoch,
    pub(crate) step: Step,
    pub(crate) begun: Instant,
}

impl Observed {
    pub(crate) fn new(log: EventLog, spans: Spans) -> Arc<Self> {
        Arc::new(Self {
            log,
            spans,
            counts: Mutex::default(),
        })
    }

    /// False if no listener is told of events.
    fn is_watched(&self) -> bool {
        self.log.is_on() || self.spans.is_on()
    }

    fn see(&self, event: Event<'_>) {
        self.spans.see(&event);
        self.log.write(event);
    }

    fn count(&self) -> MutexGuard<'_, RankCounts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was counted so far, of a rank with the state of `step`.
    pub(crate) fn counts(&self, step: Step, traffic: Traffic) -> RankCounts {
        RankCounts {
            step,
            sent_bytes: traffic.sent,
            received_bytes: traffic.received,
            ..*self.count()
        }
    }

    pub(crate) fn started(&self, world_size: u32) {
        self.see(Event::Start { world_size });
    }

    pub(crate) fn quorum(&self, answer: &QuorumResult, took: Duration) {
        self.count().quorums.add(took);
        if self.is_watched() {
            self.see(Event::Quorum {
                epoch: answer.quorum_id.signed(),
                step: answer.max_step.0,
                replica_rank: answer.replica_rank,
                size: answer.replica_world_size,
                heal: answer.heal,
                spare: answer.spare,
                members: listed(&answer.replica_ids),
                took_s: took.as_secs_f64(),
            });
        }
    }

    pub(crate) fn configured(&self, epoch: Epoch, took: Duration, outcome: &Result<()>) {
        self.count().configures.add(took);
        if self.is_watched() {
            let error = outcome.as_ref().err().map(ToString::to_string);
            self.see(Event::Configure {
                epoch: epoch.signed(),
                took_s: took.as_secs_f64(),
                error: error.as_deref().map(text),
            });
        }
    }

    /// A state was fetched, after `took` if not.
    pub(crate) fn healed(
        &self,
        answer: &QuorumResult,
        took: Duration,
        outcome: std::result::Result<&Healed, &Error>,
    ) {
        if let Ok(healed) = outcome {
            let mut counts = self.count();
            counts.heals.add(healed.took);
            counts.heal_bytes += u64::try_from(healed.bytes).unwrap_or(0);
        }
        if !self.is_watched() {
            return;
        }
        let id = |rank: u32| answer.id_of(rank);
        let all = || {
            answer
                .recover_sources
                .iter()
                .filter_map(|s| id(s.replica_rank))
                .collect()
        };
        // The one that was followed; all that were asked if none was.
        let followed = outcome.ok().and_then(|healed| healed.source).and_then(id);
        let error = outcome.err().map(ToString::to_string);
        self.see(Event::Heal {
            epoch: answer.quorum_id.signed(),
            step: answer.max_step.0,
            from: followed.map_or_else(all, |one| vec![one]),
            bytes: outcome.map_or(0, |healed| healed.bytes),
            took_s: took.as_secs_f64(),
            error: error.as_deref().map(text),
        });
    }

    /// A collective of `bytes` was submitted.
    pub(crate) fn submitted(&self, bytes: usize) {
        let mut counts = self.count();
        counts.collectives += 1;
        counts.collective_bytes += u64::try_from(bytes).unwrap_or(0);
    }

    /// The first failure of an attempt.
    pub(crate) fn failed(&self, epoch: Epoch, error: &Error) {
        self.count().failures += 1;
        if self.is_watched() {
            let reason = error.to_string();
            self.see(Event::Failure {
                epoch: epoch.signed(),
                reason: text(&reason),
            });
        }
    }

    pub(crate) fn voted(&self, took: Duration) {
        self.count().votes.add(took);
        self.spans.voted(took);
    }

    pub(crate) fn committed(&self, attempt: Attempt, contributors: u32) {
        let took = attempt.begun.elapsed();
        self.count().commits.add(took);
        self.see(Event::Commit {
            epoch: attempt.epoch.signed(),
            step: attempt.step.0,
            contributors,
            took_s: took.as_secs_f64(),
        });
    }

    pub(crate) fn discarded(&self, attempt: Attempt, error: Option<&Error>) {
        let took = attempt.begun.elapsed();
        self.count().discards.add(took);
        if self.is_watched() {
            let reason = error.map_or_else(
                || "another rank of this replica voted no".to_string(),
                ToString::to_string,
            );
            self.see(Event::Discard {
                epoch: attempt.epoch.signed(),
                step: attempt.step.0,
                reason: text(&reason),
                took_s: took.as_secs_f64(),
            });
        }
    }

    /// What the lighthouse pushes.
    pub(crate) fn heard(&self, event: &PushEvent) {
        let PushEvent::AbortEpoch {
            quorum_id,
            reason,
            departed,
        } = event
        else {
            return;
        };
        let (epoch, reason) = (*quorum_id, text(reason));
        for member in listed(departed) {
            self.see(Event::MemberLost {
                epoch: epoch.signed(),
                member: text(member),
                reason,
            });
        }
        self.see(Event::Abort {
            epoch: epoch.signed(),
            reason,
        });
    }

    /// The rank ends, in order if there is no error.
    pub(crate) fn ended(&self, step: Step, error: Option<&Error>) {
        let error = error.map(ToString::to_string);
        self.see(Event::End {
            step: step.0,
            error: error.as_deref().map(text),
        });
        self.log.flush();
    }
}
