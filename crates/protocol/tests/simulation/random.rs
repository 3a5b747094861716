//! Random numbers that follow from a seed alone (SplitMix64, Steele et al. 2014), and the scenarios drawn from them.

use std::time::Duration;

use ftcore::Step;
use oxccl_protocol::quorum::OrderKind;

/// A stream of random numbers.
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed ^ 0x5851_f42d_4c95_7f2d)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `limit`, which is not 0.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    pub(crate) fn chance(&mut self, permille: u64) -> bool {
        self.below(1000) < permille
    }

    /// A time between `from` and `to` milliseconds, in microseconds.
    pub(crate) fn millis(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_micros(from * 1000 + self.below((to - from).max(1) * 1000))
    }
}

/// A hash of one number.
pub(crate) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// What is trained, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Training {
    DataParallel {
        /// A replica's samples follow from its place among the contributors.
        by_place: bool,
    },
    Diloco {
        fragments: u64,
        /// Inner steps from round to round.
        round_steps: u64,
        delay: u64,
        eager: bool,
    },
}

impl Training {
    fn of(r: &mut Random) -> Self {
        let round_steps = 1 + r.below(3);
        let eager = r.chance(400);
        match r.below(2) {
            0 => Self::DataParallel {
                by_place: r.chance(500),
            },
            _ => Self::Diloco {
                fragments: 1 + r.below(3),
                round_steps,
                delay: if eager { 0 } else { r.below(round_steps) },
                eager,
            },
        }
    }

    pub(crate) fn fragments(self) -> usize {
        match self {
            Self::DataParallel { .. } => 1,
            Self::Diloco { fragments, .. } => fragments as usize,
        }
    }

    /// The fragment of round `step`.
    pub(crate) fn fragment_at(self, step: Step) -> usize {
        usize::try_from(step.0 - 1).unwrap_or(0) % self.fragments()
    }

    pub(crate) fn is_eager(self) -> bool {
        matches!(self, Self::Diloco { eager: true, .. })
    }

    /// How many parts a step is computed in.
    pub(crate) fn round_steps(self) -> u64 {
        match self {
            Self::DataParallel { .. } => 1,
            Self::Diloco { round_steps, .. } => round_steps,
        }
    }

    /// The inner steps in an outer gradient that is sent so many rounds after its fragment was set.
    pub(crate) fn inner_steps(self, rounds: u64) -> u64 {
        match self {
            Self::DataParallel { .. } => 0,
            Self::Diloco {
                round_steps, delay, ..
            } => rounds * round_steps - delay,
        }
    }
}

/// What goes wrong.
#[derive(Debug, Clone)]
pub(crate) enum Fault {
    /// SIGKILL of a rank's process; its replica is started again so long after its last process ended.
    Kill {
        slot: usize,
        rank: u32,
        restart: Duration,
    },
    /// SIGKILL of a rank's process as soon as its next commit is heard.
    KillAtCommit {
        slot: usize,
        rank: u32,
        restart: Duration,
    },
    /// SIGSTOP and SIGCONT.
    Pause { slot: usize, rank: u32, time: Duration },
    /// The training thread does nothing; the process's other threads go on. For ever without a time.
    Hang {
        slot: usize,
        rank: u32,
        time: Option<Duration>,
    },
    /// SIGKILL of the lighthouse, and its next start.
    KillLighthouse { down: Duration },
    /// SIGSTOP and SIGCONT of the lighthouse.
    PauseLighthouse { time: Duration },
    /// A replica and the lighthouse do not reach each other.
    Cut { slot: usize, time: Duration },
    /// Ranks of one side do not reach those of the other. Bit per slot.
    Split { side: u64, time: Duration },
    /// A replica asks for quorums without newcomers for a while.
    Shrink { slot: usize, time: Duration },
    /// An operator drains, evicts or kills a replica; it is started again so long after its last process ended.
    Operate {
        slot: usize,
        kind: OrderKind,
        restart: Duration,
    },
    /// The next time a rank writes its state, it fails in the middle: taking another one over, or applying a step that has committed.
    Tear { slot: usize, rank: u32 },
    /// A stranger, who is no replica, talks to the lighthouse.
    Stranger { claim: u64 },
    /// The same, with an address that could be one and a quorum id that is none of this job's.
    Impostor { claim: u64 },
    /// What a replica sends where the members of a group meet makes no sense.
    Garble { slot: usize, time: Duration },
}

