//! The step protocol over a real lighthouse, real manager servers and real gloo groups, replicas as threads.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use checkpoint::StateDict;
use coordination::{
    LighthouseClient, LighthouseConfig, LighthouseServer, ManagerClient, ManagerServer, ManagerServerConfig,
    QuorumRequest,
};
use ftcore::{
    Capabilities, Checked, Completion, Configuration, Error, ErrorKind, Failed, Feature, GroupOptions,
    InMemoryStore, OpKind, OpSet, ProcessGroup, ReduceOp, Rejected, Result, Step, Store, SubmitOptions,
    Tensor, Work, Wrapper, deadline_in,
};
use oxccl_manager::{Manager, ManagerConfig, Replica, State, WorldSizeMode};

fn lighthouse(replicas: usize) -> LighthouseServer {
    LighthouseServer::start(LighthouseConfig {
        bind: "127.0.0.1:0".into(),
        min_replicas: 1,
        initial_replicas: Some(replicas),
        join_timeout: Duration::from_secs(20),
        heartbeat_timeout: Duration::from_secs(60),
        ..LighthouseConfig::default()
    })
    .unwrap()
}

fn manager(name: &str, lighthouse: &str) -> Manager {
    let group = backend_gloo::GlooGroup::new(name, GroupOptions::default()).unwrap();
    let mut config = ManagerConfig::new(name, lighthouse);
    config.timeout = Duration::from_secs(20);
    Manager::new(Arc::new(group), config).unwrap()
}

fn soon() -> Instant {
    deadline_in(Duration::from_secs(30))
}

/// One number; loading it can be made to fail.
struct Number {
    value: f32,
    refuse: bool,
}

impl State for Number {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        out.insert_f32("value", &[1], &[self.value])
    }
    fn load(&mut self, from: &StateDict) -> Result<()> {
        if self.refuse {
            return Err(Error::invalid("this state is not for me"));
        }
        self.value = from.get_f32("value")?[0];
        Ok(())
    }
}

/// One step that adds the average of `input` to the state. Returns the contributors, or `None` if it did not commit.
fn step(m: &mut Manager, state: &mut Number, input: f32) -> Result<Option<u32>> {
    m.start_quorum(state, soon())?;
    let work = m.all_reduce(vec![Tensor::from_vec(vec![input; 1000])], ReduceOp::Avg);
    let sum = work.take();
    if !m.should_commit(soon())? {
        return Ok(None);
    }
    let done = sum?;
    let contributors = done.contributors;
    state.value += done.into_tensor()?.as_slice::<f32>()?[0];
    Ok(Some(contributors))
}

#[test]
fn l07_in_the_first_step_only_the_replica_that_others_heal_from_counts() {
    let lighthouse = lighthouse(2);
    let url = lighthouse.address();
    let results: Vec<(f32, Option<u32>)> = std::thread::scope(|scope| {
        let handles: Vec<_> = [(0u32, 4.0f32), (1, 100.0)]
            .map(|(i, input)| {
                let url = url.clone();
                scope.spawn(move || {
                    let mut m = manager(&format!("r{i}"), &url);
                    let mut state = Number {
                        value: i as f32,
                        refuse: false,
                    };
                    let first = step(&mut m, &mut state, input).unwrap();
                    let after_first = state.value;
                    let second = step(&mut m, &mut state, input).unwrap();
                    assert_eq!(second, Some(2));
                    // (4 + 100) / 2 by two contributors.
                    assert_eq!(state.value, after_first + 52.0);
                    m.leave(soon()).unwrap();
                    (after_first, first)
                })
            })
            .into_iter()
            .collect();
        handles.into_iter().map(|h| h.join().unwrap()).collect()
    });
    // r0 is the source: its state 0 plus its own input 4, divided by one contributor and not by two.
    assert_eq!(results, [(4.0, Some(1)), (4.0, Some(1))]);
}

