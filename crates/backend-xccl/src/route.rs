//! How a reduction that oneCCL lacks, or gets wrong, is made of one that it has.
//!
//! A [`Route`] says in which dtype and with which of oneCCL's operations a reduction travels, and how values are turned into
//! that form and back:
//! - float min and max travel as integers in the same order, with NaN beyond all of them: oneCCL drops a NaN or keeps it
//!   depending on which rank has it (L16, L17);
//! - bool travels as 0 and 1 in u8: or is max, and is min, exclusive or is the lowest bit of the sum;
//! - i16 and u16 travel as i32 and u32, whose lowest half is the right result;
//! - premul_sum is scaled before it travels, avg divided when it is back;
//! - band, bor and bxor on integers are gathered and folded here, byte by byte ([`fold_bits`]).

use ftcore::{DType, DTypeSet, ReduceOp};
use half::{bf16, f16};
use oneccl_sys::RedOp;

/// How values become what travels.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Form {
    /// They are it.
    Same,
    /// Times a factor.
    Scaled(f64),
    /// Integers in the order of the floats; NaN is the largest, or the least where that wins.
    Ordered { least: bool },
    /// 0 or 1.
    Truth { parity: bool },
    /// Twice as wide.
    Wide,
}

/// The way of one reduction of one dtype.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Route {
    dtype: DType,
    /// The dtype that travels.
    pub(crate) wire: DType,
    /// What oneCCL does with it.
    pub(crate) op: RedOp,
    form: Form,
}

/// What is reduced, by operation.
pub(crate) fn table() -> [DTypeSet; ReduceOp::COUNT] {
    let all = [
        ReduceOp::Sum,
        ReduceOp::Avg,
        ReduceOp::Product,
        ReduceOp::Min,
        ReduceOp::Max,
        ReduceOp::Band,
        ReduceOp::Bor,
        ReduceOp::Bxor,
        ReduceOp::PremulSum(1.0),
    ];
    let mut table = [DTypeSet::NONE; ReduceOp::COUNT];
    for op in all {
        let served: Vec<DType> = DType::ALL
            .into_iter()
            .filter(|&d| Route::of(d, op).is_some() || is_gathered(d, op))
            .collect();
        if let Some(slot) = table.get_mut(usize::from(op.code())) {
            *slot = DTypeSet::of(&served);
        }
    }
    table
}

/// True for what is gathered and folded here, since oneCCL has nothing for it.
pub(crate) fn is_gathered(dtype: DType, op: ReduceOp) -> bool {
    let bits = matches!(op, ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor);
    bits && !dtype.is_float() && dtype != DType::Bool
}

/// Folds `from` into `into` bit by bit.
pub(crate) fn fold_bits(op: ReduceOp, into: &mut [u8], from: &[u8]) {
    let each = |f: fn(u8, u8) -> u8, into: &mut [u8]| {
        for (a, b) in into.iter_mut().zip(from) {
            *a = f(*a, *b);
        }
    };
    match op {
        ReduceOp::Band => each(|a, b| a & b, into),
        ReduceOp::Bor => each(|a, b| a | b, into),
        _ => each(|a, b| a ^ b, into),
    }
}

impl Route {
    /// The route of `op` on `dtype`; `None` if there is none.
    pub(crate) fn of(dtype: DType, op: ReduceOp) -> Option<Self> {
        let same = |op| Some((dtype, op, Form::Same));
        let found = match (dtype, op) {
            (DType::F8E4M3 | DType::F8E5M2, _) => None,
            (DType::Bool, op) => {
                let truth = |op, parity| Some((DType::U8, op, Form::Truth { parity }));
                match op {
                    ReduceOp::Sum | ReduceOp::Max | ReduceOp::Bor => truth(RedOp::MAX, false),
                    ReduceOp::Product | ReduceOp::Min | ReduceOp::Band => truth(RedOp::MIN, false),
                    ReduceOp::Bxor => truth(RedOp::SUM, true),
                    _ => None,
                }
            }
            (d, ReduceOp::Min | ReduceOp::Max) if d.is_float() => {
                let least = op == ReduceOp::Min;
                let wire = if d == DType::F64 { DType::I64 } else { DType::I32 };
                let op = if least { RedOp::MIN } else { RedOp::MAX };
                Some((wire, op, Form::Ordered { least }))
            }
            (d, ReduceOp::PremulSum(factor)) => d.is_float().then_some((d, RedOp::SUM, Form::Scaled(factor))),
            (_, ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor) => None,
            (d, op) => {
                let native = match op {
                    ReduceOp::Sum | ReduceOp::Avg => RedOp::SUM,
                    ReduceOp::Product => RedOp::PROD,
                    ReduceOp::Min => RedOp::MIN,
                    ReduceOp::Max => RedOp::MAX,
                    _ => return None,
                };
                match d {
                    DType::I16 => Some((DType::I32, native, Form::Wide)),
                    DType::U16 => Some((DType::U32, native, Form::Wide)),
                    _ => same(native),
                }
            }
        };
        found.map(|(wire, op, form)| Self {
            dtype,
            wire,
            op,
            form,
        })
    }

