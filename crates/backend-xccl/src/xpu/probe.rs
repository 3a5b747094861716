//! Whether groups on xpu can be made here: SYCL, a device, oneCCL with its SYCL plugin, in the order in which one would look.

use ftcore::registry::Unavailable;
use ftcore::{Error, ErrorKind, Result};
use oneccl_sys::{Flavour, Library, Version};

use super::device::Xpu;
use crate::probe::library;
use crate::raw::sycl;

/// From this version on, oneCCL's SYCL build was seen to crash on SYCL's CPU device when a communicator starts.
const CRASHES_ON_CPU: Version = Version {
    major: 2022,
    minor: 2,
    patch: 0,
};

/// `Ok`, or what is missing for device 0.
pub(crate) fn probe() -> Result<()> {
    let xpu = Xpu::open(0)?;
    usable(&xpu).map(drop)
}

/// The library for groups on `xpu`.
pub(crate) fn usable(xpu: &Xpu) -> Result<&'static Library> {
    // Opening it sets the variable, if the user did not.
    let opened = library(Flavour::Sycl);
    let plugin = std::env::var("CCL_PLUGIN").unwrap_or_default();
    if !plugin.is_empty() && plugin != Flavour::Sycl.plugin() && !is_conflict(&opened) {
        // It would take the queue for nothing and read memory that is not ready.
        return Err(init(format!(
            "CCL_PLUGIN is {plugin}, which knows no SYCL queues; unset it, or set it to {}",
            Flavour::Sycl.plugin()
        )));
    }
    let library = opened?;
    if xpu.is_cpu && library.version >= CRASHES_ON_CPU {
        return Err(init(format!(
            "oneCCL {} crashes on SYCL's CPU device when a communicator starts; 2022.1.2 works (cargo xtask oneccl --sycl)",
            library.version
        )));
    }
    Ok(library)
}

/// The process has a oneCCL for host memory already, and the variable is that one's.
fn is_conflict(opened: &Result<&'static Library>) -> bool {
    matches!(opened, Err(e) if e.kind() == ErrorKind::Conflict)
}

fn init(text: String) -> Error {
    Unavailable::InitFailed { code: None, text }.into()
}

/// The libraries in words, as far as they are there.
pub(crate) fn describe() -> Option<String> {
    let sycl = sycl::describe()?;
    let xpu = match Xpu::open(0) {
        Ok(xpu) => format!("{} (driver {})", xpu.name, xpu.driver()),
        Err(error) => error.message().to_string(),
    };
    let oneccl = library(Flavour::Sycl).map_or_else(
        |error| error.message().to_string(),
        |l| format!("oneCCL {} from {}", l.version, l.file.display()),
    );
    Some(format!("{oneccl}; {sycl}; xpu:0 is {xpu}"))
}
