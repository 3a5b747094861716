//! The training program with plugins around: those that were not asked for change no bit, and one is chosen by its name alone.

use std::path::{Path, PathBuf};
use std::process::Command;

use libtest_mimic::Trial;
use oxccl_plugin::ENV_PATH;

use crate::{Outcome, build, cstore, ensure, faulty, odd, text, trial_in_c};

/// A run small enough for a test, on the real text.
const SMALL: &[&str] = &[
    "--rounds",
    "80",
    "--sync-every",
    "8",
    "--d-model",
    "32",
    "--layers",
    "2",
    "--seq",
    "32",
    "--batch",
    "2",
];

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial_in_c(
            "job::all_fixtures_on_the_path_change_no_bit_and_only_warn",
            fixtures,
        ),
        trial_in_c(
            "job::a_plugin_chosen_by_name_alone_trains_through_a_death",
            || by_name(&cstore::plain()?),
        ),
    ]
}

/// What a run and its replicas said, and what it reported.
struct Run {
    said: String,
    report: String,
}

impl Run {
    /// Everything in the report behind `"name":`, up to the end of the line.
    fn values(&self, name: &str) -> Vec<&str> {
        let key = format!("\"{name}\":");
        self.report
            .lines()
            .filter_map(|l| Some(l.trim().strip_prefix(&key)?.trim().trim_end_matches(',')))
            .collect()
    }
}

/// Trains with these libraries on the path.
fn train(libraries: &[PathBuf], arguments: &[&str]) -> Outcome<Run> {
    let folder = tempfile::tempdir().map_err(text)?;
    let report = folder.path().join("report.json");
    let output = Command::new(build::train_diloco()?)
        .args(SMALL)
        .args(arguments)
        .args(["--time-limit-s", "240", "--out"])
        .arg(folder.path())
        .env(ENV_PATH, std::env::join_paths(libraries).map_err(text)?)
        .env(oxccl_plugin::ENV_PROBE_SECONDS, "5")
        .env("RUST_LOG", "warn")
        .output()
        .map_err(text)?;
    let mut said =
        String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    for file in std::fs::read_dir(folder.path()).map_err(text)? {
        let file = file.map_err(text)?.path();
        if file.extension().is_some_and(|e| e == "log") {
            said += &std::fs::read_to_string(file).map_err(text)?;
        }
    }
    ensure!(output.status.success(), "{}: {said}", output.status);
    let report = std::fs::read_to_string(report).map_err(text)?;
    Ok(Run { said, report })
}

/// The faulty ones, those that work, and twins of one name through a copy and a symlink.
fn all_fixtures(folder: &Path) -> Outcome<Vec<PathBuf>> {
    let mut all = faulty::ALL.map(faulty::fault).collect::<Outcome<Vec<_>>>()?;
    let good = cstore::plain()?;
    let (copy, link) = (folder.join("copy.so"), folder.join("link.so"));
    std::fs::copy(&good, &copy).map_err(text)?;
    std::os::unix::fs::symlink(&good, &link).map_err(text)?;
    all.extend([good, copy, link]);
    all.extend([odd::library()?, conformance::dylib("gloo-plugin")?]);
    Ok(all)
}

fn fixtures() -> Outcome {
    let folder = tempfile::tempdir().map_err(text)?;
    let all = all_fixtures(folder.path())?;
    let plain = train(&[], &["--no-kill"])?;
    let among = train(&all, &["--no-kill"])?;
    for name in ["hash", "heldout_loss", "train_loss"] {
        let (wanted, found) = (plain.values(name), among.values(name));
        ensure!(!wanted.is_empty(), "the report has no {name}: {}", plain.report);
        ensure!(
            wanted == found,
            "{name}: {wanted:?} without plugins, {found:?} among them"
        );
    }
    // Those that are refused are named, one warning each and process, and nothing is worse than a warning.
    for number in [1, 2, 4, 5, 6, 11, 18] {
        let file = format!("libfaulty{number}.so");
        let told = among
            .said
            .lines()
            .any(|l| l.contains("WARN") && l.contains(&file));
        ensure!(told, "no warning names {file}: {}", among.said);
    }
    for bad in ["ERROR", "panicked"] {
        ensure!(!among.said.contains(bad), "{bad}: {}", among.said);
    }
    Ok(())
}

/// Beside it on the path is one that counts how often it is tried: once, by the launcher, and not again by its replicas and by the one that
/// comes back.
fn by_name(library: &Path) -> Outcome {
    let folder = tempfile::tempdir().map_err(text)?;
    let counter = folder.path().join("counter.so");
    std::fs::copy(faulty::fault(20)?, &counter).map_err(text)?;
    let run = train(
        &[library.to_path_buf(), counter.clone()],
        &["--backend", "cstore", "--kill", "1@16"],
    )?;
    let trials = std::fs::read_to_string(counter.with_extension("so.count")).map_err(text)?;
    ensure!(trials == ".", "tried {} times: {}", trials.len(), run.said);
    let told = run
        .said
        .lines()
        .filter(|l| l.contains("WARN") && l.contains("counter.so"))
        .count();
    ensure!(
        told >= 3,
        "{told} of three processes say why it is not used: {}",
        run.said
    );
    let deaths = run.values("exit");
    ensure!(deaths == ["\"SIGKILL\""], "{deaths:?}: {}", run.report);
    ensure!(run.values("ok") == ["true"], "{}", run.report);
    ensure!(
        run.values("backend").iter().all(|b| b.contains("cstore")),
        "{}",
        run.report
    );
    Ok(())
}
