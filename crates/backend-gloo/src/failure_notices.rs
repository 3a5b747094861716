//! A rank that ends because it has lost another one says so first: rank 0, which is ours, blames that one and not who passed the
//! loss on, however the words and the closing connections come in. Ranks 1 and 2 are made by hand; rank 1 has lost rank 2.

use std::io::Write;
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use ftcore::{
    Collective, DType, Error, ErrorKind, GroupOptions, InMemoryStore, ProcessGroup, ProcessGroupExt,
    ReduceOp, Store, SubmitOptions, Tensor, Work, time_left,
};

use crate::GlooGroup;
use crate::bad_peer::{Stranger, configuration, data_header, frame, soon};
use crate::schedule::Algorithm;
use crate::wire::{Control, ControlKind, DataHeader, code_of};

/// Rank 0's group, what is pending on it, and the other two.
struct Scene {
    group: GlooGroup,
    sum: Work,
    one: Stranger,
    two: Stranger,
}

/// Rank 0's group and the other two.
fn connected() -> (GlooGroup, Stranger, Stranger) {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let mut options = GroupOptions::default();
    options.hints.insert("transport".into(), "tcp".into());
    let group = GlooGroup::new("words", options).unwrap();
    let (one, two) = std::thread::scope(|scope| {
        let ours = scope.spawn(|| group.configure(configuration(&store, 1, 0, 3)).unwrap());
        let others = [1, 2].map(|rank| Stranger::connect_as(&store, rank, 3));
        ours.join().unwrap();
        others.into()
    });
    (group, one, two)
}

/// Rank 1 says that it has lost rank 2.
fn speak(one: &mut Stranger) {
    let text = b"peer 2 closed the connection";
    let header = Control {
        code: code_of(ErrorKind::PeerLost),
        a: 2,
        ..frame(ControlKind::Abort, 0, text.len() as u64)
    };
    one.control.write_all(&header.encode()).unwrap();
    one.control.write_all(text).unwrap();
}

impl Scene {
    fn new() -> Self {
        let (group, one, two) = connected();
        let sum = group
            .all_reduce(Tensor::zeros(DType::F32, 1000), ReduceOp::Sum)
            .unwrap();
        Self { group, sum, one, two }
    }

    fn speak(&mut self) {
        speak(&mut self.one);
    }

    /// The parts of both in the pending sum.
    fn complete(&mut self) {
        for stranger in [&mut self.one, &mut self.two] {
            let header = DataHeader {
                algorithm: Algorithm::Direct as u32,
                ..data_header(0, 4000)
            };
            stranger.data.write_all(&header.encode()).unwrap();
            stranger.data.write_all(&[0; 4000]).unwrap();
        }
    }

    fn close_data(&self) {
        self.one.data.shutdown(Shutdown::Both).unwrap();
    }

    fn close_control(&self) {
        self.one.control.shutdown(Shutdown::Both).unwrap();
    }

