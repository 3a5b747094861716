//! What ftcore asks of a device, when the driver refuses or hangs: streams, events, memory; and streams of other libraries.

use std::sync::Arc;
use std::time::{Duration, Instant};

use backend_nccl::CudaAccelerator;
use ftcore::{
    Accelerator, Collective, DType, Device, DeviceKind, Error, ErrorKind, GroupOptions, ProcessGroup,
    ProcessGroupExt, ReduceOp, Stream, SubmitOptions, Tensor, accelerator, deadline_in,
};

use super::kit::*;
use super::{FAIL, HANG, Scenario, scenario};

const SOON: Duration = Duration::from_secs(20);

pub(super) fn stream() -> Result<Arc<dyn Stream>, Error> {
    CudaAccelerator.new_stream(0, false)
}

/// Fails once with code 700, and works at the next try.
fn fails_once() -> Outcome {
    let wait = || stream()?.synchronize(deadline_in(SOON));
    let e = wait().err().ok_or("it succeeded")?;
    says(
        &e,
        ErrorKind::Backend,
        &["cuStreamQuery", "illegal memory access", "code 700"],
    )?;
    Ok(wait()?)
}

fn synchronize_hangs() -> Outcome {
    let began = Instant::now();
    let e = CudaAccelerator
        .synchronize(0, deadline_in(Duration::from_millis(100)))
        .err()
        .ok_or("it succeeded")?;
    says(&e, ErrorKind::Timeout, &["cuda:0", "deadline"])?;
    check(began.elapsed() < Duration::from_secs(10), || {
        "it took too long".into()
    })
}

/// Ranks 0 and 1 are on devices 0 and 1; the threads that call have made the third current for work of their own. The stand-in refuses, as
/// the driver does, to record an event of one context on a stream of another.
fn another_is_current() -> Outcome {
    two(GroupOptions::default(), |rank, group, store| {
        let unmoved = |after: &str| {
            let current = CudaAccelerator.current()?;
            check(current == 3, || {
                format!("cuda:{current} is current after {after}")
            })
        };
        CudaAccelerator.set(3)?;
        sum_works(rank, group)?;
        unmoved("an all-reduce")?;
        if rank == 0 {
            group
                .send(filled(0, 5.0, 8)?, 1, 0)
                .map_err(Error::from)?
                .wait_done()?;
        } else {
            let got = group
                .recv(filled(1, 0.0, 8)?, 0, 0)
                .map_err(Error::from)?
                .take_tensor()?;
            check(read(&got)? == [5.0; 8], || "another message arrived".into())?;
        }
        unmoved("a message")?;
        group.barrier()?;
        unmoved("a barrier")?;
        let child = group.split(Some(0), rank, deadline_in(SOON))?;
        unmoved("a split")?;
        drop(child);
        group.configure(configuration(store, rank, 2, 2, SOON))?;
        unmoved("a configuration")?;
        sum_works(rank, group)
    })
}

/// A copy of 300 ms stands before everything.
fn too_early() -> Outcome {
    let stream = stream()?;
    let mut tensor = CudaAccelerator.alloc(0, DType::U8, &[8])?;
    CudaAccelerator.copy_in(&[1; 8], &mut tensor, &*stream)?;
    let soon = || deadline_in(Duration::from_millis(20));
    let e = stream
        .record()?
        .synchronize(soon())
        .err()
        .ok_or("the event was reached")?;
    says(&e, ErrorKind::Timeout, &["event", "deadline"])?;
    let e = stream.synchronize(soon()).err().ok_or("the stream was done")?;
    says(&e, ErrorKind::Timeout, &["stream", "deadline"])?;
    Ok(stream.synchronize(deadline_in(SOON))?)
}

/// A stream whose next piece of work comes after several others, long after the free that forgets to wait for it.
fn busy_stream() -> Result<(Arc<dyn Stream>, Tensor), Error> {
    let stream = stream()?;
    let mut before = CudaAccelerator.alloc(0, DType::U8, &[8])?;
    for _ in 0..8 {
        CudaAccelerator.copy_in(&[1; 8], &mut before, &*stream)?;
    }
    Ok((stream, before))
}

/// The stand-in ends the process at a copy into memory that was freed.
fn part_dropped_early() -> Outcome {
    let (stream, _before) = busy_stream()?;
    let whole = CudaAccelerator.alloc(0, DType::U8, &[4000])?;
    let (first, mut second) = whole.split_at(1000).map_err(|refused| refused.0)?;
    CudaAccelerator.copy_in(&[2; 3000], &mut second, &*stream)?;
    check(!stream.query()?, || "the host waited for the copy".into())?;
    drop((first, second));
    Ok(stream.synchronize(deadline_in(SOON))?)
}

