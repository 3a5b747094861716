//! Ranks that live through many cases, for backends whose start takes far longer than a case.
//!
//! The cases of one world that leave their group as they found it (`Case::shares`) run on one set of ranks and one group, one
//! after the other; every other case has its own. A set that a case has failed on, killed or left a failed group in is thrown
//! away, and the next case gets a new one: so each failure is reported under the name of its own case.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ftcore::{Device, InMemoryStore, PrefixStore, Store, deadline_in};

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
    members: Vec<Member>,
    served: u64,
}

impl Threads {
    pub(crate) fn start(world: u32, first: &Device, make: &MakeOn) -> Outcome<Self> {
        let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
        let members = Mutex::new(Vec::new());
        side_by_side(0..world, |rank| {
            let member = Member::join(rank, world, first, make, store.clone())?;
            let mut members = members.lock().unwrap_or_else(PoisonError::into_inner);
            members.push(member);
            Ok(())
        })?;
        Ok(Self {
            world,
            members: members.into_inner().unwrap_or_else(PoisonError::into_inner),
            served: 0,
        })
    }
}

impl Ranks for Threads {
    fn world(&self) -> u32 {
        self.world
    }

    fn run(&mut self, case: &Case) -> Outcome {
        self.served += 1;
        let number = self.served;
        side_by_side(self.members.iter(), |member| member.run(case, number))
    }

    fn end(self) -> Outcome {
        side_by_side(self.members.iter(), Member::leave)
    }
}

/// Something that is done for a rank on a thread of its own.
pub(crate) trait OfRank: Send {
    fn number(&self) -> u32;
}

impl OfRank for u32 {
    fn number(&self) -> u32 {
        *self
    }
}

impl OfRank for &Member {
    fn number(&self) -> u32 {
        self.rank.rank
    }
}

/// Runs `body` for all ranks at once; the failures of all of them in one text.
pub(crate) fn side_by_side<R: OfRank>(
    ranks: impl Iterator<Item = R>,
    body: impl Fn(R) -> Outcome + Sync,
) -> Outcome {
    let failures = std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = ranks
            .map(|rank| (rank.number(), scope.spawn(move || body(rank))))
            .collect();
        threads
            .into_iter()
            .filter_map(|(rank, thread)| match thread.join() {
                Ok(Ok(())) => None,
                Ok(Err(failure)) => Some(format!("rank {rank}: {failure}")),
                Err(_) => Some(format!("rank {rank} panicked")),
            })
            .collect()
    });
    verdict(failures)
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
