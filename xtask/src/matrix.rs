//! The test matrix: which rows there are, what each runs, and what must hold before it can run.
//!
//! A new row is one line in [`ROWS`]; a new reason to skip is a probe that finds it ([`Skip`]). Only
//! rows that exist are listed. `runner.rs` executes them.
//!
//! Over 800 lines because it is one table: a row of the matrix is one entry of `ROWS`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Duration;

use crate::metadata::{Metadata, Target};

/// All rows, in the order in which they run; those that run alone after the others.
pub(crate) const ROWS: &[Row] = &[
    // First what takes longest, or a row would run alone at the end.
    busy(row(
        "python",
        Some("python"),
        "the Python package: installed by pip, ruff, mypy, and pytest with ranks as processes, torch and torchft",
        python,
        Run::Python,
        minutes(25),
    )),
    row(
        "integration",
        None,
        "integration tests of the crates and fixtures",
        nothing,
        INTEGRATION,
        minutes(15),
    ),
    row(
        "e2e",
        None,
        "cross-crate: real processes, real kills, hostile bytes, slow links between network namespaces",
        loopback,
        E2E,
        minutes(15),
    ),
    busy(row(
        "programs",
        None,
        "tests of the training programs: real processes that are killed, stopped and run again",
        nothing,
        PROGRAMS,
        minutes(15),
    )),
    busy(row(
        "unit",
        None,
        "unit tests of every crate and program",
        nothing,
        Run::Unit,
        minutes(10),
    )),
    row(
        "doc",
        None,
        "doc tests of every crate",
        nothing,
        Run::Doc,
        minutes(15),
    ),
    // How fast another lighthouse takes over is told, and asserted with margins for a busy machine. It mostly waits: at the end nothing would run beside it.
    busy(row(
        "etcd",
        Some("etcd"),
        "the job's record on a real etcd of three members, several lighthouses, one of them killed",
        etcd,
        suite("etcd-conformance", ""),
        minutes(5),
    )),
    busy(row(
        "registry-model",
        None,
        "every interleaving of the registry's calls that a scheduler finds",
        nothing,
        Run::Feature {
            package: "ftcore",
            feature: "shuttle",
            target: "registry_model",
        },
        minutes(5),
    )),
    busy(row(
        "engine-model",
        None,
        "every interleaving of the engine's threads that a scheduler finds",
        nothing,
        Run::Feature {
            package: "ftcore",
            feature: "shuttle",
            target: "engine_model",
        },
        minutes(5),
    )),
    row(
        "loopback",
        None,
        "the backend of fixtures/loopback, the smallest on the engine",
        nothing,
        suite("loopback-conformance", ""),
        minutes(5),
    ),
    busy(row(
        "simulation",
        Some("protocol"),
        "replicas, servers and lighthouse together under virtual time: 5,000 seeds of faults",
        nothing,
        suite("simulation-conformance", ""),
        minutes(10),
    )),
    row(
        "hostile-peers",
        Some("protocol"),
        "strangers on the ports of a real lighthouse and a real manager server",
        loopback,
        suite("hostile-port-conformance", ""),
        minutes(5),
    ),
    row(
        "hostile-credentials",
        Some("protocol"),
        "strangers and forgers at a job with credentials that commits steps meanwhile",
        loopback,
        suite("hostile-credentials-conformance", ""),
        minutes(5),
    ),
    row(
        "gloo-tcp-threads",
        Some("gloo"),
        "ranks as threads, over TCP",
        loopback,
        suite("gloo-tcp-conformance", "threads::"),
        minutes(5),
    ),
    row(
        "gloo-tcp-processes",
        Some("gloo"),
        "ranks as processes, over TCP",
        loopback,
        suite("gloo-tcp-conformance", "processes::"),
        minutes(5),
    ),
    row(
        "gloo-encrypted",
        Some("gloo"),
        "over TCP with encrypted connections",
        loopback,
        suite("gloo-encrypted-conformance", ""),
        minutes(5),
    ),
    row(
        "gloo-shm-threads",
        Some("gloo"),
        "ranks as threads, over shared memory",
        loopback,
        suite("gloo-conformance", "threads::"),
        minutes(5),
    ),
    row(
        "gloo-shm-processes",
        Some("gloo"),
        "ranks as processes, over shared memory",
        loopback,
        suite("gloo-conformance", "processes::"),
        minutes(5),
    ),
    row(
        "gloo-mixed",
        Some("gloo"),
        "some pairs of ranks over shared memory, some over TCP",
        loopback,
        suite("gloo-mixed-conformance", ""),
        minutes(5),
    ),
    row(
        "gloo-in-place",
        Some("gloo"),
        "over shared memory, with tensors that ranks read in each other's memory",
        loopback,
        suite("gloo-in-place-conformance", ""),
        minutes(5),
    ),
    row(
        "gloo-connections",
        Some("gloo"),
        "large payloads over several TCP connections",
        loopback,
        suite("gloo-connections-conformance", ""),
        minutes(5),
    ),
    row(
        "gloo-by-device",
        Some("gloo"),
        "gloo as a member of a group that dispatches by device",
        loopback,
        suite("world-conformance", ""),
        minutes(5),
    ),
    row(
        "world-gloo",
        Some("gloo"),
        "gloo in groups that a world makes, ranks as processes",
        loopback,
        suite("through-world-conformance", ""),
        minutes(5),
    ),
    row(
        "world-gloo-split",
        Some("gloo"),
        "the same, split off the world's group",
        || split_groups(loopback()),
        suite("through-world-conformance", ""),
        minutes(5),
    ),
    row(
        "gloo-staged",
        Some("gloo"),
        "gloo behind device tensors, over a stand-in for the CUDA driver",
        nothing,
        suite("gloo-staged-conformance", ""),
        minutes(10),
    ),
    row(
        "gloo-isolated",
        Some("isolate"),
        "gloo in child processes",
        loopback,
        suite("isolate-conformance", ""),
        minutes(10),
    ),
    row(
        "gloo-library",
        Some("isolate"),
        "isolated gloo that hides its own abort, as a stand-in for a vendor library",
        loopback,
        suite("isolate-library-conformance", ""),
        minutes(10),
    ),
    row(
        "gloo-plugin",
        Some("plugin"),
        "gloo linked in, registered and as a dylib of itself: the same bits",
        loopback,
        suite("plugin-conformance", ""),
        minutes(10),
    ),
    row(
        "gloo-quantised",
        Some("quant"),
        "quantised collectives over gloo",
        loopback,
        suite("quant-conformance", ""),
        minutes(5),
    ),
    busy(row(
        "xccl",
        Some("xccl"),
        "the real oneCCL on host memory, ranks as processes",
        oneccl,
        suite("xccl-conformance", ""),
        minutes(15),
    )),
    busy(row(
        "xccl-isolated",
        Some("xccl"),
        "oneCCL in child processes: data, failures, reconfigure",
        oneccl,
        suite("xccl-isolated-conformance", ""),
        minutes(15),
    )),
    busy(row(
        "world-xccl",
        Some("xccl"),
        "isolated oneCCL in groups that a world makes",
        || world_of("xccl", oneccl()),
        suite("through-world-conformance", ""),
        minutes(10),
    )),
    busy(row(
        "world-xccl-split",
        Some("xccl"),
        "the same, split off the world's group",
        || split_groups(world_of("xccl", oneccl())),
        suite("through-world-conformance", ""),
        minutes(10),
    )),
    row(
        "xccl-table",
        Some("xccl"),
        "every reduction and dtype of oneCCL against the scalar oracle",
        oneccl,
        suite("xccl-table-conformance", ""),
        minutes(10),
    ),
    row(
        "xccl-lifecycle",
        Some("xccl"),
        "what oneCCL cannot do is said and bounded",
        oneccl,
        suite("xccl-lifecycle-conformance", ""),
        minutes(10),
    ),
    row(
        "xccl-kills",
        Some("xccl"),
        "isolated oneCCL under SIGKILL: recovery, nothing left behind",
        oneccl,
        suite("xccl-kills-conformance", ""),
        minutes(10),
    ),
    busy(row(
        "xccl-quantised",
        Some("xccl"),
        "quantised collectives over isolated oneCCL",
        oneccl,
        suite("xccl-quantised-conformance", ""),
        minutes(10),
    )),
    busy(row(
        "xccl-e2e",
        Some("xccl"),
        "train_diloco and train_ddp over oneCCL, one replica killed",
        oneccl,
        suite("xccl-e2e-conformance", ""),
        minutes(5),
    )),
    busy(row(
        "xccl-sycl",
        Some("xccl-sycl"),
        "the real oneCCL on SYCL queues and USM memory; SYCL's CPU device stands in for a GPU",
        oneccl_sycl,
        suite("xccl-sycl-conformance", ""),
        minutes(10),
    )),
    busy(row(
        "xccl-sycl-xpu",
        Some("xccl-sycl"),
        "order, devices, isolation and training state on xpu",
        oneccl_sycl,
        suite("xccl-xpu-conformance", ""),
        minutes(10),
    )),
    busy(row(
        "xccl-sycl-table",
        Some("xccl-sycl"),
        "every reduction and dtype of oneCCL on xpu against the scalar oracle",
        oneccl_sycl,
        suite("xccl-table-conformance", ""),
        minutes(5),
    )),
    busy(row(
        "xccl-sycl-e2e",
        Some("xccl-sycl"),
        "the training programs with --device xpu, a replica killed; SYCL's CPU device stands in for a GPU",
        oneccl_sycl,
        suite("xccl-xpu-e2e-conformance", ""),
        minutes(10),
    )),
    busy(row(
        "nccl-standin",
        Some("nccl-standin"),
        "the nccl backend over a stand-in for NCCL and the CUDA driver",
        nothing,
        suite("nccl-conformance", ""),
        minutes(10),
    )),
    row(
        "nccl-old-standin",
        Some("nccl-standin"),
        "the nccl backend over a stand-in without the functions after 2.27",
        nothing,
        suite("nccl-old-conformance", ""),
        minutes(10),
    ),
    busy(row(
        "nccl-isolated-standin",
        Some("nccl-standin"),
        "nccl in child processes, memory and events crossing by IPC, over the stand-in",
        nothing,
        suite("nccl-isolated-conformance", ""),
        minutes(10),
    )),
    row(
        "world-nccl-standin",
        Some("nccl-standin"),
        "nccl over the stand-in in groups that a world makes",
        || world_of("nccl", nothing()),
        suite("through-world-conformance", ""),
        minutes(5),
    ),
    row(
        "world-nccl-split-standin",
        Some("nccl-standin"),
        "the same, split off the world's group",
        || split_groups(world_of("nccl", nothing())),
        suite("through-world-conformance", ""),
        minutes(5),
    ),
    row(
        "nccl-library",
        Some("nccl-library"),
        "the real NCCL opened and asked for its version; no GPU needed",
        nccl_library,
        suite("nccl-library-conformance", ""),
        minutes(10),
    ),
    row(
        "nccl",
        Some("nccl"),
        "the real NCCL on a GPU",
        gpu,
        suite("nccl-real-conformance", ""),
        minutes(15),
    ),
    row(
        "nccl-isolated",
        Some("nccl"),
        "the real NCCL in child processes, memory and events crossing by IPC, on a GPU",
        gpu,
        suite("nccl-isolated-conformance", ""),
        minutes(10),
    ),
    row(
        "nccl-scenarios",
        Some("nccl"),
        "the nccl backend's scenarios that inject no fault, on a GPU",
        gpu,
        suite("nccl-errors", ""),
        minutes(10),
    ),
    row(
        "gloo-staged-gpu",
        Some("nccl"),
        "gloo behind CUDA tensors on a GPU",
        gpu,
        suite("gloo-staged-conformance", ""),
        minutes(10),
    ),
    row(
        "quant-cuda",
        Some("nccl"),
        "quantised collectives of CUDA tensors on a GPU, byte for byte those of the host",
        gpu,
        suite("quant-cuda-conformance", ""),
        minutes(10),
    ),
    row(
        "quant-cuda-standin",
        Some("nccl-standin"),
        "quantised collectives of CUDA tensors over the stand-in",
        nothing,
        suite("quant-cuda-conformance", ""),
        minutes(10),
    ),
    row(
        "cuda-kernels",
        Some("cuda-kernels"),
        "the kernels that quantise on CUDA devices, compiled by the real NVRTC for four generations of chips; no GPU needed",
        nvrtc,
        suite("cuda-kernels-conformance", ""),
        minutes(10),
    ),
    row(
        "hccl-standin",
        Some("plugin"),
        "the out-of-tree hccl plugin over a stand-in for Intel's libraries",
        nothing,
        Run::Apart {
            manifest: "plugins/hccl/Cargo.toml",
        },
        minutes(10),
    ),
    busy(row(
        "torchft",
        Some("torchft"),
        "the wire against the real torchft from PyPI, both ways and mixed",
        torchft,
        suite("torchft-conformance", ""),
        minutes(5),
    )),
    row(
        "mpich",
        Some("launchers"),
        "ranks started by the real MPICH",
        mpich,
        suite("launchers-conformance", "mpich::"),
        minutes(5),
    ),
    row(
        "open-mpi",
        Some("launchers"),
        "ranks started by the real Open MPI",
        open_mpi,
        suite("launchers-conformance", "open-mpi::"),
        minutes(5),
    ),
    row(
        "torchrun",
        Some("launchers"),
        "ranks started by the real torchrun, which has the store, and started again by it",
        torchrun,
        suite("launchers-conformance", "torchrun::"),
        minutes(5),
    ),
    row(
        "slurm",
        Some("launchers"),
        "ranks started by the real Slurm on a cluster of four nodes, a killed task, a requeued job",
        slurm,
        suite("launchers-conformance", "slurm::"),
        minutes(5),
    ),
    row(
        "kubernetes",
        None,
        "the documented commands and the manifests, by the real kubectl on a real API server",
        kubernetes,
        suite("kubernetes-conformance", ""),
        minutes(5),
    ),
    row(
        "observability",
        Some("observability"),
        "the dashboard in a real browser, metrics in a real Prometheus, spans in a real OpenTelemetry collector",
        observability,
        suite("observability-conformance", ""),
        minutes(3),
    ),
    long(row(
        "burn",
        None,
        "the adapter for burn, in a workspace of its own",
        nothing,
        Run::Apart {
            manifest: "crates/adapters/burn/Cargo.toml",
        },
        minutes(20),
    )),
    long(row(
        "measurements",
        None,
        "each program that the documents measure with, once and small",
        loopback,
        suite("measurements-conformance", ""),
        minutes(30),
    )),
    alone(row(
        "deaths",
        None,
        "how soon survivors hear of real kills",
        loopback,
        DEATHS,
        minutes(10),
    )),
];

