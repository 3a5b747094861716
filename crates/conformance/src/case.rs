//! A case: one behaviour, for one world size, run on every rank at once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{
    Capabilities, Configuration, DType, Device, Epoch, Feature, GroupOptions, OpKind, ProcessGroup, ReduceOp,
    Result, Store, deadline_in,
};

use crate::Outcome;
use crate::lent::{Lasting, Lent};
use crate::probe::summed;
use crate::staged::staged;

/// What a case needs of a backend or a harness; without it the case is ignored, with the reason.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Needs {
    /// The operation.
    Op(OpKind),
    /// The feature.
    Feature(Feature),
    /// At least one dtype with that reduction.
    Reduce(ReduceOp),
    /// All-reduces that sum i64, i32, f32 or f64, whichever it is.
    Sum,
    /// At least one of these dtypes with that reduction.
    ReducesOneOf(ReduceOp, &'static [DType]),
    /// That dtype can be moved.
    Moves(DType),
    /// At least one of these dtypes can be moved.
    MovesOneOf(&'static [DType]),
    /// At least one of these operations.
    OneOf(&'static [OpKind]),
    /// Sums of [`Sum`](Self::Sum)'s dtype and of another one.
    OtherSum,
    /// Sums and another reduction of [`Sum`](Self::Sum)'s dtype.
    OtherReduction,
    /// A rank may kill its own process.
    RealProcesses,
    /// Memory and streams of a device, on which work goes on while the host does something else.
    Device,
    /// `Work::wait_on` orders a device stream without the host: no note `wait_on` that says otherwise.
    WaitOn,
}

/// A dtype that is summed besides [`summed`]'s: f64, if possible.
pub(crate) fn other_sum(capabilities: &Capabilities) -> Option<DType> {
    let first = summed(capabilities, DType::F32)?;
    let others = [DType::F64].into_iter().chain(DType::ALL);
    others
        .filter(|d| *d != first)
        .find(|d| capabilities.reduces(ReduceOp::Sum, *d))
}

/// A reduction of [`summed`]'s dtype besides the sum: the maximum, if possible.
pub(crate) fn other_reduction(capabilities: &Capabilities) -> Option<ReduceOp> {
    let dtype = summed(capabilities, DType::F32)?;
    let others = [ReduceOp::Max, ReduceOp::Min, ReduceOp::Product, ReduceOp::Avg];
    others.into_iter().find(|op| capabilities.reduces(*op, dtype))
}

fn named(all: &[impl ToString]) -> String {
    let names: Vec<String> = all.iter().map(ToString::to_string).collect();
    names.join(", ")
}

type Body = Arc<dyn Fn(&Rank) -> Outcome + Send + Sync>;

/// The world sizes that cases are made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Worlds {
    /// One to four ranks, each behaviour at those where it differs.
    Small,
    /// Five and eight ranks: an odd number and a power of two above what [`Small`](Self::Small) has.
    Large,
}

impl Worlds {
    /// `small`, or the large ones.
    pub(crate) fn or(self, small: &'static [u32]) -> &'static [u32] {
        match self {
            Self::Small => small,
            Self::Large => &[5, 8],
        }
    }
}

/// One behaviour for one world size.
#[derive(Clone)]
pub struct Case {
    /// `area::case::worldN`.
    pub name: String,
    /// How many ranks.
    pub world: u32,
    /// What it needs.
    pub needs: Vec<Needs>,
    /// The rank whose process ends by SIGKILL, where one does.
    pub killed: Option<u32>,
    /// It leaves its group as it found it, and so may run on one that other cases have used and will use.
    pub shares: bool,
    body: Body,
}

impl Case {
    pub(crate) fn new(
        name: &str,
        world: u32,
        needs: &[Needs],
        body: impl Fn(&Rank) -> Outcome + Send + Sync + 'static,
    ) -> Self {
        Self {
            name: format!("{name}::world{world}"),
            world,
            needs: needs.to_vec(),
            killed: None,
            shares: false,
            body: Arc::new(body),
        }
    }

    pub(crate) fn killing(mut self, rank: u32) -> Self {
        self.killed = Some(rank);
        self
    }

    pub(crate) fn sharing(mut self) -> Self {
        self.shares = true;
        self
    }

    /// Why the case does not apply to a backend; `None` if it does.
    pub fn unmet(&self, capabilities: &Capabilities, real_processes: bool) -> Option<String> {
        self.needs.iter().find_map(|need| match need {
            Needs::Op(op) => (!capabilities.ops.contains(*op)).then(|| format!("{op} is not advertised")),
            Needs::Feature(f) => (!capabilities.has(*f)).then(|| format!("{f:?} is not advertised")),
            Needs::Reduce(op) => DType::ALL
                .iter()
                .all(|d| !capabilities.reduces(*op, *d))
                .then(|| format!("no dtype is advertised for {op}")),
            Needs::ReducesOneOf(op, dtypes) => dtypes
                .iter()
                .all(|d| !capabilities.reduces(*op, *d))
                .then(|| format!("{op} is advertised for none of {}", named(dtypes))),
            Needs::OneOf(ops) => ops
                .iter()
                .all(|op| !capabilities.ops.contains(*op))
                .then(|| format!("none of {} is advertised", named(ops))),
            Needs::Sum => {
                let reduces = capabilities.ops.contains(OpKind::AllReduce);
                let dtype = summed(capabilities, DType::F32).filter(|_| reduces);
                dtype
                    .is_none()
                    .then(|| "all-reduces that sum i64, i32, f32 or f64 are not advertised".to_string())
            }
            Needs::Moves(dtype) => {
                (!capabilities.moves.contains(*dtype)).then(|| format!("{dtype} is not moved"))
            }
            Needs::MovesOneOf(dtypes) => dtypes
                .iter()
                .all(|d| !capabilities.moves.contains(*d))
                .then(|| format!("none of {} is moved", named(dtypes))),
            Needs::OtherSum => other_sum(capabilities)
                .is_none()
                .then(|| "sums of two dtypes are not advertised".to_string()),
            Needs::OtherReduction => other_reduction(capabilities)
                .is_none()
                .then(|| "sums and another reduction of one dtype are not advertised".to_string()),
            Needs::RealProcesses => {
                (!real_processes).then(|| "ranks are threads: none can be killed".to_string())
            }
            Needs::Device => capabilities
                .devices
                .iter()
                .any(|d| d == "cpu")
                .then(|| "the group serves host memory: work on it has no stream".to_string()),
            Needs::WaitOn => {
                let note = capabilities.notes.iter().find(|(key, _)| key == "wait_on");
                note.map(|(_, says)| format!("Work::wait_on {says}"))
            }
        })
    }

    /// Runs the case on one rank.
    pub fn run(&self, rank: &Rank) -> Outcome {
        (self.body)(rank)
    }
}

/// Makes a new, unconfigured group of the backend under test on the device of one rank.
pub type MakeOn = Arc<dyn Fn(&Device, GroupOptions) -> Result<Box<dyn ProcessGroup>> + Send + Sync>;

/// Rank `rank`'s device when `first` is rank 0's: the next of its kind, and from the start again when there are no more.
pub fn device_of(first: &Device, rank: u32) -> Result<Device> {
    if first.is_cpu() {
        return Ok(first.clone());
    }
    let count = ftcore::accelerator(&first.kind)?.count().max(1);
    let index = first.index.wrapping_add(rank) % count;
    Ok(Device::new(first.kind.clone(), index))
}

/// One rank of a case.
pub struct Rank {
    /// This rank.
    pub rank: u32,
    /// How many there are.
    pub world: u32,
    /// Shared by the ranks of this case only.
    pub store: Arc<dyn Store>,
    /// The device of this rank's tensors and group.
    pub device: Device,
    /// Makes groups of the backend under test.
    pub make: MakeOn,
    /// The group that this case shares with others, if it does.
    pub(crate) lent: Option<Arc<Lasting>>,
}

impl Rank {
    /// The deadline of anything that is expected to work.
    pub fn soon(&self) -> Instant {
        deadline_in(Duration::from_secs(30))
    }

    /// An unconfigured group that takes host tensors, wherever it works on them (see `staged`).
    pub fn unconfigured(&self) -> Outcome<Box<dyn ProcessGroup>> {
        Ok(staged(self.bare()?, &self.device)?)
    }

    /// An unconfigured group that takes tensors of this rank's device.
    pub fn bare(&self) -> Outcome<Box<dyn ProcessGroup>> {
        let options = GroupOptions {
            timeout: Duration::from_secs(30),
            ..Default::default()
        };
        Ok((self.make)(&self.device, options)?)
    }

    /// A group of all ranks at epoch 1: a new one, or the one that cases of this world share.
    pub fn group(&self) -> Outcome<Box<dyn ProcessGroup>> {
        if let Some(lasting) = &self.lent {
            return Ok(Box::new(Lent(lasting.clone())));
        }
        let group = self.unconfigured()?;
        group.configure(self.configuration("main", 1))?;
        Ok(group)
    }

    /// Leaves a group in good order; one that cases share stays.
    pub(crate) fn leave(&self, group: &dyn ProcessGroup) -> Outcome {
        match self.lent {
            Some(_) => Ok(()),
            None => Ok(group.shutdown(self.soon())?),
        }
    }

    /// How all ranks configure the group `name`.
    pub fn configuration(&self, name: &str, epoch: u64) -> Configuration {
        Configuration {
            store: self.store.clone(),
            prefix: format!("conformance/{name}"),
            name: name.to_string(),
            epoch: Epoch(epoch),
            rank: self.rank,
            world_size: self.world,
            deadline: self.soon(),
            cancel: Default::default(),
        }
    }

    /// Waits until all ranks are here. Goes through the store, not through the group under test.
    pub fn meet(&self, name: &str) -> Outcome {
        Ok(self
            .store
            .barrier(&format!("meet/{name}"), self.world, self.soon())?)
    }

    /// Ends this process as a crash would. Only for cases that need [`Needs::RealProcesses`].
    pub fn die(&self) -> Outcome {
        let done = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        Err(crate::Failure::new(format!(
            "still alive after SIGKILL: {done:?}"
        )))
    }
}

/// Polls until `ready` gives something. For conditions that are not signalled; ends with a failure after 30 s.
pub(crate) fn eventually<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> Outcome<T> {
    let until = deadline_in(Duration::from_secs(30));
    loop {
        if let Some(found) = ready() {
            return Ok(found);
        }
        ensure!(Instant::now() < until, "{what} did not happen within 30 s");
        std::thread::sleep(Duration::from_millis(2));
    }
}
