//! Ranks as threads of this process or as processes of their own, and the test binary around them.
//!
//! A process rank is this very binary started again (or what [`Plan::again`] names) with `OXCCL_CONFORMANCE_CASE` and three more variables; it meets the
//! others at a TCP store of the parent (with credentials, so that every connection proves the secret there), runs the one case and ends with its verdict as exit code. Where ranks are dear to
//! start, those of the cases that can share them live on (`lasting`, `living`).

use std::ffi::OsString;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{
    Capabilities, Credentials, Device, Feature, GroupOptions, InMemoryStore, OpKind, ProcessGroup, Result,
    Store, TcpStore, TcpStoreServer, deadline_in,
};
use libtest_mimic::{Arguments, Completion, Trial};

use crate::case::{MakeOn, device_of};
use crate::credentials::{credentials, forget};
use crate::failure::verdict;
use crate::lasting::{self, Place, side_by_side};
use crate::report::Verdict;
use crate::running::Running;
use crate::suite::{cases_at, named};
use crate::{Case, Failure, Needs, Outcome, Rank, Worlds, living};

const CASE: &str = "OXCCL_CONFORMANCE_CASE";
const RANK: &str = "OXCCL_CONFORMANCE_RANK";
const WORLD: &str = "OXCCL_CONFORMANCE_WORLD";
const STORE: &str = "OXCCL_CONFORMANCE_STORE";

/// Instead of a case: the rank lives through many.
pub(crate) const LASTING: &str = "many";

/// The case of a rank that has not ended by then has failed; one that is a process is killed.
pub(crate) const TIME_LIMIT: Duration = crate::expected::CASE.at_most;

/// How many cases run at once, at least, in a suite that has the machine to itself: most of them wait most of the time.
const BY_ITSELF: usize = 24;

/// None in the matrix, which runs suites side by side.
fn by_itself() -> Option<usize> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::env::var_os("OXCCL_XTASK_RUN")
        .is_none()
        .then_some(cores.max(BY_ITSELF))
}

/// Makes a new, unconfigured group of the backend under test.
pub type MakeGroup = fn(GroupOptions) -> Result<Box<dyn ProcessGroup>>;

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
    lasting: Option<Place<lasting::Threads>>,
    /// For one case.
    limit: Duration,
}

/// Ranks as processes: this binary started again.
pub struct Processes {
    capabilities: Capabilities,
    /// The program of a rank with its first arguments; empty for this binary.
    again: Vec<OsString>,
    lasting: Option<Place<living::Processes>>,
}

impl Threads {
    /// Asks a group of the backend for its capabilities. `device` is rank 0's (see [`device_of`]).
    pub fn new(device: Device, make: MakeOn) -> Result<Self> {
        let capabilities = make(&device, GroupOptions::default())?.capabilities().clone();
        Ok(Self {
            make,
            device,
            capabilities,
            lasting: None,
            limit: TIME_LIMIT,
        })
    }

    /// The same with one group per world for all cases that share theirs ([`Case::shares`]).
    pub fn lasting(self) -> Self {
        Self {
            lasting: Some(Place::new()),
            ..self
        }
    }
}

impl Processes {
    /// Asks a group of the backend for its capabilities. The binary must call [`run`] or [`run_on`] first thing in
    /// `main`: that is where its ranks begin.
    pub fn new(device: &Device, make: &MakeOn) -> Result<Self> {
        let capabilities = make(device, GroupOptions::default())?.capabilities().clone();
        Ok(Self {
            capabilities,
            again: Vec::new(),
            lasting: None,
        })
    }

    /// The same with ranks that are started by this command, which must call [`Plan::serve`] (see [`Plan::again`]).
    pub fn started_by(self, again: Vec<OsString>) -> Self {
        Self { again, ..self }
    }

    /// The same with one set of processes and one group per world for all cases that share theirs ([`Case::shares`]).
    pub fn lasting(self) -> Self {
        Self {
            lasting: Some(Place::new()),
            ..self
        }
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
        if let Some(place) = &self.lasting {
            if case.shares {
                let start = || lasting::Threads::start(case.world, &self.device, &self.make, self.limit);
                return place.run(case, start);
            }
            place.clear()?;
        }
        let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
        let (case, first, make) = (case.clone(), self.device.clone(), self.make.clone());
        side_by_side(self.limit, 0..case.world, move |rank| {
            let rank = Rank {
                rank,
                world: case.world,
                store: store.clone(),
                device: device_of(&first, rank)?,
                make: make.clone(),
                lent: None,
            };
            case.run(&rank)
        })
    }
}

