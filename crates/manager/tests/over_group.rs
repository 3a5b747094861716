//! Healing over the process group of the new epoch, through real managers and gloo groups.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a failure here is a failed test"
)]

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use checkpoint::StateDict;
use coordination::{LighthouseConfig, LighthouseServer};
use ftcore::{
    Capabilities, Checked, Completion, ErrorKind, Failed, Feature, GroupOptions, OpKind, ProcessGroup,
    ReduceOp, Rejected, Result, SubmitOptions, TcpStore, TcpStoreServer, Tensor, Work, Wrapper, deadline_in,
};
use oxccl_manager::{HealOver, Manager, ManagerConfig, Participation, Replica, State};

fn soon() -> Instant {
    deadline_in(Duration::from_secs(60))
}

fn lighthouse(initial: usize) -> LighthouseServer {
    LighthouseServer::start(LighthouseConfig {
        bind: "127.0.0.1:0".into(),
        min_replicas: 1,
        initial_replicas: Some(initial),
        join_timeout: Duration::from_secs(20),
        heartbeat_timeout: Duration::from_secs(60),
        ..LighthouseConfig::default()
    })
    .unwrap()
}

/// Weights that never change and are shared with their snapshots, a number that counts steps, and one that is the replica's own.
struct Model {
    frozen: Arc<Tensor>,
    steps: f32,
    own: f32,
    loads: usize,
}

impl Model {
    fn new(elements: usize, own: f32) -> Self {
        let values: Vec<f32> = (0..elements).map(|i| i as f32 * own).collect();
        Self {
            frozen: Arc::new(Tensor::from_vec(values)),
            steps: 0.0,
            own,
            loads: 0,
        }
    }
}

impl State for Model {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        out.insert_shared("frozen", &self.frozen)?;
        out.insert_f32("steps", &[1], &[self.steps])?;
        out.insert_f32("own", &[1], &[self.own])
    }
    fn load(&mut self, from: &StateDict) -> Result<()> {
        self.frozen = Arc::new(Tensor::from_vec(from.get_f32("frozen")?));
        self.steps = from.get_f32_shaped("steps", &[1])?[0];
        self.own = from.get_f32_shaped("own", &[1])?[0];
        self.loads += 1;
        Ok(())
    }
}

fn gloo(transport: &str) -> Arc<backend_gloo::GlooGroup> {
    let mut options = GroupOptions::default();
    options.hints.insert("transport".into(), transport.into());
    Arc::new(backend_gloo::GlooGroup::new("g", options).unwrap())
}

fn config(name: &str, lighthouse: &str, heal_over: HealOver) -> ManagerConfig {
    ManagerConfig {
        timeout: Duration::from_secs(30),
        heal_over,
        ..ManagerConfig::new(name, lighthouse)
    }
}

fn manager(name: &str, lighthouse: &str, transport: &str) -> Manager {
    Manager::new(gloo(transport), config(name, lighthouse, HealOver::Group)).unwrap()
}

/// One attempt at a step that adds 1: the participation if it committed.
fn step(m: &mut Manager, state: &mut Model) -> Result<Option<Participation>> {
    let p = m.start_quorum(state, soon())?;
    let sum = m
        .all_reduce(vec![Tensor::from_vec(vec![1.0f32])], ReduceOp::Avg)
        .take();
    if !m.should_commit(soon())? {
        return Ok(None);
    }
    state.steps += sum?.into_tensor()?.as_slice::<f32>()?[0];
    Ok(Some(p))
}

/// Counts steps until it is told to stop; the state that it ends with.
fn member(mut m: Manager, mut state: Model, commits: &AtomicUsize, stop: &AtomicBool) -> Model {
    while !stop.load(Ordering::SeqCst) {
        if step(&mut m, &mut state).unwrap().is_some() {
            commits.fetch_add(1, Ordering::SeqCst);
        }
    }
    m.leave(soon()).unwrap();
    state
}

