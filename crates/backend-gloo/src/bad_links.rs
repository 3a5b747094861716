//! Tests against ranks 1 and 2 that break the rules while links are measured: they are named, and no rank waits beyond its deadline.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use ftcore::{Error, ErrorKind, GroupOptions, InMemoryStore, ProcessGroup, Store, deadline_in};

use crate::GlooGroup;
use crate::bad_peer::{Published, configuration, frame, hello};
use crate::wire::{ControlKind, Hello, Purpose};

/// The connections of a rank that is not one of ours.
struct Stranger {
    data: TcpStream,
    control: TcpStream,
    _messages: TcpStream,
}

impl Stranger {
    fn connect(store: &Arc<dyn Store>, rank: u32) -> Self {
        let published = Published::of_rank_0(store);
        let open = |purpose| {
            published.greet(&Hello {
                rank,
                world: 3,
                links: 1,
                ..hello(purpose, published.nonce)
            })
        };
        let (data, messages) = (open(Purpose::Data), open(Purpose::Messages));
        let mut control = open(Purpose::Control);
        let ready = frame(ControlKind::Ready, rank.into(), 0);
        control.write_all(&ready.encode()).unwrap();
        Self {
            data,
            control,
            _messages: messages,
        }
    }

    /// Waits until rank 0's turn begins: it asks.
    fn is_asked(&mut self) {
        let mut asked = [0; 1];
        self.data.read_exact(&mut asked).unwrap();
        assert_eq!(asked, [2]);
    }
}

/// How rank 0's `configure` fails when rank 1 does that once it is asked, and rank 2 nothing.
fn after(limit: Duration, misbehave: impl FnOnce(Stranger) -> Option<Stranger>) -> Error {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let mut options = GroupOptions::default();
    options.hints.insert("links".into(), "measured".into());
    let group = GlooGroup::new("bad", options).unwrap();
    std::thread::scope(|scope| {
        let mut configuration = configuration(&store, 1, 0, 3);
        configuration.deadline = deadline_in(limit);
        let ours = scope.spawn(|| group.configure(configuration).unwrap_err());
        let [mut one, two] = [1, 2].map(|rank| Stranger::connect(&store, rank));
        one.is_asked();
        let kept = misbehave(one);
        let error = ours.join().unwrap();
        drop((kept, two));
        error
    })
}

const LONG: Duration = Duration::from_secs(20);

#[test]
fn a_rank_that_is_lost_while_links_are_measured_is_named() {
    let error = after(LONG, |one| {
        drop(one);
        None
    });
    assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
    assert_eq!(error.context().peer, Some(1), "{error}");
}

#[test]
fn what_does_not_belong_there_is_a_protocol_error_that_names_the_rank() {
    for bytes in [&[0xAB; 300][..], &[8]] {
        let error = after(LONG, |mut one| {
            one.data.write_all(bytes).unwrap();
            Some(one)
        });
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
        assert_eq!(error.context().peer, Some(1), "{error}");
    }
}

#[test]
fn a_rank_that_gives_up_while_links_are_measured_says_why() {
    let why = "rank 1 has had enough";
    let error = after(LONG, |mut one| {
        // 1: it gives up, rather than having failed later.
        let header = frame(ControlKind::Abort, 1, why.len() as u64);
        one.control.write_all(&header.encode()).unwrap();
        one.control.write_all(why.as_bytes()).unwrap();
        one.data.shutdown(Shutdown::Both).unwrap();
        Some(one)
    });
    assert!(error.to_string().contains(why), "{error}");
}

#[test]
fn a_rank_that_is_silent_while_links_are_measured_is_named_at_the_deadline() {
    let error = after(Duration::from_secs(2), |mut one| {
        // It is there, and sends nothing for ever; rank 2 does not even answer.
        one.data.write_all(&[3]).unwrap();
        Some(one)
    });
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    let text = error.to_string();
    assert!(
        text.contains("measuring links") && text.contains("waiting for rank 2"),
        "{error}"
    );
}
