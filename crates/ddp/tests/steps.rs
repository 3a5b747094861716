//! Steps over a replica that plays the rest of the world: buckets, overlap, micro-batches, unused parameters, retries.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use ftcore::{DType, Error, ErrorKind, Result, Step, Tensor};
use half::bf16;
use oxccl_ddp::{Ddp, DdpConfig, Slot};
use replica::State;
use replica::StateDict;
use training_rig::{Nothing, ScriptedReplica, Source};

/// The type and the elements of each bucket, in the order in which they were sent; shared, so that a test can look while gradients are
/// computed.
type Sent = Rc<RefCell<Vec<(DType, usize)>>>;

fn double(tensor: &mut Tensor) {
    match tensor.dtype() {
        DType::F64 => tensor
            .as_mut_slice::<f64>()
            .unwrap()
            .iter_mut()
            .for_each(|x| *x *= 2.0),
        DType::BF16 => tensor
            .as_mut_slice::<bf16>()
            .unwrap()
            .iter_mut()
            .for_each(|x| *x = bf16::from_f32(x.to_f32() * 2.0)),
        _ => tensor
            .as_mut_slice::<f32>()
            .unwrap()
            .iter_mut()
            .for_each(|x| *x *= 2.0),
    }
}

/// A replica among others of which the mean is twice its own value.
fn doubled() -> (ScriptedReplica, Sent) {
    let sent = Sent::default();
    let seen = sent.clone();
    let replica = ScriptedReplica::of_tensors(move |_, mut tensors| {
        seen.borrow_mut().push((tensors[0].dtype(), tensors[0].count()));
        // What the transport does to its input, also when it fails, must not reach a second attempt.
        tensors.iter_mut().for_each(double);
        tensors
    });
    (replica, sent)
}

fn ddp(
    slots: &[Slot],
    (first, rest): (usize, usize),
    micro_batches: u32,
    reductions: &[bool],
) -> (Ddp<ScriptedReplica>, Sent) {
    let (mut replica, sent) = doubled();
    replica.reductions = reductions.iter().copied().collect();
    let config = DdpConfig {
        first_bucket_elements: first,
        bucket_elements: rest,
        micro_batches,
        ..DdpConfig::default()
    };
    (Ddp::new(replica, slots, config).unwrap(), sent)
}

#[test]
fn l04_every_gradient_is_averaged_whatever_the_buckets() {
    for (first, rest) in [(1, 1), (2, 3), (5, 10), (1000, 1000)] {
        let gradients: Vec<Vec<f32>> = [6usize, 0, 6, 1, 20]
            .iter()
            .enumerate()
            .map(|(i, n)| (0..*n).map(|k| (100 * i + k) as f32).collect())
            .collect();
        let mut averages = Vec::new();
        let slots: Vec<Slot> = gradients.iter().map(|g| Slot::f32(g.len())).collect();
        let (mut d, _) = ddp(&slots, (first, rest), 1, &[]);
        let report = d
            .step(
                &mut Nothing,
                |_, _| Ok(gradients.clone()),
                |_, a| {
                    averages = a.to_vec();
                    Ok(())
                },
            )
            .unwrap();
        assert_eq!(report.contributors, 2);
        let expected: Vec<Vec<f32>> = gradients
            .iter()
            .map(|g| g.iter().map(|x| 2.0 * x).collect())
            .collect();
        assert_eq!(averages, expected, "{first} {rest}");
    }
}

