//! Quantised collectives: the formats, and a process group that all-reduces in them over any other group.
//!
//! Data flow: [`QuantizedGroup`] (`group`) puts calls into a `queue`; its thread turns an all-reduce of f32 into byte
//! collectives of the group below (`reduce`), whose `chunk`s hold values encoded by a [`Codec`].

mod chunk;
mod codec;
mod group;
mod queue;
mod reduce;

pub use codec::Codec;
pub use group::QuantizedGroup;
