//! The records as PyTorch's flight-recorder analyser reads them (`torch.distributed.flight_recorder.fr_trace`): one pickle for each rank of the job,
//! named `rank_N`.
//!
//! The analyser knows one number for each process. It is the one that the launcher gave, if all records have one and no two the same, else the place
//! of the record on the command line.

use std::collections::BTreeMap;

use oxccl::core::{Error, Result};

use super::pickle::{Pickle, dict, list, text, tuple};
use super::record::{Configuration, Group, Operation, Record, State};

/// Of the layout of entries. Its analyser compares it between files and takes it for a form without coalesced groups.
const VERSION: &str = "2.4";

/// The files: name and contents. Errors: `InvalidArgument` if a process has several ranks of one group, which the analyser cannot express.
pub(crate) fn files(records: &[Record]) -> Result<Vec<(String, Vec<u8>)>> {
    let numbers = numbers(records);
    let members = members(records, &numbers)?;
    let file = |(record, number): (&Record, &u32)| {
        let mut groups = Vec::new();
        let mut entries = Vec::new();
        for group in &record.groups {
            for c in &group.configurations {
                let ranks: Vec<String> = members
                    .get(&key(c))
                    .map(|m| m.values().map(u32::to_string).collect())
                    .unwrap_or_default();
                groups.push((
                    uid(c),
                    dict(vec![
                        ("name", text(uid(c))),
                        ("desc", text(&c.name)),
                        ("ranks", text(format!("[{}]", ranks.join(", ")))),
                    ]),
                ));
                entries.extend(of_configuration(group, c));
            }
        }
        // In the order of submission, under numbers that are the same on all ranks where these do the same.
        entries.sort_by_key(|(at, _)| *at);
        let entries = (0i64..)
            .zip(entries)
            .map(|(n, (_, mut fields))| {
                fields.push(("record_id", Pickle::Int(n)));
                dict(fields)
            })
            .collect();
        let contents = dict(vec![
            ("version", text(VERSION)),
            ("entries", Pickle::List(entries)),
            (
                "pg_config",
                Pickle::Dict(
                    groups
                        .into_iter()
                        .map(|(uid, group)| (text(uid), group))
                        .collect(),
                ),
            ),
            ("host_name", text(&record.host)),
            ("pid", Pickle::Int(i64::from(record.pid))),
        ]);
        (format!("rank_{number}"), contents.encode())
    };
    Ok(records.iter().zip(&numbers).map(file).collect())
}

fn numbers(records: &[Record]) -> Vec<u32> {
    let given: Option<Vec<u32>> = records.iter().map(|r| r.rank).collect();
    let unique = |numbers: &Vec<u32>| {
        let mut sorted = numbers.clone();
        sorted.sort_unstable();
        sorted.windows(2).all(|pair| pair.first() != pair.last())
    };
    match given.filter(unique) {
        Some(given) => given,
        None => (0..).zip(records).map(|(n, _)| n).collect(),
    }
}

type Key<'a> = (&'a str, &'a str, u64);

fn key(c: &Configuration) -> Key<'_> {
    (&c.name, &c.prefix, c.epoch)
}

/// A name that no other group or epoch has.
fn uid(c: &Configuration) -> String {
    format!("{}/{}@{}", c.prefix, c.name, c.epoch)
}

/// Of each configuration: its ranks, and the number of the process of each.
fn members<'a>(records: &'a [Record], numbers: &[u32]) -> Result<BTreeMap<Key<'a>, BTreeMap<u32, u32>>> {
    let mut members: BTreeMap<Key<'_>, BTreeMap<u32, u32>> = BTreeMap::new();
    for (record, number) in records.iter().zip(numbers) {
        for c in record.groups.iter().flat_map(|g| &g.configurations) {
            let ranks = members.entry(key(c)).or_default();
            if ranks.values().any(|n| n == number) {
                return Err(Error::invalid(format!(
                    "{} has several ranks of group {}: PyTorch's analyser knows one for each process",
                    record.process(),
                    c.name
                )));
            }
            ranks.insert(c.rank, *number);
        }
    }
    // Ranks without a record get numbers that no record has.
    let mut next = numbers.iter().max().map_or(0, |n| n.saturating_add(1));
    for c in records
        .iter()
        .flat_map(|r| &r.groups)
        .flat_map(|g| &g.configurations)
    {
        let ranks = members.entry(key(c)).or_default();
        for rank in 0..c.world.min(1 << 20) {
            ranks.entry(rank).or_insert_with(|| {
                next = next.saturating_add(1);
                next - 1
            });
        }
    }
    Ok(members)
}

