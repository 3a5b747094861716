//! What every element must be: inputs as a function of (rank, index), reductions computed element by element in f64 or
//! i128.
//!
//! Inputs come in kinds. `Small` integers keep every float type exact, so equality is demanded. `Fractions` round; the
//! tolerance is a few units of the type's precision per rank; the 8-bit floats are too coarse even for small sums and always
//! get a step of the format per hop. `Special` holds what breaks shortcuts: NaN, infinities,
//! overflow, bytes of bool that are neither 0 nor 1.

use std::sync::OnceLock;

use ftcore::{Capabilities, DType, ReduceOp, Tensor};
use half::{bf16, f16};

use crate::{Failure, Outcome};

/// A value of any element type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Value {
    Float(f64),
    Integer(i128),
}

/// What kind of inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Inputs {
    Small,
    Fractions,
    Special,
}

/// The input of `rank` at `index`.
pub(crate) fn input(kind: Inputs, dtype: DType, op: ReduceOp, rank: u32, index: usize) -> Value {
    let seed = (rank as usize * 31 + index * 7 + (index / 9) * 5) as i64;
    match kind {
        Inputs::Small if dtype == DType::Bool => Value::Integer(i128::from(seed % 3 != 0)),
        Inputs::Small if op == ReduceOp::Product => {
            let v = [1, 2, -1, 3, 1, -2][(seed % 6) as usize];
            number(dtype, f64::from(v))
        }
        Inputs::Small => number(dtype, (seed % 9 - 4) as f64),
        Inputs::Fractions => number(dtype, ((seed % 101) as f64 - 50.0) / 7.0),
        Inputs::Special => match dtype {
            DType::Bool => Value::Integer([0, 2, 1, 255, 0, 0][(seed % 6) as usize]),
            // What a library makes of infinities and overflow in 8 bits is its own affair; NaN must stay visible.
            DType::F8E4M3 | DType::F8E5M2 => Value::Float(match (index + rank as usize) % 13 {
                0 => f64::NAN,
                n => (n % 3) as f64 - 1.0,
            }),
            d if d.is_float() => {
                let at = (index + rank as usize) % 13;
                let v = match at {
                    0 => f64::NAN,
                    5 => f64::INFINITY,
                    9 => f64::NEG_INFINITY,
                    n => n as f64 - 6.0,
                };
                Value::Float(v)
            }
            // Large enough that sums and products wrap around.
            d => Value::Integer(wrap(d, (seed as i128 + 3) * 0x5DEE_CE66_D1CE_4E5B)),
        },
    }
}

/// After how many indices the inputs repeat, if they do: then they, and what becomes of them, are computed once.
fn period(kind: Inputs, dtype: DType, op: ReduceOp) -> Option<usize> {
    // Nine indices on, the seed has grown by 68.
    match kind {
        Inputs::Small if dtype == DType::Bool || op == ReduceOp::Product => Some(27),
        Inputs::Small => Some(81),
        Inputs::Fractions => Some(909),
        Inputs::Special if dtype == DType::Bool => Some(27),
        Inputs::Special if dtype.is_float() => Some(13),
        Inputs::Special => None,
    }
}

fn number(dtype: DType, v: f64) -> Value {
    if dtype.is_float() {
        Value::Float(rounded(dtype, v))
    } else {
        // No input is a large one, and the way to i128 is far longer.
        Value::Integer(wrap(dtype, i128::from(v as i64)))
    }
}

/// As that integer type stores it.
fn wrap(dtype: DType, v: i128) -> i128 {
    match dtype {
        DType::I64 => i128::from(v as i64),
        DType::I32 => i128::from(v as i32),
        DType::I16 => i128::from(v as i16),
        DType::I8 => i128::from(v as i8),
        DType::U64 => i128::from(v as u64),
        DType::U32 => i128::from(v as u32),
        DType::U16 => i128::from(v as u16),
        _ => i128::from(v as u8),
    }
}

/// As that float type stores it.
fn rounded(dtype: DType, v: f64) -> f64 {
    match dtype {
        DType::F32 => f64::from(v as f32),
        DType::F16 => f16::from_f32(v as f32).to_f64(),
        DType::BF16 => bf16::from_f32(v as f32).to_f64(),
        DType::F8E4M3 | DType::F8E5M2 => eighth(dtype, nearest_eighth(dtype, v)),
        _ => v,
    }
}

