//! The factory: whether HCCL is usable here and, if not, why.

use crate::ftcore::registry::{BackendFactory, Unavailable};
use crate::ftcore::{Capabilities, Device, DeviceKind, Error, GroupOptions, ProcessGroup, Result};
use crate::group::{self, HcclGroup};
use crate::runtime::libraries;

/// Makes HCCL groups.
#[derive(Debug, Clone, Copy, Default)]
pub struct HcclFactory;

impl BackendFactory for HcclFactory {
    /// Opens the libraries, reads the version and counts devices; takes no device.
    ///
    /// Errors: `Unsupported` with a typed reason: a library or function that is missing, a version too old, no device.
    fn probe(&self) -> Result<()> {
        let libraries = libraries()?;
        if libraries.synapse.device_count()? == 0 {
            return Err(Unavailable::NoDevice { device: "hpu".into() }.into());
        }
        Ok(())
    }

    fn capabilities(&self) -> Capabilities {
        group::capabilities()
    }

    fn library(&self) -> Option<String> {
        libraries().ok().map(|l| l.describe())
    }

    fn create(&self, device: &Device, options: &GroupOptions) -> Result<Box<dyn ProcessGroup>> {
        if device.kind != DeviceKind::Hpu {
            return Err(Error::invalid(format!("hccl serves hpu, not {device}")));
        }
        if device.index != 0 {
            return Err(Error::invalid(format!(
                "there is no {device}: HCCL has one device per process, hpu:0; choose the module with \
                 OXCCL_HCCL_MODULE_ID"
            )));
        }
        self.probe()?;
        Ok(Box::new(HcclGroup::new("hccl", device, options)?))
    }
}
