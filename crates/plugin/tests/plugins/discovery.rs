//! From variables to registered backends.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;

use ftcore::registry::{Outcome as Registered, Provenance, Unavailable};
use ftcore::{ErrorKind, Registry};
use libtest_mimic::Trial;
use oxccl_plugin::{ENV_LIBRARY, ENV_PATH, Report, discover_with};

use crate::{Outcome, cstore, ensure, faulty, text, trial, trial_in_c};

fn found(pairs: &[(&str, &Path)]) -> (Registry, Vec<Report>) {
    let registry = Registry::new();
    let variables: BTreeMap<OsString, OsString> = pairs
        .iter()
        .map(|(k, v)| (k.into(), v.as_os_str().to_owned()))
        .collect();
    let reports = discover_with(&registry, &variables);
    (registry, reports)
}

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("discovery::without_variables_there_is_nothing", || {
            let (registry, reports) = found(&[]);
            ensure!(reports.is_empty() && registry.list().is_empty(), "{reports:?}");
            Ok(())
        }),
        trial_in_c(
            "discovery::a_folder_gives_what_works_and_says_why_of_the_rest",
            folder,
        ),
        trial_in_c(
            "discovery::a_library_named_for_a_backend_must_bring_that_backend",
            named,
        ),
        trial_in_c("discovery::the_named_library_wins_over_the_path", precedence),
        trial_in_c("discovery::plugins_are_tried_side_by_side", side_by_side),
    ]
}

fn folder() -> Outcome {
    let folder = tempfile::tempdir().map_err(text)?;
    let put = |name: &str, from: &Path| std::fs::copy(from, folder.path().join(name)).map_err(text);
    // Copies are other files than the ones other tests use: other plugins.
    put("a-crashes.so", &faulty::fault(6)?)?;
    put("b-cstore.so", &cstore::plain()?)?;
    put("c-cstore-too.so", &cstore::plain()?)?;
    std::fs::write(folder.path().join("d-text.so"), "no library").map_err(text)?;
    std::fs::write(folder.path().join("README"), "not looked at").map_err(text)?;
    let (registry, reports) = found(&[(ENV_PATH, folder.path())]);
    ensure!(reports.len() == 4, "{reports:?}");
    let reason = |i: usize| {
        reports
            .get(i)
            .and_then(|r| r.result.as_ref().err())
            .and_then(Unavailable::of)
            .map(Unavailable::name)
    };
    ensure!(reason(0) == Some("probe_crashed"), "{:?}", reports.first());
    ensure!(reason(3) == Some("library_not_loadable"), "{:?}", reports.last());
    let loader = reports.get(3).and_then(|r| r.result.as_ref().err());
    let said = loader.map(ToString::to_string).unwrap_or_default();
    // The loader's own words (glibc's, musl's).
    ensure!(
        ["file too short", "invalid ELF header", "Exec format error"]
            .iter()
            .any(|words| said.contains(words)),
        "{said}"
    );
    let used = registry.get("cstore", None).map_err(text)?;
    ensure!(used.source.origin.ends_with("b-cstore.so"), "{}", used.source);
    ensure!(
        used.source.provenance == Provenance::Plugin && used.source.version == "1.0",
        "{}",
        used.source
    );
    let conflicts = registry.conflicts();
    ensure!(
        conflicts.len() == 1
            && conflicts
                .iter()
                .all(|c| c.loser.origin.ends_with("c-cstore-too.so")),
        "{conflicts:?}"
    );
    let e = registry.get("nothing", None).err().ok_or("it is there")?;
    ensure!(e.to_string().contains("a-crashes.so"), "{e}");
    // Once more changes nothing.
    let variables = [(ENV_PATH.into(), folder.path().as_os_str().to_owned())].into();
    let again = discover_with(&registry, &variables);
    let first = again
        .get(1)
        .and_then(|r| r.result.as_ref().ok())
        .and_then(|r| r.first())
        .map(|r| &r.2);
    ensure!(first == Some(&Registered::AlreadyThere), "{again:?}");
    ensure!(
        registry.conflicts().len() == 1 && registry.unusable().len() == 2,
        "{:?}",
        registry.unusable()
    );
    Ok(())
}

fn named() -> Outcome {
    let (registry, reports) = found(&[
        (&format!("{ENV_LIBRARY}FAULTY"), &faulty::fault(3)?),
        (&format!("{ENV_LIBRARY}HCCL"), Path::new("/nowhere/libhccl.so")),
        (&format!("{ENV_LIBRARY}CSTORE"), &cstore::plain()?),
    ]);
    let of = |name: &str| {
        reports
            .iter()
            .find(|r| r.requested.as_deref() == Some(name))
            .ok_or("no report")
    };
    ensure!(of("cstore")?.result.is_ok(), "{:?}", of("cstore")?);
    let e = of("faulty")?
        .result
        .clone()
        .err()
        .ok_or("another name was taken")?;
    let reason = Unavailable::of(&e).ok_or("no reason")?;
    ensure!(
        matches!(reason, Unavailable::NameMismatch { requested, stated, .. }
            if requested == "faulty" && stated == "somethingelse"),
        "{reason:?}"
    );
    ensure!(
        registry.get("somethingelse", None).is_err(),
        "it was registered all the same"
    );
    let e = registry.get("HCCL", None).err().ok_or("it is there")?;
    ensure!(
        e.kind() == ErrorKind::NotFound && e.to_string().contains("/nowhere/libhccl.so"),
        "{e}"
    );
    ensure!(
        matches!(Unavailable::of(&e), Some(Unavailable::LibraryNotFound { .. })),
        "{e:?}"
    );
    Ok(())
}

fn precedence() -> Outcome {
    let folder = tempfile::tempdir().map_err(text)?;
    let copy = folder.path().join("a.so");
    std::fs::copy(cstore::plain()?, &copy).map_err(text)?;
    let own = cstore::plain()?;
    let (registry, _) = found(&[(ENV_PATH, &copy), (&format!("{ENV_LIBRARY}CSTORE"), &own)]);
    let used = registry.get("cstore", None).map_err(text)?.source;
    let own = std::fs::canonicalize(own).map_err(text)?.display().to_string();
    ensure!(used.origin == own, "{used}");
    Ok(())
}

/// Each of them waits until the other is being tried too: one after the other, both would be killed at the time limit.
fn side_by_side() -> Outcome {
    let folder = tempfile::tempdir().map_err(text)?;
    for name in ["a.so", "b.so"] {
        std::fs::copy(faulty::fault(19)?, folder.path().join(name)).map_err(text)?;
    }
    let (registry, reports) = found(&[(ENV_PATH, folder.path())]);
    ensure!(reports.iter().all(|r| r.result.is_ok()), "{reports:?}");
    ensure!(registry.list().len() == 1, "{:?}", registry.list());
    Ok(())
}
