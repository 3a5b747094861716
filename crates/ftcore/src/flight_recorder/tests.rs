//! What is recorded, by the ring alone and through the engine.

use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Barrier, Mutex, OnceLock};
use std::time::Duration;

use super::environment::{LENGTH, MAX_LENGTH, SAID, Said, asked};
use super::files::Writer;
use super::ring::Snapshot;
use super::*;
use crate::engine::{Driver, Ended, Engine, Label, Place, Rules, Ticket};
use crate::lifecycle::{Engine as _, Lifecycle};
use crate::{
    Collective, Completion, DType, Epoch, InMemoryStore, OpKind, ReduceOp, Result, Tensor, Work, deadline_in,
};

const LONG: Duration = Duration::from_secs(60);

fn configuration(name: &str, epoch: u64) -> Configuration {
    Configuration {
        store: Arc::new(InMemoryStore::new()),
        prefix: "p".to_string(),
        name: name.to_string(),
        epoch: Epoch(epoch),
        rank: 1,
        world_size: 4,
        deadline: deadline_in(LONG),
        cancel: Default::default(),
    }
}

fn recorder(length: usize, name: &str) -> (Arc<GroupRing>, Recorder) {
    let ring = Arc::new(GroupRing::new(length));
    let recorder = Recorder::new(ring.clone(), &configuration(name, 7));
    (ring, recorder)
}

fn all_reduce(count: usize) -> Collective {
    Collective::AllReduce {
        tensors: vec![Tensor::zeros(DType::F32, count)],
        op: ReduceOp::Sum,
    }
}

fn states(snapshot: &Snapshot) -> Vec<(u64, &'static str)> {
    snapshot.operations.iter().map(|o| (o.seq, o.state)).collect()
}

#[test]
fn an_operation_goes_from_queued_to_its_end_with_the_times_of_each() {
    let (ring, recorder) = recorder(8, "g");
    let entry = recorder.queued(&Summary::of(&all_reduce(3)), None);
    let [queued] = &ring.snapshot().operations[..] else {
        panic!("one")
    };
    assert_eq!((queued.state, queued.started, queued.ended), ("queued", 0, 0));
    entry.started();
    let [running] = &ring.snapshot().operations[..] else {
        panic!("one")
    };
    assert_eq!((running.state, running.ended), ("running", 0));
    entry.ended(None);
    let [done] = &ring.snapshot().operations[..] else {
        panic!("one")
    };
    assert_eq!((done.state, done.seq, done.epoch), ("done", 1, 7));
    assert!(0 < done.submitted && done.submitted <= done.started && done.started <= done.ended);
    assert_eq!((done.summary.kind, done.summary.bytes()), (OpKind::AllReduce, 12));
    // Its end is told once.
    entry.ended(Some(&Error::timeout("late")));
    assert_eq!(states(&ring.snapshot()), [(1, "done")]);
}

#[test]
fn the_last_operations_stay_and_an_end_that_comes_after_that_changes_nothing() {
    let (ring, recorder) = recorder(4, "g");
    let summary = Summary::of(&all_reduce(1));
    let first = recorder.queued(&summary, None);
    for _ in 0..5 {
        let running = recorder.started(&summary, None);
        recorder.ended(running, None);
    }
    first.ended(Some(&Error::timeout("late")));
    let snapshot = ring.snapshot();
    assert_eq!(
        states(&snapshot),
        [(3, "done"), (4, "done"), (5, "done"), (6, "done")]
    );
    assert_eq!(snapshot.recorded, 6);
}

#[test]
fn a_failure_keeps_its_reason_and_only_the_first_refusal_is_kept() {
    let (ring, recorder) = recorder(8, "g");
    let summary = Summary::of(&Collective::Barrier);
    let entry = recorder.queued(&summary, Some(41));
    entry.ended(Some(&Error::timeout("rank 3 did not come")));
    for _ in 0..3 {
        recorder.refused(&summary, &Error::new(ErrorKind::Poisoned, "failed before"));
    }
    // That is no rank that comes too late.
    recorder.refused(&summary, &Error::new(ErrorKind::InvalidState, "shut down"));
    let snapshot = ring.snapshot();
    assert_eq!(states(&snapshot), [(41, "failed"), (42, "refused")]);
    let reasons: Vec<&str> = snapshot
        .operations
        .iter()
        .filter_map(|o| o.reason.as_deref())
        .collect();
    assert!(
        reasons[0].contains("rank 3 did not come") && reasons[1].contains("failed before"),
        "{reasons:?}"
    );
}

