//! Any registered backend in a child process behind the process group trait: abort is SIGKILL, the parent lives.
//!
//! For libraries that cannot cancel an operation in process, that crash, or of which one process can hold only one rank.
//! [`IsolatedGroup`] is the group (`group`); it starts a child (`child_pool`, `spare`), whose parent side is a `link` (its groups, orders, end) and
//! a `keeper` (the thread that hears it). Each configuration is an engine of `ftcore`, whose `driver` has the operations that are in the child.
//! Ranks of a backend that cannot abort hear of each other's failures through `notices` (to the others a `watch`). Orders and reports go over a
//! socket (`channel`, `wire`), tensors through shared memory (`shm`, `pool`, `staging`) or memory of a device (`crossing`), the rendezvous
//! store over a second socket (`store`). The child's side is
//! `child`: the same executable started again, which must call [`run_child_if_asked`] first thing in `main`:
//!
//! ```no_run
//! use ftcore::{Device, ProcessGroup};
//! use oxccl_isolate::{IsolateOptions, IsolatedGroup};
//!
//! fn main() -> ftcore::Result<()> {
//!     oxccl_isolate::run_child_if_asked();
//!     let group = IsolatedGroup::new(IsolateOptions::new("gloo", Device::CPU))?;
//!     println!("{:?} in process {:?}", group.info(), group.child_pid());
//!     Ok(())
//! }
//! ```
//!
//! A program that cannot do so (a plugin in someone else's process) names a helper program that does: `OXCCL_ISOLATE_HELPER`, or
//! [`Helper::Program`]. A helper knows only the backends that are linked into it or that it loads.

mod channel;
mod child;
mod child_pool;
mod crossing;
mod driver;
mod factory;
mod group;
mod keeper;
mod link;
mod litter;
mod notices;
mod options;
mod output;
mod pool;
mod raw;
mod shm;
mod spare;
mod staging;
mod store;
mod watch;
mod wire;

pub use child::run_child_if_asked;
pub use factory::{IsolatedFactory, open, wrap};
pub use group::IsolatedGroup;
pub use options::{ENV_HELPER, Helper, IsolateOptions};
