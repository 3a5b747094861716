//! How codes of less than 8 bits share bytes. The halves and quarters of a block lie over each other, so that packing and unpacking
//! need no shuffling: with h = ⌈n/2⌉ and q = ⌈n/4⌉, byte i holds codes i and i + h of 4 bits, and codes i, i + q, i + 2q, i + 3q of 2 bits.

/// Bytes of `count` codes of `bits` bits: 8, 4 or 2.
#[inline(always)]
pub(super) const fn bytes(bits: u32, count: usize) -> usize {
    match bits {
        8 => count,
        4 => count.div_ceil(2),
        _ => count.div_ceil(4),
    }
}

/// Writes the lowest `BITS` of each code; `out` has [`bytes`] for them.
#[inline(always)]
pub(super) fn pack<const BITS: u32>(codes: &[i8], out: &mut [u8]) {
    match BITS {
        8 => {
            let n = codes.len().min(out.len());
            let (codes, out) = (&codes[..n], &mut out[..n]);
            for i in 0..n {
                out[i] = codes[i] as u8;
            }
        }
        4 => halves(codes, out),
        _ => quarters(codes, out),
    }
}

/// The inverse of [`pack`]: codes come back with their sign.
#[inline(always)]
pub(super) fn unpack<const BITS: u32>(packed: &[u8], codes: &mut [i8]) {
    match BITS {
        8 => {
            let n = codes.len().min(packed.len());
            let (packed, codes) = (&packed[..n], &mut codes[..n]);
            for i in 0..n {
                codes[i] = packed[i] as i8;
            }
        }
        4 => {
            let (first, second) = codes.split_at_mut(codes.len().div_ceil(2));
            each(packed, first, |b| (b << 4) as i8 >> 4);
            each(packed, second, |b| b as i8 >> 4);
        }
        _ => {
            for k in 0..4 {
                let shift = 2 * k;
                each(packed, quarter(codes, packed.len(), k), |b| {
                    (b >> shift << 6) as i8 >> 6
                });
            }
        }
    }
}

/// Codes `k · q` to `(k + 1) · q`.
#[inline(always)]
fn quarter(codes: &mut [i8], q: usize, k: usize) -> &mut [i8] {
    let n = codes.len();
    &mut codes[(k * q).min(n)..((k + 1) * q).min(n)]
}

/// Makes every code out of its byte. Plain indices: they become vector code in every instruction set, where nested
/// iterators are not always inlined.
#[inline(always)]
fn each(packed: &[u8], codes: &mut [i8], f: impl Fn(u8) -> i8) {
    let n = packed.len().min(codes.len());
    let (packed, codes) = (&packed[..n], &mut codes[..n]);
    for i in 0..n {
        codes[i] = f(packed[i]);
    }
}

#[inline(always)]
fn halves(codes: &[i8], out: &mut [u8]) {
    let (first, second) = codes.split_at(codes.len().div_ceil(2).min(out.len()));
    if first.len() == second.len() {
        let n = first.len();
        let (second, out) = (&second[..n], &mut out[..n]);
        for i in 0..n {
            out[i] = (first[i] as u8 & 15) | (second[i] as u8) << 4;
        }
        return;
    }
    for (i, to) in out.iter_mut().enumerate() {
        let half = |codes: &[i8]| codes.get(i).map_or(0, |c| *c as u8 & 15);
        *to = half(first) | half(second) << 4;
    }
}

#[inline(always)]
fn quarters(codes: &[i8], out: &mut [u8]) {
    let q = out.len();
    let bits = |c: i8| c as u8 & 3;
    if codes.len() == 4 * q {
        let (a, rest) = codes.split_at(q);
        let (b, rest) = rest.split_at(q);
        let (c, d) = rest.split_at(q);
        let d = &d[..q];
        for i in 0..q {
            out[i] = bits(a[i]) | bits(b[i]) << 2 | bits(c[i]) << 4 | bits(d[i]) << 6;
        }
        return;
    }
    for (i, to) in out.iter_mut().enumerate() {
        *to = (0..4).fold(0, |byte, k| {
            byte | codes.get(i + k * q).map_or(0, |c| bits(*c)) << (2 * k)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn there_and_back<const BITS: u32>() {
        let (least, count) = (-(1i32 << (BITS - 1)), 1i32 << BITS);
        for n in 1..=130usize {
            let codes: Vec<i8> = (0..n)
                .map(|i| (least + (i as i32 * 37 + n as i32) % count) as i8)
                .collect();
            let mut packed = vec![0xaa; bytes(BITS, n)];
            // Bytes that hold fewer codes than fit must not keep what was there.
            pack::<BITS>(&codes, &mut packed);
            let mut again = vec![0; bytes(BITS, n)];
            pack::<BITS>(&codes, &mut again);
            assert_eq!(packed, again, "{BITS} bits, {n} codes");
            let mut back = vec![99; n];
            unpack::<BITS>(&packed, &mut back);
            assert_eq!(back, codes, "{BITS} bits");
        }
    }

    #[test]
    fn every_code_at_every_length_comes_back() {
        there_and_back::<8>();
        there_and_back::<4>();
        there_and_back::<2>();
    }

    #[test]
    fn the_layout_is_the_one_written_down() {
        let mut out = [0; 2];
        pack::<4>(&[1, 2, -1], &mut out);
        assert_eq!(out, [0xf1, 0x02]);
        let mut out = [0; 2];
        pack::<2>(&[1, -1, 0, -2, 1], &mut out);
        // q = 2: byte 0 holds codes 0, 2, 4; byte 1 codes 1 and 3.
        assert_eq!(out, [0b01_00_01, 0b10_11]);
    }
}
