//! How bytes get from rank to rank.
//!
//! Every pair of ranks has a control connection for point-to-point messages, aborts and leaves. What collectives move goes
//! beside it: through rings in shared memory (`shm`) between ranks of one host, whose control connection is a Unix socket then,
//! and through a second TCP connection (`tcp`) between hosts.

pub(crate) mod interface;
pub(crate) mod shm;
pub(crate) mod tcp;
pub(crate) mod waker;
