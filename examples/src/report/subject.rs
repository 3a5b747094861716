//! One subject of a report: its name, and its text wrapped beside it.

use std::fmt;

/// Where the text of a subject begins, and how wide a line may be.
const INDENT: usize = 15;
const WIDTH: usize = 100;

/// Writes one.
pub(super) fn subject(f: &mut fmt::Formatter<'_>, name: &str, text: &str) -> fmt::Result {
    let mut line = format!("{name:<INDENT$}");
    let mut width = INDENT;
    for (i, word) in text.split(' ').enumerate() {
        let more = word.chars().count() + usize::from(i > 0);
        if i > 0 && width + more > WIDTH {
            writeln!(f, "{line}")?;
            line = " ".repeat(INDENT) + word;
            width = INDENT + more - 1;
            continue;
        }
        if i > 0 {
            line.push(' ');
        }
        line.push_str(word);
        width += more;
    }
    writeln!(f, "{line}")
}
