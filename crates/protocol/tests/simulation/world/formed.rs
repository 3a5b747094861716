//! Who is in a quorum and who is not, looked at when one is delivered: a majority of the healthy (INV-7), none too early, no stranger, after a
//! restart those that the job goes on with, and a new id after a lost vote.

use std::collections::BTreeSet;

use ftcore::Epoch;

use super::*;

/// No clock of the simulation gives such an id.
const ABSURD: Epoch = Epoch(1 << 50);

/// What a lighthouse could know since its start.
#[derive(Debug, Default)]
pub(super) struct Heard {
    pub(super) started: Duration,
    /// The record that it began with: all members, and those known to be gone.
    record: Option<(Vec<String>, BTreeSet<String>)>,
    /// When a replica asked for the first time.
    asked: Option<Duration>,
    /// The replicas that have asked or are out, whose heartbeats announce nothing; and since when those that wait do.
    known: BTreeSet<String>,
    asks: BTreeMap<String, Duration>,
    /// When each replica gave its first sign of life, and when its last.
    beats: BTreeMap<String, (Duration, Duration)>,
    attached: BTreeMap<String, Duration>,
    /// When each replica asked last.
    joined: BTreeMap<String, Duration>,
    /// It knows who was in the last quorum.
    knows_last: bool,
    /// It has given out a quorum.
    has_formed: bool,
}

impl Heard {
    pub(super) fn new(record: Option<&Record>, now: Duration) -> Self {
        let gone = |r: &Record| r.departed.iter().chain(&r.left).cloned().collect();
        Self {
            started: now,
            record: record.map(|r| (r.members.clone(), gone(r))),
            knows_last: record.is_some(),
            ..Self::default()
        }
    }

    pub(super) fn hears(&mut self, event: &Event, now: Duration) {
        match event {
            // Where there is no record this announces it too.
            Event::Attached {
                replica_id,
                last_quorum_id,
                ..
            } if *last_quorum_id > Epoch(0) => {
                self.attached.entry(replica_id.clone()).or_insert(now);
            }
            Event::Heartbeat { replica_id } => {
                let first = self.beats.get(replica_id).map(|(first, _)| *first);
                let first = first
                    .or_else(|| self.attached.get(replica_id).copied())
                    .unwrap_or(now);
                self.beats.insert(replica_id.clone(), (first, now));
            }
            Event::Join { member, .. } => {
                self.asked.get_or_insert(now);
                self.joined.insert(member.replica_id.clone(), now);
                self.known.insert(member.replica_id.clone());
                self.asks.entry(member.replica_id.clone()).or_insert(now);
            }
            Event::Detached { replica_id, .. }
            | Event::Disconnected { replica_id }
            | Event::Failed { replica_id, .. }
            | Event::Leave { replica_id, .. } => {
                self.known.insert(replica_id.clone());
                if let Some((_, gone)) = &mut self.record {
                    gone.insert(replica_id.clone());
                }
            }
            Event::Operate { replica, .. } => {
                let of_name = self.beats.keys().filter(|id| name_of(id) == replica);
                self.known.extend(of_name.cloned());
                if let Some((members, gone)) = &mut self.record {
                    gone.extend(members.iter().filter(|id| name_of(id) == replica).cloned());
                }
            }
            _ => {}
        }
    }
}

/// The part of an id that a replica keeps over restarts.
fn name_of(id: &str) -> &str {
    id.split(':').next().unwrap_or(id)
}

impl Heard {
    /// A call of that replica came at `since` or later.
    pub(super) fn has_asked(&self, id: &str, since: Duration) -> bool {
        self.joined.get(id).is_some_and(|at| *at >= since)
    }

    /// It can know of no quorum before its first one.
    pub(super) fn knows_nothing(&self) -> bool {
        self.record.is_none() && !self.has_formed
    }
}

impl World {
    /// The lighthouse delivers a quorum.
    pub(super) fn formed(&mut self, quorum: &Quorum) {
        let outcome = self.is_right(quorum);
        self.check(outcome);
        if let Some(lighthouse) = &mut self.lighthouse {
            let heard = &mut lighthouse.heard;
            (heard.has_formed, heard.knows_last) = (true, true);
            heard
                .asks
                .retain(|id, _| !quorum.contains(id) && !quorum.has_spare(id));
        }
    }

    fn is_right(&self, quorum: &Quorum) -> Result<(), String> {
        let Some(lighthouse) = &self.lighthouse else {
            return Ok(());
        };
        let (epoch, members) = (quorum.quorum_id, &quorum.participants);
        if epoch > ABSURD {
            return Err(format!("INV-7: quorum {epoch}: no clock gives such an id"));
        }
        if self.first_end.is_none() && members.iter().any(|m| m.replica_id.starts_with('x')) {
            return Err(format!("quorum {epoch} has a stranger in it"));
        }
        if members.iter().any(|m| m.commit_failures > 0) && self.checks.knows_epoch(epoch) {
            return Err(format!(
                "INV-7: epoch {epoch} goes on although a vote in it was lost"
            ));
        }
        if !lighthouse.heard.has_formed {
            self.goes_on_rightly(quorum, &lighthouse.heard)?;
        }
        let alive = self.replicas.iter().flatten().count();
        if members.len() + quorum.spares.len() >= alive {
            return Ok(());
        }
        self.nobody_is_missing(quorum, lighthouse)
    }