/// How rank `rank` is started for `case`.
pub(crate) fn command(
    again: &[OsString],
    case: &str,
    rank: u32,
    world: u32,
    server: &TcpStoreServer,
) -> Outcome<Command> {
    let mut command = match again.split_first() {
        Some((program, arguments)) => {
            let mut command = Command::new(program);
            command.args(arguments);
            command
        }
        None => {
            let program = std::env::current_exe()
                .map_err(|e| Failure::new(format!("cannot find this program: {e}")))?;
            Command::new(program)
        }
    };
    command
        .env(CASE, case)
        .env(RANK, rank.to_string())
        .env(WORLD, world.to_string())
        .env(STORE, format!("127.0.0.1:{}", server.port()))
        .env(Credentials::VARIABLE, credentials()?.folder())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    Ok(command)
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
        if let Some(place) = &self.lasting {
            if case.shares {
                return place.run(case, || living::Processes::start(case.world, &self.again));
            }
            place.clear()?;
        }
        let server = server()?;
        let mut ranks = Vec::new();
        for rank in 0..case.world {
            let command = command(&self.again, &case.name, rank, case.world, &server)?;
            ranks.push(Running::start(rank, command)?);
        }
        let until = deadline_in(TIME_LIMIT);
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
    let status = match running.wait(until) {
        Ok(status) => status,
        Err(why) => return Some(running.said(why)),
    };
    if case.killed == Some(running.rank) {
        let killed = status.signal() == Some(9);
        return (!killed)
            .then(|| running.said(format_args!("should have been killed, but ended with {status}")));
    }
    (!status.success()).then(|| running.said(status))
}

/// The store at which process ranks meet.
pub(crate) fn server() -> Outcome<TcpStoreServer> {
    Ok(TcpStoreServer::bind_with("127.0.0.1:0", Some(credentials()?))?)
}

/// What a process rank was told by its parent.
pub(crate) mod variable {
    use super::{Failure, Outcome, RANK, WORLD};

    fn number(variable: &str) -> Outcome<u32> {
        std::env::var(variable)
            .ok()
            .and_then(|v| v.parse().ok())
            .ok_or_else(|| Failure::new(format!("{variable} is not set")))
    }

    pub(crate) fn rank() -> Outcome<u32> {
        number(RANK)
    }

    pub(crate) fn world() -> Outcome<u32> {
        number(WORLD)
    }
}

/// The parent's store, as a process rank reaches it.
pub(crate) fn store_of_parent() -> Outcome<TcpStore> {
    let address = std::env::var(STORE).map_err(|e| Failure::new(format!("{STORE}: {e}")))?;
    Ok(TcpStore::connect(&address, deadline_in(Duration::from_secs(30)))?)
}

/// The child's side of [`Processes`]: the verdict of the case or cases that this process was started for.
fn child(name: &str, first: &Device, make: &MakeOn) -> Outcome {
    if name == LASTING {
        return living::serve(first, make);
    }
    let rank = variable::rank()?;
    let rank = Rank {
        rank,
        world: variable::world()?,
        store: Arc::new(store_of_parent()?),
        device: device_of(first, rank)?,
        make: make.clone(),
        lent: None,
    };
    let case = named(name).ok_or_else(|| Failure::new(format!("there is no case '{name}'")))?;
    case.run(&rank)
}

/// How many ranks can run here at most, and why not more.
#[derive(Debug, Clone, Copy)]
pub struct Limit {
    /// Cases of more ranks are ignored.
    pub ranks: u32,
    /// The reason that is given.
    pub why: &'static str,
    /// In the modes after the first, only the cases that kill a process run.
    pub kills_only_again: bool,
}

impl Limit {
    /// As many as a case wants.
    pub const NONE: Self = Self {
        ranks: u32::MAX,
        why: "",
        kills_only_again: false,
    };

    /// `ranks`, but as many as a case wants with `OXCCL_LONG` (which `cargo xtask test --long` sets). `why` is given as the reason.
    pub fn unless_long(ranks: u32, why: &'static str) -> Self {
        match std::env::var_os("OXCCL_LONG") {
            Some(_) => Self::NONE,
            None => Self {
                ranks,
                why,
                ..Self::NONE
            },
        }
    }

