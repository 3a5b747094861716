//! What the codes mean for a plugin, in words: the buffers of each operation, and what a feature obliges to. The header is made from these, and from
//! `conformance::expected`: the error texts and times that the suite checks.

use ftcore::{Feature, OpKind};

/// The buffers of each operation and what becomes of them. n is the number of ranks; a count is in elements.
pub const OPERATIONS: [(OpKind, &str); 18] = [
    (
        OpKind::AllReduce,
        "1 or more buffers (coalesced), each reduced in place. `reduce` is set. The same counts on all ranks.",
    ),
    (
        OpKind::Broadcast,
        "1 or more buffers (coalesced), read on `root` and written elsewhere. The same counts on all ranks.",
    ),
    (
        OpKind::Reduce,
        "1 buffer, read on all ranks and written on `root` only. `reduce` is set.",
    ),
    (
        OpKind::AllGather,
        "1 input, then n outputs. Output r becomes rank r's input and has its count; counts may differ between ranks.",
    ),
    (
        OpKind::AllGatherInto,
        "1 or more pairs (coalesced): input, output, input, output, …. An output has n times the count of its input and becomes the inputs of all \
         ranks one after the other.",
    ),
    (
        OpKind::Gather,
        "1 input; then on `root` n outputs as in an all-gather, elsewhere none.",
    ),
    (
        OpKind::Scatter,
        "On `root` n inputs (`input_count` is n), elsewhere none (0); then 1 output, which becomes the root's input for this rank.",
    ),
    (
        OpKind::ReduceScatter,
        "n inputs (`input_count` is n), then 1 output: the reduction of all ranks' inputs for this rank. Counts may differ between parts. `reduce` is \
         set. Inputs are not written.",
    ),
    (
        OpKind::ReduceScatterInto,
        "1 or more pairs (coalesced): input, output, input, output, …. An input has n times the count of its output, which becomes this rank's part of \
         the reduction. `reduce` is set. Inputs are not written.",
    ),
    (
        OpKind::AllToAll,
        "n inputs (`input_count` is n), then n outputs. Output r becomes rank r's input for this rank; counts may differ.",
    ),
    (
        OpKind::AllToAllInto,
        "1 input, 1 output, both in parts by rank. `input_splits` and `output_splits` have n counts each, or none: n equal parts.",
    ),
    (
        OpKind::Send,
        "1 buffer, read. `peer` and `tag` are set. Ends once the memory may be used again; with MISMATCH_DETECTION not before its receive was found \
         to fit.",
    ),
    (
        OpKind::Recv,
        "1 buffer, written, of the sender's type and count. `tag` is set; `peer` is none to receive from any rank (RECV_ANY), and the outcome's \
         `source` says who sent.",
    ),
    (OpKind::Barrier, "No buffers. Ends once all ranks have entered."),
    (
        OpKind::MonitoredBarrier,
        "No buffers. As a barrier; at the deadline the fault of every rank names the missing ranks (`wait_all`).",
    ),
    (
        OpKind::Batch,
        "No buffers of its own: 1 or more `children`, sends and receives with 1 buffer each, that progress together in any order.",
    ),
    (
        OpKind::AllGatherInPlace,
        "1 or more buffers (coalesced) in n equal parts: part r becomes rank r's, which is the input. The same collective as ALL_GATHER_INTO: other ranks \
         may call that.",
    ),
    (
        OpKind::ReduceScatterInPlace,
        "1 or more buffers (coalesced) in n equal parts: this rank's part becomes the reduction of it; the others may be written. `reduce` is set. The \
         same collective as REDUCE_SCATTER_INTO: other ranks may call that.",
    ),
];

