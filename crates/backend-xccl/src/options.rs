//! Options of a group on host memory, and what each becomes (INV-9).
//!
//! - `net_name`: the network interface, for oneCCL's rendezvous and its TCP provider. It is chosen by environment variables
//!   that are read once, so all groups of a process have the same one, and one that the user set there wins over nothing.
//! - `blocking`: calls always block a thread of ours; `true` says so, `false` is refused.
//! - hint `contributors`: `count` (the default), `call` or `off`. Ranks of one host count beside the data (`tally`); between hosts,
//!   and with `call`, counting costs small all-reduces two copies and large ones a second, tiny one. Off, averages divide by the
//!   world size and the feature is not advertised. All ranks must say the same.
//!
//! - hint `mismatch_detection`: `off` (the default) or `on`. On, all ranks compare what they call before each collective, through the store
//!   (`ftcore::agreement`), and the feature is advertised. All ranks must say the same.
//! - hints `credentials` and `encrypt`: what ranks prove to each other on the control connections (`ftcore::peers`), and whether these are
//!   encrypted; without them those of the environment. What oneCCL sends itself is neither.
//!
//! `cga_cluster_size`, `min_ctas`, `max_ctas`, stream priorities and `split_share` steer GPU kernels; oneCCL's C API takes none of
//! them, on any device.

use std::sync::Arc;
use std::time::Duration;

use ftcore::peers::{Door, Terms};
use ftcore::{Credentials, Error, ErrorKind, GroupOptions, Result, agreement};
use oneccl_sys::Library;

/// What groups on host memory act on.
pub(crate) const HONOURED: &[&str] = &[
    "net_name",
    "blocking",
    "hint:contributors",
    agreement::OPTION,
    "hint:credentials",
    "hint:encrypt",
    "variable:PATH",
    "variable:HOST",
    "variable:STDOUT",
    "variable:PLUGIN_CHOSEN",
];

/// The options of a group, read; the children of a split have the same.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) timeout: Duration,
    pub(crate) counted: bool,
    /// Beside the data, where the ranks share a host.
    pub(crate) beside: bool,
    /// Whether ranks compare their collectives before they call the library.
    pub(crate) detects: bool,
    /// What ranks prove to each other on the control connections.
    pub(crate) credentials: Option<Arc<Credentials>>,
    door: Door,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            timeout: GroupOptions::default().timeout,
            counted: true,
            beside: true,
            detects: false,
            credentials: None,
            door: Door::default(),
        }
    }
}

impl Settings {
    /// Reads the options; what is not honoured is `InvalidArgument`, an interface that cannot be chosen any more `Conflict`.
    pub(crate) fn new(options: GroupOptions) -> Result<Self> {
        // Also for groups that no registry makes; once more changes nothing.
        let options = options.resolved("xccl", HONOURED)?.options;
        if options.blocking == Some(false) {
            return Err(Error::invalid(
                "option blocking is false; with backend 'xccl' it can be true only: oneCCL has no other calls than blocking ones",
            ));
        }
        let (counted, beside) = match options.hints.get("contributors").map(String::as_str) {
            None | Some("count") => (true, true),
            Some("call") => (true, false),
            Some("off") => (false, false),
            Some(other) => {
                return Err(Error::invalid(format!(
                    "option contributors is '{other}'; it can be count, call or off"
                )));
            }
        };
        let detects = agreement::is_asked_for(&options)?;
        let credentials = options.credentials()?;
        if let Some(name) = &options.net_name {
            oneccl_sys::environment::use_interface(name).map_err(|(variable, value)| {
                Error::new(
                    ErrorKind::Conflict,
                    format!(
                        "net_name is '{name}', but {variable}={value} was set before: oneCCL takes one interface per process"
                    ),
                )
            })?;
        }
        Ok(Self {
            timeout: options.timeout,
            counted,
            beside,
            detects,
            credentials,
            door: Door::of("xccl"),
        })
    }

    /// How ranks meet that use `library`.
    pub(crate) fn terms(&self, library: &Library) -> Terms {
        let counted = match (self.counted, self.beside) {
            (false, _) => "off",
            (true, false) => "call",
            (true, true) => "count",
        };
        let detects = if self.detects { "on" } else { "off" };
        Terms {
            backend: "xccl",
            setup: format!(
                "oneCCL {}, contributors {counted}, mismatch detection {detects}",
                library.version
            ),
            one_per_process: true,
            credentials: self.credentials.clone(),
            door: self.door.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn l42_options_are_honoured_or_refused_by_name() {
        let mut o = GroupOptions {
            blocking: Some(true),
            ..Default::default()
        };
        o.hints.insert("contributors".into(), "off".into());
        assert!(!Settings::new(o.clone()).unwrap().counted);
        o.hints.insert("contributors".into(), "perhaps".into());
        assert!(Settings::new(o.clone()).is_err());
        o.hints.clear();
        assert!(!Settings::new(o.clone()).unwrap().detects);
        o.hints.insert("mismatch_detection".into(), "on".into());
        assert!(Settings::new(o.clone()).unwrap().detects);
        o.hints.insert("mismatch_detection".into(), "true".into());
        let e = Settings::new(o.clone()).unwrap_err();
        assert!(e.to_string().contains("mismatch_detection is 'true'"), "{e}");
        o.hints.clear();
        o.blocking = Some(false);
        assert!(
            Settings::new(o.clone())
                .unwrap_err()
                .to_string()
                .contains("blocking")
        );
        o.blocking = None;
        o.max_ctas = Some(4);
        let e = Settings::new(o).unwrap_err();
        assert!(e.to_string().contains("max_ctas"), "{e}");
    }
}
