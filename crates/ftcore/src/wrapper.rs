//! Groups around groups: what a wrapper does not change goes through.

use std::time::Instant;

use crate::{
    Capabilities, Checked, Completion, Configuration, DType, Error, Failed, GroupInfo, ProcessGroup,
    Rejected, Result, SubmitOptions, Tensor, Traffic, Work,
};

/// A [`ProcessGroup`] around another one, of which only what it changes is written.
///
/// Three methods have no default, because either answer may be wrong: operations that [`submit`](Self::submit) changes must not go past
/// it on the way of [`execute`](Self::execute), where others should not lose the quicker way; and a group that is split off is wrapped
/// or not.
///
/// ```
/// use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
/// use std::time::Instant;
///
/// use ftcore::{Checked, Completion, Failed, ProcessGroup, Rejected, Result, SubmitOptions, Work, Wrapper};
///
/// /// Counts the operations.
/// struct Counting(Box<dyn ProcessGroup>, AtomicU64);
///
/// impl Wrapper for Counting {
///     fn inner(&self) -> &dyn ProcessGroup {
///         &*self.0
///     }
///     fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
///         self.1.fetch_add(1, Relaxed);
///         self.0.submit(op, options)
///     }
///     fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
///         self.1.fetch_add(1, Relaxed);
///         self.0.execute(op, options)
///     }
///     fn split(&self, color: Option<u32>, key: u32, by: Instant) -> Result<Option<Box<dyn ProcessGroup>>> {
///         self.0.split(color, key, by)
///     }
/// }
/// # fn is_group<G: ProcessGroup>() {}
/// # is_group::<Counting>();
/// ```
pub trait Wrapper: Send + Sync {
    /// The group that it is around.
    fn inner(&self) -> &dyn ProcessGroup;

    /// [`ProcessGroup::submit`].
    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>>;

    /// [`ProcessGroup::execute`]: that of the inner group, or [`execute_by_submit`](crate::execute_by_submit) of this one.
    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>>;

    /// [`ProcessGroup::split`].
    fn split(&self, color: Option<u32>, key: u32, deadline: Instant)
    -> Result<Option<Box<dyn ProcessGroup>>>;

    /// [`ProcessGroup::info`].
    fn info(&self) -> GroupInfo {
        self.inner().info()
    }

    /// [`ProcessGroup::capabilities`].
    fn capabilities(&self) -> &Capabilities {
        self.inner().capabilities()
    }

    /// [`ProcessGroup::configure`].
    fn configure(&self, configuration: Configuration) -> Result<()> {
        self.inner().configure(configuration)
    }

    /// [`ProcessGroup::alloc`].
    fn alloc(&self, dtype: DType, count: usize) -> Result<Tensor> {
        self.inner().alloc(dtype, count)
    }

    /// [`ProcessGroup::abort`].
    fn abort(&self, reason: &str) {
        self.inner().abort(reason);
    }

    /// [`ProcessGroup::error`].
    fn error(&self) -> Option<Error> {
        self.inner().error()
    }

    /// [`ProcessGroup::shutdown`].
    fn shutdown(&self, deadline: Instant) -> Result<()> {
        self.inner().shutdown(deadline)
    }

    /// [`ProcessGroup::traffic`].
    fn traffic(&self) -> Traffic {
        self.inner().traffic()
    }
}

// With the lint a new method of groups does not compile before it has its place in `Wrapper`.
#[deny(clippy::missing_trait_methods)]
impl<W: Wrapper> ProcessGroup for W {
    fn info(&self) -> GroupInfo {
        Wrapper::info(self)
    }

    fn capabilities(&self) -> &Capabilities {
        Wrapper::capabilities(self)
    }

    fn configure(&self, configuration: Configuration) -> Result<()> {
        Wrapper::configure(self, configuration)
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        Wrapper::submit(self, op, options)
    }

    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        Wrapper::execute(self, op, options)
    }

    fn alloc(&self, dtype: DType, count: usize) -> Result<Tensor> {
        Wrapper::alloc(self, dtype, count)
    }

    fn split(
        &self,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    ) -> Result<Option<Box<dyn ProcessGroup>>> {
        Wrapper::split(self, color, key, deadline)
    }

    fn abort(&self, reason: &str) {
        Wrapper::abort(self, reason);
    }

    fn error(&self) -> Option<Error> {
        Wrapper::error(self)
    }

    fn shutdown(&self, deadline: Instant) -> Result<()> {
        Wrapper::shutdown(self, deadline)
    }

    fn traffic(&self) -> Traffic {
        Wrapper::traffic(self)
    }
}
