//! `oxccl new-plugin` and `oxccl conformance`: what the first writes passes the second as it is, and a fault in it is found and named.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use libtest_mimic::{Arguments, Completion, Failed, Trial};

fn main() -> ExitCode {
    // A C compiler is there, since Rust links with it.
    let no_make = Command::new("make").arg("--version").output().is_err();
    let no_make = no_make.then_some("needs make");
    let test = |name: &str, skipped: Option<&'static str>, body: fn()| {
        Trial::ignorable_test(name, move || {
            if let Some(why) = skipped {
                return Ok(Completion::ignored_with(why));
            }
            body();
            Ok::<_, Failed>(Completion::Completed)
        })
    };
    let tests = vec![
        test(
            "the_documented_commands_make_a_plugin_in_c_that_passes_as_it_is",
            no_make,
            the_documented_commands_make_a_plugin_in_c_that_passes_as_it_is,
        ),
        test(
            "the_documented_commands_make_a_plugin_in_rust_that_passes_as_it_is",
            None,
            the_documented_commands_make_a_plugin_in_rust_that_passes_as_it_is,
        ),
        test(
            "a_wrong_sum_and_a_crash_cost_their_cases_and_are_named",
            no_make,
            a_wrong_sum_and_a_crash_cost_their_cases_and_are_named,
        ),
        test(
            "a_backend_of_another_element_type_alone_passes_too",
            no_make,
            a_backend_of_another_element_type_alone_passes_too,
        ),
        test(
            "what_cannot_be_tried_is_exit_code_2_with_what_there_is",
            no_make,
            what_cannot_be_tried_is_exit_code_2_with_what_there_is,
        ),
    ];
    libtest_mimic::run(&Arguments::from_args(), tests).exit_code()
}

fn oxccl(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oxccl"));
    command
        .args(arguments)
        .env_remove("OXCCL_LOG")
        .env_remove("OXCCL_PLUGIN_PATH");
    command
}

