//! The figures of a benchmark and how they are shown: a table in the manner of nccl-tests, or JSON.

use oxccl::core::{Error, ErrorKind, Result};
use serde::Serialize;

use super::measure::Times;
use super::plan::{Op, Plan, Row};

/// One line. A gigabyte is 10⁹ bytes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Line {
    pub(super) op: &'static str,
    /// Bytes of the larger of the tensors of one rank.
    pub(super) bytes: u64,
    /// Calls before the measured ones.
    pub(super) warmup: u32,
    /// Elements of that tensor.
    pub(super) count: usize,
    /// Median over the iterations of the slowest rank's time, in microseconds.
    pub(super) time_us: f64,
    /// The fastest iteration, by its slowest rank.
    pub(super) min_us: f64,
    /// The slowest iteration, by its slowest rank.
    pub(super) max_us: f64,
    /// bytes / time, in GB/s.
    pub(super) algbw: f64,
    /// algbw times the factor that nccl-tests gives to the operation, in GB/s.
    pub(super) busbw: f64,
    /// The time as a multiple of what the operation's byte count implies by all_reduce; absent without such a line before it.
    pub(super) of_implied: Option<f64>,
    /// Wrong elements on all ranks; absent without a check.
    pub(super) wrong: Option<u64>,
}

/// The figures of a line from what its ranks measured.
///
/// Errors: `Internal` if a rank measured another number of iterations than asked for.
pub(super) fn line(plan: &Plan, row: Row, ranks: &[Times], before: &[Line]) -> Result<Line> {
    let iters = plan.iters as usize;
    if ranks.is_empty() || iters == 0 || ranks.iter().any(|r| r.ns.len() != iters) {
        return Err(Error::new(
            ErrorKind::Internal,
            "a rank measured another number of iterations than asked for",
        ));
    }
    let mut slowest = vec![0u64; iters];
    for rank in ranks {
        for (slowest, &ns) in slowest.iter_mut().zip(&rank.ns) {
            *slowest = ns.max(*slowest);
        }
    }
    slowest.sort_unstable();
    let per_trip = 1000.0 * f64::from(row.op.trips());
    let us = |i: usize| slowest.get(i).map_or(0.0, |&ns| ns as f64 / per_trip);
    let time_us = (us((iters - 1) / 2) + us(iters / 2)) / 2.0;
    let algbw = if time_us > 0.0 {
        row.bytes as f64 / time_us / 1000.0
    } else {
        0.0
    };
    Ok(Line {
        op: row.op.name(),
        bytes: row.bytes,
        warmup: plan.warm_ups(row),
        count: row.count,
        time_us,
        min_us: us(0),
        max_us: us(iters - 1),
        algbw,
        busbw: algbw * row.op.bus_factor(plan.ranks),
        of_implied: implied(plan, row, before).map(|implied| time_us / implied),
        wrong: plan.check.then(|| ranks.iter().map(|r| r.wrong).sum()),
    })
}

/// How long `row` takes if its bytes travel as fast as those of the all_reduce of its size among `before`, in microseconds.
fn implied(plan: &Plan, row: Row, before: &[Line]) -> Option<f64> {
    // An operation with parts may have been rounded up to whole ones; of small sizes several are as near as that.
    let most = u64::from(plan.ranks) * plan.dtype().ok()?.size() as u64;
    let same = |l: &&Line| l.op == Op::AllReduce.name() && row.bytes.abs_diff(l.bytes) < most;
    let own = Op::AllReduce.bus_factor(plan.ranks);
    if row.op == Op::AllReduce || row.bytes == 0 || own <= 0.0 {
        return None;
    }
    let nearest = before
        .iter()
        .filter(same)
        .min_by_key(|l| row.bytes.abs_diff(l.bytes));
    let all_reduce = nearest.filter(|l| l.busbw > 0.0)?;
    // busbw counts what the links carry: in GB/s, that is thousands of bytes per microsecond.
    Some(row.bytes as f64 * row.op.bus_factor(plan.ranks) / all_reduce.busbw / 1000.0)
}

