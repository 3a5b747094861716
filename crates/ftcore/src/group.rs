//! The process group: one data method, and what is needed to configure, abort and ask.
//!
//! A wrapper (quantised, isolated, managed, chaos) is itself a `ProcessGroup` around a `ProcessGroup`; one that changes
//! little is written as a [`Wrapper`](crate::Wrapper). Users call the named collectives of [`ProcessGroupExt`](crate::ProcessGroupExt).

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use crate::{
    Cancel, Capabilities, Checked, Completion, DType, Device, Epoch, Error, Failed, Rejected, Result, Store,
    SubmitOptions, Tensor, Work,
};

/// What a group is right now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupInfo {
    /// The backend's name. Shared, like `name`: every call asks for this struct, and it must not allocate.
    pub backend: Arc<str>,
    /// The group's name, for messages.
    pub name: Arc<str>,
    /// This process's rank; 0 while not configured.
    pub rank: u32,
    /// The number of ranks; 0 while not configured.
    pub world_size: u32,
    /// The epoch of the configuration.
    pub epoch: Epoch,
    /// The device that the group serves.
    pub device: Device,
    /// Options that were asked for with `lenient` and that the backend does not honour. Empty from a backend itself:
    /// [`Backend::create`](crate::registry::Backend::create) notes them.
    pub dropped_options: Vec<String>,
}

/// How a group is (re)configured. All ranks pass the same store contents, prefix, epoch and world size.
#[derive(Clone)]
pub struct Configuration {
    /// Through which the ranks find each other.
    pub store: Arc<dyn Store>,
    /// Put before every key; unique per configuration together with the epoch.
    pub prefix: String,
    /// The group's name, for messages.
    pub name: String,
    /// The new epoch; larger than any this group had.
    pub epoch: Epoch,
    /// This process's rank.
    pub rank: u32,
    /// The number of ranks, at least 1.
    pub world_size: u32,
    /// `configure` fails with `Timeout` at this instant, naming the missing ranks and the phase (L33).
    pub deadline: Instant,
    /// Ends `configure` early with its reason; every wait below looks at it.
    pub cancel: Cancel,
}

impl fmt::Debug for Configuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Configuration")
            .field("prefix", &self.prefix)
            .field("name", &self.name)
            .field("epoch", &self.epoch)
            .field("rank", &self.rank)
            .field("world_size", &self.world_size)
            .finish_non_exhaustive()
    }
}

/// Bytes moved so far by a group, over all its configurations, counted where they leave and enter the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Traffic {
    /// Bytes sent to other ranks, headers included.
    pub sent: u64,
    /// Bytes received from other ranks, headers included.
    pub received: u64,
}

/// A group of ranks that call collectives together.
///
/// Common behaviour:
/// - all methods may be called from any thread; collectives run in the order of submission, which must be the same on
///   every rank; point-to-point operations are ordered per (peer, direction, tag) only;
/// - a group starts unconfigured; `submit` then is refused with `InvalidState`;
/// - after the first failure the group is *poisoned*: later submissions fail with `Poisoned` and the first cause, until
///   the next `configure` (L32). Where `Abort` and `Reconfigure` are advertised this costs milliseconds;
/// - dropping a group never blocks: it aborts what is pending and lets its threads end.
///
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
///
/// use ftcore::{
///     Cancel, Configuration, Device, Epoch, GroupOptions, ProcessGroup, ProcessGroupExt as _, ReduceOp, Registry,
///     Result, Store, deadline_in,
/// };
///
/// /// The sum over all ranks, that meet in `store`.
/// fn sum(store: Arc<dyn Store>, rank: u32, world_size: u32) -> Result<[f32; 2]> {
///     let group = Registry::global().create("gloo", &Device::CPU, &GroupOptions::default())?;
///     group.configure(Configuration {
///         store,
///         prefix: "example".into(),
///         name: "example".into(),
///         epoch: Epoch(1), // after a failure: the next one, of the ranks that are left
///         rank,
///         world_size,
///         deadline: deadline_in(Duration::from_secs(30)),
///         cancel: Cancel::default(),
///     })?;
///     let mut values = [rank as f32, 1.0];
///     group.all_reduce_slice(&mut values, ReduceOp::Sum)?;
///     group.shutdown(deadline_in(Duration::from_secs(10)))?;
///     Ok(values)
/// }
/// ```
pub trait ProcessGroup: Send + Sync {
    /// Backend, rank, world size, epoch, device.
    fn info(&self) -> GroupInfo;

    /// What is offered.
    fn capabilities(&self) -> &Capabilities;

    /// Connects the ranks at a new epoch, ending whatever an earlier one left over (its work fails as `Aborted`).
    ///
    /// Errors: `InvalidArgument` (epoch not larger, rank out of range), `Timeout` (missing ranks and phase named),
    /// `PeerLost`, `Mismatch` (ranks disagree on world size or constants), the reason of the token if it is cancelled. After an error the group is unconfigured.
    fn configure(&self, configuration: Configuration) -> Result<()>;

