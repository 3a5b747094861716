//! The loops compiled for AVX2 and AVX-512, f16 converted by the machine in vectors, and stores past the caches.
//!
//! A value of [`Avx2`] or [`Avx512`] exists only where the machine has the instructions: that is what makes the calls sound.

use std::arch::x86_64::*;

use super::loops::{Loops, Operands, fold_all, fold_bytes, map_all};
use super::numbers::{ByteFold, Fold, Map, Number};

/// Proof that this machine has AVX2 and F16C.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx2(());

impl Avx2 {
    pub(super) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c")).then_some(Self(()))
    }

    /// As `to.copy_from_slice(from)` (the shorter length counts), but past the caches. Waits for the stores.
    pub(super) fn stream(self, to: &mut [u8], from: &[u8]) {
        // SAFETY: `self` proves that the machine has AVX2.
        unsafe { stream(to, from) }
    }
}

/// Proof that this machine has AVX-512 F, BW, DQ and VL, and F16C.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx512(());

impl Avx512 {
    pub(super) fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("f16c");
        has.then_some(Self(()))
    }
}

/// The five loops of [`Loops`], compiled with `$features`, with `$half` as the unit of f16.
macro_rules! loops {
    ($token:ty, $features:literal, $half:ty, $half_bytes:literal) => {
        impl Loops for $token {
            fn fold<F: Fold, U: Number<N>, const N: usize>(self, operands: Operands<'_>) {
                #[target_feature(enable = $features)]
                fn wide<F: Fold, U: Number<N>, const N: usize>(operands: Operands<'_>) {
                    fold_all::<F, U, N>(operands);
                }
                // SAFETY: `self` proves that the machine has these features.
                unsafe { wide::<F, U, N>(operands) }
            }
            fn fold_f16<F: Fold>(self, operands: Operands<'_>) {
                self.fold::<F, $half, $half_bytes>(operands);
            }
            fn bytes<F: ByteFold>(self, operands: Operands<'_>) {
                #[target_feature(enable = $features)]
                fn wide<F: ByteFold>(operands: Operands<'_>) {
                    fold_bytes::<F>(operands);
                }
                // SAFETY: `self` proves that the machine has these features.
                unsafe { wide::<F>(operands) }
            }
            fn map<M: Map, U: Number<N>, const N: usize>(self, map: M, data: &mut [u8]) {
                #[target_feature(enable = $features)]
                fn wide<M: Map, U: Number<N>, const N: usize>(map: M, data: &mut [u8]) {
                    map_all::<M, U, N>(map, data);
                }
                // SAFETY: `self` proves that the machine has these features.
                unsafe { wide::<M, U, N>(map, data) }
            }
            fn map_f16<M: Map>(self, map: M, data: &mut [u8]) {
                self.map::<M, $half, $half_bytes>(map, data);
            }
        }
    };
}
loops!(Avx2, "avx2,f16c", F16x8, 16);
loops!(Avx512, "avx512f,avx512bw,avx512dq,avx512vl,f16c", F16x16, 32);

/// Eight f16, computed in f32. Used by [`Avx2`] only.
#[derive(Clone, Copy)]
struct F16x8(__m256);

/// Sixteen f16, computed in f32. Used by [`Avx512`] only.
#[derive(Clone, Copy)]
struct F16x16(__m512);

