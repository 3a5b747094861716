//! The way between the ranks of a replica breaks at the worst moment: a vote is decided, and its answer is lost.

#![allow(clippy::unwrap_used, reason = "a failure here is a failed test")]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use checkpoint::StateDict;
use coordination::{LighthouseConfig, LighthouseServer};
use ftcore::{GroupOptions, InMemoryStore, ReduceOp, Result, Step, Store, Tensor, deadline_in};
use oxccl_manager::{Manager, ManagerConfig, Replica, State};

/// Under it stands where rank 0 is.
const KEY: &str = "oxccl/manager";

fn soon() -> Instant {
    deadline_in(Duration::from_secs(60))
}

struct Nothing;

impl State for Nothing {
    fn save(&self, _: &mut StateDict) -> Result<()> {
        Ok(())
    }
    fn load(&mut self, _: &StateDict) -> Result<()> {
        Ok(())
    }
}

/// A line to `target` that can lose what comes back, and be cut.
struct Line {
    url: String,
    is_deaf: Arc<AtomicBool>,
    ends: Arc<Mutex<Vec<TcpStream>>>,
}

impl Line {
    fn to(target: &str) -> Self {
        let target = target.strip_prefix("http://").unwrap().to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (is_deaf, ends) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let (deaf_there, ends_there) = (is_deaf.clone(), ends.clone());
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let Ok(far) = TcpStream::connect(&target) else {
                    continue;
                };
                // Before a byte crosses: who has seen one may cut this connection.
                let both = [&near, &far].map(|end| end.try_clone().unwrap());
                ends_there.lock().unwrap().extend(both);
                let back = (far.try_clone().unwrap(), near.try_clone().unwrap());
                for ((mut from, mut to), is_answer) in [((near, far), false), (back, true)] {
                    let is_deaf = deaf_there.clone();
                    std::thread::spawn(move || {
                        let mut bytes = [0; 4096];
                        while let Ok(n @ 1..) = from.read(&mut bytes) {
                            let is_lost = is_answer && is_deaf.load(Ordering::SeqCst);
                            if !is_lost && to.write_all(&bytes[..n]).is_err() {
                                break;
                            }
                        }
                        let _ = to.shutdown(Shutdown::Both);
                    });
                }
            }
        });
        Self { url, is_deaf, ends }
    }

    fn lose_answers(&self) {
        self.is_deaf.store(true, Ordering::SeqCst);
    }

    /// Ends the connections; new ones are whole.
    fn cut(&self) {
        for end in self.ends.lock().unwrap().drain(..) {
            let _ = end.shutdown(Shutdown::Both);
        }
        self.is_deaf.store(false, Ordering::SeqCst);
    }
}

fn rank(group_rank: u32, lighthouse: &str, meet: Arc<dyn Store>) -> Manager {
    let group = backend_gloo::GlooGroup::new("r0", GroupOptions::default()).unwrap();
    let mut config = ManagerConfig::new("r0", lighthouse);
    config.group_rank = group_rank;
    config.group_world_size = 2;
    config.replica_store = Some(meet);
    Manager::new(Arc::new(group), config).unwrap()
}

fn begin(m: &mut Manager) {
    m.start_quorum(&mut Nothing, soon()).unwrap();
    m.all_reduce(vec![Tensor::from_vec(vec![1.0f32; 10])], ReduceOp::Sum)
        .take()
        .unwrap();
}

#[test]
fn a_vote_whose_answer_was_lost_is_cast_again_and_the_ranks_stay_at_one_step() {
    let lighthouse = LighthouseServer::start(LighthouseConfig {
        bind: "127.0.0.1:0".into(),
        ..LighthouseConfig::default()
    })
    .unwrap();
    let url = lighthouse.address();
    let meet = Arc::new(InMemoryStore::new());
    let mut first = rank(0, &url, meet.clone());
    // Rank 1 is told an address with the line in between.
    let told = String::from_utf8(meet.get(KEY, soon()).unwrap()).unwrap();
    let (address, id) = told.split_once('\n').unwrap();
    let line = Line::to(address);
    let other_meet = Arc::new(InMemoryStore::new());
    let told = format!("{}\n{id}", line.url);
    other_meet.set(KEY, told.as_bytes(), soon()).unwrap();
    let mut second = rank(1, &url, other_meet);

    std::thread::scope(|scope| {
        let begun = scope.spawn(|| begin(&mut second));
        begin(&mut first);
        begun.join().unwrap();
    });
    line.lose_answers();
    std::thread::scope(|scope| {
        let vote = scope.spawn(|| second.should_commit(soon()));
        // Decided, so the other vote has arrived; its answer is lost for good.
        assert!(first.should_commit(soon()).unwrap());
        line.cut();
        assert!(vote.join().unwrap().unwrap());
    });
    assert_eq!((first.current_step(), second.current_step()), (Step(1), Step(1)));
    std::thread::scope(|scope| {
        let next = scope.spawn(|| {
            begin(&mut second);
            second.should_commit(soon()).unwrap()
        });
        begin(&mut first);
        assert!(first.should_commit(soon()).unwrap());
        assert!(next.join().unwrap());
    });
    second.leave(soon()).unwrap();
    first.leave(soon()).unwrap();
}