    /// True if values travel as they are, so that the caller's memory can be reduced in place.
    pub(crate) fn is_direct(&self) -> bool {
        self.form == Form::Same
    }

    /// How many bytes travel for `bytes` of values.
    pub(crate) fn wire_bytes(&self, bytes: usize) -> usize {
        bytes / self.dtype.size() * self.wire.size()
    }

    /// Turns values into what travels.
    pub(crate) fn encode(&self, from: &[u8], to: &mut [u8]) {
        match (self.form, self.dtype) {
            (Form::Same, _) => to.copy_from_slice(from),
            (Form::Scaled(factor), d) => {
                to.copy_from_slice(from);
                scale(d, to, factor);
            }
            (Form::Ordered { least }, DType::F64) => map(from, to, |b: [u8; 8]| {
                let v = f64::from_ne_bytes(b);
                let key = if v.is_nan() {
                    beyond(least, i64::MIN, i64::MAX)
                } else {
                    let bits = v.to_bits().cast_signed();
                    bits ^ ((bits >> 63) & i64::MAX)
                };
                key.to_ne_bytes()
            }),
            (Form::Ordered { least }, d) => {
                let key = |v: f32| {
                    if v.is_nan() {
                        beyond(least, i32::MIN, i32::MAX)
                    } else {
                        let bits = v.to_bits().cast_signed();
                        bits ^ ((bits >> 31) & i32::MAX)
                    }
                };
                match d {
                    DType::F32 => map(from, to, |b: [u8; 4]| key(f32::from_ne_bytes(b)).to_ne_bytes()),
                    DType::F16 => map(from, to, |b: [u8; 2]| {
                        key(f16::from_ne_bytes(b).to_f32()).to_ne_bytes()
                    }),
                    _ => map(from, to, |b: [u8; 2]| {
                        key(bf16::from_ne_bytes(b).to_f32()).to_ne_bytes()
                    }),
                }
            }
            (Form::Truth { .. }, _) => map(from, to, |[b]: [u8; 1]| [u8::from(b != 0)]),
            (Form::Wide, DType::I16) => map(from, to, |b: [u8; 2]| {
                i32::from(i16::from_ne_bytes(b)).to_ne_bytes()
            }),
            (Form::Wide, _) => map(from, to, |b: [u8; 2]| {
                u32::from(u16::from_ne_bytes(b)).to_ne_bytes()
            }),
        }
    }

    /// Turns what came back into values.
    pub(crate) fn decode(&self, from: &[u8], to: &mut [u8]) {
        match (self.form, self.dtype) {
            (Form::Same | Form::Scaled(_), _) => to.copy_from_slice(from),
            (Form::Ordered { least }, DType::F64) => map(from, to, |b: [u8; 8]| {
                let key = i64::from_ne_bytes(b);
                let v = if key == beyond(least, i64::MIN, i64::MAX) {
                    f64::NAN
                } else {
                    f64::from_bits((key ^ ((key >> 63) & i64::MAX)).cast_unsigned())
                };
                v.to_ne_bytes()
            }),
            (Form::Ordered { least }, d) => {
                let value = |b: [u8; 4]| {
                    let key = i32::from_ne_bytes(b);
                    if key == beyond(least, i32::MIN, i32::MAX) {
                        f32::NAN
                    } else {
                        f32::from_bits((key ^ ((key >> 31) & i32::MAX)).cast_unsigned())
                    }
                };
                match d {
                    DType::F32 => map(from, to, |b| value(b).to_ne_bytes()),
                    DType::F16 => map(from, to, |b| f16::from_f32(value(b)).to_ne_bytes()),
                    _ => map(from, to, |b| bf16::from_f32(value(b)).to_ne_bytes()),
                }
            }
            (Form::Truth { parity: true }, _) => map(from, to, |[b]: [u8; 1]| [b & 1]),
            (Form::Truth { parity: false }, _) => map(from, to, |[b]: [u8; 1]| [u8::from(b != 0)]),
            (Form::Wide, DType::I16) => map(from, to, |b: [u8; 4]| {
                (i32::from_ne_bytes(b) as i16).to_ne_bytes()
            }),
            (Form::Wide, _) => map(from, to, |b: [u8; 4]| {
                (u32::from_ne_bytes(b) as u16).to_ne_bytes()
            }),
        }
    }
}

