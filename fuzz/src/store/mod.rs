//! The stores' protocol as its server and its client read it.

#[allow(dead_code, unused_imports, reason = "included for its limits")]
#[path = "../../../crates/ftcore/src/store/keys.rs"]
mod keys;
pub mod tcp;
