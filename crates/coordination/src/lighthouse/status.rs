//! The state of a lighthouse as others see it: under `GET /status`, in the dashboard and in the metrics.

use protocol::quorum::{Departure, Fate, Happening, Listed, Moment, Status, Totals};
use serde::{Deserialize, Serialize};

use super::actor::Counters;
use super::frontend::Frontend;
use super::rates::Throughput;

/// The state of a lighthouse, as `GET /status` gives it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LighthouseStatus {
    /// The present epoch; the seed before the first quorum.
    pub quorum_id: i64,
    /// The members of the present quorum.
    pub participants: Vec<ParticipantStatus>,
    /// Who counts as healthy.
    pub healthy: Vec<HealthyReplica>,
    /// Whose calls wait for a quorum.
    pub waiting: Vec<WaitingReplica>,
    /// Who has an open event stream.
    pub attached: Vec<String>,
    /// Who is far behind and fetches the state outside the group, or waits for a quorum to fetch from.
    #[serde(default)]
    pub spares: Vec<SpareStatus>,
    /// Whom an operator told to leave after the step.
    #[serde(default)]
    pub draining: Vec<OrderedReplica>,
    /// Whom an operator put out of the job; refused until it is started again.
    #[serde(default)]
    pub evicted: Vec<OrderedReplica>,
    /// Why there is no new quorum.
    pub reason: String,
    /// Why the present epoch was aborted, if it was.
    pub aborted: Option<String>,
    /// False for a lighthouse that leaves its job to another one: it knows none of the above.
    #[serde(default = "leads_alone")]
    pub leads: bool,
    /// The leading lighthouse's address, if this one leaves the job to it and knows it.
    #[serde(default)]
    pub leader: Option<String>,
    /// What the rules say of a new quorum: `idle`, `too_few`, `no_majority`, `initial`, `newcomers`, `goes_back`, `recovers`, `wait`, `form`;
    /// empty from a lighthouse of an older version.
    #[serde(default)]
    pub verdict: String,
    /// Milliseconds since the last quorum was delivered; none before the first one of this lighthouse.
    #[serde(default)]
    pub formed_ms: Option<u64>,
    /// How many milliseconds passed from one quorum to the next, of late.
    #[serde(default)]
    pub pace_ms: Option<u64>,
    /// What became of replicas that have not asked again since, oldest first; 16 at most.
    #[serde(default)]
    pub recent: Vec<RecentReplica>,
    /// What happened of late, oldest first; 64 at most.
    #[serde(default)]
    pub timeline: Vec<TimelineEvent>,
    /// The least number of members.
    #[serde(default)]
    pub min_replicas: usize,
    /// How long a quorum waits for healthy replicas that have not asked yet.
    #[serde(default)]
    pub join_timeout_ms: u64,
    /// After how long without a sign of life a replica is dead.
    #[serde(default)]
    pub heartbeat_timeout_ms: u64,
}

/// What a lighthouse of an older version does.
fn leads_alone() -> bool {
    true
}

/// A member of the present quorum.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParticipantStatus {
    /// Its id.
    pub replica_id: String,
    /// Its manager server.
    pub address: String,
    /// The step it came with.
    pub step: i64,
    /// Its number of ranks.
    pub world_size: u64,
    /// The failures in a row it came with.
    pub commit_failures: i64,
}

/// A replica that counts as healthy.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HealthyReplica {
    /// Its id.
    pub replica_id: String,
    /// Milliseconds since its last sign of life.
    pub heartbeat_age_ms: u64,
}

/// A replica that waits for a quorum.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitingReplica {
    /// Its id.
    pub replica_id: String,
    /// Milliseconds since it asked.
    pub waiting_ms: u64,
}

/// A replica that is far behind, and no member.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpareStatus {
    /// Its id.
    pub replica_id: String,
    /// It fetches the state; otherwise it waits for the next quorum, which tells it where from.
    pub fetching: bool,
}

/// A replica to which an operator gave an order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OrderedReplica {
    /// Its id.
    pub replica_id: String,
    /// Why, in the operator's words.
    pub reason: String,
}

/// What became of a replica.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecentReplica {
    /// Its id.
    pub replica_id: String,
    /// `gone`, `left` (in order) or `refused` (its call for a quorum).
    pub what: String,
    /// Why.
    pub reason: String,
    /// Milliseconds since then.
    pub ago_ms: u64,
}

/// Something that happened to the job.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimelineEvent {
    /// Counts them, from 1, since the lighthouse began to lead.
    pub number: u64,
    /// Milliseconds since then.
    pub ago_ms: u64,
    /// `quorum` (a new epoch), `heal`, `gone`, `left`, `refused` or `aborted` (an epoch, after a member's report).
    pub what: String,
    /// The replica that heals, is gone, left or was refused; empty for the others.
    pub replica_id: String,
    /// Why it is gone, left, was refused or was aborted.
    pub reason: String,
    /// The epoch that began or was aborted.
    pub quorum_id: Option<i64>,
    /// The step of the quorum, or of the state that the replica fetches.
    pub step: Option<i64>,
    /// The number of members of the new quorum.
    pub size: usize,
    /// The first of the members that the quorum before did not have, and their number.
    pub joined: Vec<String>,
    /// See `joined`.
    pub joined_count: usize,
    /// The first of the members of the quorum before that this one does not have, and their number.
    pub without: Vec<String>,
    /// See `without`.
    pub without_count: usize,
    /// From whom the replica heals.
    pub from: Vec<String>,
    /// It heals as a spare, outside the group.
    pub outside: bool,
}

