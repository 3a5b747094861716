//! Quantised collectives: the formats, and a process group that carries reductions in them over any other group.
//!
//! Data flow: [`QuantizedGroup`] (`group`) makes a `plan` of each call and submits it to the engine, whose `driver` turns it into byte
//! collectives of the group below (`exchange`), in `slices` of which several are in flight, whose `chunk`s hold values encoded by a [`Codec`] through the `kernels` of the values' device.
//! `agree` is what ranks tell each other through the store, `feedback` keeps what rounding loses.

mod agree;
mod chunk;
mod codec;
mod driver;
mod exchange;
mod feedback;
mod group;
mod kernels;
mod on_device;
mod options;
mod plan;
mod slices;

pub use codec::{Codec, Encoding, Rounding, Simd};
pub use feedback::ErrorFeedback;
pub use group::QuantizedGroup;
pub use kernels::{BlockKernels, DeviceBytes, Piece, StaticBlockKernels, block_kernels};
pub use options::{Accuracy, CodecChoice, Moves, QuantizeOptions, supports_native_fp8};
pub use slices::Slices;