#[test]
fn a_bucket_leaves_while_later_gradients_are_still_being_computed() {
    let slots = [Slot::f32(3), Slot::f32(2), Slot::f32(2)];
    let (mut d, sent) = ddp(&slots, (2, 3), 1, &[]);
    let mut averages = Vec::new();
    let mut under_way = Vec::new();
    d.step_with(
        &mut Nothing,
        |_, _, sink| {
            // Out of order: the last bucket in the order of sending is full first, and waits.
            sink.push(0, &[1.0f32, 2.0, 3.0])?;
            under_way.push(sent.borrow().len());
            sink.push(2, &[6.0f32, 7.0])?;
            under_way.push(sent.borrow().len());
            sink.push(1, &[4.0f32, 5.0])?;
            under_way.push(sent.borrow().len());
            Ok(())
        },
        |_, a| {
            averages = a
                .iter()
                .map(|t| t.as_slice::<f32>().map(<[f32]>::to_vec))
                .collect::<Result<Vec<_>>>()?;
            Ok(())
        },
    )
    .unwrap();
    assert_eq!(averages, [vec![2.0, 4.0, 6.0], vec![8.0, 10.0], vec![12.0, 14.0]]);
    assert_eq!(
        *sent.borrow(),
        [(DType::F32, 2), (DType::F32, 3), (DType::F32, 2), (DType::F32, 3)],
        "a small first bucket, then from the last gradient to the first, and in which order they came"
    );
    assert_eq!(
        under_way,
        [0, 1, 3],
        "each bucket leaves with the push that fills it"
    );
}

#[test]
fn several_dtypes_micro_batches_and_unused_parameters_go_together() {
    let slots = [
        Slot::f32(2),
        Slot {
            dtype: DType::BF16,
            count: 1,
        },
        Slot {
            dtype: DType::F64,
            count: 1,
        },
        Slot::f32(3),
    ];
    let (mut d, _) = ddp(&slots, (4, 4), 2, &[]);
    let mut averages = Vec::new();
    d.step_with(
        &mut Nothing,
        |_, micro_batch, sink| {
            let x = f32::from(u8::try_from(micro_batch).unwrap());
            sink.push(2, &[1.0 + f64::from(x)])?;
            sink.push(1, &[bf16::from_f32(4.0 * x)])?;
            // Slot 0 is used in the first micro-batch only, slot 3 in none.
            if micro_batch == 0 {
                sink.push(0, &[1.0f32, 3.0])?;
            }
            Ok(())
        },
        |_, a| {
            averages = copies(a);
            Ok(())
        },
    )
    .unwrap();
    assert_eq!(averages[0].as_slice::<f32>().unwrap(), [1.0, 3.0]);
    assert_eq!(averages[1].as_slice::<bf16>().unwrap(), [bf16::from_f32(4.0)]);
    assert_eq!(averages[2].as_slice::<f64>().unwrap(), [3.0]);
    assert_eq!(averages[3].as_slice::<f32>().unwrap(), [0.0; 3]);
}

#[test]
fn l13_a_failed_step_sends_the_same_gradients_again_without_computing_anew() {
    let (mut d, _) = ddp(&[Slot::f32(4)], (2, 2), 1, &[true, false, true, false]);
    let mut computed = 0;
    let mut averages = Vec::new();
    let report = d
        .step_with(
            &mut Nothing,
            |_, _, sink| {
                computed += 1;
                sink.push(0, &[1.0f32, 2.0, 3.0, 4.0])
            },
            |_, a| {
                averages = copies(a);
                Ok(())
            },
        )
        .unwrap();
    assert_eq!((computed, report.failed_attempts), (1, 2));
    assert_eq!(averages[0].as_slice::<f32>().unwrap(), [2.0, 4.0, 6.0, 8.0]);
}

fn copies(tensors: &[Tensor]) -> Vec<Tensor> {
    tensors.iter().map(|t| t.duplicate().unwrap()).collect()
}

#[test]
fn a_gradient_that_is_not_pushed_is_zero_whatever_the_step_before_left_in_its_bucket() {
    let (mut d, _) = ddp(&[Slot::f32(2), Slot::f32(3)], (4, 4), 1, &[]);
    for pushed in [[true, true], [true, false], [false, true], [true, true]] {
        d.step_with(
            &mut Nothing,
            |_, _, sink| {
                for slot in [1, 0].into_iter().filter(|&slot| pushed[slot]) {
                    sink.push(slot, &[1.0f32; 3][..slot + 2])?;
                }
                Ok(())
            },
            |_, averages| {
                for (slot, average) in averages.iter().enumerate() {
                    let expected = [0.0, 2.0][usize::from(pushed[slot])];
                    assert_eq!(average.as_slice::<f32>().unwrap(), vec![expected; slot + 2]);
                }
                Ok(())
            },
        )
        .unwrap();
    }
}

