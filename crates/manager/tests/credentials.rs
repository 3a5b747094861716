//! Replicas with folders of their own: they train, and one that comes later heals, all over TLS.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use checkpoint::StateDict;
use coordination::{LighthouseConfig, LighthouseServer};
use ftcore::{Credentials, ErrorKind, GroupOptions, ReduceOp, Result, Step, Tensor, deadline_in};
use oxccl_manager::{Manager, ManagerConfig, Replica, State};

fn soon() -> Instant {
    deadline_in(Duration::from_secs(60))
}

struct Number(f32);

impl State for Number {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        out.insert_f32("value", &[1], &[self.0])
    }

    fn load(&mut self, from: &StateDict) -> Result<()> {
        self.0 = from.get_f32("value")?[0];
        Ok(())
    }
}

fn lighthouse(job: &Arc<Credentials>) -> LighthouseServer {
    LighthouseServer::start(LighthouseConfig {
        bind: "127.0.0.1:0".into(),
        heartbeat_timeout: Duration::from_secs(60),
        credentials: vec![Arc::clone(job)],
        ..LighthouseConfig::default()
    })
    .unwrap()
}

fn job(folder: &Path) -> Arc<Credentials> {
    identity::create(folder, Some("demo")).unwrap();
    Credentials::load(folder).unwrap()
}

fn manager(name: &str, lighthouse: &str, credentials: Arc<Credentials>) -> Result<Manager> {
    let group = backend_gloo::GlooGroup::new(name, GroupOptions::default()).unwrap();
    let mut config = ManagerConfig::new(name, lighthouse);
    config.timeout = Duration::from_secs(20);
    config.connect_timeout = Duration::from_secs(5);
    config.credentials = Some(credentials);
    Manager::new(Arc::new(group), config)
}

/// One attempt at a step that adds the average of ones; true if it committed.
fn step(m: &mut Manager, state: &mut Number) -> bool {
    m.start_quorum(state, soon()).unwrap();
    let sum = m
        .all_reduce(vec![Tensor::from_vec(vec![1.0f32])], ReduceOp::Avg)
        .take();
    let committed = m.should_commit(soon()).unwrap();
    if committed {
        state.0 += sum.unwrap().into_tensor().unwrap().as_slice::<f32>().unwrap()[0];
    }
    committed
}

#[test]
fn replicas_with_folders_of_their_own_train_and_heal() {
    let dir = tempfile::tempdir().unwrap();
    let all = job(&dir.path().join("all"));
    let lighthouse = lighthouse(&all);
    let url = lighthouse.address();
    let own = |name: &str| {
        let folder = dir.path().join(name);
        identity::issue(all.folder(), name, &folder).unwrap();
        Credentials::load(&folder).unwrap()
    };
    let mut old = manager("r0", &url, own("r0")).unwrap();
    let mut state = Number(0.0);
    for _ in 0..3 {
        assert!(step(&mut old, &mut state));
    }
    let healed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut new = manager("r1", &url, own("r1")).unwrap();
            let mut state = Number(77.0);
            while new.current_step() < Step(3) || !step(&mut new, &mut state) {
                step(&mut new, &mut state);
            }
            assert_eq!(state.0, new.current_step().0 as f32);
            healed.store(true, Ordering::SeqCst);
            new.leave(soon()).unwrap();
        });
        while !healed.load(Ordering::SeqCst) {
            step(&mut old, &mut state);
        }
    });
    assert_eq!(state.0, old.current_step().0 as f32);
}

#[test]
fn a_replica_with_anothers_folder_or_another_jobs_does_not_begin() {
    let dir = tempfile::tempdir().unwrap();
    let all = job(&dir.path().join("all"));
    let lighthouse = lighthouse(&all);
    identity::issue(all.folder(), "r0", &dir.path().join("r0")).unwrap();
    let own = Credentials::load(&dir.path().join("r0")).unwrap();
    let e = manager("r1", &lighthouse.address(), own).err().unwrap();
    assert_eq!(e.kind(), ErrorKind::InvalidArgument);
    assert!(
        e.message().contains("replica 'r1'") && e.message().contains("replica 'r0'"),
        "{e}"
    );
    let other = job(&dir.path().join("other"));
    let e = manager("r0", &lighthouse.address(), other).err().unwrap();
    assert_eq!(e.kind(), ErrorKind::Unavailable);
    assert!(e.message().contains("certificate is not of job demo"), "{e}");
}
