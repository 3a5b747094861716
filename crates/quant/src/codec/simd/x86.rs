//! The instruction sets of x86-64: AVX2 and AVX-512.

use std::arch::x86_64::*;

use super::{Isa, Pass, Reference};
use crate::codec::hadamard::GROUP;

pub(super) fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("bmi2")
}

pub(super) fn has_avx512() -> bool {
    has_avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}

#[target_feature(enable = "avx2,bmi2")]
fn avx2<P: Pass>(pass: P) -> P::Output {
    pass.run::<Avx2>()
}

#[target_feature(enable = "avx2,bmi2,avx512f,avx512bw,avx512dq,avx512vl")]
fn avx512<P: Pass>(pass: P) -> P::Output {
    pass.run::<Avx512>()
}

/// Portably if the machine lacks the instructions.
pub(super) fn run_avx2<P: Pass>(pass: P) -> P::Output {
    if !has_avx2() {
        return pass.run::<Reference>();
    }
    // SAFETY: INV-12 the machine has the instructions: asked just now, so that executing them is defined.
    unsafe { avx2(pass) }
}

/// Portably if the machine lacks the instructions.
pub(super) fn run_avx512<P: Pass>(pass: P) -> P::Output {
    if !has_avx512() {
        return pass.run::<Reference>();
    }
    // SAFETY: INV-12 as above.
    unsafe { avx512(pass) }
}

/// Only [`avx2`] names it, after the machine was asked.
struct Avx2;
/// Only [`avx512`] names it, after the machine was asked.
struct Avx512;

impl Isa for Avx2 {
    #[inline(always)]
    fn peaks<const B: usize>(blocks: &[[f32; B]], peaks: &mut [u32]) -> u32 {
        // SAFETY: INV-12 this type exists only where the instructions do.
        unsafe { peaks_avx2(blocks, peaks) }
    }

    #[inline(always)]
    fn transform(values: &mut [f32; GROUP]) {
        // SAFETY: INV-12 as above.
        unsafe { transform_avx2(values) }
    }
}

impl Isa for Avx512 {
    #[inline(always)]
    fn peaks<const B: usize>(blocks: &[[f32; B]], peaks: &mut [u32]) -> u32 {
        // SAFETY: INV-12 as above.
        unsafe { peaks_avx512(blocks, peaks) }
    }

