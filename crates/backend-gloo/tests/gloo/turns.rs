//! An operation takes several turns of the engine; none may end in a sleep from which nothing wakes it.

use std::time::Duration;

use ftcore::{Collective, ProcessGroupExt, ReduceOp, SubmitOptions, Tensor, deadline_in};

use crate::ranks::with_groups;

/// Elements of f32 in one piece of a reducing receive off a socket (256 KiB).
const PIECE: usize = 64 * 1024;

#[test]
fn a_last_round_that_ends_with_a_turn_finishes_at_once() {
    // 16 passes make a turn: a part of 16 pieces once ended exactly there, and the operation slept until its deadline.
    with_groups(2, |rank, group| {
        for pieces in [1, 8, 15, 16, 17, 31, 32, 33, 64] {
            let n = pieces * PIECE;
            let input = Tensor::from_vec(vec![rank as f32 + 1.0; 2 * n]);
            let pairs = vec![(input, Tensor::from_vec(vec![0.0f32; n]))];
            let op = Collective::ReduceScatterInto {
                pairs,
                op: ReduceOp::Sum,
            };
            let work = group
                .run(op, SubmitOptions::by(deadline_in(Duration::from_secs(20))))
                .unwrap();
            let output = work
                .take_tensor()
                .unwrap_or_else(|e| panic!("{pieces} pieces: {e}"));
            assert!(
                output.as_slice::<f32>().unwrap().iter().all(|x| *x == 3.0),
                "{pieces} pieces"
            );
        }
    });
}
