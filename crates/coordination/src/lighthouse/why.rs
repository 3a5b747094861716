//! What a job waits for, on whom, since when, and what would free it: read from the lighthouse's status, for `oxccl why` and the dashboard alike (pure).

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use super::status::LighthouseStatus;

/// A step that lasts this many times as long as the last ones did is worth a word…
const SLOW: u64 = 5;
/// … and not before this.
const SLOW_MS: u64 = 10_000;

/// Why a job does not go on, or that it does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Why {
    /// The job waits.
    pub stuck: bool,
    /// One sentence.
    pub text: String,
    /// The replicas that it waits for, as far as the lighthouse knows them.
    pub replicas: Vec<String>,
    /// Milliseconds since it waits; since the last quorum if nothing is stuck.
    pub since_ms: Option<u64>,
    /// What would free it; empty if nothing is stuck.
    pub frees: String,
    /// What else is worth knowing, one sentence each.
    pub notes: Vec<String>,
}

fn time(ms: u64) -> String {
    match ms {
        0..10_000 => format!("{:.1} s", ms as f64 / 1e3),
        10_000..600_000 => format!("{} s", ms / 1000),
        _ => format!("{} min", ms / 60_000),
    }
}

fn listed(ids: &[String]) -> String {
    match ids {
        [] => "none".to_string(),
        [one] => one.clone(),
        [first @ .., last] if first.len() < 6 => format!("{} and {last}", first.join(", ")),
        [first, ..] => format!("{first} and {} others", ids.len() - 1),
    }
}

/// "1 replica", "3 replicas".
fn replicas(n: usize) -> String {
    let s = if n == 1 { "" } else { "s" };
    format!("{n} replica{s}")
}

impl LighthouseStatus {
    /// What the job waits for, on whom, since when, and what would free it: what `oxccl why` and the dashboard say.
    pub fn explain(&self) -> Why {
        explain(self)
    }
}

fn explain(s: &LighthouseStatus) -> Why {
    if !s.leads {
        let frees = match &s.leader {
            Some(leader) => format!("ask the leading lighthouse, {leader}"),
            None => "start another lighthouse of the job, or see whether etcd answers".to_string(),
        };
        return Why {
            stuck: s.leader.is_none(),
            text: format!("this lighthouse does not lead its job: {}", s.reason),
            replicas: Vec::new(),
            since_ms: None,
            frees,
            notes: Vec::new(),
        };
    }
    let mut why = if is_idle(s) { at_work(s) } else { waits(s) };
    why.notes.extend(notes(s));
    why
}

/// No replica asks for a quorum. Calls may wait all the same: those of spares, which ask for none. An older version has no verdict.
fn is_idle(s: &LighthouseStatus) -> bool {
    s.verdict == "idle" || s.waiting.is_empty()
}

/// Healthy replicas that have not asked for the next quorum.
fn not_asking(s: &LighthouseStatus) -> Vec<String> {
    let asking: HashSet<&str> = s.waiting.iter().map(|w| w.replica_id.as_str()).collect();
    let healthy = s.healthy.iter().map(|h| &h.replica_id);
    healthy
        .filter(|id| !asking.contains(id.as_str()))
        .cloned()
        .collect()
}

