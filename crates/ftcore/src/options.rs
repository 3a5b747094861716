//! Options of a group and of a call. None is ever dropped in silence (INV-9).
//!
//! The typed fields mean what they mean in c10d and NCCL; `hints` are a backend's own. All have a string form (`text`). What a program asks
//! for is settled once, when a group is created ([`GroupOptions::resolved`]); a backend holds what it gets against the names it acts on
//! ([`GroupOptions::require_honoured`]). What it does not honour is an error, or a reported drop if the caller asked for leniency.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::identity::{parse_encrypt, without_credentials};
use crate::{Credentials, Error, Result, Stream};

mod text;

pub use text::{Resolved, VARIABLE, option_text, variable_prefix};

/// Options with which a group is created; they survive configure and split.
///
/// ```
/// use std::time::Duration;
///
/// use ftcore::GroupOptions;
///
/// let options = GroupOptions {
///     timeout: Duration::from_secs(20),
///     hints: [("connections".to_owned(), "4".to_owned())].into(),
///     ..GroupOptions::default()
/// };
/// // A backend refuses what it does not honour, and names what it knows.
/// let refused = options.require_honoured("loopback", &[]).unwrap_err();
/// assert!(refused.to_string().contains("connections"));
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct GroupOptions {
    /// How long an operation may take when the call names no deadline. Counted from submission (L35).
    pub timeout: Duration,
    /// Run on a high-priority stream.
    pub is_high_priority_stream: Option<bool>,
    /// Thread blocks per cluster.
    pub cga_cluster_size: Option<u32>,
    /// The least number of blocks (channels) to use.
    pub min_ctas: Option<u32>,
    /// The largest number of blocks (channels) to use.
    pub max_ctas: Option<u32>,
    /// The network module or interface to use.
    pub net_name: Option<String>,
    /// Whether a split group shares its parent's resources.
    pub split_share: Option<bool>,
    /// Whether calls into the vendor library may block.
    pub blocking: Option<bool>,
    /// The traffic class of the network.
    pub traffic_class: Option<u32>,
    /// A backend's own hints, by name.
    pub hints: BTreeMap<String, String>,
    /// If true, an option that the backend does not honour is reported (and logged) instead of refused.
    pub lenient: bool,
}

impl Default for GroupOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(60),
            is_high_priority_stream: None,
            cga_cluster_size: None,
            min_ctas: None,
            max_ctas: None,
            net_name: None,
            split_share: None,
            blocking: None,
            traffic_class: None,
            hints: BTreeMap::new(),
            lenient: false,
        }
    }
}

impl GroupOptions {
    /// The names of all options that were set, hints included (as `hint:<name>`).
    pub fn set_names(&self) -> Vec<String> {
        let typed = text::TYPED.iter().filter(|typed| (typed.is_set)(self));
        let mut names: Vec<String> = typed.map(|typed| typed.name.to_string()).collect();
        names.extend(self.hints.keys().map(|k| format!("hint:{k}")));
        names
    }

    /// What a backend's group proves to its peers: the credentials of the hint `credentials` (a folder), else those of the environment. The
    /// hint `encrypt` (`1` or `0`) decides whether its data connections are encrypted, else the environment
    /// ([`ENCRYPT`](crate::identity::ENCRYPT)).
    ///
    /// Errors: those of [`Credentials::load`]; `InvalidArgument` if encryption is asked for and there are no credentials.
    pub fn credentials(&self) -> Result<Option<Arc<Credentials>>> {
        let encrypt = self.hints.get("encrypt");
        let encrypt = encrypt
            .map(|text| parse_encrypt("the hint encrypt", text))
            .transpose()?;
        let credentials = match self.hints.get("credentials") {
            Some(folder) => Some(Credentials::load(Path::new(folder))?),
            None => Credentials::from_env()?,
        };
        match (credentials, encrypt) {
            (Some(credentials), Some(encrypt)) => Ok(Some(credentials.with_encryption(encrypt))),
            (None, Some(true)) => Err(without_credentials("the hint encrypt=1")),
            (credentials, _) => Ok(credentials),
        }
    }

