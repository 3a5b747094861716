//! A member of a group by device: a whole group of one backend, for the tensors of one device kind or to match messages.

use std::sync::mpsc::Sender;

use ftcore::{Capabilities, Device, ProcessGroup};

use crate::spec::MESSAGES;

/// A member of a group by device.
pub(crate) struct Member {
    /// `None`: it matches messages.
    pub(crate) device: Option<Device>,
    pub(crate) group: Box<dyn ProcessGroup>,
    /// What it does with messages that are matched by another.
    pub(crate) matched: Option<Capabilities>,
    /// The last field of the last member: its other end hears that they were let go of.
    pub(crate) _gone: Option<Sender<()>>,
}

impl Member {
    /// What its entry has before the colon.
    pub(crate) fn name(&self) -> &str {
        self.device.as_ref().map_or(MESSAGES, |d| d.kind.name())
    }
}
