//! The buffers of an operation stand as `abi::meaning::OPERATIONS`, and so the header, says.

use ftcore::{Collective, ReduceOp, Tensor};

use super::Outgoing;

/// A tensor that its count tells apart.
fn t(count: usize) -> Tensor {
    Tensor::from_vec(vec![0f32; count])
}

/// The counts of the buffers in order, how many are the list of inputs, and the children.
fn layout(op: &Collective) -> (Vec<u64>, u32, usize) {
    let outgoing = Outgoing::new(op);
    (
        outgoing.buffers.iter().map(|b| b.count).collect(),
        outgoing.operation.input_count,
        outgoing.children.len(),
    )
}

#[test]
fn inputs_come_before_outputs_pairs_in_turn_and_lists_are_counted() {
    let op = ReduceOp::Sum;
    let two = || vec![t(1), t(2)];
    let pairs = || vec![(t(1), t(2)), (t(3), t(6))];
    let send = Collective::Send {
        tensor: t(4),
        peer: 1,
        tag: 0,
    };
    let recv = Collective::Recv {
        tensor: t(5),
        peer: None,
        tag: 0,
    };
    let cases = [
        (Collective::AllReduce { tensors: two(), op }, (vec![1, 2], 0, 0)),
        (
            Collective::Broadcast {
                tensors: two(),
                root: 0,
            },
            (vec![1, 2], 0, 0),
        ),
        (
            Collective::Reduce {
                tensor: t(1),
                op,
                root: 0,
            },
            (vec![1], 0, 0),
        ),
        (
            Collective::AllGather {
                input: t(9),
                outputs: two(),
            },
            (vec![9, 1, 2], 0, 0),
        ),
        (
            Collective::AllGatherInto { pairs: pairs() },
            (vec![1, 2, 3, 6], 0, 0),
        ),
        (
            Collective::Gather {
                input: t(9),
                outputs: two(),
                root: 0,
            },
            (vec![9, 1, 2], 0, 0),
        ),
        (
            Collective::Gather {
                input: t(9),
                outputs: vec![],
                root: 0,
            },
            (vec![9], 0, 0),
        ),
        (
            Collective::Scatter {
                inputs: two(),
                output: t(9),
                root: 0,
            },
            (vec![1, 2, 9], 2, 0),
        ),
        (
            Collective::Scatter {
                inputs: vec![],
                output: t(9),
                root: 0,
            },
            (vec![9], 0, 0),
        ),
        (
            Collective::ReduceScatter {
                inputs: two(),
                output: t(9),
                op,
            },
            (vec![1, 2, 9], 2, 0),
        ),
        (
            Collective::ReduceScatterInto { pairs: pairs(), op },
            (vec![1, 2, 3, 6], 0, 0),
        ),
        (
            Collective::AllToAll {
                inputs: two(),
                outputs: vec![t(3), t(4)],
            },
            (vec![1, 2, 3, 4], 2, 0),
        ),
        (
            Collective::AllToAllInto {
                input: t(1),
                output: t(2),
                input_splits: vec![],
                output_splits: vec![],
            },
            (vec![1, 2], 0, 0),
        ),
        (
            Collective::AllGatherInPlace { tensors: two() },
            (vec![1, 2], 0, 0),
        ),
        (
            Collective::ReduceScatterInPlace { tensors: two(), op },
            (vec![1, 2], 0, 0),
        ),
        (Collective::Barrier, (vec![], 0, 0)),
        (Collective::MonitoredBarrier { wait_all: true }, (vec![], 0, 0)),
        (
            Collective::Batch {
                ops: vec![send, recv],
            },
            (vec![], 0, 2),
        ),
    ];
    for (op, expected) in cases {
        assert_eq!(layout(&op), expected, "{}", op.kind().name());
    }
    let send = Collective::Send {
        tensor: t(4),
        peer: 1,
        tag: 3,
    };
    assert_eq!(layout(&send), (vec![4], 0, 0));
}