    /// What the group says in the end.
    fn error(&self) -> Error {
        let deadline = soon();
        loop {
            if let Some(error) = self.group.error() {
                return error;
            }
            assert!(!time_left(deadline).is_zero(), "the group does not fail");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn blames_rank_2(error: &Error) {
    assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
    assert_eq!(error.context().peer, Some(2), "{error}");
    assert!(error.to_string().contains("rank 1 reports"), "{error}");
}

#[test]
fn a_collective_that_needs_a_rank_that_passed_a_loss_on_blames_the_lost_one() {
    for data_first in [false, true] {
        let mut scene = Scene::new();
        if data_first {
            scene.close_data();
        }
        scene.speak();
        scene.close_control();
        if !data_first {
            scene.close_data();
        }
        blames_rank_2(&scene.sum.wait(soon()).unwrap_err());
        blames_rank_2(&scene.error());
    }
}

#[test]
fn words_that_were_put_off_for_a_running_collective_are_remembered_when_the_connection_ends() {
    for _ in 0..20 {
        let mut scene = Scene::new();
        scene.speak();
        scene.complete();
        scene.close_control();
        // It had all that it needed, unless the words came before it had begun.
        if let Err(error) = scene.sum.wait(soon()) {
            blames_rank_2(&error);
        }
        blames_rank_2(&scene.error());
    }
}

#[test]
fn a_receive_from_a_rank_that_passed_a_loss_on_blames_the_lost_one() {
    let mut scene = Scene::new();
    let receive = scene.group.recv(Tensor::zeros(DType::F32, 8), 1, 3).unwrap();
    scene.speak();
    scene.close_control();
    blames_rank_2(&receive.wait(soon()).unwrap_err());
    assert!(scene.sum.wait(soon()).is_err());
}

#[test]
fn a_data_connection_that_ends_alone_is_that_rank_s_own_loss() {
    let scene = Scene::new();
    scene.close_data();
    let error = scene.sum.wait(soon()).unwrap_err();
    assert_eq!(error.context().peer, Some(1), "{error}");
}

/// Rank 0 of two, which waits for 100 bytes of rank 1 with tag 3.
fn receiving() -> (GlooGroup, Work, Stranger) {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let mut options = GroupOptions::default();
    options.hints.insert("transport".into(), "tcp".into());
    let group = GlooGroup::new("words", options).unwrap();
    let one = std::thread::scope(|scope| {
        let ours = scope.spawn(|| group.configure(configuration(&store, 1, 0, 2)).unwrap());
        let one = Stranger::connect_as(&store, 1, 2);
        ours.join().unwrap();
        one
    });
    let receive = group.recv(Tensor::zeros(DType::U8, 100), 1, 3).unwrap();
    (group, receive, one)
}

#[test]
fn a_message_that_is_slower_than_the_leave_of_its_sender_is_received() {
    let (_group, receive, mut one) = receiving();
    let leave = frame(ControlKind::Leave, 0, 0).encode();
    one.control.write_all(&leave).unwrap();
    one.control.shutdown(Shutdown::Both).unwrap();
    let message = Control {
        a: 3,
        ..frame(ControlKind::Inline, 0, 100)
    };
    // In pieces, each later than a rank that is gone is waited for, as over a slow link.
    for piece in message.encode().chunks(8).chain([&[7; 50][..], &[7; 50]]) {
        std::thread::sleep(Duration::from_millis(30));
        one.messages.write_all(piece).unwrap();
    }
    assert_eq!(receive.take_tensor().unwrap().bytes(), [7; 100]);
}

#[test]
fn a_rank_that_could_not_listen_for_long_blames_nobody_before_it_has_listened() {
    let (group, mut one, _two) = connected();
    // The engine's thread is held up, as in a process that was stopped or got no core, while the caller of a blocking call goes on.
    let (go, gone) = channel::<()>();
    let (holding, held) = channel();
    let receive = group.recv(Tensor::zeros(DType::U8, 1), 1, 3).unwrap();
    receive.on_complete(move |_| {
        holding.send(()).unwrap();
        let _ = gone.recv_timeout(time_left(soon()));
    });
    let message = Control {
        a: 3,
        ..frame(ControlKind::Inline, 0, 1)
    };
    one.messages.write_all(&message.encode()).unwrap();
    one.messages.write_all(&[7]).unwrap();
    held.recv_timeout(time_left(soon())).unwrap();
    let error = std::thread::scope(|scope| {
        let call = scope.spawn(|| {
            let op = Collective::AllReduce {
                tensors: vec![Tensor::zeros(DType::F32, 1000)],
                op: ReduceOp::Sum,
            };
            group
                .run_blocking(op, SubmitOptions::by(soon()))
                .unwrap_err()
                .error
        });
        speak(&mut one);
        one.control.shutdown(Shutdown::Both).unwrap();
        one.data.shutdown(Shutdown::Both).unwrap();
        // For so long; nothing else happens.
        std::thread::sleep(Duration::from_millis(1300));
        go.send(()).unwrap();
        call.join().unwrap()
    });
    blames_rank_2(&error);
    blames_rank_2(&group.error().unwrap());
}

#[test]
fn a_connection_for_messages_that_ends_alone_is_that_rank_s_own_loss() {
    let (_group, receive, one) = receiving();
    one.messages.shutdown(Shutdown::Both).unwrap();
    let error = receive.wait(soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
    assert_eq!(error.context().peer, Some(1), "{error}");
}
