//! The tables: size × {ours, peers, ratios, limit}, as Markdown or JSON.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::measure::Times;
use super::programs::Which;

const BEGIN: &str = "<!-- bench-peers:begin -->";
const END: &str = "<!-- bench-peers:end -->";

/// What one program measured: for each size, once a round.
type Figures = BTreeMap<u64, Vec<Times>>;

/// All figures for one number of ranks.
pub(super) struct Section {
    pub(super) ranks: u32,
    sizes: Vec<u64>,
    pub(super) measured: Vec<(Which, Figures)>,
    /// Who could not be measured, and why.
    pub(super) skipped: Vec<(Which, String)>,
    /// Microseconds for each size, once a round.
    pub(super) limits: Vec<BTreeMap<u64, f64>>,
}

impl Section {
    pub(super) fn new(ranks: u32, sizes: Vec<u64>) -> Self {
        Self {
            ranks,
            sizes,
            measured: Vec::new(),
            skipped: Vec::new(),
            limits: Vec::new(),
        }
    }

    /// The median of the rounds' medians, in microseconds.
    fn time(&self, which: Which, size: u64) -> Option<f64> {
        let (_, figures) = self.measured.iter().find(|(w, _)| *w == which)?;
        median(figures.get(&size)?.iter().map(|t| t.median).collect())
    }

    /// The fastest call of all rounds.
    fn best(&self, which: Which, size: u64) -> Option<f64> {
        let (_, figures) = self.measured.iter().find(|(w, _)| *w == which)?;
        figures.get(&size)?.iter().map(|t| t.min).reduce(f64::min)
    }

    fn limit(&self, size: u64) -> Option<f64> {
        median(self.limits.iter().filter_map(|l| l.get(&size).copied()).collect())
    }

    /// A table of `ours` against its rivals.
    fn table(&self, ours: Which) -> Option<String> {
        let (mine, rivals): (Vec<Which>, Vec<Which>) = self
            .measured
            .iter()
            .map(|(w, _)| *w)
            .filter(|w| w.rival() == ours && *w != Which::OursAlloc)
            .partition(|w| *w == ours);
        mine.first()?;
        let mut head = format!("| size | {ours} |");
        for rival in &rivals {
            let _ = write!(head, " {rival} | ratio |");
        }
        let shared = ours == Which::Ours;
        if shared {
            head += " limit | limit ÷ ours |";
        }
        let in_place = shared && self.measured.iter().any(|(w, _)| *w == Which::OursAlloc);
        if in_place {
            let _ = write!(head, " {} | limit ÷ it | best peer ÷ it |", Which::OursAlloc);
        }
        let columns = head.matches('|').count() - 1;
        let mut text = format!("{head}\n|{}\n", "---:|".repeat(columns));
        for &size in &self.sizes {
            let Some(time) = self.time(ours, size) else {
                continue;
            };
            let _ = write!(text, "| {} | {} |", bytes(size), us(time));
            for rival in &rivals {
                let Some(theirs) = self.time(*rival, size) else {
                    text += " – | – |";
                    continue;
                };
                let _ = write!(text, " {} | {:.2} |", us(theirs), theirs / time);
            }
            if let Some(limit) = self.limit(size).filter(|_| shared) {
                let _ = write!(text, " {} | {:.0} % |", us(limit), 100.0 * limit / time);
            }
            if let Some(time) = self.time(Which::OursAlloc, size).filter(|_| in_place) {
                let share = self.limit(size).map_or(0.0, |limit| 100.0 * limit / time);
                let best = rivals
                    .iter()
                    .filter_map(|rival| self.time(*rival, size))
                    .reduce(f64::min);
                let ratio = best.map_or("–".to_owned(), |best| format!("{:.2}", best / time));
                let _ = write!(text, " {} | {share:.0} % | {ratio} |", us(time));
            }
            text += "\n";
        }
        Some(text)
    }

    fn markdown(&self) -> String {
        let mut text = String::new();
        for (ours, title) in [
            (Which::Ours, "inside one host"),
            (Which::OursTcp, "TCP on loopback"),
        ] {
            if let Some(table) = self.table(ours) {
                let _ = write!(text, "**{} ranks, {title}** (µs)\n\n{table}\n", self.ranks);
            }
        }
        for (which, why) in &self.skipped {
            let _ = writeln!(text, "- {which}, {} ranks: skipped: {why}", self.ranks);
        }
        text + if self.skipped.is_empty() { "" } else { "\n" }
    }

