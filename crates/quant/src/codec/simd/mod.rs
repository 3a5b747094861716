//! One definition of every format, compiled for several instruction sets, and the choice between them at run time.
//!
//! The encoders and decoders are plain Rust on f32 and integers in a fixed order; Rust never fuses a multiplication with an addition
//! nor reorders floats. So the same code compiled for wider registers gives the same bytes, which the tests hold it to. Some steps that
//! compilers make poor code of are written for each instruction set ([`Isa`]).

#[cfg(target_arch = "x86_64")]
mod x86;

use std::fmt;

use super::grid::{Grid, Int4};
use super::hadamard::{self, GROUP, Signs};
use super::isa::Isa;
use super::pack;
use super::rounding::Nearest;
use super::scale;

/// An instruction set that the formats are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Simd {
    /// What every machine of this target has: the reference.
    Portable,
    /// AVX2, on x86-64.
    Avx2,
    /// AVX-512 F, BW, DQ and VL, on x86-64.
    Avx512,
}

impl Simd {
    /// True if this machine has it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => x86::has_avx2(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => x86::has_avx512(),
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// Those that this machine has; the fastest last.
    pub fn available() -> Vec<Self> {
        [Self::Portable, Self::Avx2, Self::Avx512]
            .into_iter()
            .filter(|s| s.is_available())
            .collect()
    }

    /// The fastest that this machine has.
    pub fn best() -> Self {
        if Self::Avx512.is_available() {
            Self::Avx512
        } else if Self::Avx2.is_available() {
            Self::Avx2
        } else {
            Self::Portable
        }
    }
}

impl fmt::Display for Simd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        })
    }
}

/// A loop over values, generic code that is inlined into the function of each instruction set.
pub(super) trait Pass {
    /// What it gives.
    type Output;
    /// Runs it. Implementations are `#[inline(always)]`, all the way down.
    fn run<I: Isa>(self) -> Self::Output;
}

/// The reference.
pub(super) struct Reference;

impl Isa for Reference {
    #[inline(always)]
    fn peaks<const B: usize>(blocks: &[[f32; B]], peaks: &mut [u32]) -> u32 {
        let mut highest = 0;
        for (block, peak) in blocks.iter().zip(peaks) {
            *peak = scale::peak(block);
            highest = highest.max(*peak);
        }
        highest
    }

    #[inline(always)]
    fn rotate(signs: &Signs, from: &[f32; GROUP], to: &mut [f32; GROUP], peaks: &mut [u32; 2]) -> bool {
        hadamard::rotate(signs, from, to, peaks)
    }

    #[inline(always)]
    fn rotate_back(signs: &Signs, from: &[f32; GROUP], to: &mut [f32; GROUP]) {
        hadamard::rotate_back(signs, from, to);
    }

    #[inline(always)]
    fn nibbles(block: &[f32; 64], inverse: f32, codes: &mut [u8; 32]) {
        let mut all = [0i8; 64];
        for i in 0..64 {
            all[i] = Int4::code(block[i] * inverse, Nearest, 0);
        }
        pack::pack::<4>(&all, codes);
    }
}

/// Runs `pass` with the instructions of `simd`, or portably where the machine lacks them.
pub(super) fn run<P: Pass>(simd: Simd, pass: P) -> P::Output {
    #[cfg(target_arch = "x86_64")]
    {
        match simd {
            Simd::Avx512 => return x86::run_avx512(pass),
            Simd::Avx2 => return x86::run_avx2(pass),
            Simd::Portable => {}
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = simd;
    pass.run::<Reference>()
}
