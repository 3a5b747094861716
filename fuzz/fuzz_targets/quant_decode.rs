//! `cargo +nightly fuzz run quant_decode`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| oxccl_fuzz::values::decode(data));
