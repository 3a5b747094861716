//! `oxccl conformance`: runs the behaviour suite of all backends (crate `conformance`) on a plugin's, and reports in words.
//!
//! Ranks are processes (this command started again as `conformance-rank`) or threads. The cases that apply are those of what the backend advertises.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ::conformance::{Limit, Mode as Ranks, Plan, Tried, Verdict};
use oxccl::core::registry::{Backend, OnConflict};
use oxccl::core::{Device, DeviceKind, Error, ErrorKind, Feature, Registry, Result};
use oxccl::plugin::{self, Loaded};

use super::{ExitCode, again};

const EXAMPLES: &str = "\
Examples:
  Everything that the plugin's backends advertise, with 1 to 4 processes as ranks:
    oxccl conformance --plugin ./libacme.so

  The cases about failures only, with two ranks:
    oxccl conformance --plugin ./libacme.so --case failures --ranks 2

A case that needs an operation, an element type or a feature that the backend does not advertise is not run and counted as not offered.
Each form of an operation meets two of ten element counts, others for the next element type and number of ranks; OXCCL_LONG=1 tries all of them.
What the cases expect of error texts and times is in docs/plugins.md. The exit code is 0 if at least one case ran and none failed, 1 if one failed,
2 if the plugin cannot be used.";

/// Hold a plugin's backends to the suite that every backend passes.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// The plugin's file.
    #[arg(long, value_name = "FILE")]
    plugin: PathBuf,
    /// Only this backend of the plugin [default: all].
    #[arg(long, value_name = "NAME")]
    backend: Option<String>,
    /// The most ranks of a case; from 5 on also the cases of 5 and 8 ranks, which take long.
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=8))]
    ranks: u32,
    /// Whether ranks are processes or threads of one. A rank that crashes costs a case as a process, and the report as a thread.
    #[arg(long, default_value = "processes", value_enum)]
    mode: Mode,
    /// Only the cases whose name contains this, such as `failures` or `world2`.
    #[arg(long, default_value = "", value_name = "TEXT", hide_default_value = true)]
    case: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Mode {
    Processes,
    Threads,
}

/// One rank of a case (how `conformance` starts itself).
#[derive(Debug, clap::Args)]
pub(crate) struct RankArguments {
    /// A plugin that the caller has tried already.
    #[arg(long)]
    plugin: PathBuf,
    #[arg(long)]
    backend: String,
    #[arg(long)]
    device: String,
}

/// The suite for this backend, whose ranks `again` starts.
fn plan(backend: &Backend, mode: Ranks, again: Vec<OsString>) -> Plan {
    let (backend, device) = (backend.clone(), Device::new(backend.device.clone(), 0));
    Plan {
        lasting: true,
        again,
        ..Plan::new(
            device,
            &[mode],
            Arc::new(move |device, options| backend.create(device, &options)),
        )
    }
}

/// The command of a rank.
fn rank_command(file: &Path, backend: &Backend) -> Result<Vec<OsString>> {
    let this = again()?;
    let mut command = vec![this.get_program().to_owned()];
    command.extend(this.get_args().map(ToOwned::to_owned));
    command.extend(["conformance-rank", "--plugin"].map(OsString::from));
    command.push(file.into());
    let rest = ["--backend", &backend.name, "--device", backend.device.name()];
    command.extend(rest.map(OsString::from));
    Ok(command)
}

pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    let loaded = plugin::load(&arguments.plugin)?;
    loaded.register(Registry::global(), OnConflict::Replace)?;
    let backends = chosen(&loaded, arguments.backend.as_deref())?;
    let mut good = true;
    for backend in backends {
        backend.factory.probe()?;
        let threads = backend.factory.capabilities().has(Feature::ThreadRanks);
        if arguments.mode == Mode::Threads && !threads {
            return Err(Error::unsupported(format!(
                "ranks of backend '{}' cannot be threads: it does not advertise THREAD_RANKS; leave out --mode threads",
                backend.name
            )));
        }
        let mode = match arguments.mode {
            Mode::Processes => Ranks::Processes,
            Mode::Threads => Ranks::Threads,
        };
        let plan = Plan {
            limit: Limit {
                ranks: arguments.ranks,
                why: "--ranks",
                ..Limit::NONE
            },
            large: arguments.ranks > 4,
            ..plan(&backend, mode, rank_command(loaded.path(), &backend)?)
        };
        crate::results::write(&format!(
            "# oxccl conformance: backend {} for {} from plugin {} {} ({}), up to {} ranks as {}\n",
            backend.name,
            backend.device,
            loaded.name(),
            loaded.version(),
            loaded.path().display(),
            arguments.ranks,
            match arguments.mode {
                Mode::Processes => "processes",
                Mode::Threads => "threads",
            },
        ))?;
        let began = Instant::now();
        let mut ended = 0;
        let tried = plan.tried(&arguments.case, |_, all| {
            ended += 1;
            progress(ended, all);
        })?;
        crate::results::write(&report(&tried, began.elapsed()))?;
        good &= is_good(&tried);
    }
    Ok(ExitCode::from(u8::from(!good)))
}

/// The child's side.
pub(crate) fn rank(arguments: RankArguments) -> Result<ExitCode> {
    let loaded = plugin::open_trusted(&arguments.plugin)?;
    loaded.register(Registry::global(), OnConflict::Replace)?;
    let device: DeviceKind = arguments.device.parse()?;
    let mut backends = loaded.backends().into_iter();
    let backend = backends
        .find(|b| b.name == arguments.backend && b.device == device)
        .ok_or_else(|| Error::new(ErrorKind::NotFound, "the plugin has no such backend any more"))?;
    match plan(&backend, Ranks::Processes, Vec::new()).serve() {
        Some(Ok(())) => Ok(ExitCode::SUCCESS),
        Some(Err(failure)) => {
            say!("{failure}");
            Ok(ExitCode::from(1))
        }
        None => Err(Error::invalid(
            "conformance-rank is started by `oxccl conformance` only",
        )),
    }
}

/// The plugin's backends, or the one of that name. Errors: `NotFound`, with what there is.
fn chosen(loaded: &Loaded, name: Option<&str>) -> Result<Vec<Backend>> {
    let all = loaded.backends();
    let known: Vec<String> = all.iter().map(|b| format!("'{}'", b.name)).collect();
    let chosen: Vec<Backend> = all
        .into_iter()
        .filter(|b| name.is_none_or(|name| b.name == name))
        .collect();
    if chosen.is_empty() {
        let wanted = name.map_or("backends".to_string(), |name| format!("backend '{name}'"));
        return Err(Error::new(
            ErrorKind::NotFound,
            format!(
                "plugin {} brings no {wanted}; it brings {}",
                loaded.name(),
                if known.is_empty() {
                    "none".to_string()
                } else {
                    known.join(", ")
                }
            ),
        ));
    }
    Ok(chosen)
}

/// On a terminal, how far it is.
fn progress(ended: usize, all: usize) {
    let mut err = std::io::stderr();
    if err.is_terminal() {
        let end = if ended == all { "\r\x1b[K" } else { "" };
        drop(write!(err, "\r{ended} of {all} cases{end}"));
        drop(err.flush());
    }
}

/// Something passed and nothing failed.
fn is_good(tried: &[Tried]) -> bool {
    let is = |verdict: fn(&Verdict) -> bool| tried.iter().any(|t| verdict(&t.verdict));
    is(|v| *v == Verdict::Passed) && !is(|v| matches!(v, Verdict::Failed(_)))
}

/// What takes longer waited for something: a deadline that the case is about, or a wake-up that never came.
const SLOW: Duration = Duration::from_secs(5);

/// Passed, failed, not offered.
type Counts = [usize; 3];

