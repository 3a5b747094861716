//! The group of all ranks of a job, and the groups that are made from it.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::lifecycle::Split;
use ftcore::{
    Cancel, Configuration, Device, DeviceKind, Epoch, Error, ErrorKind, GroupOptions, ProcessGroup, Registry,
    Result, Store, deadline_in,
};

use crate::place::Host;
use crate::{BackendSpec, ByDevice, GroupKind, Layout, LayoutGroups, Place};

/// With the value 1, [`World::new_group`] and [`World::split_group`] split the world's group; with 0, or unset, they configure new groups.
pub const ENV_SPLIT_GROUPS: &str = "OXCCL_SPLIT_GROUPS";

/// Makes an unconfigured group of a backend on a device.
pub type Make = dyn Fn(&str, &Device, &GroupOptions) -> Result<Box<dyn ProcessGroup>> + Send + Sync;

/// How a [`World`] is made.
#[derive(Clone)]
pub struct WorldOptions {
    /// Which backend serves which device.
    pub backends: BackendSpec,
    /// The group's own device.
    pub device: Device,
    /// Options of the backends' groups. Every backend must honour them (INV-9).
    pub options: GroupOptions,
    /// In the place of `options` for backends of these device kinds.
    pub options_of: BTreeMap<DeviceKind, GroupOptions>,
    /// Whether groups are made by splitting the world's; `None` asks [`ENV_SPLIT_GROUPS`].
    pub split_groups: Option<bool>,
    /// Makes the backends' groups; [`Registry::create`] of the process's registry if you do not say otherwise.
    pub make: Arc<Make>,
    /// Ends the waits of the first connection with its reason.
    pub cancel: Cancel,
}

impl Default for WorldOptions {
    fn default() -> Self {
        Self {
            backends: BackendSpec::Default,
            device: Device::CPU,
            options: GroupOptions::default(),
            options_of: BTreeMap::new(),
            split_groups: None,
            make: Arc::new(|name, device, options| Registry::global().create(name, device, options)),
            cancel: Cancel::default(),
        }
    }
}

impl fmt::Debug for WorldOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorldOptions")
            .field("backends", &self.backends)
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

impl WorldOptions {
    /// An unconfigured group of the backends that are asked for: one, or one for each device.
    ///
    /// Errors: those of [`BackendSpec::backends`], and why a backend cannot be used or does not honour an option.
    pub fn group(&self, name: &str) -> Result<Box<dyn ProcessGroup>> {
        let mut members = Vec::new();
        for (device, backend) in self.backends.backends(&self.device)? {
            let options = self.options_of.get(&device.kind).unwrap_or(&self.options);
            let group = (self.make)(&backend, &device, options)?;
            members.push((device, group));
        }
        if let Some(backend) = self.backends.messages() {
            return self.matching(name, members, backend);
        }
        if let BackendSpec::ByDevice(_) = self.backends {
            return Ok(Box::new(ByDevice::new(name, self.device.clone(), members)?));
        }
        let only = members.pop().map(|(_, group)| group);
        only.ok_or_else(|| Error::new(ErrorKind::Internal, "a specification without a backend"))
    }

    /// A group of `members`, whose messages `backend` matches.
    fn matching(
        &self,
        name: &str,
        members: Vec<(Device, Box<dyn ProcessGroup>)>,
        backend: &str,
    ) -> Result<Box<dyn ProcessGroup>> {
        // Options are the members', which honour them; it has what it knows of them (credentials, its host).
        let options = GroupOptions {
            lenient: true,
            ..self
                .options_of
                .get(&DeviceKind::Cpu)
                .unwrap_or(&self.options)
                .clone()
        };
        let matcher = (self.make)(backend, &Device::CPU, &options).map_err(|error| {
            let text = format!(
                "messages:{backend}: {}; messages are matched by a backend on the CPU that has tags (messages:gloo)",
                error.message()
            );
            Error::new(error.kind(), text).with_source(error)
        })?;
        let timeout = self
            .options_of
            .get(&self.device.kind)
            .unwrap_or(&self.options)
            .timeout;
        let home = self.device.clone();
        let group = ByDevice::matching(name, home, members, matcher, timeout)?;
        Ok(Box::new(group))
    }

