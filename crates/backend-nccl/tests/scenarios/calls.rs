//! Every call of the library and the driver on the way of an operation, failing once on one rank: the failure names the call, the
//! other rank hears of it, and the same process goes on in the next epoch.

use std::sync::Arc;
use std::time::Duration;

use backend_nccl::NcclGroup;
use ftcore::{
    Collective, DType, DeviceKind, Error, ErrorKind, GroupOptions, InMemoryStore, ProcessGroup,
    ProcessGroupExt, ReduceOp, Store, SubmitOptions, Tensor, Work, deadline_in,
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

const WAYS: [Way; 14] = [
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
    way("cuMemsetAsync", abstain),
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

/// Neither rank contributes, so that whichever call fails is the group's own.
fn abstain(rank: u32, group: &NcclGroup) -> Result<Work, Error> {
    let op = Collective::AllReduce {
        tensors: vec![filled(rank, 1.0, 10)?],
        op: ReduceOp::Sum,
    };
    let options = SubmitOptions {
        contribute: false,
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
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let group = group(0, GroupOptions::default())?;
    let e = group
        .configure(configuration(&store, 0, 1, 1, SOON))
        .err()
        .ok_or("configure succeeded")?;
    says(
        &e,
        ErrorKind::Backend,
        &["ncclGetUniqueId", "configure", "code 2"],
    )?;
    group.configure(configuration(&store, 0, 1, 2, SOON))?;
    Ok(submit(0, &group, SOON)?.wait_done()?)
}

/// A scenario's name, the fault and the body.
type Row = (&'static str, &'static str, fn() -> Outcome);

pub(super) fn scenarios() -> Vec<Scenario> {
    let list: [Row; 14] = [
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
