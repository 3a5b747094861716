//! Bytes, seconds and bits per second as different types, as people write them.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, Mul, Sub};
use std::str::FromStr;

use ftcore::{Error, Result};
use serde::{Deserialize, Deserializer, Serialize};

/// A number and the letters behind it.
fn split<'a>(text: &'a str, what: &str) -> Result<(f64, &'a str)> {
    let text = text.trim();
    let end = text
        .find(|c: char| !(c.is_ascii_digit() || matches!(c, '.' | '+' | '-')))
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let number = number
        .parse()
        .map_err(|_| Error::invalid(format!("{what} '{text}': this is no number")))?;
    Ok((number, unit.trim()))
}

fn scale(units: &[(&str, f64)], unit: &str) -> Option<f64> {
    let unit = unit.to_ascii_lowercase();
    units.iter().find(|(name, _)| *name == unit).map(|(_, by)| *by)
}

/// Bits per second; positive and finite.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Serialize)]
#[serde(transparent)]
pub struct Rate(f64);

impl Rate {
    /// Errors: `InvalidArgument` unless it is positive and finite.
    pub fn new(bits_per_second: f64) -> Result<Self> {
        if bits_per_second > 0.0 && bits_per_second.is_finite() {
            return Ok(Self(bits_per_second));
        }
        Err(Error::invalid(format!(
            "a rate of {bits_per_second} bit/s: it must be positive and finite"
        )))
    }

    /// In bits per second.
    pub fn bits_per_second(self) -> f64 {
        self.0
    }

    /// How long so many bytes take.
    pub fn time(self, bytes: Bytes) -> Seconds {
        Seconds(bytes.0 as f64 * 8.0 / self.0)
    }

    /// The slower of the two.
    #[must_use]
    pub fn min(self, other: Self) -> Self {
        Self(self.0.min(other.0))
    }

    /// A part of it. A part that is not positive and finite leaves it as it is.
    #[must_use]
    pub(crate) fn part(self, part: f64) -> Self {
        Self::new(self.0 * part).unwrap_or(self)
    }
}

impl FromStr for Rate {
    type Err = Error;

    /// Such as `1gbit`, `100 Mbit/s`, `10G` or `2e9`; powers of 1000, as `tc` has them.
    fn from_str(s: &str) -> Result<Self> {
        if let Ok(number) = s.trim().parse() {
            return Self::new(number);
        }
        let (number, unit) = split(s, "rate")?;
        let unit = unit.to_ascii_lowercase();
        let unit = unit.strip_suffix("/s").unwrap_or(&unit);
        let units = [
            ("", 1.0),
            ("bit", 1.0),
            ("k", 1e3),
            ("kbit", 1e3),
            ("m", 1e6),
            ("mbit", 1e6),
            ("g", 1e9),
            ("gbit", 1e9),
            ("t", 1e12),
            ("tbit", 1e12),
        ];
        let by = scale(&units, unit).ok_or_else(|| {
            Error::invalid(format!(
                "rate '{s}': write bits per second, such as 1gbit or 200mbit"
            ))
        })?;
        Self::new(number * by)
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (by, unit) = match self.0 {
            r if r >= 1e12 => (1e12, "Tbit/s"),
            r if r >= 1e9 => (1e9, "Gbit/s"),
            r if r >= 1e6 => (1e6, "Mbit/s"),
            _ => (1e3, "kbit/s"),
        };
        write!(f, "{} {unit}", short(self.0 / by))
    }
}

/// A duration in seconds; not negative, and finite.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Default, Serialize)]
#[serde(transparent)]
pub struct Seconds(f64);

impl Seconds {
    /// None at all.
    pub const ZERO: Self = Self(0.0);

    /// Errors: `InvalidArgument` if it is negative or not finite.
    pub fn new(seconds: f64) -> Result<Self> {
        if seconds >= 0.0 && seconds.is_finite() {
            return Ok(Self(seconds));
        }
        Err(Error::invalid(format!(
            "a time of {seconds} s: it must not be negative, and finite"
        )))
    }

    /// In seconds.
    pub fn get(self) -> f64 {
        self.0
    }

    /// The longer of the two.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self(self.0.max(other.0))
    }
}

impl Add for Seconds {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}

impl Sub for Seconds {
    type Output = Self;
    /// What is left of it; nothing rather than less.
    fn sub(self, other: Self) -> Self {
        Self((self.0 - other.0).max(0.0))
    }
}

