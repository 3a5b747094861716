//! What the lighthouse shows over HTTP on its port: a page that needs no network, its JSON, and metrics. Nothing here
//! changes anything (L38).

use std::fmt::Write as _;

use axum::Router;
use axum::http::{StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;
use serde::{Deserialize, Serialize};
use tonic::service::Routes;

use super::actor::Counters;
use super::frontend::Frontend;
use crate::serve::unknown;
use crate::wire::{MAX_MESSAGE_BYTES, oxccl, torchft};
use protocol::quorum::{Departure, Fate, Status};

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
            quorum_id: s.quorum_id,
            participants: s
                .participants
                .into_iter()
                .map(|m| ParticipantStatus {
                    replica_id: m.replica_id,
                    address: m.address,
                    step: m.step,
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
            min_replicas: s.rules.min_replicas,
            join_timeout_ms: ms(s.rules.join_timeout),
            heartbeat_timeout_ms: ms(s.rules.heartbeat_timeout),
        }
    }
}

/// gRPC and pages in one router.
pub(crate) fn routes(lighthouse: Frontend) -> Router {
    let torchft = torchft::lighthouse_service_server::LighthouseServiceServer::new(lighthouse.clone())
        .max_decoding_message_size(MAX_MESSAGE_BYTES);
    let ours = oxccl::oxccl_lighthouse_server::OxcclLighthouseServer::new(lighthouse.clone())
        .max_decoding_message_size(MAX_MESSAGE_BYTES);
    let for_metrics = lighthouse.clone();
    Routes::new(torchft)
        .add_service(ours)
        .into_axum_router()
        .route("/", get(|| async { Html(PAGE) }))
        .route("/status", get(move || status(lighthouse.clone())))
        .route("/metrics", get(move || metrics(for_metrics.clone())))
        .fallback(unknown)
}

/// What this lighthouse knows; `None` while it shuts down, or changes its part.
async fn known(frontend: &Frontend) -> Option<(LighthouseStatus, Counters)> {
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
            return Some((status, Counters::default()));
        }
    };
    let (status, counters) = lighthouse.status().await?;
    Some((LighthouseStatus::from(status), counters))
}

async fn status(frontend: Frontend) -> Response {
    let Some((status, _)) = known(&frontend).await else {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    };
    match serde_json::to_string(&status) {
        Ok(text) => (
            [
                (header::CONTENT_TYPE, "application/json"),
                (header::CACHE_CONTROL, "no-store"),
            ],
            text,
        )
            .into_response(),
        Err(e) => (StatusCode::INTERNAL_SERVER_ERROR, e.to_string()).into_response(),
    }
}

async fn metrics(frontend: Frontend) -> Response {
    let Some((status, counters)) = known(&frontend).await else {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    };
    (
        [(header::CONTENT_TYPE, "text/plain; version=0.0.4")],
        metrics_text(&status, counters),
    )
        .into_response()
}

fn metrics_text(status: &LighthouseStatus, c: Counters) -> String {
    let count = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
    let gauges = [
        ("quorum_id", "The present epoch.", status.quorum_id),
        (
            "participants",
            "Members of the present quorum.",
            count(status.participants.len()),
        ),
        (
            "healthy_replicas",
            "Replicas that count as healthy.",
            count(status.healthy.len()),
        ),
        (
            "waiting_replicas",
            "Replicas whose calls wait for a quorum.",
            count(status.waiting.len()),
        ),
        (
            "attached_replicas",
            "Replicas with an open event stream.",
            count(status.attached.len()),
        ),
        (
            "spare_replicas",
            "Replicas that fetch the state outside the group.",
            count(status.spares.len()),
        ),
        (
            "draining_replicas",
            "Replicas that an operator told to leave after their step.",
            count(status.draining.len()),
        ),
        (
            "evicted_replicas",
            "Replicas that an operator put out of the job.",
            count(status.evicted.len()),
        ),
        (
            "epoch_aborted",
            "1 if the present epoch was aborted.",
            i64::from(status.aborted.is_some()),
        ),
        (
            "leads",
            "1 if this lighthouse leads its job.",
            i64::from(status.leads),
        ),
    ];
    let counters = [
        ("joins_total", "Calls for a quorum.", c.joins),
        (
            "joins_withdrawn_total",
            "Calls that ended before their quorum formed.",
            c.withdrawn,
        ),
        (
            "joins_rejected_total",
            "Calls that were answered with an error.",
            c.rejected,
        ),
        ("quorums_total", "Quorums delivered.", c.quorums),
        ("epochs_total", "Quorums that began a new epoch.", c.epochs),
        (
            "heartbeats_total",
            "Heartbeats of replicas without a stream.",
            c.heartbeats,
        ),
        ("abort_pushes_total", "Abort events pushed to replicas.", c.pushes),
    ];
    let mut text = String::new();
    for (name, help, value) in gauges {
        let _ = write!(
            text,
            "# HELP oxccl_lighthouse_{name} {help}\n# TYPE oxccl_lighthouse_{name} gauge\noxccl_lighthouse_{name} {value}\n"
        );
    }
    for (name, help, value) in counters {
        let _ = write!(
            text,
            "# HELP oxccl_lighthouse_{name} {help}\n# TYPE oxccl_lighthouse_{name} counter\noxccl_lighthouse_{name} {value}\n"
        );
    }
    text
}

/// Ids come from the network: the page writes them as text, never as markup.
const PAGE: &str = include_str!("page.html");
