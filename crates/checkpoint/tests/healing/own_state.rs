//! Given an older state of its own: a replica fetches only what differs. And given a snapshot that is not the one wanted: it
//! fetches nothing.

use std::time::{Duration, Instant};

use ftcore::{Epoch, ErrorKind, Result, Step};
use oxccl_checkpoint::{
    CheckpointSource, DEFAULT_CHUNK_BYTES, Fetch, FetchOptions, Fetched, HttpTransport, Snapshot, SnapshotId,
    StateDict,
};

use crate::fake_source::{FakeSource, Reply, snapshot, state};

fn long() -> Instant {
    Instant::now() + Duration::from_secs(120)
}

/// `frozen` tensors that never change, one that does, and metadata of the step, as a model that is fine-tuned has.
fn model(step: i64, frozen: usize) -> StateDict {
    let mut s = StateDict::new();
    for i in 0..frozen {
        let values: Vec<f32> = (0..300_000).map(|e| (e + i) as f32).collect();
        s.insert_f32(format!("base/{i}"), &[300_000], &values).unwrap();
    }
    let values: Vec<f32> = (0..300_000).map(|e| (e as i64 * step) as f32).collect();
    s.insert_f32("adapter", &[300_000], &values).unwrap();
    s.set_metadata("trainer.step", step.to_string());
    s
}

fn fetch_with(server: &HttpTransport, step: i64, own: Option<StateDict>) -> Result<Fetched> {
    let mut fetch = Fetch::step(Step(step), vec![CheckpointSource::at(server.metadata())]);
    fetch.own = own;
    fetch.run(long(), &FetchOptions::default())
}

fn received(fetched: &Fetched) -> u64 {
    fetched.received.iter().map(|r| r.1).sum()
}

#[test]
fn only_tensors_that_changed_are_fetched_when_there_is_an_older_state() {
    let server = HttpTransport::start("127.0.0.1:0", None).unwrap();
    server.publish(Snapshot::new(Step(1_000_000), Epoch(9), &model(1_000_000, 5)).unwrap());
    let none = fetch_with(&server, 1_000_000, None).unwrap();
    let older = fetch_with(&server, 1_000_000, Some(model(7, 5))).unwrap();
    assert_eq!(none.state, model(1_000_000, 5));
    assert_eq!(older.state, none.state);
    assert_eq!((none.reused_bytes, received(&none) > 7_000_000), (0, true));
    assert_eq!(older.reused_bytes, 5 * 1_200_000);
    assert!(received(&older) < 1_300_000, "{}", received(&older));
}

#[test]
fn tensors_that_came_and_went_around_the_frozen_ones_change_nothing() {
    let server = HttpTransport::start("127.0.0.1:0", None).unwrap();
    let mut now = model(8, 3);
    now.insert_f32("aaa/new", &[77_777], &vec![1.5; 77_777]).unwrap();
    server.publish(Snapshot::new(Step(8), Epoch(9), &now).unwrap());
    let mut own = model(7, 3);
    own.insert_f32("base/gone", &[5], &[0.0; 5]).unwrap();
    let fetched = fetch_with(&server, 8, Some(own)).unwrap();
    assert_eq!(fetched.state, now);
    assert_eq!(fetched.reused_bytes, 3 * 1_200_000);
}

#[test]
fn a_needless_heal_fetches_the_header_only() {
    let server = HttpTransport::start("127.0.0.1:0", None).unwrap();
    server.publish(Snapshot::new(Step(5), Epoch(9), &model(5, 2)).unwrap());
    let fetched = fetch_with(&server, 5, Some(model(5, 2))).unwrap();
    assert_eq!(fetched.state, model(5, 2));
    assert!(received(&fetched) < 4096, "{}", received(&fetched));
}

