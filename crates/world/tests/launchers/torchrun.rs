//! torchrun: its agent has the store already, and starts all ranks again when one dies.

use std::process::Command;

use libtest_mimic::{Failed, Trial};

use crate::{Outcome, SCENE, all_reduced, documented, finish, free_ports, program, rank, said};

/// A test's name and what it does with a Python that has torch.
type Case = (&'static str, fn(&str) -> Outcome);

pub(crate) fn trials() -> Vec<Trial> {
    let cases: [Case; 3] = [
        ("ranks_meet_at_the_agents_store", meet),
        (
            "a_second_attempt_does_not_see_the_first_ones_keys",
            second_attempt,
        ),
        ("nodes_whose_counts_of_attempts_differ_meet_again", two_nodes),
    ];
    let all = cases.map(|(case, run)| {
        let path = std::env::var("OXCCL_TEST_TORCHRUN");
        let is_there = path.is_ok();
        let trial = Trial::test(format!("torchrun::{case}"), move || run(&path?));
        trial.with_ignored_flag(!is_there)
    });
    all.into()
}

fn torchrun(python: &str) -> Command {
    let mut torchrun = Command::new(python);
    torchrun.args(["-m", "torch.distributed.run"]);
    torchrun
}

/// On one node.
fn standalone(python: &str) -> Result<Command, Failed> {
    let mut torchrun = torchrun(python);
    torchrun
        .arg("--standalone")
        .args(documented("torchrun", "--no-python")?);
    Ok(torchrun)
}

fn meet(python: &str) -> Outcome {
    let mut torchrun = standalone(python)?;
    all_reduced(&finish(torchrun.arg(program()).env(SCENE, "reduce"))?, 4)
}

fn second_attempt(python: &str) -> Outcome {
    let mut torchrun = standalone(python)?;
    torchrun
        .arg("--max-restarts=1")
        .arg(program())
        .env(SCENE, "die-once");
    let output = finish(&mut torchrun)?;
    let text = said(&output);
    // Every rank has the sum in each of the two attempts.
    for rank in 0..4 {
        let line = format!("rank {rank} of 4 has 10");
        if text.lines().filter(|l| l.contains(&line)).count() != 2 {
            return Err(format!("'{line}' was not said twice:\n{text}").into());
        }
    }
    if !output.status.success() {
        return Err(format!("{}: {text}", output.status).into());
    }
    Ok(())
}

/// Two agents, of which one counts the death of its rank, and the other counts nothing.
fn two_nodes(python: &str) -> Outcome {
    let folder = tempfile::tempdir()?;
    let endpoint = format!("--rdzv-endpoint=127.0.0.1:{}", free_ports(1)?);
    let agent = || {
        let mut torchrun = torchrun(python);
        torchrun
            .args(["--nnodes=2", "--nproc-per-node=1", "--max-restarts=2"])
            .args(["--rdzv-backend=c10d", "--rdzv-id=two", &endpoint])
            .args(["--local-addr=127.0.0.1", "--no-python"])
            .arg(program())
            .env(SCENE, "die-on-one-node")
            .env(rank::DIED, folder.path().join("died"));
        finish(&mut torchrun).map(|output| said(&output))
    };
    let (one, other) = std::thread::scope(|scope| {
        let other = scope.spawn(agent);
        (agent(), other.join())
    });
    let other = other.map_err(|_| "the second agent's thread has panicked")?;
    let text = format!("{}{}", one?, other?);
    // Every rank has the sum in each of the two attempts, and again in the second one.
    for line in ["rank 0 of 2 has 3", "rank 1 of 2 has 3", "no rank died"] {
        if text.lines().filter(|l| l.contains(line)).count() != 2 {
            return Err(format!("'{line}' was not said twice:\n{text}").into());
        }
    }
    Ok(())
}
