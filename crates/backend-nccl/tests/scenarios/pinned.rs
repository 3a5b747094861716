//! Page-locked memory, its cache, and copies between host and device that fail: borrowed memory is the caller's again only when they are over.

use std::time::{Duration, Instant};

use backend_nccl::CudaAccelerator;
use ftcore::{
    Accelerator, DType, Error, ErrorKind, GroupOptions, ProcessGroupExt, ReduceOp, Registry, Stream, Tensor,
    deadline_in,
};

use super::devices::stream;
use super::kit::*;
use super::set_up::log_lines;
use super::{FAIL, Scenario, scenario};

const SOON: Duration = Duration::from_secs(20);
const LOG: (&str, &str) = ("OXCCL_STANDIN_NCCL_LOG", "@log");

fn count(lines: &[String], words: &[&str]) -> usize {
    let all = |l: &&String| words.iter().all(|w| l.contains(w));
    lines.iter().filter(all).count()
}

/// Gloo behind CUDA tensors copies through page-locked memory only, and makes it once.
fn staging_is_pinned() -> Outcome {
    const BYTES: &str = "bytes=48000";
    let group = Registry::global().create("gloo", &cuda(0), &GroupOptions::default())?;
    group.configure(by_itself(1, SOON))?;
    for _ in 0..10 {
        let tensor = CudaAccelerator.alloc(0, DType::F32, &[12_000])?;
        group.all_reduce(tensor, ReduceOp::Sum)?.wait_done()?;
    }
    let lines = log_lines()?;
    let copies = ["copy in pinned=", "copy out pinned="].map(|c| count(&lines, &[c, BYTES]));
    check(copies == [10, 10], || format!("{copies:?} copies"))?;
    check(count(&lines, &["pinned=0", BYTES]) == 0, || {
        "ordinary memory was copied from or to".into()
    })?;
    let made = count(&lines, &["pinned alloc bytes=65536"]);
    check(made == 1, || format!("{made} blocks were made for one at a time"))
}

fn pinned_serves_again() -> Outcome {
    let first = CudaAccelerator.alloc_host(0, DType::F32, &[3, 100])?;
    let address = first.as_ptr();
    check(first.device().is_cpu() && first.shape() == [3, 100], || {
        format!("{first:?}")
    })?;
    let second = CudaAccelerator.alloc_host(0, DType::F32, &[300])?;
    check(second.as_ptr() != address, || "one block was given to two".into())?;
    drop(first);
    let again = CudaAccelerator.alloc_host(0, DType::U8, &[77])?;
    check(again.as_ptr() == address, || {
        "the block does not serve again".into()
    })?;
    let empty = CudaAccelerator.alloc_host(0, DType::F64, &[0, 3])?;
    check(empty.byte_len() == 0, || format!("{empty:?}"))?;
    let made = count(&log_lines()?, &["pinned alloc bytes=4096"]);
    check(made == 2, || format!("{made} blocks"))?;
    // What is too much to keep is freed; 200 MiB are kept, 200 more are not.
    for _ in 0..2 {
        let large: Vec<Tensor> = (0..2)
            .map(|_| CudaAccelerator.alloc_host(0, DType::U8, &[200 << 20]))
            .collect::<Result<_, _>>()?;
        drop(large);
    }
    let until = deadline_in(SOON);
    while count(&log_lines()?, &["pinned free bytes=209715200"]) < 2 {
        check(Instant::now() < until, || "nothing was freed".into())?;
        std::thread::sleep(Duration::from_millis(2));
    }
    let made = count(&log_lines()?, &["pinned alloc bytes=209715200"]);
    check(made == 3, || format!("{made} large blocks"))
}

fn no_pinned_memory() -> Outcome {
    let mut plain = CudaAccelerator.alloc_host(0, DType::F32, &[8])?;
    plain.as_mut_slice::<f32>()?.fill(2.5);
    let mut tensor = CudaAccelerator.alloc(0, DType::F32, &[8])?;
    let bytes = 2.5f32.to_ne_bytes().repeat(8);
    let stream = stream()?;
    CudaAccelerator.copy_in(&bytes, &mut tensor, &*stream)?;
    stream.synchronize(deadline_in(SOON))?;
    check(read(&tensor)? == [2.5; 8], || "the copy is wrong".into())?;
    check(count(&log_lines()?, &["pinned alloc"]) == 0, || {
        "page-locked memory was made".into()
    })
}

