//! The unsafe floor of this crate: memory that is lent to a thread which may never come back, and oneCCL's calls over
//! slices. Everything above is safe code.

pub(crate) mod comm;
pub(crate) mod exit;
pub(crate) mod lent;
