//! `cargo xtask bench-peers`: our all-reduce against MPI's and PyTorch's on this machine, in one session.
//!
//! `programs` finds or installs the peers, `measure` runs one program once, `limit` measures what the machine could do at
//! best, `report` prints size × {ours, peers, ratios, limit}. All programs measure by the rule of `oxccl bench` (each call
//! behind a barrier, the slowest rank counts, median); they take turns, round after round, so that a noisy minute hits all.

mod limit;
mod measure;
mod programs;
mod report;

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::metadata::{Metadata, cargo_command};
use crate::process::{self, Output};
use measure::Times;
use programs::{Program, Which};
use report::{Report, Section};

/// Options of `cargo xtask bench-peers`.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Sizes in bytes, with K and M for powers of 1024.
    #[arg(long, value_delimiter = ',', value_name = "SIZE,…", value_parser = parse_size,
          default_value = "4,1K,4K,16K,64K,256K,1M,4M,16M,64M")]
    sizes: Vec<u64>,
    /// Numbers of ranks, one table for each.
    #[arg(long, value_delimiter = ',', value_name = "N,…", default_value = "2,4",
          value_parser = clap::value_parser!(u32).range(2..=64))]
    ranks: Vec<u32>,
    /// Only these peers: mpich, openmpi, openmpi-tcp, gloo.
    #[arg(long, value_delimiter = ',', value_name = "PEER,…")]
    only: Vec<Which>,
    /// Install PyTorch for its Gloo if it is not there (gigabytes).
    #[arg(long)]
    with_torch: bool,
    /// How often every program is run; the median counts.
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// The `oxccl` program to measure [default: built here, in release mode].
    #[arg(long, value_name = "FILE")]
    oxccl: Option<PathBuf>,
    /// Write the figures as JSON instead of tables.
    #[arg(long)]
    json: bool,
    /// Put the tables into this file too, between its marks `bench-peers:begin` and `bench-peers:end`.
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,
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

/// Calls for a size, not measured and measured: small ones vary more and cost nothing.
fn calls(bytes: u64) -> (u32, u32) {
    match bytes {
        0..=65_536 => (50, 400),
        65_537..=4_194_304 => (10, 60),
        _ => (3, 12),
    }
}

/// The sizes, put together by how often they are called, because a program takes one number for all.
fn batches(sizes: &[u64]) -> Vec<((u32, u32), Vec<u64>)> {
    let mut batches: BTreeMap<u32, ((u32, u32), Vec<u64>)> = BTreeMap::new();
    for &size in sizes {
        let calls = calls(size);
        batches
            .entry(u32::MAX - calls.1)
            .or_insert((calls, Vec::new()))
            .1
            .push(size);
    }
    batches.into_values().collect()
}

/// Runs the comparison. True unless one of our own runs failed.
pub(crate) fn run(mut arguments: Arguments) -> Result<bool> {
    arguments.sizes.sort_unstable();
    arguments.sizes.dedup();
    let load = report::load();
    let metadata = Metadata::read()?;
    let ours = match &arguments.oxccl {
        Some(path) => path.clone(),
        None => build(&metadata)?,
    };
    let scratch = metadata.target_directory.join("xtask/peers");
    std::fs::create_dir_all(&scratch).with_context(|| format!("cannot make {}", scratch.display()))?;
    let wanted =
        |which: Which| which.is_ours() || arguments.only.is_empty() || arguments.only.contains(&which);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);

    let mut programs = Vec::new();
    for which in Which::ALL.into_iter().filter(|w| wanted(*w)) {
        let found = programs::find(which, &ours, &metadata, arguments.with_torch);
        if let Err(why) = &found {
            eprintln!("bench-peers: {which} skipped: {why}");
        }
        programs.push((which, found));
    }
    let mut sections = Vec::new();
    for &ranks in &arguments.ranks {
        let mut section = Section::new(ranks, arguments.sizes.clone());
        for (which, found) in &programs {
            let usable = found
                .as_ref()
                .map_err(Clone::clone)
                .and_then(|program| which.can_run(ranks as usize, cores).map(|()| program));
            match usable {
                Ok(_) => section.measured.push((*which, BTreeMap::new())),
                Err(why) => section.skipped.push((*which, why)),
            }
        }
        for round in 1..=arguments.rounds {
            eprintln!(
                "bench-peers: {ranks} ranks, round {round} of {}",
                arguments.rounds
            );
            turn(&mut section, &programs, &scratch, &arguments.sizes)?;
            section
                .limits
                .push(limit::measure(ranks as usize, cores, &arguments.sizes)?);
        }
        sections.push(section);
    }
    let report = Report::new(sections, arguments.rounds, load);
    if arguments.json {
        println!("{}", report.json()?);
    } else {
        print!("{}", report.markdown());
    }
    if let Some(file) = &arguments.write {
        let text =
            std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        let text = report::replace(&text, &report.markdown())?;
        std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(report.ours_ran())
}

/// One round: every program once. One that fails is out, with what it said.
fn turn(
    section: &mut Section,
    programs: &[(Which, Result<Program, String>)],
    scratch: &std::path::Path,
    sizes: &[u64],
) -> Result<()> {
    for (calls, sizes) in batches(sizes) {
        let mut failed = Vec::new();
        for (which, figures) in &mut section.measured {
            let Some((_, Ok(program))) = programs.iter().find(|(w, _)| w == which) else {
                bail!("{which} has no program");
            };
            match measure::run(program, section.ranks, calls, &sizes, scratch) {
                Ok(times) => {
                    for (size, time) in times {
                        figures.entry(size).or_insert_with(Vec::<Times>::new).push(time);
                    }
                }
                Err(e) => failed.push((*which, format!("{e:#}"))),
            }
        }
        for (which, why) in failed {
            eprintln!("bench-peers: {which} failed: {why}");
            section.measured.retain(|(w, _)| *w != which);
            section.skipped.push((which, why));
        }
    }
    Ok(())
}

fn build(metadata: &Metadata) -> Result<PathBuf> {
    let mut cargo = cargo_command(&metadata.workspace_root);
    cargo.args(["build", "--release", "--package", "oxccl-cli", "--bin", "oxccl"]);
    let limit = std::time::Duration::from_secs(30 * 60);
    let finished = process::run(&mut cargo, limit, Output::Inherit, |_| {})?;
    if !finished.is_success() {
        bail!("oxccl could not be built: {}", finished.describe());
    }
    Ok(metadata.target_directory.join("release/oxccl"))
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

    #[test]
    fn batches_hold_every_size_once_and_keep_small_ones_together() {
        let sizes = [4, 65_536, 1 << 20, 1 << 26];
        let batches = batches(&sizes);
        assert_eq!(batches.len(), 3);
        let all: Vec<u64> = batches.iter().flat_map(|(_, s)| s.clone()).collect();
        assert_eq!(all, sizes);
        assert_eq!(batches.first().unwrap().0, (50, 400));
    }
}
