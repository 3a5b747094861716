//! The test matrix: which rows there are, what each runs, and what must hold before it can run.
//!
//! A new row is one line in [`ROWS`]; a new reason to skip is a variant of [`Skip`] and a probe that finds it. Only
//! rows that exist are listed. `runner.rs` executes them.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Duration;

use crate::metadata::Metadata;

/// All rows, in the order in which they run.
pub(crate) const ROWS: &[Row] = &[
    row(
        "unit",
        None,
        "unit, integration and doc tests of every crate",
        nothing,
        UNIT,
        minutes(10),
    ),
    row(
        "gloo-tcp-threads",
        Some("gloo"),
        "ranks as threads, over TCP",
        loopback,
        gloo("threads"),
        minutes(5),
    ),
    row(
        "gloo-tcp-processes",
        Some("gloo"),
        "ranks as processes, over TCP",
        loopback,
        gloo("processes"),
        minutes(5),
    ),
    row(
        "e2e",
        None,
        "cross-crate: real processes, real kills",
        loopback,
        E2E,
        minutes(10),
    ),
];

/// The test targets of this name are conformance suites: they run in rows of their own, never in `unit`.
const CONFORMANCE: &str = "conformance";
/// The package of the cross-crate tests.
const CROSS_CRATE: &str = "oxccl-tests";

const UNIT: Run = Run::Workspace;
const E2E: Run = Run::CrossCrate;

/// The tests of the suite in `backend-gloo/tests/conformance.rs` whose names contain `filter`.
const fn gloo(filter: &'static str) -> Run {
    Run::Package {
        package: "backend-gloo",
        target: Some(CONFORMANCE),
        filter: Some(filter),
    }
}

/// One row of the matrix.
pub(crate) struct Row {
    pub(crate) name: &'static str,
    /// The backend it tests, for `--require`.
    pub(crate) backend: Option<&'static str>,
    pub(crate) about: &'static str,
    /// Decides before the run whether it can run here.
    pub(crate) probe: fn() -> Result<(), Skip>,
    pub(crate) run: Run,
    /// For the tests themselves; building has its own limit.
    pub(crate) limit: Duration,
}

const fn row(
    name: &'static str,
    backend: Option<&'static str>,
    about: &'static str,
    probe: fn() -> Result<(), Skip>,
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
    }
}

const fn minutes(n: u64) -> Duration {
    Duration::from_secs(60 * n)
}

/// What a row runs.
pub(crate) enum Run {
    /// Every test of the workspace that no other row has.
    Workspace,
    /// The tests of one package.
    Package {
        package: &'static str,
        /// One test target of it; all if absent.
        target: Option<&'static str>,
        /// Only tests whose name contains this.
        filter: Option<&'static str>,
    },
    /// The cross-crate tests. They are selected out of the whole workspace, so that dependencies have the features with
    /// which the unit row built them and are not built again.
    CrossCrate,
}

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
            Self::Package {
                package,
                target,
                filter,
            } => {
                let mut select = strings(&["--no-fail-fast", "--package", package]);
                if let Some(target) = target {
                    select.extend(strings(&["--test", target]));
                }
                pass.extend(filter.map(str::to_owned));
                if long {
                    pass.push("--include-ignored".to_owned());
                }
                vec![TestCall {
                    select,
                    pass,
                    is_doc: false,
                }]
            }
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
        .flat_map(|p| &p.targets)
        .filter(|t| t.kind.iter().any(|k| k == "test") && t.name != CONFORMANCE)
        .map(|t| t.name.clone())
        .collect()
}

/// Why a row cannot run on this machine. Decided by a probe, never by the tests themselves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Skip {
    /// TCP over 127.0.0.1 does not work.
    NoLoopback { why: String },
}

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoLoopback { why } => write!(f, "no TCP over 127.0.0.1: {why}"),
        }
    }
}

/// Needs nothing.
fn nothing() -> Result<(), Skip> {
    Ok(())
}

/// Needs TCP connections over the loopback interface.
fn loopback() -> Result<(), Skip> {
    let connect = || {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        TcpStream::connect_timeout(&listener.local_addr()?, Duration::from_secs(5))
    };
    connect()
        .map(drop)
        .map_err(|e| Skip::NoLoopback { why: e.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata() -> Metadata {
        let json = r#"{"workspace_root":"/w","target_directory":"/w/target","packages":[
            {"name":"ftcore","manifest_path":"/w/crates/ftcore/Cargo.toml","dependencies":[],"targets":[
                {"name":"ftcore","kind":["lib"]},{"name":"stores","kind":["test"]}]},
            {"name":"backend-gloo","manifest_path":"/w/crates/backend-gloo/Cargo.toml","dependencies":[],"targets":[
                {"name":"conformance","kind":["test"]},{"name":"abort","kind":["test"]}]},
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
            "--no-fail-fast --workspace --exclude oxccl-tests --lib --bins --test abort --test stores"
        );
        assert!(calls.iter().any(|c| c.is_doc));
    }

    #[test]
    fn a_package_row_selects_its_target_and_filter() {
        let calls = gloo("threads").calls(&metadata(), true);
        let call = calls.first().unwrap();
        assert_eq!(
            call.select.join(" "),
            "--no-fail-fast --package backend-gloo --test conformance"
        );
        assert_eq!(call.pass, ["threads", "--include-ignored"]);
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
