//! What the lighthouse counts, for Prometheus: its numbers under `/metrics`, and under `/targets` where the replicas' are.

use serde::Serialize;

use super::status::{LighthouseStatus, Look};
use crate::exposition::{Exposition, Kind};
use Kind::{Counter, Gauge};

/// `listeners` and `events`: dashboards that are open, and what they were told.
pub(super) fn text(look: &Look, (listeners, events): (usize, u64)) -> String {
    let (s, c, totals) = (&look.status, &look.counters, &look.totals);
    let count = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
    let seconds = |ms: Option<u64>| ms.map(|ms| ms as f64 / 1e3);
    let mut text = Exposition::default();
    let mut one = |kind: Kind, name: &str, help: &str, value: u64| {
        text.one(kind, &format!("oxccl_lighthouse_{name}"), help, value);
    };
    // Before the first quorum the id is where epochs will begin, and belongs to none.
    let epoch = if s.participants.is_empty() { 0 } else { s.quorum_id };
    let epoch = u64::try_from(epoch).unwrap_or(0);
    for (name, help, value) in [
        (
            "quorum_id",
            "The present epoch; 0 before the first quorum.",
            epoch,
        ),
        (
            "participants",
            "Members of the present quorum.",
            count(s.participants.len()),
        ),
        (
            "healthy_replicas",
            "Replicas that count as healthy.",
            count(s.healthy.len()),
        ),
        (
            "waiting_replicas",
            "Replicas whose calls wait for a quorum.",
            count(s.waiting.len()),
        ),
        (
            "attached_replicas",
            "Replicas with an open event stream.",
            count(s.attached.len()),
        ),
        (
            "spare_replicas",
            "Replicas that fetch the state outside the group.",
            count(s.spares.len()),
        ),
        (
            "draining_replicas",
            "Replicas that an operator told to leave after their step.",
            count(s.draining.len()),
        ),
        (
            "evicted_replicas",
            "Replicas that an operator put out of the job.",
            count(s.evicted.len()),
        ),
        (
            "epoch_aborted",
            "1 if the present epoch was aborted.",
            u64::from(s.aborted.is_some()),
        ),
        ("leads", "1 if this lighthouse leads its job.", u64::from(s.leads)),
        (
            "stuck",
            "1 if the job waits for something, as `oxccl why` says.",
            u64::from(s.explain().stuck),
        ),
        ("listeners", "Dashboards that are open.", count(listeners)),
    ] {
        one(Gauge, name, help, value);
    }
    for (name, help, value) in [
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
        (
            "heals_total",
            "Replicas that were told to fetch their state from others.",
            totals.heals,
        ),
        (
            "deaths_total",
            "Replicas that were out without having left.",
            totals.deaths,
        ),
        ("leaves_total", "Replicas that left in order.", totals.leaves),
        (
            "reported_aborts_total",
            "Epochs that ended early because a member reported a failure.",
            totals.aborts,
        ),
        (
            "events_total",
            "Pictures of the state that open dashboards were sent.",
            events,
        ),
    ] {
        one(Counter, name, help, value);
    }
    let step = s.participants.iter().map(|p| p.step).max();
    for (name, help, value) in [
        (
            "step",
            "The highest step of a member.",
            step.map(|step| step as f64),
        ),
        (
            "quorum_age_seconds",
            "Time since the last quorum was delivered.",
            seconds(s.formed_ms),
        ),
        (
            "step_seconds",
            "Time from one quorum to the next, of late.",
            seconds(s.pace_ms),
        ),
        (
            "longest_wait_seconds",
            "How long the replica that waits longest for a quorum has waited.",
            seconds(s.waiting.iter().map(|w| w.waiting_ms).max()),
        ),
    ] {
        if let Some(value) = value {
            text.one(Gauge, &format!("oxccl_lighthouse_{name}"), help, value);
        }
    }
    text.into_text()
}

/// A manager server, in the form of Prometheus's discovery over HTTP.
#[derive(Serialize)]
pub(super) struct Target {
    targets: [String; 1],
    labels: Labels,
}

#[derive(Serialize)]
struct Labels {
    #[serde(rename = "__scheme__")]
    scheme: String,
}

/// The members' manager servers.
pub(super) fn targets(status: &LighthouseStatus) -> Vec<Target> {
    let urls = status
        .participants
        .iter()
        .filter_map(|p| p.address.split_once("://"));
    urls.map(|(scheme, address)| Target {
        targets: [address.trim_end_matches('/').to_string()],
        labels: Labels {
            scheme: scheme.to_string(),
        },
    })
    .collect()
}
