//! What became of replicas lately, and how fast quorums follow each other: for people who ask why a job waits. It decides nothing. What happened in
//! which order is in its `timeline`.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::timeline::Timeline;
use crate::member::prefix_of;

/// Replicas that are remembered; the oldest go first.
const MOST: usize = 16;

/// What became of a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It is out: its connections broke, it was silent, its servers gave up, or an operator ended it.
    Gone,
    /// It left in order.
    Left,
    /// Its call for a quorum was answered with an error.
    Refused,
}

/// Of one replica, the last that happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Departure {
    /// Its id.
    pub replica_id: String,
    /// What became of it.
    pub fate: Fate,
    /// Why.
    pub reason: String,
    /// How long ago.
    pub ago: Duration,
}

#[derive(Debug, Clone)]
struct Event {
    replica_id: String,
    fate: Fate,
    reason: String,
    /// None until the event that caused it has been taken in.
    at: Option<Instant>,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Recent {
    events: VecDeque<Event>,
    formed: Option<Instant>,
    /// A quorum has formed since time was last told.
    forms: bool,
    /// From one quorum to the next, of late.
    pace: Option<Duration>,
    pub(super) timeline: Timeline,
}

impl Recent {
    pub(super) fn note(&mut self, id: &str, fate: Fate, reason: &str) {
        match fate {
            Fate::Gone => self.timeline.gone(id, reason),
            Fate::Left => self.timeline.left(id, reason),
            Fate::Refused => self.timeline.refused(id, reason),
        }
        self.events.retain(|e| e.replica_id != id);
        if self.events.len() == MOST {
            self.events.pop_front();
        }
        self.events.push_back(Event {
            replica_id: id.to_string(),
            fate,
            reason: reason.to_string(),
            at: None,
        });
    }

    /// It asks again, under this id or a newer one of its name.
    pub(super) fn is_back(&mut self, id: &str) {
        fn name(id: &str) -> &str {
            prefix_of(id).unwrap_or(id)
        }
        self.events.retain(|e| name(&e.replica_id) != name(id));
    }

    pub(super) fn formed(&mut self) {
        self.forms = true;
    }

    /// All that was noted since the last call happened now.
    pub(super) fn stamp(&mut self, now: Instant) {
        self.timeline.stamp(now);
        for event in self.events.iter_mut().rev().take_while(|e| e.at.is_none()) {
            event.at = Some(now);
        }
        if std::mem::take(&mut self.forms) {
            let took = self.formed.map(|last| now.saturating_duration_since(last));
            // The last few count: a step takes another time than the first one did.
            self.pace = match (self.pace, took) {
                (Some(pace), Some(took)) => Some((pace * 3 + took) / 4),
                (pace, took) => took.or(pace),
            };
            self.formed = Some(now);
        }
    }

    /// Since when the present quorum stands, and how long one stood of late.
    pub(super) fn pace(&self, now: Instant) -> (Option<Duration>, Option<Duration>) {
        let formed = self.formed.map(|at| now.saturating_duration_since(at));
        (formed, self.pace)
    }

    pub(super) fn departures(&self, now: Instant) -> Vec<Departure> {
        let told = |e: &Event| Departure {
            replica_id: e.replica_id.clone(),
            fate: e.fate,
            reason: e.reason.clone(),
            ago: e
                .at
                .map_or(Duration::ZERO, |at| now.saturating_duration_since(at)),
        };
        self.events.iter().map(told).collect()
    }
}
