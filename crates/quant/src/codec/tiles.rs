//! How blocks lie in the bytes: per tile of 8192 values first all scales, then all codes.
//!
//! Two planes keep the codes aligned and contiguous; tiles keep both in the cache, and let whole tiles be encoded or decoded
//! one after the other, with the same bytes as all at once.

/// Values per tile; a multiple of every block.
pub(super) const TILE: usize = 8192;

/// A format by blocks.
pub(super) trait Blocks {
    /// Values per block.
    const BLOCK: usize;

    /// Bytes of scales of a block of `count` values, 1 to `BLOCK`.
    fn scales(count: usize) -> usize;
    /// Bytes of codes of a block of `count` values, 1 to `BLOCK`.
    fn codes(count: usize) -> usize;
    /// Encodes one block. The slices have the lengths above. Returns the number of values that are not finite.
    fn encode(&self, values: &[f32], scales: &mut [u8], codes: &mut [u8]) -> usize;
    /// Decodes one block; with `ADD`, adds to `out`.
    fn decode<const ADD: bool>(&self, scales: &[u8], codes: &[u8], out: &mut [f32]);
}

/// Bytes of (scales, codes) of a slice of `count` values.
fn planes<F: Blocks>(count: usize) -> (usize, usize) {
    let (full, tail) = (count / F::BLOCK, count % F::BLOCK);
    let of = |part: fn(usize) -> usize| full * part(F::BLOCK) + if tail == 0 { 0 } else { part(tail) };
    (of(F::scales), of(F::codes))
}

/// Bytes of `count` values.
pub(super) fn encoded_len<F: Blocks>(count: usize) -> usize {
    let (scales, codes) = planes::<F>(count);
    scales + codes
}

/// Appends the encoding of `values`.
pub(super) fn encode<F: Blocks>(format: &F, values: &[f32], out: &mut Vec<u8>) -> usize {
    let mut non_finite = 0;
    out.reserve(encoded_len::<F>(values.len()));
    for tile in values.chunks(TILE) {
        let start = out.len();
        let (scales, codes) = planes::<F>(tile.len());
        out.resize(start + scales + codes, 0);
        let (_, bytes) = out.split_at_mut(start);
        let (scales, codes) = bytes.split_at_mut(scales);
        let blocks = tile.chunks(F::BLOCK);
        let planes = scales
            .chunks_mut(F::scales(F::BLOCK))
            .zip(codes.chunks_mut(F::codes(F::BLOCK)));
        for (block, (scales, codes)) in blocks.zip(planes) {
            non_finite += format.encode(block, scales, codes);
        }
    }
    non_finite
}

/// Decodes `bytes`, which has the length of `out`'s encoding.
pub(super) fn decode<F: Blocks, const ADD: bool>(format: &F, bytes: &[u8], out: &mut [f32]) {
    let mut rest = bytes;
    for tile in out.chunks_mut(TILE) {
        let (scales, codes) = planes::<F>(tile.len());
        let Some((bytes, behind)) = rest.split_at_checked(scales + codes) else {
            return;
        };
        rest = behind;
        let (scales, codes) = bytes.split_at(scales);
        let planes = scales
            .chunks(F::scales(F::BLOCK))
            .zip(codes.chunks(F::codes(F::BLOCK)));
        for (block, (scales, codes)) in tile.chunks_mut(F::BLOCK).zip(planes) {
            format.decode::<ADD>(scales, codes, block);
        }
    }
}
