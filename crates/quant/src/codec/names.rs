//! What formats are called, by people and in frames.

use std::fmt;
use std::str::FromStr;

use ftcore::{Error, Result};

use super::Codec;

/// Short names for the default of a kind.
const SHORT: [(&str, &str); 4] = [
    ("int8", "int8-b64"),
    ("int4", "int4-h128"),
    ("int2", "int2-b64"),
    ("fp8", "mx-e4m3"),
];

impl Codec {
    /// One of each format, with signs from seed 0.
    pub const ALL: [Self; 8] = [
        Self::F16,
        Self::Bf16,
        Self::Int8B64,
        Self::Int8B32,
        Self::Int4B64,
        Self::Int4Hadamard { seed: 0 },
        Self::Int2B64,
        Self::MxE4M3,
    ];

    /// The lower-case name, without seed; [`FromStr`] reads it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Int8B64 => "int8-b64",
            Self::Int8B32 => "int8-b32",
            Self::Int4B64 => "int4-b64",
            Self::Int4Hadamard { .. } => "int4-h128",
            Self::Int2B64 => "int2-b64",
            Self::MxE4M3 => "mx-e4m3",
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
            Self::Int4B64 => 9,
            Self::Int2B64 => 10,
        }
    }

    /// Bits per value of a long slice, scales included.
    pub fn bits(self) -> f64 {
        match self {
            Self::F16 | Self::Bf16 => 16.0,
            Self::Int8B64 | Self::MxE4M3 => 8.25,
            Self::Int8B32 => 8.5,
            Self::Int4B64 | Self::Int4Hadamard { .. } => 4.25,
            Self::Int2B64 => 2.25,
        }
    }
}

impl fmt::Display for Codec {
    /// The name, and the seed where there is one: what ranks must agree on.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self {
            Self::Int4Hadamard { seed } => write!(f, ":{seed:016x}"),
            _ => Ok(()),
        }
    }
}

impl FromStr for Codec {
    type Err = Error;

    /// A [`name`](Codec::name), or a short one: `int8`, `int4`, `int2`, `fp8`. `int4-h128:` may be followed by a seed in hexadecimal.
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
        match codec {
            Self::Int4Hadamard { .. } => u64::from_str_radix(parameter, 16)
                .map(|seed| Self::Int4Hadamard { seed })
                .map_err(|e| {
                    Error::invalid(format!("'{parameter}' is not a seed in hexadecimal")).with_source(e)
                }),
            _ => Err(Error::invalid(format!("format {full} takes no ':{parameter}'"))),
        }
    }
}
