//! Gradients and the state that they are of: heals between attempts, a state that was written in part, quorums that time out, the end.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use ftcore::{Error, ErrorKind, Result, Step};
use oxccl_ddp::{Ddp, DdpConfig, Slot};
use replica::StateDict;
use replica::{Replica, State};
use training_rig::{ScriptedReplica, Source};

/// A training loop whose gradient is its weight.
struct Weight(f32);

impl State for Weight {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        out.insert_f32("weight", &[1], &[self.0])
    }
    fn load(&mut self, from: &StateDict) -> Result<()> {
        self.0 = from.get_f32("weight")?[0];
        if self.0 < 0.0 {
            return Err(Error::new(ErrorKind::Corrupt, "half of it was loaded"));
        }
        Ok(())
    }
}

fn saved(weight: f32) -> StateDict {
    let mut out = StateDict::new();
    Weight(weight).save(&mut out).unwrap();
    out
}

/// What was sent: the step and the value.
type Sent = Rc<RefCell<Vec<(i64, f32)>>>;

/// A replica of two of which both do the same.
fn watched() -> (ScriptedReplica, Sent) {
    let sent = Sent::default();
    let seen = sent.clone();
    let replica = ScriptedReplica::by_step(move |step, own| {
        seen.borrow_mut().push((step, own[0]));
        own.to_vec()
    });
    (replica, sent)
}

fn made(replica: ScriptedReplica) -> Ddp<ScriptedReplica> {
    Ddp::new(replica, &[Slot::f32(1)], DdpConfig::default()).unwrap()
}

fn gradient(weight: &mut Weight) -> Result<Vec<Vec<f32>>> {
    Ok(vec![vec![weight.0]])
}

fn apply(weight: &mut Weight, averages: &[Vec<f32>]) -> Result<()> {
    weight.0 += averages[0][0];
    Ok(())
}

#[test]
fn inv4_gradients_of_a_state_that_was_healed_over_are_never_sent() {
    // Into a later step, and into the same one, whose history is another.
    for (all_healed, step) in [(false, 5), (true, 5), (true, 0)] {
        let (mut replica, sent) = watched();
        // Lost, then healed and voted down, then done.
        (replica.heal, replica.heal_after) = (Some(Source::Now(step, saved(100.0))), 1);
        replica.all_healed = all_healed;
        replica.reductions = VecDeque::from([false, true, true]);
        replica.votes = VecDeque::from([false, true]);
        let (mut d, mut weight, mut computed) = (made(replica), Weight(1.0), 0);
        let compute = |w: &mut Weight, _: &_| {
            computed += 1;
            gradient(w)
        };
        let report = d.step(&mut weight, compute, apply).unwrap();
        assert_eq!((report.step.0, report.failed_attempts), (step, 2));
        assert!(report.healed.is_some());
        // It contributes to the step that it healed into only if all did, and then with what it computed on that state, once.
        let healed = if all_healed { 100.0 } else { 0.0 };
        assert_eq!(*sent.borrow(), [(0, 1.0), (step, healed), (step, healed)]);
        assert_eq!((computed, weight.0), (1 + i32::from(all_healed), 100.0 + healed));
        d.step(&mut weight, |w, _| gradient(w), apply).unwrap();
        assert_eq!(
            sent.borrow()[3],
            (step + 1, 100.0 + healed),
            "from the next step on it contributes"
        );
    }
}

#[test]
fn inv5_a_step_whose_averages_were_applied_in_part_leaves_a_state_that_is_nobodys() {
    let (replica, sent) = watched();
    let (mut d, mut weight) = (made(replica), Weight(1.0));
    let e = d.step(
        &mut weight,
        |w, _| gradient(w),
        |w, _| {
            w.0 = -1.0;
            Err(Error::new(ErrorKind::Io, "the device is gone"))
        },
    );
    assert_eq!(e.unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(d.current_step(), Step(1), "it was committed");
    let snapshots = d.replica().snapshot.iter().count();
    for e in [
        d.step(&mut weight, |w, _| gradient(w), apply).map(drop),
        d.step(&mut weight, |w, _| gradient(w), apply).map(drop),
        d.save(&mut weight).map(drop),
        d.restore(&saved(2.0), &mut weight),
        d.finish(&mut weight),
    ] {
        let e = e.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidState, "{e}");
        for part in ["of no step", "the device is gone", "start the replica again"] {
            assert!(e.to_string().contains(part), "{e}");
        }
    }
    assert_eq!(
        (d.current_step(), sent.borrow().len()),
        (Step(1), 1),
        "it took no part any more"
    );
    assert_eq!(
        d.replica().snapshot.iter().count(),
        snapshots,
        "nothing of it was sent"
    );
}

