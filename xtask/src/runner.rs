//! Runs the matrix: choose rows, build what they share, probe each, run, judge, and count; several rows at once where asked.
//!
//! A row passes only if every call ended with 0, every test program printed its result, at least one test ran and no
//! process was left behind. The output of a row goes to `target/xtask/<row>.log`; on failure the part that
//! says why is shown.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};

use crate::TestArgs;
use crate::delays::Delays;
use crate::libtest::Tally;
use crate::matrix::{Environment, ROWS, Row, Run, Skip, Targets, TestCall};
use crate::metadata::{Metadata, cargo_command};
use crate::process::{self, Finished, Output, seconds};
use crate::progress::Progress;
use crate::python;
use crate::workers::{in_workers, lock};

/// Building everything on two cores from nothing, with much to spare.
const BUILD_LIMIT: Duration = Duration::from_secs(30 * 60);
/// Also where there are more cores: rows share the loopback interface and the limit on descriptors, and more of them were not tried.
const MOST_AT_ONCE: usize = 8;
/// How long processes may outlive the tests that started them.
const GRACE: Duration = Duration::from_secs(5);
/// How much of a failed row's log is shown.
const SHOWN_LINES: usize = 120;
/// And how much of that again before the last line, of each failed row: where a log is cut, its middle goes.
const REPEATED_LINES: usize = 12;

/// What became of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Verdict {
    Passed { tests: u64, ignored: u64 },
    Failed { why: String },
    Skipped(Skip),
}

/// The three counts of the last line.
#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    passed: usize,
    failed: usize,
    skipped: usize,
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "matrix: {} passed, {} failed, {} skipped",
            self.passed, self.failed, self.skipped
        )
    }
}

impl Counts {
    fn add(&mut self, verdict: &Verdict) {
        match verdict {
            Verdict::Passed { .. } => self.passed += 1,
            Verdict::Failed { .. } => self.failed += 1,
            Verdict::Skipped(_) => self.skipped += 1,
        }
    }
}

/// Runs the rows that `args` ask for. True if none failed.
///
/// # Errors
/// For unknown row or backend names, or if the workspace cannot be read; nothing was run then.
pub(crate) fn test(args: &TestArgs) -> Result<bool> {
    let required = [args.require.clone(), args.require_installable.clone()].concat();
    let rows = choose(ROWS, &args.rows, &required)?;
    if args.list {
        list(&rows);
        return Ok(true);
    }
    let metadata = Metadata::read()?;
    let logs = metadata.target_directory.join("xtask");
    fs::create_dir_all(&logs).with_context(|| format!("cannot make {}", logs.display()))?;
    let root = &metadata.workspace_root;
    let delays = args.delays.clone().map(|wish| Delays::build(root, &logs, wish));
    let matrix = Matrix {
        args,
        delays: delays.transpose()?,
        metadata,
        logs,
        probed: Mutex::default(),
        counts: Mutex::new(Counts::default()),
        failed: Mutex::default(),
        used: Mutex::default(),
        is_built: OnceLock::new(),
        progress: OnceLock::new(),
    };
    if rows.len() > 1 {
        println!(
            "{} rows; what they share is built first, and what they need is fetched",
            rows.len()
        );
        matrix.prepare(&rows)?;
        matrix.foresee(&rows);
    }
    for_all(&rows, places(args), |row| matrix.run(row))?;
    let counts = lock(&matrix.counts);
    for line in lock(&matrix.failed).iter() {
        println!("{line}");
    }
    println!("the rows used {} of processor time", seconds(*lock(&matrix.used)));
    println!("{counts}");
    Ok(counts.failed == 0)
}

/// How many rows fit side by side. The campaigns of `--long` tell figures: one at a time, unless it is said.
fn places(args: &TestArgs) -> usize {
    let cores = || thread::available_parallelism().map_or(1, usize::from);
    let usual = || match args.long {
        true => 1,
        false => (2 * cores()).min(MOST_AT_ONCE),
    };
    args.at_once.map_or_else(usual, usize::from).max(1)
}

