//! Shared memory between ranks of one host.
//!
//! Every rank makes one sealed memfd: a page with its bells, then for each rank of the world two rings into which it writes for
//! that rank, one for collectives and one for messages, and a `notices` for its abort or leave (`region`). The memfd and the bells' eventfds travel over the Unix socket of the pair (`passing`).
//! Where all ranks share memory, the memory is all that a group keeps of that: it is mapped, and the descriptors are closed once all ranks are connected; that a peer's process has
//! ended is told by the line of the two processes (`lines`). In other groups the socket stays the pair's control connection, and the notices is not used. A ring has one writer and one reader; both keep their own
//! position to themselves and check the other's before every use (INV-10), so a damaged peer is an error, not a crash. The side that
//! waits arms its bell; the side that writes or frees room rings it.
//!
//! All unsafe code of this crate's transports stands in this folder.

mod arena;
mod bell;
mod map;
#[cfg(test)]
mod model;
mod notice;
mod passing;
mod region;
mod ring;
#[cfg(test)]
mod tests;
mod word;

pub(crate) use arena::{Lent, Neighbour, alloc, place_of};
pub(crate) use bell::{Bell, Bells, COLLECTIVES, MESSAGES, Ringer, Sleep, ThreadBell};
pub(crate) use notice::{NOTICE_BYTES, Notices};
pub(crate) use passing::{HANDLES, receive, send};
pub(crate) use region::{Region, Rings, Shared};
pub(crate) use ring::{CAPACITY, Reader, SHOWN_BYTES, Shown, Writer};
