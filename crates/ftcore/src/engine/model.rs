//! Random walks over the machine's inputs, with a record of what a driver and the callers see.
//!
//! After every input the record is compared with what the engine promises: INV-2 (a pending operation ends by its deadline and the
//! grace, whatever the driver does), INV-8 (memory goes back only if the driver does not have it), INV-12 (no input is refused by a
//! panic), one completion for each operation, the order of each channel, the first failure, and nothing after the end.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::machine::{Action, Answer, Channel, End, Machine, Refusal, Rules, Turn};

const WALKS: u64 = 300_000;
const STEPS: u32 = 48;
const CHANNELS: [Channel; 4] = [
    Channel::Collectives,
    Channel::Messages {
        send: true,
        peer: Some(1),
        tag: 0,
    },
    Channel::Messages {
        send: false,
        peer: None,
        tag: 0,
    },
    Channel::Unordered,
];
const TICK: Duration = Duration::from_millis(1);

/// SplitMix64: the same walk for the same seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % sides
    }

    fn one_of<T: Copy>(&mut self, items: &[T]) -> Option<T> {
        (!items.is_empty()).then(|| items[self.roll(items.len() as u64) as usize])
    }
}

/// Where an operation's memory is, as far as the outside knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Memory {
    Queued,
    Driver,
    Answered,
}

#[derive(Debug, Clone, Copy)]
struct Seen {
    channel: Channel,
    deadline: Instant,
    memory: Memory,
    told: bool,
}

/// One configured group, its driver and its callers.
struct Walk {
    dice: Dice,
    rules: Rules,
    overtime: Duration,
    now: Instant,
    machine: Machine<u32>,
    seen: BTreeMap<u64, Seen>,
    /// Each channel has an executor.
    blocks: bool,
    calling: BTreeSet<u64>,
    /// What callers carry out themselves, until when.
    carried: BTreeMap<u64, Instant>,
    /// What the group failed with first, by this record.
    first: Option<u32>,
    failed_at: Option<Instant>,
    failures: u32,
    closed: bool,
    releasing: bool,
    released: bool,
    interrupts: u32,
    interrupt_answered: bool,
    given_up: bool,
    unclean: bool,
    /// The numbers that were started and told, by channel.
    started: BTreeMap<Channel, u64>,
    told: BTreeMap<Channel, u64>,
    end: Option<End>,
}

impl Walk {
    fn new(seed: u64) -> Self {
        let mut dice = Dice(seed);
        let rules = Rules {
            depth: [1, 2, usize::MAX][dice.roll(3) as usize],
            grace: TICK * [0, 3, 10][dice.roll(3) as usize],
            gives_up: dice.roll(2) == 0,
        };
        let blocks = dice.roll(3) == 0;
        let overtime = TICK * [0, 5][dice.roll(2) as usize];
        Self {
            blocks,
            dice,
            rules,
            now: Instant::now(),
            machine: Machine::new(rules, overtime),
            overtime,
            seen: BTreeMap::new(),
            calling: BTreeSet::new(),
            carried: BTreeMap::new(),
            first: None,
            failed_at: None,
            failures: 0,
            closed: false,
            releasing: false,
            released: false,
            interrupts: 0,
            interrupt_answered: false,
            given_up: false,
            unclean: false,
            started: BTreeMap::new(),
            told: BTreeMap::new(),
            end: None,
        }
    }

    fn held(&self) -> Vec<u64> {
        let held = self.seen.iter().filter(|(_, s)| s.memory == Memory::Driver);
        held.map(|(n, _)| *n).collect()
    }

    fn failure(&mut self) -> u32 {
        self.failures += 1;
        self.failures
    }

    fn expect_failure(&mut self, failure: u32) {
        if self.first.is_none() && self.end.is_none() {
            self.first = Some(failure);
            self.failed_at = Some(self.now);
        }
    }

