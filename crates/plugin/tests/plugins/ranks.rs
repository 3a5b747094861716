//! Ranks as threads of this process, each with a group of a plugin's backend.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::registry::Backend;
use ftcore::{Configuration, Device, Epoch, GroupOptions, InMemoryStore, ProcessGroup, Store, deadline_in};

use crate::{Outcome, text};

pub(crate) fn soon() -> Instant {
    deadline_in(Duration::from_secs(60))
}

pub(crate) fn configuration(store: &Arc<dyn Store>, epoch: u64, rank: u32, world: u32) -> Configuration {
    Configuration {
        store: store.clone(),
        prefix: "test".into(),
        name: "ranks".into(),
        epoch: Epoch(epoch),
        rank,
        world_size: world,
        deadline: soon(),
        cancel: Default::default(),
    }
}

/// The backend `name` of a plugin.
pub(crate) fn backend(plugin: &oxccl_plugin::Loaded, name: &str) -> Outcome<Backend> {
    let found = plugin.backends().into_iter().find(|b| b.name == name);
    found.ok_or_else(|| format!("no backend {name} in {plugin:?}"))
}

/// Runs `body` on every rank of a configured group; the results in the order of ranks.
pub(crate) fn with_ranks<T: Send>(
    backend: &Backend,
    device: &Device,
    world: u32,
    body: impl Fn(u32, &dyn ProcessGroup, &Arc<dyn Store>) -> Outcome<T> + Sync,
) -> Outcome<Vec<T>> {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world)
            .map(|rank| {
                let (body, store) = (&body, store.clone());
                scope.spawn(move || {
                    let group = backend
                        .factory
                        .create(device, &GroupOptions::default())
                        .map_err(text)?;
                    group
                        .configure(configuration(&store, 1, rank, world))
                        .map_err(text)?;
                    body(rank, &*group, &store)
                })
            })
            .collect();
        ranks
            .into_iter()
            .map(|r| r.join().unwrap_or_else(|_| Err("a rank panicked".to_string())))
            .collect()
    })
}
