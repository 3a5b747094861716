//! Reduction operations and their exact meaning per dtype.

use std::fmt;

/// How values of several ranks become one.
///
/// - Floats: NaN propagates through every reduction (min and max too). f16 and bf16 are accumulated in f32 and rounded
///   to nearest even once at the end of each hop; f8 is not reduced by gloo (`Unsupported`).
/// - Integers wrap around in `Sum` and `Product`. `Avg` on integers divides with rounding toward zero.
/// - `Bool`: results are 0 or 1; `Sum` and `Max` mean or, `Product` and `Min` mean and.
/// - `Avg` divides by the number of ranks that *contributed* to this very reduction (INV-4).
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The sum divided by the number of contributors.
    Avg,
    /// The product.
    Product,
    /// The minimum.
    Min,
    /// The maximum.
    Max,
    /// Bitwise and; integers and bool.
    Band,
    /// Bitwise or; integers and bool.
    Bor,
    /// Bitwise exclusive or; integers and bool.
    Bxor,
    /// Each rank's values times this factor, then the sum; floats only. The caller's input is left as it was until
    /// the result replaces it.
    PremulSum(f64),
}

impl ReduceOp {
    /// The number of operations.
    pub const COUNT: usize = 9;

    /// The stable code (c10d's order).
    pub const fn code(self) -> u8 {
        match self {
            Self::Sum => 0,
            Self::Avg => 1,
            Self::Product => 2,
            Self::Min => 3,
            Self::Max => 4,
            Self::Band => 5,
            Self::Bor => 6,
            Self::Bxor => 7,
            Self::PremulSum(_) => 8,
        }
    }

    /// The name of the operation with that code.
    pub const fn name_of(code: u8) -> &'static str {
        match code {
            0 => "sum",
            1 => "avg",
            2 => "product",
            3 => "min",
            4 => "max",
            5 => "band",
            6 => "bor",
            7 => "bxor",
            8 => "premul_sum",
            _ => "unknown",
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PremulSum(x) => write!(f, "premul_sum({x})"),
            op => f.write_str(Self::name_of(op.code())),
        }
    }
}