#[test]
fn l03_a_state_that_could_not_be_applied_leaves_the_step_where_it_was() {
    let lighthouse = lighthouse(1);
    let url = lighthouse.address();
    let mut old = manager("r0", &url);
    let mut state = Number {
        value: 0.0,
        refuse: false,
    };
    for _ in 0..3 {
        assert_eq!(step(&mut old, &mut state, 1.0).unwrap(), Some(1));
    }
    std::thread::scope(|scope| {
        let (tx, rx) = std::sync::mpsc::channel();
        let url = &url;
        scope.spawn(move || {
            let mut new = manager("r1", url);
            let mut state = Number {
                value: 77.0,
                refuse: true,
            };
            let e = new.start_quorum(&mut state, soon()).unwrap_err();
            assert!(e.to_string().contains("this state is not for me"), "{e}");
            assert!(
                e.to_string().contains("r0:") && e.to_string().contains("r1:"),
                "{e}"
            );
            // Nothing was applied, so nothing counts as done, and no reduction or vote is possible.
            assert_eq!((new.current_step(), state.value), (Step(0), 77.0));
            let refused = new
                .all_reduce(vec![Tensor::from_vec(vec![1.0f32])], ReduceOp::Avg)
                .take();
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::InvalidState);
            assert_eq!(
                new.should_commit(soon()).unwrap_err().kind(),
                ErrorKind::InvalidState
            );
            // The next try heals for real, and only then has the replica advanced.
            state.refuse = false;
            let p = new.start_quorum(&mut state, soon()).unwrap();
            assert!(p.healed.is_some() && !p.contributes);
            assert_eq!(new.current_step(), p.step);
            assert_eq!(state.value, p.step.0 as f32);
            tx.send(()).unwrap();
            new.leave(soon()).unwrap();
        });
        // The old one goes on meanwhile; attempts that the newcomer spoils do not commit and are repeated.
        while rx.try_recv().is_err() {
            step(&mut old, &mut state, 1.0).unwrap();
        }
    });
    assert_eq!(state.value, old.current_step().0 as f32);
}

#[test]
fn a_dead_replica_costs_the_survivor_one_attempt_and_no_time_out() {
    let lighthouse = lighthouse(2);
    let url = lighthouse.address();
    std::thread::scope(|scope| {
        let victim_url = url.clone();
        scope.spawn(move || {
            let mut m = manager("r1", &victim_url);
            let mut state = Number {
                value: 0.0,
                refuse: false,
            };
            step(&mut m, &mut state, 1.0).unwrap();
            // It goes into the next step's quorum and is gone before its reduction.
            m.start_quorum(&mut state, soon()).unwrap();
            drop(m);
        });
        let mut m = manager("r0", &url);
        let mut state = Number {
            value: 0.0,
            refuse: false,
        };
        step(&mut m, &mut state, 1.0).unwrap();
        let begun = Instant::now();
        let mut attempts = 0;
        while m.current_step() < Step(2) {
            attempts += 1;
            let _ = step(&mut m, &mut state, 1.0).unwrap();
        }
        // The collective's time-out is 20 s, the heartbeat's 60 s: neither was waited for.
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
        assert!((1..=3).contains(&attempts), "{attempts}");
        m.leave(soon()).unwrap();
    });
}

