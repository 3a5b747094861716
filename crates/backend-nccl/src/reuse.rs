//! What one configuration leaves to the next, if the hint `reuse_communicators` says so: its communicator, idle or revoked, out of which the
//! next one's is made.
//!
//! The watchdog decides what becomes of a communicator ([`Legacy`]); `configure` takes it over as a [`Parent`] and says what it holds
//! ([`Holding`]); rank 0 makes a plan of what all hold (`plan`). `inherit` carries it out.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind, deadline_in, time_left};

use crate::bounded::bounded;
use crate::engine::Engine;
use crate::options::REVOKE;
use crate::plan::{CommId, Holding, How};
use crate::raw::{Comm, give_up};

/// How long `configure` waits for the old communicator's fate beyond the time that it has to be revoked.
const FATE: Duration = Duration::from_millis(500);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Open,
    Kept(How),
    Gone,
}

/// The fate of an engine's communicator: decided by its watchdog, asked for by the next `configure`.
pub(crate) struct Legacy {
    id: CommId,
    /// How long it gets to be revoked before it is aborted instead.
    revoke: Duration,
    state: Mutex<State>,
    moved: Condvar,
}

struct State {
    fate: Fate,
    /// It is to be left to the next configuration.
    wanted: bool,
    /// A collective call on it is under way, or came apart: nobody knows what the other ranks made of it, so that nobody may build on it.
    in_doubt: bool,
}

impl State {
    fn is_inheritable(&self) -> bool {
        self.wanted && !self.in_doubt
    }
}

impl Legacy {
    /// Of a communicator called `id`. `wanted`: whether it is to be left to the next configuration.
    pub(crate) fn new(id: CommId, wanted: bool, revoke: Duration) -> Self {
        Self {
            id,
            revoke,
            state: Mutex::new(State {
                fate: Fate::Open,
                wanted,
                in_doubt: false,
            }),
            moved: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How much longer an abort may take than one without a revocation, or with one by the default.
    pub(crate) fn beyond(&self) -> Duration {
        match self.lock().wanted {
            true => self.revoke.saturating_sub(REVOKE),
            false => Duration::ZERO,
        }
    }

    /// It is not left to anybody: the group ends.
    pub(crate) fn waive(&self) {
        self.lock().wanted = false;
    }

    /// A collective call on it begins. Until it is known to be whole again, it is not left to anybody.
    pub(crate) fn doubt(&self) {
        self.lock().in_doubt = true;
    }

    /// The call succeeded.
    pub(crate) fn trust(&self) {
        self.lock().in_doubt = false;
    }

    /// An idle communicator: true if it is kept, and not to be freed.
    pub(crate) fn keep_idle(&self, comm: &Comm) -> bool {
        let mut state = self.lock();
        let kept = state.is_inheritable() && comm.withdraw();
        state.fate = if kept { Fate::Kept(How::Idle) } else { Fate::Gone };
        self.moved.notify_all();
        kept
    }

    /// A communicator that failed: ends what runs on it. True if it is kept; otherwise it is to be aborted.
    pub(crate) fn keep_revoked(&self, comm: &Arc<Comm>) -> bool {
        let kept = self.lock().is_inheritable() && comm.withdraw() && {
            let (until, this) = (deadline_in(self.revoke), comm.clone());
            let late = || Error::timeout("NCCL did not return from ncclCommRevoke in time");
            let call = move || this.revoke(until);
            let revoked = bounded("ox-nccl-revoke", until, &|| None, &late, call, drop).and_then(|r| r);
            if let Err(error) = &revoked {
                tracing::warn!(%error, "a communicator could not be revoked; it is aborted");
            }
            revoked.is_ok()
        };
        let mut state = self.lock();
        // Waived in the meantime: the caller ends it.
        let kept = kept && state.wanted;
        state.fate = if kept {
            Fate::Kept(How::Revoked)
        } else {
            Fate::Gone
        };
        self.moved.notify_all();
        kept
    }

    /// It is being freed.
    pub(crate) fn lose(&self) {
        self.lock().fate = Fate::Gone;
        self.moved.notify_all();
    }

    /// How it was kept, once that is decided.
    fn how(&self, until: Instant) -> Option<How> {
        let mut state = self.lock();
        while state.fate == Fate::Open {
            let left = time_left(until);
            if left.is_zero() {
                return None;
            }
            state = self
                .moved
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        match state.fate {
            Fate::Kept(how) if state.wanted => Some(how),
            _ => None,
        }
    }
}

/// The communicator of an engine that has ended. Dropping it ends it, on a thread.
pub(crate) struct Parent {
    engine: Option<Arc<Engine>>,
    holding: Holding,
}

impl Parent {
    /// What `engine` has left; `None` if its communicator is gone.
    pub(crate) fn of(engine: Arc<Engine>, deadline: Instant) -> Option<Self> {
        let until = deadline.min(deadline_in(engine.legacy.revoke + FATE));
        match engine.legacy.how(until) {
            Some(how) => {
                let holding = Holding {
                    id: engine.legacy.id,
                    rank: engine.place.rank,
                    world: engine.place.world,
                    how,
                };
                Some(Self {
                    engine: Some(engine),
                    holding,
                })
            }
            None => {
                end(&engine);
                None
            }
        }
    }

    pub(crate) fn holding(&self) -> Holding {
        self.holding
    }

    /// The communicator; `None` never.
    pub(crate) fn comm(&self) -> Option<Arc<Comm>> {
        self.engine.as_ref().map(|e| e.comm.clone())
    }

    /// Nothing was done with it: it is there for the next try.
    pub(crate) fn give_back(mut self) -> Option<Arc<Engine>> {
        self.engine.take()
    }
}

impl Drop for Parent {
    fn drop(&mut self) {
        if let Some(engine) = self.engine.take() {
            end(&engine);
        }
    }
}

/// Nobody inherits from `engine` any more: its communicator is ended on a thread if it was kept, and by its watchdog otherwise.
pub(crate) fn end(engine: &Arc<Engine>) {
    let kept = {
        let mut state = engine.legacy.lock();
        state.wanted = false;
        matches!(state.fate, Fate::Kept(_))
    };
    if kept {
        engine.legacy.lose();
        let this = engine.clone();
        give_up(engine.comm.clone(), move || {
            this.held.clear(this.comm.is_freed());
        });
    }
}

/// What says that a plan was not kept to.
pub(crate) fn not_as_planned(what: &str) -> Error {
    Error::new(
        ErrorKind::Protocol,
        format!("{what} (phase: reuse of the communicator)"),
    )
}
