//! Why a backend that is known cannot be used: typed, so that a program can act on it and a table can show it.
//!
//! A reason travels as the source of an [`Error`] of kind `Unsupported` ([`Unavailable::of`] finds it again), and as a code
//! with parts where it crosses a process or a plugin boundary.

use std::fmt::{self, Write as _};

use crate::printable::one_line;
use crate::{Error, ErrorKind};

/// The most characters of a reason.
const LONGEST: usize = 4096;

/// Why a backend cannot be used here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unavailable {
    /// No file of that name, in any of the places.
    LibraryNotFound {
        /// The library's name.
        library: String,
        /// Where it was looked for, in order.
        searched: Vec<String>,
    },
    /// The file is there, but the loader refuses it.
    LibraryNotLoadable {
        /// The file.
        library: String,
        /// The loader's own words.
        text: String,
    },
    /// The library lacks a function that is needed.
    SymbolMissing {
        /// The file.
        library: String,
        /// The function.
        symbol: String,
    },
    /// The library (or driver, or plugin) is older than what is needed.
    VersionTooOld {
        /// Of what.
        what: String,
        /// The version that is here.
        found: String,
        /// The least version that would do.
        needed: String,
    },
    /// The library (or plugin) is newer than what this build knows.
    VersionTooNew {
        /// Of what.
        what: String,
        /// The version that is here.
        found: String,
        /// The newest version that would do.
        needed: String,
    },
    /// There is no device of that kind.
    NoDevice {
        /// The device kind, or what was looked for.
        device: String,
    },
    /// The library could not be started.
    InitFailed {
        /// Its own code, if it gave one.
        code: Option<i64>,
        /// Its own words.
        text: String,
    },
    /// The file is not a plugin, or one that does not keep to the ABI.
    NotAPlugin {
        /// The file.
        library: String,
        /// What is wrong with it.
        text: String,
    },
    /// The plugin does not bring what was asked of it.
    NameMismatch {
        /// The file.
        library: String,
        /// The name that was asked for.
        requested: String,
        /// The names that it states.
        stated: String,
    },
    /// The child process that tried it was ended by a signal.
    ProbeCrashed {
        /// The signal's number.
        signal: i32,
        /// Its last output, if any.
        output: String,
    },
    /// The child process that tried it ended without an answer.
    ProbeFailed {
        /// How it ended, and its last output.
        text: String,
    },
    /// The child process that tried it did not answer in time and was killed.
    ProbeTimedOut {
        /// How long it had.
        milliseconds: u64,
    },
    /// There is no way to try it in a child process, so it is not opened.
    NoProbe {
        /// Why not, and what to set.
        text: String,
    },
}

