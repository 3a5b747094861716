//! Plausible backends that are wrong in one way each, as gloo with that fault: the suite must find each of them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use backend_gloo::GlooGroup;
use ftcore::{
    Capabilities, Checked, Collective, Completer, Completion, Configuration, Device, Error, ErrorKind,
    Failed, Feature, GroupInfo, GroupOptions, OpKind, ProcessGroup, Rejected, Result, SubmitOptions, Work,
    Wrapper, deadline_in, execute_by_submit, work_pair,
};

use crate::credentials::forget;
use crate::{Mode, Plan, Verdict};

/// What is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// Nothing.
    None,
    /// Of receives that wait for one rank and tag, the last is served first.
    LastReceiveFirst,
    /// `contribute` is not looked at in one operation.
    AlwaysContributes,
    /// The rank of the first configuration is kept as long as the world is as large.
    KeepsItsRank,
    /// The death of rank 0 is a failure without its number.
    ForgetsRankZero,
    /// Deadlines that are near pass at once.
    GivesUpAtOnce,
    /// Splits, and does not say so.
    SplitsUnsaid,
    /// `Work::abort` does nothing.
    CannotAbortWork,
}

/// With the case that finds it.
const FAULTS: [(Fault, &str); 8] = [
    (
        Fault::LastReceiveFirst,
        "threads::p2p::order_per_peer_and_tag::world2",
    ),
    (
        Fault::AlwaysContributes,
        "threads::reduce::contributors_in_reduce_and_reduce_scatter::world2",
    ),
    (
        Fault::KeepsItsRank,
        "threads::failures::reconfigure_many_times::world2",
    ),
    (
        Fault::ForgetsRankZero,
        "processes::failures::killed_rank_0_is_named_and_the_others_go_on::world2",
    ),
    (
        Fault::GivesUpAtOnce,
        "threads::failures::l35_timeout_names_who_is_missing::world2",
    ),
    (
        Fault::GivesUpAtOnce,
        "threads::failures::l35_timeout_of_a_receive::world2",
    ),
    (
        Fault::SplitsUnsaid,
        "threads::arguments::not_advertised_is_unsupported_at_once::world2",
    ),
    (
        Fault::CannotAbortWork,
        "threads::failures::l27_an_operation_that_is_aborted_ends_with_the_reason::world2",
    ),
];

/// Receives that wait, by peer and tag.
type Waiting = Arc<Mutex<BTreeMap<(Option<u32>, u32), Vec<Completer>>>>;

struct Wrong {
    inner: GlooGroup,
    fault: Fault,
    capabilities: Capabilities,
    /// Rank and world of the first configuration.
    first: Mutex<Option<(u32, u32)>>,
    /// What it says that it is.
    said: Mutex<Option<(u32, u32)>>,
    waiting: Waiting,
}

impl Wrong {
    fn new(fault: Fault, options: GroupOptions) -> Result<Self> {
        let inner = GlooGroup::new("wrong", options)?;
        let mut capabilities = inner.capabilities().clone();
        if fault == Fault::SplitsUnsaid {
            capabilities.features = capabilities.features.without(Feature::Split);
        }
        Ok(Self {
            inner,
            fault,
            capabilities,
            first: Mutex::default(),
            said: Mutex::default(),
            waiting: Arc::default(),
        })
    }

    fn has(&self, fault: Fault) -> bool {
        self.fault == fault
    }

