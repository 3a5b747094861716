//! A replica far behind fetches the state outside the group: the others go on committing meanwhile.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use checkpoint::StateDict;
use coordination::{LighthouseConfig, LighthouseServer};
use ftcore::{GroupOptions, ReduceOp, Result, Tensor, deadline_in};
use oxccl_manager::{Manager, ManagerConfig, Replica, State};

fn soon() -> Instant {
    deadline_in(Duration::from_secs(60))
}

/// A number that counts steps. Its first load takes until the others have committed some more.
struct Model {
    steps: f32,
    loads: usize,
    others: Arc<AtomicUsize>,
}

impl Model {
    fn new(others: &Arc<AtomicUsize>) -> Self {
        Self {
            steps: 0.0,
            loads: 0,
            others: others.clone(),
        }
    }
}

impl State for Model {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        out.insert_f32("steps", &[1], &[self.steps])
    }
    fn load(&mut self, from: &StateDict) -> Result<()> {
        self.steps = from.get_f32_shaped("steps", &[1])?[0];
        self.loads += 1;
        let (begun, until) = (self.others.load(Ordering::SeqCst), soon());
        // At step 0 all are loaded from one of them, while the others wait.
        while self.loads == 1 && self.steps > 0.0 && self.others.load(Ordering::SeqCst) < begun + 10 {
            assert!(Instant::now() < until, "the others wait for this replica");
            std::thread::yield_now();
        }
        Ok(())
    }
}

fn manager(name: &str, lighthouse: &str) -> Manager {
    let group = backend_gloo::GlooGroup::new(name, GroupOptions::default()).unwrap();
    let mut config = ManagerConfig::new(name, lighthouse);
    config.timeout = Duration::from_secs(60);
    Manager::new(Arc::new(group), config).unwrap()
}

#[test]
fn members_go_on_committing_while_a_joiner_takes_its_state_and_it_ends_as_one_of_them() {
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
    let (commits, joined) = (Arc::new(AtomicUsize::new(0)), AtomicBool::new(false));
    let run = |m: &mut Manager, state: &mut Model| {
        let members = m.start_quorum(state, soon()).unwrap().members.len();
        let sum = m
            .all_reduce(vec![Tensor::from_vec(vec![1.0f32])], ReduceOp::Avg)
            .take();
        if !m.should_commit(soon()).unwrap() {
            return None;
        }
        state.steps += sum.unwrap().into_tensor().unwrap().as_slice::<f32>().unwrap()[0];
        Some(members)
    };
    std::thread::scope(|scope| {
        let old = [0, 1].map(|i| {
            let (url, commits, joined, run) = (&url, &commits, &joined, &run);
            scope.spawn(move || {
                let mut m = manager(&format!("r{i}"), url);
                let mut state = Model::new(commits);
                while !joined.load(Ordering::SeqCst) {
                    if run(&mut m, &mut state).is_some() {
                        commits.fetch_add(1, Ordering::SeqCst);
                    }
                }
                assert_eq!(state.steps, m.current_step().0 as f32);
                m.leave(soon()).unwrap();
            })
        });
        while commits.load(Ordering::SeqCst) < 10 {
            assert!(old.iter().all(|h| !h.is_finished()), "a member ended early");
            std::thread::yield_now();
        }
        let mut new = manager("r2", &url);
        let mut state = Model::new(&commits);
        // It is one of them, and stays one.
        for _ in 0..3 {
            while run(&mut new, &mut state) != Some(3) {}
        }
        assert_eq!(state.steps, new.current_step().0 as f32);
        assert!(
            state.loads > 1,
            "the steps that it missed meanwhile were taken as a change of the state"
        );
        joined.store(true, Ordering::SeqCst);
        new.leave(soon()).unwrap();
    });
}