    /// These options where `spec` says nothing, and what it says otherwise.
    ///
    /// Errors: `InvalidArgument` for a specification without a device; `NotFound` if the device has no backend.
    pub(crate) fn changed_by(&self, spec: &GroupSpec) -> Result<Self> {
        let mut changed = self.clone();
        if let Some(backends) = &spec.backends {
            changed.device = backends.home(&self.device)?;
            changed.backends = backends.clone();
        }
        if let Some(options) = &spec.options {
            changed.options.clone_from(options);
            changed.options_of.clear();
        }
        changed.options_of.extend(
            spec.options_of
                .iter()
                .map(|(kind, options)| (kind.clone(), options.clone())),
        );
        if let Some(timeout) = spec.timeout {
            changed.options.timeout = timeout;
            changed.options_of.values_mut().for_each(|o| o.timeout = timeout);
        }
        Ok(changed)
    }

    fn splits(&self) -> Result<bool> {
        if let Some(splits) = self.split_groups {
            return Ok(splits);
        }
        says_split(std::env::var_os(ENV_SPLIT_GROUPS).as_deref())
    }
}

/// In what a new group differs from the world's: in nothing, by default.
///
/// ```no_run
/// use std::time::Duration;
///
/// use ftcore::deadline_in;
/// use oxccl_world::{GroupSpec, World};
///
/// let world = World::from_env()?;
/// let spec = GroupSpec {
///     name: Some("evaluation".into()),
///     timeout: Some(Duration::from_secs(5)),
///     ..GroupSpec::default()
/// };
/// // A call of all ranks; `None` on those that are not in it.
/// let group = world.new_group(&[0, 1], &spec, deadline_in(Duration::from_secs(30)))?;
/// # drop(group);
/// # Ok::<(), ftcore::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GroupSpec {
    /// Other backends, or only some of the world's: `cpu:gloo` of a `cpu:gloo,cuda:nccl` world makes the gloo group beside it. The same on
    /// all ranks.
    pub backends: Option<BackendSpec>,
    /// In the place of [`WorldOptions::options`], and of all of [`WorldOptions::options_of`]. Every backend must honour them (INV-9).
    pub options: Option<GroupOptions>,
    /// For backends of these device kinds.
    pub options_of: BTreeMap<DeviceKind, GroupOptions>,
    /// How long an operation may take when its call names no deadline.
    pub timeout: Option<Duration>,
    /// What messages call it.
    pub name: Option<String>,
}

impl GroupSpec {
    fn backends_text(&self) -> String {
        self.backends
            .as_ref()
            .map(ToString::to_string)
            .unwrap_or_default()
    }
}

/// What the value of [`ENV_SPLIT_GROUPS`] says.
fn says_split(value: Option<&OsStr>) -> Result<bool> {
    match value.map(OsStr::to_str) {
        None | Some(Some("0" | "")) => Ok(false),
        Some(Some("1")) => Ok(true),
        Some(_) => Err(Error::invalid(format!(
            "{ENV_SPLIT_GROUPS} is {:?}; 1 splits the world's group, 0 configures new ones",
            value.unwrap_or_default()
        ))),
    }
}

/// All ranks of a job. See the module.
///
/// It is configured once: jobs whose members come and go have a manager around a group instead.
///
/// ```no_run
/// use std::time::Duration;
///
/// use ftcore::{ProcessGroupExt as _, ReduceOp, deadline_in};
/// use oxccl_world::World;
///
/// let world = World::from_env()?; // under torchrun, mpirun, srun, oxccl launch
/// let mut values = [world.rank() as f32; 4];
/// world.group().all_reduce_slice(&mut values, ReduceOp::Sum)?;
/// world.shutdown(deadline_in(Duration::from_secs(10)))?;
/// # Ok::<(), ftcore::Error>(())
/// ```
pub struct World {
    group: Arc<dyn ProcessGroup>,
    /// Its token is that of the groups that are made from this one: they end with it.
    configuration: Configuration,
    options: WorldOptions,
    splits: bool,
    /// Rank 0's, so that the others find the store.
    host: Arc<Host>,
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let c = &self.configuration;
        write!(
            f,
            "World(rank {} of {}, {})",
            c.rank, c.world_size, self.options.backends
        )
    }
}

/// A world before it is connected.
struct Made {
    group: Box<dyn ProcessGroup>,
    options: WorldOptions,
    splits: bool,
}

