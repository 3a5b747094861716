//! Shared memory between ranks of one host.
//!
//! Every rank makes one sealed memfd: a page with its bells, then two rings per rank of the world into which it writes for
//! that rank, one for collectives and one for messages (`region`). The memfd and the bells' eventfds travel over the Unix socket of the pair (`passing`), which stays
//! the pair's control connection: its end says that the peer is gone. A ring has one writer and one reader; both keep their own
//! position to themselves and check the other's before every use (INV-10), so a damaged peer is an error, not a crash. The side that
//! waits arms its bell; the side that writes or frees room rings it.
//!
//! All unsafe code of this crate's transports stands in this folder.

mod bell;
mod map;
#[cfg(test)]
mod model;
mod passing;
mod region;
mod ring;
#[cfg(test)]
mod tests;
mod word;

pub(crate) use bell::{Bell, Bells, COLLECTIVES, MESSAGES, Ringer, Sleep};
pub(crate) use passing::{receive, send};
pub(crate) use region::{Region, Rings, Shared};
pub(crate) use ring::{CAPACITY, Reader, Writer};
