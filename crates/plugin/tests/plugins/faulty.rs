//! Every fault that a plugin file can have, and what comes of it: a typed reason, and the file is never opened here.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use ftcore::registry::{OnConflict, Unavailable};
use ftcore::{Capabilities, Error, ErrorKind, OpKind, OpSet, Registry, deadline_in};
use libtest_mimic::Trial;
use oxccl_plugin::{load, load_within, open_trusted};

use crate::{Outcome, build, ensure, header, odd, text, trial, trial_in_c};

/// Enough for a child on a busy machine; hangs are given less.
const TIME_LIMIT: Duration = Duration::from_secs(60);

pub(crate) fn fault(number: u32) -> Outcome<PathBuf> {
    let source = build::root().join("fixtures/c/faulty.c");
    build::c_plugin(
        &format!("faulty{number}"),
        &source,
        &header::folder(),
        &[&format!("FAULT={number}")],
    )
}

/// The numbers of all faults but those that leave files beside their own.
pub(crate) const ALL: std::ops::RangeInclusive<u32> = 0..=18;

fn is_open_here(path: &Path) -> Outcome<bool> {
    let maps = std::fs::read_to_string("/proc/self/maps").map_err(text)?;
    Ok(maps.contains(&path.display().to_string()))
}

/// The reason for which the plugin is refused.
fn refused(number: u32, limit: Duration) -> Outcome<Unavailable> {
    let path = fault(number)?;
    let error = match load_within(&path, limit) {
        Ok(opened) => return Err(format!("{opened:?} was opened")),
        Err(error) => error,
    };
    ensure!(error.kind() == ErrorKind::Unsupported, "{error:?}");
    ensure!(
        !is_open_here(&path)?,
        "{} is open in this process",
        path.display()
    );
    // The second time is answered from memory, with the same words.
    let again = load_within(&path, limit).err().map(|e| e.to_string());
    ensure!(again == Some(error.to_string()), "{again:?} after {error}");
    Unavailable::of(&error)
        .cloned()
        .ok_or_else(|| format!("no reason in {error:?}"))
}

fn refused_with(name: &str, number: u32, wanted: impl Fn(&Unavailable) -> bool + Send + 'static) -> Trial {
    trial_in_c(&format!("faulty::{name}"), move || {
        let reason = refused(number, TIME_LIMIT)?;
        ensure!(wanted(&reason), "{reason:?}");
        Ok(())
    })
}

fn times_out(name: &str, number: u32) -> Trial {
    trial_in_c(&format!("faulty::{name}"), move || {
        let reason = refused(number, Duration::from_millis(400))?;
        ensure!(
            reason == Unavailable::ProbeTimedOut { milliseconds: 400 },
            "{reason:?}"
        );
        Ok(())
    })
}

fn garbage(reason: &Unavailable, words: &str) -> bool {
    matches!(reason, Unavailable::NotAPlugin { text, .. } if text.contains(words))
}

fn crashed(reason: &Unavailable, wanted: i32, words: &str) -> bool {
    matches!(reason, Unavailable::ProbeCrashed { signal, output } if *signal == wanted && output.contains(words))
}

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        refused_with(
            "l45_a_wrong_magic_number_is_seen_before_anything_else_is_read",
            1,
            |r| garbage(r, "magic"),
        ),
        refused_with(
            "a_missing_entry_point_is_named",
            2,
            |r| matches!(r, Unavailable::SymbolMissing { symbol, .. } if symbol == oxccl_plugin::abi::OPEN),
        ),
        times_out("one_that_hangs_when_asked_is_killed_at_the_time_limit", 4),
        refused_with("one_that_aborts_is_a_reason_with_its_last_words", 5, |r| {
            crashed(r, 6, "about to abort")
        }),
        refused_with("one_that_segfaults_is_a_reason_with_the_signal", 6, |r| {
            crashed(r, 11, "")
        }),
        refused_with("l45_a_size_that_cannot_be_is_refused", 7, |r| garbage(r, "bytes")),
        refused_with("a_list_that_cannot_be_is_refused", 8, |r| {
            garbage(r, "2147483647 backends")
        }),
        refused_with(
            "l45_one_that_needs_a_newer_host_says_which",
            9,
            |r| matches!(r, Unavailable::VersionTooNew { found, needed, .. } if found == "1.900" && needed == "1.0"),
        ),
        times_out(
            "one_that_hangs_while_it_is_loaded_is_killed_at_the_time_limit",
            11,
        ),
        refused_with("one_that_cannot_start_gives_its_own_code_and_words", 13, |r| {
            let (code, text) = (Some(42), "no licence".to_string());
            *r == Unavailable::InitFailed { code, text }
        }),
        refused_with("one_that_ends_the_process_is_a_reason", 15, |r| {
            matches!(r, Unavailable::ProbeFailed { .. })
        }),
        refused_with("a_table_without_its_functions_is_refused", 16, |r| {
            garbage(r, "lacks")
        }),
        refused_with("one_that_crashes_in_its_own_probe_is_never_opened", 18, |r| {
            crashed(r, 7, "")
        }),
        trial_in_c("faulty::a_trial_ends_that_no_process_waits_for", unwaited),
        trial(
            "faulty::a_file_that_the_loader_did_not_take_is_opened_later",
            taken_later,
        ),
        trial_in_c(
            "faulty::one_that_writes_beyond_what_it_was_told_hurts_nobody",
            || load(&fault(14)?).map(drop).map_err(text),
        ),
        trial_in_c(
            "faulty::l45_a_newer_one_with_larger_structs_is_used_with_what_both_know",
            newer,
        ),
        trial_in_c("faulty::a_reason_given_in_c_arrives_typed", reason_in_c),
        trial_in_c("faulty::a_symlink_is_the_same_plugin", symlink),
        trial_in_c(
            "faulty::l43_of_two_plugins_with_one_name_the_first_is_used_and_both_are_named",
            two,
        ),
        trial("faulty::a_file_that_is_not_there_is_a_reason", || {
            let e = load(Path::new("/nowhere/libnothing.so"))
                .err()
                .ok_or("it was opened")?;
            let reason = Unavailable::of(&e).ok_or("no reason")?;
            ensure!(
                matches!(reason, Unavailable::LibraryNotFound { .. }),
                "{reason:?}"
            );
            Ok(())
        }),
    ]
}

