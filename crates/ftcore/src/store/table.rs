//! The map behind every store: what each write does to it, without waiting, locking or IO.
//!
//! Keys are bytes, because a peer may send any. Values are shared: a reader takes a reference while it holds the
//! store's lock and copies or sends it afterwards.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::keys::{self, MAX_VALUE};
use crate::{Error, ErrorKind};

/// What an entry costs besides its key and value; so that many tiny keys count against the limit too.
const ENTRY_BYTES: usize = 96;

/// A value in the table.
pub(super) type Value = Arc<Vec<u8>>;

/// Why a write was not done. The table is as before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Refusal {
    /// `add` on a value that does not begin with a decimal number.
    NotANumber,
    /// `add` beyond 64 bits.
    Overflow,
    /// The value would be longer than `MAX_VALUE`.
    TooLong(usize),
    /// The table would be larger than its limit in bytes.
    Full(usize),
    /// The key belongs to this epoch, which is over; its keys were removed.
    Retired(u64),
}

impl Refusal {
    pub(super) fn describe(&self, key: &[u8]) -> String {
        let key = keys::name_bytes(key);
        match self {
            Self::NotANumber => {
                format!("the value of key {key} is not a decimal number, so nothing can be added to it")
            }
            Self::Overflow => format!("the sum at key {key} does not fit 64 bits"),
            Self::TooLong(n) => {
                format!("the value of key {key} would have {n} bytes; at most {MAX_VALUE} are allowed")
            }
            Self::Full(limit) => {
                format!("key {key} does not fit: the store is at its limit of {limit} bytes")
            }
            Self::Retired(epoch) => format!(
                "key {key} is of epoch {epoch}, which is over: its keys were removed; ask for the present epoch"
            ),
        }
    }

    pub(super) fn kind(&self) -> ErrorKind {
        match self {
            Self::Full(_) => ErrorKind::Unavailable,
            Self::Retired(_) => ErrorKind::Aborted,
            _ => ErrorKind::InvalidArgument,
        }
    }

    pub(super) fn into_error(self, op: &'static str, key: &str) -> Error {
        Error::new(self.kind(), self.describe(key.as_bytes())).with_op(op)
    }
}

/// The number at the start of a value, as C's `strtoll` reads it: blanks, a sign, digits; what follows is ignored.
/// (PyTorch's server reads it so, and ranks of both kinds must agree.)
pub(super) fn leading_number(value: &[u8]) -> Option<i64> {
    let text = value.trim_ascii_start();
    let (negative, digits) = match text.split_first() {
        Some((b'-', rest)) => (true, rest),
        Some((b'+', rest)) => (false, rest),
        _ => (false, text),
    };
    let mut sum: Option<i64> = None;
    for digit in digits
        .iter()
        .map_while(|b| b.is_ascii_digit().then(|| i64::from(b - b'0')))
    {
        let signed = if negative { -digit } else { digit };
        sum = Some(sum.unwrap_or(0).checked_mul(10)?.checked_add(signed)?);
    }
    sum
}

/// What is added to; absent counts as 0.
fn number(current: Option<&[u8]>) -> Result<i64, Refusal> {
    current.map_or(Some(0), leading_number).ok_or(Refusal::NotANumber)
}

/// What `add` makes of `current`.
pub(super) fn sum(current: Option<&[u8]>, amount: i64) -> Result<i64, Refusal> {
    number(current)?.checked_add(amount).ok_or(Refusal::Overflow)
}

#[derive(Debug)]
pub(super) struct Table {
    map: BTreeMap<Vec<u8>, Value>,
    bytes: usize,
    limit: usize,
}

impl Default for Table {
    fn default() -> Self {
        Self::with_limit(usize::MAX)
    }
}

impl Table {
    /// An empty table that refuses to grow beyond `limit` bytes.
    pub(super) fn with_limit(limit: usize) -> Self {
        Self {
            map: BTreeMap::new(),
            bytes: 0,
            limit,
        }
    }

    pub(super) fn get(&self, key: &[u8]) -> Option<&Value> {
        self.map.get(key)
    }

    pub(super) fn contains(&self, key: &[u8]) -> bool {
        self.map.contains_key(key)
    }

    pub(super) fn len(&self) -> usize {
        self.map.len()
    }

    /// The keys, sorted.
    pub(super) fn keys(&self) -> impl Iterator<Item = &[u8]> {
        self.map.keys().map(Vec::as_slice)
    }

    pub(super) fn set(&mut self, key: &[u8], value: Vec<u8>) -> Result<(), Refusal> {
        let (cost, freed) = match self.map.get(key) {
            Some(old) => (value.len(), old.len()),
            None => (ENTRY_BYTES + key.len() + value.len(), 0),
        };
        self.charge(cost, freed)?;
        match self.map.get_mut(key) {
            Some(slot) => *slot = Arc::new(value),
            None => {
                self.map.insert(key.to_vec(), Arc::new(value));
            }
        }
        Ok(())
    }