fn report(tried: &[Tried], took: Duration) -> String {
    let mut areas: Vec<(&str, Counts)> = Vec::new();
    let mut all = Counts::default();
    let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
    let (mut failed, mut slow) = (String::new(), String::new());
    for one in tried {
        let column = match &one.verdict {
            Verdict::Passed => {
                if one.took > SLOW {
                    let _ = writeln!(slow, "{:6.1}  {}", one.took.as_secs_f64(), one.name);
                }
                0
            }
            Verdict::Failed(failure) => {
                let _ = writeln!(failed, "\nfailed: {} ({:.1} s)", one.name, one.took.as_secs_f64());
                for line in failure.to_string().lines() {
                    let _ = writeln!(failed, "  {line}");
                }
                1
            }
            Verdict::NotOffered(reason) => {
                *reasons.entry(reason).or_default() += 1;
                2
            }
        };
        if !areas.iter().any(|(area, _)| *area == one.area()) {
            areas.push((one.area(), Counts::default()));
        }
        let counts = areas.iter_mut().find(|(area, _)| *area == one.area());
        let counts = counts.map(|(_, counts)| counts);
        for count in [Some(&mut all), counts].into_iter().flatten() {
            if let Some(n) = count.get_mut(column) {
                *n += 1;
            }
        }
    }
    let width = areas.iter().map(|(area, _)| area.len()).max().unwrap_or(0).max(4);
    let mut text = format!("{:width$}  passed  failed  not offered\n", "area");
    for (area, [passed, failed, not]) in &areas {
        let _ = writeln!(text, "{area:width$}  {passed:6}  {failed:6}  {not:11}");
    }
    if !reasons.is_empty() {
        text.push_str("\nnot offered, cases:\n");
        for (reason, count) in &reasons {
            let _ = writeln!(text, "{count:6}  {reason}");
        }
    }
    if !slow.is_empty() {
        let _ = write!(
            text,
            "\npassed after more than {} s, seconds:\n{slow}",
            SLOW.as_secs()
        );
    }
    text.push_str(&failed);
    let [passed, failed, not] = all;
    let none = if passed + failed == 0 {
        " (no case ran)"
    } else {
        ""
    };
    let _ = writeln!(
        text,
        "\nresult: {passed} passed, {failed} failed, {not} not offered{none}, {:.1} s",
        took.as_secs_f64()
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tried(name: &str, verdict: Verdict) -> Tried {
        Tried {
            name: format!("processes::{name}"),
            verdict,
            took: Duration::from_millis(1500),
        }
    }

    #[test]
    fn the_report_counts_names_what_failed_and_says_why_the_rest_was_not_run() {
        let why = || Verdict::NotOffered("gather is not advertised".into());
        let failure = ::conformance::Failure::new("rank 1: element 3 is 7, expected 8\nrank 2: red");
        let all = [
            tried("barrier::holds::world2", Verdict::Passed),
            tried("gather::a::world1", why()),
            tried("gather::a::world2", why()),
            tried("all_reduce::sum::world3", Verdict::Failed(failure)),
            Tried {
                took: Duration::from_secs(30),
                ..tried("p2p::late::world2", Verdict::Passed)
            },
        ];
        let text = report(&all, Duration::from_secs(3));
        let has = |line: &str| assert!(text.lines().any(|l| l == line), "no line '{line}' in\n{text}");
        has("area        passed  failed  not offered");
        has("barrier          1       0            0");
        has("gather           0       0            2");
        has("     2  gather is not advertised");
        has("failed: processes::all_reduce::sum::world3 (1.5 s)");
        has("  rank 1: element 3 is 7, expected 8");
        has("  30.0  processes::p2p::late::world2");
        has("result: 2 passed, 1 failed, 2 not offered, 3.0 s");
        assert!(!is_good(&all) && is_good(&all[..3]));
        assert!(!is_good(&all[1..3]), "nothing ran");
    }
}
