//! A group that says which of its options were dropped: the backend never saw them.

use std::time::Instant;

use crate::{
    Capabilities, Checked, Completion, Configuration, DType, Error, Failed, GroupInfo, ProcessGroup,
    Rejected, Result, SubmitOptions, Tensor, Traffic, Work,
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

#[deny(clippy::missing_trait_methods)]
impl ProcessGroup for Reporting {
    fn info(&self) -> GroupInfo {
        let mut info = self.inner.info();
        info.dropped_options.extend_from_slice(&self.dropped);
        info
    }

    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn configure(&self, configuration: Configuration) -> Result<()> {
        self.inner.configure(configuration)
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        self.inner.submit(op, options)
    }

    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        self.inner.execute(op, options)
    }

    fn alloc(&self, dtype: DType, count: usize) -> Result<Tensor> {
        self.inner.alloc(dtype, count)
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

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn error(&self) -> Option<Error> {
        self.inner.error()
    }

    fn shutdown(&self, deadline: Instant) -> Result<()> {
        self.inner.shutdown(deadline)
    }

    fn traffic(&self) -> Traffic {
        self.inner.traffic()
    }
}