/// The test targets with this at the end of their names are conformance suites: they run in rows of their own, never in
/// `integration`.
const CONFORMANCE: &str = "-conformance";
/// The package of the cross-crate tests.
const CROSS_CRATE: &str = "oxccl-tests";
/// The package of the training programs.
const EXAMPLES: &str = "oxccl-examples";

/// That of its targets that measures milliseconds.
const DEATH: &str = "gloo_kills";

const INTEGRATION: Run = Run::Integration(|package, _| package != CROSS_CRATE && package != EXAMPLES);
const PROGRAMS: Run = Run::Integration(|package, _| package == EXAMPLES);
const E2E: Run = Run::Integration(|package, target| package == CROSS_CRATE && target != DEATH);
const DEATHS: Run = Run::Integration(|package, target| package == CROSS_CRATE && target == DEATH);

/// The tests of the conformance suite `target` whose names contain `filter`.
const fn suite(target: &'static str, filter: &'static str) -> Run {
    Run::Suite { target, filter }
}

/// One row of the matrix.
pub(crate) struct Row {
    pub(crate) name: &'static str,
    /// The backend it tests, for `--require`.
    pub(crate) backend: Option<&'static str>,
    pub(crate) about: &'static str,
    /// Decides before the run whether it can run here, and fetches what it needs.
    pub(crate) probe: fn() -> Result<Environment, Skip>,
    pub(crate) run: Run,
    /// For the tests themselves; building has its own limit.
    pub(crate) limit: Duration,
    /// Never beside another row: it measures, and others would be measured with it.
    pub(crate) is_alone: bool,
    /// It mostly computes, where others mostly wait.
    pub(crate) is_busy: bool,
    /// Runs with `--long`, or by its name: it takes minutes to build, and little of it is ours.
    pub(crate) is_long: bool,
}

