//! Which test runs each command of the documentation: a command that no entry fits is a finding, and so is an entry that no command needs, or
//! whose test is gone.

use std::collections::BTreeSet;

use documents::documented;

use crate::tidy::Finding;

/// The file of a test and a part of it, without which the command would not be run.
type Test = (&'static str, &'static str);

const DOCUMENTED: Test = (
    "apps/oxccl/tests/documented.rs",
    "fn documented_commands_do_what_they_should",
);
const EXAMPLES: &str = "apps/oxccl/tests/examples.rs";
const MEASUREMENTS: &str = "apps/oxccl/tests/measurements.rs";
const IN_C: Test = (
    "apps/oxccl/tests/new_plugins.rs",
    "fn the_documented_commands_make_a_plugin_in_c",
);
const IN_RUST: Test = (
    "apps/oxccl/tests/new_plugins.rs",
    "fn the_documented_commands_make_a_plugin_in_rust",
);
const MPI: Test = (
    "crates/world/tests/launchers/mpi.rs",
    "documented(\"mpirun\", \"--hostfile\")",
);
const PYTHON: &str = "python/tests/test_examples.py";
const TRAINING: &str = "examples/tests/programs.rs";

/// How a command begins (`in FOLDER: ` before one in a folder), and the test that runs it, shorter where it would take long. The first that fits
/// counts.
///
/// A program that a document only calls `./program` or `train.py` is the one that stands on that page.
const RUNS: &[(&str, Test)] = &[
    // A plugin of one's own.
    ("oxccl new-plugin acme --language c", IN_C),
    ("oxccl new-plugin acme --language rust", IN_RUST),
    ("oxccl conformance --plugin ./libacme.so", IN_C),
    ("oxccl bench --backend acme", IN_C),
    ("make -C acme test", IN_C),
    ("in acme: cargo", IN_RUST),
    (
        "in acme: oxccl conformance --plugin target/release/libacme.so",
        IN_RUST,
    ),
    ("oxccl", DOCUMENTED),
    // The programs, as their users build and start them.
    (
        "cargo run --bin train_diloco",
        (TRAINING, "fn train_diloco_survives_a_kill"),
    ),
    ("cargo build --bin train_diloco", (TRAINING, "fn run(")),
    (
        "cargo run --release --bin train_ddp",
        (TRAINING, "fn train_ddp_survives_a_kill"),
    ),
    (
        "cargo run --release --bin train_diloco",
        (TRAINING, "fn a_quantised_run_ends_equal"),
    ),
    (
        "train_diloco --checkpoint-dir",
        ("examples/tests/resume.rs", "--checkpoint-dir"),
    ),
    (
        "train_diloco --replicas 2 --ranks-per-replica 2",
        ("examples/tests/ranks.rs", "--chaos 3"),
    ),
    (
        "cargo install --path apps/oxccl",
        (MEASUREMENTS, "fn the_command_is_installed"),
    ),
    ("cargo build --bin oxccl", (EXAMPLES, "CARGO_BIN_EXE_oxccl")),
    ("cargo build -p oxccl --example hsdp", (EXAMPLES, "\"hsdp\"")),
    (
        "target/debug/oxccl launch --replicas 2 --ranks-per-replica 2 -- target/debug/examples/hsdp",
        (EXAMPLES, "\"hsdp\""),
    ),
    (
        "cargo build -p oxccl-cli -p oxccl-candle",
        ("crates/adapters/candle/tests/examples.rs", "\"candle_ddp\""),
    ),
    (
        "target/debug/oxccl launch --replicas 2 -- target/debug/examples/candle_ddp",
        ("crates/adapters/candle/tests/examples.rs", "\"candle_ddp\""),
    ),
    (
        "cargo run --manifest-path crates/adapters/burn/Cargo.toml --example two_replicas",
        ("crates/adapters/burn/tests/two_replicas.rs", "two_replicas"),
    ),
    ("./program", (EXAMPLES, "fn all_reduce_sums_over_the_processes")),
    // The tests themselves.
    ("cargo xtask test", ("xtask/src/ci.rs", "runner::test")),
    (
        "cargo test -p oxccl-protocol --test simulation-conformance",
        ("xtask/src/matrix.rs", "simulation-conformance"),
    ),
    (
        "cargo test -p oxccl-coordination --lib",
        ("xtask/src/matrix.rs", "Run::Unit"),
    ),
    (
        "cargo test -p oxccl-cli --test etcd-conformance",
        ("xtask/src/matrix.rs", "etcd-conformance"),
    ),
    // Measurements.
    (
        "cargo run --release -p",
        (MEASUREMENTS, "fn measured_examples_run"),
    ),
    ("cargo build --release -p", (MEASUREMENTS, "fn built()")),
    (
        "cargo run --release --bin compare_diloco",
        (MEASUREMENTS, "\"compare_diloco\""),
    ),
    ("cargo xtask chaos", (MEASUREMENTS, "\"chaos --replicas 2")),
    (
        "cargo xtask bench-lighthouse",
        (MEASUREMENTS, "\"bench-lighthouse "),
    ),
    ("cargo xtask faults", (MEASUREMENTS, "\"faults --only")),
    (
        "target/release/examples/quantized_all_reduce",
        (MEASUREMENTS, "fn the_ranks_of_a_quantised_all_reduce_run"),
    ),
    ("ip ", (MEASUREMENTS, "fn the_recipe_for_a_slow_link_runs")),
    (
        "in python: python bench/",
        ("python/tests/test_measurements.py", "def test_measurement("),
    ),
    (
        "in python: cargo build --release --example all_reduce",
        ("python/tests/test_measurements.py", "def peer("),
    ),
    // Launchers.
    ("mpirun", MPI),
    (
        "srun --no-kill",
        (
            "crates/world/tests/launchers/slurm.rs",
            "documented(\"srun\", \"--no-kill\")",
        ),
    ),
    (
        "srun",
        (
            "crates/world/tests/launchers/slurm.rs",
            "documented(\"srun\", \"-n\")",
        ),
    ),
    (
        "torchrun --nproc-per-node=4 --no-python",
        (
            "crates/world/tests/launchers/torchrun.rs",
            "documented(\"torchrun\", \"--no-python\")",
        ),
    ),
    ("kubectl", ("apps/oxccl/tests/kubernetes.rs", "kubectl")),
    // Python.
    (
        "pip install ./python torch",
        ("xtask/src/python.rs", "\"pip install\""),
    ),
    (
        "torchrun --nproc-per-node 2 train.py",
        (
            PYTHON,
            "def test_the_script_at_the_head_of_the_page_trains_under_torchrun",
        ),
    ),
    (
        "python sum.py",
        (PYTHON, "def test_the_script_of_the_page_without_torch_sums"),
    ),
    (
        "python train.py",
        (
            PYTHON,
            "def test_the_script_of_the_page_on_fault_tolerance_trains",
        ),
    ),
    (
        "python -m torch.distributed.flight_recorder.fr_trace",
        (
            "python/tests/test_trace.py",
            "torch.distributed.flight_recorder.fr_trace",
        ),
    ),
    // The row `nccl-library` fetches that wheel with pip and opens what is in it.
    (
        "pip install nvidia-nccl-cu13",
        ("xtask/src/nccl.rs", "nvidia-nccl-cu13"),
    ),
    // Tools of others.
    ("curl", ("apps/oxccl/tests/observability/curl.rs", "\"curl\"")),
    ("jq", ("apps/oxccl/tests/observability/events.rs", "\"jq \"")),
];

