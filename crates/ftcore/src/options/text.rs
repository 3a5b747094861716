//! The string form of options: names in any of the usual spellings, values as text, variables of the environment.
//!
//! [`GroupOptions::resolved`] is the one place where texts become options: a hint with the name of a typed option becomes that option, the
//! variables `OXCCL_<BACKEND>_<OPTION>` fill in what the program left open, and what the backend does not know is refused or reported.

use std::collections::BTreeMap;
use std::ffi::OsString;

use super::GroupOptions;
use crate::nearest::nearest;
use crate::{Error, Result};

/// Before the name of a backend's own hint in the lists of what it honours.
const HINT: &str = "hint:";
/// Before the rest of a variable that a backend reads by itself, in the same lists: no option, and not unknown either.
pub const VARIABLE: &str = "variable:";

/// An option with a type.
pub(super) struct Typed {
    pub(super) name: &'static str,
    accepts: &'static str,
    pub(super) is_set: fn(&GroupOptions) -> bool,
    /// `None` for a text that is no such value.
    set: fn(&mut GroupOptions, &str) -> Option<()>,
    clear: fn(&mut GroupOptions),
}

/// A type that options have.
trait Value: Sized {
    const ACCEPTS: &'static str;
    fn read(text: &str) -> Option<Self>;
}

impl Value for bool {
    const ACCEPTS: &'static str = "1, true, 0 or false";
    fn read(text: &str) -> Option<Self> {
        match text.to_ascii_lowercase().as_str() {
            "1" | "true" => Some(true),
            "0" | "false" => Some(false),
            _ => None,
        }
    }
}

impl Value for u32 {
    const ACCEPTS: &'static str = "a whole number from 0 to 4294967295";
    fn read(text: &str) -> Option<Self> {
        text.parse().ok()
    }
}

impl Value for String {
    const ACCEPTS: &'static str = "a name";
    fn read(text: &str) -> Option<Self> {
        (!text.is_empty()).then(|| text.to_string())
    }
}

macro_rules! typed {
    ($($field:ident: $type:ty),* $(,)?) => {
        /// All of them, `lenient` and the time-out aside.
        pub(super) const TYPED: &[Typed] = &[$(Typed {
            name: stringify!($field),
            accepts: <$type as Value>::ACCEPTS,
            is_set: |o| o.$field.is_some(),
            set: |o, text| {
                o.$field = Some(<$type as Value>::read(text)?);
                Some(())
            },
            clear: |o| o.$field = None,
        }),*];
    };
}

typed! {
    is_high_priority_stream: bool,
    cga_cluster_size: u32,
    min_ctas: u32,
    max_ctas: u32,
    net_name: String,
    split_share: bool,
    blocking: bool,
    traffic_class: u32,
}

/// Not of a backend: whether what it does not honour is dropped. Once true it stays.
const LENIENT: Typed = Typed {
    name: "lenient",
    accepts: <bool as Value>::ACCEPTS,
    is_set: |_| false,
    set: |o, text| {
        o.lenient |= bool::read(text)?;
        Some(())
    },
    clear: |o| o.lenient = false,
};

/// `minCtas`, `MIN_CTAS`, `min-ctas` and `min_ctas` are one name.
fn folded(name: &str) -> String {
    let name = name.trim();
    let letters = name.strip_prefix(HINT).unwrap_or(name).chars();
    letters
        .filter(|c| !"_-".contains(*c))
        .flat_map(char::to_lowercase)
        .collect()
}

fn typed(name: &str) -> Option<&'static Typed> {
    let name = folded(name);
    let mut all = TYPED.iter().chain(std::iter::once(&LENIENT));
    all.find(|t| folded(t.name) == name)
}

impl Typed {
    /// `whence` is what the caller wrote.
    fn read(&self, options: &mut GroupOptions, whence: &str, text: &str) -> Result<()> {
        (self.set)(options, text.trim()).ok_or_else(|| {
            Error::invalid(format!(
                "option {whence} is '{}'; it can be {}",
                text.escape_debug(),
                self.accepts
            ))
        })
    }
}

/// The beginning of the names of a backend's variables: `OXCCL_NCCL_` for `nccl`.
pub fn variable_prefix(backend: &str) -> String {
    let letters = backend.chars().map(|c| if c.is_alphanumeric() { c } else { '_' });
    let name: String = letters.flat_map(char::to_uppercase).collect();
    format!("OXCCL_{name}_")
}

