//! What a benchmark measures: operations, sizes and how often, the same on every rank, and nccl-tests' factors.

use std::str::FromStr;
use std::time::{Duration, Instant};

use oxccl::core::{
    Capabilities, DType, Device, DeviceKind, Error, OpKind, ReduceOp, Result, accelerator, deadline_in,
};
use serde::{Deserialize, Serialize};

/// The most ranks: up to here every sum of the check pattern is exact in every element type.
pub(super) const MAX_RANKS: u32 = 64;
/// The largest size of one operation, in bytes.
pub(super) const MAX_SIZE: u64 = 16 << 30;
/// Warm-ups, where their number is not given: at least so many, then until so many bytes have moved, as a ring that ranks
/// share is only then written all through, but no more than so many.
pub(super) const WARM_UPS: u32 = 5;
const WARM_BYTES: u64 = 4 << 20;
const MOST_WARM_UPS: u32 = 1_000;

/// An operation that can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Op {
    AllReduce,
    Broadcast,
    Reduce,
    AllGatherInto,
    ReduceScatterInto,
    AllToAllInto,
    /// Every rank sends to the next and receives from the one before it.
    SendRecv,
    /// A message from rank 0 to rank 1 and back; the time is half of it.
    PingPong,
    Barrier,
}

impl Op {
    pub(super) const ALL: [Self; 9] = [
        Self::AllReduce,
        Self::Broadcast,
        Self::Reduce,
        Self::AllGatherInto,
        Self::ReduceScatterInto,
        Self::AllToAllInto,
        Self::SendRecv,
        Self::PingPong,
        Self::Barrier,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::AllReduce => OpKind::AllReduce.name(),
            Self::Broadcast => OpKind::Broadcast.name(),
            Self::Reduce => OpKind::Reduce.name(),
            Self::AllGatherInto => OpKind::AllGatherInto.name(),
            Self::ReduceScatterInto => OpKind::ReduceScatterInto.name(),
            Self::AllToAllInto => OpKind::AllToAllInto.name(),
            Self::SendRecv => "send_recv",
            Self::PingPong => "ping_pong",
            Self::Barrier => OpKind::Barrier.name(),
        }
    }

    /// The kinds that a group must advertise.
    fn kinds(self) -> &'static [OpKind] {
        match self {
            Self::AllReduce => &[OpKind::AllReduce],
            Self::Broadcast => &[OpKind::Broadcast],
            Self::Reduce => &[OpKind::Reduce],
            Self::AllGatherInto => &[OpKind::AllGatherInto],
            Self::ReduceScatterInto => &[OpKind::ReduceScatterInto],
            Self::AllToAllInto => &[OpKind::AllToAllInto],
            Self::SendRecv => &[OpKind::Batch],
            Self::PingPong => &[OpKind::Send, OpKind::Recv],
            Self::Barrier => &[OpKind::Barrier],
        }
    }

    /// How often the bytes cross, one time after the other, in what is timed.
    pub(super) fn trips(self) -> u32 {
        if self == Self::PingPong { 2 } else { 1 }
    }

    fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::Reduce | Self::ReduceScatterInto)
    }

    /// True if the larger of its tensors has one equal part per rank.
    pub(super) fn has_parts(self) -> bool {
        matches!(
            self,
            Self::AllGatherInto | Self::ReduceScatterInto | Self::AllToAllInto
        )
    }

    /// busbw / algbw, as nccl-tests defines it: what the links carry per byte of the size.
    pub(super) fn bus_factor(self, ranks: u32) -> f64 {
        let n = f64::from(ranks.max(1));
        match self {
            Self::AllReduce => 2.0 * (n - 1.0) / n,
            Self::AllGatherInto | Self::ReduceScatterInto | Self::AllToAllInto => (n - 1.0) / n,
            Self::Broadcast | Self::Reduce | Self::SendRecv | Self::PingPong | Self::Barrier => 1.0,
        }
    }

    /// Whether a backend can do it with sums of `dtype`; the error says why not.
    fn check(self, backend: &str, capabilities: &Capabilities, dtype: DType, ranks: u32) -> Result<()> {
        let refuse = |why: String| Err(Error::unsupported(why).with_op(self.name()));
        if let Some(kind) = self
            .kinds()
            .iter()
            .find(|kind| !capabilities.ops.contains(**kind))
        {
            return refuse(format!("backend '{backend}' does not offer {kind}"));
        }
        if self == Self::Barrier {
            return Ok(());
        }
        if !capabilities.moves.contains(dtype) {
            return refuse(format!("backend '{backend}' does not move {dtype}"));
        }
        if self.reduces() && !capabilities.reduces(ReduceOp::Sum, dtype) {
            return refuse(format!("backend '{backend}' does not sum {dtype}"));
        }
        if matches!(self, Self::SendRecv | Self::PingPong) && ranks < 2 {
            return Err(Error::invalid("it needs at least 2 ranks").with_op(self.name()));
        }
        Ok(())
    }
}

