//! The instruction sets of x86-64: AVX2 and AVX-512.

use std::arch::x86_64::*;

use super::{Pass, Reference};
use crate::codec::hadamard::{GROUP, Signs, fits};
use crate::codec::isa::Isa;
use crate::codec::tiles::PART;

pub(super) fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("bmi2") && is_x86_feature_detected!("fma")
}

pub(super) fn has_avx512() -> bool {
    has_avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}

#[target_feature(enable = "avx2,bmi2,fma")]
fn avx2<P: Pass>(pass: P) -> P::Output {
    pass.run::<Avx2>()
}

#[target_feature(enable = "avx2,bmi2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
fn avx512<P: Pass>(pass: P) -> P::Output {
    pass.run::<Avx512>()
}

/// Portably if the machine lacks the instructions.
pub(super) fn run_avx2<P: Pass>(pass: P) -> P::Output {
    if !has_avx2() {
        return pass.run::<Reference>();
    }
    // SAFETY: the machine has the instructions: asked just now, so that executing them is defined.
    unsafe { avx2(pass) }
}

/// Portably if the machine lacks the instructions.
pub(super) fn run_avx512<P: Pass>(pass: P) -> P::Output {
    if !has_avx512() {
        return pass.run::<Reference>();
    }
    // SAFETY: as above.
    unsafe { avx512(pass) }
}

/// Only [`avx2`] names it, after the machine was asked.
struct Avx2;
/// Only [`avx512`] names it, after the machine was asked.
struct Avx512;

impl Isa for Avx2 {
    #[inline(always)]
    fn peaks<const B: usize>(blocks: &[[f32; B]], peaks: &mut [u32]) -> u32 {
        // SAFETY: this type exists only where the instructions do.
        unsafe { peaks_avx2(blocks, peaks) }
    }

    #[inline(always)]
    fn rotate(signs: &Signs, from: &[f32; GROUP], to: &mut [f32; GROUP], peaks: &mut [u32; 2]) -> bool {
        // SAFETY: as above.
        unsafe { rotate_avx2(signs, from, to, peaks) }
    }

    #[inline(always)]
    fn rotate_back(signs: &Signs, from: &[f32; GROUP], to: &mut [f32; GROUP]) {
        // SAFETY: as above.
        unsafe { rotate_back_avx2(signs, from, to) }
    }

    #[inline(always)]
    fn nibbles(block: &[f32; 64], inverse: f32, codes: &mut [u8; 32]) {
        // SAFETY: as above.
        unsafe { nibbles_avx2(block, inverse, codes) }
    }
}

impl Isa for Avx512 {
    #[inline(always)]
    fn peaks<const B: usize>(blocks: &[[f32; B]], peaks: &mut [u32]) -> u32 {
        // SAFETY: as above.
        unsafe { peaks_avx512(blocks, peaks) }
    }

    #[inline(always)]
    fn rotate(signs: &Signs, from: &[f32; GROUP], to: &mut [f32; GROUP], peaks: &mut [u32; 2]) -> bool {
        // SAFETY: as above.
        unsafe { rotate_avx512(signs, from, to, peaks) }
    }

    #[inline(always)]
    fn rotate_back(signs: &Signs, from: &[f32; GROUP], to: &mut [f32; GROUP]) {
        // SAFETY: as above.
        unsafe { rotate_back_avx512(signs, from, to) }
    }

