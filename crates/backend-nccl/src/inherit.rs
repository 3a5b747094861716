//! A configuration's communicator made out of the last one's: rank 0 plans (`reuse`), all ranks try, rank 0 hears whether all parts
//! worked, and only then is it used. If one part did not, all of it is ended and the same `configure` goes on with a new unique id.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use ftcore::{Configuration, Error, ErrorKind, Result, time_left};
use nccl_sys::UniqueId;

use crate::bounded::bounded;
use crate::control::{Meeting, Talk, Word, not_said_by};
use crate::cuda::gpu::Gpu;
use crate::plan::{Base, Plan, Reuse};
use crate::raw::{Comm, Make, Nccl, Wish, give_up};
use crate::reuse::{Parent, not_as_planned};

/// Asked again and again: why not to go on, if there is a reason.
pub(crate) type Why<'a> = &'a dyn Fn() -> Option<Error>;

/// What a group gives to this.
pub(crate) struct Heir<'a> {
    pub(crate) nccl: &'static Nccl,
    pub(crate) gpu: &'a Arc<Gpu>,
    pub(crate) wish: Wish,
    pub(crate) configuration: &'a Configuration,
    pub(crate) cancel: &'a AtomicBool,
    /// Why not to go on.
    pub(crate) stop: Why<'a>,
    /// Makes a unique id, on rank 0.
    pub(crate) unique_id: &'a dyn Fn() -> Result<UniqueId>,
    /// Joins a new communicator; the second says why another rank's part of it has failed.
    pub(crate) initialise: &'a dyn Fn(UniqueId, Why<'_>) -> Result<Comm>,
}

/// What a try has made. Dropping it ends all of it.
#[derive(Default)]
struct Attempt {
    comm: Option<Comm>,
    /// What stood between the parent and the communicator.
    base: Option<Arc<Comm>>,
}

impl Drop for Attempt {
    fn drop(&mut self) {
        self.comm.take().into_iter().for_each(Comm::give_up);
        if let Some(base) = self.base.take() {
            give_up(base, || ());
        }
    }
}

