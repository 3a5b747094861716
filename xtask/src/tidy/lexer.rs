//! Splits a Rust file into what is code, what are string literals, and which lines are tests.
//!
//! Far from a parser: it knows comments, strings, characters and brackets, which is what the rules need to not be
//! fooled by a comment that says `unsafe`.

/// A source file, ready for the rules.
#[derive(Debug)]
pub(crate) struct Source {
    /// From the workspace root, with `/`.
    pub(crate) path: String,
    /// As it stands.
    pub(crate) text: String,
    /// The same length and lines, with comments and the insides of strings blanked.
    pub(crate) code: String,
    /// String literals with their line (from 1), as written between the quotes.
    pub(crate) literals: Vec<(usize, String)>,
    /// For each line (index 0 is line 1): true if it belongs to a test.
    tests: Vec<bool>,
}

impl Source {
    pub(crate) fn new(path: &str, text: &str) -> Self {
        let (code, literals) = blank(text);
        let lines = text.lines().count();
        let tests = if is_test_path(path) {
            vec![true; lines]
        } else {
            test_lines(&code, lines)
        };
        Self {
            path: path.to_owned(),
            text: text.to_owned(),
            code,
            literals,
            tests,
        }
    }

    /// True if `line` (from 1) is part of a test.
    pub(crate) fn is_test(&self, line: usize) -> bool {
        line.checked_sub(1)
            .and_then(|i| self.tests.get(i))
            .copied()
            .unwrap_or(false)
    }

    /// The line (from 1) of a byte offset.
    pub(crate) fn line_of(&self, offset: usize) -> usize {
        line_at(&self.code, offset)
    }

    /// The byte offsets of `word` in the code, as a whole word.
    pub(crate) fn words(&self, word: &str) -> Vec<usize> {
        self.code
            .match_indices(word)
            .map(|(at, _)| at)
            .filter(|at| is_word(&self.code, *at, word.len()))
            .collect()
    }
}

/// True if the text at `at..at+len` does not continue a word on either side.
pub(crate) fn is_word(text: &str, at: usize, len: usize) -> bool {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    let before = text.get(..at).and_then(|s| s.chars().next_back());
    let after = text.get(at + len..).and_then(|s| s.chars().next());
    !before.is_some_and(part) && !after.is_some_and(part)
}

fn line_at(text: &str, offset: usize) -> usize {
    text.bytes().take(offset).filter(|b| *b == b'\n').count() + 1
}

/// Integration tests, benches, and modules that are all tests.
fn is_test_path(path: &str) -> bool {
    path.split('/')
        .any(|part| matches!(part, "tests" | "benches" | "tests.rs"))
}

/// Blanks comments and the insides of strings and characters, and collects the strings.
fn blank(text: &str) -> (String, Vec<(usize, String)>) {
    let bytes = text.as_bytes();
    let at = |i: usize| bytes.get(i).copied().unwrap_or(0);
    let mut code = bytes.to_vec();
    let mut literals = Vec::new();
    let mut line = 1;
    let mut i = 0;
    while i < bytes.len() {
        // The token at `i`: its end, and the part of it that is not code.
        let (end, hidden, is_string) = match at(i) {
            b'/' if at(i + 1) == b'/' => {
                let end = position(bytes, i, |b| b == b'\n');
                (end, i..end, false)
            }
            b'/' if at(i + 1) == b'*' => {
                let end = block_comment(bytes, i);
                (end, i..end, false)
            }
            b'"' => {
                let end = string(bytes, i + 1);
                (end, i + 1..end.saturating_sub(1).max(i + 1), true)
            }
            b'r' if begins_token(bytes, i) => match raw_string(bytes, i) {
                Some((inside, end)) => (end, inside, true),
                None => (i + 1, i..i, false),
            },
            b'\'' => {
                let end = character(text, i);
                (end, i + 1..end.saturating_sub(1).max(i + 1), false)
            }
            _ => (i + 1, i..i, false),
        };
        if is_string {
            literals.push((
                line,
                String::from_utf8_lossy(bytes.get(hidden.clone()).unwrap_or_default()).into_owned(),
            ));
        }
        for b in code.iter_mut().take(hidden.end).skip(hidden.start) {
            if *b != b'\n' {
                *b = b' ';
            }
        }
        line += bytes.iter().take(end).skip(i).filter(|b| **b == b'\n').count();
        i = end;
    }
    (String::from_utf8_lossy(&code).into_owned(), literals)
}

fn position(bytes: &[u8], from: usize, found: impl Fn(u8) -> bool) -> usize {
    bytes
        .iter()
        .skip(from)
        .position(|b| found(*b))
        .map_or(bytes.len(), |n| from + n)
}

/// The end of the comment that begins at `i`; they nest.
fn block_comment(bytes: &[u8], mut i: usize) -> usize {
    let mut depth = 0usize;
    while i < bytes.len() {
        match (bytes.get(i), bytes.get(i + 1)) {
            (Some(b'/'), Some(b'*')) => {
                depth += 1;
                i += 2;
            }
            (Some(b'*'), Some(b'/')) => {
                depth = depth.saturating_sub(1);
                i += 2;
                if depth == 0 {
                    return i;
                }
            }
            _ => i += 1,
        }
    }
    bytes.len()
}

/// The end (behind the quote) of the string whose inside begins at `i`.
fn string(bytes: &[u8], mut i: usize) -> usize {
    while let Some(b) = bytes.get(i) {
        match b {
            b'\\' => i += 2,
            b'"' => return i + 1,
            _ => i += 1,
        }
    }
    bytes.len()
}