/// The integer for NaN: no number has it.
fn beyond<T>(least: bool, bottom: T, top: T) -> T {
    if least { bottom } else { top }
}

/// Applies `f` to every element. Lengths that do not fit leave the rest alone.
fn map<const A: usize, const B: usize>(from: &[u8], to: &mut [u8], f: impl Fn([u8; A]) -> [u8; B]) {
    for (to, from) in to.as_chunks_mut::<B>().0.iter_mut().zip(from.as_chunks::<A>().0) {
        *to = f(*from);
    }
}

fn each<const N: usize>(data: &mut [u8], f: impl Fn([u8; N]) -> [u8; N]) {
    for chunk in data.as_chunks_mut::<N>().0 {
        *chunk = f(*chunk);
    }
}

/// Multiplies floats; f16 and bf16 in f32, rounded once.
pub(crate) fn scale(dtype: DType, data: &mut [u8], factor: f64) {
    let short = factor as f32;
    match dtype {
        DType::F64 => each(data, |b| (f64::from_ne_bytes(b) * factor).to_ne_bytes()),
        DType::F32 => each(data, |b| (f32::from_ne_bytes(b) * short).to_ne_bytes()),
        DType::F16 => each(data, |b| {
            f16::from_f32(f16::from_ne_bytes(b).to_f32() * short).to_ne_bytes()
        }),
        DType::BF16 => each(data, |b| {
            bf16::from_f32(bf16::from_ne_bytes(b).to_f32() * short).to_ne_bytes()
        }),
        _ => {}
    }
}

/// Divides a sum by the number of contributors: floats in their own type (f16 and bf16 in f32, rounded once), integers
/// toward zero. A sum of nothing stays zero.
pub(crate) fn divide(dtype: DType, data: &mut [u8], contributors: u32) {
    let n = contributors.max(1);
    if n == 1 {
        return;
    }
    macro_rules! whole {
        ($t:ty, $wide:ty) => {
            each(data, |b| {
                ((<$t>::from_ne_bytes(b) as $wide / <$wide>::from(n)) as $t).to_ne_bytes()
            })
        };
    }
    match dtype {
        DType::F64 => each(data, |b| (f64::from_ne_bytes(b) / f64::from(n)).to_ne_bytes()),
        DType::F32 => each(data, |b| (f32::from_ne_bytes(b) / n as f32).to_ne_bytes()),
        DType::F16 => each(data, |b| {
            f16::from_f32(f16::from_ne_bytes(b).to_f32() / n as f32).to_ne_bytes()
        }),
        DType::BF16 => each(data, |b| {
            bf16::from_f32(bf16::from_ne_bytes(b).to_f32() / n as f32).to_ne_bytes()
        }),
        DType::I64 => whole!(i64, i64),
        DType::I32 => whole!(i32, i64),
        DType::I16 => whole!(i16, i64),
        DType::I8 => whole!(i8, i64),
        DType::U64 => whole!(u64, u64),
        DType::U32 => whole!(u32, u64),
        DType::U16 => whole!(u16, u64),
        DType::U8 => whole!(u8, u64),
        _ => {}
    }
}

