//! NCCL in child processes: what crosses and in which order, children that are killed, and drivers that refuse.

use std::sync::Arc;
use std::time::Duration;

use backend_nccl::CudaAccelerator;
use ftcore::{
    Accelerator, Collective, DType, ErrorKind, Feature, GroupOptions, ProcessGroup, ProcessGroupExt,
    ReduceOp, Stream, SubmitOptions, Tensor, Work, deadline_in, leaked_bytes,
};
use isolate::{IsolateOptions, IsolatedGroup};

use super::kit::*;
use super::{FAIL, HANG, Scenario, scenario};

const SOON: Duration = Duration::from_secs(20);

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        scenario(
            "isolated_l09_memory_and_events_cross_in_stream_order",
            &[("OXCCL_STANDIN_CUDA_DELAY_US", "4000")],
            order,
        ),
        scenario("isolated_says_how_tensors_cross", &[], capabilities).of_devices(4),
        scenario("isolated_own_memory_is_used_in_place", &[], in_place),
        scenario(
            "isolated_a_child_that_is_killed_in_the_middle_is_survived",
            &[(HANG, "device:ncclAllReduce@0:3")],
            killed,
        ),
        scenario(
            "isolated_abort_with_inputs_that_never_come_leaks_them",
            // The parent's own group of one hangs at once; no child gets that far.
            &[(HANG, "device:ncclBroadcast@0:1")],
            blocked,
        ),
        scenario(
            "isolated_results_that_cannot_be_copied_back_are_leaked",
            // The first such copy carries the input, the second the result.
            &[(FAIL, "cuMemcpyDtoDAsync:2:700")],
            copy_back_fails,
        ),
        scenario(
            "isolated_memory_that_cannot_be_exported_is_staged",
            &[(FAIL, "cuIpcGetMemHandle:1:801")],
            staged_because_of::<MEM>,
        ),
        scenario(
            "isolated_events_that_cannot_be_exported_are_staged",
            &[(FAIL, "cuIpcGetEventHandle:1:801")],
            staged_because_of::<EVENT>,
        ),
        scenario(
            "isolated_memory_that_the_child_cannot_open_is_staged",
            &[(FAIL, "cuIpcOpenMemHandle:1:801")],
            staged_because_of::<OPEN>,
        ),
        scenario(
            "isolated_an_event_that_the_child_cannot_open_fails_the_operation",
            &[(FAIL, "cuIpcOpenEventHandle:1:801")],
            event_not_opened,
        ),
    ]
}

fn options(rank: u32) -> IsolateOptions {
    IsolateOptions {
        options: GroupOptions {
            timeout: SOON,
            ..Default::default()
        },
        ..IsolateOptions::new("nccl", cuda(rank))
    }
}

pub(super) fn isolated(rank: u32) -> Result<IsolatedGroup, ftcore::Error> {
    IsolatedGroup::new(options(rank))
}

fn sum(
    group: &dyn ProcessGroup,
    tensor: Tensor,
    stream: Option<&Arc<dyn Stream>>,
) -> Result<Work, ftcore::Error> {
    let op = Collective::AllReduce {
        tensors: vec![tensor],
        op: ReduceOp::Sum,
    };
    let options = SubmitOptions {
        stream: stream.cloned(),
        ..SubmitOptions::by(deadline_in(SOON))
    };
    group.run(op, options).map_err(|rejected| rejected.error)
}

/// Why an operation failed that another rank's failure may have overtaken: then it was refused.
fn ended(work: Result<Work, ftcore::Error>) -> Result<ftcore::Error, libtest_mimic::Failed> {
    match work {
        Err(e) => Ok(e),
        Ok(work) => Ok(work.wait(deadline_in(SOON)).err().ok_or("it succeeded")?),
    }
}

fn works(rank: u32, world: u32, group: &dyn ProcessGroup) -> Outcome {
    let result = read(&sum(group, filled(rank, 1.0, 1000)?, None)?.take_tensor()?)?;
    check(result == vec![world as f32; 1000], || {
        format!("the sum is {:?}", result.first())
    })
}

