//! What a training loop is told of its attempts, and may ask for: batches committed, an end after lost attempts, no newcomers.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use checkpoint::StateDict;
use coordination::{LighthouseClient, LighthouseConfig, LighthouseServer};
use ftcore::{
    Checked, Completion, Configuration, Error, ErrorKind, Failed, GroupOptions, ProcessGroup, ReduceOp,
    Rejected, Result, Step, SubmitOptions, Tensor, Work, Wrapper, deadline_in,
};
use oxccl_manager::{Interrupter, Manager, ManagerConfig, Participation, Replica, State};

struct Nothing;

impl State for Nothing {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        out.insert_f32("nothing", &[1], &[0.0])
    }
    fn load(&mut self, _: &StateDict) -> Result<()> {
        Ok(())
    }
}

fn soon() -> Instant {
    deadline_in(Duration::from_secs(60))
}

fn lighthouse() -> LighthouseServer {
    lighthouse_of(1)
}

fn lighthouse_of(replicas: usize) -> LighthouseServer {
    LighthouseServer::start(LighthouseConfig {
        bind: "127.0.0.1:0".into(),
        initial_replicas: Some(replicas),
        join_timeout: Duration::from_secs(20),
        heartbeat_timeout: Duration::from_secs(60),
        ..LighthouseConfig::default()
    })
    .unwrap()
}

fn manager(name: &str, lighthouse: &LighthouseServer, edit: impl FnOnce(&mut ManagerConfig)) -> Manager {
    let group = backend_gloo::GlooGroup::new(name, GroupOptions::default()).unwrap();
    let mut config = ManagerConfig::new(name, lighthouse.address());
    config.timeout = Duration::from_secs(20);
    edit(&mut config);
    Manager::new(Arc::new(group), config).unwrap()
}

/// One attempt at a step that reduces something.
fn attempt(m: &mut Manager) -> Result<(Participation, bool)> {
    let now = m.start_quorum(&mut Nothing, soon())?;
    let _ = m
        .all_reduce(vec![Tensor::from_vec(vec![1.0f32; 8])], ReduceOp::Avg)
        .take();
    Ok((now, m.should_commit(soon())?))
}

fn until_waiting(lighthouse: &LighthouseServer, name: &str) {
    let tool = LighthouseClient::connect(&lighthouse.address(), soon()).unwrap();
    let end = soon();
    while !tool
        .status(soon())
        .unwrap()
        .waiting
        .iter()
        .any(|w| w.replica_id.starts_with(name))
    {
        assert!(Instant::now() < end, "{name} does not ask");
        std::thread::yield_now();
    }
}

#[test]
fn a_replica_that_heals_takes_over_how_many_batches_led_to_the_state() {
    let lighthouse = lighthouse();
    let mut old = manager("r0", &lighthouse, |_| {});
    for _ in 0..3 {
        assert!(attempt(&mut old).unwrap().1);
    }
    assert_eq!(old.batches_committed(), 3, "one contributor in each step");
    // What the old one had after each step.
    let mut told = BTreeMap::new();
    let (first, second) = std::thread::scope(|scope| {
        let new = scope.spawn(|| {
            let mut new = manager("r1", &lighthouse, |_| {});
            let mut after = || {
                while !attempt(&mut new).unwrap().1 {}
                (new.current_step(), new.batches_committed())
            };
            let both = (after(), after());
            // Its end by a drop might cost the other one the step that they have in common.
            new.leave(soon()).unwrap();
            both
        });
        // It takes the state beside this one, which goes on, and then joins.
        while !new.is_finished() {
            attempt(&mut old).unwrap();
            told.insert(old.current_step(), old.batches_committed());
        }
        new.join().unwrap()
    });
    for (step, batches) in [first, second] {
        assert_eq!(told.get(&step), Some(&batches), "{told:?}");
    }
    // A state that was taken over is no replica's own batch in the step that it was taken over for; then both contribute.
    assert_eq!(second, (first.0 + 1, first.1 + 2));
    let mut restored = manager("r2", &lighthouse, |_| {});
    restored
        .restore(old.current_step(), old.lineage().clone(), old.batches_committed())
        .unwrap();
    assert_eq!(restored.batches_committed(), old.batches_committed());
}

