//! Every environment variable that the code knows is documented.
//!
//! A variable is any `OXCCL_…` name in a string literal outside tests; a name that ends in `_` is a family.

use std::collections::BTreeMap;

use super::Finding;
use super::lexer::{Source, is_word};

const PREFIX: &str = "OXCCL_";

/// Compares all sources with `documents`, the text of README.md, ARCHITECTURE.md, CONTRIBUTING.md and docs/.
pub(super) fn check(sources: &[Source], documents: &str) -> Vec<Finding> {
    let mut first: BTreeMap<String, (&str, usize)> = BTreeMap::new();
    for source in sources {
        for (line, literal) in source.literals.iter().filter(|(line, _)| !source.is_test(*line)) {
            for name in names(literal) {
                first.entry(name).or_insert((&source.path, *line));
            }
        }
    }
    let unknown = first
        .into_iter()
        .filter(|(name, _)| !is_documented(name, documents));
    unknown
        .map(|(name, (path, line))| {
            Finding::new(
                path,
                line,
                "variable",
                format!("{name} is documented nowhere (README.md, CONTRIBUTING.md or docs/)"),
            )
        })
        .collect()
}

fn names(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, _) in text.match_indices(PREFIX) {
        let rest = text.get(at..).unwrap_or_default();
        let end = rest
            .find(|c: char| !(c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_'))
            .unwrap_or(rest.len());
        let name = rest.get(..end).unwrap_or_default();
        if name.len() > PREFIX.len() {
            found.push(name.to_owned());
        }
    }
    found
}

fn is_documented(name: &str, documents: &str) -> bool {
    documents
        .match_indices(name)
        .any(|(at, _)| name.ends_with('_') || is_word(documents, at, name.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn undocumented(text: &str, documents: &str) -> Vec<(usize, String)> {
        let source = Source::new("crates/x/src/y.rs", text);
        check(&[source], documents)
            .into_iter()
            .map(|f| (f.line, f.text.split(' ').next().unwrap_or_default().to_owned()))
            .collect()
    }

    #[test]
    fn a_variable_without_documentation_is_found_once() {
        let text = "fn f() {\n    env(\"OXCCL_RANKS\");\n    env(\"OXCCL_RANKS\");\n}\n";
        assert_eq!(
            undocumented(text, "OXCCL_RANK is a variable"),
            [(2, "OXCCL_RANKS".to_owned())]
        );
        assert!(undocumented(text, "`OXCCL_RANKS`: how many").is_empty());
    }

    #[test]
    fn names_in_messages_count_and_those_in_tests_and_comments_do_not() {
        assert_eq!(undocumented("f(\"set OXCCL_HOST=… first\")", "").len(), 1);
        assert!(
            undocumented(
                "// OXCCL_X\n#[cfg(test)]\nmod tests { fn f() { g(\"OXCCL_T\") } }\n",
                ""
            )
            .is_empty()
        );
        assert!(undocumented("f(\"OXCCL_\")", "").is_empty());
    }
}
