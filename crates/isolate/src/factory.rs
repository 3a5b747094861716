//! Isolated groups for the registry: a backend wrapped so that its groups run in child processes, under the same name.

use std::sync::Arc;

use ftcore::registry::{Backend, BackendFactory};
use ftcore::{Capabilities, Device, DeviceKind, Feature, GroupOptions, ProcessGroup, Result};

use crate::child;
use crate::crossing::{Mode, open};
use crate::group::isolated;
use crate::options::IsolateOptions;

/// Makes isolated groups of one backend.
pub struct IsolatedFactory {
    inner: Backend,
    template: IsolateOptions,
}

impl IsolatedFactory {
    /// For `backend`, with spare, helper and start time-out of `template` (its backend, device and options are replaced at
    /// each creation).
    pub fn new(backend: Backend, template: IsolateOptions) -> Self {
        Self {
            inner: backend,
            template,
        }
    }
}

/// `backend` with groups that run in child processes; the same name, device and source.
///
/// The child opens the backend by its name in its own registry. There it must stand unwrapped, or wrapped by this function,
/// which then gives the backend itself: a child makes no children.
pub fn wrap(backend: &Backend, template: IsolateOptions) -> Backend {
    Backend {
        factory: Arc::new(IsolatedFactory::new(backend.clone(), template)),
        ..backend.clone()
    }
}

impl IsolatedFactory {
    /// What groups offer, as far as it is known before there is one.
    fn offered(&self) -> Capabilities {
        let inner = self.inner.factory.capabilities();
        if self.inner.device == DeviceKind::Cpu {
            return isolated(inner, &Mode::Host, None);
        }
        let mut offered = isolated(inner, &Mode::Landed, None);
        offered.features = offered.features.without(Feature::Borrow);
        offered.devices = vec![self.inner.device.name().to_string().into()];
        offered
    }
}

impl BackendFactory for IsolatedFactory {
    fn probe(&self) -> Result<()> {
        self.inner.factory.probe()
    }

    fn capabilities(&self) -> Capabilities {
        if child::is_child() {
            self.inner.factory.capabilities()
        } else {
            self.offered()
        }
    }

    fn library(&self) -> Option<String> {
        self.inner.factory.library()
    }

    fn create(&self, device: &Device, options: &GroupOptions) -> Result<Box<dyn ProcessGroup>> {
        if child::is_child() {
            return self.inner.factory.create(device, options);
        }
        open(IsolateOptions {
            backend: self.inner.name.clone(),
            device: device.clone(),
            options: options.clone(),
            ..self.template.clone()
        })
    }
}