    /// The first quorum of a lighthouse after another one: of a majority of the last one's members, or after a time.
    fn goes_on_rightly(&self, quorum: &Quorum, heard: &Heard) -> Result<(), String> {
        let waited = heard
            .asked
            .is_some_and(|at| self.now >= at + HEARTBEAT_TIMEOUT + JOIN_TIMEOUT);
        if waited || self.first_end.is_some() {
            return Ok(());
        }
        let members = &quorum.participants;
        let (number, of) = if let Some((recorded, gone)) = &heard.record {
            // One that was started again is there by its name, also if it is kept out as a newcomer.
            let status = self.lighthouse.as_ref().map(|l| l.state.status(self.instant()));
            let waiting = status.iter().flat_map(|s| &s.waiting).map(|(id, _)| id.as_str());
            let asking: BTreeSet<&str> = quorum.ids().chain(waiting).map(name_of).collect();
            let asks = |id: &String| asking.contains(name_of(id));
            let may_come = |id: &String| asks(id) || !gone.contains(id) && self.is_alive(id);
            let number = recorded.iter().filter(|id| asks(id)).count();
            (number, recorded.iter().filter(|id| may_come(id)).count())
        } else {
            let newest = members.iter().map(|m| m.last_quorum_id).max().unwrap_or(Epoch(0));
            let of_newest = || {
                members
                    .iter()
                    .filter(|m| newest > Epoch(0) && m.last_quorum_id == newest)
            };
            let size = of_newest().map(|m| m.last_world_size as usize).max();
            (of_newest().count(), size.unwrap_or(0))
        };
        if of > 0 && number * 2 <= of {
            return Err(format!(
                "quorum {} of {:?} goes on after a restart with {number} of {of} members of the last quorum",
                quorum.quorum_id,
                quorum.ids().collect::<Vec<_>>()
            ));
        }
        Ok(())
    }

    fn is_alive(&self, id: &str) -> bool {
        self.replicas.iter().flatten().any(|r| r.id == id)
    }

    /// Those that are not in it: they are no majority, and they had the time to come.
    fn nobody_is_missing(&self, quorum: &Quorum, lighthouse: &Lighthouse) -> Result<(), String> {
        let members = &quorum.participants;
        let status = lighthouse.state.status(self.instant());
        let is_spare = |id: &str| quorum.has_spare(id) || status.spares.iter().any(|(s, _)| s == id);
        let waits = |id: &str| status.waiting.iter().any(|(w, _)| w == id);
        let shrinks = members.iter().any(|m| m.shrink_only);
        let others: Vec<&str> = status
            .healthy
            .iter()
            .map(|(id, _)| id.as_str())
            .filter(|id| !(quorum.contains(id) || is_spare(id) || shrinks && waits(id)))
            .collect();
        let told = || (quorum.quorum_id, quorum.ids().collect::<Vec<_>>());
        if members.len() <= others.len() {
            return Err(format!(
                "INV-7: quorum {:?} is no majority: {others:?} are healthy",
                told()
            ));
        }
        // Those that could have formed it without the missing have waited for them.
        let before = self.now.saturating_sub(JOIN_TIMEOUT);
        let asked = lighthouse.heard.asks.values().filter(|at| **at <= before).count();
        if self.now >= JOIN_TIMEOUT && asked >= (self.scenario.min_replicas as usize).max(1) {
            return Ok(());
        }
        // Who leaves may open its stream again in its last moments.
        if self.first_end.is_some() {
            return Ok(());
        }
        let leaves = |id: &str| {
            let of = |r: &Option<Replica>| r.as_ref().is_some_and(|r| r.id == id);
            let slot = self.replicas.iter().position(of);
            slot.is_some_and(|slot| self.trainers(slot).any(|t| t.leaves))
        };
        let knows = lighthouse.heard.knows_last;
        let was_in = |id: &str| knows && self.checks.was_in_last(id);
        let goes_on = quorum.ids().any(was_in);
        let is_coming = |id: &&String| {
            let beats = lighthouse.heard.beats.get(*id);
            let lives = beats.is_some_and(|(first, last)| {
                self.now < *first + JOIN_TIMEOUT && self.now < *last + HEARTBEAT_TIMEOUT
            });
            lives
                && !leaves(id)
                && !lighthouse.heard.known.contains(*id)
                && self.is_alive(id)
                && !quorum.contains(id)
                && !is_spare(id)
        };
        let missing = if goes_on {
            others.iter().find(|id| was_in(id) && !waits(id)).copied()
        } else {
            let coming = lighthouse.heard.beats.keys().find(is_coming).map(String::as_str);
            others.first().copied().or(coming)
        };
        match missing {
            Some(id) => Err(format!(
                "quorum {:?} did not wait for {id}, which is healthy",
                told()
            )),
            None => Ok(()),
        }
    }
}
