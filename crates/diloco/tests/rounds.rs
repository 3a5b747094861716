//! Rounds with hand-computed histories, over a replica that plays the rest of the world.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::collections::VecDeque;

use crate::scripted::{begun, layer, params};
use ftcore::{Result, Step};
use oxccl_diloco::{Diloco, DilocoConfig, OuterOptimizer, Parameters, SliceParameters};
use replica::StateDict;
use training_rig::{Nothing, ScriptedReplica, Source};

/// Every inner step takes 1 off every parameter.
fn inner_steps(d: &mut Diloco<ScriptedReplica, SliceParameters>, n: usize) -> Vec<oxccl_diloco::RoundReport> {
    let mut reports = Vec::new();
    for _ in 0..n {
        for i in 0..d.params().len() {
            d.params_mut()
                .write(i, &mut |w| w.iter_mut().for_each(|w| *w -= 1.0))
                .unwrap();
        }
        reports.extend(d.after_inner_step(&mut Nothing).unwrap());
    }
    reports
}

fn sgd(lr: f32) -> OuterOptimizer {
    OuterOptimizer::Sgd { lr }
}

#[test]
fn local_sgd_adopts_the_mean_of_the_replicas() {
    // The other replica moved three times as far: mean gradient is twice this one's.
    let mut d = begun(
        ScriptedReplica::averaging(|own| own.iter().map(|x| (x + 3.0 * x) / 2.0).collect()),
        &[2],
        DilocoConfig::local_sgd(4),
    );
    assert_eq!(inner_steps(&mut d, 4).len(), 1);
    assert_eq!(d.params().get(0).unwrap(), [-8.0, -8.0]);
}

#[test]
fn outer_gradients_are_reduced_in_the_memory_of_the_round_before() {
    let config = DilocoConfig {
        bucket_elements: 2,
        ..DilocoConfig::local_sgd(1)
    };
    let mut d = begun(ScriptedReplica::identical(), &[5], config);
    for round in 1..4 {
        assert_eq!(inner_steps(&mut d, 1).len(), 1);
        assert_eq!(d.params().get(0).unwrap(), [-(round as f32); 5]);
        assert_eq!(d.replica().allocated.get(), 3, "round {round}");
    }
}

#[test]
fn nesterov_momentum_follows_the_hand_computed_history() {
    let outer = OuterOptimizer::Nesterov {
        lr: 0.5,
        momentum: 0.5,
    };
    let mut d = begun(
        ScriptedReplica::identical(),
        &[1],
        DilocoConfig {
            outer,
            ..DilocoConfig::diloco(2)
        },
    );
    inner_steps(&mut d, 2); // gradient 2: b = 2, direction 2 + 1 = 3
    assert_eq!(d.params().get(0).unwrap(), [-1.5]);
    inner_steps(&mut d, 2); // gradient 2: b = 3, direction 2 + 1.5 = 3.5
    assert_eq!(d.params().get(0).unwrap(), [-3.25]);
}

#[test]
fn delay_and_mixing_match_the_closed_form() {
    for (delay, gradient) in [(0u64, 4.0f32), (1, 3.0)] {
        for alpha in [0.0f32, 0.5, 1.0] {
            let config = DilocoConfig {
                delay,
                mixing: alpha,
                outer: sgd(0.5),
                ..DilocoConfig::diloco(4)
            };
            let mut d = begun(ScriptedReplica::identical(), &[1], config);
            inner_steps(&mut d, 4);
            let global = -0.5 * gradient;
            assert_eq!(
                d.params().get(0).unwrap(),
                [alpha * -4.0 + (1.0 - alpha) * global],
                "delay {delay} alpha {alpha}"
            );
            assert_eq!(d.with_global(|p| p.get(0).unwrap().to_vec()).unwrap(), [global]);
            // The next round's outer gradient starts from the global copy, not from the mix.
            let local = alpha * -4.0 + (1.0 - alpha) * global;
            inner_steps(&mut d, 4);
            let at_send = local - (4 - delay) as f32;
            assert_eq!(
                d.with_global(|p| p.get(0).unwrap().to_vec()).unwrap(),
                [global - 0.5 * (global - at_send)],
                "second round, delay {delay} alpha {alpha}"
            );
        }
    }
}

