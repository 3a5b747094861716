//! One group for tensors of several device kinds: each operation goes to the backend of its tensors' device.
//!
//! The members are whole groups, configured together at one epoch with prefixes of their own. They share a fate: after a failure of one
//! nothing more is accepted on any until the next `configure`.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use ftcore::lifecycle::{self, Lifecycle};
use ftcore::{
    Capabilities, Checked, Collective, Completion, Configuration, DType, DTypeSet, Device, Error, ErrorKind,
    Failed, Feature, FeatureSet, GroupInfo, OpSet, ProcessGroup, Rejected, Result, SubmitOptions, Tensor,
    Traffic, Work,
};

/// After the failure of another member one that connects gets so long to hear of it by itself, and perhaps more.
const GRACE: Duration = Duration::from_millis(300);

/// A group that dispatches by device.
///
/// Beyond the common contract of [`ProcessGroup`]:
/// - an operation without tensors (a barrier) runs on the group's own device; one whose tensors lie on two device kinds is refused;
/// - operations are in order of submission per device kind, not between kinds;
/// - what it advertises to move and reduce is what *any* member does: a member refuses what it does not do itself, with `Unsupported` and its
///   own name. Features and options are those that *all* members have.
pub struct ByDevice {
    home: Device,
    members: Arc<[Member]>,
    capabilities: Capabilities,
    /// Of the members, each with its device kind.
    dropped_options: Vec<String>,
    lifecycle: Lifecycle<Together>,
}

struct Member {
    device: Device,
    group: Box<dyn ProcessGroup>,
}

/// The members at one configuration.
struct Together {
    members: Arc<[Member]>,
    /// The failure that was seen first, with the device whose backend had it.
    first: OnceLock<Error>,
}

impl ByDevice {
    /// A group of `members`, one for each device kind; `home` is the group's own device and one of theirs. `name` is for messages until
    /// `configure` gives another.
    ///
    /// Errors: `InvalidArgument` for two members of one kind, or none for `home`.
    pub fn new(
        name: impl Into<String>,
        home: Device,
        members: Vec<(Device, Box<dyn ProcessGroup>)>,
    ) -> Result<Self> {
        let members: Arc<[Member]> = members
            .into_iter()
            .map(|(device, group)| Member { device, group })
            .collect();
        if !members.iter().any(|m| m.device == home) {
            return Err(Error::invalid(format!(
                "no member serves {home}, the group's own device"
            )));
        }
        for (n, member) in members.iter().enumerate() {
            if members
                .iter()
                .take(n)
                .any(|m| m.device.kind == member.device.kind)
            {
                return Err(Error::invalid(format!(
                    "two members serve {}; one backend per device kind",
                    member.device.kind
                )));
            }
        }
        let spec: Vec<String> = members
            .iter()
            .map(|m| format!("{}:{}", m.device.kind, m.group.info().backend))
            .collect();
        let dropped = members.iter().flat_map(|m| {
            let names = m.group.info().dropped_options.into_iter();
            names.map(|name| format!("{}:{name}", m.device.kind))
        });
        Ok(Self {
            home,
            capabilities: together(&members),
            dropped_options: dropped.collect(),
            members,
            lifecycle: Lifecycle::new(spec.join(","), name.into()),
        })
    }

    /// What the backend of this device kind does; `None` without one.
    pub fn capabilities_on(&self, kind: &ftcore::DeviceKind) -> Option<&Capabilities> {
        let member = self.members.iter().find(|m| m.device.kind == *kind)?;
        Some(member.group.capabilities())
    }