/// The values of an 8-bit float (OCP OFP8) by their bits.
fn eighths(dtype: DType) -> &'static [f64] {
    static TABLES: [OnceLock<Vec<f64>>; 2] = [const { OnceLock::new() }; 2];
    let [e5m2, e4m3] = &TABLES;
    let table = if dtype == DType::F8E4M3 { e4m3 } else { e5m2 };
    table.get_or_init(|| (0..=u8::MAX).map(|b| decoded(dtype, b)).collect())
}

/// The one of these bits.
fn eighth(dtype: DType, bits: u8) -> f64 {
    eighths(dtype).get(usize::from(bits)).copied().unwrap_or(f64::NAN)
}

/// [`eighth`], from the definition.
fn decoded(dtype: DType, bits: u8) -> f64 {
    let (mantissa_bits, bias) = if dtype == DType::F8E4M3 { (3, 7) } else { (2, 15) };
    let magnitude = i32::from(bits & 0x7F);
    let (exponent, mantissa) = (magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1));
    let sign = if bits & 0x80 == 0 { 1.0 } else { -1.0 };
    let fraction = f64::from(mantissa) / f64::from(1 << mantissa_bits);
    let top = (1 << (7 - mantissa_bits)) - 1;
    let value = match exponent {
        _ if dtype == DType::F8E4M3 && magnitude == 0x7F => f64::NAN,
        e if dtype == DType::F8E5M2 && e == top && mantissa == 0 => f64::INFINITY,
        e if dtype == DType::F8E5M2 && e == top => f64::NAN,
        0 => fraction * f64::from(1 - bias).exp2(),
        e => (1.0 + fraction) * f64::from(e - bias).exp2(),
    };
    sign * value
}

/// The bits of the finite 8-bit float that is nearest to `v`, ties to even; NaN stays NaN.
fn nearest_eighth(dtype: DType, v: f64) -> u8 {
    if v.is_nan() {
        return 0x7F;
    }
    // Positive ones are in order.
    let finite = if dtype == DType::F8E4M3 { 0x7F } else { 0x7C };
    let above = eighths(dtype)
        .get(..finite)
        .unwrap_or_default()
        .partition_point(|known| *known < v.abs());
    let far = |bits: usize| (eighth(dtype, bits as u8) - v.abs()).abs();
    let around = above.saturating_sub(1)..=above.min(finite - 1);
    let nearest = around
        .min_by(|a, b| far(*a).total_cmp(&far(*b)).then((a & 1).cmp(&(b & 1))))
        .unwrap_or(0) as u8;
    if v.is_sign_negative() {
        nearest | 0x80
    } else {
        nearest
    }
}

fn is_eighth(dtype: DType) -> bool {
    matches!(dtype, DType::F8E4M3 | DType::F8E5M2)
}

/// The relative rounding error of one operation.
fn precision(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::EPSILON,
        DType::F32 => f64::from(f32::EPSILON),
        DType::F16 => f64::from(f16::EPSILON),
        DType::F8E4M3 => 0.125,
        DType::F8E5M2 => 0.25,
        _ => f64::from(bf16::EPSILON),
    }
}

/// The neutral value, which a rank that does not contribute stands for.
pub(crate) fn identity(dtype: DType, op: ReduceOp) -> Value {
    let truth = dtype == DType::Bool;
    match op {
        ReduceOp::Product if truth => Value::Integer(1),
        ReduceOp::Product => number(dtype, 1.0),
        ReduceOp::Min if dtype.is_float() => Value::Float(f64::INFINITY),
        ReduceOp::Max if dtype.is_float() => Value::Float(f64::NEG_INFINITY),
        ReduceOp::Min if truth => Value::Integer(1),
        ReduceOp::Min => Value::Integer(limit(dtype, true)),
        ReduceOp::Max => Value::Integer(limit(dtype, false)),
        ReduceOp::Band if truth => Value::Integer(1),
        ReduceOp::Band => Value::Integer(wrap(dtype, -1)),
        _ => number(dtype, 0.0),
    }
}

fn limit(dtype: DType, most: bool) -> i128 {
    let (low, high): (i128, i128) = match dtype {
        DType::I64 => (i64::MIN.into(), i64::MAX.into()),
        DType::I32 => (i32::MIN.into(), i32::MAX.into()),
        DType::I16 => (i16::MIN.into(), i16::MAX.into()),
        DType::I8 => (i8::MIN.into(), i8::MAX.into()),
        DType::U64 => (0, u64::MAX.into()),
        DType::U32 => (0, u32::MAX.into()),
        DType::U16 => (0, u16::MAX.into()),
        DType::U8 => (0, u8::MAX.into()),
        _ => (0, 1),
    };
    if most { high } else { low }
}