/// `r`, `br` or `cr` at the beginning of a token.
fn begins_token(bytes: &[u8], i: usize) -> bool {
    let part = |n: usize| {
        i.checked_sub(n)
            .and_then(|k| bytes.get(k))
            .copied()
            .filter(|b| b.is_ascii_alphanumeric() || *b == b'_')
    };
    match part(1) {
        None => true,
        Some(b'b' | b'c') => part(2).is_none(),
        Some(_) => false,
    }
}

/// The inside and the end of the raw string at `i`, if one is there (and not a raw identifier).
fn raw_string(bytes: &[u8], i: usize) -> Option<(std::ops::Range<usize>, usize)> {
    let open = position(bytes, i + 1, |b| b != b'#');
    if bytes.get(open) != Some(&b'"') {
        return None;
    }
    let hashes = open - i - 1;
    let mut from = open + 1;
    loop {
        let quote = position(bytes, from, |b| b == b'"');
        if quote >= bytes.len() {
            return Some((open + 1..bytes.len(), bytes.len()));
        }
        if bytes
            .iter()
            .skip(quote + 1)
            .take(hashes)
            .filter(|b| **b == b'#')
            .count()
            == hashes
        {
            return Some((open + 1..quote, quote + 1 + hashes));
        }
        from = quote + 1;
    }
}

/// The end of the character literal at `i`, or of the quote alone if it begins a lifetime.
fn character(text: &str, i: usize) -> usize {
    let mut rest = text.get(i + 1..).unwrap_or_default().char_indices();
    match (rest.next(), rest.next()) {
        (Some((_, '\\')), Some((at, escaped))) => {
            let from = i + 1 + at + escaped.len_utf8();
            (position(text.as_bytes(), from, |b| b == b'\'') + 1).min(text.len())
        }
        (Some(_), Some((at, '\''))) => i + 1 + at + 1,
        _ => i + 1,
    }
}

/// Marks the items under `#[cfg(test)]`.
fn test_lines(code: &str, lines: usize) -> Vec<bool> {
    let mut tests = vec![false; lines];
    for attribute in ["#[cfg(test)]", "#[cfg(all(test"] {
        for (begin, _) in code.match_indices(attribute) {
            let end = item_end(code, begin + attribute.len());
            for flag in tests
                .iter_mut()
                .take(line_at(code, end))
                .skip(line_at(code, begin) - 1)
            {
                *flag = true;
            }
        }
    }
    tests
}

/// The end of the item that begins behind `from`: its closing brace, or the first semicolon before any brace.
fn item_end(code: &str, from: usize) -> usize {
    let mut depth = 0usize;
    for (i, b) in code.bytes().enumerate().skip(from) {
        match b {
            b';' if depth == 0 => return i,
            b'{' => depth += 1,
            b'}' => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    return i;
                }
            }
            _ => {}
        }
    }
    code.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(text: &str) -> String {
        Source::new("crates/x/src/y.rs", text).code
    }

    #[test]
    fn comments_and_strings_are_blanked_and_lines_kept() {
        let text = "a // unsafe\n/* un /* safe */ x */ b\nlet s = \"unsafe \\\" {\"; c";
        let code = code(text);
        assert_eq!(code.len(), text.len());
        assert_eq!(code.lines().count(), 3);
        assert!(!code.contains("unsafe") && !code.contains('{'));
        assert!(code.ends_with("\"; c") && code.contains('b'));
    }

    #[test]
    fn raw_strings_bytes_and_raw_identifiers_are_told_apart() {
        let text = "let a = r#\"x \" unsafe\"#; let b = br\"q\"; let r#type = 1; attr\"z\"";
        let source = Source::new("crates/x/src/y.rs", text);
        let values: Vec<&str> = source.literals.iter().map(|(_, v)| v.as_str()).collect();
        assert_eq!(values, ["x \" unsafe", "q", "z"]);
        assert!(source.code.contains("r#type = 1"));
    }

    #[test]
    fn characters_and_lifetimes_are_told_apart() {
        assert_eq!(code("let q = '\"'; x"), "let q = ' '; x");
        assert_eq!(code("f('\\'', 'ä', '{')").replace(' ', ""), "f('','','')");
        assert_eq!(code("fn f<'a>(x: &'a str) {}"), "fn f<'a>(x: &'a str) {}");
    }

    #[test]
    fn unfinished_files_do_not_confuse_it() {
        for text in ["\"", "'", "'\\", "r#\"", "/*", "b'", "\"\\", "#[cfg(test)]", "ä'"] {
            assert_eq!(code(text).len(), text.len(), "{text}");
        }
    }

    #[test]
    fn lines_under_cfg_test_are_tests_and_the_rest_is_not() {
        let source = Source::new(
            "crates/x/src/y.rs",
            "fn a() {}\n#[cfg(test)]\nmod tests {\n    fn b() { \"}\" }\n}\nfn c() {}\n#[cfg(test)]\nuse x;\nfn d() {}\n",
        );
        let flags: Vec<bool> = (1..=9).map(|n| source.is_test(n)).collect();
        assert_eq!(flags, [false, true, true, true, true, false, true, true, false]);
        assert!(Source::new("crates/x/tests/y.rs", "fn a() {}").is_test(1));
        assert!(Source::new("tests/src/lib.rs", "fn a() {}").is_test(1));
    }

    #[test]
    fn words_are_whole_and_only_in_code() {
        let source = Source::new("crates/x/src/y.rs", "unsafe_code\nunsafe {}\n// unsafe\n");
        let lines: Vec<usize> = source
            .words("unsafe")
            .into_iter()
            .map(|at| source.line_of(at))
            .collect();
        assert_eq!(lines, [2]);
    }
}
