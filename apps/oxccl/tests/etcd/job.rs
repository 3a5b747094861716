//! Replicas that take steps together without end: a manager and a gloo group each, on threads of this process.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ftcore::Epoch;
use oxccl::checkpoint::StateDict;
use oxccl::core::{GroupOptions, ReduceOp, Result, Tensor};
use oxccl::manager::{Manager, ManagerConfig, Replica, State};

use crate::cluster::{TIME_LIMIT, soon};

/// A step that has committed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Commit {
    pub(crate) replica: usize,
    pub(crate) step: i64,
    pub(crate) epoch: Epoch,
    pub(crate) sum: f32,
    pub(crate) at: Instant,
}

/// What all replicas must hold alike.
struct Sum(f32);

impl State for Sum {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        out.insert_f32("sum", &[1], &[self.0])
    }
    fn load(&mut self, from: &StateDict) -> Result<()> {
        self.0 = from.get_f32("sum")?[0];
        Ok(())
    }
}

pub(crate) struct Job {
    replicas: Vec<JoinHandle<Result<usize>>>,
    /// The step with which the job ends.
    last: Arc<AtomicI64>,
    commits: Receiver<Commit>,
    /// By replica, its newest.
    newest: Vec<Option<Commit>>,
    /// By step, what its first commit held.
    sums: BTreeMap<i64, f32>,
}

impl Job {
    /// Starts `count` replicas of the job at `lighthouses`.
    pub(crate) fn start(count: usize, lighthouses: &str) -> Self {
        let (says, commits) = channel();
        let last = Arc::new(AtomicI64::new(i64::MAX));
        let replicas = (0..count).map(|i| {
            let (says, last, url) = (says.clone(), last.clone(), lighthouses.to_string());
            std::thread::Builder::new()
                .name(format!("ox-test-{i}"))
                .spawn(move || train(i, &url, &last, &says))
                .unwrap()
        });
        Self {
            replicas: replicas.collect(),
            last,
            commits,
            newest: vec![None; count],
            sums: BTreeMap::new(),
        }
    }

    /// The next commit of any replica. Each replica's steps are without gaps, and equal for all.
    fn next(&mut self) -> Commit {
        let Ok(commit) = self.commits.recv_timeout(TIME_LIMIT) else {
            let ended = self.replicas.iter().any(JoinHandle::is_finished);
            panic!(
                "no commit within {TIME_LIMIT:?} (a replica ended: {ended}); the last: {:?}",
                self.newest
            );
        };
        let before = self.newest[commit.replica].replace(commit);
        if let Some(before) = before {
            assert_eq!(commit.step, before.step + 1, "{commit:?} after {before:?}");
        }
        let sum = *self.sums.entry(commit.step).or_insert(commit.sum);
        assert_eq!(commit.sum, sum, "two states for a step: {commit:?}");
        commit
    }

    /// Waits until every replica has taken `steps` more steps.
    pub(crate) fn run(&mut self, steps: i64) {
        let from: Vec<i64> = self.newest.iter().map(|c| c.map_or(0, |c| c.step)).collect();
        let done = |newest: &[Option<Commit>]| {
            let mut pairs = newest.iter().zip(&from);
            pairs.all(|(c, from)| c.is_some_and(|c| c.step >= from + steps))
        };
        while !done(&self.newest) {
            self.next();
        }
    }

    /// Until the first commit in an epoch that begins from now on; every replica gets there. What the present epoch still commits needs no lighthouse.
    pub(crate) fn first_of_next_epoch(&mut self) -> Commit {
        let epoch = self.newest.iter().flatten().map(|c| c.epoch).max().unwrap();
        loop {
            let commit = self.next();
            if commit.epoch > epoch {
                return commit;
            }
        }
    }

    /// Ends the job in order. No replica may have ended before, healed or begun anew.
    pub(crate) fn finish(mut self) -> i64 {
        let step = self.newest.iter().flatten().map(|c| c.step).max().unwrap() + 5;
        self.last.store(step, Ordering::Relaxed);
        while self.newest.iter().any(|c| c.is_none_or(|c| c.step < step)) {
            self.next();
        }
        for replica in self.replicas {
            let heals = replica.join().unwrap().unwrap();
            assert_eq!(heals, 0, "a replica healed: its state was not the job's");
        }
        step
    }
}

/// One replica; gives back how often it healed.
fn train(replica: usize, lighthouses: &str, last: &AtomicI64, says: &Sender<Commit>) -> Result<usize> {
    let name = format!("r{replica}");
    let group = oxccl::gloo::GlooGroup::new(&name, GroupOptions::default())?;
    let mut config = ManagerConfig::new(name, lighthouses);
    config.min_replicas = 2;
    config.timeout = Duration::from_secs(20);
    // All begin with the same state.
    config.init_sync = false;
    let mut manager = Manager::new(Arc::new(group), config)?;
    let mut state = Sum(0.0);
    let mut heals = 0;
    while manager.current_step().0 < last.load(Ordering::Relaxed) {
        let participation = manager.start_quorum(&mut state, soon())?;
        heals += usize::from(participation.healed.is_some());
        let own = (manager.current_step().0 % 7) as f32;
        let work = manager.all_reduce(vec![Tensor::from_vec(vec![own; 10])], ReduceOp::Avg);
        if manager.should_commit(soon())? {
            state.0 += work.take()?.into_tensor()?.as_slice::<f32>()?[0];
            let _ = says.send(Commit {
                replica,
                step: manager.current_step().0,
                epoch: participation.epoch,
                sum: state.0,
                at: Instant::now(),
            });
        }
        // The computation of a step.
        std::thread::park_timeout(Duration::from_millis(5));
    }
    manager.leave(soon())?;
    Ok(heals)
}
