//! The tables, as Markdown or JSON: one for each operation, the ranks and sizes below each other, ours, peers, ratios and limit
//! beside each other; and where they stand in a document.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::limit::Limits;
use super::measure::Times;
use super::operations::{Operation, Point};
use super::programs::Which;

const BEGIN: &str = "<!-- bench-peers:begin";
const END: &str = "<!-- bench-peers:end -->";
/// The name of the table of short operations.
const LATENCY: &str = "latency";
/// All-reduces up to this size stand in it, too.
const SHORT: u64 = 1_024;

/// What one program measured: for each point, once a round.
type Figures = BTreeMap<Point, Vec<Times>>;

/// All figures for one number of ranks.
pub(super) struct Section {
    pub(super) ranks: u32,
    points: Vec<Point>,
    pub(super) measured: Vec<(Which, Figures)>,
    /// What could not be measured, all of a program or one operation, and why.
    skipped: Vec<(Which, Option<Operation>, String)>,
    /// Once a round.
    pub(super) limits: Vec<Limits>,
}

/// Over the rounds.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Spread {
    median: f64,
    least: f64,
    greatest: f64,
}

impl Section {
    pub(super) fn new(ranks: u32, points: Vec<Point>) -> Self {
        Self {
            ranks,
            points,
            measured: Vec::new(),
            skipped: Vec::new(),
            limits: Vec::new(),
        }
    }

    /// Notes why something is not measured, once.
    pub(super) fn skip(&mut self, which: Which, operation: Option<Operation>, why: String) {
        let note = (which, operation, why);
        if !self.skipped.contains(&note) {
            self.skipped.push(note);
        }
    }

    /// Adds what a program measured in one round.
    pub(super) fn add(&mut self, which: Which, times: Vec<(Point, Times)>) {
        if let Some((_, figures)) = self.measured.iter_mut().find(|(w, _)| *w == which) {
            for (point, time) in times {
                figures.entry(point).or_default().push(time);
            }
        }
    }

    fn of(&self, which: Which, point: Point) -> Option<&[Times]> {
        let (_, figures) = self.measured.iter().find(|(w, _)| *w == which)?;
        figures.get(&point).map(Vec::as_slice)
    }

    /// The rounds' medians, in microseconds.
    fn spread(&self, which: Which, point: Point) -> Option<Spread> {
        let medians: Vec<f64> = self.of(which, point)?.iter().map(|t| t.median).collect();
        Some(Spread {
            least: medians.iter().copied().reduce(f64::min)?,
            greatest: medians.iter().copied().reduce(f64::max)?,
            median: median(medians)?,
        })
    }

    fn time(&self, which: Which, point: Point) -> Option<f64> {
        self.spread(which, point).map(|s| s.median)
    }

    /// The fastest call of all rounds.
    fn fastest(&self, which: Which, point: Point) -> Option<f64> {
        self.of(which, point)?.iter().map(|t| t.min).reduce(f64::min)
    }

    fn limit(&self, point: Point) -> Option<f64> {
        median(
            self.limits
                .iter()
                .filter_map(|l| l.points.get(&point).copied())
                .collect(),
        )
    }

    /// A hand-over of a cache line, round by round.
    fn hand_overs(&self) -> Vec<f64> {
        self.limits.iter().filter_map(|l| l.hand_over).collect()
    }

    fn json(&self) -> Value {
        let lines = self.measured.iter().flat_map(|(which, _)| {
            self.points.iter().filter_map(move |&point| {
                let spread = self.spread(*which, point)?;
                let ratio = self.time(which.rival(), point).map(|ours| spread.median / ours);
                Some(json!({
                    "program": which.to_string(), "op": point.operation.to_string(), "bytes": point.bytes,
                    "median_us": spread.median, "least_us": spread.least, "greatest_us": spread.greatest,
                    "min_us": self.fastest(*which, point), "ratio": ratio, "limit_us": self.limit(point),
                }))
            })
        });
        let skipped = self.skipped.iter().map(|(which, operation, why)| {
            json!({"program": which.to_string(), "op": operation.map(|o| o.to_string()), "why": why})
        });
        json!({
            "ranks": self.ranks,
            "results": lines.collect::<Vec<_>>(),
            "hand_overs_us": self.hand_overs(),
            "skipped": skipped.collect::<Vec<_>>(),
        })
    }
}

