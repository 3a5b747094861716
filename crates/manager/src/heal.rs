//! Both ends of healing: the snapshot that a source publishes, and the replica that takes a state over.

use std::time::{Duration, Instant};

use checkpoint::{HttpTransport, Snapshot, StateDict};
use coordination::{ManagerClient, QuorumResult};
use ftcore::{Error, Result, time_left};
use protocol::Lineage;

use crate::replica::{Healed, State};

/// Offers the state of this step to the replicas that heal from here.
pub(crate) fn publish(
    transport: &HttpTransport,
    lineage: &Lineage,
    answer: &QuorumResult,
    state: &dyn State,
) -> Result<()> {
    let mut dict = StateDict::new();
    state.save(&mut dict)?;
    dict.set_metadata("manager.lineage", lineage.as_str());
    transport.publish(Snapshot::new(answer.max_step, answer.quorum_id, &dict)?);
    Ok(())
}

/// Takes the state over from the source that `answer` names, and says which history it has.
pub(crate) fn heal(
    replica_id: &str,
    group_rank: u32,
    answer: &QuorumResult,
    state: &mut dyn State,
    deadline: Instant,
) -> Result<(Healed, Lineage)> {
    fetch_and_load(group_rank, answer, state, deadline).map_err(|e| {
        let source = answer
            .recover_src_replica_rank
            .and_then(|r| answer.replica_ids.get(r as usize));
        let source = source.map_or(answer.recover_src_manager_address.as_str(), String::as_str);
        let text = format!("replica '{replica_id}' cannot take over the state of replica '{source}': {e}");
        Error::new(e.kind(), text).with_op("heal").with_source(e)
    })
}

fn fetch_and_load(
    group_rank: u32,
    answer: &QuorumResult,
    state: &mut dyn State,
    deadline: Instant,
) -> Result<(Healed, Lineage)> {
    let begun = Instant::now();
    let source = ManagerClient::connect(&answer.recover_src_manager_address, deadline)?;
    loop {
        let url = source.checkpoint_metadata(group_rank, deadline)?;
        let (epoch, dict) = checkpoint::fetch(&[url], answer.max_step, deadline)?;
        if epoch != answer.quorum_id {
            // A snapshot of the same step from an earlier attempt: the newer one is being made right now.
            if time_left(deadline).is_zero() {
                return Err(Error::timeout(format!(
                    "the source serves step {} of epoch {epoch}, not of epoch {}",
                    answer.max_step, answer.quorum_id
                )));
            }
            std::thread::park_timeout(Duration::from_millis(5));
            continue;
        }
        state.load(&dict)?;
        let lineage = dict
            .metadata()
            .get("manager.lineage")
            .cloned()
            .unwrap_or_default();
        let healed = Healed {
            source: answer.recover_src_replica_rank,
            bytes: dict.total_bytes(),
            took: begun.elapsed(),
        };
        return Ok((healed, Lineage::from_peer(lineage)));
    }
}
