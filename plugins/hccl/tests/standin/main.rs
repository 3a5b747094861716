//! The plugin's backend over the stand-in: failures, hangs, deadlines, missing pieces. Ranks are processes.
//!
//! `folder` finds the stand-in, `ranks` starts this program again as the ranks of a scenario and judges how they end;
//! `failing`, `configuring`, `working` and `unusable` are the scenarios. What they prove about the plugin they prove over a
//! stand-in; nothing here says how a Gaudi behaves.

#![allow(clippy::expect_used, reason = "preparing a test may panic, with its reason")]

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

mod configuring;
mod failing;
mod folder;
mod loaded;
mod ranks;
mod unusable;
mod working;

use ranks::Scenario;

fn main() -> ExitCode {
    let scenarios: Vec<Scenario> = [
        working::scenarios(),
        failing::scenarios(),
        configuring::scenarios(),
        unusable::scenarios(),
        loaded::scenarios(),
    ]
    .concat();
    if let Some(code) = ranks::run_as_rank(&scenarios) {
        return code;
    }
    let trials = scenarios
        .into_iter()
        .map(|scenario| Trial::test(scenario.name, move || Ok(scenario.judge()?)))
        .collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