/// Fills `data` with the neutral value of `op`: what a rank that does not contribute stands for.
pub(crate) fn fill_identity(dtype: DType, op: ReduceOp, data: &mut [u8]) {
    macro_rules! fill {
        ($v:expr) => {{
            let v = $v.to_ne_bytes();
            each(data, |_| v)
        }};
    }
    macro_rules! float {
        ($t:ty, $one:expr) => {
            match op {
                ReduceOp::Product => fill!($one),
                ReduceOp::Min => fill!(<$t>::INFINITY),
                ReduceOp::Max => fill!(<$t>::NEG_INFINITY),
                _ => data.fill(0),
            }
        };
    }
    macro_rules! whole {
        ($t:ty) => {
            match op {
                ReduceOp::Product => fill!((1 as $t)),
                ReduceOp::Min => fill!(<$t>::MAX),
                ReduceOp::Max => fill!(<$t>::MIN),
                ReduceOp::Band => data.fill(u8::MAX),
                _ => data.fill(0),
            }
        };
    }
    match dtype {
        DType::F64 => float!(f64, 1f64),
        DType::F32 => float!(f32, 1f32),
        DType::F16 => float!(f16, f16::ONE),
        DType::BF16 => float!(bf16, bf16::ONE),
        DType::I64 => whole!(i64),
        DType::I32 => whole!(i32),
        DType::I16 => whole!(i16),
        DType::I8 => whole!(i8),
        DType::U64 => whole!(u64),
        DType::U32 => whole!(u32),
        DType::U16 => whole!(u16),
        DType::U8 => whole!(u8),
        DType::Bool => data.fill(u8::from(matches!(
            op,
            ReduceOp::Product | ReduceOp::Min | ReduceOp::Band
        ))),
        _ => {}
    }
}

/// A count of one or none, as an element of `wire` at the end of what is summed; `None` where the type could not hold the
/// count of `world` ranks exactly.
pub(crate) fn counted(wire: DType, world: u32, contribute: bool) -> Option<[u8; 8]> {
    let one = u8::from(contribute);
    let mut bytes = [0u8; 8];
    let (most, value): (u32, &[u8]) = match wire {
        DType::F64 => (u32::MAX, &f64::from(one).to_ne_bytes()),
        DType::F32 => (1 << 24, &f32::from(one).to_ne_bytes()),
        DType::F16 => (2048, &f16::from_f32(f32::from(one)).to_ne_bytes()),
        DType::BF16 => (256, &bf16::from_f32(f32::from(one)).to_ne_bytes()),
        DType::I64 | DType::U64 => (u32::MAX, &u64::from(one).to_ne_bytes()),
        DType::I32 | DType::U32 => (1 << 30, &u32::from(one).to_ne_bytes()),
        DType::I8 | DType::U8 => (127, &[one]),
        _ => return None,
    };
    for (to, from) in bytes.iter_mut().zip(value) {
        *to = *from;
    }
    (world <= most).then_some(bytes)
}

