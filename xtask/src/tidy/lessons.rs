//! Which lessons of other systems have a regression test here.
//!
//! Such a test is a function named `lNN_…`, or a string `"lNN_…"` where the tests of a suite are made from a table.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::Finding;
use super::lexer::Source;

/// The lessons are numbered from 1 to this.
const LAST: u8 = 47;
/// Lessons whose tests must stand: they guard the step semantics, and must not get lost.
const HELD: &[u8] = &[1, 2, 3, 4, 5, 6, 7, 8, 10, 13, 24, 27];

/// Where a lesson is tested: path, line and name.
type Tests<'a> = BTreeMap<u8, Vec<(&'a str, usize, String)>>;

/// Finds lessons of [`HELD`] without a test.
pub(super) fn check(sources: &[Source]) -> Vec<Finding> {
    let tests = find(sources);
    HELD.iter()
        .filter(|n| !tests.contains_key(n))
        .map(|n| {
            Finding::new(
                "tests",
                0,
                "lesson",
                format!("L{n:02} has no regression test (`fn l{n:02}_…`)"),
            )
        })
        .collect()
}

/// The lessons with their tests, then those without.
pub(super) fn table(sources: &[Source]) -> String {
    let tests = find(sources);
    let mut text = String::new();
    for (number, places) in &tests {
        for (path, line, name) in places {
            let _ = writeln!(text, "L{number:02}  {name}  {path}:{line}");
        }
    }
    let without: Vec<String> = (1..=LAST)
        .filter(|n| !tests.contains_key(n))
        .map(|n| format!("L{n:02}"))
        .collect();
    let _ = writeln!(
        text,
        "{} lessons with a test; without: {}",
        tests.len(),
        without.join(" ")
    );
    text
}

fn find(sources: &[Source]) -> Tests<'_> {
    let mut tests = Tests::new();
    for source in sources {
        let mut add = |line: usize, text: &str| {
            if let Some((number, name)) = lesson(text)
                && source.is_test(line)
            {
                tests
                    .entry(number)
                    .or_default()
                    .push((&source.path, line, name.to_owned()));
            }
        };
        for at in source.words("fn") {
            add(
                source.line_of(at),
                source.code.get(at + 2..).unwrap_or_default().trim_start(),
            );
        }
        for (line, literal) in &source.literals {
            add(*line, literal);
        }
    }
    tests
}

/// `l07_first_step…` is lesson 7; the name ends with the identifier.
fn lesson(text: &str) -> Option<(u8, &str)> {
    let digits = text.strip_prefix('l')?.get(..2)?;
    let is_name = text.get(3..)?.starts_with('_') && digits.bytes().all(|b| b.is_ascii_digit());
    let number = digits
        .parse()
        .ok()
        .filter(|n| is_name && (1..=LAST).contains(n))?;
    let end = text
        .find(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
        .unwrap_or(text.len());
    Some((number, text.get(..end)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_lesson_tests_are_read() {
        assert_eq!(lesson("l07_first_step() {"), Some((7, "l07_first_step")));
        assert_eq!(lesson("l00_x"), None);
        assert_eq!(lesson("l48_x"), None);
        assert_eq!(lesson("l7_x"), None);
        assert_eq!(lesson("level"), None);
        assert_eq!(lesson("l+7_x"), None);
    }

    #[test]
    fn lessons_without_a_test_are_findings_and_are_listed() {
        // In two pieces, so that these names are not taken for tests themselves.
        let one = format!("#[test]\nfn l{}_ids() {{}}\n", "01");
        let two = format!("trial(\"l{}_votes\");\n", "02");
        let sources = [
            Source::new("crates/a/tests/x.rs", &one),
            Source::new("crates/b/tests/y.rs", &two),
            Source::new("crates/c/src/z.rs", &one.replace("01", "03")),
        ];
        let missing = check(&sources);
        assert_eq!(missing.len(), HELD.len() - 2, "{missing:?}");
        let text = table(&sources);
        assert!(
            text.starts_with("L01  l01_ids  crates/a/tests/x.rs:2\n"),
            "{text}"
        );
        assert!(text.contains("2 lessons with a test; without: L03"), "{text}");
    }
}
