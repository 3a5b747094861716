//! How bytes get from rank to rank.
//!
//! What operations move goes through rings in shared memory (`shm`) between ranks of one host, and through TCP connections (`tcp`) between
//! hosts. Aborts and leaves go over a control connection of each pair; in a group whose ranks all share memory they go through that, and the groups of
//! two processes have one connection together, which tells that the other one is gone (`lines`).

pub(crate) mod interface;
pub(crate) mod lines;
pub(crate) mod shm;
pub(crate) mod tcp;
pub(crate) mod waker;
