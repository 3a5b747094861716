//! What a user writes to choose backends: `name`, or `device:backend` pairs, or nothing.

use std::fmt;
use std::str::FromStr;

use ftcore::registry::DefaultBackends;
use ftcore::{Device, DeviceKind, Error, Result};

/// Which backend serves which device.
///
/// The grammar is `name | device:backend(,device:backend)*`; spaces around names and upper case do not matter; a blank text means the
/// default of the group's device ([`DefaultBackends`]).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum BackendSpec {
    /// The default backend of the group's own device.
    #[default]
    Default,
    /// This backend on the group's own device.
    Named(String),
    /// One backend for each of these device kinds, in the order written.
    ByDevice(Vec<(DeviceKind, String)>),
}

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
    /// The own device of a group with these backends that is made by ranks whose device is `device`: that one if it is served, otherwise the
    /// first that is.
    ///
    /// Errors: `InvalidArgument` if there is none.
    pub(crate) fn home(&self, device: &Device) -> Result<Device> {
        let Self::ByDevice(pairs) = self else {
            return Ok(device.clone());
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
        ftcore::registry::device_pairs(text).map(Self::ByDevice)
    }
}

impl fmt::Display for BackendSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("the default backend"),
            Self::Named(name) => f.write_str(name),
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
        ] {
            let e = text.parse::<BackendSpec>().unwrap_err();
            assert!(e.to_string().contains(says), "{text}: {e}");
        }
    }
}
