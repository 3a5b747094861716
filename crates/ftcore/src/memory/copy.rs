//! One copy for everything that moves tensors through memory: rings, tensors shared with a child, buckets.

/// Shorter copies are `memcpy`'s, which takes vectors for them too.
const COPY_FROM: usize = 2048;

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
    //! In instructions of their own: where the compiler sees all of a loop of loads and stores, it takes it for a `memcpy` and calls that.

    use std::arch::asm;

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
            // SAFETY: both point to 64 bytes; nothing is asked of their alignment.
            unsafe {
                asm!(
                    "vmovups {low}, [{from}]",
                    "vmovups {high}, [{from} + 32]",
                    "vmovups [{to}], {low}",
                    "vmovups [{to} + 32], {high}",
                    low = out(ymm_reg) _,
                    high = out(ymm_reg) _,
                    from = in(reg) from.as_ptr(),
                    to = in(reg) to.as_mut_ptr(),
                    options(nostack, preserves_flags),
                );
            }
        }
    }

    /// `to = from`, equally long.
    #[target_feature(enable = "avx512f")]
    pub(super) fn copy_512(to: &mut [u8], from: &[u8]) {
        for (to, from) in lines(to, from) {
            // SAFETY: both point to 64 bytes; nothing is asked of their alignment.
            unsafe {
                asm!(
                    "vmovups {line}, [{from}]",
                    "vmovups [{to}], {line}",
                    line = out(zmm_reg) _,
                    from = in(reg) from.as_ptr(),
                    to = in(reg) to.as_mut_ptr(),
                    options(nostack, preserves_flags),
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::hint::black_box;
    use std::time::Instant;

    use proptest::prelude::*;

    use super::*;

    type Copy = fn(&mut [u8], &[u8]);

    /// Every way to copy equally many bytes that this machine has, by name.
    fn ways() -> Vec<(&'static str, Copy)> {
        let mut ways: Vec<(&'static str, Copy)> = vec![("copy_bytes", copy_bytes)];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: this machine has AVX2.
            ways.push(("AVX2", |to, from| unsafe { x86::copy_256(to, from) }));
        }
        ways
    }

    #[test]
    #[ignore = "measures; needs a quiet machine"]
    fn rates() {
        let mut ways = ways();
        ways.push(("memcpy", <[u8]>::copy_from_slice));
        let names: Vec<_> = ways.iter().map(|(name, _)| *name).collect();
        println!("GB/s, the best of seven rounds: {}", names.join(", "));
        for (len, behind) in [(16 << 10, 16), (64 << 10, 16), (1 << 20, 16), (64 << 10, 0)] {
            let (mut to, from) = (vec![0; len + 128], vec![1; len + 64]);
            let (first, source) = (to.as_ptr().align_offset(64), from.as_ptr().align_offset(64));
            let calls = (128 << 20) / len;
            let mut best = vec![f64::MAX; ways.len()];
            // In turns: the machine's own speed changes.
            for _ in 0..7 {
                for ((_, copy), best) in ways.iter().zip(&mut best) {
                    let start = Instant::now();
                    for _ in 0..calls {
                        let to = &mut to[first + behind..first + behind + len];
                        copy(black_box(to), black_box(&from[source..source + len]));
                    }
                    *best = best.min(start.elapsed().as_secs_f64() / calls as f64);
                }
            }
            let rates: Vec<_> = best
                .iter()
                .map(|s| format!("{:.1}", len as f64 / s / 1e9))
                .collect();
            println!("| {} KiB, {behind} | {} |", len >> 10, rates.join(" | "));
        }
    }

    proptest! {
        #[test]
        fn a_copy_is_a_copy_and_nothing_around_it_changes(
            len in 0usize..5000, more in 0usize..3, to in 0usize..130, from in 0usize..130,
        ) {
            let source: Vec<u8> = (0..from + len).map(|i| i as u8 ^ 0x5A).collect();
            let mut target = vec![0xEE; to + len + more + 70];
            // The shorter length counts in `copy_bytes`: `more` bytes of the target have no partner.
            for (name, copy) in ways() {
                let more = if name == "copy_bytes" { more } else { 0 };
                target.fill(0xEE);
                copy(&mut target[to..to + len + more], &source[from..]);
                prop_assert_eq!(&target[to..to + len], &source[from..], "{}", name);
                prop_assert!(target[..to].iter().chain(&target[to + len..]).all(|&b| b == 0xEE));
            }
        }
    }
}
