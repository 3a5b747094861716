//! Ranks as threads.

use std::sync::Arc;
use std::time::{Duration, Instant};

use backend_gloo::GlooGroup;
use ftcore::{Configuration, Epoch, GroupOptions, InMemoryStore, ProcessGroup, Store, deadline_in};

pub(crate) fn soon() -> Instant {
    deadline_in(Duration::from_secs(20))
}

pub(crate) fn group() -> GlooGroup {
    GlooGroup::new("test", GroupOptions::default()).unwrap()
}

/// A group over `auto`, `shm`, `tcp` or `mixed`; `tcp*4` has four connections for large payloads.
pub(crate) fn group_over(transport: &str) -> GlooGroup {
    if transport == "mixed" {
        return GlooGroup::mixed("test", GroupOptions::default()).unwrap();
    }
    let mut options = GroupOptions::default();
    let (transport, connections) = transport.split_once('*').unwrap_or((transport, "1"));
    options.hints.insert("transport".into(), transport.into());
    options.hints.insert("connections".into(), connections.into());
    GlooGroup::new("test", options).unwrap()
}

pub(crate) fn configuration(store: &Arc<dyn Store>, epoch: u64, rank: u32, world_size: u32) -> Configuration {
    Configuration {
        store: store.clone(),
        prefix: "test".into(),
        name: "test".into(),
        epoch: Epoch(epoch),
        rank,
        world_size,
        deadline: soon(),
        cancel: Default::default(),
    }
}

pub(crate) fn store() -> Arc<dyn Store> {
    Arc::new(InMemoryStore::new())
}

/// Runs `body` on `world` threads with configured groups; results by rank.
pub(crate) fn with_groups<T: Send>(world: u32, body: impl Fn(u32, GlooGroup) -> T + Sync) -> Vec<T> {
    with_groups_over("auto", world, body)
}

/// Likewise, over one transport.
pub(crate) fn with_groups_over<T: Send>(
    transport: &str,
    world: u32,
    body: impl Fn(u32, GlooGroup) -> T + Sync,
) -> Vec<T> {
    let store = store();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..world)
            .map(|rank| {
                let (store, body) = (&store, &body);
                scope.spawn(move || {
                    let group = group_over(transport);
                    group.configure(configuration(store, 1, rank, world)).unwrap();
                    body(rank, group)
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// Waits until `ready`, which must become true soon.
pub(crate) fn eventually(what: &str, mut ready: impl FnMut() -> bool) {
    let until = soon();
    while !ready() {
        assert!(Instant::now() < until, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(2));
    }
}