fn until(what: &str, happened: impl Fn() -> bool) {
    let deadline = soon();
    while !happened() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        std::thread::yield_now();
    }
}

/// Steps of a replica that joins, until it has healed and committed.
fn joins(m: &mut Manager, state: &mut Model) -> Participation {
    m.set_joins_at_once(true);
    let deadline = soon();
    loop {
        assert!(Instant::now() < deadline, "it does not join");
        if let Some(p) = step(m, state).unwrap()
            && state.loads > 0
        {
            return p;
        }
    }
}

#[test]
fn a_member_gets_its_state_over_the_group_bit_for_bit_and_the_others_go_on_with_it() {
    for transport in ["shm", "tcp"] {
        let lighthouse = lighthouse(2);
        let url = lighthouse.address();
        let (commits, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let old = ["a", "b"].map(|name| {
                let (url, commits, stop) = (&url, &commits, &stop);
                scope.spawn(move || {
                    member(
                        manager(name, url, transport),
                        Model::new(500_000, 2.0),
                        commits,
                        stop,
                    )
                })
            });
            until("steps of two", || commits.load(Ordering::SeqCst) > 6);
            let mut new = manager("c", &url, transport);
            let mut state = Model::new(500_000, 0.0);
            let p = joins(&mut new, &mut state);
            let healed = p.healed.expect("it healed into the step that it committed first");
            assert!(healed.bytes > 2_000_000, "{healed:?}");
            assert!(
                new.traffic().received > 2_000_000,
                "the state did not come over the group: {:?}",
                new.traffic()
            );
            stop.store(true, Ordering::SeqCst);
            new.leave(soon()).unwrap();
            let old = old.map(|h| h.join().unwrap());
            assert_eq!(state.frozen.bytes(), old[0].frozen.bytes());
            assert_eq!((state.own, state.frozen.count()), (2.0, 500_000));
        });
    }
}

#[test]
fn a_replica_that_heals_over_http_is_refused_by_name_where_the_others_heal_over_the_group() {
    for (theirs, mine) in [
        (HealOver::Group, HealOver::Http),
        (HealOver::Http, HealOver::Group),
    ] {
        let lighthouse = lighthouse(1);
        let url = lighthouse.address();
        let (commits, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let (url, commits, stop) = (&url, &commits, &stop);
            let old = scope.spawn(move || {
                let m = Manager::new(gloo("auto"), config("a", url, theirs)).unwrap();
                member(m, Model::new(10, 2.0), commits, stop)
            });
            until("steps of one", || commits.load(Ordering::SeqCst) > 3);
            let mut new = Manager::new(gloo("auto"), config("b", url, mine)).unwrap();
            new.set_joins_at_once(true);
            let e = new.start_quorum(&mut Model::new(10, 0.0), soon()).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}");
            for part in [
                "replica 'b:",
                "replica 'a:",
                "over HTTP",
                "over the process group",
                "heal_over",
            ] {
                assert!(e.to_string().contains(part), "{part} is not in: {e}");
            }
            drop(new);
            let before = commits.load(Ordering::SeqCst);
            until("the other goes on", || {
                commits.load(Ordering::SeqCst) > before + 3
            });
            stop.store(true, Ordering::SeqCst);
            old.join().unwrap();
        });
    }
}

#[test]
fn a_spare_fetches_over_http_and_takes_the_last_change_over_the_group() {
    let lighthouse = lighthouse(2);
    let url = lighthouse.address();
    let (commits, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let old = ["a", "b"].map(|name| {
            let (url, commits, stop) = (&url, &commits, &stop);
            scope.spawn(move || member(manager(name, url, "auto"), Model::new(1000, 2.0), commits, stop))
        });
        until("steps of two", || commits.load(Ordering::SeqCst) > 10);
        let mut new = manager("c", &url, "auto");
        let mut state = Model::new(1000, 0.0);
        let deadline = soon();
        while step(&mut new, &mut state).unwrap().is_none() {
            assert!(Instant::now() < deadline, "it does not join");
        }
        // As a spare, which is in no group, and as a member.
        assert!(state.loads > 1, "{}", state.loads);
        assert_eq!((state.own, state.steps), (2.0, new.current_step().0 as f32));
        stop.store(true, Ordering::SeqCst);
        new.leave(soon()).unwrap();
        for handle in old {
            handle.join().unwrap();
        }
    });
}