#[test]
fn buckets_are_reduced_in_the_memory_of_the_step_before() {
    let (mut d, sent) = ddp(&[Slot::f32(5)], (2, 2), 1, &[]);
    for step in 1..4 {
        d.step_with(
            &mut Nothing,
            |_, _, sink| sink.push(0, &[1.0f32; 5]),
            |_, averages| {
                assert_eq!(averages[0].as_slice::<f32>().unwrap(), [2.0; 5]);
                Ok(())
            },
        )
        .unwrap();
        // The first one sends the order, too, in memory of its own.
        assert_eq!(sent.borrow().len(), 3 * step + 1);
        assert_eq!(d.replica().allocated.get(), 4, "step {step}");
    }
}

#[test]
fn wrong_gradients_are_named_and_stop_the_step() {
    let slots = [Slot::f32(2)];
    let refused = |f: &mut dyn FnMut(&mut oxccl_ddp::Sink<'_>) -> Result<()>, text: &str| {
        let (mut d, _) = ddp(&slots, (4, 4), 1, &[]);
        let e = d
            .step_with(&mut Nothing, |_, _, sink| f(sink), |_, _| panic!("not applied"))
            .unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidArgument);
        assert!(e.to_string().contains(text), "{e}");
    };
    refused(&mut |s| s.push(1, &[1.0f32]), "no gradient slot 1; there are 1");
    refused(&mut |s| s.push(0, &[1.0f32]), "2 elements of f32, not 1 of f32");
    refused(&mut |s| s.push(0, &[1.0f64, 2.0]), "not 2 of f64");
    refused(
        &mut |s| {
            s.push(0, &[1.0f32, 2.0])?;
            s.push(0, &[1.0f32, 2.0])
        },
        "twice in micro-batch 0",
    );
    let (mut d, _) = ddp(&slots, (4, 4), 2, &[]);
    let e = d.step(&mut Nothing, |_, _| Ok(vec![vec![1.0]]), |_, _| Ok(()));
    let e = e.unwrap_err();
    assert!(e.to_string().contains("step_with"), "{e}");
    let (mut d, _) = ddp(&slots, (4, 4), 1, &[]);
    let e = d.step(&mut Nothing, |_, _| Ok(Vec::new()), |_, _| panic!("not applied"));
    let e = e.unwrap_err().to_string();
    assert!(e.contains("0 gradients were computed; there are 1 slots"), "{e}");
}

#[test]
fn micro_batches_leave_with_the_last_one_and_are_averaged_in_f32() {
    let slots = [Slot {
        dtype: DType::BF16,
        count: 1,
    }];
    let (mut d, sent) = ddp(&slots, (1, 1), 3, &[]);
    let mut averages = Vec::new();
    d.step_with(
        &mut Nothing,
        |_, micro_batch, sink| {
            assert_eq!(sent.borrow().len(), 0, "micro-batch {micro_batch}");
            // Added up in bf16 the two small ones would be lost beside 256.
            let part = [256.0, 1.0, 1.0][usize::try_from(micro_batch).unwrap()];
            sink.push(0, &[bf16::from_f32(part)])
        },
        |_, a| {
            averages = copies(a);
            Ok(())
        },
    )
    .unwrap();
    assert_eq!(sent.borrow().len(), 1);
    // Twice the mean 86.
    assert_eq!(averages[0].as_slice::<bf16>().unwrap(), [bf16::from_f32(172.0)]);
}