#[test]
fn a_replica_gives_up_after_max_retries_and_says_what_the_last_attempt_failed_with() {
    let lighthouse = lighthouse();
    let mut m = manager("r0", &lighthouse, |c| {
        c.max_retries = Some(2);
        c.min_replicas = 2;
    });
    for _ in 0..2 {
        assert!(!attempt(&mut m).unwrap().1, "one member of two");
    }
    let e = attempt(&mut m).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::InvalidState, "{e}");
    assert!(
        e.message().contains("max_retries is 2") && e.message().contains("min_replicas is 2"),
        "{e}"
    );
}

#[test]
fn a_newcomer_waits_for_as_long_as_a_member_asks_for_none() {
    let lighthouse = lighthouse();
    let mut old = manager("r0", &lighthouse, |_| {});
    assert_eq!(attempt(&mut old).unwrap().0.members.len(), 1);
    let is_in = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut new = manager("r1", &lighthouse, |_| {});
            let (now, _) = attempt(&mut new).unwrap();
            is_in.store(true, Ordering::Release);
            assert_eq!(now.members.len(), 2);
        });
        until_waiting(&lighthouse, "r1");
        old.set_shrink_only(true);
        for _ in 0..3 {
            let (now, committed) = attempt(&mut old).unwrap();
            assert!(committed && now.members.len() == 1, "{now:?}");
        }
        assert!(!is_in.load(Ordering::Acquire));
        old.set_shrink_only(false);
        // It may still be taking the state beside this one.
        let end = soon();
        while attempt(&mut old).unwrap().0.members.len() < 2 {
            assert!(Instant::now() < end, "the newcomer is kept out");
        }
    });
}

/// A group that tells no member that it is aborted, as with a library that only forgets its own end.
struct Silent(backend_gloo::GlooGroup);

impl Wrapper for Silent {
    fn inner(&self) -> &dyn ProcessGroup {
        &self.0
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
}

/// What it computes fails, for example, and the training loop begins the step anew. No member may wait for the reductions that it has left out.
#[test]
fn a_step_that_is_left_without_a_vote_holds_up_no_other_member() {
    // Far more than the whole test takes.
    let limit = Duration::from_secs(50);
    for (reductions, is_heard) in [(0, true), (1, true), (0, false)] {
        let lighthouse = lighthouse_of(2);
        let manager = |name: &str| {
            let gloo = backend_gloo::GlooGroup::new(name, GroupOptions::default()).unwrap();
            let group: Arc<dyn ProcessGroup> = if is_heard || name != "r0" {
                Arc::new(gloo)
            } else {
                Arc::new(Silent(gloo))
            };
            let config = ManagerConfig {
                timeout: limit,
                ..ManagerConfig::new(name, lighthouse.address())
            };
            Manager::new(group, config).unwrap()
        };
        let reduce = |m: &mut Manager| m.all_reduce(vec![Tensor::from_vec(vec![1.0f32; 8])], ReduceOp::Avg);
        let (submitted, is_submitted) = channel();
        let (manager, reduce) = (&manager, &reduce);
        let begun = Instant::now();
        std::thread::scope(|scope| {
            let leaves = scope.spawn(move || {
                let mut m = manager("r0");
                assert!(attempt(&mut m).unwrap().1);
                m.start_quorum(&mut Nothing, soon()).unwrap();
                for _ in 0..reductions {
                    reduce(&mut m).take().unwrap();
                }
                // The other one waits for this one's next reduction.
                is_submitted.recv_timeout(limit).unwrap();
                assert!(attempt(&mut m).unwrap().1);
                m
            });
            let mut m = manager("r1");
            assert!(attempt(&mut m).unwrap().1);
            m.start_quorum(&mut Nothing, soon()).unwrap();
            for _ in 0..reductions {
                reduce(&mut m).take().unwrap();
            }
            let work = reduce(&mut m);
            submitted.send(()).unwrap();
            assert!(work.take().is_err());
            assert!(!m.should_commit(soon()).unwrap());
            assert!(attempt(&mut m).unwrap().1);
            let left = leaves.join().unwrap();
            assert_eq!((m.current_step(), left.current_step()), (Step(2), Step(2)));
        });
        assert!(
            begun.elapsed() < limit / 2,
            "{reductions} reductions: {:?}",
            begun.elapsed()
        );
    }
}

type Meanwhile = Box<dyn FnOnce(&Configuration) + Send>;

/// What happens instead of the group's own.
#[derive(Default)]
struct Instead {
    /// Before it connects, once.
    connecting: Mutex<Option<Meanwhile>>,
    leaves_badly: bool,
}

struct Hooked(backend_gloo::GlooGroup, Instead);

impl Wrapper for Hooked {
    fn inner(&self) -> &dyn ProcessGroup {
        &self.0
    }

