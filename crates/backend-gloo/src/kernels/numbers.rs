//! What the operations mean, unit by unit.
//!
//! A unit is what a loop steps by: one number, or as many small ones as fill a register executor. Every store of a float makes a
//! NaN the one positive quiet NaN, and min and max take -0 as less than +0; so each operation is commutative down to the bits,
//! and a compiler that swaps operands cannot be noticed.

use half::{bf16, f16};

/// `N` bytes that a loop loads, computes on, and stores.
pub(super) trait Number<const N: usize>: Copy {
    fn load(bytes: [u8; N]) -> Self;
    fn store(self) -> [u8; N];
    fn add(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn least(self, other: Self) -> Self;
    fn most(self, other: Self) -> Self;
    fn divide(self, count: u32) -> Self;
    fn scale(self, factor: f64) -> Self;
}

/// Two numbers into one.
pub(super) trait Fold {
    fn of<U: Number<N>, const N: usize>(a: U, b: U) -> U;
}

/// A number into another one.
pub(super) trait Map: Copy {
    fn of<U: Number<N>, const N: usize>(self, x: U) -> U;
}

/// Two bytes into one: what does not care where an element ends, and booleans.
pub(super) trait ByteFold {
    fn of(a: u8, b: u8) -> u8;
}

macro_rules! folds {
    ($($name:ident => $method:ident;)*) => {$(
        pub(super) struct $name;
        impl Fold for $name {
            #[inline(always)]
            fn of<U: Number<N>, const N: usize>(a: U, b: U) -> U { a.$method(b) }
        }
    )*};
}
folds! { Add => add; Multiply => mul; Least => least; Most => most; }

macro_rules! byte_folds {
    ($($name:ident => |$a:ident, $b:ident| $value:expr;)*) => {$(
        pub(super) struct $name;
        impl ByteFold for $name {
            #[inline(always)]
            fn of($a: u8, $b: u8) -> u8 { $value }
        }
    )*};
}
byte_folds! {
    And => |a, b| a & b;
    Or => |a, b| a | b;
    Xor => |a, b| a ^ b;
    Both => |a, b| u8::from((a != 0) & (b != 0));
    Either => |a, b| u8::from((a | b) != 0);
    OneOfTwo => |a, b| u8::from((a != 0) ^ (b != 0));
}

/// Divides by a count that is not 0; integers toward zero.
#[derive(Clone, Copy)]
pub(super) struct DivideBy(pub(super) u32);
impl Map for DivideBy {
    #[inline(always)]
    fn of<U: Number<N>, const N: usize>(self, x: U) -> U {
        x.divide(self.0)
    }
}

/// Multiplies; integers stay as they are.
#[derive(Clone, Copy)]
pub(super) struct ScaleBy(pub(super) f64);
impl Map for ScaleBy {
    #[inline(always)]
    fn of<U: Number<N>, const N: usize>(self, x: U) -> U {
        x.scale(self.0)
    }
}

macro_rules! float_arithmetic {
    ($t:ty) => {
        #[inline(always)]
        fn add(self, other: Self) -> Self {
            self + other
        }
        #[inline(always)]
        fn mul(self, other: Self) -> Self {
            self * other
        }
        #[inline(always)]
        fn least(self, other: Self) -> Self {
            if (self < other) | self.is_nan() {
                self
            } else if self == other {
                // Two zeros: the negative one if there is one. Otherwise both have the same bits.
                Self::from_bits(self.to_bits() | other.to_bits())
            } else {
                other
            }
        }
        #[inline(always)]
        fn most(self, other: Self) -> Self {
            if (self > other) | self.is_nan() {
                self
            } else if self == other {
                Self::from_bits(self.to_bits() & other.to_bits())
            } else {
                other
            }
        }
        #[inline(always)]
        fn divide(self, count: u32) -> Self {
            self / (count as $t)
        }
        #[inline(always)]
        fn scale(self, factor: f64) -> Self {
            self * (factor as $t)
        }
    };
}

const NAN_F32: u32 = 0x7FC0_0000;
const NAN_F64: u64 = 0x7FF8_0000_0000_0000;

impl Number<4> for f32 {
    #[inline(always)]
    fn load(bytes: [u8; 4]) -> Self {
        Self::from_ne_bytes(bytes)
    }
    #[inline(always)]
    fn store(self) -> [u8; 4] {
        (if self.is_nan() { NAN_F32 } else { self.to_bits() }).to_ne_bytes()
    }
    float_arithmetic! { f32 }
}

impl Number<8> for f64 {
    #[inline(always)]
    fn load(bytes: [u8; 8]) -> Self {
        Self::from_ne_bytes(bytes)
    }
    #[inline(always)]
    fn store(self) -> [u8; 8] {
        (if self.is_nan() { NAN_F64 } else { self.to_bits() }).to_ne_bytes()
    }
    float_arithmetic! { f64 }
}

/// One f16, computed in f32. Where the machine converts in vectors, `x86` has wider units.
#[derive(Clone, Copy)]
pub(super) struct F16(f32);

macro_rules! through {
    ($($method:ident($($arg:ident: $t:ty),*);)*) => {$(
        #[inline(always)]
        fn $method(self, $($arg: $t),*) -> Self { Self(Number::<4>::$method(self.0, $($arg),*)) }
    )*};
}

impl Number<2> for F16 {
    #[inline(always)]
    fn load(bytes: [u8; 2]) -> Self {
        Self(f16::from_ne_bytes(bytes).to_f32())
    }
    #[inline(always)]
    fn store(self) -> [u8; 2] {
        let rounded = f16::from_f32(self.0);
        (if self.0.is_nan() { f16::NAN } else { rounded }).to_ne_bytes()
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        Self(self.0 * other.0)
    }
    #[inline(always)]
    fn least(self, other: Self) -> Self {
        Self(self.0.least(other.0))
    }
    #[inline(always)]
    fn most(self, other: Self) -> Self {
        Self(self.0.most(other.0))
    }
    through! { divide(count: u32); scale(factor: f64); }
}

/// Two bf16 in one word, each the upper half of an f32: no shuffle is needed to widen or to narrow them.
#[derive(Clone, Copy)]
pub(super) struct Bf16Pair {
    low: f32,
    high: f32,
}

const HIGH: u32 = 0xFFFF_0000;

/// The bits of `x` rounded to bf16 (nearest, ties to even) in the upper half; the lower half is left over.
#[inline(always)]
fn round_bf16(x: f32) -> u32 {
    let bits = x.to_bits();
    if x.is_nan() {
        NAN_F32
    } else {
        // An overflow carries into the exponent and ends at infinity, as it must.
        bits.wrapping_add(0x7FFF + ((bits >> 16) & 1))
    }
}

impl Number<4> for Bf16Pair {
    #[inline(always)]
    fn load(bytes: [u8; 4]) -> Self {
        let word = u32::from_ne_bytes(bytes);
        Self {
            low: f32::from_bits(word << 16),
            high: f32::from_bits(word & HIGH),
        }
    }
    #[inline(always)]
    fn store(self) -> [u8; 4] {
        (round_bf16(self.low) >> 16 | round_bf16(self.high) & HIGH).to_ne_bytes()
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        Self {
            low: self.low + other.low,
            high: self.high + other.high,
        }
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        Self {
            low: self.low * other.low,
            high: self.high * other.high,
        }
    }
    #[inline(always)]
    fn least(self, other: Self) -> Self {
        Self {
            low: self.low.least(other.low),
            high: self.high.least(other.high),
        }
    }
    #[inline(always)]
    fn most(self, other: Self) -> Self {
        Self {
            low: self.low.most(other.low),
            high: self.high.most(other.high),
        }
    }
    #[inline(always)]
    fn divide(self, count: u32) -> Self {
        Self {
            low: self.low.divide(count),
            high: self.high.divide(count),
        }
    }
    #[inline(always)]
    fn scale(self, factor: f64) -> Self {
        Self {
            low: self.low.scale(factor),
            high: self.high.scale(factor),
        }
    }
}

macro_rules! integers {
    ($($t:ty, $n:literal, $wide:ty;)*) => {$(
        impl Number<$n> for $t {
            #[inline(always)]
            fn load(bytes: [u8; $n]) -> Self { <$t>::from_ne_bytes(bytes) }
            #[inline(always)]
            fn store(self) -> [u8; $n] { self.to_ne_bytes() }
            #[inline(always)]
            fn add(self, other: Self) -> Self { self.wrapping_add(other) }
            #[inline(always)]
            fn mul(self, other: Self) -> Self { self.wrapping_mul(other) }
            #[inline(always)]
            fn least(self, other: Self) -> Self { self.min(other) }
            #[inline(always)]
            fn most(self, other: Self) -> Self { self.max(other) }
            // Toward zero, in a type that holds the count (i8 does not hold 200 ranks).
            #[inline(always)]
            fn divide(self, count: u32) -> Self { ((self as $wide) / (count.max(1) as $wide)) as $t }
            #[inline(always)]
            fn scale(self, _factor: f64) -> Self { self }
        }
    )*};
}
integers! {
    i64, 8, i64; i32, 4, i64; i16, 2, i64; i8, 1, i64;
    u64, 8, u64; u32, 4, u64; u16, 2, u64; u8, 1, u64;
}

/// The values that change nothing, as bytes of one element.
pub(super) trait Neutral<const N: usize> {
    const ONE: [u8; N];
    /// The identity of min.
    const TOP: [u8; N];
    /// The identity of max.
    const BOTTOM: [u8; N];
}

macro_rules! neutral {
    ($($t:ty, $n:literal, $one:expr, $top:expr, $bottom:expr;)*) => {$(
        impl Neutral<$n> for $t {
            const ONE: [u8; $n] = <$t>::to_ne_bytes($one);
            const TOP: [u8; $n] = <$t>::to_ne_bytes($top);
            const BOTTOM: [u8; $n] = <$t>::to_ne_bytes($bottom);
        }
    )*};
}
neutral! {
    f64, 8, 1.0, f64::INFINITY, f64::NEG_INFINITY;
    f32, 4, 1.0, f32::INFINITY, f32::NEG_INFINITY;
    f16, 2, f16::ONE, f16::INFINITY, f16::NEG_INFINITY;
    bf16, 2, bf16::ONE, bf16::INFINITY, bf16::NEG_INFINITY;
    i64, 8, 1, i64::MAX, i64::MIN; i32, 4, 1, i32::MAX, i32::MIN;
    i16, 2, 1, i16::MAX, i16::MIN; i8, 1, 1, i8::MAX, i8::MIN;
    u64, 8, 1, u64::MAX, u64::MIN; u32, 4, 1, u32::MAX, u32::MIN;
    u16, 2, 1, u16::MAX, u16::MIN; u8, 1, 1, u8::MAX, u8::MIN;
}
