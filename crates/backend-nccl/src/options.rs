//! What a group is told when it is made, as the library is told it, and what all ranks must have in common.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ftcore::{Credentials, Error, GroupOptions, Result};
use nccl_sys::{Config, Version};

use crate::buffers::Kind;
use crate::raw::{Nccl, Wish};

/// `hint:contributors`: `count` (the default) adds a reduction of one integer to every reduction, so that averages divide by who
/// contributed; `all` leaves it out: everybody always contributes and averages are NCCL's own.
pub(crate) const HINT_CONTRIBUTORS: &str = "hint:contributors";

/// `hint:credentials`: the folder of the job's credentials, which ranks prove to each other on the control connections; without it those of the
/// environment.
pub(crate) const HINT_CREDENTIALS: &str = "hint:credentials";

/// `hint:buffers`: what `NcclGroup::alloc` gives; `plain` (the default), `registered` or `window`.
pub(crate) const HINT_BUFFERS: &str = "hint:buffers";

/// `hint:reuse_communicators`: `off` (the default), or `on`: the communicator of a new configuration is made out of the last one's.
pub(crate) const HINT_REUSE: &str = "hint:reuse_communicators";

/// `hint:revoke_ms`: how long a failed communicator gets to be revoked before it is aborted instead, with `reuse_communicators=on`.
/// An abort takes so much longer, at the most (INV-2).
pub(crate) const HINT_REVOKE: &str = "hint:revoke_ms";
/// Half of what an abort may take.
pub(crate) const REVOKE: Duration = Duration::from_millis(40);
const LONGEST_REVOKE: u64 = 60_000;

/// What the library at hand has, as far as options depend on it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Offer {
    pub(crate) version: Version,
    /// The function that is missing for it.
    pub(crate) lacks_registered: Option<&'static str>,
    pub(crate) lacks_windows: Option<&'static str>,
    pub(crate) lacks_reuse: Option<&'static str>,
    pub(crate) grows: bool,
}

impl Offer {
    pub(crate) fn of(nccl: &Nccl) -> Self {
        Self {
            version: nccl.version(),
            lacks_registered: nccl.lacks_for_registered(),
            lacks_windows: nccl.lacks_for_windows(),
            lacks_reuse: nccl.lacks_for_reuse(),
            grows: nccl.can_grow(),
        }
    }

    /// Of a library that is not there.
    pub(crate) const fn none(version: Version) -> Self {
        Self {
            version,
            lacks_registered: Some("ncclMemAlloc"),
            lacks_windows: Some("ncclMemAlloc"),
            lacks_reuse: Some("ncclCommRevoke"),
            grows: false,
        }
    }
}

/// What the hint asks for. `InvalidArgument` for what this library cannot do, or `Plain` with a warning if `lenient`.
fn buffers(options: &GroupOptions, offer: &Offer) -> Result<Kind> {
    let (kind, lacks) = match options.hints.get("buffers").map(String::as_str) {
        None | Some("plain") => return Ok(Kind::Plain),
        Some("registered") => (Kind::Registered, offer.lacks_registered),
        Some("window") => (Kind::Window, offer.lacks_windows),
        Some(other) => {
            return Err(Error::invalid(format!(
                "{HINT_BUFFERS} is '{other}'; it is 'plain', 'registered' or 'window'"
            )));
        }
    };
    Ok(match can(HINT_BUFFERS, lacks, options, offer)? {
        true => kind,
        false => Kind::Plain,
    })
}

/// True if nothing is lacking for `hint`; an error that names the function otherwise, or false with a warning if `lenient`.
fn can(hint: &str, lacks: Option<&'static str>, options: &GroupOptions, offer: &Offer) -> Result<bool> {
    let Some(function) = lacks else {
        return Ok(true);
    };
    let text = format!("{hint} needs {function}, which NCCL {} has not", offer.version);
    if options.lenient {
        tracing::warn!(backend = "nccl", "{text}; it is dropped, as asked for");
        return Ok(false);
    }
    Err(Error::invalid(format!("{text}. Remove it or set `lenient`")))
}

