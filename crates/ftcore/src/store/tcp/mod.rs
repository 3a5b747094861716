//! The store of a job over TCP, in the protocol of PyTorch's TCPStore.
//!
//! [`TcpStoreServer`] holds the map, [`TcpStore`] is a client of it (or of PyTorch's server). Layers, from below:
//! `link` (a socket with deadlines), `wire` (requests to bytes and back, nothing else), `engine` (map, queues and
//! waiters, no IO), then `server` (a thread per connection between link and engine; `doors` has who is connected) and `conn` and
//! `client` (a pool of connections).
//!
//! The protocol has no authentication and no encryption. With credentials a connection begins with the keyed hello
//! (`identity::hello`), in which both ends prove the job's secret; without them, all that reach the port can read and write the store: bind it to a
//! network that only the job can reach.

mod client;
mod conn;
mod doors;
mod engine;
mod link;
mod server;
#[cfg(test)]
mod tests;
mod wire;

pub use client::TcpStore;
pub use server::{TcpStoreServer, epoch_prefix};
