//! Which backend serves a device when the caller names none: an explicit table, never the order of loading.
//!
//! Built in: cpu gloo, cuda nccl, xpu xccl, hpu hccl. The environment variable `OXCCL_DEFAULT_BACKEND` puts entries
//! over it: `cpu:gloo,hpu:hccl`.

use std::collections::BTreeMap;

use crate::registry::check_name;
use crate::{DeviceKind, Error, ErrorKind, Result};

/// The environment variable that overrides the built-in table.
pub const ENV_DEFAULT_BACKEND: &str = "OXCCL_DEFAULT_BACKEND";

/// The name of the default backend of each device kind. A name in it need not be registered in this program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DefaultBackends(BTreeMap<DeviceKind, String>);

impl DefaultBackends {
    /// The table without any override.
    pub fn built_in() -> Self {
        let table = [
            (DeviceKind::Cpu, "gloo"),
            (DeviceKind::Cuda, "nccl"),
            (DeviceKind::Xpu, "xccl"),
            (DeviceKind::Hpu, "hccl"),
        ];
        Self(table.map(|(device, name)| (device, name.to_string())).into())
    }

    /// The table with the overrides of `spec`: `device:backend` entries separated by commas. Spaces around names and
    /// upper case do not matter; a blank `spec` overrides nothing.
    ///
    /// Errors: those of [`device_pairs`].
    pub fn parse(spec: &str) -> Result<Self> {
        let mut table = Self::built_in();
        if spec.trim().is_empty() {
            return Ok(table);
        }
        table.0.extend(device_pairs(spec)?);
        Ok(table)
    }

    /// The table of this process: the built-in one, overridden by `OXCCL_DEFAULT_BACKEND`.
    ///
    /// Errors: `InvalidArgument` naming the variable.
    pub fn from_env() -> Result<Self> {
        let Some(spec) = std::env::var_os(ENV_DEFAULT_BACKEND) else {
            return Ok(Self::built_in());
        };
        let named = |text: &str| Error::invalid(format!("{ENV_DEFAULT_BACKEND}: {text}"));
        let spec = spec.to_str().ok_or_else(|| named("it is not UTF-8"))?;
        Self::parse(spec).map_err(|e| named(e.message()))
    }

    /// The default backend of `device`.
    ///
    /// Errors: `NotFound` says how to name one.
    pub fn of(&self, device: &DeviceKind) -> Result<&str> {
        self.0.get(device).map(String::as_str).ok_or_else(|| {
            let text = format!("no default backend for {device}; set {ENV_DEFAULT_BACKEND}={device}:NAME");
            Error::new(ErrorKind::NotFound, text)
        })
    }

    /// Every entry, sorted by device kind.
    pub fn iter(&self) -> impl Iterator<Item = (&DeviceKind, &str)> {
        self.0.iter().map(|(device, name)| (device, name.as_str()))
    }
}

/// `device:backend` entries separated by commas, in the order written. Spaces around names and upper case do not matter.
///
/// Errors: `InvalidArgument` for an entry that is empty, has not exactly one ':', names no device kind or no
/// backend, or names a device for the second time; the text quotes the entry and the character where it begins.
pub fn device_pairs(spec: &str) -> Result<Vec<(DeviceKind, String)>> {
    let mut pairs: Vec<(DeviceKind, String)> = Vec::new();
    // Positions count characters from 1, as a user does.
    let mut position = 1;
    for entry in spec.split(',') {
        let blanks = entry.chars().take_while(|c| c.is_whitespace()).count();
        let wrong = |why: String| {
            Error::invalid(format!(
                "'{}' at character {} of '{spec}' is not device:backend: {why}",
                entry.trim(),
                position + blanks,
            ))
        };
        let (device, name) = entry
            .split_once(':')
            .ok_or_else(|| wrong("there is no ':'".to_string()))?;
        let device: DeviceKind = device
            .parse()
            .map_err(|e: Error| wrong(e.message().to_string()))?;
        let name = check_name(name.trim()).map_err(|e| wrong(e.message().to_string()))?;
        if pairs.iter().any(|(known, _)| *known == device) {
            return Err(wrong(format!("{device} has an entry before it")));
        }
        pairs.push((device, name));
        position += entry.chars().count() + 1;
    }
    Ok(pairs)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn npu() -> DeviceKind {
        DeviceKind::Named("npu".into())
    }

    #[test]
    fn every_known_device_has_a_default_and_an_unknown_one_says_how_to_name_it() {
        let table = DefaultBackends::built_in();
        for (device, name) in [
            (DeviceKind::Cpu, "gloo"),
            (DeviceKind::Cuda, "nccl"),
            (DeviceKind::Xpu, "xccl"),
            (DeviceKind::Hpu, "hccl"),
        ] {
            assert_eq!(table.of(&device).unwrap(), name);
        }
        let e = table.of(&npu()).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::NotFound);
        assert!(e.to_string().contains("OXCCL_DEFAULT_BACKEND=npu:NAME"), "{e}");
    }

    #[test]
    fn entries_override_in_any_case_with_spaces_and_leave_the_rest_alone() {
        let table = DefaultBackends::parse(" HPU : Vendor ,npu:acme").unwrap();
        assert_eq!(table.of(&DeviceKind::Hpu).unwrap(), "vendor");
        assert_eq!(table.of(&npu()).unwrap(), "acme");
        assert_eq!(table.of(&DeviceKind::Cpu).unwrap(), "gloo");
        assert_eq!(table.iter().count(), 5);
        assert_eq!(DefaultBackends::parse("  ").unwrap(), DefaultBackends::built_in());
    }

    #[test]
    fn l44_a_wrong_entry_is_refused_with_its_position() {
        for (spec, position, why) in [
            ("gloo", 1, "no ':'"),
            ("cpu:", 1, "''"),
            (":", 1, "''"),
            (":gloo", 1, "device kind"),
            ("cpu:gloo,", 10, "no ':'"),
            ("cpu:gloo, hpu", 11, "no ':'"),
            ("cpu:gloo,cpu:other", 10, "before it"),
            ("cpu:gloo, hpu:a:b", 11, "'a:b'"),
            ("cpu:two words", 1, "spaces"),
            ("ü:x", 1, "device kind"),
        ] {
            let e = DefaultBackends::parse(spec).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{spec}");
            let text = e.to_string();
            assert!(
                text.contains(&format!("at character {position} ")),
                "{spec}: {text}"
            );
            assert!(text.contains(why), "{spec}: {text}");
        }
    }
}
