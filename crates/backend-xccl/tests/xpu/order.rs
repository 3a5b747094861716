//! What happens in which order on a queue.

use std::sync::Arc;
use std::time::{Duration, Instant};

use backend_xccl::XpuGroup;
use backend_xccl::xpu::XpuStream;
use ftcore::{
    Collective, Device, DeviceKind, ErrorKind, GroupOptions, ProcessGroup, ProcessGroupExt, ReduceOp, Stream,
    SubmitOptions, Tensor, Work, accelerator, deadline_in,
};

use super::{Memory, Outcome, Rank, configuration, ensure, group, soon};

/// 1 MB: what is filled, reduced and copied.
const COUNT: usize = 256 << 10;
/// 64 MB, copied so often before that it takes a good part of a second, while a reduction that does not wait begins at once.
const BALLAST: usize = 16 << 20;
const COPIES: usize = 40;

/// An xpu stream with its own methods.
fn stream(memory: &Memory) -> Outcome<Arc<XpuStream>> {
    Ok(Arc::new(XpuStream::of(memory.index)?))
}

fn sum(group: &dyn ProcessGroup, tensor: Tensor, after: Option<Arc<dyn Stream>>) -> Outcome<Work> {
    let op = Collective::AllReduce {
        tensors: vec![tensor],
        op: ReduceOp::Sum,
    };
    let options = SubmitOptions {
        stream: after,
        ..SubmitOptions::by(soon())
    };
    Ok(group.run(op, options)?)
}

/// A group whose reductions are one call: on a CPU that is busy with one queue, the copies that a count of contributors takes
/// wait for it, and what is to be shown would not show.
fn uncounted(rank: &Rank) -> Outcome<XpuGroup> {
    let mut options = GroupOptions::default();
    options.hints.insert("contributors".into(), "off".into());
    let group = XpuGroup::new("uncounted", &Device::new(DeviceKind::Xpu, 0), options)?;
    group.configure(configuration(rank, 2, 1))?;
    Ok(group)
}

/// Fills a tensor behind a lot of other work on a stream, reduces it, copies the result; nothing waits. How many elements of the
/// copy are wrong.
fn round(rank: &Rank, group: &dyn ProcessGroup, heeded: bool) -> Outcome<usize> {
    let memory = Memory::on(0)?;
    let queue = stream(&memory)?;
    let values = memory.with(&vec![rank.rank as f32 + 1.0; COUNT])?;
    let (heavy, mut ballast) = (memory.empty(BALLAST)?, memory.empty(BALLAST)?);
    let mut tensor = memory.with(&vec![-5.0; COUNT])?;
    // Neither rank may be ahead of the other by more than its own queue is long.
    group.barrier()?;
    for _ in 0..COPIES {
        queue.copy(&heavy, &mut ballast)?;
    }
    queue.copy(&values, &mut tensor)?;
    let after = heeded.then(|| queue.clone() as Arc<dyn Stream>);
    let work = sum(group, tensor, after)?;
    work.wait_on(&*queue)?;
    let result = memory.read(&work.take_tensor()?, &*queue)?;
    queue.synchronize(soon())?;
    Ok(result.iter().filter(|v| **v != 3.0).count())
}

pub(crate) fn one_queue(rank: &Rank) -> Outcome {
    let group = uncounted(rank)?;
    for turn in 0..4 {
        let wrong = round(rank, &group, true)?;
        ensure(wrong == 0, || format!("run {turn}: {wrong} of {COUNT} are wrong"))?;
    }
    Ok(group.shutdown(soon())?)
}

/// The same with the stream ignored: it must show, or the case above proves nothing.
pub(crate) fn queue_ignored(rank: &Rank) -> Outcome {
    let group = uncounted(rank)?;
    let mut wrong = 0;
    for _ in 0..4 {
        wrong += round(rank, &group, false)?;
    }
    ensure(wrong > 0, || {
        "the reduction waited for a stream that it was not told of".into()
    })?;
    Ok(group.shutdown(soon())?)
}