/// True for a long row that was not asked for.
fn is_left_out(row: &Row, args: &TestArgs) -> bool {
    row.is_long && !args.long && !args.rows.iter().any(|name| name == row.name)
}

/// What the rows share while they run.
struct Matrix<'a> {
    args: &'a TestArgs,
    delays: Option<Delays>,
    metadata: Metadata,
    logs: PathBuf,
    /// What the probes have said. Held while one looks for what its row needs: two would fetch and build the same library.
    probed: Mutex<BTreeMap<&'static str, Result<Environment, Skip>>>,
    /// Held while one row reports, so that its lines stay together.
    counts: Mutex<Counts>,
    /// What the failed rows said, in short.
    failed: Mutex<Vec<String>>,
    /// Processor time of all rows.
    used: Mutex<Duration>,
    /// Set once everything that rows share is built.
    is_built: OnceLock<()>,
    /// Of several rows.
    progress: OnceLock<Progress>,
}

impl Matrix<'_> {
    /// Builds at once what the rows share: cargo keeps all cores busy only if it has many targets to choose from. Fetches beside it what the rows
    /// need.
    fn prepare(&self, rows: &[&Row]) -> Result<()> {
        let mut targets = Targets::default();
        for row in rows {
            targets.add(row.run.targets(&self.metadata).unwrap_or_default());
        }
        let mut command = cargo_command(&self.metadata.workspace_root);
        command.arg("test").args(targets.select()).arg("--no-run");
        let log = self.logs.join("build.log");
        let begun = Instant::now();
        let built = thread::scope(|scope| {
            let fetch = || rows.iter().for_each(|row| drop(self.probe(row)));
            let fetching = thread::Builder::new().name("ox-fetch".to_owned());
            let fetching = fetching
                .spawn_scoped(scope, fetch)
                .context("no thread to fetch in")?;
            let built = build("all rows", &mut command, &log).and_then(|why| match why {
                None => self.build_examples(&targets, "all rows", &log),
                why => Ok(why),
            });
            fetching.join().map_err(|_| anyhow!("a probe panicked"))?;
            built
        })?;
        match built {
            None => {
                println!("built {:<20} {:>12}", "all rows", seconds(begun.elapsed()));
                let _ = self.is_built.set(());
            }
            // Each row builds for itself then, and says what is wrong.
            Some(why) => println!("the rows together: {why}"),
        }
        Ok(())
    }

    /// Says what will run, how long that takes, and what is skipped.
    fn foresee(&self, rows: &[&Row]) {
        let (run, skipped): (Vec<&Row>, Vec<&Row>) = rows.iter().partition(|row| self.probe(row).is_ok());
        let progress = Progress::new(&run, places(self.args), &self.logs);
        let names: Vec<&str> = skipped.iter().map(|row| row.name).collect();
        let skips = match names.is_empty() {
            true => String::new(),
            false => format!("; {} are skipped: {}", names.len(), names.join(", ")),
        };
        println!("{}{skips}", progress.plan());
        let _ = self.progress.set(progress);
    }

    /// Builds the programs of examples that tests run; the text is why it failed.
    fn build_examples(&self, targets: &Targets, what: &str, log: &Path) -> Result<Option<String>> {
        let Some(select) = targets.select_examples() else {
            return Ok(None);
        };
        let mut command = cargo_command(&self.metadata.workspace_root);
        command.arg("build").args(select);
        build(what, &mut command, log)
    }

    /// Asks a row's probe, once.
    fn probe(&self, row: &Row) -> Result<Environment, Skip> {
        if is_left_out(row, self.args) {
            return Err(Skip::Long { name: row.name });
        }
        let mut probed = lock(&self.probed);
        let said = probed.entry(row.name).or_insert_with(|| (row.probe)());
        said.clone()
    }

    /// Runs one row, from the probe to its line.
    fn run(&self, row: &Row) {
        let started = Instant::now();
        let mut used = Duration::ZERO;
        let verdict = match self.probe(row) {
            Ok(environment) => {
                self.execute(row, &environment, &mut used)
                    .unwrap_or_else(|e| Verdict::Failed {
                        why: format!("{e:#}"),
                    })
            }
            Err(skip) => Verdict::Skipped(skip),
        };
        let verdict = enforce(verdict, row, &self.args.require, &self.args.require_installable);
        let mut counts = lock(&self.counts);
        let took = started.elapsed();
        let log = log_path(&self.logs, row);
        // Long and delayed runs tell nothing about later ones.
        let is_usual = !self.args.long && self.delays.is_none();
        let passed = is_usual && matches!(verdict, Verdict::Passed { .. });
        let progress = self.progress.get().and_then(|p| p.ended(row.name, took, passed));
        *lock(&self.used) += used;
        report(row, &verdict, (took, used), &log, progress.as_deref());
        if let Verdict::Failed { why } = &verdict {
            let mut failed = lock(&self.failed);
            failed.push(format!("FAIL  {}  {why}", row.name));
            failed.extend(
                shown(&log)
                    .unwrap_or_default()
                    .iter()
                    .filter_map(|line| in_short(line))
                    .take(REPEATED_LINES),
            );
        }
        counts.add(&verdict);
    }

    /// Builds and runs one row; adds what its tests used to `used`.
    fn execute(&self, row: &Row, environment: &Environment, used: &mut Duration) -> Result<Verdict> {
        if matches!(row.run, Run::Python) {
            return self.execute_python(row, used);
        }
        let long = self.args.long;
        let log = log_path(&self.logs, row);
        let calls = row.run.calls(&self.metadata, long);
        let root = &self.metadata.workspace_root;
        let targets = row.run.targets(&self.metadata);
        let is_built = self.is_built.get().is_some() && targets.is_some();
        for call in calls.iter().filter(|c| !c.is_doc && !is_built) {
            let mut command = cargo_command(root);
            command.arg("test").args(&call.select).arg("--no-run");
            if let Some(why) = build(row.name, &mut command, &log)? {
                return Ok(Verdict::Failed { why });
            }
        }
        if let Some(targets) = targets.filter(|_| !is_built)
            && let Some(why) = self.build_examples(&targets, row.name, &log)?
        {
            return Ok(Verdict::Failed { why });
        }
        let mut limit = self.limit(row);
        let mut tally = Tally::default();
        let mut wrong = Vec::new();
        let mut printed = String::new();
        for call in &calls {
            let mut command = test_command(root, call);
            command.envs(environment.iter().map(|(k, v)| (k, v)));
            if let Some(delays) = &self.delays {
                delays.apply(&mut command);
            }
            let (text, finished) = self.part(row, "", &mut command, limit, &mut wrong)?;
            *used += finished.used;
            tally.add(Tally::parse(&text));
            printed.push_str(&text);
            limit = limit.saturating_sub(finished.took).max(Duration::from_secs(1));
        }
        fs::write(&log, printed).with_context(|| format!("cannot write {}", log.display()))?;
        Ok(judge(&tally, &wrong))
    }

    /// Builds, installs and checks the Python package.
    fn execute_python(&self, row: &Row, used: &mut Duration) -> Result<Verdict> {
        let log = log_path(&self.logs, row);
        let (build, check) = python::steps(&self.metadata.workspace_root, &self.metadata.target_directory)?;
        for mut step in build {
            let finished = process::run(&mut step.command, BUILD_LIMIT, Output::Log(&log), |time| {
                beat(row.name, "builds", time)
            })?;
            *used += finished.used;
            if !finished.is_success() {
                let why = format!("{}: {}", step.name, finished.describe());
                return Ok(Verdict::Failed { why });
            }
        }
        let limit = self.limit(row);
        let (mut tally, mut wrong, mut printed) = (Tally::default(), Vec::new(), String::new());
        for mut step in check {
            let name = format!("{}: ", step.name);
            let (text, finished) = self.part(row, &name, &mut step.command, limit, &mut wrong)?;
            *used += finished.used;
            printed.push_str(&format!("---- {} ----\n{text}", step.name));
            // Only the last step has tests.
            tally = python::tally(&text);
        }
        fs::write(&log, printed).with_context(|| format!("cannot write {}", log.display()))?;
        Ok(judge(&tally, &wrong))
    }

    /// How long the tests of a row may take.
    fn limit(&self, row: &Row) -> Duration {
        let is_slow = self.args.long || self.delays.is_some();
        row.limit * if is_slow { 4 } else { 1 }
    }

    /// Runs a command of a row's tests: what it printed, and how it ended. If not well, that is put among what is `wrong`, behind `name`; what it
    /// left running too.
    fn part(
        &self,
        row: &Row,
        name: &str,
        command: &mut Command,
        limit: Duration,
        wrong: &mut Vec<String>,
    ) -> Result<(String, Finished)> {
        if self.args.long {
            // For suites that decide themselves what is long.
            command.env("OXCCL_LONG", "1");
        }
        let part = self.logs.join(format!("{}.part", row.name));
        let finished = process::run(command, limit, Output::Log(&part), |time| {
            beat(row.name, "runs", time)
        })?;
        let text = fs::read(&part).context("cannot read the output of the tests")?;
        fs::remove_file(&part).context("cannot remove the partial log")?;
        if !finished.is_success() {
            wrong.push(format!("{name}{}", finished.describe()));
        }
        let left = finished.sweep(GRACE);
        if !left.is_empty() {
            wrong.push(format!("left running: {}", left.join(", ")));
        }
        Ok((String::from_utf8_lossy(&text).into_owned(), finished))
    }
}

