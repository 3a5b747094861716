//! A job and what befalls it: the seed's scenario, its faults in order of time, and the end, by which all replicas commit again.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::checks::Checks;
use super::disk::Plate;
use super::groups::Groups;
use super::net::Net;
use super::random::Random;
use super::replica::{LIGHTHOUSE, Running, Slot, host_of, live, lock, random_of, start_lighthouse};
use super::set_wall;
use crate::clock;

/// After the last fault all replicas have committed again within this time.
const RECOVERY: Duration = Duration::from_secs(60);
/// So many more commits of each rank count as going on.
const GOES_ON: u64 = 3;
/// The wall clock at the start of a run, in seconds since 1970.
const WALL: u64 = 1_800_000_000;

/// What a seed determines.
#[derive(Debug, Clone)]
pub(super) struct Scenario {
    pub(super) seed: u64,
    pub(super) replicas: usize,
    pub(super) ranks: u32,
    pub(super) min_replicas: usize,
    pub(super) init_sync: bool,
    pub(super) has_disk: bool,
    /// Of a hundred writes so many are late.
    late: u64,
    faults: Vec<(Duration, Fault)>,
}

#[derive(Debug, Clone)]
enum Fault {
    /// A rank's host ends, so that its peers hear of it or not.
    Kill {
        slot: usize,
        rank: u32,
        silently: bool,
        for_good: bool,
    },
    /// The lighthouse is away for a while, and comes back with its disk and a wall clock that was set back or not.
    Lighthouse {
        away: Duration,
        silently: bool,
        set_back: bool,
    },
    Cut {
        a: String,
        b: String,
        lasts: Duration,
    },
    /// Nothing comes to a host or from it, and then all at once.
    Hold {
        host: String,
        lasts: Duration,
    },
    /// Connections break.
    Lose {
        picks: Vec<u64>,
    },
    /// A training thread hangs.
    Hang {
        slot: usize,
        rank: u32,
        lasts: Duration,
    },
    FullDisk {
        lasts: Duration,
    },
}

impl Fault {
    fn spares_replicas(&self) -> bool {
        match self {
            Self::Lighthouse { .. } | Self::Lose { .. } | Self::FullDisk { .. } => true,
            Self::Kill { .. } => false,
            Self::Cut { lasts, .. } | Self::Hold { lasts, .. } | Self::Hang { lasts, .. } => {
                *lasts < Duration::from_millis(1500)
            }
        }
    }
}

impl Scenario {
    pub(super) fn of(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let replicas = 2 + random.below(3) as usize;
        let ranks = 1 + random.below(2) as u32;
        let mut scenario = Self {
            seed,
            replicas,
            ranks,
            min_replicas: 1 + random.below(replicas as u64 - 1) as usize,
            init_sync: random.percent(50),
            has_disk: random.percent(80),
            late: [0, 3, 15][random.below(3) as usize],
            faults: Vec::new(),
        };
        for _ in 0..random.below(6) {
            let at = random.millis(300..9000);
            let fault = scenario.fault(&mut random);
            scenario.faults.push((at, fault));
        }
        scenario.faults.sort_by_key(|(at, _)| *at);
        // A host may fail for good if the others are enough, and keep their state.
        let gentle = scenario
            .faults
            .iter()
            .filter(|(_, fault)| fault.spares_replicas())
            .count();
        let enough = scenario.min_replicas < scenario.replicas && gentle + 1 == scenario.faults.len();
        for (_, fault) in scenario.faults.iter_mut().filter(|_| enough) {
            if let Fault::Kill {
                silently: true,
                for_good,
                ..
            } = fault
            {
                *for_good = true;
            }
        }
        scenario
    }

    /// The replica that does not come back.
    pub(super) fn lost_for_good(&self) -> Option<usize> {
        self.faults.iter().find_map(|(_, fault)| match fault {
            Fault::Kill {
                slot, for_good: true, ..
            } => Some(*slot),
            _ => None,
        })
    }

    /// No replica has a reason to end: no host fails or is out of reach for long, and no thread hangs for long.
    pub(super) fn spares_replicas(&self) -> bool {
        self.faults.iter().all(|(_, fault)| fault.spares_replicas())
    }

    fn host(&self, random: &mut Random) -> String {
        let slot = random.below(self.replicas as u64 + 1) as usize;
        match slot == self.replicas {
            true => LIGHTHOUSE.to_string(),
            false => host_of(slot, random.below(self.ranks.into()) as u32),
        }
    }

