//! Planted divergences, in records as processes write them.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::merge::{Kind, Verdict, merge};
use super::record::Record;
use super::{chrome, torch};

const SECOND: u64 = 1_000_000_000;
const START: u64 = 1_764_000_000 * SECOND;

/// A collective of a schedule.
#[derive(Debug, Clone, PartialEq)]
struct Op {
    name: &'static str,
    dtype: &'static str,
    count: u64,
    root: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Planted {
    Skips,
    OtherOp,
    OtherCount,
    OtherType,
    OtherRoot,
    /// It is killed: there is no record of it.
    Dies,
    /// It does something else for ever.
    Hangs,
    /// It comes late, and the others have waited.
    Late,
    /// It comes late, and the others have given up.
    TooLate,
}

fn op(world: u32) -> impl Strategy<Value = Op> {
    let names = prop::sample::select(vec![
        "all_reduce",
        "broadcast",
        "reduce",
        "all_gather_into",
        "barrier",
    ]);
    let dtypes = prop::sample::select(vec!["f32", "bf16", "i64"]);
    (names, dtypes, 1..10_000u64, 0..world).prop_map(|(name, dtype, count, root)| Op {
        name,
        dtype,
        count,
        root: matches!(name, "broadcast" | "reduce").then_some(root),
    })
}

fn scene() -> impl Strategy<Value = (u32, Vec<Op>, Planted, u32, usize, bool)> {
    (2..7u32).prop_flat_map(|world| {
        let kinds = vec![
            Planted::Skips,
            Planted::OtherOp,
            Planted::OtherCount,
            Planted::OtherType,
            Planted::OtherRoot,
            Planted::Dies,
            Planted::Hangs,
            Planted::Late,
            Planted::TooLate,
        ];
        let ops = prop::collection::vec(op(world), 4..40);
        (
            Just(world),
            ops,
            prop::sample::select(kinds),
            0..world,
            any::<prop::sample::Index>(),
            any::<bool>(),
        )
            .prop_map(|(world, ops, planted, rank, index, fails)| {
                let at = index.index(ops.len());
                (world, ops, planted, rank, at, fails)
            })
    })
}

fn written(op: &Op, seq: usize, state: &str, at: u64, ended: Option<u64>, reason: Option<&str>) -> Value {
    let mut value = json!({
        "epoch": 3, "seq": seq, "op": op.name, "input": op.count, "output": op.count, "bytes": 4 * op.count,
        "tensors": 1, "state": state, "submitted_ns": at, "started_ns": at,
    });
    let fields = value.as_object_mut().unwrap();
    if op.name != "barrier" {
        fields.insert("dtype".into(), op.dtype.into());
        fields.insert("agreed".into(), op.count.into());
        fields.insert("parts".into(), format!("{:016x}", op.count).into());
    }
    for (name, value) in [
        ("root", op.root.map(Value::from)),
        ("ended_ns", ended.map(Value::from)),
        ("reason", reason.map(Value::from)),
    ] {
        if let Some(value) = value {
            fields.insert(name.into(), value);
        }
    }
    value
}

fn record(rank: u32, world: u32, operations: Vec<Value>, written_ns: u64) -> Record {
    let text = json!({
        "format": "oxccl flight record", "version": 1, "host": "h", "pid": 100 + rank, "rank": rank, "why": "a test",
        "written_ns": written_ns,
        "groups": [{
            "overwritten": 0,
            "configurations": [{"epoch": 3, "name": "dp", "prefix": "p", "rank": rank, "world": world, "at_ns": START}],
            "operations": operations,
        }],
    });
    Record::parse(text.to_string().as_bytes()).unwrap()
}

fn other(op: &Op, planted: Planted, world: u32) -> Op {
    let mut op = op.clone();
    match planted {
        Planted::OtherOp => {
            op.name = if op.name == "all_reduce" {
                "reduce_scatter_into"
            } else {
                "all_reduce"
            }
        }
        Planted::OtherCount => op.count += 1,
        Planted::OtherType => op.dtype = if op.dtype == "f32" { "f64" } else { "f32" },
        Planted::OtherRoot => op.root = op.root.map(|root| (root + 1) % world),
        _ => {}
    }
    op
}

fn same(a: &Op, b: &Op) -> bool {
    let data = |op: &Op| (op.name != "barrier").then_some((op.dtype, op.count));
    (a.name, a.root, data(a)) == (b.name, b.root, data(b))
}

/// The records of a job in which `odd` does what is planted at operation `at`, and where it shows: the number, if it does.
fn job(
    world: u32,
    ops: &[Op],
    planted: Planted,
    odd: u32,
    at: usize,
    fails: bool,
) -> (Vec<Record>, Option<usize>) {
    let mut own: Vec<Op> = ops.to_vec();
    match planted {
        Planted::Skips => drop(own.remove(at)),
        Planted::OtherOp | Planted::OtherCount | Planted::OtherType | Planted::OtherRoot => {
            own[at] = other(&ops[at], planted, world);
        }
        Planted::Dies | Planted::Hangs | Planted::TooLate => own.truncate(at),
        Planted::Late => {}
    }
    // The first operation that the odd rank does not enter as the others do.
    let shows = (0..ops.len()).find(|&i| own.get(i).is_none_or(|o| !same(o, &ops[i])));
    let shows = if planted == Planted::Late { Some(at) } else { shows };
    let end = START + 1000 * SECOND;
    let reason = "the group failed";
    let mut records = Vec::new();
    for rank in 0..world {
        if rank == odd && planted == Planted::Dies {
            continue;
        }
        let mine = if rank == odd { &own[..] } else { ops };
        let mut operations = Vec::new();
        for (i, op) in mine.iter().enumerate() {
            let delayed = planted == Planted::Late && i >= at;
            let lockstep = START + i as u64 * SECOND / 50 + u64::from(rank) * 1000;
            let waits = if delayed && (rank == odd || i > at) {
                5 * SECOND
            } else {
                0
            };
            let come = lockstep + waits;
            if Some(i) == shows && planted != Planted::Late {
                let (state, ended) = if fails || planted == Planted::TooLate {
                    ("failed", Some(come + SECOND))
                } else {
                    ("running", None)
                };
                operations.push(written(op, i, state, come, ended, ended.map(|_| reason)));
                break;
            }
            let ended = come + 1_000_000 + if delayed { 5 * SECOND } else { 0 };
            operations.push(written(op, i, "done", come, Some(ended), None));
        }
        if rank == odd && planted == Planted::TooLate {
            // Also just before the others note the end of what they failed: they tell of a failure first.
            let late = if fails { SECOND - 1000 } else { 20 * SECOND };
            let come = START + at as u64 * SECOND / 50 + late;
            operations.push(written(&ops[at], at, "refused", come, Some(come), Some(reason)));
        }
        records.push(record(rank, world, operations, end));
    }
    (records, shows)
}

fn named(verdict: &Verdict, odd: u32, seq: usize, world: u32) -> bool {
    let Some(first) = verdict.findings.first() else {
        return false;
    };
    // Of two ranks that differ, neither is the odd one.
    let who = if world == 2 && first.kind == Kind::Mismatch {
        first.ranks.contains(&odd)
    } else {
        first.ranks == [odd] && verdict.text.contains(&format!("rank {odd}"))
    };
    who && first.seq == Some(seq as u64)
        && verdict.text.contains(&format!("#{seq}"))
        && verdict.text.contains("group dp")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_planted_divergence_is_named_with_its_rank_and_operation(
        (world, ops, planted, odd, at, fails) in scene(),
    ) {
        let (records, shows) = job(world, &ops, planted, odd, at, fails);
        let verdict = merge(&records, SECOND);
        match shows {
            Some(seq) => {
                prop_assert!(named(&verdict, odd, seq, world), "{planted:?} of rank {odd} at #{seq}: {verdict:#?}");
                prop_assert_eq!(verdict.diverged, planted != Planted::Late);
            }
            // Another root of an operation without one is no divergence.
            None => prop_assert!(verdict.findings.is_empty(), "{verdict:#?}"),
        }
        // In any order of the files.
        let mut turned = records.clone();
        turned.reverse();
        prop_assert_eq!(merge(&turned, SECOND).text, verdict.text);
    }
}

fn all_reduce(count: u64) -> Op {
    Op {
        name: "all_reduce",
        dtype: "f32",
        count,
        root: None,
    }
}

#[test]
fn the_sentence_says_who_what_and_what_instead() {
    let mut ops = vec![all_reduce(8); 42];
    ops[41].count = 1024;
    let text = |planted, fails| merge(&job(4, &ops, planted, 3, 41, fails).0, SECOND).text;
    assert_eq!(
        text(Planted::Hangs, false),
        "rank 3 never entered all_reduce #41 of group dp (epoch 3); its last was all_reduce #40"
    );
    assert_eq!(
        text(Planted::OtherCount, true),
        "rank 3 entered all_reduce #41 of group dp (epoch 3) with 1025 elements, the others with 1024 elements"
    );
    assert_eq!(
        text(Planted::OtherType, true),
        "rank 3 entered all_reduce #41 of group dp (epoch 3) with dtype f64, the others with dtype f32"
    );
    assert_eq!(
        text(Planted::OtherOp, true),
        "rank 3 entered reduce_scatter_into(f32, 1024 elements) as #41 of group dp (epoch 3), where the others entered \
         all_reduce(f32, 1024 elements)"
    );
    assert_eq!(
        text(Planted::Dies, true),
        "there is no record of rank 3, which the others wait for in all_reduce #41 of group dp (epoch 3): its process may have ended; on rank 0 it \
         failed: the group failed"
    );
    assert_eq!(
        text(Planted::Late, false),
        "rank 3 came to all_reduce #41 of group dp (epoch 3) 5.0 s after the others"
    );
}

#[test]
fn records_of_a_job_that_runs_agree_although_they_are_written_one_after_another() {
    let ops: Vec<Value> = (0..10u64)
        .map(|i| {
            let at = START + i * SECOND;
            let state = if i == 9 { "running" } else { "done" };
            written(
                &all_reduce(8),
                i as usize,
                state,
                at,
                (i < 9).then_some(at + 1000),
                None,
            )
        })
        .collect();
    let at = |i: u64| START + i * SECOND + SECOND / 10;
    let behind = ops[..8].to_vec();
    let records = [record(0, 2, ops, at(9)), record(1, 2, behind, at(7))];
    let verdict = merge(&records, SECOND);
    assert!(!verdict.diverged && verdict.findings.is_empty(), "{verdict:#?}");
}

#[test]
fn what_a_ring_has_no_more_is_no_divergence() {
    let line = |range: std::ops::Range<u64>| -> Vec<Value> {
        range
            .map(|i| {
                written(
                    &all_reduce(i + 1),
                    i as usize,
                    "done",
                    START + i * SECOND,
                    Some(START + i * SECOND + 9),
                    None,
                )
            })
            .collect()
    };
    let mut short = record(1, 2, line(60..100), START + 200 * SECOND);
    short.groups[0].overwritten = 60;
    let records = [record(0, 2, line(0..100), START + 200 * SECOND), short];
    let verdict = merge(&records, SECOND);
    assert!(verdict.findings.is_empty(), "{verdict:#?}");
}

#[test]
fn a_message_without_its_other_end_is_named() {
    let message = |op: &str, peer: u32, state: &str| {
        json!({
            "epoch": 3, "seq": 1, "op": op, "dtype": "f32", "input": if op == "send" { 4 } else { 0 },
            "output": if op == "send" { 0 } else { 4 }, "bytes": 16, "peer": peer, "tag": 7, "state": state,
            "submitted_ns": START,
        })
    };
    let end = START + 60 * SECOND;
    let records = [
        record(0, 2, vec![message("send", 1, "done")], end),
        record(
            1,
            2,
            vec![message("recv", 0, "done"), message("recv", 0, "running")],
            end,
        ),
    ];
    let verdict = merge(&records, SECOND);
    assert_eq!(
        verdict.text,
        "message 2 from rank 0 to rank 1 with tag 7 in group dp (epoch 3) is waited for, and was never sent"
    );
    assert_eq!((verdict.diverged, &*verdict.findings[0].ranks), (true, &[0][..]));
}

#[test]
fn slices_of_one_track_do_not_overlap() {
    // The second begins while the first runs.
    let ops = vec![
        written(&all_reduce(8), 0, "done", START, Some(START + 100), None),
        written(&all_reduce(8), 1, "done", START + 50, Some(START + 150), None),
        written(&all_reduce(8), 2, "done", START + 120, Some(START + 200), None),
    ];
    let trace = chrome::trace(&[record(0, 1, ops, START + SECOND)]);
    let slices: Vec<(u64, f64, f64)> = trace["traceEvents"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|e| e["ph"] == "X")
        .map(|e| {
            let from = e["ts"].as_f64().unwrap();
            (
                e["tid"].as_u64().unwrap(),
                from,
                from + e["dur"].as_f64().unwrap(),
            )
        })
        .collect();
    assert_eq!(slices.len(), 3);
    for (i, a) in slices.iter().enumerate() {
        for b in slices.iter().skip(i + 1).filter(|b| b.0 == a.0) {
            assert!(a.2 <= b.1 || b.2 <= a.1, "{a:?} {b:?}");
        }
    }
}

#[test]
fn ranks_get_the_numbers_of_their_launcher_in_the_files_for_pytorch() {
    let ops = || vec![written(&all_reduce(8), 0, "done", START, Some(START + 100), None)];
    let records = [
        record(1, 2, ops(), START + SECOND),
        record(0, 2, ops(), START + SECOND),
    ];
    let files = torch::files(&records).unwrap();
    let names: Vec<&str> = files.iter().map(|(name, _)| &**name).collect();
    assert_eq!(names, ["rank_1", "rank_0"]);
    // A pickle of protocol 2, to its end.
    for (_, contents) in &files {
        assert_eq!((&contents[..2], contents.last()), (&[0x80, 2][..], Some(&b'.')));
    }
}

#[test]
fn a_rank_in_place_gives_the_analyser_the_sizes_of_one_that_is_not() {
    for (name, input, output) in [("all_gather_into", 4, 8), ("reduce_scatter_into", 8, 4)] {
        let file = |input: u64, output: u64| {
            let op = Op {
                name,
                ..all_reduce(8)
            };
            let mut op = written(&op, 0, "done", START, Some(START + 100), None);
            (op["input"], op["output"]) = (input.into(), output.into());
            torch::files(&[record(0, 2, vec![op], START + SECOND)]).unwrap()
        };
        assert_eq!(file(8, 8), file(input, output), "{name}");
        assert_ne!(file(4, 4), file(input, output), "{name}");
    }
}