/// `row`, but never beside another one.
const fn alone(row: Row) -> Row {
    Row {
        is_alone: true,
        ..row
    }
}

/// `row`, but it computes all the time.
const fn busy(row: Row) -> Row {
    Row { is_busy: true, ..row }
}

impl Row {
    /// How many of `all` places it takes beside others.
    pub(crate) fn places(&self, all: usize) -> usize {
        match (self.is_alone, self.is_busy) {
            (true, _) => all,
            (false, true) => all.min(2),
            (false, false) => 1,
        }
    }
}

/// `row`, but not in the usual run.
const fn long(row: Row) -> Row {
    Row { is_long: true, ..row }
}

const fn row(
    name: &'static str,
    backend: Option<&'static str>,
    about: &'static str,
    probe: fn() -> Result<Environment, Skip>,
    run: Run,
    limit: Duration,
) -> Row {
    Row {
        name,
        backend,
        about,
        probe,
        run,
        limit,
        is_alone: false,
        is_busy: false,
        is_long: false,
    }
}

const fn minutes(n: u64) -> Duration {
    Duration::from_secs(60 * n)
}

/// What a row runs.
pub(crate) enum Run {
    /// The unit tests of the workspace.
    Unit,
    /// Its doc tests.
    Doc,
    /// The test targets that this takes by the names of their package and their own, without conformance suites. As all that follow, they are
    /// selected out of the whole workspace, so that dependencies have one set of features and are built once.
    Integration(fn(&str, &str) -> bool),
    /// One test target.
    Suite {
        target: &'static str,
        /// Only tests whose name contains this; empty for all.
        filter: &'static str,
    },
    /// One test target with a feature that is otherwise off.
    Feature {
        package: &'static str,
        feature: &'static str,
        target: &'static str,
    },
    /// Every test of another workspace in this repository, by its manifest.
    Apart { manifest: &'static str },
    /// The Python package, which has tools of its own (`python.rs`).
    Python,
}

/// Environment variables that a row's tests need.
pub(crate) type Environment = Vec<(String, String)>;

/// A `cargo test` call, in parts, so that the same call can build first (`--no-run`) and run later.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TestCall {
    /// After `cargo test`.
    pub(crate) select: Vec<String>,
    /// After `--`.
    pub(crate) pass: Vec<String>,
    /// Doc tests are built by rustdoc while they run: they have no `--no-run`.
    pub(crate) is_doc: bool,
}

