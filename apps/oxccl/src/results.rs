//! Standard output is for results only: what a plugin or a vendor library prints there would end up in the middle of them, so it goes to
//! standard error instead.
//!
//! All that the command says itself goes through here, so that a text of a plugin or a library is printable wherever it stands: [`write()`] and
//! [`say`] write out what would act on a terminal, [`json`] does so in JSON's own way.

use std::fmt::{Arguments, Write as _};
use std::fs::File;
use std::io::Write as _;
use std::sync::OnceLock;

use oxccl::core::printable::{is_active, lines};
use oxccl::core::{Error, Result};
use serde::Serialize;

/// Standard output as this program was given it.
static OUT: OnceLock<File> = OnceLock::new();

fn failed(e: std::io::Error) -> Error {
    Error::io("write to standard output", e)
}

/// Keeps standard output for [`write`]; its number means standard error from now on. A program that was started without one writes nowhere.
pub(crate) fn claim() -> Result<()> {
    let Ok(out) = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), 3) else {
        return Ok(());
    };
    rustix::stdio::dup2_stdout(rustix::stdio::stderr()).map_err(|e| failed(e.into()))?;
    let _ = OUT.set(out.into());
    Ok(())
}

/// Writes a text to standard output. Errors: `Io`.
pub(crate) fn write(text: &str) -> Result<()> {
    raw(lines(text).as_bytes())
}

/// Writes to standard output what a program of the user's wrote, as it is. Errors: `Io`.
pub(crate) fn raw(bytes: &[u8]) -> Result<()> {
    match OUT.get() {
        Some(mut out) => out.write_all(bytes).map_err(failed),
        None => Ok(()),
    }
}

/// Writes `value`, which `what` names in errors, to standard output as JSON. Errors: `Io`; `InvalidArgument` for what JSON cannot hold.
pub(crate) fn json(value: &impl Serialize, what: &str) -> Result<()> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|e| Error::invalid(format!("write {what} as JSON: {e}")))?;
    raw(escaped(&text).as_bytes())?;
    raw(b"\n")
}

/// JSON writes out control characters below a space only. What else acts on a terminal can stand in its strings alone.
fn escaped(json: &str) -> String {
    json.chars()
        .fold(String::with_capacity(json.len()), |mut text, c| {
            if is_active(c) {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    let _ = write!(text, "\\u{unit:04x}");
                }
            } else {
                text.push(c);
            }
            text
        })
}

/// A line on standard error. Unlike `eprintln!` it does not panic when its reader is gone: a lighthouse must not die with the terminal or the
/// pipe that it was started from.
pub(crate) fn say(text: Arguments<'_>) {
    let text = format!("{text}\n");
    drop(std::io::stderr().write_all(lines(&text).as_bytes()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_the_same_value_without_a_character_that_acts_on_a_terminal() {
        let value = serde_json::json!({"a\u{1b}[31m": "b\u{202e}\u{9b}\u{7f}\u{e0041}\n", "ä": ["漢", 1]});
        let text = escaped(&serde_json::to_string_pretty(&value).unwrap());
        assert!(!text.contains(is_active), "{text:?}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
    }
}