impl Made {
    fn of(options: WorldOptions) -> Result<Self> {
        Ok(Self {
            splits: options.splits()?,
            group: options.group("world")?,
            options,
        })
    }

    fn connect(
        self,
        store: Arc<dyn Store>,
        host: Host,
        rank: u32,
        world_size: u32,
        deadline: Instant,
    ) -> Result<World> {
        let mut configuration = Configuration {
            store,
            prefix: "world".to_string(),
            name: "world".to_string(),
            epoch: Epoch(1),
            rank,
            world_size,
            deadline,
            cancel: self.options.cancel.clone(),
        };
        self.group.configure(configuration.clone())?;
        let group: Arc<dyn ProcessGroup> = Arc::from(self.group);
        let watched = Arc::downgrade(&group);
        configuration.cancel = Cancel::watching(move || {
            let error = watched.upgrade()?.error()?;
            let text = format!("the world's group, from which this one is made, failed: {error}");
            Some(Error::new(error.kind(), text).with_source(error))
        });
        Ok(World {
            group,
            configuration,
            options: self.options,
            splits: self.splits,
            host: Arc::new(host),
        })
    }
}

impl World {
    /// Meets the other ranks at `place` and connects. What is wrong with the options is told before the other ranks are met.
    ///
    /// Errors: those of [`WorldOptions::group`], [`Place::open`] and of the group's `configure`; `InvalidArgument` for a wrong [`ENV_SPLIT_GROUPS`].
    pub fn init(place: &Place, options: WorldOptions, deadline: Instant) -> Result<Self> {
        let made = Made::of(options)?;
        let (store, host) = place.open_under(deadline, &made.options.cancel)?;
        made.connect(store, host, place.rank, place.world_size, deadline)
    }

    /// Meets the other ranks where the launcher says ([`Place::from_env`]), with the default options, and connects. Waits for them as
    /// long as an operation may take (`GroupOptions::timeout`).
    ///
    /// ```no_run
    /// use ftcore::{ProcessGroupExt as _, ReduceOp};
    ///
    /// # fn main() -> ftcore::Result<()> {
    /// let world = oxccl_world::World::from_env()?;
    /// let mut values = [world.rank() as f32; 4];
    /// world.group().all_reduce_slice(&mut values, ReduceOp::Sum)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Errors: those of [`Place::from_env`] and [`init`](Self::init).
    pub fn from_env() -> Result<Self> {
        let options = WorldOptions::default();
        let deadline = deadline_in(options.options.timeout);
        Self::init(&Place::from_env()?, options, deadline)
    }

    /// Connects through a store that all ranks have; no world was made through it before.
    ///
    /// Errors: as [`init`](Self::init), without those of the meeting.
    pub fn with_store(
        store: Arc<dyn Store>,
        rank: u32,
        world_size: u32,
        options: WorldOptions,
        deadline: Instant,
    ) -> Result<Self> {
        Made::of(options)?.connect(store, Host::default(), rank, world_size, deadline)
    }

    /// The group of all ranks.
    pub fn group(&self) -> &dyn ProcessGroup {
        &*self.group
    }

    /// This process's rank.
    pub fn rank(&self) -> u32 {
        self.configuration.rank
    }

    /// The number of ranks.
    pub fn world_size(&self) -> u32 {
        self.configuration.world_size
    }

    /// A group of `ranks`, in which rank `ranks[i]` is rank i; `None` on ranks that are not among them. A call of all ranks of the
    /// world, with the same list and the same backends.
    ///
    /// Errors: as [`split_group`](Self::split_group).
    pub fn new_group(
        &self,
        ranks: &[u32],
        spec: &GroupSpec,
        deadline: Instant,
    ) -> Result<Option<Box<dyn ProcessGroup>>> {
        self.split_group(&[ranks.to_vec()], spec, deadline)
            .map_err(|e| e.with_op("new_group"))
    }