#[test]
fn a_replica_commits_only_if_all_its_ranks_do_and_otherwise_heals_on_all_of_them() {
    let lighthouse = lighthouse(2);
    let url = lighthouse.address();
    let mut ends: Vec<(u32, Step, f32, usize)> = std::thread::scope(|scope| {
        let mut handles = Vec::new();
        for replica in 0..2u32 {
            let meet = Arc::new(InMemoryStore::new());
            for group_rank in 0..2u32 {
                let (url, meet, done) = (url.clone(), meet.clone(), meet.clone());
                handles.push(scope.spawn(move || {
                    let group = backend_gloo::GlooGroup::new("g", GroupOptions::default()).unwrap();
                    let mut config = ManagerConfig::new(format!("r{replica}"), &url);
                    (config.group_rank, config.group_world_size) = (group_rank, 2);
                    config.replica_store = Some(meet);
                    let mut m = Manager::new(Arc::new(group), config).unwrap();
                    let mut state = Number {
                        value: 0.0,
                        refuse: false,
                    };
                    let mut heals = 0;
                    let mut spoiled = false;
                    while m.current_step() < Step(6) {
                        let p = m.start_quorum(&mut state, soon()).unwrap();
                        heals += usize::from(p.healed.is_some() && p.step > Step(0));
                        // The ranks of a replica reduce different things, each with its counterpart.
                        let work = m.all_reduce(
                            vec![Tensor::from_vec(vec![group_rank as f32 + 1.0; 64])],
                            ReduceOp::Avg,
                        );
                        let sum = work.take();
                        if p.step == Step(3)
                            && (replica, group_rank) == (0, 1)
                            && !std::mem::replace(&mut spoiled, true)
                        {
                            m.report_error(Error::new(ErrorKind::Backend, "something local to this rank"));
                        }
                        if m.should_commit(soon()).unwrap() {
                            state.value += sum.unwrap().into_tensor().unwrap().as_slice::<f32>().unwrap()[0];
                        }
                    }
                    // No replica leaves while its counterpart still has to heal.
                    let _ = m.start_quorum(&mut state, soon());
                    // Rank 0 has the replica's servers: it goes last, and says so.
                    if group_rank == 1 {
                        done.set("rank 1 is done", b"", soon()).unwrap();
                    } else {
                        done.wait(&["rank 1 is done"], soon()).unwrap();
                        m.leave(soon()).unwrap();
                    }
                    (group_rank, m.current_step(), state.value, heals)
                }));
            }
        }
        handles.into_iter().map(|h| h.join().unwrap()).collect()
    });
    ends.sort_by(|a, b| a.partial_cmp(b).unwrap());
    for (group_rank, step, value, _) in &ends {
        assert_eq!(
            (*step, *value),
            (Step(6), 6.0 * (*group_rank as f32 + 1.0)),
            "{ends:?}"
        );
    }
    // Either the other replica had committed, and both ranks of this one healed, also the one that had voted yes; or the
    // reported error reached it in time, and both replicas did the step again. Never one rank alone.
    let heals: usize = ends.iter().map(|e| e.3).sum();
    assert!(heals == 0 || heals == 2, "{ends:?}");
}