#[test]
fn inv5_a_state_that_was_taken_over_in_part_is_nobodys() {
    let (mut replica, sent) = watched();
    replica.heal = Some(Source::Now(5, saved(-1.0)));
    let (mut d, mut weight) = (made(replica), Weight(1.0));
    for _ in 0..2 {
        let e = d.step(&mut weight, |w, _| gradient(w), apply).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidState, "{e}");
        assert!(e.to_string().contains("half of it was loaded"), "{e}");
    }
    assert!(d.save(&mut weight).is_err());
    assert_eq!((d.current_step(), sent.borrow().len()), (Step(0), 0));
}

#[test]
fn a_quorum_that_does_not_come_about_costs_no_step() {
    let (mut replica, sent) = watched();
    replica.quorums = VecDeque::from([false, true, false, true]);
    replica.votes = VecDeque::from([false]);
    replica.unanswered = VecDeque::from([None, Some(ErrorKind::Timeout), Some(ErrorKind::Unavailable)]);
    let (mut d, mut weight) = (made(replica), Weight(1.0));
    let mut errors = 0;
    let report = loop {
        match d.step(&mut weight, |w, _| gradient(w), apply) {
            Ok(report) => break report,
            Err(e) => assert_eq!(e.kind(), ErrorKind::Timeout, "{e}"),
        }
        errors += 1;
        assert!(errors < 5);
    };
    assert_eq!((report.step, errors, weight.0), (Step(0), 2, 2.0));
    assert!(
        sent.borrow().iter().all(|sent| *sent == (0, 1.0)),
        "{:?}",
        sent.borrow()
    );
}

#[test]
fn a_run_ends_once_and_its_end_is_retried_where_it_broke_off() {
    let (mut replica, sent) = watched();
    replica.quorums = VecDeque::from([true, false, true]);
    let (mut d, mut weight) = (made(replica), Weight(1.0));
    d.restore(&saved(3.0), &mut weight).unwrap();
    d.step(&mut weight, |w, _| gradient(w), apply).unwrap();
    let e = d.restore(&saved(3.0), &mut weight).unwrap_err();
    assert_eq!((e.kind(), weight.0), (ErrorKind::InvalidState, 6.0), "{e}");
    assert!(e.to_string().contains("before the first step"), "{e}");
    assert_eq!(d.finish(&mut weight).unwrap_err().kind(), ErrorKind::Timeout);
    d.finish(&mut weight).unwrap();
    assert_eq!((d.current_step(), sent.borrow().len()), (Step(2), 1));
    for e in [
        d.finish(&mut weight),
        d.step(&mut weight, |w, _| gradient(w), apply).map(drop),
    ] {
        let e = e.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidState, "{e}");
        assert!(e.to_string().contains("the run has ended"), "{e}");
    }
    assert_eq!(d.replica().current_step(), Step(2));
    d.save(&mut weight).unwrap();
}

#[test]
fn a_leave_that_broke_off_may_be_repeated_and_no_step_comes_after_it() {
    let (mut replica, _) = watched();
    replica.leaves_badly = true;
    let (mut d, mut weight) = (made(replica), Weight(1.0));
    d.step(&mut weight, |w, _| gradient(w), apply).unwrap();
    assert_eq!(d.leave().unwrap_err().kind(), ErrorKind::Io);
    let e = d.step(&mut weight, |w, _| gradient(w), apply).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::InvalidState, "{e}");
    d.leave().unwrap();
    assert_eq!(d.leave().unwrap_err().kind(), ErrorKind::InvalidState);
}

/// A training loop that saves something under a name of its choice.
struct Named(&'static str);

impl State for Named {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        out.insert_i64s(self.0, &[1])
    }
    fn load(&mut self, _: &StateDict) -> Result<()> {
        Ok(())
    }
}

#[test]
fn a_state_with_a_name_that_is_in_use_is_refused() {
    // Two buckets, so that there is an order to learn.
    let config = DdpConfig {
        first_bucket_elements: 1,
        bucket_elements: 1,
        ..DdpConfig::default()
    };
    let mut d = Ddp::new(watched().0, &[Slot::f32(1), Slot::f32(1)], config).unwrap();
    let push = |_: &mut Named, _: u32, sink: &mut oxccl_ddp::Sink<'_>| {
        sink.push(0, &[1.0f32])?;
        sink.push(1, &[1.0f32])
    };
    d.step_with(&mut Named("mine"), push, |_, _| Ok(())).unwrap();
    // The order of the gradients is learnt by now.
    d.save(&mut Named("mine")).unwrap();
    let e = d.save(&mut Named("ddp.order")).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}");
    assert!(e.message().contains("'ddp.order'"), "{e}");
}
