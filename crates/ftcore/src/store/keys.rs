//! What keys and values may be, and how keys are named in error texts.
//!
//! Every store checks its arguments here before it does anything, and every time-out of a store is worded here, so
//! that the same mistake reads the same whichever store is behind the trait.

use std::time::Instant;

use crate::{Error, Result};

/// Longest key in bytes (the limit of PyTorch's server).
pub(super) const MAX_KEY: usize = 8192;
/// Longest value in bytes (the limit of PyTorch's server).
pub(super) const MAX_VALUE: usize = 8 << 20;
/// Most keys in one call (the limit of PyTorch's server).
pub(super) const MAX_KEYS: usize = 131_072;

/// How many keys an error text spells out, and how much of each: texts end up in logs.
const NAMED: usize = 8;
const NAMED_CHARS: usize = 120;

pub(super) fn check_key(op: &'static str, key: &str) -> Result<()> {
    if key.is_empty() {
        return Err(Error::invalid("the key is empty").with_op(op));
    }
    if key.len() > MAX_KEY {
        let text = format!(
            "key {} has {} bytes; at most {MAX_KEY} are allowed",
            name(key),
            key.len()
        );
        return Err(Error::invalid(text).with_op(op));
    }
    Ok(())
}

pub(super) fn check_keys(op: &'static str, keys: &[&str]) -> Result<()> {
    check_count(op, keys.len())?;
    keys.iter().try_for_each(|key| check_key(op, key))
}

pub(super) fn check_pair(op: &'static str, key: &str, value: &[u8]) -> Result<()> {
    check_key(op, key)?;
    if value.len() > MAX_VALUE {
        let text = format!(
            "the value for key {} has {} bytes; at most {MAX_VALUE} are allowed",
            name(key),
            value.len()
        );
        return Err(Error::invalid(text).with_op(op));
    }
    Ok(())
}

pub(super) fn check_pairs(op: &'static str, pairs: &[(&str, &[u8])]) -> Result<()> {
    check_count(op, pairs.len())?;
    pairs
        .iter()
        .try_for_each(|(key, value)| check_pair(op, key, value))
}

pub(super) fn check_barrier(key: &str, world_size: u32) -> Result<()> {
    check_key("store.barrier", key)?;
    if world_size == 0 {
        let text = format!("barrier {} is for 0 callers; at least 1 is needed", name(key));
        return Err(Error::invalid(text).with_op("store.barrier"));
    }
    Ok(())
}

fn check_count(op: &'static str, n: usize) -> Result<()> {
    if n > MAX_KEYS {
        return Err(
            Error::invalid(format!("{n} keys in one call; at most {MAX_KEYS} are allowed")).with_op(op),
        );
    }
    Ok(())
}

/// The key in quotes, escaped and cut to a length fit for a log line.
pub(super) fn name(key: &str) -> String {
    let mut escaped: String = key.escape_debug().take(NAMED_CHARS).collect();
    if escaped.len() < key.len() && escaped.chars().count() == NAMED_CHARS {
        escaped.push('…');
    }
    format!("'{escaped}'")
}

/// As [`name`], for the raw bytes of a key on the wire or in a file.
pub(super) fn name_bytes(key: &[u8]) -> String {
    name(&String::from_utf8_lossy(key))
}

/// The first few keys in quotes and how many more there are.
pub(super) fn names(keys: &[&str]) -> String {
    let mut text = keys
        .iter()
        .take(NAMED)
        .map(|key| name(key))
        .collect::<Vec<_>>()
        .join(", ");
    if let Some(more) = keys.len().checked_sub(NAMED).filter(|more| *more > 0) {
        text.push_str(&format!(" and {more} more"));
    }
    text
}

/// The time-out of a wait for `keys`. At its end the first `asked` of them were looked at, of which `missing` were absent (empty: not known).
pub(super) fn wait_timed_out(
    op: &'static str,
    keys: &[&str],
    asked: usize,
    missing: &[&str],
    since: Instant,
) -> Error {
    let what = if keys.len() == 1 { "key" } else { "keys" };
    let mut text = format!(
        "waited {:.1} s for {what} {}",
        since.elapsed().as_secs_f64(),
        names(keys)
    );
    if keys.len() > 1 && !missing.is_empty() {
        let first = if asked < keys.len() { "the first " } else { "" };
        text.push_str(&format!(
            "; missing {} of {first}{asked}: {}",
            missing.len(),
            names(missing)
        ));
    }
    Error::timeout(text).with_op(op)
}

/// The time-out of a barrier at which `arrived` callers were counted (`None`: not known).
pub(super) fn barrier_timed_out(key: &str, arrived: Option<i64>, world_size: u32, since: Instant) -> Error {
    let arrived = arrived.map_or_else(String::new, |n| format!("; {n} of {world_size} arrived"));
    let text = format!(
        "waited {:.1} s at barrier {} for {world_size} callers{arrived}",
        since.elapsed().as_secs_f64(),
        name(key)
    );
    Error::timeout(text).with_op("store.barrier")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_out_names_all_keys_and_the_missing_ones_but_never_floods_the_log() {
        let e = wait_timed_out("store.wait", &["a", "b\n"], 2, &["b\n"], Instant::now());
        assert_eq!(
            e.to_string(),
            r"store.wait: waited 0.0 s for keys 'a', 'b\n'; missing 1 of 2: 'b\n'"
        );
        let long = "x".repeat(5000);
        let many = vec![long.as_str(); 1000];
        let text = wait_timed_out("store.wait", &many, 1000, &many, Instant::now()).to_string();
        assert!(text.len() < 4096 && text.contains("and 992 more"), "{text}");
        let text = wait_timed_out("store.wait", &many, 64, &["x"], Instant::now()).to_string();
        assert!(text.ends_with("; missing 1 of the first 64: 'x'"), "{text}");
        let e = barrier_timed_out("go", Some(2), 4, Instant::now());
        assert!(
            e.to_string()
                .contains("barrier 'go' for 4 callers; 2 of 4 arrived"),
            "{e}"
        );
    }
}
