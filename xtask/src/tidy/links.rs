//! Links of the documentation: each points to a file that exists, each anchor to a heading, and every page stands in the book's summary.

use std::collections::{HashMap, HashSet};

use super::Finding;

/// The book's table of contents.
const SUMMARY: &str = "docs/SUMMARY.md";

/// Checks all documents (path from the root, text). `exists` tells whether a path from the root is there.
pub(super) fn check(documents: &[(String, String)], exists: impl Fn(&str) -> bool) -> Vec<Finding> {
    let anchors: HashMap<&str, HashSet<String>> = documents
        .iter()
        .map(|(path, text)| (path.as_str(), anchors(text)))
        .collect();
    let mut findings = Vec::new();
    let mut listed = HashSet::new();
    for (path, text) in documents {
        for (line, target) in links(text) {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (file, anchor) = target.split_once('#').unwrap_or((&target, ""));
            let file = match file {
                "" => Some(path.clone()),
                file => resolved(path, file),
            };
            let Some(file) = file.filter(|f| exists(f)) else {
                findings.push(Finding::new(
                    path,
                    line,
                    "link",
                    format!("\"{target}\" is not there"),
                ));
                continue;
            };
            if path == SUMMARY {
                listed.insert(file.clone());
            }
            // The book holds the pages below `docs/` only: a link out of it would lead nowhere on the site.
            if path.starts_with("docs/") && !file.starts_with("docs/") {
                let text = format!("\"{target}\" is outside of the book: write its path between backticks");
                findings.push(Finding::new(path, line, "link", text));
            }
            let known = anchors.get(file.as_str());
            if !anchor.is_empty() && !known.is_some_and(|known| known.contains(anchor)) {
                let text = format!("{file} has no heading \"#{anchor}\"");
                findings.push(Finding::new(path, line, "link", text));
            }
        }
    }
    let pages = documents
        .iter()
        .map(|(path, _)| path)
        .filter(|p| p.starts_with("docs/") && *p != SUMMARY && !listed.contains(*p));
    findings.extend(pages.map(|path| Finding::new(path, 0, "link", format!("is not in {SUMMARY}"))));
    findings
}

/// The targets of a document's links, with their lines. What stands in code is none.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in prose(text) {
        // Every second part stands between backticks.
        let line: String = line
            .split('`')
            .enumerate()
            .map(|(n, part)| if n % 2 == 0 { part } else { "code" })
            .collect();
        let mut rest = line.as_str();
        while let Some((_, after)) = rest.split_once("](") {
            let Some((target, behind)) = after.split_once(')') else {
                break;
            };
            found.push((number, target.to_owned()));
            rest = behind;
        }
    }
    found
}

/// What a heading is called in an address: lower case, without punctuation, with hyphens for blanks.
fn anchors(text: &str) -> HashSet<String> {
    let mut found = HashSet::new();
    for (_, line) in prose(text).filter(|(_, line)| line.starts_with('#')) {
        let heading = line.trim_start_matches('#').trim().to_lowercase();
        let anchor: String = heading
            .chars()
            .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
            .map(|c| if c == ' ' { '-' } else { c })
            .collect();
        // The second of the same name has a number, and so on.
        let mut name = anchor.clone();
        for n in 1.. {
            if found.insert(name) {
                break;
            }
            name = format!("{anchor}-{n}");
        }
    }
    found
}

/// The lines outside of fenced code, numbered from 1.
pub(super) fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_code = false;
    (1..).zip(text.lines()).filter(move |(_, line)| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence
    })
}

/// `target` as seen from the file `path`, from the root; `None` if it leaves the root.
fn resolved(path: &str, target: &str) -> Option<String> {
    let mut parts: Vec<&str> = path.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(documents: &[(&str, &str)]) -> Vec<String> {
        let documents: Vec<(String, String)> = documents
            .iter()
            .map(|(path, text)| ((*path).to_owned(), (*text).to_owned()))
            .collect();
        let paths: Vec<String> = documents.iter().map(|(path, _)| path.clone()).collect();
        check(&documents, |path| {
            path == "src/a.rs" || paths.iter().any(|p| p == path)
        })
        .iter()
        .map(ToString::to_string)
        .collect()
    }

    const SUMMARY: (&str, &str) = ("docs/SUMMARY.md", "- [A](a.md)\n");

    #[test]
    fn a_link_to_a_file_or_heading_that_is_missing_is_found_with_its_line() {
        let text = "# One\nSee [b](b.md).\n[c](#two) [d](a.md#one) [e](../README.md)";
        let found = findings(&[SUMMARY, ("docs/a.md", text), ("README.md", "[a](docs/a.md#one)")]);
        assert_eq!(
            found,
            [
                "docs/a.md:2: [link] \"b.md\" is not there",
                "docs/a.md:3: [link] docs/a.md has no heading \"#two\"",
                "docs/a.md:3: [link] \"../README.md\" is outside of the book: write its path between backticks",
            ]
        );
    }

    #[test]
    fn headings_are_named_as_in_addresses() {
        let text = "# A death, of `x`\n## Same\n## Same\n```\n# code\n```";
        let expected = ["a-death-of-x", "same", "same-1"];
        assert_eq!(anchors(text), expected.map(str::to_owned).into());
    }

    #[test]
    fn links_in_code_and_to_other_hosts_are_none_of_ours() {
        let text = "`[a](b)` [c](https://example.org/x#y)\n```text\n[d](e)\n```";
        assert_eq!(findings(&[SUMMARY, ("docs/a.md", text)]), [] as [&str; 0]);
    }

    #[test]
    fn a_page_that_is_not_in_the_summary_is_found() {
        let found = findings(&[SUMMARY, ("docs/a.md", ""), ("docs/lost.md", "")]);
        assert_eq!(found, ["docs/lost.md: [link] is not in docs/SUMMARY.md"]);
    }
}