impl Mul<f64> for Seconds {
    type Output = Self;
    /// So many times it. A negative or odd factor counts as none.
    fn mul(self, by: f64) -> Self {
        Self::new(self.0 * by).unwrap_or_default()
    }
}

impl Sum for Seconds {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::ZERO, Add::add)
    }
}

impl FromStr for Seconds {
    type Err = Error;

    /// Such as `25ms`, `1.5 s`, `10min`, `6h`, or seconds without a unit.
    fn from_str(s: &str) -> Result<Self> {
        if let Ok(number) = s.trim().parse() {
            return Self::new(number);
        }
        let (number, unit) = split(s, "time")?;
        let units = [
            ("ns", 1e-9),
            ("us", 1e-6),
            ("µs", 1e-6),
            ("ms", 1e-3),
            ("s", 1.0),
            ("min", 60.0),
            ("h", 3600.0),
            ("d", 86_400.0),
        ];
        let by = scale(&units, unit).ok_or_else(|| {
            Error::invalid(format!(
                "time '{s}': write a number and ns, us, ms, s, min, h or d, such as 25ms"
            ))
        })?;
        Self::new(number * by)
    }
}

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (by, unit) = match self.0 {
            0.0 => (1.0, "s"),
            s if s < 1e-6 => (1e-9, "ns"),
            s if s < 1e-3 => (1e-6, "µs"),
            s if s < 1.0 => (1e-3, "ms"),
            s if s < 600.0 => (1.0, "s"),
            s if s < 36_000.0 => (60.0, "min"),
            s if s < 360_000.0 => (3600.0, "h"),
            _ => (86_400.0, "d"),
        };
        write!(f, "{} {unit}", short(self.0 / by))
    }
}

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl Add for Bytes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self(0), Add::add)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0 as f64;
        let (by, unit) = match bytes {
            b if b >= 1e12 => (1e12, "TB"),
            b if b >= 1e9 => (1e9, "GB"),
            b if b >= 1e6 => (1e6, "MB"),
            b if b >= 1e3 => (1e3, "kB"),
            _ => (1.0, "B"),
        };
        write!(f, "{} {unit}", short(bytes / by))
    }
}

/// Three digits.
fn short(value: f64) -> String {
    match value.abs() {
        v if v >= 99.95 || v == 0.0 => format!("{value:.0}"),
        v if v >= 9.995 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// A text, or a plain number.
#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    Number(f64),
    Text(String),
}

macro_rules! written {
    ($type:ty) => {
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                match Written::deserialize(from)? {
                    Written::Number(number) => Self::new(number),
                    Written::Text(text) => text.parse(),
                }
                .map_err(|e: Error| serde::de::Error::custom(e.message()))
            }
        }
    };
}

written!(Rate);
written!(Seconds);

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn rates_and_times_are_read_as_people_write_them_and_shown_in_three_digits() {
        for (text, bits) in [
            ("1gbit", 1e9),
            ("100 Mbit/s", 1e8),
            ("2.5G", 2.5e9),
            ("64k", 64e3),
            ("2e9", 2e9),
        ] {
            assert_eq!(text.parse::<Rate>().unwrap().bits_per_second(), bits, "{text}");
        }
        for (text, seconds) in [("25ms", 0.025), ("1.5 s", 1.5), ("6h", 21_600.0), ("3", 3.0)] {
            assert_eq!(text.parse::<Seconds>().unwrap().get(), seconds, "{text}");
        }
        let shown = [
            Rate::new(2.5e9).unwrap().to_string(),
            Seconds::new(0.0123).unwrap().to_string(),
            Bytes(12_345_678).to_string(),
        ];
        assert_eq!(shown, ["2.50 Gbit/s", "12.3 ms", "12.3 MB"]);
    }

    #[test]
    fn what_is_no_rate_or_time_is_refused_with_what_to_write() {
        for text in ["0", "-1gbit", "1 GB/s", "NaN", "inf", "1 parsec", "", "fast"] {
            let e = text.parse::<Rate>().unwrap_err();
            assert!(e.message().contains("rate"), "{text}: {e}");
        }
        for text in ["-1s", "NaN", "inf", "1 parsec", ""] {
            assert!(text.parse::<Seconds>().is_err(), "{text}");
        }
    }
}