fn newer() -> Outcome {
    let opened = load(&fault(10)?).map_err(text)?;
    ensure!(
        opened.abi_minor() == oxccl_plugin::abi::MINOR,
        "minor {}",
        opened.abi_minor()
    );
    let backends = opened.backends();
    let capabilities: Capabilities = backends.first().ok_or("no backend")?.factory.capabilities();
    ensure!(
        capabilities.ops == OpSet::of(&OpKind::ALL),
        "{:?}",
        capabilities.ops
    );
    ensure!(capabilities.options.is_empty(), "{:?}", capabilities.options);
    Ok(())
}

fn reason_in_c() -> Outcome {
    let opened = load(&fault(0)?).map_err(text)?;
    let registry = Registry::new();
    opened.register(&registry, OnConflict::Keep).map_err(text)?;
    let e: Error = registry
        .is_backend_available("FAULTY", None)
        .err()
        .ok_or("it can be used")?;
    let wanted = Unavailable::NoDevice {
        device: "fantasy".into(),
    };
    ensure!(Unavailable::of(&e) == Some(&wanted), "{e:?}");
    ensure!(e.to_string().contains("no fantasy device"), "{e}");
    Ok(())
}

fn symlink() -> Outcome {
    let path = fault(0)?;
    let folder = tempfile::tempdir().map_err(text)?;
    let link = folder.path().join("another-name.so");
    std::os::unix::fs::symlink(&path, &link).map_err(text)?;
    let (a, b) = (load(&path).map_err(text)?, load(&link).map_err(text)?);
    ensure!(
        a.path() == b.path(),
        "{} and {}",
        a.path().display(),
        b.path().display()
    );
    let registry = Registry::new();
    a.register(&registry, OnConflict::Strict).map_err(text)?;
    let again = b.register(&registry, OnConflict::Strict).map_err(text)?;
    ensure!(
        again
            .iter()
            .all(|(_, o)| *o == ftcore::registry::Outcome::AlreadyThere),
        "{again:?}"
    );
    ensure!(registry.conflicts().is_empty(), "{:?}", registry.conflicts());
    Ok(())
}

fn two() -> Outcome {
    let (first, second) = (load(&fault(0)?).map_err(text)?, load(&fault(17)?).map_err(text)?);
    let registry = Registry::new();
    first.register(&registry, OnConflict::Keep).map_err(text)?;
    second.register(&registry, OnConflict::Keep).map_err(text)?;
    let used = registry.get("faulty", None).map_err(text)?.source;
    ensure!(used.origin == first.path().display().to_string(), "{used}");
    let conflicts = registry.conflicts();
    let [one] = conflicts.as_slice() else {
        return Err(format!("{conflicts:?}"));
    };
    ensure!(one.loser.origin == second.path().display().to_string(), "{one:?}");
    ensure!(
        second
            .register(&registry, OnConflict::Strict)
            .is_err_and(|e| e.kind() == ErrorKind::Conflict),
        "a strict registration was accepted"
    );
    Ok(())
}

/// As one whose parent was killed before it asked to be told of that.
fn unwaited() -> Outcome {
    let (reader, writer) = std::io::pipe().map_err(text)?;
    drop(reader);
    let mut trial = Command::new(std::env::current_exe().map_err(text)?)
        .env("OXCCL_PLUGIN_PROBE", fault(11)?)
        .stdout(writer)
        .spawn()
        .map_err(text)?;
    let until = deadline_in(Duration::from_secs(20));
    while Instant::now() < until && trial.try_wait().map_err(text)?.is_none() {
        std::thread::sleep(Duration::from_millis(2));
    }
    let ended = trial.try_wait().map_err(text)?;
    trial.kill().map_err(text)?;
    trial.wait().map_err(text)?;
    ensure!(ended.is_some(), "it hangs in the plugin");
    Ok(())
}

fn taken_later() -> Outcome {
    let folder = tempfile::tempdir().map_err(text)?;
    let path = folder.path().join("odd.so");
    std::fs::write(&path, "half of a file").map_err(text)?;
    ensure!(open_trusted(&path).is_err(), "it was opened");
    std::fs::copy(odd::library()?, &path).map_err(text)?;
    open_trusted(&path).map(drop).map_err(text)
}
