//! Messages that gloo matches for another member, against a peer that is played by hand: it has the same two groups, and answers as it likes.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a failure here is a failed test"
)]

use std::sync::Arc;
use std::time::{Duration, Instant};

// Links the backend, which registers itself.
use backend_gloo as _;
use ftcore::{
    Collective, Completion, Configuration, DType, Device, Epoch, Error, ErrorKind, Feature, GroupOptions,
    InMemoryStore, ProcessGroup, ProcessGroupExt, ReduceOp, Registry, Store, SubmitOptions, Tensor, Work,
    deadline_in,
};
use oxccl_world::{BackendSpec, WorldOptions};

/// The tag of the answers.
const ANSWERS: u32 = u32::MAX;

fn soon() -> Instant {
    deadline_in(Duration::from_secs(30))
}

fn at(store: &Arc<dyn Store>, rank: u32, part: &str) -> Configuration {
    Configuration {
        store: store.clone(),
        prefix: format!("g{part}"),
        name: "g".to_string(),
        epoch: Epoch(1),
        rank,
        world_size: 2,
        deadline: soon(),
        cancel: Default::default(),
    }
}

/// Rank 1, by hand.
struct Peer {
    moves: Box<dyn ProcessGroup>,
    matches: Box<dyn ProcessGroup>,
}

impl Peer {
    fn configured(store: &Arc<dyn Store>) -> Self {
        let gloo = |part: &str| {
            let options = GroupOptions::default();
            let group = Registry::global().create("gloo", &Device::CPU, &options).unwrap();
            group.configure(at(store, 1, part)).unwrap();
            group
        };
        Self {
            moves: gloo("/cpu"),
            matches: gloo("/messages"),
        }
    }

    /// The envelope with this tag: number, count, dtype, member.
    fn envelope(&self, tag: u32) -> Vec<u64> {
        let work = self.matches.recv(Tensor::zeros(DType::U64, 4), 0, tag).unwrap();
        work.take_tensor().unwrap().into_vec().unwrap()
    }

    fn answer(&self, words: &[u64]) -> Work {
        self.matches.send(Tensor::from_slice(words), 0, ANSWERS).unwrap()
    }
}

/// Rank 0 of a matched group, and the peer.
fn pair() -> (Box<dyn ProcessGroup>, Peer) {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let options = WorldOptions {
        backends: "cpu:gloo,messages:gloo".parse().unwrap(),
        ..WorldOptions::default()
    };
    let group = options.group("g").unwrap();
    std::thread::scope(|scope| {
        let peer = scope.spawn(|| Peer::configured(&store));
        group.configure(at(&store, 0, "")).unwrap();
        (group, peer.join().unwrap())
    })
}

fn send(tensor: Tensor, tag: u32) -> Collective {
    Collective::Send { tensor, peer: 1, tag }
}

/// The failure of `work`, which gives its only tensor back.
fn failure(work: &Work) -> Error {
    let error = work.wait(soon()).unwrap_err();
    assert_eq!(work.recover().len(), 1, "{error}");
    error
}

#[test]
fn a_matched_group_says_what_it_is() {
    let (group, peer) = pair();
    assert_eq!(&*group.info().backend, "cpu:gloo,messages:gloo");
    let offers = group.capabilities();
    assert!(offers.has(Feature::Tags) && offers.has(Feature::RecvAny) && offers.has(Feature::Abort));
    assert_eq!(offers.devices, ["cpu"]);
    let before = group.traffic();
    let work = group.send(Tensor::from_vec(vec![7u8; 3]), 1, 5).unwrap();
    assert_eq!(peer.envelope(5)[1..3], [3, u64::from(DType::U8.code())]);
    let received = peer.moves.recv(Tensor::zeros(DType::U8, 3), 0, 0).unwrap();
    peer.answer(&[0, 3, u64::from(DType::U8.code()), 0]);
    assert_eq!(received.take_tensor().unwrap().into_vec::<u8>().unwrap(), [7; 3]);
    work.take().unwrap();
    assert!(group.traffic().sent > before.sent);
}

