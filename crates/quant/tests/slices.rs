//! Reductions of many slices, several in flight: the bits are those of the definition, which knows of no slices.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ops::Range;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::ranks::{self, bits, configure, configured, ranks, reduce, values};
use ftcore::{
    Checked, Completion, DType, Failed, ProcessGroup, ProcessGroupExt, ReduceOp, Rejected, Result,
    SubmitOptions, Tensor, Work, Wrapper, execute_by_submit,
};
use oxccl_quant::{Accuracy, Codec, QuantizeOptions, QuantizedGroup, Rounding};

/// More than two slices of 2^16 values, and not a whole number of anything.
const PART: usize = (1 << 17) + 1234;

/// What the values become on their way.
fn rounded(codec: Codec, values: &[f32]) -> Vec<f32> {
    let mut bytes = Vec::new();
    codec.encode(values, &mut bytes);
    let mut out = vec![0.0; values.len()];
    codec.decode(&bytes, &mut out).unwrap();
    out
}

/// Rounds `values` with what is owed of them, which becomes what is owed then.
fn paid(codec: Codec, values: &[f32], owed: &mut [f32]) -> Vec<f32> {
    owed.iter_mut().zip(values).for_each(|(o, v)| *o += v);
    let sent = rounded(codec, owed);
    owed.iter_mut().zip(&sent).for_each(|(o, s)| *o -= s);
    sent
}

/// All ranks of a group, by the definition: what they owe, and the sums that follow.
struct Definition {
    codec: Codec,
    op: ReduceOp,
    /// The parts that are rounded again as sums; none if all is rounded once.
    parts: Vec<Range<usize>>,
    contributed: Vec<Vec<f32>>,
    summed: Vec<f32>,
    feedback: bool,
}

impl Definition {
    fn new(codec: Codec, op: ReduceOp, (world, count): (usize, usize), twice: bool, feedback: bool) -> Self {
        let size = count.div_ceil(world).next_multiple_of(128);
        let parts = (0..world).map(|r| (size * r).min(count)..(size * (r + 1)).min(count));
        Self {
            codec,
            op,
            parts: if twice { parts.collect() } else { Vec::new() },
            contributed: vec![vec![0.0; count]; world],
            summed: vec![0.0; count],
            feedback,
        }
    }

    fn reduce(&mut self, inputs: &[Vec<f32>]) -> Vec<f32> {
        if !self.feedback {
            self.contributed.iter_mut().for_each(|d| d.fill(0.0));
            self.summed.fill(0.0);
        }
        let count = self.summed.len();
        let whole = std::iter::once(0..count);
        let first = if self.parts.is_empty() {
            whole.collect()
        } else {
            self.parts.clone()
        };
        let divisor = inputs.len() as f32;
        let average = self.op == ReduceOp::Avg;
        let mut sum = vec![0.0; count];
        for part in first {
            for (rank, input) in inputs.iter().enumerate() {
                let owed = &mut self.contributed[rank][part.clone()];
                let sent = paid(self.codec, &input[part.clone()], owed);
                for (to, v) in sum[part.clone()].iter_mut().zip(sent) {
                    *to = if rank == 0 { v } else { *to + v };
                }
            }
        }
        if average {
            sum.iter_mut().for_each(|v| *v /= divisor);
        }
        for part in self.parts.clone() {
            let owed = &mut self.summed[part.clone()];
            let share = if average { divisor } else { 1.0 };
            owed.iter_mut().for_each(|o| *o /= share);
            let sent = paid(self.codec, &sum[part.clone()], owed);
            owed.iter_mut().for_each(|o| *o *= share);
            sum[part].copy_from_slice(&sent);
        }
        sum
    }
}

/// Tells of each collective that is submitted.
struct Tells(Arc<dyn ProcessGroup>, Sender<()>);

impl Wrapper for Tells {
    fn inner(&self) -> &dyn ProcessGroup {
        &*self.0
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        self.1.send(()).unwrap();
        self.0.submit(op, options)
    }

    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        execute_by_submit(self, op, options)
    }

    fn split(&self, color: Option<u32>, key: u32, by: Instant) -> Result<Option<Box<dyn ProcessGroup>>> {
        self.0.split(color, key, by)
    }
}