impl FromStr for Op {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|op| op.name() == name).ok_or_else(|| {
            let known: Vec<_> = Self::ALL.into_iter().map(Self::name).collect();
            Error::invalid(format!(
                "unknown operation '{name}'; known: {}, all",
                known.join(", ")
            ))
        })
    }
}

/// The operations of a comma-separated list; `all` means every one that the backend can do with `dtype`.
///
/// Errors: `InvalidArgument` for an unknown name, `Unsupported` for one that the backend cannot do.
pub(super) fn parse_ops(
    list: &str,
    backend: &str,
    capabilities: &Capabilities,
    dtype: DType,
    ranks: u32,
) -> Result<Vec<Op>> {
    let check = |op: Op| op.check(backend, capabilities, dtype, ranks);
    if list.trim() == "all" {
        return Ok(Op::ALL.into_iter().filter(|&op| check(op).is_ok()).collect());
    }
    list.split(',')
        .map(|name| name.trim().parse().and_then(|op| check(op).map(|()| op)))
        .collect()
}

/// A size in bytes: a number with an optional K, M or G (powers of 1024), such as `64K`.
pub(super) fn parse_size(text: &str) -> Result<u64> {
    let text = text.trim();
    let unit = text.chars().last().map_or(1, |c| match c.to_ascii_uppercase() {
        'K' => 1u64 << 10,
        'M' => 1 << 20,
        'G' => 1 << 30,
        _ => 1,
    });
    let digits = if unit == 1 {
        text
    } else {
        text.get(..text.len().saturating_sub(1)).unwrap_or_default()
    };
    digits
        .parse::<u64>()
        .ok()
        .filter(|_| digits.bytes().all(|b| b.is_ascii_digit()))
        .and_then(|n| n.checked_mul(unit))
        .filter(|n| (1..=MAX_SIZE).contains(n))
        .ok_or_else(|| {
            Error::invalid(format!(
                "'{text}' is not a size (bytes from 1 to 16G, with K, M or G for powers of 1024)"
            ))
        })
}

/// From `min` to `max`, each `factor` times the one before it.
pub(super) fn sizes_between(min: u64, max: u64, factor: u64) -> Result<Vec<u64>> {
    if min == 0 || min > max || factor < 2 {
        return Err(Error::invalid(format!(
            "sizes from {min} to {max} by a factor of {factor}: the first must be from 1 to the last, the factor at least 2"
        )));
    }
    let sizes = std::iter::successors(Some(min), |size| size.checked_mul(factor));
    Ok(sizes.take_while(|&size| size <= max).collect())
}

/// One line of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) op: Op,
    /// Elements of the larger of its tensors; with parts, a multiple of the ranks.
    pub(super) count: usize,
    pub(super) bytes: u64,
}

/// What every rank is told.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Plan {
    pub(super) backend: String,
    /// The device kind whose memory is moved.
    pub(super) device: String,
    /// Every rank's backend runs in a child process of that rank.
    pub(super) isolated: bool,
    /// Of the backend's groups: name and text.
    pub(super) options: Vec<(String, String)>,
    pub(super) ops: Vec<Op>,
    pub(super) sizes: Vec<u64>,
    /// The name of the element type.
    pub(super) dtype: String,
    pub(super) ranks: u32,
    /// None: by the bytes that a call moves.
    pub(super) warmup: Option<u32>,
    pub(super) iters: u32,
    pub(super) check: bool,
    /// Calls are submitted and waited for.
    pub(super) submit: bool,
    /// Every rank has one of the cores; they take turns.
    pub(super) bind: bool,
    /// Tensors are the group's.
    pub(super) alloc: bool,
    pub(super) row_limit_ms: u64,
}

impl Plan {
    /// The device of `rank`: the kind's devices are dealt out in turn.
    pub(super) fn device(&self, rank: u32) -> Result<Device> {
        let kind: DeviceKind = self.device.parse()?;
        let count = if kind == DeviceKind::Cpu {
            1
        } else {
            accelerator(&kind)?.count()
        };
        Ok(Device::new(kind, rank % count.max(1)))
    }

    pub(super) fn dtype(&self) -> Result<DType> {
        self.dtype.parse()
    }