/// The reduction of `values`, of which `contributors` count.
pub(crate) fn reduce(dtype: DType, op: ReduceOp, values: &[Value], contributors: u32) -> Value {
    let scale = |v: Value| match (op, v) {
        (ReduceOp::PremulSum(factor), Value::Float(f)) => Value::Float(rounded(dtype, f * factor)),
        _ => v,
    };
    let truth = |v: i128| i128::from(v != 0);
    let fold = |a: Value, b: Value| match (a, b) {
        (Value::Float(a), Value::Float(b)) => Value::Float(match op {
            ReduceOp::Product => a * b,
            ReduceOp::Min if a.is_nan() || b.is_nan() => f64::NAN,
            ReduceOp::Max if a.is_nan() || b.is_nan() => f64::NAN,
            ReduceOp::Min => a.min(b),
            ReduceOp::Max => a.max(b),
            _ => a + b,
        }),
        (Value::Integer(a), Value::Integer(b)) if dtype == DType::Bool => Value::Integer(match op {
            ReduceOp::Sum | ReduceOp::Max | ReduceOp::Bor => truth(a) | truth(b),
            ReduceOp::Bxor => truth(a) ^ truth(b),
            _ => truth(a) & truth(b),
        }),
        (Value::Integer(a), Value::Integer(b)) => Value::Integer(match op {
            ReduceOp::Product => wrap(dtype, a.wrapping_mul(b)),
            ReduceOp::Min => a.min(b),
            ReduceOp::Max => a.max(b),
            ReduceOp::Band => a & b,
            ReduceOp::Bor => a | b,
            ReduceOp::Bxor => a ^ b,
            _ => wrap(dtype, a + b),
        }),
        (a, _) => a,
    };
    let mut result = values
        .iter()
        .copied()
        .map(scale)
        .reduce(fold)
        .unwrap_or_else(|| identity(dtype, op));
    if op == ReduceOp::Avg {
        result = match result {
            _ if contributors == 0 => number(dtype, 0.0),
            Value::Float(f) => Value::Float(f / f64::from(contributors)),
            Value::Integer(i) => Value::Integer(i / i128::from(contributors)),
        };
    }
    match result {
        Value::Float(f) => Value::Float(rounded(dtype, f)),
        Value::Integer(i) if dtype == DType::Bool => Value::Integer(truth(i)),
        whole => whole,
    }
}

/// A tensor of the inputs of `rank`.
pub(crate) fn tensor(kind: Inputs, dtype: DType, op: ReduceOp, rank: u32, count: usize) -> Tensor {
    part(kind, dtype, op, rank, 0..count)
}

/// A tensor of the inputs of `rank` at `indices`.
pub(crate) fn part(
    kind: Inputs,
    dtype: DType,
    op: ReduceOp,
    rank: u32,
    indices: std::ops::Range<usize>,
) -> Tensor {
    let mut out = Tensor::zeros(dtype, indices.len());
    let size = dtype.size();
    let bytes = out.bytes_mut();
    let once = period(kind, dtype, op).map_or(bytes.len(), |n| bytes.len().min(n * size));
    let (computed, rest) = bytes.split_at_mut(once);
    for (slot, index) in computed.chunks_exact_mut(size).zip(indices) {
        store(dtype, input(kind, dtype, op, rank, index), slot);
    }
    if once > 0 {
        for repeated in rest.chunks_mut(once) {
            for (to, from) in repeated.iter_mut().zip(&*computed) {
                *to = *from;
            }
        }
    }
    out
}

fn store(dtype: DType, value: Value, slot: &mut [u8]) {
    let bytes: [u8; 8] = match (dtype, value) {
        (DType::F64, Value::Float(f)) => f.to_ne_bytes(),
        (DType::F32, Value::Float(f)) => widened((f as f32).to_ne_bytes()),
        (DType::F16, Value::Float(f)) => widened(f16::from_f64(f).to_ne_bytes()),
        (DType::F8E4M3 | DType::F8E5M2, Value::Float(f)) => widened([nearest_eighth(dtype, f)]),
        (_, Value::Float(f)) => widened(bf16::from_f64(f).to_ne_bytes()),
        (_, Value::Integer(i)) => match dtype.size() {
            8 => (i as u64).to_ne_bytes(),
            4 => widened((i as u32).to_ne_bytes()),
            2 => widened((i as u16).to_ne_bytes()),
            _ => widened([i as u8]),
        },
    };
    for (to, from) in slot.iter_mut().zip(bytes) {
        *to = from;
    }
}

