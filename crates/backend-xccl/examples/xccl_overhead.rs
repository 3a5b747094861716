//! What this backend costs: `XcclGroup` against the same call of oneCCL itself, in turns, in the same processes, beside two controls.
//!
//! `OXCCL_XCCL_PATH=… cargo run --release -p backend-xccl --example xccl_overhead [-- BLOCKS [LAUNCHES [RANKS [BYTES,… [apart]]]]]`
//!
//! Four sides work on one and the same memory: oneCCL's call (plain), the same call on a second communicator (again), the same call
//! handed to another thread and back with nothing else around it (handed), and ours. A block has two runs of each, there and back
//! again (A B C D D C B A, another side first in every block), so that a machine that gets slower or faster falls on all alike; a run
//! is the median of three rows of calls (`apart`: of single calls that begin together), slowest rank. A block gives a ratio of plain to
//! each other side. A communicator is luckier or unluckier than another for as long as it lives, so there are several launches.
//! Printed: medians of the ratios with their 95 % intervals (of a median, by order: outliers do not widen them). What the interval
//! of `again` misses of 1 is the error of the comparison itself; what `handed` misses is the price of a deadline, which oneCCL's
//! calls do not have: they must be made by a thread that can be given up.

use std::io::{BufRead, BufReader};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use backend_xccl::XcclGroup;
use backend_xccl::plain::{Plain, RedOp};
use ftcore::{
    Configuration, DType, Epoch, Error, GroupOptions, ProcessGroup, ProcessGroupExt, ReduceOp, Result, Store,
    TcpStore, TcpStoreServer, Tensor, deadline_in,
};

const SIZES: [usize; 6] = [1 << 10, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24];
const SIDES: [Side; 4] = [Side::Plain, Side::Ours, Side::Handed, Side::Again];
/// How long the thread to which calls are handed looks for the next one before it sleeps, as a channel of ours does.
const LOOK: Duration = Duration::from_micros(100);

#[derive(Debug, Clone, Copy)]
enum Side {
    Plain,
    Again,
    Handed,
    Ours,
}

/// A thread that makes oneCCL's calls for another one.
struct Handed {
    to: Sender<Tensor>,
    back: Receiver<Result<Tensor>>,
}

