//! Random walks of whole jobs over the rounds alone: lost votes, quorums that do not come about, heals, deaths, and runs that are stopped and go
//! on. A replica here is its [`Schedule`] and what the engine keeps beside them.

use ftcore::Step;
use proptest::prelude::*;

use super::{Due, RoundRules, Schedule};

/// splitmix64.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % n
    }
}

struct Replica {
    rounds: Schedule,
    has_begun: bool,
    is_closed: bool,
    step: Step,
    /// The step of the gradient that is kept.
    kept: Option<Step>,
    /// Steps whose result was applied here.
    applied: Vec<Step>,
    /// Inner steps since the round began to overlap with them, and whether another state came in between.
    made: u64,
    has_jumped: bool,
    /// It was in a repeated attempt when it was sent last.
    again: bool,
}

impl Replica {
    fn new(config: &RoundRules) -> Self {
        let mut rounds = Schedule::new(*config);
        rounds.begin().unwrap();
        Self {
            rounds,
            has_begun: false,
            is_closed: false,
            step: Step(0),
            kept: None,
            applied: Vec::new(),
            made: 0,
            has_jumped: false,
            again: false,
        }
    }

    /// Stopped and made again from what a checkpoint holds.
    fn restart(&mut self, config: &RoundRules) {
        let mut rounds = Schedule::new(*config);
        rounds.may_restore().unwrap();
        rounds.replaced(self.rounds.own_count());
        rounds.restored(self.step, self.kept.is_some());
        rounds.begin().unwrap();
        (self.rounds, self.has_begun, self.again) = (rounds, false, false);
    }

    /// Inner steps until something is due. False if there is nothing to do any more.
    fn run(&mut self, config: &RoundRules) -> bool {
        loop {
            if self.rounds.due().is_some() {
                return true;
            }
            if self.is_closed {
                return false;
            }
            if !self.has_begun {
                self.rounds.begun();
                self.has_begun = true;
                continue;
            }
            if config.last.is_some_and(|last| self.step > last) {
                assert!(
                    self.rounds.inner_step().is_err(),
                    "an inner step after the last round"
                );
                self.rounds.close().unwrap();
                self.is_closed = self.rounds.due().is_none();
                continue;
            }
            self.rounds.inner_step().unwrap();
            self.made += 1;
            assert!(self.made <= config.round_steps, "nothing was ever due");
            if config.eager && self.rounds.due() == Some(Due::Send) {
                assert!(self.has_jumped || self.made == config.round_steps);
                (self.made, self.has_jumped) = (0, false);
            }
        }
    }

    fn join(&mut self, config: &RoundRules, newest: Step, source: u64) {
        let healed = self.step < newest;
        if healed {
            (self.step, self.kept) = (newest, None);
            (self.made, self.has_jumped) = (0, true);
            // The others won the vote that it lost.
            self.again = false;
            self.rounds.replaced(source);
        }
        self.rounds.joined(newest);
        let has_data = config.last.is_none_or(|last| newest <= last) && newest > Step(0);
        assert_eq!(self.rounds.has_data(newest), has_data);
        if let Some(of) = self.kept {
            assert_eq!(of, newest, "a gradient was kept beyond its round");
        }
        self.kept = has_data.then_some(newest);
        self.rounds.sent();
        if !has_data || self.again {
            assert_eq!(
                self.rounds.due(),
                Some(Due::Finish),
                "the others wait for no other's inner steps"
            );
        } else if healed && source < config.round_steps && !(config.eager && config.last == Some(newest)) {
            assert_eq!(
                self.rounds.due(),
                None,
                "a round that the source makes inner steps in"
            );
        }
    }

    fn vote(&mut self, config: &RoundRules, yes: bool) {
        self.again = !yes;
        if !yes {
            self.rounds.lost();
            assert_eq!(
                self.rounds.due(),
                Some(Due::Send),
                "a lost round is done again at once"
            );
            return;
        }
        assert!(
            self.applied.last().is_none_or(|last| *last < self.step),
            "a round was applied twice"
        );
        let is_last = config.last == Some(self.step);
        let had_data = self.kept.is_some();
        if had_data {
            let full = self.made == config.round_steps;
            assert!(
                full || self.has_jumped || config.eager && is_last,
                "{} inner steps",
                self.made
            );
        }
        self.kept = None;
        self.applied.push(self.step);
        self.step += 1;
        (self.made, self.has_jumped) = (0, false);
        self.rounds.committed();
        let follows = config.eager && had_data && !is_last;
        assert!(
            !follows || self.rounds.due() == Some(Due::Send),
            "an eager round begins where the last one ends"
        );
        if config.last.is_some_and(|last| self.step > last + 1) {
            self.is_closed = self.rounds.due().is_none() && self.rounds.close().is_ok();
        }
    }
}

fn walk(config: &RoundRules, replicas: u64, seed: u64) {
    let mut dice = Dice(seed);
    let mut all: Vec<Replica> = (0..replicas).map(|_| Replica::new(config)).collect();
    for tick in 0..400 {
        let faults = tick < 60;
        // All come to where they need the others: votes are taken until each waits for a quorum.
        loop {
            let mut voted = false;
            for r in &mut all {
                if r.run(config) && r.rounds.due() == Some(Due::Finish) {
                    let yes = !(faults && dice.below(4) == 0);
                    r.vote(config, yes);
                    voted = true;
                }
            }
            if !voted {
                break;
            }
        }
        if all.iter().all(|r| r.is_closed) {
            let last = config.last.unwrap();
            assert!(all.iter().all(|r| r.step == last + 2), "all end at the same step");
            return;
        }
        if faults && dice.below(6) == 0 {
            // The quorum does not come about: nothing changes.
            let before: Vec<Schedule> = all.iter().map(|r| r.rounds).collect();
            assert!(before.iter().all(|r| r.due() != Some(Due::Finish)));
            if dice.below(2) == 0 {
                let all_running = all.iter().all(|r| r.has_begun && !r.is_closed);
                if all_running && all.iter().all(|r| r.step <= config.last.unwrap()) {
                    all.iter_mut().for_each(|r| r.restart(config));
                    assert!(all.iter().all(|r| r.rounds.due() == Some(Due::Send)));
                }
            }
            continue;
        }
        let newest = all.iter().filter(|r| !r.is_closed).map(|r| r.step).max().unwrap();
        let holders = all.iter().filter(|r| r.step == newest).count();
        if faults && dice.below(8) == 0 && all.iter().all(|r| !r.is_closed) {
            let victim = usize::try_from(dice.below(replicas)).unwrap();
            if all[victim].step < newest || holders > 1 {
                all[victim] = Replica::new(config);
            }
        }
        let source = all.iter().find(|r| !r.is_closed && r.step == newest).unwrap();
        let count = source.rounds.count();
        for r in all.iter_mut().filter(|r| !r.is_closed) {
            r.join(config, newest, count);
        }
    }
    panic!("the run did not end");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]
    #[test]
    fn whatever_fails_each_round_is_applied_once_with_the_gradient_of_its_own_step_and_all_end_together(
        (per, rounds, replicas) in (1u64..5, 1i64..9, 1u64..5),
        (delay, eager, seed) in (0u64..4, any::<bool>(), any::<u64>()),
    ) {
        let config = RoundRules {
            round_steps: per,
            delay: if eager { 0 } else { delay % per },
            eager,
            last: Some(Step(rounds)),
        };
        walk(&config, replicas, seed);
    }
}
