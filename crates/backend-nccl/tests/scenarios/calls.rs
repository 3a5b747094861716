//! Every call of the library and the driver on the way of an operation, failing once on one rank: the failure names the call, the
//! other rank hears of it, and the same process goes on in the next epoch.

use std::sync::Arc;
use std::time::Duration;

use backend_nccl::{CudaAccelerator, NcclGroup};
use ftcore::{
    Accelerator, Collective, DType, DeviceKind, Error, ErrorKind, GroupOptions, ProcessGroup,
    ProcessGroupExt, ReduceOp, SubmitOptions, Tensor, Work, deadline_in,
};

use super::kit::*;
use super::{FAIL, HANG, Scenario, scenario};

const SOON: Duration = Duration::from_secs(20);

/// What is submitted, and the call that fails in it.
#[derive(Clone, Copy)]
struct Way {
    call: &'static str,
    submit: fn(u32, &NcclGroup) -> Result<Work, Error>,
}

const WAYS: [Way; 29] = [
    way("ncclGroupStart", sum),
    way("cuMemcpyDtoHAsync", sum),
    way("ncclBroadcast", |r, g| Ok(g.broadcast(filled(r, 1.0, 10)?, 1)?)),
    way("ncclReduce", |r, g| {
        Ok(g.reduce(filled(r, 1.0, 10)?, ReduceOp::Sum, 1)?)
    }),
    way("ncclAllGather", |r, g| {
        Ok(g.allgather_into(filled(r, 1.0, 10)?, filled(r, 0.0, 20)?)?)
    }),
    way("ncclReduceScatter", |r, g| {
        Ok(g.reduce_scatter_into(filled(r, 1.0, 20)?, filled(r, 0.0, 10)?, ReduceOp::Sum)?)
    }),
    way("ncclAlltoAll", |r, g| {
        Ok(g.alltoall_into(filled(r, 1.0, 20)?, filled(r, 0.0, 20)?, Vec::new(), Vec::new())?)
    }),
    way("ncclGather", |r, g| {
        let outputs = if r == 0 { halves(r)? } else { Vec::new() };
        Ok(g.gather(filled(r, 1.0, 10)?, outputs, 0)?)
    }),
    way("ncclScatter", |r, g| {
        let inputs = if r == 0 { halves(r)? } else { Vec::new() };
        Ok(g.scatter(inputs, filled(r, 0.0, 10)?, 0)?)
    }),
    way("ncclSend", message),
    way("ncclCommInitRankConfig", message),
    way("ncclRedOpCreatePreMulSum", |r, g| {
        Ok(g.allreduce(filled(r, 1.0, 10)?, ReduceOp::PremulSum(0.5))?)
    }),
    way("cuLaunchKernel", |r, g| {
        Ok(g.allreduce(filled(r, 1.0, 10)?, ReduceOp::Max)?)
    }),
    way("cuMemsetAsync", |r, g| abstain(r, g, DType::F32, ReduceOp::Sum)),
    way("cuMemsetAsync", |r, g| abstain(r, g, DType::U8, ReduceOp::Sum)),
    way("cuMemsetAsync", |r, g| abstain(r, g, DType::F16, ReduceOp::Sum)),
    way("cuMemsetAsync", |r, g| {
        abstain(r, g, DType::F64, ReduceOp::Product)
    }),
    way("cuEventRecord", sum),
    way("cuMemHostAlloc", sum),
    way("cuStreamWaitEvent", |r, g| on_a_stream(r, g, false)),
    way("cuStreamWaitEvent", |r, g| on_a_stream(r, g, true)),
    way("cuMemAllocAsync", |r, g| {
        Ok(g.allreduce(filled(r, 1.0, 10)?, ReduceOp::Max)?)
    }),
    way("cuMemcpyDtoDAsync", |r, g| {
        // Parts that do not lie side by side are gathered by messages, and the own one is copied.
        let outputs = match r {
            0 => vec![filled(0, 0.0, 10)?, filled(0, 0.0, 10)?],
            _ => Vec::new(),
        };
        Ok(g.gather(filled(r, 1.0, 10)?, outputs, 0)?)
    }),
    way("ncclRecv", message),
    way("ncclGetUniqueId", message),
    way("cuEventRecord", message),
    way("cuStreamCreateWithPriority", message),
    way("cuStreamCreateWithPriority", both_ways),
    way("ncclSend", |r, g| {
        // Uneven parts: the native call is for even ones.
        let splits = if r == 0 { [4, 6] } else { [6, 4] };
        let (input, output) = (filled(r, 1.0, 10)?, filled(r, 0.0, 10)?);
        Ok(g.alltoall_into(input, output, splits.to_vec(), splits.to_vec())?)
    }),
];