fn widened<const N: usize>(bytes: [u8; N]) -> [u8; 8] {
    std::array::from_fn(|i| bytes.get(i).copied().unwrap_or(0))
}

/// The value of an element.
pub(crate) fn load(dtype: DType, slot: &[u8]) -> Value {
    let b = |i: usize| slot.get(i).copied().unwrap_or(0);
    let two = [b(0), b(1)];
    let four = [b(0), b(1), b(2), b(3)];
    let eight = std::array::from_fn(b);
    match dtype {
        DType::F64 => Value::Float(f64::from_ne_bytes(eight)),
        DType::F32 => Value::Float(f32::from_ne_bytes(four).into()),
        DType::F16 => Value::Float(f16::from_ne_bytes(two).to_f64()),
        DType::BF16 => Value::Float(bf16::from_ne_bytes(two).to_f64()),
        DType::F8E4M3 | DType::F8E5M2 => Value::Float(eighth(dtype, b(0))),
        DType::I64 => Value::Integer(i64::from_ne_bytes(eight).into()),
        DType::I32 => Value::Integer(i32::from_ne_bytes(four).into()),
        DType::I16 => Value::Integer(i16::from_ne_bytes(two).into()),
        DType::I8 => Value::Integer(i128::from(b(0) as i8)),
        DType::U64 => Value::Integer(u64::from_ne_bytes(eight).into()),
        DType::U32 => Value::Integer(u32::from_ne_bytes(four).into()),
        DType::U16 => Value::Integer(u16::from_ne_bytes(two).into()),
        _ => Value::Integer(b(0).into()),
    }
}

/// Which ranks' inputs went into a reduction, and how the result may differ.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Expected<'a> {
    pub(crate) kind: Inputs,
    pub(crate) dtype: DType,
    pub(crate) op: ReduceOp,
    /// One per rank.
    pub(crate) contributes: &'a [bool],
    /// The dtype that the group rounds to on the way, if it is not exact.
    pub(crate) rounded: Option<DType>,
    /// The index of the first element in the inputs.
    pub(crate) first: usize,
}

/// The dtype that a group rounds reductions to on the way: its note `rounds_to`, if that names one.
pub(crate) fn rounded_to(capabilities: &Capabilities) -> Option<DType> {
    let note = capabilities.notes.iter().find(|(key, _)| key == "rounds_to");
    note.and_then(|(_, name)| DType::ALL.into_iter().find(|d| d.name() == name))
}

impl Expected<'_> {
    /// Compares every element of `result`.
    pub(crate) fn check(&self, result: &Tensor) -> Outcome {
        let Self {
            kind,
            dtype,
            op,
            contributes,
            first,
            ..
        } = *self;
        let contributors = contributes.iter().filter(|c| **c).count() as u32;
        let values = |index| -> Vec<Value> {
            let ranks = contributes.iter().zip(0u32..);
            let value = |(contributes, rank): (&bool, u32)| match contributes {
                true => input(kind, dtype, op, rank, index),
                false => identity(dtype, op),
            };
            ranks.map(value).collect()
        };
        let wanted = |index| reduce(dtype, op, &values(index), contributors);
        let (size, count) = (dtype.size(), result.count());
        let once = period(kind, dtype, op).unwrap_or(count).min(count);
        let known: Vec<Value> = (first..first + once).map(wanted).collect();
        let mut image = vec![0; once * size];
        for (slot, want) in image.chunks_exact_mut(size).zip(&known) {
            store(dtype, *want, slot);
        }
        let parts = result.bytes().chunks(image.len().max(1));
        for (part, from) in parts.zip((first..).step_by(once.max(1))) {
            // What has the very bytes that are expected is not looked at one by one.
            if image.get(..part.len()) == Some(part) {
                continue;
            }
            for ((slot, want), index) in part.chunks_exact(size).zip(&known).zip(from..) {
                let (have, want) = (load(dtype, slot), *want);
                if have != want && !self.agree(have, want, &values(index)) {
                    return Err(Failure::new(format!(
                        "{op} of {dtype} ({kind:?}), {count} elements: element {index} is {have:?}, expected {want:?} \
                         from {:?} with {contributors} contributors",
                        values(index)
                    )));
                }
            }
        }
        Ok(())
    }

    fn agree(&self, have: Value, want: Value, values: &[Value]) -> bool {
        match (have, want) {
            (Value::Integer(a), Value::Integer(b)) => a == b,
            (Value::Float(a), Value::Float(b)) if a.is_nan() || b.is_nan() => a.is_nan() && b.is_nan(),
            (Value::Float(a), Value::Float(b)) if a == b => true,
            (Value::Float(a), Value::Float(b))
                if self.kind == Inputs::Fractions || is_eighth(self.dtype) || self.rounded.is_some() =>
            {
                // Every hop rounds once, relative to the largest sum or product on the way.
                let size = |v: &Value| match v {
                    Value::Float(f) => f.abs(),
                    Value::Integer(i) => i.abs() as f64,
                };
                let largest = match self.op {
                    ReduceOp::Product => values.iter().map(|v| size(v).max(1.0)).product::<f64>(),
                    ReduceOp::PremulSum(factor) => values.iter().map(|v| size(v) * factor.abs()).sum(),
                    _ => values.iter().map(size).sum(),
                };
                let hops = if is_eighth(self.dtype) {
                    1.0
                } else {
                    values.len() as f64 + 1.0
                };
                let coarser = self.rounded.map_or(0.0, precision).max(precision(self.dtype));
                (a - b).abs() <= coarser * (largest + b.abs()) * hops
            }
            _ => false,
        }
    }
}