#[test]
fn l13_a_failed_commit_applies_nothing_and_the_same_round_is_done_again() {
    let config = DilocoConfig {
        outer: OuterOptimizer::Nesterov {
            lr: 0.7,
            momentum: 0.9,
        },
        ..DilocoConfig::diloco(4)
    };
    let mut undisturbed = begun(ScriptedReplica::identical(), &[3, 5], config.clone());
    inner_steps(&mut undisturbed, 8);

    let mut replica = ScriptedReplica::identical();
    replica.votes = VecDeque::from([true, false, false, true]);
    let mut d = begun(replica, &[3, 5], config);
    let reports = inner_steps(&mut d, 8);
    assert_eq!(
        reports.iter().map(|r| r.failed_attempts).collect::<Vec<_>>(),
        [2, 0]
    );
    assert_eq!(d.global_hash().unwrap(), undisturbed.global_hash().unwrap());
    assert_eq!(d.params(), undisturbed.params());
}

#[test]
fn a_lost_reduction_never_commits_and_the_kept_gradient_is_sent_again() {
    let mut replica = ScriptedReplica::identical();
    replica.reductions = VecDeque::from([false, true]);
    let config = DilocoConfig {
        delay: 1,
        mixing: 0.0,
        outer: sgd(1.0),
        ..DilocoConfig::diloco(4)
    };
    let mut d = begun(replica, &[2], config);
    let reports = inner_steps(&mut d, 4);
    assert_eq!(reports[0].failed_attempts, 1);
    // 3, as it was when the round was begun: not 4, as it is when it is repeated.
    assert_eq!(d.params().get(0).unwrap(), [-3.0, -3.0]);
}

#[test]
fn l04_every_element_is_reduced_whatever_the_bucket_size() {
    for sizes in [&[6usize, 6, 6][..], &[12, 3, 3], &[1, 20, 1]] {
        for bucket_elements in [1, 5, 10, 1000] {
            let config = DilocoConfig {
                outer: sgd(1.0),
                bucket_elements,
                ..DilocoConfig::diloco(1)
            };
            let mut d = begun(
                ScriptedReplica::averaging(|own| own.iter().map(|x| 10.0 * x).collect()),
                sizes,
                config,
            );
            inner_steps(&mut d, 1);
            for i in 0..sizes.len() {
                assert!(
                    d.params().get(i).unwrap().iter().all(|w| *w == -10.0),
                    "{sizes:?} {bucket_elements} {:?}",
                    d.params()
                );
            }
        }
    }
}

#[test]
fn l05_each_fragment_has_its_own_outer_optimizer_and_leaves_the_others_alone() {
    let outer = OuterOptimizer::Nesterov {
        lr: 1.0,
        momentum: 0.5,
    };
    let config = DilocoConfig {
        sync_every: 4,
        fragments: 2,
        delay: 0,
        mixing: 0.0,
        outer,
        ..DilocoConfig::default()
    };
    let mut d = begun(ScriptedReplica::identical(), &[1, 1], config);
    inner_steps(&mut d, 2); // fragment 0: gradient 2, direction 3
    assert_eq!(
        (d.params().get(0).unwrap(), d.params().get(1).unwrap()),
        (&[-3.0][..], &[-2.0][..])
    );
    inner_steps(&mut d, 2); // fragment 1: gradient 4, its own momentum starts from nothing: direction 6
    assert_eq!(
        (d.params().get(0).unwrap(), d.params().get(1).unwrap()),
        (&[-5.0][..], &[-6.0][..])
    );
}