    fn step(&mut self) {
        match self.dice.roll(110) {
            0..=24 => self.submit(),
            25..=44 => self.turn(),
            45..=54 => self.returned(),
            55..=74 => self.answered(),
            75..=84 => self.pass(1 + self.dice.0 as u32 % 4),
            85..=88 => {
                let failure = self.failure();
                self.expect_failure(failure);
                self.machine.fail(failure, self.now);
            }
            89..=91 => {
                self.closed = true;
                self.machine.close();
            }
            92..=95 if self.interrupts > 0 && !self.interrupt_answered => {
                let clean = self.dice.roll(3) > 0;
                self.interrupt_answered = true;
                self.unclean |= !clean && self.end.is_none();
                self.machine.interrupted(clean);
            }
            96..=97 if self.releasing => {
                let clean = self.dice.roll(3) > 0;
                self.releasing = false;
                self.released = true;
                self.unclean |= !clean && self.end.is_none();
                self.machine.released(clean);
            }
            // What a driver says twice, or of a number that no operation has.
            98 => {
                let number = self.dice.roll(60);
                if self
                    .seen
                    .get(&number)
                    .is_none_or(|s| s.memory == Memory::Answered)
                {
                    assert!(!self.machine.answered(number, Answer::Fatal(999), self.now));
                }
            }
            100..=103 => self.enter(),
            104..=109 => self.left(),
            _ => {}
        }
        self.check();
    }

    /// A caller wants to carry an operation out itself.
    fn enter(&mut self) {
        let deadline = self.now + TICK * self.dice.roll(30) as u32;
        let has_all =
            self.calling.is_empty() && self.seen.values().all(|s| s.told || s.memory != Memory::Queued);
        match self.machine.enter(deadline) {
            Ok(entered) => {
                assert!(
                    self.first.is_none() && !self.closed,
                    "it entered a group that is over"
                );
                assert_eq!(entered.is_some(), has_all, "it overtakes, or waits for nothing");
                if let Some(number) = entered {
                    let before = self.seen.keys().chain(self.carried.keys()).max();
                    assert!(before.is_none_or(|before| *before < number), "{number} twice");
                    self.carried.insert(number, deadline);
                }
            }
            Err(Refusal::Failed(first)) => assert_eq!(Some(first), self.first),
            Err(Refusal::Closed) => assert!(self.closed),
        }
    }

    /// A caller has carried its operation out.
    fn left(&mut self) {
        let inside: Vec<u64> = self.carried.keys().copied().collect();
        let Some(number) = self.dice.one_of(&inside) else {
            return;
        };
        self.carried.remove(&number);
        let instead = self.first;
        let answer = if self.dice.roll(8) == 0 {
            let failure = self.failure();
            self.expect_failure(failure);
            Answer::Fatal(failure)
        } else {
            Answer::Through
        };
        assert_eq!(self.machine.left(number, answer, self.now), instead);
    }

    fn submit(&mut self) {
        let channel = CHANNELS[self.dice.roll(4) as usize];
        let deadline = self.now + TICK * self.dice.roll(30) as u32;
        match self.machine.submit(channel, deadline) {
            Ok(number) => {
                assert!(
                    self.first.is_none() && !self.closed,
                    "{number} was accepted by a group that is over"
                );
                let memory = Memory::Queued;
                let new = Seen {
                    channel,
                    deadline,
                    memory,
                    told: false,
                };
                assert!(self.seen.insert(number, new).is_none(), "{number} twice");
            }
            Err(Refusal::Failed(first)) => assert_eq!(Some(first), self.first),
            Err(Refusal::Closed) => assert!(self.closed),
        }
    }

    /// How many operations of `channel` the driver has.
    fn out(&self, channel: Channel) -> usize {
        let has = |s: &&Seen| s.memory == Memory::Driver && s.channel == channel;
        self.seen.values().filter(has).count()
    }

