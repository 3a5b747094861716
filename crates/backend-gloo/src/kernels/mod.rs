//! Reduction kernels per (dtype, op) over plain bytes.
//!
//! Bytes, because a piece of a message may begin anywhere in a tensor. `numbers` says what an operation means, `loops` walks
//! over the bytes, `x86` compiles the same loops for wider registers; which is used is decided once. All give the same bytes
//! (INV-3): f16 and bf16 are computed in f32 and rounded once per call, a NaN result is the one positive quiet NaN of its type,
//! and -0 is less than +0, so that neither the machine nor the order of two operands shows; the thread's own mode for floats does not
//! count (`ftcore::float_mode`); bool is 0 or 1 (L16).

mod loops;
mod numbers;
#[cfg(test)]
mod rates;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::sync::OnceLock;

use ftcore::float_mode::DefaultMode;
use ftcore::{DType, DTypeSet, Error, ErrorKind, ReduceOp, Result, copy_bytes};
use half::{bf16, f16};

use loops::{Loops, Operands, Plain};
use numbers::{
    Add, And, Bf16Pair, Both, DivideBy, Either, Fold, Least, Map, Most, Multiply, Neutral, OneOfTwo, Or,
    ScaleBy, Xor,
};

/// A copy of at least this many bytes is better written past the caches ([`copy_stream`]): its
/// first bytes would be evicted before they are read again. Measured: docs/benchmarks/kernels.md.
pub(crate) const STREAM_FROM: usize = 16 << 20;

/// The loops that this machine can run.
#[derive(Debug, Clone, Copy)]
enum Width {
    Plain(Plain),
    #[cfg(target_arch = "x86_64")]
    Avx2(x86::Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(x86::Avx512),
}

impl Width {
    /// All that this machine has, the narrowest first.
    fn available() -> Vec<Self> {
        let mut all = vec![Self::Plain(Plain)];
        #[cfg(target_arch = "x86_64")]
        {
            all.extend(x86::Avx2::detect().map(Self::Avx2));
            all.extend(x86::Avx512::detect().map(Self::Avx512));
        }
        all
    }

    /// The best for `dtype`. Wider is not always better: away from memory AVX-512 gains only where there is much to compute,
    /// which is the 16-bit floats; from memory its unaligned loads cost it a quarter against AVX2.
    fn best(dtype: DType) -> Self {
        static BEST: OnceLock<(Width, Width)> = OnceLock::new();
        let (wide, widest) = BEST.get_or_init(|| {
            let all = Self::available();
            let widest = all.last().copied().unwrap_or(Self::Plain(Plain));
            (all.get(1).copied().unwrap_or(widest), widest)
        });
        if matches!(dtype, DType::F16 | DType::BF16) {
            *widest
        } else {
            *wide
        }
    }

    fn reduce(self, dtype: DType, op: ReduceOp, operands: Operands<'_>) -> Result<()> {
        let _mode = dtype.is_float().then(DefaultMode::set);
        self.reduce_here(dtype, op, operands)
    }

    /// In the thread's own mode. Not inlined, so that nothing of it can move out from between the two changes of the mode.
    #[inline(never)]
    fn reduce_here(self, dtype: DType, op: ReduceOp, operands: Operands<'_>) -> Result<()> {
        match self {
            Self::Plain(loops) => reduce_with(loops, dtype, op, operands),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(loops) => reduce_with(loops, dtype, op, operands),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(loops) => reduce_with(loops, dtype, op, operands),
        }
    }

    fn map(self, dtype: DType, map: impl Map, data: &mut [u8]) -> Option<()> {
        let _mode = dtype.is_float().then(DefaultMode::set);
        self.map_here(dtype, map, data)
    }