#[test]
fn readers_beside_writers_see_whole_operations_only() {
    let (ring, recorder) = recorder(16, "g");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let mut count = 0u64;
                while !stop.load(Ordering::Relaxed) {
                    count = count % 1000 + 1;
                    let mut summary = Summary::of(&Collective::Barrier);
                    (summary.input, summary.output, summary.fingerprint.count) = (count, count, count);
                    (summary.peer, summary.tag, summary.fingerprint.root) =
                        (count as u32, count as u32, count as u32);
                    let running = recorder.started(&summary, Some(count));
                    recorder.ended(running, None);
                }
            });
        }
        let mut seen = 0;
        while seen < 2000 {
            for o in ring.snapshot().operations {
                let s = o.summary;
                assert_eq!([s.input, s.output, s.fingerprint.count], [o.seq; 3], "torn");
                assert_eq!([s.peer, s.tag, s.fingerprint.root], [o.seq as u32; 3], "torn");
                seen += 1;
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_failure_while_the_writer_ends_is_written_by_it_or_by_another_one() {
    let (writer, begun) = (Writer::new(), Barrier::new(3));
    // A question in vain is found out where no other comes after it: by many short rounds.
    for _ in 0..300 {
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    begun.wait();
                    for _ in 0..1000 {
                        if writer.ask() {
                            writer.begin();
                            while !writer.end() {
                                writer.begin();
                            }
                        }
                    }
                });
            }
        });
        assert!(
            writer.ask(),
            "there is no writer, and no thread is asked to be one"
        );
        writer.begin();
        assert!(writer.end());
    }
}

#[test]
fn summaries_survive_their_slot() {
    let tensor = |n| Tensor::zeros(DType::BF16, n);
    let ops = [
        all_reduce(5),
        Collective::Broadcast {
            tensors: vec![tensor(2), tensor(3)],
            root: 3,
        },
        Collective::AllGatherInto {
            pairs: vec![(tensor(2), tensor(8))],
        },
        Collective::Send {
            tensor: tensor(4),
            peer: 2,
            tag: 9,
        },
        Collective::Recv {
            tensor: tensor(4),
            peer: None,
            tag: 1,
        },
        Collective::Barrier,
        Collective::Batch {
            ops: vec![Collective::Send {
                tensor: tensor(4),
                peer: 2,
                tag: 0,
            }],
        },
    ];
    for op in &ops {
        let summary = Summary::of(op);
        assert_eq!(Summary::decode(summary.encode()), Some(summary));
        assert_eq!(summary.kind, op.kind());
    }
    let in_place = Collective::AllGatherInPlace {
        tensors: vec![tensor(8)],
    };
    let in_place = Summary::of(&in_place);
    assert_eq!(Summary::decode(in_place.encode()), Some(in_place));
    let apart = Summary::of(&ops[2]);
    assert_eq!(
        (in_place.kind, in_place.fingerprint),
        (apart.kind, apart.fingerprint)
    );
    assert_eq!((in_place.input, in_place.output, in_place.bytes()), (8, 8, 16));
    let [_, broadcast, gather, send, ..] = ops.each_ref().map(Summary::of);
    assert_eq!((broadcast.input, broadcast.fingerprint.root), (5, 3));
    assert_eq!((gather.input, gather.output, gather.bytes()), (2, 8, 16));
    assert_eq!((send.peer, send.tag, send.input), (2, 9, 4));
}

#[test]
fn the_variable_turns_it_off_or_says_how_much_is_kept() {
    for (text, length) in [
        (None, LENGTH),
        (Some(""), LENGTH),
        (Some("0"), 0),
        (Some(" 64 "), 64),
        (Some("many"), LENGTH),
        (Some("99999999999"), MAX_LENGTH),
    ] {
        assert_eq!(asked(text), length, "{text:?}");
    }
}