impl From<Moment> for TimelineEvent {
    fn from(moment: Moment) -> Self {
        let mut event = Self {
            number: moment.number,
            ago_ms: u64::try_from(moment.ago.as_millis()).unwrap_or(u64::MAX),
            ..Self::default()
        };
        let what = match moment.what {
            Happening::Quorum {
                quorum_id,
                step,
                size,
                joined,
                without,
            } => {
                (event.quorum_id, event.step, event.size) = (Some(quorum_id.signed()), Some(step.0), size);
                let told = |listed: Listed| (listed.first, listed.count);
                (event.joined, event.joined_count) = told(joined);
                (event.without, event.without_count) = told(without);
                "quorum"
            }
            Happening::Heal {
                replica_id,
                step,
                from,
                outside,
                ..
            } => {
                (event.replica_id, event.step) = (replica_id, Some(step.0));
                (event.from, event.outside) = (from, outside);
                "heal"
            }
            Happening::Gone { replica_id, reason } => {
                (event.replica_id, event.reason) = (replica_id, reason);
                "gone"
            }
            Happening::Left { replica_id, reason } => {
                (event.replica_id, event.reason) = (replica_id, reason);
                "left"
            }
            Happening::Refused { replica_id, reason } => {
                (event.replica_id, event.reason) = (replica_id, reason);
                "refused"
            }
            Happening::Aborted { quorum_id, reason } => {
                (event.quorum_id, event.reason) = (Some(quorum_id.signed()), reason);
                "aborted"
            }
        };
        event.what = what.to_string();
        event
    }
}

impl From<Departure> for RecentReplica {
    fn from(d: Departure) -> Self {
        let what = match d.fate {
            Fate::Gone => "gone",
            Fate::Left => "left",
            Fate::Refused => "refused",
        };
        Self {
            replica_id: d.replica_id,
            what: what.to_string(),
            reason: d.reason,
            ago_ms: u64::try_from(d.ago.as_millis()).unwrap_or(u64::MAX),
        }
    }
}

impl From<Status> for LighthouseStatus {
    fn from(s: Status) -> Self {
        let ordered = |replicas: Vec<(String, String)>| {
            let one = |(replica_id, reason)| OrderedReplica { replica_id, reason };
            replicas.into_iter().map(one).collect()
        };
        let ms = |d: std::time::Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
        Self {
            quorum_id: s.quorum_id.signed(),
            participants: s
                .participants
                .into_iter()
                .map(|m| ParticipantStatus {
                    replica_id: m.replica_id,
                    address: m.address,
                    step: m.step.0,
                    world_size: m.world_size,
                    commit_failures: m.commit_failures,
                })
                .collect(),
            healthy: s
                .healthy
                .into_iter()
                .map(|(replica_id, age)| HealthyReplica {
                    replica_id,
                    heartbeat_age_ms: ms(age),
                })
                .collect(),
            waiting: s
                .waiting
                .into_iter()
                .map(|(replica_id, age)| WaitingReplica {
                    replica_id,
                    waiting_ms: ms(age),
                })
                .collect(),
            attached: s.attached,
            spares: s
                .spares
                .into_iter()
                .map(|(replica_id, fetching)| SpareStatus { replica_id, fetching })
                .collect(),
            draining: ordered(s.draining),
            evicted: ordered(s.evicted),
            reason: s.reason,
            aborted: s.aborted,
            leads: true,
            leader: None,
            verdict: s.verdict.to_string(),
            formed_ms: s.formed.map(ms),
            pace_ms: s.pace.map(ms),
            recent: s.recent.into_iter().map(RecentReplica::from).collect(),
            timeline: s.timeline.into_iter().map(TimelineEvent::from).collect(),
            min_replicas: s.rules.min_replicas,
            join_timeout_ms: ms(s.rules.join_timeout),
            heartbeat_timeout_ms: ms(s.rules.heartbeat_timeout),
        }
    }
}

/// A look at a lighthouse.
#[derive(Debug, Default)]
pub(super) struct Look {
    pub(super) status: LighthouseStatus,
    pub(super) counters: Counters,
    pub(super) totals: Totals,
    pub(super) throughput: Vec<Throughput>,
}

/// What this lighthouse knows; `None` while it shuts down, or changes its part.
pub(super) async fn known(frontend: &Frontend) -> Option<Look> {
    let (leader, leads) = frontend.standing();
    let lighthouse = match frontend.leading() {
        Ok(lighthouse) => lighthouse,
        Err(error) => {
            let status = LighthouseStatus {
                reason: error.message().to_string(),
                leads,
                leader,
                ..LighthouseStatus::default()
            };
            return Some(Look {
                status,
                ..Look::default()
            });
        }
    };
    let (status, counters, throughput) = lighthouse.status().await?;
    Some(Look {
        totals: status.totals,
        status: LighthouseStatus::from(status),
        counters,
        throughput,
    })
}
