//! One group for tensors of several device kinds: each operation goes to the backend of its tensors' device.
//!
//! The members are whole groups, configured together at one epoch with prefixes of their own. They share a fate: after a failure of one
//! nothing more is accepted on any until the next `configure`. One more member may match the messages of all (`matched.rs`).

use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use ftcore::engine::{Label, Place};
use ftcore::lifecycle::{self, Lifecycle, leave_at_exit};
use ftcore::{
    Capabilities, Checked, Collective, Completion, Configuration, DType, DTypeSet, Device, Error, ErrorKind,
    Failed, Feature, FeatureSet, GroupInfo, OpSet, ProcessGroup, Rejected, Result, Status, Stream,
    SubmitOptions, Tensor, Traffic, Work, accelerator, deadline_in, execute_by_submit,
};

use crate::matched::{self, ANSWERS, Call};
use crate::member::Member;
use crate::spec::MESSAGES;

/// After the failure of another member one that connects, or matches messages, gets so long to hear of it by itself, and perhaps more.
const GRACE: Duration = Duration::from_millis(300);

/// A group that dispatches by device.
///
/// Beyond the common contract of [`ProcessGroup`]:
/// - an operation without tensors (a barrier) runs on the group's own device; one whose tensors lie on two device kinds is refused;
/// - operations are in order of submission per device kind, not between kinds;
/// - what it advertises to move and reduce is what *any* member does: a member refuses what it does not do itself, with `Unsupported` and its
///   own name. Features and options are those that *all* members have.
///
/// With a member that [matches messages](Self::matching) it advertises `Tags` and `RecvAny` besides:
/// - messages begin on their device once both ends have come to them and a tag of the sender's matches. So `Work::wait_on` waits on the
///   host for the other end, and the message comes after what the stream of its `SubmitOptions` had when it was submitted;
/// - a receive of another size or type than the message is a `Mismatch` on both ranks. The tag `u32::MAX` is taken.
pub struct ByDevice {
    home: Device,
    members: Arc<[Member]>,
    capabilities: Capabilities,
    /// Of the members, each with its device kind.
    dropped_options: Vec<String>,
    lifecycle: Lifecycle<Together>,
    /// Of matched messages that name no deadline; `None`: no member matches them.
    matching: Option<Duration>,
    /// Ends once the members were let go of, where a thread may be the last to do so.
    gone: Mutex<Option<Receiver<()>>>,
}