#[test]
fn a_record_is_written_as_one_json_file_that_a_later_one_replaces() {
    let folder = tempfile::tempdir().unwrap();
    let ring = super::ring().unwrap();
    let recorder = Recorder::new(ring, &configuration("the \"written\" group\n", 7));
    let running = recorder.started(&Summary::of(&all_reduce(3)), None);
    let first = dump_to(&folder.path().join("made"), "a test").unwrap();
    recorder.ended(running, None);
    let second = dump_to(&folder.path().join("made"), "another").unwrap();
    assert_eq!(first, second);
    let text = std::fs::read_to_string(&second).unwrap();
    for part in [
        "\"format\":\"oxccl flight record\",\"version\":1",
        "\"why\":\"another\"",
        "\"epoch\":7,\"rank\":1,\"world\":4",
        "\"name\":\"the \\\"written\\\" group\\u000a\"",
        "\"op\":\"all_reduce\",\"dtype\":\"f32\",\"input\":3,\"output\":3,\"bytes\":12,\"reduce\":\"sum\"",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert_eq!(std::fs::read_dir(folder.path().join("made")).unwrap().count(), 1);
}

/// Keeps what it is given until the test answers.
struct Keeps(Mutex<Sender<Ticket<Self>>>);

impl Driver for Keeps {
    type Job = Collective;
    fn enqueue(&self, _: Collective, ticket: Ticket<Self>) {
        self.0.lock().unwrap().send(ticket).unwrap();
    }
    fn interrupt(&self, _: &Error, ended: Ended<Self>) {
        ended.clean();
    }
    fn release(&self) -> Result<()> {
        Ok(())
    }
}

fn engine(depth: usize) -> (Arc<Engine<Keeps>>, Receiver<Ticket<Keeps>>) {
    let (sender, tickets) = channel();
    let place = Place {
        rank: 1,
        world: 4,
        epoch: Epoch(7),
    };
    let rules = Rules {
        depth,
        grace: Duration::ZERO,
        gives_up: false,
    };
    (
        Engine::start("ox-test", place, rules, Keeps(Mutex::new(sender))).unwrap(),
        tickets,
    )
}

fn submit(engine: &Arc<Engine<Keeps>>, op: Collective) -> Option<Work> {
    let label = Label::of(&op);
    engine.submit(op, label, deadline_in(LONG)).ok()
}

fn nothing() -> Completion {
    Completion {
        tensors: Vec::new(),
        source: None,
        contributors: 0,
    }
}

#[test]
fn a_group_on_the_engine_is_recorded_over_all_its_configurations() {
    let group = Lifecycle::new("x", "before");
    let (first, tickets) = engine(1);
    group
        .configure(configuration("recorded", 7), |_| Ok(first.clone()))
        .unwrap();
    let ring = group.ring().unwrap();
    let one = submit(&first, all_reduce(4)).unwrap();
    let two = submit(&first, Collective::Barrier).unwrap();
    let ticket = tickets.recv_timeout(LONG).unwrap();
    assert_eq!(states(&ring.snapshot()), [(1, "running"), (2, "queued")]);
    ticket.succeed(nothing());
    one.wait_done().unwrap();
    let ticket = tickets.recv_timeout(LONG).unwrap();
    assert_eq!(states(&ring.snapshot()), [(1, "done"), (2, "running")]);
    ticket.fail(Error::new(ErrorKind::PeerLost, "gone"), Vec::new());
    two.wait_done().unwrap_err();
    assert!(submit(&first, all_reduce(4)).is_none());
    let (second, tickets) = engine(1);
    group
        .configure(configuration("recorded", 8), |_| Ok(second.clone()))
        .unwrap();
    let again = submit(&second, all_reduce(4)).unwrap();
    tickets.recv_timeout(LONG).unwrap().succeed(nothing());
    again.wait_done().unwrap();
    let snapshot = ring.snapshot();
    assert_eq!(
        states(&snapshot),
        [(1, "done"), (2, "failed"), (3, "refused"), (1, "done")]
    );
    let epochs: Vec<u64> = snapshot.configurations.iter().map(|c| c.epoch).collect();
    assert_eq!(epochs, [7, 8]);
    assert!(snapshot.operations[1].reason.as_ref().unwrap().contains("gone"));
}

#[test]
fn an_operation_that_ends_before_its_turn_has_the_time_of_its_own_end() {
    let group = Lifecycle::new("x", "g");
    let (engine, tickets) = engine(2);
    group
        .configure(configuration("turns", 7), |_| Ok(engine.clone()))
        .unwrap();
    let works = [
        submit(&engine, all_reduce(4)).unwrap(),
        submit(&engine, all_reduce(4)).unwrap(),
    ];
    let (first, second) = (
        tickets.recv_timeout(LONG).unwrap(),
        tickets.recv_timeout(LONG).unwrap(),
    );
    second.succeed(nothing());
    // The second is not told before the first.
    assert!(matches!(works[1].status(), crate::Status::Pending));
    first.succeed(nothing());
    works.iter().for_each(|w| w.wait_done().unwrap());
    let snapshot = group.ring().unwrap().snapshot();
    let [one, two] = &snapshot.operations[..] else {
        panic!("{snapshot:?}")
    };
    assert!(two.ended <= one.ended, "{snapshot:?}");
}

/// oneCCL writes to the environment while an isolated group connects, and a process that reads it then may be ended by SIGSEGV. The variables are a
/// process's, and what was read of them: a process of its own.
#[test]
fn the_environment_is_read_when_a_group_is_made_and_not_when_it_connects() {
    const CHILD: &str = "OXCCL_TEST_RECORDER";
    if std::env::var_os(CHILD).is_some() {
        let group = Lifecycle::new("x", "g");
        // The variable says that nothing is kept; what was read of it last shall say otherwise.
        let read = SAID.lock().unwrap().take().unwrap();
        assert_eq!(read.length, 0);
        let said = Said {
            length: 7,
            ..Said::now()
        };
        *SAID.lock().unwrap() = Some(Arc::new(said));
        let (engine, _tickets) = engine(1);
        group.configure(configuration("g", 7), |_| Ok(engine)).unwrap();
        assert!(group.ring().is_some());
        println!("read once");
        return;
    }
    let told = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture"])
        .arg("flight_recorder::tests::the_environment_is_read_when_a_group_is_made_and_not_when_it_connects")
        .env(CHILD, "1")
        .env("OXCCL_FLIGHT_RECORDER", "0")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&told.stdout);
    assert!(text.contains("read once"), "{told:?}");
}