/// A training loop whose parameter goes down by the averages.
struct Weight(f32);
impl State for Weight {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        out.insert_f32("weight", &[1], &[self.0])
    }
    fn load(&mut self, from: &StateDict) -> Result<()> {
        self.0 = from.get_f32("weight")?[0];
        Ok(())
    }
}

#[test]
fn a_replica_that_heals_takes_the_state_over_before_the_averages_and_steps_are_counted_to_the_end() {
    let mut source = StateDict::new();
    Weight(100.0).save(&mut source).unwrap();
    let (mut replica, sent) = doubled();
    replica.heal = Some(Source::Now(5, source));
    let config = DdpConfig {
        steps: Some(7),
        ..DdpConfig::default()
    };
    let mut d = Ddp::new(replica, &[Slot::f32(1)], config).unwrap();
    let mut weight = Weight(0.0);
    let apply = |w: &mut Weight, a: &[Vec<f32>]| {
        w.0 -= a[0][0];
        Ok(())
    };
    let report = d
        .step(&mut weight, |_, _| panic!("it does not contribute"), apply)
        .unwrap();
    assert!(report.healed.is_some());
    // Its own part is zero; twice that is the mean of this world.
    assert_eq!(
        (report.step, d.current_step(), weight.0),
        (Step(5), Step(6), 100.0)
    );
    assert!(!d.is_finished());
    d.step(&mut weight, |_, _| Ok(vec![vec![2.0]]), apply).unwrap();
    assert!(d.is_finished());
    d.finish(&mut weight).unwrap();
    assert_eq!(weight.0, 96.0);
    assert_eq!(sent.borrow().len(), 2, "the closing round has no data");
}

#[test]
fn a_step_that_does_not_commit_in_time_applies_nothing() {
    let (mut replica, _) = doubled();
    replica.reductions = [false; 1000].into();
    let config = DdpConfig {
        step_timeout: Duration::ZERO,
        ..DdpConfig::default()
    };
    let mut d = Ddp::new(replica, &[Slot::f32(1)], config).unwrap();
    let e = d.step(
        &mut Nothing,
        |_, _| Ok(vec![vec![1.0]]),
        |_, _| panic!("not applied"),
    );
    let e = e.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Timeout);
    assert!(
        e.to_string().contains("step 0 did not commit in 1 attempts"),
        "{e}"
    );
    assert_eq!(d.current_step(), Step(0));
}

#[test]
fn sizes_of_zero_are_refused() {
    for (config, says) in [
        (
            DdpConfig {
                first_bucket_elements: 0,
                ..DdpConfig::default()
            },
            "at least one element",
        ),
        (
            DdpConfig {
                bucket_elements: 0,
                ..DdpConfig::default()
            },
            "at least one element",
        ),
        (
            DdpConfig {
                micro_batches: 0,
                ..DdpConfig::default()
            },
            "at least one micro-batch",
        ),
    ] {
        let e = Ddp::new(doubled().0, &[Slot::f32(1)], config).err().unwrap();
        assert!(e.to_string().contains(says), "{e}");
    }
}

/// A replica in its second step, whose quorums are found while it computes.
fn looking_ahead() -> (Ddp<ScriptedReplica>, Sent) {
    let (mut replica, sent) = doubled();
    replica.looks_ahead = true;
    let mut d = Ddp::new(replica, &[Slot::f32(1)], DdpConfig::default()).unwrap();
    d.step_with(&mut Nothing, |_, _, sink| sink.push(0, &[1.0f32]), |_, _| Ok(()))
        .unwrap();
    sent.borrow_mut().clear();
    (d, sent)
}

#[test]
fn a_full_bucket_leaves_once_the_quorum_stands_that_was_begun_with_the_computing() {
    let (mut d, sent) = looking_ahead();
    let mut averages = Vec::new();
    let report = d.step_with(
        &mut Nothing,
        |_, _, sink| {
            sink.push(0, &[3.0f32])?;
            assert_eq!(sent.borrow().len(), 1, "the quorum stands now");
            assert_eq!(sink.participation()?.step, Step(1));
            Ok(())
        },
        |_, a| {
            averages = a[0].as_slice::<f32>().unwrap().to_vec();
            Ok(())
        },
    );
    assert_eq!((report.unwrap().step, averages), (Step(1), vec![6.0]));
}