/// Does `body` for each of `rows`: as many side by side as `places` has room for, then those that measure, each alone.
fn for_all(rows: &[&Row], places: usize, body: impl Fn(&Row) + Sync) -> Result<()> {
    let rows = rows.iter().map(|row| (*row, row.places(places)));
    let (alone, shared): (Vec<_>, Vec<_>) = rows.partition(|(row, _)| row.is_alone);
    in_workers(shared, places, &body)?;
    in_workers(alone, places, &body)
}

/// The rows asked for, in table order.
fn choose<'a>(rows: &'a [Row], names: &[String], require: &[String]) -> Result<Vec<&'a Row>> {
    for name in names {
        if !rows.iter().any(|r| r.name == name) {
            let known: Vec<_> = rows.iter().map(|r| r.name).collect();
            bail!("there is no row \"{name}\"; the rows are {}", known.join(", "));
        }
    }
    let chosen: Vec<_> = rows
        .iter()
        .filter(|r| names.is_empty() || names.iter().any(|n| n == r.name))
        .collect();
    for backend in require {
        if !chosen.iter().any(|r| r.backend == Some(backend)) {
            let known: BTreeSet<_> = chosen.iter().filter_map(|r| r.backend).collect();
            let known: Vec<_> = known.into_iter().collect();
            let known = if known.is_empty() {
                "none".to_owned()
            } else {
                known.join(", ")
            };
            bail!("--require {backend}: no chosen row tests that backend (the chosen rows test: {known})");
        }
    }
    Ok(chosen)
}