/// Exit code, standard output, standard error.
fn text(command: &mut Command) -> (Option<i32>, String, String) {
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// A new plugin in C, in a folder of its own.
fn in_c(below: &Path) -> PathBuf {
    let folder = below.join("my_ccl");
    let mut command = oxccl(&["new-plugin", "my_ccl", "--language", "c", "--dir"]);
    let (code, out, err) = text(command.arg(&folder));
    assert_eq!(code, Some(0), "{err}");
    assert!(
        out.contains("my_ccl/my_ccl.c") && out.contains("next: make"),
        "{out}"
    );
    folder
}

/// Builds it, with a fault planted: a piece of its source and what stands there instead.
fn build(folder: &Path, fault: Option<(&str, &str)>) -> PathBuf {
    let source = folder.join("my_ccl.c");
    if let Some((right, wrong)) = fault {
        let words = std::fs::read_to_string(&source).unwrap();
        assert!(words.contains(right), "{right}");
        std::fs::write(&source, words.replace(right, wrong)).unwrap();
    }
    let (code, _, err) = text(Command::new("make").arg("-C").arg(folder));
    assert_eq!(code, Some(0), "{err}");
    folder.join("libmy_ccl.so")
}

fn conformance(library: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut command = oxccl(&["conformance", "--plugin"]);
    text(command.arg(library).args(arguments))
}

/// Runs the commands of docs/plugins.md that begin so, each as `start` makes it, and gives what they print.
fn run(begins: &str, count: usize, start: impl Fn(&[String]) -> Command) -> String {
    let page = std::fs::read_to_string(documents::root().join("docs/plugins.md")).unwrap();
    let mut commands = documents::documented(&page);
    commands.retain(|c| c.is_whole && c.words.join(" ").starts_with(begins));
    assert_eq!(commands.len(), count, "{begins}: {commands:?}");
    let printed = |command: &documents::Documented| {
        let (code, out, err) = text(&mut start(&command.words));
        assert_eq!(code, Some(0), "{:?}: {out}{err}", command.words);
        out
    };
    commands.iter().map(printed).collect()
}

/// As the page has it: from nothing to a library that passes, is found by its name, and is measured.
fn the_documented_commands_make_a_plugin_in_c_that_passes_as_it_is() {
    let below = tempfile::tempdir().unwrap();
    let acme = below.path().join("acme");
    let bin = Path::new(env!("CARGO_BIN_EXE_oxccl")).parent().unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let run = |folder: &Path, begins: &str, count: usize, more: &[&str]| {
        run(begins, count, |words| {
            let mut command = Command::new("sh");
            command
                .args(["-c", "exec \"$0\" \"$@\""])
                .args(words)
                .env("PATH", &path)
                .env("OXCCL_PLUGIN_PATH", acme.join("libacme.so"))
                .env_remove("OXCCL_LOG")
                .current_dir(folder);
            // One that names a part is short already.
            if !words.iter().any(|word| word == "--case") {
                command.args(more);
            }
            command
        })
    };
    let below = below.path();
    run(below, "oxccl new-plugin acme --language c", 1, &[]);
    let out = run(below, "make -C acme test", 1, &[]);
    let counted = |line: &str| out.lines().filter(|l| l.starts_with(line)).count();
    // As processes and as threads.
    assert_eq!(counted("# oxccl conformance: backend acme for cpu"), 2, "{out}");
    assert!(counted("all_reduce") == 2 && out.contains(" 0 failed,"), "{out}");
    assert!(out.contains("broadcast is not advertised"), "{out}");
    let begins = "oxccl conformance --plugin ./libacme.so";
    run(&acme, begins, 3, &["--case", "all_reduce"]);
    let out = run(below, "oxccl backends", 1, &[]);
    assert!(out.contains("acme") && out.contains("libacme.so"), "{out}");
    let short = ["--iters", "1", "--warmup", "0", "--sizes", "4"];
    run(below, "oxccl bench --backend acme", 1, &short);
    // The folder is taken now.
    let mut again = oxccl(&["new-plugin", "acme", "--language", "c", "--dir"]);
    let (code, _, err) = text(again.arg(&acme));
    assert!(code == Some(2) && err.contains("not empty"), "{err}");
}

/// As the page has it, but for a debug build, and with what this workspace has locked, so that nothing is fetched.
fn the_documented_commands_make_a_plugin_in_rust_that_passes_as_it_is() {
    // It stays, so that a second run finds what is built.
    let below = Path::new(env!("CARGO_TARGET_TMPDIR")).join("new-plugin");
    let (acme, target) = (below.join("acme"), below.join("target"));
    let _ = std::fs::remove_dir_all(&acme);
    std::fs::create_dir_all(&below).unwrap();
    let run = |folder: &Path, begins: &str, more: &[&str]| {
        run(begins, 1, |words| {
            let mut command = match words[0].as_str() {
                "cargo" => conformance::cargo(),
                _ => oxccl(&[]),
            };
            for word in words.iter().skip(1).filter(|word| *word != "--release") {
                let word = word.replace("~/oxccl", &documents::root().display().to_string());
                command.arg(word.replace("target/release", &target.join("debug").display().to_string()));
            }
            command
                .args(more)
                .env("CARGO_TARGET_DIR", &target)
                // What it brings is built for a few seconds of tests.
                .env("CARGO_PROFILE_DEV_DEBUG", "0")
                .current_dir(folder);
            command
        })
    };
    let out = run(&below, "oxccl new-plugin acme --language rust", &[]);
    assert!(
        out.contains("acme/src/lib.rs") && out.contains("cargo test"),
        "{out}"
    );
    std::fs::copy(documents::root().join("Cargo.lock"), acme.join("Cargo.lock")).unwrap();
    let out = run(&acme, "cargo test", &["--offline"]);
    assert!(out.contains("processes::all_reduce::sum::world2"), "{out}");
    run(&acme, "cargo build --release", &["--offline"]);
    let begins = "oxccl conformance --plugin target/release/libacme.so";
    run(&acme, begins, &["--case", "all_reduce"]);
}

fn a_wrong_sum_and_a_crash_cost_their_cases_and_are_named() {
    let below = tempfile::tempdir().unwrap();
    let folder = in_c(below.path());
    let twice = (
        "sums[i] += theirs[i]",
        "sums[i] += (g->world == 2 ? 2 : 1) * theirs[i]",
    );
    let library = build(&folder, Some(twice));
    let (code, out, err) = conformance(&library, &["--case", "all_reduce::sum", "--ranks", "3"]);
    assert_eq!(code, Some(1), "{out}{err}");
    assert!(
        out.contains("failed: processes::all_reduce::sum::world2"),
        "{out}"
    );
    assert!(out.contains("result: 2 passed, 1 failed, 1 not offered"), "{out}");
    assert!(out.contains("4 ranks, 3 at most: --ranks"), "{out}");
    let crash = (
        "int32_t status = sums && theirs ?",
        "abort();\n    int32_t status = sums && theirs ?",
    );
    let library = build(&folder, Some(crash));
    let (code, out, err) = conformance(&library, &["--case", "all_reduce::sum::world1"]);
    assert_eq!(code, Some(1), "{out}{err}");
    assert!(out.contains("signal: 6"), "{out}");
}

/// The suite tries what is advertised, whatever the element type: no case takes another one for granted.
fn a_backend_of_another_element_type_alone_passes_too() {
    for (element, dtype) in [("int64_t", "DTYPE_I64"), ("uint16_t", "DTYPE_U16")] {
        let below = tempfile::tempdir().unwrap();
        let folder = in_c(below.path());
        build(&folder, Some(("float", element)));
        let library = build(&folder, Some(("DTYPE_F32", dtype)));
        let (code, out, err) = conformance(&library, &["--ranks", "2"]);
        assert_eq!(code, Some(0), "{out}{err}");
    }
}

fn what_cannot_be_tried_is_exit_code_2_with_what_there_is() {
    let (code, _, err) = conformance(Path::new("/nowhere/libacme.so"), &[]);
    assert!(code == Some(2) && err.contains("/nowhere/libacme.so"), "{err}");
    assert!(err.contains("hint: check the path"), "{err}");
    let below = tempfile::tempdir().unwrap();
    let folder = in_c(below.path());
    let library = build(&folder, None);
    let (code, _, err) = conformance(&library, &["--backend", "acme"]);
    assert!(code == Some(2) && err.contains("it brings 'my_ccl'"), "{err}");
    let (code, _, err) = conformance(&library, &["--case", "no such case"]);
    assert!(code == Some(2) && err.contains("no such case"), "{err}");
    // Of what is not offered nothing ran: that is no success.
    let (code, out, _) = conformance(&library, &["--case", "gather"]);
    assert!(code == Some(1) && out.contains("no case ran"), "{out}");
    for name in ["My-CCL", "../x"] {
        let (code, _, err) = text(&mut oxccl(&["new-plugin", name, "--language", "c"]));
        assert!(code == Some(2) && err.contains("lower-case"), "{err}");
    }
}
