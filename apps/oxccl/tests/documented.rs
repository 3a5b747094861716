//! The commands of the documentation: `oxccl` knows each that a document names, and does those that take a moment.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::{Path, PathBuf};
use std::process::Command;

#[path = "../../../xtask/src/tidy/commands/shell.rs"]
#[allow(dead_code, reason = "this test reads a part of what the file has")]
mod shell;

use shell::{Documented, documented, unknown};

/// Whole commands that are not run here, by what stands after `oxccl`, and why not.
const NOT_RUN: &[(&str, &str)] = &[
    (
        "bench --backend nccl",
        "needs a GPU; the row `nccl` measures over the stand-in",
    ),
    ("bench --backend xccl", "needs oneCCL; the rows `xccl` have it"),
    ("bench --op all ", "takes a minute; tests/bench.rs measures less"),
    (
        "launch",
        "needs a program and mostly other machines; the README's run in examples/tests/recipe.rs, tests/launch.rs has the options",
    ),
    (
        "lighthouse",
        "serves until it is stopped; tests/command.rs starts and stops one",
    ),
    (
        "replica",
        "needs a job; the tests of the training programs give such orders",
    ),
    (
        "trace dump",
        "needs a process that hangs; tests/trace.rs asks one",
    ),
    (
        "trace merge",
        "needs records of a failure; tests/trace.rs makes some",
    ),
    ("why", "needs a lighthouse; tests/why.rs asks one"),
];

/// What is done before a command, and what is added to it so that it takes a moment only.
const RUN: &[(&str, &str, &str)] = &[
    ("backends", "", ""),
    ("bench --op all_reduce,", "", "--iters 1 --warmup 0"),
    ("bench --option", "", "--iters 1 --warmup 0 --sizes 4"),
    ("credentials new", "", ""),
    (
        "plan --parameters 10B",
        r#"printf '{"hosts": [{"name": "a", "count": 3, "ranks": 2}], "local": {"rate": 1e11}, "between": {"rate": 1e9}}' > links.json"#,
        "",
    ),
    ("plan", "", ""),
    ("credentials issue", "", ""),
    ("credentials show", "", ""),
    (
        "credentials revoke",
        "oxccl credentials issue --for lighthouse job1 job1-lighthouse",
        "",
    ),
];

/// What follows `oxccl` between backticks where no command is meant: words of the keys' derivation (docs/credentials-data-plane.md).
const LABELS: &[&str] = &["listener", "caller", "data", "record", "records"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// All documents, from the README on.
fn documents() -> Vec<PathBuf> {
    fn below(folder: &Path, found: &mut Vec<PathBuf>) {
        let entries = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path());
        let mut entries: Vec<PathBuf> = entries.collect();
        entries.sort();
        for path in entries {
            let name = path.file_name().unwrap().to_str().unwrap();
            if path.is_dir() && name != "target" && !name.starts_with('.') {
                below(&path, found);
            } else if name.ends_with(".md") && name != "CHANGELOG.md" {
                found.push(path);
            }
        }
    }
    let mut found = Vec::new();
    below(&root(), &mut found);
    found.sort_by_key(|path| *path != root().join("README.md"));
    found
}

/// The documents' commands of this program, with where they stand.
fn ours() -> Vec<(String, Documented)> {
    let mut found = Vec::new();
    for path in documents() {
        let text = std::fs::read_to_string(&path).unwrap();
        let place = path.strip_prefix(root()).unwrap().display().to_string();
        let is_label = |c: &Documented| c.words.get(1).is_some_and(|w| LABELS.contains(&w.as_str()));
        let commands = documented(&text)
            .into_iter()
            .filter(|c| c.words[0] == "oxccl" && (c.is_whole || !is_label(c)));
        found.extend(commands.map(|c| (format!("{place}:{}", c.line), c)));
    }
    assert!(found.len() > 40, "only {} commands were found", found.len());
    found
}

#[test]
fn every_documented_command_and_option_is_there() {
    let grammar = oxccl_cli::grammar();
    let mut wrong = Vec::new();
    for (place, command) in ours() {
        wrong.extend(unknown(&grammar, &command.words[1..]).map(|text| format!("{place}: {text}")));
        if command.is_whole {
            // A variable of the shell stands for a number.
            let words = command
                .words
                .iter()
                .map(|w| if w.starts_with('$') { "0" } else { w.as_str() });
            let parsed = grammar.clone().try_get_matches_from(words);
            wrong.extend(parsed.err().map(|e| format!("{place}: {e}")));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The files in `deploy/` start the command in forms of their own: `exec oxccl launch …` of a shell, and a list with an item for each argument.
#[test]
fn the_jobs_ready_to_use_give_options_that_are_there() {
    let folder = root().join("deploy");
    let text = |file: &str| std::fs::read_to_string(folder.join(file)).unwrap();
    let of_a_shell = |file: &str| -> Vec<String> {
        let text = text(file);
        let (_, command) = text.split_once("exec oxccl ").unwrap();
        let words = command.split_whitespace().filter(|word| *word != "\\");
        words
            .map(|word| word.trim_matches('"').to_owned())
            .take_while(|word| word != "--")
            .collect()
    };
    let listed = text("kubernetes/lighthouse.yaml");
    let (_, list) = listed.split_once("- oxccl\n").unwrap();
    let items = list.lines().map_while(|line| line.trim().strip_prefix("- "));
    let grammar = oxccl_cli::grammar();
    for (file, words) in [
        ("slurm/replicas.sbatch", of_a_shell("slurm/replicas.sbatch")),
        ("kubernetes/replicas.yaml", of_a_shell("kubernetes/replicas.yaml")),
        ("kubernetes/lighthouse.yaml", items.map(str::to_owned).collect()),
    ] {
        assert!(words.len() > 5, "{file}: {words:?}");
        assert_eq!(unknown(&grammar, &words), None, "{file}");
    }
}

#[test]
fn documented_commands_that_take_a_moment_do_what_they_should() {
    let folder = tempfile::tempdir().unwrap();
    let bin = Path::new(env!("CARGO_BIN_EXE_oxccl")).parent().unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let sh = |place: &str, script: &str| {
        let output = Command::new("sh")
            .args(["-c", script])
            .current_dir(folder.path())
            .env("PATH", &path)
            .env_remove("OXCCL_CREDENTIALS")
            .output()
            .unwrap();
        let err = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{place}: {script}\n{err}");
    };
    let mut ran = 0;
    for (place, command) in ours().into_iter().filter(|(_, command)| command.is_whole) {
        let rest = command.words[1..].join(" ");
        if NOT_RUN
            .iter()
            .any(|(begins, _)| format!("{rest} ").starts_with(begins))
        {
            continue;
        }
        let run = RUN
            .iter()
            .find(|(begins, ..)| format!("{rest} ").starts_with(begins));
        let (_, before, more) = run.unwrap_or_else(|| {
            panic!(
                "{place}: 'oxccl {rest}' is neither run nor has a reason why not: add it to RUN or NOT_RUN"
            )
        });
        sh(&place, before);
        sh(&place, &format!("oxccl {rest} {more}"));
        ran += 1;
    }
    assert!(ran >= 6, "{ran} were run");
}