fn list(rows: &[&Row]) {
    let width = rows.iter().map(|r| r.name.len()).max().unwrap_or(0);
    for row in rows {
        let state = match (row.probe)() {
            Ok(_) => "can run".to_owned(),
            Err(skip) => format!("would be skipped: {skip}"),
        };
        println!("{:width$}  {}  [{state}]", row.name, row.about);
    }
}

/// A skip of a required backend is a failure; of one that is required where it can be installed, if it could be.
fn enforce(verdict: Verdict, row: &Row, require: &[String], installable: &[String]) -> Verdict {
    let (Verdict::Skipped(skip), Some(backend)) = (&verdict, row.backend) else {
        return verdict;
    };
    let has = |list: &[String]| list.iter().any(|r| r == backend);
    if has(require) || (skip.is_defect() && has(installable)) {
        return Verdict::Failed {
            why: format!("{backend} is required, but would be skipped: {skip}"),
        };
    }
    verdict
}

fn log_path(logs: &Path, row: &Row) -> PathBuf {
    logs.join(format!("{}.log", row.name))
}

fn test_command(root: &Path, call: &TestCall) -> Command {
    let mut command = cargo_command(root);
    command
        .arg("test")
        .args(&call.select)
        .args(["--color", "never"])
        .arg("--")
        .args(&call.pass);
    // The output is parsed.
    command.env("CARGO_TERM_PROGRESS_WHEN", "never");
    // The training programs fail if the survivors of a kill stand still for 1 s. Tests assert outcomes: a busy machine needs longer.
    command.env("OXCCL_STALL_LIMIT_MS", "30000");
    command
}

