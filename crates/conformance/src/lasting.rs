//! Ranks that live through many cases, for backends whose start takes far longer than a case.
//!
//! The cases of one world that leave their group as they found it (`Case::shares`) run on one set of ranks and one group, one
//! after the other; every other case has its own. A set that a case has failed on, killed or left a failed group in is thrown
//! away, and the next case gets a new one: so each failure is reported under the name of its own case.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ftcore::{Device, InMemoryStore, PrefixStore, Store, deadline_in, time_left};

use crate::case::{MakeOn, device_of};
use crate::failure::verdict;
use crate::lent::Lasting;
use crate::{Case, Failure, Outcome, Rank};

/// What a set of ranks gets to end in good order.
const TO_LEAVE: Duration = Duration::from_secs(20);

/// The ranks of one world and their group.
pub(crate) trait Ranks: Sized {
    /// How many.
    fn world(&self) -> u32;
    /// Runs a case on all of them; after a failure they are not asked again.
    fn run(&mut self, case: &Case) -> Outcome;
    /// Ends them in good order.
    fn end(self) -> Outcome;
}

/// The one set of ranks that lives now: idle ones of other worlds would take memory and, with libraries that spin, cores.
pub(crate) struct Place<R> {
    state: Mutex<State<R>>,
    changed: Condvar,
}

struct State<R> {
    ranks: Option<R>,
    busy: bool,
    /// How many cases of each world wait: the ranks that are there serve all of theirs before they go.
    waiting: BTreeMap<u32, usize>,
}

