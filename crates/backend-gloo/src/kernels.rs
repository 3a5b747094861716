//! Reduction kernels per (dtype, op) over plain bytes.
//!
//! Bytes, because a piece of a message may begin anywhere in a tensor; `as_chunks` keeps the loops free of bounds checks,
//! so that the compiler turns them into vector code. Operand order is `into ∘ from`, always. f16 and bf16 are computed in
//! f32 and rounded once per call; NaN propagates through min and max; bool is 0 or 1 whatever came in (L16).

use ftcore::{DType, DTypeSet, Error, ErrorKind, ReduceOp, Result};
use half::{bf16, f16};

/// A number of `N` bytes, as the kernels see it.
trait Lane<const N: usize>: Copy {
    const ZERO: Self;
    const ONE: Self;
    /// The identity of min.
    const TOP: Self;
    /// The identity of max.
    const BOTTOM: Self;
    fn load(bytes: [u8; N]) -> Self;
    fn store(self) -> [u8; N];
    fn add(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn least(self, other: Self) -> Self;
    fn most(self, other: Self) -> Self;
    fn divide(self, count: u32) -> Self;
    fn scale(self, factor: f64) -> Self;
}

macro_rules! float_lanes {
    ($($t:ty, $n:literal;)*) => {$(
        impl Lane<$n> for $t {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const TOP: Self = <$t>::INFINITY;
            const BOTTOM: Self = <$t>::NEG_INFINITY;
            fn load(bytes: [u8; $n]) -> Self { <$t>::from_ne_bytes(bytes) }
            fn store(self) -> [u8; $n] { self.to_ne_bytes() }
            fn add(self, other: Self) -> Self { self + other }
            fn mul(self, other: Self) -> Self { self * other }
            fn least(self, other: Self) -> Self { if (self < other) | self.is_nan() { self } else { other } }
            fn most(self, other: Self) -> Self { if (self > other) | self.is_nan() { self } else { other } }
            fn divide(self, count: u32) -> Self { self / (count as $t) }
            fn scale(self, factor: f64) -> Self { self * (factor as $t) }
        }
    )*};
}
float_lanes! { f64, 8; f32, 4; }

macro_rules! half_lanes {
    ($($t:ty;)*) => {$(
        impl Lane<2> for $t {
            const ZERO: Self = <$t>::ZERO;
            const ONE: Self = <$t>::ONE;
            const TOP: Self = <$t>::INFINITY;
            const BOTTOM: Self = <$t>::NEG_INFINITY;
            fn load(bytes: [u8; 2]) -> Self { <$t>::from_ne_bytes(bytes) }
            fn store(self) -> [u8; 2] { self.to_ne_bytes() }
            fn add(self, other: Self) -> Self { <$t>::from_f32(self.to_f32() + other.to_f32()) }
            fn mul(self, other: Self) -> Self { <$t>::from_f32(self.to_f32() * other.to_f32()) }
            fn least(self, other: Self) -> Self { if (self < other) | self.is_nan() { self } else { other } }
            fn most(self, other: Self) -> Self { if (self > other) | self.is_nan() { self } else { other } }
            fn divide(self, count: u32) -> Self { <$t>::from_f32(self.to_f32() / count as f32) }
            fn scale(self, factor: f64) -> Self { <$t>::from_f32(self.to_f32() * factor as f32) }
        }
    )*};
}
half_lanes! { f16; bf16; }

macro_rules! integer_lanes {
    ($($t:ty, $n:literal, $wide:ty;)*) => {$(
        impl Lane<$n> for $t {
            const ZERO: Self = 0;
            const ONE: Self = 1;
            const TOP: Self = <$t>::MAX;
            const BOTTOM: Self = <$t>::MIN;
            fn load(bytes: [u8; $n]) -> Self { <$t>::from_ne_bytes(bytes) }
            fn store(self) -> [u8; $n] { self.to_ne_bytes() }
            fn add(self, other: Self) -> Self { self.wrapping_add(other) }
            fn mul(self, other: Self) -> Self { self.wrapping_mul(other) }
            fn least(self, other: Self) -> Self { self.min(other) }
            fn most(self, other: Self) -> Self { self.max(other) }
            // Toward zero, in a type that holds the count (i8 does not hold 200 ranks).
            fn divide(self, count: u32) -> Self { ((self as $wide) / (count.max(1) as $wide)) as $t }
            fn scale(self, _factor: f64) -> Self { self }
        }
    )*};
}
integer_lanes! {
    i64, 8, i64; i32, 4, i64; i16, 2, i64; i8, 1, i64;
    u64, 8, u64; u32, 4, u64; u16, 2, u64; u8, 1, u64;
}

/// Applies `f` to every pair of elements.
#[inline]
fn zip<T: Lane<N>, const N: usize>(into: &mut [u8], from: &[u8], f: impl Fn(T, T) -> T) {
    let (into, _) = into.as_chunks_mut::<N>();
    let (from, _) = from.as_chunks::<N>();
    for (a, b) in into.iter_mut().zip(from) {
        *a = f(T::load(*a), T::load(*b)).store();
    }
}

/// Applies `f` to every element.
#[inline]
fn each<T: Lane<N>, const N: usize>(data: &mut [u8], f: impl Fn(T) -> T) {
    for a in data.as_chunks_mut::<N>().0 {
        *a = f(T::load(*a)).store();
    }
}

fn refused(dtype: DType, op: ReduceOp) -> Error {
    // Validation stands before this; a pair that gets here is a hole in the capability table.
    Error::new(
        ErrorKind::Internal,
        format!("no kernel for {op} on {dtype} although it is advertised"),
    )
}

fn bits(into: &mut [u8], from: &[u8], f: impl Fn(u8, u8) -> u8) {
    for (a, b) in into.iter_mut().zip(from) {
        *a = f(*a, *b);
    }
}

fn reduce_numbers<T: Lane<N>, const N: usize>(
    op: ReduceOp,
    dtype: DType,
    into: &mut [u8],
    from: &[u8],
) -> Result<()> {
    match op {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) => zip::<T, N>(into, from, T::add),
        ReduceOp::Product => zip::<T, N>(into, from, T::mul),
        ReduceOp::Min => zip::<T, N>(into, from, T::least),
        ReduceOp::Max => zip::<T, N>(into, from, T::most),
        // Bitwise operations do not care where one element ends.
        ReduceOp::Band if !dtype.is_float() => bits(into, from, |a, b| a & b),
        ReduceOp::Bor if !dtype.is_float() => bits(into, from, |a, b| a | b),
        ReduceOp::Bxor if !dtype.is_float() => bits(into, from, |a, b| a ^ b),
        _ => return Err(refused(dtype, op)),
    }
    Ok(())
}

