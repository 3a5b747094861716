//! Ranks as threads of this process or as processes of their own, and the test binary around them.
//!
//! A process rank is this very binary started again with `OXCCL_CONFORMANCE_CASE` and three more variables; it meets the
//! others at a TCP store of the parent, runs the one case and ends with its verdict as exit code.

use std::io::Read;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{
    Capabilities, Device, GroupOptions, InMemoryStore, ProcessGroup, Result, Store, TcpStore, TcpStoreServer,
    deadline_in,
};
use libtest_mimic::{Arguments, Completion, Trial};

use crate::{Case, Failure, Outcome, Rank, cases};

const CASE: &str = "OXCCL_CONFORMANCE_CASE";
const RANK: &str = "OXCCL_CONFORMANCE_RANK";
const WORLD: &str = "OXCCL_CONFORMANCE_WORLD";
const STORE: &str = "OXCCL_CONFORMANCE_STORE";

/// A process rank that has not ended by then is killed, and the case has failed.
const PATIENCE: Duration = Duration::from_secs(90);

/// Makes a new, unconfigured group of the backend under test.
pub type MakeGroup = fn(GroupOptions) -> Result<Box<dyn ProcessGroup>>;

/// Makes a new, unconfigured group of the backend under test on the device of one rank.
pub type MakeOn = Arc<dyn Fn(&Device, GroupOptions) -> Result<Box<dyn ProcessGroup>> + Send + Sync>;

/// Rank `rank`'s device when `first` is rank 0's: the next of its kind, and from the start again when there are no more.
pub fn device_of(first: &Device, rank: u32) -> Result<Device> {
    if first.is_cpu() {
        return Ok(first.clone());
    }
    let count = ftcore::accelerator(&first.kind)?.count().max(1);
    let index = first.index.wrapping_add(rank) % count;
    Ok(Device::new(first.kind.clone(), index))
}

/// Something that can run a case on N ranks of one backend.
pub trait Harness: Send + Sync {
    /// The first part of every trial's name.
    fn name(&self) -> &str;
    /// What the backend advertises.
    fn capabilities(&self) -> &Capabilities;
    /// True if ranks are processes that may be killed.
    fn real_processes(&self) -> bool;
    /// Runs `case` on all its ranks; the failures of all ranks in one text.
    fn run(&self, case: &Case) -> Outcome;
}

/// A kind of harness.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Ranks are threads.
    Threads,
    /// Ranks are processes.
    Processes,
}

/// Ranks as threads of this process.
pub struct Threads {
    make: MakeOn,
    device: Device,
    capabilities: Capabilities,
}

/// Ranks as processes: this binary started again.
pub struct Processes {
    capabilities: Capabilities,
}

impl Threads {
    /// Asks a group of the backend for its capabilities. `device` is rank 0's (see [`device_of`]).
    pub fn new(device: Device, make: MakeOn) -> Result<Self> {
        let capabilities = make(&device, GroupOptions::default())?.capabilities().clone();
        Ok(Self {
            make,
            device,
            capabilities,
        })
    }
}

impl Processes {
    /// Asks a group of the backend for its capabilities. The binary must call [`run`] or [`run_on`] first thing in
    /// `main`: that is where its ranks begin.
    pub fn new(device: &Device, make: &MakeOn) -> Result<Self> {
        let capabilities = make(device, GroupOptions::default())?.capabilities().clone();
        Ok(Self { capabilities })
    }
}

impl Harness for Threads {
    fn name(&self) -> &str {
        "threads"
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn real_processes(&self) -> bool {
        false
    }

    fn run(&self, case: &Case) -> Outcome {
        let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
        let failures: Vec<String> = std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..case.world)
                .map(|rank| {
                    let store = store.clone();
                    scope.spawn(move || {
                        let rank = Rank {
                            rank,
                            world: case.world,
                            store,
                            device: device_of(&self.device, rank)?,
                            make: self.make.clone(),
                        };
                        case.run(&rank)
                    })
                })
                .collect();
            ranks
                .into_iter()
                .enumerate()
                .filter_map(|(rank, thread)| match thread.join() {
                    Ok(Ok(())) => None,
                    Ok(Err(failure)) => Some(format!("rank {rank}: {failure}")),
                    Err(_) => Some(format!("rank {rank} panicked")),
                })
                .collect()
        });
        verdict(failures)
    }
}

fn verdict(failures: Vec<String>) -> Outcome {
    if failures.is_empty() {
        Ok(())
    } else {
        Err(Failure::new(failures.join("\n")))
    }
}