impl<R: Ranks> Place<R> {
    pub(crate) fn new() -> Self {
        Self {
            state: Mutex::new(State {
                ranks: None,
                busy: false,
                waiting: BTreeMap::new(),
            }),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<R>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a case that shares its group, on ranks that `start` makes if those of this world are not there.
    pub(crate) fn run(&self, case: &Case, start: impl FnOnce() -> Outcome<R>) -> Outcome {
        let mut ranks = self.take(case.world);
        if let Some(others) = ranks.take_if(|r| r.world() != case.world)
            && let Err(failure) = others.end()
        {
            // Not this case's fault, and no other thread is there to report it.
            self.give_back(None);
            return Err(failure);
        }
        let outcome = match ranks {
            Some(ranks) => Ok(ranks),
            None => start(),
        }
        .and_then(|mut ranks| ranks.run(case).map(|()| ranks));
        match outcome {
            Ok(ranks) => {
                self.give_back(Some(ranks));
                Ok(())
            }
            Err(failure) => {
                self.give_back(None);
                Err(failure)
            }
        }
    }

    fn take(&self, world: u32) -> Option<R> {
        let mut state = self.lock();
        *state.waiting.entry(world).or_default() += 1;
        loop {
            let wanted_by_others = state
                .ranks
                .as_ref()
                .is_some_and(|r| r.world() != world && state.waiting.get(&r.world()).is_some_and(|n| *n > 0));
            if !state.busy && !wanted_by_others {
                break;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if let Some(n) = state.waiting.get_mut(&world) {
            *n -= 1;
        }
        state.busy = true;
        state.ranks.take()
    }

    fn give_back(&self, ranks: Option<R>) {
        let mut state = self.lock();
        state.busy = false;
        state.ranks = ranks;
        drop(state);
        self.changed.notify_all();
    }

    /// Ends the ranks if no case wants them. Called by cases that have their own.
    pub(crate) fn clear(&self) -> Outcome {
        let idle = {
            let mut state = self.lock();
            if state.busy || state.waiting.values().any(|n| *n > 0) {
                return Ok(());
            }
            state.ranks.take()
        };
        idle.map_or(Ok(()), Ranks::end)
    }
}

/// One rank's group at epoch 1, and the cases that it served.
pub(crate) struct Member {
    rank: Rank,
    store: Arc<dyn Store>,
    group: Arc<Lasting>,
}

impl Member {
    /// Configures rank `rank` of `world` through `store`.
    pub(crate) fn join(
        rank: u32,
        world: u32,
        first: &Device,
        make: &MakeOn,
        store: Arc<dyn Store>,
    ) -> Outcome<Self> {
        let rank = Rank {
            rank,
            world,
            store: Arc::new(PrefixStore::new(store.clone(), "ranks")),
            device: device_of(first, rank)?,
            make: make.clone(),
            lent: None,
        };
        let group = Arc::new(Lasting::new(rank.group()?));
        Ok(Self { rank, store, group })
    }

    /// Runs one case; `number` is the same on all ranks.
    pub(crate) fn run(&self, case: &Case, number: u64) -> Outcome {
        let rank = Rank {
            store: Arc::new(PrefixStore::new(self.store.clone(), format!("case/{number}"))),
            lent: Some(self.group.clone()),
            device: self.rank.device.clone(),
            make: self.rank.make.clone(),
            ..self.rank
        };
        case.run(&rank)?;
        self.group.spoiled().map_or(Ok(()), |why| Err(Failure::new(why)))
    }

    /// Leaves in good order.
    pub(crate) fn leave(&self) -> Outcome {
        Ok(self.group.shutdown(deadline_in(TO_LEAVE))?)
    }
}

/// Ranks as threads: only their groups live on.
pub(crate) struct Threads {
    world: u32,
    members: Vec<Arc<Member>>,
    served: u64,
    /// For one case.
    limit: Duration,
}

impl Threads {
    pub(crate) fn start(world: u32, first: &Device, make: &MakeOn, limit: Duration) -> Outcome<Self> {
        let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
        let (first, make) = (first.clone(), make.clone());
        let (tell, joined) = channel();
        side_by_side(limit, 0..world, move |rank| {
            let member = Member::join(rank, world, &first, &make, store.clone())?;
            // Who does not listen any more has given up.
            let _ = tell.send(Arc::new(member));
            Ok(())
        })?;
        Ok(Self {
            world,
            members: joined.try_iter().collect(),
            served: 0,
            limit,
        })
    }
}

impl Ranks for Threads {
    fn world(&self) -> u32 {
        self.world
    }

    fn run(&mut self, case: &Case) -> Outcome {
        self.served += 1;
        let (number, case) = (self.served, case.clone());
        side_by_side(self.limit, self.members.iter().cloned(), move |member| {
            member.run(&case, number)
        })
    }

    fn end(self) -> Outcome {
        side_by_side(self.limit, self.members, |member| member.leave())
    }
}

/// Something that is done for a rank on a thread of its own.
pub(crate) trait OfRank: Send + 'static {
    fn number(&self) -> u32;
}

impl OfRank for u32 {
    fn number(&self) -> u32 {
        *self
    }
}

impl OfRank for Arc<Member> {
    fn number(&self) -> u32 {
        self.rank.rank
    }
}

/// Runs `body` for all ranks at once; the failures of all of them in one text. One that has not ended within `limit` has failed, and its thread is
/// left to itself.
pub(crate) fn side_by_side<R: OfRank>(
    limit: Duration,
    ranks: impl IntoIterator<Item = R>,
    body: impl Fn(R) -> Outcome + Send + Sync + 'static,
) -> Outcome {
    let until = deadline_in(limit);
    let body = Arc::new(body);
    let (tell, told) = channel();
    let mut running = BTreeSet::new();
    let mut failures = BTreeMap::new();
    for rank in ranks {
        let (number, body, tell) = (rank.number(), body.clone(), tell.clone());
        let run = move || {
            let ended = catch_unwind(AssertUnwindSafe(|| body(rank)));
            let ended = ended.unwrap_or_else(|_| Err(Failure::new("it panicked")));
            // Who does not listen any more has given up.
            let _ = tell.send((number, ended));
        };
        match std::thread::Builder::new()
            .name(format!("ox-rank-{number}"))
            .spawn(run)
        {
            Ok(_) => drop(running.insert(number)),
            Err(e) => drop(failures.insert(number, Failure::new(format!("no thread: {e}")))),
        }
    }
    while !running.is_empty()
        && let Ok((number, ended)) = told.recv_timeout(time_left(until))
    {
        running.remove(&number);
        failures.extend(ended.err().map(|failure| (number, failure)));
    }
    let late = || Failure::new(format!("it did not end within {} s", limit.as_secs()));
    failures.extend(running.into_iter().map(|number| (number, late())));
    let text = |(rank, failure)| format!("rank {rank}: {failure}");
    verdict(failures.into_iter().map(text).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fake {
        world: u32,
        started: u32,
    }

    impl Ranks for Fake {
        fn world(&self) -> u32 {
            self.world
        }
        fn run(&mut self, case: &Case) -> Outcome {
            ensure!(case.name.starts_with("good"), "rank 1: set {}", self.started);
            Ok(())
        }
        fn end(self) -> Outcome {
            ensure!(self.world != 4, "the ranks of world 4 did not end");
            Ok(())
        }
    }

    fn case(name: &str, world: u32) -> Case {
        Case::new(name, world, &[], |_| Ok(())).sharing()
    }

    fn run(place: &Place<Fake>, started: &mut u32, name: &str, world: u32) -> Outcome {
        place.run(&case(name, world), || {
            *started += 1;
            Ok(Fake {
                world,
                started: *started,
            })
        })
    }

    #[test]
    fn one_set_of_ranks_serves_a_world_and_a_failure_costs_one_set() -> Outcome {
        let (place, mut started) = (Place::new(), 0);
        for _ in 0..5 {
            run(&place, &mut started, "good", 2)?;
        }
        assert_eq!(started, 1);
        let failure = run(&place, &mut started, "bad", 2).unwrap_err();
        assert_eq!(failure.to_string(), "rank 1: set 1");
        run(&place, &mut started, "good", 2)?;
        assert_eq!(started, 2);
        run(&place, &mut started, "good", 3)?;
        run(&place, &mut started, "good", 2)?;
        assert_eq!(started, 4);
        place.clear()?;
        run(&place, &mut started, "good", 2)?;
        assert_eq!(started, 5);
        Ok(())
    }

    #[test]
    fn a_rank_that_panics_is_told_of_by_its_number() {
        let failure = side_by_side(Duration::from_secs(60), 0..3, |rank| {
            assert_ne!(rank, 2, "on purpose");
            Ok(())
        });
        assert_eq!(failure.unwrap_err().to_string(), "rank 2: it panicked");
    }

    #[test]
    fn a_set_of_ranks_of_which_one_does_not_end_is_thrown_away() -> Outcome {
        let stuck = Case::new("stuck", 2, &[], |rank| {
            if rank.rank == 1 {
                loop {
                    std::thread::park();
                }
            }
            Ok(())
        });
        let make: MakeOn =
            Arc::new(|_, options| Ok(Box::new(backend_gloo::GlooGroup::new("stuck", options)?)));
        let (place, started) = (Place::new(), std::cell::Cell::new(0));
        let run = |case: &Case, limit| {
            place.run(case, || {
                started.set(started.get() + 1);
                let ranks = Threads::start(2, &Device::CPU, &make, Duration::from_secs(60))?;
                Ok(Threads { limit, ..ranks })
            })
        };
        let failure = run(&stuck.sharing(), Duration::from_millis(50)).unwrap_err();
        let text = failure.to_string();
        assert!(text.contains("rank 1: it did not end within 0 s"), "{text}");
        run(&case("good", 2), Duration::from_secs(60))?;
        assert_eq!(started.get(), 2);
        Ok(())
    }

    #[test]
    fn ranks_that_do_not_end_are_reported_once() -> Outcome {
        let (place, mut started) = (Place::new(), 0);
        run(&place, &mut started, "good", 4)?;
        let failure = run(&place, &mut started, "good", 2).unwrap_err();
        assert!(failure.to_string().contains("world 4"), "{failure}");
        run(&place, &mut started, "good", 2)?;
        run(&place, &mut started, "good", 4)?;
        assert!(place.clear().is_err());
        place.clear()
    }
}