fn reduce_bools(op: ReduceOp, into: &mut [u8], from: &[u8]) -> Result<()> {
    let t = |b: u8| u8::from(b != 0);
    match op {
        ReduceOp::Sum | ReduceOp::Max | ReduceOp::Bor => bits(into, from, |a, b| t(a) | t(b)),
        ReduceOp::Product | ReduceOp::Min | ReduceOp::Band => bits(into, from, |a, b| t(a) & t(b)),
        ReduceOp::Bxor => bits(into, from, |a, b| t(a) ^ t(b)),
        _ => return Err(refused(DType::Bool, op)),
    }
    Ok(())
}

/// Calls `$f::<type, size>($args)` for the number type behind a dtype.
macro_rules! by_dtype {
    ($dtype:expr, $f:ident ( $($arg:expr),* ), bool => $bool:expr, other => $other:expr) => {
        match $dtype {
            DType::F64 => $f::<f64, 8>($($arg),*),
            DType::F32 => $f::<f32, 4>($($arg),*),
            DType::F16 => $f::<f16, 2>($($arg),*),
            DType::BF16 => $f::<bf16, 2>($($arg),*),
            DType::I64 => $f::<i64, 8>($($arg),*),
            DType::I32 => $f::<i32, 4>($($arg),*),
            DType::I16 => $f::<i16, 2>($($arg),*),
            DType::I8 => $f::<i8, 1>($($arg),*),
            DType::U64 => $f::<u64, 8>($($arg),*),
            DType::U32 => $f::<u32, 4>($($arg),*),
            DType::U16 => $f::<u16, 2>($($arg),*),
            DType::U8 => $f::<u8, 1>($($arg),*),
            DType::Bool => $bool,
            _ => $other,
        }
    };
}

