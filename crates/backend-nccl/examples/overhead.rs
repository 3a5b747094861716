//! What the group adds to NCCL: all-reduces of f32 through `NcclGroup` and through the same library called directly, interleaved in one
//! process, one thread per GPU (one GPU is a world of one, which still measures the cost of a submission).
//!
//! `cargo run --release -p backend-nccl --example overhead` on a machine with a GPU; `--pairs N` and `--max-mib N` change the effort, `--markdown FILE` writes
//! the table there, too. Prints
//! per size the medians, their ratio with the lower bound of its 95 % interval (bootstrap over pairs), and what a submission costs on the
//! host beyond the raw call. On anything that is not NCCL on a GPU it says so and measures nothing.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a measuring program ends at the first surprise"
)]

use std::process::ExitCode;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use backend_nccl::{CudaAccelerator, NcclFactory, NcclGroup, RawPeer};
use ftcore::registry::BackendFactory;
use ftcore::{
    Accelerator, Configuration, DType, Device, DeviceKind, Epoch, GroupOptions, InMemoryStore, ProcessGroup,
    ProcessGroupExt, ReduceOp, Store, deadline_in,
};

#[derive(Clone)]
struct Arguments {
    pairs: usize,
    max_mib: usize,
    /// Where the table goes as Markdown, too.
    markdown: Option<String>,
}

fn arguments() -> Arguments {
    let mut parsed = Arguments {
        pairs: 60,
        max_mib: 256,
        markdown: None,
    };
    let mut list = std::env::args().skip(1);
    while let Some(name) = list.next() {
        let value = list.next().expect("a value");
        let number = || value.parse().expect("a number");
        match name.as_str() {
            "--pairs" => parsed.pairs = number(),
            "--max-mib" => parsed.max_mib = number(),
            "--markdown" => parsed.markdown = Some(value),
            other => panic!("unknown argument {other}"),
        }
    }
    parsed
}

fn main() -> ExitCode {
    if let Err(e) = NcclFactory.probe() {
        println!("nothing measured: {e}");
        return ExitCode::SUCCESS;
    }
    let library = NcclFactory.library().unwrap_or_default();
    println!("{library}");
    let standin = library.contains("stand-in");
    if standin {
        println!("this is a stand-in: the figures below test this program and mean nothing else");
    }
    let arguments = arguments();
    let world = CudaAccelerator.count();
    let name = CudaAccelerator.name(0).unwrap_or_default();
    println!("{world} GPU(s): {name}");
    println!("      bytes   ours µs    raw µs   raw/ours  lower95   submit ours µs   raw µs");
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let barrier = Arc::new(Barrier::new(world as usize));
    let threads: Vec<_> = (0..world)
        .map(|rank| {
            let (store, barrier, arguments) = (store.clone(), barrier.clone(), arguments.clone());
            std::thread::Builder::new()
                .name(format!("ox-rank-{rank}"))
                .spawn(move || measure(rank, world, &store, &barrier, &arguments))
                .expect("a thread")
        })
        .collect();
    let mut rows = Vec::new();
    for thread in threads {
        rows.extend(thread.join().expect("a rank"));
    }
    let verdict = verdict(&rows);
    println!("{verdict}");
    if let Some(path) = arguments.markdown {
        let text = markdown(&format!("{world} × {name}; {library}"), &rows, &verdict, standin);
        std::fs::write(&path, text).expect("the table can be written");
        println!("written to {path}");
    }
    ExitCode::SUCCESS
}

/// One size.
struct Row {
    bytes: usize,
    ours: f64,
    raw: f64,
    ratio: f64,
    lower: f64,
    submit_ours: f64,
    submit_raw: f64,
}

/// The goals: the lower bound is at least 0.95 from 1 MiB on, and a submission costs at most 2 µs more.
fn verdict(rows: &[Row]) -> String {
    let says = |met: bool| if met { "met" } else { "MISSED" };
    let large: Vec<&Row> = rows.iter().filter(|r| r.bytes >= 1 << 20).collect();
    let speed = match large.is_empty() {
        true => "not measured (no size of 1 MiB or more)".to_string(),
        false => says(large.iter().all(|r| r.lower >= 0.95)).to_string(),
    };
    let extra = rows.iter().map(|r| r.submit_ours - r.submit_raw);
    let extra = extra.fold(f64::NEG_INFINITY, f64::max);
    format!(
        "lower bound of the 95 % interval at least 0.95 from 1 MiB on: {speed}; at most 2 µs more per submit: {} ({extra:.2} µs)",
        says(extra <= 2.0)
    )
}

