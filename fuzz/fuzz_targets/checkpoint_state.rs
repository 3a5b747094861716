//! `cargo +nightly fuzz run checkpoint_state`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| oxccl_fuzz::state::encoded(data));