impl Run {
    /// What cargo builds in the workspace for this row; `None` for rows that need a build of their own.
    pub(crate) fn targets(&self, metadata: &Metadata) -> Option<Targets> {
        match self {
            Self::Unit => Some(Targets {
                is_unit: true,
                ..Targets::default()
            }),
            Self::Integration(takes) => Some(Targets {
                tests: test_targets(metadata, *takes),
                examples: tested_examples(metadata, *takes),
                ..Targets::default()
            }),
            Self::Suite { target, .. } => Some(Targets {
                tests: BTreeSet::from([(*target).to_owned()]),
                ..Targets::default()
            }),
            Self::Doc | Self::Feature { .. } | Self::Apart { .. } | Self::Python => None,
        }
    }

    /// The test calls of this row.
    pub(crate) fn calls(&self, metadata: &Metadata, long: bool) -> Vec<TestCall> {
        let mut pass = Vec::new();
        if let Self::Suite { filter, .. } = self
            && !filter.is_empty()
        {
            pass.push((*filter).to_owned());
        }
        let may_be_long = !matches!(self, Self::Doc | Self::Feature { .. });
        if long && may_be_long {
            pass.push("--include-ignored".to_owned());
        }
        if let Some(targets) = self.targets(metadata) {
            return vec![TestCall {
                select: targets.select(),
                pass,
                is_doc: false,
            }];
        }
        let strings = |items: &[&str]| items.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
        match self {
            Self::Doc => vec![TestCall {
                select: strings(&["--no-fail-fast", "--workspace", "--doc"]),
                pass,
                is_doc: true,
            }],
            Self::Feature {
                package,
                feature,
                target,
            } => vec![TestCall {
                select: strings(&[
                    "--no-fail-fast",
                    "--package",
                    package,
                    "--features",
                    feature,
                    "--test",
                    target,
                ]),
                pass,
                is_doc: false,
            }],
            Self::Apart { manifest } => {
                vec![TestCall {
                    // Third-party crates are the same in both lock files, and already built there.
                    select: strings(&[
                        "--no-fail-fast",
                        "--locked",
                        "--manifest-path",
                        manifest,
                        "--target-dir",
                        &metadata.target_directory.to_string_lossy(),
                    ]),
                    pass,
                    is_doc: false,
                }]
            }
            Self::Unit | Self::Integration(_) | Self::Suite { .. } | Self::Python => Vec::new(),
        }
    }
}

