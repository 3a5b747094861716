//! The formats: how f32 values become bytes and values again. One exact definition each; tests hold golden vectors.
//!
//! Data flow: [`Codec`] picks the format; `tiles` cuts a flat slice into tiles and blocks and lays out scales and codes;
//! `int8`, `int4` (with `hadamard`) and `mx` encode one block, `scale` has the rules that the integer formats share, and
//! `casts` is the two 16-bit types. Every step is a plain IEEE f32 operation in a fixed order, never a fused one, so the
//! bytes are the same on every machine. Any bytes of the right length decode to something: nothing can fail on their content.

mod casts;
mod hadamard;
mod int4;
mod int8;
mod mx;
mod scale;
#[cfg(test)]
mod tests;
mod tiles;

use std::fmt;
use std::str::FromStr;

use ftcore::{Error, ErrorKind, Result};

use int4::Int4;
use int8::Int8;
use mx::{E4M3, E5M2, Mx};

/// Values per tile. Scales lie before the codes tile by tile, so encodings of whole tiles can be put one after the other.
pub(crate) const TILE: usize = tiles::TILE;

/// A format for f32 values. Blocks follow each other in the flat slice; the last one may be shorter.
///
/// In the integer formats a block has a bf16 scale `s`, at least 0: `amax / L` in f32 (`amax`: the largest magnitude), rounded
/// to bf16, to nearest even; one step less if `s · L` would overflow; 0 if below 2⁻¹²⁶. A code is `x · (1 / s)` in f32, limited to
/// ±L and rounded to nearest even; the value is `code · s`, which is exact. `-0` becomes 0. A block with values that
/// are not finite has the sign bit of its scale set and `L − 1` in place of L; in it code L means +Inf, −L means −Inf and −L − 1 NaN.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Codec {
    /// IEEE binary16, to nearest even: what is too large becomes infinite, visibly. 16 bits.
    F16,
    /// bfloat16, to nearest even. 16 bits.
    Bf16,
    /// Integers of 8 bits in blocks of 64, L = 127. 8.25 bits.
    Int8B64,
    /// Integers of 8 bits in blocks of 32, L = 127. 8.5 bits.
    Int8B32,
    /// Integers of 4 bits in blocks of 64, L = 7, after a Hadamard rotation over 128 values with random signs. 4.25 bits.
    ///
    /// `y = H · (sign · x / 128)`, with H in natural (Sylvester) order, strides 1, 2, … 64; back: `x = sign · (H · y)`. Value i of every group is
    /// negated if bit `i mod 64` of word `i / 64` of splitmix64(seed) is set. A group of less than 128 values at the end is not rotated;
    /// nor is one with values that are not finite or at least 2¹²⁰, whose two blocks are then marked in their scales as above.
    /// Byte i of a block of m holds code i in its low and code i + ⌈m/2⌉ in its high half.
    Int4Hadamard {
        /// Chooses the signs; the same on all ranks.
        seed: u64,
    },
    /// OCP MX v1.0 MXFP8 E4M3: blocks of 32 with a scale `2^(floor(log2 amax) − 8)` as E8M0 (at least 2⁻¹²⁷). 8.25 bits.
    ///
    /// `x / scale` is rounded to nearest even and saturates at ±448. The format has no infinity: ±Inf become NaN.
    MxE4M3,
    /// OCP MX v1.0 MXFP8 E5M2: as `MxE4M3` with `floor(log2 amax) − 15`, saturating at ±57344; ±Inf stay. 8.25 bits.
    MxE5M2,
}

/// Calls `$body` with `$f` bound to the block format of `$codec`, or `$cast` with the 16-bit type's name.
macro_rules! with_format {
    ($codec:expr, $f:ident => $body:expr, $t:ident => $cast:expr) => {
        match $codec {
            Codec::F16 => {
                type $t = half::f16;
                $cast
            }
            Codec::Bf16 => {
                type $t = half::bf16;
                $cast
            }
            Codec::Int8B64 => {
                let $f = Int8::<64>;
                $body
            }
            Codec::Int8B32 => {
                let $f = Int8::<32>;
                $body
            }
            Codec::Int4Hadamard { seed } => {
                let $f = Int4::new(seed);
                $body
            }
            Codec::MxE4M3 => {
                let $f = Mx::<E4M3>::new();
                $body
            }
            Codec::MxE5M2 => {
                let $f = Mx::<E5M2>::new();
                $body
            }
        }
    };
}

