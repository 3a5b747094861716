//! The test matrix: which rows there are, what each runs, and what must hold before it can run.
//!
//! A new row is one line in [`ROWS`]; a new reason to skip is a variant of [`Skip`] and a probe that finds it. Only
//! rows that exist are listed. `runner.rs` executes them.
//!
//! Over 800 lines because it is one table: a row of the matrix is one entry of `ROWS`.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Duration;

use crate::metadata::Metadata;

/// All rows, in the order in which they run; those that run alone after the others.
pub(crate) const ROWS: &[Row] = &[
    row(
        "unit",
        None,
        "unit, integration and doc tests of every crate",
        nothing,
        UNIT,
        minutes(25),
    ),
    row(
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
    ),
    row(
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
    ),
    row(
        "loopback",
        None,
        "the backend of fixtures/loopback, the smallest on the engine",
        nothing,
        suite("loopback-conformance", ""),
        minutes(5),
    ),
    row(
        "simulation",
        Some("protocol"),
        "replicas, servers and lighthouse together under virtual time: 5,000 seeds of faults",
        nothing,
        suite("simulation-conformance", ""),
        minutes(10),
    ),
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
    row(
        "xccl",
        Some("xccl"),
        "the real oneCCL on host memory, ranks as processes",
        oneccl,
        suite("xccl-conformance", ""),
        minutes(15),
    ),
    row(
        "xccl-isolated",
        Some("xccl"),
        "oneCCL in child processes: data, failures, reconfigure",
        oneccl,
        suite("xccl-isolated-conformance", ""),
        minutes(15),
    ),
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
    row(
        "xccl-quantised",
        Some("xccl"),
        "quantised collectives over isolated oneCCL",
        oneccl,
        suite("xccl-quantised-conformance", ""),
        minutes(10),
    ),
    row(
        "xccl-e2e",
        Some("xccl"),
        "train_diloco and train_ddp over oneCCL, one replica killed",
        oneccl,
        suite("xccl-e2e-conformance", ""),
        minutes(5),
    ),
    row(
        "xccl-sycl",
        Some("xccl-sycl"),
        "the real oneCCL on SYCL queues and USM memory; SYCL's CPU device stands in for a GPU",
        oneccl_sycl,
        suite("xccl-sycl-conformance", ""),
        minutes(10),
    ),
    row(
        "xccl-sycl-xpu",
        Some("xccl-sycl"),
        "order, devices, isolation and training state on xpu",
        oneccl_sycl,
        suite("xccl-xpu-conformance", ""),
        minutes(10),
    ),
    row(
        "xccl-sycl-table",
        Some("xccl-sycl"),
        "every reduction and dtype of oneCCL on xpu against the scalar oracle",
        oneccl_sycl,
        suite("xccl-table-conformance", ""),
        minutes(5),
    ),
    row(
        "xccl-sycl-e2e",
        Some("xccl-sycl"),
        "the training programs with --device xpu, a replica killed; SYCL's CPU device stands in for a GPU",
        oneccl_sycl,
        suite("xccl-xpu-e2e-conformance", ""),
        minutes(10),
    ),
    row(
        "nccl-standin",
        Some("nccl-standin"),
        "the nccl backend over a stand-in for NCCL and the CUDA driver",
        nothing,
        suite("nccl-conformance", ""),
        minutes(10),
    ),
    row(
        "nccl-old-standin",
        Some("nccl-standin"),
        "the nccl backend over a stand-in without the functions after 2.19",
        nothing,
        suite("nccl-old-conformance", ""),
        minutes(10),
    ),
    row(
        "nccl-isolated-standin",
        Some("nccl-standin"),
        "nccl in child processes, memory and events crossing by IPC, over the stand-in",
        nothing,
        suite("nccl-isolated-conformance", ""),
        minutes(10),
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
        "hccl-standin",
        Some("plugin"),
        "the out-of-tree hccl plugin over a stand-in for Intel's libraries",
        nothing,
        Run::Apart {
            manifest: "plugins/hccl/Cargo.toml",
        },
        minutes(10),
    ),
    row(
        "torchft",
        Some("torchft"),
        "the wire against the real torchft from PyPI, both ways and mixed",
        torchft,
        suite("torchft-conformance", ""),
        minutes(5),
    ),
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
        None,
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
    // Measures how fast another lighthouse takes over.
    alone(row(
        "etcd",
        Some("etcd"),
        "the job's record on a real etcd of three members, several lighthouses, one of them killed",
        etcd,
        suite("etcd-conformance", ""),
        minutes(5),
    )),
    row(
        "python",
        Some("python"),
        "the Python package: installed by pip, ruff, mypy, and pytest with ranks as processes, torch and torchft",
        python,
        Run::Python,
        minutes(25),
    ),
    // Measures how fast links carry and survivors hear.
    alone(row(
        "e2e",
        None,
        "cross-crate: real processes, real kills",
        loopback,
        E2E,
        minutes(10),
    )),
];

