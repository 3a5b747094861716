//! The two 16-bit float types, little-endian, without scales.

use std::marker::PhantomData;

use super::isa::Isa;
use super::rounding::Round;
use super::scale::put;
use super::small::{self, Small};
use super::tiles::Layout;

/// Plain casts.
pub(super) struct Cast<S>(PhantomData<S>);

impl<S> Cast<S> {
    pub(super) fn new() -> Self {
        Self(PhantomData)
    }
}

impl<S: Small> Layout for Cast<S> {
    fn encoded_len(&self, count: usize) -> usize {
        2 * count
    }

    #[inline(always)]
    fn encode<R: Round, I: Isa>(&self, values: &[f32], (round, first): (R, u64), out: &mut [u8]) -> usize {
        let mut non_finite = 0u32;
        let out = out.as_chunks_mut::<2>().0;
        let n = values.len().min(out.len());
        let (values, out) = (&values[..n], &mut out[..n]);
        for i in 0..n {
            let code = small::encode::<S, R>(values[i], round, first + i as u64);
            non_finite += u32::from(code & ((1 << S::SIGN) - 1) > S::LARGEST);
            out[i] = (code as u16).to_le_bytes();
        }
        non_finite as usize
    }

    #[inline(always)]
    fn decode<const ADD: bool, I: Isa>(&self, bytes: &[u8], out: &mut [f32]) {
        let codes = bytes.as_chunks::<2>().0;
        let n = codes.len().min(out.len());
        let (codes, out) = (&codes[..n], &mut out[..n]);
        for i in 0..n {
            put::<ADD>(
                &mut out[i],
                small::value::<S>(u32::from(u16::from_le_bytes(codes[i]))),
            );
        }
    }
}
