//! How a driver waits: it looks again for a while, soon lets others run in between, then arms the bell, looks once more, and sleeps.

use std::time::{Duration, Instant};

use ftcore::Result;

use crate::buffers::go_on;
use crate::executor::Executor;
use crate::queue::Shared;
use crate::transport::shm::Sleep;

/// How often a driver looks again before it sleeps, at most: some tens of microseconds, more than a chunk takes.
pub(crate) const SPIN_BUDGET: u32 = 2000;
/// At least, where spinning did not pay: longer than a wake-up takes, or two ranks that have begun to sleep keep each other at it.
const LEAST: u32 = 1000;
/// After so many looks, some microseconds, the rank that is waited for may itself be waiting for this very core, wherever the kernel
/// has put both on one,
const SHARED_FROM: u32 = 128;
/// and is let run every so many looks. Alone on its core a rank loses a system call by that.
const SHARED_EVERY: u32 = 16;
/// One wait in so many tries the full spin_budget again.
const TRY_AGAIN: u32 = 64;
/// How often a driver lets others run before it sleeps, where there are more ranks than cores: the rank it waits for is likely
/// to be the next on this core, and a switch costs less than a sleep and a wake-up.
const YIELDS: u32 = 20;
/// A look at a socket takes as long as that many at memory.
const SYSTEM_CALL: u32 = 15;
/// How long a driver of sockets looks again before it sleeps, at most: a few wake-ups. A rank that still looks answers at once when
/// its peer comes back; two that sleep pay for a wake-up in every round.
const LINGER: Duration = Duration::from_micros(250);
/// At least, where that did not pay: longer than one wake-up takes.
const LEAST_LINGER: Duration = Duration::from_micros(80);

/// How long looking again has paid so far; kept from one operation to the next.
#[derive(Debug)]
pub(crate) struct SpinBudget {
    most: u32,
    now: u32,
    slept: u32,
    yields: u32,
    /// For sockets; zero where all ranks share memory.
    linger: Duration,
    most_linger: Duration,
}

impl SpinBudget {
    /// `spin` is false where a rank that spins would keep another from what it waits for.
    fn new(spin: bool) -> Self {
        let most = if spin { SPIN_BUDGET } else { 0 };
        Self {
            most,
            now: most,
            slept: 0,
            yields: if spin { 0 } else { YIELDS },
            linger: Duration::ZERO,
            most_linger: Duration::ZERO,
        }
    }

    /// For a rank that waits for that many ranks of its own host. With more ranks than cores a rank that spins keeps another from
    /// what it waits for; so it does where it has one core and others have the same, but not where they are `apart`, as launchers bind them.
    pub(crate) fn of(local: usize, apart: bool) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self::new(apart || local < cores)
    }

    /// For a rank that waits for sockets, too: a look there is a system call anyhow, so others are let run between any two. Alone on
    /// its core it loses nothing by that, and ranks that share one, whatever address they have, change over at once.
    pub(crate) fn with_sockets() -> Self {
        Self {
            yields: 0,
            linger: LINGER,
            most_linger: LINGER,
            ..Self::new(false)
        }
    }

    /// Lets others run that often and never spins.
    pub(crate) fn yielding(yields: u32) -> Self {
        Self {
            yields,
            ..Self::new(false)
        }
    }

    /// True where looking again keeps no thread from what is waited for.
    pub(crate) fn spins(&self) -> bool {
        self.most > 0
    }

    fn paid(&mut self) {
        self.now = (self.now * 2).min(self.most);
    }

    fn lingering_paid(&mut self) {
        self.linger = (self.linger * 2).min(self.most_linger);
    }

    fn did_not_pay(&mut self) {
        self.slept = self.slept.wrapping_add(1);
        let again = self.slept.is_multiple_of(TRY_AGAIN);
        self.now = if again {
            self.most
        } else {
            (self.now / 2).max(LEAST.min(self.most))
        };
        self.linger = if again {
            self.most_linger
        } else {
            (self.linger / 2).max(LEAST_LINGER.min(self.most_linger))
        };
    }
}

/// What is driven by one thread at a time: the executor, or the channels.
pub(crate) trait Driven {
    fn spin_budget(&mut self) -> &mut SpinBudget;
    /// Takes in what the engine's thread has learnt.
    fn look(&mut self, shared: &Shared);
    /// Between two looks without a sleep. How many looks at memory it took.
    fn glance(&mut self) -> u32;
    /// From now on others ring.
    fn arm(&self, shared: &Shared);
    /// No sleep after all.
    fn disarm(&self, shared: &Shared);
    /// Sleeps until something may have happened, or `until`. The bell is armed and everything was looked at since.
    fn sleep(&mut self, shared: &Shared, until: Instant) -> Result<()>;
}

impl Driven for Executor {
    fn spin_budget(&mut self) -> &mut SpinBudget {
        &mut self.spin_budget
    }

    fn look(&mut self, shared: &Shared) {
        Executor::look(self, shared);
    }

    fn glance(&mut self) -> u32 {
        if self.is_local() {
            std::hint::spin_loop();
            return 0;
        }
        self.try_sockets();
        SYSTEM_CALL
    }

    fn arm(&self, shared: &Shared) {
        let how = if self.is_local() {
            Sleep::Word
        } else {
            Sleep::Descriptor
        };
        shared.bell().arm(how);
    }

