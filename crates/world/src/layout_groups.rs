//! This rank's groups of a [`Layout`]: all ranks agree on the layout once; the members of a group connect when they first ask for it.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use ftcore::{Configuration, Error, ErrorKind, ProcessGroup, Result, time_left};

use crate::place::Host;
use crate::{BackendSpec, GroupKind, GroupSpec, Layout, WorldOptions};

/// The groups of a layout that this rank is in. [`World::layout`](crate::World::layout) makes it.
///
/// A group connects on the first call that asks for it. That call waits for the group's other members, and for no other rank; a group of one
/// waits for none. Members ask for their groups in the same order, or from threads of their own: two ranks that each wait for the other in another
/// group do so until the deadline. Where the world splits groups, those that have several members and no options of their own are there from the start.
///
/// While one thread connects a group, others that ask for it wait with it, each until its own deadline.
///
/// A group that failed to connect stays failed: what its members have left in the store would mislead a second attempt.
pub struct LayoutGroups {
    layout: Layout,
    specs: BTreeMap<GroupKind, GroupSpec>,
    options: WorldOptions,
    /// Of all ranks, under a prefix that no other groups have.
    all: Configuration,
    slots: Mutex<BTreeMap<Key, Slot>>,
    /// Notified whenever a group was connected or failed.
    changed: Condvar,
    /// Rank 0's, so that the others find the store.
    _host: Arc<Host>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    Kind(GroupKind),
    Gloo(GroupKind),
    /// The lower and the higher rank.
    Pair(u32, u32),
}

enum Slot {
    /// A call is at it; the lock is free meanwhile.
    Connecting,
    Connected(Arc<dyn ProcessGroup>),
    Failed(Error),
}

impl LayoutGroups {
    pub(crate) fn new(
        layout: Layout,
        specs: BTreeMap<GroupKind, GroupSpec>,
        options: WorldOptions,
        all: Configuration,
        host: Arc<Host>,
        split: Vec<(GroupKind, Box<dyn ProcessGroup>)>,
    ) -> Self {
        let slots = split
            .into_iter()
            .map(|(kind, group)| (Key::Kind(kind), Slot::Connected(Arc::from(group))));
        Self {
            slots: Mutex::new(slots.collect()),
            changed: Condvar::new(),
            layout,
            specs,
            options,
            all,
            _host: host,
        }
    }

    /// Who is in which group.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// This rank's group of this kind; `None` if it is in none. Its ranks are those of [`Layout::group_of`], in that order.
    ///
    /// Errors: `NotFound` for a kind that the layout does not have; what an option of its [`GroupSpec`], or `configure`, says, again on each call.
    pub fn group(&self, kind: GroupKind, deadline: Instant) -> Result<Option<Arc<dyn ProcessGroup>>> {
        let spec = self.specs.get(&kind).cloned().unwrap_or_default();
        self.member(Key::Kind(kind), kind, &spec, deadline)
    }

    /// A group of the same ranks over gloo on the CPU, beside [`group`](Self::group).
    ///
    /// Errors: as of [`group`](Self::group).
    pub fn gloo(&self, kind: GroupKind, deadline: Instant) -> Result<Option<Arc<dyn ProcessGroup>>> {
        let of = self.specs.get(&kind);
        let spec = GroupSpec {
            backends: Some("cpu:gloo".parse::<BackendSpec>()?),
            timeout: of.and_then(|spec| spec.timeout),
            ..GroupSpec::default()
        };
        self.member(Key::Gloo(kind), kind, &spec, deadline)
    }

    /// A group of this rank and rank `other` of its pipeline, for messages that do not wait for those of other stages. The lower rank is
    /// rank 0 of it. Both call this; no other rank takes part. Made as the group of the pipeline, never by a split.
    ///
    /// Errors: `InvalidArgument` if `other` is not another rank of this rank's pipeline; as of [`group`](Self::group).
    pub fn pair(&self, other: u32, deadline: Instant) -> Result<Arc<dyn ProcessGroup>> {
        let me = self.all.rank;
        let pipeline = self.layout.group_of(me, GroupKind::Pipeline)?.unwrap_or_default();
        if me == other || !pipeline.contains(&other) {
            return Err(Error::invalid(format!(
                "rank {other} is not another rank of the pipeline of rank {me}, whose ranks are {pipeline:?}"
            )));
        }
        let ranks = [me.min(other), me.max(other)];
        let spec = self.specs.get(&GroupKind::Pipeline).cloned().unwrap_or_default();
        let [low, high] = ranks;
        self.connected(
            Key::Pair(low, high),
            &format!("pair-{low}-{high}"),
            &ranks,
            &spec,
            deadline,
        )
    }

    fn member(
        &self,
        key: Key,
        kind: GroupKind,
        spec: &GroupSpec,
        deadline: Instant,
    ) -> Result<Option<Arc<dyn ProcessGroup>>> {
        let Some(ranks) = self.layout.group_of(self.all.rank, kind)? else {
            return Ok(None);
        };
        let side = if matches!(key, Key::Gloo(_)) { "-gloo" } else { "" };
        let first = ranks.first().copied().unwrap_or(0);
        let name = format!("{kind}{side}-{first}");
        self.connected(key, &name, &ranks, spec, deadline).map(Some)
    }

    /// The group of this key, which the first call connects among `ranks`. Calls for other keys do not wait.
    fn connected(
        &self,
        key: Key,
        name: &str,
        ranks: &[u32],
        spec: &GroupSpec,
        deadline: Instant,
    ) -> Result<Arc<dyn ProcessGroup>> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match slots.get(&key) {
                None => break,
                Some(Slot::Connected(group)) => return Ok(group.clone()),
                Some(Slot::Failed(error)) => return Err(error.clone()),
                Some(Slot::Connecting) => {}
            }
            let left = time_left(deadline);
            if left.is_zero() {
                return Err(Error::timeout(format!(
                    "another call on rank {} is connecting {name} of the layout among ranks {ranks:?}, and had not ended by the deadline of this one",
                    self.all.rank
                )));
            }
            let woken = self.changed.wait_timeout(slots, left);
            slots = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        slots.insert(key, Slot::Connecting);
        drop(slots);
        let made = self.connect(name, ranks, spec, deadline);
        let slot = match &made {
            Ok(group) => Slot::Connected(group.clone()),
            Err(error) => Slot::Failed(error.clone()),
        };
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        slots.insert(key, slot);
        self.changed.notify_all();
        made
    }

    fn connect(
        &self,
        name: &str,
        ranks: &[u32],
        spec: &GroupSpec,
        deadline: Instant,
    ) -> Result<Arc<dyn ProcessGroup>> {
        let me = ranks.iter().position(|rank| *rank == self.all.rank);
        let (Some(Ok(rank)), Ok(world_size)) = (me.map(u32::try_from), u32::try_from(ranks.len())) else {
            return Err(Error::new(
                ErrorKind::Internal,
                format!(
                    "rank {} connects {name} of the layout, whose ranks are {ranks:?}",
                    self.all.rank
                ),
            ));
        };
        let configuration = Configuration {
            prefix: format!("{}/{name}", self.all.prefix),
            name: spec.name.clone().unwrap_or_else(|| name.to_string()),
            rank,
            world_size,
            deadline,
            ..self.all.clone()
        };
        let group = self.options.changed_by(spec)?.group(&configuration.name)?;
        group.configure(configuration)?;
        Ok(Arc::from(group))
    }
}
