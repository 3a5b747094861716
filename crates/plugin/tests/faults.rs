//! Plugins that fail in the middle of a collective, run in child processes: the parent lives, the other ranks are told, and the
//! next epoch works. And which program tries a plugin where this crate is itself part of a dynamic library.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::registry::Finder;
use ftcore::{
    Collective, Configuration, Device, Epoch, Error, ErrorKind, GroupOptions, InMemoryStore, ProcessGroup,
    ProcessGroupExt, ReduceOp, Registry, Store, SubmitOptions, Tensor, Work, deadline_in,
};
use isolate::{IsolateOptions, IsolatedGroup};
use libtest_mimic::{Arguments, Trial};

#[path = "plugins/build.rs"]
#[allow(
    dead_code,
    reason = "shared with the other test binary, which needs more of it"
)]
mod build;

/// A program that makes this test's `loader` load the library that it names.
const LOADER: &str = "OXCCL_TEST_LOADER";
/// The helper with which that program tries once more.
const THEN: &str = "OXCCL_TEST_THEN";
/// Ranks; the last one's plugin fails.
const WORLD: u32 = 3;

ftcore::inventory::submit! {
    Finder {
        find: || {
            for report in oxccl_plugin::discover(Registry::global()) {
                report.result.unwrap();
            }
        },
    }
}

fn main() -> ExitCode {
    isolate::run_child_if_asked();
    if let Some(path) = std::env::var_os(LOADER) {
        println!("{}", load_from_a_library(Path::new(&path)));
        return ExitCode::SUCCESS;
    }
    let library = match conformance::dylib("odd-plugin") {
        Ok(library) => library,
        Err(why) => {
            eprintln!("{why}");
            return ExitCode::FAILURE;
        }
    };
    // SAFETY: the only thread so far; the children inherit it.
    unsafe { std::env::set_var(oxccl_plugin::ENV_PATH, &library) };
    let mut trials: Vec<Trial> = FAULTS
        .iter()
        .map(|fault| {
            Trial::test(format!("midway::{}_is_survived", fault.how), || {
                survived(fault);
                Ok(())
            })
        })
        .collect();
    trials.push(Trial::test(
        "helper::tries_plugins_for_a_library_that_hosts_them",
        move || {
            helper(&library);
            Ok(())
        },
    ));
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

struct Fault {
    how: &'static str,
    /// What the victim's own operation fails with.
    kind: ErrorKind,
    code: Option<i64>,
    text: &'static str,
}

const FAULTS: &[Fault] = &[
    Fault {
        how: "crash",
        kind: ErrorKind::Unavailable,
        code: Some(-6),
        text: "what the plugin wrote at its end",
    },
    Fault {
        how: "exit",
        kind: ErrorKind::Unavailable,
        code: Some(7),
        text: "exited with status 7",
    },
    Fault {
        how: "hang",
        kind: ErrorKind::Timeout,
        code: None,
        text: "all_reduce",
    },
    Fault {
        how: "panic",
        kind: ErrorKind::Internal,
        code: None,
        text: "dropped the operation",
    },
];

fn soon() -> Instant {
    deadline_in(Duration::from_secs(60))
}

fn configuration(store: &Arc<dyn Store>, epoch: u64, rank: u32) -> Configuration {
    Configuration {
        store: store.clone(),
        prefix: "faults".into(),
        name: "faults".into(),
        epoch: Epoch(epoch),
        rank,
        world_size: WORLD,
        deadline: soon(),
        cancel: Default::default(),
    }
}

/// The backend does tensors one by one, and the fault comes before the second.
fn submit(group: &dyn ProcessGroup, count: usize, deadline: Instant) -> Result<Work, Error> {
    let rank = group.info().rank;
    let tensors = (0..count)
        .map(|_| Tensor::from_vec(vec![f64::from(rank); 40_000]))
        .collect();
    let op = ReduceOp::Sum;
    Ok(group.run(Collective::AllReduce { tensors, op }, SubmitOptions::by(deadline))?)
}

fn sums(group: &dyn ProcessGroup) {
    let sum = submit(group, 1, soon()).unwrap().take_tensor().unwrap();
    let want = f64::from(WORLD * (WORLD - 1) / 2);
    assert!(sum.as_slice::<f64>().unwrap().iter().all(|&x| x == want));
}

fn isolated(fault: &str) -> IsolatedGroup {
    let mut options = GroupOptions::default();
    if !fault.is_empty() {
        options.hints.insert("midway".into(), fault.into());
    }
    IsolatedGroup::new(IsolateOptions {
        options,
        ..IsolateOptions::new("midway", Device::CPU)
    })
    .unwrap()
}

fn survived(fault: &'static Fault) {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    std::thread::scope(|scope| {
        for rank in 0..WORLD {
            let store = &store;
            scope.spawn(move || {
                let victim = rank == WORLD - 1;
                let group = isolated(if victim { fault.how } else { "" });
                group.configure(configuration(store, 1, rank)).unwrap();
                sums(&group);
                let child = group.child_pid().unwrap();
                // A hanging one is found out by the deadline, everything else by its end.
                let limit = if fault.how == "hang" && victim { 1 } else { 60 };
                let began = Instant::now();
                let work = submit(&group, 2, deadline_in(Duration::from_secs(limit))).unwrap();
                let e = work.wait(soon()).unwrap_err();
                assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
                if victim {
                    assert_eq!((e.kind(), e.code()), (fault.kind, fault.code), "{e}");
                    assert!(e.to_string().contains(fault.text), "{e}");
                    if fault.how == "panic" {
                        // The child lives; its rank says what happened, as a manager does.
                        group.abort("the plugin panicked");
                    }
                } else {
                    // Poisoned: the notice came between the first tensor and the second.
                    assert!(
                        matches!(
                            e.kind(),
                            ErrorKind::PeerLost
                                | ErrorKind::Aborted
                                | ErrorKind::Timeout
                                | ErrorKind::Poisoned
                        ),
                        "rank {rank}: {e}"
                    );
                    let text = e.to_string();
                    assert!(
                        text.contains("peer 2") || text.contains("rank 2"),
                        "rank {rank} does not name who failed: {text}"
                    );
                }
                assert!(group.error().is_some());
                store.barrier("all failed", WORLD, soon()).unwrap();
                group.configure(configuration(store, 2, rank)).unwrap();
                sums(&group);
                if victim {
                    assert_ne!(
                        group.child_pid(),
                        Some(child),
                        "it goes on in the process that failed"
                    );
                }
                group.shutdown(soon()).unwrap();
            });
        }
    });
}