impl Codec {
    /// One of each format, with signs from seed 0.
    pub const ALL: [Self; 7] = [
        Self::F16,
        Self::Bf16,
        Self::Int8B64,
        Self::Int8B32,
        Self::Int4Hadamard { seed: 0 },
        Self::MxE4M3,
        Self::MxE5M2,
    ];

    /// The lower-case name, without the seed; [`FromStr`] reads it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Int8B64 => "int8-b64",
            Self::Int8B32 => "int8-b32",
            Self::Int4Hadamard { .. } => "int4-h128",
            Self::MxE4M3 => "mx-e4m3",
            Self::MxE5M2 => "mx-e5m2",
        }
    }

    /// The stable code in frames.
    pub const fn code(self) -> u8 {
        match self {
            Self::F16 => 1,
            Self::Bf16 => 2,
            Self::Int8B64 => 3,
            Self::Int8B32 => 4,
            Self::Int4Hadamard { .. } => 5,
            Self::MxE4M3 => 6,
            Self::MxE5M2 => 7,
        }
    }

    /// Bits per value of a long slice, scales included.
    pub const fn bits(self) -> f64 {
        match self {
            Self::F16 | Self::Bf16 => 16.0,
            Self::Int8B64 | Self::MxE4M3 | Self::MxE5M2 => 8.25,
            Self::Int8B32 => 8.5,
            Self::Int4Hadamard { .. } => 4.25,
        }
    }

    /// The bytes that [`encode`](Self::encode) makes of `count` values.
    pub fn encoded_len(self, count: usize) -> usize {
        fn of<F: tiles::Blocks>(_: &F, count: usize) -> usize {
            tiles::encoded_len::<F>(count)
        }
        with_format!(self, f => of(&f, count), T => count * size_of::<T>())
    }

    /// Appends the encoding of `values` to `out`. Returns how many of the values are not finite in it: those that were not
    /// (INV-11), and in f16 also those that were too large.
    pub fn encode(&self, values: &[f32], out: &mut Vec<u8>) -> usize {
        with_format!(*self, f => tiles::encode(&f, values, out), T => casts::encode::<T>(values, out))
    }

    /// Writes the values of `bytes` to `out`.
    ///
    /// Errors: `Protocol` if `bytes` is not exactly what `out.len()` values encode to.
    pub fn decode(&self, bytes: &[u8], out: &mut [f32]) -> Result<()> {
        self.check(bytes, out)?;
        with_format!(*self, f => tiles::decode::<_, false>(&f, bytes, out), T => casts::decode::<T, false>(bytes, out));
        Ok(())
    }

    /// Adds the values of `bytes` to `out`, in f32.
    ///
    /// Errors: as [`decode`](Self::decode).
    pub fn decode_add(&self, bytes: &[u8], out: &mut [f32]) -> Result<()> {
        self.check(bytes, out)?;
        with_format!(*self, f => tiles::decode::<_, true>(&f, bytes, out), T => casts::decode::<T, true>(bytes, out));
        Ok(())
    }

    fn check(&self, bytes: &[u8], out: &[f32]) -> Result<()> {
        let expected = self.encoded_len(out.len());
        if bytes.len() == expected {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Protocol,
            format!(
                "{} bytes of {self}; {} values take {expected}",
                bytes.len(),
                out.len()
            ),
        ))
    }
}

impl fmt::Display for Codec {
    /// The name, and for the rotated format the seed: what ranks must agree on.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self {
            Self::Int4Hadamard { seed } => write!(f, ":{seed:016x}"),
            _ => Ok(()),
        }
    }
}

impl FromStr for Codec {
    type Err = Error;

    /// A [`name`](Codec::name); `int8`, `int4` and `fp8` are the default of their width. `int4-h128:` may be followed by a seed in hexadecimal.
    fn from_str(s: &str) -> Result<Self> {
        if let Some(seed) = s.strip_prefix("int4-h128:") {
            return u64::from_str_radix(seed, 16)
                .map(|seed| Self::Int4Hadamard { seed })
                .map_err(|e| {
                    Error::invalid(format!("'{seed}' is not a seed in hexadecimal")).with_source(e)
                });
        }
        let name = match s {
            "int8" => "int8-b64",
            "int4" => "int4-h128",
            "fp8" => "mx-e4m3",
            name => name,
        };
        Self::ALL.into_iter().find(|c| c.name() == name).ok_or_else(|| {
            let known: Vec<_> = Self::ALL.iter().map(|c| c.name()).collect();
            Error::invalid(format!(
                "unknown format '{s}'; known: int8, int4, fp8, {}",
                known.join(", ")
            ))
        })
    }
}
