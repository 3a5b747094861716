//! The life of an isolated group: which child serves an epoch, abort, leave and split.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ftcore::{Cancel, Configuration, Epoch, Error, ErrorKind, Feature, Result};

use super::{Handle, IsolatedGroup, State};
use crate::front::Front;
use crate::link::Link;
use crate::peers::{self, Peers};
use crate::wire::frames::{Order, Settled};
use crate::{child_pool, clock};

/// What a backend gets to tell the other ranks of an abort before pending work fails: INV-2 gives 100 ms in all. A child that then has no
/// memory of the caller's may go on until `GOODBYE`: on a busy machine it may not have had a core yet.
const LAST_WORDS: Duration = Duration::from_millis(60);
/// How long a child may take to tell the other ranks of the leave and exit.
const GOODBYE: Duration = Duration::from_millis(500);
/// A backend reports the end of a call by its deadline; after this much more it is not going to.
const MARGIN: Duration = Duration::from_secs(2);

impl Handle {
    /// A child to configure, and whether it is another one than before.
    fn child_for(&self, configuration: &Configuration) -> Result<Arc<Link>> {
        let Configuration { epoch, deadline, .. } = *configuration;
        let old = {
            let mut state = self.lock();
            match &state.link {
                Some(link) if self.core.reuses && link.is_fresh() && !state.shut => return Ok(link.clone()),
                // Not configured yet: whatever the backend, a first time is always possible.
                Some(link) if state.last_epoch.is_none() && link.is_fresh() && !state.shut => {
                    return Ok(link.clone());
                }
                _ => state.link.take(),
            }
        };
        if self.number != 0 {
            return Err(Error::new(
                ErrorKind::InvalidState,
                "this group was split from one whose child process has ended; configure that one and split again",
            ));
        }
        if let Some(old) = old {
            let text = format!("configured again at epoch {epoch}");
            old.detach(0, Error::new(ErrorKind::Aborted, text), Some(Order::Leave));
        }
        let spent = self.front.take_traffic();
        {
            let mut state = self.lock();
            state.traffic.sent += spent.sent;
            state.traffic.received += spent.received;
        }
        let link = match self.core.spare.take(deadline, &configuration.cancel) {
            Some(link) => link,
            None => {
                let cancel = &configuration.cancel;
                child_pool::start(&self.core.options, &self.core.pool, deadline, cancel)?.link
            }
        };
        link.attach_first(&self.front);
        let mut state = self.lock();
        state.link = Some(link.clone());
        drop(state);
        if let Err(cancelled) = configuration.cancel.check() {
            link.end(cancelled.clone(), None, Duration::ZERO);
            return Err(cancelled);
        }
        Ok(link)
    }

    fn connect(&self, configuration: &Configuration) -> Result<Settled> {
        let deadline = configuration.deadline;
        let link = self.child_for(configuration)?;
        // Of the epoch before, whose watch is over: it is not to count in this one.
        link.settle(None);
        let watched = !self.core.tells && configuration.world_size > 1;
        if watched {
            peers::publish(configuration, &link)?;
        }
        let store = link
            .stores()?
            .offer(configuration.cancel.over(&configuration.store));
        let result = link.call(
            |call| Order::Configure {
                call,
                group: self.number,
                store,
                prefix: configuration.prefix.clone(),
                name: configuration.name.clone(),
                epoch: configuration.epoch.0,
                rank: configuration.rank,
                world: configuration.world_size,
                deadline,
            },
            Some(self.front.clone()),
            clock::later(deadline, MARGIN),
            &configuration.cancel,
        );
        if let Some(reason) = configuration.cancel.reason().filter(|_| result.is_err()) {
            // The child does not know of it.
            self.abort(reason.message());
        } else if let Err(e) = &result {
            let unanswered =
                e.kind() == ErrorKind::Timeout && ftcore::time_left(clock::later(deadline, MARGIN)).is_zero();
            if unanswered || !self.core.reuses {
                link.end(e.clone(), None, Duration::ZERO);
            }
        }
        if watched && result.is_ok() {
            let peers = Peers::watch(configuration, link, self.front.clone())?;
            self.lock().peers = Some(peers);
        }
        result
    }

    pub(super) fn configure(&self, mut configuration: Configuration) -> Result<()> {
        configuration.cancel = configuration.cancel.child();
        let configuration = &configuration;
        let named = |e: Error| {
            if e.context().op.is_some() {
                return e;
            }
            e.with_op("configure")
                .with_rank(configuration.rank)
                .with_epoch(configuration.epoch.0)
        };
        if configuration.world_size == 0 || configuration.rank >= configuration.world_size {
            return Err(named(Error::invalid(format!(
                "rank {} does not exist in a world of {}",
                configuration.rank, configuration.world_size
            ))));
        }
        {
            let mut state = self.lock();
            if state.configuring.is_some() {
                return Err(named(Error::new(
                    ErrorKind::InvalidState,
                    "another thread is configuring this group right now",
                )));
            }
            if let Some(last) = state.last_epoch.filter(|&last| configuration.epoch <= last) {
                return Err(named(Error::invalid(format!(
                    "epoch {} is not larger than {last}, which this group had already",
                    configuration.epoch
                ))));
            }
            state.configuring = Some(configuration.cancel.clone());
            state.peers = None;
            state.failure = None;
            state.settled = None;
            state.name.clone_from(&configuration.name);
        }
        let connected = self.connect(configuration);
        configuration.cancel.settle();
        let mut state = self.lock();
        state.configuring = None;
        let cancelled = configuration.cancel.reason();
        state.last_epoch = Some(configuration.epoch);
        state.shut = false;
        match connected {
            Ok(settled) => {
                state.settled = Some(settled);
                // The answer and an abort may have crossed.
                if let Some(cancelled) = cancelled {
                    self.front.poison(&cancelled);
                }
                drop(state);
                if self.core.options.spare {
                    self.core.spare.prepare(&self.core.options, &self.core.pool);
                }
                Ok(())
            }
            Err(error) => {
                let error = named(cancelled.unwrap_or(error));
                state.failure = Some(error.clone());
                Err(error)
            }
        }
    }

