//! torchrun: its agent has the store already, and starts all ranks again when one dies.

use std::process::Command;

use libtest_mimic::Trial;

use crate::{Outcome, SCENE, all_reduced, documented, finish, program, said};

/// A test's name and what it does.
type Case = (&'static str, fn(Command) -> Outcome);

pub(crate) fn trials() -> Vec<Trial> {
    let cases: [Case; 2] = [
        ("ranks_meet_at_the_agents_store", meet),
        (
            "a_second_attempt_does_not_see_the_first_ones_keys",
            second_attempt,
        ),
    ];
    let all = cases.map(|(case, run)| {
        let path = std::env::var("OXCCL_TEST_TORCHRUN");
        let is_there = path.is_ok();
        let trial = Trial::test(format!("torchrun::{case}"), move || {
            let mut torchrun = Command::new(path?);
            torchrun.args(["-m", "torch.distributed.run"]);
            torchrun
                .arg("--standalone")
                .args(documented("torchrun", "--no-python")?);
            run(torchrun)
        });
        trial.with_ignored_flag(!is_there)
    });
    all.into()
}

fn meet(mut torchrun: Command) -> Outcome {
    all_reduced(&finish(torchrun.arg(program()).env(SCENE, "reduce"))?, 4)
}

fn second_attempt(mut torchrun: Command) -> Outcome {
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