    #[inline(always)]
    fn transform(values: &mut [f32; GROUP]) {
        // SAFETY: INV-12 as above.
        unsafe { transform_avx512(values) }
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load8(from: &[f32; 8]) -> __m256 {
    // SAFETY: INV-8 eight floats are there; the load needs no alignment.
    unsafe { _mm256_loadu_ps(from.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store8(to: &mut [f32; 8], v: __m256) {
    // SAFETY: INV-8 room for eight floats is there; the store needs no alignment.
    unsafe { _mm256_storeu_ps(to.as_mut_ptr(), v) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load16(from: &[f32; 16]) -> __m512 {
    // SAFETY: INV-8 sixteen floats are there; the load needs no alignment.
    unsafe { _mm512_loadu_ps(from.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store16(to: &mut [f32; 16], v: __m512) {
    // SAFETY: INV-8 room for sixteen floats is there; the store needs no alignment.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), v) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn highest8(v: __m256i) -> u32 {
    let v = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
    let v = _mm_max_epu32(v, _mm_shuffle_epi32::<0b01_00_11_10>(v));
    let v = _mm_max_epu32(v, _mm_shuffle_epi32::<0b10_11_00_01>(v));
    _mm_cvtsi128_si32(v).cast_unsigned()
}

#[inline]
#[target_feature(enable = "avx2")]
fn peaks_avx2<const B: usize>(blocks: &[[f32; B]], peaks: &mut [u32]) -> u32 {
    let magnitude = _mm256_set1_epi32(0x7fff_ffff);
    let mut highest = _mm256_setzero_si256();
    for (block, peak) in blocks.iter().zip(peaks) {
        let mut most = _mm256_setzero_si256();
        for row in block.as_chunks::<8>().0 {
            let bits = _mm256_and_si256(_mm256_castps_si256(load8(row)), magnitude);
            most = _mm256_max_epu32(most, bits);
        }
        highest = _mm256_max_epu32(highest, most);
        *peak = highest8(most);
    }
    highest8(highest)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn peaks_avx512<const B: usize>(blocks: &[[f32; B]], peaks: &mut [u32]) -> u32 {
    let magnitude = _mm512_set1_epi32(0x7fff_ffff);
    let mut highest = _mm512_setzero_si512();
    for (block, peak) in blocks.iter().zip(peaks) {
        let mut most = _mm512_setzero_si512();
        for row in block.as_chunks::<16>().0 {
            let bits = _mm512_and_si512(_mm512_castps_si512(load16(row)), magnitude);
            most = _mm512_max_epu32(most, bits);
        }
        highest = _mm512_max_epu32(highest, most);
        *peak = _mm512_reduce_max_epu32(most);
    }
    _mm512_reduce_max_epu32(highest)
}

/// The sign bit in the lanes whose number has `BIT` set: where a pair's difference goes.
const fn signs<const LANES: usize>(bit: usize) -> [i32; LANES] {
    let mut signs = [0; LANES];
    let mut i = 0;
    while i < LANES {
        if i & bit != 0 {
            signs[i] = i32::MIN;
        }
        i += 1;
    }
    signs
}

/// Each lane plus its partner, or the partner minus it where `signs` says so: one stage within a register. `a + b` and `b + a`, and
/// `a − b` and `a + (−b)`, have the same bits.
macro_rules! within {
    ($v:expr, $swapped:expr, $add:ident, $xor:ident, $cast:ident, $back:ident, $signs:expr) => {
        $add($swapped, $back($xor($cast($v), $signs)))
    };
}

#[inline]
#[target_feature(enable = "avx2")]
fn transform_avx2(values: &mut [f32; GROUP]) {
    let load = |s: &[i32; 8]| _mm256_setr_epi32(s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]);
    let (one, two, four) = (
        load(&const { signs(1) }),
        load(&const { signs(2) }),
        load(&const { signs(4) }),
    );
    let rows = values.as_chunks_mut::<8>().0;
    for row in &mut *rows {
        let v = load8(row);
        let swapped = _mm256_permute_ps::<0b10_11_00_01>(v);
        let v = within!(
            v,
            swapped,
            _mm256_add_ps,
            _mm256_xor_si256,
            _mm256_castps_si256,
            _mm256_castsi256_ps,
            one
        );
        let swapped = _mm256_permute_ps::<0b01_00_11_10>(v);
        let v = within!(
            v,
            swapped,
            _mm256_add_ps,
            _mm256_xor_si256,
            _mm256_castps_si256,
            _mm256_castsi256_ps,
            two
        );
        let swapped = _mm256_permute2f128_ps::<0x01>(v, v);
        let v = within!(
            v,
            swapped,
            _mm256_add_ps,
            _mm256_xor_si256,
            _mm256_castps_si256,
            _mm256_castsi256_ps,
            four
        );
        store8(row, v);
    }
    let mut v = [_mm256_setzero_ps(); GROUP / 8];
    for i in 0..GROUP / 8 {
        v[i] = load8(&rows[i]);
    }
    let mut apart = 1;
    while apart < GROUP / 8 {
        for i in 0..GROUP / 8 {
            if i & apart == 0 {
                let (a, b) = (v[i], v[i + apart]);
                v[i] = _mm256_add_ps(a, b);
                v[i + apart] = _mm256_sub_ps(a, b);
            }
        }
        apart *= 2;
    }
    for i in 0..GROUP / 8 {
        store8(&mut rows[i], v[i]);
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn transform_avx512(values: &mut [f32; GROUP]) {
    let load = |s: &[i32; 16]| {
        _mm512_setr_epi32(
            s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9], s[10], s[11], s[12], s[13], s[14],
            s[15],
        )
    };
    let (one, two) = (load(&const { signs(1) }), load(&const { signs(2) }));
    let (four, eight) = (load(&const { signs(4) }), load(&const { signs(8) }));
    let rows = values.as_chunks_mut::<16>().0;
    let mut v = [_mm512_setzero_ps(); GROUP / 16];
    for i in 0..GROUP / 16 {
        let x = load16(&rows[i]);
        let swapped = _mm512_permute_ps::<0b10_11_00_01>(x);
        let x = within!(
            x,
            swapped,
            _mm512_add_ps,
            _mm512_xor_si512,
            _mm512_castps_si512,
            _mm512_castsi512_ps,
            one
        );
        let swapped = _mm512_permute_ps::<0b01_00_11_10>(x);
        let x = within!(
            x,
            swapped,
            _mm512_add_ps,
            _mm512_xor_si512,
            _mm512_castps_si512,
            _mm512_castsi512_ps,
            two
        );
        let swapped = _mm512_shuffle_f32x4::<0b10_11_00_01>(x, x);
        let x = within!(
            x,
            swapped,
            _mm512_add_ps,
            _mm512_xor_si512,
            _mm512_castps_si512,
            _mm512_castsi512_ps,
            four
        );
        let swapped = _mm512_shuffle_f32x4::<0b01_00_11_10>(x, x);
        v[i] = within!(
            x,
            swapped,
            _mm512_add_ps,
            _mm512_xor_si512,
            _mm512_castps_si512,
            _mm512_castsi512_ps,
            eight
        );
    }
    let mut apart = 1;
    while apart < GROUP / 16 {
        for i in 0..GROUP / 16 {
            if i & apart == 0 {
                let (a, b) = (v[i], v[i + apart]);
                v[i] = _mm512_add_ps(a, b);
                v[i + apart] = _mm512_sub_ps(a, b);
            }
        }
        apart *= 2;
    }
    for i in 0..GROUP / 16 {
        store16(&mut rows[i], v[i]);
    }
}