#[test]
fn a_healed_replica_is_bitwise_equal_and_goes_on_in_step() {
    let config = DilocoConfig {
        sync_every: 8,
        fragments: 2,
        delay: 1,
        rounds: Some(50),
        ..DilocoConfig::default()
    };
    let mut healthy = begun(ScriptedReplica::identical(), &[4, 3], config.clone());
    inner_steps(&mut healthy, 4 * 3 + 3); // three rounds, and the fourth has been begun
    let snapshot = std::mem::replace(&mut healthy.replica().snapshot.clone(), StateDict::new());

    let mut replica = ScriptedReplica::identical();
    replica.heal = Some(Source::Now(healthy.step().0, snapshot));
    let mut d = Diloco::with_layers(replica, params(&[4, 3]), config, &layer).unwrap();
    assert!(
        d.begin(&mut Nothing).unwrap().is_empty(),
        "one inner step of the round is left"
    );
    assert_eq!(d.global_hash().unwrap(), healthy.global_hash().unwrap());
    let (a, b) = (inner_steps(&mut healthy, 1), inner_steps(&mut d, 1));
    assert_eq!((a.len(), b.len()), (1, 1));
    assert!(b[0].healed.is_some());
    assert_eq!(d.global_hash().unwrap(), healthy.global_hash().unwrap());
    // One fragment holds its own inner step and none of the source's, the other what was committed.
    let global = d
        .with_global(|p| [0, 1].map(|i| p.get(i).unwrap().to_vec()))
        .unwrap();
    let stepped: Vec<f32> = global[0].iter().map(|w| w - 1.0).collect();
    let local = [0, 1].map(|i| d.params().get(i).unwrap().to_vec());
    assert_eq!(local, [stepped, global[1].clone()]);
}

#[test]
fn state_of_another_model_is_refused_and_changes_nothing() {
    let config = DilocoConfig::diloco(4);
    let other = begun(ScriptedReplica::identical(), &[4, 4], config.clone());
    let snapshot = other.replica().snapshot.clone();
    let mut replica = ScriptedReplica::identical();
    replica.heal = Some(Source::Now(1, snapshot));
    let mut d = Diloco::with_layers(replica, params(&[4, 3]), config, &layer).unwrap();
    let before = d.global_hash().unwrap();
    let e = d.begin(&mut Nothing).unwrap_err();
    assert!(
        e.to_string().contains("p1[3]") && e.to_string().contains("p1[4]"),
        "{e}"
    );
    assert_eq!(d.global_hash().unwrap(), before);
    assert_eq!(d.step(), Step(0));
}

#[test]
fn the_configured_number_of_rounds_ends_with_a_closing_round_without_data() {
    let seen = std::rc::Rc::new(std::cell::Cell::new(0));
    let count = seen.clone();
    let replica = ScriptedReplica::averaging(move |own| {
        count.set(count.get() + 1);
        own.to_vec()
    });
    let mut d = begun(
        replica,
        &[2],
        DilocoConfig {
            rounds: Some(2),
            ..DilocoConfig::diloco(1)
        },
    );
    inner_steps(&mut d, 2);
    assert!(d.is_finished());
    d.finish(&mut Nothing).unwrap();
    assert_eq!(seen.get(), 2);
}

/// Eager updates by the published rule for plain SGD, computed for one replica of `m` whose mean gradient is `scale` times
/// its own: each round applies the rest of the last mean and a fresh own part (arXiv 2502.12996).
fn published_eager(rounds: usize, h: f32, m: f32, scale: f32, lr: f32) -> Vec<f32> {
    let (mut base, mut last, mut history) = (0.0f32, None::<f32>, Vec::new());
    for _ in 0..rounds {
        let own = base - (base - h);
        let rest = last.map_or(0.0, |own: f32| scale * own - own / m);
        base -= lr * (own / m + rest);
        last = Some(own);
        history.push(base);
    }
    history
}