    fn disarm(&self, shared: &Shared) {
        shared.bell().disarm();
    }

    fn sleep(&mut self, shared: &Shared, until: Instant) -> Result<()> {
        Executor::sleep(self, shared, until)
    }
}

/// A driver that looks again without a sleep asks the clock every so many looks: asking costs as much as looking does, and a peer that sends a little
/// now and then must not keep it from the deadline.
const CLOCK_EVERY: u32 = 64;

/// The wait of one driver. Call [`moved`](Self::moved) after progress and [`wait`](Self::wait) without.
#[derive(Debug, Default)]
pub(crate) struct Waiter {
    looked: u32,
    /// How often it waited, whatever moved in between.
    waits: u32,
    armed: bool,
    yielded: u32,
    /// Since when it lets others run between two looks at sockets.
    lingers: Option<Instant>,
    slow: bool,
}

impl Waiter {
    /// Something moved: the next wait begins anew.
    pub(crate) fn moved<D: Driven>(&mut self, driven: &mut D, shared: &Shared) {
        if self.looked == 0 {
            return;
        }
        if !self.slow && self.looked > LEAST {
            driven.spin_budget().paid();
        }
        if self.lingers.take().is_some() && !self.slow {
            driven.spin_budget().lingering_paid();
        }
        self.looked = 0;
        self.yielded = 0;
        self.slow = false;
        if std::mem::take(&mut self.armed) {
            driven.disarm(shared);
        }
    }

    /// True after a sleep, and while the bell is armed: time to look at everything.
    pub(crate) fn is_slow(&self) -> bool {
        self.slow
    }

    /// True if deadlines have to be looked at before the next wait: whenever that may sleep, and now and then.
    pub(crate) fn asks_the_clock(&self) -> bool {
        self.slow || self.waits % CLOCK_EVERY == CLOCK_EVERY - 1
    }

    /// Nothing moved. Returns when it is worth looking again; where it sleeps, by `until` at the latest.
    ///
    /// Errors: `Aborted` once the engine's thread wants back what is driven.
    pub(crate) fn wait<D: Driven>(
        &mut self,
        driven: &mut D,
        shared: &Shared,
        until: impl FnOnce(&D) -> Instant,
    ) -> Result<()> {
        self.waits = self.waits.wrapping_add(1);
        go_on(shared.interrupt())?;
        driven.look(shared);
        self.looked = self.looked.saturating_add(1);
        if self.looked < driven.spin_budget().now {
            self.looked = self.looked.saturating_add(driven.glance());
            if self.looked > SHARED_FROM && self.looked.is_multiple_of(SHARED_EVERY) {
                rustix::thread::sched_yield();
            }
            return Ok(());
        }
        if self.yielded < driven.spin_budget().yields {
            self.yielded += 1;
            rustix::thread::sched_yield();
            return Ok(());
        }
        let linger = driven.spin_budget().linger;
        if !self.slow && !linger.is_zero() {
            let began = *self.lingers.get_or_insert_with(Instant::now);
            if began.elapsed() < linger {
                // The rank that is waited for may need this core; alone on it this returns at once.
                rustix::thread::sched_yield();
                driven.glance();
                return Ok(());
            }
        }
        if !self.slow {
            self.slow = true;
            driven.spin_budget().did_not_pay();
        }
        if !self.armed {
            self.armed = true;
            driven.arm(shared);
            return Ok(());
        }
        self.armed = false;
        let until = until(driven);
        driven.sleep(shared, until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::execution::Place;
    use crate::schedule::Hosts;
    use crate::transport::shm::Bells;

    #[test]
    fn a_rank_spins_where_there_are_cores_for_all_or_each_has_its_own() {
        assert!(!SpinBudget::of(usize::MAX, false).spins());
        assert!(SpinBudget::of(usize::MAX, true).spins());
        assert!(SpinBudget::of(0, false).spins());
    }

    /// Nothing moves, and nothing is there to look at.
    struct Still(SpinBudget);

    impl Driven for Still {
        fn spin_budget(&mut self) -> &mut SpinBudget {
            &mut self.0
        }
        fn look(&mut self, _: &Shared) {}
        fn glance(&mut self) -> u32 {
            0
        }
        fn arm(&self, _: &Shared) {}
        fn disarm(&self, _: &Shared) {}
        fn sleep(&mut self, _: &Shared, _: Instant) -> Result<()> {
            panic!("it sleeps although something moves all the time");
        }
    }

    #[test]
    fn a_driver_asks_the_clock_though_something_moves_between_any_two_waits() {
        let place = Place {
            rank: 0,
            world: 2,
            epoch: 1,
            one_host: true,
        };
        let bells = Bells::private(false).unwrap();
        let shared = Shared::new(place, Hosts::default(), bells, None, Vec::new(), true).unwrap();
        let (mut waiter, mut still) = (Waiter::default(), Still(SpinBudget::of(1, true)));
        let mut asked = 0;
        for _ in 0..1000 {
            asked += u32::from(waiter.asks_the_clock());
            waiter.wait(&mut still, &shared, |_| Instant::now()).unwrap();
            waiter.moved(&mut still, &shared);
        }
        assert!((5..100).contains(&asked), "{asked} times");
    }
}
