//! Isolated groups whatever their device, and for the registry: a backend wrapped so that its groups run in child processes, under the same
//! name.

use std::sync::Arc;

use ftcore::registry::{Backend, BackendFactory};
use ftcore::{Capabilities, Device, DeviceKind, Feature, GroupOptions, ProcessGroup, Result, Staged};

use crate::child;
use crate::crossing::Mode;
use crate::group::{IsolatedGroup, isolated};
use crate::options::IsolateOptions;

/// An isolated group, whatever its device: with device memory that crosses, where it can, otherwise staged through host memory on
/// both sides; a note `crossing` in its capabilities says which, and why.
///
/// Errors: as [`IsolatedGroup::new`].
pub fn open(options: IsolateOptions) -> Result<Box<dyn ProcessGroup>> {
    if options.device.is_cpu() {
        return Ok(Box::new(IsolatedGroup::new(options)?));
    }
    let why = match IsolatedGroup::new(options.clone()) {
        Ok(group) => return Ok(Box::new(group)),
        Err(why) => why,
    };
    let (device, timeout) = (options.device.clone(), options.options.timeout);
    let backend = options.backend.clone();
    // What is wrong with more than the crossing fails here too, with the same words.
    let inner = IsolatedGroup::with(options, Mode::Landed, Some(&why))?;
    tracing::warn!(backend, %device, %why, "tensors of an isolated group are staged through host memory");
    Ok(Box::new(Staged::new(Arc::new(inner), &device, timeout)?))
}

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
