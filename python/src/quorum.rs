//! What the control plane answers, as Python objects: members, quorums, a rank's part in one, events.

use oxccl::coordination::{self as ours, PushEvent};
use pyo3::prelude::*;

/// A replica as its quorum names it.
#[pyclass(frozen, get_all, module = "oxccl")]
pub(crate) struct Member {
    replica_id: String,
    address: String,
    store_address: String,
    step: i64,
    world_size: u64,
    shrink_only: bool,
    data: String,
    commit_failures: i64,
}

impl From<ours::Member> for Member {
    fn from(m: ours::Member) -> Self {
        Self {
            replica_id: m.replica_id,
            address: m.address,
            store_address: m.store_address,
            step: m.step.0,
            world_size: m.world_size,
            shrink_only: m.shrink_only,
            data: m.data,
            commit_failures: m.commit_failures,
        }
    }
}

#[pymethods]
impl Member {
    fn __repr__(&self) -> String {
        format!("Member({}, step {})", self.replica_id, self.step)
    }
}

/// The replicas that take part in an epoch.
#[pyclass(frozen, get_all, module = "oxccl")]
pub(crate) struct Quorum {
    quorum_id: i64,
    participants: Vec<Py<Member>>,
}

impl Quorum {
    pub(crate) fn of(py: Python<'_>, quorum: ours::Quorum) -> PyResult<Self> {
        let members = quorum.participants.into_iter();
        Ok(Self {
            quorum_id: quorum.quorum_id.signed(),
            participants: members
                .map(|m| Py::new(py, Member::from(m)))
                .collect::<PyResult<_>>()?,
        })
    }
}

#[pymethods]
impl Quorum {
    fn __repr__(&self) -> String {
        format!("Quorum({}, {} members)", self.quorum_id, self.participants.len())
    }
}

/// A rank's part in a quorum.
#[pyclass(frozen, get_all, module = "oxccl")]
pub(crate) struct QuorumResult {
    quorum_id: i64,
    replica_rank: u32,
    replica_world_size: u32,
    store_address: String,
    max_step: i64,
    max_replica_rank: Option<u32>,
    max_world_size: u32,
    heal: bool,
    recover_src_manager_address: String,
    recover_src_replica_rank: Option<u32>,
    recover_dst_replica_ranks: Vec<u32>,
    commit_failures: i64,
    batches_committed: i64,
    replica_ids: Vec<String>,
    lineage: String,
    draining: bool,
    contributor_rank: Option<u32>,
    contributor_world_size: u32,
}

impl From<ours::QuorumResult> for QuorumResult {
    fn from(q: ours::QuorumResult) -> Self {
        Self {
            quorum_id: q.quorum_id.signed(),
            replica_rank: q.replica_rank,
            replica_world_size: q.replica_world_size,
            store_address: q.store_address,
            max_step: q.max_step.0,
            max_replica_rank: q.max_replica_rank,
            max_world_size: q.max_world_size,
            heal: q.heal,
            recover_src_manager_address: q.recover_src_manager_address,
            recover_src_replica_rank: q.recover_src_replica_rank,
            recover_dst_replica_ranks: q.recover_dst_replica_ranks,
            commit_failures: q.commit_failures,
            batches_committed: q.batches_committed,
            replica_ids: q.replica_ids,
            lineage: q.lineage,
            draining: q.draining,
            contributor_rank: q.contributor_rank,
            contributor_world_size: q.contributor_world_size,
        }
    }
}

#[pymethods]
impl QuorumResult {
    fn __repr__(&self) -> String {
        format!(
            "QuorumResult({}, rank {} of {}, step {}{})",
            self.quorum_id,
            self.replica_rank,
            self.replica_world_size,
            self.max_step,
            if self.heal { ", heals" } else { "" }
        )
    }
}

/// What a manager server tells a rank without being asked.
#[pyclass(frozen, get_all, module = "oxccl")]
#[derive(Clone)]
pub(crate) struct Event {
    kind: &'static str,
    quorum_id: Option<i64>,
    reason: String,
    departed: Vec<String>,
}

impl Event {
    /// `None` for an event of a kind that is newer than this module.
    pub(crate) fn of(event: PushEvent) -> Option<Self> {
        match event {
            PushEvent::AbortEpoch {
                quorum_id,
                reason,
                departed,
            } => Some(Self {
                kind: "abort_epoch",
                quorum_id: Some(quorum_id.signed()),
                reason,
                departed,
            }),
            PushEvent::Kill { reason } => Some(Self {
                kind: "kill",
                quorum_id: None,
                reason,
                departed: Vec::new(),
            }),
            _ => None,
        }
    }
}

#[pymethods]
impl Event {
    fn __repr__(&self) -> String {
        format!("Event({}, {:?})", self.kind, self.reason)
    }
}
