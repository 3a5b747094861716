//! Programs of the documents that are examples, which the tests compile and run. The line before such a block names the file,
//! `<!-- crates/oxccl/examples/all_reduce.rs -->`, and the block has all of it but the comment at its head, byte for byte. Every program of the
//! README is one.

use super::Finding;

/// Checks one document. `read` gives the text of a file by its path from the root.
pub(super) fn check(path: &str, text: &str, read: impl Fn(&str) -> Option<String>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut before = "";
    let mut lines = (1..).zip(text.lines());
    while let Some((number, line)) = lines.next() {
        if !line.starts_with("```rust") {
            before = line;
            continue;
        }
        let block: Vec<&str> = lines
            .by_ref()
            .map(|(_, l)| l)
            .take_while(|l| !l.starts_with("```"))
            .collect();
        let file = before
            .strip_prefix("<!-- ")
            .and_then(|rest| rest.strip_suffix(" -->"));
        let found = match file {
            None => (path == "README.md").then(|| {
                "write the line `<!-- FILE -->` before this program, with the example that it is".to_owned()
            }),
            Some(file) => match read(file) {
                None => Some(format!("{file} is not there")),
                Some(source) => difference(&block, &source).map(|(n, source)| {
                    format!(
                        "{file} differs from line {} of this document on: '{source}'",
                        number + 1 + n
                    )
                }),
            },
        };
        findings.extend(found.map(|text| Finding::new(path, number, "program", text)));
    }
    findings
}

/// The first line of the block that is another in the source, and what the source has there.
fn difference(block: &[&str], source: &str) -> Option<(usize, String)> {
    let mut lines = source
        .lines()
        .skip_while(|l| l.starts_with("//!") || l.is_empty());
    let mut at = 0;
    loop {
        match (block.get(at), lines.next()) {
            (None, None) => return None,
            (Some(a), Some(b)) if *a == b => at += 1,
            (_, other) => return Some((at, other.unwrap_or("(the end)").to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<String> {
        let read = |file: &str| (file == "a.rs").then(|| "//! Head.\n\nfn a() {}\nfn b() {}\n".to_owned());
        check("README.md", text, read)
            .iter()
            .map(ToString::to_string)
            .collect()
    }

    #[test]
    fn a_program_is_its_example_byte_for_byte() {
        assert_eq!(
            found("<!-- a.rs -->\n```rust,no_run\nfn a() {}\nfn b() {}\n```\n"),
            [] as [&str; 0]
        );
        let short = found("<!-- a.rs -->\n```rust\nfn a() {}\n```\n");
        assert_eq!(
            short,
            ["README.md:2: [program] a.rs differs from line 4 of this document on: 'fn b() {}'"]
        );
        let other = found("<!-- a.rs -->\n```rust\nfn a()  {}\nfn b() {}\n```\n");
        assert_eq!(
            other,
            ["README.md:2: [program] a.rs differs from line 3 of this document on: 'fn a() {}'"]
        );
    }

    #[test]
    fn a_program_names_a_file_that_is_there() {
        assert!(found("<!-- b.rs -->\n```rust\n```\n")[0].contains("b.rs is not there"));
        assert!(found("text\n```rust\n```\n")[0].contains("<!-- FILE -->"));
        assert!(check("docs/a.md", "text\n```rust\n```\n", |_| None).is_empty());
    }
}
