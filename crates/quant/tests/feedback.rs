//! Error feedback over groups: hand-computed histories, accounts that always balance, and residuals that survive a restart.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use crate::ranks::{self, bits, configure, configured, meet, ranks, reduce, values, with_options};
use ftcore::{ErrorKind, ReduceOp};
use oxccl_quant::{Accuracy, Codec, QuantizeOptions, QuantizedGroup};

fn with(codec: Codec) -> QuantizeOptions {
    QuantizeOptions {
        codec: codec.into(),
        error_feedback: true,
        ..QuantizeOptions::default()
    }
}

/// Steps in which rank 0 contributes 4 and 1 and the others nothing but zeros; what each step delivers.
///
/// Two bits have the codes −1, 0, 1 and a scale of half the peak.
fn history(world: u32, options: &QuantizeOptions, op: ReduceOp) -> Vec<[f32; 2]> {
    let all = configured(world, options, |rank, g, _| {
        let feedback = g.error_feedback().unwrap();
        let own = if rank == 0 { vec![4.0, 1.0] } else { vec![0.0; 2] };
        let steps = (0..3).map(|_| {
            feedback.begin("w");
            let got = reduce(g, own.clone(), op, true).unwrap().0;
            feedback.commit();
            [got[0], got[1]]
        });
        steps.collect::<Vec<_>>()
    });
    assert!(all.iter().all(|other| *other == all[0]));
    all[0].clone()
}

#[test]
fn one_rounding_follows_the_hand_computed_history() {
    // 4, 1 → 2, 0 owing 2, 1; so 6, 2 → 3, 3 owing 3, −1; so 7, 0 → 3.5, 0.
    let expected = [[2.0, 0.0], [3.0, 3.0], [3.5, 0.0]];
    assert_eq!(history(2, &with(Codec::Int2B64), ReduceOp::Sum), expected);
    let best = QuantizeOptions {
        accuracy: Accuracy::Best,
        ..with(Codec::Int2B64)
    };
    assert_eq!(history(3, &best, ReduceOp::Sum), expected);
    let halves = expected.map(|v| v.map(|v| v / 2.0));
    assert_eq!(history(2, &with(Codec::Int2B64), ReduceOp::Avg), halves);
}

#[test]
fn two_roundings_follow_the_hand_computed_history() {
    // The first phases as above; the owner: 2, 0 → 1, 0 owing 1, 0; so 4, 3 → 2, 2 owing 2, 1; so 5.5, 1 → 2.75, 0.
    let expected = [[1.0, 0.0], [2.0, 2.0], [2.75, 0.0]];
    assert_eq!(history(3, &with(Codec::Int2B64), ReduceOp::Sum), expected);
    let quarters = expected.map(|v| v.map(|v| v / 4.0));
    assert_eq!(history(4, &with(Codec::Int2B64), ReduceOp::Avg), quarters);
}

/// What one rank gave, what was delivered to it (entered by the first member only) and what it owes at the end, per value.
struct Account {
    gave: Vec<f64>,
    got: Vec<f64>,
    owed: Vec<f64>,
}

#[test]
fn the_accounts_balance_when_members_leave_and_come_back_and_when_one_does_not_contribute() {
    const COUNT: usize = 700;
    // Per epoch the members, the member whose values do not count, and whether the step counts.
    let epochs: [(&[u32], Option<u32>, bool); 8] = [
        (&[0, 1, 2, 3], None, true),
        (&[0, 1, 2, 3], None, true),
        (&[1, 2, 3], None, true),
        (&[1, 2, 3], None, false),
        (&[3, 1], None, true),
        (&[0, 3, 1], Some(0), true),
        (&[2], None, true),
        (&[3, 2, 1, 0], Some(1), true),
    ];
    for op in [ReduceOp::Sum, ReduceOp::Avg] {
        for codec in [Codec::Int2B64, Codec::Int4B64] {
            let accounts = ranks(4, |rank, store| {
                let g = with_options(with(codec));
                let feedback = g.error_feedback().unwrap();
                let (mut gave, mut got) = (vec![0.0f64; COUNT], vec![0.0f64; COUNT]);
                for (epoch, (members, idle, counts)) in (1u64..).zip(epochs) {
                    if let Some(place) = members.iter().position(|m| *m == rank) {
                        let world = members.len() as u32;
                        configure(&g, &store, epoch, place as u32, world).unwrap();
                        feedback.begin("w");
                        let own = values(rank + epoch as u32, COUNT);
                        let contributes = idle != Some(rank);
                        let (sum, contributors) = reduce(&g, own.clone(), op, contributes).unwrap();
                        if counts {
                            feedback.commit();
                            let times = if op == ReduceOp::Avg {
                                contributors as f32
                            } else {
                                1.0
                            };
                            // All ranks have the same; the first member enters it.
                            for (to, v) in got.iter_mut().zip(&sum).filter(|_| place == 0) {
                                *to += f64::from(v * times);
                            }
                            for (to, v) in gave.iter_mut().zip(&own).filter(|_| contributes) {
                                *to += f64::from(*v);
                            }
                        } else {
                            feedback.rollback();
                        }
                    }
                    meet(&store, &format!("done/{epoch}"), 4);
                }
                let mut owed = vec![0.0f64; COUNT];
                for (name, residuals) in feedback.state() {
                    let from = name.split_once('@').map_or(0, |(_, from)| from.parse().unwrap());
                    for (to, residual) in owed[from..].iter_mut().zip(residuals) {
                        *to += f64::from(residual);
                    }
                }
                Account { gave, got, owed }
            });
            let mut moved = 0.0f64;
            for i in 0..COUNT {
                let sum = |part: fn(&Account) -> &[f64]| -> f64 {
                    accounts.iter().filter_map(|a| part(a).get(i)).sum()
                };
                let (gave, got, owed) = (sum(|a| &a.gave), sum(|a| &a.got), sum(|a| &a.owed));
                moved = moved.max(owed.abs());
                assert!(
                    (gave - got - owed).abs() < 1e-4,
                    "{codec} {op:?}: value {i}: {gave} given, {got} delivered, {owed} owed"
                );
            }
            assert!(moved > 0.05, "nothing was rounded: {moved}");
        }
    }
}

