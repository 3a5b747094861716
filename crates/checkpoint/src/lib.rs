//! Live recovery: immutable, hashed snapshots served to healing peers.
//!
//! A replica's state is a [`StateDict`] of plain tensors, which do not change any more: the values are copied into it, or shared with it
//! ([`StateDict::insert_shared`]) until their owner goes on with others. A [`Snapshot`] is such a state as safetensors bytes, without a copy, so
//! that training may go on while peers read (lesson L10). [`HttpTransport`] serves snapshots from its own thread,
//! `ox-ckpt`, and never makes the trainer wait for a reader (L29). A replica that heals calls [`Fetch::run`]: chunks from
//! several sources at once, every one checked against its hash before it counts. Nothing read from a peer is executed
//! (L38), and that changes nothing of the caller's: the step advances only when the caller applied the state
//! (INV-5). [`serve_over_group`] and [`GroupFetch`] are the same over the process group of the epoch. [`save`] and [`load`] keep the same bytes on disk, sealed with a hash; a [`Series`] keeps the last few of a
//! replica, a [`Writer`] writes them beside the training, and [`newest`] finds the one to go on from when a job was lost.

mod background;
mod codec;
mod disk;
mod fetch;
mod hashing;
mod manifest;
mod newest;
mod over_group;
mod seal;
mod series;
mod server;
mod snapshot;
mod writer;

pub use codec::{RESERVED_METADATA_PREFIX, decode, encode};
pub use disk::{load, save};
pub use fetch::{CheckpointSource, Fetch, FetchOptions, Fetched, Kept, Reach, SourceChoice};
pub use manifest::{FORMAT_VERSION, MAX_CHUNK_BYTES, Manifest, SnapshotId};
pub use newest::{Found, Search, newest};
pub use over_group::{Distrusted, FIRST_TAG, GroupFetch, GroupSource, check_group, serve_over_group};
pub use replica::{StateDict, StateTensor, writable};
pub use series::{LINEAGE_KEY, STEP_KEY, Series, Written, peek, steps};
pub use server::{
    DIGEST_HEADER, EPOCH_HEADER, HttpTransport, LINEAGE_HEADER, MAX_WAIT, TransportOptions, WAIT_HEADER,
};
pub use snapshot::{DEFAULT_CHUNK_BYTES, Snapshot};
pub use writer::{Outcome, Writer};

/// A time limit of an option beyond this counts as this: it is added to the present in many places, and the clock has an end.
pub(crate) const LONGEST: std::time::Duration = std::time::Duration::from_secs(365 * 24 * 3600);
