//! `cargo xtask bench-peers`: our operations against MPI's and PyTorch's, or those of a former build, on this machine, in one session.
//!
//! `programs` finds or installs the peers, `operations` says what is measured, `measure` runs one program, `limit` measures what
//! the machine could do at best, `report` makes the tables: ours, peers, ratios, limit. All programs measure by the rule of
//! `oxccl bench` (each call behind a barrier, the slowest rank counts, median); they take turns, round after round, so that a
//! noisy minute hits all.

mod limit;
mod measure;
mod operations;
mod programs;
mod report;

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::metadata::Metadata;
use operations::{Calls, Operation, Point};
use programs::{Program, Which};
use report::{Report, Section};

/// Options of `cargo xtask bench-peers`.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Only these operations.
    #[arg(long, value_delimiter = ',', value_name = "OP,…")]
    ops: Vec<Operation>,
    /// Sizes in bytes, with K and M for powers of 1024 [default: all_reduce 4 to 64M, broadcast and those with parts 64K to 64M,
    /// ping_pong 4 and 1K, all_reduce_async 4].
    #[arg(long, value_delimiter = ',', value_name = "SIZE,…", value_parser = parse_size)]
    sizes: Vec<u64>,
    /// Numbers of ranks.
    #[arg(long, value_delimiter = ',', value_name = "N,…", default_value = "2,4",
          value_parser = clap::value_parser!(u32).range(2..=64))]
    ranks: Vec<u32>,
    /// Only these peers, and what of ours they are compared with: mpich, openmpi, openmpi-tcp, gloo.
    #[arg(long, value_delimiter = ',', value_name = "PEER,…")]
    only: Vec<Which>,
    /// Compare with this `oxccl`, of a former build, instead of with other programs: whether a change made something slower. It must
    /// know `oxccl bench --bind`. With --only: over the transports of those peers.
    #[arg(long, value_name = "FILE", conflicts_with = "write")]
    former: Option<PathBuf>,
    /// Install PyTorch for its Gloo if it is not there (gigabytes).
    #[arg(long)]
    with_torch: bool,
    /// How often every program is run; the median counts, the least and the greatest stand beside it.
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// The `oxccl` program to measure [default: built here, in release mode].
    #[arg(long, value_name = "FILE")]
    oxccl: Option<PathBuf>,
    /// Write the figures as JSON instead of tables.
    #[arg(long)]
    json: bool,
    /// Put the tables into these files too, between the marks `<!-- bench-peers:begin -->` and `<!-- bench-peers:end -->`. A first mark
    /// may name what its place is for: `<!-- bench-peers:begin all_reduce latency -->`. Places for what was not measured stay.
    #[arg(long, value_delimiter = ',', value_name = "FILE,…")]
    write: Vec<PathBuf>,
}

fn parse_size(text: &str) -> Result<u64> {
    let (digits, unit) = match text.trim().to_ascii_uppercase() {
        t if t.ends_with('K') => (t.trim_end_matches('K').to_owned(), 1 << 10),
        t if t.ends_with('M') => (t.trim_end_matches('M').to_owned(), 1 << 20),
        t => (t, 1),
    };
    let size = digits.parse::<u64>().ok().and_then(|n| n.checked_mul(unit));
    size.filter(|n| (4..=1 << 30).contains(n) && n.is_multiple_of(4))
        .with_context(|| format!("'{text}' is not a size (whole f32, 4 bytes to 1024M, with K or M)"))
}