    /// The same, where nothing but a death depends on whether ranks are threads or processes: in the modes after the first only the cases that kill a
    /// process run, and all with `OXCCL_LONG`.
    pub fn kills_only_again(self) -> Self {
        Self {
            kills_only_again: std::env::var_os("OXCCL_LONG").is_none(),
            ..self
        }
    }

    /// Of a group over another one: up to three ranks, in the modes after the first only what kills; everything with `OXCCL_LONG`.
    pub fn of_a_wrapper() -> Self {
        Self::unless_long(
            3,
            "larger worlds differ only in the backend, which has a row of its own; OXCCL_LONG=1 runs them",
        )
        .kills_only_again()
    }

    /// Of an isolated group over a backend of a vendor, whose ranks are dear to start: up to two ranks, and more with `OXCCL_LONG`.
    pub fn of_an_isolated_vendor() -> Self {
        Self::unless_long(
            2,
            "larger worlds differ only in the backend and in isolation, which have rows of their own; OXCCL_LONG=1 runs them",
        )
    }

    /// Of the cases that only look at data, in a mode after the first: two ranks, and more with `OXCCL_LONG`.
    fn of_data_again() -> Self {
        Self::unless_long(
            2,
            "the data of more ranks are looked at in the first mode; OXCCL_LONG=1 looks at them in this one, too",
        )
    }

    fn min(self, other: Self) -> Self {
        if other.ranks < self.ranks { other } else { self }
    }
}

/// A case, and where it runs.
pub(crate) struct Placed {
    pub(crate) harness: Arc<dyn Harness>,
    pub(crate) case: Case,
    part: &'static str,
    limit: Limit,
    /// A mode after the first, in which only kills are looked at.
    again: bool,
}

impl Placed {
    pub(crate) fn name(&self) -> String {
        format!("{}{}::{}", self.part, self.harness.name(), self.case.name)
    }

    /// Runs it where it applies.
    pub(crate) fn judge(&self) -> Verdict {
        let Self {
            harness, case, limit, ..
        } = self;
        if case.world > limit.ranks {
            let reason = format!("{} ranks, {} at most: {}", case.world, limit.ranks, limit.why);
            return Verdict::NotOffered(reason);
        }
        if let Some(reason) = case.unmet(harness.capabilities(), harness.real_processes()) {
            return Verdict::NotOffered(reason);
        }
        if self.again && !case.needs.contains(&Needs::RealProcesses) {
            let reason = "the first mode looks at it, this one at what kills a process; OXCCL_LONG=1 runs it here, too";
            return Verdict::NotOffered(reason.to_owned());
        }
        match harness.run(case) {
            Ok(()) => Verdict::Passed,
            Err(failure) => Verdict::Failed(failure),
        }
    }

    fn trial(self) -> Trial {
        Trial::ignorable_test(self.name(), move || match self.judge() {
            Verdict::Passed => Ok(Completion::Completed),
            Verdict::Failed(failure) => Err(failure.into()),
            Verdict::NotOffered(reason) => Ok(Completion::ignored_with(reason)),
        })
    }
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
    let plan = Plan {
        limit,
        ..Plan::new(device.clone(), modes, make)
    };
    plan.run()
}

/// How a whole test binary runs the suite, where [`run`], [`run_on`] and [`run_limited`] are not enough.
pub struct Plan {
    /// Rank 0's device (see [`device_of`]).
    pub device: Device,
    /// The suite runs in each; what an operation makes of the data of more than two ranks is looked at in the first, and with `OXCCL_LONG` in all: a backend
    /// does the same whether a peer is a thread or a process.
    pub modes: Vec<Mode>,
    /// Makes groups of the backend under test.
    pub make: MakeOn,
    /// How many ranks can run.
    pub limit: Limit,
    /// Ranks are dear to start: the cases that leave their group as they found it ([`Case::shares`]) run on one set of ranks
    /// per world, world after world and before all others.
    pub lasting: bool,
    /// The worlds of [`Worlds::Large`] too, on ranks that live through many cases.
    pub large: bool,
    /// How many cases run at once unless `--test-threads` says it; `None` is one per core in `cargo xtask test`, which runs suites side by
    /// side, and two dozen at least elsewhere. More, where starting mostly sleeps; fewer, where it computes.
    pub at_once: Option<usize>,
    /// The program of a process rank with its first arguments, if it is not this very binary without arguments. It must come to
    /// [`Plan::serve`] with a plan of the same backend.
    pub again: Vec<OsString>,
    /// Only some of the cases.
    pub part: Option<Part>,
}

