//! How a driver waits: it looks again for a while, soon lets others run in between, then arms the bell, looks once more, and sleeps.

use std::time::Instant;

use ftcore::Result;

use crate::buffers::go_on;
use crate::executor::Executor;
use crate::queue::Shared;
use crate::spin_budget::{LEAST, SpinBudget};
use crate::transport::shm::Sleep;

/// After so many looks, some microseconds, the rank that is waited for may itself be waiting for this very core, wherever the kernel
/// has put both on one,
const SHARED_FROM: u32 = 128;
/// and is let run every so many looks. Alone on its core a rank loses a system call by that.
const SHARED_EVERY: u32 = 16;
/// A look at a socket takes as long as that many at memory.
const SYSTEM_CALL: u32 = 15;
/// What is driven by one thread at a time: the executor, or the channels.
pub(crate) trait Driven {
    fn spin_budget(&mut self) -> &mut SpinBudget;
    /// Takes in what the engine's thread has learnt. True if there was something: no sleep before it was looked at.
    fn look(&mut self, shared: &Shared) -> bool;
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

    fn look(&mut self, shared: &Shared) -> bool {
        Executor::look(self, shared)
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
        if driven.look(shared) {
            // It came with a ring, which may have been before the bell was armed: the caller looks at it first.
            return Ok(());
        }
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
    use ftcore::Epoch;

    use super::*;
    use crate::execution::Place;
    use crate::peer::Fate;
    use crate::schedule::Hosts;
    use crate::transport::shm::Bells;

    fn of_two() -> std::sync::Arc<Shared> {
        let place = Place {
            rank: 0,
            world: 2,
            epoch: Epoch(1),
            one_host: true,
        };
        let bells = Bells::private(false).unwrap();
        Shared::new(place, Hosts::default(), bells, None, Vec::new(), true).unwrap()
    }

    /// Nothing moves, and nothing is there to look at.
    struct Still(SpinBudget);

    impl Driven for Still {
        fn spin_budget(&mut self) -> &mut SpinBudget {
            &mut self.0
        }
        fn look(&mut self, _: &Shared) -> bool {
            false
        }
        fn glance(&mut self) -> u32 {
            0
        }
        fn arm(&self, _: &Shared) {}
        fn disarm(&self, _: &Shared) {}
        fn sleep(&mut self, _: &Shared, _: Instant) -> Result<()> {
            panic!("it sleeps although something moves all the time");
        }
    }

    /// A peer dies in the moment before the bell is armed, and the engine's thread has rung by then.
    struct Late(SpinBudget);

    impl Driven for Late {
        fn spin_budget(&mut self) -> &mut SpinBudget {
            &mut self.0
        }
        fn look(&mut self, shared: &Shared) -> bool {
            shared.heed()
        }
        fn glance(&mut self) -> u32 {
            0
        }
        fn arm(&self, shared: &Shared) {
            let fate = Fate {
                left: false,
                text: "closed the connection".to_owned(),
            };
            shared.tell_fate(1, fate);
            shared.bell().arm(Sleep::Word);
        }
        fn disarm(&self, shared: &Shared) {
            shared.bell().disarm();
        }
        fn sleep(&mut self, _: &Shared, _: Instant) -> Result<()> {
            panic!("it sleeps on what its caller has not seen");
        }
    }

    #[test]
    fn what_was_rung_for_before_the_bell_was_armed_is_seen_before_a_sleep() {
        let shared = of_two();
        let (mut waiter, mut late) = (Waiter::default(), Late(SpinBudget::of(1, true)));
        let mut waits = 0;
        while !waiter.armed {
            waits += 1;
            assert!(waits < 100_000, "it is never armed");
            waiter.wait(&mut late, &shared, |_| Instant::now()).unwrap();
        }
        // The caller looked at the rings in between, and hears that the peer has gone only now.
        waiter.wait(&mut late, &shared, |_| Instant::now()).unwrap();
    }

    #[test]
    fn a_driver_asks_the_clock_though_something_moves_between_any_two_waits() {
        let shared = of_two();
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