/// Everything, and where and when it was measured.
pub(super) struct Report {
    sections: Vec<Section>,
    rounds: u32,
    machine: String,
    /// Of other programs, before the first of ours was started.
    load: String,
    date: String,
}

impl Report {
    pub(super) fn new(sections: Vec<Section>, rounds: u32, load: String) -> Self {
        Self {
            sections,
            rounds,
            machine: machine(),
            load,
            date: said(Command::new("date").args(["-u", "+%Y-%m-%d"])),
        }
    }

    /// True if our own program, and the former one if there is one, was measured in every section.
    pub(super) fn ours_ran(&self) -> bool {
        let failed = |s: &Section| s.skipped.iter().any(|(w, ..)| w.is_ours() || w.is_former());
        !self.sections.iter().any(failed)
    }

    /// The tables for which something was measured.
    pub(super) fn tables(&self) -> Vec<String> {
        let mut names = names();
        names.retain(|name| {
            let is_its = |p: &Point| match name == LATENCY {
                true => p.operation.is_short(),
                false => p.operation.to_string() == *name,
            };
            self.sections.iter().any(|s| s.points.iter().any(is_its))
        });
        names
    }

    /// The points of the table `name`, over all sections.
    fn lines(&self, name: &str) -> Vec<(&Section, Point)> {
        let is_its = |p: &Point| match name == LATENCY {
            true => p.operation.is_short() || (p.operation == Operation::AllReduce && p.bytes <= SHORT),
            false => p.operation.to_string() == name,
        };
        let of = |section| move |point| (section, point);
        self.sections
            .iter()
            .flat_map(|s| s.points.iter().copied().filter(is_its).map(of(s)))
            .collect()
    }

    /// A table of `ours` against its rivals; none where none of them was measured.
    fn table(&self, name: &str, ours: &[Which]) -> Option<String> {
        let lines = self.lines(name);
        let has = |which: &Which| lines.iter().any(|(s, p)| s.spread(*which, *p).is_some());
        let ours: Vec<Which> = ours.iter().copied().filter(has).collect();
        let first = *ours.first()?;
        let rivals: Vec<Which> = Which::ALL
            .into_iter()
            .filter(|w| !w.is_ours() && w.rival() == first && has(w))
            .collect();
        let shared = first == Which::Ours;

        let mut head = vec!["ranks".to_owned(), "size".to_owned()];
        head.extend(ours.iter().chain(&rivals).map(Which::to_string));
        if !rivals.is_empty() {
            head.push("ratio".to_owned());
        }
        if shared {
            head.extend(["limit", "of the limit"].map(str::to_owned));
        }
        let mut rows = Vec::new();
        for (section, point) in lines {
            let time = |which: &Which| section.time(*which, point);
            let Some(mine) = ours.first().and_then(time) else {
                continue;
            };
            let mut row = vec![section.ranks.to_string(), label(name, point)];
            let cell = |which: &Which| section.spread(*which, point).map_or(none(), spread);
            row.extend(ours.iter().chain(&rivals).map(cell));
            let all = |values: Vec<Option<String>>| {
                let texts = values.into_iter().map(|value| value.unwrap_or_else(none));
                texts.collect::<Vec<_>>().join(" / ")
            };
            let ratio = |theirs: Option<f64>, ours: Option<f64>| Some(format!("{:.2}", theirs? / ours?));
            if !rivals.is_empty() {
                // Within a host the better of two MPIs counts; over TCP the peers are of two kinds.
                let best = rivals.iter().filter_map(time).reduce(f64::min);
                row.push(all(match shared {
                    true => ours.iter().map(|which| ratio(best, time(which))).collect(),
                    false => rivals
                        .iter()
                        .map(|which| ratio(time(which), Some(mine)))
                        .collect(),
                }));
            }
            if shared {
                let limit = section.limit(point);
                let share = |which: &Which| Some(format!("{:.0}", 100.0 * limit? / time(which)?));
                row.push(limit.map_or_else(none, us));
                row.push(all(ours.iter().map(share).collect()) + " %");
            }
            rows.push(row);
        }
        Some(aligned(&head, &rows))
    }