impl Heir<'_> {
    /// The communicator, out of `parent` if everybody's holdings allow that, otherwise new. `parent` is ended in any case.
    pub(crate) fn comm(&self, meeting: &mut Meeting, parent: Option<Parent>) -> Result<Comm> {
        let c = self.configuration;
        let own = parent.as_ref().map(Parent::holding);
        let mut talk = Talk {
            rank: c.rank,
            world: c.world_size,
            streams: &mut meeting.streams,
            cancel: self.cancel,
        };
        let plan = if c.rank == 0 {
            match Plan::of(&meeting.holdings, self.nccl.can_grow()) {
                Plan::Fresh => return self.begin_anew(&mut talk),
                Plan::Reuse(plan) => {
                    talk.tell(&Word::Plan(plan.clone()));
                    plan
                }
            }
        } else {
            match talk.hear(own.as_ref(), c.deadline)? {
                Word::Plan(plan) => plan,
                Word::Fresh(id) => return (self.initialise)(UniqueId(id), &talk.watch()),
                _ => return Err(not_said_by(0, "no plan")),
            }
        };
        // Half of the time, so that the other half is there for a new one.
        let until = Instant::now() + time_left(c.deadline) / 2;
        let mut attempt = Attempt::default();
        let tried = self.carry_out(&plan, parent.as_ref(), &mut attempt, &mut talk, until);
        if let Err(error) = &tried {
            tracing::warn!(rank = c.rank, epoch = c.epoch.0, plan = plan.encode(), %error, "a communicator could not be used again");
        }
        let stands = if c.rank == 0 {
            if tried.is_err() {
                talk.tell(&Word::Stop);
            }
            // The others give up at about the same time as this one.
            let latest = until + c.deadline.saturating_duration_since(until) / 2;
            match talk.answers(latest) {
                Ok(None) if tried.is_ok() => {
                    talk.tell(&Word::Stands);
                    true
                }
                Ok(_) => false,
                Err(error) => {
                    talk.refuse(&error);
                    return Err(error);
                }
            }
        } else {
            talk.answer(tried.as_ref().err());
            loop {
                match talk.hear(own.as_ref(), c.deadline)? {
                    Word::Stands if tried.is_ok() => break true,
                    // Meant for a step that this rank did not come to.
                    Word::Grow(_) | Word::Stop => {}
                    Word::Fresh(id) => {
                        drop((attempt, parent));
                        return (self.initialise)(UniqueId(id), &talk.watch());
                    }
                    _ => return Err(not_said_by(0, "something out of place")),
                }
            }
        };
        if stands && let Some(comm) = attempt.comm.take() {
            // What it was made of is ended here, now that nobody needs it any more.
            return Ok(comm);
        }
        drop((attempt, parent));
        self.begin_anew(&mut talk)
    }

    /// On rank 0: a new id for everybody.
    fn begin_anew(&self, talk: &mut Talk<'_>) -> Result<Comm> {
        match (self.unique_id)() {
            Ok(id) => {
                talk.tell(&Word::Fresh(id.0));
                (self.initialise)(id, &talk.watch())
            }
            Err(error) => {
                talk.refuse(&error);
                Err(error)
            }
        }
    }

    /// This rank's part of the plan.
    fn carry_out(
        &self,
        Reuse { base, holders }: &Reuse,
        parent: Option<&Parent>,
        attempt: &mut Attempt,
        talk: &mut Talk<'_>,
        until: Instant,
    ) -> Result<()> {
        let c = self.configuration;
        let grows = *holders < c.world_size;
        let comm = if c.rank >= *holders {
            self.join(talk, until)?
        } else {
            let old = parent
                .and_then(Parent::comm)
                .ok_or_else(|| not_as_planned("there is no communicator to use again"))?;
            match (self.base(&old, base, talk, until)?, grows) {
                (Some(child), false) => child,
                (None, false) => return Err(not_as_planned("the plan changes nothing")),
                (child, true) => {
                    attempt.base = child.map(Arc::new);
                    let base = attempt.base.as_ref().unwrap_or(&old);
                    self.grow(base, *holders, talk, until)?
                }
            }
        };
        // Kept in any case, so that it is ended if it is not what was wanted.
        self.check(attempt.comm.insert(comm))
    }

    fn base(&self, old: &Arc<Comm>, base: &Base, talk: &Talk<'_>, until: Instant) -> Result<Option<Comm>> {
        let make = match base {
            Base::Same => return Ok(None),
            Base::Split => Make::Split {
                key: self.configuration.rank,
            },
            Base::Shrink(gone) => Make::Shrink {
                without: gone.clone(),
            },
        };
        self.child(old, make, talk, until).map(Some)
    }

    /// The holders' side of a growth.
    fn grow(&self, base: &Arc<Comm>, holders: u32, talk: &mut Talk<'_>, until: Instant) -> Result<Comm> {
        let id = if self.configuration.rank == 0 {
            let (gpu, this) = (self.gpu.clone(), base.clone());
            let call = move || gpu.enter().and_then(|_inside| this.grow_id());
            let id = self.bounded("ncclCommGetUniqueId", talk, until, call, drop)?;
            talk.tell_from(holders, &Word::Grow(id.0));
            Some(id)
        } else {
            None
        };
        let world = self.configuration.world_size;
        self.child(base, Make::Grow { world, id }, talk, until)
    }

    /// A newcomer's side of it.
    fn join(&self, talk: &mut Talk<'_>, until: Instant) -> Result<Comm> {
        let c = self.configuration;
        let id = match talk.hear(None, until)? {
            Word::Grow(id) => UniqueId(id),
            Word::Stop => {
                return Err(Error::new(ErrorKind::Aborted, "it failed elsewhere"));
            }
            _ => return Err(not_said_by(0, "no id to join with")),
        };
        let (nccl, gpu, wish) = (self.nccl, self.gpu.clone(), self.wish.clone());
        let (rank, world) = (c.rank, c.world_size);
        let call = move || {
            gpu.enter()
                .and_then(|_inside| Comm::join_grown(nccl, id, rank, world, &wish))
        };
        let unclaimed = |comm: Result<Comm>| comm.iter().for_each(Comm::abort);
        let comm = self.bounded("ncclCommGrow", talk, until, call, unclaimed)?;
        self.settled(comm, talk, until)
    }

    fn child(&self, parent: &Arc<Comm>, make: Make, talk: &Talk<'_>, until: Instant) -> Result<Comm> {
        let (gpu, this, wish) = (self.gpu.clone(), parent.clone(), self.wish.clone());
        let name = make.name();
        let call = move || gpu.enter().and_then(|_inside| this.make(&make, &wish));
        // A child that comes too late goes with its parent.
        self.bounded(name, talk, until, call, drop)?;
        parent.settle_spared(until, &|| self.why_stop(talk))?;
        self.settled(parent.take_child(name)?, talk, until)
    }

    fn why_stop(&self, talk: &Talk<'_>) -> Option<Error> {
        (self.stop)().or_else(|| talk.interrupted())
    }

    fn settled(&self, comm: Comm, talk: &Talk<'_>, until: Instant) -> Result<Comm> {
        match comm.settle(until, &|| self.why_stop(talk)) {
            Ok(()) => Ok(comm),
            Err(error) => {
                comm.give_up();
                Err(error)
            }
        }
    }

    fn bounded<T: Send + 'static>(
        &self,
        name: &str,
        talk: &Talk<'_>,
        until: Instant,
        call: impl FnOnce() -> Result<T> + Send + 'static,
        unclaimed: impl FnOnce(Result<T>) + Send + 'static,
    ) -> Result<T> {
        let late = || Error::timeout(format!("NCCL did not return from {name} in time"));
        let stop = || self.why_stop(talk);
        bounded("ox-nccl-child", until, &stop, &late, call, unclaimed)?
    }

    /// What came of it must be what was planned: as many ranks, and this one in its place.
    fn check(&self, comm: &Comm) -> Result<()> {
        let c = self.configuration;
        let (count, rank) = (comm.count()?, comm.rank()?.unwrap_or(c.rank));
        if (count, rank) == (c.world_size, c.rank) {
            return Ok(());
        }
        let text = format!(
            "NCCL made this rank {rank} of {count}, where rank {} of {} was wanted",
            c.rank, c.world_size
        );
        Err(Error::new(ErrorKind::Mismatch, text))
    }
}
