//! Gloo behind CUDA tensors when things go wrong: streams that never get there, copies that fail, groups that are dropped, aborted,
//! shut down, split and configured again with work that waits for its inputs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use backend_gloo as _;
use backend_nccl::CudaAccelerator;
use ftcore::{
    Accelerator, Collective, DType, ErrorKind, Feature, GroupOptions, InMemoryStore, ProcessGroup,
    ProcessGroupExt, ReduceOp, Registry, Store, Stream, SubmitOptions, Tensor, Work, deadline_in,
    leaked_bytes,
};

use super::kit::*;
use super::{FAIL, HANG, Scenario, scenario};

const SOON: Duration = Duration::from_secs(20);

pub(super) fn scenarios() -> Vec<Scenario> {
    // A stream that waits for the work of an NCCL group of one, which never ends.
    let blocked = [(HANG, "device:ncclAllReduce@0:1")];
    let slow = [("OXCCL_STANDIN_CUDA_DELAY_US", "4000")];
    vec![
        scenario("staged_says_what_it_is_and_what_it_serves", &[], capabilities),
        scenario("staged_refuses_other_devices_and_wrong_states", &[], refusals).of_devices(4),
        scenario("staged_reads_and_writes_in_stream_order", &slow, order),
        scenario(
            "staged_abort_ends_work_that_waits_for_its_stream",
            &blocked,
            abort,
        ),
        scenario(
            "staged_l35_deadlines_count_from_submission_behind_a_blocked_stream",
            &blocked,
            deadlines,
        ),
        scenario(
            "staged_configure_ends_what_waits_and_the_next_epoch_works",
            &blocked,
            reconfigure,
        ),
        scenario("staged_drop_ends_what_waits", &blocked, dropped),
        scenario("staged_shutdown_waits_for_what_is_queued", &slow, shutdown),
        scenario(
            "staged_shutdown_cuts_a_blocked_stream_short",
            &blocked,
            shutdown_late,
        ),
        scenario("staged_split_keeps_its_place_among_queued_work", &slow, split),
        scenario(
            "staged_a_copy_to_the_host_that_fails_fails_the_group",
            &[(FAIL, "cuMemcpyDtoHAsync:1:700")],
            copy_out_fails,
        ),
        scenario(
            "staged_a_copy_to_the_device_that_fails_leaks_what_it_may_touch",
            // Two copies fill the tensors, the third writes a result.
            &[(FAIL, "cuMemcpyHtoDAsync:3:700")],
            copy_in_fails,
        ),
        scenario(
            "staged_a_lost_event_of_the_caller_s_stream_fails_the_group",
            &[],
            event_fails,
        ),
    ]
}

type Group = Box<dyn ProcessGroup>;

fn make(rank: u32) -> Result<Group, ftcore::Error> {
    let options = GroupOptions {
        timeout: SOON,
        ..Default::default()
    };
    Registry::global().create("gloo", &cuda(rank), &options)
}

/// Runs `body` as rank 0 and 1 with configured groups.
fn pair(body: impl Fn(u32, Group, &Arc<dyn Store>) -> Outcome + Sync) -> Outcome {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    ranks(2, |rank| {
        let group = make(rank)?;
        group.configure(configuration(&store, rank, 2, 1, SOON))?;
        body(rank, group, &store)
    })
}

/// A stream that never gets anywhere, and what keeps it so.
struct Blocked {
    stream: Arc<dyn Stream>,
    _group: backend_nccl::NcclGroup,
    _never: Work,
}

fn blocked() -> Result<Blocked, libtest_mimic::Failed> {
    let alone = group(0, GroupOptions::default())?;
    alone.configure(by_itself(1, TIME_LIMIT))?;
    let never = submit(0, &alone, TIME_LIMIT * 10)?;
    let stream = CudaAccelerator.new_stream(0, false)?;
    never.wait_on(&*stream)?;
    Ok(Blocked {
        stream,
        _group: alone,
        _never: never,
    })
}

fn sum_on(
    group: &dyn ProcessGroup,
    tensor: Tensor,
    stream: Option<&Arc<dyn Stream>>,
    by: Duration,
) -> Result<Work, ftcore::Error> {
    let op = Collective::AllReduce {
        tensors: vec![tensor],
        op: ReduceOp::Sum,
    };
    let options = SubmitOptions {
        stream: stream.cloned(),
        ..SubmitOptions::by(deadline_in(by))
    };
    group.run(op, options).map_err(|rejected| rejected.error)
}

