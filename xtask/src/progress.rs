//! What a run of the matrix will do and how long that takes, and after each row how far it is.
//!
//! A row's time is what it took here when it last passed, else what it took on two cores where the rows were last measured.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::matrix::Row;
use crate::process::seconds;

/// Seconds, of rows that take longer than [`SHORT`], two at a time on two slow cores (2026-11-28): only their proportions count once some have ended.
const MEASURED: &[(&str, u64)] = &[
    ("python", 570),
    ("integration", 315),
    ("programs", 524),
    ("unit", 126),
    ("e2e", 240),
    ("doc", 27),
    ("registry-model", 67),
    ("engine-model", 34),
    ("simulation", 33),
    ("gloo-tcp-threads", 70),
    ("gloo-tcp-processes", 32),
    ("gloo-shm-threads", 50),
    ("gloo-shm-processes", 30),
    ("gloo-mixed", 90),
    ("gloo-in-place", 40),
    ("gloo-connections", 31),
    ("gloo-by-device", 24),
    ("gloo-staged", 99),
    ("gloo-isolated", 57),
    ("gloo-library", 53),
    ("gloo-plugin", 39),
    ("gloo-quantised", 34),
    ("xccl", 128),
    ("xccl-isolated", 81),
    ("world-xccl", 68),
    ("world-xccl-split", 51),
    ("xccl-quantised", 44),
    ("xccl-e2e", 91),
    ("xccl-sycl", 126),
    ("xccl-sycl-xpu", 30),
    ("xccl-sycl-e2e", 104),
    ("nccl-standin", 95),
    ("nccl-old-standin", 35),
    ("nccl-isolated-standin", 72),
    ("world-nccl-split-standin", 23),
    ("hccl-standin", 100),
    ("torchft", 61),
    ("etcd", 54),
    ("deaths", 20),
];
/// The others.
const SHORT: Duration = Duration::from_secs(15);
/// So much must have been done before its pace says anything about the rest.
const TELLING: Duration = Duration::from_secs(60);

/// Of the rows that run.
pub(crate) struct Progress {
    file: PathBuf,
    places: u32,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// By row: how long, and on how many places.
    expected: BTreeMap<String, (Duration, u32)>,
    all: usize,
    /// Of the rows that have ended: what was expected of them, and what they took, each times its places.
    foreseen: Duration,
    took: Duration,
    /// What rows took when they last passed here.
    known: BTreeMap<String, Duration>,
}

impl Progress {
    /// Of these rows, on so many places side by side ([`Row::places`]); `logs` has the times of earlier runs.
    pub(crate) fn new(rows: &[&Row], places: usize, logs: &Path) -> Self {
        let file = logs.join("times");
        let known = parse(&fs::read_to_string(&file).unwrap_or_default());
        let state = State {
            expected: rows
                .iter()
                .map(|row| {
                    let own = u32::try_from(row.places(places)).unwrap_or(1);
                    (row.name.to_owned(), (usual(row.name, &known), own))
                })
                .collect(),
            all: rows.len(),
            known,
            ..State::default()
        };
        Self {
            file,
            places: u32::try_from(places).unwrap_or(1).max(1),
            state: Mutex::new(state),
        }
    }

    /// "56 rows run, about 25 min"
    pub(crate) fn plan(&self) -> String {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        format!("{} rows run, {}", state.all, about(state.left(self.places)))
    }

    /// A row has ended, with `took` if it passed and ran: "12 of 56 rows, about 9 min left".
    pub(crate) fn ended(&self, name: &str, took: Duration, passed: bool) -> Option<String> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (expected, places) = state.expected.remove(name)?;
        state.foreseen += expected * places;
        state.took += took * places;
        if passed {
            state.known.insert(name.to_owned(), took);
            // Only the estimates of later runs depend on it.
            let _ = fs::write(&self.file, text(&state.known));
        }
        let ended = state.all - state.expected.len();
        let left = match state.expected.is_empty() {
            true => String::new(),
            false => format!(", {} left", about(state.left(self.places))),
        };
        Some(format!("{ended} of {} rows{left}", state.all))
    }
}

impl State {
    fn left(&self, places: u32) -> Duration {
        let rest = self.expected.values().map(|(time, own)| *time * *own);
        let rest = rest.sum::<Duration>() / places;
        match self.foreseen >= TELLING {
            true => rest.mul_f64(self.took.as_secs_f64() / self.foreseen.as_secs_f64()),
            false => rest,
        }
    }
}

fn usual(name: &str, known: &BTreeMap<String, Duration>) -> Duration {
    let measured = || MEASURED.iter().find(|(row, _)| *row == name);
    let known = known.get(name).copied();
    known.unwrap_or_else(|| measured().map_or(SHORT, |(_, seconds)| Duration::from_secs(*seconds)))
}

/// Nothing more exact than it is.
fn about(time: Duration) -> String {
    match time.as_secs() {
        0..60 => format!(
            "about {}",
            seconds(Duration::from_secs(time.as_secs().next_multiple_of(10)))
        ),
        whole => format!("about {} min", whole.div_ceil(60)),
    }
}

/// A row and its milliseconds on each line; what is none is left out.
fn parse(text: &str) -> BTreeMap<String, Duration> {
    let line = |line: &str| {
        let (name, took) = line.split_once(' ')?;
        Some((name.to_owned(), Duration::from_millis(took.parse().ok()?)))
    };
    text.lines().filter_map(line).collect()
}

fn text(known: &BTreeMap<String, Duration>) -> String {
    let lines = known
        .iter()
        .map(|(name, took)| format!("{name} {}\n", took.as_millis()));
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matrix::ROWS;

    const MINUTE: Duration = Duration::from_secs(60);

    fn rows(names: &[&str]) -> Vec<&'static Row> {
        let rows = ROWS.iter().filter(|row| names.contains(&row.name));
        rows.collect()
    }

    #[test]
    fn a_run_says_how_much_there_is_and_after_each_row_what_is_left_at_the_pace_so_far() {
        let logs = tempfile::tempdir().unwrap();
        let rows = rows(&["integration", "programs", "slurm"]);
        let progress = Progress::new(&rows, 4, logs.path());
        assert_eq!(progress.plan(), "3 rows run, about 6 min");
        // Half as fast as expected.
        let said = progress.ended("integration", Duration::from_secs(630), true);
        assert_eq!(said.unwrap(), "1 of 3 rows, about 9 min left");
        assert_eq!(
            progress.ended("gloo-mixed", MINUTE, true),
            None,
            "it is none of them"
        );
        let said = progress.ended("programs", Duration::from_secs(1048), false);
        assert_eq!(said.unwrap(), "2 of 3 rows, about 10 s left");
        assert_eq!(progress.ended("slurm", MINUTE, true).unwrap(), "3 of 3 rows");
        // The next run knows what passed.
        let progress = Progress::new(&rows, 1, logs.path());
        assert_eq!(progress.plan(), "3 rows run, about 21 min");
    }

    #[test]
    fn times_are_of_rows_that_there_are_and_a_damaged_file_is_no_harm() {
        for (name, _) in MEASURED {
            assert!(ROWS.iter().any(|row| row.name == *name), "{name}");
        }
        let known = parse("unit 1500\nnonsense\nslurm many\n");
        assert_eq!(parse(&text(&known)), known);
        assert_eq!(usual("unit", &known), Duration::from_millis(1500));
        assert_eq!(usual("slurm", &known), SHORT);
    }
}