/// Whether communicators are used again.
fn reuse(options: &GroupOptions, offer: &Offer) -> Result<bool> {
    match options.hints.get("reuse_communicators").map(String::as_str) {
        None | Some("off") => Ok(false),
        Some("on") => can(HINT_REUSE, offer.lacks_reuse, options, offer),
        Some(other) => Err(Error::invalid(format!(
            "{HINT_REUSE} is '{other}'; it is 'on' or 'off'"
        ))),
    }
}

/// How long a communicator gets to be revoked.
fn revoke_within(options: &GroupOptions) -> Result<Duration> {
    let Some(text) = options.hints.get("revoke_ms") else {
        return Ok(REVOKE);
    };
    let fits = text.parse().ok().filter(|ms| (1..=LONGEST_REVOKE).contains(ms));
    fits.map(Duration::from_millis).ok_or_else(|| {
        Error::invalid(format!(
            "{HINT_REVOKE} is '{text}'; it is a number of milliseconds from 1 to {LONGEST_REVOKE}"
        ))
    })
}

/// The options that are acted on with `version`; any other is refused (INV-9).
pub(crate) fn honoured(version: Version) -> Vec<&'static str> {
    let mut names = vec![
        "is_high_priority_stream",
        "cga_cluster_size",
        "min_ctas",
        "max_ctas",
        "net_name",
        "split_share",
        "blocking",
        HINT_CONTRIBUTORS,
        HINT_BUFFERS,
        HINT_CREDENTIALS,
        HINT_REUSE,
        HINT_REVOKE,
    ];
    if version >= Config::TRAFFIC_CLASS {
        names.push("traffic_class");
    }
    names
}

/// The options in the form in which they are used.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// The time-out of calls that name no deadline.
    pub(crate) timeout: Duration,
    pub(crate) high_priority: bool,
    /// False: everybody always contributes.
    pub(crate) count_contributors: bool,
    /// What `NcclGroup::alloc` gives.
    pub(crate) buffers: Kind,
    /// A communicator is left to the next configuration.
    pub(crate) reuse: bool,
    /// How long it gets to be revoked for that.
    pub(crate) revoke_within: Duration,
    /// What ranks prove to each other.
    pub(crate) credentials: Option<Arc<Credentials>>,
    wish: Wish,
    version: Version,
    /// As given: a split group is made with the same (L42).
    pub(crate) options: GroupOptions,
}

