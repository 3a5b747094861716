//! Open MPI and MPICH.

use std::process::Command;

use libtest_mimic::Trial;

use crate::{Outcome, SCENE, all_reduced, finish, free_ports, program};

/// `mpirun` of each: the variable that says where it is, and what it needs besides.
const MPIS: [(&str, &str, &[&str]); 2] = [
    ("mpich", "OXCCL_TEST_MPICH", &[]),
    (
        "open-mpi",
        "OXCCL_TEST_OPEN_MPI",
        &["--allow-run-as-root", "--oversubscribe"],
    ),
];

/// A test's name and what it does.
type Case = (&'static str, fn(Command) -> Outcome);

pub(crate) fn trials() -> Vec<Trial> {
    let cases: [Case; 3] = [
        ("ranks_of_one_host_meet_without_an_address", without_an_address),
        ("ranks_meet_below_wrappers_of_their_own", below_wrappers),
        ("ranks_meet_at_an_address", at_an_address),
    ];
    let mut trials = Vec::new();
    for (name, variable, options) in MPIS {
        for (case, run) in cases {
            let path = std::env::var(variable);
            let is_there = path.is_ok();
            let trial = Trial::test(format!("{name}::{case}"), move || {
                let mut mpirun = Command::new(path?);
                mpirun.args(options).args(["-n", "4"]).env(SCENE, "reduce");
                mpirun.env_remove("MASTER_ADDR");
                run(mpirun)
            });
            trials.push(trial.with_ignored_flag(!is_there));
        }
    }
    trials
}

fn without_an_address(mut mpirun: Command) -> Outcome {
    all_reduced(&finish(mpirun.arg(program()))?, 4)
}

fn below_wrappers(mut mpirun: Command) -> Outcome {
    // A second command, so that the shell stays above the rank.
    mpirun.args(["sh", "-c", "\"$0\"; exit $?"]).arg(program());
    all_reduced(&finish(&mut mpirun)?, 4)
}

fn at_an_address(mut mpirun: Command) -> Outcome {
    let port = free_ports(1)?;
    mpirun
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", port.to_string());
    all_reduced(&finish(mpirun.arg(program()))?, 4)
}
