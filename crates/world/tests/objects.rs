//! Values over real groups: gloo with ranks as threads.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use backend_gloo as _;
use ftcore::{ErrorKind, InMemoryStore, ProcessGroupExt, Result, Store, deadline_in};
use oxccl_world::{
    ObjectOptions, World, WorldOptions, all_gather_object, broadcast_object, gather_object, scatter_object,
};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Report {
    rank: u32,
    names: Vec<String>,
    losses: BTreeMap<String, f64>,
}

fn report(rank: u32) -> Report {
    Report {
        rank,
        // Of another length on each rank.
        names: vec!["näme".to_string(); rank as usize * 1000],
        losses: [("first".to_string(), 0.1 + f64::from(rank))].into(),
    }
}

fn options() -> ObjectOptions {
    ObjectOptions::default()
}

fn soon() -> Instant {
    deadline_in(Duration::from_secs(30))
}

/// Runs `body` as the ranks of a world over gloo.
fn ranks<T: Send>(world: u32, body: impl Fn(&World) -> T + Sync) -> Vec<T> {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..world)
            .map(|rank| {
                let (store, body) = (store.clone(), &body);
                scope.spawn(move || {
                    let made = World::with_store(store, rank, world, WorldOptions::default(), soon());
                    body(&made.unwrap())
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

#[test]
fn values_of_any_size_go_to_all_to_one_and_from_one() {
    for size in 1..=3 {
        ranks(size, |world| {
            let (group, rank) = (world.group(), world.rank());
            let all = all_gather_object(group, &report(rank), options()).unwrap();
            assert_eq!(all, (0..size).map(report).collect::<Vec<_>>());
            for root in 0..size {
                let mine = (rank == root).then(|| report(root));
                let got: Report = broadcast_object(group, mine.as_ref(), root, options()).unwrap();
                assert_eq!(got, report(root));
                let gathered = gather_object(group, &report(rank), root, options()).unwrap();
                assert_eq!(gathered, (rank == root).then(|| all.clone()));
                let parts = (rank == root).then_some(&all[..]);
                assert_eq!(
                    scatter_object(group, parts, root, options()).unwrap(),
                    report(rank)
                );
            }
        });
    }
}

/// A type that refuses to be written, on order.
struct Unwritable(bool);

impl Serialize for Unwritable {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            true => Err(serde::ser::Error::custom("it is a file")),
            false => to.serialize_u8(1),
        }
    }
}

impl<'de> Deserialize<'de> for Unwritable {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        u8::deserialize(from).map(|_| Self(false))
    }
}

#[test]
fn what_cannot_be_sent_is_an_error_on_every_rank_and_the_group_goes_on() {
    ranks(3, |world| {
        let (group, rank) = (world.group(), world.rank());
        // Too much for one rank alone.
        let small = ObjectOptions {
            limit: if rank == 1 { 1000 } else { 1 << 20 },
            ..options()
        };
        let e = all_gather_object(group, &report(rank), small).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidArgument);
        assert!(e.to_string().contains("rank 1 takes 1000"), "{e}");
        let e = all_gather_object(group, &Unwritable(rank == 2), options())
            .err()
            .unwrap();
        assert_eq!(e.kind(), ErrorKind::InvalidArgument);
        let says = ["rank 2 has no value", "it is a file"][usize::from(rank == 2)];
        assert!(e.to_string().contains(says), "{e}");
        let e = broadcast_object::<u8>(group, None, 0, options()).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}");
        let e = scatter_object(group, (rank == 0).then_some(&[1u8, 2][..]), 0, options()).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}");
        let e = gather_object(group, &1u8, 3, options()).unwrap_err();
        assert!(
            e.to_string().contains("root 3 does not exist in a world of 3"),
            "{e}"
        );
        // Another type than what was sent is one rank's own error.
        let sent = (rank == 0).then_some("text".to_string());
        match rank {
            0 => drop(broadcast_object(group, sent.as_ref(), 0, options()).unwrap()),
            _ => {
                let e = broadcast_object::<u32>(group, None, 0, options()).unwrap_err();
                assert_eq!((e.kind(), e.context().peer), (ErrorKind::Corrupt, Some(0)));
            }
        }
        group.barrier().unwrap();
    });
}
