//! Texts from elsewhere (a plugin, a vendor library, the loader, a child process) as a terminal or a log line may show
//! them: what would move the cursor, change colours, or turn the order of the characters around is written out.
//!
//! Both functions leave what they have written out as it is, so that a text may pass them more than once.

use std::borrow::Cow;

/// The most characters of a name, a version or a note that are shown.
pub const LONGEST: usize = 300;

/// A text on one line, of at most `longest` characters before the mark `…` of what is left out. Line breaks and tabs
/// become spaces; other control characters, and those that change the direction of text or have no width, are written as
/// `\u{1b}`.
///
/// ```
/// use ftcore::printable::{LONGEST, one_line};
/// assert_eq!(one_line("oneCCL 2021.15", LONGEST), "oneCCL 2021.15");
/// assert_eq!(one_line("\u{1b}[31mred\nand \u{202e}back", LONGEST), "\\u{1b}[31mred and \\u{202e}back");
/// assert_eq!(one_line("too long", 3), "too…");
/// ```
pub fn one_line(text: &str, longest: usize) -> Cow<'_, str> {
    let cut = text.char_indices().nth(longest).map(|(at, _)| at);
    if cut.is_none() && !text.contains(|c: char| matches!(c, '\n' | '\r' | '\t') || is_active(c)) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len().min(2 * longest));
    for c in text.get(..cut.unwrap_or(text.len())).unwrap_or_default().chars() {
        match c {
            '\n' | '\r' | '\t' => shown.push(' '),
            c => push(&mut shown, c),
        }
    }
    if cut.is_some() {
        shown.push('…');
    }
    Cow::Owned(shown)
}

/// A text of several lines: as [`one_line`], but line breaks and tabs stay, and nothing is left out.
///
/// ```
/// assert_eq!(ftcore::printable::lines("a\n\u{7}b"), "a\n\\u{7}b");
/// ```
pub fn lines(text: &str) -> Cow<'_, str> {
    if !text.contains(is_active) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        push(&mut shown, c);
    }
    Cow::Owned(shown)
}

fn push(shown: &mut String, c: char) {
    if is_active(c) {
        shown.extend(c.escape_unicode());
    } else {
        shown.push(c);
    }
}

/// True for a character that does something to the text around it instead of standing in it: control characters other
/// than line feed and tab, marks and overrides of direction, characters without width, line and paragraph separators,
/// and tags.
pub fn is_active(c: char) -> bool {
    match c {
        '\n' | '\t' => false,
        '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{feff}' => true,
        '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' => true,
        '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}' => true,
        c => c.is_control(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_acts_on_a_terminal_passes_and_what_passed_once_stays_as_it_is() {
        let acts = (0..=0x10_ffff_u32)
            .filter_map(char::from_u32)
            .filter(|&c| is_active(c));
        for c in acts {
            let text = format!("a{c}b\nc");
            for shown in [one_line(&text, LONGEST), lines(&text)] {
                assert!(!shown.contains(is_active), "{shown:?}");
                assert!(shown.starts_with("a") && shown.ends_with("c"), "{shown:?}");
                assert_eq!(lines(&shown), shown);
            }
            assert!(!one_line(&text, LONGEST).contains('\n'));
        }
        for c in [
            '\u{1b}', '\u{9b}', '\r', '\u{202e}', '\u{2066}', '\u{200b}', '\u{7f}',
        ] {
            assert!(is_active(c), "{c:?}");
        }
        for c in ['ä', '…', '漢', '\n', '\t', ' '] {
            assert!(!is_active(c), "{c:?}");
        }
    }

    #[test]
    fn a_long_text_is_cut_once_at_a_character() {
        let long = "ä\u{1b}".repeat(1000);
        let shown = one_line(&long, 10);
        assert_eq!(shown, "ä\\u{1b}ä\\u{1b}ä\\u{1b}ä\\u{1b}ä\\u{1b}…");
        assert_eq!(one_line("äbc…", 3), "äbc…");
        assert!(matches!(one_line("äbc", 3), Cow::Borrowed("äbc")));
    }
}