    /// One group for each list of ranks; gives this rank's, or `None` if it is in no list. A call of all ranks of the world, with the same
    /// lists and the same backends; one exchange for all of them.
    ///
    /// With [`ENV_SPLIT_GROUPS`] the backend splits it off the world's group, unless `spec` asks for something that a split would lose. Either way
    /// the call ends with the world's group, should that fail.
    ///
    /// Errors: `InvalidArgument` for an empty list, a rank that does not exist or is in two places, or an option that a backend does not honour;
    /// `Mismatch` names a rank that passed other lists or backends, or does not split where this one does; `Unsupported` if groups are to be split and
    /// the backend cannot; the failure of the world's group; what `configure` of the new group says.
    pub fn split_group(
        &self,
        partition: &[Vec<u32>],
        spec: &GroupSpec,
        deadline: Instant,
    ) -> Result<Option<Box<dyn ProcessGroup>>> {
        let named = |e: Error| e.with_op("split_group").with_rank(self.rank());
        let splits = self.splits_for(spec);
        let ballots = ballots(partition, spec, splits, self.world_size()).map_err(named)?;
        // Before the exchange: what this rank cannot make is told at once.
        let options = self.options.changed_by(spec).map_err(named)?;
        let agreed = self.agree(&ballots, LISTS, deadline)?;
        if splits {
            return self.split_off(&ballots, deadline);
        }
        let Some(mut configuration) = agreed else {
            return Ok(None);
        };
        if let Some(name) = &spec.name {
            configuration.name.clone_from(name);
        }
        let child = options.group(&configuration.name)?;
        child.configure(configuration)?;
        Ok(Some(child))
    }

    /// Configures `group`, which is not connected yet, among `ranks` in that order: one that the options cannot name, such as a quantised group.
    /// False on ranks that are not among them, whose group stays as it is. A call of all ranks of the world, with the same list.
    ///
    /// Errors: as [`split_group`](Self::split_group).
    pub fn connect(&self, group: &dyn ProcessGroup, ranks: &[u32], deadline: Instant) -> Result<bool> {
        let ballots = ballots(&[ranks.to_vec()], &GroupSpec::default(), false, self.world_size())
            .map_err(|e| e.with_op("connect").with_rank(self.rank()))?;
        match self.agree(&ballots, LISTS, deadline)? {
            Some(configuration) => group.configure(configuration).map(|()| true),
            None => Ok(false),
        }
    }

    /// This rank's groups of `layout`, which lies within the world. `specs` says in what those of a kind differ from the world's. A call of all ranks of
    /// the world, with the same layout and the same backends: one exchange, and one more for each kind of group that is split off.
    ///
    /// Errors: `InvalidArgument` if the layout has ranks that the world does not have; `NotFound` for a kind in `specs` that the layout does not have;
    /// `Mismatch` names a rank that passed another layout or other backends; what a split says.
    pub fn layout(
        &self,
        layout: Layout,
        specs: BTreeMap<GroupKind, GroupSpec>,
        deadline: Instant,
    ) -> Result<LayoutGroups> {
        let named = |e: Error| e.with_op("layout").with_rank(self.rank());
        let end = layout.spec().first_rank.saturating_add(layout.size());
        if end > self.world_size() {
            return Err(named(Error::invalid(format!(
                "the layout has ranks {} to {}, the world {} ranks",
                layout.spec().first_rank,
                end - 1,
                self.world_size()
            ))));
        }
        let kinds = layout.kinds();
        if let Some(other) = specs.keys().find(|kind| !kinds.contains(kind)) {
            let text =
                format!("the layout has no groups of kind {other}, for which there is a specification");
            return Err(named(Error::new(ErrorKind::NotFound, text)));
        }
        let backends = specs
            .iter()
            .map(|(kind, spec)| format!("{kind} {}", spec.backends_text()));
        let splits = |kind: &GroupKind| self.splits_for(specs.get(kind).unwrap_or(&GroupSpec::default()));
        let split_kinds: Vec<GroupKind> = kinds.into_iter().filter(splits).collect();
        let text = format!(
            "{:?} {:?} {:?}",
            layout,
            backends.collect::<Vec<_>>(),
            split_kinds
        );
        let color = Some(hash(text.into_bytes()));
        let said: Vec<_> = (0..self.world_size()).map(|rank| (color, rank)).collect();
        let all = self.agree(&said, "layout", deadline).map_err(named)?;
        let all = all.ok_or_else(|| Error::new(ErrorKind::Internal, "a layout without this rank"))?;
        let mut split = Vec::new();
        for kind in split_kinds {
            let groups = layout.groups(kind)?;
            let several = groups.iter().any(|ranks| ranks.len() > 1);
            let ballots = ballots(&groups, &GroupSpec::default(), true, self.world_size()).map_err(named)?;
            if several && let Some(group) = self.split_off(&ballots, deadline)? {
                split.push((kind, group));
            }
        }
        let (options, host) = (self.options.clone(), self.host.clone());
        Ok(LayoutGroups::new(layout, specs, options, all, host, split))
    }