/// `into = into ∘ from`, element by element. Both hold whole elements and are equally long.
pub(crate) fn reduce(dtype: DType, op: ReduceOp, into: &mut [u8], from: &[u8]) -> Result<()> {
    by_dtype!(dtype, reduce_numbers(op, dtype, into, from),
        bool => reduce_bools(op, into, from),
        other => Err(refused(dtype, op)))
}

fn divide_numbers<T: Lane<N>, const N: usize>(data: &mut [u8], count: u32) -> Result<()> {
    if count == 0 {
        data.fill(0); // nobody contributed: an average of nothing is zero by contract
    } else {
        each::<T, N>(data, |x| x.divide(count));
    }
    Ok(())
}

/// Divides every element by `count` (integers toward zero); zeros if `count` is 0.
pub(crate) fn divide(dtype: DType, data: &mut [u8], count: u32) -> Result<()> {
    by_dtype!(dtype, divide_numbers(data, count),
        bool => Err(refused(dtype, ReduceOp::Avg)),
        other => Err(refused(dtype, ReduceOp::Avg)))
}

fn scale_numbers<T: Lane<N>, const N: usize>(data: &mut [u8], factor: f64) -> Result<()> {
    each::<T, N>(data, |x| x.scale(factor));
    Ok(())
}

/// Multiplies every element by `factor`; floats only.
pub(crate) fn scale(dtype: DType, data: &mut [u8], factor: f64) -> Result<()> {
    if !dtype.is_float() {
        return Err(refused(dtype, ReduceOp::PremulSum(factor)));
    }
    by_dtype!(dtype, scale_numbers(data, factor),
        bool => Err(refused(dtype, ReduceOp::PremulSum(factor))),
        other => Err(refused(dtype, ReduceOp::PremulSum(factor))))
}

fn identity_numbers<T: Lane<N>, const N: usize>(op: ReduceOp, data: &mut [u8]) -> Result<()> {
    let value = match op {
        ReduceOp::Product => T::ONE,
        ReduceOp::Min => T::TOP,
        ReduceOp::Max => T::BOTTOM,
        ReduceOp::Band => {
            data.fill(0xFF);
            return Ok(());
        }
        _ => T::ZERO,
    };
    each::<T, N>(data, |_| value);
    Ok(())
}

/// Fills `data` with the value that leaves every other one as it is.
pub(crate) fn fill_identity(dtype: DType, op: ReduceOp, data: &mut [u8]) -> Result<()> {
    let neutral_bool = u8::from(matches!(op, ReduceOp::Product | ReduceOp::Min | ReduceOp::Band));
    by_dtype!(dtype, identity_numbers(op, data),
        bool => { data.fill(neutral_bool); Ok(()) },
        other => Err(refused(dtype, op)))
}

