//! `cargo +nightly fuzz run store_requests`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| oxccl_fuzz::store::tcp::requests(data));