/// `NAME=VALUE` of a command line, for [`GroupOptions::from_texts`].
///
/// Errors: `InvalidArgument` if it is not of that form.
pub fn option_text(text: &str) -> Result<(String, String)> {
    let parts = text.split_once('=').map(|(name, value)| (name.trim(), value));
    match parts.filter(|(name, _)| !name.is_empty()) {
        Some((name, value)) => Ok((name.to_string(), value.to_string())),
        None => Err(Error::invalid(format!(
            "'{text}' is not NAME=VALUE, such as min_ctas=4"
        ))),
    }
}

/// Options in the form in which a backend takes them; see [`GroupOptions::resolved`].
#[derive(Debug, Clone, PartialEq)]
pub struct Resolved {
    /// Only what the backend honours, under the names that it uses.
    pub options: GroupOptions,
    /// What was left out of them, as asked for with `lenient`: a typed name, `hint:<name>`, or a variable.
    pub dropped: Vec<String>,
}

/// The names that a backend knows, as its capabilities list them.
struct Known<'a>(Vec<&'a str>);

impl<'a> Known<'a> {
    fn options(&self) -> impl Iterator<Item = &'a str> {
        let honoured = self.0.iter().copied();
        honoured.filter(|name| !name.starts_with(VARIABLE))
    }

    /// The backend's own spelling of one of its hints.
    fn hint(&self, name: &str) -> Option<&'a str> {
        let name = folded(name);
        let mut hints = self.0.iter().filter_map(|known| known.strip_prefix(HINT));
        hints.find(|known| folded(known) == name)
    }

    fn reads(&self, variable: &str) -> bool {
        let mut own = self.0.iter().filter_map(|known| known.strip_prefix(VARIABLE));
        own.any(|known| known == variable)
    }

    /// "min_cta (do you mean min_ctas?)"
    fn unknown(&self, written: &str, name: &str) -> String {
        let name = folded(name);
        let folded: Vec<(String, &str)> = self.options().map(|known| (folded(known), known)).collect();
        let near = nearest(&name, folded.iter().map(|(folded, _)| folded.as_str()));
        match folded.iter().find(|(folded, _)| Some(folded.as_str()) == near) {
            Some((folded, known)) if *folded != name => format!("{written} (do you mean {known}?)"),
            _ => written.to_string(),
        }
    }
}

/// What is said of names that a backend does not honour.
pub(super) fn refusal(backend: &str, honoured: &[&str], unknown: &[String]) -> Error {
    let options = honoured
        .iter()
        .copied()
        .filter(|name| !name.starts_with(VARIABLE));
    let mut known: Vec<&str> = options.collect();
    if known.is_empty() {
        known.push("none");
    }
    let prefix = variable_prefix(backend);
    let read = honoured.iter().filter_map(|name| name.strip_prefix(VARIABLE));
    let read: Vec<String> = read.map(|rest| format!("{prefix}{rest}")).collect();
    let read = match read.is_empty() {
        true => String::new(),
        false => format!(", and it reads {}", read.join(", ")),
    };
    let (unknown, known) = (unknown.join(", "), known.join(", "));
    Error::invalid(format!(
        "backend '{backend}' does not honour {unknown}; it honours: {known}{read}. Remove them or set `lenient`"
    ))
}

impl GroupOptions {
    /// Sets the option of that name, in snake or camel case (`min_ctas`, `minCtas`), from a text; a name that is no typed option's becomes a
    /// hint, which the backend knows or [`resolved`](Self::resolved) refuses. The last value counts.
    ///
    /// Errors: `InvalidArgument` with the name, the text and what is accepted.
    pub fn set(&mut self, name: &str, text: &str) -> Result<()> {
        match typed(name) {
            Some(typed) => typed.read(self, typed.name, text),
            None => {
                let name = name.trim();
                let name = name.strip_prefix(HINT).unwrap_or(name);
                self.hints.retain(|other, _| folded(other) != folded(name));
                self.hints.insert(name.to_string(), text.to_string());
                Ok(())
            }
        }
    }