    /// The tables `names`, with where and when they were measured, and what is missing in them.
    pub(super) fn markdown(&self, names: &[String]) -> String {
        let rounds = match self.rounds {
            1 => "one round".to_owned(),
            n => format!("{n} rounds, in parentheses from the least to the greatest"),
        };
        let mut text = format!(
            "f32, sums, processes, µs: the median over the calls of the slowest rank's time, then over\n\
             {rounds}.\n\
             Ratio: inside a host the best peer's time divided by that of oxccl / of oxccl alloc, over TCP each peer's divided by\n\
             that of oxccl tcp; above 1 oxccl is faster. Measured on {} on\n\
             {},\n\
             load {} before.\n\n",
            self.date, self.machine, self.load
        );
        for name in names {
            for (ours, place) in [
                (&[Which::Ours, Which::OursAlloc][..], "inside one host"),
                (&[Which::OursTcp], "TCP on loopback"),
            ] {
                if let Some(table) = self.table(name, ours) {
                    let _ = write!(text, "**{name}, {place}**\n\n{table}\n");
                }
            }
        }
        for section in &self.sections {
            let hand_overs: Vec<String> = section.hand_overs().into_iter().map(us).collect();
            if !hand_overs.is_empty() {
                let (ranks, hand_overs) = (section.ranks, hand_overs.join(", "));
                let _ = writeln!(
                    text,
                    "- A cache line goes from core to core in {hand_overs} µs after the rounds of {ranks} ranks."
                );
            }
            for (which, operation, why) in &section.skipped {
                let of = operation.map_or(String::new(), |o| format!(", {o}"));
                if operation.is_none_or(|o| names.contains(&o.to_string())) {
                    let _ = writeln!(text, "- {which}, {} ranks{of}: skipped: {why}", section.ranks);
                }
            }
        }
        text.trim_end().to_owned() + "\n"
    }

    pub(super) fn json(&self) -> Result<String> {
        let value = json!({
            "date": self.date,
            "machine": self.machine,
            "load_before": self.load,
            "rounds": self.rounds,
            "sections": self.sections.iter().map(Section::json).collect::<Vec<_>>(),
        });
        serde_json::to_string_pretty(&value).context("the figures as JSON")
    }

    /// `text` with what stands between its marks replaced, where something for it was measured.
    pub(super) fn renew(&self, text: &str) -> Result<String> {
        let measured = self.tables();
        let mut out = String::new();
        for piece in pieces(text)? {
            let mut names = piece.names.clone();
            names.retain(|name| measured.contains(name));
            out += piece.before;
            out += piece.begin;
            match names.is_empty() {
                true => out += piece.between,
                false => {
                    let _ = write!(out, "\n{}", self.markdown(&names));
                }
            }
            out += piece.end;
        }
        Ok(out)
    }
}

/// The names of all tables, in order.
fn names() -> Vec<String> {
    let mut names: Vec<String> = Operation::ALL
        .iter()
        .filter(|o| !o.is_short())
        .map(Operation::to_string)
        .collect();
    names.push(LATENCY.to_owned());
    names
}

/// A place for tables in a document, and what stands before it; the last piece has what stands behind the last place, and no tables.
struct Piece<'a> {
    before: &'a str,
    begin: &'a str,
    names: Vec<String>,
    between: &'a str,
    end: &'a str,
}

fn pieces(text: &str) -> Result<Vec<Piece<'_>>> {
    let (mut rest, mut pieces) = (text, Vec::new());
    while let Some(at) = rest.find(BEGIN) {
        let (before, from) = rest.split_at(at);
        let (begin, behind) = from
            .split_once("-->")
            .with_context(|| format!("a mark {BEGIN} has no end"))?;
        let (between, behind) = behind
            .split_once(END)
            .with_context(|| format!("a mark {BEGIN} --> is not followed by {END}"))?;
        let words = begin.strip_prefix(BEGIN).unwrap_or_default();
        let mut named: Vec<String> = words.split_whitespace().map(str::to_owned).collect();
        if let Some(unknown) = named.iter().find(|name| !names().contains(name)) {
            bail!(
                "the mark {begin}--> names a table '{unknown}'; there are {}",
                names().join(", ")
            );
        }
        if named.is_empty() {
            named = names();
        }
        let begin = from.get(..begin.len() + "-->".len()).unwrap_or(begin);
        pieces.push(Piece {
            before,
            begin,
            names: named,
            between,
            end: END,
        });
        rest = behind;
    }
    if pieces.is_empty() {
        bail!("the file has no marks {BEGIN} --> and {END}");
    }
    pieces.push(Piece {
        before: rest,
        begin: "",
        names: Vec::new(),
        between: "",
        end: "",
    });
    Ok(pieces)
}