const fn way(call: &'static str, submit: fn(u32, &NcclGroup) -> Result<Work, Error>) -> Way {
    Way { call, submit }
}

fn sum(rank: u32, group: &NcclGroup) -> Result<Work, Error> {
    submit(rank, group, SOON)
}

/// From rank 0 to rank 1, over lanes that are made for it.
fn message(rank: u32, group: &NcclGroup) -> Result<Work, Error> {
    match rank {
        0 => Ok(group.send(filled(0, 1.0, 10)?, 1, 0)?),
        _ => Ok(group.recv(filled(1, 0.0, 10)?, 0, 0)?),
    }
}

/// Two tensors that lie side by side, which the native calls want.
fn halves(rank: u32) -> Result<Vec<Tensor>, Error> {
    let whole = Arc::new(filled(rank, 1.0, 20)?);
    let crossing = ftcore::crossing(&DeviceKind::Cuda).ok_or_else(|| Error::unsupported("no crossing"))?;
    [0, 40]
        .into_iter()
        .map(|at| crossing.part(&whole, at, DType::F32, &[10], Box::new(())))
        .collect()
}

/// Both at once: two lanes, whose ends are joined.
fn both_ways(rank: u32, group: &NcclGroup) -> Result<Work, Error> {
    let peer = 1 - rank;
    let ops = vec![
        Collective::Send {
            tensor: filled(rank, 1.0, 10)?,
            peer,
            tag: 0,
        },
        Collective::Recv {
            tensor: filled(rank, 0.0, 10)?,
            peer: Some(peer),
            tag: 0,
        },
    ];
    let batch = Collective::Batch { ops };
    Ok(group.run(batch, SubmitOptions::by(deadline_in(SOON)))?)
}

/// Neither rank contributes, so that whichever call fails is the group's own.
fn abstain(rank: u32, group: &NcclGroup, dtype: DType, op: ReduceOp) -> Result<Work, Error> {
    let op = Collective::AllReduce {
        tensors: vec![CudaAccelerator.alloc(rank, dtype, &[10])?],
        op,
    };
    let options = SubmitOptions {
        contribute: false,
        ..SubmitOptions::by(deadline_in(SOON))
    };
    group.run(op, options).map_err(|rejected| rejected.error)
}

/// After the work of a stream: a sum, or a message.
fn on_a_stream(rank: u32, group: &NcclGroup, is_message: bool) -> Result<Work, Error> {
    let tensor = filled(rank, 1.0, 10)?;
    let op = match (is_message, rank) {
        (false, _) => Collective::AllReduce {
            tensors: vec![tensor],
            op: ReduceOp::Sum,
        },
        (true, 0) => Collective::Send {
            tensor,
            peer: 1,
            tag: 0,
        },
        (true, _) => Collective::Recv {
            tensor,
            peer: Some(0),
            tag: 0,
        },
    };
    let options = SubmitOptions {
        stream: Some(CudaAccelerator.new_stream(rank, false)?),
        ..SubmitOptions::by(deadline_in(SOON))
    };
    group.run(op, options).map_err(|rejected| rejected.error)
}

fn fails<const WAY: usize>() -> Outcome {
    let way = WAYS[WAY];
    two(GroupOptions::default(), |rank, group, store| {
        let work = (way.submit)(rank, group);
        let error = match &work {
            Ok(work) => match work.wait(deadline_in(SOON)) {
                Ok(()) => group_error(group)?,
                Err(e) => e,
            },
            // It failed before this rank came to it.
            Err(e) => e.clone(),
        };
        check(error.to_string().contains(way.call), || {
            format!("'{}' is not named: {error}", way.call)
        })?;
        check(
            matches!(error.kind(), ErrorKind::Backend | ErrorKind::Poisoned),
            || format!("{:?}: {error}", error.kind()),
        )?;
        next_epoch(rank, group, store)
    })
}

fn good_bye() -> Outcome {
    two(GroupOptions::default(), |rank, group, store| {
        sum_works(rank, group)?;
        // The old communicator's end hangs on rank 0, on a thread that nobody waits for.
        next_epoch(rank, group, store)?;
        group.shutdown(deadline_in(SOON))?;
        Ok(())
    })
}

fn no_id() -> Outcome {
    let group = group(0, GroupOptions::default())?;
    let e = group
        .configure(by_itself(1, SOON))
        .err()
        .ok_or("configure succeeded")?;
    says(
        &e,
        ErrorKind::Backend,
        &["ncclGetUniqueId", "configure", "code 2"],
    )?;
    group.configure(by_itself(2, SOON))?;
    Ok(submit(0, &group, SOON)?.wait_done()?)
}