    /// The default options with these ones [`set`](Self::set), as [`option_text`] reads them from a command line.
    ///
    /// Errors: those of [`set`](Self::set).
    pub fn from_texts(texts: &[(String, String)]) -> Result<Self> {
        let mut options = Self::default();
        for (name, text) in texts {
            options.set(name, text)?;
        }
        Ok(options)
    }

    /// These options for `backend`, which honours those names (typed ones, and `hint:<name>`; `variable:<REST>` is a variable
    /// `OXCCL_<BACKEND>_<REST>` that is no option). Names are compared without case and underscores; a hint with the name of a typed
    /// option is that option. What is set here comes before the variables `OXCCL_<BACKEND>_<OPTION>` of the environment, these before the
    /// backend's default. A variable without text counts as not set.
    ///
    /// Errors: `InvalidArgument` for a value that is none (with the option and what is accepted), for two values of one option, and, without
    /// `lenient`, for all names that the backend does not honour, with the ones that it does. The values of hints are the backend's to read.
    pub fn resolved(&self, backend: &str, honoured: &[impl AsRef<str>]) -> Result<Resolved> {
        let prefix = variable_prefix(backend);
        let mut variables = Vec::new();
        for (name, value) in std::env::vars_os() {
            if let Some(name) = name.to_str().filter(|name| name.starts_with(&prefix)) {
                variables.push((name.to_string(), value));
            }
        }
        variables.sort();
        self.with_variables(backend, honoured, variables)
    }

    /// [`resolved`](Self::resolved) with these variables for those of the environment.
    pub(super) fn with_variables(
        &self,
        backend: &str,
        honoured: &[impl AsRef<str>],
        variables: Vec<(String, OsString)>,
    ) -> Result<Resolved> {
        self.check()?;
        let known = Known(honoured.iter().map(AsRef::as_ref).collect());
        let mut options = Self {
            hints: BTreeMap::new(),
            ..self.clone()
        };
        // As the caller wrote it, and what is said of it.
        let mut unknown: Vec<(String, String)> = Vec::new();
        for (name, text) in &self.hints {
            if let Some(hint) = known.hint(name) {
                let before = options.hints.insert(hint.to_string(), text.clone());
                if before.is_some_and(|before| before != *text) {
                    return Err(twice(hint));
                }
            } else if let Some(typed) = typed(name) {
                let before = options.clone();
                typed.read(&mut options, name, text)?;
                if (typed.is_set)(&before) && before != options {
                    return Err(twice(typed.name));
                }
            } else {
                let written = format!("{HINT}{name}");
                unknown.push((written.clone(), known.unknown(&written, name)));
            }
        }
        let prefix = variable_prefix(backend);
        for (variable, text) in variables {
            let Some(name) = variable.strip_prefix(&prefix) else {
                continue;
            };
            let Some(text) = text.to_str() else {
                return Err(Error::invalid(format!("{variable} is not UTF-8")));
            };
            if text.is_empty() || known.reads(name) {
                continue;
            }
            if let Some(hint) = known.hint(name) {
                let hints = options.hints.entry(hint.to_string());
                hints.or_insert_with(|| text.to_string());
            } else if let Some(typed) = typed(name) {
                if !(typed.is_set)(&options) {
                    typed.read(&mut options, &variable, text)?;
                }
            } else {
                let said = known.unknown(&variable, name);
                unknown.push((variable, said));
            }
        }
        for typed in TYPED {
            if (typed.is_set)(&options) && !known.0.contains(&typed.name) {
                (typed.clear)(&mut options);
                unknown.push((typed.name.to_string(), typed.name.to_string()));
            }
        }
        let (dropped, said): (Vec<_>, Vec<_>) = unknown.into_iter().unzip();
        if dropped.is_empty() || options.lenient {
            if !dropped.is_empty() {
                tracing::warn!(backend, options = ?dropped, "options not honoured by this backend were dropped, as asked for");
            }
            return Ok(Resolved { options, dropped });
        }
        Err(refusal(backend, &known.0, &said))
    }
}

