//! What is measured: the operations, their sizes, how often each is called, and what must cross between ranks.

use std::collections::BTreeMap;
use std::fmt;

use clap::ValueEnum as _;

/// An operation that every program has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum Operation {
    AllReduce,
    AllGatherInto,
    ReduceScatterInto,
    AllToAllInto,
    Broadcast,
    /// Submitted and waited for.
    AllReduceAsync,
    Barrier,
    /// Half of a message's way from rank 0 to rank 1 and back.
    PingPong,
}

impl Operation {
    pub(super) const ALL: [Self; 8] = [
        Self::AllReduce,
        Self::AllGatherInto,
        Self::ReduceScatterInto,
        Self::AllToAllInto,
        Self::Broadcast,
        Self::AllReduceAsync,
        Self::Barrier,
        Self::PingPong,
    ];

    /// True for what is measured for its latency alone. It is not measured on tensors that ranks read in place.
    pub(super) fn is_short(self) -> bool {
        matches!(self, Self::AllReduceAsync | Self::Barrier | Self::PingPong)
    }

    fn default_sizes(self) -> &'static [u64] {
        const K: u64 = 1 << 10;
        const M: u64 = 1 << 20;
        match self {
            Self::AllReduce => &[4, K, 4 * K, 16 * K, 64 * K, 256 * K, M, 4 * M, 16 * M, 64 * M],
            Self::AllReduceAsync => &[4],
            Self::Barrier => &[],
            Self::PingPong => &[4, K],
            _ => &[64 * K, M, 16 * M, 64 * M],
        }
    }

    /// True if the larger of its tensors has one equal part for each rank.
    fn has_parts(self) -> bool {
        matches!(
            self,
            Self::AllGatherInto | Self::ReduceScatterInto | Self::AllToAllInto
        )
    }

    /// What must cross between ranks for each byte of the size, divided by the ranks, whose cores share the copying.
    ///
    /// Of an all-reduce each rank takes in (n−1)/n·S to reduce its part and as much again of the others' results; of all_gather_into,
    /// reduce_scatter_into and all_to_all_into the other ranks' (n−1) parts of S/n; of a broadcast n−1 ranks take in S each, and all n
    /// can copy. A message is copied once on its way.
    pub(super) fn crossing(self, ranks: u32) -> f64 {
        let n = f64::from(ranks.max(1));
        match self {
            Self::AllReduce | Self::AllReduceAsync => 2.0 * (n - 1.0) / n,
            Self::AllGatherInto | Self::ReduceScatterInto | Self::AllToAllInto | Self::Broadcast => {
                (n - 1.0) / n
            }
            Self::Barrier => 0.0,
            Self::PingPong => 1.0,
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value();
        f.write_str(value.as_ref().map_or("", |v| v.get_name()))
    }
}

/// One line of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Point {
    pub(super) operation: Operation,
    /// Of the larger tensor of a rank; 0 for a barrier.
    pub(super) bytes: u64,
}

/// The lines of `operations` with `sizes`, or with their own: whole parts, each once.
pub(super) fn points(operations: &[Operation], sizes: Option<&[u64]>, ranks: u32) -> Vec<Point> {
    let mut points: Vec<Point> = operations
        .iter()
        .flat_map(|&operation| {
            let unit = if operation.has_parts() {
                4 * u64::from(ranks)
            } else {
                4
            };
            let sizes = match operation {
                Operation::Barrier => &[0],
                _ => sizes.unwrap_or(operation.default_sizes()),
            };
            sizes.iter().map(move |size| Point {
                operation,
                bytes: size.next_multiple_of(unit),
            })
        })
        .collect();
    points.sort_unstable();
    points.dedup();
    points
}

/// Calls of one line, not measured and measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Calls {
    pub(super) warmup: u32,
    pub(super) iters: u32,
}