impl Unavailable {
    /// A short stable name: `library_not_found`, `probe_crashed`, …
    pub fn name(&self) -> &'static str {
        match self {
            Self::LibraryNotFound { .. } => "library_not_found",
            Self::LibraryNotLoadable { .. } => "library_not_loadable",
            Self::SymbolMissing { .. } => "symbol_missing",
            Self::VersionTooOld { .. } => "version_too_old",
            Self::VersionTooNew { .. } => "version_too_new",
            Self::NoDevice { .. } => "no_device",
            Self::InitFailed { .. } => "init_failed",
            Self::NotAPlugin { .. } => "not_a_plugin",
            Self::NameMismatch { .. } => "name_mismatch",
            Self::ProbeCrashed { .. } => "probe_crashed",
            Self::ProbeFailed { .. } => "probe_failed",
            Self::ProbeTimedOut { .. } => "probe_timed_out",
            Self::NoProbe { .. } => "no_probe",
        }
    }

    /// A short text on what to do.
    pub fn advice(&self) -> &'static str {
        match self {
            Self::LibraryNotFound { .. } => "check the path, or install the library",
            Self::LibraryNotLoadable { .. } => "see the loader's text",
            Self::SymbolMissing { .. } => "check that it is the right library, in a version that fits",
            Self::VersionTooOld { .. } => "install a newer version",
            Self::VersionTooNew { .. } => "install an older version, or a newer oxccl",
            Self::NoDevice { .. } => "run it on a machine with such a device, or choose another backend",
            Self::InitFailed { .. } => "see the library's own text and code",
            Self::NotAPlugin { .. } => "check the file; docs/plugins.md says what a plugin exports",
            Self::NameMismatch { .. } => "ask for a name that it states",
            Self::ProbeCrashed { .. } | Self::ProbeFailed { .. } | Self::ProbeTimedOut { .. } => {
                "see what the process said; report it to the authors of the library or plugin"
            }
            Self::NoProbe { .. } => "set what the text names",
        }
    }

    /// The reason that `error` carries, if it carries one.
    pub fn of(error: &Error) -> Option<&Self> {
        let mut source = std::error::Error::source(error);
        while let Some(e) = source {
            if let Some(reason) = e.downcast_ref() {
                return Some(reason);
            }
            source = e.source();
        }
        None
    }

    /// The stable code (never 0) and the parts, for another process or a plugin.
    pub fn encode(&self) -> (u32, Vec<String>) {
        let (code, parts): (u32, Vec<String>) = match self {
            Self::LibraryNotFound { library, searched } => {
                let mut parts = vec![library.clone()];
                parts.extend(searched.iter().cloned());
                (1, parts)
            }
            Self::LibraryNotLoadable { library, text } => (2, vec![library.clone(), text.clone()]),
            Self::SymbolMissing { library, symbol } => (3, vec![library.clone(), symbol.clone()]),
            Self::VersionTooOld { what, found, needed } => {
                (4, vec![what.clone(), found.clone(), needed.clone()])
            }
            Self::VersionTooNew { what, found, needed } => {
                (5, vec![what.clone(), found.clone(), needed.clone()])
            }
            Self::NoDevice { device } => (6, vec![device.clone()]),
            Self::InitFailed { code, text } => {
                let code = code.map(|c| c.to_string()).unwrap_or_default();
                (7, vec![code, text.clone()])
            }
            Self::NotAPlugin { library, text } => (8, vec![library.clone(), text.clone()]),
            Self::NameMismatch {
                library,
                requested,
                stated,
            } => (9, vec![library.clone(), requested.clone(), stated.clone()]),
            Self::ProbeCrashed { signal, output } => (10, vec![signal.to_string(), output.clone()]),
            Self::ProbeFailed { text } => (11, vec![text.clone()]),
            Self::ProbeTimedOut { milliseconds } => (12, vec![milliseconds.to_string()]),
            Self::NoProbe { text } => (13, vec![text.clone()]),
        };
        (code, parts)
    }

    /// The inverse of [`encode`](Self::encode). Missing parts are empty; `None` for a code that is not known.
    pub fn decode(code: u32, parts: &[String]) -> Option<Self> {
        let part = |i: usize| parts.get(i).cloned().unwrap_or_default();
        Some(match code {
            1 => Self::LibraryNotFound {
                library: part(0),
                searched: parts.iter().skip(1).cloned().collect(),
            },
            2 => Self::LibraryNotLoadable {
                library: part(0),
                text: part(1),
            },
            3 => Self::SymbolMissing {
                library: part(0),
                symbol: part(1),
            },
            4 => Self::VersionTooOld {
                what: part(0),
                found: part(1),
                needed: part(2),
            },
            5 => Self::VersionTooNew {
                what: part(0),
                found: part(1),
                needed: part(2),
            },
            6 => Self::NoDevice { device: part(0) },
            7 => Self::InitFailed {
                code: part(0).parse().ok(),
                text: part(1),
            },
            8 => Self::NotAPlugin {
                library: part(0),
                text: part(1),
            },
            9 => Self::NameMismatch {
                library: part(0),
                requested: part(1),
                stated: part(2),
            },
            10 => Self::ProbeCrashed {
                signal: part(0).parse().unwrap_or(0),
                output: part(1),
            },
            11 => Self::ProbeFailed { text: part(0) },
            12 => Self::ProbeTimedOut {
                milliseconds: part(0).parse().unwrap_or(0),
            },
            13 => Self::NoProbe { text: part(0) },
            _ => return None,
        })
    }
}

/// The sentence on one line, in printable characters: most texts are a library's, a plugin's or the loader's.
impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = String::new();
        self.write(&mut text)?;
        f.write_str(&one_line(&text, LONGEST))
    }
}

impl Unavailable {
    /// The sentence, with the texts as they came.
    fn write(&self, f: &mut String) -> fmt::Result {
        match self {
            Self::LibraryNotFound { library, searched } if searched.is_empty() => {
                write!(f, "{library} was not found")
            }
            Self::LibraryNotFound { library, searched } => {
                write!(f, "{library} was not found; searched: {}", searched.join(", "))
            }
            Self::LibraryNotLoadable { library, text } => write!(f, "{library} cannot be loaded: {text}"),
            Self::SymbolMissing { library, symbol } => write!(f, "{library} has no symbol {symbol}"),
            Self::VersionTooOld { what, found, needed } => {
                write!(f, "{what} is version {found}; at least {needed} is needed")
            }
            Self::VersionTooNew { what, found, needed } => {
                write!(
                    f,
                    "{what} is version {found}; at most {needed} is known to this build"
                )
            }
            Self::NoDevice { device } => write!(f, "there is no {device} device"),
            Self::InitFailed {
                code: Some(code),
                text,
            } => write!(f, "it could not be started: {text} (code {code})"),
            Self::InitFailed { code: None, text } => write!(f, "it could not be started: {text}"),
            Self::NotAPlugin { library, text } => write!(f, "{library} is not an oxccl plugin: {text}"),
            Self::NameMismatch {
                library,
                requested,
                stated,
            } => write!(f, "{library} was named for '{requested}' but states {stated}"),
            Self::ProbeCrashed { signal, output } => {
                write!(f, "the process that tried it was ended by signal {signal}")?;
                after(f, output)
            }
            Self::ProbeFailed { text } => write!(f, "the process that tried it gave no answer: {text}"),
            Self::ProbeTimedOut { milliseconds } => write!(
                f,
                "the process that tried it did not answer within {} s and was killed",
                *milliseconds as f64 / 1000.0
            ),
            Self::NoProbe { text } => write!(f, "it cannot be tried in a child process: {text}"),
        }
    }
}