    fn fault(&self, random: &mut Random) -> Fault {
        let slot = random.below(self.replicas as u64) as usize;
        let rank = random.below(self.ranks.into()) as u32;
        match random.below(10) {
            0 | 1 => Fault::Kill {
                slot,
                rank,
                silently: random.percent(40),
                for_good: false,
            },
            2 | 3 => Fault::Lighthouse {
                away: random.millis(50..6000),
                silently: random.percent(30),
                set_back: random.percent(30),
            },
            4 | 5 => Fault::Cut {
                a: self.host(random),
                b: self.host(random),
                lasts: random.millis(100..12_000),
            },
            6 => Fault::Hold {
                host: self.host(random),
                lasts: random.millis(100..9_000),
            },
            7 => Fault::Lose {
                picks: (0..1 + random.below(6)).map(|_| random.next()).collect(),
            },
            8 => Fault::Hang {
                slot,
                rank,
                lasts: random.millis(2_000..25_000),
            },
            _ => Fault::FullDisk {
                lasts: random.millis(500..8_000),
            },
        }
    }
}

/// What a run came to.
pub(super) struct Outcome {
    pub(super) violation: Option<String>,
    pub(super) trace: Vec<String>,
    pub(super) commits: u64,
}

/// What all that runs shares.
pub(super) struct Job {
    pub(super) scenario: Scenario,
    pub(super) net: Arc<Net>,
    pub(super) groups: Groups,
    start: Instant,
    running: Vec<Slot>,
    state: Mutex<State>,
    checks: Mutex<Checks>,
}

#[derive(Debug, Default)]
struct State {
    violation: Option<String>,
    trace: Vec<String>,
    commits: u64,
    lost: Vec<usize>,
    /// By slot and group rank: commits since the faults are over.
    since: Vec<Vec<u64>>,
}

/// Lets a seed's job run. The same seed, the same outcome.
pub(super) fn run(scenario: &Scenario) -> Outcome {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime without IO starts");
    let outcome = runtime.block_on(async {
        set_wall(Some(Duration::from_secs(WALL)));
        let job = Arc::new(Job::new(scenario.clone()));
        job.keep_going().await;
        let mut state = job.state();
        Outcome {
            violation: state.violation.take(),
            trace: std::mem::take(&mut state.trace),
            commits: state.commits,
        }
    });
    drop(runtime);
    set_wall(None);
    outcome
}