#[test]
fn eager_updates_follow_the_published_rule_and_keep_finished_rounds_apart() {
    for (scale, lr) in [(1.0f32, 0.5f32), (3.0, 0.25), (0.5, 1.0)] {
        let config = DilocoConfig {
            eager: true,
            outer: sgd(lr),
            ..DilocoConfig::diloco(4)
        };
        let world = ScriptedReplica::averaging(move |own: &[f32]| own.iter().map(|x| scale * x).collect());
        let mut d = begun(world, &[2], config);
        for (round, expected) in published_eager(4, 4.0, 2.0, scale, lr).into_iter().enumerate() {
            inner_steps(&mut d, 4);
            assert_eq!(
                d.params().get(0).unwrap(),
                [expected, expected],
                "scale {scale} round {round}"
            );
            // The outer state holds what is finished: everything up to the round before.
            let global = d.with_global(|p| p.get(0).unwrap()[0]).unwrap();
            assert_eq!(global, -lr * scale * 4.0 * round as f32);
        }
    }
}

#[test]
fn eager_updates_end_with_every_round_finished_and_the_replicas_equal() {
    let config = |fragments| DilocoConfig {
        eager: true,
        fragments,
        sync_every: 4,
        rounds: Some(3),
        outer: OuterOptimizer::Nesterov {
            lr: 0.5,
            momentum: 0.5,
        },
        ..DilocoConfig::diloco(4)
    };
    let mut d = begun(ScriptedReplica::identical(), &[1], config(1));
    let reports = inner_steps(&mut d, 12);
    let steps: Vec<i64> = reports.iter().map(|r| r.step.0).collect();
    assert_eq!(steps, [1, 2, 3], "12 inner steps finish three rounds of four");
    assert!(d.is_finished());
    // Gradients 4, 4, 4: b = 4, 6, 7 and directions 6, 7, 7.5.
    assert_eq!(d.with_global(|p| p.get(0).unwrap()[0]).unwrap(), -0.5 * 20.5);
    d.finish(&mut Nothing).unwrap();

    let mut two = begun(ScriptedReplica::identical(), &[1, 1], config(2));
    assert_eq!(inner_steps(&mut two, 6).len(), 3);
    assert!(two.is_finished());
    two.finish(&mut Nothing).unwrap();
}

#[test]
fn a_healed_replica_with_eager_updates_is_bitwise_equal_and_goes_on_in_step() {
    let config = DilocoConfig {
        eager: true,
        outer: OuterOptimizer::Nesterov {
            lr: 0.7,
            momentum: 0.9,
        },
        ..DilocoConfig::diloco(4)
    };
    let mut source = begun(ScriptedReplica::identical(), &[3, 5], config.clone());
    inner_steps(&mut source, 8);
    // What a peer gets that heals where the source began its last round.
    let (step, dict) = (source.step(), source.replica().snapshot.clone());

    let mut replica = ScriptedReplica::identical();
    replica.heal = Some(Source::Now(step.0, dict));
    let mut healed = Diloco::with_layers(replica, params(&[3, 5]), config.clone(), &layer).unwrap();
    assert!(
        healed.begin(&mut Nothing).unwrap().is_empty(),
        "there are inner steps to make first"
    );
    assert_eq!(healed.global_hash().unwrap(), source.global_hash().unwrap());
    let (a, b) = (inner_steps(&mut source, 4), inner_steps(&mut healed, 4));
    assert_eq!((a.len(), b.len()), (1, 1));
    assert_eq!(a[0].step, b[0].step);

    // A state without eager updates is not taken for one with them.
    let mut plain = begun(
        ScriptedReplica::identical(),
        &[3, 5],
        DilocoConfig {
            eager: false,
            ..config.clone()
        },
    );
    inner_steps(&mut plain, 4);
    let mut replica = ScriptedReplica::identical();
    replica.heal = Some(Source::Now(plain.step().0, plain.replica().snapshot.clone()));
    let mut other = Diloco::with_layers(replica, params(&[3, 5]), config, &layer).unwrap();
    let e = other.begin(&mut Nothing).unwrap_err().to_string();
    assert!(e.contains("here eager, at the source plain"), "{e}");
}

