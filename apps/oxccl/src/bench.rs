//! `oxccl bench`: how fast a backend's operations are here, in the manner of nccl-tests.
//!
//! A plan (`plan`) goes to every rank (`ranks`: processes or threads); each measures line by line (`measure`), with data
//! that it can check (`pattern`), and leaves its times in a store; this side watches over them and shows the figures
//! (`table`, `picture`). What the machine could do at best is measured for `bench-peers` (`limit`).

mod limit;
mod measure;
mod pattern;
mod picture;
mod plan;
mod ranks;
mod table;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use oxccl::core::registry::Backend;
use oxccl::core::{
    Cancel, DType, DeviceKind, Error, ErrorKind, Feature, GroupOptions, Registry, Result, Store, TcpStore,
    deadline_in, option_text,
};
use serde::Serialize;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

pub(crate) use limit::{LimitArguments, run as limit};
use measure::Times;
use plan::{MAX_RANKS, Plan, Row};
use ranks::Ranks;
use table::Line;

use super::{ExitCode, svg};

const EXAMPLES: &str = "\
Examples:
  All-reduce of f32 between two processes:
    oxccl bench

  Everything that the backend offers, checked, from 1 KiB to 64 MiB, for a script:
    oxccl bench --backend gloo --op all --min 1K --max 64M --factor 4 --check --json

  The same as a picture:
    oxccl bench --op all --min 1K --max 64M --factor 4 --plot bench.svg

Operations: all_reduce, broadcast, reduce, all_gather_into, reduce_scatter_into, all_to_all_into, send_recv, ping_pong, barrier.
Each call begins behind a barrier and blocks, or with --submit is submitted and waited for. Its time is that of its slowest rank; shown
are the median over the iterations, the least and the greatest. send_recv sends to the next rank and receives from the one before;
ping_pong is a message from rank 0 to rank 1 and back, and its time half of that. The size is that of the larger tensor of a rank.
algbw is size / time; busbw is algbw times nccl-tests' factor: 2(n-1)/n for all_reduce, (n-1)/n for all_gather_into,
reduce_scatter_into and all_to_all_into, else 1. `implied` (of_implied in JSON) compares an operation with the all_reduce of its size
in the same run, if that stands before it: its time divided by the one in which its bytes would have travelled at all_reduce's busbw.
1 is as fast as all_reduce, 2 takes twice as long for what it moves; a rank's own part, which all_gather_into, reduce_scatter_into and
all_to_all_into copy besides, counts as nothing.";

