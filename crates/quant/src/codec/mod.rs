//! The formats: how f32 values become bytes and values again. One exact definition each; tests hold golden vectors.
//!
//! Data flow: [`Codec`] picks the format; `tiles` says how encodings lie in the bytes; `grid` (integers, with `scale` and
//! `pack`), `rotated` (with `hadamard`), `mx` and `casts` (with `small`) are the formats; `rounding` picks between two codes; `simd` runs it
//! all with the machine's instructions (`isa`: what is written for each of their sets). Every step is a plain IEEE f32 operation in a fixed order, never a fused one (but where
//! the product is exact, so that it rounds alike), whatever mode for floats the thread has, so the bytes are the same on every machine. Any bytes of the right length decode to something: nothing can fail on their content.

mod casts;
mod grid;
mod hadamard;
mod isa;
mod mx;
mod names;
mod pack;
mod rotated;
pub(crate) mod rounding;
mod scale;
mod simd;
mod small;
#[cfg(test)]
mod tests;
mod tiles;

use ftcore::float_mode::DefaultMode;
use ftcore::{Error, ErrorKind, Result};

pub use rounding::Rounding;
pub use simd::Simd;

use casts::Cast;
use grid::{Int2, Int4, Int8, Scaled};
use isa::Isa;
use mx::Mx;
use rotated::Rotated;
use rounding::{Nearest, Round, Stochastic};
use small::{Bf16, F16};
use tiles::Layout;

/// A format for f32 values. Blocks follow each other in the flat slice; the last one may be shorter.
///
/// In the formats with a bf16 scale a block's scale `s`, at least 0, is `amax / L` in f32 (`amax`: the largest magnitude), rounded
/// to bf16, to nearest even; one step less if `s · L` would overflow; 0 if below 2⁻¹²⁶. A code is `x · (1 / s)` in f32, limited to
/// ±M (M = L except for `Int2B64`) and rounded (see [`Rounding`]); the value is `code · s`, which is exact. `-0` becomes 0. A block with values
/// that are not finite is marked by the sign bit of its scale and has `M − 1` in place of L and M; in it code M means +Inf, −M means −Inf and
/// −M − 1 NaN.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Codec {
    /// IEEE binary16: what is too large becomes infinite, visibly. 16 bits.
    F16,
    /// bfloat16. 16 bits.
    Bf16,
    /// Integers of 8 bits in blocks of 64, L = 127. 8.25 bits.
    Int8B64,
    /// Integers of 8 bits in blocks of 32, L = 127. 8.5 bits.
    Int8B32,
    /// Integers of 4 bits in blocks of 64, L = 7. 4.25 bits.
    ///
    /// Byte i of a block of m holds code i in its low and code i + ⌈m/2⌉ in its high half.
    Int4B64,
    /// As `Int4B64`, after a Hadamard rotation over 128 values with random signs. 4.25 bits.
    ///
    /// `y = H · (sign · x / 128)`, with H in natural (Sylvester) order, strides 1, 2, … 64; back: `x = sign · (H · y)`. Value i of every group is
    /// negated if bit `i mod 64` of word `i / 64` of splitmix64(seed) is set. A group of less than 128 values at the end is not rotated;
    /// nor is one with values that are not finite or at least 2¹²⁰, whose two blocks are then marked in their scales as above.
    Int4Hadamard {
        /// Chooses the signs; the same on all ranks.
        seed: u64,
    },
    /// −1, 0 and 1 in blocks of 64: L = 2 and M = 1, so that the largest magnitudes lose up to half. 2.25 bits. Meant for error feedback: the
    /// error of no value exceeds the value. Finite values of a marked block become 0.
    ///
    /// Byte i of a block of m holds codes i, i + q, i + 2q, i + 3q from the lowest bits up, with q = ⌈m/4⌉.
    Int2B64,
    /// OCP MX v1.0 MXFP8 E4M3: blocks of 32 with a scale `2^(floor(log2 amax) − 8)` as E8M0 (at least 2⁻¹²⁷). 8.25 bits.
    ///
    /// `x / scale` is rounded and saturates at ±448. The format has no infinity: ±Inf become NaN.
    MxE4M3,
}

/// Calls `$body` with `$f` bound to the layout of `$codec`.
macro_rules! with_layout {
    ($codec:expr, $f:ident => $body:expr) => {
        match $codec {
            Codec::F16 => with_layout!(@ $f = Cast::<F16>::new(), $body),
            Codec::Bf16 => with_layout!(@ $f = Cast::<Bf16>::new(), $body),
            Codec::Int8B64 => with_layout!(@ $f = Scaled::<Int8, 64>::new(), $body),
            Codec::Int8B32 => with_layout!(@ $f = Scaled::<Int8, 32>::new(), $body),
            Codec::Int4B64 => with_layout!(@ $f = Scaled::<Int4, 64>::new(), $body),
            Codec::Int4Hadamard { seed } => with_layout!(@ $f = Rotated::new(seed), $body),
            Codec::Int2B64 => with_layout!(@ $f = Scaled::<Int2, 64>::new(), $body),
            Codec::MxE4M3 => with_layout!(@ $f = Mx, $body),
        }
    };
    (@ $f:ident = $layout:expr, $body:expr) => {{
        let $f = $layout;
        $body
    }};
}

