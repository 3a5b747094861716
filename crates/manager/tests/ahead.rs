//! Quorums that are asked for ahead, over a real lighthouse, real manager servers and real gloo groups: they are found while the caller computes,
//! and what the state has to do with them is done on the caller's thread.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use checkpoint::StateDict;
use coordination::{LighthouseClient, LighthouseConfig, LighthouseServer};
use ftcore::{ErrorKind, GroupOptions, ReduceOp, Result, Step, Tensor, deadline_in};
use oxccl_manager::{Lineage, Manager, ManagerConfig, Participation, Replica, State};

/// Only a hang reaches it.
fn soon() -> Instant {
    deadline_in(Duration::from_secs(60))
}

fn lighthouse(replicas: usize) -> LighthouseServer {
    LighthouseServer::start(LighthouseConfig {
        bind: "127.0.0.1:0".into(),
        min_replicas: replicas.min(2),
        initial_replicas: Some(replicas),
        join_timeout: Duration::from_secs(60),
        heartbeat_timeout: Duration::from_secs(60),
        ..LighthouseConfig::default()
    })
    .unwrap()
}

fn manager(name: &str, lighthouse: &LighthouseServer) -> Manager {
    let group = backend_gloo::GlooGroup::new(name, GroupOptions::default()).unwrap();
    let mut config = ManagerConfig::new(name, lighthouse.address());
    config.timeout = Duration::from_secs(40);
    Manager::new(Arc::new(group), config).unwrap()
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

/// One step with the quorum first; its members.
fn step(m: &mut Manager, state: &mut Number, input: f32) -> usize {
    let members = m.start_quorum(state, soon()).unwrap().members.len();
    assert!(finish(m, state, input));
    members
}

/// The rest of a step after its quorum.
fn finish(m: &mut Manager, state: &mut Number, input: f32) -> bool {
    let work = m.all_reduce(vec![Tensor::from_vec(vec![input; 8])], ReduceOp::Avg);
    let average = work.take().unwrap().into_tensor().unwrap();
    let committed = m.should_commit(soon()).unwrap();
    state.0 += average.as_slice::<f32>().unwrap()[0];
    committed
}

/// One step that begins its quorum and submits before it is finished. The part before and after, and the average.
fn step_ahead(m: &mut Manager, state: &mut Number, input: f32) -> (Participation, Participation, f32) {
    assert!(m.begin_quorum(soon()).unwrap());
    let before = m.await_quorum().unwrap();
    let work = m.all_reduce(vec![Tensor::from_vec(vec![input; 8])], ReduceOp::Avg);
    let after = m.start_quorum(state, soon()).unwrap();
    let average = work.take().unwrap().into_tensor().unwrap();
    let average = average.as_slice::<f32>().unwrap()[0];
    assert!(m.should_commit(soon()).unwrap());
    state.0 += average;
    (before, after, average)
}

#[test]
fn a_quorum_is_found_and_the_group_connected_while_the_caller_computes() {
    let lighthouse = lighthouse(2);
    let tool = LighthouseClient::connect(&lighthouse.address(), soon()).unwrap();
    let asked = Barrier::new(2);
    std::thread::scope(|scope| {
        for (name, input) in [("r0", 4.0), ("r1", 8.0)] {
            let (lighthouse, tool, asked) = (&lighthouse, &tool, &asked);
            scope.spawn(move || {
                let mut m = manager(name, lighthouse);
                let mut state = Number(0.0);
                step(&mut m, &mut state, 0.0);
                asked.wait();
                let before = tool.status(soon()).unwrap().quorum_id;
                asked.wait();
                // A lost step, so that the next quorum is a new epoch and needs a rendezvous, too.
                m.start_quorum(&mut state, soon()).unwrap();
                m.report_error(ftcore::Error::new(ErrorKind::Internal, "for a new epoch"));
                assert!(!m.should_commit(soon()).unwrap());
                asked.wait();
                assert!(m.begin_quorum(soon()).unwrap());
                // The caller computes, and calls nothing.
                let end = soon();
                while tool.status(soon()).unwrap().quorum_id == before {
                    assert!(Instant::now() < end, "no quorum without the caller");
                    std::thread::yield_now();
                }
                let participation = m.start_quorum(&mut state, soon()).unwrap();
                assert_eq!((participation.step, participation.members.len()), (Step(1), 2));
                assert!(finish(&mut m, &mut state, input));
                assert_eq!((m.current_step(), state.0), (Step(2), 6.0));
                let (before, after, average) = step_ahead(&mut m, &mut state, input);
                assert_eq!((before, average), (after, 6.0));
                m.leave(soon()).unwrap();
            });
        }
    });
}

/// A replica at step 3 and one that is new; both begin their quorums ahead. The new one's state, and what it was told before and after.
fn one_is_behind(joins_at_once: bool, newcomer: fn(&mut Manager, &mut Number)) {
    let lighthouse = lighthouse(1);
    std::thread::scope(|scope| {
        let lighthouse = &lighthouse;
        let mut old = manager("r0", lighthouse);
        let mut state = Number(0.0);
        for _ in 0..3 {
            assert_eq!(step(&mut old, &mut state, 1.0), 1);
        }
        let new = scope.spawn(move || {
            let mut m = manager("r1", lighthouse);
            m.set_joins_at_once(joins_at_once);
            let mut state = Number(-1.0);
            newcomer(&mut m, &mut state);
            assert_eq!(step(&mut m, &mut state, 2.0), 2);
            m.leave(soon()).unwrap();
            (m.current_step(), state.0)
        });
        let mut together = 0;
        while together < 2 {
            let (before, after, average) = step_ahead(&mut old, &mut state, 4.0);
            assert!(before.contributes && after.contributes);
            together += after.members.len() - 1;
            let expected = if together == 2 { 3.0 } else { 4.0 };
            assert_eq!(
                average, expected,
                "what the new one computed before it healed does not count"
            );
        }
        old.leave(soon()).unwrap();
        assert_eq!(new.join().unwrap(), (old.current_step(), state.0));
    });
}

#[test]
fn a_member_that_is_behind_heals_in_the_callers_thread_and_its_gradients_do_not_count() {
    one_is_behind(true, |m, state| {
        assert!(m.begin_quorum(soon()).unwrap());
        let before = m.await_quorum().unwrap();
        assert_eq!((before.contributes, before.step.0, state.0), (false, 0, -1.0));
        let work = m.all_reduce(vec![Tensor::from_vec(vec![1000.0f32; 8])], ReduceOp::Avg);
        // The step is not voted on before the state is that of the step (INV-5).
        assert_eq!(
            m.should_commit(soon()).unwrap_err().kind(),
            ErrorKind::InvalidState
        );
        assert_eq!((m.current_step(), state.0), (Step(0), -1.0));
        let after = m.start_quorum(state, soon()).unwrap();
        assert!(after.healed.is_some() && after.step >= Step(3));
        assert_eq!(m.current_step(), after.step);
        let average = work.take().unwrap().into_tensor().unwrap();
        state.0 += average.as_slice::<f32>().unwrap()[0];
        assert!(m.should_commit(soon()).unwrap());
    });
}

#[test]
fn a_replica_far_behind_takes_the_state_as_a_spare_and_joins_when_its_quorum_is_finished() {
    one_is_behind(false, |m, state| {
        assert!(m.begin_quorum(soon()).unwrap());
        let before = m.await_quorum().unwrap();
        assert_eq!((before.contributes, before.step.0), (false, 0));
        // A spare has no group.
        let work = m.all_reduce(vec![Tensor::from_vec(vec![1000.0f32; 8])], ReduceOp::Avg);
        assert!(work.take().is_err());
        let after = m.start_quorum(state, soon()).unwrap();
        assert!(after.healed.is_some() && !after.contributes, "{after:?}");
        assert_eq!((after.members.len(), m.current_step()), (2, after.step));
        assert!(finish(m, state, 1000.0));
    });
}

#[test]
fn a_quorum_that_is_given_up_leaves_nothing_behind_and_is_not_waited_for() {
    let lighthouse = lighthouse(2);
    let far = deadline_in(Duration::from_secs(600));
    let mut one = manager("r0", &lighthouse);
    let begun = Instant::now();
    // There is no other replica.
    assert!(one.begin_quorum(far).unwrap());
    one.abandon_quorum();
    let e = one.await_quorum().unwrap_err();
    assert_eq!(e.kind(), ErrorKind::InvalidState, "{e}");
    assert!(one.begin_quorum(far).unwrap());
    assert!(one.begin_quorum(far).unwrap(), "the earlier one is given up");
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let (mut m, mut state) = (manager("r1", &lighthouse), Number(0.0));
            step(&mut m, &mut state, 3.0);
            m.leave(soon()).unwrap();
        });
        let mut state = Number(0.0);
        assert_eq!(step(&mut one, &mut state, 1.0), 2);
        other.join().unwrap();
    });
    assert!(one.begin_quorum(far).unwrap());
    drop(one);
    assert!(
        begun.elapsed() < Duration::from_secs(300),
        "{:?}",
        begun.elapsed()
    );
}

#[test]
fn a_state_is_restored_before_the_first_quorum_is_asked_for_and_not_beside_it() {
    let lighthouse = lighthouse(2);
    let mut m = manager("r0", &lighthouse);
    m.restore(Step(3), Lineage::from_peer("three"), 3).unwrap();
    // There is no other replica: it is looked for until it is given up.
    assert!(m.begin_quorum(deadline_in(Duration::from_secs(600))).unwrap());
    let e = m.restore(Step(4), Lineage::from_peer("four"), 4).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::InvalidState, "{e}");
    m.abandon_quorum();
    assert_eq!((m.current_step(), m.batches_committed()), (Step(3), 3));
}