/// Targets of the workspace.
#[derive(Debug, Default)]
pub(crate) struct Targets {
    /// The libraries and programs, with their unit tests.
    is_unit: bool,
    /// Test targets, by name.
    tests: BTreeSet<String>,
    /// Programs of examples, by name.
    examples: BTreeSet<String>,
}

impl Targets {
    /// All of these, too.
    pub(crate) fn add(&mut self, other: Self) {
        self.is_unit |= other.is_unit;
        self.tests.extend(other.tests);
        self.examples.extend(other.examples);
    }

    /// After `cargo test`. Test targets are named one by one: cargo cannot leave out a single one.
    pub(crate) fn select(&self) -> Vec<String> {
        let mut select = vec!["--no-fail-fast".to_owned(), "--workspace".to_owned()];
        if self.is_unit {
            select.extend(["--lib".to_owned(), "--bins".to_owned()]);
        }
        for test in &self.tests {
            select.extend(["--test".to_owned(), test.clone()]);
        }
        select
    }

    /// After `cargo build`: the programs of examples, which `cargo test` builds only as tests once targets are named, and the libraries, some of which
    /// tests load (`conformance::dylib`); `None` without examples.
    pub(crate) fn select_examples(&self) -> Option<Vec<String>> {
        let named = self
            .examples
            .iter()
            .flat_map(|name| ["--example".to_owned(), name.clone()]);
        let select: Vec<String> = ["--workspace", "--lib"]
            .map(str::to_owned)
            .into_iter()
            .chain(named)
            .collect();
        (!self.examples.is_empty()).then_some(select)
    }
}

/// The names of the integration tests that `chosen` takes by package and name; conformance suites are rows of their own. A name stands for the targets
/// of all packages that have it, so that it belongs to the row of the first of them.
fn test_targets(metadata: &Metadata, chosen: impl Fn(&str, &str) -> bool) -> BTreeSet<String> {
    let mut owners = BTreeMap::new();
    for package in &metadata.packages {
        let targets = package.targets.iter().filter(|t| package.builds_by_default(t));
        for target in targets.filter(|t| t.kind.iter().any(|k| k == "test") && !t.name.ends_with(CONFORMANCE))
        {
            owners
                .entry(target.name.as_str())
                .or_insert(package.name.as_str());
        }
    }
    let mine = owners.into_iter().filter(|(name, owner)| chosen(owner, name));
    mine.map(|(name, _)| name.to_owned()).collect()
}