fn with(codec: Codec, accuracy: Accuracy, error_feedback: bool) -> QuantizeOptions {
    QuantizeOptions {
        codec: codec.into(),
        accuracy,
        error_feedback,
        ..QuantizeOptions::default()
    }
}

fn in_a_step<T>(g: &QuantizedGroup, f: impl FnOnce() -> T) -> T {
    let feedback = g.error_feedback();
    if let Some(feedback) = &feedback {
        feedback.begin("w");
    }
    let done = f();
    if let Some(feedback) = &feedback {
        feedback.commit();
    }
    done
}

#[test]
fn inv3_the_bits_of_an_all_reduce_do_not_depend_on_its_slices() {
    let hadamard = Codec::Int4Hadamard { seed: 3 };
    let (economic, best) = (Accuracy::Economic, Accuracy::Best);
    for (world, codec, accuracy, op, feedback) in [
        (2u32, Codec::Int8B64, economic, ReduceOp::Sum, false),
        (2, hadamard, economic, ReduceOp::Avg, true),
        (3, hadamard, economic, ReduceOp::Avg, true),
        (3, Codec::MxE4M3, economic, ReduceOp::Sum, false),
        (3, Codec::Int2B64, economic, ReduceOp::Sum, true),
        (3, Codec::Int8B64, best, ReduceOp::Avg, false),
        // A rotation back fills all bits of an f32, so that the order of the sum shows.
        (3, hadamard, best, ReduceOp::Sum, false),
    ] {
        let twice = world > 2 && accuracy == economic;
        let count = if twice { PART * world as usize } else { PART };
        let options = with(codec, accuracy, feedback);
        let all = configured(world, &options, |rank, g, _| {
            [0, 10].map(|more| {
                let done = in_a_step(g, || reduce(g, values(rank + more, count), op, true));
                let (values, contributors) = done.unwrap();
                assert_eq!(contributors, world);
                values
            })
        });
        let mut definition = Definition::new(codec, op, (world as usize, count), twice, feedback);
        for (step, more) in [0, 10].into_iter().enumerate() {
            let inputs: Vec<_> = (0..world).map(|r| values(r + more, count)).collect();
            let expected = definition.reduce(&inputs);
            for (rank, got) in all.iter().enumerate() {
                let odd = bits(&got[step])
                    .iter()
                    .zip(bits(&expected))
                    .position(|(a, b)| *a != b);
                assert_eq!(odd, None, "{codec} of {world}, rank {rank}, step {step}");
            }
        }
    }
}

#[test]
fn inv3_nor_do_they_depend_on_slices_that_are_longer_because_there_are_so_many_values() {
    let codec = Codec::Int8B64;
    let cheap = |rank: u32| -> Vec<f32> {
        let values = (0..64 * (1u32 << 16) + 1234).map(|i| i.wrapping_mul(rank + 37) % 1009);
        values.map(|v| v as f32 - 504.0).collect()
    };
    let all = configured(2, &with(codec, Accuracy::Economic, false), |rank, g, _| {
        reduce(g, cheap(rank), ReduceOp::Sum, true).unwrap().0
    });
    let [mut sum, other] = [0, 1].map(|rank| rounded(codec, &cheap(rank)));
    sum.iter_mut().zip(other).for_each(|(a, b)| *a += b);
    assert!(all.iter().all(|got| *got == sum));
}

#[test]
fn inv3_the_bits_of_a_reduce_scatter_do_not_depend_on_its_slices() {
    // Parts of three, no and one slices, some of them of two tensors.
    let sizes = [PART, 0, 5000];
    let codec = Codec::Int8B64;
    let all = configured(3, &with(codec, Accuracy::Economic, false), |rank, g, _| {
        let inputs = Vec::from(sizes.map(|n| Tensor::from_vec(values(rank, n))));
        let output = Tensor::zeros(DType::F32, sizes[rank as usize]);
        let list = g.reduce_scatter(inputs, output, ReduceOp::Sum).unwrap();
        let list = list.take_tensor().unwrap().into_vec::<f32>().unwrap();
        let pairs = [PART, 300].map(|n| {
            (
                Tensor::from_vec(values(rank, 3 * n)),
                Tensor::zeros(DType::F32, n),
            )
        });
        let work = g.reduce_scatter_into_coalesced(Vec::from(pairs), ReduceOp::Avg);
        let done = work.unwrap().take().unwrap();
        assert_eq!(done.contributors, 3);
        let mut pair = done.tensors[1].as_slice::<f32>().unwrap().to_vec();
        pair.extend_from_slice(done.tensors[3].as_slice::<f32>().unwrap());
        (list, pair)
    });
    for (rank, (list, pair)) in all.into_iter().enumerate() {
        let part = |r: u32| values(r, sizes[rank]);
        let sum = |parts: [Vec<f32>; 3]| {
            let [a, b, c] = parts.map(|p| rounded(codec, &p));
            (0..a.len()).map(|i| a[i] + b[i] + c[i]).collect::<Vec<_>>()
        };
        assert!(bits(&list) == bits(&sum([0, 1, 2].map(part))), "rank {rank}");
        let both = |r: u32| {
            let of = |n: usize| values(r, 3 * n)[rank * n..][..n].to_vec();
            [of(PART), of(300)].concat()
        };
        let mut expected = sum([0, 1, 2].map(both));
        expected.iter_mut().for_each(|v| *v /= 3.0);
        assert!(bits(&pair) == bits(&expected), "rank {rank}");
    }
}

