//! One copy for everything that moves tensors through memory: rings, tensors shared with a child, buckets.

/// Shorter copies are `memcpy`'s.
const COPY_FROM: usize = 1024;

/// As `to.copy_from_slice(from)` (the shorter length counts), in vectors. From 2 KiB on glibc's `memcpy` is one
/// `rep movsb` where the processor says that it is fast at that, and AMD's Zen 3 and 4 are three to ten times as slow at
/// it as with vectors if `to` begins a few bytes further within a page than `from`, as a tensor behind its allocation's
/// header does beside a ring: docs/benchmarks/kernels.md.
///
/// ```
/// let mut to = [0; 3];
/// ftcore::copy_bytes(&mut to, &[1, 2, 3]);
/// assert_eq!(to, [1, 2, 3]);
/// ```
pub fn copy_bytes(to: &mut [u8], from: &[u8]) {
    let len = to.len().min(from.len());
    let (Some(to), Some(from)) = (to.get_mut(..len), from.get(..len)) else {
        return;
    };
    #[cfg(target_arch = "x86_64")]
    if len >= COPY_FROM && is_x86_feature_detected!("avx2") {
        // SAFETY: this machine has AVX2.
        unsafe { x86::copy(to, from) };
        return;
    }
    to.copy_from_slice(from);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{__m256i, _mm256_loadu_si256, _mm256_storeu_si256};

    const LINE: usize = 64;

    /// `to = from`, equally long.
    #[target_feature(enable = "avx2")]
    pub(super) fn copy(to: &mut [u8], from: &[u8]) {
        let (to, to_rest) = to.as_chunks_mut::<LINE>();
        let (from, from_rest) = from.as_chunks::<LINE>();
        for (to, from) in to.iter_mut().zip(from) {
            let (to, from) = (to.as_mut_ptr().cast::<__m256i>(), from.as_ptr().cast::<__m256i>());
            // SAFETY: both point to 64 bytes; nothing is asked of their alignment.
            unsafe {
                let (low, high) = (_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1)));
                _mm256_storeu_si256(to, low);
                _mm256_storeu_si256(to.add(1), high);
            }
        }
        to_rest.copy_from_slice(from_rest);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_copy_is_a_copy_and_nothing_around_it_changes(
            len in 0usize..5000, more in 0usize..3, to in 0usize..130, from in 0usize..130,
        ) {
            let source: Vec<u8> = (0..from + len).map(|i| i as u8 ^ 0x5A).collect();
            let mut target = vec![0xEE; to + len + more + 70];
            // The shorter length counts: `more` bytes of the target have no partner.
            copy_bytes(&mut target[to..to + len + more], &source[from..]);
            prop_assert_eq!(&target[to..to + len], &source[from..]);
            prop_assert!(target[..to].iter().chain(&target[to + len..]).all(|&b| b == 0xEE));
        }
    }
}
