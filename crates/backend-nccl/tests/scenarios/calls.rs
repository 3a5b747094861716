//! A call of the library or the driver on the way of an operation fails once on one rank, at each step that an operation has here: the failure
//! names the call, the other rank hears of it, and the same process goes on in the next epoch.

use std::time::Duration;

use backend_nccl::{CudaAccelerator, NcclGroup};
use ftcore::{
    Accelerator, Collective, DType, Error, ErrorKind, GroupOptions, ProcessGroup, ProcessGroupExt, ReduceOp,
    SubmitOptions, Work, deadline_in,
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

const WAYS: [Way; 11] = [
    way("cuMemcpyDtoHAsync", sum),
    way("ncclSend", |r, g| {
        Ok(g.all_to_all_into(filled(r, 1.0, 20)?, filled(r, 0.0, 20)?, Vec::new(), Vec::new())?)
    }),
    way("ncclSend", message),
    way("ncclCommInitRankConfig", message),
    way("cuLaunchKernel", |r, g| {
        Ok(g.all_reduce(filled(r, 1.0, 10)?, ReduceOp::Max)?)
    }),
    way("cuMemsetAsync", abstain),
    way("cuEventRecord", sum),
    way("cuEventRecord", message),
    way("cuMemHostAlloc", sum),
    way("cuStreamWaitEvent", on_a_stream),
    way("cuMemAllocAsync", |r, g| {
        Ok(g.all_reduce(filled(r, 1.0, 10)?, ReduceOp::Max)?)
    }),
];

const fn way(call: &'static str, submit: fn(u32, &NcclGroup) -> Result<Work, Error>) -> Way {
    Way { call, submit }
}

fn sum(rank: u32, group: &NcclGroup) -> Result<Work, Error> {
    submit(rank, group, SOON)
}

/// From rank 0 to rank 1, over channels that are made for it.
fn message(rank: u32, group: &NcclGroup) -> Result<Work, Error> {
    match rank {
        0 => Ok(group.send(filled(0, 1.0, 10)?, 1, 0)?),
        _ => Ok(group.recv(filled(1, 0.0, 10)?, 0, 0)?),
    }
}

/// Neither rank contributes, so that whichever call fails is the group's own.
fn abstain(rank: u32, group: &NcclGroup) -> Result<Work, Error> {
    let op = Collective::AllReduce {
        tensors: vec![CudaAccelerator.alloc(on(rank), DType::F32, &[10])?],
        op: ReduceOp::Sum,
    };
    let options = SubmitOptions {
        contribute: false,
        ..SubmitOptions::by(deadline_in(SOON))
    };
    group.run(op, options).map_err(|rejected| rejected.error)
}

/// After the work of a stream.
fn on_a_stream(rank: u32, group: &NcclGroup) -> Result<Work, Error> {
    let op = Collective::AllReduce {
        tensors: vec![filled(rank, 1.0, 10)?],
        op: ReduceOp::Sum,
    };
    let options = SubmitOptions {
        stream: Some(CudaAccelerator.new_stream(on(rank), false)?),
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

fn leave() -> Outcome {
    two(GroupOptions::default(), |rank, group, store| {
        sum_works(rank, group)?;
        // The old communicator's end hangs on rank 0, on a thread that no caller waits for.
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
    let list: [Row; 11] = [
        (
            "call_fetching_contributors_fails",
            "cuMemcpyDtoHAsync:1:700",
            fails::<0>,
        ),
        ("call_sending_in_an_exchange_fails", "ncclSend@1:1:1", fails::<1>),
        ("call_send_fails", "ncclSend@0:1:1", fails::<2>),
        // Two for the groups; the third is a channel.
        (
            "call_joining_a_channel_fails",
            "ncclCommInitRankConfig@1:2:2",
            fails::<3>,
        ),
        (
            "call_a_kernel_that_does_not_start_fails",
            "cuLaunchKernel:1:719",
            fails::<4>,
        ),
        ("call_filling_memory_fails", "cuMemsetD32Async:1:1", fails::<5>),
        (
            "call_recording_the_end_fails",
            "cuEventRecord/ncclAllReduce:1:700",
            fails::<6>,
        ),
        (
            "call_recording_the_end_of_a_message_fails",
            "cuEventRecord/ncclSend:1:700",
            fails::<7>,
        ),
        (
            "call_without_memory_for_counts_fails_and_the_next_epoch_has_it",
            "cuMemHostAlloc:1:2",
            fails::<8>,
        ),
        (
            "call_waiting_for_the_caller_s_stream_fails",
            "cuStreamWaitEvent:1:700",
            fails::<9>,
        ),
        (
            "call_without_scratch_memory_fails",
            "cuMemAllocAsync/cuLaunchKernel:1:2",
            fails::<10>,
        ),
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
    all.push(scenario("call_a_leave_that_hangs_holds_no_rank_up", &hang, leave));
    all
}
