//! `oxccl plan`: which method keeps the devices of a job computing over given links, with figures and what they take for granted.
//!
//! The arguments and a file of links become a job, `fleet` compares the methods, and this side shows them: a table, JSON, a picture (`picture`).

mod picture;

use std::fmt::Write as _;
use std::path::PathBuf;

use fleet::{Estimate, Failures, Job, Link, Links, Outcome, Plan, Rate, Seconds};
use oxccl::core::{Error, Result};
use serde::Serialize;

use super::{ExitCode, svg};

const EXAMPLES: &str = "\
Examples:
  Four hosts of eight devices, 10 Gbit/s and 20 ms between them, a model of 1.3 billion parameters:
    oxccl plan --parameters 1.3B --layers 24 --step 0.8s --hosts 4 --ranks 8 --rate 10gbit --delay 20ms

  Sites and single links from a file, and what a death of a host each six hours costs:
    oxccl plan --parameters 10B --layers 48 --step 2s --links links.json --death-every 6h

  The recommended method played for 500 rounds under the real quorum rules, as JSON; and the methods over the rate as a picture:
    oxccl plan --parameters 1B --step 1s --hosts 64 --ranks 8 --rate 25gbit --death-every 10min --simulate 500 --json
    oxccl plan --parameters 1B --step 1s --hosts 8 --rate 1gbit --delay 30ms --svg plan.svg

Each line is the best of its kind: DDP by format, DiLoCo by H and format; --all shows every candidate. `computing` is the share of time that
devices compute while none dies, `deaths` what deaths leave of that, `useful` both; a step and a token are an inner step's, waiting
included; `sent` leaves a host in an inner step. The arrow marks what is recommended: the closest to plain data parallel with --target.
docs/plan.md describes the file of links and what is assumed.";

/// Foresee which method (DDP, DiLoCo, its fragments, overlap and format) keeps the devices of a job busy over given links.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Parameters of the model, with K, M, B and T for powers of 1000.
    #[arg(long, value_name = "N", value_parser = count)]
    parameters: u64,
    /// What forward, backward and optimizer of one step take on one rank, such as 0.8s or 350ms.
    #[arg(long, value_name = "TIME", value_parser = |s: &str| s.parse::<Seconds>())]
    step: Seconds,
    /// Layers of the model.
    #[arg(long, default_value_t = 24, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    layers: u32,
    /// Tokens of a rank in a step.
    #[arg(long, default_value = "16384", value_name = "N", value_parser = count)]
    tokens: u64,
    /// What a rank copies and computes for each value that it exchanges, beside nothing else, such as 5ns.
    #[arg(long, default_value = "0", value_name = "TIME", value_parser = |s: &str| s.parse::<Seconds>())]
    per_value: Seconds,
    /// Values of a fragment of DiLoCo that travel in one operation (`DilocoConfig::bucket_elements`): more of them wait less where ways are long.
    #[arg(long, default_value = "262144", value_name = "N", value_parser = count)]
    bucket: u64,
    /// Hosts and links from a file (docs/plan.md), instead of equal ones.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["hosts", "ranks", "rate", "delay", "loss", "local_rate", "local_delay"])]
    links: Option<PathBuf>,
    /// Equal hosts.
    #[arg(long, value_name = "N", required_unless_present = "links", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    hosts: Option<u32>,
    /// Ranks of each.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    ranks: u32,
    /// What a host sends and takes in, such as 10gbit.
    #[arg(long, value_name = "RATE", required_unless_present = "links", value_parser = |s: &str| s.parse::<Rate>())]
    rate: Option<Rate>,
    /// The way from one host to another, one way.
    #[arg(long, default_value = "50us", value_name = "TIME", value_parser = |s: &str| s.parse::<Seconds>())]
    delay: Seconds,
    /// The share of packets lost between hosts.
    #[arg(long, default_value_t = 0.0, value_name = "SHARE")]
    loss: f64,
    /// What a rank reads and writes within its host.
    #[arg(long, default_value = "400gbit", value_name = "RATE", value_parser = |s: &str| s.parse::<Rate>())]
    local_rate: Rate,
    /// The way from one rank to another within a host.
    #[arg(long, default_value = "2us", value_name = "TIME", value_parser = |s: &str| s.parse::<Seconds>())]
    local_delay: Seconds,
    /// From one death of a host to the next, on average over the whole job [default: none dies].
    #[arg(long, value_name = "TIME", value_parser = |s: &str| s.parse::<Seconds>())]
    death_every: Option<Seconds>,
    /// From a death until another replica asks to join.
    #[arg(long, default_value = "60s", value_name = "TIME", value_parser = |s: &str| s.parse::<Seconds>())]
    restart: Seconds,
    /// From a death until the lighthouse knows.
    #[arg(long, default_value = "100ms", value_name = "TIME", value_parser = |s: &str| s.parse::<Seconds>())]
    notice: Seconds,
    /// What connecting for a new epoch takes.
    #[arg(long, default_value = "1s", value_name = "TIME", value_parser = |s: &str| s.parse::<Seconds>())]
    reconnect: Seconds,
    /// What a replica that heals fetches, in bytes per parameter.
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000))]
    state: u32,
    /// The share of their time that devices shall compute.
    #[arg(long, default_value_t = 0.95, value_name = "SHARE")]
    target: f64,
    /// Play so many rounds of the recommended method, with the deaths, in virtual time.
    #[arg(long, value_name = "ROUNDS", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    simulate: Option<u64>,
    /// Show every candidate.
    #[arg(long)]
    all: bool,
    /// As JSON, with every candidate.
    #[arg(long)]
    json: bool,
    /// Draw what the methods leave of the time over the rate of the links into this SVG file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// As `1.3B`. Errors: `InvalidArgument`.