#[test]
fn a_rank_whose_replica_has_lost_rank_0_is_told_so_and_does_not_wait_for_its_deadline() {
    let lighthouse = lighthouse(1);
    let url = lighthouse.address();
    let meet = Arc::new(InMemoryStore::new());
    let managers = std::thread::scope(|scope| {
        let start = |group_rank| {
            let (url, meet) = (url.clone(), meet.clone());
            scope.spawn(move || {
                let group = backend_gloo::GlooGroup::new("g", GroupOptions::default()).unwrap();
                let mut config = ManagerConfig::new("r", &url);
                (config.group_rank, config.group_world_size) = (group_rank, 2);
                config.replica_store = Some(meet);
                Manager::new(Arc::new(group), config).unwrap()
            })
        };
        [start(0), start(1)].map(|manager| manager.join().unwrap())
    });
    let [zero, mut one] = managers;
    drop(zero);
    let begun = Instant::now();
    let mut state = Number {
        value: 0.0,
        refuse: false,
    };
    let error = one
        .start_quorum(&mut state, deadline_in(Duration::from_secs(120)))
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
    assert_eq!(error.context().peer, Some(0), "{error}");
    assert!(error.to_string().contains("rank 0 of this replica"), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
}

#[test]
fn what_no_epoch_would_change_ends_all_ranks_of_the_replica_at_once_and_no_other_replica() {
    let lighthouse = lighthouse(2);
    let url = lighthouse.address();
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for replica in 0..2u32 {
            let meet = Arc::new(InMemoryStore::new());
            for group_rank in 0..2u32 {
                let (url, meet) = (url.clone(), meet.clone());
                scope.spawn(move || {
                    let group = backend_gloo::GlooGroup::new("g", GroupOptions::default()).unwrap();
                    let mut config = ManagerConfig::new(format!("r{replica}"), &url);
                    (config.group_rank, config.group_world_size) = (group_rank, 2);
                    config.replica_store = Some(meet);
                    let mut m = Manager::new(Arc::new(group), config).unwrap();
                    let mut state = Number {
                        value: 0.0,
                        refuse: false,
                    };
                    let far = || deadline_in(Duration::from_secs(90));
                    let mut steps = 0;
                    let error = loop {
                        if let Err(e) = m.start_quorum(&mut state, far()) {
                            break e;
                        }
                        if (replica, group_rank, m.current_step()) == (1, 1, Step(2)) {
                            m.report_error(Error::unsupported("no such sum here"));
                        } else {
                            let _ = m
                                .all_reduce(vec![Tensor::from_vec(vec![1.0f32])], ReduceOp::Avg)
                                .take();
                        }
                        match m.should_commit(far()) {
                            Ok(true) => steps += 1,
                            Ok(false) => {}
                            Err(e) => break e,
                        }
                        if replica == 0 && steps == 8 {
                            m.leave(soon()).unwrap();
                            return;
                        }
                    };
                    assert_eq!((replica, m.current_step()), (1, Step(2)), "{error}");
                    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
                    assert!(error.to_string().contains("no such sum here"), "{error}");
                    assert_eq!(
                        group_rank != 1,
                        error.to_string().contains("rank 1 of this replica")
                    );
                    // A replica that asks again learns the same, and does not wait.
                    if group_rank != 1 {
                        let again = m.start_quorum(&mut state, far()).unwrap_err();
                        assert!(again.to_string().contains("no such sum here"), "{again}");
                    }
                });
            }
        }
    });
    // The time limits were 90 s.
    assert!(begun.elapsed() < Duration::from_secs(40), "{:?}", begun.elapsed());
}

#[test]
fn where_all_replicas_are_needed_the_first_step_commits_although_all_but_one_take_its_state() {
    let lighthouse = lighthouse(3);
    let url = lighthouse.address();
    let own = [1.0f32, 10.0, 100.0];
    let ends: Vec<(Vec<Option<u32>>, f32)> = std::thread::scope(|scope| {
        let replicas: Vec<_> = own
            .into_iter()
            .enumerate()
            .map(|(i, input)| {
                let url = url.clone();
                scope.spawn(move || {
                    let group = backend_gloo::GlooGroup::new("g", GroupOptions::default()).unwrap();
                    let mut config = ManagerConfig::new(format!("r{i}"), &url);
                    config.min_replicas = 3;
                    config.timeout = Duration::from_secs(20);
                    let mut m = Manager::new(Arc::new(group), config).unwrap();
                    let mut state = Number {
                        value: i as f32,
                        refuse: false,
                    };
                    let steps = [(); 2].map(|()| step(&mut m, &mut state, input).unwrap());
                    m.leave(soon()).unwrap();
                    (steps.to_vec(), state.value)
                })
            })
            .collect();
        replicas.into_iter().map(|r| r.join().unwrap()).collect()
    });
    // No attempt is lost. In the first step the work of the one counts that the others took the state of: (0 + 1), then (1 + 10 + 100) / 3.
    for (steps, value) in ends {
        assert_eq!(steps, [Some(1), Some(3)]);
        assert_eq!(value, 38.0);
    }
}

