//! The text in which Prometheus is told numbers: each family with its HELP and TYPE, times in seconds.

use std::fmt::{Display, Write as _};

/// What the servers answer under `/metrics`.
pub(crate) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A text that grows.
#[derive(Debug, Default)]
pub(crate) struct Exposition(String);

/// What a family's numbers mean over time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// They rise and fall.
    Gauge,
    /// They only rise; the name ends in `_total`.
    Counter,
    /// A sum, and how many it is of: `_sum` and `_count` behind the name.
    Summary,
}

impl Exposition {
    /// Begins a family; its samples follow.
    pub(crate) fn family(&mut self, kind: Kind, name: &str, help: &str) {
        let kind = match kind {
            Kind::Gauge => "gauge",
            Kind::Counter => "counter",
            Kind::Summary => "summary",
        };
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// One number of the family.
    pub(crate) fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        self.0.push_str(name);
        for (nth, (label, text)) in labels.iter().enumerate() {
            let before = if nth == 0 { '{' } else { ',' };
            let _ = write!(self.0, "{before}{label}=\"");
            for c in text.chars() {
                match c {
                    '\\' => self.0.push_str("\\\\"),
                    '"' => self.0.push_str("\\\""),
                    '\n' => self.0.push_str("\\n"),
                    c => self.0.push(c),
                }
            }
            self.0.push('"');
        }
        if !labels.is_empty() {
            self.0.push('}');
        }
        let _ = writeln!(self.0, " {value}");
    }

    /// A family of one number.
    pub(crate) fn one(&mut self, kind: Kind, name: &str, help: &str, value: impl Display) {
        self.family(kind, name, help);
        self.sample(name, &[], value);
    }

    pub(crate) fn into_text(self) -> String {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_stays_in_its_quotes_whatever_it_holds() {
        let mut text = Exposition::default();
        text.family(Kind::Gauge, "oxccl_x", "An x.");
        text.sample("oxccl_x", &[("replica", "a\"} 1\n\\"), ("rank", "0")], 2.5);
        assert_eq!(
            text.into_text(),
            "# HELP oxccl_x An x.\n# TYPE oxccl_x gauge\noxccl_x{replica=\"a\\\"} 1\\n\\\\\",rank=\"0\"} 2.5\n"
        );
    }
}
