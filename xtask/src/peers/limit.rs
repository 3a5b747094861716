//! What the machine could do at best, measured in the same session by the `oxccl` that is compared, as `xtask` itself is not optimised.
//!
//! What crosses between ranks ([`Operation::crossing`](super::operations::Operation::crossing)) is copied at least once. The
//! limit is that many bytes at the rate at which all ranks' cores copy at the same time, plus one hand-over of a cache line
//! (that the data are there; that they have been taken may be said later), where every rank has a core of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use serde::Deserialize;

use super::measure;
use super::operations::Point;

/// Up to so many bytes an operation is short.
const SHORT: u64 = 4_096;

/// What `oxccl bench-limit` says.
#[derive(Deserialize)]
struct Measured {
    cores: u32,
    hand_over_us: Option<f64>,
    copies: Vec<Copies>,
}

#[derive(Deserialize)]
struct Copies {
    bytes: u64,
    /// Of each thread.
    bytes_per_second: f64,
}

/// What the machine could do in one round, in microseconds.
#[derive(Default)]
pub(super) struct Limits {
    /// A hand-over of a cache line between two cores.
    pub(super) hand_over: Option<f64>,
    /// Of each point that has one.
    pub(super) points: BTreeMap<Point, f64>,
}

pub(super) fn measure(oxccl: &Path, ranks: u32, points: &[Point], scratch: &Path) -> Result<Limits> {
    let sizes: BTreeSet<u64> = points.iter().map(|p| p.bytes).filter(|b| *b > 0).collect();
    let sizes: Vec<String> = sizes.iter().map(u64::to_string).collect();
    let mut command = Command::new(oxccl);
    command.args(["bench-limit", "--threads", &ranks.to_string()]);
    if !sizes.is_empty() {
        command.args(["--sizes", &sizes.join(",")]);
    }
    let text = measure::output(&mut command, scratch).context("oxccl bench-limit")?;
    let measured: Measured = serde_json::from_str(&text).context("what oxccl bench-limit says")?;
    Ok(Limits {
        hand_over: measured.hand_over_us,
        points: limits(&measured, ranks, points),
    })
}

/// Where ranks share cores, a short operation takes what the switches between them take, which is not measured: it has no limit.
fn limits(measured: &Measured, ranks: u32, points: &[Point]) -> BTreeMap<Point, f64> {
    let limit = |point: &Point| {
        let hand_over = measured.hand_over_us.filter(|_| ranks <= measured.cores);
        if hand_over.is_none() && point.bytes <= SHORT {
            return None;
        }
        let hand_over = hand_over.unwrap_or_default();
        let crossing = point.operation.crossing(ranks) * point.bytes as f64;
        if crossing == 0.0 {
            return Some((*point, hand_over));
        }
        let copies = measured.copies.iter().find(|c| c.bytes == point.bytes)?;
        Some((*point, hand_over + crossing / copies.bytes_per_second * 1e6))
    };
    points.iter().filter_map(limit).collect()
}

#[cfg(test)]
mod tests {
    use super::super::operations::{Operation, points};
    use super::*;

    #[test]
    fn a_limit_has_the_bytes_that_cross_and_a_hand_over_and_short_operations_have_none_where_ranks_share_cores()
     {
        let text = || {
            let copies =
                r#"[{"bytes":4,"bytes_per_second":4e9},{"bytes":1048576,"bytes_per_second":1.048576e10}]"#;
            format!(r#"{{"cores":2,"hand_over_us":0.25,"copies":{copies}}}"#)
        };
        let all = points(&Operation::ALL, Some(&[4, 1 << 20]), 2);
        let of = |ranks, operation, bytes| {
            let measured: Measured = serde_json::from_str(&text()).unwrap();
            let limits = limits(&measured, ranks, &all);
            limits.get(&Point { operation, bytes }).copied()
        };
        assert_eq!(of(2, Operation::Barrier, 0), Some(0.25));
        assert_eq!(of(2, Operation::AllReduce, 1 << 20), Some(100.25));
        assert_eq!(of(2, Operation::AllGatherInto, 1 << 20), Some(50.25));
        assert_eq!(of(4, Operation::Broadcast, 1 << 20), Some(75.0));
        assert_eq!(of(4, Operation::AllReduce, 4), None);
        assert_eq!(of(4, Operation::Barrier, 0), None);
    }
}