/// Of a shell, for what stands around them.
const SHELL: [&str; 2] = ["export", "wait"];

/// What commands of ours begin with.
const PROGRAMS: [&str; 9] = [
    "oxccl",
    "cargo",
    "make",
    "export",
    "python",
    "pip",
    "train_diloco",
    "train_ddp",
    "curl",
];

/// The entries of the table that the documents so far need.
#[derive(Default)]
pub(in crate::tidy) struct Runs {
    needed: BTreeSet<&'static str>,
}

impl Runs {
    /// Finds the commands of a document for which no test is named.
    pub(in crate::tidy) fn check(&mut self, path: &str, text: &str) -> Vec<Finding> {
        let mut findings: Vec<Finding> = hidden(text)
            .map(|line| {
                Finding::new(
                    path,
                    line,
                    "command",
                    "a command stands in a block of text: make it one of sh",
                )
            })
            .collect();
        for command in documented(text) {
            let mut line = command.words.join(" ");
            if let Some(folder) = &command.folder {
                line = format!("in {folder}: {line}");
            }
            if !command.is_whole || SHELL.contains(&command.words[0].as_str()) {
                continue;
            }
            if let Some((begins, _)) = RUNS.iter().find(|(begins, _)| fits(&line, begins)) {
                self.needed.insert(begins);
            } else {
                let text = format!("no test is named that runs '{line}' in xtask/src/tidy/commands/runs.rs");
                findings.push(Finding::new(path, command.line, "command", text));
            }
        }
        findings
    }