/// The programs of examples that a test target named `examples` runs: those of its package and of the packages that it depends on directly.
fn tested_examples(metadata: &Metadata, chosen: impl Fn(&str, &str) -> bool) -> BTreeSet<String> {
    let is = |target: &Target, kind: &str| target.kind.iter().any(|k| k == kind);
    let owners = metadata.packages.iter().filter(|package| {
        let mut targets = package.targets.iter();
        targets.any(|t| is(t, "test") && t.name == "examples") && chosen(&package.name, "examples")
    });
    let tested: BTreeSet<&str> = owners
        .flat_map(|owner| {
            let dependencies = owner.dependencies.iter().map(|d| d.name.as_str());
            dependencies.chain([owner.name.as_str()])
        })
        .collect();
    let packages = metadata
        .packages
        .iter()
        .filter(|p| tested.contains(p.name.as_str()));
    packages
        .flat_map(|package| package.targets.iter().filter(|t| is(t, "example")))
        .map(|target| target.name.clone())
        .collect()
}

/// Why a row cannot run on this machine. Decided by a probe, never by the tests themselves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Skip {
    /// Something is not here.
    Missing {
        what: &'static str,
        why: String,
        /// This machine could have it: what is wrong is ours.
        is_defect: bool,
    },
    /// It takes long, and was not asked for.
    Long { name: &'static str },
}

impl Skip {
    /// `what` is not here, which is no fault of ours.
    pub(crate) fn missing(what: &'static str, why: impl fmt::Display) -> Self {
        Self::Missing {
            what,
            // The whole of an error.
            why: format!("{why:#}"),
            is_defect: false,
        }
    }

    /// oneCCL, which CI requires where it can be installed.
    pub(crate) fn oneccl(why: &anyhow::Error) -> Self {
        Self::Missing {
            what: "oneCCL cannot be had",
            why: format!("{why:#}"),
            is_defect: crate::wheels::is_defect(why),
        }
    }

    /// True if what the row needs can be installed here, and the skip only hides that we fail to.
    pub(crate) fn is_defect(&self) -> bool {
        matches!(self, Self::Missing { is_defect: true, .. })
    }
}

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { what, why, .. } => write!(f, "{what}: {why}"),
            Self::Long { name } => write!(
                f,
                "takes minutes to build: `cargo xtask test --row {name}`, or --long"
            ),
        }
    }
}

impl std::error::Error for Skip {}

/// The variable that names what was prepared.
fn named(variable: &str, path: &std::path::Path) -> Environment {
    vec![(variable.to_owned(), path.display().to_string())]
}

/// Needs nothing.
fn nothing() -> Result<Environment, Skip> {
    Ok(Environment::new())
}

/// What the row needs besides, and the backend of `crates/world/tests/through_world.rs`.
fn world_of(backend: &str, needs: Result<Environment, Skip>) -> Result<Environment, Skip> {
    let mut environment = needs?;
    environment.push(("OXCCL_TEST_WORLD".to_owned(), backend.to_owned()));
    Ok(environment)
}

/// What the row needs besides, with groups that are split off the world's.
fn split_groups(needs: Result<Environment, Skip>) -> Result<Environment, Skip> {
    let mut environment = needs?;
    environment.push(("OXCCL_SPLIT_GROUPS".to_owned(), "1".to_owned()));
    Ok(environment)
}

/// Needs TCP connections over the loopback interface.
fn loopback() -> Result<Environment, Skip> {
    let connect = || {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        TcpStream::connect_timeout(&listener.local_addr()?, Duration::from_secs(5))
    };
    connect()
        .map(|_| Environment::new())
        .map_err(|e| Skip::missing("no TCP over 127.0.0.1", e))
}

/// Needs an NVIDIA GPU with its driver. A library that is not named is the one of the row `nccl-library`.
fn gpu() -> Result<Environment, Skip> {
    if !std::path::Path::new("/dev/nvidiactl").exists() {
        return Err(Skip::missing(
            "no NVIDIA GPU here",
            "/dev/nvidiactl does not exist",
        ));
    }
    let mut environment = vec![
        ("OXCCL_GPU_TESTS".to_owned(), "1".to_owned()),
        // Several ranks on one GPU, where the library allows it.
        ("NCCL_MULTI_RANK_GPU_ENABLE".to_owned(), "1".to_owned()),
        // Else the first collective waits in `submit` for the other ranks.
        ("NCCL_RUNTIME_CONNECT".to_owned(), "0".to_owned()),
    ];
    let is_named = |name: &str| std::env::var_os(name).is_some_and(|v| !v.is_empty());
    if !is_named("OXCCL_NCCL_PATH") {
        environment.extend(nccl_library()?);
    }
    if !is_named("OXCCL_NVRTC_PATH") {
        environment.extend(nvrtc()?);
    }
    Ok(environment)
}