pub(crate) fn adopted(rank: &Rank) -> Outcome {
    let group = group(rank, 0)?;
    let memory = Memory::on(0)?;
    let own = stream(&memory)?;
    let foreign = Arc::new(own.brought_by_the_caller()?);
    ensure(
        foreign.device() == memory.device() && foreign.queue() != own.queue(),
        || "it is a handle of its own to a queue of the same device".into(),
    )?;
    let values = memory.with(&vec![rank.rank as f32 + 1.0; COUNT])?;
    let mut tensor = memory.with(&vec![-5.0; COUNT])?;
    let (heavy, mut ballast) = (memory.empty(BALLAST)?, memory.empty(BALLAST)?);
    for _ in 0..COPIES {
        foreign.copy(&heavy, &mut ballast)?;
    }
    foreign.copy(&values, &mut tensor)?;
    let work = sum(&group, tensor, Some(foreign.clone()))?;
    work.wait_on(&*foreign)?;
    // The operation is in a queue, so this point is behind it.
    let point = foreign.record()?;
    point.synchronize(soon())?;
    let result = memory.read(&work.take_tensor()?, &*own)?;
    ensure(result.iter().all(|v| *v == 3.0), || {
        format!("the sum is {:?}", result.first())
    })?;
    Ok(group.shutdown(soon())?)
}

/// No peer joins: the operation fails at its deadline, what may still be used is leaked and counted, and the stream that waits
/// for it says so once and goes on.
pub(crate) fn failed(rank: &Rank) -> Outcome {
    let group = group(rank, 0)?;
    if rank.rank == 1 {
        let until = soon();
        while group.error().is_none() {
            ensure(Instant::now() < until, || "the failure was not told".into())?;
            std::thread::sleep(Duration::from_millis(5));
        }
        return Ok(());
    }
    let memory = Memory::on(0)?;
    let (tensor, before) = (memory.with(&[1.0; 1000])?, ftcore::leaked_bytes());
    let op = Collective::AllReduce {
        tensors: vec![tensor],
        op: ReduceOp::Sum,
    };
    let work = group.run(op, SubmitOptions::by(deadline_in(Duration::from_millis(700))))?;
    let reader = memory.stream()?;
    work.wait_on(&*reader)?;
    let point = reader.record()?;
    ensure(!point.query()?, || {
        "the stream passed an operation that no peer joined".into()
    })?;
    let e = work.wait(soon()).expect_err("no peer joined");
    ensure(e.kind() == ErrorKind::Timeout, || format!("{e}"))?;
    ensure(ftcore::leaked_bytes() - before == 4000, || {
        "the memory was not leaked and counted".into()
    })?;
    let e = point.synchronize(soon()).expect_err("it never came");
    ensure(e.to_string().contains("all_reduce"), || format!("{e}"))?;
    let other = memory.with(&[2.0; 10])?;
    let first = memory.read(&other, &*reader);
    ensure(first.is_err(), || "the stream hides the failure".into())?;
    let again = memory.read(&other, &*reader)?;
    ensure(again == [2.0; 10], || format!("{again:?}"))?;
    let refused = group
        .configure(configuration(rank, 2, 2))
        .expect_err("a thread is stuck");
    ensure(refused.kind() == ErrorKind::InvalidState, || format!("{refused}"))
}