/// Runs the comparison. True unless one of our own runs failed.
pub(crate) fn run(arguments: Arguments) -> Result<bool> {
    let load = report::load();
    let metadata = Metadata::read()?;
    // Before anything is measured: what cannot be written then would have been measured in vain.
    let mut files = Vec::new();
    for path in &arguments.write {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        report::check(&text).with_context(|| path.display().to_string())?;
        files.push((path, text));
    }
    let ours = match &arguments.oxccl {
        Some(path) => path.clone(),
        None => metadata
            .build(&["--package", "oxccl-cli", "--bin", "oxccl"], "release")?
            .join("oxccl"),
    };
    let scratch = metadata.target_directory.join("xtask/peers");
    std::fs::create_dir_all(&scratch).with_context(|| format!("cannot make {}", scratch.display()))?;
    let only = &arguments.only;
    let former = arguments.former.as_ref();
    let wanted = |which: Which| {
        let compared = only.is_empty() || only.iter().any(|peer| peer.rival() == which.rival());
        match former {
            Some(_) => compared && (which.is_former() || which.rival() == which),
            None => {
                !which.is_former()
                    && (only.is_empty() || only.contains(&which) || (which.is_ours() && compared))
            }
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);

    let mut programs = Vec::new();
    for which in Which::ALL.into_iter().filter(|w| wanted(*w)) {
        let oxccl = former.filter(|_| which.is_former()).unwrap_or(&ours);
        let found = programs::find(which, oxccl, arguments.with_torch);
        if let Err(why) = &found {
            eprintln!("bench-peers: {which} skipped: {why}");
        }
        programs.push((which, found));
    }
    let operations = match arguments.ops.as_slice() {
        [] => &Operation::ALL,
        some => some,
    };
    let sizes = Some(arguments.sizes.as_slice()).filter(|sizes| !sizes.is_empty());
    let mut sections = Vec::new();
    for &ranks in &arguments.ranks {
        let points = operations::points(operations, sizes, ranks);
        let mut section = Section::new(ranks, points.clone());
        for (which, found) in &programs {
            let usable = found
                .as_ref()
                .map_err(Clone::clone)
                .and_then(|program| which.can_run(ranks as usize, cores).map(|()| program));
            match usable {
                Ok(_) => section.measured.push((*which, BTreeMap::new())),
                Err(why) => section.skip(*which, None, why),
            }
        }
        for round in 1..=arguments.rounds {
            eprintln!(
                "bench-peers: {ranks} ranks, round {round} of {}",
                arguments.rounds
            );
            turn(&mut section, &programs, &scratch, &points)?;
            section
                .limits
                .push(limit::measure(&ours, ranks, &points, &scratch)?);
        }
        sections.push(section);
    }
    let report = Report::new(sections, arguments.rounds, load);
    if arguments.json {
        println!("{}", report.json()?);
    } else {
        print!("{}", report.markdown(&report.tables()));
    }
    for (path, text) in files {
        let text = report.renew(&text)?;
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(report.ours_ran())
}

/// Points that are called equally often.
type Batch = (Calls, Vec<Point>);

/// One round: every program once for each batch of points; PyTorch, which takes seconds to start, once for all. One that fails is
/// out, with what it said.
fn turn(
    section: &mut Section,
    programs: &[(Which, Result<Program, String>)],
    scratch: &std::path::Path,
    points: &[Point],
) -> Result<()> {
    let batches = operations::batches(points);
    let mut turns: Vec<(bool, &[Batch])> = batches.chunks(1).map(|one| (false, one)).collect();
    turns.push((true, &batches));
    for (slow, batches) in turns {
        for which in section.measured.iter().map(|(w, _)| *w).collect::<Vec<_>>() {
            let Some((_, Ok(program))) = programs.iter().find(|(w, _)| *w == which) else {
                bail!("{which} has no program");
            };
            if matches!(program, Program::Torch { .. }) != slow {
                continue;
            }
            let batches: Vec<Batch> = batches
                .iter()
                .map(|(calls, points)| {
                    let points = points.iter().copied();
                    (*calls, points.filter(|p| which.measures(p.operation)).collect())
                })
                .filter(|(_, points): &Batch| !points.is_empty())
                .collect();
            if batches.is_empty() {
                continue;
            }
            match measure::run(program, section.ranks, &batches, scratch) {
                Ok(said) => {
                    for (operation, why) in said.lacks {
                        section.skip(which, Some(operation), why);
                    }
                    section.add(which, said.times);
                }
                Err(e) => {
                    let why = format!("{e:#}");
                    eprintln!("bench-peers: {which} failed: {why}");
                    section.measured.retain(|(w, _)| *w != which);
                    section.skip(which, None, why);
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_whole_floats_with_units() {
        assert_eq!(parse_size("64K").unwrap(), 65_536);
        assert_eq!(parse_size(" 1m").unwrap(), 1 << 20);
        for wrong in ["", "K", "0", "6", "2G", "-4", "1025M"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
    }
}
