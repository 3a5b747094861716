//! Values of every kind, and tensors of them on the device.

use backend_nccl::CudaAccelerator;
use ftcore::{Accelerator, DType, Tensor, deadline_in};
use std::time::Duration;

/// A generator of 64-bit numbers.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// In [-1, 1), with an exponent at random.
    fn value(&mut self, spread: i32) -> f32 {
        let unit = (self.next() >> 40) as f32 / 8_388_608.0 - 1.0;
        let spread = (self.next() % (2 * spread as u64 + 1)) as i32 - spread;
        unit * 2f32.powi(spread)
    }
}

/// Values that are hard in one way each.
pub(crate) const KINDS: [&str; 8] = [
    "gradients",
    "zeros",
    "negative zeros",
    "small",
    "largest",
    "not finite",
    "any bits",
    "ties",
];

pub(crate) fn values(kind: &str, count: usize) -> Vec<f32> {
    let mut random = Random(count as u64 ^ 0xABCD);
    (0..count)
        .map(|i| match kind {
            "gradients" => random.value(10),
            "zeros" => 0.0,
            "negative zeros" => -0.0,
            // About the smallest normal magnitude, where scales become zero.
            "small" => random.value(3) * 2f32.powi(-124),
            "largest" => f32::MAX * random.value(0),
            "not finite" => match random.next() % 40 {
                0 => f32::INFINITY,
                1 => f32::NEG_INFINITY,
                2 => f32::NAN,
                3 => -f32::NAN,
                _ => random.value(4),
            },
            "any bits" => f32::from_bits(random.next() as u32),
            // Halves between two codes of a block whose peak is 127.
            _ => match i % 64 {
                0 => 127.0,
                n => n as f32 - 32.5,
            },
        })
        .collect()
}

pub(crate) fn as_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_ne_bytes()).collect()
}

pub(crate) fn upload(dtype: DType, bytes: &[u8]) -> Tensor {
    let mut tensor = CudaAccelerator
        .alloc(0, dtype, &[bytes.len() / dtype.size()])
        .unwrap();
    let stream = CudaAccelerator.new_stream(0, false).unwrap();
    CudaAccelerator.copy_in(bytes, &mut tensor, &*stream).unwrap();
    stream.synchronize(deadline_in(Duration::from_secs(60))).unwrap();
    tensor
}

pub(crate) fn download(tensor: &Tensor) -> Vec<u8> {
    let mut bytes = vec![0; tensor.byte_len()];
    let stream = CudaAccelerator.new_stream(0, false).unwrap();
    CudaAccelerator.copy_out(tensor, &mut bytes, &*stream).unwrap();
    bytes
}

pub(crate) fn floats(tensor: &Tensor) -> Vec<f32> {
    let bytes = download(tensor);
    bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|b| f32::from_ne_bytes(*b))
        .collect()
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// The first place where two differ.
pub(crate) fn same<T: PartialEq + std::fmt::Debug>(what: &str, host: &[T], device: &[T]) {
    assert_eq!(host.len(), device.len(), "{what}: lengths");
    if let Some(at) = host.iter().zip(device).position(|(a, b)| a != b) {
        panic!(
            "{what}: number {at} of {}: host {:?}, device {:?}",
            host.len(),
            host[at],
            device[at]
        );
    }
}
