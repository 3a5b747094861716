//! What came of a trial, kept for this process and handed to those that it starts.
//!
//! A verdict holds for one state of a file: another one under its name is tried again. A launcher hands its verdicts to the
//! processes of its job in a variable ([`verdicts_for_job`]), so that one which comes back after a death does not wait for the
//! trials a second time; what such a process starts in turn inherits the variable.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::UNIX_EPOCH;

use ftcore::registry::Unavailable;

/// Verdicts from the process that started this one: a line with this crate's version, then one for each file.
const ENV_VERDICTS: &str = "OXCCL_PLUGIN_VERDICTS";
/// Ends a part of a reason.
const END: char = '\u{1f}';
/// Linux takes variables of up to 128 KiB: files that do not fit are tried again.
const LONGEST: usize = 96 * 1024;

/// A verdict: good, or why the plugin is not opened.
type Verdict = Result<(), Unavailable>;

/// A file as it was when it was tried.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct State {
    path: PathBuf,
    bytes: u64,
    /// Nanoseconds since 1970; 0 where the file system does not say.
    modified: u128,
}

impl State {
    /// The file as it is now.
    pub(super) fn of(path: &Path) -> Self {
        let meta = std::fs::metadata(path).ok();
        let modified = meta.as_ref().and_then(|m| m.modified().ok());
        Self {
            path: path.to_path_buf(),
            bytes: meta.map_or(0, |m| m.len()),
            modified: modified
                .and_then(|m| m.duration_since(UNIX_EPOCH).ok())
                .map_or(0, |d| d.as_nanos()),
        }
    }

    /// `None` if its path cannot stand in a line.
    fn write(&self) -> Option<String> {
        let path = self.path.to_str().filter(|p| !p.contains(['\t', '\n', '\0']))?;
        Some(format!("{} {} {path}", self.bytes, self.modified))
    }

    fn read(text: &str) -> Option<Self> {
        let mut fields = text.splitn(3, ' ');
        Some(Self {
            bytes: fields.next()?.parse().ok()?,
            modified: fields.next()?.parse().ok()?,
            path: fields.next()?.into(),
        })
    }
}

static VERDICTS: LazyLock<Mutex<BTreeMap<State, Verdict>>> = LazyLock::new(|| {
    let handed = std::env::var(ENV_VERDICTS).unwrap_or_default();
    Mutex::new(unpack(&handed))
});

/// What is known of this state of the file.
pub(super) fn known(file: &State) -> Option<Verdict> {
    let verdicts = VERDICTS.lock().unwrap_or_else(PoisonError::into_inner);
    verdicts.get(file).cloned()
}

/// Keeps what came of a trial.
pub(super) fn keep(file: State, verdict: Verdict) {
    let mut verdicts = VERDICTS.lock().unwrap_or_else(PoisonError::into_inner);
    verdicts.insert(file, verdict);
}

/// For a launcher: tries all plugins that the environment names, side by side, unless that was done, and returns the variable that hands
/// the verdicts to the processes of its job: with it they do not try the same files again. Blocks as long as the slowest trial does; no
/// plugin is opened here and nothing is registered. `None` without plugins.
///
/// It is for processes of the same environment, libraries and devices: a verdict says how the plugin did in these. What is not known
/// there, or has changed since, is tried there.
///
/// ```no_run
/// let verdicts = oxccl_plugin::verdicts_for_job();
/// for rank in 0..2 {
///     std::process::Command::new("train").arg(rank.to_string()).envs(verdicts.clone()).spawn()?;
/// }
/// # Ok::<(), std::io::Error>(())
/// ```
#[must_use]
pub fn verdicts_for_job() -> Option<(&'static str, String)> {
    super::discover::try_all(&std::env::vars_os().collect());
    let verdicts = VERDICTS.lock().unwrap_or_else(PoisonError::into_inner);
    (!verdicts.is_empty()).then(|| (ENV_VERDICTS, pack(&verdicts)))
}