#[test]
fn a_step_that_fails_is_done_again_with_what_was_computed_before_its_quorum() {
    let (mut replica, sent) = doubled();
    replica.looks_ahead = true;
    replica.reductions = [true, false].into();
    let mut d = Ddp::new(replica, &[Slot::f32(1)], DdpConfig::default()).unwrap();
    let (mut computed, mut averages) = (0, Vec::new());
    let mut step = || {
        d.step_with(
            &mut Nothing,
            |_, _, sink| {
                computed += 1;
                sink.push(0, &[3.0f32])
            },
            |_, a| {
                averages.push(a[0].as_slice::<f32>().unwrap()[0]);
                Ok(())
            },
        )
        .unwrap()
    };
    step();
    assert_eq!(step().failed_attempts, 1);
    assert_eq!((computed, averages), (2, vec![6.0, 6.0]));
    assert_eq!(sent.borrow().len(), 3);
}

#[test]
fn what_was_computed_before_a_quorum_in_which_the_replica_heals_is_never_sent() {
    let sent = Rc::new(RefCell::new(Vec::new()));
    let seen = sent.clone();
    let mut replica = ScriptedReplica::averaging(move |own| {
        seen.borrow_mut().push(own.to_vec());
        own.to_vec()
    });
    replica.looks_ahead = true;
    // Not in the first step, whose quorum comes first.
    replica.heal_after = 1;
    let mut source = StateDict::new();
    Weight(100.0).save(&mut source).unwrap();
    replica.heal = Some(Source::Now(5, source));
    let mut d = Ddp::new(replica, &[Slot::f32(1)], DdpConfig::default()).unwrap();
    let mut weight = Weight(0.0);
    let mut computed = Vec::new();
    let mut step = || {
        d.step_with(
            &mut weight,
            |w, _, sink| {
                computed.push(w.0);
                sink.push(0, &[w.0 + 1.0])
            },
            |w, a| {
                w.0 -= a[0].as_slice::<f32>().unwrap()[0];
                Ok(())
            },
        )
        .unwrap()
    };
    assert!(step().healed.is_none());
    let report = step();
    assert_eq!((report.step, report.healed.is_some()), (Step(5), true));
    assert_eq!(
        *sent.borrow(),
        [[1.0], [0.0]],
        "zeros, and not what the old state gave"
    );
    assert_eq!(computed, [0.0, -1.0]);
    assert_eq!(
        weight.0, 100.0,
        "the averages of the others, on the state that it took"
    );
}

#[test]
fn a_step_whose_quorum_does_not_come_about_is_an_error_and_may_be_called_again() {
    let (mut replica, sent) = doubled();
    replica.looks_ahead = true;
    replica.quorums = [true, false].into();
    let mut d = Ddp::new(replica, &[Slot::f32(1)], DdpConfig::default()).unwrap();
    let mut step = |gradient: Result<f32>| {
        let mut gradient = Some(gradient);
        d.step_with(
            &mut Nothing,
            |_, _, sink| sink.push(0, &[gradient.take().unwrap()?]),
            |_, _| Ok(()),
        )
    };
    step(Ok(1.0)).unwrap();
    assert_eq!(step(Ok(1.0)).unwrap_err().kind(), ErrorKind::Timeout);
    assert_eq!(sent.borrow().len(), 1);
    // Nor does one leave anything behind in which the caller fails.
    let mine = Error::new(ErrorKind::Internal, "no data");
    assert_eq!(step(Err(mine)).unwrap_err().message(), "no data");
    assert_eq!(step(Ok(1.0)).unwrap().step, Step(1));
}