    fn turn(&mut self) {
        let number = self.dice.roll(4);
        let had =
            self.machine.has_turn(self.blocks, false) || (self.blocks && self.machine.has_turn(true, true));
        let turn = match self.seen.keys().nth_back(number as usize) {
            // The thread that has submitted it takes this one's turn or none.
            Some(&own) if self.dice.roll(2) == 0 => match self.machine.turn_of(own) {
                Turn::Wait => return,
                Turn::Release => panic!("a caller releases the driver"),
                turn => {
                    assert!(
                        turn == Turn::Over || turn == Turn::Start(own),
                        "{own} does {turn:?}"
                    );
                    turn
                }
            },
            _ if self.blocks => return self.turn_in(),
            _ => self.machine.turn(),
        };
        let has = turn != Turn::Wait;
        assert!(
            had == has || (had && self.blocks),
            "an executor is woken: {had}, for {turn:?}"
        );
        match turn {
            Turn::Start(number) => {
                assert!(self.calling.is_empty(), "two calls of the driver at once");
                assert!(self.first.is_none(), "{number} started after the failure");
                let earlier = |(_, s): &(&u64, &Seen)| {
                    s.memory == Memory::Queued && self.out(s.channel) < self.rules.depth
                };
                let passed = self.seen.range(..number).find(earlier).map(|(n, _)| *n);
                assert_eq!(passed, None, "an earlier one could start, and {number} did");
                self.start(number);
            }
            Turn::Release => {
                assert!(self.closed && self.first.is_none() && !self.released && !self.releasing);
                let idle = self.seen.values().all(|s| s.told && s.memory == Memory::Answered);
                assert!(idle && self.carried.is_empty(), "released early");
                self.releasing = true;
            }
            Turn::Wait => {
                assert!(self.first.is_none());
                if self.calling.is_empty() && !self.releasing && !self.released {
                    let waits =
                        |s: &Seen| s.memory == Memory::Queued && self.out(s.channel) < self.rules.depth;
                    assert!(!self.seen.values().any(waits), "an operation could start");
                    assert!(
                        !self.closed || !self.carried.is_empty() || self.seen.values().any(|s| !s.told),
                        "it could be released"
                    );
                }
            }
            Turn::Over => assert!(self.first.is_some() || self.end.is_some()),
        }
    }

    /// The executor of one channel asks, which is in no call.
    fn turn_in(&mut self) {
        let channel = CHANNELS[self.dice.roll(4) as usize];
        if self.calling.iter().any(|n| self.seen[n].channel == channel) {
            return;
        }
        let could = |(_, s): &(&u64, &Seen)| s.memory == Memory::Queued && s.channel == channel;
        let next = self.seen.iter().find(could).map(|(n, _)| *n);
        let next = next.filter(|_| self.out(channel) < self.rules.depth);
        let idle = self.seen.values().all(|s| s.told && s.memory == Memory::Answered);
        let idle = idle && self.carried.is_empty();
        let had = self.machine.has_turn(true, channel != Channel::Collectives);
        let turn = self.machine.turn_in(channel);
        assert!(had || turn == Turn::Wait, "no executor is woken for {turn:?}");
        match turn {
            Turn::Start(number) => {
                assert_eq!(Some(number), next, "not the next one of {channel:?}");
                assert!(self.first.is_none(), "{number} started after the failure");
                self.start(number);
            }
            Turn::Release => {
                assert!(channel == Channel::Collectives && self.closed && self.first.is_none());
                assert!(!self.released && !self.releasing && idle && self.calling.is_empty());
                self.releasing = true;
            }
            Turn::Wait => {
                assert!(self.first.is_none() && next.is_none(), "{next:?} could start");
                let releases = channel == Channel::Collectives && self.closed && idle;
                let over = self.releasing || self.released || !self.calling.is_empty();
                assert!(!releases || over, "it could be released");
            }
            Turn::Over => assert!(self.first.is_some() || self.end.is_some()),
        }
    }

    fn start(&mut self, number: u64) {
        let one = self.seen.get_mut(&number).expect("accepted");
        assert_eq!(one.memory, Memory::Queued, "{number} started twice");
        one.memory = Memory::Driver;
        let channel = one.channel;
        let before = self.started.insert(channel, number).unwrap_or(0);
        assert!(before < number, "{number} started after {before}");
        let out = self.out(channel);
        assert!(out <= self.rules.depth, "{out} operations of {channel:?} are out");
        self.calling.insert(number);
    }