    fn configure(&self, configuration: Configuration) -> Result<()> {
        if let Some(before) = self.1.connecting.lock().unwrap().take() {
            before(&configuration);
        }
        self.0.configure(configuration)
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

    fn shutdown(&self, deadline: Instant) -> Result<()> {
        self.0.shutdown(deadline)?;
        match self.1.leaves_badly {
            true => Err(Error::new(ErrorKind::Backend, "the library did not end")),
            false => Ok(()),
        }
    }
}

fn hooked(name: &str, lighthouse: &LighthouseServer, instead: Instead) -> Manager {
    let group = backend_gloo::GlooGroup::new(name, GroupOptions::default()).unwrap();
    let config = ManagerConfig::new(name, lighthouse.address());
    Manager::new(Arc::new(Hooked(group, instead)), config).unwrap()
}

#[test]
fn an_interruption_ends_the_call_that_connects_the_group_and_the_step_is_done_again() {
    let lighthouse = lighthouse();
    let (connects, connecting) = channel();
    let before = move |configuration: &Configuration| {
        connects.send(()).unwrap();
        let (_open, nothing) = channel::<()>();
        configuration.cancel.receive(&nothing, soon()).unwrap_err();
    };
    let instead = Instead {
        connecting: Mutex::new(Some(Box::new(before))),
        ..Instead::default()
    };
    let mut m = hooked("r0", &lighthouse, instead);
    let interrupter = m.interrupter();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            connecting.recv().unwrap();
            interrupter.interrupt();
        });
        m.start_quorum(&mut Nothing, soon()).unwrap_err();
    });
    let (now, committed) = attempt(&mut m).unwrap();
    assert_eq!((now.step, committed), (Step(0), true));
}

/// A state that is interrupted while it is saved, between the quorum and connecting the group.
struct Interrupted(Interrupter);

impl State for Interrupted {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        self.0.interrupt();
        Nothing.save(out)
    }
    fn load(&mut self, _: &StateDict) -> Result<()> {
        Ok(())
    }
}

#[test]
fn an_interruption_between_two_waits_of_a_call_is_not_lost() {
    let lighthouse = lighthouse_of(2);
    let mut source = hooked("r0", &lighthouse, Instead::default());
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let mut m = manager("r1", &lighthouse, |_| {});
            // The first attempt is lost to it.
            while !attempt(&mut m).unwrap().1 {}
            m.leave(soon()).unwrap();
        });
        let mut state = Interrupted(source.interrupter());
        source.start_quorum(&mut state, soon()).unwrap_err();
        assert!(attempt(&mut source).unwrap().1);
        source.leave(soon()).unwrap();
        other.join().unwrap();
    });
}

#[test]
fn a_replica_whose_group_does_not_end_well_has_left_all_the_same() {
    let lighthouse = lighthouse();
    let mut m = hooked(
        "r0",
        &lighthouse,
        Instead {
            leaves_badly: true,
            ..Instead::default()
        },
    );
    assert!(attempt(&mut m).unwrap().1);
    let e = m.leave(soon()).unwrap_err();
    assert!(e.message().contains("the library did not end"), "{e}");
    let tool = LighthouseClient::connect(&lighthouse.address(), soon()).unwrap();
    assert!(tool.status(soon()).unwrap().healthy.is_empty());
}