    /// Who carries out `op`.
    fn member_for(&self, op: &Collective) -> Result<&Member> {
        let tensors = op.tensors();
        let kind = tensors.first().map_or(&self.home.kind, |t| &t.device().kind);
        if let Some(other) = tensors.iter().find(|t| t.device().kind != *kind) {
            return Err(Error::invalid(format!(
                "tensors on {kind} and on {}; those of one operation are on one device kind",
                other.device().kind
            )));
        }
        self.members
            .iter()
            .find(|m| m.device.kind == *kind)
            .ok_or_else(|| {
                Error::unsupported(format!(
                    "no backend of '{}' serves {kind}",
                    self.lifecycle.backend()
                ))
            })
    }

    /// Why nothing is accepted.
    fn refusal(&self) -> Option<Error> {
        let first = match self.lifecycle.engine() {
            Ok(engine) => lifecycle::Engine::error(&*engine)?,
            Err(error) => return Some(error),
        };
        let text = format!("the group failed earlier: {first}");
        Some(Error::new(ErrorKind::Poisoned, text).with_source(first))
    }

    /// The member and the operation checked against it, or the refusal.
    fn hand_over(
        &self,
        op: Collective,
        options: &SubmitOptions,
    ) -> Result<(&Member, Checked), Box<Rejected>> {
        let chosen = match self.refusal() {
            Some(error) => Err(error),
            None => self.member_for(&op),
        };
        match chosen {
            Ok(member) => {
                let group = &member.group;
                Checked::new(op, &group.info(), group.capabilities(), options).map(|op| (member, op))
            }
            Err(error) => {
                let error = error.with_op(op.kind().name());
                Err(Box::new(Rejected { error, op }))
            }
        }
    }

    /// Configures all members, one after the other in the same order on every rank.
    fn connect(&self, configuration: &Configuration) -> Result<Arc<Together>> {
        for (n, member) in self.members.iter().enumerate() {
            let kind = &member.device.kind;
            // The connections of those that stand already are where the end of a peer shows, whatever the next one still waits for.
            let (since, members) = (OnceLock::new(), self.members.clone());
            let failed = move || {
                let error = members.iter().take(n).find_map(|m| m.group.error())?;
                (since.get_or_init(Instant::now).elapsed() >= GRACE).then_some(error)
            };
            let cancel = configuration.cancel.or(failed);
            let configuration = Configuration {
                cancel: cancel.clone(),
                prefix: format!("{}/{kind}", configuration.prefix),
                ..configuration.clone()
            };
            let configured = member.group.configure(configuration);
            cancel.settle();
            if let Err(error) = configured {
                let reason = format!("the group's part on {kind} was not configured: {error}");
                self.members.iter().for_each(|m| m.group.abort(&reason));
                return Err(error);
            }
        }
        Ok(Arc::new(Together {
            members: self.members.clone(),
            first: OnceLock::new(),
        }))
    }
}

/// What several members offer together.
fn together(members: &[Member]) -> Capabilities {
    let all: Vec<&Capabilities> = members.iter().map(|m| m.group.capabilities()).collect();
    let any_bits = |bits: fn(&Capabilities) -> u32| all.iter().fold(0, |sum, c| sum | bits(c));
    let mut reduces = [DTypeSet::NONE; ftcore::ReduceOp::COUNT];
    for (n, set) in reduces.iter_mut().enumerate() {
        let bits = all
            .iter()
            .filter_map(|c| c.reduces.get(n))
            .fold(0, |sum, s| sum | s.bits());
        *set = DTypeSet::from_bits_truncate(bits);
    }
    let common: Vec<Feature> = Feature::ALL
        .into_iter()
        .filter(|f| all.iter().all(|c| c.has(*f)))
        .collect();
    let options = all.first().map(|c| c.options.clone()).unwrap_or_default();
    let notes = members.iter().zip(&all).flat_map(|(member, c)| {
        let kind = &member.device.kind;
        c.notes
            .iter()
            .map(move |(op, text)| (op.clone(), format!("{kind}: {text}").into()))
    });
    Capabilities {
        ops: OpSet::from_bits_truncate(any_bits(|c| c.ops.bits())),
        moves: DTypeSet::from_bits_truncate(any_bits(|c| c.moves.bits())),
        reduces,
        features: FeatureSet::of(&common),
        options: options
            .into_iter()
            .filter(|o| all.iter().all(|c| c.options.contains(o)))
            .collect(),
        devices: members
            .iter()
            .map(|m| m.device.kind.name().to_string().into())
            .collect(),
        notes: notes.collect(),
    }
}