fn pack(verdicts: &BTreeMap<State, Verdict>) -> String {
    let mut text = env!("CARGO_PKG_VERSION").to_string();
    for (file, verdict) in verdicts {
        let line = file.write().map(|file| format!("\n{file}\t{}", write(verdict)));
        if let Some(line) = line.filter(|l| text.len() + l.len() <= LONGEST) {
            text += &line;
        }
    }
    text
}

/// Nothing from another version, and no line that is not whole: those files are tried here.
fn unpack(text: &str) -> BTreeMap<State, Verdict> {
    let mut lines = text.lines();
    if lines.next() != Some(env!("CARGO_PKG_VERSION")) {
        return BTreeMap::new();
    }
    lines
        .filter_map(|line| {
            let (file, verdict) = line.split_once('\t')?;
            Some((State::read(file)?, read(verdict)?))
        })
        .collect()
}

/// One line.
pub(super) fn write(verdict: &Verdict) -> String {
    match verdict {
        Ok(()) => "good".to_string(),
        Err(reason) => {
            let (code, parts) = reason.encode();
            let parts: String = parts
                .iter()
                .map(|p| format!("{}{END}", p.replace([END, '\n', '\r', '\t', '\0'], " ")))
                .collect();
            format!("bad {code} {parts}")
        }
    }
}

/// `None` if it is not a verdict.
pub(super) fn read(line: &str) -> Option<Verdict> {
    if line == "good" {
        return Some(Ok(()));
    }
    let (code, parts) = line.strip_prefix("bad ")?.split_once(' ')?;
    let parts: Vec<String> = parts.split_terminator(END).map(str::to_string).collect();
    Unavailable::decode(code.parse().ok()?, &parts).map(Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missing() -> Verdict {
        Err(Unavailable::SymbolMissing {
            library: "li\tb".into(),
            symbol: "sym".into(),
        })
    }

    fn file(path: &str) -> State {
        State {
            path: path.into(),
            bytes: 12,
            modified: 1_700_000_000_123_456_789,
        }
    }

    #[test]
    fn a_line_holds_a_verdict_and_anything_else_is_none() {
        assert_eq!(read(&write(&Ok(()))), Some(Ok(())));
        let wanted = Err(Unavailable::SymbolMissing {
            library: "li b".into(),
            symbol: "sym".into(),
        });
        assert_eq!(read(&write(&missing())), Some(wanted));
        for text in ["", "goo", "bad", "bad x y", "bad 250 a"] {
            assert_eq!(read(text), None, "{text:?}");
        }
    }

    #[test]
    fn verdicts_travel_with_the_state_of_their_file_and_only_within_a_version() {
        let verdicts = BTreeMap::from([
            (file("/a b.so"), Ok(())),
            (file("/c.so"), missing()),
            (file("/ta\tb.so"), Ok(())),
        ]);
        let text = pack(&verdicts);
        let back = unpack(&text);
        assert_eq!(
            back.len(),
            2,
            "a path that does not fit into a line stays: {text:?}"
        );
        assert_eq!(back.get(&file("/a b.so")), Some(&Ok(())));
        assert!(matches!(
            back.get(&file("/c.so")),
            Some(Err(Unavailable::SymbolMissing { .. }))
        ));
        let changed = State {
            bytes: 13,
            ..file("/a b.so")
        };
        assert_eq!(back.get(&changed), None);
        assert!(unpack(&format!("9{text}")).is_empty());
        assert_eq!(unpack(&text.replace("good", "goo")).len(), 1);
    }

    #[test]
    fn what_does_not_fit_into_a_variable_is_left_out() {
        let many = (0..2000)
            .map(|n| (file(&format!("/{n}{}", "x".repeat(100))), Ok(())))
            .collect();
        let text = pack(&many);
        assert!(text.len() <= LONGEST && unpack(&text).len() > 500);
    }
}