#[test]
fn a_lost_reduction_with_eager_updates_is_sent_again_and_changes_no_bit() {
    let config = DilocoConfig {
        eager: true,
        outer: sgd(0.5),
        ..DilocoConfig::diloco(4)
    };
    let mut undisturbed = begun(ScriptedReplica::identical(), &[3], config.clone());
    inner_steps(&mut undisturbed, 12);
    let mut replica = ScriptedReplica::identical();
    replica.reductions = VecDeque::from([true, false, false, true]);
    let mut d = begun(replica, &[3], config);
    let reports = inner_steps(&mut d, 12);
    assert_eq!(
        reports.iter().map(|r| r.failed_attempts).collect::<Vec<_>>(),
        [0, 2]
    );
    assert_eq!(d.global_hash().unwrap(), undisturbed.global_hash().unwrap());
    assert_eq!(d.params(), undisturbed.params());
}

/// Parameters that a framework holds in bf16: read as f32, rounded to nearest even when written.
#[derive(Clone)]
struct Bf16(Vec<f32>);

fn bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff_0000)
}

impl Parameters for Bf16 {
    fn len(&self) -> usize {
        1
    }
    fn name(&self, _: usize) -> &str {
        "p0"
    }
    fn count(&self, _: usize) -> usize {
        self.0.len()
    }
    fn read(&self, _: usize, f: &mut dyn FnMut(&[f32])) -> Result<()> {
        f(&self.0);
        Ok(())
    }
    fn write(&mut self, _: usize, f: &mut dyn FnMut(&mut [f32])) -> Result<()> {
        f(&mut self.0);
        self.0.iter_mut().for_each(|x| *x = bf16(*x));
        Ok(())
    }
}

#[test]
fn bf16_parameters_keep_a_global_copy_in_f32() {
    // One inner step takes 1/256 off 1.0, which bf16 still shows; a tenth of it bf16 cannot hold, the global copy can.
    let config = DilocoConfig {
        outer: sgd(0.1),
        ..DilocoConfig::diloco(1)
    };
    let mut d = Diloco::with_layers(ScriptedReplica::identical(), Bf16(vec![1.0]), config, &layer).unwrap();
    d.begin(&mut Nothing).unwrap();
    let mut global = 1.0f32;
    for _ in 0..3 {
        d.params_mut().write(0, &mut |w| w[0] -= 1.0 / 256.0).unwrap();
        let mut local = 0.0;
        d.params().read(0, &mut |w| local = w[0]).unwrap();
        d.after_inner_step(&mut Nothing).unwrap();
        global -= 0.1 * (global - local);
        let mut after = 0.0;
        d.params().read(0, &mut |w| after = w[0]).unwrap();
        assert_eq!(after, bf16(global));
    }
    assert_ne!(global, bf16(global), "the test would show nothing");
    let expected = oxccl_diloco::parameters_hash(std::iter::once(("p0", &[global][..])));
    assert_eq!(d.global_hash().unwrap(), expected);
}

#[test]
fn one_two_and_three_fragments_send_every_parameter_once_in_h_steps() {
    for fragments in [1usize, 2, 3] {
        let config = DilocoConfig {
            sync_every: 6,
            fragments,
            outer: sgd(1.0),
            ..DilocoConfig::diloco(6)
        };
        // The other replica did nothing: the mean is half of this one's.
        let mut d = begun(
            ScriptedReplica::averaging(|own| own.iter().map(|x| x / 2.0).collect()),
            &[1, 1, 1],
            config,
        );
        assert_eq!(inner_steps(&mut d, 6).len(), fragments);
        for p in 0..3 {
            // Layer p is fragment p mod P, sent after (p mod P + 1) · 6 / P steps; after that it goes on alone.
            let sent_after = ((p % fragments + 1) * 6 / fragments) as f32;
            let expected = -sent_after / 2.0 - (6.0 - sent_after);
            assert_eq!(
                d.params().get(p).unwrap(),
                [expected],
                "{fragments} fragments, parameter {p}"
            );
        }
    }
}