    /// Calls before the measured ones of a line.
    pub(super) fn warm_ups(&self, row: Row) -> u32 {
        self.warmup.unwrap_or_else(|| {
            let calls = WARM_BYTES.div_ceil(row.bytes.max(1));
            u32::try_from(calls).map_or(MOST_WARM_UPS, |calls| calls.clamp(WARM_UPS, MOST_WARM_UPS))
        })
    }

    /// Until when a line that begins now must be done, on every rank.
    pub(super) fn row_deadline(&self) -> Instant {
        deadline_in(Duration::from_millis(self.row_limit_ms))
    }

    /// The lines in order: the sizes of each operation, rounded up to whole elements and whole parts.
    pub(super) fn rows(&self) -> Result<Vec<Row>> {
        let width = self.dtype()?.size() as u64;
        let mut rows = Vec::new();
        for &op in &self.ops {
            if op == Op::Barrier {
                rows.push(Row {
                    op,
                    count: 0,
                    bytes: 0,
                });
                continue;
            }
            let unit = if op.has_parts() { u64::from(self.ranks) } else { 1 };
            for &size in &self.sizes {
                let count = size.div_ceil(width).div_ceil(unit) * unit;
                let row = Row {
                    op,
                    count: usize::try_from(count)
                        .map_err(|_| Error::invalid(format!("{size} bytes do not fit in memory")))?,
                    bytes: count * width,
                };
                // Sizes that round to the same one are measured once.
                if rows.last() != Some(&row) {
                    rows.push(row);
                }
            }
        }
        Ok(rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units_and_bounds() {
        for (text, bytes) in [
            ("4", 4),
            ("1k", 1024),
            (" 64K ", 65536),
            ("16M", 16 << 20),
            ("1G", 1 << 30),
        ] {
            assert_eq!(parse_size(text).unwrap(), bytes, "{text}");
        }
        for text in [
            "",
            "K",
            "0",
            "-1",
            "+4",
            "1.5M",
            "4KB",
            "17G",
            "99999999999999999999",
            "1M2",
            "4ü",
        ] {
            assert!(parse_size(text).is_err(), "{text}");
        }
        assert_eq!(sizes_between(4, 70, 4).unwrap(), [4, 16, 64]);
        assert_eq!(sizes_between(u64::MAX - 1, u64::MAX, 2).unwrap().len(), 1);
        for (min, max, factor) in [(8, 4, 2), (0, 4, 2), (4, 8, 1)] {
            assert!(sizes_between(min, max, factor).is_err());
        }
    }

    #[test]
    fn rows_are_whole_elements_and_whole_parts_and_a_barrier_has_one() {
        let plan = Plan {
            ops: vec![Op::AllReduce, Op::AllGatherInto, Op::Barrier],
            sizes: vec![1, 4, 10],
            dtype: DType::F32.to_string(),
            ranks: 3,
            ..Plan::default()
        };
        let rows: Vec<_> = plan
            .rows()
            .unwrap()
            .iter()
            .map(|r| (r.op, r.count, r.bytes))
            .collect();
        assert_eq!(
            rows,
            [
                (Op::AllReduce, 1, 4),
                (Op::AllReduce, 3, 12),
                (Op::AllGatherInto, 3, 12),
                (Op::Barrier, 0, 0)
            ]
        );
    }

    #[test]
    fn warm_ups_move_some_bytes_unless_their_number_is_given() {
        let mut plan = Plan {
            warmup: Some(0),
            ..Plan::default()
        };
        let of = |plan: &Plan, bytes: u64| {
            let (op, count) = (Op::AllReduce, (bytes / 4) as usize);
            plan.warm_ups(Row { op, count, bytes })
        };
        assert_eq!(of(&plan, 64 << 10), 0);
        plan.warmup = Some(7);
        assert_eq!(of(&plan, 4), 7);
        plan.warmup = None;
        for (bytes, calls) in [
            (0, 1_000),
            (4, 1_000),
            (16 << 10, 256),
            (1 << 20, 5),
            (64 << 20, 5),
        ] {
            assert_eq!(of(&plan, bytes), calls, "{bytes}");
        }
    }

    #[test]
    fn bus_factors_are_those_of_nccl_tests() {
        for (op, two, four) in [
            (Op::AllReduce, 1.0, 1.5),
            (Op::AllGatherInto, 0.5, 0.75),
            (Op::ReduceScatterInto, 0.5, 0.75),
            (Op::AllToAllInto, 0.5, 0.75),
            (Op::Broadcast, 1.0, 1.0),
            (Op::Reduce, 1.0, 1.0),
            (Op::SendRecv, 1.0, 1.0),
            (Op::PingPong, 1.0, 1.0),
        ] {
            assert_eq!((op.bus_factor(2), op.bus_factor(4)), (two, four), "{op:?}");
        }
    }
}