// SAFETY (all blocks of this impl): the unit is private and appears only in the loops of `Avx2`, whose value
// proves that the machine has AVX2 and F16C; loads and stores are of 16 bytes that the array has.
impl Number<16> for F16x8 {
    #[inline(always)]
    fn load(bytes: [u8; 16]) -> Self {
        // SAFETY: as above.
        Self(unsafe { _mm256_cvtph_ps(_mm_loadu_si128(bytes.as_ptr().cast())) })
    }
    #[inline(always)]
    fn store(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        // SAFETY: as above.
        unsafe {
            let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(self.0, self.0);
            let value = _mm256_blendv_ps(self.0, _mm256_set1_ps(f32::NAN), nan);
            let rounded = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(value);
            _mm_storeu_si128(bytes.as_mut_ptr().cast(), rounded);
        }
        bytes
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: as above.
        Self(unsafe { _mm256_add_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        // SAFETY: as above.
        Self(unsafe { _mm256_mul_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn least(self, other: Self) -> Self {
        // SAFETY: as above.
        Self(unsafe { pick8::<_CMP_LT_OQ>(self.0, other.0, _mm256_or_ps(self.0, other.0)) })
    }
    #[inline(always)]
    fn most(self, other: Self) -> Self {
        // SAFETY: as above.
        Self(unsafe { pick8::<_CMP_GT_OQ>(self.0, other.0, _mm256_and_ps(self.0, other.0)) })
    }
    #[inline(always)]
    fn divide(self, count: u32) -> Self {
        // SAFETY: as above.
        Self(unsafe { _mm256_div_ps(self.0, _mm256_set1_ps(count as f32)) })
    }
    #[inline(always)]
    fn scale(self, factor: f64) -> Self {
        // SAFETY: as above.
        Self(unsafe { _mm256_mul_ps(self.0, _mm256_set1_ps(factor as f32)) })
    }
}

/// `a` where the comparison holds or `a` is NaN, `equal` where both are equal, else `b`.
#[inline]
#[target_feature(enable = "avx2")]
fn pick8<const COMPARE: i32>(a: __m256, b: __m256, equal: __m256) -> __m256 {
    let wins = _mm256_or_ps(
        _mm256_cmp_ps::<COMPARE>(a, b),
        _mm256_cmp_ps::<_CMP_UNORD_Q>(a, a),
    );
    let ties = _mm256_cmp_ps::<_CMP_EQ_OQ>(a, b);
    _mm256_blendv_ps(_mm256_blendv_ps(b, equal, ties), a, wins)
}

// SAFETY (all blocks of this impl): the unit is private and appears only in the loops of `Avx512`, whose
// value proves that the machine has AVX-512 F, BW, DQ and VL; loads and stores are of 32 bytes that the array has.
impl Number<32> for F16x16 {
    #[inline(always)]
    fn load(bytes: [u8; 32]) -> Self {
        // SAFETY: as above.
        Self(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(bytes.as_ptr().cast())) })
    }
    #[inline(always)]
    fn store(self) -> [u8; 32] {
        let mut bytes = [0; 32];
        // SAFETY: as above.
        unsafe {
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0);
            let value = _mm512_mask_mov_ps(self.0, nan, _mm512_set1_ps(f32::NAN));
            let rounded = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(value);
            _mm256_storeu_si256(bytes.as_mut_ptr().cast(), rounded);
        }
        bytes
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: as above.
        Self(unsafe { _mm512_add_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        // SAFETY: as above.
        Self(unsafe { _mm512_mul_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn least(self, other: Self) -> Self {
        // SAFETY: as above.
        Self(unsafe { pick16::<_CMP_LT_OQ>(self.0, other.0, _mm512_or_ps(self.0, other.0)) })
    }
    #[inline(always)]
    fn most(self, other: Self) -> Self {
        // SAFETY: as above.
        Self(unsafe { pick16::<_CMP_GT_OQ>(self.0, other.0, _mm512_and_ps(self.0, other.0)) })
    }
    #[inline(always)]
    fn divide(self, count: u32) -> Self {
        // SAFETY: as above.
        Self(unsafe { _mm512_div_ps(self.0, _mm512_set1_ps(count as f32)) })
    }
    #[inline(always)]
    fn scale(self, factor: f64) -> Self {
        // SAFETY: as above.
        Self(unsafe { _mm512_mul_ps(self.0, _mm512_set1_ps(factor as f32)) })
    }
}

/// As [`pick8`].
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn pick16<const COMPARE: i32>(a: __m512, b: __m512, equal: __m512) -> __m512 {
    let wins = _mm512_cmp_ps_mask::<COMPARE>(a, b) | _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, a);
    let ties = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(a, b);
    _mm512_mask_mov_ps(_mm512_mask_mov_ps(b, ties, equal), wins, a)
}

/// A cache line: streamed stores are combined into whole ones only.
const LINE: usize = 64;

/// Stores one line past the caches.
#[inline(always)]
fn stream_line(to: &mut [u8; LINE], line: &[u8; LINE]) {
    let (to, line) = (to.as_mut_ptr().cast::<__m256i>(), line.as_ptr().cast::<__m256i>());
    // SAFETY: both point to 64 bytes, and `to` is aligned (`stream` begins at a line); only functions for machines
    // with AVX2 call this.
    unsafe {
        _mm256_stream_si256(to, _mm256_loadu_si256(line));
        _mm256_stream_si256(to.add(1), _mm256_loadu_si256(line.add(1)));
    }
}

#[target_feature(enable = "avx2")]
fn stream(to: &mut [u8], from: &[u8]) {
    let len = to.len().min(from.len());
    let head = to.as_ptr().align_offset(LINE).min(len);
    let (Some((to_head, to)), Some((from_head, from))) =
        (to.split_at_mut_checked(head), from.split_at_checked(head))
    else {
        return;
    };
    to_head.copy_from_slice(from_head);
    let (to, to_rest) = to.as_chunks_mut::<LINE>();
    let (from, from_rest) = from.as_chunks::<LINE>();
    for (to, from) in to.iter_mut().zip(from) {
        stream_line(to, from);
    }
    for (to, from) in to_rest.iter_mut().zip(from_rest) {
        *to = *from;
    }
    _mm_sfence();
}
