//! Commands of the documentation: each `cargo …` names packages, programs, tests, examples and rows that exist, and `cargo xtask` has what it is
//! called with. [`runs`] names a test for each.
//!
//! The arguments of `oxccl` and of the training programs are checked by tests of theirs (`apps/oxccl/tests/documented.rs`, `examples/tests/documented.rs`).

use std::collections::BTreeSet;

use documents::{Documented, documented, unknown};

use super::Finding;
use crate::metadata::Metadata;

pub(super) mod runs;

/// What cargo's arguments may name.
pub(super) struct Names {
    packages: BTreeSet<String>,
    /// (kind, name): `bin`, `test`, `example`.
    targets: BTreeSet<(&'static str, String)>,
    rows: Vec<&'static str>,
    xtask: clap::Command,
}

impl Names {
    /// Of this workspace.
    pub(super) fn of(metadata: &Metadata, rows: Vec<&'static str>, xtask: clap::Command) -> Self {
        let packages = metadata.packages.iter().map(|p| p.name.clone()).collect();
        let all = metadata.packages.iter().flat_map(|p| &p.targets);
        let targets = all
            .flat_map(|target| {
                let kinds = ["bin", "test", "example"].into_iter();
                kinds
                    .filter(|kind| target.kind.iter().any(|k| k == kind))
                    .map(|kind| (kind, target.name.clone()))
            })
            .collect();
        Self {
            packages,
            targets,
            rows,
            xtask,
        }
    }

    fn has(&self, kind: &'static str, name: &str) -> bool {
        self.targets.contains(&(kind, name.to_owned()))
    }
}

/// Checks one document. `exists` tells whether a path from the root is there.
pub(super) fn check(path: &str, text: &str, names: &Names, exists: impl Fn(&str) -> bool) -> Vec<Finding> {
    let commands = documented(text);
    // A document of another workspace names what is there.
    let mut folders = path.match_indices('/').map(|(at, _)| &path[..at]);
    let is_apart = folders.any(|folder| exists(&format!("{folder}/Cargo.lock")));
    let wrong = |command: &Documented| {
        let (program, arguments) = command.words.split_first()?;
        if let Some(example) = program.split("target/release/examples/").nth(1) {
            return (!names.has("example", example) && command.folder.is_none())
                .then(|| format!("there is no example '{example}'"));
        }
        match program.as_str() {
            "cargo" => cargo(arguments, is_apart || command.folder.is_some(), names, &exists),
            _ => None,
        }
    };
    commands
        .iter()
        .filter_map(|command| Some(Finding::new(path, command.line, "command", wrong(command)?)))
        .collect()
}

/// What is wrong with the arguments of a `cargo`; `elsewhere`: in a folder of its own.
fn cargo(
    arguments: &[String],
    elsewhere: bool,
    names: &Names,
    exists: impl Fn(&str) -> bool,
) -> Option<String> {
    let own = |words: &'_ [String]| {
        words
            .iter()
            .take_while(|w| *w != "--")
            .cloned()
            .collect::<Vec<_>>()
    };
    if let Some((_, rest)) = arguments.split_first().filter(|(first, _)| *first == "xtask") {
        let rest = own(rest);
        let rows = rest.iter().zip(rest.iter().skip(1));
        let row = rows.filter(|(option, _)| *option == "--row").map(|(_, row)| row);
        let lost = row
            .filter(|row| !is_placeholder(row))
            .find(|row| !names.rows.contains(&row.as_str()));
        return match lost {
            Some(row) => Some(format!("the matrix has no row '{row}'")),
            None => unknown(&names.xtask, &rest),
        };
    }
    let arguments = own(arguments);
    let mut is_elsewhere = elsewhere;
    for (option, value) in arguments.iter().zip(arguments.iter().skip(1)) {
        let (kind, known) = match option.as_str() {
            "--manifest-path" | "--path" => {
                is_elsewhere |= option == "--manifest-path";
                ("path", exists(value))
            }
            _ if is_elsewhere => continue,
            "-p" | "--package" => ("package", names.packages.contains(value)),
            "--bin" => ("program", names.has("bin", value)),
            "--test" => ("test", names.has("test", value)),
            "--example" => ("example", names.has("example", value)),
            _ => continue,
        };
        if !known && !is_placeholder(value) {
            return Some(format!("there is no {kind} '{value}'"));
        }
    }
    None
}

/// `NAME`, or `NAME-more`, stands for any.
fn is_placeholder(word: &str) -> bool {
    let name = word.split(['/', '-']).next().unwrap_or_default();
    !name.is_empty() && name.bytes().all(|b| b.is_ascii_uppercase() || b == b'_')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<String> {
        let metadata = r#"{"workspace_root": "/w", "target_directory": "/w/target", "packages": [{"name": "gloo", "manifest_path": "/w/gloo/Cargo.toml",
            "dependencies": [], "targets": [{"name": "ring", "kind": ["test"]}, {"name": "rate", "kind": ["example"]}, {"name": "go", "kind": ["bin"]}]}]}"#;
        let xtask = clap::Command::new("cargo xtask")
            .subcommand(clap::Command::new("test").arg(clap::Arg::new("row").long("row").num_args(1)));
        let names = Names::of(
            &Metadata::parse(metadata.as_bytes()).unwrap(),
            vec!["unit"],
            xtask,
        );
        let exists = |path: &str| ["here/Cargo.toml", "apart/Cargo.lock"].contains(&path);
        assert_eq!(
            check("apart/d.md", text, &names, exists)
                .iter()
                .filter(|f| f.text.contains("test '"))
                .count(),
            0
        );
        let findings = check("d.md", text, &names, exists);
        findings.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn commands_that_name_what_is_there_are_fine() {
        let good = "`cargo test -p gloo --test ring -- --nocapture` and `cargo xtask test --row NAME`\n```sh\ncargo run --bin go\n\
                    cargo +nightly fuzz run x\ncargo xtask test --row unit\ncargo test --manifest-path here/Cargo.toml --test other\n\
                    cd python && cargo build --example other\ntarget/release/examples/rate 1\n```\n";
        assert_eq!(found(good), [] as [&str; 0]);
    }

    #[test]
    fn what_a_command_names_and_is_not_there_is_found_with_its_line() {
        let bad = "`cargo test -p glo`\n```sh\ncargo run --bin gone\ncargo test -p gloo --test rings\ncargo run --example rates\n\
                   cargo xtask test --row units\ncargo xtask test --rows unit\ncargo xtask tests\ncargo test --manifest-path gone/Cargo.toml\n\
                   target/release/examples/rates 1\n```\n";
        assert_eq!(
            found(bad),
            [
                "d.md:1: [command] there is no package 'glo'",
                "d.md:3: [command] there is no program 'gone'",
                "d.md:4: [command] there is no test 'rings'",
                "d.md:5: [command] there is no example 'rates'",
                "d.md:6: [command] the matrix has no row 'units'",
                "d.md:7: [command] 'cargo xtask test' has no option '--rows'",
                "d.md:8: [command] 'cargo xtask' has no command 'tests'",
                "d.md:9: [command] there is no path 'gone/Cargo.toml'",
                "d.md:10: [command] there is no example 'rates'",
            ]
        );
    }
}