/// Runs a build; the text is why it failed.
fn build(what: &str, command: &mut Command, log: &Path) -> Result<Option<String>> {
    command
        .env("CARGO_TERM_PROGRESS_WHEN", "never")
        .env("CARGO_TERM_COLOR", "never");
    let finished = process::run(command, BUILD_LIMIT, Output::Log(log), |time| {
        beat(what, "builds", time)
    })?;
    Ok((!finished.is_success()).then(|| format!("does not build ({})", finished.describe())))
}

/// The verdict over all calls of a row. `wrong` holds what went wrong outside of single tests.
fn judge(tally: &Tally, wrong: &[String]) -> Verdict {
    let mut why = Vec::new();
    if tally.failed > 0 {
        let names: Vec<_> = tally.failures.iter().take(8).map(String::as_str).collect();
        why.push(format!(
            "{} of {} tests failed: {}",
            tally.failed,
            tally.ran(),
            names.join(", ")
        ));
    }
    if !tally.unfinished.is_empty() {
        why.push(format!("ended without a result: {}", tally.unfinished.join(", ")));
    }
    // cargo's own status for failed tests, if it is all there is, says nothing new.
    if tally.failed == 0 || wrong.len() > 1 {
        why.extend(wrong.iter().cloned());
    }
    if tally.ran() == 0 {
        why.push("no test ran".to_owned());
    }
    if why.is_empty() {
        Verdict::Passed {
            tests: tally.passed,
            ignored: tally.ignored,
        }
    } else {
        Verdict::Failed { why: why.join("; ") }
    }
}

fn beat(name: &str, does: &str, time: Duration) {
    println!("  …   {name:<20} {does} since {}", seconds(time));
}

/// Says how a row ended, and how far the run is by then.
fn report(
    row: &Row,
    verdict: &Verdict,
    (time, used): (Duration, Duration),
    log: &Path,
    progress: Option<&str>,
) {
    let name = row.name;
    let (time, used) = (seconds(time), seconds(used));
    let progress = progress.map_or(String::new(), |told| format!("  ({told})"));
    match verdict {
        Verdict::Passed { tests, ignored } => {
            let ignored = if *ignored > 0 {
                format!(", {ignored} ignored")
            } else {
                String::new()
            };
            println!(
                "pass  {name:<20} {time:>12}  {tests} tests{ignored}, {used} of processor time{progress}"
            );
        }
        Verdict::Skipped(skip) => println!("skip  {name:<20} {time:>12}  {skip}"),
        Verdict::Failed { why } => {
            if let Ok(lines) = shown(log) {
                println!("---- from {} ----", log.display());
                for line in lines {
                    println!("{line}");
                }
                println!("----");
            }
            println!("FAIL  {name:<20} {time:>12}  {why}{progress}");
        }
    }
}

/// The excerpt of a log.
fn shown(log: &Path) -> std::io::Result<Vec<String>> {
    let text = fs::read(log)?;
    let text = String::from_utf8_lossy(&text);
    Ok(excerpt(&text).into_iter().map(ToOwned::to_owned).collect())
}

/// A line of an excerpt as it is repeated, unless it says nothing alone.
fn in_short(line: &str) -> Option<String> {
    let line = line.trim();
    let says_something = !line.is_empty() && line != "failures:";
    says_something.then(|| format!("      {}", line.chars().take(300).collect::<String>()))
}