/// Needs the real NVRTC, which is fetched once.
fn nvrtc() -> Result<Environment, Skip> {
    let folder = crate::nvrtc::prepare().map_err(|e| Skip::missing("NVRTC cannot be had", e))?;
    Ok(named("OXCCL_NVRTC_PATH", &folder))
}

/// Needs the real oneCCL, which is fetched and built once.
pub(crate) fn oneccl() -> Result<Environment, Skip> {
    let folder = crate::oneccl::prepare().map_err(|e| Skip::oneccl(&e))?;
    Ok(named("OXCCL_XCCL_PATH", &folder))
}

/// Needs the real oneCCL with SYCL's CPU device.
pub(crate) fn oneccl_sycl() -> Result<Environment, Skip> {
    let folder = crate::oneccl_sycl::prepare().map_err(|e| Skip::oneccl(&e))?;
    Ok(crate::oneccl_sycl::environment(&folder))
}

/// Needs the real NCCL's library, which is fetched once.
pub(crate) fn nccl_library() -> Result<Environment, Skip> {
    let folder = crate::nccl::prepare().map_err(|e| Skip::missing("NCCL cannot be had", e))?;
    Ok(named("OXCCL_NCCL_PATH", &folder))
}

/// Needs Python with the tools of the package, which are fetched once.
fn python() -> Result<Environment, Skip> {
    crate::python::prepare()
        .map(|_| Environment::new())
        .map_err(|e| Skip::missing("the Python package cannot be built", e))
}

/// Needs the real torchft, which is fetched once.
pub(crate) fn torchft() -> Result<Environment, Skip> {
    let folder = crate::torchft::prepare().map_err(|e| Skip::missing("torchft cannot be had", e))?;
    Ok(named("OXCCL_TORCHFT_PATH", &folder))
}

fn launcher(found: anyhow::Result<Environment>) -> Result<Environment, Skip> {
    found.map_err(|e| Skip::missing("the launcher cannot be had", e))
}

/// Needs MPICH, which is fetched once.
fn mpich() -> Result<Environment, Skip> {
    launcher(crate::launchers::mpich())
}

/// Needs torch, which is fetched once.
fn torchrun() -> Result<Environment, Skip> {
    launcher(crate::launchers::torchrun())
}

/// Needs Open MPI, which is fetched once.
fn open_mpi() -> Result<Environment, Skip> {
    launcher(crate::launchers::open_mpi())
}

/// Needs Slurm, which root can install.
fn slurm() -> Result<Environment, Skip> {
    launcher(crate::launchers::slurm())
}

/// Needs a real etcd, which is fetched once, and TCP over the loopback interface.
fn etcd() -> Result<Environment, Skip> {
    let mut environment = loopback()?;
    let program = crate::etcd::prepare().map_err(|e| Skip::missing("etcd cannot be had", e))?;
    environment.extend(named("OXCCL_ETCD_PATH", &program));
    Ok(environment)
}

/// Needs `kube-apiserver` and `kubectl` where Kubernetes' own tests look for them; no registry of packages has the server. And etcd.
fn kubernetes() -> Result<Environment, Skip> {
    let no_server = |why: String| Skip::missing("no API server of Kubernetes", why);
    let missing = |why: String| {
        no_server(format!(
            "{why} (`setup-envtest use -p path` fetches such a folder and prints its path)"
        ))
    };
    let folder = std::env::var_os("KUBEBUILDER_ASSETS").ok_or_else(|| {
        missing("KUBEBUILDER_ASSETS names no folder with kube-apiserver and kubectl".into())
    })?;
    let folder = std::path::Path::new(&folder);
    for program in ["kube-apiserver", "kubectl"] {
        if !folder.join(program).is_file() {
            return Err(missing(format!(
                "KUBEBUILDER_ASSETS={} has no {program}",
                folder.display()
            )));
        }
    }
    if !crate::wheels::is_program("openssl") {
        return Err(no_server(
            "openssl is not installed, which makes the server's key".to_owned(),
        ));
    }
    etcd()
}

