//! Tests against a rank 1 that breaks the rules on the connections for large payloads (INV-10), or loses one of them.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;

use ftcore::{
    Collective, DType, Epoch, Error, ErrorKind, GroupOptions, InMemoryStore, ProcessGroup, ProcessGroupExt,
    Store, SubmitOptions, Tensor,
};

use crate::GlooGroup;
use crate::bad_peer::{Published, configuration, frame, hello, soon};
use crate::wire::{ControlKind, DataHeader, Hello, PieceHeader, Purpose, STRIPE};

/// Three pieces, the last one shorter.
const BYTES: usize = 2 * STRIPE + 4000;

/// The connections of a rank that is not one of ours.
struct Stranger {
    data: TcpStream,
    rails: Vec<TcpStream>,
    _control: TcpStream,
    _messages: TcpStream,
}

impl Stranger {
    fn connect(store: &Arc<dyn Store>) -> Self {
        let published = Published::of_rank_0(store);
        let open = |purpose| {
            published.greet(&Hello {
                connections: 2,
                ..hello(purpose, published.nonce)
            })
        };
        let data = open(Purpose::Data);
        let rails = [0, 1].map(|n| open(Purpose::Rail(n)));
        // Two were agreed upon: it gets the answer, as every rank of ours, and is dropped.
        let mut third = open(Purpose::Rail(2));
        assert!(matches!(third.read(&mut [0]), Ok(0) | Err(_)));
        let messages = open(Purpose::Messages);
        let mut control = open(Purpose::Control);
        control
            .write_all(&frame(ControlKind::Ready, 0, 0).encode())
            .unwrap();
        Self {
            data,
            rails: rails.into(),
            _control: control,
            _messages: messages,
        }
    }

    fn piece(&mut self, rail: usize, piece: PieceHeader, bytes: usize) {
        // The group may end before the last byte is written.
        let _ = self.rails[rail].write_all(&piece.encode());
        let _ = self.rails[rail].write_all(&vec![7; bytes]);
    }
}

/// The piece of the broadcast below that begins at `offset`.
fn at(offset: usize) -> PieceHeader {
    PieceHeader {
        epoch: Epoch(1),
        seq: 0,
        round: 0,
        offset: offset as u64,
        length: STRIPE.min(BYTES - offset) as u32,
    }
}

/// What becomes of a broadcast from rank 1 whose pieces are sent by `send`.
fn broadcast(send: impl FnOnce(&mut Stranger)) -> Result<Vec<u8>, Error> {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let mut options = GroupOptions::default();
    options.hints.insert("transport".into(), "tcp".into());
    options.hints.insert("connections".into(), "2".into());
    let group = GlooGroup::new("bad", options).unwrap();
    let op = || Collective::Broadcast {
        tensors: vec![Tensor::zeros(DType::U8, BYTES)],
        root: 1,
    };
    std::thread::scope(|scope| {
        let ours = scope.spawn(|| group.configure(configuration(&store, 1, 0, 2)).unwrap());
        let mut stranger = Stranger::connect(&store);
        ours.join().unwrap();
        let work = group.run(op(), SubmitOptions::by(soon())).unwrap();
        let header = DataHeader {
            epoch: Epoch(1),
            seq: 0,
            round: 0,
            algorithm: 3,
            contributors: 0,
            length: BYTES as u64,
            fingerprint: op().fingerprint(),
            lent: false,
        };
        stranger.data.write_all(&header.encode()).unwrap();
        send(&mut stranger);
        work.wait(soon())?;
        let tensor = work.take_tensor()?;
        Ok(tensor.bytes().to_vec())
    })
}

#[test]
fn pieces_land_in_any_order_and_a_rail_may_end_between_two_of_them() {
    let bytes = broadcast(|s| {
        s.piece(0, at(2 * STRIPE), 4000);
        s.rails[0].shutdown(Shutdown::Write).unwrap();
        s.piece(1, at(STRIPE), STRIPE);
        s.piece(1, at(0), STRIPE);
    });
    assert!(bytes.unwrap().iter().all(|b| *b == 7));
}

#[test]
fn a_piece_that_breaks_the_rules_is_a_protocol_error_that_names_the_rank() {
    let odd = |offset: u64, length: u32| PieceHeader {
        offset,
        length,
        ..at(0)
    };
    let ways = [
        ("between two places", odd(4, STRIPE as u32)),
        ("behind the end", odd(3 * STRIPE as u64, 4000)),
        ("at the end of all numbers", odd(u64::MAX - 100, STRIPE as u32)),
        ("too short", odd(0, 4000)),
        ("longer than the rest", odd(2 * STRIPE as u64, STRIPE as u32)),
        (
            "of another epoch",
            PieceHeader {
                epoch: Epoch(2),
                ..at(0)
            },
        ),
        ("longer than any", odd(0, STRIPE as u32 + 1)),
        ("of no bytes", odd(0, 0)),
    ];
    for (what, piece) in ways {
        let e = broadcast(|s| s.piece(0, piece, piece.length as usize)).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Protocol, "{what}: {e}");
        assert_eq!(e.context().peer, Some(1), "{what}: {e}");
    }
    let e = broadcast(|s| {
        s.piece(1, at(0), STRIPE);
        s.piece(1, at(0), STRIPE);
    })
    .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Protocol, "twice: {e}");
    let e = broadcast(|s| s.rails[1].write_all(&[0xAB; 300]).unwrap()).unwrap_err();
    assert_eq!(
        (e.kind(), e.context().peer),
        (ErrorKind::Protocol, Some(1)),
        "{e}"
    );
}

#[test]
fn a_rail_that_ends_within_a_piece_is_the_loss_of_the_rank() {
    let e = broadcast(|s| {
        s.piece(0, at(0), STRIPE);
        s.piece(1, at(STRIPE), STRIPE / 2);
        s.rails[1].shutdown(Shutdown::Both).unwrap();
    })
    .unwrap_err();
    assert_eq!(
        (e.kind(), e.context().peer),
        (ErrorKind::PeerLost, Some(1)),
        "{e}"
    );
}

#[test]
fn all_rails_ended_with_pieces_missing_is_the_loss_of_the_rank() {
    let e = broadcast(|s| {
        s.piece(0, at(0), STRIPE);
        for rail in &s.rails {
            rail.shutdown(Shutdown::Write).unwrap();
        }
    })
    .unwrap_err();
    assert_eq!(
        (e.kind(), e.context().peer),
        (ErrorKind::PeerLost, Some(1)),
        "{e}"
    );
}