fn twice(name: &str) -> Error {
    Error::invalid(format!("option {name} is set twice, to different values"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NCCL: &[&str] = &[
        "min_ctas",
        "net_name",
        "blocking",
        "cga_cluster_size",
        "hint:contributors",
        "hint:spin_us",
        "variable:PATH",
    ];

    fn resolved(options: &GroupOptions, variables: &[(&str, &str)]) -> Result<Resolved> {
        let variables = variables.iter().map(|(n, v)| (n.to_string(), v.into()));
        options.with_variables("nccl", NCCL, variables.collect())
    }

    fn hinted(hints: &[(&str, &str)]) -> GroupOptions {
        GroupOptions {
            hints: hints
                .iter()
                .map(|(n, v)| (n.to_string(), v.to_string()))
                .collect(),
            ..GroupOptions::default()
        }
    }

    #[test]
    fn every_typed_option_has_a_string_form_in_each_spelling() {
        type Holds = fn(&GroupOptions) -> bool;
        let values: [(&str, &str, Holds); 8] = [
            ("isHighPriorityStream", "true", |o| {
                o.is_high_priority_stream == Some(true)
            }),
            ("cgaClusterSize", "2", |o| o.cga_cluster_size == Some(2)),
            ("minCTAs", "3", |o| o.min_ctas == Some(3)),
            ("MAX_CTAS", "4", |o| o.max_ctas == Some(4)),
            ("net-name", "eth0", |o| o.net_name.as_deref() == Some("eth0")),
            ("split_share", "0", |o| o.split_share == Some(false)),
            ("Blocking", "FALSE", |o| o.blocking == Some(false)),
            ("trafficClass", "7", |o| o.traffic_class == Some(7)),
        ];
        assert_eq!(values.len(), TYPED.len());
        let all: Vec<&str> = TYPED.iter().map(|t| t.name).collect();
        for (name, text, holds) in values {
            let mut by_set = GroupOptions::default();
            by_set.set(name, text).unwrap();
            assert!(
                holds(&by_set) && by_set.set_names().len() == 1,
                "{name}: {by_set:?}"
            );
            let by_hint = hinted(&[(name, text)]).with_variables("x", &all, Vec::new());
            assert_eq!(by_hint.unwrap().options, by_set, "{name}");
            let variable = format!("OXCCL_X_{}", name.replace('-', "_"));
            let by_variable =
                GroupOptions::default().with_variables("x", &all, vec![(variable, text.into())]);
            assert_eq!(by_variable.unwrap().options, by_set, "{name}");
        }
    }

    #[test]
    fn hints_reach_the_backend_under_its_own_spelling() {
        let options = resolved(
            &hinted(&[("spinUs", "5"), ("hint:Contributors", "all")]),
            &[("OXCCL_NCCL_SPIN_US", "6")],
        );
        let hints = options.unwrap().options.hints;
        assert_eq!(hints, hinted(&[("spin_us", "5"), ("contributors", "all")]).hints);
        let mut options = hinted(&[("spinUs", "5")]);
        options.set("spin_us", "7").unwrap();
        assert_eq!(options.hints, hinted(&[("spin_us", "7")]).hints);
    }

    #[test]
    fn code_comes_before_the_variable_and_the_variable_before_the_default() {
        let variables = [("OXCCL_NCCL_MIN_CTAS", "4"), ("OXCCL_NCCL_CONTRIBUTORS", "all")];
        let found = resolved(&GroupOptions::default(), &variables).unwrap().options;
        assert_eq!(found.min_ctas, Some(4));
        assert_eq!(found.hints.get("contributors").map(String::as_str), Some("all"));
        let mut said = hinted(&[("contributors", "count")]);
        said.min_ctas = Some(8);
        let found = resolved(&said, &variables).unwrap().options;
        assert_eq!(found, said);
        let by_hint = resolved(&hinted(&[("minCtas", "9")]), &variables).unwrap();
        assert_eq!(by_hint.options.min_ctas, Some(9));
        // Settled once more, by a child process with the same variables, it stays.
        assert_eq!(resolved(&found, &variables).unwrap().options, found);
        let unset = resolved(&GroupOptions::default(), &[("OXCCL_NCCL_MIN_CTAS", "")]);
        assert_eq!(unset.unwrap().options, GroupOptions::default());
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_known_ones_and_the_nearest() {
        for (options, variables, says) in [
            (
                hinted(&[("min_cta", "4")]),
                vec![],
                "hint:min_cta (do you mean min_ctas?)",
            ),
            (
                hinted(&[("contributers", "all")]),
                vec![],
                "(do you mean hint:contributors?)",
            ),
            (
                GroupOptions::default(),
                vec![("OXCCL_NCCL_SPIN_USE", "4")],
                "OXCCL_NCCL_SPIN_USE (do you mean hint:spin_us?)",
            ),
            (hinted(&[("splitShare", "1")]), vec![], "honour split_share; "),
            (
                GroupOptions::default(),
                vec![("OXCCL_NCCL_TRAFFIC_CLASS", "1")],
                "honour traffic_class; ",
            ),
        ] {
            let text = resolved(&options, &variables).unwrap_err().to_string();
            assert!(text.contains(says), "{text}");
            assert!(
                text.contains(
                    "min_ctas, net_name, blocking, cga_cluster_size, hint:contributors, hint:spin_us"
                ),
                "{text}"
            );
            assert!(
                !text.contains("variable:") && text.contains("it reads OXCCL_NCCL_PATH."),
                "{text}"
            );
        }
        // Those of other backends and those that the backend reads by itself are none of its options.
        resolved(
            &GroupOptions::default(),
            &[("OXCCL_NCCL_PATH", "/x"), ("OXCCL_GLOO_NO", "1")],
        )
        .unwrap();
    }

    #[test]
    fn a_bad_value_is_refused_with_the_option_the_value_and_what_is_accepted() {
        let bad = |name: &str, text: &str| GroupOptions::default().set(name, text).unwrap_err().to_string();
        for (name, text, says) in [
            (
                "minCtas",
                "many",
                "option min_ctas is 'many'; it can be a whole number",
            ),
            ("min_ctas", "-1", "'-1'"),
            ("blocking", "perhaps", "1, true, 0 or false"),
            ("net_name", "", "option net_name is ''; it can be a name"),
            ("lenient", "2", "option lenient is '2'"),
        ] {
            let e = bad(name, text);
            assert!(e.contains(says), "{e}");
        }
        let e = resolved(&GroupOptions::default(), &[("OXCCL_NCCL_MIN_CTAS", "4.5")]).unwrap_err();
        assert!(
            e.to_string()
                .contains("OXCCL_NCCL_MIN_CTAS is '4.5'; it can be a whole number"),
            "{e}"
        );
        let e = resolved(&hinted(&[("spinUs", "1"), ("spin_us", "2")]), &[]).unwrap_err();
        assert!(e.to_string().contains("spin_us is set twice"), "{e}");
        let mut both = hinted(&[("minCtas", "1")]);
        both.min_ctas = Some(2);
        let e = resolved(&both, &[]).unwrap_err();
        assert!(e.to_string().contains("min_ctas is set twice"), "{e}");
    }

    #[test]
    fn what_is_not_honoured_is_dropped_and_reported_if_the_caller_is_lenient() {
        let mut options = hinted(&[("nonsense", "1"), ("minCtas", "2")]);
        options.traffic_class = Some(3);
        options.set("lenient", "1").unwrap();
        let found = resolved(&options, &[("OXCCL_NCCL_NO", "1")]).unwrap();
        assert_eq!(found.dropped, ["hint:nonsense", "OXCCL_NCCL_NO", "traffic_class"]);
        let kept = GroupOptions {
            min_ctas: Some(2),
            lenient: true,
            ..GroupOptions::default()
        };
        assert_eq!(found.options, kept);
        // A value that is none is refused all the same.
        options.hints.insert("blocking".into(), "perhaps".into());
        assert!(resolved(&options, &[]).is_err());
        let by_variable = resolved(&hinted(&[("nonsense", "1")]), &[("OXCCL_NCCL_LENIENT", "1")]);
        assert_eq!(by_variable.unwrap().dropped, ["hint:nonsense"]);
    }

    #[test]
    fn the_option_of_a_command_line_has_a_name_and_a_value() {
        let pair = |a: &str, b: &str| (a.to_string(), b.to_string());
        assert_eq!(option_text("min_ctas=4").unwrap(), pair("min_ctas", "4"));
        assert_eq!(option_text(" a = b=c").unwrap(), pair("a", " b=c"));
        for bad in ["min_ctas", "=4", ""] {
            let e = option_text(bad).unwrap_err();
            assert!(e.to_string().contains("NAME=VALUE"), "{e}");
        }
        assert_eq!(variable_prefix("acme-2.x"), "OXCCL_ACME_2_X_");
    }
}