/// Needs Chromium and Prometheus, which root can install, a wheel with rotel, and TCP over the loopback interface.
fn observability() -> Result<Environment, Skip> {
    let mut environment = loopback()?;
    let found = crate::observability::prepare();
    environment.extend(found.map_err(|e| Skip::missing("Chromium and Prometheus cannot be had", e))?);
    Ok(environment)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata() -> Metadata {
        let json = r#"{"workspace_root":"/w","target_directory":"/w/target","packages":[
            {"name":"ftcore","manifest_path":"/w/crates/ftcore/Cargo.toml","dependencies":[],"targets":[
                {"name":"ftcore","kind":["lib"]},{"name":"stores","kind":["test"]},{"name":"resume","kind":["test"]}]},
            {"name":"oxccl-examples","manifest_path":"/w/examples/Cargo.toml","dependencies":[],"targets":[
                {"name":"resume","kind":["test"]},{"name":"steps","kind":["test"]},{"name":"plot","kind":["example"]}]},
            {"name":"oxccl","manifest_path":"/w/crates/oxccl/Cargo.toml","dependencies":[],"targets":[
                {"name":"ddp","kind":["example"]},{"name":"diloco","kind":["example"]}]},
            {"name":"oxccl-cli","manifest_path":"/w/apps/oxccl/Cargo.toml","dependencies":[{"name":"oxccl","req":"*","kind":null}],"targets":[
                {"name":"examples","kind":["test"]}]},
            {"name":"backend-gloo","manifest_path":"/w/crates/backend-gloo/Cargo.toml","dependencies":[],"targets":[
                {"name":"gloo-conformance","kind":["test"]},{"name":"abort","kind":["test"]},
                {"name":"model","kind":["test"],"required-features":["odd"]},
                {"name":"host","kind":["test"],"required-features":["host"]}],
                "features":{"default":["all"],"all":["host"],"odd":[]}},
            {"name":"oxccl-tests","manifest_path":"/w/tests/Cargo.toml","dependencies":[],"targets":[
                {"name":"kill","kind":["test"]},{"name":"gloo_kills","kind":["test"]}]}]}"#;
        Metadata::parse(json.as_bytes()).unwrap()
    }

    fn selected(run: &Run) -> String {
        run.calls(&metadata(), false).first().unwrap().select.join(" ")
    }

    #[test]
    fn unit_integration_and_doc_tests_are_rows_of_their_own_and_each_target_is_in_one() {
        assert_eq!(selected(&Run::Unit), "--no-fail-fast --workspace --lib --bins");
        // `resume` is the name of a target of two packages.
        assert_eq!(
            selected(&INTEGRATION),
            "--no-fail-fast --workspace --test abort --test examples --test host --test resume --test stores"
        );
        assert_eq!(selected(&PROGRAMS), "--no-fail-fast --workspace --test steps");
        assert!(
            Run::Doc
                .calls(&metadata(), true)
                .iter()
                .all(|c| c.is_doc && c.pass.is_empty())
        );
    }

    #[test]
    fn examples_are_built_for_the_test_that_runs_them() {
        let examples = |run: &Run| run.targets(&metadata()).unwrap().select_examples();
        assert_eq!(
            examples(&INTEGRATION).unwrap().join(" "),
            "--workspace --lib --example ddp --example diloco"
        );
        assert_eq!(examples(&PROGRAMS), None);
    }

    #[test]
    fn one_build_has_the_targets_of_many_rows() {
        let mut all = Targets::default();
        for run in [
            &suite("gloo-conformance", "threads::"),
            &E2E,
            &Run::Unit,
            &Run::Doc,
        ] {
            if let Some(targets) = run.targets(&metadata()) {
                all.add(targets);
            }
        }
        assert_eq!(
            all.select().join(" "),
            "--no-fail-fast --workspace --lib --bins --test gloo-conformance --test kill"
        );
    }

    #[test]
    fn a_suite_row_selects_its_target_out_of_the_workspace_and_filters() {
        let calls = suite("gloo-conformance", "threads::").calls(&metadata(), true);
        let call = calls.first().unwrap();
        assert_eq!(
            call.select.join(" "),
            "--no-fail-fast --workspace --test gloo-conformance"
        );
        assert_eq!(call.pass, ["threads::", "--include-ignored"]);
        assert!(
            suite("x", "")
                .calls(&metadata(), false)
                .first()
                .unwrap()
                .pass
                .is_empty()
        );
    }

    #[test]
    fn a_row_of_another_workspace_uses_its_own_lock_file() {
        let run = Run::Apart {
            manifest: "plugins/hccl/Cargo.toml",
        };
        assert_eq!(
            run.calls(&metadata(), false).first().unwrap().select.join(" "),
            "--no-fail-fast --locked --manifest-path plugins/hccl/Cargo.toml --target-dir /w/target"
        );
    }

    #[test]
    fn the_cross_crate_row_selects_the_targets_of_its_package_out_of_the_workspace() {
        let calls = E2E.calls(&metadata(), false);
        assert_eq!(
            calls.first().unwrap().select.join(" "),
            "--no-fail-fast --workspace --test kill"
        );
        assert_eq!(selected(&DEATHS), "--no-fail-fast --workspace --test gloo_kills");
    }

    #[test]
    fn row_names_are_unique_and_easy_to_type() {
        let names: BTreeSet<&str> = ROWS.iter().map(|r| r.name).collect();
        assert_eq!(names.len(), ROWS.len());
        assert!(names.iter().all(|n| {
            n.chars()
                .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
        }));
    }
}