/// The test targets with this at the end of their names are conformance suites: they run in rows of their own, never in
/// `unit`.
const CONFORMANCE: &str = "-conformance";
/// The package of the cross-crate tests.
const CROSS_CRATE: &str = "oxccl-tests";

const UNIT: Run = Run::Workspace;
const E2E: Run = Run::CrossCrate;

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
}

/// `row`, but never beside another one.
const fn alone(row: Row) -> Row {
    Row {
        is_alone: true,
        ..row
    }
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
    }
}

const fn minutes(n: u64) -> Duration {
    Duration::from_secs(60 * n)
}

/// What a row runs.
pub(crate) enum Run {
    /// Every test of the workspace that no other row has.
    Workspace,
    /// One test target. It is selected out of the whole workspace, so that dependencies have the features with which the
    /// unit row built them and are not built again.
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
    /// The cross-crate tests, selected likewise.
    CrossCrate,
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
    /// The test calls of this row.
    pub(crate) fn calls(&self, metadata: &Metadata, long: bool) -> Vec<TestCall> {
        let mut pass = Vec::new();
        let strings = |items: &[&str]| items.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
        match self {
            Self::Workspace => {
                if long {
                    pass.push("--include-ignored".to_owned());
                }
                let all = ["--no-fail-fast", "--workspace", "--exclude", CROSS_CRATE];
                let mut select = strings(&all);
                select.extend(strings(&["--lib", "--bins"]));
                // Named one by one: cargo cannot leave out a single target.
                for target in test_targets(metadata, |package| package != CROSS_CRATE) {
                    select.extend(["--test".to_owned(), target]);
                }
                let mut doc = strings(&all);
                doc.push("--doc".to_owned());
                vec![
                    TestCall {
                        select,
                        pass,
                        is_doc: false,
                    },
                    TestCall {
                        select: doc,
                        pass: Vec::new(),
                        is_doc: true,
                    },
                ]
            }
            Self::Suite { target, filter } => {
                if !filter.is_empty() {
                    pass.push((*filter).to_owned());
                }
                if long {
                    pass.push("--include-ignored".to_owned());
                }
                vec![TestCall {
                    select: strings(&["--no-fail-fast", "--workspace", "--test", target]),
                    pass,
                    is_doc: false,
                }]
            }
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
                if long {
                    pass.push("--include-ignored".to_owned());
                }
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
            Self::Python => Vec::new(),
            Self::CrossCrate => {
                if long {
                    pass.push("--include-ignored".to_owned());
                }
                let mut select = strings(&["--no-fail-fast", "--workspace"]);
                for target in test_targets(metadata, |package| package == CROSS_CRATE) {
                    select.extend(["--test".to_owned(), target]);
                }
                vec![TestCall {
                    select,
                    pass,
                    is_doc: false,
                }]
            }
        }
    }
}

/// The names of the integration tests of the packages that `chosen` takes; conformance suites are rows of their own.
fn test_targets(metadata: &Metadata, chosen: impl Fn(&str) -> bool) -> BTreeSet<String> {
    metadata
        .packages
        .iter()
        .filter(|p| chosen(&p.name))
        .flat_map(|p| p.targets.iter().filter(|t| p.builds_by_default(t)))
        .filter(|t| t.kind.iter().any(|k| k == "test") && !t.name.ends_with(CONFORMANCE))
        .map(|t| t.name.clone())
        .collect()
}

/// Why a row cannot run on this machine. Decided by a probe, never by the tests themselves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Skip {
    /// TCP over 127.0.0.1 does not work.
    Loopback { why: String },
    /// The real oneCCL cannot be had.
    Oneccl {
        why: String,
        /// This machine could have it: what is wrong is ours.
        is_defect: bool,
    },
    /// The real NCCL's library cannot be had.
    NcclLibrary { why: String },
    /// The real torchft cannot be had.
    Torchft { why: String },
    /// The launcher cannot be had.
    Launcher { why: String },
    /// A real etcd cannot be had.
    Etcd { why: String },
    /// Python, or the tools of the package, cannot be had.
    Python { why: String },
    /// No NVIDIA driver runs here.
    Gpu,
}

impl Skip {
    /// True if what the row needs can be installed here, and the skip only hides that we fail to.
    pub(crate) fn is_defect(&self) -> bool {
        matches!(self, Self::Oneccl { is_defect: true, .. })
    }
}

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Loopback { why } => write!(f, "no TCP over 127.0.0.1: {why}"),
            Self::Gpu => f.write_str("no NVIDIA GPU here (/dev/nvidiactl does not exist)"),
            Self::NcclLibrary { why } => write!(f, "NCCL cannot be had: {why}"),
            Self::Python { why } => write!(f, "the Python package cannot be built: {why}"),
            Self::Torchft { why } => write!(f, "torchft cannot be had: {why}"),
            Self::Launcher { why } => write!(f, "the launcher cannot be had: {why}"),
            Self::Etcd { why } => write!(f, "etcd cannot be had: {why}"),
            Self::Oneccl { why, .. } => write!(f, "oneCCL cannot be had: {why}"),
        }
    }
}