/// Of two streams that write into one block the first is the one that takes long.
fn dropped_early_on_two_streams() -> Outcome {
    let (slow, _before) = busy_stream()?;
    let quick = stream()?;
    let mut tensor = CudaAccelerator.alloc(0, DType::U8, &[4000])?;
    CudaAccelerator.copy_in(&[2; 4000], &mut tensor, &*slow)?;
    CudaAccelerator.copy_in(&[3; 4000], &mut tensor, &*quick)?;
    drop(tensor);
    Ok(slow.synchronize(deadline_in(SOON))?)
}

fn refusals() -> Outcome {
    let e = CudaAccelerator
        .current()
        .err()
        .ok_or("there is a current device")?;
    says(
        &e,
        ErrorKind::Backend,
        &["cuCtxGetDevice", "invalid device context"],
    )?;
    CudaAccelerator.set(1)?;
    check(CudaAccelerator.current()? == 1, || {
        "another device is current".into()
    })?;
    let e = CudaAccelerator.set(9).err().ok_or("cuda:9 was set")?;
    says(&e, ErrorKind::Unsupported, &["cuda:9"])?;
    let huge = [usize::MAX / 2, 4];
    for refused in [
        CudaAccelerator.alloc(0, DType::F32, &huge),
        CudaAccelerator.alloc_host(0, DType::F32, &huge),
    ] {
        let e = refused.err().ok_or("there is that much memory")?;
        says(&e, ErrorKind::InvalidArgument, &["fit in memory"])?;
    }
    let stream = stream()?;
    let mut tensor = CudaAccelerator.alloc(0, DType::U8, &[8])?;
    let e = CudaAccelerator.copy_in(&[0; 7], &mut tensor, &*stream).err();
    says(
        &e.ok_or("7 bytes filled 8")?,
        ErrorKind::InvalidArgument,
        &["7 bytes", "8"],
    )?;
    let e = CudaAccelerator.copy_out(&tensor, &mut [0; 9], &*stream).err();
    says(
        &e.ok_or("8 bytes filled 9")?,
        ErrorKind::InvalidArgument,
        &["8 bytes", "9"],
    )?;
    let mut elsewhere = CudaAccelerator.alloc(1, DType::U8, &[8])?;
    let e = CudaAccelerator.copy_in(&[0; 8], &mut elsewhere, &*stream).err();
    says(
        &e.ok_or("another device was accepted")?,
        ErrorKind::InvalidArgument,
        &["cuda:0", "cuda:1"],
    )?;
    let host = accelerator(&DeviceKind::Cpu)?.new_stream(0, false)?;
    let e = CudaAccelerator.copy_in(&[0; 8], &mut tensor, &*host).err();
    says(
        &e.ok_or("a host stream was accepted")?,
        ErrorKind::InvalidArgument,
        &["cpu"],
    )
}

/// A stream without an owner: its events are its own, or there are none.
struct Odd {
    records: bool,
}

