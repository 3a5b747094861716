//! States that must not be taken over: of another outer optimizer, of one that does not fit, and by halves.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use crate::scripted::{begun, layer, params};
use ftcore::{Error, ErrorKind, Result};
use oxccl_diloco::{Diloco, DilocoConfig, OuterOptimizer, Parameters, SliceParameters};
use replica::State;
use replica::StateDict;
use training_rig::{Nothing, ScriptedReplica, Source};

const NESTEROV: OuterOptimizer = OuterOptimizer::Nesterov {
    lr: 0.5,
    momentum: 0.5,
};

fn config(outer: OuterOptimizer) -> DilocoConfig {
    DilocoConfig {
        outer,
        ..DilocoConfig::diloco(2)
    }
}

/// A run with momentum, after its first round; its step and state.
fn source() -> (i64, StateDict) {
    let mut d = begun(ScriptedReplica::identical(), &[2, 3], config(NESTEROV));
    for _ in 0..2 {
        for i in 0..2 {
            d.params_mut()
                .write(i, &mut |w| w.iter_mut().for_each(|w| *w -= 1.0))
                .unwrap();
        }
        d.after_inner_step(&mut Nothing).unwrap();
    }
    (d.step().0, d.save(&mut Nothing).unwrap())
}

fn made(outer: OuterOptimizer, replica: ScriptedReplica) -> Diloco<ScriptedReplica, SliceParameters> {
    Diloco::with_layers(replica, params(&[2, 3]), config(outer), &layer).unwrap()
}

#[test]
fn inv6_replicas_with_different_outer_optimizers_are_told_both_and_never_drift_apart() {
    for (outer, says) in [
        (
            OuterOptimizer::Nesterov {
                lr: 0.4,
                momentum: 0.5,
            },
            "here is nesterov with rate 0.4 and momentum 0.5, at the source nesterov with rate 0.5 and momentum 0.5",
        ),
        (
            OuterOptimizer::Nesterov {
                lr: 0.5,
                momentum: 0.25,
            },
            "momentum 0.25",
        ),
        (
            OuterOptimizer::Sgd { lr: 0.5 },
            "here sgd, at the source nesterov",
        ),
        (
            OuterOptimizer::AdamW { lr: 0.5 },
            "here adamw, at the source nesterov",
        ),
    ] {
        let (step, state) = source();
        let mut replica = ScriptedReplica::identical();
        replica.heal = Some(Source::Now(step, state));
        let mut d = made(outer, replica);
        let before = d.global_hash().unwrap();
        let e = d.begin(&mut Nothing).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidArgument, "no epoch would change it");
        assert!(e.to_string().contains(says), "{e}");
        assert_eq!(d.global_hash().unwrap(), before);
    }
}

#[test]
fn a_run_that_was_stopped_may_go_on_with_another_rate_but_not_with_another_optimizer() {
    let (step, state) = source();
    let restored = |outer| {
        let mut replica = ScriptedReplica::identical();
        replica.step = step;
        made(outer, replica).restore(&state, &mut Nothing)
    };
    restored(OuterOptimizer::Nesterov {
        lr: 0.25,
        momentum: 0.5,
    })
    .unwrap();
    assert!(restored(OuterOptimizer::AdamW { lr: 0.5 }).is_err());
}

#[test]
fn inv10_an_outer_optimizer_that_does_not_fit_is_refused_before_anything_is_written() {
    let (step, state) = source();
    for bad in [1usize, 4] {
        let mut spoilt = StateDict::new();
        for (key, value) in state.metadata() {
            spoilt.set_metadata(key.clone(), value.clone());
        }
        for (name, _) in state.iter() {
            match name {
                "outer.0/velocity.1" => spoilt.insert_f32(name, &[bad], &vec![0.5; bad]).unwrap(),
                "diloco/count" | "diloco/step" => {
                    let numbers = state.get_i64s(name).unwrap();
                    spoilt.insert_i64s(name, &numbers).unwrap();
                }
                _ => {
                    let values = state.get_f32(name).unwrap();
                    spoilt.insert_f32(name, &[values.len()], &values).unwrap();
                }
            }
        }
        let mut replica = ScriptedReplica::identical();
        replica.step = step;
        let mut d = made(NESTEROV, replica);
        let before = (d.global_hash().unwrap(), d.params().clone());
        let e = d.restore(&spoilt, &mut Nothing).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Corrupt, "{e}");
        assert!(e.to_string().contains("does not fit fragment 0"), "{e}");
        assert_eq!((d.global_hash().unwrap(), d.params().clone()), before);
        // The sound one is still welcome.
        d.restore(&state, &mut Nothing).unwrap();
    }
}

/// A training loop whose own state cannot be taken over.
struct Stubborn;

impl State for Stubborn {
    fn save(&self, _: &mut StateDict) -> Result<()> {
        Ok(())
    }
    fn load(&mut self, _: &StateDict) -> Result<()> {
        Err(Error::new(ErrorKind::Corrupt, "half of it was loaded"))
    }
}

#[test]
fn inv5_a_training_loop_that_takes_over_half_of_its_state_leaves_one_of_no_step() {
    let (step, state) = source();
    let mut replica = ScriptedReplica::identical();
    replica.heal = Some(Source::Now(step, state));
    let mut d = made(NESTEROV, replica);
    let e = d.begin(&mut Stubborn).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::InvalidState, "{e}");
    assert!(e.to_string().contains("half of it was loaded"), "{e}");
    assert!(d.begin(&mut Nothing).is_err() && d.save(&mut Nothing).is_err());
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
fn a_training_loop_whose_state_has_a_name_that_is_in_use_is_refused() {
    let refused = |e: Error, name: &str| {
        assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}");
        assert!(e.message().contains(&format!("'{name}'")), "{e}");
    };
    for name in ["global/p0", "diloco/count"] {
        // What a peer would heal from, at the first quorum.
        let mut d = made(NESTEROV, ScriptedReplica::identical());
        refused(d.begin(&mut Named(name)).unwrap_err(), name);
    }
    let mut d = made(NESTEROV, ScriptedReplica::identical());
    d.begin(&mut Named("mine")).unwrap();
    d.save(&mut Named("mine")).unwrap();
    refused(d.save(&mut Named("diloco/step")).unwrap_err(), "diloco/step");
}
