//! `cargo +nightly fuzz run gloo_frames`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| oxccl_fuzz::gloo::frames(data));
