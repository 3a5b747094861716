//! What the plugin path costs per call: gloo linked in against gloo as a dylib of itself, alone in its world, so that
//! nothing but the way there and back is measured. The time is the calling thread's own processor time: in a world of one
//! everything happens on that thread, and what else the machine does counts for little.
//!
//! `cargo build --release -p gloo-plugin && cargo run --release -p oxccl-plugin --example plugin_overhead [library]`

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ftcore::registry::BackendFactory;
use ftcore::{
    Configuration, Device, Epoch, Error, GroupOptions, InMemoryStore, ProcessGroup, ProcessGroupExt,
    ReduceOp, Result, Tensor, deadline_in,
};

const CALLS: u32 = 5_000;
const ROUNDS: usize = 31;

fn configured(factory: &dyn BackendFactory) -> Result<Box<dyn ProcessGroup>> {
    let group = factory.create(&Device::CPU, &GroupOptions::default())?;
    group.configure(Configuration {
        store: Arc::new(InMemoryStore::new()),
        prefix: "overhead".into(),
        name: "overhead".into(),
        epoch: Epoch(1),
        rank: 0,
        world_size: 1,
        deadline: deadline_in(Duration::from_secs(10)),
        cancel: Default::default(),
    })?;
    Ok(group)
}

/// Nanoseconds of processor time that this thread has used.
fn used() -> f64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    now.tv_sec as f64 * 1e9 + now.tv_nsec as f64
}

/// Nanoseconds per call.
fn timed(call: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
    let begin = used();
    for _ in 0..CALLS {
        call()?;
    }
    Ok((used() - begin) / f64::from(CALLS))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn main() -> Result<()> {
    let library = match std::env::args_os().nth(1) {
        Some(path) => PathBuf::from(path),
        None => {
            let this = std::env::current_exe().map_err(|e| Error::io("find this program", e))?;
            let profile = this
                .parent()
                .and_then(|p| p.parent())
                .map(PathBuf::from)
                .unwrap_or_default();
            profile.join("libgloo_plugin.so")
        }
    };
    let loaded = oxccl_plugin::load(&library)?;
    let backend = loaded
        .backends()
        .into_iter()
        .next()
        .ok_or_else(|| Error::invalid("no backend"))?;
    let direct = configured(&backend_gloo::GlooFactory)?;
    let dylib = configured(&*backend.factory)?;
    println!(
        "{} against gloo linked in; medians of {ROUNDS} rounds of {CALLS} calls",
        library.display()
    );
    println!(
        "{:<28} {:>10} {:>10} {:>10}",
        "", "direct ns", "dylib ns", "cost ns"
    );
    let mut worst = 0f64;
    type Call = fn(&dyn ProcessGroup, &mut Vec<f32>) -> Result<()>;
    let calls: [(&str, Call); 3] = [
        ("barrier", |group, _| group.barrier()),
        ("all_reduce, submit and take", |group, data| {
            let tensor = Tensor::from_vec(std::mem::take(data));
            let back = group.all_reduce(tensor, ReduceOp::Sum)?.take_tensor()?;
            *data = back.into_vec().map_err(Error::from)?;
            Ok(())
        }),
        ("all_reduce of a slice", |group, data| {
            group.all_reduce_slice(data, ReduceOp::Sum)
        }),
    ];
    for (name, call) in calls {
        let mut data = vec![1.0f32; 16];
        let (mut a, mut b) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            // In turns, so that whatever else this machine does hits both alike.
            a.push(timed(&mut || call(&*direct, &mut data))?);
            b.push(timed(&mut || call(&*dylib, &mut data))?);
        }
        let (a, b) = (median(a), median(b));
        worst = worst.max(b - a);
        println!("{name:<28} {a:>10.0} {b:>10.0} {:>10.0}", b - a);
    }
    println!("the dylib path costs at most {worst:.0} ns per call (target: below 1000)");
    Ok(())
}