/// One run, wholly determined.
#[derive(Debug, Clone)]
pub(crate) struct Scenario {
    pub(crate) seed: u64,
    pub(crate) replicas: usize,
    pub(crate) ranks: u32,
    pub(crate) min_replicas: u32,
    pub(crate) spares: bool,
    pub(crate) init_sync: bool,
    pub(crate) max_retries: Option<u32>,
    /// All replicas are as torchft's managers are.
    pub(crate) foreign: bool,
    pub(crate) training: Training,
    /// The last step with data, after which the replicas end the run. `None`: they train on.
    pub(crate) last: Option<Step>,
    /// Their runs are told it at the beginning. If not, their training loops know.
    pub(crate) says_last: bool,
    /// Of a thousand messages to the lighthouse so many come late, after others of the same replica, or twice.
    pub(crate) disorder: u64,
    /// The wall clock may stand elsewhere at every start of the lighthouse.
    pub(crate) clock_jumps: bool,
    /// Of a thousand messages between servers, so many find their connection broken.
    pub(crate) loss: u64,
    /// What was sent to a group before the end of a connection is received before it.
    pub(crate) keeps_work: bool,
    /// The first quorum waits for all replicas.
    pub(crate) initial: bool,
    /// The lighthouse has no disk: it starts without a record.
    pub(crate) forgets: bool,
    /// As torchft's, it has no disk and counts from somewhere before its last quorum id.
    pub(crate) counts_back: bool,
    /// Replicas as torchft's managers ask some time after their first heartbeat.
    pub(crate) asks_late: bool,
    pub(crate) faults: Vec<(Duration, Fault)>,
}

impl Scenario {
    pub(crate) fn of(seed: u64) -> Self {
        let mut r = Random::new(seed);
        let replicas = 1 + r.below(5) as usize;
        let ranks = [1, 1, 2, 2, 3][r.below(5) as usize];
        let majority = replicas as u32 / 2 + 1;
        let min_replicas = match r.below(4) {
            0 => replicas as u32,
            1 => majority,
            _ => 1,
        };
        let mut scenario = Self {
            seed,
            replicas,
            ranks,
            min_replicas,
            spares: r.chance(150),
            init_sync: r.chance(900),
            loss: [0, 0, 5, 20][r.below(4) as usize],
            max_retries: r.chance(150).then(|| 3 + r.below(6) as u32),
            foreign: r.chance(150),
            disorder: [0, 0, 0, 10, 100][r.below(5) as usize],
            clock_jumps: r.chance(300),
            training: Training::of(&mut r),
            last: r.chance(200).then(|| Step(2 + r.below(24) as i64)),
            says_last: true,
            keeps_work: false,
            initial: true,
            forgets: false,
            counts_back: false,
            asks_late: false,
            faults: Vec::new(),
        };
        if scenario.foreign {
            // Its votes come from one rank, and its sources tell no other what they copied.
            scenario.ranks = 1;
            scenario.training = Training::DataParallel { by_place: false };
            scenario.last = None;
        }
        for _ in 0..r.below(8) {
            let mut at = r.millis(0, 30_000);
            let mut fault = scenario.fault(&mut r);
            if let Fault::Hang { slot, time: None, .. } = &mut fault {
                // Of one replica at most, and not before the job has begun: a replica must be left that is able to commit.
                *slot = replicas - 1;
                at += Duration::from_secs(4);
            }
            scenario.faults.push((at, fault));
        }
        scenario
    }