    /// Whether a group with this specification is split off: a split has the options and the name of its parent.
    fn splits_for(&self, spec: &GroupSpec) -> bool {
        self.splits && *spec == GroupSpec::default()
    }

    /// What this rank passes.
    fn ballot(&self, ballots: &[(Option<u32>, u32)]) -> (Option<u32>, u32) {
        ballots.get(self.rank() as usize).copied().unwrap_or((None, 0))
    }

    /// This rank's part of a partition on which all have agreed, split off the world's group; `None` if it has none.
    fn split_off(
        &self,
        ballots: &[(Option<u32>, u32)],
        deadline: Instant,
    ) -> Result<Option<Box<dyn ProcessGroup>>> {
        let (color, key) = self.ballot(ballots);
        self.group.split(color, key, deadline)
    }

    /// How this rank's part of a partition is configured; `None` if it has none. A call of all ranks with the same `what`.
    fn agree(
        &self,
        ballots: &[(Option<u32>, u32)],
        what: &str,
        deadline: Instant,
    ) -> Result<Option<Configuration>> {
        let (color, key) = self.ballot(ballots);
        let split = Split::agree(&*self.group, self.configuration.clone(), color, key, deadline)?;
        if let Some(other) = split
            .said()
            .zip(ballots)
            .position(|(said, wanted)| said != *wanted)
        {
            let other = u32::try_from(other).unwrap_or(u32::MAX);
            let text = format!(
                "rank {other} did not pass the same {what} and the same backends, or only one of the two splits the group off ({ENV_SPLIT_GROUPS}, or a specification on one of them)"
            );
            let error = Error::new(ErrorKind::Mismatch, text).with_op("split_group");
            return Err(error.with_rank(self.rank()).with_peer(other));
        }
        Ok(split.child(deadline))
    }

    /// Ends the world's group in good order.
    ///
    /// Errors: `Timeout` if pending work had to be cut short.
    pub fn shutdown(&self, deadline: Instant) -> Result<()> {
        self.group.shutdown(deadline)
    }
}

/// What each rank passes for this partition: (colour, key). The colours, and the keys of ranks that are in no list, depend on all lists, on the
/// backends and on whether groups are split off, so that ranks which pass different ones cannot take each other for members.
fn ballots(
    partition: &[Vec<u32>],
    spec: &GroupSpec,
    splits: bool,
    world_size: u32,
) -> Result<Vec<(Option<u32>, u32)>> {
    let mut color = fingerprint(partition, spec, splits);
    let mut ballots = vec![(None, color); world_size as usize];
    for ranks in partition {
        if ranks.is_empty() {
            return Err(Error::invalid("a list of no ranks; a group has at least one"));
        }
        color = color.wrapping_add(1) & COLORS;
        for (key, rank) in (0..).zip(ranks) {
            match ballots.get_mut(*rank as usize) {
                None => {
                    return Err(Error::invalid(format!(
                        "rank {rank} does not exist in a world of {world_size}"
                    )));
                }
                Some((Some(_), _)) => {
                    return Err(Error::invalid(format!("rank {rank} is in the lists twice")));
                }
                Some(ballot) => *ballot = (Some(color), key),
            }
        }
    }
    Ok(ballots)
}

/// What [`World::agree`] is about where ranks are listed.
const LISTS: &str = "lists of ranks";

/// Libraries take colours as signed numbers of 32 bits.
const COLORS: u32 = 0x7fff_ffff;

/// Of the lists, their lengths, the backends and the way.
fn fingerprint(partition: &[Vec<u32>], spec: &GroupSpec, splits: bool) -> u32 {
    let words = partition.iter().flat_map(|ranks| {
        let length = u32::try_from(ranks.len()).unwrap_or(u32::MAX);
        std::iter::once(length).chain(ranks.iter().copied())
    });
    hash(
        words
            .flat_map(u32::to_le_bytes)
            .chain(spec.backends_text().into_bytes())
            .chain([u8::from(splits)]),
    )
}

