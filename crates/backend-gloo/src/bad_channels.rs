//! Against a rank 1 that shares memory and breaks the rules of messages (INV-10): a blocking receive or send of rank 0 ends with
//! a typed error that names it, and rank 0 goes on at the next epoch.

use std::sync::Arc;

use ftcore::{
    Collective, DType, Epoch, ErrorKind, GroupOptions, InMemoryStore, ProcessGroup, ProcessGroupExt, Store,
    Tensor,
};

use crate::GlooGroup;
use crate::bad_peer::{Neighbour, configuration, frame, soon};
use crate::peer::Fate;
use crate::queue::Taken;
use crate::wire::{Control, ControlKind, INLINE};

fn write(neighbour: &mut Neighbour, frames: &[(Control, usize)]) {
    for (header, payload) in frames {
        neighbour.channels.writer.put(&header.encode());
        neighbour.channels.writer.put(&vec![1; *payload]);
        neighbour.channels.writer.pad();
    }
    neighbour.channels.writer.publish();
    neighbour.channels.bell.ring();
}

/// A message of `count` bytes with tag 3.
fn inline(count: u64) -> Control {
    Control {
        a: 3,
        ..frame(ControlKind::Inline, 0, count)
    }
}

#[test]
fn a_neighbour_that_breaks_the_rules_of_messages_is_a_protocol_error_that_names_it() {
    type Break = (&'static str, fn(&mut Neighbour), ErrorKind);
    let ways: [Break; 10] = [
        (
            "garbage",
            |n| {
                n.channels.writer.put(&[0xAB; 300]);
                n.channels.writer.publish();
                n.channels.bell.ring();
            },
            ErrorKind::Protocol,
        ),
        (
            "another epoch",
            |n| {
                let late = Control {
                    epoch: Epoch(0),
                    ..inline(8)
                };
                write(n, &[(late, 8)]);
            },
            ErrorKind::Protocol,
        ),
        (
            "more bytes than go with an offer",
            |n| write(n, &[(inline(INLINE as u64 + 1), 64)]),
            ErrorKind::Protocol,
        ),
        (
            "more bytes than go with an offer, in large elements",
            |n| {
                let large = Control {
                    code: DType::F64.code(),
                    ..inline(INLINE as u64)
                };
                write(n, &[(large, 64)]);
            },
            ErrorKind::Protocol,
        ),
        (
            "a leave in the wrong place",
            |n| write(n, &[(frame(ControlKind::Leave, 0, 0), 0)]),
            ErrorKind::Protocol,
        ),
        (
            "bytes of a message that was not accepted",
            |n| write(n, &[(frame(ControlKind::Data, 5, 100), 100)]),
            ErrorKind::Protocol,
        ),
        (
            "more bytes than the message has",
            |n| {
                let offer = Control {
                    a: 3,
                    ..frame(ControlKind::Offer, 9, 8)
                };
                write(n, &[(offer, 0), (frame(ControlKind::Data, 9, 100), 100)]);
            },
            ErrorKind::Protocol,
        ),
        (
            "an answer to what was not sent",
            |n| write(n, &[(frame(ControlKind::Taken, 77, 0), 0)]),
            ErrorKind::Protocol,
        ),
        (
            "a position that cannot be",
            |n| {
                n.channels.writer.advance(usize::MAX / 2);
                n.channels.writer.publish();
                n.channels.bell.ring();
            },
            ErrorKind::Protocol,
        ),
        (
            "a message of another length",
            |n| write(n, &[(inline(9), 9)]),
            ErrorKind::Mismatch,
        ),
    ];
    for (what, misbehave, kind) in ways {
        let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
        let group = GlooGroup::new("bad", GroupOptions::default()).unwrap();
        std::thread::scope(|scope| {
            let ours = scope.spawn(|| group.configure(configuration(&store, 1, 0, 2)).unwrap());
            let mut neighbour = Neighbour::connect(&store);
            ours.join().unwrap();
            let call = scope.spawn(|| {
                let op = Collective::Recv {
                    tensor: Tensor::zeros(DType::U8, 8),
                    peer: Some(1),
                    tag: 3,
                };
                group
                    .run_blocking(op, ftcore::SubmitOptions::by(soon()))
                    .unwrap_err()
            });
            misbehave(&mut neighbour);
            let failed = call.join().unwrap();
            assert_eq!(failed.error.kind(), kind, "{what}: {}", failed.error);
            assert_eq!(failed.error.context().peer, Some(1), "{what}: {}", failed.error);
            assert_eq!(failed.tensors.len(), 1, "{what}: the tensor did not come back");
            group.configure(configuration(&store, 2, 0, 1)).unwrap();
            group.barrier().unwrap();
        });
    }
}

#[test]
fn an_answer_to_a_message_whose_bytes_did_not_go_along_is_a_protocol_error() {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let group = GlooGroup::new("bad", GroupOptions::default()).unwrap();
    std::thread::scope(|scope| {
        let ours = scope.spawn(|| group.configure(configuration(&store, 1, 0, 2)).unwrap());
        let mut neighbour = Neighbour::connect(&store);
        ours.join().unwrap();
        let call = scope.spawn(|| {
            let op = Collective::Send {
                tensor: Tensor::zeros(DType::U8, INLINE + 1),
                peer: 1,
                tag: 3,
            };
            group
                .run_blocking(op, ftcore::SubmitOptions::by(soon()))
                .unwrap_err()
        });
        let until = soon();
        while neighbour.channels.reader.available(Control::BYTES).unwrap() < Control::BYTES {
            assert!(!ftcore::time_left(until).is_zero(), "no offer comes");
            std::thread::yield_now();
        }
        let offer = Control::decode(&neighbour.channels.reader.peek().unwrap()).unwrap();
        assert_eq!(offer.kind, ControlKind::Offer);
        write(&mut neighbour, &[(frame(ControlKind::Taken, offer.id, 0), 0)]);
        let failed = call.join().unwrap();
        assert_eq!(failed.error.kind(), ErrorKind::Protocol, "{}", failed.error);
        assert_eq!(failed.error.context().peer, Some(1), "{}", failed.error);
    });
}

/// Rank 0's group and a neighbour.
fn connected() -> (GlooGroup, Neighbour) {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let group = GlooGroup::new("bad", GroupOptions::default()).unwrap();
    let neighbour = std::thread::scope(|scope| {
        let ours = scope.spawn(|| group.configure(configuration(&store, 1, 0, 2)).unwrap());
        let neighbour = Neighbour::connect(&store);
        ours.join().unwrap();
        neighbour
    });
    (group, neighbour)
}

#[test]
fn a_neighbour_that_takes_many_messages_and_leaves_has_taken_them_all() {
    const MANY: u64 = 300;
    let (group, mut neighbour) = connected();
    let sends: Vec<_> = (0..MANY)
        .map(|_| group.send(Tensor::zeros(DType::U8, 1), 1, 3).unwrap())
        .collect();
    let mut taken = Vec::new();
    let until = soon();
    while taken.len() < sends.len() {
        assert!(!ftcore::time_left(until).is_zero(), "{} offers came", taken.len());
        let reader = &mut neighbour.channels.reader;
        if reader.available(Control::BYTES + 1).unwrap() <= Control::BYTES {
            neighbour.channels.bell.ring();
            std::thread::yield_now();
            continue;
        }
        let offer = Control::decode(&reader.peek().unwrap()).unwrap();
        assert_eq!(offer.kind, ControlKind::Inline);
        reader.take(Control::BYTES + 1);
        reader.pad();
        reader.release();
        taken.push((frame(ControlKind::Taken, offer.id, 0), 0));
    }
    for (header, _) in &taken {
        neighbour.channels.writer.put(&header.encode());
        neighbour.channels.writer.pad();
    }
    // Not rung: rank 0 wakes for the leave, and finds more answers than it reads at a time.
    neighbour.channels.writer.publish();
    neighbour.leave();
    for send in sends {
        send.wait(soon()).unwrap();
    }
}

#[test]
fn what_a_neighbour_wrote_while_its_ring_was_being_read_counts_although_its_leave_is_known() {
    let (group, mut neighbour) = connected();
    let (shared, _) = group.ready(&ftcore::SubmitOptions::by(soon())).unwrap();
    // This thread drives the messages.
    let mut channels = shared.lock().channels.take().unwrap();
    let receive = group.recv(Tensor::zeros(DType::U8, 8), 1, 3).unwrap();
    channels.turn(&shared).unwrap();
    write(&mut neighbour, &[(inline(8), 8)]);
    let fate = Fate {
        left: true,
        text: "done".into(),
    };
    shared.tell_fate(1, fate);
    // Between the look at its ring and the verdict.
    channels.judge(&shared).unwrap();
    channels.turn(&shared).unwrap();
    assert_eq!(receive.take_tensor().unwrap().bytes(), [1; 8]);
    let receive = group.recv(Tensor::zeros(DType::U8, 8), 1, 3).unwrap();
    let error = channels.turn(&shared).unwrap_err();
    assert!(error.to_string().contains("left the group (done)"), "{error}");
    shared.give_back_channels(channels, Taken::Caller);
    group.abort("over");
    receive.wait(soon()).unwrap_err();
}

#[test]
fn tensors_that_were_submitted_beside_a_receive_that_does_not_fit_come_back() {
    let (group, mut neighbour) = connected();
    let (shared, _) = group.ready(&ftcore::SubmitOptions::by(soon())).unwrap();
    // This thread drives the messages.
    let mut channels = shared.lock().channels.take().unwrap();
    let receive = |tag| group.recv(Tensor::zeros(DType::U8, 8), 1, tag).unwrap();
    let other = receive(5);
    let offer = Control {
        a: 3,
        ..frame(ControlKind::Offer, 9, 1000)
    };
    write(&mut neighbour, &[(offer, 0)]);
    channels.turn(&shared).unwrap();
    // The offer waits. What it does not fit is taken together with what comes after.
    let works = [other, receive(3), receive(6), receive(3)];
    let error = channels.turn(&shared).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
    channels.failure = Some(error);
    shared.give_back_channels(channels, Taken::Caller);
    for (work, at) in works.iter().zip(0..) {
        let error = work.wait(soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch, "receive {at}: {error}");
        assert_eq!(
            work.recover().len(),
            1,
            "the tensor of receive {at} did not come back"
        );
    }
}