fn works(rank: u32, group: &dyn ProcessGroup) -> Outcome {
    let tensor = filled(rank, 1.0 + rank as f32, 1000)?;
    let sum = read(&sum_on(group, tensor, None, SOON)?.take_tensor()?)?;
    check(sum == [3.0; 1000], || format!("the sum is {:?}", sum.first()))
}

/// The next failure of the group, whatever caused it.
fn heard(group: &dyn ProcessGroup) -> Result<ftcore::Error, libtest_mimic::Failed> {
    let until = deadline_in(Duration::from_secs(30));
    while Instant::now() < until {
        if let Some(e) = group.error() {
            return Ok(e);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Err("the group heard of nothing".into())
}

fn failed(work: &Work) -> Result<ftcore::Error, libtest_mimic::Failed> {
    Ok(work.wait(deadline_in(SOON)).err().ok_or("it succeeded")?)
}

/// Why an operation failed that another rank's failure may have overtaken: then it was refused.
fn ended(work: Result<Work, ftcore::Error>) -> Result<ftcore::Error, libtest_mimic::Failed> {
    work.map_or_else(Ok, |work| failed(&work))
}

fn capabilities() -> Outcome {
    let group = make(1)?;
    let info = group.info();
    check(info.device == cuda(1) && &*info.backend == "gloo", || {
        format!("{info:?}")
    })?;
    let plain = Registry::global().create("gloo", &ftcore::Device::CPU, &GroupOptions::default())?;
    let (here, there) = (group.capabilities(), plain.capabilities());
    check(here.devices == ["cuda"] && there.devices == ["cpu"], || {
        format!("{:?}", here.devices)
    })?;
    check(there.has(Feature::Borrow) && !here.has(Feature::Borrow), || {
        "device memory cannot be borrowed".into()
    })?;
    check(
        (here.ops, here.moves, here.reduces) == (there.ops, there.moves, there.reduces)
            && here.features == there.features.without(Feature::Borrow),
        || "staging lost or invented something".into(),
    )?;
    for key in ["staging", "wait_on"] {
        check(here.notes.iter().any(|(k, _)| k == key), || {
            format!("no note {key}")
        })?;
    }
    let Err(e) = Registry::global().create(
        "gloo",
        &ftcore::Device::new("npu".parse()?, 0),
        &GroupOptions::default(),
    ) else {
        return Err("an unknown device kind was served".into());
    };
    says(&e, ErrorKind::Unsupported, &["npu", "cuda"])
}

fn refusals() -> Outcome {
    let unconfigured = make(0)?;
    let e = sum_on(&*unconfigured, filled(0, 1.0, 4)?, None, SOON)
        .err()
        .ok_or("an unconfigured group accepted work")?;
    says(&e, ErrorKind::InvalidState, &["not configured"])?;
    check(unconfigured.error().is_none(), || {
        "a refusal poisoned the group".into()
    })?;
    pair(|rank, group, _| {
        for tensor in [filled(3, 1.0, 4)?, Tensor::from_vec(vec![1f32; 4])] {
            let place = tensor.device().to_string();
            let op = Collective::AllReduce {
                tensors: vec![tensor],
                op: ReduceOp::Sum,
            };
            let rejected = group
                .run(op, SubmitOptions::default())
                .err()
                .ok_or("a tensor of another device was accepted")?;
            says(&rejected.error, rejected.error.kind(), &[&place, "cuda"])?;
            check(rejected.op.tensors().len() == 1, || {
                "the tensor did not come back".into()
            })?;
        }
        works(rank, &*group)?;
        group.shutdown(deadline_in(SOON))?;
        let e = sum_on(&*group, filled(rank, 1.0, 4)?, None, SOON)
            .err()
            .ok_or("a shut-down group accepted work")?;
        says(&e, ErrorKind::InvalidState, &["shut down"])
    })
}

/// At 4 ms per piece of work: what was not waited for shows as old contents.
fn order() -> Outcome {
    pair(|rank, group, _| {
        let (writer, reader) = (
            CudaAccelerator.new_stream(on(rank), false)?,
            CudaAccelerator.new_stream(on(rank), false)?,
        );
        for round in 0..4u32 {
            let mut tensor = CudaAccelerator.alloc(on(rank), DType::F32, &[500])?;
            for value in [-1e9f32, (round * 10 + rank) as f32] {
                CudaAccelerator.copy_in(&value.to_ne_bytes().repeat(500), &mut tensor, &*writer)?;
            }
            let work = sum_on(&*group, tensor, Some(&writer), SOON)?;
            // Blocks the host until the results are on the device: a stream that goes on now finds them.
            work.wait_on(&*reader)?;
            let tensor = work.take_tensor()?;
            let mut bytes = vec![0u8; 2000];
            CudaAccelerator.copy_out(&tensor, &mut bytes, &*reader)?;
            let want = (round * 20 + 1) as f32;
            let right = bytes
                .as_chunks::<4>()
                .0
                .iter()
                .all(|b| f32::from_ne_bytes(*b) == want);
            check(right, || format!("round {round}: {:?}", bytes.first_chunk::<4>()))?;
        }
        Ok(())
    })
}

fn abort() -> Outcome {
    pair(|rank, group, store| {
        if rank == 0 {
            let blocked = blocked()?;
            let first = sum_on(&*group, filled(0, 1.0, 8)?, Some(&blocked.stream), TIME_LIMIT)?;
            let behind = sum_on(&*group, filled(0, 1.0, 8)?, None, TIME_LIMIT)?;
            let began = Instant::now();
            group.abort("enough");
            for work in [&first, &behind] {
                says(&failed(work)?, ErrorKind::Aborted, &["enough"])?;
                check(work.recover().len() == 1, || {
                    "the tensor did not come back".into()
                })?;
            }
            check(began.elapsed() < Duration::from_secs(5), || {
                format!("the abort took {:?}", began.elapsed())
            })?;
            says(&group.error().ok_or("no error")?, ErrorKind::Aborted, &["enough"])?;
            let e = sum_on(&*group, filled(0, 1.0, 8)?, None, SOON)
                .err()
                .ok_or("a poisoned group accepted work")?;
            says(&e, ErrorKind::Poisoned, &["enough"])?;
        } else {
            let e = ended(sum_on(&*group, filled(1, 1.0, 8)?, None, TIME_LIMIT))?;
            check(e.to_string().contains("enough"), || format!("{e}"))?;
        }
        group.configure(configuration(store, rank, 2, 2, SOON))?;
        works(rank, &*group)
    })
}

fn deadlines() -> Outcome {
    pair(|rank, group, store| {
        if rank == 0 {
            let blocked = blocked()?;
            let began = Instant::now();
            let first = sum_on(&*group, filled(0, 1.0, 8)?, Some(&blocked.stream), TIME_LIMIT)?;
            // Its own inputs are ready, but it stands behind the first.
            let behind = sum_on(&*group, filled(0, 1.0, 8)?, None, Duration::from_millis(300))?;
            says(&failed(&behind)?, ErrorKind::Timeout, &["all_reduce", "deadline"])?;
            check(began.elapsed() < Duration::from_secs(10), || {
                format!("it took {:?}", began.elapsed())
            })?;
            says(&failed(&first)?, ErrorKind::Timeout, &["behind an earlier"])?;
            let e = group.error().ok_or("the group did not fail")?;
            says(&e, ErrorKind::Timeout, &["all_reduce"])?;
            group.configure(configuration(store, 0, 2, 2, SOON))?;
            let alone = sum_on(
                &*group,
                filled(0, 1.0, 8)?,
                Some(&blocked.stream),
                Duration::from_millis(300),
            )?;
            says(&failed(&alone)?, ErrorKind::Timeout, &["all_reduce", "inputs"])?;
            check(alone.recover().len() == 1, || {
                "the tensor did not come back".into()
            })?;
        } else {
            heard(&*group)?;
            group.configure(configuration(store, 1, 2, 2, SOON))?;
            let e = heard(&*group)?;
            check(e.to_string().contains("inputs"), || format!("{e}"))?;
        }
        group.configure(configuration(store, rank, 2, 3, SOON))?;
        works(rank, &*group)
    })
}

fn reconfigure() -> Outcome {
    pair(|rank, group, store| {
        let blocked = (rank == 0).then(blocked).transpose()?;
        let stream = blocked.as_ref().map(|b| &b.stream);
        let old = stream
            .map(|s| sum_on(&*group, filled(rank, 1.0, 8)?, Some(s), TIME_LIMIT))
            .transpose()?;
        group.configure(configuration(store, rank, 2, 2, SOON))?;
        works(rank, &*group)?;
        if let Some(old) = old {
            says(&failed(&old)?, ErrorKind::Aborted, &["configured again"])?;
            check(old.recover().len() == 1, || "the tensor did not come back".into())?;
        }
        check(group.error().is_none(), || format!("{:?}", group.error()))?;
        // Nothing of the old epoch is left in the way.
        works(rank, &*group)
    })
}

fn dropped() -> Outcome {
    pair(|rank, group, _| {
        if rank == 1 {
            heard(&*group)?;
            return Ok(());
        }
        let blocked = blocked()?;
        let work = sum_on(&*group, filled(0, 1.0, 8)?, Some(&blocked.stream), TIME_LIMIT)?;
        let began = Instant::now();
        drop(group);
        check(began.elapsed() < Duration::from_secs(5), || {
            "the drop blocked".into()
        })?;
        says(&failed(&work)?, ErrorKind::Aborted, &["dropped"])?;
        check(work.recover().len() == 1, || {
            "the tensor did not come back".into()
        })
    })
}

fn shutdown() -> Outcome {
    pair(|rank, group, _| {
        let writer = CudaAccelerator.new_stream(on(rank), false)?;
        let mut works = Vec::new();
        for _ in 0..4 {
            let mut tensor = CudaAccelerator.alloc(on(rank), DType::F32, &[100])?;
            CudaAccelerator.copy_in(&1f32.to_ne_bytes().repeat(100), &mut tensor, &*writer)?;
            works.push(sum_on(&*group, tensor, Some(&writer), SOON)?);
        }
        group.shutdown(deadline_in(SOON))?;
        for work in works {
            let sum = read(&work.take_tensor()?)?;
            check(sum == [2.0; 100], || format!("the sum is {:?}", sum.first()))?;
        }
        group.shutdown(deadline_in(SOON))?;
        Ok(())
    })
}

fn shutdown_late() -> Outcome {
    pair(|rank, group, _| {
        if rank == 1 {
            heard(&*group)?;
            return Ok(());
        }
        let blocked = blocked()?;
        let work = sum_on(&*group, filled(0, 1.0, 8)?, Some(&blocked.stream), TIME_LIMIT)?;
        let e = group
            .shutdown(deadline_in(Duration::from_millis(200)))
            .err()
            .ok_or("shutdown says that all work has ended")?;
        says(&e, ErrorKind::Timeout, &["shutdown", "has not ended"])?;
        says(&failed(&work)?, ErrorKind::Aborted, &["shut-down"])
    })
}

fn split() -> Outcome {
    pair(|rank, group, _| {
        // Rank 0's first operation waits a while for its inputs; rank 1's goes at once.
        let writer = CudaAccelerator.new_stream(on(rank), false)?;
        let mut tensor = CudaAccelerator.alloc(on(rank), DType::F32, &[100])?;
        let copies = if rank == 0 { 40 } else { 1 };
        for _ in 0..copies {
            CudaAccelerator.copy_in(&1f32.to_ne_bytes().repeat(100), &mut tensor, &*writer)?;
        }
        let before = group.traffic();
        let work = sum_on(&*group, tensor, Some(&writer), SOON)?;
        // Rank 1 splits once its own operation is on its way, and so before the split on every rank.
        let until = deadline_in(Duration::from_secs(2));
        while rank == 1 && group.traffic() == before && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        let child = group
            .split(Some(0), 1 - rank, deadline_in(SOON))?
            .ok_or("no child")?;
        let info = child.info();
        check(info.device == cuda(rank) && info.rank == 1 - rank, || {
            format!("{info:?}")
        })?;
        works(rank, &*child)?;
        let sum = read(&work.take_tensor()?)?;
        check(sum == [2.0; 100], || format!("the sum is {:?}", sum.first()))?;
        works(rank, &*group)
    })
}

fn copy_out_fails() -> Outcome {
    pair(|rank, group, store| {
        let before = leaked_bytes();
        let work = match sum_on(&*group, filled(rank, 1.0, 1000)?, None, SOON) {
            Ok(work) => work,
            Err(e) => {
                // The other rank's failure was quicker.
                says(&e, ErrorKind::Poisoned, &["cuMemcpyDtoHAsync"])?;
                group.configure(configuration(store, rank, 2, 2, SOON))?;
                return works(rank, &*group);
            }
        };
        let e = failed(&work)?;
        if e.kind() == ErrorKind::Backend {
            says(
                &e,
                ErrorKind::Backend,
                &["cuMemcpyDtoHAsync", "all_reduce", "code 700"],
            )?;
            check(work.recover().is_empty(), || {
                "memory that may be in use came back".into()
            })?;
            check(leaked_bytes() >= before + 8000, || {
                "nothing was counted as leaked".into()
            })?;
            says(
                &group.error().ok_or("no error")?,
                ErrorKind::Backend,
                &["cuMemcpyDtoHAsync"],
            )?;
        } else {
            // The other rank hears the reason.
            check(e.to_string().contains("cuMemcpyDtoHAsync"), || format!("{e}"))?;
            check(work.recover().len() == 1, || {
                "the tensor did not come back".into()
            })?;
        }
        group.configure(configuration(store, rank, 2, 2, SOON))?;
        works(rank, &*group)
    })
}

fn copy_in_fails() -> Outcome {
    // One fails and leaks; whether the other has its result by then is a matter of luck.
    let before = leaked_bytes();
    let failures = std::sync::atomic::AtomicU32::new(0);
    pair(|rank, group, store| {
        let work = sum_on(&*group, filled(rank, 1.0, 1000)?, None, SOON)?;
        match work.wait(deadline_in(SOON)) {
            Err(e) if e.kind() == ErrorKind::Backend => {
                says(&e, ErrorKind::Backend, &["cuMemcpyHtoDAsync", "all_reduce"])?;
                check(work.recover().is_empty(), || {
                    "memory that may be in use came back".into()
                })?;
                failures.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            }
            Err(e) => check(e.to_string().contains("cuMemcpyHtoDAsync"), || format!("{e}"))?,
            Ok(()) => {
                let sum = read(&work.take_tensor()?)?;
                check(sum == [2.0; 1000], || format!("the sum is {:?}", sum.first()))?;
            }
        }
        heard(&*group)?;
        group.configure(configuration(store, rank, 2, 2, SOON))?;
        works(rank, &*group)
    })?;
    let failures = failures.load(std::sync::atomic::Ordering::SeqCst);
    check(failures == 1, || format!("{failures} ranks saw the failed copy"))?;
    check(leaked_bytes() >= before + 4000, || {
        "nothing was counted as leaked".into()
    })
}

fn event_fails() -> Outcome {
    let group = make(0)?;
    group.configure(by_itself(1, SOON))?;
    let tensor = filled(0, 1.0, 4)?;
    let stream: Arc<dyn Stream> = Arc::new(BrokenStream);
    let work = sum_on(&*group, tensor, Some(&stream), SOON)?;
    let e = failed(&work)?;
    says(&e, ErrorKind::Backend, &["the device is gone"])?;
    check(work.recover().len() == 1, || {
        "the tensor did not come back".into()
    })?;
    says(
        &group.error().ok_or("no error")?,
        ErrorKind::Backend,
        &["the device is gone"],
    )
}

/// A stream whose events cannot be asked.
struct BrokenStream;

impl ftcore::Event for BrokenStream {
    fn query(&self) -> ftcore::Result<bool> {
        Err(ftcore::Error::new(ErrorKind::Backend, "the device is gone"))
    }
    fn synchronize(&self, _deadline: Instant) -> ftcore::Result<()> {
        ftcore::Event::query(self).map(drop)
    }
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

impl Stream for BrokenStream {
    fn device(&self) -> ftcore::Device {
        cuda(0)
    }
    fn record(&self) -> ftcore::Result<Arc<dyn ftcore::Event>> {
        Ok(Arc::new(Self))
    }
    fn wait(&self, _event: &dyn ftcore::Event) -> ftcore::Result<()> {
        Ok(())
    }
    fn query(&self) -> ftcore::Result<bool> {
        ftcore::Event::query(self)
    }
    fn synchronize(&self, deadline: Instant) -> ftcore::Result<()> {
        ftcore::Event::synchronize(self, deadline)
    }
}
