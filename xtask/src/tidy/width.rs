//! How wide the lines of the documentation are: prose is wrapped at 120 characters, so that a change shows what it changed.

use super::Finding;
use super::links::prose;

const WIDTH: usize = 120;

/// Checks one document. Tables, code and what cannot be broken (a link, a code span) may be wider.
pub(super) fn check(path: &str, text: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (number, line) in prose(text) {
        let is_text = !line.trim_start().starts_with(['|', '<', '#']);
        let wide = line.chars().count();
        if is_text && wide > WIDTH && can_break(line) {
            findings.push(Finding::new(
                path,
                number,
                "width",
                format!("{wide} characters: wrap at {WIDTH}"),
            ));
        }
    }
    findings
}

/// True if a space outside code spans and links stands behind some text within the width.
fn can_break(line: &str) -> bool {
    let (mut in_code, mut in_link, mut has_text) = (false, 0_usize, false);
    for c in line.trim_start_matches([' ', '-', '>']).chars().take(WIDTH) {
        match c {
            '`' => in_code = !in_code,
            '[' if !in_code => in_link += 1,
            ']' if !in_code => in_link = in_link.saturating_sub(1),
            ' ' if has_text && !in_code && in_link == 0 => return true,
            _ => {}
        }
        has_text = true;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prose_is_wrapped_and_tables_code_and_long_links_are_not() {
        let long = "word ".repeat(30);
        let link = format!("- [{}](x.md)", "a b ".repeat(40));
        let text = format!("{long}\nshort\n| {long} |\n```sh\n{long}\n```\n{link}\n`{long}`\n# {long}\n");
        let lines: Vec<usize> = check("docs/x.md", &text).iter().map(|f| f.line).collect();
        assert_eq!(lines, [1]);
    }
}