    /// Likewise.
    #[inline(never)]
    fn map_here(self, dtype: DType, map: impl Map, data: &mut [u8]) -> Option<()> {
        match self {
            Self::Plain(loops) => map_with(loops, dtype, map, data),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(loops) => map_with(loops, dtype, map, data),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(loops) => map_with(loops, dtype, map, data),
        }
    }
}

fn refused(dtype: DType, op: ReduceOp) -> Error {
    // Validation stands before this; a pair that gets here is a hole in the capability table.
    Error::new(
        ErrorKind::Internal,
        format!("no kernel for {op} on {dtype} although it is advertised"),
    )
}

fn reduce_with<L: Loops>(loops: L, dtype: DType, op: ReduceOp, operands: Operands<'_>) -> Result<()> {
    if dtype == DType::Bool {
        match op {
            ReduceOp::Sum | ReduceOp::Max | ReduceOp::Bor => loops.bytes::<Either>(operands),
            ReduceOp::Product | ReduceOp::Min | ReduceOp::Band => loops.bytes::<Both>(operands),
            ReduceOp::Bxor => loops.bytes::<OneOfTwo>(operands),
            _ => return Err(refused(dtype, op)),
        }
        return Ok(());
    }
    let done = match op {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) => fold_with::<L, Add>(loops, dtype, operands),
        ReduceOp::Product => fold_with::<L, Multiply>(loops, dtype, operands),
        ReduceOp::Min => fold_with::<L, Least>(loops, dtype, operands),
        ReduceOp::Max => fold_with::<L, Most>(loops, dtype, operands),
        // Bitwise operations do not care where one element ends.
        ReduceOp::Band if !dtype.is_float() => {
            loops.bytes::<And>(operands);
            Some(())
        }
        ReduceOp::Bor if !dtype.is_float() => {
            loops.bytes::<Or>(operands);
            Some(())
        }
        ReduceOp::Bxor if !dtype.is_float() => {
            loops.bytes::<Xor>(operands);
            Some(())
        }
        _ => None,
    };
    done.ok_or_else(|| refused(dtype, op))
}

/// `None` if there is no arithmetic on `dtype`.
fn fold_with<L: Loops, F: Fold>(loops: L, dtype: DType, operands: Operands<'_>) -> Option<()> {
    match dtype {
        DType::F64 => loops.fold::<F, f64, 8>(operands),
        DType::F32 => loops.fold::<F, f32, 4>(operands),
        DType::F16 => loops.fold_f16::<F>(operands),
        DType::BF16 => loops.fold::<F, Bf16Pair, 4>(operands),
        DType::I64 => loops.fold::<F, i64, 8>(operands),
        DType::I32 => loops.fold::<F, i32, 4>(operands),
        DType::I16 => loops.fold::<F, i16, 2>(operands),
        DType::I8 => loops.fold::<F, i8, 1>(operands),
        DType::U64 => loops.fold::<F, u64, 8>(operands),
        DType::U32 => loops.fold::<F, u32, 4>(operands),
        DType::U16 => loops.fold::<F, u16, 2>(operands),
        DType::U8 => loops.fold::<F, u8, 1>(operands),
        _ => return None,
    }
    Some(())
}

/// `None` if there is no arithmetic on `dtype`.
fn map_with<L: Loops, M: Map>(loops: L, dtype: DType, map: M, data: &mut [u8]) -> Option<()> {
    match dtype {
        DType::F64 => loops.map::<M, f64, 8>(map, data),
        DType::F32 => loops.map::<M, f32, 4>(map, data),
        DType::F16 => loops.map_f16::<M>(map, data),
        DType::BF16 => loops.map::<M, Bf16Pair, 4>(map, data),
        DType::I64 => loops.map::<M, i64, 8>(map, data),
        DType::I32 => loops.map::<M, i32, 4>(map, data),
        DType::I16 => loops.map::<M, i16, 2>(map, data),
        DType::I8 => loops.map::<M, i8, 1>(map, data),
        DType::U64 => loops.map::<M, u64, 8>(map, data),
        DType::U32 => loops.map::<M, u32, 4>(map, data),
        DType::U16 => loops.map::<M, u16, 2>(map, data),
        DType::U8 => loops.map::<M, u8, 1>(map, data),
        _ => return None,
    }
    Some(())
}

/// `into = into ∘ from`, element by element. Both hold whole elements and are equally long.
pub(crate) fn reduce(dtype: DType, op: ReduceOp, into: &mut [u8], from: &[u8]) -> Result<()> {
    Width::best(dtype).reduce(dtype, op, Operands::InPlace { into, from })
}

/// `out = a ∘ b`, element by element. All hold whole elements, at any address, and are equally long.
pub(crate) fn reduce_into(dtype: DType, op: ReduceOp, out: &mut [u8], a: &[u8], b: &[u8]) -> Result<()> {
    Width::best(dtype).reduce(dtype, op, Operands::Into { out, a, b })
}