#[test]
fn with_a_fixed_world_size_spares_follow_along_without_counting() {
    let lighthouse = lighthouse(3);
    let url = lighthouse.address();
    std::thread::scope(|scope| {
        for i in 0..3u32 {
            let url = url.clone();
            scope.spawn(move || {
                let group = backend_gloo::GlooGroup::new("g", GroupOptions::default()).unwrap();
                let mut config = ManagerConfig::new(format!("r{i}"), &url);
                config.min_replicas = 2;
                config.world_size_mode = WorldSizeMode::FixedWithSpares;
                // All start from the same state: no replica has to heal, so that only the mode decides who counts.
                config.init_sync = false;
                let mut m = Manager::new(Arc::new(group), config).unwrap();
                let mut state = Number {
                    value: 0.0,
                    refuse: false,
                };
                let p = m.start_quorum(&mut state, soon()).unwrap();
                assert_eq!(p.contributes, i < 2);
                let work = m.all_reduce(vec![Tensor::from_vec(vec![i as f32 + 1.0])], ReduceOp::Avg);
                assert!(m.should_commit(soon()).unwrap());
                let done = work.take().unwrap();
                assert_eq!(done.contributors, 2);
                // (1 + 2) / 2, on the spare as well.
                assert_eq!(done.into_tensor().unwrap().as_slice::<f32>().unwrap(), [1.5]);
                m.leave(soon()).unwrap();
            });
        }
    });
}

#[test]
fn a_lighthouse_that_is_not_there_is_named_with_what_to_do() {
    let group = backend_gloo::GlooGroup::new("r0", GroupOptions::default()).unwrap();
    let mut config = ManagerConfig::new("r0", "http://127.0.0.1:9");
    config.connect_timeout = Duration::from_millis(500);
    let e = Manager::new(Arc::new(group), config).err().unwrap();
    assert_eq!(e.kind(), ErrorKind::Unavailable);
    assert!(
        e.to_string().contains("127.0.0.1:9") && e.to_string().contains("oxccl lighthouse"),
        "{e}"
    );
}

#[test]
fn a_configuration_that_cannot_work_is_refused_before_anything_starts() {
    type Spoil = fn(&mut ManagerConfig);
    let cases: [(Spoil, &str); 5] = [
        (|c| c.name = "a:b".into(), "free of ':'"),
        (|c| c.group_rank = 1, "group_rank 1"),
        (|c| c.lighthouse = None, "lighthouse"),
        (|c| c.group_world_size = 2, "replica_store"),
        (|c| c.min_replicas = 0, "min_replicas"),
    ];
    for (spoil, text) in cases {
        let mut config = ManagerConfig::new("r0", "http://127.0.0.1:9");
        spoil(&mut config);
        let group = backend_gloo::GlooGroup::new("r0", GroupOptions::default()).unwrap();
        let e = Manager::new(Arc::new(group), config).err().unwrap();
        assert_eq!(e.kind(), ErrorKind::InvalidArgument);
        assert!(e.to_string().contains(text), "{e}");
    }
}

#[test]
fn a_group_that_cannot_be_aborted_or_configured_again_is_refused() {
    for (feature, lacks) in [
        (Feature::Abort, "be aborted"),
        (Feature::Reconfigure, "be configured again"),
    ] {
        let gloo = backend_gloo::GlooGroup::new("r0", GroupOptions::default()).unwrap();
        let offered = gloo.capabilities().clone();
        let capabilities = Capabilities {
            features: offered.features.without(feature),
            ..offered
        };
        let group = Arc::new(Unplugged(gloo, Mutex::default(), capabilities));
        // Nothing was tried: nothing listens there.
        let e = Manager::new(group, ManagerConfig::new("r0", "http://127.0.0.1:9"))
            .err()
            .unwrap();
        assert_eq!(e.kind(), ErrorKind::Unsupported);
        let text = e.to_string();
        assert!(
            text.contains(lacks) && text.contains("gloo") && text.contains("isolate::wrap"),
            "{text}"
        );
    }
}

/// A group that says when it is aborted, and does something before it connects.
struct Overheard {
    group: backend_gloo::GlooGroup,
    aborts: Mutex<Sender<String>>,
    before: Box<dyn Fn(&Configuration) + Send + Sync>,
}

