//! The measurements that the documents name run: each program once, small, and not optimised, so that its figures mean nothing here.
//! `cargo xtask test --row measurements`; an example of a document that is missing below fails it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;
use std::process::{Child, Command, ExitCode, Output, Stdio};
use std::sync::Once;

use documents::root;
use libtest_mimic::{Arguments, Completion, Failed, Trial};

/// Examples of cargo's: the name, what they are given, and a part of what they print.
const RUN: &[(&str, &str, &str)] = &[
    ("heal_rate", "1 1", "of the plain copy"),
    ("quorum_overlap", "3 5 5", "overlapped"),
    ("step_cost", "1 16 2", "to push gradients"),
    ("outer_step", "1 2 8 2 1 2", "of each the median"),
    (
        "fleet_campaign",
        "replicas=64 every=5 rounds=50",
        "is committed work",
    ),
    ("isolate_overhead", "1 4096", "direct/isolated"),
    ("spare_cost", "1 1 2 --members 1", "with a transfer"),
    ("plugin_overhead", "", "the dylib path costs"),
    ("nmse", "", "two-phase, 16 ranks"),
    ("throughput", "int8", "| int8-b64 |"),
];

/// Two ranks, started one by one.
const RANKS: &str = "quantized_all_reduce";

/// Run elsewhere, and where.
const ELSEWHERE: &[(&str, &str)] = &[(
    "xccl_overhead",
    "needs oneCCL: the row `xccl-lifecycle` with --long",
)];

fn main() -> ExitCode {
    let test = |name: &str, body: fn()| {
        Trial::test(name, move || {
            body();
            Ok::<(), Failed>(())
        })
    };
    let no_root = (!rustix::process::geteuid().is_root()).then_some("network namespaces need root");
    let tests = vec![
        test(
            "every_measured_example_of_the_documents_is_run_here",
            every_measured_example_of_the_documents_is_run_here,
        ),
        test("measured_examples_run", measured_examples_run),
        test(
            "the_ranks_of_a_quantised_all_reduce_run",
            the_ranks_of_a_quantised_all_reduce_run,
        ),
        test("the_other_measurements_run", the_other_measurements_run),
        test(
            "every_operation_is_compared_with_a_peer",
            every_operation_is_compared_with_a_peer,
        ),
        test("the_command_is_installed", the_command_is_installed),
        Trial::ignorable_test("the_recipe_for_a_slow_link_runs", move || match no_root {
            Some(why) => Ok(Completion::ignored_with(why)),
            None => {
                the_recipe_for_a_slow_link_runs();
                Ok(Completion::Completed)
            }
        }),
    ];
    libtest_mimic::run(&Arguments::from_args(), tests).exit_code()
}

/// Cargo's folder of what it built for this test.
fn built() -> &'static Path {
    static BUILT: Once = Once::new();
    // All at once, with the features that the tests have: one by one each would build what it stands on with features of its own.
    BUILT.call_once(|| {
        let build = ["build", "--quiet", "--workspace", "--lib", "--bins", "--examples"];
        let output = conformance::cargo().current_dir(root()).args(build).output();
        said("cargo build", &output.unwrap());
    });
    Path::new(env!("CARGO_BIN_EXE_oxccl")).parent().unwrap()
}