/// Whether tables can be put into `text`.
pub(super) fn check(text: &str) -> Result<()> {
    pieces(text).map(|_| ())
}

/// What a line is called; in the table of an operation the size alone.
fn label(table: &str, point: Point) -> String {
    let operation = point.operation;
    match (table == LATENCY, point.bytes) {
        (true, 0) => operation.to_string(),
        (true, size) => format!("{operation} {}", bytes(size)),
        (false, size) => bytes(size),
    }
}

fn none() -> String {
    "–".to_owned()
}

/// The median, and what the rounds were if they differ.
fn spread(s: Spread) -> String {
    match s.least < s.greatest {
        true => format!("{} ({}–{})", us(s.median), us(s.least), us(s.greatest)),
        false => us(s.median),
    }
}

/// A table of Markdown whose columns are as wide as their widest cell, so that it can be read as text.
fn aligned(head: &[String], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = head.iter().map(|cell| cell.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    let line = |cells: &[String]| {
        let padded = cells
            .iter()
            .zip(&widths)
            .map(|(cell, &width)| format!("{cell:>width$}"));
        format!("| {} |\n", padded.collect::<Vec<_>>().join(" | "))
    };
    let rule: Vec<String> = widths.iter().map(|width| "-".repeat(width - 1) + ":").collect();
    let mut text = line(head) + &line(&rule);
    rows.iter().for_each(|row| text += &line(row));
    text
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let (low, high) = (values.len().checked_sub(1)? / 2, values.len() / 2);
    Some((values.get(low)? + values.get(high)?) / 2.0)
}

fn bytes(n: u64) -> String {
    match n {
        n if n >= 1 << 20 && n.is_multiple_of(1 << 20) => format!("{} MiB", n >> 20),
        n if n >= 1 << 10 && n.is_multiple_of(1 << 10) => format!("{} KiB", n >> 10),
        n => format!("{n} B"),
    }
}

/// Microseconds with about three digits that mean something.
fn us(time: f64) -> String {
    match time {
        t if t < 10.0 => format!("{t:.2}"),
        t if t < 100.0 => format!("{t:.1}"),
        t => format!("{t:.0}"),
    }
}

fn said(command: &mut Command) -> String {
    let out = command
        .output()
        .map(|o| String::from_utf8_lossy(&o.stdout).trim().to_owned());
    out.unwrap_or_default()
}

/// How many programs want a core, over the last minute: figures of a busy machine are not worth much.
pub(super) fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().unwrap_or("unknown").to_owned()
}