const SLOW: (&str, &str) = ("OXCCL_STANDIN_CUDA_DELAY_US", "30000");

/// A copy between the device and page-locked memory, one way or the other; what came of it, and whether it was over then.
fn copied(out: bool, stream: &dyn Stream) -> Result<(Option<Error>, bool), Error> {
    let mut tensor = CudaAccelerator.alloc(0, DType::U8, &[4000])?;
    let mut host = CudaAccelerator.alloc_host(0, DType::U8, &[4000])?;
    let bytes = host.as_mut_slice::<u8>()?;
    let copied = match out {
        true => CudaAccelerator.copy_out(&tensor, bytes, stream),
        false => CudaAccelerator.copy_in(bytes, &mut tensor, stream),
    };
    Ok((copied.err(), stream.query().unwrap_or(false)))
}

/// The event behind a copy cannot be had or asked: the error comes when the copy is over, because nothing keeps the memory of both sides
/// any more. Work takes 30 ms here.
fn over_when_it_fails(out: bool) -> Outcome {
    let (e, over) = copied(out, &*stream()?)?;
    says(&e.ok_or("nothing failed")?, ErrorKind::Backend, &["code 700"])?;
    check(over, || "it returned before the copy was over".into())
}

/// Neither an event nor the stream tells any more whether the copy is over: a device that only fails works on nothing.
fn over_with_an_error(out: bool) -> Outcome {
    let stream = stream()?;
    let (e, _) = copied(out, &*stream)?;
    says(
        &e.ok_or("nothing failed")?,
        ErrorKind::Backend,
        &["cuEventRecord", "code 700"],
    )?;
    Ok(stream.synchronize(deadline_in(SOON))?)
}

/// The event behind the copy, and then every question about the stream for as long as a device may fail.
fn lost() -> &'static str {
    let asked: Vec<String> = (1..=50)
        .map(|nth| format!("cuStreamQuery/cuMemcpyDtoHAsync:{nth}:700"))
        .collect();
    Box::leak(format!("cuEventRecord:3:700,{}", asked.join(",")).into_boxed_str())
}

pub(super) fn scenarios() -> Vec<Scenario> {
    let fault = |name, fault, body| scenario(name, &[(FAIL, fault)], body);
    vec![
        scenario(
            "pinned_memory_that_is_missing_is_replaced",
            &[(FAIL, "cuMemHostAlloc:1:2"), LOG],
            no_pinned_memory,
        ),
        fault("device_that_is_lost_ends_a_copy", lost(), || {
            over_with_an_error(true)
        }),
        scenario(
            "pinned_memory_serves_again_and_is_bounded",
            &[LOG],
            pinned_serves_again,
        ),
        scenario(
            "pinned_memory_carries_every_staged_copy",
            &[LOG],
            staging_is_pinned,
        ),
        // The first event is the allocation's, the second tells whose stream it is, the third is behind the copy.
        scenario(
            "device_copy_out_without_an_event_is_over_when_it_fails",
            &[(FAIL, "cuEventRecord:3:700"), SLOW],
            || over_when_it_fails(true),
        ),
        scenario(
            "device_copy_out_whose_event_fails_is_over_when_it_fails",
            &[(FAIL, "cuEventQuery/cuMemcpyDtoHAsync:1:700"), SLOW],
            || over_when_it_fails(true),
        ),
        scenario(
            "device_copy_in_without_an_event_is_over_when_it_fails",
            &[(FAIL, "cuEventRecord:3:700"), SLOW],
            || over_when_it_fails(false),
        ),
        scenario(
            "device_copy_in_whose_event_fails_is_over_when_it_fails",
            &[(FAIL, "cuEventQuery/cuMemcpyHtoDAsync:1:700"), SLOW],
            || over_when_it_fails(false),
        ),
    ]
}
