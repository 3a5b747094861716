//! Live recovery: immutable, hashed snapshots served to healing peers.
//!
//! A replica's state is a [`StateDict`] of plain tensors. [`Snapshot::new`] copies it once, as safetensors bytes, so
//! that training may go on while peers read (lesson L10). [`HttpTransport`] serves snapshots from its own thread,
//! `ox-ckpt`, and never makes the trainer wait for a reader (L29). A replica that heals calls [`fetch`]: chunks from
//! several sources at once, every one checked against its hash before it counts. Nothing read from a peer is executed
//! (L38), and `fetch` changes nothing of the caller's: the step advances only when the caller applied the state
//! (INV-5). [`save`] and [`load`] keep the same bytes on disk.

mod codec;
mod disk;
mod fetch;
mod manifest;
mod server;
mod snapshot;
mod state;

pub use codec::{decode, encode, RESERVED_METADATA_PREFIX};
pub use disk::{load, save};
pub use fetch::{fetch, fetch_with, FetchOptions};
pub use manifest::{Manifest, FORMAT_VERSION, MAX_CHUNK_BYTES};
pub use server::{HttpTransport, TransportOptions, DIGEST_HEADER, MAX_WAIT, WAIT_HEADER};
pub use snapshot::{Snapshot, DEFAULT_CHUNK_BYTES};
pub use state::{StateDict, StateTensor};