/// What a group that advertises a feature has to do.
pub const FEATURES: [(Feature, &str); 10] = [
    (
        Feature::Abort,
        "abort, from any thread, ends all pending operations with ABORTED and the reason within 100 ms, on all ranks; the group is poisoned then. So does what a \
         group cannot go on after, on all ranks and with the same kind: a deadline that passed (TIMEOUT), ranks that called different things (MISMATCH), \
         a rank that died (PEER_LOST). A rank that has heard of a failure passes it on before it closes or is configured again: another one may not have heard. A poisoned group refuses calls with POISONED. A rank that was closed or shut down has left, which ends only what \
         still needs it: say so in close without waiting, for its process may end right after, and that is no death.",
    ),
    (
        Feature::Reconfigure,
        "configure works again, after a failure too, with other ranks; no byte of an earlier epoch arrives. An epoch that is not larger, or a rank \
         outside the world, is INVALID_ARGUMENT and leaves the group as it was.",
    ),
    (
        Feature::MismatchDetection,
        "Ranks that call different operations, types, counts, reductions or roots get MISMATCH, which names both sides; so do both ends of a message \
         whose type or count differs.",
    ),
    (
        Feature::BitwiseEqual,
        "All ranks of a finished all-reduce hold equal bytes.",
    ),
    (
        Feature::Contributors,
        "`contribute` 0 is honoured in reductions: the rank gives the identity and is not counted; averages divide by the contributors, whose number \
         is in the outcome. Without it `contribute` is always 1.",
    ),
    (
        Feature::Tags,
        "A receive takes the message with its tag, in whatever order they were sent. Without it messages of two ranks match in the order in which they are \
         sent, and `tag` is always 0.",
    ),
    (Feature::RecvAny, "A receive may name no sender: `peer` is none."),
    (
        Feature::ThreadRanks,
        "Several ranks of a group may be threads of one process.",
    ),
    (Feature::Split, "split is there and works."),
    (
        Feature::Borrow,
        "execute is there; when it returns, nothing touches the buffers any more, whether it succeeded or failed.",
    ),
];

/// What every plugin may rely on and has to do besides, a paragraph each.
pub const CONDUCT: [&str; 10] = [
    "Pointers. A function of a table may be null only where its comment says so. Lists (buffers, children, splits, keys, hints, notes, options, shape) may be null if their \
     count is 0. ctx is passed back as it is and may be null. fault, reply, outcome and the other places for results are never null.",
    "Buffers. oxccl_operation.buffers holds inputs before outputs, pairs in turn, as oxccl_op says; step through it with buffer_stride, not with your own sizeof. All \
     buffers of an operation have one element type (those of a batch may differ), do not overlap and are where the group's capabilities say. count may be 0: then ptr must not be read. The host has checked counts, \
     ranks and splits of this rank; that the ranks fit each other is for the plugin to find out.",
    "Order. Collectives of a group run in the order of submission, the same on all ranks. A send or a receive is ordered among those with the same peer, direction and \
     (TAGS) tag only, and waits for no collective: a receive that waits for its sender must hold up nothing else.",
    "Bools. Where BOOL is moved or reduced, an output holds 0 or 1, whatever byte above 0 an input had; of a broadcast the root's own buffer too.",
    "Numbers. A NaN wins in MIN and MAX, also in elements of 16 bits, and sums of integers wrap around.",
    "Names in texts. An operation, an element type and a reduction are called as here, in lower case and without the prefix: all_reduce, bf16, sum; \
     premul_sum(F) with its factor.",
    "Faults. Write the cause alone: the host puts operation, rank, epoch and peer before it. A fault that is passed in has its size: fill it in with oxccl_fail or \
     oxccl_fault_copy.",
    "Refusals. submit refuses what it does not know with UNSUPPORTED and touches nothing. Calls before configure do not reach the plugin; those after shutdown do, and are INVALID_STATE.",
    "configure returns by its timeout_ms. If ranks are missing then, the fault is TIMEOUT and names them (`rank R of N`, or `ranks R, S of N`) and the `phase` that \
     it waited in; it may take a second more to find out who. If it is cancelled (oxccl_store.wanted fails, waits at the store fail; whose fault is passed on), or abort is called meanwhile, the fault is ABORTED with the reason. \
     Where RECONFIGURE is not advertised, a second call may be refused with INVALID_STATE.",
    "Time-outs are milliseconds from the call, never negative, and at most a hundred years, so that they can be added to a clock of nanoseconds.",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_and_feature_is_explained_in_the_order_of_the_codes() {
        assert_eq!(OPERATIONS.map(|(op, _)| op), OpKind::ALL);
        assert_eq!(FEATURES.map(|(feature, _)| feature), Feature::ALL);
    }
}
