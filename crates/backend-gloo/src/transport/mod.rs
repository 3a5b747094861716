//! How bytes get from rank to rank. TCP only so far: two connections per pair of ranks, one for collectives and one for
//! point-to-point messages and control, both non-blocking and driven by the engine's poll loop.

pub(crate) mod interface;
pub(crate) mod tcp;
pub(crate) mod waker;