/// The members at one configuration.
struct Together {
    members: Arc<[Member]>,
    /// The failure that was seen first, with the device whose backend had it.
    first: OnceLock<Error>,
    messages: Option<Arc<matched::Engine>>,
    /// When an abort was heard of that the matcher knew nothing of.
    aborted: OnceLock<Instant>,
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
        Self::of(name.into(), home, members, None)
    }

    /// As [`new`](Self::new), with `matcher`, a group on the CPU, to match the messages that the others move. `timeout` is that of messages that
    /// name no deadline.
    ///
    /// Errors: also `Unsupported` for a matcher without tags or receives from any rank.
    pub fn matching(
        name: impl Into<String>,
        home: Device,
        members: Vec<(Device, Box<dyn ProcessGroup>)>,
        matcher: Box<dyn ProcessGroup>,
        timeout: Duration,
    ) -> Result<Self> {
        let offers = matcher.capabilities();
        let moves = offers.moves.contains(DType::U64) && offers.serves(&Device::CPU.kind);
        if !(offers.has(Feature::Tags) && offers.has(Feature::RecvAny) && moves) {
            return Err(Error::unsupported(format!(
                "{MESSAGES}:{0}: backend '{0}' cannot match messages for others, which takes tags and receives from any rank on the \
                 CPU; name one that has both ({MESSAGES}:gloo)",
                matcher.info().backend
            )));
        }
        Self::of(name.into(), home, members, Some((matcher, timeout)))
    }

    fn of(
        name: String,
        home: Device,
        members: Vec<(Device, Box<dyn ProcessGroup>)>,
        matching: Option<(Box<dyn ProcessGroup>, Duration)>,
    ) -> Result<Self> {
        if !members.iter().any(|(device, _)| *device == home) {
            return Err(Error::invalid(format!(
                "no member serves {home}, the group's own device"
            )));
        }
        for (n, (device, _)) in members.iter().enumerate() {
            if members.iter().take(n).any(|(d, _)| d.kind == device.kind) {
                return Err(Error::invalid(format!(
                    "two members serve {}; one backend per device kind",
                    device.kind
                )));
            }
        }
        let matches = matching.is_some();
        let mut all: Vec<Member> = members
            .into_iter()
            .map(|(device, group)| Member {
                device: Some(device),
                matched: matches.then(|| with_messages(group.capabilities().clone())),
                group,
                _gone: None,
            })
            .collect();
        let mut capabilities = together(&all);
        let (mut timeout, mut gone) = (None, None);
        if let Some((group, given)) = matching {
            let (holding, heard) = channel();
            let lost = Feature::ALL
                .into_iter()
                .filter(|f| LIFE.contains(f) && !group.capabilities().has(*f));
            capabilities = with_messages(capabilities);
            capabilities.features = lost.fold(capabilities.features, FeatureSet::without);
            capabilities.notes.push((
                MESSAGES.into(),
                format!("matched by {}", group.info().backend).into(),
            ));
            (timeout, gone) = (Some(given), Some(heard));
            all.push(Member {
                device: None,
                group,
                matched: None,
                _gone: Some(holding),
            });
        }
        let spec: Vec<String> = all
            .iter()
            .map(|m| format!("{}:{}", m.name(), m.group.info().backend))
            .collect();
        // What the matcher does not know is for the others, which were asked.
        let dropped = all.iter().filter(|m| m.device.is_some()).flat_map(|m| {
            let names = m.group.info().dropped_options.into_iter();
            names.map(|name| format!("{}:{name}", m.name()))
        });
        Ok(Self {
            home,
            capabilities,
            dropped_options: dropped.collect(),
            members: all.into(),
            lifecycle: Lifecycle::new(spec.join(","), name),
            matching: timeout,
            gone: Mutex::new(gone),
        })
    }

    /// What the backend of this device kind does; `None` without one.
    pub fn capabilities_on(&self, kind: &ftcore::DeviceKind) -> Option<&Capabilities> {
        let (_, member) = self.member_on(kind)?;
        Some(member.group.capabilities())
    }

    fn member_on(&self, kind: &ftcore::DeviceKind) -> Option<(usize, &Member)> {
        let mut all = self.members.iter().enumerate();
        all.find(|(_, m)| m.device.as_ref().is_some_and(|d| d.kind == *kind))
    }

    /// Who carries out `op`.
    fn member_for(&self, op: &Collective) -> Result<(usize, &Member)> {
        let tensors = op.tensors();
        let kind = tensors.first().map_or(&self.home.kind, |t| &t.device().kind);
        if let Some(other) = tensors.iter().find(|t| t.device().kind != *kind) {
            return Err(Error::invalid(format!(
                "tensors on {kind} and on {}; those of one operation are on one device kind",
                other.device().kind
            )));
        }
        self.member_on(kind).ok_or_else(|| {
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
    ) -> Result<(usize, &Member, Checked), Box<Rejected>> {
        let chosen = match self.refusal() {
            Some(error) => Err(error),
            None => self.member_for(&op),
        };
        match chosen {
            Ok((index, member)) => {
                let group = &member.group;
                let matched = member.matched.as_ref().filter(|_| op.kind().is_p2p());
                let offers = matched.unwrap_or_else(|| group.capabilities());
                Checked::new(op, &group.info(), offers, options).map(|op| (index, member, op))
            }
            Err(error) => {
                let error = error.with_op(op.kind().name());
                Err(Box::new(Rejected { error, op }))
            }
        }
    }

    /// The messages of this configuration, if a member matches them.
    fn messages(&self) -> Option<Arc<matched::Engine>> {
        self.matching?;
        self.lifecycle.engine().ok()?.messages.clone()
    }

    /// A message, or a batch of them, that the matcher and `member` carry out.
    fn send_off(
        &self,
        messages: &Arc<matched::Engine>,
        member: usize,
        op: Collective,
        options: &SubmitOptions,
    ) -> Result<Work, Box<Rejected>> {
        let stream = free_of_answers(&op).and_then(|()| marked(options.stream.as_deref()));
        let (stream, error) = match stream {
            Ok(stream) => (stream, None),
            Err(error) => (None, Some(error)),
        };
        if let Some(error) = error {
            let error = error.with_op(op.kind().name());
            return Err(Box::new(Rejected { error, op }));
        }
        let label = Label::of(&op);
        let timeout = self.matching.unwrap_or_default();
        let deadline = options.deadline.unwrap_or_else(|| deadline_in(timeout));
        let call = Call { op, member, stream };
        messages.submit_here(call, label, deadline)
    }

    /// The members at a configuration that they have.
    fn stand(&self, configuration: &Configuration) -> Result<Arc<Together>> {
        let start = |_| matched::start(&self.members, Place::of(configuration));
        Ok(Arc::new(Together {
            members: self.members.clone(),
            first: OnceLock::new(),
            messages: self.matching.map(start).transpose()?,
            aborted: OnceLock::new(),
        }))
    }

    /// Configures all members, one after the other in the same order on every rank.
    fn connect(&self, configuration: &Configuration) -> Result<Arc<Together>> {
        for (n, member) in self.members.iter().enumerate() {
            let kind = member.name();
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
        self.stand(configuration)
    }
}

/// What concerns a group as a whole, and so the matcher, too.
const LIFE: [Feature; 4] = [
    Feature::Abort,
    Feature::Reconfigure,
    Feature::ThreadRanks,
    Feature::Split,
];

/// What a group offers whose messages are matched.
fn with_messages(mut capabilities: Capabilities) -> Capabilities {
    let features = capabilities.features.with(Feature::Tags).with(Feature::RecvAny);
    // A message that has failed is told after a grace, whatever its library still holds.
    capabilities.features = features.without(Feature::Borrow);
    capabilities
}

/// Refuses the tag of the answers.
fn free_of_answers(op: &Collective) -> Result<()> {
    match op {
        Collective::Send { tag, .. } | Collective::Recv { tag, .. } if *tag == ANSWERS => {
            Err(Error::invalid(format!(
                "tag {ANSWERS} is what the answers of matched messages have; give a smaller one"
            )))
        }
        Collective::Batch { ops } => ops.iter().try_for_each(free_of_answers),
        _ => Ok(()),
    }
}

/// A stream that comes after what `stream` has now, for a call that is submitted later.
fn marked(stream: Option<&dyn Stream>) -> Result<Option<Arc<dyn Stream>>> {
    let Some(stream) = stream.filter(|s| !s.device().is_cpu()) else {
        return Ok(None);
    };
    let device = stream.device();
    let own = accelerator(&device.kind)?.new_stream(device.index, false)?;
    own.wait(&*stream.record()?)?;
    Ok(Some(own))
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
        let kind = member.name();
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
        devices: members.iter().map(|m| m.name().to_string().into()).collect(),
        notes: notes.collect(),
    }
}

impl lifecycle::Engine for Together {
    fn abort(self: &Arc<Self>, reason: &str) {
        if let Some(messages) = &self.messages {
            messages.abort(reason);
        }
        self.members.iter().for_each(|m| m.group.abort(reason));
    }
    /// Only of messages: the members' own `configure`, or their drop, ends what they have.
    fn leave(self: &Arc<Self>, reason: &str) {
        if let Some(messages) = &self.messages {
            messages.leave(reason);
        }
    }
    fn wait_ended(self: &Arc<Self>, deadline: Instant) -> Result<()> {
        let messages = self.messages.as_ref();
        messages.map_or(Ok(()), |messages| messages.wait_ended(deadline))
    }
    fn drain(self: &Arc<Self>, deadline: Instant) -> Result<()> {
        // Messages need all members.
        let messages = self.messages.as_ref().map(|messages| messages.drain(deadline));
        // All of them, whatever one says.
        let ended: Vec<Result<()>> = self.members.iter().map(|m| m.group.shutdown(deadline)).collect();
        messages.into_iter().chain(ended).collect()
    }
    fn error(&self) -> Option<Error> {
        if let Some(first) = self.first.get() {
            return Some(first.clone());
        }
        let mut members = self.members.iter();
        let found = match &self.messages {
            None => members.find_map(|m| m.group.error())?,
            Some(messages) => {
                let matcher = members.next_back().and_then(|m| m.group.error());
                let said = lifecycle::Engine::error(&**messages).or(matcher);
                let is_said = said.is_some();
                let found = said.or_else(|| members.find_map(|m| m.group.error()))?;
                // A rank that ends its members because of a failure has said through the matcher which one it was.
                let heard = || self.aborted.get_or_init(Instant::now).elapsed();
                if !is_said && found.kind() == ErrorKind::Aborted && heard() < GRACE {
                    return None;
                }
                found
            }
        };
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
        let (index, member, op) = self.hand_over(op.into_inner(), &options)?;
        let Some(messages) = self.messages() else {
            return member.group.submit(op, options);
        };
        if op.get().kind().is_p2p() {
            return self.send_off(&messages, index, op.into_inner(), &options);
        }
        let work = member.group.submit(op, options)?;
        let members = self.members.clone();
        work.on_complete(move |status| {
            if let Status::Failed(_) = status
                && let Some(error) = members.get(index).and_then(|m| m.group.error())
            {
                messages.fail(error);
            }
        });
        Ok(work)
    }

    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        if self.matching.is_some() && op.get().kind().is_p2p() {
            return execute_by_submit(self, op, options);
        }
        let (_, member, op) = self.hand_over(op.into_inner(), &options)?;
        member.group.execute(op, options).inspect_err(|_| {
            if let (Some(messages), Some(error)) = (self.messages(), member.group.error()) {
                messages.fail(error);
            }
        })
    }

    fn alloc(&self, dtype: DType, count: usize) -> Result<Tensor> {
        // Host memory: of the member that serves it.
        match self.member_on(&Device::CPU.kind) {
            Some((_, member)) => member.group.alloc(dtype, count),
            None => Tensor::try_zeros(dtype, &[count]),
        }
    }

    fn split(
        &self,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    ) -> Result<Option<Box<dyn ProcessGroup>>> {
        let (_, parent) = self.lifecycle.configured().map_err(|e| e.with_op("split"))?;
        let (mut children, mut matching) = (Vec::new(), None);
        for member in self.members.iter() {
            let child = member.group.split(color, key, deadline)?;
            match &member.device {
                Some(device) => children.extend(child.map(|group| (device.clone(), group))),
                None => matching = child.zip(self.matching),
            }
        }
        let Some((_, first)) = children.first() else {
            return Ok(None);
        };
        let info = first.info();
        let child = Self::of(info.name.to_string(), self.home.clone(), children, matching)?;
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
        child.lifecycle.configure(configuration, |c| child.stand(c))?;
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

impl Drop for ByDevice {
    fn drop(&mut self) {
        // A thread may be the last to let go of the members, which have their leaves to send.
        let gone = self.gone.get_mut().unwrap_or_else(PoisonError::into_inner);
        gone.take().into_iter().for_each(leave_at_exit);
    }
}
