//! How many lines of source each crate has: all lines of the `.rs` files below `crates`, `apps` and `plugins`, outside folders named `tests`,
//! `fixtures` and `examples`, without modules that are tests, whether they stand in the file or beside it.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::lexer::Source;

/// Where crates are, and what in them is no source.
const ROOTS: [&str; 3] = ["crates", "apps", "plugins"];
const APART: [&str; 3] = ["tests", "fixtures", "examples"];

/// One line per crate, largest first, then the sum.
pub(super) fn table(sources: &[Source]) -> String {
    let tests: Vec<String> = sources.iter().flat_map(test_modules).collect();
    let is_test = |path: &str| {
        tests.iter().any(|module| {
            let rest = path.strip_prefix(module.as_str());
            rest.is_some_and(|r| r == ".rs" || r.starts_with('/'))
        })
    };
    let mut crates = BTreeMap::new();
    for source in sources.iter().filter(|s| !is_test(&s.path)) {
        if let Some(name) = crate_of(&source.path) {
            *crates.entry(name).or_insert(0) += count(source);
        }
    }
    let mut rows: Vec<(&str, usize)> = crates.into_iter().collect();
    rows.sort_by_key(|(name, lines)| (usize::MAX - lines, *name));
    let mut text = String::new();
    for (name, lines) in &rows {
        let _ = writeln!(text, "{lines:>7}  {name}");
    }
    let sum: usize = rows.iter().map(|(_, lines)| lines).sum();
    let _ = writeln!(text, "{sum:>7}  in all");
    text
}

/// The crate's folder, if the file is source of one.
fn crate_of(path: &str) -> Option<&str> {
    let mut folders: Vec<&str> = path.split('/').collect();
    folders.pop();
    let is_source = ROOTS.contains(folders.first()?) && !folders.iter().any(|f| APART.contains(f));
    if !is_source {
        return None;
    }
    // A build script stands beside `src`.
    let end = path.find("/src/").or_else(|| path.rfind('/'))?;
    path.get(..end)
}

/// Where the modules stand, without `.rs`, that the file declares for tests and that have files of their own.
fn test_modules(source: &Source) -> Vec<String> {
    let (folder, file) = source.path.rsplit_once('/').unwrap_or_default();
    let folder = match file {
        "lib.rs" | "main.rs" | "mod.rs" => folder,
        _ => source.path.trim_end_matches(".rs"),
    };
    let behind = source.code.split("#[cfg(test)]").skip(1);
    behind
        .filter_map(|item| item.trim_start().strip_prefix("mod ")?.split_once([';', ' ']))
        .filter(|(_, rest)| !rest.starts_with('{'))
        .map(|(name, _)| format!("{folder}/{name}"))
        .collect()
}

fn count(source: &Source) -> usize {
    let lines = source.text.lines().count();
    (1..=lines).filter(|line| !source.is_test(*line)).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_fixtures_and_examples_do_not_count() {
        let source = |path: &str, text: &str| Source::new(path, text);
        let sources = [
            source(
                "crates/a/src/lib.rs",
                "fn a() {}\n\n#[cfg(test)]\nmod tests {\n    fn b() {}\n}\n",
            ),
            source("crates/a/src/deep/b.rs", "// three\n// more\nfn c() {}\n"),
            source("crates/a/src/deep.rs", "mod b;\n#[cfg(test)]\nmod model;\n"),
            source("crates/a/src/deep/model.rs", "fn m() {}\n"),
            source("crates/a/src/deep/model/more.rs", "fn m() {}\n"),
            source("crates/a/build.rs", "fn main() {}\n"),
            source("crates/a/tests/it.rs", "fn t() {}\n"),
            source("crates/a/src/codec/tests/all.rs", "fn t() {}\n"),
            source("crates/a/examples/e.rs", "fn e() {}\n"),
            source("plugins/p/fixtures/l/src/lib.rs", "fn f() {}\n"),
            source("plugins/p/src/lib.rs", "fn p() {}\n"),
            source("xtask/src/main.rs", "fn x() {}\n"),
        ];
        assert_eq!(
            table(&sources),
            "      7  crates/a\n      1  plugins/p\n      8  in all\n"
        );
    }
}
