//! The unsafe floor of this crate: memory that is lent to a thread which may never come back, oneCCL's calls over host and
//! device memory, and SYCL. Everything above is safe code.

mod adopt;
pub(crate) mod comm;
pub(crate) mod exit;
pub(crate) mod lent;
pub(crate) mod sycl;
