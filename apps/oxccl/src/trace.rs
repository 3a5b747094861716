//! `oxccl trace`: what the flight recorders of a job's processes have kept, shown, compared and passed on to other tools.

mod chrome;
mod dump;
mod merge;
mod pickle;
mod record;
#[cfg(test)]
mod tests;
mod torch;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use oxccl::core::{Error, Result, deadline_in};

use self::record::{Operation, Record};
use super::ExitCode;

const EXAMPLES: &str = "\
Examples:
  Every process of a job writes its record when one of its groups fails:
    OXCCL_FLIGHT_RECORDER_DIR=records oxccl launch …

  Which rank did something else than the others, or did not come:
    oxccl trace merge records/*.json

  As a picture for https://ui.perfetto.dev or chrome://tracing, and for PyTorch's analyser:
    oxccl trace merge records/*.json --chrome trace.json --torch for-torch
    python -m torch.distributed.flight_recorder.fr_trace for-torch

  The record of a process that runs, and hangs:
    oxccl trace dump 4711

  The last operations of one process:
    oxccl trace show records/flight-host1-4711-1764000000000.json

  `dump` sends SIGUSR2. The programs of this repository write their records then, and `oxccl launch` passes it on to all its ranks
  (docs/observability.md); a program without a handler for it is left alone.

Exit codes of `merge`:
  0    the records agree
  1    a divergence: something differs, is missing, failed or does not end
  2    a file cannot be read or written, or is no flight record
The others are those of `oxccl --help`.";

/// Show and compare the flight records of a job's processes: which rank did something else than the others.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Asks processes of this machine for their records, and prints the files.
    Dump(Dump),
    /// The last operations of one process.
    Show(Show),
    /// Where the records of several processes first differ, in one sentence.
    Merge(Merge),
}

#[derive(Debug, clap::Args)]
struct Dump {
    /// Their numbers, as `oxccl launch` prints them.
    #[arg(value_name = "PID", required = true)]
    processes: Vec<u32>,
    /// How long to wait for each file.
    #[arg(long, default_value_t = 10.0, value_name = "S", value_parser = positive)]
    wait_s: f64,
}

#[derive(Debug, clap::Args)]
struct Show {
    /// The record.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// How many operations of each group, the last ones.
    #[arg(long, default_value_t = 20, value_name = "N")]
    last: usize,
}

#[derive(Debug, clap::Args)]
struct Merge {
    /// The records: one for each process of the job.
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// A rank that comes this much later than all others to an operation is named.
    #[arg(long, default_value_t = 1.0, value_name = "S", value_parser = positive)]
    late_s: f64,
    /// Everything that was found, as JSON.
    #[arg(long)]
    json: bool,
    /// Writes a trace for Perfetto and Chrome.
    #[arg(long, value_name = "FILE")]
    chrome: Option<PathBuf>,
    /// Writes the folder that PyTorch's flight-recorder analyser reads.
    #[arg(long, value_name = "DIR")]
    torch: Option<PathBuf>,
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(s) if s > 0.0 && s.is_finite() => Ok(s),
        _ => Err("not a number of seconds larger than 0".to_string()),
    }
}

pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    match arguments.what {
        What::Dump(asked) => {
            for pid in asked.processes {
                let limit = Duration::from_secs_f64(asked.wait_s.min(86_400.0));
                let path = dump::dump(pid, deadline_in(limit))?;
                crate::results::write(&format!("{}\n", path.display()))?;
            }
            Ok(ExitCode::SUCCESS)
        }
        What::Show(show) => {
            let record = read(&show.file)?;
            crate::results::write(&shown(&record, show.last))?;
            Ok(ExitCode::SUCCESS)
        }
        What::Merge(merge) => merged(&merge),
    }
}

/// Whatever is wrong with a file is wrong with the command line.
fn read(path: &Path) -> Result<Record> {
    Record::read(path).map_err(|e| Error::invalid(e.message()))
}

fn merged(arguments: &Merge) -> Result<ExitCode> {
    let records: Vec<Record> = arguments.files.iter().map(|f| read(f)).collect::<Result<_>>()?;
    if let Some(path) = &arguments.chrome {
        put(path, chrome::trace(&records).to_string().as_bytes())?;
    }
    if let Some(folder) = &arguments.torch {
        std::fs::create_dir_all(folder)
            .map_err(|e| Error::invalid(format!("create the folder {}: {e}", folder.display())))?;
        for (name, contents) in torch::files(&records)? {
            put(&folder.join(name), &contents)?;
        }
    }
    let verdict = merge::merge(&records, (arguments.late_s * 1e9) as u64);
    match arguments.json {
        true => crate::results::json(&verdict, "what was found")?,
        false => crate::results::write(&format!("{}\n", told(&records, &verdict).trim_end()))?,
    }
    Ok(ExitCode::from(u8::from(verdict.diverged)))
}

/// As what is wrong with a file that is read: the exit code of a failed run would mean a divergence.
fn put(path: &Path, contents: &[u8]) -> Result<()> {
    std::fs::write(path, contents).map_err(|e| Error::invalid(format!("write {}: {e}", path.display())))
}

fn told(records: &[Record], verdict: &merge::Verdict) -> String {
    let mut text = format!("{}\n", verdict.text);
    for found in verdict.findings.iter().filter(|f| f.text != verdict.text) {
        let when = if found.present { "also" } else { "before" };
        let _ = writeln!(text, "  {when}: {}", found.text);
    }
    for epoch in merge::epochs(records).iter().filter(|e| e.is_present()) {
        let ranks: Vec<String> = epoch.ranks().map(|r| r.to_string()).collect();
        let last = epoch.last_seq().map_or("no collective".to_string(), |seq| {
            format!("collectives up to #{seq}")
        });
        let _ = writeln!(
            text,
            "group {} (epoch {}): records of ranks {} of {}, {last}",
            epoch.group,
            epoch.epoch,
            ranks.join(", "),
            epoch.world
        );
    }
    text
}

fn shown(record: &Record, last: usize) -> String {
    let mut text = format!("{}; written because: {}\n", record.process(), record.why);
    for group in &record.groups {
        let Some(now) = group.configurations.last() else {
            continue;
        };
        let _ = writeln!(
            text,
            "\ngroup {} (epoch {}): rank {} of {}; {} operations, {} more are overwritten",
            now.name,
            now.epoch,
            now.rank,
            now.world,
            group.operations.len(),
            group.overwritten
        );
        let skipped = group.operations.len().saturating_sub(last);
        for op in group.operations.iter().skip(skipped) {
            let _ = writeln!(text, "{}", line(op, record));
        }
    }
    text
}

fn line(op: &Operation, record: &Record) -> String {
    let ago = record.written_ns.saturating_sub(op.submitted_ns) as f64 / 1e9;
    let ms = |from: u64, to: u64| to.saturating_sub(from) as f64 / 1e6;
    let queued = op.started_ns.map_or(String::new(), |at| {
        format!(", queued {:.3} ms", ms(op.submitted_ns, at))
    });
    let ran = match (op.started_ns, op.ended_ns) {
        (Some(from), Some(to)) => format!(", ran {:.3} ms", ms(from, to)),
        _ => String::new(),
    };
    let reason = op.reason.as_deref().map_or(String::new(), |r| format!(": {r}"));
    format!(
        "  {:>10.3} s before  epoch {} #{:<6} {:<9} {}{queued}{ran}{reason}",
        ago,
        op.epoch,
        op.seq,
        chrome::state(op.state),
        op.described()
    )
}