    fn json(&self) -> Value {
        let lines = self.measured.iter().flat_map(|(which, _)| {
            self.sizes.iter().filter_map(move |&size| {
                let time = self.time(*which, size)?;
                let ratio = self.time(which.rival(), size).map(|ours| time / ours);
                Some(json!({
                    "program": which.to_string(), "bytes": size, "median_us": time, "min_us": self.best(*which, size),
                    "ratio": ratio, "limit_us": self.limit(size),
                }))
            })
        });
        let skipped = self.skipped.iter();
        json!({
            "ranks": self.ranks,
            "results": lines.collect::<Vec<_>>(),
            "skipped": skipped.map(|(w, why)| json!({"program": w.to_string(), "why": why})).collect::<Vec<_>>(),
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

    /// True if our own program was measured in every section.
    pub(super) fn ours_ran(&self) -> bool {
        let failed = |s: &Section| s.skipped.iter().any(|(w, _)| w.is_ours());
        !self.sections.iter().any(failed)
    }

    pub(super) fn markdown(&self) -> String {
        let mut text = format!(
            "All-reduce of f32, sums, processes; median over the calls of the slowest rank's time, then over {} rounds in which \
             the programs took turns. A ratio above 1 means that oxccl is faster. Measured on {} on {}, load {} before.\n\n",
            self.rounds, self.date, self.machine, self.load
        );
        for section in &self.sections {
            text += &section.markdown();
        }
        text
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
}

/// `text` with what stands between the marks replaced by `tables`.
pub(super) fn replace(text: &str, tables: &str) -> Result<String> {
    let marks = || {
        let (before, rest) = text.split_once(BEGIN)?;
        let (_, after) = rest.split_once(END)?;
        Some((before, after))
    };
    let (before, after) = marks().with_context(|| format!("the file has no marks {BEGIN} and {END}"))?;
    Ok(format!("{before}{BEGIN}\n{}\n{END}{after}", tables.trim_end()))
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

    fn times(median: f64) -> Times {
        Times { median, min: median }
    }

    fn section() -> Section {
        let mut section = Section::new(2, vec![4, 1 << 20]);
        let figures = |a: f64, b: f64| -> Figures {
            [
                (4, vec![times(a); 3]),
                (1 << 20, vec![times(b), times(b * 9.0), times(b)]),
            ]
            .into()
        };
        section.measured = vec![
            (Which::Ours, figures(1.0, 100.0)),
            (Which::OursAlloc, figures(1.0, 50.0)),
            (Which::Mpich, figures(0.5, 264.0)),
        ];
        section.skipped = vec![(Which::Gloo, "not installed".to_owned())];
        section.limits = vec![[(4, 0.25), (1 << 20, 80.0)].into()];
        section
    }

    #[test]
    fn a_table_has_ratios_limits_and_whoever_was_skipped() {
        let text = section().markdown();
        assert!(
            text.contains(
                "| size | oxccl | MPICH | ratio | limit | limit ÷ ours | oxccl alloc | limit ÷ it | best peer ÷ it |"
            ),
            "{text}"
        );
        assert!(
            text.contains("| 4 B | 1.00 | 0.50 | 0.50 | 0.25 | 25 % | 1.00 | 25 % | 0.50 |"),
            "{text}"
        );
        assert!(
            text.contains("| 1 MiB | 100 | 264 | 2.64 | 80.0 | 80 % | 50.0 | 160 % | 5.28 |"),
            "{text}"
        );
        assert!(
            text.contains("- PyTorch Gloo, 2 ranks: skipped: not installed"),
            "{text}"
        );
        let json = section().json();
        assert_eq!(json["results"][5]["ratio"], 2.64);
        assert_eq!(json["skipped"][0]["program"], "PyTorch Gloo");
    }

    #[test]
    fn a_run_of_ours_that_failed_is_a_failure() {
        let mut bad = section();
        assert!(Report::new(vec![section()], 3, load()).ours_ran());
        bad.skipped.push((Which::OursTcp, "exit status: 1".to_owned()));
        assert!(!Report::new(vec![section(), bad], 3, load()).ours_ran());
    }

    #[test]
    fn tables_land_between_the_marks_again_and_again() {
        let text = format!("a\n{BEGIN}\nold\n{END}\nb\n");
        let once = replace(&text, "new\n").unwrap();
        assert_eq!(once, format!("a\n{BEGIN}\nnew\n{END}\nb\n"));
        assert_eq!(replace(&once, "new\n").unwrap(), once);
        assert!(replace("a", "new").is_err());
    }
}
