//! What formats are called, by people and in frames.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use ftcore::{Error, Result};

use super::Codec;

/// The default number of values per row.
const ROW: NonZeroU32 = NonZeroU32::MIN.saturating_add(1023);

/// The most values per row that a name may ask for.
const LONGEST_ROW: u32 = 1 << 24;

/// Short names for the default of a kind.
const SHORT: [(&str, &str); 6] = [
    ("int8", "int8-b64"),
    ("int6", "int6-b64"),
    ("int4", "int4-h128"),
    ("int2", "int2-b64"),
    ("fp8", "mx-e4m3"),
    ("e3m0", "e3m0-b64"),
];

impl Codec {
    /// One of each format, with signs from seed 0 and rows of 1024.
    pub const ALL: [Self; 13] = [
        Self::F16,
        Self::Bf16,
        Self::Int8B64,
        Self::Int8B32,
        Self::Int6B64,
        Self::Int4B64,
        Self::Int4Hadamard { seed: 0 },
        Self::Int2B64,
        Self::E3M0B64,
        Self::MxE4M3,
        Self::MxE5M2,
        Self::RowE4M3 { row: ROW },
        Self::RowInt8 { row: ROW },
    ];

    /// The lower-case name, without seed or row length; [`FromStr`] reads it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Int8B64 => "int8-b64",
            Self::Int8B32 => "int8-b32",
            Self::Int6B64 => "int6-b64",
            Self::Int4B64 => "int4-b64",
            Self::Int4Hadamard { .. } => "int4-h128",
            Self::Int2B64 => "int2-b64",
            Self::E3M0B64 => "e3m0-b64",
            Self::MxE4M3 => "mx-e4m3",
            Self::MxE5M2 => "mx-e5m2",
            Self::RowE4M3 { .. } => "e4m3-row",
            Self::RowInt8 { .. } => "int8-row",
        }
    }

    /// The stable code in frames.
    pub const fn code(self) -> u8 {
        match self {
            Self::F16 => 1,
            Self::Bf16 => 2,
            Self::Int8B64 => 3,
            Self::Int8B32 => 4,
            Self::Int4Hadamard { .. } => 5,
            Self::MxE4M3 => 6,
            Self::MxE5M2 => 7,
            Self::Int6B64 => 8,
            Self::Int4B64 => 9,
            Self::Int2B64 => 10,
            Self::E3M0B64 => 11,
            Self::RowE4M3 { .. } => 12,
            Self::RowInt8 { .. } => 13,
        }
    }

    /// Bits per value of a long slice, scales included.
    pub fn bits(self) -> f64 {
        match self {
            Self::F16 | Self::Bf16 => 16.0,
            Self::Int8B64 | Self::MxE4M3 | Self::MxE5M2 => 8.25,
            Self::Int8B32 => 8.5,
            Self::Int6B64 => 6.25,
            Self::Int4B64 | Self::Int4Hadamard { .. } | Self::E3M0B64 => 4.25,
            Self::Int2B64 => 2.25,
            Self::RowE4M3 { row } | Self::RowInt8 { row } => {
                let row = f64::from(row.get());
                8.0 * (4.0 + 4.0 * (row / 4.0).ceil()) / row
            }
        }
    }
}

impl fmt::Display for Codec {
    /// The name, and the seed or row length where there is one: what ranks must agree on.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self {
            Self::Int4Hadamard { seed } => write!(f, ":{seed:016x}"),
            Self::RowE4M3 { row } | Self::RowInt8 { row } => write!(f, ":{row}"),
            _ => Ok(()),
        }
    }
}

impl FromStr for Codec {
    type Err = Error;

    /// A [`name`](Codec::name), or a short one: `int8`, `int6`, `int4`, `int2`, `fp8`, `e3m0`. `int4-h128:` may be followed by a seed in
    /// hexadecimal, `e4m3-row:` and `int8-row:` by the values per row.
    fn from_str(s: &str) -> Result<Self> {
        let (name, parameter) = match s.split_once(':') {
            Some((name, parameter)) => (name, Some(parameter)),
            None => (s, None),
        };
        let full = SHORT.iter().find(|(short, _)| *short == name);
        let full = full.map_or(name, |(_, full)| full);
        let Some(codec) = Self::ALL.into_iter().find(|c| c.name() == full) else {
            let known: Vec<_> = SHORT
                .iter()
                .map(|(short, _)| *short)
                .chain(Self::ALL.iter().map(|c| c.name()))
                .collect();
            return Err(Error::invalid(format!(
                "unknown format '{s}'; known: {}",
                known.join(", ")
            )));
        };
        let Some(parameter) = parameter else {
            return Ok(codec);
        };
        let row = || {
            let row = parameter
                .parse()
                .ok()
                .filter(|r: &NonZeroU32| r.get() <= LONGEST_ROW);
            row.ok_or_else(|| {
                Error::invalid(format!(
                    "'{parameter}' is not a number of values per row (1 to {LONGEST_ROW})"
                ))
            })
        };
        match codec {
            Self::Int4Hadamard { .. } => u64::from_str_radix(parameter, 16)
                .map(|seed| Self::Int4Hadamard { seed })
                .map_err(|e| {
                    Error::invalid(format!("'{parameter}' is not a seed in hexadecimal")).with_source(e)
                }),
            Self::RowE4M3 { .. } => row().map(|row| Self::RowE4M3 { row }),
            Self::RowInt8 { .. } => row().map(|row| Self::RowInt8 { row }),
            _ => Err(Error::invalid(format!("format {full} takes no ':{parameter}'"))),
        }
    }
}