impl Handed {
    fn over(plain: Arc<Plain>) -> Result<Self> {
        let (to, calls) = channel::<Tensor>();
        let (answer, back) = channel();
        let serve = move || {
            loop {
                let until = deadline_in(LOOK);
                let next = loop {
                    match calls.try_recv() {
                        Ok(tensor) => break Ok(tensor),
                        Err(_) if Instant::now() >= until => break calls.recv(),
                        Err(_) => std::thread::yield_now(),
                    }
                };
                let Ok(mut tensor) = next else { return };
                let done = plain.all_reduce(tensor.bytes_mut(), DType::F32, RedOp::SUM);
                if answer.send(done.map(|()| tensor)).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new()
            .name("ox-handed".into())
            .spawn(serve)
            .map_err(|e| Error::io("start a thread", e))?;
        Ok(Self { to, back })
    }

    fn all_reduce(&self, tensor: Tensor) -> Result<Tensor> {
        let gone = || Error::invalid("the thread to which calls are handed is gone");
        self.to.send(tensor).map_err(|_| gone())?;
        self.back.recv().map_err(|_| gone())?
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The median and the interval in which that of all blocks lies 19 times of 20: between two values by their places in order.
fn interval(values: &mut [f64]) -> [f64; 3] {
    let middle = median(values);
    let n = values.len() as f64;
    let reach = 0.98 * n.sqrt();
    let at = |place: f64| {
        values
            .get(place.clamp(0.0, n - 1.0) as usize)
            .copied()
            .unwrap_or(f64::NAN)
    };
    [
        middle,
        at((n / 2.0 - reach).floor()),
        at((n / 2.0 + reach).ceil()),
    ]
}

struct Bench {
    plain: Arc<Plain>,
    again: Plain,
    handed: Handed,
    group: XcclGroup,
}

impl Bench {
    fn call(&self, side: Side, data: &mut Option<Tensor>) -> Result<()> {
        let mut tensor = data.take().ok_or_else(|| Error::invalid("the tensor is lost"))?;
        let plain =
            |plain: &Plain, tensor: &mut Tensor| plain.all_reduce(tensor.bytes_mut(), DType::F32, RedOp::SUM);
        *data = Some(match side {
            Side::Plain => plain(&self.plain, &mut tensor).map(|()| tensor)?,
            Side::Again => plain(&self.again, &mut tensor).map(|()| tensor)?,
            Side::Handed => self.handed.all_reduce(tensor)?,
            Side::Ours => self
                .group
                .all_reduce(tensor, ReduceOp::Sum)
                .map_err(Error::from)?
                .take_tensor()?,
        });
        Ok(())
    }

    /// Microseconds per call of the slowest rank: in a row as nccl-tests does it, or each apart, after all ranks have met.
    fn run(&self, side: Side, data: &mut Option<Tensor>, calls: usize, apart: bool) -> Result<f64> {
        let (rounds, each) = if apart { (calls, 1) } else { (3, calls.div_ceil(3)) };
        let mut times = Vec::new();
        for _ in 0..rounds {
            let mut token = Tensor::from_vec(vec![0f32]);
            self.plain.all_reduce(token.bytes_mut(), DType::F32, RedOp::SUM)?;
            let began = Instant::now();
            for _ in 0..each {
                self.call(side, data)?;
            }
            let mut took = Tensor::from_vec(vec![began.elapsed().as_secs_f64() / each as f64]);
            self.plain.all_reduce(took.bytes_mut(), DType::F64, RedOp::MAX)?;
            times.push(took.as_slice::<f64>()?.first().copied().unwrap_or(0.0) * 1e6);
        }
        Ok(median(&mut times))
    }

    /// The sides' times in one block.
    fn block(&self, number: usize, data: &mut Option<Tensor>, calls: usize, apart: bool) -> Result<[f64; 4]> {
        let mut order = SIDES;
        order.rotate_left(number % SIDES.len());
        let mut times = [0.0; 4];
        for side in order.into_iter().chain(order.into_iter().rev()) {
            let took = self.run(side, data, calls, apart)?;
            if let Some(sum) = times.get_mut(side as usize) {
                *sum += took / 2.0;
            }
        }
        Ok(times)
    }
}

/// What the parent and its ranks agree on.
struct Plan {
    blocks: usize,
    launches: usize,
    world: u32,
    sizes: Vec<usize>,
    apart: bool,
}

impl Plan {
    fn of(arguments: &[String]) -> Self {
        let number =
            |i: usize, default: usize| arguments.get(i).and_then(|a| a.parse().ok()).unwrap_or(default);
        let named = arguments.get(3).map(|list| list.split(','));
        let sizes: Vec<usize> = named
            .into_iter()
            .flatten()
            .filter_map(|s| s.parse().ok())
            .collect();
        Self {
            blocks: number(0, 8),
            launches: number(1, 5),
            world: number(2, 2) as u32,
            apart: arguments.get(4).is_some_and(|a| a == "apart"),
            sizes: if sizes.is_empty() { SIZES.to_vec() } else { sizes },
        }
    }
}

/// Prints a line per block: the size and the sides' times.
fn rank(rank: u32, plan: &Plan, address: &str) -> Result<()> {
    let soon = || deadline_in(Duration::from_secs(60));
    let store: Arc<dyn Store> = Arc::new(TcpStore::connect(address, soon())?);
    let configuration = |name: &str| Configuration {
        store: store.clone(),
        prefix: name.into(),
        name: name.into(),
        epoch: Epoch(1),
        rank,
        world_size: plan.world,
        deadline: soon(),
        cancel: Default::default(),
    };
    let mut options = GroupOptions::default();
    if std::env::var_os("OXCCL_OVERHEAD_UNCOUNTED").is_some() {
        options.hints.insert("contributors".into(), "off".into());
    }
    let plain = Arc::new(Plain::join(&configuration("plain"))?);
    let bench = Bench {
        handed: Handed::over(plain.clone())?,
        plain,
        again: Plain::join(&configuration("again"))?,
        group: XcclGroup::new("ours", options)?,
    };
    bench.group.configure(configuration("ours"))?;
    for &size in &plan.sizes {
        let calls = ((1 << 23) / size).clamp(5, 40);
        let mut data = Some(Tensor::zeros(DType::F32, size / 4));
        for block in 0..=plan.blocks {
            let [plain, again, handed, ours] = bench.block(block, &mut data, calls, plan.apart)?;
            // The first block warms up.
            if block > 0 && rank == 0 {
                println!("{size} {plain} {again} {handed} {ours}");
            }
        }
    }
    store.barrier("done", plan.world, soon())?;
    bench.group.shutdown(soon())
}

type Anyhow<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// One launch of all ranks: the blocks that rank 0 printed.
fn launch(plan: &Plan, arguments: &[String]) -> Anyhow<Vec<(usize, [f64; 4])>> {
    let server = TcpStoreServer::bind("127.0.0.1:0")?;
    let program = std::env::current_exe()?;
    let mut children = Vec::new();
    for rank in 0..plan.world {
        let mut command = Command::new(&program);
        let child = command
            .args(arguments)
            .env("OXCCL_OVERHEAD_RANK", rank.to_string())
            .env("OXCCL_OVERHEAD_STORE", format!("127.0.0.1:{}", server.port()))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        children.push(child);
    }
    let mut blocks = Vec::new();
    for mut child in children {
        for line in child
            .stdout
            .take()
            .map(BufReader::new)
            .into_iter()
            .flat_map(BufRead::lines)
        {
            let line = line?;
            let mut words = line.split(' ');
            let size = words
                .next()
                .and_then(|w| w.parse().ok())
                .ok_or("a line without a size")?;
            let times: Vec<f64> = words.filter_map(|w| w.parse().ok()).collect();
            blocks.push((size, times.try_into().map_err(|_| "a line without four times")?));
        }
        if !child.wait()?.success() {
            return Err("a rank failed; what it said is above".into());
        }
    }
    Ok(blocks)
}

fn compare(plan: &Plan, arguments: &[String]) -> Anyhow<()> {
    let mut blocks = Vec::new();
    for _ in 0..plan.launches {
        blocks.extend(launch(plan, arguments)?);
    }
    println!(
        "{} ranks, {} launches of {} blocks, all_reduce f32 sum, medians in µs",
        plan.world, plan.launches, plan.blocks
    );
    println!(
        "{:>10} {:>9} {:>9}   {:<23} {:<23} {:<23}",
        "bytes", "plain", "ours", "plain/ours", "plain/handed", "plain/again"
    );
    for &size in &plan.sizes {
        let of: Vec<[f64; 4]> = blocks.iter().filter(|b| b.0 == size).map(|b| b.1).collect();
        let each = |f: fn(&[f64; 4]) -> f64| of.iter().map(f).collect::<Vec<f64>>();
        let text = |mut ratios: Vec<f64>| {
            let [middle, low, high] = interval(&mut ratios);
            format!("{middle:.3} ({low:.3} … {high:.3})")
        };
        println!(
            "{size:>10} {:>9.1} {:>9.1}   {:<23} {:<23} {:<23}",
            median(&mut each(|[plain, ..]| *plain)),
            median(&mut each(|[.., ours]| *ours)),
            text(each(|[plain, .., ours]| plain / ours)),
            text(each(|[plain, _, handed, _]| plain / handed)),
            text(each(|[plain, again, ..]| plain / again)),
        );
    }
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let plan = Plan::of(&arguments);
    let done = match (
        std::env::var("OXCCL_OVERHEAD_RANK"),
        std::env::var("OXCCL_OVERHEAD_STORE"),
    ) {
        (Ok(own), Ok(address)) => rank(own.parse().unwrap_or(0), &plan, &address).map_err(Into::into),
        _ => compare(&plan, &arguments),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