struct Encode<'a, L, R> {
    layout: &'a L,
    values: &'a [f32],
    at: (R, u64),
    out: &'a mut [u8],
}

impl<L: Layout, R: Round> simd::Pass for Encode<'_, L, R> {
    type Output = usize;

    #[inline(always)]
    fn run<I: Isa>(self) -> usize {
        self.layout.encode::<R, I>(self.values, self.at, self.out)
    }
}

struct Decode<'a, L, const ADD: bool> {
    layout: &'a L,
    bytes: &'a [u8],
    out: &'a mut [f32],
}

impl<L: Layout, const ADD: bool> simd::Pass for Decode<'_, L, ADD> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self) {
        self.layout.decode::<ADD, I>(self.bytes, self.out);
    }
}

/// How values are encoded besides the format; the default is what [`Codec::encode`] does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Encoding {
    /// How a value between two codes is rounded.
    pub rounding: Rounding,
    /// The number of the first value, by which stochastic rounding picks its random numbers.
    pub first: u64,
    /// The instructions to use; the bytes do not depend on it.
    pub simd: Simd,
}

impl Default for Encoding {
    fn default() -> Self {
        Self {
            rounding: Rounding::Nearest,
            first: 0,
            simd: Simd::best(),
        }
    }
}

impl Codec {
    /// The bytes that [`encode`](Self::encode) makes of `count` values.
    pub fn encoded_len(self, count: usize) -> usize {
        with_layout!(self, f => f.encoded_len(count))
    }

    /// Encodings of slices cut at multiples of this, one after the other, are the encoding of the whole.
    pub const fn grain(self) -> usize {
        tiles::TILE
    }

    /// Appends the encoding of `values` to `out`, rounded to nearest even. Returns how many of the values are not finite in it: those that
    /// were not (INV-11), and in f16 also those that were too large.
    pub fn encode(&self, values: &[f32], out: &mut Vec<u8>) -> usize {
        self.encode_with(Encoding::default(), values, out)
    }

    /// As [`encode`](Self::encode), with choices.
    pub fn encode_with(&self, how: Encoding, values: &[f32], out: &mut Vec<u8>) -> usize {
        let _mode = DefaultMode::set();
        self.encode_here(how, values, out)
    }

    /// In the thread's own mode. Not inlined, so that nothing of it can move out from between the two changes of the mode.
    #[inline(never)]
    fn encode_here(&self, how: Encoding, values: &[f32], out: &mut Vec<u8>) -> usize {
        with_layout!(*self, f => match how.rounding {
            Rounding::Nearest => append(&f, Nearest, how, values, out),
            Rounding::Stochastic { key } => append(&f, Stochastic { key }, how, values, out),
        })
    }

    /// Writes the values of `bytes` to `out`.
    ///
    /// Errors: `Protocol` if `bytes` is not exactly what `out.len()` values encode to.
    pub fn decode(&self, bytes: &[u8], out: &mut [f32]) -> Result<()> {
        self.decode_with(Simd::best(), false, bytes, out)
    }

    /// Adds the values of `bytes` to `out`, in f32.
    ///
    /// Errors: as [`decode`](Self::decode).
    pub fn decode_add(&self, bytes: &[u8], out: &mut [f32]) -> Result<()> {
        self.decode_with(Simd::best(), true, bytes, out)
    }

    /// As [`decode`](Self::decode), or [`decode_add`](Self::decode_add) if `add`, with the instructions of choice.
    pub fn decode_with(&self, simd: Simd, add: bool, bytes: &[u8], out: &mut [f32]) -> Result<()> {
        let expected = self.encoded_len(out.len());
        if bytes.len() != expected {
            return Err(Error::new(
                ErrorKind::Protocol,
                format!(
                    "{} bytes of {self}; {} values take {expected}",
                    bytes.len(),
                    out.len()
                ),
            ));
        }
        let _mode = DefaultMode::set();
        self.decode_here(simd, add, bytes, out);
        Ok(())
    }

    /// Likewise.
    #[inline(never)]
    fn decode_here(&self, simd: Simd, add: bool, bytes: &[u8], out: &mut [f32]) {
        with_layout!(*self, layout => if add {
            simd::run(simd, Decode::<_, true> { layout: &layout, bytes, out });
        } else {
            simd::run(simd, Decode::<_, false> { layout: &layout, bytes, out });
        });
    }
}

/// Encodes piece by piece, so that room is made for each piece while it is in the cache.
fn append<L: Layout, R: Round>(
    layout: &L,
    round: R,
    how: Encoding,
    values: &[f32],
    out: &mut Vec<u8>,
) -> usize {
    out.reserve(layout.encoded_len(values.len()));
    let grain = tiles::TILE;
    let mut non_finite = 0;
    for (values, first) in values.chunks(grain).zip((how.first..).step_by(grain)) {
        let start = out.len();
        out.resize(start + layout.encoded_len(values.len()), 0);
        let (_, to) = out.split_at_mut(start);
        non_finite += simd::run(
            how.simd,
            Encode {
                layout,
                values,
                at: (round, first),
                out: to,
            },
        );
    }
    non_finite
}
