//! oxccl core: types, traits, stores and the backend registry; knows no backend and no runtime.
//!
//! Data flows down: a training loop builds a [`Collective`] out of [`Tensor`]s that it gives away, a
//! [`ProcessGroup`] carries it out, and the [`Work`] gives the tensors back. The named collectives
//! (`all_reduce`, `broadcast`, …) are [`ProcessGroupExt`], written once on top of the one method `submit`, where all
//! validation happens; a backend only ever sees valid input.

mod address;
pub mod agreement;
mod bounded;
mod cancel;
mod capability;
mod coded;
mod collective;
mod crossing;
mod deadline;
pub mod descriptors;
mod device;
mod dtype;
pub mod engine;
mod epoch;
mod error;
mod exit;
mod ext;
pub mod fields;
pub mod flight_recorder;
pub mod float_mode;
pub mod forked;
mod group;
pub mod host_address;
pub mod identity;
mod joined;
pub mod lifecycle;
mod memory;
mod nearest;
mod options;
pub mod peers;
mod poll;
pub mod printable;
mod process_space;
mod reduce_op;
pub mod registry;
mod roles;
mod staged;
pub mod store;
mod validate;
mod work;
mod wrapper;

pub use address::{bracketed_host, join_address, split_address, split_url};
pub use bounded::bounded;
pub use cancel::Cancel;
pub use capability::{Capabilities, DTypeSet, Feature, FeatureSet, OpSet, names, notes};
pub use collective::{Collective, Fingerprint, OpKind};
pub use crossing::{Crossing, StaticCrossing, crossing};
pub use deadline::{deadline_in, later, time_left};
pub use descriptors::{accept_failure, raise_descriptor_limit};
pub use device::{
    Accelerator, CpuStream, Device, DeviceKind, Event, ReachedEvent, StaticAccelerator, Stream, accelerator,
    register_accelerator, same_length,
};
pub use dtype::{Bool, DType, Element, F8E4M3, F8E5M2};
pub use epoch::{Epoch, Step};
pub use error::{Error, ErrorContext, ErrorKind, Result};
pub use ext::ProcessGroupExt;
pub use group::{Configuration, GroupInfo, ProcessGroup, Traffic, execute_by_submit};
pub use identity::Credentials;
/// Static registration of backends; see [`registry::StaticBackend`].
pub use inventory;
pub use memory::{Real, Tensor, copy_bytes, leaked_bytes, prefer_huge_pages, wrong_device};
pub use options::{GroupOptions, Resolved, SubmitOptions, VARIABLE, option_text, variable_prefix};
pub use poll::poll;
pub use process_space::process_space;
pub use reduce_op::ReduceOp;
pub use registry::Registry;
pub use roles::Role;
pub use staged::Staged;
pub use store::{FileStore, InMemoryStore, PrefixStore, Store, TcpStore, TcpStoreServer};
pub use validate::{Checked, Rejected};
pub use work::{Completer, Completion, Failed, Status, Timings, Work, driven_work_pair, work_pair};
pub use wrapper::Wrapper;