/// At 4 ms per piece of work: an event that does not really cross shows as old contents.
fn order() -> Outcome {
    groups(2, isolated, |rank, group, _| {
        let writer = CudaAccelerator.new_stream(on(rank), false)?;
        for round in 0..4u32 {
            let mut tensor = CudaAccelerator.alloc(on(rank), DType::F32, &[500])?;
            for value in [-1e9f32, (round * 10 + rank) as f32] {
                CudaAccelerator.copy_in(&value.to_ne_bytes().repeat(500), &mut tensor, &*writer)?;
            }
            let submitted = std::time::Instant::now();
            let work = sum(group, tensor, Some(&writer))?;
            let took = submitted.elapsed();
            let result = read(&work.take_tensor()?)?;
            let want = (round * 20 + 1) as f32;
            check(result.iter().all(|&x| x == want), || {
                format!("round {round}: {:?}, expected {want}", result.first())
            })?;
            check(took < Duration::from_secs(5), || format!("submit took {took:?}"))?;
        }
        Ok(())
    })
}

fn capabilities() -> Outcome {
    groups(2, isolated, |rank, group, _| {
        let child = group.child_pid().ok_or("no child")?;
        check(child != std::process::id(), || "the group is not isolated".into())?;
        let c = group.capabilities();
        check(
            c.devices == ["cuda"] && !c.has(Feature::Borrow) && c.has(Feature::Abort),
            || format!("{:?} {:?}", c.devices, c.features),
        )?;
        check(group.info().device == cuda(rank), || {
            format!("{:?}", group.info())
        })?;
        let note = c
            .notes
            .iter()
            .find(|(key, _)| key == "crossing")
            .ok_or("no note")?;
        check(note.1.contains("on the device"), || note.1.to_string())?;
        for tensor in [filled(3, 1.0, 4)?, Tensor::from_vec(vec![1f32; 4])] {
            let place = tensor.device().to_string();
            let e = sum(group, tensor, None)
                .err()
                .ok_or("another device was accepted")?;
            says(&e, e.kind(), &[&place, "cuda"])?;
        }
        // Empty tensors cross too.
        sum(group, CudaAccelerator.alloc(on(rank), DType::F32, &[0])?, None)?.wait_done()?;
        works(rank, 2, group)
    })
}

fn in_place() -> Outcome {
    groups(2, isolated, |rank, group, _| {
        let mut tensor = group.alloc(DType::F32, &[10, 50])?;
        check(*tensor.device() == cuda(rank), || format!("{tensor:?}"))?;
        let stream = CudaAccelerator.new_stream(on(rank), false)?;
        CudaAccelerator.copy_in(&2f32.to_ne_bytes().repeat(500), &mut tensor, &*stream)?;
        let address = tensor.as_ptr();
        let result = sum(group, tensor, Some(&stream))?.take_tensor()?;
        check(result.as_ptr() == address && result.shape() == [10, 50], || {
            format!("{result:?} is another tensor")
        })?;
        let values = read(&result)?;
        check(values == [4.0; 500], || {
            format!("the sum is {:?}", values.first())
        })
    })
}

fn killed() -> Outcome {
    groups(2, isolated, |rank, group, store| {
        works(rank, 2, group)?;
        let work = sum(group, filled(rank, 1.0, 1000)?, None);
        if rank == 0 {
            let work = work?;
            let child = group.child_pid().ok_or("no child")?;
            let sent = std::process::Command::new("kill")
                .args(["-9", &child.to_string()])
                .status()?;
            check(sent.success(), || "no signal was sent".into())?;
            let e = work.wait(deadline_in(SOON)).err().ok_or("it succeeded")?;
            says(&e, ErrorKind::Unavailable, &["signal 9"])?;
            check(work.recover().len() == 1, || {
                "the tensor did not come back".into()
            })?;
        } else {
            // Refused with the same words if the notice was quicker than the operation.
            let e = ended(work)?;
            says(&e, e.kind(), &["peer 0", "gone"])?;
        }
        group.configure(configuration(store, rank, 2, 2, SOON))?;
        // The new child of rank 0 hangs at its second such operation as well; one is enough.
        works(rank, 2, group)
    })
}

