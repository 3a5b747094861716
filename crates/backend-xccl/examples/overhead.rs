//! What this backend costs: `XcclGroup` against the same call of oneCCL itself, in turns, in the same processes.
//!
//! `OXCCL_XCCL_PATH=… cargo run --release -p backend-xccl --example overhead [-- PAIRS [RANKS]]`
//!
//! Per size and pair: a run of plain calls, then a run of ours (and the other way round in every second pair), each the median
//! over its iterations, slowest rank. Printed: the medians of both, the ratio plain ÷ ours with its 95 % interval.

use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use backend_xccl::XcclGroup;
use backend_xccl::plain::{Plain, RedOp};
use ftcore::{
    Configuration, DType, Epoch, Error, GroupOptions, ProcessGroup, ProcessGroupExt, ReduceOp, Result, Store,
    TcpStore, TcpStoreServer, Tensor, deadline_in,
};

const SIZES: [usize; 6] = [1 << 10, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24];

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

struct Bench {
    plain: Plain,
    group: XcclGroup,
    world: u32,
}

impl Bench {
    /// All ranks begin together, and the slowest one counts.
    fn measure(&self, iterations: usize, mut one: impl FnMut() -> Result<()>) -> Result<f64> {
        let mut times = Vec::new();
        for _ in 0..iterations {
            let mut token = Tensor::from_vec(vec![0f32]);
            self.plain.all_reduce(token.bytes_mut(), DType::F32, RedOp::SUM)?;
            let began = Instant::now();
            one()?;
            let mut took = Tensor::from_vec(vec![began.elapsed().as_secs_f64()]);
            self.plain.all_reduce(took.bytes_mut(), DType::F64, RedOp::MAX)?;
            times.push(took.as_slice::<f64>()?.first().copied().unwrap_or(0.0) * 1e6);
        }
        Ok(median(&mut times))
    }

    fn plain(&self, size: usize, iterations: usize) -> Result<f64> {
        let mut data = Tensor::zeros(DType::F32, size / 4);
        self.measure(iterations, || {
            self.plain.all_reduce(data.bytes_mut(), DType::F32, RedOp::SUM)
        })
    }

    fn ours(&self, size: usize, iterations: usize) -> Result<f64> {
        let mut data = Some(Tensor::zeros(DType::F32, size / 4));
        self.measure(iterations, || {
            let tensor = data.take().unwrap_or_else(|| Tensor::zeros(DType::F32, size / 4));
            data = Some(
                self.group
                    .allreduce(tensor, ReduceOp::Sum)
                    .map_err(Error::from)?
                    .take_tensor()?,
            );
            Ok(())
        })
    }
}

fn rank(rank: u32, world: u32, pairs: usize, address: &str) -> Result<()> {
    let soon = || deadline_in(Duration::from_secs(60));
    let store: Arc<dyn Store> = Arc::new(TcpStore::connect(address, soon())?);
    let configuration = |name: &str| Configuration {
        store: store.clone(),
        prefix: name.into(),
        name: name.into(),
        epoch: Epoch(1),
        rank,
        world_size: world,
        deadline: soon(),
    };
    let plain = Plain::join(&configuration("plain"))?;
    let mut options = GroupOptions::default();
    if std::env::var_os("OXCCL_OVERHEAD_UNCOUNTED").is_some() {
        options.hints.insert("contributors".into(), "off".into());
    }
    let group = XcclGroup::new("ours", options)?;
    group.configure(configuration("ours"))?;
    let bench = Bench { plain, group, world };
    if rank == 0 {
        println!("{world} ranks, {pairs} pairs, all_reduce f32 sum, medians in µs");
        println!(
            "{:>10} {:>10} {:>10} {:>7} {:>16}",
            "bytes", "plain", "ours", "ratio", "95 % interval"
        );
    }
    for size in SIZES {
        let iterations = ((1 << 22) / size).clamp(4, 30);
        let (mut theirs, mut own, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        for pair in 0..=pairs {
            let (a, b) = if pair % 2 == 0 {
                let a = bench.plain(size, iterations)?;
                (a, bench.ours(size, iterations)?)
            } else {
                let b = bench.ours(size, iterations)?;
                (bench.plain(size, iterations)?, b)
            };
            // The first pair warms up.
            if pair > 0 {
                theirs.push(a);
                own.push(b);
                ratios.push(a / b);
            }
        }
        let n = ratios.len() as f64;
        let mean = ratios.iter().sum::<f64>() / n;
        let deviation = (ratios.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / (n - 1.0).max(1.0)).sqrt();
        let margin = 2.0 * deviation / n.sqrt();
        if rank == 0 {
            println!(
                "{size:>10} {:>10.1} {:>10.1} {:>7.3} {:>7.3} … {:>6.3}",
                median(&mut theirs),
                median(&mut own),
                median(&mut ratios),
                mean - margin,
                mean + margin
            );
        }
    }
    store.barrier("done", bench.world, soon())?;
    bench.group.shutdown(soon())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, default: u32| arguments.get(i).and_then(|a| a.parse().ok()).unwrap_or(default);
    if let (Ok(own), Ok(address)) = (
        std::env::var("OXCCL_OVERHEAD_RANK"),
        std::env::var("OXCCL_OVERHEAD_STORE"),
    ) {
        let own = own.parse().unwrap_or(0);
        return match rank(own, number(1, 2), number(0, 20) as usize, &address) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("rank {own}: {error}");
                ExitCode::FAILURE
            }
        };
    }
    let run = || -> std::result::Result<bool, Box<dyn std::error::Error>> {
        let server = TcpStoreServer::bind("127.0.0.1:0")?;
        let program = std::env::current_exe()?;
        let children: Vec<_> = (0..number(1, 2))
            .map(|rank| {
                Command::new(&program)
                    .args(&arguments)
                    .env("OXCCL_OVERHEAD_RANK", rank.to_string())
                    .env("OXCCL_OVERHEAD_STORE", format!("127.0.0.1:{}", server.port()))
                    .stdin(Stdio::null())
                    .spawn()
            })
            .collect::<std::result::Result<_, _>>()?;
        let mut fine = true;
        for mut child in children {
            fine &= child.wait()?.success();
        }
        Ok(fine)
    };
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