    pub(super) fn add(&mut self, key: &[u8], amount: i64) -> Result<i64, Refusal> {
        let sum = sum(self.get(key).map(|v| v.as_slice()), amount)?;
        self.set(key, sum.to_string().into_bytes())?;
        Ok(sum)
    }

    /// The value that stands afterwards, and whether it was written.
    pub(super) fn compare_set(
        &mut self,
        key: &[u8],
        expected: &[u8],
        desired: &[u8],
    ) -> Result<(Value, bool), Refusal> {
        match self.map.get(key) {
            Some(current) if current.as_slice() != expected => return Ok((current.clone(), false)),
            None if !expected.is_empty() => return Ok((Arc::new(expected.to_vec()), false)),
            _ => {}
        }
        self.set(key, desired.to_vec())?;
        Ok((Arc::new(desired.to_vec()), true))
    }

    /// As `add`, but a sum beyond 64 bits begins again at the other end: what PyTorch's server answers.
    pub(super) fn add_wrapping(&mut self, key: &[u8], amount: i64) -> Result<i64, Refusal> {
        let sum = number(self.get(key).map(|v| v.as_slice()))?.wrapping_add(amount);
        self.set(key, sum.to_string().into_bytes())?;
        Ok(sum)
    }

    /// Appends to a value of up to `most` bytes.
    pub(super) fn append(&mut self, key: &[u8], more: &[u8], most: usize) -> Result<(), Refusal> {
        let Some(current) = self.map.get(key).map(|v| v.len()) else {
            return self.set(key, more.to_vec());
        };
        let len = current.saturating_add(more.len());
        if len > most {
            return Err(Refusal::TooLong(len));
        }
        self.charge(more.len(), 0)?;
        if let Some(slot) = self.map.get_mut(key) {
            Arc::make_mut(slot).extend_from_slice(more);
        }
        Ok(())
    }

    /// True if the key existed.
    pub(super) fn remove(&mut self, key: &[u8]) -> bool {
        let Some(old) = self.map.remove(key) else {
            return false;
        };
        self.bytes = self.bytes.saturating_sub(ENTRY_BYTES + key.len() + old.len());
        true
    }

    /// The keys from `from` on that begin with `prefix`, sorted.
    pub(super) fn keys_from<'a>(&'a self, from: &[u8], prefix: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
        self.map
            .range::<[u8], _>((std::ops::Bound::Included(from), std::ops::Bound::Unbounded))
            .map(|(key, _)| key.as_slice())
            .take_while(move |key| key.starts_with(prefix))
    }

    /// Counts `cost` bytes against the limit and gives `freed` back. Also used for what is stored beside the map.
    pub(super) fn charge(&mut self, cost: usize, freed: usize) -> Result<(), Refusal> {
        let bytes = self.bytes.saturating_sub(freed).saturating_add(cost);
        if bytes > self.limit && bytes > self.bytes {
            return Err(Refusal::Full(self.limit));
        }
        self.bytes = bytes;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_read_as_strtoll_reads_it() {
        let table: [(&str, Option<i64>); 11] = [
            ("12", Some(12)),
            ("12abc", Some(12)),
            (" +7", Some(7)),
            ("-3", Some(-3)),
            ("9223372036854775807", Some(i64::MAX)),
            ("-9223372036854775808", Some(i64::MIN)),
            ("9223372036854775808", None),
            ("", None),
            ("-", None),
            ("abc", None),
            ("--1", None),
        ];
        for (text, expected) in table {
            assert_eq!(leading_number(text.as_bytes()), expected, "{text:?}");
        }
        assert_eq!(sum(None, 5), Ok(5));
        assert_eq!(sum(Some(b"9223372036854775807"), 1), Err(Refusal::Overflow));
        assert_eq!(sum(Some(b""), 1), Err(Refusal::NotANumber));
    }

    #[test]
    fn the_limit_counts_keys_values_and_entries_and_a_refused_write_changes_nothing() {
        let mut t = Table::with_limit(2 * ENTRY_BYTES + 20);
        t.set(b"a", vec![0; 9]).unwrap();
        t.set(b"b", vec![0; 9]).unwrap();
        assert_eq!(t.set(b"c", Vec::new()), Err(Refusal::Full(2 * ENTRY_BYTES + 20)));
        assert!(t.append(b"a", b"x", MAX_VALUE).is_err());
        assert_eq!(t.get(b"a").unwrap().len(), 9);
        assert!(t.remove(b"b"));
        t.append(b"a", b"x", MAX_VALUE).unwrap();
        t.set(b"c", Vec::new()).unwrap();
        assert_eq!(t.len(), 2);
    }

    #[test]
    fn an_appended_value_stays_within_the_limit_of_a_value() {
        let mut t = Table::default();
        t.set(b"k", vec![0; MAX_VALUE]).unwrap();
        assert_eq!(
            t.append(b"k", b"x", MAX_VALUE),
            Err(Refusal::TooLong(MAX_VALUE + 1))
        );
    }
}