fn count(text: &str) -> Result<u64> {
    let units = [("K", 1e3), ("M", 1e6), ("B", 1e9), ("T", 1e12)];
    let upper = text.trim().to_ascii_uppercase();
    let (number, by) = units
        .iter()
        .find_map(|(unit, by)| upper.strip_suffix(unit).map(|number| (number.to_owned(), *by)))
        .unwrap_or((upper, 1.0));
    match number.trim().parse::<f64>() {
        Ok(n) if n > 0.0 && n * by >= 1.0 && n * by < 1e15 => Ok((n * by).round() as u64),
        _ => Err(Error::invalid(format!(
            "'{text}': write a number of at least 1, with K, M, B or T behind it for powers of 1000"
        ))),
    }
}

pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    if let Some(path) = &arguments.svg {
        svg::check("--svg", path)?;
    }
    let links = links(&arguments)?;
    let job = Job {
        parameters: arguments.parameters,
        layers: arguments.layers,
        step: arguments.step,
        tokens: arguments.tokens,
        per_value: arguments.per_value,
        bucket: arguments.bucket,
        failures: Failures {
            every: arguments.death_every,
            restart: arguments.restart,
            notice: arguments.notice,
            reconnect: arguments.reconnect,
            state: arguments.state,
        },
        target: arguments.target,
    };
    let plan = fleet::plan(&links, &job)?;
    let played = match (arguments.simulate, plan.best()) {
        (Some(rounds), Some(best)) => {
            let mut fleet = best.fleet.clone();
            fleet.rounds = rounds;
            Some(fleet::simulate(&fleet)?)
        }
        _ => None,
    };
    if let Some(path) = &arguments.svg {
        svg::write(path, &picture::of(&links, &job)?)?;
    }
    match arguments.json {
        true => crate::results::json(
            &Report {
                hosts: links.hosts().len(),
                ranks: links.world(),
                parameters: job.parameters,
                plan: &plan,
                played,
            },
            "the plan",
        )?,
        false => crate::results::write(&screen(&links, &job, &plan, played.as_ref(), arguments.all))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn links(arguments: &Arguments) -> Result<Links> {
    if let Some(path) = &arguments.links {
        let text = std::fs::read_to_string(path).map_err(|e| {
            let text = format!("--links {}: {e}; name a file that can be read", path.display());
            Error::invalid(text)
        })?;
        return Links::from_json(&text);
    }
    let (Some(hosts), Some(rate)) = (arguments.hosts, arguments.rate) else {
        return Err(Error::invalid(
            "say which hosts there are: --hosts and --rate, or --links",
        ));
    };
    let between = Link {
        loss: arguments.loss,
        ..Link::new(rate, arguments.delay)
    };
    let local = Link::new(arguments.local_rate, arguments.local_delay);
    Links::uniform(hosts, arguments.ranks, local, between)
}

#[derive(Serialize)]
struct Report<'a> {
    hosts: usize,
    ranks: u32,
    parameters: u64,
    #[serde(flatten)]
    plan: &'a Plan,
    played: Option<Outcome>,
}

