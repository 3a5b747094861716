//! What every backend's group does around its engine: one configuration after another, at growing epochs.
//!
//! For authors of backends. A group owns a [`Lifecycle`]; `configure` ends the old [`Engine`] and puts the one in its place that
//! the backend's closure connects, `engine` hands it to `submit`, and abort, error, shut-down and drop are one line each.
//! [`Split`] is the agreement of all ranks on who goes where. [`leave_at_exit`] is for groups whose end their owner decides.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Instant;

pub use crate::exit::{Leaving, leave_at_exit, wait_for_leaves};
use crate::flight_recorder::{self, GroupRing, Recorder};
use crate::forked;
use crate::{
    Cancel, Collective, Configuration, DType, Device, Epoch, Error, ErrorKind, GroupInfo, ProcessGroup,
    ProcessGroupExt, Result, SubmitOptions, accelerator,
};

/// What stands behind a configured group: its connections, threads, communicator.
///
/// The end of the process waits for those that were told to end, 1 s at most for all together: one that ended before its engines have
/// sent their leave messages would be taken for a dead one by its peers.
pub trait Engine: Send + Sync + 'static {
    /// Ends all pending work with `Aborted`. Does not block.
    fn abort(self: &Arc<Self>, reason: &str);
    /// Ends in good order if nothing is pending, otherwise as [`abort`](Self::abort). Does not block.
    fn leave(self: &Arc<Self>, reason: &str);
    /// After [`leave`](Self::leave): waits until nothing of it is left that the next configuration could meet. `Timeout` at the deadline.
    fn wait_ended(self: &Arc<Self>, deadline: Instant) -> Result<()>;
    /// Refuses further work, lets pending work end until `deadline`, then ends. `Timeout` if it had to be cut short.
    fn drain(self: &Arc<Self>, deadline: Instant) -> Result<()>;
    /// The first failure.
    fn error(&self) -> Option<Error>;
    /// Where the [`Lifecycle`] puts the flight recorder of this configuration, before the first operation. Engines that carry operations out
    /// themselves have one; those over other groups do not, so that each operation is recorded once.
    fn recorder(&self) -> Option<&OnceLock<Recorder>> {
        None
    }
}

impl<E: Engine> Leaving for Weak<E> {
    fn is_over(&self) -> bool {
        self.strong_count() == 0
    }

    fn wait_over(&self, deadline: Instant) {
        if let Some(engine) = self.upgrade() {
            // Late or not: there is no caller to tell.
            let _ = engine.wait_ended(deadline);
        }
    }
}

/// As [`leave_at_exit`], for an engine.
fn leave_engine_at_exit<E: Engine>(engine: &Arc<E>) {
    leave_at_exit(Arc::downgrade(engine));
}

/// The configurations of one group. See the module.
pub struct Lifecycle<E: Engine> {
    backend: Arc<str>,
    state: Mutex<State<E>>,
}

struct State<E> {
    name: Arc<str>,
    standing: Standing<E>,
    /// That of an earlier configuration, until it is certain that it has ended: nothing connects beside it.
    ending: Option<Arc<E>>,
    last_epoch: Option<Epoch>,
    /// The last operations of all its configurations.
    ring: Option<Arc<GroupRing>>,
    /// Ends the `configure` that is under way.
    configuring: Option<Cancel>,
}

enum Standing<E> {
    Unconfigured,
    /// The last `configure` failed like this.
    Failed(Error),
    Configured {
        engine: Arc<E>,
        configuration: Configuration,
        /// It was told to end, and the end of the process knows.
        leaving: bool,
    },
}