/// The relative squared error of the mean of `steps` reductions of the same values.
fn error_of_the_mean(options: &QuantizeOptions, world: u32, committed: bool) -> f64 {
    let (steps, count) = (30, 2000);
    let all = configured(world, options, |rank, g, _| {
        let feedback = g.error_feedback();
        let mut mean = vec![0.0f64; count];
        for _ in 0..steps {
            if let Some(feedback) = &feedback {
                feedback.begin("weights");
            }
            let sum = reduce(g, values(rank, count), ReduceOp::Sum, true).unwrap().0;
            match &feedback {
                Some(feedback) if committed => feedback.commit(),
                Some(feedback) => feedback.rollback(),
                None => {}
            }
            for (to, v) in mean.iter_mut().zip(sum) {
                *to += f64::from(v) / f64::from(steps);
            }
        }
        mean
    });
    let square = |v: f64| v * v;
    let (mut error, mut size) = (0.0, 0.0);
    for (i, mean) in all[0].iter().enumerate() {
        let exact: f64 = (0..world).map(|rank| f64::from(values(rank, count)[i])).sum();
        error += square(exact - mean);
        size += square(exact);
    }
    error / size
}

#[test]
fn error_feedback_delivers_over_time_what_one_reduction_loses() {
    for world in [2u32, 3] {
        let options = with(Codec::Int2B64);
        let with_feedback = error_of_the_mean(&options, world, true);
        // Steps that never count start from nothing each time.
        let forgotten = error_of_the_mean(&options, world, false);
        assert!(forgotten > 0.1, "{forgotten}");
        assert!(with_feedback < forgotten / 20.0, "{with_feedback} {forgotten}");
    }
}

/// One rank's residuals by name.
type Residuals = Vec<(String, Vec<f32>)>;

#[test]
fn saved_residuals_continue_the_same_bits_and_without_a_step_there_is_an_error() {
    let run = |saved: Option<Vec<Residuals>>| {
        configured(3, &with(Codec::Int2B64), |rank, g, _| {
            let feedback = g.error_feedback().unwrap();
            let first = if let Some(saved) = &saved {
                feedback.load(saved[rank as usize].clone()).unwrap();
                Vec::new()
            } else {
                feedback.begin("w");
                let sum = bits(&reduce(g, values(rank, 900), ReduceOp::Sum, true).unwrap().0);
                feedback.commit();
                sum
            };
            let state = feedback.state();
            assert_eq!(state.len(), 2, "what it contributes and what it sums");
            feedback.begin("w");
            let second = bits(&reduce(g, values(rank, 900), ReduceOp::Sum, true).unwrap().0);
            (first, second, state)
        })
    };
    let whole = run(None);
    let resumed = run(Some(whole.iter().map(|w| w.2.clone()).collect()));
    for (a, b) in whole.iter().zip(&resumed) {
        assert_eq!(a.1, b.1);
        assert_ne!(a.0, a.1);
    }
    ranks(1, |_, store| {
        let g = QuantizedGroup::with_options(ranks::gloo(), with(Codec::Int2B64)).unwrap();
        configure(&g, &store, 1, 0, 1).unwrap();
        // A world of one rounds nothing and needs no step.
        assert_eq!(reduce(&g, vec![0.1], ReduceOp::Sum, true).unwrap().0, [0.1]);
    });
    ranks(2, |rank, store| {
        let g = QuantizedGroup::with_options(ranks::gloo(), with(Codec::Int2B64)).unwrap();
        configure(&g, &store, 1, rank, 2).unwrap();
        let e = reduce(&g, vec![0.1], ReduceOp::Sum, true).unwrap_err();
        assert!(
            e.kind() == ErrorKind::InvalidState && e.to_string().contains("begin"),
            "{e}"
        );
    });
}