/// The inverse of [`counted`], after the sum.
pub(crate) fn count_of(wire: DType, bytes: &[u8]) -> u32 {
    let b = |i: usize| bytes.get(i).copied().unwrap_or(0);
    let two = [b(0), b(1)];
    let four = [b(0), b(1), b(2), b(3)];
    match wire {
        DType::F64 => f64::from_ne_bytes(std::array::from_fn(b)) as u32,
        DType::F32 => f32::from_ne_bytes(four) as u32,
        DType::F16 => f16::from_ne_bytes(two).to_f32() as u32,
        DType::BF16 => bf16::from_ne_bytes(two).to_f32() as u32,
        DType::I64 | DType::U64 => u64::from_ne_bytes(std::array::from_fn(b)) as u32,
        DType::I32 | DType::U32 => u32::from_ne_bytes(four),
        _ => u32::from(b(0)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ftcore::Tensor;

    fn there_and_back(dtype: DType, op: ReduceOp, values: &Tensor) -> Vec<u8> {
        let route = Route::of(dtype, op).unwrap();
        let mut wire = vec![0u8; route.wire_bytes(values.byte_len())];
        route.encode(values.bytes(), &mut wire);
        let mut back = vec![0u8; values.byte_len()];
        route.decode(&wire, &mut back);
        back
    }

    #[test]
    fn l16_ordered_integers_keep_the_order_of_floats_and_put_nan_beyond_all() {
        let values = [
            f32::NEG_INFINITY,
            -3.5,
            -f32::MIN_POSITIVE,
            -0.0,
            0.0,
            1e-42,
            2.0,
            f32::MAX,
            f32::INFINITY,
        ];
        for op in [ReduceOp::Min, ReduceOp::Max] {
            let route = Route::of(DType::F32, op).unwrap();
            let keys: Vec<i32> = values
                .iter()
                .chain(&[f32::NAN, -f32::NAN])
                .map(|v| {
                    let mut key = [0u8; 4];
                    route.encode(&v.to_ne_bytes(), &mut key);
                    i32::from_ne_bytes(key)
                })
                .collect();
            let (numbers, nans) = keys.split_at(values.len());
            assert!(numbers.is_sorted_by(|a, b| a < b), "{keys:?}");
            for nan in nans {
                assert!(
                    numbers
                        .iter()
                        .all(|n| if op == ReduceOp::Min { nan < n } else { nan > n })
                );
            }
            let tensor = Tensor::from_vec(values.to_vec());
            assert_eq!(there_and_back(DType::F32, op, &tensor), tensor.bytes());
        }
    }

    #[test]
    fn every_value_of_the_short_types_survives_its_route() {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        let bytes = Tensor::from_vec(all);
        for dtype in [DType::I16, DType::U16, DType::F16, DType::BF16] {
            let back = there_and_back(dtype, ReduceOp::Min, &bytes);
            for (have, want) in back
                .as_chunks::<2>()
                .0
                .iter()
                .zip(bytes.bytes().as_chunks::<2>().0)
            {
                let nan = match dtype {
                    DType::F16 => f16::from_ne_bytes(*want).is_nan() && f16::from_ne_bytes(*have).is_nan(),
                    DType::BF16 => bf16::from_ne_bytes(*want).is_nan() && bf16::from_ne_bytes(*have).is_nan(),
                    _ => false,
                };
                assert!(nan || have == want, "{dtype}: {want:?} came back as {have:?}");
            }
        }
    }

    #[test]
    fn averages_round_toward_zero_and_a_sum_of_nobody_stays_zero() {
        let mut data = [(-7i8).cast_unsigned(), 100];
        divide(DType::I8, &mut data, 2);
        assert_eq!(data.map(u8::cast_signed), [-3, 50]);
        let mut zero = 0f32.to_ne_bytes();
        divide(DType::F32, &mut zero, 0);
        assert_eq!(f32::from_ne_bytes(zero), 0.0);
    }

    #[test]
    fn counts_travel_exactly_or_not_at_all() {
        for wire in [
            DType::F64,
            DType::F32,
            DType::F16,
            DType::BF16,
            DType::I64,
            DType::U64,
            DType::I32,
            DType::U32,
            DType::I8,
            DType::U8,
        ] {
            let one = counted(wire, 3, true).unwrap();
            assert_eq!(count_of(wire, &one), 1, "{wire}");
            assert_eq!(count_of(wire, &counted(wire, 3, false).unwrap()), 0, "{wire}");
        }
        assert!(counted(DType::I8, 128, true).is_none());
        assert!(counted(DType::BF16, 257, true).is_none());
    }

    #[test]
    fn identities_are_neutral() {
        let mut d = [9u8; 2];
        fill_identity(DType::F16, ReduceOp::Product, &mut d);
        assert_eq!(f16::from_ne_bytes(d), f16::ONE);
        let mut d = [0u8; 4];
        fill_identity(DType::F32, ReduceOp::Min, &mut d);
        assert_eq!(f32::from_ne_bytes(d), f32::INFINITY);
        let mut d = [0u8; 2];
        fill_identity(DType::I16, ReduceOp::Band, &mut d);
        assert_eq!(d, [255, 255]);
        let mut d = [9u8];
        fill_identity(DType::Bool, ReduceOp::Bxor, &mut d);
        assert_eq!(d, [0]);
    }

    #[test]
    fn what_is_advertised_has_a_route() {
        let table = table();
        let has = |op: ReduceOp, d| table[usize::from(op.code())].contains(d);
        assert!(
            has(ReduceOp::Avg, DType::I8)
                && has(ReduceOp::Bxor, DType::Bool)
                && has(ReduceOp::Band, DType::U64)
        );
        assert!(!has(ReduceOp::Band, DType::F32) && !has(ReduceOp::PremulSum(2.0), DType::I32));
        assert!(!has(ReduceOp::Sum, DType::F8E4M3) && !has(ReduceOp::Avg, DType::Bool));
    }
}