/// Needs nothing.
fn nothing() -> Result<Environment, Skip> {
    Ok(Environment::new())
}

/// Needs TCP connections over the loopback interface.
fn loopback() -> Result<Environment, Skip> {
    let connect = || {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        TcpStream::connect_timeout(&listener.local_addr()?, Duration::from_secs(5))
    };
    connect()
        .map(|_| Environment::new())
        .map_err(|e| Skip::Loopback { why: e.to_string() })
}

/// Needs an NVIDIA GPU with its driver.
fn gpu() -> Result<Environment, Skip> {
    if std::path::Path::new("/dev/nvidiactl").exists() {
        // Several ranks on one GPU, where the library allows it.
        Ok(vec![("NCCL_MULTI_RANK_GPU_ENABLE".to_owned(), "1".to_owned())])
    } else {
        Err(Skip::Gpu)
    }
}

/// Needs the real oneCCL, which is fetched and built once.
fn oneccl() -> Result<Environment, Skip> {
    let folder = crate::oneccl::prepare().map_err(|e| Skip::Oneccl {
        why: e.to_string(),
        is_defect: e.is_defect(),
    })?;
    Ok(vec![("OXCCL_XCCL_PATH".to_owned(), folder.display().to_string())])
}

/// Needs the real oneCCL with SYCL's CPU device.
fn oneccl_sycl() -> Result<Environment, Skip> {
    let folder = crate::oneccl_sycl::prepare().map_err(|e| Skip::Oneccl {
        why: e.to_string(),
        is_defect: e.is_defect(),
    })?;
    Ok(crate::oneccl_sycl::environment(&folder))
}

/// Needs the real NCCL's library, which is fetched once.
fn nccl_library() -> Result<Environment, Skip> {
    let folder = crate::nccl::prepare().map_err(|e| Skip::NcclLibrary { why: e.to_string() })?;
    Ok(vec![("OXCCL_NCCL_PATH".to_owned(), folder.display().to_string())])
}

/// Needs Python with the tools of the package, which are fetched once.
fn python() -> Result<Environment, Skip> {
    crate::python::prepare()
        .map(|_| Environment::new())
        .map_err(|e| Skip::Python {
            why: format!("{e:#}"),
        })
}

/// Needs the real torchft, which is fetched once.
fn torchft() -> Result<Environment, Skip> {
    let folder = crate::torchft::prepare().map_err(|e| Skip::Torchft { why: e.to_string() })?;
    Ok(vec![(
        "OXCCL_TORCHFT_PATH".to_owned(),
        folder.display().to_string(),
    )])
}

fn launcher(found: anyhow::Result<Environment>) -> Result<Environment, Skip> {
    found.map_err(|e| Skip::Launcher {
        why: format!("{e:#}"),
    })
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
    let program = crate::etcd::prepare().map_err(|e| Skip::Etcd { why: e.to_string() })?;
    environment.push(("OXCCL_ETCD_PATH".to_owned(), program.display().to_string()));
    Ok(environment)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata() -> Metadata {
        let json = r#"{"workspace_root":"/w","target_directory":"/w/target","packages":[
            {"name":"ftcore","manifest_path":"/w/crates/ftcore/Cargo.toml","dependencies":[],"targets":[
                {"name":"ftcore","kind":["lib"]},{"name":"stores","kind":["test"]}]},
            {"name":"backend-gloo","manifest_path":"/w/crates/backend-gloo/Cargo.toml","dependencies":[],"targets":[
                {"name":"gloo-conformance","kind":["test"]},{"name":"abort","kind":["test"]},
                {"name":"model","kind":["test"],"required-features":["odd"]},
                {"name":"host","kind":["test"],"required-features":["host"]}],
                "features":{"default":["all"],"all":["host"],"odd":[]}},
            {"name":"oxccl-tests","manifest_path":"/w/tests/Cargo.toml","dependencies":[],"targets":[
                {"name":"kill","kind":["test"]}]}]}"#;
        Metadata::parse(json.as_bytes()).unwrap()
    }

    #[test]
    fn the_unit_row_runs_all_but_conformance_and_cross_crate_tests() {
        let calls = UNIT.calls(&metadata(), false);
        let text = calls.first().unwrap().select.join(" ");
        assert_eq!(
            text,
            "--no-fail-fast --workspace --exclude oxccl-tests --lib --bins --test abort --test host --test stores"
        );
        assert!(calls.iter().any(|c| c.is_doc));
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
