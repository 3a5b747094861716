//! Replicas that take steps together without end: a manager and a gloo group each, on threads of this process. One that dies drops all of it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use oxccl::checkpoint::StateDict;
use oxccl::coordination::{LighthouseConfig, LighthouseServer};
use oxccl::core::{GroupOptions, ReduceOp, Result, Tensor};
use oxccl::manager::{Manager, ManagerConfig, Replica, State};

use crate::http::{TIME_LIMIT, soon};

/// Starts a lighthouse whose quorums have two members at least.
pub(crate) fn lighthouse(bind: &str) -> LighthouseServer {
    LighthouseServer::start(LighthouseConfig {
        bind: bind.into(),
        min_replicas: 2,
        join_timeout: Duration::from_secs(5),
        heartbeat_timeout: TIME_LIMIT,
        ..LighthouseConfig::default()
    })
    .unwrap()
}

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

const GOES_ON: u8 = 0;
const LEAVES: u8 = 1;
const DIES: u8 = 2;

pub(crate) struct Job {
    lighthouse: String,
    /// The folder of the replicas' event logs, if they write any.
    pub(crate) events: Option<PathBuf>,
    replicas: BTreeMap<String, (Arc<AtomicU8>, JoinHandle<Result<()>>)>,
}

impl Job {
    pub(crate) fn new(lighthouse: &LighthouseServer) -> Self {
        Self {
            lighthouse: lighthouse.address(),
            events: None,
            replicas: BTreeMap::new(),
        }
    }

    /// Starts a replica of that name.
    pub(crate) fn start(&mut self, name: &str) {
        let wish = Arc::new(AtomicU8::new(GOES_ON));
        let wished = wish.clone();
        let mut config = ManagerConfig::new(name.to_string(), self.lighthouse.clone());
        config.event_log.clone_from(&self.events);
        let thread = std::thread::Builder::new()
            .name(format!("ox-test-{name}"))
            .spawn(move || train(config, &wished))
            .unwrap();
        self.replicas.insert(name.to_string(), (wish, thread));
    }

    /// Ends it without a word: its servers go with it. Waits until it is gone.
    pub(crate) fn kill(&mut self, name: &str) {
        let (wish, thread) = self.replicas.remove(name).unwrap();
        wish.store(DIES, Ordering::Relaxed);
        thread.join().unwrap().unwrap();
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for (wish, _) in self.replicas.values() {
            wish.store(LEAVES, Ordering::Relaxed);
        }
        for (name, (_, thread)) in std::mem::take(&mut self.replicas) {
            if let Ok(Err(error)) = thread.join() {
                println!("replica {name} ended with {error}");
            }
        }
    }
}

fn train(mut config: ManagerConfig, wish: &AtomicU8) -> Result<()> {
    let group = oxccl::gloo::GlooGroup::new(&config.name, GroupOptions::default())?;
    config.timeout = Duration::from_secs(20);
    config.init_sync = false;
    let mut manager = Manager::new(Arc::new(group), config)?;
    let mut state = Sum(0.0);
    while wish.load(Ordering::Relaxed) == GOES_ON {
        let until = soon().min(std::time::Instant::now() + Duration::from_secs(2));
        // Alone it waits for another one, and looks at its wish now and then.
        if manager.start_quorum(&mut state, until).is_err() {
            continue;
        }
        let work = manager.all_reduce(vec![Tensor::from_vec(vec![1.0f32; 256])], ReduceOp::Avg);
        if manager.should_commit(soon())? {
            state.0 += work.take()?.into_tensor()?.as_slice::<f32>()?[0];
        }
        // The computation of a step.
        std::thread::park_timeout(Duration::from_millis(20));
    }
    if wish.load(Ordering::Relaxed) == LEAVES {
        manager.leave(soon())?;
    }
    Ok(())
}