    /// What came to the model later, drawn from numbers of its own: a seed keeps the rest of its meaning.
    pub(crate) fn with_more(mut self) -> Self {
        let mut r = Random::new(mix(self.seed ^ 0x6d6f_7265));
        self.initial = r.chance(700);
        let forgets = r.chance(250);
        if self.foreign {
            self.asks_late = r.chance(600);
            self.counts_back = forgets && self.init_sync;
        } else {
            // Without a record no replica knows that the run is over.
            self.forgets = forgets && self.last.is_none();
        }
        if forgets {
            self.clock_jumps = false;
        }
        for _ in 0..r.below(3) {
            let slot = r.below(self.replicas as u64) as usize;
            let time = r.millis(200, 9_000);
            let fault = match r.below(4) {
                0 => Fault::Garble { slot, time },
                1 => Fault::Impostor { claim: r.next() },
                2 => Fault::KillLighthouse {
                    down: r.millis(20, 7_000),
                },
                _ => Fault::Kill {
                    slot,
                    rank: r.below(u64::from(self.ranks)) as u32,
                    restart: r.millis(50, 8_000),
                },
            };
            self.faults.push((r.millis(0, 30_000), fault));
        }
        // With eager updates a loop that knows it alone has begun the next round by then.
        self.says_last = self.training.is_eager() || r.chance(500);
        self
    }

    /// Two replicas or more, of which some die right after a commit. Nothing else goes wrong, and data are late.
    pub(crate) fn of_deaths_after_commits(seed: u64) -> Self {
        let mut r = Random::new(mix(seed));
        let mut scenario = Self {
            replicas: 2 + r.below(4) as usize,
            min_replicas: 1,
            loss: 0,
            disorder: 0,
            max_retries: None,
            foreign: false,
            last: None,
            keeps_work: true,
            faults: Vec::new(),
            ..Self::of(seed)
        };
        for i in 0..4 {
            let fault = Fault::KillAtCommit {
                slot: r.below(scenario.replicas as u64) as usize,
                rank: r.below(u64::from(scenario.ranks)) as u32,
                restart: r.millis(50, 3_000),
            };
            let at = r.millis(3_000 + 6_000 * i, 3_000 + 6_000 * (i + 1));
            scenario.faults.push((at, fault));
        }
        scenario
    }

    fn fault(&self, r: &mut Random) -> Fault {
        let slot = r.below(self.replicas as u64) as usize;
        let rank = r.below(u64::from(self.ranks)) as u32;
        match r.below(21) {
            0..=5 => Fault::Kill {
                slot,
                rank,
                restart: r.millis(50, 8_000),
            },
            6 | 7 => Fault::Pause {
                slot,
                rank,
                time: r.millis(100, 12_000),
            },
            8 | 9 => {
                // A replica must be left that can commit.
                let for_ever = (self.min_replicas as usize) < self.replicas && r.chance(500);
                let time = r.millis(1_000, 20_000);
                Fault::Hang {
                    slot,
                    rank,
                    time: Some(time).filter(|_| !for_ever),
                }
            }
            10 | 11 => Fault::KillLighthouse {
                down: r.millis(20, 7_000),
            },
            12 => Fault::PauseLighthouse {
                time: r.millis(500, 9_000),
            },
            13 => Fault::Cut {
                slot,
                time: r.millis(200, 9_000),
            },
            14 => Fault::Split {
                side: r.next(),
                time: r.millis(200, 9_000),
            },
            15 => Fault::Shrink {
                slot,
                time: r.millis(200, 9_000),
            },
            16 | 17 => Fault::Operate {
                slot,
                kind: [
                    OrderKind::Drain,
                    OrderKind::Drain,
                    OrderKind::Evict,
                    OrderKind::Kill,
                ][r.below(4) as usize],
                restart: r.millis(50, 8_000),
            },
            18 => Fault::Tear { slot, rank },
            _ => Fault::Stranger { claim: r.next() },
        }
    }
}
