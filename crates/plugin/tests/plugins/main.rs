//! Plugins as files: header, fixtures with their documented outcomes, a backend in C, panics, a device kind, discovery,
//! and the training program with all of them around.
//!
//! What needs a C compiler is ignored with the reason where there is none, never passed.

mod breach;
mod build;
mod cstore;
mod discovery;
mod faulty;
mod forked;
mod header;
mod job;
mod odd;
mod ranks;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Completion, Trial};

/// A test as a statement: what is wrong otherwise.
pub(crate) type Outcome<T = ()> = Result<T, String>;

/// An error that says where, for `?` on anything.
macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err(format!($($text)+));
        }
    };
}
pub(crate) use ensure;

/// `?` on whatever can be shown.
pub(crate) fn text(e: impl std::fmt::Display) -> String {
    e.to_string()
}

fn trial(name: &str, run: impl Fn() -> Outcome + Send + 'static) -> Trial {
    Trial::test(name, move || run().map_err(Into::into))
}

/// A trial that needs a C compiler.
fn trial_in_c(name: &str, run: impl Fn() -> Outcome + Send + 'static) -> Trial {
    Trial::ignorable_test(name, move || {
        if let Err(why) = build::cc() {
            return Ok(Completion::ignored_with(why));
        }
        run()?;
        Ok(Completion::Completed)
    })
}

fn main() -> ExitCode {
    isolate::run_child_if_asked();
    if let Some(outcome) = forked::play_if_asked() {
        return outcome
            .inspect_err(|why| eprintln!("{why}"))
            .map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS);
    }
    odd::listen();
    let mut trials = vec![
        trial("header::is_what_the_structs_say", header::is_what_the_structs_say),
        trial(
            "header::the_guide_lists_what_the_suite_checks",
            header::the_guide_lists_what_the_suite_checks,
        ),
        trial_in_c(
            "header::compiles_with_the_same_layout",
            header::compiles_with_the_same_layout,
        ),
    ];
    trials.extend(faulty::trials());
    trials.extend(cstore::trials());
    trials.extend(odd::trials());
    trials.extend(breach::trials());
    trials.extend(forked::trials());
    trials.extend(discovery::trials());
    trials.extend(job::trials());
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