    /// What compilers make of it is short enough.
    #[inline(always)]
    fn nibbles(block: &[f32; 64], inverse: f32, codes: &mut [u8; 32]) {
        Reference::nibbles(block, inverse, codes);
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load8(from: &[f32; 8]) -> __m256 {
    // SAFETY: eight floats are there; the load needs no alignment.
    unsafe { _mm256_loadu_ps(from.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store8(to: &mut [f32; 8], v: __m256) {
    // SAFETY: room for eight floats is there; the store needs no alignment.
    unsafe { _mm256_storeu_ps(to.as_mut_ptr(), v) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load16(from: &[f32; 16]) -> __m512 {
    // SAFETY: sixteen floats are there; the load needs no alignment.
    unsafe { _mm512_loadu_ps(from.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store16(to: &mut [f32; 16], v: __m512) {
    // SAFETY: room for sixteen floats is there; the store needs no alignment.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), v) }
}

/// Asks for the values that come a part after `from`: memory is read in steps of pages otherwise, with a wait at each of them.
#[inline(always)]
fn fetch_ahead(from: &[f32]) {
    for line in from.chunks(16) {
        let ahead = line.as_ptr().wrapping_add(PART);
        // SAFETY: a hint, which reads nothing; any address will do.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(ahead.cast()) };
    }
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
        fetch_ahead(block);
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
        fetch_ahead(block);
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

/// −1 in the lanes whose number has `bit` set, where a pair's difference goes, and 1 in the others.
const fn ones<const LANES: usize>(bit: usize) -> [f32; LANES] {
    let mut ones = [1.0; LANES];
    let mut i = 0;
    while i < LANES {
        if i & bit != 0 {
            ones[i] = -1.0;
        }
        i += 1;
    }
    ones
}

/// The stages within a register. Each lane is multiplied by ±1 and its partner added: the product is exact, so that the fused step rounds as
/// an addition or a subtraction does, and `a + b` and `b + a` have the same bits.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn within8(v: __m256) -> __m256 {
    let v = _mm256_fmadd_ps(
        v,
        load8(&const { ones(1) }),
        _mm256_permute_ps::<0b10_11_00_01>(v),
    );
    let v = _mm256_fmadd_ps(
        v,
        load8(&const { ones(2) }),
        _mm256_permute_ps::<0b01_00_11_10>(v),
    );
    _mm256_fmadd_ps(v, load8(&const { ones(4) }), _mm256_permute2f128_ps::<0x01>(v, v))
}

/// Two stages across four registers.
#[inline]
#[target_feature(enable = "avx2")]
fn across8([a, b, c, d]: [__m256; 4]) -> [__m256; 4] {
    let (a, b) = (_mm256_add_ps(a, b), _mm256_sub_ps(a, b));
    let (c, d) = (_mm256_add_ps(c, d), _mm256_sub_ps(c, d));
    [
        _mm256_add_ps(a, c),
        _mm256_add_ps(b, d),
        _mm256_sub_ps(a, c),
        _mm256_sub_ps(b, d),
    ]
}

#[inline]
#[target_feature(enable = "avx2")]
fn magnitude8(v: __m256) -> __m256i {
    _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fff_ffff))
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn rotate_avx2(signs: &Signs, from: &[f32; GROUP], to: &mut [f32; GROUP], peaks: &mut [u32; 2]) -> bool {
    fetch_ahead(from);
    let group = from;
    let (from, signs) = (from.as_chunks::<8>().0, signs.factors().as_chunks::<8>().0);
    let rows = to.as_chunks_mut::<8>().0;
    let zero = _mm256_setzero_si256();
    let (mut first, mut second) = (zero, zero);
    // Sixteen registers are one group, but not with anything beside it: so twice four times four.
    for k in 0..4 {
        let mut v = [_mm256_setzero_ps(); 4];
        for i in 0..4 {
            v[i] = within8(_mm256_mul_ps(load8(&from[4 * k + i]), load8(&signs[4 * k + i])));
        }
        let v = across8(v);
        for i in 0..4 {
            store8(&mut rows[4 * k + i], v[i]);
        }
    }
    for k in 0..4 {
        let v = [
            load8(&rows[k]),
            load8(&rows[k + 4]),
            load8(&rows[k + 8]),
            load8(&rows[k + 12]),
        ];
        let v = across8(v);
        first = _mm256_max_epu32(first, _mm256_max_epu32(magnitude8(v[0]), magnitude8(v[1])));
        second = _mm256_max_epu32(second, _mm256_max_epu32(magnitude8(v[2]), magnitude8(v[3])));
        for i in 0..4 {
            store8(&mut rows[k + 4 * i], v[i]);
        }
    }
    *peaks = [highest8(first), highest8(second)];
    fits(group, peaks)
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn rotate_back_avx2(signs: &Signs, from: &[f32; GROUP], to: &mut [f32; GROUP]) {
    let (from, signs) = (from.as_chunks::<8>().0, signs.factors().as_chunks::<8>().0);
    let rows = to.as_chunks_mut::<8>().0;
    for k in 0..4 {
        let mut v = [_mm256_setzero_ps(); 4];
        for i in 0..4 {
            v[i] = within8(load8(&from[4 * k + i]));
        }
        let v = across8(v);
        for i in 0..4 {
            store8(&mut rows[4 * k + i], v[i]);
        }
    }
    let sign = _mm256_set1_ps(-0.0);
    for k in 0..4 {
        let v = [
            load8(&rows[k]),
            load8(&rows[k + 4]),
            load8(&rows[k + 8]),
            load8(&rows[k + 12]),
        ];
        let v = across8(v);
        for i in 0..4 {
            let turned = _mm256_and_ps(load8(&signs[k + 4 * i]), sign);
            store8(&mut rows[k + 4 * i], _mm256_xor_ps(v[i], turned));
        }
    }
}

/// Codes of 32 values, in the order in which the packing of lanes leaves them.
#[inline]
#[target_feature(enable = "avx2")]
fn codes32(values: &[[f32; 8]], inverse: __m256) -> __m256i {
    let mut codes = [_mm256_setzero_si256(); 4];
    for i in 0..4 {
        // Not limited to ±7: the scale is no smaller than peak / 7 but for its rounding to 8 bits, so that no product reaches 7.1.
        codes[i] = _mm256_cvtps_epi32(_mm256_mul_ps(load8(&values[i]), inverse));
    }
    let (low, high) = (
        _mm256_packs_epi32(codes[0], codes[1]),
        _mm256_packs_epi32(codes[2], codes[3]),
    );
    _mm256_packs_epi16(low, high)
}

/// The halves of a block are packed alike, so that only the result has to be put in order.
#[inline]
#[target_feature(enable = "avx2")]
fn nibbles_avx2(block: &[f32; 64], inverse: f32, codes: &mut [u8; 32]) {
    let (low, high) = block.as_chunks::<8>().0.split_at(4);
    let inverse = _mm256_set1_ps(inverse);
    let (low, high) = (codes32(low, inverse), codes32(high, inverse));
    let nibble = _mm256_set1_epi8(15);
    let upper = _mm256_andnot_si256(nibble, _mm256_slli_epi16::<4>(high));
    let both = _mm256_or_si256(_mm256_and_si256(nibble, low), upper);
    let ordered = _mm256_permutevar8x32_epi32(both, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    // SAFETY: room for 32 bytes is there; the store needs no alignment.
    unsafe { _mm256_storeu_si256(codes.as_mut_ptr().cast(), ordered) }
}

/// As [`within8`].
#[inline]
#[target_feature(enable = "avx512f")]
fn within16(v: __m512) -> __m512 {
    let v = _mm512_fmadd_ps(
        v,
        load16(&const { ones(1) }),
        _mm512_permute_ps::<0b10_11_00_01>(v),
    );
    let v = _mm512_fmadd_ps(
        v,
        load16(&const { ones(2) }),
        _mm512_permute_ps::<0b01_00_11_10>(v),
    );
    let swapped = _mm512_shuffle_f32x4::<0b10_11_00_01>(v, v);
    let v = _mm512_fmadd_ps(v, load16(&const { ones(4) }), swapped);
    let swapped = _mm512_shuffle_f32x4::<0b01_00_11_10>(v, v);
    _mm512_fmadd_ps(v, load16(&const { ones(8) }), swapped)
}

/// The three stages across the eight registers of a group.
#[inline]
#[target_feature(enable = "avx512f")]
fn across16(v: &mut [__m512; GROUP / 16]) {
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
}

#[inline]
#[target_feature(enable = "avx512f")]
fn magnitude16(v: __m512) -> __m512i {
    _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7fff_ffff))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn rotate_avx512(signs: &Signs, from: &[f32; GROUP], to: &mut [f32; GROUP], peaks: &mut [u32; 2]) -> bool {
    fetch_ahead(from);
    let group = from;
    let (from, signs) = (from.as_chunks::<16>().0, signs.factors().as_chunks::<16>().0);
    let rows = to.as_chunks_mut::<16>().0;
    let zero = _mm512_setzero_si512();
    let mut halves = [zero; 2];
    let mut v = [_mm512_setzero_ps(); GROUP / 16];
    for i in 0..GROUP / 16 {
        v[i] = within16(_mm512_mul_ps(load16(&from[i]), load16(&signs[i])));
    }
    across16(&mut v);
    for i in 0..GROUP / 16 {
        halves[i / 4] = _mm512_max_epu32(halves[i / 4], magnitude16(v[i]));
        store16(&mut rows[i], v[i]);
    }
    *peaks = [
        _mm512_reduce_max_epu32(halves[0]),
        _mm512_reduce_max_epu32(halves[1]),
    ];
    fits(group, peaks)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn rotate_back_avx512(signs: &Signs, from: &[f32; GROUP], to: &mut [f32; GROUP]) {
    let (from, signs) = (from.as_chunks::<16>().0, signs.factors().as_chunks::<16>().0);
    let rows = to.as_chunks_mut::<16>().0;
    let mut v = [_mm512_setzero_ps(); GROUP / 16];
    for i in 0..GROUP / 16 {
        v[i] = within16(load16(&from[i]));
    }
    across16(&mut v);
    let sign = _mm512_set1_epi32(i32::MIN);
    for i in 0..GROUP / 16 {
        let turned = _mm512_and_si512(_mm512_castps_si512(load16(&signs[i])), sign);
        let turned = _mm512_xor_si512(_mm512_castps_si512(v[i]), turned);
        store16(&mut rows[i], _mm512_castsi512_ps(turned));
    }
}