/// An engine over other groups, which record what they carry out.
struct Wrapper;

impl crate::lifecycle::Engine for Wrapper {
    fn abort(self: &Arc<Self>, _: &str) {}
    fn leave(self: &Arc<Self>, _: &str) {}
    fn wait_ended(self: &Arc<Self>, _: std::time::Instant) -> Result<()> {
        Ok(())
    }
    fn drain(self: &Arc<Self>, _: std::time::Instant) -> Result<()> {
        Ok(())
    }
    fn error(&self) -> Option<Error> {
        None
    }
}

#[test]
fn a_wrapper_around_other_groups_records_nothing_itself() {
    let group = Lifecycle::new("x", "g");
    group
        .configure(configuration("wrapper", 7), |_| Ok(Arc::new(Wrapper)))
        .unwrap();
    assert!(group.ring().is_none());
    let engine: Option<&OnceLock<Recorder>> = Wrapper.recorder();
    assert!(engine.is_none());
}

#[test]
#[ignore = "measures: prints what a record costs"]
fn cost() {
    let (_, recorder) = recorder(LENGTH, "g");
    let op = all_reduce(1);
    for _ in 0..5 {
        let began = std::time::Instant::now();
        for seq in 0..1_000_000 {
            let running = recorder.started(&Summary::of(&op), Some(seq));
            recorder.ended(running, None);
        }
        let blocking = began.elapsed().as_nanos() / 1_000_000;
        let began = std::time::Instant::now();
        for seq in 0..1_000_000 {
            let entry = recorder.queued(&Summary::of(&op), Some(seq));
            entry.started();
            entry.ended(None);
        }
        let queued = began.elapsed().as_nanos() / 1_000_000;
        println!("{blocking} ns for an operation on the caller's thread, {queued} ns for one that is queued");
    }
}