    /// Submits a validated operation. Use [`ProcessGroupExt::run`](crate::ProcessGroupExt::run), which validates.
    ///
    /// The operation starts at once or after earlier ones; its deadline counts from now (L35). Refusals (poisoned,
    /// not configured) give the tensors back; later failures show in the `Work`.
    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>>;

    /// Runs a validated operation and blocks until it has ended; on the calling thread where the backend can, which
    /// saves the hand-over to another one. Ordered with `submit` as one sequence.
    ///
    /// Where the group advertises [`Feature::Borrow`](crate::Feature::Borrow), all tensors come back with success and with
    /// failure, in the order of [`Collective::tensors`](crate::Collective::tensors), and nothing touches their memory any more.
    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        execute_by_submit(self, op, options)
    }

    /// A one-dimensional host tensor of `count` zeros, in the memory that this group moves with the least copying: between ranks of one host, gloo reduces
    /// and gathers straight out of it. The group's operations take any tensor, on any mixture of ranks; this changes their time only. It needs no
    /// other rank, may come before `configure`, and outlives the group. For what is used again and again: making it costs a page fault per page.
    ///
    /// Groups that have no such memory give that of [`Tensor::zeros`]. `InvalidArgument` for more elements than fit in memory.
    fn alloc(&self, dtype: DType, count: usize) -> Result<Tensor> {
        Tensor::try_zeros(dtype, &[count])
    }

    /// Makes a group of the ranks that pass the same `color`, ordered by (`key`, rank); `None` for ranks that pass no
    /// colour. A collective call of all ranks. `Unsupported` without the `Split` feature.
    fn split(&self, color: Option<u32>, key: u32, deadline: Instant)
    -> Result<Option<Box<dyn ProcessGroup>>>;

    /// Ends all pending work with `Aborted` and poisons the group; returns at once. Peers are told, so that they do not
    /// wait for this rank.
    fn abort(&self, reason: &str);

    /// The first failure since the last `configure`, if there was one. A group that finds it out only now may tell of its operations' ends
    /// on this thread: ask under no lock that their callbacks take.
    fn error(&self) -> Option<Error>;

    /// Ends the group: waits for pending work until `deadline`, then aborts the rest. Idempotent.
    fn shutdown(&self, deadline: Instant) -> Result<()>;

    /// Bytes moved so far.
    fn traffic(&self) -> Traffic;
}

/// [`ProcessGroup::execute`] for groups that have nothing quicker than `submit`.
pub fn execute_by_submit<G: ProcessGroup + ?Sized>(
    group: &G,
    op: Checked,
    options: SubmitOptions,
) -> Result<Completion, Box<Failed>> {
    group.submit(op, options)?.finish()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{DTypeSet, ErrorKind, FeatureSet, OpSet, Staged};

    /// It has no memory of its own, and does nothing.
    struct Bare(Capabilities);

    impl Bare {
        fn new() -> Self {
            Self(Capabilities {
                ops: OpSet::NONE,
                moves: DTypeSet::NONE,
                reduces: Default::default(),
                features: FeatureSet::NONE,
                options: Vec::new(),
                devices: Vec::new(),
                notes: Vec::new(),
            })
        }
    }

    impl ProcessGroup for Bare {
        fn info(&self) -> GroupInfo {
            GroupInfo {
                backend: "bare".into(),
                name: "bare".into(),
                rank: 0,
                world_size: 0,
                epoch: Epoch(0),
                device: Device::CPU,
                dropped_options: Vec::new(),
            }
        }
        fn capabilities(&self) -> &Capabilities {
            &self.0
        }
        fn configure(&self, _: Configuration) -> Result<()> {
            Ok(())
        }
        fn submit(&self, op: Checked, _: SubmitOptions) -> Result<Work, Box<Rejected>> {
            let (error, op) = (Error::unsupported("it does nothing"), op.into_inner());
            Err(Box::new(Rejected { error, op }))
        }
        fn split(&self, _: Option<u32>, _: u32, _: Instant) -> Result<Option<Box<dyn ProcessGroup>>> {
            Ok(None)
        }
        fn abort(&self, _: &str) {}
        fn error(&self) -> Option<Error> {
            None
        }
        fn shutdown(&self, _: Instant) -> Result<()> {
            Ok(())
        }
        fn traffic(&self) -> Traffic {
            Traffic::default()
        }
    }

    #[test]
    fn memory_of_more_elements_than_fit_is_refused_and_no_panic() {
        let staged = Staged::new(Arc::new(Bare::new()), &Device::CPU, Duration::ZERO).unwrap();
        let groups: [&dyn ProcessGroup; 2] = [&Bare::new(), &staged];
        for group in groups {
            assert_eq!(group.alloc(DType::F64, 3).unwrap().bytes(), [0; 24]);
            let e = group.alloc(DType::F64, usize::MAX / 4).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}");
        }
    }
}