#[test]
fn equal_and_half_equal_tensors_come_from_the_older_state_chunk_by_chunk() {
    let server = HttpTransport::start("127.0.0.1:0", None).unwrap();
    let elements = 3 * DEFAULT_CHUNK_BYTES as usize / 4;
    let state = |last: f32| {
        let mut s = StateDict::new();
        let mut values: Vec<f32> = (0..elements).map(|e| e as f32).collect();
        values[elements - 1] = last;
        s.insert_f32("half", &[elements], &values).unwrap();
        // Equal among themselves, here and there.
        for name in ["zeros/a", "zeros/b", "zeros/c"] {
            s.insert_f32(name, &[elements], &vec![0.0; elements]).unwrap();
        }
        s.insert_f32("empty", &[0], &[]).unwrap();
        s
    };
    server.publish(Snapshot::new(Step(5), Epoch(9), &state(1.0)).unwrap());
    let fetched = fetch_with(&server, 5, Some(state(2.0))).unwrap();
    assert_eq!(fetched.state, state(1.0));
    assert_eq!(fetched.reused_bytes, 11 * DEFAULT_CHUNK_BYTES);
    assert!(received(&fetched) < DEFAULT_CHUNK_BYTES + 4096);
}

#[test]
fn an_older_state_of_another_model_is_no_hindrance() {
    let server = HttpTransport::start("127.0.0.1:0", None).unwrap();
    server.publish(Snapshot::new(Step(5), Epoch(9), &model(5, 2)).unwrap());
    for own in [StateDict::new(), state(64, 3.0)] {
        let fetched = fetch_with(&server, 5, Some(own)).unwrap();
        assert_eq!((fetched.state, fetched.reused_bytes), (model(5, 2), 0));
    }
}

fn wanted(source: CheckpointSource, epoch: Epoch, lineage: &str) -> Fetch {
    let mut fetch = Fetch::step(Step(5), vec![source]);
    fetch.epoch = Some(epoch);
    fetch.lineage = Some(lineage.into());
    fetch
}

#[test]
fn a_snapshot_of_another_epoch_or_history_costs_one_small_answer() {
    // Serves epoch 9 without a lineage, whatever it is asked for.
    for (epoch, lineage) in [(10, ""), (8, ""), (9, "abc")] {
        let source = FakeSource::start(&snapshot(5, 64, 3.0), |_, _| Reply::Honest);
        let fetch = wanted(CheckpointSource::at(source.url()), Epoch(epoch), lineage);
        let e = fetch.run(long(), &FetchOptions::default()).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Corrupt, "{e}");
        assert!(
            e.to_string().contains("the manifest is of step 5 of epoch 9"),
            "{e}"
        );
        assert_eq!((source.requests(), source.sent()), (1, 0));
    }
}

#[test]
fn the_snapshot_of_an_earlier_attempt_is_waited_out_at_the_source_and_never_downloaded() {
    let server = HttpTransport::start("127.0.0.1:0", None).unwrap();
    let publish = |epoch, seed| {
        let id = SnapshotId {
            step: Step(5),
            epoch,
            lineage: "ab".into(),
        };
        server.publish(Snapshot::of(id, state(64, seed), 4096).unwrap());
    };
    publish(Epoch(9), 2.0);
    let url = server.metadata();
    let source = CheckpointSource::at(url);
    // First its time runs out: what was waited for, and what was there instead.
    let soon = Instant::now() + Duration::from_secs(1);
    let e = wanted(CheckpointSource::at(server.metadata()), Epoch(10), "ab")
        .run(soon, &FetchOptions::default())
        .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Timeout, "{e}");
    let text = e.to_string();
    for part in [
        "step 5 of epoch 10",
        "serving step 5 of epoch 9",
        "not published within",
    ] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
    // Another history will not come, and is not waited for.
    let e = wanted(CheckpointSource::at(server.metadata()), Epoch(9), "cd")
        .run(long(), &FetchOptions::default())
        .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::NotFound, "{e}");
    assert!(e.to_string().contains("with lineage 'ab', asked for 5"), "{e}");
    // And then the right one comes.
    let healing =
        std::thread::spawn(move || wanted(source, Epoch(10), "ab").run(long(), &FetchOptions::default()));
    publish(Epoch(10), 7.0);
    let fetched = healing.join().unwrap().unwrap();
    assert_eq!((fetched.id.epoch, fetched.state), (Epoch(10), state(64, 7.0)));
}