impl Job {
    fn new(scenario: Scenario) -> Self {
        let mut random = Random::new(scenario.seed ^ 0x6a6f_6273);
        let net = Net::new(random.split(), scenario.late);
        Self {
            groups: Groups::new(net.clone(), random.split()),
            net,
            start: clock::now(),
            running: (0..scenario.replicas).map(|_| Slot::default()).collect(),
            state: Mutex::default(),
            checks: Mutex::default(),
            scenario,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn checks(&self) -> MutexGuard<'_, Checks> {
        self.checks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn running(&self, slot: usize) -> MutexGuard<'_, Running> {
        lock(&self.running[slot])
    }

    /// Its host has failed, and is not started again.
    pub(super) fn is_lost_for_good(&self, slot: usize) -> bool {
        self.state().lost.contains(&slot)
    }

    /// Since the start.
    pub(super) fn now(&self) -> Duration {
        clock::now().saturating_duration_since(self.start)
    }

    pub(super) fn note(&self, text: impl FnOnce() -> String) {
        let line = format!("{:>6} ms  {}", self.now().as_millis(), text());
        self.state().trace.push(line);
    }

    /// A promise was broken.
    pub(super) fn violate(&self, text: String) {
        self.note(|| format!("VIOLATION: {text}"));
        self.state().violation.get_or_insert(text);
    }

    pub(super) fn committed(&self, slot: usize, group_rank: u32) {
        let mut state = self.state();
        state.commits += 1;
        if let Some(commits) = state
            .since
            .get_mut(slot)
            .and_then(|s| s.get_mut(group_rank as usize))
        {
            *commits += 1;
        }
    }

    /// A rank's host ends, and what is played on it.
    pub(super) fn end_host(&self, host: &str, replica: &str, group_rank: u32, silently: bool) {
        self.net.end(host, silently);
        if !silently {
            self.groups.leave(host, None, "it was killed");
        }
        self.groups.withdraw(replica, group_rank);
    }

    async fn keep_going(self: &Arc<Self>) {
        let disk = Plate::default();
        let lighthouse = Arc::new(Mutex::new(Some(start_lighthouse(self, &disk, false))));
        for slot in 0..self.scenario.replicas {
            tokio::spawn(live(self.clone(), slot, random_of(self.scenario.seed, slot)));
        }
        let mut ends = Vec::new();
        for (at, fault) in self.scenario.faults.clone() {
            tokio::time::sleep_until((self.start + at).into()).await;
            self.note(|| format!("{fault:?}"));
            let (job, disk, lighthouse) = (self.clone(), disk.clone(), lighthouse.clone());
            ends.push(tokio::spawn(async move {
                match fault {
                    Fault::Lighthouse {
                        away,
                        silently,
                        set_back,
                    } => {
                        let ended = lighthouse.lock().unwrap_or_else(PoisonError::into_inner).take();
                        // One that is away already comes back by itself.
                        if ended.is_none() {
                            return;
                        }
                        job.net.end(LIGHTHOUSE, silently);
                        drop(ended);
                        tokio::time::sleep(away).await;
                        if set_back && job.scenario.has_disk {
                            set_wall(Some(Duration::from_secs(WALL / 2)));
                        }
                        let again = start_lighthouse(&job, &disk, false);
                        *lighthouse.lock().unwrap_or_else(PoisonError::into_inner) = Some(again);
                        job.note(|| "the lighthouse is back".to_string());
                    }
                    fault => job.befall(fault, &disk).await,
                }
            }));
        }
        for end in ends {
            let _ = end.await;
        }
        self.note(|| "the faults are over".to_string());
        let mut outcome = self.recovers().await;
        // What only a replica had that is lost for good is given up by the operator's word, who is told so, and by nothing else.
        let asks = |line: &String| line.contains("--accept-rollback");
        if outcome.is_err() && self.scenario.lost_for_good().is_some() && self.state().trace.iter().any(asks)
        {
            self.net.end(LIGHTHOUSE, false);
            drop(lighthouse.lock().unwrap_or_else(PoisonError::into_inner).take());
            let again = start_lighthouse(self, &disk, true);
            self.note(|| "the lighthouse is back, with --accept-rollback".to_string());
            outcome = self.recovers().await;
            drop(again);
        }
        if let Err(text) = outcome {
            self.violate(text);
        }
    }

    async fn befall(&self, fault: Fault, disk: &Plate) {
        match fault {
            Fault::Kill {
                slot,
                rank,
                silently,
                for_good,
            } => {
                if for_good {
                    self.state().lost.push(slot);
                }
                self.net.end(&host_of(slot, rank), silently);
                if !silently {
                    self.groups.leave(&host_of(slot, rank), None, "it was killed");
                }
                self.running(slot).kill(rank);
            }
            Fault::Cut { a, b, lasts } => {
                self.net.set_cut(&a, &b, a != b);
                tokio::time::sleep(lasts).await;
                self.net.set_cut(&a, &b, false);
            }
            Fault::Hold { host, lasts } => {
                self.net.set_held(&host, true);
                tokio::time::sleep(lasts).await;
                self.net.set_held(&host, false);
            }
            Fault::Lose { picks } => picks.into_iter().for_each(|pick| self.net.lose_one(pick)),
            Fault::Hang { slot, rank, lasts } => {
                self.running(slot).hang(rank, clock::now() + lasts);
                tokio::time::sleep(lasts).await;
            }
            Fault::FullDisk { lasts } => {
                disk.set_full(true);
                tokio::time::sleep(lasts).await;
                disk.set_full(false);
            }
            Fault::Lighthouse { .. } => {}
        }
    }

    /// All commit again. Errors: what does not go on.
    async fn recovers(&self) -> Result<(), String> {
        self.groups.settle();
        let Scenario { replicas, ranks, .. } = self.scenario;
        let mut since = vec![vec![0; ranks as usize]; replicas];
        if let Some(lost) = self.scenario.lost_for_good() {
            since[lost].fill(GOES_ON);
        }
        self.state().since = since;
        let until = clock::now() + RECOVERY;
        loop {
            tokio::time::sleep(Duration::from_millis(500)).await;
            let state = self.state();
            let goes_on = state.since.iter().flatten().all(|commits| *commits >= GOES_ON);
            let is_broken = state.violation.is_some();
            let since = format!("{:?}", state.since);
            drop(state);
            // Without a stream a replica commits as well, and hears of deaths by time-outs alone.
            let deaf: Vec<usize> = (0..replicas)
                .filter(|&slot| !self.is_lost_for_good(slot) && !self.running(slot).is_attached())
                .collect();
            if is_broken || goes_on && deaf.is_empty() {
                return Ok(());
            }
            if clock::now() >= until {
                return Err(format!(
                    "liveness: {RECOVERY:?} after the last fault the ranks have committed {since} steps, and the replicas {deaf:?} have no stream"
                ));
            }
        }
    }
}