/// The part of a failed row's log that says why: what the failed tests printed, else the end.
fn excerpt(text: &str) -> Vec<&str> {
    let mut lines = Vec::new();
    let (mut is_inside, mut is_trace) = (false, false);
    for line in text.lines() {
        is_inside |= line == "failures:";
        // The way to a failed assertion is libtest's; the log has it.
        is_trace = (is_trace && !line.is_empty()) || line == "stack backtrace:";
        if is_inside && !is_trace {
            lines.push(line);
        }
        is_inside &= !line.starts_with("test result: ");
    }
    if lines.is_empty() {
        lines = text.lines().collect();
        lines.drain(..lines.len().saturating_sub(SHOWN_LINES));
    }
    lines.truncate(SHOWN_LINES);
    lines
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn tally(passed: u64, failed: u64) -> Tally {
        Tally {
            passed,
            failed,
            ..Tally::default()
        }
    }

    #[test]
    fn a_long_row_is_left_out_unless_it_is_asked_for() {
        let burn = ROWS.iter().find(|row| row.name == "burn").unwrap();
        let unit = ROWS.iter().find(|row| row.name == "unit").unwrap();
        let usual = TestArgs::default();
        assert!(is_left_out(burn, &usual) && !is_left_out(unit, &usual));
        let long = TestArgs {
            long: true,
            ..TestArgs::default()
        };
        let by_name = TestArgs {
            rows: strings(&["burn"]),
            ..TestArgs::default()
        };
        assert!(!is_left_out(burn, &long) && !is_left_out(burn, &by_name));
    }

    #[test]
    fn rows_run_side_by_side_unless_they_measure_or_it_is_said() {
        let long = TestArgs {
            long: true,
            ..TestArgs::default()
        };
        let said = TestArgs {
            at_once: Some(3),
            ..long.clone()
        };
        assert!(places(&TestArgs::default()) >= 2);
        assert_eq!((places(&long), places(&said)), (1, 3));
    }

    fn strings(items: &[&str]) -> Vec<String> {
        items.iter().map(|s| (*s).to_owned()).collect()
    }

    fn why(verdict: Verdict) -> String {
        match verdict {
            Verdict::Failed { why } => why,
            other => panic!("not failed: {other:?}"),
        }
    }

    #[test]
    fn a_row_that_measures_has_the_machine_for_itself() {
        // The measuring row first: it must not begin before the others are through.
        let rows: Vec<&Row> = ROWS.iter().rev().collect();
        let (inside, beside, done) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
        for_all(&rows, 3, |row| {
            let others = inside.fetch_add(1, Ordering::SeqCst);
            // Long enough for the others to come in, if they may.
            thread::sleep(Duration::from_millis(2));
            if row.is_alone {
                beside.fetch_add(others + inside.load(Ordering::SeqCst) - 1, Ordering::SeqCst);
            }
            inside.fetch_sub(1, Ordering::SeqCst);
            done.fetch_add(1, Ordering::SeqCst);
        })
        .unwrap();
        assert!(rows.iter().any(|r| r.is_alone && r.name == "deaths"));
        assert_eq!(beside.into_inner(), 0);
        assert_eq!(done.into_inner(), ROWS.len());
    }

    #[test]
    fn a_row_that_ran_tests_and_ended_well_passes() {
        assert_eq!(judge(&tally(3, 0), &[]), Verdict::Passed { tests: 3, ignored: 0 });
    }

    #[test]
    fn a_row_that_ran_no_test_fails() {
        assert_eq!(why(judge(&tally(0, 0), &[])), "no test ran");
    }

    #[test]
    fn a_failed_test_fails_the_row_and_is_named() {
        let mut t = tally(3, 1);
        t.failures = strings(&["ring::sums"]);
        assert_eq!(
            why(judge(&t, &strings(&["exit status: 101"]))),
            "1 of 4 tests failed: ring::sums"
        );
    }

    #[test]
    fn a_bad_status_fails_the_row_even_if_all_tests_passed() {
        assert_eq!(
            why(judge(&tally(3, 0), &strings(&["exit status: 101"]))),
            "exit status: 101"
        );
    }

    #[test]
    fn a_program_without_a_result_fails_the_row() {
        let mut t = tally(3, 0);
        t.unfinished = strings(&["tests/a.rs"]);
        assert_eq!(why(judge(&t, &[])), "ended without a result: tests/a.rs");
    }

    #[test]
    fn a_process_left_behind_fails_the_row() {
        assert_eq!(
            why(judge(&tally(3, 0), &strings(&["left running: 7 (x)"]))),
            "left running: 7 (x)"
        );
    }

    #[test]
    fn a_skip_is_no_pass_and_a_required_one_is_a_failure() {
        let row = ROWS.iter().find(|r| r.backend == Some("gloo")).unwrap();
        let skip = Verdict::Skipped(Skip::missing("no TCP over 127.0.0.1", "denied"));
        let kept = enforce(skip.clone(), row, &[], &strings(&["gloo"]));
        let mut counts = Counts::default();
        counts.add(&kept);
        assert_eq!(counts.to_string(), "matrix: 0 passed, 0 failed, 1 skipped");
        assert!(why(enforce(skip, row, &strings(&["gloo"]), &[])).contains("gloo is required"));
    }

    #[test]
    fn what_could_be_installed_is_not_skipped_where_it_is_required() {
        let row = ROWS.iter().find(|r| r.backend == Some("xccl-sycl")).unwrap();
        let skip = |error: anyhow::Error| Verdict::Skipped(Skip::oneccl(&error));
        let required = strings(&["xccl-sycl"]);
        let offline = skip(anyhow::anyhow!("no route").context(crate::wheels::Unfetched));
        assert!(matches!(
            enforce(offline, row, &[], &required),
            Verdict::Skipped(_)
        ));
        let broken = skip(anyhow::anyhow!("the wheel has 0 files that end in x"));
        assert!(matches!(
            enforce(broken.clone(), row, &[], &[]),
            Verdict::Skipped(_)
        ));
        assert!(why(enforce(broken, row, &[], &required)).contains("0 files"));
    }

    #[test]
    fn unknown_names_are_refused_and_the_known_ones_said() {
        let err = choose(ROWS, &strings(&["unti"]), &[]).err().unwrap().to_string();
        assert!(
            err.contains("\"unti\"") && err.contains("integration, e2e, programs, "),
            "{err}"
        );
        let err = choose(ROWS, &[], &strings(&["tpu"])).err().unwrap().to_string();
        assert!(err.contains("tpu") && err.contains("gloo"), "{err}");
        // A required backend without a chosen row would otherwise pass by not running.
        assert!(choose(ROWS, &strings(&["unit"]), &strings(&["gloo"])).is_err());
    }

    #[test]
    fn rows_are_chosen_by_name_in_table_order() {
        let chosen = choose(ROWS, &strings(&["unit", "e2e"]), &[]).unwrap();
        assert_eq!(chosen.iter().map(|r| r.name).collect::<Vec<_>>(), ["e2e", "unit"]);
        assert_eq!(choose(ROWS, &[], &[]).unwrap().len(), ROWS.len());
    }

    #[test]
    fn the_excerpt_is_what_failed_tests_printed_or_else_the_end() {
        let text = "test a ... FAILED\n\nfailures:\n\n---- a ----\nboom\nstack backtrace:\n   0: begin\n\nfailures:\n    a\n\ntest result: FAILED. x\n     \
                    Running b\nnoise\n";
        let shown = excerpt(text).join("\n");
        assert!(
            shown.starts_with("failures:\n\n---- a ----\nboom\n\nfailures:") && shown.ends_with("FAILED. x"),
            "{shown}"
        );
        let again: Vec<String> = shown.lines().filter_map(in_short).collect();
        assert_eq!(again[..2], ["      ---- a ----", "      boom"]);
        let long = "line\n".repeat(500) + "the end\n";
        assert_eq!(excerpt(&long).len(), SHOWN_LINES);
        assert_eq!(excerpt(&long).last(), Some(&"the end"));
    }
}