/// What the odd plugin, which is opened here without a trial, says when it loads `library` itself.
fn load_from_a_library(library: &Path) -> String {
    let host = oxccl_plugin::open_trusted(library).unwrap();
    let loader = host.backends().into_iter().find(|b| b.name == "loader").unwrap();
    let mut options = GroupOptions::default();
    options
        .hints
        .insert("load".into(), library.to_string_lossy().into_owned());
    let load = || match loader.factory.create(&Device::CPU, &options) {
        Ok(_) => "a loader made a group".to_string(),
        Err(e) => e.to_string(),
    };
    let said = load();
    let Some(right) = std::env::var_os(THEN) else {
        return said;
    };
    // SAFETY: the only thread.
    unsafe { std::env::set_var(oxccl_plugin::ENV_HELPER, right) };
    format!("{said}; then {}", load())
}

/// Where this crate is in a library, the program that tries plugins is the one that `OXCCL_HELPER` names, else `oxccl` from
/// the `PATH`; without either it says so.
fn helper(library: &Path) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let on_path: PathBuf = folder.path().join("oxccl");
    // A stand-in for the oxccl command: any program that links this crate does.
    std::fs::hard_link(std::env::current_exe().unwrap(), &on_path).unwrap();
    let empty = tempfile::tempdir_in(folder.path()).unwrap();
    let say = |path: &Path, helper: Option<&Path>| -> String {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .env(LOADER, library)
            .env_remove(oxccl_plugin::ENV_PATH)
            .env_remove(oxccl_plugin::ENV_HELPER)
            .env("PATH", path);
        if let Some(helper) = helper {
            command.env(oxccl_plugin::ENV_HELPER, helper).env(THEN, &on_path);
        }
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let nowhere = say(empty.path(), None);
    assert!(
        nowhere.contains("OXCCL_HELPER") && nowhere.contains("PATH"),
        "{nowhere}"
    );
    let found = say(folder.path(), None);
    assert!(found.contains("loaded: ") && found.contains("midway"), "{found}");
    let named = say(empty.path(), Some(&on_path));
    assert!(named.contains("loaded: "), "{named}");
    let wrong = say(folder.path(), Some(Path::new("/nowhere/oxccl")));
    let (wrong, then) = wrong.split_once("; then ").unwrap();
    assert!(
        wrong.contains("/nowhere/oxccl") && !wrong.contains("loaded: "),
        "{wrong}"
    );
    assert!(
        then.contains("loaded: "),
        "a trial that was not made is kept: {then}"
    );
}