/// Bytes that only `rank` sends, for operations that move data: every element differs from its neighbours.
pub(crate) fn pattern(dtype: DType, rank: u32, count: usize) -> Tensor {
    let mut out = Tensor::zeros(dtype, count);
    for (i, b) in out.bytes_mut().iter_mut().enumerate() {
        *b = pattern_byte(dtype, rank, i);
    }
    out
}

/// Byte `i` of [`pattern`].
pub(crate) fn pattern_byte(dtype: DType, rank: u32, i: usize) -> u8 {
    let v = (i.wrapping_mul(151) ^ (i >> 8).wrapping_mul(29) ^ (rank as usize + 1).wrapping_mul(83)) as u8;
    if dtype == DType::Bool { v & 1 } else { v }
}

/// True if `bytes` are those of `rank`'s pattern from byte `first` on.
pub(crate) fn check_pattern(what: &str, dtype: DType, bytes: &[u8], rank: u32, first: usize) -> Outcome {
    match bytes
        .iter()
        .zip(first..)
        .find(|(b, i)| **b != pattern_byte(dtype, rank, *i))
    {
        None => Ok(()),
        Some((b, i)) => Err(Failure::new(format!(
            "{what}: byte {i} of rank {rank}'s {dtype} data is {b}, expected {}",
            pattern_byte(dtype, rank, i)
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oracle_knows_a_few_results_by_heart() {
        let f = Value::Float;
        let i = Value::Integer;
        assert_eq!(reduce(DType::F32, ReduceOp::Avg, &[f(1.0), f(2.0)], 2), f(1.5));
        assert_eq!(reduce(DType::I8, ReduceOp::Sum, &[i(100), i(100)], 2), i(-56));
        assert_eq!(reduce(DType::I32, ReduceOp::Avg, &[i(-7), i(0)], 2), i(-3));
        assert_eq!(reduce(DType::Bool, ReduceOp::Sum, &[i(2), i(0)], 2), i(1));
        assert_eq!(
            reduce(
                DType::U8,
                ReduceOp::Band,
                &[i(6), identity(DType::U8, ReduceOp::Band)],
                1
            ),
            i(6)
        );
        assert_eq!(
            reduce(DType::F64, ReduceOp::PremulSum(0.5), &[f(1.0), f(3.0)], 2),
            f(2.0)
        );
        let Value::Float(nan) = reduce(DType::F32, ReduceOp::Max, &[f(1.0), f(f64::NAN)], 2) else {
            panic!("a float");
        };
        assert!(nan.is_nan());
    }

    #[test]
    fn the_eight_bit_floats_have_their_published_values() {
        use DType::{F8E4M3, F8E5M2};
        for (dtype, bits, value) in [
            (F8E4M3, 0x38, 1.0),
            (F8E4M3, 0x7E, 448.0),
            (F8E4M3, 0x01, 0.001953125),
            (F8E4M3, 0xC0, -2.0),
            (F8E5M2, 0x3C, 1.0),
            (F8E5M2, 0x7B, 57344.0),
            (F8E5M2, 0x01, 2f64.powi(-16)),
        ] {
            assert_eq!(eighth(dtype, bits), value, "{dtype} {bits:#x}");
            assert_eq!(nearest_eighth(dtype, value), bits, "{dtype} {value}");
        }
        assert!(eighth(F8E4M3, 0x7F).is_nan() && eighth(F8E5M2, 0x7C).is_infinite());
        assert_eq!(
            nearest_eighth(F8E4M3, 17.0),
            nearest_eighth(F8E4M3, 16.0),
            "ties to even"
        );
        for (dtype, v) in [F8E4M3, F8E5M2]
            .into_iter()
            .flat_map(|dtype| (-3000..3000).map(move |n| (dtype, f64::from(n) * 0.173)))
        {
            let found = eighth(dtype, nearest_eighth(dtype, v));
            let mut finite = eighths(dtype).iter().filter(|known| known.is_finite());
            assert!(
                finite.all(|known| (known - v).abs() >= (found - v).abs()),
                "{dtype} {v}"
            );
        }
    }

    #[test]
    fn inputs_repeat_after_their_period() {
        let same = |a: Value, b: Value| format!("{a:?}") == format!("{b:?}");
        for kind in [Inputs::Small, Inputs::Fractions, Inputs::Special] {
            for (dtype, op) in [
                (DType::F32, ReduceOp::Sum),
                (DType::F8E4M3, ReduceOp::Max),
                (DType::I64, ReduceOp::Product),
                (DType::Bool, ReduceOp::Bor),
            ] {
                let Some(period) = period(kind, dtype, op) else {
                    continue;
                };
                for (rank, index) in (0..5).flat_map(|rank| (0..2000).map(move |index| (rank, index))) {
                    let (here, there) = (index, index + period);
                    let of = |index| input(kind, dtype, op, rank, index);
                    assert!(same(of(here), of(there)), "{kind:?} {dtype} {op} {rank} {index}");
                }
                let all = tensor(kind, dtype, op, 3, 2500);
                for (slot, index) in all.bytes().chunks_exact(dtype.size()).zip(0..) {
                    let mut alone = vec![0; dtype.size()];
                    store(dtype, input(kind, dtype, op, 3, index), &mut alone);
                    assert_eq!(slot, alone, "{kind:?} {dtype} {op} {index}");
                }
            }
        }
    }

    #[test]
    fn a_wrong_element_is_found_and_a_rounded_one_is_not() {
        let both = [true, true];
        let expected = |kind, rounded| Expected {
            kind,
            dtype: DType::F32,
            op: ReduceOp::Sum,
            contributes: &both,
            rounded,
            first: 0,
        };
        let half = Some(DType::F16);
        // In the first period of the inputs, and in a later one.
        for ((kind, rounded, nudge, passes), wrong) in [
            (Inputs::Small, None, 0.0f32, true),
            (Inputs::Small, None, 1e-6, false),
            (Inputs::Small, half, 1e-3, true),
            (Inputs::Small, half, 0.25, false),
            (Inputs::Fractions, None, 1e-6, true),
            (Inputs::Fractions, None, 1e-3, false),
            (Inputs::Fractions, half, 1e-3, true),
            (Inputs::Fractions, half, 0.25, false),
        ]
        .into_iter()
        .flat_map(|row| [13, 2000].map(|wrong| (row, wrong)))
        {
            let sums: Vec<f32> = (0..2500)
                .map(|i| {
                    let v = |r| match input(kind, DType::F32, ReduceOp::Sum, r, i) {
                        Value::Float(f) => f as f32,
                        Value::Integer(_) => 0.0,
                    };
                    v(0) + v(1) + if i == wrong { nudge } else { 0.0 }
                })
                .collect();
            assert_eq!(
                expected(kind, rounded).check(&Tensor::from_vec(sums)).is_ok(),
                passes,
                "{kind:?} {rounded:?} {nudge} {wrong}"
            );
        }
        let mut moved = pattern(DType::U16, 3, 50);
        check_pattern("same", DType::U16, moved.bytes(), 3, 0).unwrap();
        moved.bytes_mut()[77] ^= 1;
        assert!(check_pattern("damaged", DType::U16, moved.bytes(), 3, 0).is_err());
    }
}
