//! Key-value stores through which ranks find each other.
//!
//! [`Store`] is the contract; [`InMemoryStore`], [`FileStore`], [`PrefixStore`] and [`TcpStore`] implement it. Values
//! are small (addresses, ids); nothing in the data plane goes through a store. Every call has a deadline.

mod contract;
mod file;
mod keys;
mod memory;
mod prefix;
mod table;
mod tabled;
pub mod tcp;
#[cfg(test)]
mod tests;

pub use contract::Store;
pub use file::FileStore;
pub use memory::InMemoryStore;
pub use prefix::PrefixStore;
pub use tcp::{TcpStore, TcpStoreServer, epoch_prefix};