    pub(super) fn abort(&self, reason: &str) {
        let state = self.lock();
        let (rank, epoch) = state.settled.as_ref().map_or((0, 0), |s| (s.rank, s.epoch));
        let text = format!("rank {rank} aborted the group: {reason}");
        let error = Error::new(ErrorKind::Aborted, text).with_epoch(epoch);
        if let Some(cancel) = &state.configuring {
            let text = format!("aborted while it was being configured: {reason}");
            cancel.cancel(Error::new(ErrorKind::Aborted, text));
        } else if state.settled.is_none() || state.shut {
            return;
        } else {
            self.front.poison(&error);
        }
        let Some(link) = state.link.clone() else { return };
        drop(state);
        // A split group of such a backend has no watch of its own, but ends the child of one that has.
        let watched = !self.core.tells && link.tell_peers(&error);
        let tell = Order::Abort {
            group: self.number,
            reason: reason.to_string(),
        };
        if watched || (self.number == 0 && self.core.tells) {
            link.part();
        }
        match (self.number, self.core.tells) {
            (0, true) => link.end_after_words(error, Some(tell), LAST_WORDS, GOODBYE),
            // The watch ends the child once it has posted this; its end is not to overtake a store that takes longer.
            (_, false) if watched => link.end_after_words(error, None, LAST_WORDS, GOODBYE),
            (_, false) => link.end(error, None, Duration::ZERO),
            (_, true) => link.abort_group(self.number, reason, error, LAST_WORDS),
        }
    }

    pub(super) fn shutdown(&self, deadline: Instant) -> Result<()> {
        let link = {
            let mut state = self.lock();
            if std::mem::replace(&mut state.shut, true) || state.settled.is_none() {
                return Ok(());
            }
            state.link.clone()
        };
        let Some(link) = link.filter(|l| l.unusable().is_none()) else {
            return Ok(());
        };
        if let Some(peers) = &self.lock().peers {
            peers.leave();
        }
        let number = self.number;
        let result = link.call(
            |call| Order::Shutdown {
                call,
                group: number,
                deadline,
            },
            None,
            clock::later(deadline, MARGIN),
            &Cancel::default(),
        );
        if self.number == 0 && link.is_alone() {
            let error = Error::new(ErrorKind::InvalidState, "the group is shut down");
            // Its end is no failure of the group.
            link.mute(self.number);
            link.end(error, Some(Order::Leave), GOODBYE);
            // Its end is on its way; a program that counts processes may want to see it.
            link.wait_gone(clock::later(Instant::now(), GOODBYE * 2));
        }
        match result {
            // It ended meanwhile: nothing is left to shut down.
            Err(e) if e.kind() == ErrorKind::Aborted => Ok(()),
            other => other.map(drop),
        }
    }

    pub(super) fn split(
        self: &Arc<Self>,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    ) -> Result<Option<IsolatedGroup>> {
        let (link, ..) = self.ready().map_err(|e| e.with_op("split"))?;
        if !self.core.capabilities.has(Feature::Split) {
            let text = format!("backend '{}' cannot split", self.core.options.backend);
            return Err(Error::unsupported(text).with_op("split"));
        }
        let front = Arc::new(Front::default());
        let new = link.attach(&front);
        let result = link.call(
            |call| Order::Split {
                call,
                group: self.number,
                new,
                color,
                key,
                deadline,
            },
            None,
            clock::later(deadline, MARGIN),
            &Cancel::default(),
        );
        let unneeded = || Error::new(ErrorKind::Aborted, "the split gave this rank no group");
        match result {
            Ok(settled) if settled.exists => {
                let epoch = Epoch(settled.epoch);
                Ok(Some(IsolatedGroup(Arc::new(Self {
                    core: self.core.clone(),
                    number: new,
                    front,
                    state: Mutex::new(State {
                        link: Some(link),
                        name: settled.name.clone(),
                        settled: Some(settled),
                        last_epoch: Some(epoch),
                        ..State::default()
                    }),
                }))))
            }
            Ok(_) => {
                link.detach(new, unneeded(), Some(Order::Leave));
                Ok(None)
            }
            Err(e) => {
                link.detach(new, unneeded(), Some(Order::Leave));
                Err(e)
            }
        }
    }
}