/// FNV-1a.
fn hash(bytes: impl IntoIterator<Item = u8>) -> u32 {
    let hash = bytes.into_iter().fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    });
    hash & COLORS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passed(partition: &[Vec<u32>], world_size: u32) -> Result<Vec<(Option<u32>, u32)>> {
        ballots(partition, &GroupSpec::default(), false, world_size)
    }

    #[test]
    fn every_rank_passes_its_list_and_its_place_in_it() {
        let said = passed(&[vec![2, 0], vec![3]], 5).unwrap();
        let colors: Vec<Option<u32>> = said.iter().map(|b| b.0).collect();
        assert_eq!(colors[0], colors[2]);
        assert!(colors[0].is_some() && colors[3].is_some() && colors[0] != colors[3]);
        assert_eq!((colors[1], colors[4]), (None, None));
        assert_eq!((said[2].1, said[0].1, said[3].1), (0, 1, 0));
        // Rank 3 alone has the same place in another partition, but not the same colour.
        assert_ne!(passed(&[vec![0, 2], vec![3]], 5).unwrap()[3], said[3]);
        // The same ranks in a row, cut elsewhere: rank 0 is the first of the first list in both.
        let cut = |at: usize| passed(&[[0, 1, 2][..at].to_vec(), [0, 1, 2][at..].to_vec()], 3);
        assert_ne!(cut(1).unwrap()[0], cut(2).unwrap()[0]);
    }

    #[test]
    fn a_group_has_the_options_of_the_world_but_where_its_specification_says_otherwise() {
        let with = |seconds| GroupOptions {
            timeout: Duration::from_secs(seconds),
            ..GroupOptions::default()
        };
        let world = WorldOptions {
            options: with(1),
            options_of: [(DeviceKind::Cuda, with(2)), (DeviceKind::Xpu, with(3))].into(),
            ..WorldOptions::default()
        };
        // The time-outs of groups on a processor, on CUDA and on XPU.
        let seconds = |spec: &GroupSpec| {
            let options = world.changed_by(spec).unwrap();
            let of = |kind| options.options_of.get(&kind).unwrap_or(&options.options);
            [DeviceKind::Cpu, DeviceKind::Cuda, DeviceKind::Xpu].map(|kind| of(kind).timeout.as_secs())
        };
        let nothing = GroupSpec::default();
        let for_cuda = GroupSpec {
            options_of: [(DeviceKind::Cuda, with(20))].into(),
            ..GroupSpec::default()
        };
        let for_all = GroupSpec {
            options: Some(with(10)),
            ..GroupSpec::default()
        };
        let for_both = GroupSpec {
            options: Some(with(10)),
            ..for_cuda.clone()
        };
        let with_a_timeout = GroupSpec {
            timeout: Some(Duration::from_secs(5)),
            ..for_cuda.clone()
        };
        let found = [&nothing, &for_cuda, &for_all, &for_both, &with_a_timeout].map(seconds);
        assert_eq!(
            found,
            [[1, 2, 3], [1, 20, 3], [10, 10, 10], [10, 20, 10], [5, 5, 5]]
        );
    }

    #[test]
    fn the_variable_says_whether_groups_are_split_and_anything_odd_is_refused() {
        for (value, splits) in [
            (None, false),
            (Some(""), false),
            (Some("0"), false),
            (Some("1"), true),
        ] {
            assert_eq!(says_split(value.map(OsStr::new)).unwrap(), splits, "{value:?}");
        }
        for odd in ["yes", "2", "true", " 1"] {
            let e = says_split(Some(OsStr::new(odd))).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidArgument);
            assert!(
                e.to_string().contains("OXCCL_SPLIT_GROUPS is") && e.to_string().contains(odd),
                "{e}"
            );
        }
    }

    #[test]
    fn wrong_lists_are_refused_by_name() {
        for (partition, says) in [
            (vec![vec![0, 5]], "rank 5 does not exist in a world of 3"),
            (vec![vec![0, 1], vec![1]], "rank 1 is in the lists twice"),
            (vec![vec![2, 2]], "rank 2 is in the lists twice"),
            (vec![vec![0], vec![]], "no ranks"),
        ] {
            let e = passed(&partition, 3).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidArgument);
            assert!(e.to_string().contains(says), "{e}");
        }
    }
}
