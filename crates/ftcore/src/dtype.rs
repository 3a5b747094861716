//! Element types with stable codes, and the Rust types that carry them.

use crate::coded::coded;

coded! {
    /// The element type of a tensor. The numeric codes are part of the wire and plugin formats and never change.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    #[non_exhaustive]
    pub enum DType {
        /// IEEE 754 binary64.
        F64 = 0 => "f64",
        /// IEEE 754 binary32.
        F32 = 1 => "f32",
        /// IEEE 754 binary16.
        F16 = 2 => "f16",
        /// bfloat16: the upper half of a binary32.
        BF16 = 3 => "bf16",
        /// 8-bit float, 4 exponent and 3 mantissa bits, finite variant (OCP OFP8 E4M3).
        F8E4M3 = 4 => "f8e4m3",
        /// 8-bit float, 5 exponent and 2 mantissa bits (OCP OFP8 E5M2).
        F8E5M2 = 5 => "f8e5m2",
        /// Signed 64-bit integer.
        I64 = 6 => "i64",
        /// Signed 32-bit integer.
        I32 = 7 => "i32",
        /// Signed 16-bit integer.
        I16 = 8 => "i16",
        /// Signed 8-bit integer.
        I8 = 9 => "i8",
        /// Unsigned 64-bit integer.
        U64 = 10 => "u64",
        /// Unsigned 32-bit integer.
        U32 = 11 => "u32",
        /// Unsigned 16-bit integer.
        U16 = 12 => "u16",
        /// Unsigned 8-bit integer.
        U8 = 13 => "u8",
        /// Boolean in one byte; results are always 0 or 1.
        Bool = 14 => "bool",
    }
}

impl DType {
    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            Self::F64 | Self::I64 | Self::U64 => 8,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F16 | Self::BF16 | Self::I16 | Self::U16 => 2,
            Self::F8E4M3 | Self::F8E5M2 | Self::I8 | Self::U8 | Self::Bool => 1,
        }
    }

    /// True for every floating-point type.
    pub const fn is_float(self) -> bool {
        matches!(
            self,
            Self::F64 | Self::F32 | Self::F16 | Self::BF16 | Self::F8E4M3 | Self::F8E5M2
        )
    }
}

impl std::str::FromStr for DType {
    type Err = crate::Error;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|d| d.name() == s).ok_or_else(|| {
            let known: Vec<_> = Self::ALL.iter().map(|d| d.name()).collect();
            crate::Error::invalid(format!("unknown dtype '{s}'; known: {}", known.join(", ")))
        })
    }
}

/// An OCP E4M3 value as its bits; arithmetic happens in the backends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(transparent)]
pub struct F8E4M3(pub u8);

/// An OCP E5M2 value as its bits; arithmetic happens in the backends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(transparent)]
pub struct F8E5M2(pub u8);

/// A boolean element as a byte. Not Rust's `bool`, because a peer could send any byte; `get` treats non-zero as true.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(transparent)]
pub struct Bool(pub u8);

impl Bool {
    /// The truth value.
    pub const fn get(self) -> bool {
        self.0 != 0
    }
}

impl From<bool> for Bool {
    fn from(b: bool) -> Self {
        Self(u8::from(b))
    }
}

/// A Rust type that is exactly one element of a [`DType`].
///
/// # Safety
/// The type has the size of `DTYPE`, no padding, no destructor, and every bit pattern is a valid value.
pub unsafe trait Element: Copy + Send + Sync + 'static {
    /// The matching element type.
    const DTYPE: DType;
}

macro_rules! element {
    ($($t:ty => $d:ident),* $(,)?) => {$(
        // SAFETY: a plain number (or a transparent byte): no padding, all bit patterns valid.
        unsafe impl Element for $t { const DTYPE: DType = DType::$d; }
    )*};
}
element! {
    f64 => F64, f32 => F32, half::f16 => F16, half::bf16 => BF16, F8E4M3 => F8E4M3, F8E5M2 => F8E5M2,
    i64 => I64, i32 => I32, i16 => I16, i8 => I8, u64 => U64, u32 => U32, u16 => U16, u8 => U8, Bool => Bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_names_round_trip_and_sizes_fit_the_elements() {
        for d in DType::ALL {
            assert_eq!(DType::from_code(d.code()), Some(d));
            assert_eq!(d.name().parse::<DType>().unwrap(), d);
        }
        assert_eq!(DType::from_code(15), None);
        assert_eq!(DType::BF16.size(), size_of::<half::bf16>());
        assert!("float".parse::<DType>().unwrap_err().to_string().contains("bf16"));
    }
}