/// The processor, its cores, and the system, in words.
fn machine() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = info.lines().find(|l| l.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let widest = ["avx512f", "avx2"];
    let flags = field("flags").unwrap_or_default();
    let widest = widest.into_iter().find(|w| flags.split(' ').any(|f| f == *w));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    format!(
        "{} (family {}, {}), {cores} cores, Linux {}",
        field("model name").unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
        field("cpu family").unwrap_or_else(|| "unknown".to_owned()),
        widest.unwrap_or("no wide registers"),
        said(Command::new("uname").arg("-r")),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn at(operation: Operation, bytes: u64) -> Point {
        Point { operation, bytes }
    }

    fn section() -> Section {
        let (small, large) = (at(Operation::AllReduce, 4), at(Operation::AllReduce, MIB));
        let barrier = at(Operation::Barrier, 0);
        let mut section = Section::new(2, vec![small, large, barrier]);
        let times = |median: f64| Times { median, min: median };
        for (which, [a, b, c]) in [
            (Which::Ours, [1.0, 100.0, 0.5]),
            (Which::OursAlloc, [1.0, 50.0, 0.0]),
            (Which::Mpich, [0.5, 264.0, 0.25]),
        ] {
            section.measured.push((which, Figures::new()));
            for slower in [1.0, 1.25, 1.0] {
                let mut said = vec![(small, times(a * slower)), (large, times(b * slower))];
                if which.measures(Operation::Barrier) {
                    said.push((barrier, times(c)));
                }
                section.add(which, said);
            }
        }
        section.skip(Which::Gloo, None, "not installed".to_owned());
        section.skip(Which::Mpich, Some(Operation::Broadcast), "it has none".to_owned());
        section.limits = [0.05, 0.6]
            .map(|hand_over| Limits {
                hand_over: Some(hand_over),
                points: [(small, 0.25), (large, 80.0)].into(),
            })
            .into();
        section
    }

    fn report() -> Report {
        Report::new(vec![section()], 3, load())
    }

    /// Cells without what aligns them.
    fn cells(text: &str) -> Vec<String> {
        text.lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect()
    }

    #[test]
    fn a_table_has_spreads_ratios_limits_and_says_what_was_skipped() {
        let text = report().markdown(&["all_reduce".to_owned(), LATENCY.to_owned()]);
        let lines = cells(&text);
        for line in [
            "**all_reduce, inside one host**",
            "| ranks | size | oxccl | oxccl alloc | MPICH | ratio | limit | of the limit |",
            "| 2 | 4 B | 1.00 (1.00–1.25) | 1.00 (1.00–1.25) | 0.50 (0.50–0.62) | 0.50 / 0.50 | 0.25 | 25 / 25 % |",
            "| 2 | 1 MiB | 100 (100–125) | 50.0 (50.0–62.5) | 264 (264–330) | 2.64 / 5.28 | 80.0 | 80 / 160 % |",
            "**latency, inside one host**",
            "| 2 | barrier | 0.50 | – | 0.25 | 0.50 / – | – | – / – % |",
            "- A cache line goes from core to core in 0.05, 0.60 µs after the rounds of 2 ranks.",
            "- PyTorch Gloo, 2 ranks: skipped: not installed",
        ] {
            assert!(lines.iter().any(|l| l == line), "no '{line}' in:\n{text}");
        }
        assert!(
            !text.contains("it has none"),
            "broadcast has no table here:\n{text}"
        );
        // As text, the columns stand below each other.
        let tables = text.split("\n\n").filter(|part| part.starts_with('|'));
        for table in tables {
            let widths: Vec<usize> = table.lines().map(|l| l.chars().count()).collect();
            assert!(widths.iter().all(|w| Some(w) == widths.first()), "{table}");
        }
        let json = section().json();
        assert_eq!(json["results"][6]["ratio"], 2.64);
        assert_eq!(json["results"][6]["greatest_us"], 330.0);
        assert_eq!(json["skipped"][1]["op"], "broadcast");
    }

    #[test]
    fn a_run_of_ours_that_failed_is_a_failure() {
        assert!(report().ours_ran());
        for which in [Which::OursTcp, Which::Former] {
            let mut bad = section();
            bad.skip(which, None, "exit status: 1".to_owned());
            assert!(!Report::new(vec![section(), bad], 3, load()).ours_ran());
        }
    }

    #[test]
    fn tables_land_between_the_marks_that_name_them_again_and_again() {
        let text = format!(
            "a\n{BEGIN} all_reduce -->\nold\n{END}\nb\n{BEGIN} broadcast -->\nkept\n{END}\nc\n{BEGIN} -->\n{END}\nd\n"
        );
        let report = report();
        let once = report.renew(&text).unwrap();
        let parts: Vec<&str> = once.split(END).collect();
        let [reduced, kept, all, end] = parts.as_slice() else {
            panic!("{once}");
        };
        assert!(
            reduced.starts_with(&format!("a\n{BEGIN} all_reduce -->\nf32, sums")),
            "{once}"
        );
        assert!(reduced.contains("**all_reduce, inside") && !reduced.contains("**latency"));
        assert_eq!(*kept, format!("\nb\n{BEGIN} broadcast -->\nkept\n"));
        assert!(all.contains("**all_reduce, inside") && all.contains("**latency, inside"));
        assert_eq!(*end, "\nd\n");
        assert_eq!(report.renew(&once).unwrap(), once);
        for wrong in [
            "a".to_owned(),
            format!("{BEGIN} -->"),
            format!("{BEGIN} scan -->{END}"),
        ] {
            assert!(check(&wrong).is_err() && report.renew(&wrong).is_err(), "{wrong}");
        }
    }
}
