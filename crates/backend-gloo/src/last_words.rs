//! A rank that ends because it has lost another one says so first: rank 0, which is ours, blames that one and not who passed the
//! loss on, however the words and the closing connections come in. Ranks 1 and 2 are made by hand; rank 1 has lost rank 2.

use std::io::Write;
use std::net::Shutdown;
use std::sync::Arc;
use std::time::Duration;

use ftcore::{
    DType, Error, ErrorKind, GroupOptions, InMemoryStore, ProcessGroup, ProcessGroupExt, ReduceOp, Store,
    Tensor, Work, time_left,
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

impl Scene {
    fn new() -> Self {
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
        let sum = group
            .allreduce(Tensor::zeros(DType::F32, 1000), ReduceOp::Sum)
            .unwrap();
        Self { group, sum, one, two }
    }

    /// Rank 1 says that it has lost rank 2.
    fn speak(&mut self) {
        let text = b"peer 2 closed the connection";
        let header = Control {
            code: code_of(ErrorKind::PeerLost),
            a: 2,
            ..frame(ControlKind::Abort, 0, text.len() as u64)
        };
        self.one.control.write_all(&header.encode()).unwrap();
        self.one.control.write_all(text).unwrap();
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
fn a_message_that_is_slower_than_the_good_bye_of_its_sender_is_received() {
    let arrives = || {
        let (_group, receive, mut one) = receiving();
        let good_bye = frame(ControlKind::Goodbye, 0, 0).encode();
        one.control.write_all(&good_bye).unwrap();
        // So that the good-bye is heard first; whether it is only decides what is tested.
        std::thread::sleep(Duration::from_millis(5));
        let message = Control {
            a: 3,
            ..frame(ControlKind::Inline, 0, 100)
        };
        // Given up already if this thread had no core for long.
        let _ = one.messages.write_all(&message.encode());
        let _ = one.messages.write_all(&[7; 100]);
        receive.wait(soon()).is_ok() && receive.take_tensor().unwrap().bytes() == [7; 100]
    };
    assert!((0..5).any(|_| arrives()));
}

#[test]
fn a_connection_for_messages_that_ends_alone_is_that_rank_s_own_loss() {
    let (_group, receive, one) = receiving();
    one.messages.shutdown(Shutdown::Both).unwrap();
    let error = receive.wait(soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
    assert_eq!(error.context().peer, Some(1), "{error}");
}