    /// `inner` as the caller sees it, whose failure `renamed` says.
    fn shown(&self, inner: &Work, deadline: Option<Instant>, renamed: fn(Error) -> Error) -> Work {
        let aborted = (!self.has(Fault::CannotAbortWork)).then(|| inner.clone());
        let abort = move |reason: &str| aborted.iter().for_each(|work| work.abort(reason));
        let deadline = deadline.unwrap_or_else(|| deadline_in(Duration::from_secs(30)));
        let (outer, completer) = work_pair(inner.kind(), deadline, abort);
        let work = inner.clone();
        inner.on_complete(move |_| end(completer, &work, renamed));
        outer
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn end(completer: Completer, work: &Work, renamed: fn(Error) -> Error) {
    match work.take() {
        Ok(completion) => completer.succeed(completion),
        Err(error) => completer.fail(renamed(error), work.recover()),
    }
}

fn without_rank_zero(error: Error) -> Error {
    match (error.kind(), error.context().peer) {
        (ErrorKind::PeerLost, Some(0)) => Error::new(ErrorKind::PeerLost, "a rank is gone"),
        _ => error,
    }
}

impl Wrapper for Wrong {
    fn inner(&self) -> &dyn ProcessGroup {
        &self.inner
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn info(&self) -> GroupInfo {
        let mut info = self.inner.info();
        if let Some((rank, world)) = *lock(&self.said) {
            (info.rank, info.world_size) = (rank, world);
        }
        info
    }

    fn configure(&self, mut configuration: Configuration) -> Result<()> {
        if self.has(Fault::KeepsItsRank) {
            let told = (configuration.rank, configuration.world_size);
            let (rank, world) = *lock(&self.first).get_or_insert(told);
            if world == configuration.world_size {
                configuration.rank = rank;
            }
            *lock(&self.said) = Some(told);
        }
        self.inner.configure(configuration)
    }

    fn submit(&self, op: Checked, mut options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        let deadline = options.deadline;
        let mut place = None;
        if let Collective::Recv { peer, tag, .. } = op.get() {
            place = Some((*peer, *tag));
        }
        match self.fault {
            Fault::LastReceiveFirst if place.is_some() => {}
            Fault::AlwaysContributes if op.get().kind() == OpKind::ReduceScatterInto => {
                options.contribute = true
            }
            Fault::ForgetsRankZero => {}
            Fault::GivesUpAtOnce if deadline.is_some_and(|at| at < deadline_in(Duration::from_secs(5))) => {
                options.deadline = Some(deadline_in(Duration::from_millis(20)));
                return self.inner.submit(op, options);
            }
            Fault::CannotAbortWork if place.is_some() => {
                options.deadline = Some(deadline_in(Duration::from_millis(300)));
            }
            _ => return self.inner.submit(op, options),
        }
        let inner = self.inner.submit(op, options)?;
        let waiting = self.waiting.clone();
        Ok(match (self.fault, place) {
            (Fault::LastReceiveFirst, Some(place)) => {
                let (outer, completer) =
                    work_pair(inner.kind(), deadline_in(Duration::from_secs(30)), |_| {});
                lock(&waiting).entry(place).or_default().push(completer);
                let work = inner.clone();
                inner.on_complete(move |_| {
                    let last = lock(&waiting).get_mut(&place).and_then(Vec::pop);
                    last.into_iter()
                        .for_each(|completer| end(completer, &work, |error| error));
                });
                outer
            }
            (Fault::ForgetsRankZero, _) => self.shown(&inner, deadline, without_rank_zero),
            _ => self.shown(&inner, deadline, |error| error),
        })
    }

    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        execute_by_submit(self, op, options)
    }

    fn split(&self, color: Option<u32>, key: u32, by: Instant) -> Result<Option<Box<dyn ProcessGroup>>> {
        self.inner.split(color, key, by)
    }
}

/// Ranks as processes begin in [`serves`].
fn plan(fault: Fault) -> Plan {
    let make = move |_: &Device, options: GroupOptions| -> Result<Box<dyn ProcessGroup>> {
        Ok(Box::new(Wrong::new(fault, options)?))
    };
    let program = std::env::current_exe().unwrap().into_os_string();
    Plan {
        again: vec![program, "wrong::serves".into(), "--exact".into()],
        ..Plan::new(Device::CPU, &[Mode::Threads, Mode::Processes], Arc::new(make))
    }
}

/// Only one fault is looked at with ranks as processes.
#[test]
fn serves() {
    if let Some(outcome) = plan(Fault::ForgetsRankZero).serve() {
        outcome.unwrap();
    }
}

fn verdict(fault: Fault, case: &str) -> Verdict {
    let mut placed = plan(fault).laid_out().unwrap().into_iter();
    let placed = placed.find(|placed| placed.name() == case);
    placed
        .unwrap_or_else(|| panic!("no case is named '{case}'"))
        .judge()
}

#[test]
fn each_fault_is_found_and_what_is_right_passes() {
    std::thread::scope(|scope| {
        for (fault, case) in FAULTS {
            scope.spawn(move || {
                let found = verdict(fault, case);
                assert!(
                    matches!(found, Verdict::Failed(_)),
                    "{fault:?}, {case}: {found:?}"
                );
                let (fault, right) = match fault {
                    Fault::ForgetsRankZero => (fault, case.replace("killed_rank_0", "killed_process")),
                    _ => (Fault::None, case.to_owned()),
                };
                assert_eq!(verdict(fault, &right), Verdict::Passed, "{fault:?}, {right}");
            });
        }
    });
    forget();
}
