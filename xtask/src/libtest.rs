//! Reads what `cargo test` printed: how many tests ran in each test program, and whether each program finished.
//!
//! An exit status of 0 is not enough: a filter that matches nothing and a test that ends its process with 0 both look
//! like a pass. cargo's `Running …` and `Doc-tests …` lines cut the output into one part per program.

/// What a run of `cargo test` did.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) ignored: u64,
    /// Programs that were started and printed no result: they died or left in the middle.
    pub(crate) unfinished: Vec<String>,
    /// The names of failed tests, as printed.
    pub(crate) failures: Vec<String>,
}

impl Tally {
    /// The tests that really ran.
    pub(crate) fn ran(&self) -> u64 {
        self.passed + self.failed
    }

    /// Adds another run's counts.
    pub(crate) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
        self.unfinished.extend(other.unfinished);
        self.failures.extend(other.failures);
    }

    /// Counts the tests in the output of one `cargo test`.
    pub(crate) fn parse(output: &str) -> Self {
        let mut tally = Self::default();
        let mut part: Option<Part> = None;
        for line in output.lines() {
            if let Some(next) = Part::begin(line) {
                tally.close(part.replace(next));
            } else if let Some(counts) = Counts::parse(line) {
                // A test may start its own program again as a child that prints a result too. A test program's own
                // result is its last one; doc tests print one for each merged group, and all of them count.
                match &mut part {
                    Some(p) if p.is_doc => p.counts = Some(p.counts.unwrap_or_default().plus(counts)),
                    Some(p) => p.counts = Some(counts),
                    None => tally.count(counts),
                }
            } else if let Some(name) = line
                .strip_prefix("test ")
                .and_then(|l| l.strip_suffix(" ... FAILED"))
            {
                tally.failures.push(name.to_owned());
            }
        }
        tally.close(part);
        tally
    }

    fn close(&mut self, part: Option<Part>) {
        match part {
            Some(Part {
                counts: Some(counts), ..
            }) => self.count(counts),
            Some(p) => self.unfinished.push(p.name),
            None => {}
        }
    }

    fn count(&mut self, counts: Counts) {
        self.passed += counts.passed;
        self.failed += counts.failed;
        self.ignored += counts.ignored;
    }
}

struct Part {
    name: String,
    is_doc: bool,
    counts: Option<Counts>,
}

impl Part {
    /// `     Running tests/tcp.rs (target/debug/deps/tcp-0123)` or `   Doc-tests ftcore`. The leading spaces tell
    /// cargo's line from one that a test prints.
    fn begin(line: &str) -> Option<Self> {
        let text = line.trim_start();
        if text.len() == line.len() {
            return None;
        }
        let (name, is_doc) = match (text.strip_prefix("Running "), text.strip_prefix("Doc-tests ")) {
            (Some(rest), _) if rest.ends_with(')') => (rest, false),
            (_, Some(rest)) => (rest, true),
            _ => return None,
        };
        Some(Self {
            name: name.to_owned(),
            is_doc,
            counts: None,
        })
    }
}

#[derive(Clone, Copy, Default)]
struct Counts {
    passed: u64,
    failed: u64,
    ignored: u64,
}

impl Counts {
    fn plus(self, other: Self) -> Self {
        Self {
            passed: self.passed + other.passed,
            failed: self.failed + other.failed,
            ignored: self.ignored + other.ignored,
        }
    }

    /// `test result: ok. 5 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out; finished in 0.01s`
    fn parse(line: &str) -> Option<Self> {
        let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
        let mut found = Self::default();
        for item in counts.split(';') {
            let mut words = item.split_whitespace();
            let (Some(number), Some(word)) = (words.next(), words.next()) else {
                continue;
            };
            let Ok(number) = number.parse::<u64>() else {
                continue;
            };
            match word {
                "passed" => found.passed = number,
                "failed" => found.failed = number,
                "ignored" => found.ignored = number,
                _ => {}
            }
        }
        Some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "   Compiling ftcore v0.1.0
     Running unittests src/lib.rs (target/debug/deps/ftcore-1)

running 3 tests
test a ... ok
test b ... ok
test c ... ignored

test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s

   Doc-tests ftcore

running 1 test
test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.20s

running 2 tests
test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.20s
";

    #[test]
    fn counts_are_added_over_programs_and_doc_test_groups() {
        let tally = Tally::parse(GOOD);
        assert_eq!((tally.passed, tally.failed, tally.ignored), (5, 0, 1));
        assert!(tally.unfinished.is_empty());
    }

    #[test]
    fn a_filter_that_matches_nothing_ran_no_test() {
        let tally = Tally::parse(
            "     Running tests/conformance.rs (target/debug/deps/conformance-1)\n\nrunning 0 tests\n\n\
             test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 41 filtered out; finished in 0.00s\n",
        );
        assert_eq!(tally.ran(), 0);
        assert!(tally.unfinished.is_empty());
    }

    #[test]
    fn a_program_that_left_without_a_result_is_named() {
        let tally = Tally::parse(
            "     Running tests/a.rs (target/debug/deps/a-1)\n\nrunning 2 tests\n\
             \x20    Running tests/b.rs (target/debug/deps/b-1)\n\nrunning 1 test\ntest x ... ok\n\n\
             test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s\n",
        );
        assert_eq!(tally.unfinished, ["tests/a.rs (target/debug/deps/a-1)"]);
        assert_eq!(tally.ran(), 1);
    }

    #[test]
    fn a_child_that_prints_its_own_result_is_not_counted_twice() {
        let tally = Tally::parse(
            "     Running tests/a.rs (target/debug/deps/a-1)\n\nrunning 2 tests\n\
             test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 1 filtered out; finished in 0.00s\n\
             test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s\n",
        );
        assert_eq!(tally.passed, 2);
    }

    #[test]
    fn failures_are_counted_and_named() {
        let tally = Tally::parse(
            "     Running tests/a.rs (target/debug/deps/a-1)\ntest ring::sums ... FAILED\ntest b ... ok\n\
             test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s\n",
        );
        assert_eq!((tally.passed, tally.failed), (1, 1));
        assert_eq!(tally.failures, ["ring::sums"]);
    }

    #[test]
    fn a_line_that_a_test_prints_is_not_taken_for_cargos() {
        let tally = Tally::parse(
            "     Running tests/a.rs (target/debug/deps/a-1)\nRunning something (else)\nDoc-tests are nice\n\
             test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s\n",
        );
        assert_eq!(tally.passed, 1);
        assert!(tally.unfinished.is_empty());
    }
}