/// A replica of two ranks, each on a thread: their states at the end.
fn two_ranks(name: &str, url: &str, run: impl Fn(u32, Manager) -> Model + Sync) -> [Model; 2] {
    let store = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let address = store.local_addr().to_string();
    std::thread::scope(|scope| {
        let (run, address) = (&run, &address);
        let rank = move |group_rank: u32| {
            let mut config = config(name, url, HealOver::Group);
            (config.group_rank, config.group_world_size) = (group_rank, 2);
            config.replica_store = Some(Arc::new(TcpStore::connect(address, soon()).unwrap()));
            run(group_rank, Manager::new(gloo("auto"), config).unwrap())
        };
        let ranks = [0, 1].map(|group_rank| scope.spawn(move || rank(group_rank)));
        ranks.map(|r| r.join().unwrap())
    })
}

/// Sets the flag when it goes.
struct Sets<'a>(&'a AtomicBool);

impl Drop for Sets<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[test]
fn both_ranks_of_a_replica_heal_over_their_own_group_from_the_same_source() {
    let lighthouse = lighthouse(2);
    let url = lighthouse.address();
    let (commits, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let (url, commits, stop) = (&url, &commits, &stop);
        let old = [("a", 2.0), ("b", 3.0)].map(|(name, own)| {
            scope.spawn(move || {
                two_ranks(name, url, |rank, mut m| {
                    let mut state = Model::new(100, own + rank as f32 / 10.0);
                    while step(&mut m, &mut state).unwrap().is_none() {}
                    // Parts of a state may be a replica's own: after the initial sync they are again.
                    state.own = own + rank as f32 / 10.0;
                    // Ranks of one replica stop together, after a step that both know.
                    while !(stop.load(Ordering::SeqCst) && m.current_step().0 % 50 == 0) {
                        if step(&mut m, &mut state).unwrap().is_some() {
                            commits.fetch_add(1, Ordering::SeqCst);
                        }
                    }
                    state
                })
            })
        });
        // Also if what follows panics: the scope waits for them.
        let ends = Sets(stop);
        until("steps of two", || commits.load(Ordering::SeqCst) > 20);
        let new = two_ranks("c", url, |_, mut m| {
            let mut state = Model::new(100, 0.0);
            joins(&mut m, &mut state);
            // In order: the other rank may not have read its last answer yet.
            m.leave(soon()).unwrap();
            state
        });
        drop(ends);
        let own = new.map(|s| s.own);
        assert!(own == [2.0, 2.1] || own == [3.0, 3.1], "{own:?}");
        drop(old.map(|h| h.join()));
    });
}

/// The address of the lighthouse and the name of the replica, for [`a_process_of_a_replica`].
const PROCESS: &str = "OXCCL_TEST_OVER_GROUP";
/// 64 MiB: far more than what sockets hold.
const LARGE: usize = 16 << 20;

/// Not a test: the process of a replica, which another test starts and kills.
#[test]
#[ignore = "a process for another test"]
fn a_process_of_a_replica() {
    let Ok(told) = std::env::var(PROCESS) else {
        return;
    };
    let (url, name) = told.split_once(' ').unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let (stops, commits) = (stop.clone(), Arc::new(AtomicUsize::new(0)));
    let counts = commits.clone();
    std::thread::spawn(move || {
        until("three steps", || counts.load(Ordering::SeqCst) > 3);
        println!("\nready");
        std::io::stdout().flush().unwrap();
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        stops.store(true, Ordering::SeqCst);
    });
    member(manager(name, url, "tcp"), Model::new(LARGE, 2.0), &commits, &stop);
}

struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn process(url: &str, name: &str) -> Process {
    let child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "over_group::a_process_of_a_replica",
            "--ignored",
            "--nocapture",
        ])
        .env(PROCESS, format!("{url} {name}"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    Process(child.unwrap())
}

#[test]
fn a_source_killed_while_it_sends_costs_an_attempt_and_the_state_comes_from_another() {
    let lighthouse = lighthouse(2);
    let url = lighthouse.address();
    let mut old = ["a", "b"].map(|name| process(&url, name));
    for process in &mut old {
        let lines = BufReader::new(process.0.stdout.take().unwrap()).lines();
        assert!(
            lines.map_while(std::result::Result::ok).any(|l| l == "ready"),
            "it does not train"
        );
    }
    let [mut a, b] = old;
    let group = gloo("tcp");
    let mut m = Manager::new(group.clone(), config("c", &url, HealOver::Group)).unwrap();
    m.set_joins_at_once(true);
    let mut state = Model::new(0, 0.0);
    let killed = AtomicBool::new(false);
    let lost = std::thread::scope(|scope| {
        let killed = &killed;
        scope.spawn(move || {
            // The first of the sources by name is the one that is asked.
            until("a part of the state", || group.traffic().received > 4 << 20);
            a.0.kill().unwrap();
            a.0.wait().unwrap();
            killed.store(true, Ordering::SeqCst);
        });
        let (mut lost, deadline) = (0, soon());
        while state.loads == 0 {
            assert!(Instant::now() < deadline, "it does not heal");
            m.start_quorum(&mut state, soon()).unwrap();
            if !m.should_commit(soon()).unwrap() {
                lost += 1;
            }
        }
        lost
    });
    assert!(
        killed.load(Ordering::SeqCst) && lost > 0,
        "the first heal was not disturbed ({lost} lost)"
    );
    assert_eq!(state.frozen.bytes(), Model::new(LARGE, 2.0).frozen.bytes());
    m.leave(soon()).unwrap();
    drop(b);
}

/// A gloo group that says that it lacks something.
struct Lacking(Arc<backend_gloo::GlooGroup>, Capabilities);

impl Wrapper for Lacking {
    fn inner(&self) -> &dyn ProcessGroup {
        &*self.0
    }

    fn capabilities(&self) -> &Capabilities {
        &self.1
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> std::result::Result<Work, Box<Rejected>> {
        self.0.submit(op, options)
    }

    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        self.0.execute(op, options)
    }

    fn split(
        &self,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    ) -> Result<Option<Box<dyn ProcessGroup>>> {
        self.0.split(color, key, deadline)
    }
}

#[test]
fn a_group_over_which_no_state_can_travel_is_refused_at_the_start_if_states_are_to() {
    type Take = fn(&mut Capabilities);
    let takes: [(Take, &str); 3] = [
        (|c| c.ops = c.ops.without(OpKind::Recv), "point-to-point"),
        (|c| c.features = c.features.without(Feature::Tags), "tags"),
        (|c| c.devices = vec!["cuda".into()], "host memory"),
    ];
    for (take, lacks) in takes {
        let inner = gloo("auto");
        let mut capabilities = inner.capabilities().clone();
        take(&mut capabilities);
        let group = Arc::new(Lacking(inner, capabilities));
        // It is refused before the lighthouse is looked for.
        let nowhere = "http://127.0.0.1:1";
        let e = Manager::new(group, config("a", nowhere, HealOver::Group))
            .err()
            .unwrap();
        assert_eq!(e.kind(), ErrorKind::Unsupported, "{e}");
        assert!(
            e.message().contains("heal_over") && e.message().contains(lacks),
            "{e}"
        );
    }
}