impl<E: Engine> Lifecycle<E> {
    /// Unconfigured, of the backend with this name. `name` is for messages until a configuration gives another.
    pub fn new(backend: impl Into<Arc<str>>, name: impl Into<Arc<str>>) -> Self {
        flight_recorder::read_environment();
        Self {
            backend: backend.into(),
            state: Mutex::new(State {
                name: name.into(),
                standing: Standing::Unconfigured,
                ending: None,
                last_epoch: None,
                ring: None,
                configuring: None,
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<E>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the engine that stands, if one does, and puts the one in its place that `connect` makes. An engine that has not ended by then is
    /// waited for by the next call: nothing connects before it has. Both waits hear [`abort`](Self::abort). `connect` runs outside
    /// the lock, so that `abort` and `submit` stay responsive. Its waits look at the configuration's token, which [`abort`](Self::abort) cancels, too;
    /// those for keys of its store do so by themselves.
    ///
    /// Errors, with op, rank and epoch: `InvalidArgument` (no such rank, an epoch that is not larger), `InvalidState` (another thread is at it),
    /// the reason of the token, what the old engine's end or `connect` say; the group is unconfigured then and remembers why.
    pub fn configure(
        &self,
        mut configuration: Configuration,
        connect: impl FnOnce(&Configuration) -> Result<Arc<E>>,
    ) -> Result<()> {
        let (rank, epoch) = (configuration.rank, configuration.epoch);
        let named = |e: Error| {
            if e.context().op.is_some() {
                return e;
            }
            e.with_op("configure").with_rank(rank).with_epoch(epoch)
        };
        let cancel = configuration.cancel.child();
        let old = self.begin(&configuration, &cancel).map_err(named)?;
        let attempt = Configuration {
            store: cancel.over(&configuration.store),
            cancel: cancel.clone(),
            ..configuration.clone()
        };
        let ended = old.map_or(Ok(()), |old| {
            old.leave(&format!("configured again at epoch {}", configuration.epoch));
            cancel
                .in_turns(configuration.deadline, |until| old.wait_ended(until))
                .map(|()| self.lock().ending = None)
                .inspect_err(|_| leave_engine_at_exit(&old))
        });
        let connected = ended
            .and_then(|()| cancel.check())
            .and_then(|()| connect(&attempt));
        cancel.settle();
        let mut state = self.lock();
        state.configuring = None;
        let reason = cancel.reason();
        let connected = connected.map_err(|error| match (error.kind(), &reason) {
            (ErrorKind::Aborted, Some(reason)) => reason.clone(),
            _ => error,
        });
        match connected.map_err(named) {
            Ok(engine) => {
                if let Some(recorder) = engine.recorder() {
                    state.ring = state.ring.take().or_else(flight_recorder::ring);
                    if let Some(ring) = &state.ring {
                        recorder.get_or_init(|| Recorder::new(ring.clone(), &configuration));
                    }
                }
                if let Some(reason) = &reason {
                    engine.abort(reason.message());
                    leave_engine_at_exit(&engine);
                }
                // The engine's life has a token of its own, which ends what is split from it: with an abort, and with its first failure.
                let watched = Arc::downgrade(&engine);
                configuration.cancel = Cancel::watching(move || {
                    let error = watched.upgrade()?.error()?;
                    let text = format!("the group that it is split from failed: {error}");
                    Some(Error::new(error.kind(), text).with_source(error))
                });
                state.standing = Standing::Configured {
                    engine,
                    configuration,
                    leaving: reason.is_some(),
                };
                Ok(())
            }
            Err(error) => {
                state.standing = Standing::Failed(error.clone());
                Err(error)
            }
        }
    }

    fn begin(&self, configuration: &Configuration, cancel: &Cancel) -> Result<Option<Arc<E>>> {
        forked::check()?;
        if configuration.world_size == 0 || configuration.rank >= configuration.world_size {
            return Err(Error::invalid(format!(
                "rank {} does not exist in a world of {}",
                configuration.rank, configuration.world_size
            )));
        }
        let mut state = self.lock();
        if state.configuring.is_some() {
            return Err(Error::new(
                ErrorKind::InvalidState,
                "another thread is configuring this group right now",
            ));
        }
        if let Some(last) = state.last_epoch.filter(|&last| configuration.epoch <= last) {
            return Err(Error::invalid(format!(
                "epoch {} is not larger than {last}, which this group had already",
                configuration.epoch
            )));
        }
        state.configuring = Some(cancel.clone());
        state.last_epoch = Some(configuration.epoch);
        state.name = configuration.name.as_str().into();
        let standing = std::mem::replace(&mut state.standing, Standing::Unconfigured);
        if let Standing::Configured { engine, .. } = standing {
            state.ending = Some(engine);
        }
        Ok(state.ending.clone())
    }

    /// The engine and the configuration that it stands for. `InvalidState` if there is none, with what the last attempt died of, and in a process that
    /// was forked off.
    pub fn configured(&self) -> Result<(Arc<E>, Configuration)> {
        forked::check()?;
        match &self.lock().standing {
            Standing::Configured {
                engine,
                configuration,
                ..
            } => Ok((engine.clone(), configuration.clone())),
            Standing::Failed(failure) => Err(Error::new(
                ErrorKind::InvalidState,
                format!("the group is not configured; the last attempt failed: {failure}"),
            )
            .with_source(failure.clone())),
            Standing::Unconfigured => Err(Error::new(ErrorKind::InvalidState, "the group is not configured")),
        }
    }

    /// The engine. Errors as [`configured`](Self::configured).
    pub fn engine(&self) -> Result<Arc<E>> {
        match &self.lock().standing {
            // Without the configuration's clone: this is on the path of every call.
            Standing::Configured { engine, .. } => return Ok(engine.clone()),
            Standing::Unconfigured | Standing::Failed(_) => {}
        }
        self.configured().map(|(engine, _)| engine)
    }

    /// The backend's name.
    pub fn backend(&self) -> &str {
        &self.backend
    }

    /// For [`ProcessGroup::info`].
    pub fn info(&self, device: Device) -> GroupInfo {
        let state = self.lock();
        let (rank, world_size, epoch) = match &state.standing {
            Standing::Configured { configuration: c, .. } => (c.rank, c.world_size, c.epoch),
            Standing::Unconfigured | Standing::Failed(_) => (0, 0, Epoch(0)),
        };
        GroupInfo {
            backend: self.backend.clone(),
            name: state.name.clone(),
            rank,
            world_size,
            epoch,
            device,
            dropped_options: Vec::new(),
        }
    }

    /// For [`ProcessGroup::abort`]: also ends a `configure` or a split that is under way.
    pub fn abort(&self, reason: &str) {
        if forked::is_child() {
            return;
        }
        let standing = {
            let mut state = self.lock();
            if let Some(cancel) = &state.configuring {
                let text = format!("aborted while it was being configured: {reason}");
                cancel.cancel(Error::new(ErrorKind::Aborted, text));
            }
            match &mut state.standing {
                Standing::Configured {
                    engine,
                    configuration,
                    leaving,
                } => {
                    let text = format!("the group that it is split from was aborted: {reason}");
                    configuration.cancel.cancel(Error::new(ErrorKind::Aborted, text));
                    Some((engine.clone(), std::mem::replace(leaving, true)))
                }
                Standing::Unconfigured | Standing::Failed(_) => None,
            }
        };
        if let Some((engine, leaving)) = standing {
            if !leaving {
                leave_engine_at_exit(&engine);
            }
            engine.abort(reason);
        }
    }

    /// What the flight recorder keeps of this group.
    #[cfg(all(test, not(feature = "shuttle")))]
    pub(crate) fn ring(&self) -> Option<Arc<GroupRing>> {
        self.lock().ring.clone()
    }

    /// For [`ProcessGroup::error`].
    pub fn error(&self) -> Option<Error> {
        match &self.lock().standing {
            Standing::Configured { engine, .. } => engine.error(),
            Standing::Failed(failure) => Some(failure.clone()),
            Standing::Unconfigured => None,
        }
    }

    /// For [`ProcessGroup::shutdown`]: drains the engine; nothing to do without one.
    pub fn shutdown(&self, deadline: Instant) -> Result<()> {
        if forked::is_child() {
            return Ok(());
        }
        self.engine().map_or(Ok(()), |engine| engine.drain(deadline))
    }
}

impl<E: Engine> Drop for Lifecycle<E> {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if forked::is_child() {
            // Its drop would end connections that the parent uses.
            std::mem::forget(std::mem::replace(&mut state.standing, Standing::Unconfigured));
            std::mem::forget(state.ending.take());
            return;
        }
        if let Standing::Configured { engine, leaving, .. } = &state.standing {
            if !leaving {
                leave_engine_at_exit(engine);
            }
            engine.leave("the group was dropped");
        }
        if let Some(ring) = &state.ring {
            ring.close();
        }
    }
}

/// A number that cannot be guessed and does not come again: the standard library's hash keys come from the system.
pub fn nonce() -> u64 {
    use std::hash::BuildHasher;
    std::hash::RandomState::new().hash_one(std::process::id())
}

/// Who goes where in a split: what every rank of the parent passed, in rank order.
///
/// The child's prefix has rank 0's nonce in it and so depends on no process's counters (L34).
#[derive(Debug, Clone)]
pub struct Split {
    parent: Configuration,
    ballots: Vec<Ballot>,
}

/// What one rank passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ballot {
    color: Option<u32>,
    key: u32,
    nonce: u64,
}

impl Ballot {
    const WORDS: usize = 5;

    fn encode(self) -> [u32; Self::WORDS] {
        let (high, low) = ((self.nonce >> 32) as u32, self.nonce as u32);
        let color = self.color.unwrap_or(0);
        [u32::from(self.color.is_some()), color, self.key, high, low]
    }

    fn decode([has, color, key, high, low]: [u32; Self::WORDS]) -> Self {
        Self {
            color: (has != 0).then_some(color),
            key,
            nonce: u64::from(high) << 32 | u64::from(low),
        }
    }
}

impl Split {
    /// A collective call of all ranks of `group`, whose configuration is `parent`: one all-gather on its own device.
    ///
    /// Errors: what the all-gather, or the device's copies, say.
    pub fn agree(
        group: &dyn ProcessGroup,
        parent: Configuration,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    ) -> Result<Self> {
        let device = group.info().device;
        let memory = accelerator(&device.kind)?;
        let stream = memory.new_stream(device.index, false)?;
        let mine = Ballot {
            color,
            key,
            nonce: nonce(),
        };
        let bytes: Vec<u8> = mine.encode().iter().flat_map(|w| w.to_ne_bytes()).collect();
        let mut input = memory.alloc(device.index, DType::U32, &[Ballot::WORDS])?;
        memory.copy_in(&bytes, &mut input, &*stream)?;
        let count = Ballot::WORDS * parent.world_size as usize;
        let output = memory.alloc(device.index, DType::U32, &[count])?;
        let options = SubmitOptions {
            stream: Some(stream.clone()),
            ..SubmitOptions::by(deadline)
        };
        let pairs = vec![(input, output)];
        let gathered = group
            .run(Collective::AllGatherInto { pairs }, options)
            .map_err(Error::from)?
            .take_tensor()?;
        let mut bytes = vec![0u8; gathered.byte_len()];
        memory.copy_out(&gathered, &mut bytes, &*stream)?;
        let words: Vec<u32> = bytes
            .as_chunks::<4>()
            .0
            .iter()
            .map(|w| u32::from_ne_bytes(*w))
            .collect();
        let ballots = words.as_chunks().0.iter().map(|w| Ballot::decode(*w)).collect();
        Ok(Self { parent, ballots })
    }

    /// What the ranks passed, in rank order: (colour, key).
    pub fn said(&self) -> impl Iterator<Item = (Option<u32>, u32)> {
        self.ballots.iter().map(|b| (b.color, b.key))
    }

    /// The colours in use, ascending: for libraries that want small ones.
    pub fn colors(&self) -> Vec<u32> {
        let mut colors: Vec<u32> = self.ballots.iter().filter_map(|b| b.color).collect();
        colors.sort_unstable();
        colors.dedup();
        colors
    }

    /// The child group of this rank: its members are the ranks that passed the same colour, ordered by (key, rank). `None` if this rank passed no colour.
    pub fn child(&self, deadline: Instant) -> Option<Configuration> {
        let me = self.parent.rank as usize;
        let color = self.ballots.get(me)?.color?;
        let mut members: Vec<(u32, usize)> = self
            .ballots
            .iter()
            .enumerate()
            .filter(|(_, b)| b.color == Some(color))
            .map(|(rank, b)| (b.key, rank))
            .collect();
        members.sort_unstable();
        let rank = members.iter().position(|&(_, rank)| rank == me)?;
        let nonce = self.ballots.first()?.nonce;
        Some(Configuration {
            store: self.parent.store.clone(),
            prefix: format!("{}/split-{nonce:016x}/{color}", self.parent.prefix),
            name: format!("{}/{color}", self.parent.name),
            epoch: self.parent.epoch,
            rank: u32::try_from(rank).ok()?,
            world_size: u32::try_from(members.len()).ok()?,
            deadline,
            cancel: self.parent.cancel.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::{InMemoryStore, deadline_in, time_left};

    /// Writes down what it is told.
    #[derive(Default)]
    struct Diary(Mutex<Vec<String>>);

    impl Diary {
        fn note(&self, text: String) {
            self.0.lock().unwrap().push(text);
        }
        fn read(&self) -> Vec<String> {
            self.0.lock().unwrap().clone()
        }
    }

    impl Engine for Diary {
        fn abort(self: &Arc<Self>, reason: &str) {
            self.note(format!("abort: {reason}"));
        }
        fn leave(self: &Arc<Self>, reason: &str) {
            self.note(format!("leave: {reason}"));
        }
        fn wait_ended(self: &Arc<Self>, deadline: Instant) -> Result<()> {
            // To look is not to wait.
            if deadline > Instant::now() {
                self.note("ended".to_string());
            }
            Ok(())
        }
        fn drain(self: &Arc<Self>, _: Instant) -> Result<()> {
            self.note("drain".to_string());
            Ok(())
        }
        fn error(&self) -> Option<Error> {
            let notes = self.read();
            let lost = notes.iter().find(|note| note.starts_with("lost"))?;
            Some(Error::new(ErrorKind::PeerLost, lost))
        }
    }

    /// Ends only once it may, and says when it is waited for.
    struct Late {
        may_end: AtomicBool,
        awaited: mpsc::Sender<()>,
    }

    impl Engine for Late {
        fn abort(self: &Arc<Self>, _: &str) {}
        fn leave(self: &Arc<Self>, _: &str) {}
        fn wait_ended(self: &Arc<Self>, deadline: Instant) -> Result<()> {
            let _ = self.awaited.send(());
            if self.may_end.load(Ordering::SeqCst) {
                return Ok(());
            }
            std::thread::sleep(time_left(deadline));
            Err(Error::timeout("it has not ended"))
        }
        fn drain(self: &Arc<Self>, _: Instant) -> Result<()> {
            Ok(())
        }
        fn error(&self) -> Option<Error> {
            None
        }
    }

    fn late() -> (Arc<Late>, mpsc::Receiver<()>) {
        let (awaited, is_awaited) = mpsc::channel();
        let may_end = AtomicBool::new(false);
        (Arc::new(Late { may_end, awaited }), is_awaited)
    }

    fn at(epoch: u64, rank: u32, world_size: u32) -> Configuration {
        Configuration {
            store: Arc::new(InMemoryStore::new()),
            prefix: "p".to_string(),
            name: "n".to_string(),
            epoch: Epoch(epoch),
            rank,
            world_size,
            deadline: deadline_in(Duration::from_secs(10)),
            cancel: Default::default(),
        }
    }

    #[test]
    fn one_engine_follows_another_and_the_old_one_has_ended_before_the_new_one_connects() {
        let group = Lifecycle::new("x", "g");
        assert_eq!(group.info(Device::CPU).world_size, 0);
        let (first, second) = (Arc::new(Diary::default()), Arc::new(Diary::default()));
        group.configure(at(1, 0, 2), |_| Ok(first.clone())).unwrap();
        group
            .configure(at(2, 1, 3), |_| {
                assert_eq!(first.read(), ["leave: configured again at epoch 2", "ended"]);
                Ok(second.clone())
            })
            .unwrap();
        let info = group.info(Device::CPU);
        assert_eq!(
            (info.rank, info.world_size, info.epoch, &*info.name),
            (1, 3, Epoch(2), "n")
        );
        group.abort("why");
        group.shutdown(deadline_in(Duration::ZERO)).unwrap();
        drop(group);
        assert_eq!(
            second.read(),
            ["abort: why", "drain", "leave: the group was dropped"]
        );
    }

    #[test]
    fn bad_ranks_and_epochs_that_do_not_grow_are_refused_and_lose_nothing() {
        let group = Lifecycle::new("x", "g");
        let engine = Arc::new(Diary::default());
        group.configure(at(5, 0, 1), |_| Ok(engine.clone())).unwrap();
        for (bad, says) in [
            (at(6, 2, 2), "rank 2 does not exist in a world of 2"),
            (at(6, 0, 0), "world of 0"),
            (at(5, 0, 1), "epoch 5 is not larger than 5"),
        ] {
            let e = group.configure(bad, |_| unreachable!()).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidArgument);
            assert!(e.to_string().contains(says), "{e}");
            assert_eq!(e.context().op, Some("configure"));
        }
        assert!(group.engine().is_ok());
        assert_eq!(engine.read(), [""; 0]);
    }

    #[test]
    fn a_failed_attempt_is_what_later_calls_are_told() {
        let group = Lifecycle::<Diary>::new("x", "g");
        let e = group.engine().err().unwrap();
        assert!(e.to_string().contains("the group is not configured"), "{e}");
        let e = group
            .configure(at(1, 0, 1), |_| Err(Error::timeout("no rank came")))
            .unwrap_err();
        assert_eq!((e.kind(), e.context().rank), (ErrorKind::Timeout, Some(0)));
        assert_eq!(group.error().unwrap().kind(), ErrorKind::Timeout);
        let e = group.engine().err().unwrap();
        assert_eq!(e.kind(), ErrorKind::InvalidState);
        assert!(e.to_string().contains("no rank came"), "{e}");
        // The epoch is used up: others may have seen it.
        assert!(group.configure(at(1, 0, 1), |_| unreachable!()).is_err());
    }

    #[test]
    fn nothing_connects_beside_an_engine_that_has_not_ended_however_often_it_is_tried() {
        let group = Lifecycle::new("x", "g");
        let (engine, _awaited) = late();
        group.configure(at(1, 0, 1), |_| Ok(engine.clone())).unwrap();
        for epoch in 2..4 {
            let again = Configuration {
                deadline: deadline_in(Duration::from_millis(20)),
                ..at(epoch, 0, 1)
            };
            let e = group.configure(again, |_| unreachable!()).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Timeout, "{e}");
            assert!(e.to_string().contains("it has not ended"), "{e}");
            assert!(group.engine().is_err());
        }
        engine.may_end.store(true, Ordering::SeqCst);
        let (next, _awaited) = late();
        group
            .configure(at(4, 0, 1), |_| {
                assert_eq!(Arc::strong_count(&engine), 1, "it was let go of");
                Ok(next.clone())
            })
            .unwrap();
        assert!(Arc::ptr_eq(&group.engine().unwrap(), &next));
    }

    #[test]
    fn an_abort_ends_the_wait_for_an_engine_that_does_not_end() {
        let group = Lifecycle::new("x", "g");
        let (engine, awaited) = late();
        group.configure(at(1, 0, 1), |_| Ok(engine.clone())).unwrap();
        let long = Duration::from_secs(20);
        let begun = Instant::now();
        let e = std::thread::scope(|scope| {
            let configuring = scope.spawn(|| {
                let again = Configuration {
                    deadline: deadline_in(long),
                    ..at(2, 0, 1)
                };
                group.configure(again, |_| unreachable!()).unwrap_err()
            });
            awaited.recv().unwrap();
            group.abort("enough");
            configuring.join().unwrap()
        });
        assert_eq!(e.kind(), ErrorKind::Aborted, "{e}");
        assert!(e.to_string().contains("enough"), "{e}");
        assert!(begun.elapsed() < long / 2, "it waited for its deadline");
    }

    #[test]
    fn an_abort_during_configure_cancels_its_token_and_ends_the_engine_that_comes_of_it() {
        let group = Lifecycle::new("x", "g");
        let engine = Arc::new(Diary::default());
        let (inside, entered) = mpsc::channel();
        let (go, gone) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let (group, engine) = (&group, engine.clone());
            let configuring = scope.spawn(move || {
                group.configure(at(1, 0, 1), |c| {
                    inside.send(()).unwrap();
                    gone.recv().unwrap();
                    assert!(c.cancel.reason().is_some());
                    Ok(engine)
                })
            });
            entered.recv().unwrap();
            let e = group.configure(at(2, 0, 1), |_| unreachable!()).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidState);
            group.abort("now");
            go.send(()).unwrap();
            configuring.join().unwrap().unwrap();
        });
        // The thread that ends it does not wait for that; the end of the process does.
        assert_eq!(
            engine.read(),
            ["abort: aborted while it was being configured: now"]
        );
        // The token belongs to that attempt.
        let next = Arc::new(Diary::default());
        group.configure(at(3, 0, 1), |_| Ok(next.clone())).unwrap();
        assert_eq!(next.read(), [""; 0]);
    }

