//! The loops over bytes: written once, compiled for each width of register (`Plain` here, wider ones in `x86`).

use super::numbers::{ByteFold, F16, Fold, Map, Number};

/// Where a reduction reads and writes. All slices hold whole elements and are equally long, or the shortest counts.
pub(super) enum Operands<'a> {
    /// `into = into ∘ from`.
    InPlace { into: &'a mut [u8], from: &'a [u8] },
    /// `out = a ∘ b`.
    Into {
        out: &'a mut [u8],
        a: &'a [u8],
        b: &'a [u8],
    },
}

/// One way to compile the loops.
pub(super) trait Loops: Copy {
    /// Folds numbers in units of `N` bytes.
    fn fold<F: Fold, U: Number<N>, const N: usize>(self, operands: Operands<'_>);
    /// Folds f16, in the unit that suits this width.
    fn fold_f16<F: Fold>(self, operands: Operands<'_>);
    /// Folds byte by byte.
    fn bytes<F: ByteFold>(self, operands: Operands<'_>);
    /// Maps every number.
    fn map<M: Map, U: Number<N>, const N: usize>(self, map: M, data: &mut [u8]);
    /// Maps every f16.
    fn map_f16<M: Map>(self, map: M, data: &mut [u8]);
}

/// Compiled for what every machine of this architecture has.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plain;

impl Loops for Plain {
    fn fold<F: Fold, U: Number<N>, const N: usize>(self, operands: Operands<'_>) {
        fold_all::<F, U, N>(operands);
    }
    fn fold_f16<F: Fold>(self, operands: Operands<'_>) {
        fold_all::<F, F16, 2>(operands);
    }
    fn bytes<F: ByteFold>(self, operands: Operands<'_>) {
        fold_bytes::<F>(operands);
    }
    fn map<M: Map, U: Number<N>, const N: usize>(self, map: M, data: &mut [u8]) {
        map_all::<M, U, N>(map, data);
    }
    fn map_f16<M: Map>(self, map: M, data: &mut [u8]) {
        map_all::<M, F16, 2>(map, data);
    }
}

/// The bytes behind the last whole unit, with zeros behind them.
#[inline(always)]
fn padded<const N: usize>(rest: &[u8]) -> [u8; N] {
    let mut unit = [0; N];
    for (to, from) in unit.iter_mut().zip(rest) {
        *to = *from;
    }
    unit
}

/// Writes as much of `unit` as there is room for.
#[inline(always)]
fn put<const N: usize>(rest: &mut [u8], unit: [u8; N]) {
    for (to, from) in rest.iter_mut().zip(unit) {
        *to = from;
    }
}

#[inline(always)]
fn fold_one<F: Fold, U: Number<N>, const N: usize>(a: [u8; N], b: [u8; N]) -> [u8; N] {
    F::of(U::load(a), U::load(b)).store()
}

#[inline(always)]
pub(super) fn fold_all<F: Fold, U: Number<N>, const N: usize>(operands: Operands<'_>) {
    match operands {
        Operands::InPlace { into, from } => {
            let (into, into_rest) = into.as_chunks_mut::<N>();
            let (from, from_rest) = from.as_chunks::<N>();
            for (a, b) in into.iter_mut().zip(from) {
                *a = fold_one::<F, U, N>(*a, *b);
            }
            let (a, b) = (padded(into_rest), padded(from_rest));
            put(into_rest, fold_one::<F, U, N>(a, b));
        }
        Operands::Into { out, a, b } => {
            let (out, out_rest) = out.as_chunks_mut::<N>();
            let (a, a_rest) = a.as_chunks::<N>();
            let (b, b_rest) = b.as_chunks::<N>();
            for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
                *out = fold_one::<F, U, N>(*a, *b);
            }
            put(out_rest, fold_one::<F, U, N>(padded(a_rest), padded(b_rest)));
        }
    }
}

#[inline(always)]
pub(super) fn fold_bytes<F: ByteFold>(operands: Operands<'_>) {
    match operands {
        Operands::InPlace { into, from } => {
            for (a, b) in into.iter_mut().zip(from) {
                *a = F::of(*a, *b);
            }
        }
        Operands::Into { out, a, b } => {
            for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
                *out = F::of(*a, *b);
            }
        }
    }
}

#[inline(always)]
pub(super) fn map_all<M: Map, U: Number<N>, const N: usize>(map: M, data: &mut [u8]) {
    let (units, rest) = data.as_chunks_mut::<N>();
    for unit in units {
        *unit = map.of(U::load(*unit)).store();
    }
    let last = padded(rest);
    put(rest, map.of(U::load(last)).store());
}