/// A scenario's name, the fault and the body.
type Row = (&'static str, &'static str, fn() -> Outcome);

pub(super) fn scenarios() -> Vec<Scenario> {
    let list: [Row; 29] = [
        ("call_group_start_fails", "ncclGroupStart:2:3", fails::<0>),
        (
            "call_fetching_contributors_fails",
            "cuMemcpyDtoHAsync:1:700",
            fails::<1>,
        ),
        ("call_broadcast_fails", "ncclBroadcast@1:1:1", fails::<2>),
        ("call_reduce_fails", "ncclReduce@1:1:1", fails::<3>),
        ("call_all_gather_fails", "ncclAllGather@1:1:1", fails::<4>),
        ("call_reduce_scatter_fails", "ncclReduceScatter@1:1:1", fails::<5>),
        (
            "call_all_to_all_is_native_and_fails",
            "ncclAlltoAll@1:1:1",
            fails::<6>,
        ),
        ("call_gather_is_native_and_fails", "ncclGather@0:1:1", fails::<7>),
        (
            "call_scatter_is_native_and_fails",
            "ncclScatter@0:1:1",
            fails::<8>,
        ),
        ("call_send_fails", "ncclSend@0:1:1", fails::<9>),
        // Two for the groups; the third is a lane.
        (
            "call_joining_a_lane_fails",
            "ncclCommInitRankConfig@1:2:2",
            fails::<10>,
        ),
        (
            "call_premul_sum_fails",
            "ncclRedOpCreatePreMulSum@1:1:4",
            fails::<11>,
        ),
        (
            "call_a_kernel_that_does_not_start_fails",
            "cuLaunchKernel:1:719",
            fails::<12>,
        ),
        ("call_filling_memory_fails", "cuMemsetD32Async:1:1", fails::<13>),
        ("call_filling_bytes_fails", "cuMemsetD8Async:1:1", fails::<14>),
        (
            "call_filling_half_words_fails",
            "cuMemsetD16Async:1:1",
            fails::<15>,
        ),
        // Each device's constants take two such calls.
        (
            "call_filling_double_words_fails",
            "cuMemsetD2D32Async:5:1",
            fails::<16>,
        ),
        (
            "call_recording_the_end_fails",
            "cuEventRecord/ncclAllReduce:1:700",
            fails::<17>,
        ),
        (
            "call_without_memory_for_counts_fails_and_the_next_epoch_has_it",
            "cuMemHostAlloc:1:2",
            fails::<18>,
        ),
        (
            "call_waiting_for_the_caller_s_stream_fails",
            "cuStreamWaitEvent:1:700",
            fails::<19>,
        ),
        (
            "call_a_message_waiting_for_the_caller_s_stream_fails",
            "cuStreamWaitEvent:1:700",
            fails::<20>,
        ),
        (
            "call_without_scratch_memory_fails",
            "cuMemAllocAsync/cuLaunchKernel:1:2",
            fails::<21>,
        ),
        (
            "call_copying_the_own_part_fails",
            "cuMemcpyDtoDAsync:1:700",
            fails::<22>,
        ),
        ("call_recv_fails", "ncclRecv@1:1:1", fails::<23>),
        // The first was the group's.
        (
            "call_a_lane_s_unique_id_fails",
            "ncclGetUniqueId:2:2",
            fails::<24>,
        ),
        (
            "call_recording_the_end_of_a_message_fails",
            "cuEventRecord/ncclSend:1:700",
            fails::<25>,
        ),
        (
            "call_a_lane_without_a_stream_fails",
            "cuStreamCreateWithPriority/cuMemcpyHtoDAsync:1:2",
            fails::<26>,
        ),
        (
            "call_joining_the_ends_of_messages_fails",
            "cuStreamCreateWithPriority/ncclSend:1:2,cuStreamCreateWithPriority/ncclRecv:1:2",
            fails::<27>,
        ),
        ("call_a_composed_send_fails", "ncclSend@1:1:1", fails::<28>),
    ];
    let mut all: Vec<Scenario> = list
        .into_iter()
        .map(|(name, fault, body)| scenario(name, &[(FAIL, fault)], body))
        .collect();
    all.push(scenario(
        "call_unique_id_fails",
        &[(FAIL, "ncclGetUniqueId:1:2")],
        no_id,
    ));
    let hang = [(HANG, "call:ncclCommFinalize@0:1")];
    all.push(scenario(
        "call_a_good_bye_that_hangs_holds_nobody_up",
        &hang,
        good_bye,
    ));
    all
}