#[test]
fn the_tag_of_the_answers_is_refused_and_the_tensor_comes_back() {
    let (group, _peer) = pair();
    let receive = |tag| Collective::Recv {
        tensor: Tensor::zeros(DType::U8, 1),
        peer: None,
        tag,
    };
    let batch = Collective::Batch {
        ops: vec![receive(1), send(Tensor::zeros(DType::U8, 1), ANSWERS)],
    };
    for op in [receive(ANSWERS), batch] {
        let tensors = op.tensors().len();
        let rejected = group.run(op, SubmitOptions::default()).err().unwrap();
        assert_eq!(rejected.error.kind(), ErrorKind::InvalidArgument);
        assert!(
            rejected.error.to_string().contains("4294967295"),
            "{}",
            rejected.error
        );
        assert_eq!(rejected.op.tensors().len(), tensors);
    }
    assert!(group.error().is_none());
}

#[test]
fn an_answer_names_the_message_that_moves_next() {
    let (group, peer) = pair();
    let works: Vec<Work> = (0..3u64)
        .map(|n| group.send(Tensor::from_vec(vec![n]), 1, n as u32).unwrap())
        .collect();
    let dtype = u64::from(DType::U64.code());
    for tag in [2u32, 0, 1] {
        let [number, count, code, member] = peer.envelope(tag)[..] else {
            panic!("an envelope of another form");
        };
        assert_eq!((number, count, code, member), (u64::from(tag), 1, dtype, 0));
        let received = peer.moves.recv(Tensor::zeros(DType::U64, 1), 0, 0).unwrap();
        peer.answer(&[number, 1, dtype, 0]);
        let got = received.take_tensor().unwrap().into_vec::<u64>().unwrap();
        assert_eq!(got, [u64::from(tag)]);
    }
    works.iter().for_each(|work| work.wait(soon()).unwrap());
}

#[test]
fn a_receive_is_with_the_library_before_it_is_answered_and_answers_have_the_order_of_the_receives() {
    let (group, peer) = pair();
    let dtype = u64::from(DType::U64.code());
    // Two receives that are matched in the other order.
    let works = [5u32, 6].map(|tag| group.recv(Tensor::zeros(DType::U64, 1), 1, tag).unwrap());
    for (number, tag) in [(40u64, 6), (41, 5)] {
        let envelope = Tensor::from_vec(vec![number, 1, dtype, 0]);
        peer.matches.send(envelope, 0, tag).unwrap();
    }
    for _ in 0..2 {
        let answer = peer
            .matches
            .recv(Tensor::zeros(DType::U64, 4), 0, ANSWERS)
            .unwrap();
        let answer = answer.take_tensor().unwrap().into_vec::<u64>().unwrap();
        let value = Tensor::from_vec(vec![answer[0]]);
        peer.moves.send(value, 0, 0).unwrap().wait(soon()).unwrap();
    }
    let values = works.map(|work| {
        let Completion { source, tensors, .. } = work.take().unwrap();
        assert_eq!(source, Some(1));
        tensors[0].as_slice::<u64>().unwrap()[0]
    });
    assert_eq!(values, [41, 40]);
}

#[test]
fn inv8_a_send_that_waits_for_its_answer_is_ended_by_an_abort_and_gives_its_memory_back() {
    let (group, peer) = pair();
    let work = group.send(Tensor::from_vec(vec![9u8]), 1, 5).unwrap();
    peer.envelope(5);
    group.abort("enough");
    let error = failure(&work);
    assert_eq!(error.kind(), ErrorKind::Aborted, "{error}");
    assert!(error.to_string().contains("enough"), "{error}");
    let heard = peer.moves.recv(Tensor::zeros(DType::U8, 1), 0, 0);
    let heard = heard.map_err(Error::from).and_then(|work| work.take());
    assert!(heard.is_err(), "the member that moves was not ended");
}

