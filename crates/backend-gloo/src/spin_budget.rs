//! How long a driver looks again before it sleeps, by what that has paid so far.

use std::time::Duration;

/// How often a driver looks again before it sleeps, at most: some tens of microseconds, more than a chunk takes.
const SPIN_BUDGET: u32 = 2000;
/// At least, where spinning did not pay: longer than a wake-up takes, or two ranks that have begun to sleep keep each other at it.
pub(crate) const LEAST: u32 = 1000;
/// One wait in so many tries the full spin_budget again.
const TRY_AGAIN: u32 = 64;
/// How often a driver lets others run before it sleeps, where there are more ranks than cores: the rank it waits for is likely
/// to be the next on this core, and a switch costs less than a sleep and a wake-up.
const YIELDS: u32 = 20;
/// How long a driver of sockets looks again before it sleeps, at most: a few wake-ups. A rank that still looks answers at once when
/// its peer comes back; two that sleep pay for a wake-up in every round.
const LINGER: Duration = Duration::from_micros(250);
/// At least, where that did not pay: longer than one wake-up takes.
const LEAST_LINGER: Duration = Duration::from_micros(80);

/// How long looking again has paid so far; kept from one operation to the next.
#[derive(Debug)]
pub(crate) struct SpinBudget {
    most: u32,
    pub(crate) now: u32,
    slept: u32,
    pub(crate) yields: u32,
    /// For sockets; zero where all ranks share memory.
    pub(crate) linger: Duration,
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

    pub(crate) fn paid(&mut self) {
        self.now = (self.now * 2).min(self.most);
    }

    pub(crate) fn lingering_paid(&mut self) {
        self.linger = (self.linger * 2).min(self.most_linger);
    }

    pub(crate) fn did_not_pay(&mut self) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_spins_where_there_are_cores_for_all_or_each_has_its_own() {
        assert!(!SpinBudget::of(usize::MAX, false).spins());
        assert!(SpinBudget::of(usize::MAX, true).spins());
        assert!(SpinBudget::of(0, false).spins());
    }
}