/// Makes every byte of a bool tensor 0 or 1.
pub(crate) fn canonical_bools(data: &mut [u8]) {
    for b in data {
        *b = u8::from(*b != 0);
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use ftcore::{Bool, Element, Tensor};

    const OPS: [ReduceOp; 9] = [
        ReduceOp::Sum,
        ReduceOp::Avg,
        ReduceOp::Product,
        ReduceOp::Min,
        ReduceOp::Max,
        ReduceOp::Band,
        ReduceOp::Bor,
        ReduceOp::Bxor,
        ReduceOp::PremulSum(2.0),
    ];

    fn pair<T: Element>(op: ReduceOp, a: T, b: T) -> T {
        let mut into = Tensor::from_vec(vec![a]);
        let from = Tensor::from_vec(vec![b]);
        reduce(T::DTYPE, op, into.bytes_mut(), from.bytes()).unwrap();
        into.as_slice::<T>().unwrap()[0]
    }

    #[test]
    fn the_table_says_exactly_what_the_kernels_do() {
        for dtype in DType::ALL {
            for op in OPS {
                let mut into = Tensor::zeros(dtype, 3);
                let from = Tensor::zeros(dtype, 3);
                let done = reduce(dtype, op, into.bytes_mut(), from.bytes())
                    .and_then(|()| fill_identity(dtype, op, into.bytes_mut()))
                    .and_then(|()| match op {
                        ReduceOp::Avg => divide(dtype, into.bytes_mut(), 2),
                        ReduceOp::PremulSum(f) => scale(dtype, into.bytes_mut(), f),
                        _ => Ok(()),
                    });
                let advertised = table()[usize::from(op.code())].contains(dtype);
                assert_eq!(done.is_ok(), advertised, "{op} on {dtype}");
            }
        }
    }

    #[test]
    fn the_identity_changes_nothing() {
        for dtype in DType::ALL {
            for op in OPS {
                if !table()[usize::from(op.code())].contains(dtype) {
                    continue;
                }
                let mut value = Tensor::zeros(dtype, 4);
                let pattern: Vec<u8> = match dtype {
                    DType::Bool => vec![0, 1, 1, 0],
                    DType::F16 => [1.0f32, -2.5, 0.0, 65504.0]
                        .iter()
                        .flat_map(|&x| f16::from_f32(x).to_ne_bytes())
                        .collect(),
                    DType::BF16 => [1.0f32, -2.5, 0.0, 3e38]
                        .iter()
                        .flat_map(|&x| bf16::from_f32(x).to_ne_bytes())
                        .collect(),
                    DType::F32 => [1.0f32, -2.5, 0.0, 3e38]
                        .iter()
                        .flat_map(|x| x.to_ne_bytes())
                        .collect(),
                    DType::F64 => [1.0f64, -2.5, 0.0, 3e300]
                        .iter()
                        .flat_map(|x| x.to_ne_bytes())
                        .collect(),
                    _ => (0..4 * dtype.size()).map(|i| (i * 37) as u8).collect(),
                };
                value.bytes_mut().copy_from_slice(&pattern);
                let mut neutral = Tensor::zeros(dtype, 4);
                fill_identity(dtype, op, neutral.bytes_mut()).unwrap();
                reduce(dtype, op, value.bytes_mut(), neutral.bytes()).unwrap();
                assert_eq!(
                    value.bytes(),
                    &pattern[..],
                    "{op} on {dtype}, identity on the right"
                );
                reduce(dtype, op, neutral.bytes_mut(), value.bytes()).unwrap();
                assert_eq!(
                    neutral.bytes(),
                    &pattern[..],
                    "{op} on {dtype}, identity on the left"
                );
            }
        }
    }

    #[test]
    fn l16_bool_is_canonical_and_nan_propagates_from_either_side() {
        for (op, both) in [(ReduceOp::Sum, 1), (ReduceOp::Bxor, 0), (ReduceOp::Product, 1)] {
            assert_eq!(pair(op, Bool(2), Bool(255)), Bool(both), "{op}");
        }
        for op in [ReduceOp::Min, ReduceOp::Max, ReduceOp::Sum, ReduceOp::Product] {
            assert!(pair(op, f32::NAN, 1.0).is_nan() && pair(op, 1.0, f32::NAN).is_nan());
            assert!(pair(op, f64::NAN, 1.0).is_nan() && pair(op, 1.0, f64::NAN).is_nan());
            let (n, one) = (f16::NAN, f16::ONE);
            assert!(pair(op, n, one).is_nan() && pair(op, one, n).is_nan());
            let (n, one) = (bf16::NAN, bf16::ONE);
            assert!(pair(op, n, one).is_nan() && pair(op, one, n).is_nan());
        }
        assert_eq!(pair(ReduceOp::Sum, 200u8, 200u8), 144, "documented wrap-around");
    }

    #[test]
    fn averages_divide_toward_zero_and_survive_more_ranks_than_the_type_holds() {
        let mut t = Tensor::from_vec(vec![-7i8, 7, 100]);
        divide(DType::I8, t.bytes_mut(), 2).unwrap();
        assert_eq!(t.as_slice::<i8>().unwrap(), [-3, 3, 50]);
        divide(DType::I8, t.bytes_mut(), 200).unwrap();
        assert_eq!(t.as_slice::<i8>().unwrap(), [0, 0, 0]);
        let mut t = Tensor::from_vec(vec![f32::NAN, 3.0]);
        divide(DType::F32, t.bytes_mut(), 0).unwrap();
        assert_eq!(t.as_slice::<f32>().unwrap(), [0.0, 0.0]);
    }
}