#[test]
fn two_ranks_have_all_slices_of_an_operation_under_way_before_they_wait_for_one() {
    const SLICES: usize = 6;
    let (tell, told) = channel();
    let (tell, told) = (Mutex::new(tell), Mutex::new(told));
    ranks(2, |rank, store| {
        let gloo: Arc<dyn ProcessGroup> = match rank {
            0 => Arc::new(Tells(ranks::gloo(), tell.lock().unwrap().clone())),
            _ => ranks::gloo(),
        };
        let g = QuantizedGroup::new(gloo, Codec::Int8B64, Duration::from_secs(20)).unwrap();
        configure(&g, &store, 1, rank, 2).unwrap();
        // The other rank has begun nothing, so none of them can end.
        let begun = || {
            if rank == 1 {
                let told = told.lock().unwrap();
                (0..SLICES).for_each(|_| told.recv_timeout(Duration::from_secs(10)).unwrap());
            }
        };
        begun();
        let count = SLICES << 16;
        reduce(&g, values(rank, count), ReduceOp::Sum, true).unwrap();
        begun();
        let input = Tensor::from_vec(values(rank, 2 * count));
        let output = Tensor::zeros(DType::F32, count);
        let work = g.reduce_scatter_into(input, output, ReduceOp::Sum).unwrap();
        work.take().unwrap();
    });
}

#[test]
fn no_two_slices_draw_the_same_random_numbers() {
    const SLICE: usize = 1 << 16;
    let options = QuantizeOptions {
        rounding: Rounding::Stochastic { key: 5 },
        ..with(Codec::Int8B64, Accuracy::Economic, false)
    };
    // First phase: values half-way between two codes. Second phase: sums a third of the way, of inputs that are codes themselves.
    for (world, peak, value) in [(2u32, 127.0, [0.5, 0.5, 0.0]), (3, 127.0, [1.0, 0.0, 0.0])] {
        let parts = if world == 2 { 1 } else { 3 };
        let all = configured(world, &options, |rank, g, _| {
            let mut v = vec![value[rank as usize]; 2 * SLICE * parts];
            v.iter_mut().step_by(64).for_each(|v| *v = peak);
            reduce(g, v, ReduceOp::Sum, true).unwrap().0
        });
        let (first, second) = all[0][..2 * SLICE].split_at(SLICE);
        let different = first.iter().zip(second).filter(|(a, b)| a != b).count();
        // Half of them, or four in nine.
        assert!(different > SLICE / 3 && different < SLICE * 2 / 3, "{different}");
    }
}

#[test]
fn slices_cost_less_than_half_a_hundredth_of_the_bytes() {
    let codec = Codec::Int4Hadamard { seed: 0 };
    for world in [2u32, 3] {
        configured(world, &with(codec, Accuracy::Economic, false), |rank, g, _| {
            let count = PART * world as usize;
            let before = g.traffic().sent;
            reduce(g, values(rank, count), ReduceOp::Sum, true).unwrap();
            let sent = (g.traffic().sent - before) as f64;
            let shares = 2.0 * f64::from(world - 1) / f64::from(world);
            let ideal = shares * count as f64 * codec.bits() / 8.0;
            assert!(
                sent <= 1.005 * ideal && sent >= 0.998 * ideal,
                "{sent} for {ideal}"
            );
        });
    }
}