/// As [`copy_bytes`], written past the caches: for a `to` that is part of at least
/// [`STREAM_FROM`] bytes. The stores are done (for other threads and processes too) when it returns.
pub(crate) fn copy_stream(to: &mut [u8], from: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    if let Width::Avx2(avx2) = Width::best(DType::U8) {
        avx2.stream(to, from);
        return;
    }
    copy_bytes(to, from);
}

/// Divides every element by `count` (integers toward zero); zeros if `count` is 0.
pub(crate) fn divide(dtype: DType, data: &mut [u8], count: u32) -> Result<()> {
    let done = if count == 0 && table_of(ReduceOp::Avg).contains(dtype) {
        data.fill(0); // without contributions: an average of nothing is zero by contract
        Some(())
    } else {
        Width::best(dtype).map(dtype, DivideBy(count), data)
    };
    done.ok_or_else(|| refused(dtype, ReduceOp::Avg))
}

/// Multiplies every element by `factor`; floats only.
pub(crate) fn scale(dtype: DType, data: &mut [u8], factor: f64) -> Result<()> {
    let done = if dtype.is_float() {
        Width::best(dtype).map(dtype, ScaleBy(factor), data)
    } else {
        None
    };
    done.ok_or_else(|| refused(dtype, ReduceOp::PremulSum(factor)))
}

fn fill<T: Neutral<N>, const N: usize>(op: ReduceOp, data: &mut [u8]) {
    let value = match op {
        ReduceOp::Product => T::ONE,
        ReduceOp::Min => T::TOP,
        ReduceOp::Max => T::BOTTOM,
        ReduceOp::Band => [0xFF; N],
        _ => [0; N],
    };
    data.as_chunks_mut::<N>().0.fill(value);
}

/// Fills `data` with the value that leaves every other one as it is.
pub(crate) fn fill_identity(dtype: DType, op: ReduceOp, data: &mut [u8]) -> Result<()> {
    match dtype {
        DType::F64 => fill::<f64, 8>(op, data),
        DType::F32 => fill::<f32, 4>(op, data),
        DType::F16 => fill::<f16, 2>(op, data),
        DType::BF16 => fill::<bf16, 2>(op, data),
        DType::I64 => fill::<i64, 8>(op, data),
        DType::I32 => fill::<i32, 4>(op, data),
        DType::I16 => fill::<i16, 2>(op, data),
        DType::I8 => fill::<i8, 1>(op, data),
        DType::U64 => fill::<u64, 8>(op, data),
        DType::U32 => fill::<u32, 4>(op, data),
        DType::U16 => fill::<u16, 2>(op, data),
        DType::U8 => fill::<u8, 1>(op, data),
        DType::Bool => data.fill(u8::from(matches!(
            op,
            ReduceOp::Product | ReduceOp::Min | ReduceOp::Band
        ))),
        _ => return Err(refused(dtype, op)),
    }
    Ok(())
}

/// Makes every byte of a bool tensor 0 or 1.
pub(crate) fn canonical_bools(data: &mut [u8]) {
    for b in data {
        *b = u8::from(*b != 0);
    }
}

fn table_of(op: ReduceOp) -> DTypeSet {
    table()
        .get(usize::from(op.code()))
        .copied()
        .unwrap_or_else(|| DTypeSet::of(&[]))
}

/// The dtypes that [`reduce`] serves, indexed by `ReduceOp::code`.
pub(crate) fn table() -> [DTypeSet; ReduceOp::COUNT] {
    let floats = DTypeSet::of(&[DType::F64, DType::F32, DType::F16, DType::BF16]);
    let integers = [
        DType::I64,
        DType::I32,
        DType::I16,
        DType::I8,
        DType::U64,
        DType::U32,
        DType::U16,
        DType::U8,
    ];
    let numbers = integers.iter().fold(floats, |s, &d| s.with(d));
    let everything = numbers.with(DType::Bool);
    let bitwise = DTypeSet::of(&integers).with(DType::Bool);
    // c10d's order: sum, avg, product, min, max, band, bor, bxor, premul_sum.
    [
        everything, numbers, everything, everything, everything, bitwise, bitwise, bitwise, floats,
    ]
}