/// Tensors that go while copies use them, and memory that another owner frees.
pub(crate) fn given_up(_: &Rank) -> Outcome {
    let memory = Memory::on(0)?;
    let queue = stream(&memory)?;
    let (heavy, mut ballast) = (memory.empty(BALLAST)?, memory.empty(BALLAST)?);
    let values = memory.with(&vec![19.0; COUNT])?;
    let (mut last, mut first) = (memory.empty(COUNT)?, memory.empty(COUNT)?);
    for _ in 0..COPIES {
        queue.copy(&heavy, &mut ballast)?;
    }
    queue.copy(&values, &mut last)?;
    // Host values that go as soon as the calls return: two at once would show a buffer that is used again too early.
    memory
        .xpu
        .copy_in(&1f32.to_ne_bytes().repeat(COUNT), &mut first, &*queue)?;
    let mut second = memory.empty(COUNT)?;
    memory
        .xpu
        .copy_in(&2f32.to_ne_bytes().repeat(COUNT), &mut second, &*queue)?;
    let (point, address) = (queue.record()?, values.as_ptr());
    drop((values, heavy, ballast));
    let fresh = memory.empty(COUNT)?;
    ensure(!point.query()?, || {
        "the queue is not long enough for this test".into()
    })?;
    ensure(fresh.as_ptr() != address, || {
        "memory that a copy still reads was given to another owner".into()
    })?;
    for (tensor, want) in [(&last, 19.0), (&first, 1.0), (&second, 2.0)] {
        let result = memory.read(tensor, &*queue)?;
        ensure(result.iter().all(|v| *v == want), || {
            format!("{:?}, not {want}", result.first())
        })?;
    }
    drop(fresh);
    // Now it is free, and used again rather than asked for anew.
    let reused: Vec<Tensor> = (0..4).map(|_| memory.empty(COUNT)).collect::<Outcome<_>>()?;
    ensure(reused.iter().any(|t| t.as_ptr() == address), || {
        "memory that is not in use is not used again".into()
    })?;
    let host = Tensor::from_vec(vec![0f32; COUNT]);
    let e = queue.copy(&host, &mut last).expect_err("host memory");
    ensure(e.kind() == ErrorKind::InvalidArgument, || format!("{e}"))?;
    // A world of one, on the caller's thread.
    let device = Device::new(DeviceKind::Xpu, 0);
    let group = XpuGroup::new("alone", &device, GroupOptions::default())?;
    let rank = Rank {
        rank: 0,
        store: Arc::new(ftcore::InMemoryStore::new()),
    };
    group.configure(configuration(&rank, 1, 1))?;
    let sum = sum(&group, last, Some(queue.clone()))?.take_tensor()?;
    ensure(memory.read(&sum, &*queue)?.iter().all(|v| *v == 19.0), || {
        "a world of one changes its values".into()
    })?;
    accelerator(&DeviceKind::Xpu)?.synchronize(0, soon())?;
    Ok(())
}

/// What goes by way of the host: copies to host memory that is freed right after them, behind oneCCL's own host tasks. Every round has other
/// values, so a copy that is reported before it is made shows as the values of the round before.
///
/// Without `Queue::settle` about one copy in half a million is: with `OXCCL_LONG=1` this runs for long enough to meet one.
pub(crate) fn copies_after_calls(rank: &Rank) -> Outcome {
    let long = std::env::var_os("OXCCL_LONG").is_some();
    let until = deadline_in(Duration::from_secs(if long { 120 } else { 2 }));
    let group = group(rank, 0)?;
    let memory = Memory::on(0)?;
    let stream = memory.stream()?;
    let largest = |mine: f32, count: usize| -> Outcome<Vec<f32>> {
        let mut tensor = memory.empty(count)?;
        let bytes = mine.to_ne_bytes().repeat(count);
        memory.xpu.copy_in(&bytes, &mut tensor, &*stream)?;
        let op = Collective::AllReduce {
            tensors: vec![tensor],
            op: ReduceOp::Max,
        };
        let options = SubmitOptions {
            stream: Some(stream.clone()),
            ..SubmitOptions::by(soon())
        };
        memory.read(&group.run(op, options)?.take_tensor()?, &*stream)
    };
    let counts = [1, 2, 10, 250, 1000];
    for (turn, count) in (0u32..).zip(counts.into_iter().cycle()) {
        let wanted = (turn * 2 + 1) as f32;
        let result = largest(wanted - 1.0 + rank.rank as f32, count)?;
        ensure(result.iter().all(|v| *v == wanted), || {
            format!(
                "turn {turn}, {count} elements: {:?} instead of {wanted}",
                result.first()
            )
        })?;
        // Both ranks stop after the same turn: they ask each other, not the clock.
        let over = f32::from(u8::from(Instant::now() > until));
        if turn % 500 == 499 && largest(over, 1)? != [0.0] {
            break;
        }
    }
    Ok(group.shutdown(soon())?)
}
