//! What a group is told when it is made, as the library is told it, and what all ranks must have in common.

use std::sync::Arc;
use std::time::Duration;

use ftcore::peers::{Door, Terms};
use ftcore::{Credentials, Error, GroupOptions, Result, agreement};
use nccl_sys::Version;

use crate::raw::Wish;

/// `hint:contributors`: `count` (the default) adds a reduction of one integer to every reduction, so that averages divide by who
/// contributed; `all` leaves it out: every rank always contributes and averages are NCCL's own.
pub(crate) const HINT_CONTRIBUTORS: &str = "hint:contributors";

/// `hint:credentials`: the folder of the job's credentials, which ranks prove to each other on the control connections; without it those of the
/// environment.
pub(crate) const HINT_CREDENTIALS: &str = "hint:credentials";
/// `hint:encrypt`: `1` encrypts the control connections. What NCCL sends itself is not encrypted.
pub(crate) const HINT_ENCRYPT: &str = "hint:encrypt";

/// The options that are acted on; any other is refused (INV-9).
pub(crate) const HONOURED: [&str; 14] = [
    "is_high_priority_stream",
    "cga_cluster_size",
    "min_ctas",
    "max_ctas",
    "net_name",
    "split_share",
    "blocking",
    "traffic_class",
    HINT_CONTRIBUTORS,
    HINT_CREDENTIALS,
    HINT_ENCRYPT,
    agreement::OPTION,
    "variable:PATH",
    "variable:HOST",
];

/// The options in the form in which they are used.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// The time-out of calls that name no deadline.
    pub(crate) timeout: Duration,
    pub(crate) high_priority: bool,
    /// False: every rank always contributes.
    pub(crate) count_contributors: bool,
    /// Whether ranks compare what they call before it is enqueued.
    pub(crate) detects: bool,
    /// What ranks prove to each other.
    pub(crate) credentials: Option<Arc<Credentials>>,
    door: Door,
    wish: Wish,
    version: Version,
    /// As given: a split group is made with the same (L42).
    pub(crate) options: GroupOptions,
}

impl Settings {
    /// Errors: `InvalidArgument` for an option that is not honoured, or a value out of range.
    pub(crate) fn new(options: GroupOptions, version: Version) -> Result<Self> {
        // Also for groups that no registry makes; once more changes nothing.
        let options = options.resolved("nccl", &HONOURED)?.options;
        let count_contributors = match options.hints.get("contributors").map(String::as_str) {
            None | Some("count") => true,
            Some("all") => false,
            Some(other) => {
                return Err(Error::invalid(format!(
                    "option contributors is '{other}'; it can be count or all"
                )));
            }
        };
        if let (Some(min), Some(max)) = (options.min_ctas, options.max_ctas)
            && min > max
        {
            return Err(Error::invalid(format!(
                "min_ctas {min} is larger than max_ctas {max}"
            )));
        }
        for (name, value) in [("min_ctas", options.min_ctas), ("max_ctas", options.max_ctas)] {
            if value == Some(0) {
                return Err(Error::invalid(format!("{name} is 0; it is at least 1")));
            }
        }
        if options.net_name.as_ref().is_some_and(|name| name.contains('\0')) {
            return Err(Error::invalid(
                "net_name holds a zero byte, which NCCL cannot be told",
            ));
        }
        let detects = agreement::is_asked_for(&options)?;
        let credentials = options.credentials()?;
        let wish = Wish {
            // Deadlines need calls that return: blocking ones are made only if asked for.
            blocking: options.blocking.unwrap_or(false),
            cga_cluster_size: options.cga_cluster_size,
            min_ctas: options.min_ctas,
            max_ctas: options.max_ctas,
            net_name: options.net_name.clone(),
            split_share: options.split_share,
            traffic_class: options.traffic_class,
            name: String::new(),
        };
        Ok(Self {
            timeout: options.timeout,
            high_priority: options.is_high_priority_stream.unwrap_or(false),
            count_contributors,
            detects,
            credentials,
            door: Door::of("nccl"),
            wish,
            version,
            options,
        })
    }

    /// What a communicator called `name` is made with.
    pub(crate) fn wish(&self, name: &str) -> Wish {
        Wish {
            name: name.to_string(),
            ..self.wish.clone()
        }
    }

    /// How ranks meet.
    pub(crate) fn terms(&self) -> Terms {
        let counted = if self.count_contributors { "counted" } else { "all" };
        let detects = if self.detects { "on" } else { "off" };
        let Version(number) = self.version;
        Terms {
            backend: "nccl",
            // Minor versions work together.
            setup: format!(
                "NCCL {}.{}, contributors {counted}, mismatch detection {detects}, {}",
                number / 10_000,
                number / 100 % 100,
                if cfg!(target_endian = "little") {
                    "little endian"
                } else {
                    "big endian"
                },
            ),
            one_per_process: false,
            credentials: self.credentials.clone(),
            door: self.door.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEW: Version = Version::new(2, 30, 7);

    #[test]
    fn values_out_of_range_are_refused_by_name() {
        let bad = |f: fn(&mut GroupOptions)| {
            let mut options = GroupOptions::default();
            f(&mut options);
            Settings::new(options, NEW).unwrap_err().to_string()
        };
        assert!(bad(|o| o.min_ctas = Some(0)).contains("min_ctas"));
        assert!(bad(|o| (o.min_ctas, o.max_ctas) = (Some(5), Some(4))).contains("larger than max_ctas"));
        assert!(bad(|o| drop(o.hints.insert("contributors".into(), "some".into()))).contains("'some'"));
        assert!(bad(|o| o.net_name = Some("a\0b".into())).contains("net_name"));
        assert!(bad(|o| drop(o.hints.insert("nonsense".into(), "1".into()))).contains("hint:nonsense"));
    }

    #[test]
    fn groups_that_count_or_compare_and_groups_that_do_not_cannot_meet() {
        let setup = |hint: &[(&str, &str)]| {
            let mut options = GroupOptions::default();
            let hints = hint
                .iter()
                .map(|(name, value)| (name.to_string(), value.to_string()));
            options.hints.extend(hints);
            Settings::new(options, NEW).unwrap().terms().setup
        };
        assert_ne!(setup(&[]), setup(&[("contributors", "all")]));
        assert_ne!(setup(&[]), setup(&[("mismatch_detection", "on")]));
        assert_eq!(setup(&[]), setup(&[("mismatch_detection", "off")]));
    }
}