/// Measure the operations of a backend: time, bandwidth, and whether the results are right.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// The backend [default: the one for cpu; see OXCCL_DEFAULT_BACKEND].
    #[arg(long, value_name = "NAME")]
    backend: Option<String>,
    /// An option of the backend's groups, such as min_ctas=4 or connections=2; may be repeated. It comes before the variable
    /// OXCCL_<BACKEND>_<OPTION>; `oxccl backends --backend NAME` lists what a backend honours, lenient=1 drops the rest.
    #[arg(long = "option", value_name = "NAME=VALUE", value_parser = option_text)]
    options: Vec<(String, String)>,
    /// The device kind whose memory is moved [default: that of the backend, or cpu if it serves several].
    #[arg(long, value_name = "KIND", value_parser = |s: &str| s.parse::<DeviceKind>())]
    device: Option<DeviceKind>,
    /// Run every rank's backend in a child process of that rank.
    #[arg(long)]
    isolated: bool,
    /// Operations, separated by commas; `all` for every one that the backend offers.
    #[arg(long, default_value = "all_reduce", value_name = "OP,…")]
    op: String,
    /// Sizes in bytes, separated by commas, with K, M and G for powers of 1024.
    #[arg(long, default_value = "4,1K,64K,1M,16M", value_name = "SIZE,…", value_delimiter = ',',
          value_parser = plan::parse_size)]
    sizes: Vec<u64>,
    /// The first size, instead of --sizes.
    #[arg(long, value_name = "SIZE", value_parser = plan::parse_size, requires = "max", conflicts_with = "sizes")]
    min: Option<u64>,
    /// The last size.
    #[arg(long, value_name = "SIZE", value_parser = plan::parse_size, requires = "min")]
    max: Option<u64>,
    /// From --min to --max, each size is this many times the one before it.
    #[arg(long, default_value_t = 2, value_name = "N", requires = "min", conflicts_with = "sizes",
          value_parser = clap::value_parser!(u64).range(2..))]
    factor: u64,
    /// The element type. Reductions are sums.
    #[arg(long, default_value = "f32", value_name = "DTYPE", value_parser = |s: &str| s.parse::<DType>())]
    dtype: DType,
    /// Ranks, all on this machine.
    #[arg(long, default_value_t = 2, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_RANKS)))]
    ranks: u32,
    /// Whether ranks are processes or threads of one.
    #[arg(long, default_value = "processes", value_enum)]
    mode: Mode,
    /// Calls before the measured ones [default: until 4 MiB have moved, 5 to 1000: shared rings are then written all through].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(..=100_000))]
    warmup: Option<u32>,
    /// Measured calls of each size.
    #[arg(long, default_value_t = 20, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    iters: u32,
    /// Check the results, before and after the measured calls.
    #[arg(long)]
    check: bool,
    /// Bind every rank to a core (they take turns), as launchers do; where the kernel puts ranks that are not bound decides much of what short
    /// operations take.
    #[arg(long)]
    bind: bool,
    /// Take the tensors from the group (`ProcessGroup::alloc`): gloo's ranks on one host then read them in place.
    #[arg(long)]
    alloc: bool,
    /// Submit each call and wait for its work, instead of one blocking call.
    #[arg(long)]
    submit: bool,
    /// How long one line of the table may take, in seconds.
    #[arg(long, default_value_t = 300, value_name = "S", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    line_timeout_s: u64,
    /// Write the figures as JSON, at the end.
    #[arg(long)]
    json: bool,
    /// Draw time and bus bandwidth over the size into this SVG file, at the end.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
enum Mode {
    Processes,
    Threads,
}

/// One rank of a benchmark (how `bench` starts itself).
#[derive(Debug, clap::Args)]
pub(crate) struct RankArguments {
    #[arg(long)]
    rank: u32,
    #[arg(long)]
    store: String,
    #[arg(long)]
    plan: String,
}

#[derive(Serialize)]
struct Report<'a> {
    backend: &'a str,
    version: &'a str,
    source: String,
    device: &'a str,
    ranks: u32,
    mode: Mode,
    isolated: bool,
    /// That were asked for with lenient=1 and that the backend does not honour.
    dropped_options: &'a [String],
    /// How the ranks were connected, where the backend says so.
    transport: Option<&'a str>,
    dtype: &'a str,
    reduction: &'a str,
    /// As asked for; the results have what each line had.
    warmup: Option<u32>,
    iters: u32,
    /// Calls were submitted and waited for, not blocking.
    submitted: bool,
    /// Every rank had one of the cores.
    bound: bool,
    /// The tensors were the group's.
    alloc: bool,
    checked: bool,
    results: &'a [Line],
}

/// Why a run ended before its last line.
enum Stop {
    Interrupted,
    Failed(String),
}

/// How often signals and failed ranks are looked for while a line is measured. Rare, to leave the cores to the ranks.
const LOOK: Duration = Duration::from_millis(200);
/// A rank ends by itself when its line takes too long; this much later it is ended.
const MARGIN: Duration = Duration::from_secs(15);

/// The backend to measure.
fn choose(arguments: &Arguments) -> Result<Backend> {
    let registry = Registry::global();
    let default = arguments.device.clone().unwrap_or(DeviceKind::Cpu);
    let name = match &arguments.backend {
        Some(name) => name.clone(),
        None => Registry::default_backend(&default)?,
    };
    match &arguments.device {
        // One for host memory serves other devices through staging.
        Some(device) => registry
            .get(&name, Some(device))
            .or_else(|e| registry.get(&name, Some(&DeviceKind::Cpu)).map_err(|_| e)),
        None => match registry.get(&name, None) {
            Err(e) if e.kind() == ErrorKind::InvalidArgument => registry.get(&name, Some(&DeviceKind::Cpu)),
            found => found,
        },
    }
}

pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    // Caught before anything starts, so that an early interrupt ends it in order too.
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).map_err(|e| Error::io("catch signals", e))?;
    if let Some(path) = &arguments.plot {
        svg::check("--plot", path)?;
    }
    let backend = choose(&arguments)?;
    let name = &backend.name;
    let device = arguments.device.clone().unwrap_or_else(|| backend.device.clone());
    backend.factory.probe()?;
    let dropped_options = backend
        .resolve(&GroupOptions::from_texts(&arguments.options)?)?
        .dropped;
    let capabilities = backend.factory.capabilities();
    if arguments.mode == Mode::Threads && !arguments.isolated && !capabilities.has(Feature::ThreadRanks) {
        return Err(Error::unsupported(format!(
            "ranks of backend '{name}' cannot be threads; leave out --mode threads, or add --isolated"
        )));
    }
    let ops = plan::parse_ops(
        &arguments.op,
        &backend.name,
        &capabilities,
        arguments.dtype,
        arguments.ranks,
    )?;
    if arguments.op.trim() == "all" && !arguments.json {
        for op in plan::Op::ALL.into_iter().filter(|op| !ops.contains(op)) {
            say!(
                "oxccl: {} is not measured: name it with --op to see why",
                op.name()
            );
        }
    }
    let sizes = match (arguments.min, arguments.max) {
        (Some(min), Some(max)) => plan::sizes_between(min, max, arguments.factor)?,
        _ => arguments.sizes,
    };
    let plan = Plan {
        ranks: arguments.ranks,
        warmup: arguments.warmup,
        iters: arguments.iters,
        check: arguments.check,
        submit: arguments.submit,
        bind: arguments.bind,
        alloc: arguments.alloc,
        device: device.to_string(),
        isolated: arguments.isolated,
        options: arguments.options,
        backend: name.clone(),
        ops,
        sizes,
        dtype: arguments.dtype.to_string(),
        row_limit_ms: arguments.line_timeout_s * 1000,
    };
    let rows = plan.rows()?;
    if arguments.plot.is_some() && rows.iter().all(|row| row.bytes == 0) {
        return Err(Error::invalid(
            "--plot draws over sizes, and barrier has none; add an operation that moves data",
        ));
    }
    let ranks_as = format!(
        "on {device}, {} ranks as {}{}{}{}{}, {} sums",
        plan.ranks,
        match arguments.mode {
            Mode::Processes => "processes",
            Mode::Threads => "threads",
        },
        if plan.isolated { ", isolated" } else { "" },
        if plan.bind { ", bound" } else { "" },
        if plan.alloc { ", the group's memory" } else { "" },
        if plan.submit { ", submitted" } else { "" },
        arguments.dtype,
    );
    if !arguments.json {
        show(format_args!(
            "# oxccl bench: {} from {} {ranks_as}, {} warm-ups, {} iterations{}\n{}",
            backend.name,
            backend.source,
            plan.warmup
                .map_or_else(|| format!("{} or more", plan::WARM_UPS), |n| n.to_string()),
            plan.iters,
            if plan.check { ", checked" } else { "" },
            table::HEAD,
        ))?;
        if !dropped_options.is_empty() {
            show(format_args!(
                "# options that the backend does not honour, dropped: {}",
                dropped_options.join(", ")
            ))?;
        }
    }
    let mut ranks = match arguments.mode {
        Mode::Processes => Ranks::processes(&plan)?,
        Mode::Threads => Ranks::threads(&plan)?,
    };
    let mut lines = Vec::new();
    let mut transport = None;
    for (index, row) in rows.into_iter().enumerate() {
        let times = match wait_line(&plan, index, &mut ranks, &mut signals) {
            Ok(times) => times,
            Err(stop) => return Ok(give_up(stop, row, &mut ranks)),
        };
        let line = table::line(&plan, row, &times, &lines)?;
        if index == 0 {
            transport = times.iter().find_map(|t| t.transport.clone());
        }
        if let Some(how) = transport.as_ref().filter(|_| index == 0 && !arguments.json) {
            show(format_args!("# connected over {how}"))?;
        }
        if !arguments.json {
            show(format_args!("{line}"))?;
        }
        lines.push(line);
    }
    if let Err(text) = ranks.finish() {
        say!("oxccl bench: {text}");
        return Ok(ExitCode::from(1));
    }
    if arguments.json {
        let report = Report {
            backend: &backend.name,
            version: &backend.source.version,
            source: backend.source.to_string(),
            device: device.name(),
            ranks: plan.ranks,
            mode: arguments.mode,
            isolated: plan.isolated,
            dropped_options: &dropped_options,
            transport: transport.as_deref(),
            dtype: arguments.dtype.name(),
            reduction: "sum",
            warmup: plan.warmup,
            iters: plan.iters,
            submitted: plan.submit,
            bound: plan.bind,
            alloc: plan.alloc,
            checked: plan.check,
            results: &lines,
        };
        crate::results::json(&report, "the figures")?;
    }
    if let Some(path) = &arguments.plot {
        let over = transport
            .as_ref()
            .map_or(String::new(), |how| format!("over {how}, "));
        let subtitle = format!("{over}{} iterations, {}", plan.iters, backend.source);
        let title = format!("oxccl bench: {} {ranks_as}", backend.name);
        svg::write(path, &picture::scene(&title, &subtitle, &lines))?;
        if !arguments.json {
            show(format_args!("# picture: {}", path.display()))?;
        }
    }
    let wrong: u64 = lines.iter().filter_map(|l| l.wrong).sum();
    if wrong > 0 {
        say!("oxccl bench: {wrong} elements are wrong; see the column #wrong");
        return Ok(ExitCode::from(1));
    }
    Ok(ExitCode::SUCCESS)
}

