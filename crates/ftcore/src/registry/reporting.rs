//! A group that says which of its options were dropped: the backend never saw them.

use std::time::Instant;

use crate::{
    Checked, Completion, Failed, GroupInfo, ProcessGroup, Rejected, Result, SubmitOptions, Work, Wrapper,
};

struct Reporting {
    inner: Box<dyn ProcessGroup>,
    dropped: Vec<String>,
}

/// `inner`, whose info names what was dropped, and that of the groups which are split from it.
pub(super) fn with_dropped(inner: Box<dyn ProcessGroup>, dropped: Vec<String>) -> Box<dyn ProcessGroup> {
    match dropped.is_empty() {
        true => inner,
        false => Box::new(Reporting { inner, dropped }),
    }
}

impl Wrapper for Reporting {
    fn inner(&self) -> &dyn ProcessGroup {
        &*self.inner
    }

    fn info(&self) -> GroupInfo {
        let mut info = self.inner.info();
        info.dropped_options.extend_from_slice(&self.dropped);
        info
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        self.inner.submit(op, options)
    }

    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        self.inner.execute(op, options)
    }

    fn split(
        &self,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    ) -> Result<Option<Box<dyn ProcessGroup>>> {
        let child = self.inner.split(color, key, deadline)?;
        Ok(child.map(|child| with_dropped(child, self.dropped.clone())))
    }
}
