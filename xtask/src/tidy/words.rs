//! Private words for which the field has a term, or which plain English does without. Documentation and sources must be free of them.

use super::Finding;
use super::lexer::is_word;
use super::links::prose;

/// A word in lower case, and what to write for it.
const WORDS: &[(&str, &str)] = &[
    ("anybody", "any rank, any replica"),
    ("everybody", "all ranks, all replicas"),
    ("farewell", "leave"),
    ("good-bye", "leave"),
    ("good-byes", "leaves"),
    ("goodbye", "leave"),
    ("last words", "abort reason, failure notice"),
    ("doubt", "suspect, unclean, uncertain"),
    ("doubtful", "suspect, unclean, uncertain"),
    ("errand", "operation"),
    ("herald", "failure notice"),
    ("mail", "channel, notice, message"),
    ("mailbox", "the messages that came"),
    ("news", "notice, failure notice"),
    (
        "nobody",
        "no rank, no replica; or a sentence without a subject like this",
    ),
    ("nursery", "child pool"),
    ("of before", "stale, earlier"),
    ("parting", "leave"),
    ("patience", "time limit, spin budget"),
    ("postman", "channel"),
    ("seat", "executor, slot, claim"),
    ("somebody", "a rank, a replica"),
    ("whoever", "the rank that, the replica that"),
];

/// Checks one document: everything but its code, in which names stand as they are.
pub(super) fn check(path: &str, text: &str) -> Vec<Finding> {
    prose(text)
        .flat_map(|(number, line)| {
            // Every second part stands between backticks.
            let words: Vec<&str> = line.split('`').step_by(2).collect();
            found(path, number, &words.join("` `"))
        })
        .collect()
}

/// Checks the comments and texts of a source in any language; this file has the words itself.
pub(super) fn check_source(path: &str, text: &str) -> Vec<Finding> {
    if path.ends_with("tidy/words.rs") {
        return Vec::new();
    }
    (1..)
        .zip(text.lines())
        .flat_map(|(number, line)| found(path, number, line))
        .collect()
}

fn found(path: &str, number: usize, line: &str) -> Vec<Finding> {
    let line = line.to_lowercase();
    let stands = |word: &str| {
        line.match_indices(word)
            .any(|(at, _)| is_word(&line, at, word.len()))
    };
    WORDS
        .iter()
        .filter(|(word, _)| stands(word))
        .map(|(word, term)| Finding::new(path, number, "word", format!("\"{word}\": write {term}")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<usize> {
        check("docs/x.md", text).iter().map(|f| f.line).collect()
    }

    #[test]
    fn private_words_in_prose_are_found_with_their_line() {
        let text = "A rank leaves.\nWhoever leaves says good-bye.\nNobody's state.";
        assert_eq!(words(text), [2, 2, 3]);
        let first = check("docs/x.md", text).swap_remove(0).to_string();
        assert_eq!(first, "docs/x.md:2: [word] \"good-bye\": write leave");
    }

    #[test]
    fn private_words_in_comments_and_texts_of_sources_are_found_too() {
        let lines = |path: &str| -> Vec<usize> {
            let text = "let nobody_waits = 1;\n// Nobody waits.\nfail(\"whoever\");";
            check_source(path, text).iter().map(|f| f.line).collect()
        };
        assert_eq!(lines("crates/x/src/lib.rs"), [2, 3]);
        assert_eq!(lines("xtask/src/tidy/words.rs"), [] as [usize; 0]);
    }

    #[test]
    fn names_in_code_and_parts_of_other_words_are_not() {
        let text =
            "`nobody` and `l30_nobody_waits` are names.\n```sh\nchown nobody x\n```\nbusybody postmanx";
        assert_eq!(words(text), [] as [usize; 0]);
    }
}