impl Wrapper for Overheard {
    fn inner(&self) -> &dyn ProcessGroup {
        &self.group
    }

    fn configure(&self, configuration: Configuration) -> Result<()> {
        (self.before)(&configuration);
        self.group.configure(configuration)
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        self.group.submit(op, options)
    }

    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        self.group.execute(op, options)
    }

    fn split(&self, _: Option<u32>, _: u32, _: Instant) -> Result<Option<Box<dyn ProcessGroup>>> {
        Ok(None)
    }

    fn abort(&self, reason: &str) {
        self.group.abort(reason);
        let _ = self.aborts.lock().unwrap().send(reason.to_string());
    }
}

/// State that takes as long to save as it takes until the group hears that the epoch is over; or a while, if that was known before the epoch was
/// this replica's.
struct Slow(Receiver<String>);

impl State for Slow {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        if let Ok(reason) = self.0.recv_timeout(Duration::from_secs(3)) {
            assert!(reason.contains("was aborted"), "{reason}");
        }
        out.insert_f32("value", &[1], &[0.0])
    }
    fn load(&mut self, _: &StateDict) -> Result<()> {
        panic!("this replica is the source");
    }
}

/// A first step with a replica that dies in its first quorum, once there is something in `dies`: no replica may wait for it until the deadline.
/// `told`: of aborts. `before`: what happens between the manager's look for notice and the group's own beginning.
fn step_with_one_that_dies(
    dies: Receiver<()>,
    state: &mut dyn State,
    told: Sender<String>,
    before: Box<dyn Fn(&Configuration) + Send + Sync>,
) {
    let lighthouse = lighthouse(2);
    let url = lighthouse.address();
    let began = Instant::now();
    std::thread::scope(|scope| {
        let their_url = url.clone();
        scope.spawn(move || {
            let config = ManagerServerConfig {
                replica_id: "r1:dies".into(),
                lighthouse: their_url,
                store_address: "127.0.0.1:1".into(),
                ..ManagerServerConfig::default()
            };
            let server = ManagerServer::start(config).unwrap();
            let client = ManagerClient::connect(&server.address(), soon()).unwrap();
            // Heals in the first step.
            let request = QuorumRequest {
                init_sync: true,
                ..QuorumRequest::default()
            };
            client.quorum(&request, soon()).unwrap();
            dies.recv_timeout(Duration::from_secs(20)).unwrap();
        });
        let group = Overheard {
            group: backend_gloo::GlooGroup::new("r0", GroupOptions::default()).unwrap(),
            aborts: Mutex::new(told),
            before,
        };
        let mut config = ManagerConfig::new("r0", &url);
        // Far more than the whole test takes.
        config.timeout = Duration::from_secs(60);
        let mut m = Manager::new(Arc::new(group), config).unwrap();
        let part = m
            .start_quorum(state, deadline_in(Duration::from_secs(60)))
            .unwrap();
        assert_eq!(part.replica_world_size, 2);
        // What the ranks of a replica compute together they all compute.
        assert!(part.contributes);
        let e = m.error().unwrap().to_string();
        assert!(e.contains("the epoch was over before the group connected"), "{e}");
        assert!(!m.should_commit(soon()).unwrap());
        m.leave(soon()).unwrap();
    });
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
}

#[test]
fn an_epoch_that_ends_before_the_group_connects_is_not_waited_for() {
    let ((die, dies), (told, aborts)) = (channel(), channel());
    die.send(()).unwrap();
    step_with_one_that_dies(dies, &mut Slow(aborts), told, Box::new(|_| ()));
}