impl lifecycle::Engine for Together {
    fn abort(self: &Arc<Self>, reason: &str) {
        self.members.iter().for_each(|m| m.group.abort(reason));
    }
    /// Nothing: the members' own `configure`, or their drop, ends what they have.
    fn leave(self: &Arc<Self>, _reason: &str) {}
    fn wait_ended(self: &Arc<Self>, _deadline: Instant) -> Result<()> {
        Ok(())
    }
    fn drain(self: &Arc<Self>, deadline: Instant) -> Result<()> {
        // All of them, whatever one says.
        let ended: Vec<Result<()>> = self.members.iter().map(|m| m.group.shutdown(deadline)).collect();
        ended.into_iter().collect()
    }
    fn error(&self) -> Option<Error> {
        if let Some(first) = self.first.get() {
            return Some(first.clone());
        }
        let found = self.members.iter().find_map(|m| m.group.error())?;
        Some(self.first.get_or_init(|| found).clone())
    }
}

impl ProcessGroup for ByDevice {
    fn info(&self) -> GroupInfo {
        GroupInfo {
            dropped_options: self.dropped_options.clone(),
            ..self.lifecycle.info(self.home.clone())
        }
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn configure(&self, configuration: Configuration) -> Result<()> {
        self.lifecycle.configure(configuration, |c| self.connect(c))
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        let (member, op) = self.hand_over(op.into_inner(), &options)?;
        member.group.submit(op, options)
    }

    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        let (member, op) = self.hand_over(op.into_inner(), &options)?;
        member.group.execute(op, options)
    }

    fn alloc(&self, dtype: DType, count: usize) -> Result<Tensor> {
        // Host memory: of the member that serves it.
        match self.members.iter().find(|m| m.device.is_cpu()) {
            Some(member) => member.group.alloc(dtype, count),
            None => Ok(Tensor::zeros(dtype, count)),
        }
    }

    fn split(
        &self,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    ) -> Result<Option<Box<dyn ProcessGroup>>> {
        let (_, parent) = self.lifecycle.configured().map_err(|e| e.with_op("split"))?;
        let mut children = Vec::new();
        for member in self.members.iter() {
            let child = member.group.split(color, key, deadline)?;
            children.extend(child.map(|group| (member.device.clone(), group)));
        }
        let Some((_, first)) = children.first() else {
            return Ok(None);
        };
        let info = first.info();
        let child = Self::new(info.name.to_string(), self.home.clone(), children)?;
        let configuration = Configuration {
            prefix: format!("{}/split", parent.prefix),
            name: info.name.to_string(),
            epoch: info.epoch,
            rank: info.rank,
            world_size: info.world_size,
            deadline,
            store: parent.store,
            cancel: Default::default(),
        };
        child.lifecycle.configure(configuration, |_| {
            Ok(Arc::new(Together {
                members: child.members.clone(),
                first: OnceLock::new(),
            }))
        })?;
        Ok(Some(Box::new(child)))
    }

    fn abort(&self, reason: &str) {
        self.lifecycle.abort(reason);
    }

    fn error(&self) -> Option<Error> {
        self.lifecycle.error()
    }

    fn shutdown(&self, deadline: Instant) -> Result<()> {
        self.lifecycle.shutdown(deadline)
    }

    fn traffic(&self) -> Traffic {
        self.members
            .iter()
            .map(|m| m.group.traffic())
            .fold(Traffic::default(), |sum, t| Traffic {
                sent: sum.sent + t.sent,
                received: sum.received + t.received,
            })
    }
}