    /// After all documents: finds entries that none needed, and tests that are not what the table says. `read` gives a file's text.
    pub(in crate::tidy) fn check_table(&self, read: impl Fn(&str) -> Option<String>) -> Vec<Finding> {
        let wrong = |&(begins, (file, part)): &(&str, Test)| {
            if !self.needed.contains(begins) {
                return Some(format!("no document has a command '{begins}'"));
            }
            let is_there = read(file).is_some_and(|text| text.contains(part));
            (!is_there).then(|| format!("'{begins}' is run by '{part}' of {file}, which is not there"))
        };
        RUNS.iter()
            .filter_map(wrong)
            .map(|text| Finding::new("xtask/src/tidy/commands/runs.rs", 0, "command", text))
            .collect()
    }
}

/// The lines with commands in blocks of text, which no test reads.
fn hidden(text: &str) -> impl Iterator<Item = usize> {
    let mut is_text = false;
    (1..).zip(text.lines()).filter_map(move |(number, line)| {
        if let Some(language) = line.trim().strip_prefix("```") {
            is_text = language == "text" && !is_text;
        }
        let program = line.split(' ').next().unwrap_or_default();
        (is_text && PROGRAMS.contains(&program)).then_some(number)
    })
}

/// `cargo run --bin x` fits `cargo run --bin x --more`; `oxccl` does not fit `oxccl-more`.
fn fits(line: &str, begins: &str) -> bool {
    let rest = line.strip_prefix(begins);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(' ') || begins.ends_with([' ', '/']))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_without_a_test_is_found_with_its_line() {
        let text = "`rsync x`\n```sh\nexport A=1\noxccl backends\ncargo xtask test --row unit && rsync -a b c:\nipcs -a\nwait\n```\n\
                    ```text\noxccl: a log\noxccl why\n```\noxccl is a word\n";
        let mut runs = Runs::default();
        let found: Vec<String> = runs.check("d.md", text).iter().map(ToString::to_string).collect();
        let line = |n: u32, command: &str| {
            format!(
                "d.md:{n}: [command] no test is named that runs '{command}' in xtask/src/tidy/commands/runs.rs"
            )
        };
        let hidden = "d.md:11: [command] a command stands in a block of text: make it one of sh".to_owned();
        assert_eq!(found, [hidden, line(5, "rsync -a b c:"), line(6, "ipcs -a")]);
        assert_eq!(runs.needed, BTreeSet::from(["oxccl", "cargo xtask test"]));
    }

    #[test]
    fn an_entry_without_a_command_or_a_test_is_found() {
        let needed = RUNS.iter().map(|(begins, _)| *begins).collect();
        let (_, (file, _)) = RUNS[0];
        let there = |path: &str| (path != file).then(|| RUNS.iter().map(|(_, (_, part))| *part).collect());
        let gone = Runs { needed }.check_table(there);
        let its = RUNS.iter().filter(|(_, (path, _))| *path == file).count();
        assert_eq!(gone.len(), its, "{gone:?}");
        assert!(gone.iter().all(|f| f.text.contains(file)), "{gone:?}");
        let unneeded = Runs::default().check_table(|_| None);
        assert_eq!(unneeded.len(), RUNS.len());
    }
}