#[test]
fn l27_an_abort_that_comes_just_before_the_group_connects_is_not_lost() {
    let ((die, dies), (told, _aborts)) = (channel(), channel());
    // It finds no group to end: the configuration's token has to say it.
    let before = move |configuration: &Configuration| {
        die.send(()).unwrap();
        let (_open, nothing) = channel::<()>();
        let reason = configuration
            .cancel
            .receive(&nothing, deadline_in(Duration::from_secs(20)));
        assert!(reason.unwrap_err().to_string().contains("was aborted"));
    };
    let mut number = Number {
        value: 0.0,
        refuse: false,
    };
    step_with_one_that_dies(dies, &mut number, told, Box::new(before));
}

/// A group that connects to no peer, has no barrier, and breaks when it is told to.
struct Unplugged(backend_gloo::GlooGroup, Mutex<Option<Error>>, Capabilities);

impl Wrapper for Unplugged {
    fn inner(&self) -> &dyn ProcessGroup {
        &self.0
    }

    fn capabilities(&self) -> &Capabilities {
        &self.2
    }

    fn configure(&self, _: Configuration) -> Result<()> {
        Ok(())
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        self.0.submit(op, options)
    }

    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        self.0.execute(op, options)
    }

    fn split(&self, _: Option<u32>, _: u32, _: Instant) -> Result<Option<Box<dyn ProcessGroup>>> {
        Ok(None)
    }

    fn abort(&self, _: &str) {}

    fn error(&self) -> Option<Error> {
        self.1.lock().unwrap().clone()
    }
}

#[test]
fn an_epoch_that_breaks_while_the_quorum_is_asked_for_is_given_up_with_its_cause() {
    let lighthouse = lighthouse(2);
    let url = lighthouse.address();
    let gloo = backend_gloo::GlooGroup::new("r0", GroupOptions::default()).unwrap();
    let capabilities = Capabilities {
        ops: OpSet::of(&[OpKind::AllReduce]),
        ..gloo.capabilities().clone()
    };
    let group = Arc::new(Unplugged(gloo, Mutex::default(), capabilities));
    let mut number = Number {
        value: 0.0,
        refuse: false,
    };
    std::thread::scope(|scope| {
        let broken = group.clone();
        let peer_url = url.clone();
        scope.spawn(move || {
            let config = ManagerServerConfig {
                replica_id: "r1:script".into(),
                lighthouse: peer_url.clone(),
                store_address: "127.0.0.1:1".into(),
                ..ManagerServerConfig::default()
            };
            let server = ManagerServer::start(config).unwrap();
            let client = ManagerClient::connect(&server.address(), soon()).unwrap();
            let ask = |request| client.quorum(&request, soon()).unwrap();
            let first = ask(QuorumRequest {
                init_sync: true,
                ..QuorumRequest::default()
            });
            let watch = LighthouseClient::connect(&peer_url, soon()).unwrap();
            let end = soon();
            while watch.status(soon()).unwrap().waiting.is_empty() {
                assert!(Instant::now() < end, "the other replica does not ask again");
                std::thread::park_timeout(Duration::from_millis(2));
            }
            // It has asked with a whole group; this replica's question, after it, lets the epoch go on.
            let lost = Error::new(ErrorKind::PeerLost, "the cable was pulled").with_peer(1);
            *broken.1.lock().unwrap() = Some(lost);
            let second = ask(QuorumRequest {
                step: Step(1),
                init_sync: true,
                last_quorum_id: first.quorum_id,
                ..QuorumRequest::default()
            });
            assert_eq!(second.quorum_id, first.quorum_id);
        });
        let mut m = Manager::new(group, ManagerConfig::new("r0", &url)).unwrap();
        m.start_quorum(&mut number, soon()).unwrap();
        assert!(m.should_commit(soon()).unwrap());
        m.start_quorum(&mut number, soon()).unwrap();
        let e = m.error().unwrap().to_string();
        for part in ["ended before it was used again", "peer 1", "the cable was pulled"] {
            assert!(e.contains(part), "{e}");
        }
        assert!(!m.should_commit(soon()).unwrap());
        m.leave(soon()).unwrap();
    });
}