impl ftcore::Event for Odd {
    fn query(&self) -> ftcore::Result<bool> {
        Ok(true)
    }
    fn synchronize(&self, _deadline: Instant) -> ftcore::Result<()> {
        Ok(())
    }
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

impl Stream for Odd {
    fn device(&self) -> Device {
        cuda(0)
    }
    fn record(&self) -> ftcore::Result<Arc<dyn ftcore::Event>> {
        match self.records {
            true => Ok(Arc::new(Self { records: true })),
            false => Err(Error::new(ErrorKind::Backend, "no event today")),
        }
    }
    fn wait(&self, _event: &dyn ftcore::Event) -> ftcore::Result<()> {
        Ok(())
    }
    fn query(&self) -> ftcore::Result<bool> {
        Ok(true)
    }
    fn synchronize(&self, _deadline: Instant) -> ftcore::Result<()> {
        Ok(())
    }
}

fn odd_submissions() -> Outcome {
    let group = group(0, GroupOptions::default())?;
    group.configure(by_itself(1, SOON))?;
    let run = |tensor: Tensor, stream: Option<Arc<dyn Stream>>| {
        let op = Collective::AllReduce {
            tensors: vec![tensor],
            op: ReduceOp::Sum,
        };
        let options = SubmitOptions {
            stream,
            ..SubmitOptions::by(deadline_in(SOON))
        };
        group.run(op, options)
    };
    for (records, kind, word) in [
        (true, ErrorKind::Unsupported, "order itself"),
        (false, ErrorKind::Backend, "no event today"),
    ] {
        let rejected = run(filled(0, 1.0, 4)?, Some(Arc::new(Odd { records })));
        let rejected = rejected.err().ok_or("an odd stream was accepted")?;
        says(&rejected.error, kind, &[word, "all_reduce"])?;
        check(rejected.op.tensors().len() == 1, || {
            "the tensor did not come back".into()
        })?;
    }
    let rejected = run(filled(2, 1.0, 4)?, None)
        .err()
        .ok_or("another device was accepted")?;
    says(&rejected.error, ErrorKind::InvalidArgument, &["cuda:2", "cuda:0"])?;
    // Another library's event is waited for by the host.
    stream()?.wait(&Odd { records: true })?;
    // Refusals leave the group as it was.
    run(filled(0, 1.0, 4)?, None).map_err(|r| r.error)?.wait_done()?;
    Ok(())
}

fn threads_have_default_streams_of_their_own() -> Outcome {
    ordered_on(CudaAccelerator.per_thread_stream(0)?, true)
}

/// By their handles, as a framework gives them: a stream of its own, the device's default one, and the calling thread's.
fn streams_by_handle_keep_their_order() -> Outcome {
    let of = |stream| CudaAccelerator.stream_by_handle(stream);
    ordered_on(of(CudaAccelerator.new_stream(0, false)?)?, false)?;
    ordered_on(of(CudaAccelerator.current_stream(0)?)?, false)?;
    ordered_on(of(CudaAccelerator.per_thread_stream(0)?)?, true)
}

/// `of_this_thread`: it is refused on another one.
fn ordered_on(own: Arc<dyn ftcore::Stream>, of_this_thread: bool) -> Outcome {
    let group = group(0, GroupOptions::default())?;
    group.configure(by_itself(1, SOON))?;
    // At 3 ms per piece of work the sum is wrong unless it comes behind this thread's stream.
    let mut tensor = CudaAccelerator.alloc(0, DType::F32, &[500])?;
    for value in [-1e9f32, 4.0] {
        CudaAccelerator.copy_in(&value.to_ne_bytes().repeat(500), &mut tensor, &*own)?;
    }
    let op = Collective::AllReduce {
        tensors: vec![tensor],
        op: ReduceOp::Max,
    };
    let options = SubmitOptions {
        stream: Some(own.clone()),
        ..SubmitOptions::by(deadline_in(SOON))
    };
    let work = group.run(op, options).map_err(|r| r.error)?;
    work.wait_on(&*own)?;
    let tensor = work.take_tensor()?;
    let mut bytes = vec![0u8; 2000];
    CudaAccelerator.copy_out(&tensor, &mut bytes, &*own)?;
    let right = bytes
        .as_chunks::<4>()
        .0
        .iter()
        .all(|b| f32::from_ne_bytes(*b) == 4.0);
    check(right, || "the stream's order was lost".into())?;
    if !of_this_thread {
        return Ok(());
    }
    let elsewhere = own.clone();
    let e = std::thread::spawn(move || elsewhere.record().err())
        .join()
        .map_err(|_| "a panic")?
        .ok_or("another thread's stream was recorded")?;
    says(&e, ErrorKind::InvalidState, &["another thread"])?;
    CudaAccelerator
        .current_stream(0)?
        .record()?
        .synchronize(deadline_in(SOON))?;
    Ok(())
}

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        scenario(
            "device_wait_for_a_stream_fails",
            &[(FAIL, "cuStreamQuery:1:700")],
            fails_once,
        ),
        scenario(
            "device_that_is_current_stays_so_and_does_not_matter",
            &[],
            another_is_current,
        )
        .of_devices(4),
        scenario(
            "device_wait_that_hangs_ends_at_the_deadline",
            &[(HANG, "call:cuCtxSynchronize:1")],
            synchronize_hangs,
        ),
        scenario(
            "device_waits_end_at_their_deadlines",
            &[("OXCCL_STANDIN_CUDA_DELAY_US", "300000")],
            too_early,
        )
        .on_the_stand_in(),
        scenario(
            "device_memory_of_a_part_is_freed_after_the_copy_into_it",
            &[("OXCCL_STANDIN_CUDA_DELAY_US", "20000")],
            part_dropped_early,
        )
        .on_the_stand_in(),
        scenario(
            "device_memory_is_freed_after_the_copies_of_all_streams",
            &[("OXCCL_STANDIN_CUDA_DELAY_US", "20000")],
            dropped_early_on_two_streams,
        )
        .on_the_stand_in(),
        scenario("device_refuses_what_cannot_be", &[], refusals).of_devices(2),
        scenario(
            "device_streams_of_nobody_are_refused_at_submit",
            &[],
            odd_submissions,
        )
        .of_devices(3),
        scenario(
            "device_default_streams_of_threads_keep_their_order",
            &[("OXCCL_STANDIN_CUDA_DELAY_US", "3000")],
            threads_have_default_streams_of_their_own,
        ),
        scenario(
            "device_streams_by_handle_keep_their_order",
            &[("OXCCL_STANDIN_CUDA_DELAY_US", "3000")],
            streams_by_handle_keep_their_order,
        ),
    ]
}
