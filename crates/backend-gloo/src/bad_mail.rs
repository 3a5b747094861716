//! Against a rank 1 that shares memory and breaks the rules of messages (INV-10): a blocking receive or send of rank 0 ends with
//! a typed error that names it, and rank 0 goes on at the next epoch.

use std::sync::Arc;

use ftcore::{
    Collective, DType, ErrorKind, GroupOptions, InMemoryStore, ProcessGroup, ProcessGroupExt, Store, Tensor,
};

use crate::GlooGroup;
use crate::bad_peer::{Neighbour, configuration, frame, soon};
use crate::wire::{Control, ControlKind, INLINE};

fn write(neighbour: &mut Neighbour, frames: &[(Control, usize)]) {
    for (header, payload) in frames {
        neighbour.mail.writer.put(&header.encode());
        neighbour.mail.writer.put(&vec![1; *payload]);
        neighbour.mail.writer.pad();
    }
    neighbour.mail.writer.publish();
    neighbour.mail.bell.ring();
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
                n.mail.writer.put(&[0xAB; 300]);
                n.mail.writer.publish();
                n.mail.bell.ring();
            },
            ErrorKind::Protocol,
        ),
        (
            "another epoch",
            |n| {
                let late = Control {
                    epoch: 0,
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
            "a good-bye in the wrong place",
            |n| write(n, &[(frame(ControlKind::Goodbye, 0, 0), 0)]),
            ErrorKind::Protocol,
        ),
        (
            "bytes of a message that nobody accepted",
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
                n.mail.writer.advance(usize::MAX / 2);
                n.mail.writer.publish();
                n.mail.bell.ring();
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
        while neighbour.mail.reader.available(Control::BYTES).unwrap() < Control::BYTES {
            assert!(!ftcore::time_left(until).is_zero(), "no offer comes");
            std::thread::yield_now();
        }
        let offer = Control::decode(&neighbour.mail.reader.peek().unwrap()).unwrap();
        assert_eq!(offer.kind, ControlKind::Offer);
        write(&mut neighbour, &[(frame(ControlKind::Taken, offer.id, 0), 0)]);
        let failed = call.join().unwrap();
        assert_eq!(failed.error.kind(), ErrorKind::Protocol, "{}", failed.error);
        assert_eq!(failed.error.context().peer, Some(1), "{}", failed.error);
    });
}
