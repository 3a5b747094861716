//! The record as text: what stands in the state file and in etcd.

use ftcore::{Epoch, Error, ErrorKind, Result, Step};
use protocol::quorum::{Eviction, Record};
use serde::{Deserialize, Serialize};

/// What older versions did not write has a default.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Saved {
    quorum_id: i64,
    members: Vec<String>,
    #[serde(default)]
    step: i64,
    #[serde(default)]
    lineage: Option<String>,
    #[serde(default)]
    departed: Vec<String>,
    #[serde(default)]
    left: Vec<String>,
    #[serde(default)]
    closes: bool,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    evicted: Vec<SavedEviction>,
}

#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct SavedEviction {
    replica_id: String,
    #[serde(alias = "life")]
    incarnation: String,
    reason: String,
}

/// The text for `record`; `place` names where it is to stand, for the error.
pub(crate) fn encode(record: &Record, place: &str) -> Result<Vec<u8>> {
    let saved = Saved {
        quorum_id: record.quorum_id.signed(),
        members: record.members.clone(),
        step: record.step.0,
        lineage: record.lineage.clone(),
        departed: record.departed.clone(),
        left: record.left.clone(),
        closes: record.closes,
        evicted: record
            .evicted
            .iter()
            .map(|e| SavedEviction {
                replica_id: e.replica_id.clone(),
                incarnation: e.incarnation.clone(),
                reason: e.reason.clone(),
            })
            .collect(),
    };
    serde_json::to_vec(&saved)
        .map_err(|e| Error::new(ErrorKind::Internal, format!("{place}: {e}")).with_source(e))
}

/// The record that stands at `place`. Errors: `Corrupt` if it is not ours.
pub(crate) fn decode(text: &[u8], place: &str) -> Result<Record> {
    let corrupt = |why: String| Error::new(ErrorKind::Corrupt, format!("{place}: {why}"));
    let saved: Saved = serde_json::from_slice(text).map_err(|e| corrupt(e.to_string()).with_source(e))?;
    if saved.quorum_id < 0 || saved.step < 0 {
        return Err(corrupt(format!(
            "quorum_id {} or step {} is negative",
            saved.quorum_id, saved.step
        )));
    }
    Ok(Record {
        quorum_id: Epoch::of_signed(saved.quorum_id),
        step: Step(saved.step),
        lineage: saved.lineage,
        members: saved.members,
        departed: saved.departed,
        left: saved.left,
        closes: saved.closes,
        evicted: saved
            .evicted
            .into_iter()
            .map(|e| Eviction {
                replica_id: e.replica_id,
                incarnation: e.incarnation,
                reason: e.reason,
            })
            .collect(),
    })
}
