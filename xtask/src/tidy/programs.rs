//! Programs of the documents that are examples, which the tests compile and run. The line before such a block names the file,
//! `<!-- crates/oxccl/examples/all_reduce.rs -->`, and the block has all of it but the comment at its head, byte for byte. Every program of the
//! README is one.

use super::Finding;
use super::lexer::Source;

/// The programs from which people start, and how many lines of code each may have: without comments and `use`.
const LIMITS: &[(&str, usize)] = &[
    ("crates/oxccl/examples/all_reduce.rs", 7),
    ("crates/oxccl/examples/ddp.rs", 20),
    ("crates/oxccl/examples/diloco.rs", 20),
    ("crates/oxccl/examples/ndarray_ddp.rs", 20),
    ("crates/adapters/candle/examples/candle_ddp.rs", 20),
    ("crates/adapters/candle/examples/candle_diloco.rs", 20),
];

/// The others of the facade and of candle's adapter, all lines counted.
const OTHERS: usize = 60;

/// Checks the length of one example.
pub(super) fn check_length(source: &Source) -> Vec<Finding> {
    let named = LIMITS.iter().find(|(path, _)| *path == source.path);
    let (lines, limit) = match named {
        Some((_, limit)) => {
            let is_code = |line: &&str| {
                let line = line.trim_start();
                !line.is_empty() && !line.starts_with("//") && !line.starts_with("use ")
            };
            (source.text.lines().filter(is_code).count(), *limit)
        }
        None if ["crates/oxccl/examples/", "crates/adapters/candle/examples/"]
            .iter()
            .any(|folder| source.path.starts_with(folder)) =>
        {
            (source.text.lines().count(), OTHERS)
        }
        None => return Vec::new(),
    };
    if lines <= limit {
        return Vec::new();
    }
    let text = format!("{lines} lines: an example of this kind has at most {limit}");
    vec![Finding::new(&source.path, 0, "program", text)]
}

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
    fn an_example_is_as_short_as_it_is_said_to_be() {
        let found = |path: &str, text: &str| check_length(&Source::new(path, text)).len();
        let short = "//! Head.\n\nuse a::b;\n\nfn main() {\n    // Why.\n    a();\n}\n";
        assert_eq!(found("crates/oxccl/examples/all_reduce.rs", short), 0);
        let long = short.to_owned() + &"a();\n".repeat(5);
        assert_eq!(found("crates/oxccl/examples/all_reduce.rs", &long), 1);
        assert_eq!(found("crates/oxccl/examples/diloco.rs", &long), 0);
        assert_eq!(found("crates/oxccl/examples/other.rs", &"a();\n".repeat(60)), 0);
        assert_eq!(found("crates/oxccl/examples/other.rs", &"a();\n".repeat(61)), 1);
        assert_eq!(found("crates/quant/examples/other.rs", &"a();\n".repeat(61)), 0);
        for (path, _) in LIMITS {
            let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
            assert!(root.join(path).exists(), "{path}");
        }
    }

    #[test]
    fn a_program_names_a_file_that_is_there() {
        assert!(found("<!-- b.rs -->\n```rust\n```\n")[0].contains("b.rs is not there"));
        assert!(found("text\n```rust\n```\n")[0].contains("<!-- FILE -->"));
        assert!(check("docs/a.md", "text\n```rust\n```\n", |_| None).is_empty());
    }
}
