//! Rules on whole files: their names, their length, their header, and what every manifest must have.

use super::Finding;
use super::lexer::Source;

/// Names that say nothing about what is inside.
const EMPTY_NAMES: &[&str] = &["utils", "util", "helpers", "helper", "common", "base", "misc"];
/// Longer files hold more than one subject, as a rule.
const MAX_LINES: usize = 800;
/// What the header of a longer file must say, with the reason behind it.
const EXCUSE: &str = "lines because";

/// Checks one source file.
pub(super) fn check(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    let path = source.path.as_str();
    let parts = path
        .split('/')
        .map(|part| part.strip_suffix(".rs").unwrap_or(part));
    for part in parts.filter(|part| EMPTY_NAMES.contains(part)) {
        findings.push(Finding::new(
            path,
            0,
            "name",
            format!("\"{part}\" says nothing: name it for what is inside"),
        ));
    }
    let header: Vec<&str> = source.text.lines().take_while(|l| l.starts_with("//!")).collect();
    let lines = source.text.lines().count() - example_lines(&source.text);
    if lines > MAX_LINES && !header.iter().any(|l| l.contains(EXCUSE)) {
        let text = format!(
            "{lines} lines (limit {MAX_LINES}): look for the second subject, or say why in the header \
             (`//! Over {MAX_LINES} {EXCUSE} …`)"
        );
        findings.push(Finding::new(path, 0, "length", text));
    }
    let is_module = path.contains("/src/") && !path.ends_with("/tests.rs");
    if is_module && header.is_empty() {
        findings.push(Finding::new(
            path,
            1,
            "header",
            "begin with `//!` lines: what it is for and how data flows",
        ));
    }
    findings
}

/// The lines of the examples in the documentation: they make no subject larger.
fn example_lines(text: &str) -> usize {
    let mut is_example = false;
    let mut lines = 0;
    for line in text.lines().map(str::trim_start) {
        let Some(documentation) = line.strip_prefix("///") else {
            is_example = false;
            continue;
        };
        let is_fence = documentation.trim_start().starts_with("```");
        lines += usize::from(is_example || is_fence);
        is_example ^= is_fence;
    }
    lines
}

/// Every member takes the lints of the workspace.
pub(super) fn check_manifest(path: &str, text: &str) -> Option<Finding> {
    let mut lines = text
        .lines()
        .map(str::trim)
        .skip_while(|l| *l != "[lints]")
        .skip(1);
    let has = lines.next() == Some("workspace = true");
    (!has).then(|| Finding::new(path, 0, "lints", "add `[lints]` with `workspace = true`"))
}

/// Every crate says what it is for beside its manifest, `path`. `readme` is that text, if it is there.
pub(super) fn check_readme(path: &str, manifest: &str, readme: Option<&str>) -> Option<Finding> {
    if !manifest.lines().any(|line| line.trim() == "[package]") {
        return None;
    }
    let says = |text: &str| {
        let mut lines = text.lines();
        lines.next().is_some_and(|l| l.starts_with("# "))
            && lines.any(|l| !l.is_empty() && !l.starts_with('#'))
    };
    let good = readme.is_some_and(says);
    (!good).then(|| {
        Finding::new(
            path,
            0,
            "readme",
            "add a README.md: a title and what the crate is for",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(path: &str, text: &str) -> Vec<&'static str> {
        check(&Source::new(path, text))
            .into_iter()
            .map(|f| f.rule)
            .collect()
    }

    #[test]
    fn names_that_say_nothing_are_refused() {
        assert_eq!(rules("crates/x/src/utils.rs", "//! x\n"), ["name"]);
        assert_eq!(rules("crates/x/tests/common/mod.rs", ""), ["name"]);
        assert!(rules("crates/x/src/database.rs", "//! x\n").is_empty());
    }

    #[test]
    fn a_long_file_needs_a_reason_in_its_header() {
        let long = format!("//! Many.\n{}", "x();\n".repeat(MAX_LINES));
        assert_eq!(rules("crates/x/src/y.rs", &long), ["length"]);
        let excused = format!(
            "//! Many.\n//! Over 800 lines because one table.\n{}",
            "x();\n".repeat(MAX_LINES)
        );
        assert!(rules("crates/x/src/y.rs", &excused).is_empty());
        let exact = format!("//! Just fits.\n{}", "x();\n".repeat(MAX_LINES - 1));
        assert!(rules("crates/x/src/y.rs", &exact).is_empty());
        let example = format!("{exact}/// What.\n/// ```\n/// x();\n/// ```\n");
        assert_eq!(rules("crates/x/src/y.rs", &example), ["length"]);
        let without = example.replace("/// What.\n", "");
        assert!(rules("crates/x/src/y.rs", &without).is_empty());
    }

    #[test]
    fn a_module_begins_with_what_it_is_for() {
        assert_eq!(rules("crates/x/src/y.rs", "use a;\n"), ["header"]);
        assert!(rules("crates/x/build.rs", "fn main() {}\n").is_empty());
    }

    #[test]
    fn a_crate_has_a_readme_that_says_something() {
        let crate_toml = "[package]\nname = \"x\"\n";
        assert!(check_readme("x/Cargo.toml", crate_toml, Some("# x\n\nFor tests.\n")).is_none());
        assert!(check_readme("x/Cargo.toml", crate_toml, Some("# x\n")).is_some());
        assert!(check_readme("x/Cargo.toml", crate_toml, None).is_some());
        assert!(check_readme("Cargo.toml", "[workspace]\n", None).is_none());
    }

    #[test]
    fn a_manifest_takes_the_workspace_lints() {
        assert!(check_manifest("Cargo.toml", "[package]\n\n[lints]\nworkspace = true\n").is_none());
        assert!(check_manifest("Cargo.toml", "[package]\nversion = \"1\"\n[dependencies]\n").is_some());
    }
}
