//! Steps over a replica that plays the rest of the world: buckets, overlap, micro-batches, unused parameters, retries.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::collections::VecDeque;
use std::time::Instant;

use checkpoint::StateDict;
use ddp::{Ddp, DdpConfig, Slot};
use ftcore::{Completion, DType, Error, ErrorKind, OpKind, ReduceOp, Result, Tensor, Traffic, Work};
use half::bf16;
use manager::{ManagedWork, Participation, Replica, State};

/// The mean over the world is twice this replica's own value.
#[derive(Default)]
struct Scripted {
    step: i64,
    /// Outcomes of the next all-reduces (empty: they succeed).
    reductions: VecDeque<bool>,
    error: Option<Error>,
    /// Elements of each bucket, in the order in which they were sent.
    sent: Vec<(DType, usize)>,
}

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

impl Replica for Scripted {
    fn start_quorum(&mut self, _: &mut dyn State, _: Instant) -> Result<Participation> {
        self.error = None;
        Ok(Participation {
            epoch: 1,
            step: self.step,
            replica_rank: 0,
            replica_world_size: 2,
            contributes: true,
            healed: None,
            members: vec!["a".into(), "b".into()],
        })
    }

    fn allreduce(&mut self, mut tensors: Vec<Tensor>, op: ReduceOp) -> ManagedWork {
        assert_eq!(op, ReduceOp::Avg);
        self.sent.push((tensors[0].dtype(), tensors[0].count()));
        // What the transport does to its input must not reach a second attempt.
        tensors.iter_mut().for_each(double);
        if self.reductions.pop_front() == Some(false) {
            let e = Error::new(ErrorKind::PeerLost, "scripted");
            self.error = Some(e.clone());
            return ManagedWork::failed(e, tensors);
        }
        ManagedWork::submitted(Work::finished(
            OpKind::AllReduce,
            Completion {
                tensors,
                source: None,
                contributors: 2,
            },
        ))
    }

    fn should_commit(&mut self, _: Instant) -> Result<bool> {
        let yes = self.error.is_none();
        self.step += i64::from(yes);
        Ok(yes)
    }
    fn current_step(&self) -> i64 {
        self.step
    }
    fn report_error(&mut self, error: Error) {
        self.error = Some(error);
    }
    fn error(&self) -> Option<Error> {
        self.error.clone()
    }
    fn traffic(&self) -> Traffic {
        Traffic::default()
    }
    fn leave(&mut self, _: Instant) -> Result<()> {
        Ok(())
    }
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

fn ddp(first: usize, rest: usize, micro_batches: u32, reductions: &[bool]) -> Ddp<Scripted> {
    let replica = Scripted {
        reductions: reductions.iter().copied().collect(),
        ..Scripted::default()
    };
    let config = DdpConfig {
        first_bucket_elements: first,
        bucket_elements: rest,
        micro_batches,
        ..DdpConfig::default()
    };
    Ddp::new(replica, config).unwrap()
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
        let report = ddp(first, rest, 1, &[])
            .step(&mut Nothing, &gradients, |_, a| {
                averages = a.to_vec();
                Ok(())
            })
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
    let mut d = ddp(2, 3, 1, &[]);
    let slots = [Slot::f32(3), Slot::f32(2), Slot::f32(2)];
    let mut averages = Vec::new();
    d.step_with(
        &mut Nothing,
        &slots,
        |_, _, sink| {
            // Out of order: the last bucket in the order of sending is full first, and waits.
            sink.push(0, &[1.0f32, 2.0, 3.0])?;
            sink.push(2, &[6.0f32, 7.0])?;
            sink.push(1, &[4.0f32, 5.0])
        },
        |_, a| {
            averages = a
                .into_iter()
                .map(|t| t.into_vec::<f32>().map_err(Error::from))
                .collect::<Result<Vec<_>>>()?;
            Ok(())
        },
    )
    .unwrap();
    assert_eq!(averages, [vec![2.0, 4.0, 6.0], vec![8.0, 10.0], vec![12.0, 14.0]]);
    assert_eq!(
        d.replica().sent,
        [(DType::F32, 2), (DType::F32, 3), (DType::F32, 2)],
        "a small first bucket, then from the last gradient to the first"
    );
}

#[test]
fn several_dtypes_micro_batches_and_unused_parameters_go_together() {
    let mut d = ddp(4, 4, 2, &[]);
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
    let mut averages = Vec::new();
    d.step_with(
        &mut Nothing,
        &slots,
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
            averages = a;
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
    let mut d = ddp(2, 2, 1, &[true, false, true, false]);
    let mut computed = 0;
    let mut averages = Vec::new();
    let report = d
        .step_with(
            &mut Nothing,
            &[Slot::f32(4)],
            |_, _, sink| {
                computed += 1;
                sink.push(0, &[1.0f32, 2.0, 3.0, 4.0])
            },
            |_, a| {
                averages = a;
                Ok(())
            },
        )
        .unwrap();
    assert_eq!((computed, report.failed_attempts), (1, 2));
    assert_eq!(averages[0].as_slice::<f32>().unwrap(), [2.0, 4.0, 6.0, 8.0]);
}

#[test]
fn wrong_gradients_are_named_and_stop_the_step() {
    let slots = [Slot::f32(2)];
    let refused = |f: &mut dyn FnMut(&mut ddp::Sink<'_>) -> Result<()>, text: &str| {
        let e = ddp(4, 4, 1, &[])
            .step_with(
                &mut Nothing,
                &slots,
                |_, _, sink| f(sink),
                |_, _| panic!("not applied"),
            )
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
    let e = ddp(4, 4, 2, &[])
        .step(&mut Nothing, &[vec![1.0]], |_, _| Ok(()))
        .unwrap_err();
    assert!(e.to_string().contains("step_with"), "{e}");
}
