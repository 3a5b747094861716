//! `cargo +nightly fuzz run checkpoint_manifest`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| oxccl_fuzz::state::manifest(data));