fn after(f: &mut String, output: &str) -> fmt::Result {
    if output.is_empty() {
        Ok(())
    } else {
        write!(f, "; its last output: {output}")
    }
}

impl From<Unavailable> for Error {
    fn from(reason: Unavailable) -> Self {
        let error = Self::new(ErrorKind::Unsupported, reason.to_string());
        error.with_source(reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one_of_each() -> Vec<Unavailable> {
        let s = |text: &str| text.to_string();
        vec![
            Unavailable::LibraryNotFound {
                library: s("libhccl.so"),
                searched: vec![s("/a"), s("the loader's path")],
            },
            Unavailable::LibraryNotLoadable {
                library: s("l"),
                text: s("not ELF"),
            },
            Unavailable::SymbolMissing {
                library: s("l"),
                symbol: s("f"),
            },
            Unavailable::VersionTooOld {
                what: s("oneCCL"),
                found: s("1"),
                needed: s("2"),
            },
            Unavailable::VersionTooNew {
                what: s("the plugin's ABI"),
                found: s("1.9"),
                needed: s("1.1"),
            },
            Unavailable::NoDevice { device: s("hpu") },
            Unavailable::InitFailed {
                code: Some(-3),
                text: s("no licence"),
            },
            Unavailable::InitFailed {
                code: None,
                text: s("no licence"),
            },
            Unavailable::NotAPlugin {
                library: s("l"),
                text: s("magic"),
            },
            Unavailable::NameMismatch {
                library: s("l"),
                requested: s("a"),
                stated: s("b"),
            },
            Unavailable::ProbeCrashed {
                signal: 11,
                output: s("oops"),
            },
            Unavailable::ProbeFailed { text: s("exit 3") },
            Unavailable::ProbeTimedOut { milliseconds: 1500 },
            Unavailable::NoProbe { text: s("no helper") },
        ]
    }

    #[test]
    fn the_reason_says_what_to_do_also_when_other_errors_lie_around_it() {
        for reason in one_of_each() {
            let advice = reason.advice();
            let error = Error::from(reason);
            assert_eq!(error.advice(), advice);
            let around =
                Error::new(ErrorKind::Unsupported, "backend 'hccl' cannot be used").with_source(error);
            assert_eq!(around.advice(), advice);
            assert_ne!(advice, ErrorKind::Unsupported.advice());
        }
    }

    #[test]
    fn every_reason_crosses_a_boundary_and_is_found_in_the_error_that_carries_it() {
        let mut names = Vec::new();
        for reason in one_of_each() {
            let (code, parts) = reason.encode();
            assert_ne!(code, 0);
            assert_eq!(Unavailable::decode(code, &parts).as_ref(), Some(&reason));
            let error = Error::from(reason.clone()).with_op("probe");
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.to_string().contains(&reason.to_string()), "{error}");
            assert_eq!(Unavailable::of(&error), Some(&reason));
            let outer = Error::invalid("no group").with_source(error);
            assert_eq!(Unavailable::of(&outer), Some(&reason));
            names.push((code, reason.name()));
        }
        names.dedup();
        let mut codes: Vec<u32> = names.iter().map(|(c, _)| *c).collect();
        codes.dedup();
        assert_eq!(codes.len(), names.len(), "one code per name: {names:?}");
        assert_eq!(Unavailable::decode(0, &[]), None);
        assert_eq!(Unavailable::of(&Error::invalid("x")), None);
    }

    #[test]
    fn the_text_names_what_was_searched_and_what_is_needed() {
        let text: Vec<String> = one_of_each().iter().map(ToString::to_string).collect();
        assert!(text[0].contains("libhccl.so was not found; searched: /a, the loader's path"));
        assert!(text[3].contains("oneCCL is version 1; at least 2 is needed"));
        assert!(text[10].contains("signal 11; its last output: oops"));
        assert!(text[12].contains("within 1.5 s"));
    }
}
