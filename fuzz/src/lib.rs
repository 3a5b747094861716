//! What a stranger's bytes go through, as functions that panic if something is wrong with it (INV-10).
//!
//! The targets in `fuzz_targets/` feed them from libFuzzer; `tests/tests/hostile_bytes` includes the same files and feeds
//! them from a seed. Parsers that are private to their crate are included by path, so that no crate has to publish its own.
//! Each module has `seeds`: valid bytes to begin from.

// The included sources name these from the crate's root.
use ftcore::{Error, ErrorKind, Result, fields, identity, printable};
#[path = "../../crates/ftcore/src/coded.rs"]
mod coded;

pub mod gloo;
pub mod isolate;
pub mod peers;
pub mod state;
pub mod store;
pub mod values;