fn blocked() -> Outcome {
    let alone = super::kit::group(0, GroupOptions::default())?;
    alone.configure(by_itself(1, TIME_LIMIT))?;
    let never = alone.broadcast(filled(0, 1.0, 10)?, 0)?;
    let stream: Arc<dyn Stream> = CudaAccelerator.new_stream(0, false)?;
    never.wait_on(&*stream)?;
    groups(2, isolated, |rank, group, store| {
        if rank == 0 {
            let before = leaked_bytes();
            let work = sum(group, filled(0, 1.0, 1000)?, Some(&stream))?;
            // The stream of one operation holds up no other's.
            let group_again = sum(group, filled(0, 1.0, 8)?, None)?;
            group.abort("enough");
            for work in [&work, &group_again] {
                let e = work.wait(deadline_in(SOON)).err().ok_or("it succeeded")?;
                says(&e, ErrorKind::Aborted, &["enough"])?;
            }
            check(work.recover().is_empty(), || {
                "memory that a copy still reads came back".into()
            })?;
            check(leaked_bytes() >= before + 4000, || {
                "nothing was counted as leaked".into()
            })?;
        } else {
            let e = ended(sum(group, filled(1, 1.0, 1000)?, None))?;
            says(&e, e.kind(), &["enough"])?;
        }
        group.configure(configuration(store, rank, 2, 2, SOON))?;
        works(rank, 2, group)
    })
}

fn copy_back_fails() -> Outcome {
    let before = leaked_bytes();
    groups(1, isolated, |_, group, _| {
        let work = sum(group, filled(0, 1.0, 1000)?, None)?;
        let e = work.wait(deadline_in(SOON)).err().ok_or("it succeeded")?;
        says(&e, ErrorKind::Backend, &["cuMemcpyDtoDAsync", "all_reduce"])?;
        check(work.recover().is_empty(), || {
            "memory that may be in use came back".into()
        })
    })?;
    check(leaked_bytes() >= before + 4000, || {
        "nothing was counted as leaked".into()
    })
}

/// The order cannot be kept, so the operation is refused by the child, and nothing is guessed.
fn event_not_opened() -> Outcome {
    groups(1, isolated, |_, group, store| {
        let e = ended(sum(group, filled(0, 1.0, 1000)?, None))?;
        says(&e, e.kind(), &["cuIpcOpenEventHandle", "not supported"])?;
        // A new child fails once as well, at its first event.
        group.configure(configuration(store, 0, 1, 2, SOON))?;
        let again = ended(sum(group, filled(0, 1.0, 8)?, None));
        check(again.is_err() || group.error().is_some(), || "no error".into())
    })
}

const MEM: u8 = 0;
const EVENT: u8 = 1;
const OPEN: u8 = 2;

fn staged_because_of<const WHAT: u8>() -> Outcome {
    let call = ["cuIpcGetMemHandle", "cuIpcGetEventHandle", "cuIpcOpenMemHandle"][usize::from(WHAT)];
    // Each process refuses once; the second try of this one would succeed, so one rank is enough.
    let group = isolate::open(options(0))?;
    let note = {
        let c = group.capabilities();
        check(c.devices == ["cuda"], || format!("{:?}", c.devices))?;
        let note = c
            .notes
            .iter()
            .find(|(key, _)| key == "crossing")
            .ok_or("no note")?;
        note.1.to_string()
    };
    for word in ["host memory", call, "not supported"] {
        check(note.contains(word), || format!("'{word}' is not in: {note}"))?;
    }
    group.configure(by_itself(1, SOON))?;
    works(0, 1, &*group)?;
    let max = group
        .all_reduce(filled(0, -3.5, 77)?, ReduceOp::Max)?
        .take_tensor()?;
    let max = read(&max)?;
    check(max == [-3.5; 77], || format!("the maximum is {:?}", max.first()))
}
