//! Ranks as threads over gloo, for the tests of the quantised group.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "every test binary uses a part of it")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use backend_gloo::GlooGroup;
use ftcore::{
    Collective, Configuration, Epoch, Error, GroupOptions, InMemoryStore, ProcessGroup, ProcessGroupExt,
    ReduceOp, Result, Store, SubmitOptions, Tensor, deadline_in,
};
use oxccl_quant::{Codec, QuantizeOptions, QuantizedGroup};

/// The deadline of whatever is expected to work.
pub(crate) fn soon() -> Instant {
    deadline_in(Duration::from_secs(20))
}

/// An unconfigured gloo group.
pub(crate) fn gloo() -> Arc<dyn ProcessGroup> {
    Arc::new(GlooGroup::new("q", GroupOptions::default()).unwrap())
}

/// An unconfigured quantised group over gloo.
pub(crate) fn group(codec: Codec) -> QuantizedGroup {
    with_options(QuantizeOptions {
        codec: codec.into(),
        error_feedback: codec == Codec::Int2B64,
        ..QuantizeOptions::default()
    })
}

/// An unconfigured quantised group over gloo. Where it feeds errors back, its first step has begun.
pub(crate) fn with_options(options: QuantizeOptions) -> QuantizedGroup {
    let options = QuantizeOptions {
        timeout: Duration::from_secs(20),
        ..options
    };
    let group = QuantizedGroup::with_options(gloo(), options).unwrap();
    if let Some(feedback) = group.error_feedback() {
        feedback.begin("test");
    }
    group
}

/// A new store.
pub(crate) fn store() -> Arc<dyn Store> {
    Arc::new(InMemoryStore::default())
}

/// How rank `rank` of `world` configures its group.
pub(crate) fn configuration(store: &Arc<dyn Store>, epoch: u64, rank: u32, world: u32) -> Configuration {
    Configuration {
        store: store.clone(),
        prefix: "t".to_string(),
        name: "q".to_string(),
        epoch: Epoch(epoch),
        rank,
        world_size: world,
        deadline: soon(),
        cancel: Default::default(),
    }
}

/// Configures, and waits until all ranks have: what a test does next must not reach a rank that is still configuring.
pub(crate) fn configure(
    group: &dyn ProcessGroup,
    store: &Arc<dyn Store>,
    epoch: u64,
    rank: u32,
    world: u32,
) -> Result<()> {
    group.configure(configuration(store, epoch, rank, world))?;
    meet(store, &format!("configured/{epoch}"), world);
    Ok(())
}

/// Waits until all ranks are here.
pub(crate) fn meet(store: &Arc<dyn Store>, name: &str, world: u32) {
    store.barrier(name, world, soon()).unwrap();
}

/// Runs `body` on `world` ranks; the results in rank order.
pub(crate) fn ranks<T: Send>(world: u32, body: impl Fn(u32, Arc<dyn Store>) -> T + Sync) -> Vec<T> {
    let store = store();
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = (0..world)
            .map(|rank| {
                let store = store.clone();
                scope.spawn(move || body(rank, store))
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// Runs `body` on `world` ranks with configured groups.
pub(crate) fn configured<T: Send>(
    world: u32,
    options: &QuantizeOptions,
    body: impl Fn(u32, &QuantizedGroup, &Arc<dyn Store>) -> T + Sync,
) -> Vec<T> {
    ranks(world, |rank, store| {
        let g = with_options(options.clone());
        configure(&g, &store, 1, rank, world).unwrap();
        let done = body(rank, &g, &store);
        g.shutdown(soon()).unwrap();
        done
    })
}

/// Values that differ between ranks, in ±1.
pub(crate) fn values(rank: u32, count: usize) -> Vec<f32> {
    (0..count)
        .map(|i| ((i * 7 + 3) as f32 * (rank as f32 + 0.3)).sin())
        .collect()
}

/// The all-reduce of `values`, and the contributors.
pub(crate) fn reduce(
    g: &dyn ProcessGroup,
    values: Vec<f32>,
    op: ReduceOp,
    contribute: bool,
) -> Result<(Vec<f32>, u32)> {
    let options = SubmitOptions {
        contribute,
        ..SubmitOptions::by(soon())
    };
    let tensors = vec![Tensor::from_vec(values)];
    let work = g
        .run(Collective::AllReduce { tensors, op }, options)
        .map_err(Error::from)?;
    let done = work.take()?;
    let contributors = done.contributors;
    Ok((done.into_tensor()?.as_slice::<f32>()?.to_vec(), contributors))
}

/// The bits.
pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// The most by which one rounding of values in ±`peak` may miss.
pub(crate) fn error_of(codec: Codec, peak: f32) -> f32 {
    let relative = match codec {
        Codec::F16 => 0.001,
        Codec::Bf16 => 0.005,
        Codec::Int8B64 | Codec::Int8B32 => 0.005,
        Codec::Int4B64 => 0.08,
        Codec::Int4Hadamard { .. } => 0.6,
        Codec::MxE4M3 => 0.13,
        _ => 0.52,
    };
    relative * peak
}
