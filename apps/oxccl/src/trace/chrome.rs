//! The records as a trace for Perfetto and Chrome's viewer: a process for each record, a track for each group.
//!
//! Operations of a group that overlap go to further tracks of it: one track holds nested slices only.

use serde_json::{Value, json};

use super::record::{Operation, Record, State};

/// The trace, in the JSON form that both viewers open.
pub(crate) fn trace(records: &[Record]) -> Value {
    let operations = || {
        let groups = records.iter().flat_map(|r| &r.groups);
        groups.flat_map(|g| &g.operations)
    };
    // Microseconds since 1970 leave no digits for parts of one.
    let origin = operations().map(|o| o.submitted_ns).min().unwrap_or(0);
    let us = |ns: u64| ns.saturating_sub(origin) as f64 / 1e3;
    let mut events = Vec::new();
    for (record, pid) in records.iter().zip(1u32..) {
        events
            .push(json!({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": record.process()}}));
        let mut track = 0u32;
        for group in &record.groups {
            let Some(named) = group.configurations.last() else {
                continue;
            };
            let mut sorted: Vec<&Operation> = group.operations.iter().collect();
            sorted.sort_by_key(|o| begin(o));
            // When the last slice of each track ends.
            let mut busy: Vec<u64> = Vec::new();
            for op in sorted {
                let (from, to) = (begin(op), end(op, record));
                let free = busy.iter().position(|until| *until <= from);
                let index = free.unwrap_or(busy.len());
                match busy.get_mut(index) {
                    Some(until) => *until = to,
                    None => busy.push(to),
                }
                let tid = track + u32::try_from(index).unwrap_or(0);
                let rank = group
                    .configurations
                    .iter()
                    .rfind(|c| c.epoch == op.epoch)
                    .map(|c| c.rank);
                events.push(json!({
                    "ph": "X", "cat": named.name, "pid": pid, "tid": tid, "ts": us(from), "dur": us(to) - us(from),
                    "name": format!("{} #{}", op.op, op.seq),
                    "args": {
                        "operation": op.described(), "bytes": op.bytes, "epoch": op.epoch, "rank": rank,
                        "state": state(op.state), "submitted_us": us(op.submitted_ns), "reason": op.reason,
                    },
                }));
            }
            for index in 0..u32::try_from(busy.len()).unwrap_or(0) {
                let name = format!("{} (rank {})", named.name, named.rank);
                let name = if index == 0 {
                    name
                } else {
                    format!("{name}, beside")
                };
                events.push(json!({
                    "ph": "M", "name": "thread_name", "pid": pid, "tid": track + index, "args": {"name": name},
                }));
            }
            track += u32::try_from(busy.len()).unwrap_or(0);
        }
    }
    json!({"traceEvents": events, "displayTimeUnit": "ns"})
}

fn begin(op: &Operation) -> u64 {
    op.started_ns.unwrap_or(op.submitted_ns)
}

/// What has not ended lasts until the record was written.
fn end(op: &Operation, record: &Record) -> u64 {
    op.ended_ns.unwrap_or(record.written_ns).max(begin(op))
}

pub(crate) fn state(state: State) -> &'static str {
    match state {
        State::Queued => "queued",
        State::Running => "running",
        State::Done => "done",
        State::Failed => "failed",
        State::Refused => "refused",
    }
}