type Fields = Vec<(&'static str, Pickle)>;

/// The entries of one configuration, with when they were submitted.
fn of_configuration(group: &Group, c: &Configuration) -> Vec<(u64, Fields)> {
    let ours = group.operations.iter().filter(|o| o.epoch == c.epoch);
    ours.filter_map(|op| Some((op.submitted_ns, entry(op, c)?)))
        .collect()
}

fn entry(op: &Operation, c: &Configuration) -> Option<Fields> {
    // Of messages the analyser matches those that NCCL has put together, and takes others for collectives of the whole group.
    if op.state == State::Refused || op.is_message() {
        return None;
    }
    let name = profiling_name(op);
    // In place, the record has the whole for both; the analyser holds a rank's part against the whole.
    let part = |n: u64| n / u64::from(c.world.max(1));
    let (input, output) = match op.op.as_str() {
        "all_gather_into" if op.input == op.output => (part(op.input), op.output),
        "reduce_scatter_into" if op.input == op.output => (op.input, part(op.output)),
        _ => (op.input, op.output),
    };
    let int = |n: u64| Pickle::Int(i64::try_from(n).unwrap_or(i64::MAX));
    let sizes = |n: u64| list(vec![list(vec![int(n)])]);
    let dtypes = || list(vec![text(op.dtype.as_deref().map_or("Byte", scalar_type))]);
    let time = |ns: Option<u64>| ns.map_or(Pickle::None, int);
    Some(vec![
        ("pg_id", Pickle::Int(0)),
        ("process_group", tuple(text(uid(c)), text(&c.name))),
        ("collective_seq_id", int(op.seq)),
        ("p2p_seq_id", int(0)),
        ("op_id", int(op.seq)),
        ("profiling_name", text(format!("nccl:{name}"))),
        ("time_created_ns", int(op.submitted_ns)),
        ("time_discovered_started_ns", time(op.started_ns)),
        (
            "time_discovered_completed_ns",
            time(op.ended_ns.filter(|_| op.state == State::Done)),
        ),
        ("input_sizes", sizes(input)),
        ("input_dtypes", dtypes()),
        ("output_sizes", sizes(output)),
        ("output_dtypes", dtypes()),
        (
            "state",
            text(match op.state {
                State::Done => "completed",
                State::Running | State::Failed => "started",
                State::Queued | State::Refused => "scheduled",
            }),
        ),
        ("retired", Pickle::Bool(op.state == State::Done)),
        ("timeout_ms", Pickle::Int(0)),
        ("is_p2p", Pickle::Bool(false)),
        ("frames", list(Vec::new())),
    ])
}

/// The name under which the analyser knows the operation. It took no library but NCCL's and oneCCL's at first.
fn profiling_name(op: &Operation) -> &str {
    match op.op.as_str() {
        "all_gather_into" => "_all_gather_base",
        "reduce_scatter_into" => "_reduce_scatter_base",
        "all_to_all_into" => "all_to_all",
        "monitored_barrier" => "barrier",
        other => other,
    }
}

/// The name of the type in PyTorch's C++ library.
fn scalar_type(dtype: &str) -> &str {
    match dtype {
        "f64" => "Double",
        "f32" => "Float",
        "f16" => "Half",
        "bf16" => "BFloat16",
        "i64" => "Long",
        "i32" => "Int",
        "i16" => "Short",
        "i8" => "Char",
        "u8" => "Byte",
        "bool" => "Bool",
        "f8e4m3" => "Float8_e4m3fn",
        "f8e5m2" => "Float8_e5m2",
        "u16" => "UInt16",
        "u32" => "UInt32",
        "u64" => "UInt64",
        other => other,
    }
}