/// A running process rank; killed if the harness gives up on it.
struct Running {
    rank: u32,
    child: Child,
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

impl Harness for Processes {
    fn name(&self) -> &str {
        "processes"
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn real_processes(&self) -> bool {
        true
    }

    fn run(&self, case: &Case) -> Outcome {
        let server = start_server()?;
        let program =
            std::env::current_exe().map_err(|e| Failure::new(format!("cannot find this program: {e}")))?;
        let mut ranks = Vec::new();
        for rank in 0..case.world {
            let child = Command::new(&program)
                .env(CASE, &case.name)
                .env(RANK, rank.to_string())
                .env(WORLD, case.world.to_string())
                .env(STORE, format!("127.0.0.1:{}", server.port()))
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .map_err(|e| Failure::new(format!("cannot start rank {rank}: {e}")))?;
            ranks.push(Running { rank, child });
        }
        let until = deadline_in(PATIENCE);
        let mut failures = Vec::new();
        for mut running in ranks {
            if let Some(failure) = finish(&mut running, case, until) {
                failures.push(format!("rank {}: {failure}", running.rank));
            }
        }
        verdict(failures)
    }
}

/// Waits for one rank; `None` if it did what it should.
fn finish(running: &mut Running, case: &Case, until: Instant) -> Option<String> {
    use std::os::unix::process::ExitStatusExt;
    let status = loop {
        match running.child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() >= until => {
                return Some(format!("did not end within {} s", PATIENCE.as_secs()));
            }
            Ok(None) => std::thread::sleep(Duration::from_millis(3)),
            Err(e) => return Some(format!("cannot be waited for: {e}")),
        }
    };
    let killed = status.signal() == Some(9);
    if case.killed == Some(running.rank) {
        return (!killed).then(|| format!("should have been killed, but ended with {status}"));
    }
    if status.success() {
        return None;
    }
    let mut text = String::new();
    if let Some(mut stderr) = running.child.stderr.take() {
        let _ = stderr.read_to_string(&mut text);
    }
    Some(format!("{status}: {}", text.trim()))
}

fn start_server() -> Outcome<TcpStoreServer> {
    Ok(TcpStoreServer::bind("127.0.0.1:0")?)
}

/// The child's side of [`Processes`]: the verdict of the one case that this process was started for.
fn child(name: &str, first: &Device, make: &MakeOn) -> Outcome {
    let number = |variable: &str| {
        std::env::var(variable)
            .ok()
            .and_then(|v| v.parse::<u32>().ok())
            .ok_or_else(|| Failure::new(format!("{variable} is not set")))
    };
    let address = std::env::var(STORE).map_err(|e| Failure::new(format!("{STORE}: {e}")))?;
    let rank = number(RANK)?;
    let rank = Rank {
        rank,
        world: number(WORLD)?,
        store: Arc::new(TcpStore::connect(&address, deadline_in(Duration::from_secs(30)))?),
        device: device_of(first, rank)?,
        make: make.clone(),
    };
    let case = cases()
        .into_iter()
        .find(|c| c.name == name)
        .ok_or_else(|| Failure::new(format!("there is no case '{name}'")))?;
    case.run(&rank)
}

/// The trials of one harness: every case, ignored with its reason where it does not apply.
pub fn suite(harness: Arc<dyn Harness>) -> Vec<Trial> {
    suite_up_to(harness, Limit::NONE)
}

/// How many ranks can run here at most, and why not more.
#[derive(Debug, Clone, Copy)]
pub struct Limit {
    /// Cases of more ranks are ignored.
    pub ranks: u32,
    /// The reason that is given.
    pub why: &'static str,
}

impl Limit {
    /// As many as a case wants.
    pub const NONE: Self = Self {
        ranks: u32::MAX,
        why: "",
    };
}

fn suite_up_to(harness: Arc<dyn Harness>, limit: Limit) -> Vec<Trial> {
    cases()
        .into_iter()
        .map(|case| {
            let harness = harness.clone();
            let name = format!("{}::{}", harness.name(), case.name);
            Trial::ignorable_test(name, move || {
                if case.world > limit.ranks {
                    let reason = format!("{} ranks, {} at most: {}", case.world, limit.ranks, limit.why);
                    return Ok(Completion::ignored_with(reason));
                }
                if let Some(reason) = case.unmet(harness.capabilities(), harness.real_processes()) {
                    return Ok(Completion::ignored_with(reason));
                }
                harness.run(&case)?;
                Ok(Completion::Completed)
            })
        })
        .collect()
}

/// A whole test binary: the suite of a CPU backend in each of `modes`, with libtest's arguments.
pub fn run(modes: &[Mode], make: MakeGroup) -> ExitCode {
    run_on(&Device::CPU, modes, Arc::new(move |_, options| make(options)))
}

/// As [`run`] for a backend of any device kind; `device` is rank 0's (see [`device_of`]).
pub fn run_on(device: &Device, modes: &[Mode], make: MakeOn) -> ExitCode {
    run_limited(device, modes, make, Limit::NONE)
}

/// As [`run_on`] where only so many ranks can run.
pub fn run_limited(device: &Device, modes: &[Mode], make: MakeOn, limit: Limit) -> ExitCode {
    if let Ok(name) = std::env::var(CASE) {
        return match child(&name, device, &make) {
            Ok(()) => ExitCode::SUCCESS,
            Err(failure) => {
                eprintln!("{failure}");
                ExitCode::FAILURE
            }
        };
    }
    let arguments = Arguments::from_args();
    let mut trials = Vec::new();
    for mode in modes {
        let harness: Result<Arc<dyn Harness>> = match mode {
            Mode::Threads => Threads::new(device.clone(), make.clone()).map(|h| Arc::new(h) as _),
            Mode::Processes => Processes::new(device, &make).map(|h| Arc::new(h) as _),
        };
        match harness {
            Ok(harness) => trials.extend(suite_up_to(harness, limit)),
            Err(error) => {
                eprintln!("the backend cannot be used here: {error}");
                return ExitCode::FAILURE;
            }
        }
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}