/// A program in that folder.
fn start(program: &str, arguments: &str) -> Child {
    Command::new(built().join(program))
        .current_dir(root())
        .args(arguments.split_whitespace())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Runs it to its end.
fn runs(program: &str, arguments: &str, part: &str) {
    let output = start(program, arguments).wait_with_output().unwrap();
    let said = said(program, &output);
    assert!(
        said.contains(part),
        "{program} {arguments}: no '{part}' in:\n{said}"
    );
}

fn said(of: &str, output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let said = text(&output.stdout) + &text(&output.stderr);
    assert!(output.status.success(), "{of}: {}:\n{said}", output.status);
    said
}

fn every_measured_example_of_the_documents_is_run_here() {
    let mut named = 0;
    for (path, text) in documents::all().unwrap() {
        for command in documents::documented(&text) {
            let is_measured = ["cargo", "run", "--release"]
                .iter()
                .zip(&command.words)
                .all(|(a, b)| a == b);
            let Some(at) = command.words.iter().position(|word| word == "--example") else {
                continue;
            };
            let example = command.words[at + 1].as_str();
            let names = || {
                RUN.iter()
                    .map(|(name, ..)| *name)
                    .chain(ELSEWHERE.iter().map(|(name, _)| *name))
            };
            if is_measured {
                named += 1;
                let place = format!("{path}:{}", command.line);
                assert!(
                    names().chain([RANKS]).any(|name| name == example),
                    "{place}: '{example}' is not run here"
                );
            }
        }
    }
    assert!(named >= 12, "only {named} were found");
}

fn measured_examples_run() {
    for (example, arguments, part) in RUN {
        runs(&format!("examples/{example}"), arguments, part);
    }
}

fn the_ranks_of_a_quantised_all_reduce_run() {
    let free = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let start = |rank| {
        start(
            &format!("examples/{RANKS}"),
            &format!("{rank} 2 {free} 1 f32,int8"),
        )
    };
    let [first, _] = [0, 1]
        .map(start)
        .map(|rank| said(RANKS, &rank.wait_with_output().unwrap()));
    assert!(first.contains("int8"), "{first}");
}

/// The other programs that the documents measure with, what they are given, and a part of what is printed. Short: nothing is asked of a rate.
const PROGRAMS: &[(&str, &str, &str)] = &[
    (
        "xtask",
        "chaos --replicas 2 --seconds 20 --undisturbed-seconds 10 --at-least 0",
        "undisturbed",
    ),
    (
        "xtask",
        "bench-lighthouse --profile dev --replicas 8 --steps 2 --rounds 1 --peer",
        "| 8 | torchft |",
    ),
    (
        "xtask",
        "faults --only batches --seeds 0..300 --network-seeds 0..3",
        "| without the cure |",
    ),
    (
        "compare_diloco",
        "--steps 64 --seeds 1 --formats int8 --sync-every 16 -- --d-model 32 --layers 1 --seq 16 --batch 2",
        "diloco int8",
    ),
];

fn the_other_measurements_run() {
    for (program, arguments, part) in PROGRAMS {
        runs(program, arguments, part);
    }
}

/// Every operation of `bench-peers`, small: ours and MPICH's figures are in the report, and the tables are in the file.
fn every_operation_is_compared_with_a_peer() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("page.md");
    std::fs::write(&page, "<!-- bench-peers:begin -->\n<!-- bench-peers:end -->\n").unwrap();
    let arguments = format!(
        "bench-peers --rounds 1 --sizes 64 --ranks 2 --only mpich --json --oxccl {} --write {}",
        env!("CARGO_BIN_EXE_oxccl"),
        page.display()
    );
    let output = start("xtask", &arguments).wait_with_output().unwrap();
    let said = said("xtask", &output);
    assert!(!said.contains(" failed: "), "{said}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let section = &report["sections"][0];
    // A machine that cannot fetch MPICH says so; one whose MPICH computes something wrong has failed above.
    let skipped = section["skipped"].as_array().unwrap();
    let peers: &[&str] = if skipped.is_empty() { &["MPICH"] } else { &[] };
    let moving = [
        "all_reduce",
        "all_gather_into",
        "reduce_scatter_into",
        "all_to_all_into",
        "broadcast",
    ];
    let short = ["all_reduce_async", "barrier", "ping_pong"];
    for op in moving.iter().chain(&short) {
        let alloc: &[&str] = if short.contains(op) { &[] } else { &["oxccl alloc"] };
        for program in ["oxccl"].iter().chain(alloc).chain(peers) {
            let mut lines = section["results"].as_array().unwrap().iter();
            let line = lines.find(|l| l["op"] == *op && l["program"] == *program);
            let line = line.unwrap_or_else(|| panic!("no {op} of {program}: {report}"));
            assert!(line["median_us"].as_f64().unwrap() > 0.0, "{line}");
            assert_eq!(line["bytes"], if *op == "barrier" { 0 } else { 64 }, "{line}");
        }
    }
    let page = std::fs::read_to_string(page).unwrap();
    for table in moving.iter().chain(&["latency"]) {
        let title = format!("**{table}, inside one host**");
        assert!(page.contains(&title), "no {title} in:\n{page}");
    }
}

/// `cargo install`, as the command's README has it, but not optimised.
fn the_command_is_installed() {
    let folder = tempfile::tempdir().unwrap();
    let mut install = conformance::cargo();
    install
        .current_dir(root())
        .args(["install", "--quiet", "--debug", "--path", "apps/oxccl"]);
    let target = built().parent().unwrap();
    install
        .arg("--target-dir")
        .arg(target)
        .arg("--root")
        .arg(folder.path());
    said("cargo install", &install.output().unwrap());
    let installed = Command::new(folder.path().join("bin/oxccl"))
        .arg("backends")
        .output();
    let said = said("oxccl backends", &installed.unwrap());
    assert!(said.contains("gloo"), "{said}");
}

/// The recipe of docs/benchmarks/healing.md, line by line, with a smaller state. In namespaces of its own, which end with it; `ip` keeps the names
/// of those that it makes below `/run`.
const SLOW_LINK: &str = r#"
set -e
mount -t tmpfs none /run
RECIPE
SERVE > "$FOLDER/url" &
serves=$!
while ! grep -q http "$FOLDER/url"; do kill -0 $serves; sleep 0.05; done
FETCH
"#;

fn the_recipe_for_a_slow_link_runs() {
    let page = std::fs::read_to_string(root().join("docs/benchmarks/healing.md")).unwrap();
    let (_, begun) = page.split_once("\nH=target/release/examples/heal_rate").unwrap();
    let (recipe, _) = begun.split_once("```").unwrap();
    let lines: Vec<&str> = recipe.lines().skip(1).collect();
    let [makes @ .., serves, fetches] = lines.as_slice() else {
        panic!("{recipe}");
    };
    let serves = serves.split('#').next().unwrap().trim();
    assert!(
        makes.len() > 3 && serves.ends_with("serve 10.77.0.1:0 512") && fetches.ends_with("fetch URL"),
        "{recipe}"
    );
    let folder = tempfile::tempdir().unwrap();
    let script = SLOW_LINK
        .replace("RECIPE", &makes.join("\n"))
        .replace("SERVE", &serves.replace(" 512", " 1"))
        .replace("FETCH", &fetches.replace("URL", "$(cat \"$FOLDER/url\")"));
    let output = Command::new("unshare")
        .args([
            "--net",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "timeout",
            "120",
            "sh",
            "-c",
            &script,
        ])
        .env("H", built().join("examples/heal_rate"))
        .env("FOLDER", folder.path())
        .output();
    let said = said("unshare", &output.unwrap());
    assert!(said.contains("Gbit/s"), "{said}");
}
