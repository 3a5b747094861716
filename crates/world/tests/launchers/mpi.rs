//! Open MPI and MPICH.

use std::fs;
use std::process::Command;

use libtest_mimic::{Failed, Trial};

use crate::{Outcome, SCENE, all_reduced, documented, finish, free_ports, program, said};

/// An MPI's name, the variable that says where its `mpirun` is, what that needs besides, and what keeps it from ending all ranks with one.
type Mpi = (
    &'static str,
    &'static str,
    &'static [&'static str],
    Option<&'static str>,
);

const MPIS: [Mpi; 2] = [
    // It ends them all within milliseconds, with `-disable-auto-cleanup` too (5.0.2).
    ("mpich", "OXCCL_TEST_MPICH", &[], None),
    (
        "open-mpi",
        "OXCCL_TEST_OPEN_MPI",
        &["--allow-run-as-root", "--oversubscribe"],
        Some("--enable-recovery"),
    ),
];

/// MPICH's launcher (5.0.2) dies of a SIGPIPE if all ranks have ended before it has closed their standard input, which ranks that take
/// milliseconds do: in a third of the runs on a busy machine.
const PASSES_PIPES: &str = r#"trap "" PIPE; exec "$0" "$@""#;

/// A test's name and what it does.
type Case = (&'static str, fn(Command) -> Outcome);

pub(crate) fn trials() -> Vec<Trial> {
    let cases: [Case; 3] = [
        ("ranks_of_one_host_meet_without_an_address", without_an_address),
        ("ranks_meet_below_wrappers_of_their_own", below_wrappers),
        ("ranks_on_the_hosts_of_a_file_meet_at_an_address", at_an_address),
    ];
    let mut trials = Vec::new();
    for (name, variable, options, goes_on) in MPIS {
        let path = std::env::var(variable);
        let is_there = path.is_ok();
        let mpirun = move |scene: &str, more: Option<&str>| -> Result<Command, Failed> {
            let mut mpirun = Command::new("sh");
            mpirun.args(["-c", PASSES_PIPES]).arg(path.clone()?);
            mpirun.args(options).args(more);
            mpirun.env(SCENE, scene).env_remove("MASTER_ADDR");
            Ok(mpirun)
        };
        for (case, run) in cases {
            let mpirun = mpirun.clone();
            let trial = Trial::test(format!("{name}::{case}"), move || run(mpirun("reduce", None)?));
            trials.push(trial.with_ignored_flag(!is_there));
        }
        if goes_on.is_some() {
            let case = format!("{name}::a_killed_rank_is_named_by_the_others");
            let trial = Trial::test(case, move || killed_rank(mpirun("die", goes_on)?));
            trials.push(trial.with_ignored_flag(!is_there));
        }
    }
    trials
}

fn killed_rank(mut mpirun: Command) -> Outcome {
    let output = finish(mpirun.args(documented("mpirun", "-n")?).arg(program()))?;
    let text = said(&output);
    for rank in [0, 2, 3] {
        let line = format!("rank {rank} heard PeerLost of rank 1");
        if text.matches(&line).count() != 1 {
            return Err(format!("'{line}' was not said once: {text}").into());
        }
    }
    Ok(())
}

fn without_an_address(mut mpirun: Command) -> Outcome {
    all_reduced(
        &finish(mpirun.args(documented("mpirun", "-n")?).arg(program()))?,
        4,
    )
}

fn below_wrappers(mut mpirun: Command) -> Outcome {
    mpirun.args(documented("mpirun", "-n")?);
    // A second command, so that the shell stays above the rank.
    mpirun.args(["sh", "-c", "\"$0\"; exit $?"]).arg(program());
    all_reduced(&finish(&mut mpirun)?, 4)
}

fn at_an_address(mut mpirun: Command) -> Outcome {
    let port = free_ports(1)?;
    // The only host that can be had.
    let folder = tempfile::tempdir()?;
    fs::write(folder.path().join("hosts"), "localhost\n")?;
    mpirun
        .args(documented("mpirun", "--hostfile")?)
        .current_dir(folder.path())
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", port.to_string());
    all_reduced(&finish(mpirun.arg(program()))?, 8)
}
