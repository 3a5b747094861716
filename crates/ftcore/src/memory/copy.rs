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
    if len >= COPY_FROM {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: this machine has AVX-512.
            unsafe { x86::copy_512(to, from) };
            return;
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: this machine has AVX2.
            unsafe { x86::copy_256(to, from) };
            return;
        }
    }
    to.copy_from_slice(from);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m256i, _mm256_loadu_si256, _mm256_storeu_si256, _mm512_loadu_si512, _mm512_storeu_si512,
    };

    const LINE: usize = 64;

    type Line = [u8; LINE];

    /// Copies what lies before and behind the whole lines of `to`, and returns those with what they become. A store that crosses a line
    /// of the cache takes twice as long: without this, a tensor that begins 16 bytes behind one is filled at half the speed.
    fn lines<'a>(to: &'a mut [u8], from: &'a [u8]) -> impl Iterator<Item = (&'a mut Line, &'a Line)> {
        let head = to.as_ptr().align_offset(LINE).min(to.len()).min(from.len());
        let ((first, to), (from_first, from)) = (to.split_at_mut(head), from.split_at(head));
        first.copy_from_slice(from_first);
        let (to, last) = to.as_chunks_mut::<LINE>();
        let (from, from_last) = from.as_chunks::<LINE>();
        last.copy_from_slice(from_last);
        to.iter_mut().zip(from)
    }

    /// `to = from`, equally long.
    #[target_feature(enable = "avx2")]
    pub(super) fn copy_256(to: &mut [u8], from: &[u8]) {
        for (to, from) in lines(to, from) {
            let (to, from) = (to.as_mut_ptr().cast::<__m256i>(), from.as_ptr().cast::<__m256i>());
            // SAFETY: both point to 64 bytes; nothing is asked of their alignment.
            unsafe {
                let (low, high) = (_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1)));
                _mm256_storeu_si256(to, low);
                _mm256_storeu_si256(to.add(1), high);
            }
        }
    }

    /// `to = from`, equally long.
    #[target_feature(enable = "avx512f")]
    pub(super) fn copy_512(to: &mut [u8], from: &[u8]) {
        for (to, from) in lines(to, from) {
            // SAFETY: both point to 64 bytes; nothing is asked of their alignment.
            unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), _mm512_loadu_si512(from.as_ptr().cast())) };
        }
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
            type Copy = fn(&mut [u8], &[u8]);
            let mut copies: Vec<Copy> = vec![copy_bytes];
            // The one that this machine does not choose.
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("avx2") {
                // SAFETY: this machine has AVX2.
                copies.push(|to, from| unsafe { x86::copy_256(&mut to[..from.len()], from) });
            }
            for copy in copies {
                target.fill(0xEE);
                copy(&mut target[to..to + len + more], &source[from..]);
                prop_assert_eq!(&target[to..to + len], &source[from..]);
                prop_assert!(target[..to].iter().chain(&target[to + len..]).all(|&b| b == 0xEE));
            }
        }
    }
}
