//! Healing through real managers: a replica that joins two others takes its state from both.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use checkpoint::StateDict;
use coordination::{LighthouseConfig, LighthouseServer};
use ftcore::{GroupOptions, ReduceOp, Result, Step, Tensor, deadline_in};
use oxccl_manager::{Manager, ManagerConfig, Replica, State};

fn soon() -> Instant {
    deadline_in(Duration::from_secs(60))
}

/// A number that counts steps, beside weights that never change; counts how often it was copied for others.
struct Model {
    frozen: Vec<f32>,
    steps: f32,
    saved: Arc<AtomicUsize>,
}

impl State for Model {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        self.saved.fetch_add(1, Ordering::SeqCst);
        out.insert_f32("frozen", &[self.frozen.len()], &self.frozen)?;
        out.insert_f32("steps", &[1], &[self.steps])
    }
    fn load(&mut self, from: &StateDict) -> Result<()> {
        self.frozen = from.get_f32_shaped("frozen", &[self.frozen.len()])?;
        self.steps = from.get_f32_shaped("steps", &[1])?[0];
        Ok(())
    }
}

fn manager(name: &str, lighthouse: &str) -> Manager {
    let group = backend_gloo::GlooGroup::new(name, GroupOptions::default()).unwrap();
    let mut config = ManagerConfig::new(name, lighthouse);
    config.timeout = Duration::from_secs(20);
    Manager::new(Arc::new(group), config).unwrap()
}

/// One attempt at a step that adds 1.
fn step(m: &mut Manager, state: &mut Model) -> bool {
    m.start_quorum(state, soon()).unwrap();
    let sum = m
        .all_reduce(vec![Tensor::from_vec(vec![1.0f32])], ReduceOp::Avg)
        .take();
    if !m.should_commit(soon()).unwrap() {
        return false;
    }
    state.steps += sum.unwrap().into_tensor().unwrap().as_slice::<f32>().unwrap()[0];
    true
}

#[test]
fn a_replica_that_joins_two_others_has_a_copy_made_by_each_and_ends_with_their_state() {
    let lighthouse = LighthouseServer::start(LighthouseConfig {
        bind: "127.0.0.1:0".into(),
        min_replicas: 1,
        initial_replicas: Some(2),
        join_timeout: Duration::from_secs(20),
        heartbeat_timeout: Duration::from_secs(60),
        ..LighthouseConfig::default()
    })
    .unwrap();
    let url = lighthouse.address();
    let frozen = |seed: f32| (0..100_000).map(|i| i as f32 * seed).collect::<Vec<_>>();
    let (warm, joined) = (AtomicUsize::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let old = [0, 1].map(|i| {
            let (url, warm, joined) = (&url, &warm, &joined);
            scope.spawn(move || {
                let mut m = manager(&format!("r{i}"), url);
                let saved = Arc::new(AtomicUsize::new(0));
                let mut state = Model {
                    frozen: frozen(2.0),
                    steps: 0.0,
                    saved: Arc::clone(&saved),
                };
                while m.current_step() < Step(3) {
                    step(&mut m, &mut state);
                }
                let before = saved.load(Ordering::SeqCst);
                warm.fetch_add(1, Ordering::SeqCst);
                while !joined.load(Ordering::SeqCst) {
                    step(&mut m, &mut state);
                }
                assert_eq!(state.steps, m.current_step().0 as f32);
                m.leave(soon()).unwrap();
                saved.load(Ordering::SeqCst) - before
            })
        });
        while warm.load(Ordering::SeqCst) < 2 {
            assert!(old.iter().all(|h| !h.is_finished()), "a source ended early");
            std::thread::yield_now();
        }
        let mut new = manager("r2", &url);
        let mut state = Model {
            frozen: frozen(0.0),
            steps: -1.0,
            saved: Arc::default(),
        };
        // A source that is between two states may cost an attempt.
        let healed = loop {
            let p = new.start_quorum(&mut state, soon()).unwrap();
            if let Some(healed) = p.healed {
                break healed;
            }
            let _ = new.should_commit(soon()).unwrap();
        };
        assert_eq!(state.steps, new.current_step().0 as f32);
        assert!(state.frozen == frozen(2.0), "the weights are not the sources'");
        assert!(healed.bytes > 400_000, "{healed:?}");
        joined.store(true, Ordering::SeqCst);
        new.leave(soon()).unwrap();
        for handle in old {
            assert!(handle.join().unwrap() > 0, "a source made no copy");
        }
    });
}

/// Says when it is being loaded, and looks for a while whether the other replica goes on meanwhile.
struct Slow {
    model: Model,
    loading: mpsc::Sender<()>,
    went_on: mpsc::Receiver<()>,
    was_left: Arc<AtomicBool>,
}

impl State for Slow {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        self.model.save(out)
    }
    fn load(&mut self, from: &StateDict) -> Result<()> {
        let _ = self.loading.send(());
        // Far longer than a vote takes.
        let told = self.went_on.recv_timeout(Duration::from_secs(1));
        self.was_left.store(told.is_ok(), Ordering::SeqCst);
        self.model.load(from)
    }
}

#[test]
fn a_round_without_data_is_not_over_while_a_replica_still_heals_into_it() {
    let lighthouse = LighthouseServer::start(LighthouseConfig {
        bind: "127.0.0.1:0".into(),
        min_replicas: 1,
        initial_replicas: Some(1),
        join_timeout: Duration::from_secs(20),
        heartbeat_timeout: Duration::from_secs(60),
        ..LighthouseConfig::default()
    })
    .unwrap();
    let url = lighthouse.address();
    let model = || Model {
        frozen: vec![1.0; 100],
        steps: 0.0,
        saved: Arc::default(),
    };
    let (loading, begins) = mpsc::channel();
    let (goes_on, went_on) = mpsc::channel();
    let was_left = Arc::new(AtomicBool::new(false));
    std::thread::scope(|scope| {
        let mut old = manager("r0", &url);
        let mut state = model();
        assert!(step(&mut old, &mut state) && step(&mut old, &mut state));
        let new = scope.spawn({
            let (was_left, url) = (Arc::clone(&was_left), &url);
            move || {
                let mut m = manager("r1", url);
                m.set_joins_at_once(true);
                let mut state = Slow {
                    model: model(),
                    loading,
                    went_on,
                    was_left,
                };
                m.start_quorum(&mut state, soon()).unwrap();
                let committed = m.should_commit(soon()).unwrap();
                m.leave(soon()).unwrap();
                (committed, state.model.steps)
            }
        });
        // Steps without data, as the closing round is one: the one that it heals into is the first of two members.
        while old.start_quorum(&mut state, soon()).unwrap().members.len() < 2 {
            assert!(old.should_commit(soon()).unwrap() || !new.is_finished());
        }
        begins.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!(old.should_commit(soon()).unwrap());
        let _ = goes_on.send(());
        old.leave(soon()).unwrap();
        assert_eq!(new.join().unwrap(), (true, state.steps));
    });
    assert!(
        !was_left.load(Ordering::SeqCst),
        "its source committed, and could have left, while it was still taking the state over"
    );
}