impl Settings {
    /// Errors: `InvalidArgument` for an option that is not honoured, or a value out of range.
    pub(crate) fn new(options: GroupOptions, offer: &Offer) -> Result<Self> {
        let version = offer.version;
        let dropped = options.require_honoured("nccl", &honoured(version))?;
        let count_contributors = match options.hints.get("contributors").map(String::as_str) {
            None | Some("count") => true,
            Some("all") => false,
            Some(other) => {
                return Err(Error::invalid(format!(
                    "{HINT_CONTRIBUTORS} is '{other}'; it is 'count' or 'all'"
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
        let buffers = buffers(&options, offer)?;
        let reuse = reuse(&options, offer)?;
        let revoke_within = revoke_within(&options)?;
        let credentials = match options.hints.get("credentials") {
            Some(folder) => Some(Credentials::load(Path::new(folder))?),
            None => Credentials::from_env()?,
        };
        let keeps = |name: &str| !dropped.iter().any(|d| d == name);
        let wish = Wish {
            // Deadlines need calls that return: blocking ones are made only if asked for.
            blocking: options.blocking.unwrap_or(false),
            cga_cluster_size: options.cga_cluster_size,
            min_ctas: options.min_ctas,
            max_ctas: options.max_ctas,
            net_name: options.net_name.clone(),
            split_share: options.split_share,
            traffic_class: options.traffic_class.filter(|_| keeps("traffic_class")),
            name: String::new(),
        };
        Ok(Self {
            timeout: options.timeout,
            high_priority: options.is_high_priority_stream.unwrap_or(false),
            count_contributors,
            buffers,
            reuse,
            revoke_within,
            credentials,
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

    /// A hash of what all ranks must have in common.
    pub(crate) fn constants(&self) -> u64 {
        let parts = [
            u64::from(crate::control::VERSION),
            u64::from(self.version.0 / 100),
            u64::from(self.count_contributors),
            // A window is made by all ranks together; the others' buffers are each rank's own affair.
            u64::from(self.buffers == Kind::Window),
            u64::from(self.reuse),
            u64::from(u16::from_ne_bytes([1, 0])),
        ];
        parts.iter().fold(0xCBF2_9CE4_8422_2325, |hash, part| {
            (hash ^ part).wrapping_mul(0x0000_0100_0000_01B3)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEW: &Offer = &offer(Version::new(2, 30, 7));
    const OLD: &Offer = &offer(Version::new(2, 21, 5));

    const fn offer(version: Version) -> Offer {
        Offer {
            version,
            lacks_registered: None,
            lacks_windows: None,
            lacks_reuse: None,
            grows: true,
        }
    }

    #[test]
    fn an_option_that_this_version_does_not_read_is_refused_or_dropped_aloud() {
        let options = GroupOptions {
            traffic_class: Some(3),
            ..Default::default()
        };
        assert_eq!(
            Settings::new(options.clone(), NEW)
                .unwrap()
                .wish("a")
                .traffic_class,
            Some(3)
        );
        let e = Settings::new(options.clone(), OLD).unwrap_err();
        assert!(e.to_string().contains("traffic_class"), "{e}");
        let lenient = GroupOptions {
            lenient: true,
            ..options
        };
        assert_eq!(Settings::new(lenient, OLD).unwrap().wish("a").traffic_class, None);
    }

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
        assert!(bad(|o| drop(o.hints.insert("buffers".into(), "fast".into()))).contains("'fast'"));
        for odd in ["0", "60001", "-1", "soon", ""] {
            let mut options = GroupOptions::default();
            options.hints.insert("revoke_ms".into(), odd.into());
            let e = Settings::new(options, NEW).unwrap_err().to_string();
            assert!(e.contains("revoke_ms") && e.contains("1 to 60000"), "{e}");
        }
        assert!(bad(|o| o.net_name = Some("a\0b".into())).contains("net_name"));
        assert!(bad(|o| drop(o.hints.insert("nonsense".into(), "1".into()))).contains("hint:nonsense"));
    }

    #[test]
    fn buffers_that_the_library_cannot_register_are_refused_or_dropped_aloud() {
        let mut options = GroupOptions::default();
        options.hints.insert("buffers".into(), "window".into());
        assert_eq!(Settings::new(options.clone(), NEW).unwrap().buffers, Kind::Window);
        let lacking = Offer {
            lacks_windows: Some("ncclCommWindowRegister"),
            ..*OLD
        };
        let e = Settings::new(options.clone(), &lacking).unwrap_err().to_string();
        assert!(
            e.contains("ncclCommWindowRegister") && e.contains("2.21.5"),
            "{e}"
        );
        options.lenient = true;
        assert_eq!(Settings::new(options, &lacking).unwrap().buffers, Kind::Plain);
    }

    #[test]
    fn reuse_without_the_functions_for_it_is_refused_or_dropped_aloud() {
        let mut options = GroupOptions::default();
        assert!(!Settings::new(options.clone(), NEW).unwrap().reuse);
        options.hints.insert("reuse_communicators".into(), "on".into());
        assert!(Settings::new(options.clone(), NEW).unwrap().reuse);
        let lacking = Offer {
            lacks_reuse: Some("ncclCommRevoke"),
            ..*OLD
        };
        let e = Settings::new(options.clone(), &lacking).unwrap_err().to_string();
        assert!(
            e.contains("ncclCommRevoke") && e.contains("reuse_communicators"),
            "{e}"
        );
        options.lenient = true;
        assert!(!Settings::new(options.clone(), &lacking).unwrap().reuse);
        options
            .hints
            .insert("reuse_communicators".into(), "perhaps".into());
        let e = Settings::new(options, NEW).unwrap_err().to_string();
        assert!(e.contains("'perhaps'"), "{e}");
    }

    #[test]
    fn groups_that_count_and_groups_that_do_not_cannot_meet() {
        let mut all = GroupOptions::default();
        all.hints.insert("contributors".into(), "all".into());
        let a = Settings::new(GroupOptions::default(), NEW).unwrap().constants();
        let b = Settings::new(all, NEW).unwrap().constants();
        assert_ne!(a, b);
    }
}