fn markdown(machine: &str, rows: &[Row], verdict: &str, standin: bool) -> String {
    let mut text = format!("{machine}\n\n");
    if standin {
        text += "**A stand-in: these figures test the program and mean nothing else.**\n\n";
    }
    text += "| bytes | ours µs | bare calls µs | bare / ours | lower bound (95 %) | submit: ours µs | bare µs |\n";
    text += "|---|---|---|---|---|---|---|\n";
    for r in rows {
        text += &format!(
            "| {} | {:.1} | {:.1} | {:.3} | {:.3} | {:.2} | {:.2} |\n",
            r.bytes, r.ours, r.raw, r.ratio, r.lower, r.submit_ours, r.submit_raw
        );
    }
    text + &format!("\n{verdict}\n")
}

/// (whole time, host time of the submission).
type Sample = (Duration, Duration);

/// The rows, on rank 0.
fn measure(
    rank: u32,
    world: u32,
    store: &Arc<dyn Store>,
    barrier: &Barrier,
    arguments: &Arguments,
) -> Vec<Row> {
    let (pairs, max_mib) = (arguments.pairs, arguments.max_mib);
    let mut rows = Vec::new();
    // The contributors are left out, so that both sides reduce the same bytes.
    let mut options = GroupOptions::default();
    options.hints.insert("contributors".into(), "all".into());
    let device = Device::new(DeviceKind::Cuda, rank);
    let group = NcclGroup::new("overhead", &device, options).expect("a group");
    let configuration = Configuration {
        store: store.clone(),
        prefix: "overhead".into(),
        name: "overhead".into(),
        epoch: Epoch(1),
        rank,
        world_size: world,
        deadline: deadline_in(Duration::from_secs(60)),
    };
    group.configure(configuration).expect("configured");
    let raw = RawPeer::new(&device, rank, world, store, deadline_in(Duration::from_secs(60)))
        .expect("a raw communicator");
    let stream = CudaAccelerator.new_stream(rank, false).expect("a stream");
    let mut bytes = 4usize;
    while bytes <= max_mib << 20 {
        let mut tensor = CudaAccelerator
            .alloc(rank, DType::F32, &[bytes / 4])
            .expect("memory");
        CudaAccelerator
            .copy_in(&vec![0u8; bytes], &mut tensor, &*stream)
            .expect("filled");
        stream
            .synchronize(deadline_in(Duration::from_secs(60)))
            .expect("filled");
        let mut samples: Vec<(Sample, Sample)> = Vec::new();
        for pair in 0..pairs + 5 {
            barrier.wait();
            let began = Instant::now();
            let work = group.allreduce(tensor, ReduceOp::Sum).expect("submitted");
            let submitted = began.elapsed();
            tensor = work.take_tensor().expect("reduced");
            let ours = (began.elapsed(), submitted);
            barrier.wait();
            let theirs = raw
                .all_reduce(&mut tensor, deadline_in(Duration::from_secs(60)))
                .expect("reduced");
            // The first few warm up.
            if pair >= 5 {
                samples.push((ours, theirs));
            }
        }
        if rank == 0 {
            rows.push(report(bytes, &samples));
        }
        bytes *= 4;
    }
    group
        .shutdown(deadline_in(Duration::from_secs(10)))
        .expect("shut down");
    rows
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn report(bytes: usize, samples: &[(Sample, Sample)]) -> Row {
    let micros = |d: Duration| d.as_secs_f64() * 1e6;
    let of = |f: fn(&(Sample, Sample)) -> Duration| median(samples.iter().map(|s| micros(f(s))).collect());
    let ratios: Vec<f64> = samples
        .iter()
        .map(|(ours, raw)| micros(raw.0) / micros(ours.0))
        .collect();
    // A bootstrap with a fixed seed: the same samples give the same interval.
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut medians: Vec<f64> = (0..1000)
        .map(|_| {
            let drawn = (0..ratios.len())
                .map(|_| {
                    state = state
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    ratios[(state >> 33) as usize % ratios.len()]
                })
                .collect();
            median(drawn)
        })
        .collect();
    medians.sort_by(f64::total_cmp);
    let row = Row {
        bytes,
        ours: of(|s| s.0.0),
        raw: of(|s| s.1.0),
        ratio: median(ratios),
        lower: medians[25],
        submit_ours: of(|s| s.0.1),
        submit_raw: of(|s| s.1.1),
    };
    println!(
        "{bytes:>11} {:>9.1} {:>9.1} {:>10.3} {:>8.3} {:>16.2} {:>8.2}",
        row.ours, row.raw, row.ratio, row.lower, row.submit_ours, row.submit_raw
    );
    row
}
