//! From a replica's place in its job to its manager: what most programs do first.

use std::sync::Arc;
use std::time::Duration;

use ftcore::{Device, Error, GroupOptions, Result, Store, TcpStore, deadline_in};
use manager::{Manager, ManagerConfig};

use super::ReplicaEnv;

/// How long the store in which the ranks of a replica meet may take to answer.
const MEET: Duration = Duration::from_secs(30);

impl ReplicaEnv {
    /// Joins the job as `replicaN` over the CPU's default backend, with the usual values.
    ///
    /// Errors: those of [`backend::fault_tolerant_group`](crate::backend::fault_tolerant_group) and [`Manager::new`].
    pub fn join(&self) -> Result<Manager> {
        self.join_over(None, &Device::CPU, &GroupOptions::default(), |_| ())
    }

    /// As [`join`](Self::join), over a backend and device of one's choice; `change` sets what the program wants otherwise. A program that names a
    /// backend which runs isolated begins with [`backend::init`](crate::backend::init).
    ///
    /// Errors: as [`join`](Self::join).
    pub fn join_over(
        &self,
        backend: Option<&str>,
        device: &Device,
        options: &GroupOptions,
        change: impl FnOnce(&mut ManagerConfig),
    ) -> Result<Manager> {
        let group = crate::backend::fault_tolerant_group(backend, device, options)?;
        let mut config = ManagerConfig::new(format!("replica{}", self.replica), &self.lighthouse);
        (config.group_rank, config.group_world_size) = (self.rank, self.ranks);
        if self.ranks > 1 {
            let address = self.store.as_deref().ok_or_else(|| {
                Error::invalid("a replica of several ranks has no store in which they meet")
            })?;
            let store: Arc<dyn Store> = Arc::new(TcpStore::connect(address, deadline_in(MEET))?);
            config.replica_store = Some(store);
        }
        change(&mut config);
        Manager::new(group, config)
    }
}