/// Some of the cases.
#[derive(Clone, Copy)]
pub struct Part {
    /// Before their names.
    pub name: &'static str,
    /// Which.
    pub of: fn(&Case) -> bool,
}

impl Part {
    /// The cases that have messages, for a group whose messages another one matches: of a message that does not fit, it tells the ranks that are no
    /// end of it as of an abort.
    pub const fn messages(name: &'static str) -> Self {
        Self {
            name,
            of: |case| {
                let others =
                    case.world > 2 && case.needs.contains(&Needs::Feature(Feature::MismatchDetection));
                !others && case.needs.contains(&Needs::Op(OpKind::Recv))
            },
        }
    }
}

impl Plan {
    /// New ranks for each case, one case per core at once, no limit.
    pub fn new(device: Device, modes: &[Mode], make: MakeOn) -> Self {
        Self {
            device,
            modes: modes.to_vec(),
            make,
            limit: Limit::NONE,
            lasting: false,
            large: false,
            at_once: None,
            again: Vec::new(),
            part: None,
        }
    }

    fn harness(&self, mode: Mode, lasting: bool) -> Result<Arc<dyn Harness>> {
        Ok(match mode {
            Mode::Threads => {
                let threads = Threads::new(self.device.clone(), self.make.clone())?;
                Arc::new(if lasting { threads.lasting() } else { threads })
            }
            Mode::Processes => {
                let processes = Processes::new(&self.device, &self.make)?.started_by(self.again.clone());
                Arc::new(if lasting { processes.lasting() } else { processes })
            }
        })
    }

    /// The child's side: runs what this process was started for, if it is a rank of the suite.
    pub fn serve(&self) -> Option<Outcome> {
        let name = std::env::var(CASE).ok()?;
        Some(child(&name, &self.device, &self.make))
    }

    /// All cases and where they run, in order. Errors: the backend cannot be used here.
    pub(crate) fn laid_out(&self) -> Result<Vec<Placed>> {
        let parts = [(Worlds::Small, self.lasting), (Worlds::Large, true)];
        let mut placed = Vec::new();
        for (worlds, lasting) in parts.into_iter().take(1 + usize::from(self.large)) {
            let mut cases = cases_at(worlds);
            cases.retain(|case| self.part.is_none_or(|part| (part.of)(case)));
            if lasting {
                // Of those with ranks of their own the largest first: they take longest.
                cases.sort_by_key(|case| {
                    let world = if case.shares {
                        case.world
                    } else {
                        u32::MAX - case.world
                    };
                    (!case.shares, world)
                });
            }
            for (i, mode) in self.modes.iter().enumerate() {
                let harness = self.harness(*mode, lasting)?;
                placed.extend(cases.iter().map(|case| Placed {
                    harness: harness.clone(),
                    case: case.clone(),
                    part: self.part.map_or("", |part| part.name),
                    limit: match case.shares && i > 0 {
                        true => self.limit.min(Limit::of_data_again()),
                        false => self.limit,
                    },
                    again: i > 0 && self.limit.kills_only_again,
                }));
            }
        }
        Ok(placed)
    }

    /// The trials of every case, ignored with its reason where it does not apply. Errors: the backend cannot be used here.
    pub fn trials(&self) -> Result<Vec<Trial>> {
        Ok(self.laid_out()?.into_iter().map(Placed::trial).collect())
    }

    /// The whole test binary. First thing in `main`: process ranks begin here.
    pub fn run(self) -> ExitCode {
        self.run_with(&[])
    }

    /// As [`run`](Self::run), and the trials of `more` behind its own. Process ranks of theirs must come to their own [`serve`](Self::serve).
    pub fn run_with(self, more: &[Self]) -> ExitCode {
        match self.serve() {
            Some(Ok(())) => return ExitCode::SUCCESS,
            Some(Err(failure)) => {
                eprintln!("{failure}");
                return ExitCode::FAILURE;
            }
            None => {}
        }
        let mut arguments = Arguments::from_args();
        arguments.test_threads = arguments.test_threads.or(self.at_once).or_else(by_itself);
        let all = std::iter::once(&self).chain(more);
        let trials: Result<Vec<_>> = all.map(Self::trials).collect();
        let trials = match trials {
            Ok(trials) => trials.into_iter().flatten().collect(),
            Err(error) => {
                eprintln!("the backend cannot be used here: {error}");
                return ExitCode::FAILURE;
            }
        };
        let code = libtest_mimic::run(&arguments, trials).exit_code();
        forget();
        code
    }
}