/// Parameters that write down which of them were touched.
struct Watched {
    inner: SliceParameters,
    read: std::cell::RefCell<Vec<usize>>,
    written: Vec<usize>,
}

impl Parameters for Watched {
    fn len(&self) -> usize {
        self.inner.len()
    }
    fn name(&self, i: usize) -> &str {
        self.inner.name(i)
    }
    fn count(&self, i: usize) -> usize {
        self.inner.count(i)
    }
    fn read(&self, i: usize, f: &mut dyn FnMut(&[f32])) -> Result<()> {
        self.read.borrow_mut().push(i);
        self.inner.read(i, f)
    }
    fn write(&mut self, i: usize, f: &mut dyn FnMut(&mut [f32])) -> Result<()> {
        self.written.push(i);
        self.inner.write(i, f)
    }
}

#[test]
fn a_round_touches_its_own_fragment_only_once_each_way_and_one_parameter_at_a_time() {
    // What lies on a device is brought to the host tensor by tensor: no copy of a fragment is ever needed there, let alone of two.
    let config = DilocoConfig {
        sync_every: 6,
        fragments: 3,
        delay: 1,
        ..DilocoConfig::default()
    };
    let mut replica = ScriptedReplica::identical();
    replica.snapshots = false;
    let params = Watched {
        inner: params(&[2, 1, 2, 1, 2, 1]),
        read: std::cell::RefCell::default(),
        written: Vec::new(),
    };
    let mut d = Diloco::with_layers(replica, params, config, &layer).unwrap();
    d.begin(&mut Nothing).unwrap();
    let mut touched = Vec::new();
    for _ in 0..6 {
        d.params_mut().read.get_mut().clear();
        d.params_mut().written.clear();
        d.after_inner_step(&mut Nothing).unwrap();
        let (read, written) = (d.params().read.borrow().clone(), d.params().written.clone());
        touched.push((read, written));
    }
    // Sent one inner step before it is applied: read at one step, written at the next. Layers l and l + 3 are one fragment.
    let expected: Vec<(Vec<usize>, Vec<usize>)> = (0..3)
        .flat_map(|f| [(vec![f, f + 3], vec![]), (vec![], vec![f, f + 3])])
        .collect();
    assert_eq!(touched, expected);
}

#[test]
fn adamw_as_the_outer_optimizer_follows_the_hand_computed_history() {
    // A constant gradient of 2: after bias correction both moments are those of the gradient, so each step is the rate itself.
    let config = DilocoConfig {
        outer: OuterOptimizer::AdamW { lr: 0.25 },
        ..DilocoConfig::diloco(2)
    };
    let mut d = begun(ScriptedReplica::identical(), &[1], config);
    for round in 1..=4u8 {
        inner_steps(&mut d, 2);
        let global = d.params().get(0).unwrap()[0];
        assert!((global + 0.25 * f32::from(round)).abs() < 1e-6, "{global}");
    }
}

#[test]
fn inv6_a_bucket_that_comes_back_short_is_a_lost_reduction() {
    let mut short = true;
    let replica = ScriptedReplica::averaging(move |own| {
        let most = own.len() - usize::from(std::mem::take(&mut short));
        own[..most].to_vec()
    });
    let config = DilocoConfig {
        outer: sgd(1.0),
        ..DilocoConfig::diloco(2)
    };
    let mut d = begun(replica, &[3], config);
    let reports = inner_steps(&mut d, 2);
    assert_eq!(reports[0].failed_attempts, 1);
    assert_eq!(d.params().get(0).unwrap(), [-2.0; 3]);
}