    fn split_of(parent: &Lifecycle<Diary>) -> Configuration {
        let (_, parent) = parent.configured().unwrap();
        let (color, key, nonce) = (Some(0), 0, 1);
        let ballots = vec![Ballot { color, key, nonce }; 2];
        let split = Split { parent, ballots };
        split.child(deadline_in(Duration::from_secs(10))).unwrap()
    }

    #[test]
    fn a_failure_of_the_group_ends_what_is_being_split_from_it() {
        let (parent, child) = (Lifecycle::new("x", "g"), Lifecycle::<Diary>::new("x", "child"));
        let engine = Arc::new(Diary::default());
        parent.configure(at(1, 0, 2), |_| Ok(engine.clone())).unwrap();
        let e = child.configure(split_of(&parent), |c| {
            engine.note("lost: rank 2".to_string());
            c.cancel.check().and(Ok(engine.clone()))
        });
        let e = e.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::PeerLost, "{e}");
        assert!(e.message().contains("split from failed: lost: rank 2"), "{e}");
    }

    #[test]
    fn l27_an_abort_cancels_what_is_being_split_from_the_group() {
        let (parent, child) = (Lifecycle::new("x", "g"), Lifecycle::<Diary>::new("x", "child"));
        let engine = Arc::new(Diary::default());
        let given = at(1, 0, 2);
        parent.configure(given.clone(), |_| Ok(engine.clone())).unwrap();
        let e = child
            .configure(split_of(&parent), |c| {
                parent.abort("enough");
                assert!(c.cancel.reason().is_some());
                Err(Error::new(ErrorKind::Aborted, "a connection was ended"))
            })
            .unwrap_err();
        assert_eq!(
            (e.kind(), e.message()),
            (
                ErrorKind::Aborted,
                "the group that it is split from was aborted: enough"
            )
        );
        // The caller's token and that of the parent's next configuration are others.
        assert!(given.cancel.reason().is_none());
        parent.configure(at(2, 0, 2), |_| Ok(engine.clone())).unwrap();
        assert!(parent.configured().unwrap().1.cancel.reason().is_none());
    }

    proptest! {
        #[test]
        fn every_rank_of_a_split_finds_itself_once_and_all_of_a_colour_agree(
            said in proptest::collection::vec((proptest::option::of(0u32..4), 0u32..3), 1..12),
            nonces in any::<u64>(),
        ) {
            let world = said.len() as u32;
            let ballots: Vec<Ballot> = said
                .iter()
                .zip(nonces..=u64::MAX)
                .map(|(&(color, key), nonce)| Ballot::decode(Ballot { color, key, nonce }.encode()))
                .collect();
            let children: Vec<Option<Configuration>> = (0..world)
                .map(|rank| Split { parent: at(7, rank, world), ballots: ballots.clone() }.child(deadline_in(Duration::ZERO)))
                .collect();
            for (a, ((color, key), child)) in said.iter().zip(&children).enumerate() {
                prop_assert_eq!(color.is_some(), child.is_some());
                let Some(child) = child else { continue };
                prop_assert!(child.rank < child.world_size);
                for (b, ((other, its), sibling)) in said.iter().zip(&children).enumerate().skip(a + 1) {
                    let Some(sibling) = sibling else { continue };
                    prop_assert_eq!(color == other, child.prefix == sibling.prefix);
                    if color == other {
                        prop_assert_eq!(child.world_size, sibling.world_size);
                        prop_assert_eq!((key, a) < (its, b), child.rank < sibling.rank);
                    }
                }
            }
        }
    }
}
