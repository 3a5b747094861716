//! What the scenarios are made of: two ranks as threads, tensors on the stand-in's devices, and checks that say what they saw.

use std::sync::Arc;
use std::time::{Duration, Instant};

use backend_nccl::{CudaAccelerator, NcclGroup};
use ftcore::{
    Accelerator, Collective, Configuration, DType, Device, DeviceKind, Epoch, Error, ErrorKind, GroupOptions,
    InMemoryStore, ProcessGroup, ProcessGroupExt, ReduceOp, Store, SubmitOptions, Tensor, Work, deadline_in,
};
use libtest_mimic::Failed;

/// Longer than anything here takes.
pub(super) const TIME_LIMIT: Duration = Duration::from_secs(60);

pub(super) type Outcome = Result<(), Failed>;

/// The number of a rank's device: on a machine of few devices ranks share them.
pub(super) fn on(rank: u32) -> u32 {
    rank % CudaAccelerator.count().max(1)
}

pub(super) fn cuda(rank: u32) -> Device {
    Device::new(DeviceKind::Cuda, on(rank))
}

pub(super) fn group(rank: u32, options: GroupOptions) -> Result<NcclGroup, Error> {
    NcclGroup::new("errors", &cuda(rank), &options)
}

pub(super) fn configuration(
    store: &Arc<dyn Store>,
    rank: u32,
    world: u32,
    epoch: u64,
    limit: Duration,
) -> Configuration {
    Configuration {
        store: store.clone(),
        prefix: "errors".to_string(),
        name: "errors".to_string(),
        epoch: Epoch(epoch),
        rank,
        world_size: world,
        deadline: deadline_in(limit),
        cancel: Default::default(),
    }
}

/// Of a world of one, with a store of its own.
pub(super) fn by_itself(epoch: u64, limit: Duration) -> Configuration {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    configuration(&store, 0, 1, epoch, limit)
}

/// Runs `body` as rank 0 and 1 with configured groups.
pub(super) fn two(
    options: GroupOptions,
    body: impl Fn(u32, &NcclGroup, &Arc<dyn Store>) -> Outcome + Sync,
) -> Outcome {
    groups(2, |rank| group(rank, options.clone()), body)
}

/// Runs `body` as so many ranks, each with its group in the first epoch.
pub(super) fn groups<G: ProcessGroup>(
    world: u32,
    make: impl Fn(u32) -> Result<G, Error> + Sync,
    body: impl Fn(u32, &G, &Arc<dyn Store>) -> Outcome + Sync,
) -> Outcome {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    ranks(world, |rank| {
        let group = make(rank)?;
        group.configure(configuration(&store, rank, world, 1, Duration::from_secs(20)))?;
        // What fails from here on fails no rank's `configure`.
        store.barrier("all are configured", world, deadline_in(Duration::from_secs(20)))?;
        body(rank, &group, &store)
    })
}

/// Runs `body` as so many ranks, on threads called `rank-0`, `rank-1`, ….
pub(super) fn ranks(world: u32, body: impl Fn(u32) -> Outcome + Sync) -> Outcome {
    let body = &body;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world)
            .map(|rank| {
                std::thread::Builder::new()
                    .name(format!("rank-{rank}"))
                    .spawn_scoped(scope, move || body(rank))
            })
            .collect::<Result<_, _>>()?;
        let mut failures = Vec::new();
        for (rank, thread) in ranks.into_iter().enumerate() {
            match thread.join() {
                Ok(Ok(())) => {}
                Ok(Err(e)) => failures.push(format!("rank {rank}: {}", e.message().unwrap_or("failed"))),
                Err(_) => failures.push(format!("rank {rank} panicked")),
            }
        }
        if failures.is_empty() {
            Ok(())
        } else {
            Err(failures.join("\n").into())
        }
    })
}

pub(super) fn filled(rank: u32, value: f32, count: usize) -> Result<Tensor, Error> {
    let index = on(rank);
    let mut tensor = CudaAccelerator.alloc(index, DType::F32, &[count])?;
    let stream = CudaAccelerator.new_stream(index, false)?;
    CudaAccelerator.copy_in(&value.to_ne_bytes().repeat(count), &mut tensor, &*stream)?;
    stream.synchronize(deadline_in(Duration::from_secs(20)))?;
    Ok(tensor)
}

pub(super) fn read(tensor: &Tensor) -> Result<Vec<f32>, Error> {
    let index = tensor.device().index;
    let mut bytes = vec![0u8; tensor.byte_len()];
    let stream = CudaAccelerator.new_stream(index, false)?;
    CudaAccelerator.copy_out(tensor, &mut bytes, &*stream)?;
    Ok(bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|b| f32::from_ne_bytes(*b))
        .collect())
}

pub(super) fn submit(rank: u32, group: &NcclGroup, by: Duration) -> Result<Work, Error> {
    let op = Collective::AllReduce {
        tensors: vec![filled(rank, 1.0, 1000)?],
        op: ReduceOp::Sum,
    };
    Ok(group.run(op, SubmitOptions::by(deadline_in(by)))?)
}

pub(super) fn sum_works(rank: u32, group: &NcclGroup) -> Outcome {
    let result = read(&submit(rank, group, Duration::from_secs(20))?.take_tensor()?)?;
    check(result.iter().all(|&x| x == 2.0), || {
        format!("the sum is {:?}", result.first())
    })
}

pub(super) fn check(ok: bool, text: impl FnOnce() -> String) -> Outcome {
    if ok { Ok(()) } else { Err(text().into()) }
}

pub(super) fn says(e: &Error, kind: ErrorKind, words: &[&str]) -> Outcome {
    check(e.kind() == kind, || {
        format!("{:?} instead of {kind:?}: {e}", e.kind())
    })?;
    words.iter().try_for_each(|w| {
        check(e.to_string().contains(w), || {
            format!("the error does not say '{w}': {e}")
        })
    })
}

/// Works until it fails; the first failure.
pub(super) fn until_failure(rank: u32, group: &NcclGroup) -> Result<Error, Failed> {
    for _ in 0..50 {
        let work = match submit(rank, group, Duration::from_secs(10)) {
            Ok(work) => work,
            Err(_) => break,
        };
        if let Err(e) = work.wait(deadline_in(Duration::from_secs(20))) {
            return Ok(e);
        }
    }
    group.error().ok_or_else(|| "nothing failed".into())
}

/// After a failure the same process goes on in the next epoch.
pub(super) fn next_epoch(rank: u32, group: &NcclGroup, store: &Arc<dyn Store>) -> Outcome {
    group.configure(configuration(store, rank, 2, 2, Duration::from_secs(20)))?;
    sum_works(rank, group)
}

pub(super) fn group_error(group: &NcclGroup) -> Result<Error, Failed> {
    let until = deadline_in(Duration::from_secs(30));
    while Instant::now() < until {
        if let Some(e) = group.error() {
            return Ok(e);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Err("the group heard of nothing".into())
}

/// Lets the calls go on that the stand-in holds (`held:`).
pub(super) fn let_go() -> Outcome {
    let log = std::env::var("OXCCL_STANDIN_NCCL_LOG")?;
    Ok(std::fs::write(log + ".go", "")?)
}

/// Holds later ones again.
pub(super) fn hold_again() -> Outcome {
    let log = std::env::var("OXCCL_STANDIN_NCCL_LOG")?;
    Ok(std::fs::remove_file(log + ".go")?)
}