/// The heads of the columns, with their units.
pub(super) const HEAD: &str = "\
#         op                     size         count      time       min       max     algbw     busbw  implied  #wrong
#                                 (B)    (elements)      (us)      (us)      (us)    (GB/s)    (GB/s)  (times)";

impl std::fmt::Display for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "  {:<19} {:>13} {:>13} {:>9} {:>9} {:>9} {:>9.3} {:>9.3} {:>8} {:>7}",
            self.op,
            self.bytes,
            self.count,
            time(self.time_us),
            time(self.min_us),
            time(self.max_us),
            self.algbw,
            self.busbw,
            self.of_implied.map_or("-".to_string(), |x| format!("{x:.2}")),
            self.wrong.map_or("-".to_string(), |n| n.to_string()),
        )
    }
}

/// Microseconds with about as many digits as mean something.
fn time(us: f64) -> String {
    match us {
        us if us < 100.0 => format!("{us:.2}"),
        us if us < 10_000.0 => format!("{us:.1}"),
        us => format!("{us:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use oxccl::core::DType;

    use super::*;

    fn plan(iters: u32) -> Plan {
        Plan {
            dtype: DType::F32.to_string(),
            ranks: 4,
            iters,
            check: true,
            ..Plan::default()
        }
    }

    fn times(ns: &[u64]) -> Times {
        Times {
            ns: ns.to_vec(),
            wrong: 2,
            transport: None,
        }
    }

    #[test]
    fn the_time_is_the_median_over_iterations_of_the_slowest_rank() {
        let row = Row {
            op: Op::AllReduce,
            count: 1000,
            bytes: 4000,
        };
        let ranks = [times(&[1000, 9000, 2000]), times(&[3000, 1000, 8000])];
        let l = line(&plan(3), row, &ranks, &[]).unwrap();
        assert_eq!((l.min_us, l.time_us, l.max_us), (3.0, 8.0, 9.0));
        assert_eq!((l.algbw, l.busbw, l.wrong), (0.5, 0.75, Some(4)));
        let l = line(&plan(2), row, &[times(&[2000, 4000])], &[]).unwrap();
        assert_eq!(l.time_us, 3.0);
        assert!(line(&plan(2), row, &ranks, &[]).is_err());
        let ping_pong = Row {
            op: Op::PingPong,
            ..row
        };
        assert_eq!(line(&plan(3), ping_pong, &ranks, &[]).unwrap().time_us, 4.0);
    }

    #[test]
    fn an_operation_is_compared_with_the_all_reduce_of_its_size_by_the_bytes_that_links_carry() {
        let row = |op, bytes: u64| Row {
            op,
            count: (bytes / 4) as usize,
            bytes,
        };
        let took =
            |row, us: u64, before: &[Line]| line(&plan(1), row, &[times(&[us * 1000])], before).unwrap();
        let before = [
            took(row(Op::AllReduce, 4000), 30, &[]),
            took(row(Op::AllReduce, 8000), 90, &[]),
        ];
        let of = |op, bytes, us| took(row(op, bytes), us, &before).of_implied;
        let near = |a: Option<f64>, b: f64| assert!((a.unwrap() - b).abs() < 1e-9, "{a:?}, not {b}");
        // 4 ranks: 1.5 for all_reduce, 0.75 with parts, else 1.
        near(of(Op::AllGatherInto, 4000, 15), 1.0);
        near(of(Op::AllGatherInto, 8000, 90), 2.0);
        near(of(Op::Broadcast, 4000, 10), 0.5);
        // Rounded up to whole parts, it is still the same size.
        near(of(Op::AllToAllInto, 4008, 15), 4000.0 / 4008.0);
        assert_eq!(of(Op::AllGatherInto, 16_000, 15), None);
        // Of sizes that differ by less than a part for each rank, it is the nearest.
        let small = [4, 8, 16].map(|bytes| took(row(Op::AllReduce, bytes), 32 + bytes, &[]));
        let of_small = took(row(Op::AllGatherInto, 16), 24, &small).of_implied;
        near(of_small, 1.0);
        assert_eq!(before[1].of_implied, None);
        assert_eq!(of(Op::Barrier, 0, 5), None);
    }
}
