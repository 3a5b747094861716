//! The environment variables without which oneCCL does not work, or works slowly: set in this process before the
//! library is opened, never over a value that the user set.
//!
//! A program that cares about what [`vendor::environment`] warns of calls [`prepare`] first thing in `main`, before it starts threads; where
//! everything is set already (by the launcher, or in a child process of `isolate`), nothing is written.

use std::ffi::OsStr;
use std::path::Path;

use vendor::environment::{set_if, set_if_absent};

/// Which memory a process works on. oneCCL chooses its plugin by an environment variable, so a process has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Flavour {
    /// Host memory.
    Host,
    /// Device memory through SYCL queues.
    Sycl,
}

impl Flavour {
    /// The value of `CCL_PLUGIN`.
    pub fn plugin(self) -> &'static str {
        match self {
            Self::Host => "ONECCL_LEGACY_CPU",
            Self::Sycl => "ONECCL_LEGACY",
        }
    }

    /// The plugin's file beside `libccl.so.2`.
    pub fn plugin_file(self) -> &'static str {
        match self {
            Self::Host => "libccl_legacy_cpu.so",
            Self::Sycl => "libccl_legacy.so",
        }
    }

    /// What is set unless the user did, and why.
    pub fn defaults(self) -> [(&'static str, &'static str); 6] {
        [
            // Without it no plugin is found at all.
            (ENV_PLUGIN, self.plugin()),
            // The other transport needs an MPI launcher and ends the process without one.
            ("CCL_ATL_TRANSPORT", "ofi"),
            // Caller and worker thread spin: with the default, ranks that share cores take 9 ms for 1 KB instead of 54 µs.
            ("CCL_YIELD", "sched_yield"),
            ("CCL_LOG_LEVEL", "error"),
            // libfabric's PSM providers take over the handlers of fatal signals and leave files in the working directory.
            ("IPATH_NO_BACKTRACE", "1"),
            ("HFI_NO_BACKTRACE", "1"),
        ]
    }
}

/// The value of `CCL_PLUGIN` that was set here, for child processes: what they inherit is not the user's. Not for users.
const ENV_CHOSEN: &str = "OXCCL_XCCL_PLUGIN_CHOSEN";
const ENV_PLUGIN: &str = "CCL_PLUGIN";

/// Names of the variables by which a network interface is chosen.
pub const INTERFACE: [&str; 2] = ["CCL_KVS_IFACE", "FI_TCP_IFACE"];

/// Sets what is not set, for `flavour`; returns the names that were written. A plugin that was chosen here or in a parent process,
/// for a library that was not opened in this one, is not the user's choice and gives way.
pub fn prepare(flavour: Flavour) -> Vec<&'static str> {
    let chosen = std::env::var_os(ENV_CHOSEN);
    let mut written = Vec::new();
    for (name, value) in flavour.defaults() {
        let may = |present: Option<&OsStr>| match present {
            None => true,
            Some(present) => name == ENV_PLUGIN && chosen.as_deref() == Some(present),
        };
        if set_if(name, value, may) {
            written.push(name);
        }
    }
    if written.contains(&ENV_PLUGIN) {
        set_if(ENV_CHOSEN, flavour.plugin(), |_| true);
    }
    written
}

/// Names the folder in which libfabric looks for its providers.
const ENV_PROVIDERS: &str = "FI_PROVIDER_PATH";
/// libfabric, and the provider that is in every folder of them.
const WITH_PROVIDERS: [&str; 2] = ["libfabric.so.1", "libtcp-fi.so"];

/// Lets libfabric find its providers if both lie in `folder` beside oneCCL, as pip puts them, unless the user named a folder: it does not look
/// where it lies itself, and some versions of oneCCL do not tell it.
pub(crate) fn use_providers_in(folder: &Path) {
    let is_whole = WITH_PROVIDERS.iter().all(|name| folder.join(name).is_file());
    if let Some(name) = folder.to_str().filter(|_| is_whole) {
        set_if_absent(ENV_PROVIDERS, name);
    }
}

/// Lets oneCCL use the network interface `name`, unless the user chose one. `Err` has the variable and its value where
/// that is another one.
pub fn use_interface(name: &str) -> Result<(), (&'static str, String)> {
    for variable in INTERFACE {
        set_if_absent(variable, name);
        match std::env::var(variable) {
            Ok(present) if present != name => return Err((variable, present)),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plugin_chosen_for_the_other_flavour_gives_way_and_one_that_the_user_chose_does_not() {
        // The whole process shares these: nothing else in this test binary sets them.
        let names = || std::env::var("CCL_PLUGIN").ok();
        if names().is_some() {
            return;
        }
        prepare(Flavour::Host);
        assert_eq!(names().as_deref(), Some("ONECCL_LEGACY_CPU"));
        assert!(prepare(Flavour::Sycl).contains(&"CCL_PLUGIN"));
        assert_eq!(names().as_deref(), Some("ONECCL_LEGACY"));
        // SAFETY: nothing else reads it here.
        unsafe { std::env::set_var("CCL_PLUGIN", "MINE") };
        assert!(!prepare(Flavour::Host).contains(&"CCL_PLUGIN"));
        assert_eq!(names().as_deref(), Some("MINE"));
    }

    #[test]
    fn the_two_flavours_differ_in_the_plugin_only() {
        let (host, sycl) = (Flavour::Host.defaults(), Flavour::Sycl.defaults());
        assert_ne!(host[0], sycl[0]);
        assert_eq!(host[1..], sycl[1..]);
    }
}