/// What is one kind for the reader.
fn kind(e: &Estimate) -> (u64, &str) {
    (e.sync_every, &e.format)
}

/// The lines to show: the best of each kind, and what is recommended.
fn shown(plan: &Plan, all: bool) -> Vec<(usize, &Estimate)> {
    let mut lines: Vec<(usize, &Estimate)> = Vec::new();
    for (i, e) in plan.estimates.iter().enumerate() {
        let before = lines.iter_mut().find(|(_, other)| !all && kind(other) == kind(e));
        match before {
            Some(line) => {
                let takes_its_place = e.efficiency > line.1.efficiency + 1e-9 && line.0 != plan.recommended;
                if i == plan.recommended || takes_its_place {
                    *line = (i, e);
                }
            }
            None => lines.push((i, e)),
        }
    }
    lines
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

fn screen(links: &Links, job: &Job, plan: &Plan, played: Option<&Outcome>, all: bool) -> String {
    let mut text = format!(
        "{} ranks on {} hosts, {:.3e} parameters, {} a step, {} tokens each\n\n",
        links.world(),
        links.hosts().len(),
        job.parameters as f64,
        job.step,
        job.tokens
    );
    let _ = writeln!(
        text,
        "   {:<24} {:<10} {:>8} {:>10} {:>10} {:>9} {:>8} {:>8} {:>10} {:>10}",
        "method",
        "format",
        "replicas",
        "step",
        "a token",
        "computing",
        "deaths",
        "useful",
        "sent",
        "lighthouse"
    );
    for (i, e) in shown(plan, all) {
        let _ = writeln!(
            text,
            "{} {:<24} {:<10} {:>8} {:>10} {:>10} {:>9} {:>8} {:>8} {:>10} {:>10}",
            if i == plan.recommended { "->" } else { "  " },
            e.method,
            e.format,
            e.replicas,
            e.step.to_string(),
            e.per_token.to_string(),
            percent(e.computing),
            percent(e.goodput),
            percent(e.efficiency),
            e.sent.to_string(),
            percent(e.lighthouse)
        );
    }
    if let Some(best) = plan.best() {
        let _ = writeln!(
            text,
            "\nRecommended: {} in {}, {} replicas, each a {}; between them: {}.\n  {}.",
            best.method, best.format, best.replicas, best.replica, best.topology, plan.reason
        );
    }
    if let Some(hint) = &plan.hint {
        let _ = writeln!(text, "  Besides, {hint}.");
    }
    if let Some(out) = played {
        let _ = writeln!(
            text,
            "\nPlayed: {} rounds in {} attempts and {}; {} of the steps computed count; {} deaths, {} heals, {} epochs; {:.1} contributors.\n  {} of the \
             devices' time is committed work, ranks of a replica waiting for each other included; the lighthouse answers for {}.",
            out.committed,
            out.attempts,
            out.time,
            percent(out.useful),
            out.deaths,
            out.heals,
            out.epochs,
            out.contributors,
            percent(out.efficiency),
            percent(out.lighthouse)
        );
    }
    text.push_str("\nAssumed:\n");
    for line in &plan.assumptions {
        let _ = writeln!(text, "  - {line}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_read_as_people_write_them() {
        assert_eq!(
            ["1.3B", "7b", "350M", "12", "2T"].map(|t| count(t).unwrap()),
            [1_300_000_000, 7_000_000_000, 350_000_000, 12, 2_000_000_000_000]
        );
        for text in ["", "0", "-1B", "NaN", "1Q", "0.1", "1e30"] {
            assert!(count(text).is_err(), "{text}");
        }
    }
}