#[test]
fn a_send_that_is_taken_and_not_answered_ends_at_its_deadline_and_says_whom_it_waited_for() {
    let (group, peer) = pair();
    let options = SubmitOptions::by(deadline_in(Duration::from_millis(300)));
    let work = group.run(send(Tensor::zeros(DType::U8, 1), 77), options).unwrap();
    peer.envelope(77);
    let error = failure(&work);
    assert_eq!(
        (error.kind(), error.context().op),
        (ErrorKind::Timeout, Some("send"))
    );
    let text = error.to_string();
    assert!(text.contains("rank 1") && text.contains("tag 77"), "{text}");
}

#[test]
fn an_answer_to_no_message_is_a_protocol_error() {
    let (group, peer) = pair();
    let work = group.send(Tensor::zeros(DType::U8, 1), 1, 5).unwrap();
    peer.envelope(5);
    peer.answer(&[1, 1, u64::from(DType::U8.code()), 0]);
    let error = failure(&work);
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    assert!(error.to_string().contains("answers message 1"), "{error}");
}

#[test]
fn what_does_not_fit_is_told_in_the_words_of_the_one_that_finds_it() {
    let (group, peer) = pair();
    let work = group.recv(Tensor::zeros(DType::F32, 4), 1, 5).unwrap();
    let envelope = Tensor::from_vec(vec![0, 8, u64::from(DType::F32.code()), 0]);
    peer.matches.send(envelope, 0, 5).unwrap();
    let answer = peer
        .matches
        .recv(Tensor::zeros(DType::U64, 4), 0, ANSWERS)
        .unwrap();
    let answer = answer.take_tensor().unwrap().into_vec::<u64>().unwrap();
    assert_eq!(answer, [0, 4, u64::from(DType::F32.code()), 0]);
    let error = failure(&work);
    assert_eq!(
        (error.kind(), error.context().peer),
        (ErrorKind::Mismatch, Some(1))
    );
    let says = "rank 1 sends 8 elements of f32 with tag 5; rank 0 receives 4 elements of f32";
    assert!(error.to_string().contains(says), "{error}");
}

#[test]
fn a_collective_that_fails_ends_the_messages_that_are_not_matched_yet() {
    let (group, peer) = pair();
    let message = group.recv_any(Tensor::zeros(DType::U8, 1), 5).unwrap();
    let sum = group
        .all_reduce(Tensor::from_vec(vec![1f32]), ReduceOp::Sum)
        .unwrap();
    peer.moves.abort("only this one");
    assert!(sum.wait(soon()).is_err());
    let error = failure(&message);
    assert!(error.to_string().contains("only this one"), "{error}");
    // The matcher's other end hears of it.
    let heard = peer.matches.recv(Tensor::zeros(DType::U8, 1), 0, 3);
    let heard = heard.map_err(Error::from).and_then(|work| work.take());
    assert!(heard.is_err(), "the matcher was not ended");
}

#[test]
fn a_group_that_is_shut_down_lets_its_messages_end_first() {
    let (group, peer) = pair();
    let work = group.send(Tensor::from_vec(vec![3u8]), 1, 5).unwrap();
    std::thread::scope(|scope| {
        let ending = scope.spawn(|| group.shutdown(soon()));
        peer.envelope(5);
        let received = peer.moves.recv(Tensor::zeros(DType::U8, 1), 0, 0).unwrap();
        peer.answer(&[0, 1, u64::from(DType::U8.code()), 0]);
        received.wait(soon()).unwrap();
        ending.join().unwrap().unwrap();
    });
    work.take().unwrap();
}

#[test]
fn a_backend_that_cannot_match_is_refused_with_one_that_can() {
    let group = |text: &str, hides: bool| {
        let wanted = WorldOptions {
            backends: text.parse::<BackendSpec>().unwrap(),
            make: Arc::new(move |name, device, options| {
                if name == "gloo" && !hides {
                    return Registry::global().create(name, device, options);
                }
                Err(Error::unsupported(format!("'{name}' does not serve {device}")))
            }),
            ..WorldOptions::default()
        };
        wanted.group("g").map(drop)
    };
    group("gloo,messages:gloo", false).unwrap();
    let error = group("cpu:gloo,messages:other", false).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("messages:other") && text.contains("messages:gloo"),
        "{text}"
    );
}
