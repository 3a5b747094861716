//! NVIDIA's NCCL as a table of functions that is opened at run time.
//!
//! Nothing of NCCL or CUDA is needed to build: the types are written by hand ([`types`]), [`Library::open`] looks for
//! `libnccl.so.2` ([`locate`] says where) and fills the [`Api`] table. Functions that every supported version has (2.27 and
//! later) are required; newer ones are `Option`s, so that one build serves all versions and never fails because a library is old.
//!
//! The functions are NCCL's own, so calling them is `unsafe`; `backend-nccl` has the safe layer on top.

pub mod locate;
pub mod types;

mod library;

pub use library::{Api, Library, OLDEST};
pub use types::*;
