//! Runs over a scripted replica, begun.

#![allow(clippy::unwrap_used, reason = "a failure here is a failed test")]

use ftcore::Step;
use oxccl_diloco::{Diloco, DilocoConfig, SliceParameters};
use training_rig::{Nothing, ScriptedReplica};

/// Zeros of these lengths, `p0`, `p1` and so on.
pub(crate) fn params(sizes: &[usize]) -> SliceParameters {
    SliceParameters::new(
        sizes
            .iter()
            .enumerate()
            .map(|(i, n)| (format!("p{i}"), vec![0.0; *n]))
            .collect(),
    )
}

/// The layer of parameter `pN` is N.
pub(crate) fn layer(name: &str) -> usize {
    name[1..].parse().unwrap()
}

/// A run after its initial synchronisation.
pub(crate) fn begun(
    replica: ScriptedReplica,
    sizes: &[usize],
    config: DilocoConfig,
) -> Diloco<ScriptedReplica, SliceParameters> {
    let mut d = Diloco::with_layers(replica, params(sizes), config, &layer).unwrap();
    let reports = d.begin(&mut Nothing).unwrap();
    assert_eq!(
        reports.len(),
        1,
        "the initial synchronisation is a round of its own"
    );
    assert_eq!(d.step(), Step(1));
    d
}