    fn returned(&mut self) {
        let inside: Vec<u64> = self.calling.iter().copied().collect();
        if let Some(number) = self.dice.one_of(&inside) {
            self.calling.remove(&number);
            self.machine.returned(number);
        }
    }

    fn answered(&mut self) {
        let Some(number) = self.dice.one_of(&self.held()) else {
            return;
        };
        let told = self.seen[&number].told;
        self.seen.get_mut(&number).expect("held").memory = Memory::Answered;
        let kept = if self.dice.roll(8) == 0 {
            let failure = self.failure();
            if !told {
                self.expect_failure(failure);
            }
            self.machine.answered(number, Answer::Fatal(failure), self.now)
        } else {
            self.machine.answered(number, Answer::Through, self.now)
        };
        assert_eq!(kept, !told, "the answer of {number}");
    }

    /// Time passes, and deadlines are looked at, as often as the machine wants it.
    fn pass(&mut self, ticks: u32) {
        let until = self.now + TICK * ticks;
        while let Some(at) = self.machine.wake_at().filter(|at| *at <= until) {
            self.now = self.now.max(at);
            self.look();
            let again = self.machine.wake_at().is_some_and(|next| next <= at);
            assert!(!again, "it wants to be looked at for ever");
        }
        self.now = until;
        self.check();
        self.check_deadlines();
    }

    fn look(&mut self) {
        if let Some((number, _)) = self.machine.overdue(self.now) {
            let carried = self
                .carried
                .get(&number)
                .map(|deadline| *deadline + self.overtime);
            let due = carried.unwrap_or_else(|| self.due(&self.seen[&number]));
            assert!(due <= self.now, "{number} is not overdue");
            let failure = self.failure();
            self.expect_failure(failure);
            self.machine.fail(failure, self.now);
        }
        self.machine.tick(self.now);
        self.check();
    }

    /// What the driver has, or has had, may take longer than its deadline.
    fn due(&self, one: &Seen) -> Instant {
        match one.memory {
            Memory::Queued => one.deadline,
            Memory::Driver | Memory::Answered => one.deadline + self.overtime,
        }
    }

    fn check_deadlines(&self) {
        for (number, s) in self.seen.iter().filter(|(_, s)| !s.told) {
            let due = self.due(s);
            assert!(
                self.now < due + self.rules.grace || due > self.now,
                "{number} is pending past its deadline (INV-2)"
            );
            let failed = self.failed_at.map(|at| at + self.rules.grace);
            assert!(
                failed.is_none_or(|until| self.now < until),
                "{number} outlives the failure (INV-2)"
            );
        }
        for (number, deadline) in &self.carried {
            let late = *deadline + self.overtime <= self.now;
            assert!(
                !late || self.first.is_some(),
                "{number} is carried out past its deadline (INV-2)"
            );
        }
        let until = self.failed_at.map(|at| at + self.rules.grace);
        let bounded = self.rules.gives_up && until.is_some_and(|until| until <= self.now);
        assert!(
            !bounded || self.end.is_some(),
            "the group outlives its grace (INV-2)"
        );
    }