/// Short ones vary more and cost nothing. The warm-ups move 4 MiB, as those of `oxccl bench` do, so that rings are written all through.
fn calls(bytes: u64) -> Calls {
    let (warmup, iters) = match bytes {
        0..=4_096 => (1_000, 400),
        4_097..=262_144 => (256, 200),
        262_145..=4_194_304 => (10, 40),
        _ => (2, 8),
    };
    Calls { warmup, iters }
}

/// The points, put together by how often they are called, the most often called first: in these parts of a round the programs take turns.
pub(super) fn batches(points: &[Point]) -> Vec<(Calls, Vec<Point>)> {
    let mut batches: BTreeMap<Calls, Vec<Point>> = BTreeMap::new();
    for &point in points {
        batches.entry(calls(point.bytes)).or_default().push(point);
    }
    batches.into_iter().rev().collect()
}

/// Operations that have the same sizes among `points`: what one `oxccl bench` can measure.
pub(super) fn same_sizes(points: &[Point]) -> Vec<(Vec<Operation>, Vec<u64>)> {
    let mut of: BTreeMap<Operation, Vec<u64>> = BTreeMap::new();
    for point in points {
        of.entry(point.operation).or_default().push(point.bytes);
    }
    let mut groups: Vec<(Vec<Operation>, Vec<u64>)> = Vec::new();
    for (operation, sizes) in of {
        // A blocking and a submitted call are two runs of the program.
        let is_async = |operation| operation == Operation::AllReduceAsync;
        let same = groups.iter_mut().find(|(operations, others)| {
            *others == sizes && operations.iter().all(|&o| is_async(o) == is_async(operation))
        });
        match same {
            Some((operations, _)) => operations.push(operation),
            None => groups.push((vec![operation], sizes)),
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_whole_parts_and_each_stands_once() {
        let of = |ranks, sizes: &[u64]| -> Vec<(Operation, u64)> {
            let operations = [
                Operation::Barrier,
                Operation::AllGatherInto,
                Operation::AllReduce,
                Operation::AllReduce,
            ];
            let points = points(&operations, Some(sizes), ranks);
            points.into_iter().map(|p| (p.operation, p.bytes)).collect()
        };
        let expected = [
            (Operation::AllReduce, 4),
            (Operation::AllReduce, 8),
            (Operation::AllGatherInto, 16),
            (Operation::Barrier, 0),
        ];
        assert_eq!(of(4, &[8, 4, 8]), expected);
    }

    #[test]
    fn every_point_is_in_one_batch_and_in_one_run_of_ours() {
        let points = points(&Operation::ALL, None, 2);
        assert_eq!(points.len(), 10 + 4 * 4 + 1 + 1 + 2);
        let batches = batches(&points);
        let iters: Vec<u32> = batches.iter().map(|(calls, _)| calls.iters).collect();
        assert_eq!(iters, [400, 200, 40, 8]);
        let mut all: Vec<Point> = Vec::new();
        for (_, batch) in &batches {
            let groups = same_sizes(batch);
            for (operations, sizes) in &groups {
                assert!(operations.len() == 1 || !operations.contains(&Operation::AllReduceAsync));
                let pairs = operations
                    .iter()
                    .flat_map(|&operation| sizes.iter().map(move |&bytes| Point { operation, bytes }));
                all.extend(pairs);
            }
        }
        all.sort_unstable();
        assert_eq!(all, points);
        let large = same_sizes(&batches.last().unwrap().1);
        assert_eq!(large.len(), 1, "{large:?}");
    }

    #[test]
    fn what_must_cross_is_shared_by_the_ranks() {
        for (operation, two, four) in [
            (Operation::AllReduce, 1.0, 1.5),
            (Operation::AllGatherInto, 0.5, 0.75),
            (Operation::ReduceScatterInto, 0.5, 0.75),
            (Operation::AllToAllInto, 0.5, 0.75),
            (Operation::Broadcast, 0.5, 0.75),
            (Operation::Barrier, 0.0, 0.0),
        ] {
            assert_eq!(
                (operation.crossing(2), operation.crossing(4)),
                (two, four),
                "{operation}"
            );
        }
    }
}