    /// Checks what does not depend on the backend: `InvalidArgument` for a time-out of 0, with which every operation would fail.
    pub fn check(&self) -> Result<()> {
        if self.timeout.is_zero() {
            return Err(Error::invalid(
                "the time-out of the group's operations is 0, so that each would fail; leave it out for the default of 60 s",
            ));
        }
        Ok(())
    }

    /// [`check`](Self::check), and that every option set is among `honoured` (typed names, or `hint:<name>`). Returns what is dropped if
    /// `lenient`, with one warning; otherwise `InvalidArgument` naming the options and what the backend knows.
    pub fn require_honoured(&self, backend: &str, honoured: &[&str]) -> Result<Vec<String>> {
        self.check()?;
        let dropped: Vec<String> = self
            .set_names()
            .into_iter()
            .filter(|n| !honoured.contains(&n.as_str()))
            .collect();
        if dropped.is_empty() {
            return Ok(dropped);
        }
        if self.lenient {
            tracing::warn!(backend, options = ?dropped, "options not honoured by this backend were dropped, as asked for");
            return Ok(dropped);
        }
        Err(text::refusal(backend, honoured, &dropped))
    }
}

/// Options of one call.
///
/// ```
/// use std::time::Duration;
///
/// use ftcore::{ProcessGroup, ProcessGroupExt as _, ReduceOp, Result, SubmitOptions, deadline_in};
///
/// fn quick(group: &dyn ProcessGroup, values: &mut [f32]) -> Result<()> {
///     let options = SubmitOptions::by(deadline_in(Duration::from_secs(2)));
///     group.all_reduce_slice_with(values, ReduceOp::Sum, options)
/// }
/// ```
#[derive(Clone)]
pub struct SubmitOptions {
    /// The operation fails with `Timeout` at this instant. `None`: the group's time-out from submission.
    pub deadline: Option<Instant>,
    /// False: this rank takes part with the identity of the reduction and is not counted in an average (a healing or
    /// spare replica). Only for reductions, and only where the group advertises `CONTRIBUTORS`.
    pub contribute: bool,
    /// The stream after whose present end the operation reads its inputs. `None`: the inputs are ready.
    pub stream: Option<Arc<dyn Stream>>,
}

impl Default for SubmitOptions {
    fn default() -> Self {
        Self {
            deadline: None,
            contribute: true,
            stream: None,
        }
    }
}

impl SubmitOptions {
    /// The default options with a deadline.
    pub fn by(deadline: Instant) -> Self {
        Self {
            deadline: Some(deadline),
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_out_of_zero_is_refused() {
        let options = |timeout| GroupOptions {
            timeout,
            ..Default::default()
        };
        let e = options(Duration::ZERO).require_honoured("gloo", &[]).unwrap_err();
        assert!(
            e.kind() == crate::ErrorKind::InvalidArgument && e.to_string().contains("time-out"),
            "{e}"
        );
        options(Duration::from_nanos(1))
            .require_honoured("gloo", &[])
            .unwrap();
    }

    #[test]
    fn an_option_that_is_not_honoured_is_an_error_or_a_reported_drop() {
        let mut o = GroupOptions {
            net_name: Some("eth0".into()),
            min_ctas: Some(2),
            ..Default::default()
        };
        o.hints.insert("spin_us".into(), "5".into());
        let e = o
            .require_honoured("gloo", &["net_name", "hint:spin_us"])
            .unwrap_err();
        assert!(
            e.to_string().contains("min_ctas") && !e.to_string().contains("honour net_name"),
            "{e}"
        );
        o.lenient = true;
        assert_eq!(
            o.require_honoured("gloo", &["net_name", "hint:spin_us"]).unwrap(),
            ["min_ctas"]
        );
    }
}