    fn check(&mut self) {
        assert_eq!(self.machine.failure().copied(), self.first, "the first failure");
        let actions: Vec<Action> = self.machine.take_actions().collect();
        assert!(
            self.end.is_none() || actions.is_empty(),
            "{actions:?} after the end"
        );
        for action in actions {
            match action {
                Action::Interrupt => {
                    assert!(self.first.is_some());
                    self.interrupts += 1;
                }
                Action::GiveUp => {
                    let early = self.failed_at.is_none_or(|at| self.now < at + self.rules.grace);
                    assert!(self.rules.gives_up && !self.given_up && !early && self.interrupts == 1);
                    self.given_up = true;
                }
                Action::Tell(number) | Action::Fail(number) => {
                    let s = self.seen.get_mut(&number).expect("accepted");
                    assert!(!s.told, "{number} was told twice");
                    s.told = true;
                    let (channel, memory) = (s.channel, s.memory);
                    if let Action::Tell(_) = action {
                        assert_eq!(
                            memory,
                            Memory::Answered,
                            "the memory of {number} goes back (INV-8)"
                        );
                        if self.first.is_none() && channel != Channel::Unordered {
                            let before = self.told.insert(channel, number).unwrap_or(0);
                            assert!(before < number, "{number} was told after {before}");
                            let earlier =
                                |(n, o): (&u64, &Seen)| *n < number && o.channel == channel && !o.told;
                            assert!(
                                !self.seen.iter().any(earlier),
                                "{number} was told before an earlier one"
                            );
                        }
                    } else {
                        assert!(self.first.is_some(), "{number} failed in a group that has not");
                        assert!(
                            self.interrupts > 0,
                            "{number} failed before the driver was interrupted"
                        );
                        let waits = self.failed_at.is_some_and(|at| self.now < at + self.rules.grace);
                        assert!(
                            memory != Memory::Driver || !waits,
                            "{number} lost its memory too early"
                        );
                        assert!(
                            memory != Memory::Driver || !self.rules.gives_up || self.given_up,
                            "the driver still counts on the memory of {number}"
                        );
                    }
                }
            }
        }
        assert!(self.interrupts <= 1 && (self.interrupts == 1) == self.first.is_some());
        let end = self.machine.ended();
        if self.end.is_some() {
            assert_eq!(end, self.end, "it ended twice");
        } else if let Some(how) = end {
            assert!(
                (self.calling.is_empty() && self.carried.is_empty()) || self.given_up,
                "it ended inside a call of the driver"
            );
            assert!(
                self.seen.values().all(|s| s.told),
                "it ended with pending operations"
            );
            let answered = !self.releasing && (self.interrupts == 0 || self.interrupt_answered);
            assert!(answered || self.given_up, "it ended before the driver answered");
            assert!(self.released || self.interrupts == 1);
            assert_eq!(how == End::Unclean, self.unclean);
            self.end = end;
        }
        let here = |s: &Seen| !s.told && s.memory != Memory::Driver;
        assert!(
            self.first.is_none() || !self.seen.values().any(here),
            "the failure left one pending that no party has"
        );
        let pending = !self.carried.is_empty() || self.seen.values().any(|s| !s.told);
        assert_eq!(self.machine.is_pending(), pending);
    }

    /// The driver comes back from where it is, and answers nothing more.
    fn finish(&mut self) {
        let held: BTreeSet<u64> = self.held().into_iter().collect();
        while !self.calling.is_empty() {
            self.returned();
        }
        while !self.carried.is_empty() {
            self.left();
        }
        self.closed = true;
        self.machine.close();
        self.pass(60);
        if self.interrupts == 0 {
            assert!(
                self.held().is_empty(),
                "{held:?}: a driver that keeps operations was not interrupted"
            );
            while self.released || !self.releasing {
                if self.end.is_some() {
                    return;
                }
                self.turn();
                self.check();
            }
            self.releasing = false;
            self.released = true;
            self.machine.released(true);
        } else {
            if self.releasing {
                self.releasing = false;
                self.released = true;
                self.machine.released(true);
            }
            if !self.interrupt_answered {
                self.interrupt_answered = true;
                self.machine.interrupted(true);
            }
        }
        self.check();
        assert!(self.end.is_some(), "it does not end");
        for _ in 0..4 {
            self.answered();
            let failure = self.failure();
            assert!(!self.machine.fail(failure, self.now), "it failed after its end");
            self.check();
        }
    }
}

#[test]
fn every_walk_keeps_what_the_engine_promises() {
    for seed in 0..WALKS {
        let mut walk = Walk::new(seed.wrapping_mul(0xD134_2543_DE82_EF95));
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for _ in 0..STEPS {
                walk.step();
            }
            walk.finish();
        }));
        if let Err(panic) = result {
            eprintln!("seed {seed}");
            std::panic::resume_unwind(panic);
        }
    }
}