/// All members are in their step, or none takes part.
fn at_work(s: &LighthouseStatus) -> Why {
    let healthy: HashSet<&str> = s.healthy.iter().map(|h| h.replica_id.as_str()).collect();
    let members: Vec<String> = s.participants.iter().map(|p| p.replica_id.clone()).collect();
    let is_present = |id: &&String| healthy.contains(id.as_str());
    let present: Vec<String> = members.iter().filter(is_present).cloned().collect();
    let step = s.participants.iter().map(|p| p.step).max().unwrap_or(0);
    let (Some(formed), false) = (s.formed_ms, present.is_empty()) else {
        return none_there(s, &members);
    };
    let pace = s.pace_ms.unwrap_or(0);
    let slow = formed > SLOW_MS.max(pace.saturating_mul(SLOW));
    if let Some(aborted) = &s.aborted {
        return Why {
            stuck: true,
            text: format!(
                "quorum {} was ended ({aborted}), and none of its {} members has asked for a new one",
                s.quorum_id,
                members.len()
            ),
            since_ms: Some(formed),
            frees: format!(
                "{} must come out of the step that failed; if one stays silent, `oxccl replica evict` lets the others go on",
                listed(&present)
            ),
            replicas: present,
            notes: Vec::new(),
        };
    }
    if slow {
        return Why {
            stuck: true,
            text: format!(
                "step {step} has run for {} on {} ({}); the steps before took {}",
                time(formed),
                replicas(present.len()),
                listed(&present),
                time(pace)
            ),
            since_ms: Some(formed),
            frees: "the members are inside the step, where the lighthouse does not see: send them SIGUSR2 and compare their flight records with \
                    `oxccl trace merge`; it may also be long on purpose (an evaluation, a checkpoint)"
                .to_string(),
            replicas: present,
            notes: Vec::new(),
        };
    }
    // Those that came with the highest step have committed the one before it and hold this state.
    let holders = s.participants.iter().filter(|p| p.step == step).count();
    Why {
        stuck: false,
        text: match step {
            0 => format!(
                "nothing is stuck: the first step began {} ago with {}",
                time(formed),
                replicas(members.len())
            ),
            _ => format!(
                "nothing is stuck: step {step} committed {} ago by {}",
                time(formed),
                replicas(holders)
            ),
        },
        replicas: Vec::new(),
        since_ms: Some(formed),
        frees: String::new(),
        notes: Vec::new(),
    }
}

/// No quorum yet, or all members of the last one are gone.
fn none_there(s: &LighthouseStatus, members: &[String]) -> Why {
    let left = |id: &String| s.recent.iter().any(|r| &r.replica_id == id && r.what == "left");
    if !members.is_empty() && members.iter().all(left) {
        return Why {
            stuck: false,
            text: format!(
                "the run is over: all {} of quorum {} have left in order",
                replicas(members.len()),
                s.quorum_id
            ),
            replicas: Vec::new(),
            since_ms: s.formed_ms,
            frees: String::new(),
            notes: Vec::new(),
        };
    }
    let gone = !members.is_empty();
    Why {
        stuck: true,
        text: match (gone, s.healthy.len()) {
            (true, _) => format!(
                "all members of quorum {} are gone ({})",
                s.quorum_id,
                listed(members)
            ),
            (false, 0) => "no replica has asked for a quorum, and none sends heartbeats".to_string(),
            (false, n) => format!("{} are there, and none has asked for a quorum", replicas(n)),
        },
        replicas: if gone { members.to_vec() } else { not_asking(s) },
        since_ms: s.formed_ms.filter(|_| gone),
        frees: match gone {
            true => "start the replicas again".to_string(),
            false => format!(
                "start the replicas with this lighthouse's address; {} at least",
                replicas(s.min_replicas.max(1))
            ),
        },
        notes: Vec::new(),
    }
}

/// Calls wait for a quorum.
fn waits(s: &LighthouseStatus) -> Why {
    let since = s.waiting.iter().map(|w| w.waiting_ms).max();
    let missing = not_asking(s);
    let asking = s.waiting.len();
    let silent = |ids: &[String]| match ids {
        [] => String::new(),
        ids => format!(
            "; {} must finish the step and ask, or be put out (`oxccl replica evict ID`)",
            listed(ids)
        ),
    };
    // Members that come a little later are no fault.
    let short = since.unwrap_or(0) < SLOW_MS.max(s.pace_ms.unwrap_or(0).saturating_mul(SLOW));
    // A newer version may know more words than these.
    let (frees, moment) = match s.verdict.as_str() {
        "too_few" => {
            let lack = s.min_replicas.saturating_sub(asking).max(1);
            let more = lack.saturating_sub(missing.len());
            let start = format!("start {} more, or a lighthouse with a smaller --min-replicas", replicas(more));
            let wait = silent(&missing);
            match more {
                0 => (wait.trim_start_matches("; ").to_string(), short),
                _ => (start + &wait, false),
            }
        }
        "initial" => (
            "start the rest of the replicas, or a lighthouse with a smaller --initial-replicas".to_string(),
            false,
        ),
        "no_majority" | "newcomers" => (silent(&missing).trim_start_matches("; ").to_string(), short),
        "goes_back" => (
            "start a replica that has the recorded state (its checkpoint of that step); if it is lost for good, restart the lighthouse with \
             --accept-rollback: the job then goes on from the earlier step"
                .to_string(),
            false,
        ),
        "recovers" => (
            format!(
                "the members of the last quorum must ask; without them it goes on after {}, or at once with --accept-rollback",
                time(s.heartbeat_timeout_ms.saturating_add(s.join_timeout_ms))
            ),
            false,
        ),
        "wait" => (
            format!(
                "{}; the others go on without them after {} (--join-timeout-ms)",
                silent(&missing).trim_start_matches("; "),
                time(s.join_timeout_ms)
            ),
            short,
        ),
        // It forms at this very moment.
        _ => (String::new(), true),
    };
    let who: Vec<String> = s.waiting.iter().map(|w| w.replica_id.clone()).collect();
    let waited = time(since.unwrap_or(0));
    if moment {
        return Why {
            stuck: false,
            text: format!(
                "nothing is stuck: {} asked for the next quorum, the first {waited} ago ({})",
                replicas(asking),
                s.reason
            ),
            replicas: missing,
            since_ms: since,
            frees: String::new(),
            notes: Vec::new(),
        };
    }
    Why {
        stuck: true,
        text: format!(
            "{} wait{} for a quorum since {waited} ({}): {}",
            replicas(asking),
            if asking == 1 { "s" } else { "" },
            listed(&who),
            s.reason
        ),
        replicas: missing,
        since_ms: since,
        frees,
        notes: Vec::new(),
    }
}

