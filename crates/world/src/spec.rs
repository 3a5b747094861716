//! What a user writes to choose backends: `name`, or `device:backend` pairs, or nothing.

use std::fmt;
use std::str::FromStr;

use ftcore::registry::DefaultBackends;
use ftcore::{Device, DeviceKind, Error, Result};

/// Which backend serves which device.
///
/// The grammar is `name | device:backend(,device:backend)*`; spaces around names and upper case do not matter; a blank text means the
/// default of the group's device ([`DefaultBackends`]). One more entry, `messages:backend`, names what matches the messages of the others by tag.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum BackendSpec {
    /// The default backend of the group's own device.
    #[default]
    Default,
    /// This backend on the group's own device.
    Named(String),
    /// One backend for each of these device kinds, in the order written.
    ByDevice(Vec<(DeviceKind, String)>),
    /// Another one, and what matches messages for its backends: see [`ByDevice::matching`](crate::ByDevice::matching).
    Matched(Box<Self>, String),
}

/// What the entry of a backend that matches messages has in the place of a device.
pub(crate) const MESSAGES: &str = "messages";

impl BackendSpec {
    /// The backend of each device of a group whose own device is `home`: always at least one, and `home` among them. A kind that is not
    /// `home`'s is served on the device of the same index, the CPU excepted.
    ///
    /// Errors: `InvalidArgument` if `home` has no backend here; `NotFound` if its kind has no default.
    pub fn backends(&self, home: &Device) -> Result<Vec<(Device, String)>> {
        match self {
            Self::Default => {
                let table = DefaultBackends::from_env()?;
                Ok(vec![(home.clone(), table.of(&home.kind)?.to_string())])
            }
            Self::Named(name) => Ok(vec![(home.clone(), name.clone())]),
            Self::Matched(moved, _) => moved.backends(home),
            Self::ByDevice(pairs) => {
                if !pairs.iter().any(|(kind, _)| *kind == home.kind) {
                    return Err(Error::invalid(format!(
                        "'{self}' names no backend for {}, the group's own device; add {}:NAME",
                        home, home.kind
                    )));
                }
                Ok(pairs
                    .iter()
                    .map(|(kind, name)| (on(kind, home), name.clone()))
                    .collect())
            }
        }
    }
}

impl BackendSpec {
    /// The backend that matches messages for the others.
    pub fn messages(&self) -> Option<&str> {
        match self {
            Self::Matched(_, name) => Some(name),
            _ => None,
        }
    }

    /// The own device of a group with these backends that is made by ranks whose device is `device`: that one if it is served, otherwise the
    /// first that is.
    ///
    /// Errors: `InvalidArgument` if there is none.
    pub(crate) fn home(&self, device: &Device) -> Result<Device> {
        let pairs = match self {
            Self::Default | Self::Named(_) => return Ok(device.clone()),
            Self::Matched(moved, _) => return moved.home(device),
            Self::ByDevice(pairs) => pairs,
        };
        if pairs.iter().any(|(kind, _)| *kind == device.kind) {
            return Ok(device.clone());
        }
        let (first, _) = pairs
            .first()
            .ok_or_else(|| Error::invalid("a list of backends without a device"))?;
        Ok(on(first, device))
    }
}

/// The device of this kind that goes with `home`: of the same index, the CPU excepted.
fn on(kind: &DeviceKind, home: &Device) -> Device {
    match kind {
        DeviceKind::Cpu => Device::CPU,
        kind => Device::new(kind.clone(), home.index),
    }
}

impl FromStr for BackendSpec {
    type Err = Error;

    /// Errors: `InvalidArgument` quotes the entry that is wrong and says at which character it begins.
    fn from_str(text: &str) -> Result<Self> {
        if text.trim().is_empty() {
            return Ok(Self::Default);
        }
        if !text.contains([':', ',']) {
            return ftcore::registry::check_name(text.trim()).map(Self::Named);
        }
        if let Some((name, entry)) = one_and_messages(text) {
            let mut messages = ftcore::registry::device_pairs(entry)?;
            let name = ftcore::registry::check_name(name)?;
            let messages = messages.pop().map(|(_, messages)| messages).unwrap_or_default();
            return Ok(Self::Matched(Box::new(Self::Named(name)), messages));
        }
        let mut pairs = ftcore::registry::device_pairs(text)?;
        let Some(at) = pairs.iter().position(|(kind, _)| kind.name() == MESSAGES) else {
            return Ok(Self::ByDevice(pairs));
        };
        let (_, messages) = pairs.remove(at);
        let moved = match pairs.is_empty() {
            true => Self::Default,
            false => Self::ByDevice(pairs),
        };
        Ok(Self::Matched(Box::new(moved), messages))
    }
}

