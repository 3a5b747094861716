//! The record as JSON: `oxccl trace` reads it, and so can any other program. Written by hand: this crate knows no serializer.

use std::fmt::Write as _;

use super::environment::Said;
use super::ring::{Configured, Operation, Snapshot};
use super::ticks::unix_ns;
use crate::{OpKind, ReduceOp};

/// Raised when a reader of an earlier version would misread a record.
const VERSION: u32 = 1;

fn text(out: &mut String, value: &str) {
    out.push('"');
    for c in value.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            c if u32::from(c) < 0x20 => {
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

fn field(out: &mut String, name: &str, value: &str) {
    let _ = write!(out, ",\"{name}\":");
    text(out, value);
}

/// The whole file.
pub(super) fn write(host: &str, said: &Said, why: &str, groups: &[Snapshot]) -> String {
    let mut out = String::new();
    let _ = write!(out, "{{\"format\":\"oxccl flight record\",\"version\":{VERSION}");
    field(&mut out, "host", host);
    let _ = write!(out, ",\"pid\":{}", std::process::id());
    if let Some(rank) = said.rank {
        let _ = write!(out, ",\"rank\":{rank}");
    }
    if let Some(replica) = &said.replica {
        field(&mut out, "replica", replica);
    }
    field(&mut out, "why", why);
    let _ = write!(out, ",\"written_ns\":{},\"groups\":[", unix_ns());
    for (i, group) in groups.iter().enumerate() {
        out.push_str(if i == 0 { "\n" } else { ",\n" });
        write_group(&mut out, group);
    }
    out.push_str("\n]}\n");
    out
}

fn write_group(out: &mut String, group: &Snapshot) {
    let kept = group.operations.len() as u64;
    let _ = write!(
        out,
        "{{\"overwritten\":{},\"configurations\":[",
        group.recorded.saturating_sub(kept)
    );
    for (
        i,
        Configured {
            epoch,
            name,
            prefix,
            rank,
            world,
            at,
        },
    ) in group.configurations.iter().enumerate()
    {
        out.push_str(if i == 0 { "\n " } else { ",\n " });
        let _ = write!(
            out,
            "{{\"epoch\":{epoch},\"rank\":{rank},\"world\":{world},\"at_ns\":{at}"
        );
        field(out, "name", name);
        field(out, "prefix", prefix);
        out.push('}');
    }
    out.push_str("],\"operations\":[");
    for (i, operation) in group.operations.iter().enumerate() {
        out.push_str(if i == 0 { "\n " } else { ",\n " });
        write_operation(out, operation);
    }
    out.push_str("]}");
}

fn write_operation(out: &mut String, o: &Operation) {
    let (s, f) = (&o.summary, &o.summary.fingerprint);
    let _ = write!(out, "{{\"epoch\":{},\"seq\":{}", o.epoch, o.seq);
    field(out, "op", s.kind.name());
    if let Some(dtype) = s.dtype() {
        field(out, "dtype", dtype.name());
    }
    let _ = write!(
        out,
        ",\"input\":{},\"output\":{},\"bytes\":{}",
        s.input,
        s.output,
        s.bytes()
    );
    if f.reduce != u8::MAX {
        field(out, "reduce", ReduceOp::name_of(f.reduce));
    }
    if f.tensors != u8::MAX {
        let _ = write!(out, ",\"tensors\":{}", f.tensors);
    }
    if f.root != u32::MAX {
        let _ = write!(out, ",\"root\":{}", f.root);
    }
    if matches!(s.kind, OpKind::Send | OpKind::Recv) {
        if s.peer != u32::MAX {
            let _ = write!(out, ",\"peer\":{}", s.peer);
        }
        let _ = write!(out, ",\"tag\":{}", s.tag);
    }
    if f.count != 0 {
        // What the ranks must agree on beside the total: the counts tensor by tensor.
        let _ = write!(out, ",\"agreed\":{},\"parts\":\"{:016x}\"", f.count, f.detail);
    }
    field(out, "state", o.state);
    for (name, at) in [
        ("submitted_ns", o.submitted),
        ("started_ns", o.started),
        ("ended_ns", o.ended),
    ] {
        if at != 0 {
            let _ = write!(out, ",\"{name}\":{at}");
        }
    }
    if let Some(reason) = &o.reason {
        field(out, "reason", reason);
    }
    out.push('}');
}
