//! The integration tests that need no process of their own, as one program: it is linked once.

mod failures;
mod feedback;
mod groups;
mod ranks;
mod reconfigure;
mod slices;