fn notes(s: &LighthouseStatus) -> Vec<String> {
    let mut notes = Vec::new();
    for r in &s.recent {
        let (id, reason, ago) = (&r.replica_id, &r.reason, time(r.ago_ms));
        notes.push(match r.what.as_str() {
            "refused" => format!("{id} was refused {ago} ago: {reason}"),
            "left" => format!("{id} left {ago} ago: {reason}"),
            _ => format!("{id} is out since {ago}: {reason}"),
        });
    }
    if s.aborted.is_some() && !is_idle(s) {
        notes.extend(
            s.aborted
                .iter()
                .map(|why| format!("quorum {} was ended: {why}", s.quorum_id)),
        );
    }
    for spare in &s.spares {
        let what = if spare.fetching {
            "fetches the state"
        } else {
            "waits for a quorum to fetch the state from"
        };
        notes.push(format!("{} is far behind and {what}", spare.replica_id));
    }
    for (orders, what) in [
        (&s.draining, "leaves after its step"),
        (&s.evicted, "was put out by an operator"),
    ] {
        for order in orders {
            let reason = if order.reason.is_empty() {
                String::new()
            } else {
                format!(": {}", order.reason)
            };
            notes.push(format!("{} {what}{reason}", order.replica_id));
        }
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::super::status::{HealthyReplica, ParticipantStatus, SpareStatus, WaitingReplica};
    use super::*;

    #[test]
    fn a_spare_that_waits_does_not_hide_that_the_members_hang() {
        let replica_id = |id: &str| id.to_string();
        let status = LighthouseStatus {
            leads: true,
            verdict: "idle".into(),
            participants: ["a", "b"].map(replica_id).map(participant).into(),
            healthy: ["a", "b"].map(replica_id).map(healthy).into(),
            waiting: vec![WaitingReplica {
                replica_id: replica_id("c"),
                waiting_ms: 1000,
            }],
            spares: vec![SpareStatus {
                replica_id: replica_id("c"),
                fetching: false,
            }],
            formed_ms: Some(3_600_000),
            pace_ms: Some(1000),
            ..LighthouseStatus::default()
        };
        let why = status.explain();
        assert!(why.stuck, "{why:?}");
        assert_eq!(why.replicas, ["a", "b"]);
        assert!(why.notes.iter().any(|n| n.contains("c is far behind")), "{why:?}");
        // A moment ago it was none.
        let before = LighthouseStatus {
            formed_ms: Some(500),
            ..status
        };
        assert!(!before.explain().stuck);
    }

    fn participant(replica_id: String) -> ParticipantStatus {
        ParticipantStatus {
            replica_id,
            step: 7,
            ..ParticipantStatus::default()
        }
    }

    fn healthy(replica_id: String) -> HealthyReplica {
        HealthyReplica {
            replica_id,
            heartbeat_age_ms: 0,
        }
    }
}