/// The child's side.
pub(crate) fn rank(arguments: RankArguments) -> Result<ExitCode> {
    let plan: Plan =
        serde_json::from_str(&arguments.plan).map_err(|e| Error::invalid(format!("--plan: {e}")))?;
    let store = TcpStore::connect(&arguments.store, deadline_in(measure::MEET))?;
    let store: Arc<dyn Store> = Arc::new(store);
    let group = ranks::group(&plan, arguments.rank)?;
    measure::run(&plan, group.as_ref(), &store, arguments.rank, Cancel::default())?;
    Ok(ExitCode::SUCCESS)
}

/// Waits until every rank has put its times for line `index` into the store.
fn wait_line(
    plan: &Plan,
    index: usize,
    ranks: &mut Ranks,
    signals: &mut Signals,
) -> Result<Vec<Times>, Stop> {
    let failed = |e: Error| Stop::Failed(e.to_string());
    let keys: Vec<String> = (0..plan.ranks).map(|rank| measure::key(index, rank)).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    // The first line includes the time in which the ranks meet.
    let deadline = plan.row_deadline() + measure::MEET + MARGIN;
    loop {
        if signals.pending().next().is_some() {
            return Err(Stop::Interrupted);
        }
        if let Some(text) = ranks.failure() {
            return Err(Stop::Failed(text));
        }
        // Before the store is asked: a rank ends in good order only after all have told their times.
        let gone = ranks.ended();
        match ranks.store.wait(&keys, deadline_in(LOOK).min(deadline)) {
            Ok(()) => break,
            Err(e) if e.kind() == ErrorKind::Timeout && gone.is_some() => {
                return Err(Stop::Failed(gone.unwrap_or_default()));
            }
            Err(e) if e.kind() == ErrorKind::Timeout && Instant::now() < deadline => {}
            Err(e) => return Err(failed(e)),
        }
    }
    let values = ranks.store.multi_get(&keys, deadline).map_err(failed)?;
    (0..plan.ranks)
        .zip(values)
        .map(|(rank, value)| {
            serde_json::from_slice(&value)
                .map_err(|e| Stop::Failed(format!("what rank {rank} measured cannot be read: {e}")))
        })
        .collect()
}

/// Ends the ranks and says why.
fn give_up(stop: Stop, row: Row, ranks: &mut Ranks) -> ExitCode {
    match stop {
        Stop::Interrupted => {
            ranks.stop("interrupted");
            say!("oxccl bench: interrupted");
            ExitCode::from(130)
        }
        Stop::Failed(text) => {
            ranks.stop("the benchmark failed");
            say!("oxccl bench: {} of {} bytes: {text}", row.op.name(), row.bytes);
            ExitCode::from(1)
        }
    }
}

/// A line on standard output.
fn show(text: std::fmt::Arguments<'_>) -> Result<()> {
    crate::results::write(&format!("{text}\n"))
}