/// `name,messages:backend`, in either order: the name, and the entry.
fn one_and_messages(text: &str) -> Option<(&str, &str)> {
    let (a, b) = text.split_once(',')?;
    let is_entry = |entry: &str| {
        let before = entry.split_once(':').map(|(before, _)| before.trim());
        !entry.contains(',') && before.is_some_and(|before| before.eq_ignore_ascii_case(MESSAGES))
    };
    let found = [(a, b), (b, a)].into_iter();
    let mut found = found.filter(|(name, entry)| !name.contains([':', ',']) && is_entry(entry));
    found.next().map(|(name, entry)| (name.trim(), entry.trim()))
}

impl fmt::Display for BackendSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("the default backend"),
            Self::Named(name) => f.write_str(name),
            Self::Matched(moved, name) => match **moved {
                Self::Default => write!(f, "{MESSAGES}:{name}"),
                _ => write!(f, "{moved},{MESSAGES}:{name}"),
            },
            Self::ByDevice(pairs) => {
                for (n, (kind, name)) in pairs.iter().enumerate() {
                    let comma = if n == 0 { "" } else { "," };
                    write!(f, "{comma}{kind}:{name}")?;
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use ftcore::ErrorKind;

    use super::*;

    fn cuda(index: u32) -> Device {
        Device::new(DeviceKind::Cuda, index)
    }

    #[test]
    fn one_name_serves_the_groups_own_device_and_pairs_serve_theirs() {
        let one: BackendSpec = " Gloo ".parse().unwrap();
        assert_eq!(one.backends(&cuda(3)).unwrap(), [(cuda(3), "gloo".to_string())]);
        let two: BackendSpec = "CPU:gloo, cuda:NCCL".parse().unwrap();
        assert_eq!(two.to_string(), "cpu:gloo,cuda:nccl");
        let served = two.backends(&cuda(3)).unwrap();
        assert_eq!(
            served,
            [(Device::CPU, "gloo".to_string()), (cuda(3), "nccl".to_string())]
        );
        let nothing: BackendSpec = "  ".parse().unwrap();
        assert_eq!(
            nothing.backends(&Device::CPU).unwrap(),
            [(Device::CPU, "gloo".to_string())]
        );
    }

    #[test]
    fn one_entry_more_names_what_matches_messages() {
        for (text, normal, served) in [
            (
                "cpu:gloo,cuda:nccl,messages:gloo",
                "cpu:gloo,cuda:nccl,messages:gloo",
                2,
            ),
            (
                "Messages:Gloo, cuda:nccl , cpu:gloo",
                "cuda:nccl,cpu:gloo,messages:gloo",
                2,
            ),
            ("nccl, messages:gloo", "nccl,messages:gloo", 1),
            ("messages : gloo,NCCL", "nccl,messages:gloo", 1),
            ("messages:gloo", "messages:gloo", 1),
        ] {
            let spec: BackendSpec = text.parse().unwrap();
            assert_eq!(
                (spec.to_string().as_str(), spec.messages()),
                (normal, Some("gloo"))
            );
            assert_eq!(spec.to_string().parse::<BackendSpec>().unwrap(), spec);
            let backends = spec.backends(&cuda(1)).unwrap();
            assert_eq!(backends.len(), served, "{text}");
            assert!(backends.contains(&(cuda(1), "nccl".to_string())), "{text}");
            assert_eq!(spec.home(&cuda(1)).unwrap(), cuda(1));
        }
        assert_eq!("cpu:gloo".parse::<BackendSpec>().unwrap().messages(), None);
    }

    #[test]
    fn the_groups_own_device_must_be_served() {
        let e = "cpu:gloo"
            .parse::<BackendSpec>()
            .unwrap()
            .backends(&cuda(0))
            .unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidArgument);
        assert!(e.to_string().contains("add cuda:NAME"), "{e}");
    }

    #[test]
    fn l44_what_is_wrong_is_named_with_its_position() {
        for (text, says) in [
            ("cpu:gloo,cuda", "'cuda' at character 10"),
            ("cpu:gloo,cpu:other", "'cpu:other' at character 10"),
            ("cpu:", "at character 1"),
            ("two words", "spaces"),
            ("cpu;gloo", "'cpu;gloo' is not a backend name"),
            ("cpu:gloo;cuda:nccl", "'cpu:gloo;cuda:nccl' at character 1"),
            ("cpu=gloo", "'cpu=gloo' is not a backend name"),
            ("xccl,messages:", "'messages:' at character 1"),
            ("messages:gloo,messages:gloo", "at character 15"),
            ("xccl,messages:gloo,cpu:gloo", "'xccl' at character 1"),
        ] {
            let e = text.parse::<BackendSpec>().unwrap_err();
            assert!(e.to_string().contains(says), "{text}: {e}");
        }
    }
}
